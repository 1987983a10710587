//! How the host follows its cluster, by the file that its follower keeps in the run directory: for `/readyz`, the
//! Host's health and the metrics. A host that follows none has no such file.
//!
//! It is the host's own word, a time and a number; nothing of etcd's is parsed here.
use super::fresh::{ANSWER_TIME_MAX, Fresh, fresh};
use serde::Deserialize;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::time::timeout;

/// Written whole, and renamed, by `freeflow cluster follow`.
const FILE: &str = "cluster.state";
const FILE_BYTES_MAX: usize = 256;
/// So long after the last word it is said: etcd elects another leader meanwhile.
const SILENCE_NS: u64 = 15_000_000_000;

/// Contents of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct FollowerState {
    /// When etcd was last known to answer, by CLOCK_MONOTONIC.
    heard_ns: u64,
    /// How much the host can't follow.
    pub problem_count: u64,
}

impl FollowerState {
    #[cfg(test)]
    pub fn of(heard_ns: u64, problem_count: u64) -> Self {
        Self { heard_ns, problem_count }
    }

    fn read(run_dir: &Path) -> Option<Self> {
        let mut bytes = [0; FILE_BYTES_MAX];
        let length = File::open(run_dir.join(FILE)).ok()?.read(&mut bytes).ok()?;
        serde_json::from_slice(&bytes[..length]).ok()
    }

    /// Since the host last knew what is declared, nanoseconds; it grows where the follower has ended, too.
    pub fn behind_ns(self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.heard_ns)
    }

    /// Sentences for whoever asks how the host is, also by TCP: no names.
    pub fn notes(self, now_ns: u64) -> Vec<String> {
        let mut notes = Vec::new();
        let behind_ns = self.behind_ns(now_ns);
        if behind_ns > SILENCE_NS {
            let seconds = behind_ns / 1_000_000_000;
            notes.push(format!("cluster: nothing was heard of etcd for {seconds} s; what this host has goes on"));
        }
        if self.problem_count > 0 {
            notes.push(format!("cluster: {} problems, see freeflow status", self.problem_count));
        }
        notes
    }
}

/// Reads the file, once a second at most, and one reading at a time.
pub(crate) struct FollowerFile {
    run_dir: PathBuf,
    found: Fresh<Option<FollowerState>>,
    is_reading: Arc<AtomicBool>,
}

impl FollowerFile {
    pub fn new(run_dir: PathBuf) -> Self {
        Self { run_dir, found: Fresh::default(), is_reading: Arc::default() }
    }

    /// `None`: no cluster is followed; or the disk does not answer, which is said elsewhere.
    pub async fn state(&self) -> Option<FollowerState> {
        fresh(&self.found, self.read()).await
    }

    async fn read(&self) -> Option<FollowerState> {
        if self.is_reading.swap(true, Relaxed) {
            return None;
        }
        let (run_dir, mark) = (self.run_dir.clone(), self.is_reading.clone());
        let reading = tokio::task::spawn_blocking(move || {
            let state = FollowerState::read(&run_dir);
            mark.store(false, Relaxed);
            state
        });
        timeout(ANSWER_TIME_MAX, reading).await.ok()?.ok()?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_is_behind_since_it_last_heard_of_etcd() {
        let directory = std::env::temp_dir().join(format!("ff-follower-file-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let read = async || FollowerFile::new(directory.clone()).state().await;
        assert_eq!(read().await, None, "it follows none");
        for (text, expected) in [
            (r#"{"heard_ns": 5000000000, "problem_count": 0}"#, Some((5_000_000_000, 0))),
            (r#"{"heard_ns": 1, "problem_count": 3, "later": "x"}"#, Some((1, 3))),
            ("nonsense", None),
            (&format!(r#"{{"heard_ns": 1, "problem_count": 3, "x": "{}"}}"#, "y".repeat(FILE_BYTES_MAX)), None),
        ] {
            std::fs::write(directory.join(FILE), text).unwrap();
            assert_eq!(read().await.map(|state| (state.heard_ns, state.problem_count)), expected, "{text}");
        }
        let state = FollowerState::of;
        assert!(state(5, 0).notes(5 + SILENCE_NS).is_empty() && state(9, 0).notes(0).is_empty());
        let notes = state(0, 2).notes(61_000_000_000);
        assert!(notes[0].contains("61 s") && notes[1].contains("2 problems"), "{notes:?}");
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
