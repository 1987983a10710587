//! Verbs of memory regions: register, change, deregister, and the null region (IBTA 11.2.8).
//!
//! Invariant: a region goes, or changes so that something is taken away, only when no copy uses it
//! and no window is bound to it; its keys are invalid from the first time that this was asked for.
//! A change that takes nothing away is made at once, and requests in flight do not notice it.
use crate::keys::{Backing, MemoryRegion, NOWHERE, Placement, RegionState, check_access};
use crate::{Engine, MrId, MrKeys, PdId, Refusal, SessionId};
use freeflow_verbs::{Access, RegionChange, Translation, VerbsError};

impl Engine {
    /// `address` is where the process sees the memory, `iova` how requests name it. Whether it is
    /// mapped there is the caller's check. Address 0 and length `u64::MAX` with ON_DEMAND: all that
    /// the process has, now and later (an implicit region); its bytes do not count, so a vNIC that
    /// is held to fewer than by default has none.
    ///
    /// # Errors
    /// InvalidArgument: rights that can't be, or a range beyond the address space. NoMemory: the
    /// vNIC, or its network, has as many regions or bytes as it may. NotFound: not the session's
    /// PD. NotSupported: FLUSH_PERSISTENT.
    pub fn register_mr(
        &mut self,
        session: SessionId,
        pd: PdId,
        address: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys, VerbsError> {
        self.pd_of(session, pd)?;
        let placement = check_placement(Translation { address, length, iova }, check_access(access)?)?;
        if placement.last == u64::MAX {
            self.check_implicit(session)?;
        }
        self.enter_region(MemoryRegion::new(session, pd, &placement, Backing::Process))
    }

    /// A region of all addresses without memory: local reads give zeros, local writes are dropped.
    /// It has no remote rights.
    ///
    /// # Errors
    /// NoMemory: the vNIC has as many as it may. NotFound: not the session's PD.
    pub fn alloc_null_mr(&mut self, session: SessionId, pd: PdId) -> Result<MrKeys, VerbsError> {
        self.pd_of(session, pd)?;
        let placement = Placement { address: 0, last: u64::MAX, iova: 0, access: Access::LOCAL_WRITE };
        self.enter_region(MemoryRegion::new(session, pd, &placement, Backing::Void))
    }

    fn enter_region(&mut self, region: MemoryRegion) -> Result<MrKeys, VerbsError> {
        let (session, pd, bytes) = (region.session, region.pd, region.registered_bytes());
        self.completer().keys.check_room()?;
        self.check_registered(session, 0, bytes)?;
        let vnic = self.requester.responder.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.mrs, |limits| limits.mr_count_max)?;
        self.count_registered(session, 0, bytes);
        self.add_pd_child(session, pd);
        let (mr, key) = self.requester.responder.completer.keys.register(&mut self.random, region);
        Ok(MrKeys { mr, lkey: key, rkey: key })
    }

    /// Changes a region in place; its keys stay. Requests in flight go on if the change takes
    /// nothing away (`MemoryRegion::keeps_all`). Else `InFlight` until no copy uses it: its keys
    /// are invalid meanwhile, and requests that name them fail as with an unknown key. An error
    /// changes nothing. Busy while windows are bound to it (IBTA 11.2.8.5).
    ///
    /// # Errors
    /// [`Refusal::Error`]: as [`Engine::register_mr`], and Busy.
    pub fn reregister_mr(
        &mut self,
        session: SessionId,
        mr: MrId,
        pd: Option<PdId>,
        change: &RegionChange,
    ) -> Result<MrKeys, Refusal> {
        let checked = self.check_unbound(session, mr).and_then(|()| self.changed(session, mr, pd, change));
        let placement = checked.map_err(|error| {
            self.give_up_change(session, mr);
            Refusal::Error(error)
        })?;
        let region = self.completer_mut().keys.regions.get_mut(mr).expect("it was found");
        if region.in_flight > 0 && !region.keeps_all(&placement, pd.unwrap_or(region.pd)) {
            region.state = RegionState::Changing;
            return Err(Refusal::InFlight);
        }
        let before = (region.registered_bytes(), region.pd);
        region.place(&placement);
        region.pd = pd.unwrap_or(region.pd);
        region.state = RegionState::Live;
        let (after, key) = ((region.registered_bytes(), region.pd), region.key);
        self.count_registered(session, before.0, after.0);
        self.drop_pd_child(session, before.1);
        self.add_pd_child(session, after.1);
        Ok(MrKeys { mr, lkey: key, rkey: key })
    }

    /// A change that waited is refused after all: its PD is gone, or the limits have changed.
    fn give_up_change(&mut self, session: SessionId, mr: MrId) {
        if let Ok(region) = self.completer_mut().keys.regions.owned_mut(session, mr)
            && region.state == RegionState::Changing
        {
            region.state = RegionState::Live;
        }
    }

