//! Frames of records, against a scripted peer: a responder does with each message of one what it does with a frame of
//! its own, and a requester sends short messages together that are posted together.
use crate::common::peer::*;
use crate::common::rig::{FLUSHED, MS, Rig, SUCCESS, attributes};
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::records::{RECORD_PAYLOAD_BYTES_MAX, RECORDS_MAX, Record, RecordsWriter};
use freeflow_wire::{
    Header, MASK_24, NakCode, Opcode, Operation as Op, PacketPosition as Place, Service, psn_add, psn_ahead,
};
use proptest::prelude::*;

use SendOpcode as Request;

// ---- the responder

/// A message of the peer.
#[derive(Clone, Debug)]
struct Message {
    operation: Op,
    solicited: bool,
    payload: Vec<u8>,
    /// In the end's memory.
    offset: u64,
    key_is_good: bool,
    argument: u32,
}

impl Message {
    fn write(offset: u64, payload: &[u8]) -> Self {
        let payload = payload.to_vec();
        Self { operation: Op::Write, solicited: false, payload, offset, key_is_good: true, argument: 0 }
    }

    fn send(payload: &[u8]) -> Self {
        Self { operation: Op::Send, ..Self::write(0, payload) }
    }

    fn record(&self, link: &Link) -> Record {
        let opcode = Opcode::new(Service::Rc, self.operation, Place::Only).unwrap();
        let reth = link.reth(self.offset, 0);
        let (rkey, address) = if opcode.has_reth() { (reth.rkey, reth.address) } else { (0, 0) };
        Record {
            opcode,
            solicited: self.solicited,
            length: self.payload.len() as u16,
            rkey: if self.key_is_good { rkey } else { rkey ^ 1 },
            address,
            argument: if opcode.has_immediate() || opcode.has_ieth() { self.argument } else { 0 },
        }
    }
}

/// The frame with these messages, from this PSN on.
fn frame(link: &Link, psn: u32, ask: (bool, bool), messages: &[Message]) -> Vec<u8> {
    let mut writer = RecordsWriter::new(link.end.qpn.0, psn, ask);
    messages.iter().for_each(|message| writer.push(&message.record(link)));
    let mut bytes = writer.finish().to_vec();
    messages.iter().for_each(|message| bytes.extend_from_slice(&message.payload));
    bytes
}

fn deliver(link: &mut Link, bytes: &[u8]) {
    link.deliver_bytes(HOST, &IpInfo::default(), bytes);
}

/// Delivers messages from the next PSN on, and goes on behind them: as records, or each by itself.
fn push(link: &mut Link, messages: &[Message], together: bool) {
    let bytes = frame(link, link.psn, (true, false), messages);
    match together {
        true => deliver(link, &bytes),
        false => deliver_apart(link, &bytes),
    }
    link.psn = psn_add(link.psn, messages.len() as u32);
}

/// Delivers the messages of a frame of records, each as a frame of its own.
fn deliver_apart(link: &mut Link, bytes: &[u8]) {
    for (header, payload) in crate::common::rig::unpack(bytes) {
        link.deliver(header, &payload);
    }
}

#[test]
fn messages_of_one_frame_are_executed_in_order() {
    let mut link = Link::on_path(4096, false);
    (0..2).for_each(|id| link.receive(id, 5000 + 100 * id, 100));
    let immediate = Message { operation: Op::WriteImmediate, argument: 77, ..Message::write(64, &[2; 64]) };
    let solicited = Message { solicited: true, ..Message::send(&[4; 10]) };
    let messages = [Message::write(0, &[1; 64]), immediate, Message::write(32, &[3; 64]), solicited];
    push(&mut link, &messages, true);
    assert_eq!(link.says(), [Says::Ack { psn: 3, msn: 4 }], "one acknowledgement for all of them");
    assert_eq!(link.memory(0, 32), [1; 32]);
    assert_eq!(link.memory(32, 64), [3; 64], "the later one was written later");
    assert_eq!((link.memory(96, 32), link.memory(5100, 10)), (vec![2; 32], vec![4; 10]));
    let completions = link.completions();
    let found: Vec<_> = completions.iter().map(|one| (one.work_request_id, one.opcode, one.byte_count)).collect();
    assert_eq!(found, [(0, CompletionOpcode::ReceiveRdmaWithImmediate, 64), (1, CompletionOpcode::Receive, 10)]);
    assert_eq!(completions[0].immediate, 77);
    let counters = link.counters();
    assert_eq!((counters.packets_received, counters.bytes_received), (4, 3 * 64 + 10));
}

