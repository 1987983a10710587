use super::*;

/// One sender, as its receiver sees it. A datagram of the ring is the number that it says; one of the router's is 1000
/// and how many came before.
struct Sender {
    ring: VecDeque<u32>,
    displaced: VecDeque<u32>,
    order: Order,
}

impl Sender {
    fn new() -> Self {
        Self { ring: VecDeque::new(), displaced: VecDeque::new(), order: Order { routed: 0, since: Some(10) } }
    }

    fn take(&mut self) -> Option<u32> {
        if is_routed_next(self.displaced.front().copied(), self.ring.front().copied()) {
            return self.displaced.pop_front().map(|routed| 1000 + routed);
        }
        let next = self.ring.pop_front()?;
        if self.displaced.is_empty() {
            self.order.routed = next;
        }
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
