//! The store, which is elsewhere while it writes, and what waits for it.
use freeflow_orchestrator::store::{Committed, Store, StoreError};
use std::collections::VecDeque;

pub(crate) type AnyStore = Box<dyn Store + Send>;

pub(crate) type Stored = Result<Committed, StoreError>;

/// Function that may begin a command, run on the control thread.
type Later<C> = Box<dyn FnOnce(&mut C) + Send>;

/// The store, which is elsewhere while it writes, and what waits for it.
pub(crate) struct Storing<C> {
    pub store: Option<AnyStore>,
    /// From a command's plan until all that follows from it is in motion.
    pub has_command: bool,
    /// Of the command in hand.
    pub done: Option<Stored>,
    pub later: VecDeque<Later<C>>,
}

impl<C> Storing<C> {
    pub fn new(store: AnyStore) -> Self {
        Self { store: Some(store), has_command: false, done: None, later: VecDeque::new() }
    }
}
