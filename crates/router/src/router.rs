//! A whole router in this process: its threads, its run directory, its orderly end.
use crate::admission::access::RuleCounts;
use crate::admission::account::Commons;
use crate::api::{Api, ApiParts, Link};
use crate::audit::{AuditThread, Entry};
use crate::base::log::{info, warning};
use crate::base::machine::random_bytes;
use crate::base::privileges::{self, ThreadKind};
use crate::base::wake::Waker;
use crate::config::Config;
use crate::control::external::ExternalPolicy;
use crate::control::message::{ControlHandle, Message};
use crate::control::peer_updates::RouterSink;
use crate::control::thread::{Control, ControlParts};
use crate::dataplane::command::{Probe, ProbeAnswer, Stop, Submission};
use crate::dataplane::event::Event;
use crate::dataplane::handle::{WorkerHandle, Workers};
use crate::dataplane::pollers::Pollers;
use crate::dataplane::ports::Ports;
use crate::dataplane::siblings::Siblings;
use crate::dataplane::waiting::Waiting;
use crate::dataplane::worker::Lock;
use crate::dataplane::worker::{Worker, WorkerQueues};
use crate::memory::copy_threads::CopyThreads;
use crate::network_reconciler::{NetworkReconciler, Notifier};
use crate::peering::{Peers, PeersFile, PeersHandle, PrivateKey};
use freeflow_engine::{Engine, Seed};
use freeflow_orchestrator::access::AccessTable;
use freeflow_orchestrator::store::{Committed, Store as _};
use freeflow_orchestrator::{Command, Reason, Refusal, State};
use freeflow_shm::{Doorbell, fd, install_sigbus_guard, pin_to_cpu, refuses_missing_pages, release_large_allocations};
use freeflow_store::{FileStore, open_state_dir};
use freeflow_verbs::Shard;
use rustix::fs::FlockOperation;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// A router that runs until it is stopped, asked to end, or dropped.
pub struct Router {
    control: Option<JoinHandle<()>>,
    messages: ControlHandle,
    stop: Arc<AtomicBool>,
    ended: Arc<Doorbell>,
    /// A thread of it panicked.
    broken: Arc<AtomicBool>,
}

/// Says that a thread has ended, however it did.
struct Farewell<F: FnMut()>(F);

impl<F: FnMut()> Drop for Farewell<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Faults in shared memory are errors of what touched it, and missing pages are nobody's here.
fn guard_memory() -> io::Result<()> {
    install_sigbus_guard()?;
    if let Err(error) = refuses_missing_pages() {
        warning!("no userfaultfd: memory that containers share can be charged to the router", error = error);
    }
    release_large_allocations();
    Ok(())
}

