//! What the engine makes of its scheduler.
//!
//! Counted is what leaves a vNIC: each message once, when it begins, and its payload piece by piece, as it goes. So a long message is
//! spread over the time that its bytes take. A READ or atomic is charged to who asks, with what it brings, and to the
//! vNIC whose memory it comes from. Packets that are sent again are not charged, acknowledgements neither; what a local delivery begins
//! anew is.
//!
//! Invariant: `QueuePair::used` is zero between runs, but for what went out while a datagram was handled.
use super::{Scheduler, Throttled, Used};
use crate::qp::SendPhase;
use crate::requester::{Budget, Turn};
use crate::{Engine, Environment, Progress, QpId, VnicId};
use alloc::vec::Vec;
use freeflow_verbs::{Instant, PRIORITY_MAX, QpState, RateLimit, Shaping, TenantId, VerbsError, WEIGHT_MAX};
use serde::{Deserialize, Serialize};

/// A metered message moves in pieces of what is allowed, but not of less.
const CHUNK_BYTES_MIN: u64 = 4096;

/// What one QP did since it was made; what it did past the router as its library says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpTraffic {
    pub messages_sent: u64,
    pub bytes_sent: u64,
    pub messages_received: u64,
    pub bytes_received: u64,
    /// Of these, past the router.
    pub direct_messages_sent: u64,
    pub direct_bytes_sent: u64,
    pub direct_messages_received: u64,
    pub direct_bytes_received: u64,
    /// Payload of its own requests, whichever way it went; only what the engine carried.
    pub bytes_requested: u64,
}

impl QpTraffic {
    /// What the engine carried of its own requests: their payload, and so much more for each. Nothing that a library says makes it more.
    pub fn carried(&self, request_bytes: u64) -> u64 {
        let requests = self.messages_sent.saturating_sub(self.direct_messages_sent);
        requests.saturating_mul(request_bytes).saturating_add(self.bytes_requested)
    }
}

fn is_possible(limit: &RateLimit) -> bool {
    let numbers = [limit.bits_per_s, limit.burst_bytes, limit.messages_per_s, limit.burst_messages];
    !numbers.contains(&Some(0))
}

fn can_be(shaping: &Shaping) -> bool {
    let in_range = shaping.priority <= PRIORITY_MAX && (1..=WEIGHT_MAX).contains(&shaping.weight);
    in_range && is_possible(&shaping.qp) && is_possible(&shaping.vnic)
}

impl Engine {
    // ---- what vNICs are held to

    /// What the vNIC's requests are held to from now on; those that wait are looked at again. InvalidArgument: a priority, weight,
    /// rate or burst that can't be.
    pub fn set_shaping(&mut self, now: Instant, vnic: VnicId, shaping: Shaping) -> Result<(), VerbsError> {
        self.vnics.get(vnic).ok_or(VerbsError::NotFound)?;
        if !can_be(&shaping) {
            return Err(VerbsError::InvalidArgument);
        }
        self.schedule.set_shapings(now, &[(vnic, shaping)]);
        self.call_eligible();
        Ok(())
    }

    /// The same for many, in the time that one takes; those that are gone or can't be held to what is said are left out.
    pub fn set_shapings(&mut self, now: Instant, shapings: &[(VnicId, Shaping)]) {
        let is_good = |(vnic, shaping): &&(VnicId, Shaping)| self.vnics.get(*vnic).is_some() && can_be(shaping);
        let good: Vec<(VnicId, Shaping)> = shapings.iter().filter(is_good).copied().collect();
        self.schedule.set_shapings(now, &good);
        self.call_eligible();
    }

    pub fn shaping(&self, vnic: VnicId) -> Option<Shaping> {
        self.vnics.get(vnic)?;
        Some(self.schedule.shaping(vnic).unwrap_or_default())
    }

    /// What all vNICs of a tenant are held to together from now on.
    pub fn set_tenant_limit(&mut self, now: Instant, tenant: TenantId, limit: RateLimit) -> Result<(), VerbsError> {
        if !is_possible(&limit) {
            return Err(VerbsError::InvalidArgument);
        }
        self.schedule.set_tenant_limit(now, tenant, &limit);
        self.call_eligible();
        Ok(())
    }

