//! Where addresses are, as the control thread knows it: vNICs of this host, those that other
//! routers announced, machines without FreeFlow. The worker has its own copy, for packets; nobody
//! waits for the other's.
use crate::admission::access::Key;
use crate::control::external::{EXTERNAL_GID_INDEX, IPV6_GID_INDEX};
use crate::peering::{Settings, Update};
use freeflow_backend::path_mtu;
use freeflow_cm::{GID_COUNT, Link, Route, Scope, ScopedGid, VnicRef};
use freeflow_engine::HostId;
use freeflow_protocol::peer::FEATURE_SEALED;
use freeflow_verbs::{Gid, NetworkId, PathMtu, VerbsError};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv6Addr};

pub struct Vnic {
    pub network: NetworkId,
    pub gid: Gid,
    pub ipv6: Option<Gid>,
    /// The host's own address, if it may speak to external machines.
    pub external: Option<Gid>,
}

#[derive(Default)]
pub struct Places {
    vnics: BTreeMap<VnicRef, Vnic>,
    last_vnic: u64,
    by_address: BTreeMap<(NetworkId, Gid), VnicRef>,
    /// vNICs that bear the host's address.
    outward: BTreeSet<VnicRef>,
    /// The path MTU of each host that was connected.
    hosts: BTreeMap<HostId, PathMtu>,
    routes: BTreeMap<(NetworkId, Gid), HostId>,
    settings: Option<Settings>,
    /// For the numbers of machines with IPv6 addresses.
    numbering: RandomState,
}

fn address_of(gid: Gid) -> IpAddr {
    gid.to_ipv4().map_or_else(|| IpAddr::V6(Ipv6Addr::from(gid.0)), IpAddr::V4)
}

/// The largest that so many bytes of payload allow.
fn largest_mtu(bytes: u16) -> PathMtu {
    let all = [PathMtu::Mtu4096, PathMtu::Mtu2048, PathMtu::Mtu1024, PathMtu::Mtu512];
    all.into_iter().find(|mtu| mtu.bytes() <= u32::from(bytes)).unwrap_or(PathMtu::Mtu256)
}

impl Places {
    /// With its IPv4 address, and its IPv6 address if it has one.
    pub fn attach(&mut self, network: NetworkId, (gid, ipv6): (Gid, Option<Gid>), external: Option<Gid>) -> VnicRef {
        self.last_vnic += 1;
        let vnic = VnicRef(self.last_vnic);
        self.vnics.insert(vnic, Vnic { network, gid, ipv6, external: None });
        for gid in std::iter::once(gid).chain(ipv6) {
            self.by_address.insert((network, gid), vnic);
        }
        self.set_external(vnic, external);
        vnic
    }

    pub fn detach(&mut self, vnic: VnicRef) {
        if let Some(entry) = self.vnics.remove(&vnic) {
            for gid in std::iter::once(entry.gid).chain(entry.ipv6) {
                self.by_address.remove(&(entry.network, gid));
            }
            self.outward.remove(&vnic);
        }
    }

    /// Its second address.
    pub fn set_external(&mut self, vnic: VnicRef, external: Option<Gid>) {
        if let Some(entry) = self.vnics.get_mut(&vnic) {
            entry.external = external;
            if external.is_some() {
                self.outward.insert(vnic)
            } else {
                self.outward.remove(&vnic)
            };
        }
    }

    pub fn vnic(&self, vnic: VnicRef) -> Option<&Vnic> {
        self.vnics.get(&vnic)
    }

    /// Its GID table.
    pub fn of_vnic(&self, vnic: VnicRef) -> [Option<ScopedGid>; GID_COUNT] {
        let Some(entry) = self.vnics.get(&vnic) else { return [None; GID_COUNT] };
        let own = |gid| ScopedGid { scope: Scope::Network(entry.network), gid };
        let external = entry.external.map(|gid| ScopedGid { scope: Scope::External, gid });
        [Some(own(entry.gid)), external, entry.ipv6.map(own)]
    }

