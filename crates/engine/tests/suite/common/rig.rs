//! A requester of this host, and the script of its peer on another one: what goes out, and what comes back.
use super::peer::{HOST, PEER_QPN, agreed, datagram, destination, peer_gid};
use super::*;
use freeflow_wire::frame::{FRAME_HEADER_BYTES, Frame, is_intact};
use freeflow_wire::records::{Records, is_records};
use freeflow_wire::{
    Aeth, Header, Kept, MASK_24, NakCode, Opcode, Operation as O, PacketPosition as P, Service, Syndrome as Aeths,
    psn_add,
};

/// PSNs wrap around soon.
pub const FIRST_PSN: u32 = 0xff_fffd;
pub const MS: u64 = 1_000_000;

/// One QP in RTS, and the script of its peer.
pub struct Rig {
    pub net: Net,
    pub end: End,
    pub service: Service,
}

/// Opcode, place and PSN of a packet, and whether it asks for an acknowledgement.
pub type Brief = (O, P, u32, bool);

pub fn attributes() -> QpAttributes {
    QpAttributes { timeout: 14, retry_count: 2, rnr_retry: 3, max_rd_atomic: 4, ..Default::default() }
}

impl Rig {
    pub fn new(mtu: PathMtu) -> Self {
        Self::with(QpType::Rc, mtu, attributes())
    }

    pub fn with(qp_type: QpType, mtu: PathMtu, rts: QpAttributes) -> Self {
        let mut rig = Self::behind_gate(qp_type, mtu, rts);
        rig.introduce();
        rig
    }

    /// With frames of so much payload, and selective repeat.
    pub fn selective(frame_bytes: u16, rts: QpAttributes) -> Self {
        let to = Destination { frame_bytes, selective: true, ..destination() };
        let mut rig = Self::on_path(QpType::Rc, PathMtu::Mtu256, rts, to);
        rig.introduce();
        rig
    }

    /// With frames of so much payload, that may have several messages.
    pub fn with_records(frame_bytes: u16) -> Self {
        let to = Destination { frame_bytes, records: true, ..destination() };
        let mut rig = Self::on_path(QpType::Rc, PathMtu::Mtu256, attributes(), to);
        rig.introduce();
        rig
    }

    /// The peer is not resolved yet.
    pub fn behind_gate(qp_type: QpType, path_mtu: PathMtu, rts: QpAttributes) -> Self {
        Self::on_path(qp_type, path_mtu, rts, destination())
    }

    fn on_path(qp_type: QpType, path_mtu: PathMtu, rts: QpAttributes, to: Destination) -> Self {
        Self::of_class(qp_type, path_mtu, rts, to, 0)
    }

    /// Its program asks for this traffic class.
    pub fn of_class(qp_type: QpType, path_mtu: PathMtu, rts: QpAttributes, to: Destination, traffic_class: u8) -> Self {
        use QpAttributeMask as M;
        let mut peer = address(peer_gid());
        peer.grh.as_mut().expect("RoCE has a GRH").traffic_class = traffic_class;
        let mut net = Net::new();
        let end = net.end(qp_type);
        net.world.paths.insert(peer_gid(), to);
        net.world.peers.insert((HOST, Qpn(PEER_QPN)), PeerAnswer::Asked);
        net.init(&end);
        let rtr = QpAttributes {
            state: QpState::ReadyToReceive,
            address: peer,
            dest_qpn: PEER_QPN,
            path_mtu,
            max_dest_rd_atomic: 4,
            ..Default::default()
        };
        let own = if qp_type == QpType::Rc { M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER } else { 0 };
        net.modify(&end, &rtr, M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | own).unwrap();
        let rts = QpAttributes { state: QpState::ReadyToSend, sq_psn: FIRST_PSN, ..rts };
        let mask = M::STATE | M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
        net.modify(&end, &rts, mask).unwrap();
        let service = if qp_type == QpType::Rc { Service::Rc } else { Service::Xrc };
        Self { net, end, service }
    }

    pub fn introduce(&mut self) {
        let service = if self.service == Service::Rc { QpType::Rc } else { QpType::XrcReceive };
        let connected = Some((self.end.gid, self.end.qpn));
        let info = PeerInfo { network: NetworkId(1), gid: peer_gid(), service, connected, ipv6_gid: None };
        self.net.world.peers.insert((HOST, Qpn(PEER_QPN)), PeerAnswer::Known(info));
    }

    pub fn peer_changed(&mut self) {
        let Net { engine, world, now, .. } = &mut self.net;
        engine.handle_peer_changed(world, *now, HOST, Some(Qpn(PEER_QPN)));
        self.net.work();
    }

    // ---- requests

    pub fn post(&mut self, request: SendRequest) {
        self.net.post_send(&self.end, request);
        self.net.work();
    }

    pub fn sge(&self, offset: u64, length: usize) -> Sge {
        self.end.sge(offset, length as u32)
    }

    /// A request of so many bytes at offset 0 that names the peer's memory.
    pub fn request(&self, id: u64, opcode: SendOpcode, length: usize) -> SendRequest {
        let sges = [self.sge(0, length)];
        let sges = if length == 0 { &[][..] } else { &sges[..] };
        SendRequest { remote_address: 0x7000, rkey: 0x55aa, ..request(id, opcode, sges) }
    }

    pub fn write(&mut self, id: u64, length: usize) {
        self.post(self.request(id, SendOpcode::RdmaWrite, length));
    }

    pub fn read(&mut self, id: u64, length: usize) {
        self.post(self.request(id, SendOpcode::RdmaRead, length));
    }

