//! Limits of the device, and the constants of the data path.
use freeflow_verbs::{
    CQE_COUNT_MAX, Duration, INLINE_BYTES_MAX, QUEUE_WORK_REQUESTS_MAX, QpCapabilities, SGE_COUNT_MAX, SrqAttributes,
    VerbsError,
};

/// Largest piece of a message given to one [`crate::Memory::copy`], bytes.
pub const CHUNK_BYTES_MAX: u64 = 256 * 1024;
/// Requests that one [`crate::Engine::run`] takes from a send queue before others get their turn;
/// each member of a multicast group is one more.
pub const REQUESTS_PER_RUN_MAX: u32 = 64;
/// Requests of each queue that one turn flushes.
pub(crate) const FLUSHES_PER_TURN_MAX: u32 = 64;
/// How often one XRC target QP may be open: each opener is notified of its events.
pub(crate) const OPENS_PER_QP_MAX: usize = 1024;
/// Bytes of an atomic operation.
pub(crate) const ATOMIC_BYTES: u64 = 8;
/// The vNIC's only port.
pub(crate) const PORT: u8 = 1;
/// UC and UD: a message that finds no RECV is as if still on the wire for so many looks of so long
/// each, if the receiver took a RECV not long ago. On a wire the receiver's CPU runs while bytes
/// travel; here both may share a core, and a burst would be lost at once. A receiver that does not
/// receive makes nobody wait.
pub(crate) const RNR_GRACE_STEP: Duration = Duration::from_micros(100);
pub(crate) const RNR_GRACE_STEPS: u8 = 200;
pub(crate) const RECENTLY_ACTIVE: Duration = Duration::from_millis(100);
/// `rnr_retry` from which on it means for ever. (Soft-RoCE counts greater ones down to 7, and stops
/// there.)
pub(crate) const RNR_RETRY_FOREVER: u8 = 7;

/// Capabilities as a QP would get them (limits checked, zeroes kept, nothing rounded down); EINVAL
/// above a limit. Pure, so that the control thread can size the rings before the worker creates the
/// QP.
///
/// # Errors
/// InvalidArgument: one is above its limit.
pub fn grant_qp_capabilities(asked: &QpCapabilities, has_srq: bool) -> Result<QpCapabilities, VerbsError> {
    let mut granted = *asked;
    if has_srq {
        granted.max_recv_wr = 0;
        granted.max_recv_sge = 0;
    }
    let fits = granted.max_send_wr <= QUEUE_WORK_REQUESTS_MAX
        && granted.max_recv_wr <= QUEUE_WORK_REQUESTS_MAX
        && granted.max_send_sge as usize <= SGE_COUNT_MAX
        && granted.max_recv_sge as usize <= SGE_COUNT_MAX
        && granted.max_inline_data as usize <= INLINE_BYTES_MAX;
    if fits { Ok(granted) } else { Err(VerbsError::InvalidArgument) }
}

/// The same for an SRQ. Its limit starts disarmed.
///
/// # Errors
/// InvalidArgument: one is above its limit, or the queue has no room for a request.
pub fn grant_srq_attributes(asked: &SrqAttributes) -> Result<SrqAttributes, VerbsError> {
    let fits = (1..=QUEUE_WORK_REQUESTS_MAX).contains(&asked.max_wr) && asked.max_sge as usize <= SGE_COUNT_MAX;
    if fits { Ok(SrqAttributes { limit: 0, ..*asked }) } else { Err(VerbsError::InvalidArgument) }
}

/// Entries of a CQ: at least one, at most the device's limit.
pub(crate) fn check_cqe(cqe: u32) -> Result<(), VerbsError> {
    if (1..=CQE_COUNT_MAX).contains(&cqe) { Ok(()) } else { Err(VerbsError::InvalidArgument) }
}
