//! Places: which host has each declared vNIC, so that its address goes with it.
//!
//! A controller gives a vNIC to a host that asks for it and takes it from none that has not let it go; an operator may
//! do otherwise. The revision of a place is its generation: a host's word about letting go counts for the place of that
//! revision alone, so that none that is late takes anything away, or keeps it.
use crate::ClusterError;
use crate::file::ClusterFile;
use crate::follow::CLAIM_TIME;
use crate::records::{PLACE_COUNT_MAX, Place};
use crate::turns::{Guard, WRITE_COUNT_MAX, change_in_turns, commit, delete_in_turns, part, serial_in};
use crate::view::{Places, View, places_in, state_of};
use freeflow_orchestrator::objects::{ObjectKind, Typed, Vnic};
use freeflow_orchestrator::{Reason, Refusal, Revision, State, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

fn is_allowed(vnic: &Typed<Vnic>, host: &str) -> bool {
    vnic.spec.hosts.is_empty() || vnic.spec.hosts.iter().any(|allowed| allowed == host)
}

/// Whether the host of a place has let the vNIC go.
fn is_released(view: &View, name: &str, (at, place): &(Revision, Place)) -> bool {
    let held = view.holdings_of(&place.host).and_then(|holdings| holdings.vnics.get(name));
    held.is_some_and(|held| held.released && held.at == at.0)
}

/// Claims of all hosts by vNIC: the number of each, with its host.
#[derive(Default)]
pub struct ClaimsOf<'a>(BTreeMap<&'a str, Vec<(u64, &'a String)>>);

impl<'a> ClaimsOf<'a> {
    /// All that there are, of hosts that say so still, and are not drained.
    pub fn all(view: &'a View) -> Self {
        let mut all = Self::default();
        let counts = |host: &&String| view.silence(host) < CLAIM_TIME && !view.drained().contains_key(*host);
        for host in view.hosts().keys().filter(counts) {
            for (name, number) in view.holdings_of(host).into_iter().flat_map(|holdings| &holdings.claims) {
                all.0.entry(name).or_default().push((*number, host));
            }
        }
        all
    }

    /// Claims for a vNIC, of hosts that may have it, and are not `but`; the oldest first.
    pub fn of(&self, vnic: &Typed<Vnic>, but: Option<&str>) -> Vec<(u64, &'a String)> {
        let claims = self.0.get(vnic.metadata.name.as_str()).into_iter().flatten().copied();
        let mut claims: Vec<_> =
            claims.filter(|(_, host)| is_allowed(vnic, host) && but != Some(host.as_str())).collect();
        claims.sort_unstable();
        claims
    }

    /// Whether there is one.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

/// vNICs that hosts say they have: the revision of the place by which, and the host.
fn held_by_word(view: &View) -> BTreeMap<&str, Vec<(u64, &String)>> {
    let mut all = BTreeMap::<&str, Vec<(u64, &String)>>::new();
    // Of hosts without a record, too: a backup can be older than theirs.
    for (host, (_, holdings)) in view.holdings().iter().filter(|(host, _)| !view.is_reclaimed(host)) {
        for (name, held) in holdings.vnics.iter().filter(|(_, held)| !held.released) {
            all.entry(name.as_str()).or_default().push((held.at, host));
        }
    }
    all
}

/// The next place of a vNIC, if another one is due.
struct Deciding<'a> {
    view: &'a View,
    claims: ClaimsOf<'a>,
    held: BTreeMap<&'a str, Vec<(u64, &'a String)>>,
    /// Of each host.
    counts: BTreeMap<String, usize>,
}

impl<'a> Deciding<'a> {
    fn new(view: &'a View, places: &Places) -> Self {
        let mut counts = BTreeMap::new();
        for (_, place) in places.values() {
            *counts.entry(place.host.clone()).or_default() += 1;
        }
        let held = if view.restored_at().0 > 0 { held_by_word(view) } else { BTreeMap::new() };
        Self { view, claims: ClaimsOf::all(view), held, counts }
    }

    fn claimant(&self, vnic: &Typed<Vnic>) -> Option<&'a String> {
        let has_room = |host: &String| self.counts.get(host).is_none_or(|count| *count < PLACE_COUNT_MAX);
        self.claims.of(vnic, None).into_iter().map(|(_, host)| host).find(|host| has_room(host))
    }

    /// The host that has it by its own word, under the latest place.
    fn holder(&self, vnic: &Typed<Vnic>) -> Option<&'a String> {
        let held = self.held.get(vnic.metadata.name.as_str())?.iter().copied();
        held.filter(|(_, host)| is_allowed(vnic, host)).max_by_key(|(at, _)| *at).map(|(_, host)| host)
    }

    fn next(&self, name: &str, vnic: &Typed<Vnic>, there: Option<&(Revision, Place)>) -> Option<Option<Place>> {
        let restored_at = self.view.restored_at();
        let addresses = vnic.spec.addresses.clone();
        let at = |host: &String, moved| {
            Some(Some(Place { host: host.clone(), next: None, moved, addresses: addresses.clone() }))
        };
        match there {
            // Declared before etcd was restored: its place may have been lost.
            None => {
                let is_of_backup = vnic.metadata.resource_version.unwrap_or_default() < restored_at.0;
                let holder = self.holder(vnic).filter(|_| is_of_backup);
                at(holder.or_else(|| self.claimant(vnic))?, false)
            }
            // As it was when the backup was made. A place that is written now is as it is.
            Some((revision, place)) if *revision < restored_at => at(self.holder(vnic).unwrap_or(&place.host), false),
            Some(place) if !is_released(self.view, name, place) => None,
            Some((_, Place { next: Some(next), .. })) if self.view.hosts().contains_key(next) => at(next, true),
            // A new vNIC of the name.
            Some((_, place)) if place.addresses != addresses => Some(None),
            Some(_) => at(self.claimant(vnic)?, false),
        }
    }
}

