//! Verbs of the control path but those of QPs: vNICs, sessions, contexts, PDs, MRs, CQs, SRQs, AHs.
//!
//! Invariant: an object goes only when nothing stands on it (`children`, `users`, `flights`); a limit of the vNIC is
//! charged when an object is made and given back when it goes.
use crate::flight::FlightId;
use crate::keys::{MemoryRegion, RegionState, check_access};
use crate::limits::{PORT, check_cqe};
use crate::objects::{AddressHandle, Context, Cq, CqState, Pd, Session, Srq, Vnic};
use crate::qp::{Claim, SendPhase};
use crate::{
    AhId, ContextId, CqId, Engine, Environment, EventTarget, MrId, MrKeys, PdId, Refusal, SessionId, SessionObjects,
    SrqId, Usage, VnicCounters, VnicId, grant_srq_attributes,
};
use alloc::vec::Vec;
use freeflow_verbs::{
    Access, AddressHandleAttributes, AsyncEventKind, Gid, GlobalRoute, Instant, NetworkId, QpState, SrqAttributes,
    VerbsError, VnicLimits,
};

impl Engine {
    // ---- vNICs and sessions (router only)

    /// InvalidArgument if the network already has this address.
    pub fn create_vnic(&mut self, network: NetworkId, gid: Gid, limits: VnicLimits) -> Result<VnicId, VerbsError> {
        let taken = self.vnics.iter().any(|(_, vnic)| vnic.network == network && vnic.gid == gid);
        if taken || gid.is_zero() || gid.is_multicast() {
            return Err(VerbsError::InvalidArgument);
        }
        let (usage, counters) = (Usage::default(), VnicCounters::default());
        Ok(self.vnics.insert(Vnic { network, gid, limits, usage, counters }))
    }

    /// Its sessions must be gone.
    pub fn destroy_vnic(&mut self, vnic: VnicId) -> Result<(), VerbsError> {
        let usage = self.vnics.get(vnic).ok_or(VerbsError::NotFound)?.usage;
        if usage.sessions > 0 {
            return Err(VerbsError::Busy);
        }
        self.vnics.remove(vnic);
        Ok(())
    }

    pub fn create_session(&mut self, vnic: VnicId) -> Result<SessionId, VerbsError> {
        self.charge(vnic, |usage| &mut usage.sessions, |limits| limits.session_count_max)?;
        Ok(self.sessions.insert(Session { vnic }))
    }

    /// Destroys everything of a process at once (it died or was cut off). Peers see what a vanished NIC shows: their
    /// requests run into retries. Pending copies that read or write its memory are forgotten: their later results are
    /// ignored by generation; requests of peers that waited for them fail or retry.
    ///
    /// The caller sees to it that a forgotten copy writes nothing more to another session's memory once this has
    /// returned (it waits until [`Engine::copies_in_flight`] is 0, or cancels what is left). `want_receives` may still be
    /// called for queues of this session while this runs, not after.
    pub fn destroy_session<E: Environment>(&mut self, env: &mut E, now: Instant, session: SessionId) {
        let _ = now;
        let Some(vnic) = self.sessions.get(session).map(|session| session.vnic) else { return };
        self.forget_flights(session);
        for qp in self.qps.all_of(session) {
            self.remove_qp(env, qp);
        }
        for srq in self.srqs.all_of(session) {
            self.remove_srq(srq);
        }
        for ah in self.ahs.all_of(session) {
            self.remove_ah(ah);
        }
        for mr in self.keys.regions.all_of(session) {
            self.remove_mr(mr);
        }
        for cq in self.cqs.all_of(session) {
            self.remove_cq(cq);
        }
        for pd in self.pds.all_of(session) {
            self.remove_pd(pd);
        }
        for context in self.contexts.all_of(session) {
            self.contexts.disown(context);
            self.refund(vnic, |usage| &mut usage.contexts);
        }
        self.sessions.remove(session);
        self.refund(vnic, |usage| &mut usage.sessions);
    }

