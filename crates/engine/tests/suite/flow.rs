//! Cases that are neither a status nor a random run: the other services, draining, shared queues,
//! events, budgets, loopback.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

use AsyncEventKind as Event;
use CompletionStatus as Status;
use SendOpcode as Op;

// ---- UC

#[test]
fn uc_delivers_sends_and_writes() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Uc);
    net.world.bytes(a.session, MEMORY_BASE, 4).copy_from_slice(b"data");
    net.post_receive(&b, 1, &[b.sge(0, 4)]);
    net.post_receive(&b, 2, &[]);
    net.post_send(&a, request(1, Op::Send, &[a.sge(0, 4)]));
    net.post_send(&a, remote(2, Op::RdmaWriteWithImmediate, &[a.sge(0, 4)], &b, 8));
    net.settle();
    assert_eq!(net.statuses(&a), [(1, Status::Success), (2, Status::Success)]);
    assert_eq!(net.statuses(&b), [(1, Status::Success), (2, Status::Success)]);
    assert_eq!(net.world.bytes(b.session, MEMORY_BASE, 12), b"data\0\0\0\0data");
}

#[test]
fn uc_faults_of_the_other_side_are_not_seen() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Uc);
    // No RECV, a bad key, a forbidden range: all succeed, nothing arrives.
    net.post_send(&a, request(1, Op::Send, &[a.sge(0, 4)]));
    net.post_send(&a, SendRequest { rkey: b.key ^ 1, ..remote(2, Op::RdmaWrite, &[a.sge(0, 4)], &b, 0) });
    net.settle();
    // A RECV that is too short stays for the next message.
    net.post_receive(&b, 7, &[b.sge(0, 4)]);
    net.post_send(&a, request(3, Op::Send, &[a.sge(0, 5)]));
    net.post_send(&a, request(4, Op::Send, &[a.sge(0, 4)]));
    net.settle();
    assert!(net.statuses(&a).iter().all(|(_, status)| *status == Status::Success));
    assert_eq!(net.statuses(&b), [(7, Status::Success)]);
    net.engine.destroy_qp(&mut net.world, net.now, b.session, b.qp).unwrap();
    net.post_send(&a, request(5, Op::Send, &[a.sge(0, 4)]));
    net.settle();
    assert_eq!(net.only(&a).status, Status::Success);
    assert_eq!(net.engine.vnic_counters(a.vnic).unwrap().undeliverable, 1);
}

#[test]
fn uc_own_receive_fault_stops_the_receiver_only() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Uc);
    net.post_receive(&b, 7, &[Sge { lkey: b.key ^ 1, ..b.sge(0, 4) }]);
    net.post_send(&a, request(1, Op::Send, &[a.sge(0, 4)]));
    net.settle();
    assert_eq!(net.only(&a).status, Status::Success);
    assert_eq!(net.only(&b).status, Status::LocalProtectionError);
    assert_eq!((net.state(&a), net.state(&b)), (QpState::ReadyToSend, QpState::Error));
}

#[test]
fn uc_own_faults_lead_to_sqe_and_back() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Uc);
    net.post_send(&a, request(1, Op::RdmaRead, &[a.sge(0, 4)]));
    net.post_send(&a, request(2, Op::Send, &[a.sge(0, 4)]));
    net.settle();
    assert_eq!(net.statuses(&a), [(1, Status::LocalQpOperationError), (2, Status::WorkRequestFlushed)]);
    assert_eq!(net.state(&a), QpState::SqError);
    net.post_send(&a, SendRequest { flags: SendFlags(0), ..request(3, Op::Send, &[]) });
    net.settle();
    assert_eq!(net.statuses(&a), [(3, Status::WorkRequestFlushed)]);
    // It still receives.
    net.post_receive(&a, 9, &[]);
    net.post_send(&b, request(1, Op::Send, &[]));
    net.settle();
    assert_eq!(net.statuses(&a), [(9, Status::Success)]);
    net.to(&a, QpState::ReadyToSend).unwrap();
    net.post_send(&a, request(4, Op::Send, &[a.sge(0, 4)]));
    net.settle();
    assert_eq!(net.statuses(&a), [(4, Status::Success)]);
}

