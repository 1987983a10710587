//! Explicit congestion notification between routers: what is ECN-capable, how a responder echoes marks, and what a
//! requester makes of the echo.
use crate::common::peer::*;
use crate::common::rig::{Rig, attributes};
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::records::{Record, RecordsWriter};
use freeflow_wire::{Header, Opcode, Operation as Op, PacketPosition as Place, Reth, Service, psn_add};

/// Which of the answers echo a mark.
fn echoes(link: &mut Link) -> Vec<bool> {
    link.replies().iter().map(|(header, _)| header.becn).collect()
}

fn write_header(link: &Link, ack_request: bool) -> Header {
    Header { reth: link.reth(0, 8), ack_request, ..link.header(Op::Write, Place::Only) }
}

#[test]
fn a_mark_is_echoed_by_the_next_answer_alone() {
    let mut link = Link::on_path(4096, true);
    link.push_marked(write_header(&link, false), &[1; 8]);
    assert_eq!(echoes(&mut link), [], "nothing is owed yet");
    link.push(write_header(&link, true), &[1; 8]);
    assert_eq!(echoes(&mut link), [true]);
    link.push(write_header(&link, true), &[1; 8]);
    assert_eq!(echoes(&mut link), [false]);
    assert_eq!(link.counters().congestion_marks, 1);
}

#[test]
fn a_mark_is_echoed_by_what_is_owed_whatever_it_is() {
    let mut link = Link::on_path(4096, true);
    link.push_marked(link.read_header(0, 100), &[]);
    assert_eq!(echoes(&mut link), [true], "a READ response");
    link.push_marked(link.fetch_add_header(0, 1), &[]);
    assert_eq!(echoes(&mut link), [true], "the original value of an atomic");
    link.push_marked(link.header(Op::Send, Place::Only), &[1; 8]);
    assert_eq!(echoes(&mut link), [true], "an RNR NAK: there is no RECV");
}

#[test]
fn a_mark_on_a_frame_of_records_is_echoed_once() {
    let to = Destination { frame_bytes: 4096, selective: true, records: true, ..destination() };
    let mut link = Link::to(to);
    let mut writer = RecordsWriter::new(link.end.qpn.0, link.psn, (true, false));
    let (reth, opcode) = (link.reth(0, 0), Opcode::new(Service::Rc, Op::Write, Place::Only).unwrap());
    for _ in 0..2 {
        let Reth { rkey, address, .. } = reth;
        writer.push(&Record { opcode, solicited: false, length: 8, rkey, address, argument: 0 });
    }
    let mut bytes = writer.finish().to_vec();
    bytes.extend_from_slice(&[1; 16]);
    link.deliver_bytes(HOST, &IpInfo { congestion: true, ..IpInfo::default() }, &bytes);
    link.psn = psn_add(link.psn, 2);
    assert_eq!(echoes(&mut link), [true]);
    link.push(write_header(&link, true), &[1; 8]);
    assert_eq!((echoes(&mut link), link.counters().congestion_marks), (vec![false], 1));
}

#[test]
fn a_mark_on_a_packet_that_is_kept_is_echoed_by_the_report() {
    let mut link = Link::on_path(4096, true);
    let missing = write_header(&link, true);
    let ahead = Header { psn: psn_add(missing.psn, 1), ..missing };
    link.push_marked(ahead, &[1; 8]);
    assert_eq!(echoes(&mut link), [true]);
    link.deliver(missing, &[1; 8]);
    assert_eq!(echoes(&mut link), [false]);
    assert_eq!(link.counters().congestion_marks, 1, "it counts once");
}

#[test]
fn others_get_no_echo() {
    for (frame_bytes, selective) in [(0, false), (4096, false), (0, true)] {
        let mut link = Link::on_path(frame_bytes, selective);
        link.push_marked(write_header(&link, true), &[1; 8]);
        assert_eq!(echoes(&mut link), [false]);
        assert_eq!(link.counters().congestion_marks, 1);
    }
}

#[test]
fn an_echo_costs_a_sixteenth_of_the_window_once_a_round() {
    let mut rig = Rig::selective(4096, attributes());
    (1..=4).for_each(|id| rig.write(id, 64));
    rig.ack(0);
    let before = rig.status().window_bytes;
    for psn in [1, 2] {
        rig.answer(Op::Acknowledge, Place::Only, psn, |header| header.becn = true, &[]);
    }
    assert_eq!(rig.succeeded(), [1, 2, 3]);
    assert_eq!(rig.status().window_bytes, before - before / 16);
    assert_eq!(rig.status().counters.congestion_marks, 2);
}

#[test]
fn a_program_has_no_say_in_the_ecn_bits_between_routers() {
    for (frame_bytes, expected) in [(4096, 0b1010_0110), (0, 0b1010_0111)] {
        let to = Destination { frame_bytes, selective: true, ..destination() };
        let mut rig = Rig::of_class(QpType::Rc, PathMtu::Mtu256, attributes(), to, 0b1010_0111);
        rig.introduce();
        rig.write(1, 64);
        let classes: Vec<u8> = rig.net.world.sent.iter().map(|sent| sent.to.traffic_class).collect();
        assert_eq!(classes, [expected]);
    }
}
