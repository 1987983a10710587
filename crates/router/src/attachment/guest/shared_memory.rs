//! The shared-memory device of a virtual machine's vNIC: one file that the guest sees as a device, and that the router
//! maps once. Rings, segments and staging are parts of it.
//!
//! The file is on tmpfs, which never writes pages back: a store of the worker waits for no disk. Whoever runs the
//! machine may map it, and may truncate it: then all of this vNIC's segments are poisoned, and nobody else's.
//!
//! Invariant: a part is zero bytes when it is made, and no two parts overlap. Nothing of the file but what the agent
//! named as the device's data is used, and that lies inside.
use crate::base::log::warning;
use freeflow_protocol::guest::{DEVICE_FALLBACK, is_fallback};
use freeflow_shm::layout::cq_bytes;
use freeflow_shm::{Doorbell, FreeList, Segment, page_bytes};
use freeflow_verbs::CQE_COUNT_MAX;
use rustix::fs::{FallocateFlags, OFlags, fallocate, fstatfs};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Smallest and largest device, bytes.
const DEVICE_BYTES_MIN: u64 = 16 << 20;
const DEVICE_BYTES_MAX: u64 = 1 << 40;
/// NVDIMMs come in pieces of this.
const DEVICE_BYTES_UNIT: u64 = 2 << 20;

/// `f_type` of tmpfs (`linux/magic.h`).
const TMPFS: u64 = 0x0102_1994;
/// Where the file is if the run directory is on a disk.
const FALLBACK: &str = "/dev/shm";
const NAME: &str = "memory";
/// Longest part, bytes: the largest CQ's, 256 MiB. It is cleared on the control thread, and the guest may have filled
/// it: this takes some ten milliseconds.
fn part_bytes_max() -> usize {
    cq_bytes(CQE_COUNT_MAX).next_multiple_of(page_bytes())
}

/// The data of the device.
struct Data {
    /// Parts are given out.
    is_open: bool,
    /// Where they begin in the file.
    start: u64,
    ranges: FreeList,
}

pub struct SharedMemory {
    file: File,
    whole: Arc<Segment>,
    /// Nobody waits with the lock held.
    data: Mutex<Data>,
    /// Rung when no part is left.
    unused: Doorbell,
}

/// A part of the device, given back when dropped.
struct Lease {
    memory: Arc<SharedMemory>,
    offset: usize,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut data = self.memory.lock();
        data.ranges.give_back(self.offset);
        let is_unused = data.ranges.is_unused();
        drop(data);
        if is_unused {
            self.memory.unused.kick();
        }
    }
}

/// Whether a device may be so large.
fn is_good_size(bytes: u64) -> bool {
    (DEVICE_BYTES_MIN..=DEVICE_BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(DEVICE_BYTES_UNIT)
}

fn is_on_tmpfs(directory: &Path) -> io::Result<bool> {
    Ok(fstatfs(File::open(directory)?)?.f_type as u64 == TMPFS)
}

/// Where the file of a vNIC is, by the vNIC's directory.
fn path_of(directory: &Path) -> io::Result<PathBuf> {
    if is_on_tmpfs(directory)? {
        return Ok(directory.join(NAME));
    }
    if !is_on_tmpfs(Path::new(FALLBACK))? {
        return Err(io::Error::other("neither the run directory nor /dev/shm is on tmpfs"));
    }
    let about = std::fs::metadata(directory)?;
    Ok(PathBuf::from(format!("{DEVICE_FALLBACK}{:x}-{:x}", about.dev(), about.ino())))
}

/// Opens or makes the file. Everybody may write to /dev/shm: what another user has put there is not taken.
fn open_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(path)?;
    let about = file.metadata()?;
    let is_own = about.is_file() && about.uid() == rustix::process::geteuid().as_raw();
    if !is_own || about.nlink() != 1 || about.mode() & 0o077 != 0 {
        return Err(io::Error::other(format!("{} is another user's", path.display())));
    }
    Ok(file)
}

/// A machine may fill its device: all devices together leave a quarter of what is free now to others.
///
/// # Errors
/// A device of so many bytes more does not fit.
fn check_room(directory: &Path, path: &Path, bytes: u64) -> io::Result<()> {
    let about = fstatfs(File::open(path.parent().unwrap_or(directory))?)?;
    let (free, all) = (about.f_bavail.saturating_mul(about.f_bsize as u64), about.f_blocks);
    // Nothing yet but a length.
    let promised = |about: std::fs::Metadata| about.len().saturating_sub(about.blocks() * 512);
    let vnics = directory.parent().map(std::fs::read_dir).transpose()?.into_iter().flatten().flatten();
    let others = vnics.filter(|vnic| vnic.path() != directory);
    let others: u64 = others.filter_map(|vnic| std::fs::metadata(vnic.path().join(NAME)).ok()).map(promised).sum();
    // A tmpfs without a limit says 0.
    if all > 0 && bytes.saturating_add(others) > free - free / 4 {
        return Err(io::Error::other("the file system of shared-memory devices has no room for one of that size"));
    }
    Ok(())
}

