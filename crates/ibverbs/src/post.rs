//! `ibv_post_send`, `ibv_post_recv`, `ibv_post_srq_recv`.
//!
//! A list is posted up to its first bad request; `bad_wr` names that one, and what comes before it
//! stays posted.
use crate::boundary::{Outcome, guarded, set_errno};
use crate::qp::Qp;
use crate::srq::Srq;
use freeflow_abi::{
    IBV_SEND_INLINE, IBV_WR_DRIVER1, IBV_WR_TSO, errno_of, ibv_mw, ibv_mw_bind_info, ibv_qp, ibv_recv_wr, ibv_send_wr,
    ibv_sge, ibv_srq,
};
use freeflow_client::{SendBatch, SendDescriptor};
use freeflow_verbs::{Access, INLINE_BYTES_MAX, QpType, SGE_COUNT_MAX, SendFlags, SendOpcode, Sge, VerbsError};
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
        // SAFETY: this function's contract; the layouts are equal.
        Ok(count) if count <= SGE_COUNT_MAX => Ok(unsafe { slice::from_raw_parts(list.cast(), count) }),
        _ => Err(VerbsError::InvalidArgument),
    }
}

/// The opcode, or why not. A FLUSH has no fields in `ibv_send_wr`: only `ibv_wr_flush` can say what
/// it is about.
fn opcode_from_c(opcode: c_uint) -> Outcome<SendOpcode> {
    match u8::try_from(opcode).ok().and_then(SendOpcode::from_number) {
        Some(SendOpcode::Flush) | None => Err(wrong_opcode(opcode)),
        Some(opcode) => Ok(opcode),
    }
}

#[cold]
fn wrong_opcode(opcode: c_uint) -> VerbsError {
    if matches!(opcode, IBV_WR_TSO | IBV_WR_DRIVER1) { VerbsError::NotSupported } else { VerbsError::InvalidArgument }
}

/// Where a UD request goes, as the ring carries it.
pub(crate) fn datagram_address(ah: u32, remote_qpn: u32) -> u64 {
    u64::from(ah) | u64::from(remote_qpn) << 32
}

/// Rights that a memory window can give.
const WINDOW_RIGHTS: Access = Access::REMOTE_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::ZERO_BASED)
    .union(Access::FLUSH_GLOBAL);
/// The low bits of a key are the program's.
const KEY_BITS: u32 = 8;

/// Fields of a BIND_MW request besides its identity.
pub(crate) struct Binding {
    pub address: u64,
    pub length: u64,
    pub lkey: u32,
    pub rkey: u32,
    pub rights: u32,
}

impl Binding {
    /// # Errors
    /// InvalidArgument: no window, a key of another window, no region though there is a length, or
    /// rights that no window can give.
    ///
    /// # Safety
    /// The pointers are null or valid, also the region that `info` names.
    pub unsafe fn from_c(mw: *const ibv_mw, rkey: u32, info: &ibv_mw_bind_info) -> Outcome<Self> {
        // A window has remote rights only; programs ask for the local one that the region needs all
        // the same.
        let rights = Access(info.mw_access_flags).required().0 & !Access::LOCAL_WRITE.0;
        // SAFETY: this function's contract.
        let (mw, mr) = unsafe { (mw.as_ref().ok_or(VerbsError::InvalidArgument)?, info.mr.as_ref()) };
        if (mw.rkey ^ rkey) >> KEY_BITS != 0 || (mr.is_none() && info.length != 0) || rights & !WINDOW_RIGHTS.0 != 0 {
            return Err(VerbsError::InvalidArgument);
        }
        let lkey = mr.map_or(0, |mr| mr.lkey);
        Ok(Self { address: info.addr, length: info.length, lkey, rkey, rights })
    }

    pub fn fill(&self, request: &mut SendDescriptor<'_>) {
        request.opcode = SendOpcode::BindWindow;
        request.immediate = self.lkey;
        request.remote_address = self.address;
        request.rkey = self.rkey;
        request.compare_add = self.length;
        request.swap = u64::from(self.rights);
    }
}

/// A request with nothing but its identity.
pub(crate) fn blank(wr_id: u64, opcode: SendOpcode, flags: u8) -> SendDescriptor<'static> {
    SendDescriptor {
        wr_id,
        opcode,
        flags: SendFlags(flags),
        immediate: 0,
        remote_address: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        remote_srqn: 0,
        sges: &[],
        inline: None,
    }
}

