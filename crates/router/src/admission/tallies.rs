//! Refusals, disconnections and attempts in vain of each network's vNICs, as one thread of the
//! router counts them, for `/metrics`.
use crate::admission::violations::ViolationClass;
use freeflow_orchestrator::access::RuleIndex;
use freeflow_verbs::NetworkId;
use std::collections::BTreeMap;

/// Rules and networks that are distinguished; what more of them do is put down to no network.
const COUNT_MAX: usize = 4096;

/// Source of a refusal: the rule in force, if it was one, and the network that asked.
pub type Refused = (Option<RuleIndex>, Option<NetworkId>);

/// Refusals and disconnections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub refusals: u64,
    pub disconnections: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Tallies {
    pub refused: BTreeMap<Refused, Tally>,
    pub violations: BTreeMap<(Option<NetworkId>, ViolationClass), u64>,
}

impl Tallies {
    pub fn of_refused(&mut self, rule: Option<RuleIndex>, network: NetworkId) -> &mut Tally {
        let key = (rule, Some(network));
        let is_full = self.refused.len() >= COUNT_MAX && !self.refused.contains_key(&key);
        self.refused.entry(if is_full { (rule, None) } else { key }).or_default()
    }

    pub fn count_violation(&mut self, network: NetworkId, class: ViolationClass) {
        let key = (Some(network), class);
        let is_full = self.violations.len() >= COUNT_MAX && !self.violations.contains_key(&key);
        *self.violations.entry(if is_full { (None, class) } else { key }).or_default() += 1;
    }

    /// Other rules are in force, and other networks declared: what is gone is forgotten.
    pub fn renew(&mut self, index: impl Fn(RuleIndex) -> Option<RuleIndex>, is_there: impl Fn(NetworkId) -> bool) {
        self.violations.retain(|(network, _), _| network.is_none_or(&is_there));
        for ((rule, network), tally) in std::mem::take(&mut self.refused) {
            let now = rule.map(&index);
            if now != Some(None) && network.is_none_or(&is_there) {
                self.refused.insert((now.flatten(), network), tally);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_bounded_and_what_is_gone_is_forgotten() {
        let mut tallies = Tallies::default();
        let rule = |number: u32| Some(RuleIndex(number));
        for network in 0..=COUNT_MAX as u32 {
            tallies.of_refused(rule(network % 2), NetworkId(network)).refusals += 1;
            tallies.count_violation(NetworkId(network), ViolationClass::Request);
        }
        tallies.of_refused(rule(1), NetworkId(1)).disconnections += 1;
        assert_eq!((tallies.refused.len(), tallies.violations.len()), (COUNT_MAX + 1, COUNT_MAX + 1));
        assert_eq!(
            (tallies.refused[&(rule(0), None)].refusals, tallies.violations[&(None, ViolationClass::Request)]),
            (1, 1)
        );
        // Rule 1 comes before rule 0, which is gone.
        tallies.renew(|rule| rule.0.checked_sub(1).map(RuleIndex), |network| network.0 < 4);
        let left: Vec<_> = tallies.refused.into_iter().collect();
        let (one, three) = (Tally { refusals: 1, disconnections: 1 }, Tally { refusals: 1, disconnections: 0 });
        assert_eq!(left, [((rule(0), Some(NetworkId(1))), one), ((rule(0), Some(NetworkId(3))), three)]);
        assert_eq!(tallies.violations.len(), 5);
    }
}
