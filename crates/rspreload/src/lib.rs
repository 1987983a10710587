//! `librspreload.so`: with LD_PRELOAD, programs written for sockets use rsocket(3). See docs/RSOCKET.md.
//!
//! `calls` stands before the C library's functions of one socket (`batches` before those of several messages), `many` before
//! those of several sockets (poll, select); `forks` lets children go on with connections; `epoll` emulates epoll sets that hold
//! rsockets, by what `repoll_wait` has too (`set`, `members`, `bell`: files of `crates/rsocket`, whose functions this library must
//! not export); `table` says which descriptors these are, `rules` which sockets become rsockets, `names` how their addresses are told,
//! `real` reaches the functions behind. Programs that use neither sockets nor this library's descriptors pay a load and a
//! comparison for each read and write.
// A test's program must keep the C library's own functions.
#[cfg(not(test))]
mod batches;
#[cfg_attr(test, allow(dead_code))]
#[path = "../../rsocket/src/bell.rs"]
mod bell;
#[cfg(not(test))]
mod calls;
#[cfg(not(test))]
mod epoll;
#[cfg(not(test))]
mod forks;
#[cfg(not(test))]
mod many;
#[cfg_attr(test, allow(dead_code))]
#[path = "../../rsocket/src/members.rs"]
mod members;
#[cfg_attr(test, allow(dead_code))]
mod names;
#[cfg(not(test))]
mod options;
#[cfg(not(test))]
mod real;
#[cfg_attr(test, allow(dead_code))]
mod rules;
#[cfg_attr(test, allow(dead_code))]
#[path = "../../rsocket/src/set.rs"]
mod set;
#[cfg(not(test))]
mod table;
