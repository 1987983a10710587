//! How a vNIC's processes, their memory and their events are reached.
//!
//! An [`Attachment`] is a vNIC's: it looks at who connects, and makes the channels by which
//! libraries get their events. An [`AttachedProcess`] is a connection's: its memory by address, its
//! threads, its end.
//!
//! - [`local`]: the router shares a kernel with the processes ([`identify`]: the threads that look at them; [`borrow`]:
//!   what those have mapped);
//! - [`remote`]: another process does, the vNIC's near half, at the other end of a stream ([`relay`]: events);
//! - [`guest`]: the processes are those of a virtual machine;
//! - [`near`]: that near half; [`near_halves`]: those of a router, for tests.
//!
//! Memory that router and process share (segments, rings) needs none of this.

pub mod borrow;
pub mod guest;
pub mod identify;
pub mod local;
pub mod near;
pub mod near_halves;
pub mod relay;
pub mod remote;
#[cfg(test)]
mod remote_tests;

use crate::admission::account::Charge;
use crate::attachment::borrow::{BorrowAnswer, Borrowing};
use crate::attachment::guest::shared_memory::SharedMemory;
use crate::memory::freezer::{Answer, FreezeCommand};
use crate::memory::slow_path::TenantMemory;
use freeflow_shm::fd::PeerCredentials;
use std::any::Any;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The process that connected, by the socket's word: whether `/proc` shows the same one by that
/// number is not known yet.
pub struct Peer {
    pub credentials: PeerCredentials,
    pub pidfd: OwnedFd,
    /// The connection's: held until all is closed that was opened for it.
    pub charge: Arc<Charge>,
}

/// Gets the process that connected, or why it can't be served. Called on another thread, later.
pub type Found = Box<dyn FnOnce(io::Result<Box<dyn AttachedProcess>>) + Send>;

/// A vNIC's. No method waits.
pub trait Attachment: Send + Sync {
    /// Has a process looked at, which may take as long as that process likes.
    ///
    /// # Errors
    /// Nobody can look: gives back what holds the peer, which may be slow to close.
    fn identify(&self, peer: Peer, found: Found) -> Result<(), Box<dyn Any + Send>>;

    /// A way for events to a library: the end that the library reads, and the end for records
    /// ([`freeflow_shm::fd::send_record`]), of which about `bytes` wait there at most. The reader
    /// meets the end of file once the other end is closed, or the router is gone.
    ///
    /// # Errors
    /// The process has no room for more.
    fn event_channel(&self, bytes: usize) -> io::Result<(OwnedFd, OwnedFd)>;

    /// The vNIC ends: gives back what holds peers at which nobody has begun to look.
    fn take_waiting(&self) -> Box<dyn Any + Send>;

    /// Why it has ended: nothing is reached by it any more, and another one takes its place.
    fn ended(&self) -> Option<&'static str>;

    /// Where all memory lies that the router shares with the vNIC's processes, if that is one file.
    fn shared_memory(&self) -> Option<&Arc<SharedMemory>> {
        None
    }
}

/// The process of one connection.
pub trait AttachedProcess: Send + Sync {
    /// Readable once the process has ended.
    fn end(&self) -> BorrowedFd<'_>;

    /// Its memory by address. An access may take as long as the process likes.
    fn memory(&self) -> Arc<dyn TenantMemory>;

    /// Has its threads frozen or let go; never waits.
    fn freeze(&self, command: FreezeCommand, answer: Answer);

    /// Has the file mapped that the process shares at some addresses; never waits.
    fn borrow(&self, place: Borrowing, answer: BorrowAnswer);

    /// The connection has ended: threads that are frozen are let go.
    fn let_go(&self);
}
