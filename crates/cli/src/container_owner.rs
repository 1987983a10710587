//! The user that a container's files belong to: the host's root, or what the container's root is outside of its user
//! namespace.

use crate::failure::{Context, Result, fail};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_res_gid, set_thread_res_uid};
use std::fs;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerOwner {
    user: u32,
    group: u32,
}

impl ContainerOwner {
    pub const HOST_ROOT: Self = Self { user: 0, group: 0 };

    /// Of a process' user namespace.
    pub fn of(pid: u32) -> Result<Self> {
        let root = |file: &str| -> Result<u32> {
            let path = format!("/proc/{pid}/{file}");
            let map = fs::read_to_string(&path).context(&path)?;
            let Some(outside) = root_of(&map) else { fail!("the container's user namespace has no root: {path}") };
            Ok(outside)
        };
        Ok(Self { user: root("uid_map")?, group: root("gid_map")? })
    }

    /// Makes something as this user, for a child of this program: a file system of the container's own knows no other
    /// user. In one of the host's where this user may make nothing, the host's root does.
    pub fn make<T>(self, make: impl Fn() -> rustix::io::Result<T>) -> Result<rustix::io::Result<T>> {
        if self == Self::HOST_ROOT {
            return Ok(make());
        }
        let (gid, uid) = (Gid::from_raw(self.group), Uid::from_raw(self.user));
        let what = "the container's user";
        set_thread_res_gid(None, Some(gid), None).context(what)?;
        set_thread_res_uid(None, Some(uid), None).context(what)?;
        let made = make();
        // The real user was root all the time, so the capabilities come back with it.
        set_thread_res_uid(None, Some(Uid::ROOT), None).context(what)?;
        set_thread_res_gid(None, Some(Gid::ROOT), None).context(what)?;
        Ok(match made {
            Err(Errno::ACCESS) => make(),
            made => made,
        })
    }
}

/// Whether this process' root is the host's. An engine without root (rootless) runs its hooks in a user namespace.
pub fn has_host_users() -> bool {
    // Where /proc does not say, nothing is refused for it.
    fs::read_to_string("/proc/self/uid_map").map_or(true, |map| is_whole(&map))
}

/// Whether every user is the same inside and outside.
fn is_whole(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Why a container of such an engine gets no vNIC.
pub const ROOTLESS: &str = "this engine runs without the host's root (rootless), which a vNIC's interface and mounts \
                            need: start the container by root's engine (sudo podman run …)";

/// The user outside that is root inside. A line is: first inside, first outside, how many.
fn root_of(map: &str) -> Option<u32> {
    map.lines().find_map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        let (inside, outside) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        (inside == 0).then_some(outside)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_container_s_root_is_found_in_a_map() {
        assert_eq!(root_of("         0          0 4294967295\n"), Some(0));
        assert_eq!(root_of("1 100001 65535\n0 100000 1\n"), Some(100_000));
        assert_eq!(root_of("1000 1000 1\n"), None);
        assert_eq!(root_of(""), None);
        assert!(is_whole("         0          0 4294967295\n"));
        assert!(!is_whole("         0       1000          1\n") && !is_whole("0 0 65536\n"));
        assert_eq!(
            ContainerOwner::of(std::process::id()).is_ok(),
            std::fs::read_to_string("/proc/self/uid_map").is_ok()
        );
    }
}
