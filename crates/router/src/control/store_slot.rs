//! The store, which is elsewhere while it writes, and the commands that wait for it.
use crate::api::plane::{ChangeObjects, Done, NotDone, ReplyTo};
use crate::audit::Who;
use freeflow_orchestrator::store::{Committed, Store, StoreError};
use freeflow_orchestrator::{Command, Refusal};
use std::collections::VecDeque;
use std::sync::mpsc::Sender;

pub(crate) type AnyStore = Box<dyn Store + Send>;

pub(crate) type Stored = Result<Committed, StoreError>;

/// Work that begins a command, or that must not run between a command's plan and its effect.
pub(crate) enum QueuedCommand {
    /// From the REST server.
    Change { call: Box<ChangeObjects>, reply: ReplyTo<Result<Done, NotDone>> },
    /// The same; no command, but it reads which networks there are.
    ReloadPeers { who: Who, reply: ReplyTo<Result<(), Refusal>> },
    /// From the owner of a router in this process.
    Declare { command: Box<Command>, answer: Sender<Result<(), Refusal>> },
    /// This vNIC was stored and could not be made.
    ForgetVnic { id: String },
    /// vNICs were stopped at the end of the host's lease.
    ForgetLeased,
}

/// The store, and the commands that wait for it.
pub(crate) struct Storing {
    pub store: Option<AnyStore>,
    /// From a command's plan until all that follows from it is in motion.
    pub has_command: bool,
    /// Of the command in hand.
    pub done: Option<Stored>,
    pub later: VecDeque<QueuedCommand>,
}

impl Storing {
    pub fn new(store: AnyStore) -> Self {
        Self { store: Some(store), has_command: false, done: None, later: VecDeque::new() }
    }
}
