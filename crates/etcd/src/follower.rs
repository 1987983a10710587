//! Keys with some prefixes, and every change of them: a list at a revision, then one watch from the next one.
//!
//! The watch has the range from the first prefix to the end of the last one, so that all changes come in the order in
//! which they were made, and a revision that has come is complete. etcd sends nothing of the keys beside that range.
//!
//! A watch that ends is begun again where it had come to, at another member if need be. Where etcd has compacted what
//! came since, the keys are listed again, and whoever follows finds by comparison what is gone. What was last known
//! stays good meanwhile: how old it is, [`News::Behind`] says.
use crate::client::{Client, LISTING_BYTES_MAX, Watch, too_much};
use crate::error::EtcdError;
use crate::messages::{
    KeyValue, RangeRequest, WatchCreateRequest, WatchEvent, WatchResponse, prefix_end, revision, revision_of,
};
use crate::random;
use freeflow_orchestrator::store::{Entry, Revision};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

/// After a failure; twice as long each time, up to the longest, a half of it at random.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LONGEST: Duration = Duration::from_secs(2);
/// News that wait to be taken.
pub const NEWS_COUNT: usize = 16;
/// etcd answers the request for a watch at once.
const CREATED_TIME: Duration = Duration::from_secs(5);

/// One change of a key: its entry now, or `None`: it is gone. Keys are whole, as etcd has them.
pub type KeyChange = (String, Option<Entry>);

/// Told of the keys that are followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// All keys, at a revision: at first, and whenever changes may have been missed. Those that are not here are
    /// gone. The revision is an earlier one where etcd was restored from a backup.
    Listed(Revision, Vec<Entry>),
    /// All that this revision, or several up to it, has changed, in order.
    Changed(Revision, Vec<KeyChange>),
    /// Nothing has changed up to this revision.
    Unchanged(Revision),
    /// etcd does not answer: what is known may be old. It is tried again.
    Behind(EtcdError),
}

/// The keys with one prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Of its own.
    pub prefix: String,
    /// Bytes of keys and values that are listed at most.
    pub bytes_max: usize,
    /// Those that are more are left out; otherwise none of all parts are told.
    pub may_be_cut: bool,
    /// Where each writer has keys of its own, whose names come next: bytes of each, of which more are not listed. So
    /// one that fills its part has others know less of itself alone.
    pub writer_bytes_max: Option<usize>,
}

impl Part {
    /// One that has to be whole.
    pub fn whole(prefix: impl Into<String>) -> Self {
        Self { prefix: prefix.into(), bytes_max: LISTING_BYTES_MAX, may_be_cut: false, writer_bytes_max: None }
    }

    /// One that has to be whole but for what a writer has beyond so many bytes.
    pub fn of_writers(prefix: impl Into<String>, writer_bytes_max: usize) -> Self {
        Self { writer_bytes_max: Some(writer_bytes_max), ..Self::whole(prefix) }
    }
}

/// Follows some parts of the keys.
pub struct Follower {
    client: Client,
    /// At least one.
    told_of: Vec<Part>,
    /// Of what has been told.
    told: Option<Revision>,
    watch: Option<(Watch, usize)>,
    /// Parts of a revision that is not complete.
    parts: Vec<WatchEvent>,
    /// The revision that the last event was of, where more of it may come.
    open: Option<i64>,
    failures: u32,
}

impl WatchEvent {
    /// Whether it is of a key of these parts.
    fn is_of(&self, parts: &[Part]) -> bool {
        let key = self.kv.as_ref().map_or(&[][..], |kv| kv.key.as_slice());
        parts.iter().any(|part| key.starts_with(part.prefix.as_bytes()))
    }
}

fn change_of(event: WatchEvent) -> Option<KeyChange> {
    let entry = event.kv?.into_entry()?;
    Some(if event.kind == 0 { (entry.key.clone(), Some(entry)) } else { (entry.key, None) })
}

impl Follower {
    /// Follows all keys that begin so, in a task of its own in this runtime of tokio's, until the receiver is
    /// dropped. Who takes no news holds the task up, and no more than [`NEWS_COUNT`] of them are kept.
    pub fn spawn(client: Client, prefix: &str) -> mpsc::Receiver<News> {
        Self::spawn_of(client, vec![Part::whole(prefix)])
    }

    /// The same, of several parts, of which there is one at least: nothing is told, or kept, of keys that lie between
    /// them, though etcd sends those.
    pub fn spawn_of(client: Client, told_of: Vec<Part>) -> mpsc::Receiver<News> {
        let (sender, receiver) = mpsc::channel(NEWS_COUNT);
        let parts = Vec::new();
        let mut follower = Self { client, told_of, told: None, watch: None, parts, open: None, failures: 0 };
        tokio::spawn(async move {
            loop {
                let news = tokio::select! {
                    news = follower.next() => news,
                    () = sender.closed() => return,
                };
                if sender.send(news).await.is_err() {
                    return;
                }
            }
        });
        receiver
    }

