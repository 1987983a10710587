//! Responder of messages that a carrier brings: the checks are those of any message
//! ([`Responder::admit`]), the carrier moves the bytes, and the RECV completes when they are there.
//!
//! Invariant: a QP has one message landing at most, and acts on no packet meanwhile; so RECVs are
//! taken in the order in which messages arrive, whichever way they come.
use crate::arrival::{Arrival, Nak, Received, Rejection, remote_right};
use crate::fault::Fault;
use crate::in_flight::{InFlightId, InFlightKind};
use crate::keys::Part;
use crate::qp::Claim;
use crate::responder::Responder;
use crate::transport::carrier::may_be_carried;
use crate::transport::wire::WireOperation;
use crate::{Admission, Carried, CarriedHead, CarryFailure, Environment, HostId, MemorySide, QpId, Span, Syndrome};
use alloc::vec::Vec;
use freeflow_verbs::{Access, CompletionStatus, Instant, MESSAGE_BYTES_MAX, QpType, SendOpcode};

impl Responder {
    /// Whether a message may be executed; appends the memory that it is about.
    pub(crate) fn admit_carried<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        from: HostId,
        head: &CarriedHead,
        spans: &mut Vec<Span>,
    ) -> Admission {
        // As a lost packet: the requester tries it by the wire, for as long as its attributes say.
        let Some(id) = self.find_carried(env, from, head) else { return Admission::Answered(Carried::Returned) };
        let wire = self.wire(id);
        if wire.writing || wire.responder.message.is_some() {
            return Admission::Busy;
        }
        match self.reach_carried(env, now, id, head) {
            Ok(()) => {}
            Err(Rejection::Nak(nak)) => return Admission::Answered(Carried::Failed(nak.failure())),
            Err(Rejection::NotReady { queue, delay }) => {
                self.vnic_of(id).counters.receives_missing += 1;
                self.let_queue_rest(env, queue);
                return Admission::NotReady(delay);
            }
            Err(Rejection::Busy | Rejection::Postponed | Rejection::Late | Rejection::Dropped) => {
                return Admission::Busy;
            }
        }
        let touched = if head.opcode == SendOpcode::RdmaRead { &self.completer.from } else { &self.completer.to };
        spans.extend_from_slice(touched);
        let token = self.completer.next_token();
        let rkey = (!head.opcode.is_send() && head.length > 0).then_some(head.rkey);
        self.completer.submit_wire(id, WireOperation::Landing, rkey);
        self.wire_mut(id).carriage.get_or_insert_default().landing = Some(*head);
        Admission::Admitted(token)
    }

    /// The QP that listens to the sender of a message (as `Engine::may_act` for packets).
    fn find_carried<E: Environment>(&mut self, env: &mut E, from: HostId, head: &CarriedHead) -> Option<QpId> {
        let Some((id, qp)) = self.qpns.get(head.dest_qpn.0).and_then(|index| self.completer.qps.at(index)) else {
            self.drops.unknown_qpn += 1;
            return None;
        };
        let (is_rc, receives) = (qp.service == QpType::Rc, qp.receives());
        let is_its_peer = qp.attributes.dest_qpn == head.source_qpn.0;
        if !is_rc {
            self.drops.wrong_service += 1;
        } else if !receives {
            self.drops.wrong_state += 1;
        } else if !is_its_peer || !self.look_for_wire(env, id) || self.wire(id).destination.host != from {
            self.drops.wrong_source += 1;
        } else {
            return Some(id);
        }
        None
    }

    /// Checks a message as any other, and fills `completer.from` (READ) or `completer.to` with the
    /// memory that it reaches.
    fn reach_carried<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        head: &CarriedHead,
    ) -> Result<(), Rejection> {
        let (opcode, length, right) = (head.opcode, u64::from(head.length), remote_right(head.opcode));
        if !may_be_carried(opcode) || length > MESSAGE_BYTES_MAX {
            return Err(self.refuse(env, id, Nak::InvalidRequest(Syndrome::PacketLength)));
        }
        let (remote_address, rkey) = (head.remote_address, head.rkey);
        let arrival = Arrival {
            claim: Claim::Wire,
            responder: id,
            srqn: 0,
            opcode,
            length,
            right,
            whole: false,
            remote_address,
            rkey,
            qkey: 0,
        };
        self.admit(env, now, &arrival)?;
        self.completer.from.clear();
        self.completer.to.clear();
        if opcode.is_send() {
            let part = Part { pd: self.receive_pd(id), offset: 0, bytes: length };
            let request = &self.completer.qps.get(id).expect("the responder exists").receive.request;
            let spans = &mut self.completer.to;
            if self.completer.keys.gather(request.sges(), part, Access::LOCAL_WRITE, spans).is_err() {
                let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::ReceiveKey);
                return Err(self.receive_fault(env, now, id, fault));
            }
        } else if length > 0 {
            let reach = self.reach(id);
            let Ok(span) = self.completer.keys.resolve_remote(rkey, reach, remote_address, head.length, right) else {
                return Err(self.refuse(env, id, Nak::RemoteAccess(Syndrome::RemoteKey)));
            };
            let reads = opcode == SendOpcode::RdmaRead;
            if reads { &mut self.completer.from } else { &mut self.completer.to }.push(span);
        }
        Ok(())
    }

    /// The bytes of an admitted message are where they belong, or one side's memory is not there.
    /// Gives the QP, unless it is gone or has stopped, and what the requester is told.
    pub(crate) fn handle_landed<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        operation: InFlightId,
        result: Result<(), MemorySide>,
    ) -> (Option<QpId>, Carried) {
        let kind = self.completer.in_flight.get(operation).map(|operation| operation.kind);
        if kind != Some(InFlightKind::Wire(WireOperation::Landing)) {
            return (None, Carried::Returned);
        }
        let Some(id) = self.completer.complete_wire(operation, WireOperation::Landing) else {
            return (None, Carried::Returned);
        };
        let landing = self.wire_mut(id).carriage.as_mut().and_then(|carriage| carriage.landing.take());
        let head = landing.expect("a QP knows what lands");
        let own_side = if head.opcode == SendOpcode::RdmaRead { MemorySide::Source } else { MemorySide::Destination };
        let carried = match result {
            Ok(()) => {
                self.carried_landed(env, now, id, &head);
                Carried::Executed
            }
            Err(side) if side != own_side => {
                // The RECV is the next message's.
                let receive = &mut self.qp_mut(id).receive;
                if receive.claim == Claim::Wire {
                    receive.claim = Claim::Held;
                }
                Carried::Failed(CarryFailure::LocalMemory)
            }
            Err(_) if head.opcode.is_send() => {
                let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::RemoteMemoryGone);
                self.receive_fault(env, now, id, fault);
                Carried::Failed(CarryFailure::RemoteOperational)
            }
            Err(_) => {
                self.refuse(env, id, Nak::RemoteOperational(Syndrome::RemoteMemoryGone));
                Carried::Failed(CarryFailure::RemoteOperational)
            }
        };
        (Some(id), carried)
    }

    fn carried_landed<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, head: &CarriedHead) {
        let (opcode, bytes) = (head.opcode, u64::from(head.length));
        self.completer.count_arrived(id, opcode, bytes);
        if opcode == SendOpcode::RdmaRead {
            self.completer.note_used(id, bytes);
        }
        if opcode.consumes_receive() {
            let (argument, solicited) = (head.immediate, head.is_solicited);
            let received = Received { opcode, bytes, argument, solicited, source_qpn: None, has_ipv6_header: false };
            self.completer.complete_receive(env, id, received.completion(now));
        }
    }
}

impl Nak {
    fn failure(self) -> CarryFailure {
        match self {
            Self::InvalidRequest(_) => CarryFailure::InvalidRequest,
            Self::RemoteAccess(_) => CarryFailure::RemoteAccess,
            Self::RemoteOperational(_) => CarryFailure::RemoteOperational,
        }
    }
}
