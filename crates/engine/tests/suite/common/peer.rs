//! A peer on another host, as a script: it sends packets to one QP of this host and looks at what comes back.
use super::*;
use freeflow_wire::{
    Header, MASK_24, NakCode, Opcode, Operation, PacketPosition, Reth, Service, Syndrome as Aeth, psn_add,
};

pub const HOST: HostId = HostId(7);
pub const PEER_QPN: u32 = 0x4711;
/// Everything wraps around soon.
pub const FIRST_PSN: u32 = 0xff_fffd;

pub struct Link {
    pub net: Net,
    pub end: End,
    pub mtu: usize,
    /// Of the next packet that is sent.
    pub psn: u32,
    pub srqn: u32,
    /// `max_dest_rd_atomic` of the next [`Self::connect`].
    pub depth: u8,
    service: Service,
}

pub fn peer_gid() -> Gid {
    gid(200)
}

pub fn destination() -> Destination {
    let (traffic_class, hop_limit, mtu) = (0, 64, 4096);
    let (frame_bytes, selective, records) = (0, false, false);
    Destination { host: HOST, flow: 3, traffic_class, hop_limit, mtu, frame_bytes, selective, records }
}

/// The same with what `to` says was agreed on: packets of RC are ECN-capable where selective repeat is.
pub fn agreed(service: Service, to: Destination) -> Destination {
    let Destination { frame_bytes, selective, records, .. } = to;
    let traffic_class = if service == Service::Rc && frame_bytes > 0 && selective { 0b10 } else { 0 };
    Destination { frame_bytes, selective, records, traffic_class, ..destination() }
}

/// A packet's bytes, BTH to padding.
pub fn datagram(header: Header, payload: &[u8]) -> Vec<u8> {
    let head = PacketHead::new(header, payload.len());
    let mut bytes = head.header.as_slice().to_vec();
    bytes.extend_from_slice(payload);
    bytes.resize(head.bytes(), 0);
    bytes
}

impl Link {
    /// An RC QP in RTS with MTU 256.
    pub fn new() -> Self {
        Self::with(QpType::Rc, PathMtu::Mtu256, false)
    }

    pub fn with(qp_type: QpType, path_mtu: PathMtu, shared: bool) -> Self {
        let mut net = Net::new();
        let mut end = net.end_with(qp_type, shared);
        // With the right to FLUSH.
        let (length, access) = (MEMORY_BYTES as u64, ALL_ACCESS.union(Access::FLUSH_GLOBAL));
        let keys = net.engine.register_mr(end.session, end.pd, MEMORY_BASE, length, MEMORY_BASE, access).unwrap();
        (end.mr, end.key) = (keys.mr, keys.rkey);
        net.world.paths.insert(peer_gid(), destination());
        let srqn = if qp_type == QpType::XrcReceive {
            let (srq, number) = net.xrc_srq(&end);
            end.srq = Some(srq);
            number
        } else {
            0
        };
        let service = if qp_type == QpType::Rc { Service::Rc } else { Service::Xrc };
        let mtu = path_mtu.bytes() as usize;
        let mut link = Self { net, end, mtu, psn: FIRST_PSN, srqn, depth: 4, service };
        link.introduce();
        link.connect(path_mtu);
        link
    }

    /// An RC QP in RTS with MTU 256 that answers so many READs and atomics at a time.
    pub fn with_depth(depth: u8) -> Self {
        let mut link = Self::new();
        let reset = QpAttributes { state: QpState::Reset, ..Default::default() };
        let end = link.end;
        link.net.modify(&end, &reset, QpAttributeMask::STATE).unwrap();
        link.depth = depth;
        link.connect(PathMtu::Mtu256);
        link
    }

    /// The same where frames and selective repeat were agreed on, or one of them.
    pub fn on_path(frame_bytes: u16, selective: bool) -> Self {
        Self::to(Destination { frame_bytes, selective, ..destination() })
    }

    pub fn to(to: Destination) -> Self {
        let mut link = Self::new();
        link.net.world.paths.insert(peer_gid(), to);
        link.reconnect();
        link
    }

    /// To RTS again, by way of RESET.
    pub fn reconnect(&mut self) {
        let (end, reset) = (self.end, QpAttributes { state: QpState::Reset, ..Default::default() });
        self.net.modify(&end, &reset, QpAttributeMask::STATE).unwrap();
        self.connect(PathMtu::Mtu256);
    }