    /// What the router keeps rings for, before [`Engine::destroy_session`].
    pub fn objects_of(&self, session: SessionId) -> SessionObjects {
        SessionObjects {
            contexts: self.contexts.all_of(session),
            cqs: self.cqs.all_of(session),
            srqs: self.srqs.all_of(session),
            qps: self.qps.all_of(session),
        }
    }

    fn forget_flights(&mut self, session: SessionId) {
        let doomed: Vec<FlightId> =
            self.flights.iter().filter(|(_, flight)| flight.touches(session)).map(|(id, _)| id).collect();
        for id in doomed {
            let Some(flight) = self.land(id) else { continue };
            let (requester, responder) = (flight.requester, flight.responder);
            self.release_claim(requester);
            let send = &mut self.qp_mut(requester).send;
            send.responder = None;
            send.phase = SendPhase::Begin;
            self.push_ready(requester);
            if let Some(responder) = responder {
                debug_assert!(self.qp(responder).receive.claim != Claim::By(requester));
                if self.qp(responder).state() == QpState::Error {
                    self.push_ready(responder);
                }
            }
        }
    }

    pub fn vnic_usage(&self, vnic: VnicId) -> Option<Usage> {
        self.vnics.get(vnic).map(|vnic| vnic.usage)
    }

    pub fn vnic_counters(&self, vnic: VnicId) -> Option<VnicCounters> {
        self.vnics.get(vnic).map(|vnic| vnic.counters)
    }

    /// Of all vNICs together.
    pub fn usage(&self) -> Usage {
        self.vnics.iter().fold(Usage::default(), |sum, (_, vnic)| sum.plus(&vnic.usage))
    }

    // ---- contexts and protection domains

