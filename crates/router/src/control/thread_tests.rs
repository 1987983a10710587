//! The control thread without its thread: what becomes of a tenant's memory, and of what comes after an end.
use crate::admission::account::{Account, Charge, Commons};
use crate::api::plane::ChangeLease;
use crate::attachment::local::Local;
use crate::attachment::{AttachedProcess, Attachment, Found, Peer};
use crate::audit::Audit;
use crate::base::deferred_drop::Closer;
use crate::base::lease::LeaseChange;
use crate::base::log::Lines;
use crate::base::slab::Key;
use crate::config::{Config, Mode, ShardBy};
use crate::control::message::ControlHandle;
use crate::control::session::Handled;
use crate::control::session::{Connection, Objects, Phase};
use crate::control::thread::{Control, ControlParts};
use crate::control::vnic_entry::{Record, VnicEntry};
use crate::control::vnics::new_vnic;
use crate::dataplane::handle::{WorkerHandle, Workers};
use crate::dataplane::lone_worker::{LoneWorker, create_session};
use crate::dataplane::wire_options::WireOptions;
use crate::dataplane::worker::Worker;
use crate::memory::copy_threads::CopyThreadOptions;
use crate::memory::page_table::PageTable;
use crate::peering::PeersHandle;
use freeflow_engine::SessionId;
use freeflow_orchestrator::objects::parse_object;
use freeflow_orchestrator::{Command, Reason};
use freeflow_protocol::cm::CmRequest;
use freeflow_protocol::library::{Reply, Request};
use freeflow_shm::{Segment, fd, monotonic_ns};
use freeflow_store::open_state_dir;
use freeflow_verbs::{Duration, Instant, NetworkId, Shaping, VerbsError, VnicLimits};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::json;
use std::any::Any;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};

const NETWORK: NetworkId = NetworkId(1);
const VNIC: &str = "v2";

/// Its drop waits until the sender is dropped.
struct Slow(Receiver<()>);

impl Drop for Slow {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}

/// A vNIC with one session.
struct Rig {
    control: Control,
    worker: Worker,
    account: Arc<Account>,
    key: Key,
    session: SessionId,
    /// The library's end.
    library: OwnedFd,
    directory: PathBuf,
}

fn config(directory: &Path) -> Config {
    Config {
        run_dir: directory.to_owned(),
        state_dir: None,
        network_reconciler: None,
        near_halves: None,
        mode: Mode::LowCpu,
        copy_threads: CopyThreadOptions::default(),
        shard_count: 1,
        shard_by: ShardBy::Tenant,
        cpu: None,
        host: "test".into(),
        bridge: "none".into(),
        pool: "10.111.0.0/16".parse().unwrap(),
        range: None,
        wire: WireOptions::default(),
        limits: VnicLimits::default(),
        peers: None,
        revocation_time: Duration::from_millis(1000),
        metrics_listen: None,
        follows_cluster: false,
        machine_dir: directory.join("machine"),
    }
}

fn null() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

/// This process, as one that connected.
fn own_process(attachment: &dyn Attachment, socket: &OwnedFd, charge: Arc<Charge>) -> Box<dyn AttachedProcess> {
    let (credentials, pidfd) = (fd::peer_credentials(socket).unwrap(), fd::peer_pidfd(socket).unwrap());
    let (sender, found) = channel();
    let found_by = Box::new(move |process| sender.send(process).unwrap());
    assert!(attachment.identify(Peer { credentials, pidfd, charge }, found_by).is_ok());
    found.recv().unwrap().unwrap()
}

/// The two threads' things, for one thread.
fn control_and_worker(directory: &Path) -> (Control, Worker) {
    let LoneWorker { worker, commands, waker, events, control_waker } = LoneWorker::new();
    let (messages, messages_end) = channel();
    let (store, state) = open_state_dir(directory).unwrap();
    let control = Control::new(ControlParts {
        config: config(directory),
        workers: Workers::new(vec![WorkerHandle { commands, waker, lock: Arc::default() }]),
        events,
        messages: messages_end,
        own: ControlHandle { messages, waker: control_waker },
        state,
        store,
        admin_listener: fd::listen_seqpacket(directory.join("admin.sock"), 0o600).unwrap(),
        stop: Arc::new(AtomicBool::new(false)),
        commons: Arc::new(Commons::new(1 << 16, 1 << 16)),
        peers: PeersHandle::default(),
        peers_thread: None,
        audit: Audit::default(),
    });
    (control.unwrap(), worker)
}

