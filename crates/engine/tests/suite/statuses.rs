//! Every completion status, by name, with what happens to both QPs.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

use AsyncEventKind as Event;
use CompletionStatus as Status;
use SendOpcode as Op;

/// A pair of RC QPs; one bad request goes from `a` to `b`. Gives the status of the request.
fn bad_request(prepare: impl FnOnce(&mut Net, &End, &End) -> SendRequest) -> (Net, End, End, Status) {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let request = prepare(&mut net, &a, &b);
    let id = request.work_request_id;
    net.post_send(&a, request);
    net.post_send(&a, SendRequest { flags: SendFlags(0), ..remote(99, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0) });
    net.settle();
    let sent: Vec<_> = net.polls(&a);
    assert_eq!(sent[0].work_request_id, id);
    assert!(sent[0].flags.contains(CompletionFlags::SOLICITED));
    assert_ne!(sent[0].vendor_error, 0);
    assert_eq!((sent[1].work_request_id, sent[1].status), (99, Status::WorkRequestFlushed), "even unsignaled");
    assert_eq!(net.state(&a), QpState::Error);
    (net, a, b, sent[0].status)
}

#[test]
fn success_with_data_and_immediate() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.world.bytes(a.session, MEMORY_BASE, 5).copy_from_slice(b"hello");
    net.post_receive(&b, 5, &[b.sge(100, 3), b.sge(200, 10)]);
    let send = SendRequest { immediate: 0xaabb, ..request(4, Op::SendWithImmediate, &[a.sge(0, 5)]) };
    net.post_send(&a, SendRequest { flags: SendFlags(SendFlags::SIGNALED | SendFlags::SOLICITED), ..send });
    net.settle();
    let (sent, received) = (net.only(&a), net.only(&b));
    assert_eq!((sent.status, sent.opcode, sent.qp_cookie), (Status::Success, CompletionOpcode::Send, 77));
    assert!(sent.flags.contains(CompletionFlags::SEND_QUEUE) && !sent.flags.contains(CompletionFlags::SOLICITED));
    assert_eq!((received.work_request_id, received.opcode), (5, CompletionOpcode::Receive));
    assert_eq!((received.byte_count, received.immediate, received.qpn), (5, 0xaabb, b.qpn.0));
    assert_eq!(received.flags.0, CompletionFlags::WITH_IMMEDIATE | CompletionFlags::SOLICITED);
    assert_eq!(net.world.bytes(b.session, MEMORY_BASE + 100, 3), b"hel");
    assert_eq!(net.world.bytes(b.session, MEMORY_BASE + 200, 2), b"lo");
}

#[test]
fn success_write_read_and_atomics() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.world.bytes(a.session, MEMORY_BASE, 8).copy_from_slice(&7u64.to_ne_bytes());
    net.post_receive(&b, 1, &[]);
    net.post_send(&a, remote(1, Op::RdmaWriteWithImmediate, &[a.sge(0, 8)], &b, 64));
    let swap = SendRequest { compare_add: 7, swap: 40, ..remote(2, Op::CompareSwap, &[a.sge(8, 8)], &b, 64) };
    net.post_send(&a, swap);
    net.post_send(&a, SendRequest { compare_add: 2, ..remote(3, Op::FetchAdd, &[a.sge(16, 8)], &b, 64) });
    net.post_send(&a, remote(4, Op::RdmaRead, &[a.sge(24, 8)], &b, 64));
    net.settle();
    let sent = net.polls(&a);
    assert!(sent.iter().all(|completion| completion.status == Status::Success), "{sent:?}");
    assert_eq!(sent.iter().map(|completion| completion.byte_count).collect::<Vec<_>>(), [0, 8, 8, 8]);
    let received = net.only(&b);
    assert_eq!((received.opcode, received.byte_count), (CompletionOpcode::ReceiveRdmaWithImmediate, 8));
    let word = |net: &mut Net, offset| {
        u64::from_ne_bytes(net.world.bytes(a.session, MEMORY_BASE + offset, 8).try_into().unwrap())
    };
    assert_eq!([word(&mut net, 8), word(&mut net, 16), word(&mut net, 24)], [7, 40, 42]);
}

