//! The keys of a prefix, and every change of them: a list at a revision, then a watch from the next one.
//!
//! A watch that ends is begun again where it had come to, at another member if need be. Where etcd has compacted what
//! came since, the keys are listed again, and whoever follows finds by comparison what is gone. What was last known
//! stays good meanwhile: how old it is, [`News::Behind`] says.
use crate::client::{Client, Watch};
use crate::error::EtcdError;
use crate::messages::{KeyValue, WatchCreateRequest, WatchEvent, WatchResponse, prefix_end, revision, revision_of};
use freeflow_orchestrator::store::{Entry, Revision};
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// After a failure; twice as long each time, up to the longest, a half of it at random.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LONGEST: Duration = Duration::from_secs(5);
/// etcd answers the request for a watch at once.
const CREATED_TIME: Duration = Duration::from_secs(5);

/// One change of a key: its entry now, or `None`: it is gone. Keys are whole, as etcd has them.
pub type KeyChange = (String, Option<Entry>);

/// A [`Follower`] tells this next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// All keys, at a revision: at first, and whenever changes may have been missed. Those that are not here are gone.
    Listed(Revision, Vec<Entry>),
    /// All that this revision, or several up to it, has changed, in order.
    Changed(Revision, Vec<KeyChange>),
    /// Nothing has changed up to this revision.
    Unchanged(Revision),
    /// etcd does not answer: what is known may be old. It is tried again by the next call of [`Follower::next`].
    Behind(EtcdError),
}

/// Follows the keys of a prefix.
pub struct Follower {
    client: Client,
    prefix: String,
    /// Of what has been told.
    told: Option<Revision>,
    watch: Option<(Watch, usize)>,
    /// Parts of a revision that is not complete.
    parts: Vec<WatchEvent>,
    failures: u32,
}

fn change_of(event: WatchEvent) -> Option<KeyChange> {
    let entry = event.kv?.into_entry()?;
    Some(if event.kind == 0 { (entry.key.clone(), Some(entry)) } else { (entry.key, None) })
}

impl Follower {
    /// Of all keys that begin so.
    pub fn new(client: Client, prefix: &str) -> Self {
        Self { client, prefix: prefix.into(), told: None, watch: None, parts: Vec::new(), failures: 0 }
    }

    /// The next news, as long as it takes. It may be dropped while it waits: nothing is lost by that.
    pub async fn next(&mut self) -> News {
        if self.failures > 0 && self.watch.is_none() {
            sleep(pause(self.failures)).await;
        }
        loop {
            match self.step().await {
                Ok(Some(news)) => {
                    self.failures = 0;
                    return news;
                }
                Ok(None) => {}
                Err(EtcdError::Compacted) => (self.told, self.watch) = (None, None),
                Err(error) => {
                    if let Some((_, member)) = self.watch.take() {
                        self.client.leave(member);
                    }
                    self.failures = self.failures.saturating_add(1);
                    return News::Behind(error);
                }
            }
        }
    }

    async fn step(&mut self) -> Result<Option<News>, EtcdError> {
        let Some(told) = self.told else {
            let page = self.client.list(self.prefix.as_bytes(), 0).await?;
            let at = revision(page.revision);
            self.told = Some(at);
            let entries = page.kvs.into_iter().filter_map(KeyValue::into_entry).collect();
            return Ok(Some(News::Listed(at, entries)));
        };
        let Some((watch, _)) = &mut self.watch else {
            self.begin(told).await?;
            return Ok(None);
        };
        let response = watch.next().await?;
        self.take(response)
    }

    async fn begin(&mut self, told: Revision) -> Result<(), EtcdError> {
        let member = self.client.current();
        let create = WatchCreateRequest {
            key: self.prefix.clone().into_bytes(),
            range_end: prefix_end(self.prefix.as_bytes()),
            start_revision: i64::try_from(told.0).unwrap_or(i64::MAX).saturating_add(1),
            progress_notify: true,
            prev_kv: false,
            fragment: true,
        };
        self.parts.clear();
        let open = async {
            let mut watch = self.client.watch(member, create).await?;
            let response = watch.next().await?;
            Ok((watch, response))
        };
        let late = |_| Err(EtcdError::Unanswered("no watch is made".into()));
        match timeout(CREATED_TIME, open).await.unwrap_or_else(late) {
            Ok((watch, response)) if response.created && !response.canceled => {
                self.watch = Some((watch, member));
                Ok(())
            }
            Ok((_, response)) => Err(refusal(response)),
            Err(error) => {
                self.client.leave(member);
                Err(error)
            }
        }
    }

    fn take(&mut self, response: WatchResponse) -> Result<Option<News>, EtcdError> {
        if response.canceled {
            return Err(refusal(response));
        }
        let at = revision(revision_of(response.header.as_ref()));
        self.parts.extend(response.events);
        if response.fragment {
            return Ok(None);
        }
        let events = std::mem::take(&mut self.parts);
        // The header may be ahead of the events that are still to come from a past that etcd sends bit by bit.
        let last = events.iter().filter_map(|event| Some(event.kv.as_ref()?.mod_revision)).max();
        let until = last.map_or(at, revision);
        self.told = self.told.max(Some(until));
        let changes: Vec<KeyChange> = events.into_iter().filter_map(change_of).collect();
        Ok(Some(if last.is_none() { News::Unchanged(until) } else { News::Changed(until, changes) }))
    }
}

/// Why a watch was ended.
fn refusal(response: WatchResponse) -> EtcdError {
    match response.compact_revision {
        0 if response.cancel_reason.contains("permission denied") => EtcdError::Denied(response.cancel_reason),
        0 => EtcdError::Unanswered(format!("the watch was ended: {}", response.cancel_reason)),
        _ => EtcdError::Compacted,
    }
}

fn pause(failures: u32) -> Duration {
    let whole = PAUSE_FIRST.saturating_mul(1 << (failures - 1).min(16)).min(PAUSE_LONGEST);
    let share = RandomState::new().build_hasher().finish() % 1024;
    whole / 2 + whole / 2 * share as u32 / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_the_longest() {
        for failures in 1..100 {
            let pause = pause(failures);
            assert!(pause >= PAUSE_FIRST / 2 && pause <= PAUSE_LONGEST, "{failures}: {pause:?}");
        }
        assert!(super::pause(20) >= PAUSE_LONGEST / 2);
    }
}