impl Router {
    /// Returns when the sockets of the admin interface and of all vNICs listen.
    ///
    /// Errors: `AddrInUse` if another router has the run directory; `InvalidData` if its stored state can't be used.
    pub fn start(config: Config) -> io::Result<Self> {
        let lock = take_run_dir(&config.run_dir)?;
        guard_memory()?;
        let (audit_thread, audit) = AuditThread::start(&config.run_dir)?;
        let (store, state) = open_state(&config)?;
        let peers_file = config.peers.as_deref().map(PeersFile::load).transpose();
        let peers_file = peers_file.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let external = peers_file.as_ref().map(|(file, _)| ExternalPolicy::of(file)).unwrap_or_default();
        let external = external.within(&state);
        let (events, events_end) = channel();
        let (messages, messages_end) = channel();
        let control_waker = Arc::new(Waker::new()?);
        let (mut workers, handles) = make_workers(&config, (events, control_waker.clone()))?;
        let own = ControlHandle { messages, waker: control_waker.clone() };
        let stop = Arc::new(AtomicBool::new(false));
        let (peers_thread, peers) = match peers_file {
            Some(file) => {
                let sockets = config.wire.open(file.0.address, file.0.dscp, config.shard_count)?;
                let sink = RouterSink::new(own.clone());
                let (stop, waker) = (stop.clone(), control_waker.clone());
                let (thread, handle) =
                    start_peers(file, &state, (sink, config.shard_count), Farewell(move || end_router(&stop, &waker)))?;
                for (worker, udp) in workers.iter_mut().zip(sockets) {
                    worker.open_wire(udp, handle.clone())?;
                }
                (Some(thread), handle)
            }
            None => (None, PeersHandle::default()),
        };
        let admin_listener = fd::listen_seqpacket(config.run_dir.join("admin.sock"), 0o600)?;
        let cpu = config.cpu;
        let (network_reconciler, network_notifier) = start_network_reconciler(&config, own.clone())?;
        let mut control = Control::new(ControlParts {
            config,
            workers: handles.clone(),
            events: events_end,
            messages: messages_end,
            own: own.clone(),
            state,
            store,
            admin_listener,
            stop: stop.clone(),
            commons: Arc::new(Commons::of_process()),
            peers,
            peers_thread,
            audit,
        })?;
        (control.external, control.network_notifier) = (external, network_notifier);
        control.restore_vnics(&mut workers)?;
        control.watch_lease()?;
        control.choose_mode();
        let api = start_api(&mut control, own.clone())?;
        std::fs::write(control.config.run_dir.join("router.pid"), format!("{}\n", std::process::id()))?;
        let mut threads = Vec::new();
        for (worker, (shard, handle)) in workers.into_iter().zip(handles.all()) {
            let (stop, waker) = (stop.clone(), control_waker.clone());
            // A router without its workers is none: the control thread ends too, and libraries see it.
            let farewell = Farewell(move || end_router(&stop, &waker));
            // The first one alone: the others would have the same processor.
            let cpu = cpu.filter(|_| shard == 0);
            threads.push(spawn_worker((worker, handle.lock.clone()), (shard, cpu), farewell)?);
        }
        let (ended, broken) = (Arc::new(Doorbell::new()?), Arc::new(AtomicBool::new(false)));
        let kept = (api, audit_thread, network_reconciler, lock);
        let thread = spawn_control(control, threads, (ended.clone(), broken.clone()), kept)?;
        Ok(Self { control: Some(thread), messages: own, stop, ended, broken })
    }

    /// Puts access rules in force, as if they had been declared: for who runs a router in its own
    /// process. Of networks that the table does not know nothing is allowed.
    pub fn set_access(&self, table: AccessTable) {
        self.messages.send(Message::SetAccess { table: Box::new(table) });
    }

    /// How often a rule (none: a network's own `access`) has refused something, and how many ends
    /// of connections it has cut.
    pub fn access_counts(&self, rule: Option<&str>) -> RuleCounts {
        let (rule, (answer, counts)) = (rule.map(str::to_owned), channel());
        self.messages.send(Message::CountAccess { rule, answer });
        counts.recv().unwrap_or_default()
    }

    /// Declares, as an operator does; whether it was refused.
    pub fn command(&self, command: Command) -> Result<(), Refusal> {
        let (answer, done) = channel();
        self.messages.send(Message::Declare { command: Box::new(command), answer });
        done.recv().unwrap_or_else(|_| Err(Refusal::new(Reason::Internal, "the router has ended")))
    }

    /// Becomes readable when the router has ended.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Ends all sessions and removes the sockets; returns when that is done. Errors: a thread of the router panicked.
    pub fn stop(mut self) -> io::Result<()> {
        self.end();
        if self.broken.load(Relaxed) { Err(io::Error::other("a thread of the router panicked")) } else { Ok(()) }
    }

    fn end(&mut self) {
        self.stop.store(true, Relaxed);
        self.messages.waker.wake();
        if let Some(thread) = self.control.take()
            && thread.join().is_err()
        {
            warning!("the control thread panicked");
            self.broken.store(true, Relaxed);
        }
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.end();
    }
}

/// Libraries learn of the end by their pipes and sockets, which close with the worker and the
/// control thread. False: a worker had panicked.
fn end(mut control: Control, workers: Vec<JoinHandle<()>>) -> bool {
    info!("router ends", run_dir = control.config.run_dir.display());
    control.remove_sockets();
    control.end_cm();
    for name in ["admin.sock", "router.pid"] {
        let _ = std::fs::remove_file(control.config.run_dir.join(name));
    }
    control.workers.send_all(|_| Stop {});
    // All of them: what they hold goes before the sockets do.
    let sound = workers.into_iter().map(JoinHandle::join).fold(true, |sound, ended| sound & ended.is_ok());
    if !sound {
        warning!("the worker panicked");
    }
    drop(control);
    sound
}

