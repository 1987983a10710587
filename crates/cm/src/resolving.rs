//! Where a destination is: `rdma_resolve_addr` and `rdma_resolve_route`.
//!
//! A known address is resolved at once, an unknown one may come: a container begins, another router
//! announces its addresses. As Linux waits for the answer to its ARP
//! (`drivers/infiniband/core/addr.c`), an identifier waits here until its time is over, which is
//! -ETIMEDOUT then. Nothing asks anybody: the environment says what is new, by
//! [`Machine::handle_new_address`] and [`Machine::handle_new_routes`], and
//! [`Machine::handle_timeout`] looks again for those that wait for it, so many a call.
use crate::address::{TIMED_OUT, is_ipv4, is_loopback, is_wildcard, status_of, wildcard_like};
use crate::environment::own_address;
use crate::id::IdState;
use crate::{Environment, Link, Machine, Route, ScopedGid, VnicRef};
use alloc::collections::{BTreeMap, BTreeSet};
use core::ops::Bound;
use freeflow_protocol::cm::{CmAddress, CmEventBody, CmEventKind, CmReply};
use freeflow_protocol::library::Handle;
use freeflow_verbs::{Duration, Gid, Instant, VerbsError};

/// Identifiers that one call looks for again; the others' turn comes at once afterwards.
const RETRIES_PER_CALL_MAX: usize = 1024;

/// Identifiers that wait for their destinations. Each identifier is here once at most, so there are
/// no more than those.
#[derive(Default)]
pub(crate) struct Resolving {
    timers: BTreeSet<(Instant, Handle)>,
    by_destination: BTreeMap<Gid, BTreeSet<Handle>>,
    /// Those whose destination may be known now.
    again: BTreeSet<Handle>,
    /// All from here on are to be looked for again.
    all_after: Option<(Instant, Handle)>,
}

impl Resolving {
    pub fn is_empty(&self) -> bool {
        self.timers.is_empty() && self.by_destination.is_empty() && self.again.is_empty() && self.all_after.is_none()
    }

    pub fn poll_timeout(&self) -> Option<Instant> {
        if self.again.is_empty() && self.all_after.is_none() {
            self.timers.first().map(|(at, _)| *at)
        } else {
            Some(Instant(0))
        }
    }

    fn enter(&mut self, handle: Handle, destination: Gid, until: Instant) {
        self.timers.insert((until, handle));
        self.by_destination.entry(destination).or_default().insert(handle);
    }

    fn leave(&mut self, handle: Handle, destination: Gid, until: Instant) {
        self.timers.remove(&(until, handle));
        self.again.remove(&handle);
        if let Some(waiting) = self.by_destination.get_mut(&destination) {
            waiting.remove(&handle);
            if waiting.is_empty() {
                self.by_destination.remove(&destination);
            }
        }
        if self.timers.is_empty() {
            self.all_after = None;
        }
    }

    /// The identifier to look for next, and whether it is the last time.
    fn next(&mut self, now: Instant) -> Option<(Handle, bool)> {
        if let Some(&(_, handle)) = self.timers.first().filter(|(until, _)| *until <= now) {
            return Some((handle, true));
        }
        if let Some(handle) = self.again.pop_first() {
            return Some((handle, false));
        }
        let after = self.all_after?;
        self.all_after = self.timers.range((Bound::Excluded(after), Bound::Unbounded)).next().copied();
        self.all_after.map(|(_, handle)| (handle, false))
    }
}

impl Machine {
    /// This address is somewhere now, or somewhere else.
    pub fn handle_new_address(&mut self, gid: Gid) {
        if let Some(waiting) = self.resolving.by_destination.get(&gid) {
            self.resolving.again.extend(waiting);
        }
    }

    /// There may be ways now where there were none: any addresses.
    pub fn handle_new_routes(&mut self) {
        if !self.resolving.timers.is_empty() {
            self.resolving.all_after = Some((Instant(0), 0));
        }
    }

