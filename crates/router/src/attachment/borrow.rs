//! Borrowed segments: memory that a process shares by a file of its own, of System V, POSIX or tmpfs, a memfd, an
//! anonymous shared mapping. The router maps the same file, so that it copies there as in its own segments.
//!
//! The file is opened by `/proc/PID/map_files`, which takes CAP_CHECKPOINT_RESTORE, on threads of the vNIC
//! ([`Identifiers`]): each of these calls may wait for the process.
//!
//! Invariant: only a file of tmpfs is opened for more than its name, or asked for anything that is not in the
//! kernel's memory. No page fault and no system call on such a file runs code of a tenant's, or waits for a device.
//! (Not of hugetlbfs: to map a file of that waits for whoever allocates its pages, and all other mappings of the
//! router wait for that.)
//!
//! To map a file waits for whoever walks all mappings of that file, to truncate it or to punch it, and everything
//! else that the router maps waits for that. It takes a program that has the file mapped many thousand times; a vNIC
//! in which this takes long borrows nothing for a while ([`Pace`]).
//!
//! Invariant: the process has the right to write to the file that is mapped. Its map shows that, by one answer of the
//! kernel, as an area that is shared and writable; the area is looked at while the file is open, so that its number
//! does not become another's; and the map is that of the program which connected, whatever the process has executed
//! since. Numbers of files are not unique: memory of System V has its identifier, which the process may choose, for
//! one. So the file must also be its user's own, who may open it for writing in any case.
use crate::attachment::identify::Identifiers;
use crate::base::privileges::ThreadKind;
use crate::memory::entrusted::Entrusted;
use freeflow_shm::{Segment, file_system_of, shared_area, voluntary_switch_count};
use freeflow_verbs::VerbsError;
use rustix::fs::{AtFlags, MemfdFlags, Mode, OFlags, StatxFlags, fstatfs, memfd_create, open, openat, statx};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// `f_type` of the file system whose pages are the kernel's memory (`linux/magic.h`).
const TMPFS: u64 = 0x0102_1994;
/// As much as is read of a process' list of mounts.
const MOUNTS_BYTES_MAX: u64 = 1 << 20;
/// To map a file takes microseconds.
const SLOW: Duration = Duration::from_millis(100);
/// A vNIC in which it took longer borrows nothing for so long, twice as long after each further time.
const PAUSE_MIN: Duration = Duration::from_secs(10);
const PAUSE_MAX: Duration = Duration::from_secs(640);

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

/// When a vNIC may borrow: not after it took long.
#[derive(Default)]
struct Pace {
    pause: Duration,
    until: Option<Instant>,
}

impl Pace {
    fn is_paused(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// `is_blocked`: it had to wait for something, and not just for a processor.
    fn note(&mut self, took: Duration, is_blocked: bool, now: Instant) {
        if took >= SLOW && is_blocked {
            self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
            self.until = Some(now + self.pause);
        }
    }
}

fn locked(pace: &Mutex<Pace>) -> MutexGuard<'_, Pace> {
    pace.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The threads of one vNIC that map files.
pub struct Borrowers {
    threads: Identifiers,
    /// Nobody waits with the lock held.
    pace: Arc<Mutex<Pace>>,
}

impl Default for Borrowers {
    fn default() -> Self {
        Self { threads: Identifiers::new(ThreadKind::Borrow), pace: Arc::default() }
    }
}

impl Borrowers {
    /// Has one of the threads do it; never waits.
    pub fn submit(&self, process: MappingProcess, place: Borrowing, answer: BorrowAnswer) {
        let (answer, pace) = (Unanswered(Some(answer)), self.pace.clone());
        let task = move || {
            let (began, switches) = (Instant::now(), voluntary_switch_count());
            if locked(&pace).is_paused(began) {
                return answer.answer(Err(VerbsError::NoMemory));
            }
            let MappingProcess { tasks, maps, uid } = process;
            let result = borrow(tasks.as_fd(), &maps, uid, place);
            let now = Instant::now();
            locked(&pace).note(now - began, voluntary_switch_count() != switches, now);
            answer.answer(result.map_err(|_| VerbsError::NotSupported));
        };
        // Without a thread it is dropped, and so answered.
        drop(self.threads.submit(Box::new(task)));
    }

    /// Takes back what no thread has begun.
    pub fn take_waiting(&self) -> impl Send + 'static {
        self.threads.take_waiting()
    }
}

