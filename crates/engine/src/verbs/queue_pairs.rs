//! Verbs of queue pairs: create, modify, query, destroy (IBTA 11.2.5).
use crate::keys::NOWHERE;
use crate::limits::PORT;
use crate::objects::GidTable;
use crate::qp::{Addresses, Claim, Drain, QueuePair, SendPhase, Teardown};
use crate::schedule::Scheduler;
use crate::verbs::objects::check_unicast;
use crate::xrc::Target;
use crate::{
    Engine, Environment, EventTarget, Progress, QpId, QpInit, ReceiveQueueId, Refusal, SessionId, Violation,
    ViolationKind, grant_qp_capabilities, modify_is_allowed,
};
use alloc::boxed::Box;
use freeflow_verbs::{
    AsyncEventKind, Instant, Psn, QpAttributeMask, QpAttributes, QpCapabilities, QpState, QpType, Qpn,
    READ_ATOMIC_DEPTH_MAX, VerbsError,
};

use QpAttributeMask as M;

const TIMEOUT_MAX: u8 = 31;

impl Engine {
    /// A change of a QP that was refused: whether for the address that it was to speak from.
    #[cold]
    pub(crate) fn note_wrong_source<E: Environment>(
        &self,
        env: &mut E,
        id: QpId,
        attributes: &QpAttributes,
        mask: QpAttributeMask,
    ) {
        let qp = self.qp(id);
        let Some(route) = attributes.address.grh.filter(|_| mask.contains(QpAttributeMask::AV)) else { return };
        if !self.completer().gid_table(qp.vnic).has(route.sgid_index) {
            let (kind, number) = (ViolationKind::SourceAddress, route.sgid_index.into());
            let (network, from) = (qp.network, qp.addresses.first);
            env.report_violation(&Violation { kind, network, from, to: route.dgid, number, owner: None });
        }
    }

    /// Checks capabilities (EINVAL above the device's limits) and gives those granted.
    ///
    /// # Errors
    /// InvalidArgument: capabilities above a limit, or objects that its type must not have, lacks,
    /// or has in another context. NoMemory: the vNIC, or its network, has as many as it may, or no
    /// QPN is left. NotFound: an object is not the session's.
    pub fn create_qp(&mut self, session: SessionId, init: QpInit) -> Result<(QpId, Qpn, QpCapabilities), VerbsError> {
        check_parts(&init)?;
        self.check_owners(session, &init)?;
        let capabilities = match init.qp_type {
            QpType::XrcReceive => QpCapabilities::default(),
            _ => grant_qp_capabilities(&init.capabilities, init.recv_cq.is_none() || init.srq.is_some())?,
        };
        let domain = init.xrcd.map(|xrcd| self.requester.responder.domain_of(session, xrcd)).transpose()?;
        let vnic = self.requester.responder.session_vnic(session)?;
        self.check_qpns()?;
        self.charge(vnic, |usage| &mut usage.qps, |limits| limits.qp_count_max)?;
        let home = self.completer().vnics.get(vnic).ok_or(VerbsError::NotFound)?;
        let home = (home.network, Addresses { first: home.gid, ipv6: home.ipv6_gid });
        let qpn = self.fresh_qpn();
        let mut pair = QueuePair::new(session, vnic, home, qpn, &QpInit { capabilities, ..init });
        if let (Some(xrcd), Some(domain)) = (init.xrcd, domain) {
            pair.target = Some(Box::new(Target::new(session, xrcd, domain)));
            self.add_xrcd_child(xrcd);
        }
        let id = self.completer_mut().qps.adopt(pair);
        self.requester.responder.qpns.insert(qpn.0, id.index);
        if let Some(pd) = init.pd {
            self.add_pd_child(session, pd);
        }
        for cq in [init.send_cq, init.recv_cq].into_iter().flatten() {
            self.completer_mut().cqs.owned_mut(session, cq)?.users += 1;
        }
        if let Some(srq) = init.srq {
            self.completer_mut().srqs.owned_mut(session, srq)?.users += 1;
        }
        Ok((id, qpn, capabilities))
    }

    /// Are the objects that a QP shall stand on this session's?
    fn check_owners(&self, session: SessionId, init: &QpInit) -> Result<(), VerbsError> {
        let mut context = None;
        for cq in [init.send_cq, init.recv_cq].into_iter().flatten() {
            let found = self.completer().cqs.owned(session, cq)?.context;
            if context.is_some_and(|context| context != found) {
                return Err(VerbsError::InvalidArgument);
            }
            context = Some(found);
        }
        if let Some(pd) = init.pd {
            let pd = self.pd_of(session, pd)?;
            // A context that shares a PD has its CQs in another context.
            if context.is_some_and(|context| !pd.fits(context)) {
                return Err(VerbsError::InvalidArgument);
            }
        }
        // An SRQ for XRC serves target QPs only.
        if let Some(srq) = init.srq
            && self.completer().srqs.owned(session, srq)?.xrc.is_some()
        {
            return Err(VerbsError::InvalidArgument);
        }
        Ok(())
    }

