//! Plan of one seed: hosts, network, connections, and faults.
use crate::carrier::CarrierModel;
use crate::fabric::LinkModel;
use crate::rng::Rng;
use crate::shards::ShardModel;
use crate::sim::HostModel;
use crate::world::OutcomeRates;
use freeflow_verbs::{PathMtu, QpAttributes, QpType};

/// Event besides traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A connection is reset at both ends and made again.
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
    pub host_model: HostModel,
    /// How much may be on the way to one host; `None`: as much as always, which is more than a run
    /// here ever has.
    pub host_bytes_max: Option<u64>,
    pub connections: Vec<PlannedConnection>,
    pub parties: usize,
    pub datagrams: u32,
    /// Traffic begins within this time.
    pub spread_ns: u64,
    pub drain_at: u64,
    /// Short cuts of a host's line: when, who, how long.
    pub cuts: Vec<(u64, usize, u64)>,
    pub faults: Vec<(u64, Fault)>,
    /// How long a free RECV stays unposted at most.
    pub repost_ns_max: u64,
    /// vNICs are held to rates, here and there.
    pub shaped: bool,
    /// Of each host: the payload of the frames that it sends; 0: it sends packets of the standard.
    pub frames: Vec<u16>,
    /// Of each host: it knows selective repeat.
    pub selective: Vec<bool>,
    /// Of each host: it knows frames of records.
    pub records: Vec<bool>,
    /// Of each host: its engines.
    pub shards: Vec<u8>,
    pub shard_model: ShardModel,
    /// See [`Plan::with_repairs`].
    pub repairs: bool,
    /// Connected QPs post many short messages at once.
    pub crowds: bool,
    /// Connected QPs talk in turns: one short message, one short answer, mostly soon.
    pub dialogues: bool,
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
        let mut rng = Rng::for_part(seed, 10);
        let hosts = rng.pick(&[2, 2, 2, 2, 3, 3, 4, 8]);
        let spread_ns = rng.pick(&[1, 5, 20]) * MS;
        let drain_at = spread_ns * 2;
        let host_model = host_model(&mut rng);
        let connections = (0..rng.between(1, 4)).map(|_| connection(&mut rng)).collect();
        let (parties, datagrams) = if rng.one_in(2) { (rng.between(2, 5) as usize, 20) } else { (0, 0) };
        let cut = |rng: &mut Rng| (rng.roll(spread_ns), rng.roll(hosts as u64) as usize, rng.between(1, 8) * MS);
        let cuts = if rng.one_in(4) { vec![cut(&mut rng)] } else { Vec::new() };
        let kinds = [
            Fault::Reset,
            Fault::Reset,
            Fault::Deregister,
            Fault::Forbidden,
            Fault::Drain,
            Fault::Drain,
            Fault::Death,
            Fault::CutOff,
        ];
        let faults = match rng.roll(2) {
            0 => Vec::new(),
            _ => (0..rng.between(1, 3)).map(|_| (rng.roll(spread_ns), rng.pick(&kinds))).collect(),
        };
        Self {
            seed,
            hosts,
            networks: rng.pick(&[1, 1, 2]),
            processes: rng.between(2, 5) as usize,
            host_model,
            // Of its own: the rest of a seed stays what it was.
            host_bytes_max: Rng::for_part(seed, 11).pick(&[None, None, Some(1), Some(10_000), Some(100_000)]),
            connections,
            parties,
            datagrams,
            spread_ns,
            drain_at,
            cuts,
            faults,
            repost_ns_max: rng.pick(&[0, 50_000, 2 * MS]),
            shaped: false,
            frames: frames(seed, hosts),
            selective: selective(seed, hosts),
            records: records(seed, hosts),
            shards: vec![1; hosts],
            shard_model: ShardModel::default(),
            repairs: false,
            crowds: false,
            dialogues: false,
        }
    }

    /// The same with dialogues, of more messages.
    pub fn with_dialogues(seed: u64) -> Self {
        let mut plan = Self { dialogues: true, ..Self::new(seed) };
        for connection in &mut plan.connections {
            connection.requests *= 4;
        }
        plan
    }

    /// The same with frames and selective repeat at all hosts, on a line with many accidents.
    pub fn with_repairs(seed: u64) -> Self {
        // Of its own: the rest of a seed stays what it was.
        let mut rng = Rng::for_part(seed, 17);
        let mut plan = Self { repairs: true, ..Self::new(seed) };
        plan.frames = (0..plan.hosts).map(|_| rng.pick(&[256, 320, 1408, 4096])).collect();
        plan.selective = vec![true; plan.hosts];
        let link_model = &mut plan.host_model.link_model;
        link_model.loss = rng.pick(&[0, 1_000, 10_000, 50_000]);
        link_model.duplication = rng.pick(&[0, 10_000, 100_000]);
        link_model.reordering = rng.pick(&[0, 10_000, 200_000]);
        plan
    }

    /// The same with frames of records at all hosts, and many short messages at once, on the same lines.
    pub fn with_crowds(seed: u64) -> Self {
        let repairs = Self::with_repairs(seed);
        let selective = selective(seed, repairs.hosts);
        let records = vec![true; repairs.hosts];
        let mut plan = Self { repairs: false, crowds: true, records, selective, ..repairs };
        for connection in &mut plan.connections {
            connection.requests *= 8;
        }
        plan
    }

    /// Few hosts of several engines, beside some of one, with more processes; of each of the kinds above.
    pub fn with_shards(seed: u64) -> Self {
        // Of its own: the rest of a seed stays what it was.
        let mut rng = Rng::for_part(seed, 19);
        let mut plan = match rng.roll(4) {
            0 => Self::with_dialogues(seed),
            1 => Self::with_repairs(seed),
            2 => Self::with_crowds(seed),
            _ => Self::new(seed),
        };
        plan.hosts = rng.pick(&[1, 2, 2, 2, 3]).min(plan.hosts);
        plan.processes = rng.between(4, 8) as usize;
        plan.shards = (0..plan.hosts).map(|_| rng.pick(&[1, 2, 4])).collect();
        let always = rng.roll(plan.hosts as u64) as usize;
        plan.shards[always] = rng.pick(&[2, 4]);
        plan.frames.truncate(plan.hosts);
        plan.selective.truncate(plan.hosts);
        plan.records.truncate(plan.hosts);
        plan.cuts.retain(|(_, host, _)| *host < plan.hosts);
        // A byte of room: one packet at a time.
        let (room_bytes, delay_ns_max) =
            rng.pick(&[(1, 2_000), (16 << 10, 20_000), (128 << 10, 200_000), (4 << 20, 5_000), (4 << 20, MS)]);
        // Strays that find no room are lost.
        let strays: &[u64] = if room_bytes == 1 { &[0, 10_000] } else { &[0, 10_000, 200_000, 750_000] };
        plan.shard_model = ShardModel { strays: rng.pick(strays), delay_ns_max, room_bytes };
        plan
    }

    /// The same with a carrier between its hosts.
    pub fn with_carrier(seed: u64) -> Self {
        // Of its own: the rest of a seed stays what it was.
        let mut rng = Rng::for_part(seed, 13);
        let mut plan = Self::new(seed);
        plan.host_model.carrier_model = CarrierModel {
            switches: rng.pick(&[20_000, 100_000, 400_000]),
            declined: rng.pick(&[0, 0, 50_000]),
            put_off: rng.pick(&[0, 0, 50_000]),
            breaks: rng.pick(&[0, 20_000, 200_000]),
            delay_ns_max: rng.pick(&[1_000, 20_000, 500_000]),
            lies: false,
        };
        plan
    }
}

