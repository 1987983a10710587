//! Limits of vNICs and tenants, and the list of QPs that have work.
use crate::schedule::Scheduler;
use crate::{Engine, QpId, QpTraffic, Throttled, VnicId};
use alloc::vec::Vec;
use freeflow_verbs::{Instant, PRIORITY_MAX, RateLimit, Shaping, TenantId, VerbsError, WEIGHT_MAX};

impl Engine {
    // ---- what vNICs are held to

    /// Sets the limits of the vNIC's requests from now on; those that wait are looked at again.
    /// InvalidArgument: a priority, weight, rate or burst that can't be.
    ///
    /// # Errors
    /// NotFound: no such vNIC.
    pub fn set_shaping(&mut self, now: Instant, vnic: VnicId, shaping: Shaping) -> Result<(), VerbsError> {
        self.completer().vnics.get(vnic).ok_or(VerbsError::NotFound)?;
        if !can_be(&shaping) {
            return Err(VerbsError::InvalidArgument);
        }
        self.requester.responder.schedule.set_shapings(now, &[(vnic, shaping)]);
        self.requester.responder.wake_eligible();
        Ok(())
    }

    /// The same for many, in the time that one takes; those that are gone or can't be held to what
    /// is said are left out.
    pub fn set_shapings(&mut self, now: Instant, shapings: &[(VnicId, Shaping)]) {
        let is_good =
            |(vnic, shaping): &&(VnicId, Shaping)| self.completer().vnics.get(*vnic).is_some() && can_be(shaping);
        let good: Vec<(VnicId, Shaping)> = shapings.iter().filter(is_good).copied().collect();
        self.requester.responder.schedule.set_shapings(now, &good);
        self.requester.responder.wake_eligible();
    }

    /// Limits of the vNIC's requests in force. `None`: no such vNIC.
    pub fn shaping(&self, vnic: VnicId) -> Option<Shaping> {
        self.completer().vnics.get(vnic)?;
        Some(self.requester.responder.schedule.shaping(vnic).unwrap_or_default())
    }

    /// Sets the limit of all vNICs of a tenant together from now on.
    ///
    /// # Errors
    /// InvalidArgument: a rate or burst that can't be.
    pub fn set_tenant_limit(&mut self, now: Instant, tenant: TenantId, limit: RateLimit) -> Result<(), VerbsError> {
        if !is_possible(&limit) {
            return Err(VerbsError::InvalidArgument);
        }
        self.requester.responder.schedule.set_tenant_limit(now, tenant, &limit);
        self.requester.responder.wake_eligible();
        Ok(())
    }

    /// Whether a limit of rate applies to the vNIC: its own, its QPs' or its tenant's. Then nothing
    /// of it may go past the router.
    pub fn is_metered(&self, vnic: VnicId) -> bool {
        self.requester.responder.schedule.is_metered(vnic)
    }

    /// Waits of the vNIC for limits until now, all its QPs together.
    pub fn vnic_throttled(&self, now: Instant, vnic: VnicId) -> Throttled {
        self.requester.responder.schedule.throttled_vnic(now, vnic)
    }

    /// The same of one QP.
    pub fn qp_throttled(&self, now: Instant, id: QpId) -> Throttled {
        self.requester.responder.schedule.throttled_qp(now, id)
    }

    /// Traffic of a QP.
    pub fn qp_traffic(&self, id: QpId) -> Option<QpTraffic> {
        self.completer().qps.get(id).map(|qp| qp.traffic)
    }

    // ---- turns

    /// The QP has work, or may have: it is named by [`Engine::poll_listed`] in its turn. It must
    /// not be listed already.
    #[inline]
    pub fn list(&mut self, vnic: VnicId, qp: QpId) {
        debug_assert!(vnic.shard() == self.shard.index() && qp.shard() == vnic.shard(), "of this engine");
        self.requester.responder.schedule.push(vnic, qp);
    }

    /// The QP has no work any more, listed or not.
    pub fn unlist(&mut self, vnic: VnicId, qp: QpId) {
        self.requester.responder.schedule.remove(vnic, qp);
    }

    /// The listed QP whose turn it is, and its vNIC; either may be gone. It is not listed any more.
    #[inline]
    pub fn poll_listed(&mut self) -> Option<(VnicId, QpId)> {
        self.requester.responder.schedule.pop()
    }

    /// Number of listed QPs.
    pub fn listed_count(&self) -> usize {
        self.requester.responder.schedule.listed_count()
    }

    /// Whether there is a vNIC with a higher priority, busy or not.
    #[inline]
    pub fn gives_way(&self, vnic: VnicId) -> bool {
        self.requester.responder.schedule.gives_way(vnic)
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
