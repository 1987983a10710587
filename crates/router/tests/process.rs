//! The binary: readiness, signals, being killed; what a client that dies leaves in it.
mod common;

use common::*;
use freeflow_protocol::admin::{AdminReply, AdminRequest};
use freeflow_verbs::QpType;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

struct Process {
    child: Child,
    run_dir: PathBuf,
}

impl Process {
    fn start(directory: &Path) -> Self {
        let run_dir = directory.join("run");
        let mut child = Command::new(env!("CARGO_BIN_EXE_freeflow-router"))
            .args(["--mode", "lowcpu", "--ready-fd", "1", "--limits", r#"{"qp_count_max": 3}"#])
            .arg("--run-dir")
            .arg(&run_dir)
            .arg("--machine-dir")
            .arg(directory.join("machine"))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { child, run_dir }
    }

    fn attach(&self, id: &str) -> PathBuf {
        match admin(&self.run_dir, &attach(id)) {
            AdminReply::Vnic(vnic) => Path::new(&vnic.directory).join("router.sock"),
            other => panic!("{other:?}"),
        }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Descriptors, and mappings of memfds.
    fn held(&self) -> (usize, usize) {
        let proc = PathBuf::from(format!("/proc/{}", self.child.id()));
        let descriptors = std::fs::read_dir(proc.join("fd")).unwrap().count();
        let maps = std::fs::read_to_string(proc.join("maps")).unwrap();
        (descriptors, maps.lines().filter(|line| line.contains("memfd:freeflow")).count())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn what_clients_held_is_given_back() {
    let directory = Directory::new();
    let router = Process::start(&directory.0);
    let path = router.attach("a");
    let before = router.held();
    for _ in 0..5 {
        let mut client = Client::connect(&path);
        let channel = client.create_channel();
        let cq = client.create_cq(100, Some(channel.0));
        let qp = client.create_qp(QpType::Rc, &cq);
        client.connect_rc(&qp, client.gid(), qp.qpn, 14);
        let memory = client.memory(1000, true);
        let held = router.held();
        assert!(held.0 > before.0 && held.1 >= 4, "{held:?}");
        drop((memory, qp, cq, channel, client));
        // The connection that attached may have been counted in `before`: a leak would show by the second round.
        until("everything given back", || {
            let (descriptors, mappings) = router.held();
            (descriptors <= before.0 && mappings == before.1).then_some(())
        });
    }
}

#[test]
fn a_signal_ends_it_in_order() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let directory = Directory::new();
        let mut router = Process::start(&directory.0);
        let client = Client::connect(&router.attach("a"));
        router.signal(signal);
        assert_eq!(read_event(&client.async_events), None);
        assert_eq!(router.child.wait().unwrap().code(), Some(0));
        assert!(!router.run_dir.join("admin.sock").exists() && !router.run_dir.join("router.pid").exists());
    }
}

#[test]
fn a_shutdown_request_ends_it() {
    let directory = Directory::new();
    let mut router = Process::start(&directory.0);
    assert_eq!(admin(&router.run_dir, &AdminRequest::Shutdown), AdminReply::Done);
    assert_eq!(router.child.wait().unwrap().code(), Some(0));
}

#[test]
fn after_being_killed_the_next_one_goes_on() {
    let directory = Directory::new();
    let mut router = Process::start(&directory.0);
    let path = router.attach("a");
    let client = Client::connect(&path);
    router.signal(rustix::process::Signal::KILL);
    router.child.wait().unwrap();
    assert_eq!(read_event(&client.async_events), None);
    let router = Process::start(&directory.0);
    assert_eq!(router.attach("a"), path);
    assert_eq!(Client::connect(&path).gid(), client.gid());
}
