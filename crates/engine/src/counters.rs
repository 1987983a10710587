//! Counts of vNICs and QPs.
//!
//! Local delivery has no packets. Counted are those that the wire would need: a message's payload
//! in pieces of the path MTU, and one request packet for a READ or an atomic. Acknowledgements,
//! headers and retries are not counted: there are none. What goes past the router is counted so by
//! the libraries, and added here.
use crate::WireCounters;
use freeflow_verbs::CompletionStatus;
use serde::{Deserialize, Serialize};

/// Numbers for `status`, `ps` and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Processes connected.
    pub sessions: u32,
    /// Device contexts.
    pub contexts: u32,
    /// Protection domains, each share of one counted.
    pub pds: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// Memory regions.
    pub mrs: u32,
    /// Memory windows.
    pub mws: u32,
    /// Opened domains.
    pub xrcds: u32,
    /// Groups that QPs are attached to.
    pub multicast_groups: u32,
    /// Address handles.
    pub ahs: u32,
    /// Lengths of all memory regions, bytes.
    pub registered_bytes: u64,
}

/// Counts since the vNIC was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VnicCounters {
    /// Requests that completed with success, and their payload.
    pub messages: u64,
    /// Payload of these, bytes.
    pub bytes: u64,
    /// Of these, what the requesters' libraries did past the router, as they say.
    pub direct_messages: u64,
    /// Payload of these, bytes.
    pub direct_bytes: u64,
    /// Of these, what went to another host, in part at least.
    pub wire_messages: u64,
    /// Payload of these, bytes.
    pub wire_bytes: u64,
    /// Flushes too.
    pub completions_with_error: u64,
    /// RNR NAKs that this vNIC's requesters got.
    pub rnr_naks: u64,
    /// Requests that failed for want of an acknowledgement.
    pub retries_exceeded: u64,
    /// Requests of peers that this vNIC's responders refused for their key.
    pub remote_access_errors: u64,
    /// In this vNIC's rings.
    pub malformed_descriptors: u64,
    /// Messages of this vNIC that found nobody (a retried one counts once).
    pub undeliverable: u64,
    /// Messages of its requesters, and READ responses of its responders.
    pub sent: Traffic,
    /// Messages to its responders, and READ responses to its requesters.
    pub received: Traffic,
    /// Requests of peers that reached this vNIC's responders.
    pub writes_received: u64,
    /// READs of peers.
    pub reads_received: u64,
    /// Atomic operations of peers.
    pub atomics_received: u64,
    /// Messages that came while no RECV was posted for them.
    pub receives_missing: u64,
    /// Times that no acknowledgement came in time and the requester tried once more.
    pub ack_timeouts: u64,
    /// RNR NAKs that came when no retry was left.
    pub rnr_retries_exceeded: u64,
    /// Completions with an error.
    pub failures: Failures,
    /// Packets to and from other hosts.
    pub wire: WireCounters,
}

/// Completions with an error, as a requester and as a responder; the flushed ones are part of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failures {
    /// Send requests.
    pub requester: u64,
    /// Send requests that were flushed.
    pub requester_flushed: u64,
    /// Receive requests.
    pub responder: u64,
    /// Receive requests that were flushed.
    pub responder_flushed: u64,
    /// As a requester: REM_INV_REQ_ERR and REM_ACCESS_ERR.
    pub remote_invalid_requests: u64,
    /// As a requester: REM_ACCESS_ERR.
    pub remote_access_errors: u64,
    /// As a responder: LOC_LEN_ERR.
    pub local_length_errors: u64,
}

impl Failures {
    pub(crate) fn count(&mut self, of_requester: bool, status: CompletionStatus) {
        let flushed = u64::from(status == CompletionStatus::WorkRequestFlushed);
        if of_requester {
            self.requester += 1;
            self.requester_flushed += flushed;
            self.remote_invalid_requests += u64::from(status == CompletionStatus::RemoteInvalidRequest);
            self.remote_access_errors += u64::from(status == CompletionStatus::RemoteAccessError);
        } else {
            self.responder += 1;
            self.responder_flushed += flushed;
            self.local_length_errors += u64::from(status == CompletionStatus::LocalLengthError);
        }
    }
}

