//! Packets over real sockets, in network namespaces of their own. Needs root.
mod lab;

use freeflow_backend::{Captured, Direction, Faults, PACKET_BYTES_MAX, Peer, PeerIndex, Udp, UdpConfig};
use freeflow_wire::icrc::{Addresses, Flow};
use lab::{
    Namespace, PEER, address, config, let_neighbour_answer, loopback, packet, peer, receive, receive_numbers, route,
    send, veth,
};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;

#[test]
fn every_size_arrives_whole() {
    for variant in 0..16 {
        let (gso, gro, v6, icrc) = (variant & 1 != 0, variant & 2 != 0, variant & 4 != 0, variant & 8 != 0);
        let change = |config: &mut UdpConfig, peer: &mut Peer| {
            config.gso = gso;
            config.gro = gro;
            peer.icrc = icrc;
        };
        let (_namespace, mut from, mut to) = loopback(change, v6);
        // Ascending sizes close a batch each time, descending ones every second time, equal ones never.
        let sizes: Vec<usize> = (16..=PACKET_BYTES_MAX)
            .chain((16..=PACKET_BYTES_MAX).rev().step_by(7))
            .chain(std::iter::repeat_n(100, 200))
            .chain(std::iter::repeat_n(PACKET_BYTES_MAX, 40))
            .collect();
        let mut number = 0;
        for sizes in sizes.chunks(100) {
            let first = number;
            for &bytes in sizes {
                send(&mut from, PEER, 7, &packet(number, bytes));
                number += 1;
            }
            from.flush();
            assert_eq!(from.counters().packets_sent, u64::from(number), "{variant}: {:?}", from.counters());
            let mut expected = first;
            receive(&mut to, sizes.len(), |received| {
                assert_eq!(received.packet, packet(expected, sizes[(expected - first) as usize]), "{variant}");
                assert_eq!((received.from, received.source), (PEER, from.config().addresses[0]));
                assert_eq!((received.destination, received.hop_limit), (to_address(v6), 64));
                expected += 1;
            });
            assert_eq!(expected, number, "{variant}: {:?}", to.counters());
        }
        let (sent, received) = (from.counters(), to.counters());
        assert_eq!((sent.packets_sent, received.packets_received), (u64::from(number), u64::from(number)));
        assert_eq!((sent.bytes_sent, received.bad_icrc, received.truncated), (received.bytes_received, 0, 0));
        assert_eq!(sent.batches_sent < sent.packets_sent, gso, "{sent:?}");
        assert_eq!(received.batches_received < received.packets_received, gso && gro, "{received:?}");
        let bytes = sent.bytes_sent - 4 * u64::from(number);
        assert_eq!(bytes, sizes.iter().sum::<usize>() as u64);
    }
}

fn to_address(v6: bool) -> std::net::IpAddr {
    address(if v6 { "fd00::2" } else { "10.0.0.2" })
}

/// Frames of UDP port 4791 that a packet socket in the namespace sees.
struct Sniffer(rustix::fd::OwnedFd);

impl Sniffer {
    fn new(namespace: &Namespace, ethertype: u16) -> Self {
        let protocol = rustix::net::Protocol::from_raw(u32::from(ethertype.to_be()).try_into().expect("protocol"));
        let open = || {
            rustix::net::socket_with(AddressFamily::PACKET, SocketType::DGRAM, SocketFlags::NONBLOCK, Some(protocol))
        };
        Self(namespace.run(|| open().expect("packet socket")))
    }

    /// IP packets so far.
    fn packets(&self) -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        let mut buffer = vec![0; 1 << 17];
        while let Ok((count, _)) = rustix::net::recv(&self.0, &mut buffer, RecvFlags::empty()) {
            if buffer[9] == 17 && buffer[22..24] == 4791_u16.to_be_bytes() {
                packets.push(buffer[..count].to_vec());
            }
        }
        packets
    }
}

