//! Requests of other machines: which listener they are for, and whether there is room for them.
use crate::address::{is_ipv4, is_wildcard, service_of};
use crate::connecting::header_bytes;
use crate::connection::{Connection, Path, PeerNumber, State};
use crate::id::{Id, IdState};
use crate::receive::Effect::{self, Refused, Taken};
use crate::sending::{ACK_DELAY, ack_timeout};
use crate::{Environment, Machine, Route, Scope};
use freeflow_protocol::cm::{CmAddress, CmEventBody, CmEventKind, ConnectionParameters, Ece, PortSpace};
use freeflow_protocol::library::Handle;
use freeflow_verbs::{Gid, Instant, PathMtu, Psn, QpType};
use freeflow_wire::cm::{About, IpHeader, Mad, Req, SidrReq, Transport, reason, sidr_status};

/// A request that found its listener.
struct Asked<'a> {
    listener: Handle,
    route: Route,
    /// The sender, as its header has it.
    remote: CmAddress,
    local: CmAddress,
    /// The user's.
    private_data: &'a [u8],
}

/// Why a request is not put to any program.
enum Refusal {
    /// With this reason of a REJ.
    Say(u16),
    /// Not a word: it may come again when there is room, or it is forged.
    Drop,
}

impl Machine {
    pub(crate) fn handle_req<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        path: &Path,
        mad: &Mad,
        req: &Req,
    ) -> Effect {
        if let Some(number) = self.by_remote_id.get(&path.number(req.local_comm_id)).copied() {
            self.answer_again(env, path, mad, req, number);
            return Refused;
        }
        if req.local_comm_id == 0 {
            return Refused;
        }
        if let Some(stale) = self.stale(path, req.local_qpn) {
            self.refuse(env, path, mad, (0, req.local_comm_id), About::Req, reason::STALE_CONNECTION);
            self.end_stale(env, now, stale);
            return Refused;
        }
        match self.admit(env, now, path, mad, req) {
            Ok(()) => Taken,
            Err(Refusal::Drop) => Refused,
            Err(Refusal::Say(reason)) => {
                self.refuse(env, path, mad, (0, req.local_comm_id), About::Req, reason);
                Refused
            }
        }
    }

    /// A REQ that came before: its answer got lost, or is not given yet.
    fn answer_again<E: Environment + ?Sized>(&mut self, env: &mut E, path: &Path, mad: &Mad, req: &Req, number: u32) {
        match self.connections.get(&number).map(|connection| connection.state) {
            Some(State::RequestReceived) => self.send_mra(env, number, About::Req),
            Some(State::ReplySent) => self.send_again(env, number),
            Some(State::TimeWait) => {
                self.refuse(env, path, mad, (0, req.local_comm_id), About::Req, reason::STALE_CONNECTION);
            }
            // It was accepted, and then its program thought better of it.
            Some(State::DisconnectSent) => {
                self.refuse(env, path, mad, (0, req.local_comm_id), About::Req, reason::CONSUMER_DEFINED);
            }
            _ => {}
        }
    }

    fn admit<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        path: &Path,
        mad: &Mad,
        req: &Req,
    ) -> Result<(), Refusal> {
        if req.primary_local_gid != path.remote.0 || req.primary_remote_gid != path.local.0 {
            return Err(Refusal::Say(reason::INVALID_GID));
        }
        let qp_type = match req.transport() {
            Some(Transport::Rc) => QpType::Rc,
            Some(Transport::Uc) => QpType::Uc,
            Some(Transport::Xrc) => QpType::XrcReceive,
            Some(Transport::Rd) | None => return Err(Refusal::Say(reason::INVALID_TRANSPORT)),
        };
        let asked = self.find(env, path, req.service_id, &req.private_data, qp_type)?;
        let mtu = PathMtu::from_number(req.path_mtu.into()).filter(|mtu| *mtu <= asked.route.mtu);
        let mtu = mtu.ok_or(Refusal::Say(reason::INVALID_MTU))?;
        let handle = self.admit_id(env, path, &asked, qp_type)?;
        if let Some(id) = self.ids.get_mut(handle) {
            (id.traffic_class, id.flow_label) = (req.primary_traffic_class, req.primary_flow_label);
        }
        let psn = self.ids.get(handle).map_or(0, |id| id.psn);
        let number = self.new_number(env);
        let connection = Connection {
            remote_id: req.local_comm_id,
            transaction_id: mad.transaction_id,
            service_id: req.service_id,
            remote_qpn: req.local_qpn,
            rq_psn: psn,
            sq_psn: req.starting_psn,
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            mtu,
            gid_index: asked.route.gid_index,
            traffic_class: req.primary_traffic_class,
            flow_label: req.primary_flow_label,
            ack_timeout: ack_timeout(ACK_DELAY, req.primary_ack_timeout.saturating_sub(1)),
            timer: Some(now + self.limits.accept_wait_max),
            ..Connection::new(handle, asked_vnic(self, handle), State::RequestReceived, *path, qp_type)
        };
        self.add_connection(number, connection);
        self.know_peer(number);
        let parameters = ConnectionParameters {
            private_data: asked.private_data.to_vec(),
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            flow_control: req.flow_control,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            srq: req.srq,
            qp_number: req.local_qpn,
            qkey: 0,
            ece: Ece { vendor_id: req.vendor_id, options: mad.attribute_modifier },
        };
        self.ask(env, asked.listener, handle, parameters, qp_type);
        Ok(())
    }

    pub(crate) fn handle_sidr_req<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        path: &Path,
        mad: &Mad,
        request: &SidrReq,
    ) -> Effect {
        let key = path.number(request.request_id);
        if let Some(number) = self.by_request_id.get(&key).copied() {
            self.send_again(env, number);
            return Refused;
        }
        match self.admit_service(env, now, path, key, mad, request) {
            Ok(()) => Taken,
            Err(Refusal::Drop) => Refused,
            Err(Refusal::Say(reason)) => {
                let status = match reason {
                    reason::INVALID_SERVICE_ID => sidr_status::NOT_SUPPORTED,
                    _ => sidr_status::REJECTED,
                };
                self.refuse_service(env, path, mad, request, status);
                Refused
            }
        }
    }

    fn admit_service<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        path: &Path,
        key: PeerNumber,
        mad: &Mad,
        request: &SidrReq,
    ) -> Result<(), Refusal> {
        let asked = self.find(env, path, request.service_id, &request.private_data, QpType::Ud)?;
        let handle = self.admit_id(env, path, &asked, QpType::Ud)?;
        let number = self.new_number(env);
        let connection = Connection {
            remote_id: request.request_id,
            transaction_id: mad.transaction_id,
            service_id: request.service_id,
            mtu: asked.route.mtu,
            gid_index: asked.route.gid_index,
            has_remote_id: true,
            timer: Some(now + self.limits.accept_wait_max),
            ..Connection::new(handle, asked_vnic(self, handle), State::ServiceRequested, *path, QpType::Ud)
        };
        self.add_connection(number, connection);
        self.by_request_id.insert(key, number);
        let parameters =
            ConnectionParameters { private_data: asked.private_data.to_vec(), ..ConnectionParameters::default() };
        self.ask(env, asked.listener, handle, parameters, QpType::Ud);
        Ok(())
    }

    /// Puts a request to the listener's program.
    fn ask<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        listener: Handle,
        handle: Handle,
        parameters: ConnectionParameters,
        qp_type: QpType,
    ) {
        let Some(route) = self.ids.get(handle).and_then(Id::cm_route) else { return };
        let body = CmEventBody::Request { id: handle, route, parameters, qp_type };
        self.notify_owner(env, listener, CmEventKind::ConnectRequest, 0, body);
    }

    /// The listener of a service, if the sender may speak to it, and says who it is.
    fn find<'a, E: Environment + ?Sized>(
        &self,
        env: &E,
        path: &Path,
        service_id: u64,
        private_data: &'a [u8],
        qp_type: QpType,
    ) -> Result<Asked<'a>, Refusal> {
        const NO_SERVICE: Refusal = Refusal::Say(reason::INVALID_SERVICE_ID);
        let (port_space, port) = service_of(service_id).ok_or(NO_SERVICE)?;
        let vnic = match path.scope {
            Scope::Network(_) => env.vnic_at(path.place()),
            Scope::External => self.ports.external_owner(path.place(), port_space, port),
        };
        let vnic = vnic.ok_or(NO_SERVICE)?;
        let (source_port, private_data) = header_of(path, port_space, private_data)?;
        let candidates = self.ports.listeners((vnic, port_space, port));
        let mut listeners =
            candidates.filter(|handle| self.ids.get(*handle).is_some_and(|id| serves(id, path, path.local)));
        let listener = listeners.next().ok_or(NO_SERVICE)?;
        // Linux asks for the type after it has found the listener, and says so with this reason.
        if self.ids.get(listener).is_some_and(|id| id.qp_type != qp_type) {
            return Err(Refusal::Say(reason::CONSUMER_DEFINED));
        }
        let remote = CmAddress { gid: path.remote, port: source_port };
        if !env.allows(vnic, path.place(), remote, crate::Asked::ToAnswer) {
            return Err(NO_SERVICE);
        }
        let route = env.route(vnic, Some(path.local), path.remote).map_err(|_| Refusal::Say(reason::INVALID_GID))?;
        // A sender elsewhere than where the answer would go is not the one it claims to be.
        if route.link != path.link || route.local != path.place() {
            return Err(Refusal::Drop);
        }
        let local = CmAddress { gid: path.local, port };
        Ok(Asked { listener, route, remote, local, private_data })
    }

    /// An identifier for a request, if there is room.
    fn admit_id<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        path: &Path,
        asked: &Asked<'_>,
        qp_type: QpType,
    ) -> Result<Handle, Refusal> {
        let listener = self.ids.get(asked.listener).ok_or(Refusal::Drop)?;
        let full = listener.requests.len() >= self.limits.backlog(listener.backlog) as usize;
        let flood =
            self.half_open.get(&path.peer()).is_some_and(|count| *count >= self.limits.half_open_per_remote_max);
        if full || flood {
            self.overflows += 1;
            return Err(Refusal::Drop);
        }
        let mut id = Id::new(listener.owner, listener.vnic, listener.channel, listener.port_space, qp_type);
        id.state = IdState::Connect;
        (id.local, id.remote, id.route) = (asked.local, asked.remote, Some(asked.route));
        id.listener = Some(asked.listener);
        id.psn = env.random() & Psn::MASK;
        let Ok(handle) = self.add_id(id) else {
            self.overflows += 1;
            return Err(Refusal::Drop);
        };
        if let Some(listener) = self.ids.get_mut(asked.listener) {
            listener.requests.insert(handle);
        }
        Ok(handle)
    }
}

