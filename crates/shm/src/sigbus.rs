//! The SIGBUS guard: a fault inside a [`crate::Segment`] poisons that segment instead of killing
//! the process.
//!
//! Every mapped segment stands in a static table that an async-signal-safe handler scans without
//! locks. On a fault inside one, the handler notes it, puts a zero page of this process' own over
//! the page that faulted, and returns: the access goes on and reads zeroes. Any other SIGBUS goes
//! to the handler that was there before, or to the default action.
//!
//! A missing page of a segment that refuses those is none of that: `missing`.
//!
//! Invariant: an entry's range is only non-empty while its segment is mapped.
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Segments that one process can have mapped: as many as the kernel's own default
/// (vm.max_map_count).
const SEGMENT_COUNT_MAX: usize = 65_536;

/// `Entry::start` of an entry that nobody has, and of one that is being filled. Neither is an
/// address of a mapping.
const FREE: usize = 0;
const FILLING: usize = 1;

struct Entry {
    start: AtomicUsize,
    bytes: AtomicUsize,
    poisoned: AtomicBool,
}

static ENTRIES: [Entry; SEGMENT_COUNT_MAX] =
    [const { Entry { start: AtomicUsize::new(FREE), bytes: AtomicUsize::new(0), poisoned: AtomicBool::new(false) } };
        SEGMENT_COUNT_MAX];

/// Where to look first for a free entry.
static HINT: AtomicUsize = AtomicUsize::new(0);
/// Entries at and above this were never used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// A mapping's place in the table.
#[derive(Clone, Copy)]
pub(crate) struct Registration {
    index: usize,
}

impl Registration {
    /// Enters a mapped range of whole pages. Errors: ENOMEM when the table is full.
    pub(crate) fn new(start: usize, bytes: usize) -> io::Result<Self> {
        // Relaxed: a hint only.
        let hint = HINT.load(Ordering::Relaxed);
        for step in 0..SEGMENT_COUNT_MAX {
            let index = (hint + step) % SEGMENT_COUNT_MAX;
            let entry = &ENTRIES[index];
            // Acquire; partner: the Release store of FREE in `release`.
            if entry.start.compare_exchange(FREE, FILLING, Ordering::Acquire, Ordering::Relaxed).is_err() {
                continue;
            }
            // Release; partner: the Acquire load of `bytes` in `find`: who sees these sees that
            // `start` is not the old one.
            entry.bytes.store(bytes, Ordering::Release);
            // Relaxed: published by the next line.
            entry.poisoned.store(false, Ordering::Relaxed);
            // Release; partner: the Acquire load of `start` in `find`.
            entry.start.store(start, Ordering::Release);
            // Relaxed: a fault in this range comes from threads that got the segment after this.
            USED.fetch_max(index + 1, Ordering::Relaxed);
            // Relaxed: a hint only.
            HINT.store((index + 1) % SEGMENT_COUNT_MAX, Ordering::Relaxed);
            return Ok(Self { index });
        }
        Err(io::Error::from(rustix::io::Errno::NOMEM))
    }

    #[inline]
    pub(crate) fn poisoned(&self) -> bool {
        // Relaxed: set by a handler that interrupted the thread whose access failed; others learn
        // it in time.
        ENTRIES[self.index].poisoned.load(Ordering::Relaxed)
    }

    /// Before the range is unmapped. Called once, by the drop of the segment that made the mapping.
    pub(crate) fn release(&self) {
        // Release; partner: the Acquire exchange in `new`.
        ENTRIES[self.index].start.store(FREE, Ordering::Release);
        // Relaxed: a hint only.
        HINT.store(self.index, Ordering::Relaxed);
    }
}

/// The entry and range that hold `address`. Async-signal-safe: only atomics.
fn find(address: usize) -> Option<(&'static Entry, usize, usize)> {
    // Relaxed: the faulting thread got the segment after `USED` grew.
    let used = USED.load(Ordering::Relaxed).min(SEGMENT_COUNT_MAX);
    ENTRIES[..used].iter().find_map(|entry| {
        // Acquire, both; partners: the Release stores in `Registration::new`.
        let start = entry.start.load(Ordering::Acquire);
        let bytes = entry.bytes.load(Ordering::Acquire);
        let inside = start > FILLING && address.wrapping_sub(start) < bytes;
        // Relaxed: ordered by the load of `bytes`. The same start again: start and bytes belong
        // together.
        (inside && entry.start.load(Ordering::Relaxed) == start).then_some((entry, start, bytes))
    })
}

