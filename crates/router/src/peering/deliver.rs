//! The peers thread's updates become jobs of the worker and reactions of the control thread.
//!
//! Both hear where hosts and addresses are, each in the right order, but not at the same time. Connection management is the
//! control thread's alone.
use super::handle::Sink;
use super::update::Update;
use crate::base::wake::Waker;
use crate::control::thread::{Control, WorkerHandle};
use crate::dataplane::jobs::{Reaction, Step};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::Sender;

/// Messages of connection management that the control thread has not looked at; any more are lost.
const CM_BACKLOG_COUNT_MAX: usize = 8192;

pub(crate) struct RouterSink {
    worker: WorkerHandle,
    control: (Sender<Reaction>, Arc<Waker>),
    /// Updates that the worker, and messages that the control thread has not dealt with yet.
    backlog: Arc<AtomicUsize>,
    cm_backlog: Arc<AtomicUsize>,
}

impl RouterSink {
    pub fn new(worker: WorkerHandle, control: (Sender<Reaction>, Arc<Waker>)) -> Self {
        Self { worker, control, backlog: Arc::default(), cm_backlog: Arc::default() }
    }

    fn deliver_to_control(&self, updates: Vec<Update>) {
        let count = updates.iter().filter(|update| matches!(update, Update::Cm { .. })).count();
        let backlog = self.cm_backlog.clone();
        backlog.fetch_add(count, Relaxed);
        let reaction: Reaction = Box::new(move |control: &mut Control| {
            backlog.fetch_sub(count, Relaxed);
            for update in updates {
                control.handle_peers_update(update);
            }
        });
        // Fails only while the router ends.
        let _ = self.control.0.send(reaction);
        self.control.1.wake();
    }
}

impl Sink for RouterSink {
    fn deliver(&self, updates: Vec<Update>) {
        let is_controls = |update: &&Update| match update {
            Update::Settings(_) | Update::HostUp { .. } | Update::HostDown { .. } | Update::Route { .. } => true,
            Update::Party { .. } | Update::Cm { .. } => true,
            Update::Severed { .. } => false,
            Update::Peer { .. } | Update::PeersGone { .. } | Update::Group { .. } | Update::Asked { .. } => false,
        };
        let of_control: Vec<Update> = updates.iter().filter(is_controls).cloned().collect();
        let of_worker: Vec<Update> =
            updates.into_iter().filter(|update| !matches!(update, Update::Cm { .. })).collect();
        // First the worker: who hears by the control thread that there is a peer finds the way to it.
        if !of_worker.is_empty() {
            let (count, backlog) = (of_worker.len(), self.backlog.clone());
            backlog.fetch_add(count, Relaxed);
            let mut held = Some(of_worker);
            self.worker.submit(Box::new(move |worker, now| {
                for update in held.take().into_iter().flatten() {
                    worker.handle_peers_update(now, update);
                }
                backlog.fetch_sub(count, Relaxed);
                Step::Done(Box::new(|_| {}))
            }));
        }
        if !of_control.is_empty() {
            self.deliver_to_control(of_control);
        }
    }

    fn backlog(&self) -> usize {
        self.backlog.load(Relaxed)
    }

    fn has_cm_room(&self) -> bool {
        self.cm_backlog.load(Relaxed) < CM_BACKLOG_COUNT_MAX
    }
}
