//! The vNIC's `/sys/class/infiniband` and its like in a container.
//!
//! Nobody can make a directory in the kernel's sysfs. So `/sys/class` is covered with a read-only
//! tmpfs that has every class of the container again, as a mount of the original one (a link from
//! there to `../../devices` works on), except those of the host's own RDMA devices, and the vNIC's
//! instead. An overlay would be a single mount, but remembers what it was once asked for in vain: a
//! network interface that comes later would stay unseen.
//!
//! The container works without all this, so nothing here fails it: what went wrong is said on stderr.

use crate::failure::{Context, Result, fail};
use crate::inject::{Root, mount_onto};
use crate::inject_sysfs_several::SeveralDevices;
use crate::output::complaint;
use crate::sys;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstatfs, mkdirat, openat, statat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string,
    fsmount, fsopen, open_tree, unmount,
};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

/// Where the router keeps it, in a vNIC's directory.
pub const DIRECTORY: &str = "sysfs";
/// Is in each cover.
const COVER_MARK: &str = ".freeflow";
/// In there.
const GID_ATTRIBUTES: &str = ".freeflow/infiniband/freeflow0/ports/1/gid_attrs";
/// Those of the vNIC's own addresses; the second entry is the host's.
const OWN_GIDS: [u32; 2] = [0, 2];
/// The device's network interfaces, seen from there: pyverbs and others look at `infiniband/freeflow0/device/net`.
const DEVICE_INTERFACES: &str = ".freeflow/net";
/// Classes of RDMA devices begin with this; the host's are none of the container's business.
const RDMA_CLASSES: &str = "infiniband";
/// More classes than any kernel has.
const CLASS_COUNT_MAX: usize = 1024;
/// `SYSFS_MAGIC` of linux/magic.h.
const SYSFS_MAGIC: u64 = 0x6265_6572;

/// The vNICs' part of `/sys/class`, opened in the host's view.
pub struct Classes {
    /// Name and detached mount of each directory.
    directories: Vec<(String, OwnedFd)>,
    /// Of several vNICs.
    several: Option<SeveralDevices>,
}

impl Classes {
    /// `vnics`: their directories. None at all if the router could not make them; it has said so.
    pub fn open(vnics: &[&Path]) -> Result<Self> {
        let mut classes = Self { directories: Vec::new(), several: None };
        let Some(Ok(entries)) = vnics.first().map(|first| fs::read_dir(first.join(DIRECTORY))) else {
            return Ok(classes);
        };
        if vnics.len() > 1 {
            classes.several = Some(SeveralDevices::open(vnics)?);
        }
        for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            let Ok(name) = entry.file_name().into_string() else { continue };
            if classes.several.is_some() && SeveralDevices::makes(&name) {
                continue;
            }
            classes.directories.push((name, data_mount(&entry.path())?));
        }
        Ok(classes)
    }
}

/// A detached copy of a directory, for reading alone.
pub fn data_mount(path: &Path) -> Result<OwnedFd> {
    let mount = crate::inject::detached(path)?;
    sys::protect_data_mount(mount.as_fd()).context(path.display())?;
    Ok(mount)
}

impl Root {
    /// Puts the vNIC's classes into the container's `/sys/class`, if it has one.
    pub fn mount_classes(&self, classes: &Classes) {
        if let Err(failure) = self.try_mount_classes(classes) {
            complaint(format!("warning: the container gets no /sys/class/infiniband: {failure}"));
        }
    }

    fn try_mount_classes(&self, classes: &Classes) -> Result<()> {
        let system = self.resolve("sys", OFlags::DIRECTORY).context("/sys")?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut original = openat(&system, "class", flags, Mode::empty()).context("/sys/class")?;
        if classes.several.is_some() && statat(&original, COVER_MARK, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            // It has the vNICs before this one.
            uncover(&original)?;
            original = openat(&system, "class", flags, Mode::empty()).context("/sys/class")?;
        }
        for (directory, path) in [(&system, "/sys"), (&original, "/sys/class")] {
            let kind = fstatfs(directory).context(path)?.f_type;
            if kind as u64 != SYSFS_MAGIC {
                fail!("{path} is not the kernel's");
            }
        }
        // Nothing of this may travel to the mounts that /sys was copied from.
        sys::stop_propagation(system.as_fd()).context("/sys")?;
        let own = own_classes(&original).context("the classes in /sys/class")?;
        let all = || own.iter().chain(&classes.directories);
        let file_count = classes.several.as_ref().map_or(0, SeveralDevices::file_count);
        let cover = new_tmpfs(all().count() + file_count)?;
        for (name, _) in all() {
            mkdirat(&cover, name.as_str(), Mode::from(0o755)).context(name)?;
        }
        if let Some(several) = &classes.several {
            several.make(&cover)?;
        }
        mount_onto(&cover, &original).context("/sys/class")?;
        let mounted = classes.several.as_ref().map_or(Ok(()), |several| several.mount(&cover));
        let result = mounted.and_then(|()| fill(&cover, all()));
        if result.is_err() {
            // Better the original than half of it.
            let _ = uncover(&cover);
        }
        result
    }
}

