//! Selective repeat, against a scripted peer: what a responder keeps and reports, and what a requester repeats.
use crate::common::peer::*;
use crate::common::rig::{MS, Rig, attributes};
use crate::common::*;
use freeflow_verbs::*;
use freeflow_wire::frame::{FRAME_HEADER_BYTES, Frame};
use freeflow_wire::{Header, Kept, MASK_24, NakCode, Operation as Op, PacketPosition as Place, Reth, psn_add};

use CompletionStatus as Status;

type Packets = Vec<(Header, Vec<u8>)>;

fn link() -> Link {
    Link::on_path(256, true)
}

/// The frames of a message in pieces of the path MTU, from the next PSN on; the script goes on behind them.
fn frames(link: &mut Link, operation: Op, reth: Reth, payload: &[u8]) -> Packets {
    let mut packets = link.packets(operation, reth, payload);
    let mut offset = 0;
    for (header, piece) in &mut packets {
        header.frame = Some(Frame { message_psn: link.psn, response_bytes: 0 });
        header.reth = Reth { address: reth.address + offset, length: payload.len() as u32, ..reth };
        // It counts in the last packet of such a message only.
        header.immediate = 0;
        offset += piece.len() as u64;
    }
    link.psn = psn_add(link.psn, packets.len() as u32);
    packets
}

fn write(link: &mut Link, offset: u64, payload: &[u8]) -> Packets {
    let reth = link.reth(offset, payload.len());
    frames(link, Op::Write, reth, payload)
}

fn send(link: &mut Link, payload: &[u8]) -> Packets {
    frames(link, Op::Send, Reth::default(), payload)
}

fn deliver(link: &mut Link, packets: &Packets, which: impl IntoIterator<Item = usize>) {
    which.into_iter().for_each(|at| link.deliver(packets[at].0, &packets[at].1));
}

/// The one packet that is said is a report: the missing PSN, and how far behind it others are kept.
fn report(link: &mut Link) -> (u32, Vec<u32>) {
    let replies = link.replies();
    let [(header, payload)] = &replies[..] else { panic!("{replies:?}") };
    assert_eq!(header.aeth.syndrome, freeflow_wire::Syndrome::Nak(NakCode::PsnSequence));
    assert!(header.frame.is_some() && payload.is_empty());
    let kept = Kept::from_fields(&header.reth);
    let distances = (0..=Kept::PACKETS).filter(|distance| kept.has(*distance)).collect();
    (header.psn.wrapping_sub(crate::common::peer::FIRST_PSN) & MASK_24, distances)
}

fn overflows(link: &Link) -> u64 {
    link.net.engine.drops().parked_overflow
}

// ---- the responder

#[test]
fn packets_ahead_are_kept_and_written_in_order() {
    let (mut link, data) = (link(), pattern(6 * 256));
    let packets = write(&mut link, 0, &data);
    deliver(&mut link, &packets, [0, 2, 4]);
    assert_eq!(report(&mut link), (1, vec![1, 3]));
    deliver(&mut link, &packets, [5]);
    assert_eq!(report(&mut link), (1, vec![1, 3, 4]));
    assert_eq!(link.memory(256, 5 * 256), vec![0; 5 * 256], "nothing is written ahead");
    deliver(&mut link, &packets, [1]);
    assert_eq!(report(&mut link), (3, vec![1, 2]), "the next gap");
    assert_eq!((link.memory(0, 3 * 256), link.memory(768, 768)), (data[..768].to_vec(), vec![0; 768]));
    deliver(&mut link, &packets, [3]);
    assert_eq!((link.says(), link.memory(0, data.len())), (vec![Says::Ack { psn: 5, msn: 1 }], data));
    let counters = link.counters();
    assert_eq!((counters.packets_received, counters.out_of_sequence, counters.duplicate_requests), (6, 3, 0));
}

#[test]
fn messages_ahead_complete_in_order_and_once() {
    let mut link = link();
    (0..4).for_each(|id| link.receive(id, 1000 * id, 1000));
    let sends: Vec<Packets> = (1..=3).map(|byte| send(&mut link, &[byte; 300])).collect();
    for _ in 0..2 {
        deliver(&mut link, &sends[2], [1, 0]);
        deliver(&mut link, &sends[1], [1, 0]);
        assert_eq!((report(&mut link), link.statuses()), ((0, vec![2, 3, 4, 5]), vec![]));
    }
    assert_eq!(link.counters().duplicate_requests, 4);
    deliver(&mut link, &sends[0], [0, 1]);
    assert_eq!(link.says(), [Says::Ack { psn: 5, msn: 3 }]);
    assert_eq!(link.statuses(), [(0, Status::Success), (1, Status::Success), (2, Status::Success)]);
    for (at, byte) in [(0, 1), (1000, 2), (2000, 3)] {
        assert_eq!(link.memory(at, 300), [byte; 300]);
    }
}

