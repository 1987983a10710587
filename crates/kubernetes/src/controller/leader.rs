//! One of several controllers is the leader, by a Lease: it works, the others wait.
//!
//! No clocks are compared: a lease is over when its holder has not renewed it for its whole time as seen here. A leader
//! that can't renew ends before that, so that two never work at once for longer than a request takes; and FreeFlow's
//! changes are transactions, so that even then nothing is lost.
use super::conditions::rfc3339;
use crate::api::{ApiError, Client, Collection, Kind};
use crate::log;
use serde_json::{Value, json};
use std::time::{Duration, Instant, SystemTime};
use tokio::time::{sleep, timeout};

const LEASES: Kind = Kind::new("coordination.k8s.io", "v1", "leases");
/// The lease of all controllers.
const NAME: &str = "freeflow-controller";
/// Time without renewal after which another one may lead.
const LEASE_S: u64 = 15;
/// A leader that could not renew for so long ends.
const RENEW_TIME_MAX: Duration = Duration::from_secs(10);
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// A candidate.
pub struct Candidate {
    leases: Collection<Value>,
    namespace: String,
    identity: String,
    /// The last word of another leader, and when it came.
    seen: Option<(String, Instant)>,
}

impl Candidate {
    /// `identity`: another one for each process.
    pub fn new(client: &Client, namespace: &str, identity: &str) -> Self {
        let client = client.clone().answer_time(RENEW_TIME_MAX / 2);
        Self {
            leases: Collection::of_namespace(&client, &LEASES, namespace),
            namespace: namespace.into(),
            identity: identity.into(),
            seen: None,
        }
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

    /// Waits until the lease is ours.
    pub async fn lead(&mut self) {
        let mut last = String::new();
        loop {
            match self.try_once(Instant::now()).await {
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
        let mut renewed = Instant::now();
        loop {
            sleep(RENEW_EVERY).await;
            let begin = Instant::now();
            let attempt = timeout(RENEW_TIME_MAX / 2, self.try_once(begin)).await;
            let late = |_| Err(ApiError::Unanswered("in time".into()));
            let why = match attempt.unwrap_or_else(late) {
                Ok(true) => {
                    renewed = begin;
                    continue;
                }
                Ok(false) => return format!("the lease {NAME} is another's"),
                Err(error) => error.to_string(),
            };
            if renewed.elapsed() + RENEW_EVERY > RENEW_TIME_MAX {
                return format!("the lease {NAME} could not be renewed: {why}");
            }
        }
    }
}

fn is_done(answer: Result<Value, ApiError>) -> Result<bool, ApiError> {
    match answer {
        Ok(_) => Ok(true),
        Err(error) if error.is_conflict() || error.is_already_there() => Ok(false),
        Err(error) => Err(error),
    }
}
