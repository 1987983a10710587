//! The library side of a vNIC: the process's one connection to its router, and safe verbs over the
//! rings it shares with it. The C drop-ins marshal into this crate; nothing here knows a C layout.
//!
//! Invariant: one process has one live [`Session`]. Every object belongs to the session that made
//! it and is of no use once that session is dead (the router is gone) or left behind by `fork` (see
//! [`fork`]).
//!
//! Invariant: locks are taken in the order CQ, then direct ring, then send or receive queue, then a
//! CQ's inbox, then [`Session`]'s tables. A control call is made with no queue lock held, but for a
//! resize and the acceptance of a direct ring, which hold their CQ, and the request for a direct
//! ring or a grant, which holds its send queue. The router answers all of them by itself.
//!
//! The data path (post, poll, arm) makes no allocation, no log and no system call, except the kick
//! of a sleeping router, `sched_yield` when the pollers don't fit the cores, and on a CQ that stays
//! empty one `poll` every ten milliseconds to notice that the router is gone.
//!
//! ```
//! use freeflow_client::Session;
//! use std::path::Path;
//!
//! // A program has one session, by the socket that is mounted into its container.
//! let session = Session::connect(Path::new("/nonexistent/router.sock"));
//! assert!(session.is_err(), "without a router there is none");
//! ```
#![forbid(unsafe_code)]

mod allocator;
mod backoff;
mod commands;
mod completion_channel;
mod completion_queue;
mod completion_sources;
mod connection;
mod context;
mod datagrams;
mod device_memory;
mod direct_ring;
mod event_pipe;
pub mod fork;
mod grants;
mod inbox;
mod incoming;
mod memory;
mod outgoing;
mod owned_objects;
mod passed;
mod payload;
mod posting_order;
mod promises;
mod queue_pair;
mod receive_side;
mod regions;
mod registry;
mod rings;
mod segments;
mod session;
mod shared_receive_queue;
mod shared_receives;

pub use allocator::{allocate, release, usable_bytes};
pub use commands::{COMMAND_BYTES, MemoryCommand, PendingCommands, REVOCATION_TIME_MAX_MS};
pub use completion_channel::CompletionChannel;
pub use completion_queue::CompletionQueue;
pub use connection::{connection_call, connection_step};
pub use context::{Context, Element};
pub use device_memory::DeviceMemory;
pub use event_pipe::{EventOutcome, EventPipe, EventRead, event_of};
pub use freeflow_protocol::library::{EVENT_BYTES, Handle, PASS_BYTES};
pub use freeflow_shm::fd::Doorbell;
pub use freeflow_shm::revocation::{Awaited, RevokeCommands};
pub use freeflow_shm::{
    Area, CallLock, FileId, Lines, OwnMapping, OwnMemory, SendDescriptor, Uncancelled, Undisturbed, Unreadable,
    file_system_of, query_area,
};
pub use memory::MemoryRegion;
pub use queue_pair::{QpParameters, QueuePair, ReceiveBatch, SendBatch, check_send};
pub use registry::Tag;
pub use segments::Freeze;
pub use session::{ConnectError, Session, VNIC_COUNT_MAX, socket_path, vnic_directory};
pub use shared_receive_queue::{SharedReceiveQueue, SrqBatch};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, whatever became of an earlier holder: a panic is turned into an error at the C boundary,
/// and every structure here is left consistent between two of its statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
