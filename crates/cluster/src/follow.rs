//! A cluster's news for who waits for them in a thread, and a host's words about itself.
use crate::ClusterError;
use crate::file::ClusterFile;
use crate::keys::{FOLLOWED, HOLDINGS, RECORD, Scope};
use crate::lease::lease_time;
use crate::records::{Followed, Holdings, HostRecord, now_s};
use crate::view::View;
use freeflow_etcd::{Client, EtcdStore, Follower, News};
use freeflow_orchestrator::store::{Committed, Compare, StoreError, Transaction, Write};
use freeflow_orchestrator::{Revision, Store};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

/// News that wait to be taken.
const NEWS_COUNT: usize = 16;
/// A host says that it is there so often, also where nothing has changed.
pub const HEARTBEAT: Duration = Duration::from_secs(30);
/// The same while it asks for vNICs: a claim of one that says nothing is none after a while.
const CLAIM_BEAT: Duration = Duration::from_secs(5);
/// A claim that was not said again for so long does not count.
pub(crate) const CLAIM_TIME: Duration = Duration::from_secs(3 * CLAIM_BEAT.as_secs());
/// So often in the time of a lease.
const BEAT_COUNT: u32 = 5;
/// After a failure; twice as long after each further one, up to the longest. etcd's members elect a leader within a
/// second or two, and all take a host that could not write its word for one that is behind.
const RETRY_FIRST: Duration = Duration::from_millis(250);
const RETRY_LONGEST: Duration = Duration::from_secs(3);

/// News of the keys of a cluster, by a thread of its own. It ends with this.
pub struct Follow {
    /// `None`: woken for something else.
    news: Receiver<Option<News>>,
    waker: SyncSender<Option<News>>,
}

/// Has [`Follow::next`] come back.
#[derive(Clone)]
pub struct Waker(SyncSender<Option<News>>);

impl Waker {
    /// One that is busy comes back anyway.
    pub fn wake(&self) {
        let _ = self.0.try_send(None);
    }
}

fn no_thread(error: &std::io::Error) -> ClusterError {
    StoreError::Broken(format!("no thread to be had: {error}")).into()
}

impl Follow {
    /// Begins to follow as the host of this file: all that concerns each host; how far they have followed, where it
    /// is a controller; and what bearers of tokens ask, where they are admitted here. Others don't keep that: whoever
    /// has a token could fill their memory.
    ///
    /// # Errors
    /// Certificates that can't be used, or no thread.
    pub fn start(file: &ClusterFile) -> Result<Self, ClusterError> {
        Self::start_with(file, file.scope(), file.admits())
    }

    /// Begins to follow these keys, without what bearers of tokens ask.
    ///
    /// # Errors
    /// Certificates that can't be used, or no thread.
    pub fn start_of(file: &ClusterFile, scope: Scope) -> Result<Self, ClusterError> {
        Self::start_with(file, scope, false)
    }

    fn start_with(file: &ClusterFile, scope: Scope, admits: bool) -> Result<Self, ClusterError> {
        let (endpoints, parts) = (file.endpoints()?, file.keys().followed(scope, admits));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| no_thread(&error))?;
        let client = {
            let _inside = runtime.enter();
            Client::new(&endpoints).map_err(|error| ClusterError::File(error.to_string()))?
        };
        let (sender, news) = sync_channel(NEWS_COUNT);
        let waker = sender.clone();
        let body = move || {
            runtime.block_on(async move {
                let mut from = Follower::spawn_of(client, parts);
                while let Some(news) = from.recv().await {
                    if sender.send(Some(news)).is_err() {
                        return;
                    }
                }
            });
        };
        thread::Builder::new().name("ff-follow".into()).spawn(body).map_err(|error| no_thread(&error))?;
        Ok(Self { news, waker })
    }

    /// For another thread that has something for who waits here.
    pub fn waker(&self) -> Waker {
        Waker(self.waker.clone())
    }

    /// The next news, if some come in this time and nobody wakes it.
    pub fn next(&self, wait: Duration) -> Option<News> {
        self.news.recv_timeout(wait).ok().flatten()
    }
}

/// A host's own words as etcd has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct There {
    /// When its record was written; `None`: there is none.
    pub record: Option<Revision>,
    /// Its holdings, and when they were written.
    pub holdings: Option<(Revision, Holdings)>,
}

impl There {
    /// As the news have them.
    pub fn of(view: &View, host: &str) -> Self {
        let record = view.hosts().get(host).map(|(revision, _)| *revision);
        Self { record, holdings: view.holdings().get(host).cloned() }
    }
}

/// Words of a host.
struct Words {
    /// To be written, if it is another than is there.
    record: Option<HostRecord>,
    holdings: Holdings,
    followed: Followed,
    there: There,
    /// [`Report::keep_lease`].
    lease_s: Option<u64>,
}

/// Result of an attempt to say them; `Ok(None)`: etcd has other words than they stand on.
type Outcome = Result<Option<Acknowledged>, String>;

