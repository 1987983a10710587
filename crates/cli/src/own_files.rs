//! The files of a `freeflow run` container: the host's, read-only, with an overlay that takes what
//! the container writes and goes with it. (With `--share-host` it has the host's own.)
//!
//! An overlay covers one file system. So the root and each file system mounted in it (`/home`,
//! `/tmp`, …) have overlays of their own, whose written parts share one tmpfs. What can't be
//! covered (single files, file systems that can't lie below an overlay, mounts further below) is
//! the host's, read-only; below `/run` it is left out. Sockets of the host that lie in a covered
//! directory refuse connections: they are other files there. Devices can't be opened but in the
//! container's own `/dev`.
//!
//! Invariant: no mount of the container leads to a file of the host that it can write to, but volumes (`-v`).

use crate::failure::{Context, Result};
use crate::inject::{detached_recursive, mount_onto};
use crate::sys;
use rustix::fs::{Mode, OFlags, open};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen, mount, unmount,
};
use std::ffi::CStr;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Most that a container may write, all its files together, and the number of them.
const WRITTEN: &CStr = c"size=1g,nr_inodes=262144,mode=0755";
/// Mounts of the host that are looked at; more are no container's business.
const MOUNT_COUNT_MAX: usize = 1024;
/// These the view makes itself.
const OWN: [&str; 3] = ["/proc", "/sys", "/dev"];
/// Further mounts below it hold sockets of the host's services and sessions, which a read-only mount does not close.
const SERVICES: &str = "/run";

/// A mount of this namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mounted {
    id: u32,
    parent: u32,
    path: PathBuf,
}

/// Makes the container's root and changes into it. `scratch` is a directory that the container must
/// not see, for a moment a mount point in this namespace. With the mounts made private before.
pub fn enter(scratch: &Path, hidden: &[PathBuf]) -> Result<()> {
    let mounts = parse(&fs::read("/proc/self/mountinfo").context("/proc/self/mountinfo")?);
    // The last one on the root is the one that is seen.
    let root = mounts.iter().rev().find(|mounted| mounted.path == Path::new("/")).map_or(0, |mounted| mounted.id);
    let is_ours = |path: &Path| {
        OWN.iter().any(|own| path.starts_with(own)) || hidden.iter().any(|hidden| path.starts_with(hidden))
    };
    let below: Vec<&Mounted> = mounts
        .iter()
        .filter(|mounted| mounted.path != Path::new("/") && !is_ours(&mounted.path))
        .take(MOUNT_COUNT_MAX)
        .collect();
    let (top, deeper): (Vec<&Mounted>, Vec<&Mounted>) = below.into_iter().partition(|mounted| mounted.parent == root);
    // Opened before anything covers them.
    let mut trees = Vec::new();
    for mounted in deeper.iter().filter(|mounted| !mounted.path.starts_with(SERVICES)) {
        if top.iter().any(|parent| parent.id == mounted.parent) {
            trees.push((mounted.path.as_path(), read_only(&mounted.path)));
        }
    }
    mount("tmpfs", scratch, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, WRITTEN)
        .context("a tmpfs for the container's files")?;
    let new_root = scratch.join("root");
    fs::create_dir(&new_root).context("the container's root")?;
    let covered = overlay(Path::new("/"), scratch, 0).context(
        "the container's files need an overlay over the host's root (overlayfs), and this host can't make it; with --share-host the \
         container has the host's own files and can write to them",
    )?;
    mount_at(&covered, &new_root).context("the container's root")?;
    for (number, mounted) in (1..).zip(&top) {
        let target = inside(&new_root, &mounted.path);
        let is_directory = fs::metadata(&mounted.path).is_ok_and(|metadata| metadata.is_dir());
        let over = if is_directory { overlay(&mounted.path, scratch, number) } else { read_only(&mounted.path) };
        // One that nobody reaches any more has no place there either: what it would show stays away.
        let _ = over.or_else(|_| read_only(&mounted.path)).and_then(|over| mount_at(&over, &target));
    }
    for (path, tree) in trees {
        let _ = tree.and_then(|tree| mount_at(&tree, &inside(&new_root, path)));
    }
    change_root(&new_root)
}

