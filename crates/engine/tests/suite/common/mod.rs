//! A world for the engine: vectors as memory, queues as rings, time by hand. Copies are done at once, or (chosen by a
//! seed) later and in any order.
pub mod peer;
pub mod rig;

use freeflow_engine::*;
use freeflow_verbs::*;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr};

pub const MEMORY_BASE: u64 = 0x1000_0000;
pub const MEMORY_BYTES: usize = 2 << 20;
pub const ALL_ACCESS: Access = Access(0xf);

/// A small generator for choices of the tests.
pub struct SimRng(pub u64);

impl SimRng {
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % sides
    }
}

pub enum Job {
    Copy { from: Vec<u8>, spans: Vec<Span>, to: Vec<Span> },
    Atomic { at: Span, operation: AtomicOperation },
    Transmit { to: Destination, heads: Vec<PacketHead>, from: Vec<u8>, spans: Vec<Span> },
}

/// A packet that went out: headers to padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    pub to: Destination,
    pub bytes: Vec<u8>,
}

/// A message that a carrier was asked to take, and its bytes or (READ) the memory that they go to.
pub struct Load {
    pub token: Token,
    pub host: HostId,
    pub head: CarriedHead,
    pub bytes: Vec<u8>,
    pub spans: Vec<Span>,
}

#[derive(Default)]
pub struct Ring<T> {
    pub posted: VecDeque<T>,
    pub position: u32,
    pub malformed: bool,
}

#[derive(Default)]
pub struct World {
    pub memory: HashMap<SessionId, Vec<u8>>,
    pub sends: HashMap<QpId, Ring<SendRequest>>,
    pub receives: HashMap<ReceiveQueueId, Ring<ReceiveRequest>>,
    pub wanted: HashSet<ReceiveQueueId>,
    /// Queues of which a RECV was taken past the engine.
    pub taken_past: HashSet<ReceiveQueueId>,
    /// RECVs that may be fetched again. The engine keeps them all the same.
    pub put_back: Vec<(QpId, Option<CqId>, u32)>,
    pub completions: HashMap<CqId, VecDeque<Completion>>,
    pub cq_room: HashMap<CqId, usize>,
    pub events: Vec<(AsyncEventKind, EventTarget)>,
    pub pending: Vec<(Token, Job)>,
    /// With a rng: each operation is put off with even chances. Without: never.
    pub put_off: Option<SimRng>,
    pub always_put_off: bool,
    /// Sessions whose memory is not there any more.
    pub gone: HashSet<SessionId>,
    pub copies: u64,
    pub largest_copy: u64,
    /// Target QPs: nothing may be asked of their rings.
    pub without_rings: HashSet<QpId>,
    /// Ways to addresses of other hosts, and who is behind their QPNs.
    pub paths: HashMap<Gid, Destination>,
    /// The same for one network's addresses only.
    pub paths_of: HashMap<(NetworkId, Gid), Destination>,
    pub peers: HashMap<(HostId, Qpn), PeerAnswer>,
    pub sent: VecDeque<Sent>,
    /// Packets that may still go out before the fabric is full.
    pub transmit_room: Option<usize>,
    /// Management datagrams that came, and whether they are taken.
    pub mads: Vec<(HostId, [u8; freeflow_wire::cm::MAD_BYTES])>,
    pub takes_mads: bool,
    /// QPNs of which [`Engine::peer_info`] has changed.
    pub changed: Vec<(Qpn, Option<HostId>)>,
    /// Pairs of addresses that may not talk, in this direction.
    pub denied: HashSet<(Gid, Gid)>,
    pub asked: Vec<AuthorizationRequest>,
    /// Networks that may not talk to each other, whoever begins.
    pub apart: HashSet<(NetworkId, NetworkId)>,
    /// Addresses that are another network's for those of a network, and what was asked about that.
    pub address_map: HashMap<(NetworkId, Gid), NetworkId>,
    pub located: Vec<(NetworkId, Gid)>,
    pub disconnected: Vec<(Qpn, HostId, Qpn)>,
    pub violations: Vec<Violation>,
    /// Keys that the engine did not know, and the networks of the QPs that they were used on.
    pub unknown_keys: Vec<(NetworkId, Violation)>,
    /// QPs whose direct path was revoked.
    pub revoked: Vec<QpId>,
    /// A carrier's answer, if there is one, and the messages that it took.
    pub carry_outcome: Option<CarryOutcome>,
    pub loads: Vec<Load>,
    /// QPs of which it need not try any message any more.
    pub withdrawn: Vec<QpId>,
    /// Members of groups on other hosts.
    pub groups: HashMap<(NetworkId, Gid), Vec<(Destination, Qpn)>>,
}

