//! Shared memory between library and router: segments, the rings in them, doorbells, and the
//! passing of descriptors.
//!
//! This is the only crate that maps memory shared with another process. The other side is taken to
//! be hostile: each shared word is loaded once, the copy is checked, and only the copy is used;
//! private cursors are the truth.
//!
//! [`slot`] and [`handshake`] hold the algorithms over bare atomics, which loom model-checks
//! (`tests/loom/`); the rings lay them over a [`Segment`]. [`parker`] and [`worker_lock`] are the
//! router's own, without shared memory; they are here to be checked by the same models.
//!
//! Invariant: nothing in a segment is ever reached by a Rust reference except atomics, for which
//! any bytes are valid.
//!
//! ```
//! use freeflow_shm::Segment;
//! use std::os::fd::AsFd;
//!
//! // One side makes a segment, the other maps the descriptor that it gets by a socket.
//! let (router, descriptor) = Segment::create("example", 4096)?;
//! let library = Segment::map(descriptor.as_fd(), 4096)?;
//! library.write(64, b"request", false).expect("inside the segment");
//!
//! // Bytes of the other side are copied out first, and checked then.
//! let mut copy = [0; 7];
//! router.read(64, &mut copy).expect("inside the segment");
//! assert_eq!(&copy, b"request");
//!
//! // An offset that the other side names may be any: it is checked against the length.
//! assert!(router.read(4090, &mut copy).is_err());
//! # Ok::<(), std::io::Error>(())
//! ```
#![deny(clippy::undocumented_unsafe_blocks)]

pub mod biased_mutex;
pub mod claims;
pub mod handshake;
pub mod layout;
pub mod parker;
pub mod revocation;
pub mod slot;
mod sync;
pub mod worker_lock;

#[cfg(not(loom))]
mod call_lock;
#[cfg(not(loom))]
mod calls;
#[cfg(not(loom))]
mod capabilities;
#[cfg(not(loom))]
mod completion_ring;
#[cfg(not(loom))]
mod direct_ring;
#[cfg(not(loom))]
pub mod fd;
#[cfg(not(loom))]
mod free_list;
#[cfg(not(loom))]
mod freeze;
#[cfg(not(loom))]
pub mod membarrier;
#[cfg(not(loom))]
mod missing;
#[cfg(not(loom))]
mod own;
#[cfg(not(loom))]
mod own_mapping;
#[cfg(not(loom))]
mod process_area;
#[cfg(not(loom))]
mod request_ring;
#[cfg(not(loom))]
mod room;
#[cfg(not(loom))]
mod segment;
#[cfg(not(loom))]
mod session;
#[cfg(not(loom))]
mod short_wait;
#[cfg(not(loom))]
mod sigbus;
#[cfg(not(loom))]
mod signals;
#[cfg(not(loom))]
mod sys;
#[cfg(not(loom))]
mod tally;
#[cfg(not(loom))]
mod undisturbed;
#[cfg(not(loom))]
mod view;

#[cfg(not(loom))]
pub use biased_mutex::{BiasedGuard, BiasedMutex};
#[cfg(not(loom))]
pub use call_lock::CallLock;
#[cfg(not(loom))]
pub use calls::{FilterInstruction, RefusedCall, RefusedCalls, limit_calls};
#[cfg(not(loom))]
pub use capabilities::{limit_capabilities, limit_programs};
#[cfg(not(loom))]
pub use completion_ring::{CompletionConsumer, CompletionProducer};
#[cfg(not(loom))]
pub use direct_ring::{
    Credit, CreditList, CreditWriter, DIRECT_RING_MESSAGE_BYTES_MAX, DirectRingReceiver, DirectRingSender, Staged,
};
#[cfg(not(loom))]
pub use fd::Doorbell;
#[cfg(not(loom))]
pub use free_list::FreeList;
#[cfg(not(loom))]
pub use freeze::FrozenThreads;
#[cfg(not(loom))]
pub use missing::refuses_missing_pages;
#[cfg(not(loom))]
pub use own::{OwnMemory, OwnRange};
#[cfg(not(loom))]
pub use own_mapping::OwnMapping;
#[cfg(not(loom))]
pub use process_area::{Area, FileId, Lines, Unreadable, file_system_of, query_area, shared_area};
#[cfg(not(loom))]
pub use request_ring::{RequestConsumer, RequestProducer, SendDescriptor, Take};
#[cfg(not(loom))]
pub use room::Room;
#[cfg(not(loom))]
pub use segment::{AccessError, OutOfBounds, Segment, forbid_writing, foreign_memory, sealed_file};
#[cfg(not(loom))]
pub use session::SessionSegment;
#[cfg(not(loom))]
pub use short_wait::ShortWait;
#[cfg(not(loom))]
pub use sigbus::install_sigbus_guard;
#[cfg(not(loom))]
pub use signals::termination_signals;
pub use slot::Full;
#[cfg(not(loom))]
pub use sys::{
    allowed_cpus, boottime_ns, coarse_ns, cpu_count, current_cpu, monotonic_ns, page_bytes, pause, pin_to_cpu,
    prefer_short_slices, release_large_allocations, sched_yield, voluntary_switch_count,
};
#[cfg(not(loom))]
pub use tally::Tally;
#[cfg(not(loom))]
pub use undisturbed::{Uncancelled, Undisturbed};