// ---- UD

fn datagram(net: &mut Net, a: &End, b: &End, id: u64, sges: &[Sge]) -> SendRequest {
    let handle = net.engine.create_ah(a.session, a.pd, &address(b.gid)).unwrap();
    SendRequest {
        address_handle: handle.index,
        remote_qpn: b.qpn.0,
        remote_qkey: 0x1234,
        ..request(id, Op::Send, sges)
    }
}

#[test]
fn ud_delivers_with_grh() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Ud);
    net.world.bytes(a.session, MEMORY_BASE, 4).copy_from_slice(b"data");
    net.post_receive(&b, 7, &[b.sge(0, 100)]);
    let send = datagram(&mut net, &a, &b, 1, &[a.sge(0, 4)]);
    net.post_send(&a, SendRequest { opcode: Op::SendWithImmediate, immediate: 9, ..send });
    net.settle();
    assert_eq!(net.only(&a).status, Status::Success);
    let received = net.only(&b);
    assert_eq!((received.byte_count, received.source_qpn, received.immediate), (44, a.qpn.0, 9));
    assert_eq!(received.flags.0, CompletionFlags::GRH | CompletionFlags::WITH_IMMEDIATE);
    let bytes = net.world.bytes(b.session, MEMORY_BASE, 45).to_vec();
    assert_eq!((&bytes[..20], bytes[20]), (&[0; 20][..], 0x45));
    assert_eq!(bytes[32..40], [10, 0, 0, 1, 10, 0, 0, 2]);
    assert_eq!(bytes[40..], *b"data\0");
}

#[test]
fn ud_without_bytes_still_brings_the_grh() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Ud);
    net.post_receive(&b, 7, &[b.sge(0, 40)]);
    let send = datagram(&mut net, &a, &b, 1, &[]);
    net.post_send(&a, send);
    net.settle();
    assert_eq!(net.only(&b).byte_count, 40);
}

/// A receiver at work gets a moment for its next RECV; one that does not receive makes nobody wait.
#[test]
fn ud_waits_a_moment_for_a_receiver_at_work() {
    for qp_type in [QpType::Ud, QpType::Uc] {
        let mut net = Net::new();
        let (a, b) = net.pair(qp_type);
        let send = |net: &mut Net, id| {
            let request = match qp_type {
                QpType::Ud => datagram(net, &a, &b, id, &[a.sge(0, 8)]),
                _ => request(id, Op::Send, &[a.sge(0, 8)]),
            };
            net.post_send(&a, request);
            net.settle();
        };
        net.post_receive(&b, 7, &[b.sge(0, 64)]);
        send(&mut net, 1);
        assert_eq!((net.statuses(&a), net.statuses(&b)), (vec![(1, Status::Success)], vec![(7, Status::Success)]));
        send(&mut net, 2);
        assert_eq!(net.statuses(&a), []);
        assert!(net.expire());
        assert_eq!(net.statuses(&a), []);
        net.post_receive(&b, 8, &[b.sge(0, 64)]);
        assert!(net.expire());
        assert_eq!((net.statuses(&a), net.statuses(&b)), (vec![(2, Status::Success)], vec![(8, Status::Success)]));
        // No RECV comes: after twenty milliseconds the message is gone.
        let begun = net.now;
        send(&mut net, 3);
        while net.expire() {}
        assert_eq!((net.statuses(&a), net.statuses(&b)), (vec![(3, Status::Success)], vec![]));
        assert_eq!(net.now - begun, Duration::from_millis(20));
        // A tenth of a second after its last RECV nobody waits for it.
        net.now = net.now + Duration::from_millis(80);
        send(&mut net, 4);
        assert_eq!(net.statuses(&a), [(4, Status::Success)]);
    }
}

