//! Connections: connect, accept, reject, establish, notify, disconnect.
use crate::boundary::{Outcome, status};
use crate::call::command;
use crate::endpoint::complete;
use crate::id::Id;
use crate::qp::has_srq;
use crate::qp_states::{establish, fail, qp_of, step};
use freeflow_abi::{RDMA_MAX_INIT_DEPTH, RDMA_MAX_RESP_RES, RDMA_PS_TCP, ibv_qp, rdma_cm_id, rdma_conn_param};
use freeflow_protocol::cm::{CmRequest, CmStep, ConnectionParameters, Ece};
use freeflow_verbs::{AsyncEventKind, QpState};
use std::ffi::{c_int, c_void};
use std::mem;

/// Retries where the program says nothing: as often as can be, and for ever for want of a RECV.
const RETRIES_BY_DEFAULT: u8 = 7;

/// Checks a program's parameters of a connection; depths that the device hasn't are EINVAL
/// (`RDMA_PS_TCP` only, as rdma-core has it).
fn check(id: &Id, wanted: Option<&rdma_conn_param>, depth_max: u8) -> Outcome<()> {
    // SAFETY: a read of an integer that does not change.
    if unsafe { (*id.as_c()).ps } != RDMA_PS_TCP {
        return Ok(());
    }
    let Some(wanted) = wanted else { return if qp_of(id).is_some() { Ok(()) } else { Err(libc::EINVAL) } };
    let is_possible = |depth, by_default| depth == by_default || depth <= depth_max;
    if is_possible(wanted.responder_resources, RDMA_MAX_RESP_RES)
        && is_possible(wanted.initiator_depth, RDMA_MAX_INIT_DEPTH)
    {
        Ok(())
    } else {
        Err(libc::EINVAL)
    }
}

/// # Safety
/// `data` is null or valid for so many bytes.
unsafe fn bytes_of(data: *const c_void, bytes: u8) -> Vec<u8> {
    if data.is_null() || bytes == 0 {
        return Vec::new();
    }
    // SAFETY: this function's contract.
    unsafe { std::slice::from_raw_parts(data.cast::<u8>(), usize::from(bytes)) }.to_vec()
}

/// # Safety
/// The private data of `wanted` is valid.
unsafe fn parameters(id: &Id, wanted: Option<&rdma_conn_param>, ece: Ece) -> ConnectionParameters {
    let mut state = id.state();
    let mut private_data = mem::take(&mut state.connect_data);
    let mut out = ConnectionParameters {
        responder_resources: state.responder_resources,
        initiator_depth: state.initiator_depth,
        retry_count: RETRIES_BY_DEFAULT,
        rnr_retry_count: RETRIES_BY_DEFAULT,
        ece,
        ..ConnectionParameters::default()
    };
    drop(state);
    if let Some(wanted) = wanted {
        out.flow_control = wanted.flow_control != 0;
        out.retry_count = wanted.retry_count;
        out.rnr_retry_count = wanted.rnr_retry_count;
        out.srq = wanted.srq != 0;
        out.qp_number = wanted.qp_num;
        // SAFETY: this function's contract.
        private_data.extend(unsafe { bytes_of(wanted.private_data, wanted.private_data_len) });
    }
    if let Some(qp) = qp_of(id) {
        // SAFETY: the QP of an identifier exists.
        (out.qp_number, out.srq) = unsafe { ((*qp).qp_num, has_srq(qp)) };
    }
    out.private_data = private_data;
    out
}

/// The QP that changes with a connection's steps: of datagrams none does.
fn connected_qp(id: &Id) -> Option<*mut ibv_qp> {
    qp_of(id).filter(|_| !id.is_datagram())
}

fn is_ready(id: &Id) -> bool {
    // SAFETY: the QP of an identifier exists.
    qp_of(id).is_some_and(|qp| unsafe { (*qp).state } == QpState::ReadyToSend as u32)
}

fn connect(id: &Id, parameters: ConnectionParameters) -> Outcome<()> {
    match connected_qp(id) {
        // SAFETY: the QP of an identifier exists.
        Some(qp) => unsafe { step(id, qp, CmStep::Connect { id: id.handle(), parameters }) },
        // SAFETY: the identifier's device is there.
        None => unsafe { command(id.context()?, CmRequest::Connect { id: id.handle(), parameters }) },
    }
}

fn accept(id: &Id, parameters: ConnectionParameters) -> Outcome<()> {
    let (id, cookie, of) = (id.handle(), id.key, id);
    match connected_qp(of) {
        // SAFETY: the QP of an identifier exists.
        Some(qp) => unsafe { step(of, qp, CmStep::Accept { id, cookie, parameters }) },
        // SAFETY: the identifier's device is there.
        None => unsafe { command(of.context()?, CmRequest::Accept { id, cookie, parameters }) },
    }
}