    pub fn open_context(&mut self, session: SessionId) -> Result<ContextId, VerbsError> {
        let vnic = self.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.contexts, |limits| limits.context_count_max)?;
        Ok(self.contexts.adopt(Context { session, children: 0 }))
    }

    /// Busy while it has objects.
    pub fn close_context(&mut self, session: SessionId, context: ContextId) -> Result<(), VerbsError> {
        if self.contexts.owned(session, context)?.children > 0 {
            return Err(VerbsError::Busy);
        }
        self.contexts.disown(context);
        let vnic = self.session_vnic(session)?;
        self.refund(vnic, |usage| &mut usage.contexts);
        Ok(())
    }

    pub fn alloc_pd(&mut self, session: SessionId, context: ContextId) -> Result<PdId, VerbsError> {
        self.contexts.owned(session, context)?;
        let vnic = self.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.pds, |limits| limits.pd_count_max)?;
        self.contexts.owned_mut(session, context)?.children += 1;
        Ok(self.pds.adopt(Pd { session, context, children: 0 }))
    }

    /// Busy while MRs, SRQs, QPs or AHs are in it.
    pub fn dealloc_pd(&mut self, session: SessionId, pd: PdId) -> Result<(), VerbsError> {
        if self.pds.owned(session, pd)?.children > 0 {
            return Err(VerbsError::Busy);
        }
        self.remove_pd(pd);
        Ok(())
    }

    fn remove_pd(&mut self, pd: PdId) {
        let Some(gone) = self.pds.disown(pd) else { return };
        if let Some(context) = self.contexts.get_mut(gone.context) {
            context.children -= 1;
        }
        self.refund_session(gone.session, |usage| &mut usage.pds);
    }

    // ---- memory regions

    /// `address` is where the process sees the memory, `iova` how requests name it. Whether it is mapped there is the
    /// caller's check.
    pub fn register_mr(
        &mut self,
        session: SessionId,
        pd: PdId,
        address: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys, VerbsError> {
        self.pds.owned(session, pd)?;
        let access = check_access(access)?;
        // The last byte must have an address, in both spaces.
        let last = length.checked_sub(1).ok_or(VerbsError::InvalidArgument)?;
        if address.checked_add(last).is_none() || iova.checked_add(last).is_none() {
            return Err(VerbsError::InvalidArgument);
        }
        let vnic = self.session_vnic(session)?;
        let home = self.vnics.get(vnic).ok_or(VerbsError::NotFound)?;
        let total = home.usage.registered_bytes.checked_add(length);
        if total.is_none_or(|total| total > home.limits.registered_bytes_max) {
            return Err(VerbsError::NoMemory);
        }
        self.charge(vnic, |usage| &mut usage.mrs, |limits| limits.mr_count_max)?;
        if let Some(home) = self.vnics.get_mut(vnic) {
            home.usage.registered_bytes += length;
        }
        self.pds.owned_mut(session, pd)?.children += 1;
        let state = RegionState::Live;
        let region = MemoryRegion { session, pd, address, length, iova, access, key: 0, flights: 0, state };
        let (mr, key) = self.keys.register(&mut self.random, region);
        Ok(MrKeys { mr, lkey: key, rkey: key })
    }

    /// The keys are invalid as soon as this is first called; `InFlight` until no copy uses the region.
    pub fn deregister_mr(&mut self, session: SessionId, mr: MrId) -> Result<(), Refusal> {
        let flights = self.keys.regions.owned(session, mr).map_err(Refusal::Error)?.flights;
        self.keys.invalidate(mr);
        if flights > 0 {
            return Err(Refusal::InFlight);
        }
        self.remove_mr(mr);
        Ok(())
    }

    fn remove_mr(&mut self, mr: MrId) {
        let Some(gone) = self.keys.remove(mr) else { return };
        self.drop_pd_child(gone.pd);
        if let Ok(vnic) = self.session_vnic(gone.session)
            && let Some(home) = self.vnics.get_mut(vnic)
        {
            home.usage.mrs -= 1;
            home.usage.registered_bytes -= gone.length;
        }
    }

    // ---- completion queues

    pub fn create_cq(&mut self, session: SessionId, context: ContextId, cqe: u32) -> Result<CqId, VerbsError> {
        check_cqe(cqe)?;
        self.contexts.owned(session, context)?;
        let vnic = self.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.cqs, |limits| limits.cq_count_max)?;
        self.contexts.owned_mut(session, context)?.children += 1;
        Ok(self.cqs.adopt(Cq { session, context, users: 0, state: CqState::Good }))
    }

    /// Busy while QPs complete on it.
    pub fn destroy_cq(&mut self, session: SessionId, cq: CqId) -> Result<(), VerbsError> {
        if self.cqs.owned(session, cq)?.users > 0 {
            return Err(VerbsError::Busy);
        }
        self.remove_cq(cq);
        Ok(())
    }

    fn remove_cq(&mut self, cq: CqId) {
        let Some(gone) = self.cqs.disown(cq) else { return };
        if let Some(context) = self.contexts.get_mut(gone.context) {
            context.children -= 1;
        }
        self.refund_session(gone.session, |usage| &mut usage.cqs);
    }

    // ---- shared receive queues

    pub fn create_srq(
        &mut self,
        session: SessionId,
        pd: PdId,
        attributes: SrqAttributes,
    ) -> Result<(SrqId, SrqAttributes), VerbsError> {
        self.pds.owned(session, pd)?;
        let attributes = grant_srq_attributes(&attributes)?;
        let vnic = self.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.srqs, |limits| limits.srq_count_max)?;
        self.pds.owned_mut(session, pd)?.children += 1;
        let srq = Srq { session, pd, attributes, users: 0, waiters: Vec::new(), wanted: false };
        Ok((self.srqs.adopt(srq), attributes))
    }

    /// Arms the limit event; it is raised at once if fewer requests are posted already. 0 disarms.
    pub fn modify_srq<E: Environment>(
        &mut self,
        env: &mut E,
        session: SessionId,
        srq: SrqId,
        limit: u32,
    ) -> Result<(), VerbsError> {
        let attributes = &mut self.srqs.owned_mut(session, srq)?.attributes;
        if limit > attributes.max_wr {
            return Err(VerbsError::InvalidArgument);
        }
        attributes.limit = limit;
        if limit > 0 && env.srq_pending(srq) < limit {
            attributes.limit = 0;
            env.raise(AsyncEventKind::SrqLimitReached, EventTarget::Srq(srq));
        }
        Ok(())
    }

    pub fn query_srq(&self, session: SessionId, srq: SrqId) -> Result<SrqAttributes, VerbsError> {
        Ok(self.srqs.owned(session, srq)?.attributes)
    }

    /// Busy while QPs use it.
    pub fn destroy_srq(&mut self, session: SessionId, srq: SrqId) -> Result<(), VerbsError> {
        if self.srqs.owned(session, srq)?.users > 0 {
            return Err(VerbsError::Busy);
        }
        self.remove_srq(srq);
        Ok(())
    }

    fn remove_srq(&mut self, srq: SrqId) {
        let Some(gone) = self.srqs.disown(srq) else { return };
        for waiter in gone.waiters {
            if let Some(qp) = self.qps.get_mut(waiter) {
                qp.send.waits_for = None;
            }
        }
        self.drop_pd_child(gone.pd);
        self.refund_session(gone.session, |usage| &mut usage.srqs);
    }

    // ---- address handles

    /// [`freeflow_verbs::SendRequest::address_handle`] names it by its index. Multicast is NotSupported.
    pub fn create_ah(
        &mut self,
        session: SessionId,
        pd: PdId,
        attributes: &AddressHandleAttributes,
    ) -> Result<AhId, VerbsError> {
        self.pds.owned(session, pd)?;
        let route = check_address(attributes)?;
        let vnic = self.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.ahs, |limits| limits.ah_count_max)?;
        self.pds.owned_mut(session, pd)?.children += 1;
        Ok(self.ahs.adopt(AddressHandle { session, pd, route }))
    }

    pub fn destroy_ah(&mut self, session: SessionId, ah: AhId) -> Result<(), VerbsError> {
        self.ahs.owned(session, ah)?;
        self.remove_ah(ah);
        Ok(())
    }

    fn remove_ah(&mut self, ah: AhId) {
        let Some(gone) = self.ahs.disown(ah) else { return };
        self.drop_pd_child(gone.pd);
        self.refund_session(gone.session, |usage| &mut usage.ahs);
    }

    // ---- accounts

    pub(crate) fn session_vnic(&self, session: SessionId) -> Result<VnicId, VerbsError> {
        self.sessions.get(session).map(|session| session.vnic).ok_or(VerbsError::NotFound)
    }

    /// Counts one more object, or says that the vNIC has no room for it.
    pub(crate) fn charge(
        &mut self,
        vnic: VnicId,
        count: fn(&mut Usage) -> &mut u32,
        max: fn(&VnicLimits) -> u32,
    ) -> Result<(), VerbsError> {
        let vnic = self.vnics.get_mut(vnic).ok_or(VerbsError::NotFound)?;
        let count = count(&mut vnic.usage);
        if *count >= max(&vnic.limits) {
            return Err(VerbsError::NoMemory);
        }
        *count += 1;
        Ok(())
    }

    pub(crate) fn refund(&mut self, vnic: VnicId, count: fn(&mut Usage) -> &mut u32) {
        if let Some(vnic) = self.vnics.get_mut(vnic) {
            *count(&mut vnic.usage) -= 1;
        }
    }

    fn refund_session(&mut self, session: SessionId, count: fn(&mut Usage) -> &mut u32) {
        if let Ok(vnic) = self.session_vnic(session) {
            self.refund(vnic, count);
        }
    }

    pub(crate) fn drop_pd_child(&mut self, pd: PdId) {
        if let Some(pd) = self.pds.get_mut(pd) {
            pd.children -= 1;
        }
    }
}

/// A unicast RoCE address out of port 1, GID 0 (the vNIC has no other).
pub(crate) fn check_address(attributes: &AddressHandleAttributes) -> Result<GlobalRoute, VerbsError> {
    let route = attributes.grh.ok_or(VerbsError::InvalidArgument)?;
    if attributes.port != PORT || route.sgid_index != 0 || route.dgid.is_zero() {
        return Err(VerbsError::InvalidArgument);
    }
    if route.dgid.is_multicast() {
        return Err(VerbsError::NotSupported);
    }
    Ok(route)
}
