//! FreeFlow, to which the controller declares: one host by its router's socket, or a cluster by an operator's file.
use crate::api::{ApiError, Client};
use freeflow_cluster::{ClusterError, ClusterFile, Operator, View};
use freeflow_orchestrator::objects::{AnyObject, ObjectKind, parse_object};
use freeflow_orchestrator::{CLUSTER_KINDS, Command, KUBERNETES, Reason, State, Writer};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use tokio::sync::oneshot;

/// Where a router's REST API has its objects.
const BASE: &str = "/apis/freeflow.io/v1";
/// A change is answered when it is stored, which a slow disk may keep for a while.
const ANSWER_TIME: Duration = Duration::from_secs(120);
/// Hosts that a sentence names.
const NAMED_MAX: usize = 5;

/// Why FreeFlow did not do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetError {
    /// It refused, and will again until something else changes: its word and sentence.
    Refused(String, String),
    /// It does not answer.
    Away(String),
}

impl TargetError {
    /// The object is not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused(reason, _) if reason == Reason::NotFound.word())
    }

    /// It has changed since it was seen.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused(reason, _) if reason == Reason::Conflict.word())
    }
}

impl std::fmt::Display for TargetError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(_, message) => f.write_str(message),
            Self::Away(why) => write!(f, "FreeFlow does not answer: {why}"),
        }
    }
}

/// How far the hosts have come with an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Following {
    /// Hosts that follow it, of how many.
    pub count: usize,
    /// All hosts.
    pub of: usize,
    /// Hosts that have not come to it yet.
    pub behind: Vec<String>,
    /// Hosts that can't, and why.
    pub refused: Vec<(String, String)>,
}

impl Following {
    /// Whether all hosts follow it.
    pub fn is_everywhere(&self) -> bool {
        self.of > 0 && self.count == self.of
    }

    /// A sentence for people.
    pub fn sentence(&self) -> String {
        if self.of == 0 {
            return "no host is in the cluster yet".into();
        }
        let mut text = format!("{} of {} hosts enforce it", self.count, self.of);
        if !self.behind.is_empty() {
            let more = if self.behind.len() > NAMED_MAX { ", …" } else { "" };
            text.push_str(&format!("; not yet: {}{more}", self.behind[..self.behind.len().min(NAMED_MAX)].join(", ")));
        }
        for (host, why) in self.refused.iter().take(NAMED_MAX) {
            text.push_str(&format!("; host {host}: {why}"));
        }
        text
    }
}

/// FreeFlow as the controller sees it.
#[allow(async_fn_in_trait, reason = "one thread runs all of it")]
pub trait Target {
    /// All objects that Kubernetes manages.
    ///
    /// # Errors
    /// See [`TargetError`].
    async fn present(&mut self) -> Result<Vec<AnyObject>, TargetError>;

    /// All of them or none; they come back as they are then.
    ///
    /// # Errors
    /// See [`TargetError`].
    async fn apply(&mut self, objects: &[AnyObject]) -> Result<Vec<AnyObject>, TargetError>;

    /// One that nothing uses, as it was seen: another one of its name, or a later version, stays.
    ///
    /// # Errors
    /// See [`TargetError`]; `is_conflict`: it is another one by now.
    async fn delete(&mut self, object: &AnyObject) -> Result<(), TargetError>;

    /// How far the hosts have come with each of these.
    ///
    /// # Errors
    /// See [`TargetError`].
    async fn following(&mut self, objects: &[AnyObject]) -> Result<Vec<Following>, TargetError>;
}

fn is_ours(object: &AnyObject) -> bool {
    object.metadata().manager.as_ref().is_some_and(|manager| manager.name == KUBERNETES)
}

// ---- One host

/// A host by its router's socket.
pub struct Host {
    client: Client,
    socket: PathBuf,
}

impl Host {
    /// Nothing is connected yet.
    pub fn new(socket: &Path) -> Self {
        Self { client: Client::at_socket(socket).answer_time(ANSWER_TIME), socket: socket.into() }
    }

