//! Protection domains, which processes of one vNIC may share (`ibv_import_pd`).
//!
//! Invariant: a PD lives as long as some session uses it, whoever allocated it; what a session has
//! in it is counted apart, so that no session can hold up another one's `ibv_dealloc_pd`.
use crate::objects::{Pd, PdShare};
use crate::{ContextId, Engine, PdId, SessionId};
use alloc::vec;
use freeflow_verbs::VerbsError;

impl Engine {
    /// A protection domain.
    ///
    /// # Errors
    /// NoMemory: the vNIC has as many as it may. NotFound: not the session's context.
    pub fn alloc_pd(&mut self, session: SessionId, context: ContextId) -> Result<PdId, VerbsError> {
        self.contexts.owned(session, context)?;
        let vnic = self.requester.responder.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.pds, |limits| limits.pd_count_max)?;
        self.contexts.owned_mut(session, context)?.children += 1;
        let shares = vec![PdShare { session, uses: 1, children: 0 }];
        Ok(self.pds.adopt(Pd { session, vnic, context: Some(context), is_shared: false, shares }))
    }

    /// Gives up a PD. Whoever shares it keeps it.
    ///
    /// # Errors
    /// Busy: MRs, windows, SRQs, QPs or AHs of this session are in it. NotFound: not the session's PD.
    pub fn dealloc_pd(&mut self, session: SessionId, pd: PdId) -> Result<(), VerbsError> {
        let domain = self.pds.owned(session, pd)?;
        let context = domain.context.ok_or(VerbsError::NotFound)?;
        domain.check_leave(session)?;
        self.leave_context(pd, context);
        self.leave_pd(session, pd);
        Ok(())
    }

    /// Lets another session of the same vNIC create objects in a PD, until it calls
    /// [`Engine::unshare_pd`] as often. Each counts as one PD of the vNIC. NotPermitted: another
    /// vNIC's.
    ///
    /// # Errors
    /// NoMemory: the vNIC has as many as it may. NotFound: not the owner's PD.
    pub fn share_pd(&mut self, owner: SessionId, importer: SessionId, pd: PdId) -> Result<(), VerbsError> {
        self.pd_of(owner, pd)?;
        let vnic = self.requester.responder.session_vnic(importer)?;
        if self.requester.responder.session_vnic(owner)? != vnic {
            return Err(VerbsError::NotPermitted);
        }
        self.charge(vnic, |usage| &mut usage.pds, |limits| limits.pd_count_max)?;
        let domain = self.pds.get_mut(pd).expect("it was found");
        domain.is_shared = true;
        match domain.share_mut(importer) {
            Some(share) => share.uses += 1,
            None => {
                domain.shares.push(PdShare { session: importer, uses: 1, children: 0 });
                self.pds.share(pd, importer);
            }
        }
        Ok(())
    }

    /// Gives up what [`Engine::share_pd`] gave. Busy while this session's objects are in it.
    ///
    /// # Errors
    /// NotFound: the session does not share it.
    pub fn unshare_pd(&mut self, importer: SessionId, pd: PdId) -> Result<(), VerbsError> {
        let domain = self.pds.get(pd).ok_or(VerbsError::NotFound)?;
        let allocation = u32::from(domain.session == importer && domain.context.is_some());
        if domain.share(importer).is_none_or(|share| share.uses == allocation) {
            return Err(VerbsError::NotFound);
        }
        domain.check_leave(importer)?;
        self.leave_pd(importer, pd);
        Ok(())
    }

    /// Ends all that a dying session has of PDs; its objects are gone already.
    pub(crate) fn leave_pds(&mut self, session: SessionId) {
        for pd in self.pds.all_of(session) {
            let own = self.pds.get(pd).filter(|pd| pd.session == session);
            if let Some(context) = own.and_then(|pd| pd.context) {
                self.leave_context(pd, context);
            }
            while self.leave_pd(session, pd) {}
        }
    }

    fn leave_context(&mut self, pd: PdId, context: ContextId) {
        self.pds.get_mut(pd).expect("it was found").context = None;
        if let Some(context) = self.contexts.get_mut(context) {
            context.children -= 1;
        }
    }

    /// Takes one use away; the PD goes with the last of all sessions. False if there was none.
    fn leave_pd(&mut self, session: SessionId, pd: PdId) -> bool {
        let Some(domain) = self.pds.get_mut(pd) else { return false };
        let Some(place) = domain.shares.iter().position(|share| share.session == session) else { return false };
        let vnic = domain.vnic;
        domain.shares[place].uses -= 1;
        if domain.shares[place].uses == 0 {
            domain.shares.swap_remove(place);
            let abandoned = domain.shares.is_empty();
            self.pds.unshare(pd, session);
            if abandoned {
                self.pds.remove(pd);
            }
        }
        self.refund(vnic, |usage| &mut usage.pds);
        true
    }

    /// A PD that this session may create objects in.
    pub(crate) fn pd_of(&self, session: SessionId, pd: PdId) -> Result<&Pd, VerbsError> {
        self.pds.owned(session, pd)
    }

    pub(crate) fn add_pd_child(&mut self, session: SessionId, pd: PdId) {
        if let Some(share) = self.pds.get_mut(pd).and_then(|pd| pd.share_mut(session)) {
            share.children += 1;
        }
    }

    pub(crate) fn drop_pd_child(&mut self, session: SessionId, pd: PdId) {
        if let Some(share) = self.pds.get_mut(pd).and_then(|pd| pd.share_mut(session)) {
            share.children -= 1;
        }
    }
}