/// The vNIC is gone, and the file with it: who has it mapped keeps its pages.
pub fn remove(directory: &Path) {
    let link = directory.join(NAME);
    // By the link, whose directory may be on its way already.
    if let Ok(path) = std::fs::read_link(&link)
        && path.to_str().is_some_and(is_fallback)
    {
        let _ = std::fs::remove_file(path);
    }
    let _ = std::fs::remove_file(link);
}

impl SharedMemory {
    /// The device of a vNIC, whose directory has it as `memory`. One that is there, of an earlier router, goes on: a
    /// machine may have it mapped.
    ///
    /// # Errors
    /// No such file can be made or mapped.
    pub fn open(directory: &Path, bytes: u64) -> io::Result<Arc<Self>> {
        if !is_good_size(bytes) {
            return Err(io::Error::other("a shared-memory device of that size can't be"));
        }
        let path = path_of(directory)?;
        if !std::fs::symlink_metadata(&path).is_ok_and(|about| about.len() == bytes) {
            check_room(directory, &path, bytes)?;
        }
        let file = open_file(&path)?;
        if file.metadata()?.len() != bytes {
            file.set_len(bytes)?;
        }
        let link = directory.join(NAME);
        // The host may have been started again, and have other numbers of devices.
        if path != link && std::fs::read_link(&link).ok().as_ref() != Some(&path) {
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(&path, &link)?;
        }
        Self::of_file(file, bytes)
    }

    fn of_file(file: File, bytes: u64) -> io::Result<Arc<Self>> {
        let length = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let whole = Arc::new(Segment::map(file.as_fd(), length)?);
        let data = Mutex::new(Data { is_open: false, start: 0, ranges: FreeList::new(0) });
        Ok(Arc::new(Self { file, whole, data, unused: Doorbell::new()? }))
    }

    fn lock(&self) -> MutexGuard<'_, Data> {
        self.data.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn bytes(&self) -> u64 {
        self.whole.bytes() as u64
    }

    /// Readable when the last part has been given back.
    pub fn unused(&self) -> &Doorbell {
        &self.unused
    }

    pub fn is_unused(&self) -> bool {
        self.lock().ranges.is_unused()
    }

    /// The file was truncated under the mapping.
    pub fn is_lost(&self) -> bool {
        self.whole.poisoned()
    }

    /// From now on no part is to be had.
    pub fn close(&self) {
        self.lock().is_open = false;
    }

