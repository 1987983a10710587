//! The control thread: connections of libraries and of the CLI, and the ends of processes.
//!
//! One epoll. A connection has at most one request under way, and each round serves each connection once, so a library
//! that floods its socket delays only itself. Replies go out in the order of the requests.
//!
//! Invariant: this thread waits for nothing that a tenant's kernel objects decide. Processes are
//! looked at by threads of their vNIC (`attachment`), and what a tenant had a hand in is
//! closed by one (`deferred_drop`).
use crate::admission::account::Commons;
use crate::api::Feed;
use crate::audit::Audit;
use crate::base::deferred_drop::Closer;
use crate::base::deferred_drop::DeferredDrop;
use crate::base::log::{Lines, info, warning};
use crate::base::slab::{Key, Slab};
use crate::base::wake::Waker;
use crate::config::Config;
use crate::control::admin_connection::AdminConnection;
use crate::control::cm::Cm;
use crate::control::continuations::Continuations;
use crate::control::device::device_attributes;
use crate::control::external::{self, ExternalPolicy};
use crate::control::lease_timer::Leasing;
use crate::control::message::{ControlHandle, Message};
use crate::control::passes::Passes;
use crate::control::placement::{Place, Placement};
use crate::control::policy::AppliedPolicy;
use crate::control::session::Handled;
use crate::control::session::{Answer, Connection, Phase};
use crate::control::shards::HeldUpdates;
use crate::control::store_slot::Storing;
use crate::control::sysfs_counters::Publisher;
use crate::control::vnic_entry::VnicEntry;
use crate::dataplane::command::{CreateSession, DestroySession};
use crate::dataplane::event::Event;
use crate::dataplane::handle::Workers;
use crate::memory::page_table::PageTable;
use crate::network_reconciler::Notifier;
use crate::peering::{Peers, PeersHandle};
use freeflow_engine::{SessionId, VnicId};
use freeflow_orchestrator::State;
use freeflow_orchestrator::mode::Decision;
use freeflow_orchestrator::objects::HostMode;
use freeflow_protocol::admin::Counters;
use freeflow_protocol::library::{Request, Welcome};
use freeflow_protocol::version::{Agreement, Offer, VersionRange};
use freeflow_protocol::{FEATURE_PLACED_REPLIES, MESSAGE_BYTES_MAX, PROTOCOL, library::Reply};
use freeflow_shm::layout::{LAYOUT_VERSION, session};
use freeflow_shm::{Doorbell, Segment, SessionSegment, ShortWait, fd};
use freeflow_store::FileStore;
use freeflow_verbs::{Instant, VerbsError};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, OnceLock};

const EVENT_COUNT: usize = 128;
/// Time for which the thread looks for something to do before it sleeps.
const LOOK_MAX: std::time::Duration = std::time::Duration::from_micros(30);
/// Layouts of the shared segments that this router makes.
const LAYOUTS: VersionRange = VersionRange::only(LAYOUT_VERSION);
/// Versions and features that this router speaks with processes of its own kernel, and with those of virtual machines.
const HOST_PROTOCOL: Offer = Offer { features: PROTOCOL.features & !FEATURE_PLACED_REPLIES, ..PROTOCOL };
const GUEST_PROTOCOL: Offer =
    Offer { features: FEATURE_PLACED_REPLIES, required_features: FEATURE_PLACED_REPLIES, ..PROTOCOL };
/// Longest program name that is logged, characters.
const PROGRAM_CHARS_MAX: usize = 64;

/// The version and features that a library and this router speak, or why there are none.
fn agree(protocol: &Offer, layouts: VersionRange, is_guest: bool) -> Result<Agreement, String> {
    let own = if is_guest { GUEST_PROTOCOL } else { HOST_PROTOCOL };
    let agreed = own.agree(protocol).map_err(|why| why.to_string())?;
    if LAYOUTS.highest_common(layouts).is_none() {
        return Err(format!("it maps layouts of {layouts}, this router makes {LAYOUTS}"));
    }
    Ok(agreed)
}