#[test]
fn success_is_quiet_when_unsignaled() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    for id in 0..3 {
        let flags = SendFlags(if id == 2 { SendFlags::SIGNALED } else { 0 });
        net.post_send(&a, SendRequest { flags, ..remote(id, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0) });
    }
    net.settle();
    assert_eq!(net.only(&a).ring_position, 2);
}

#[test]
fn success_with_inline_data_and_without_any() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let mut inline = remote(1, Op::RdmaWrite, &[], &b, 10);
    inline.flags.0 |= SendFlags::INLINE;
    inline.inline_length = 3;
    inline.inline_data[..3].copy_from_slice(b"abc");
    net.post_send(&a, inline);
    // No byte, no key: neither local nor remote.
    let nothing = Sge { address: 1, length: 0, lkey: 0xdead };
    net.post_send(&a, SendRequest { rkey: 0xbad, ..remote(2, Op::RdmaWrite, &[nothing], &b, 0) });
    net.post_send(&a, SendRequest { rkey: 0xbad, ..remote(3, Op::RdmaRead, &[nothing], &b, 0) });
    net.settle();
    assert!(net.statuses(&a).iter().all(|(_, status)| *status == Status::Success));
    assert_eq!(net.world.bytes(b.session, MEMORY_BASE + 10, 3), b"abc");
}

#[test]
fn local_protection_error_unknown_key() {
    let bad = |_: &mut Net, a: &End, b: &End| remote(1, Op::RdmaWrite, &[Sge { lkey: a.key ^ 1, ..a.sge(0, 8) }], b, 0);
    let (net, _, b, status) = bad_request(bad);
    assert_eq!(status, Status::LocalProtectionError);
    assert_eq!(net.state(&b), QpState::ReadyToSend, "the peer knows nothing");
}

#[test]
fn local_protection_error_range() {
    let bad = |_: &mut Net, a: &End, b: &End| {
        remote(1, Op::RdmaWrite, &[a.sge(0, 8), a.sge(MEMORY_BYTES as u64 - 4, 8)], b, 0)
    };
    assert_eq!(bad_request(bad).3, Status::LocalProtectionError);
}

#[test]
fn local_protection_error_read_into_read_only_memory() {
    for opcode in [Op::RdmaRead, Op::FetchAdd] {
        let (.., status) = bad_request(|net, a, b| {
            let iova = 0x5000;
            let keys = net.engine.register_mr(a.session, a.pd, MEMORY_BASE, 64, iova, Access(0)).unwrap();
            remote(1, opcode, &[Sge { address: iova, length: 8, lkey: keys.lkey }], b, 0)
        });
        assert_eq!(status, Status::LocalProtectionError);
    }
}

#[test]
fn local_protection_error_memory_gone() {
    let (.., status) = bad_request(|net, a, b| {
        net.world.gone.insert(a.session);
        remote(1, Op::RdmaWrite, &[a.sge(0, 8)], b, 0)
    });
    assert_eq!(status, Status::LocalProtectionError);
}

#[test]
fn local_length_error_message_over_two_gigabytes() {
    let (.., status) = bad_request(|net, a, b| {
        let keys = net.engine.register_mr(a.session, a.pd, 0, 1 << 40, 0, ALL_ACCESS).unwrap();
        let half = Sge { address: 0, length: 1 << 30, lkey: keys.lkey };
        remote(1, Op::RdmaWrite, &[half, half, Sge { length: 1, ..half }], b, 0)
    });
    assert_eq!(status, Status::LocalLengthError);
}

#[test]
fn local_length_error_atomic_result_too_short() {
    let (.., status) = bad_request(|_, a, b| remote(1, Op::FetchAdd, &[a.sge(0, 7)], b, 0));
    assert_eq!(status, Status::LocalLengthError);
}

#[test]
fn local_qp_operation_error_inline_read() {
    let (.., status) = bad_request(|_, _, b| {
        let read = remote(1, Op::RdmaRead, &[], b, 0);
        SendRequest { flags: SendFlags(SendFlags::SIGNALED | SendFlags::INLINE), inline_length: 8, ..read }
    });
    assert_eq!(status, Status::LocalQpOperationError);
}