/// Identification and UDP checksum of an IPv4 packet on the wire; asserts DF and the ICRC for that
/// identification.
fn check_frame(frame: &[u8]) -> (u16, u16) {
    let short = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let quad = |at: usize| [frame[at], frame[at + 1], frame[at + 2], frame[at + 3]];
    assert_eq!((frame[0], short(6)), (0x45, 0x4000), "no options, DF, no fragment");
    let flow = Flow { addresses: Addresses::V4 { source: quad(12), destination: quad(16) }, source_port: short(20) };
    assert!(short(20) >= 0xc000);
    let (body, icrc) = frame[28..usize::from(short(2))].split_last_chunk::<4>().expect("ICRC");
    assert_eq!(u32::from_le_bytes(*icrc), flow.icrc(short(4), body), "ICRC for identification {}", short(4));
    (short(4), short(26))
}

#[test]
fn segments_that_the_kernel_cuts_bear_the_right_icrc() {
    let (a, b) = veth(4200);
    a.exec("ethtool -K va tx-udp-segmentation off");
    let sniffer = Sniffer::new(&b, 0x0800);
    let (mut from, mut to) = (a.open(config("10.0.0.1")), b.open(config("10.0.0.2")));
    from.set_peer(PEER, peer("10.0.0.1", "10.0.0.2")).expect("peer");
    to.set_peer(PEER, peer("10.0.0.2", "10.0.0.1")).expect("peer");
    for bytes in [1040, 4108] {
        for number in 0..30 {
            send(&mut from, PEER, 7, &packet(number, bytes));
        }
        send(&mut from, PEER, 7, &packet(30, 500));
        from.flush();
        assert_eq!(receive_numbers(&mut to, 31), (0..31).collect::<Vec<_>>());
        let seen: Vec<u16> = sniffer.packets().iter().map(|frame| check_frame(frame).0).collect();
        let batch = if bytes == 1040 { 31 } else { 15 };
        let expected: Vec<u16> = (0..31).map(|number| number % batch).collect();
        assert_eq!(seen, expected, "{bytes}");
    }
    assert_eq!(to.counters().bad_icrc, 0);
}

#[test]
fn without_segmentation_packets_look_as_those_of_rxe() {
    let (a, b) = veth(4200);
    let sniffer = Sniffer::new(&b, 0x0800);
    let mut from = a.open(UdpConfig { gso: false, dscp: 26, ..config("10.0.0.1") });
    let mut to = b.open(config("10.0.0.2"));
    from.set_peer(PEER, peer("10.0.0.1", "10.0.0.2")).expect("peer");
    to.set_peer(PEER, Peer { external: true, ..peer("10.0.0.2", "10.0.0.1") }).expect("peer");
    for number in 0..8 {
        send(&mut from, PEER, 7, &packet(number, 1040));
    }
    from.flush();
    assert_eq!(receive_numbers(&mut to, 8), (0..8).collect::<Vec<_>>());
    let frames = sniffer.packets();
    assert_eq!(frames.len(), 8);
    for frame in frames {
        assert_eq!(check_frame(&frame), (0, 0), "identification and UDP checksum");
        assert_eq!(frame[1], 26 << 2);
    }
}

#[test]
fn traffic_class_and_congestion_are_reported() {
    for v6 in [false, true] {
        let (_namespace, mut from, mut to) = loopback(|config, _| config.dscp = 10, v6);
        for (given, expected) in [(0, 10 << 2), (2, 10 << 2 | 2), (3, 10 << 2 | 3), (0xb8, 0xb8), (0xbb, 0xbb)] {
            let place = from.reserve(route(PEER, 1, given), 16).expect("room");
            place.copy_from_slice(&packet(1, 16));
            from.commit();
            from.flush();
            receive(&mut to, 1, |received| {
                assert_eq!(received.traffic_class, expected);
                assert_eq!(received.congestion_experienced, expected & 3 == 3);
            });
        }
        assert_eq!(to.counters().packets_received, 5);
    }
}

