//! `/sys/class` of a container with several vNICs. The router calls each vNIC's device `freeflow0`, in a tree of the
//! vNIC's own; here they get their numbers: the second one's device is `.freeflow1`, with `infiniband/freeflow1`, which
//! is the router's live directory, and `infiniband_verbs/uverbs1`.
//!
//! The files of that directory with the device's name in them are covered with files that have its name here.

use crate::failure::{Context, Result};
use crate::inject::mount_onto;
use crate::inject_sysfs::{DIRECTORY, copy, data_mount, make_interfaces};
use crate::sys;
use rustix::fs::{Mode, OFlags, mkdirat, openat, symlinkat};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

const VERBS_CLASS: &str = "infiniband";
const CHARACTER_CLASS: &str = "infiniband_verbs";
/// In a vNIC's tree.
const DEVICE: &str = ".freeflow";
const VERBS_DEVICE: &str = "infiniband/freeflow0";
const CHARACTER_DEVICE: &str = "infiniband_verbs/uverbs0";
const NET: &str = "net";
/// Files of a device and of its character device, which do not change.
const DEVICE_FILES: [&str; 6] = ["vendor", "device", "numa_node", "local_cpus", "local_cpulist", "uevent"];
const CHARACTER_FILES: [&str; 2] = ["abi_version", "dev"];
/// Files of a verbs device with its name in them, which do not change either.
const NAME_FILES: [&str; 2] = ["uevent", "node_desc"];
/// Keeps these of a device in the cover, until they lie over the router's.
const NAMES: &str = ".names";
/// Files, directories and links of one device, at most.
const FILE_COUNT_MAX: usize = 32;

/// Content of the cover, besides the mounts that all containers have.
pub struct SeveralDevices {
    directories: Vec<PathBuf>,
    files: Vec<(PathBuf, Vec<u8>)>,
    links: Vec<(PathBuf, PathBuf)>,
    mounts: Vec<(PathBuf, OwnedFd)>,
    /// Files of the cover that are mounted elsewhere in it as well, after all else.
    names: Vec<(PathBuf, PathBuf)>,
}

/// The device's directory in the cover.
fn device_directory(number: usize) -> PathBuf {
    PathBuf::from(if number == 0 { DEVICE.to_string() } else { format!("{DEVICE}{number}") })
}

impl SeveralDevices {
    /// Whether this directory is made here, and is no mount of the first vNIC's.
    pub fn makes(name: &str) -> bool {
        name == VERBS_CLASS || name == CHARACTER_CLASS
    }

    pub fn open(vnics: &[&Path]) -> Result<Self> {
        let first = vnics.first().map(|first| first.join(DIRECTORY)).unwrap_or_default();
        let version = Path::new(CHARACTER_CLASS).join("abi_version");
        let mut all = Self {
            directories: vec![VERBS_CLASS.into(), CHARACTER_CLASS.into()],
            files: vec![(version.clone(), read(&first.join(version))?)],
            links: Vec::new(),
            mounts: Vec::new(),
            names: Vec::new(),
        };
        for (number, vnic) in vnics.iter().enumerate() {
            let device = device_directory(number);
            let verbs = device.join(VERBS_CLASS).join(format!("freeflow{number}"));
            let character = device.join(CHARACTER_CLASS).join(format!("uverbs{number}"));
            for (class, path) in [(VERBS_CLASS, &verbs), (CHARACTER_CLASS, &character)] {
                let name = path.file_name().unwrap_or_default();
                all.links.push((Path::new(class).join(name), Path::new("..").join(path)));
            }
            if number > 0 {
                all.add(number, &vnic.join(DIRECTORY).join(DEVICE), (device, verbs, character))?;
            }
        }
        Ok(all)
    }

    fn add(&mut self, number: usize, tree: &Path, to: (PathBuf, PathBuf, PathBuf)) -> Result<()> {
        let (device, verbs, character) = to;
        let parents = [&verbs, &character].map(|path| path.parent().unwrap_or(path).to_path_buf());
        self.directories.push(device.clone());
        self.directories.extend(parents);
        self.directories.extend([verbs.clone(), character.clone()]);
        for name in DEVICE_FILES {
            self.files.push((device.join(name), read(&tree.join(name))?));
        }
        for name in CHARACTER_FILES {
            self.files.push((character.join(name), read(&tree.join(CHARACTER_DEVICE).join(name))?));
        }
        self.files.push((character.join("ibdev"), format!("freeflow{number}\n").into_bytes()));
        let uevent = String::from_utf8_lossy(&read(&tree.join(CHARACTER_DEVICE).join("uevent"))?)
            .replace("uverbs0", &format!("uverbs{number}"));
        self.files.push((character.join("uevent"), uevent.into_bytes()));
        self.links.push((character.join("device"), "../..".into()));
        self.links.push((character.join("subsystem"), Path::new("../../..").join(CHARACTER_CLASS)));
        self.add_names(number, &tree.join(VERBS_DEVICE), (&device, &verbs))?;
        self.mounts.push((verbs, data_mount(&tree.join(VERBS_DEVICE))?));
        let net = tree.join(NET);
        // The interface may come later.
        make_interfaces(&net).context(net.display())?;
        self.directories.push(device.join(NET));
        self.mounts.push((device.join(NET), data_mount(&net)?));
        Ok(())
    }

    fn add_names(&mut self, number: usize, from: &Path, (device, verbs): (&Path, &Path)) -> Result<()> {
        let names = device.join(NAMES);
        self.directories.push(names.clone());
        for name in NAME_FILES {
            let text = String::from_utf8_lossy(&read(&from.join(name))?).into_owned();
            let named = text.replace("freeflow0", &format!("freeflow{number}"));
            self.files.push((names.join(name), named.into_bytes()));
            self.names.push((names.join(name), verbs.join(name)));
        }
        Ok(())
    }

    pub fn file_count(&self) -> usize {
        FILE_COUNT_MAX * self.links.len()
    }

    /// Makes all but the mounts.
    pub fn make(&self, cover: &OwnedFd) -> Result<()> {
        for path in &self.directories {
            mkdirat(cover, path, Mode::from(0o755)).context(path.display())?;
        }
        for (path, text) in &self.files {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let file = openat(cover, path, flags, Mode::from(0o444)).context(path.display())?;
            File::from(file).write_all(text).context(path.display())?;
        }
        for (path, target) in &self.links {
            symlinkat(target, cover, path).context(path.display())?;
        }
        Ok(())
    }

    pub fn mount(&self, cover: &OwnedFd) -> Result<()> {
        for (path, mount) in &self.mounts {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let target = openat(cover, path, flags, Mode::empty()).context(path.display())?;
            mount_onto(mount, &target).context(path.display())?;
        }
        for (file, path) in &self.names {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let source = copy(cover.as_fd(), file).context(file.display())?;
            sys::protect_data_mount(source.as_fd()).context(file.display())?;
            let target = openat(cover, path, flags, Mode::empty()).context(path.display())?;
            mount_onto(&source, &target).context(path.display())?;
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).context(path.display())
}
