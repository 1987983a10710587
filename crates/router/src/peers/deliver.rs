//! The peers thread's updates become jobs of the worker.
use super::handle::Sink;
use super::update::Update;
use crate::control::WorkerHandle;
use crate::jobs::Step;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub(crate) struct WorkerSink {
    worker: WorkerHandle,
    backlog: Arc<AtomicUsize>,
}

impl WorkerSink {
    pub fn new(worker: WorkerHandle) -> Self {
        Self { worker, backlog: Arc::default() }
    }
}

impl Sink for WorkerSink {
    fn deliver(&self, updates: Vec<Update>) {
        let (count, backlog) = (updates.len(), self.backlog.clone());
        backlog.fetch_add(count, Relaxed);
        let mut held = Some(updates);
        self.worker.submit(Box::new(move |worker, now| {
            for update in held.take().into_iter().flatten() {
                worker.handle_peers_update(now, update);
            }
            backlog.fetch_sub(count, Relaxed);
            Step::Done(Box::new(|_| {}))
        }));
    }

    fn backlog(&self) -> usize {
        self.backlog.load(Relaxed)
    }
}
