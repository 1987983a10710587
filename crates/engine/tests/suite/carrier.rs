//! Messages that go by a carrier instead of the wire: which way each takes, in which order they
//! complete, what becomes of those that the carrier gives back; and the responder's checks of what
//! a carrier brings.
use crate::common::peer::{HOST, Link, PEER_QPN, pattern};
use crate::common::rig::*;
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::{Operation as O, PacketPosition as P};

use CompletionStatus as Status;

// ---- requester

/// A QP that has a carrier, which takes all.
fn rig() -> Rig {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.net.world.carry_outcome = Some(CarryOutcome::Taken);
    assert!(rig.net.engine.use_carrier(rig.end.qp));
    rig.net.work();
    rig
}

fn loads(rig: &Rig) -> Vec<(SendOpcode, u32)> {
    rig.net.world.loads.iter().map(|load| (load.head.opcode, load.head.length)).collect()
}

/// The carrier tells what became of the oldest of the messages that it has, or of another.
fn carried_at(rig: &mut Rig, place: usize, carried: Carried) {
    let load = rig.net.world.loads.remove(place);
    let Net { engine, world, now, .. } = &mut rig.net;
    engine.handle_carried(world, *now, load.token, carried);
    rig.net.work();
}

fn carried(rig: &mut Rig, carried: Carried) {
    carried_at(rig, 0, carried);
}

fn carrier_state(rig: &Rig) -> CarrierState {
    rig.net.engine.carrier_state(rig.end.qp).unwrap()
}

#[test]
fn messages_go_whole_with_what_their_receiver_needs() {
    let mut rig = rig();
    rig.fill(&pattern(1000));
    let request = SendRequest { immediate: 0x1122_3344, ..rig.request(1, SendOpcode::RdmaWriteWithImmediate, 1000) };
    rig.post(SendRequest { flags: SendFlags(SendFlags::SIGNALED | SendFlags::SOLICITED), ..request });
    rig.read(2, 600);
    assert_eq!((rig.out().len(), rig.statuses()), (0, vec![]));
    let [write, read] = &rig.net.world.loads[..] else { panic!("two messages") };
    let head = CarriedHead {
        source_qpn: rig.end.qpn,
        dest_qpn: Qpn(PEER_QPN),
        opcode: SendOpcode::RdmaWriteWithImmediate,
        length: 1000,
        remote_address: 0x7000,
        rkey: 0x55aa,
        immediate: 0x1122_3344,
        is_solicited: true,
    };
    assert_eq!((write.head, write.host), (head, HOST));
    assert_eq!(write.bytes, pattern(1000));
    assert_eq!(read.spans.iter().map(|span| span.length).sum::<u32>(), 600);
    carried(&mut rig, Carried::Executed);
    carried(&mut rig, Carried::Executed);
    let end = rig.end;
    let done: Vec<_> = rig.net.polls(&end).iter().map(|done| (done.work_request_id, done.byte_count)).collect();
    assert_eq!(done, [(1, 0), (2, 600)]);
    assert_eq!((rig.vnic().wire_messages, rig.vnic().wire_bytes), (2, 1600));
    assert_eq!(rig.net.engine.poll_timeout(), None, "the carrier has timers of its own");
}

#[test]
fn the_way_changes_when_all_that_went_the_other_way_is_acknowledged() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.net.world.carry_outcome = Some(CarryOutcome::Taken);
    rig.write(1, 10);
    assert_eq!(carrier_state(&rig), CarrierState::Wire);
    rig.net.engine.use_carrier(rig.end.qp);
    rig.write(2, 20);
    assert_eq!((carrier_state(&rig), rig.psns(), loads(&rig)), (CarrierState::DrainToCarrier, vec![0], vec![]));
    rig.ack(0);
    assert_eq!((carrier_state(&rig), rig.psns()), (CarrierState::Carrier, vec![]));
    assert_eq!(loads(&rig), [(SendOpcode::RdmaWrite, 20)]);
    rig.net.engine.use_wire(rig.end.qp);
    rig.write(3, 30);
    assert_eq!((carrier_state(&rig), rig.psns()), (CarrierState::DrainToWire, vec![]));
    carried(&mut rig, Carried::Executed);
    assert_eq!((carrier_state(&rig), rig.psns()), (CarrierState::Wire, vec![1]));
    rig.ack(1);
    assert_eq!(rig.succeeded(), [1, 2, 3]);
}