#[test]
fn packets_that_change_places_within_a_batch_are_not_reported() {
    let (mut link, data) = (link(), pattern(1000));
    let packets = write(&mut link, 0, &data);
    deliver(&mut link, &packets, [1, 3, 0, 2]);
    assert_eq!((link.says(), link.memory(0, 1000)), (vec![Says::Ack { psn: 3, msn: 1 }], data));
}

#[test]
fn requests_with_answers_wait_their_turn() {
    let (mut link, data) = (link(), pattern(600));
    link.fill(4096, &7_u64.to_ne_bytes());
    let first = write(&mut link, 0, &data);
    let mut read = link.read_header(0, 600);
    read.frame = Some(Frame { message_psn: read.psn, response_bytes: 256 });
    link.push(read, &[]);
    // The responses are three packets.
    link.psn = psn_add(link.psn, 2);
    let add = link.fetch_add_header(4096, 5);
    link.push(add, &[]);
    link.deliver(add, &[]);
    assert_eq!(report(&mut link), (0, vec![3, 6]));
    assert_eq!(link.memory(4096, 8), 7_u64.to_ne_bytes());
    deliver(&mut link, &first, 0..3);
    let read = |psn, place, bytes| Says::Read { psn, place, bytes };
    let expected = [
        read(3, Place::First, 256),
        read(4, Place::Middle, 256),
        read(5, Place::Last, 88),
        Says::Atomic { psn: 6, msn: 3, original: 7 },
    ];
    assert_eq!((link.says(), link.memory(4096, 8)), (expected.to_vec(), 12_u64.to_ne_bytes().to_vec()));
}

#[test]
fn a_missing_receive_forgets_what_is_kept() {
    let mut link = link();
    link.receive(1, 0, 1000);
    let sends: Vec<Packets> = (1..=3).map(|byte| send(&mut link, &[byte; 100])).collect();
    deliver(&mut link, &sends[2], [0]);
    deliver(&mut link, &sends[1], [0]);
    assert_eq!(report(&mut link), (0, vec![1, 2]));
    deliver(&mut link, &sends[0], [0]);
    assert_eq!(link.says(), [Says::NotReady { psn: 1, timer: 12 }]);
    link.receive(2, 1000, 1000);
    link.receive(3, 2000, 1000);
    // Both come again: the refused one, and the one that was kept behind it.
    deliver(&mut link, &sends[1], [0]);
    assert_eq!(link.says(), [Says::Ack { psn: 1, msn: 2 }]);
    deliver(&mut link, &sends[2], [0]);
    assert_eq!(link.says(), [Says::Ack { psn: 2, msn: 3 }]);
    assert_eq!(link.statuses(), [(1, Status::Success), (2, Status::Success), (3, Status::Success)]);
}

#[test]
fn a_kept_packet_that_is_refused_ends_the_qp_at_its_own_psn() {
    let mut link = link();
    let packets = write(&mut link, 0, &[1; 600]);
    let mut bad = write(&mut link, 1000, &[2; 100]);
    bad[0].0.reth.rkey ^= 1;
    let later = write(&mut link, 2000, &[3; 100]);
    deliver(&mut link, &later, [0]);
    deliver(&mut link, &bad, [0]);
    assert_eq!(report(&mut link), (0, vec![3, 4]));
    deliver(&mut link, &packets, 0..3);
    assert_eq!(link.says(), [Says::Nak { psn: 3, code: NakCode::RemoteAccess, msn: 1 }]);
    assert_eq!((link.memory(0, 600), link.memory(2000, 100)), (vec![1; 600], vec![0; 100]));
    assert_eq!(link.state(), QpState::Error);
}

#[test]
fn kept_packets_are_written_one_after_the_other() {
    let (mut link, data) = (link(), pattern(5 * 256));
    link.net.world.always_put_off = true;
    let packets = write(&mut link, 0, &data);
    deliver(&mut link, &packets, [1, 2, 4, 0, 3]);
    while !link.net.world.pending.is_empty() {
        assert_eq!(link.net.world.pending.len(), 1, "one at a time");
        link.net.land(0);
    }
    assert_eq!((link.says(), link.memory(0, data.len())), (vec![Says::Ack { psn: 4, msn: 1 }], data));
}

