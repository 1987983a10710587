//! Binding and invalidation of memory windows (IBTA 10.6.7, 11.4.1.1).
//!
//! Both are send requests of the owner's own QP ([`Completer::run_local`]); SEND_WITH_INV lets the
//! peer take a binding away. Checks stand in the order of Linux' rxe; where rxe checks less than
//! the standard (the PD of a type 1 window and of the region, the QP of an invalidation, the range
//! of a window), the standard is followed.
//!
//! Invariant: an invalid key is invalid at once, and the request that made it so completes after
//! the last copy through it has completed.
use crate::completer::Completer;
use crate::fault::Fault;
use crate::keys::{KeyFault, KeyHolder, NOWHERE, RegionState, offset_within};
use crate::qp::SendPhase;
use crate::turn::Turn;
use crate::window::{Binding, Chain, WindowState, pull, push};
use crate::{Environment, EventTarget, MwId, Progress, QpId, Syndrome};
use freeflow_verbs::{Access, AsyncEventKind, CompletionStatus, Instant, QpState, SendOpcode, SendRequest, WindowKind};

/// How far a local operation got.
pub(crate) enum Local {
    Done,
    /// Copies still use the window; the request is begun again when they have completed.
    Waiting,
}

impl Completer {
    // ---- requests

    /// Executes the BIND_MW or LOCAL_INV in hand.
    pub(crate) fn run_local<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        env.end_references();
        let result = match self.qp(id).send.request.opcode {
            SendOpcode::BindWindow => self.bind(id),
            _ => self.invalidate_locally(id),
        };
        match result {
            Ok(Local::Done) => self.succeed_send(env, now, id),
            Ok(Local::Waiting) => {
                self.qp_mut(id).send.phase = SendPhase::Waiting;
                return Turn::Stop(Progress::Waiting);
            }
            Err(fault) => self.fail_send(env, now, id, fault),
        }
        Turn::Continue
    }

    fn bind(&mut self, id: QpId) -> Result<Local, Fault> {
        let failed = |syndrome| Fault::new(CompletionStatus::MemoryWindowBindError, syndrome);
        let mw = self.window_to_bind(id).map_err(failed)?;
        let binding = self.binding_asked(id, mw).map_err(failed)?;
        if !self.release(mw) {
            self.wait_for_window(id, mw);
            return Ok(Local::Waiting);
        }
        let key = self.qp(id).send.request.rkey;
        self.keys.windows.get_mut(mw).expect("it was found").key = key;
        if let Some(binding) = binding {
            self.attach(mw, binding);
        }
        Ok(Local::Done)
    }

    /// The window that the request names by the upper 24 bits of its new key (IBTA C10-72).
    fn window_to_bind(&self, id: QpId) -> Result<MwId, Syndrome> {
        let qp = self.qp(id);
        let Some(KeyHolder::Window(index)) = self.keys.holder(qp.send.request.rkey) else {
            return Err(Syndrome::WindowUnknown);
        };
        let (mw, window) = self.keys.windows.at(index).ok_or(Syndrome::WindowUnknown)?;
        if Some(window.pd) == qp.pd { Ok(mw) } else { Err(Syndrome::WindowUnknown) }
    }

    /// The binding that the request makes; `None` to unbind a window of type 1 with length 0.
    fn binding_asked(&self, id: QpId, mw: MwId) -> Result<Option<Binding>, Syndrome> {
        let window = self.keys.windows.get(mw).expect("it was found");
        let request = &self.qp(id).send.request;
        let access = asked_rights(request)?;
        let length = request.compare_add;
        match window.kind {
            // A window of type 1 lies where its region lies (IBTA o10-36.2.2).
            WindowKind::Type1 if access.contains(Access::ZERO_BASED) => return Err(Syndrome::WindowRights),
            WindowKind::Type1 if length == 0 => return Ok(None),
            WindowKind::Type1 => {}
            // It must be invalidated first, and never by a binding of length 0 (IBTA o10-37.2.30,
            // o10-37.2.40).
            WindowKind::Type2 if matches!(window.state, WindowState::Bound(_)) || length == 0 => {
                return Err(Syndrome::WindowState);
            }
            WindowKind::Type2 => {}
        }
        self.binding_in_region(id, window.kind, access).map(Some)
    }

    fn binding_in_region(&self, id: QpId, kind: WindowKind, access: Access) -> Result<Binding, Syndrome> {
        let qp = self.qp(id);
        let request = &qp.send.request;
        let Some(KeyHolder::Region(index)) = self.keys.holder(request.immediate) else {
            return Err(Syndrome::WindowRegion);
        };
        let (_, region) = self.keys.regions.at(index).ok_or(Syndrome::WindowRegion)?;
        let (rights, live) = (region.access(), region.state == RegionState::Live);
        let known = live && region.key == request.immediate && Some(region.pd) == qp.pd;
        // IBTA C10-73; and a window has no place in a region that has none.
        if !known || !rights.contains(Access::MW_BIND) || rights.contains(Access::ZERO_BASED) {
            return Err(Syndrome::WindowRegion);
        }
        // IBTA C10-74.
        let writes = access.intersects(Access::REMOTE_WRITE.union(Access::REMOTE_ATOMIC));
        if writes && !rights.contains(Access::LOCAL_WRITE) {
            return Err(Syndrome::WindowRights);
        }
        // IBTA C10-75.
        let (start, length) = (request.remote_address, request.compare_add);
        let offset = offset_within(region.iova, region.last, start, length).map_err(|_| Syndrome::WindowRange)?;
        Ok(Binding {
            region: index,
            memory: region.session,
            address: region.address.wrapping_add(offset),
            iova: if access.contains(Access::ZERO_BASED) { 0 } else { start },
            last: length - 1,
            access,
            queue_pair: (kind == WindowKind::Type2).then_some(id),
        })
    }

    /// Only a window of type 2 that is bound to this QP can be invalidated (IBTA o10-37.2.26); a
    /// region that a process registered can not.
    fn invalidate_locally(&mut self, id: QpId) -> Result<Local, Fault> {
        let send = &self.qp(id).send;
        let mw = match send.releases {
            Some(mw) => mw,
            None => self
                .window_bound_to(id, send.request.immediate)
                .ok_or(Fault::new(CompletionStatus::LocalQpOperationError, Syndrome::InvalidateKey))?,
        };
        let waits = match send.releases {
            Some(mw) => self.keys.windows.get(mw).is_some_and(|window| matches!(window.state, WindowState::Leaving(_))),
            None => !self.release(mw),
        };
        if !waits {
            return Ok(Local::Done);
        }
        self.qp_mut(id).send.releases = Some(mw);
        self.wait_for_window(id, mw);
        Ok(Local::Waiting)
    }

    /// A SEND_WITH_INV arrived whole at this QP: takes the binding away that its key names.
    pub(crate) fn invalidate_remotely<E: Environment>(
        &mut self,
        env: &mut E,
        responder: QpId,
        key: u32,
    ) -> Result<(), KeyFault> {
        env.end_references();
        let mw = self.window_bound_to(responder, key).ok_or(KeyFault)?;
        self.release(mw);
        Ok(())
    }

    /// A SEND_WITH_INV whose key is not that of a window bound here (IBTA 9.9.3.1, class J; so does
    /// rxe): its bytes have arrived and the sender has its acknowledgement, but the RECV completes
    /// in error and the QP goes to ERROR.
    pub(crate) fn invalidation_failed<E: Environment>(&mut self, env: &mut E, now: Instant, responder: QpId) {
        let fault = Fault::new(CompletionStatus::RemoteInvalidRequest, Syndrome::RemoteInvalidate);
        self.fail_receive(env, now, responder, fault);
        if self.qp(responder).state() != QpState::Error {
            env.raise(AsyncEventKind::QpAccessError, EventTarget::Qp(responder));
        }
        self.enter_error(env, responder);
    }

    /// The window of type 2 with this key, if it is bound to this QP.
    fn window_bound_to(&self, id: QpId, key: u32) -> Option<MwId> {
        let KeyHolder::Window(index) = self.keys.holder(key)? else { return None };
        let (mw, window) = self.keys.windows.at(index)?;
        let WindowState::Bound(binding) = &window.state else { return None };
        (window.key == key && binding.queue_pair == Some(id)).then_some(mw)
    }

    // ---- bindings

    /// Makes the key of a window invalid. True if no copy uses it any more: it is free then.
    pub(crate) fn release(&mut self, mw: MwId) -> bool {
        let window = self.keys.windows.get_mut(mw).expect("it was found");
        if window.in_flight == 0 {
            self.unbind(mw.index);
            return true;
        }
        if let WindowState::Bound(binding) = window.state {
            window.state = WindowState::Leaving(binding);
        }
        false
    }

    fn wait_for_window(&mut self, id: QpId, mw: MwId) {
        let window = self.keys.windows.get_mut(mw).expect("it was found");
        if !window.waiters.contains(&id) {
            window.waiters.push(id);
        }
    }

    fn attach(&mut self, mw: MwId, binding: Binding) {
        let windows = &mut self.keys.windows;
        windows.get_mut(mw).expect("it was found").state = WindowState::Bound(binding);
        let region = self.keys.regions.at_mut(binding.region).expect("it was found");
        push(windows, &mut region.windows, Chain::Region, mw.index);
        if let Some(qp) = binding.queue_pair.and_then(|qp| self.qps.get_mut(qp)) {
            push(windows, &mut qp.windows, Chain::QueuePair, mw.index);
        }
    }

    /// Takes a binding away, whatever copies use it.
    pub(crate) fn unbind(&mut self, index: u32) {
        let windows = &mut self.keys.windows;
        let Some(window) = windows.at_mut(index) else { return };
        let binding = match core::mem::replace(&mut window.state, WindowState::Free) {
            WindowState::Free => return,
            WindowState::Bound(binding) | WindowState::Leaving(binding) => binding,
        };
        if let Some(region) = self.keys.regions.at_mut(binding.region) {
            pull(windows, &mut region.windows, Chain::Region, index);
        }
        if let Some(qp) = binding.queue_pair.and_then(|qp| self.qps.get_mut(qp)) {
            pull(windows, &mut qp.windows, Chain::QueuePair, index);
        }
    }

    /// The QP goes, and the windows bound to it are free.
    pub(crate) fn unbind_all_of(&mut self, id: QpId) {
        while let Some(window) = self.qps.get(id).map(|qp| qp.windows).filter(|at| *at != NOWHERE) {
            self.unbind(window);
        }
    }

    // ---- copies in flight

    /// A copy goes on elsewhere that came through this key: the window it belongs to, if it is one.
    pub(crate) fn reserve_window(&mut self, key: u32) -> Option<MwId> {
        let Some(KeyHolder::Window(index)) = self.keys.holder(key) else { return None };
        self.keys.windows.at_mut(index)?.in_flight += 1;
        self.keys.windows.at(index).map(|(mw, _)| mw)
    }

    /// It has completed.
    pub(crate) fn release_window_use(&mut self, mw: MwId) {
        let window = self.keys.windows.get_mut(mw).expect("an operation keeps its window");
        window.in_flight -= 1;
        if window.in_flight > 0 {
            return;
        }
        let waiters = core::mem::take(&mut window.waiters);
        if let WindowState::Leaving(_) = window.state {
            self.unbind(mw.index);
        }
        for waiter in waiters {
            self.wake(waiter);
        }
    }
}

/// Rights of a window are remote ones.
fn asked_rights(request: &SendRequest) -> Result<Access, Syndrome> {
    let remote = Access::REMOTE_READ.union(Access::REMOTE_WRITE).union(Access::REMOTE_ATOMIC);
    let known = remote.union(Access::ZERO_BASED).union(Access::FLUSH_GLOBAL);
    match u32::try_from(request.swap) {
        Ok(bits) if Access(bits).required().0 & !known.0 == 0 => Ok(Access(bits).required()),
        _ => Err(Syndrome::WindowRights),
    }
}
