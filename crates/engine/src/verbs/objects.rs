//! Verbs of the control path but those of QPs: vNICs, sessions, contexts, CQs, SRQs, AHs (PDs:
//! `protection`; MRs: `regions`; windows: `windows`).
//!
//! Invariant: an object goes only when nothing stands on it (`children`, `users`, `in_flight`); a
//! limit of the vNIC is charged when an object is made and given back when it goes.
use crate::limits::{PORT, check_cqe};
use crate::objects::{AddressHandle, Context, Cq, CqState, GidTable, Session, Srq, Vnic};
use crate::schedule::Scheduler;
use crate::{
    AhId, ContextId, CqId, Engine, Environment, PdId, Refusal, SessionId, SessionObjects, SrqId, Usage, VnicCounters,
    VnicId, XrcdId, grant_srq_attributes,
};
use alloc::vec::Vec;
use freeflow_verbs::{
    AddressHandleAttributes, Gid, GlobalRoute, Instant, NetworkId, SrqAttributes, VerbsError, VnicLimits,
};

impl Engine {
    // ---- vNICs and sessions (router only)

    /// A vNIC with one address, GID 0.
    ///
    /// # Errors
    /// InvalidArgument: the network has this address already, or it is none that a vNIC can have.
    pub fn create_vnic(&mut self, network: NetworkId, gid: Gid, limits: VnicLimits) -> Result<VnicId, VerbsError> {
        self.create_dual_vnic(network, (gid, None), limits)
    }

    /// A vNIC with an IPv4 address, GID 0, and maybe an IPv6 one, GID 2.
    ///
    /// # Errors
    /// InvalidArgument: the network has one of them already, or it is none that a vNIC can have.
    pub fn create_dual_vnic(
        &mut self,
        network: NetworkId,
        (gid, ipv6_gid): (Gid, Option<Gid>),
        limits: VnicLimits,
    ) -> Result<VnicId, VerbsError> {
        let is_good = |gid: Gid| {
            let taken = self.completer().vnics.iter().any(|(_, vnic)| vnic.network == network && vnic.has(gid));
            !taken && !gid.is_zero() && !gid.is_multicast()
        };
        if !is_good(gid) || ipv6_gid.is_some_and(|ipv6| !is_good(ipv6) || ipv6.to_ipv4().is_some()) {
            return Err(VerbsError::InvalidArgument);
        }
        let (usage, counters) = (Usage::default(), VnicCounters::default());
        self.networks.enter(network);
        let (refused, refused_by_network) = (usage, usage);
        let vnic = Vnic {
            network,
            gid,
            ipv6_gid,
            external_gid: None,
            limits,
            usage,
            refused,
            refused_by_network,
            counters,
            held_bytes: 0,
        };
        Ok(self.completer_mut().vnics.insert(vnic))
    }

    /// Its network, its address there, and its IPv6 address.
    pub fn vnic_addresses(&self, vnic: VnicId) -> Option<(NetworkId, Gid, Option<Gid>)> {
        self.completer().vnics.get(vnic).map(|vnic| (vnic.network, vnic.gid, vnic.ipv6_gid))
    }

    /// Destroys a vNIC whose sessions are gone.
    ///
    /// # Errors
    /// Busy: it has sessions. NotFound: no such vNIC.
    pub fn destroy_vnic(&mut self, vnic: VnicId) -> Result<(), VerbsError> {
        let usage = self.completer().vnics.get(vnic).ok_or(VerbsError::NotFound)?.usage;
        if usage.sessions > 0 {
            return Err(VerbsError::Busy);
        }
        debug_assert_eq!(usage, Usage::default(), "what was charged was given back");
        self.requester.responder.schedule.forget_vnic(vnic);
        if let Some(gone) = self.completer_mut().vnics.remove(vnic) {
            self.networks.leave(gone.network);
        }
        Ok(())
    }

    /// The address by which the vNIC may talk to machines without FreeFlow, its GID 1. Existing
    /// connections keep what they have; the environment's `path` says what new ones get.
    ///
    /// # Errors
    /// NotFound: no such vNIC.
    pub fn set_external_gid(&mut self, vnic: VnicId, gid: Option<Gid>) -> Result<(), VerbsError> {
        self.completer_mut().vnics.get_mut(vnic).ok_or(VerbsError::NotFound)?.external_gid = gid;
        Ok(())
    }

