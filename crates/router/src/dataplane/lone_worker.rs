//! For tests: a worker without its thread, and the ends of its queues.
use crate::base::wake::Waker;
use crate::config::Mode;
use crate::dataplane::idle::Waiting;
use crate::dataplane::jobs::{Job, Reaction};
use crate::dataplane::pollers::Pollers;
use crate::dataplane::ports::Rings;
use crate::dataplane::worker::{Worker, WorkerQueues};
use freeflow_engine::{Engine, Seed};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

pub(crate) struct LoneWorker {
    pub worker: Worker,
    pub jobs: Sender<Job>,
    pub waker: Arc<Waker>,
    pub reactions: (Sender<Reaction>, Receiver<Reaction>),
    pub control_waker: Arc<Waker>,
}

impl LoneWorker {
    pub fn new() -> Self {
        let (jobs, jobs_end) = channel();
        let (finished_sender, finished) = channel();
        let (reactions, reactions_end) = channel();
        let (waker, control_waker) = (Arc::new(Waker::new().unwrap()), Arc::new(Waker::new().unwrap()));
        let waiting = Waiting::new(Mode::LowCpu, waker.clone(), Pollers::alone(1)).unwrap();
        let queues = WorkerQueues {
            jobs: jobs_end,
            finished,
            reactions: reactions.clone(),
            control_waker: control_waker.clone(),
        };
        let rings = Rings::new(finished_sender, waker.clone());
        let worker = Worker::new(Engine::new(Seed([7; 32])), rings, queues, waiting);
        Self { worker, jobs, waker, reactions: (reactions, reactions_end), control_waker }
    }
}