impl Rig {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("ff-control-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let (mut control, mut worker) = control_and_worker(&directory);
        let record = Record {
            id: VNIC.into(),
            name: String::new(),
            network: "default".into(),
            address: [10, 111, 0, 2].into(),
            address6: None,
            labels: Vec::new(),
            limits: VnicLimits::default(),
        };
        let engine_id = worker.create_vnic(&new_vnic(NETWORK, &record, None)).unwrap();
        let account = Arc::new(Account::new(control.commons.clone()));
        let attachment = Arc::new(Local::new(account.clone(), Arc::default()));
        let entry = VnicEntry {
            cm: control.cm.attach(NETWORK, (record.gid(), None), None),
            record,
            place: control.placement.place("", (NETWORK, Vec::new()), crate::control::placement::Ties::default()),
            shaping: Shaping::default(),
            engine_id,
            listener: null(),
            account: account.clone(),
            closer: Arc::default(),
            attachment: attachment.clone(),
            has_attachment_failed: false,
            identifying: 0,
            freer: Closer::default(),
            lines: Lines::default(),
            malformed_messages: 0,
            blamed: BTreeMap::new(),
            failed: None,
        };
        let vnic = control.vnics.insert(entry);
        control.vnics_by_id.insert(VNIC.into(), vnic);
        let charge = Arc::new(Charge::connection(&account, 10).unwrap());
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (socket, library) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let process = own_process(&*attachment, &socket, charge.clone());
        let memory = PageTable::new(process.memory(), Arc::default());
        let session = create_session(&mut worker, engine_id, memory).unwrap();
        let key = control.connections.insert(Connection {
            socket,
            process,
            pid: 1,
            vnic: VNIC.into(),
            phase: Phase::Ready(session),
            busy: false,
            muted: false,
            closing: false,
            cancelled: Arc::new(AtomicBool::new(false)),
            complained: false,
            objects: Objects::default(),
            unwanted: Vec::new(),
            charge,
        });
        Self { control, worker, account, key, session, library, directory }
    }

    /// Runs the worker's commands, and delivers the answers.
    fn run(&mut self) {
        self.worker.turn(Instant(monotonic_ns()));
        self.control.take_messages();
    }

    /// The answer that is there, if one is.
    fn answer(&self) -> Option<Reply> {
        let mut buffer = vec![0; 4096];
        let (bytes, _) = fd::receive_into(&self.library, &mut buffer, fd::RECEIVED_FDS_MAX).ok()?;
        Some(freeflow_protocol::decode(&buffer[..bytes]).unwrap())
    }

    fn ask(&mut self, request: Request) -> Option<Reply> {
        match self.control.handle_request(self.key, self.session, request) {
            Ok(Handled::Answered(answer)) => Some(answer.reply),
            Ok(Handled::Submitted) => {
                self.run();
                self.answer()
            }
            Err(error) => Some(Reply::Failed(error)),
        }
    }

    fn create_segment(&mut self, length: u64) -> (u32, Weak<Segment>) {
        let Some(Reply::Segment { segment, .. }) = self.ask(Request::CreateSegment { length }) else { panic!() };
        let entry = self.control.objects(self.key).unwrap().segments.get(segment).unwrap();
        (segment, Arc::downgrade(&entry.segment))
    }

    /// Nothing of the vNIC's is freed before the sender is dropped.
    fn hold_up(&mut self) -> Sender<()> {
        let (release, released) = channel();
        self.control.free(VNIC, Slow(released));
        release
    }

