//! Connections of libraries, from the listening socket of their vNIC to the first message.
//!
//! The socket that a client connected to names the vNIC; SO_PEERPIDFD names the process. The rest
//! is found out by its attachment, see `attachment`.
use crate::admission::account::Charge;
use crate::attachment::guest::GuestConnection;
use crate::attachment::identify::WAITING_COUNT_MAX;
use crate::attachment::{AttachedProcess, Peer};
use crate::base::log::warning;
use crate::base::slab::Key;
use crate::control::message::{Message, Newcomer};
use crate::control::session::{Connection, Objects, Phase};
use crate::control::thread::{Control, Topic};
use freeflow_shm::fd;
use rustix::event::epoll;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Connections accepted from one listener before others are looked at.
const ACCEPT_COUNT: usize = 16;

impl Control {
    pub(crate) fn accept_connections(&mut self, vnic: Key) {
        for _ in 0..ACCEPT_COUNT {
            let Some(entry) = self.vnics.get(vnic) else { return };
            if entry.identifying >= WAITING_COUNT_MAX {
                self.set_accepting(vnic, false);
                let id = self.id_of(vnic);
                if self.may_log(&id) {
                    warning!("connections wait: processes that connected can't be looked at", vnic = id);
                }
                return;
            }
            match fd::accept(&entry.listener) {
                Ok(socket) => {
                    let mut socket = Some(socket);
                    if let Err(error) = self.begin_connection(vnic, &mut socket) {
                        self.refuse(vnic, &error, socket);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    let id = self.id_of(vnic);
                    if self.may_log(&id) {
                        warning!("can't accept a connection", vnic = id, error = error);
                    }
                    // Out of descriptors, perhaps: the one in reserve takes the connection off the queue.
                    self.reserve = None;
                    if let Some(entry) = self.vnics.get(vnic) {
                        let socket = fd::accept(&entry.listener);
                        self.dispose(&id, socket, 1);
                    }
                    self.reserve = std::fs::File::open("/dev/null").ok().map(OwnedFd::from);
                    return;
                }
            }
        }
    }

    /// Whether epoll reports connections. A vNIC that has failed is not watched at all.
    fn set_accepting(&self, vnic: Key, is_accepting: bool) {
        let Some(entry) = self.vnics.get(vnic) else { return };
        let data = epoll::EventData::new_u64(Topic::VnicListener(vnic).token());
        let flags = if is_accepting { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        let _ = epoll::modify(&self.epoll, &entry.listener, data, flags);
    }

    /// `held`: what is to be closed.
    fn refuse(&mut self, vnic: Key, error: &io::Error, held: impl std::any::Any + Send) {
        let id = self.id_of(vnic);
        if self.may_log(&id) {
            warning!("connection refused", vnic = id, error = error);
        }
        self.dispose(&id, held, 1);
    }

    /// Takes the socket if it can be served. Nothing here waits for the process.
    fn begin_connection(&mut self, vnic: Key, offered: &mut Option<OwnedFd>) -> io::Result<()> {
        self.renew_attachment(vnic)?;
        let own = self.own.clone();
        let entry = self.vnics.get_mut(vnic).ok_or_else(|| io::Error::other("the vNIC was detached"))?;
        // Twice: the limit itself is refused by a reply to Hello.
        let most = u64::from(entry.record.limits.session_count_max).saturating_mul(2);
        let charge = Charge::connection(&entry.account, most).map_err(|_| io::Error::other("too many connections"))?;
        let Some(socket) = offered.as_ref() else { return Ok(()) };
        let credentials = fd::peer_credentials(socket)?;
        let pidfd = fd::peer_pidfd(socket)?;
        if credentials.pid <= 0 {
            return Err(io::Error::other("the process is not visible from the router's PID namespace"));
        }
        let Some(socket) = offered.take() else { return Ok(()) };
        let charge = Arc::new(charge);
        let newcomer = Newcomer { socket, credentials, charge: charge.clone() };
        let found = move |process| own.send(Message::Identified { vnic, newcomer: Box::new(newcomer), process });
        match entry.attachment.identify(Peer { credentials, pidfd, charge }, Box::new(found)) {
            Ok(()) => entry.identifying += 1,
            Err(peer) => self.refuse(vnic, &io::Error::other("no thread to be had"), peer),
        }
        Ok(())
    }

    pub(crate) fn finish_connection(
        &mut self,
        vnic: Key,
        newcomer: Newcomer,
        process: io::Result<Box<dyn AttachedProcess>>,
    ) {
        let Some(entry) = self.vnics.get_mut(vnic) else {
            return self.dispose("", (newcomer, process), 1);
        };
        entry.identifying -= 1;
        let has_room_again = entry.identifying + 1 == WAITING_COUNT_MAX;
        // Of one that is being detached nobody hears any more.
        let (id, is_there) = (entry.record.id.clone(), self.vnics_by_id.get(&entry.record.id) == Some(&vnic));
        if has_room_again && is_there {
            self.set_accepting(vnic, true);
        }
        match process {
            Ok(process) if is_there => self.begin_session_of(vnic, newcomer, process),
            Ok(process) => self.dispose(&id, (newcomer, process), 1),
            Err(error) => self.refuse(vnic, &error, newcomer),
        }
    }

    /// A library of a virtual machine has connected, by the machine's agent.
    pub(crate) fn accept_guest(&mut self, vnic: &str, connection: GuestConnection) {
        let GuestConnection { socket, credentials, charge, process, memory } = connection;
        let newcomer = Newcomer { socket, credentials, charge };
        // Another one of this name, perhaps.
        let is_same = |key: &Key| {
            let there = self.vnics.get(*key).and_then(|entry| entry.attachment.shared_memory());
            there.is_some_and(|there| Arc::ptr_eq(there, &memory))
        };
        match (self.vnics_by_id.get(vnic).copied().filter(is_same), process) {
            (Some(key), Ok(process)) => self.begin_session_of(key, newcomer, process),
            (Some(key), Err(error)) => self.refuse(key, &error, newcomer),
            (None, process) => self.dispose("", (newcomer, process), 1),
        }
    }

    fn begin_session_of(&mut self, vnic: Key, newcomer: Newcomer, process: Box<dyn AttachedProcess>) {
        let id = self.id_of(vnic);
        let Newcomer { socket, credentials, charge } = newcomer;
        let key = self.connections.insert(Connection {
            socket,
            process,
            pid: credentials.pid,
            vnic: id,
            phase: Phase::New,
            busy: false,
            muted: false,
            closing: false,
            cancelled: Arc::new(AtomicBool::new(false)),
            complained: false,
            objects: Objects::default(),
            unwanted: Vec::new(),
            charge,
        });
        let connection = self.connections.get(key).expect("just inserted");
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        let watched = self
            .watch(connection.socket.as_fd(), Topic::Connection(key), flags)
            .and_then(|()| self.watch(connection.process.end(), Topic::Process(key), epoll::EventFlags::IN));
        if let Err(error) = watched {
            warning!("can't watch a connection", vnic = self.id_of(vnic), error = error);
            self.close(key);
        }
    }

    pub(crate) fn id_of(&self, vnic: Key) -> String {
        self.vnics.get(vnic).map(|entry| entry.record.id.clone()).unwrap_or_default()
    }
}
