//! The engine's environment on one simulated host: vectors as memory, queues as rings, and what
//! this host knows of others.
//!
//! Nothing here acts by itself: packets gather in `outbox`, questions in `asked`, changes in
//! `identities`; [`crate::sim::Sim`] takes them after each call of the engine.
use crate::carrier::{CarrierModel, Load};
use crate::rng::Rng;
use crate::shards::{self, shard_of};
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::frame::{FRAME_HEADER_BYTES, FRAME_PAYLOAD_BYTES_MAX, is_intact};
use freeflow_wire::records::Records;
use freeflow_wire::{Header, Operation};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A host that nobody has for a peer.
pub const FORGER: HostId = HostId(9999);

pub const MEMORY_BASE: u64 = 0x1000_0000;

/// Work that goes on elsewhere.
pub enum Job {
    Copy { from: Vec<u8>, spans: Vec<Span>, to: Vec<Span> },
    Atomic { at: Span, operation: AtomicOperation },
    Transmit { to: Destination, heads: Vec<PacketHead>, prefix: Vec<u8>, spans: Vec<Span> },
}

#[derive(Default)]
pub struct Ring<T> {
    pub posted: VecDeque<T>,
    pub position: u32,
}

/// A datagram that leaves.
pub struct Outgoing {
    pub at: u64,
    pub to: HostId,
    pub bytes: Vec<u8>,
    pub traffic_class: u8,
    pub hop_limit: u8,
}

/// How often an answer is put off or refused, parts of a million.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutcomeRates {
    pub copy_pending: u64,
    pub transmit_pending: u64,
    pub transmit_full: u64,
}

pub struct World {
    pub host: HostId,
    /// The number by which other shards of its host know this engine.
    pub shard: HostId,
    /// Bytes on the way to other shards, and how many find room.
    pub on_way: BTreeMap<HostId, u64>,
    pub room_bytes: u64,
    pub now: u64,
    pub memory: BTreeMap<SessionId, Vec<u8>>,
    pub sends: BTreeMap<QpId, Ring<SendRequest>>,
    pub receives: BTreeMap<ReceiveQueueId, Ring<ReceiveRequest>>,
    pub wanted: BTreeSet<ReceiveQueueId>,
    pub completions: BTreeMap<CqId, VecDeque<Completion>>,
    pub events: Vec<(AsyncEventKind, EventTarget)>,
    /// Operations that were answered `Pending` in the call that just ended.
    pub begun: Vec<(Token, Job)>,
    pub outbox: Vec<Outgoing>,
    pub outcome_rates: OutcomeRates,
    pub carrier_model: CarrierModel,
    /// Messages that the carrier took in the call that just ended, and QPs that it put off.
    pub loads: Vec<Load>,
    pub put_off: Vec<QpId>,
    /// QPs whose messages it need not try any more.
    pub withdrawn: Vec<QpId>,
    rng: Rng,
    /// Host of each address, of all hosts, as every control plane announces them.
    pub addresses: BTreeMap<(NetworkId, Gid), HostId>,
    pub path_mtu_max: u16,
    /// Payload of the frames that this host sends; 0: packets of the standard alone. Every host takes both.
    pub frame_bytes: u16,
    /// Hosts that agreed on selective repeat with this one.
    pub selective: BTreeSet<HostId>,
    /// Hosts that agreed on frames of records with this one.
    pub records: BTreeSet<HostId>,
    /// QPs behind QPNs of other hosts (`None`: there is no such QP).
    pub peers: BTreeMap<(HostId, Qpn), Option<PeerInfo>>,
    pub asked: Vec<(HostId, Qpn)>,
    pub identities: Vec<(Qpn, Option<HostId>)>,
    pub groups: BTreeMap<(NetworkId, Gid), BTreeMap<HostId, Qpn>>,
    /// Line rate, and how much may wait for it before `transmit` answers `Full`.
    pub bits_per_second: u64,
    pub send_buffer_bytes: u64,
    line_free_at: u64,
    /// Bursts that found no room on the way to another shard, and go out later.
    pub refused: u64,
    /// One of them in the turn that just ended.
    pub is_short: bool,
    /// `transmit` refused something in the turn that just ended.
    pub was_full: bool,
    /// Payload that one packet to a QPN may have: the path MTU of its connection.
    pub mtus: BTreeMap<(HostId, u32), usize>,
    pub packets_sent: u64,
    /// Reports of what was kept.
    pub reports_sent: u64,
    /// Messages in frames of records.
    pub records_sent: u64,
    /// Messages and requests that reached nobody who may have them, as the engine reports them.
    pub violations: u64,
    /// Forbidden actions of the engine.
    pub wrongs: Vec<String>,
}

