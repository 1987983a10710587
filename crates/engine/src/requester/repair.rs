//! Packets that go out again by themselves, since the peer keeps what was behind them.
use crate::requester::Requester;
use crate::transport::packets::AckPolicy;
use crate::transport::wire::WireOperation;
use crate::turn::{Budget, Turn};
use crate::{Environment, Progress, QpId, TransmitOutcome};
use freeflow_verbs::Instant;

impl Requester {
    /// Sends the next packet that is due once more (of a READ the whole piece is asked for). It counts as on the way
    /// already, for the window and for its host.
    pub(crate) fn send_repeat<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        budget: &mut Budget,
    ) -> Turn {
        let requester = self.responder.completer.sender(id);
        let Some(burst) = requester.repair.due().and_then(|psn| requester.window.plan_repeat(psn)) else {
            requester.repair.note_repeated(now);
            return Turn::Continue;
        };
        let mut acks = AckPolicy { since_bytes: 0, every_bytes: 0, asked_psn: None };
        let outcome = self.transmit_burst(env, id, &burst, &mut acks);
        if outcome == Ok(TransmitOutcome::Full) {
            return Turn::Stop(Progress::More);
        }
        self.responder.completer.sender(id).repair.note_repeated(now);
        budget.bytes = budget.bytes.saturating_sub(u64::from(burst.bytes.max(1)));
        match outcome {
            Ok(TransmitOutcome::Sent) => {
                self.count_burst(id, &burst);
                Turn::Continue
            }
            Ok(TransmitOutcome::Pending) => {
                self.responder.completer.submit_wire(id, WireOperation::Request, None);
                self.responder.completer.sender(id).fetching = Some(burst);
                self.count_burst(id, &burst);
                self.hold(id)
            }
            // Going back for it finds what is wrong, and fails the request in its turn.
            Ok(TransmitOutcome::Full | TransmitOutcome::Fault) | Err(_) => {
                self.responder.completer.go_back(id);
                Turn::Continue
            }
        }
    }
}
