//! Two networks of one tenant whose QPs talk to each other: what reaches whom, and that nothing
//! else does. Where an address is and who may talk the environment says; that what it was asked
//! about is what is reached is the engine's.
use crate::common::peer::*;
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::{Header, Opcode, Operation, PacketPosition, Service};

use CompletionStatus as Status;
use SendOpcode as Op;

const A: NetworkId = NetworkId(1);
const B: NetworkId = NetworkId(2);
/// Of another tenant.
const C: NetworkId = NetworkId(3);
const LOST: [(u64, Status); 1] = [(1, Status::RetryExceeded)];

/// For those of `network` the end's address is in `at`.
fn announce(net: &mut Net, network: NetworkId, end: &End, at: NetworkId) {
    net.world.address_map.insert((network, end.gid), at);
}

/// An end in each network that find each other's addresses.
fn both(net: &mut Net, one: QpType, other: QpType) -> (End, End) {
    let (a, b) = (net.end_in(A, one, false), net.end_in(B, other, false));
    announce(net, A, &b, B);
    announce(net, B, &a, A);
    (a, b)
}

/// The same, connected.
fn pair(net: &mut Net, qp_type: QpType) -> (End, End) {
    let (a, b) = both(net, qp_type, qp_type);
    net.connect(&a, &b);
    net.connect(&b, &a);
    (a, b)
}

/// An end with this address.
fn end_at(net: &mut Net, network: NetworkId, gid: Gid, qp_type: QpType) -> End {
    let vnic = net.engine.create_vnic(network, gid, VnicLimits::default()).unwrap();
    net.end_at(vnic, gid, qp_type, false)
}

/// Sends one message, and waits for all that time brings: what the sender and the receiver have of it.
fn sends(net: &mut Net, from: &End, to: &End) -> (Vec<(u64, Status)>, usize) {
    net.post_receive(to, 9, &[to.sge(0, 128)]);
    net.post_send(from, request(1, Op::Send, &[from.sge(4096, 16)]));
    net.settle();
    while net.expire() {}
    // A request flushed by an end in ERROR is no message.
    let sent = net.statuses(from).into_iter().filter(|done| done.0 == 1).collect();
    (sent, net.polls(to).iter().filter(|done| done.status == Status::Success).count())
}

/// A handle of the end for another's address.
fn handle(net: &mut Net, end: &End, to: &AddressHandleAttributes) -> u32 {
    net.engine.create_ah(end.session, end.pd, to).unwrap().index
}

/// The same with a datagram; how many arrived.
fn sends_datagram(net: &mut Net, from: &End, to: &End) -> usize {
    net.post_receive(to, 9, &[to.sge(0, 128)]);
    let address_handle = handle(net, from, &address(to.gid));
    let message = request(1, Op::Send, &[from.sge(4096, 16)]);
    net.post_send(from, SendRequest { address_handle, remote_qpn: to.qpn.0, remote_qkey: 0x1234, ..message });
    net.settle();
    while net.expire() {}
    assert_eq!(net.statuses(from), [(1, Status::Success)], "the sender does not learn of it");
    net.polls(to).len()
}

fn live(net: &mut Net, end: &End) {
    net.connect(end, end);
}

fn follow(net: &mut Net) {
    net.engine.handle_policy_changed();
    while net.engine.poll_policy(&mut net.world, 2) {}
    net.settle();
}

fn readdress(net: &mut Net, end: &End, to: Gid) -> Result<QpState, Refusal> {
    net.modify(end, &QpAttributes { address: address(to), ..Default::default() }, QpAttributeMask::AV)
}

// ---- one host

#[test]
fn connected_services_reach_the_other_network() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        for put_off in [false, true] {
            let mut net = Net::new();
            let (a, b) = pair(&mut net, qp_type);
            let asked: Vec<_> =
                net.world.asked.iter().map(|request| (request.network, request.other, request.from)).collect();
            assert_eq!(asked, [(A, B, a.gid), (B, A, b.gid)]);
            net.world.always_put_off = put_off;
            for (from, to) in [(&a, &b), (&b, &a)] {
                assert_eq!(sends(&mut net, from, to), (vec![(1, Status::Success)], 1));
                net.world.bytes(from.session, MEMORY_BASE, 4).copy_from_slice(b"over");
                net.post_send(from, remote(2, Op::RdmaWrite, &[from.sge(0, 4)], to, 512));
                net.settle();
                assert_eq!(net.statuses(from), [(2, Status::Success)]);
                assert_eq!(net.world.bytes(to.session, MEMORY_BASE + 512, 4), b"over");
            }
            assert_eq!(net.world.violations, []);
        }
    }
}