    /// Whether a limit of rate applies to the vNIC: its own, its QPs' or its tenant's. Then nothing of it may go past the router.
    pub fn is_metered(&self, vnic: VnicId) -> bool {
        self.schedule.is_metered(vnic)
    }

    /// What limits held back of the vNIC until now, all its QPs together.
    pub fn vnic_throttled(&self, now: Instant, vnic: VnicId) -> Throttled {
        self.schedule.throttled_vnic(now, vnic)
    }

    /// The same of one QP.
    pub fn qp_throttled(&self, now: Instant, id: QpId) -> Throttled {
        self.schedule.throttled_qp(now, id)
    }

    /// What a QP did.
    pub fn qp_traffic(&self, id: QpId) -> Option<QpTraffic> {
        self.qps.get(id).map(|qp| qp.traffic)
    }

    // ---- turns

    /// The QP has work, or may have: it is named by [`Engine::poll_listed`] in its turn. It must not be listed already.
    #[inline]
    pub fn list(&mut self, vnic: VnicId, qp: QpId) {
        self.schedule.push(vnic, qp);
    }

    pub fn unlist(&mut self, vnic: VnicId, qp: QpId) {
        self.schedule.remove(vnic, qp);
    }

    /// The listed QP whose turn it is, and its vNIC; either may be gone. It is not listed any more.
    #[inline]
    pub fn poll_listed(&mut self) -> Option<(VnicId, QpId)> {
        self.schedule.pop()
    }

    pub fn listed_count(&self) -> usize {
        self.schedule.listed_count()
    }

    /// Whether there is a vNIC with a higher priority, busy or not.
    #[inline]
    pub fn gives_way(&self, vnic: VnicId) -> bool {
        self.schedule.gives_way(vnic)
    }

    // ---- a run

    /// What a QP may use of the budget; zero of everything if its limits have run out.
    #[inline]
    pub(crate) fn meter(&mut self, now: Instant, id: QpId, bytes: u64) -> Budget {
        match self.qps.get(id) {
            Some(qp) if self.schedule.is_metered(qp.vnic) => self.metered_budget(now, id, bytes),
            _ => Budget::unmetered(bytes),
        }
    }

    #[cold]
    fn metered_budget(&mut self, now: Instant, id: QpId, bytes: u64) -> Budget {
        self.settle_used(id);
        let qp = self.qp(id);
        let vnic = qp.vnic;
        let budget = Budget::unmetered(bytes);
        // Who flushes sends nothing.
        let flushes = matches!(qp.state(), QpState::Error | QpState::SqError);
        let was_waiting = self.schedule.is_waiting(id);
        if flushes {
            if was_waiting {
                self.schedule.give_up(now, id);
            }
            return budget;
        }
        let Some(allowance) = self.schedule.allowance(now, vnic, id) else {
            return Budget { bytes: 0, messages: 0, metered: true, answers: false, ..budget };
        };
        if was_waiting {
            self.excuse_limit(now, id);
        }
        let chunk_bytes = allowance.bytes.clamp(CHUNK_BYTES_MIN, budget.chunk_bytes);
        let bytes = bytes.min(allowance.bytes);
        Budget { bytes, chunk_bytes, messages: allowance.messages, metered: true, ..budget }
    }

