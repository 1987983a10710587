//! Wakes all who wait for the same thing when it changes: an event descriptor that stays readable until each of them has looked.
use libc::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct Rings {
    count: u64,
    listeners: usize,
    /// How many of them have not looked since the last ring.
    behind: usize,
}

#[derive(Debug)]
pub struct Bell {
    fd: c_int,
    rings: Mutex<Rings>,
}

/// Who waits, until it is dropped.
pub struct Listener<'a> {
    bell: &'a Bell,
    heard: u64,
}

// All by number: a program's own functions may be librspreload's, and none of these ends a thread that is cancelled.
impl Bell {
    /// `None`: there is none, and errno says why.
    #[must_use]
    pub fn create() -> Option<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        (fd >= 0).then(|| Self { fd, rings: Mutex::default() })
    }

    /// Readable when a listener should look.
    #[must_use]
    pub fn fd(&self) -> c_int {
        self.fd
    }

    fn rings(&self) -> MutexGuard<'_, Rings> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// After the change.
    pub fn ring(&self) {
        let mut rings = self.rings();
        if rings.listeners != 0 {
            rings.count += 1;
            rings.behind = rings.listeners;
            let one = 1u64;
            // SAFETY: eight bytes.
            unsafe { libc::syscall(libc::SYS_write, self.fd, &raw const one, 8usize) };
        }
    }

    /// Changes from now on are heard.
    #[must_use]
    pub fn listen(&self) -> Listener<'_> {
        let mut rings = self.rings();
        rings.listeners += 1;
        Listener { bell: self, heard: rings.count }
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        // SAFETY: ours.
        unsafe { libc::syscall(libc::SYS_close, self.fd) };
    }
}

impl Listener<'_> {
    /// Before looking at what may have changed. Others may still be behind: then the descriptor stays readable for a moment.
    pub fn look(&mut self) {
        let mut rings = self.bell.rings();
        self.catch_up(&mut rings);
    }

    fn catch_up(&mut self, rings: &mut Rings) {
        if self.heard != rings.count {
            self.heard = rings.count;
            rings.behind -= 1;
            if rings.behind == 0 {
                let mut count = 0u64;
                // SAFETY: eight bytes; does not block.
                unsafe { libc::syscall(libc::SYS_read, self.bell.fd, &raw mut count, 8usize) };
            }
        }
    }
}

impl Drop for Listener<'_> {
    /// Under one lock: a ring in between would wait for who has left.
    fn drop(&mut self) {
        let mut rings = self.bell.rings();
        self.catch_up(&mut rings);
        rings.listeners -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(bell: &Bell) -> bool {
        let mut entry = libc::pollfd { fd: bell.fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry.
        unsafe { libc::poll(&raw mut entry, 1, 0) == 1 }
    }

    #[test]
    fn it_rings_until_all_have_looked() {
        let bell = Bell::create().unwrap();
        bell.ring();
        assert!(!is_readable(&bell), "nobody listens");
        let (mut one, mut other, third) = (bell.listen(), bell.listen(), bell.listen());
        bell.ring();
        one.look();
        one.look();
        assert!(is_readable(&bell));
        // Again, before all have looked.
        bell.ring();
        other.look();
        one.look();
        assert!(is_readable(&bell));
        drop(third);
        assert!(!is_readable(&bell), "who left is not waited for");
        other.look();
        bell.ring();
        drop((one, other));
        assert!(!is_readable(&bell));
    }
}