    /// The other host's router says who the peer is.
    pub fn introduce(&mut self) {
        let service = match self.net.types[&self.end.qp] {
            QpType::XrcReceive => QpType::XrcSend,
            same => same,
        };
        let connected = Some((self.end.gid, self.end.qpn));
        let info = PeerInfo { network: NetworkId(1), gid: peer_gid(), service, connected, ipv6_gid: None };
        self.net.world.peers.insert((HOST, Qpn(PEER_QPN)), PeerAnswer::Known(info));
    }

    /// To RTS by way of INIT and RTR.
    pub fn connect(&mut self, path_mtu: PathMtu) {
        use QpAttributeMask as M;
        let end = self.end;
        let access = ALL_ACCESS.union(Access::FLUSH_GLOBAL);
        let init = QpAttributes { state: QpState::Init, port: 1, access, ..Default::default() };
        self.net.modify(&end, &init, M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS).unwrap();
        let rtr = QpAttributes {
            state: QpState::ReadyToReceive,
            address: address(peer_gid()),
            dest_qpn: PEER_QPN,
            rq_psn: FIRST_PSN,
            max_dest_rd_atomic: self.depth,
            min_rnr_timer: 12,
            path_mtu,
            ..Default::default()
        };
        let path = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        self.net.modify(&end, &rtr, M::STATE | path).unwrap();
        self.net.rts(&end);
        self.psn = FIRST_PSN;
    }

    pub fn state(&self) -> QpState {
        self.net.state(&self.end)
    }

    pub fn counters(&self) -> WireCounters {
        let of_qp = self.net.engine.wire_qps().next().expect("the QP has a peer on another host").counters;
        let of_vnic = self.net.engine.vnic_counters(self.end.vnic).unwrap().wire;
        assert_eq!(of_qp, of_vnic, "the vNIC has no other QP on the wire");
        of_qp
    }

    // ---- sending

    /// Of a packet with the next PSN.
    pub fn header(&self, operation: Operation, place: PacketPosition) -> Header {
        let opcode = Opcode::new(self.service, operation, place).unwrap();
        let mut header = Header::new(opcode, self.end.qpn.0, self.psn);
        header.srqn = self.srqn;
        header.ack_request = opcode.ends();
        header
    }

    /// Hands a packet in, from this host.
    pub fn deliver_from(&mut self, host: HostId, header: Header, payload: &[u8]) {
        self.deliver_bytes(host, &IpInfo::default(), &datagram(header, payload));
    }

    /// Hands a packet in that was marked on its way, with the next PSN.
    pub fn push_marked(&mut self, header: Header, payload: &[u8]) {
        let ip = IpInfo { congestion: true, ..IpInfo::default() };
        self.deliver_bytes(HOST, &ip, &datagram(header, payload));
        self.psn = psn_add(self.psn, 1);
    }

    pub fn deliver_bytes(&mut self, host: HostId, ip: &IpInfo, bytes: &[u8]) {
        self.net.engine.handle_datagram(&mut self.net.world, self.net.now, host, ip, bytes);
    }

    pub fn deliver(&mut self, header: Header, payload: &[u8]) {
        self.deliver_from(HOST, header, payload);
    }

    /// Delivers, and goes on to the next PSN.
    pub fn push(&mut self, header: Header, payload: &[u8]) {
        self.deliver(header, payload);
        self.psn = psn_add(self.psn, 1);
    }

    /// The packets of a SEND or WRITE, from the next PSN on.
    pub fn packets(&self, operation: Operation, reth: Reth, payload: &[u8]) -> Vec<(Header, Vec<u8>)> {
        let pieces: Vec<&[u8]> = if payload.is_empty() { vec![payload] } else { payload.chunks(self.mtu).collect() };
        let last = pieces.len() - 1;
        let packet = |(at, piece): (usize, &&[u8])| {
            let place = match (at == 0, at == last) {
                (true, true) => PacketPosition::Only,
                (true, false) => PacketPosition::First,
                (false, false) => PacketPosition::Middle,
                (false, true) => PacketPosition::Last,
            };
            let mut header = Header { reth, ..self.header(operation, place) };
            header.psn = psn_add(self.psn, at as u32);
            header.immediate = 0x0101_0101;
            (header, piece.to_vec())
        };
        pieces.iter().enumerate().map(packet).collect()
    }

    pub fn message(&mut self, operation: Operation, reth: Reth, payload: &[u8]) {
        for (header, piece) in self.packets(operation, reth, payload) {
            self.push(header, &piece);
        }
    }