#[test]
fn local_qp_operation_error_malformed_descriptor() {
    let (net, a, ..) = {
        let mut net = Net::new();
        let (a, b) = net.pair(QpType::Rc);
        net.post_send(&a, request(1, Op::Send, &[]));
        net.world.sends.get_mut(&a.qp).unwrap().malformed = true;
        net.settle();
        assert_eq!(net.statuses(&a), [(1, Status::LocalQpOperationError)]);
        (net, a, b)
    };
    assert_eq!(net.engine.vnic_counters(a.vnic).unwrap().malformed_descriptors, 1);
}

#[test]
fn remote_invalid_request_operation_not_enabled() {
    for opcode in [Op::RdmaWrite, Op::RdmaRead, Op::CompareSwap, Op::FetchAdd] {
        let (net, _, b, status) = bad_request(|net, a, b| {
            let attributes = QpAttributes { access: Access::LOCAL_WRITE, ..Default::default() };
            net.modify(b, &attributes, QpAttributeMask::ACCESS_FLAGS).unwrap();
            remote(1, opcode, &[a.sge(0, 8)], b, 0)
        });
        assert_eq!(status, Status::RemoteInvalidRequest);
        assert_eq!(net.state(&b), QpState::Error);
        assert_eq!(net.world.saw(Event::QpRequestError, EventTarget::Qp(b.qp)), 1);
    }
}

#[test]
fn remote_invalid_request_no_read_depth() {
    let (.., status) = bad_request(|net, a, b| {
        net.to(b, QpState::SqDrain).unwrap();
        let attributes = QpAttributes { max_dest_rd_atomic: 0, ..Default::default() };
        net.modify(b, &attributes, QpAttributeMask::MAX_DEST_RD_ATOMIC).unwrap();
        remote(1, Op::RdmaRead, &[a.sge(0, 8)], b, 0)
    });
    assert_eq!(status, Status::RemoteInvalidRequest);
}

#[test]
fn remote_invalid_request_misaligned_atomic() {
    let (.., status) = bad_request(|_, a, b| remote(1, Op::FetchAdd, &[a.sge(0, 8)], b, 4));
    assert_eq!(status, Status::RemoteInvalidRequest);
}

#[test]
fn remote_invalid_request_receive_too_short() {
    let (mut net, _, b, status) = bad_request(|net, a, b| {
        net.post_receive(b, 1, &[b.sge(0, 4)]);
        net.post_receive(b, 2, &[b.sge(0, 4)]);
        request(1, Op::Send, &[a.sge(0, 5)])
    });
    assert_eq!(status, Status::RemoteInvalidRequest);
    assert_eq!(net.statuses(&b), [(1, Status::LocalLengthError), (2, Status::WorkRequestFlushed)]);
    assert_eq!(net.state(&b), QpState::Error);
    net.post_receive(&b, 3, &[]);
    assert_eq!(net.statuses(&b), [(3, Status::WorkRequestFlushed)], "what is posted later is flushed too");
}