/// Takes a cover away.
fn uncover(cover: &OwnedFd) -> Result<()> {
    let gone = rustix::process::fchdir(cover).and_then(|()| unmount(".", UnmountFlags::DETACH));
    let _ = rustix::process::chdir("/");
    gone.context("/sys/class")
}

fn fill<'a>(cover: &OwnedFd, classes: impl Iterator<Item = &'a (String, OwnedFd)>) -> Result<()> {
    for (name, mount) in classes {
        let target = openat(cover, name.as_str(), OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
        mount_onto(mount, target.context(name)?).context(name)?;
    }
    sys::protect_data_mount(cover.as_fd()).context("/sys/class")
}

/// Detached copies of the container's classes, but for those of RDMA devices.
fn own_classes(original: &OwnedFd) -> rustix::io::Result<Vec<(String, OwnedFd)>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let entries = rustix::fs::Dir::new(openat(original, ".", flags, Mode::empty())?)?;
    let mut classes = Vec::new();
    for entry in entries {
        let entry = entry?;
        let Ok(name) = entry.file_name().to_str() else { continue };
        if name.starts_with('.') || name.starts_with(RDMA_CLASSES) {
            continue;
        }
        let metadata = statat(original, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(metadata.st_mode) != FileType::Directory {
            continue;
        }
        if classes.len() == CLASS_COUNT_MAX {
            return Err(Errno::TOOBIG);
        }
        classes.push((name.to_string(), copy(original.as_fd(), name)?));
    }
    Ok(classes)
}

/// A detached copy, with what is mounted below: an engine may have covered some of it.
pub fn copy(directory: BorrowedFd<'_>, name: impl AsRef<Path>) -> rustix::io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    open_tree(directory, name.as_ref(), flags)
}

/// An empty, detached tmpfs with room for so many directories and files.
fn new_tmpfs(file_count: usize) -> Result<OwnedFd> {
    let make = || {
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(context.as_fd(), "size", "1m")?;
        fsconfig_set_string(context.as_fd(), "nr_inodes", (file_count + 2).to_string())?;
        fsconfig_set_string(context.as_fd(), "mode", "0755")?;
        fsconfig_create(context.as_fd())?;
        let flags =
            MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, flags)
    };
    make().context("can't make a tmpfs")
}

/// Shows the readers of the vNIC's sysfs which network interface has its address.
pub fn name_interface(vnic_directory: &Path, interface: &str) {
    let tree = vnic_directory.join(DIRECTORY);
    if !tree.exists() {
        return;
    }
    // Written once, before the container's program starts.
    let attributes = tree.join(GID_ATTRIBUTES);
    let mut filled = OWN_GIDS.iter().filter(|index| attributes.join(format!("types/{index}")).exists());
    let written = filled
        .try_for_each(|index| fs::write(attributes.join(format!("ndevs/{index}")), format!("{interface}\n")))
        .and_then(|()| link_interface(&tree, interface));
    if let Err(error) = written {
        complaint(format!("warning: the vNIC's sysfs does not name its interface {interface}: {error}"));
    }
}

/// The directory of a device's interfaces, which the first one of them makes or, for a mount, who comes before.
pub fn make_interfaces(directory: &Path) -> io::Result<()> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        made => made?,
    }
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755))
}

/// As in the kernel's, where it is the interface itself; here a link to the one of its class.
fn link_interface(tree: &Path, interface: &str) -> io::Result<()> {
    let directory = tree.join(DEVICE_INTERFACES);
    make_interfaces(&directory)?;
    // In place: a container with several vNICs has it mounted.
    for entry in fs::read_dir(&directory)? {
        fs::remove_file(entry?.path())?;
    }
    symlink(Path::new("../../net").join(interface), directory.join(interface))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interface_is_named_anew() {
        let directory = std::env::temp_dir().join(format!("ff-inject-sysfs-{}", std::process::id()));
        let tree = directory.join(DIRECTORY);
        let attributes = tree.join(GID_ATTRIBUTES);
        fs::create_dir_all(attributes.join("ndevs")).unwrap();
        fs::create_dir_all(attributes.join("types")).unwrap();
        for index in [0, 1, 2] {
            fs::write(attributes.join(format!("types/{index}")), "RoCE v2\n").unwrap();
        }
        name_interface(&directory, "ff0");
        name_interface(&directory, "ff1");
        for index in [0, 2] {
            assert_eq!(fs::read_to_string(attributes.join(format!("ndevs/{index}"))).unwrap(), "ff1\n");
        }
        assert!(!attributes.join("ndevs/1").exists(), "the host's own address is not the container's interface's");
        let links: Vec<_> =
            fs::read_dir(tree.join(DEVICE_INTERFACES)).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(links, [tree.join(DEVICE_INTERFACES).join("ff1")]);
        assert_eq!(fs::read_link(&links[0]).unwrap(), Path::new("../../net/ff1"));
        fs::remove_dir_all(&directory).unwrap();
        // No tree: a warning, no harm.
        name_interface(&directory, "ff0");
        assert!(Classes::open(&[&directory]).unwrap().directories.is_empty());
    }
}
