//! The way to the worker, for other threads.
use crate::base::wake::Waker;
use crate::dataplane::command::{Ask, Submission};
use crate::dataplane::worker::Lock;
use std::sync::Arc;
use std::sync::mpsc::Sender;

#[derive(Clone)]
pub(crate) struct WorkerHandle {
    pub commands: Sender<Submission>,
    pub waker: Arc<Waker>,
    pub lock: Arc<Lock>,
}

impl WorkerHandle {
    /// Nobody waits for the answer.
    pub fn send(&self, command: impl Ask) {
        self.submit(Submission { ticket: None, command: command.into_command(), bound: None });
    }

    pub fn submit(&self, submission: Submission) {
        // Fails only when the worker has ended, and then the router ends.
        let _ = self.commands.send(submission);
        self.waker.wake();
    }
}