/// Topic of an epoll event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topic {
    Waker,
    VnicListener(Key),
    Connection(Key),
    Process(Key),
    AdminListener,
    Admin(Key),
    /// An event channel of connection management that was full, by the number of its watch.
    CmChannel(u64),
    /// The lease of the cluster's addresses ends.
    Lease,
}

impl Topic {
    /// 8 bits of kind, 24 of generation, 32 of index. Events of a descriptor end with its removal, so that a generation
    /// that came around can't be mistaken.
    pub(crate) fn token(self) -> u64 {
        let (kind, key) = match self {
            // A session would need centuries to come to the end of 56 bits.
            Self::CmChannel(watch) => return 6 << 56 | watch & ((1 << 56) - 1),
            Self::Waker => (0, None),
            Self::VnicListener(key) => (1, Some(key)),
            Self::Connection(key) => (2, Some(key)),
            Self::Process(key) => (3, Some(key)),
            Self::AdminListener => (4, None),
            Self::Admin(key) => (5, Some(key)),
            Self::Lease => (7, None),
        };
        let (index, generation) = key.map_or((0, 0), |key| (key.index, key.generation));
        kind << 56 | u64::from(generation & 0xff_ffff) << 32 | u64::from(index)
    }

    fn of(token: u64) -> Option<Self> {
        let key = Key { index: token as u32, generation: (token >> 32) as u32 & 0xff_ffff };
        Some(match token >> 56 {
            0 => Self::Waker,
            1 => Self::VnicListener(key),
            2 => Self::Connection(key),
            3 => Self::Process(key),
            4 => Self::AdminListener,
            5 => Self::Admin(key),
            6 => Self::CmChannel(token & ((1 << 56) - 1)),
            7 => Self::Lease,
            _ => return None,
        })
    }
}

pub struct Control {
    pub(crate) config: Config,
    pub(crate) started: Instant,
    pub(crate) epoll: OwnedFd,
    pub(crate) waker: Arc<Waker>,
    /// One for each shard.
    pub(crate) workers: Workers,
    pub(crate) placement: Placement,
    /// News of other hosts that come behind a key which not all shards have yet.
    pub(crate) held_updates: Option<HeldUpdates>,
    pub(crate) continuations: Continuations<Self>,
    pub(crate) events: Receiver<Event>,
    pub(crate) messages: Receiver<Message>,
    /// For other threads than the worker.
    pub(crate) own: ControlHandle,
    pub(crate) connections: Slab<Connection>,
    pub(crate) vnics: Slab<VnicEntry>,
    pub(crate) vnics_by_id: BTreeMap<String, Key>,
    /// vNICs that the worker has yet to make, by id: which making of it that is, its
    /// place, and what the worker has made.
    pub(crate) making: BTreeMap<String, (u64, Place, Arc<OnceLock<VnicId>>)>,
    pub(crate) next_making: u64,
    /// Which declared vNICs containers have, and the containers' names.
    pub(crate) occupied: BTreeMap<String, String>,
    pub(crate) applied: AppliedPolicy,
    pub(crate) state: State,
    pub(crate) storing: Storing,
    pub(crate) leasing: Leasing,
    pub(crate) sysfs: Publisher,
    pub(crate) admin_listener: OwnedFd,
    pub(crate) admins: Slab<AdminConnection>,
    pub(crate) admins_ready: VecDeque<Key>,
    /// Of who is turned away there.
    pub(crate) stranger_lines: Lines,
    /// The CLI's requests are done one at a time.
    pub(crate) admin_busy: bool,
    /// A capture of the wire is under way.
    pub(crate) capturing: bool,
    /// Counts of vNICs that are gone.
    pub(crate) retired: Counters,
    /// For messages.
    pub(crate) buffer: Vec<u8>,
    /// Given up for a moment when no descriptor is left, to accept and refuse a connection.
    pub(crate) reserve: Option<OwnedFd>,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) commons: Arc<Commons>,
    pub(crate) passes: Passes,
    pub(crate) peers: PeersHandle,
    /// Ends with this.
    peers_thread: Option<Peers>,
    pub(crate) external: ExternalPolicy,
    pub(crate) cm: Cm,
    /// Changes, for the REST server.
    pub(crate) feed: Feed,
    /// The faults of this router that the REST server found last.
    pub(crate) faults_found: Vec<String>,
    pub(crate) network_notifier: Notifier,
    pub(crate) audit: Audit,
    /// How the worker waits, and why.
    pub(crate) mode: Decision,
    short_wait: ShortWait,
}