/// Atomics are the router's, and the carrier may decline any message.
#[test]
fn what_a_carrier_does_not_take_goes_by_the_wire_in_its_turn() {
    let mut rig = rig();
    rig.write(1, 10);
    rig.post(SendRequest { remote_address: 0x7000, ..rig.request(2, SendOpcode::FetchAdd, 8) });
    rig.write(3, 30);
    assert_eq!((loads(&rig).len(), rig.psns()), (1, vec![]), "the atomic waits for the WRITE");
    carried(&mut rig, Carried::Executed);
    assert_eq!((loads(&rig).len(), rig.psns()), (0, vec![0]), "the second WRITE waits for the atomic");
    rig.original(0, 7);
    assert_eq!(loads(&rig), [(SendOpcode::RdmaWrite, 30)]);
    rig.net.world.carry_outcome = Some(CarryOutcome::Declined);
    rig.write(4, 40);
    assert_eq!(rig.psns(), []);
    carried(&mut rig, Carried::Executed);
    assert_eq!(rig.psns(), [1]);
    rig.ack(1);
    assert_eq!(rig.succeeded(), [1, 2, 3, 4]);
    rig.net.world.carry_outcome = Some(CarryOutcome::Later);
    rig.write(5, 50);
    assert_eq!((loads(&rig).len(), rig.psns()), (0, vec![]));
    rig.net.world.carry_outcome = Some(CarryOutcome::Taken);
    rig.net.engine.handle_carrier_ready(rig.end.qp);
    rig.net.work();
    assert_eq!(loads(&rig), [(SendOpcode::RdmaWrite, 50)]);
}

#[test]
fn a_fence_waits_for_reads_of_the_carrier() {
    let mut rig = rig();
    rig.read(1, 100);
    let flags = SendFlags(SendFlags::SIGNALED | SendFlags::FENCE);
    rig.post(SendRequest { flags, ..rig.request(2, SendOpcode::RdmaWrite, 10) });
    assert_eq!(loads(&rig), [(SendOpcode::RdmaRead, 100)]);
    carried(&mut rig, Carried::Executed);
    assert_eq!(loads(&rig), [(SendOpcode::RdmaWrite, 10)]);
}

#[test]
fn completions_come_in_posting_order() {
    let mut rig = rig();
    for id in 1..=3 {
        rig.write(id, 10);
    }
    carried_at(&mut rig, 2, Carried::Executed);
    carried_at(&mut rig, 1, Carried::Executed);
    assert_eq!(rig.statuses(), []);
    carried(&mut rig, Carried::Executed);
    assert_eq!(rig.succeeded(), [1, 2, 3]);
}

/// A carrier that fails costs no queue pair: exactly what was not executed goes by the wire, in
/// order. A READ is asked again.
#[test]
fn what_the_carrier_gives_back_goes_by_the_wire() {
    let mut rig = rig();
    rig.write(1, 10);
    rig.write(2, 20);
    rig.read(3, 30);
    rig.post(rig.request(4, SendOpcode::Send, 40));
    carried_at(&mut rig, 2, Carried::Executed);
    carried_at(&mut rig, 1, Carried::Returned);
    rig.post(rig.request(5, SendOpcode::Send, 50));
    assert_eq!((rig.psns(), loads(&rig).len()), (vec![], 2), "nothing goes while the carrier has something");
    assert_eq!(carrier_state(&rig), CarrierState::DrainToWire);
    carried(&mut rig, Carried::Executed);
    assert_eq!(rig.succeeded(), [1]);
    carried(&mut rig, Carried::Returned);
    let out: Vec<_> = rig.briefs().iter().map(|brief| (brief.0, brief.2)).collect();
    assert_eq!(out, [(O::Write, 0), (O::ReadRequest, 1), (O::Send, 2), (O::Send, 3)]);
    rig.respond(1, P::Only, &[7; 30]);
    rig.ack(3);
    assert_eq!((rig.succeeded(), carrier_state(&rig)), (vec![2, 3, 4, 5], CarrierState::Wire));
}

/// If a later message was executed than one that was not, neither order can be had any more.
#[test]
fn a_carrier_that_breaks_its_promise_ends_the_qp() {
    let mut rig = rig();
    for id in 1..=3 {
        rig.write(id, 10);
    }
    carried(&mut rig, Carried::Executed);
    carried_at(&mut rig, 1, Carried::Executed);
    carried(&mut rig, Carried::Returned);
    assert_eq!(rig.statuses(), [(1, SUCCESS), (2, Status::RemoteOperationError), (3, FLUSHED)]);
    assert_eq!((rig.psns(), rig.state()), (vec![], QpState::Error));
}

