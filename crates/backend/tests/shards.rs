//! Several engines of a host at one address, through real sockets in network namespaces of the tests' own (root).
mod lab;

use freeflow_backend::{Faults, Peer, Udp, UdpConfig};
use freeflow_verbs::{Qpn, Shard};
use freeflow_wire::{Header, UDP_PORT};
use lab::{Namespace, PEER, address, config, once_free, packet_to, peer, receive, send};
use rustix::net::{AddressFamily, SocketType, bind, socket, sockopt};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;

const FLOW: u32 = 0x11;
const COUNT: u8 = 4;
const A_FEW: u32 = 5;

/// A backend of one engine, and those of a host with several, on one loopback.
fn hosts(change: impl Fn(&mut UdpConfig), v6: bool) -> (Namespace, Udp, Vec<Udp>) {
    let (a, b) = if v6 { ("fd00::1", "fd00::2") } else { ("10.0.0.1", "10.0.0.2") };
    let namespace = Namespace::new(&[a, b]);
    let changed = |local| {
        let mut config = config(local);
        change(&mut config);
        config
    };
    let mut from = namespace.open(changed(a));
    let mut to = namespace.open_all(changed(b), COUNT);
    from.set_peer(PEER, peer(a, b)).expect("peer");
    to.iter_mut().for_each(|to| to.set_peer(PEER, peer(b, a)).expect("peer"));
    (namespace, from, to)
}

/// Destination QPN and PSN of what comes to each engine, until so many packets have come to it; then none is left.
fn arrived(to: &mut [Udp], counts: &[usize]) -> Vec<Vec<(u32, u32)>> {
    let mut all = Vec::new();
    for (udp, &count) in to.iter_mut().zip(counts) {
        let mut here = Vec::new();
        if count > 0 {
            receive(udp, count, |received| {
                let header = Header::parse(received.packet).expect("header").0;
                here.push((header.dest_qpn, header.psn));
            });
        }
        assert_eq!(udp.receive(1, &mut |_| ()), 0, "nothing else comes");
        all.push(here);
    }
    all
}

#[test]
fn a_packet_comes_to_the_engine_that_has_its_qpn() {
    for (gso, gro, v6) in [(true, true, false), (false, false, false), (true, true, true), (true, false, true)] {
        let (_namespace, mut from, mut to) = hosts(|config| (config.gso, config.gro) = (gso, gro), v6);
        let qpns = [0, 1, 2, 3, 4, 0x10_0001, 0xff_fffe, 0xff_ffff];
        let mut expected = vec![Vec::new(); usize::from(COUNT)];
        for qpn in qpns {
            for number in 0..A_FEW {
                send(&mut from, PEER, FLOW, &packet_to(qpn, number, 1040));
                let shard = Shard::new(0, COUNT).expect("a shard").of_qpn(Qpn(qpn));
                expected[usize::from(shard)].push((qpn, number));
            }
            from.flush();
        }
        let counts: Vec<_> = expected.iter().map(Vec::len).collect();
        assert_eq!(arrived(&mut to, &counts), expected, "gso {gso}, gro {gro}, v6 {v6}");
    }
}

#[test]
fn what_several_engines_get_is_not_put_together() {
    for (ports, v6) in [(8, false), (1, false), (8, true)] {
        let (_namespace, mut from, mut to) = hosts(|config| config.source_port_count = ports, v6);
        from.set_shards(PEER, COUNT);
        // One after the other, of one length: all are of one flow.
        let qpns = [0x10, 0x11, 0x12, 0x13, 0x21, 1];
        let mut expected = vec![Vec::new(); usize::from(COUNT)];
        for number in 0..100 {
            for qpn in qpns {
                send(&mut from, PEER, FLOW, &packet_to(qpn, number, 1040));
                expected[if qpn == 1 { 0 } else { qpn as usize % 4 }].push((qpn, number));
            }
        }
        from.flush();
        let counts: Vec<_> = expected.iter().map(Vec::len).collect();
        assert_eq!(arrived(&mut to, &counts), expected, "{ports} source ports, v6 {v6}");
        assert!(from.counters().batches_sent < from.counters().packets_sent / 4, "{:?}", from.counters());
    }
}

