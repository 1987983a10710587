//! Pipes of events: pairs of sockets, see [`freeflow_shm::fd::event_sockets`]. The router holds the ends to write; a
//! pipe that is full keeps its events here, owed, until there is room. When the router dies the
//! other ends reach end of file, which is how a library learns of it.
use crate::base::slab::{Key, Slab};
use freeflow_engine::{CqId, SessionId};
use freeflow_protocol::library::EVENT_BYTES;
use freeflow_shm::fd::send_record;
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::OwnedFd;

/// Events owed to one pipe. A completion channel owes at most one event; an application that never reads its
/// asynchronous events and reaches this is cut off.
const OWED_COUNT_MAX: usize = 65_536;

/// Full pipes that are tried again at a time: a tenant that reads none of its thousands costs others little.
const PAY_COUNT_MAX: usize = 64;

/// Bytes that one pipe holds, with the kernel's overhead; as much as the kernel's own pipes.
pub const PIPE_BYTES: usize = 64 * 1024;

/// Name of a pipe.
pub type PipeId = Key;

pub struct EventPipe {
    session: SessionId,
    write: OwnedFd,
    owed: VecDeque<[u8; EVENT_BYTES]>,
    /// CQs with completions that this channel has no room to notify of, in their order: one that is
    /// armed again at once comes last.
    waiting: Vec<CqId>,
}

/// Result of sending an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// In the pipe; or nobody will ever read it.
    Yes,
    Owed,
    /// Nobody reads, and too much is owed.
    TooMuch,
}

impl EventPipe {
    fn is_behind(&self) -> bool {
        !self.owed.is_empty()
    }

    fn send(&mut self, event: [u8; EVENT_BYTES]) -> Sent {
        if !self.is_behind() && send_record(&self.write, &event) {
            return Sent::Yes;
        }
        if self.owed.len() >= OWED_COUNT_MAX {
            return Sent::TooMuch;
        }
        self.owed.push_back(event);
        Sent::Owed
    }

    /// Whether everything owed is sent now.
    fn pay(&mut self) -> bool {
        while let Some(event) = self.owed.front() {
            if !send_record(&self.write, event) {
                return false;
            }
            self.owed.pop_front();
        }
        true
    }
}

/// All pipes of all sessions.
#[derive(Default)]
pub struct Pipes {
    pipes: Slab<EventPipe>,
    by_session: BTreeSet<(SessionId, PipeId)>,
    owing: VecDeque<PipeId>,
}

impl Pipes {
    pub fn insert(&mut self, session: SessionId, write: OwnedFd) -> PipeId {
        let (owed, waiting) = (VecDeque::new(), Vec::new());
        let id = self.pipes.insert(EventPipe { session, write, owed, waiting });
        self.by_session.insert((session, id));
        id
    }

    pub fn remove(&mut self, id: PipeId) -> Option<EventPipe> {
        let pipe = self.pipes.remove(id)?;
        self.by_session.remove(&(pipe.session, id));
        Some(pipe)
    }

    pub fn remove_session(&mut self, session: SessionId) -> Vec<EventPipe> {
        let (first, last) = (Key { index: 0, generation: 0 }, Key { index: u32::MAX, generation: u32::MAX });
        let of_session: Vec<_> = self.by_session.range((session, first)..=(session, last)).copied().collect();
        of_session.into_iter().filter_map(|(_, id)| self.remove(id)).collect()
    }

    /// Whether events are owed already, so that a further one would have to wait.
    pub fn is_behind(&self, id: PipeId) -> bool {
        self.pipes.get(id).is_some_and(EventPipe::is_behind)
    }

    pub fn send(&mut self, id: PipeId, first: u32, second: u32) -> Sent {
        let mut event = [0; EVENT_BYTES];
        event[..4].copy_from_slice(&first.to_le_bytes());
        event[4..].copy_from_slice(&second.to_le_bytes());
        let Some(pipe) = self.pipes.get_mut(id) else { return Sent::Yes };
        let was_behind = pipe.is_behind();
        let sent = pipe.send(event);
        if sent == Sent::Owed && !was_behind {
            self.owing.push_back(id);
        }
        sent
    }

    pub fn owes(&self) -> bool {
        !self.owing.is_empty()
    }

    /// `cq` is named by [`Self::pay`] once the pipe owes nothing more.
    pub fn wait_for_room(&mut self, id: PipeId, cq: CqId) {
        if let Some(pipe) = self.pipes.get_mut(id) {
            pipe.waiting.push(cq);
        }
    }

    /// The CQ is gone: who makes and destroys them while nobody reads leaves nothing here.
    pub fn stop_waiting(&mut self, id: PipeId, cq: CqId) {
        if let Some(pipe) = self.pipes.get_mut(id) {
            pipe.waiting.retain(|waiting| *waiting != cq);
        }
    }

    /// Tries again to send what is owed, by a few pipes at a time. Adds the CQs that waited to `free`.
    pub fn pay(&mut self, free: &mut Vec<CqId>) {
        for _ in 0..self.owing.len().min(PAY_COUNT_MAX) {
            let Some(id) = self.owing.pop_front() else { break };
            let Some(pipe) = self.pipes.get_mut(id) else { continue };
            if pipe.pay() {
                free.append(&mut pipe.waiting);
            } else {
                self.owing.push_back(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipe() -> (OwnedFd, OwnedFd) {
        let (read, write) = freeflow_shm::fd::event_sockets(PIPE_BYTES).unwrap();
        freeflow_shm::fd::set_nonblocking(&read, true).unwrap();
        (read, write)
    }

    #[test]
    fn a_full_pipe_keeps_what_it_owes_and_sends_it_in_order() {
        let (read, write) = pipe();
        let mut pipes = Pipes::default();
        let id = pipes.insert(SessionId { index: 0, generation: 0 }, write);
        let mut sent = 0;
        while pipes.send(id, sent, 0) == Sent::Yes {
            sent += 1;
        }
        assert!(pipes.owes() && pipes.is_behind(id));
        let cqs = [5, 3, 9].map(|index| CqId { index, generation: 1 });
        cqs.iter().for_each(|cq| pipes.wait_for_room(id, *cq));
        let (mut expected, mut free) = (0, Vec::new());
        let mut bytes = [0; EVENT_BYTES];
        while expected <= sent {
            while rustix::io::read(&read, &mut bytes) == Ok(EVENT_BYTES) {
                assert_eq!(u32::from_le_bytes(bytes[..4].try_into().unwrap()), expected);
                expected += 1;
            }
            pipes.pay(&mut free);
        }
        assert!(!pipes.owes());
        assert_eq!(free, cqs);
        assert!(pipes.remove(id).is_some() && pipes.remove(id).is_none());
    }

    #[test]
    fn a_cq_that_is_gone_waits_no_more() {
        let (_read, write) = pipe();
        let mut pipes = Pipes::default();
        let id = pipes.insert(SessionId { index: 0, generation: 0 }, write);
        while pipes.send(id, 0, 0) == Sent::Yes {}
        for generation in 0..1000 {
            let cq = CqId { index: 3, generation };
            pipes.wait_for_room(id, cq);
            pipes.wait_for_room(id, cq);
            pipes.stop_waiting(id, cq);
        }
        assert!(pipes.remove(id).unwrap().waiting.is_empty());
    }

    #[test]
    fn a_pipe_that_nobody_reads_is_silent() {
        let (read, write) = pipe();
        let mut pipes = Pipes::default();
        let id = pipes.insert(SessionId { index: 0, generation: 0 }, write);
        drop(read);
        assert_eq!(pipes.send(id, 1, 0), Sent::Yes);
    }
}
