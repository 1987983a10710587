//! The engine: it owns the parts, and hands each call to the part that answers for it.
mod arrivals;
mod carrier;
mod datagrams;
mod records;
mod results;

use crate::completer::Completer;
use crate::networks::Networks;
use crate::objects::{Context, Pd};
use crate::qp::QueuePair;
use crate::quarantine::QpnQuarantine;
use crate::random::Random;
use crate::requester::Requester;
use crate::slab::Slab;
use crate::transport::datagrams::UnresolvedSenders;
use crate::transport::wire::Wire;
use crate::{ContextId, Environment, PdId, Progress, QpId, Seed};
use freeflow_verbs::{Instant, Shard};

/// The engine. Methods come in four families: getters; verbs (commands of the control path, each
/// refusing objects of another session with NotFound); `handle_*` (input); `poll_*` (output).
///
/// After any call ask `poll_ready` until it is empty, running each QP it names, and `poll_timeout`
/// before sleeping.
///
/// It owns its parts one in the other, so that none can call what stands above it: the completer
/// ends requests, the responder admits messages and calls the completer, the requester works off
/// send queues and calls both. What only verbs of the control path need stands beside them.
pub struct Engine {
    pub(crate) shard: Shard,
    pub(crate) requester: Requester,
    pub(crate) random: Random,
    pub(crate) contexts: Slab<ContextId, Context>,
    pub(crate) pds: Slab<PdId, Pd>,
    pub(crate) networks: Networks,
    /// QPNs that are not to be drawn again yet.
    pub(crate) quarantine: QpnQuarantine,
    /// UD packets whose senders are being asked about.
    pub(crate) unresolved: UnresolvedSenders,
}

impl Engine {
    /// An engine without vNICs. `seed` decides all random numbers: QPNs, PSNs and keys.
    pub fn new(seed: Seed) -> Self {
        Self::of_shard(seed, Shard::ONLY)
    }

    /// One of the engines of a router, each of another shard: their names never meet, and they draw no QPN twice.
    /// `seed`: each engine's own.
    pub fn of_shard(seed: Seed, shard: Shard) -> Self {
        Self {
            shard,
            requester: Requester::new(shard),
            random: Random::new(&seed),
            contexts: Slab::new(shard),
            pds: Slab::new(shard),
            networks: Networks::default(),
            quarantine: QpnQuarantine::new(),
            unresolved: UnresolvedSenders::default(),
        }
    }

    /// The shard of its names and QPNs.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// Works off posted sends of one QP, at most about `budget_bytes` of payload (and a bounded
    /// number of requests).
    #[inline]
    pub fn run<E: Environment>(&mut self, env: &mut E, now: Instant, qp: QpId, budget_bytes: u64) -> Progress {
        self.requester.run(env, now, qp, budget_bytes)
    }

    /// A QP that `Waiting` held back and that can go on now, or that has to flush: call `run` for
    /// it.
    pub fn poll_ready(&mut self) -> Option<QpId> {
        self.requester.responder.completer.poll_ready()
    }

    /// Expires timers up to `now`.
    pub fn handle_timeout<E: Environment>(&mut self, env: &mut E, now: Instant) {
        self.requester.handle_timeout(env, now);
    }

    /// When `handle_timeout` is next needed.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.requester.poll_timeout()
    }

    /// Whether a QP is at work on a request, or would be if there is one (`has_next`).
    pub fn is_sending(&self, id: QpId, has_next: bool) -> bool {
        self.requester.responder.completer.is_sending(id, has_next)
    }

    /// Whether a turn of the QP would move payload, if it has a request or has none (`has_next`).
    pub fn has_work(&self, id: QpId, has_next: bool) -> bool {
        self.requester.responder.has_work(id, has_next)
    }

    /// Sends the acknowledgements that were put off while a batch of datagrams was handled, but for those that wait for
    /// what a program answers.
    pub fn flush_acks<E: Environment>(&mut self, env: &mut E, now: Instant) {
        self.requester.responder.flush_acks(env, now);
    }

    /// When the first acknowledgement has waited long enough; `poll_timeout` is not later.
    pub fn acks_due(&self) -> Option<Instant> {
        self.requester.responder.acks_due()
    }

    #[inline]
    pub(crate) fn completer(&self) -> &Completer {
        &self.requester.responder.completer
    }

    #[inline]
    pub(crate) fn completer_mut(&mut self) -> &mut Completer {
        &mut self.requester.responder.completer
    }

    pub(crate) fn qp(&self, id: QpId) -> &QueuePair {
        self.requester.qp(id)
    }

    pub(crate) fn qp_mut(&mut self, id: QpId) -> &mut QueuePair {
        self.requester.qp_mut(id)
    }

    pub(crate) fn wire(&self, id: QpId) -> &Wire {
        self.requester.wire(id)
    }

    pub(crate) fn wire_mut(&mut self, id: QpId) -> &mut Wire {
        self.requester.wire_mut(id)
    }

    pub(crate) fn push_ready(&mut self, id: QpId) {
        self.requester.push_ready(id);
    }
}