impl World {
    pub fn new(host: HostId, rng: Rng) -> Self {
        Self {
            host,
            shard: shards::host_of(0),
            on_way: BTreeMap::new(),
            room_bytes: 0,
            now: 0,
            memory: BTreeMap::new(),
            sends: BTreeMap::new(),
            receives: BTreeMap::new(),
            wanted: BTreeSet::new(),
            completions: BTreeMap::new(),
            events: Vec::new(),
            begun: Vec::new(),
            outbox: Vec::new(),
            outcome_rates: OutcomeRates::default(),
            carrier_model: CarrierModel::default(),
            loads: Vec::new(),
            put_off: Vec::new(),
            withdrawn: Vec::new(),
            rng,
            addresses: BTreeMap::new(),
            path_mtu_max: 4096,
            frame_bytes: 0,
            selective: BTreeSet::new(),
            records: BTreeSet::new(),
            peers: BTreeMap::new(),
            asked: Vec::new(),
            identities: Vec::new(),
            groups: BTreeMap::new(),
            bits_per_second: 0,
            send_buffer_bytes: 512 << 10,
            line_free_at: 0,
            refused: 0,
            is_short: false,
            was_full: false,
            mtus: BTreeMap::new(),
            packets_sent: 0,
            reports_sent: 0,
            records_sent: 0,
            violations: 0,
            wrongs: Vec::new(),
        }
    }

    pub fn bytes(&mut self, session: SessionId, address: u64, length: usize) -> &mut [u8] {
        let memory = self.memory.get_mut(&session).expect("the session has memory");
        let start = (address - MEMORY_BASE) as usize;
        &mut memory[start..start + length]
    }

    pub fn is_there(&self, spans: &[Span]) -> bool {
        spans.iter().all(|span| span.session == SessionId::VOID || self.memory.contains_key(&span.session))
    }

    pub(crate) fn read_into(&mut self, spans: &[Span], into: &mut Vec<u8>) {
        for span in spans {
            match span.session {
                SessionId::VOID => into.resize(into.len() + span.length as usize, 0),
                session => into.extend_from_slice(self.bytes(session, span.address, span.length as usize)),
            }
        }
    }

    pub(crate) fn write_spans(&mut self, mut from: &[u8], to: &[Span]) {
        for span in to {
            let (now, rest) = from.split_at(span.length as usize);
            if span.session != SessionId::VOID {
                self.bytes(span.session, span.address, now.len()).copy_from_slice(now);
            }
            from = rest;
        }
    }

    fn apply_atomic(&mut self, at: Span, operation: AtomicOperation) -> u64 {
        let bytes = self.bytes(at.session, at.address, 8);
        let before = u64::from_ne_bytes((&*bytes).try_into().expect("eight bytes"));
        let after = match operation {
            AtomicOperation::CompareSwap { compare, swap } if before == compare => swap,
            AtomicOperation::CompareSwap { .. } => before,
            AtomicOperation::FetchAdd { add } => before.wrapping_add(add),
        };
        bytes.copy_from_slice(&after.to_ne_bytes());
        before
    }

    /// Does what was put off. `Some`: the value that an atomic found.
    pub fn finish(&mut self, job: Job) -> Result<Option<u64>, MemorySide> {
        match job {
            Job::Copy { mut from, spans, to } => {
                if !self.is_there(&spans) {
                    return Err(MemorySide::Source);
                }
                if !self.is_there(&to) {
                    return Err(MemorySide::Destination);
                }
                self.read_into(&spans, &mut from);
                self.write_spans(&from, &to);
                Ok(None)
            }
            Job::Atomic { at, .. } if !self.is_there(&[at]) => Err(MemorySide::Destination),
            Job::Atomic { at, operation } => Ok(Some(self.apply_atomic(at, operation))),
            Job::Transmit { to, heads, mut prefix, spans } => {
                if !self.is_there(&spans) {
                    return Err(MemorySide::Source);
                }
                self.read_into(&spans, &mut prefix);
                self.send(&to, &heads, &prefix);
                Ok(None)
            }
        }
    }

    /// Whether a QP is to go another way from now on: by the carrier, or by the wire.
    pub fn switches(&mut self) -> Option<bool> {
        self.rng.happens(self.carrier_model.switches).then(|| !self.rng.one_in(3))
    }

    fn wrong(&mut self, what: String) {
        self.wrongs.push(what);
    }