fn asked_vnic(machine: &Machine, handle: Handle) -> crate::VnicRef {
    machine.ids.get(handle).expect("it was just made").vnic
}

/// Whether a listener is there for who speaks to `gid`.
fn serves(id: &Id, path: &Path, gid: Gid) -> bool {
    if id.state != IdState::Listening {
        return false;
    }
    if !is_wildcard(id.local.gid) {
        return id.local.gid == gid;
    }
    // At the external address a wildcard listener is only if it got the port there.
    let there = path.scope != Scope::External || id.external_port.is_some_and(|place| place == path.place());
    there && (!id.is_af_only(id.local.gid) || is_ipv4(id.local.gid) == is_ipv4(gid))
}

/// The sender's port, and the user's private data. Of the IB port space there need be no header;
/// Linux's programs that use it by IP addresses send one.
fn header_of<'a>(path: &Path, port_space: PortSpace, private_data: &'a [u8]) -> Result<(u16, &'a [u8]), Refusal> {
    let names_both = |header: &IpHeader| header.source == path.remote.0 && header.destination == path.local.0;
    match (IpHeader::decode(private_data), header_bytes(port_space)) {
        (Some(header), _) if names_both(&header) => Ok((header.source_port, &private_data[IpHeader::BYTES..])),
        (_, 0) => Ok((0, private_data)),
        (Some(_), _) => Err(Refusal::Say(reason::INVALID_GID)),
        (None, _) => Err(Refusal::Say(reason::CONSUMER_DEFINED)),
    }
}