/// Too far ahead, and more than one QP may keep.
#[test]
fn what_is_kept_has_limits() {
    let mut link = link();
    let begin = link.psn;
    let missing = write(&mut link, 0, &[1; 10]);
    for (distance, is_kept) in [(4095, true), (4096, false), (9000, false)] {
        link.psn = psn_add(begin, distance);
        let packets = write(&mut link, 100, &[1; 10]);
        deliver(&mut link, &packets, [0]);
        assert_eq!(report(&mut link), (0, vec![]), "a report names 128");
        let duplicates = link.counters().duplicate_requests;
        deliver(&mut link, &packets, [0]);
        report(&mut link);
        assert_eq!(link.counters().duplicate_requests - duplicates, u64::from(is_kept), "{distance}");
    }
    deliver(&mut link, &missing, [0]);
    assert_eq!(report(&mut link), (1, vec![]));
    assert_eq!(overflows(&link), 0);
    link.reconnect();
    fill(&mut link);
    assert_eq!(overflows(&link), LOST);
}

/// Of the packets of [`fill`], those beyond 8 MiB.
const LOST: u64 = 1200 - (8 << 20) / (8192 + FRAME_HEADER_BYTES as u64);

/// Packets of 8 KiB ahead of a missing one, which is given.
fn fill(link: &mut Link) -> Packets {
    let missing = write(link, 0, &[1; 10]);
    for _ in 0..1200 {
        let mut header = link.header(Op::Write, Place::Only);
        header.frame = Some(Frame { message_psn: link.psn, response_bytes: 0 });
        header.reth = link.reth(0, 8192);
        link.push(header, &[7; 8192]);
    }
    report(link);
    missing
}

/// However it ends, what was kept is let go: a vNIC may have 16 MiB, each round keeps 8.
#[test]
fn nothing_stays_kept() {
    type End = fn(&mut Link, &Packets);
    let ends: [(&str, End); 5] = [
        ("reset", |_, _| {}),
        ("the peer's refusal", |link, missing| {
            let mut header = missing[0].0;
            header.reth.rkey ^= 1;
            link.deliver(header, &missing[0].1);
            assert_eq!(link.state(), QpState::Error);
        }),
        ("no RECV", |link, missing| {
            let mut header = link.header(Op::Send, Place::Only);
            header.psn = missing[0].0.psn;
            link.deliver(header, b"x");
            assert_eq!(link.says(), [Says::NotReady { psn: 0, timer: 12 }]);
        }),
        ("the gap is filled", |link, missing| deliver(link, missing, [0])),
        ("policy", |link, _| {
            let Net { engine, world, .. } = &mut link.net;
            engine.handle_disconnected(world, link.end.qpn, HOST, Qpn(PEER_QPN));
            assert_eq!(link.state(), QpState::Error);
        }),
    ];
    for (name, end) in ends {
        let mut link = link();
        let mut before = 0;
        for round in 0..10 {
            let missing = fill(&mut link);
            assert_eq!(overflows(&link) - before, LOST, "{name}, round {round}");
            before += LOST;
            end(&mut link, &missing);
            link.replies();
            link.reconnect();
        }
    }
}

/// The last copy under a PSN counts, as for the expected one: a packet of an earlier connection may have come first.
#[test]
fn the_later_copy_of_a_kept_packet_counts() {
    let (mut link, data) = (link(), pattern(3 * 256));
    let mut packets = write(&mut link, 0, &data);
    packets.push((packets[2].0, vec![9; 256]));
    deliver(&mut link, &packets, [3, 2]);
    assert_eq!((report(&mut link), link.counters().duplicate_requests), ((0, vec![2]), 1));
    deliver(&mut link, &packets, [0, 1]);
    assert_eq!((link.says(), link.memory(0, 3 * 256)), (vec![Says::Ack { psn: 2, msn: 1 }], data));
}

/// Each report that names nothing has all sent again.
#[test]
fn a_gap_behind_which_nothing_is_kept_is_reported_once() {
    let mut link = link();
    link.psn = psn_add(link.psn, 5000);
    let far = write(&mut link, 0, &pattern(1000));
    deliver(&mut link, &far, [0]);
    assert_eq!(report(&mut link), (0, vec![]));
    for at in 1..4 {
        deliver(&mut link, &far, [at]);
        assert_eq!(link.replies(), []);
    }
}