    fn destination(&self, host: HostId) -> Destination {
        if shard_of(host).is_some() {
            return shards::destination(host);
        }
        let (mtu, frame_bytes) = (self.path_mtu_max, self.frame_bytes);
        let (selective, records) = (self.selective.contains(&host), self.records.contains(&host));
        Destination { host, flow: 0, traffic_class: 0, hop_limit: 64, mtu, frame_bytes, selective, records }
    }

    /// Puts packets on the line.
    fn send(&mut self, to: &Destination, heads: &[PacketHead], mut payload: &[u8]) {
        for head in heads {
            let (now, rest) = payload.split_at(usize::from(head.payload_bytes));
            payload = rest;
            let mut bytes = Vec::with_capacity(head.bytes());
            bytes.extend_from_slice(&head.header.bytes[..usize::from(head.header.length)]);
            bytes.extend_from_slice(now);
            bytes.resize(head.bytes(), 0);
            self.put_out(to, bytes);
        }
    }

    /// Whether there is room on the way to another shard; if so, it is taken.
    pub fn take_room(&mut self, shard: HostId, bytes: u64) -> bool {
        let on_way = self.on_way.entry(shard).or_default();
        let has_room = *on_way < self.room_bytes;
        *on_way += if has_room { bytes } else { 0 };
        has_room
    }

    pub fn give_back_room(&mut self, shard: HostId, bytes: u64) {
        let on_way = self.on_way.entry(shard).or_default();
        match on_way.checked_sub(bytes) {
            Some(left) => *on_way = left,
            None => self.wrong(format!("{bytes} bytes come back of those to {shard:?}")),
        }
    }

    fn put_out(&mut self, to: &Destination, bytes: Vec<u8>) {
        if shard_of(to.host).is_none() {
            return self.put_on_line(to, bytes);
        }
        // A burst that began finds room for all of it.
        *self.on_way.entry(to.host).or_default() += bytes.len() as u64;
        self.packets_sent += 1;
        let Destination { host, traffic_class, hop_limit, .. } = *to;
        self.outbox.push(Outgoing { at: self.now, to: host, bytes, traffic_class, hop_limit });
    }

    fn put_on_line(&mut self, to: &Destination, bytes: Vec<u8>) {
        let line = crate::fabric::LINE_OVERHEAD_BYTES + bytes.len() as u64;
        if self.bits_per_second > 0 {
            let line_ns = (line * 8 * 1_000_000_000).div_ceil(self.bits_per_second);
            self.line_free_at = self.line_free_at.max(self.now) + line_ns;
        }
        let at = self.line_free_at.max(self.now);
        self.packets_sent += 1;
        let (traffic_class, hop_limit) = (to.traffic_class, to.hop_limit);
        self.outbox.push(Outgoing { at, to: to.host, bytes, traffic_class, hop_limit });
    }

    /// The line, or the way to another shard, keeps no more, or is said not to.
    fn is_full(&mut self, to: &Destination) -> bool {
        let waiting_ns = u128::from(self.line_free_at.saturating_sub(self.now));
        let waiting = waiting_ns * u128::from(self.bits_per_second) / 8_000_000_000;
        let has_room = match shard_of(to.host) {
            Some(_) => self.on_way.get(&to.host).is_none_or(|on_way| *on_way < self.room_bytes),
            None => waiting <= u128::from(self.send_buffer_bytes),
        };
        let is_full = !has_room || self.rng.happens(self.outcome_rates.transmit_full);
        let is_short = !has_room && shard_of(to.host).is_some();
        self.refused += u64::from(is_short);
        self.is_short |= is_short;
        self.was_full |= is_full;
        is_full
    }

    fn check_records(&mut self, to: &Destination, packet: &[u8]) {
        let room = usize::from(to.frame_bytes) + FRAME_HEADER_BYTES;
        if !self.destination(to.host).records || to.frame_bytes == 0 || packet.len() > room || self.is_own(to.host) {
            self.wrong(format!("a frame of records of {} bytes to {:?}", packet.len(), to.host));
        }
        match Records::parse(packet).map(|records| records.count()) {
            Ok(count) if count > 1 && is_intact(packet) => self.records_sent += count as u64,
            other => self.wrong(format!("a frame of records with {other:?}")),
        }
    }

    fn is_own(&self, host: HostId) -> bool {
        [self.host, self.shard].contains(&host)
    }

