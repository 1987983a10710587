//! The way to the control thread: a question goes there as a reaction, its answer comes back by a oneshot. The worker is asked only
//! whether it turns, and not by way of the control thread.
use super::failure::Failure;
use crate::base::wake::Waker;
use crate::control::thread::{Control, WorkerHandle};
use crate::dataplane::jobs::{Reaction, Step};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long the control thread may take. It waits for nobody.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);

#[derive(Clone)]
pub struct Link {
    reactions: Sender<Reaction>,
    waker: Arc<Waker>,
    worker: WorkerHandle,
}

/// By which an answer is given; may be dropped instead.
pub type Reply<T> = oneshot::Sender<T>;

impl Link {
    pub fn new(reactions: Sender<Reaction>, waker: Arc<Waker>, worker: WorkerHandle) -> Self {
        Self { reactions, waker, worker }
    }

    /// Whether the worker does a job within this time.
    pub async fn worker_turns_within(&self, time_max: Duration) -> bool {
        let (reply, answer) = oneshot::channel();
        let mut reply = Some(reply);
        self.worker.submit(Box::new(move |_, _| {
            let _ = reply.take().map(|reply| reply.send(()));
            Step::Done(Box::new(|_| {}))
        }));
        matches!(tokio::time::timeout(time_max, answer).await, Ok(Ok(())))
    }

    /// Has the control thread run `question`.
    pub async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Control, Reply<T>) + Send + 'static,
    ) -> Result<T, Failure> {
        self.ask_within(ANSWER_TIME_MAX, question).await
    }

    pub async fn ask_within<T: Send + 'static>(
        &self,
        time_max: Duration,
        question: impl FnOnce(&mut Control, Reply<T>) + Send + 'static,
    ) -> Result<T, Failure> {
        let (reply, answer) = oneshot::channel();
        // Fails only when the control thread has ended; then so does the answer.
        let _ = self.reactions.send(Box::new(move |control| question(control, reply)));
        self.waker.wake();
        match tokio::time::timeout(time_max, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(Failure::internal("the router ends")),
            Err(_) => Err(Failure::internal("the router's control thread does not answer")),
        }
    }
}