/// A host's words about itself, written by a thread of its own: etcd may take its time.
///
/// They are two transactions: the record and the holdings, if they are others than etcd has; then how far the host has
/// followed, on condition that both, and the host's last word, are as they were found, or written. The first record of
/// a host comes last, by a transaction of its own: after a backup a host is known by its record, and all that it has
/// must be known by then.
pub struct Report {
    words: Sender<Words>,
    outcomes: Receiver<Outcome>,
    last_error: Option<String>,
    is_void: bool,
    last: Option<Acknowledged>,
    lease_s: Option<u64>,
}

/// Words of a host that etcd has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acknowledged {
    /// When it began to write them, by the clock that [`Report::start`] was given, nanoseconds.
    pub began_ns: u64,
    /// etcd's, by which they are there.
    pub revision: Revision,
    /// [`Followed::reclaim_after_s`], as it is in them.
    pub reclaim_after_s: Option<u64>,
}

impl Report {
    /// Of the host with this name.
    ///
    /// # Errors
    /// No thread.
    pub fn start(file: &ClusterFile, host: &str, clock_ns: fn() -> u64) -> Result<Self, ClusterError> {
        let (words, from) = channel();
        let (outcomes_of, outcomes) = channel();
        let writer = Writer::new(file, host, clock_ns);
        let body = move || writer.write_all(&from, &outcomes_of);
        thread::Builder::new().name("ff-report".into()).spawn(body).map_err(|error| no_thread(&error))?;
        Ok(Self { words, outcomes, last_error: None, is_void: false, last: None, lease_s: None })
    }

    /// Words are repeated often enough for a lease of so many seconds, also where they name no time any more.
    pub fn keep_lease(&mut self, reclaim_after_s: Option<u64>) {
        self.lease_s = reclaim_after_s;
    }

    /// Says it, and goes on saying it, as long as etcd has what is `there`: a host that was removed, or whose name is
    /// another's by now, says nothing. A record is written only where one is given.
    pub fn say(&self, record: Option<HostRecord>, holdings: Holdings, followed: Followed, there: There) {
        // The thread lives as long as this.
        let (holdings, followed) = (holdings.bounded(), followed.bounded());
        let _ = self.words.send(Words { record, holdings, followed, there, lease_s: self.lease_s });
    }

    fn take_outcomes(&mut self) {
        for outcome in self.outcomes.try_iter() {
            self.is_void = outcome == Ok(None);
            match outcome {
                Ok(done) => (self.last_error, self.last) = (None, done.or(self.last)),
                Err(error) => self.last_error = Some(error),
            }
        }
    }

    /// The last words that etcd has.
    pub fn acknowledged(&mut self) -> Option<Acknowledged> {
        self.take_outcomes();
        self.last
    }

    /// Why the last attempt failed; `None`: it did not.
    pub fn error(&mut self) -> Option<&str> {
        self.take_outcomes();
        self.last_error.as_deref()
    }

    /// Whether the last words were not said, since etcd has others than they stand on: they are to be said again when
    /// news of those have come.
    pub fn is_void(&mut self) -> bool {
        self.take_outcomes();
        self.is_void
    }
}

/// A host whose blocks can be taken back speaks several times before.
fn beat(words: &Words) -> Duration {
    let usual = if words.holdings.claims.is_empty() { HEARTBEAT } else { CLAIM_BEAT };
    let leases = [words.followed.reclaim_after_s, words.lease_s].into_iter().flatten();
    leases.map(|seconds| lease_time(Duration::from_secs(seconds)) / BEAT_COUNT).fold(usual, Duration::min)
}

/// The thread of a report.
struct Writer {
    file: ClusterFile,
    host: String,
    clock_ns: fn() -> u64,
    /// The part with the record and the holdings, and that with the rest.
    stores: Option<(EtcdStore, EtcdStore)>,
    /// Words as this thread has written them, which the news may not have had yet.
    written: There,
    /// When the host's last word was written, or that there is none; `None`: this thread does not know.
    last_word: Option<Option<Revision>>,
}

impl Writer {
    fn new(file: &ClusterFile, host: &str, clock_ns: fn() -> u64) -> Self {
        Self {
            file: file.clone(),
            host: host.into(),
            clock_ns,
            stores: None,
            written: There::default(),
            last_word: None,
        }
    }

