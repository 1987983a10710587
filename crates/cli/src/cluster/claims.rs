//! Claims: `freeflow run` asks the host's follower for a vNIC of the cluster's that is not here; and, for each
//! container, to meet the other hosts of its network.
//!
//! By a socket in the run directory: a line of JSON with the [`Request`], and a line with the [`Answer`]. For a vNIC
//! the connection stays until the container has it: so long it is let go to nobody else.
use crate::failure::{Context, Failure, Result, fail};
use crate::record::now_ms;
use freeflow_cluster::Waker;
use freeflow_hostnet::run_dir::RunDir;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
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
const NOTICE_TIME: Duration = Duration::from_millis(500);
const LINE_BYTES_MAX: u64 = 4096;
const LINE_TIME: Duration = Duration::from_secs(5);
const CLAIM_COUNT_MAX: usize = 64;
/// Longest wait for the other hosts of a network: a container does not fail for them.
const MEETING_TIME: Duration = Duration::from_secs(2);
/// Containers that wait for them at once.
const MEETING_COUNT_MAX: usize = 1024;

#[derive(Debug, Serialize, Deserialize)]
enum Request {
    Claim(Claim),
    /// A container is to be in this network.
    Meet(String),
}

#[derive(Debug, Serialize, Deserialize)]
struct Claim {
    vnic: String,
    /// Until it is there, however long.
    waits: bool,
    /// It is there, and is to stay: no host is asked.
    is_present: bool,
}

/// State of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The vNIC is this host's, and there.
    Here,
    /// It can't be had now; a sentence for people.
    Refused(String),
    /// Nor later.
    Never(String),
    /// It may be had yet. It is refused with this sentence when time is up.
    Later(String),
}

struct Wanted {
    vnic: String,
    is_present: bool,
    answer: Option<Answer>,
}

#[derive(Default)]
struct Shared {
    last_number: u64,
    /// By number of the claim: later ones are larger.
    wanted: BTreeMap<u64, Wanted>,
    /// The network of each container that waits for other hosts, and of those that need not wait any more.
    meetings: BTreeMap<u64, String>,
    released: BTreeSet<u64>,
    /// Networks of containers that need not wait, since the follower last looked.
    entered: BTreeSet<String>,
    /// Networks whose other hosts this one is connected to, as far as they can be reached.
    met: BTreeSet<String>,
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

    /// A container is to have the vNIC.
    pub fn is_awaited(&self, vnic: &str) -> bool {
        self.shared().wanted.values().any(|wanted| wanted.vnic == vnic)
    }

    /// vNICs that are there, and of which a container is to have each.
    pub fn present(&self) -> BTreeSet<String> {
        let shared = self.shared();
        shared.wanted.values().filter(|wanted| wanted.is_present).map(|wanted| wanted.vnic.clone()).collect()
    }

