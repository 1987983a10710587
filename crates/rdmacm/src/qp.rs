//! Queue pairs of identifiers, and the completion queues that come with them.
use crate::boundary::{Outcome, quiet, status};
use crate::id::Id;
use crate::{ece, qp_states, verbs};
use freeflow_abi::{
    IBV_QP_INIT_ATTR_PD, IBV_QP_INIT_ATTR_XRCD, IBV_QPT_XRC_RECV, ibv_comp_channel, ibv_cq, ibv_pd, ibv_qp, ibv_qp_cap,
    ibv_qp_init_attr, ibv_qp_init_attr_ex, rdma_cm_id,
};
use std::ffi::c_int;
use std::mem;
use std::ptr;

/// Destroys the completion queues that this library made, and their channels. The one of an XRC SRQ
/// stays as long as that.
pub(crate) fn destroy_cqs(id: &Id) {
    let c = id.as_c();
    // SAFETY: the pointers are the identifier's own; what stands there exists.
    unsafe {
        if (*c).qp_type == IBV_QPT_XRC_RECV && !(*c).srq.is_null() {
            return;
        }
        let (receive, send) =
            (mem::replace(&mut (*c).recv_cq, ptr::null_mut()), mem::replace(&mut (*c).send_cq, ptr::null_mut()));
        destroy_both(receive, send, |cq| {
            verbs::ibv_destroy_cq(cq);
        });
        let receive = mem::replace(&mut (*c).recv_cq_channel, ptr::null_mut());
        let send = mem::replace(&mut (*c).send_cq_channel, ptr::null_mut());
        destroy_both(receive, send, |channel| {
            verbs::ibv_destroy_comp_channel(channel);
        });
    }
}

fn destroy_both<T>(one: *mut T, other: *mut T, destroy: impl Fn(*mut T)) {
    if !one.is_null() {
        destroy(one);
    }
    if !other.is_null() && other != one {
        destroy(other);
    }
}

fn create_cq(id: &Id, size: u32) -> Outcome<(*mut ibv_comp_channel, *mut ibv_cq)> {
    let c = id.as_c();
    let size = c_int::try_from(size).map_err(|_| libc::EINVAL)?;
    // SAFETY: the identifier has a device.
    unsafe {
        let channel = verbs::given(verbs::ibv_create_comp_channel((*c).verbs))?.as_ptr();
        match verbs::given(verbs::ibv_create_cq((*c).verbs, size, c.cast(), channel, 0)) {
            Ok(cq) => Ok((channel, cq.as_ptr())),
            Err(error) => {
                verbs::ibv_destroy_comp_channel(channel);
                Err(error)
            }
        }
    }
}

/// Makes completion queues of these sizes, each with a channel; none for 0.
pub(crate) fn create_cqs(id: &Id, send_size: u32, receive_size: u32) -> Outcome<()> {
    let c = id.as_c();
    // SAFETY: the pointers are the identifier's own.
    let outcome = unsafe {
        let receive = if receive_size > 0 { create_cq(id, receive_size).map(Some) } else { Ok(None) };
        receive.and_then(|receive| {
            if let Some((channel, cq)) = receive {
                ((*c).recv_cq_channel, (*c).recv_cq) = (channel, cq);
            }
            if send_size > 0 {
                ((*c).send_cq_channel, (*c).send_cq) = create_cq(id, send_size)?;
            }
            Ok(())
        })
    };
    if outcome.is_err() {
        destroy_cqs(id);
    }
    outcome
}

/// Fills in what the caller left to the identifier: PD, XRC domain.
///
/// # Safety
/// The pointers of `attr` are valid.
unsafe fn complete_attributes(id: &Id, attr: *mut ibv_qp_init_attr_ex) -> Outcome<()> {
    let c = id.as_c();
    let device = id.device()?;
    // SAFETY: this function's contract; the identifier's own.
    unsafe {
        if (*attr).comp_mask & IBV_QP_INIT_ATTR_PD == 0 || (*attr).pd.is_null() {
            (*attr).comp_mask |= IBV_QP_INIT_ATTR_PD;
            (*attr).pd = (*c).pd;
        } else if (*(*attr).pd).context != (*c).verbs {
            return Err(libc::EINVAL);
        }
        let differs = |mine: *mut ibv_cq, theirs: *mut ibv_cq| !mine.is_null() && !theirs.is_null() && mine != theirs;
        if differs((*c).recv_cq, (*attr).recv_cq) || differs((*c).send_cq, (*attr).send_cq) {
            return Err(libc::EINVAL);
        }
        if (*c).qp_type == IBV_QPT_XRC_RECV
            && ((*attr).comp_mask & IBV_QP_INIT_ATTR_XRCD == 0 || (*attr).xrcd.is_null())
        {
            (*attr).xrcd = device.xrcd()?;
            (*attr).comp_mask |= IBV_QP_INIT_ATTR_XRCD;
        }
    }
    Ok(())
}

/// Bytes of an entry of a scatter/gather list in a NIC's queue.
const SGE_BYTES: u32 = 16;
/// Room for inline data that is given unasked at most, bytes.
const INLINE_BYTES_UNASKED_MAX: u32 = 64;

