//! Puts a vNIC's directory and the drop-in libraries into a container's file system, whose content may be hostile.
//!
//! The sources of mounts are opened in the host's view beforehand, as detached mounts. Where it is
//! mounted is resolved by the kernel below the container's root (`openat2` with RESOLVE_IN_ROOT and
//! RESOLVE_NO_MAGICLINKS), so no symbolic link of the image leads out of it; the mount goes onto
//! the descriptor, not onto a name.
//!
//! Invariant: these mounts are read-only. They are the host's own files: a container's root must
//! neither change the library that every other container runs, nor fill or rearrange the directory
//! in which the router makes its socket.

use crate::container_owner::ContainerOwner;
use crate::failure::{Context, Failure, Result, fail};
use crate::inject_sysfs::Classes;
use crate::output::complaint;
use crate::sys;
use crate::tools::{LIBRARIES, LIBRARY};
use freeflow_client::vnic_directory;
use freeflow_hostnet::cdi;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, StatxFlags, fstat, mkdirat, openat, openat2, statx,
    symlinkat,
};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Libraries in different places of one image that get replaced; more than a distribution ever has.
const LIBRARY_COUNT_MAX: usize = 8;
const C_LIBRARY: &str = "libc.so.6";
const C_LIBRARY_PARTS: [&str; 2] = ["libpthread.so.0", "libdl.so.2"];

#[cfg(target_arch = "x86_64")]
mod architecture {
    pub const TRIPLET: &str = "x86_64-linux-gnu";
    pub const LOADER: &str = "lib64/ld-linux-x86-64.so.2";
    pub const MUSL_LOADER: &str = "lib/ld-musl-x86_64.so.1";
}
#[cfg(target_arch = "aarch64")]
mod architecture {
    pub const TRIPLET: &str = "aarch64-linux-gnu";
    pub const LOADER: &str = "lib/ld-linux-aarch64.so.1";
    pub const MUSL_LOADER: &str = "lib/ld-musl-aarch64.so.1";
}

/// Sources of the mounts, opened in the host's view.
pub struct Sources {
    vnic: OwnedFd,
    null_device: OwnedFd,
    libraries: Vec<Library>,
    pub classes: Classes,
    /// File systems that are mounted in the host's view.
    host_devices: BTreeSet<(u32, u32)>,
}

/// One of the drop-ins.
struct Library {
    name: &'static str,
    mounts: Vec<OwnedFd>,
    identity: (u64, u64),
}

impl Library {
    fn open(directory: &Path, name: &'static str) -> Result<Self> {
        // The file is mounted, not a link to it.
        let path = std::fs::canonicalize(directory.join(name)).context(name)?;
        let metadata = rustix::fs::stat(&path).context(path.display())?;
        let mounts: Result<Vec<OwnedFd>> = (0..LIBRARY_COUNT_MAX).map(|_| protected(&path)).collect();
        Ok(Self { name, mounts: mounts?, identity: identity(&metadata) })
    }
}

impl Sources {
    /// `vnics`: the directories of the container's vNICs so far; the last one is mounted. `library` is the drop-in
    /// libibverbs; the others lie beside it.
    pub fn open(vnics: &[&Path], library: &Path) -> Result<Self> {
        let Some(vnic) = vnics.last() else { fail!("no vNIC is there to be mounted") };
        let directory = library.parent().unwrap_or(Path::new("/"));
        let libraries: Result<Vec<Library>> =
            LIBRARIES.into_iter().map(|name| Library::open(directory, name)).collect();
        let (vnic, classes) = (protected(vnic)?, Classes::open(vnics)?);
        let null_device = detached(Path::new("/dev/null"))?;
        sys::protect_device_mount(null_device.as_fd()).context("/dev/null")?;
        Ok(Self { vnic, null_device, libraries: libraries?, classes, host_devices: host_devices()? })
    }
}

/// As seen from a root.
fn relative(path: &Path) -> PathBuf {
    path.strip_prefix("/").unwrap_or(path).to_path_buf()
}