#[test]
fn packets_that_are_late_keep_their_engine() {
    let (_namespace, mut from, mut to) = hosts(|_| (), false);
    from.set_shards(PEER, COUNT);
    from.set_faults(Some(Faults { seed: 1, delay_ppm: 300_000, delay_ns: 1_000_000, ..Faults::default() }));
    for (number, qpn) in (0..400).zip([0x10, 0x11, 0x12, 0x13].into_iter().cycle()) {
        send(&mut from, PEER, FLOW, &packet_to(qpn, number, 1040));
    }
    from.set_faults(None);
    from.flush();
    for (shard, came) in arrived(&mut to, &[100; COUNT as usize]).into_iter().enumerate() {
        assert!(came.iter().all(|&(qpn, _)| qpn == 0x10 + shard as u32), "{shard}: {came:?}");
    }
    assert!(from.counters().injected_delays > 50);
}

#[test]
fn what_is_no_packet_is_the_first_ones() {
    let (namespace, _from, mut to) = hosts(|_| (), false);
    let plain = namespace.run(|| UdpSocket::bind("10.0.0.1:0")).expect("socket");
    for bytes in [&[][..], &[4], &[4, 0, 0, 0, 0, 0, 3], &[0xe0, 0, 0, 0]] {
        plain.send_to(bytes, "10.0.0.2:4791").expect("sent");
    }
    // A sealed packet names the engine by itself.
    plain.send_to(&[0xe0, 1, 2, 3, 6, 0, 0, 1], "10.0.0.2:4791").expect("sent");
    assert_eq!(arrived(&mut to, &[4, 0, 1, 0]), vec![Vec::<(u32, u32)>::new(); usize::from(COUNT)]);
    let counts: Vec<_> = to.iter().map(|udp| udp.counters().packets_received).collect();
    assert_eq!(counts, [4, 0, 1, 0]);
}

/// Binds port 4791 with SO_REUSEPORT, SO_REUSEADDR, or both.
fn bind_shared(address: IpAddr, (port, reuse_address): (bool, bool)) -> std::io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket(family, SocketType::DGRAM, None)?;
    sockopt::set_socket_reuseport(&socket, port)?;
    sockopt::set_socket_reuseaddr(&socket, reuse_address)?;
    bind(&socket, &SocketAddr::new(address, UDP_PORT))?;
    Ok(socket)
}

#[test]
fn nobody_else_gets_at_the_port_of_an_address() {
    // The kernel looks for others in one of two tables, by the number of sockets on the port.
    for (v6, others) in [(false, 0), (false, 20), (true, 0), (true, 20)] {
        let (namespace, _from, to) = hosts(|_| (), v6);
        let at = if v6 { "fd00::2" } else { "10.0.0.2" };
        let others: Vec<IpAddr> = (0..others).map(|number| address(&format!("127.1.0.{number}"))).collect();
        let _others: Vec<_> =
            namespace.run(|| others.iter().map(|&other| UdpSocket::bind((other, 4791)).expect("free")).collect());
        for options in [(false, false), (true, false), (false, true), (true, true)] {
            let error = namespace.run(|| bind_shared(address(at), options)).expect_err("it is taken");
            assert_eq!(error.kind(), ErrorKind::AddrInUse, "{options:?}, v6 {v6}");
        }
        for count in [1, 2, COUNT] {
            let error = namespace.run(|| Udp::open_all(config(at), count)).err().expect("it is taken");
            assert_eq!(error.kind(), ErrorKind::AddrInUse, "{count} shards, v6 {v6}");
            assert!(error.to_string().contains(at), "{error}");
        }
        drop(to);
        namespace.open_all(config(at), 2);
        let alone = namespace.open(config(at));
        let error = namespace.run(|| Udp::open_all(config(at), COUNT)).err().expect("it is taken");
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
        drop(alone);
        let _shared = namespace.run(|| once_free(|| bind_shared(address(at), (true, false))));
        let error = namespace.run(|| Udp::open_all(config(at), COUNT)).err().expect("it is taken, and shared");
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
    }
}

