//! Epoll sets that hold rsockets (`freeflow_epoll_set` says how they wait). Edges are known by what
//! the program did since: a condition that was reported is reported again after the program read
//! (or wrote) there.
//!
//! A thread that waits for the kernel's set alone when the first rsocket comes is summoned: a
//! descriptor that is readable stands in that set until all such threads have left it. The program
//! never sees its event.
use crate::real::{self, errno, set_errno};
use crate::signals::with_mask;
use crate::table::{self, inside, rsocket_of};
use freeflow_epoll_set::{Backend, EpollSet, IoCounts};
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, c_int, epoll_event, nfds_t, pollfd, sigset_t, timespec};
use std::collections::BTreeMap;
use std::io::Write;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A set of the program's, and who is summoned to it.
#[derive(Debug)]
struct Held {
    set: EpollSet,
    summons: Mutex<Option<Summons>>,
}

#[derive(Debug)]
struct Summons {
    fd: c_int,
    /// By which of the set's descriptors those wait who are called.
    epoll: c_int,
    /// It goes then whoever has not come: a thread that was cancelled never does.
    until: Instant,
}

const SUMMONED_FOR: Duration = Duration::from_secs(1);

impl Drop for Summons {
    fn drop(&mut self) {
        // SAFETY: ours.
        unsafe { real::close(self.fd) };
    }
}

type Sets = Mutex<BTreeMap<c_int, Arc<Held>>>;

/// This process': a child begins without, since other threads of its parent may have held the
/// locks, and the rsockets are the parent's.
static SETS: AtomicPtr<Sets> = AtomicPtr::new(ptr::null_mut());
/// How many sets there are: programs without any pay a load for each wait.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// How many threads wait for a set, or are about to.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// How many threads wait for a kernel's set alone, or are about to: by its number, modulo the
/// length.
static ALONE: [AtomicU32; 1024] = [const { AtomicU32::new(0) }; 1024];

fn alone(epoll: c_int) -> &'static AtomicU32 {
    &ALONE[epoll as u32 as usize % ALONE.len()]
}

/// Data of a summons: nothing of the program's is there.
fn mark() -> u64 {
    ALONE.as_ptr() as u64
}

/// In a child of a fork.
pub fn begin_anew() {
    ALONE.iter().for_each(|count| count.store(0, Ordering::Relaxed));
    COUNT.store(0, Ordering::Relaxed);
    WAITING.store(0, Ordering::Relaxed);
    SETS.store(ptr::null_mut(), Ordering::Release);
}

fn sets() -> MutexGuard<'static, BTreeMap<c_int, Arc<Held>>> {
    // Acquire: pairs with the exchange.
    let mut sets = SETS.load(Ordering::Acquire);
    if sets.is_null() {
        let fresh = Box::into_raw(Box::<Sets>::default());
        sets = match SETS.compare_exchange(sets, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(quicker) => {
                // SAFETY: nobody has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                quicker
            }
        };
    }
    // SAFETY: never freed.
    unsafe { &*sets }.lock().unwrap_or_else(PoisonError::into_inner)
}

fn set_of(epoll: c_int) -> Option<Arc<Held>> {
    // SeqCst: pairs with the store in `make_set`.
    if COUNT.load(Ordering::SeqCst) == 0 { None } else { sets().get(&epoll).cloned() }
}

impl Held {
    fn summons(&self) -> MutexGuard<'_, Option<Summons>> {
        self.summons.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls those who wait for the kernel's set alone. Whether that went well; errno says why not.
    fn summon(&self, epoll: c_int) -> bool {
        // SeqCst: pairs with the addition in `wait_alone`: either it is seen here, or that finds
        // the set.
        if alone(epoll).load(Ordering::SeqCst) == 0 {
            return true;
        }
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(1, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return false;
        }
        let summons = Summons { fd, epoll, until: Instant::now() + SUMMONED_FOR };
        let mut event = epoll_event { events: libc::EPOLLIN as u32, u64: mark() };
        // SAFETY: an event.
        let added = unsafe { real::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &raw mut event) } == 0;
        *self.summons() = Some(summons);
        added
    }

    /// A child may have copies of the descriptor, which hold it in the kernel's set: so it is taken
    /// out.
    fn dismiss(&self, epoll: c_int) {
        if let Some(summons) = self.summons().take() {
            let saved = errno();
            // SAFETY: no event.
            unsafe { real::epoll_ctl(epoll, EPOLL_CTL_DEL, summons.fd, ptr::null_mut()) };
            set_errno(saved);
        }
    }

    fn dismiss_when_all_came(&self, epoll: c_int) {
        let over =
            |summons: &Summons| alone(summons.epoll).load(Ordering::SeqCst) == 0 || Instant::now() >= summons.until;
        if self.summons().as_ref().is_some_and(over) {
            self.dismiss(epoll);
        }
    }
}

/// Takes the event of summons out of what the kernel's set reported. How many are left.
fn without_summons(events: &mut [epoll_event]) -> usize {
    let Some(at) = events.iter().position(|event| event.u64 == mark()) else { return events.len() };
    events[at..].rotate_left(1);
    events.len() - 1
}

