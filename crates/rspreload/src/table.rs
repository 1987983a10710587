//! Which of the program's descriptors stand for rsockets. A descriptor that the program has is an
//! ordinary socket that is not connected: so its number is taken, `fstat` says what it is, and it
//! takes the rsocket's place if the rsocket can't do what is asked. No locks: every read and write
//! of the program passes here.
use crate::{forks, real};
use freeflow_epoll_set::IoCounts;
use libc::c_int;
use std::cell::Cell;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

/// Descriptors from here on stay ordinary.
pub const FD_MAX: usize = 65536;

/// The rsocket behind each of the program's descriptors, plus one.
static RSOCKETS: [AtomicI32; FD_MAX] = [const { AtomicI32::new(0) }; FD_MAX];
/// How many of the program's descriptors stand for an rsocket (dup).
static USERS: [AtomicI32; FD_MAX] = [const { AtomicI32::new(0) }; FD_MAX];
/// How often the program read, or wrote: edge-triggered members of epoll sets compare it with what
/// they saw.
static READ: [AtomicU32; FD_MAX] = [const { AtomicU32::new(0) }; FD_MAX];
static WRITTEN: [AtomicU32; FD_MAX] = [const { AtomicU32::new(0) }; FD_MAX];
/// Whether the descriptor may be an epoll set with rsockets, or a member of one.
static IN_SETS: [AtomicBool; FD_MAX] = [const { AtomicBool::new(false) }; FD_MAX];
/// Whether the program bound it: so is the ordinary socket, if it takes the rsocket's place.
static BOUND: [AtomicBool; FD_MAX] = [const { AtomicBool::new(false) }; FD_MAX];
/// Whether a connection was begun, of each rsocket.
static BEGUN: [AtomicBool; FD_MAX] = [const { AtomicBool::new(false) }; FD_MAX];
/// The process that owns these tables; 0: none yet.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// A child has a copy of its own, with the parent's rsockets in it.
extern "C" fn in_child() {
    // SAFETY: no arguments.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    crate::epoll::begin_anew();
    forks::in_child();
}

fn watch_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: no arguments; the handler stores two numbers.
        unsafe {
            OWNER.store(libc::getpid(), Ordering::Relaxed);
            // The environment is read before the first fork.
            let _ = forks::is_wanted();
            libc::pthread_atfork(Some(forks::before), None, Some(in_child));
        }
    });
}

/// Whether this process has the memory for itself. Not so a child of `vfork`, whose descriptors are
/// copies and whose memory is the parent's: what it closes before it runs its program must not end
/// the parent's connections.
#[must_use]
pub fn is_ours() -> bool {
    // SAFETY: no arguments.
    OWNER.load(Ordering::Relaxed) == unsafe { libc::getpid() }
}

/// The same, of a process that may have had nothing to call its own before.
#[must_use]
pub fn is_ours_by_now() -> bool {
    watch_forks();
    is_ours()
}

fn at(fd: c_int) -> Option<usize> {
    usize::try_from(fd).ok().filter(|index| *index < FD_MAX)
}

/// The rsocket of a descriptor of the program.
#[inline]
#[must_use]
pub fn rsocket_of(fd: c_int) -> Option<c_int> {
    let index = fd as u32 as usize;
    if index >= FD_MAX {
        return None;
    }
    // Acquire: pairs with the Release in `insert`.
    match RSOCKETS[index].load(Ordering::Acquire) {
        0 => None,
        rsocket => Some(rsocket - 1),
    }
}

/// From now on `fd` stands for the rsocket. Whether there was room.
pub fn insert(fd: c_int, rsocket: c_int) -> bool {
    let (Some(index), Some(users)) = (at(fd), at(rsocket)) else { return false };
    watch_forks();
    // Left over from a descriptor that was closed behind this library's back.
    forget(fd);
    if USERS[users].fetch_add(1, Ordering::Relaxed) == 0 {
        BEGUN[users].store(false, Ordering::Relaxed);
    }
    BOUND[index].store(false, Ordering::Relaxed);
    RSOCKETS[index].store(rsocket + 1, Ordering::Release);
    true
}

/// `fd` stands for nothing any more. The rsocket, if this was its last descriptor.
pub fn remove(fd: c_int) -> Option<c_int> {
    let rsocket = match RSOCKETS[at(fd)?].swap(0, Ordering::AcqRel) {
        0 => return None,
        rsocket => rsocket - 1,
    };
    let last = USERS[at(rsocket)?].fetch_sub(1, Ordering::AcqRel) == 1;
    last.then_some(rsocket)
}

/// All rsockets, once each.
pub fn all() -> impl Iterator<Item = c_int> {
    USERS.iter().enumerate().filter(|(_, users)| users.load(Ordering::Relaxed) > 0).map(|(fd, _)| fd as c_int)
}

/// The program bound the rsocket to an address.
pub fn note_bound(fd: c_int) {
    if let Some(index) = at(fd) {
        BOUND[index].store(true, Ordering::Relaxed);
    }
}