#[test]
fn what_is_wrong_is_dropped_and_counted() {
    let (namespace, mut from, mut to) = loopback(|_, _| {}, false);
    from.set_faults(Some(Faults { corrupt_ppm: 1_000_000, seed: 5, ..Faults::default() }));
    for number in 0..500 {
        send(&mut from, PEER, number, &packet(number, 100));
    }
    from.flush();
    receive(&mut to, 500, |received| panic!("{received:?}"));
    assert_eq!((to.counters().bad_icrc, from.counters().injected_corruption), (500, 500));
    from.set_faults(None);

    let stray = namespace.run(|| std::net::UdpSocket::bind("10.0.0.1:0").expect("bind"));
    stray.send_to(&[0; 15], "10.0.0.2:4791").expect("send");
    stray.send_to(&[], "10.0.0.2:4791").expect("send");
    receive(&mut to, 2, |received| panic!("{received:?}"));
    assert_eq!(to.counters().truncated, 2);

    to.remove_peer(PEER);
    assert_eq!((to.peer_of(address("10.0.0.1")), to.peer(PEER)), (None, None));
    send(&mut from, PEER, 0, &packet(0, 100));
    send(&mut from, PEER, 0, &packet(1, 100));
    from.flush();
    receive(&mut to, 2, |received| panic!("{received:?}"));
    assert_eq!(to.counters().unknown_source, 2);
    assert!(to.reserve(route(PEER, 0, 0), 16).is_none());
    assert_eq!(to.counters().unknown_peer, 1);
}

#[test]
fn a_wrong_identification_is_for_external_peers_only() {
    let (namespace, _from, mut to) = loopback(|_, _| {}, false);
    let stray = namespace.run(|| std::net::UdpSocket::bind("10.0.0.1:0").expect("bind"));
    let flow = Flow {
        addresses: Addresses::V4 { source: [10, 0, 0, 1], destination: [10, 0, 0, 2] },
        source_port: stray.local_addr().expect("port").port(),
    };
    let datagram = |identification| {
        let mut bytes = packet(9, 100);
        bytes.extend(flow.icrc(identification, &bytes).to_le_bytes());
        bytes
    };
    for (external, identification, good) in [(false, 127, 1), (false, 128, 0), (false, 0xbeef, 0), (true, 0xbeef, 1)] {
        to.set_peer(PEER, Peer { external, ..peer("10.0.0.2", "10.0.0.1") }).expect("peer");
        stray.send_to(&datagram(identification), "10.0.0.2:4791").expect("send");
        let mut count = 0;
        receive(&mut to, 1, |_| count += 1);
        assert_eq!(count, good, "external {external}, identification {identification}");
    }
    assert_eq!(to.counters().bad_icrc, 2);
}

#[test]
fn no_icrc_only_where_agreed() {
    let (_namespace, mut from, mut to) =
        loopback(|config, peer| peer.icrc = config.addresses[0] != address("10.0.0.1"), false);
    send(&mut from, PEER, 0, &packet(0, 100));
    from.flush();
    receive(&mut to, 1, |received| panic!("{received:?}"));
    assert_eq!(to.counters().bad_icrc, 1);
    // One that does compute it is understood.
    send(&mut to, PEER, 0, &packet(0, 100));
    to.flush();
    assert_eq!(receive_numbers(&mut from, 1), [0]);
}

#[test]
fn faults_follow_from_the_seed() {
    let run = |seed| {
        let (_namespace, mut from, mut to) = loopback(|_, _| {}, false);
        let faults =
            Faults { seed, loss_ppm: 100_000, duplicate_ppm: 50_000, corrupt_ppm: 50_000, ..Faults::default() };
        from.set_faults(Some(faults));
        let mut numbers = Vec::new();
        for number in 0..1000 {
            send(&mut from, PEER, 7, &packet(number, 64));
            from.flush();
            from.flush();
        }
        let counters = *from.counters();
        assert_eq!(counters.packets_sent, 1000 - counters.injected_loss + counters.injected_duplicates);
        assert!((50..150).contains(&counters.injected_loss), "{counters:?}");
        assert!(counters.injected_duplicates > 20 && counters.injected_corruption > 20, "{counters:?}");
        numbers.extend(receive_numbers(&mut to, counters.packets_sent as usize));
        assert!(to.counters().bad_icrc >= counters.injected_corruption);
        (numbers, counters)
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1).0, run(2).0);
}