#[test]
fn a_target_reaches_the_other_network() {
    let mut net = Net::new();
    let (from, mut to) = both(&mut net, QpType::XrcSend, QpType::XrcReceive);
    net.connect(&from, &to);
    net.connect(&to, &from);
    let (srq, remote_srqn) = net.xrc_srq(&to);
    to.srq = Some(srq);
    for (at, status) in [(A, Status::Success), (B, Status::RetryExceeded)] {
        // The second time the target looks for its peer elsewhere.
        announce(&mut net, B, &from, at);
        net.to(&to, QpState::Reset).unwrap();
        net.connect(&to, &from);
        net.post_receive(&to, 9, &[to.sge(0, 128)]);
        net.post_send(&from, SendRequest { remote_srqn, ..request(1, Op::Send, &[from.sge(0, 16)]) });
        net.settle();
        while net.expire() {}
        assert_eq!(net.statuses(&from), [(1, status)]);
        assert_eq!(net.polls(&to).len(), usize::from(at == A));
    }
}

#[test]
fn the_direct_path_leads_across() {
    let mut net = Net::new();
    let (a, b) = pair(&mut net, QpType::Rc);
    for (one, other) in [(&a, &b), (&b, &a)] {
        assert_eq!(net.engine.direct_peer(one.qp), Ok(other.qp));
        let granted = net.engine.grantable(one.qp, other.key, MEMORY_BASE, 64, SendOpcode::RdmaWrite).unwrap();
        assert_eq!((granted.responder, granted.owner), (other.qp, other.session));
    }
    // One that looks for the other in its own network is no peer.
    announce(&mut net, B, &a, B);
    net.to(&b, QpState::Reset).unwrap();
    net.connect(&b, &a);
    for end in [&a, &b] {
        assert_eq!(net.engine.direct_peer(end.qp), Err(NotDirect::NoPeer));
    }
}

#[test]
fn both_ends_must_find_each_other() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut net = Net::new();
        let (a, b) = both(&mut net, qp_type, qp_type);
        net.world.address_map.remove(&(B, a.gid));
        net.connect(&a, &b);
        net.connect(&b, &a);
        for (from, to) in [(&a, &b), (&b, &a)] {
            let expected = if qp_type == QpType::Rc { LOST.to_vec() } else { vec![(1, Status::Success)] };
            assert_eq!(sends(&mut net, from, to), (expected, 0));
        }
    }
    let mut net = Net::new();
    let (a, b) = both(&mut net, QpType::Ud, QpType::Ud);
    net.world.address_map.remove(&(B, a.gid));
    live(&mut net, &a);
    live(&mut net, &b);
    for (from, to) in [(&a, &b), (&b, &a)] {
        assert_eq!(sends_datagram(&mut net, from, to), 0);
    }
}

#[test]
fn an_address_of_the_own_network_is_not_the_others() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut net = Net::new();
        let (a, b) = (net.end_in(A, qp_type, false), net.end_in(B, qp_type, false));
        announce(&mut net, B, &a, A);
        let own = end_at(&mut net, A, b.gid, qp_type);
        // The other's number, at the address that both have.
        net.connect(&a, &b);
        net.connect(&b, &a);
        assert_eq!(sends(&mut net, &a, &b).1, 0);
        let second = net.end_at(a.vnic, a.gid, qp_type, false);
        net.connect(&second, &own);
        net.connect(&own, &second);
        assert_eq!(sends(&mut net, &second, &own), (vec![(1, Status::Success)], 1));
    }
    let mut net = Net::new();
    let (a, b) = (net.end_in(A, QpType::Ud, false), net.end_in(B, QpType::Ud, false));
    announce(&mut net, B, &a, A);
    let own = end_at(&mut net, A, b.gid, QpType::Ud);
    for end in [&a, &b, &own] {
        live(&mut net, end);
    }
    assert_eq!((sends_datagram(&mut net, &a, &b), sends_datagram(&mut net, &a, &own)), (0, 1));
}