#[test]
fn the_first_refusal_stops_those_behind_it() {
    let mut link = Link::on_path(4096, false);
    let bad = Message { key_is_good: false, ..Message::write(100, &[2; 10]) };
    push(&mut link, &[Message::write(0, &[1; 10]), bad, Message::write(200, &[3; 10])], true);
    assert_eq!(link.says(), [Says::Nak { psn: 1, code: NakCode::RemoteAccess, msn: 1 }]);
    assert_eq!((link.memory(0, 10), link.memory(100, 110)), (vec![1; 10], vec![0; 110]));
    assert_eq!(link.state(), QpState::Error);
}

#[test]
fn a_missing_receive_is_reported_at_its_own_message() {
    let mut link = Link::on_path(4096, false);
    link.receive(1, 0, 100);
    let messages = [Message::send(&[1; 10]), Message::send(&[2; 10]), Message::write(500, &[3; 10])];
    push(&mut link, &messages, true);
    assert_eq!(link.says(), [Says::NotReady { psn: 1, timer: 12 }]);
    assert_eq!(link.memory(500, 10), [0; 10]);
    // They come again, cut in another way.
    link.receive(2, 100, 100);
    let again = frame(&link, psn_add(link.psn, (1 << 24) - 2), (true, false), &messages[1..]);
    deliver(&mut link, &again);
    assert_eq!((link.says(), link.memory(500, 10)), (vec![Says::Ack { psn: 2, msn: 3 }], vec![3; 10]));
    assert_eq!(link.statuses(), [(1, SUCCESS), (2, SUCCESS)]);
}

#[test]
fn a_frame_that_overlaps_what_has_come_is_executed_once() {
    let mut link = Link::on_path(4096, false);
    let messages: Vec<Message> = (0..6).map(|at| Message::write(at * 8, &[at as u8 + 1; 8])).collect();
    let whole = frame(&link, link.psn, (true, false), &messages);
    push(&mut link, &messages[..4], true);
    link.fill(0, &[9; 32]);
    deliver(&mut link, &whole);
    assert_eq!(link.memory(0, 32), [9; 32], "duplicates are not written again");
    assert_eq!(link.memory(32, 16), [[5; 8], [6; 8]].concat());
    assert_eq!(link.says(), [Says::Ack { psn: 5, msn: 6 }]);
    assert_eq!(link.counters().duplicate_requests, 4);
}

#[test]
fn messages_behind_one_that_is_written_elsewhere_wait() {
    let mut link = Link::on_path(4096, false);
    link.net.world.always_put_off = true;
    let messages: Vec<Message> = (0..5).map(|at| Message::write(at * 8, &[at as u8 + 1; 8])).collect();
    push(&mut link, &messages[..3], true);
    push(&mut link, &messages[3..], true);
    while !link.net.world.pending.is_empty() {
        assert_eq!(link.net.world.pending.len(), 1, "one at a time");
        link.net.land(0);
    }
    assert_eq!(link.says(), [Says::Ack { psn: 4, msn: 5 }]);
    let expected: Vec<u8> = (1..=5).flat_map(|byte| [byte; 8]).collect();
    assert_eq!((link.memory(0, 40), link.counters().packets_received), (expected, 5));
}

