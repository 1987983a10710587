//! Numbers of 24 bits that the engine draws: QPNs of QPs and of multicast groups, numbers of SRQs
//! for XRC.
//!
//! Invariant: each number is of this engine's shard ([`Shard::has_qpn`](freeflow_verbs::Shard)), so
//! that no two engines of a router draw the same, and packets find their engine without a table.
use crate::Engine;
use freeflow_verbs::{Qpn, VerbsError};

impl Engine {
    /// Half of the shard's numbers: so many are in use at most, so that drawing a free one ends
    /// soon.
    fn number_count_max(&self) -> usize {
        (Qpn::MASK as usize + 1) / usize::from(self.shard.count()) / 2
    }

    /// Any number of the shard.
    fn draw_number(&mut self) -> u32 {
        let shard_bits = u32::from(self.shard.count()) - 1;
        self.random.next_u32() & Qpn::MASK & !shard_bits | u32::from(self.shard.index())
    }

    /// NoMemory if there is no QPN for another QP or group.
    pub(crate) fn check_qpns(&self) -> Result<(), VerbsError> {
        let taken = self.requester.responder.qpns.len() + self.requester.groups.groups.len();
        if taken < self.number_count_max() { Ok(()) } else { Err(VerbsError::NoMemory) }
    }

    /// A QPN that is free; [`Self::check_qpns`] found that there is one.
    pub(crate) fn fresh_qpn(&mut self) -> Qpn {
        loop {
            let number = self.draw_number();
            if self.is_free_qpn(number) {
                return Qpn(number);
            }
        }
    }

    /// Not 0 and 1 (management), not the multicast number, and none that was a QP's a moment ago.
    fn is_free_qpn(&self, number: u32) -> bool {
        number > 1
            && number != Qpn::MULTICAST.0
            && self.requester.responder.qpns.get(number).is_none()
            && !self.quarantine.has(number)
            && self.requester.groups.of_number(number).is_none()
    }

    /// A number for an SRQ for XRC. NoMemory if there is none.
    pub(crate) fn fresh_srq_number(&mut self) -> Result<u32, VerbsError> {
        if self.requester.responder.xrc.numbers.len() >= self.number_count_max() {
            return Err(VerbsError::NoMemory);
        }
        loop {
            let number = self.draw_number();
            let is_taken = self.requester.responder.xrc.numbers.get(number).is_some();
            if number != 0 && self.shard.has_qpn(Qpn(number)) && !is_taken {
                return Ok(number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Seed;
    use freeflow_verbs::{Gid, Instant, NetworkId, Shard};

    #[test]
    fn numbers_of_others_are_not_free() {
        let mut engine = Engine::new(Seed([7; 32]));
        let reserved = [0, 1, Qpn::MULTICAST.0];
        assert!(reserved.iter().all(|number| !engine.is_free_qpn(*number)));
        assert!([2, 3, 4, 5].iter().all(|number| engine.is_free_qpn(*number)));
        engine.requester.responder.qpns.insert(2, 0);
        engine.requester.groups.groups.insert(Qpn(3), (NetworkId(1), Gid([0xff; 16])));
        engine.quarantine.give_back(Instant(0), Qpn(4));
        assert!([2, 3, 4].iter().all(|number| !engine.is_free_qpn(*number)) && engine.is_free_qpn(5));
    }

    #[test]
    fn half_of_a_shard_s_numbers_are_given_out() {
        let shard = Shard::new(7, Shard::COUNT_MAX).unwrap();
        let mut engine = Engine::of_shard(Seed([7; 32]), shard);
        let half = 1 << 20;
        let numbers = (0..half).map(|number| number * u32::from(Shard::COUNT_MAX) + 7);
        for number in numbers {
            assert_eq!(engine.check_qpns(), Ok(()));
            engine.requester.responder.qpns.insert(number, 0);
            engine.requester.responder.xrc.numbers.insert(number, 0);
        }
        assert_eq!(engine.check_qpns(), Err(VerbsError::NoMemory));
        assert_eq!(engine.fresh_srq_number(), Err(VerbsError::NoMemory));
        // One fewer, and there is one: of the other half, since the lower one is taken.
        engine.requester.responder.qpns.remove(15);
        engine.requester.responder.xrc.numbers.remove(15);
        assert_eq!(engine.check_qpns(), Ok(()));
        assert!(shard.has_qpn(engine.fresh_qpn()));
        assert!(engine.fresh_srq_number().is_ok_and(|number| shard.has_qpn(Qpn(number))));
    }
}
