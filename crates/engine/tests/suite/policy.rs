//! Policy: asked at RTR and for datagrams, and applied to established connections when the answer
//! changes.
use crate::common::peer::*;
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

use CompletionStatus as Status;
use SendOpcode as Op;

const FLUSHED: Status = Status::WorkRequestFlushed;

fn deny(net: &mut Net, a: &End, b: &End) {
    net.world.denied.extend([(a.gid, b.gid), (b.gid, a.gid)]);
}

/// Policy has changed; everything is looked at, two QPs at a time.
fn follow(net: &mut Net) {
    net.engine.handle_policy_changed();
    let mut count = 0;
    while net.engine.poll_policy(&mut net.world, 2) {
        count += 1;
        assert!(count < 100, "a change is done with some time");
    }
    net.settle();
}

#[test]
fn a_connection_needs_one_direction() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut net = Net::new();
        let (a, b) = (net.end(qp_type), net.end(qp_type));
        net.init(&a);
        net.init(&b);
        net.world.denied.insert((a.gid, b.gid));
        assert_eq!(net.try_rtr(&a, &b), Ok(QpState::ReadyToReceive));
        net.world.denied.insert((b.gid, a.gid));
        assert_eq!(net.try_rtr(&b, &a), Err(Refusal::Error(VerbsError::NotPermitted)));
        assert_eq!(net.state(&b), QpState::Init, "nothing has changed");
        net.world.denied.clear();
        assert_eq!(net.try_rtr(&b, &a), Ok(QpState::ReadyToReceive));
    }
}

#[test]
fn what_stands_is_disconnected_and_nothing_else() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        for put_off in [false, true] {
            let mut net = Net::new();
            let (a, b) = net.pair(qp_type);
            let (c, d) = net.pair(qp_type);
            net.world.always_put_off = put_off;
            net.post_receive(&b, 1, &[b.sge(0, 64)]);
            follow(&mut net);
            assert_eq!((net.state(&a), net.state(&b)), (QpState::ReadyToSend, QpState::ReadyToSend));
            deny(&mut net, &a, &b);
            follow(&mut net);
            for end in [&a, &b] {
                assert_eq!(net.state(end), QpState::Error);
                assert_eq!(net.world.saw(AsyncEventKind::QpFatal, EventTarget::Qp(end.qp)), 1);
            }
            assert_eq!(net.statuses(&b), [(1, FLUSHED)]);
            net.post_send(&a, request(2, Op::Send, &[a.sge(0, 16)]));
            net.settle();
            assert_eq!(net.statuses(&a), [(2, FLUSHED)]);
            for end in [&c, &d] {
                assert_eq!(net.state(end), QpState::ReadyToSend);
            }
            let before = net.world.events.len();
            follow(&mut net);
            assert_eq!(net.world.events.len(), before, "it is cut once");
        }
    }
}

#[test]
fn a_message_that_is_under_way_ends_with_the_connection() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.world.always_put_off = true;
    let bytes = MEMORY_BYTES as u32;
    let mut write = request(1, Op::RdmaWrite, &[a.sge(0, bytes)]);
    (write.remote_address, write.rkey) = (MEMORY_BASE, b.key);
    net.world.bytes(a.session, MEMORY_BASE, MEMORY_BYTES).fill(7);
    net.post_send(&a, write);
    net.work();
    assert_eq!(net.world.pending.len(), 1, "the first piece");
    deny(&mut net, &a, &b);
    follow(&mut net);
    assert_eq!(net.statuses(&a), [(1, FLUSHED)]);
    assert_eq!(*net.world.bytes(b.session, MEMORY_BASE, MEMORY_BYTES).last().unwrap(), 0, "no more pieces");
}

#[test]
fn changes_that_follow_each_other_reach_the_last_one() {
    let mut net = Net::new();
    let pairs: Vec<(End, End)> = (0..8).map(|_| net.pair(QpType::Rc)).collect();
    for (a, b) in &pairs {
        deny(&mut net, a, b);
    }
    // Each change comes before the one before it is done with.
    for _ in 0..8 {
        net.engine.handle_policy_changed();
        net.engine.poll_policy(&mut net.world, 2);
    }
    for (a, b) in &pairs {
        assert_eq!((net.state(a), net.state(b)), (QpState::Error, QpState::Error));
    }
}