    fn check_burst(&mut self, to: &Destination, heads: &[PacketHead], payload_bytes: u64) {
        if heads.iter().map(|head| u64::from(head.payload_bytes)).sum::<u64>() != payload_bytes {
            self.wrong("a burst's heads and payload differ in length".into());
        }
        if self.is_own(to.host) || heads.is_empty() {
            self.wrong(format!("a burst of {} packets to {:?}", heads.len(), to.host));
        }
        for head in heads {
            let mut packet = head.header.bytes[..usize::from(head.header.length)].to_vec();
            packet.resize(head.bytes(), 0);
            match Header::parse(&packet) {
                Err(error) => self.wrong(format!("a packet that is {error:?}")),
                Ok((header, payload)) => {
                    let asked = self.mtus.get(&(to.host, header.dest_qpn)).copied().unwrap_or(4096);
                    let mtu = match header.frame {
                        // The one who asked for a response says how long its packets are.
                        Some(_) if header.opcode.is_response() => FRAME_PAYLOAD_BYTES_MAX,
                        Some(_) => usize::from(to.frame_bytes),
                        None => asked.min(usize::from(to.mtu)),
                    };
                    let is_report = header.frame.is_some() && header.opcode.operation() == Operation::Acknowledge;
                    self.reports_sent += u64::from(is_report);
                    if is_report && !self.destination(to.host).selective {
                        self.wrong(format!("a report to {:?}, which does not know them", to.host));
                    }
                    if payload.len() > mtu {
                        self.wrong(format!("{} bytes of payload in {header:?}, MTU {mtu}", payload.len()));
                    }
                }
            }
        }
    }
}

fn take<T: Clone>(ring: Option<&mut Ring<T>>, into: &mut T) -> Fetch {
    match ring.and_then(|ring| ring.posted.pop_front()) {
        None => Fetch::Empty,
        Some(request) => {
            *into = request;
            Fetch::Ready
        }
    }
}

impl Queues for World {
    fn fetch_send(&mut self, qp: QpId, into: &mut SendRequest) -> Fetch {
        take(self.sends.get_mut(&qp), into)
    }

    fn fetch_receive(&mut self, _qp: QpId, queue: ReceiveQueueId, into: &mut ReceiveRequest) -> Fetch {
        take(self.receives.get_mut(&queue), into)
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
        self.completions.entry(cq).or_default().push_back(*completion);
        Ok(())
    }

    fn raise(&mut self, kind: AsyncEventKind, about: EventTarget) {
        self.events.push((kind, about));
    }
}

impl Memory for World {
    fn copy(&mut self, token: Token, from: Source<'_>, to: &[Span], _last: bool) -> CopyOutcome {
        let mut bytes = from.prefix.to_vec();
        let mut spans = Vec::new();
        match from.body {
            SourceBody::Bytes(body) => bytes.extend_from_slice(body),
            SourceBody::Spans(body) => spans.extend_from_slice(body),
        }
        let total = |spans: &[Span]| spans.iter().map(|span| u64::from(span.length)).sum::<u64>();
        if total(to) != bytes.len() as u64 + total(&spans) {
            self.wrong("both sides of a copy differ in length".into());
        }
        let job = Job::Copy { from: bytes, spans, to: to.to_vec() };
        if self.rng.happens(self.outcome_rates.copy_pending) {
            self.begun.push((token, job));
            return CopyOutcome::Pending;
        }
        match self.finish(job) {
            Ok(_) => CopyOutcome::Done,
            Err(side) => CopyOutcome::Fault(side),
        }
    }

    fn atomic(&mut self, token: Token, at: Span, operation: AtomicOperation) -> AtomicOutcome {
        if at.length != 8 || !at.address.is_multiple_of(8) {
            self.wrong(format!("an atomic at {at:?}"));
        }
        let job = Job::Atomic { at, operation };
        if self.rng.happens(self.outcome_rates.copy_pending) {
            self.begun.push((token, job));
            return AtomicOutcome::Pending;
        }
        match self.finish(job) {
            Ok(value) => AtomicOutcome::Done(value.expect("an atomic finds a value")),
            Err(_) => AtomicOutcome::Fault,
        }
    }

    /// Nothing here goes past the engine.
    fn revoke_direct(&mut self, _qp: QpId) {}
}

impl Fabric for World {
    fn path(&mut self, _vnic: VnicId, to: NetworkId, route: &GlobalRoute) -> Path {
        match self.addresses.get(&(to, route.dgid)) {
            Some(&host) if host != self.host => Path::Wire(self.destination(host)),
            _ => Path::Local,
        }
    }

    fn peer(&mut self, host: HostId, qpn: Qpn) -> PeerAnswer {
        match self.peers.get(&(host, qpn)) {
            Some(Some(info)) => PeerAnswer::Known(*info),
            Some(None) => PeerAnswer::Absent,
            None if host == FORGER => PeerAnswer::Absent,
            None => {
                self.asked.push((host, qpn));
                PeerAnswer::Asked
            }
        }
    }

