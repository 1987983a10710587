//! The process's own pages: whether they are mapped, and bringing them in ahead of use.
//!
//! The requirement that a region is mapped is a courtesy to the program (EFAULT now instead of
//! error completions later), not protection: the router checks every access by itself, and the
//! program may unmap the memory a moment later.
use crate::process_map::ProcessMap;
use crate::syscalls;
use freeflow_client::Uncancelled;
use freeflow_verbs::VerbsError;
use std::ptr;
use std::sync::OnceLock;

/// Checks that every byte is mapped readable, and writable if asked. Returns the map that it opened
/// for that; `None`: a process that can't read its own map passes, and the router finds out.
///
/// # Errors
/// BadAddress if not.
pub fn check_mapped(start: u64, length: u64, writable: bool) -> Result<Option<ProcessMap>, VerbsError> {
    let _uncancelled = Uncancelled::begin();
    let end = start.checked_add(length).ok_or(VerbsError::BadAddress)?;
    let Some(map) = ProcessMap::open() else { return Ok(None) };
    if is_mapped(&map, start, end, writable) { Ok(Some(map)) } else { Err(VerbsError::BadAddress) }
}

fn is_mapped(map: &ProcessMap, start: u64, end: u64, writable: bool) -> bool {
    let mut reached = start;
    let is_read = map.visit(start, end, &mut |area| {
        let is_next = area.start <= reached && area.readable && (area.writable || !writable);
        reached = if is_next { area.end } else { reached };
        is_next
    });
    !is_read || reached >= end
}

/// Brings pages in, for writing if asked. Their contents stay as they are.
///
/// # Errors
/// BadAddress: something of the range is not mapped, or not with these rights. NotSupported: the
/// kernel is older than Linux 5.14.
pub fn populate(start: u64, length: u64, writable: bool) -> Result<(), VerbsError> {
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
    match unsafe { syscalls::madvise(ptr::without_provenance_mut(first as usize), length as usize, advice) } {
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
        let code = check_mapped as *const () as u64;
        let wrong = Err(VerbsError::BadAddress);
        let cases = [(stack, true, Ok(())), (code, false, Ok(())), (code, true, wrong), (0, false, wrong)];
        for (start, writable, expected) in cases {
            assert_eq!(check_mapped(start, 64, writable).map(drop), expected, "{start:#x}");
            for map in [ProcessMap::open(), ProcessMap::open().map(ProcessMap::by_text)].into_iter().flatten() {
                assert_eq!(is_mapped(&map, start, start + 64, writable), expected.is_ok(), "{start:#x}");
            }
        }
        assert_eq!(check_mapped(u64::MAX, 8, false).map(drop), wrong);
    }

    #[test]
    fn a_hole_and_missing_rights_are_found_by_both_ways() {
        const PAGE: usize = 4096;
        // SAFETY: a new mapping of this test's own, cut and changed in its middle.
        let start = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let start = libc::mmap(ptr::null_mut(), 6 * PAGE, rights, flags, -1, 0);
            assert_eq!(libc::mprotect(start.wrapping_byte_add(PAGE), PAGE, libc::PROT_READ), 0);
            assert_eq!(libc::mprotect(start.wrapping_byte_add(3 * PAGE), PAGE, libc::PROT_NONE), 0);
            // Nothing of another test is mapped there meanwhile that is readable.
            assert_eq!(libc::mprotect(start.wrapping_byte_add(5 * PAGE), PAGE, libc::PROT_NONE), 0);
            start.addr() as u64
        };
        let page = PAGE as u64;
        for map in [ProcessMap::open(), ProcessMap::open().map(ProcessMap::by_text)].into_iter().flatten() {
            let is = |from: u64, to: u64, writable| is_mapped(&map, start + from, start + to, writable);
            assert!(is(8, 3 * page, false) && !is(8, 3 * page, true));
            assert!(is(2 * page, 3 * page, true) && !is(2 * page, 3 * page + 1, false));
            assert!(is(4 * page, 5 * page, true) && !is(4 * page, 5 * page + 1, true));
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
        assert_eq!(populate(check_mapped as *const () as u64, 1, false), Ok(()));
        assert_eq!(populate(check_mapped as *const () as u64, 1, true), Err(VerbsError::BadAddress));
    }
}