/// The set behind an epoll descriptor, which gets one with its first rsocket.
fn make_set(epoll: c_int) -> Option<Arc<Held>> {
    let mut sets = sets();
    if let Some(set) = sets.get(&epoll) {
        return Some(Arc::clone(set));
    }
    if usize::try_from(epoll).is_ok_and(|index| index >= table::FD_MAX) {
        set_errno(libc::EMFILE);
        return None;
    }
    let held = Arc::new(Held { set: EpollSet::create()?, summons: Mutex::default() });
    sets.insert(epoll, Arc::clone(&held));
    table::enter_sets(epoll);
    COUNT.store(sets.len(), Ordering::SeqCst);
    if !held.summon(epoll) {
        sets.remove(&epoll);
        COUNT.store(sets.len(), Ordering::SeqCst);
        return None;
    }
    Some(held)
}

/// Whether the kernel has an epoll set there.
fn is_epoll(fd: c_int) -> bool {
    const NAME: &[u8] = b"anon_inode:[eventpoll]";
    let mut path = [0_u8; 40];
    if write!(&mut path[..], "/proc/thread-self/fd/{fd}\0").is_err() {
        return false;
    }
    let mut target = [0_u8; NAME.len() + 1];
    // SAFETY: a path that ends, and as much room.
    let bytes = unsafe { libc::readlink(path.as_ptr().cast(), target.as_mut_ptr().cast(), target.len()) };
    usize::try_from(bytes).is_ok_and(|bytes| &target[..bytes] == NAME)
}

/// A copy of an epoll descriptor is the same set, by whichever of them its first rsocket comes:
/// later the copies are not known from the others. False: errno says why not. Of other descriptors
/// nothing, without a lock or an allocation, as signal handlers want it.
pub fn share(from: c_int, copy: c_int) -> bool {
    let is_far = |fd: c_int| usize::try_from(fd).is_ok_and(|index| index >= table::FD_MAX);
    let saved = errno();
    let is_set = !is_far(from) && !is_far(copy) && is_epoll(from);
    set_errno(saved);
    if !is_set || !table::is_ours_by_now() {
        return true;
    }
    let Some(held) = make_set(from) else { return false };
    let mut sets = sets();
    sets.insert(copy, held);
    table::enter_sets(copy);
    COUNT.store(sets.len(), Ordering::SeqCst);
    true
}

/// The program closes a descriptor: an epoll set, or a member of some. Others take no lock here.
pub fn handle_close(fd: c_int) {
    if !table::leave_sets(fd) {
        return;
    }
    let mut sets = sets();
    let ended = sets.remove(&fd);
    COUNT.store(sets.len(), Ordering::SeqCst);
    for held in sets.values() {
        if held.set.interest().remove(fd).is_some() {
            held.set.notify();
        }
    }
    let ended = ended.filter(|ended| !sets.values().any(|held| Arc::ptr_eq(held, ended)));
    drop(sets);
    if let Some(ended) = ended {
        ended.dismiss(fd);
    }
}

/// The program read or wrote: a thread that waits for an edge-triggered set, where that was
/// reported already, looks again.
#[inline]
pub fn wake_after(fd: c_int) {
    // SeqCst: pairs with the addition in `wait_with`.
    if WAITING.load(Ordering::SeqCst) != 0 {
        wake_sets_of(fd);
    }
}

#[cold]
fn wake_sets_of(fd: c_int) {
    let saved = errno();
    let of_it: Vec<_> = sets().values().filter(|held| held.set.interest().awaits_io(fd)).cloned().collect();
    of_it.iter().for_each(|held| held.set.notify());
    set_errno(saved);
}

/// The descriptor becomes an ordinary socket: its memberships go to the kernel's sets.
pub fn leave_to_kernel(fd: c_int) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    for (epoll, held) in sets().iter() {
        if let Some(interest) = held.set.interest().remove(fd) {
            let mut event = epoll_event { events: interest.events, u64: interest.data };
            // SAFETY: an event.
            unsafe { real::epoll_ctl(*epoll, EPOLL_CTL_ADD, fd, &raw mut event) };
            held.set.notify();
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    if rsocket_of(fd).is_none() {
        // SAFETY: the C contract.
        return unsafe { real::epoll_ctl(epoll, operation, fd, event) };
    }
    let Some(held) = make_set(epoll) else { return -1 };
    let mut interest = held.set.interest();
    // SAFETY: the C contract.
    let event = unsafe { event.as_ref() }.map(|event| (event.events, event.u64));
    let known = interest.contains(fd);
    match (operation, event, known) {
        (EPOLL_CTL_ADD, _, true) => return set_errno(libc::EEXIST),
        (EPOLL_CTL_MOD | EPOLL_CTL_DEL, _, false) => return set_errno(libc::ENOENT),
        (EPOLL_CTL_DEL, _, true) => drop(interest.remove(fd)),
        (EPOLL_CTL_ADD | EPOLL_CTL_MOD, Some((events, data)), _) => {
            table::enter_sets(fd);
            interest.set(fd, events, data, table::io_counts(fd));
        }
        (EPOLL_CTL_ADD | EPOLL_CTL_MOD, None, _) => return set_errno(libc::EFAULT),
        _ => return set_errno(libc::EINVAL),
    }
    drop(interest);
    held.set.notify();
    0
}

/// The descriptors behind the members of an epoll set, and the kernel's own.
struct Program<'a> {
    epoll: c_int,
    held: &'a Held,
}