    /// A session of a process.
    ///
    /// # Errors
    /// NoMemory: the vNIC has as many as it may. NotFound: no such vNIC.
    pub fn create_session(&mut self, vnic: VnicId) -> Result<SessionId, VerbsError> {
        self.charge(vnic, |usage| &mut usage.sessions, |limits| limits.session_count_max)?;
        Ok(self.requester.responder.sessions.insert(Session { vnic }))
    }

    /// Destroys everything of a process at once (it died or was cut off). Peers see what a vanished
    /// NIC shows: their requests run into retries. Pending copies between it and others are still
    /// to be brought in: until then their requests wait, and their memory stays registered.
    ///
    /// `want_receives` may still be called for queues of this session while this runs, not after.
    pub fn destroy_session<E: Environment>(&mut self, env: &mut E, now: Instant, session: SessionId) {
        let Some(vnic) = self.requester.responder.sessions.get(session).map(|session| session.vnic) else { return };
        for qp in self.completer().qps.all_of(session) {
            while self.leave_target(qp, session) {}
        }
        self.completer_mut().leave_in_flight(session);
        for qp in self.completer().qps.all_of(session) {
            self.remove_qp(env, now, qp, Some(session));
        }
        for srq in self.completer().srqs.all_of(session) {
            self.remove_srq(srq);
        }
        for xrcd in self.requester.responder.xrc.xrcds.all_of(session) {
            self.remove_xrcd(xrcd);
        }
        for ah in self.completer().ahs.all_of(session) {
            self.remove_ah(ah);
        }
        for mw in self.completer().keys.windows.all_of(session) {
            self.remove_mw(mw);
        }
        for mr in self.completer().keys.regions.all_of(session) {
            self.remove_mr(mr);
        }
        for cq in self.completer().cqs.all_of(session) {
            self.remove_cq(cq);
        }
        self.leave_pds(session);
        for context in self.contexts.all_of(session) {
            self.contexts.disown(context);
            self.refund(vnic, |usage| &mut usage.contexts);
        }
        self.requester.responder.sessions.remove(session);
        self.refund(vnic, |usage| &mut usage.sessions);
    }

    /// Objects for which the router keeps rings, before [`Engine::destroy_session`].
    pub fn objects_of(&self, session: SessionId) -> SessionObjects {
        SessionObjects {
            contexts: self.contexts.all_of(session),
            cqs: self.completer().cqs.all_of(session),
            srqs: self.completer().srqs.all_of(session),
            qps: self.completer().qps.all_of(session),
            xrcds: self.requester.responder.xrc.xrcds.all_of(session),
        }
    }

    /// Objects that the vNIC has. `None`: no such vNIC.
    pub fn vnic_usage(&self, vnic: VnicId) -> Option<Usage> {
        self.completer().vnics.get(vnic).map(|vnic| vnic.usage)
    }

    /// Counts of the vNIC. `None`: no such vNIC.
    pub fn vnic_counters(&self, vnic: VnicId) -> Option<VnicCounters> {
        self.completer().vnics.get(vnic).map(|vnic| vnic.counters)
    }

    /// Of all vNICs together.
    pub fn usage(&self) -> Usage {
        self.completer().vnics.iter().fold(Usage::default(), |sum, (_, vnic)| sum.plus(&vnic.usage))
    }

    // ---- contexts

