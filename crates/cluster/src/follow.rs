//! A cluster's news for who waits for them in a thread, and a host's words about itself.
use crate::ClusterError;
use crate::file::ClusterFile;
use crate::keys::{FOLLOWED, RECORD};
use crate::lease::lease_time;
use crate::records::{Followed, HostRecord, now_s};
use freeflow_etcd::{Client, Follower, News};
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
/// After a failure.
const RETRY: Duration = Duration::from_secs(3);

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
    /// Begins to follow: all that concerns each host; and what bearers of tokens ask, where they are admitted here.
    /// Others don't keep that: whoever has a token could fill their memory.
    ///
    /// # Errors
    /// Certificates that can't be used, or no thread.
    pub fn start(file: &ClusterFile) -> Result<Self, ClusterError> {
        Self::start_of(file, file.admits())
    }

    /// The same, with or without what is asked.
    pub(crate) fn start_of(file: &ClusterFile, admits: bool) -> Result<Self, ClusterError> {
        let (endpoints, prefix, parts) = (file.endpoints()?, file.keys().prefix(), file.keys().followed(admits));
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
                let mut from = Follower::spawn_of(client, &prefix, parts);
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

/// Words of a host.
struct Words {
    /// To be written, if it is another than is there.
    record: Option<HostRecord>,
    /// When that was written which is there; `None`: none is.
    before: Option<Revision>,
    followed: Followed,
    /// [`Report::keep_lease`].
    lease_s: Option<u64>,
}

/// A host's words about itself, written by a thread of its own: etcd may take its time.
pub struct Report {
    words: Sender<Words>,
    done: Receiver<Result<Option<Acknowledged>, String>>,
    last_error: Option<String>,
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
    /// Of the host with this name; `clock_ns`: one that counts, also while the machine sleeps, nanoseconds.
    ///
    /// # Errors
    /// No thread.
    pub fn start(file: &ClusterFile, host: &str, clock_ns: fn() -> u64) -> Result<Self, ClusterError> {
        let (words, from) = channel();
        let (done_of, done) = channel();
        let (file, root) = (file.clone(), file.keys().host(host));
        let body = move || write_all(&file, &root, (&from, &done_of), clock_ns);
        thread::Builder::new().name("ff-report".into()).spawn(body).map_err(|error| no_thread(&error))?;
        Ok(Self { words, done, last_error: None, last: None, lease_s: None })
    }

    /// Words are repeated often enough for a lease of so many seconds, also where they name no time any more.
    pub fn keep_lease(&mut self, reclaim_after_s: Option<u64>) {
        self.lease_s = reclaim_after_s;
    }

    /// Says it, and goes on saying it, as long as the host's record is the one that was written `before` (`None`: it is
    /// not there): a host that was removed, or whose name is another's by now, says nothing. A record is written only
    /// where one is given.
    pub fn say(&self, record: Option<HostRecord>, before: Option<Revision>, followed: Followed) {
        // The thread lives as long as this.
        let _ = self.words.send(Words { record, before, followed: followed.bounded(), lease_s: self.lease_s });
    }

    /// Why the last attempt failed; `None`: it did not.
    pub fn error(&mut self) -> Option<&str> {
        self.look();
        self.last_error.as_deref()
    }

    /// The last words that etcd has.
    pub fn acknowledged(&mut self) -> Option<Acknowledged> {
        self.look();
        self.last
    }

    fn look(&mut self) {
        for done in self.done.try_iter() {
            match done {
                Ok(done) => (self.last_error, self.last) = (None, done.or(self.last)),
                Err(error) => self.last_error = Some(error),
            }
        }
    }
}

/// A host whose blocks can be taken back speaks several times before.
fn beat(words: &Words) -> Duration {
    let usual = if words.followed.claims.is_empty() { HEARTBEAT } else { CLAIM_BEAT };
    let leases = [words.followed.reclaim_after_s, words.lease_s].into_iter().flatten();
    leases.map(|seconds| lease_time(Duration::from_secs(seconds)) / BEAT_COUNT).fold(usual, Duration::min)
}

type Done = Sender<Result<Option<Acknowledged>, String>>;

fn write_all(file: &ClusterFile, root: &str, (words, done): (&Receiver<Words>, &Done), clock_ns: fn() -> u64) {
    let (mut last, mut wait) = (None::<Words>, HEARTBEAT);
    let mut store = None;
    loop {
        match words.recv_timeout(wait) {
            Ok(first) => last = Some(words.try_iter().last().unwrap_or(first)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let Some(Words { record, before, followed, .. }) = &mut last else { continue };
        followed.at_s = now_s();
        let (began_ns, reclaim_after_s) = (clock_ns(), followed.reclaim_after_s);
        let mut write = || -> Result<Option<Acknowledged>, ClusterError> {
            let store = match &mut store {
                Some(store) => store,
                None => store.insert(file.store(root)?),
            };
            let write = |key: &str, value: Vec<u8>| Write { key: key.into(), value: Some(value), lease: None };
            let bytes = serde_json::to_vec(followed).expect("words are encodable");
            let mut writes = vec![write(FOLLOWED, bytes)];
            if let Some(record) = record {
                writes.push(write(RECORD, serde_json::to_vec(record).expect("a record is encodable")));
            }
            // In a conflict the record is another one, of which news come: nothing is said until then.
            let compares = vec![Compare { key: RECORD.into(), modified: *before }];
            Ok(match store.commit(&Transaction { compares, writes })? {
                Committed::Done(revision) => Some(Acknowledged { began_ns, revision, reclaim_after_s }),
                Committed::Conflict(_) => None,
            })
        };
        let written = write();
        wait = match &written {
            Err(_) => RETRY,
            Ok(_) => last.as_ref().map_or(HEARTBEAT, beat),
        };
        if written.is_err() {
            // Certificates are read anew with the next one.
            store = None;
        }
        if done.send(written.map_err(|error| error.to_string())).is_err() {
            return;
        }
    }
}
