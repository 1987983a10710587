//! Borrowed segments: memory that a process shares by a file of its own, of System V, POSIX or tmpfs, a memfd, an
//! anonymous shared mapping. The router maps the same file, so that it copies there as in its own segments.
//!
//! The file is opened by `/proc/PID/map_files`, which takes CAP_CHECKPOINT_RESTORE, on threads of the vNIC
//! ([`Identifiers`]): each of these calls may wait for the process.
//!
//! Invariant: only a file of tmpfs or hugetlbfs is opened for more than its name. No page fault and no system call on
//! such a file runs code of a tenant's, or waits for a device. (A look at a file of FUSE's may wait for its daemon, on
//! this thread.)
//!
//! Invariant: the process has the right to write to the file that is mapped. Its map shows that, by one answer of the
//! kernel, as an area that is shared and writable; the area is looked at while the file is open, so that its number
//! does not become another's; and the map is that of the program which connected, whatever the process has executed
//! since. Numbers of files are not unique: memory of System V has its identifier, which the process may choose, for
//! one. So the file must also be its user's own, who may open it for writing in any case.
use crate::attachment::identify::Identifiers;
use crate::memory::entrusted::Entrusted;
use freeflow_shm::{Segment, SharedArea};
use freeflow_verbs::VerbsError;
use rustix::fs::{Mode, OFlags, fstat, fstatfs, major, minor, open, openat};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// `f_type` of a file system whose pages are the kernel's memory (`linux/magic.h`).
const TMPFS: u64 = 0x0102_1994;
const HUGETLBFS: u64 = 0x9584_58f6;
/// Largest huge pages. The kernel clears one while faults of others wait for it.
const PAGE_BYTES_MAX: u64 = 2 << 20;

/// Addresses of a process, all in one area of its map. In bytes.
#[derive(Clone, Copy, Debug)]
pub struct Borrowing {
    pub address: u64,
    pub length: u64,
}

/// Takes the segment, or why there is none.
pub type BorrowAnswer = Box<dyn FnOnce(Result<Segment, VerbsError>) + Send>;

/// A process, by what was opened while it was known to live.
#[derive(Clone)]
pub struct MappingProcess {
    /// `/proc/PID/task`.
    pub tasks: Arc<Entrusted<OwnedFd>>,
    /// `/proc/PID/maps`.
    pub maps: Arc<Entrusted<File>>,
    /// Of who connected.
    pub uid: u32,
}

/// One that nobody served is answered all the same.
struct Unanswered(Option<BorrowAnswer>);

impl Unanswered {
    fn answer(mut self, result: Result<Segment, VerbsError>) {
        if let Some(answer) = self.0.take() {
            answer(result);
        }
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(answer) = self.0.take() {
            answer(Err(VerbsError::NoMemory));
        }
    }
}

/// Has one of the vNIC's threads do it; never waits.
pub fn submit(threads: &Identifiers, process: MappingProcess, place: Borrowing, answer: BorrowAnswer) {
    let answer = Unanswered(Some(answer));
    let task = move || {
        let MappingProcess { tasks, maps, uid } = process;
        let result = borrow(tasks.as_fd(), &maps, uid, place);
        answer.answer(result.map_err(|_| VerbsError::NotSupported));
    };
    // Without a thread it is dropped, and so answered.
    drop(threads.submit(Box::new(task)));
}

