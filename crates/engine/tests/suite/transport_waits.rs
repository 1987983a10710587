//! Acknowledgements that wait for what the program answers: which do, for how long, and that none is lost.
use crate::common::peer::*;
use crate::common::rig::{self, MS, Rig};
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::{
    Aeth, Header, MASK_24, NakCode, Opcode, Operation as Op, PacketPosition, Reth, Service, Syndrome as Aeths, psn_add,
};

/// How long an acknowledgement waits, nanoseconds.
const WAIT: u64 = 50_000;
const SOON: u64 = 20_000;

/// A packet that went out, of a SEND or an answer: its PSN counts from [`FIRST_PSN`] if it is an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Out {
    Send,
    Ack { psn: u32, waited: bool },
    Nak { psn: u32 },
    Read { psn: u32 },
}

fn ack(psn: u32) -> Out {
    Out::Ack { psn, waited: false }
}

fn late_ack(psn: u32) -> Out {
    Out::Ack { psn, waited: true }
}

/// A QP of this host and its peer's script: questions come, the QP's program answers.
struct Talk {
    link: Link,
    receives: u64,
    answers: u64,
    /// PSNs of our own that the peer has not acknowledged.
    unacknowledged: Vec<u32>,
}

impl Talk {
    fn new() -> Self {
        Self::over(Link::new())
    }

    fn over(link: Link) -> Self {
        Self { link, receives: 0, answers: 0, unacknowledged: Vec::new() }
    }

    fn now(&self) -> u64 {
        self.link.net.now.0
    }

    fn pass(&mut self, nanoseconds: u64) {
        self.link.net.now = Instant(self.now() + nanoseconds);
    }

    /// Packets that went out since. Nothing is run for it.
    fn out(&mut self) -> Vec<Out> {
        let sent = std::mem::take(&mut self.link.net.world.sent);
        let parse = |sent: Sent| {
            let (header, _) = Header::parse(&sent.bytes).unwrap();
            let psn = header.psn.wrapping_sub(FIRST_PSN) & MASK_24;
            match (header.opcode.operation(), header.aeth.syndrome) {
                (Op::Send, _) => {
                    self.unacknowledged.push(header.psn);
                    Out::Send
                }
                (Op::ReadResponse, _) => Out::Read { psn },
                (Op::Acknowledge, Aeths::Ack { .. }) => Out::Ack { psn, waited: header.ack_waits },
                (Op::Acknowledge, _) => Out::Nak { psn },
                other => panic!("{other:?}"),
            }
        };
        sent.into_iter().map(parse).collect()
    }

    fn flush(&mut self) {
        self.link.net.engine.flush_acks(&mut self.link.net.world, self.link.net.now);
    }

    /// A SEND of one packet comes, whose acknowledgement may wait.
    fn message(&mut self) {
        self.message_with(true);
    }

    fn message_with(&mut self, ack_waits: bool) {
        self.link.receive(self.receives, 0, 100);
        self.receives += 1;
        let header = Header { ack_waits, ..self.link.header(Op::Send, PacketPosition::Only) };
        self.link.push(header, &[1; 12]);
    }

    /// It comes alone; what goes out at once.
    fn question(&mut self) -> Vec<Out> {
        self.message();
        self.flush();
        self.out()
    }

    /// The program sends something; what goes out.
    fn answer(&mut self) -> Vec<Out> {
        let end = self.link.end;
        let send = request(1000 + self.answers, SendOpcode::Send, &[end.sge(0, 12)]);
        self.answers += 1;
        self.link.net.post_send(&end, send);
        self.link.net.work();
        let out = self.out();
        self.acknowledge();
        out
    }

