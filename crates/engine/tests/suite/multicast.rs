//! Multicast of UD QPs: who gets a message, and who holds whom up.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

use CompletionStatus as Status;
use SendOpcode as Op;
use VerbsError::{Busy, InvalidArgument, NoMemory, NotFound};

fn group(last: u8) -> Gid {
    Gid::from_ip(format!("239.0.0.{last}").parse().unwrap())
}

/// Live UD QPs, each of its own vNIC, all attached to group 1.
fn members(net: &mut Net, count: usize) -> Vec<End> {
    let ends: Vec<End> = (0..count).map(|_| net.end(QpType::Ud)).collect();
    for end in &ends {
        net.connect(end, end);
        net.engine.attach_multicast(end.session, end.qp, group(1)).unwrap();
    }
    ends
}

fn handle(net: &mut Net, from: &End, to: Gid) -> u32 {
    net.engine.create_ah(from.session, from.pd, &address(to)).unwrap().index
}

/// A message of 16 bytes to a group.
fn to_group(net: &mut Net, from: &End, id: u64, to: Gid) -> SendRequest {
    let address_handle = handle(net, from, to);
    let remote_qpn = Qpn::MULTICAST.0;
    SendRequest { address_handle, remote_qpn, remote_qkey: 0x1234, ..request(id, Op::Send, &[from.sge(0, 16)]) }
}

/// Posts a RECV for one message at 4096 + 100 * `place`.
fn receive(net: &mut Net, end: &End, id: u64) {
    net.post_receive(end, id, &[end.sge(4096 + 100 * id, 64)]);
}

fn got(net: &mut Net, end: &End) -> Vec<u64> {
    let (sent, received): (Vec<_>, Vec<_>) =
        net.polls(end).into_iter().partition(|done| done.flags.contains(CompletionFlags::SEND_QUEUE));
    assert!(sent.is_empty() && received.iter().all(|done| done.status == Status::Success), "{sent:?} {received:?}");
    received.iter().map(|done| done.work_request_id).collect()
}

fn undeliverable(net: &Net, end: &End) -> u64 {
    net.engine.vnic_counters(end.vnic).unwrap().undeliverable
}

#[test]
fn every_member_gets_its_own() {
    for put_off in [false, true] {
        let mut net = Net::new();
        net.world.always_put_off = put_off;
        let sender = net.end(QpType::Ud);
        net.connect(&sender, &sender);
        let ends = members(&mut net, 5);
        for end in &ends {
            receive(&mut net, end, 1);
        }
        net.world.bytes(sender.session, MEMORY_BASE, 16).copy_from_slice(b"for every member");
        let mut message = to_group(&mut net, &sender, 7, group(1));
        message.opcode = Op::SendWithImmediate;
        message.immediate = 99;
        net.post_send(&sender, message);
        net.settle();
        assert_eq!(net.statuses(&sender), [(7, Status::Success)], "once");
        for end in &ends {
            let done = net.only(end);
            assert_eq!((done.status, done.byte_count, done.immediate), (Status::Success, 56, 99));
            assert_eq!((done.source_qpn, done.qpn), (sender.qpn.0, end.qpn.0));
            assert!(done.flags.contains(CompletionFlags::GRH) && done.flags.contains(CompletionFlags::WITH_IMMEDIATE));
            let bytes = net.world.bytes(end.session, MEMORY_BASE + 4196, 56).to_vec();
            assert_eq!(bytes[32..36], [10, 0, 0, 1], "the sender");
            assert_eq!(bytes[36..40], [239, 0, 0, 1], "the group");
            assert_eq!(&bytes[40..], b"for every member");
        }
        let counters = net.engine.vnic_counters(sender.vnic).unwrap();
        assert_eq!((counters.messages, counters.bytes, counters.undeliverable), (1, 16, 0));
        assert_eq!((counters.sent.packets, counters.sent.multicast_packets), (1, 1));
        assert_eq!(net.engine.vnic_counters(ends[2].vnic).unwrap().received.multicast_packets, 1);
    }
}

