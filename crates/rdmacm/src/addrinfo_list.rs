//! The end of a list of `rdma_getaddrinfo`.
use crate::boundary::quiet;
use freeflow_abi::rdma_addrinfo;
use std::mem;

/// `rdma_freeaddrinfo(3)`.
///
/// # Safety
/// `list` is null or came from this library, once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_freeaddrinfo(list: *mut rdma_addrinfo) {
    quiet(|| {
        let mut next = list;
        // SAFETY: the C contract: a list of entries from malloc, each with its own parts.
        while let Some(entry) = unsafe { next.as_ref() } {
            let parts = [
                entry.ai_connect.cast(),
                entry.ai_route.cast(),
                entry.ai_src_canonname.cast(),
                entry.ai_dst_canonname.cast(),
                entry.ai_src_addr.cast(),
                entry.ai_dst_addr.cast(),
            ];
            let this = mem::replace(&mut next, entry.ai_next);
            // SAFETY: the same.
            unsafe {
                parts.into_iter().for_each(|part: *mut std::ffi::c_void| libc::free(part));
                libc::free(this.cast());
            }
        }
    });
}