/// The thread `ff-control`. At its end everything that was kept ends in order.
fn spawn_control(
    mut control: Control,
    workers: Vec<JoinHandle<()>>,
    (ended, broken): (Arc<Doorbell>, Arc<AtomicBool>),
    (api, audit_thread, network_reconciler, lock): (Api, AuditThread, NetworkReconciler, File),
) -> io::Result<JoinHandle<()>> {
    let body = move || {
        let _farewell = Farewell(move || ended.kick());
        privileges::enter(ThreadKind::Control);
        // It may hold the worker lock, and the worker waits for that.
        freeflow_shm::prefer_short_slices();
        control.run();
        drop(api);
        let audit = control.audit.clone();
        broken.store(!end(control, workers), Relaxed);
        drop(network_reconciler);
        audit.note(Entry::Router { what: "ends" });
        drop(audit_thread);
        drop(lock);
    };
    std::thread::Builder::new().name("ff-control".into()).spawn(body)
}

/// From now on what is declared can be asked for and changed.
fn start_api(control: &mut Control, own: ControlHandle) -> io::Result<Api> {
    let workers = control.workers.clone();
    let link = Link::new(
        move |request| own.send(Message::Api(Box::new(request))),
        move |answer| {
            let answer = ProbeAnswer::new(answer, workers.count());
            workers.send_all(|_| Probe { answer: answer.clone() });
        },
    );
    let (run_dir, revision) = (control.config.run_dir.clone(), control.declared().revision());
    let metrics_listen = control.config.metrics_listen;
    let (state_dir, audit) = (control.config.state_dir().to_owned(), control.audit.clone());
    let host = control.config.host_name();
    let parts = ApiParts { run_dir, state_dir, host, link, audit, revision, metrics_listen };
    let (api, feed) = Api::start(parts)?;
    control.feed = feed;
    control.audit.note(Entry::Router { what: "begins" });
    Ok(api)
}

/// Opens the store of declared objects.
fn open_state(config: &Config) -> io::Result<(FileStore, State)> {
    let state_dir = config.state_dir();
    DirBuilder::new().recursive(true).mode(0o700).create(state_dir)?;
    let (mut store, mut state) = open_state_dir(state_dir)?;
    begin(&mut state, &mut store, config)?;
    Ok((store, state))
}

/// The host, and the network that every host has.
fn begin(state: &mut State, store: &mut FileStore, config: &Config) -> io::Result<()> {
    let command = Command::Begin {
        host: config.host_name(),
        pool: config.pool,
        range: config.range,
        bridge: config.bridge.clone(),
    };
    let plan = state.plan(&command).map_err(|refusal| {
        let kind = if refusal.reason == Reason::Internal { io::ErrorKind::Other } else { io::ErrorKind::InvalidInput };
        io::Error::new(kind, refusal.to_string())
    })?;
    if plan.writes.is_empty() {
        return Ok(());
    }
    match store.commit(&state.transaction(&plan)).map_err(io::Error::other)? {
        Committed::Done(revision) => state.adopt(&plan, revision),
        Committed::Conflict(_) => return Err(io::Error::other("somebody else writes to the store")),
    }
    Ok(())
}

fn end_router(stop: &AtomicBool, control_waker: &Waker) {
    stop.store(true, Relaxed);
    control_waker.wake();
}

/// The thread that has the host's network reconciled. It asks the control thread what there is.
fn start_network_reconciler(config: &Config, control: ControlHandle) -> io::Result<(NetworkReconciler, Notifier)> {
    NetworkReconciler::start(config.network_reconciler.clone(), move || {
        let (sender, answer) = channel();
        control.send(Message::ReadInventory { answer: sender });
        answer.recv().ok()
    })
}

/// The thread that talks to other hosts, and knows this host's networks.
fn start_peers(
    file: (PeersFile, PrivateKey),
    state: &State,
    (sink, shard_count): (RouterSink, u8),
    farewell: Farewell<impl FnMut() + Send + 'static>,
) -> io::Result<(Peers, PeersHandle)> {
    let epoch = u64::from_le_bytes(random_bytes()?);
    let (thread, handle) = Peers::start(file, (epoch, shard_count), sink, farewell)?;
    for network in state.networks() {
        handle.network(network.name(), Some(network.id));
    }
    Ok((thread, handle))
}

