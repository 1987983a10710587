//! The vNIC of a virtual machine: its processes are another kernel's, reached through the guest agent.
//!
//! - [`shared_memory`]: the file in which all that router and guest share lies;
//! - [`channel`]: either end of the control channel;
//! - [`gateway`]: the router's end, a thread of the vNIC (`ff-guest`), between the control thread's connections, the
//!   vNIC's [`Remote`](crate::attachment::remote::Remote), and the agent.
//!
//! The agent itself is the crate `guest`; `docs/architecture/vm.md` has the whole.
pub mod channel;
pub mod gateway;
pub mod shared_memory;

use crate::admission::account::{Account, Charge};
use crate::attachment::{AttachedProcess, Attachment, Found, Peer};
use freeflow_shm::Doorbell;
use freeflow_shm::fd::{self, PeerCredentials};
use gateway::Gateway;
use shared_memory::SharedMemory;
use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The label of a vNIC that is a virtual machine's: the size of its shared-memory device, bytes.
pub const LABEL: &str = "guest_memory";
/// The control channel's socket, in the vNIC's directory.
pub const SOCKET: &str = "control.sock";
/// Root runs the machine, or passes the descriptor on.
const SOCKET_MODE: u32 = 0o600;

/// A connection of a library in the guest.
pub struct GuestConnection {
    /// The control thread's end.
    pub socket: OwnedFd,
    /// In the guest's own numbers.
    pub credentials: PeerCredentials,
    pub charge: Arc<Charge>,
    pub process: io::Result<Box<dyn AttachedProcess>>,
    /// The vNIC's, which tells it from a later one of the same name.
    pub memory: Arc<SharedMemory>,
}

/// Takes connections; on other threads than the control thread.
pub type Connected = Arc<dyn Fn(GuestConnection) + Send + Sync>;

/// Limits and accounts that a gateway keeps to.
pub struct GuestParameters {
    pub account: Arc<Account>,
    pub connection_count_max: u64,
    pub connected: Connected,
}

struct Stop {
    is_over: AtomicBool,
    wake: Doorbell,
}

/// A virtual machine's vNIC. Dropping it ends its thread.
pub struct Guest {
    memory: Arc<SharedMemory>,
    stop: Arc<Stop>,
}

impl Guest {
    /// `name`: the vNIC's, for the log.
    ///
    /// # Errors
    /// The file, the socket or the thread can't be made.
    pub fn start(name: &str, directory: &Path, bytes: u64, parameters: GuestParameters) -> io::Result<Self> {
        let memory = SharedMemory::open(directory, bytes)?;
        let listener = fd::listen_stream(directory.join(SOCKET), SOCKET_MODE)?;
        let stop = Arc::new(Stop { is_over: AtomicBool::new(false), wake: Doorbell::new()? });
        Gateway::start(name, listener, memory.clone(), stop.clone(), parameters)?;
        Ok(Self { memory, stop })
    }

    /// Removes what [`Self::start`] has made in the vNIC's directory, when the vNIC is gone.
    pub fn remove(directory: &Path) {
        let _ = std::fs::remove_file(directory.join(SOCKET));
        shared_memory::remove(directory);
    }
}

/// The attachment of one whose device or thread can't be had after a restart of the router: nobody connects.
pub struct Absent;

impl Attachment for Absent {
    fn identify(&self, peer: Peer, found: Found) -> Result<(), Box<dyn Any + Send>> {
        Err(Box::new((peer, found)))
    }

    fn event_channel(&self, _bytes: usize) -> io::Result<(OwnedFd, OwnedFd)> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn take_waiting(&self) -> Box<dyn Any + Send> {
        Box::new(())
    }

    fn ended(&self) -> Option<&'static str> {
        None
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Relaxed: the doorbell comes after.
        self.stop.is_over.store(true, Relaxed);
        self.stop.wake.kick();
    }
}

impl Attachment for Guest {
    /// No process of this host is a guest's.
    fn identify(&self, peer: Peer, found: Found) -> Result<(), Box<dyn Any + Send>> {
        Err(Box::new((peer, found)))
    }

    fn event_channel(&self, bytes: usize) -> io::Result<(OwnedFd, OwnedFd)> {
        // The gateway reads, and passes on one record after the other.
        fd::event_sockets(bytes)
    }

    fn take_waiting(&self) -> Box<dyn Any + Send> {
        // Relaxed: the doorbell comes after.
        self.stop.is_over.store(true, Relaxed);
        self.stop.wake.kick();
        Box::new(())
    }

    fn ended(&self) -> Option<&'static str> {
        None
    }

    fn shared_memory(&self) -> Option<&Arc<SharedMemory>> {
        Some(&self.memory)
    }
}