    fn error(&self, error: ApiError) -> TargetError {
        match error {
            // An answer to this request. Not so that there is no time for any (429, 503).
            ApiError::Refused(refusal) if refusal.code != 429 && matches!(refusal.code, 400..=500 | 507) => {
                TargetError::Refused(refusal.reason.clone(), refusal.to_string())
            }
            ApiError::Refused(refusal) => TargetError::Away(refusal.to_string()),
            ApiError::Unreachable(why) | ApiError::Unanswered(why) => {
                TargetError::Away(format!("the router at {}: {why}", self.socket.display()))
            }
            other => TargetError::Away(other.to_string()),
        }
    }

    fn objects(values: Option<&Vec<Value>>) -> Result<Vec<AnyObject>, TargetError> {
        let values = values.ok_or_else(|| TargetError::Away("an answer without objects".into()))?;
        let parsed =
            values.iter().map(|value| parse_object(value).map_err(|error| TargetError::Away(error.to_string())));
        parsed.collect()
    }
}

impl Target for Host {
    async fn present(&mut self) -> Result<Vec<AnyObject>, TargetError> {
        let mut all = Vec::new();
        for kind in CLUSTER_KINDS {
            let list: Value =
                self.client.get(&format!("{BASE}/{}", kind.plural())).await.map_err(|error| self.error(error))?;
            let ours = |value: &&Value| value["metadata"]["manager"]["name"] == KUBERNETES;
            let items: Option<Vec<Value>> =
                list["items"].as_array().map(|items| items.iter().filter(ours).cloned().collect());
            all.extend(Self::objects(items.as_ref())?);
        }
        Ok(all)
    }

    async fn apply(&mut self, objects: &[AnyObject]) -> Result<Vec<AnyObject>, TargetError> {
        let path = format!("{BASE}/apply?manager={KUBERNETES}");
        let answer: Value =
            self.client.post(&path, &json!({"items": objects})).await.map_err(|error| self.error(error))?;
        let items: Option<Vec<Value>> =
            answer["items"].as_array().map(|items| items.iter().map(|item| item["object"].clone()).collect());
        Self::objects(items.as_ref())
    }

    async fn delete(&mut self, object: &AnyObject) -> Result<(), TargetError> {
        // The names of FreeFlow's objects need no encoding. A pod keeps its vNIC, as by a cluster's hosts.
        let mut path = format!("{BASE}/{}/{}?manager={KUBERNETES}&unused=true", object.kind().plural(), object.name());
        if let Some(version) = object.metadata().resource_version {
            path.push_str(&format!("&resourceVersion={version}"));
        }
        self.client.delete::<Value>(&path).await.map(drop).map_err(|error| self.error(error))
    }

    async fn following(&mut self, objects: &[AnyObject]) -> Result<Vec<Following>, TargetError> {
        // It is enforced when it is answered.
        Ok(vec![Following { count: 1, of: 1, ..Following::default() }; objects.len()])
    }
}

// ---- A cluster

type Job = Box<dyn FnOnce(&ClusterFile) + Send>;

/// All hosts of a cluster, by an operator's file. Calls to etcd wait, so a thread of their own makes them.
pub struct Cluster {
    jobs: Sender<Job>,
}

fn cluster_error(error: ClusterError) -> TargetError {
    match error {
        ClusterError::Refused(refusal) => TargetError::Refused(refusal.reason.word().into(), refusal.to_string()),
        other => TargetError::Away(other.to_string()),
    }
}

impl Cluster {
    /// Nothing is connected yet.
    ///
    /// # Errors
    /// The file can't be read or makes no sense; no thread to be had.
    pub fn open(path: &Path) -> Result<Self, String> {
        let file = ClusterFile::read(path).map_err(|error| error.to_string())?;
        let (jobs, waiting) = channel::<Job>();
        let body = move || {
            for job in waiting {
                job(&file);
            }
        };
        std::thread::Builder::new().name("ff-operator".into()).spawn(body).map_err(|error| error.to_string())?;
        Ok(Self { jobs })
    }

    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Operator) -> Result<T, ClusterError> + Send + 'static,
    ) -> Result<T, TargetError> {
        let (reply, answer) = oneshot::channel();
        let job = move |file: &ClusterFile| {
            let done = Operator::open(file).and_then(|mut operator| work(&mut operator));
            // The controller may have gone.
            let _ = reply.send(done);
        };
        let gone = || TargetError::Away("the thread that speaks with etcd has ended".into());
        self.jobs.send(Box::new(job)).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?.map_err(cluster_error)
    }
}

