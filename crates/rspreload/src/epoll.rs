//! Epoll sets that hold rsockets. The kernel's own set keeps all other descriptors; the rsockets stand in a list here,
//! and waiting is `rpoll` on them and on the kernel's set. Edges are told by what the program did since: a condition that
//! was reported is reported again after the program read (or wrote) there.
use crate::members::Members;
use crate::real::{self, POLL_EVENTS, errno, set_errno};
use crate::table::{self, inside, rsocket_of};
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, c_int, epoll_event, nfds_t, pollfd, sigset_t, timespec};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The rsockets of one epoll set, by the program's descriptors.
#[derive(Debug)]
struct Set {
    members: Mutex<Members>,
    /// Wakes those who wait when the list changes.
    changed: c_int,
    waiters: AtomicUsize,
}

impl Drop for Set {
    fn drop(&mut self) {
        // SAFETY: ours.
        unsafe { real::close(self.changed) };
    }
}

type Sets = Mutex<BTreeMap<c_int, Arc<Set>>>;

/// This process': a child begins without, since other threads of its parent may have held the locks, and the rsockets are the parent's.
static SETS: AtomicPtr<Sets> = AtomicPtr::new(ptr::null_mut());
/// How many sets there are: programs without any pay a load for each wait.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// How many threads wait for a set, or are about to.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// In a child of a fork.
pub fn begin_anew() {
    COUNT.store(0, Ordering::Relaxed);
    WAITING.store(0, Ordering::Relaxed);
    SETS.store(ptr::null_mut(), Ordering::Release);
}

fn sets() -> MutexGuard<'static, BTreeMap<c_int, Arc<Set>>> {
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

fn set_of(epoll: c_int) -> Option<Arc<Set>> {
    if COUNT.load(Ordering::Acquire) == 0 { None } else { sets().get(&epoll).cloned() }
}

impl Set {
    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        if self.waiters.load(Ordering::SeqCst) != 0 {
            let one = 1u64;
            // SAFETY: eight bytes.
            unsafe { real::write(self.changed, (&raw const one).cast(), 8) };
        }
    }
}

/// The set behind an epoll descriptor, which gets one with its first rsocket.
fn make_set(epoll: c_int) -> Option<Arc<Set>> {
    let mut sets = sets();
    if let Some(set) = sets.get(&epoll) {
        return Some(Arc::clone(set));
    }
    if usize::try_from(epoll).is_ok_and(|index| index >= table::FD_MAX) {
        set_errno(libc::EMFILE);
        return None;
    }
    // SAFETY: no pointers.
    let changed = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
    if changed < 0 {
        return None;
    }
    let set = Arc::new(Set { members: Mutex::default(), changed, waiters: AtomicUsize::new(0) });
    sets.insert(epoll, Arc::clone(&set));
    table::enter_sets(epoll);
    COUNT.store(sets.len(), Ordering::Release);
    Some(set)
}

/// The program closes a descriptor: an epoll set, or a member of some. Others take no lock here.
pub fn handle_close(fd: c_int) {
    if !table::leave_sets(fd) {
        return;
    }
    let mut sets = sets();
    let ended = sets.remove(&fd);
    COUNT.store(sets.len(), Ordering::Release);
    for set in sets.values() {
        if set.members().remove(fd).is_some() {
            set.wake();
        }
    }
    drop(sets);
    drop(ended);
}

/// The program read or wrote: a thread that waits for an edge-triggered set, where that was told already, looks again.
#[inline]
pub fn wake_after(fd: c_int) {
    // SeqCst: pairs with the addition in `epoll_pwait`.
    if WAITING.load(Ordering::SeqCst) != 0 {
        wake_sets_of(fd);
    }
}

#[cold]
fn wake_sets_of(fd: c_int) {
    let saved = errno();
    let of_it: Vec<_> = sets().values().filter(|set| set.members().was_told(fd)).cloned().collect();
    of_it.iter().for_each(|set| set.wake());
    set_errno(saved);
}