#[test]
fn delayed_packets_go_when_they_are_due() {
    let (_namespace, mut from, mut to) = loopback(|_, _| {}, false);
    from.set_faults(Some(Faults { delay_ppm: 1_000_000, delay_ns: 3_600_000_000_000, ..Faults::default() }));
    for number in 0..10 {
        send(&mut from, PEER, 7, &packet(number, 64));
    }
    from.flush();
    assert_eq!((from.has_unsent(), from.counters().packets_sent), (false, 0));
    let mut numbers = Vec::new();
    while let Some(due) = from.next_due() {
        assert!(due > Instant::now());
        from.release_due(due);
        if !from.has_unsent() {
            break;
        }
        from.flush();
        let count = from.counters().packets_sent as usize - numbers.len();
        numbers.extend(receive_numbers(&mut to, count));
    }
    assert_eq!(numbers, (0..10).collect::<Vec<_>>());
    assert_eq!(from.next_due(), None);
    // Packets that are held are not lost when the faults are taken away.
    send(&mut from, PEER, 7, &packet(10, 64));
    from.set_faults(None);
    from.flush();
    assert_eq!(receive_numbers(&mut to, 1), [10]);
}

#[test]
fn reordered_packets_all_arrive() {
    let (_namespace, mut from, mut to) = loopback(|_, _| {}, false);
    from.set_faults(Some(Faults { reorder_ppm: 200_000, seed: 3, ..Faults::default() }));
    for number in 0..500 {
        send(&mut from, PEER, 7, &packet(number, 64));
    }
    from.set_faults(None);
    from.flush();
    let mut numbers = receive_numbers(&mut to, 500);
    assert!(!numbers.is_sorted());
    assert!(from.counters().injected_reorders > 50);
    numbers.sort_unstable();
    assert_eq!(numbers, (0..500).collect::<Vec<_>>());
}

#[test]
fn no_flow_is_reordered() {
    let names: Vec<String> = (1..=20).map(|number| format!("10.0.0.{number}")).collect();
    let namespace = Namespace::new(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let mut from = namespace.open(config("10.0.0.1"));
    let mut receivers: Vec<Udp> = names[1..].iter().map(|name| namespace.open(config(name))).collect();
    for (index, receiver) in receivers.iter_mut().enumerate() {
        from.set_peer(PeerIndex(index as u32), peer("10.0.0.1", &names[index + 1])).expect("peer");
        receiver.set_peer(PEER, peer(&names[index + 1], "10.0.0.1")).expect("peer");
    }
    const FLOWS: usize = 12;
    let mut next = vec![[0_u32; FLOWS]; receivers.len()];
    let mut sent = vec![0; receivers.len()];
    let mut random = 1_u64;
    for _ in 0..4000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (to, flow) = ((random >> 33) as usize % receivers.len(), (random >> 45) as usize % FLOWS);
        let bytes = [20, 20, 100, 1040, 4112][(random >> 55) as usize % 5];
        let class = if random >> 60 == 0 { 0x20 } else { 0 };
        let place = from.reserve(route(PeerIndex(to as u32), flow as u32, class), bytes).expect("room");
        let mut one = packet(next[to][flow], bytes);
        one[12] = flow as u8;
        place.copy_from_slice(&one);
        from.commit();
        next[to][flow] += 1;
        sent[to] += 1;
    }
    from.flush();
    assert!(!from.has_unsent());
    for (to, receiver) in receivers.iter_mut().enumerate() {
        let mut seen = [0_u32; FLOWS];
        receive(receiver, sent[to], |received| {
            let flow = usize::from(received.packet[12]);
            assert_eq!(received.packet[8..12], seen[flow].to_be_bytes(), "receiver {to}, flow {flow}");
            seen[flow] += 1;
        });
        assert_eq!(seen, next[to]);
    }
}

