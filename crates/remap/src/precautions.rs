//! Circumstances in which pages stay where they are that hold more than regions, in the whole
//! process: what is beside a region would be lost there, or could not come back.
use crate::hints::Obstacle;
use crate::table::{Extent, extent};
use crate::threads::now_ns;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The directory of the process below /proc.
const PROCESS: &str = "/proc/thread-self";
/// The target of a descriptor of an io_uring.
const RING: &str = "anon_inode:[io_uring]";
/// The descriptors are looked at again after so many times what a look takes.
const LOOK_EVERY_COSTS: u64 = 128;

/// Whether something keeps partial pages out of arenas now. Not in a freeze window.
pub(crate) fn obstacle_to_partial_pages() -> Option<Obstacle> {
    if extent() == Extent::WholePages {
        Some(Obstacle::WholePagesOnly)
    } else if has_data_limit() {
        Some(Obstacle::DataLimit)
    } else if has_pinned_buffers_lately() {
        Some(Obstacle::PinnedBuffers)
    } else {
        None
    }
}

/// Private memory counts against RLIMIT_DATA and shared memory does not: once the program has used up
/// what sharing left, pages could not become private again before a fork.
fn has_data_limit() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the struct is ours to write.
    unsafe { libc::getrlimit(libc::RLIMIT_DATA, &raw mut limit) == 0 && limit.rlim_cur != libc::RLIM_INFINITY }
}

/// The answer of a while ago, where a look is long. Relaxed, all of it: under the table's lock.
struct Lately {
    known: AtomicBool,
    until_ns: AtomicU64,
}

impl Lately {
    const fn new() -> Self {
        Self { known: AtomicBool::new(false), until_ns: AtomicU64::new(0) }
    }

    fn answer(&self, look: impl FnOnce() -> bool) -> bool {
        let begin = now_ns();
        if begin >= self.until_ns.load(Ordering::Relaxed) {
            self.known.store(look(), Ordering::Relaxed);
            let end = now_ns();
            self.until_ns.store(end + (end - begin) * LOOK_EVERY_COSTS, Ordering::Relaxed);
        }
        self.known.load(Ordering::Relaxed)
    }
}

fn has_pinned_buffers_lately() -> bool {
    static LATELY: Lately = Lately::new();
    LATELY.answer(|| has_pinned_buffers(Path::new(PROCESS)))
}

/// Whether a device may write to memory of the process while none of its threads is in a system call, as far as can be
/// seen: asynchronous reads past the page cache (io_uring, libaio), and character devices, as GPUs are. What has
/// begun goes on in the old page when a page is moved.
pub(crate) fn devices_may_write() -> bool {
    let is_it = |target: &str| target == RING || is_device(target);
    descriptors(Path::new(PROCESS)).any(|(_, target)| target.to_str().is_some_and(is_it)) || has_asynchronous_io()
}

/// The same, as of a while ago.
pub(crate) fn devices_may_write_lately() -> bool {
    static LATELY: Lately = Lately::new();
    LATELY.answer(devices_may_write)
}

/// Not those that write to memory in system calls alone.
fn is_device(target: &str) -> bool {
    const HARMLESS: [&str; 10] =
        ["null", "zero", "full", "random", "urandom", "console", "ptmx", "fuse", "kvm", "net/tun"];
    const HARMLESS_BEGINNINGS: [&str; 3] = ["pts/", "shm/", "tty"];
    target.strip_prefix("/dev/").is_some_and(|name| {
        !HARMLESS.contains(&name) && !HARMLESS_BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
    })
}

/// Whether there is a context of `io_setup`, which is a mapping. Of the whole machine the kernel knows the requests
/// that all contexts have room for.
fn has_asynchronous_io() -> bool {
    let is_used = std::fs::read_to_string("/proc/sys/fs/aio-nr").is_ok_and(|count| count.trim() != "0");
    is_used
        && std::fs::read_to_string(Path::new(PROCESS).join("maps"))
            .is_ok_and(|maps| maps.lines().any(|line| line.ends_with("/[aio]") || line.contains("/[aio] ")))
}

/// The process's descriptors: their numbers and targets. `process`: its directory below /proc.
fn descriptors(process: &Path) -> impl Iterator<Item = (OsString, PathBuf)> {
    let descriptors = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    descriptors.filter_map(|entry| Some((entry.file_name(), std::fs::read_link(entry.path()).ok()?)))
}

/// Whether an io_uring of the process has registered buffers: their pages are pinned, and the kernel
/// goes on with the old ones.
fn has_pinned_buffers(process: &Path) -> bool {
    descriptors(process).filter(|(_, target)| target.as_os_str() == RING).any(|(number, _)| {
        let about = std::fs::read_to_string(process.join("fdinfo").join(number));
        about.is_ok_and(|about| has_buffers(&about))
    })
}

/// A ring that is busy shows nothing of itself.
fn has_buffers(about: &str) -> bool {
    let count = about.lines().find_map(|line| line.strip_prefix("UserBufs:"));
    count.is_none_or(|count| count.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_known_by_their_names() {
        for target in ["/dev/nvidia0", "/dev/vfio/12", "/dev/dri/renderD128", "/dev/kfd", "/dev/infiniband/uverbs0"] {
            assert!(is_device(target), "{target}");
        }
        for target in ["/dev/null", "/dev/pts/3", "/dev/tty", "/dev/ttyS0", "/dev/shm/x", "/dev/net/tun", "/tmp/dev/x"]
        {
            assert!(!is_device(target), "{target}");
        }
    }

    #[test]
    fn an_asynchronous_context_is_found() {
        assert!(
            !has_asynchronous_io() && descriptors(Path::new(PROCESS)).all(|(_, target)| target.as_os_str() != RING)
        );
        let mut context = 0_u64;
        // SAFETY: `context` is ours to write; what it names is given back below.
        assert_eq!(unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) }, 0);
        assert!(has_asynchronous_io() && devices_may_write());
        // SAFETY: made above.
        assert_eq!(unsafe { libc::syscall(libc::SYS_io_destroy, context) }, 0);
        assert!(!has_asynchronous_io());
    }

    #[test]
    fn a_ring_with_registered_buffers_is_known_by_its_text() {
        assert!(!has_buffers("pos:\t0\nflags:\t02\nSqMask:\t0x3\nUserFiles:\t0\nUserBufs:\t0\nPollList:\n"));
        assert!(has_buffers("pos:\t0\nUserBufs:\t1\n") && has_buffers("pos:\t0\nflags:\t02\n"));
        assert!(!has_pinned_buffers(Path::new("/proc/thread-self")) && !has_pinned_buffers(Path::new("/nowhere")));
    }
}