/// The devices of all mounts of this namespace.
fn host_devices() -> Result<BTreeSet<(u32, u32)>> {
    let what = "/proc/self/mountinfo";
    let text = std::fs::read(what).context(what)?;
    let device = |line: &str| {
        let (major, minor) = line.split(' ').nth(2)?.split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    Ok(String::from_utf8_lossy(&text).lines().filter_map(device).collect())
}

/// A detached copy that the container can't write to. A socket in it can still be connected to.
pub fn protected(path: &Path) -> Result<OwnedFd> {
    let mount = detached(path)?;
    sys::protect_mount(mount.as_fd()).context(format!("can't make the mount of {} read-only", path.display()))?;
    Ok(mount)
}

/// A detached copy of the mount at a path.
pub fn detached(path: &Path) -> Result<OwnedFd> {
    open_tree(CWD, path, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)
        .context(format!("can't open {} for mounting", path.display()))
}

/// The same with what is mounted below.
pub fn detached_recursive(path: &Path) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    open_tree(CWD, path, flags).context(format!("can't open {} for mounting", path.display()))
}

/// Mounts a detached mount onto what a descriptor names.
pub fn mount_onto(source: impl AsFd, target: impl AsFd) -> rustix::io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(source, "", target, "", flags)
}

/// A container's file system.
pub struct Root {
    directory: OwnedFd,
    owner: ContainerOwner,
}

