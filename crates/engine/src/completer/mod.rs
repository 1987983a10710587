//! The completer: how requests and RECVs end. It owns the tables that requester and responder both
//! work on: QPs, queues, keys, operations in flight, timers.
//!
//! Invariant: nothing here calls the responder, the requester or the engine; they call the
//! completer.
mod acknowledgements;
mod carrier;
pub(crate) mod completion;
mod host_turns;
mod in_flight;
mod repair;
mod retransmit;
mod traffic;
mod waiting;
mod windows;

use crate::in_flight::{InFlight, InFlightId};
use crate::keys::{KEY_COUNT_MAX, Keys};
use crate::objects::{AddressHandle, Cq, GidTable, Srq, Vnic};
use crate::qp::{QueuePair, SendPhase};
use crate::slab::Slab;
use crate::timers::Timers;
use crate::transport::hosts::Hosts;
use crate::transport::wire::{HELD_BYTES_OF_VNIC_MAX, HELD_PACKET_BYTES, Wire, path_mtu};
use crate::{AhId, CqId, QpId, Span, SrqId, VnicId, WireCounters};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use freeflow_verbs::{Gid, QpState, Shard};

pub(crate) struct Completer {
    pub vnics: Slab<VnicId, Vnic>,
    pub cqs: Slab<CqId, Cq>,
    pub srqs: Slab<SrqId, Srq>,
    pub ahs: Slab<AhId, AddressHandle>,
    pub keys: Keys,
    pub qps: Slab<QpId, QueuePair>,
    pub timers: Timers,
    pub in_flight: Slab<InFlightId, InFlight>,
    /// QPs that `poll_ready` names next.
    pub ready: VecDeque<QpId>,
    pub hosts: Hosts,
    /// Source and destination of the chunk in hand: kept to save allocations.
    pub from: Vec<Span>,
    pub to: Vec<Span>,
}

impl Completer {
    pub fn new(shard: Shard) -> Self {
        Self {
            vnics: Slab::new(shard),
            cqs: Slab::new(shard),
            srqs: Slab::new(shard),
            ahs: Slab::new(shard),
            keys: Keys::new(shard, KEY_COUNT_MAX),
            qps: Slab::new(shard),
            timers: Timers::new(),
            in_flight: Slab::new(shard),
            ready: VecDeque::new(),
            hosts: Hosts::default(),
            from: Vec::with_capacity(freeflow_verbs::SGE_COUNT_MAX),
            to: Vec::with_capacity(freeflow_verbs::SGE_COUNT_MAX),
        }
    }
}

impl Completer {
    pub(crate) fn external_gid(&self, vnic: VnicId) -> Option<Gid> {
        self.vnics.get(vnic)?.external_gid
    }

    /// Which of its GIDs a vNIC has besides the first.
    pub(crate) fn gid_table(&self, vnic: VnicId) -> GidTable {
        let vnic = self.vnics.get(vnic);
        GidTable {
            has_external: vnic.is_some_and(|vnic| vnic.external_gid.is_some()),
            has_ipv6: vnic.is_some_and(|vnic| vnic.ipv6_gid.is_some()),
        }
    }

    pub(crate) fn push_ready(&mut self, id: QpId) {
        let qp = self.qp_mut(id);
        if !qp.queued {
            qp.queued = true;
            self.ready.push_back(id);
        }
    }

    /// A QP that our own bookkeeping says exists.
    pub(crate) fn qp(&self, id: QpId) -> &QueuePair {
        self.qps.get(id).expect("the QP exists")
    }

    pub(crate) fn qp_mut(&mut self, id: QpId) -> &mut QueuePair {
        self.qps.get_mut(id).expect("the QP exists")
    }

    pub(crate) fn vnic_of(&mut self, id: QpId) -> &mut Vnic {
        let vnic = self.qp(id).vnic;
        self.vnics.get_mut(vnic).expect("a vNIC outlives its QPs")
    }

    /// Whether a QP is at work on a request, or would be if there is one (`has_next`).
    pub(crate) fn is_sending(&self, id: QpId, has_next: bool) -> bool {
        self.qps.get(id).is_some_and(|qp| {
            let takes = matches!(qp.state(), QpState::ReadyToSend | QpState::Error | QpState::SqError);
            qp.send.phase != SendPhase::Idle || has_next && takes
        })
    }

    /// Payload leaves a QP.
    #[inline]
    pub(crate) fn note_used(&mut self, id: QpId, bytes: u64) {
        self.qp_mut(id).used.bytes += bytes;
    }

    /// Counts for a QP that runs the packet transport, and for its vNIC.
    pub(crate) fn tally(&mut self, id: QpId, count: impl Fn(&mut WireCounters)) {
        count(&mut self.wire_mut(id).counters);
        count(&mut self.vnic_of(id).counters.wire);
    }

    /// The way to the QP's peer; only for one that has one.
    pub(crate) fn wire(&self, id: QpId) -> &Wire {
        self.qp(id).wire.as_ref().expect("the QP runs the packet transport")
    }

    pub(crate) fn wire_mut(&mut self, id: QpId) -> &mut Wire {
        self.qp_mut(id).wire.as_mut().expect("the QP runs the packet transport")
    }

    /// The same for a QP.
    pub(crate) fn wire_mtu(&self, id: QpId) -> u32 {
        let qp = self.qp(id);
        let asked = qp.attributes.path_mtu.bytes();
        qp.wire.as_ref().map_or(asked, |wire| path_mtu(&qp.attributes, &wire.destination))
    }

    /// A packet shall wait at a QP; false if its vNIC has too many of them.
    pub(crate) fn keep(&mut self, id: QpId, bytes: usize) -> bool {
        self.keep_within(id, bytes, HELD_BYTES_OF_VNIC_MAX)
    }

    /// The same, with a limit of its own for what waits at its vNIC.
    pub(crate) fn keep_within(&mut self, id: QpId, bytes: usize, most: usize) -> bool {
        let bytes = bytes + HELD_PACKET_BYTES;
        let held = &mut self.vnic_of(id).held_bytes;
        if *held + bytes > most {
            return false;
        }
        *held += bytes;
        self.qp_mut(id).receive.held_bytes += bytes;
        true
    }

    /// So many bytes (or all) of what waited at a QP do not any more.
    pub(crate) fn let_go(&mut self, id: QpId, bytes: usize) {
        let held = &mut self.qp_mut(id).receive.held_bytes;
        let bytes = bytes.min(*held);
        *held -= bytes;
        self.vnic_of(id).held_bytes -= bytes;
    }

    /// A QP that `Waiting` held back and that can go on now, or that has to flush: call `run` for
    /// it.
    pub(crate) fn poll_ready(&mut self) -> Option<QpId> {
        while let Some(id) = self.ready.pop_front() {
            if let Some(qp) = self.qps.get_mut(id) {
                qp.queued = false;
                return Some(id);
            }
        }
        None
    }
}