#[test]
fn a_full_socket_keeps_what_it_cannot_send() {
    let (a, b) = veth(1500);
    // Nobody answers for this address: the kernel queues what is sent to it until the neighbour is known.
    let mut config = UdpConfig { send_buffer_bytes: 4096, source_port_count: 1, ..config("10.0.0.1") };
    config.addresses.push(address("fd00::1"));
    let mut from = a.open(config);
    from.set_peer(PEER, peer("10.0.0.1", "10.0.0.3")).expect("peer");
    let mut number = 0;
    while let Some(place) = from.reserve(route(PEER, 0, 0), 1040) {
        place.copy_from_slice(&packet(number, 1040));
        from.commit();
        number += 1;
        from.flush();
        assert!(number < 1000, "the buffer never fills: {:?}", from.counters());
    }
    assert!(from.has_unsent() && from.counters().send_blocked > 0);
    // The others have buffers still.
    assert!(!from.has_room(&route(PEER, 0, 0)));
    from.set_peer(PeerIndex(4), peer("fd00::1", "fd00::2")).expect("peer");
    assert!(from.has_room(&route(PeerIndex(4), 0, 0)) && from.reserve(route(PeerIndex(4), 0, 0), 64).is_some());
    from.abandon();
    assert_eq!(from.blocked_fds().count(), 1);
    b.ip("addr add 10.0.0.3/24 dev vb");
    let mut to = b.open(lab::config("10.0.0.3"));
    to.set_peer(PEER, peer("10.0.0.3", "10.0.0.1")).expect("peer");
    let_neighbour_answer(&a, &b);
    let mut numbers = Vec::new();
    while numbers.len() < number as usize {
        from.flush();
        let count = from.counters().packets_sent as usize - numbers.len();
        numbers.extend(receive_numbers(&mut to, count));
    }
    assert_eq!(numbers, (0..number).collect::<Vec<_>>());
    assert!(!from.has_unsent());
    send(&mut from, PEER, 0, &packet(number, 1040));
    from.flush();
    assert_eq!(receive_numbers(&mut to, 1), [number]);
}

#[test]
fn path_mtu_is_that_of_the_route() {
    let (a, _b) = veth(4200);
    let mut from = a.open(UdpConfig::new(vec![address("10.0.0.1"), address("fd00::1")]));
    from.set_peer(PEER, peer("10.0.0.1", "10.0.0.2")).expect("peer");
    from.set_peer(PeerIndex(4), peer("fd00::1", "fd00::2")).expect("peer");
    for (mtu, expected) in [(4200, 4096), (4176, 4096), (4175, 2048), (1500, 1024), (1280, 1024)] {
        a.ip(&format!("link set va mtu {mtu}"));
        let udp = &mut from;
        let measured = a.run(move || [PEER, PeerIndex(4)].map(|index| udp.path_mtu(index).expect("route")));
        assert_eq!(measured, [expected; 2], "{mtu}");
    }
    assert!(from.path_mtu(PeerIndex(9)).is_err());
    // Too long by now: dropped, counted, learned; the socket is as good as before.
    a.run(|| {
        for index in [PEER, PeerIndex(4)] {
            send(&mut from, index, 0, &packet(0, 4112));
            send(&mut from, index, 0, &packet(1, 4112));
            from.flush();
            assert_eq!(from.peer(index).map(|peer| peer.path_mtu_bytes), Some(1024));
        }
    });
    let counters = *from.counters();
    assert_eq!((counters.send_too_long, counters.send_dropped, counters.packets_sent), (2, 4, 0));
    send(&mut from, PEER, 0, &packet(2, 1040));
    from.flush();
    assert_eq!(from.counters().packets_sent, 1);
}

#[test]
fn an_absent_router_does_not_break_a_socket() {
    let (_namespace, mut from, to) = loopback(|config, _| config.source_port_count = 1, false);
    drop(to);
    for number in 0..20 {
        send(&mut from, PEER, 0, &packet(number, 64));
        from.flush();
    }
    let counters = from.counters();
    assert_eq!((counters.packets_sent, counters.send_dropped, counters.receive_errors), (20, 0, 0));
}

