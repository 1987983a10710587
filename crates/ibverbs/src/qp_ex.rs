//! The builder interface of a QP (`ibv_wr_start` … `ibv_wr_complete`).
//!
//! Requests are staged, and posted by `ibv_wr_complete` all together or, after any mistake, not at
//! all. The builder's lock is held from start to complete or abort; the send queue's own only while
//! the requests are posted, so other threads may use `ibv_post_send` meanwhile.
use crate::boundary::{Outcome, code, guarded};
use crate::post::{Binding, blank, datagram_address};
use crate::qp::Qp;
use freeflow_abi::{ibv_ah, ibv_data_buf, ibv_mw, ibv_mw_bind_info, ibv_qp_ex, ibv_sge, sge_from_c};
use freeflow_client::{CallLock, SendDescriptor};
use freeflow_verbs::{INLINE_BYTES_MAX, QpCapabilities, QpType, SGE_COUNT_MAX, SendFlags, SendOpcode, Sge, VerbsError};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::slice;

/// Staged requests for which room is made beforehand; more make room once.
const STAGED_AT_FIRST: usize = 128;

/// Bytes that an ATOMIC_WRITE writes.
const ATOMIC_WRITE_BYTES: usize = 8;

/// Valid bits of `wr_flags`: FENCE, SIGNALED, SOLICITED. INLINE follows from the call that sets the
/// data.
const FLAGS: u8 = SendFlags::FENCE | SendFlags::SIGNALED | SendFlags::SOLICITED;

pub(crate) struct Builder {
    lock: CallLock,
    /// Guarded by `lock`.
    staged: UnsafeCell<Staged>,
}

// SAFETY: `staged` is only touched under `lock`.
unsafe impl Sync for Builder {}

#[derive(Default)]
struct Staged {
    requests: Vec<Request>,
    sges: Vec<Sge>,
    payload: Vec<u8>,
    /// The first mistake since `wr_start`.
    error: Option<VerbsError>,
}

#[derive(Default)]
struct Request {
    wr_id: u64,
    opcode: SendOpcode,
    flags: u8,
    immediate: u32,
    remote_address: u64,
    rkey: u32,
    compare_add: u64,
    swap: u64,
    sges: Range<usize>,
    inline: Option<Range<usize>>,
    /// UD: the address was set.
    addressed: bool,
    /// XRC: once it was set.
    remote_srqn: Option<u32>,
}

impl Builder {
    pub fn new(capabilities: QpCapabilities) -> Self {
        let requests = STAGED_AT_FIRST.min(capabilities.max_send_wr as usize);
        let staged = Staged {
            requests: Vec::with_capacity(requests),
            sges: Vec::with_capacity(requests * capabilities.max_send_sge as usize),
            payload: Vec::with_capacity(requests * capabilities.max_inline_data as usize),
            error: None,
        };
        Self { lock: CallLock::new(), staged: UnsafeCell::new(staged) }
    }
}