/// Parts that the control thread starts with.
pub(crate) struct ControlParts {
    pub config: Config,
    pub workers: Workers,
    pub events: Receiver<Event>,
    pub messages: Receiver<Message>,
    pub own: ControlHandle,
    pub state: State,
    pub store: FileStore,
    pub admin_listener: OwnedFd,
    pub stop: Arc<AtomicBool>,
    pub commons: Arc<Commons>,
    pub peers: PeersHandle,
    pub peers_thread: Option<Peers>,
    pub audit: Audit,
}

impl Control {
    pub(crate) fn new(parts: ControlParts) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let cm = Cm::new(parts.peers.clone(), parts.workers.first().clone())?;
        let mode = Decision { mode: parts.config.mode.into(), reason: "asked for".into() };
        let placement = Placement::new(parts.workers.count(), parts.config.shard_by);
        let leasing = Leasing::new(&parts.config)?;
        let control = Self {
            config: parts.config,
            started: Instant(freeflow_shm::monotonic_ns()),
            epoll,
            waker: parts.own.waker.clone(),
            placement,
            held_updates: None,
            workers: parts.workers,
            continuations: Continuations::default(),
            events: parts.events,
            messages: parts.messages,
            own: parts.own,
            connections: Slab::default(),
            vnics: Slab::default(),
            vnics_by_id: BTreeMap::new(),
            making: BTreeMap::new(),
            next_making: 0,
            occupied: BTreeMap::new(),
            applied: AppliedPolicy::default(),
            state: parts.state,
            storing: Storing::new(Box::new(parts.store)),
            leasing,
            sysfs: Publisher::start()?,
            admin_listener: parts.admin_listener,
            admins: Slab::default(),
            admins_ready: VecDeque::new(),
            stranger_lines: Lines::default(),
            admin_busy: false,
            capturing: false,
            retired: Counters::default(),
            buffer: Vec::new(),
            reserve: std::fs::File::open("/dev/null").ok().map(OwnedFd::from),
            stop: parts.stop,
            commons: parts.commons,
            passes: Passes::default(),
            peers: parts.peers,
            peers_thread: parts.peers_thread,
            external: ExternalPolicy::default(),
            cm,
            feed: Feed::default(),
            faults_found: Vec::new(),
            network_notifier: Notifier::default(),
            audit: parts.audit,
            mode,
            short_wait: ShortWait::default(),
        };
        control.peers.set_sleeps_at_once(control.mode.mode == HostMode::Lowcpu);
        control.watch(control.waker.fd(), Topic::Waker, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        control.watch(control.admin_listener.as_fd(), Topic::AdminListener, epoll::EventFlags::IN)?;
        Ok(control)
    }

    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, topic: Topic, flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(topic.token()), flags)?)
    }

    /// Where there should be one.
    pub(crate) fn has_its_peers_thread(&self) -> bool {
        self.peers_thread.as_ref().is_none_or(Peers::is_running)
    }

    pub(crate) fn unwatch(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Until [`Self::stop`] is set.
    pub fn run(&mut self) {
        while !self.stop.load(Relaxed) {
            if let Err(error) = self.go_round() {
                warning!("the control thread can't wait for events", error = error);
                return;
            }
            self.run_waiting_commands();
            self.serve_admins();
        }
    }

    /// Waits for something to do and does it, but for what may begin a command: a command goes
    /// round itself while it is stored.
    pub(crate) fn go_round(&mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(EVENT_COUNT);
        self.wait(&mut events)?;
        self.take_messages();
        for event in &events {
            if let Some(topic) = Topic::of(event.data.u64()) {
                self.handle_event(topic, event.flags);
            }
        }
        // Commands run in the worker's place are finished at once, before this thread looks for
        // more.
        self.take_messages();
        self.run_cm();
        if self.take_messages() {
            self.run_cm();
        }
        Ok(())
    }

    /// Waits for events, or for what other threads leave for this one: who finds it awake does not ring.
    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        if self.look_before_sleep(events) {
            return Ok(());
        }
        self.waker.set_sleeping(true);
        // The last look, see `Waker::wake`.
        let mut is_work = self.take_messages();
        is_work |= self.is_wanted();
        let timeout = self.timeout(is_work);
        let waited = epoll::wait(&self.epoll, spare_capacity(events), timeout.as_ref());
        self.waker.set_sleeping(false);
        self.short_wait.note_woken(LOOK_MAX);
        match waited {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether something waits that no event reports.
    fn is_wanted(&self) -> bool {
        let has_admins = !self.admins_ready.is_empty() && !self.admin_busy;
        !self.has_command() && (has_admins || self.has_waiting_commands() || self.stop.load(Relaxed))
    }

    /// Looks for the next request, or the next message of a connection, a little longer: while connections come and
    /// go it is there sooner than a thread sleeps and is woken.
    fn look_before_sleep(&mut self, events: &mut Vec<epoll::Event>) -> bool {
        if self.mode.mode == HostMode::Lowcpu || self.is_wanted() || self.cm.next_due() == Some(Instant(0)) {
            return false;
        }
        let mut short_wait = std::mem::take(&mut self.short_wait);
        let found = short_wait.look(LOOK_MAX, || {
            let is_work = self.take_messages();
            // An error is found again by who waits.
            let _ = epoll::wait(&self.epoll, spare_capacity(events), Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
            (is_work || !events.is_empty()).then_some(())
        });
        self.short_wait = short_wait;
        found.is_some()
    }

    /// How long to wait for events; `None`: until there are some.
    fn timeout(&self, is_work: bool) -> Option<Timespec> {
        let due = if is_work { Some(Instant(0)) } else { self.cm.next_due() };
        let span = due? - Instant(freeflow_shm::monotonic_ns());
        Some(Timespec { tv_sec: (span.0 / 1_000_000_000) as i64, tv_nsec: (span.0 % 1_000_000_000) as _ })
    }

    fn handle_event(&mut self, topic: Topic, flags: epoll::EventFlags) {
        let over = epoll::EventFlags::HUP | epoll::EventFlags::ERR | epoll::EventFlags::RDHUP;
        match topic {
            // The messages it rang for are taken first of all. Edge-triggered, so that nobody has
            // to read the eventfd.
            Topic::Waker => {}
            Topic::VnicListener(key) => self.accept_connections(key),
            Topic::Connection(key) if flags.intersects(over) => self.close(key),
            Topic::Connection(key) => self.serve(key),
            Topic::Process(key) => self.close(key),
            Topic::AdminListener => self.accept_admins(),
            Topic::Admin(key) => self.handle_admin_event(key, flags.intersects(over)),
            Topic::CmChannel(watch) => self.handle_cm_room(watch),
            Topic::Lease => self.look_at_lease(),
        }
    }

    /// Whether epoll reports a connection's messages: not while one is being dealt with. No
    /// library sends another one then, so this is seldom called.
    fn set_muted(&mut self, key: Key, muted: bool) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        if connection.closing || connection.muted == muted {
            return;
        }
        connection.muted = muted;
        let flags = epoll::EventFlags::RDHUP;
        let flags = if muted { flags } else { flags | epoll::EventFlags::IN };
        let data = epoll::EventData::new_u64(Topic::Connection(key).token());
        if epoll::modify(&self.epoll, &connection.socket, data, flags).is_err() {
            self.close(key);
        }
    }

    /// Reads and begins one request.
    fn serve(&mut self, key: Key) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        if connection.closing {
            return;
        }
        if connection.busy {
            return self.set_muted(key, true);
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(MESSAGE_BYTES_MAX, 0);
        let (received, descriptors) = fd::receive_all(&connection.socket, &mut buffer);
        let handled = match received {
            _ if !descriptors.is_empty() => {
                connection.unwanted = descriptors;
                self.complain(key, "a message that no library sends", &"it brings descriptors");
                None
            }
            Ok(0) => None,
            Ok(bytes) => Some(self.handle_message(key, &buffer[..bytes])),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.buffer = buffer;
                return;
            }
            Err(error) => {
                self.complain(key, "a message that no library sends", &error);
                None
            }
        };
        self.buffer = buffer;
        match handled {
            Some(Handled::Answered(answer)) => self.answer(key, answer),
            Some(Handled::Submitted) => {}
            None => self.close(key),
        }
    }

    fn handle_message(&mut self, key: Key, bytes: &[u8]) -> Handled {
        let Some(connection) = self.connections.get(key) else { return Handled::Submitted };
        let phase = connection.phase;
        let is_guest = self.vnic_of(key).is_some_and(|vnic| vnic.attachment.shared_memory().is_some());
        let request = match freeflow_protocol::decode::<Request>(bytes) {
            Ok(request) => request,
            Err(error) => {
                self.complain(key, "a malformed message", &error);
                // A library that can't be understood from its first word on has nothing more to say.
                let answer = match phase {
                    Phase::New => Answer::last(VerbsError::VersionMismatch),
                    Phase::Ready(_) => VerbsError::InvalidArgument.into(),
                };
                return Handled::Answered(answer);
            }
        };
        match (phase, request) {
            (Phase::New, Request::Hello { protocol, layouts, program }) => match agree(&protocol, layouts, is_guest) {
                Ok(agreed) => {
                    self.hello(key, agreed, &program).unwrap_or_else(|error| Handled::Answered(Answer::last(error)))
                }
                Err(why) => {
                    let (vnic, pid) = (connection.vnic.clone(), connection.pid);
                    if self.may_log(&vnic) {
                        info!("library of another release", vnic = vnic, pid = pid, why = why);
                    }
                    let protocol = if is_guest { GUEST_PROTOCOL } else { HOST_PROTOCOL };
                    let reply = Reply::Incompatible { protocol, layouts: LAYOUTS };
                    Handled::Answered(Answer { last: true, ..Answer::of(reply) })
                }
            },
            (Phase::New, _) => {
                self.complain(key, "a request before Hello", &"");
                Handled::Answered(Answer::last(VerbsError::InvalidArgument))
            }
            (Phase::Ready(session), request) => {
                self.handle_request(key, session, request).unwrap_or_else(|error| Handled::Answered(error.into()))
            }
        }
    }

    fn complain(&mut self, key: Key, what: &str, error: &dyn std::fmt::Display) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        let (first, pid) = (!std::mem::replace(&mut connection.complained, true), connection.pid);
        let id = connection.vnic.clone();
        if let Some(vnic) = self.vnics_by_id.get(&id).and_then(|&key| self.vnics.get_mut(key)) {
            vnic.malformed_messages += 1;
        }
        if first && self.may_log(&id) {
            warning!("refused", what = what, vnic = id, pid = pid, error = error);
        }
    }

    /// Sends a reply. The next request is another round's.
    fn answer(&mut self, key: Key, answer: Answer) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        if connection.closing {
            return;
        }
        let descriptors: Vec<BorrowedFd<'_>> = answer.descriptors.iter().map(AsFd::as_fd).collect();
        let bytes = freeflow_protocol::encode(&answer.reply);
        // One reply for each request: a peer whose socket is full doesn't read what it asked for.
        let sent = fd::send_message(&connection.socket, &bytes, &descriptors);
        if sent.is_err() || answer.last { self.close(key) } else { self.set_muted(key, false) }
    }

    /// A request of this connection is done.
    pub(crate) fn handle_request_done(&mut self, key: Key, finish: impl FnOnce(&mut Connection) -> Answer) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        connection.busy = false;
        let mut answer = finish(connection);
        // Hello was refused.
        answer.last |= connection.phase == Phase::New;
        if connection.closing { self.remove(key) } else { self.answer(key, answer) }
    }

    /// The vNIC of a connection.
    pub(crate) fn vnic_of(&self, key: Key) -> Option<&VnicEntry> {
        let connection = self.connections.get(key)?;
        self.vnics.get(*self.vnics_by_id.get(&connection.vnic)?)
    }

    fn hello(&mut self, key: Key, protocol: Agreement, program: &str) -> Result<Handled, VerbsError> {
        let vnic = self.vnic_of(key).ok_or(VerbsError::DeviceFatal)?;
        let network = self.state.network(&vnic.record.network).ok_or(VerbsError::DeviceFatal)?;
        let welcome = Welcome {
            protocol,
            layout_version: LAYOUT_VERSION,
            device: device_attributes(&vnic.record, network.id),
            gids: external::gids(&vnic.record, self.external_gid(&vnic.record.network, vnic.engine_id.shard())),
            network: vnic.record.network.clone(),
            vnic: vnic.record.id.clone(),
            session_segment_bytes: session::BYTES as u64,
        };
        let id = vnic.engine_id;
        let no_memory = |_: io::Error| VerbsError::NoMemory;
        let (segment, shared) = vnic.new_memory(session::BYTES, |bytes| Segment::create("freeflow-session", bytes))?;
        let segment = SessionSegment::create_in(segment);
        let kick = Arc::new(Doorbell::new().map_err(no_memory)?);
        let kick_fd = kick.as_fd().try_clone_to_owned().map_err(no_memory)?;
        let connection = self.connections.get(key).ok_or(VerbsError::DeviceFatal)?;
        let (vnic, pid) = (connection.vnic.clone(), connection.pid);
        if self.may_log(&vnic) {
            let program: String = program.chars().take(PROGRAM_CHARS_MAX).collect();
            info!("session begins", vnic = vnic, pid = pid, program = program);
        }
        let connection = self.connections.get(key).ok_or(VerbsError::DeviceFatal)?;
        let ranges = self.vnic_of(key).map(|vnic| vnic.account.ranges.clone()).unwrap_or_default();
        let memory = PageTable::new(connection.process.memory(), ranges);
        // No session has a name yet but that of its shard; the command is known by its ticket.
        let nobody = SessionId { index: u32::MAX, generation: id.generation };
        let command = CreateSession { vnic: id, features: protocol.features, segment, kick, memory };
        self.submit_with((key, nobody), command, move |control, session| {
            if session.is_ok() {
                control.note_recovered(key);
            }
            control.handle_request_done(key, |connection| match session {
                Ok(session) => {
                    connection.phase = Phase::Ready(session);
                    Answer::with_memory(Reply::Welcome(welcome), shared, vec![kick_fd])
                }
                Err(error) => error.into(),
            });
        })
    }

    /// A vNIC that the worker had given up takes sessions again.
    fn note_recovered(&mut self, key: Key) {
        let Some(vnic) = self.connections.get(key).map(|connection| connection.vnic.clone()) else { return };
        let entry = self.vnics_by_id.get(&vnic).and_then(|&key| self.vnics.get_mut(key));
        if entry.is_some_and(|entry| entry.failed.take().is_some()) {
            self.publish_phase(&vnic);
        }
    }

    /// Ends a connection: at once for its peer, and for the worker as soon as it has no command of it.
    pub(crate) fn close(&mut self, key: Key) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        if std::mem::replace(&mut connection.closing, true) {
            return;
        }
        connection.cancelled.store(true, Relaxed);
        let (busy, owner) = (connection.busy, connection.objects.cm.take());
        let _ = rustix::net::shutdown(&connection.socket, rustix::net::Shutdown::Both);
        if let Some(connection) = self.connections.get(key) {
            self.unwatch(&connection.socket);
            self.unwatch(connection.process.end());
        }
        // First of all: peers hear of it before their requests fail.
        if let Some(owner) = owner {
            self.end_cm_owner(owner);
        }
        if !busy {
            self.remove(key);
        }
    }

    fn remove(&mut self, key: Key) {
        let Some(connection) = self.connections.remove(key) else { return };
        let Connection { socket, process, unwanted, charge, objects, vnic, pid, phase, .. } = connection;
        let count = 1 + unwanted.len() as u32;
        process.let_go();
        self.dispose(&vnic, (socket, process, unwanted, charge), count);
        let Phase::Ready(session) = phase else { return };
        if self.may_log(&vnic) {
            info!("session ends", vnic = vnic, pid = pid);
        }
        self.ask(session.shard(), DestroySession { session }, move |control, held| {
            control.free(&vnic, (held, objects.into_memory()))
        });
    }

    /// Drops what holds a tenant's memory, without waiting for it. It is charged to the tenant until then.
    pub(crate) fn free(&mut self, vnic: &str, thing: impl std::any::Any + Send) {
        match self.vnics_by_id.get(vnic).and_then(|&key| self.vnics.get_mut(key)) {
            Some(entry) => entry.freer.close(thing, 0),
            None => Closer::default().close(thing, 0),
        };
    }

    /// Closes what a tenant had a hand in, without waiting for it.
    pub(crate) fn dispose(&mut self, vnic: &str, thing: impl std::any::Any + Send, count: u32) {
        let Some(entry) = self.vnics_by_id.get(vnic).and_then(|&key| self.vnics.get_mut(key)) else {
            Closer::default().close(thing, count);
            return;
        };
        if !entry.closer.close(thing, count) && entry.failed.is_none() {
            let reason = "its sockets take too long to close";
            entry.failed = Some(reason);
            let _ = epoll::delete(&self.epoll, &entry.listener);
            warning!("vNIC failed", vnic = vnic, reason = reason);
            self.close_connections_of(vnic);
        }
    }

    /// Whether one more line may be logged of what a vNIC's processes do as often as they like.
    pub(crate) fn may_log(&mut self, vnic: &str) -> bool {
        let Some(entry) = self.vnics_by_id.get(vnic).and_then(|&key| self.vnics.get_mut(key)) else { return true };
        let Some(left_out) = entry.lines.take(freeflow_shm::monotonic_ns()) else { return false };
        if left_out > 0 {
            info!("lines left out", vnic = vnic, count = left_out);
        }
        true
    }

    /// The worker has ended a session by itself.
    pub(crate) fn handle_session_failed(&mut self, session: SessionId, reason: &str, held: DeferredDrop) {
        let mut vnic = String::new();
        for key in self.connections.keys_where(|connection| connection.phase == Phase::Ready(session)) {
            vnic = self.connections.get(key).map(|connection| connection.vnic.clone()).unwrap_or_default();
            self.fail_session(key, reason);
        }
        self.free(&vnic, held);
    }

    pub(crate) fn fail_session(&mut self, key: Key, reason: &str) {
        if let Some(connection) = self.connections.get(key) {
            let (vnic, pid) = (connection.vnic.clone(), connection.pid);
            if self.may_log(&vnic) {
                warning!("session failed", vnic = vnic, pid = pid, reason = reason);
            }
        }
        self.close(key);
    }

    /// The worker has given a vNIC up, and ended its sessions.
    pub(crate) fn handle_vnic_failed(&mut self, id: VnicId, reason: &'static str, held: DeferredDrop) {
        let mut vnic = String::new();
        for key in self.vnics.keys_where(|vnic| vnic.engine_id == id) {
            vnic = self.id_of(key);
            warning!("vNIC failed", vnic = vnic, reason = reason);
            if let Some(entry) = self.vnics.get_mut(key) {
                entry.failed = Some(reason);
            }
            self.publish_phase(&vnic);
            self.close_connections_of(&vnic);
        }
        self.free(&vnic, held);
    }

    pub(crate) fn close_connections_of(&mut self, vnic: &str) {
        for key in self.connections.keys_where(|connection| connection.vnic == vnic) {
            self.close(key);
        }
    }
}
