//! News for shards: of each other's vNICs ([`crate::control::placement`] says which are whose), and of what comes
//! for all of them. A limit or quota that is declared when a tenant's vNICs are spread already is divided.
//!
//! Between two shards of a host vNICs are as on two hosts ([`crate::dataplane::siblings`]): the control thread tells
//! each shard which addresses the others have.
use crate::admission::access::VnicIdentity;
use crate::control::placement::{Place, Placement, Ties};
use crate::control::thread::Control;
use crate::control::vnic_entry::Record;
use crate::dataplane::command::{AcceptSealKey, Ask, NameNetwork, PolicyChanges, ReadVnics, Submission, UpdatePeers};
use crate::dataplane::meters::VnicNumbers;
use crate::dataplane::siblings::host_of;
use crate::peering::{SealMessage, Update};
use freeflow_engine::{HostId, VnicId};
use freeflow_protocol::peer::SealSecret;
use freeflow_verbs::{Gid, NetworkId, NetworkLimits, RateLimit, Shard};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// News of other hosts, and the counts that are lowered when they are dealt with.
pub(crate) type HeldUpdates = VecDeque<(Vec<Update>, Arc<AtomicUsize>)>;

/// A shard's part of an amount; all of them together are the amount.
fn part(amount: u64, shard: u8, count: u8) -> u64 {
    amount / u64::from(count) + u64::from(u64::from(shard) < amount % u64::from(count))
}

fn part_of_quota(limits: NetworkLimits, shard: u8, count: u8) -> NetworkLimits {
    let objects = |most: Option<u32>| most.map(|most| part(most.into(), shard, count) as u32);
    NetworkLimits {
        qp_count_max: objects(limits.qp_count_max),
        cq_count_max: objects(limits.cq_count_max),
        mr_count_max: objects(limits.mr_count_max),
        registered_bytes_max: limits.registered_bytes_max.map(|most| part(most, shard, count)),
    }
}

/// A rate of 0 would be none.
fn part_of_rate(limit: RateLimit, shard: u8, count: u8) -> RateLimit {
    let rate = |amount: Option<u64>| amount.map(|amount| part(amount, shard, count).max(1));
    RateLimit {
        bits_per_s: rate(limit.bits_per_s),
        burst_bytes: rate(limit.burst_bytes),
        messages_per_s: rate(limit.messages_per_s),
        burst_messages: rate(limit.burst_messages),
    }
}

/// For other shards: the owner of these addresses.
pub(crate) fn parties(network: NetworkId, gids: &[Gid], identity: &Arc<VnicIdentity>) -> Vec<Update> {
    gids.iter().map(|&gid| Update::Party { network, gid, identity: Some(identity.clone()) }).collect()
}

/// Where a vNIC's addresses are, for the other shards; `None`: they are gone.
pub(crate) fn routes(place: &Place, shard: Option<u8>) -> Vec<Update> {
    let (network, host) = (place.network, shard.map(host_of));
    place.gids.iter().map(|&gid| Update::Route { network, gid, host }).collect()
}

impl Control {
    /// The place of a vNIC that is to be made.
    pub(crate) fn place(&mut self, network: NetworkId, record: &Record) -> Place {
        let tenant = self.state.network(&record.network).map_or(String::new(), |network| network.tenant().to_owned());
        let has_external = self.external.gid(&record.network).is_some();
        let is_limited = self.placement.asks_for_limits() && self.is_limited(&tenant);
        let ties = Ties { is_limited, has_external };
        self.placement.place(&tenant, (network, record.gids().collect()), ties)
    }

    /// The second GID of a vNIC: by it external machines are reached, from the first shard alone. A vNIC of another
    /// shard, whose network was allowed to when it was there already, has none.
    pub(crate) fn external_gid(&self, network: &str, shard: u8) -> Option<Gid> {
        self.external.gid(network).filter(|_| shard == 0)
    }

    /// A vNIC is gone.
    pub(crate) fn forget_at_siblings(&mut self, place: &Place) {
        self.tell_siblings(place.shard, &routes(place, None));
        self.placement.leave(place);
    }