#[test]
fn ud_drops_quietly() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Ud);
    let mut id = 0;
    let mut send = |net: &mut Net, edit: &dyn Fn(&mut SendRequest)| {
        id += 1;
        let mut request = datagram(net, &a, &b, id, &[a.sge(0, 8)]);
        edit(&mut request);
        net.post_send(&a, request);
        net.settle();
        assert_eq!(net.statuses(&a), [(id, Status::Success)]);
        net.statuses(&b)
    };
    assert_eq!(send(&mut net, &|_| {}), [], "no RECV");
    net.post_receive(&b, 7, &[b.sge(0, 47)]);
    assert_eq!(send(&mut net, &|_| {}), [], "too short: it stays");
    assert_eq!(send(&mut net, &|request| request.remote_qkey = 1), [], "wrong Q_Key");
    assert_eq!(send(&mut net, &|request| request.remote_qpn ^= 1), [], "no such QP");
    // The high bit takes the QP's own Q_Key.
    let shorter = |request: &mut SendRequest| {
        request.remote_qkey = 0x8000_0001;
        request.sges[0].length = 7;
    };
    assert_eq!(send(&mut net, &shorter), [(7, Status::Success)]);
}

#[test]
fn ud_too_long_for_an_srq_entry_completes_it() {
    let mut net = Net::new();
    let (a, b) = (net.end(QpType::Ud), net.end_with(QpType::Ud, true));
    net.connect(&a, &b);
    net.connect(&b, &a);
    net.post_receive(&b, 7, &[b.sge(0, 47)]);
    let send = datagram(&mut net, &a, &b, 1, &[a.sge(0, 8)]);
    net.post_send(&a, send);
    net.settle();
    assert_eq!(net.only(&a).status, Status::Success);
    assert_eq!(net.statuses(&b), [(7, Status::RemoteInvalidRequest)]);
    assert_eq!(net.state(&b), QpState::ReadyToSend);
}

#[test]
fn ud_own_faults() {
    type Case = fn(&mut Net, &End, &End) -> SendRequest;
    let cases: [(Status, Case); 5] = [
        (Status::LocalLengthError, |net, a, b| datagram(net, a, b, 1, &[a.sge(0, 4097)])),
        (Status::LocalQpOperationError, |net, a, b| SendRequest {
            opcode: Op::RdmaWrite,
            ..datagram(net, a, b, 1, &[])
        }),
        (Status::LocalQpOperationError, |net, a, b| SendRequest { address_handle: 999, ..datagram(net, a, b, 1, &[]) }),
        (Status::LocalQpOperationError, |net, a, b| {
            let pd = net.engine.alloc_pd(a.session, a.context).unwrap();
            let handle = net.engine.create_ah(a.session, pd, &address(b.gid)).unwrap();
            SendRequest { address_handle: handle.index, ..datagram(net, a, b, 1, &[]) }
        }),
        (Status::LocalProtectionError, |net, a, b| datagram(net, a, b, 1, &[Sge { lkey: a.key ^ 1, ..a.sge(0, 4) }])),
    ];
    for (status, case) in cases {
        let mut net = Net::new();
        let (a, b) = net.pair(QpType::Ud);
        let bad = case(&mut net, &a, &b);
        net.post_send(&a, bad);
        net.settle();
        assert_eq!(net.statuses(&a), [(1, status)]);
        assert_eq!(net.state(&a), QpState::SqError);
    }
}

#[test]
fn ud_senders_take_turns_at_a_receiver_whose_copy_is_under_way() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Ud);
    let c = net.end(QpType::Ud);
    net.connect(&c, &b);
    net.world.always_put_off = true;
    for id in 0..4 {
        net.post_receive(&b, id, &[b.sge(id * 100, 100)]);
    }
    for sender in [&a, &c] {
        for id in 0..2 {
            let send = datagram(&mut net, sender, &b, id, &[sender.sge(0, 4)]);
            net.post_send(sender, send);
        }
    }
    net.settle();
    assert_eq!(net.statuses(&b), (0..4).map(|id| (id, Status::Success)).collect::<Vec<_>>());
    assert_eq!((net.polls(&a).len(), net.polls(&c).len()), (2, 2));
}

// ---- SQD

