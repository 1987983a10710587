//! From the resources to FreeFlow, and back to their conditions: one round that carries out all differences.
//!
//! A round begins with all that FreeFlow has, so it matters not what was missed before. One broken resource stops
//! nobody: objects that are refused together are tried one by one.
//!
//! Invariant: a resource has the controller's finalizer before FreeFlow has its object, and loses it after FreeFlow has
//! the object no more. Objects without a resource are left alone: their finalizers were taken away by force, or the API
//! server's data are older than they were. Who deletes them is a person.
use super::conditions::{ACCEPTED, DELETED, ENFORCED, Said, is_news, status_with};
use super::target::{Following, Target, TargetError};
use crate::api::objects::Metadata;
use crate::api::{ApiError, Client, Collection, Kind, News};
use crate::declared::{DeclaredKind, GROUP, Resource};
use crate::log;
use freeflow_orchestrator::objects::AnyObject;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

/// Keeps a resource until FreeFlow has its object no more.
pub const FINALIZER: &str = "freeflow.io/declared";
/// Objects in a request to FreeFlow.
const BATCH_COUNT: usize = 100;
/// Refused objects that are tried one by one in a round; others have their turn in the next ones.
const ALONE_COUNT_MAX: usize = 64;
/// Requests to the API server in a round, of each kind (finalizers, statuses).
const PATCH_COUNT_MAX: usize = 100;
/// Until the next round where hosts are behind, or a deletion waits.
const SOON: Duration = Duration::from_secs(3);
/// The same where something was refused, at first and at most.
const RETRY_MIN: Duration = Duration::from_secs(2);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// All is compared again after so long, whatever happened.
const RESYNC: Duration = Duration::from_secs(300);
/// Where events of resources of the whole cluster go.
const CLUSTER_EVENTS_NAMESPACE: &str = "default";

/// A resource by its kind, namespace and name.
pub type Key = (DeclaredKind, String, String);

/// The object that FreeFlow was sent last, and its answer.
#[derive(Clone, Debug)]
struct Declaration {
    object: AnyObject,
    outcome: Result<AnyObject, TargetError>,
}

/// The controller's knowledge, and its two ends.
pub struct Sync<T> {
    client: Client,
    target: T,
    resources: BTreeMap<Key, Resource>,
    declared: BTreeMap<Key, Declaration>,
    /// Objects without a resource, of which a line was written.
    orphans: BTreeSet<String>,
    /// Of those that are tried one by one, the last.
    last_alone: Option<Key>,
    retry: Duration,
}

fn key_of(kind: DeclaredKind, metadata: &Metadata) -> Key {
    (kind, metadata.namespace.clone(), metadata.name.clone())
}

fn label(key: &Key) -> String {
    let (kind, namespace, name) = key;
    if namespace.is_empty() { format!("{} {name}", kind.name()) } else { format!("{} {namespace}/{name}", kind.name()) }
}

impl<T: Target> Sync<T> {
    pub fn new(client: Client, target: T) -> Self {
        Self {
            client,
            target,
            resources: BTreeMap::new(),
            declared: BTreeMap::new(),
            orphans: BTreeSet::new(),
            last_alone: None,
            retry: RETRY_MIN,
        }
    }

    /// News of a kind's resources. Whether a round may come to something else by them.
    pub fn take(&mut self, kind: DeclaredKind, news: News<Resource>) -> bool {
        let is_new = match news {
            News::All(all) => {
                let known: BTreeSet<Key> = all.iter().map(|resource| key_of(kind, &resource.metadata)).collect();
                self.resources.retain(|key, _| key.0 != kind || known.contains(key));
                all.into_iter().for_each(|resource| {
                    self.resources.insert(key_of(kind, &resource.metadata), resource);
                });
                true
            }
            News::Changed(resource) => {
                let key = key_of(kind, &resource.metadata);
                let before = self.resources.insert(key, resource.clone());
                // Its status is our own.
                before.is_none_or(|before| {
                    (before.spec, before.metadata.deletion_timestamp, before.metadata.finalizers)
                        != (resource.spec, resource.metadata.deletion_timestamp, resource.metadata.finalizers)
                })
            }
            News::Deleted(resource) => {
                let key = key_of(kind, &resource.metadata);
                self.declared.remove(&key);
                self.resources.remove(&key).is_some()
            }
            News::Unreadable(name, why) => {
                log::line(&format!("{} {name} can't be read: {why}", kind.name()));
                false
            }
        };
        if is_new {
            self.retry = RETRY_MIN;
        }
        is_new
    }

    fn collection<O>(&self, key: &Key) -> Collection<O> {
        let (kind, namespace, _) = key;
        match kind.is_namespaced() {
            true => Collection::of_namespace(&self.client, &kind.api(), namespace),
            false => Collection::all(&self.client, &kind.api()),
        }
    }

