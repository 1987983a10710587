//! Synchronous identifiers: waiting for the event of a call, requests one by one, and end points in
//! one call.
use crate::address::{family, length_of_family};
use crate::boundary::{Outcome, quiet, status};
use crate::event::next;
use crate::id::{Id, Template, shared};
use crate::lifecycle::{create, destroy};
use crate::resolve::{bind, rdma_resolve_route, resolve};
use crate::{boundary, qp, srq};
use freeflow_abi::{
    RAI_PASSIVE, RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_DEVICE_REMOVAL, RDMA_CM_EVENT_REJECTED, ibv_pd,
    ibv_qp_init_attr, rdma_addrinfo, rdma_cm_event, rdma_cm_id,
};
use std::ffi::c_int;
use std::ptr;

/// Time for an end point's address or route, milliseconds.
const RESOLVE_TIMEOUT_MS: c_int = 2000;

/// The errno that an event comes to; of a rejection ECONNREFUSED.
fn outcome_of(event: &rdma_cm_event) -> Outcome<()> {
    match (event.event, event.status) {
        (RDMA_CM_EVENT_DEVICE_REMOVAL, _) => Err(libc::EIO),
        (_, 0) => Ok(()),
        (RDMA_CM_EVENT_REJECTED, _) => Err(libc::ECONNREFUSED),
        (_, status) => Err(status.checked_abs().unwrap_or(libc::EIO)),
    }
}

/// Waits for the event of a call, if the identifier is synchronous; the event stays at the
/// identifier until its next call.
pub(crate) fn complete(id: &Id) -> Outcome<()> {
    let (channel, is_synchronous) = {
        let state = id.state();
        (state.channel.clone(), state.is_synchronous)
    };
    if !is_synchronous {
        return Ok(());
    }
    id.acknowledge_kept_event();
    let event = next(&channel)?;
    // SAFETY: the pointer is the identifier's own; the event was just made.
    unsafe {
        (*id.as_c()).event = event;
        outcome_of(&*event)
    }
}

/// # Safety
/// `listener` is an identifier.
unsafe fn request(listener: *mut rdma_cm_id) -> Outcome<*mut rdma_cm_id> {
    // SAFETY: this function's contract.
    let listener = unsafe { Id::from_c(listener)? };
    let (channel, is_synchronous) = {
        let state = listener.state();
        (state.channel.clone(), state.is_synchronous)
    };
    if !is_synchronous {
        return Err(libc::EINVAL);
    }
    listener.acknowledge_kept_event();
    let event = next(&channel)?;
    // SAFETY: the event was just made, and so was the identifier in it; the pointers are the
    // listener's own.
    unsafe {
        let outcome = outcome_of(&*event).and_then(|()| {
            if (*event).event != RDMA_CM_EVENT_CONNECT_REQUEST {
                return Err(libc::EINVAL);
            }
            let template = listener.state().qp_template.as_ref().map(|template| template.0);
            template.map_or(Ok(()), |mut template| {
                qp::create(Id::from_c((*event).id)?, (*listener.as_c()).pd, &raw mut template)
            })
        });
        if let Err(error) = outcome {
            (*listener.as_c()).event = event;
            return Err(error);
        }
        (*(*event).id).event = event;
        Ok((*event).id)
    }
}

/// `rdma_get_request(3)`: EINVAL for an identifier with an event channel of the program's.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_request(listener: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int {
    status(|| {
        if id.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the C contract.
        unsafe { *id = request(listener)? };
        Ok(())
    })
}

/// # Safety
/// The pointers are valid.
unsafe fn passive(id: &Id, wanted: &rdma_addrinfo, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> Outcome<()> {
    // SAFETY: this function's contract.
    unsafe {
        bind(id, wanted.ai_src_addr)?;
        if !pd.is_null() {
            (*id.as_c()).pd = pd;
        }
        if let Some(init) = init.as_ref() {
            id.state().qp_template = Some(Template(ibv_qp_init_attr { qp_type: wanted.ai_qp_type as u32, ..*init }));
        }
    }
    Ok(())
}

/// # Safety
/// The pointers are valid.
unsafe fn active(id: &Id, wanted: &rdma_addrinfo, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> Outcome<()> {
    // SAFETY: this function's contract. An empty source is none.
    unsafe {
        let source = if wanted.ai_src_len == 0 { ptr::null_mut() } else { wanted.ai_src_addr };
        let is_whole = length_of_family(family(wanted.ai_dst_addr)?) <= wanted.ai_dst_len as usize;
        if !is_whole {
            return Err(libc::EINVAL);
        }
        resolve(id, source, wanted.ai_dst_addr, RESOLVE_TIMEOUT_MS)?;
        // A route of the program's own (`ai_route`) is nothing that the router would take.
        if rdma_resolve_route(id.as_c(), RESOLVE_TIMEOUT_MS) != 0 {
            return Err(boundary::last_errno());
        }
        if !init.is_null() {
            (*init).qp_type = wanted.ai_qp_type as u32;
            qp::create(id, pd, init)?;
        }
        if wanted.ai_connect_len > 0 && !wanted.ai_connect.is_null() {
            let data = std::slice::from_raw_parts(wanted.ai_connect.cast::<u8>(), wanted.ai_connect_len);
            id.state().connect_data = data.to_vec();
        }
    }
    Ok(())
}

/// `rdma_create_ep(3)`.
///
/// # Safety
/// The pointers are valid; `pd` and `init` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_ep(
    id: *mut *mut rdma_cm_id,
    wanted: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        unsafe {
            let wanted = wanted.as_ref().filter(|_| !id.is_null()).ok_or(libc::EINVAL)?;
            let made = create(ptr::null_mut(), ptr::null_mut(), wanted.ai_port_space as u32, wanted.ai_qp_type as u32)?;
            let equip = if wanted.ai_flags & RAI_PASSIVE != 0 { passive } else { active };
            if let Err(error) = equip(&made, wanted, pd, init) {
                destroy_all(&made);
                return Err(error);
            }
            *id = made.as_c();
        }
        Ok(())
    })
}

fn destroy_all(id: &Id) {
    qp::destroy(id);
    srq::destroy(id);
    let _ = destroy(id);
}

/// `rdma_destroy_ep(3)`: with its QP and SRQ.
///
/// # Safety
/// `id` is an identifier, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    quiet(|| {
        // SAFETY: the C contract.
        if let Ok(id) = unsafe { shared(id) } {
            destroy_all(&id);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: u32, status: c_int) -> rdma_cm_event {
        // SAFETY: integers and pointers only; all zeroes are valid.
        let mut event: rdma_cm_event = unsafe { std::mem::zeroed() };
        (event.event, event.status) = (kind, status);
        event
    }

    #[test]
    fn an_events_status_is_the_calls_errno() {
        assert_eq!(outcome_of(&event(RDMA_CM_EVENT_CONNECT_REQUEST, 0)), Ok(()));
        assert_eq!(outcome_of(&event(RDMA_CM_EVENT_REJECTED, 28)), Err(libc::ECONNREFUSED));
        assert_eq!(outcome_of(&event(0, -libc::ETIMEDOUT)), Err(libc::ETIMEDOUT));
        assert_eq!(outcome_of(&event(0, c_int::MIN)), Err(libc::EIO));
        assert_eq!(outcome_of(&event(RDMA_CM_EVENT_DEVICE_REMOVAL, 0)), Err(libc::EIO));
    }
}