#[test]
fn a_network_that_was_not_asked_about_gets_nothing() {
    for qp_type in [QpType::Rc, QpType::Uc, QpType::Ud] {
        let mut net = Net::new();
        let (a, b) = both(&mut net, qp_type, qp_type);
        // It has the address of the one that may be reached, and does all it can to be taken for it.
        let stranger = end_at(&mut net, C, b.gid, qp_type);
        announce(&mut net, C, &a, A);
        net.connect(&a, &stranger);
        net.connect(&stranger, &a);
        let got = if qp_type == QpType::Ud {
            sends_datagram(&mut net, &a, &stranger)
        } else {
            for end in [&a, &stranger] {
                assert_eq!(net.engine.direct_peer(end.qp).ok(), None);
            }
            sends(&mut net, &a, &stranger).1 + sends(&mut net, &stranger, &a).1
        };
        assert_eq!(got, 0, "{qp_type:?}");
        let reported = net.world.violations.iter().filter(|one| one.network == A);
        assert_eq!(reported.map(|one| one.owner).collect::<Vec<_>>(), [Some(C)]);
    }
}

#[test]
fn a_refused_address_changes_nothing() {
    let mut net = Net::new();
    let (a, b) = pair(&mut net, QpType::Rc);
    let stranger = net.end_in(C, QpType::Rc, false);
    announce(&mut net, A, &stranger, C);
    net.world.apart.insert((A, C));
    let refused = Err(Refusal::Error(VerbsError::NotPermitted));
    net.to(&a, QpState::SqDrain).unwrap();
    assert_eq!(readdress(&mut net, &a, stranger.gid), refused);
    net.to(&a, QpState::ReadyToSend).unwrap();
    assert_eq!(sends(&mut net, &a, &b), (vec![(1, Status::Success)], 1));
    // At RTR.
    let fresh = net.end_in(A, QpType::Rc, false);
    net.init(&fresh);
    assert_eq!(net.try_rtr(&fresh, &stranger), refused);
    assert_eq!(net.state(&fresh), QpState::Init);
}

#[test]
fn another_address_is_looked_for_anew() {
    let mut net = Net::new();
    let (a, b) = both(&mut net, QpType::Rc, QpType::Rc);
    // In its own network there is nobody at the address that it has first.
    let elsewhere = net.end_in(A, QpType::Rc, false);
    net.connect(&a, &End { gid: elsewhere.gid, ..b });
    net.connect(&b, &a);
    net.to(&a, QpState::SqDrain).unwrap();
    readdress(&mut net, &a, b.gid).unwrap();
    net.to(&a, QpState::ReadyToSend).unwrap();
    assert_eq!(sends(&mut net, &a, &b), (vec![(1, Status::Success)], 1));
    // And back.
    net.to(&a, QpState::SqDrain).unwrap();
    readdress(&mut net, &a, elsewhere.gid).unwrap();
    net.to(&a, QpState::ReadyToSend).unwrap();
    assert_eq!(sends(&mut net, &a, &b), (LOST.to_vec(), 0));
}

#[test]
fn datagrams_reach_the_other_network() {
    let mut net = Net::new();
    let (a, b) = both(&mut net, QpType::Ud, QpType::Ud);
    live(&mut net, &a);
    live(&mut net, &b);
    for (from, to) in [(&a, &b), (&b, &a)] {
        assert_eq!(sends_datagram(&mut net, from, to), 1);
    }
    let (asked, located) = (net.world.asked.len(), net.world.located.len());
    assert_eq!(asked, 2);
    assert_eq!(sends_datagram(&mut net, &a, &b), 1);
    assert_eq!((net.world.asked.len(), net.world.located.len()), (asked, located), "a yes is kept, with its network");
    // Refused, and moved, from the next one on.
    net.world.apart.insert((A, B));
    net.engine.handle_policy_changed();
    net.world.violations.clear();
    assert_eq!(sends_datagram(&mut net, &a, &b), 0);
    assert!(net.world.violations.is_empty(), "it was refused, which is another's to note");
    net.world.apart.clear();
    assert_eq!(sends_datagram(&mut net, &a, &b), 1);
    net.world.address_map.clear();
    net.engine.handle_policy_changed();
    assert_eq!(sends_datagram(&mut net, &a, &b), 0);
}

#[test]
fn groups_stay_within_their_network() {
    let mut net = Net::new();
    let (a, b) = both(&mut net, QpType::Ud, QpType::Ud);
    let own = net.end_in(A, QpType::Ud, false);
    let group = Gid::from_ip("239.0.0.1".parse().unwrap());
    net.world.address_map.insert((A, group), B);
    for end in [&a, &b, &own] {
        live(&mut net, end);
        net.post_receive(end, 9, &[end.sge(0, 128)]);
    }
    for end in [&b, &own] {
        net.engine.attach_multicast(end.session, end.qp, group).unwrap();
    }
    let address_handle = handle(&mut net, &a, &address(group));
    let message = request(1, Op::Send, &[a.sge(0, 16)]);
    let to_group = SendRequest { address_handle, remote_qpn: Qpn::MULTICAST.0, remote_qkey: 0x1234, ..message };
    net.post_send(&a, to_group);
    net.settle();
    assert_eq!((net.polls(&own).len(), net.polls(&b).len()), (1, 0));
}

