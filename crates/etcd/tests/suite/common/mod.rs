//! Members of etcd, as processes of their own on the loopback.
use freeflow_etcd::{Endpoints, EtcdStore};
use freeflow_orchestrator::store::{Committed, Compare, Revision, Store, StoreError, Transaction, Write};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// For whatever has to become so.
pub const SOON: Duration = Duration::from_secs(60);

/// Members that make one etcd. They end, and what they wrote goes, with this.
pub struct Cluster {
    directory: PathBuf,
    members: Vec<Member>,
    secure: bool,
}

struct Member {
    words: Vec<String>,
    client_port: u16,
    child: Option<Child>,
}

/// Ports that nobody has just now, all different.
fn free_ports(count: usize) -> Vec<u16> {
    let listeners: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    listeners.iter().map(|listener| listener.local_addr().expect("an address").port()).collect()
}

fn run(words: &[&str], directory: &Path) {
    let output = Command::new(words[0]).args(&words[1..]).current_dir(directory).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", words[0]));
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An authority, and certificates of it: `server`, and one for each user.
fn certificates(directory: &Path, users: &[&str]) {
    let new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"];
    let mut words = vec!["openssl", "req", "-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem"];
    words.extend(new_key);
    run(&words, directory);
    fs::write(directory.join("server.ext"), "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        .expect("written");
    fs::write(directory.join("user.ext"), "extendedKeyUsage=clientAuth\n").expect("written");
    for &name in users.iter().chain(&["server"]) {
        let (key, request, pem) = (format!("{name}.key"), format!("{name}.csr"), format!("{name}.pem"));
        let subject = format!("/CN={name}");
        let mut words = vec!["openssl", "req", "-subj", &subject, "-keyout", &key, "-out", &request];
        words.extend(&new_key[..5]);
        run(&words, directory);
        let extensions = if name == "server" { "server.ext" } else { "user.ext" };
        run(
            &[
                "openssl",
                "x509",
                "-req",
                "-in",
                &request,
                "-CA",
                "ca.pem",
                "-CAkey",
                "ca.key",
                "-CAcreateserial",
                "-days",
                "2",
                "-extfile",
                extensions,
                "-out",
                &pem,
            ],
            directory,
        );
    }
}

impl Cluster {
    /// So many members; with certificates if there are users.
    pub fn start(count: usize, users: &[&str]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("freeflow-etcd-test.{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        // In memory if possible: they sync each write.
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let directory = place.join(name);
        fs::create_dir(&directory).expect("a directory");
        let secure = !users.is_empty();
        if secure {
            certificates(&directory, users);
        }
        let scheme = if secure { "https" } else { "http" };
        let ports = free_ports(2 * count);
        let (client_ports, peer_ports) = ports.split_at(count);
        let all: Vec<String> =
            peer_ports.iter().enumerate().map(|(i, port)| format!("m{i}={scheme}://127.0.0.1:{port}")).collect();
        let members = (0..count).map(|i| {
            let (client, peer) = (client_ports[i], peer_ports[i]);
            let mut words = vec![
                format!("--name=m{i}"),
                format!("--data-dir=m{i}"),
                format!("--listen-client-urls={scheme}://127.0.0.1:{client}"),
                format!("--advertise-client-urls={scheme}://127.0.0.1:{client}"),
                format!("--listen-peer-urls={scheme}://127.0.0.1:{peer}"),
                format!("--initial-advertise-peer-urls={scheme}://127.0.0.1:{peer}"),
                format!("--initial-cluster={}", all.join(",")),
                "--initial-cluster-state=new".into(),
                // A loaded machine is no reason for an election.
                "--heartbeat-interval=200".into(),
                "--election-timeout=2000".into(),
                "--snapshot-count=10000".into(),
            ];
            if secure {
                for side in ["", "peer-"] {
                    words.push(format!("--{side}cert-file=server.pem"));
                    words.push(format!("--{side}key-file=server.key"));
                    words.push(format!("--{side}trusted-ca-file=ca.pem"));
                    words.push(format!("--{side}client-cert-auth"));
                }
            }
            Member { words, client_port: client, child: None }
        });
        let mut cluster = Self { directory: directory.clone(), members: members.collect(), secure };
        (0..count).for_each(|member| cluster.start_member(member));
        cluster
    }

    pub fn start_member(&mut self, number: usize) {
        let program = std::env::var("FREEFLOW_ETCD").unwrap_or_else(|_| "etcd".into());
        let log = fs::OpenOptions::new().create(true).append(true).open(self.directory.join(format!("m{number}.log")));
        let member = &mut self.members[number];
        let child = Command::new(&program)
            .args(&member.words)
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("a log"))
            .spawn();
        member.child = Some(child.unwrap_or_else(|error| panic!("{program}: {error} (scripts/install-deps has it)")));
    }

    pub fn count(&self) -> usize {
        self.members.len()
    }

    pub fn kill(&mut self, number: usize) {
        if let Some(mut child) = self.members[number].child.take() {
            child.kill().expect("killed");
            child.wait().expect("it ended");
        }
    }

    /// A member neither runs nor ends.
    pub fn stop(&self, number: usize, stopped: bool) {
        let child = self.members[number].child.as_ref().expect("it runs");
        let pid = Pid::from_child(child);
        kill_process(pid, if stopped { Signal::STOP } else { Signal::CONT }).expect("signalled");
    }

    /// For files that go with this.
    #[allow(dead_code, reason = "the tests of a cluster use it")]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn url(&self, number: usize) -> String {
        let scheme = if self.secure { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.members[number].client_port)
    }

    pub fn endpoints(&self) -> Endpoints {
        let urls: Vec<String> = (0..self.count()).map(|number| self.url(number)).collect();
        Endpoints::parse(&urls.join(",")).expect("addresses")
    }

    /// As a user with a certificate.
    pub fn endpoints_as(&self, user: &str) -> Endpoints {
        let path = |name: String| self.directory.join(name);
        let (certificate, key) = (path(format!("{user}.pem")), path(format!("{user}.key")));
        let endpoints = self.endpoints().files(Some(&path("ca.pem".into())), Some(&certificate), Some(&key));
        endpoints.expect("files")
    }

    /// `etcdctl` as a user, of the first member.
    pub fn etcdctl(&self, user: Option<&str>, words: &[&str]) -> String {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").current_dir(&self.directory).arg("--endpoints").arg(self.url(0));
        if let Some(user) = user {
            command.args(["--cacert=ca.pem", &format!("--cert={user}.pem"), &format!("--key={user}.key")]);
        }
        let output = command.args(words).output().expect("etcdctl");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for number in 0..self.count() {
            self.kill(number);
        }
        if std::thread::panicking() {
            for number in 0..self.count() {
                let log = fs::read_to_string(self.directory.join(format!("m{number}.log"))).unwrap_or_default();
                let lines: Vec<&str> = log.lines().rev().take(5).collect();
                eprintln!("member {number}:\n{}", lines.into_iter().rev().collect::<Vec<_>>().join("\n"));
            }
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A store that answers.
pub fn open(endpoints: &Endpoints, root: &str) -> EtcdStore {
    let store = EtcdStore::new(endpoints, root).expect("a store").call_time(Duration::from_secs(2));
    until("etcd answers", || store.revision().map(|_| ()).map_err(|error| error.to_string()));
    store
}

/// Tries until it is so.
pub fn until<T>(what: &str, mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let begin = Instant::now();
    loop {
        match attempt() {
            Ok(value) => return value,
            Err(error) => assert!(begin.elapsed() < SOON, "{what}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub fn write(key: &str, value: Option<&str>) -> Write {
    Write { key: key.into(), value: value.map(|value| value.as_bytes().to_vec()), lease: None }
}

/// Puts one key, whatever it is.
pub fn put(store: &mut EtcdStore, key: &str, value: &str) -> Result<Revision, StoreError> {
    let transaction = Transaction { compares: Vec::new(), writes: vec![write(key, Some(value))] };
    match store.commit(&transaction)? {
        Committed::Done(revision) => Ok(revision),
        Committed::Conflict(revision) => panic!("a conflict of nothing at {revision}"),
    }
}

/// Puts one key if it was last written then.
pub fn put_if(
    store: &mut EtcdStore,
    key: &str,
    value: &str,
    modified: Option<Revision>,
) -> Result<Committed, StoreError> {
    let compares = vec![Compare { key: key.into(), modified }];
    store.commit(&Transaction { compares, writes: vec![write(key, Some(value))] })
}