    /// One round; when the next one is due.
    ///
    /// # Errors
    /// FreeFlow does not answer: what was not done is done by the next round.
    pub async fn round(&mut self) -> Result<Duration, TargetError> {
        let present = self.target.present().await?;
        let present: BTreeMap<String, AnyObject> =
            present.into_iter().map(|object| (unique(&object), object)).collect();
        let mut next = RESYNC;
        let (mut wanted, mut invalid) = (Vec::new(), BTreeMap::new());
        for (key, resource) in &self.resources {
            if resource.metadata.deletion_timestamp.is_some() {
                continue;
            }
            match key.0.object(resource) {
                Ok(object) => wanted.push((key.clone(), object)),
                Err(why) => drop(invalid.insert(key.clone(), why)),
            }
        }
        if !self.add_finalizers(&mut wanted).await {
            next = RETRY_MIN;
        }
        self.declare(&wanted, &present).await?;
        let waiting = self.delete(&present).await?;
        self.note_orphans(&present);
        let following = self.following(&wanted).await?;
        let is_behind = following.values().any(|following| !following.is_everywhere());
        if is_behind || !waiting.is_empty() {
            next = next.min(SOON);
        }
        let is_refused = wanted.iter().any(|(key, _)| self.declared.get(key).is_none_or(|done| done.outcome.is_err()));
        if is_refused {
            next = next.min(self.retry);
            self.retry = (self.retry * 2).min(RETRY_MAX);
        }
        if !self.say(&invalid, &waiting, &following).await {
            next = next.min(RETRY_MIN);
        }
        Ok(next)
    }

    /// Resources get the finalizer before they are declared; those that could not are left out. False: some could not.
    async fn add_finalizers(&mut self, wanted: &mut Vec<(Key, AnyObject)>) -> bool {
        let (mut count, mut left_out) = (0, BTreeSet::new());
        for (key, _) in wanted.iter() {
            let metadata = &self.resources[key].metadata;
            if metadata.finalizers.iter().any(|finalizer| finalizer == FINALIZER) {
                continue;
            }
            count += 1;
            let mut finalizers = metadata.finalizers.clone();
            finalizers.push(FINALIZER.into());
            if count > PATCH_COUNT_MAX || !self.set_finalizers(&key.clone(), finalizers).await {
                left_out.insert(key.clone());
            }
        }
        wanted.retain(|(key, _)| !left_out.contains(key));
        left_out.is_empty()
    }

    async fn set_finalizers(&mut self, key: &Key, finalizers: Vec<String>) -> bool {
        let metadata = &self.resources[key].metadata;
        let patch = json!({"metadata": {"finalizers": finalizers, "resourceVersion": metadata.resource_version}});
        match self.collection::<Resource>(key).merge(&key.2, &patch).await {
            Ok(resource) => {
                self.resources.insert(key.clone(), resource);
                true
            }
            // The watch has news of it.
            Err(error) if error.is_conflict() => false,
            Err(error) if error.is_not_found() => {
                self.resources.remove(key);
                false
            }
            Err(error) => {
                log::line(&format!("{}: its finalizers: {error}", label(key)));
                false
            }
        }
    }

    /// Declares what is not there as wanted.
    async fn declare(
        &mut self,
        wanted: &[(Key, AnyObject)],
        present: &BTreeMap<String, AnyObject>,
    ) -> Result<(), TargetError> {
        let is_done = |key: &Key, object: &AnyObject| {
            let there = present.get(&unique(object)).and_then(|there| there.metadata().resource_version);
            self.declared.get(key).is_some_and(|last| {
                last.object == *object
                    && last.outcome.as_ref().is_ok_and(|done| done.metadata().resource_version == there)
            })
        };
        let was_refused = |key: &Key, object: &AnyObject| {
            self.declared.get(key).is_some_and(|last| last.object == *object && last.outcome.is_err())
        };
        // In the order of the kinds: those that others name come first.
        let due: Vec<&(Key, AnyObject)> = wanted.iter().filter(|(key, object)| !is_done(key, object)).collect();
        let (mut alone, fresh): (Vec<_>, Vec<_>) = due.into_iter().partition(|(key, object)| was_refused(key, object));
        for batch in fresh.chunks(BATCH_COUNT) {
            let objects: Vec<AnyObject> = batch.iter().map(|(_, object)| object.clone()).collect();
            match self.target.apply(&objects).await {
                Ok(done) if done.len() == batch.len() => {
                    for ((key, object), done) in batch.iter().copied().zip(done) {
                        self.note(key, object, Ok(done));
                    }
                }
                Ok(_) => return Err(TargetError::Away("its answer has other objects than it was sent".into())),
                Err(TargetError::Refused(..)) => alone.extend(batch.iter().copied()),
                Err(away) => return Err(away),
            }
        }
        self.declare_alone(alone).await
    }

