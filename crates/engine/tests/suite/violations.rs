//! Attempts of one network's QPs on another's are reported, with the owner's name; errors within a
//! network are not.
use crate::common::peer::*;
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

use CompletionStatus as Status;
use SendOpcode as Op;
use ViolationKind as Kind;

const OWN: NetworkId = NetworkId(1);
const OTHER: NetworkId = NetworkId(2);

fn reported(net: &mut Net) -> Vec<(Kind, Gid, u32, Option<NetworkId>)> {
    let violations = std::mem::take(&mut net.world.violations);
    violations.iter().map(|one| (one.kind, one.from, one.number, one.owner)).collect()
}

/// Connects one way, as a program does that got another's QPN.
fn aim(net: &mut Net, from: &End, at: &End) {
    net.init(from);
    net.rtr(from, at);
    net.rts(from);
}

#[test]
fn messages_at_another_networks_queue_pair() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut net = Net::new();
        let (a, b) = (net.end(qp_type), net.end_in(OTHER, qp_type, false));
        aim(&mut net, &a, &b);
        for id in 1..=2 {
            net.post_send(&a, request(id, Op::Send, &[a.sge(0, 16)]));
            net.settle();
        }
        let expected = (Kind::Message, a.gid, b.qpn.0, Some(OTHER));
        // A reliable one waits at the first, which is reported once.
        assert_eq!(reported(&mut net), if qp_type == QpType::Rc { vec![expected] } else { vec![expected; 2] });
        // One that nobody has.
        let (c, nobody) = (net.end(qp_type), End { qpn: Qpn(b.qpn.0 ^ 1), ..b });
        aim(&mut net, &c, &nobody);
        net.post_send(&c, request(1, Op::Send, &[c.sge(0, 16)]));
        net.settle();
        assert_eq!(reported(&mut net), [(Kind::Message, c.gid, nobody.qpn.0, None)]);
    }
}

#[test]
fn peers_that_are_not_ready_or_have_ended_are_no_attempts() {
    let mut net = Net::new();
    let (a, b) = (net.end(QpType::Rc), net.end(QpType::Rc));
    aim(&mut net, &a, &b);
    net.post_send(&a, request(1, Op::RdmaWrite, &[]));
    net.settle();
    assert_eq!(net.engine.vnic_counters(a.vnic).unwrap().undeliverable, 1, "it is not ready");
    net.init(&b);
    net.rtr(&b, &a);
    net.settle();
    assert_eq!(net.statuses(&a), [(1, Status::Success)]);
    net.engine.destroy_qp(&mut net.world, net.now, b.session, b.qp).unwrap();
    net.post_send(&a, request(2, Op::RdmaWrite, &[]));
    net.settle();
    assert_eq!(net.engine.vnic_counters(a.vnic).unwrap().undeliverable, 2, "it has ended");
    assert_eq!(reported(&mut net), []);
}

#[test]
fn datagrams_and_groups() {
    let mut net = Net::new();
    let (a, b) = (net.end(QpType::Ud), net.end_in(OTHER, QpType::Ud, false));
    net.connect(&a, &a);
    net.connect(&b, &b);
    let group = Gid::from_ip("239.0.0.1".parse().unwrap());
    net.engine.attach_multicast(b.session, b.qp, group).unwrap();
    for (to, qpn, kind, owner) in
        [(b.gid, b.qpn, Kind::Datagram, Some(OTHER)), (group, Qpn::MULTICAST, Kind::Multicast, None)]
    {
        let handle = net.engine.create_ah(a.session, a.pd, &address(to)).unwrap().index;
        let message =
            SendRequest { address_handle: handle, remote_qpn: qpn.0, remote_qkey: 0x1234, ..request(1, Op::Send, &[]) };
        net.post_send(&a, message);
        net.settle();
        assert_eq!(net.statuses(&a), [(1, Status::Success)]);
        assert_eq!(reported(&mut net), [(kind, a.gid, qpn.0, owner)]);
    }
}

