//! Which host has which address, and which hosts have members of which multicast group, as they announced it.
//!
//! Invariant: an address has at most one owner. Of several hosts that announce it the first keeps
//! it until it withdraws it; then the next has it. An address of this very host is nobody else's. A host that announces
//! an address outside its prefixes does not have it, and has it when they are others: an announcement is made once.
use super::prefix::Prefixes;
use super::update::Update;
use freeflow_engine::HostId;
use freeflow_orchestrator::name_is_good;
use freeflow_protocol::peer::PeerMessage;
use freeflow_verbs::{Gid, NetworkId, Qpn};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Announcements of one host.
pub const CLAIM_COUNT_MAX: usize = 131_072;

/// An announcement is about one of these.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClaimSubject {
    Address { network: String, gid: Gid },
    Group { network: String, gid: Gid },
}

impl fmt::Display for ClaimSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Address { network, gid } | Self::Group { network, gid }) = self;
        write!(f, "{gid} in network {network:?}")
    }
}

impl ClaimSubject {
    pub fn network(&self) -> &str {
        let (Self::Address { network, .. } | Self::Group { network, .. }) = self;
        network
    }

    /// Whether a host may announce it, wherever its addresses are; else why not.
    pub fn check(&self, qpn: Option<Qpn>) -> Result<(), &'static str> {
        if !name_is_good(self.network()) {
            return Err("no name of a network");
        }
        match self {
            Self::Address { gid, .. } if gid.is_multicast() || gid.is_zero() => Err("no address of a vNIC"),
            Self::Group { gid, .. } if !gid.is_multicast() => Err("no multicast group"),
            Self::Group { .. } if qpn.is_some_and(|qpn| qpn.0 > Qpn::MASK) => Err("no QPN"),
            _ => Ok(()),
        }
    }

    /// Whether it is within these prefixes, if it is an address.
    pub fn is_within(&self, prefixes: &Prefixes) -> bool {
        match self {
            Self::Address { gid, .. } => prefixes.contains(*gid),
            Self::Group { .. } => true,
        }
    }

    pub fn announcement(&self, qpn: Option<Qpn>) -> PeerMessage {
        match self.clone() {
            Self::Address { network, gid } => PeerMessage::Attach { network, gid },
            Self::Group { network, gid } => PeerMessage::Group { network, gid, qpn },
        }
    }

    pub fn withdrawal(&self) -> PeerMessage {
        match self.clone() {
            Self::Address { network, gid } => PeerMessage::Detach { network, gid },
            Self::Group { network, gid } => PeerMessage::Group { network, gid, qpn: None },
        }
    }

    /// `network` is the number of the subject's network here.
    fn update(&self, network: NetworkId, host: Option<HostId>, qpn: Option<Qpn>) -> Option<Update> {
        Some(match *self {
            Self::Address { gid, .. } => Update::Route { network, gid, host },
            Self::Group { gid, .. } => Update::Group { host: host?, network, gid, qpn },
        })
    }
}

struct Claim {
    qpn: Option<Qpn>,
    /// Announced over an earlier connection, and not yet again over this one.
    is_stale: bool,
    /// Within the host's prefixes.
    is_allowed: bool,
}

pub const OUTSIDE: &str = "outside the host's prefixes";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Here,
    Host(HostId),
}

pub type Networks = BTreeMap<String, NetworkId>;

#[derive(Default)]
pub struct Claims {
    of_hosts: BTreeMap<HostId, BTreeMap<ClaimSubject, Claim>>,
    owners: BTreeMap<ClaimSubject, Owner>,
    /// Hosts that announce an address of theirs which another one has.
    waiting: BTreeMap<ClaimSubject, BTreeSet<HostId>>,
    /// Of `owners`, by host.
    route_counts: BTreeMap<HostId, u32>,
}

impl Claims {
    /// Whether a host has the address, and whether this one has.
    pub fn is_owner(&self, host: HostId, subject: &ClaimSubject) -> bool {
        self.owners.get(subject) == Some(&Owner::Host(host))
    }

    pub fn is_local(&self, subject: &ClaimSubject) -> bool {
        self.owners.get(subject) == Some(&Owner::Here)
    }

