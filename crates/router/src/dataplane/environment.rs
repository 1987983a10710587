//! The engine's environment in the router: requests from rings, completions into rings, bytes
//! between processes.
use crate::dataplane::event_pipes::Sent;
use crate::dataplane::ports::Ports;
use crate::dataplane::siblings::shard_of;
use crate::dataplane::xrc_targets::Viewer;
use crate::peering::Mad;
use freeflow_engine::{
    AtomicOutcome, AuthorizationRequest, CarriedMessage, Carrier, CarryOutcome, CopyOutcome, CqFull, CqId, Destination,
    EventTarget, Fabric, Fetch, HostId, Memory, PacketHead, Path, PeerAnswer, Policy, QpId, Queues, ReceiveQueueId,
    Source, Span, SrqId, Token, TransmitOutcome, Violation, VnicId,
};
use freeflow_shm::{RequestConsumer, Take, monotonic_ns};
use freeflow_verbs::{
    AsyncEventKind, AtomicOperation, Completion, CompletionFlags, CompletionStatus, Gid, GlobalRoute, NetworkId, Qpn,
    ReceiveRequest, SendRequest,
};

fn fetched(take: Take) -> Fetch {
    match take {
        Take::Empty => Fetch::Empty,
        Take::Ready => Fetch::Ready,
        Take::Malformed => Fetch::Malformed,
    }
}

impl Ports {
    fn notify_viewer(&mut self, kind: AsyncEventKind, viewer: Viewer) {
        let Some(pipe) = self.contexts.get(viewer.context).map(|context| context.pipe) else { return };
        if self.pipes.send(pipe, kind as u32, viewer.cookie) == Sent::TooMuch {
            self.fail(viewer.session, "asynchronous events are not read");
        }
    }

    fn receive_queue(&mut self, queue: ReceiveQueueId) -> Option<(&mut RequestConsumer, &mut bool)> {
        match queue {
            ReceiveQueueId::Qp(id) => {
                let qp = self.qps.get_mut(id)?;
                Some((qp.receive.as_mut()?, &mut qp.receives_wanted))
            }
            ReceiveQueueId::Srq(id) => {
                let srq = self.srqs.get_mut(id)?;
                Some((&mut srq.receive, &mut srq.receives_wanted))
            }
        }
    }

    /// A RECV of an SRQ, for a message that the router delivers to `qp`.
    ///
    /// Older messages may stand in the QP's direct ring: they were acknowledged, and take RECVs when
    /// they are polled; only then is the completion of this one handed on. So as many RECVs are left
    /// to them. And while few are posted, they are waited for: what is kept back until then must not
    /// be what the program would post next.
    fn fetch_shared(&mut self, qp: QpId, srq: SrqId, into: &mut ReceiveRequest) -> Fetch {
        let older = self.ring_backlog(qp);
        let Some(srq) = self.srqs.get_mut(srq) else { return Fetch::Empty };
        if older > 0 {
            srq.receive.catch_up();
            let posted = srq.receive.pending();
            if posted <= older {
                return Fetch::Empty;
            } else if posted <= srq.receive.slot_count() / 2 {
                return Fetch::Later;
            }
        }
        let taken = fetched(srq.receive.take_receive(into));
        if taken != Fetch::Empty
            && let Some(messages) = self.qps.get_mut(qp).and_then(|qp| qp.receive.as_mut())
        {
            into.ring_position = messages.count_message();
        }
        taken
    }

    /// Messages in the direct rings to a QP that uses an SRQ, as its peer says and it says itself.
    fn ring_backlog(&self, qp: QpId) -> u32 {
        let Some(qp) = self.qps.get(qp) else { return 0 };
        let sender = qp.direct.fed_by.and_then(|sender| self.qps.get(sender));
        sender.zip(qp.receive.as_ref()).map_or(0, |(sender, receive)| sender.send.ring_backlog(receive))
    }
}

impl Queues for Ports {
    #[inline]
    fn fetch_send(&mut self, qp: QpId, into: &mut SendRequest) -> Fetch {
        let Some(entry) = self.qps.get_mut(qp) else { return Fetch::Empty };
        let taken = fetched(entry.send.take_send(entry.service, into));
        if entry.direct.is_used() {
            self.note_fetched(qp, taken);
        }
        taken
    }

    #[inline]
    fn fetch_receive(&mut self, qp: QpId, queue: ReceiveQueueId, into: &mut ReceiveRequest) -> Fetch {
        if let ReceiveQueueId::Srq(srq) = queue {
            return self.fetch_shared(qp, srq, into);
        }
        match self.receive_queue(queue) {
            Some((ring, _)) => fetched(ring.take_receive(into)),
            None => Fetch::Empty,
        }
    }

    fn receives_were_taken(&mut self, queue: ReceiveQueueId) -> bool {
        self.receive_queue(queue).is_some_and(|(ring, _)| ring.was_skipped())
    }

    fn put_back_receive(&mut self, qp: QpId, cq: Option<CqId>, ring_position: u32) -> bool {
        let receive = self.qps.get_mut(qp).and_then(|qp| qp.receive.as_mut());
        let is_put_back = receive.is_some_and(|receive| receive.put_back(ring_position));
        if is_put_back && self.qps.get(qp).is_some_and(|qp| qp.direct.datagrams.is_some()) {
            // Something in a ring may have waited for it; perhaps it is solicited.
            self.wake_receiver(qp, cq, true);
        }
        is_put_back
    }

    fn message_lost(&mut self, qp: QpId) {
        self.close_direct_ring(qp);
    }

