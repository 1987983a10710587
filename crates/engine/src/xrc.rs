//! Extended reliable connections (IBTA annex A14): domains, shared receive queues by number, and target QPs that several
//! processes have open.
//!
//! A target QP has no queues and no protection domain of its own. Each request names an SRQ of the target's domain; while
//! the request is in hand it stands in `QueuePair::srq`, its RECVs are the ones consumed, its PD is the one that keys must
//! belong to, its CQ the one that hears of it.
//!
//! Invariant: a domain is there as long as somebody has it open; what stands on an opened domain (SRQs, target QPs)
//! keeps it from being closed. A target QP goes with its last opener.
use crate::limits::OPENS_PER_QP_MAX;
use crate::qp::{Claim, QueuePair, Teardown};
use crate::responder::{Arrival, Nak, Refused};
use crate::slab::{Owned, Slab};
use crate::table::NumberTable;
use crate::{ContextId, CqId, Engine, Environment, QpId, SessionId, SrqId, Syndrome, VnicId, XrcdId};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use freeflow_verbs::{CompletionStatus, FileIdentity, Instant, QpState, QpType, Qpn, VerbsError};
use serde::{Deserialize, Serialize};

/// Never given out twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct DomainId(u64);

#[derive(Serialize, Deserialize)]
struct Domain {
    /// Where other processes find it.
    file: Option<(VnicId, FileIdentity)>,
    /// How often it is open.
    opens: u32,
}

/// One `ibv_open_xrcd`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Xrcd {
    session: SessionId,
    context: ContextId,
    domain: DomainId,
    /// SRQs, and target QPs opened through it.
    children: u32,
}

impl Owned for Xrcd {
    fn session(&self) -> SessionId {
        self.session
    }
}

/// What an SRQ for XRC has that others have not.
#[derive(Serialize, Deserialize)]
pub(crate) struct XrcQueue {
    pub xrcd: XrcdId,
    pub domain: DomainId,
    pub cq: CqId,
    /// 24 bits, unique on a host. 0: it is being destroyed.
    pub number: u32,
    /// Pending copies into its RECVs.
    pub flights: u32,
    /// Echoed in completions.
    pub cookie: u32,
}

/// What a target QP has that others have not.
#[derive(Serialize, Deserialize)]
pub(crate) struct Target {
    pub domain: DomainId,
    /// Who has it open, once for each time; never empty.
    pub openers: Vec<SessionId>,
    /// Through which opened domain: parallel to `openers`.
    xrcds: Vec<XrcdId>,
}

impl Target {
    pub fn new(session: SessionId, xrcd: XrcdId, domain: DomainId) -> Self {
        Self { domain, openers: alloc::vec![session], xrcds: alloc::vec![xrcd] }
    }
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Xrc {
    domains: BTreeMap<DomainId, Domain>,
    files: BTreeMap<(VnicId, FileIdentity), DomainId>,
    pub xrcds: Slab<XrcdId, Xrcd>,
    /// Number of an SRQ to its slab index.
    numbers: NumberTable,
    domains_made: u64,
}

impl Xrc {
    pub fn new() -> Self {
        Self {
            domains: BTreeMap::new(),
            files: BTreeMap::new(),
            xrcds: Slab::new(),
            numbers: NumberTable::new(),
            domains_made: 0,
        }
    }

    fn make_domain(&mut self, file: Option<(VnicId, FileIdentity)>) -> DomainId {
        self.domains_made += 1;
        let id = DomainId(self.domains_made);
        self.domains.insert(id, Domain { file, opens: 0 });
        if let Some(file) = file {
            self.files.insert(file, id);
        }
        id
    }

    fn close(&mut self, id: DomainId) {
        let domain = self.domains.get_mut(&id).expect("an opened domain is there");
        domain.opens -= 1;
        if domain.opens > 0 {
            return;
        }
        if let Some(file) = domain.file {
            self.files.remove(&file);
        }
        self.domains.remove(&id);
    }
}

impl Engine {
    // ---- domains

