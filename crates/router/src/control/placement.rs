//! Which shard has which vNIC.
//!
//! All vNICs of a tenant are of one shard: they reach each other past the router, and the tenant's limits and quotas
//! are one engine's. Where the operator has vNICs spread ([`ShardBy::Vnic`]), that holds for tenants that have a limit
//! or a quota when their vNICs come.
//!
//! Invariant: a place counts from when a vNIC is to be made until it is gone, and an address is in one shard at a time.
use freeflow_shm::cpu_count;
use freeflow_verbs::{Gid, NetworkId};
use std::collections::{BTreeMap, BTreeSet};

/// The unit that is kept together in one shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ShardBy {
    /// All vNICs of a tenant.
    #[default]
    Tenant,
    /// Each vNIC alone.
    Vnic,
}

/// Shards of a router that was not told how many: one for every eight processors, from 16 on, up to four, where there
/// are other hosts. Elsewhere vNICs reach each other past the router, and one engine is enough.
pub fn default_shard_count(has_peers: bool) -> u8 {
    suitable_count(has_peers, cpu_count())
}

fn suitable_count(has_peers: bool, cpus: usize) -> u8 {
    match cpus {
        _ if !has_peers => 1,
        0..16 => 1,
        16..32 => 2,
        32.. => 4,
    }
}

/// vNICs of each shard and of each tenant.
pub(crate) struct Placement {
    by: ShardBy,
    /// vNICs, by shard.
    loads: Vec<usize>,
    homes: BTreeMap<String, Home>,
    /// Tenants whose vNICs were spread once.
    spread: BTreeSet<String>,
    /// Addresses of the vNICs that have a place, by who had them first; of one address several, while one vNIC is being
    /// ended and another made.
    addresses: BTreeMap<(NetworkId, Gid), (u8, usize)>,
}

/// Shard of a tenant's vNICs that are kept together.
struct Home {
    shard: u8,
    vnic_count: usize,
}

/// A vNIC's place, from before it is made until it is gone.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub shard: u8,
    tenant: String,
    /// It counts for its tenant's home.
    is_home: bool,
    pub network: NetworkId,
    pub gids: Vec<Gid>,
}

/// Circumstances on which the place of a vNIC depends.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ties {
    /// Its tenant has a rate or a quota for all of them.
    pub is_limited: bool,
    /// Its network may talk to external machines: for those the whole host is one, whose claims on their QPs one
    /// engine keeps.
    pub has_external: bool,
}

impl Placement {
    pub fn new(count: u8, by: ShardBy) -> Self {
        let loads = vec![0; usize::from(count)];
        let (homes, spread, addresses) = Default::default();
        Self { by, loads, homes, spread, addresses }
    }

    fn least_loaded(&self) -> u8 {
        let least = self.loads.iter().enumerate().min_by_key(|&(shard, load)| (*load, shard));
        least.map_or(0, |(shard, _)| shard as u8)
    }

    /// Whether a vNIC's shard depends on whether its tenant has limits.
    pub fn asks_for_limits(&self) -> bool {
        self.by == ShardBy::Vnic && self.loads.len() > 1
    }

    /// The place of a vNIC that is to be made.
    pub fn place(&mut self, tenant: &str, (network, gids): (NetworkId, Vec<Gid>), ties: Ties) -> Place {
        // Of a vNIC with the same address that is being ended: the one is gone before the other comes.
        let before = gids.iter().find_map(|&gid| self.addresses.get(&(network, gid))).map(|&(shard, _)| shard);
        let is_spread = self.asks_for_limits() && !ties.is_limited;
        let least = if ties.has_external { 0 } else { self.least_loaded() };
        let is_bound = before.is_some() || ties.has_external;
        let (shard, is_home) = match self.homes.get_mut(tenant) {
            _ if is_spread => {
                self.spread.insert(tenant.to_owned());
                (before.unwrap_or(least), false)
            }
            Some(home) if is_bound && before.unwrap_or(least) != home.shard => (before.unwrap_or(least), false),
            Some(home) => {
                home.vnic_count += 1;
                (home.shard, true)
            }
            None => {
                let shard = before.unwrap_or(least);
                self.homes.insert(tenant.to_owned(), Home { shard, vnic_count: 1 });
                (shard, true)
            }
        };
        self.loads[usize::from(shard)] += 1;
        for &gid in &gids {
            self.addresses.entry((network, gid)).or_insert((shard, 0)).1 += 1;
        }
        Place { shard, tenant: tenant.to_owned(), is_home, network, gids }
    }

    /// The vNIC is gone, or was not made.
    pub fn leave(&mut self, place: &Place) {
        let load = &mut self.loads[usize::from(place.shard)];
        *load = load.saturating_sub(1);
        for &gid in &place.gids {
            let Some((_, count)) = self.addresses.get_mut(&(place.network, gid)) else { continue };
            *count -= 1;
            if *count == 0 {
                self.addresses.remove(&(place.network, gid));
            }
        }
        if let Some(home) = self.homes.get_mut(&place.tenant).filter(|_| place.is_home) {
            home.vnic_count = home.vnic_count.saturating_sub(1);
            if home.vnic_count == 0 {
                self.homes.remove(&place.tenant);
            }
        }
    }

