//! From the resources to FreeFlow, and back to their conditions: one round that carries out all differences.
//!
//! A round begins with all that FreeFlow has, so it matters not what was missed before. One broken resource stops
//! nobody: objects that are refused together are tried one by one. Where a round can't take all, namespaces have their
//! [`Turns`].
//!
//! Invariant: a resource has the controller's finalizer before FreeFlow has its object, and loses it after FreeFlow has
//! the object no more. Objects without a resource are left alone: their finalizers were taken away by force, or the API
//! server's data are older than they were. Who deletes them is a person.
use super::conditions::{ACCEPTED, DELETED, ENFORCED, Said, is_news, status_with};
use super::target::{Following, Target, TargetError};
use super::turns::{Key, Turns};
use crate::api::objects::Metadata;
use crate::api::{ApiError, Client, Collection, Kind, News};
use crate::declared::{DeclaredKind, GROUP, Resource, Status};
use crate::log;
use freeflow_orchestrator::objects::AnyObject;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

/// Keeps a resource until FreeFlow has its object no more.
pub const FINALIZER: &str = "freeflow.io/declared";
/// Objects in a request to FreeFlow.
const BATCH_COUNT: usize = 100;
/// Refused objects that are tried one by one in a round, and deletions; others have their turn in the next ones.
const ALONE_COUNT_MAX: usize = 64;
/// Requests to the API server in a round, of each kind (finalizers, statuses).
const PATCH_COUNT_MAX: usize = 100;
/// Until the next round where hosts are behind, or a deletion waits, at first and at most.
const SOON: Duration = Duration::from_secs(3);
const SOON_MAX: Duration = Duration::from_secs(15);
/// The same where something was refused.
const RETRY_MIN: Duration = Duration::from_secs(2);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// All is compared again after so long, whatever happened.
const RESYNC: Duration = Duration::from_secs(300);
/// Where events of resources of the whole cluster go.
const CLUSTER_EVENTS_NAMESPACE: &str = "default";

/// The object that FreeFlow was sent last, and its answer.
#[derive(Clone, Debug)]
struct Declaration {
    object: AnyObject,
    outcome: Result<AnyObject, TargetError>,
}

/// Turns in each part of a round.
#[derive(Default)]
struct AllTurns {
    finalizers: Turns,
    alone: Turns,
    deletions: Turns,
    statuses: Turns,
}

/// The rest that a part of a round has left.
#[derive(Clone, Copy, Debug, Default)]
struct Left {
    /// Some have not had their turn.
    more: bool,
    /// Some could not be done.
    failed: bool,
}

impl Left {
    fn and(self, other: Self) -> Self {
        Self { more: self.more || other.more, failed: self.failed || other.failed }
    }
}

