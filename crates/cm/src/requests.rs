//! Requests of a library that need no other end: identifiers, addresses, ports, listeners, options,
//! multicast groups.
//!
//! Which call is right in which state, and what it says otherwise, is Linux's
//! (`drivers/infiniband/core/cma.c`, `ucma.c`).
use crate::address::{is_datagram, is_ipv4, is_loopback, is_wildcard};
use crate::environment::own_address;
use crate::id::{HOP_LIMIT, Id, IdState};
use crate::limits::decrement;
use crate::ports::PortClaim;
use crate::{Environment, EventChannel, Machine, Owner, Scope, ScopedGid, VnicRef};
use freeflow_protocol::cm::{CmAddress, CmEventBody, CmEventKind, CmOption, CmReply, CmRequest, PortSpace};
use freeflow_protocol::library::Handle;
use freeflow_verbs::{AddressHandleAttributes, Gid, GlobalRoute, Instant, Psn, QpType, Qpn, VerbsError};

impl Machine {
    /// Does what a library asks. `None`: done, and there is nothing to report but that.
    /// CreateChannel, DestroyChannel and Repost are not the machine's.
    ///
    /// # Errors
    /// As Linux's calls, by the request and the identifier's state. NotFound: not the owner's
    /// identifier. NotSupported: not the machine's request.
    pub fn handle_request<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        owner: Owner,
        vnic: VnicRef,
        request: &CmRequest,
    ) -> Result<Option<CmReply>, VerbsError> {
        if let Some(handle) = handle_in(request) {
            self.id_of(owner, handle)?;
            if !matches!(request, CmRequest::DestroyId { .. } | CmRequest::MigrateId { .. }) {
                self.touch(handle);
            }
        }
        match request {
            CmRequest::CreateChannel | CmRequest::DestroyChannel { .. } | CmRequest::Repost { .. } => {
                Err(VerbsError::NotSupported)
            }
            CmRequest::CreateId { channel, port_space, qp_type, cookie } => {
                let mut id = Id::new(owner, vnic, *channel, *port_space, *qp_type);
                (id.cookie, id.psn) = (Some(*cookie), env.random() & Psn::MASK);
                self.add_id(id).map(|id| Some(CmReply::Id { id }))
            }
            CmRequest::DestroyId { id } => Ok(Some(CmReply::Destroyed { event_count: self.destroy(env, now, *id) })),
            CmRequest::MigrateId { id, channel } => {
                self.migrate(*id, *channel);
                Ok(None)
            }
            CmRequest::Bind { id, address } => {
                self.bind(env, *id, *address)?;
                self.bound(*id)
            }
            CmRequest::ResolveAddress { id, source, destination, timeout_ms } => {
                self.resolve_address(env, now, *id, *source, *destination, *timeout_ms)?;
                self.bound(*id)
            }
            CmRequest::ResolveRoute { id, timeout_ms } => self.resolve_route(env, now, *id, *timeout_ms),
            CmRequest::Listen { id, backlog } => {
                self.listen(env, *id, *backlog)?;
                self.bound(*id)
            }
            CmRequest::Connect { id, parameters } => self.connect(env, now, *id, parameters),
            CmRequest::Accept { id, cookie, parameters } => self.accept(env, now, *id, *cookie, parameters),
            CmRequest::Reject { id, private_data, ece } => self.reject(env, now, *id, private_data, *ece),
            CmRequest::Establish { id } => self.establish(env, *id),
            CmRequest::Notify { id } => self.notify(env, *id),
            CmRequest::Disconnect { id } => self.disconnect(env, now, *id),
            CmRequest::InitQpAttributes { id, state } => self.init_qp_attributes(*id, *state).map(Some),
            CmRequest::JoinMulticast { id, address, cookie, .. } => self.join_group(env, *id, *address, *cookie),
            CmRequest::LeaveMulticast { id, address } => self.leave_group(*id, *address),
            CmRequest::SetOption { id, option } => self.set_option(*id, *option),
        }
    }

    fn bound(&self, handle: Handle) -> Result<Option<CmReply>, VerbsError> {
        let id = self.ids.get(handle).ok_or(VerbsError::NotFound)?;
        Ok(Some(CmReply::Bound { local: id.local }))
    }

    /// A request that nobody has read goes with its listener, by a call of its own: which ones
    /// those are the library knows. They stay the listener's by that. One that goes anywhere else
    /// has been touched.
    fn migrate(&mut self, handle: Handle, channel: EventChannel) {
        let listener = self.ids.get(handle).and_then(|id| id.listener).and_then(|listener| self.ids.get(listener));
        if listener.is_none_or(|listener| listener.channel != channel) {
            self.touch(handle);
        }
        self.change_channel(handle, channel);
    }

    /// Linux: `rdma_bind_addr`. A loopback address is the vNIC's own.
    pub(crate) fn bind<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        handle: Handle,
        address: CmAddress,
    ) -> Result<(), VerbsError> {
        let id = self.ids.get(handle).ok_or(VerbsError::NotFound)?;
        if id.state != IdState::Idle || (id.port_space == PortSpace::Ipoib && !is_wildcard(address.gid)) {
            return Err(VerbsError::InvalidArgument);
        }
        let (vnic, port_space) = (id.vnic, id.port_space);
        let place = address_of(env, vnic, address.gid)?;
        let gid = place.map_or(address.gid, |place| place.gid);
        let external = place.filter(|place| place.scope == Scope::External);
        let port = if address.port == 0 {
            let port = self.ports.any(vnic, port_space, external, || env.random());
            port.ok_or(VerbsError::AddressNotAvailable)?
        } else {
            let wanted = PortClaim { gid, af_only: id.is_af_only(gid), reuse: id.reuse_address, listening: false };
            self.ports.check((vnic, port_space, address.port), wanted, None)?;
            address.port
        };
        if external.is_some_and(|place| !self.ports.reserve_external(place, port_space, port, vnic)) {
            return Err(VerbsError::AddressInUse);
        }
        let id = self.ids.get_mut(handle).ok_or(VerbsError::NotFound)?;
        (id.local, id.external_port) = (CmAddress { gid, port }, external);
        id.af_only.get_or_insert(is_ipv4(address.gid));
        id.state = IdState::Bound;
        let port_claim = id.port_claim();
        id.port_claim = Some(port_claim);
        self.ports.enter(id.port_key(), handle, port_claim);
        Ok(())
    }

    /// Linux: `rdma_listen`. A listener at a wildcard also gets the port at the vNIC's external
    /// address, if nobody has it there.
    fn listen<E: Environment + ?Sized>(&mut self, env: &mut E, handle: Handle, backlog: u32) -> Result<(), VerbsError> {
        if self.ids.get(handle).is_some_and(|id| id.state == IdState::Idle) {
            let any = Gid::from_ip(core::net::Ipv4Addr::UNSPECIFIED.into());
            self.bind(env, handle, CmAddress { gid: any, port: 0 })?;
        }
        let id = self.ids.get(handle).ok_or(VerbsError::NotFound)?;
        if id.state != IdState::Bound {
            return Err(VerbsError::InvalidArgument);
        }
        if id.reuse_address {
            self.ports.check(id.port_key(), PortClaim { reuse: false, ..id.port_claim() }, id.port_claim)?;
        }
        let (vnic, port_space, local) = (id.vnic, id.port_space, id.local);
        let mut external = id.external_port;
        if is_wildcard(local.gid) {
            let place = env.addresses(vnic).into_iter().flatten().find(|place| place.scope == Scope::External);
            external = place.filter(|place| self.ports.reserve_external(*place, port_space, local.port, vnic));
        }
        let id = self.ids.get_mut(handle).ok_or(VerbsError::NotFound)?;
        (id.state, id.backlog, id.external_port) = (IdState::Listening, backlog, external);
        self.refresh_port_claim(handle);
        Ok(())
    }

    /// Linux: `rdma_join_multicast`. The group of an IPv4 address over RoCE v2 is that address,
    /// mapped; so are IPv6 ones.
    fn join_group<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        handle: Handle,
        address: Gid,
        cookie: u64,
    ) -> Result<Option<CmReply>, VerbsError> {
        let limit = self.limits.memberships_per_id_max as usize;
        let id = self.ids.get_mut(handle).ok_or(VerbsError::NotFound)?;
        let right_state = matches!(id.state, IdState::Bound | IdState::AddressResolved);
        if !right_state || is_wildcard(id.local.gid) || !is_datagram(id.qp_type) || !address.is_multicast() {
            return Err(VerbsError::InvalidArgument);
        }
        let held = self.memberships.get(&id.vnic).copied().unwrap_or(0);
        if id.memberships.len() >= limit || held >= self.limits.memberships_per_vnic_max {
            return Err(VerbsError::NoMemory);
        }
        let gid_index =
            env.addresses(id.vnic).iter().position(|place| place.is_some_and(|place| place.gid == id.local.gid));
        let gid_index = gid_index.ok_or(VerbsError::AddressNotAvailable)? as u8;
        let qkey = qkey_of(id, 0)?;
        id.memberships.push((address, cookie));
        *self.memberships.entry(id.vnic).or_default() += 1;
        let grh = GlobalRoute {
            dgid: address,
            flow_label: 0,
            sgid_index: gid_index,
            hop_limit: HOP_LIMIT,
            traffic_class: id.type_of_service.unwrap_or(0),
        };
        let address = AddressHandleAttributes { grh: Some(grh), port: 1, ..AddressHandleAttributes::default() };
        let body = CmEventBody::Datagram { address, qp_number: Qpn::MULTICAST.0, qkey, private_data: [].into() };
        self.notify_as(env, handle, cookie, CmEventKind::MulticastJoin, body);
        Ok(None)
    }

    fn leave_group(&mut self, handle: Handle, address: Gid) -> Result<Option<CmReply>, VerbsError> {
        let id = self.ids.get_mut(handle).ok_or(VerbsError::NotFound)?;
        let place = id.memberships.iter().position(|(group, _)| *group == address).ok_or(VerbsError::NotFound)?;
        id.memberships.remove(place);
        decrement(&mut self.memberships, id.vnic);
        Ok(None)
    }

    fn set_option(&mut self, handle: Handle, option: CmOption) -> Result<Option<CmReply>, VerbsError> {
        let id = self.ids.get_mut(handle).ok_or(VerbsError::NotFound)?;
        let right = match option {
            CmOption::TypeOfService(_) => true,
            CmOption::ReuseAddress(reuse) => id.state == IdState::Idle || (reuse && id.state != IdState::Listening),
            CmOption::AddressFamilyOnly(_) => matches!(id.state, IdState::Idle | IdState::Bound),
            CmOption::AckTimeout(timeout) => timeout < 32 && matches!(id.qp_type, QpType::Rc | QpType::XrcSend),
        };
        if !right {
            return Err(VerbsError::InvalidArgument);
        }
        match option {
            CmOption::TypeOfService(value) => id.type_of_service = Some(value),
            CmOption::ReuseAddress(reuse) => id.reuse_address = reuse,
            CmOption::AddressFamilyOnly(only) => id.af_only = Some(only),
            CmOption::AckTimeout(timeout) => id.ack_timeout = Some(timeout),
        }
        self.refresh_port_claim(handle);
        Ok(None)
    }
}

