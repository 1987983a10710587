//! The ways out of the server: requests to the control thread, each with its answer, and a sign of
//! life from the worker, which does not go by way of the control thread.
use super::failure::Failure;
use super::plane::{ApiCall, ApiRequest, ReplyTo};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long the control thread may take. It waits for nobody.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);

struct Ways {
    control: Box<dyn Fn(ApiRequest) + Send + Sync>,
    worker: Box<dyn Fn(oneshot::Sender<()>) + Send + Sync>,
}

#[derive(Clone)]
pub struct Link(Arc<Ways>);

impl Link {
    /// `control` passes a request on, `worker` has the worker answer in one of its turns. Neither waits.
    pub(crate) fn new(
        control: impl Fn(ApiRequest) + Send + Sync + 'static,
        worker: impl Fn(oneshot::Sender<()>) + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Ways { control: Box::new(control), worker: Box::new(worker) }))
    }

    /// Whether the worker executes a command within this time.
    pub async fn worker_turns_within(&self, time_max: Duration) -> bool {
        let (reply, answer) = oneshot::channel();
        (self.0.worker)(reply);
        matches!(tokio::time::timeout(time_max, answer).await, Ok(Ok(())))
    }

    /// Has the control thread serve a request.
    pub(crate) async fn ask<C: ApiCall>(&self, call: C) -> Result<C::Answer, Failure> {
        self.ask_within(ANSWER_TIME_MAX, call).await
    }

    pub(crate) async fn ask_within<C: ApiCall>(&self, time_max: Duration, call: C) -> Result<C::Answer, Failure> {
        let (reply, answer) = ReplyTo::pair();
        (self.0.control)(call.into_request(reply));
        match tokio::time::timeout(time_max, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(Failure::internal("the router ends")),
            Err(_) => Err(Failure::internal("the router's control thread does not answer")),
        }
    }

    /// The same, without waiting for the answer.
    pub(crate) fn tell<C: ApiCall>(&self, call: C) {
        (self.0.control)(call.into_request(ReplyTo::pair().0));
    }
}
