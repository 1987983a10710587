//! The operator's side: what is declared for all hosts is read and changed here, with the operator's own credential.
use crate::ClusterError;
use crate::admission::{is_taken, remove_host, uses_left};
use crate::blocks::{Controller, floating_part};
use crate::file::ClusterFile;
use crate::follow::Follow;
use crate::in_parts::{Name, Partly, checked_parts, is_many, name_of};
use crate::keys::{
    FOLLOWED, HOLDINGS, IDENTITY, RECLAIM_AFTER, RECORD, SERIAL, Scope, drained_key, members_key, vnics_key,
};
use crate::members::MEMBERS_PART_COUNT;
use crate::peers::own_ranges;
use crate::pending::RENEWAL;
use crate::places::{self, Move, holder_of, move_vnic};
use crate::records::{Drained, FULL_MESH_COUNT, Identity, RECLAIM_AFTER_S, VERSION, is_host_name, now_s};
use crate::turns::{part, serial_in, serial_write};
use crate::view::{View, places_in, state_of};
use crate::vnics::VNICS_PART_COUNT;
use freeflow_etcd::{EtcdStore, News};
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::store::{Committed, Compare, Listing, StoreError, Transaction, Write};
use freeflow_orchestrator::{
    CLUSTER_KINDS, Change, Cidr, Command, DEFAULT_NETWORK, Outcome, Pool, Reason, Refusal, Revision, State, Store,
    Writer, is_clusters,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// Others may change what is declared at the same time: so often it is begun again.
const ATTEMPT_COUNT: usize = 8;
const VIEW_TIME: Duration = Duration::from_secs(20);

/// A controller finishes the removal of a host in this time, if one is up.
const REMOVAL_TIME: Duration = Duration::from_secs(10);

/// A host that was removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// Blocks of addresses that are free again, or will be.
    pub blocks: usize,
    /// No controller has taken its user out of etcd yet: until then it can write itself back, and has its blocks.
    pub is_pending: bool,
    /// It was admitted by nobody: a user in etcd that it may have was made by hand, and stays.
    pub is_by_hand: bool,
    /// The token that it came by, and how many hosts can still join by that, if any.
    pub token: Option<(String, u32)>,
}

/// Reads and changes what is declared for all hosts.
pub struct Operator {
    file: ClusterFile,
    store: EtcdStore,
}

