//! The responder over packets, against a scripted peer: duplicates, gaps, RNR, what waits and what
//! may not overtake, and the ways in which a QP ends under it.
use crate::common::peer::*;
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::{Header, NakCode, Operation as Op, PacketPosition, Reth, psn_add};
use proptest::prelude::*;

use CompletionStatus as Status;

const FLUSHED: Status = Status::WorkRequestFlushed;
/// The QP's `min_rnr_timer`.
const TIMER: u8 = 12;

fn ack(psn: u32, msn: u32) -> Says {
    Says::Ack { psn, msn }
}

fn nak(psn: u32, code: NakCode, msn: u32) -> Says {
    Says::Nak { psn, code, msn }
}

fn gap(psn: u32, msn: u32) -> Says {
    nak(psn, NakCode::PsnSequence, msn)
}

fn not_ready(psn: u32) -> Says {
    Says::NotReady { psn, timer: TIMER }
}

fn read(psn: u32, place: PacketPosition, bytes: usize) -> Says {
    Says::Read { psn, place, bytes }
}

/// The PSN that is `count` after the first.
fn at(count: u32) -> u32 {
    psn_add(FIRST_PSN, count)
}

// ---- duplicates

#[test]
fn sends_and_writes_are_acknowledged_again_and_not_done_again() {
    let mut link = Link::new();
    for id in 0..3 {
        link.receive(id, id * 1000, 1000);
    }
    let first = link.packets(Op::Send, Reth::default(), &pattern(700));
    link.send(&pattern(700));
    let second = link.packets(Op::Write, link.reth(5000, 300), &[7; 300]);
    link.write(5000, &[7; 300]);
    assert_eq!(link.says(), [ack(4, 2)]);
    link.fill(0, &[0; 700]);
    link.fill(5000, &[0; 300]);
    for (header, payload) in first.iter().chain(&second) {
        let quiet = Header { ack_request: false, ..*header };
        link.deliver(quiet, payload);
        assert_eq!(link.says(), [ack(4, 2)], "of all that has come");
    }
    assert_eq!((link.memory(0, 700), link.memory(5000, 300)), (vec![0; 700], vec![0; 300]));
    assert_eq!(link.statuses(), [(0, Status::Success)]);
    assert_eq!(link.counters().duplicate_requests, 5);
    // In the midst of a message.
    link.push(link.header(Op::Send, PacketPosition::First), &[1; 256]);
    link.deliver(first[0].0, &first[0].1);
    assert_eq!(link.says(), [ack(5, 2)]);
    link.push(link.header(Op::Send, PacketPosition::Last), &[2; 3]);
    assert_eq!(link.says(), [ack(6, 3)]);
    assert_eq!(link.memory(1000, 259)[255..], [1, 2, 2, 2]);
}

#[test]
fn half_of_all_psns_are_behind() {
    let mut link = Link::new();
    link.write(0, b"x");
    link.says();
    let write =
        |link: &Link, psn| Header { psn, reth: link.reth(0, 1), ..link.header(Op::Write, PacketPosition::Only) };
    for back in [1, 2, 1 << 22, 1 << 23] {
        let header = write(&link, link.psn.wrapping_sub(back) & 0xff_ffff);
        link.deliver(header, b"y");
        assert_eq!(link.says(), [ack(0, 1)], "{back} behind");
    }
    let header = write(&link, psn_add(link.psn, (1 << 23) - 1));
    link.deliver(header, b"y");
    assert_eq!(link.says(), [gap(1, 1)]);
    assert_eq!(link.memory(0, 1), b"x");
}

#[test]
fn reads_are_read_again_in_whole_or_in_part() {
    let mut link = Link::new();
    link.fill(0, &pattern(1000));
    let header = link.read_header(0, 1000);
    link.read(0, 1000);
    assert_eq!(link.says().len(), 4);
    link.fill(0, &[9; 1000]);
    link.deliver(header, &[]);
    let replies = link.replies();
    assert_eq!(replies.len(), 4);
    assert!(replies.iter().all(|(header, payload)| payload.iter().all(|byte| *byte == 9) && header.aeth.msn <= 1));
    // From its third packet on; and of that only the beginning.
    link.deliver(Header { psn: at(2), ..link.read_header(512, 488) }, &[]);
    assert_eq!(link.says(), [read(2, PacketPosition::First, 256), read(3, PacketPosition::Last, 232)]);
    link.deliver(Header { psn: at(3), ..link.read_header(768, 232) }, &[]);
    assert_eq!(link.says(), [read(3, PacketPosition::Only, 232)]);
    // Requests that are not within it: too long, elsewhere, under another key.
    let other = Reth { rkey: link.end.key ^ 1, ..link.reth(0, 10) };
    for reth in [link.reth(0, 1001), link.reth(1, 1000), link.reth(2000, 10), other] {
        link.deliver(Header { reth, ..header }, &[]);
        assert!(link.says().is_empty());
    }
    assert_eq!(link.state(), QpState::ReadyToSend);
    let counters = link.counters();
    assert_eq!((counters.duplicate_requests, counters.packets_sent), (7, 11));
}

