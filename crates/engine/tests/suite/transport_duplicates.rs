//! Duplicates of READs, atomics, FLUSHes and ATOMIC WRITEs at every depth of the responder: none ends the QP, none is
//! executed twice, none keeps the next request of a requester that counts right from being taken.
use crate::common::peer::*;
use crate::common::*;
use freeflow_engine::MemorySide;
use freeflow_verbs::*;
use freeflow_wire::{Header, Operation as Op, PacketPosition, Reth, psn_add, psn_ahead};
use proptest::prelude::*;

/// READs are of memory from here on, which nobody writes to.
const PATTERN_AT: u64 = 4096;
const PATTERN_BYTES: usize = 64 << 10;
/// Atomics add to this word; ATOMIC WRITE writes to the one behind.
const COUNTER_AT: u64 = 0;
const DEPTH_MAX: u8 = 16;

fn read(psn: u32, place: PacketPosition, bytes: usize) -> Says {
    Says::Read { psn, place, bytes }
}

// ---- one by one

/// The answer that is on its way may reach the requester, whose next request then meets the duplicate's answer.
#[test]
fn a_duplicate_does_not_count_when_its_answer_was_out() {
    for depth in 1..=DEPTH_MAX {
        let mut link = Link::with_depth(depth);
        link.net.world.always_put_off = true;
        let first = link.read_header(0, 300);
        for _ in 0..depth {
            link.read(0, 300);
        }
        for _ in 0..3 {
            link.deliver(first, &[]);
        }
        // The first READ's responses go out: the requester may send one more.
        link.net.land(0);
        link.read(0, 300);
        link.net.settle();
        assert_eq!(link.state(), QpState::ReadyToSend, "depth {depth}");
        let says = link.says();
        let both = |at| [read(2 * at, PacketPosition::First, 256), read(2 * at + 1, PacketPosition::Last, 44)];
        let expected = [0, 0].into_iter().chain(1..=u32::from(depth)).flat_map(both);
        assert_eq!(says, expected.collect::<Vec<_>>(), "depth {depth}");
    }
}

/// The answer has not gone out as a whole, so that its requester can't have room for another request.
#[test]
fn a_duplicate_counts_while_its_answer_was_not_out() {
    for depth in 1..=DEPTH_MAX {
        let mut link = Link::with_depth(depth);
        link.net.world.transmit_room = Some(0);
        let first = link.read_header(0, 300);
        for _ in 0..depth {
            link.read(0, 300);
        }
        link.deliver(first, &[]);
        assert_eq!(link.state(), QpState::ReadyToSend);
        link.read(0, 300);
        assert_eq!(link.state(), QpState::Error, "depth {depth}");
    }
}

/// Other requesters don't count FLUSH, so one that waits for its turn must not keep a READ from being taken.
#[test]
fn a_flush_does_not_count() {
    let mut link = Link::with_depth(1);
    link.net.world.transmit_room = Some(0);
    for _ in 0..3 {
        let reth = link.reth(0, 8);
        link.push(Header { flush: 1, reth, ..link.header(Op::Flush, PacketPosition::Only) }, &[]);
    }
    link.read(0, 10);
    link.net.world.transmit_room = None;
    let expected = [(0, 0), (1, 0), (2, 0), (3, 10)].map(|(psn, bytes)| read(psn, PacketPosition::Only, bytes));
    assert_eq!(link.says(), expected);
}

/// A requester that goes back asks for all again, and takes answers in the order of their PSNs only.
#[test]
fn duplicates_are_answered_in_the_order_of_their_requests() {
    let mut link = Link::new();
    let headers = [0, 1].map(|_| {
        let header = link.read_header(0, 300);
        link.read(0, 300);
        header
    });
    assert_eq!(link.says().len(), 4);
    let third = link.read_header(0, 300);
    link.net.world.transmit_room = Some(0);
    link.read(0, 300);
    // The third one's answer waits when the others are asked for again, the later one first.
    for header in [headers[1], headers[0], third] {
        link.deliver(header, &[]);
    }
    link.net.world.transmit_room = None;
    let psns = link.replies().iter().map(|(header, _)| psn_ahead(header.psn, FIRST_PSN)).collect::<Vec<_>>();
    assert_eq!(psns, [0, 1, 2, 3, 4, 5]);
}