impl Operator {
    /// Makes the cluster's identity, if there is none; and whether there was none.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn init(file: &ClusterFile, id: &str) -> Result<(Identity, bool), ClusterError> {
        Self::init_with(file, id, None, FULL_MESH_COUNT, None)
    }

    /// The same, with the addresses of the network `default`, the number of hosts up to which all are peers, and the
    /// time after which blocks of silent hosts are taken back.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn init_with(
        file: &ClusterFile,
        id: &str,
        pool: Option<Pool>,
        full_mesh: u32,
        reclaim_after_s: Option<u64>,
    ) -> Result<(Identity, bool), ClusterError> {
        let mut store = file.store(&file.keys().cluster())?;
        let pool = pool.map(|pool| pool.to_string());
        let identity = Identity { id: id.into(), version: VERSION, restored: 0, pool, full_mesh };
        let value = serde_json::to_vec(&identity).expect("an identity is encodable");
        let transaction = Transaction {
            compares: vec![Compare { key: IDENTITY.into(), modified: None }],
            writes: vec![
                Write { key: IDENTITY.into(), value: Some(value), lease: None },
                reclaim_after(reclaim_after_s)?,
            ],
        };
        match store.commit(&transaction)? {
            Committed::Done(_) => Ok((identity, true)),
            Committed::Conflict(_) => Ok((identity_in(file, &store)?, false)),
        }
    }

    /// Has hosts follow an etcd whose revisions have gone back, since it was restored from a backup.
    ///
    /// # Errors
    /// `Absent`, or etcd did not do it.
    pub fn restored(file: &ClusterFile) -> Result<(), ClusterError> {
        let mut store = file.store(&file.keys().cluster())?;
        let identity = identity_in(file, &store)?;
        // Also more than in a backup from before the last one.
        let identity = Identity { restored: now_s().max(identity.restored + 1), ..identity };
        let value = serde_json::to_vec(&identity).expect("an identity is encodable");
        let writes = vec![Write { key: IDENTITY.into(), value: Some(value), lease: None }];
        store.commit(&Transaction { compares: Vec::new(), writes })?;
        Ok(())
    }

    /// Blocks of a host that is silent for so long are taken back from now on, seconds; `None`: never. Of a host that
    /// has not heard of a shorter time, the longer one counts.
    ///
    /// # Errors
    /// `Refused`: no such time. `Absent`, or etcd did not do it.
    pub fn set_reclaim_after(file: &ClusterFile, seconds: Option<u64>) -> Result<(), ClusterError> {
        let mut store = file.store(&file.keys().cluster())?;
        identity_in(file, &store)?;
        store.commit(&Transaction { compares: Vec::new(), writes: vec![reclaim_after(seconds)?] })?;
        Ok(())
    }

    /// Of a cluster that there is.
    ///
    /// # Errors
    /// `Absent`, or etcd does not answer.
    pub fn open(file: &ClusterFile) -> Result<Self, ClusterError> {
        let keys = file.keys();
        identity_in(file, &file.store(&keys.cluster())?)?;
        Ok(Self { store: file.store(&keys.declared())?, file: file.clone() })
    }

    fn listing(&self) -> Result<(Listing, Option<Revision>), ClusterError> {
        let listing = self.store.list("", None)?;
        let serial = serial_in(&listing.entries);
        Ok((listing, serial))
    }

    /// All that is declared.
    ///
    /// # Errors
    /// etcd does not answer, or what it has makes no sense.
    pub fn state(&self) -> Result<State, ClusterError> {
        state_of(self.listing()?.0)
    }

    /// Does a command for all hosts, or says what it would come to. What objects were, or are then, and the revision.
    ///
    /// # Errors
    /// `Refused`; or etcd did not do it. `Partly`: of many objects.
    pub fn change(&mut self, command: &Command, dry_run: bool) -> Result<(Revision, Vec<Outcome>), ClusterError> {
        self.change_by(&Writer::Hand, command, dry_run)
    }

    /// The same, by this writer.
    ///
    /// # Errors
    /// `Refused`; or etcd did not do it. `Partly`: of many objects.
    pub fn change_by(
        &mut self,
        writer: &Writer,
        command: &Command,
        dry_run: bool,
    ) -> Result<(Revision, Vec<Outcome>), ClusterError> {
        match command {
            Command::Apply { objects } | Command::ApplyForCluster { objects } if !dry_run && is_many(objects) => {
                self.apply_in_parts(writer, objects)
            }
            _ => self.change_at_once(writer, command, dry_run),
        }
    }

    /// All that is declared, and the results of declaring these besides; nothing is changed.
    fn planned(&self, writer: &Writer, objects: &[AnyObject]) -> Result<(State, Vec<Outcome>), ClusterError> {
        let command = Command::Apply { objects: objects.to_vec() };
        check(&command)?;
        let state = state_of(self.listing()?.0)?;
        let results = state.plan_by(writer, &for_cluster(&state, &command))?.results;
        self.check_networks(&state, &results)?;
        self.check_vnics(&results)?;
        Ok((state, results))
    }

    /// Of objects that are too many for one transaction.
    fn apply_in_parts(
        &mut self,
        writer: &Writer,
        objects: &[AnyObject],
    ) -> Result<(Revision, Vec<Outcome>), ClusterError> {
        let (state, mut results) = self.planned(writer, objects)?;
        let mut revision = state.revision();
        let plan = |state: &State, objects: &[AnyObject]| {
            state.plan_by(writer, &for_cluster(state, &Command::Apply { objects: objects.to_vec() }))
        };
        let parts = checked_parts(state, objects, &results, plan)?;
        let mut done = BTreeMap::<Name, Outcome>::new();
        for (number, part) in parts.iter().enumerate() {
            match self.change_at_once(writer, &Command::Apply { objects: part.clone() }, false) {
                Ok((at, outcomes)) => {
                    revision = at;
                    done.extend(outcomes.into_iter().map(|outcome| ((outcome.kind, outcome.name.clone()), outcome)));
                }
                Err(why) if number == 0 && !is_doubtful(&why) => return Err(why),
                Err(why) => {
                    let doubtful = if is_doubtful(&why) { part.as_slice() } else { &[] };
                    let after = parts[number + 1..].iter().flatten();
                    let left = if doubtful.is_empty() { part.as_slice() } else { &[] };
                    return Err(ClusterError::Partly(Box::new(Partly {
                        done: done.into_keys().collect(),
                        doubtful: doubtful.iter().map(name_of).collect(),
                        left: left.iter().chain(after).map(name_of).collect(),
                        why: why.to_string(),
                    })));
                }
            }
        }
        for outcome in &mut results {
            if let Some(done) = done.remove(&(outcome.kind, outcome.name.clone())) {
                *outcome = done;
            }
        }
        Ok((revision, results))
    }

    /// In one transaction.
    fn change_at_once(
        &mut self,
        writer: &Writer,
        command: &Command,
        dry_run: bool,
    ) -> Result<(Revision, Vec<Outcome>), ClusterError> {
        check(command)?;
        for _ in 0..ATTEMPT_COUNT {
            let (listing, serial) = self.listing()?;
            let revision = listing.revision;
            let state = state_of(listing)?;
            let plan = state.plan_by(writer, &for_cluster(&state, command))?;
            self.check_networks(&state, &plan.results)?;
            self.check_vnics(&plan.results)?;
            if dry_run || plan.writes.is_empty() {
                return Ok((revision, plan.results));
            }
            let mut transaction = state.transaction(&plan);
            // Objects name each other: what is checked is all of what is there.
            transaction.compares.push(Compare { key: SERIAL.into(), modified: serial });
            transaction.writes.push(serial_write());
            let committed = self.store.commit(&transaction).map_err(|error| match error {
                StoreError::TooLarge(why) => ClusterError::from(Refusal::new(
                    Reason::Exhausted,
                    format!("{why}: etcd takes less than it does by default, 128 operations and 1.5 MiB at once"),
                )),
                other => other.into(),
            })?;
            let Committed::Done(revision) = committed else { continue };
            return Ok((revision, plan.into_results(revision)));
        }
        Err(Refusal::new(Reason::Conflict, "others change what is declared all the time; try again").into())
    }

    /// A network's addresses are others' while hosts have blocks of it. And hosts tell each other's addresses apart
    /// by nothing else, so that no two networks of a cluster have the same ones, nor any of a host's own network.
    fn check_networks(&self, state: &State, results: &[Outcome]) -> Result<(), ClusterError> {
        let mut seen = None;
        for outcome in results.iter().filter(|outcome| outcome.kind == ObjectKind::Network) {
            let AnyObject::Network(new) = &outcome.object else { continue };
            let is_same = state.network(&outcome.name).is_some_and(|old| {
                let (old, new) = (&old.object.spec, &new.spec);
                old.cidrs == new.cidrs && old.floating == new.floating
            });
            if outcome.what == Change::Deleted || is_same {
                continue;
            }
            let refused = |text: String| {
                let refusal = Refusal::new(Reason::Conflict, text).about(ObjectKind::Network, &outcome.name);
                Err(ClusterError::from(refusal))
            };
            let cidrs: Vec<Cidr> = new.spec.cidrs.iter().filter_map(|text| text.parse().ok()).collect();
            let of = |outcome: &Outcome| match &outcome.object {
                AnyObject::Network(network) if outcome.what != Change::Deleted => network.spec.cidrs.clone(),
                _ => Vec::new(),
            };
            let together = results.iter().map(|outcome| (outcome.name.clone(), of(outcome)));
            let before = state.networks().map(|network| (network.name().to_owned(), network.object.spec.cidrs.clone()));
            let mut others = before.chain(together).filter(|(name, _)| *name != outcome.name);
            let overlaps =
                |text: &String| text.parse::<Cidr>().is_ok_and(|other| cidrs.iter().any(|cidr| cidr.overlaps(other)));
            if let Some((other, _)) = others.find(|(_, texts)| texts.iter().any(overlaps)) {
                return refused(format!(
                    "the network {other} has addresses of it: a cluster's networks have their own, whosever they are"
                ));
            }
            let view = match &seen {
                Some(view) => view,
                None => seen.insert(self.view()?),
            };
            let ranges = own_ranges(view, state);
            // Also those of hosts that have not come up yet.
            let given = view.blocks().iter().filter(|((network, _), _)| network == DEFAULT_NETWORK);
            let given = given.map(|((_, host), block)| (host.as_str(), Cidr::from(*block)));
            let mut all = ranges.into_iter().chain(given);
            if let Some((host, _)) = all.find(|(_, range)| cidrs.iter().any(|cidr| cidr.overlaps(*range))) {
                return refused(format!("the host {host} has addresses of it in its network {DEFAULT_NETWORK}"));
            }
            let store = self.file.store(&self.file.keys().blocks())?;
            let blocks = store.list(&format!("{}/", outcome.name), None)?.entries;
            let hosts: Vec<&str> = blocks.iter().filter_map(|entry| Some(entry.key.split_once('/')?.1)).collect();
            if !hosts.is_empty() {
                let text = format!(
                    "hosts have blocks of a network of this name, which stay theirs until they have followed its \
                     deletion: {}; keep its cidrs and floating part, choose another name, or see freeflow cluster \
                     status",
                    hosts.join(", ")
                );
                return Err(Refusal::new(Reason::InUse, text).about(ObjectKind::Network, &outcome.name).into());
            }
        }
        Ok(())
    }

    /// The addresses of a new vNIC may be another's, where a host has not let go one that was deleted.
    fn check_vnics(&self, results: &[Outcome]) -> Result<(), ClusterError> {
        let is_new = |outcome: &&Outcome| outcome.kind == ObjectKind::Vnic && outcome.what == Change::Created;
        let new: Vec<&Outcome> = results.iter().filter(is_new).collect();
        if new.is_empty() {
            return Ok(());
        }
        let places = places_in(&self.file.store(&self.file.keys().places())?.list("", None)?.entries);
        for outcome in new {
            let AnyObject::Vnic(vnic) = &outcome.object else { continue };
            if let Some((other, host)) = holder_of(&places, &outcome.name, &vnic.spec.addresses) {
                let text = format!(
                    "the host {host} has not let go the vNIC {other}, which was deleted, and has its addresses; choose \
                     others, or see freeflow cluster status"
                );
                return Err(Refusal::new(Reason::InUse, text).about(ObjectKind::Vnic, &outcome.name).into());
            }
        }
        Ok(())
    }

    /// Moves a vNIC to a host; `force`: also from one that can't be reached.
    ///
    /// # Errors
    /// `Refused`; or etcd did not do it.
    pub fn move_vnic(&self, name: &str, to: &str, force: bool) -> Result<Move, ClusterError> {
        move_vnic(&self.file, &self.view()?, (name, to), force)
    }

    /// Drains a host, or ends that (`None`): no container with the cluster's vNICs starts there meanwhile.
    ///
    /// # Errors
    /// `Refused`: no such host. etcd did not do it.
    pub fn drain(&self, host: &str, drained: Option<&Drained>) -> Result<(), ClusterError> {
        let view = self.view()?;
        let is_over = drained.is_none() && view.drained().contains_key(host);
        if !(is_over || view.hosts().contains_key(host)) {
            let hosts: Vec<&str> = view.hosts().keys().map(String::as_str).collect();
            let why = format!("no host {host} is in the cluster; there are: {}", hosts.join(", "));
            return Err(Refusal::new(Reason::NotFound, why).into());
        }
        self.write_drained(host, drained)
    }

    fn write_drained(&self, host: &str, drained: Option<&Drained>) -> Result<(), ClusterError> {
        let value = drained.map(|drained| serde_json::to_vec(drained).expect("it is encodable"));
        let writes = vec![Write { key: drained_key(host), value, lease: None }];
        self.file.store(&self.file.keys().cluster())?.commit(&Transaction { compares: Vec::new(), writes })?;
        Ok(())
    }

    /// The cluster as it is now, without what vNICs of hosts do.
    ///
    /// # Errors
    /// etcd does not answer.
    pub fn view(&self) -> Result<View, ClusterError> {
        self.view_of(Scope::Said)
    }

    /// These keys of the cluster as they are now.
    ///
    /// # Errors
    /// etcd does not answer.
    pub fn view_of(&self, scope: Scope) -> Result<View, ClusterError> {
        let follow = Follow::start_of(&self.file, scope)?;
        let mut view = View::new(&self.file.root, scope);
        match follow.next(VIEW_TIME) {
            Some(News::Behind(error)) => Err(StoreError::Broken(error.to_string()).into()),
            Some(news) => {
                view.take(news);
                Ok(view)
            }
            None => Err(StoreError::Broken("etcd does not answer".into()).into()),
        }
    }

    /// Forgets a host that is gone for good: others neither know it nor its addresses any more. One that was admitted
    /// has a user in etcd, which a controller takes away, and then all that the host has written: this waits for it,
    /// not for long.
    ///
    /// # Errors
    /// `Refused`: no such host. etcd did not do it.
    pub fn remove_host(&mut self, name: &str) -> Result<Removed, ClusterError> {
        if !is_host_name(name) {
            return Err(Refusal::new(Reason::NotFound, format!("{name:?} is no name of a host")).into());
        }
        let blocks = Controller::count_of(&self.file, name)?;
        // The next host of the name is another one.
        self.write_drained(name, None)?;
        // First of all: a host may have written more than can be read.
        let admitted = remove_host(&self.file, name)?;
        let was_there = match self.delete_words(name) {
            // A controller ends that.
            Err(ClusterError::Refused(_)) if admitted.is_some() => true,
            done => done?,
        };
        let Some(admitted) = admitted else {
            Controller::release(&self.file, name, None)?;
            places::release(&self.file, name, None)?;
            if !was_there && blocks == 0 {
                return Err(Refusal::new(Reason::NotFound, format!("no host {name} is in the cluster")).into());
            }
            return Ok(Removed { blocks, is_pending: false, is_by_hand: true, token: None });
        };
        let is_pending = !is_taken(&self.file, name, &admitted.user, REMOVAL_TIME)?;
        let uses = |token: String| Ok::<_, ClusterError>(uses_left(&self.file, &token)?.map(|uses| (token, uses)));
        let token = admitted.token.map(uses).transpose()?.flatten();
        Ok(Removed { blocks, is_pending, is_by_hand: false, token })
    }

    /// Deletes what a host says of itself; whether there was any of it. Its record goes first, for as long as there is
    /// none it says nothing more.
    fn delete_words(&self, name: &str) -> Result<bool, ClusterError> {
        let keys = self.file.keys();
        let mut was_there = self.delete_own(name)?;
        let vnics = (0..VNICS_PART_COUNT).map(vnics_key).collect();
        for (root, own) in [(keys.said(name), vec![FOLLOWED.to_owned()]), (keys.vnics(name), vnics)] {
            let mut store = part(&self.file, &root, Some((&keys.record(name), Revision(0))))?;
            let present = present_in(&store, &own)?;
            was_there |= !present.is_empty();
            let writes: Vec<Write> =
                present.into_iter().map(|(key, _)| Write { key, value: None, lease: None }).collect();
            if !writes.is_empty() {
                // In a conflict the next host of the name is there, and writes over them.
                store.commit(&Transaction { compares: Vec::new(), writes })?;
            }
        }
        Ok(was_there)
    }

    /// The same of the part with its record.
    fn delete_own(&self, name: &str) -> Result<bool, ClusterError> {
        let mut store = self.file.store(&self.file.keys().host(name))?;
        let own = [RECORD, HOLDINGS, RENEWAL].map(str::to_owned).into_iter();
        let own: Vec<String> = own.chain((0..MEMBERS_PART_COUNT).map(members_key)).collect();
        for _ in 0..ATTEMPT_COUNT {
            let present = present_in(&store, &own)?;
            if present.is_empty() {
                return Ok(false);
            }
            let modified = present.iter().find(|(key, _)| key == RECORD).map(|(_, modified)| *modified);
            let writes = present.into_iter().map(|(key, _)| Write { key, value: None, lease: None }).collect();
            let compares = vec![Compare { key: RECORD.into(), modified }];
            // In a conflict the host has written it meanwhile, or the next one of the name.
            if let Committed::Done(_) = store.commit(&Transaction { compares, writes })? {
                return Ok(true);
            }
        }
        Err(Refusal::new(Reason::Conflict, "the host writes its record again and again; take its user away first")
            .into())
    }
}