    pub fn vnic_at(&self, place: ScopedGid) -> Option<VnicRef> {
        match place.scope {
            Scope::Network(network) => self.by_address.get(&(network, place.gid)).copied(),
            Scope::External => {
                let first = self.outward.first().copied()?;
                self.vnics.get(&first).filter(|vnic| vnic.external == Some(place.gid)).map(|_| first)
            }
        }
    }

    /// Something that the peers thread has found out. The links on which nobody answers any more;
    /// `in_use` gives the addresses of machines that connections lead to, among others.
    pub fn handle_update(&mut self, update: Update, in_use: impl FnOnce() -> BTreeSet<Gid>) -> Vec<Link> {
        match update {
            Update::HostUp { host, address, agreed, .. } => {
                let (own, sealed) =
                    (self.settings.as_ref().map(|own| own.address), agreed.features & FEATURE_SEALED != 0);
                let bytes = own.and_then(|own| path_mtu(own, address, sealed).ok());
                let mtu = bytes.map_or(PathMtu::Mtu1024, largest_mtu);
                self.hosts.insert(host, mtu);
            }
            Update::HostDown { host } => return vec![Link::Router(host.0)],
            Update::Route { network, gid, host: Some(host) } => drop(self.routes.insert((network, gid), host)),
            Update::Route { network, gid, host: None } => drop(self.routes.remove(&(network, gid))),
            Update::Settings(settings) => {
                // Packets bear the address that the router began with.
                let address = self.settings.as_ref().map_or(settings.address, |before| before.address);
                let were_allowed: Vec<Gid> =
                    in_use().into_iter().filter(|gid| self.allows_external(*gid, None)).collect();
                self.settings = Some(Settings { address, ..settings });
                let gone = were_allowed.into_iter().filter(|gid| !self.allows_external(*gid, None));
                return gone.map(|gid| Link::External(self.external_number(gid))).collect();
            }
            Update::Peer { .. }
            | Update::PeersGone { .. }
            | Update::AskAgain { .. }
            | Update::Removed { .. }
            | Update::Group { .. }
            | Update::Asked { .. }
            | Update::Party { .. }
            | Update::Disconnected { .. }
            | Update::Frames { .. }
            | Update::Shards { .. }
            | Update::SealKey { .. }
            | Update::SealKeyHeld { .. }
            | Update::Cm { .. } => {}
        }
        Vec::new()
    }

    /// Whether the peers file allows a network (any, if none is named) to talk to a machine at this
    /// address, and no router is there.
    pub fn allows_external(&self, gid: Gid, network: Option<NetworkId>) -> bool {
        let Some(settings) = &self.settings else { return false };
        let address = address_of(gid);
        let is_machine = address != settings.address
            && address.is_ipv4() == settings.address.is_ipv4()
            && !settings.routers.contains(&address);
        let of_network =
            settings.external.iter().filter(|external| network.is_none_or(|network| external.network == network));
        is_machine && of_network.flat_map(|external| &external.allow).any(|prefix| prefix.contains(gid))
    }

    /// The number of a machine without FreeFlow: nothing is kept of it, so nobody can use numbers
    /// up. Two machines with IPv6 addresses may have the same one (nobody can choose which); the
    /// machine distinguishes them by their addresses.
    pub fn external_number(&self, gid: Gid) -> u32 {
        gid.to_ipv4().map_or_else(|| self.numbering.hash_one(gid.0) as u32, u32::from)
    }

    /// This host's own address.
    pub fn own_address(&self) -> Option<Gid> {
        self.settings.as_ref().map(|settings| Gid::from_ip(settings.address))
    }