    /// One by one, beginning after the one that was the last in the round before.
    async fn declare_alone(&mut self, mut alone: Vec<&(Key, AnyObject)>) -> Result<(), TargetError> {
        alone.sort_by_key(|(key, _)| key.clone());
        if alone.len() > ALONE_COUNT_MAX {
            let first = alone.partition_point(|(key, _)| self.last_alone.as_ref().is_some_and(|last| key <= last));
            let count = alone.len();
            alone.rotate_left(first % count);
            alone.truncate(ALONE_COUNT_MAX);
            self.last_alone = alone.last().map(|(key, _)| key.clone());
        }
        for (key, object) in alone {
            let outcome = match self.target.apply(std::slice::from_ref(object)).await {
                Ok(mut done) => done.pop().ok_or_else(|| TargetError::Away("an answer without an object".into())),
                Err(error) => Err(error),
            };
            if let Err(away @ TargetError::Away(_)) = outcome {
                return Err(away);
            }
            self.note(key, object, outcome);
        }
        Ok(())
    }

    fn note(&mut self, key: &Key, object: &AnyObject, outcome: Result<AnyObject, TargetError>) {
        self.declared.insert(key.clone(), Declaration { object: object.clone(), outcome });
    }

    /// Deletes the objects of resources that are to go, those that name others first; why some wait.
    async fn delete(
        &mut self,
        present: &BTreeMap<String, AnyObject>,
    ) -> Result<BTreeMap<Key, TargetError>, TargetError> {
        let mut waiting = BTreeMap::new();
        let is_ours = |resource: &Resource| {
            resource.metadata.deletion_timestamp.is_some()
                && resource.metadata.finalizers.iter().any(|finalizer| finalizer == FINALIZER)
        };
        let going: Vec<Key> =
            self.resources.iter().rev().filter(|(_, resource)| is_ours(resource)).map(|(key, _)| key.clone()).collect();
        for key in going {
            let metadata = &self.resources[&key].metadata;
            let finalizers = metadata.finalizers.iter().filter(|one| *one != FINALIZER).cloned().collect();
            // With a bad name it never had an object.
            if let Ok(name) = key.0.freeflow_name(metadata)
                && present.contains_key(&format!("{}/{name}", key.0.object_kind()))
            {
                match self.target.delete(key.0.object_kind(), &name).await {
                    Ok(()) => {}
                    Err(error) if error.is_not_found() => {}
                    Err(away @ TargetError::Away(_)) => return Err(away),
                    Err(refused) => {
                        waiting.insert(key, refused);
                        continue;
                    }
                }
            }
            self.declared.remove(&key);
            if !self.set_finalizers(&key, finalizers).await {
                continue;
            }
            // If it was the last one, there is no more of the resource to be spoken of.
            if self.resources.get(&key).is_some_and(|resource| resource.metadata.finalizers.is_empty()) {
                self.resources.remove(&key);
            }
        }
        Ok(waiting)
    }

    fn note_orphans(&mut self, present: &BTreeMap<String, AnyObject>) {
        let known: BTreeSet<String> = self
            .resources
            .iter()
            .filter_map(|(key, resource)| {
                Some(format!("{}/{}", key.0.object_kind(), key.0.freeflow_name(&resource.metadata).ok()?))
            })
            .collect();
        let orphans: BTreeSet<String> = present.keys().filter(|name| !known.contains(*name)).cloned().collect();
        // Those that this round has deleted are in `present`, and of the next one's no more.
        for orphan in orphans.intersection(&self.orphans.clone()) {
            if self.orphans.insert(format!("{orphan} ")) {
                log::line(&format!(
                    "{orphan} is managed by kubernetes, and has no resource there. It stays; `freeflow delete --take-over` \
                     deletes it"
                ));
            }
        }
        self.orphans.retain(|name| orphans.contains(name.trim_end()));
        self.orphans.extend(orphans);
    }

    async fn following(&mut self, wanted: &[(Key, AnyObject)]) -> Result<BTreeMap<Key, Following>, TargetError> {
        let accepted = |key: &Key| self.declared.get(key).and_then(|last| last.outcome.as_ref().ok().cloned());
        let (keys, objects): (Vec<Key>, Vec<AnyObject>) =
            wanted.iter().filter_map(|(key, _)| Some((key.clone(), accepted(key)?))).unzip();
        if objects.is_empty() {
            return Ok(BTreeMap::new());
        }
        let following = self.target.following(&objects).await?;
        Ok(keys.into_iter().zip(following).collect())
    }

