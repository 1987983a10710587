//! Multicast: memberships of identifiers, which attach the identifier's QP.
use crate::address::{copied, from_c, length_of_family};
use crate::boundary::{Outcome, status};
use crate::call::command;
use crate::endpoint::complete;
use crate::id::{Id, shared};
use crate::membership::{Membership, Opaque};
use crate::process::Process;
use crate::qp_states::qp_of;
use freeflow_abi::{
    RDMA_CM_JOIN_MC_ATTR_ADDRESS, RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS, RDMA_CM_JOIN_MC_ATTR_RESERVED,
    RDMA_MC_JOIN_FLAG_FULLMEMBER, RDMA_MC_JOIN_FLAG_RESERVED, RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER, rdma_cm_id,
    rdma_cm_join_mc_attr_ex,
};
use freeflow_protocol::cm::CmRequest;
use libc::sockaddr;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// The bytes of an address by which a membership is found again.
///
/// # Safety
/// `address` is null or as long as its family says.
unsafe fn shown(address: *const sockaddr) -> Outcome<Vec<u8>> {
    // SAFETY: this function's contract; the copy is a whole union.
    unsafe {
        let copy = copied(address)?;
        let bytes = length_of_family(c_int::from(copy.addr.sa_family));
        Ok(std::slice::from_raw_parts((&raw const copy).cast::<u8>(), bytes).to_vec())
    }
}

/// # Safety
/// The pointers are valid.
unsafe fn join(id: *mut rdma_cm_id, address: *const sockaddr, flags: u32, context: *mut c_void) -> Outcome<()> {
    // SAFETY: this function's contract.
    let (id, group, shown) = unsafe { (Id::from_c(id)?, from_c(address)?.gid, shown(address)?) };
    let send_only = flags == RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER;
    let membership = Arc::new(Membership {
        key: Process::current().new_key(),
        id_key: id.key,
        shown,
        address: group,
        context: Opaque(context),
        send_only,
        attached: Mutex::new(None),
        delivered: AtomicU32::new(0),
        completed: AtomicU32::new(0),
    });
    // Before the router is asked: its event may be there before its answer is.
    Process::current().table().memberships.insert(membership.key, membership.clone());
    id.state().memberships.insert(0, membership.clone());
    let request = CmRequest::JoinMulticast { id: id.handle(), address: group, send_only, cookie: membership.key };
    // SAFETY: the identifier's device is there.
    if let Err(error) = id.context().and_then(|context| unsafe { command(context, request) }) {
        forget(id, &membership);
        return Err(error);
    }
    complete(id)
}

fn forget(id: &Id, membership: &Membership) {
    let mut table = Process::current().table();
    table.memberships.remove(&membership.key);
    id.state().memberships.retain(|known| known.key != membership.key);
}

/// `rdma_join_multicast(3)`. The event is MULTICAST_JOIN or MULTICAST_ERROR.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_join_multicast(
    id: *mut rdma_cm_id,
    address: *mut sockaddr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the C contract.
    status(|| unsafe { join(id, address, RDMA_MC_JOIN_FLAG_FULLMEMBER, context) })
}

/// `rdma_join_multicast_ex(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_join_multicast_ex(
    id: *mut rdma_cm_id,
    wanted: *mut rdma_cm_join_mc_attr_ex,
    context: *mut c_void,
) -> c_int {
    const NEEDED: u32 = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
    status(|| {
        // SAFETY: the C contract.
        let wanted = unsafe { wanted.as_ref() }.ok_or(libc::EINVAL)?;
        if wanted.comp_mask >= RDMA_CM_JOIN_MC_ATTR_RESERVED {
            return Err(libc::ENOTSUP);
        }
        if wanted.comp_mask & NEEDED != NEEDED || wanted.join_flags >= RDMA_MC_JOIN_FLAG_RESERVED {
            return Err(libc::EINVAL);
        }
        // SAFETY: the C contract.
        unsafe { join(id, wanted.addr, wanted.join_flags, context) }
    })
}

/// `rdma_leave_multicast(3)`: EADDRNOTAVAIL if it is no member. Waits until the membership's events
/// are acknowledged.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_leave_multicast(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let (id, named) = unsafe { (shared(id)?, shown(address)?) };
        let membership = id.state().memberships.iter().find(|known| known.shown == named).cloned();
        let membership = membership.ok_or(libc::EADDRNOTAVAIL)?;
        membership.detach(qp_of(&id));
        forget(&id, &membership);
        let request = CmRequest::LeaveMulticast { id: id.handle(), address: membership.address };
        // SAFETY: the identifier's device is there.
        let outcome = id.context().and_then(|context| unsafe { command(context, request) });
        if membership.delivered.load(Ordering::SeqCst) == 0 {
            let channel = id.state().channel.clone();
            channel.extract(|key| key == membership.key).into_iter().for_each(|event| channel.dismiss(event));
        }
        // A synchronous join's event stands at the identifier.
        if id.state().is_synchronous {
            id.acknowledge_kept_event();
        }
        id.wait_for(|| membership.is_acknowledged());
        outcome
    })
}
