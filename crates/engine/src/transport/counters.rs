//! Counters of the packet transport. Names in sysfs and `status` are rdma-core's (hw_counters); the
//! router maps them.
use crate::HostId;
use freeflow_verbs::Qpn;
use serde::{Deserialize, Serialize};

/// Packets that no QP acted upon, of the whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drops {
    pub malformed: u64,
    pub wrong_pkey: u64,
    pub wrong_qkey: u64,
    /// UD: policy does not let the sender talk to the receiver.
    pub denied: u64,
    pub unknown_qpn: u64,
    /// From another host than the QP's peer is on.
    pub wrong_source: u64,
    /// UD: the sender is of another network, or does not exist.
    pub wrong_network: u64,
    pub wrong_service: u64,
    pub wrong_state: u64,
    /// Too many waited for an earlier packet to land, or for its sender to be known.
    pub parked_overflow: u64,
    /// UC and UD: no RECV was posted, or it was too short.
    pub no_receive: u64,
}

/// Of one QP, or summed over a vNIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireCounters {
    pub packets_sent: u64,
    /// Payload.
    pub bytes_sent: u64,
    pub packets_received: u64,
    pub bytes_received: u64,
    pub packets_retransmitted: u64,
    /// Responder: requests that it had seen before.
    pub duplicate_requests: u64,
    /// Responder: requests beyond the one expected.
    pub out_of_sequence: u64,
    pub rnr_naks_sent: u64,
    pub sequence_naks_sent: u64,
    pub rnr_naks_received: u64,
    pub sequence_naks_received: u64,
    /// Requester: an answer showed that an earlier READ response was lost.
    pub implied_naks: u64,
    pub ack_timeouts: u64,
    pub probes_sent: u64,
    pub acks_sent: u64,
    pub acks_received: u64,
    /// Requester: answers to what is acknowledged already, or was never sent.
    pub answers_ignored: u64,
    /// Acknowledgements that were put off and covered by a later one.
    pub acks_deferred: u64,
    pub retries_exceeded: u64,
    pub rnr_retries_exceeded: u64,
    /// UC and UD: packets or messages that were lost for want of a RECV, or by a gap.
    pub lost: u64,
    pub congestion_marks: u64,
}

/// A look at a QP that runs the packet transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpWireStatus {
    pub host: HostId,
    pub qpn: Qpn,
    pub dest_qpn: Qpn,
    /// Bytes that may be on the way.
    pub window_bytes: u64,
    /// Of these, how many are; not those that nothing was heard of for long.
    pub in_flight_bytes: u64,
    pub smoothed_rtt_ns: u64,
    pub counters: WireCounters,
}