/// Two hosts with several engines each, that seal what they send each other and know how many there are.
fn sealed_hosts() -> (Namespace, Vec<Udp>, Vec<Udp>) {
    let (a, b) = ("10.0.0.1", "10.0.0.2");
    let namespace = Namespace::new(&[a, b]);
    let open = |local, remote, count| {
        let mut all = namespace.open_all(config(local), count);
        let peer = Peer { sealed: true, shards: if count == 2 { COUNT } else { 2 }, ..peer(local, remote) };
        all.iter_mut().for_each(|udp| udp.set_peer(PEER, peer).expect("peer"));
        all
    };
    let (from, to) = (open(a, b, 2), open(b, a, COUNT));
    (namespace, from, to)
}

/// Each of them gets a key that all of the others have.
fn introduce(from: &mut [Udp], to: &mut [Udp]) {
    for udp in from {
        let offer = udp.offer_key(PEER, 0).expect("random bits").expect("it is sealed");
        assert!(to.iter_mut().all(|udp| udp.accept_key(PEER, 0, &offer)));
        assert!(udp.use_key(PEER, 0, offer.id));
    }
}

#[test]
fn sealed_packets_come_to_the_engine_that_has_their_qpn() {
    let (_namespace, mut from, mut to) = sealed_hosts();
    introduce(&mut from, &mut to);
    introduce(&mut to, &mut from);
    for _ in 0..3 {
        let qpns = [1, 0x10, 0x11, 0x12, 0x13, 0x17];
        let mut expected = vec![Vec::new(); usize::from(COUNT)];
        for (number, qpn) in (0..120).zip(qpns.into_iter().cycle()) {
            let engine = number as usize % from.len();
            send(&mut from[engine], PEER, FLOW, &packet_to(qpn, number, 1040));
            expected[if qpn == 1 { 0 } else { qpn as usize % 4 }].push((qpn, number));
        }
        from.iter_mut().for_each(Udp::flush);
        let counts: Vec<_> = expected.iter().map(Vec::len).collect();
        let mut came = arrived(&mut to, &counts);
        // Those of the two engines may change places.
        came.iter_mut().for_each(|here| here.sort_unstable_by_key(|&(_, number)| number));
        assert_eq!(came, expected);
        for udp in &mut to {
            send(udp, PEER, FLOW, &packet_to(0x21, 7, 64));
            udp.flush();
        }
        assert_eq!(arrived(&mut from, &[0, COUNT.into()]), [vec![], vec![(0x21, 7); usize::from(COUNT)]]);
        // All of them get the next key.
        introduce(&mut from, &mut to);
    }
}

#[test]
fn a_sealed_packet_for_another_engine_is_dropped_and_counted() {
    let (_namespace, mut from, mut to) = sealed_hosts();
    introduce(&mut from, &mut to);
    // A sender that names the first engine on all packets.
    let one = &mut from[0];
    one.set_shards(PEER, 1);
    for (number, qpn) in (0..40).zip([0x10, 0x11, 0x12, 0x13].into_iter().cycle()) {
        send(one, PEER, FLOW, &packet_to(qpn, number, 64));
    }
    one.flush();
    let came = arrived(&mut to, &[40, 0, 0, 0]);
    assert!(came[0].len() == 10 && came[0].iter().all(|&(qpn, _)| qpn == 0x10), "{came:?}");
    assert_eq!(to[0].counters().wrong_shard, 30);
    // One that names an engine which its receiver is not, and has not: no window has seen it.
    one.set_shards(PEER, 8);
    send(one, PEER, FLOW, &packet_to(0x15, 50, 64));
    one.flush();
    assert_eq!(arrived(&mut to, &[0, 1, 0, 0])[1], []);
    assert_eq!((to[1].counters().wrong_shard, to[1].counters().replayed), (1, 0));
}