impl Usage {
    /// The sum of two.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        Self {
            sessions: self.sessions + other.sessions,
            contexts: self.contexts + other.contexts,
            pds: self.pds + other.pds,
            qps: self.qps + other.qps,
            cqs: self.cqs + other.cqs,
            srqs: self.srqs + other.srqs,
            mrs: self.mrs + other.mrs,
            mws: self.mws + other.mws,
            xrcds: self.xrcds + other.xrcds,
            multicast_groups: self.multicast_groups + other.multicast_groups,
            ahs: self.ahs + other.ahs,
            registered_bytes: self.registered_bytes + other.registered_bytes,
        }
    }
}

/// Work of one QP since it was made; on the direct path as its library counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpTraffic {
    /// Send requests that completed with success.
    pub messages_sent: u64,
    /// Payload of these, bytes.
    pub bytes_sent: u64,
    /// Messages that arrived.
    pub messages_received: u64,
    /// Payload of these, bytes.
    pub bytes_received: u64,
    /// Of these, past the router.
    pub direct_messages_sent: u64,
    /// Payload of these, bytes.
    pub direct_bytes_sent: u64,
    /// Messages that arrived on the direct path.
    pub direct_messages_received: u64,
    /// Payload of these, bytes.
    pub direct_bytes_received: u64,
    /// Payload of its own requests, whichever way it went; only what the engine carried.
    pub bytes_requested: u64,
}

impl QpTraffic {
    /// Bytes of its own requests that the engine carried: their payload, and `request_bytes` for
    /// each. Nothing that a library says makes it more.
    pub fn carried(&self, request_bytes: u64) -> u64 {
        let requests = self.messages_sent.saturating_sub(self.direct_messages_sent);
        requests.saturating_mul(request_bytes).saturating_add(self.bytes_requested)
    }
}

/// Payload and packets of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Payload, bytes.
    pub bytes: u64,
    /// Packets that the wire would need, or needed.
    pub packets: u64,
    /// Of `packets`, those to a multicast group.
    pub multicast_packets: u64,
}

impl Traffic {
    pub(crate) fn add(&mut self, bytes: u64, packets: u64, multicast: bool) {
        self.bytes += bytes;
        self.packets += packets;
        self.multicast_packets += if multicast { packets } else { 0 };
    }
}

/// Requests that were carried out on the direct path, as the requester's library counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectTraffic {
    /// SENDs.
    pub sends: u64,
    /// WRITEs.
    pub writes: u64,
    /// Of both.
    pub sent_bytes: u64,
    /// Packets of both, in pieces of the path MTU.
    pub sent_packets: u64,
    /// READs.
    pub reads: u64,
    /// Atomics.
    pub atomics: u64,
    /// Of both: what they brought, bytes.
    pub read_bytes: u64,
    /// Packets of that.
    pub read_packets: u64,
}

impl DirectTraffic {
    /// All of them.
    pub(crate) fn messages(&self) -> u64 {
        self.sends.saturating_add(self.writes).saturating_add(self.reads).saturating_add(self.atomics)
    }

    /// Counts it for one of the two ports: where the payload of SENDs and WRITEs goes out, and
    /// where it comes in.
    pub(crate) fn count(&self, out: &mut Traffic, back: &mut Traffic) {
        add_reported(&mut out.bytes, self.sent_bytes);
        add_reported(&mut out.packets, self.sent_packets.saturating_add(self.reads).saturating_add(self.atomics));
        add_reported(&mut back.bytes, self.read_bytes);
        add_reported(&mut back.packets, self.read_packets);
    }
}

/// A sum to which a library's word adds nothing more: what the engine counts itself never makes it
/// overflow.
const REPORTED_SUM_MAX: u64 = 1 << 63;

pub(crate) fn add_reported(sum: &mut u64, more: u64) {
    *sum = sum.saturating_add(more).min(REPORTED_SUM_MAX.max(*sum));
}