#[test]
fn what_is_no_whole_frame_is_dropped() {
    let mut link = Link::on_path(4096, false);
    let whole = frame(&link, link.psn, (true, false), &[Message::write(0, &[1; 8]), Message::write(8, &[2; 8])]);
    (12..whole.len()).for_each(|length| deliver(&mut link, &whole[..length]));
    assert_eq!(link.net.engine.drops().malformed, (whole.len() - 12) as u64);
    let changed = |at: usize, value: u8| {
        let mut bytes = whole.clone();
        bytes[at] = value;
        bytes
    };
    deliver(&mut link, &changed(2, 0));
    let unknown = changed(7, whole[7] ^ 0xff);
    deliver(&mut link, &unknown);
    link.deliver_bytes(HostId(77), &IpInfo::default(), &whole);
    let drops = link.net.engine.drops();
    assert_eq!((drops.wrong_pkey, drops.unknown_qpn, drops.wrong_source), (1, 1, 1));
    assert_eq!((link.says(), link.memory(0, 16)), (vec![], vec![0; 16]));
}

/// A step of a script: messages, from so many PSNs before or behind the next one (then they are a gap, or duplicates).
type Step = (Vec<Message>, i32, bool);

fn message() -> impl Strategy<Value = Message> {
    let operations = [Op::Write, Op::Write, Op::Write, Op::WriteImmediate, Op::Send, Op::SendImmediate];
    let operation = prop_oneof![
        30 => prop::sample::select(operations.to_vec()),
        1 => Just(Op::SendInvalidate),
    ];
    (operation, any::<bool>(), 0..40_usize, 0..200_u64, any::<u8>(), 0..40_u8).prop_map(
        |(operation, solicited, length, offset, byte, key)| Message {
            operation,
            solicited,
            payload: vec![byte; length],
            offset,
            key_is_good: key > 0,
            argument: u32::from(byte),
        },
    )
}

fn script() -> impl Strategy<Value = Vec<Step>> {
    let shift = prop_oneof![8 => Just(0), 1 => -6..0_i32, 1 => 1..4_i32];
    prop::collection::vec((prop::collection::vec(message(), 1..9), shift, any::<bool>()), 1..12)
}

/// Everything that can be seen of a link after a script.
fn play(script: &[Step], together: bool, (selective, receives, put_off): (bool, u64, bool)) -> String {
    let mut link = Link::on_path(4096, selective);
    link.net.world.always_put_off = put_off;
    (0..receives).for_each(|id| link.receive(id, 1000 + 40 * id, 30));
    let mut seen = Vec::new();
    for (messages, shift, flushes) in script {
        let psn = link.psn.wrapping_add_signed(*shift) & MASK_24;
        let end = psn_add(psn, messages.len() as u32);
        // Nothing but the next step fills a gap.
        if *shift <= 0 && psn_ahead(end, link.psn) > 0 {
            link.psn = end;
        }
        let bytes = frame(&link, psn, (true, *flushes), messages);
        if together {
            deliver(&mut link, &bytes)
        } else {
            deliver_apart(&mut link, &bytes)
        }
        if *flushes {
            while !link.net.world.pending.is_empty() {
                link.net.land(0);
            }
            seen.push(format!("{:?}", link.replies()));
        }
        if link.state() == QpState::Error {
            break;
        }
    }
    while !link.net.world.pending.is_empty() {
        link.net.land(0);
    }
    let (replies, completions, events) = (link.replies(), link.completions(), link.net.world.events.clone());
    let (memory, counters) = (link.memory(0, 4000), link.counters());
    let vnic = link.net.engine.vnic_counters(link.end.vnic).unwrap();
    let drops = Drops { wrong_state: 0, ..link.net.engine.drops() };
    format!("{seen:?} {replies:?} {completions:?} {events:?} {memory:?} {counters:?} {vnic:?} {drops:?}")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Any messages that come, in order, ahead or again, with their RECVs or without: it is the same whether they come
    /// in one frame or each by itself.
    #[test]
    fn records_are_what_frames_of_their_messages_are(
        script in script(),
        selective in any::<bool>(),
        receives in prop::sample::select(vec![0, 3, 60]),
        put_off in any::<bool>(),
    ) {
        let options = (selective, receives, put_off);
        prop_assert_eq!(play(&script, true, options), play(&script, false, options));
    }
}