/// Places to be written (`Some`), and those that are over.
pub fn due_places(view: &View, declared: &State, places: &Places) -> Vec<(String, Option<Place>)> {
    let mut writes = Vec::new();
    let mut deciding = Deciding::new(view, places);
    for vnic in declared.vnics().map(|entry| &entry.object) {
        let name = &vnic.metadata.name;
        if let Some(next) = deciding.next(name, vnic, places.get(name)) {
            if let Some(place) = &next {
                *deciding.counts.entry(place.host.clone()).or_default() += 1;
            }
            writes.push((name.clone(), next));
        }
    }
    for (name, place) in places.iter().filter(|(name, _)| declared.vnic(name).is_none()) {
        if is_released(view, name, place) || !view.hosts().contains_key(&place.1.host) {
            writes.push((name.clone(), None));
        }
    }
    writes
}

/// Gives vNICs to hosts, as controllers do.
///
/// # Errors
/// etcd did not do it, or what is there makes no sense.
pub fn place_vnics(file: &ClusterFile, view: &View) -> Result<(), ClusterError> {
    if due_places(view, &view.declared()?, view.places()).is_empty() {
        return Ok(());
    }
    let mut store = file.store(&file.keys().places())?;
    let listing = store.list("", None)?;
    let serial = serial_in(&listing.entries);
    if serial > Some(view.revision()) {
        // A host may have been removed: news of that come first.
        return Ok(());
    }
    // Later than the places, so that nothing is placed that was deleted before.
    let declared = state_of(file.store(&file.keys().declared())?.list("", None)?)?;
    let writes = due_places(view, &declared, &places_in(&listing.entries));
    commit(&mut store, writes.into_iter().take(WRITE_COUNT_MAX).map(encoded), serial)?;
    Ok(())
}

fn encoded((name, place): (String, Option<Place>)) -> (String, Option<Vec<u8>>) {
    (name, place.map(|place| serde_json::to_vec(&place).expect("a place is encodable")))
}

/// The places of a host that is gone for good are over. How many there were.
///
/// # Errors
/// etcd did not do it, or the guard forbids it.
pub(crate) fn release(file: &ClusterFile, host: &str, guard: Option<Guard<'_>>) -> Result<usize, ClusterError> {
    let mut store = part(file, &file.keys().places(), guard)?;
    delete_in_turns(&mut store, |entries| {
        let of_host = places_in(entries).into_iter().filter(|(_, (_, place))| place.host == host);
        of_host.map(|(name, _)| name).collect()
    })
}

