//! Work in another network namespace.

use crate::error::{Context, Error, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::{self, File};
use std::os::fd::BorrowedFd;

/// Runs a function in a network namespace, on a thread that has ended when this returns: the
/// caller's thread does not leave its own, whatever fails.
///
/// # Errors
/// The namespace can't be entered; the function's own.
pub fn in_network<T: Send>(namespace: BorrowedFd<'_>, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let enter_and_act = || {
        move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))
            .context("can't enter the container's network namespace")?;
        act()
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("ff-namespace".into()).spawn_scoped(scope, enter_and_act);
        let ended = thread.context("a thread")?.join();
        ended.unwrap_or_else(|_| Err(Error::new("work in another network namespace panicked")))
    })
}

/// A process' network namespace.
pub(crate) fn network_of_process(pid: u32) -> Result<File> {
    File::open(format!("/proc/{pid}/ns/net")).context("the container's network namespace")
}

/// Whether two processes share a network namespace.
///
/// # Errors
/// One of them is not there.
pub fn same_network(one: u32, other: u32) -> Result<bool> {
    let link = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/net")).context("network namespace");
    Ok(link(one)? == link(other)?)
}
