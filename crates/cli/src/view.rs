//! View of a `freeflow run` container: the host's root file system with its own `/proc`, `/sys`,
//! `/dev`, hostname and capabilities, its vNICs at `/run/freeflow` and in `/sys/class`, the drop-in
//! library, names of its network at `/etc/hosts`, and none of the run directories of the machine.
//!
//! It is a light container: it reads the host's files, and what it writes is its own (see
//! `own_files`) unless it shares them.

use crate::container_owner::ContainerOwner;
use crate::failure::{Context, Result, fail};
use crate::inject::{Root, Sources, detached_recursive, mount_onto, protected};
use crate::own_files;
use freeflow_client::vnic_directory;
use freeflow_hostnet::cdi::VERBS_DEVICE;
use rustix::fs::{CWD, Mode, OFlags, open};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, mount, mount_bind, mount_change, mount_remount, move_mount,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
};
use std::ffi::CStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// A `-v A:B[:ro]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Volume {
    pub source: PathBuf,
    pub target: PathBuf,
    pub read_only: bool,
}

/// Everything that [`View::enter`] needs, in the host's names.
#[derive(Clone, Debug)]
pub struct View {
    pub hostname: String,
    /// The hosts file of the container's network.
    pub names: Option<PathBuf>,
    /// In the order of their devices.
    pub vnic_directories: Vec<PathBuf>,
    pub library: PathBuf,
    pub volumes: Vec<Volume>,
    /// Directories to cover with empty ones.
    pub hidden: Vec<PathBuf>,
    /// The container writes the host's own files. Else: a directory for [`own_files::enter`].
    pub share_host: bool,
    pub scratch: PathBuf,
}

/// Docker's default capabilities, less MKNOD: the host's file system is in view.
const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::AUDIT_WRITE);
const CAPABILITY_COUNT_MAX: u32 = 64;

const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
const DEVICE_LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];
/// As container runtimes do: what shows or changes the whole machine.
const PROC_READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
const PROC_MASKED: [&str; 5] =
    ["/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug"];

impl View {
    /// Arranges the view in the calling process' mount and UTS namespaces, which must be its own. True if the drop-ins
    /// lie over system libraries; else they have to be found by LD_LIBRARY_PATH.
    pub fn enter(&self) -> Result<bool> {
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .context("can't make the mounts private")?;
        let directories: Vec<&Path> = self.vnic_directories.iter().map(PathBuf::as_path).collect();
        // Each with those before it; the last one has all.
        let sources = (1..=directories.len()).map(|count| Sources::open(&directories[..count], &self.library));
        let sources: Vec<Sources> = sources.collect::<Result<_>>()?;
        let Some(all) = sources.last() else { fail!("a container needs a vNIC") };
        let volumes = self.open_volumes()?;
        let devices = open_devices(sources.len())?;
        let names = self.names.as_deref().map(protected).transpose()?;
        if !self.share_host {
            own_files::enter(&self.scratch, &self.hidden)?;
        }
        let root = Root::open(Path::new("/"), ContainerOwner::HOST_ROOT)?;
        let replaced = root.replace_libraries(all)?;
        // First: what is masked in /proc is /dev/null.
        mount_dev(&devices)?;
        mount_proc()?;
        mount("sysfs", "/sys", "sysfs", MountFlags::RDONLY | NO_PRIVILEGE, None).context("can't mount /sys")?;
        root.mount_classes(&all.classes);
        for directory in &self.hidden {
            hide(directory)?;
        }
        for (number, sources) in sources.iter().enumerate() {
            let directory = vnic_directory(number);
            fs::create_dir_all(&directory).context(format!("can't make {}", directory.display()))?;
            root.mount_vnic(sources, number)?;
        }
        if let Some(names) = names {
            self.mount_names(&root, &names)?;
        }
        for (volume, source) in self.volumes.iter().zip(&volumes) {
            mount_volume(volume, source)?;
        }
        rustix::system::sethostname(self.hostname.as_bytes()).context("can't set the host name")?;
        Ok(replaced)
    }

    /// A place for it is made where nobody else sees that.
    fn mount_names(&self, root: &Root, names: &OwnedFd) -> Result<()> {
        let hosts_file = Path::new("/etc/hosts");
        if !hosts_file.exists() {
            if self.share_host {
                return Ok(());
            }
            fs::create_dir_all("/etc").and_then(|()| fs::File::create(hosts_file).map(drop)).context("/etc/hosts")?;
        }
        let target = root.resolve(hosts_file, OFlags::empty()).context("/etc/hosts")?;
        mount_onto(names, &target).context("can't put the names of the network at /etc/hosts")
    }