/// Hosts whose containers have vNICs of a network.
fn users_of(view: &View, network: &str) -> Vec<String> {
    let uses = |host: &&String| view.members(host).any(|(name, members)| name == network && !members.is_empty());
    view.hosts().keys().filter(uses).cloned().collect()
}

fn followed_by(view: &View, object: &AnyObject) -> Following {
    let at = object.metadata().resource_version.unwrap_or_default();
    let mut following = Following { of: view.hosts().len(), ..Following::default() };
    for host in view.hosts().keys() {
        let Some(followed) = view.followed().get(host).filter(|followed| followed.revision >= at) else {
            following.behind.push(host.clone());
            continue;
        };
        let is_it = |kind: Option<&str>, name: Option<&str>| {
            kind.is_none_or(|kind| kind == object.kind().name() && name == Some(object.name()))
        };
        let problem = followed.problems.iter().find(|problem| is_it(problem.kind.as_deref(), problem.name.as_deref()));
        match problem {
            Some(problem) => following.refused.push((host.clone(), problem.message.clone())),
            None => following.count += 1,
        }
    }
    following
}

impl Target for Cluster {
    async fn present(&mut self) -> Result<Vec<AnyObject>, TargetError> {
        self.with(|operator| {
            let state: State = operator.state()?;
            Ok(CLUSTER_KINDS.into_iter().flat_map(|kind| state.objects(kind)).filter(is_ours).collect())
        })
        .await
    }

    async fn apply(&mut self, objects: &[AnyObject]) -> Result<Vec<AnyObject>, TargetError> {
        let command = Command::Apply { objects: objects.to_vec() };
        self.with(move |operator| {
            let (_, outcomes) = operator.change_by(&Writer::Manager(KUBERNETES.into()), &command, false)?;
            Ok(outcomes.into_iter().map(|outcome| outcome.object).collect())
        })
        .await
    }

    async fn delete(&mut self, object: &AnyObject) -> Result<(), TargetError> {
        let (kind, name, version) = (object.kind(), object.name().to_owned(), object.metadata().resource_version);
        let in_use = self
            .with(move |operator| {
                if kind == ObjectKind::Network {
                    let users = users_of(&operator.view()?, &name);
                    if !users.is_empty() {
                        return Ok(users);
                    }
                }
                let command = Command::Delete { kind, name, version };
                operator.change_by(&Writer::Manager(KUBERNETES.into()), &command, false).map(|_| Vec::new())
            })
            .await?;
        if in_use.is_empty() {
            return Ok(());
        }
        let named = in_use[..in_use.len().min(NAMED_MAX)].join(", ");
        let message = format!("containers of {} hosts have vNICs of it: {named}", in_use.len());
        Err(TargetError::Refused(Reason::InUse.word().into(), message))
    }

    async fn following(&mut self, objects: &[AnyObject]) -> Result<Vec<Following>, TargetError> {
        let objects = objects.to_vec();
        self.with(move |operator| {
            let view = operator.view()?;
            Ok(objects.iter().map(|object| followed_by(&view, object)).collect())
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::test_server::at_socket;

    #[tokio::test]
    async fn an_answer_about_one_object_stops_no_other() {
        let directory = std::env::temp_dir().join(format!("freeflow-target-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let socket = directory.join("api.sock");
        at_socket(&socket, |seen| {
            let code: u16 = seen.path.split(['/', '?']).find_map(|part| part.strip_prefix('q')?.parse().ok()).unwrap();
            (code, json!({"code": code, "reason": "R", "message": "m"}).to_string())
        });
        let mut host = Host::new(&socket);
        for (code, is_refused) in [(409, true), (422, true), (500, true), (507, true), (502, false), (503, false)] {
            let metadata = json!({"name": format!("q{code}"), "resourceVersion": 7});
            let value = json!({"apiVersion": "freeflow.io/v1", "kind": "Quota", "metadata": metadata, "spec": {}});
            let answer = host.delete(&parse_object(&value).unwrap()).await.unwrap_err();
            assert_eq!(matches!(answer, TargetError::Refused(..)), is_refused, "{code}: {answer}");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