/// Of requests that were forgotten, or never were: dropped (class D), and nothing else.
#[test]
fn duplicates_from_before_what_is_remembered_are_dropped() {
    for depth in 1..=DEPTH_MAX {
        let mut link = Link::with_depth(depth);
        let mut headers = Vec::new();
        for at in 0..2 * u32::from(depth) {
            let header =
                if at % 2 == 0 { link.read_header(PATTERN_AT, 10) } else { link.fetch_add_header(COUNTER_AT, 1) };
            headers.push(header);
            link.push(header, &[]);
        }
        link.says();
        for (at, header) in headers.iter().enumerate() {
            link.deliver(*header, &[]);
            assert_eq!(link.says().len(), usize::from(at >= usize::from(depth)), "depth {depth}, request {at}");
        }
        assert_eq!(link.memory(COUNTER_AT, 8), u64::from(depth).to_ne_bytes());
        assert_eq!(link.state(), QpState::ReadyToSend);
    }
}

/// The requester has all of the READ, and its owner may have freed the memory since: a duplicate
/// that a timeout made of it is no error of theirs.
#[test]
fn a_duplicate_of_a_read_whose_memory_is_deregistered_is_dropped() {
    for length in [10, 300, 100_000] {
        let mut link = Link::new();
        let end = link.end;
        let size = MEMORY_BYTES as u64;
        let keys =
            link.net.engine.register_mr(end.session, end.pd, MEMORY_BASE, size, MEMORY_BASE, ALL_ACCESS).unwrap();
        let reth = Reth { rkey: keys.rkey, ..link.reth(0, length) };
        let first = Header { reth, ..link.read_header(0, length) };
        link.push(first, &[]);
        link.psn = psn_add(first.psn, length.div_ceil(link.mtu) as u32);
        assert_eq!(link.says().len(), length.div_ceil(link.mtu));
        link.net.engine.deregister_mr(end.session, keys.mr).unwrap();
        link.deliver(first, &[]);
        assert_eq!(link.says(), []);
        assert_eq!(link.state(), QpState::ReadyToSend, "{length} bytes");
        let next = link.psn;
        link.read(0, 10);
        assert_eq!(link.says(), [read(psn_ahead(next, FIRST_PSN) as u32, PacketPosition::Only, 10)]);
        assert!(link.net.world.events.is_empty());
    }
}

/// As long as its last packet has not gone out, the READ is under way, however often it is asked for.
#[test]
fn a_duplicate_of_a_read_under_way_needs_its_memory() {
    let mut link = Link::new();
    let end = link.end;
    let keys = link.net.engine.register_mr(end.session, end.pd, MEMORY_BASE, 4096, MEMORY_BASE, ALL_ACCESS).unwrap();
    let reth = Reth { rkey: keys.rkey, ..link.reth(0, 300) };
    let first = Header { reth, ..link.read_header(0, 300) };
    link.net.world.transmit_room = Some(0);
    for _ in 0..2 {
        link.deliver(first, &[]);
    }
    link.net.engine.deregister_mr(end.session, keys.mr).unwrap();
    link.net.world.transmit_room = None;
    assert!(matches!(link.says()[..], [Says::Nak { psn: 0, .. }]));
    assert_eq!(link.state(), QpState::Error);
}

/// Its owner went while the duplicate's answer was being fetched.
#[test]
fn a_duplicate_of_a_read_whose_memory_goes_meanwhile_is_dropped() {
    let mut link = Link::new();
    let first = link.read_header(0, 300);
    link.read(0, 300);
    assert_eq!(link.says().len(), 2);
    link.net.world.always_put_off = true;
    link.deliver(first, &[]);
    let (token, _) = link.net.world.pending.pop().unwrap();
    let now = link.net.now;
    link.net.engine.handle_copied(&mut link.net.world, now, token, Err(MemorySide::Source));
    assert_eq!(link.says(), []);
    assert_eq!(link.state(), QpState::ReadyToSend);
}