#[test]
fn keys_of_another_network() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let stranger = net.end_in(OTHER, QpType::Rc, false);
    let mut write = request(1, Op::RdmaWrite, &[a.sge(0, 16)]);
    (write.remote_address, write.rkey) = (MEMORY_BASE, stranger.key);
    net.post_send(&a, write);
    net.settle();
    assert_eq!(net.statuses(&a), [(1, Status::RemoteAccessError)]);
    assert_eq!(reported(&mut net), [(Kind::RemoteKey, a.gid, stranger.key, Some(OTHER))]);
    assert_eq!(net.engine.vnic_counters(b.vnic).unwrap().remote_access_errors, 1);
    // The same with a key of the same network, and one that nobody has.
    let own = net.end(QpType::Rc).key;
    for key in [own, own ^ 1 << 31] {
        let (a, _) = net.pair(QpType::Rc);
        let mut write = request(1, Op::RdmaWrite, &[a.sge(0, 16)]);
        (write.remote_address, write.rkey) = (MEMORY_BASE, key);
        net.post_send(&a, write);
        net.settle();
        assert_eq!(net.statuses(&a), [(1, Status::RemoteAccessError)]);
        assert_eq!(reported(&mut net), []);
        // Another engine of the host may know the last one.
        let asked: Vec<_> =
            net.world.unknown_keys.drain(..).map(|(own, tried)| (own, tried.from, tried.number)).collect();
        let is_known = net.engine.network_of_key(key).is_some();
        assert_eq!((is_known, asked), if key == own { (true, vec![]) } else { (false, vec![(OWN, a.gid, key)]) });
    }
}

#[test]
fn a_source_address_that_is_not_its_own() {
    let mut net = Net::new();
    let (a, b) = (net.end(QpType::Rc), net.end(QpType::Rc));
    net.init(&a);
    let mut attributes = QpAttributes {
        state: QpState::ReadyToReceive,
        address: address(b.gid),
        dest_qpn: b.qpn.0,
        ..Default::default()
    };
    if let Some(route) = &mut attributes.address.grh {
        route.sgid_index = 7;
    }
    use QpAttributeMask as M;
    let mask = M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
    assert_eq!(net.modify(&a, &attributes, mask), Err(Refusal::Error(VerbsError::InvalidArgument)));
    assert_eq!(reported(&mut net), [(Kind::SourceAddress, a.gid, 7, None)]);
}

#[test]
fn a_number_of_another_host_is_not_this_ones() {
    let mut net = Net::new();
    let (a, b) = (net.end(QpType::Uc), net.end_in(OTHER, QpType::Uc, false));
    net.world.paths.insert(peer_gid(), destination());
    // The same number as here, of another network; there it is nobody's, then one's that is not ready.
    let info = PeerInfo { network: OWN, gid: peer_gid(), ipv6_gid: None, service: QpType::Uc, connected: None };
    aim(&mut net, &a, &End { gid: peer_gid(), ..b });
    for (id, answer, expected) in [(1, PeerAnswer::Absent, 1), (2, PeerAnswer::Known(info), 0)] {
        net.world.peers.insert((HOST, b.qpn), answer);
        net.post_send(&a, request(id, Op::Send, &[a.sge(0, 16)]));
        net.settle();
        while net.expire() {}
        let reported = reported(&mut net);
        assert_eq!(reported.iter().map(|one| one.3).collect::<Vec<_>>(), vec![None; expected]);
    }
}

#[test]
fn a_peer_on_another_host_that_is_another_networks() {
    let mut link = Link::new();
    let end = link.end;
    assert_eq!(reported(&mut link.net), []);
    let info = PeerInfo { network: OTHER, gid: peer_gid(), ipv6_gid: None, service: QpType::Rc, connected: None };
    link.net.world.peers.insert((HOST, Qpn(PEER_QPN)), PeerAnswer::Asked);
    link.net.engine.handle_peer_changed(&mut link.net.world, link.net.now, HOST, None);
    link.net.post_send(&end, request(1, Op::Send, &[end.sge(0, 16)]));
    link.net.settle();
    assert_eq!(reported(&mut link.net), [], "it has not answered yet");
    link.net.world.peers.insert((HOST, Qpn(PEER_QPN)), PeerAnswer::Known(PeerInfo { network: OWN, ..info }));
    link.net.engine.handle_peer_changed(&mut link.net.world, link.net.now, HOST, None);
    assert_eq!(reported(&mut link.net), [], "it is not connected yet");
    link.net.world.peers.insert((HOST, Qpn(PEER_QPN)), PeerAnswer::Known(info));
    link.net.engine.handle_peer_changed(&mut link.net.world, link.net.now, HOST, None);
    assert_eq!(reported(&mut link.net), [(Kind::Message, end.gid, PEER_QPN, Some(OTHER))]);
    assert_eq!(link.net.engine.vnic_counters(end.vnic).unwrap().undeliverable, 1);
}
