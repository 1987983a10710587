//! Places: which host has each declared vNIC, so that its address goes with it.
//!
//! A controller gives a vNIC to a host that asks for it and takes it from none that has not let it go; an operator may
//! do otherwise. The revision of a place is its generation: a host's word about letting go counts for the place of that
//! revision alone, so that none that is late takes anything away, or keeps it.
use crate::ClusterError;
use crate::file::ClusterFile;
use crate::records::Place;
use crate::turns::{WRITE_COUNT_MAX, commit, serial_in};
use crate::view::{Places, View, places_in, state_of};
use freeflow_orchestrator::objects::{AnyObject, ObjectKind, Typed, Vnic};
use freeflow_orchestrator::{Reason, Refusal, Revision, State, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

fn is_allowed(vnic: &Typed<Vnic>, host: &str) -> bool {
    vnic.spec.hosts.is_empty() || vnic.spec.hosts.iter().any(|allowed| allowed == host)
}

/// Whether the host of a place has let the vNIC go.
fn is_released(view: &View, name: &str, (at, place): &(Revision, Place)) -> bool {
    let held = view.followed().get(&place.host).and_then(|followed| followed.vnics.get(name));
    held.is_some_and(|held| held.released && held.at == at.0)
}

/// Claims of all hosts by vNIC: the number of each, with its host.
#[derive(Default)]
pub struct ClaimsOf<'a>(BTreeMap<&'a str, Vec<(u64, &'a String)>>);

impl<'a> ClaimsOf<'a> {
    /// All that there are.
    pub fn all(view: &'a View) -> Self {
        let mut all = Self::default();
        for host in view.hosts().keys() {
            for (name, number) in view.followed().get(host).into_iter().flat_map(|followed| &followed.claims) {
                all.0.entry(name).or_default().push((*number, host));
            }
        }
        all
    }

    /// The oldest claim for a vNIC, of a host that may have it, and is not `but`.
    pub fn first(&self, vnic: &Typed<Vnic>, but: Option<&str>) -> Option<(u64, &'a String)> {
        let claims = self.0.get(vnic.metadata.name.as_str())?.iter().copied();
        claims.filter(|(_, host)| is_allowed(vnic, host) && but != Some(host.as_str())).min()
    }

    /// Whether there is one.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

/// The hosts that say that they have a vNIC: where no place says so, places were lost with what a backup has not.
fn holders_by_their_word(view: &View) -> BTreeMap<&str, &String> {
    let mut holders = BTreeMap::new();
    for host in view.hosts().keys() {
        let held = view.followed().get(host).into_iter().flat_map(|followed| &followed.vnics);
        for (name, _) in held.filter(|(_, held)| !held.released) {
            holders.entry(name.as_str()).or_insert(host);
        }
    }
    holders
}

fn vnics_of(declared: &State) -> BTreeMap<String, Typed<Vnic>> {
    let vnic = |object| match object {
        AnyObject::Vnic(vnic) => Some((vnic.metadata.name.clone(), vnic)),
        _ => None,
    };
    declared.objects(ObjectKind::Vnic).filter_map(vnic).collect()
}

/// Places to be written (`Some`), and those that are over.
pub fn due_places(view: &View, declared: &State, places: &Places) -> Vec<(String, Option<Place>)> {
    let (vnics, mut writes) = (vnics_of(declared), Vec::new());
    let (claims, holders) = (ClaimsOf::all(view), holders_by_their_word(view));
    let first_claimant = |vnic: &Typed<Vnic>| claims.first(vnic, None).map(|(_, host)| host);
    for (name, vnic) in &vnics {
        let there = places.get(name);
        let addresses = vnic.spec.addresses.clone();
        let host = match there {
            None => holders.get(name.as_str()).copied().or_else(|| first_claimant(vnic)),
            Some(place) if !is_released(view, name, place) => None,
            Some((_, Place { next: Some(next), .. })) if view.hosts().contains_key(next) => Some(next),
            // A new vNIC of the name.
            Some((_, place)) if place.addresses != addresses => {
                writes.push((name.clone(), None));
                continue;
            }
            Some(_) => first_claimant(vnic),
        };
        let moved = there.is_some_and(|(_, place)| place.next.as_ref() == host && host.is_some());
        let place = |host: &String| Place { host: host.clone(), next: None, moved, addresses };
        writes.extend(host.map(place).map(|place| (name.clone(), Some(place))));
    }
    for (name, place) in places.iter().filter(|(name, _)| !vnics.contains_key(*name)) {
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
/// etcd did not do it.
pub(crate) fn release(file: &ClusterFile, host: &str) -> Result<usize, ClusterError> {
    let mut store = file.store(&file.keys().places())?;
    let mut count = 0;
    loop {
        let listing = store.list("", None)?;
        let of_host = places_in(&listing.entries).into_iter().filter(|(_, (_, place))| place.host == host);
        let writes: Vec<_> = of_host.take(WRITE_COUNT_MAX).map(|(name, _)| (name, None)).collect();
        let released = writes.len();
        if commit(&mut store, writes.into_iter().map(encoded), serial_in(&listing.entries))? {
            count += released;
            if released < WRITE_COUNT_MAX {
                return Ok(count);
            }
        }
    }
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
    let mut store = file.store(&file.keys().places())?;
    loop {
        let listing = store.list("", None)?;
        let declared = vnics_of(&state_of(file.store(&file.keys().declared())?.list("", None)?)?);
        let Some(vnic) = declared.get(name) else {
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
