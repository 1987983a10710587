//! Goodput over loss and round-trip time, as a table that is checked in: one QP pair, WRITEs of 1
//! MB, path MTU 4096.
use crate::carrier::CarrierModel;
use crate::fabric::LinkModel;
use crate::rng::Rng;
use crate::sim::{HostModel, Sim};
use crate::topology::{Connection, Process, Topology};
use crate::world::{MEMORY_BASE, OutcomeRates};
use freeflow_engine::*;
use freeflow_verbs::*;
use std::fmt::Write;

const LOSSES: [(u64, &str); 5] = [(0, "0"), (100, "0.01 %"), (1_000, "0.1 %"), (10_000, "1 %"), (50_000, "5 %")];
/// The same for frames, with and without selective repeat; last, packets that come late by up to half a round trip.
const FRAME_FAULTS: [(u64, u64, &str); 4] =
    [(0, 0, "0"), (1_000, 0, "0.1 %"), (10_000, 0, "1 %"), (0, 10_000, "1 % late")];
const FRAME_BYTES: u16 = 4096;
const RTTS_US: [u64; 4] = [20, 100, 1_000, 10_000];
const RATES_GBPS: [u64; 2] = [10, 40];
const MESSAGE_BYTES: u64 = 1 << 20;
/// WRITEs that are posted and not done; measured after so many have completed, over so many more.
#[derive(Clone, Copy)]
pub struct Load {
    depth: u32,
    warm_up: u32,
    messages: u32,
}

const LOAD: Load = Load { depth: 16, warm_up: 16, messages: 64 };
/// Of a long way: twice what the line holds in a round trip, and time to find that out.
const LONG_RTTS_US: [u64; 2] = [1_000, 10_000];
const LONG_LOSSES: [(u64, &str); 3] = [(0, "0"), (10, "0.001 %"), (100, "0.01 %")];
const LONG_ROUND_TRIPS_OF_WARM_UP: u32 = 20;
/// Senders, each on a host of its own, that fill one port together; of each so many WRITEs are posted and not done.
const CROWD: usize = 4;
const CROWD_GBPS: u64 = 10;
const CROWD_DEPTH: u32 = 4;
const CROWD_WARM_UP: u32 = 64;
const CROWD_MESSAGES: u32 = 256;
/// Of the port, and what waits in it when it begins to mark packets.
const CROWD_BUFFERS: [u64; 3] = [128 << 10, 256 << 10, 1 << 20];
const CROWD_MARK_BYTES: u64 = 32 << 10;
/// A cell that takes longer is measured up to there.
const TIME_NS_MAX: u64 = 4_000_000_000;

/// Gigabits of payload per second.
pub fn table() -> String {
    [short_windows(), long_windows(), crowds()].concat()
}

/// With the window of a short way, at each loss and round trip.
pub fn short_windows() -> String {
    let mut text = String::from(
        "Goodput, Gb/s of payload: one RC QP, WRITEs of 1 MiB, 16 outstanding, path MTU 4096, one way queues of 2 MiB.\n",
    );
    for gbps in RATES_GBPS {
        let _ = write!(text, "\n{gbps} Gb/s line\n{:>8}", "loss");
        for rtt in RTTS_US {
            let _ = write!(text, "{:>12}", format!("{rtt} us"));
        }
        text.push('\n');
        for (loss, name) in LOSSES {
            let _ = write!(text, "{name:>8}");
            for rtt in RTTS_US {
                let _ = write!(text, "{:>12.2}", goodput(gbps, Way { loss, ..Way::default() }, rtt, LOAD));
            }
            text.push('\n');
        }
        for (selective, name) in [(false, "go-back-N"), (true, "selective repeat")] {
            let _ = writeln!(text, "\n{gbps} Gb/s line, frames, {name}");
            for (loss, late, name) in FRAME_FAULTS {
                let _ = write!(text, "{name:>8}");
                for rtt in RTTS_US {
                    let way = Way { loss, late, frame_bytes: FRAME_BYTES, selective };
                    let _ = write!(text, "{:>12.2}", goodput(gbps, way, rtt, LOAD));
                }
                text.push('\n');
            }
        }
    }
    text
}

/// With windows that have followed a long way.
pub fn long_windows() -> String {
    let mut text = String::from(
        "\nTwice in flight of what the line holds, measured later; packets, and frames with selective repeat.\n",
    );
    for gbps in RATES_GBPS {
        let _ = write!(text, "\n{gbps} Gb/s line\n{:>8}", "loss");
        for rtt in LONG_RTTS_US {
            let _ = write!(text, "{:>12}{:>12}", format!("{rtt} us"), "frames");
        }
        text.push('\n');
        for (loss, name) in LONG_LOSSES {
            let _ = write!(text, "{name:>8}");
            for rtt in LONG_RTTS_US {
                for (frame_bytes, selective) in [(0, false), (FRAME_BYTES, true)] {
                    let way = Way { loss, late: 0, frame_bytes, selective };
                    let _ = write!(text, "{:>12.2}", goodput(gbps, way, rtt, long_load(gbps, rtt)));
                }
            }
            text.push('\n');
        }
    }
    text
}

