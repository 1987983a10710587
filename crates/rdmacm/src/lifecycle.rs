//! Creation and destruction of identifiers.
use crate::boundary::{Outcome, status};
use crate::call::{call, destroy_id};
use crate::channel::EventChannel;
use crate::id::{Home, Id, shared};
use crate::pipe::Pipe;
use crate::process::Process;
use freeflow_abi::{
    IBV_QPT_RC, IBV_QPT_UD, RDMA_PS_IB, RDMA_PS_IPOIB, RDMA_PS_TCP, RDMA_PS_UDP, qp_type_from_c, rdma_cm_id,
    rdma_event_channel,
};
use freeflow_protocol::cm::{CmReply, CmRequest, PortSpace};
use freeflow_verbs::QpType;
use std::ffi::{c_int, c_uint, c_void};
use std::mem;
use std::sync::Arc;

/// `rdma_port_space`; EINVAL for what is none.
pub(crate) fn port_space(ps: c_uint) -> Outcome<PortSpace> {
    match ps {
        RDMA_PS_IPOIB => Ok(PortSpace::Ipoib),
        RDMA_PS_TCP => Ok(PortSpace::Tcp),
        RDMA_PS_UDP => Ok(PortSpace::Udp),
        RDMA_PS_IB => Ok(PortSpace::Ib),
        _ => Err(libc::EINVAL),
    }
}

/// Has the router of a pipe make an identifier.
pub(crate) fn create_at(pipe: &Pipe, port_space: PortSpace, qp_type: QpType, key: u64) -> Outcome<Home> {
    let request = CmRequest::CreateId { channel: pipe.handle, port_space, qp_type, cookie: key };
    // SAFETY: the pipe's device is there.
    match unsafe { call(pipe.device.context(), request)? } {
        (Some(CmReply::Id { id: handle }), _) => Ok(Home { device: pipe.device.clone(), handle }),
        _ => Err(libc::EIO),
    }
}

/// Creates an identifier; without a channel it is a synchronous one.
///
/// # Safety
/// `channel` is null or a channel.
pub(crate) unsafe fn create(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: c_uint,
    qp_type: c_uint,
) -> Outcome<Arc<Id>> {
    let port_space = port_space(ps)?;
    let qp_type_known = qp_type_from_c(qp_type).map_err(freeflow_abi::errno_of)?;
    let is_synchronous = channel.is_null();
    let channel = if is_synchronous {
        EventChannel::create()?
    } else {
        // SAFETY: this function's contract.
        unsafe { EventChannel::share(channel)? }
    };
    channel.born.check()?;
    let key = Process::current().new_key();
    let home = create_at(&channel.pipe_by_default(), port_space, qp_type_known, key)?;
    let id = Id::insert(&channel, key, home, (ps, qp_type), context);
    id.state().is_synchronous = is_synchronous;
    Ok(id)
}

/// `rdma_create_id(3)`.
///
/// # Safety
/// `channel` is null or a channel; `id` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: c_uint,
) -> c_int {
    status(|| {
        if id.is_null() {
            return Err(libc::EINVAL);
        }
        let qp_type = if ps == RDMA_PS_IPOIB || ps == RDMA_PS_UDP { IBV_QPT_UD } else { IBV_QPT_RC };
        // SAFETY: the C contract. The table keeps it.
        unsafe { *id = create(channel, context, ps, qp_type)?.as_c() };
        Ok(())
    })
}

/// Ends an identifier: what was read of it is waited for, what was not is thrown away.
pub(crate) fn destroy(id: &Id) -> Outcome<()> {
    let (channel, is_gone) = {
        let state = id.state();
        (state.channel.clone(), state.is_gone)
    };
    let homes = if is_gone { Vec::new() } else { id.homes() };
    // SAFETY: the device is there.
    let destroyed = homes.iter().map(|home| unsafe { destroy_id(home.device.context(), home.handle) });
    let event_count: u32 = destroyed.sum();
    let (kept, memberships) = {
        let mut table = Process::current().table();
        let mut state = id.state();
        state.is_gone = true;
        let memberships = mem::take(&mut state.memberships);
        for membership in &memberships {
            table.memberships.remove(&membership.key);
        }
        (table.ids.remove(&id.key), memberships)
    };
    let (read, is_synchronous) = {
        let state = id.state();
        (state.read, state.is_synchronous)
    };
    if event_count > read {
        let is_ours = |key| key == id.key || memberships.iter().any(|membership| membership.key == key);
        channel.extract(is_ours).into_iter().for_each(|event| channel.dismiss(event));
    }
    id.acknowledge_kept_event();
    id.wait_for_acknowledgements();
    if is_synchronous {
        channel.close_empty();
    }
    drop(kept);
    Ok(())
}

/// `rdma_destroy_id(3)`: returns once all events of the identifier are acknowledged.
///
/// # Safety
/// `id` is an identifier, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the C contract; the table's reference is given up at the end, so it is looked at by
    // one of our own.
    status(|| unsafe { destroy(&*shared(id)?) })
}