    /// The way from a vNIC, or from one certain address of it, to an address that is of the network `at`.
    pub fn route(&self, vnic: VnicRef, from: Option<Gid>, (at, to): Key) -> Result<Route, VerbsError> {
        let &Vnic { network, gid, ipv6, external } = self.vnics.get(&vnic).ok_or(VerbsError::Unreachable)?;
        // A vNIC that may go out to a machine with an address of another network's does so: the
        // outside is not the tenant's.
        if at != network
            && let Some(route) = self.way_out(network, external, from, to)
        {
            return route;
        }
        // From one family no way leads to the other.
        let own = if to.to_ipv4().is_some() { Some((gid, 0)) } else { ipv6.map(|gid| (gid, IPV6_GID_INDEX)) };
        if let Some((gid, gid_index)) = own.filter(|(gid, _)| from.is_none_or(|from| from == *gid)) {
            let local = ScopedGid { scope: Scope::Network(network), gid };
            let route = Route { link: Link::Local, local, remote: to, gid_index, mtu: PathMtu::Mtu4096 };
            if self.by_address.contains_key(&(at, to)) {
                return Ok(route);
            }
            if let Some(host) = self.routes.get(&(at, to))
                && let Some(&mtu) = self.hosts.get(host)
            {
                return Ok(Route { link: Link::Router(host.0), mtu, ..route });
            }
        }
        self.way_out(network, external, from, to).unwrap_or(Err(VerbsError::Unreachable))
    }