/// The handler of SIGBUS before ours.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the guard for this process; further calls do nothing and give the first one's result.
pub fn install_sigbus_guard() -> io::Result<()> {
    static RESULT: OnceLock<Result<(), i32>> = OnceLock::new();
    RESULT.get_or_init(install).map_err(io::Error::from_raw_os_error)
}

fn install() -> Result<(), i32> {
    let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
    // SAFETY: all zero is a valid `sigaction`.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: only asks; `previous` is ours to write.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) } != 0 {
        return Err(errno());
    }
    // Before the handler can run, which reads it.
    let _ = PREVIOUS.set(previous);
    // SAFETY: all zero is a valid `sigaction`; the mask is then empty.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handle as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: `handle` has the signature that SA_SIGINFO asks for and does only what a handler may.
    if unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) } != 0 {
        return Err(errno());
    }
    Ok(())
}

/// Runs on the thread whose access failed. No allocation, no lock, no errno: rustix makes its
/// system calls directly.
extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid siginfo with SA_SIGINFO.
    let code = unsafe { (*info).si_code };
    // A positive code: from the kernel, about an address (BUS_ADRERR, BUS_MCEERR_AR); else someone
    // sent the signal.
    if code > 0 {
        // SAFETY: SIGBUS from the kernel carries an address.
        let address = unsafe { (*info).si_addr() } as usize;
        // Not BUS_MCEERR_AR: memory that failed is lost.
        if code == libc::BUS_ADRERR && crate::missing::recover(address, context) {
            return;
        }
        if let Some((entry, start, bytes)) = find(address) {
            // Relaxed: see `Registration::poisoned`.
            entry.poisoned.store(true, Ordering::Relaxed);
            if put_zero_page(address, start, bytes) {
                return;
            }
        }
    }
    pass_on(signal, code, info, context);
}

/// Puts zero memory of this process' own over the faulting page; if the kernel has no more mappings
/// to give, over the whole segment, which needs none.
fn put_zero_page(address: usize, start: usize, bytes: usize) -> bool {
    let page_bytes = crate::sys::page_bytes();
    let page = address & !(page_bytes - 1);
    [(page, page_bytes), (start, bytes)].into_iter().any(|(at, length)| {
        // SAFETY: the range lies inside a live segment, whose thread is stopped here in an access
        // to it; segments are reached through raw bytes and atomics only, for which zeroes are as
        // valid as what was there.
        unsafe {
            rustix::mm::mmap_anonymous(
                at as *mut _,
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            )
        }
        .is_ok()
    })
}

/// A SIGBUS that is not ours. A fault goes to the previous handler (Rust's own one knows stack
/// overflows), or to the default action. One that someone sent takes the default action unless it
/// was ignored: Rust's handler would swallow it and leave the process without any.
fn pass_on(signal: libc::c_int, code: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let fault = code > 0;
    match PREVIOUS.get() {
        Some(previous) if previous.sa_sigaction == libc::SIG_IGN && !fault => return,
        Some(previous) if fault && previous.sa_sigaction != libc::SIG_DFL && previous.sa_sigaction != libc::SIG_IGN => {
            let handler = previous.sa_sigaction;
            if previous.sa_flags & libc::SA_SIGINFO != 0 {
                // SAFETY: that is what the previous owner registered with SA_SIGINFO.
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    unsafe { std::mem::transmute(handler) };
                return handler(signal, info, context);
            }
            // SAFETY: that is what the previous owner registered without SA_SIGINFO.
            let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
            return handler(signal);
        }
        _ => {}
    }
    // SAFETY: all zero is a valid `sigaction`, the default action; both calls are
    // async-signal-safe. A fault happens again when the handler returns; a signal that was sent is
    // raised again, and delivered then.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &default, std::ptr::null_mut());
        if !fault {
            libc::raise(signal);
        }
    }
}
