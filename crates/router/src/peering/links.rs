//! The connections of the peers thread, and the one place where it waits for them.
//!
//! A turn costs what happens in it, however many connections there are: epoll names those that have something, and what
//! is to be written, is due, or has not proved itself is noted when it becomes so.
//!
//! Invariant: [`Links::settle`] follows each change of a link, so that epoll waits for what the link waits for.
use super::deadlines::Deadlines;
use super::link::{Flow, Link};
use super::state::ConnectionId;
use freeflow_protocol::peer::PeerMessage;
use freeflow_verbs::{Duration, Instant};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, epoll::EventFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{BorrowedFd, OwnedFd};

/// Events of one turn: each connection that has something comes in its turn, and between two turns commands do.
const EVENT_COUNT: usize = 128;
/// In what epoll says, in the place of a connection.
const WAKER: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - 1;

/// Owner of a descriptor that is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topic {
    Waker,
    Listener,
    Link(ConnectionId),
}

struct Entry {
    link: Link,
    /// As epoll has it.
    interest: EventFlags,
}

pub struct Links {
    epoll: OwnedFd,
    entries: BTreeMap<ConnectionId, Entry>,
    /// Of the connections that ever were.
    count: u64,
    /// When one has taken too long.
    deadlines: Deadlines<ConnectionId>,
    /// Something was put there to be written, and not tried.
    unwritten: BTreeSet<ConnectionId>,
    /// The kernel did not take all of it.
    blocked: BTreeSet<ConnectionId>,
    /// Accepted, and not proved, by address.
    pending: BTreeMap<IpAddr, BTreeSet<ConnectionId>>,
    is_listener_waited_for: bool,
}

fn timespec(span: Duration) -> Timespec {
    Timespec { tv_sec: (span.0 / 1_000_000_000) as i64, tv_nsec: (span.0 % 1_000_000_000) as _ }
}

impl Links {
    /// Errors: there is no descriptor left.
    pub fn new(waker: BorrowedFd<'_>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, waker, epoll::EventData::new_u64(WAKER), EventFlags::IN)?;
        Ok(Self {
            epoll,
            entries: BTreeMap::new(),
            count: 0,
            deadlines: Deadlines::default(),
            unwritten: BTreeSet::new(),
            blocked: BTreeSet::new(),
            pending: BTreeMap::new(),
            is_listener_waited_for: false,
        })
    }

    /// Whether connections are waited for. A listener that is closed is not any more by itself.
    pub fn set_listener(&mut self, listener: Option<&TcpListener>, waits: bool) -> io::Result<()> {
        let Some(listener) = listener else {
            self.is_listener_waited_for = false;
            return Ok(());
        };
        if waits == self.is_listener_waited_for {
            return Ok(());
        }
        if waits {
            epoll::add(&self.epoll, listener, epoll::EventData::new_u64(LISTENER), EventFlags::IN)?;
        } else {
            epoll::delete(&self.epoll, listener)?;
        }
        self.is_listener_waited_for = waits;
        Ok(())
    }

    /// Errors: the kernel does not watch so many.
    pub fn insert(&mut self, link: Link) -> io::Result<ConnectionId> {
        let (id, interest) = (self.count + 1, link.interest());
        epoll::add(&self.epoll, link.stream(), epoll::EventData::new_u64(id), interest)?;
        self.count = id;
        if link.is_pending() {
            self.pending.entry(link.from).or_default().insert(id);
        }
        self.entries.insert(id, Entry { link, interest });
        self.settle(id);
        Ok(id)
    }

    pub fn get(&self, id: ConnectionId) -> Option<&Link> {
        self.entries.get(&id).map(|entry| &entry.link)
    }

    /// For changes after which nothing else is waited for than before; else [`Self::settle`] follows.
    pub fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Link> {
        self.entries.get_mut(&id).map(|entry| &mut entry.link)
    }

    pub fn matching(&self, which: impl Fn(&Link) -> bool) -> Vec<ConnectionId> {
        self.entries.iter().filter(|(_, entry)| which(&entry.link)).map(|(&id, _)| id).collect()
    }

    /// Accepted from this address and not proved, the oldest first.
    pub fn pending(&self, from: IpAddr) -> impl ExactSizeIterator<Item = ConnectionId> {
        self.pending.get(&from).map(BTreeSet::iter).unwrap_or_default().copied()
    }

