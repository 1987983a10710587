//! What the kernel knows of this process' pages: whether they are mapped, and bringing them in ahead of use.
use crate::boundary::Outcome;
use freeflow_client::check_mapped;
use freeflow_verbs::VerbsError;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// `struct procmap_query` of `linux/fs.h` (Linux 6.11): asks for one area of the process's own map.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: u64 = 0xc000_6611 | ((size_of::<ProcmapQuery>() as u64) << 16);
const VMA_READABLE: u64 = 1;
const VMA_WRITABLE: u64 = 2;

/// Checks that memory is mapped with the rights asked for, by the quick way where the kernel has it.
pub(crate) fn check_pages(start: u64, length: u64, writable: bool) -> Outcome<()> {
    static NOT_THERE: AtomicBool = AtomicBool::new(false);
    if !NOT_THERE.load(Ordering::Relaxed) {
        match query_pages(start, start + length, writable) {
            Some(outcome) => return outcome,
            None => NOT_THERE.store(true, Ordering::Relaxed),
        }
    }
    check_mapped(start, length, writable)
}

/// `None`: the kernel can't say.
fn query_pages(start: u64, end: u64, writable: bool) -> Option<Outcome<()>> {
    let maps = std::fs::File::open("/proc/self/maps").ok()?;
    let needed = VMA_READABLE | if writable { VMA_WRITABLE } else { 0 };
    let mut reached = start;
    while reached < end {
        let mut query =
            ProcmapQuery { size: size_of::<ProcmapQuery>() as u64, query_addr: reached, ..ProcmapQuery::default() };
        // SAFETY: the kernel reads and writes the struct, whose size it is told.
        if unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query) } != 0 {
            return match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::ENOENT) => Some(Err(VerbsError::BadAddress)),
                _ => None,
            };
        }
        if query.vma_flags & needed != needed {
            return Some(Err(VerbsError::BadAddress));
        }
        reached = query.vma_end;
    }
    Some(Ok(()))
}

const _: () = assert!(size_of::<ProcmapQuery>() == 104);

/// Brings pages in, for writing if asked. Their contents stay as they are.
///
/// # Errors
/// BadAddress: something of the range is not mapped, or not with these rights. NotSupported: the kernel is older than
/// Linux 5.14.
pub(crate) fn populate(start: u64, length: u64, writable: bool) -> Outcome<()> {
    if length == 0 {
        return Ok(());
    }
    if !can_populate() {
        return Err(VerbsError::NotSupported);
    }
    let page = page_bytes();
    let end = start.checked_add(length).and_then(|end| end.checked_next_multiple_of(page));
    let end = end.ok_or(VerbsError::BadAddress)?;
    let first = start / page * page;
    let advice = if writable { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    advise(first, end - first, advice).map_err(|_| VerbsError::BadAddress)
}

fn page_bytes() -> u64 {
    // SAFETY: plain query.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

fn advise(first: u64, length: u64, advice: i32) -> std::io::Result<()> {
    // SAFETY: both kinds of advice used here change no contents and no mapping.
    match unsafe { libc::madvise(ptr::without_provenance_mut(first as usize), length as usize, advice) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Whether the kernel knows the advice: asked with a page that is surely there.
fn can_populate() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let here = 0_u8;
        let page = page_bytes();
        let first = (&raw const here).addr() as u64 / page * page;
        advise(first, page, libc::MADV_POPULATE_READ).is_ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_agree_on_what_is_mapped() {
        let here = [0_u8; 64];
        let stack = here.as_ptr().addr() as u64;
        let code = check_pages as *const () as u64;
        for (start, length, writable) in [(stack, 64, true), (code, 16, false), (code, 16, true), (0, 8, false)] {
            let expected = check_mapped(start, length, writable);
            assert_eq!(check_pages(start, length, writable), expected, "{start:#x}");
            if let Some(quick) = query_pages(start, start + length, writable) {
                assert_eq!(quick, expected, "{start:#x}");
            }
        }
    }

    #[test]
    fn prefetching_needs_mapped_pages() {
        if !can_populate() {
            return;
        }
        let here = [0_u8; 9000];
        let address = here.as_ptr().addr() as u64;
        assert_eq!(populate(address, 9000, true), Ok(()));
        assert_eq!(populate(0, 0, true), Ok(()));
        assert_eq!(populate(0, 1, false), Err(VerbsError::BadAddress));
        assert_eq!(populate(u64::MAX - 1, 1, false), Err(VerbsError::BadAddress));
        assert_eq!(populate(check_pages as *const () as u64, 1, false), Ok(()));
        assert_eq!(populate(check_pages as *const () as u64, 1, true), Err(VerbsError::BadAddress));
    }
}