    /// A run is over: charges it; whoever has more to send than it may waits.
    #[inline]
    pub(crate) fn end_run<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        budget: &Budget,
        (owes, sends): (Progress, Progress),
    ) -> (Progress, Progress) {
        self.settle_used(id);
        if budget.metered { self.end_metered(env, now, id, (owes, sends)) } else { (owes, sends) }
    }

    #[cold]
    fn end_metered<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        (owes, sends): (Progress, Progress),
    ) -> (Progress, Progress) {
        let Some(qp) = self.qps.get(id) else { return (owes, sends) };
        let (vnic, flushes) = (qp.vnic, matches!(qp.state(), QpState::Error | QpState::SqError));
        let wants_more = owes == Progress::More || sends == Progress::More;
        let (mut outcome, mut goes_on) = ((owes, sends), false);
        if wants_more && !flushes && self.schedule.allowance(now, vnic, id).is_some() {
            // It uses up what is there before the next is let out.
            goes_on = true;
        } else if wants_more && !flushes {
            if owes != Progress::More && !self.has_something(env, now, id) {
                outcome = (owes, Progress::Idle);
            } else {
                self.schedule.wait(now, vnic, id);
                goes_on = true;
                let held = |progress| if progress == Progress::More { Progress::Waiting } else { progress };
                outcome = (held(owes), held(sends));
            }
        }
        if !goes_on {
            self.schedule.finish(now, vnic, id);
        }
        self.call_eligible();
        outcome
    }

    /// Whether there is a request to send: one that was begun, or one more in the ring, which is taken in hand.
    fn has_something<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> bool {
        let qp = self.qp(id);
        if qp.send.phase != SendPhase::Idle || self.has_unsent(id) {
            return true;
        }
        let fetched = match qp.wire.is_some() && qp.service.is_reliable() {
            true => self.fetch_for_wire(env, id),
            false => self.fetch(env, now, id),
        };
        matches!(fetched, Turn::Continue)
    }

    /// What a QP used since it was last charged.
    #[inline]
    fn settle_used(&mut self, id: QpId) {
        if let Some(qp) = self.qps.get_mut(id)
            && qp.used != Used::default()
        {
            let used = core::mem::take(&mut qp.used);
            self.schedule.charge(qp.vnic, id, &used);
        }
    }

    /// A message begins. False: the limit of messages has run out.
    #[inline]
    pub(crate) fn pay(&mut self, id: QpId, budget: &mut Budget) -> bool {
        let qp = self.qp_mut(id);
        if qp.send.paid || qp.send.request.opcode.is_local() {
            return true;
        }
        if budget.messages == 0 {
            return false;
        }
        budget.messages -= 1;
        qp.send.paid = true;
        qp.used.messages += 1;
        true
    }

    /// Payload leaves a QP.
    #[inline]
    pub(crate) fn note_used(&mut self, id: QpId, bytes: u64) {
        self.qp_mut(id).used.bytes += bytes;
    }

    /// The same of a burst, with messages that begin anew.
    #[inline]
    pub(crate) fn note_fresh(&mut self, id: QpId, (bytes, messages): (u32, u32)) {
        let used = &mut self.qp_mut(id).used;
        used.bytes += u64::from(bytes);
        used.messages += messages;
    }

    /// A READ or atomic within the host: whether it waits, since the vNIC that it reads from may send nothing now.
    pub(crate) fn reads_too_much(&mut self, now: Instant, id: QpId, responder: QpId) -> bool {
        let (vnic, home) = (self.qp(id).vnic, self.qp(responder).vnic);
        if home == vnic || !self.schedule.is_metered(home) {
            return false;
        }
        self.schedule.wait_for(now, (vnic, id), (home, responder))
    }

    /// Payload of a READ or atomic within the host leaves the responder, too.
    pub(crate) fn note_read(&mut self, id: QpId, responder: QpId, bytes: u64) {
        let (vnic, peer) = (self.qp(id).vnic, self.qp(responder).vnic);
        if vnic != peer && self.schedule.is_metered(peer) {
            self.schedule.charge(peer, responder, &Used { bytes, messages: 0 });
        }
    }

    /// Whether READ responses may go out while a datagram is handled: those of a metered vNIC wait for the QP's run.
    #[inline]
    pub(crate) fn may_answer(&self, id: QpId) -> bool {
        !self.schedule.is_metered(self.qp(id).vnic)
    }

    // ---- time

    pub(crate) fn expire_limits(&mut self, now: Instant) {
        if self.schedule.poll_timeout().is_some_and(|at| at <= now) {
            self.schedule.handle_timeout(now);
            self.call_eligible();
        }
    }

    pub(crate) fn call_eligible(&mut self) {
        while let Some(id) = self.schedule.poll_eligible() {
            if self.qps.get(id).is_some() {
                self.push_ready(id);
            }
        }
    }
}
