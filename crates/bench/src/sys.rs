//! The few system calls that the limits and the harness need, behind safe functions.
//!
//! Invariant: this process has one thread while it forks parties, so a forked child may run any code.
use std::fs;
use std::io;
use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::sync::atomic::AtomicU64;

/// Longest any forked party may run, seconds; then SIGALRM ends it and the measurement fails.
const PARTY_S_MAX: u32 = 30;

/// Nanoseconds of CLOCK_MONOTONIC.
#[inline]
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid place for one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The CPUs this process may run on.
pub fn cpus() -> Vec<usize> {
    // SAFETY: cpu_set_t is a plain array of bits; all zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: `set` is valid for its own size.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } != 0 {
        return vec![0];
    }
    // SAFETY: the index is below CPU_SETSIZE.
    (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

/// Processes that are looked at for those that they started.
const DESCENDANTS_MAX: usize = 64;

/// Keeps this process on one CPU; `None` leaves it free.
pub fn pin(cpu: Option<usize>) {
    let Some(cpu) = cpu else { return };
    // SAFETY: as in `cpus`; the index came from there.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

#[inline]
pub fn sched_yield() {
    // SAFETY: no arguments.
    unsafe { libc::sched_yield() };
}

/// A new session with the best autogroup and nice value there is. Without it, `nice` means nothing beside the load of
/// another login session. Quietly does what it may.
pub fn new_session_first_in_line() {
    // SAFETY: no arguments; fails harmlessly when this process already leads a group.
    unsafe { libc::setsid() };
    first_in_line("self");
}

/// The best autogroup and nice value for a process, `self` or a number; false when not permitted.
pub fn first_in_line(pid: &str) -> bool {
    let number = pid.parse().unwrap_or(0);
    // SAFETY: plain numbers.
    let niced = unsafe { libc::setpriority(libc::PRIO_PROCESS, number, -20) } == 0;
    let grouped = fs::write(format!("/proc/{pid}/autogroup"), "-20").is_ok();
    niced && grouped
}

/// A process and all it started, and they in turn.
pub fn with_descendants(pid: u32) -> Vec<u32> {
    let mut all = vec![pid];
    let mut next = 0;
    while let Some(&pid) = all.get(next).filter(|_| next < DESCENDANTS_MAX) {
        next += 1;
        let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for thread in threads.flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            all.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    all
}

/// CPU time of this process so far, nanoseconds.
pub fn own_cpu_ns() -> u64 {
    let mut used = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `used` is a valid place for one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut used) };
    used.tv_sec as u64 * 1_000_000_000 + used.tv_nsec as u64
}

/// CPU time of every thread of a process, nanoseconds, by name. From `schedstat`, or clock ticks where there is none.
pub fn thread_cpu_ns(pid: u32) -> io::Result<Vec<(String, u64)>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = entry?.path();
        let name = fs::read_to_string(path.join("comm")).unwrap_or_default().trim().to_owned();
        let schedstat = fs::read_to_string(path.join("schedstat")).unwrap_or_default();
        let from_schedstat = schedstat.split(' ').next().and_then(|word| word.parse().ok());
        let ns = match from_schedstat {
            Some(ns) => ns,
            None => ticks_of_stat(&fs::read_to_string(path.join("stat")).unwrap_or_default()).unwrap_or(0) * 10_000_000,
        };
        threads.push((name, ns));
    }
    Ok(threads)
}

