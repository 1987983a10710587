//! `repoll_create`, `repoll_ctl`, `repoll_wait`: epoll sets with rsockets and other descriptors
//! (`freeflow_epoll_set` says how they wait).
use crate::ffi::{Outcome, checked, errno};
use crate::poll;
use crate::table;
use crate::wait::{Deadline, PerProcess, watch_forks};
use freeflow_epoll_set::{Backend, EpollSet, IoCounts};
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLET, c_int, c_long, epoll_event, pollfd};
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

/// A child of a fork has none of its parent's.
static SETS: PerProcess<RwLock<BTreeMap<c_int, Arc<EpollSet>>>> = PerProcess::new();

fn set_of(epoll: c_int) -> Outcome<Arc<EpollSet>> {
    let sets = SETS.get().read().unwrap_or_else(PoisonError::into_inner);
    sets.get(&epoll).cloned().ok_or(libc::EINVAL)
}

/// By number: a program's own functions may be librspreload's.
fn kernel(call: c_long, fd: c_int, first: usize, second: usize, third: usize) -> Outcome<c_int> {
    // SAFETY: `call` takes these arguments; a null mask behind.
    checked(unsafe { libc::syscall(call, fd, first, second, third, 0usize, 8usize) } as c_int)
}

/// O_NONBLOCK is taken too, and means nothing.
///
/// # Errors
/// Those of `epoll_create1(2)`; EINVAL: other flags.
pub fn create(flags: c_int) -> Outcome<c_int> {
    watch_forks();
    let set = Arc::new(EpollSet::create().ok_or_else(errno)?);
    let epoll = kernel(libc::SYS_epoll_create1, flags & !libc::O_NONBLOCK, 0, 0, 0)?;
    SETS.get().write().unwrap_or_else(PoisonError::into_inner).insert(epoll, set);
    Ok(epoll)
}

/// # Errors
/// As of `epoll_ctl(2)`.
pub fn control(epoll: c_int, operation: c_int, fd: c_int, event: Option<epoll_event>) -> Outcome<()> {
    if fd < 0 {
        return Err(libc::EBADF);
    }
    let set = set_of(epoll)?;
    if epoll == fd {
        return Err(libc::EINVAL);
    }
    let event = match operation {
        EPOLL_CTL_DEL => epoll_event { events: 0, u64: 0 },
        EPOLL_CTL_ADD | EPOLL_CTL_MOD => event.ok_or(libc::EFAULT)?,
        _ => return Err(libc::EINVAL),
    };
    let Some(socket) = table::get(fd) else {
        let event = &raw const event;
        return kernel(libc::SYS_epoll_ctl, epoll, operation as usize, fd as usize, event as usize).map(|_| ());
    };
    if !socket.is_ours() {
        return Err(libc::ENOTCONN);
    }
    let mut interest = set.interest();
    match (operation, interest.contains(fd)) {
        (EPOLL_CTL_ADD, true) => return Err(libc::EEXIST),
        (EPOLL_CTL_MOD | EPOLL_CTL_DEL, false) => return Err(libc::ENOENT),
        (EPOLL_CTL_DEL, true) => drop(interest.remove(fd)),
        _ => {
            // Rdma-core's sets know no edges.
            interest.set(fd, event.events & !(EPOLLET as u32), event.u64, IoCounts::default());
        }
    }
    drop(interest);
    set.notify();
    Ok(())
}

struct Kernel(c_int);

impl Backend for Kernel {
    fn rsocket_of(&self, fd: c_int) -> Option<c_int> {
        table::get(fd).map(|_| fd)
    }

    fn io_counts(&self, _fd: c_int) -> IoCounts {
        IoCounts::default()
    }

    fn poll(&self, entries: &mut [pollfd], deadline: Option<Instant>) -> Outcome<()> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        poll::poll(entries, Deadline::after(left)).map(|_| ())
    }

    fn kernel_events(&self, room: &mut [epoll_event]) -> usize {
        let count = kernel(libc::SYS_epoll_pwait, self.0, room.as_mut_ptr() as usize, room.len(), 0);
        count.map_or(0, |count| count as usize)
    }
}

/// How many events.
///
/// # Errors
/// EINVAL: no set; those of `rpoll`.
pub fn wait(epoll: c_int, out: &mut [epoll_event], deadline: Option<Instant>) -> Outcome<usize> {
    set_of(epoll)?.wait(epoll, &Kernel(epoll), out, deadline)
}

/// Ends a set. Whether the descriptor was one.
pub fn close(epoll: c_int) -> bool {
    let ended = SETS.get().write().unwrap_or_else(PoisonError::into_inner).remove(&epoll);
    let Some(set) = ended else { return false };
    set.close();
    // An open descriptor's close can't fail.
    let _ = kernel(libc::SYS_close, epoll, 0, 0, 0);
    true
}

/// The rsocket is closed: it leaves all sets.
pub fn leave(fd: c_int) {
    for set in SETS.get().read().unwrap_or_else(PoisonError::into_inner).values() {
        if set.interest().remove(fd).is_some() {
            set.notify();
        }
    }
}
