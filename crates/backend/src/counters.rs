//! Counts of packets on the wire, and of packets that never got there, by reason.
use std::io;

/// Counters since [`crate::Udp::open`]. Bytes are those of UDP payload: BTH to ICRC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireCounters {
    pub packets_sent: u64,
    pub bytes_sent: u64,
    /// System calls that sent something.
    pub batches_sent: u64,
    pub packets_received: u64,
    pub bytes_received: u64,
    /// System calls that brought something.
    pub batches_received: u64,

    /// Dropped: the ICRC does not match, for any IP identification that this peer may use; or a frame's CRC.
    pub bad_icrc: u64,
    /// Dropped: a frame of a peer that none were agreed on with.
    pub unwanted_frames: u64,
    /// Dropped: of a sealed peer, and not sealed.
    pub unsealed: u64,
    /// Dropped: sealed with a key that is not the peer's, or not any more; or of a peer that is not sealed.
    pub unknown_key: u64,
    /// Dropped: sealed, and for another engine of this host by its header, or by the packet in it.
    pub wrong_shard: u64,
    /// Dropped: sealed, and taken before, or too far behind others to know.
    pub replayed: u64,
    /// Dropped: sealed by somebody who does not have the key, or damaged.
    pub bad_tag: u64,
    /// Dropped: shorter than a BTH and an ICRC, or longer than the receive buffer.
    pub truncated: u64,
    /// Dropped: from an address that is no peer's.
    pub unknown_source: u64,
    /// Dropped by the kernel because a receive buffer was full, as far as it has reported.
    pub receive_overflow: u64,
    /// Calls to receive that failed (other than for having nothing).
    pub receive_errors: u64,

    /// Asked to send to an index without a peer.
    pub unknown_peer: u64,
    /// Packets for a sealed peer that were dropped because there was no key to seal them with.
    pub no_key: u64,
    /// Keys that came into use to seal with.
    pub keys_used: u64,
    /// A socket's send buffer was full; the packets were kept.
    pub send_blocked: u64,
    /// Packets dropped for one of the errors below.
    pub send_dropped: u64,
    /// Calls that failed: longer than the path MTU.
    pub send_too_long: u64,
    /// Calls that failed: no route, or host or network unreachable.
    pub send_unreachable: u64,
    /// Calls that failed: no memory, or the interface's queue was full.
    pub send_no_buffers: u64,
    /// Calls that failed: refused by a filter.
    pub send_denied: u64,
    /// Calls that failed for another reason.
    pub send_other: u64,
    /// Packets dropped because their payload was not there any more when they were sent.
    pub send_memory_gone: u64,
    /// Batches that the kernel could not cut up on this route and that were sent packet by packet.
    pub segmentation_refused: u64,

    /// Packets lost, duplicated, overtaken, delayed and corrupted by the fault injector.
    pub injected_loss: u64,
    pub injected_duplicates: u64,
    pub injected_reorders: u64,
    pub injected_delays: u64,
    pub injected_corruption: u64,
    /// Packets lost because the fault injector could hold no more.
    pub injected_overflow: u64,
}

impl WireCounters {
    /// Counts a failed call by its reason; `packets` were dropped for it.
    pub(crate) fn count_send_error(&mut self, error: &io::Error, packets: u64) {
        self.send_dropped += packets;
        let kind = match error.raw_os_error() {
            Some(libc::EMSGSIZE) => &mut self.send_too_long,
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::EHOSTDOWN | libc::ECONNREFUSED) => {
                &mut self.send_unreachable
            }
            Some(libc::ENOBUFS | libc::ENOMEM) => &mut self.send_no_buffers,
            Some(libc::EPERM | libc::EACCES) => &mut self.send_denied,
            _ => &mut self.send_other,
        };
        *kind += 1;
    }
}
