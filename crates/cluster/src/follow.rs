//! A cluster's news for who waits for them in a thread, and a host's words about itself.
use crate::ClusterError;
use crate::file::ClusterFile;
use crate::keys::{FOLLOWED, RECORD};
use crate::records::{Followed, HostRecord, now_s};
use freeflow_etcd::{Client, Follower, News};
use freeflow_orchestrator::store::{Compare, StoreError, Transaction, Write};
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
}

/// A host's words about itself, written by a thread of its own: etcd may take its time.
pub struct Report {
    words: Sender<Words>,
    errors: Receiver<Option<String>>,
    last_error: Option<String>,
}

impl Report {
    /// Of the host with this name.
    ///
    /// # Errors
    /// No thread.
    pub fn start(file: &ClusterFile, host: &str) -> Result<Self, ClusterError> {
        let (words, from) = channel();
        let (errors_of, errors) = channel();
        let (file, root) = (file.clone(), file.keys().host(host));
        let body = move || write_all(&file, &root, &from, &errors_of);
        thread::Builder::new().name("ff-report".into()).spawn(body).map_err(|error| no_thread(&error))?;
        Ok(Self { words, errors, last_error: None })
    }

    /// Says it, and goes on saying it, as long as the host's record is the one that was written `before` (`None`: it is
    /// not there): a host that was removed, or whose name is another's by now, says nothing. A record is written only
    /// where one is given.
    pub fn say(&self, record: Option<HostRecord>, before: Option<Revision>, followed: Followed) {
        // The thread lives as long as this.
        let _ = self.words.send(Words { record, before, followed: followed.bounded() });
    }

    /// Why the last attempt failed; `None`: it did not.
    pub fn error(&mut self) -> Option<&str> {
        if let Some(last) = self.errors.try_iter().last() {
            self.last_error = last;
        }
        self.last_error.as_deref()
    }
}

fn write_all(file: &ClusterFile, root: &str, words: &Receiver<Words>, errors: &Sender<Option<String>>) {
    let (mut last, mut wait, mut failures) = (None::<Words>, HEARTBEAT, 0_u32);
    let mut store = None;
    loop {
        match words.recv_timeout(wait) {
            Ok(first) => last = Some(words.try_iter().last().unwrap_or(first)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let Some(Words { record, before, followed }) = &mut last else { continue };
        followed.at_s = now_s();
        let mut write = || -> Result<(), ClusterError> {
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
            store.commit(&Transaction { compares, writes })?;
            Ok(())
        };
        let error = write().err();
        failures = if error.is_some() { failures.saturating_add(1) } else { 0 };
        wait = match &error {
            Some(_) => retry_after(failures),
            None if last.as_ref().is_some_and(|words| !words.followed.claims.is_empty()) => CLAIM_BEAT,
            None => HEARTBEAT,
        };
        if error.is_some() {
            // Certificates are read anew with the next one.
            store = None;
        }
        if errors.send(error.map(|error| error.to_string())).is_err() {
            return;
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