impl World {
    fn puts_off(&mut self) -> bool {
        self.always_put_off || self.put_off.as_mut().is_some_and(|rng| rng.roll(2) == 0)
    }

    pub fn bytes(&mut self, session: SessionId, address: u64, length: usize) -> &mut [u8] {
        let memory = self.memory.get_mut(&session).expect("the session has memory");
        let start = (address - MEMORY_BASE) as usize;
        &mut memory[start..start + length]
    }

    fn read_spans(&mut self, spans: &[Span]) -> Vec<u8> {
        let read = |span: &Span| match span.session {
            SessionId::VOID => vec![0; span.length as usize],
            session => self.bytes(session, span.address, span.length as usize).to_vec(),
        };
        spans.iter().flat_map(read).collect()
    }

    fn write_spans(&mut self, mut from: &[u8], to: &[Span]) {
        for span in to {
            let (now, rest) = from.split_at(span.length as usize);
            if span.session != SessionId::VOID {
                self.bytes(span.session, span.address, now.len()).copy_from_slice(now);
            }
            from = rest;
        }
        assert!(from.is_empty(), "both sides are equally long");
    }

    /// Puts packets with this payload on the wire.
    fn send_out(&mut self, to: Destination, heads: &[PacketHead], mut payload: &[u8]) {
        for head in heads {
            let (now, rest) = payload.split_at(usize::from(head.payload_bytes));
            let mut bytes = head.header.as_slice().to_vec();
            bytes.extend_from_slice(now);
            bytes.resize(head.bytes(), 0);
            self.sent.push_back(Sent { to, bytes });
            payload = rest;
        }
        assert!(payload.is_empty(), "the packets take all of the payload");
    }

    fn apply_atomic(&mut self, at: Span, operation: AtomicOperation) -> u64 {
        assert!(at.length == 8 && at.address.is_multiple_of(8));
        let bytes = self.bytes(at.session, at.address, 8);
        let before = u64::from_ne_bytes(bytes.try_into().unwrap());
        let after = match operation {
            AtomicOperation::CompareSwap { compare, swap } if before == compare => swap,
            AtomicOperation::CompareSwap { .. } => before,
            AtomicOperation::FetchAdd { add } => before.wrapping_add(add),
        };
        bytes.copy_from_slice(&after.to_ne_bytes());
        before
    }

    pub fn polls(&mut self, cq: CqId) -> Vec<Completion> {
        self.completions.entry(cq).or_default().drain(..).collect()
    }

    pub fn saw(&self, kind: AsyncEventKind, about: EventTarget) -> usize {
        self.events.iter().filter(|event| **event == (kind, about)).count()
    }
}

fn take<T: Clone>(ring: Option<&mut Ring<T>>, into: &mut T) -> Fetch {
    let Some(ring) = ring else { return Fetch::Empty };
    match ring.posted.pop_front() {
        None => Fetch::Empty,
        Some(request) => {
            *into = request;
            if std::mem::take(&mut ring.malformed) { Fetch::Malformed } else { Fetch::Ready }
        }
    }
}

impl Queues for World {
    fn fetch_send(&mut self, qp: QpId, into: &mut SendRequest) -> Fetch {
        assert!(!self.without_rings.contains(&qp), "a target QP has no send queue");
        take(self.sends.get_mut(&qp), into)
    }

    fn fetch_receive(&mut self, _qp: QpId, queue: ReceiveQueueId, into: &mut ReceiveRequest) -> Fetch {
        if let ReceiveQueueId::Qp(qp) = queue {
            assert!(!self.without_rings.contains(&qp), "a target QP has no receive queue");
        }
        take(self.receives.get_mut(&queue), into)
    }

    fn receives_were_taken(&mut self, queue: ReceiveQueueId) -> bool {
        self.taken_past.remove(&queue)
    }

    fn put_back_receive(&mut self, qp: QpId, cq: Option<CqId>, ring_position: u32) -> bool {
        self.put_back.push((qp, cq, ring_position));
        false
    }

    fn srq_pending(&mut self, srq: SrqId) -> u32 {
        self.receives.get(&ReceiveQueueId::Srq(srq)).map_or(0, |ring| ring.posted.len() as u32)
    }