    /// A device context (`ibv_open_device`).
    ///
    /// # Errors
    /// NoMemory: the vNIC has as many as it may. NotFound: no such session.
    pub fn open_context(&mut self, session: SessionId) -> Result<ContextId, VerbsError> {
        let vnic = self.requester.responder.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.contexts, |limits| limits.context_count_max)?;
        Ok(self.contexts.adopt(Context { session, children: 0 }))
    }

    /// Closes a context without objects.
    ///
    /// # Errors
    /// Busy: it has objects. NotFound: not the session's context.
    pub fn close_context(&mut self, session: SessionId, context: ContextId) -> Result<(), VerbsError> {
        if self.contexts.owned(session, context)?.children > 0 {
            return Err(VerbsError::Busy);
        }
        self.contexts.disown(context);
        let vnic = self.requester.responder.session_vnic(session)?;
        self.refund(vnic, |usage| &mut usage.contexts);
        Ok(())
    }

    // ---- completion queues

    /// A completion queue of at least `cqe` entries.
    ///
    /// # Errors
    /// InvalidArgument: no entry, or more than the device's limit. NoMemory: the vNIC, or its
    /// network, has as many as it may. NotFound: not the session's context.
    pub fn create_cq(&mut self, session: SessionId, context: ContextId, cqe: u32) -> Result<CqId, VerbsError> {
        check_cqe(cqe)?;
        self.contexts.owned(session, context)?;
        let vnic = self.requester.responder.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.cqs, |limits| limits.cq_count_max)?;
        self.contexts.owned_mut(session, context)?.children += 1;
        Ok(self.completer_mut().cqs.adopt(Cq { session, context, users: 0, state: CqState::Good }))
    }

    /// Destroys a CQ that no QP uses.
    ///
    /// # Errors
    /// Busy: QPs complete on it. NotFound: not the session's CQ.
    pub fn destroy_cq(&mut self, session: SessionId, cq: CqId) -> Result<(), VerbsError> {
        if self.completer().cqs.owned(session, cq)?.users > 0 {
            return Err(VerbsError::Busy);
        }
        self.remove_cq(cq);
        Ok(())
    }

    fn remove_cq(&mut self, cq: CqId) {
        let Some(gone) = self.completer_mut().cqs.disown(cq) else { return };
        assert_eq!(gone.users, 0, "a CQ outlives its QPs");
        if let Some(context) = self.contexts.get_mut(gone.context) {
            context.children -= 1;
        }
        self.refund_session(gone.session, |usage| &mut usage.cqs);
    }

    // ---- shared receive queues

    /// With `xrc`, a domain and the CQ for its RECVs, one for XRC: senders call it by the number
    /// given back (0 for one without). `cookie` is echoed in its completions.
    ///
    /// # Errors
    /// InvalidArgument: a size above its limit, or objects of different contexts. NoMemory: the
    /// vNIC has as many as it may. NotFound: an object is not the session's.
    pub fn create_srq(
        &mut self,
        session: SessionId,
        pd: PdId,
        attributes: SrqAttributes,
        xrc: Option<(XrcdId, CqId)>,
        cookie: u32,
    ) -> Result<(SrqId, u32, SrqAttributes), VerbsError> {
        self.pd_of(session, pd)?;
        let attributes = grant_srq_attributes(&attributes)?;
        let xrc = xrc.map(|parts| self.plan_xrc_queue(session, parts, cookie)).transpose()?;
        let vnic = self.requester.responder.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.srqs, |limits| limits.srq_count_max)?;
        self.add_pd_child(session, pd);
        let parts = xrc.as_ref().map(|queue| (queue.number, queue.xrcd, queue.cq));
        let srq = Srq { session, pd, attributes, xrc, users: 0, waiters: Vec::new(), wanted: false };
        let id = self.completer_mut().srqs.adopt(srq);
        if let Some(parts) = parts {
            self.enter_xrc_queue(id, parts);
        }
        Ok((id, parts.map_or(0, |(number, ..)| number), attributes))
    }

    /// Arms the limit event; it is raised at once if fewer requests are posted already. 0 disarms.
    ///
    /// # Errors
    /// InvalidArgument: the limit is above the queue's size. NotFound: not the session's SRQ.
    pub fn modify_srq<E: Environment>(
        &mut self,
        env: &mut E,
        session: SessionId,
        srq: SrqId,
        limit: u32,
    ) -> Result<(), VerbsError> {
        let attributes = &mut self.completer_mut().srqs.owned_mut(session, srq)?.attributes;
        if limit > attributes.max_wr {
            return Err(VerbsError::InvalidArgument);
        }
        attributes.limit = limit;
        self.completer_mut().check_srq_limit(env, srq);
        Ok(())
    }

    /// Size and limit of an SRQ.
    ///
    /// # Errors
    /// NotFound: not the session's SRQ.
    pub fn query_srq(&self, session: SessionId, srq: SrqId) -> Result<SrqAttributes, VerbsError> {
        Ok(self.completer().srqs.owned(session, srq)?.attributes)
    }

    /// Busy while QPs use it. Target QPs do not count: what still arrives for it is refused as an
    /// invalid request; `InFlight` until no copy goes to its RECVs.
    ///
    /// # Errors
    /// [`Refusal::Error`] with Busy, or NotFound: not the session's SRQ.
    pub fn destroy_srq(&mut self, session: SessionId, srq: SrqId) -> Result<(), Refusal> {
        let queue = self.completer().srqs.owned(session, srq).map_err(Refusal::Error)?;
        if queue.users > 0 {
            return Err(Refusal::Error(VerbsError::Busy));
        }
        if queue.xrc.as_ref().is_some_and(|queue| queue.in_flight > 0) {
            self.hide_xrc_queue(srq);
            return Err(Refusal::InFlight);
        }
        self.remove_srq(srq);
        Ok(())
    }

    fn remove_srq(&mut self, srq: SrqId) {
        let Some(gone) = self.completer_mut().srqs.disown(srq) else { return };
        assert_eq!(gone.users, 0, "an SRQ outlives its QPs");
        if let Some(queue) = &gone.xrc {
            self.leave_xrc_queue(queue);
        }
        for waiter in gone.waiters {
            if let Some(qp) = self.completer_mut().qps.get_mut(waiter) {
                qp.send.waits_for = None;
            }
        }
        self.drop_pd_child(gone.session, gone.pd);
        self.refund_session(gone.session, |usage| &mut usage.srqs);
    }

    // ---- address handles

    /// An address handle; [`freeflow_verbs::SendRequest::address_handle`] names it by its index. The address may be a
    /// multicast group's.
    ///
    /// # Errors
    /// InvalidArgument: no GRH, or a GID index that the vNIC has not. NoMemory: the vNIC has as
    /// many as it may. NotFound: not the session's PD.
    pub fn create_ah(
        &mut self,
        session: SessionId,
        pd: PdId,
        attributes: &AddressHandleAttributes,
    ) -> Result<AhId, VerbsError> {
        self.pd_of(session, pd)?;
        let vnic = self.requester.responder.session_vnic(session)?;
        let route = check_address(attributes, self.completer().gid_table(vnic))?;
        self.charge(vnic, |usage| &mut usage.ahs, |limits| limits.ah_count_max)?;
        self.add_pd_child(session, pd);
        Ok(self.completer_mut().ahs.adopt(AddressHandle { session, pd, route }))
    }

    /// Requests that name it already are refused from now on.
    ///
    /// # Errors
    /// NotFound: not the session's address handle.
    pub fn destroy_ah(&mut self, session: SessionId, ah: AhId) -> Result<(), VerbsError> {
        self.completer().ahs.owned(session, ah)?;
        self.remove_ah(ah);
        Ok(())
    }

    fn remove_ah(&mut self, ah: AhId) {
        let Some(gone) = self.completer_mut().ahs.disown(ah) else { return };
        self.drop_pd_child(gone.session, gone.pd);
        self.refund_session(gone.session, |usage| &mut usage.ahs);
    }

    pub(crate) fn refund_session(&mut self, session: SessionId, count: fn(&mut Usage) -> &mut u32) {
        if let Ok(vnic) = self.requester.responder.session_vnic(session) {
            self.refund(vnic, count);
        }
    }
}

/// A RoCE address out of port 1, by a GID that the vNIC has.
pub(crate) fn check_address(attributes: &AddressHandleAttributes, table: GidTable) -> Result<GlobalRoute, VerbsError> {
    let route = attributes.grh.ok_or(VerbsError::InvalidArgument)?;
    if attributes.port != PORT || !table.leads_to(&route) || route.dgid.is_zero() {
        return Err(VerbsError::InvalidArgument);
    }
    Ok(route)
}

/// The address of one peer.
pub(crate) fn check_unicast(attributes: &AddressHandleAttributes, table: GidTable) -> Result<GlobalRoute, VerbsError> {
    let route = check_address(attributes, table)?;
    if route.dgid.is_multicast() { Err(VerbsError::InvalidArgument) } else { Ok(route) }
}
