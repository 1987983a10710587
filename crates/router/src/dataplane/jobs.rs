//! What the control thread hands to the worker, and what the worker hands back.
use crate::control::thread::Control;
use crate::dataplane::worker::Worker;
use freeflow_verbs::Instant;

/// A command of the control path, run by the worker between two rounds of data.
pub type Job = Box<dyn FnMut(&mut Worker, Instant) -> Step + Send>;

/// Run by the control thread afterwards.
pub type Reaction = Box<dyn FnOnce(&mut Control) + Send>;

pub enum Step {
    /// It waits for copies in flight, or has more to do than is done at once: ask again next turn.
    Again,
    Done(Reaction),
}