    fn want_receives(&mut self, queue: ReceiveQueueId, wanted: bool) {
        if wanted {
            self.wanted.insert(queue);
        } else {
            self.wanted.remove(&queue);
        }
    }

    fn complete(&mut self, cq: CqId, completion: &Completion) -> Result<(), CqFull> {
        let room = self.cq_room.get(&cq).copied().unwrap_or(usize::MAX);
        let ring = self.completions.entry(cq).or_default();
        if ring.len() >= room {
            return Err(CqFull);
        }
        ring.push_back(*completion);
        Ok(())
    }

    fn raise(&mut self, kind: AsyncEventKind, about: EventTarget) {
        self.events.push((kind, about));
    }
}

impl Memory for World {
    fn copy(&mut self, token: Token, from: Source<'_>, to: &[Span], _last: bool) -> CopyOutcome {
        let spans = match from.body {
            SourceBody::Spans(spans) => spans.to_vec(),
            SourceBody::Bytes(_) => Vec::new(),
        };
        if spans.iter().any(|span| self.gone.contains(&span.session)) {
            return CopyOutcome::Fault(MemorySide::Source);
        }
        if to.iter().any(|span| self.gone.contains(&span.session)) {
            return CopyOutcome::Fault(MemorySide::Destination);
        }
        let mut bytes = from.prefix.to_vec();
        if let SourceBody::Bytes(body) = from.body {
            bytes.extend_from_slice(body);
        }
        let total: u64 = to.iter().map(|span| u64::from(span.length)).sum();
        assert_eq!(total, bytes.len() as u64 + spans.iter().map(|span| u64::from(span.length)).sum::<u64>());
        self.copies += 1;
        self.largest_copy = self.largest_copy.max(total);
        if self.puts_off() {
            self.pending.push((token, Job::Copy { from: bytes, spans, to: to.to_vec() }));
            return CopyOutcome::Pending;
        }
        bytes.extend(self.read_spans(&spans));
        self.write_spans(&bytes, to);
        CopyOutcome::Done
    }

    fn atomic(&mut self, token: Token, at: Span, operation: AtomicOperation) -> AtomicOutcome {
        if self.gone.contains(&at.session) {
            return AtomicOutcome::Fault;
        }
        if self.puts_off() {
            self.pending.push((token, Job::Atomic { at, operation }));
            return AtomicOutcome::Pending;
        }
        AtomicOutcome::Done(self.apply_atomic(at, operation))
    }

    fn revoke_direct(&mut self, qp: QpId) {
        self.revoked.push(qp);
    }
}

impl Fabric for World {
    fn path(&mut self, _vnic: VnicId, to: NetworkId, route: &GlobalRoute) -> Path {
        let found = self.paths_of.get(&(to, route.dgid)).or_else(|| self.paths.get(&route.dgid));
        found.map_or(Path::Local, |destination| Path::Wire(*destination))
    }

    fn peer(&mut self, host: HostId, qpn: Qpn) -> PeerAnswer {
        self.peers.get(&(host, qpn)).copied().unwrap_or(PeerAnswer::Absent)
    }

    fn transmit(
        &mut self,
        token: Token,
        to: &Destination,
        packets: &[PacketHead],
        payload: Source<'_>,
    ) -> TransmitOutcome {
        assert!(!packets.is_empty());
        let (mut from, spans) = match payload.body {
            SourceBody::Spans(spans) => (Vec::new(), spans.to_vec()),
            SourceBody::Bytes(bytes) => (bytes.to_vec(), Vec::new()),
        };
        if spans.iter().any(|span| self.gone.contains(&span.session)) {
            return TransmitOutcome::Fault;
        }
        if let Some(room) = &mut self.transmit_room {
            let Some(left) = room.checked_sub(packets.len()) else { return TransmitOutcome::Full };
            *room = left;
        }
        if !spans.is_empty() && self.puts_off() {
            let job = Job::Transmit { to: *to, heads: packets.to_vec(), from, spans };
            self.pending.push((token, job));
            return TransmitOutcome::Pending;
        }
        from.extend(self.read_spans(&spans));
        self.send_out(*to, packets, &from);
        TransmitOutcome::Sent
    }

