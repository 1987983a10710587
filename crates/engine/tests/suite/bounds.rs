//! Bounds of the work that one tenant can make the engine do at once.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

#[test]
fn a_message_to_a_large_group_takes_several_turns() {
    let mut net = Net::new();
    let sender = net.end(QpType::Ud);
    net.connect(&sender, &sender);
    let group = Gid::from_ip("239.0.0.1".parse().unwrap());
    let member = net.end(QpType::Ud);
    let count = 150;
    for _ in 0..count {
        let (qp, qpn) = net.qp(&member, QpType::Ud);
        let end = End { qp, qpn, ..member };
        net.connect(&end, &end);
        net.engine.attach_multicast(end.session, qp, group).unwrap();
        net.post_receive(&end, 1, &[end.sge(0, 64)]);
    }
    let address_handle = net.engine.create_ah(sender.session, sender.pd, &address(group)).unwrap().index;
    let (remote_qpn, remote_qkey) = (Qpn::MULTICAST.0, 0x1234);
    let message = request(7, SendOpcode::Send, &[sender.sge(0, 8)]);
    net.post_send(&sender, SendRequest { address_handle, remote_qpn, remote_qkey, ..message });
    let mut turns = 1;
    loop {
        let before = net.world.copies;
        let progress = net.engine.run(&mut net.world, net.now, sender.qp, u64::MAX);
        assert!(net.world.copies - before <= u64::from(REQUESTS_PER_RUN_MAX));
        if progress == Progress::Idle {
            break;
        }
        assert_eq!(progress, Progress::More);
        turns += 1;
    }
    assert_eq!((net.world.copies, turns), (count, 3));
    assert_eq!(net.statuses(&sender), [(7, CompletionStatus::Success)]);
}

#[test]
fn a_target_is_not_open_without_bound() {
    let mut net = Net::new();
    let target = net.end(QpType::XrcReceive);
    let xrcd = net.xrcd(&target);
    for _ in 1..1024 {
        net.engine.open_qp(target.session, xrcd, target.qpn).unwrap();
    }
    let before = net.engine.usage();
    assert_eq!(net.engine.open_qp(target.session, xrcd, target.qpn), Err(VerbsError::NoMemory));
    assert_eq!(net.engine.usage(), before);
    net.engine.destroy_qp(&mut net.world, net.now, target.session, target.qp).unwrap();
    assert!(net.engine.open_qp(target.session, xrcd, target.qpn).is_ok());
}
