//! A whole router in this process: its threads, its run directory, its orderly end.
use crate::account::Commons;
use crate::config::Config;
use crate::control::{Control, ControlParts, WorkerHandle};
use crate::external::ExternalPolicy;
use crate::jobs::Step;
use crate::log::{info, warning};
use crate::peers::{Peers, PeersFile, PeersHandle, PrivateKey, WorkerSink};
use crate::pollers::Pollers;
use crate::rings::Rings;
use crate::store::Store;
use crate::wait::Waiting;
use crate::wake::Waker;
use crate::worker::{Worker, WorkerQueues};
use freeflow_engine::{Engine, Seed};
use freeflow_orchestrator::{Answer, Command, DEFAULT_NETWORK, State};
use freeflow_shm::{Doorbell, fd, install_sigbus_guard, pin_to_cpu};
use rustix::fs::FlockOperation;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

/// A router that runs until it is stopped, asked to end, or dropped.
pub struct Router {
    control: Option<JoinHandle<()>>,
    waker: Arc<Waker>,
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

impl Router {
    /// Returns when the sockets of the admin interface and of all vNICs listen.
    ///
    /// Errors: `AddrInUse` if another router has the run directory; `InvalidData` if its stored state can't be used.
    pub fn start(config: Config) -> io::Result<Self> {
        let lock = take_run_dir(&config.run_dir)?;
        install_sigbus_guard()?;
        let store = Store::new(&config.run_dir);
        let mut state = store.load()?;
        make_network(&mut state, &store, &config)?;
        let peers_file = config.peers.as_deref().map(PeersFile::load).transpose();
        let peers_file = peers_file.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let external = peers_file.as_ref().map(|(file, _)| ExternalPolicy::of(file)).unwrap_or_default();
        let (jobs, jobs_end) = channel();
        let (reactions, reactions_end) = channel();
        let (worker_waker, control_waker) = (Arc::new(Waker::new()?), Arc::new(Waker::new()?));
        let mut worker = {
            let (finished, finished_end) = channel();
            let random = random_bytes()?;
            let waiting = Waiting::new(config.mode, worker_waker.clone(), pollers(&config, &random))?;
            let rings = Rings::new(finished, worker_waker.clone());
            let control_waker = control_waker.clone();
            let reactions = reactions.clone();
            let queues = WorkerQueues { jobs: jobs_end, finished: finished_end, reactions, control_waker };
            Worker::new(Engine::new(Seed(random)), rings, queues, waiting)
        };
        let stop = Arc::new(AtomicBool::new(false));
        let (peers_thread, peers) = match peers_file {
            Some(file) => {
                let udp = config.wire.open(file.0.address, file.0.dscp)?;
                let sink = WorkerSink::new(WorkerHandle { jobs: jobs.clone(), waker: worker_waker.clone() });
                let (stop, waker) = (stop.clone(), control_waker.clone());
                let (thread, handle) = start_peers(file, &state, sink, Farewell(move || end_router(&stop, &waker)))?;
                worker.open_wire(udp, handle.clone())?;
                (Some(thread), handle)
            }
            None => (None, PeersHandle::default()),
        };
        let admin_listener = fd::listen_seqpacket(config.run_dir.join("admin.sock"), 0o600)?;
        let cpu = config.cpu;
        let mut control = Control::new(ControlParts {
            config,
            waker: control_waker.clone(),
            worker: WorkerHandle { jobs, waker: worker_waker },
            reactions: (reactions, reactions_end),
            state,
            store,
            admin_listener,
            stop: stop.clone(),
            commons: Arc::new(Commons::of_process()),
            peers,
            peers_thread,
        })?;
        control.external = external;
        control.restore_vnics(&mut worker)?;
        std::fs::write(control.config.run_dir.join("router.pid"), format!("{}\n", std::process::id()))?;
        let worker = {
            let (stop, waker) = (stop.clone(), control_waker.clone());
            // A router without its worker is none: the control thread ends too, and libraries see it.
            spawn_worker(worker, cpu, Farewell(move || end_router(&stop, &waker)))?
        };
        let (ended, broken) = (Arc::new(Doorbell::new()?), Arc::new(AtomicBool::new(false)));
        let (ended_of_thread, broken_of_thread) = (ended.clone(), broken.clone());
        let body = move || {
            let _farewell = Farewell(move || ended_of_thread.kick());
            control.run();
            broken_of_thread.store(!end(control, worker), Relaxed);
            drop(lock);
        };
        let thread = std::thread::Builder::new().name("ff-control".into()).spawn(body)?;
        Ok(Self { control: Some(thread), waker: control_waker, stop, ended, broken })
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
        self.waker.wake();
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

/// Libraries learn of the end by their pipes and sockets, which close with the worker and the control thread. False: the
/// worker had panicked.
fn end(control: Control, worker: JoinHandle<()>) -> bool {
    info!("router ends", run_dir = control.config.run_dir.display());
    control.remove_sockets();
    for name in ["admin.sock", "router.pid"] {
        let _ = std::fs::remove_file(control.config.run_dir.join(name));
    }
    control.worker.submit(Box::new(|worker, _| {
        worker.stopping = true;
        Step::Done(Box::new(|_| {}))
    }));
    let sound = worker.join().is_ok();
    if !sound {
        warning!("the worker panicked");
    }
    drop(control);
    sound
}

/// The network that every host has.
fn make_network(state: &mut State, store: &Store, config: &Config) -> io::Result<()> {
    let network = Command::CreateNetwork {
        name: DEFAULT_NETWORK.into(),
        pool: config.pool,
        range: config.range,
        bridge: config.bridge.clone(),
    };
    let answer = state.apply(&network).map_err(|refusal| {
        let text = format!("network {DEFAULT_NETWORK} with the pool {}: {refusal}", config.pool);
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })?;
    if answer == Answer::Changed {
        store.save(state)?;
    }
    Ok(())
}

fn end_router(stop: &AtomicBool, control_waker: &Waker) {
    stop.store(true, Relaxed);
    control_waker.wake();
}

/// The thread that talks to other hosts, and knows this host's networks.
fn start_peers(
    file: (PeersFile, PrivateKey),
    state: &State,
    sink: WorkerSink,
    farewell: Farewell<impl FnMut() + Send + 'static>,
) -> io::Result<(Peers, PeersHandle)> {
    let epoch = u64::from_le_bytes(random_bytes()?);
    let (thread, handle) = Peers::start(file, epoch, sink, farewell)?;
    for network in state.networks() {
        handle.network(&network.name, network.id);
    }
    Ok((thread, handle))
}

fn spawn_worker(
    mut worker: Worker,
    cpu: Option<usize>,
    farewell: Farewell<impl FnMut() + Send + 'static>,
) -> io::Result<JoinHandle<()>> {
    let body = move || {
        let _farewell = farewell;
        if let Some(cpu) = cpu
            && let Err(error) = pin_to_cpu(cpu)
        {
            warning!("can't bind the worker to its processor", cpu = cpu, error = error);
        }
        freeflow_shm::prefer_short_slices();
        worker.run();
    };
    std::thread::Builder::new().name("ff-worker".into()).spawn(body)
}

/// Makes the run directory and locks it: one router each. The lock ends with the process, however that ends.
fn take_run_dir(run_dir: &Path) -> io::Result<File> {
    DirBuilder::new().recursive(true).mode(0o755).create(run_dir.join("vnics"))?;
    let path = run_dir.join("lock");
    let lock = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        let text = format!("another router runs in {}", run_dir.display());
        io::Error::new(io::ErrorKind::AddrInUse, text)
    })?;
    Ok(lock)
}

pub(crate) fn random_bytes<const COUNT: usize>() -> io::Result<[u8; COUNT]> {
    let mut bytes = [0; COUNT];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
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
