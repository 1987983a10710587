//! Tells the other hosts of a cluster which vNICs this one has, and the containers here the names of theirs, by a
//! thread of its own: neither router nor follower waits for it.
//!
//! It writes the members of networks, which all hosts follow, where etcd has others than there are; and all of the
//! vNICs with their traffic, which nobody follows, also with each heartbeat.
//!
//! The router is asked when something has changed, and with each heartbeat. Then there is a rest: a second at least,
//! twenty times as long as the router's answers took, and as long as etcd should take for what was written.
use crate::admin::Admin;
use crate::container_names::{self, since_s};
use crate::control::Sampler;
use crate::control::api::{Api, BASE};
use crate::failure::{Context, Failure, Result};
use crate::holders::Holders;
use crate::record::Records;
use freeflow_cluster::{
    ClusterFile, HEARTBEAT, HostContainer, HostVnic, HostVnics, Members, MembersThere, MembersWriter, Membership,
    Named, VnicsWriter,
};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_orchestrator::Revision;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// Between two words to the other hosts, at least; also how often it is looked whether containers have come or gone.
const REST: Duration = Duration::from_secs(1);
/// Names that a container waits for are written without a rest.
const URGENT_TIME: Duration = Duration::from_secs(2);
/// Rest for each second that the router took to answer.
const REST_FOR_ANSWERS: u32 = 20;
/// Bytes that a host writes in a second, in the long run: etcd keeps all that was written until it is compacted.
const BYTES_PER_S: u64 = 8 << 10;
/// After a failure.
const RETRY: Duration = Duration::from_secs(5);

/// May the host speak, and why it could not.
#[derive(Debug, Default)]
struct Shared {
    /// The revision of the host's own record.
    record: Option<Revision>,
    /// The host's members as etcd has them by the last news.
    there: MembersThere,
    /// Those news have come since they were last looked at.
    is_there_new: bool,
    /// vNICs have come, gone or changed, or may have.
    is_changed: bool,
    /// Networks in which the host is to be from now on, and those of them that etcd has not.
    entered: BTreeSet<String>,
    awaited: BTreeSet<String>,
    /// Containers wait for names until then.
    urgent_until: Option<Instant>,
    /// Names of the other hosts' vNICs that are not noted yet.
    others: Option<Vec<Named>>,
    /// Such names are not in the files of networks yet.
    is_naming: bool,
    error: Option<String>,
    names_error: Option<String>,
}

/// The thread; it ends with the process.
pub struct Publisher {
    shared: Arc<Mutex<Shared>>,
    notify: SyncSender<()>,
}

impl Publisher {
    /// Begins, and says nothing until it may.
    pub fn start(run_dir: &RunDir, host: &str) -> Result<Self> {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (notify, changes) = sync_channel(1);
        let watched = run_dir.clone();
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name.into()).spawn(body).context("no thread to be had")
        };
        let (waker, of_watch) = (notify.clone(), shared.clone());
        spawn("ff-watch", Box::new(move || watch(&watched, &of_watch, &waker)))?;
        let told = Told {
            run_dir: run_dir.clone(),
            host: host.into(),
            shared: shared.clone(),
            sampler: Sampler::default(),
            writers: None,
            rest: REST,
            last: None,
            members: None,
            present: None,
            membership: Membership::default(),
        };
        spawn("ff-vnics", Box::new(move || told.tell(&changes)))?;
        Ok(Self { shared, notify })
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Speaks from now on, as long as the host's record is the one of this revision; `None`: says nothing.
    pub fn speak(&self, record: Option<Revision>) {
        self.shared().record = record;
    }

    /// etcd has these members of the host's.
    pub fn note_there(&self, there: MembersThere) {
        let mut shared = self.shared();
        shared.is_there_new |= shared.there != there;
        shared.awaited.retain(|network| !there.values().any(|part| part.networks.contains_key(network)));
        shared.there = there;
    }

    /// A container is to be in this network: the host is a member of it from now on, and soon where it `is_new` there.
    pub fn enter(&self, network: &str, is_new: bool) {
        let mut shared = self.shared();
        shared.entered.insert(network.to_owned());
        if is_new && shared.awaited.insert(network.to_owned()) {
            self.urge(shared);
        }
    }

    fn urge(&self, mut shared: MutexGuard<'_, Shared>) {
        shared.urgent_until = Some(Instant::now() + URGENT_TIME);
        drop(shared);
        let _ = self.notify.try_send(());
    }

    /// Names that are still to be written are written without a rest: a container waits for them.
    pub fn hurry(&self) {
        let shared = self.shared();
        if shared.others.is_some() {
            self.urge(shared);
        }
    }

    /// Whether names of other hosts' vNICs are still to be written.
    pub fn is_naming(&self) -> bool {
        self.shared().is_naming
    }

    /// Containers know these vNICs of other hosts by name from now on.
    pub fn name_others(&self, others: Vec<Named>) {
        let mut shared = self.shared();
        (shared.others, shared.is_naming) = (Some(others), true);
        drop(shared);
        let _ = self.notify.try_send(());
    }

    /// Why the last attempt to speak failed; `None`: it did not.
    pub fn error(&self) -> Option<String> {
        self.shared().error.clone()
    }

    /// The same of names.
    pub fn names_error(&self) -> Option<String> {
        self.shared().names_error.clone()
    }
}

