//! Circumstances in which pages stay where they are that hold more than regions, in the whole
//! process: what is beside a region would be lost there, or could not come back.
use crate::hints::Obstacle;
use crate::table::{Extent, extent};
use crate::threads::now_ns;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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

/// The answer of a while ago, where there are many descriptors. Relaxed, all of it: under the table's
/// lock.
fn has_pinned_buffers_lately() -> bool {
    static KNOWN: AtomicBool = AtomicBool::new(false);
    static KNOWN_UNTIL_NS: AtomicU64 = AtomicU64::new(0);
    let begin = now_ns();
    if begin >= KNOWN_UNTIL_NS.load(Ordering::Relaxed) {
        KNOWN.store(has_pinned_buffers(Path::new("/proc/thread-self")), Ordering::Relaxed);
        let end = now_ns();
        KNOWN_UNTIL_NS.store(end + (end - begin) * LOOK_EVERY_COSTS, Ordering::Relaxed);
    }
    KNOWN.load(Ordering::Relaxed)
}

/// Whether an io_uring of the process has registered buffers: their pages are pinned, and the kernel
/// goes on with the old ones. `process`: its directory below /proc.
fn has_pinned_buffers(process: &Path) -> bool {
    let Ok(descriptors) = std::fs::read_dir(process.join("fd")) else { return false };
    descriptors.flatten().any(|descriptor| {
        let is_ring = std::fs::read_link(descriptor.path()).is_ok_and(|to| to.as_os_str() == "anon_inode:[io_uring]");
        is_ring && {
            let about = std::fs::read_to_string(process.join("fdinfo").join(descriptor.file_name()));
            about.is_ok_and(|about| has_buffers(&about))
        }
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
    fn a_ring_with_registered_buffers_is_known_by_its_text() {
        assert!(!has_buffers("pos:\t0\nflags:\t02\nSqMask:\t0x3\nUserFiles:\t0\nUserBufs:\t0\nPollList:\n"));
        assert!(has_buffers("pos:\t0\nUserBufs:\t1\n") && has_buffers("pos:\t0\nflags:\t02\n"));
        assert!(!has_pinned_buffers(Path::new("/proc/thread-self")) && !has_pinned_buffers(Path::new("/nowhere")));
    }
}
