//! The extended CQ: creation, and the functions that `ibv_start_poll`, `ibv_wc_read_*` and the like
//! call.
use crate::boundary::{Outcome, code, pointer, set_errno};
use crate::clock::clock_ns;
use crate::cq::{Cq, CqParameters, create};
use crate::pd::{ParentUse, is_parent_domain};
use freeflow_abi::{
    IBV_CQ_INIT_ATTR_MASK_FLAGS, IBV_CQ_INIT_ATTR_MASK_PD, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN,
    IBV_CREATE_CQ_ATTR_SINGLE_THREADED, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP,
    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK, IBV_WC_EX_WITH_CVLAN, IBV_WC_EX_WITH_FLOW_TAG,
    IBV_WC_STANDARD_FLAGS, completion_to_c, ibv_context, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_poll_cq_attr, ibv_wc,
    ibv_wc_tm_info,
};
use freeflow_verbs::VerbsError;
use std::ffi::{c_int, c_uint};

/// Fields of a completion that a program may ask for. No message has a VLAN or a flow tag: these
/// two are always 0. Those of tag matching there are not.
const WC_FLAGS: u64 = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_CVLAN | IBV_WC_EX_WITH_FLOW_TAG | TIMESTAMPS;
const TIMESTAMPS: u64 = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    pointer(|| {
        // SAFETY: the C contract. Only what `comp_mask` names is read of the newer fields.
        let attr = unsafe { &*attr };
        let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { attr.flags } else { 0 };
        check(attr.wc_flags, attr.comp_mask, flags)?;
        let mut parent_use = ParentUse::none();
        if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
            let parent = attr.parent_domain;
            // SAFETY: null, or the C contract. A parent domain's thread domain changes nothing, see
            // `pd`.
            unsafe {
                if parent.is_null() || (*parent).context != context || !is_parent_domain(parent) {
                    return Err(VerbsError::InvalidArgument);
                }
                parent_use = ParentUse::of(parent);
            }
        }
        let wanted = CqParameters {
            cqe: attr.cqe,
            cq_context: attr.cq_context,
            channel: attr.channel,
            comp_vector: attr.comp_vector,
            single_threaded: flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0,
            timestamps: attr.wc_flags & TIMESTAMPS != 0,
            parent_use,
        };
        // SAFETY: the C contract.
        unsafe { create(context, wanted) }
    })
}

fn check(wc_flags: u64, comp_mask: u32, flags: u32) -> Outcome<()> {
    const MASKS: u32 = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    if comp_mask & !MASKS != 0 || flags & !FLAGS != 0 {
        return Err(VerbsError::InvalidArgument);
    }
    if wc_flags & !WC_FLAGS != 0 || flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0 {
        return Err(VerbsError::NotSupported);
    }
    Ok(())
}

/// Fills in the functions: all of them, because programs call them without a look whether they are
/// null.
pub(crate) fn fill(c: &mut ibv_cq_ex) {
    c.start_poll = Some(start_poll);
    c.next_poll = Some(next_poll);
    c.end_poll = Some(end_poll);
    c.read_opcode = Some(read_opcode);
    c.read_vendor_err = Some(read_vendor_err);
    c.read_byte_len = Some(read_byte_len);
    c.read_imm_data = Some(read_imm_data);
    c.read_qp_num = Some(read_qp_num);
    c.read_src_qp = Some(read_src_qp);
    c.read_wc_flags = Some(read_wc_flags);
    c.read_slid = Some(read_slid);
    c.read_sl = Some(read_sl);
    c.read_dlid_path_bits = Some(read_dlid_path_bits);
    c.read_completion_ts = Some(read_completion_ts);
    c.read_cvlan = Some(read_cvlan);
    c.read_flow_tag = Some(read_flow_tag);
    c.read_tm_info = Some(read_tm_info);
    c.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
}

/// Moves on to the next completion; ENOENT if there is none.
///
/// # Safety
/// The CQ exists, and the caller holds its poll lock.
unsafe fn advance(cq: *mut ibv_cq_ex) -> c_int {
    let mut empty = false;
    let outcome = code(|| {
        // SAFETY: this function's contract.
        let whole = unsafe { Cq::from_c(cq.cast()) };
        let count = whole.client.poll(1, |completion| {
            // SAFETY: this function's contract: the poll lock, which guards these fields, is held.
            unsafe {
                *whole.current.get() = *completion;
                (*cq).wr_id = completion.work_request_id;
                (*cq).status = completion.status as c_uint;
            }
        })?;
        empty = count == 0;
        Ok(())
    });
    if empty {
        set_errno(libc::ENOENT);
        return libc::ENOENT;
    }
    outcome
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: null, or the C contract.
    if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
        return libc::EINVAL;
    }
    // SAFETY: the C contract.
    let whole = unsafe { Cq::from_c(cq.cast()) };
    if !whole.single_threaded {
        whole.poll_lock.lock();
    }
    // SAFETY: the C contract; the lock is held.
    let outcome = unsafe { advance(cq) };
    if outcome != 0 && !whole.single_threaded {
        whole.poll_lock.unlock();
    }
    outcome
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the C contract; it is between `start_poll` and `end_poll`.
    unsafe { advance(cq) }
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: the C contract.
    let whole = unsafe { Cq::from_c(cq.cast()) };
    if !whole.single_threaded {
        whole.poll_lock.unlock();
    }
}