    /// No byte of the whole file is left. Errors: it is in use, or lost, or the kernel can't.
    pub fn clear(&self) -> io::Result<()> {
        if !self.is_unused() {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        if self.is_lost() || self.file.metadata()?.len() != self.bytes() {
            return Err(io::Error::other(
                "the shared-memory device was truncated; detach the vNIC and attach it again",
            ));
        }
        self.punch(0..self.bytes())
    }

    fn punch(&self, range: Range<u64>) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, range.start, range.end - range.start)?)
    }

    /// Parts are made of these bytes of the file from now on.
    ///
    /// # Errors
    /// They are not whole pages, or not inside the file; or parts of others are in use.
    pub fn begin(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let page = page_bytes() as u64;
        let end = offset.checked_add(bytes).filter(|&end| end <= self.bytes());
        let is_whole = offset.is_multiple_of(page) && bytes.is_multiple_of(page) && bytes > 0;
        let mut data = self.lock();
        if end.is_none() || !is_whole || !data.ranges.is_unused() {
            return Err(io::Error::other("the device's data are not inside the device"));
        }
        *data = Data { is_open: true, start: offset, ranges: FreeList::new(bytes as usize) };
        Ok(())
    }

    /// A part of zero bytes, and where it begins in the device's data.
    ///
    /// # Errors
    /// There is no room, or the file is lost.
    pub fn part(self: &Arc<Self>, bytes: usize) -> io::Result<(Segment, u64)> {
        let no_memory = || io::Error::from(rustix::io::Errno::NOMEM);
        if self.is_lost() {
            return Err(no_memory());
        }
        let bytes = bytes.checked_next_multiple_of(page_bytes()).ok_or_else(no_memory)?;
        if bytes > part_bytes_max() {
            return Err(no_memory());
        }
        let mut data = self.lock();
        let offset = if data.is_open { data.ranges.take(bytes) } else { None };
        let offset = offset.ok_or_else(no_memory)?;
        let start = data.start + offset as u64;
        drop(data);
        let lease = Lease { memory: self.clone(), offset };
        self.punch(start..start + bytes as u64).inspect_err(|error| {
            warning!("a part of a shared-memory device can't be cleared", error = error);
        })?;
        Ok((Segment::part(&self.whole, start as usize, bytes, lease)?, offset as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Arc<SharedMemory> {
        let file = rustix::fs::memfd_create("device", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, DEVICE_BYTES_MIN).unwrap();
        SharedMemory::of_file(file.into(), DEVICE_BYTES_MIN).unwrap()
    }

    #[test]
    fn parts_are_zero_apart_and_given_back() {
        let memory = memory();
        assert!(memory.part(4096).is_err(), "before it has begun");
        memory.begin(8192, 4 * 4096).unwrap();
        let (first, at) = memory.part(1).unwrap();
        let (second, next) = memory.part(2 * 4096).unwrap();
        assert_eq!((at, next, first.bytes(), second.bytes()), (0, 4096, 4096, 8192));
        first.write(0, b"secret", false).unwrap();
        let mut bytes = [0; 6];
        rustix::io::pread(&memory.file, &mut bytes, 8192).unwrap();
        assert_eq!(&bytes, b"secret", "where the device's data begin");
        assert!(memory.part(2 * 4096).is_err() && !memory.is_unused() && memory.clear().is_err());
        drop(first);
        let (first, at) = memory.part(4096).unwrap();
        first.read(0, &mut bytes).unwrap();
        assert_eq!((at, bytes), (0, [0; 6]), "no byte of the one before");
        // Parts that are there go on.
        memory.close();
        assert!(memory.part(4096).is_err() && memory.begin(0, 4096).is_err());
        drop((first, second));
        assert!(memory.is_unused() && memory.unused().drain());
        rustix::io::pwrite(&memory.file, b"boot", 4 << 20).unwrap();
        memory.clear().unwrap();
        let mut bytes = [1; 4];
        rustix::io::pread(&memory.file, &mut bytes, 4 << 20).unwrap();
        assert_eq!((bytes, memory.file.metadata().unwrap().blocks()), ([0; 4], 0));
        memory.begin(0, memory.bytes()).unwrap();
        assert!(memory.part(memory.bytes() as usize).is_ok());
    }

    #[test]
    fn what_others_have_put_there_is_neither_opened_nor_removed() {
        let base = std::env::temp_dir().join(format!("freeflow-devices-{}", std::process::id()));
        let directory = base.join("vnic");
        std::fs::create_dir_all(&directory).unwrap();
        let victim = base.join("victim");
        std::fs::write(&victim, b"mine").unwrap();
        let path = path_of(&directory).unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        assert!(SharedMemory::open(&directory, DEVICE_BYTES_MIN).is_err(), "another's link");
        std::fs::remove_file(&path).unwrap();
        std::fs::hard_link(&victim, base.join("second")).unwrap();
        assert!(open_file(&victim).is_err(), "a file of other names, too");
        let link = directory.join(NAME);
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        remove(&directory);
        assert!(!link.exists());
        assert_eq!(std::fs::read(&victim).unwrap(), b"mine");
        drop(SharedMemory::open(&directory, DEVICE_BYTES_MIN).unwrap());
        remove(&directory);
        assert!(!path.exists());
        assert!(check_room(&directory, &path, u64::MAX).is_err());
        std::fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn a_part_that_takes_long_to_clear_is_refused() {
        let file = rustix::fs::memfd_create("device", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let bytes = 2 * part_bytes_max() as u64;
        rustix::fs::ftruncate(&file, bytes).unwrap();
        let memory = SharedMemory::of_file(file.into(), bytes).unwrap();
        memory.begin(0, bytes).unwrap();
        assert!(memory.part(part_bytes_max() + 1).is_err() && memory.part(part_bytes_max()).is_ok());
    }

    #[test]
    fn data_that_an_agent_names_are_inside_and_whole_pages() {
        let memory = memory();
        let bytes = memory.bytes();
        for (offset, length) in [
            (0, 0),
            (0, bytes + 4096),
            (4096, bytes),
            (bytes, 4096),
            (1, 4096),
            (0, 4097),
            (u64::MAX - 4095, 4096),
            (u64::MAX, u64::MAX),
            (4096, u64::MAX - 4095),
        ] {
            assert!(memory.begin(offset, length).is_err(), "{offset} {length}");
        }
        memory.begin(bytes - 4096, 4096).unwrap();
        assert!(memory.part(usize::MAX).is_err() && memory.part(8192).is_err() && memory.part(4096).is_ok());
    }

    #[test]
    fn a_file_that_is_truncated_is_lost_for_this_vnic() {
        freeflow_shm::install_sigbus_guard().unwrap();
        let (memory, other) = (memory(), memory());
        memory.begin(0, 1 << 20).unwrap();
        let (part, _) = memory.part(4096).unwrap();
        rustix::fs::ftruncate(&memory.file, 0).unwrap();
        part.read(0, &mut [0; 4]).unwrap();
        assert!(part.poisoned() && memory.is_lost() && memory.part(4096).is_err());
        drop(part);
        memory.close();
        assert!(memory.clear().is_err());
        assert!(!other.is_lost() && other.clear().is_ok());
    }
}
