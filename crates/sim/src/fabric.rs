//! The network between the hosts: one switch, a port of limited rate and buffer for each host, and
//! a link model: what is lost, doubled, overtaken, damaged or held up.
use crate::rng::Rng;
use std::collections::{BTreeMap, BTreeSet};

/// UDP, IP, Ethernet with preamble and gap, ICRC: what a datagram costs on the line besides its own
/// bytes.
pub const LINE_OVERHEAD_BYTES: u64 = 8 + 20 + 14 + 24 + 4;

/// Faults of packets, and how often they occur (parts of a million).
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkModel {
    pub loss: u64,
    pub duplication: u64,
    /// Damaged packets fail the ICRC: the receiver drops them.
    pub corruption: u64,
    pub reordering: u64,
    /// How long an overtaken packet is held up at most.
    pub reordering_ns_max: u64,
    /// One way.
    pub delay_ns: u64,
    pub jitter_ns: u64,
    /// Of each port. 0: unlimited.
    pub bits_per_second: u64,
    /// Buffer of each port of the switch; what does not fit is dropped.
    pub buffer_bytes: u64,
    /// Packets that find so much in the buffer are marked (ECN). 0: none.
    pub mark_bytes: u64,
}

impl LinkModel {
    /// The same network without accidents.
    pub fn without_faults(self) -> Self {
        Self { loss: 0, duplication: 0, corruption: 0, reordering: 0, ..self }
    }

    /// Time of so many bytes on the line.
    pub fn line_ns(&self, bytes: u64) -> u64 {
        if self.bits_per_second == 0 { 0 } else { (bytes * 8 * 1_000_000_000).div_ceil(self.bits_per_second) }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub carried: u64,
    pub lost: u64,
    pub dropped_full: u64,
    pub doubled: u64,
    pub overtaken: u64,
    pub marked: u64,
}

/// One packet on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    pub at: u64,
    pub marked: bool,
}

pub struct Fabric {
    pub link_model: LinkModel,
    rng: Rng,
    /// When the switch's port to a host is free.
    port_free_at: BTreeMap<usize, u64>,
    /// Packets of one pair of hosts keep their order unless the link model changes it.
    last: BTreeMap<(usize, usize), u64>,
    /// Hosts that are cut off.
    pub down: BTreeSet<usize>,
    pub counts: Counts,
}

impl Fabric {
    pub fn new(link_model: LinkModel, rng: Rng) -> Self {
        let (port_free_at, last, down) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { link_model, rng, port_free_at, last, down, counts: Counts::default() }
    }

    /// Arrivals of a datagram that leaves its host at `now`: none, one or two. `ecn`: it may be marked.
    pub fn carry(&mut self, now: u64, (from, to): (usize, usize), bytes: usize, ecn: bool) -> [Option<Arrival>; 2] {
        let link_model = self.link_model;
        let rng = &mut self.rng;
        // Always the same number of draws: one accident more or less changes nothing of the later
        // ones.
        let lost = rng.happens(link_model.loss) | rng.happens(link_model.corruption);
        let doubled = rng.happens(link_model.duplication);
        let overtaken = rng.happens(link_model.reordering);
        let (jitter, hold) = (rng.roll(link_model.jitter_ns + 1), rng.roll(link_model.reordering_ns_max + 1));
        if lost || self.down.contains(&from) || self.down.contains(&to) {
            self.counts.lost += 1;
            return [None; 2];
        }
        let Some((leaves, marked)) = self.queue(now, to, bytes as u64 + LINE_OVERHEAD_BYTES) else {
            self.counts.dropped_full += 1;
            return [None; 2];
        };
        let marked = marked && ecn;
        let last = self.last.entry((from, to)).or_default();
        let in_order = (leaves + link_model.delay_ns + jitter).max(*last);
        let at = if overtaken { in_order + hold } else { in_order };
        if overtaken {
            self.counts.overtaken += 1;
        } else {
            *last = at;
        }
        self.counts.carried += 1;
        self.counts.doubled += u64::from(doubled);
        self.counts.marked += u64::from(marked);
        let second = doubled.then_some(Arrival { at: at + hold, marked });
        [Some(Arrival { at, marked }), second]
    }

    /// The packet waits in the switch for its port: when it leaves, and whether it is marked.
    fn queue(&mut self, now: u64, to: usize, bytes: u64) -> Option<(u64, bool)> {
        let link_model = &self.link_model;
        if link_model.bits_per_second == 0 {
            return Some((now, false));
        }
        let free_at = self.port_free_at.entry(to).or_default();
        let waiting_ns = free_at.saturating_sub(now);
        let waiting_bytes = u128::from(waiting_ns) * u128::from(link_model.bits_per_second) / 8_000_000_000;
        if waiting_bytes + u128::from(bytes) > u128::from(link_model.buffer_bytes) {
            return None;
        }
        *free_at = now.max(*free_at) + link_model.line_ns(bytes);
        let marked = link_model.mark_bytes > 0 && waiting_bytes > u128::from(link_model.mark_bytes);
        Some((*free_at, marked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_faults_keeps_order_and_rate() {
        let link_model = LinkModel {
            delay_ns: 1000,
            jitter_ns: 5000,
            bits_per_second: 10_000_000_000,
            buffer_bytes: 1 << 30,
            ..LinkModel::default()
        };
        let mut fabric = Fabric::new(link_model, Rng::new(1));
        let mut last = 0;
        for _ in 0..1000 {
            let [Some(first), None] = fabric.carry(0, (0, 1), 4096, true) else { panic!("neither lost nor doubled") };
            assert!(first.at >= last);
            last = first.at;
        }
        let bytes = 1000 * (4096 + LINE_OVERHEAD_BYTES);
        assert!((bytes * 8 / 10..bytes * 8 / 10 + 10_000).contains(&last), "{last}");
    }

    #[test]
    fn accidents_happen_as_often_as_said() {
        let link_model = LinkModel { loss: 100_000, duplication: 50_000, reordering: 20_000, ..LinkModel::default() };
        let mut fabric = Fabric::new(link_model, Rng::new(2));
        for _ in 0..100_000 {
            fabric.carry(0, (0, 1), 64, true);
        }
        let Counts { lost, doubled, overtaken, .. } = fabric.counts;
        assert!((9_500..10_500).contains(&lost), "{lost}");
        assert!((4_200..4_800).contains(&doubled), "{doubled}");
        assert!((1_600..2_000).contains(&overtaken), "{overtaken}");
    }

    #[test]
    fn a_full_port_drops() {
        let link_model = LinkModel {
            bits_per_second: 1_000_000_000,
            buffer_bytes: 10_000,
            mark_bytes: 3_000,
            ..LinkModel::default()
        };
        let mut fabric = Fabric::new(link_model, Rng::new(3));
        for _ in 0..20 {
            fabric.carry(0, (0, 1), 1000, true);
        }
        assert_eq!(fabric.counts.dropped_full, 20 - 9);
        assert!(fabric.counts.marked >= 5);
    }
}
