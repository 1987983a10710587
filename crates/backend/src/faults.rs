//! Faults on purpose: loss, duplication, reordering, delay and corruption of single packets as they
//! leave, below GSO. For tests and demonstrations. What happens to the n-th packet follows from the
//! seed and n alone.
use crate::lanes::PacketRoute;
use crate::peers::PeerIndex;
use crate::udp::PACKET_BYTES_MAX;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::{Duration, Instant};

/// Packets that are held back at once, at most; another one is lost. With packets of 4 KiB what twice 10 ms at 50 Gb/s
/// are: 138 MB, of which only what was ever used at a time takes memory, and none without faults.
pub const HELD_COUNT_MAX: usize = 32_768;
/// A packet is overtaken by 1 to this many others.
const OVERTAKING_COUNT_MAX: u64 = 8;
/// A packet to be overtaken goes out after this time even if nothing overtakes it.
const OVERTAKING_WAIT: Duration = Duration::from_millis(1);
/// A delay ends at one of so many moments within its length.
const DELAY_STEPS: u64 = 100;
const MILLION: u64 = 1_000_000;

/// Faults for packets that are sent: probabilities in parts per million, each of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    pub seed: u64,
    pub loss_ppm: u32,
    /// Sent again right after its batch.
    pub duplicate_ppm: u32,
    /// Overtaken by a few packets that were sent later.
    pub reorder_ppm: u32,
    /// Held back for `delay_ns`, or up to a hundredth longer.
    pub delay_ppm: u32,
    pub delay_ns: u64,
    /// One bit is inverted, anywhere in the packet or its ICRC; of a frame, in its headers.
    pub corrupt_ppm: u32,
}

/// The fate of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    pub lose: bool,
    pub duplicate: bool,
    /// By how many packets it is overtaken.
    pub overtaken: Option<u8>,
    pub delay: bool,
    /// The bit to invert, modulo the packet's length.
    pub flip: Option<u32>,
}

/// A packet held back.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    pub route: PacketRoute,
    pub bytes: usize,
    /// It is no frame.
    pub icrc: bool,
    pub flip: Option<u32>,
    /// It is out; its place is freed when its time comes.
    gone: bool,
}

/// When, the serial number, and the place.
type Due = (Instant, u64, u16);

pub(crate) struct Injector {
    faults: Faults,
    random: u64,
    begun: Instant,
    held: Vec<Held>,
    bytes: Box<[u8]>,
    free: Vec<u16>,
    /// Packets that became due in the order in which they came, as all do that are delayed by the same time; the
    /// serial number keeps those of one moment in order.
    in_order: VecDeque<Due>,
    /// Those that become due before one that came earlier; the earliest first.
    out_of_order: BinaryHeap<Reverse<Due>>,
    /// Packets to be overtaken, and by how many more.
    overtaking: Vec<(u16, u8)>,
    serial: u64,
}

impl Injector {
    pub fn new(faults: Faults) -> Self {
        let route = PacketRoute { to: PeerIndex(0), qpn: 0, flow: 0, spreads: false, traffic_class: 0 };
        let nothing = Held { route, bytes: 0, icrc: true, flip: None, gone: true };
        Self {
            faults,
            random: faults.seed,
            begun: Instant::now(),
            held: vec![nothing; HELD_COUNT_MAX],
            bytes: vec![0; HELD_COUNT_MAX * PACKET_BYTES_MAX].into_boxed_slice(),
            free: (0..HELD_COUNT_MAX as u16).rev().collect(),
            in_order: VecDeque::new(),
            out_of_order: BinaryHeap::new(),
            overtaking: Vec::new(),
            serial: 0,
        }
    }

    /// SplitMix64 (Steele, Lea, Flood 2014).
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn happens(&mut self, ppm: u32) -> bool {
        // The upper bits scaled to a million: the bias is below 2^-32.
        (u128::from(self.draw()) * u128::from(MILLION)) >> 64 < u128::from(ppm)
    }