/// The identifier that a request is about.
fn handle_in(request: &CmRequest) -> Option<Handle> {
    match request {
        CmRequest::CreateChannel
        | CmRequest::DestroyChannel { .. }
        | CmRequest::Repost { .. }
        | CmRequest::CreateId { .. } => None,
        CmRequest::DestroyId { id }
        | CmRequest::MigrateId { id, .. }
        | CmRequest::Bind { id, .. }
        | CmRequest::ResolveAddress { id, .. }
        | CmRequest::ResolveRoute { id, .. }
        | CmRequest::Listen { id, .. }
        | CmRequest::Connect { id, .. }
        | CmRequest::Accept { id, .. }
        | CmRequest::Reject { id, .. }
        | CmRequest::Establish { id }
        | CmRequest::Notify { id }
        | CmRequest::Disconnect { id }
        | CmRequest::InitQpAttributes { id, .. }
        | CmRequest::JoinMulticast { id, .. }
        | CmRequest::LeaveMulticast { id, .. }
        | CmRequest::SetOption { id, .. } => Some(*id),
    }
}

/// Which of the vNIC's addresses this is. `None`: a wildcard.
fn address_of<E: Environment + ?Sized>(env: &E, vnic: VnicRef, gid: Gid) -> Result<Option<ScopedGid>, VerbsError> {
    if is_wildcard(gid) {
        return Ok(None);
    }
    let place = if is_loopback(gid) {
        own_address(env, vnic, gid)
    } else {
        env.addresses(vnic).into_iter().flatten().find(|place| place.gid == gid)
    };
    place.map(Some).ok_or(VerbsError::AddressNotAvailable)
}

/// The Q_Key of a datagram service or a group: what was asked for, what it has already, or its port
/// space's.
pub(crate) fn qkey_of(id: &mut Id, asked: u32) -> Result<u32, VerbsError> {
    if id.qkey != 0 {
        return if asked == 0 || asked == id.qkey { Ok(id.qkey) } else { Err(VerbsError::InvalidArgument) };
    }
    id.qkey = match (asked, id.port_space) {
        (0, PortSpace::Udp | PortSpace::Ib) => crate::address::QKEY_DEFAULT,
        (asked, _) => asked,
    };
    Ok(id.qkey)
}