/// The descriptor becomes an ordinary socket: its memberships go to the kernel's sets.
pub fn leave_to_kernel(fd: c_int) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    for (epoll, set) in sets().iter() {
        if let Some(member) = set.members().remove(fd) {
            let mut event = epoll_event { events: member.wanted, u64: member.data };
            // SAFETY: an event.
            unsafe { real::epoll_ctl(*epoll, EPOLL_CTL_ADD, fd, &raw mut event) };
            set.wake();
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    if rsocket_of(fd).is_none() {
        // SAFETY: the caller's.
        return unsafe { real::epoll_ctl(epoll, operation, fd, event) };
    }
    let Some(set) = make_set(epoll) else { return -1 };
    let mut members = set.members();
    // SAFETY: the caller's.
    let event = unsafe { event.as_ref() }.map(|event| (event.events, event.u64));
    let known = members.contains(fd);
    match (operation, event, known) {
        (EPOLL_CTL_ADD, _, true) => return set_errno(libc::EEXIST),
        (EPOLL_CTL_MOD | EPOLL_CTL_DEL, _, false) => return set_errno(libc::ENOENT),
        (EPOLL_CTL_DEL, _, true) => drop(members.remove(fd)),
        (EPOLL_CTL_ADD | EPOLL_CTL_MOD, Some((wanted, data)), _) => {
            table::enter_sets(fd);
            members.set(fd, wanted, data, table::notes(fd));
        }
        (EPOLL_CTL_ADD | EPOLL_CTL_MOD, None, _) => return set_errno(libc::EFAULT),
        _ => return set_errno(libc::EINVAL),
    }
    drop(members);
    set.wake();
    0
}

/// What `rpoll` waits for: the kernel's set, changes of the list, then the rsockets.
fn entries_of(epoll: c_int, set: &Set) -> (Vec<pollfd>, Vec<c_int>) {
    let readable = |fd| pollfd { fd, events: libc::POLLIN, revents: 0 };
    let (mut entries, mut owners) = (vec![readable(epoll), readable(set.changed)], Vec::new());
    for (fd, wanted) in set.members().wanted(table::notes) {
        let Some(rsocket) = rsocket_of(fd) else { continue };
        entries.push(pollfd { fd: rsocket, events: (wanted & POLL_EVENTS) as i16, revents: 0 });
        owners.push(fd);
    }
    (entries, owners)
}

/// Reports what is ready of the rsockets and of the kernel's set, which take turns in being first. How many.
fn report(epoll: c_int, set: &Set, entries: &[pollfd], owners: &[c_int], out: &mut [epoll_event]) -> usize {
    let events = |entry: &pollfd| u32::from(entry.revents.cast_unsigned()) & POLL_EVENTS;
    let ready: Vec<_> = owners.iter().copied().zip(entries[2..].iter().map(events)).collect();
    let of_kernel = |room: &mut [epoll_event]| {
        if entries[0].revents == 0 || room.is_empty() {
            return 0;
        }
        // SAFETY: as much room.
        let more = unsafe { real::epoll_pwait(epoll, room.as_mut_ptr(), room.len() as c_int, 0, ptr::null()) };
        usize::try_from(more).unwrap_or(0)
    };
    let mut members = set.members();
    let kernel_first = members.kernel_first;
    members.kernel_first = !kernel_first;
    let mut count = if kernel_first { of_kernel(out) } else { 0 };
    count += members.report(&ready, &mut out[count..]);
    if !kernel_first {
        count += of_kernel(&mut out[count..]);
    }
    count
}

fn wait(epoll: c_int, set: &Set, out: &mut [epoll_event], timeout_ms: c_int) -> c_int {
    let deadline = u64::try_from(timeout_ms).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
    loop {
        let (mut entries, owners) = entries_of(epoll, set);
        let left = deadline.map_or(-1, |deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            c_int::try_from(left.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX)
        });
        // SAFETY: as many entries.
        let ready = inside(|| unsafe { real::rpoll(entries.as_mut_ptr(), entries.len() as nfds_t, left) });
        if ready < 0 {
            return -1;
        }
        let count = report(epoll, set, &entries, &owners, out);
        if entries[1].revents != 0 {
            let mut changes = 0u64;
            // SAFETY: eight bytes.
            unsafe { real::read(set.changed, (&raw mut changes).cast(), 8) };
        }
        if count != 0 || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return count as c_int;
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_wait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout_ms: c_int) -> c_int {
    // SAFETY: the caller's.
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
    // SAFETY: the caller's.
    unsafe {
        let Some(set) = set_of(epoll).filter(|_| count > 0 && !events.is_null()) else {
            return real::epoll_pwait(epoll, events, count, timeout_ms, mask);
        };
        let out = std::slice::from_raw_parts_mut(events, count as usize);
        // SeqCst: pairs with the loads in `wake` and `wake_after`.
        set.waiters.fetch_add(1, Ordering::SeqCst);
        WAITING.fetch_add(1, Ordering::SeqCst);
        let answer = crate::many::with_mask(mask, || wait(epoll, &set, out, timeout_ms));
        WAITING.fetch_sub(1, Ordering::SeqCst);
        set.waiters.fetch_sub(1, Ordering::SeqCst);
        answer
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
    // SAFETY: the caller's.
    let timeout_ms = unsafe { time.as_ref() }.map_or(-1, |time| {
        let ms = time.tv_sec.saturating_mul(1000).saturating_add((time.tv_nsec + 999_999) / 1_000_000);
        c_int::try_from(ms.max(0)).unwrap_or(c_int::MAX)
    });
    // SAFETY: the caller's.
    unsafe { epoll_pwait(epoll, events, count, timeout_ms, mask) }
}