/// Posts the BIND_MW of `ibv_bind_mw`.
///
/// # Errors
/// InvalidArgument: flags that there are not, or a QP whose state or type takes no such request.
/// NoMemory: the queue is full.
pub(crate) fn post_bind(qp: &Qp, wr_id: u64, send_flags: c_uint, binding: &Binding) -> Outcome<()> {
    if send_flags & !FLAGS != 0 {
        return Err(VerbsError::InvalidArgument);
    }
    let mut request = blank(wr_id, SendOpcode::BindWindow, send_flags as u8);
    binding.fill(&mut request);
    qp.client.post(&request)
}

/// Posts what a NIC does by itself: LOCAL_INV and BIND_MW. Out of the way of the others.
///
/// # Safety
/// As [`push_send`].
#[cold]
unsafe fn push_local(batch: &mut SendBatch<'_>, opcode: SendOpcode, wr: &ibv_send_wr) -> Outcome<()> {
    let mut request = blank(wr.wr_id, opcode, wr.send_flags as u8);
    request.immediate = wr.imm_data;
    if opcode == SendOpcode::BindWindow {
        if wr.num_sge != 0 {
            return Err(VerbsError::InvalidArgument);
        }
        // SAFETY: the opcode says which member of the union counts; the rest is this function's
        // contract.
        unsafe { Binding::from_c(wr.tail.bind_mw.mw, wr.tail.bind_mw.rkey, &wr.tail.bind_mw.bind_info) }?
            .fill(&mut request);
    }
    batch.push(&request)
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
        // SAFETY: this function's contract; it fits (checked).
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
    if opcode.is_local() {
        // SAFETY: this function's contract.
        return unsafe { push_local(batch, opcode, wr) };
    }
    // SAFETY: this function's contract.
    let sges = unsafe { sges(wr.sg_list, wr.num_sge) }?;
    let mut request = blank(wr.wr_id, opcode, wr.send_flags as u8);
    request.immediate = wr.imm_data;
    request.sges = sges;
    if qp_type == QpType::XrcSend {
        request.remote_srqn = wr.xrc_remote_srqn;
    }
    // SAFETY: the type of the QP and the opcode say which member of the union counts; the AH is
    // there by this function's contract.
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
    let mut payload = [const { MaybeUninit::uninit() }; INLINE_BYTES_MAX];
    if wr.send_flags & IBV_SEND_INLINE != 0 {
        // SAFETY: this function's contract.
        request.inline = Some(unsafe { gather(sges, &mut payload) }?);
        request.sges = &[];
    }
    batch.push_here(&request)
}

/// Posts a list; on refusal reports which request was bad.
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
            // SAFETY: this function's contract.
            at = next(unsafe { &*this });
            Some(this)
        };
        post(&mut step, &mut current)
    });
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            // SAFETY: this function's contract.
            unsafe { *bad = current };
            set_errno(errno_of(error));
            errno_of(error)
        }
    }
}

pub(crate) unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the C contract.
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
    // SAFETY: the C contract.
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
    // SAFETY: the C contract.
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
        assert_eq!(opcode_from_c(9), Ok(SendOpcode::SendWithInvalidate));
        assert_eq!(opcode_from_c(10), Err(VerbsError::NotSupported));
        assert_eq!(opcode_from_c(12), Err(VerbsError::InvalidArgument));
        assert_eq!(opcode_from_c(14), Err(VerbsError::InvalidArgument));
        assert_eq!(opcode_from_c(15), Ok(SendOpcode::AtomicWrite));
        assert_eq!(opcode_from_c(258), Err(VerbsError::InvalidArgument));
    }

    #[test]
    fn bindings_name_their_own_window() {
        let none = std::ptr::null_mut();
        let mw = ibv_mw { context: std::ptr::null_mut(), pd: std::ptr::null_mut(), rkey: 0x501, handle: 0, mw_type: 2 };
        let info = |length, rights| ibv_mw_bind_info { mr: none, addr: 4096, length, mw_access_flags: rights };
        // SAFETY: null or valid.
        unsafe {
            assert!(Binding::from_c(&raw const mw, 0x5fe, &info(0, 0x2e)).is_ok());
            assert!(Binding::from_c(&raw const mw, 0x601, &info(0, 0)).is_err());
            assert!(Binding::from_c(&raw const mw, 0x502, &info(8, 0)).is_err());
            assert_eq!(Binding::from_c(&raw const mw, 0x502, &info(0, 3)).map(|binding| binding.rights), Ok(2));
            assert!(Binding::from_c(&raw const mw, 0x502, &info(0, 0x10)).is_err());
            assert!(Binding::from_c(std::ptr::null(), 0x502, &info(0, 0)).is_err());
        }
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