    /// The peer acknowledges all that it has got.
    fn acknowledge(&mut self) {
        let opcode = Opcode::new(Service::Rc, Op::Acknowledge, PacketPosition::Only).unwrap();
        for psn in std::mem::take(&mut self.unacknowledged) {
            let aeth = Aeth { syndrome: Aeths::ACK, msn: 0 };
            self.link.deliver(Header { aeth, ..Header::new(opcode, self.link.end.qpn.0, psn) }, &[]);
        }
        self.link.net.work();
    }

    /// Questions that are answered soon, until the acknowledgement of one waits; how many before that did not.
    fn learn(&mut self) -> u32 {
        for count in 0..1000 {
            let at_once = self.question();
            if at_once.is_empty() {
                return count;
            }
            self.pass(SOON);
            self.answer();
        }
        panic!("never");
    }

    /// The PSN of the last question, as in [`Out`].
    fn last(&self) -> u32 {
        self.link.psn.wrapping_sub(FIRST_PSN).wrapping_sub(1) & MASK_24
    }

    /// One whose acknowledgement waits now.
    fn waiting() -> Self {
        let mut talk = Self::new();
        talk.learn();
        talk
    }
}

#[test]
fn it_rides_behind_the_answer() {
    let mut talk = Talk::new();
    for count in 0..4 {
        assert_eq!(talk.question(), [ack(count)]);
        talk.pass(SOON);
        assert_eq!(talk.answer(), [Out::Send]);
    }
    for count in 4..100 {
        assert_eq!(talk.question(), []);
        assert!(talk.link.net.engine.acks_due().is_some());
        talk.pass(SOON);
        assert_eq!(talk.answer(), [Out::Send, late_ack(count)]);
        assert_eq!(talk.link.net.engine.acks_due(), None);
    }
    let counters = talk.link.counters();
    assert_eq!((counters.acks_sent, counters.acks_deferred, counters.acks_with_answers), (100, 0, 96));
}

#[test]
fn a_long_answer_goes_before_it_too() {
    let mut talk = Talk::waiting();
    let end = talk.link.end;
    let send = request(7, SendOpcode::Send, &[end.sge(0, 1000)]);
    talk.link.net.post_send(&end, send);
    talk.link.net.work();
    assert_eq!(talk.out(), [Out::Send, Out::Send, Out::Send, Out::Send, late_ack(talk.last())]);
}

#[test]
fn an_answer_that_is_fetched_elsewhere_goes_before_it() {
    let mut talk = Talk::waiting();
    talk.link.net.world.always_put_off = true;
    assert_eq!(talk.answer(), []);
    talk.link.net.settle();
    assert_eq!(talk.out(), [Out::Send, late_ack(talk.last())]);
}

#[test]
fn without_an_answer_it_goes_out_by_time_and_the_next_ones_at_once() {
    let mut talk = Talk::waiting();
    let asked_at = talk.now();
    assert_eq!(talk.link.net.engine.poll_timeout(), Some(Instant(asked_at + WAIT)));
    talk.link.net.work();
    assert_eq!(talk.out(), [], "a run of the QP does not end the wait");
    talk.link.net.expire();
    assert_eq!((talk.now(), talk.out()), (asked_at + WAIT, vec![late_ack(talk.last())]));
    assert_eq!(talk.link.net.engine.poll_timeout(), None);
    assert_eq!(talk.answer(), [Out::Send]);
    assert_eq!(talk.learn(), 8, "it needs more to be believed again");
    assert_eq!(talk.link.counters().acks_with_answers, 0);
}

#[test]
fn a_second_question_does_not_wait_for_the_answer_to_the_first() {
    let mut talk = Talk::waiting();
    let both = talk.last() + 1;
    assert_eq!(talk.question(), [ack(both)]);
    assert_eq!(talk.link.net.engine.acks_due(), None);
    assert_eq!(talk.link.counters().acks_deferred, 1);
    talk.answer();
    assert_eq!(talk.learn(), 3);
}

