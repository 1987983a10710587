use super::*;
use crate::regions::{Region, SGES_MAX};
use freeflow_shm::layout::{QueueShape, descriptor, direct_ring};
use freeflow_shm::{BiasedMutex, OwnRange, RequestProducer, Segment};
use freeflow_verbs::{Access, Sge};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// One sender, as its receiver sees it. A datagram of the ring is the number that it says; one of the router's is 1000
/// and how many came before.
struct Sender {
    ring: VecDeque<u32>,
    displaced: VecDeque<u32>,
    order: Order,
}

impl Sender {
    fn new() -> Self {
        Self { ring: VecDeque::new(), displaced: VecDeque::new(), order: Order::new(10) }
    }

    fn take(&mut self) -> Option<u32> {
        if is_routed_next(self.displaced.front().copied(), self.ring.front().copied()) {
            return self.displaced.pop_front().map(|routed| 1000 + routed);
        }
        let next = self.ring.pop_front()?;
        self.order.take(next, !self.displaced.is_empty());
        Some(next)
    }

    /// By the router. False: it changes places with an older one.
    fn route(&mut self) -> bool {
        let passes = self.order.passes(self.ring.front().copied(), !self.displaced.is_empty());
        if !passes {
            let routed = self.order.count();
            self.displaced.push_back(routed);
        }
        passes
    }
}

#[test]
fn what_the_router_delivers_early_comes_after_older_ones() {
    let mut sender = Sender::new();
    // Two by the ring, two by the router, two by the ring: the router's are seen first.
    sender.ring.extend([0, 0]);
    assert!(!sender.route() && !sender.route());
    sender.ring.extend([2, 2]);
    let taken: Vec<u32> = std::iter::from_fn(|| sender.take()).collect();
    assert_eq!(taken, [0, 0, 1000, 1001, 2, 2]);
    assert!(sender.route() && sender.route());
    sender.ring.push_back(4);
    assert_eq!(sender.take(), Some(4));
}

#[test]
fn one_that_comes_before_the_ring_goes_on_is_not_late() {
    let mut sender = Sender::new();
    sender.ring.push_back(1);
    assert!(sender.route(), "it was sent before");
    assert_eq!(sender.take(), Some(1));
}

#[test]
fn what_came_before_the_ring_was_opened_does_not_count() {
    let mut sender = Sender::new();
    assert!(!sender.order.has_begun(9) && sender.order.has_begun(10));
    assert!(sender.route() && sender.order.has_begun(11_u32.wrapping_sub(1 << 31)), "however long that is ago");
}

#[test]
fn counts_agree_again_after_losses() {
    let mut sender = Sender::new();
    // Nine were lost on the router's way.
    sender.ring.push_back(9);
    assert_eq!((sender.take(), sender.order.routed), (Some(9), 9));
    sender.ring.push_back(9);
    assert!(!sender.route());
    assert_eq!((sender.take(), sender.take()), (Some(9), Some(1009)));
}

/// By either path at random, and however late the receiver looks.
#[test]
fn all_are_in_order() {
    for seed in 1..500_u64 {
        let mut random = seed;
        let mut next = move |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let (mut sender, mut taken) = (Sender::new(), Vec::new());
        // Completed by the router, and polled by nobody.
        let (mut completed, mut routed) = (0, 0);
        let mut expect = Vec::new();
        for _ in 0..100 {
            match next(5) {
                0 | 1 => {
                    sender.ring.push_back(routed);
                    expect.push(routed);
                }
                2 => {
                    expect.push(1000 + routed);
                    (completed, routed) = (completed + 1, routed + 1);
                }
                _ => {
                    // A ring's datagram that is polled first waits for the RECVs before.
                    for _ in 0..std::mem::take(&mut completed) {
                        let is_in_order = sender.route();
                        let name = if is_in_order { Some(999 + sender.order.routed) } else { sender.take() };
                        taken.extend(name);
                    }
                    for _ in 0..next(4) {
                        taken.extend(sender.take());
                    }
                }
            }
        }
        (0..completed).for_each(|_| {
            let is_in_order = sender.route();
            let name = if is_in_order { Some(999 + sender.order.routed) } else { sender.take() };
            taken.extend(name);
        });
        taken.extend(std::iter::from_fn(|| sender.take()));
        assert_eq!(taken, expect, "{seed}");
    }
}