#[test]
fn a_member_that_does_not_listen_loses_only_its_own() {
    let mut net = Net::new();
    let sender = net.end(QpType::Ud);
    net.connect(&sender, &sender);
    let ends = members(&mut net, 7);
    let [good, no_receive, other_key, short, bad_key, in_error, last] = ends[..] else { unreachable!() };
    for end in [&good, &other_key, &in_error, &last] {
        receive(&mut net, end, 1);
    }
    net.modify(&other_key, &QpAttributes { qkey: 9, ..Default::default() }, QpAttributeMask::QKEY).unwrap();
    net.post_receive(&short, 1, &[short.sge(0, 55)]);
    net.post_receive(&bad_key, 1, &[Sge { lkey: good.key, ..bad_key.sge(0, 64) }]);
    net.to(&in_error, QpState::Error).unwrap();
    assert_eq!(net.statuses(&in_error), [(1, Status::WorkRequestFlushed)]);
    let message = to_group(&mut net, &sender, 7, group(1));
    net.post_send(&sender, message);
    net.settle();
    assert_eq!(net.statuses(&sender), [(7, Status::Success)]);
    assert_eq!((got(&mut net, &good), got(&mut net, &last)), (vec![1], vec![1]));
    for end in [&no_receive, &other_key, &short, &in_error] {
        assert!(net.polls(end).is_empty());
    }
    assert_eq!(net.statuses(&bad_key), [(1, Status::LocalProtectionError)]);
    assert_eq!(net.state(&bad_key), QpState::Error);
    assert_eq!(net.state(&sender), QpState::ReadyToSend);
}

#[test]
fn a_member_whose_memory_is_gone() {
    for late in [false, true] {
        let mut net = Net::new();
        let sender = net.end(QpType::Ud);
        net.connect(&sender, &sender);
        let ends = members(&mut net, 3);
        for end in &ends {
            receive(&mut net, end, 1);
        }
        net.world.always_put_off = late;
        if !late {
            net.world.gone.insert(ends[1].session);
        }
        let message = to_group(&mut net, &sender, 7, group(1));
        net.post_send(&sender, message);
        if late {
            net.work();
            net.land(0);
            net.work();
            let (token, _) = net.world.pending.pop().unwrap();
            net.engine.handle_copied(&mut net.world, net.now, token, Err(MemorySide::Destination));
        }
        net.settle();
        assert_eq!(net.statuses(&sender), [(7, Status::Success)]);
        assert_eq!(net.statuses(&ends[1]), [(1, Status::LocalProtectionError)]);
        assert_eq!((got(&mut net, &ends[0]), got(&mut net, &ends[2])), (vec![1], vec![1]));
    }
}

#[test]
fn the_senders_own_fault_ends_it() {
    let mut net = Net::new();
    let sender = net.end(QpType::Ud);
    net.connect(&sender, &sender);
    let ends = members(&mut net, 3);
    for end in &ends {
        receive(&mut net, end, 1);
    }
    net.world.always_put_off = true;
    for id in [7, 8] {
        let message = to_group(&mut net, &sender, id, group(1));
        net.post_send(&sender, message);
    }
    net.work();
    net.land(0);
    net.work();
    let (token, _) = net.world.pending.pop().unwrap();
    net.engine.handle_copied(&mut net.world, net.now, token, Err(MemorySide::Source));
    net.settle();
    assert_eq!(net.statuses(&sender), [(7, Status::LocalProtectionError), (8, Status::WorkRequestFlushed)]);
    assert_eq!(net.state(&sender), QpState::SqError);
    assert_eq!((got(&mut net, &ends[0]), got(&mut net, &ends[1]), got(&mut net, &ends[2])), (vec![1], vec![], vec![]));
    // From SQE back to work: the RECV that was claimed is used, nothing of the old message is left.
    net.modify(&sender, &QpAttributes { state: QpState::ReadyToSend, ..Default::default() }, 1).unwrap();
    receive(&mut net, &ends[0], 2);
    let message = to_group(&mut net, &sender, 9, group(1));
    net.post_send(&sender, message);
    net.settle();
    assert_eq!(net.statuses(&sender), [(9, Status::Success)]);
    assert_eq!(
        (got(&mut net, &ends[0]), got(&mut net, &ends[1]), got(&mut net, &ends[2])),
        (vec![2], vec![1], vec![1])
    );
}