#[test]
fn messages_that_come_together_are_one_question() {
    let mut talk = Talk::new();
    for _ in 0..4 {
        talk.message();
        assert_eq!(talk.question().len(), 1);
        talk.answer();
    }
    talk.message();
    assert_eq!(talk.question(), []);
    assert_eq!(talk.answer(), [Out::Send, late_ack(9)]);
}

#[test]
fn who_does_not_let_it_wait_does_not_wait() {
    let mut talk = Talk::new();
    talk.learn();
    talk.answer();
    // A requester with a short timeout, of an older release or of another make.
    talk.message_with(false);
    talk.flush();
    assert_eq!(talk.out(), [ack(5)]);
    talk.answer();
    // One of two.
    talk.message();
    talk.message_with(false);
    talk.flush();
    assert_eq!(talk.out(), [ack(7)]);
    talk.answer();
    // A long message. (No requester lets that wait.)
    talk.link.receive(100, 0, 1000);
    let packets = talk.link.packets(Op::Send, Reth::default(), &[1; 600]);
    for (header, piece) in packets {
        talk.link.push(header, &piece);
    }
    talk.flush();
    assert_eq!(talk.out(), [ack(10)]);
    talk.answer();
    // A duplicate.
    let header = talk.link.header(Op::Send, PacketPosition::Only);
    talk.link.deliver(Header { psn: psn_add(FIRST_PSN, 10), ack_waits: true, ..header }, &[1; 12]);
    talk.flush();
    assert_eq!(talk.out(), [ack(10)]);
    talk.message();
    talk.flush();
    assert_eq!(talk.out(), [], "none of them says that the program does not answer");
}

/// Neither does a requester ask an external machine for it, nor would one be obeyed.
#[test]
fn external_machines_get_it_at_once() {
    let mut link = Link::new();
    let gate = |link: &mut Link, answer| {
        link.net.world.peers.insert((HOST, Qpn(PEER_QPN)), answer);
        let Net { engine, world, now, .. } = &mut link.net;
        engine.handle_peer_changed(world, *now, HOST, Some(Qpn(PEER_QPN)));
    };
    let end = link.end;
    link.net.engine.set_external_gid(end.vnic, Some(gid(254))).unwrap();
    gate(&mut link, PeerAnswer::External(peer_gid()));
    let mut talk = Talk::over(link);
    for count in 0..50 {
        assert_eq!(talk.question(), [ack(count)]);
        let send = request(count.into(), SendOpcode::Send, &[end.sge(0, 12)]);
        talk.link.net.post_send(&end, send);
        talk.link.net.work();
        let (header, _) = Header::parse(&talk.link.net.world.sent[0].bytes).unwrap();
        assert_eq!((header.opcode.operation(), header.ack_waits), (Op::Send, false));
        talk.out();
        talk.acknowledge();
    }
    // It is the gate that makes the difference.
    talk.link.introduce();
    let Net { engine, world, now, .. } = &mut talk.link.net;
    engine.handle_peer_changed(world, *now, HOST, Some(Qpn(PEER_QPN)));
    assert_eq!(talk.question(), []);
}

#[test]
fn answers_of_other_kinds_cover_it() {
    let mut talk = Talk::waiting();
    talk.link.read(0, 8);
    assert_eq!(talk.out(), [Out::Read { psn: 5 }]);
    assert_eq!((talk.link.counters().acks_deferred, talk.link.counters().acks_sent), (1, 4));
    assert_eq!(talk.answer(), [Out::Send]);

    let mut talk = Talk::waiting();
    let header = talk.link.header(Op::Send, PacketPosition::Only);
    talk.link.deliver(Header { psn: psn_add(header.psn, 3), ..header }, &[1; 12]);
    assert_eq!(talk.out(), [Out::Nak { psn: 5 }], "a gap, which acknowledges what came before it");
    assert_eq!(talk.answer(), [Out::Send]);
}

