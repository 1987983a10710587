//! Pipes of events. The router holds the write ends; a pipe that is full keeps its events here, owed, until there is
//! room. When the router dies the read ends reach end of file, which is how a library learns of it.
use crate::slab::{Key, Slab};
use freeflow_engine::SessionId;
use freeflow_protocol::library::EVENT_BYTES;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

/// Events owed to one pipe. A completion channel owes at most one event; an application that never reads its
/// asynchronous events and reaches this is cut off.
const OWED_COUNT_MAX: usize = 65_536;

/// Name of a pipe.
pub type PipeId = Key;

pub struct EventPipe {
    session: SessionId,
    write: OwnedFd,
    owed: VecDeque<[u8; EVENT_BYTES]>,
}

/// What became of an event.
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
        if !self.is_behind() && write_event(&self.write, &event) {
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
            if !write_event(&self.write, event) {
                return false;
            }
            self.owed.pop_front();
        }
        true
    }
}

/// Whether the pipe took it. Events are shorter than PIPE_BUF, so they are written whole or not at all.
fn write_event(pipe: &OwnedFd, event: &[u8; EVENT_BYTES]) -> bool {
    loop {
        match rustix::io::write(pipe, event) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return false,
            // Written; or the application closed its end, and nobody misses the event.
            Ok(_) | Err(_) => return true,
        }
    }
}

/// All pipes of all sessions.
#[derive(Default)]
pub struct Pipes {
    pipes: Slab<EventPipe>,
    owing: Vec<PipeId>,
}

impl Pipes {
    pub fn insert(&mut self, session: SessionId, write: OwnedFd) -> PipeId {
        self.pipes.insert(EventPipe { session, write, owed: VecDeque::new() })
    }

    pub fn remove(&mut self, id: PipeId) -> Option<EventPipe> {
        self.pipes.remove(id)
    }

    pub fn remove_session(&mut self, session: SessionId) -> Vec<EventPipe> {
        let of_session = self.pipes.keys_where(|pipe| pipe.session == session);
        of_session.into_iter().filter_map(|id| self.pipes.remove(id)).collect()
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
            self.owing.push(id);
        }
        sent
    }

    pub fn owes(&self) -> bool {
        !self.owing.is_empty()
    }

    /// Tries again to send what is owed.
    pub fn pay(&mut self) {
        let mut owing = std::mem::take(&mut self.owing);
        owing.retain(|&id| self.pipes.get_mut(id).is_some_and(|pipe| !pipe.pay()));
        self.owing = owing;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipe() -> (OwnedFd, OwnedFd) {
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK | rustix::pipe::PipeFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn a_full_pipe_owes_and_pays_in_order() {
        let (read, write) = pipe();
        let mut pipes = Pipes::default();
        let id = pipes.insert(SessionId { index: 0, generation: 0 }, write);
        let mut sent = 0;
        while pipes.send(id, sent, 0) == Sent::Yes {
            sent += 1;
        }
        assert!(pipes.owes() && pipes.is_behind(id));
        let mut expected = 0;
        let mut bytes = [0; EVENT_BYTES];
        while expected <= sent {
            while rustix::io::read(&read, &mut bytes) == Ok(EVENT_BYTES) {
                assert_eq!(u32::from_le_bytes(bytes[..4].try_into().unwrap()), expected);
                expected += 1;
            }
            pipes.pay();
        }
        assert!(!pipes.owes());
        assert!(pipes.remove(id).is_some() && pipes.remove(id).is_none());
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