#[test]
fn a_connection_across_is_cut_when_policy_changes() {
    for is_moved in [false, true] {
        let mut net = Net::new();
        let (a, b) = pair(&mut net, QpType::Rc);
        let (c, d) = (net.end_in(A, QpType::Rc, false), net.end_in(A, QpType::Rc, false));
        net.connect(&c, &d);
        net.connect(&d, &c);
        follow(&mut net);
        assert_eq!((net.state(&a), net.state(&b)), (QpState::ReadyToSend, QpState::ReadyToSend));
        if is_moved {
            // Policy would let each talk to the address where it is now.
            net.world.address_map.clear();
        } else {
            net.world.apart.insert((A, B));
        }
        follow(&mut net);
        for end in [&a, &b] {
            assert_eq!(net.state(end), QpState::Error);
            assert_eq!(net.world.saw(AsyncEventKind::QpFatal, EventTarget::Qp(end.qp)), 1);
        }
        assert_eq!((net.state(&c), net.state(&d)), (QpState::ReadyToSend, QpState::ReadyToSend));
    }
}

#[test]
fn what_goes_wrong_across_is_no_attempt() {
    let mut net = Net::new();
    let (a, b) = pair(&mut net, QpType::Rc);
    // A key of the network that the responder's peer is in, and one of a third.
    let (own, stranger) = (net.end_in(A, QpType::Rc, false), net.end_in(C, QpType::Rc, false));
    for (key, expected) in [(own.key, vec![]), (stranger.key, vec![(A, Some(C))])] {
        net.post_send(&a, remote(1, Op::RdmaWrite, &[a.sge(0, 16)], &End { key, ..b }, 0));
        net.settle();
        assert_eq!(net.statuses(&a), [(1, Status::RemoteAccessError)]);
        let reported: Vec<_> = net.world.violations.drain(..).map(|one| (one.network, one.owner)).collect();
        assert_eq!(reported, expected);
        for (end, peer) in [(&a, &b), (&b, &a)] {
            net.to(end, QpState::Reset).unwrap();
            net.connect(end, peer);
        }
    }
    // A peer that is not ready.
    net.to(&b, QpState::Reset).unwrap();
    assert_eq!(sends(&mut net, &a, &b), (LOST.to_vec(), 0));
    assert_eq!(net.world.violations, []);
}

#[test]
fn a_snapshot_keeps_where_the_peer_is() {
    let mut net = Net::new();
    let (a, b) = pair(&mut net, QpType::Rc);
    let (c, d) = both(&mut net, QpType::Ud, QpType::Ud);
    live(&mut net, &c);
    live(&mut net, &d);
    assert_eq!(sends_datagram(&mut net, &c, &d), 1);
    let (snapshot, located) = (net.engine.snapshot(), net.world.located.len());
    net.engine = Engine::restore(&snapshot).unwrap();
    assert!(net.engine.snapshot() == snapshot);
    assert_eq!(sends(&mut net, &a, &b), (vec![(1, Status::Success)], 1));
    assert_eq!(sends_datagram(&mut net, &c, &d), 1);
    assert_eq!(net.world.located.len(), located, "nothing is looked for again");
}

// ---- another host

fn known(network: NetworkId, service: QpType, end: &End) -> PeerAnswer {
    let connected = (service != QpType::Ud).then_some((end.gid, end.qpn));
    PeerAnswer::Known(PeerInfo { network, gid: peer_gid(), ipv6_gid: None, service, connected })
}

/// An end of network A, and an address of B on the other host.
fn apart(qp_type: QpType) -> (Net, End) {
    let mut net = Net::new();
    let end = net.end_in(A, qp_type, false);
    net.world.address_map.insert((A, peer_gid()), B);
    net.world.address_map.insert((B, end.gid), A);
    net.world.paths_of.insert((B, peer_gid()), destination());
    (net, end)
}

/// The other host's router says something else.
fn says(net: &mut Net, answer: PeerAnswer) {
    net.world.peers.insert((HOST, Qpn(PEER_QPN)), answer);
    let Net { engine, world, now, .. } = net;
    engine.handle_peer_changed(world, *now, HOST, None);
    net.work();
}