    /// Draws equally often for every packet, whatever happens to it.
    pub fn decide(&mut self) -> Decision {
        let faults = self.faults;
        let lose = self.happens(faults.loss_ppm);
        let duplicate = self.happens(faults.duplicate_ppm);
        let reorder = self.happens(faults.reorder_ppm);
        let delay = self.happens(faults.delay_ppm);
        let corrupt = self.happens(faults.corrupt_ppm);
        let detail = self.draw();
        let overtaken = reorder.then_some((detail % OVERTAKING_COUNT_MAX) as u8 + 1);
        Decision { lose, duplicate, overtaken, delay, flip: corrupt.then_some((detail >> 32) as u32) }
    }

    /// When a packet goes out that is delayed now. Up to a hundredth of the delay later, together with others: packets
    /// that came in one burst leave in one burst, as they do without a delay.
    pub fn due(&self, now: Instant) -> Instant {
        let delay = Duration::from_nanos(self.faults.delay_ns);
        let step_ns = self.faults.delay_ns / DELAY_STEPS;
        let into_step_ns = (now - self.begun).as_nanos().checked_rem(u128::from(step_ns)).unwrap_or(0);
        now + delay + Duration::from_nanos((u128::from(step_ns) - into_step_ns) as u64)
    }

    /// Holds a copy of `packet` until `due`, or until it is overtaken as often as `overtaken` says. False: no room.
    pub fn hold(&mut self, held: Held, packet: &[u8], due: Instant, overtaken: Option<u8>) -> bool {
        let Some(slot) = self.free.pop() else { return false };
        let at = usize::from(slot);
        self.held[at] = held;
        self.bytes[at * PACKET_BYTES_MAX..][..packet.len()].copy_from_slice(packet);
        if let Some(count) = overtaken {
            self.overtaking.push((slot, count));
        }
        let due = if overtaken.is_some() { due + OVERTAKING_WAIT } else { due };
        let entry = (due, self.serial, slot);
        match self.in_order.back() {
            Some(last) if *last > entry => self.out_of_order.push(Reverse(entry)),
            _ => self.in_order.push_back(entry),
        }
        self.serial += 1;
        true
    }

    /// A packet went past those to be overtaken.
    pub fn overtake(&mut self) {
        for (_, count) in &mut self.overtaking {
            *count = count.saturating_sub(1);
        }
    }

    /// A packet that has been overtaken often enough.
    pub fn overtaken(&self) -> Option<u16> {
        self.overtaking.iter().find(|(_, count)| *count == 0).map(|(slot, _)| *slot)
    }

    /// The packet that is due next, and when. Frees the places of those that are out already.
    pub fn next(&mut self) -> Option<(Instant, u16)> {
        while let Some((due, _, slot)) = self.first() {
            if !self.held[usize::from(slot)].gone {
                return Some((due, slot));
            }
            match self.in_order.front() {
                Some(front) if front.2 == slot => drop(self.in_order.pop_front()),
                _ => drop(self.out_of_order.pop()),
            }
            self.free.push(slot);
        }
        None
    }

    /// The packet that is due first; it may be out already.
    fn first(&self) -> Option<Due> {
        let (one, other) = (self.in_order.front(), self.out_of_order.peek().map(|Reverse(due)| due));
        one.into_iter().chain(other).min().copied()
    }

    /// When the next packet is due; it may be one that is out already.
    pub fn next_due(&self) -> Option<Instant> {
        self.first().map(|(due, ..)| due)
    }

    pub fn packet(&self, slot: u16) -> (Held, &[u8]) {
        let at = usize::from(slot);
        (self.held[at], &self.bytes[at * PACKET_BYTES_MAX..][..self.held[at].bytes])
    }

    /// The packet is out, or given up.
    pub fn gone(&mut self, slot: u16) {
        self.held[usize::from(slot)].gone = true;
        self.overtaking.retain(|(other, _)| *other != slot);
    }

    pub fn held_count(&self) -> usize {
        let places = self.in_order.iter().chain(self.out_of_order.iter().map(|Reverse(due)| due));
        places.filter(|(_, _, slot)| !self.held[usize::from(*slot)].gone).count()
    }
}