impl Staged {
    fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.payload.clear();
        self.error = None;
    }

    fn fail(&mut self, error: VerbsError) {
        self.error.get_or_insert(error);
    }

    /// The request that setters act on; a setter with none before it is a mistake.
    fn last(&mut self) -> Outcome<&mut Request> {
        self.requests.last_mut().ok_or(VerbsError::InvalidArgument)
    }

    fn set_sges(&mut self, sges: impl ExactSizeIterator<Item = Sge>) -> Outcome<()> {
        if sges.len() > SGE_COUNT_MAX {
            return Err(VerbsError::InvalidArgument);
        }
        let start = self.sges.len();
        self.sges.extend(sges);
        let end = self.sges.len();
        self.last()?.sges = start..end;
        Ok(())
    }

    fn set_inline<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) -> Outcome<()> {
        let start = self.payload.len();
        for part in parts {
            if part.len() > INLINE_BYTES_MAX - (self.payload.len() - start) {
                return Err(VerbsError::InvalidArgument);
            }
            self.payload.extend_from_slice(part);
        }
        let end = self.payload.len();
        self.last()?.inline = Some(start..end);
        Ok(())
    }

    fn descriptor(&self, request: &Request) -> SendDescriptor<'_> {
        let inline = request.inline.clone().map(|range| &self.payload[range]);
        let sges = if inline.is_some() { &[] } else { &self.sges[request.sges.clone()] };
        let flag = if inline.is_some() { SendFlags::INLINE } else { 0 };
        SendDescriptor {
            immediate: request.immediate,
            remote_address: request.remote_address,
            rkey: request.rkey,
            compare_add: request.compare_add,
            swap: request.swap,
            remote_srqn: request.remote_srqn.unwrap_or(0),
            sges,
            inline,
            ..blank(request.wr_id, request.opcode, request.flags | flag)
        }
    }

    fn post(&self, qp: &Qp) -> Outcome<()> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let client = &qp.client;
        let qp_type = client.qp_type();
        for request in &self.requests {
            let is_addressed = match qp_type {
                QpType::Ud => request.addressed,
                QpType::XrcSend => request.remote_srqn.is_some() || request.opcode.is_local(),
                _ => request.remote_srqn.is_none(),
            };
            if !is_addressed {
                return Err(VerbsError::InvalidArgument);
            }
            // One alone is checked when it is posted.
            if self.requests.len() > 1 {
                freeflow_client::check_send(qp_type, &client.capabilities(), &self.descriptor(request))?;
            }
        }
        let mut batch = client.begin_send()?;
        if self.requests.len() > batch.room() as usize {
            return Err(VerbsError::NoMemory);
        }
        self.requests.iter().try_for_each(|request| batch.push(&self.descriptor(request)))
    }
}

/// Stages something; a mistake is kept for `wr_complete`.
///
/// # Safety
/// The QP exists, and the caller is between `wr_start` and `wr_complete` or `wr_abort`.
#[inline]
unsafe fn stage(qp: *mut ibv_qp_ex, act: impl FnOnce(&mut Staged) -> Outcome<()>) {
    // SAFETY: this function's contract; it holds the builder's lock.
    let staged = unsafe { &mut *Qp::from_c(qp.cast()).builder.staged.get() };
    if let Err(error) = guarded(|| act(staged)) {
        staged.fail(error);
    }
}

/// Stages a request of the identity and flags that the program has put into the struct.
///
/// # Safety
/// As [`stage`].
#[inline]
unsafe fn request(qp: *mut ibv_qp_ex, opcode: SendOpcode, fill: impl FnOnce(&mut Request)) {
    // SAFETY: this function's contract.
    unsafe {
        let (wr_id, flags) = ((*qp).wr_id, (*qp).wr_flags);
        stage(qp, |staged| {
            if flags & !c_uint::from(FLAGS | SendFlags::INLINE) != 0 {
                return Err(VerbsError::InvalidArgument);
            }
            let mut request = Request { wr_id, opcode, flags: flags as u8 & FLAGS, ..Request::default() };
            fill(&mut request);
            staged.requests.push(request);
            Ok(())
        });
    }
}

