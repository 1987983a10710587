//! Packets that wait while an earlier one is written elsewhere: those that go on where it ends are written at once.
use crate::common::peer::*;
use crate::common::rig;
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::{Header, NakCode, Operation as Op, PacketPosition as Place};

use CompletionStatus as Status;

fn link() -> Link {
    let mut link = Link::new();
    link.net.world.always_put_off = true;
    link
}

/// Lands one copy after the other: how many there were.
fn land_all(net: &mut Net) -> usize {
    let mut count = 0;
    while !net.world.pending.is_empty() {
        assert_eq!(net.world.pending.len(), 1, "one at a time");
        net.land(0);
        count += 1;
    }
    count
}

#[test]
fn packets_of_one_write_that_waited_are_written_at_once() {
    let mut link = link();
    let (first, second) = (pattern(20 * 256), vec![9; 700]);
    link.receive(1, 0, 0);
    link.write(0, &first);
    link.message(Op::Write, link.reth(6000, 256), &[1; 256]);
    let packets = link.packets(Op::Write, link.reth(7000, 700), &second);
    for (at, (header, payload)) in packets.iter().enumerate() {
        let ends = at + 1 == packets.len();
        let last = Header { immediate: 5, ..link.header(Op::WriteImmediate, Place::Last) };
        link.push(if ends { last } else { *header }, payload);
    }
    // A packet and its followers; an only one; two, and the one that takes a RECV.
    assert_eq!(land_all(&mut link.net), 2 + 1 + 2);
    assert_eq!(link.says(), [Says::Ack { psn: 23, msn: 3 }]);
    assert_eq!((link.memory(0, first.len()), link.memory(7000, 700)), (first, second));
    assert_eq!(link.statuses(), [(1, Status::Success)]);
    assert_eq!((link.counters().packets_received, link.counters().bytes_received), (24, 20 * 256 + 256 + 700));
}

#[test]
fn a_run_is_256_kib_at_most() {
    let mut link = Link::with(QpType::Rc, PathMtu::Mtu4096, false);
    link.net.world.always_put_off = true;
    let bytes = pattern(100 * 4096);
    link.write(0, &bytes);
    // The first, 64 more, the rest.
    assert_eq!(land_all(&mut link.net), 3);
    assert_eq!(link.memory(0, bytes.len()), bytes);
}

#[test]
fn a_run_ends_at_a_gap() {
    let mut link = link();
    let packets = link.packets(Op::Write, link.reth(0, 5 * 256), &pattern(5 * 256));
    for at in [0, 1, 2, 4] {
        link.deliver(packets[at].0, &packets[at].1);
    }
    assert_eq!(land_all(&mut link.net), 2);
    assert_eq!(link.says(), [Says::Nak { psn: 3, code: NakCode::PsnSequence, msn: 0 }]);
    for (header, payload) in &packets[3..] {
        link.deliver(*header, payload);
    }
    assert_eq!(land_all(&mut link.net), 2);
    assert_eq!((link.says(), link.memory(0, 5 * 256)), (vec![Says::Ack { psn: 4, msn: 1 }], pattern(5 * 256)));
}

/// Too short, and longer in all than was announced: refused at its own PSN, once those before it are written.
#[test]
fn a_run_ends_before_a_packet_that_does_not_fit() {
    for (at, bytes) in [(2, 255), (4, 257), (4, 0)] {
        let mut link = link();
        let packets = link.packets(Op::Write, link.reth(0, 5 * 256), &pattern(5 * 256));
        for (number, (header, payload)) in packets.iter().enumerate() {
            link.push(*header, if number == at { &[0xee; 300][..bytes] } else { payload });
        }
        assert_eq!(land_all(&mut link.net), 2, "{at} {bytes}");
        let code = NakCode::InvalidRequest;
        assert_eq!(link.says().last(), Some(&Says::Nak { psn: at as u32, code, msn: 0 }), "{at} {bytes}");
        assert_eq!(link.memory(0, 6 * 256)[at * 256..], vec![0; (6 - at) * 256]);
    }
}

#[test]
fn memory_that_goes_away_under_a_run() {
    let mut link = link();
    link.write(0, &pattern(5 * 256));
    link.net.land(0);
    let (token, _) = link.net.world.pending.pop().unwrap();
    let Net { engine, world, now, .. } = &mut link.net;
    engine.handle_copied(world, *now, token, Err(MemorySide::Destination));
    let says = link.says();
    assert_eq!(says.last(), Some(&Says::Nak { psn: 1, code: NakCode::RemoteOperational, msn: 0 }), "{says:?}");
    assert_eq!(link.state(), QpState::Error);
}

#[test]
fn a_key_that_goes_bad_under_waiting_packets() {
    let mut link = link();
    link.write(0, &pattern(5 * 256));
    let end = link.end;
    assert_eq!(link.net.engine.deregister_mr(end.session, end.mr), Err(Refusal::InFlight));
    link.net.land(0);
    assert!(link.net.world.pending.is_empty());
    assert_eq!(link.says().last(), Some(&Says::Nak { psn: 1, code: NakCode::RemoteAccess, msn: 0 }));
}

#[test]
fn responses_that_waited_are_written_at_once() {
    let mut rig = rig::Rig::new(PathMtu::Mtu256);
    let data = pattern(10 * 256 + 7);
    rig.read(1, data.len());
    rig.read(2, 256);
    rig.net.world.always_put_off = true;
    for (at, piece) in data.chunks(256).enumerate() {
        rig.respond(at as u32, if at == 0 { Place::First } else { Place::Middle }, piece);
    }
    rig.respond(11, Place::Only, &[0x55; 256]);
    assert_eq!(land_all(&mut rig.net), 3);
    rig.net.work();
    assert_eq!(rig.statuses(), [(1, Status::Success), (2, Status::Success)]);
    assert_eq!(rig.memory(data.len())[256..], data[256..]);
}

#[test]
fn a_response_that_does_not_fit_ends_the_run() {
    let mut rig = rig::Rig::new(PathMtu::Mtu256);
    rig.read(1, 5 * 256);
    rig.net.world.always_put_off = true;
    for at in 0..5 {
        rig.respond(at, Place::Middle, &pattern(if at == 3 { 200 } else { 256 }));
    }
    assert_eq!(land_all(&mut rig.net), 2);
    rig.net.work();
    assert_eq!(rig.statuses(), [(1, Status::BadResponse)]);
}

#[test]
fn a_missing_response_is_asked_for_again() {
    let mut rig = rig::Rig::new(PathMtu::Mtu256);
    let data = pattern(5 * 256);
    rig.read(1, data.len());
    rig.net.world.always_put_off = true;
    for at in [0, 1, 2, 4] {
        rig.respond(at, Place::Middle, &data[at as usize * 256..][..256]);
    }
    assert_eq!(land_all(&mut rig.net), 2);
    rig.net.work();
    let asked = rig.out().into_iter().map(|(header, _)| (header.opcode.operation(), header.reth.length)).next_back();
    assert_eq!(asked, Some((Op::ReadRequest, 2 * 256)));
    rig.respond(3, Place::First, &data[3 * 256..][..256]);
    rig.respond(4, Place::Last, &data[4 * 256..]);
    assert_eq!(land_all(&mut rig.net), 2);
    rig.net.work();
    assert_eq!((rig.statuses(), rig.memory(data.len())), (vec![(1, Status::Success)], data));
}