/// Of hosts that send to one port.
pub fn crowds() -> String {
    let mut text = String::new();
    let _ = write!(
        text,
        "\n{CROWD} hosts to one port of {CROWD_GBPS} Gb/s, frames with selective repeat, round trip 20 us: Gb/s in all; \
         packets of 1000 without room; of 1000 marked (from {CROWD_MARK_BYTES} bytes on).\n\n{:>8}",
        "buffer"
    );
    for name in ["unmarked", "lost", "marked", "lost", "marks"] {
        let _ = write!(text, "{name:>10}");
    }
    text.push('\n');
    for buffer_bytes in CROWD_BUFFERS {
        let _ = write!(text, "{buffer_bytes:>8}");
        let [plain, marking] = [0, CROWD_MARK_BYTES].map(|mark_bytes| crowd(buffer_bytes, mark_bytes));
        let numbers = [plain.gbps, plain.lost, marking.gbps, marking.lost, marking.marked];
        numbers.iter().for_each(|number| write!(text, "{number:>10.2}").expect("a string has room"));
        text.push('\n');
    }
    text
}

/// Throughput of several senders that share one port, and how many of 1000 packets fared otherwise.
struct Crowd {
    gbps: f64,
    lost: f64,
    marked: f64,
}

fn crowd(buffer_bytes: u64, mark_bytes: u64) -> Crowd {
    let link_model = LinkModel {
        delay_ns: 10_000,
        bits_per_second: CROWD_GBPS * 1_000_000_000,
        buffer_bytes,
        mark_bytes,
        ..LinkModel::default()
    };
    let mut sim = Sim::new(buffer_bytes ^ mark_bytes, CROWD + 1, without_accidents(link_model));
    sim.hosts.iter_mut().for_each(|host| host.world.frame_bytes = FRAME_BYTES);
    sim.agree_on_selective(&[true; CROWD + 1]);
    let mut topology = Topology::default();
    let receiver = topology.process(&mut sim, 0, NetworkId(1), 0, 1);
    let rkey = target(&mut sim, &topology.processes[receiver]).rkey;
    for host in 1..=CROWD {
        let sender = topology.process(&mut sim, host, NetworkId(1), host as u8, 1);
        let sides = [sender, receiver].map(|process| topology.side(&mut sim, process, QpType::Rc, None));
        topology.connections.push(Connection::new(QpType::Rc, PathMtu::Mtu4096, patient(), sides, 0));
        topology.connect(&mut sim, host - 1);
    }
    let (mut done, mut posted, mut begun) = ([0; CROWD], [0; CROWD], None);
    loop {
        for sender in 0..CROWD {
            let (host, qp) = (sender + 1, topology.connections[sender].sides[0].qp);
            let lkey = topology.processes[host].lkey;
            while posted[sender] < done[sender] + CROWD_DEPTH {
                post(&mut sim, (host, qp), posted[sender], (lkey, rkey));
                posted[sender] += 1;
            }
            sim.ring(host, qp);
        }
        while (1..=CROWD).all(|host| sim.hosts[host].world.completions.values().all(|ring| ring.is_empty())) {
            assert_eq!(sim.step(), None, "the senders have more to send");
        }
        for (sender, done) in done.iter_mut().enumerate() {
            let completions = sim.harvest(sender + 1);
            assert!(completions.iter().all(|(_, completion)| completion.status == CompletionStatus::Success));
            *done += completions.len() as u32;
        }
        let (all, counts) = (done.iter().sum::<u32>(), sim.fabric.counts);
        match begun {
            None if all >= CROWD_WARM_UP => begun = Some((sim.now, all, counts)),
            Some((at, before, since)) if all >= CROWD_WARM_UP + CROWD_MESSAGES => {
                let lost = counts.dropped_full - since.dropped_full;
                let packets = (counts.carried - since.carried + lost) as f64;
                return Crowd {
                    gbps: f64::from(all - before) * MESSAGE_BYTES as f64 * 8.0 / (sim.now - at) as f64,
                    lost: lost as f64 * 1000.0 / packets,
                    marked: (counts.marked - since.marked) as f64 * 1000.0 / packets,
                };
            }
            _ => {}
        }
    }
}

/// The kind of packets, and accidents of them, parts of a million.
#[derive(Clone, Copy, Debug, Default)]
pub struct Way {
    pub loss: u64,
    /// Overtaken by what left within half a round trip after them.
    pub late: u64,
    /// 0: packets of the standard.
    pub frame_bytes: u16,
    pub selective: bool,
}

