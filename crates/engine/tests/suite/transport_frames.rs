//! Frames, against a scripted peer: what the responder takes and answers, and what the requester sends.
use crate::common::peer::*;
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::frame::{FRAME_HEADER_BYTES, FRAME_PAYLOAD_BYTES_MAX, Frame};
use freeflow_wire::{Header, NakCode, Opcode, Operation as Op, PacketPosition as Place, Reth, Service, psn_add};

/// The frames of a SEND or WRITE, cut at these lengths.
fn frames(link: &Link, operation: Op, reth: Reth, payload: &[u8], cuts: &[usize]) -> Vec<(Header, Vec<u8>)> {
    let (mut from, mut packets) = (0, Vec::new());
    for (at, bytes) in cuts.iter().enumerate() {
        let place = match (at == 0, at + 1 == cuts.len()) {
            (true, true) => Place::Only,
            (true, false) => Place::First,
            (false, false) => Place::Middle,
            (false, true) => Place::Last,
        };
        let mut header = link.header(operation, place);
        header.psn = psn_add(link.psn, at as u32);
        header.frame = Some(Frame { message_psn: link.psn, response_bytes: 0 });
        header.reth = Reth { address: reth.address + from as u64, ..reth };
        packets.push((header, payload[from..from + bytes].to_vec()));
        from += bytes;
    }
    assert_eq!(from, payload.len());
    packets
}

fn push(link: &mut Link, packets: &[(Header, Vec<u8>)]) {
    packets.iter().for_each(|(header, payload)| link.push(*header, payload));
}

fn invalid(psn: u32, msn: u32) -> Says {
    Says::Nak { psn, code: NakCode::InvalidRequest, msn }
}

#[test]
fn frames_are_of_any_length_whatever_the_path_mtu() {
    let mut link = Link::new();
    let payload = pattern(20_000);
    let cuts = [FRAME_PAYLOAD_BYTES_MAX, 1, 11_806 - FRAME_PAYLOAD_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX, 1];
    let reth = link.reth(100, payload.len());
    let write = frames(&link, Op::Write, reth, &payload, &cuts);
    push(&mut link, &write);
    assert_eq!(link.says(), [Says::Ack { psn: 4, msn: 1 }]);
    assert_eq!(link.memory(100, payload.len()), payload);
    link.receive(1, 30_000, 20_000);
    let send = frames(&link, Op::Send, Reth { address: 0, rkey: 0, length: 20_000 }, &payload, &cuts);
    push(&mut link, &send);
    assert_eq!(link.says(), [Says::Ack { psn: 9, msn: 2 }]);
    assert_eq!(link.memory(30_000, payload.len()), payload);
    assert_eq!(link.statuses(), [(1, CompletionStatus::Success)]);
    // Packets of the standard are taken beside them, with the lengths of the path MTU.
    link.write(0, &pattern(700));
    assert_eq!(link.says(), [Says::Ack { psn: 12, msn: 3 }]);
}

#[test]
fn a_frame_that_contradicts_its_message_is_invalid() {
    type Spoil = fn(&mut Header);
    let spoil: [(&str, Spoil); 4] = [
        ("another address", |header| header.reth.address += 1),
        ("another key", |header| header.reth.rkey ^= 1),
        ("another length", |header| header.reth.length += 1),
        ("another kind", |header| header.opcode = Opcode::new(Service::Rc, Op::Send, Place::Last).unwrap()),
    ];
    for (what, spoil) in spoil {
        let mut link = Link::new();
        let reth = link.reth(0, 600);
        let mut packets = frames(&link, Op::Write, reth, &pattern(600), &[300, 300]);
        spoil(&mut packets[1].0);
        push(&mut link, &packets);
        assert_eq!(link.says(), [invalid(1, 0)], "{what}");
        assert_eq!((link.memory(0, 300), link.memory(300, 300)), (pattern(300), vec![0; 300]), "{what}");
    }
}

#[test]
fn a_send_in_frames_is_as_long_as_it_says() {
    for (cuts, length, address) in
        [(vec![300, 300], 601, 0), (vec![300, 300], 300, 0), (vec![600], 599, 0), (vec![300, 300], 600, 8)]
    {
        let mut link = Link::new();
        link.receive(1, 0, 4096);
        let packets = frames(&link, Op::Send, Reth { address, rkey: 0, length }, &pattern(600), &cuts);
        push(&mut link, &packets);
        let at = if length == 601 { 1 } else { 0 };
        assert_eq!(link.says(), [invalid(at, 0)], "{cuts:?} {length}");
        assert!(!link.statuses().contains(&(1, CompletionStatus::Success)));
    }
}