impl Held {
    pub fn new(route: PacketRoute, (bytes, icrc): (usize, bool), flip: Option<u32>) -> Self {
        Self { route, bytes, icrc, flip, gone: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(flow: u32) -> PacketRoute {
        PacketRoute { to: PeerIndex(0), qpn: 0x11, flow, spreads: false, traffic_class: 0 }
    }

    #[test]
    fn decisions_follow_from_the_seed() {
        let faults =
            Faults { seed: 7, loss_ppm: 200_000, corrupt_ppm: 100_000, reorder_ppm: 50_000, ..Faults::default() };
        let run = |faults| {
            let mut injector = Injector::new(faults);
            (0..2000).map(|_| injector.decide()).collect::<Vec<_>>()
        };
        let first = run(faults);
        assert_eq!(first, run(faults));
        assert_ne!(first, run(Faults { seed: 8, ..faults }));
        let lost = first.iter().filter(|decision| decision.lose).count();
        assert!((300..500).contains(&lost), "{lost} of 2000 at 20 %");
        // Another fault leaves the fates of the others as they are.
        let delayed = run(Faults { delay_ppm: 500_000, ..faults });
        assert!(first.iter().zip(&delayed).all(|(a, b)| a.lose == b.lose && a.flip == b.flip));
    }

    #[test]
    fn certain_and_impossible() {
        let mut injector = Injector::new(Faults { loss_ppm: 1_000_000, ..Faults::default() });
        assert!((0..1000).all(|_| {
            let decision = injector.decide();
            decision.lose && !decision.duplicate && decision.flip.is_none()
        }));
    }

    #[test]
    fn packets_of_several_delays_go_by_time_and_those_of_one_moment_as_they_came() {
        let mut injector = Injector::new(Faults::default());
        let now = Instant::now();
        let mut delays: Vec<(u64, u32)> = (0..100_u32).map(|flow| (u64::from(flow * 37 % 11), flow)).collect();
        for &(delay, flow) in &delays {
            let held = Held::new(route(flow), (4, true), None);
            assert!(injector.hold(held, &flow.to_be_bytes(), now + Duration::from_millis(delay), None));
        }
        // One is out before its time.
        injector.gone(99);
        delays.retain(|&(_, flow)| flow != 99);
        delays.sort();
        for &(delay, flow) in &delays {
            let (due, slot) = injector.next().expect("held");
            assert_eq!((due, injector.packet(slot).1), (now + Duration::from_millis(delay), &flow.to_be_bytes()[..]));
            injector.gone(slot);
        }
        assert_eq!((injector.next(), injector.next_due(), injector.free.len()), (None, None, HELD_COUNT_MAX));
    }

    #[test]
    fn a_delay_is_at_most_a_hundredth_longer_and_keeps_bursts_together() {
        for delay_ns in [0, 1, 99, 100, 50_000, 5_000_000] {
            let injector = Injector::new(Faults { delay_ns, ..Faults::default() });
            let (mut now, mut ends) = (Instant::now(), Vec::new());
            for _ in 0..1_000 {
                now += Duration::from_nanos(1_000);
                let late = (injector.due(now) - now).as_nanos() as u64;
                assert!((delay_ns..=delay_ns + delay_ns / 100).contains(&late), "{late} for {delay_ns}");
                ends.push(injector.due(now));
            }
            assert!(ends.is_sorted());
            ends.dedup();
            // 1 ms.
            assert!(delay_ns < 5_000_000 || ends.len() <= 21, "{}", ends.len());
        }
    }

    #[test]
    fn holding_is_bounded_and_in_order() {
        let mut injector = Injector::new(Faults::default());
        let now = Instant::now();
        let held = |flow| Held::new(route(flow), (4, true), None);
        for flow in 0..HELD_COUNT_MAX as u32 {
            assert!(injector.hold(held(flow), &flow.to_be_bytes(), now, None));
        }
        assert!(!injector.hold(held(0), &[0; 4], now, None));
        assert_eq!(injector.held_count(), HELD_COUNT_MAX);
        for flow in 0..HELD_COUNT_MAX as u32 {
            let (_, slot) = injector.next().expect("held");
            assert_eq!(injector.packet(slot).1, flow.to_be_bytes());
            injector.gone(slot);
        }
        assert_eq!((injector.next(), injector.held_count()), (None, 0));
        assert!(injector.hold(held(0), &[0; 4], now, Some(2)));
        injector.overtake();
        assert_eq!(injector.overtaken(), None);
        injector.overtake();
        assert!(injector.overtaken().is_some());
    }
}