/// Says that vNICs have come, gone or changed, or may have.
fn watch(run_dir: &RunDir, shared: &Mutex<Shared>, wake: &SyncSender<()>) {
    let changed = || {
        shared.lock().unwrap_or_else(PoisonError::into_inner).is_changed = true;
        wake.try_send(())
    };
    loop {
        let notify = |event: Value| {
            // Nothing has changed with a bookmark; a change that waits stands for all.
            let is_over = || matches!(changed(), Err(TrySendError::Disconnected(())));
            Ok(event["type"] == "BOOKMARK" || !is_over())
        };
        if let Ok(api) = Api::of(run_dir)
            && let Ok(hosts) = api.get(&format!("{BASE}/hosts"))
        {
            let since = &hosts["metadata"]["resourceVersion"];
            // There may have been others while nobody watched.
            let _ = changed();
            let _ = api.watch(&format!("{BASE}/vnics?watch=true&resourceVersion={since}"), notify);
        }
        thread::sleep(RETRY);
    }
}

/// The last words.
struct Last {
    vnics: HostVnics,
    /// With this record, so that a host that has left and joined says it again.
    record: Revision,
    at: Instant,
    rest: Duration,
}

struct Told {
    run_dir: RunDir,
    host: String,
    shared: Arc<Mutex<Shared>>,
    sampler: Sampler,
    writers: Option<(MembersWriter, VnicsWriter)>,
    /// For what the router's answers took last.
    rest: Duration,
    last: Option<Last>,
    /// The members that were last written, and when: news of them may be still to come.
    members: Option<(MembersThere, Instant)>,
    /// Members that the router had last. `None`: it was not asked yet.
    present: Option<Members>,
    membership: Membership,
}