    /// Conditions and events. False: some are left for the next round.
    async fn say(
        &mut self,
        invalid: &BTreeMap<Key, String>,
        waiting: &BTreeMap<Key, TargetError>,
        following: &BTreeMap<Key, Following>,
    ) -> bool {
        let mut count = 0;
        let keys: Vec<Key> = self.resources.keys().cloned().collect();
        for key in keys {
            let resource = &self.resources[&key];
            let said = match (invalid.get(&key), waiting.get(&key), self.declared.get(&key)) {
                (Some(why), _, _) => refused("Invalid", why),
                (None, Some(why), _) => self.said_deleting(&key, why),
                (None, None, Some(last)) => said_declared(last, following.get(&key)),
                // Its finalizer is still to come.
                (None, None, None) => continue,
            };
            let name = key.0.freeflow_name(&resource.metadata).unwrap_or_default();
            let Some(status) = status_with(resource, &name, &said, SystemTime::now()) else { continue };
            count += 1;
            if count > PATCH_COUNT_MAX {
                return false;
            }
            let news: Vec<Said> = said.into_iter().filter(|said| is_event(said) && is_news(resource, said)).collect();
            let patch = json!({"status": status});
            match self.collection::<Resource>(&key).merge_status(&key.2, &patch).await {
                Ok(resource) => {
                    for said in news {
                        self.send_event(&key, &resource, &said).await;
                    }
                    self.resources.insert(key, resource);
                }
                Err(error) if error.is_not_found() => drop(self.resources.remove(&key)),
                Err(error) => log::line(&format!("{}: its status: {error}", label(&key))),
            }
        }
        true
    }

    fn said_deleting(&self, key: &Key, why: &TargetError) -> Vec<Said> {
        let TargetError::Refused(reason, message) = why else { return Vec::new() };
        let mut said = match self.declared.get(key) {
            Some(last) => said_declared(last, None),
            None => Vec::new(),
        };
        said.push(Said::new(DELETED, "False", reason, message));
        said
    }

    async fn send_event(&self, key: &Key, resource: &Resource, said: &Said) {
        let (kind, namespace, name) = key;
        let of = if namespace.is_empty() { CLUSTER_EVENTS_NAMESPACE } else { namespace };
        let now = super::conditions::rfc3339(SystemTime::now(), false);
        let kind_of_event = if said.status == "False" { "Warning" } else { "Normal" };
        let mut about = json!({"apiVersion": kind.api().api_version(), "kind": kind.name(), "name": name,
            "uid": resource.metadata.uid, "resourceVersion": resource.metadata.resource_version});
        if !namespace.is_empty() {
            about["namespace"] = namespace.as_str().into();
        }
        let event = json!({
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"generateName": format!("{name}."), "namespace": of},
            "involvedObject": about, "reason": said.reason, "message": said.message, "type": kind_of_event,
            "source": {"component": format!("controller.{GROUP}")},
            "firstTimestamp": now, "lastTimestamp": now, "count": 1,
        });
        const EVENTS: Kind = Kind::new("", "v1", "events");
        let sent: Result<Value, ApiError> = Collection::of_namespace(&self.client, &EVENTS, of).create(&event).await;
        if let Err(error) = sent {
            log::line(&format!("{}: an event: {error}", label(key)));
        }
    }
}

/// Of an object in the store: kinds have names of their own.
fn unique(object: &AnyObject) -> String {
    format!("{}/{}", object.kind(), object.name())
}

fn refused(reason: &str, why: &str) -> Vec<Said> {
    vec![
        Said::new(ACCEPTED, "False", reason, why),
        Said::new(ENFORCED, "False", "NotAccepted", "FreeFlow has not taken this spec"),
    ]
}

fn said_declared(last: &Declaration, following: Option<&Following>) -> Vec<Said> {
    match &last.outcome {
        Err(TargetError::Refused(reason, message)) => refused(reason, message),
        Err(away) => refused("Away", &away.to_string()),
        Ok(_) => {
            let accepted = Said::new(ACCEPTED, "True", "Declared", "FreeFlow has taken this spec");
            let enforced = following.map(|following| match following {
                all if all.is_everywhere() => Said::new(ENFORCED, "True", "Everywhere", &all.sentence()),
                some if some.refused.is_empty() => Said::new(ENFORCED, "False", "Behind", &some.sentence()),
                some => Said::new(ENFORCED, "False", "HostsRefuse", &some.sentence()),
            });
            std::iter::once(accepted).chain(enforced).collect()
        }
    }
}

/// Conditions that people are told of by an event: hosts come and go too often for `Enforced`.
fn is_event(said: &Said) -> bool {
    said.r#type != ENFORCED || said.reason == "HostsRefuse"
}