#[test]
fn a_read_says_how_long_its_responses_are() {
    let mut link = Link::new();
    let payload = pattern(10_000);
    link.fill(0, &payload);
    let mut header = link.read_header(0, payload.len());
    header.frame = Some(Frame { message_psn: link.psn, response_bytes: 4096 });
    link.deliver(header, &[]);
    let replies = link.replies();
    let lengths: Vec<usize> = replies.iter().map(|(_, payload)| payload.len()).collect();
    assert_eq!(lengths, [4096, 4096, 1808]);
    assert!(replies.iter().all(|(header, _)| header.frame.is_some()));
    assert_eq!(replies.concat_payload(), payload);
    // Again, from its second packet on.
    link.psn = psn_add(link.psn, 1);
    let mut again = link.read_header(4096, payload.len() - 4096);
    again.frame = Some(Frame { message_psn: link.psn, response_bytes: 4096 });
    link.deliver(again, &[]);
    assert_eq!(link.replies().concat_payload(), payload[4096..]);
    // It took three PSNs.
    link.psn = psn_add(link.psn, 2);
    link.write(0, b"x");
    assert_eq!(link.says(), [Says::Ack { psn: 3, msn: 2 }]);
}

#[test]
fn responses_of_a_length_out_of_range_are_not_sent() {
    for bytes in [0, 255, FRAME_PAYLOAD_BYTES_MAX as u32 + 1, u32::MAX] {
        let mut link = Link::new();
        let mut header = link.read_header(0, 1000);
        header.frame = Some(Frame { message_psn: link.psn, response_bytes: bytes });
        link.deliver(header, &[]);
        assert_eq!(link.says(), [invalid(0, 0)], "{bytes}");
    }
}

#[test]
fn a_requester_sends_frames_where_they_were_agreed_on() {
    for frame_bytes in [0, 1408] {
        let mut link = Link::new();
        let reset = QpAttributes { state: QpState::Reset, ..Default::default() };
        let end = link.end;
        link.net.modify(&end, &reset, QpAttributeMask::STATE).unwrap();
        link.net.world.paths.insert(peer_gid(), Destination { frame_bytes, ..destination() });
        link.connect(PathMtu::Mtu256);
        link.fill(0, &pattern(3000));
        let request = SendRequest {
            opcode: SendOpcode::RdmaWrite,
            remote_address: 0x7000,
            rkey: 9,
            ..request(1, SendOpcode::RdmaWrite, &[end.sge(0, 3000)])
        };
        link.net.post_send(&end, request);
        link.net.work();
        let sent = std::mem::take(&mut link.net.world.sent);
        let packets: Vec<(Header, usize)> = sent
            .iter()
            .map(|sent| Header::parse(&sent.bytes).map(|(header, payload)| (header, payload.len())).unwrap())
            .collect();
        if frame_bytes == 0 {
            assert!(packets.iter().all(|(header, _)| header.frame.is_none()));
            assert_eq!(packets.len(), 3000_usize.div_ceil(256));
            continue;
        }
        let found: Vec<_> = packets.iter().map(|(header, bytes)| (header.reth, header.frame, *bytes)).collect();
        let reth = |offset: u64| Reth { address: 0x7000 + offset, rkey: 9, length: 3000 };
        let first = Some(Frame { message_psn: packets[0].0.psn, response_bytes: 0 });
        assert_eq!(found, [(reth(0), first, 1408), (reth(1408), first, 1408), (reth(2816), first, 184)]);
        let lengths: Vec<usize> = sent.iter().map(|sent| sent.bytes.len()).collect();
        assert_eq!(lengths, [1408, 1408, 184].map(|bytes| bytes + FRAME_HEADER_BYTES), "no padding");
    }
}

trait Payload {
    fn concat_payload(&self) -> Vec<u8>;
}

impl Payload for Vec<(Header, Vec<u8>)> {
    fn concat_payload(&self) -> Vec<u8> {
        self.iter().flat_map(|(_, payload)| payload.clone()).collect()
    }
}
