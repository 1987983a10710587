//! `/livez`: the router's threads answer. `/readyz`: and its worker turns, its peers thread is
//! there, and its run directory and its store can be written. What was found is the health of the
//! Host, too. How the host follows its cluster is said with it, and makes it no less ready: traffic goes on.
use super::failure::Failure;
use super::follower::{FollowerFile, FollowerState};
use super::fresh::{ANSWER_TIME_MAX, Fresh, fresh};
use super::link::Link;
use super::plane::{CheckPeersThread, ReportHealth};
use super::routes::{Asking, Server, admitted};
use axum::extract::{Extension, State};
use axum::response::Response;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::time::timeout;

/// Bytes written for a look: about those of a transaction of the store.
const PROBE_BYTES: usize = 64 << 10;

/// A directory that the router writes to, and its name for people.
type Place = (&'static str, PathBuf);

/// Findings.
type Found = Fresh<Vec<String>>;

/// Probes that were made: one of each at a time, and few in all, whoever asks how often.
pub struct Probes {
    places: Vec<Place>,
    threads: Found,
    disk: Found,
    /// A thread is at it, perhaps for as long as the disk does not answer.
    is_writing: Arc<AtomicBool>,
    follower: FollowerFile,
}

impl Probes {
    pub fn new(run_dir: PathBuf, state_dir: PathBuf) -> Self {
        let follower = FollowerFile::new(run_dir.clone());
        let mut places = vec![("store", state_dir)];
        if places[0].1 != run_dir {
            places.push(("run directory", run_dir));
        }
        let (threads, disk, is_writing) = Default::default();
        Self { places, threads, disk, is_writing, follower }
    }

    /// Faults found, and notes that are none; the control thread shows them from now on.
    pub async fn look(&self, link: &Link) -> (Vec<String>, Vec<String>) {
        let mut wrong = fresh(&self.threads, check_threads(link)).await;
        let places = self.places.clone();
        wrong.extend(fresh(&self.disk, check_disk(&self.is_writing, move || write_probes(&places))).await);
        let notes = self.follower().await.map(|state| state.notes(freeflow_shm::monotonic_ns())).unwrap_or_default();
        link.tell(ReportHealth { wrong: wrong.iter().chain(&notes).cloned().collect() });
        (wrong, notes)
    }

    /// How the host follows its cluster, if it does.
    pub async fn follower(&self) -> Option<FollowerState> {
        self.follower.state().await
    }
}

pub async fn livez(
    State(server): State<Arc<Server>>,
    Extension(asking): Extension<Asking>,
) -> Result<Response, Failure> {
    let _permit = admitted(&asking).await?;
    is_alive(State(server)).await
}

pub async fn readyz(
    State(server): State<Arc<Server>>,
    Extension(asking): Extension<Asking>,
) -> Result<Response, Failure> {
    let _permit = admitted(&asking).await?;
    is_ready(State(server)).await
}

/// For who asks one at a time anyway, as [`livez`].
pub async fn is_alive(State(server): State<Arc<Server>>) -> Result<Response, Failure> {
    answer(fresh(&server.probes.threads, check_threads(&server.link)).await, &[])
}

/// The same as [`readyz`].
pub async fn is_ready(State(server): State<Arc<Server>>) -> Result<Response, Failure> {
    let (wrong, notes) = server.probes.look(&server.link).await;
    answer(wrong, &notes)
}

/// Faults of the disk. A probe that has not come back is not followed by another.
async fn check_disk(is_writing: &Arc<AtomicBool>, write: impl FnOnce() -> Vec<String> + Send + 'static) -> Vec<String> {
    const SILENT: &str = "store: the disk does not answer";
    if is_writing.swap(true, Relaxed) {
        return vec![SILENT.into()];
    }
    let mark = is_writing.clone();
    let probe = tokio::task::spawn_blocking(move || {
        let wrong = write();
        mark.store(false, Relaxed);
        wrong
    });
    match timeout(ANSWER_TIME_MAX, probe).await {
        Ok(Ok(wrong)) => wrong,
        Ok(Err(_)) | Err(_) => vec![SILENT.into()],
    }
}

fn answer(wrong: Vec<String>, notes: &[String]) -> Result<Response, Failure> {
    if wrong.is_empty() {
        let text: String = notes.iter().map(|note| format!("{note}\n")).collect();
        return Ok(axum::response::IntoResponse::into_response(format!("ok\n{text}")));
    }
    Err(Failure::internal(wrong.join("; ")))
}

/// Faults of the threads. Each is asked by itself: one that does not answer keeps no other from
/// answering.
async fn check_threads(link: &Link) -> Vec<String> {
    let mut wrong = Vec::new();
    let control = link.ask_within(ANSWER_TIME_MAX, CheckPeersThread {});
    let (control, turns) = tokio::join!(control, link.worker_turns_within(ANSWER_TIME_MAX));
    match control {
        Ok(true) => {}
        Ok(false) => wrong.push("peers: the thread has ended".into()),
        Err(_) => wrong.push("control: the thread does not answer".into()),
    }
    if !turns {
        wrong.push("worker: it does not turn".into());
    }
    wrong
}

/// Faults of the places; each is named.
fn write_probes(places: &[Place]) -> Vec<String> {
    let wrong = places.iter().filter_map(|(name, path)| Some((name, write_probe(path).err()?)));
    wrong.map(|(name, error)| format!("{name}: {error}")).collect()
}

/// Whether the file system of a directory takes what is written.
fn write_probe(directory: &Path) -> io::Result<()> {
    let path = directory.join("ready.probe");
    let written =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path).and_then(|mut file| {
            file.write_all(&[0; PROBE_BYTES])?;
            file.sync_data()
        });
    let _ = std::fs::remove_file(&path);
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn probes_are_one_at_a_time_and_kept_for_a_while() {
        let found = Found::default();
        assert_eq!(fresh(&found, async { vec!["wrong".into()] }).await, ["wrong"]);
        assert_eq!(fresh(&found, async { panic!("asked again") }).await, ["wrong"]);
        let is_writing = Arc::new(AtomicBool::new(false));
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let stuck = check_disk(&is_writing, move || {
            let _ = wait.recv();
            Vec::new()
        });
        // The request is gone; the thread is not.
        assert!(timeout(Duration::from_millis(50), stuck).await.is_err());
        assert_eq!(check_disk(&is_writing, || panic!("a second thread")).await.len(), 1);
        end.send(()).unwrap();
        while is_writing.load(Relaxed) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(check_disk(&is_writing, Vec::new).await.is_empty());
    }

    #[test]
    fn each_directory_is_looked_at_and_named() {
        let own = std::env::temp_dir();
        let gone = own.join("freeflow-no-such-directory");
        let places = |run_dir: &Path, state_dir: &Path| Probes::new(run_dir.into(), state_dir.into()).places;
        assert!(write_probes(&places(&own, &own)).is_empty());
        for (run_dir, state_dir, name) in [(&own, &gone, "store: "), (&gone, &own, "run directory: ")] {
            let wrong = write_probes(&places(run_dir, state_dir));
            assert!(wrong.len() == 1 && wrong[0].starts_with(name), "{wrong:?}");
        }
        assert_eq!(write_probes(&places(&gone, &gone)).len(), 1, "they are the same");
    }
}
