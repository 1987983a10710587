//! For tests: a worker without its thread, and the ends of its queues.
use crate::admission::access::VnicIdentity;
use crate::base::mode::Mode;
use crate::base::wake::Waker;
use crate::dataplane::command::{CreateSession, Execute, Execution, NewVnic, Submission};
use crate::dataplane::event::Event;
use crate::dataplane::pollers::Pollers;
use crate::dataplane::ports::Ports;
use crate::dataplane::waiting::Waiting;
use crate::dataplane::worker::{Worker, WorkerQueues};
use crate::memory::page_table::PageTable;
use freeflow_engine::{Engine, Seed, SessionId, VnicId};
use freeflow_shm::{Doorbell, SessionSegment, monotonic_ns};
use freeflow_verbs::{Gid, Instant, NetworkId, VerbsError, VnicLimits};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

pub(crate) struct LoneWorker {
    pub worker: Worker,
    pub commands: Sender<Submission>,
    pub waker: Arc<Waker>,
    pub events: Receiver<Event>,
    pub control_waker: Arc<Waker>,
}

impl LoneWorker {
    pub fn new() -> Self {
        let (commands, commands_end) = channel();
        let (finished_sender, finished) = channel();
        let (events, events_end) = channel();
        let (waker, control_waker) = (Arc::new(Waker::new().unwrap()), Arc::new(Waker::new().unwrap()));
        let waiting = Waiting::new(Mode::LowCpu, waker.clone(), Pollers::alone(1)).unwrap();
        let queues = WorkerQueues { commands: commands_end, finished, events, control_waker: control_waker.clone() };
        let ports = Ports::new(finished_sender, waker.clone());
        let worker = Worker::new(Engine::new(Seed([7; 32])), ports, queues, waiting);
        Self { worker, commands, waker, events: events_end, control_waker }
    }
}

/// The vNIC of a host number.
pub(crate) fn new_vnic(network: NetworkId, host: u8) -> NewVnic {
    NewVnic {
        network,
        network_name: "default".into(),
        gid: Gid::from_ip(IpAddr::V4(Ipv4Addr::new(10, 111, 0, host))),
        ipv6_gid: None,
        external_gid: None,
        limits: VnicLimits::default(),
        identity: Arc::new(VnicIdentity {
            vnic: format!("v{host}"),
            labels: BTreeMap::default(),
            addresses: Vec::new(),
        }),
        is_guest: false,
    }
}

pub(crate) fn create_session(worker: &mut Worker, vnic: VnicId, memory: PageTable) -> Result<SessionId, VerbsError> {
    let (segment, kick) = (SessionSegment::create().unwrap().0, Arc::new(Doorbell::new().unwrap()));
    match worker.execute(Instant(monotonic_ns()), CreateSession { vnic, features: 0, segment, kick, memory }) {
        Execution::Done { answer, .. } => answer,
        Execution::Again(_) => panic!("nothing is in flight"),
    }
}