fn long_load(gbps: u64, rtt_us: u64) -> Load {
    let held_bytes = gbps * rtt_us * 1_000 / 8;
    let held = (held_bytes.div_ceil(MESSAGE_BYTES) as u32).max(8);
    Load { depth: 2 * held, warm_up: LONG_ROUND_TRIPS_OF_WARM_UP * held, messages: 4 * held }
}

/// Of one cell of the table.
pub fn goodput(gbps: u64, way: Way, rtt_us: u64, load: Load) -> f64 {
    let loss = way.loss;
    let link_model = LinkModel {
        loss,
        reordering: way.late,
        reordering_ns_max: rtt_us * 500,
        delay_ns: rtt_us * 500,
        bits_per_second: gbps * 1_000_000_000,
        buffer_bytes: 2 << 20,
        ..LinkModel::default()
    };
    let mut sim = Sim::new(gbps << 40 ^ loss << 20 ^ rtt_us, 2, without_accidents(link_model));
    sim.hosts.iter_mut().for_each(|host| host.world.frame_bytes = way.frame_bytes);
    sim.agree_on_selective(&[way.selective; 2]);
    let mut topology = Topology::default();
    let sides = [0, 1].map(|host| {
        let process = topology.process(&mut sim, host, NetworkId(1), 0, 1);
        topology.side(&mut sim, process, QpType::Rc, None)
    });
    let psn = Rng::new(loss ^ rtt_us).draw() as u32;
    topology.connections.push(Connection::new(QpType::Rc, PathMtu::Mtu4096, patient(), sides, psn));
    topology.connect(&mut sim, 0);
    measure(&mut sim, &topology, load)
}

/// Hosts on this network that do at once what they are asked.
fn without_accidents(link_model: LinkModel) -> HostModel {
    HostModel {
        link_model,
        outcome_rates: OutcomeRates::default(),
        carrier_model: CarrierModel::default(),
        landing_ns_max: 1,
        turn_ns: 500,
        control_ns: 10_000,
        control_jitter_ns: 0,
        forgeries: 0,
        restores: 0,
    }
}

/// A QP that does not give up.
fn patient() -> QpAttributes {
    QpAttributes { timeout: 16, retry_count: 7, rnr_retry: 7, ..QpAttributes::default() }
}

/// All that the peer's process has, as one region to write to.
fn target(sim: &mut Sim, peer: &Process) -> MrKeys {
    let engine = &mut sim.hosts[peer.host].engine;
    let keys =
        engine.register_mr(peer.session, peer.pd, MEMORY_BASE, MESSAGE_BYTES, MEMORY_BASE, crate::topology::REMOTE);
    keys.expect("room")
}

/// Posts a WRITE of a message; it goes out when the QP's doorbell rings.
fn post(sim: &mut Sim, (host, qp): (usize, QpId), ring_position: u32, (lkey, rkey): (u32, u32)) {
    let mut request = SendRequest {
        opcode: SendOpcode::RdmaWrite,
        flags: SendFlags(SendFlags::SIGNALED),
        sge_count: 1,
        ring_position,
        remote_address: MEMORY_BASE,
        rkey,
        ..Default::default()
    };
    request.sges[0] = Sge { address: MEMORY_BASE, length: MESSAGE_BYTES as u32, lkey };
    sim.hosts[host].world.sends.entry(qp).or_default().posted.push_back(request);
}

fn measure(sim: &mut Sim, topology: &Topology, load: Load) -> f64 {
    let Load { depth, warm_up, messages } = load;
    let rkey = target(sim, &topology.processes[1]).rkey;
    let (qp, lkey) = (topology.connections[0].sides[0].qp, topology.processes[0].lkey);
    let (mut posted, mut done, mut begun_at) = (0, 0, 0);
    while done < warm_up + messages && sim.now < TIME_NS_MAX {
        while posted < (done + depth).min(warm_up + messages) {
            post(sim, (0, qp), posted, (lkey, rkey));
            posted += 1;
        }
        sim.ring(0, qp);
        while sim.hosts[0].world.completions.values().all(|ring| ring.is_empty()) && sim.now < TIME_NS_MAX {
            if sim.step().is_some() {
                return 0.0;
            }
        }
        for (_, completion) in sim.harvest(0) {
            if completion.status != CompletionStatus::Success {
                return 0.0;
            }
            done += 1;
            if done == warm_up {
                begun_at = sim.now;
            }
        }
    }
    if done <= warm_up {
        return f64::from(done) * MESSAGE_BYTES as f64 * 8.0 / sim.now as f64;
    }
    f64::from(done - warm_up) * MESSAGE_BYTES as f64 * 8.0 / (sim.now - begun_at) as f64
}
