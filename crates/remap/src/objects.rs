//! The loaded objects of the process: the program and its libraries.
use std::ffi::{c_int, c_void};
use std::ops::Range;

use crate::ranges::PAGE_BYTES;

struct Search {
    address: u64,
    found: Option<Range<u64>>,
}

/// The pages of the writable segment of a loaded object that holds this address: its initialised
/// variables, and some zeroed ones. Takes a lock of the dynamic linker, so it is not for a freeze
/// window.
pub(crate) fn writable_segment_at(address: u64) -> Option<Range<u64>> {
    let mut search = Search { address, found: None };
    // SAFETY: `look` gets the pointer that it expects, which is valid for as long as the call lasts.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

/// Allocates nothing: the linker's lock is held.
unsafe extern "C" fn look(object: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: `dl_iterate_phdr` gives a valid object with so many headers; the search is the caller's,
    // and nobody else has it.
    let (object, search) = unsafe { (&*object, &mut *search.cast::<Search>()) };
    for number in 0..usize::from(object.dlpi_phnum) {
        // SAFETY: one of so many headers.
        let header = unsafe { &*object.dlpi_phdr.add(number) };
        let start = object.dlpi_addr.wrapping_add(header.p_vaddr);
        let end = start.wrapping_add(header.p_memsz).wrapping_add(PAGE_BYTES - 1) & !(PAGE_BYTES - 1);
        let pages = start & !(PAGE_BYTES - 1)..end;
        if header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W != 0 && pages.contains(&search.address) {
            search.found = Some(pages);
            return 1;
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    static VARIABLE: AtomicU64 = AtomicU64::new(7);
    static CONSTANT: [u8; 64] = [1; 64];

    #[test]
    fn variables_are_in_a_writable_segment_and_nothing_else_is() {
        let variable = (&raw const VARIABLE).addr() as u64;
        let segment = writable_segment_at(variable).unwrap();
        assert!(
            segment.contains(&variable)
                && segment.start.is_multiple_of(PAGE_BYTES)
                && segment.end.is_multiple_of(PAGE_BYTES)
        );
        let on_heap = Box::new(1_u8);
        let code = writable_segment_at as *const () as u64;
        for address in [(&raw const CONSTANT).addr() as u64, (&raw const *on_heap).addr() as u64, code, 0] {
            let found = writable_segment_at(address);
            // A constant may share the last page of the code or of what is relocated.
            assert!(
                found.is_none_or(|found| address == (&raw const CONSTANT).addr() as u64 && found.contains(&address))
            );
        }
    }
}