#[test]
fn drained_at_once() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let attributes = QpAttributes { state: QpState::SqDrain, enable_sqd_async_notify: true, ..Default::default() };
    net.modify(&a, &attributes, QpAttributeMask::STATE | QpAttributeMask::EN_SQD_ASYNC_NOTIFY).unwrap();
    assert_eq!(net.world.saw(Event::SqDrained, EventTarget::Qp(a.qp)), 1);
    net.post_send(&a, remote(1, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0));
    net.settle();
    assert!(net.polls(&a).is_empty(), "posted sends wait");
    net.to(&a, QpState::ReadyToSend).unwrap();
    net.settle();
    assert_eq!(net.only(&a).status, Status::Success);
}

#[test]
fn drained_when_the_request_in_hand_is_over() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.post_send(&a, request(1, Op::Send, &[]));
    net.post_send(&a, request(2, Op::Send, &[]));
    net.settle();
    let attributes = QpAttributes { state: QpState::SqDrain, enable_sqd_async_notify: true, ..Default::default() };
    net.modify(&a, &attributes, QpAttributeMask::STATE | QpAttributeMask::EN_SQD_ASYNC_NOTIFY).unwrap();
    assert!(net.engine.query_qp(a.session, a.qp).unwrap().sq_draining);
    assert!(net.to(&a, QpState::ReadyToSend).is_err(), "not before it is drained");
    assert_eq!(net.world.saw(Event::SqDrained, EventTarget::Qp(a.qp)), 0);
    net.post_receive(&b, 1, &[]);
    net.post_receive(&b, 2, &[]);
    net.settle();
    assert_eq!(net.statuses(&a), [(1, Status::Success)]);
    assert_eq!(net.world.saw(Event::SqDrained, EventTarget::Qp(a.qp)), 1);
    assert!(!net.engine.query_qp(a.session, a.qp).unwrap().sq_draining);
    net.to(&a, QpState::ReadyToSend).unwrap();
    net.settle();
    assert_eq!(net.statuses(&a), [(2, Status::Success)]);
}

// ---- SRQ

#[test]
fn srq_limit_is_notified_once_for_each_arming() {
    let mut net = Net::new();
    let (a, b) = (net.end(QpType::Rc), net.end_with(QpType::Rc, true));
    net.connect(&a, &b);
    net.connect(&b, &a);
    let srq = b.srq.unwrap();
    let reported = |net: &Net| net.world.saw(Event::SrqLimitReached, EventTarget::Srq(srq));
    for id in 0..4 {
        net.post_receive(&b, id, &[b.sge(0, 8)]);
    }
    net.engine.modify_srq(&mut net.world, b.session, srq, 3).unwrap();
    assert_eq!((reported(&net), net.engine.query_srq(b.session, srq).unwrap().limit), (0, 3));
    for (id, expected) in [(0, 0), (1, 1), (2, 1)] {
        net.post_send(&a, request(id, Op::Send, &[a.sge(0, 8)]));
        net.settle();
        assert_eq!(reported(&net), expected);
    }
    assert_eq!(net.engine.query_srq(b.session, srq).unwrap().limit, 0);
    net.engine.modify_srq(&mut net.world, b.session, srq, 2).unwrap();
    assert_eq!(reported(&net), 2, "already below when armed");
    let too_much = net.engine.modify_srq(&mut net.world, b.session, srq, 65);
    assert_eq!(too_much, Err(VerbsError::InvalidArgument));
}

#[test]
fn srq_qp_in_error_reports_its_last_request() {
    let mut net = Net::new();
    let (a, b) = (net.end(QpType::Rc), net.end_with(QpType::Rc, true));
    net.connect(&a, &b);
    net.connect(&b, &a);
    net.post_receive(&b, 1, &[b.sge(0, 8)]);
    net.to(&b, QpState::Error).unwrap();
    net.settle();
    assert_eq!(net.world.saw(Event::QpLastWqeReached, EventTarget::Qp(b.qp)), 1);
    assert!(net.polls(&b).is_empty(), "what is in the SRQ stays there");
    net.to(&b, QpState::Error).unwrap();
    assert_eq!(net.world.saw(Event::QpLastWqeReached, EventTarget::Qp(b.qp)), 1);
}