#[test]
fn without_agreement_packets_ahead_are_dropped() {
    for (frame_bytes, selective) in [(0, false), (256, false), (0, true)] {
        let mut link = Link::on_path(frame_bytes, selective);
        let packets = write(&mut link, 0, &pattern(1000));
        deliver(&mut link, &packets, [1, 2]);
        let replies = link.replies();
        assert!(replies.len() == 1 && replies[0].0.frame.is_none(), "{replies:?}");
        deliver(&mut link, &packets, [3, 0]);
        assert_eq!((link.says(), link.memory(256, 744)), (vec![], vec![0; 744]));
        deliver(&mut link, &packets, 1..4);
        assert_eq!((link.says(), link.memory(0, 1000)), (vec![Says::Ack { psn: 3, msn: 1 }], pattern(1000)));
    }
}

// ---- the requester

/// One round trip of 100 us was measured; the next PSN is 1.
fn rig() -> Rig {
    rig_with(attributes())
}

fn rig_with(rts: QpAttributes) -> Rig {
    let mut rig = Rig::selective(256, rts);
    rig.write(0, 10);
    rig.wait(100_000);
    rig.ack(0);
    assert_eq!((rig.succeeded(), rig.psns()), (vec![0], vec![0]));
    rig
}

#[test]
fn what_is_missing_goes_out_again_alone() {
    let mut rig = rig();
    rig.write(1, 10 * 256);
    rig.write(2, 100);
    rig.out();
    let window = rig.status().window_bytes;
    rig.report(3, &[1, 3, 4, 7]);
    assert_eq!(rig.psns(), [], "it may be late");
    rig.wait(25_000);
    let expected = [3, 5, 8, 9].map(|psn| (Op::Write, Place::Middle, psn, true));
    assert_eq!(rig.briefs(), expected, "what is not named beyond the last kept one is on its way yet");
    assert_eq!(rig.status().window_bytes, window, "few losses that are repaired cost no window");
    assert_eq!((rig.counters().packets_retransmitted, rig.counters().sequence_naks_received), (4, 1));
    rig.report(5, &[1, 2, 5, 6]);
    rig.wait(25_000);
    assert_eq!(rig.psns(), [], "they are on their way");
    rig.ack(11);
    assert_eq!((rig.succeeded(), rig.status().in_flight_bytes), (vec![1, 2], 0));
}

#[test]
fn a_late_packet_costs_nothing() {
    let mut rig = rig();
    rig.write(1, 10 * 256);
    rig.out();
    let window = rig.status().window_bytes;
    rig.report(2, &[1, 2, 3]);
    rig.wait(20_000);
    rig.ack(10);
    rig.wait(MS / 2);
    assert_eq!((rig.succeeded(), rig.psns(), rig.status().window_bytes), (vec![1], vec![], window));
    assert_eq!(rig.counters().packets_retransmitted, 0);
}

/// They are given more time where that turns out to be too little.
#[test]
fn packets_that_come_later_than_that_get_more_time() {
    let mut rig = rig();
    let mut psn = 1;
    for (round, late) in [25_000, 50_000, 100_000].into_iter().enumerate() {
        rig.write(1, 10 * 256);
        rig.out();
        rig.report(psn, &[1]);
        rig.wait(late - 1);
        assert_eq!(rig.psns(), [], "round {round}");
        rig.wait(1);
        assert_eq!(rig.psns(), [psn], "round {round}");
        // Sooner than the repetition can have come there.
        rig.wait(10_000);
        psn += 10;
        rig.ack(psn - 1);
        assert_eq!(rig.succeeded(), [1]);
    }
}

#[test]
fn a_repetition_that_is_lost_goes_out_again_after_a_round_trip() {
    let mut rig = rig();
    rig.write(1, 10 * 256);
    rig.out();
    rig.report(1, &[1]);
    rig.wait(25_000);
    assert_eq!(rig.psns(), [1]);
    rig.wait(124_000);
    rig.report(1, &[1, 2]);
    assert_eq!(rig.psns(), []);
    rig.wait(1_000);
    rig.report(1, &[1, 2, 3]);
    assert_eq!(rig.psns(), [1]);
}

#[test]
fn a_report_that_names_nothing_goes_back() {
    let mut rig = rig();
    rig.write(1, 5 * 256);
    rig.out();
    rig.report(2, &[]);
    assert_eq!(rig.psns(), [2, 3, 4, 5]);
}

