//! rsocket(3): the calls of sockets, over RDMA. Linked into `librdmacm.so.1`; interoperates with
//! rdma-core's rsockets. See docs/RSOCKET.md.
//!
//! The protocol is in safe modules without I/O: `wire` (messages and entries), `stream` (credits,
//! buffers, shutdowns) and `headers` (datagrams). `link` and `ud` own the queue pairs, `cm` the
//! identifier of the connection manager, `memory` what is registered; `socket`, `transfer`,
//! `mapping` and `datagram` are the calls, `wait` and `poll` how they wait, `exports` what C sees.
//! Only the public functions of librdmacm and libibverbs are used (`ffi`).
//!
//! Invariant: one lock at a time, but for sender or receiver before setup before link. Nothing is
//! allocated, and no system call made, where polling finds what a call waits for.
//!
//! # Safety
//! *The C contract*: a program calls an entry point as its manual page and its `# Safety` section
//! say. Pointers are valid for their type, or null where that is allowed; objects exist, are of
//! this library, and are used no more once an entry point destroys them; buffers are as long as
//! their length says.
//!
//! An example is in `freeflow-rdmacm`, the library that the calls are linked into.
mod address;
mod cm;
mod config;
mod datagram;
mod epoll;
pub mod exports;
mod ffi;
mod headers;
mod keepalive;
mod link;
mod mapping;
mod memory;
mod options;
mod pieces;
mod poll;
mod settings;
mod socket;
mod stream;
mod table;
mod transfer;
mod ud;
mod wait;
mod wire;

#[cfg(test)]
mod end_to_end;
#[cfg(test)]
mod fake;
