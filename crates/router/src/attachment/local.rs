//! The router shares a kernel with the vNIC's processes: it opens their memory, watches a pidfd,
//! stops their threads, and holds one end of the sockets that they read events from.
use crate::admission::account::Account;
use crate::attachment::borrow::{BorrowAnswer, Borrowers, Borrowing, MappingProcess};
use crate::attachment::identify::Identifiers;
use crate::attachment::{AttachedProcess, Attachment, Found, Peer};
use crate::base::deferred_drop::Closer;
use crate::base::privileges::ThreadKind;
use crate::memory::entrusted::Entrusted;
use crate::memory::freezer::{Answer, FreezeCommand, Freezer, Process};
use crate::memory::quiesce::Gated;
use crate::memory::slow_path::TenantMemory;
use freeflow_shm::fd::{self, PeerCredentials};
use rustix::fs::{Mode, OFlags};
use std::any::Any;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Descriptors of a process: `/proc/PID/mem`, `/proc/PID/maps` and `/proc/PID/task`.
struct Opened {
    memory: File,
    maps: File,
    tasks: OwnedFd,
}

impl Opened {
    /// By number, and trusted only if the pidfd then says that the process still lives. May wait for the process.
    fn of(credentials: PeerCredentials, pidfd: &OwnedFd) -> io::Result<Self> {
        let path = format!("/proc/{}/mem", credentials.pid);
        let memory = OpenOptions::new().read(true).write(true).open(&path)?;
        let maps = File::open(format!("/proc/{}/maps", credentials.pid))?;
        let tasks = rustix::fs::open(
            format!("/proc/{}/task", credentials.pid),
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        // Looked up again after the open: the process may have become a set-user-ID program since it
        // connected, and its memory is not its starter's then. The kernel makes root the owner of the
        // files of a process that may not be traced.
        if std::fs::metadata(&path)?.uid() != credentials.uid {
            return Err(io::Error::other("the process is of another user than connected, or may not be traced"));
        }
        if !fd::pidfd_alive(pidfd) {
            return Err(io::Error::other("the process ended at once"));
        }
        Ok(Self { memory, maps, tasks })
    }
}

/// A vNIC whose processes are on this host.
pub struct Local {
    account: Arc<Account>,
    /// Closes what is a process'.
    closer: Arc<Closer>,
    /// Look at who connects.
    identifiers: Identifiers,
    /// Open what processes have mapped.
    borrowers: Arc<Borrowers>,
}

impl Local {
    pub fn new(account: Arc<Account>, closer: Arc<Closer>) -> Self {
        let identifiers = Identifiers::new(ThreadKind::Identify);
        Self { account, closer, identifiers, borrowers: Arc::default() }
    }
}

impl Attachment for Local {
    fn identify(&self, peer: Peer, found: Found) -> Result<(), Box<dyn Any + Send>> {
        let (account, closer, borrowers) = (self.account.clone(), self.closer.clone(), self.borrowers.clone());
        let task = move || {
            let process = LocalProcess::of(peer, account, closer, borrowers);
            found(process.map(|process| Box::new(process) as Box<dyn AttachedProcess>));
        };
        self.identifiers.submit(Box::new(task)).map_err(|task| Box::new(task) as Box<dyn Any + Send>)
    }

    fn event_channel(&self, bytes: usize) -> io::Result<(OwnedFd, OwnedFd)> {
        fd::event_sockets(bytes)
    }

    fn take_waiting(&self) -> Box<dyn Any + Send> {
        Box::new((self.identifiers.take_waiting(), self.borrowers.take_waiting()))
    }

    fn ended(&self) -> Option<&'static str> {
        None
    }
}

/// A process of this host.
pub struct LocalProcess {
    pidfd: OwnedFd,
    uid: u32,
    memory: Arc<Gated<Entrusted<File>>>,
    tasks: Arc<Entrusted<OwnedFd>>,
    maps: Arc<Entrusted<File>>,
    account: Arc<Account>,
    borrowers: Arc<Borrowers>,
    /// Nobody waits with the lock held.
    freezer: Mutex<Freezer>,
}

impl LocalProcess {
    /// May wait for the process.
    fn of(peer: Peer, account: Arc<Account>, closer: Arc<Closer>, borrowers: Arc<Borrowers>) -> io::Result<Self> {
        let Peer { credentials, pidfd, charge } = peer;
        let Opened { memory, maps, tasks } = match Opened::of(credentials, &pidfd) {
            Ok(opened) => opened,
            Err(error) => {
                closer.close((pidfd, charge), 1);
                return Err(error);
            }
        };
        Ok(Self {
            pidfd,
            uid: credentials.uid,
            memory: Arc::new(Gated::new(Entrusted::new(memory, charge.clone(), closer.clone()))),
            maps: Arc::new(Entrusted::new(maps, charge.clone(), closer.clone())),
            tasks: Arc::new(Entrusted::new(tasks, charge, closer)),
            account,
            borrowers,
            freezer: Mutex::default(),
        })
    }

    fn freezer(&self) -> MutexGuard<'_, Freezer> {
        self.freezer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AttachedProcess for LocalProcess {
    fn end(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    fn memory(&self) -> Arc<dyn TenantMemory> {
        self.memory.clone()
    }

    fn freeze(&self, command: FreezeCommand, answer: Answer) {
        let process = Process { tasks: self.tasks.clone(), uid: self.uid, gate: self.memory.gate.clone() };
        self.freezer().submit(command, process, &self.account, answer);
    }

    fn borrow(&self, place: Borrowing, answer: BorrowAnswer) {
        let process = MappingProcess { tasks: self.tasks.clone(), maps: self.maps.clone(), uid: self.uid };
        self.borrowers.submit(process, place, answer);
    }

    fn let_go(&self) {
        *self.freezer() = Freezer::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_process_is_known_and_a_dead_one_is_not() {
        let (one, _other) = fd::seqpacket_pair().unwrap();
        let (credentials, pidfd) = (fd::peer_credentials(&one).unwrap(), fd::peer_pidfd(&one).unwrap());
        assert!(Opened::of(credentials, &pidfd).is_ok());
        let stranger = PeerCredentials { uid: credentials.uid.wrapping_add(1), ..credentials };
        assert!(Opened::of(stranger, &pidfd).is_err());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = rustix::process::Pid::from_child(&child);
        let dead = rustix::process::pidfd_open(id, rustix::process::PidfdFlags::empty()).unwrap();
        child.wait().unwrap();
        assert!(Opened::of(credentials, &dead).is_err());
    }
}