    fn open_volumes(&self) -> Result<Vec<OwnedFd>> {
        self.volumes.iter().map(|volume| detached_recursive(&volume.source)).collect()
    }
}

const NO_PRIVILEGE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

fn tmpfs(target: &Path, flags: MountFlags, data: &CStr) -> Result<()> {
    mount("tmpfs", target, "tmpfs", flags, data).context(format!("can't mount a tmpfs on {}", target.display()))
}

fn hide(directory: &Path) -> Result<()> {
    // Hidden by an earlier one, or gone.
    if !directory.is_dir() {
        return Ok(());
    }
    tmpfs(directory, NO_PRIVILEGE | MountFlags::RDONLY, c"size=4k,nr_inodes=2,mode=0755")
}

fn mount_proc() -> Result<()> {
    mount("proc", "/proc", "proc", NO_PRIVILEGE, None).context("can't mount /proc")?;
    for path in PROC_READ_ONLY.into_iter().filter(|path| Path::new(path).exists()) {
        mount_bind(path, path).context(path)?;
        mount_remount(path, MountFlags::BIND | MountFlags::RDONLY | NO_PRIVILEGE, c"").context(path)?;
    }
    for path in PROC_MASKED.into_iter().filter(|path| Path::new(path).exists()) {
        mount_bind("/dev/null", path).context(path)?;
    }
    Ok(())
}

/// Devices by their names in the container; the verbs device is one more null device.
fn open_devices(vnic_count: usize) -> Result<Vec<(String, OwnedFd)>> {
    let verbs_devices = (0..vnic_count).map(|number| (format!("{VERBS_DEVICE}{number}"), "null"));
    let names = DEVICES.into_iter().map(|name| (name.to_string(), name)).chain(verbs_devices);
    names.map(|(name, host)| Ok((name, crate::inject::detached(&Path::new("/dev").join(host))?))).collect()
}

fn mount_dev(devices: &[(String, OwnedFd)]) -> Result<()> {
    let dev = Path::new("/dev");
    tmpfs(dev, MountFlags::NOSUID, c"mode=0755,size=64k")?;
    fs::create_dir(dev.join("infiniband")).context("/dev/infiniband")?;
    for (name, device) in devices {
        let path = dev.join(name);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let target = open(&path, flags, Mode::from(0o666)).context(path.display())?;
        mount_onto(device, &target).context(path.display())?;
    }
    for (name, target) in DEVICE_LINKS {
        std::os::unix::fs::symlink(target, dev.join(name)).context(name)?;
    }
    for directory in ["shm", "pts", "mqueue"] {
        fs::create_dir(dev.join(directory)).context(directory)?;
    }
    tmpfs(&dev.join("shm"), NO_PRIVILEGE, c"mode=1777")?;
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount("devpts", "/dev/pts", "devpts", flags, c"newinstance,ptmxmode=0666,mode=0620").context("/dev/pts")?;
    // Not every kernel has message queues; who needs them will say so.
    let _ = mount("mqueue", "/dev/mqueue", "mqueue", NO_PRIVILEGE, None);
    Ok(())
}

fn mount_volume(volume: &Volume, source: &OwnedFd) -> Result<()> {
    let what = || format!("can't mount {} at {}", volume.source.display(), volume.target.display());
    if !volume.target.exists() {
        if volume.source.is_dir() {
            fs::create_dir_all(&volume.target).context(what())?;
        } else {
            fs::create_dir_all(volume.target.parent().unwrap_or(Path::new("/"))).context(what())?;
            fs::File::create(&volume.target).context(what())?;
        }
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    move_mount(source, "", CWD, &volume.target, flags).context(what())?;
    if volume.read_only {
        mount_remount(&volume.target, MountFlags::BIND | MountFlags::RDONLY, c"").context(what())?;
    }
    Ok(())
}

/// Gives up every capability that containers don't have, for good.
pub fn drop_capabilities() -> Result<()> {
    for number in 0..CAPABILITY_COUNT_MAX {
        let Some(capability) = CapabilitySet::from_bits(1 << number) else { continue };
        if CAPABILITIES.contains(capability) {
            continue;
        }
        // EINVAL: this kernel has no such capability.
        match remove_capability_from_bounding_set(capability) {
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(errno) => return Err(errno).context("can't drop capabilities"),
        }
    }
    let _ = clear_ambient_capability_set();
    let mine = rustix::thread::capabilities(None).context("capabilities")?;
    let kept = CAPABILITIES & mine.permitted;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).context("can't drop capabilities")
}