#[test]
fn own_messages_come_back_unless_blocked() {
    let mut net = Net::new();
    let e = members(&mut net, 1)[0];
    let (vnic, gid) = (e.vnic, e.gid);
    let other = net.end_at(vnic, gid, QpType::Ud, false);
    net.connect(&other, &other);
    net.engine.attach_multicast(other.session, other.qp, group(1)).unwrap();
    let init = QpInit { qp_type: QpType::Ud, block_own_multicast: true, cookie: 5, ..rc_init(e.pd, e.cq) };
    let (qp, qpn, _) = net.engine.create_qp(e.session, init).unwrap();
    net.qps.push(qp);
    net.types.insert(qp, QpType::Ud);
    let deaf = End { qp, qpn, ..e };
    net.connect(&deaf, &deaf);
    net.engine.attach_multicast(deaf.session, deaf.qp, group(1)).unwrap();
    for (end, id) in [(&e, 1), (&other, 2), (&deaf, 3)] {
        receive(&mut net, end, id);
    }
    let message = to_group(&mut net, &e, 7, group(1));
    net.post_send(&e, message);
    net.settle();
    let mut seen = net.statuses(&e);
    seen.sort_by_key(|(id, _)| *id);
    assert_eq!(seen, [(1, Status::Success), (3, Status::Success), (7, Status::Success)], "itself, and its neighbour");
    assert_eq!(got(&mut net, &other), [2]);
    for (end, id) in [(&e, 1), (&other, 2), (&deaf, 3)] {
        receive(&mut net, end, id);
    }
    let message = to_group(&mut net, &deaf, 8, group(1));
    net.post_send(&deaf, message);
    net.settle();
    let mut seen = net.statuses(&e);
    seen.sort_by_key(|(id, _)| *id);
    assert_eq!(seen, [(1, Status::Success), (8, Status::Success)], "not to itself");
    assert_eq!(got(&mut net, &other), [2]);
}

#[test]
fn neither_groups_nor_addresses_reach_into_another_network() {
    let mut net = Net::new();
    let near = members(&mut net, 1)[0];
    // The same address in another network, and the same group.
    let vnic = net.engine.create_vnic(NetworkId(2), near.gid, VnicLimits::default()).unwrap();
    let far = net.end_at(vnic, near.gid, QpType::Ud, false);
    net.connect(&far, &far);
    net.engine.attach_multicast(far.session, far.qp, group(1)).unwrap();
    let sender = net.end(QpType::Ud);
    net.connect(&sender, &sender);
    receive(&mut net, &near, 1);
    receive(&mut net, &far, 2);
    let message = to_group(&mut net, &sender, 7, group(1));
    net.post_send(&sender, message);
    let mut straight = to_group(&mut net, &sender, 8, far.gid);
    straight.remote_qpn = far.qpn.0;
    net.post_send(&sender, straight);
    net.settle();
    assert_eq!(net.statuses(&sender), [(7, Status::Success), (8, Status::Success)]);
    assert_eq!(got(&mut net, &near), [1], "the group's message, and not the far one's");
    assert_eq!(got(&mut net, &far), []);
}

#[test]
fn nobody_and_wrong_numbers_are_dropped() {
    let mut net = Net::new();
    let sender = net.end(QpType::Ud);
    net.connect(&sender, &sender);
    let e = members(&mut net, 1)[0];
    receive(&mut net, &e, 1);
    let empty = to_group(&mut net, &sender, 1, group(2));
    net.post_send(&sender, empty);
    let mut wrong = to_group(&mut net, &sender, 2, group(1));
    wrong.remote_qpn = e.qpn.0;
    net.post_send(&sender, wrong);
    let mut unicast = to_group(&mut net, &sender, 3, e.gid);
    unicast.remote_qpn = Qpn::MULTICAST.0;
    net.post_send(&sender, unicast);
    net.settle();
    assert_eq!(net.statuses(&sender), [(1, Status::Success), (2, Status::Success), (3, Status::Success)]);
    assert_eq!(undeliverable(&net, &sender), 3);
    assert!(net.polls(&e).is_empty());
}