    /// Whether a host has announced it, whoever has it.
    pub fn is_announced(&self, host: HostId, subject: &ClaimSubject) -> bool {
        self.of_hosts.get(&host).is_some_and(|claims| claims.contains_key(subject))
    }

    /// Addresses that a host has.
    pub fn route_count(&self, host: HostId) -> u32 {
        self.route_counts.get(&host).copied().unwrap_or_default()
    }

    fn set_owner(&mut self, subject: &ClaimSubject, owner: Option<Owner>) {
        let before = match owner {
            Some(owner) => self.owners.insert(subject.clone(), owner),
            None => self.owners.remove(subject),
        };
        if let Some(Owner::Host(host)) = before
            && let Some(count) = self.route_counts.get_mut(&host)
        {
            *count -= 1;
            if *count == 0 {
                self.route_counts.remove(&host);
            }
        }
        if let Some(Owner::Host(host)) = owner {
            *self.route_counts.entry(host).or_default() += 1;
        }
    }

    /// A host announces an address that it may have, and another one has it; or it is not so any more.
    fn set_waiting(&mut self, subject: &ClaimSubject, host: HostId, waits: bool) {
        if waits {
            self.waiting.entry(subject.clone()).or_default().insert(host);
        } else if let Some(hosts) = self.waiting.get_mut(subject) {
            hosts.remove(&host);
            if hosts.is_empty() {
                self.waiting.remove(subject);
            }
        }
    }

