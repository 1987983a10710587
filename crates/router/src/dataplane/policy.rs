//! Policy while traffic runs: what stands is looked at again, what was refused is reported.
use crate::admission::violations::{Resource, Share};
use crate::dataplane::event::PolicyViolated;
use crate::dataplane::worker::Worker;
use freeflow_engine::SessionId;
use freeflow_verbs::Instant;

/// QPs that a turn of the worker looks at when policy has changed.
const TURN_QPS_MAX: u32 = 256;
/// And comparisons with what selectors list: about a third of a millisecond. So many QPs are looked
/// at before that is looked at.
pub(crate) const TURN_WORK_MAX: u64 = 1 << 15;
const STEP_QPS: u32 = 4;

impl Worker {
    /// Policy may have changed: what stands is looked at again, some of it in each turn. And what
    /// was refused is reported.
    pub(crate) fn follow_policy(&mut self, now: Instant) -> bool {
        if self.ports.access.take_change() {
            self.engine.handle_policy_changed();
            self.ports.open_rings.begin_review();
        }
        let (work, mut more, mut count) = (self.ports.access.work(), true, 0);
        while more && count < TURN_QPS_MAX && self.ports.access.work() - work < TURN_WORK_MAX {
            more = self.engine.poll_policy(&mut self.ports, STEP_QPS);
            count += STEP_QPS;
        }
        more |= self.review_datagram_rings();
        let incidents = self.ports.access.take_incidents(now);
        let violations = self.ports.access.take_violations(now);
        if !incidents.is_empty() || !violations.is_empty() {
            self.notify_control(PolicyViolated { incidents, violations });
        }
        more
    }

    /// A request of a session found no room: whose limit that was is reported.
    pub(crate) fn note_shortages(&mut self, session: SessionId) {
        let Some(id) = self.ports.sessions.get(session).map(|session| session.vnic) else { return };
        let (Some(now), Some(vnic)) = (self.engine.refusals(id), self.ports.vnics.get_mut(id)) else { return };
        let before = std::mem::replace(&mut vnic.refusals, now);
        let Some((network, gid, _)) = self.engine.vnic_addresses(id) else { return };
        for (share, now, before) in
            [(Share::Vnic, now.by_vnic, before.by_vnic), (Share::Network, now.by_network, before.by_network)]
        {
            for (resource, now, before) in [
                (Resource::Qps, now.qps, before.qps),
                (Resource::Cqs, now.cqs, before.cqs),
                (Resource::Mrs, now.mrs, before.mrs),
                (Resource::RegisteredBytes, now.registered_bytes, before.registered_bytes),
            ] {
                if now > before {
                    self.ports.access.note_shortage((network, gid), share, resource, now - before);
                }
            }
        }
    }
}