/// User and system ticks of a `/proc/PID/stat` line; the name in brackets may hold anything.
fn ticks_of_stat(line: &str) -> Option<u64> {
    let mut fields = line.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// A field of `/proc/PID/status` that is in kB, as bytes. `pid` may be `self`.
pub fn status_bytes(pid: &str, field: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// A process's part of all resident memory, bytes: of each page that it has mapped, an equal part
/// for each process that has it mapped. `pid` may be `self`.
pub fn share_bytes(pid: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    // Not of files: what a program's code takes is no object's.
    Some((field("Pss_Anon:")? + field("Pss_Shmem:")?) << 10)
}

/// An anonymous mapping, shared with the children forked after it was made.
pub struct Shared {
    base: *mut u8,
    bytes: usize,
}

impl Shared {
    /// Every page is touched.
    pub fn new(bytes: usize) -> io::Result<Self> {
        Self::map(bytes, libc::MAP_SHARED).map(Self::touched)
    }

    /// The same, but a child forked later gets its own copy.
    pub fn private(bytes: usize) -> io::Result<Self> {
        Self::map(bytes, libc::MAP_PRIVATE).map(Self::touched)
    }

    /// Private too, in transparent huge pages as far as the kernel has them.
    pub fn huge(bytes: usize) -> io::Result<Self> {
        let mapping = Self::map(bytes, libc::MAP_PRIVATE)?;
        // SAFETY: advice on our own mapping; a kernel without huge pages refuses it.
        unsafe { libc::madvise(mapping.base.cast(), mapping.bytes, libc::MADV_HUGEPAGE) };
        Ok(mapping.touched())
    }

    /// Memory of System V, which goes with this mapping.
    pub fn system_v(bytes: usize) -> io::Result<Self> {
        // SAFETY: plain numbers; attached at an address of the kernel's choice, which touches no memory that exists.
        let base = unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, bytes, libc::IPC_CREAT | 0o600);
            if id < 0 {
                return Err(io::Error::last_os_error());
            }
            let base = libc::shmat(id, ptr::null(), 0);
            libc::shmctl(id, libc::IPC_RMID, ptr::null_mut());
            base
        };
        if base.addr() == usize::MAX {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base: base.cast(), bytes }.touched())
    }

    /// A file that nobody else can map for writing any more.
    pub fn sealed(bytes: usize) -> io::Result<Self> {
        const F_SEAL_FUTURE_WRITE: i32 = 0x10;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new file, which nothing else knows of, and a new mapping of it at an address of the kernel's
        // choice.
        let base = unsafe {
            let file = libc::memfd_create(c"sealed".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            if file < 0 || libc::ftruncate(file, bytes as libc::off_t) != 0 {
                return Err(io::Error::last_os_error());
            }
            let base = libc::mmap(ptr::null_mut(), bytes, protection, libc::MAP_SHARED, file, 0);
            libc::fcntl(file, libc::F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
            libc::close(file);
            base
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base: base.cast(), bytes }.touched())
    }

    /// Private, its pages not yet there.
    pub fn untouched(bytes: usize) -> io::Result<Self> {
        Self::map(bytes, libc::MAP_PRIVATE)
    }

    fn map(bytes: usize, sharing: i32) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, sharing | libc::MAP_ANONYMOUS, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base: base.cast(), bytes })
    }

    fn touched(self) -> Self {
        for byte in [1, 0] {
            // SAFETY: the mapping is writable and `bytes` long.
            unsafe { ptr::write_bytes(self.base, byte, self.bytes) };
        }
        self
    }

    /// One word; `offset` is in bytes.
    ///
    /// # Panics
    /// Out of bounds or not aligned.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes);
        // SAFETY: in bounds and aligned (the base is a page); lives as long as `self`. What is reached as an atomic
        // word is reached by the measurements in no other way.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) }
    }

    /// # Panics
    /// When the range `offset .. offset + bytes` is not inside.
    #[inline]
    pub fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset <= self.bytes && bytes <= self.bytes - offset);
        // SAFETY: in bounds, by the line above.
        unsafe { self.base.add(offset) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: our own mapping, made in `map`, of this length; nothing borrows from it any longer.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

/// One forked party of a measurement: where it runs and what it does.
pub struct Party<'a> {
    pub cpu: Option<usize>,
    /// In a session, and so in a scheduling group, of its own, as a container is.
    pub own_session: bool,
    pub body: Box<dyn FnOnce() + 'a>,
}

impl<'a> Party<'a> {
    pub fn new(cpu: Option<usize>, body: impl FnOnce() + 'a) -> Self {
        Self { cpu, own_session: false, body: Box::new(body) }
    }
}

/// Forks every party, waits for all. An error when one failed or ran too long; then the others are ended too.
pub fn run_parties(parties: Vec<Party<'_>>) -> io::Result<()> {
    let mut children = Vec::new();
    for party in parties {
        // SAFETY: this process has one thread (invariant of the module), so the child's heap and locks are consistent.
        match unsafe { libc::fork() } {
            -1 => {
                end(&children);
                return Err(io::Error::last_os_error());
            }
            0 => run_child(party),
            child => children.push(child),
        }
    }
    // One by one, never "any child": other children of this process are not ours to reap.
    let mut failed = None;
    for index in 0..children.len() {
        let mut status = 0;
        // SAFETY: `status` is a valid place.
        if unsafe { libc::waitpid(children[index], &mut status, 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
        if status != 0 && failed.is_none() {
            failed = Some(status);
            end(&children[index + 1..]);
        }
    }
    match failed {
        Some(status) => Err(io::Error::other(format!("a party of the measurement failed (wait status {status:#x})"))),
        None => Ok(()),
    }
}

fn run_child(party: Party<'_>) -> ! {
    // SAFETY: plain numbers; the child dies with its parent or after the time limit.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::alarm(PARTY_S_MAX);
    }
    if party.own_session {
        new_session_first_in_line();
    }
    pin(party.cpu);
    let result = panic::catch_unwind(AssertUnwindSafe(party.body));
    // SAFETY: ends the child without running the parent's destructors.
    unsafe { libc::_exit(i32::from(result.is_err())) }
}

fn end(children: &[libc::pid_t]) {
    for &child in children {
        // SAFETY: our own children, not yet waited for.
        unsafe { libc::kill(child, libc::SIGKILL) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_lines_with_odd_names() {
        let tail = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14";
        assert_eq!(ticks_of_stat(&format!("42 (a) b) c) {tail}")), Some(11 + 12));
        assert_eq!(ticks_of_stat(""), None);
        assert_eq!(ticks_of_stat("42 (x) S 1"), None);
    }

    #[test]
    fn there_is_a_cpu_and_time_passes() {
        assert!(!cpus().is_empty());
        let before = monotonic_ns();
        assert!(monotonic_ns() >= before);
        assert!(own_cpu_ns() > 0);
        assert!(status_bytes("self", "RssAnon:").is_some_and(|bytes| bytes > 0));
        assert_eq!(status_bytes("self", "Name:"), None);
        assert!(share_bytes("self").is_some_and(|bytes| bytes > 0));
        assert!(!thread_cpu_ns(std::process::id()).expect("own threads").is_empty());
    }

    #[test]
    #[should_panic(expected = "assertion")]
    fn shared_words_are_checked() {
        Shared::new(4096).expect("mapping").word(4096);
    }
}