/// `rdma_connect(3)`. The event is ESTABLISHED (or CONNECT_RESPONSE without a QP), REJECTED,
/// UNREACHABLE or CONNECT_ERROR.
///
/// # Safety
/// The pointers are valid; `wanted` may be null if the identifier has a QP.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_connect(id: *mut rdma_cm_id, wanted: *mut rdma_conn_param) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let (id, wanted) = unsafe { (Id::from_c(id)?, wanted.as_ref()) };
        let depth_max = id.device()?.depth_max;
        check(id, wanted, depth_max)?;
        let chosen = |depth: Option<u8>, by_default| depth.filter(|depth| *depth != by_default).unwrap_or(depth_max);
        let ece = {
            let mut state = id.state();
            state.initiator_depth = chosen(wanted.map(|wanted| wanted.initiator_depth), RDMA_MAX_INIT_DEPTH);
            state.responder_resources = chosen(wanted.map(|wanted| wanted.responder_resources), RDMA_MAX_RESP_RES);
            state.local_ece
        };
        // SAFETY: the C contract.
        let parameters = unsafe { parameters(id, wanted, ece) };
        connect(id, parameters)?;
        complete(id)
    })
}

/// `rdma_accept(3)`. The event is ESTABLISHED; for datagrams none.
///
/// # Safety
/// The pointers are valid; `wanted` may be null if the identifier has a QP.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_accept(id: *mut rdma_cm_id, wanted: *mut rdma_conn_param) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let (id, wanted) = unsafe { (Id::from_c(id)?, wanted.as_ref()) };
        let depth_max = id.device()?.depth_max;
        if wanted.is_none() && qp_of(id).is_none() {
            return Err(libc::EINVAL);
        }
        check(id, wanted, depth_max)?;
        let ece = {
            let mut state = id.state();
            let chosen = |depth: Option<u8>, by_default, asked: u8| {
                depth.filter(|depth| *depth != by_default).unwrap_or(asked.min(depth_max))
            };
            state.initiator_depth =
                chosen(wanted.map(|wanted| wanted.initiator_depth), RDMA_MAX_INIT_DEPTH, state.initiator_depth);
            state.responder_resources =
                chosen(wanted.map(|wanted| wanted.responder_resources), RDMA_MAX_RESP_RES, state.responder_resources);
            // The answer names the vendor that asked.
            Ece { vendor_id: state.remote_ece.vendor_id, options: state.local_ece.options }
        };
        // SAFETY: the C contract.
        let parameters = unsafe { parameters(id, wanted, ece) };
        if let Err(error) = accept(id, parameters) {
            // If it was the QP that could not, it is left as it is.
            if is_ready(id) {
                let _ = fail(id);
            }
            return Err(error);
        }
        if id.is_datagram() {
            if id.state().is_synchronous {
                id.acknowledge_kept_event();
            }
            return Ok(());
        }
        complete(id)
    })
}

/// # Safety
/// The pointers are valid.
unsafe fn reject(id: *mut rdma_cm_id, data: *const c_void, bytes: u8, ece: bool) -> c_int {
    status(|| {
        // SAFETY: this function's contract.
        unsafe {
            let id = Id::from_c(id)?;
            let request = CmRequest::Reject { id: id.handle(), private_data: bytes_of(data, bytes), ece };
            command(id.context()?, request)
        }
    })
}

/// `rdma_reject(3)`.
///
/// # Safety
/// The pointers are valid; `data` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_reject(id: *mut rdma_cm_id, data: *const c_void, bytes: u8) -> c_int {
    // SAFETY: the C contract.
    unsafe { reject(id, data, bytes, false) }
}

/// `rdma_reject_ece(3)`.
///
/// # Safety
/// The pointers are valid; `data` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_reject_ece(id: *mut rdma_cm_id, data: *const c_void, bytes: u8) -> c_int {
    // SAFETY: the C contract.
    unsafe { reject(id, data, bytes, true) }
}

/// `rdma_establish(3)`: only without a QP of the identifier's own.
///
/// # Safety
/// `id` is an identifier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let id = unsafe { Id::from_c(id)? };
        if qp_of(id).is_some() {
            return Err(libc::EINVAL);
        }
        establish(id)
    })
}

/// `rdma_notify(3)`: COMM_EST; EINVAL for any other event.
///
/// # Safety
/// `id` is an identifier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: c_int) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let id = unsafe { Id::from_c(id)? };
        if event != AsyncEventKind::CommunicationEstablished as c_int {
            return Err(libc::EINVAL);
        }
        // SAFETY: the identifier's device is there.
        unsafe { command(id.context()?, CmRequest::Notify { id: id.handle() }) }
    })
}

/// `rdma_disconnect(3)`: the QP goes to ERROR. The event is DISCONNECTED.
///
/// # Safety
/// `id` is an identifier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let id = unsafe { Id::from_c(id)? };
        id.device()?;
        match qp_of(id) {
            // SAFETY: the QP of an identifier exists.
            Some(qp) => unsafe { step(id, qp, CmStep::Disconnect { id: id.handle() })? },
            // SAFETY: the identifier's device is there.
            None => unsafe { command(id.context()?, CmRequest::Disconnect { id: id.handle() })? },
        }
        complete(id)
    })
}