#[test]
fn groups_are_of_a_network() {
    let mut net = Net::new();
    let e = members(&mut net, 1)[0];
    receive(&mut net, &e, 1);
    let vnic = net.engine.create_vnic(NetworkId(2), gid(99), VnicLimits::default()).unwrap();
    let stranger = net.end_at(vnic, gid(99), QpType::Ud, false);
    net.connect(&stranger, &stranger);
    let message = to_group(&mut net, &stranger, 7, group(1));
    net.post_send(&stranger, message);
    net.settle();
    assert_eq!(net.statuses(&stranger), [(7, Status::Success)]);
    assert!(net.polls(&e).is_empty());
}

#[test]
fn a_busy_member_is_put_off_and_then_waited_for() {
    let mut net = Net::new();
    let (one, two) = (net.end(QpType::Ud), net.end(QpType::Ud));
    for end in [&one, &two] {
        net.connect(end, end);
    }
    let ends = members(&mut net, 3);
    for end in &ends {
        receive(&mut net, end, 1);
        receive(&mut net, end, 2);
    }
    net.world.always_put_off = true;
    let mut direct = to_group(&mut net, &one, 5, ends[0].gid);
    direct.remote_qpn = ends[0].qpn.0;
    net.post_send(&one, direct);
    net.work();
    assert_eq!(net.world.pending.len(), 1, "member 0 is busy");
    let message = to_group(&mut net, &two, 7, group(1));
    net.post_send(&two, message);
    net.work();
    // The others are served meanwhile.
    for _ in 0..2 {
        assert_eq!(net.world.pending.len(), 2);
        net.land(1);
        net.work();
    }
    assert_eq!((got(&mut net, &ends[1]), got(&mut net, &ends[2])), (vec![1], vec![1]));
    assert!(net.polls(&two).is_empty() && net.polls(&ends[0]).is_empty());
    assert_eq!(net.world.pending.len(), 1);
    net.settle();
    assert_eq!(net.statuses(&two), [(7, Status::Success)]);
    assert_eq!(got(&mut net, &ends[0]), [1, 2]);
}

#[test]
fn members_that_all_send_do_not_block_each_other() {
    let mut net = Net::new();
    net.world.put_off = Some(SimRng(3));
    let ends = members(&mut net, 4);
    let rounds = 20;
    for end in &ends {
        for id in 0..4 * rounds {
            receive(&mut net, end, id % 64);
        }
    }
    for id in 0..rounds {
        for end in &ends {
            let message = to_group(&mut net, end, 1000 + id, group(1));
            net.post_send(end, message);
        }
    }
    net.settle();
    for end in &ends {
        let done = net.polls(end);
        assert!(done.iter().all(|done| done.status == Status::Success));
        assert_eq!(done.len() as u64, 5 * rounds, "every message of all four, and its own sends");
    }
}

#[test]
fn members_come_and_go_under_way() {
    let mut net = Net::new();
    let sender = net.end(QpType::Ud);
    net.connect(&sender, &sender);
    let ends = members(&mut net, 4);
    let late = net.end(QpType::Ud);
    net.connect(&late, &late);
    for end in ends.iter().chain([&late]) {
        receive(&mut net, end, 1);
    }
    net.world.always_put_off = true;
    let message = to_group(&mut net, &sender, 7, group(1));
    net.post_send(&sender, message);
    net.work();
    assert_eq!(net.world.pending.len(), 1, "on its way to the first");
    net.engine.detach_multicast(ends[1].session, ends[1].qp, group(1)).unwrap();
    net.engine.attach_multicast(late.session, late.qp, group(1)).unwrap();
    net.engine.destroy_session(&mut net.world, net.now, ends[2].session);
    net.settle();
    assert_eq!(net.statuses(&sender), [(7, Status::Success)]);
    assert_eq!((got(&mut net, &ends[0]), got(&mut net, &ends[3])), (vec![1], vec![1]));
    assert!(got(&mut net, &ends[1]).is_empty() && got(&mut net, &late).is_empty());
}