#[test]
fn a_read_that_is_asked_for_again_while_it_is_answered_begins_anew() {
    for put_off in [false, true] {
        let mut link = Link::new();
        link.net.world.always_put_off = put_off;
        let header = link.read_header(0, 100_000);
        link.read(0, 100_000);
        let begun = link.net.world.sent.len();
        assert_eq!(begun > 0, !put_off);
        link.deliver(Header { psn: at(2), ..link.read_header(512, 100_000 - 512) }, &[]);
        link.net.settle();
        let says = link.says();
        let restart =
            says.iter().rposition(|says| matches!(says, Says::Read { place: PacketPosition::First, .. })).unwrap();
        assert_eq!(says[restart], read(2, PacketPosition::First, 256));
        let rest = says[restart..].iter().enumerate();
        assert!(rest.into_iter().all(|(step, says)| matches!(says, Says::Read { psn, .. } if *psn == 2 + step as u32)));
        assert_eq!(says.last(), Some(&read(100_000 / 256, PacketPosition::Last, 100_000 % 256)));
        assert!(says.len() < 2 * 391, "it does not stand there twice");
        link.deliver(header, &[]);
        link.net.settle();
        assert_eq!(link.says().len(), 391);
    }
}

#[test]
fn atomics_are_answered_out_of_memory_and_as_many_as_allowed() {
    let mut link = Link::new();
    let mut headers = Vec::new();
    for add in 1..=5 {
        headers.push(link.fetch_add_header(0, add));
        link.push(link.fetch_add_header(0, add), &[]);
    }
    let originals = [0, 1, 3, 6, 10];
    let of = |psn: usize, msn| Says::Atomic { psn: psn as u32, msn, original: originals[psn] };
    assert_eq!(link.says(), (0..5).map(|psn| of(psn, psn as u32 + 1)).collect::<Vec<_>>());
    for (psn, header) in headers.iter().enumerate() {
        link.deliver(*header, &[]);
        // `max_dest_rd_atomic` is 4.
        let expected = if psn == 0 { vec![] } else { vec![of(psn, 5)] };
        assert_eq!(link.says(), expected);
    }
    assert_eq!(link.memory(0, 8), 15u64.to_ne_bytes());
    // Not what was there at that PSN.
    link.deliver(Header { psn: at(3), ..link.read_header(0, 8) }, &[]);
    assert!(link.says().is_empty());
}

#[test]
fn flush_and_atomic_write_are_answered_again_and_not_done_again() {
    let mut link = Link::new();
    let reth = link.reth(0, 8);
    let write = Header { reth, ..link.header(Op::AtomicWrite, PacketPosition::Only) };
    link.push(write, b"abcdefgh");
    let flush = Header { reth, flush: 1, ..link.header(Op::Flush, PacketPosition::Only) };
    link.push(flush, &[]);
    let done = [read(0, PacketPosition::Only, 0), read(1, PacketPosition::Only, 0)];
    assert_eq!(link.says(), done);
    link.fill(0, b"12345678");
    link.deliver(write, b"abcdefgh");
    link.deliver(flush, &[]);
    assert_eq!(link.says(), done);
    assert_eq!(link.memory(0, 8), b"12345678");
}

// ---- gaps

#[test]
fn one_nak_for_one_gap() {
    let mut link = Link::new();
    link.receive(1, 0, 2000);
    let packets = link.packets(Op::Send, Reth::default(), &pattern(1500));
    let deliver =
        |link: &mut Link, which: &[usize]| which.iter().for_each(|at| link.deliver(packets[*at].0, &packets[*at].1));
    deliver(&mut link, &[0, 2, 3, 5]);
    assert_eq!(link.says(), [gap(1, 0)]);
    deliver(&mut link, &[4, 2]);
    assert!(link.says().is_empty(), "it stands");
    deliver(&mut link, &[1, 3, 4]);
    assert_eq!(link.says(), [gap(2, 0)], "the next gap");
    deliver(&mut link, &[2, 3, 4, 5]);
    assert_eq!(link.says(), [ack(5, 1)]);
    assert_eq!(link.memory(0, 1500), pattern(1500));
    let counters = link.counters();
    assert_eq!((counters.out_of_sequence, counters.sequence_naks_sent), (7, 2));
}

