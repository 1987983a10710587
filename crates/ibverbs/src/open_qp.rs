//! Target queue pairs (XRC) that processes of one vNIC share.
use crate::boundary::{Outcome, pointer};
use crate::context::Context;
use crate::qp::hand_out_opened;
use crate::xrc::Xrcd;
use freeflow_abi::{
    IBV_QP_OPEN_ATTR_CONTEXT, IBV_QP_OPEN_ATTR_NUM, IBV_QP_OPEN_ATTR_RESERVED, IBV_QP_OPEN_ATTR_TYPE,
    IBV_QP_OPEN_ATTR_XRCD, IBV_QPT_XRC_RECV, ibv_context, ibv_qp, ibv_qp_open_attr,
};
use freeflow_client::QueuePair;
use freeflow_verbs::VerbsError;
use std::ptr;

/// `ibv_open_qp(3)`: a target QP that another process of the vNIC made.
pub(crate) unsafe extern "C" fn open_qp(context: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> *mut ibv_qp {
    pointer(|| {
        // SAFETY: the C contract.
        unsafe {
            let attr = &*attr;
            let client = open(context, attr)?;
            let named = attr.comp_mask & IBV_QP_OPEN_ATTR_CONTEXT != 0;
            Ok(hand_out_opened(context, client, if named { attr.qp_context } else { ptr::null_mut() }))
        }
    })
}

/// # Safety
/// `context` is open; what `attr` names exists.
unsafe fn open(context: *mut ibv_context, attr: &ibv_qp_open_attr) -> Outcome<QueuePair> {
    const NEEDED: u32 = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
    if attr.comp_mask >= IBV_QP_OPEN_ATTR_RESERVED {
        return Err(VerbsError::NotSupported);
    }
    if attr.comp_mask & NEEDED != NEEDED || attr.xrcd.is_null() || attr.qp_type != IBV_QPT_XRC_RECV {
        return Err(VerbsError::InvalidArgument);
    }
    // SAFETY: this function's contract.
    let (session, xrcd) = unsafe { (Context::from_c(context).client().session(), Xrcd::from_c(attr.xrcd).handle) };
    QueuePair::open(session, xrcd, attr.qp_num)
}
