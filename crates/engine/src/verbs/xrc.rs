//! Verbs of XRC: domains, their shared receive queues, target QPs.
use crate::limits::OPENS_PER_QP_MAX;
use crate::qp::Teardown;
use crate::xrc::{Target, XrcQueue, Xrcd};
use crate::{ContextId, CqId, Engine, QpId, SessionId, SrqId, XrcdId};
use freeflow_verbs::{FileIdentity, QpState, Qpn, VerbsError, XrcdOpenFlags};

impl Engine {
    // ---- domains

    /// The domain of `file` in this vNIC, or, without one, a domain that nobody else can open. One
    /// that does not exist yet needs `create` (NotFound), one that does refuses `exclusive`
    /// (Exists).
    ///
    /// # Errors
    /// NoMemory: the vNIC has as many as it may. NotFound also: not the session's context.
    pub fn open_xrcd(
        &mut self,
        session: SessionId,
        context: ContextId,
        file: Option<FileIdentity>,
        flags: XrcdOpenFlags,
    ) -> Result<XrcdId, VerbsError> {
        self.contexts.owned(session, context)?;
        let vnic = self.requester.responder.session_vnic(session)?;
        let file = file.map(|file| (vnic, file));
        let known = file.and_then(|file| self.requester.responder.xrc.files.get(&file).copied());
        match known {
            Some(_) if flags.exclusive => return Err(VerbsError::Exists),
            None if file.is_some() && !flags.create => return Err(VerbsError::NotFound),
            _ => {}
        }
        self.charge(vnic, |usage| &mut usage.xrcds, |limits| limits.xrcd_count_max)?;
        self.contexts.owned_mut(session, context)?.children += 1;
        let domain = known.unwrap_or_else(|| self.requester.responder.xrc.make_domain(file));
        if let Some(domain) = self.requester.responder.xrc.domains.get_mut(&domain) {
            domain.opens += 1;
        }
        Ok(self.requester.responder.xrc.xrcds.adopt(Xrcd { session, context, domain, children: 0 }))
    }

    /// Closes a domain.
    ///
    /// # Errors
    /// Busy: SRQs or target QPs that were made or opened through it are there. NotFound: the session
    /// does not have it open.
    pub fn close_xrcd(&mut self, session: SessionId, xrcd: XrcdId) -> Result<(), VerbsError> {
        if self.requester.responder.xrc.xrcds.owned(session, xrcd)?.children > 0 {
            return Err(VerbsError::Busy);
        }
        self.remove_xrcd(xrcd);
        Ok(())
    }

    pub(crate) fn remove_xrcd(&mut self, xrcd: XrcdId) {
        let Some(gone) = self.requester.responder.xrc.xrcds.disown(xrcd) else { return };
        self.requester.responder.xrc.close(gone.domain);
        if let Some(context) = self.contexts.get_mut(gone.context) {
            context.children -= 1;
        }
        self.refund_session(gone.session, |usage| &mut usage.xrcds);
    }

    pub(crate) fn add_xrcd_child(&mut self, xrcd: XrcdId) {
        if let Some(xrcd) = self.requester.responder.xrc.xrcds.get_mut(xrcd) {
            xrcd.children += 1;
        }
    }

    fn drop_xrcd_child(&mut self, xrcd: XrcdId) {
        if let Some(xrcd) = self.requester.responder.xrc.xrcds.get_mut(xrcd) {
            xrcd.children -= 1;
        }
    }

    // ---- shared receive queues

    /// Plans the parts of an SRQ for XRC: a domain and a CQ of one context. NoMemory: no number is
    /// left.
    pub(crate) fn plan_xrc_queue(
        &mut self,
        session: SessionId,
        (xrcd, cq): (XrcdId, CqId),
        cookie: u32,
    ) -> Result<XrcQueue, VerbsError> {
        let opened = self.requester.responder.xrc.xrcds.owned(session, xrcd)?;
        let (domain, context) = (opened.domain, opened.context);
        if self.completer().cqs.owned(session, cq)?.context != context {
            return Err(VerbsError::InvalidArgument);
        }
        let number = self.fresh_srq_number()?;
        Ok(XrcQueue { xrcd, domain, cq, number, in_flight: 0, cookie })
    }

