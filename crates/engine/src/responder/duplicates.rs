//! Requests that come a second time (IBTA 9.7.5.1.3 … 9.7.5.1.5).
//!
//! SEND and WRITE are acknowledged again, FLUSH and ATOMIC WRITE too: a PSN behind the expected one
//! is that of a request which was executed, and their answer says no more than that. READ is
//! executed again, from memory as it is now, from whichever of its packets the requester asks for.
//! An atomic gets the value that it found the first time.
//!
//! Invariant: nothing but a READ is executed twice; and a READ only within the range that was
//! admitted, under its key.
use crate::responder::Responder;
use crate::transport::answers::{Answer, Body};
use crate::transport::packets::Packet;
use crate::transport::replay::Outcome;
use crate::{Environment, QpId};
use freeflow_wire::{MASK_24, Operation, psn_add};

impl Responder {
    /// A request with a PSN behind the expected one.
    pub(crate) fn handle_duplicate<E: Environment>(&mut self, env: &mut E, id: QpId, packet: &Packet<'_>) {
        self.completer.tally(id, |counters| counters.duplicate_requests += 1);
        let Some((request, body)) = self.repeat(id, packet) else { return };
        match body {
            None => self.owe_ack(id, psn_add(self.wire(id).responder.expected_psn, MASK_24), false),
            Some(body) => {
                let answer = Answer { request, psn: packet.header.psn, is_counted: false, body };
                if self.wire_mut(id).responder.answers.replay(answer) {
                    self.answer_now(env, id);
                }
            }
        }
    }

    /// The request's first PSN, and what is answered: without a body, an ACK. `None`: nothing.
    fn repeat(&self, id: QpId, packet: &Packet<'_>) -> Option<(u32, Option<Body>)> {
        let header = packet.header;
        let found = || self.wire(id).responder.replays.find(header.psn);
        let (request, body) = match header.opcode.operation() {
            Operation::ReadRequest => {
                let replay = found()?;
                let mtu = self.response_bytes(id, header)?;
                let reading = replay.read_again(header.psn, &header.reth, mtu, header.frame.is_some())?;
                (replay.psn, Some(Body::Read(reading)))
            }
            Operation::CompareSwap | Operation::FetchAdd => {
                let replay = found()?;
                let Outcome::Atomic { original } = replay.result else { return None };
                (replay.psn, Some(Body::Atomic { original }))
            }
            Operation::Flush => (header.psn, Some(Body::Flushed)),
            Operation::AtomicWrite => (header.psn, Some(Body::Written)),
            _ => (header.psn, None),
        };
        Some((request, body))
    }
}
