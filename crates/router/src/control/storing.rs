//! Declared objects go to the disk on a thread of its own: an fsync takes as long as the disk
//! likes, and a frozen file system does not answer at all.
//!
//! A command is answered when it is stored, and the next command begins after that. Until then the control thread goes
//! round with all that is no command: libraries' requests, connections, what other threads left for it, and questions
//! about what is declared, which is what was stored last. The command line's own connections wait.
//!
//! Invariant: one command at a time is planned, stored and adopted. Whatever may begin one is a
//! [`QueuedCommand`], or is not served while [`Control::has_command`]. That is more than
//! the time for which the store is away: what follows the store's return in the same queue would be
//! planned without the command that was stored.
use crate::api::plane::NotDone;
use crate::base::log::warning;
use crate::base::privileges::{self, ThreadKind};
use crate::control::message::Message;
use crate::control::store_slot::{AnyStore, QueuedCommand, Stored};
use crate::control::thread::Control;
use freeflow_orchestrator::store::{StoreError, Transaction};
use freeflow_orchestrator::{Command, Reason, Refusal};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::channel;

fn broken(why: &str) -> StoreError {
    StoreError::Broken(why.into())
}

impl Control {
    pub(crate) fn has_command(&self) -> bool {
        self.storing.has_command
    }

    pub(crate) fn has_waiting_commands(&self) -> bool {
        !self.has_command() && !self.storing.later.is_empty()
    }

    pub(crate) fn waiting_command_count(&self) -> usize {
        self.storing.later.len()
    }

    /// Has a command in hand meanwhile.
    pub(crate) fn with_command<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, Refusal>) -> Result<T, Refusal> {
        if std::mem::replace(&mut self.storing.has_command, true) {
            return Err(Refusal::new(Reason::Internal, "another command is in hand"));
        }
        let result = work(self);
        self.storing.has_command = false;
        result
    }

    /// Runs it at once, or when the command in hand is done, in the order of the calls.
    pub(crate) fn when_stored(&mut self, queued: QueuedCommand) {
        if self.has_command() || !self.storing.later.is_empty() {
            self.storing.later.push_back(queued);
        } else {
            self.run_command(queued);
        }
    }

    pub(crate) fn run_waiting_commands(&mut self) {
        while let Some(queued) = self.storing.later.pop_front() {
            self.run_command(queued);
        }
    }

    fn run_command(&mut self, queued: QueuedCommand) {
        match queued {
            QueuedCommand::Change { call, reply } => {
                // With its client went its turn among the others.
                if reply.is_awaited() {
                    reply.give(self.change_objects(*call).map_err(NotDone::Refused));
                }
            }
            QueuedCommand::ReloadPeers { who, reply } => reply.give(self.reload_peers(who)),
            QueuedCommand::Declare { command, answer } => {
                // The owner may have gone.
                let _ = answer.send(self.command(*command, false).map(drop));
            }
            QueuedCommand::ForgetVnic { id } => {
                if let Err(refusal) = self.command(Command::Detach { id }, false) {
                    warning!("can't store that a vNIC is gone", error = refusal);
                }
            }
            QueuedCommand::ForgetLeased => self.forget_leased(),
        }
    }

    pub(crate) fn handle_stored(&mut self, store: AnyStore, stored: std::thread::Result<Stored>) {
        // A store that a panic left half done is nobody's to go on with.
        self.stop.fetch_or(stored.is_err(), Relaxed);
        self.storing.store = Some(store);
        self.storing.done = Some(stored.unwrap_or_else(|_| Err(broken("it panicked"))));
    }

    /// Durable when it returns. The control thread goes round meanwhile, also while the router is
    /// to end: what was begun is finished.
    pub(crate) fn commit(&mut self, transaction: Transaction) -> Stored {
        let Some(store) = self.storing.store.take() else { return Err(broken("another command is being stored")) };
        let (begin, begun) = channel::<AnyStore>();
        let own = self.own.clone();
        let body = move || {
            privileges::enter(ThreadKind::Store);
            let Ok(mut store) = begun.recv() else { return };
            let stored = catch_unwind(AssertUnwindSafe(|| store.commit(&transaction)));
            own.send(Message::Stored { store, stored });
        };
        if let Err(error) = std::thread::Builder::new().name("ff-store".into()).spawn(body) {
            self.storing.store = Some(store);
            return Err(broken(&format!("no thread to be had: {error}")));
        }
        // The thread waits for it.
        let _ = begin.send(store);
        loop {
            if let Some(stored) = self.storing.done.take() {
                return stored;
            }
            if let Err(error) = self.go_round() {
                self.stop.store(true, Relaxed);
                return Err(broken(&format!("the control thread can't wait for events: {error}")));
            }
        }
    }
}
