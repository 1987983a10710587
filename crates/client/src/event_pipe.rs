//! The socket by which the router sends events, one a record: those of a completion channel, and the
//! asynchronous ones of a context.
use crate::session::Session;
use freeflow_protocol::library::EVENT_BYTES;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Two numbers, whose meaning the kind of pipe says.
pub type Event = [u32; 2];

/// One read of a pipe; `None`: its end, which is the end of the router.
pub type EventRead = io::Result<Option<Event>>;

/// Errors are those of `read`; `None` inside: the router is gone, and that was reported.
pub type EventOutcome<T> = Result<T, Option<io::Error>>;

/// The program's end of such a socket.
#[derive(Debug)]
pub struct EventPipe {
    session: Arc<Session>,
    socket: OwnedFd,
}

impl EventPipe {
    pub(crate) fn new(session: Arc<Session>, socket: OwnedFd) -> Self {
        Self { session, socket }
    }

    /// The application's descriptor to wait on: readable when there is an event. It may make it
    /// non-blocking.
    pub fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// The descriptor, for a caller who waits by reads of its own.
    ///
    /// # Errors
    /// `None` inside: a fork has left the session behind.
    pub fn begin_wait(&self) -> EventOutcome<RawFd> {
        if self.session.left_behind() { Err(None) } else { Ok(self.descriptor()) }
    }

    /// Reads until `handle` says that it has delivered something.
    pub(crate) fn wait(&self, mut handle: impl FnMut(EventRead) -> EventOutcome<bool>) -> EventOutcome<()> {
        self.begin_wait()?;
        while !handle(self.read())? {}
        Ok(())
    }

    /// A hung-up pipe is drained before its end is read.
    fn read(&self) -> EventRead {
        let mut record = [0; EVENT_BYTES];
        let count = rustix::io::read(self.socket.as_fd(), &mut record)?;
        Ok(event_of(&record, count))
    }
}

/// The event of a record of which so many bytes were read; `None`: the end of the pipe.
pub fn event_of(record: &[u8; EVENT_BYTES], count: usize) -> Option<Event> {
    if count != EVENT_BYTES {
        // One event a record: anything shorter is the end.
        return None;
    }
    let [a, b, c, d, e, f, g, h] = *record;
    Some([u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])])
}
