//! Copies that go on elsewhere: what waits for them, what they bring, and what becomes of them when an end goes away.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

use CompletionStatus as Status;
use SendOpcode as Op;

/// A pair with one copy of `opcode` from `a` to `b` under way, and more work behind it.
fn under_way(opcode: Op) -> (Net, End, End) {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.world.always_put_off = true;
    net.post_receive(&b, 10, &[b.sge(0, 64)]);
    net.post_receive(&b, 11, &[b.sge(64, 64)]);
    net.post_send(&a, remote(1, opcode, &[a.sge(0, 8)], &b, 0));
    net.post_send(&a, remote(2, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0));
    net.work();
    assert_eq!(net.world.pending.len(), 1, "at most one in flight");
    assert!(net.polls(&a).is_empty() && net.polls(&b).is_empty());
    assert_eq!((net.engine.copies_in_flight(a.session), net.engine.copies_in_flight(b.session)), (1, 1));
    (net, a, b)
}

fn refused(state: Result<QpState, Refusal>) {
    assert_eq!(state, Err(Refusal::InFlight));
}

#[test]
fn everything_succeeds_late() {
    for opcode in [Op::Send, Op::RdmaWrite, Op::RdmaWriteWithImmediate, Op::RdmaRead, Op::FetchAdd, Op::CompareSwap] {
        let (mut net, a, b) = under_way(opcode);
        net.settle();
        assert_eq!(net.statuses(&a), [(1, Status::Success), (2, Status::Success)], "{opcode:?}");
        assert_eq!(net.polls(&b).len(), usize::from(opcode.consumes_receive()));
        assert_eq!(net.engine.copies_in_flight(a.session), 0);
    }
}

#[test]
fn faults_late() {
    let cases = [
        (Op::Send, MemorySide::Source, Status::LocalProtectionError, QpState::ReadyToSend),
        (Op::Send, MemorySide::Destination, Status::RemoteOperationError, QpState::Error),
        (Op::RdmaWrite, MemorySide::Source, Status::LocalProtectionError, QpState::ReadyToSend),
        (Op::RdmaWrite, MemorySide::Destination, Status::RemoteOperationError, QpState::Error),
        (Op::RdmaRead, MemorySide::Source, Status::RemoteOperationError, QpState::Error),
        (Op::RdmaRead, MemorySide::Destination, Status::LocalProtectionError, QpState::ReadyToSend),
    ];
    for (opcode, side, status, peer) in cases {
        let (mut net, a, b) = under_way(opcode);
        let (token, _) = net.world.pending.pop().unwrap();
        net.engine.handle_copied(&mut net.world, net.now, token, Err(side));
        net.settle();
        assert_eq!(net.statuses(&a), [(1, status), (2, Status::WorkRequestFlushed)], "{opcode:?} {side:?}");
        assert_eq!(net.state(&b), peer);
    }
}

#[test]
fn an_atomic_whose_memory_is_gone() {
    let (mut net, a, b) = under_way(Op::FetchAdd);
    let (token, _) = net.world.pending.pop().unwrap();
    net.engine.handle_copied(&mut net.world, net.now, token, Ok(()));
    assert!(net.polls(&a).is_empty(), "the wrong kind of result");
    net.engine.handle_atomic_done(&mut net.world, net.now, token, Err(()));
    net.settle();
    assert_eq!(net.statuses(&a)[0], (1, Status::RemoteOperationError));
    assert_eq!(net.state(&b), QpState::Error);
}

#[test]
fn an_atomic_whose_result_can_not_be_written() {
    let (mut net, a, _) = under_way(Op::FetchAdd);
    net.land(0);
    net.work();
    let (token, _) = net.world.pending.pop().unwrap();
    net.engine.handle_copied(&mut net.world, net.now, token, Err(MemorySide::Destination));
    net.settle();
    assert_eq!(net.statuses(&a)[0], (1, Status::LocalProtectionError));
}

#[test]
fn tokens_that_nobody_awaits_are_ignored() {
    let (mut net, a, _) = under_way(Op::RdmaWrite);
    let token = net.world.pending[0].0;
    for stale in [Token(u64::MAX), Token(token.0 + 1), Token(token.0 + (1 << 32))] {
        net.engine.handle_copied(&mut net.world, net.now, stale, Ok(()));
        net.engine.handle_atomic_done(&mut net.world, net.now, stale, Ok(1));
    }
    assert!(net.polls(&a).is_empty());
    net.land(0);
    assert_eq!(net.polls(&a).len(), 1);
    net.engine.handle_copied(&mut net.world, net.now, token, Ok(()));
    net.settle();
    assert_eq!(net.statuses(&a), [(2, Status::Success)]);
}

