//! Completion channels: a socket that the router sends one event by for each armed CQ that got a
//! completion.
use crate::event_pipe::{EventOutcome, EventPipe, EventRead};
use crate::lock;
use crate::registry::Tag;
use crate::session::Session;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_verbs::VerbsError;
use std::sync::Arc;

/// A completion channel.
#[derive(Debug)]
pub struct CompletionChannel {
    session: Arc<Session>,
    handle: Handle,
    events: EventPipe,
}

impl CompletionChannel {
    pub fn create(session: &Arc<Session>, context: Handle) -> Result<Self, VerbsError> {
        let (reply, mut descriptors) = session.call(&Request::CreateChannel { context })?;
        match (reply, descriptors.pop().map(Into::into)) {
            (Reply::Channel { channel }, Some(pipe)) => {
                let events = EventPipe::new(session.clone(), pipe);
                Ok(Self { session: session.clone(), handle: channel, events })
            }
            _ => Err(session.nonsense()),
        }
    }

    pub fn destroy(&self) -> Result<(), VerbsError> {
        self.session.destroy(&Request::DestroyChannel { channel: self.handle })
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The pipe that the application waits on.
    pub fn events(&self) -> &EventPipe {
        &self.events
    }

    /// Waits for the next event and runs `deliver` with the tag of its CQ, which can't be destroyed
    /// meanwhile. Once the router is gone, every CQ of the channel gets one event, so that its
    /// flushed requests are polled.
    ///
    /// # Errors
    /// As `read`: Interrupted, WouldBlock (on a non-blocking descriptor). `None` inside: the router
    /// is gone, and every CQ was notified.
    pub fn wait(&self, deliver: &mut dyn FnMut(Tag)) -> EventOutcome<()> {
        self.events.wait(|event| self.handle_event(event, deliver))
    }

    /// Takes the result of a read of [`Self::events`]. False: nothing for the caller, who reads on.
    ///
    /// # Errors
    /// As of [`Self::wait`].
    pub fn handle_event(&self, event: EventRead, deliver: &mut dyn FnMut(Tag)) -> EventOutcome<bool> {
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