    fn srq_pending(&mut self, srq: SrqId) -> u32 {
        let Some(srq) = self.srqs.get_mut(srq) else { return 0 };
        srq.receive.catch_up();
        srq.receive.pending()
    }

    fn want_receives(&mut self, queue: ReceiveQueueId, wanted: bool) {
        if let Some((ring, is_wanted)) = self.receive_queue(queue) {
            *is_wanted = wanted;
            ring.set_receives_wanted(wanted);
        }
    }

    fn complete(&mut self, id: CqId, completion: &Completion) -> Result<(), CqFull> {
        let now = self.now;
        let Some(cq) = self.cqs.get_mut(id) else { return Ok(()) };
        let mut completion = *completion;
        if cq.timestamps {
            // A turn's time may be from before the request was posted.
            completion.timestamp_ns = monotonic_ns();
        } else if completion.timestamp_ns == 0 {
            completion.timestamp_ns = now.0;
        }
        cq.ring.publish(&completion).map_err(|_| CqFull)?;
        let (session, has_channel) = (cq.session, cq.channel.is_some());
        if has_channel {
            let solicited =
                completion.flags.contains(CompletionFlags::SOLICITED) || completion.status != CompletionStatus::Success;
            self.note_completion(id, solicited);
        }
        self.note_busy(session);
        self.note_completed(session);
        Ok(())
    }

    fn raise(&mut self, kind: AsyncEventKind, about: EventTarget) {
        let found = match about {
            EventTarget::Cq(id) => self.cqs.get(id).map(|cq| (cq.session, cq.context, cq.cookie)),
            EventTarget::Qp(id) => self.qps.get(id).map(|qp| (qp.session, qp.context, qp.cookie)),
            EventTarget::Srq(id) => self.srqs.get(id).map(|srq| (srq.session, srq.context, srq.cookie)),
        };
        if let Some((session, context, cookie)) = found {
            return self.notify_viewer(kind, Viewer { session, context, cookie });
        }
        let EventTarget::Qp(id) = about else { return };
        for at in 0..self.targets.viewers(id).len() {
            self.notify_viewer(kind, self.targets.viewers(id)[at]);
        }
    }
}

impl Memory for Ports {
    #[inline]
    fn copy(&mut self, token: Token, from: Source<'_>, to: &[Span], last: bool) -> CopyOutcome {
        self.start_copy(token, from, to, last)
    }

    fn atomic(&mut self, token: Token, at: Span, operation: AtomicOperation) -> AtomicOutcome {
        self.start_atomic(token, at, operation)
    }

    fn revoke_direct(&mut self, qp: QpId) {
        self.close_direct(qp);
        self.expel(qp);
    }
}

impl Fabric for Ports {
    fn path(&mut self, vnic: VnicId, to: NetworkId, route: &GlobalRoute) -> Path {
        self.find_path(vnic, to, route)
    }

    fn peer(&mut self, host: HostId, qpn: Qpn) -> PeerAnswer {
        self.fabric.peer(self.now, host, qpn)
    }

    #[inline]
    fn transmit(
        &mut self,
        token: Token,
        to: &Destination,
        packets: &[PacketHead],
        payload: Source<'_>,
    ) -> TransmitOutcome {
        self.start_transmit(token, to, packets, payload)
    }

    #[inline]
    fn transmit_records(&mut self, to: &Destination, head: &[u8], payload: Source<'_>) -> TransmitOutcome {
        self.start_records(to, head, payload)
    }

    fn end_references(&mut self) {
        self.fabric.end_references();
    }

    fn identity_changed(&mut self, qpn: Qpn, peer: Option<HostId>) {
        self.fabric.note_changed(qpn, peer);
    }

    fn notify_disconnected(&mut self, qpn: Qpn, host: HostId, peer: Qpn) {
        self.fabric.notify_disconnected(host, peer, qpn);
    }

    fn take_management(&mut self, from: HostId, mad: &Mad) -> bool {
        self.fabric.take_management(from, mad)
    }

    fn group_hosts(&mut self, network: NetworkId, group: Gid, into: &mut Vec<(Destination, Qpn)>) {
        self.fabric.group_hosts(network, group, into);
    }
}

/// The router has no carrier besides the wire, and offers none to any QP.
impl Carrier for Ports {
    fn carry(&mut self, _token: Token, _message: &CarriedMessage<'_>, _local: Source<'_>) -> CarryOutcome {
        CarryOutcome::Declined
    }

    fn withdraw(&mut self, _qp: QpId) {}
}

impl Policy for Ports {
    #[inline]
    fn authorize(&mut self, request: &AuthorizationRequest) -> bool {
        self.access.authorize(request)
    }

    fn network_at(&mut self, network: NetworkId, gid: Gid) -> NetworkId {
        self.access.network_at(network, gid)
    }

    fn report_violation(&mut self, violation: &Violation) {
        // A QPN that nobody has here may be one of another shard's.
        let is_passed_on = self.fabric.siblings.is_some() && {
            let at = (self.access.network_at(violation.network, violation.to), violation.to);
            let is_here = self.fabric.routes.get(&at).is_none_or(|&host| shard_of(host).is_some());
            is_here && self.fabric.siblings.as_mut().is_some_and(|siblings| siblings.ask_whose_qpn(violation))
        };
        if !is_passed_on {
            self.access.note_violation(violation);
        }
    }

    fn report_unknown_key(&mut self, own: NetworkId, attempt: &Violation) {
        if let Some(siblings) = &mut self.fabric.siblings {
            siblings.ask_whose_key(own, attempt);
        }
    }
}