#[test]
fn a_receive_is_filled_piece_by_piece() {
    let mut room = Room { ranges: [OwnRange::default(); SGES_MAX], count: 3, bytes: 48 };
    for (range, (address, bytes)) in room.ranges.iter_mut().zip([(100, 4), (200, 36), (300, 8)]) {
        *range = OwnRange { address, bytes };
    }
    let mut pieces = Vec::new();
    room.split(GRH_BYTES as u32, |range| pieces.push((range.address, range.bytes)));
    assert_eq!(pieces, [(100, 4), (200, 36)]);
    pieces.clear();
    room.split(5, |range| pieces.push((range.address, range.bytes)));
    assert_eq!(pieces, [(300, 5)]);
    assert_eq!((room.ranges[2].address, room.ranges[2].bytes), (305, 3));
}

/// Its first datagram too early for the router's: that one was left in its RECV.
#[test]
fn one_that_stays_in_its_receive_is_counted() {
    let mut sender = Sender::new();
    sender.ring.push_back(0);
    assert!(!sender.order.passes(Some(0), false));
    assert_eq!(sender.order.count(), 0);
    sender.order.is_ahead = true;
    // The ring's first, one that was sent after the router's first, and then the router's second.
    sender.ring.push_back(1);
    assert_eq!(sender.take(), Some(0));
    assert!(!sender.route(), "the second comes after what is in the ring");
    assert_eq!((sender.take(), sender.take()), (Some(1), Some(1001)));
}

fn a_ring(place: u32, source_qpn: u32) -> (Arc<Segment>, Ring) {
    let segment = Arc::new(Segment::create("test", direct_ring::bytes(1)).unwrap().0);
    let (receiver, _) = DirectRingReceiver::new(segment.clone(), CreditList::Promised);
    let route = GlobalRoute { dgid: ipv4(9), ..GlobalRoute::default() };
    (segment, Ring::new(receiver, place, (source_qpn, ipv4(1), route, 0)))
}

fn ipv4(last: u8) -> Gid {
    Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last])
}

/// As a sender does that has put so many there before.
fn put(segment: &Segment, number: u32) {
    let at = direct_ring::DESCRIPTORS + number as usize * direct_ring::DESCRIPTOR_BYTES;
    segment
        .u64(at + descriptor::FLAGS)
        .store(u64::from(number + 1) << (8 * (descriptor::NEXT_SLOT - descriptor::FLAGS)), Ordering::Relaxed);
    segment.u64(at + descriptor::LENGTH).store(u64::from(number + 1) << 32, Ordering::Release);
}

fn take(ring: &mut Ring) -> bool {
    let message = ring.peek();
    message.inspect(|message| ring.take(message)).is_some()
}

#[test]
fn what_is_put_into_a_closed_ring_is_not_taken() {
    let (segment, mut ring) = a_ring(0, 5);
    (0..3).for_each(|number| put(&segment, number));
    assert!(take(&mut ring));
    ring.note_closed();
    (3..9).for_each(|number| put(&segment, number));
    ring.note_closed();
    assert_eq!(ring.published(), 3);
    assert!(take(&mut ring) && take(&mut ring) && !take(&mut ring) && ring.is_empty());
}

/// The queue of RECVs of a QP.
struct Receives {
    side: BiasedMutex<ReceiveSide>,
    offers_seen: AtomicU32,
}