// ---- the requester

/// Lengths of the payload of each datagram's messages.
fn shapes(rig: &mut Rig) -> Vec<Vec<usize>> {
    let lengths = |messages: Vec<(Header, Vec<u8>)>| messages.iter().map(|(_, payload)| payload.len()).collect();
    rig.datagrams().into_iter().map(lengths).collect()
}

/// Posts requests before the QP has its turn.
fn post_all(rig: &mut Rig, requests: Vec<SendRequest>) {
    let end = rig.end;
    requests.into_iter().for_each(|request| rig.net.post_send(&end, request));
    rig.net.work();
}

fn writes(rig: &Rig, lengths: &[usize]) -> Vec<SendRequest> {
    (0..).zip(lengths).map(|(id, &length)| rig.request(id, Request::RdmaWrite, length)).collect()
}

fn post_writes(rig: &mut Rig, lengths: &[usize]) {
    let requests = writes(rig, lengths);
    post_all(rig, requests);
}

#[test]
fn short_messages_go_out_together() {
    let mut rig = Rig::with_records(4096);
    rig.fill(&pattern(64));
    post_writes(&mut rig, &[64; 5]);
    let datagrams = rig.datagrams();
    assert_eq!(datagrams.iter().map(Vec::len).collect::<Vec<_>>(), [5]);
    for (at, (header, payload)) in datagrams[0].iter().enumerate() {
        assert_eq!(header.psn, psn_add(crate::common::rig::FIRST_PSN, at as u32));
        assert_eq!((header.reth.address, header.reth.rkey, header.ack_request), (0x7000, 0x55aa, true));
        assert_eq!(payload[..], pattern(64));
    }
    assert_eq!((rig.counters().packets_sent, rig.counters().bytes_sent), (5, 320));
    rig.ack(2);
    assert_eq!(rig.succeeded(), [0, 1, 2]);
    rig.ack(4);
    assert_eq!(rig.succeeded(), [3, 4]);
    assert_eq!(rig.status().in_flight_bytes, 0);
}

#[test]
fn one_message_alone_is_an_ordinary_frame() {
    let mut rig = Rig::with_records(4096);
    for id in 0..3 {
        rig.write(id, 64);
        let sent = rig.net.world.sent.pop_back().unwrap();
        assert!(Header::parse(&sent.bytes).is_ok_and(|(header, _)| header.frame.is_some()), "nothing is held back");
    }
}

#[test]
fn frames_are_cut_where_they_are_full() {
    let mut rig = Rig::with_records(256);
    post_writes(&mut rig, &[100; 5]);
    assert_eq!(shapes(&mut rig), [vec![100; 2], vec![100; 2], vec![100; 1]]);
    let mut rig = Rig::with_records(4096);
    post_writes(&mut rig, &[0; RECORDS_MAX + 3]);
    assert_eq!(shapes(&mut rig), [vec![0; RECORDS_MAX], vec![0; 3]]);
    let mut rig = Rig::with_records(0);
    post_writes(&mut rig, &[64; 3]);
    assert_eq!(shapes(&mut rig), [[64]; 3], "no frames, no records");
}

