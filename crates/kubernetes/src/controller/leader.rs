//! One of several controllers is the leader, by a Lease: it works, the others wait.
//!
//! No clocks are compared: a lease is over when its holder has not renewed it for its whole time as seen here. A leader
//! that can't renew changes nothing from some seconds before that on (its [`Term`] is over), and ends: two never work
//! at once for longer than a request takes. FreeFlow's changes are transactions, and deletions name the version that
//! was seen, so that even then nothing is lost.
use super::conditions::rfc3339;
use crate::api::{ApiError, Client, Collection, Kind};
use crate::log;
use freeflow_shm::boottime_ns;
use serde_json::{Value, json};
use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{sleep, timeout};

const LEASES: Kind = Kind::new("coordination.k8s.io", "v1", "leases");
/// The lease of all controllers.
const NAME: &str = "freeflow-controller";
/// Time without renewal after which another one may lead.
const LEASE_S: u64 = 15;
/// A leader that could not renew for so long changes nothing more, and ends.
const RENEW_TIME_MAX: Duration = Duration::from_secs(10);
/// For an attempt to take, renew or release the lease.
const ATTEMPT_TIME: Duration = Duration::from_secs(5);
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// The time in which this process leads for certain. It ends by itself, unless the lease is renewed.
#[derive(Clone, Default)]
pub struct Term(Rc<Inner>);

#[derive(Default)]
struct Inner {
    /// By the clock that goes on while the machine sleeps.
    ends_ns: Cell<u64>,
    is_over: Cell<bool>,
    change: Mutex<()>,
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Term {
    /// By a request that began then.
    pub fn renew(&self, began_ns: u64) {
        self.0.ends_ns.set(began_ns.saturating_add(ns(RENEW_TIME_MAX)));
    }

    fn holds_at(&self, now_ns: u64) -> bool {
        !self.0.is_over.get() && now_ns < self.0.ends_ns.get()
    }

    /// To be kept while something is changed, one at a time; `None`: nothing may be changed any more.
    pub async fn change(&self) -> Option<MutexGuard<'_, ()>> {
        let change = self.0.change.lock().await;
        self.holds_at(boottime_ns()).then_some(change)
    }

    /// Ends it for good; comes back when the change under way is done.
    pub async fn end(&self) {
        self.0.is_over.set(true);
        drop(self.0.change.lock().await);
    }
}

/// A candidate.
pub struct Candidate {
    leases: Collection<Value>,
    namespace: String,
    identity: String,
    /// The last word of another leader, and when it came.
    seen: Option<(String, Instant)>,
    term: Term,
}

impl Candidate {
    /// `identity`: another one for each process.
    pub fn new(client: &Client, namespace: &str, identity: &str) -> Self {
        let client = client.clone().answer_time(ATTEMPT_TIME);
        Self {
            leases: Collection::of_namespace(&client, &LEASES, namespace),
            namespace: namespace.into(),
            identity: identity.into(),
            seen: None,
            term: Term::default(),
        }
    }

    /// The time in which it leads.
    pub fn term(&self) -> Term {
        self.term.clone()
    }

    /// One attempt to take or renew the lease; whether it is ours now.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub async fn try_once(&mut self, now: Instant) -> Result<bool, ApiError> {
        let time = rfc3339(SystemTime::now(), true);
        let Some(lease) = self.leases.find(NAME).await? else {
            let lease = json!({"apiVersion": LEASES.api_version(), "kind": "Lease",
                "metadata": {"name": NAME, "namespace": self.namespace},
                "spec": {"holderIdentity": self.identity, "leaseDurationSeconds": LEASE_S, "acquireTime": time,
                    "renewTime": time, "leaseTransitions": 0}});
            return is_done(self.leases.create(&lease).await);
        };
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
        let is_ours = holder == self.identity;
        if !is_ours && !holder.is_empty() {
            let word = format!("{holder} {}", lease["spec"]["renewTime"]);
            let duration = lease["spec"]["leaseDurationSeconds"].as_u64().unwrap_or(LEASE_S);
            match &self.seen {
                Some((seen, since)) if *seen == word && now.duration_since(*since) >= Duration::from_secs(duration) => {
                }
                Some((seen, _)) if *seen == word => return Ok(false),
                _ => {
                    self.seen = Some((word, now));
                    return Ok(false);
                }
            }
        }
        let mut spec = json!({"holderIdentity": self.identity, "leaseDurationSeconds": LEASE_S, "renewTime": time});
        if !is_ours {
            spec["acquireTime"] = time.into();
            spec["leaseTransitions"] = (lease["spec"]["leaseTransitions"].as_u64().unwrap_or(0) + 1).into();
        }
        // Only the lease that was read: of two candidates one is first.
        let patch = json!({"metadata": {"resourceVersion": lease["metadata"]["resourceVersion"]}, "spec": spec});
        is_done(self.leases.merge(NAME, &patch).await)
    }

    /// The same in a limited time, with the term that comes of it.
    async fn attempt(&mut self) -> Result<bool, ApiError> {
        let began_ns = boottime_ns();
        let late = |_| Err(ApiError::Unanswered("in time".into()));
        let done = timeout(ATTEMPT_TIME, self.try_once(Instant::now())).await.unwrap_or_else(late);
        if done == Ok(true) {
            self.term.renew(began_ns);
        }
        done
    }

    /// Waits until the lease is ours.
    pub async fn lead(&mut self) {
        let mut last = String::new();
        loop {
            match self.attempt().await {
                Ok(true) => return,
                Ok(false) => last.clear(),
                Err(error) => {
                    let text = error.to_string();
                    if text != last {
                        log::line(&format!("the lease {NAME}: {text}"));
                    }
                    last = text;
                }
            }
            sleep(RENEW_EVERY).await;
        }
    }

    /// Renews the lease until that fails; why it did.
    pub async fn keep(&mut self) -> String {
        loop {
            sleep(RENEW_EVERY).await;
            let why = match self.attempt().await {
                Ok(true) => continue,
                Ok(false) => return format!("the lease {NAME} is another's"),
                Err(error) => error.to_string(),
            };
            if !self.term.holds_at(boottime_ns() + ns(RENEW_EVERY)) {
                return format!("the lease {NAME} could not be renewed: {why}");
            }
        }
    }

    /// Gives the lease back, if it is ours: another candidate leads at once.
    ///
    /// # Errors
    /// See [`ApiError`]: it ends by itself then.
    pub async fn release(&mut self) -> Result<(), ApiError> {
        let release = async {
            let Some(lease) = self.leases.find(NAME).await? else { return Ok(()) };
            if lease["spec"]["holderIdentity"] != self.identity {
                return Ok(());
            }
            let time = rfc3339(SystemTime::now(), true);
            let spec = json!({"holderIdentity": null, "leaseDurationSeconds": 1, "renewTime": time});
            let patch = json!({"metadata": {"resourceVersion": lease["metadata"]["resourceVersion"]}, "spec": spec});
            is_done(self.leases.merge(NAME, &patch).await).map(drop)
        };
        let late = |_| Err(ApiError::Unanswered("in time".into()));
        timeout(ATTEMPT_TIME, release).await.unwrap_or_else(late)
    }
}

fn is_done(answer: Result<Value, ApiError>) -> Result<bool, ApiError> {
    match answer {
        Ok(_) => Ok(true),
        Err(error) if error.is_conflict() || error.is_already_there() => Ok(false),
        Err(error) => Err(error),
    }
}