#[test]
fn the_gate_opens_for_the_network_that_was_asked_about() {
    for qp_type in [QpType::Rc, QpType::Uc, QpType::XrcSend] {
        for (network, is_open) in [(A, false), (C, false), (B, true)] {
            let (mut net, end) = apart(qp_type);
            let service = if qp_type == QpType::XrcSend { QpType::XrcReceive } else { qp_type };
            let peer = End { gid: peer_gid(), qpn: Qpn(PEER_QPN), ..end };
            net.connect(&end, &peer);
            says(&mut net, known(network, service, &end));
            net.post_send(&end, request(1, Op::Send, &[end.sge(0, 16)]));
            net.work();
            while net.expire() {}
            assert_eq!(!net.world.sent.is_empty(), is_open, "{qp_type:?} {network:?}");
            let reported = net.world.violations.iter().map(|one| one.owner);
            assert_eq!(reported.collect::<Vec<_>>(), if network == C { vec![Some(C)] } else { vec![] });
            let reported = net.engine.peer_info(end.qpn).unwrap();
            assert_eq!(reported.network, A);
        }
    }
}

#[test]
fn another_host_hears_of_a_cut_across() {
    for is_moved in [false, true] {
        let (mut net, end) = apart(QpType::Rc);
        net.connect(&end, &End { gid: peer_gid(), qpn: Qpn(PEER_QPN), ..end });
        says(&mut net, known(B, QpType::Rc, &end));
        follow(&mut net);
        assert_eq!(net.state(&end), QpState::ReadyToSend);
        if is_moved {
            net.world.address_map.clear();
        } else {
            net.world.apart.insert((A, B));
        }
        follow(&mut net);
        assert_eq!(net.state(&end), QpState::Error);
        assert_eq!(net.world.disconnected, [(end.qpn, HOST, Qpn(PEER_QPN))]);
    }
}

#[test]
fn an_open_gate_closes_when_the_address_changes() {
    let (mut net, end) = apart(QpType::Rc);
    net.connect(&end, &End { gid: peer_gid(), qpn: Qpn(PEER_QPN), ..end });
    says(&mut net, known(B, QpType::Rc, &end));
    net.to(&end, QpState::SqDrain).unwrap();
    net.world.changed.clear();
    // To another network it can't go: who is behind the wire would not hear of it at once.
    assert_eq!(readdress(&mut net, &end, gid(202)), Err(Refusal::Error(VerbsError::NotPermitted)));
    net.world.address_map.insert((A, gid(201)), B);
    readdress(&mut net, &end, gid(201)).unwrap();
    assert_eq!(net.world.changed, [(end.qpn, None)], "its peer's host is to hear of it");
    net.to(&end, QpState::ReadyToSend).unwrap();
    net.post_send(&end, request(1, Op::Send, &[end.sge(0, 16)]));
    net.work();
    assert!(net.world.sent.is_empty());
    net.to(&end, QpState::SqDrain).unwrap();
    readdress(&mut net, &end, peer_gid()).unwrap();
    says(&mut net, known(B, QpType::Rc, &end));
    assert!(!net.world.sent.is_empty());
}

/// Sends a datagram to the QP of the other host by this index; how many packets went out.
fn sends_out(net: &mut Net, end: &End, sgid_index: u8) -> usize {
    let grh = GlobalRoute { dgid: peer_gid(), sgid_index, hop_limit: 64, ..Default::default() };
    let to = AddressHandleAttributes { grh: Some(grh), port: 1, ..Default::default() };
    let address_handle = handle(net, end, &to);
    let message = request(1, Op::Send, &[end.sge(0, 16)]);
    net.post_send(end, SendRequest { address_handle, remote_qpn: PEER_QPN, remote_qkey: 0x1234, ..message });
    net.work();
    net.world.sent.drain(..).count()
}

#[test]
fn datagrams_go_to_the_other_networks_on_another_host() {
    for (network, count) in [(A, 0), (C, 0), (B, 1)] {
        let (mut net, end) = apart(QpType::Ud);
        live(&mut net, &end);
        says(&mut net, known(network, QpType::Ud, &end));
        assert_eq!(sends_out(&mut net, &end, 0), count, "{network:?}");
        net.world.apart.insert((A, B));
        net.engine.handle_policy_changed();
        assert_eq!(sends_out(&mut net, &end, 0), 0);
    }
}

