//! Claims: `freeflow run` asks the host's follower for a vNIC of the cluster's that is not here.
//!
//! By a socket in the run directory: a line of JSON with the [`Claim`], and a line with the [`Answer`]. The connection
//! stays until the container has the vNIC: so long it is let go to nobody else.
use crate::failure::{Context, Failure, Result, fail};
use crate::record::now_ms;
use freeflow_cluster::Waker;
use freeflow_hostnet::run_dir::RunDir;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait for a vNIC that another host may let go, unless the caller waits for ever.
const CLAIM_TIME: Duration = Duration::from_secs(10);
/// Between two looks whether the caller is still there.
const LOOK: Duration = Duration::from_millis(250);
const LINE_BYTES_MAX: u64 = 4096;
const LINE_TIME: Duration = Duration::from_secs(5);
const CLAIM_COUNT_MAX: usize = 64;

#[derive(Debug, Serialize, Deserialize)]
struct Claim {
    vnic: String,
    /// Until it is there, however long.
    waits: bool,
}

/// State of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The vNIC is this host's, and there.
    Here,
    /// It can't be had; a sentence for people.
    Refused(String),
    /// It may be had yet. It is refused with this sentence when time is up.
    Later(String),
}

struct Wanted {
    vnic: String,
    answer: Option<Answer>,
}

#[derive(Default)]
struct Shared {
    last_number: u64,
    /// By number of the claim: later ones are larger.
    wanted: BTreeMap<u64, Wanted>,
    waker: Option<Waker>,
}

/// Claims of this host's callers, as its follower serves them.
#[derive(Clone, Default)]
pub struct Claims(Arc<(Mutex<Shared>, Condvar)>);

fn socket_of(run_dir: &RunDir) -> PathBuf {
    run_dir.path().join("cluster.sock")
}

impl Claims {
    /// Begins to listen.
    pub fn listen(run_dir: &RunDir) -> Result<Self> {
        let (claims, path) = (Self::default(), socket_of(run_dir));
        // Another follower's of before: there is one at a time.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).context(path.display())?;
        fs::set_permissions(&path, Permissions::from_mode(0o600)).context(path.display())?;
        let of_thread = claims.clone();
        let body = move || {
            for stream in listener.incoming() {
                match stream {
                    Ok(stream) => of_thread.begin(stream),
                    Err(_) => thread::sleep(LOOK),
                }
            }
        };
        thread::Builder::new().name("ff-claims".into()).spawn(body).context("no thread to be had")?;
        Ok(claims)
    }

    fn begin(&self, stream: UnixStream) {
        let claims = self.clone();
        let body = move || {
            let _ = claims.serve(&stream);
        };
        // Without a thread the connection ends, and the caller says so.
        let _ = thread::Builder::new().name("ff-claim".into()).spawn(body);
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread to wake when there is a new claim.
    pub fn set_waker(&self, waker: Waker) {
        self.shared().waker = Some(waker);
    }

    /// vNICs that are asked for, each with the number of the oldest claim.
    pub fn wanted(&self) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        for (number, wanted) in &self.shared().wanted {
            all.entry(wanted.vnic.clone()).or_insert(*number);
        }
        all
    }

    /// Notes the state of the claims for a vNIC.
    pub fn answer(&self, vnic: &str, answer: &Answer) {
        let mut shared = self.shared();
        for wanted in shared.wanted.values_mut().filter(|wanted| wanted.vnic == vnic) {
            wanted.answer = Some(answer.clone());
        }
        drop(shared);
        self.0.1.notify_all();
    }

    fn add(&self, vnic: &str) -> Option<u64> {
        let mut shared = self.shared();
        if shared.wanted.len() >= CLAIM_COUNT_MAX {
            return None;
        }
        let number = now_ms().max(shared.last_number + 1);
        shared.last_number = number;
        shared.wanted.insert(number, Wanted { vnic: vnic.into(), answer: None });
        shared.waker.iter().for_each(Waker::wake);
        Some(number)
    }

    fn remove(&self, number: u64) {
        let mut shared = self.shared();
        shared.wanted.remove(&number);
        shared.waker.iter().for_each(Waker::wake);
    }

