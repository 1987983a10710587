//! `ibv_post_send`, `ibv_post_recv`, `ibv_post_srq_recv`.
//!
//! A list is posted up to its first bad request; `bad_wr` names that one, and what comes before it stays posted.
use crate::boundary::{Outcome, guarded, set_errno};
use crate::qp::Qp;
use crate::srq::Srq;
use freeflow_abi::{
    IBV_SEND_INLINE, IBV_WR_ATOMIC_WRITE, IBV_WR_BIND_MW, IBV_WR_DRIVER1, IBV_WR_FLUSH, IBV_WR_LOCAL_INV,
    IBV_WR_SEND_WITH_INV, IBV_WR_TSO, errno_of, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_srq,
};
use freeflow_client::{SendBatch, SendDescriptor};
use freeflow_verbs::{INLINE_BYTES_MAX, QpType, SGE_COUNT_MAX, SendFlags, SendOpcode, Sge, VerbsError};
use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;
use std::slice;

/// Flags that a send request may carry: FENCE, SIGNALED, SOLICITED, INLINE.
const FLAGS: c_uint = (IBV_SEND_INLINE << 1) - 1;

// A list of `ibv_sge` is read as a list of `Sge`.
const _: () = assert!(size_of::<Sge>() == size_of::<ibv_sge>() && align_of::<Sge>() == align_of::<ibv_sge>());

/// The scatter/gather list of a request.
///
/// # Safety
/// `list` is valid for `count` entries, which nobody changes meanwhile.
unsafe fn sges<'a>(list: *const ibv_sge, count: c_int) -> Outcome<&'a [Sge]> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: the caller's; the layouts are equal.
        Ok(count) if count <= SGE_COUNT_MAX => Ok(unsafe { slice::from_raw_parts(list.cast(), count) }),
        _ => Err(VerbsError::InvalidArgument),
    }
}

/// The opcode, or why not.
pub(crate) fn opcode_from_c(opcode: c_uint) -> Outcome<SendOpcode> {
    match opcode {
        IBV_WR_LOCAL_INV | IBV_WR_BIND_MW | IBV_WR_SEND_WITH_INV | IBV_WR_TSO | IBV_WR_DRIVER1 | IBV_WR_FLUSH
        | IBV_WR_ATOMIC_WRITE => Err(VerbsError::NotSupported),
        _ => u8::try_from(opcode).ok().and_then(SendOpcode::from_number).ok_or(VerbsError::InvalidArgument),
    }
}

/// Where a UD request goes, as the ring carries it.
pub(crate) fn datagram_address(ah: u32, remote_qpn: u32) -> u64 {
    u64::from(ah) | u64::from(remote_qpn) << 32
}

/// Copies the payload of an inline request.
///
/// # Safety
/// The entries name readable memory.
unsafe fn gather<'a>(sges: &[Sge], into: &'a mut [MaybeUninit<u8>; INLINE_BYTES_MAX]) -> Outcome<&'a [u8]> {
    let mut length = 0;
    for sge in sges {
        let bytes = sge.length as usize;
        if bytes > INLINE_BYTES_MAX - length {
            return Err(VerbsError::InvalidArgument);
        }
        let from: *const u8 = std::ptr::with_exposed_provenance(sge.address as usize);
        // SAFETY: the caller's; it fits (checked).
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr().add(length).cast(), bytes) };
        length += bytes;
    }
    // SAFETY: these bytes were just written.
    Ok(unsafe { slice::from_raw_parts(into.as_ptr().cast(), length) })
}