/// Maps what the process has mapped there.
///
/// # Errors
/// It is no memory that can be borrowed.
fn borrow(tasks: BorrowedFd<'_>, maps: &File, uid: u32, place: Borrowing) -> io::Result<Segment> {
    let refused = || io::Error::other("no memory that can be borrowed");
    let end = place.address.checked_add(place.length).ok_or_else(refused)?;
    let bytes = usize::try_from(place.length).map_err(|_| refused())?;
    let area = shared_area(maps, place.address)?;
    let name = format!("../map_files/{:x}-{:x}", area.start, area.end);
    // Names the file, and does nothing with it.
    let named = openat(tasks, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    // From the kernel's own memory: not even a look waits for who answers for the file.
    let about = statx(&named, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS)?;
    let device = (about.stx_dev_major, about.stx_dev_minor);
    if !is_of_the_kernel(device) && !is_on_memory(tasks, device)? {
        return Err(refused());
    }
    if fstatfs(&named)?.f_type as u64 != TMPFS {
        return Err(refused());
    }
    // Again, now that the file can't become another one.
    let area = shared_area(maps, place.address)?;
    if (area.file.device, area.file.inode) != (device, about.stx_ino) || area.end < end || about.stx_uid != uid {
        return Err(refused());
    }
    // A lease on the file is not waited for.
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = open(format!("/proc/thread-self/fd/{}", named.as_raw_fd()), flags, Mode::empty())?;
    Segment::borrow(file.as_fd(), area.offset + (place.address - area.start), bytes)
}

/// Whether a device is the mount of the kernel's own: of memfds, memory of System V, anonymous shared memory.
fn is_of_the_kernel(device: (u32, u32)) -> bool {
    let look = || {
        let file = memfd_create("freeflow-look", MemfdFlags::CLOEXEC).ok()?;
        let about = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).ok()?;
        Some((about.stx_dev_major, about.stx_dev_minor))
    };
    static DEVICE: OnceLock<Option<(u32, u32)>> = OnceLock::new();
    *DEVICE.get_or_init(look) == Some(device)
}

/// Whether a device is one of memory, by the mounts that the process sees. Another file system is known by that, before
/// it is asked anything.
fn is_on_memory(tasks: BorrowedFd<'_>, device: (u32, u32)) -> io::Result<bool> {
    let file = openat(tasks, "../mountinfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut mounts = Vec::new();
    File::from(file).take(MOUNTS_BYTES_MAX).read_to_end(&mut mounts)?;
    Ok(file_system_of(device, &String::from_utf8_lossy(&mounts)) == Some("tmpfs"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let file = memfd_create("borrowed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, LENGTH).unwrap();
        rustix::io::pwrite(&file, b"here", 2 * PAGE as u64).unwrap();
        file
    }

    #[test]
    fn a_vnic_that_takes_long_pauses_longer_each_time() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        pace.note(SLOW / 2, true, now);
        pace.note(SLOW, false, now);
        assert!(!pace.is_paused(now));
        for pause in [10, 20, 40, 80, 160, 320, 640, 640].map(Duration::from_secs) {
            pace.note(SLOW, true, now);
            assert!(pace.is_paused(now) && pace.is_paused(now + pause - SLOW));
            now += pause;
            assert!(!pace.is_paused(now));
        }
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
        let on_tmpfs = std::path::Path::new("/dev/shm");
        if std::fs::metadata(on_tmpfs).is_ok() && fstatfs(File::open(on_tmpfs).unwrap()).unwrap().f_type as u64 == TMPFS
        {
            let path = on_tmpfs.join(format!("freeflow-borrowed-{}", std::process::id()));
            let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            file.set_len(LENGTH).unwrap();
            let mapping = Segment::map(file.as_fd(), 6 * PAGE).unwrap();
            assert!(try_borrow(mapping.address() as u64, LENGTH).is_ok(), "on tmpfs");
        }
        let path = std::env::current_exe().unwrap().with_extension("borrowed");
        let disk = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        disk.set_len(LENGTH).unwrap();
        let mapping = Segment::map(disk.as_fd(), 6 * PAGE).unwrap();
        if fstatfs(&disk).unwrap().f_type as u64 != TMPFS {
            assert!(try_borrow(mapping.address() as u64, LENGTH).is_err(), "on a disk");
        }
    }
}
