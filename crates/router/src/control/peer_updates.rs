//! The peers thread's updates become commands to the worker and messages to the control thread.
//!
//! Both hear where hosts and addresses are, each in the right order, but not at the same time.
//! Connection management is the control thread's alone.
use crate::control::message::{ControlHandle, Message};
use crate::dataplane::command::UpdatePeers;
use crate::dataplane::handle::WorkerHandle;
use crate::peering::{Sink, Update};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Messages of connection management that the control thread has not looked at; any more are lost.
const CM_BACKLOG_COUNT_MAX: usize = 8192;

pub(crate) struct RouterSink {
    worker: WorkerHandle,
    control: ControlHandle,
    /// Updates that the worker, and messages that the control thread has not dealt with yet.
    backlog: Arc<AtomicUsize>,
    cm_backlog: Arc<AtomicUsize>,
}

impl RouterSink {
    pub fn new(worker: WorkerHandle, control: ControlHandle) -> Self {
        Self { worker, control, backlog: Arc::default(), cm_backlog: Arc::default() }
    }

    fn deliver_to_control(&self, updates: Vec<Update>) {
        let count = updates.iter().filter(|update| matches!(update, Update::Cm { .. })).count();
        self.cm_backlog.fetch_add(count, Relaxed);
        self.control.send(Message::PeersUpdated { updates, backlog: self.cm_backlog.clone() });
    }
}

impl Sink for RouterSink {
    fn deliver(&self, updates: Vec<Update>) {
        let is_controls = |update: &&Update| match update {
            Update::Settings(_) | Update::HostUp { .. } | Update::HostDown { .. } | Update::Route { .. } => true,
            Update::Party { .. } | Update::Cm { .. } => true,
            Update::Disconnected { .. } => false,
            Update::Peer { .. } | Update::PeersGone { .. } | Update::Group { .. } | Update::Asked { .. } => false,
        };
        let of_control: Vec<Update> = updates.iter().filter(is_controls).cloned().collect();
        let of_worker: Vec<Update> =
            updates.into_iter().filter(|update| !matches!(update, Update::Cm { .. })).collect();
        // First the worker: who hears by the control thread that there is a peer finds the way to it.
        if !of_worker.is_empty() {
            self.backlog.fetch_add(of_worker.len(), Relaxed);
            self.worker.send(UpdatePeers { updates: of_worker, backlog: self.backlog.clone() });
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
