//! Extended connection establishment: what both ends' devices have in common. FreeFlow's has a
//! vendor number and no options, so all this comes to is that the numbers are passed on, and that
//! nobody's options are taken on.
use crate::boundary::{Outcome, checked, status};
use crate::id::Id;
use crate::qp_states::{fail, qp_of, ready_to_receive, ready_to_send};
use crate::verbs;
use freeflow_abi::{ibv_ece, ibv_qp, rdma_cm_id};
use freeflow_protocol::cm::Ece;
use std::ffi::c_int;

fn query(qp: *mut ibv_qp) -> Outcome<ibv_ece> {
    let mut ece = ibv_ece::default();
    // SAFETY: a QP of an identifier exists; a local.
    match checked(unsafe { verbs::ibv_query_ece(qp, &raw mut ece) }) {
        Ok(()) | Err(libc::EOPNOTSUPP) => Ok(ece),
        Err(error) => Err(error),
    }
}

fn set(qp: *mut ibv_qp, vendor_id: u32, options: u32) -> Outcome<()> {
    let mut ece = ibv_ece { vendor_id, options, comp_mask: 0 };
    // SAFETY: a QP of an identifier exists; a local.
    match checked(unsafe { verbs::ibv_set_ece(qp, &raw mut ece) }) {
        Ok(()) | Err(libc::EOPNOTSUPP) => Ok(()),
        Err(error) => Err(error),
    }
}

/// A new QP: says what it can, and takes over what the other end asks for, if that is of the same
/// vendor.
pub(crate) fn begin(id: &Id, qp: *mut ibv_qp) -> Outcome<()> {
    let own = query(qp)?;
    let mut state = id.state();
    state.local_ece = Ece { vendor_id: own.vendor_id, options: own.options };
    let remote = state.remote_ece;
    drop(state);
    if remote.vendor_id == 0 {
        return Ok(());
    }
    let options = if remote.vendor_id == own.vendor_id { remote.options } else { 0 };
    set(qp, own.vendor_id, options)
}

/// Records the options in force, after the QP's first change of state.
pub(crate) fn settle(id: &Id, qp: *mut ibv_qp) -> Outcome<()> {
    if id.state().remote_ece.vendor_id != 0 {
        let options = query(qp)?.options;
        id.state().local_ece.options = options;
    }
    Ok(())
}

/// The active side's QP gets the answer, and is brought to RTS.
pub(crate) fn answered(id: &Id, remote: Ece) -> Outcome<()> {
    let Some(qp) = qp_of(id) else { return Ok(()) };
    let local = id.state().local_ece;
    if remote.vendor_id != 0 && remote.vendor_id != local.vendor_id {
        fail(id)?;
        return Err(libc::EINVAL);
    }
    let options = if remote.vendor_id == 0 { 0 } else { remote.options };
    id.state().remote_ece.vendor_id = remote.vendor_id;
    let outcome =
        set(qp, local.vendor_id, options).and_then(|()| ready_to_receive(id)).and_then(|()| ready_to_send(id));
    if outcome.is_err() {
        let _ = fail(id);
    }
    outcome
}

/// `rdma_set_local_ece(3)`: only without a QP of the identifier's own.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let (id, ece) = unsafe { (Id::from_c(id)?, ece.as_ref().ok_or(libc::EINVAL)?) };
        if qp_of(id).is_some() || ece.vendor_id == 0 || ece.comp_mask != 0 {
            return Err(libc::EINVAL);
        }
        id.state().local_ece = Ece { vendor_id: ece.vendor_id, options: ece.options };
        Ok(())
    })
}

/// `rdma_get_remote_ece(3)`: only without a QP of the identifier's own.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let id = unsafe { Id::from_c(id)? };
        if qp_of(id).is_some() || ece.is_null() {
            return Err(libc::EINVAL);
        }
        let remote = id.state().remote_ece;
        // SAFETY: the C contract.
        unsafe { ece.write(ibv_ece { vendor_id: remote.vendor_id, options: remote.options, comp_mask: 0 }) };
        Ok(())
    })
}
