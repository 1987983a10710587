//! Streams that take one source port after the other, through real sockets in network namespaces of the tests' own
//! (root).
mod lab;

use freeflow_backend::{FLOWCELL_BYTES, Faults, PacketRoute, Peer, Udp, UdpConfig};
use freeflow_shm::Segment;
use freeflow_verbs::{Qpn, Shard};
use freeflow_wire::frame::Frame;
use freeflow_wire::{Header, Opcode, Operation, PacketPosition, Reth, Service};
use lab::{PEER, loopback, receive, route};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const FLOW: u32 = 7;
const PAGE_BYTES: usize = 4096;
const BURST_PACKETS: u32 = 15;
/// Ten flowcells.
const STREAM_PACKETS: u32 = 10 * FLOWCELL_BYTES / PAGE_BYTES as u32;

/// How frames are sent.
#[derive(Clone, Copy)]
struct Way {
    qpns: [u32; 2],
    spreads: bool,
    referred: bool,
    payload_bytes: usize,
}

const PLAIN: Way = Way { qpns: [0x11; 2], spreads: true, referred: false, payload_bytes: PAGE_BYTES };

fn head(qpn: u32, psn: u32) -> Vec<u8> {
    let opcode = Opcode::new(Service::Rc, Operation::Write, PacketPosition::Only).expect("the standard has it");
    let reth = Reth { address: 0x7000, rkey: 5, length: 9 };
    let header = Header { reth, frame: Some(Frame::default()), ..Header::new(opcode, qpn, psn) };
    header.encode().as_slice().to_vec()
}

fn send_frame(from: &mut Udp, way: Way, psn: u32, segment: &Arc<Segment>) {
    let qpn = way.qpns[(psn / BURST_PACKETS) as usize % 2];
    let (route, head) = (PacketRoute { qpn, spreads: way.spreads, ..route(PEER, FLOW, 0) }, head(qpn, psn));
    assert!(!psn.is_multiple_of(BURST_PACKETS) || from.has_room(&route), "{:?}", from.counters());
    if way.referred {
        assert!(from.refer(route, &head, segment, (0, way.payload_bytes)));
        return;
    }
    let place = from.reserve_frame(route, head.len() + way.payload_bytes).expect("room");
    place[..head.len()].copy_from_slice(&head);
    place[head.len()..].fill(0);
    from.commit();
}

/// Source port, QPN and PSN of each packet of a stream, in the order in which they come.
fn stream(from: &mut Udp, to: &mut Udp, way: Way) -> Vec<(u16, u32, u32)> {
    let segment = Arc::new(Segment::create("spread", PAGE_BYTES).expect("memory").0);
    let mut arrived = Vec::new();
    // A receiver's socket holds several bursts.
    for first in (0..STREAM_PACKETS).step_by(4 * BURST_PACKETS as usize) {
        let psns = first..(first + 4 * BURST_PACKETS).min(STREAM_PACKETS);
        psns.clone().for_each(|psn| send_frame(from, way, psn, &segment));
        from.flush();
        receive(to, psns.len(), |received| {
            let header = Header::parse(received.packet).expect("a frame").0;
            arrived.push((received.source_port, header.dest_qpn, header.psn));
        });
    }
    arrived
}

fn ports(arrived: &[(u16, u32, u32)]) -> BTreeSet<u16> {
    arrived.iter().map(|&(port, ..)| port).collect()
}