/// The workers of all shards, before they have their threads.
fn make_workers(config: &Config, to_control: (Sender<Event>, Arc<Waker>)) -> io::Result<(Vec<Worker>, Workers)> {
    let count = config.shard_count;
    let wakers = (0..count).map(|_| Waker::new().map(Arc::new)).collect::<io::Result<Vec<_>>>()?;
    let (mut workers, mut handles) = (Vec::new(), Vec::new());
    for (shard, waker) in Shard::all(count).zip(&wakers) {
        let (commands, commands_end) = channel();
        workers.push(make_worker(config, shard, waker, (commands_end, to_control.clone()))?);
        handles.push(WorkerHandle { commands, waker: waker.clone(), lock: Arc::default() });
    }
    if workers.is_empty() {
        let text = format!("a router has 1, 2, 4 or 8 shards, not {count}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    if count > 1 {
        for (worker, siblings) in workers.iter_mut().zip(Siblings::all(&wakers)) {
            worker.ports.fabric.set_siblings(siblings);
        }
    }
    Ok((workers, Workers::new(handles)))
}

fn make_worker(
    config: &Config,
    shard: Shard,
    waker: &Arc<Waker>,
    (commands, (events, control_waker)): (Receiver<Submission>, (Sender<Event>, Arc<Waker>)),
) -> io::Result<Worker> {
    let (finished, finished_end) = channel();
    let random = random_bytes()?;
    let waiting = Waiting::new(config.mode, waker.clone(), pollers(config, &random))?;
    let mut ports = Ports::new(finished, waker.clone());
    ports.grants.time_max = config.revocation_time;
    ports.copy_threads = CopyThreads::start(config.copy_threads.of_shard(shard), config.mode, waker)?;
    let queues = WorkerQueues { commands, finished: finished_end, events, control_waker };
    Ok(Worker::new(Engine::of_shard(Seed(random), shard), ports, queues, waiting))
}

fn spawn_worker(
    (worker, lock): (Worker, Arc<Lock>),
    (shard, cpu): (u8, Option<usize>),
    farewell: Farewell<impl FnMut() + Send + 'static>,
) -> io::Result<JoinHandle<()>> {
    let name = if shard == 0 { "ff-worker".to_owned() } else { format!("ff-worker-{shard}") };
    let body = move || {
        let _farewell = farewell;
        privileges::enter(ThreadKind::Worker);
        if let Some(cpu) = cpu
            && let Err(error) = pin_to_cpu(cpu)
        {
            warning!("can't bind the worker to its processor", cpu = cpu, error = error);
        }
        freeflow_shm::prefer_short_slices();
        worker.run(&lock);
    };
    std::thread::Builder::new().name(name).spawn(body)
}

/// Makes the run directory and locks it: one router each. The lock ends with the process, however that ends.
fn take_run_dir(run_dir: &Path) -> io::Result<File> {
    let vnics = run_dir.join("vnics");
    DirBuilder::new().recursive(true).mode(0o700).create(&vnics)?;
    // A process that reaches a vNIC's socket may use it, so this directory is closed to all; containers
    // get the socket without it.
    std::fs::set_permissions(&vnics, Permissions::from_mode(0o700))?;
    // All users find the socket of the REST server, which asks who they are. Everything else here
    // has permissions of its own.
    std::fs::set_permissions(run_dir, Permissions::from_mode(0o711))?;
    let path = run_dir.join("lock");
    let lock = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        let text = format!("another router runs in {}", run_dir.display());
        io::Error::new(io::ErrorKind::AddrInUse, text)
    })?;
    Ok(lock)
}

/// The pollers file names this router by a random number, which is no secret: not one that seeds keys.
fn pollers(config: &Config, random: &[u8; 32]) -> Pollers {
    let owner: [u8; 32] = random_bytes().unwrap_or(*random);
    let owner = u64::from_le_bytes(std::array::from_fn(|i| owner[i])).max(1);
    Pollers::open(&config.machine_dir, owner).unwrap_or_else(|error| {
        warning!("can't open the machine's file of pollers", directory = config.machine_dir.display(), error = error);
        Pollers::alone(owner)
    })
}