/// Maps what the process has mapped there.
///
/// # Errors
/// It is no memory that can be borrowed.
fn borrow(tasks: BorrowedFd<'_>, maps: &File, uid: u32, place: Borrowing) -> io::Result<Segment> {
    let refused = || io::Error::other("no memory that can be borrowed");
    let end = place.address.checked_add(place.length).ok_or_else(refused)?;
    let bytes = usize::try_from(place.length).map_err(|_| refused())?;
    let SharedArea { start, end: area_end, .. } = SharedArea::find(maps, place.address)?;
    let name = format!("../map_files/{start:x}-{area_end:x}");
    // Names the file, and does nothing with it.
    let named = openat(tasks, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let file_system = fstatfs(&named)?;
    let is_memory = [TMPFS, HUGETLBFS].contains(&(file_system.f_type as u64));
    if !is_memory || file_system.f_bsize as u64 > PAGE_BYTES_MAX {
        return Err(refused());
    }
    let about = fstat(&named)?;
    // Again, now that the file can't become another one.
    let area = SharedArea::find(maps, place.address)?;
    let device = (major(about.st_dev), minor(about.st_dev));
    if (area.device, area.inode) != (device, about.st_ino) || area.end < end || about.st_uid != uid {
        return Err(refused());
    }
    // A lease on the file is not waited for.
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = open(format!("/proc/thread-self/fd/{}", named.as_raw_fd()), flags, Mode::empty())?;
    Segment::borrow(file.as_fd(), area.offset + (place.address - area.start), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;

    const PAGE: usize = 4096;
    const LENGTH: u64 = 6 * PAGE as u64;

    fn try_borrow(address: u64, length: u64) -> io::Result<Segment> {
        let tasks = open("/proc/self/task", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let uid = rustix::process::geteuid().as_raw();
        borrow(tasks.as_fd(), &File::open("/proc/self/maps").unwrap(), uid, Borrowing { address, length })
    }

    /// Whether this test may open `map_files` at all.
    fn may() -> bool {
        let is_root = rustix::process::geteuid().is_root() && freeflow_shm::refuses_missing_pages().is_ok();
        if !is_root {
            eprintln!("skipped: it takes root, and userfaultfd");
        }
        is_root
    }

    fn memory() -> OwnedFd {
        let file = rustix::fs::memfd_create("borrowed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, LENGTH).unwrap();
        rustix::io::pwrite(&file, b"here", 2 * PAGE as u64).unwrap();
        file
    }

    #[test]
    fn shared_memory_is_borrowed_and_may_shrink() {
        if !may() {
            return;
        }
        freeflow_shm::install_sigbus_guard().unwrap();
        let file = memory();
        let mapping = Segment::map(file.as_fd(), 6 * PAGE).unwrap();
        let address = mapping.address() as u64;
        let segment = try_borrow(address + 2 * PAGE as u64, 2 * PAGE as u64).unwrap();
        let mut bytes = [0; 4];
        segment.read(0, &mut bytes).unwrap();
        assert_eq!((&bytes, segment.bytes()), (b"here", 2 * PAGE));
        segment.write(1, b"ey", false).unwrap();
        rustix::io::pread(&file, &mut bytes, 2 * PAGE as u64).unwrap();
        assert_eq!(&bytes, b"heye");
        assert!(segment.read(PAGE, &mut bytes).is_err(), "nobody has touched that page yet");
        rustix::fs::ftruncate(&file, 0).unwrap();
        assert!(segment.read(0, &mut bytes).is_err() && segment.write(0, b"x", false).is_err());
        assert!(segment.fetch_add(0, 1).is_err() && !segment.poisoned());
        rustix::fs::ftruncate(&file, LENGTH).unwrap();
        rustix::io::pwrite(&file, b"back", 2 * PAGE as u64).unwrap();
        segment.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"back");
        assert!(try_borrow(address + PAGE as u64, LENGTH).is_err(), "beyond the area");
    }

    #[test]
    fn what_may_not_be_written_or_is_no_memory_is_refused() {
        if !may() {
            return;
        }
        let file = memory();
        let for_reading = Segment::map_for_reading(file.as_fd(), 6 * PAGE).unwrap();
        assert!(try_borrow(for_reading.address() as u64, LENGTH).is_err(), "read-only");
        let mapping = Segment::map(file.as_fd(), 6 * PAGE).unwrap();
        assert!(try_borrow(mapping.address() as u64, LENGTH).is_ok());
        rustix::fs::fchown(&file, Some(rustix::fs::Uid::from_raw(12345)), None).unwrap();
        assert!(try_borrow(mapping.address() as u64, LENGTH).is_err(), "another user's");
        rustix::fs::fchown(&file, Some(rustix::process::geteuid()), None).unwrap();
        rustix::fs::ftruncate(&file, LENGTH - 2 * PAGE as u64).unwrap();
        assert!(try_borrow(mapping.address() as u64, LENGTH).is_err(), "beyond the file's end");
        assert!(try_borrow(mapping.address() as u64, PAGE as u64).is_ok());
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::FUTURE_WRITE).unwrap();
        assert!(try_borrow(mapping.address() as u64, PAGE as u64).is_err(), "sealed");
        let private = vec![0_u8; 4 * PAGE];
        assert!(try_borrow((private.as_ptr().addr() as u64).next_multiple_of(PAGE as u64), PAGE as u64).is_err());
        let path = std::env::current_exe().unwrap().with_extension("borrowed");
        let disk = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        disk.set_len(LENGTH).unwrap();
        let mapping = Segment::map(disk.as_fd(), 6 * PAGE).unwrap();
        if ![TMPFS, HUGETLBFS].contains(&(fstatfs(&disk).unwrap().f_type as u64)) {
            assert!(try_borrow(mapping.address() as u64, LENGTH).is_err(), "on a disk");
        }
    }
}