    fn transmit_records(&mut self, to: &Destination, head: &[u8], payload: Source<'_>) -> TransmitOutcome {
        let (mut bytes, spans) = match payload.body {
            SourceBody::Spans(spans) => (head.to_vec(), spans),
            SourceBody::Bytes(bytes) => ([head, bytes].concat(), &[][..]),
        };
        if spans.iter().any(|span| self.gone.contains(&span.session)) {
            return TransmitOutcome::Fault;
        }
        if self.transmit_room == Some(0) {
            return TransmitOutcome::Full;
        }
        if !spans.is_empty() && self.puts_off() {
            return TransmitOutcome::Fault;
        }
        if let Some(room) = &mut self.transmit_room {
            *room -= 1;
        }
        bytes.extend(self.read_spans(spans));
        self.sent.push_back(Sent { to: *to, bytes });
        TransmitOutcome::Sent
    }

    fn identity_changed(&mut self, qpn: Qpn, peer: Option<HostId>) {
        self.changed.push((qpn, peer));
    }

    fn notify_disconnected(&mut self, qpn: Qpn, host: HostId, peer: Qpn) {
        self.disconnected.push((qpn, host, peer));
    }

    fn take_management(&mut self, from: HostId, mad: &[u8; freeflow_wire::cm::MAD_BYTES]) -> bool {
        if self.takes_mads {
            self.mads.push((from, *mad));
        }
        self.takes_mads
    }

    fn group_hosts(&mut self, network: NetworkId, group: Gid, into: &mut Vec<(Destination, Qpn)>) {
        into.extend(self.groups.get(&(network, group)).into_iter().flatten());
    }
}

impl Carrier for World {
    fn carry(&mut self, token: Token, message: &CarriedMessage<'_>, local: Source<'_>) -> CarryOutcome {
        let outcome = self.carry_outcome.expect("a carrier is asked only where there is one");
        if outcome == CarryOutcome::Taken {
            let (mut bytes, spans) = match local.body {
                SourceBody::Spans(spans) => (Vec::new(), spans.to_vec()),
                SourceBody::Bytes(bytes) => (bytes.to_vec(), Vec::new()),
            };
            if message.head.opcode != SendOpcode::RdmaRead {
                bytes.extend(self.read_spans(&spans));
            }
            self.loads.push(Load { token, host: message.host, head: message.head, bytes, spans });
        }
        outcome
    }

    fn withdraw(&mut self, qp: QpId) {
        self.withdrawn.push(qp);
    }
}

impl Policy for World {
    fn authorize(&mut self, request: &AuthorizationRequest) -> bool {
        self.asked.push(*request);
        let (one, other) = (request.network, request.other);
        if self.apart.contains(&(one, other)) || self.apart.contains(&(other, one)) {
            return false;
        }
        let forth = !self.denied.contains(&(request.from, request.to));
        let both = matches!(request.traffic, TrafficKind::Connection | TrafficKind::Standing);
        forth || both && !self.denied.contains(&(request.to, request.from))
    }

    fn network_at(&mut self, network: NetworkId, gid: Gid) -> NetworkId {
        self.located.push((network, gid));
        self.address_map.get(&(network, gid)).copied().unwrap_or(network)
    }

    fn report_unknown_key(&mut self, own: NetworkId, attempt: &Violation) {
        self.unknown_keys.push((own, *attempt));
    }

    fn report_violation(&mut self, violation: &Violation) {
        self.violations.push(*violation);
    }
}

/// One process with one QP.
#[derive(Clone, Copy)]
pub struct End {
    pub vnic: VnicId,
    pub gid: Gid,
    pub session: SessionId,
    pub context: ContextId,
    pub pd: PdId,
    pub cq: CqId,
    pub mr: MrId,
    pub key: u32,
    pub srq: Option<SrqId>,
    pub qp: QpId,
    pub qpn: Qpn,
}

impl End {
    pub fn receive_queue(&self) -> ReceiveQueueId {
        self.srq.map_or(ReceiveQueueId::Qp(self.qp), ReceiveQueueId::Srq)
    }

    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { address: MEMORY_BASE + offset, length, lkey: self.key }
    }
}

pub struct Net {
    pub engine: Engine,
    pub world: World,
    pub now: Instant,
    pub qps: Vec<QpId>,
    pub types: HashMap<QpId, QpType>,
    xrcds: HashMap<SessionId, XrcdId>,
    /// Number of the last SRQ for XRC of a session.
    pub srqns: HashMap<SessionId, u32>,
    vnics: u8,
}