#[test]
fn no_route_is_counted() {
    let namespace = Namespace::new(&["10.0.0.1"]);
    let mut from = namespace.open(config("10.0.0.1"));
    from.set_peer(PEER, peer("10.0.0.1", "10.9.9.9")).expect("peer");
    send(&mut from, PEER, 0, &packet(0, 64));
    from.flush();
    assert_eq!((from.counters().send_unreachable, from.counters().send_dropped), (1, 1));
}

#[test]
fn a_taken_port_says_so() {
    let namespace = Namespace::new(&["10.0.0.1"]);
    let _first = namespace.open(config("10.0.0.1"));
    let error = namespace.run(|| Udp::open(config("10.0.0.1")).err()).expect("error");
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    assert!(error.to_string().starts_with("UDP port 4791 of 10.0.0.1: "), "{error}");
    let error = namespace.run(|| Udp::open(config("10.0.0.9")).err()).expect("error");
    assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
}

#[test]
fn peers_are_checked() {
    let namespace = Namespace::new(&["10.0.0.1"]);
    let mut udp = namespace.open(config("10.0.0.1"));
    udp.set_peer(PEER, peer("10.0.0.1", "10.0.0.2")).expect("peer");
    assert!(udp.set_peer(PeerIndex(4), peer("10.0.0.1", "10.0.0.2")).is_err(), "another's address");
    assert!(udp.set_peer(PeerIndex(4), peer("10.0.0.9", "10.0.0.3")).is_err(), "not our address");
    assert!(udp.set_peer(PeerIndex(4), peer("10.0.0.1", "fd00::3")).is_err(), "two families");
    assert!(udp.set_peer(PeerIndex(1 << 16), peer("10.0.0.1", "10.0.0.3")).is_err(), "index");
    udp.set_peer(PEER, peer("10.0.0.1", "10.0.0.3")).expect("replaced");
    assert_eq!((udp.peer_of(address("10.0.0.2")), udp.peer_of(address("10.0.0.3"))), (None, Some(PEER)));
}