#[test]
fn a_stream_takes_all_ports_and_its_sender_keeps_the_order() {
    for variant in 0..8 {
        let (referred, gso, v6) = (variant & 1 != 0, variant & 2 != 0 || variant & 1 != 0, variant & 4 != 0);
        let (_namespace, mut from, mut to) = loopback(with_frames(|config, _| config.gso = gso), v6);
        let arrived = stream(&mut from, &mut to, Way { referred, ..PLAIN });
        assert!(arrived.iter().map(|&(.., psn)| psn).eq(0..STREAM_PACKETS), "{variant}: another order");
        assert!(ports(&arrived).len() >= 5, "{variant}: {:?}", ports(&arrived));
        // Whole bursts, and not many changes.
        let changes: Vec<_> = arrived.windows(2).filter(|pair| pair[0].0 != pair[1].0).map(|pair| pair[1].2).collect();
        assert!(changes.len() <= 10 && changes.iter().all(|psn| psn % BURST_PACKETS == 0), "{variant}: {changes:?}");
    }
}

fn with_frames(change: impl Fn(&mut UdpConfig, &mut Peer)) -> impl Fn(&mut UdpConfig, &mut Peer) {
    move |config, peer| {
        config.frames = true;
        change(config, peer);
    }
}

#[test]
fn what_keeps_its_order_or_is_short_has_one_port() {
    let short = Way { payload_bytes: 256, ..PLAIN };
    for (way, spread) in [(Way { spreads: false, ..PLAIN }, true), (PLAIN, false), (short, true)] {
        let (_namespace, mut from, mut to) = loopback(with_frames(|config, _| config.spread = spread), false);
        let arrived = stream(&mut from, &mut to, way);
        assert_eq!((arrived.len(), ports(&arrived).len()), (STREAM_PACKETS as usize, 1));
    }
}

#[test]
fn each_port_is_one_engines() {
    let qpns = [0x10, 0x11];
    let (_namespace, mut from, mut to) = loopback(with_frames(|_, _| ()), false);
    from.set_shards(PEER, 2);
    let arrived = stream(&mut from, &mut to, Way { qpns, ..PLAIN });
    let mut engines = BTreeMap::new();
    for (port, qpn, _) in arrived {
        let shard = Shard::new(0, 2).expect("a shard").of_qpn(Qpn(qpn));
        assert_eq!(*engines.entry(port).or_insert(shard), shard, "port {port}");
    }
    assert!(qpns.iter().all(|qpn| engines.values().filter(|&&shard| u32::from(shard) == qpn % 2).count() > 1));
}

#[test]
fn packets_that_are_late_arrive_too() {
    let (_namespace, mut from, mut to) = loopback(with_frames(|_, _| ()), false);
    let held_for_ever = u64::from(u32::MAX);
    from.set_faults(Some(Faults { seed: 1, delay_ppm: 20_000, delay_ns: held_for_ever, ..Faults::default() }));
    let segment = Arc::new(Segment::create("spread", PAGE_BYTES).expect("memory").0);
    let mut expected = BTreeMap::new();
    let mut came = BTreeMap::new();
    let mut note = |received: freeflow_backend::Received<'_>| {
        let psn = Header::parse(received.packet).expect("a frame").0.psn;
        assert_eq!(came.insert(psn, received.source_port), None, "twice");
    };
    for psn in 0..STREAM_PACKETS {
        let before = from.counters().injected_delays;
        send_frame(&mut from, PLAIN, psn, &segment);
        expected.insert(psn, from.counters().injected_delays > before);
        if psn % (4 * BURST_PACKETS) == 0 {
            from.flush();
            to.receive(64, &mut note);
        }
    }
    from.set_faults(None);
    from.flush();
    let left = STREAM_PACKETS as usize - to.counters().packets_received as usize;
    receive(&mut to, left, &mut note);
    assert_eq!(came.len(), STREAM_PACKETS as usize);
    assert!(expected.values().any(|&late| late));
    // Those that were late have the port of their neighbours.
    for (&psn, _) in expected.iter().filter(|&(_, &late)| late) {
        let burst = psn - psn % BURST_PACKETS..psn - psn % BURST_PACKETS + BURST_PACKETS;
        let neighbours: BTreeSet<_> = burst.filter_map(|other| came.get(&other)).collect();
        assert_eq!(neighbours.len(), 1, "packet {psn}");
    }
}
