//! Messages of other machines (IBTA 12.9), but for new requests, which are in `receive_request`.
//!
//! Nobody but the other end of a connection has a say in it: a message must come by its link,
//! between its addresses, and name the communication ids of both ends, as far as its sender can
//! know them. All else has no effect, and is counted.
use crate::address::INVALID;
use crate::attributes::address_of;
use crate::connecting::{REJ_BYTES, REP_BYTES};
use crate::connection::{Path, State};
use crate::requests::qkey_of;
use crate::{Environment, Machine, Packet};
use alloc::boxed::Box;
use freeflow_protocol::cm::{CmEventBody, CmEventKind, ConnectionParameters, Ece};
use freeflow_verbs::{Duration, Instant, QpType};
use freeflow_wire::cm::{About, Drep, Dreq, Lap, Mad, Message, Mra, Rej, Rep, Rtu, SidrRep, reason, sidr_status};

/// Whether a message had an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Taken,
    Refused,
}

use Effect::{Refused, Taken};

impl Machine {
    /// Takes a message that came by some link. One that makes no sense, or that its sender may not
    /// send, is counted and has no effect.
    pub fn handle_packet<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, packet: Packet<'_>) {
        let Ok(mad) = Mad::decode(packet.mad) else {
            self.malformed += 1;
            return;
        };
        let path = Path::of(&packet);
        let index = mad.message.kind().index();
        self.messages[index].received += 1;
        let effect = match &mad.message {
            Message::Req(req) => self.handle_req(env, now, &path, &mad, req),
            Message::SidrReq(request) => self.handle_sidr_req(env, now, &path, &mad, request),
            Message::Rep(rep) => self.handle_rep(env, now, &path, &mad, rep),
            Message::Rtu(rtu) => self.handle_rtu(env, &path, &mad, rtu),
            Message::Rej(rej) => self.handle_rej(env, now, &path, rej),
            Message::Mra(mra) => self.handle_mra(now, &path, mra),
            Message::Dreq(dreq) => self.handle_dreq(env, now, &path, &mad, dreq),
            Message::Drep(drep) => self.handle_drep(env, now, &path, drep),
            Message::SidrRep(reply) => self.handle_sidr_rep(env, now, &path, reply),
            Message::Lap(lap) => self.handle_lap(env, &path, &mad, lap),
            // An answer to what is never asked here.
            Message::Apr(_) => Refused,
        };
        if effect == Refused {
            self.messages[index].refused += 1;
        }
    }

    /// The state of a connection, if the packet's sender is its other end; `None` in place of its
    /// id: it can't know it yet.
    fn state_for(&self, path: &Path, number: u32, remote_id: Option<u32>) -> Option<State> {
        let connection = self.connections.get(&number).filter(|connection| connection.path == *path)?;
        if remote_id.is_some_and(|id| id != connection.remote_id) {
            return None;
        }
        Some(connection.state)
    }

    fn handle_rep<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        path: &Path,
        mad: &Mad,
        rep: &Rep,
    ) -> Effect {
        let number = rep.remote_comm_id;
        match self.state_for(path, number, None) {
            Some(State::RequestSent) => self.take_reply(env, now, path, mad, rep),
            Some(state) if self.state_for(path, number, Some(rep.local_comm_id)).is_some() => {
                // The answer got lost, or our program has not given it yet.
                match state {
                    State::Established => self.send_ready(env, number),
                    State::ReplyReceived => self.send_mra(env, number, About::Rep),
                    _ => {}
                }
                Refused
            }
            None => {
                // Nobody wants it any more: the other end need not ask again. If the number is
                // another's, its sender gets the same answer, and does not learn that.
                let ids = (number, rep.local_comm_id);
                self.refuse(env, path, mad, ids, About::Rep, reason::INVALID_COMM_ID);
                Refused
            }
            _ => Refused,
        }
    }

    fn take_reply<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        path: &Path,
        mad: &Mad,
        rep: &Rep,
    ) -> Effect {
        let number = rep.remote_comm_id;
        let remote = path.number(rep.local_comm_id);
        if rep.local_comm_id == 0 || self.by_remote_id.contains_key(&remote) {
            return Refused;
        }
        let Some(connection) = self.connections.get_mut(&number) else { return Refused };
        let remote_qpn = if connection.qp_type == QpType::XrcSend { rep.local_eecn } else { rep.local_qpn };
        connection.remote_id = rep.local_comm_id;
        if let Some(stale) = self.stale(path, remote_qpn) {
            self.send_reject(env, number, About::Rep, reason::STALE_CONNECTION, &[]);
            self.fail(env, now, number, CmEventKind::Rejected, reason::STALE_CONNECTION.into(), nothing(REJ_BYTES));
            self.end_stale(env, now, stale);
            return Taken;
        }
        self.become_state(number, State::ReplyReceived);
        let Some(connection) = self.connections.get_mut(&number) else { return Refused };
        connection.message = None;
        connection.remote_qpn = remote_qpn;
        connection.sq_psn = rep.starting_psn;
        connection.responder_resources = rep.initiator_depth;
        connection.initiator_depth = rep.responder_resources;
        connection.rnr_retry_count = rep.rnr_retry_count;
        connection.ack_timeout =
            crate::sending::ack_timeout(rep.target_ack_delay, connection.ack_timeout.saturating_sub(1));
        let handle = connection.id;
        self.know_peer(number);
        self.set_timer(number, Some(now + self.limits.establish_wait_max));
        let parameters = ConnectionParameters {
            private_data: rep.private_data[..REP_BYTES].to_vec(),
            responder_resources: rep.initiator_depth,
            initiator_depth: rep.responder_resources,
            flow_control: rep.flow_control,
            rnr_retry_count: rep.rnr_retry_count,
            srq: rep.srq,
            qp_number: remote_qpn,
            ece: Ece { vendor_id: rep.vendor_id(), options: mad.attribute_modifier },
            ..ConnectionParameters::default()
        };
        let Some(handle) = handle else { return Taken };
        if self.ids.get(handle).is_some_and(|id| env.prepares(id.owner, handle, parameters.ece)) {
            if let Some(connection) = self.connections.get_mut(&number) {
                connection.withheld = Some(Box::new(parameters));
            }
        } else {
            self.notify_owner(env, handle, CmEventKind::ConnectResponse, 0, CmEventBody::Connection(parameters));
        }
        Taken
    }

    /// The peer's numbers go into the tables.
    pub(crate) fn know_peer(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let path = connection.path;
        connection.has_remote_id = true;
        self.by_remote_id.insert(path.number(connection.remote_id), number);
        if is_connectable(connection.remote_qpn) {
            connection.has_remote_qpn = true;
            self.by_remote_qpn.insert(path.number(connection.remote_qpn), number);
        }
    }

    /// A connection with this very QP of the peer: one that the peer has forgotten (IBTA
    /// 12.9.8.3.1).
    pub(crate) fn stale(&self, path: &Path, remote_qpn: u32) -> Option<u32> {
        if !is_connectable(remote_qpn) {
            return None;
        }
        self.by_remote_qpn.get(&path.number(remote_qpn)).copied()
    }

    pub(crate) fn end_stale<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, number: u32) {
        if self.connections.get(&number).is_some_and(|connection| connection.state == State::Established) {
            self.begin_disconnect(env, now, number);
        }
    }

    fn handle_rtu<E: Environment + ?Sized>(&mut self, env: &mut E, path: &Path, mad: &Mad, rtu: &Rtu) -> Effect {
        match self.state_for(path, rtu.remote_comm_id, Some(rtu.local_comm_id)) {
            Some(State::ReplySent) => {
                self.established(env, rtu.remote_comm_id);
                Taken
            }
            // The other end must not believe that it stands. If it does not, since this is late, a
            // REJ does no harm.
            Some(State::TimeWait) | None => {
                let ids = (rtu.remote_comm_id, rtu.local_comm_id);
                self.refuse(env, path, mad, ids, About::Other, reason::INVALID_COMM_ID);
                Refused
            }
            Some(_) => Refused,
        }
    }

    /// Which connection a REJ is about: its sender may not know our id, if it gave up, nor we its,
    /// if it refuses a request.
    fn rejected(&self, path: &Path, rej: &Rej) -> Option<u32> {
        if rej.reason == reason::TIMEOUT && rej.remote_comm_id == 0 {
            return self.by_remote_id.get(&path.number(rej.local_comm_id)).copied();
        }
        let number = rej.remote_comm_id;
        let connection = self.connections.get(&number)?;
        let knows = if connection.remote_id == 0 { None } else { Some(rej.local_comm_id) };
        self.state_for(path, number, knows).map(|_| number)
    }

    fn handle_rej<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, path: &Path, rej: &Rej) -> Effect {
        let Some(number) = self.rejected(path, rej) else { return Refused };
        let Some(state) = self.state_for(path, number, None) else { return Refused };
        match state {
            State::RequestSent | State::ReplySent | State::RequestReceived | State::ReplyReceived => {
                let private_data = rej.private_data.to_vec();
                let body = CmEventBody::Connection(ConnectionParameters { private_data, ..Default::default() });
                self.fail(env, now, number, CmEventKind::Rejected, rej.reason.into(), body);
                Taken
            }
            // It stood for us only.
            State::Established | State::DisconnectSent => {
                self.disconnected(env, now, number, 0);
                Taken
            }
            State::TimeWait | State::ServiceAsked | State::ServiceRequested | State::ServiceAnswered => Refused,
        }
    }

    fn handle_mra(&mut self, now: Instant, path: &Path, mra: &Mra) -> Effect {
        let number = mra.remote_comm_id;
        let request = mra.about == About::Req as u8;
        let knows = if request { None } else { Some(mra.local_comm_id) };
        let expected = match mra.about {
            about if about == About::Req as u8 => State::RequestSent,
            about if about == About::Rep as u8 => State::ReplySent,
            _ => return Refused,
        };
        if self.state_for(path, number, knows) != Some(expected) {
            return Refused;
        }
        let Some(connection) = self.connections.get(&number) else { return Refused };
        let wait = Duration(4096 << mra.service_timeout).min(self.limits.mra_wait_max);
        let wait = wait.max(self.limits.timing(path.link).retry_interval);
        let until = (now + wait).min(connection.give_up);
        self.set_timer(number, Some(until));
        Taken
    }

    fn handle_dreq<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        path: &Path,
        mad: &Mad,
        dreq: &Dreq,
    ) -> Effect {
        let number = dreq.remote_comm_id;
        let Some(state) = self.state_for(path, number, Some(dreq.local_comm_id)) else {
            if self.state_for(path, number, Some(0)).is_some() {
                // It is faster than the REP before it. When that has come it says so again.
                return Refused;
            }
            // A request to end a connection that is not there succeeds; one that names another's
            // gets the same answer.
            self.send_disconnect_reply(env, path, mad, dreq);
            return Refused;
        };
        if self.connections.get(&number).is_none_or(|connection| connection.local_qpn != dreq.remote_qpn) {
            return Refused;
        }
        match state {
            State::ReplySent | State::Established | State::DisconnectSent => {
                self.send_disconnect_reply(env, path, mad, dreq);
                self.disconnected(env, now, number, 0);
                Taken
            }
            State::TimeWait => {
                self.send_disconnect_reply(env, path, mad, dreq);
                Refused
            }
            _ => Refused,
        }
    }

    fn handle_drep<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, path: &Path, drep: &Drep) -> Effect {
        if self.state_for(path, drep.remote_comm_id, Some(drep.local_comm_id)) != Some(State::DisconnectSent) {
            return Refused;
        }
        self.disconnected(env, now, drep.remote_comm_id, 0);
        Taken
    }

    fn handle_sidr_rep<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        path: &Path,
        reply: &SidrRep,
    ) -> Effect {
        let number = reply.request_id;
        if self.state_for(path, number, None) != Some(State::ServiceAsked) {
            return Refused;
        }
        let Some(connection) = self.connections.get(&number) else { return Refused };
        let body = CmEventBody::Datagram {
            address: address_of(connection),
            qp_number: reply.qpn,
            qkey: reply.qkey,
            private_data: reply.private_data.to_vec(),
        };
        if reply.status != sidr_status::VALID {
            self.fail(env, now, number, CmEventKind::Unreachable, reply.status.into(), body);
            return Taken;
        }
        let agreed = connection.id.and_then(|handle| self.ids.get_mut(handle)).map(|id| qkey_of(id, reply.qkey));
        match agreed {
            Some(Err(_)) => self.fail(env, now, number, CmEventKind::AddressError, INVALID, CmEventBody::Nothing),
            _ => self.fail(env, now, number, CmEventKind::Established, 0, body),
        }
        Taken
    }

    fn handle_lap<E: Environment + ?Sized>(&mut self, env: &mut E, path: &Path, mad: &Mad, lap: &Lap) -> Effect {
        if self.state_for(path, lap.remote_comm_id, Some(lap.local_comm_id)) == Some(State::Established) {
            self.send_no_alternate(env, lap.remote_comm_id, mad.transaction_id);
        }
        Refused
    }
}

/// QPs 0 and 1 are never connected, so programs that have no QP say so.
fn is_connectable(qpn: u32) -> bool {
    qpn > 1
}

/// As much private data as a message has room for, and none in it.
fn nothing(bytes: usize) -> CmEventBody {
    CmEventBody::Connection(ConnectionParameters { private_data: alloc::vec![0; bytes], ..Default::default() })
}
