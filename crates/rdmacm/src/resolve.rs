//! Where an identifier is and whom it talks to: bind, resolve, listen.
use crate::address::{copied, from_c, store};
use crate::boundary::{Outcome, status};
use crate::call::{bound, command};
use crate::endpoint::complete;
use crate::id::Id;
use crate::placing::{bind_listener, bind_placed, listen_at_others, listen_no_more, place_at, place_towards};
use crate::privilege::check_port;
use crate::route::note_local;
use freeflow_abi::{rdma_cm_id, rdma_socket_address};
use freeflow_protocol::cm::CmRequest;
use libc::sockaddr;
use std::ffi::c_int;

/// A time-out in C's terms: what is negative is none.
fn timeout(timeout_ms: c_int) -> u32 {
    u32::try_from(timeout_ms).unwrap_or(0)
}

/// Binds an identifier to an address; what the program sees has the family that it named.
///
/// # Safety
/// `address` is null or as long as its family says.
pub(crate) unsafe fn bind(id: &Id, address: *const sockaddr) -> Outcome<()> {
    // SAFETY: this function's contract.
    let (wanted, shown) = unsafe { (from_c(address)?, copied(address)?) };
    check_port(wanted.port)?;
    place_at(id, wanted.gid)?;
    let local = bind_placed(id, wanted)?;
    // SAFETY: the pointer is the identifier's own.
    unsafe { (*id.as_c()).route.addr.src = shown };
    note_local(id, local);
    Ok(())
}

/// `rdma_bind_addr(3)`: EACCES, EADDRINUSE, EADDRNOTAVAIL.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int {
    // SAFETY: the C contract.
    status(|| unsafe { bind(Id::from_c(id)?, address) })
}

/// # Safety
/// The addresses are null or as long as their families say.
pub(crate) unsafe fn resolve(
    id: &Id,
    source: *const sockaddr,
    destination: *const sockaddr,
    timeout_ms: c_int,
) -> Outcome<()> {
    // SAFETY: this function's contract.
    let (source_shown, from, to, destination_shown) = unsafe {
        let named = !source.is_null();
        let shown: Option<rdma_socket_address> = if named { Some(copied(source)?) } else { None };
        (shown, if named { Some(from_c(source)?) } else { None }, from_c(destination)?, copied(destination)?)
    };
    check_port(from.map_or(0, |from| from.port))?;
    place_towards(id, from.map(|from| from.gid), to.gid)?;
    let request =
        CmRequest::ResolveAddress { id: id.handle(), source: from, destination: to, timeout_ms: timeout(timeout_ms) };
    // SAFETY: the identifier's device is there. The route is its own.
    unsafe {
        let local = bound(id.context()?, request)?;
        let route = &mut (*id.as_c()).route;
        if let Some(shown) = source_shown {
            route.addr.src = shown;
        }
        store(&mut route.addr.src, local);
        route.addr.dst = destination_shown;
    }
    complete(id)
}

/// `rdma_resolve_addr(3)`. The event is ADDR_RESOLVED or ADDR_ERROR.
///
/// # Safety
/// The pointers are valid; `source` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    source: *mut sockaddr,
    destination: *mut sockaddr,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the C contract.
    status(|| unsafe { resolve(Id::from_c(id)?, source, destination, timeout_ms) })
}

/// `rdma_resolve_route(3)`. The event is ROUTE_RESOLVED or ROUTE_ERROR.
///
/// # Safety
/// `id` is an identifier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let id = unsafe { Id::from_c(id)? };
        id.device()?;
        let request = CmRequest::ResolveRoute { id: id.handle(), timeout_ms: timeout(timeout_ms) };
        // SAFETY: the identifier's device is there.
        unsafe { command(id.context()?, request)? };
        complete(id)
    })
}

/// `rdma_listen(3)`. A backlog of 0 or less is the largest.
///
/// # Safety
/// `id` is an identifier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let id = unsafe { Id::from_c(id)? };
        let backlog = u32::try_from(backlog).unwrap_or(0);
        bind_listener(id)?;
        // SAFETY: the identifier's device is there.
        let local = unsafe { bound(id.context()?, CmRequest::Listen { id: id.handle(), backlog })? };
        // None listens if one can't.
        listen_at_others(id, local, backlog).inspect_err(|_| listen_no_more(id))?;
        note_local(id, local);
        Ok(())
    })
}

/// `rdma_get_src_port(3)`: network byte order.
///
/// # Safety
/// `id` is an identifier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: the C contract.
    unsafe { crate::address::port(&(*id).route.addr.src) }
}

/// `rdma_get_dst_port(3)`: network byte order.
///
/// # Safety
/// `id` is an identifier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: the C contract.
    unsafe { crate::address::port(&(*id).route.addr.dst) }
}