    // ---- packets that went out

    /// Messages of a frame of records as if each had a frame of its own.
    pub fn out(&mut self) -> Vec<(Header, Vec<u8>)> {
        self.datagrams().concat()
    }

    /// The same, datagram by datagram.
    pub fn datagrams(&mut self) -> Vec<Vec<(Header, Vec<u8>)>> {
        let service = self.service;
        let parse = |sent: Sent| {
            assert_eq!(sent.to, agreed(service, sent.to));
            if is_records(&sent.bytes) {
                assert!(is_intact(&sent.bytes) && sent.to.records);
                assert!(sent.bytes.len() <= FRAME_HEADER_BYTES + usize::from(sent.to.frame_bytes));
                return unpack(&sent.bytes);
            }
            let (header, payload) = Header::parse(&sent.bytes).unwrap();
            assert_eq!((header.dest_qpn, header.opcode.service()), (PEER_QPN, service));
            vec![(header, payload.to_vec())]
        };
        self.net.world.sent.drain(..).map(parse).collect()
    }

    pub fn briefs(&mut self) -> Vec<Brief> {
        self.out()
            .iter()
            .map(|(header, _)| {
                let psn = header.psn.wrapping_sub(FIRST_PSN) & MASK_24;
                (header.opcode.operation(), header.opcode.place(), psn, header.ack_request)
            })
            .collect()
    }

    pub fn psns(&mut self) -> Vec<u32> {
        self.briefs().iter().map(|brief| brief.2).collect()
    }

    // ---- answers

    pub fn answer(&mut self, operation: O, place: P, psn: u32, change: impl Fn(&mut Header), payload: &[u8]) {
        let opcode = Opcode::new(self.service, operation, place).unwrap();
        let mut header = Header::new(opcode, self.end.qpn.0, psn_add(FIRST_PSN, psn));
        change(&mut header);
        let Net { engine, world, now, .. } = &mut self.net;
        engine.handle_datagram(world, *now, HOST, &IpInfo::default(), &datagram(header, payload));
        self.net.work();
    }

    pub fn aeth(&mut self, psn: u32, syndrome: Aeths) {
        self.answer(O::Acknowledge, P::Only, psn, |header| header.aeth = Aeth { syndrome, msn: 0 }, &[]);
    }

    pub fn ack(&mut self, psn: u32) {
        self.aeth(psn, Aeths::ACK);
    }

    pub fn nak(&mut self, psn: u32, code: NakCode) {
        self.aeth(psn, Aeths::Nak(code));
    }

    /// The packet is missing, those so many PSNs behind it are kept.
    pub fn report(&mut self, psn: u32, distances: &[u32]) {
        let mut kept = Kept::default();
        distances.iter().for_each(|distance| assert!(kept.note(*distance)));
        let change = |header: &mut Header| {
            header.aeth = Aeth { syndrome: Aeths::Nak(NakCode::PsnSequence), msn: 0 };
            header.frame = Some(Frame::default());
            header.reth = kept.fields();
        };
        self.answer(O::Acknowledge, P::Only, psn, change, &[]);
    }

    pub fn respond(&mut self, psn: u32, place: P, payload: &[u8]) {
        self.answer(O::ReadResponse, place, psn, |_| {}, payload);
    }

    pub fn original(&mut self, psn: u32, value: u64) {
        self.answer(O::AtomicAcknowledge, P::Only, psn, |header| header.original = value, &[]);
    }

    // ---- what came of it

    pub fn statuses(&mut self) -> Vec<(u64, CompletionStatus)> {
        self.net.statuses(&self.end.clone())
    }

    pub fn succeeded(&mut self) -> Vec<u64> {
        let all = self.statuses();
        assert!(all.iter().all(|(_, status)| *status == CompletionStatus::Success), "{all:?}");
        all.iter().map(|(id, _)| *id).collect()
    }

    pub fn state(&self) -> QpState {
        self.net.state(&self.end)
    }

    pub fn counters(&self) -> WireCounters {
        self.status().counters
    }

    pub fn status(&self) -> QpWireStatus {
        self.net.engine.wire_qps().next().unwrap()
    }

    pub fn vnic(&self) -> VnicCounters {
        self.net.engine.vnic_counters(self.end.vnic).unwrap()
    }

    pub fn fill(&mut self, bytes: &[u8]) {
        self.net.world.bytes(self.end.session, MEMORY_BASE, bytes.len()).copy_from_slice(bytes);
    }

    pub fn memory(&mut self, length: usize) -> Vec<u8> {
        self.net.world.bytes(self.end.session, MEMORY_BASE, length).to_vec()
    }

    pub fn wait(&mut self, nanoseconds: u64) {
        let until = Instant(self.net.now.0 + nanoseconds);
        while self.net.engine.poll_timeout().is_some_and(|at| at <= until) {
            self.net.expire();
        }
        self.net.now = until;
    }
}

/// The messages of a frame of records.
pub fn unpack(bytes: &[u8]) -> Vec<(Header, Vec<u8>)> {
    let (whole, mut left) = (Records::parse(bytes).unwrap(), Records::parse(bytes).unwrap());
    let mut messages = Vec::new();
    while let (psn, Some((record, payload))) = (left.psn, left.next()) {
        messages.push((whole.header(psn, &record), payload.to_vec()));
    }
    messages
}

pub const FLUSHED: CompletionStatus = CompletionStatus::WorkRequestFlushed;
pub const SUCCESS: CompletionStatus = CompletionStatus::Success;
