//! Totals of each network's vNICs, those that are gone too: the worker keeps their counts when they
//! go.
use freeflow_engine::VnicCounters;
use freeflow_verbs::NetworkId;
use std::collections::BTreeMap;

/// The ways of messages, in the order of [`Totals::paths`].
pub const PATHS: [&str; 3] = ["direct", "routed", "wire"];

/// Messages and their payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathTotals {
    pub messages: u64,
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub paths: [PathTotals; 3],
    pub out_bytes: u64,
    pub in_bytes: u64,
    pub wire_packets_sent: u64,
    pub wire_packets_received: u64,
}

/// Requests that completed with success, by path.
pub fn by_path(counters: &VnicCounters) -> [PathTotals; 3] {
    let path = |messages: u64, bytes: u64| PathTotals { messages, bytes };
    // Libraries' own counts are in these.
    let rest = |all: u64, direct: u64, wire: u64| all.saturating_sub(direct).saturating_sub(wire);
    [
        path(counters.direct_messages, counters.direct_bytes),
        path(
            rest(counters.messages, counters.direct_messages, counters.wire_messages),
            rest(counters.bytes, counters.direct_bytes, counters.wire_bytes),
        ),
        path(counters.wire_messages, counters.wire_bytes),
    ]
}

impl Totals {
    /// Adds the counts of another shard, or of a vNIC.
    pub(crate) fn add_totals(&mut self, more: &Self) {
        let grow = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        for (sum, more) in self.paths.iter_mut().zip(&more.paths) {
            grow(&mut sum.messages, more.messages);
            grow(&mut sum.bytes, more.bytes);
        }
        grow(&mut self.out_bytes, more.out_bytes);
        grow(&mut self.in_bytes, more.in_bytes);
        grow(&mut self.wire_packets_sent, more.wire_packets_sent);
        grow(&mut self.wire_packets_received, more.wire_packets_received);
    }

    pub(crate) fn add(&mut self, counters: &VnicCounters) {
        self.add_totals(&Self {
            paths: by_path(counters),
            out_bytes: counters.sent.bytes,
            in_bytes: counters.received.bytes,
            wire_packets_sent: counters.wire.packets_sent,
            wire_packets_received: counters.wire.packets_received,
        });
    }
}

/// Of vNICs that are gone, by network.
#[derive(Default)]
pub struct Retired(pub(crate) BTreeMap<NetworkId, Totals>);

impl Retired {
    pub fn add(&mut self, network: NetworkId, counters: &VnicCounters) {
        self.0.entry(network).or_default().add(counters);
    }

    pub fn forget(&mut self, is_gone: impl Fn(NetworkId) -> bool) {
        self.0.retain(|&network, _| !is_gone(network));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_still_counts_until_its_network_goes() {
        let counters = |messages: u64, direct_messages: u64| VnicCounters {
            messages,
            direct_messages,
            wire_messages: 1,
            ..VnicCounters::default()
        };
        let mut retired = Retired::default();
        retired.add(NetworkId(1), &counters(10, 4));
        // A library that says too much takes nothing from the others.
        retired.add(NetworkId(1), &counters(3, 900));
        retired.add(NetworkId(2), &counters(u64::MAX, 0));
        retired.add(NetworkId(2), &counters(u64::MAX, 0));
        let messages = |network: u32| retired.0[&NetworkId(network)].paths.map(|path| path.messages);
        assert_eq!(messages(1), [904, 5, 2]);
        assert_eq!(messages(2), [0, u64::MAX, 2]);
        retired.forget(|network| network == NetworkId(2));
        assert_eq!(retired.0.keys().collect::<Vec<_>>(), [&NetworkId(1)]);
    }
}