/// Those of these keys that are there, and when each was written.
fn present_in(store: &EtcdStore, keys: &[String]) -> Result<Vec<(String, Revision)>, ClusterError> {
    let mut present = Vec::new();
    for key in keys {
        present.extend(store.get(key, None)?.map(|entry| (key.clone(), entry.modified)));
    }
    Ok(present)
}

/// It may have been done, or be done yet.
fn is_doubtful(error: &ClusterError) -> bool {
    matches!(error, ClusterError::Store(StoreError::Unknown(_)))
}

fn reclaim_after(seconds: Option<u64>) -> Result<Write, ClusterError> {
    if seconds.is_some_and(|seconds| !RECLAIM_AFTER_S.contains(&seconds)) {
        let (least, most) = (RECLAIM_AFTER_S.start(), RECLAIM_AFTER_S.end());
        return Err(Refusal::new(Reason::Invalid, format!("reclaimAfter: {least} to {most} seconds, or never")).into());
    }
    let value = seconds.map_or("never".into(), |seconds| seconds.to_string()).into_bytes();
    Ok(Write { key: RECLAIM_AFTER.into(), value: Some(value), lease: None })
}

fn identity_in(file: &ClusterFile, store: &EtcdStore) -> Result<Identity, ClusterError> {
    let absent = || ClusterError::Absent(file.root.clone());
    let entry = store.get(IDENTITY, None)?.ok_or_else(absent)?;
    let damaged = |error| ClusterError::Damaged(format!("the cluster's identity: {error}"));
    let identity: Identity = serde_json::from_slice(&entry.value).map_err(damaged)?;
    identity.check()?;
    Ok(identity)
}