    /// Linux: `rdma_resolve_addr`.
    pub(crate) fn resolve_address<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        handle: Handle,
        source: Option<CmAddress>,
        destination: CmAddress,
        timeout_ms: u32,
    ) -> Result<(), VerbsError> {
        let id = self.ids.get(handle).ok_or(VerbsError::NotFound)?;
        if id.state == IdState::Idle {
            let any = CmAddress { gid: wildcard_like(destination.gid), port: 0 };
            self.bind(env, handle, source.unwrap_or(any))?;
        }
        let id = self.ids.get_mut(handle).ok_or(VerbsError::NotFound)?;
        // An IPv6 socket address may hold an IPv4 address, so the IPv6 wildcard goes with both.
        let same_family = is_ipv4(id.local.gid) == is_ipv4(destination.gid)
            || id.local.gid.is_zero()
            || is_wildcard(destination.gid)
            || is_loopback(destination.gid);
        if id.state != IdState::Bound || !same_family {
            return Err(VerbsError::InvalidArgument);
        }
        id.state = IdState::AddressQuery;
        id.remote = destination;
        self.look(env, handle, until(now, timeout_ms), timeout_ms == 0);
        Ok(())
    }

    /// Linux: `rdma_resolve_route`.
    pub(crate) fn resolve_route<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        handle: Handle,
        timeout_ms: u32,
    ) -> Result<Option<CmReply>, VerbsError> {
        let id = self.ids.get_mut(handle).ok_or(VerbsError::NotFound)?;
        if id.state != IdState::AddressResolved {
            return Err(VerbsError::InvalidArgument);
        }
        id.state = IdState::RouteQuery;
        self.look(env, handle, until(now, timeout_ms), timeout_ms == 0);
        Ok(None)
    }

    /// For those that wait: whose time is over, and whose destination may be known.
    pub(crate) fn resolve_again<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant) {
        for _ in 0..RETRIES_PER_CALL_MAX {
            let Some((handle, is_last)) = self.resolving.next(now) else { return };
            let Some(until) = self.ids.get(handle).and_then(|id| id.resolves_until) else {
                debug_assert!(false, "who ends leaves");
                return;
            };
            self.look(env, handle, until, is_last);
        }
    }

    /// It does not wait any more, for whatever reason.
    pub(crate) fn stop_resolving(&mut self, handle: Handle) {
        let Some(id) = self.ids.get_mut(handle) else { return };
        if let Some(until) = id.resolves_until.take() {
            self.resolving.leave(handle, id.remote.gid, until);
        }
    }

    /// Looks for an identifier's destination. If nobody has it: waits, or fails if this is the last
    /// time.
    fn look<E: Environment + ?Sized>(&mut self, env: &mut E, handle: Handle, until: Instant, is_last: bool) {
        let Some(id) = self.ids.get_mut(handle) else { return };
        let is_route = id.state == IdState::RouteQuery;
        let from = Some(id.local.gid).filter(|gid| is_route || !is_wildcard(*gid));
        let found = route_to(env, id.vnic, from, id.remote.gid);
        if found == Err(VerbsError::Unreachable) && !is_last {
            if id.resolves_until.is_none() {
                id.resolves_until = Some(until);
                self.resolving.enter(handle, id.remote.gid, until);
            }
            return;
        }
        self.stop_resolving(handle);
        match found {
            Ok((route, remote)) => self.found(env, handle, route, remote, is_route),
            Err(error) => self.not_found(env, handle, error, is_route),
        }
    }

    fn found<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        handle: Handle,
        route: Route,
        remote: Gid,
        is_route: bool,
    ) {
        let Some(id) = self.ids.get_mut(handle) else { return };
        id.route = Some(route);
        let kind = if is_route {
            id.state = IdState::RouteResolved;
            CmEventKind::RouteResolved
        } else {
            (id.local.gid, id.remote.gid) = (route.local.gid, remote);
            id.state = IdState::AddressResolved;
            CmEventKind::AddressResolved
        };
        let body = id.cm_route().map_or(CmEventBody::Nothing, CmEventBody::Route);
        self.refresh_port_claim(handle);
        self.notify_owner(env, handle, kind, 0, body);
    }

    /// It may try again.
    fn not_found<E: Environment + ?Sized>(&mut self, env: &mut E, handle: Handle, error: VerbsError, is_route: bool) {
        let Some(id) = self.ids.get_mut(handle) else { return };
        if error == VerbsError::Unreachable {
            env.unreachable(id.vnic, id.remote.gid);
        }
        let kind = if is_route {
            id.state = IdState::AddressResolved;
            CmEventKind::RouteError
        } else {
            (id.state, id.remote) = (IdState::Bound, CmAddress::default());
            CmEventKind::AddressError
        };
        let status = if error == VerbsError::Unreachable { TIMED_OUT } else { status_of(error) };
        self.notify_owner(env, handle, kind, status, CmEventBody::Nothing);
    }
}

fn until(now: Instant, timeout_ms: u32) -> Instant {
    now + Duration::from_millis(timeout_ms.into())
}

/// The way to an address, and which address that is in the end: a wildcard and a loopback address
/// mean the vNIC itself. To a group one gets without a resolved route.
fn route_to<E: Environment + ?Sized>(
    env: &E,
    vnic: VnicRef,
    from: Option<Gid>,
    to: Gid,
) -> Result<(Route, Gid), VerbsError> {
    let itself = |place: Option<ScopedGid>| place.map(|place| place.gid).ok_or(VerbsError::AddressNotAvailable);
    let own = || from.map_or_else(|| itself(own_address(env, vnic, to)), Ok);
    if to.is_multicast() {
        let own = own()?;
        let route = env.route(vnic, Some(own), own)?;
        return Ok((Route { link: Link::Local, remote: to, ..route }, to));
    }
    let to = if is_wildcard(to) || is_loopback(to) { own()? } else { to };
    env.route(vnic, from, to).map(|route| (route, to))
}
