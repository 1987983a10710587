//! Messages as they leave: what stands in each field, and which are sent again until there is an
//! answer.
use crate::address::guid_of;
use crate::connection::Path;
use crate::id::HOP_LIMIT;
use crate::{Environment, Machine, Packet};
use alloc::boxed::Box;
use freeflow_protocol::cm::{ConnectionParameters, Ece, PortSpace};
use freeflow_verbs::{Gid, Instant, QpType};
use freeflow_wire::PKEY_DEFAULT;
use freeflow_wire::cm::{
    About, Apr, Drep, Dreq, IpHeader, Mad, Message, Mra, Rej, Rep, Req, Rtu, SidrRep, SidrReq, Transport, apr_status,
    reason, sidr_status,
};

/// The time we promise to answer within, as Linux does: 4.096 us * 2^20.
const RESPONSE_TIMEOUT: u8 = 20;
/// … after an MRA: 4.096 us * 2^24.
const SERVICE_TIMEOUT: u8 = 24;
/// Time that our adapters take for an acknowledgement: 4.096 us * 2^15.
pub(crate) const ACK_DELAY: u8 = 15;
const CM_RETRIES: u8 = 15;
/// No LID: the path is routed.
const LID_PERMISSIVE: u16 = 0xffff;

/// The local ACK timeout for a path (IBTA 12.7.34): twice the way, and what the other end takes.
pub(crate) fn ack_timeout(ack_delay: u8, packet_life_time: u8) -> u8 {
    let ways = packet_life_time.saturating_add(1);
    let sum = if ways >= ack_delay {
        ways + u8::from(ack_delay + 1 >= ways)
    } else {
        ack_delay + u8::from(ways + 1 >= ack_delay)
    };
    sum.min(31)
}

/// `data`, and zeros behind it. What does not fit was refused before.
fn padded<const COUNT: usize>(data: &[u8]) -> [u8; COUNT] {
    core::array::from_fn(|at| data.get(at).copied().unwrap_or(0))
}

/// Private data of a request: the header that names addresses, if the port space has it, and the
/// user's.
pub(crate) fn with_header<const COUNT: usize>(port_space: PortSpace, header: IpHeader, data: &[u8]) -> [u8; COUNT] {
    if port_space == PortSpace::Ib {
        return padded(data);
    }
    let mut all = [0; COUNT];
    all[..IpHeader::BYTES].copy_from_slice(&header.encode());
    all[IpHeader::BYTES..].copy_from_slice(&padded::<COUNT>(data)[..COUNT - IpHeader::BYTES]);
    all
}

fn transport_of(qp_type: QpType) -> Transport {
    match qp_type {
        QpType::Uc => Transport::Uc,
        QpType::XrcSend | QpType::XrcReceive => Transport::Xrc,
        QpType::Rc | QpType::Ud => Transport::Rc,
    }
}

impl Machine {
    pub(crate) fn send_on<E: Environment + ?Sized>(&mut self, env: &mut E, path: &Path, mad: &Mad) {
        self.messages[mad.message.kind().index()].sent += 1;
        let bytes = mad.encode();
        env.send(Packet { link: path.link, scope: path.scope, from: path.local, to: path.remote, mad: &bytes });
    }

    /// Sends a message of a connection, with its transaction id.
    fn send_of<E: Environment + ?Sized>(&mut self, env: &mut E, number: u32, message: Message) {
        let Some(connection) = self.connections.get(&number) else { return };
        let (path, mad) = (connection.path, Mad::new(connection.transaction_id, message));
        self.send_on(env, &path, &mad);
    }