#[test]
fn remote_access_error() {
    let foreign = |net: &mut Net, b: &End| {
        let pd = net.engine.alloc_pd(b.session, b.context).unwrap();
        net.engine.register_mr(b.session, pd, MEMORY_BASE, 4096, MEMORY_BASE, ALL_ACCESS).unwrap().rkey
    };
    let limited = |net: &mut Net, b: &End, access| {
        net.engine.register_mr(b.session, b.pd, MEMORY_BASE, 4096, MEMORY_BASE, access).unwrap().rkey
    };
    type Case = fn(&mut Net, &End, &End, u32) -> SendRequest;
    let cases: [(&str, Case); 3] = [
        ("write", |_, a, b, rkey| SendRequest { rkey, ..remote(1, Op::RdmaWrite, &[a.sge(0, 8)], b, 0) }),
        ("read", |_, a, b, rkey| SendRequest { rkey, ..remote(1, Op::RdmaRead, &[a.sge(0, 8)], b, 0) }),
        ("atomic", |_, a, b, rkey| SendRequest { rkey, ..remote(1, Op::FetchAdd, &[a.sge(0, 8)], b, 0) }),
    ];
    for (name, case) in cases {
        for fault in 0..4 {
            let (mut net, a, b, status) = bad_request(|net, a, b| {
                net.post_receive(b, 8, &[b.sge(0, 8)]);
                let rkey = match fault {
                    0 => b.key ^ 1,
                    1 => foreign(net, b),
                    2 => limited(net, b, Access::LOCAL_WRITE),
                    _ => b.key,
                };
                let mut request = case(net, a, b, rkey);
                if fault == 3 {
                    request.remote_address += MEMORY_BYTES as u64;
                }
                request
            });
            assert_eq!(status, Status::RemoteAccessError, "{name} {fault}");
            assert_eq!(net.state(&b), QpState::Error);
            assert_eq!(net.world.saw(Event::QpAccessError, EventTarget::Qp(b.qp)), 1);
            assert_eq!(net.statuses(&b), [(8, Status::WorkRequestFlushed)]);
            assert_eq!(net.engine.vnic_counters(b.vnic).unwrap().remote_access_errors, 1);
            assert!(net.engine.vnic_counters(a.vnic).unwrap().completions_with_error >= 1);
        }
    }
}

#[test]
fn remote_access_error_range_that_wraps() {
    let (.., status) = bad_request(|_, a, b| SendRequest {
        remote_address: u64::MAX - 3,
        ..remote(1, Op::RdmaWrite, &[a.sge(0, 8)], b, 0)
    });
    assert_eq!(status, Status::RemoteAccessError);
}

#[test]
fn remote_operation_error_bad_key_in_receive() {
    let (mut net, _, b, status) = bad_request(|net, a, b| {
        net.post_receive(b, 1, &[Sge { lkey: b.key ^ 1, ..b.sge(0, 8) }]);
        request(1, Op::Send, &[a.sge(0, 8)])
    });
    assert_eq!(status, Status::RemoteOperationError);
    assert_eq!(net.statuses(&b), [(1, Status::LocalProtectionError)]);
    assert_eq!(net.state(&b), QpState::Error);
}

#[test]
fn a_receive_key_that_the_message_does_not_reach_is_not_checked() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.post_receive(&b, 1, &[b.sge(0, 8), Sge { lkey: b.key ^ 1, ..b.sge(8, 8) }]);
    net.post_send(&a, request(1, Op::Send, &[a.sge(0, 8)]));
    net.settle();
    assert_eq!(net.only(&b).status, Status::Success);
}

#[test]
fn remote_operation_error_malformed_receive() {
    let (mut net, _, b, status) = bad_request(|net, a, b| {
        net.post_receive(b, 1, &[]);
        net.world.receives.get_mut(&b.receive_queue()).unwrap().malformed = true;
        request(1, Op::Send, &[a.sge(0, 8)])
    });
    assert_eq!(status, Status::RemoteOperationError);
    assert_eq!(net.statuses(&b), [(1, Status::LocalQpOperationError)]);
}

#[test]
fn remote_operation_error_memory_gone() {
    for opcode in [Op::Send, Op::RdmaWrite, Op::RdmaRead, Op::FetchAdd] {
        let (mut net, _, b, status) = bad_request(|net, a, b| {
            net.post_receive(b, 1, &[b.sge(0, 8)]);
            net.world.gone.insert(b.session);
            remote(1, opcode, &[a.sge(0, 8)], b, 0)
        });
        assert_eq!(status, Status::RemoteOperationError, "{opcode:?}");
        let receive = if opcode == Op::Send { Status::LocalProtectionError } else { Status::WorkRequestFlushed };
        assert_eq!(net.statuses(&b), [(1, receive)]);
    }
}