/// The current completion, as a work completion.
///
/// # Safety
/// The CQ exists, and the caller is between `start_poll` and `end_poll`.
unsafe fn current(cq: *mut ibv_cq_ex) -> ibv_wc {
    // SAFETY: this function's contract.
    completion_to_c(unsafe { &*Cq::from_c(cq.cast()).current.get() })
}

unsafe extern "C" fn read_opcode(cq: *mut ibv_cq_ex) -> c_uint {
    // SAFETY: the C contract.
    unsafe { current(cq) }.opcode
}

unsafe extern "C" fn read_vendor_err(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: the C contract.
    unsafe { current(cq) }.vendor_err
}

unsafe extern "C" fn read_byte_len(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: the C contract.
    unsafe { current(cq) }.byte_len
}

unsafe extern "C" fn read_imm_data(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: the C contract.
    unsafe { current(cq) }.imm_data
}

unsafe extern "C" fn read_qp_num(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: the C contract.
    unsafe { current(cq) }.qp_num
}

unsafe extern "C" fn read_src_qp(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: the C contract.
    unsafe { current(cq) }.src_qp
}

unsafe extern "C" fn read_wc_flags(cq: *mut ibv_cq_ex) -> c_uint {
    // SAFETY: the C contract.
    unsafe { current(cq) }.wc_flags
}

unsafe extern "C" fn read_slid(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: the C contract.
    u32::from(unsafe { current(cq) }.slid)
}

unsafe extern "C" fn read_sl(cq: *mut ibv_cq_ex) -> u8 {
    // SAFETY: the C contract.
    unsafe { current(cq) }.sl
}

unsafe extern "C" fn read_dlid_path_bits(cq: *mut ibv_cq_ex) -> u8 {
    // SAFETY: the C contract.
    unsafe { current(cq) }.dlid_path_bits
}

/// Nanoseconds of CLOCK_MONOTONIC.
unsafe extern "C" fn read_completion_ts(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: the C contract.
    unsafe { (*Cq::from_c(cq.cast()).current.get()).timestamp_ns }
}

/// Nanoseconds of CLOCK_REALTIME: the monotonic time of the completion, shifted by what the clocks
/// differ now.
unsafe extern "C" fn read_completion_wallclock_ns(cq: *mut ibv_cq_ex) -> u64 {
    let shift = clock_ns(libc::CLOCK_REALTIME).wrapping_sub(clock_ns(libc::CLOCK_MONOTONIC));
    // SAFETY: the C contract.
    unsafe { read_completion_ts(cq) }.wrapping_add(shift)
}

unsafe extern "C" fn read_cvlan(_cq: *mut ibv_cq_ex) -> u16 {
    0
}

unsafe extern "C" fn read_flow_tag(_cq: *mut ibv_cq_ex) -> u32 {
    0
}

unsafe extern "C" fn read_tm_info(_cq: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) {
    // SAFETY: the C contract.
    unsafe { *info = ibv_wc_tm_info::default() };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_and_meaningless_attributes() {
        assert_eq!(check(IBV_WC_STANDARD_FLAGS, 0, 0), Ok(()));
        assert_eq!(check(0, 1, IBV_CREATE_CQ_ATTR_SINGLE_THREADED), Ok(()));
        assert_eq!(check(0, 1, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN), Err(VerbsError::NotSupported));
        assert_eq!(check(IBV_WC_EX_WITH_CVLAN | IBV_WC_EX_WITH_FLOW_TAG, 0, 0), Ok(()));
        assert_eq!(check(freeflow_abi::IBV_WC_EX_WITH_TM_INFO, 0, 0), Err(VerbsError::NotSupported));
        assert_eq!(check(0, 2, 0), Ok(()));
        assert_eq!(check(0, 4, 0), Err(VerbsError::InvalidArgument));
        assert_eq!(check(0, 1, 4), Err(VerbsError::InvalidArgument));
    }
}
