//! The rings of posted requests and of completions, and asynchronous events.
use crate::{CqId, QpId, ReceiveQueueId, SrqId};
use freeflow_verbs::{AsyncEventKind, Completion, ReceiveRequest, SendRequest};

/// Result of [`Queues::fetch_send`] and [`Queues::fetch_receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// Nothing is posted.
    Empty,
    /// Receives only: one is posted, but messages that came before another way have their turn.
    Later,
    /// One request was copied out, checked and consumed.
    Ready,
    /// The descriptor made no sense (hostile or broken library). `ring_position` and
    /// `work_request_id` of the request are filled as far as they could be read; it was consumed.
    Malformed,
}

/// The CQ has no room: it is in error from now on (IBTA 11.6.3.2, CQ error).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqFull;

/// Object of an asynchronous event, by the engine's own name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventTarget {
    /// A completion queue.
    Cq(CqId),
    /// A queue pair.
    Qp(QpId),
    /// A shared receive queue.
    Srq(SrqId),
}

/// The rings that a process shares with the router.
pub trait Queues {
    /// Takes the next posted send of `qp`, if there is one.
    fn fetch_send(&mut self, qp: QpId, into: &mut SendRequest) -> Fetch;

    /// Takes the next posted receive of a QP's own queue or of an SRQ, for a message to `qp`.
    fn fetch_receive(&mut self, qp: QpId, queue: ReceiveQueueId, into: &mut ReceiveRequest) -> Fetch;

    /// Whether RECVs of this queue were taken past the engine since the last call.
    fn receives_were_taken(&mut self, _queue: ReceiveQueueId) -> bool {
        false
    }

    /// A RECV that was fetched from a UD QP's own queue was not used, and nothing writes to its memory: it is fetched
    /// again. False: the engine keeps it for the next datagram. (Others may take RECVs of that queue, and then must not
    /// wait for one. Who waited hears of it; `_cq` is where the RECV would have completed.)
    fn put_back_receive(&mut self, _qp: QpId, _cq: Option<CqId>, _ring_position: u32) -> bool {
        false
    }

    /// A message of a UC QP is lost that would have taken a RECV of the peer: the sender's number of
    /// messages is no number of RECVs any more.
    fn message_lost(&mut self, _qp: QpId) {}

    /// Requests now posted to `srq` and not taken (for its limit event).
    fn srq_pending(&mut self, srq: SrqId) -> u32;

    /// Asks (or no longer asks) that a post to this queue ring the doorbell: senders wait for a
    /// RECV, or the QP is in error and posted requests are to be flushed. After `wanted == true`
    /// returns, every later post rings, and an earlier one is visible to `fetch_receive`.
    fn want_receives(&mut self, queue: ReceiveQueueId, wanted: bool);

    /// Puts a completion in the ring of `cq` and sees to its notification.
    ///
    /// # Errors
    /// [`CqFull`]: the ring has no room.
    fn complete(&mut self, cq: CqId, completion: &Completion) -> Result<(), CqFull>;

    /// Raises an asynchronous event in the context of the object it is about.
    fn raise(&mut self, kind: AsyncEventKind, about: EventTarget);
}