    /// The way to a machine without FreeFlow, if those of a network may speak to it.
    fn way_out(
        &self,
        network: NetworkId,
        external: Option<Gid>,
        from: Option<Gid>,
        to: Gid,
    ) -> Option<Result<Route, VerbsError>> {
        let own = external.filter(|own| from.is_none_or(|from| from == *own))?;
        if !self.allows_external(to, Some(network)) {
            return None;
        }
        let number = self.external_number(to);
        let (link, local) = (Link::External(number), ScopedGid { scope: Scope::External, gid: own });
        let route = path_mtu(address_of(own), address_of(to), false).map(|bytes| Route {
            link,
            local,
            remote: to,
            gid_index: EXTERNAL_GID_INDEX,
            mtu: largest_mtu(bytes),
        });
        Some(route.map_err(|_| VerbsError::Unreachable))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peering::ExternalPeers;
    use freeflow_protocol::version::Agreement;

    const NETWORK: NetworkId = NetworkId(1);
    const OTHER: NetworkId = NetworkId(2);

    fn gid(text: &str) -> Gid {
        Gid::from_ip(text.parse().unwrap())
    }

    /// Within the vNIC's own network.
    fn own_way(places: &Places, vnic: VnicRef, from: Option<Gid>, to: Gid) -> Result<Route, VerbsError> {
        let network = places.vnic(vnic).map_or(NETWORK, |vnic| vnic.network);
        places.route(vnic, from, (network, to))
    }

    fn settings(allow: &[&str]) -> Update {
        let allow = allow.iter().map(|prefix| prefix.parse().unwrap()).collect();
        Update::Settings(Settings {
            address: "127.0.0.1".parse().unwrap(),
            dscp: 0,
            sealed: false,
            routers: vec!["127.0.0.3".parse().unwrap()],
            external: vec![ExternalPeers { network: NETWORK, allow }],
        })
    }

    fn up(host: u32) -> Update {
        let address = "127.0.0.3".parse().unwrap();
        Update::HostUp {
            host: HostId(host),
            address,
            icrc: true,
            epoch: 1,
            agreed: Agreement { version: 1, features: 0 },
        }
    }

    #[test]
    fn routes_lead_to_vnics_of_the_same_network() {
        let mut places = Places::default();
        let a = places.attach(NETWORK, (gid("10.0.0.1"), None), None);
        let b = places.attach(NETWORK, (gid("10.0.0.2"), None), None);
        let c = places.attach(OTHER, (gid("10.0.0.3"), None), None);
        let route = own_way(&places, a, None, gid("10.0.0.2")).unwrap();
        assert_eq!((route.link, route.local, route.gid_index), (Link::Local, places.of_vnic(a)[0].unwrap(), 0));
        assert!(own_way(&places, a, None, gid("10.0.0.1")).is_ok(), "itself");
        assert_eq!(own_way(&places, a, None, gid("10.0.0.3")), Err(VerbsError::Unreachable), "another network");
        assert_eq!(own_way(&places, a, Some(gid("10.0.0.2")), gid("10.0.0.2")), Err(VerbsError::Unreachable));
        assert_eq!(places.vnic_at(places.of_vnic(c)[0].unwrap()), Some(c));
        places.detach(b);
        assert_eq!(own_way(&places, a, None, gid("10.0.0.2")), Err(VerbsError::Unreachable));
        assert_eq!(places.of_vnic(b), [None; GID_COUNT]);

        // Another host announces it.
        places.handle_update(
            Update::Route { network: NETWORK, gid: gid("10.0.0.2"), host: Some(HostId(7)) },
            BTreeSet::new,
        );
        places.handle_update(settings(&[]), BTreeSet::new);
        assert_eq!(own_way(&places, a, None, gid("10.0.0.2")), Err(VerbsError::Unreachable), "no router answered yet");
        places.handle_update(up(7), BTreeSet::new);
        assert_eq!(own_way(&places, a, None, gid("10.0.0.2")).map(|route| route.link), Ok(Link::Router(7)));
        assert_eq!(places.handle_update(Update::HostDown { host: HostId(7) }, BTreeSet::new), [Link::Router(7)]);
    }

    #[test]
    fn to_another_network_the_way_leads_from_the_own() {
        let mut places = Places::default();
        let a = places.attach(NETWORK, (gid("10.0.0.1"), Some(gid("fd00::1"))), None);
        places.attach(OTHER, (gid("10.2.0.2"), Some(gid("fd02::2"))), None);
        for to in ["10.2.0.2", "fd02::2"] {
            let route = places.route(a, None, (OTHER, gid(to))).unwrap();
            assert_eq!((route.link, route.local.scope, route.remote), (Link::Local, Scope::Network(NETWORK), gid(to)));
            assert!(places.route(a, None, (NETWORK, gid(to))).is_err(), "nobody of the own has it");
        }
        places.handle_update(settings(&["127.0.0.0/24"]), BTreeSet::new);
        places.handle_update(up(7), BTreeSet::new);
        let far = Update::Route { network: OTHER, gid: gid("10.2.0.7"), host: Some(HostId(7)) };
        places.handle_update(far, BTreeSet::new);
        let route = places.route(a, Some(gid("10.0.0.1")), (OTHER, gid("10.2.0.7"))).unwrap();
        assert_eq!((route.link, route.local), (Link::Router(7), places.of_vnic(a)[0].unwrap()));
        assert!(places.route(a, None, (NETWORK, gid("10.2.0.7"))).is_err());
        // Machines without FreeFlow are the own network's, whoever has their addresses.
        places.set_external(a, Some(gid("127.0.0.1")));
        places.attach(OTHER, (gid("127.0.0.9"), None), None);
        let route = places.route(a, None, (OTHER, gid("127.0.0.9"))).unwrap();
        assert_eq!(route.local.scope, Scope::External);
    }

    #[test]
    fn each_family_has_its_own_way() {
        let mut places = Places::default();
        let a = places.attach(NETWORK, (gid("10.0.0.1"), Some(gid("fd00::1"))), None);
        let b = places.attach(NETWORK, (gid("10.0.0.2"), Some(gid("fd00::2"))), None);
        let old = places.attach(NETWORK, (gid("10.0.0.3"), None), None);
        let other = places.attach(OTHER, (gid("10.0.0.1"), Some(gid("fd00::1"))), None);
        let route = own_way(&places, a, None, gid("fd00::2")).unwrap();
        let six = places.of_vnic(a)[usize::from(IPV6_GID_INDEX)].unwrap();
        assert_eq!((route.link, route.local, route.gid_index), (Link::Local, six, IPV6_GID_INDEX));
        assert_eq!(places.vnic_at(six), Some(a));
        assert_eq!(places.vnic_at(places.of_vnic(other)[2].unwrap()), Some(other));
        assert_eq!(own_way(&places, a, None, gid("10.0.0.2")).unwrap().gid_index, 0);
        assert!(own_way(&places, a, Some(gid("10.0.0.1")), gid("fd00::2")).is_err(), "from one family to the other");
        assert!(own_way(&places, a, Some(gid("fd00::1")), gid("10.0.0.2")).is_err());
        assert!(own_way(&places, old, None, gid("fd00::2")).is_err(), "it has no such address");
        places.handle_update(settings(&[]), BTreeSet::new);
        places.handle_update(up(7), BTreeSet::new);
        let far = Update::Route { network: NETWORK, gid: gid("fd00::9"), host: Some(HostId(7)) };
        places.handle_update(far, BTreeSet::new);
        assert_eq!(own_way(&places, a, None, gid("fd00::9")).map(|route| route.link), Ok(Link::Router(7)));
        places.detach(b);
        assert!(own_way(&places, a, None, gid("fd00::2")).is_err());
    }

    #[test]
    fn external_machines_are_those_that_the_file_names_for_the_network() {
        let mut places = Places::default();
        let own = gid("127.0.0.1");
        let a = places.attach(NETWORK, (gid("10.0.0.1"), None), Some(own));
        let b = places.attach(OTHER, (gid("10.0.0.1"), None), Some(own));
        let c = places.attach(NETWORK, (gid("10.0.0.3"), None), None);
        places.handle_update(settings(&["127.0.0.0/24"]), BTreeSet::new);
        let machine = gid("127.0.0.9");
        let route = own_way(&places, a, None, machine).unwrap();
        assert_eq!(
            (route.link, route.local.gid, route.gid_index),
            (Link::External(places.external_number(machine)), own, 1)
        );
        assert!(own_way(&places, a, Some(own), machine).is_ok());
        assert!(own_way(&places, a, Some(gid("10.0.0.1")), machine).is_err(), "by the wrong address");
        assert!(own_way(&places, b, None, machine).is_err(), "not for this network");
        assert!(own_way(&places, c, None, machine).is_err(), "no second address");
        for address in ["127.0.0.1", "127.0.0.3", "127.0.1.9"] {
            assert!(
                own_way(&places, a, None, gid(address)).is_err(),
                "{address} is this host, a router, or not listed"
            );
        }
        assert_eq!(places.vnic_at(ScopedGid { scope: Scope::External, gid: own }), Some(a));
        assert_eq!(places.vnic_at(ScopedGid { scope: Scope::External, gid: machine }), None);
        let link = Link::External(places.external_number(machine));
        assert_eq!(places.handle_update(settings(&[]), || BTreeSet::from([machine])), [link], "the permission is gone");
        assert!(own_way(&places, a, None, machine).is_err());
    }

    #[test]
    fn numbers_are_never_used_up() {
        let mut places = Places::default();
        places.handle_update(settings(&["127.0.0.0/8"]), BTreeSet::new);
        let a = places.attach(NETWORK, (gid("10.0.0.1"), None), Some(gid("127.0.0.1")));
        let links: BTreeSet<Link> = (0..20_000_u32)
            .map(|number| Gid::from_ip(IpAddr::from((0x7f01_0000 + number).to_be_bytes())))
            .map(|machine| own_way(&places, a, None, machine).unwrap().link)
            .collect();
        assert_eq!(links.len(), 20_000);
        let machine = gid("fd00::9");
        assert_eq!(places.external_number(machine), places.external_number(machine));
    }

    #[test]
    fn only_what_was_allowed_is_gone() {
        let mut places = Places::default();
        let in_use = || BTreeSet::from([gid("127.0.0.9"), gid("127.0.2.9"), gid("10.0.0.7")]);
        assert_eq!(places.handle_update(settings(&["127.0.0.0/24", "127.0.2.0/24"]), in_use), []);
        let gone = Link::External(places.external_number(gid("127.0.2.9")));
        assert_eq!(places.handle_update(settings(&["127.0.0.0/24"]), in_use), [gone]);
        assert_eq!(places.handle_update(settings(&["127.0.0.0/24"]), in_use), [], "it is gone already");
    }
}
