//! Limits of rate, priorities and weights, as they take effect in the worker. What they mean is the engine's
//! ([`freeflow_engine::Scheduler`]); here is what follows for the way past the router.
//!
//! Invariant: nothing of a vNIC to which a limit of rate applies goes past the router, neither what
//! it sends nor what peers read of its memory: its QPs have no direct rings and no grants, and
//! nobody has grants of its memory. (A priority or a weight alone orders what the router moves, and
//! takes nothing away.)
use crate::dataplane::worker::Worker;
use freeflow_engine::{Engine, QpId, SessionId, VnicId};
use freeflow_verbs::{Instant, RateLimit, Shaping, TenantId, VerbsError};
use std::collections::HashSet;

impl Worker {
    /// In force when this returns, also for what waits.
    pub fn set_shaping(&mut self, now: Instant, vnic: VnicId, shaping: Shaping) -> Result<(), VerbsError> {
        let was_metered = self.engine.is_metered(vnic);
        self.engine.set_shaping(now, vnic, shaping)?;
        if self.engine.is_metered(vnic) && !was_metered {
            self.end_direct_of_vnics(|at| at == vnic);
        }
        Ok(())
    }

    /// The same for many vNICs, and for what all vNICs of tenants have together: one pass over what
    /// there is, since it is one job. What can't be, or is gone, is left out.
    pub fn set_shapings(&mut self, now: Instant, tenants: &[(TenantId, RateLimit)], shapings: &[(VnicId, Shaping)]) {
        if tenants.is_empty() && shapings.is_empty() {
            return;
        }
        let unmetered = self.vnics_that(|engine, vnic| !engine.is_metered(vnic));
        for &(tenant, limit) in tenants {
            let _ = self.engine.set_tenant_limit(now, tenant, limit);
        }
        self.engine.set_shapings(now, shapings);
        let changed = self.vnics_that(|engine, vnic| engine.is_metered(vnic) && unmetered.contains(&vnic));
        if !changed.is_empty() {
            self.end_direct_of_vnics(|at| changed.contains(&at));
        }
    }

    fn vnics_that(&self, are_so: impl Fn(&Engine, VnicId) -> bool) -> HashSet<VnicId> {
        self.ports.vnics.iter().map(|(id, _)| id).filter(|&id| are_so(&self.engine, id)).collect()
    }

    /// Whether policy, and where the process is, let QPs of this session go past the router, as requesters or as those
    /// whose memory is reached.
    pub(crate) fn may_pass_router(&self, session: SessionId) -> bool {
        let Some(vnic) = self.ports.sessions.get(session).map(|session| session.vnic) else { return false };
        let allows =
            self.ports.vnics.get(vnic).is_some_and(|entry| self.ports.policy.allows(entry.network) && !entry.is_guest);
        allows && !self.engine.is_metered(vnic)
    }

    fn end_direct_of_vnics(&mut self, is_meant: impl Fn(VnicId) -> bool) {
        let is_there = |session: SessionId| self.ports.sessions.get(session).is_some_and(|entry| is_meant(entry.vnic));
        let ids: Vec<QpId> = self.ports.qps.iter().filter(|(_, qp)| is_there(qp.session)).map(|(id, _)| id).collect();
        for id in ids {
            self.ports.close_direct(id);
        }
    }
}