/// # Safety
/// The request and what it names are valid.
unsafe fn push_send(batch: &mut SendBatch<'_>, qp_type: QpType, wr: &ibv_send_wr) -> Outcome<()> {
    let opcode = opcode_from_c(wr.opcode)?;
    if wr.send_flags & !FLAGS != 0 {
        return Err(VerbsError::InvalidArgument);
    }
    // SAFETY: the caller's.
    let sges = unsafe { sges(wr.sg_list, wr.num_sge) }?;
    let mut request = SendDescriptor {
        wr_id: wr.wr_id,
        opcode,
        flags: SendFlags(wr.send_flags as u8),
        immediate: wr.imm_data,
        remote_address: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        sges,
        inline: None,
    };
    // SAFETY: the type of the QP and the opcode say which member of the union counts; the AH is the caller's.
    unsafe {
        if qp_type == QpType::Ud {
            let ah = wr.wr.ud.ah.as_ref().ok_or(VerbsError::InvalidArgument)?;
            request.remote_address = datagram_address(ah.handle, wr.wr.ud.remote_qpn);
            request.rkey = wr.wr.ud.remote_qkey;
        } else if opcode.is_atomic() {
            request.remote_address = wr.wr.atomic.remote_addr;
            request.rkey = wr.wr.atomic.rkey;
            request.compare_add = wr.wr.atomic.compare_add;
            request.swap = wr.wr.atomic.swap;
        } else if !opcode.is_send() {
            request.remote_address = wr.wr.rdma.remote_addr;
            request.rkey = wr.wr.rdma.rkey;
        }
    }
    if wr.send_flags & IBV_SEND_INLINE == 0 {
        return batch.push(&request);
    }
    let mut payload = [const { MaybeUninit::uninit() }; INLINE_BYTES_MAX];
    // SAFETY: the caller's.
    request.inline = Some(unsafe { gather(sges, &mut payload) }?);
    request.sges = &[];
    batch.push(&request)
}

/// Posts a list; on refusal tells which request was bad.
///
/// # Safety
/// The list and `bad` are valid.
#[inline]
unsafe fn post_list<W>(
    first: *mut W,
    bad: *mut *mut W,
    next: impl Fn(&W) -> *mut W,
    post: impl FnOnce(&mut dyn FnMut() -> Option<*mut W>, &mut *mut W) -> Outcome<()>,
) -> c_int {
    let mut at = first;
    let mut current = first;
    let outcome = guarded(|| {
        let mut step = || {
            if at.is_null() {
                return None;
            }
            let this = at;
            // SAFETY: the caller's.
            at = next(unsafe { &*this });
            Some(this)
        };
        post(&mut step, &mut current)
    });
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            // SAFETY: the caller's.
            unsafe { *bad = current };
            set_errno(errno_of(error));
            errno_of(error)
        }
    }
}

pub(crate) unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        post_list(
            wr,
            bad,
            |wr| wr.next,
            |step, current| {
                let client = &Qp::from_c(qp).client;
                let mut batch = client.begin_send()?;
                while let Some(wr) = step() {
                    *current = wr;
                    push_send(&mut batch, client.qp_type(), &*wr)?;
                }
                Ok(())
            },
        )
    }
}

pub(crate) unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        post_list(
            wr,
            bad,
            |wr| wr.next,
            |step, current| {
                let mut batch = Qp::from_c(qp).client.begin_receive()?;
                while let Some(wr) = step() {
                    *current = wr;
                    batch.push((*wr).wr_id, sges((*wr).sg_list, (*wr).num_sge)?)?;
                }
                Ok(())
            },
        )
    }
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        post_list(
            wr,
            bad,
            |wr| wr.next,
            |step, current| {
                let mut batch = Srq::from_c(srq).client.begin()?;
                while let Some(wr) = step() {
                    *current = wr;
                    batch.push((*wr).wr_id, sges((*wr).sg_list, (*wr).num_sge)?)?;
                }
                Ok(())
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_known_refused_or_wrong() {
        assert_eq!(opcode_from_c(2), Ok(SendOpcode::Send));
        assert_eq!(opcode_from_c(9), Err(VerbsError::NotSupported));
        assert_eq!(opcode_from_c(12), Err(VerbsError::InvalidArgument));
        assert_eq!(opcode_from_c(258), Err(VerbsError::InvalidArgument));
    }

    #[test]
    fn inline_payload_is_gathered_up_to_its_limit() {
        let bytes = [7_u8; 1000];
        let sge = |length| Sge { address: bytes.as_ptr().expose_provenance() as u64, length, lkey: 0 };
        let mut room = [const { MaybeUninit::uninit() }; INLINE_BYTES_MAX];
        // SAFETY: the entries name the array above.
        unsafe {
            assert_eq!(gather(&[sge(1000), sge(24)], &mut room).unwrap(), [7; 1024]);
            assert_eq!(gather(&[sge(1000), sge(25)], &mut room), Err(VerbsError::InvalidArgument));
            assert_eq!(gather(&[], &mut room), Ok(&[][..]));
        }
    }
}