/// A repeated READ's response is owed for an earlier PSN.
#[test]
fn it_does_not_overtake_what_is_owed_for_earlier_requests() {
    let mut talk = Talk::new();
    talk.link.read(0, 2000);
    let again = Header { psn: FIRST_PSN, ..talk.link.read_header(0, 2000) };
    talk.out();
    talk.learn();
    let last = talk.last();
    talk.link.net.world.always_put_off = true;
    talk.link.deliver(again, &[]);
    talk.pass(WAIT);
    let Net { engine, world, now, .. } = &mut talk.link.net;
    engine.handle_timeout(world, *now);
    talk.link.net.work();
    assert_eq!(talk.out(), []);
    talk.link.net.settle();
    let out = talk.out();
    assert_eq!((out[0], out[out.len() - 1]), (Out::Read { psn: 0 }, late_ack(last)));
}

#[test]
fn a_full_fabric_gets_it_later() {
    let mut talk = Talk::waiting();
    talk.link.net.world.transmit_room = Some(0);
    talk.pass(WAIT);
    let Net { engine, world, now, .. } = &mut talk.link.net;
    engine.handle_timeout(world, *now);
    assert_eq!(talk.out(), []);
    talk.link.net.world.transmit_room = None;
    talk.link.net.work();
    assert_eq!(talk.out(), [late_ack(talk.last())]);
}

#[test]
fn a_qp_that_is_reset_destroyed_or_in_error_has_acknowledged_what_it_received() {
    for state in [QpState::Reset, QpState::Error] {
        let mut talk = Talk::waiting();
        let end = talk.link.end;
        talk.link.net.to(&end, state).unwrap();
        talk.link.net.work();
        assert_eq!(talk.out(), [late_ack(talk.last())], "{state:?}");
        talk.link.net.work();
        assert_eq!((talk.out(), talk.link.net.engine.acks_due()), (vec![], None));
    }

    let mut talk = Talk::waiting();
    let (end, last) = (talk.link.end, talk.last());
    let Net { engine, world, now, .. } = &mut talk.link.net;
    engine.destroy_qp(world, *now, end.session, end.qp).unwrap();
    assert_eq!(talk.out(), [late_ack(last)]);

    let mut talk = Talk::waiting();
    let (end, last) = (talk.link.end, talk.last());
    talk.link.net.die(end.session);
    assert_eq!(talk.out(), [late_ack(last)]);
    talk.pass(WAIT);
    let Net { engine, world, now, .. } = &mut talk.link.net;
    engine.handle_timeout(world, *now);
    assert_eq!((talk.out(), talk.link.net.engine.acks_due()), (vec![], None));
}

/// A copy keeps the QP while it is destroyed.
#[test]
fn a_qp_that_waits_for_its_copies_to_go_has_acknowledged_what_it_received() {
    let mut talk = Talk::waiting();
    let (end, last) = (talk.link.end, talk.last());
    talk.link.net.world.always_put_off = true;
    let write = talk.link.packets(Op::Write, talk.link.reth(0, 12), &[7; 12]);
    talk.link.push(write[0].0, &write[0].1);
    let Net { engine, world, now, .. } = &mut talk.link.net;
    assert!(matches!(engine.destroy_qp(world, *now, end.session, end.qp), Err(Refusal::InFlight)));
    assert_eq!(talk.out(), [late_ack(last)]);
}

/// The program's answer is at fault: that is not its peer's message's fault.
#[test]
fn a_qp_that_fails_by_its_answer_has_acknowledged_the_question() {
    let mut talk = Talk::waiting();
    let end = talk.link.end;
    let nowhere = Sge { lkey: end.sge(0, 12).lkey ^ 0x55, ..end.sge(0, 12) };
    talk.link.net.post_send(&end, request(9, SendOpcode::Send, &[nowhere]));
    talk.link.net.work();
    assert_eq!((talk.link.state(), talk.out()), (QpState::Error, vec![late_ack(talk.last())]));
}