    /// Sends a message that wants an answer: it is sent again until one comes, or too many were
    /// sent.
    fn send_for_answer<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, number: u32, mad: &Mad) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let timing = self.limits.timing(connection.path.link);
        connection.message = Some(Box::new(mad.encode()));
        connection.retries_left = timing.retry_count_max;
        connection.give_up = now + self.limits.connect_wait_max;
        let path = connection.path;
        self.set_timer(number, Some(now + timing.retry_interval));
        self.send_on(env, &path, mad);
    }

    /// Sends the stored message once more.
    pub(crate) fn send_again<E: Environment + ?Sized>(&mut self, env: &mut E, number: u32) {
        let Some(connection) = self.connections.get(&number) else { return };
        let Some(bytes) = &connection.message else { return };
        let path = connection.path;
        if let Ok(mad) = Mad::decode(bytes.as_slice()) {
            let counts = &mut self.messages[mad.message.kind().index()];
            (counts.sent, counts.repeated) = (counts.sent + 1, counts.repeated + 1);
        }
        env.send(Packet {
            link: path.link,
            scope: path.scope,
            from: path.local,
            to: path.remote,
            mad: bytes.as_slice(),
        });
    }

    pub(crate) fn send_request<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        number: u32,
        parameters: &ConnectionParameters,
        private_data: [u8; 92],
    ) {
        let Some(connection) = self.connections.get(&number) else { return };
        let path = connection.path;
        let mut req = Req {
            local_comm_id: number,
            vendor_id: parameters.ece.vendor_id,
            service_id: connection.service_id,
            local_ca_guid: guid_of(path.local),
            local_qpn: connection.local_qpn,
            initiator_depth: parameters.initiator_depth,
            remote_response_timeout: RESPONSE_TIMEOUT,
            flow_control: parameters.flow_control,
            starting_psn: connection.rq_psn,
            local_response_timeout: RESPONSE_TIMEOUT,
            pkey: PKEY_DEFAULT,
            path_mtu: connection.mtu as u8,
            cm_retries_max: CM_RETRIES,
            primary_local_lid: LID_PERMISSIVE,
            primary_remote_lid: LID_PERMISSIVE,
            primary_local_gid: path.local.0,
            primary_remote_gid: path.remote.0,
            primary_flow_label: connection.flow_label,
            primary_traffic_class: connection.traffic_class,
            primary_hop_limit: HOP_LIMIT,
            primary_ack_timeout: connection.ack_timeout,
            private_data,
            ..Req::default()
        };
        req.set_transport(transport_of(connection.qp_type));
        // An XRC initiator has no responder, and nothing of its own that could be not ready.
        if connection.qp_type != QpType::XrcSend {
            req.responder_resources = parameters.responder_resources;
            req.retry_count = parameters.retry_count.min(7);
            req.rnr_retry_count = parameters.rnr_retry_count.min(7);
            req.srq = parameters.srq;
        }
        let mut mad = Mad::new(connection.transaction_id, Message::Req(req));
        mad.attribute_modifier = parameters.ece.options;
        self.send_for_answer(env, now, number, &mad);
    }

    pub(crate) fn send_reply<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        number: u32,
        parameters: &ConnectionParameters,
    ) {
        let Some(connection) = self.connections.get(&number) else { return };
        let mut rep = Rep {
            local_comm_id: number,
            remote_comm_id: connection.remote_id,
            starting_psn: connection.rq_psn,
            responder_resources: parameters.responder_resources,
            target_ack_delay: ACK_DELAY,
            rnr_retry_count: parameters.rnr_retry_count.min(7),
            local_ca_guid: guid_of(connection.path.local),
            private_data: padded(&parameters.private_data),
            ..Rep::default()
        };
        if connection.qp_type == QpType::XrcReceive {
            (rep.srq, rep.local_eecn) = (true, connection.local_qpn);
        } else {
            (rep.srq, rep.local_qpn) = (parameters.srq, connection.local_qpn);
            (rep.initiator_depth, rep.flow_control) = (parameters.initiator_depth, parameters.flow_control);
        }
        rep.set_vendor_id(parameters.ece.vendor_id);
        let mut mad = Mad::new(connection.transaction_id, Message::Rep(rep));
        mad.attribute_modifier = parameters.ece.options;
        self.send_for_answer(env, now, number, &mad);
    }

    pub(crate) fn send_ready<E: Environment + ?Sized>(&mut self, env: &mut E, number: u32) {
        let Some(remote_comm_id) = self.connections.get(&number).map(|connection| connection.remote_id) else { return };
        self.send_of(env, number, Message::Rtu(Rtu { local_comm_id: number, remote_comm_id, ..Rtu::default() }));
    }

    /// "The message has come, our program is thinking."
    pub(crate) fn send_mra<E: Environment + ?Sized>(&mut self, env: &mut E, number: u32, about: About) {
        let Some(remote_comm_id) = self.connections.get(&number).map(|connection| connection.remote_id) else { return };
        let mra = Mra {
            local_comm_id: number,
            remote_comm_id,
            about: about as u8,
            service_timeout: SERVICE_TIMEOUT,
            ..Mra::default()
        };
        self.send_of(env, number, Message::Mra(mra));
    }

    pub(crate) fn send_reject<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        number: u32,
        about: About,
        reason: u16,
        private_data: &[u8],
    ) {
        let Some(connection) = self.connections.get(&number) else { return };
        let mut rej = Rej {
            local_comm_id: number,
            remote_comm_id: connection.remote_id,
            about: about as u8,
            reason,
            private_data: padded(private_data),
            ..Rej::default()
        };
        if reason == reason::TIMEOUT {
            // By this adapter and the own id the other end finds the connection, if it does not
            // know it by its own.
            rej.information_length = 8;
            rej.information = padded(&guid_of(connection.path.local).to_be_bytes());
        }
        self.send_of(env, number, Message::Rej(rej));
    }

    /// Takes back a request that was not answered.
    pub(crate) fn send_withdrawal<E: Environment + ?Sized>(&mut self, env: &mut E, number: u32) {
        self.send_reject(env, number, About::Other, reason::TIMEOUT, &[]);
    }

    /// An answer to who has no connection here.
    pub(crate) fn refuse<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        path: &Path,
        mad: &Mad,
        (local_comm_id, remote_comm_id): (u32, u32),
        about: About,
        reason: u16,
    ) {
        let rej = Rej { local_comm_id, remote_comm_id, about: about as u8, reason, ..Rej::default() };
        self.send_on(env, path, &Mad::new(mad.transaction_id, Message::Rej(rej)));
    }

    pub(crate) fn send_disconnect<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, number: u32) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.transaction_id = transaction_id(number);
        let dreq = Dreq {
            local_comm_id: number,
            remote_comm_id: connection.remote_id,
            remote_qpn: connection.remote_qpn,
            ..Dreq::default()
        };
        let mad = Mad::new(connection.transaction_id, Message::Dreq(dreq));
        self.send_for_answer(env, now, number, &mad);
    }

    /// Answers a DREQ, also one for a connection that is not there any more: then it is over all
    /// the more.
    pub(crate) fn send_disconnect_reply<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        path: &Path,
        mad: &Mad,
        dreq: &Dreq,
    ) {
        let drep = Drep { local_comm_id: dreq.remote_comm_id, remote_comm_id: dreq.local_comm_id, ..Drep::default() };
        self.send_on(env, path, &Mad::new(mad.transaction_id, Message::Drep(drep)));
    }

    /// Alternate paths are not for RoCE.
    pub(crate) fn send_no_alternate<E: Environment + ?Sized>(&mut self, env: &mut E, number: u32, transaction_id: u64) {
        let Some(connection) = self.connections.get(&number) else { return };
        let (path, remote_comm_id) = (connection.path, connection.remote_id);
        let apr = Apr { local_comm_id: number, remote_comm_id, status: apr_status::NOT_SUPPORTED, ..Apr::default() };
        self.send_on(env, &path, &Mad::new(transaction_id, Message::Apr(apr)));
    }

    pub(crate) fn send_service_request<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        number: u32,
        private_data: [u8; 216],
    ) {
        let Some(connection) = self.connections.get(&number) else { return };
        let request =
            SidrReq { request_id: number, pkey: PKEY_DEFAULT, service_id: connection.service_id, private_data };
        let mad = Mad::new(connection.transaction_id, Message::SidrReq(request));
        self.send_for_answer(env, now, number, &mad);
    }

    /// The answer is kept: if it gets lost, the request comes again.
    pub(crate) fn send_service_reply<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        number: u32,
        qkey: u32,
        ece: Ece,
        private_data: &[u8],
    ) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let mut reply = SidrRep {
            request_id: connection.remote_id,
            status: sidr_status::VALID,
            qpn: connection.local_qpn,
            service_id: connection.service_id,
            qkey,
            private_data: padded(private_data),
            ..SidrRep::default()
        };
        reply.set_vendor_id(ece.vendor_id);
        let mut mad = Mad::new(connection.transaction_id, Message::SidrRep(reply));
        mad.attribute_modifier = ece.options;
        connection.message = Some(Box::new(mad.encode()));
        let path = connection.path;
        self.send_on(env, &path, &mad);
    }

    pub(crate) fn send_service_refusal<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        number: u32,
        private_data: &[u8],
    ) {
        let Some(connection) = self.connections.get(&number) else { return };
        let reply = SidrRep {
            request_id: connection.remote_id,
            status: sidr_status::REJECTED,
            service_id: connection.service_id,
            private_data: padded(private_data),
            ..SidrRep::default()
        };
        self.send_of(env, number, Message::SidrRep(reply));
    }

    /// An answer to a SIDR request that no program is asked about.
    pub(crate) fn refuse_service<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        path: &Path,
        mad: &Mad,
        request: &SidrReq,
        status: u8,
    ) {
        let reply =
            SidrRep { request_id: request.request_id, status, service_id: request.service_id, ..SidrRep::default() };
        self.send_on(env, path, &Mad::new(mad.transaction_id, Message::SidrRep(reply)));
    }
}

/// Of the messages that begin something. Linux numbers its agents in the upper half.
pub(crate) fn transaction_id(number: u32) -> u64 {
    1 << 32 | u64::from(number)
}

pub(crate) fn header(source: Gid, source_port: u16, destination: Gid) -> IpHeader {
    IpHeader { source_port, source: source.0, destination: destination.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_ack_timeouts_are_linuxs() {
        for (delay, life, expected) in
            [(15, 18, 19), (0, 18, 19), (18, 18, 20), (19, 18, 20), (20, 18, 21), (22, 18, 22), (31, 31, 31)]
        {
            assert_eq!(ack_timeout(delay, life), expected, "{delay} {life}");
        }
    }
}