    fn serve(&self, stream: &UnixStream) -> std::io::Result<()> {
        stream.set_read_timeout(Some(LINE_TIME))?;
        let mut line = String::new();
        BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line)?;
        let claim: Claim = serde_json::from_str(&line)?;
        let Some(number) = self.add(&claim.vnic) else {
            return say(stream, &Answer::Refused("too many claims for vNICs at once; try again".into()));
        };
        let done = self.wait(stream, &claim, number).and_then(|answer| {
            say(stream, &answer)?;
            // Until the container has it.
            while answer == Answer::Here && is_there(stream) {
                thread::sleep(LOOK / 5);
            }
            Ok(())
        });
        self.remove(number);
        done
    }

    fn wait(&self, stream: &UnixStream, claim: &Claim, number: u64) -> std::io::Result<Answer> {
        let until = Instant::now() + CLAIM_TIME;
        let mut shared = self.shared();
        loop {
            let answer = shared.wanted.get(&number).and_then(|wanted| wanted.answer.clone());
            let is_over = Instant::now() >= until;
            match answer {
                Some(Answer::Here) => return Ok(Answer::Here),
                Some(Answer::Refused(why)) if !claim.waits => return Ok(Answer::Refused(why)),
                Some(Answer::Later(why)) if is_over && !claim.waits => return Ok(Answer::Refused(why)),
                None if is_over && !claim.waits => {
                    return Ok(Answer::Refused("the follower of the cluster does not answer".into()));
                }
                _ => {}
            }
            shared = self.0.1.wait_timeout(shared, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            if !is_there(stream) {
                return Err(ErrorKind::BrokenPipe.into());
            }
        }
    }
}

fn say(mut stream: &UnixStream, answer: &Answer) -> std::io::Result<()> {
    let mut line = serde_json::to_string(answer)?;
    line.push('\n');
    stream.write_all(line.as_bytes())
}

/// The caller says nothing more, and ends the connection in the end.
fn is_there(mut stream: &UnixStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return false;
    }
    let read = stream.read(&mut [0]);
    let is_there = read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
    is_there && stream.set_nonblocking(false).is_ok()
}

/// A vNIC that is this host's as long as this is kept.
pub struct Claimed(UnixStream);

impl Drop for Claimed {
    fn drop(&mut self) {
        // A container's first process may have inherited it.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

fn ask(run_dir: &RunDir, vnic: &str, waits: bool) -> Result<UnixStream> {
    let away =
        |_| Failure::new(format!("the follower of the cluster is not there; see freeflow{} doctor", run_dir.option()));
    let stream = UnixStream::connect(socket_of(run_dir)).map_err(away)?;
    let mut line = serde_json::to_string(&Claim { vnic: vnic.into(), waits }).expect("a claim is encodable");
    line.push('\n');
    (&stream).write_all(line.as_bytes()).map_err(away)?;
    Ok(stream)
}

fn follows(run_dir: &RunDir) -> bool {
    run_dir.settings().is_some_and(|settings| settings.cluster.is_some())
}

/// Asks the follower for a vNIC of the cluster's. `None`: this host follows no cluster.
pub fn claim(run_dir: &RunDir, vnic: &str, waits: bool) -> Result<Option<Claimed>> {
    if !follows(run_dir) {
        return Ok(None);
    }
    let stream = ask(run_dir, vnic, waits)?;
    let mut answer = String::new();
    BufReader::new((&stream).take(LINE_BYTES_MAX)).read_line(&mut answer).context("the follower of the cluster")?;
    match serde_json::from_str(&answer) {
        Ok(Answer::Here) => Ok(Some(Claimed(stream))),
        Ok(Answer::Refused(why) | Answer::Later(why)) => fail!("the vNIC {vnic}: {why}"),
        Err(_) => fail!("the follower of the cluster has ended; see freeflow{} doctor", run_dir.option()),
    }
}

/// Has the follower, if there is one, know that a container is to have a vNIC that is here.
pub fn announce(run_dir: &RunDir, vnic: &str) -> Option<Claimed> {
    ask(run_dir, vnic, false).ok().filter(|_| follows(run_dir)).map(Claimed)
}
