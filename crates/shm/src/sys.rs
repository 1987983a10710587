//! Clock, yielding, processors.
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// CLOCK_MONOTONIC, nanoseconds.
///
/// By the C library: rustix looks for the vDSO by itself, where the kernel put it, and under
/// valgrind it is not there.
#[inline]
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the struct is ours to write. The clock exists, so the call can't fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// CLOCK_BOOTTIME, nanoseconds: it goes on while the machine sleeps.
pub fn boottime_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: as above.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// CLOCK_MONOTONIC as it was at the last tick: up to ten milliseconds ago, for a fraction of the
/// price.
#[inline]
pub fn coarse_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: as above.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// How often the calling thread was switched out because it had to wait, as in a page fault or a
/// lock.
pub fn voluntary_switch_count() -> u64 {
    // SAFETY: all zero is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the struct is ours to write. The call can't fail.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nvcsw as u64
}

/// The calling thread, as no other thread of the process that runs is called; never 0.
#[inline]
pub fn this_thread() -> u64 {
    // The thread's control block begins with its own address (System V ABI, x86-64 supplement of thread-local storage).
    #[cfg(target_arch = "x86_64")]
    {
        let block: u64;
        // SAFETY: reads that address, as every access of a thread-local variable does.
        unsafe { std::arch::asm!("mov {}, fs:0", out(reg) block, options(nostack, readonly, preserves_flags)) };
        block
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: it always succeeds.
    unsafe {
        libc::pthread_self() as u64
    }
}

/// Marks a spin loop for the processor.
#[inline]
pub fn pause() {
    core::hint::spin_loop();
}

/// Lets another runnable thread have this processor.
#[inline]
pub fn sched_yield() {
    rustix::thread::sched_yield();
}

/// Sleeps so long, or until a signal comes. A thread that is cancelled is not stopped here (`std::thread::sleep` is a
/// cancellation point).
#[cold]
pub fn sleep_uncancelled(time: Duration) {
    let time = timespec(time.as_nanos() as u64);
    // SAFETY: the time lives during the call.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, 0) };
}

fn timespec(ns: u64) -> libc::timespec {
    libc::timespec { tv_sec: (ns / 1_000_000_000) as libc::time_t, tv_nsec: (ns % 1_000_000_000) as libc::c_long }
}

/// Sleeps while the lower half of `word` is that of `value`, at most so long, unless a signal or
/// [`futex_wake`] comes first.
pub fn futex_wait(word: &AtomicU64, value: u64, at_most_ns: u64) {
    let timeout = timespec(at_most_ns);
    // SAFETY: the word and the timeout live during the call. Every return value means: look again.
    unsafe {
        libc::syscall(libc::SYS_futex, lower_half(word), libc::FUTEX_WAIT, value as u32, &raw const timeout);
    }
}

/// Wakes up to `count` of those who sleep in [`futex_wait`] on this word, in whatever process.
#[cold]
pub fn futex_wake(word: &AtomicU64, count: i32) {
    // SAFETY: the word lives during the call.
    unsafe { libc::syscall(libc::SYS_futex, lower_half(word), libc::FUTEX_WAKE, count) };
}

fn lower_half(word: &AtomicU64) -> *const u32 {
    let half = word.as_ptr().cast::<u32>();
    if cfg!(target_endian = "big") { half.wrapping_add(1) } else { half }.cast_const()
}

/// Asks the scheduler for short slices for the calling thread: it then preempts a spinning thread
/// when it wakes, instead of waiting out that one's slice. Linux 6.12 and newer; elsewhere nothing
/// changes.
pub fn prefer_short_slices() {
    const SLICE_NS: u64 = 100_000;
    const BYTES: u32 = 48;
    // struct sched_attr, version 0 (linux/sched/types.h): size, policy, flags, nice, priority,
    // runtime, deadline, period.
    #[repr(C)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    let nice = rustix::process::getpriority_process(None).unwrap_or(0);
    let attributes = Attributes {
        size: BYTES,
        policy: libc::SCHED_OTHER as u32,
        flags: 0,
        nice,
        priority: 0,
        runtime: SLICE_NS,
        deadline: 0,
        period: 0,
    };
    // SAFETY: the structure is valid for reads of `size` bytes during the call, and the kernel
    // keeps no pointer to it.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

/// From now on an allocation of 128 KiB or more is a mapping of its own, and goes back to the
/// kernel when it is freed. (By itself the allocator raises that threshold with the first that is
/// freed, and keeps them from then on.)
pub fn release_large_allocations() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no preconditions; it changes where later allocations come from.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 * 1024);
    }
}

/// Bytes of a page.
#[inline]
pub fn page_bytes() -> usize {
    // SAFETY: no preconditions; this name is known everywhere.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// The processor that the calling thread runs on.
#[inline]
pub fn current_cpu() -> u32 {
    // SAFETY: no preconditions. It fails only where the kernel lacks the call (-1: no processor is
    // so numbered).
    unsafe { libc::sched_getcpu() as u32 & 0x7fff_ffff }
}

/// Processors that the calling thread may run on, ascending.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// How many processors the process could use when this was first asked, at least 1.
pub fn cpu_count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| allowed_cpus().map_or(1, |cpus| cpus.len().max(1)))
}

/// Binds the calling thread to one processor.
pub fn pin_to_cpu(cpu: usize) -> io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}