#[test]
fn rnr_retry_exceeded_after_the_count_of_the_qp() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let start = net.now;
    net.post_send(&a, request(1, Op::Send, &[a.sge(0, 8)]));
    net.settle();
    let mut waits = 0;
    while net.expire() {
        waits += 1;
    }
    assert_eq!(waits, 3);
    assert_eq!(net.now - start, Duration::from_micros(3 * 640));
    assert_eq!(net.statuses(&a), [(1, Status::RnrRetryExceeded)]);
    assert_eq!(net.state(&a), QpState::Error);
    assert_eq!(net.state(&b), QpState::ReadyToSend);
    let counters = net.engine.vnic_counters(a.vnic).unwrap();
    assert_eq!((counters.rnr_naks, counters.rnr_retries_exceeded, counters.failures.requester), (4, 1, 1));
    assert_eq!(net.engine.vnic_counters(b.vnic).unwrap().receives_missing, 4);
    assert!(net.world.wanted.iter().all(|queue| *queue == a.receive_queue()), "nobody waits for b any more");
}

#[test]
fn a_receiver_that_takes_receives_past_the_engine_is_waited_for() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Uc);
    net.post_send(&a, request(1, Op::Send, &[a.sge(0, 8)]));
    net.settle();
    assert_eq!(net.statuses(&a), [(1, Status::Success)], "nobody is seen to post RECVs: lost at once");
    assert_eq!(net.engine.vnic_counters(b.vnic).unwrap().receives_missing, 1);

    net.world.taken_past.insert(b.receive_queue());
    net.post_send(&a, request(2, Op::Send, &[a.sge(0, 8)]));
    net.settle();
    assert_eq!(net.statuses(&a), []);
    net.post_receive(&b, 7, &[b.sge(0, 8)]);
    assert!(net.expire());
    assert_eq!((net.statuses(&a), net.statuses(&b)), (vec![(2, Status::Success)], vec![(7, Status::Success)]));
    assert_eq!(net.engine.vnic_counters(b.vnic).unwrap().receives_missing, 1);
}

#[test]
fn rnr_retry_seven_waits_for_ever_and_a_late_receive_wakes() {
    let mut net = Net::new();
    let (a, b) = (net.end(QpType::Rc), net.end(QpType::Rc));
    net.connect(&b, &a);
    net.init(&a);
    net.rtr(&a, &b);
    net.rts_with(&a, QpAttributes { rnr_retry: 7, timeout: 8, ..Default::default() });
    net.post_send(&a, request(1, Op::Send, &[a.sge(0, 8)]));
    net.settle();
    for _ in 0..100 {
        assert!(net.expire());
    }
    assert!(net.polls(&a).is_empty());
    let before = net.now;
    net.post_receive(&b, 1, &[b.sge(0, 8)]);
    net.settle();
    assert_eq!(net.now, before, "woken at once");
    assert_eq!((net.only(&a).status, net.only(&b).status), (Status::Success, Status::Success));
    assert!(net.world.wanted.is_empty());
    assert_eq!(net.engine.poll_timeout(), None);
}

#[test]
fn retry_exceeded_when_nobody_is_there() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.engine.destroy_qp(&mut net.world, net.now, b.session, b.qp).unwrap();
    let start = net.now;
    net.post_send(&a, request(1, Op::Send, &[a.sge(0, 8)]));
    net.post_send(&a, request(2, Op::Send, &[a.sge(0, 8)]));
    net.settle();
    while net.expire() {}
    assert_eq!(net.now - start, Duration(3 * (4096 << 8)), "retry_cnt 2: three timeouts");
    assert_eq!(net.statuses(&a), [(1, Status::RetryExceeded), (2, Status::WorkRequestFlushed)]);
    let counters = net.engine.vnic_counters(a.vnic).unwrap();
    assert_eq!((counters.retries_exceeded, counters.undeliverable, counters.ack_timeouts), (1, 1, 2));
    assert_eq!((counters.failures.requester, counters.failures.requester_flushed), (2, 1));
}