pub fn gid(last: u8) -> Gid {
    Gid::from_ip(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)))
}

/// Of an RC QP with one CQ.
pub fn rc_init(pd: PdId, cq: CqId) -> QpInit {
    QpInit {
        pd: Some(pd),
        qp_type: QpType::Rc,
        send_cq: Some(cq),
        recv_cq: Some(cq),
        srq: None,
        xrcd: None,
        block_own_multicast: false,
        capabilities: capabilities(),
        all_signaled: false,
        cookie: 0,
    }
}

pub fn capabilities() -> QpCapabilities {
    QpCapabilities { max_send_wr: 64, max_recv_wr: 64, max_send_sge: 30, max_recv_sge: 30, max_inline_data: 1024 }
}

impl Net {
    pub fn new() -> Self {
        Self::of_shard(Shard::ONLY)
    }

    pub fn of_shard(shard: Shard) -> Self {
        Self {
            engine: Engine::of_shard(Seed([7; 32]), shard),
            world: World::default(),
            now: Instant(1_000),
            qps: Vec::new(),
            types: HashMap::new(),
            xrcds: HashMap::new(),
            srqns: HashMap::new(),
            vnics: 0,
        }
    }

    /// A vNIC with one process and one QP in RESET.
    pub fn end(&mut self, qp_type: QpType) -> End {
        self.end_with(qp_type, false)
    }

    pub fn end_with(&mut self, qp_type: QpType, shared: bool) -> End {
        self.end_in(NetworkId(1), qp_type, shared)
    }

    pub fn end_in(&mut self, network: NetworkId, qp_type: QpType, shared: bool) -> End {
        self.vnics += 1;
        let gid = gid(self.vnics);
        let vnic = self.engine.create_vnic(network, gid, VnicLimits::default()).unwrap();
        self.end_at(vnic, gid, qp_type, shared)
    }

    pub fn end_at(&mut self, vnic: VnicId, gid: Gid, qp_type: QpType, shared: bool) -> End {
        let engine = &mut self.engine;
        let session = engine.create_session(vnic).unwrap();
        let context = engine.open_context(session).unwrap();
        let pd = engine.alloc_pd(session, context).unwrap();
        let cq = engine.create_cq(session, context, 1024).unwrap();
        self.world.memory.insert(session, vec![0; MEMORY_BYTES]);
        let length = MEMORY_BYTES as u64;
        let keys = engine.register_mr(session, pd, MEMORY_BASE, length, MEMORY_BASE, ALL_ACCESS).unwrap();
        let asked = SrqAttributes { max_wr: 64, max_sge: 4, limit: 0 };
        let srq = shared.then(|| engine.create_srq(session, pd, asked, None, 0).unwrap().0);
        let (mr, key) = (keys.mr, keys.rkey);
        let mut end = End {
            vnic,
            gid,
            session,
            context,
            pd,
            cq,
            mr,
            key,
            srq,
            qp: QpId { index: 0, generation: 0 },
            qpn: Qpn(0),
        };
        (end.qp, end.qpn) = self.qp(&end, qp_type);
        end
    }

    /// The session's XRC domain: that of one file of its vNIC.
    pub fn xrcd(&mut self, end: &End) -> XrcdId {
        let file = Some(FileIdentity { device: 1, inode: 1 });
        let engine = &mut self.engine;
        *self
            .xrcds
            .entry(end.session)
            .or_insert_with(|| engine.open_xrcd(end.session, end.context, file, XrcdOpenFlags::CREATE).unwrap())
    }

    /// An SRQ for XRC in the end's domain, PD and CQ, and its number. Its cookie is 88.
    pub fn xrc_srq(&mut self, end: &End) -> (SrqId, u32) {
        let xrcd = self.xrcd(end);
        let asked = SrqAttributes { max_wr: 64, max_sge: 4, limit: 0 };
        let made = self.engine.create_srq(end.session, end.pd, asked, Some((xrcd, end.cq)), 88);
        let (srq, number, _) = made.unwrap();
        self.srqns.insert(end.session, number);
        (srq, number)
    }