#[test]
fn those_that_come_meanwhile_do_not_hide_others() {
    let mut net = Net::new();
    let mut pairs: Vec<(End, End)> = (0..4).map(|_| net.pair(QpType::Rc)).collect();
    follow(&mut net);
    // The next look begins behind these eight.
    pairs.extend((0..4).map(|_| net.pair(QpType::Rc)));
    for (a, b) in &pairs {
        deny(&mut net, a, b);
    }
    net.engine.handle_policy_changed();
    net.engine.poll_policy(&mut net.world, 2);
    let later: Vec<(End, End)> = (0..4).map(|_| net.pair(QpType::Rc)).collect();
    while net.engine.poll_policy(&mut net.world, 2) {}
    net.settle();
    for (a, b) in &pairs {
        assert_eq!((net.state(a), net.state(b)), (QpState::Error, QpState::Error));
    }
    for (a, _) in &later {
        assert_eq!(net.state(a), QpState::ReadyToSend);
    }
}

#[test]
fn datagrams_are_refused_from_the_next_one_on() {
    let mut net = Net::new();
    let (a, b) = (net.end(QpType::Ud), net.end(QpType::Ud));
    net.connect(&a, &a);
    net.connect(&b, &b);
    let handle = net.engine.create_ah(a.session, a.pd, &address(b.gid)).unwrap().index;
    let send = |net: &mut Net, id| {
        net.post_receive(&b, id, &[b.sge(0, 128)]);
        let message = SendRequest {
            address_handle: handle,
            remote_qpn: b.qpn.0,
            remote_qkey: 0x1234,
            ..request(id, Op::Send, &[a.sge(0, 16)])
        };
        net.post_send(&a, message);
        net.settle();
        assert_eq!(net.statuses(&a), [(id, Status::Success)], "the sender does not learn of it");
        net.polls(&b).len()
    };
    assert_eq!(send(&mut net, 1), 1);
    assert_eq!(send(&mut net, 2), 1);
    assert_eq!(net.world.asked.len(), 1, "a yes is kept");
    net.world.denied.insert((a.gid, b.gid));
    net.engine.handle_policy_changed();
    assert_eq!(send(&mut net, 3), 0);
    assert_eq!(net.engine.vnic_counters(a.vnic).unwrap().undeliverable, 1);
    net.world.denied.clear();
    assert_eq!(send(&mut net, 4), 1, "a no is not kept");
}

#[test]
fn members_that_may_not_get_nothing() {
    let mut net = Net::new();
    let ends: Vec<End> = (0..4).map(|_| net.end(QpType::Ud)).collect();
    let group = Gid::from_ip("239.0.0.1".parse().unwrap());
    for end in &ends {
        net.connect(end, end);
        net.engine.attach_multicast(end.session, end.qp, group).unwrap();
        net.post_receive(end, 9, &[end.sge(0, 128)]);
    }
    net.world.denied.insert((ends[0].gid, ends[2].gid));
    let address_handle = net.engine.create_ah(ends[0].session, ends[0].pd, &address(group)).unwrap().index;
    let remote_qpn = Qpn::MULTICAST.0;
    let message = request(1, Op::Send, &[ends[0].sge(0, 16)]);
    net.post_send(&ends[0], SendRequest { address_handle, remote_qpn, remote_qkey: 0x1234, ..message });
    net.settle();
    let got: Vec<usize> = ends.iter().map(|end| net.polls(end).len()).collect();
    assert_eq!(got, [2, 1, 0, 1], "the sender has two completions");
}

#[test]
fn another_host_hears_of_a_cut_and_has_a_say_in_its_own_only() {
    let mut link = Link::new();
    let end = link.end;
    link.net.world.denied.extend([(end.gid, peer_gid()), (peer_gid(), end.gid)]);
    follow(&mut link.net);
    assert_eq!(link.net.state(&end), QpState::Error);
    assert_eq!(link.net.world.disconnected, [(end.qpn, HOST, Qpn(PEER_QPN))]);
    assert_eq!(link.net.engine.peer_info(end.qpn).unwrap().connected, None);

    for (host, peer, is_cut) in [(HostId(8), PEER_QPN, false), (HOST, PEER_QPN + 1, false), (HOST, PEER_QPN, true)] {
        let mut link = Link::new();
        let end = link.end;
        link.net.engine.handle_disconnected(&mut link.net.world, end.qpn, host, Qpn(peer));
        link.net.settle();
        assert_eq!(link.net.state(&end) == QpState::Error, is_cut);
        assert!(link.net.world.disconnected.is_empty(), "the end that disconnects is not notified");
    }
}