    /// vNICs that are asked for, each with the number of the oldest claim.
    pub fn wanted(&self) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        for (number, wanted) in self.shared().wanted.iter().filter(|(_, wanted)| !wanted.is_present) {
            all.entry(wanted.vnic.clone()).or_insert(*number);
        }
        all
    }

    /// Notes the state of the claims for a vNIC, or of those that it is to stay for.
    pub fn answer(&self, vnic: &str, is_present: bool, answer: &Answer) {
        let mut shared = self.shared();
        let is_it = |wanted: &&mut Wanted| wanted.vnic == vnic && wanted.is_present == is_present;
        shared.wanted.values_mut().filter(is_it).for_each(|wanted| wanted.answer = Some(answer.clone()));
        drop(shared);
        self.0.1.notify_all();
    }

    /// Networks of containers that wait for other hosts.
    pub fn meetings(&self) -> BTreeSet<String> {
        let shared = self.shared();
        let waiting = shared.meetings.iter().filter(|(number, _)| !shared.released.contains(number));
        waiting.map(|(_, network)| network.clone()).collect()
    }

    /// Networks of containers that have come since, whose other hosts are met.
    pub fn take_entered(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.shared().entered)
    }

    /// The other hosts of these networks, and of no others, need not be waited for; nor does who waits for those of
    /// `for_now`.
    pub fn set_met(&self, networks: BTreeSet<String>, for_now: &BTreeSet<String>) {
        let mut shared = self.shared();
        let of_them = shared.meetings.iter().filter(|(_, network)| for_now.contains(*network));
        let released: Vec<u64> = of_them.map(|(number, _)| *number).collect();
        if shared.met != networks || !released.is_empty() {
            shared.met = networks;
            shared.released.extend(released);
            drop(shared);
            self.0.1.notify_all();
        }
    }

    /// Waits until the other hosts of a network are met, or have been waited for.
    fn serve_meeting(&self, stream: &UnixStream, network: &str) -> std::io::Result<()> {
        let until = Instant::now() + MEETING_TIME;
        let mut shared = self.shared();
        if shared.met.contains(network) {
            // The host is in it for some time from now on.
            if shared.entered.len() < MEETING_COUNT_MAX && shared.entered.insert(network.to_owned()) {
                shared.waker.iter().for_each(Waker::wake);
            }
        } else if shared.meetings.len() < MEETING_COUNT_MAX {
            shared.last_number += 1;
            let number = shared.last_number;
            shared.meetings.insert(number, network.to_owned());
            shared.waker.iter().for_each(Waker::wake);
            let is_over = |shared: &Shared| shared.met.contains(network) || shared.released.contains(&number);
            while !is_over(&shared) && Instant::now() < until {
                let left = until.saturating_duration_since(Instant::now());
                shared = self.0.1.wait_timeout(shared, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            shared.meetings.remove(&number);
            shared.released.remove(&number);
        }
        drop(shared);
        say(stream, &Answer::Here)
    }

    fn add(&self, claim: &Claim) -> Option<u64> {
        let mut shared = self.shared();
        if shared.wanted.len() >= CLAIM_COUNT_MAX {
            return None;
        }
        let number = now_ms().max(shared.last_number + 1);
        shared.last_number = number;
        let (vnic, is_present) = (claim.vnic.clone(), claim.is_present);
        shared.wanted.insert(number, Wanted { vnic, is_present, answer: None });
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
        let claim = match serde_json::from_str(&line)? {
            Request::Claim(claim) => claim,
            Request::Meet(network) => return self.serve_meeting(stream, &network),
        };
        let Some(number) = self.add(&claim) else {
            return say(stream, &Answer::Refused("too many claims for vNICs at once; try again".into()));
        };
        let done = self.wait(stream, &claim, number).and_then(|answer| {
            say(stream, &answer)?;
            // Until the container has it.
            while answer == Answer::Here && stays(stream, LOOK) {}
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
                Some(answer @ (Answer::Here | Answer::Never(_))) => return Ok(answer),
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

/// Whether the caller is there still after this time; false as soon as it is not.
fn stays(mut stream: &UnixStream, time: Duration) -> bool {
    if stream.set_nonblocking(false).is_err() || stream.set_read_timeout(Some(time)).is_err() {
        return false;
    }
    stream.read(&mut [0]).is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
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

/// The other hosts of a container's network, which this host's follower meets meanwhile.
pub struct Meeting(Option<(UnixStream, Instant)>);

/// A container is to be in this network: has the follower, if there is one, meet the other hosts of it.
pub fn meet(run_dir: &RunDir, network: &str) -> Meeting {
    let request = Request::Meet(network.into());
    let stream = follows(run_dir).then(|| ask(run_dir, &request).ok()).flatten();
    Meeting(stream.map(|stream| (stream, Instant::now() + MEETING_TIME)))
}

impl Meeting {
    /// Waits for them, not for long: those that can't be reached come later, or never.
    pub fn wait(self) {
        let Some((stream, until)) = self.0 else { return };
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if stream.set_read_timeout(Some(left)).is_ok() {
            let _ = BufReader::new((&stream).take(LINE_BYTES_MAX)).read_line(&mut String::new());
        }
    }
}

fn ask(run_dir: &RunDir, request: &Request) -> Result<UnixStream> {
    let away =
        |_| Failure::new(format!("the follower of the cluster is not there; see freeflow{} doctor", run_dir.option()));
    let stream = UnixStream::connect(socket_of(run_dir)).map_err(away)?;
    let mut line = serde_json::to_string(request).expect("a request is encodable");
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
    let stream = ask(run_dir, &Request::Claim(Claim { vnic: vnic.into(), waits, is_present: false }))?;
    let mut answer = String::new();
    BufReader::new((&stream).take(LINE_BYTES_MAX)).read_line(&mut answer).context("the follower of the cluster")?;
    match serde_json::from_str(&answer) {
        Ok(Answer::Here) => Ok(Some(Claimed(stream))),
        Ok(Answer::Refused(why) | Answer::Never(why) | Answer::Later(why)) => fail!("the vNIC {vnic}: {why}"),
        Err(_) => fail!("the follower of the cluster has ended; see freeflow{} doctor", run_dir.option()),
    }
}

/// Has the follower, if there is one, know that a container is to have a vNIC that may be here: it stays then.
pub fn announce(run_dir: &RunDir, vnic: &str) -> Option<Claimed> {
    let request = Request::Claim(Claim { vnic: vnic.into(), waits: false, is_present: true });
    let stream = follows(run_dir).then(|| ask(run_dir, &request).ok())??;
    // A follower that is busy is not waited for long.
    stream.set_read_timeout(Some(NOTICE_TIME)).ok()?;
    let _ = BufReader::new((&stream).take(LINE_BYTES_MAX)).read_line(&mut String::new());
    Some(Claimed(stream))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A run directory of a host that follows a cluster.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> (Self, RunDir) {
            let path = std::env::temp_dir().join(format!("freeflow-claims-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).expect("a directory");
            let settings =
                r#"{"mode": "adaptive", "pool": "10.111.0.0/16", "host": "h", "cdi_file": null, "cluster": "/c"}"#;
            fs::write(path.join("up.json"), settings).expect("written");
            let run_dir = RunDir::new(&path).expect("a run directory");
            (Self(path), run_dir)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn set(networks: &[&str]) -> BTreeSet<String> {
        networks.iter().map(|network| (*network).to_owned()).collect()
    }

    #[test]
    fn a_container_waits_for_the_hosts_of_its_network_and_no_longer() {
        let (_directory, run_dir) = Directory::new("meeting");
        // Nobody is there to ask: it waits for nothing.
        meet(&run_dir, "red").wait();
        let claims = Claims::listen(&run_dir).expect("it listens");
        let is_met = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let meeting = meet(&run_dir, "red");
                meeting.wait();
                is_met.load(std::sync::atomic::Ordering::SeqCst)
            });
            while claims.meetings() != set(&["red"]) {
                thread::yield_now();
            }
            // Another network's are not this one's.
            claims.set_met(set(&["blue"]), &set(&[]));
            assert_eq!(claims.meetings(), set(&["red"]));
            is_met.store(true, std::sync::atomic::Ordering::SeqCst);
            claims.set_met(set(&["blue", "red"]), &set(&[]));
            assert!(waiting.join().expect("it ended"), "it has not waited");
        });
        // A network that is met is not waited for again, and the host stays in it.
        meet(&run_dir, "blue").wait();
        assert_eq!((claims.meetings(), claims.take_entered()), (set(&[]), set(&["blue"])));
        // One for which there is nobody to be met just now is asked for by the next container again.
        thread::scope(|scope| {
            let waiting = scope.spawn(|| meet(&run_dir, "grey").wait());
            while claims.meetings() != set(&["grey"]) {
                thread::yield_now();
            }
            claims.set_met(set(&["blue"]), &set(&["grey"]));
            waiting.join().expect("it ended");
        });
        assert!(!claims.shared().met.contains("grey"));
        // And a follower that does not come to it keeps nobody waiting for ever.
        meet(&run_dir, "green").wait();
    }
}