    fn segment_bytes(&self) -> u64 {
        self.account.segment_bytes.load(Relaxed)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn until(mut check: impl FnMut() -> bool) {
    let began = monotonic_ns();
    while !check() {
        assert!(monotonic_ns() - began < 30_000_000_000, "waited in vain");
        freeflow_shm::sched_yield();
    }
}

#[test]
fn much_memory_is_freed_elsewhere_and_then_the_answer_goes_out() {
    let mut rig = Rig::new();
    let ((large, held), (small, _)) = (rig.create_segment(4 << 20), rig.create_segment(4096));
    let release = rig.hold_up();
    assert_eq!(rig.ask(Request::DestroySegment { segment: small }), Some(Reply::Done));
    assert_eq!(rig.ask(Request::DestroySegment { segment: large }), None);
    rig.run();
    assert!(rig.answer().is_none() && held.strong_count() == 1);
    assert_eq!(rig.segment_bytes(), 4 << 20, "it counts until it is freed");
    drop(release);
    let mut reply = None;
    until(|| {
        rig.control.take_messages();
        reply = rig.answer();
        reply.is_some()
    });
    assert_eq!((reply, held.strong_count(), rig.segment_bytes()), (Some(Reply::Done), 0, 0));
    assert_eq!(rig.ask(Request::DestroySegment { segment: large }), Some(Reply::Failed(VerbsError::NotFound)));
}

#[test]
fn a_session_that_ends_is_freed_elsewhere() {
    let mut rig = Rig::new();
    let (_, held) = rig.create_segment(4096);
    let release = rig.hold_up();
    rig.control.close(rig.key);
    rig.run();
    assert!(rig.control.connections.get(rig.key).is_none() && rig.worker.ports.sessions.get(rig.session).is_none());
    assert_eq!((held.strong_count(), rig.segment_bytes()), (1, 4096));
    drop(release);
    until(|| held.strong_count() == 0 && rig.segment_bytes() == 0);
}

/// An attachment that has ended: nothing is reached by it.
struct Ended;

impl Attachment for Ended {
    fn identify(&self, peer: Peer, found: Found) -> Result<(), Box<dyn Any + Send>> {
        Err(Box::new((peer, found)))
    }

    fn event_channel(&self, _: usize) -> io::Result<(OwnedFd, OwnedFd)> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn take_waiting(&self) -> Box<dyn Any + Send> {
        Box::new(())
    }

    fn ended(&self) -> Option<&'static str> {
        Some("its near half has ended")
    }
}

#[test]
fn an_attachment_is_renewed_only_when_its_connections_are_closed() {
    let mut rig = Rig::new();
    let vnic = rig.control.vnics_by_id[VNIC];
    rig.control.vnics.get_mut(vnic).unwrap().attachment = Arc::new(Ended);
    // Before the message that it has ended is taken.
    rig.control.renew_attachment(vnic).unwrap();
    rig.run();
    assert!(rig.control.connections.get(rig.key).is_none(), "it reaches its process no more");
    let failure = |rig: &Rig| {
        let entry = rig.control.vnics.get(vnic).unwrap();
        (entry.attachment.ended(), entry.failed)
    };
    assert_eq!(failure(&rig), (None, Some("its near half has ended")));
    rig.control.vnics.get_mut(vnic).unwrap().failed = None;
    rig.control.handle_attachment_ended(VNIC);
    assert_eq!(failure(&rig), (None, None), "the message is of the old one");
}

#[test]
fn a_session_that_ends_while_its_memory_is_freed_goes_then() {
    let mut rig = Rig::new();
    let (large, _) = rig.create_segment(4 << 20);
    let release = rig.hold_up();
    assert_eq!(rig.ask(Request::DestroySegment { segment: large }), None);
    rig.control.close(rig.key);
    assert!(rig.control.connections.get(rig.key).is_some());
    drop(release);
    until(|| {
        rig.run();
        rig.control.connections.get(rig.key).is_none() && rig.segment_bytes() == 0
    });
}

#[test]
fn a_session_that_the_worker_has_ended_gets_no_pipe() {
    let mut rig = Rig::new();
    let Some(Reply::Context { context }) = rig.ask(Request::OpenContext) else { panic!() };
    assert!(matches!(rig.ask(Request::CreateChannel { context }), Some(Reply::Channel { .. })));
    drop(rig.worker.destroy_session(Instant(monotonic_ns()), rig.session));
    let reply = rig.ask(Request::CreateChannel { context });
    assert_eq!(reply, Some(Reply::Failed(VerbsError::DeviceFatal)));
    assert!(rig.worker.ports.pipes.remove_session(rig.session).is_empty());
}

#[test]
fn who_is_closing_gets_no_owner_in_connection_management() {
    let mut rig = Rig::new();
    assert!(rig.control.handle_cm(rig.key, CmRequest::CreateChannel).is_ok());
    // The worker has a step of it in hand.
    rig.control.connections.get_mut(rig.key).unwrap().busy = true;
    rig.control.close(rig.key);
    let outcome = rig.control.handle_cm(rig.key, CmRequest::CreateChannel);
    assert!(matches!(outcome, Err(VerbsError::DeviceFatal)));
    assert!(rig.control.objects(rig.key).unwrap().cm.is_none());
}

/// A host that follows a cluster, with a network of it.
fn leased(directory: &Path) -> Control {
    std::fs::create_dir_all(directory.join("vnics")).unwrap();
    let (mut control, _) = control_and_worker(directory);
    control.config.follows_cluster = true;
    control.watch_lease().unwrap();
    let network = json!({"apiVersion": "freeflow.io/v1", "kind": "Network", "metadata": {"name": "red"},
        "spec": {"tenant": "red", "cidrs": ["10.50.0.0/24"]}});
    let objects = vec![parse_object(&network).unwrap()];
    control.command(Command::ApplyForCluster { objects }, false).unwrap();
    control
}

fn attach(control: &mut Control, id: &str) -> Result<(), Reason> {
    let (id, title, network) = (id.to_owned(), id.to_owned(), "red".to_owned());
    let command = Command::Attach { id, title, network, address: None, labels: BTreeMap::new() };
    control.command(command, false).map(drop).map_err(|refusal| refusal.reason)
}

fn change_lease(control: &mut Control, until_ns: u64, is_fresh: bool, barred: &[&str]) -> Result<(), Reason> {
    let barred = Some(barred.iter().map(|name| (*name).to_owned()).collect());
    let change = LeaseChange { after_s: Some(20), until_ns, is_fresh, barred };
    control.change_lease(ChangeLease { change }).map(drop).map_err(|refusal| refusal.reason)
}

#[test]
fn a_lease_that_is_over_ends_its_vnics_and_takes_no_new_ones() {
    let directory = std::env::temp_dir().join(format!("ff-control-lease-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let mut control = leased(&directory);
    assert_eq!(attach(&mut control, "a"), Ok(()), "a host without a lease to keep");
    let later = || freeflow_shm::boottime_ns() + 15_000_000_000;
    assert_eq!(change_lease(&mut control, later(), false, &[]), Ok(()));
    assert_eq!(attach(&mut control, "b"), Ok(()));
    // Shortened, so that it is over at once.
    assert_eq!(change_lease(&mut control, 1, false, &[]), Ok(()));
    assert!(control.making.is_empty() && control.vnics_by_id.is_empty(), "they wait for the store");
    assert_eq!(attach(&mut control, "c"), Err(Reason::Forbidden));
    control.run_waiting_commands();
    assert_eq!(control.state.vnics().count(), 0, "the next router makes them again");
    // It does not go on, and begins again.
    assert_eq!(change_lease(&mut control, later(), false, &[]), Err(Reason::Conflict));
    assert_eq!(change_lease(&mut control, later(), true, &["red"]), Ok(()));
    assert_eq!(attach(&mut control, "c"), Err(Reason::Forbidden), "its block is another's");
    assert_eq!(change_lease(&mut control, later(), false, &[]), Ok(()));
    assert_eq!(attach(&mut control, "c"), Ok(()));
    drop(control);
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_lease_begins_after_what_was_planned_before_is_stored_or_refused() {
    let directory = std::env::temp_dir().join(format!("ff-control-lease-first-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let mut control = leased(&directory);
    // Of a host that has nothing yet, until etcd has its word.
    assert_eq!(change_lease(&mut control, 0, false, &[]), Ok(()));
    assert_eq!(attach(&mut control, "a"), Err(Reason::Forbidden));
    let later = || freeflow_shm::boottime_ns() + 15_000_000_000;
    assert_eq!(change_lease(&mut control, later(), false, &[]), Err(Reason::Conflict), "without a look");
    let while_stored = control.with_command(|control| Ok(change_lease(control, later(), true, &[])));
    assert_eq!(while_stored.unwrap(), Err(Reason::Conflict), "a vNIC by an address of before");
    assert_eq!(change_lease(&mut control, later(), true, &[]), Ok(()));
    assert_eq!(attach(&mut control, "a"), Ok(()));
    drop(control);
    std::fs::remove_dir_all(&directory).unwrap();
}