#[test]
fn reports_of_other_packets_do_nothing() {
    let mut rig = rig();
    rig.write(1, 5 * 256);
    rig.out();
    for psn in [0, 6, 100, MASK_24] {
        rig.report(psn, &[1, 2]);
    }
    rig.wait(MS / 2);
    assert_eq!((rig.psns(), rig.counters().answers_ignored), (vec![], 4));
    // Beyond what is on the way, nothing is missing.
    rig.report(4, &[1, 60, 128]);
    rig.wait(MS / 2);
    assert_eq!(rig.psns(), [4]);
}

#[test]
fn a_read_that_is_missing_is_asked_for_again() {
    let mut rig = rig();
    rig.write(1, 10);
    rig.read(2, 1000);
    rig.write(3, 10);
    let data = pattern(1000);
    assert_eq!(rig.psns(), [1, 2, 6]);
    rig.report(1, &[5]);
    rig.wait(25_000);
    let out = rig.out();
    let asked: Vec<_> =
        out.iter().map(|(header, _)| (header.opcode.operation(), header.psn, header.reth.length)).collect();
    let psn = |psn| psn_add(rig::FIRST_PSN, psn);
    assert_eq!(asked, [(Op::Write, psn(1), 10), (Op::ReadRequest, psn(2), 1000)]);
    for (at, place) in [Place::First, Place::Middle, Place::Middle, Place::Last].into_iter().enumerate() {
        let end = (at * 256 + 256).min(1000);
        rig.respond(2 + at as u32, place, &data[at * 256..end]);
    }
    rig.ack(6);
    assert_eq!((rig.succeeded(), rig.memory(1000)), (vec![1, 2, 3], data));
}

#[test]
fn silence_forgets_reports_and_goes_back() {
    let mut rig = rig();
    rig.write(1, 5 * 256);
    rig.out();
    rig.report(1, &[1, 2, 3, 4]);
    rig.wait(25_000);
    assert_eq!(rig.psns(), [1]);
    // The local ACK timeout, 67.1 ms; probes before it.
    rig.wait(68 * MS);
    let psns = rig.psns();
    let (probes, again) = psns.split_at(psns.len() - 2);
    assert!(probes.iter().all(|psn| *psn == 1) && again == [1, 2], "the least window: {psns:?}");
    rig.report(1, &[1, 2]);
    rig.ack(5);
    assert_eq!((rig.succeeded(), rig.status().in_flight_bytes), (vec![1], 0));
}

/// The window counts from the oldest packet on; what the peer keeps does not fill it.
#[test]
fn packets_that_are_kept_leave_room() {
    let mut rig = rig();
    let window = rig.status().window_bytes;
    rig.write(1, 2 * window as usize);
    let sent = rig.psns().len() as u32;
    assert_eq!(sent, window as u32 / (256 + 64));
    rig.report(1, &[1, 2, 3, 4, 5]);
    let psns = rig.psns();
    assert_eq!(psns, (sent + 1..=sent + 5).collect::<Vec<_>>());
}

#[test]
fn memory_that_is_gone_fails_in_order() {
    for timeout in [0, 14] {
        let mut rig = rig_with(QpAttributes { timeout, retry_count: 0, ..attributes() });
        rig.write(1, 5 * 256);
        rig.out();
        let end = rig.end;
        rig.net.engine.deregister_mr(end.session, end.mr).unwrap();
        rig.report(2, &[1]);
        rig.wait(MS);
        assert_eq!(rig.statuses(), [(1, Status::LocalProtectionError)], "timeout {timeout}");
    }
}

/// The key of the next request is wrong, which counts when all before it has arrived.
#[test]
fn a_request_that_fails_later_does_not_keep_what_is_missing() {
    let mut rig = rig_with(QpAttributes { timeout: 0, ..attributes() });
    rig.write(1, 5 * 256);
    let bad = [Sge { lkey: rig.end.key ^ 1, ..rig.sge(0, 10) }];
    rig.post(SendRequest { remote_address: 0x7000, rkey: 0x55aa, ..request(2, SendOpcode::RdmaWrite, &bad) });
    assert_eq!(rig.psns(), [1, 2, 3, 4, 5]);
    rig.report(2, &[1, 2, 3]);
    rig.wait(25_000);
    assert_eq!(rig.psns(), [2]);
    rig.ack(5);
    assert_eq!(rig.statuses(), [(1, Status::Success), (2, Status::LocalProtectionError)]);
}
