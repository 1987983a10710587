//! Device contexts: the scope of PDs, CQs and channels, and their asynchronous events.
use crate::event_pipe::{EventOutcome, EventPipe, EventRead};
use crate::passed::Passed;
use crate::registry::Tag;
use crate::session::Session;
use freeflow_protocol::library::{Handle, PASS_BYTES, Reply, Request};
use freeflow_verbs::{AsyncEventKind, VerbsError};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The object of an asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    Device,
    Port(u32),
    Cq(Tag),
    Qp(Tag),
    Srq(Tag),
}

/// An open device.
#[derive(Debug)]
pub struct Context {
    session: Arc<Session>,
    handle: Handle,
    events: EventPipe,
    /// A process that has it may import the context.
    pass: OwnedFd,
    /// DEVICE_FATAL was reported: it is reported once.
    fatal_reported: AtomicBool,
}

impl Context {
    pub fn open(session: &Arc<Session>) -> Result<Self, VerbsError> {
        Self::from_answer(session, session.call(&Request::OpenContext)?)
    }

    /// The context whose pass that is, which a process of this vNIC opened: PDs, regions and device
    /// memory can be imported from it.
    ///
    /// # Errors
    /// NotFound: there is no such context in this vNIC, or it is closed.
    pub fn import(session: &Arc<Session>, pass: [u8; PASS_BYTES]) -> Result<Self, VerbsError> {
        Self::from_answer(session, session.call(&Request::ImportContext { pass })?)
    }

    fn from_answer(session: &Arc<Session>, answer: (Reply, Vec<Passed>)) -> Result<Self, VerbsError> {
        let (Reply::Context { context: handle }, descriptors) = answer else {
            return Err(session.nonsense());
        };
        let [pipe, pass] = <[Passed; 2]>::try_from(descriptors).map_err(|_| session.nonsense())?.map(OwnedFd::from);
        let events = EventPipe::new(session.clone(), pipe);
        Ok(Self { session: session.clone(), handle, events, pass, fatal_reported: AtomicBool::new(false) })
    }

    /// Objects that the program left in it are destroyed with it.
    pub fn close(&self) -> Result<(), VerbsError> {
        self.session.close_context(self.handle)
    }

    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The pipe that the application waits on (`async_fd`).
    pub fn events(&self) -> &EventPipe {
        &self.events
    }

    /// The descriptor by which another process of the vNIC imports the context (`cmd_fd`).
    pub fn pass_descriptor(&self) -> RawFd {
        self.pass.as_raw_fd()
    }

    /// Waits for the next asynchronous event and runs `deliver` with it; the object it names can't
    /// be destroyed meanwhile. The end of the router is DEVICE_FATAL, once.
    ///
    /// # Errors
    /// As `read`: Interrupted, WouldBlock (on a non-blocking descriptor). `None` inside:
    /// DEVICE_FATAL was the last.
    pub fn wait_event(&self, deliver: &mut dyn FnMut(AsyncEventKind, Element)) -> EventOutcome<()> {
        self.events.wait(|event| self.handle_event(event, deliver))
    }

    /// Takes the result of a read of [`Self::events`]. False: nothing for the caller, who reads on.
    ///
    /// # Errors
    /// As of [`Self::wait_event`].
    pub fn handle_event(
        &self,
        event: EventRead,
        deliver: &mut dyn FnMut(AsyncEventKind, Element),
    ) -> EventOutcome<bool> {
        if let Some([kind, cookie]) = event.map_err(Some)? {
            match AsyncEventKind::from_number(kind) {
                None => return Ok(false),
                Some(AsyncEventKind::DeviceFatal) => {}
                Some(kind) => return Ok(self.deliver(kind, cookie, deliver)),
            }
        }
        self.session.mark_dead();
        if self.fatal_reported.swap(true, Ordering::Relaxed) {
            return Err(None);
        }
        deliver(AsyncEventKind::DeviceFatal, Element::Device);
        Ok(true)
    }

    fn deliver(&self, kind: AsyncEventKind, cookie: u32, deliver: &mut dyn FnMut(AsyncEventKind, Element)) -> bool {
        use AsyncEventKind::{
            CommunicationEstablished, CqError, DeviceFatal, PathMigrated, PathMigrationError, QpAccessError, QpFatal,
            QpLastWqeReached, QpRequestError, SqDrained, SrqError, SrqLimitReached,
        };
        match kind {
            CqError => self.session.deliver_cq(cookie, &mut |tag| deliver(kind, Element::Cq(tag))),
            QpFatal
            | QpRequestError
            | QpAccessError
            | CommunicationEstablished
            | SqDrained
            | PathMigrated
            | PathMigrationError
            | QpLastWqeReached => self.session.deliver_queue(cookie, &mut |tag| deliver(kind, Element::Qp(tag))),
            SrqError | SrqLimitReached => {
                self.session.deliver_queue(cookie, &mut |tag| deliver(kind, Element::Srq(tag)))
            }
            DeviceFatal => {
                deliver(kind, Element::Device);
                true
            }
            _ => {
                deliver(kind, Element::Port(cookie));
                true
            }
        }
    }
}