impl Receives {
    fn new() -> Self {
        let shape = QueueShape::receive(16, 8);
        let segment = Arc::new(Segment::create("test", shape.bytes()).unwrap().0);
        let ring = RequestProducer::new(segment, 0, shape);
        let side = ReceiveSide { ring, credits: None, keys: Cache::default(), waiting: None, ring_messages: 0 };
        Self { side: BiasedMutex::new(side), offers_seen: AtomicU32::new(0) }
    }

    fn queue(&self) -> ReceiveQueue<'_> {
        ReceiveQueue { cookie: 1, qpn: 2, pd: 7, handle: 3, side: &self.side, offers_seen: &self.offers_seen }
    }
}

#[test]
fn a_receive_of_more_pieces_is_the_routers() {
    let (receives, regions, mut keys) = (Receives::new(), Regions::default(), Cache::default());
    let access = Access::LOCAL_WRITE;
    regions.insert(5, Region { handle: 1, pd: 7, iova: 0, length: 4096, address: 0x1000, access });
    let piece = |length| Sge { address: 0, length, lkey: 5 };
    let mut side = receives.side.lock();
    side.ring.publish_receive(0, &[piece(0), piece(40), piece(0), piece(64)]);
    side.ring.publish_receive(0, &[piece(0), piece(40), piece(0), piece(0), piece(0), piece(64)]);
    let mut of = |position| Room::of(&regions.hold(), &mut keys, &receives.queue(), &side, position);
    assert_eq!(of(0).map(|room| (room.count, room.bytes)), Some((2, 104)));
    assert!(of(1).is_none(), "not one of 40 bytes");
}

/// Each ring that is closed with something in it costs a mapping, and a sender can open others without end.
#[test]
fn closed_rings_are_bounded() {
    let (receives, mut rings) = (Receives::new(), Vec::new());
    for number in 0..3 {
        let (segment, ring) = a_ring(0, 5);
        put(&segment, 0);
        rings.push(ring);
        // None is open by the header's word.
        follow(&mut rings, &receives.queue());
        assert_eq!(rings.len(), 1, "one of a sender: {number}");
    }
    for number in 0..300 {
        let (segment, ring) = a_ring(number % 64, 100 + number);
        put(&segment, 0);
        rings.push(ring);
        follow(&mut rings, &receives.queue());
        assert!(rings.len() <= CLOSED_MAX);
    }
    assert_eq!(rings.last().map(|ring| ring.source_qpn), Some(399), "the oldest go");
    rings.iter_mut().for_each(|ring| assert!(take(ring)));
    follow(&mut rings, &receives.queue());
    assert!(rings.is_empty());
}

/// A datagram that the router delivered has left its RECV for it, and is not lost.
#[test]
fn a_closed_ring_stays_for_what_changed_places() {
    let (receives, mut rings) = (Receives::new(), Vec::new());
    for number in 0..(CLOSED_MAX as u32 + 9) {
        let (segment, mut ring) = a_ring(0, 5 + number / 2);
        put(&segment, 0);
        if number < 2 {
            ring.displaced.push_back(Displaced { routed: 0, completion: Completion::default(), bytes: vec![1] });
        }
        rings.push(ring);
    }
    follow(&mut rings, &receives.queue());
    assert_eq!(rings.iter().filter(|ring| !ring.displaced.is_empty()).count(), 2);
}

#[test]
fn a_ring_is_in_order_with_its_addresses_alone() {
    let (_, ring) = a_ring(0, 5);
    let header =
        |from, to| grh(ipv4(from), &GlobalRoute { dgid: ipv4(to), hop_limit: 3, ..GlobalRoute::default() }, 77, true);
    assert!(ring.has_addresses_of(&header(1, 9)));
    assert!(!ring.has_addresses_of(&header(2, 9)), "another host's QP");
    assert!(!ring.has_addresses_of(&header(1, 8)), "another address, or a group's");
    let group = GlobalRoute { dgid: Gid([0xff; 16]), ..GlobalRoute::default() };
    assert!(!ring.has_addresses_of(&grh(ipv4(1), &group, 77, true)));
}
