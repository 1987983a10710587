//! Requests of a library that another end hears of: connect, accept, reject, establish, notify,
//! disconnect.
use crate::address::{is_datagram, service_id, status_of};
use crate::connection::{Connection, Path, State};
use crate::id::{Id, IdState};
use crate::requests::qkey_of;
use crate::sending::{ACK_DELAY, ack_timeout, header, transaction_id, with_header};
use crate::{Asked, Environment, Machine, Route};
use freeflow_protocol::cm::{CmEventBody, CmEventKind, CmReply, ConnectionParameters, PortSpace};
use freeflow_protocol::library::Handle;
use freeflow_verbs::{Instant, QpType, Qpn, VerbsError};
use freeflow_wire::cm::{IpHeader, reason};

/// Room for private data in each message (IBTA tables 106 to 120).
pub(crate) const REQ_BYTES: usize = 92;
pub(crate) const REP_BYTES: usize = 196;
pub(crate) const REJ_BYTES: usize = 148;
pub(crate) const SIDR_REQ_BYTES: usize = 216;
pub(crate) const SIDR_REP_BYTES: usize = 136;
/// Vendor ids of extended connection establishment have 24 bits.
const VENDOR_ID_MAX: u32 = 0x00ff_ffff;

type Answer = Result<Option<CmReply>, VerbsError>;

/// Bytes in front of the user's private data in requests of this port space.
pub(crate) fn header_bytes(port_space: PortSpace) -> usize {
    if port_space == PortSpace::Ib { 0 } else { IpHeader::BYTES }
}

/// Whether these can be said in a message with so much room for private data.
fn check(parameters: &ConnectionParameters, room: usize) -> Result<(), VerbsError> {
    let fits = parameters.private_data.len() <= room
        && parameters.qp_number <= Qpn::MASK
        && parameters.ece.vendor_id <= VENDOR_ID_MAX;
    if fits { Ok(()) } else { Err(VerbsError::InvalidArgument) }
}