#[test]
fn destroying_the_requester_waits() {
    let (mut net, a, b) = under_way(Op::Send);
    let destroy = |net: &mut Net| net.engine.destroy_qp(&mut net.world, net.now, a.session, a.qp);
    assert_eq!(destroy(&mut net), Err(Refusal::InFlight));
    assert_eq!(destroy(&mut net), Err(Refusal::InFlight));
    assert!(net.to(&a, QpState::Error).is_err());
    net.settle();
    assert_eq!(destroy(&mut net), Ok(()));
    assert!(net.polls(&a).is_empty() && net.polls(&b).is_empty());
    // The RECV that it had claimed is flushed with the others.
    net.to(&b, QpState::Error).unwrap();
    assert_eq!(net.statuses(&b), [(10, Status::WorkRequestFlushed), (11, Status::WorkRequestFlushed)]);
}

#[test]
fn destroying_the_responder_waits() {
    let (mut net, a, b) = under_way(Op::Send);
    let destroy = |net: &mut Net| net.engine.destroy_qp(&mut net.world, net.now, b.session, b.qp);
    assert_eq!(destroy(&mut net), Err(Refusal::InFlight));
    net.settle();
    assert_eq!(destroy(&mut net), Ok(()));
    while net.expire() {}
    assert_eq!(net.statuses(&a), [(1, Status::RetryExceeded), (2, Status::WorkRequestFlushed)]);
    assert!(net.polls(&b).is_empty());
}

#[test]
fn resetting_the_responder_waits() {
    let (mut net, a, b) = under_way(Op::Send);
    refused(net.to(&b, QpState::Reset));
    assert!(matches!(net.to(&b, QpState::Error), Err(Refusal::Error(_))), "RESET has begun");
    net.settle();
    assert_eq!(net.to(&b, QpState::Reset), Ok(QpState::Reset));
    assert!(net.polls(&b).is_empty(), "RESET forgets");
    // Connected again: the message begins again, with the RECV that is left.
    net.connect(&b, &a);
    net.settle();
    assert_eq!(net.statuses(&b), [(11, Status::Success)]);
    assert_eq!(net.statuses(&a), [(1, Status::Success), (2, Status::Success)]);
}

#[test]
fn resetting_the_requester_waits() {
    let (mut net, a, b) = under_way(Op::Send);
    refused(net.to(&a, QpState::Reset));
    net.settle();
    assert_eq!(net.to(&a, QpState::Reset), Ok(QpState::Reset));
    net.world.sends.clear();
    net.connect(&a, &b);
    net.post_send(&a, request(3, Op::Send, &[a.sge(0, 8)]));
    net.settle();
    assert_eq!(net.statuses(&a), [(3, Status::Success)]);
    assert_eq!(net.statuses(&b), [(10, Status::Success)], "the RECV that was claimed before");
}

#[test]
fn error_of_the_requester_flushes_after_the_landing() {
    let (mut net, a, b) = under_way(Op::Send);
    refused(net.to(&a, QpState::Error));
    assert_eq!(net.state(&a), QpState::Error);
    net.work();
    assert!(net.polls(&a).is_empty(), "its buffers are still in use");
    net.settle();
    assert_eq!(net.to(&a, QpState::Error), Ok(QpState::Error));
    assert_eq!(net.statuses(&a), [(1, Status::WorkRequestFlushed), (2, Status::WorkRequestFlushed)]);
    assert!(net.polls(&b).is_empty());
}

#[test]
fn error_of_the_responder_flushes_after_the_landing() {
    let (mut net, a, b) = under_way(Op::Send);
    refused(net.to(&b, QpState::Error));
    net.work();
    assert!(net.polls(&b).is_empty(), "its buffers are still in use");
    net.settle();
    assert_eq!(net.to(&b, QpState::Error), Ok(QpState::Error));
    assert_eq!(net.statuses(&b), [(10, Status::WorkRequestFlushed), (11, Status::WorkRequestFlushed)]);
    while net.expire() {}
    assert_eq!(net.statuses(&a)[0], (1, Status::RetryExceeded));
}

#[test]
fn deregistering_waits_and_the_key_is_invalid_at_once() {
    for local in [true, false] {
        let (mut net, a, b) = under_way(Op::RdmaWrite);
        let end = if local { a } else { b };
        let deregister = |net: &mut Net| net.engine.deregister_mr(end.session, end.mr);
        assert_eq!(deregister(&mut net), Err(Refusal::InFlight));
        net.land(0);
        assert_eq!(deregister(&mut net), Ok(()));
        assert_eq!(deregister(&mut net), Err(Refusal::Error(VerbsError::NotFound)));
        net.settle();
        let next = if local { Status::LocalProtectionError } else { Status::RemoteAccessError };
        assert_eq!(net.statuses(&a), [(1, Status::Success), (2, next)]);
    }
}