// ---- a requester that keeps the rules, on a network that does not

/// A request that was sent.
#[derive(Clone)]
struct Request {
    header: Header,
    payload: Vec<u8>,
    packets: u32,
    /// Packets of its answer that came.
    got: u32,
    /// Of an atomic: what it must find.
    original: u64,
}

impl Request {
    fn operation(&self) -> Op {
        self.header.opcode.operation()
    }

    /// It takes one of `max_dest_rd_atomic`.
    fn counts(&self) -> bool {
        !matches!(self.operation(), Op::Write | Op::Flush)
    }

    /// The rest of a READ from this packet on; anything else as it was.
    fn again(&self, from: u32, mtu: usize) -> Header {
        let mut header = self.header;
        if self.operation() == Op::ReadRequest {
            let skipped = from * mtu as u32;
            header.psn = psn_add(header.psn, from);
            header.reth.address += u64::from(skipped);
            header.reth.length -= skipped;
        }
        header
    }
}

struct Requester {
    link: Link,
    /// Not answered, oldest first.
    open: Vec<Request>,
    all: Vec<Request>,
    added: u64,
}

impl Requester {
    fn new(depth: u8, seed: Option<u64>) -> Self {
        let mut link = Link::with_depth(depth);
        link.fill(PATTERN_AT, &pattern(PATTERN_BYTES));
        link.net.world.put_off = seed.map(SimRng);
        Self { link, open: Vec::new(), all: Vec::new(), added: 0 }
    }

    /// Sends one more request, if it may.
    fn ask(&mut self, kind: u8, size: u16) {
        let link = &self.link;
        let reth = link.reth(COUNTER_AT + 8, 8);
        let length = usize::from(size) % if size.is_multiple_of(5) { PATTERN_BYTES } else { 700 };
        let (header, payload) = match kind % 5 {
            0 | 1 => (link.read_header(PATTERN_AT, length), vec![]),
            2 => (link.fetch_add_header(COUNTER_AT, 1), vec![]),
            3 => (Header { reth, ..link.header(Op::AtomicWrite, PacketPosition::Only) }, vec![1; 8]),
            _ if size.is_multiple_of(2) => {
                (Header { reth, flush: 1, ..link.header(Op::Flush, PacketPosition::Only) }, vec![])
            }
            _ => (Header { reth, ..link.header(Op::Write, PacketPosition::Only) }, vec![2; 8]),
        };
        let is_read = header.opcode.operation() == Op::ReadRequest;
        let packets = if is_read { length.div_ceil(link.mtu).max(1) as u32 } else { 1 };
        let request = Request { header, payload, packets, got: 0, original: self.added };
        let counted = self.open.iter().filter(|request| request.counts()).count();
        if request.counts() && counted >= usize::from(link.depth) || self.open.len() >= 24 {
            return;
        }
        self.added += u64::from(request.operation() == Op::FetchAdd);
        self.link.deliver(request.header, &request.payload);
        self.link.psn = psn_add(self.link.psn, packets);
        self.open.push(request.clone());
        self.all.push(request);
    }

    /// Asks again for what is not answered: for the oldest, or for all of it, or for what comes after the oldest.
    fn repeat(&mut self, which: u8) {
        let range = match which % 3 {
            0 => 0..self.open.len().min(1),
            1 => 0..self.open.len(),
            _ => 1.min(self.open.len())..self.open.len(),
        };
        let requests = self.open[range].to_vec();
        for request in &requests {
            self.link.deliver(request.again(request.got, self.link.mtu), &request.payload);
        }
    }