/// Fills in the functions: all of them, because programs call them without a look whether they are
/// null.
pub(crate) fn fill(c: &mut ibv_qp_ex) {
    c.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    c.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    c.wr_bind_mw = Some(wr_bind_mw);
    c.wr_local_inv = Some(wr_local_inv);
    c.wr_rdma_read = Some(wr_rdma_read);
    c.wr_rdma_write = Some(wr_rdma_write);
    c.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    c.wr_send = Some(wr_send);
    c.wr_send_imm = Some(wr_send_imm);
    c.wr_send_inv = Some(wr_send_inv);
    c.wr_send_tso = Some(wr_send_tso);
    c.wr_set_ud_addr = Some(wr_set_ud_addr);
    c.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    c.wr_set_inline_data = Some(wr_set_inline_data);
    c.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    c.wr_set_sge = Some(wr_set_sge);
    c.wr_set_sge_list = Some(wr_set_sge_list);
    c.wr_start = Some(wr_start);
    c.wr_complete = Some(wr_complete);
    c.wr_abort = Some(wr_abort);
    c.wr_atomic_write = Some(wr_atomic_write);
    c.wr_flush = Some(wr_flush);
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the C contract.
    let builder = unsafe { &Qp::from_c(qp.cast()).builder };
    builder.lock.lock();
    // SAFETY: the lock is held.
    unsafe { (*builder.staged.get()).clear() };
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the C contract.
    let qp = unsafe { Qp::from_c(qp.cast()) };
    // SAFETY: the C contract: `wr_start` came first, and took the lock.
    let outcome = code(|| unsafe { &*qp.builder.staged.get() }.post(qp));
    qp.builder.lock.unlock();
    outcome
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the C contract.
    unsafe { Qp::from_c(qp.cast()) }.builder.lock.unlock();
}

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    // SAFETY: the C contract.
    unsafe { request(qp, SendOpcode::Send, |_| ()) };
}

unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, immediate: u32) {
    // SAFETY: the C contract.
    unsafe { request(qp, SendOpcode::SendWithImmediate, |request| request.immediate = immediate) };
}

unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_address: u64) {
    // SAFETY: the C contract.
    unsafe {
        request(qp, SendOpcode::RdmaRead, |request| {
            (request.rkey, request.remote_address) = (rkey, remote_address);
        });
    }
}

unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_address: u64) {
    // SAFETY: the C contract.
    unsafe {
        request(qp, SendOpcode::RdmaWrite, |request| {
            (request.rkey, request.remote_address) = (rkey, remote_address);
        });
    }
}

unsafe extern "C" fn wr_rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, remote_address: u64, immediate: u32) {
    // SAFETY: the C contract.
    unsafe {
        request(qp, SendOpcode::RdmaWriteWithImmediate, |request| {
            (request.rkey, request.remote_address, request.immediate) = (rkey, remote_address, immediate);
        });
    }
}

unsafe extern "C" fn wr_atomic_cmp_swp(qp: *mut ibv_qp_ex, rkey: u32, remote_address: u64, compare: u64, swap: u64) {
    // SAFETY: the C contract.
    unsafe {
        request(qp, SendOpcode::CompareSwap, |request| {
            (request.rkey, request.remote_address) = (rkey, remote_address);
            (request.compare_add, request.swap) = (compare, swap);
        });
    }
}

unsafe extern "C" fn wr_atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, remote_address: u64, add: u64) {
    // SAFETY: the C contract.
    unsafe {
        request(qp, SendOpcode::FetchAdd, |request| {
            (request.rkey, request.remote_address, request.compare_add) = (rkey, remote_address, add);
        });
    }
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) {
    // SAFETY: the C contract; `ah` is null or exists.
    unsafe {
        stage(qp, |staged| {
            let handle = ah.as_ref().ok_or(VerbsError::InvalidArgument)?.handle;
            let request = staged.last()?;
            request.remote_address = datagram_address(handle, remote_qpn);
            request.rkey = remote_qkey;
            request.addressed = true;
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, address: u64, length: u32) {
    // SAFETY: the C contract.
    unsafe { stage(qp, |staged| staged.set_sges(std::iter::once(Sge { address, length, lkey }))) };
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: the C contract.
    unsafe {
        stage(qp, |staged| {
            let sges = if count == 0 { &[] } else { slice::from_raw_parts(list, count) };
            staged.set_sges(sges.iter().map(sge_from_c))
        });
    }
}

/// The bytes of one part of inline data.
///
/// # Safety
/// `data` is readable for `length` bytes.
unsafe fn part<'a>(data: *const c_void, length: usize) -> &'a [u8] {
    // SAFETY: this function's contract.
    if length == 0 { &[] } else { unsafe { slice::from_raw_parts(data.cast(), length) } }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, data: *mut c_void, length: usize) {
    // SAFETY: the C contract.
    unsafe { stage(qp, |staged| staged.set_inline(std::iter::once(part(data, length)))) };
}

unsafe extern "C" fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    // SAFETY: the C contract.
    unsafe {
        stage(qp, |staged| {
            let parts = if count == 0 { &[] } else { slice::from_raw_parts(list, count) };
            staged.set_inline(parts.iter().map(|buffer| part(buffer.addr, buffer.length)))
        });
    }
}

/// A work request that FreeFlow lacks makes `wr_complete` fail with EOPNOTSUPP.
///
/// # Safety
/// As [`stage`].
unsafe fn unsupported(qp: *mut ibv_qp_ex) {
    // SAFETY: this function's contract.
    unsafe { stage(qp, |_| Err(VerbsError::NotSupported)) };
}

unsafe extern "C" fn wr_bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) {
    // SAFETY: the C contract.
    unsafe {
        match guarded(|| Binding::from_c(mw, rkey, info.as_ref().ok_or(VerbsError::InvalidArgument)?)) {
            Ok(binding) => request(qp, SendOpcode::BindWindow, |request| {
                (request.immediate, request.rkey, request.remote_address) = (binding.lkey, rkey, binding.address);
                (request.compare_add, request.swap) = (binding.length, u64::from(binding.rights));
            }),
            Err(error) => stage(qp, |_| Err(error)),
        }
    }
}

unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: the C contract.
    unsafe { request(qp, SendOpcode::LocalInvalidate, |request| request.immediate = rkey) };
}

unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: the C contract.
    unsafe { request(qp, SendOpcode::SendWithInvalidate, |request| request.immediate = rkey) };
}

unsafe extern "C" fn wr_send_tso(qp: *mut ibv_qp_ex, _header: *mut c_void, _bytes: u16, _mss: u16) {
    // SAFETY: the C contract.
    unsafe { unsupported(qp) };
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, number: u32) {
    // SAFETY: the C contract.
    unsafe {
        stage(qp, |staged| {
            staged.last()?.remote_srqn = Some(number);
            Ok(())
        });
    }
}

/// `value` is eight bytes.
unsafe extern "C" fn wr_atomic_write(qp: *mut ibv_qp_ex, rkey: u32, remote_address: u64, value: *const c_void) {
    // SAFETY: the C contract.
    unsafe {
        request(qp, SendOpcode::AtomicWrite, |request| {
            (request.rkey, request.remote_address) = (rkey, remote_address);
        });
        stage(qp, |staged| staged.set_inline(std::iter::once(part(value, ATOMIC_WRITE_BYTES))));
    }
}

/// `placement` is of `enum ibv_placement_type`, `level` of `enum ibv_selectivity_level`.
unsafe extern "C" fn wr_flush(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_address: u64,
    length: usize,
    placement: u8,
    level: u8,
) {
    // SAFETY: the C contract.
    unsafe {
        request(qp, SendOpcode::Flush, |request| {
            (request.rkey, request.remote_address) = (rkey, remote_address);
            (request.compare_add, request.swap) = (length as u64, u64::from(placement) | u64::from(level) << 8);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staged_requests_keep_what_was_set() {
        let mut staged = Staged::default();
        assert_eq!(staged.set_sges(std::iter::empty()), Err(VerbsError::InvalidArgument));
        staged.requests.push(Request { wr_id: 1, ..Request::default() });
        let sge = Sge { address: 8, length: 4, lkey: 2 };
        staged.set_sges([sge, sge].into_iter()).unwrap();
        staged.requests.push(Request { wr_id: 2, ..Request::default() });
        staged.set_inline([&b"ab"[..], b"c"].into_iter()).unwrap();
        let [first, second] = &staged.requests[..] else { panic!() };
        assert_eq!(staged.descriptor(first).sges, [sge, sge]);
        assert!(staged.descriptor(first).inline.is_none());
        assert_eq!(staged.descriptor(second).inline, Some(&b"abc"[..]));
        assert!(staged.descriptor(second).flags.contains(SendFlags::INLINE));
        assert!(staged.set_inline([&[0; 1025][..]].into_iter()).is_err());
    }
}
