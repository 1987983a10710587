//! Two routers in this process that seal what they send each other, or do not agree whether they should.
use super::wire::{Apart, count, operations};
use crate::common::hosts::{Hosts, address_of, alone};
use crate::common::*;
use freeflow_protocol::admin::{PeerStatus, WireStatus};
use freeflow_router::WireOptions;
use freeflow_verbs::{CompletionStatus, QpType, SendOpcode};
use std::net::UdpSocket;

/// `ibv_qp_attr::timeout`: 67 ms.
const TIMEOUT: u8 = 14;
/// Of keys, so that there are many. More are on the way at no time.
const KEY_PACKETS: u64 = 1000;
const REFUSALS: [&str; 6] = ["unsealed", "unknown_key", "wrong_shard", "replayed", "bad_tag", "bad_icrc"];

fn refusals(wire: &WireStatus) -> u64 {
    REFUSALS.iter().map(|name| count(&wire.counters, name)).sum()
}

fn peer_of(hosts: &Hosts, host: usize) -> PeerStatus {
    peers_status(&hosts.hosts[host].run_dir()).peers.remove(0)
}

/// A request that gets no answer: of a connection to an address that is not reached.
fn fails_as_to_nobody(hosts: &Hosts) {
    let (mut a, mut b) = (hosts.hosts[0].client("a"), hosts.hosts[1].client("b"));
    let (mut a_cq, b_cq) = (a.create_cq(64, None), b.create_cq(64, None));
    let (mut a_qp, b_qp) = (a.create_qp(QpType::Rc, &a_cq), b.create_qp(QpType::Rc, &b_cq));
    a.connect_rc(&a_qp, b.gid(), b_qp.qpn, TIMEOUT);
    b.connect_rc(&b_qp, a.gid(), a_qp.qpn, TIMEOUT);
    let from = a.memory(8, true);
    a.post_send(&mut a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
    assert_eq!(a_cq.wait().status, CompletionStatus::RetryExceeded);
}

#[test]
fn every_operation_and_no_packet_is_lost_while_keys_change() {
    let _alone = alone();
    let wire = WireOptions { key_packets: KEY_PACKETS, ..WireOptions::default() };
    let hosts = Hosts::of_kinds(&wire, ["sealed"; 2]);
    hosts.until_connected();
    let mut pair = Apart::new(hosts, QpType::Rc);
    for _ in 0..3 {
        for (from_shared, to_shared) in [(true, true), (true, false), (false, true), (false, false)] {
            operations(&mut pair, from_shared, to_shared);
        }
    }
    let all_came = || {
        let wires = [pair.hosts.wire(0), pair.hosts.wire(1)];
        let came = (0..2).all(|host| {
            count(&wires[host].counters, "packets_sent") == count(&wires[1 - host].counters, "packets_received")
        });
        came.then_some(wires)
    };
    for wire in until("every packet to come", all_came) {
        assert!(wire.hosts[0].sealed);
        let sent = count(&wire.counters, "packets_sent");
        assert!(count(&wire.counters, "keys_used") >= 2, "{wire:?}");
        assert!(count(&wire.counters, "keys_used") <= sent / KEY_PACKETS + 2, "{wire:?}");
        assert_eq!((refusals(&wire), count(&wire.counters, "no_key")), (0, 0), "{wire:?}");
    }
    let peer = peer_of(&pair.hosts, 0);
    assert_eq!((peer.sealed, peer.icrc, peer.problem), (true, false, None));
}

#[test]
fn keys_change_in_time_while_nothing_is_sent() {
    let _alone = alone();
    let hosts = Hosts::of_kinds(&WireOptions { key_ms: 20, ..WireOptions::default() }, ["sealed"; 2]);
    hosts.until_connected();
    for host in 0..2 {
        // A worker that sleeps is woken for it.
        until("some keys", || (count(&hosts.wire(host).counters, "keys_used") >= 5).then_some(()));
    }
    let mut pair = Apart::new(hosts, QpType::Rc);
    operations(&mut pair, true, true);
    assert_eq!(refusals(&pair.hosts.wire(0)) + refusals(&pair.hosts.wire(1)), 0);
}

#[test]
fn a_plain_packet_from_the_peers_address_is_dropped_and_counted() {
    let _alone = alone();
    let hosts = Hosts::of_kinds(&WireOptions::default(), ["sealed"; 2]);
    hosts.until_connected();
    let mut pair = Apart::new(hosts, QpType::Rc);
    operations(&mut pair, true, true);
    // A WRITE for the very QP, as its peer would send it; nothing that is taken from it changes the QP.
    let forger = UdpSocket::bind((address_of(1), 0)).unwrap();
    let before = pair.hosts.wire(0);
    let mut head = [0; 32];
    (head[0], head[2], head[3]) = (0x0a, 0xff, 0xff);
    head[5..8].copy_from_slice(&pair.a_qp.qpn.to_be_bytes()[1..]);
    for _ in 0..20 {
        forger.send_to(&head, (address_of(0), 4791)).unwrap();
    }
    let dropped = || Some(count(&pair.hosts.wire(0).counters, "unsealed")).filter(|&count| count == 20);
    until("all of them to be dropped", dropped);
    assert_eq!(pair.hosts.wire(0).drops, before.drops, "none got as far as a QP");
    operations(&mut pair, true, true);
}

#[test]
fn hosts_of_different_kinds_say_why_they_do_not_reach_each_other() {
    let _alone = alone();
    for kinds in [["sealed", "plain"], ["plain", "sealed"]] {
        let hosts = Hosts::of_kinds(&WireOptions::default(), kinds);
        for (host, kind) in kinds.into_iter().enumerate() {
            let why = || peer_of(&hosts, host).problem.filter(|why| why.contains("\"wire\" in both peers files"));
            let why = until("the reason", why);
            assert_eq!(why.contains("this host's are sealed"), kind == "sealed", "{why}");
            assert_ne!(peer_of(&hosts, host).state, "up");
        }
        fails_as_to_nobody(&hosts);
        for host in 0..2 {
            assert_eq!(count(&hosts.wire(host).counters, "packets_sent"), 0);
        }
    }
}

#[test]
fn a_host_that_becomes_sealed_sends_nothing_plain_from_then_on() {
    let _alone = alone();
    let hosts = Hosts::of_kinds(&WireOptions::default(), ["plain"; 2]);
    hosts.until_connected();
    let mut pair = Apart::new(hosts, QpType::Rc);
    operations(&mut pair, true, true);
    let sent = |pair: &Apart| count(&pair.hosts.wire(0).counters, "packets_sent");
    pair.hosts.set_kind(0, "sealed");
    until("the sockets to have no way there", || (pair.hosts.wire(0).hosts[0].mtu == 0).then_some(()));
    let before = sent(&pair);
    let from = pair.a.memory(8, true);
    pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::RetryExceeded);
    assert_eq!(sent(&pair), before);
    // With both of one kind again, new connections work.
    pair.hosts.set_kind(1, "sealed");
    until("the hosts to be connected", || (0..2).all(|host| peer_of(&pair.hosts, host).state == "up").then_some(()));
    let Apart { hosts, .. } = pair;
    let mut pair = Apart::named(hosts, QpType::Rc, ["c", "d"]);
    operations(&mut pair, true, true);
    assert_eq!(refusals(&pair.hosts.wire(0)), 0);
}