#[test]
fn a_gap_that_is_filled_before_its_nak_could_go_out() {
    let mut link = Link::new();
    link.write(0, b"a");
    let lost = link.psn;
    link.psn = psn_add(lost, 1);
    link.net.world.transmit_room = Some(0);
    link.write(2, b"c");
    link.psn = lost;
    let header = Header { ack_request: false, reth: link.reth(1, 1), ..link.header(Op::Write, PacketPosition::Only) };
    link.deliver(header, b"b");
    link.net.world.transmit_room = None;
    assert_eq!(link.says(), [ack(0, 2)], "what the NAK would have acknowledged");
}

// ---- RNR

#[test]
fn receivers_that_are_not_ready() {
    for operation in [Op::Send, Op::WriteImmediate] {
        let mut link = Link::new();
        link.write(4000, b"before");
        let reth = link.reth(1000, 600);
        let packets = link.packets(operation, reth, &pattern(600));
        // The RECV of a WRITE is needed for its last packet.
        let refused = if operation == Op::Send { 0 } else { 2 };
        for round in 0..2 {
            for (header, payload) in &packets {
                link.deliver(*header, payload);
            }
            let says = link.says();
            let expected = match (operation, round) {
                (Op::Send, _) | (_, 0) => vec![not_ready(1 + refused)],
                // Behind the refused one are duplicates now.
                _ => vec![not_ready(1 + refused)],
            };
            assert_eq!(says, expected, "{operation:?} {round}: nothing about the packets behind it");
        }
        assert_eq!(link.memory(1512, 88), [0; 88]);
        link.receive(1, 0, 1000);
        for (header, payload) in &packets {
            link.deliver(*header, payload);
        }
        assert_eq!(link.says(), [ack(3, 2)]);
        assert_eq!(link.statuses(), [(1, Status::Success)]);
        let place = if operation == Op::Send { 0 } else { 1000 };
        assert_eq!(link.memory(place, 600), pattern(600));
        assert!(link.net.world.wanted.is_empty(), "no doorbell");
        let counters = link.counters();
        assert_eq!((counters.rnr_naks_sent, counters.sequence_naks_sent), (2, 0));
        assert_eq!(link.net.engine.vnic_counters(link.end.vnic).unwrap().receives_missing, 2);
    }
}

/// The field of the answer has five bits: more says what is in those.
#[test]
fn a_wide_rnr_timer_is_cut() {
    for (timer, said) in [(31, 31), (32, 0), (44, 12), (255, 31)] {
        let mut link = Link::new();
        let end = link.end;
        let wide = QpAttributes { min_rnr_timer: timer, ..Default::default() };
        link.net.modify(&end, &wide, QpAttributeMask::MIN_RNR_TIMER).unwrap();
        link.send(b"refused");
        assert_eq!(link.says(), [Says::NotReady { psn: 0, timer: said }]);
    }
}

#[test]
fn nothing_behind_a_refused_packet_is_done() {
    let mut link = Link::new();
    link.send(b"refused");
    link.write(0, b"behind");
    link.read(0, 10);
    assert_eq!(link.says(), [not_ready(0)]);
    assert_eq!(link.memory(0, 6), [0; 6]);
    // A RECV comes, and the packets do in the order that they had.
    link.receive(1, 100, 100);
    link.psn = FIRST_PSN;
    link.send(b"refused");
    link.write(0, b"behind");
    link.read(0, 6);
    assert_eq!(link.says(), [read(2, PacketPosition::Only, 6)], "acknowledges all before");
    assert_eq!(link.memory(0, 6), b"behind");
    // The next gap is one again.
    link.psn = psn_add(link.psn, 1);
    link.write(0, b"x");
    assert_eq!(link.says(), [gap(3, 3)]);
}

// ---- what may not overtake, and what is covered