#[test]
fn srq_gets_back_what_a_queue_pair_had_in_hand() {
    for is_reset in [true, false] {
        let mut net = Net::new();
        let (a, b) = (net.end(QpType::Rc), net.end_with(QpType::Rc, true));
        net.connect(&a, &b);
        net.connect(&b, &a);
        let bytes = MEMORY_BYTES as u32;
        net.post_receive(&b, 7, &[b.sge(0, bytes)]);
        net.world.always_put_off = true;
        net.post_send(&a, request(1, Op::Send, &[a.sge(0, bytes)]));
        net.work();
        assert_eq!(net.world.pending.len(), 1, "the first piece");
        // The sender goes in the middle of it.
        let _ = net.to(&a, QpState::Error);
        net.settle();
        assert!(net.polls(&b).is_empty());
        if is_reset {
            net.to(&b, QpState::Reset).unwrap();
        } else {
            net.engine.destroy_qp(&mut net.world, net.now, b.session, b.qp).unwrap();
        }
        assert_eq!(net.statuses(&b), [(7, Status::WorkRequestFlushed)], "else there is no room for another for ever");
    }
}

#[test]
fn srq_wakes_all_that_wait() {
    let mut net = Net::new();
    let b = net.end_with(QpType::Rc, true);
    let senders: Vec<End> = (0..3).map(|_| net.end(QpType::Rc)).collect();
    let mut ends = Vec::new();
    for a in &senders {
        let mut own = b;
        (own.qp, own.qpn) = net.qp(&b, QpType::Rc);
        net.connect(a, &own);
        net.connect(&own, a);
        net.post_send(a, request(1, Op::Send, &[a.sge(0, 8)]));
        ends.push(own);
    }
    net.settle();
    assert!(net.world.wanted.contains(&b.receive_queue()));
    // One waiter goes away first.
    net.engine.destroy_qp(&mut net.world, net.now, senders[1].session, senders[1].qp).unwrap();
    for id in 0..2 {
        net.post_receive(&b, id, &[b.sge(0, 8)]);
    }
    net.settle();
    assert_eq!(net.statuses(&b).len(), 2);
    for a in [&senders[0], &senders[2]] {
        assert_eq!(net.only(a).status, Status::Success);
    }
    assert!(net.world.wanted.is_empty());
}

#[test]
fn srq_wake_up_in_vain_costs_no_retry() {
    let mut net = Net::new();
    let b = net.end_with(QpType::Rc, true);
    let senders: Vec<End> = (0..6).map(|_| net.end(QpType::Rc)).collect();
    for a in &senders {
        let mut own = b;
        (own.qp, own.qpn) = net.qp(&b, QpType::Rc);
        net.connect(a, &own);
        net.connect(&own, a);
        net.post_send(a, request(1, Op::Send, &[a.sge(0, 8)]));
    }
    net.settle();
    for id in 0..6 {
        net.post_receive(&b, id, &[b.sge(0, 8)]);
        net.settle();
    }
    assert_eq!(net.statuses(&b), (0..6).map(|id| (id, Status::Success)).collect::<Vec<_>>());
    for a in &senders {
        assert_eq!(net.only(a).status, Status::Success);
    }
}

// ---- events, loopback, budgets

#[test]
fn communication_is_established_once() {
    let mut net = Net::new();
    let (a, b) = (net.end(QpType::Rc), net.end(QpType::Rc));
    net.connect(&a, &b);
    net.init(&b);
    net.rtr(&b, &a);
    for id in 0..2 {
        net.post_receive(&b, id, &[]);
        net.post_send(&a, request(id, Op::Send, &[]));
    }
    net.settle();
    assert_eq!(net.statuses(&b).len(), 2, "a QP in RTR receives");
    assert_eq!(net.world.saw(Event::CommunicationEstablished, EventTarget::Qp(b.qp)), 1);
}

