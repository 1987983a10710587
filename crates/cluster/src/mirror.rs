//! From the cluster's declaration to what one host has to have, and the way there.
use crate::records::Problem;
use crate::view::View;
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{CLUSTER_KINDS, Pool, State, is_clusters};
use std::collections::{BTreeMap, BTreeSet};

/// Objects that a host is asked to change at once.
const BATCH_COUNT: usize = 500;
/// One round makes possible what the next one does: a network whose range another one had, say.
const ROUND_COUNT: usize = 4;

type Name = (ObjectKind, String);

fn name_of(object: &AnyObject) -> Name {
    (object.kind(), object.name().to_owned())
}

/// The objects that a host has to have.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wanted {
    /// In the order of [`CLUSTER_KINDS`].
    pub objects: Vec<AnyObject>,
    /// Stays as it is, whatever that is.
    pub kept: BTreeSet<Name>,
    /// Objects that can't be had yet.
    pub problems: Vec<Problem>,
}

/// vNICs that a host has let go, by name, each with the revision of its place: until that is another one it has not got
/// them.
pub type Released = BTreeMap<String, u64>;

/// A vNIC's place, as one host sees it.
enum At {
    Here,
    /// Nobody has a place for it: where it is, it stays.
    Unsaid,
    Elsewhere,
}

fn place_of(view: &View, name: &str, host: &str, released: &Released) -> At {
    match view.places().get(name) {
        None => At::Unsaid,
        // Of a backup: where the vNIC is, it stays, until controllers have asked the hosts.
        Some((at, _)) if *at < view.restored_at() => At::Unsaid,
        Some((at, place)) => {
            let is_here = place.host == host && place.next.is_none() && released.get(name) != Some(&at.0);
            if is_here { At::Here } else { At::Elsewhere }
        }
    }
}

impl Wanted {
    /// Of a host: networks have its block for their range, and vNICs are those that it has.
    pub fn of(view: &View, declared: &State, host: &str, released: &Released) -> Self {
        let mut wanted = Self::default();
        for object in CLUSTER_KINDS.into_iter().flat_map(|kind| declared.objects(kind)) {
            let mut object = bare(object);
            if let AnyObject::Network(network) = &mut object {
                let name = network.metadata.name.clone();
                let pool = declared.network(&name).map(|entry| entry.pool);
                match range_in(pool, view.block(&name, host)) {
                    Ok(range) => network.spec.range = Some(range.to_string()),
                    Err(why) => {
                        // A drained host is given none, and needs none.
                        if !(view.drained().contains_key(host) && view.block(&name, host).is_none()) {
                            wanted.problems.push(Problem::about("Network", &name, why));
                        }
                        wanted.kept.insert((ObjectKind::Network, name));
                        continue;
                    }
                }
            }
            if let AnyObject::Vnic(vnic) = &object {
                let name = &vnic.metadata.name;
                match place_of(view, name, host, released) {
                    At::Here => {}
                    At::Unsaid => drop(wanted.kept.insert((ObjectKind::Vnic, name.clone()))),
                    At::Elsewhere => continue,
                }
                if wanted.kept.contains(&(ObjectKind::Vnic, name.clone())) {
                    continue;
                }
            }
            wanted.objects.push(object);
        }
        wanted
    }
}

fn range_in(pool: Option<Pool>, block: Option<Pool>) -> Result<Pool, String> {
    match (pool, block) {
        (Some(pool), Some(block)) if pool.encloses(block) => Ok(block),
        (_, None) => Err("no controller has given this host a block of its addresses yet".into()),
        (_, Some(block)) => Err(format!("this host's block {block} is not a part of it")),
    }
}

/// Labels and spec: the rest is the host's.
fn bare(mut object: AnyObject) -> AnyObject {
    object.clear_status();
    object.metadata_mut().resource_version = None;
    object.metadata_mut().generation = None;
    object
}

