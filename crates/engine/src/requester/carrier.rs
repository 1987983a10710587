//! Requests that a carrier may take instead of the wire; which way is next stands in
//! `transport::carrier`.
use crate::keys::Part;
use crate::qp::SendPhase;
use crate::requester::Requester;
use crate::transport::carrier::{CarriedRequest, CarryProgress, may_be_carried};
use crate::transport::window::MESSAGES_MAX;
use crate::transport::wire::WireOperation;
use crate::turn::{Budget, Turn, local_right};
use crate::{CarriedHead, CarriedMessage, CarryOutcome, Environment, QpId, Source, SourceBody};
use freeflow_verbs::{Qpn, SendFlags, SendOpcode};

impl Requester {
    /// The request in hand was checked and may begin: it goes by the carrier, or waits until it may
    /// go its way. `None`: it goes by the wire.
    pub(crate) fn offer_to_carrier<E: Environment>(
        &mut self,
        env: &mut E,
        id: QpId,
        length: u32,
        budget: &mut Budget,
    ) -> Option<Turn> {
        let qp = self.qp(id);
        let opcode = qp.send.request.opcode;
        let most = (qp.attributes.capabilities.max_send_wr as usize).clamp(1, MESSAGES_MAX);
        let wire = self.wire(id);
        let carriage = wire.carriage.as_ref()?;
        let (has_some, has_room) = (!carriage.messages.is_empty(), carriage.messages.len() < most);
        let (is_wanted, uses_wire) = (carriage.is_wanted, !wire.requester.is_idle());
        debug_assert!(!(has_some && uses_wire), "messages are under way by the wire or by the carrier");
        if is_wanted && may_be_carried(opcode) && self.responder.gate_is_open(env, id) {
            if uses_wire || !has_room {
                return Some(self.hold(id));
            }
            match self.carry(env, id, length) {
                CarryOutcome::Taken => {
                    budget.bytes = budget.bytes.saturating_sub(u64::from(length.max(1)));
                    self.responder.completer.note_used(id, u64::from(length));
                    return Some(Turn::Continue);
                }
                CarryOutcome::Later => return Some(self.hold(id)),
                CarryOutcome::Declined => {}
            }
        }
        has_some.then(|| self.hold(id))
    }

    /// Hands the request in hand to the carrier, which has it then if it takes it.
    fn carry<E: Environment>(&mut self, env: &mut E, id: QpId, length: u32) -> CarryOutcome {
        let completer = &mut self.responder.completer;
        completer.from.clear();
        completer.to.clear();
        let token = completer.next_token();
        let qp = completer.qps.get_mut(id).expect("the requester exists");
        let request = &*qp.send.request;
        let reads = request.opcode == SendOpcode::RdmaRead;
        let spans = if reads { &mut completer.to } else { &mut completer.from };
        let part = Part { pd: qp.sender_pd(), offset: 0, bytes: u64::from(length) };
        if !request.is_inline()
            && completer.keys.gather(request.sges(), part, local_right(request.opcode), spans).is_err()
        {
            // The wire finds the same, and says so in its turn.
            return CarryOutcome::Declined;
        }
        let body = match request.is_inline() {
            true => SourceBody::Bytes(&request.inline_data[..length as usize]),
            false => SourceBody::Spans(spans),
        };
        let head = CarriedHead {
            source_qpn: qp.qpn,
            dest_qpn: Qpn(qp.attributes.dest_qpn),
            opcode: request.opcode,
            length,
            remote_address: request.remote_address,
            rkey: request.rkey,
            immediate: request.immediate,
            is_solicited: request.flags.contains(SendFlags::SOLICITED) && request.opcode.consumes_receive(),
        };
        let wire = qp.wire.as_mut().expect("the QP runs the packet transport");
        let message = CarriedMessage { qp: id, host: wire.destination.host, attributes: &qp.attributes, head };
        let outcome = env.carry(token, &message, Source { prefix: &[], body });
        if outcome == CarryOutcome::Taken {
            let progress = CarryProgress::UnderWay(token);
            let request = wire.requester.window.swap(&mut qp.send.request);
            let carriage = wire.carriage.as_mut().expect("the QP has a carrier");
            carriage.messages.push_back(CarriedRequest { request, length, progress });
            qp.send.phase = SendPhase::Idle;
            completer.submit_wire(id, WireOperation::Carried, None);
        }
        outcome
    }

    /// The oldest message that the carrier gave back goes by the wire, or waits until it may.
    pub(crate) fn take_returned(&mut self, id: QpId) -> Option<Turn> {
        let qp = self.responder.completer.qps.get_mut(id).expect("the requester exists");
        let wire = qp.wire.as_mut().expect("the QP runs the packet transport");
        let (messages, window) = (&mut wire.carriage.as_mut()?.messages, &mut wire.requester.window);
        let message = messages.front()?;
        let fenced = message.request.flags.contains(SendFlags::FENCE) && window.answers_due() > 0;
        if fenced || !window.has_room(message.request.opcode, message.length, MESSAGES_MAX) {
            return Some(self.hold(id));
        }
        let mut message = messages.pop_front()?;
        window.enlist(&mut message.request, message.length);
        window.recycle(message.request);
        None
    }
}
