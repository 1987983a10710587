//! Files of the kernel's: `/sys`, and nodes in `/dev`. Tests read a recorded tree in their place.
use std::io;
use std::path::{Path, PathBuf};

/// A root directory; paths are relative to it.
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    pub fn of_this_machine() -> Self {
        Self { root: "/".into() }
    }

    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }

    /// Without the line's end.
    ///
    /// # Errors
    /// The file can't be read; it is named.
    pub fn read(&self, path: &str) -> io::Result<String> {
        let path = self.path(path);
        let text = std::fs::read_to_string(&path).map_err(|error| explain(&path, &error))?;
        Ok(text.trim().to_owned())
    }

    /// A number, in decimal or behind `0x`.
    ///
    /// # Errors
    /// The file can't be read, or has none.
    pub fn number(&self, path: &str) -> io::Result<u64> {
        let text = self.read(path)?;
        let number = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => text.parse(),
        };
        number.map_err(|_| io::Error::other(format!("{}: {text} is no number", self.path(path).display())))
    }

    /// # Errors
    /// The kernel refuses; the file and the text are named.
    pub fn write(&self, path: &str, text: &str) -> io::Result<()> {
        let path = self.path(path);
        std::fs::write(&path, text)
            .map_err(|error| io::Error::other(format!("{text:?} into {}: {error}", path.display())))
    }

    /// Names in a directory, in order; none if it is not there.
    pub fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path(path)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Name of the driver that has a device.
    pub fn driver(&self, device: &str) -> Option<String> {
        let link = std::fs::read_link(self.path(device).join("driver")).ok()?;
        Some(link.file_name()?.to_str()?.to_owned())
    }
}

fn explain(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
pub mod recorded {
    //! A tree as Linux 6.1 has it in QEMU 7.2 with one NVDIMM of 256 MiB, before and after the device was made.
    use super::Tree;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    pub struct Recorded {
        pub tree: Tree,
    }

    impl Drop for Recorded {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.tree.root);
        }
    }

    impl Recorded {
        /// `text` has a line for each file (`PATH=CONTENT`), link (`PATH -> TARGET`) and directory (`PATH/`).
        pub fn of(text: &str) -> Self {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            // Relaxed: a number that nobody else has.
            let name = format!("freeflow-guest-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
            let this = Self { tree: Tree { root: std::env::temp_dir().join(name) } };
            this.add(text);
            this
        }

        pub fn add(&self, text: &str) {
            for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
                if let Some((path, target)) = line.split_once(" -> ") {
                    std::os::unix::fs::symlink(target, self.parent(path)).unwrap();
                } else if let Some((path, content)) = line.split_once('=') {
                    std::fs::write(self.parent(path), format!("{content}\n")).unwrap();
                } else {
                    std::fs::create_dir_all(self.tree.path(line)).unwrap();
                }
            }
        }

        fn parent(&self, path: &str) -> PathBuf {
            let path = self.tree.path(path);
            std::fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).unwrap();
            path
        }
    }

    pub const NVDIMM: &str = "
        sys/bus/acpi/devices/ACPI0012:00/
        sys/bus/acpi/drivers/nfit/
        sys/bus/nd/drivers/nd_pmem/unbind=
        sys/bus/nd/drivers/nd_pmem/bind=
        sys/bus/nd/drivers/dax_pmem/bind=
        sys/bus/nd/drivers/dax_pmem/unbind=
        sys/bus/dax/drivers/device_dax/
        sys/bus/nd/devices/region0/devtype=nd_pmem
        sys/bus/nd/devices/region0/resource=0x100000000
        sys/bus/nd/devices/region0/size=268435456
        sys/bus/nd/devices/region0/dax_seed=dax0.0
        sys/bus/nd/devices/region0/namespace_seed=
        sys/bus/nd/devices/region0/init_namespaces=1/1
        sys/bus/nd/devices/region0/namespaces=namespace0.0
        sys/bus/nd/devices/region0/dax0.0/uuid=
        sys/bus/nd/devices/region0/dax0.0/align=2097152
        sys/bus/nd/devices/region0/dax0.0/mode=none
        sys/bus/nd/devices/region0/dax0.0/namespace=
        sys/bus/nd/devices/region0/namespace0.0/resource=0x100000000
        sys/bus/nd/devices/region0/namespace0.0/driver -> ../../../../bus/nd/drivers/nd_pmem
        sys/bus/nd/devices/region0/namespace0.0/block/pmem0/
        sys/bus/nd/devices/ndbus0/
    ";
    pub const DAX: &str = "
        sys/bus/nd/devices/region0/dax0.0/driver -> ../../../../bus/nd/drivers/dax_pmem
        sys/bus/nd/devices/region0/dax0.0/dax0.0/driver -> ../../../../bus/dax/drivers/device_dax
        sys/bus/nd/devices/region0/dax0.0/dax0.0/resource=0x100200000
        sys/bus/nd/devices/region0/dax0.0/dax0.0/size=266338304
        sys/bus/nd/devices/region0/dax0.0/dax0.0/align=4096
        dev/dax0.0=
    ";
    pub const PORT: &str = "
        sys/bus/virtio/drivers/virtio_console/
        sys/class/virtio-ports/vport0p1/name=org.qemu.guest_agent.0
        sys/class/virtio-ports/vport0p2/name=io.freeflow.0
        dev/vport0p2=
    ";
}