#[test]
fn acknowledgements_are_one_for_a_batch() {
    let mut link = Link::new();
    for _ in 0..10 {
        link.write(0, &[1; 300]);
    }
    assert!(link.net.world.sent.is_empty(), "until the batch is over");
    assert_eq!(link.says(), [ack(19, 10)]);
    let counters = link.counters();
    assert_eq!((counters.acks_sent, counters.acks_deferred, counters.packets_received), (1, 9, 20));
    assert!(link.says().is_empty());
    // Nobody asks for one.
    let reth = link.reth(0, 256 * 200);
    for (header, payload) in link.packets(Op::Write, reth, &pattern(256 * 200)) {
        link.push(Header { ack_request: false, ..header }, &payload);
        if link.psn == at(20 + 100) {
            assert_eq!(link.says(), [ack(20 + 63, 10)], "now and then all the same");
        }
    }
    assert_eq!(link.says(), [ack(20 + 191, 11)]);
}

#[test]
fn nothing_overtakes_the_answer_to_a_read() {
    for put_off in [false, true] {
        let mut link = Link::new();
        link.net.world.always_put_off = put_off;
        link.net.world.transmit_room = Some(0);
        link.write(0, b"a");
        link.net.settle_copies();
        link.read(0, 600);
        link.push(link.fetch_add_header(64, 1), &[]);
        link.net.settle_copies();
        link.write(0, b"b");
        link.net.settle_copies();
        assert!(link.net.world.sent.is_empty());
        link.net.world.transmit_room = None;
        let mut says = link.says();
        link.net.settle();
        says.extend(link.says());
        let expected = [
            read(1, PacketPosition::First, 256),
            read(2, PacketPosition::Middle, 256),
            read(3, PacketPosition::Last, 88),
            Says::Atomic { psn: 4, msn: 4, original: 0 },
            ack(5, 4),
        ];
        assert_eq!(says, expected, "the first ACK is not needed");
        assert_eq!(link.counters().acks_deferred, 1);
    }
}

#[test]
fn packets_wait_for_the_one_that_is_landing() {
    let mut link = Link::new();
    link.net.world.always_put_off = true;
    link.receive(1, 0, 1000);
    link.send(&pattern(700));
    link.push(link.fetch_add_header(2000, 3), &[]);
    link.write(2000, &5u64.to_ne_bytes());
    assert_eq!(link.net.world.pending.len(), 1);
    assert!(link.says().is_empty() && link.completions().is_empty());
    for step in 0..5 {
        assert_eq!(link.net.world.pending.len(), 1, "one at a time: {step}");
        link.net.land(0);
    }
    assert_eq!(link.says(), [Says::Atomic { psn: 3, msn: 2, original: 0 }, ack(4, 3)]);
    assert_eq!(link.statuses(), [(1, Status::Success)]);
    assert_eq!(link.memory(0, 700), pattern(700));
    assert_eq!(link.memory(2000, 8), 5u64.to_ne_bytes());
}

#[test]
fn a_peer_that_is_not_known_gets_nothing_yet() {
    let mut link = Link::new();
    link.net.world.peers.clear();
    link.write(0, b"x");
    link.read(0, 300);
    assert!(link.says().is_empty());
    link.introduce();
    link.net.engine.handle_peer_changed(&mut link.net.world, link.net.now, HOST, None);
    assert_eq!(link.says(), [read(1, PacketPosition::First, 256), read(2, PacketPosition::Last, 44)]);
    let header = Header { reth: link.reth(0, 1), ..link.header(Op::Write, PacketPosition::Only) };
    link.deliver_from(HostId(8), header, b"y");
    assert!(link.says().is_empty());
    assert_eq!((link.memory(0, 1), link.net.engine.drops().wrong_source), (b"x".to_vec(), 1));
}

#[test]
fn a_full_fabric_holds_up_and_loses_nothing() {
    let mut link = Link::new();
    link.net.world.transmit_room = Some(40);
    link.read(0, 100 * 256);
    link.net.world.transmit_room = Some(32);
    let progress = link.net.engine.run(&mut link.net.world, link.net.now, link.end.qp, 1 << 20);
    assert_eq!(progress, Progress::More);
    link.net.world.transmit_room = None;
    let says = link.says();
    let psns: Vec<u32> = says.iter().map(|says| if let Says::Read { psn, .. } = says { *psn } else { 999 }).collect();
    assert_eq!(psns, (0..100).collect::<Vec<_>>());
}

