//! What the kernel knows of this process' pages: whether they are mapped, and bringing them in ahead of use.
use crate::boundary::Outcome;
use crate::remap::areas::Maps;
use crate::remap::calls;
use freeflow_client::check_mapped;
use freeflow_verbs::VerbsError;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Checks that memory is mapped with the rights asked for, by the quick way where the kernel has it. Gives the map that it opened
/// for that.
pub(crate) fn check_pages(start: u64, length: u64, writable: bool) -> Outcome<Option<Maps>> {
    static NOT_THERE: AtomicBool = AtomicBool::new(false);
    if !NOT_THERE.load(Ordering::Relaxed) {
        match query_pages(start, start + length, writable) {
            Some(outcome) => return outcome.map(Some),
            None => NOT_THERE.store(true, Ordering::Relaxed),
        }
    }
    check_mapped(start, length, writable).map(|()| None)
}

/// `None`: the kernel can't say.
fn query_pages(start: u64, end: u64, writable: bool) -> Option<Outcome<Maps>> {
    let maps = Maps::open().filter(Maps::has_query)?;
    let mut reached = start;
    maps.visit(start, end, &mut |area| {
        let is_next = area.start <= reached && area.readable && (area.writable || !writable);
        reached = if is_next { area.end } else { reached };
        is_next
    });
    Some(if reached >= end { Ok(maps) } else { Err(VerbsError::BadAddress) })
}

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
    match unsafe { calls::madvise(ptr::without_provenance_mut(first as usize), length as usize, advice) } {
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
            assert_eq!(check_pages(start, length, writable).map(drop), expected, "{start:#x}");
            if let Some(quick) = query_pages(start, start + length, writable) {
                assert_eq!(quick.map(drop), expected, "{start:#x}");
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