    fn transmit(
        &mut self,
        token: Token,
        to: &Destination,
        heads: &[PacketHead],
        payload: Source<'_>,
    ) -> TransmitOutcome {
        let mut prefix = payload.prefix.to_vec();
        let mut spans = Vec::new();
        match payload.body {
            SourceBody::Bytes(body) => prefix.extend_from_slice(body),
            SourceBody::Spans(body) => spans.extend_from_slice(body),
        }
        let length = prefix.len() as u64 + spans.iter().map(|span| u64::from(span.length)).sum::<u64>();
        self.check_burst(to, heads, length);
        if self.is_full(to) {
            return TransmitOutcome::Full;
        }
        let job = Job::Transmit { to: *to, heads: heads.to_vec(), prefix, spans };
        let Job::Transmit { spans, .. } = &job else { return TransmitOutcome::Fault };
        if !spans.is_empty() && self.rng.happens(self.outcome_rates.transmit_pending) {
            self.begun.push((token, job));
            return TransmitOutcome::Pending;
        }
        if self.finish(job).is_ok() { TransmitOutcome::Sent } else { TransmitOutcome::Fault }
    }

    fn transmit_records(&mut self, to: &Destination, head: &[u8], payload: Source<'_>) -> TransmitOutcome {
        let mut packet = head.to_vec();
        match payload.body {
            SourceBody::Bytes(bytes) => packet.extend_from_slice(bytes),
            // Of memory that can't be read at once.
            SourceBody::Spans([_, ..]) if self.rng.happens(self.outcome_rates.transmit_pending) => {
                return TransmitOutcome::Fault;
            }
            SourceBody::Spans(spans) if !self.is_there(spans) => return TransmitOutcome::Fault,
            SourceBody::Spans(spans) => self.read_into(spans, &mut packet),
        }
        self.check_records(to, &packet);
        if self.is_full(to) {
            return TransmitOutcome::Full;
        }
        self.put_out(to, packet);
        TransmitOutcome::Sent
    }

    fn identity_changed(&mut self, qpn: Qpn, peer: Option<HostId>) {
        self.identities.push((qpn, peer));
    }

    fn notify_disconnected(&mut self, qpn: Qpn, host: HostId, _peer: Qpn) {
        self.wrong(format!("{qpn:?} was disconnected from {host:?} without a rule"));
    }

    /// No host of a simulation has a connection manager.
    fn take_management(&mut self, _from: HostId, _mad: &[u8; freeflow_wire::cm::MAD_BYTES]) -> bool {
        false
    }

    fn group_hosts(&mut self, network: NetworkId, group: Gid, into: &mut Vec<(Destination, Qpn)>) {
        let Some(hosts) = self.groups.get(&(network, group)) else { return };
        into.extend(hosts.iter().map(|(&host, &qpn)| (self.destination(host), qpn)));
    }
}

impl Carrier for World {
    fn carry(&mut self, token: Token, message: &CarriedMessage<'_>, local: Source<'_>) -> CarryOutcome {
        let (bytes, spans) = match local.body {
            SourceBody::Bytes(bytes) => (bytes.to_vec(), Vec::new()),
            SourceBody::Spans(spans) => (Vec::new(), spans.to_vec()),
        };
        let total = bytes.len() as u64 + spans.iter().map(|span| u64::from(span.length)).sum::<u64>();
        let head = message.head;
        if total != u64::from(head.length) || self.is_own(message.host) {
            self.wrong(format!("a carrier gets {total} bytes for {:?} as {head:?}", message.host));
        }
        if self.rng.happens(self.carrier_model.declined) {
            return CarryOutcome::Declined;
        }
        if self.rng.happens(self.carrier_model.put_off) {
            self.put_off.push(message.qp);
            return CarryOutcome::Later;
        }
        let rnr_retries_left = Some(message.attributes.rnr_retry).filter(|retries| *retries < 7);
        self.loads.push(Load { qp: message.qp, token, to: message.host, head, rnr_retries_left, bytes, spans });
        CarryOutcome::Taken
    }

    fn withdraw(&mut self, qp: QpId) {
        self.withdrawn.push(qp);
    }
}

impl Policy for World {
    /// No rules: all may talk.
    fn authorize(&mut self, _talk: &AuthorizationRequest) -> bool {
        true
    }

    /// Networks of a simulation have no others to reach.
    fn network_at(&mut self, network: NetworkId, _gid: Gid) -> NetworkId {
        network
    }

    fn report_unknown_key(&mut self, _own: NetworkId, _attempt: &Violation) {}

    fn report_violation(&mut self, _violation: &Violation) {
        self.violations += 1;
    }
}