impl Machine {
    /// Linux: `rdma_connect`.
    pub(crate) fn connect<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        handle: Handle,
        parameters: &ConnectionParameters,
    ) -> Answer {
        let id = self.ids.get(handle).ok_or(VerbsError::NotFound)?;
        let (IdState::RouteResolved, Some(route)) = (id.state, id.route) else {
            return Err(VerbsError::InvalidArgument);
        };
        if id.remote.gid.is_multicast() || id.qp_type == QpType::XrcReceive {
            return Err(VerbsError::InvalidArgument);
        }
        let datagram = is_datagram(id.qp_type);
        let room = if datagram { SIDR_REQ_BYTES } else { REQ_BYTES } - header_bytes(id.port_space);
        check(parameters, room)?;
        let is_allowed = env.allows(id.vnic, route.local, id.remote, Asked::ToBegin);
        let (port_space, header) = (id.port_space, header(id.local.gid, id.local.port, id.remote.gid));
        let number = self.new_number(env);
        let connection = active(handle, id, route, number, parameters);
        self.add_connection(number, connection);
        if let Some(id) = self.ids.get_mut(handle) {
            id.state = IdState::Connect;
        }
        if !is_allowed {
            // By an event: programs that wait for one don't look for an error here as well.
            let status = status_of(VerbsError::NotPermitted);
            self.fail(env, now, number, CmEventKind::Unreachable, status, CmEventBody::Nothing);
        } else if datagram {
            let data = with_header(port_space, header, &parameters.private_data);
            self.send_service_request(env, now, number, data);
        } else {
            let data = with_header(port_space, header, &parameters.private_data);
            self.send_request(env, now, number, parameters, data);
        }
        Ok(None)
    }

    /// Linux: `rdma_accept` with parameters. What can't be said refuses the request, as there.
    pub(crate) fn accept<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        handle: Handle,
        cookie: u64,
        parameters: &ConnectionParameters,
    ) -> Answer {
        let id = self.ids.get(handle).ok_or(VerbsError::NotFound)?;
        let state = id.connection.and_then(|number| self.connections.get(&number)).map(|c| c.state);
        let (IdState::Connect, Some(number), Some(state)) = (id.state, id.connection, state) else {
            return Err(VerbsError::InvalidArgument);
        };
        let done = match state {
            State::RequestReceived => self.accept_connection(env, now, number, parameters),
            State::ServiceRequested => self.accept_service(env, now, handle, number, parameters),
            _ => return Err(VerbsError::InvalidArgument),
        };
        match done {
            Ok(()) => {
                if let Some(id) = self.ids.get_mut(handle) {
                    id.cookie = Some(cookie);
                }
                Ok(None)
            }
            Err(error) => {
                let _ = self.reject(env, now, handle, &[], false);
                Err(error)
            }
        }
    }

    fn accept_connection<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        number: u32,
        parameters: &ConnectionParameters,
    ) -> Result<(), VerbsError> {
        check(parameters, REP_BYTES)?;
        self.become_state(number, State::ReplySent);
        let connection = self.connections.get_mut(&number).ok_or(VerbsError::NotFound)?;
        connection.local_qpn = parameters.qp_number;
        connection.responder_resources = parameters.responder_resources;
        connection.initiator_depth = parameters.initiator_depth;
        self.send_reply(env, now, number, parameters);
        Ok(())
    }

    fn accept_service<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        handle: Handle,
        number: u32,
        parameters: &ConnectionParameters,
    ) -> Result<(), VerbsError> {
        check(parameters, SIDR_REP_BYTES)?;
        let id = self.ids.get_mut(handle).ok_or(VerbsError::NotFound)?;
        let qkey = qkey_of(id, parameters.qkey)?;
        self.become_state(number, State::ServiceAnswered);
        let connection = self.connections.get_mut(&number).ok_or(VerbsError::NotFound)?;
        connection.local_qpn = parameters.qp_number;
        let timing = self.limits.timing(connection.path.link);
        let kept = timing.retry_interval.0 * (u64::from(timing.retry_count_max) + 1);
        self.set_timer(number, Some(now + freeflow_verbs::Duration(kept)));
        self.send_service_reply(env, number, qkey, parameters.ece, &parameters.private_data);
        Ok(())
    }

    /// Linux: `rdma_reject`.
    pub(crate) fn reject<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        handle: Handle,
        private_data: &[u8],
        ece: bool,
    ) -> Answer {
        let id = self.ids.get(handle).ok_or(VerbsError::NotFound)?;
        let number = id.connection.ok_or(VerbsError::InvalidArgument)?;
        let state = self.connections.get(&number).map(|connection| connection.state);
        let room = if is_datagram(id.qp_type) { SIDR_REP_BYTES } else { REJ_BYTES };
        if private_data.len() > room {
            return Err(VerbsError::InvalidArgument);
        }
        match state {
            Some(State::ServiceRequested) => self.send_service_refusal(env, number, private_data),
            Some(State::RequestSent) => self.send_withdrawal(env, number),
            Some(State::RequestReceived | State::ReplySent | State::ReplyReceived) => {
                let reason = if ece { reason::VENDOR_OPTION_NOT_SUPPORTED } else { reason::CONSUMER_DEFINED };
                self.send_reject(env, number, self.about(number), reason, private_data);
            }
            _ => return Err(VerbsError::InvalidArgument),
        }
        self.leave(env, now, number);
        Ok(None)
    }

    /// Linux: `rdma_accept` without parameters, on the active side.
    pub(crate) fn establish<E: Environment + ?Sized>(&mut self, env: &mut E, handle: Handle) -> Answer {
        let number = self.connection_in(handle, State::ReplyReceived).ok_or(VerbsError::InvalidArgument)?;
        self.get_ready(env, number);
        Ok(None)
    }

    fn get_ready<E: Environment + ?Sized>(&mut self, env: &mut E, number: u32) {
        self.become_state(number, State::Established);
        self.set_timer(number, None);
        self.send_ready(env, number);
    }

    /// The environment is done with the QP of an identifier whose peer agreed
    /// ([`Environment::prepares`]): it is ready to send, or it is left to the program's library.
    /// Nothing, if the connection has come to an end meanwhile.
    pub fn handle_prepared<E: Environment + ?Sized>(&mut self, env: &mut E, handle: Handle, is_ready: bool) {
        let Some(number) = self.connection_in(handle, State::ReplyReceived) else { return };
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let Some(agreed) = connection.withheld.take() else { return };
        let kind = if is_ready {
            self.get_ready(env, number);
            CmEventKind::Established
        } else {
            CmEventKind::ConnectResponse
        };
        self.notify_owner(env, handle, kind, 0, CmEventBody::Connection(*agreed));
    }

    /// Linux: `rdma_notify` with COMM_EST. There a connection that stands already is an error
    /// (EISCONN), here it is done.
    pub(crate) fn notify<E: Environment + ?Sized>(&mut self, env: &mut E, handle: Handle) -> Answer {
        if self.connection_in(handle, State::Established).is_some() {
            return Ok(None);
        }
        let number = self.connection_in(handle, State::ReplySent).ok_or(VerbsError::InvalidArgument)?;
        self.established(env, number);
        Ok(None)
    }

    /// The passive side's connection stands.
    pub(crate) fn established<E: Environment + ?Sized>(&mut self, env: &mut E, number: u32) {
        self.become_state(number, State::Established);
        self.set_timer(number, None);
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.message = None;
        if let Some(handle) = connection.id {
            self.notify_owner(env, handle, CmEventKind::Established, 0, CmEventBody::Nothing);
        }
    }

    /// Linux: `rdma_disconnect`. Done also if there is nothing to disconnect any more.
    pub(crate) fn disconnect<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, handle: Handle) -> Answer {
        let id = self.ids.get(handle).ok_or(VerbsError::NotFound)?;
        if !id.had_connection {
            return Err(VerbsError::InvalidArgument);
        }
        if let Some(number) = self.connection_in(handle, State::Established) {
            self.begin_disconnect(env, now, number);
        }
        Ok(None)
    }

    /// An identifier's connection, if it is in this state.
    fn connection_in(&self, handle: Handle, state: State) -> Option<u32> {
        let id = self.ids.get(handle).filter(|id| id.state == IdState::Connect)?;
        id.connection.filter(|number| self.connections.get(number).is_some_and(|c| c.state == state))
    }
}

/// The active side's state of a connection when it asks for it.
fn active(handle: Handle, id: &Id, route: Route, number: u32, parameters: &ConnectionParameters) -> Connection {
    let path = Path { link: route.link, scope: route.local.scope, local: route.local.gid, remote: id.remote.gid };
    let state = if is_datagram(id.qp_type) { State::ServiceAsked } else { State::RequestSent };
    Connection {
        transaction_id: transaction_id(number),
        service_id: service_id(id.port_space, id.remote.port),
        local_qpn: parameters.qp_number,
        rq_psn: id.psn,
        responder_resources: parameters.responder_resources,
        initiator_depth: parameters.initiator_depth,
        retry_count: parameters.retry_count.min(7),
        mtu: route.mtu,
        gid_index: route.gid_index,
        traffic_class: id.type_of_service.unwrap_or(0),
        ack_timeout: id.ack_timeout.unwrap_or_else(|| ack_timeout(ACK_DELAY, id.packet_life_time())),
        ..Connection::new(handle, id.vnic, state, path, id.qp_type)
    }
}
