//! Tenants that abuse what the kernel lets them do with a socket and with themselves.
mod common;

use common::*;
use freeflow_protocol::admin::AdminReply;
use freeflow_protocol::encode;
use freeflow_protocol::library::{Reply, Request};
use freeflow_shm::fd;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

/// A TCP socket whose last close takes an hour: it lingers, and nobody reads what it has to send.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (silent, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.write(&[0; 65_536]).is_ok() {}
    sender.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&sender, Some(Duration::from_secs(3600))).unwrap();
    (sender, silent)
}

/// Asks on another thread, since a router that hangs never answers.
fn answers(path: &Path) -> bool {
    let (sender, receiver) = channel();
    let path = path.to_owned();
    std::thread::spawn(move || {
        let client = Client::connect(&path);
        let _ = sender.send(matches!(client.ask(&Request::OpenContext), Reply::Context { .. }));
    });
    receiver.recv_timeout(Duration::from_secs(60)) == Ok(true)
}

#[test]
fn a_descriptor_that_lingers_blocks_nobody() {
    let host = Host::new();
    let path = Path::new(&host.attach("a").directory).join("router.sock");
    let other = Path::new(&host.attach("b").directory).join("router.sock");
    let mut silent = Vec::new();
    // Read by the router; still unread when the connection ends; never accepted.
    for way in 0..3 {
        let (sender, receiver) = lingering();
        silent.push(receiver);
        let client = (way < 2).then(|| Client::connect(&path));
        let raw = fd::connect_seqpacket(&path).unwrap();
        let socket = client.as_ref().map_or(&raw, |client| &client.socket);
        for _ in 0..1 + way * 3 {
            // Linux 6.16 lets the router refuse them outright; then the last close would be this test's.
            if fd::send_message(socket, &encode(&Request::OpenContext), &[sender.as_fd()]).is_err() {
                rustix::net::sockopt::set_socket_linger(&sender, None).unwrap();
            }
        }
        drop((sender, client, raw));
        assert!(answers(&other), "the control thread hangs in a tenant's socket ({way})");
    }
    // So that the router can end: the peers go, and with them what is waited for.
    drop(silent);
}

struct Process {
    child: Child,
    log: PathBuf,
    run_dir: PathBuf,
}

impl Process {
    fn start(directory: &Path) -> Self {
        let (run_dir, log) = (directory.join("run"), directory.join("log"));
        let mut child = Command::new(env!("CARGO_BIN_EXE_freeflow-router"))
            .args(["--mode", "lowcpu", "--ready-fd", "1", "--run-dir"])
            .arg(&run_dir)
            .arg("--machine-dir")
            .arg(directory.join("machine"))
            .stdout(Stdio::piped())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { child, log, run_dir }
    }

    fn attach(&self, id: &str) -> PathBuf {
        match admin(&self.run_dir, &attach(id)) {
            AdminReply::Vnic(vnic) => Path::new(&vnic.directory).join("router.sock"),
            other => panic!("{other:?}"),
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process of another user that connects, and is another program before the router has looked at it.
fn connect_and_exec(router: &Process, path: &Path, program: &Path) -> Option<Reply> {
    let flags = rustix::net::SocketFlags::empty();
    let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET);
    let socket = rustix::net::socket_with(family, kind, flags, None).unwrap();
    let script = "import os, socket, sys\n\
                  socket.socket(fileno=0).connect(sys.argv[1])\n\
                  os.execv(sys.argv[2], [sys.argv[2], '60'])\n";
    router.signal(Signal::STOP);
    let mut child = Command::new("python3")
        .args(["-c", script])
        .args([path, program])
        .stdin(socket.try_clone().unwrap())
        .uid(65_534)
        .gid(65_534)
        .spawn()
        .unwrap();
    let name = format!("/proc/{}/comm", child.id());
    until("the other program", || std::fs::read_to_string(&name).ok().filter(|comm| comm.trim() == "doze"));
    router.signal(Signal::CONT);
    let socket: OwnedFd = socket;
    let reply = exchange(&socket, &encode(&hello()), 2).map(|(reply, _)| reply);
    let _ = child.kill();
    let _ = child.wait();
    reply
}

#[test]
fn a_set_user_id_program_lends_its_memory_to_nobody() {
    let directory = Directory::new();
    std::fs::set_permissions(&directory.0, PermissionsExt::from_mode(0o755)).unwrap();
    let router = Process::start(&directory.0);
    let path = router.attach("a");
    // Nobody but root gets this far on a host; in a container the directory stands elsewhere.
    std::fs::set_permissions(path.ancestors().nth(2).unwrap(), PermissionsExt::from_mode(0o711)).unwrap();
    let program = directory.0.join("doze");
    // By another process: see `without_root_one_line_says_what_is_needed_and_why` of the command.
    assert!(Command::new("cp").arg("/bin/sleep").arg(&program).status().unwrap().success());
    for (mode, trusted) in [(0o755, true), (0o4755, false)] {
        std::fs::set_permissions(&program, PermissionsExt::from_mode(mode)).unwrap();
        let reply = connect_and_exec(&router, &path, &program);
        assert_eq!(matches!(reply, Some(Reply::Welcome(_))), trusted, "{mode:o}: {reply:?}");
    }
}

#[test]
fn a_tenant_can_not_fill_the_log() {
    const ROUND_COUNT: usize = 300;
    const LINE_COUNT_MAX: usize = 150;
    let directory = Directory::new();
    let router = Process::start(&directory.0);
    let path = router.attach("a");
    for _ in 0..ROUND_COUNT {
        drop(Client::connect(&path));
    }
    let lines = || std::fs::read_to_string(&router.log).unwrap().lines().count();
    assert!(lines() < LINE_COUNT_MAX, "{} lines", lines());
    // Another tenant's lines are still there.
    drop(Client::connect(&router.attach("b")));
    let log = std::fs::read_to_string(&router.log).unwrap();
    assert!(log.lines().any(|line| line.contains("session begins") && line.contains("vnic=b")), "{log}");
}