#[test]
fn a_failure_ends_the_qp_and_the_rest_is_flushed_when_the_carrier_has_nothing() {
    for (failure, status) in [
        (CarryFailure::InvalidRequest, Status::RemoteInvalidRequest),
        (CarryFailure::RemoteAccess, Status::RemoteAccessError),
        (CarryFailure::RemoteOperational, Status::RemoteOperationError),
        (CarryFailure::ReceiverNotReady, Status::RnrRetryExceeded),
        (CarryFailure::LocalMemory, Status::LocalProtectionError),
    ] {
        let mut rig = rig();
        for id in 1..=3 {
            rig.write(id, 10);
        }
        carried(&mut rig, Carried::Failed(failure));
        assert_eq!((rig.statuses(), rig.state()), (vec![(1, status)], QpState::Error));
        let end = rig.end;
        assert_eq!(rig.net.to(&end, QpState::Reset), Err(Refusal::InFlight));
        assert_eq!(rig.net.engine.deregister_mr(end.session, end.mr), Err(Refusal::InFlight));
        carried(&mut rig, Carried::Executed);
        carried(&mut rig, Carried::Returned);
        assert_eq!(rig.net.to(&end, QpState::Reset), Ok(QpState::Reset));
        rig.net.engine.deregister_mr(end.session, end.mr).unwrap();
    }
}

#[test]
fn what_waits_for_the_carrier_is_flushed_in_order() {
    let mut rig = rig();
    rig.write(1, 10);
    rig.write(2, 20);
    let end = rig.end;
    let _ = rig.net.to(&end, QpState::Error);
    rig.net.work();
    assert_eq!(rig.statuses(), [], "the carrier still reads from memory");
    carried_at(&mut rig, 1, Carried::Executed);
    carried(&mut rig, Carried::Executed);
    assert_eq!(rig.statuses(), [(1, FLUSHED), (2, FLUSHED)]);
}

/// A carrier that goes on trying for a RECV that never comes would hold the QP for ever.
#[test]
fn a_qp_that_does_no_more_work_withdraws_what_the_carrier_has() {
    type Ending = fn(&mut Net, &End);
    let endings: [(&str, Ending); 4] = [
        ("reset", |net, end| assert_eq!(net.to(end, QpState::Reset), Err(Refusal::InFlight))),
        ("error", |net, end| assert_eq!(net.to(end, QpState::Error), Err(Refusal::InFlight))),
        ("destroyed", |net, end| {
            let result = net.engine.destroy_qp(&mut net.world, net.now, end.session, end.qp);
            assert_eq!(result, Err(Refusal::InFlight));
        }),
        ("its session ends", |net, end| net.engine.destroy_session(&mut net.world, net.now, end.session)),
    ];
    for (why, ending) in endings {
        let mut rig = rig();
        rig.write(1, 10);
        rig.write(2, 20);
        assert_eq!(rig.net.world.withdrawn, [], "{why}");
        let end = rig.end;
        ending(&mut rig.net, &end);
        assert_eq!(rig.net.world.withdrawn, [rig.end.qp], "{why}");
        carried(&mut rig, Carried::Returned);
        carried(&mut rig, Carried::Returned);
    }
    // Nothing is there to withdraw once all results are.
    let mut rig = rig();
    rig.write(1, 10);
    carried(&mut rig, Carried::Executed);
    let end = rig.end;
    assert_eq!(rig.net.to(&end, QpState::Reset), Ok(QpState::Reset));
    assert_eq!(rig.net.world.withdrawn, []);
}

#[test]
fn a_drained_send_queue_has_nothing_with_the_carrier() {
    let mut rig = rig();
    rig.write(1, 10);
    let end = rig.end;
    let drain = QpAttributes { state: QpState::SqDrain, enable_sqd_async_notify: true, ..Default::default() };
    rig.net.modify(&end, &drain, QpAttributeMask::STATE | QpAttributeMask::EN_SQD_ASYNC_NOTIFY).unwrap();
    rig.net.work();
    assert_eq!(rig.net.world.saw(AsyncEventKind::SqDrained, EventTarget::Qp(end.qp)), 0);
    carried(&mut rig, Carried::Executed);
    assert_eq!(rig.net.world.saw(AsyncEventKind::SqDrained, EventTarget::Qp(end.qp)), 1);
}