    /// A copy of any packet that ever was on the way comes late.
    fn haunt(&mut self, which: u16, from: u16) {
        if self.all.is_empty() {
            return;
        }
        let back = usize::from(which) % self.all.len().min(40);
        let request = self.all[self.all.len() - 1 - back].clone();
        let header = request.again(u32::from(from) % request.packets, self.link.mtu);
        self.link.deliver(header, &request.payload);
    }

    /// Delivers the packets that have gone out, but for lost ones.
    fn listen(&mut self, mut lost: impl FnMut() -> bool) {
        self.link.net.engine.flush_acks(&mut self.link.net.world, self.link.net.now);
        for sent in std::mem::take(&mut self.link.net.world.sent) {
            if !lost() {
                let (header, payload) = Header::parse(&sent.bytes).unwrap();
                self.hear(&header, payload);
            }
        }
    }

    fn hear(&mut self, header: &Header, payload: &[u8]) {
        let acknowledges = |request: &Request| request.operation() == Op::Write;
        while self
            .open
            .first()
            .is_some_and(|oldest| acknowledges(oldest) && psn_ahead(header.psn, oldest.header.psn) >= 0)
        {
            self.open.remove(0);
        }
        let mtu = self.link.mtu;
        let Some(oldest) = self.open.first_mut() else { return };
        if header.psn != psn_add(oldest.header.psn, oldest.got) || header.opcode.operation() == Op::Acknowledge {
            return;
        }
        match oldest.operation() {
            Op::ReadRequest => {
                let (at, length) = (oldest.got as usize * mtu, oldest.header.reth.length as usize);
                assert!(payload == &pattern(length)[at..(at + mtu).min(length)], "the bytes of packet {}", oldest.got);
            }
            Op::FetchAdd => assert_eq!(header.original, oldest.original),
            _ => assert!(header.opcode.operation() == Op::ReadResponse && payload.is_empty()),
        }
        oldest.got += 1;
        if oldest.got == oldest.packets {
            self.open.remove(0);
        }
    }

    fn step(&mut self, rng: &mut SimRng, (what, a, b): (u8, u16, u16)) {
        let world = &mut self.link.net.world;
        match what % 12 {
            0..=3 => self.ask(a as u8, b),
            4 => self.repeat(a as u8),
            5 | 6 => self.haunt(a, b),
            7 => world.transmit_room = [None, Some(0), Some(usize::from(a % 90))][usize::from(b % 3)],
            8 if !world.pending.is_empty() => {
                let which = usize::from(a) % world.pending.len();
                self.link.net.land(which);
            }
            9 => self.listen(|| rng.roll(4) == 0),
            _ => self.turn(),
        }
    }

    /// A few turns of the QP: the fabric may be full, so that they don't bring it to an end.
    fn turn(&mut self) {
        let Net { engine, world, now, .. } = &mut self.link.net;
        for _ in 0..3 {
            engine.run(world, *now, self.link.end.qp, 1 << 20);
        }
        while engine.poll_ready().is_some() {}
    }

    /// The network heals; the requester goes back as often as need be.
    fn finish(&mut self) {
        self.link.net.world.transmit_room = None;
        for _ in 0..4 {
            self.repeat(1);
            self.link.net.settle();
            self.listen(|| false);
        }
        assert_eq!(self.open.len(), 0, "requests that are never answered");
        assert_eq!(self.link.memory(COUNTER_AT, 8), self.added.to_ne_bytes(), "atomics are done once");
    }
}

proptest! {
    #[test]
    fn no_duplicate_ends_a_qp(
        depth in 1..=DEPTH_MAX,
        seed in any::<Option<u64>>(),
        losses in any::<u64>(),
        steps in prop::collection::vec(any::<(u8, u16, u16)>(), 1..160),
    ) {
        let mut requester = Requester::new(depth, seed);
        let mut rng = SimRng(losses);
        for step in steps {
            requester.step(&mut rng, step);
            prop_assert_eq!(requester.link.state(), QpState::ReadyToSend);
        }
        requester.finish();
        prop_assert_eq!(requester.link.state(), QpState::ReadyToSend);
    }
}