    /// A host with these prefixes announces something that can be announced. The update for the worker, if there is
    /// one; or why it is refused.
    pub fn claim(
        &mut self,
        host: HostId,
        (subject, qpn): (ClaimSubject, Option<Qpn>),
        prefixes: &Prefixes,
        networks: &Networks,
    ) -> Result<Option<Update>, &'static str> {
        let is_allowed = subject.is_within(prefixes);
        let claims = self.of_hosts.entry(host).or_default();
        if claims.len() >= CLAIM_COUNT_MAX && !claims.contains_key(&subject) {
            return Err("the host has announced too much");
        }
        let before = claims.insert(subject.clone(), Claim { qpn, is_stale: false, is_allowed });
        if !is_allowed {
            return Err(OUTSIDE);
        }
        let network = networks.get(subject.network()).copied();
        match subject {
            ClaimSubject::Address { .. } => {
                let owner = self.owners.get(&subject).copied();
                match owner {
                    None => self.set_owner(&subject, Some(Owner::Host(host))),
                    Some(owner) if owner != Owner::Host(host) => self.set_waiting(&subject, host, true),
                    Some(_) => {}
                }
                match owner {
                    Some(Owner::Host(owner)) if owner != host => Err("another host has it"),
                    Some(Owner::Here) => Err("it is on this host"),
                    _ => {
                        let is_new = before.is_none();
                        Ok(network.filter(|_| is_new).and_then(|network| subject.update(network, Some(host), None)))
                    }
                }
            }
            ClaimSubject::Group { .. } => {
                let is_new = before.is_none_or(|before| before.qpn != qpn);
                Ok(network.filter(|_| is_new).and_then(|network| subject.update(network, Some(host), qpn)))
            }
        }
    }

    /// A host withdraws it.
    pub fn release(&mut self, host: HostId, subject: &ClaimSubject, networks: &Networks) -> Option<Update> {
        self.of_hosts.get_mut(&host)?.remove(subject)?;
        let network = networks.get(subject.network()).copied();
        match subject {
            ClaimSubject::Group { .. } => subject.update(network?, Some(host), None),
            ClaimSubject::Address { .. } if self.owners.get(subject) == Some(&Owner::Host(host)) => {
                let next = self.pass_on(subject);
                subject.update(network?, next, None)
            }
            ClaimSubject::Address { .. } => {
                self.set_waiting(subject, host, false);
                None
            }
        }
    }

    /// A host's prefixes are these now. Updates for the worker.
    pub fn allow(&mut self, host: HostId, prefixes: &Prefixes, networks: &Networks) -> Vec<Update> {
        let changed: Vec<ClaimSubject> = (self.of_hosts.get_mut(&host).into_iter().flatten())
            .filter_map(|(subject, claim)| {
                let is_allowed = subject.is_within(prefixes);
                (std::mem::replace(&mut claim.is_allowed, is_allowed) != is_allowed).then(|| subject.clone())
            })
            .collect();
        let change = |subject: &ClaimSubject| {
            let (before, is_allowed) = (self.owners.get(subject).copied(), subject.is_within(prefixes));
            let after = match before {
                Some(Owner::Host(owner)) if owner == host => self.pass_on(subject),
                None if is_allowed => {
                    self.set_owner(subject, Some(Owner::Host(host)));
                    Some(host)
                }
                _ => {
                    self.set_waiting(subject, host, is_allowed);
                    return None;
                }
            };
            subject.update(networks.get(subject.network()).copied()?, after, None)
        };
        changed.iter().filter_map(change).collect()
    }

    /// Addresses that a host has, in networks that are here.
    pub fn owned(&self, host: HostId, networks: &Networks) -> Vec<(NetworkId, Gid)> {
        let owned = self.of_hosts.get(&host).into_iter().flat_map(|claims| claims.keys());
        let owned = owned.filter(|subject| self.is_owner(host, subject));
        let place = |subject: &ClaimSubject| match subject {
            ClaimSubject::Address { network, gid } => Some((*networks.get(network)?, *gid)),
            ClaimSubject::Group { .. } => None,
        };
        owned.filter_map(place).collect()
    }

    /// Its owner is gone: another host that announces it, and may, has it now.
    fn pass_on(&mut self, subject: &ClaimSubject) -> Option<HostId> {
        let next = self.waiting.get(subject).and_then(|hosts| hosts.first().copied());
        self.set_owner(subject, next.map(Owner::Host));
        if let Some(host) = next {
            self.set_waiting(subject, host, false);
        }
        next
    }

    /// An address came to this host, or left it.
    pub fn set_local(&mut self, subject: &ClaimSubject, present: bool, networks: &Networks) -> Option<Update> {
        let network = networks.get(subject.network()).copied();
        match (present, self.owners.get(subject).copied()) {
            (true, before) => {
                self.set_owner(subject, Some(Owner::Here));
                // It was another's: no more.
                if let Some(Owner::Host(host)) = before {
                    self.set_waiting(subject, host, true);
                }
                matches!(before, Some(Owner::Host(_))).then(|| subject.update(network?, None, None))?
            }
            (false, Some(Owner::Here)) => {
                let next = self.pass_on(subject)?;
                subject.update(network?, Some(next), None)
            }
            (false, _) => None,
        }
    }

    /// A connection of the host begins: what it does not announce again by [`Self::end_sync`] is gone.
    pub fn begin_sync(&mut self, host: HostId) {
        for claim in self.of_hosts.get_mut(&host).into_iter().flat_map(BTreeMap::values_mut) {
            claim.is_stale = true;
        }
    }

    pub fn end_sync(&mut self, host: HostId, networks: &Networks) -> Vec<Update> {
        self.release_all(host, |claim| claim.is_stale, networks)
    }

    /// The host is gone, or is another.
    pub fn forget(&mut self, host: HostId, networks: &Networks) -> Vec<Update> {
        let updates = self.release_all(host, |_| true, networks);
        self.of_hosts.remove(&host);
        updates
    }

    fn release_all(&mut self, host: HostId, which: impl Fn(&Claim) -> bool, networks: &Networks) -> Vec<Update> {
        let claims = self.of_hosts.get(&host).into_iter().flatten();
        let gone: Vec<ClaimSubject> =
            claims.filter(|(_, claim)| which(claim)).map(|(subject, _)| subject.clone()).collect();
        gone.iter().filter_map(|subject| self.release(host, subject, networks)).collect()
    }

    /// All that is announced of a network that is new here, or that `is_here` no more.
    pub fn of_network(&self, name: &str, network: NetworkId, is_here: bool) -> Vec<Update> {
        let (first, last, name) = (Gid([0; 16]), Gid([0xff; 16]), || name.to_owned());
        let address = |gid| ClaimSubject::Address { network: name(), gid };
        let group = |gid| ClaimSubject::Group { network: name(), gid };
        let (addresses, groups) = ([address(first), address(last)], [group(first), group(last)]);
        let all = self.of_hosts.iter().flat_map(|(host, claims)| {
            let of_name = [&addresses, &groups].map(|[first, last]| claims.range(first..=last));
            of_name.into_iter().flatten().map(move |claim| (host, claim))
        });
        all.filter(|(host, (subject, _))| {
            let is_owner = self.owners.get(subject) == Some(&Owner::Host(**host));
            is_owner || matches!(subject, ClaimSubject::Group { .. })
        })
        .filter_map(|(host, (subject, claim))| {
            let is_group = matches!(subject, ClaimSubject::Group { .. });
            subject.update(network, (is_here || is_group).then_some(*host), claim.qpn.filter(|_| is_here))
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tables that are kept beside the announcements say what these say.
    fn check(claims: &Claims) {
        for (host, of_host) in &claims.of_hosts {
            let owned = of_host.keys().filter(|subject| claims.is_owner(*host, subject)).count();
            assert_eq!(claims.route_count(*host) as usize, owned);
            for (subject, claim) in of_host {
                let is_address = matches!(subject, ClaimSubject::Address { .. });
                let waits = is_address && claim.is_allowed && !claims.is_owner(*host, subject);
                let is_waiting = claims.waiting.get(subject).is_some_and(|hosts| hosts.contains(host));
                assert_eq!(is_waiting, waits, "{host:?} {subject}");
                assert!(!waits || claims.owners.contains_key(subject), "somebody has it");
            }
        }
        let announced = |(subject, hosts): (&ClaimSubject, &BTreeSet<HostId>)| {
            !hosts.is_empty() && hosts.iter().all(|host| claims.is_announced(*host, subject))
        };
        assert!(claims.waiting.iter().all(announced));
        let owned = |(subject, owner): (&ClaimSubject, &Owner)| match owner {
            Owner::Here => true,
            Owner::Host(host) => claims.of_hosts[host].get(subject).is_some_and(|claim| claim.is_allowed),
        };
        assert!(claims.owners.iter().all(owned));
    }

    #[test]
    fn owners_and_those_who_wait_are_as_the_announcements_say_whatever_happens() {
        let (mut claims, mut random) = (Claims::default(), 1_u64);
        let networks: Networks = [("a".to_owned(), NetworkId(1))].into();
        let narrow: Prefixes = ["10.0.0.0/31".parse().unwrap()].into_iter().collect();
        let wide: Prefixes = ["10.0.0.0/8".parse().unwrap()].into_iter().collect();
        let mut prefixes = [&wide; 4];
        for _ in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let roll = |shift: u32, sides: u64| (random >> shift) % sides;
            let (place, network) = (roll(33, 4) as usize, if roll(36, 2) == 0 { "a" } else { "b" }.to_owned());
            let (host, gid) = (HostId(place as u32), Gid::from_ip([10, 0, 0, roll(40, 4) as u8].into()));
            let group = Gid::from_ip([239, 0, 0, 1].into());
            let subject = match roll(44, 5) {
                0 => ClaimSubject::Group { network, gid: group },
                _ => ClaimSubject::Address { network, gid },
            };
            match roll(48, 16) {
                0..7 => drop(claims.claim(host, (subject, Some(Qpn(5))), prefixes[place], &networks)),
                7..10 => drop(claims.release(host, &subject, &networks)),
                10 => drop(claims.forget(host, &networks)),
                11 => {
                    prefixes[place] = if roll(52, 2) == 0 { &narrow } else { &wide };
                    claims.allow(host, prefixes[place], &networks);
                }
                12 => claims.begin_sync(host),
                13 => drop(claims.end_sync(host, &networks)),
                _ if matches!(subject, ClaimSubject::Address { .. }) => {
                    drop(claims.set_local(&subject, roll(52, 2) == 0, &networks));
                }
                _ => {}
            }
            check(&claims);
        }
    }
}