    /// Whether the vNICs of a tenant have a rate or a quota together.
    fn is_limited(&self, tenant: &str) -> bool {
        let has_rate = self.state.tenant_limits().iter().any(|&(id, _)| self.state.tenant_of_limit(id) == Some(tenant));
        let is_its = |network: &&freeflow_orchestrator::NetworkEntry| network.tenant() == tenant;
        has_rate || self.state.networks().filter(is_its).any(|network| self.state.has_network_quota(network))
    }

    /// Changes of policy as each shard is to know them.
    pub(crate) fn policies_of_shards(&self, changes: PolicyChanges) -> Vec<PolicyChanges> {
        let count = self.workers.count();
        if count == 1 {
            return vec![changes];
        }
        let is_spread = |tenant: Option<&str>| tenant.is_some_and(|tenant| self.placement.is_spread(tenant));
        let tenants: BTreeMap<NetworkId, &str> =
            self.state.networks().map(|network| (network.id, network.tenant())).collect();
        let of_shard = |shard: u8| PolicyChanges {
            data_paths: changes.data_paths.clone(),
            network_limits: (changes.network_limits.iter())
                .map(|&(network, limits)| match is_spread(tenants.get(&network).copied()) {
                    true => (network, part_of_quota(limits, shard, count)),
                    false => (network, limits),
                })
                .collect(),
            tenants: (changes.tenants.iter())
                .map(|&(id, limit)| match is_spread(self.state.tenant_of_limit(id)) {
                    true => (id, part_of_rate(limit, shard, count)),
                    false => (id, limit),
                })
                .collect(),
            vnics: changes.vnics.iter().filter(|change| change.vnic.shard() == shard).copied().collect(),
        };
        (0..count).map(of_shard).collect()
    }

    /// Tells the shards other than a vNIC's own about it.
    pub(crate) fn tell_siblings(&self, own: u8, updates: &[Update]) {
        for worker in self.workers.others(own) {
            let backlog = Arc::new(AtomicUsize::new(updates.len()));
            worker.send(UpdatePeers { updates: updates.to_vec(), backlog });
        }
    }

    /// Names, in what is reported of attempts, the networks of other shards' vNICs.
    pub(crate) fn name_network(&self, own: u8, network: NetworkId, name: &str) {
        for worker in self.workers.others(own) {
            worker.send(NameNetwork { network, name: name.to_owned() });
        }
    }

    /// Brings what other hosts say to the shards that it concerns. `backlog` is lowered by what is dealt with.
    pub(crate) fn update_peers(&mut self, updates: Vec<Update>, backlog: &Arc<AtomicUsize>) {
        let count = self.workers.count();
        if count == 1 {
            return self.hand_updates(0, updates, backlog);
        }
        if let Some(held) = &mut self.held_updates {
            return held.push_back((updates, backlog.clone()));
        }
        let mut of_shards: Vec<Vec<Update>> = vec![Vec::new(); usize::from(count)];
        let mut updates = updates.into_iter();
        while let Some(update) = updates.next() {
            match update {
                Update::SealKey { host, id, in_use, secret } => {
                    self.hand_out(&mut of_shards, backlog);
                    backlog.fetch_sub(1, Relaxed);
                    let rest = updates.collect();
                    return self.accept_key(host, (id, in_use), &secret, (rest, backlog.clone()));
                }
                update => {
                    // The sum stays above what is not dealt with.
                    match shard_of(&update, count, &self.placement) {
                        Some(shard) => of_shards[usize::from(shard)].push(update),
                        None => {
                            backlog.fetch_add(usize::from(count) - 1, Relaxed);
                            of_shards.iter_mut().for_each(|of_shard| of_shard.push(update.clone()));
                        }
                    }
                }
            }
        }
        self.hand_out(&mut of_shards, backlog);
    }

    fn hand_out(&self, of_shards: &mut [Vec<Update>], backlog: &Arc<AtomicUsize>) {
        for (shard, updates) in of_shards.iter_mut().enumerate().filter(|(_, updates)| !updates.is_empty()) {
            self.hand_updates(shard as u8, std::mem::take(updates), backlog);
        }
    }