#[test]
fn the_member_in_flight_dies() {
    let mut net = Net::new();
    let sender = net.end(QpType::Ud);
    net.connect(&sender, &sender);
    let ends = members(&mut net, 3);
    for end in &ends {
        receive(&mut net, end, 1);
    }
    net.world.always_put_off = true;
    let message = to_group(&mut net, &sender, 7, group(1));
    net.post_send(&sender, message);
    net.work();
    net.land(0);
    net.work();
    // The second one's copy is in flight.
    let (token, _) = net.world.pending.pop().unwrap();
    net.engine.destroy_session(&mut net.world, net.now, ends[1].session);
    net.engine.handle_copied(&mut net.world, net.now, token, Ok(()));
    net.settle();
    assert_eq!(net.statuses(&sender), [(7, Status::Success)]);
    assert_eq!((got(&mut net, &ends[0]), got(&mut net, &ends[2])), (vec![1], vec![1]), "nobody gets it twice");
}

#[test]
fn a_sender_that_goes_away_under_way() {
    for how in 0..4 {
        let mut net = Net::new();
        let sender = net.end(QpType::Ud);
        net.connect(&sender, &sender);
        let ends = members(&mut net, 3);
        for end in &ends {
            receive(&mut net, end, 1);
            receive(&mut net, end, 2);
        }
        net.world.always_put_off = true;
        let message = to_group(&mut net, &sender, 7, group(1));
        net.post_send(&sender, message);
        net.work();
        match how {
            0 => assert_eq!(net.to(&sender, QpState::Error), Err(Refusal::InFlight)),
            1 => assert_eq!(net.to(&sender, QpState::Reset), Err(Refusal::InFlight)),
            2 => {
                let refused = net.engine.destroy_qp(&mut net.world, net.now, sender.session, sender.qp);
                assert_eq!(refused, Err(Refusal::InFlight));
            }
            _ => {
                net.die(sender.session);
            }
        }
        net.settle();
        match how {
            0 => assert_eq!(net.statuses(&sender), [(7, Status::WorkRequestFlushed)]),
            1 => assert_eq!(net.to(&sender, QpState::Reset), Ok(QpState::Reset)),
            2 => assert_eq!(net.engine.destroy_qp(&mut net.world, net.now, sender.session, sender.qp), Ok(())),
            _ => {}
        }
        // Nobody is left busy.
        net.world.always_put_off = false;
        let next = net.end(QpType::Ud);
        net.connect(&next, &next);
        let message = to_group(&mut net, &next, 8, group(1));
        net.post_send(&next, message);
        net.settle();
        assert_eq!(net.statuses(&next), [(8, Status::Success)]);
        for end in &ends {
            assert_eq!(got(&mut net, end).len(), 1);
        }
    }
}

