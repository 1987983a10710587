//! Descriptors of arenas' files, for private copies once the router is gone.
//!
//! A program may close any descriptor, and open something else by the same number: so each use looks
//! whether the file is still the one that was kept. The numbers are high ones, out of the way of
//! `select` and of programs that expect low ones.
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::OnceLock;

/// A process keeps no more than these, and no more than an eighth of what its limit allows.
const KEPT_COUNT_MAX: u64 = 512;
const SHARE: u64 = 8;
/// Numbers from here on, if the limit is twice as high.
const NUMBER_MIN: u64 = 1024;

/// The limit of open descriptors.
fn number_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the struct is ours to write.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur
}

/// The most descriptors that this process keeps.
pub(crate) fn kept_count_max() -> usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    *MAX.get_or_init(|| (number_limit() / SHARE).min(KEPT_COUNT_MAX) as usize)
}

/// Device and inode.
fn file_of(number: RawFd) -> Option<(u64, u64)> {
    // SAFETY: all zeroes are valid; the struct is ours to write.
    unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        (libc::fstat(number, &raw mut about) == 0).then_some((about.st_dev, about.st_ino))
    }
}

/// A descriptor that is closed when this is dropped, if it is still there.
#[derive(Debug)]
pub(crate) struct KeptDescriptor {
    number: RawFd,
    file: (u64, u64),
}

impl KeptDescriptor {
    /// Another descriptor of the same file. `None`: there can't be one more.
    pub fn of(descriptor: BorrowedFd<'_>) -> Option<Self> {
        let from = NUMBER_MIN.min(number_limit() / 2) as i32;
        // SAFETY: the descriptor is open.
        let number = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, from) };
        if number < 0 {
            return None;
        }
        file_of(number).map(|file| Self { number, file })
    }

    /// `None`: the program has closed it.
    pub fn get(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: it is open, as `file_of` has found.
        (file_of(self.number) == Some(self.file)).then(|| unsafe { BorrowedFd::borrow_raw(self.number) })
    }

    /// Closes it before it is dropped. By async-signal-safe calls.
    pub fn close(&self) {
        if file_of(self.number) == Some(self.file) {
            // SAFETY: the file is that of `of`, and nobody else's.
            unsafe { libc::close(self.number) };
        }
    }
}

impl Drop for KeptDescriptor {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_number_that_is_the_program_s_by_now_is_let_alone() {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let kept = KeptDescriptor::of(file.as_fd()).unwrap();
        assert!(kept.get().is_some());
        let other = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: the number is the kept one's, which is closed by that.
        assert_eq!(unsafe { libc::dup3(other.as_raw_fd(), kept.number, libc::O_CLOEXEC) }, kept.number);
        assert!(kept.get().is_none());
        let number = kept.number;
        drop(kept);
        assert_eq!(file_of(number), file_of(other.as_raw_fd()));
        // SAFETY: of this test.
        unsafe { libc::close(number) };
    }
}