    /// The SRQ `id` was made to this plan.
    pub(crate) fn enter_xrc_queue(&mut self, id: SrqId, (number, xrcd, cq): (u32, XrcdId, CqId)) {
        self.requester.responder.xrc.numbers.insert(number, id.index);
        self.add_xrcd_child(xrcd);
        if let Some(cq) = self.completer_mut().cqs.get_mut(cq) {
            cq.users += 1;
        }
    }

    /// From here on senders do not find it.
    pub(crate) fn hide_xrc_queue(&mut self, id: SrqId) {
        let responder = &mut self.requester.responder;
        if let Some(queue) = responder.completer.srqs.get_mut(id).and_then(|srq| srq.xrc.as_mut()) {
            responder.xrc.numbers.remove(core::mem::take(&mut queue.number));
        }
    }

    pub(crate) fn leave_xrc_queue(&mut self, queue: &XrcQueue) {
        self.requester.responder.xrc.numbers.remove(queue.number);
        self.drop_xrcd_child(queue.xrcd);
        if let Some(cq) = self.completer_mut().cqs.get_mut(queue.cq) {
            cq.users -= 1;
        }
    }

    // ---- target QPs

    /// One more opener of an `XrcReceive` QP; each has the same QP, and all must destroy it.
    /// InvalidArgument: the domain has no such QP. Counts as a QP of the vNIC. NoMemory: it is open
    /// too often.
    ///
    /// # Errors
    /// NotFound: the session does not have the domain open.
    pub fn open_qp(&mut self, session: SessionId, xrcd: XrcdId, qpn: Qpn) -> Result<QpId, VerbsError> {
        let domain = self.requester.responder.domain_of(session, xrcd)?;
        let found = self.requester.responder.qpns.get(qpn.0).and_then(|index| self.completer().qps.at(index));
        let (id, pair) = found.ok_or(VerbsError::InvalidArgument)?;
        if !pair.can_be_opened(domain) {
            return Err(VerbsError::InvalidArgument);
        }
        if pair.target.as_ref().is_some_and(|target| target.openers.len() >= OPENS_PER_QP_MAX) {
            return Err(VerbsError::NoMemory);
        }
        let vnic = self.requester.responder.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.qps, |limits| limits.qp_count_max)?;
        self.add_xrcd_child(xrcd);
        if let Some(target) = self.qp_mut(id).target.as_mut() {
            target.openers.push(session);
            target.xrcds.push(xrcd);
        }
        self.completer_mut().qps.share(id, session);
        Ok(id)
    }

    /// Sessions that get a QP's events: those that have it open (more than one only for
    /// `XrcReceive`; a session that opened it twice stands there twice). Empty: no such QP.
    pub fn qp_openers(&self, qp: QpId) -> &[SessionId] {
        let Some(pair) = self.completer().qps.get(qp) else { return &[] };
        pair.target.as_ref().map_or(core::slice::from_ref(&pair.session), |target| &target.openers)
    }

    /// Takes one opener away. False if it is the last one, which only the end of the QP takes away.
    pub(crate) fn leave_target(&mut self, id: QpId, session: SessionId) -> bool {
        let vnic = self.qp(id).vnic;
        let Some(target) = self.qp_mut(id).target.as_mut() else { return false };
        let Some(place) = target.openers.iter().rposition(|opener| *opener == session) else { return false };
        if target.openers.len() == 1 {
            return false;
        }
        target.openers.remove(place);
        let xrcd = target.xrcds.remove(place);
        let (first, still) = (target.openers[0], target.openers.contains(&session));
        self.drop_xrcd_child(xrcd);
        self.refund(vnic, |usage| &mut usage.qps);
        if !still {
            self.completer_mut().qps.unshare(id, session);
            self.qp_mut(id).session = first;
        }
        // The session that asked for RESET, and was to ask again, may be gone: the others shall not
        // find a QP that only seems alive.
        let pair = self.qp_mut(id);
        if pair.teardown == Teardown::Reset {
            pair.teardown = Teardown::None;
            pair.attributes.state = QpState::Error;
            self.push_ready(id);
        }
        true
    }

    /// The QP is gone, and with it the last opener's part.
    pub(crate) fn end_target(&mut self, target: &Target) {
        for &xrcd in &target.xrcds {
            self.drop_xrcd_child(xrcd);
        }
    }
}
