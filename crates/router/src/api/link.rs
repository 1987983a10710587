//! The way to the control thread: a question goes there as a message, its answer comes back by a
//! oneshot. The worker is asked only whether it turns, and not by way of the control thread.
use super::failure::Failure;
use crate::control::message::{ControlHandle, Message};
use crate::control::thread::Control;
use crate::dataplane::command::Probe;
use crate::dataplane::handle::WorkerHandle;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long the control thread may take. It waits for nobody.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);

#[derive(Clone)]
pub struct Link {
    control: ControlHandle<Control>,
    worker: WorkerHandle,
}

/// By which an answer is given; may be dropped instead.
pub type Reply<T> = oneshot::Sender<T>;

impl Link {
    pub(crate) fn new(control: ControlHandle<Control>, worker: WorkerHandle) -> Self {
        Self { control, worker }
    }

    /// Whether the worker executes a command within this time.
    pub async fn worker_turns_within(&self, time_max: Duration) -> bool {
        let (reply, answer) = oneshot::channel();
        self.worker.send(Probe { answer: reply });
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
        self.control.send(Message::Question(Box::new(move |control| question(control, reply))));
        match tokio::time::timeout(time_max, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(Failure::internal("the router ends")),
            Err(_) => Err(Failure::internal("the router's control thread does not answer")),
        }
    }
}
