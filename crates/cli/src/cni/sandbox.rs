//! Network namespaces of pods, known again whatever else has their path or their inode number later.
//!
//! A namespace's inode number and its path can be those of another one once it is gone. Its cookie (Linux 5.14) can't,
//! as long as the machine runs.

use crate::failure::{Context, Failure, Result, fail};
use crate::sys;
use freeflow_hostnet::namespace::in_network;
use rustix::fs::{Mode, OFlags, fstat, fstatfs};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// `NSFS_MAGIC` of linux/magic.h.
const NSFS_MAGIC: u64 = 0x6e73_6673;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A network namespace that is open.
#[derive(Debug)]
pub struct Sandbox {
    pub namespace: OwnedFd,
    pub identity: Identity,
}

/// A network namespace among all that this machine has had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    device: u64,
    pub inode: u64,
    cookie: u64,
    boot: String,
}

/// State of a namespace, as far as its path shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Alive,
    Gone,
}

fn boot_id() -> Result<String> {
    let text = std::fs::read_to_string(BOOT_ID).context(BOOT_ID)?;
    Ok(text.trim().to_string())
}

fn open(path: &Path) -> rustix::io::Result<OwnedFd> {
    // NONBLOCK: something else may be there, a FIFO for instance.
    rustix::fs::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
}

fn is_namespace(file: &OwnedFd) -> bool {
    fstatfs(file).is_ok_and(|status| status.f_type as u64 == NSFS_MAGIC)
}

impl Sandbox {
    /// # Errors
    /// There is no network namespace at the path, or the kernel is older than 5.14.
    pub fn open(path: &Path) -> Result<Self> {
        let namespace = open(path).context(path.display())?;
        if !is_namespace(&namespace) {
            fail!("{} is no network namespace", path.display());
        }
        Self::of(namespace).map_err(|failure| Failure::new(format!("{}: {failure}", path.display())))
    }

    fn of(namespace: OwnedFd) -> Result<Self> {
        let status = fstat(&namespace).context("network namespace")?;
        let cookie = in_network(namespace.as_fd(), || {
            sys::network_namespace_cookie().map_err(|error| {
                freeflow_hostnet::Error::new(format!("network namespaces have no cookies (before Linux 5.14): {error}"))
            })
        })?;
        let identity = Identity { device: status.st_dev, inode: status.st_ino, cookie, boot: boot_id()? };
        Ok(Self { namespace, identity })
    }

    /// Whether processes that have no namespace of their own are in it: the machine's first process, or this one.
    pub fn is_hosts(&self) -> bool {
        ["/proc/1/ns/net", "/proc/self/ns/net"].iter().any(|path| {
            rustix::fs::stat(*path)
                .is_ok_and(|status| (status.st_dev, status.st_ino) == (self.identity.device, self.identity.inode))
        })
    }
}

impl Identity {
    /// By the path's inode number alone: nothing is entered, which a service may not do. A namespace that is not
    /// visible from here, or can't be looked at, counts as alive.
    pub fn seen_at(&self, path: &Path) -> State {
        if boot_id().is_ok_and(|boot| boot != self.boot) {
            return State::Gone;
        }
        match open(path) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::SRCH) => State::Gone,
            Ok(file) if is_namespace(&file) => match fstat(&file) {
                Ok(status) if (status.st_dev, status.st_ino) != (self.device, self.inode) => State::Gone,
                _ => State::Alive,
            },
            _ => State::Alive,
        }
    }

    /// The same, and another namespace with the inode number is another one.
    pub fn state_at(&self, path: &Path) -> State {
        match (self.seen_at(path), Sandbox::open(path)) {
            (State::Alive, Ok(sandbox)) if sandbox.identity != *self => State::Gone,
            (state, _) => state,
        }
    }
}

/// A path that can be found from everywhere.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).context(path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_known_again_and_others_are_others() {
        let own = Path::new("/proc/self/ns/net");
        // Without rights nothing can be entered.
        if !sys::is_privileged() {
            return;
        }
        let sandbox = Sandbox::open(own).unwrap();
        assert!(sandbox.is_hosts());
        let identity = &sandbox.identity;
        assert_eq!(*identity, Sandbox::open(Path::new("/proc/thread-self/ns/net")).unwrap().identity);
        assert_eq!((identity.seen_at(own), identity.state_at(own)), (State::Alive, State::Alive));
        // The inode number was reused: only the cookie shows it.
        let former = Identity { cookie: identity.cookie + 1, ..identity.clone() };
        assert_eq!((former.seen_at(own), former.state_at(own)), (State::Alive, State::Gone));
        let other = Identity { inode: identity.inode + 1, ..identity.clone() };
        assert_eq!(other.seen_at(own), State::Gone);
        let before_the_boot = Identity { boot: "other".into(), ..identity.clone() };
        assert_eq!(before_the_boot.seen_at(own), State::Gone);
        assert_eq!(identity.seen_at(Path::new("/proc/self/ns/none")), State::Gone);
        // Where the mount can't be seen there is a plain file.
        assert_eq!(identity.seen_at(Path::new("/proc/self/stat")), State::Alive);
        assert!(Sandbox::open(Path::new("/proc/self/stat")).unwrap_err().to_string().contains("no network namespace"));
    }
}
