//! The ways to the workers, for other threads.
use crate::base::wake::Waker;
use crate::dataplane::command::{Ask, Submission};
use crate::dataplane::worker::Lock;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// The workers of a router: one for each shard, by its index.
#[derive(Clone)]
pub(crate) struct Workers(Arc<[WorkerHandle]>);

impl Workers {
    /// # Panics
    /// If there is none.
    pub fn new(handles: Vec<WorkerHandle>) -> Self {
        assert!(!handles.is_empty());
        Self(handles.into())
    }

    /// The first one's shard has the QPs of management.
    pub fn first(&self) -> &WorkerHandle {
        &self.0[0]
    }

    /// Of a shard, as names of the engine's objects say it; one that no object has is nobody's but the first one's.
    #[inline]
    pub fn of(&self, shard: u8) -> &WorkerHandle {
        self.0.get(usize::from(shard)).unwrap_or(self.first())
    }

    /// In order of their shards.
    pub fn all(&self) -> impl ExactSizeIterator<Item = (u8, &WorkerHandle)> {
        self.0.iter().enumerate().map(|(shard, handle)| (shard as u8, handle))
    }

    /// The same without one.
    pub fn others(&self, own: u8) -> impl Iterator<Item = &WorkerHandle> {
        self.all().filter(move |&(shard, _)| shard != own).map(|(_, worker)| worker)
    }

    pub fn count(&self) -> u8 {
        self.0.len() as u8
    }

    /// To each, and nobody waits for the answers.
    pub fn send_all<C: Ask>(&self, mut command: impl FnMut(u8) -> C) {
        for (shard, worker) in self.all() {
            let command = command(shard).into_command();
            // Fails only when the worker has ended, and then the router ends.
            let _ = worker.commands.send(Submission { ticket: None, command, bound: None });
        }
        // Those that sleep have it before any of them acts upon it, and tells the others what came of that.
        self.all().for_each(|(_, worker)| worker.waker.wake());
    }
}

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