#[test]
fn a_turn_of_a_read_is_bounded() {
    let mut link = Link::new();
    link.read(0, 1 << 20);
    link.net.world.sent.clear();
    let progress = link.net.engine.run(&mut link.net.world, link.net.now, link.end.qp, 40_000);
    let bytes = link.net.world.sent.len() * 256;
    assert_eq!(progress, Progress::More);
    assert!((8 << 10..=28_000).contains(&bytes), "about half of the turn: {bytes}");
}

// ---- ends

/// Brings a QP into each phase that the responder has.
fn phases() -> Vec<Link> {
    let mut links = Vec::new();
    for phase in 0..8 {
        let mut link = Link::new();
        link.receive(1, 0, 1000);
        link.receive(2, 0, 1000);
        match phase {
            0 => link.push(link.header(Op::Send, PacketPosition::First), &pattern(256)),
            1 => {
                link.net.world.always_put_off = true;
                link.send(&pattern(300));
            }
            2 => {
                link.net.world.always_put_off = true;
                link.push(link.fetch_add_header(0, 1), &[]);
                link.write(0, b"parked");
            }
            3 => {
                link.net.world.always_put_off = true;
                link.read(0, 1000);
            }
            4 => {
                link.net.world.transmit_room = Some(0);
                link.read(0, 1000);
                link.send(b"x");
            }
            5 => {
                link.psn = psn_add(link.psn, 1);
                link.write(0, b"x");
            }
            6 => {
                link.net.world.transmit_room = Some(0);
                link.read(0, 1000);
                link.push(link.header(Op::Send, PacketPosition::Last), b"x");
            }
            _ => {}
        }
        links.push(link);
    }
    links
}

#[test]
fn reset_in_every_phase_leaves_nothing() {
    for (phase, mut link) in phases().into_iter().enumerate() {
        let end = link.end;
        let first = link.net.to(&end, QpState::Reset);
        link.net.world.transmit_room = None;
        if first.is_err() {
            assert_eq!(first, Err(Refusal::InFlight));
            while !link.net.world.pending.is_empty() {
                link.net.land(0);
            }
            link.net.to(&end, QpState::Reset).unwrap();
        }
        link.net.world.always_put_off = false;
        link.net.world.sent.clear();
        link.completions();
        link.write(0, b"nobody");
        assert!(link.says().is_empty(), "{phase}");
        link.net.world.receives.clear();
        link.connect(PathMtu::Mtu256);
        link.receive(7, 3000, 1000);
        link.send(&pattern(300));
        link.read(3000, 1);
        assert_eq!(link.says(), [read(2, PacketPosition::Only, 1)], "{phase}: as if nothing had been");
        assert_eq!(link.statuses(), [(7, Status::Success)], "{phase}");
        assert_eq!(link.net.engine.copies_in_flight(end.session), 0);
    }
}

#[test]
fn error_and_destruction_in_every_phase() {
    for (phase, mut link) in phases().into_iter().enumerate() {
        let end = link.end;
        let consumed = link.completions().len();
        let _ = link.net.to(&end, QpState::Error);
        link.net.world.transmit_room = None;
        while !link.net.world.pending.is_empty() {
            link.net.land(0);
        }
        link.net.work();
        link.net.to(&end, QpState::Error).unwrap();
        let last_words = link.net.world.sent.len();
        let flushed = link.statuses();
        assert_eq!(flushed.len() + consumed, 2, "{phase}: {flushed:?}");
        assert!(flushed.iter().all(|(_, status)| *status == FLUSHED));
        // The NAK of phase 6 was owed before; so were the responses before it.
        if phase == 6 {
            assert_eq!(last_words, 5);
        }
        link.write(0, b"nobody");
        link.net.world.sent.clear();
        assert!(link.says().is_empty(), "{phase}");
        link.net.engine.destroy_qp(&mut link.net.world, link.net.now, end.session, end.qp).unwrap();
        link.net.engine.flush_acks(&mut link.net.world, link.net.now);
        link.net.engine.deregister_mr(end.session, end.mr).unwrap();
    }
}

#[test]
fn a_process_that_dies_in_every_phase() {
    for mut link in phases() {
        let session = link.end.session;
        link.net.die(session);
        link.net.world.transmit_room = None;
        link.write(0, b"nobody");
        link.net.engine.flush_acks(&mut link.net.world, link.net.now);
        while let Some(qp) = link.net.engine.poll_ready() {
            link.net.engine.run(&mut link.net.world, link.net.now, qp, 1 << 20);
        }
        assert_eq!(link.net.engine.copies_in_flight(session), 0);
        assert!(link.net.world.pending.is_empty());
        assert!(link.net.engine.drops().unknown_qpn >= 1);
    }
}