#[test]
fn policy_silences_it() {
    let mut talk = Talk::waiting();
    let end = talk.link.end;
    talk.link.net.world.denied.extend([(end.gid, peer_gid()), (peer_gid(), end.gid)]);
    talk.link.net.engine.handle_policy_changed();
    let Net { engine, world, .. } = &mut talk.link.net;
    while engine.poll_policy(world, 100) {}
    assert_eq!(talk.link.state(), QpState::Error);
    talk.link.net.work();
    talk.pass(WAIT);
    let Net { engine, world, now, .. } = &mut talk.link.net;
    engine.handle_timeout(world, *now);
    talk.link.net.work();
    assert_eq!((talk.out(), talk.link.net.engine.acks_due()), (vec![], None));
}

/// The QP behind the peer's number is another's meanwhile.
#[test]
fn a_stranger_gets_none() {
    let mut talk = Talk::waiting();
    talk.link.net.world.peers.insert((HOST, Qpn(PEER_QPN)), PeerAnswer::Absent);
    let Net { engine, world, now, .. } = &mut talk.link.net;
    engine.handle_peer_changed(world, *now, HOST, Some(Qpn(PEER_QPN)));
    talk.pass(WAIT);
    let Net { engine, world, now, .. } = &mut talk.link.net;
    engine.handle_timeout(world, *now);
    talk.link.net.work();
    assert_eq!(talk.out(), []);
}

#[test]
fn a_restored_engine_goes_on_waiting() {
    let mut talk = Talk::waiting();
    talk.link.net.engine = Engine::restore(&talk.link.net.engine.snapshot()).unwrap();
    assert_eq!(talk.answer(), [Out::Send, late_ack(talk.last())]);
}

// ---- the requester

fn patience(rig: &mut Rig) -> Vec<bool> {
    rig.out().iter().map(|(header, _)| header.ack_waits).collect()
}

#[test]
fn a_requester_lets_it_wait_while_little_is_on_the_way() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    for id in 0..6 {
        rig.write(id, 8);
    }
    assert_eq!(patience(&mut rig), [true, true, true, true, false, false]);
    rig.ack(5);
    rig.write(6, 600);
    assert_eq!(patience(&mut rig), [false; 3], "a long message");
    rig.ack(8);
    rig.read(7, 8);
    assert_eq!(patience(&mut rig), [false], "a READ");
    rig.respond(9, PacketPosition::Only, &[0; 8]);
    rig.write(8, 8);
    assert_eq!(patience(&mut rig), [true]);
    rig.nak(10, NakCode::PsnSequence);
    assert_eq!(patience(&mut rig), [false], "once more");
}

#[test]
fn a_requester_with_a_short_timeout_does_not() {
    for (timeout, waits) in [(0, true), (1, false), (7, false), (8, true), (14, true)] {
        let rts = QpAttributes { timeout, ..rig::attributes() };
        let mut rig = Rig::with(QpType::Rc, PathMtu::Mtu256, rts);
        rig.write(0, 8);
        assert_eq!(patience(&mut rig), [waits], "{timeout}");
    }
}

#[test]
fn one_that_has_waited_completes_the_request_and_measures_nothing() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    let rtt_ns = 10_000;
    for id in 0..20 {
        rig.write(id, 8);
        rig.wait(if id == 0 { rtt_ns } else { MS / 2 });
        let ack_waits = id > 0;
        let psn = id as u32;
        rig.answer(Op::Acknowledge, PacketPosition::Only, psn, |header| header.ack_waits = ack_waits, &[]);
        assert_eq!(rig.succeeded(), [id]);
        assert_eq!(rig.status().smoothed_rtt_ns, rtt_ns);
    }
    assert_eq!(rig.counters().probes_sent, 0);
    rig.write(20, 8);
    rig.wait(9 * rtt_ns);
    rig.ack(20);
    assert_eq!(rig.status().smoothed_rtt_ns, 2 * rtt_ns, "an eighth of the new one");
}