    /// A region as it would be after a change, if that is allowed.
    fn changed(
        &mut self,
        session: SessionId,
        mr: MrId,
        pd: Option<PdId>,
        change: &RegionChange,
    ) -> Result<Placement, VerbsError> {
        let region = self.completer().keys.regions.owned(session, mr)?;
        if region.backing == Backing::Void || region.state == RegionState::Leaving {
            return Err(VerbsError::InvalidArgument);
        }
        if let Some(pd) = pd {
            self.pd_of(session, pd)?;
        }
        let now = region.placement();
        let access = change.access.map_or(Ok(now.access), check_access)?;
        let placement = match change.translation {
            Some(translation) => check_placement(translation, access)?,
            // All addresses are there on demand or not at all.
            None if now.last == u64::MAX && !access.contains(Access::ON_DEMAND) => {
                return Err(VerbsError::InvalidArgument);
            }
            None => Placement { access, ..now },
        };
        let before = region.registered_bytes();
        if placement.last == u64::MAX && now.last != u64::MAX {
            self.check_implicit(session)?;
        }
        self.check_registered(session, before, placement.last.wrapping_add(1))?;
        Ok(placement)
    }

    /// The keys are invalid as soon as this is first called; `InFlight` until no copy uses the
    /// region. Busy while windows are bound to it: nothing changes then (IBTA 11.2.8.4).
    ///
    /// # Errors
    /// [`Refusal::Error`] with Busy, or NotFound: not the session's region.
    pub fn deregister_mr(&mut self, session: SessionId, mr: MrId) -> Result<(), Refusal> {
        self.check_unbound(session, mr).map_err(Refusal::Error)?;
        self.completer_mut().keys.invalidate(mr);
        if self.completer().keys.regions.get(mr).is_some_and(|region| region.in_flight > 0) {
            return Err(Refusal::InFlight);
        }
        self.remove_mr(mr);
        Ok(())
    }

    fn check_unbound(&self, session: SessionId, mr: MrId) -> Result<(), VerbsError> {
        let region = self.completer().keys.regions.owned(session, mr)?;
        if region.windows == NOWHERE { Ok(()) } else { Err(VerbsError::Busy) }
    }

    /// Bindings of windows go with it: those of another session, if this one died.
    pub(crate) fn remove_mr(&mut self, mr: MrId) {
        while let Some(window) =
            self.completer().keys.regions.get(mr).map(|region| region.windows).filter(|at| *at != NOWHERE)
        {
            self.completer_mut().unbind(window);
        }
        let Some(gone) = self.completer_mut().keys.remove(mr) else { return };
        assert!(gone.in_flight == 0 && gone.windows == NOWHERE, "no operation and no window uses a region that goes");
        self.drop_pd_child(gone.session, gone.pd);
        self.refund_session(gone.session, |usage| &mut usage.mrs);
        self.count_registered(gone.session, gone.registered_bytes(), 0);
    }
}

/// The last byte must have an address, in both spaces; but all addresses are one region, on demand.
fn check_placement(asked: Translation, access: Access) -> Result<Placement, VerbsError> {
    let Translation { address, length, iova } = asked;
    if access.contains(Access::ON_DEMAND) && (address, length) == (0, u64::MAX) {
        let placement = Placement { address, last: u64::MAX, iova, access };
        return if iova == 0 { Ok(placement) } else { Err(VerbsError::InvalidArgument) };
    }
    let last = length.checked_sub(1).ok_or(VerbsError::InvalidArgument)?;
    if address.checked_add(last).is_none() || iova.checked_add(last).is_none() {
        return Err(VerbsError::InvalidArgument);
    }
    Ok(Placement { address, last, iova, access })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Seed;
    use crate::keys::Keys;
    use core::net::{IpAddr, Ipv4Addr};
    use freeflow_verbs::{Gid, NetworkId, VnicLimits, WindowKind};

    #[test]
    fn keys_of_the_host_run_out() {
        let mut engine = Engine::new(Seed([3; 32]));
        engine.requester.responder.completer.keys = Keys::new(freeflow_verbs::Shard::ONLY, 2);
        let gid = Gid::from_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let vnic = engine.create_vnic(NetworkId(0), gid, VnicLimits::default()).unwrap();
        let session = engine.create_session(vnic).unwrap();
        let context = engine.open_context(session).unwrap();
        let pd = engine.alloc_pd(session, context).unwrap();
        let mr = engine.register_mr(session, pd, 0, 1, 0, Access(0)).unwrap().mr;
        engine.alloc_mw(session, pd, WindowKind::Type1).unwrap();
        let before = engine.usage();
        assert_eq!(engine.register_mr(session, pd, 0, 1, 0, Access(0)), Err(VerbsError::NoMemory));
        assert_eq!(engine.alloc_null_mr(session, pd), Err(VerbsError::NoMemory));
        assert_eq!(engine.alloc_mw(session, pd, WindowKind::Type2), Err(VerbsError::NoMemory));
        assert_eq!(engine.usage(), before);
        engine.deregister_mr(session, mr).unwrap();
        assert!(engine.alloc_mw(session, pd, WindowKind::Type2).is_ok());
    }
}