#[test]
fn only_short_messages_have_company() {
    let most = RECORD_PAYLOAD_BYTES_MAX;
    let mut rig = Rig::with_records(4096);
    post_writes(&mut rig, &[most, most, most + 1, 8, 8, 5000, 8]);
    assert_eq!(shapes(&mut rig), [vec![most; 2], vec![most + 1], vec![8; 2], vec![4096], vec![904], vec![8]]);
    // Anything that is answered with more than an acknowledgement goes by itself, and what a fence waits for waits.
    let mut rig = Rig::with_records(4096);
    let mut requests = writes(&rig, &[8; 6]);
    requests[2] = rig.request(2, Request::RdmaRead, 8);
    requests[4].flags.0 |= SendFlags::FENCE;
    post_all(&mut rig, requests);
    assert_eq!(shapes(&mut rig), [vec![8; 2], vec![0], vec![8]]);
    rig.respond(2, Place::Only, &[0; 8]);
    assert_eq!(shapes(&mut rig), [vec![8; 2]]);
}

#[test]
fn every_kind_of_short_message_is_itself() {
    let mut rig = Rig::with_records(4096);
    rig.fill(&pattern(64));
    let mut requests = vec![
        rig.request(0, Request::Send, 10),
        rig.request(1, Request::SendWithImmediate, 20),
        rig.request(2, Request::SendWithInvalidate, 30),
        rig.request(3, Request::RdmaWriteWithImmediate, 40),
        rig.request(4, Request::RdmaWrite, 0),
    ];
    requests[1].immediate = 71;
    requests[2].immediate = 72;
    requests[3].immediate = 73;
    requests[0].flags.0 |= SendFlags::SOLICITED;
    requests[4].flags.0 |= SendFlags::SOLICITED;
    post_all(&mut rig, requests);
    let [messages] = &rig.datagrams()[..] else { panic!("one frame") };
    let found: Vec<_> = messages.iter().map(|(header, payload)| (header.opcode.operation(), payload.len())).collect();
    let operations = [Op::Send, Op::SendImmediate, Op::SendInvalidate, Op::WriteImmediate, Op::Write];
    assert_eq!(found, operations.into_iter().zip([10, 20, 30, 40, 0]).collect::<Vec<_>>());
    let header = |at: usize| messages[at].0;
    assert_eq!((header(1).immediate, header(2).invalidate, header(3).immediate), (71, 72, 73));
    assert!(header(0).solicited && !header(4).solicited, "a WRITE completes no RECV");
    assert_eq!(header(0).reth.address, 0, "a SEND names no memory");
}

#[test]
fn inline_data_and_memory_do_not_mix() {
    let mut rig = Rig::with_records(4096);
    let mut requests = writes(&rig, &[8; 5]);
    for (at, request) in requests.iter_mut().enumerate().skip(1).take(2) {
        request.flags.0 |= SendFlags::INLINE;
        request.inline_length = 8;
        request.inline_data[..8].copy_from_slice(&[at as u8; 8]);
    }
    post_all(&mut rig, requests);
    let datagrams = rig.datagrams();
    assert_eq!(datagrams.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2, 2]);
    assert_eq!((&datagrams[1][0].1[..], &datagrams[1][1].1[..]), (&[1; 8][..], &[2; 8][..]));
}