/// Ways to change a host.
pub trait Target {
    /// All its objects of a kind; of vNICs those that are the cluster's.
    ///
    /// # Errors
    /// The host does not answer; a sentence for people.
    fn present(&mut self, kind: ObjectKind) -> Result<Vec<AnyObject>, String>;

    /// All of them or none.
    ///
    /// # Errors
    /// A sentence for people.
    fn apply(&mut self, objects: &[AnyObject]) -> Result<(), String>;

    /// One that is there.
    ///
    /// # Errors
    /// A sentence for people.
    fn delete(&mut self, kind: ObjectKind, name: &str) -> Result<(), String>;
}

fn steps(wanted: &Wanted, present: &BTreeMap<Name, AnyObject>) -> (Vec<AnyObject>, Vec<Name>) {
    let differs =
        |object: &&AnyObject| present.get(&name_of(object)).is_none_or(|there| bare(there.clone()) != **object);
    let changes = wanted.objects.iter().filter(differs).cloned().collect();
    let names: BTreeSet<Name> = wanted.objects.iter().map(name_of).collect();
    let is_over = |(kind, name): &&Name| {
        let there = (*kind, name.clone());
        is_clusters(*kind, name) && !names.contains(&there) && !wanted.kept.contains(&there)
    };
    let mut over: Vec<Name> = present.keys().filter(is_over).cloned().collect();
    let rank = |kind: ObjectKind| CLUSTER_KINDS.iter().position(|known| *known == kind);
    over.sort_by_key(|(kind, _)| std::cmp::Reverse(rank(*kind)));
    (changes, over)
}

/// All objects of a host that could be a cluster's.
///
/// # Errors
/// The host does not answer; a sentence for people.
pub fn present_of(target: &mut impl Target) -> Result<BTreeMap<Name, AnyObject>, String> {
    let mut present = BTreeMap::new();
    for kind in CLUSTER_KINDS {
        let objects = target.present(kind)?.into_iter().filter(|object| is_clusters(kind, object.name()));
        present.extend(objects.map(|object| (name_of(&object), object)));
    }
    Ok(present)
}

/// Objects of a host's own that the cluster does not have, or has otherwise: a host that joins would lose them.
pub fn own_objects(wanted: &Wanted, present: &BTreeMap<Name, AnyObject>) -> Vec<Problem> {
    let (changes, over) = steps(wanted, present);
    let changed = changes.iter().map(name_of).filter(|name| present.contains_key(name));
    let why =
        "the host has it of its own, and the cluster has not, or another one: declare it there, or delete it here";
    // Of a network without a block nothing is compared: it may be another one of that name.
    let kept = wanted.kept.iter().filter(|name| present.contains_key(name)).cloned();
    changed.chain(over).chain(kept).map(|(kind, name)| Problem::about(kind.name(), &name, why)).collect()
}

/// Makes the host have what is wanted, as far as it goes; what of it the host refuses.
///
/// # Errors
/// The host does not answer; a sentence for people.
pub fn carry_out(target: &mut impl Target, wanted: &Wanted) -> Result<Vec<Problem>, String> {
    let mut problems = Vec::new();
    for _ in 0..ROUND_COUNT {
        let (changes, over) = steps(wanted, &present_of(target)?);
        problems.clear();
        if changes.is_empty() && over.is_empty() {
            break;
        }
        // With one bad object among them they are tried one by one.
        let (mut alone, mut is_progress) = (Vec::new(), false);
        for batch in changes.chunks(BATCH_COUNT) {
            match target.apply(batch) {
                Ok(()) => is_progress = true,
                Err(_) => alone.extend(batch),
            }
        }
        let mut note = |(kind, name): Name, done: Result<(), String>| match done {
            Ok(()) => is_progress = true,
            Err(why) => problems.push(Problem::about(kind.name(), &name, why)),
        };
        for object in alone {
            note(name_of(object), target.apply(std::slice::from_ref(object)));
        }
        for (kind, name) in over {
            let done = target.delete(kind, &name);
            note((kind, name), done);
        }
        if !is_progress {
            break;
        }
    }
    Ok(wanted.problems.iter().cloned().chain(problems).collect())
}
