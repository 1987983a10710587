//! An epoll set that holds rsockets, of librspreload and of `repoll_wait`. The kernel's own set keeps all other descriptors; the
//! rsockets stand in a list here, and waiting is `rpoll` on them and on the kernel's set.
use crate::bell::Bell;
use crate::members::{Members, POLL_EVENTS};
use libc::{c_int, epoll_event, pollfd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What is behind the descriptors of a set.
pub trait Behind {
    /// The rsocket that a member stands for; `None`: none any more.
    fn rsocket_of(&self, fd: c_int) -> Option<c_int>;

    /// How often it was read, and written.
    fn notes(&self, fd: c_int) -> (u32, u32);

    /// `rpoll`.
    ///
    /// # Errors
    /// Its errno.
    fn poll(&self, entries: &mut [pollfd], deadline: Option<Instant>) -> Result<(), c_int>;

    /// What the kernel's set reports now, as much as there is room for. How many.
    fn report(&self, room: &mut [epoll_event]) -> usize;
}

#[derive(Debug)]
pub struct Set {
    members: Mutex<Members>,
    /// Wakes those who wait when the list changes.
    pub bell: Bell,
    /// Who waits gets nothing, at once.
    pub ended: AtomicBool,
}

impl Set {
    /// `None`: errno says why.
    #[must_use]
    pub fn create() -> Option<Self> {
        Some(Self { members: Mutex::default(), bell: Bell::create()?, ended: AtomicBool::new(false) })
    }

    /// By the program's descriptors.
    pub fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `rpoll` waits for: the kernel's set, changes of the list, then the rsockets.
    fn entries(&self, epoll: c_int, behind: &impl Behind) -> (Vec<pollfd>, Vec<c_int>) {
        let readable = |fd| pollfd { fd, events: libc::POLLIN, revents: 0 };
        let (mut entries, mut owners) = (vec![readable(epoll), readable(self.bell.fd())], Vec::new());
        for (fd, wanted) in self.members().wanted(|fd| behind.notes(fd)) {
            let Some(rsocket) = behind.rsocket_of(fd) else { continue };
            entries.push(pollfd { fd: rsocket, events: (wanted & POLL_EVENTS) as i16, revents: 0 });
            owners.push(fd);
        }
        (entries, owners)
    }

    /// Reports what is ready of the rsockets and of the kernel's set, which take turns in being first. How many.
    fn report(&self, behind: &impl Behind, entries: &[pollfd], owners: &[c_int], out: &mut [epoll_event]) -> usize {
        let events = |entry: &pollfd| u32::from(entry.revents.cast_unsigned()) & POLL_EVENTS;
        let ready: Vec<_> = owners.iter().copied().zip(entries[2..].iter().map(events)).collect();
        let of_kernel = |room: &mut [epoll_event]| {
            if entries[0].revents == 0 || room.is_empty() { 0 } else { behind.report(room) }
        };
        let mut members = self.members();
        let kernel_first = members.kernel_first;
        members.kernel_first = !kernel_first;
        let mut count = if kernel_first { of_kernel(out) } else { 0 };
        count += members.report(&ready, &mut out[count..]);
        if !kernel_first {
            count += of_kernel(&mut out[count..]);
        }
        count
    }

    /// How many events; 0 if the time is over.
    ///
    /// # Errors
    /// Those of `rpoll`.
    pub fn wait(
        &self,
        epoll: c_int,
        behind: &impl Behind,
        out: &mut [epoll_event],
        deadline: Option<Instant>,
    ) -> Result<usize, c_int> {
        let mut listener = self.bell.listen();
        loop {
            listener.look();
            if self.ended.load(Ordering::SeqCst) {
                return Ok(0);
            }
            let (mut entries, owners) = self.entries(epoll, behind);
            behind.poll(&mut entries, deadline)?;
            let count = self.report(behind, &entries, &owners, out);
            if count != 0 || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(count);
            }
        }
    }
}