#[test]
fn what_goes_out_again_is_cut_anew() {
    let mut rig = Rig::with_records(4096);
    post_writes(&mut rig, &[8; 6]);
    rig.datagrams();
    rig.nak(2, NakCode::PsnSequence);
    assert_eq!(rig.psns(), [2, 3, 4, 5]);
    let counters = rig.counters();
    assert_eq!((counters.packets_retransmitted, counters.packets_sent), (4, 10));
    assert_eq!(rig.succeeded(), [0, 1]);
    // Nothing that is sent for the first time shares a frame with what is not.
    let end = rig.end;
    for id in 6..9 {
        rig.net.post_send(&end, rig.request(id, Request::RdmaWrite, 8));
    }
    rig.nak(4, NakCode::PsnSequence);
    assert_eq!(shapes(&mut rig), [vec![8; 2], vec![8; 3]]);
    rig.ack(8);
    assert_eq!(rig.succeeded(), [2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn a_probe_is_the_oldest_message_alone() {
    let mut rig = Rig::with_records(4096);
    post_writes(&mut rig, &[8; 3]);
    rig.datagrams();
    rig.wait(2 * MS);
    assert_eq!(rig.psns().first(), Some(&0));
    // It fills the gap: what was behind it was lost, too.
    rig.ack(0);
    assert_eq!(rig.psns(), [1, 2]);
}

#[test]
fn memory_that_cannot_be_read_at_once_is_read_message_by_message() {
    let mut rig = Rig::with_records(4096);
    rig.net.world.always_put_off = true;
    post_writes(&mut rig, &[8; 3]);
    let mut sent = Vec::new();
    while !rig.net.world.pending.is_empty() {
        rig.net.land(0);
        rig.net.work();
        sent.extend(shapes(&mut rig));
    }
    assert_eq!(sent, [[8]; 3]);
    rig.ack(2);
    assert_eq!(rig.succeeded(), [0, 1, 2]);
}

#[test]
fn a_message_without_its_memory_fails_alone() {
    for records in [true, false] {
        let mut rig = if records { Rig::with_records(4096) } else { Rig::new(PathMtu::Mtu256) };
        let mut requests = writes(&rig, &[8; 4]);
        requests[2].sges[0].lkey ^= 1;
        post_all(&mut rig, requests);
        assert_eq!(rig.psns(), [0, 1]);
        rig.ack(1);
        let refused = CompletionStatus::LocalProtectionError;
        assert_eq!(rig.statuses(), [(0, SUCCESS), (1, SUCCESS), (2, refused), (3, FLUSHED)]);
        assert_eq!(rig.datagrams().len(), 0);
    }
}

#[test]
fn a_full_line_loses_nothing() {
    let mut rig = Rig::with_records(4096);
    rig.net.world.transmit_room = Some(0);
    let (end, requests) = (rig.end, writes(&rig, &[8; 3]));
    requests.into_iter().for_each(|request| rig.net.post_send(&end, request));
    let progress = rig.net.engine.run(&mut rig.net.world, rig.net.now, end.qp, 1 << 20);
    assert_eq!(progress, Progress::More);
    assert_eq!(shapes(&mut rig), Vec::<Vec<usize>>::new());
    assert_eq!(rig.status().in_flight_bytes, 0);
    rig.net.world.transmit_room = None;
    rig.net.work();
    assert_eq!(shapes(&mut rig), [[8; 3]]);
}

/// Limits of rate count messages, not the packets that they go in.
#[test]
fn limits_count_each_message() {
    let sent = |records: bool| {
        let mut rig = if records { Rig::with_records(4096) } else { Rig::new(PathMtu::Mtu256) };
        let limit = RateLimit { messages_per_s: Some(1_000_000), burst_messages: Some(4), ..Default::default() };
        let shaping = Shaping { vnic: limit, ..Default::default() };
        rig.net.engine.set_shaping(rig.net.now, rig.end.vnic, shaping).unwrap();
        post_writes(&mut rig, &[8; 20]);
        let mut counts = vec![rig.out().len()];
        for _ in 0..4 {
            rig.wait(3_000);
            rig.net.work();
            counts.push(rig.out().len());
        }
        counts
    };
    let counts = sent(true);
    assert_eq!(counts, sent(false));
    assert!(counts[0] < 20 && counts.iter().sum::<usize>() < 20, "{counts:?}");
}

#[test]
fn few_messages_let_their_acknowledgements_wait() {
    for (count, is_patient) in [(2, true), (4, true), (5, false)] {
        let mut rig = Rig::with_records(4096);
        rig.net.modify(&rig.end.clone(), &QpAttributes { timeout: 14, ..attributes() }, QpAttributeMask::TIMEOUT).ok();
        post_writes(&mut rig, &vec![8; count]);
        assert!(rig.out().iter().all(|(header, _)| header.ack_waits == is_patient), "{count}");
    }
}