// ---- hostile

/// Any packet of a requester, near what is expected.
fn any_packet() -> impl Strategy<Value = (u8, i32, u16, u64, u32, bool)> {
    let psn = prop_oneof![6 => Just(0i32), 2 => -4..4i32, 1 => any::<i32>()];
    let bytes = prop_oneof![Just(256u16), Just(8), Just(0), 0..600u16];
    let address = prop_oneof![4 => 0..4096u64, 1 => any::<u64>()];
    let length = prop_oneof![Just(256u32), Just(8), Just(512), 0..3000u32, any::<u32>()];
    (any::<u8>(), psn, bytes, address, length, any::<bool>())
}

/// Where the peer may write: RECVs within the first 4 KiB, a region over the next four.
const GRANTED: usize = 8 << 10;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn nonsense_is_survived_and_writes_nowhere_else(
        seed in any::<u64>(),
        xrc in any::<bool>(),
        packets in prop::collection::vec(any_packet(), 1..60),
    ) {
        let qp_type = if xrc { QpType::XrcReceive } else { QpType::Rc };
        let mut link = Link::with(qp_type, PathMtu::Mtu256, false);
        let (end, mut rng) = (link.end, SimRng(seed));
        link.net.world.put_off = (seed & 1 == 0).then_some(SimRng(seed));
        let start = MEMORY_BASE + 4096;
        let keys = link.net.engine.register_mr(end.session, end.pd, start, 4096, start, ALL_ACCESS).unwrap();
        for id in 0..rng.roll(5) {
            link.receive(id, id * 512, 512);
        }
        for (code, ahead, bytes, offset, length, ack_request) in packets {
            let low = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 19, 20, 22, 23, 28, 29][usize::from(code) % 19];
            let opcode = freeflow_wire::Opcode::from_byte(if xrc { 5 << 5 } else { 0 } | low).unwrap();
            let rkey = if rng.roll(8) == 0 { end.key ^ 0xff00 } else { keys.rkey };
            let mut header = Header::new(opcode, end.qpn.0, psn_add(link.psn, ahead as u32));
            header.srqn = if rng.roll(20) == 0 { 1 } else { link.srqn };
            header.reth = Reth { address: start.wrapping_add(offset), rkey, length };
            header.atomic = freeflow_wire::AtomicEth { address: start + (offset & !7), rkey, swap_add: 1, compare: 0 };
            header.flush = u32::from(code >> 5);
            (header.ack_request, header.invalidate) = (ack_request, rkey);
            let payload = vec![0xee; if opcode.has_payload() { usize::from(bytes) } else { 0 }];
            link.deliver(header, &payload);
            if ahead == 0 {
                let packets = if low == 12 { (length as usize).div_ceil(256).max(1) } else { 1 };
                link.psn = psn_add(link.psn, packets as u32);
            }
            match rng.roll(6) {
                0 => link.net.engine.flush_acks(&mut link.net.world, link.net.now),
                1 => { link.net.engine.run(&mut link.net.world, link.net.now, end.qp, 5000); }
                2 if !link.net.world.pending.is_empty() => link.net.land(0),
                3 => link.net.world.transmit_room = Some(rng.roll(40) as usize),
                4 => link.net.world.transmit_room = None,
                _ => link.net.engine = Engine::restore(&link.net.engine.snapshot()).unwrap(),
            }
            if link.state() == QpState::Error && rng.roll(4) > 0 {
                // Its peer comes again.
                link.net.world.transmit_room = None;
                link.net.settle();
                link.net.to(&end, QpState::Reset).unwrap();
                link.connect(PathMtu::Mtu256);
                link.receive(9, rng.roll(8) * 512, 512);
            }
        }
        link.net.world.transmit_room = None;
        link.net.engine.flush_acks(&mut link.net.world, link.net.now);
        link.net.settle();
        let memory = &link.net.world.memory[&end.session];
        prop_assert!(memory[GRANTED..].iter().all(|byte| *byte == 0));
        // Its answers are out, and it can be taken down.
        prop_assert_eq!(link.net.engine.copies_in_flight(end.session), 0);
        link.net.to(&end, QpState::Reset).unwrap();
        prop_assert_eq!(link.net.engine.destroy_qp(&mut link.net.world, link.net.now, end.session, end.qp), Ok(()));
        link.net.engine.deregister_mr(end.session, keys.mr).unwrap();
    }
}