#[test]
fn the_responders_process_dies() {
    for opcode in [Op::Send, Op::RdmaWrite, Op::RdmaRead, Op::FetchAdd] {
        let (mut net, a, b) = under_way(opcode);
        let (token, _) = net.world.pending.pop().unwrap();
        net.engine.destroy_session(&mut net.world, net.now, b.session);
        // A helper may have its hand in this memory still.
        assert_eq!((net.engine.copies_in_flight(a.session), net.engine.copies_in_flight(b.session)), (1, 0));
        assert_eq!(net.to(&a, QpState::Reset), Err(Refusal::InFlight));
        net.engine.handle_copied(&mut net.world, net.now, token, Ok(()));
        net.engine.handle_atomic_done(&mut net.world, net.now, token, Ok(0));
        assert_eq!(net.to(&a, QpState::Reset), Ok(QpState::Reset));
    }
    for opcode in [Op::Send, Op::RdmaWrite, Op::RdmaRead, Op::FetchAdd] {
        let (mut net, a, b) = under_way(opcode);
        let (token, _) = net.world.pending.pop().unwrap();
        net.engine.destroy_session(&mut net.world, net.now, b.session);
        net.engine.handle_copied(&mut net.world, net.now, token, Ok(()));
        net.engine.handle_atomic_done(&mut net.world, net.now, token, Ok(0));
        net.settle();
        assert!(net.polls(&a).is_empty());
        while net.expire() {}
        assert_eq!(net.statuses(&a), [(1, Status::RetryExceeded), (2, Status::WorkRequestFlushed)]);
        net.engine.deregister_mr(a.session, a.mr).unwrap();
        net.engine.destroy_qp(&mut net.world, net.now, a.session, a.qp).unwrap();
    }
}

#[test]
fn the_requesters_process_dies() {
    let (mut net, a, b) = under_way(Op::Send);
    let (token, _) = net.world.pending.pop().unwrap();
    net.engine.destroy_session(&mut net.world, net.now, a.session);
    // The copy may still write: its memory stays registered, its RECV is nobody else's.
    assert_eq!(net.engine.deregister_mr(b.session, b.mr), Err(Refusal::InFlight));
    assert_eq!(net.to(&b, QpState::Error), Err(Refusal::InFlight));
    assert!(net.polls(&b).is_empty());
    net.engine.handle_copied(&mut net.world, net.now, token, Ok(()));
    net.engine.deregister_mr(b.session, b.mr).unwrap();
    net.to(&b, QpState::Error).unwrap();
    assert_eq!(net.statuses(&b), [(10, Status::WorkRequestFlushed), (11, Status::WorkRequestFlushed)]);
}

#[test]
fn an_error_from_the_other_direction_while_a_copy_is_under_way() {
    let (mut net, a, b) = under_way(Op::RdmaWrite);
    // `b` sends what `a` can't take: `a` goes to ERROR as a responder.
    net.post_receive(&a, 20, &[a.sge(0, 1)]);
    net.post_send(&b, request(30, Op::Send, &[b.sge(0, 8)]));
    net.work();
    assert_eq!(net.state(&a), QpState::Error);
    assert_eq!(net.statuses(&a), [(20, Status::LocalLengthError)]);
    assert_eq!(net.statuses(&b)[0], (30, Status::RemoteInvalidRequest));
    net.settle();
    let flushed = Status::WorkRequestFlushed;
    assert_eq!(net.statuses(&a), [(1, flushed), (2, flushed)]);
}

/// No bytes of the last datagram come late to the next one.
#[test]
fn a_receive_is_put_back_after_the_last_copy_into_it() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Ud);
    net.world.always_put_off = true;
    net.post_receive(&b, 9, &[b.sge(0, 128)]);
    net.post_receive(&b, 10, &[b.sge(0, 128)]);
    assert_eq!(net.engine.receive_in_hand(b.qp), None);
    let address_handle = net.engine.create_ah(a.session, a.pd, &address(b.gid)).unwrap().index;
    let message = request(1, Op::Send, &[a.sge(4096, 16)]);
    let message = SendRequest { address_handle, remote_qpn: b.qpn.0, remote_qkey: 0x1234, ..message };
    net.post_send(&a, message);
    net.work();
    assert_eq!((net.world.pending.len(), net.engine.receive_in_hand(b.qp)), (1, Some(0)));
    net.engine.destroy_session(&mut net.world, net.now, a.session);
    net.work();
    assert_eq!((net.world.put_back.len(), net.engine.receive_in_hand(b.qp)), (0, Some(0)));
    let (token, _) = net.world.pending.pop().unwrap();
    net.engine.handle_copied(&mut net.world, net.now, token, Err(MemorySide::Source));
    net.settle();
    assert_eq!(net.world.put_back, [(b.qp, Some(b.cq), 0)]);
    assert!(net.polls(&b).is_empty());
}