#[test]
fn nothing_goes_by_a_carrier_before_the_peer_is_known() {
    let mut rig = Rig::behind_gate(QpType::Rc, PathMtu::Mtu256, attributes());
    rig.net.world.carry_outcome = Some(CarryOutcome::Taken);
    assert!(rig.net.engine.use_carrier(rig.end.qp));
    rig.write(1, 10);
    assert_eq!((loads(&rig).len(), rig.out().len()), (0, 0));
}

#[test]
fn a_restored_engine_knows_what_the_carrier_has() {
    let mut rig = rig();
    for id in 1..=3 {
        rig.write(id, 10);
    }
    carried_at(&mut rig, 1, Carried::Executed);
    let snapshot = rig.net.engine.snapshot();
    rig.net.engine = Engine::restore(&snapshot).unwrap();
    assert!(rig.net.engine.snapshot() == snapshot);
    carried(&mut rig, Carried::Executed);
    assert_eq!(rig.succeeded(), [1, 2]);
    carried(&mut rig, Carried::Returned);
    assert_eq!(rig.psns(), [0]);
}

// ---- responder

fn head(link: &Link, opcode: SendOpcode, length: usize) -> CarriedHead {
    CarriedHead {
        source_qpn: Qpn(PEER_QPN),
        dest_qpn: link.end.qpn,
        opcode,
        length: length as u32,
        remote_address: MEMORY_BASE + 0x4000,
        rkey: link.end.key,
        immediate: 0x0101_0101,
        is_solicited: false,
    }
}

fn admit_from(link: &mut Link, host: HostId, head: &CarriedHead) -> (Admission, Vec<Span>) {
    let (mut spans, Net { engine, world, now, .. }) = (Vec::new(), &mut link.net);
    let admission = engine.admit_carried(world, *now, host, head, &mut spans);
    (admission, spans)
}

/// An admitted message: its token, and the memory that it is about.
fn admitted(link: &mut Link, head: &CarriedHead) -> (Token, Vec<Span>) {
    match admit_from(link, HOST, head) {
        (Admission::Admitted(token), spans) => (token, spans),
        (other, _) => panic!("{other:?}"),
    }
}

fn landed(link: &mut Link, token: Token, result: Result<(), MemorySide>) -> Carried {
    let Net { engine, world, now, .. } = &mut link.net;
    let carried = engine.handle_landed(world, *now, token, result);
    link.net.work();
    carried
}

fn statuses(link: &mut Link) -> Vec<(u64, Status)> {
    let end = link.end;
    link.net.statuses(&end)
}

#[test]
fn messages_that_are_brought_take_receives_and_name_memory() {
    let mut link = Link::new();
    let end = link.end;
    link.net.post_receive(&end, 1, &[end.sge(0, 100), end.sge(1000, 900)]);
    let message = head(&link, SendOpcode::SendWithImmediate, 250);
    let (token, spans) = admitted(&mut link, &message);
    let reached: Vec<_> = spans.iter().map(|span| (span.address - MEMORY_BASE, span.length)).collect();
    assert_eq!(reached, [(0, 100), (1000, 150)]);
    assert_eq!(landed(&mut link, token, Ok(())), Carried::Executed);
    let done = link.net.only(&end);
    assert_eq!((done.work_request_id, done.byte_count, done.immediate), (1, 250, 0x0101_0101));
    for opcode in [SendOpcode::RdmaWrite, SendOpcode::RdmaRead] {
        let message = head(&link, opcode, 300);
        let (token, spans) = admitted(&mut link, &message);
        assert_eq!(
            spans.iter().map(|span| (span.address - MEMORY_BASE, span.length)).collect::<Vec<_>>(),
            [(0x4000, 300)]
        );
        let region = link.end.mr;
        assert_eq!(link.net.engine.deregister_mr(end.session, region), Err(Refusal::InFlight));
        assert_eq!(landed(&mut link, token, Ok(())), Carried::Executed);
        let traffic = link.net.engine.vnic_counters(end.vnic).unwrap();
        assert_eq!(traffic.writes_received + traffic.reads_received, 1 + u64::from(opcode == SendOpcode::RdmaRead));
        let access = ALL_ACCESS.union(Access::FLUSH_GLOBAL);
        let length = MEMORY_BYTES as u64;
        let keys = link.net.engine.register_mr(end.session, end.pd, MEMORY_BASE, length, MEMORY_BASE, access).unwrap();
        (link.end.mr, link.end.key) = (keys.mr, keys.rkey);
    }
    assert_eq!(statuses(&mut link), []);
}