/// Inline data goes where the list would stand: drivers give that much room to who asks for none
/// (rxe), and examples of rdma-core (`rdma_xclient`) rely on it.
fn add_inline_room(cap: &mut ibv_qp_cap) {
    let room = cap.max_send_sge.saturating_mul(SGE_BYTES).min(INLINE_BYTES_UNASKED_MAX);
    cap.max_inline_data = cap.max_inline_data.max(room);
}

/// # Safety
/// `attr` is valid for what its `comp_mask` names.
unsafe fn create_extended(id: &Id, attr: *mut ibv_qp_init_attr_ex) -> Outcome<()> {
    let c = id.as_c();
    if qp_states::qp_of(id).is_some() {
        return Err(libc::EINVAL);
    }
    // SAFETY: this function's contract; the struct of a program built with old headers ends before
    // `send_ops_flags`, which is not touched here.
    unsafe {
        complete_attributes(id, attr)?;
        let size = |theirs: *mut ibv_cq, mine: *mut ibv_cq, wanted| {
            if theirs.is_null() && mine.is_null() { wanted } else { 0 }
        };
        let send_size = size((*attr).send_cq, (*c).send_cq, (*attr).cap.max_send_wr);
        let receive_size = size((*attr).recv_cq, (*c).recv_cq, (*attr).cap.max_recv_wr);
        create_cqs(id, send_size, receive_size)?;
        if (*attr).send_cq.is_null() {
            (*attr).send_cq = (*c).send_cq;
        }
        if (*attr).recv_cq.is_null() {
            (*attr).recv_cq = (*c).recv_cq;
        }
        if (*attr).srq.is_null() {
            (*attr).srq = (*c).srq;
        }
        add_inline_room(&mut (*attr).cap);
        // It is in INIT then, or ready if it is for datagrams.
        let made = id.context().and_then(|_| verbs::given(verbs::freeflow_create_qp((*c).verbs, attr, id.handle())));
        let qp = made.inspect_err(|_| destroy_cqs(id))?.as_ptr();
        let begun = ece::begin(id, qp).and_then(|()| ece::settle(id, qp));
        if let Err(error) = begun {
            verbs::ibv_destroy_qp(qp);
            destroy_cqs(id);
            return Err(error);
        }
        hold(id, qp);
    }
    Ok(())
}

/// # Safety
/// `qp` exists.
unsafe fn hold(id: &Id, qp: *mut ibv_qp) {
    let c = id.as_c();
    // SAFETY: this function's contract.
    unsafe {
        // An XRC target has none; its identifier keeps the one it has for the SRQ.
        if !(*qp).pd.is_null() {
            (*c).pd = (*qp).pd;
        }
        (*c).qp = qp;
    }
}

/// # Safety
/// `pd` is null or exists; `init` is valid.
pub(crate) unsafe fn create(id: &Id, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> Outcome<()> {
    // SAFETY: this function's contract; the extended struct begins as the simple one does, and
    // zeroes are valid for the rest.
    unsafe {
        let mut extended: ibv_qp_init_attr_ex = mem::zeroed();
        ptr::copy_nonoverlapping(init, (&raw mut extended).cast(), 1);
        extended.comp_mask = IBV_QP_INIT_ATTR_PD;
        extended.pd = if pd.is_null() { (*id.as_c()).pd } else { pd };
        let outcome = create_extended(id, &raw mut extended);
        ptr::copy_nonoverlapping((&raw const extended).cast(), init, 1);
        outcome
    }
}

/// `rdma_create_qp_ex(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_qp_ex(id: *mut rdma_cm_id, attr: *mut ibv_qp_init_attr_ex) -> c_int {
    status(|| {
        if attr.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the C contract.
        unsafe { create_extended(Id::from_c(id)?, attr) }
    })
}

/// `rdma_create_qp(3)`: EINVAL before the identifier has a device, and for a PD of another context.
///
/// # Safety
/// The pointers are valid; `pd` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> c_int {
    status(|| {
        if init.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the C contract.
        unsafe { create(Id::from_c(id)?, pd, init) }
    })
}

/// Destroys the QP of an identifier, with the completion queues that came with it.
pub(crate) fn destroy(id: &Id) {
    // SAFETY: the pointer is the identifier's own; what stands there exists.
    unsafe {
        let qp = mem::replace(&mut (*id.as_c()).qp, ptr::null_mut());
        if !qp.is_null() {
            verbs::ibv_destroy_qp(qp);
        }
    }
    destroy_cqs(id);
}

/// `rdma_destroy_qp(3)`.
///
/// # Safety
/// `id` is an identifier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    quiet(|| {
        // SAFETY: the C contract.
        if let Ok(id) = unsafe { Id::from_c(id) } {
            destroy(id);
        }
    });
}

/// Whether a QP takes its RECVs from a shared queue.
///
/// # Safety
/// `qp` exists.
pub(crate) unsafe fn has_srq(qp: *mut ibv_qp) -> bool {
    // SAFETY: this function's contract.
    unsafe { !(*qp).srq.is_null() }
}
