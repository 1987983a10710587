//! Which network an address belongs to, for who is in a network of the same tenant: networks of one
//! tenant have no address in common. What is declared on this host decides, so two hosts that
//! declare different things may see it differently.
use freeflow_orchestrator::AccessView;
use freeflow_verbs::{Gid, NetworkId};
use std::collections::{BTreeMap, HashMap};

/// Of all networks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressMap {
    /// By tenant: the first address of each range, its last one and the network, in order.
    tenants: Vec<Vec<(u128, u128, NetworkId)>>,
    tenant_of: HashMap<NetworkId, usize>,
    names: HashMap<NetworkId, String>,
}

impl AddressMap {
    /// The map of a declared state.
    pub fn of(view: AccessView<'_>) -> Self {
        let names = view.networks().map(|network| (network.id, network.name()));
        Self::new(view.networks().map(|network| (network.id, network.tenant(), network.bounds()))).named(names)
    }

    /// Networks with their tenants and ranges, each by its first and last address.
    pub fn new<'a, R: Iterator<Item = (Gid, Gid)>>(networks: impl Iterator<Item = (NetworkId, &'a str, R)>) -> Self {
        let (mut address_map, mut by_name) = (Self::default(), BTreeMap::new());
        for (network, tenant, ranges) in networks {
            let tenant = *by_name.entry(tenant).or_insert_with(|| {
                address_map.tenants.push(Vec::new());
                address_map.tenants.len() - 1
            });
            address_map.tenant_of.insert(network, tenant);
            address_map.tenants[tenant].extend(ranges.map(|(first, last)| (number(first), number(last), network)));
        }
        address_map.tenants.iter_mut().for_each(|ranges| ranges.sort_unstable());
        address_map
    }

    /// With the names by which rules know networks.
    pub fn named<'a>(mut self, names: impl Iterator<Item = (NetworkId, &'a str)>) -> Self {
        self.names = names.map(|(network, name)| (network, name.to_owned())).collect();
        self
    }

    /// Also of a network that has no vNIC on this host.
    pub fn name(&self, network: NetworkId) -> Option<&str> {
        self.names.get(&network).map(String::as_str)
    }

    /// Networks that are not there any more `now`.
    pub fn gone(&self, now: &Self) -> Vec<NetworkId> {
        self.names.keys().copied().filter(|network| now.name(*network).is_none()).collect()
    }

    /// The network that has the address for those of `network`: another one of its tenant in whose
    /// ranges it is, or itself.
    pub fn network_at(&self, network: NetworkId, gid: Gid) -> NetworkId {
        let Some(&tenant) = self.tenant_of.get(&network) else { return network };
        let (ranges, gid) = (&self.tenants[tenant], number(gid));
        let behind = ranges.partition_point(|range| range.0 <= gid);
        let range = ranges[..behind].last().filter(|range| gid <= range.1);
        range.map_or(network, |range| range.2)
    }

    /// The vNIC that gets messages to an address, if it finds the sender where that is: answers go
    /// back the same way.
    pub fn receiver(&self, from: (NetworkId, Gid), to: Gid) -> Option<(NetworkId, Gid)> {
        let there = self.network_at(from.0, to);
        (self.network_at(there, from.1) == from.0).then_some((there, to))
    }
}

fn number(gid: Gid) -> u128 {
    u128::from_be_bytes(gid.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(text: &str) -> Gid {
        Gid::from_ip(text.parse().unwrap())
    }

    #[test]
    fn addresses_are_of_the_network_of_the_tenant_that_has_them() {
        let range = |first: &str, last: &str| (gid(first), gid(last));
        let networks = [
            (NetworkId(1), "red", vec![range("10.1.0.0", "10.1.255.255"), range("fd00:1::", "fd00:1::ffff")]),
            (NetworkId(2), "red", vec![range("10.2.0.0", "10.2.0.255")]),
            (NetworkId(3), "blue", vec![range("10.2.0.0", "10.3.255.255")]),
        ];
        let address_map =
            AddressMap::new(networks.into_iter().map(|(id, tenant, ranges)| (id, tenant, ranges.into_iter())));
        let named = |names: &[(u32, &'static str)]| {
            AddressMap::default()
                .named(names.iter().map(|&(network, name)| (NetworkId(network), name)).collect::<Vec<_>>().into_iter())
        };
        assert_eq!(named(&[(1, "a"), (2, "b")]).gone(&named(&[(2, "b"), (3, "a")])), [NetworkId(1)]);
        let at = |network: u32, text: &str| address_map.network_at(NetworkId(network), gid(text)).0;
        for network in [1, 2] {
            assert_eq!(at(network, "10.1.0.0"), 1);
            assert_eq!(at(network, "10.1.255.255"), 1);
            assert_eq!(at(network, "fd00:1::ffff"), 1);
            assert_eq!(at(network, "10.2.0.0"), 2);
            assert_eq!(at(network, "10.2.0.255"), 2);
            for nobodys in ["10.0.255.255", "10.2.1.0", "10.3.0.1", "fd00:1::1:0", "255.255.255.255"] {
                assert_eq!(at(network, nobodys), network, "{nobodys}");
            }
        }
        assert_eq!(at(3, "10.1.0.1"), 3);
        assert_eq!(at(3, "10.2.0.1"), 3);
        assert_eq!(at(9, "10.2.0.1"), 9, "of a network that is not declared");
        let gets = |network: u32, from: &str, to: &str| {
            address_map.receiver((NetworkId(network), gid(from)), gid(to)).map(|(network, _)| network.0)
        };
        assert_eq!(gets(1, "10.1.0.1", "10.1.0.2"), Some(1));
        assert_eq!(gets(1, "10.1.0.1", "10.2.0.1"), Some(2));
        assert_eq!(gets(3, "10.2.0.1", "10.2.0.2"), Some(3));
        assert_eq!(gets(1, "10.9.0.1", "10.1.0.2"), Some(1), "nobody's is of the sender's own");
        assert_eq!(gets(1, "10.9.0.1", "10.2.0.1"), None, "but not for those of another");
        assert_eq!(gets(1, "10.2.0.9", "10.1.0.1"), None, "the sender's is another's");
    }
}