#[test]
fn a_carrier_s_message_is_checked_as_any_other() {
    let refused = |change: &dyn Fn(&mut CarriedHead)| {
        let mut link = Link::new();
        let mut head = head(&link, SendOpcode::RdmaWrite, 100);
        change(&mut head);
        let (admission, spans) = admit_from(&mut link, HOST, &head);
        assert_eq!(spans, []);
        (admission, link.state())
    };
    let failed = |failure| (Admission::Answered(Carried::Failed(failure)), QpState::Error);
    let rts = QpState::ReadyToSend;
    assert_eq!(refused(&|head| head.rkey ^= 0x100), failed(CarryFailure::RemoteAccess));
    assert_eq!(refused(&|head| head.remote_address += MEMORY_BYTES as u64), failed(CarryFailure::RemoteAccess));
    assert_eq!(refused(&|head| head.length = u32::MAX), failed(CarryFailure::InvalidRequest));
    assert_eq!(refused(&|head| head.opcode = SendOpcode::FetchAdd), failed(CarryFailure::InvalidRequest));
    let unheard = (Admission::Answered(Carried::Returned), rts);
    assert_eq!(refused(&|head| head.source_qpn = Qpn(PEER_QPN + 1)), unheard);
    assert_eq!(refused(&|head| head.dest_qpn = Qpn(head.dest_qpn.0 ^ 1)), unheard);
    let not_ready = refused(&|head| head.opcode = SendOpcode::Send);
    assert!(matches!(not_ready, (Admission::NotReady(delay), QpState::ReadyToSend) if delay.0 > 0), "{not_ready:?}");
    let mut link = Link::new();
    let head = head(&link, SendOpcode::RdmaWrite, 100);
    assert_eq!(admit_from(&mut link, HostId(HOST.0 + 1), &head).0, unheard.0);
    assert_eq!(link.net.engine.drops().wrong_source, 1);
}

/// Packets that arrive meanwhile wait; a carrier's messages have to be brought again.
#[test]
fn one_message_lands_at_a_time() {
    let mut link = Link::new();
    let end = link.end;
    for id in 1..=2 {
        link.net.post_receive(&end, id, &[end.sge(0, 1000)]);
    }
    let first = head(&link, SendOpcode::Send, 10);
    let (token, _) = admitted(&mut link, &first);
    assert_eq!(admit_from(&mut link, HOST, &first).0, Admission::Busy);
    link.send(&[9; 20]);
    assert_eq!(statuses(&mut link), []);
    assert_eq!(landed(&mut link, token, Ok(())), Carried::Executed);
    assert_eq!(statuses(&mut link), [(1, SUCCESS), (2, SUCCESS)]);
    assert_eq!(landed(&mut link, token, Ok(())), Carried::Returned, "a token that is over");
}

#[test]
fn memory_that_is_gone_is_its_owner_s_fault() {
    let mut link = Link::new();
    let end = link.end;
    link.net.post_receive(&end, 1, &[end.sge(0, 1000)]);
    let send = head(&link, SendOpcode::Send, 10);
    let (token, _) = admitted(&mut link, &send);
    let of_requester = landed(&mut link, token, Err(MemorySide::Source));
    assert_eq!(of_requester, Carried::Failed(CarryFailure::LocalMemory));
    assert_eq!((statuses(&mut link), link.state()), (vec![], QpState::ReadyToSend), "the RECV is the next message's");
    let (token, _) = admitted(&mut link, &send);
    let of_responder = landed(&mut link, token, Err(MemorySide::Destination));
    assert_eq!(of_responder, Carried::Failed(CarryFailure::RemoteOperational));
    assert_eq!((statuses(&mut link), link.state()), (vec![(1, Status::LocalProtectionError)], QpState::Error));
}

#[test]
fn a_qp_that_stopped_while_a_message_landed_has_not_got_it() {
    let mut link = Link::new();
    let end = link.end;
    link.net.post_receive(&end, 1, &[end.sge(0, 1000)]);
    let message = head(&link, SendOpcode::Send, 10);
    let (token, _) = admitted(&mut link, &message);
    assert_eq!(link.net.to(&end, QpState::Error), Err(Refusal::InFlight));
    assert_eq!(statuses(&mut link), []);
    assert_eq!(landed(&mut link, token, Ok(())), Carried::Returned);
    assert_eq!(statuses(&mut link), [(1, FLUSHED)]);
}