    /// The state table of the standard with its required and optional attributes. To RESET: forgets
    /// everything, the caller resets the rings. To ERROR: flushes both queues (what is not flushed
    /// at once, in later turns of `run`).
    ///
    /// NotPermitted: policy does not let it talk to that address, or the address is of another
    /// network than the one that it is connected to on another host: its peer there would not hear
    /// of it at once.
    ///
    /// After `InFlight` the QP does no more work; asking again once its copies have completed
    /// finishes the transition.
    ///
    /// # Errors
    /// [`Refusal::Error`] with InvalidArgument: the standard has no such transition, an attribute
    /// is missing, or has a value that can't be. With NotFound: not the session's QP.
    pub fn modify_qp<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        session: SessionId,
        qp: QpId,
        attributes: &QpAttributes,
        mask: QpAttributeMask,
    ) -> Result<QpState, Refusal> {
        let pair = self.completer().qps.owned(session, qp).map_err(Refusal::Error)?;
        let next = check_modify(pair, attributes, mask, self.completer().gid_table(pair.vnic)).map_err(|error| {
            self.note_wrong_source(env, qp, attributes, mask);
            Refusal::Error(error)
        })?;
        let connects = mask.contains(M::AV) && !matches!(next, QpState::Reset | QpState::Error);
        if connects {
            let reached = self.may_connect(env, qp, attributes).ok_or(Refusal::Error(VerbsError::NotPermitted))?;
            let pair = self.qp_mut(qp);
            if pair.wire.is_some() && pair.reached != reached {
                return Err(Refusal::Error(VerbsError::NotPermitted));
            }
            pair.reached = reached;
        }
        match next {
            QpState::Reset => self.modify_to_reset(env, now, qp)?,
            QpState::Error => self.modify_to_error(env, now, qp)?,
            _ => self.modify_live(env, qp, next, attributes, mask),
        }
        Ok(next)
    }

    fn modify_to_reset<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Result<(), Refusal> {
        self.requester.responder.end_wait(env, id);
        let qp = self.qp_mut(id);
        if qp.has_in_flight() {
            self.stop_for(env, id, Teardown::Reset);
            return Err(Refusal::InFlight);
        }
        self.completer_mut().return_receive(env, now, id, None);
        self.unlink(env, id);
        self.completer_mut().set_wanted(env, ReceiveQueueId::Qp(id), false);
        let qp = self.qp_mut(id);
        let capabilities = qp.attributes.capabilities;
        qp.attributes = QpAttributes { capabilities, ..QpAttributes::default() };
        qp.reached = qp.network;
        qp.teardown = Teardown::None;
        qp.receive.established = false;
        qp.receive.last_wqe_raised = false;
        Ok(())
    }

    /// It does no more work, and waits for its operations in flight.
    fn stop_for<E: Environment>(&mut self, env: &mut E, id: QpId, teardown: Teardown) {
        self.qp_mut(id).teardown = teardown;
        let completer = self.completer_mut();
        completer.withdraw_carried(env, id);
        completer.timers.cancel(id);
        completer.sync_host(id);
    }

    fn modify_to_error<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Result<(), Refusal> {
        self.completer_mut().enter_error(env, id);
        let progress = self.completer_mut().flush(env, now, id);
        if progress == Progress::More {
            self.push_ready(id);
        }
        if self.qp(id).has_in_flight() { Err(Refusal::InFlight) } else { Ok(()) }
    }

    fn modify_live<E: Environment>(
        &mut self,
        env: &mut E,
        id: QpId,
        next: QpState,
        attributes: &QpAttributes,
        mask: QpAttributeMask,
    ) {
        let qp = self.qp_mut(id);
        apply(&mut qp.attributes, attributes, mask);
        let before = qp.state();
        qp.attributes.state = next;
        if mask.contains(M::AV) {
            self.requester.responder.doubt_wire(id);
            self.requester.responder.look_for_wire(env, id);
        }
        if mask.contains(M::SQ_PSN) {
            self.requester.responder.begin_wire(id);
        }
        let qp = self.qp_mut(id);
        match (before, next) {
            (QpState::ReadyToSend, QpState::SqDrain) => {
                let notify = mask.contains(M::EN_SQD_ASYNC_NOTIFY) && attributes.enable_sqd_async_notify;
                self.begin_drain(env, id, notify);
            }
            (_, QpState::ReadyToReceive) => {
                // A host that asked too early got the answer that nobody is there.
                env.identity_changed(qp.qpn, None);
                self.wake_peer(id);
            }
            // Its peer may not be whom it was connected to.
            (_, QpState::SqDrain) if mask.contains(M::AV) => env.identity_changed(qp.qpn, None),
            (_, QpState::ReadyToSend) => {
                qp.send.drain = Drain::None;
                self.push_ready(id);
            }
            _ => {}
        }
    }

    fn begin_drain<E: Environment>(&mut self, env: &mut E, id: QpId, notify: bool) {
        let qp = self.qp_mut(id);
        let under_way = qp.wire.as_ref().is_some_and(|wire| !wire.is_idle());
        if qp.send.phase != SendPhase::Idle || under_way {
            qp.send.drain = Drain::Draining { notify };
        } else if notify {
            env.raise(AsyncEventKind::SqDrained, EventTarget::Qp(id));
        }
    }

    /// A peer that sent too early need not wait for its timeout.
    fn wake_peer(&mut self, id: QpId) {
        let Some(index) = self.requester.responder.qpns.get(self.qp(id).attributes.dest_qpn) else { return };
        let Some((peer, pair)) = self.completer().qps.at(index) else { return };
        if pair.is_connected_service()
            && pair.send.phase == SendPhase::Waiting
            && self.requester.responder.find_responder(peer) == Some(id)
        {
            self.completer_mut().wake(peer);
        }
    }

    /// Its attributes, all of them.
    ///
    /// # Errors
    /// NotFound: not the session's QP.
    pub fn query_qp(&self, session: SessionId, qp: QpId) -> Result<QpAttributes, VerbsError> {
        let qp = self.completer().qps.owned(session, qp)?;
        Ok(QpAttributes { current_state: qp.state(), sq_draining: qp.send.drain != Drain::None, ..qp.attributes })
    }

    /// `InFlight` while copies use it: it does no more work then, and asking again destroys it once
    /// they have completed. A target QP that others have open stays for them. Busy while it is
    /// attached to a multicast group.
    ///
    /// # Errors
    /// [`Refusal::Error`] with Busy, or NotFound: not the session's QP.
    pub fn destroy_qp<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        session: SessionId,
        qp: QpId,
    ) -> Result<(), Refusal> {
        self.completer().qps.owned(session, qp).map_err(Refusal::Error)?;
        if self.requester.groups.is_attached(qp) {
            return Err(Refusal::Error(VerbsError::Busy));
        }
        if self.leave_target(qp, session) {
            return Ok(());
        }
        self.requester.responder.end_wait(env, qp);
        let pair = self.qp_mut(qp);
        if pair.has_in_flight() {
            self.stop_for(env, qp, Teardown::Destroy);
            return Err(Refusal::InFlight);
        }
        self.remove_qp(env, now, qp, None);
        Ok(())
    }

    /// `ending`: its session, if that ends.
    pub(crate) fn remove_qp<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, ending: Option<SessionId>) {
        self.completer().withdraw_carried(env, id);
        self.completer_mut().return_receive(env, now, id, ending);
        self.unlink(env, id);
        self.completer_mut().unbind_all_of(id);
        self.detach_all(id);
        self.requester.responder.schedule.forget_qp(now, id);
        self.requester.responder.wake_eligible();
        let Some(gone) = self.completer_mut().qps.disown(id) else { return };
        assert!(ending.is_some() || !gone.has_in_flight(), "no operation uses a QP that is destroyed");
        assert_eq!(gone.windows, NOWHERE, "windows of a QP that goes are free");
        self.requester.responder.qpns.remove(gone.qpn.0);
        self.quarantine.give_back(now, gone.qpn);
        // Hosts that know it must hear that its number may be another's soon.
        env.identity_changed(gone.qpn, None);
        if let Some(pd) = gone.pd {
            self.drop_pd_child(gone.session, pd);
        }
        for cq in [gone.send_cq, gone.recv_cq].into_iter().flatten() {
            if let Some(cq) = self.completer_mut().cqs.get_mut(cq) {
                cq.users -= 1;
            }
        }
        if let Some(target) = &gone.target {
            self.end_target(target);
        } else if let Some(srq) = gone.srq.and_then(|srq| self.completer_mut().srqs.get_mut(srq)) {
            srq.users -= 1;
        }
        self.refund(gone.vnic, |usage| &mut usage.qps);
    }

    /// Forgets all that the QP has in hand, and lets go of others.
    fn unlink<E: Environment>(&mut self, env: &mut E, id: QpId) {
        self.requester.responder.cut_wire(env, id);
        self.completer_mut().drop_request(env, id);
        let qp = self.qp_mut(id);
        qp.send.drain = Drain::None;
        qp.receive.claim = Claim::None;
        qp.receive.datagrams.clear();
        qp.receive.arriving = None;
        self.completer_mut().let_go(id, usize::MAX);
        self.completer_mut().wake_waiters(id);
    }
}

