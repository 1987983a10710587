//! Waiting for several descriptors: `poll`, `ppoll`, `select`, `pselect`. Where none of them is an
//! rsocket's, the C library's function is called; else `rpoll`. The signal mask of the `p` forms is
//! set around the call, not with it.
use crate::real::{self, set_errno};
use crate::signals::with_mask;
use crate::table::{inside, rsocket_of};
use libc::{c_int, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use std::slice;
use std::time::Duration;

/// More entries than any program polls.
const ENTRIES_MAX: nfds_t = 1 << 20;

/// Milliseconds, rounded up; -1: for ever.
fn milliseconds(time: Option<Duration>) -> c_int {
    let Some(time) = time else { return -1 };
    let whole = time.as_millis() + u128::from(time.subsec_nanos() % 1_000_000 != 0);
    c_int::try_from(whole).unwrap_or(c_int::MAX)
}

/// `poll` on what the program's descriptors stand for.
///
/// # Safety
/// Valid for `count` entries.
unsafe fn poll_rsockets(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int {
    // SAFETY: this function's contract.
    let entries = unsafe { slice::from_raw_parts_mut(fds, count as usize) };
    let stand_for = |entry: &pollfd| pollfd { fd: rsocket_of(entry.fd).unwrap_or(entry.fd), ..*entry };
    let mut behind: Vec<pollfd> = entries.iter().map(stand_for).collect();
    // SAFETY: as many entries.
    let ready = inside(|| unsafe { real::rpoll(behind.as_mut_ptr(), count, timeout_ms) });
    if ready >= 0 {
        for (entry, behind) in entries.iter_mut().zip(&behind) {
            entry.revents = behind.revents;
        }
    }
    ready
}

/// # Safety
/// Valid for `count` entries.
unsafe fn any_rsocket(fds: *const pollfd, count: nfds_t) -> bool {
    // SAFETY: this function's contract.
    let entries = || unsafe { slice::from_raw_parts(fds, count as usize) };
    !fds.is_null() && (1..=ENTRIES_MAX).contains(&count) && entries().iter().any(|entry| rsocket_of(entry.fd).is_some())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int {
    // SAFETY: the C contract.
    unsafe {
        if any_rsocket(fds, count) { poll_rsockets(fds, count, timeout_ms) } else { real::poll(fds, count, timeout_ms) }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int, room: size_t) -> c_int {
    if room / size_of::<pollfd>() < count as usize {
        std::process::abort();
    }
    // SAFETY: the C contract.
    unsafe { poll(fds, count, timeout_ms) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ppoll(fds: *mut pollfd, count: nfds_t, time: *const timespec, mask: *const sigset_t) -> c_int {
    // SAFETY: the C contract.
    unsafe {
        if !any_rsocket(fds, count) {
            return real::ppoll(fds, count, time, mask);
        }
        let timeout_ms = milliseconds(duration(time));
        with_mask(mask, || poll_rsockets(fds, count, timeout_ms))
    }
}

/// # Safety
/// Null or valid.
unsafe fn duration(time: *const timespec) -> Option<Duration> {
    // SAFETY: this function's contract.
    let time = unsafe { time.as_ref() }?;
    Some(Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0).min(999_999_999),
    ))
}

const EVENTS: [i16; 3] = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI];
const MEANS: [i16; 3] = [libc::POLLIN | libc::POLLHUP | libc::POLLERR, libc::POLLOUT | libc::POLLERR, libc::POLLPRI];

/// The entries that sets ask for; `None`: none of them is an rsocket's.
///
/// # Safety
/// The sets are null or valid.
unsafe fn entries_of(count: c_int, sets: [*mut fd_set; 3]) -> Option<Vec<pollfd>> {
    let mut entries = Vec::new();
    let mut found = false;
    for fd in 0..count.clamp(0, libc::FD_SETSIZE as c_int) {
        // SAFETY: this function's contract.
        let has = |set: *mut fd_set| !set.is_null() && unsafe { libc::FD_ISSET(fd, set) };
        let events = sets.into_iter().zip(EVENTS).filter(|(set, _)| has(*set)).fold(0, |all, (_, event)| all | event);
        if events != 0 {
            found |= rsocket_of(fd).is_some();
            entries.push(pollfd { fd, events, revents: 0 });
        }
    }
    found.then_some(entries)
}

/// # Safety
/// The sets are null or valid.
unsafe fn select_entries(mut entries: Vec<pollfd>, sets: [*mut fd_set; 3], timeout_ms: c_int) -> c_int {
    // SAFETY: a vector of so many; the sets are valid by this function's contract.
    unsafe {
        if poll_rsockets(entries.as_mut_ptr(), entries.len() as nfds_t, timeout_ms) < 0 {
            return -1;
        }
        if entries.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
            return set_errno(libc::EBADF);
        }
        let mut bits = 0;
        for (index, set) in sets.into_iter().enumerate().filter(|(_, set)| !set.is_null()) {
            libc::FD_ZERO(set);
            for entry in &entries {
                if entry.events & EVENTS[index] != 0 && entry.revents & MEANS[index] != 0 {
                    libc::FD_SET(entry.fd, set);
                    bits += 1;
                }
            }
        }
        bits
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the C contract.
    unsafe {
        let Some(entries) = entries_of(count, [read, write, except]) else {
            return real::select(count, read, write, except, timeout);
        };
        let time = timeout.as_ref().map(|time| {
            let seconds = Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0));
            seconds + Duration::from_micros(u64::try_from(time.tv_usec).unwrap_or(0))
        });
        let begun = std::time::Instant::now();
        let answer = select_entries(entries, [read, write, except], milliseconds(time));
        // As Linux does: what is left of the time.
        if let (Some(time), Some(out)) = (time, timeout.as_mut()) {
            let left = time.saturating_sub(begun.elapsed());
            out.tv_sec = left.as_secs().cast_signed();
            out.tv_usec = i64::from(left.subsec_micros());
        }
        answer
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    time: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the C contract.
    unsafe {
        match entries_of(count, [read, write, except]) {
            None => real::pselect(count, read, write, except, time, mask),
            Some(entries) => {
                let timeout_ms = milliseconds(duration(time));
                with_mask(mask, || select_entries(entries, [read, write, except], timeout_ms))
            }
        }
    }
}