#[must_use]
pub fn was_bound(fd: c_int) -> bool {
    at(fd).is_some_and(|index| BOUND[index].load(Ordering::Relaxed))
}

/// The rsocket connects, or is connected: it stays one.
pub fn note_begun(rsocket: c_int) {
    if let Some(index) = at(rsocket) {
        BEGUN[index].store(true, Ordering::Relaxed);
    }
}

#[must_use]
pub fn has_begun(rsocket: c_int) -> bool {
    at(rsocket).is_some_and(|index| BEGUN[index].load(Ordering::Relaxed))
}

/// After a read: what edge-triggered sets reported of this descriptor is new again.
#[inline]
pub fn note_read(fd: c_int) {
    note(&READ, fd);
}

/// After a write.
#[inline]
pub fn note_written(fd: c_int) {
    note(&WRITTEN, fd);
}

#[inline]
fn note(counts: &[AtomicU32; FD_MAX], fd: c_int) {
    // SeqCst: pairs with `io_counts`, so either who waits sees the count, or `wake` sees that it
    // waits.
    counts[fd as usize].fetch_add(1, Ordering::SeqCst);
    forks::note_use(fd);
    crate::epoll::wake_after(fd);
}

/// How often it was read, and written, modulo 2^32.
#[must_use]
pub fn io_counts(fd: c_int) -> IoCounts {
    let count = |counts: &[AtomicU32; FD_MAX]| at(fd).map_or(0, |index| counts[index].load(Ordering::SeqCst));
    IoCounts { reads: count(&READ), writes: count(&WRITTEN) }
}

/// From now on closing the descriptor concerns the epoll sets.
pub fn enter_sets(fd: c_int) {
    if let Some(index) = at(fd) {
        IN_SETS[index].store(true, Ordering::Release);
    }
}

/// Whether the descriptor was in the sets, and leaves them. No lock, so that ordinary descriptors
/// are closed by signal handlers and children whatever other threads did.
#[must_use]
pub fn leave_sets(fd: c_int) -> bool {
    // Acquire: pairs with the Release above.
    let Some(index) = at(fd) else { return false };
    IN_SETS[index].load(Ordering::Acquire) && is_ours() && IN_SETS[index].swap(false, Ordering::AcqRel)
}

/// Descriptors of the range that stand for rsockets or are in epoll sets.
pub fn known(first: u32, last: u32) -> impl Iterator<Item = c_int> {
    let end = (last as usize).saturating_add(1).min(FD_MAX);
    let found =
        |index: &usize| RSOCKETS[*index].load(Ordering::Acquire) != 0 || IN_SETS[*index].load(Ordering::Acquire);
    ((first as usize).min(end)..end).filter(found).map(|index| index as c_int)
}

thread_local!(static INSIDE: Cell<u32> = const { Cell::new(0) });

/// Calls into librdmacm, whose own sockets stay ordinary.
#[inline]
pub fn inside<T>(call: impl FnOnce() -> T) -> T {
    INSIDE.with(|depth| depth.set(depth.get() + 1));
    let answer = call();
    let is_out = INSIDE.with(|depth| {
        depth.set(depth.get() - 1);
        depth.get() == 0
    });
    if is_out && LEFT_COUNT.load(Ordering::Relaxed) > 0 {
        close_left();
    }
    answer
}

/// rsockets that a signal handler closed while its own thread was in the midst of a call to
/// librdmacm, whose locks it may hold: whoever leaves such a call next closes them.
static LEFT: [AtomicBool; FD_MAX] = [const { AtomicBool::new(false) }; FD_MAX];
static LEFT_COUNT: AtomicU32 = AtomicU32::new(0);

#[cold]
fn close_left() {
    let saved = real::errno();
    for (rsocket, left) in LEFT.iter().enumerate() {
        if left.load(Ordering::Relaxed) && left.swap(false, Ordering::AcqRel) {
            LEFT_COUNT.fetch_sub(1, Ordering::Relaxed);
            end(rsocket as c_int);
        }
    }
    real::set_errno(saved);
}

/// The program has no descriptor of it any more.
fn end(rsocket: c_int) {
    if !forks::hand_over(rsocket) {
        // SAFETY: no pointers.
        inside(|| unsafe { real::rclose(rsocket) });
    }
}

#[must_use]
pub fn is_inside() -> bool {
    INSIDE.with(Cell::get) != 0
}

/// Lets go of a descriptor of the program; the rsocket ends with its last one.
pub fn forget(fd: c_int) {
    if rsocket_of(fd).is_some()
        && is_ours()
        && let Some(rsocket) = remove(fd)
    {
        if is_inside() {
            LEFT[rsocket as usize].store(true, Ordering::Release);
            LEFT_COUNT.fetch_add(1, Ordering::Relaxed);
        } else {
            end(rsocket);
        }
    }
}
