//! The way of an identifier's QP through its states: the router does it with the step of the
//! connection, or says with what and the library does it.
use crate::boundary::{Outcome, checked, status};
use crate::call::{call, command};
use crate::id::Id;
use crate::verbs;
use freeflow_abi::{ibv_qp, ibv_qp_attr, qp_attributes_to_c, rdma_cm_id};
use freeflow_protocol::cm::{CmReply, CmRequest, CmStep};
use freeflow_protocol::encode;
use freeflow_verbs::{QpAttributeMask, QpAttributes, QpState};
use std::ffi::c_int;

/// Attributes with which the QP is modified on its way to that state.
pub(crate) fn attributes(id: &Id, state: QpState) -> Outcome<(ibv_qp_attr, c_int)> {
    let request = CmRequest::InitQpAttributes { id: id.handle(), state };
    // SAFETY: the identifier's device is there.
    match unsafe { call(id.context()?, request)? } {
        (Some(CmReply::QpAttributes { attributes, mask }), _) => Ok((qp_attributes_to_c(&attributes), mask.0 as c_int)),
        _ => Err(libc::EIO),
    }
}

/// # Safety
/// `qp` exists.
unsafe fn modify(qp: *mut ibv_qp, (mut attributes, mask): (ibv_qp_attr, c_int)) -> Outcome<()> {
    // SAFETY: this function's contract; a local.
    checked(unsafe { verbs::ibv_modify_qp(qp, &raw mut attributes, mask) })
}

/// Takes a step of the connection together with what it means to the QP.
///
/// # Safety
/// `qp` exists.
pub(crate) unsafe fn step(id: &Id, qp: *mut ibv_qp, step: CmStep) -> Outcome<()> {
    id.context()?;
    let step = encode(&step);
    // SAFETY: this function's contract; the message is as long as is said.
    checked(unsafe { verbs::freeflow_step(qp, step.as_ptr().cast(), step.len()) })
}

/// The QP of an identifier that was given one.
pub(crate) fn qp_of(id: &Id) -> Option<*mut ibv_qp> {
    // SAFETY: the pointer is the identifier's own.
    let qp = unsafe { (*id.as_c()).qp };
    (!qp.is_null()).then_some(qp)
}

/// RTR, by way of INIT again: what was settled since the QP was created counts. Does nothing
/// without a QP.
///
/// This and the next are for an answer that the router did not deal with by itself.
pub(crate) fn ready_to_receive(id: &Id) -> Outcome<()> {
    let Some(qp) = qp_of(id) else { return Ok(()) };
    // SAFETY: a QP of an identifier exists as long as it stands there.
    unsafe {
        modify(qp, attributes(id, QpState::Init)?)?;
        modify(qp, attributes(id, QpState::ReadyToReceive)?)
    }
}

/// RTS. Does nothing without a QP.
pub(crate) fn ready_to_send(id: &Id) -> Outcome<()> {
    let Some(qp) = qp_of(id) else { return Ok(()) };
    let settled = attributes(id, QpState::ReadyToSend)?;
    // SAFETY: a QP of an identifier exists as long as it stands there.
    unsafe { modify(qp, settled) }
}

/// ERROR. Does nothing without a QP.
pub(crate) fn fail(id: &Id) -> Outcome<()> {
    let Some(qp) = qp_of(id) else { return Ok(()) };
    let attributes = QpAttributes { state: QpState::Error, ..QpAttributes::default() };
    // SAFETY: a QP of an identifier exists as long as it stands there.
    unsafe { modify(qp, (qp_attributes_to_c(&attributes), QpAttributeMask::STATE as c_int)) }
}

/// Sends the active side's last message.
pub(crate) fn establish(id: &Id) -> Outcome<()> {
    // SAFETY: the identifier's device is there.
    unsafe { command(id.context()?, CmRequest::Establish { id: id.handle() }) }
}

/// `rdma_init_qp_attr(3)`: for the state that stands in `attr`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_init_qp_attr(id: *mut rdma_cm_id, attr: *mut ibv_qp_attr, mask: *mut c_int) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        unsafe {
            let id = Id::from_c(id)?;
            if attr.is_null() || mask.is_null() {
                return Err(libc::EINVAL);
            }
            let state = (&raw const (*attr).qp_state).read();
            let state = QpState::from_number(state).ok_or(libc::EINVAL)?;
            let (settled, settled_mask) = attributes(id, state)?;
            attr.write(settled);
            mask.write(settled_mask);
        }
        Ok(())
    })
}
