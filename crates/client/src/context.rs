//! Device contexts: the scope of PDs, CQs and channels, and their asynchronous events.
use crate::channel::read_event;
use crate::registry::Tag;
use crate::session::Session;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_verbs::{AsyncEventKind, VerbsError};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What an asynchronous event is about.
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
    pipe: OwnedFd,
    /// DEVICE_FATAL was reported: it is reported once.
    fatal_reported: AtomicBool,
}

impl Context {
    pub fn open(session: &Arc<Session>) -> Result<Self, VerbsError> {
        let (reply, mut descriptors) = session.call(&Request::OpenContext)?;
        match (reply, descriptors.pop()) {
            (Reply::Context { context }, Some(pipe)) => {
                Ok(Self { session: session.clone(), handle: context, pipe, fatal_reported: AtomicBool::new(false) })
            }
            _ => Err(session.nonsense()),
        }
    }

    /// What the program left in it is destroyed with it.
    pub fn close(&self) -> Result<(), VerbsError> {
        self.session.close_context(self.handle)
    }

    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// What the application waits on (`async_fd`).
    pub fn descriptor(&self) -> RawFd {
        self.pipe.as_raw_fd()
    }

    /// Waits for the next asynchronous event and runs `deliver` with it; the object it names can't be destroyed
    /// meanwhile. The end of the router is DEVICE_FATAL, once.
    ///
    /// # Errors
    /// As `read`: Interrupted, WouldBlock (on a non-blocking descriptor). `None` inside: DEVICE_FATAL was the last.
    pub fn wait_event(&self, deliver: &mut dyn FnMut(AsyncEventKind, Element)) -> Result<(), Option<io::Error>> {
        if self.session.left_behind() {
            return Err(None);
        }
        while let Some([kind, cookie]) = read_event(&self.pipe).map_err(Some)? {
            let Some(kind) = AsyncEventKind::from_number(kind) else { continue };
            if kind == AsyncEventKind::DeviceFatal {
                break;
            }
            if self.deliver(kind, cookie, deliver) {
                return Ok(());
            }
        }
        self.session.mark_dead();
        if self.fatal_reported.swap(true, Ordering::Relaxed) {
            return Err(None);
        }
        deliver(AsyncEventKind::DeviceFatal, Element::Device);
        Ok(())
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
