//! The drop-in `librdmacm.so.1`: C entry points of `rdma_cma.h` and `rdma_verbs.h` over the
//! router's connection manager.
//!
//! `scripts/link-rdmacm` links this crate's static library with `versions.map` against
//! `libibverbs.so.1`, whose connection to the router it uses (`freeflow_call`), and whose verbs it
//! calls as any program does. It has no connection, no thread and no memory of its own that the
//! router knows.
//!
//! Invariant: no panic crosses the boundary (`boundary`). What the router says names our objects by
//! keys of our own table (`process`), never by address: an unknown key is an event of something
//! that is gone.
//!
//! Invariant: locks are taken in the order table, then an identifier's state, then a channel's
//! backlog; none is held over a call to the router.
//!
//! # Safety
//! *The C contract*: a program calls an entry point as its manual page and its `# Safety` section
//! say. Pointers are valid for their type, or null where that is allowed; objects exist, are of
//! this library, and are used no more once an entry point destroys them; buffers are as long as
//! their length says.
//!
//! The entry points have no Rust paths: a program declares them, as `rdma/rdma_cma.h` and
//! `rdma/rsocket.h` do.
//!
//! ```
//! use freeflow_ibverbs as _;
//! use freeflow_rdmacm as _;
//! use std::ffi::{CStr, c_char, c_int, c_uint};
//!
//! unsafe extern "C" {
//!     safe fn rdma_event_str(event: c_uint) -> *const c_char;
//!     safe fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
//! }
//! // SAFETY: the answer is a C string that is never freed.
//! let text = unsafe { CStr::from_ptr(rdma_event_str(9)) };
//! assert_eq!(text.to_str(), Ok("RDMA_CM_EVENT_ESTABLISHED"));
//! // rsocket(3) has AF_INET and AF_INET6 alone.
//! assert_eq!(rsocket(libc::AF_UNIX, libc::SOCK_STREAM, 0), -1);
//! ```

// Part of the library, though nothing here calls it: its functions are exported.
extern crate freeflow_rsocket as _;

mod address;
mod addrinfo;
mod addrinfo_async;
mod addrinfo_list;
mod born;
mod boundary;
mod call;
mod channel;
mod connect;
mod device;
mod devices;
mod ece;
mod endpoint;
mod event;
mod event_kinds;
mod id;
mod lifecycle;
mod membership;
mod migrate;
mod multicast;
mod options;
mod pipe;
mod placing;
mod privilege;
mod process;
mod qp;
mod qp_states;
mod resolve;
mod route;
mod srq;
mod verbs;

#[cfg(test)]
use freeflow_ibverbs as _;
