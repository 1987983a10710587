//! `librspreload.so`: with LD_PRELOAD, programs written for sockets use rsocket(3). See
//! docs/RSOCKET.md.
//!
//! `calls` stands before the C library's functions of one socket (`batches` before those of several
//! messages), `many` before those of several sockets (poll, select); `forks` lets children go on
//! with connections; `epoll` emulates epoll sets that hold rsockets (`freeflow_epoll_set`, which
//! `repoll_wait` uses too); `table` says which descriptors these are, `rules` which sockets become
//! rsockets, `names` how their addresses are written, `real` reaches the functions behind. Programs
//! that use neither sockets nor this library's descriptors pay a load and a comparison for each
//! read and write.
//!
//! # Safety
//! *The C contract*: a program calls an entry point as its manual page and its `# Safety` section
//! say. Pointers are valid for their type, or null where that is allowed; objects exist, are of
//! this library, and are used no more once an entry point destroys them; buffers are as long as
//! their length says.
// A test's program must keep the C library's own functions.
#[cfg(not(test))]
mod batches;
#[cfg(not(test))]
mod calls;
#[cfg(not(test))]
mod epoll;
#[cfg(not(test))]
mod forks;
#[cfg(not(test))]
mod many;
#[cfg_attr(test, allow(dead_code))]
mod names;
#[cfg_attr(test, allow(dead_code))]
mod older;
#[cfg(not(test))]
mod options;
#[cfg(not(test))]
mod queries;
#[cfg(not(test))]
mod real;
#[cfg_attr(test, allow(dead_code))]
mod rules;
#[cfg(not(test))]
mod signals;
#[cfg(not(test))]
mod table;