#[test]
fn what_is_batched_goes_to_the_peer_that_it_was_meant_for() {
    let namespace = Namespace::new(&["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
    let mut from = namespace.open(config("10.0.0.1"));
    let mut receivers = ["10.0.0.2", "10.0.0.3"].map(|name| {
        let mut udp = namespace.open(config(name));
        udp.set_peer(PEER, peer(name, "10.0.0.1")).expect("peer");
        udp
    });
    for (number, name) in [(0, "10.0.0.2"), (1, "10.0.0.3")] {
        from.set_peer(PEER, peer("10.0.0.1", name)).expect("peer");
        send(&mut from, PEER, 0, &packet(number, 64));
    }
    from.remove_peer(PEER);
    from.flush();
    for (number, receiver) in (0..).zip(&mut receivers) {
        assert_eq!(receive_numbers(receiver, 1), [number]);
        assert_eq!(receiver.counters().packets_received, 1);
    }
}

#[test]
fn abandoned_packets_leave_nothing() {
    let (_namespace, mut from, mut to) = loopback(|_, _| {}, false);
    from.reserve(route(PEER, 0, 0), 64).expect("room");
    from.abandon();
    assert!(!from.has_unsent());
    send(&mut from, PEER, 0, &packet(0, 64));
    from.reserve(route(PEER, 0, 0), 64).expect("room").fill(0xee);
    send(&mut from, PEER, 0, &packet(1, 64));
    from.reserve(route(PEER, 0, 0), 60).expect("room").fill(0xee);
    from.flush();
    assert_eq!(receive_numbers(&mut to, 2), [0, 1]);
    assert_eq!(from.counters().packets_sent, 2);
}

#[test]
fn a_handler_may_send() {
    let (_namespace, mut from, mut to) = loopback(|_, _| {}, false);
    for number in 0..20 {
        send(&mut from, PEER, 7, &packet(number, 64));
    }
    from.flush();
    let mut left = 20;
    while left > 0 {
        left -= to.receive_with(64, &mut |udp, received| {
            let answer = received.packet.to_vec();
            send(udp, received.from, 7, &answer);
        });
    }
    to.flush();
    assert_eq!(receive_numbers(&mut from, 20), (0..20).collect::<Vec<_>>());
}

type Record = (Direction, std::net::SocketAddr, std::net::SocketAddr, u16, Vec<u8>);
struct Sink(Arc<Mutex<(Vec<u8>, Vec<Record>)>>);

impl freeflow_backend::CaptureSink for Sink {
    fn packet(&mut self, captured: &Captured<'_>) {
        let mut kept = self.0.lock().expect("sink");
        freeflow_backend::pcapng::packet(captured, &mut kept.0);
        let record = (captured.direction, captured.source, captured.destination, captured.identification);
        kept.1.push((record.0, record.1, record.2, record.3, captured.bytes.to_vec()));
    }
}

#[test]
fn captures_are_what_tshark_reads() {
    for v6 in [false, true] {
        let (_namespace, mut from, mut to) = loopback(|_, _| {}, v6);
        let kept = Arc::new(Mutex::new((Vec::new(), Vec::new())));
        freeflow_backend::pcapng::begin("test", &mut kept.lock().expect("sink").0);
        from.set_capture(Some(Box::new(Sink(kept.clone()))));
        to.set_capture(Some(Box::new(Sink(kept.clone()))));
        for number in 0..20 {
            send(&mut from, PEER, 7, &packet(number, 300 + number as usize / 10));
        }
        from.flush();
        receive(&mut to, 20, |_| {});
        let (file, records) = kept.lock().expect("sink").clone();
        let (sent, received): (Vec<_>, Vec<_>) = records.into_iter().partition(|record| record.0 == Direction::Sent);
        let rest = |records: &[Record]| records.iter().map(|r| (r.1, r.2, r.4.clone())).collect::<Vec<_>>();
        assert_eq!(sent.len(), 20);
        assert!(rest(&sent) == rest(&received), "both ends see the same");
        if !v6 {
            let identifications: Vec<u16> = received.iter().map(|record| record.3).collect();
            assert_eq!(identifications, (0..20).map(|number| number % 10).collect::<Vec<_>>());
        }
        let path = std::env::temp_dir().join(format!("ffb-{}-{v6}.pcapng", std::process::id()));
        std::fs::write(&path, file).expect("write");
        let fields =
            ["infiniband.bth.opcode", "infiniband.bth.destqp", "infiniband.bth.psn", "infiniband.invariant.crc"];
        let output = std::process::Command::new("tshark")
            .arg("-r")
            .arg(&path)
            .args(["-T", "fields"])
            .args(fields.iter().flat_map(|field| ["-e", field]))
            .args(["-e", "frame.packet_flags_direction", "-e", "_ws.malformed", "-e", "udp.dstport"])
            .output();
        let Ok(output) = output else {
            eprintln!("\n*** tshark is not installed: captures_are_what_tshark_reads checked nothing with it ***\n");
            return;
        };
        let _ = std::fs::remove_file(&path);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(text.lines().count(), 40, "{text}");
        let mut numbers = [Vec::new(), Vec::new()];
        for line in text.lines() {
            let columns: Vec<&str> = line.split('\t').collect();
            assert_eq!((columns[0], columns[1], columns[5], columns[6]), ("4", "0x000011", "", "4791"), "{line}");
            let inbound = columns[4].ends_with('1');
            numbers[usize::from(inbound)].push(columns[2].parse::<u32>().expect("PSN"));
            let icrc = u32::from_str_radix(columns[3].trim_start_matches("0x"), 16).expect("ICRC");
            let record = &sent[numbers[usize::from(inbound)].len() - 1];
            assert_eq!(icrc.to_be_bytes(), record.4[record.4.len() - 4..], "{line}");
        }
        assert_eq!(numbers[0], (0..20).collect::<Vec<_>>());
        assert_eq!(numbers[0], numbers[1]);
    }
}