    /// The domain of `file` in this vNIC, or, without one, a domain that nobody else can open. One that does not exist
    /// yet needs `create` (NotFound), one that does refuses `exclusive` (Exists).
    pub fn open_xrcd(
        &mut self,
        session: SessionId,
        context: ContextId,
        file: Option<FileIdentity>,
        create: bool,
        exclusive: bool,
    ) -> Result<XrcdId, VerbsError> {
        self.contexts.owned(session, context)?;
        let vnic = self.session_vnic(session)?;
        let file = file.map(|file| (vnic, file));
        let known = file.and_then(|file| self.xrc.files.get(&file).copied());
        match known {
            Some(_) if exclusive => return Err(VerbsError::Exists),
            None if file.is_some() && !create => return Err(VerbsError::NotFound),
            _ => {}
        }
        self.charge(vnic, |usage| &mut usage.xrcds, |limits| limits.xrcd_count_max)?;
        self.contexts.owned_mut(session, context)?.children += 1;
        let domain = known.unwrap_or_else(|| self.xrc.make_domain(file));
        if let Some(domain) = self.xrc.domains.get_mut(&domain) {
            domain.opens += 1;
        }
        Ok(self.xrc.xrcds.adopt(Xrcd { session, context, domain, children: 0 }))
    }

    /// Busy while SRQs or target QPs that were made or opened through it are there.
    pub fn close_xrcd(&mut self, session: SessionId, xrcd: XrcdId) -> Result<(), VerbsError> {
        if self.xrc.xrcds.owned(session, xrcd)?.children > 0 {
            return Err(VerbsError::Busy);
        }
        self.remove_xrcd(xrcd);
        Ok(())
    }

    pub(crate) fn remove_xrcd(&mut self, xrcd: XrcdId) {
        let Some(gone) = self.xrc.xrcds.disown(xrcd) else { return };
        self.xrc.close(gone.domain);
        if let Some(context) = self.contexts.get_mut(gone.context) {
            context.children -= 1;
        }
        self.refund_session(gone.session, |usage| &mut usage.xrcds);
    }

    pub(crate) fn domain_of(&self, session: SessionId, xrcd: XrcdId) -> Result<DomainId, VerbsError> {
        Ok(self.xrc.xrcds.owned(session, xrcd)?.domain)
    }

    pub(crate) fn add_xrcd_child(&mut self, xrcd: XrcdId) {
        if let Some(xrcd) = self.xrc.xrcds.get_mut(xrcd) {
            xrcd.children += 1;
        }
    }

    fn drop_xrcd_child(&mut self, xrcd: XrcdId) {
        if let Some(xrcd) = self.xrc.xrcds.get_mut(xrcd) {
            xrcd.children -= 1;
        }
    }

    // ---- shared receive queues

    /// What an SRQ for XRC needs: a domain and a CQ of one context. NoMemory: no number is left.
    pub(crate) fn plan_xrc_queue(
        &mut self,
        session: SessionId,
        (xrcd, cq): (XrcdId, CqId),
        cookie: u32,
    ) -> Result<XrcQueue, VerbsError> {
        let opened = self.xrc.xrcds.owned(session, xrcd)?;
        let (domain, context) = (opened.domain, opened.context);
        if self.cqs.owned(session, cq)?.context != context {
            return Err(VerbsError::InvalidArgument);
        }
        // Half the numbers at most, so that drawing one ends.
        if self.xrc.numbers.len() > Qpn::MASK as usize / 2 {
            return Err(VerbsError::NoMemory);
        }
        let number = loop {
            let number = self.random.next_u32() & Qpn::MASK;
            if number != 0 && self.xrc.numbers.get(number).is_none() {
                break number;
            }
        };
        Ok(XrcQueue { xrcd, domain, cq, number, flights: 0, cookie })
    }

    /// The SRQ `id` was made to this plan.
    pub(crate) fn enter_xrc_queue(&mut self, id: SrqId, (number, xrcd, cq): (u32, XrcdId, CqId)) {
        self.xrc.numbers.insert(number, id.index);
        self.add_xrcd_child(xrcd);
        if let Some(cq) = self.cqs.get_mut(cq) {
            cq.users += 1;
        }
    }

    /// From here on senders do not find it.
    pub(crate) fn hide_xrc_queue(&mut self, id: SrqId) {
        if let Some(queue) = self.srqs.get_mut(id).and_then(|srq| srq.xrc.as_mut()) {
            self.xrc.numbers.remove(core::mem::take(&mut queue.number));
        }
    }

    /// A copy into a RECV that the target QP has in hand begins: gives the SRQ.
    pub(crate) fn board_queue(&mut self, target: QpId) -> Option<SrqId> {
        let pair = self.qp(target);
        let id = pair.srq.filter(|_| pair.target.is_some())?;
        self.srqs.get_mut(id)?.xrc.as_mut()?.flights += 1;
        Some(id)
    }

    pub(crate) fn leave_queue(&mut self, id: SrqId) {
        if let Some(queue) = self.srqs.get_mut(id).and_then(|srq| srq.xrc.as_mut()) {
            queue.flights -= 1;
        }
    }