/// Half of the seeds have hosts with frames, most of these beside hosts without.
fn frames(seed: u64, hosts: usize) -> Vec<u16> {
    // Of its own: the rest of a seed stays what it was.
    let mut rng = Rng::for_part(seed, 15);
    if rng.one_in(2) {
        return vec![0; hosts];
    }
    (0..hosts).map(|_| rng.pick(&[0, 256, 320, 1408, 4096, 8192])).collect()
}

/// Of a third of the seeds no host knows selective repeat, of a third all do, of the others some.
fn selective(seed: u64, hosts: usize) -> Vec<bool> {
    // Of its own: the rest of a seed stays what it was.
    let mut rng = Rng::for_part(seed, 16);
    let kind = rng.roll(3);
    (0..hosts).map(|_| kind == 1 || kind == 2 && rng.one_in(2)).collect()
}

/// Of a third of the seeds no host knows frames of records, of a third all do, of the others some.
fn records(seed: u64, hosts: usize) -> Vec<bool> {
    // Of its own: the rest of a seed stays what it was.
    let mut rng = Rng::for_part(seed, 18);
    let kind = rng.roll(3);
    (0..hosts).map(|_| kind == 1 || kind == 2 && rng.one_in(2)).collect()
}

fn host_model(rng: &mut Rng) -> HostModel {
    let often = |rng: &mut Rng| rng.pick(&[0, 0, 100, 1_000, 10_000, 50_000]);
    let bits_per_second = rng.pick(&[0, 1, 10, 40]) * 1_000_000_000;
    let link_model = LinkModel {
        loss: often(rng),
        duplication: often(rng),
        corruption: rng.pick(&[0, 0, 1_000]),
        reordering: often(rng),
        reordering_ns_max: rng.pick(&[1_000, 50_000, MS]),
        delay_ns: rng.pick(&[1_000, 10_000, 100_000, 2 * MS]),
        jitter_ns: rng.pick(&[0, 500, 20_000]),
        bits_per_second,
        buffer_bytes: rng.pick(&[64, 256, 4096]) << 10,
        mark_bytes: rng.pick(&[0, 32 << 10]),
    };
    let outcome_rates = OutcomeRates {
        copy_pending: rng.pick(&[0, 0, 20_000, 500_000]),
        transmit_pending: rng.pick(&[0, 0, 20_000, 500_000]),
        transmit_full: rng.pick(&[0, 0, 20_000, 300_000]),
    };
    HostModel {
        link_model,
        outcome_rates,
        carrier_model: CarrierModel::default(),
        landing_ns_max: rng.pick(&[1_000, 30_000, 500_000]),
        turn_ns: rng.pick(&[200, 1_000, 5_000]),
        control_ns: rng.pick(&[10_000, 200_000, 3 * MS]),
        control_jitter_ns: rng.pick(&[0, 100_000, 2 * MS]),
        forgeries: rng.pick(&[0, 0, 50_000]),
        restores: rng.pick(&[0, 2_000, 50_000]),
    }
}

fn connection(rng: &mut Rng) -> PlannedConnection {
    let service = rng.pick(&[QpType::Rc, QpType::Rc, QpType::Rc, QpType::XrcSend, QpType::Uc]);
    let depth = rng.pick(&[1, 2, 4, 16]);
    let attributes = QpAttributes {
        max_rd_atomic: depth,
        max_dest_rd_atomic: depth,
        min_rnr_timer: rng.between(1, 14) as u8,
        timeout: rng.pick(&[14, 14, 15]),
        retry_count: 7,
        rnr_retry: rng.pick(&[7, 7, 7, 7, 7, 2]),
        ..QpAttributes::default()
    };
    let shared_queue = rng.one_in(3);
    PlannedConnection { service, shared_queue, mtu: rng.pick(&MTUS), attributes, requests: rng.between(5, 60) as u32 }
}