    /// A sealed host has a key of its own that it will seal with, to whichever shard. It hears that the key is here
    /// when all of them have it, and before any of them answers what it asks next: so the rest waits.
    fn accept_key(
        &mut self,
        host: HostId,
        (id, in_use): (u32, Option<u32>),
        secret: &SealSecret,
        rest: (Vec<Update>, Arc<AtomicUsize>),
    ) {
        self.held_updates = Some(VecDeque::from([rest]));
        let command = |_| AcceptSealKey { host, id, in_use, secret: secret.clone() };
        self.ask_all(command, move |control, accepted| {
            if accepted.into_iter().all(|accepted| accepted) {
                control.peers.seal(host, SealMessage::Held { id });
            }
            // Another key among them holds the ones behind it again.
            for (updates, backlog) in control.held_updates.take().unwrap_or_default() {
                control.update_peers(updates, &backlog);
            }
        });
    }

    fn hand_updates(&self, shard: u8, updates: Vec<Update>, backlog: &Arc<AtomicUsize>) {
        let command = UpdatePeers { updates, backlog: backlog.clone() };
        let submission = Submission { ticket: None, command: command.into_command(), bound: None };
        self.workers.of(shard).hand_over(None, submission);
    }

    /// Numbers of vNICs of any shards, in the order in which they are named.
    pub(crate) fn read_vnics(
        &mut self,
        vnics: Vec<VnicId>,
        counts_direct: bool,
        then: impl FnOnce(&mut Control, Vec<VnicNumbers>) + Send + 'static,
    ) {
        let command = |shard| ReadVnics { vnics: of_shard(&vnics, shard), counts_direct };
        let order: Vec<u8> = vnics.iter().map(|vnic| vnic.shard()).collect();
        self.ask_all(command, move |control, answers| {
            let mut answers: Vec<_> = answers.into_iter().map(Vec::into_iter).collect();
            let next = |&shard: &u8| answers.get_mut(usize::from(shard)).and_then(Iterator::next).unwrap_or_default();
            let numbers = order.iter().map(next).collect();
            then(control, numbers);
        });
    }
}

/// Those of these vNICs that are of a shard.
pub(crate) fn of_shard(vnics: &[VnicId], shard: u8) -> Vec<VnicId> {
    vnics.iter().copied().filter(|vnic| vnic.shard() == shard).collect()
}

/// The shard that an update concerns; `None`: all.
fn shard_of(update: &Update, count: u8, placement: &Placement) -> Option<u8> {
    let of_qpn = |qpn| Shard::new(0, count).map(|shard| shard.of_qpn(qpn));
    match update {
        Update::Asked { qpn, .. } | Update::Disconnected { qpn, .. } => of_qpn(*qpn),
        // The others know that the address is here.
        Update::Route { network, gid, .. } | Update::Party { network, gid, .. } => placement.shard_at(*network, *gid),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_whole_together() {
        for amount in [0, 1, 3, 4, 7, 1_000_003, u64::MAX] {
            for count in [1, 2, 4, 8] {
                assert_eq!((0..count).map(|shard| part(amount, shard, count)).sum::<u64>(), amount);
            }
        }
        let limit = RateLimit { bits_per_s: Some(1), ..RateLimit::default() };
        assert_eq!(part_of_rate(limit, 3, 4), limit, "a limit is never taken away");
    }

    #[test]
    fn news_of_a_qp_goes_to_its_shard() {
        use crate::control::placement::ShardBy;
        use freeflow_verbs::Qpn;
        let host = HostId(3);
        let mut placement = Placement::new(4, ShardBy::Tenant);
        let of = |update: Update, placement: &Placement| shard_of(&update, 4, placement);
        assert_eq!(of(Update::Asked { host, qpn: Qpn(0x1236) }, &placement), Some(2));
        assert_eq!(of(Update::Disconnected { host, qpn: Qpn(0x1237), peer: Qpn(8) }, &placement), Some(3));
        // Of the other host's QPs: any shard may have asked.
        assert_eq!(of(Update::Peer { host, qpn: Qpn(5), info: None }, &placement), None);
        assert_eq!(of(Update::HostDown { host }, &placement), None);
        let (network, gid) = (NetworkId(1), Gid([1; 16]));
        assert_eq!(of(Update::Route { network, gid, host: None }, &placement), None);
        placement.place("red", (network, vec![Gid([9; 16])]), Ties::default());
        let here = placement.place("blue", (network, vec![gid]), Ties::default());
        assert_eq!(of(Update::Route { network, gid, host: None }, &placement), Some(here.shard));
    }
}