    fn write_all(mut self, words: &Receiver<Words>, outcomes: &Sender<Outcome>) {
        let (mut last, mut wait, mut failures) = (None::<Words>, HEARTBEAT, 0_u32);
        loop {
            match words.recv_timeout(wait) {
                Ok(first) => last = Some(self.later(words.try_iter().last().unwrap_or(first))),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let Some(words) = &mut last else { continue };
            let done = self.write(words);
            failures = if done.is_err() { failures.saturating_add(1) } else { 0 };
            wait = match &done {
                Err(_) => retry_after(failures),
                Ok(_) => beat(words),
            };
            let is_void = matches!(done, Ok(None));
            if done.is_err() {
                // Certificates are read again with the next one. The word may be there, or come yet.
                (self.stores, self.last_word) = (None, None);
            }
            if is_void {
                // They are not said later either: what they stand on may come back, after a host was removed.
                (self.written, last) = (There::default(), None);
            }
            if outcomes.send(done.map_err(|error| error.to_string())).is_err() {
                return;
            }
        }
    }

    /// On what this thread has written itself, where that is later.
    fn later(&self, mut words: Words) -> Words {
        let at = |there: &There| there.holdings.as_ref().map(|(revision, _)| *revision);
        if at(&self.written) > at(&words.there) {
            if self.written.record > words.there.record {
                words.record = None;
            }
            words.there = self.written.clone();
        }
        words
    }

    /// `None`: etcd has other words than these stand on, and nothing more is said.
    fn write(&mut self, words: &mut Words) -> Result<Option<Acknowledged>, ClusterError> {
        let keys = self.file.keys();
        let (own, said) = match &mut self.stores {
            Some(stores) => stores,
            None => {
                let said = self.file.store(&keys.said(&self.host))?.without_receipts();
                self.stores.insert((self.file.store(&keys.host(&self.host))?, said))
            }
        };
        let write = |key: &str, value: Vec<u8>| Write { key: key.into(), value: Some(value), lease: None };
        let compare = |key: &str, modified| Compare { key: key.into(), modified };
        let encoded = |record: &HostRecord| serde_json::to_vec(record).expect("a record is encodable");
        let is_said = words.there.holdings.as_ref().is_some_and(|(_, there)| *there == words.holdings);
        let is_first = words.there.record.is_none();
        // A claim is said again all the time.
        if !is_said || (words.record.is_some() && !is_first) || !words.holdings.claims.is_empty() {
            let mut writes =
                vec![write(HOLDINGS, serde_json::to_vec(&words.holdings).expect("holdings are encodable"))];
            let record = words.record.take_if(|_| !is_first);
            writes.extend(record.as_ref().map(|record| write(RECORD, encoded(record))));
            let holdings = words.there.holdings.as_ref().map(|(revision, _)| *revision);
            let compares = vec![compare(RECORD, words.there.record), compare(HOLDINGS, holdings)];
            let Committed::Done(at) = own.commit(&Transaction { compares, writes })? else { return Ok(None) };
            let record = record.map(|_| at).or(words.there.record);
            words.there = There { record, holdings: Some((at, words.holdings.clone())) };
            self.written = words.there.clone();
        }
        let Some((holdings, _)) = words.there.holdings else { return Ok(None) };
        let record = words.there.record.unwrap_or(Revision(0));
        said.guard(&[(&keys.record(&self.host), record), (&keys.holdings(&self.host), holdings)]);
        let Some(acknowledged) = self.write_word(&mut words.followed)? else { return Ok(None) };
        // A host that is known is given blocks: all that it has must be known before.
        if let Some(record) = &words.record {
            let compares = vec![compare(RECORD, None), compare(HOLDINGS, Some(holdings))];
            let writes = vec![write(RECORD, encoded(record))];
            let Some((own, _)) = &mut self.stores else { return Ok(None) };
            let Committed::Done(at) = own.commit(&Transaction { compares, writes })? else { return Ok(None) };
            (words.there.record, words.record) = (Some(at), None);
            self.written = words.there.clone();
        }
        Ok(Some(acknowledged))
    }

    /// On condition that the word before it is the one that was found: so a word that is late, of this process or of
    /// one that was killed, comes after no later one. It could name a shorter time.
    fn write_word(&mut self, followed: &mut Followed) -> Result<Option<Acknowledged>, ClusterError> {
        let Some((_, said)) = &mut self.stores else { return Ok(None) };
        loop {
            let before = match self.last_word {
                Some(before) => before,
                None => said.get(FOLLOWED, None)?.map(|entry| entry.modified),
            };
            followed.at_s = now_s();
            let (began_ns, reclaim_after_s) = ((self.clock_ns)(), followed.reclaim_after_s);
            let value = serde_json::to_vec(&followed).expect("words are encodable");
            let compares = vec![Compare { key: FOLLOWED.into(), modified: before }];
            let writes = vec![Write { key: FOLLOWED.into(), value: Some(value), lease: None }];
            if let Committed::Done(revision) = said.commit(&Transaction { compares, writes })? {
                self.last_word = Some(Some(revision));
                return Ok(Some(Acknowledged { began_ns, revision, reclaim_after_s }));
            }
            let there = said.get(FOLLOWED, None)?.map(|entry| entry.modified);
            if there == before {
                // It is the record or the holdings that are others.
                return Ok(None);
            }
            self.last_word = Some(there);
        }
    }
}

fn retry_after(failures: u32) -> Duration {
    RETRY_FIRST.saturating_mul(1 << (failures - 1).min(8)).min(RETRY_LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_come_soon_and_then_at_the_longest_pause() {
        let pauses: Vec<u128> = (1..=6).map(|failures| retry_after(failures).as_millis()).collect();
        assert_eq!(pauses, [250, 500, 1000, 2000, 3000, 3000]);
        assert_eq!(retry_after(u32::MAX), RETRY_LONGEST);
    }
}