impl Root {
    /// `owner`: of what is made in it.
    pub fn open(path: &Path, owner: ContainerOwner) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty())
            .context(format!("can't open the container's root {}", path.display()))?;
        Ok(Self { directory, owner })
    }

    pub(crate) fn resolve(&self, path: impl AsRef<Path>, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        // EAGAIN: something was renamed meanwhile and the kernel can't vouch for "below the root".
        for _ in 0..16 {
            match openat2(
                &self.directory,
                path.as_ref(),
                flags | OFlags::PATH | OFlags::CLOEXEC,
                Mode::empty(),
                resolve,
            ) {
                Err(Errno::AGAIN) => {}
                result => return result,
            }
        }
        Err(Errno::AGAIN)
    }

    /// Mounts a vNIC's directory where programs find that of this number, which is made if need be.
    pub fn mount_vnic(&self, sources: &Sources, number: usize) -> Result<()> {
        let path = vnic_directory(number);
        let what = format!("can't mount the vNIC at {} in the container", path.display());
        let target = self.make_directory(&relative(&path), sources).context(&what)?;
        mount_onto(&sources.vnic, &target).context(&what)
    }

    /// Puts a null device under the name that a verbs device has (`freeflow_hostnet::cdi`) into the container's `/dev`.
    /// A container whose `/dev` is the host's starts without.
    pub fn add_verbs_device(&self, sources: &Sources, number: usize) {
        let path = PathBuf::from(format!("dev/{}{number}", cdi::VERBS_DEVICE));
        if let Err(failure) = self.try_add_device(&path, sources) {
            complaint(format!("warning: the container gets no /{}: {failure}", path.display()));
        }
    }

    fn try_add_device(&self, path: &Path, sources: &Sources) -> Result<()> {
        let (parent, name) = (path.parent().unwrap_or(path), path.file_name().unwrap_or_default());
        let directory = self.make_directory(parent, sources)?;
        if !self.is_own(&directory, sources) {
            fail!("its directory is the host's");
        }
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
        match self.owner.make(|| openat(&directory, name, flags, Mode::from(0o666)))? {
            Ok(_) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno).context("can't make it"),
        }
        let target = openat(&directory, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
            .context("can't open it")?;
        mount_onto(&sources.null_device, &target).context("can't mount the null device")
    }

    /// Whether a directory is the container's own: of its root's mount, or of a file system that
    /// the host does not have. In others, folders of the host that the container got as volumes,
    /// nothing is made.
    fn is_own(&self, directory: &OwnedFd, sources: &Sources) -> bool {
        let look = |fd: &OwnedFd| statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID);
        let (Ok(root), Ok(one)) = (look(&self.directory), look(directory)) else { return false };
        let device = (one.stx_dev_major, one.stx_dev_minor);
        let knows_mounts = [&root, &one].into_iter().all(|one| one.stx_mask & StatxFlags::MNT_ID.bits() != 0);
        let is_root = match knows_mounts {
            true => root.stx_mnt_id == one.stx_mnt_id,
            false => (root.stx_dev_major, root.stx_dev_minor) == device,
        };
        is_root || !sources.host_devices.contains(&device)
    }

    fn make_directory(&self, path: &Path, sources: &Sources) -> Result<OwnedFd> {
        let mut so_far = PathBuf::new();
        let mut directory = self.resolve(".", OFlags::DIRECTORY).context("the root")?;
        for part in path.components() {
            so_far.push(part);
            directory = match self.resolve(&so_far, OFlags::DIRECTORY) {
                Err(Errno::NOENT) if !self.is_own(&directory, sources) => fail!(
                    "/{} would be made in a folder of the host; make that directory there, or mount the folder elsewhere",
                    so_far.display()
                ),
                Err(Errno::NOENT) => {
                    // A dangling symbolic link makes this EEXIST and the next resolve ENOENT: an error, as it should.
                    match self.owner.make(|| mkdirat(&directory, part.as_os_str(), Mode::from(0o755)))? {
                        Ok(()) | Err(Errno::EXIST) => self.resolve(&so_far, OFlags::DIRECTORY),
                        Err(errno) => Err(errno),
                    }
                }
                result => result,
            }
            .context(so_far.display())?;
        }
        Ok(directory)
    }

    /// Puts the drop-ins in place of every library of their names in the standard folders. True if each lies over one.
    pub fn replace_libraries(&self, sources: &Sources) -> Result<bool> {
        let mut all = true;
        for library in &sources.libraries {
            all &= self.replace_library(library)? > 0;
        }
        Ok(all)
    }

    /// The same, and makes what the image has not. A program may load librdmacm by itself
    /// (`dlopen`), so that is made as well, but an image that has none and can't be written to
    /// starts without it.
    pub fn replace_or_add_libraries(&self, sources: &Sources) -> Result<()> {
        for library in &sources.libraries {
            if self.replace_library(library)? == 0 {
                match self.add_library(library, sources) {
                    Err(failure) if library.name == LIBRARY => return Err(failure),
                    _ => {}
                }
            }
        }
        self.complete_c_library(sources);
        Ok(())
    }

    /// The drop-ins name the parts that glibc had before 2.34, as every program built for an older one does. Each newer
    /// glibc brings empty files of these names, but an image made of the files that `ldd` lists lacks them. There each
    /// name becomes a link to the C library, which the loader takes for the library that it has already. An image that
    /// can't be written to starts without them.
    fn complete_c_library(&self, sources: &Sources) {
        for name in C_LIBRARY_PARTS {
            if self.library_directories().iter().any(|directory| self.has(directory.join(name))) {
                continue;
            }
            let with_c_library = self.default_directories().into_iter().find(|path| self.has(path.join(C_LIBRARY)));
            if let Some(directory) = with_c_library
                && let Ok(directory) = self.resolve(directory, OFlags::DIRECTORY)
                && self.is_own(&directory, sources)
            {
                let _ = self.owner.make(|| symlinkat(C_LIBRARY, &directory, name));
            }
        }
    }

    fn has(&self, path: impl AsRef<Path>) -> bool {
        self.resolve(path, OFlags::empty()).is_ok()
    }

    /// The number of places.
    fn replace_library(&self, library: &Library) -> Result<usize> {
        let name = library.name;
        let mut replaced = 0;
        for directory in self.library_directories() {
            let Ok(target) = self.resolve(directory.join(name), OFlags::empty()) else { continue };
            let metadata = fstat(&target).context(name)?;
            let is_file = FileType::from_raw_mode(metadata.st_mode) == FileType::RegularFile;
            // Another name of a place that was done already leads to the drop-in itself.
            if !is_file || identity(&metadata) == library.identity {
                continue;
            }
            let Some(source) = library.mounts.get(replaced) else {
                fail!("the container has {name} in more than {LIBRARY_COUNT_MAX} places");
            };
            mount_onto(source, &target)
                .context(format!("can't put the drop-in over {} of the container", directory.join(name).display()))?;
            replaced += 1;
        }
        Ok(replaced)
    }

    /// Makes a library in a standard folder of an image that has none, and the drop-in on it.
    fn add_library(&self, library: &Library, sources: &Sources) -> Result<()> {
        let name = library.name;
        for directory in self.default_directories() {
            let Ok(directory_fd) = self.resolve(&directory, OFlags::DIRECTORY) else { continue };
            if !self.is_own(&directory_fd, sources) {
                continue;
            }
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
            match self.owner.make(|| openat(&directory_fd, name, flags, Mode::from(0o644)))? {
                Ok(_) | Err(Errno::EXIST) => {}
                Err(errno) => {
                    fail!(
                        "the image has no {name} and none can be made in /{}: {errno}; install libibverbs1 in the \
                         image",
                        directory.display()
                    )
                }
            }
            let target = openat(&directory_fd, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
                .context(name)?;
            return mount_onto(&library.mounts[0], &target).context("can't put the drop-in into the image");
        }
        // No folder for libraries: only static programs, which can't use the drop-in anyway.
        Ok(())
    }

    /// Whether the drop-in, which needs glibc, can run in this file system. Packages of musl's distributions give
    /// glibc's loader a name there (gcompat), but no C library.
    pub fn check_c_library(&self) -> Result<()> {
        if !self.has(architecture::MUSL_LOADER) {
            return Ok(());
        }
        let has_c_library = self.library_directories().iter().any(|directory| self.has(directory.join(C_LIBRARY)));
        if !self.has(architecture::LOADER) || !has_c_library {
            return Err(Failure::new(
                "this image is built on musl, and FreeFlow's verbs library needs glibc; use a Debian, Ubuntu, Fedora \
                 or similar image",
            ));
        }
        Ok(())
    }

    /// Folders that the loader looks into by default, the most specific first.
    fn default_directories(&self) -> Vec<PathBuf> {
        let triplet = architecture::TRIPLET;
        ["usr/lib/", "lib/"]
            .into_iter()
            .map(|base| PathBuf::from(format!("{base}{triplet}")))
            .chain(["usr/lib64", "lib64", "usr/lib", "lib"].into_iter().map(PathBuf::from))
            .collect()
    }

    /// The same, and those of `/etc/ld.so.conf` and `/etc/ld.so.conf.d`.
    fn library_directories(&self) -> Vec<PathBuf> {
        let triplet = architecture::TRIPLET;
        let mut all = self.default_directories();
        all.extend(
            [format!("usr/local/lib/{triplet}"), "usr/local/lib64".into(), "usr/local/lib".into()].map(PathBuf::from),
        );
        let mut files = vec![PathBuf::from("etc/ld.so.conf")];
        if let Ok(directory) = self.resolve("etc/ld.so.conf.d", OFlags::DIRECTORY)
            && let Ok(directory) =
                openat(&directory, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            && let Ok(entries) = rustix::fs::Dir::new(directory)
        {
            let entries = entries.take(CONFIGURATION_FILE_COUNT_MAX).flatten();
            let names = entries.filter_map(|entry| entry.file_name().to_str().ok().map(str::to_string));
            let names = names.filter(|name| name.ends_with(".conf"));
            files.extend(names.map(|name| Path::new("etc/ld.so.conf.d").join(name)));
        }
        for file in files {
            all.extend(self.configured_directories(&file));
        }
        all
    }

    fn configured_directories(&self, file: &Path) -> Vec<PathBuf> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        // NONBLOCK: the image may have put a FIFO there.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let Ok(file) = openat2(&self.directory, file, flags, Mode::empty(), resolve) else { return Vec::new() };
        let is_file = fstat(&file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        if !is_file {
            return Vec::new();
        }
        let text = std::io::Read::take(File::from(file), CONFIGURATION_BYTES_MAX);
        BufReader::new(text)
            .lines()
            .map_while(std::io::Result::ok)
            .filter_map(|line| Some(PathBuf::from(line.trim().strip_prefix('/')?)))
            .take(CONFIGURED_DIRECTORY_COUNT_MAX)
            .collect()
    }
}

/// Limits on what is read of an image.
const CONFIGURATION_FILE_COUNT_MAX: usize = 64;
const CONFIGURATION_BYTES_MAX: u64 = 16 * 1024;
const CONFIGURED_DIRECTORY_COUNT_MAX: usize = 64;

fn identity(metadata: &Stat) -> (u64, u64) {
    (metadata.st_dev, metadata.st_ino)
}