/// The controller's knowledge, and its two ends.
pub struct Sync<T> {
    client: Client,
    target: T,
    resources: BTreeMap<Key, Resource>,
    declared: BTreeMap<Key, Declaration>,
    /// They were refused, perhaps for others that were sent with them: until they change they are tried one by one.
    suspects: BTreeSet<Key>,
    /// Deletions that FreeFlow refuses.
    waiting: BTreeMap<Key, TargetError>,
    /// Objects without a resource, of which a line was written.
    orphans: BTreeSet<String>,
    turns: AllTurns,
    retry: Duration,
    soon: Duration,
    /// Objects that hosts have not followed, and deletions that wait, as of the last round.
    lag_count: usize,
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
            suspects: BTreeSet::new(),
            waiting: BTreeMap::new(),
            orphans: BTreeSet::new(),
            turns: AllTurns::default(),
            retry: RETRY_MIN,
            soon: SOON,
            lag_count: 0,
        }
    }

    /// Whether a round may come to something else by it.
    fn put(&mut self, kind: DeclaredKind, resource: Resource) -> bool {
        let key = key_of(kind, &resource.metadata);
        // Its status is our own.
        let is_new = self.resources.get(&key).is_none_or(|before| {
            (&before.spec, &before.metadata.deletion_timestamp, &before.metadata.finalizers)
                != (&resource.spec, &resource.metadata.deletion_timestamp, &resource.metadata.finalizers)
        });
        if is_new {
            self.suspects.remove(&key);
        }
        self.resources.insert(key, resource);
        is_new
    }

    /// Forgets resources that are there no more.
    fn forget_but(&mut self, is_there: impl Fn(&Key) -> bool) {
        self.resources.retain(|key, _| is_there(key));
        self.declared.retain(|key, _| is_there(key));
        self.waiting.retain(|key, _| is_there(key));
        self.suspects.retain(|key| is_there(key));
    }

    fn forget(&mut self, key: &Key) -> bool {
        self.declared.remove(key);
        self.waiting.remove(key);
        self.suspects.remove(key);
        self.resources.remove(key).is_some()
    }

    /// News of a kind's resources. Whether a round may come to something else by them.
    pub fn take(&mut self, kind: DeclaredKind, news: News<Resource>) -> bool {
        let is_new = match news {
            News::All(all) => {
                let known: BTreeSet<Key> = all.iter().map(|resource| key_of(kind, &resource.metadata)).collect();
                self.forget_but(|key| key.0 != kind || known.contains(key));
                for resource in all {
                    self.put(kind, resource);
                }
                true
            }
            News::Changed(resource) => self.put(kind, resource),
            News::Deleted(resource) => self.forget(&key_of(kind, &resource.metadata)),
            News::Unreadable(name, why) => {
                log::line(&format!("{} {name} can't be read: {why}", kind.name()));
                false
            }
        };
        if is_new {
            (self.retry, self.soon) = (RETRY_MIN, SOON);
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
        let mut left = self.add_finalizers(&mut wanted).await;
        self.declare(&wanted, &present).await?;
        left = left.and(self.delete(&present).await?);
        self.note_orphans(&present);
        // Those of which FreeFlow has the spec as it is now.
        let current: BTreeMap<&Key, &Declaration> = wanted
            .iter()
            .filter_map(|(key, object)| self.declared.get_key_value(key).filter(|(_, last)| last.object == *object))
            .collect();
        let is_refused = wanted.iter().any(|(key, _)| current.get(key).is_none_or(|last| last.outcome.is_err()));
        let accepted = current.iter().filter_map(|(key, last)| Some(((*key).clone(), last.outcome.clone().ok()?)));
        let (accepted, current): (Vec<_>, BTreeSet<Key>) =
            (accepted.collect(), current.keys().copied().cloned().collect());
        let following = self.following(accepted).await?;
        let behind_count = following.values().filter(|following| !following.is_everywhere()).count();
        left = left.and(self.say(&invalid, &current, &following).await);
        Ok(self.next_in(left, is_refused, behind_count))
    }

    /// When the next round is due. The pauses grow while nothing comes of the rounds.
    fn next_in(&mut self, left: Left, is_refused: bool, behind_count: usize) -> Duration {
        let mut next = if left.more { RETRY_MIN } else { RESYNC };
        if is_refused || left.failed {
            next = next.min(self.retry);
            self.retry = (self.retry * 2).min(RETRY_MAX);
        }
        let lag_count = behind_count + self.waiting.len();
        if lag_count < self.lag_count {
            self.soon = SOON;
        }
        self.lag_count = lag_count;
        if lag_count > 0 {
            next = next.min(self.soon);
            self.soon = (self.soon * 2).min(SOON_MAX);
        }
        next
    }

    /// Resources get the finalizer before they are declared; those that could not are left out.
    async fn add_finalizers(&mut self, wanted: &mut Vec<(Key, AnyObject)>) -> Left {
        let has_it = |key: &Key| self.resources[key].metadata.finalizers.iter().any(|finalizer| finalizer == FINALIZER);
        let bare: BTreeSet<Key> = wanted.iter().filter(|(key, _)| !has_it(key)).map(|(key, _)| key.clone()).collect();
        let chosen = self.turns.finalizers.choose(bare.iter().cloned(), PATCH_COUNT_MAX);
        let (more, mut left_out) = (chosen.len() < bare.len(), bare);
        let mut failed = false;
        for key in chosen {
            let mut finalizers = self.resources[&key].metadata.finalizers.clone();
            finalizers.push(FINALIZER.into());
            if self.set_finalizers(&key, finalizers).await {
                left_out.remove(&key);
            } else {
                failed = true;
            }
        }
        wanted.retain(|(key, _)| !left_out.contains(key));
        Left { more, failed }
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
                self.forget(key);
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
        // In the order of the kinds: those that others name come first.
        let due = wanted.iter().filter(|(key, object)| !is_done(key, object));
        let (mut alone, fresh): (Vec<&(Key, AnyObject)>, Vec<_>) =
            due.partition(|(key, _)| self.suspects.contains(key));
        for batch in fresh.chunks(BATCH_COUNT) {
            let objects: Vec<AnyObject> = batch.iter().map(|(_, object)| object.clone()).collect();
            match self.target.apply(&objects).await {
                Ok(done) if done.len() == batch.len() => {
                    for ((key, object), done) in batch.iter().copied().zip(done) {
                        self.note(key, object, Ok(done));
                    }
                }
                Ok(_) => return Err(TargetError::Away("its answer has other objects than it was sent".into())),
                Err(TargetError::Refused(..)) => {
                    self.suspects.extend(batch.iter().map(|(key, _)| key.clone()));
                    alone.extend(batch.iter().copied());
                }
                Err(away) => return Err(away),
            }
        }
        self.declare_alone(&alone).await
    }

    async fn declare_alone(&mut self, alone: &[&(Key, AnyObject)]) -> Result<(), TargetError> {
        let objects: BTreeMap<&Key, &AnyObject> = alone.iter().map(|(key, object)| (key, object)).collect();
        for key in self.turns.alone.choose(objects.keys().copied().cloned(), ALONE_COUNT_MAX) {
            let object = objects[&key];
            let outcome = match self.target.apply(std::slice::from_ref(object)).await {
                Ok(mut done) => done.pop().ok_or_else(|| TargetError::Away("an answer without an object".into())),
                Err(error) => Err(error),
            };
            if let Err(away @ TargetError::Away(_)) = outcome {
                return Err(away);
            }
            if outcome.is_ok() {
                // Others may have waited for it.
                self.retry = RETRY_MIN;
            }
            self.note(&key, object, outcome);
        }
        Ok(())
    }

    fn note(&mut self, key: &Key, object: &AnyObject, outcome: Result<AnyObject, TargetError>) {
        if outcome.is_ok() {
            self.suspects.remove(key);
        }
        self.declared.insert(key.clone(), Declaration { object: object.clone(), outcome });
    }

    /// Deletes the objects of resources that are to go, those that name others first.
    async fn delete(&mut self, present: &BTreeMap<String, AnyObject>) -> Result<Left, TargetError> {
        let is_ours = |resource: &Resource| {
            resource.metadata.deletion_timestamp.is_some()
                && resource.metadata.finalizers.iter().any(|finalizer| finalizer == FINALIZER)
        };
        let going = self.resources.iter().filter(|(_, resource)| is_ours(resource)).map(|(key, _)| key.clone());
        let going: BTreeSet<Key> = going.collect();
        self.waiting.retain(|key, _| going.contains(key));
        let chosen = self.turns.deletions.choose(going.iter().cloned(), ALONE_COUNT_MAX);
        let mut left = Left { more: chosen.len() < going.len(), failed: false };
        for key in chosen.into_iter().rev() {
            let metadata = &self.resources[&key].metadata;
            let finalizers = metadata.finalizers.iter().filter(|one| *one != FINALIZER).cloned().collect();
            // With a bad name it never had an object.
            if let Ok(name) = key.0.freeflow_name(metadata)
                && let Some(object) = present.get(&format!("{}/{name}", key.0.object_kind()))
            {
                match self.target.delete(object).await {
                    Ok(()) => {}
                    Err(error) if error.is_not_found() => {}
                    Err(away @ TargetError::Away(_)) => return Err(away),
                    // It is another one by now.
                    Err(error) if error.is_conflict() => {
                        left.failed = true;
                        continue;
                    }
                    Err(refused) => {
                        self.waiting.insert(key, refused);
                        continue;
                    }
                }
            }
            self.declared.remove(&key);
            self.waiting.remove(&key);
            if !self.set_finalizers(&key, finalizers).await {
                left.failed = true;
                continue;
            }
            // If it was the last one, there is no more of the resource to be spoken of.
            if self.resources.get(&key).is_some_and(|resource| resource.metadata.finalizers.is_empty()) {
                self.forget(&key);
            }
        }
        Ok(left)
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

    async fn following(&mut self, accepted: Vec<(Key, AnyObject)>) -> Result<BTreeMap<Key, Following>, TargetError> {
        let (keys, objects): (Vec<Key>, Vec<AnyObject>) = accepted.into_iter().unzip();
        if objects.is_empty() {
            return Ok(BTreeMap::new());
        }
        let following = self.target.following(&objects).await?;
        Ok(keys.into_iter().zip(following).collect())
    }

    /// The conditions of a resource; `None`: there is nothing new to say, since it still has to be declared or deleted.
    fn said(
        &self,
        key: &Key,
        invalid: &BTreeMap<Key, String>,
        current: &BTreeSet<Key>,
        following: &BTreeMap<Key, Following>,
    ) -> Option<Vec<Said>> {
        match (invalid.get(key), self.waiting.get(key), self.declared.get(key)) {
            (Some(why), ..) => Some(refused("Invalid", why)),
            (None, Some(why), _) => Some(self.said_deleting(key, why)),
            (None, None, Some(last)) if current.contains(key) => Some(said_declared(last, following.get(key))),
            _ => None,
        }
    }

    /// Conditions and events.
    async fn say(
        &mut self,
        invalid: &BTreeMap<Key, String>,
        current: &BTreeSet<Key>,
        following: &BTreeMap<Key, Following>,
    ) -> Left {
        let mut due: BTreeMap<Key, (Status, Vec<Said>)> = BTreeMap::new();
        for (key, resource) in &self.resources {
            let Some(said) = self.said(key, invalid, current, following) else { continue };
            let name = key.0.freeflow_name(&resource.metadata).unwrap_or_default();
            if let Some(status) = status_with(resource, &name, &said, SystemTime::now()) {
                due.insert(key.clone(), (status, said));
            }
        }
        let chosen = self.turns.statuses.choose(due.keys().cloned(), PATCH_COUNT_MAX);
        let mut left = Left { more: chosen.len() < due.len(), failed: false };
        for key in chosen {
            let Some((status, said)) = due.remove(&key) else { continue };
            let resource = &self.resources[&key];
            let news: Vec<Said> = said.into_iter().filter(|said| is_event(said) && is_news(resource, said)).collect();
            // Of no later resource than was looked at: the answer would hide a change that the watch brings later.
            let patch = json!({"metadata": {"resourceVersion": resource.metadata.resource_version}, "status": status});
            match self.collection::<Resource>(&key).merge_status(&key.2, &patch).await {
                Ok(resource) => {
                    for said in news {
                        self.send_event(&key, &resource, &said).await;
                    }
                    self.resources.insert(key, resource);
                }
                Err(error) if error.is_not_found() => {
                    self.forget(&key);
                }
                // The watch has news of it.
                Err(error) if error.is_conflict() => left.failed = true,
                Err(error) => {
                    left.failed = true;
                    log::line(&format!("{}: its status: {error}", label(&key)));
                }
            }
        }
        left
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
