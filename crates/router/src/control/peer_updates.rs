//! The peers thread's updates become messages to the control thread, and by it commands to the worker.
//!
//! So the worker, asleep, need not be woken for each: the control thread executes the command in its
//! place (`worker_lock`). It does so first: who hears that there is a peer finds the way to it.
//! Connection management is the control thread's alone.
use crate::control::message::{ControlHandle, Message};
use crate::control::thread::Control;
use crate::peering::{Sink, Update};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Messages of connection management that the control thread has not looked at; any more are lost.
const CM_BACKLOG_COUNT_MAX: usize = 8192;

pub(crate) struct RouterSink {
    control: ControlHandle,
    backlog: UpdateBacklog,
}

/// Updates that were not dealt with yet.
#[derive(Clone, Default)]
pub(crate) struct UpdateBacklog {
    /// By the worker.
    of_worker: Arc<AtomicUsize>,
    /// Messages of connection management.
    of_cm: Arc<AtomicUsize>,
}

impl RouterSink {
    pub fn new(control: ControlHandle) -> Self {
        Self { control, backlog: UpdateBacklog::default() }
    }
}

fn is_cm(update: &Update) -> bool {
    matches!(update, Update::Cm { .. })
}

/// Whether the control thread hears of it, too.
fn is_controls(update: &Update) -> bool {
    match update {
        Update::Settings(_) | Update::HostUp { .. } | Update::HostDown { .. } | Update::Route { .. } => true,
        Update::Party { .. } | Update::Cm { .. } => true,
        Update::Disconnected { .. } | Update::Frames { .. } | Update::Shards { .. } => false,
        Update::SealKey { .. } | Update::SealKeyHeld { .. } | Update::Removed { .. } => false,
        Update::Peer { .. }
        | Update::PeersGone { .. }
        | Update::AskAgain { .. }
        | Update::Group { .. }
        | Update::Asked { .. } => false,
    }
}

impl Sink for RouterSink {
    fn deliver(&self, updates: Vec<Update>) {
        let cm_count = updates.iter().filter(|update| is_cm(update)).count();
        self.backlog.of_cm.fetch_add(cm_count, Relaxed);
        self.backlog.of_worker.fetch_add(updates.len() - cm_count, Relaxed);
        self.control.send(Message::PeersUpdated { updates, backlog: self.backlog.clone() });
    }

    fn backlog(&self) -> usize {
        self.backlog.of_worker.load(Relaxed)
    }

    fn has_cm_room(&self) -> bool {
        self.backlog.of_cm.load(Relaxed) < CM_BACKLOG_COUNT_MAX
    }
}

impl Control {
    pub(crate) fn handle_peers_updates(&mut self, updates: Vec<Update>, backlog: &UpdateBacklog) {
        let cm_count = updates.iter().filter(|update| is_cm(update)).count();
        backlog.of_cm.fetch_sub(cm_count, Relaxed);
        let of_control: Vec<Update> = updates.iter().filter(|update| is_controls(update)).cloned().collect();
        let of_worker: Vec<Update> = updates.into_iter().filter(|update| !is_cm(update)).collect();
        if !of_worker.is_empty() {
            self.update_peers(of_worker, &backlog.of_worker);
        }
        for update in of_control {
            self.handle_peers_update(update);
        }
    }
}
