//! The router as a process of its own.
use super::{admin, attach};
use freeflow_protocol::admin::AdminReply;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

pub struct Process {
    pub child: Child,
    pub run_dir: PathBuf,
}

impl Process {
    /// Until it says that it is ready.
    pub fn start(directory: &Path, options: &[&str]) -> Self {
        let run_dir = directory.join("run");
        let mut child = Command::new(env!("CARGO_BIN_EXE_freeflow-router"))
            .args(["--mode", "lowcpu", "--ready-fd", "1"])
            .args(options)
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

    /// The socket of a new vNIC.
    pub fn attach(&self, id: &str) -> PathBuf {
        match admin(&self.run_dir, &attach(id)) {
            AdminReply::Vnic(vnic) => Path::new(&vnic.directory).join("router.sock"),
            other => panic!("{other:?}"),
        }
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Descriptors, and mappings of memfds.
    pub fn held(&self) -> (usize, usize) {
        let proc = PathBuf::from(format!("/proc/{}", self.child.id()));
        let descriptors = std::fs::read_dir(proc.join("fd")).unwrap().count();
        let maps = std::fs::read_to_string(proc.join("maps")).unwrap();
        (descriptors, maps.lines().filter(|line| line.contains("memfd:freeflow")).count())
    }

    /// The threads of a name. Others come and go by themselves.
    pub fn threads(&self, name: &str) -> usize {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        // A thread that ends meanwhile has no name to be read.
        let name_of =
            |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.ok()?.path().join("comm")).ok();
        tasks.filter_map(name_of).filter(|comm| comm.trim_end() == name).count()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