/// Checks the objects that each type of QP must and must not have.
fn check_parts(init: &QpInit) -> Result<(), VerbsError> {
    let (pd, send, recv) = (init.pd.is_some(), init.send_cq.is_some(), init.recv_cq.is_some());
    let (srq, xrcd) = (init.srq.is_some(), init.xrcd.is_some());
    let complete = match init.qp_type {
        QpType::Rc | QpType::Uc | QpType::Ud => pd && send && recv && !xrcd,
        QpType::XrcSend => pd && send && !recv && !srq && !xrcd,
        QpType::XrcReceive => xrcd && !pd && !send && !recv && !srq,
    };
    let blocks = init.block_own_multicast && init.qp_type != QpType::Ud;
    if complete && !blocks { Ok(()) } else { Err(VerbsError::InvalidArgument) }
}

/// Checks everything before anything changes; gives the state after.
fn check_modify(
    qp: &QueuePair,
    new: &QpAttributes,
    mask: QpAttributeMask,
    table: GidTable,
) -> Result<QpState, VerbsError> {
    let now = qp.state();
    let next = if mask.contains(M::STATE) { new.state } else { now };
    let claimed = if mask.contains(M::CUR_STATE) { new.current_state } else { now };
    let begun = match qp.teardown {
        Teardown::None => true,
        Teardown::Reset => next == QpState::Reset,
        Teardown::Destroy => false,
    };
    // Until the queue is drained, SQD can only be given up (IBTA 10.3.1.5).
    let draining = qp.send.drain != Drain::None && mask.contains(M::STATE);
    let given_up = matches!(next, QpState::Error | QpState::Reset);
    if !begun || claimed != now || (draining && !given_up) || !modify_is_allowed(qp.service, now, next, mask) {
        return Err(VerbsError::InvalidArgument);
    }
    check_values(new, mask)?;
    if mask.contains(M::AV) && qp.service != QpType::Ud {
        // A connected QP has one peer.
        check_unicast(&new.address, table)?;
    }
    Ok(next)
}