#[test]
fn verbs_and_limits() {
    let mut net = Net::new();
    let limits = VnicLimits { multicast_group_count_max: 2, multicast_attach_count_max: 2, ..VnicLimits::default() };
    let vnic = net.engine.create_vnic(NetworkId(1), gid(200), limits).unwrap();
    let e = net.end_at(vnic, gid(200), QpType::Ud, false);
    let rc = net.end(QpType::Rc);
    let second = End { qp: net.qp(&e, QpType::Ud).0, ..e };
    let third = End { qp: net.qp(&e, QpType::Ud).0, ..e };
    let engine = &mut net.engine;
    assert_eq!(engine.attach_multicast(rc.session, rc.qp, group(1)), Err(InvalidArgument));
    assert_eq!(engine.attach_multicast(e.session, e.qp, gid(1)), Err(InvalidArgument));
    assert_eq!(engine.attach_multicast(rc.session, e.qp, group(1)), Err(NotFound));
    assert_eq!(engine.detach_multicast(e.session, e.qp, group(1)), Err(InvalidArgument));
    // In RESET already, IPv6 too, twice is once.
    let v6 = Gid::from_ip("ff0e::1".parse().unwrap());
    for gid in [v6, group(1), group(1)] {
        assert_eq!(engine.attach_multicast(e.session, e.qp, gid), Ok(()));
    }
    assert_eq!(engine.vnic_usage(vnic).unwrap().multicast_groups, 2);
    assert_eq!(engine.attach_multicast(e.session, e.qp, group(2)), Err(NoMemory));
    assert_eq!(engine.attach_multicast(e.session, second.qp, group(1)), Ok(()));
    assert_eq!(engine.attach_multicast(e.session, third.qp, group(1)), Err(NoMemory));
    assert_eq!(engine.detach_multicast(rc.session, e.qp, v6), Err(NotFound));
    assert_eq!(engine.detach_multicast(e.session, e.qp, v6), Ok(()));
    assert_eq!(engine.attach_multicast(e.session, e.qp, group(2)), Ok(()));
    // While attached a QP stays (ibv_destroy_qp(3)); its attachments outlive RESET.
    net.init(&e);
    net.to(&e, QpState::Reset).unwrap();
    let engine = &mut net.engine;
    let destroy = |engine: &mut Engine, world: &mut World, qp| engine.destroy_qp(world, Instant(1), e.session, qp);
    assert_eq!(destroy(engine, &mut net.world, e.qp), Err(Refusal::Error(Busy)));
    for gid in [group(1), group(2)] {
        engine.detach_multicast(e.session, e.qp, gid).unwrap();
    }
    assert_eq!(destroy(engine, &mut net.world, e.qp), Ok(()));
    assert_eq!(engine.vnic_usage(vnic).unwrap().multicast_groups, 1);
    engine.destroy_session(&mut net.world, net.now, e.session);
    assert_eq!(engine.vnic_usage(vnic), Some(Usage::default()));
}

#[test]
fn address_handles_of_groups() {
    let mut net = Net::new();
    let e = net.end(QpType::Ud);
    assert!(net.engine.create_ah(e.session, e.pd, &address(group(1))).is_ok());
    // But no connection leads to a group.
    let rc = net.end(QpType::Rc);
    net.init(&rc);
    let attributes = QpAttributes { state: QpState::ReadyToReceive, address: address(group(1)), ..Default::default() };
    use QpAttributeMask as M;
    let mask = M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
    assert_eq!(net.modify(&rc, &attributes, mask), Err(Refusal::Error(InvalidArgument)));
}

mod random {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const SENDERS: usize = 3;
    const MEMBERS: usize = 4;

    struct Run {
        net: Net,
        rng: SimRng,
        senders: Vec<End>,
        members: Vec<End>,
        /// Members that were always attached and live.
        loyal: Vec<bool>,
        sent: Vec<u64>,
        ids: u64,
    }

    impl Run {
        fn new(seed: u64) -> Self {
            let mut net = Net::new();
            net.world.put_off = Some(SimRng(seed ^ 1));
            let senders = members(&mut net, SENDERS);
            for end in &senders {
                net.engine.detach_multicast(end.session, end.qp, group(1)).unwrap();
            }
            let members = members(&mut net, MEMBERS);
            Self {
                net,
                rng: SimRng(seed),
                senders,
                members,
                loyal: vec![true; MEMBERS],
                sent: vec![0; SENDERS],
                ids: 0,
            }
        }