#[test]
fn a_qp_connected_to_itself() {
    for put_off in [false, true] {
        let mut net = Net::new();
        net.world.always_put_off = put_off;
        let a = net.end(QpType::Rc);
        net.connect(&a, &a);
        net.world.bytes(a.session, MEMORY_BASE, 4).copy_from_slice(b"self");
        net.post_receive(&a, 7, &[a.sge(100, 4)]);
        net.post_send(&a, request(1, Op::Send, &[a.sge(0, 4)]));
        net.post_send(&a, remote(2, Op::RdmaWrite, &[a.sge(0, 4)], &a, 200));
        net.post_send(&a, SendRequest { compare_add: 1, ..remote(3, Op::FetchAdd, &[a.sge(304, 8)], &a, 296) });
        net.settle();
        let expected = [7, 1, 2, 3].map(|id| (id, Status::Success));
        assert_eq!(net.statuses(&a), expected);
        assert_eq!(net.world.bytes(a.session, MEMORY_BASE + 100, 4), b"self");
        assert_eq!(net.world.bytes(a.session, MEMORY_BASE + 200, 4), b"self");
        // An error on both of its sides at once.
        net.post_receive(&a, 8, &[a.sge(100, 1)]);
        net.post_receive(&a, 9, &[]);
        net.post_send(&a, request(4, Op::Send, &[a.sge(0, 4)]));
        net.post_send(&a, request(5, Op::Send, &[a.sge(0, 4)]));
        net.settle();
        let mut found = net.statuses(&a);
        found.sort_unstable_by_key(|(id, _)| *id);
        let flushed = Status::WorkRequestFlushed;
        assert_eq!(
            found,
            [(4, Status::RemoteInvalidRequest), (5, flushed), (8, Status::LocalLengthError), (9, flushed)]
        );
    }
}

#[test]
fn two_qps_of_one_process() {
    let mut net = Net::new();
    let a = net.end(QpType::Rc);
    let mut b = a;
    (b.qp, b.qpn) = net.qp(&a, QpType::Rc);
    net.connect(&a, &b);
    net.connect(&b, &a);
    net.post_receive(&b, 7, &[b.sge(100, 8)]);
    net.post_send(&a, request(1, Op::Send, &[a.sge(0, 8)]));
    net.settle();
    assert_eq!(net.statuses(&a), [(7, Status::Success), (1, Status::Success)]);
}

#[test]
fn long_messages_move_in_chunks_within_the_budget() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    for (place, byte) in net.world.bytes(a.session, MEMORY_BASE, 1 << 20).iter_mut().enumerate() {
        *byte = (place / 7) as u8;
    }
    net.post_send(&a, remote(1, Op::RdmaWrite, &[a.sge(0, 300_000), a.sge(300_000, 748_576)], &b, 5));
    let mut turns = 0;
    while net.engine.run(&mut net.world, net.now, a.qp, 200_000) == Progress::More {
        turns += 1;
        assert!(net.world.copies <= turns);
    }
    assert_eq!((net.world.copies, net.world.largest_copy), (4, CHUNK_BYTES_MAX));
    assert_eq!(net.only(&a).status, Status::Success);
    let sent = net.world.bytes(a.session, MEMORY_BASE, 1 << 20).to_vec();
    assert!(net.world.bytes(b.session, MEMORY_BASE + 5, 1 << 20) == sent);
}

#[test]
fn one_turn_takes_a_bounded_number_of_requests() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    for id in 0..150 {
        net.post_send(&a, remote(id, Op::RdmaWrite, &[], &b, 0));
    }
    let mut counts = Vec::new();
    while net.engine.run(&mut net.world, net.now, a.qp, u64::MAX) == Progress::More {
        counts.push(net.polls(&a).len());
    }
    counts.push(net.polls(&a).len());
    assert_eq!(counts, [64, 64, 22]);
}

#[test]
fn a_key_that_goes_invalid_stops_a_long_message() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.post_send(&a, remote(1, Op::RdmaWrite, &[a.sge(0, 1 << 20)], &b, 0));
    assert_eq!(net.engine.run(&mut net.world, net.now, a.qp, 1), Progress::More);
    net.engine.deregister_mr(b.session, b.mr).unwrap();
    net.settle();
    assert_eq!(net.statuses(&a), [(1, Status::RemoteAccessError)]);
    assert_eq!(net.world.copies, 1);
    assert_eq!(net.state(&b), QpState::Error);
}