    pub fn qp(&mut self, end: &End, qp_type: QpType) -> (QpId, Qpn) {
        let (target, initiator) = (qp_type == QpType::XrcReceive, qp_type == QpType::XrcSend);
        let init = QpInit {
            pd: (!target).then_some(end.pd),
            qp_type,
            send_cq: (!target).then_some(end.cq),
            recv_cq: (!target && !initiator).then_some(end.cq),
            srq: end.srq.filter(|_| !target && !initiator),
            xrcd: target.then(|| self.xrcd(end)),
            block_own_multicast: false,
            capabilities: capabilities(),
            all_signaled: false,
            cookie: 77,
        };
        let (qp, qpn, _) = self.engine.create_qp(end.session, init).unwrap();
        self.qps.push(qp);
        self.types.insert(qp, qp_type);
        if target {
            self.world.without_rings.insert(qp);
        }
        (qp, qpn)
    }

    /// Two connected QPs in RTS.
    pub fn pair(&mut self, qp_type: QpType) -> (End, End) {
        let (a, b) = (self.end(qp_type), self.end(qp_type));
        self.connect(&a, &b);
        self.connect(&b, &a);
        (a, b)
    }

    pub fn connect(&mut self, end: &End, peer: &End) {
        self.init(end);
        self.rtr(end, peer);
        self.rts(end);
    }

    pub fn modify(&mut self, end: &End, attributes: &QpAttributes, mask: u32) -> Result<QpState, Refusal> {
        let mask = QpAttributeMask(mask);
        self.engine.modify_qp(&mut self.world, self.now, end.session, end.qp, attributes, mask)
    }

    pub fn to(&mut self, end: &End, state: QpState) -> Result<QpState, Refusal> {
        self.modify(end, &QpAttributes { state, ..Default::default() }, QpAttributeMask::STATE)
    }

    pub fn init(&mut self, end: &End) {
        let last =
            if self.types[&end.qp] == QpType::Ud { QpAttributeMask::QKEY } else { QpAttributeMask::ACCESS_FLAGS };
        let mask = QpAttributeMask::STATE | QpAttributeMask::PKEY_INDEX | QpAttributeMask::PORT | last;
        let attributes =
            QpAttributes { state: QpState::Init, port: 1, qkey: 0x1234, access: ALL_ACCESS, ..Default::default() };
        self.modify(end, &attributes, mask).unwrap();
    }

    pub fn rtr(&mut self, end: &End, peer: &End) {
        self.try_rtr(end, peer).unwrap();
    }

    pub fn try_rtr(&mut self, end: &End, peer: &End) -> Result<QpState, Refusal> {
        use QpAttributeMask as M;
        let path = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
        let mask = M::STATE
            | match self.types[&end.qp] {
                QpType::Rc => path | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
                QpType::Uc => path,
                QpType::Ud => 0,
                QpType::XrcSend => path,
                QpType::XrcReceive => path | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
            };
        let attributes = QpAttributes {
            state: QpState::ReadyToReceive,
            address: address(peer.gid),
            dest_qpn: peer.qpn.0,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
            path_mtu: PathMtu::Mtu1024,
            ..Default::default()
        };
        self.modify(end, &attributes, mask)
    }

    pub fn rts(&mut self, end: &End) {
        self.rts_with(end, QpAttributes { retry_count: 2, rnr_retry: 3, timeout: 8, ..Default::default() });
    }

    pub fn rts_with(&mut self, end: &End, attributes: QpAttributes) {
        use QpAttributeMask as M;
        let mask = M::STATE
            | M::SQ_PSN
            | match self.types[&end.qp] {
                QpType::Rc | QpType::XrcSend => M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC,
                QpType::XrcReceive => M::TIMEOUT,
                QpType::Uc | QpType::Ud => 0,
            };
        let attributes = QpAttributes { state: QpState::ReadyToSend, max_rd_atomic: 4, ..attributes };
        self.modify(end, &attributes, mask).unwrap();
    }

    pub fn state(&self, end: &End) -> QpState {
        self.engine.query_qp(end.session, end.qp).unwrap().state
    }

    /// Posts without working anything off.
    pub fn post_send(&mut self, end: &End, mut request: SendRequest) {
        let ring = self.world.sends.entry(end.qp).or_default();
        request.ring_position = ring.position;
        ring.position += 1;
        ring.posted.push_back(request);
    }

    pub fn post_receive(&mut self, end: &End, id: u64, sges: &[Sge]) {
        let queue = end.receive_queue();
        let ring = self.world.receives.entry(queue).or_default();
        let mut request = ReceiveRequest { work_request_id: id, ring_position: ring.position, ..Default::default() };
        request.sge_count = sges.len() as u8;
        request.sges[..sges.len()].copy_from_slice(sges);
        ring.position += 1;
        ring.posted.push_back(request);
        if self.world.wanted.contains(&queue) {
            self.engine.handle_receive_posted(&mut self.world, self.now, queue);
        }
    }