        fn apply(&mut self, step: (u8, usize)) {
            let (kind, which) = step;
            let member = self.members[which % MEMBERS];
            let live = self.net.engine.query_qp(member.session, member.qp).is_ok();
            match kind {
                0..=2 => self.send(which % SENDERS),
                3..=6 if live => {
                    self.ids += 1;
                    let id = self.ids;
                    self.net.post_receive(&member, id, &[member.sge(64 * id, 64)]);
                }
                7 if live => {
                    let (engine, gid) = (&mut self.net.engine, group(1));
                    if engine.detach_multicast(member.session, member.qp, gid).is_err() {
                        engine.attach_multicast(member.session, member.qp, gid).unwrap();
                    }
                    self.loyal[which % MEMBERS] = false;
                }
                8 if self.rng.roll(10) == 0 => {
                    self.loyal[which % MEMBERS] = false;
                    let net = &mut self.net;
                    net.die(member.session);
                }
                _ => self.progress(),
            }
        }

        /// Sixteen bytes: who, and the how manieth.
        fn send(&mut self, which: usize) {
            let end = self.senders[which];
            self.sent[which] += 1;
            let mut message = to_group(&mut self.net, &end, self.sent[which], group(1));
            message.flags.0 |= SendFlags::INLINE;
            message.inline_length = 16;
            message.inline_data[..8].copy_from_slice(&(which as u64).to_ne_bytes());
            message.inline_data[8..16].copy_from_slice(&self.sent[which].to_ne_bytes());
            self.net.post_send(&end, message);
        }

        fn progress(&mut self) {
            for _ in 0..self.rng.roll(6) {
                let net = &mut self.net;
                match self.rng.roll(3) {
                    0 => {
                        let qp = self.senders[self.rng.roll(SENDERS as u64) as usize].qp;
                        net.engine.run(&mut net.world, net.now, qp, 1 + self.rng.roll(40));
                    }
                    1 if !net.world.pending.is_empty() => {
                        let which = self.rng.roll(net.world.pending.len() as u64) as usize;
                        net.land(which);
                    }
                    _ => {
                        if let Some(qp) = net.engine.poll_ready() {
                            net.engine.run(&mut net.world, net.now, qp, 1 + self.rng.roll(40));
                        }
                    }
                }
            }
        }

        /// The messages that a member got, by sender, in order.
        fn got(&mut self, member: usize) -> HashMap<u64, Vec<u64>> {
            let end = self.members[member];
            let mut found: HashMap<u64, Vec<u64>> = HashMap::new();
            for done in self.net.polls(&end) {
                assert_eq!((done.status, done.byte_count), (Status::Success, 56));
                let at = MEMORY_BASE + 64 * done.work_request_id + 40;
                let bytes = self.net.world.bytes(end.session, at, 16).to_vec();
                let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
                assert_eq!(done.source_qpn, self.senders[word(0) as usize].qpn.0);
                found.entry(word(0)).or_default().push(word(8));
            }
            found
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

        #[test]
        fn senders_finish_and_members_get_each_message_at_most_once_in_order(
            seed in any::<u64>(),
            steps in prop::collection::vec((0u8..12, 0usize..12), 1..120),
        ) {
            let mut run = Run::new(seed);
            for step in steps {
                run.apply(step);
            }
            run.net.settle();
            // A member that listens and has RECVs gets the next message, after any history.
            for which in (0..MEMBERS).flat_map(|which| [which; SENDERS]) {
                run.apply((3, which));
            }
            (0..SENDERS).for_each(|which| run.send(which));
            run.net.settle();
            prop_assert!(run.net.world.pending.is_empty());
            for which in 0..SENDERS {
                let end = run.senders[which];
                let expected: Vec<_> = (1..=run.sent[which]).map(|id| (id, Status::Success)).collect();
                prop_assert_eq!(run.net.statuses(&end), expected);
            }
            for member in 0..MEMBERS {
                let live = run.net.engine.query_qp(run.members[member].session, run.members[member].qp).is_ok();
                let got = run.got(member);
                for numbers in got.values() {
                    prop_assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{:?}", numbers);
                }
                if live && run.loyal[member] {
                    prop_assert_eq!(got.len(), SENDERS);
                    for (sender, numbers) in &got {
                        prop_assert_eq!(numbers.last(), Some(&run.sent[*sender as usize]));
                    }
                }
            }
        }
    }
}