impl Told {
    fn tell(mut self, changes: &Receiver<()>) {
        let (mut is_due, mut not_before) = (true, Instant::now());
        let (mut names_due, mut names_not_before) = (true, Instant::now());
        let mut files = None;
        loop {
            if let Err(RecvTimeoutError::Disconnected) = changes.recv_timeout(REST) {
                thread::sleep(REST);
            }
            let mut has_changed = std::mem::take(&mut self.shared().is_changed);
            let now = (modified(&self.run_dir.containers()), modified(&self.run_dir.holders()));
            has_changed |= files.replace(now) != Some(now);
            is_due |= has_changed;
            names_due |= has_changed || self.shared().others.is_some();
            let is_urgent = self.shared().urgent_until.is_some_and(|until| Instant::now() < until);
            if names_due && (is_urgent || Instant::now() >= names_not_before) {
                let begin = Instant::now();
                let done = self.write_names();
                names_due = done.is_err();
                let rest = if done.is_ok() { REST.max(begin.elapsed() * REST_FOR_ANSWERS) } else { RETRY };
                names_not_before = Instant::now() + rest;
                self.shared().names_error = done.err().map(|failure| failure.to_string());
            }
            is_due |= self.has_other_members();
            let Some(record) = self.record() else { continue };
            if let Err(failure) = self.enter_networks(record) {
                self.writers = None;
                self.shared().error = Some(failure.to_string());
            }
            let is_silent = self.last.as_ref().is_none_or(|last| last.at.elapsed() >= HEARTBEAT.max(last.rest));
            let is_anew = self.last.as_ref().is_some_and(|last| last.record != record);
            if !(is_due || is_silent || is_anew) || Instant::now() < not_before {
                continue;
            }
            is_due = false;
            let done = self.round(record, is_silent || is_anew);
            let rest = match &done {
                Ok(rest) => *rest,
                Err(_) => {
                    // Certificates are read again with the next one.
                    self.writers = None;
                    is_due = true;
                    self.rest.max(RETRY)
                }
            };
            not_before = Instant::now() + rest;
            self.shared().error = done.err().map(|failure| failure.to_string());
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether news have come of members that are not those that were last written.
    fn has_other_members(&self) -> bool {
        let mut shared = self.shared();
        let is_written = |(last, _): &(MembersThere, Instant)| *last == shared.there;
        let is_other = !self.members.as_ref().is_some_and(is_written);
        std::mem::take(&mut shared.is_there_new) && is_other
    }

    fn record(&self) -> Option<Revision> {
        self.shared().record
    }

    /// For containers here. They are written also where etcd, or the other hosts, are away.
    fn write_names(&self) -> Result<()> {
        let others = self.shared().others.take();
        if let Some(others) = others
            && let Err(failure) = container_names::note_others(&self.run_dir, &others)
        {
            self.shared().others.get_or_insert(others);
            return Err(failure);
        }
        container_names::write(&self.run_dir, &mut Admin::connect(&self.run_dir)?)?;
        let mut shared = self.shared();
        shared.is_naming = shared.others.is_some();
        Ok(())
    }

    /// The writers of members and of all of the vNICs.
    fn writers(&mut self) -> Result<&mut (MembersWriter, VnicsWriter)> {
        if self.writers.is_none() {
            let path = self.run_dir.settings().and_then(|settings| settings.cluster);
            let file = ClusterFile::read(&path.ok_or_else(|| Failure::new("this host follows no cluster"))?)?;
            self.writers = Some((MembersWriter::new(&file, &self.host)?, VnicsWriter::new(&file, &self.host)?));
        }
        Ok(self.writers.as_mut().expect("they are made"))
    }

    /// Writes the members where etcd has others; the number of bytes. `None`: the record is another one.
    fn write_members(&mut self, record: Revision, wanted: MembersThere) -> Result<Option<usize>> {
        // Between a write and its news etcd has what was written, not what is there by the news.
        let written = self.members.as_ref().filter(|(_, at)| at.elapsed() < RETRY).map(|(last, _)| last.clone());
        let there = written.unwrap_or_else(|| self.shared().there.clone());
        if there == wanted {
            return Ok(Some(0));
        }
        let written = self.writers()?.0.write(record, &wanted, &there)?;
        self.members = written.map(|_| (wanted, Instant::now()));
        Ok(written)
    }

    /// Has the host be in networks that containers are to be in, without a look at the router.
    fn enter_networks(&mut self, record: Revision) -> Result<()> {
        let entered = std::mem::take(&mut self.shared().entered);
        if entered.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        entered.iter().for_each(|network| self.membership.enter(network, now));
        // The first look at the router, which is due, says it otherwise.
        let Some(present) = self.present.take() else { return Ok(()) };
        let all = self.membership.with(&present, now);
        self.present = Some(present);
        let written = self.write_members(record, all.parts());
        if written.is_err() {
            self.shared().entered.extend(entered);
        }
        written.map(drop)
    }

    /// Members of the host, with the networks that it is in besides.
    fn all_members(&mut self, present: Members) -> Members {
        let now = Instant::now();
        if self.present.is_none() {
            // A follower before this one has said so, and may have had a reason.
            let there = self.shared().there.clone();
            let networks = there.values().flat_map(|part| part.networks.keys());
            networks.for_each(|network| self.membership.enter(network, now));
        }
        let all = self.membership.with(&present, now);
        self.present = Some(present);
        all
    }

    /// Says which there are, if that is something else than before or has to be said anyway. How long to rest.
    fn round(&mut self, record: Revision, is_forced: bool) -> Result<Duration> {
        let begin = Instant::now();
        let api = Api::of(&self.run_dir)?;
        let mut vnics = HostVnics::of(present(&self.run_dir, &api)?);
        let all = self.all_members(vnics.members());
        // Another record: the follower hears of it, and says so.
        let Some(members) = self.write_members(record, all.parts())? else { return Ok(RETRY) };
        let is_same = self.last.as_ref().is_some_and(|last| last.vnics.is_same(&vnics));
        if is_same && !is_forced {
            return Ok(REST.max(begin.elapsed() * REST_FOR_ANSWERS).max(rest_for(members)));
        }
        let mut traffic = self.sampler.take(&api)?;
        self.rest = REST.max(begin.elapsed() * REST_FOR_ANSWERS);
        for vnic in &mut vnics.vnics {
            vnic.traffic = traffic.remove(&vnic.name).unwrap_or_default();
        }
        let Some(bytes) = self.writers()?.1.write(record, &vnics)? else { return Ok(RETRY) };
        let rest = self.rest.max(rest_for(members + bytes));
        self.last = Some(Last { vnics, record, at: Instant::now(), rest });
        Ok(rest)
    }
}

/// For what was written.
fn rest_for(bytes: usize) -> Duration {
    Duration::from_secs(bytes as u64 / BYTES_PER_S)
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

/// Containers of the host, by their vNICs.
fn containers(run_dir: &RunDir) -> BTreeMap<String, HostContainer> {
    let holders = Holders::of(run_dir).live().into_iter().map(|holder| {
        let (pid, engine) = (Some(holder.process.pid), "oci".to_owned());
        (holder.vnic, HostContainer { name: holder.name, engine, pid, ..HostContainer::default() })
    });
    let records = Records::of(run_dir).list().into_iter().filter(crate::record::Record::is_live).flat_map(|record| {
        let ids: Vec<String> = record.vnic_ids().map(str::to_owned).collect();
        let container = HostContainer {
            name: record.name,
            engine: "freeflow".into(),
            pid: record.command_pid,
            program: record.command.into_iter().next().unwrap_or_default(),
            since_s: Some(record.created_s),
        };
        ids.into_iter().map(move |id| (id, container.clone()))
    });
    holders.chain(records).collect()
}

/// Those of the router.
fn present(run_dir: &RunDir, api: &Api) -> Result<Vec<HostVnic>> {
    let answer = api.get(&format!("{BASE}/vnics"))?;
    let mut containers = containers(run_dir);
    let items = answer["items"].as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(items.iter().map(|item| vnic_of(item, &mut containers)).collect())
}

fn vnic_of(item: &Value, containers: &mut BTreeMap<String, HostContainer>) -> HostVnic {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (name, title) = (text(&item["metadata"]["name"]), text(&item["status"]["title"]));
    let labels = &item["metadata"]["labels"];
    let of_engine = || {
        let pid = labels["pid"].as_str()?.parse().ok()?;
        let engine = labels["engine"].as_str().filter(|engine| *engine == "oci")?.to_owned();
        Some(HostContainer { name: title.clone(), engine, pid: Some(pid), ..HostContainer::default() })
    };
    let addresses = item["spec"]["addresses"].as_array().map(Vec::as_slice).unwrap_or_default();
    HostVnic {
        container: containers.remove(&name).or_else(of_engine),
        network: text(&item["spec"]["network"]),
        tenant: text(&item["status"]["tenant"]),
        addresses: addresses.iter().filter_map(|address| address.as_str()?.parse().ok()).collect(),
        phase: text(&item["status"]["phase"]),
        since_s: since_s(Path::new(&text(&item["status"]["directory"]))),
        title: if title.is_empty() { name.clone() } else { title },
        name,
        ..HostVnic::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_vnic_is_its_containers() {
        let item = |name: &str, labels: Value| {
            json!({
                "metadata": {"name": name, "labels": labels},
                "spec": {"network": "red", "addresses": ["10.50.0.2", "fd00::2"]},
                "status": {"title": "web", "tenant": "t", "phase": "Ready", "directory": "/nowhere"},
            })
        };
        let ours = HostContainer { name: "ours".into(), engine: "freeflow".into(), ..HostContainer::default() };
        let mut containers = BTreeMap::from([("declared".to_owned(), ours.clone())]);
        let held = vnic_of(&item("declared", json!({"tier": "x"})), &mut containers);
        assert_eq!(held.names().collect::<Vec<_>>(), ["web", "ours"]);
        assert_eq!((held.container, held.addresses.len(), held.since_s), (Some(ours), 2, 0));
        let engines = vnic_of(&item("a1", json!({"engine": "oci", "pid": "77"})), &mut containers);
        let container = engines.container.expect("its engine's");
        assert_eq!((container.name.as_str(), container.engine.as_str(), container.pid), ("web", "oci", Some(77)));
        let free = vnic_of(&item("b", json!({"pid": "77"})), &mut containers);
        assert_eq!((free.container, free.title.as_str(), free.phase.as_str()), (None, "web", "Ready"));
    }
}
