//! The drop-in `libibverbs.so.1`: C entry points that marshal into `freeflow-client`, and nothing
//! else.
//!
//! `scripts/link-ibverbs` links this crate's static library with `versions.map`, so that every name
//! stands in the version nodes that rdma-core gives it. Structs handed to C begin with the layout
//! of `freeflow-abi`; what is behind it is ours, and a pointer to the one is a pointer to the
//! other.
//!
//! Invariant: no panic crosses the boundary (`boundary`), and no verb succeeds that was not done.
//!
//! # Safety
//! *The C contract*: a program calls an entry point as its manual page and its `# Safety` section
//! say. Pointers are valid for their type, or null where that is allowed; objects exist, are of
//! this library, and are used no more once an entry point destroys them; buffers are as long as
//! their length says.
//!
//! The entry points have no Rust paths: a program declares them, as `infiniband/verbs.h` does.
//!
//! ```
//! use freeflow_ibverbs as _;
//! use std::ffi::{CStr, c_char, c_int};
//!
//! unsafe extern "C" {
//!     safe fn ibv_wc_status_str(status: c_int) -> *const c_char;
//!     safe fn ibv_rate_to_mbps(rate: c_int) -> c_int;
//! }
//! // SAFETY: the answer is a C string that is never freed.
//! let text = unsafe { CStr::from_ptr(ibv_wc_status_str(5)) };
//! assert_eq!(text.to_str(), Ok("Work Request Flushed Error"));
//! assert_eq!(ibv_rate_to_mbps(3), 10_000, "IBV_RATE_10_GBPS");
//! ```

mod advise;
mod ah;
mod answers;
mod boundary;
mod channel;
mod clock;
mod compat;
mod connection;
mod context;
mod cq;
mod cq_ex;
mod device;
mod device_memory;
mod events;
mod fork;
mod malloc;
mod memory;
mod on_demand;
mod open_qp;
mod opening;
mod pd;
mod post;
mod private;
mod qp;
mod qp_ex;
mod srq;
mod strings;
mod sync;
mod sysfs;
mod unsupported;
mod window;
mod xrc;
