//! State of a QP for messages that go by a carrier instead of the wire; see [`crate::Carrier`].
//! The code over it stands in `requester::carrier`, `completer::carrier` and
//! `responder::carrier`.
//!
//! | state | wanted | under way | the next request that a carrier may take |
//! |---|---|---|---|
//! | `Wire` | wire | nothing by the carrier | goes by the wire |
//! | `DrainToCarrier` | carrier | something by the wire | waits until that is acknowledged |
//! | `Carrier` | carrier | nothing by the wire | goes by the carrier |
//! | `DrainToWire` | wire | something by the carrier | waits for its results |
//!
//! A request that the carrier can't or won't take goes by the wire in any state, after the results
//! of all that the carrier has.
//!
//! Invariant: of one QP, messages are under way by the wire or by the carrier, never by both; so a
//! message is executed after all that were posted before it, whichever way they took, and the n-th
//! message takes the n-th RECV. Only messages that the carrier has returned, which are under way
//! nowhere, wait while others go by the wire: those that were posted before them.
use crate::{Carried, CarriedHead, CarryFailure, Token};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use freeflow_verbs::{SendOpcode, SendRequest};
use serde::{Deserialize, Serialize};

/// Which way the requests of a QP take; the table is above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CarrierState {
    /// By the wire.
    Wire,
    /// By the wire, until all of it is acknowledged.
    DrainToCarrier,
    /// By the carrier.
    Carrier,
    /// By the carrier, until it has brought all results.
    DrainToWire,
}

/// There for QPs that ever had a carrier, or got a message by one.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Carriage {
    pub is_wanted: bool,
    /// In posting order.
    pub messages: VecDeque<CarriedRequest>,
    /// Responder: the message whose bytes the carrier is moving.
    pub landing: Option<CarriedHead>,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct CarriedRequest {
    pub request: Box<SendRequest>,
    /// Payload in either direction, bytes.
    pub length: u32,
    pub progress: CarryProgress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CarryProgress {
    UnderWay(Token),
    Executed,
    Failed(CarryFailure),
    Returned,
}

/// Whether a carrier may be asked to take it. Atomics are the router's, which does them atomically
/// against those of local QPs; FLUSH, ATOMIC WRITE and invalidation speak of what only the peer's
/// engine knows.
pub(crate) fn may_be_carried(opcode: SendOpcode) -> bool {
    matches!(
        opcode,
        SendOpcode::Send
            | SendOpcode::SendWithImmediate
            | SendOpcode::RdmaWrite
            | SendOpcode::RdmaWriteWithImmediate
            | SendOpcode::RdmaRead
    )
}

impl Carriage {
    /// Whether messages that the carrier has given back are to go by the wire now: it has none any
    /// more.
    pub fn has_returned(&self) -> bool {
        self.messages.front().is_some_and(|message| message.progress == CarryProgress::Returned) && self.has_results()
    }

    /// Of all its messages.
    pub fn has_results(&self) -> bool {
        !self.messages.iter().any(|message| matches!(message.progress, CarryProgress::UnderWay(_)))
    }

    /// READs that a fence waits for.
    pub fn reads_due(&self) -> usize {
        self.messages.iter().filter(|message| message.request.opcode == SendOpcode::RdmaRead).count()
    }

    /// Notes a result. A message that was returned takes all later ones with it to the wire, once
    /// each has its result: the carrier promised not to have executed them, but for READs, which
    /// may be asked again.
    pub fn note(&mut self, token: Token, carried: Carried) {
        let under_way = CarryProgress::UnderWay(token);
        let Some(message) = self.messages.iter_mut().find(|message| message.progress == under_way) else { return };
        message.progress = match carried {
            Carried::Executed => CarryProgress::Executed,
            Carried::Failed(failure) => CarryProgress::Failed(failure),
            Carried::Returned => CarryProgress::Returned,
        };
        self.is_wanted &= carried != Carried::Returned;
        if !self.has_results() {
            return;
        }
        let mut broke_promise = false;
        let of_wire = self.messages.iter_mut().skip_while(|message| message.progress != CarryProgress::Returned);
        for message in of_wire {
            let was_executed = message.progress == CarryProgress::Executed;
            broke_promise |= was_executed && message.request.opcode != SendOpcode::RdmaRead;
            message.progress = CarryProgress::Returned;
        }
        let first = self.messages.iter_mut().find(|message| message.progress == CarryProgress::Returned);
        if let Some(first) = first.filter(|_| broke_promise) {
            // Neither order can be had any more.
            first.progress = CarryProgress::Failed(CarryFailure::RemoteOperational);
        }
    }
}