/// The places of a host that is silent are taken from it: a vNIC that an operator moves is its next host's, another one
/// nobody's. How many there were.
///
/// # Errors
/// etcd did not do it, or the guard forbids it.
pub(crate) fn reclaim(file: &ClusterFile, view: &View, host: &str, guard: Guard<'_>) -> Result<usize, ClusterError> {
    let mut store = part(file, &file.keys().places(), Some(guard))?;
    change_in_turns(&mut store, |entries| {
        let of_host = places_in(entries).into_iter().filter(|(_, (_, place))| place.host == host);
        let after = |(name, (_, place)): (String, (Revision, Place))| {
            let next = place.next.clone().filter(|next| next != host && view.hosts().contains_key(next));
            encoded((name, next.map(|host| Place { host, next: None, moved: true, ..place })))
        };
        of_host.map(after).collect()
    })
}

/// An operator's move of a vNIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The host that has it until now.
    pub from: Option<String>,
    /// Since this revision it is on its way, or there.
    pub at: Revision,
}

/// Moves a vNIC to a host: when the one that has it has let it go, or at once, by `force`: what that host does with it
/// from then on is believed by nobody who has heard of it.
///
/// # Errors
/// `Refused`; or etcd did not do it.
pub(crate) fn move_vnic(
    file: &ClusterFile,
    view: &View,
    (name, to): (&str, &str),
    force: bool,
) -> Result<Move, ClusterError> {
    let refused = |reason, why: String| Err(Refusal::new(reason, why).about(ObjectKind::Vnic, name).into());
    if !view.hosts().contains_key(to) {
        let hosts: Vec<&str> = view.hosts().keys().map(String::as_str).collect();
        return refused(Reason::NotFound, format!("no host {to} is in the cluster; there are: {}", hosts.join(", ")));
    }
    if let Some(drained) = view.drained().get(to) {
        return refused(Reason::Forbidden, format!("the host {to} was drained by {}", drained.by));
    }
    let mut store = file.store(&file.keys().places())?;
    loop {
        let listing = store.list("", None)?;
        let declared = state_of(file.store(&file.keys().declared())?.list("", None)?)?;
        let Some(vnic) = declared.vnic(name).map(|entry| &entry.object) else {
            return refused(Reason::NotFound, "the cluster declares none of this name".into());
        };
        if !is_allowed(vnic, to) {
            return refused(Reason::Forbidden, format!("its spec.hosts has no {to}"));
        }
        let there = places_in(&listing.entries).remove(name);
        let from = there.as_ref().map(|(_, place)| place.host.clone());
        let addresses = vnic.spec.addresses.clone();
        let place = match there {
            Some((at, place)) if place.host == to && place.next.is_none() => return Ok(Move { from, at }),
            Some((_, place)) if place.host != to && !force => Place { next: Some(to.into()), ..place },
            _ => Place { host: to.into(), next: None, moved: true, addresses },
        };
        if commit(&mut store, [encoded((name.into(), Some(place)))], serial_in(&listing.entries))? {
            let at = store.get(name, None)?.map(|entry| entry.modified).unwrap_or_default();
            return Ok(Move { from, at });
        }
    }
}

/// The vNIC of another name, or the former one of this name, whose addresses a vNIC that is declared asks for: a host
/// may have it still.
pub(crate) fn holder_of(places: &Places, name: &str, addresses: &[IpAddr]) -> Option<(String, String)> {
    let asked: BTreeSet<&IpAddr> = addresses.iter().collect();
    let has_it = |(other, (_, place)): &(&String, &(Revision, Place))| {
        let is_same = other.as_str() == name && place.addresses == addresses;
        !is_same && (other.as_str() == name || place.addresses.iter().any(|address| asked.contains(address)))
    };
    places.iter().find(has_it).map(|(other, (_, place))| (other.clone(), place.host.clone()))
}
