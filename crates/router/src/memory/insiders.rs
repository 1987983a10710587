//! Atomics by grants that are waited for: each was being done when the grant ended by which it is done, and may change
//! memory of the grant's owner until its library leaves.
//!
//! All of one vNIC's in one owner's memory are late together: however many QPs a vNIC has, an owner waits for it once.
use freeflow_engine::{QpId, SessionId, VnicId};
use freeflow_shm::revocation::Entered;
use freeflow_verbs::{Duration, Instant};
use std::collections::BTreeMap;

/// A library that does an atomic for longer loses its QP. A process that works stands still for less: in a freeze
/// window, or when its cgroup has used up its share of the processors. As long as the worst of its memory that
/// blocks a copy may hold up the same verbs.
pub(crate) const ATOMIC_TIME_MAX: Duration = Duration::from_millis(2_000);

#[derive(Default)]
struct OfOwner {
    qps: BTreeMap<QpId, (Entered, VnicId)>,
    /// Until when the libraries of a vNIC may take.
    until: BTreeMap<VnicId, Instant>,
}

impl OfOwner {
    fn retain(&mut self, stays: impl Fn(QpId, Entered) -> bool) {
        self.qps.retain(|&qp, &mut (atomic, _)| stays(qp, atomic));
        let qps = &self.qps;
        self.until.retain(|vnic, _| qps.values().any(|(_, of)| of == vnic));
    }
}

/// By the owner of the memory.
#[derive(Default)]
pub(crate) struct Insiders(BTreeMap<SessionId, OfOwner>);

impl Insiders {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn has(&self, owner: SessionId) -> bool {
        self.0.contains_key(&owner)
    }

    /// Whether this one is waited for.
    pub fn knows(&self, owner: SessionId, qp: QpId, atomic: Entered) -> bool {
        let known = self.0.get(&owner).and_then(|of_owner| of_owner.qps.get(&qp));
        known.is_some_and(|&(known, _)| known == atomic)
    }

    pub fn add(&mut self, owner: SessionId, (qp, vnic): (QpId, VnicId), atomic: Entered, now: Instant) {
        let of_owner = self.0.entry(owner).or_default();
        of_owner.qps.insert(qp, (atomic, vnic));
        of_owner.until.entry(vnic).or_insert(now + ATOMIC_TIME_MAX);
    }

    pub fn retain(&mut self, stays: impl Fn(QpId, Entered) -> bool) {
        self.0.retain(|_, of_owner| {
            of_owner.retain(&stays);
            !of_owner.qps.is_empty()
        });
    }

    pub fn remove(&mut self, qp: QpId) {
        self.0.retain(|_, of_owner| {
            if of_owner.qps.contains_key(&qp) {
                of_owner.retain(|id, _| id != qp);
            }
            !of_owner.qps.is_empty()
        });
    }

    /// The owner waits for nobody any more: these QPs.
    pub fn forget_owner(&mut self, owner: SessionId) -> Vec<QpId> {
        self.0.remove(&owner).map_or_else(Vec::new, |of_owner| of_owner.qps.into_keys().collect())
    }

    /// None is late before `now` and the usual time.
    pub fn postpone(&mut self, now: Instant) {
        for until in self.0.values_mut().flat_map(|of_owner| of_owner.until.values_mut()) {
            *until = (now + ATOMIC_TIME_MAX).max(*until);
        }
    }

    /// Takes out the QPs whose libraries take too long.
    pub fn take_late(&mut self, now: Instant) -> Vec<QpId> {
        let mut late = Vec::new();
        self.0.retain(|_, of_owner| {
            let OfOwner { qps, until } = of_owner;
            let is_late = |vnic: &VnicId| until.get(vnic).is_none_or(|&until| until <= now);
            late.extend(qps.extract_if(.., |_, (_, vnic)| is_late(vnic)).map(|(qp, _)| qp));
            until.retain(|_, until| *until > now);
            !qps.is_empty()
        });
        late
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_shm::revocation::entered;
    use std::sync::atomic::AtomicU64;

    const NOW: Instant = Instant(1_000);

    fn atomic() -> Entered {
        entered(&AtomicU64::new(1 << 32 | 5)).expect("a library is inside")
    }

    #[test]
    fn a_vnic_is_waited_for_once_however_many_its_qps() {
        let [owner, other] = [1, 2].map(|index| SessionId { index, generation: 0 });
        let [enemy, honest] = [1, 2].map(|index| VnicId { index, generation: 0 });
        let qp = |index| QpId { index, generation: 0 };
        let mut insiders = Insiders::default();
        for index in 0..20 {
            insiders.add(owner, (qp(index), enemy), atomic(), NOW + Duration::from_millis(100 * u64::from(index)));
        }
        let later = NOW + Duration::from_millis(1_000);
        insiders.add(owner, (qp(50), honest), atomic(), later);
        assert!(insiders.has(owner) && !insiders.has(other) && insiders.knows(owner, qp(3), atomic()));
        assert!(insiders.take_late(NOW + Duration::from_millis(1_999)).is_empty());
        assert_eq!(insiders.take_late(NOW + ATOMIC_TIME_MAX).len(), 20);
        assert!(insiders.has(owner) && !insiders.knows(owner, qp(3), atomic()));
        insiders.postpone(later + Duration::from_millis(1_900));
        assert!(insiders.take_late(later + ATOMIC_TIME_MAX).is_empty());
        insiders.remove(qp(50));
        assert!(insiders.is_empty());
    }

    #[test]
    fn one_that_is_done_renews_nothing() {
        let owner = SessionId { index: 1, generation: 0 };
        let (vnic, qps) = (VnicId { index: 1, generation: 0 }, [1, 2].map(|index| QpId { index, generation: 0 }));
        let mut insiders = Insiders::default();
        insiders.add(owner, (qps[0], vnic), atomic(), NOW);
        insiders.add(owner, (qps[1], vnic), atomic(), NOW + Duration::from_millis(1_500));
        insiders.retain(|qp, _| qp == qps[1]);
        assert_eq!(insiders.take_late(NOW + ATOMIC_TIME_MAX), [qps[1]]);
        assert!(insiders.is_empty() && insiders.forget_owner(owner).is_empty());
    }
}
