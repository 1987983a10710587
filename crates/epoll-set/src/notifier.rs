//! Wakes several threads that wait for the same change: an eventfd that stays readable until each
//! of them has looked.
use libc::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct Progress {
    /// Notifications so far.
    count: u64,
    waiters: usize,
    /// Waiters that have not looked since the last notification.
    behind: usize,
}

/// An eventfd with the number of its waiters.
#[derive(Debug)]
pub struct Notifier {
    fd: c_int,
    progress: Mutex<Progress>,
}

/// A thread that waits, until this is dropped.
pub struct Waiter<'a> {
    notifier: &'a Notifier,
    seen: u64,
}

// System calls by number: `write` and its like may be librspreload's own functions, and none of
// these is a cancellation point.
impl Notifier {
    /// `None`: there is no descriptor left; errno has the reason.
    #[must_use]
    pub fn create() -> Option<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        (fd >= 0).then(|| Self { fd, progress: Mutex::default() })
    }

    /// Readable when a waiter should look.
    #[must_use]
    pub fn fd(&self) -> c_int {
        self.fd
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all waiters. The change is visible before this is called.
    pub fn notify(&self) {
        let mut progress = self.progress();
        if progress.waiters != 0 {
            progress.count += 1;
            progress.behind = progress.waiters;
            let one = 1u64;
            // SAFETY: eight bytes.
            unsafe { libc::syscall(libc::SYS_write, self.fd, &raw const one, 8usize) };
        }
    }

    /// Adds a waiter, which is woken by notifications from now on.
    #[must_use]
    pub fn waiter(&self) -> Waiter<'_> {
        let mut progress = self.progress();
        progress.waiters += 1;
        Waiter { notifier: self, seen: progress.count }
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        // SAFETY: `create` made the descriptor, and nothing else closes it.
        unsafe { libc::syscall(libc::SYS_close, self.fd) };
    }
}

impl Waiter<'_> {
    /// Acknowledges all notifications so far; the waiter looks at what may have changed afterwards.
    /// The descriptor stays readable while other waiters are behind.
    pub fn acknowledge(&mut self) {
        let mut progress = self.notifier.progress();
        self.catch_up(&mut progress);
    }

    fn catch_up(&mut self, progress: &mut Progress) {
        if self.seen != progress.count {
            self.seen = progress.count;
            progress.behind -= 1;
            if progress.behind == 0 {
                let mut count = 0u64;
                // SAFETY: eight bytes; does not block.
                unsafe { libc::syscall(libc::SYS_read, self.notifier.fd, &raw mut count, 8usize) };
            }
        }
    }
}

impl Drop for Waiter<'_> {
    /// Under one lock: a notification in between would count a waiter that has left.
    fn drop(&mut self) {
        let mut progress = self.notifier.progress();
        self.catch_up(&mut progress);
        progress.waiters -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(notifier: &Notifier) -> bool {
        let mut entry = libc::pollfd { fd: notifier.fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry.
        unsafe { libc::poll(&raw mut entry, 1, 0) == 1 }
    }

    #[test]
    fn the_descriptor_is_readable_until_all_waiters_have_looked() {
        let notifier = Notifier::create().unwrap();
        notifier.notify();
        assert!(!is_readable(&notifier), "nobody waits");
        let (mut one, mut other, third) = (notifier.waiter(), notifier.waiter(), notifier.waiter());
        notifier.notify();
        one.acknowledge();
        one.acknowledge();
        assert!(is_readable(&notifier));
        // Again, before all have looked.
        notifier.notify();
        other.acknowledge();
        one.acknowledge();
        assert!(is_readable(&notifier));
        drop(third);
        assert!(!is_readable(&notifier), "a waiter that left is not waited for");
        other.acknowledge();
        notifier.notify();
        drop((one, other));
        assert!(!is_readable(&notifier));
    }
}