/// Networks without a part for addresses that go with their vNICs get one, where they are new.
fn for_cluster(state: &State, command: &Command) -> Command {
    let (Command::Apply { objects } | Command::ApplyForCluster { objects }) = command else { return command.clone() };
    let mut objects = objects.clone();
    for object in &mut objects {
        if let AnyObject::Network(network) = object
            && network.spec.floating.is_none()
            && state
                .network(&network.metadata.name)
                .is_none_or(|old| !network.spec.cidrs.is_empty() && network.spec.cidrs != old.object.spec.cidrs)
        {
            let pool = network.spec.cidrs.iter().find_map(|text| text.parse::<Pool>().ok());
            network.spec.floating = pool.and_then(floating_part).map(|part| part.to_string());
        }
    }
    Command::ApplyForCluster { objects }
}

/// Which commands are a cluster's.
fn check(command: &Command) -> Result<(), Refusal> {
    let kinds = || CLUSTER_KINDS.map(|kind| kind.name()).join(", ");
    let not_clusters = |kind: ObjectKind, name: &str| {
        let text = match kind {
            ObjectKind::Network => format!("the network {DEFAULT_NETWORK} is each host's own"),
            _ => format!("a {kind} is its host's; for all hosts there are {}", kinds()),
        };
        Refusal::new(Reason::Forbidden, text).about(kind, name)
    };
    match command {
        Command::Apply { objects } | Command::ApplyForCluster { objects } => {
            for object in objects {
                let (kind, name) = (object.kind(), object.name());
                if !is_clusters(kind, name) {
                    return Err(not_clusters(kind, name));
                }
                if let AnyObject::Network(network) = object
                    && network.spec.range.is_some()
                {
                    let text = "spec.range: each host of a cluster gets a block of its own; leave it out";
                    return Err(Refusal::new(Reason::Invalid, text).about(kind, name));
                }
            }
            Ok(())
        }
        Command::Delete { kind, name, .. } if !is_clusters(*kind, name) => Err(not_clusters(*kind, name)),
        Command::Delete { .. } => Ok(()),
        _ => Err(Refusal::new(Reason::Forbidden, "that is a host's own business")),
    }
}