#[test]
fn machines_outside_are_of_the_own_network() {
    let (mut net, end) = apart(QpType::Ud);
    net.engine.set_external_gid(end.vnic, Some(gid(254))).unwrap();
    live(&mut net, &end);
    says(&mut net, known(B, QpType::Ud, &end));
    assert_eq!(sends_out(&mut net, &end, 0), 1);
    let others = |net: &Net| net.world.asked.last().map(|request| (request.is_external, request.other));
    assert_eq!(others(&net), Some((false, B)));
    // There is a yes for that address in B; by the second address it is another's.
    assert_eq!(sends_out(&mut net, &end, 1), 0);
    assert_eq!(others(&net), Some((true, A)));
    net.world.paths_of.insert((A, peer_gid()), destination());
    net.world.peers.insert((HOST, Qpn(PEER_QPN)), PeerAnswer::External(peer_gid()));
    assert_eq!(sends_out(&mut net, &end, 1), 1);
}

/// A datagram of the QP on the other host; how many arrived.
fn arrives(net: &mut Net, end: &End, to: Qpn) -> usize {
    let opcode = Opcode::new(Service::Ud, Operation::Send, PacketPosition::Only).unwrap();
    let mut header = Header::new(opcode, to.0, 0);
    header.deth.source_qpn = PEER_QPN;
    header.deth.qkey = 0x1234; // of Net::init
    net.post_receive(end, 9, &[end.sge(0, 128)]);
    let Net { engine, world, now, .. } = net;
    engine.handle_datagram(world, *now, HOST, &IpInfo::default(), &datagram(header, &[5; 8]));
    net.work();
    net.polls(end).len()
}

#[test]
fn datagrams_of_another_host_come_from_where_their_address_is() {
    let (mut net, end) = apart(QpType::Ud);
    live(&mut net, &end);
    for (network, count) in [(A, 0), (C, 0), (B, 1)] {
        net.world.peers.insert((HOST, Qpn(PEER_QPN)), known(network, QpType::Ud, &end));
        assert_eq!(arrives(&mut net, &end, end.qpn), count, "{network:?}");
    }
    assert_eq!(net.engine.drops().wrong_network, 2);
    let request = AuthorizationRequest {
        network: A,
        other: B,
        from: peer_gid(),
        to: end.gid,
        traffic: TrafficKind::Datagram,
        is_external: false,
        subject: Subject::To,
    };
    assert_eq!(net.world.asked, [request]);
    let located = net.world.located.len();
    assert_eq!(arrives(&mut net, &end, end.qpn), 1);
    assert_eq!((net.world.asked.len(), net.world.located.len()), (1, located), "a yes is kept, with its network");
    // One of another network with the same address does not profit by it.
    for network in [A, C] {
        net.world.peers.insert((HOST, Qpn(PEER_QPN)), known(network, QpType::Ud, &end));
        assert_eq!(arrives(&mut net, &end, end.qpn), 0, "{network:?}");
    }
    net.world.peers.insert((HOST, Qpn(PEER_QPN)), known(B, QpType::Ud, &end));
    net.world.apart.insert((A, B));
    net.engine.handle_policy_changed();
    assert_eq!(arrives(&mut net, &end, end.qpn), 0);
    assert_eq!(net.engine.drops().denied, 1);
    net.world.apart.clear();
    net.world.address_map.clear();
    net.engine.handle_policy_changed();
    assert_eq!(arrives(&mut net, &end, end.qpn), 0);
    assert_eq!(net.engine.drops().wrong_network, 5);
}

#[test]
fn groups_take_no_datagrams_of_the_other_network() {
    let (mut net, end) = apart(QpType::Ud);
    live(&mut net, &end);
    let group = Gid::from_ip("239.0.0.1".parse().unwrap());
    net.engine.attach_multicast(end.session, end.qp, group).unwrap();
    let number = net.engine.poll_group_change().unwrap().qpn.unwrap();
    for (network, count) in [(B, 0), (A, 1)] {
        net.world.peers.insert((HOST, Qpn(PEER_QPN)), known(network, QpType::Ud, &end));
        assert_eq!(arrives(&mut net, &end, number), count, "{network:?}");
    }
    // The answer for the group's sender says nothing of the same address elsewhere.
    net.world.apart.insert((A, B));
    net.world.peers.insert((HOST, Qpn(PEER_QPN)), known(B, QpType::Ud, &end));
    assert_eq!(arrives(&mut net, &end, end.qpn), 0);
}