fn inside(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// A detached overlay over what is mounted at a path.
fn overlay(path: &Path, scratch: &Path, number: u32) -> Result<OwnedFd> {
    let (upper, work) = (scratch.join(format!("upper{number}")), scratch.join(format!("work{number}")));
    for directory in [&upper, &work] {
        fs::create_dir(directory).context(directory.display())?;
    }
    // Its root is shown as the upper directory is.
    let like = fs::metadata(path).context(path.display())?;
    std::os::unix::fs::chown(&upper, Some(like.uid()), Some(like.gid())).context(upper.display())?;
    fs::set_permissions(&upper, fs::Permissions::from_mode(like.mode() & 0o7777)).context(upper.display())?;
    let make = || {
        let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(context.as_fd(), "source", "freeflow")?;
        fsconfig_set_string(context.as_fd(), "lowerdir", escaped(path))?;
        fsconfig_set_string(context.as_fd(), "upperdir", upper.as_path())?;
        fsconfig_set_string(context.as_fd(), "workdir", work.as_path())?;
        fsconfig_create(context.as_fd())?;
        fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes(path)?)
    };
    make().context(format!("an overlay over {}", path.display()))
}

/// Restrictions of a mount that hold in the overlay too. Devices are those of the container's own
/// `/dev`.
fn attributes(path: &Path) -> rustix::io::Result<MountAttrFlags> {
    use rustix::fs::StatVfsMountFlags as Flags;
    let flags = rustix::fs::statvfs(path)?.f_flag;
    let pairs = [
        (Flags::NOSUID, MountAttrFlags::MOUNT_ATTR_NOSUID),
        (Flags::NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        (Flags::RDONLY, MountAttrFlags::MOUNT_ATTR_RDONLY),
    ];
    Ok(pairs
        .into_iter()
        .filter(|(flag, _)| flags.contains(*flag))
        .fold(MountAttrFlags::MOUNT_ATTR_NODEV, |all, (_, one)| all | one))
}

/// A list of lower directories has colons between them.
fn escaped(path: &Path) -> PathBuf {
    let bytes = path.as_os_str().as_encoded_bytes();
    let escaped = bytes.iter().flat_map(|&byte| {
        let escape = matches!(byte, b':' | b'\\').then_some(b'\\');
        escape.into_iter().chain([byte])
    });
    PathBuf::from(std::ffi::OsString::from_vec(escaped.collect()))
}

/// A detached copy of what is mounted at a path, with all below, that can't be written to, without devices.
fn read_only(path: &Path) -> Result<OwnedFd> {
    let tree = detached_recursive(path)?;
    sys::make_read_only(tree.as_fd()).context(path.display())?;
    Ok(tree)
}

/// Only where there is something to mount on: nothing is made for it.
fn mount_at(tree: &OwnedFd, target: &Path) -> Result<()> {
    let target =
        open(target, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).context(target.display())?;
    mount_onto(tree, &target).context("a mount")
}

fn change_root(root: &Path) -> Result<()> {
    let what = "can't change into the container's root";
    rustix::process::chdir(root).context(what)?;
    rustix::process::pivot_root(".", ".").context(what)?;
    // The old one lies on the new one.
    unmount(".", UnmountFlags::DETACH).context(what)?;
    rustix::process::chdir("/").context(what)
}

/// Of `/proc/self/mountinfo`.
fn parse(text: &[u8]) -> Vec<Mounted> {
    let one = |line: &[u8]| {
        let mut fields = line.split(|&byte| byte == b' ');
        let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
        let (id, parent) = (number()?, number()?);
        let path = unescaped(fields.nth(2)?);
        Some(Mounted { id, parent, path: PathBuf::from(std::ffi::OsString::from_vec(path)) })
    };
    text.split(|&byte| byte == b'\n').filter_map(one).collect()
}

/// Blanks and the like are octal numbers there.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let octal =
            after.get(..3).filter(|digits| first == b'\\' && digits.iter().all(|digit| (b'0'..=b'7').contains(digit)));
        match octal {
            Some(digits) => {
                bytes.push(digits.iter().fold(0u8, |number, digit| number.wrapping_mul(8).wrapping_add(digit - b'0')));
                rest = &after[3..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read() {
        let text = b"21 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n30 21 0:26 / /run rw shared:5 - tmpfs tmpfs rw\n\
            31 30 0:27 / /run/a\\040b\\134c rw - tmpfs tmpfs rw\nnonsense\n\n";
        let mounted = |id, parent, path: &str| Mounted { id, parent, path: path.into() };
        let expected = [mounted(21, 1, "/"), mounted(30, 21, "/run"), mounted(31, 30, "/run/a b\\c")];
        assert_eq!(parse(text), expected);
    }

    #[test]
    fn paths_are_one_lower_directory_each() {
        assert_eq!(escaped(Path::new("/a:b\\c")), Path::new("/a\\:b\\\\c"));
        assert_eq!(inside(Path::new("/new"), Path::new("/run/x")), Path::new("/new/run/x"));
    }
}
