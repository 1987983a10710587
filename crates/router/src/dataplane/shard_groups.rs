//! Multicast groups with members in several shards.
//!
//! Another host knows one QPN of this one for a group: that of the first shard with members, which passes each packet
//! on to the other ones. The first shard of the router alone announces it, as it hears from all of them in order; so no
//! late word of one shard undoes what another one said.
use crate::dataplane::fabric::Fabric;
use crate::dataplane::siblings::{Origin, host_of};
use freeflow_engine::IpInfo;
use freeflow_verbs::{Gid, NetworkId, Qpn};
use std::collections::BTreeMap;
use std::net::IpAddr;

type Group = (NetworkId, Gid);

/// Groups as a shard that has others beside it knows them.
#[derive(Default)]
pub(crate) struct ShardGroups {
    /// Those with members in this shard.
    own: BTreeMap<Group, Qpn>,
    by_qpn: BTreeMap<Qpn, Group>,
    /// As the first shard told other hosts.
    announced: BTreeMap<Group, Qpn>,
}

impl Fabric {
    /// By which QPN this engine's members of a multicast group are reached; `None`: there are none any more.
    pub(crate) fn announce_group(&mut self, network: NetworkId, gid: Gid, qpn: Option<Qpn>) {
        let Some(siblings) = &self.siblings else { return self.peers.group(network, gid, qpn) };
        siblings.group(network, gid, qpn);
        let (groups, key) = (&mut self.shard_groups, (network, gid));
        let before = match qpn {
            Some(qpn) => {
                groups.by_qpn.insert(qpn, key);
                groups.own.insert(key, qpn)
            }
            None => groups.own.remove(&key),
        };
        if let Some(before) = before.filter(|&before| qpn != Some(before)) {
            groups.by_qpn.remove(&before);
        }
        self.announce_first(key);
    }

    /// Tells other hosts, if they were told something else.
    pub(crate) fn announce_first(&mut self, key: Group) {
        let Some(siblings) = self.siblings.as_ref().filter(|siblings| siblings.shard.index() == 0) else { return };
        let elsewhere = self.groups.get(&key);
        let of_sibling = |host| elsewhere.and_then(|hosts| hosts.get(&host).copied());
        let first = self.shard_groups.own.get(&key).copied().or_else(|| siblings.hosts().find_map(of_sibling));
        let announced = match first {
            Some(qpn) => self.shard_groups.announced.insert(key, qpn),
            None => self.shard_groups.announced.remove(&key),
        };
        if announced != first {
            self.peers.group(key.0, key.1, first);
        }
    }

    /// A packet of another host: if it is for a group, the other shards with members get it, too.
    #[inline]
    pub(crate) fn relay_to_group(&mut self, qpn: Qpn, from: IpAddr, ip: IpInfo, packet: &[u8]) {
        if self.shard_groups.by_qpn.is_empty() {
            return;
        }
        let Some(key) = self.shard_groups.by_qpn.get(&qpn) else { return };
        let (Some(siblings), Some(members)) = (&mut self.siblings, self.groups.get(key)) else { return };
        for shard in siblings.shard.others() {
            let Some(member) = members.get(&host_of(shard)) else { continue };
            siblings.hand_on(shard, Origin::Relayed(from), ip, packet, Some(*member));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::wake::Waker;
    use crate::dataplane::siblings::Siblings;
    use std::sync::Arc;

    const KEY: Group = (NetworkId(1), Gid([0xff; 16]));

    /// A shard's side of it, and the other shard's ends.
    fn pair() -> (Fabric, Siblings) {
        let wakers = [Arc::new(Waker::new().unwrap()), Arc::new(Waker::new().unwrap())];
        let mut all = Siblings::all(&wakers).into_iter();
        let mut fabric = Fabric::default();
        fabric.set_siblings(all.next().unwrap());
        (fabric, all.next().unwrap())
    }

    #[test]
    fn the_first_shard_with_members_is_announced() {
        let (mut fabric, _other) = pair();
        let announced = |fabric: &Fabric| fabric.shard_groups.announced.get(&KEY).copied();
        fabric.set_group(host_of(1), KEY, Some(Qpn(0x11)));
        assert_eq!(announced(&fabric), Some(Qpn(0x11)));
        fabric.announce_group(KEY.0, KEY.1, Some(Qpn(0x20)));
        assert_eq!(announced(&fabric), Some(Qpn(0x20)));
        fabric.announce_group(KEY.0, KEY.1, None);
        assert_eq!(announced(&fabric), Some(Qpn(0x11)));
        fabric.set_group(host_of(1), KEY, None);
        assert_eq!(announced(&fabric), None);
        assert!(fabric.shard_groups.by_qpn.is_empty());
    }

    #[test]
    fn members_in_other_shards_get_it_under_their_own_number() {
        let (mut fabric, mut other) = pair();
        fabric.announce_group(KEY.0, KEY.1, Some(Qpn(0x20)));
        fabric.set_group(host_of(1), KEY, Some(Qpn(0x11)));
        let from = "192.0.2.3".parse().unwrap();
        let packet = [100, 0, 0xff, 0xff, 0, 0, 0, 0x20, 1, 2, 3, 4];
        fabric.relay_to_group(Qpn(0x20), from, IpInfo::default(), &packet);
        fabric.relay_to_group(Qpn(0x21), from, IpInfo::default(), &packet);
        fabric.siblings.as_mut().unwrap().flush();
        let mut parcel = other.take().unwrap();
        let (origin, _, bytes) = parcel.next_packet().unwrap();
        assert_eq!((origin, bytes), (Origin::Relayed(from), &[100, 0, 0xff, 0xff, 0, 0, 0, 0x11, 1, 2, 3, 4][..]));
        assert!(parcel.next_packet().is_none());
    }
}