#[test]
fn retry_exceeded_for_each_way_not_to_listen() {
    let ways: [fn(&mut Net, &End, &End); 6] = [
        |net, _, b| assert!(net.to(b, QpState::Reset).is_ok()),
        |net, _, b| assert!(net.to(b, QpState::Error).is_ok()),
        |net, _, b| {
            net.to(b, QpState::Reset).unwrap();
            net.init(b);
        },
        // The sender begins with another PSN than the receiver expects.
        |net, a, b| {
            net.to(a, QpState::Reset).unwrap();
            net.init(a);
            net.rtr(a, b);
            let attributes = QpAttributes { retry_count: 2, timeout: 8, sq_psn: 7, ..Default::default() };
            net.rts_with(a, attributes);
        },
        // Connected to somebody else.
        |net, _, b| {
            let c = net.end(QpType::Rc);
            net.to(b, QpState::Reset).unwrap();
            net.connect(b, &c);
        },
        |net, _, b| {
            let now = net.now;
            net.engine.destroy_session(&mut net.world, now, b.session);
        },
    ];
    for way in ways {
        let mut net = Net::new();
        let (a, b) = net.pair(QpType::Rc);
        way(&mut net, &a, &b);
        net.qps.retain(|qp| *qp == a.qp);
        net.post_send(&a, request(1, Op::Send, &[a.sge(0, 8)]));
        net.settle();
        while net.expire() {}
        assert_eq!(net.statuses(&a), [(1, Status::RetryExceeded)]);
    }
}

#[test]
fn another_network_is_not_reached() {
    let mut net = Net::new();
    let a = net.end(QpType::Rc);
    let vnic = net.engine.create_vnic(NetworkId(2), gid(200), VnicLimits::default()).unwrap();
    let b = net.end_at(vnic, gid(200), QpType::Rc, false);
    net.connect(&a, &b);
    net.connect(&b, &a);
    net.post_receive(&b, 1, &[b.sge(0, 8)]);
    net.post_send(&a, request(1, Op::Send, &[a.sge(0, 8)]));
    net.settle();
    while net.expire() {}
    assert_eq!(net.statuses(&a), [(1, Status::RetryExceeded)]);
    assert!(net.polls(&b).is_empty());
}

#[test]
fn a_peer_that_becomes_ready_is_found() {
    for timeout in [8, 0] {
        let mut net = Net::new();
        let (a, b) = (net.end(QpType::Rc), net.end(QpType::Rc));
        net.init(&a);
        net.rtr(&a, &b);
        net.rts_with(&a, QpAttributes { retry_count: 1, timeout, ..Default::default() });
        net.post_send(&a, remote(1, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0));
        net.settle();
        assert!(net.polls(&a).is_empty());
        assert_eq!(net.engine.poll_timeout().is_some(), timeout != 0);
        net.connect(&b, &a);
        net.settle();
        assert_eq!(net.only(&a).status, Status::Success);
        assert_eq!(net.engine.poll_timeout(), None);
    }
}

#[test]
fn flush_by_the_application() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    for id in 0..100 {
        net.post_receive(&a, id, &[]);
        net.post_send(&b, request(id, Op::Send, &[b.sge(0, 8)]));
    }
    net.to(&a, QpState::Error).unwrap();
    net.work();
    let flushed = net.statuses(&a);
    assert_eq!(flushed, (0..100).map(|id| (id, Status::WorkRequestFlushed)).collect::<Vec<_>>());
    assert_eq!(net.state(&b), QpState::ReadyToSend);
    net.to(&b, QpState::Error).unwrap();
    net.work();
    assert_eq!(net.statuses(&b).len(), 100);
}

#[test]
fn cq_overflow_is_fatal_for_its_qps() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.world.cq_room.insert(b.cq, 1);
    for id in 0..3 {
        net.post_receive(&b, id, &[b.sge(0, 8)]);
        net.post_send(&a, request(id, Op::Send, &[a.sge(0, 8)]));
    }
    net.settle();
    while net.expire() {}
    assert_eq!(net.statuses(&b), [(0, Status::Success)]);
    assert_eq!(net.state(&b), QpState::Error);
    assert_eq!(net.world.saw(Event::CqError, EventTarget::Cq(b.cq)), 1);
    assert_eq!(net.world.saw(Event::QpFatal, EventTarget::Qp(b.qp)), 1);
    assert_eq!(
        net.statuses(&a),
        [(0, Status::Success), (1, Status::Success), (2, Status::RetryExceeded)],
        "the peer sees what a dead NIC shows"
    );
}