    /// Whether vNICs of a tenant may be of several shards.
    pub fn is_spread(&self, tenant: &str) -> bool {
        self.spread.contains(tenant)
    }

    /// The shard of this host's vNIC that has an address.
    pub fn shard_at(&self, network: NetworkId, gid: Gid) -> Option<u8> {
        self.addresses.get(&(network, gid)).map(|&(shard, _)| shard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITED: Ties = Ties { is_limited: true, has_external: false };
    const EXTERNAL: Ties = Ties { is_limited: false, has_external: true };

    /// A vNIC with an address of its own.
    fn place(placement: &mut Placement, tenant: &str, address: u8, ties: Ties) -> Place {
        placement.place(tenant, (NetworkId(1), vec![Gid([address; 16])]), ties)
    }

    #[test]
    fn vnics_of_a_tenant_are_together() {
        let mut placement = Placement::new(4, ShardBy::Tenant);
        let reds: Vec<Place> = (1..4).map(|address| place(&mut placement, "red", address, Ties::default())).collect();
        assert!(reds.iter().all(|red| red.shard == reds[0].shard));
        let blue = place(&mut placement, "blue", 9, LIMITED);
        assert_ne!(blue.shard, reds[0].shard);
        assert!(!placement.is_spread("red"));
        reds.iter().for_each(|red| placement.leave(red));
        // Nobody is there any more, and it is the emptiest one again.
        assert_eq!(place(&mut placement, "green", 1, Ties::default()).shard, reds[0].shard);
        assert_eq!(place(&mut placement, "blue", 10, Ties::default()).shard, blue.shard);
    }

    #[test]
    fn vnics_are_spread_unless_something_limits_them_together() {
        let mut placement = Placement::new(4, ShardBy::Vnic);
        let all: BTreeSet<u8> = (1..5).map(|at| place(&mut placement, "red", at, Ties::default()).shard).collect();
        assert_eq!(all.len(), 4);
        let limited: BTreeSet<u8> = (5..9).map(|at| place(&mut placement, "blue", at, LIMITED).shard).collect();
        assert_eq!(limited.len(), 1);
        assert!(placement.is_spread("red") && !placement.is_spread("blue"));
        assert_eq!(place(&mut Placement::new(1, ShardBy::Vnic), "red", 1, Ties::default()).shard, 0);
    }

    #[test]
    fn a_home_lasts_as_long_as_its_own_vnics() {
        let mut placement = Placement::new(2, ShardBy::Vnic);
        let home = place(&mut placement, "red", 1, LIMITED);
        let spread: Vec<Place> = (2..8).map(|at| place(&mut placement, "red", at, Ties::default())).collect();
        spread.iter().for_each(|vnic| placement.leave(vnic));
        (10..14).for_each(|at| drop(place(&mut placement, "blue", at, Ties::default())));
        assert_eq!(place(&mut placement, "red", 20, LIMITED).shard, home.shard);
    }

    #[test]
    fn external_machines_are_the_first_shards() {
        let mut placement = Placement::new(4, ShardBy::Tenant);
        let first = place(&mut placement, "red", 1, Ties::default());
        let blue = place(&mut placement, "blue", 2, Ties::default());
        assert_eq!((first.shard, blue.shard), (0, 1));
        // Allowed when the tenant had its home already: that one alone is elsewhere.
        assert_eq!(place(&mut placement, "blue", 3, EXTERNAL).shard, 0);
        assert_eq!(place(&mut placement, "blue", 4, Ties::default()).shard, 1);
        assert_eq!(place(&mut placement, "green", 5, EXTERNAL).shard, 0);
        assert_eq!(place(&mut placement, "green", 6, Ties::default()).shard, 0);
    }

    #[test]
    fn an_address_stays_in_its_shard_until_it_is_free() {
        let mut placement = Placement::new(4, ShardBy::Vnic);
        let before = place(&mut placement, "red", 1, Ties::default());
        let after = place(&mut placement, "red", 1, Ties::default());
        assert_eq!(before.shard, after.shard);
        placement.leave(&before);
        assert_eq!(placement.shard_at(NetworkId(1), Gid([1; 16])), Some(after.shard));
        placement.leave(&after);
        assert_eq!(placement.shard_at(NetworkId(1), Gid([1; 16])), None);
        assert!(placement.loads.iter().all(|&load| load == 0));
    }

    #[test]
    fn a_small_machine_has_one() {
        let counts = [1, 2, 8, 15, 16, 31, 32, 256].map(|cpus| suitable_count(true, cpus));
        assert_eq!(counts, [1, 1, 1, 1, 2, 2, 4, 4]);
        assert_eq!(suitable_count(false, 256), 1);
    }
}
