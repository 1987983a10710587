//! Counters of the packet transport. Names in sysfs and `status` are rdma-core's (hw_counters); the
//! router maps them.
use crate::HostId;
use freeflow_verbs::Qpn;
use serde::{Deserialize, Serialize};

/// Packets that no QP acted upon, of the whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drops {
    /// Headers that make no sense.
    pub malformed: u64,
    /// A P_Key other than the default partition's.
    pub wrong_pkey: u64,
    /// UD: a Q_Key other than the QP's.
    pub wrong_qkey: u64,
    /// UD: policy does not let the sender talk to the receiver.
    pub denied: u64,
    /// No QP has the QPN.
    pub unknown_qpn: u64,
    /// From another host than the QP's peer is on.
    pub wrong_source: u64,
    /// UD: the sender is of another network, or does not exist.
    pub wrong_network: u64,
    /// The QP is of another service than the opcode.
    pub wrong_service: u64,
    /// The QP's state accepts no packets.
    pub wrong_state: u64,
    /// Too many waited for an earlier packet to land, or for its sender to be known.
    pub parked_overflow: u64,
    /// UC and UD: no RECV was posted, or it was too short.
    pub no_receive: u64,
}

/// Of one QP, or summed over a vNIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireCounters {
    /// Packets that went out, retransmitted ones too.
    pub packets_sent: u64,
    /// Payload.
    pub bytes_sent: u64,
    /// Packets that came for the QP.
    pub packets_received: u64,
    /// Payload of these, bytes.
    pub bytes_received: u64,
    /// Packets that went out again.
    pub packets_retransmitted: u64,
    /// Responder: requests that it had seen before.
    pub duplicate_requests: u64,
    /// Responder: requests beyond the one expected.
    pub out_of_sequence: u64,
    /// Responder: RNR NAKs that went out.
    pub rnr_naks_sent: u64,
    /// Responder: NAKs for a missing PSN that went out.
    pub sequence_naks_sent: u64,
    /// Requester: RNR NAKs that came.
    pub rnr_naks_received: u64,
    /// Requester: NAKs for a missing PSN that came.
    pub sequence_naks_received: u64,
    /// Requester: an answer showed that an earlier READ response was lost.
    pub implied_naks: u64,
    /// Requester: no acknowledgement came in time.
    pub ack_timeouts: u64,
    /// Requester: packets sent to learn whether the peer is still there.
    pub probes_sent: u64,
    /// Responder: acknowledgements that went out.
    pub acks_sent: u64,
    /// Requester: acknowledgements that came.
    pub acks_received: u64,
    /// Requester: answers to what is acknowledged already, or was never sent.
    pub answers_ignored: u64,
    /// Acknowledgements that were put off and covered by a later one.
    pub acks_deferred: u64,
    /// Responder: acknowledgements that waited for the program's answer and went out behind it.
    pub acks_with_answers: u64,
    /// Requester: requests that failed for want of an acknowledgement.
    pub retries_exceeded: u64,
    /// Requester: requests that failed for want of a RECV.
    pub rnr_retries_exceeded: u64,
    /// UC and UD: packets or messages that were lost for want of a RECV, or by a gap.
    pub lost: u64,
    /// Packets that came with ECN's mark of congestion; requester: answers that echo one, too.
    pub congestion_marks: u64,
}

/// A look at a QP that runs the packet transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpWireStatus {
    /// The host of its peer.
    pub host: HostId,
    /// Its number.
    pub qpn: Qpn,
    /// The peer's number.
    pub dest_qpn: Qpn,
    /// Bytes that may be on the way.
    pub window_bytes: u64,
    /// Of these, how many are; not those that nothing was heard of for long.
    pub in_flight_bytes: u64,
    /// Smoothed round-trip time, nanoseconds.
    pub smoothed_rtt_ns: u64,
    /// Counts since it was connected.
    pub counters: WireCounters,
}