    /// Brings what is waited for up to the link's state.
    pub fn settle(&mut self, id: ConnectionId) {
        let Some(Entry { link, interest }) = self.entries.get_mut(&id) else { return };
        if !link.is_pending() {
            forget_pending(&mut self.pending, link.from, id);
        }
        if link.interest() == EventFlags::IN | EventFlags::RDHUP {
            self.blocked.remove(&id);
        } else {
            self.blocked.insert(id);
        }
        let (before, now) = (*interest, link.interest());
        // It fails for want of memory at most: then the connection ends when its time is over.
        if before != now && epoll::modify(&self.epoll, link.stream(), epoll::EventData::new_u64(id), now).is_ok() {
            *interest = now;
        }
        self.deadlines.set(id, link.deadline());
    }

    /// Puts a message behind what is to be written. Whether it is better written at once.
    pub fn send(&mut self, now: Instant, id: ConnectionId, message: &PeerMessage) -> bool {
        let Some(link) = self.get_mut(id) else { return false };
        link.send(now, message);
        let is_long = link.is_long();
        self.unwritten.insert(id);
        is_long
    }

    /// Writes as much as there is and goes.
    pub fn flush(&mut self, now: Instant, id: ConnectionId) -> Flow {
        self.unwritten.remove(&id);
        let Some(entry) = self.entries.get_mut(&id) else { return Flow::On };
        let flow = entry.link.flush(now);
        self.settle(id);
        flow
    }

    /// Those that something was put into since they were written last.
    pub fn unwritten(&self) -> Vec<ConnectionId> {
        self.unwritten.iter().copied().collect()
    }

    pub fn remove(&mut self, id: ConnectionId) -> Option<Link> {
        let Entry { link, .. } = self.entries.remove(&id)?;
        let _ = epoll::delete(&self.epoll, link.stream());
        self.deadlines.set(id, None);
        self.unwritten.remove(&id);
        self.blocked.remove(&id);
        forget_pending(&mut self.pending, link.from, id);
        Some(link)
    }

    /// Connections that have taken too long.
    pub fn take_due(&mut self, now: Instant) -> Vec<ConnectionId> {
        self.deadlines.take_due(now)
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.next()
    }

    /// The ready ones of the descriptors that something is awaited from.
    pub fn wait(&self, timeout: Duration) -> io::Result<Vec<(Topic, EventFlags)>> {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENT_COUNT);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timespec(timeout))) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = events.into_iter().map(|event| {
            let topic = match event.data.u64() {
                WAKER => Topic::Waker,
                LISTENER => Topic::Listener,
                id => Topic::Link(id),
            };
            (topic, event.flags)
        });
        Ok(ready.collect())
    }

    /// The same where nothing is to be read: only for the waker, and for room to write.
    pub fn wait_for_room(&self, waker: BorrowedFd<'_>, timeout: Duration) -> io::Result<Vec<(Topic, EventFlags)>> {
        let mut topics = vec![Topic::Waker];
        let mut polled = vec![PollFd::from_borrowed_fd(waker, PollFlags::IN)];
        for &id in &self.blocked {
            if let Some(link) = self.get(id) {
                topics.push(Topic::Link(id));
                polled.push(PollFd::new(link.stream(), PollFlags::OUT));
            }
        }
        match rustix::event::poll(&mut polled, Some(&timespec(timeout))) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        }
        // Of one that has ended it is enough to hear when it is read again.
        let ready = topics.into_iter().zip(polled.iter().map(PollFd::revents));
        let flags = |(topic, flags): (Topic, PollFlags)| match topic {
            Topic::Waker => flags.contains(PollFlags::IN).then_some((topic, EventFlags::IN)),
            _ => flags.contains(PollFlags::OUT).then_some((topic, EventFlags::OUT)),
        };
        Ok(ready.filter_map(flags).collect())
    }
}

fn forget_pending(pending: &mut BTreeMap<IpAddr, BTreeSet<ConnectionId>>, from: IpAddr, id: ConnectionId) {
    if let Some(ids) = pending.get_mut(&from) {
        ids.remove(&id);
        if ids.is_empty() {
            pending.remove(&from);
        }
    }
}
