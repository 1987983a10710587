//! Completion channels: a socket that the router sends one event by for each armed CQ that got a
//! completion.
use crate::lock;
use crate::registry::Tag;
use crate::session::Session;
use freeflow_protocol::library::{EVENT_BYTES, Handle, Reply, Request};
use freeflow_verbs::VerbsError;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// A completion channel.
#[derive(Debug)]
pub struct CompletionChannel {
    session: Arc<Session>,
    handle: Handle,
    pipe: OwnedFd,
}

impl CompletionChannel {
    pub fn create(session: &Arc<Session>, context: Handle) -> Result<Self, VerbsError> {
        let (reply, mut descriptors) = session.call(&Request::CreateChannel { context })?;
        match (reply, descriptors.pop()) {
            (Reply::Channel { channel }, Some(pipe)) => Ok(Self { session: session.clone(), handle: channel, pipe }),
            _ => Err(session.nonsense()),
        }
    }

    pub fn destroy(&self) -> Result<(), VerbsError> {
        self.session.destroy(&Request::DestroyChannel { channel: self.handle })
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The application's descriptor to wait on: readable when there is an event. It may make it
    /// non-blocking.
    pub fn descriptor(&self) -> RawFd {
        self.pipe.as_raw_fd()
    }

    /// Waits for the next event and runs `deliver` with the tag of its CQ, which can't be destroyed
    /// meanwhile. Once the router is gone, every CQ of the channel gets one event, so that its
    /// flushed requests are polled.
    ///
    /// # Errors
    /// As `read`: Interrupted, WouldBlock (on a non-blocking descriptor). `None` inside: the router
    /// is gone, and every CQ was told.
    pub fn wait(&self, deliver: &mut dyn FnMut(Tag)) -> Result<(), Option<io::Error>> {
        self.check()?;
        while !self.handle_event(read_event(&self.pipe), deliver)? {}
        Ok(())
    }

    /// Before a caller waits by reads of its own from [`Self::descriptor`].
    ///
    /// # Errors
    /// As of [`Self::wait`].
    pub fn check(&self) -> Result<(), Option<io::Error>> {
        if self.session.left_behind() { Err(None) } else { Ok(()) }
    }

    /// Takes the result of such a read, see [`event_of`]. False: nothing for the caller, who reads
    /// on.
    ///
    /// # Errors
    /// As of [`Self::wait`].
    pub fn handle_event(
        &self,
        event: io::Result<Option<[u32; 2]>>,
        deliver: &mut dyn FnMut(Tag),
    ) -> Result<bool, Option<io::Error>> {
        if let Some([cookie, _]) = event.map_err(Some)? {
            return Ok(self.session.deliver_cq(cookie, deliver));
        }
        self.session.mark_dead();
        let mut objects = lock(&self.session.objects);
        let unreported = objects
            .cqs
            .values_mut()
            .find(|entry| entry.channel == Some(self.handle) && !entry.death_reported && entry.tag != 0);
        let entry = unreported.ok_or(None)?;
        entry.death_reported = true;
        deliver(entry.tag);
        Ok(true)
    }
}

/// Reads one event; `None` at the end of the pipe, which is the end of the router. A hung-up pipe
/// is drained first.
pub(crate) fn read_event(pipe: &OwnedFd) -> io::Result<Option<[u32; 2]>> {
    let mut bytes = [0; EVENT_BYTES];
    let count = rustix::io::read(pipe.as_fd(), &mut bytes)?;
    Ok(event_of(&bytes, count))
}

/// The event of a record of which so many bytes were read; `None`: see [`read_event`].
pub fn event_of(record: &[u8; EVENT_BYTES], count: usize) -> Option<[u32; 2]> {
    if count != EVENT_BYTES {
        // One event a record: anything shorter is the end.
        return None;
    }
    let [a, b, c, d, e, f, g, h] = *record;
    Some([u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])])
}