#[test]
fn counters_count() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    for id in 0..3 {
        net.post_send(&a, remote(id, Op::RdmaWrite, &[a.sge(0, 1000)], &b, 0));
    }
    net.settle();
    let counters = net.engine.vnic_counters(a.vnic).unwrap();
    assert_eq!((counters.messages, counters.bytes, counters.completions_with_error), (3, 3000, 0));
}

#[test]
fn ports_count_what_a_wire_would_carry() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let mtu = net.engine.query_qp(a.session, a.qp).unwrap().path_mtu.bytes();
    let traffic = |bytes, packets| Traffic { bytes, packets, multicast_packets: 0 };
    net.post_receive(&b, 1, &[b.sge(0, 4000)]);
    net.post_send(&a, request(1, Op::Send, &[a.sge(0, mtu + 1)]));
    net.post_send(&a, remote(2, Op::RdmaWrite, &[a.sge(0, 0)], &b, 0));
    net.settle();
    let (one, other) = (net.engine.vnic_counters(a.vnic).unwrap(), net.engine.vnic_counters(b.vnic).unwrap());
    let (bytes, packets) = (u64::from(mtu) + 1, 3);
    assert_eq!((one.sent, one.received), (traffic(bytes, packets), traffic(0, 0)));
    assert_eq!((other.sent, other.received), (traffic(0, 0), traffic(bytes, packets)));
    assert_eq!((other.writes_received, other.reads_received, other.atomics_received), (1, 0, 0));
    // The data of a READ and of an atomic comes back.
    net.post_send(&a, remote(3, Op::RdmaRead, &[a.sge(0, mtu)], &b, 0));
    net.post_send(&a, remote(4, Op::FetchAdd, &[a.sge(0, 8)], &b, 0));
    net.settle();
    assert_eq!(net.statuses(&a).len(), 4);
    let (one, other) = (net.engine.vnic_counters(a.vnic).unwrap(), net.engine.vnic_counters(b.vnic).unwrap());
    assert_eq!((one.sent, one.received), (traffic(bytes, packets + 2), traffic(u64::from(mtu) + 8, 2)));
    assert_eq!((other.sent, other.received), (one.received, one.sent));
    assert_eq!((other.writes_received, other.reads_received, other.atomics_received), (1, 1, 1));
}

#[test]
fn ports_count_what_libraries_say() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let direct = DirectTraffic {
        sends: 1,
        writes: 2,
        sent_bytes: 3000,
        sent_packets: 5,
        reads: 7,
        atomics: 4,
        read_bytes: 70_032,
        read_packets: 74,
    };
    net.engine.count_direct(a.vnic, b.vnic, &direct);
    let (one, other) = (net.engine.vnic_counters(a.vnic).unwrap(), net.engine.vnic_counters(b.vnic).unwrap());
    let traffic = |bytes, packets| Traffic { bytes, packets, multicast_packets: 0 };
    assert_eq!((one.messages, one.bytes, one.direct_messages, one.direct_bytes), (14, 73_032, 14, 73_032));
    assert_eq!((one.sent, one.received), (traffic(3000, 5 + 7 + 4), traffic(70_032, 74)));
    assert_eq!((other.sent, other.received), (one.received, one.sent));
    assert_eq!((other.messages, other.writes_received, other.reads_received, other.atomics_received), (0, 2, 7, 4));
    // Nonsense stops where what the engine counts itself still fits.
    let much = DirectTraffic { sends: u64::MAX, sent_bytes: u64::MAX, sent_packets: u64::MAX, ..direct };
    for _ in 0..3 {
        net.engine.count_direct(a.vnic, b.vnic, &much);
    }
    net.post_send(&a, remote(1, Op::RdmaWrite, &[a.sge(0, 1000)], &b, 0));
    net.settle();
    let one = net.engine.vnic_counters(a.vnic).unwrap();
    assert_eq!((one.messages, one.bytes), ((1 << 63) + 1, (1 << 63) + 1000));
}