/// A value that the fields of packets and of NICs are too narrow for is taken where Soft-RoCE and
/// mlx5 take it, and cut where it is used: `docs/VERBS.md` has the table.
fn check_values(new: &QpAttributes, mask: QpAttributeMask) -> Result<(), VerbsError> {
    let given = |bit, good: bool| !mask.contains(bit) || good;
    let good = given(M::PORT, new.port == PORT)
        && given(M::PKEY_INDEX, new.pkey_index == 0)
        && given(M::TIMEOUT, new.timeout <= TIMEOUT_MAX)
        && given(M::MAX_QP_RD_ATOMIC, new.max_rd_atomic <= READ_ATOMIC_DEPTH_MAX)
        && given(M::MAX_DEST_RD_ATOMIC, new.max_dest_rd_atomic <= READ_ATOMIC_DEPTH_MAX)
        // RoCE has no alternate paths.
        && given(M::ALT_PATH, false)
        && given(M::PATH_MIG_STATE, new.path_migration_state == 0);
    if !good {
        return Err(VerbsError::InvalidArgument);
    }
    Ok(())
}

fn apply(to: &mut QpAttributes, new: &QpAttributes, mask: QpAttributeMask) {
    macro_rules! take {
        ($($bit:ident $($field:ident),+;)*) => { $( if mask.contains(M::$bit) { $( to.$field = new.$field; )+ } )* };
    }
    take! {
        EN_SQD_ASYNC_NOTIFY enable_sqd_async_notify;
        ACCESS_FLAGS access;
        PKEY_INDEX pkey_index;
        PORT port;
        QKEY qkey;
        AV address;
        PATH_MTU path_mtu;
        TIMEOUT timeout;
        RETRY_CNT retry_count;
        RNR_RETRY rnr_retry;
        MAX_QP_RD_ATOMIC max_rd_atomic;
        MAX_DEST_RD_ATOMIC max_dest_rd_atomic;
        MIN_RNR_TIMER min_rnr_timer;
        PATH_MIG_STATE path_migration_state;
    }
    if mask.contains(M::DEST_QPN) {
        to.dest_qpn = new.dest_qpn & Qpn::MASK;
    }
    if mask.contains(M::RQ_PSN) {
        to.rq_psn = new.rq_psn & Psn::MASK;
    }
    if mask.contains(M::SQ_PSN) {
        to.sq_psn = new.sq_psn & Psn::MASK;
    }
}