impl Backend for Program<'_> {
    fn rsocket_of(&self, fd: c_int) -> Option<c_int> {
        rsocket_of(fd)
    }

    fn io_counts(&self, fd: c_int) -> IoCounts {
        table::io_counts(fd)
    }

    fn poll(&self, entries: &mut [pollfd], deadline: Option<Instant>) -> Result<(), c_int> {
        let (list, count) = (entries.as_mut_ptr(), entries.len() as nfds_t);
        // SAFETY: as many entries.
        let ready = inside(|| unsafe { real::rpoll(list, count, milliseconds_to(deadline)) });
        if ready < 0 { Err(errno()) } else { Ok(()) }
    }

    fn kernel_events(&self, room: &mut [epoll_event]) -> usize {
        // Once more where summons took the place of something else.
        for _ in 0..2 {
            // SAFETY: as much room.
            let count =
                unsafe { real::epoll_pwait(self.epoll, room.as_mut_ptr(), room.len() as c_int, 0, ptr::null()) };
            let count = usize::try_from(count).unwrap_or(0);
            let reported = without_summons(&mut room[..count]);
            if reported != count {
                self.held.dismiss_when_all_came(self.epoll);
            }
            if reported != 0 || count == 0 {
                return reported;
            }
        }
        0
    }
}

/// The time left, rounded up; -1: for ever.
fn milliseconds_to(deadline: Option<Instant>) -> c_int {
    deadline.map_or(-1, |deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        c_int::try_from(left.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX)
    })
}

/// Waits for the kernel's set alone, as long as there is no other.
///
/// # Errors
/// The answer, if it is one already.
///
/// # Safety
/// There is room for `count` events; the mask is null or valid.
unsafe fn wait_alone(
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    deadline: Option<Instant>,
    mask: *const sigset_t,
) -> Result<Arc<Held>, c_int> {
    loop {
        alone(epoll).fetch_add(1, Ordering::SeqCst);
        let found = set_of(epoll);
        let answer = match found {
            Some(_) => 0,
            // SAFETY: this function's contract.
            None => unsafe { real::epoll_pwait(epoll, events, count, milliseconds_to(deadline), mask) },
        };
        alone(epoll).fetch_sub(1, Ordering::SeqCst);
        if let Some(held) = found {
            return Ok(held);
        }
        let Ok(count @ 1..) = usize::try_from(answer) else { return Err(answer) };
        // SAFETY: so many were written.
        let reported = without_summons(unsafe { std::slice::from_raw_parts_mut(events, count) });
        if reported != 0 {
            return Err(reported as c_int);
        }
    }
}

/// # Safety
/// The mask is null or valid.
unsafe fn wait_with(
    epoll: c_int,
    held: &Held,
    out: &mut [epoll_event],
    deadline: Option<Instant>,
    mask: *const sigset_t,
) -> c_int {
    // SeqCst: pairs with the load in `wake_after`.
    WAITING.fetch_add(1, Ordering::SeqCst);
    let wait = || match held.set.wait(epoll, &Program { epoll, held }, out, deadline) {
        Ok(count) => count as c_int,
        Err(error) => set_errno(error),
    };
    // SAFETY: this function's contract.
    let answer = unsafe { with_mask(mask, wait) };
    WAITING.fetch_sub(1, Ordering::SeqCst);
    answer
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_wait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout_ms: c_int) -> c_int {
    // SAFETY: the C contract.
    unsafe { epoll_pwait(epoll, events, count, timeout_ms, ptr::null()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_pwait(
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout_ms: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the C contract.
    unsafe {
        if count <= 0 || events.is_null() {
            return real::epoll_pwait(epoll, events, count, timeout_ms, mask);
        }
        let deadline = u64::try_from(timeout_ms).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
        match wait_alone(epoll, events, count, deadline, mask) {
            Ok(held) => {
                let out = std::slice::from_raw_parts_mut(events, count as usize);
                wait_with(epoll, &held, out, deadline, mask)
            }
            Err(answer) => answer,
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_pwait2(
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    time: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the C contract.
    let timeout_ms = unsafe { time.as_ref() }.map_or(-1, |time| {
        let ms = time.tv_sec.saturating_mul(1000).saturating_add((time.tv_nsec + 999_999) / 1_000_000);
        c_int::try_from(ms.max(0)).unwrap_or(c_int::MAX)
    });
    // SAFETY: the C contract.
    unsafe { epoll_pwait(epoll, events, count, timeout_ms, mask) }
}