    /// Runs everything that can run without time passing or copies landing.
    pub fn work(&mut self) {
        for qp in self.qps.clone() {
            while self.engine.run(&mut self.world, self.now, qp, 1 << 20) == Progress::More {}
        }
        while let Some(qp) = self.engine.poll_ready() {
            while self.engine.run(&mut self.world, self.now, qp, 1 << 20) == Progress::More {}
        }
    }

    /// Lands one pending operation.
    pub fn land(&mut self, index: usize) {
        let (token, job) = self.world.pending.swap_remove(index);
        match job {
            Job::Copy { mut from, spans, to } => {
                from.extend(self.world.read_spans(&spans));
                self.world.write_spans(&from, &to);
                self.engine.handle_copied(&mut self.world, self.now, token, Ok(()));
            }
            Job::Atomic { at, operation } => {
                let value = self.world.apply_atomic(at, operation);
                self.engine.handle_atomic_done(&mut self.world, self.now, token, Ok(value));
            }
            Job::Transmit { to, heads, mut from, spans } => {
                from.extend(self.world.read_spans(&spans));
                self.world.send_out(to, &heads, &from);
                self.engine.handle_copied(&mut self.world, self.now, token, Ok(()));
            }
        }
    }

    /// A process dies. Its copies come back with what the environment then finds: no memory, if it was this process'.
    pub fn die(&mut self, session: SessionId) {
        self.engine.destroy_session(&mut self.world, self.now, session);
        let pending = std::mem::take(&mut self.world.pending);
        let touches = |spans: &[Span]| spans.iter().any(|span| span.session == session);
        for (token, job) in pending {
            let side = match &job {
                Job::Copy { spans, .. } | Job::Transmit { spans, .. } if touches(spans) => MemorySide::Source,
                Job::Copy { to, .. } if touches(to) => MemorySide::Destination,
                Job::Atomic { at, .. } if at.session == session => {
                    self.engine.handle_atomic_done(&mut self.world, self.now, token, Err(()));
                    continue;
                }
                _ => {
                    self.world.pending.push((token, job));
                    continue;
                }
            };
            self.engine.handle_copied(&mut self.world, self.now, token, Err(side));
        }
    }

    /// Works until only time could help.
    pub fn settle(&mut self) {
        self.work();
        while !self.world.pending.is_empty() {
            self.land(0);
            self.work();
        }
    }

    /// Lands what is pending, and what follows from it, without running any QP.
    pub fn settle_copies(&mut self) {
        while !self.world.pending.is_empty() {
            self.land(0);
        }
    }

    /// Lets the next timer expire; false if there is none.
    pub fn expire(&mut self) -> bool {
        let Some(at) = self.engine.poll_timeout() else { return false };
        assert!(at >= self.now);
        self.now = at;
        self.engine.handle_timeout(&mut self.world, at);
        self.settle();
        true
    }

    pub fn polls(&mut self, end: &End) -> Vec<Completion> {
        self.world.polls(end.cq)
    }

    /// The one completion that is there.
    pub fn only(&mut self, end: &End) -> Completion {
        let mut all = self.polls(end);
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    pub fn statuses(&mut self, end: &End) -> Vec<(u64, CompletionStatus)> {
        self.polls(end).iter().map(|completion| (completion.work_request_id, completion.status)).collect()
    }
}

pub fn address(dgid: Gid) -> AddressHandleAttributes {
    let grh = Some(GlobalRoute { dgid, hop_limit: 64, ..Default::default() });
    AddressHandleAttributes { grh, port: 1, ..Default::default() }
}

pub fn request(id: u64, opcode: SendOpcode, sges: &[Sge]) -> SendRequest {
    let mut request = SendRequest {
        work_request_id: id,
        opcode,
        flags: SendFlags(SendFlags::SIGNALED),
        sge_count: sges.len() as u8,
        ..Default::default()
    };
    request.sges[..sges.len()].copy_from_slice(sges);
    request
}

/// A request that names memory of the other end.
pub fn remote(id: u64, opcode: SendOpcode, sges: &[Sge], target: &End, offset: u64) -> SendRequest {
    SendRequest { remote_address: MEMORY_BASE + offset, rkey: target.key, ..request(id, opcode, sges) }
}
