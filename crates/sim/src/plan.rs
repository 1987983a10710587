//! What one seed stands for: how many hosts, which network, which connections, what goes wrong.
use crate::dice::Dice;
use crate::fabric::Weather;
use crate::sim::Climate;
use crate::world::Moods;
use freeflow_verbs::{PathMtu, QpAttributes, QpType};

/// What happens besides traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// A connection is reset at both ends and made anew.
    Reset,
    /// The memory that the peer writes to is deregistered.
    Deregister,
    /// A request that no key allows.
    Forbidden,
    /// A process dies.
    Death,
    /// A send queue is drained (SQD) and goes on later.
    Drain,
    /// A host is cut off for longer than requesters are patient.
    CutOff,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub hosts: usize,
    pub networks: u32,
    pub processes: usize,
    pub climate: Climate,
    /// How much may be on the way to one host; `None`: as much as always, which is more than a run here ever has.
    pub host_bytes_max: Option<u64>,
    pub connections: Vec<PlannedConnection>,
    pub parties: usize,
    pub datagrams: u32,
    /// Traffic begins within this time.
    pub spread_ns: u64,
    pub calm_at: u64,
    /// Short cuts of a host's line: when, who, how long.
    pub cuts: Vec<(u64, usize, u64)>,
    pub harms: Vec<(u64, Harm)>,
    /// How long a free RECV stays unposted at most.
    pub repost_ns_max: u64,
    /// vNICs are held to rates, here and there.
    pub shaped: bool,
}

#[derive(Clone, Debug)]
pub struct PlannedConnection {
    pub service: QpType,
    pub shared_queue: bool,
    pub mtu: PathMtu,
    pub attributes: QpAttributes,
    pub requests: u32,
}

const MS: u64 = 1_000_000;
const MTUS: [PathMtu; 5] = [PathMtu::Mtu256, PathMtu::Mtu512, PathMtu::Mtu1024, PathMtu::Mtu2048, PathMtu::Mtu4096];

impl Plan {
    pub fn new(seed: u64) -> Self {
        let mut dice = Dice::for_part(seed, 10);
        let hosts = dice.pick(&[2, 2, 2, 2, 3, 3, 4, 8]);
        let spread_ns = dice.pick(&[1, 5, 20]) * MS;
        let calm_at = spread_ns * 2;
        let climate = climate(&mut dice);
        let connections = (0..dice.between(1, 4)).map(|_| connection(&mut dice)).collect();
        let (parties, datagrams) = if dice.one_in(2) { (dice.between(2, 5) as usize, 20) } else { (0, 0) };
        let cut = |dice: &mut Dice| (dice.roll(spread_ns), dice.roll(hosts as u64) as usize, dice.between(1, 8) * MS);
        let cuts = if dice.one_in(4) { vec![cut(&mut dice)] } else { Vec::new() };
        let kinds = [
            Harm::Reset,
            Harm::Reset,
            Harm::Deregister,
            Harm::Forbidden,
            Harm::Drain,
            Harm::Drain,
            Harm::Death,
            Harm::CutOff,
        ];
        let harms = match dice.roll(2) {
            0 => Vec::new(),
            _ => (0..dice.between(1, 3)).map(|_| (dice.roll(spread_ns), dice.pick(&kinds))).collect(),
        };
        Self {
            seed,
            hosts,
            networks: dice.pick(&[1, 1, 2]),
            processes: dice.between(2, 5) as usize,
            climate,
            // Of its own: the rest of a seed stays what it was.
            host_bytes_max: Dice::for_part(seed, 11).pick(&[None, None, Some(1), Some(10_000), Some(100_000)]),
            connections,
            parties,
            datagrams,
            spread_ns,
            calm_at,
            cuts,
            harms,
            repost_ns_max: dice.pick(&[0, 50_000, 2 * MS]),
            shaped: false,
        }
    }
}

fn climate(dice: &mut Dice) -> Climate {
    let often = |dice: &mut Dice| dice.pick(&[0, 0, 100, 1_000, 10_000, 50_000]);
    let bits_per_second = dice.pick(&[0, 1, 10, 40]) * 1_000_000_000;
    let weather = Weather {
        loss: often(dice),
        duplication: often(dice),
        corruption: dice.pick(&[0, 0, 1_000]),
        reordering: often(dice),
        reordering_ns_max: dice.pick(&[1_000, 50_000, MS]),
        delay_ns: dice.pick(&[1_000, 10_000, 100_000, 2 * MS]),
        jitter_ns: dice.pick(&[0, 500, 20_000]),
        bits_per_second,
        buffer_bytes: dice.pick(&[64, 256, 4096]) << 10,
        mark_bytes: dice.pick(&[0, 32 << 10]),
    };
    let moods = Moods {
        copy_pending: dice.pick(&[0, 0, 20_000, 500_000]),
        transmit_pending: dice.pick(&[0, 0, 20_000, 500_000]),
        transmit_full: dice.pick(&[0, 0, 20_000, 300_000]),
    };
    Climate {
        weather,
        moods,
        landing_ns_max: dice.pick(&[1_000, 30_000, 500_000]),
        turn_ns: dice.pick(&[200, 1_000, 5_000]),
        control_ns: dice.pick(&[10_000, 200_000, 3 * MS]),
        control_jitter_ns: dice.pick(&[0, 100_000, 2 * MS]),
        forgeries: dice.pick(&[0, 0, 50_000]),
        restores: dice.pick(&[0, 2_000, 50_000]),
    }
}

fn connection(dice: &mut Dice) -> PlannedConnection {
    let service = dice.pick(&[QpType::Rc, QpType::Rc, QpType::Rc, QpType::XrcSend, QpType::Uc]);
    let depth = dice.pick(&[1, 2, 4, 16]);
    let attributes = QpAttributes {
        max_rd_atomic: depth,
        max_dest_rd_atomic: depth,
        min_rnr_timer: dice.between(1, 14) as u8,
        timeout: dice.pick(&[14, 14, 15]),
        retry_count: 7,
        rnr_retry: dice.pick(&[7, 7, 7, 7, 7, 2]),
        ..QpAttributes::default()
    };
    let shared_queue = dice.one_in(3);
    PlannedConnection { service, shared_queue, mtu: dice.pick(&MTUS), attributes, requests: dice.between(5, 60) as u32 }
}