    pub(crate) fn leave_xrc_queue(&mut self, queue: &XrcQueue) {
        self.xrc.numbers.remove(queue.number);
        self.drop_xrcd_child(queue.xrcd);
        if let Some(cq) = self.cqs.get_mut(queue.cq) {
            cq.users -= 1;
        }
    }

    // ---- target QPs

    /// One more opener of an `XrcReceive` QP; each has the same QP, and all must destroy it. InvalidArgument: the domain
    /// has no such QP. Counts as a QP of the vNIC. NoMemory: it is open too often.
    pub fn open_qp(&mut self, session: SessionId, xrcd: XrcdId, qpn: Qpn) -> Result<QpId, VerbsError> {
        let domain = self.domain_of(session, xrcd)?;
        let found = self.qpns.get(qpn.0).and_then(|index| self.qps.at(index));
        let (id, pair) = found.ok_or(VerbsError::InvalidArgument)?;
        if !pair.can_be_opened(domain) {
            return Err(VerbsError::InvalidArgument);
        }
        if pair.target.as_ref().is_some_and(|target| target.openers.len() >= OPENS_PER_QP_MAX) {
            return Err(VerbsError::NoMemory);
        }
        let vnic = self.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.qps, |limits| limits.qp_count_max)?;
        self.add_xrcd_child(xrcd);
        if let Some(target) = self.qp_mut(id).target.as_mut() {
            target.openers.push(session);
            target.xrcds.push(xrcd);
        }
        self.qps.share(id, session);
        Ok(id)
    }

    /// Who is told of a QP's events: the sessions that have it open (more than one only for `XrcReceive`; a session
    /// that opened it twice stands there twice). Empty: no such QP.
    pub fn qp_openers(&self, qp: QpId) -> &[SessionId] {
        let Some(pair) = self.qps.get(qp) else { return &[] };
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
            self.qps.unshare(id, session);
            self.qp_mut(id).session = first;
        }
        // Who asked for RESET, and was to ask again, may be gone: the others shall not find a QP that only seems alive.
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

    /// A QP forgets what it has in hand: a RECV of an SRQ goes back to its owner, who has no room for another until it hears of
    /// it, and may be another process; but not to `gone`, who asks for nothing any more.
    pub(crate) fn return_receive<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        gone: Option<SessionId>,
    ) {
        let pair = self.qp(id);
        let srq = pair.srq.and_then(|srq| self.srqs.get(srq));
        let awaited = srq.is_some_and(|srq| Some(srq.session) != gone);
        if awaited && pair.receive.claim != Claim::None {
            self.fail_receive(env, now, id, (CompletionStatus::WorkRequestFlushed, Syndrome::Flushed));
        }
    }

    // ---- requests

    /// Makes the SRQ that the request names the target QP's. A number that is unknown or of another domain is an invalid
    /// request (A14: invalid XRCETH).
    pub(crate) fn name_queue<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        arrival: &Arrival,
    ) -> Result<(), Refused> {
        let responder = arrival.responder;
        let Some(srq) = self.find_queue(responder, arrival.srqn) else {
            return Err(self.refuse(env, responder, Nak::InvalidRequest(Syndrome::SharedQueue)));
        };
        if self.qp(responder).srq != Some(srq) {
            // A RECV left over from a message that never ended; the queue it came from does not get it back.
            if self.qp(responder).receive.claim == Claim::Held {
                self.fail_receive(env, now, responder, (CompletionStatus::WorkRequestFlushed, Syndrome::Flushed));
            }
            self.qp_mut(responder).srq = Some(srq);
        }
        Ok(())
    }

    fn find_queue(&self, target: QpId, number: u32) -> Option<SrqId> {
        let domain = self.qp(target).target.as_ref()?.domain;
        let (id, srq) = self.srqs.at(self.xrc.numbers.get(number)?)?;
        (srq.xrc.as_ref()?.domain == domain).then_some(id)
    }

    /// The SRQ of the message in hand, or of the last one, if it is still there.
    pub(crate) fn live_queue(&self, pair: &QueuePair) -> Option<&XrcQueue> {
        let queue = self.srqs.get(pair.srq?)?.xrc.as_ref()?;
        (queue.number != 0).then_some(queue)
    }

    /// Whether the SRQ of the message in hand is still there; always so for what is no target QP.
    pub(crate) fn queue_is_there(&self, pair: &QueuePair) -> bool {
        pair.service != QpType::XrcReceive || self.live_queue(pair).is_some()
    }
}