    pub fn send(&mut self, payload: &[u8]) {
        self.message(Operation::Send, Reth::default(), payload);
    }

    pub fn write(&mut self, offset: u64, payload: &[u8]) {
        let reth = self.reth(offset, payload.len());
        self.message(Operation::Write, reth, payload);
    }

    /// Names the end's own memory.
    pub fn reth(&self, offset: u64, length: usize) -> Reth {
        Reth { address: MEMORY_BASE + offset, rkey: self.end.key, length: length as u32 }
    }

    pub fn read_header(&self, offset: u64, length: usize) -> Header {
        Header { reth: self.reth(offset, length), ..self.header(Operation::ReadRequest, PacketPosition::Only) }
    }

    pub fn read(&mut self, offset: u64, length: usize) {
        self.deliver(self.read_header(offset, length), &[]);
        self.psn = psn_add(self.psn, length.div_ceil(self.mtu).max(1) as u32);
    }

    pub fn fetch_add_header(&self, offset: u64, add: u64) -> Header {
        let mut header = self.header(Operation::FetchAdd, PacketPosition::Only);
        header.atomic.address = MEMORY_BASE + offset;
        header.atomic.rkey = self.end.key;
        header.atomic.swap_add = add;
        header
    }

    // ---- what comes back

    /// All packets that went out, after the batch is over and everything has run that can.
    pub fn replies(&mut self) -> Vec<(Header, Vec<u8>)> {
        self.net.engine.flush_acks(&mut self.net.world, self.net.now);
        self.net.work();
        let sent = std::mem::take(&mut self.net.world.sent);
        let parse = |sent: Sent| {
            assert_eq!(sent.to, agreed(self.service, sent.to));
            let (header, payload) = Header::parse(&sent.bytes).unwrap();
            assert_eq!((header.dest_qpn, header.opcode.service()), (PEER_QPN, self.service));
            assert!(sent.bytes.len().is_multiple_of(4) || header.frame.is_some());
            (header, payload.to_vec())
        };
        sent.into_iter().map(parse).collect()
    }

    /// The packets sent, without their contents.
    pub fn says(&mut self) -> Vec<Says> {
        self.replies().iter().map(|(header, payload)| Says::of(header, payload)).collect()
    }

    pub fn memory(&mut self, offset: u64, length: usize) -> Vec<u8> {
        self.net.world.bytes(self.end.session, MEMORY_BASE + offset, length).to_vec()
    }

    pub fn fill(&mut self, offset: u64, bytes: &[u8]) {
        self.net.world.bytes(self.end.session, MEMORY_BASE + offset, bytes.len()).copy_from_slice(bytes);
    }

    pub fn receive(&mut self, id: u64, offset: u64, length: u32) {
        let end = self.end;
        self.net.post_receive(&end, id, &[end.sge(offset, length)]);
    }

    pub fn completions(&mut self) -> Vec<Completion> {
        let end = self.end;
        self.net.polls(&end)
    }

    pub fn statuses(&mut self) -> Vec<(u64, CompletionStatus)> {
        let end = self.end;
        self.net.statuses(&end)
    }
}

/// A packet of the responder; PSNs count from [`FIRST_PSN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Says {
    Ack { psn: u32, msn: u32 },
    NotReady { psn: u32, timer: u8 },
    Nak { psn: u32, code: NakCode, msn: u32 },
    Atomic { psn: u32, msn: u32, original: u64 },
    Read { psn: u32, place: PacketPosition, bytes: usize },
}

impl Says {
    fn of(header: &Header, payload: &[u8]) -> Self {
        let psn = header.psn.wrapping_sub(FIRST_PSN) & MASK_24;
        let (msn, original) = (header.aeth.msn, header.original);
        match (header.opcode.operation(), header.aeth.syndrome) {
            (Operation::ReadResponse, Aeth::Ack { .. }) => {
                Self::Read { psn, place: header.opcode.place(), bytes: payload.len() }
            }
            (Operation::AtomicAcknowledge, Aeth::Ack { .. }) => Self::Atomic { psn, msn, original },
            (Operation::Acknowledge, Aeth::Ack { .. }) => Self::Ack { psn, msn },
            (Operation::Acknowledge, Aeth::ReceiverNotReady { timer }) => Self::NotReady { psn, timer },
            (Operation::Acknowledge, Aeth::Nak(code)) => Self::Nak { psn, code, msn },
            other => panic!("{other:?}"),
        }
    }
}

/// So many bytes that differ.
pub fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 7 + at / 251) as u8).collect()
}