    /// The next news, as long as it takes.
    async fn next(&mut self) -> News {
        if self.failures > 0 && self.watch.is_none() {
            sleep(pause(self.failures)).await;
        }
        loop {
            match self.step().await {
                Ok(Some(news)) => {
                    self.failures = 0;
                    return news;
                }
                Ok(None) => {
                    // It follows again, also where nothing has changed meanwhile.
                    if let Some(told) = self.told.filter(|_| self.failures > 0 && self.watch.is_some()) {
                        self.failures = 0;
                        return News::Unchanged(told);
                    }
                }
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
            let (mut at, mut entries) = (0, Vec::new());
            for part in &self.told_of {
                let (prefix, writer_bytes_max) = (part.prefix.as_bytes(), part.writer_bytes_max);
                let page = self.client.list_some(prefix, at, part.bytes_max, writer_bytes_max).await?;
                if page.more && !part.may_be_cut {
                    return Err(too_much(prefix, part.bytes_max));
                }
                at = page.revision;
                entries.extend(page.kvs.into_iter().filter_map(KeyValue::into_entry));
            }
            let at = revision(at);
            self.told = Some(at);
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
        // Where etcd was restored from a backup, its revisions have gone back, and a watch would wait until they are
        // there.
        let (key, range_end) = span(&self.told_of);
        let request = RangeRequest { key: key.clone(), limit: 1, ..RangeRequest::default() };
        if revision(self.client.range(request).await?.revision) < told {
            self.told = None;
            return Ok(());
        }
        let member = self.client.current();
        let create = WatchCreateRequest {
            key,
            range_end,
            // One that has been told: etcd takes a watch from the very revision up to which it is compacted, and may
            // have forgotten what was deleted in that.
            start_revision: i64::try_from(told.0).unwrap_or(i64::MAX).max(1),
            progress_notify: true,
            prev_kv: false,
            fragment: true,
        };
        (self.parts, self.open) = (Vec::new(), None);
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
            Ok((_, response)) => {
                let error = refusal(response);
                if error != EtcdError::Compacted {
                    self.client.leave(member);
                }
                Err(error)
            }
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
        let told = self.told.unwrap_or_default();
        let is_progress = response.events.is_empty() && self.open.is_none();
        // Revisions come in order: those before the last are complete, also in a part of a response.
        let mut until = None;
        for event in response.events.into_iter().filter(|event| revision(event.modified()) > told) {
            let modified = event.modified();
            until = self.open.replace(modified).filter(|open| *open < modified).or(until);
            // Others are not kept, however many of them a revision has.
            if event.is_of(&self.told_of) {
                self.parts.push(event);
            }
        }
        if !response.fragment {
            until = self.open.take().or(until);
        }
        // Not the header's revision: that may be ahead of events that etcd still sends bit by bit.
        let Some(until) = until.map(revision) else {
            let is_news = is_progress && at > told;
            self.told = self.told.max(is_news.then_some(at));
            return Ok(is_news.then_some(News::Unchanged(at)));
        };
        self.told = Some(until);
        let complete = self.parts.partition_point(|event| revision(event.modified()) <= until);
        let changes: Vec<KeyChange> = self.parts.drain(..complete).filter_map(change_of).collect();
        Ok(Some(if changes.is_empty() { News::Unchanged(until) } else { News::Changed(until, changes) }))
    }
}

/// The range of keys from the first part to the end of the last one.
fn span(parts: &[Part]) -> (Vec<u8>, Vec<u8>) {
    let first = parts.iter().map(|part| part.prefix.as_bytes()).min().unwrap_or_default();
    let ends = parts.iter().map(|part| prefix_end(part.prefix.as_bytes()));
    // One of these bytes has no end: it comes after all others.
    let is_later = |end: &Vec<u8>| (*end == [0], end.clone());
    let first = if first.is_empty() { &[0] } else { first };
    (first.to_vec(), ends.max_by_key(is_later).unwrap_or_else(|| vec![0]))
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
    let share = random() % 1024;
    whole / 2 + whole / 2 * share as u32 / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_spans_all_parts_and_no_key_beside_them() {
        let of = |prefixes: &[&str]| {
            let parts: Vec<Part> = prefixes.iter().map(|prefix| Part::whole(*prefix)).collect();
            let (first, end) = span(&parts);
            (String::from_utf8(first).expect("a text"), String::from_utf8(end).expect("a text"))
        };
        let text = |first: &str, end: &str| (first.to_owned(), end.to_owned());
        assert_eq!(of(&["/a/"]), text("/a/", "/a0"));
        assert_eq!(of(&["/places/", "/blocks/", "/hosts/"]), text("/blocks/", "/places0"));
        assert_eq!(of(&["/a/", ""]), text("\0", "\0"), "all keys");
    }

    #[test]
    fn pauses_grow_up_to_the_longest() {
        for failures in 1..100 {
            let pause = pause(failures);
            assert!(pause >= PAUSE_FIRST / 2 && pause <= PAUSE_LONGEST, "{failures}: {pause:?}");
        }
        assert!(super::pause(20) >= PAUSE_LONGEST / 2);
    }
}
