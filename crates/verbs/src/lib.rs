//! The vocabulary that every crate of FreeFlow shares: identifiers, work requests, completions, attributes.
//!
//! It is only words: no I/O, no clock, no randomness, no unsafe code. Names are InfiniBand's (IBTA Architecture
//! Specification, volume 1); numbers that reach an application equal those of rdma-core's `infiniband/verbs.h`.
//!
//! ```
//! use core::net::Ipv4Addr;
//! use freeflow_verbs::{Duration, Gid, Instant};
//!
//! // A vNIC's IPv4 address is a GID: mapped into IPv6, as RoCEv2 has it.
//! let gid = Gid::from_ip(Ipv4Addr::new(10, 111, 0, 2).into());
//! assert_eq!(gid.to_ipv4(), Some(Ipv4Addr::new(10, 111, 0, 2)));
//! assert!(!gid.is_multicast());
//!
//! // Time is an argument everywhere; this crate only names it.
//! assert_eq!(Instant(0) + Duration::from_millis(1), Instant(1_000_000));
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]
extern crate alloc;

mod access;
mod attributes;
mod completion;
pub mod datagram;
mod error;
mod event;
mod id;
mod limits;
mod qos;
mod queue_pair;
mod shard;
mod stored;
mod time;
mod work;

pub use access::Access;
pub use attributes::{
    AddressHandleAttributes, DeviceAttributes, FileIdentity, GlobalRoute, PortAttributes, QpAttributeMask,
    QpAttributes, QpCapabilities, RegionChange, SrqAttributes, Translation, WindowKind, XrcdOpenFlags,
};
pub use completion::{Completion, CompletionFlags, CompletionOpcode, CompletionStatus};
pub use error::VerbsError;
pub use event::{AsyncEvent, AsyncEventKind, EventElement};
pub use id::{Gid, NetworkId, Psn, Qpn};
pub use limits::{
    CQE_COUNT_MAX, INLINE_BYTES_MAX, MESSAGE_BYTES_MAX, NetworkLimits, QUEUE_WORK_REQUESTS_MAX, READ_ATOMIC_DEPTH_MAX,
    SGE_COUNT_MAX, VnicLimits,
};
pub use qos::{PRIORITY_DEFAULT, PRIORITY_MAX, RateLimit, Shaping, TenantId, WEIGHT_DEFAULT, WEIGHT_MAX};
pub use queue_pair::{PathMtu, QpState, QpType};
pub use shard::Shard;
pub use time::{Duration, Instant, civil_date};
pub use work::{AtomicOperation, ReceiveRequest, SendFlags, SendOpcode, SendRequest, Sge};
