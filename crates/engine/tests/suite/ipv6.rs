//! vNICs with an IPv4 and an IPv6 address: which of them speaks, to whom, and what the other one sees.
use crate::common::peer::{HOST, PEER_QPN, datagram, destination};
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::{Header, Opcode, Operation, PacketPosition, Service};

const IPV6: u8 = 2;

fn six(last: u8) -> Gid {
    Gid::from_ip(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last.into()).into())
}

/// An end like [`Net::end`]'s, with the IPv6 address of this number.
fn dual(net: &mut Net, qp_type: QpType, number: u8) -> End {
    let first = gid(number);
    let vnic = net.engine.create_dual_vnic(NetworkId(1), (first, Some(six(number))), VnicLimits::default());
    net.end_at(vnic.unwrap(), first, qp_type, false)
}

/// The same without.
fn single(net: &mut Net, qp_type: QpType, number: u8) -> End {
    let vnic = net.engine.create_vnic(NetworkId(1), gid(number), VnicLimits::default()).unwrap();
    net.end_at(vnic, gid(number), qp_type, false)
}

fn by(index: u8, dgid: Gid) -> AddressHandleAttributes {
    let grh = GlobalRoute { dgid, sgid_index: index, hop_limit: 64, ..Default::default() };
    AddressHandleAttributes { grh: Some(grh), port: 1, ..Default::default() }
}

fn to_rtr(net: &mut Net, end: &End, address: AddressHandleAttributes, dest: Qpn) -> Result<QpState, Refusal> {
    use QpAttributeMask as M;
    net.init(end);
    let rtr = QpAttributes {
        state: QpState::ReadyToReceive,
        address,
        dest_qpn: dest.0,
        path_mtu: PathMtu::Mtu1024,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 12,
        ..Default::default()
    };
    let own = if net.types[&end.qp] == QpType::Uc { 0 } else { M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER };
    net.modify(end, &rtr, M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | own)
}

fn sent_and_received(net: &mut Net, from: &End, to: &End) -> Vec<CompletionStatus> {
    net.post_receive(to, 1, &[to.sge(0, 100)]);
    net.post_send(from, request(2, SendOpcode::Send, &[from.sge(0, 100)]));
    net.settle();
    while net.expire() {}
    let mut all = net.polls(to);
    all.extend(net.polls(from));
    all.iter().map(|done| done.status).collect()
}

#[test]
fn an_address_is_one_vnics() {
    let mut net = Net::new();
    let make = |net: &mut Net, network, first, second| {
        net.engine.create_dual_vnic(NetworkId(network), (first, second), VnicLimits::default())
    };
    assert!(make(&mut net, 1, gid(1), Some(six(1))).is_ok());
    for (first, second) in
        [(gid(2), Some(six(1))), (gid(1), Some(six(2))), (gid(2), Some(gid(3))), (gid(2), Some(Gid([0; 16])))]
    {
        assert_eq!(make(&mut net, 1, first, second), Err(VerbsError::InvalidArgument), "{first} {second:?}");
    }
    assert!(make(&mut net, 2, gid(1), Some(six(1))).is_ok(), "another network's");
}

#[test]
fn families_do_not_mix_where_there_are_two() {
    let mut net = Net::new();
    let (one, two) = (dual(&mut net, QpType::Rc, 1), dual(&mut net, QpType::Rc, 2));
    let old = single(&mut net, QpType::Rc, 3);
    let group6 = Gid::from_ip("ff15::7".parse().unwrap());
    for (index, to, good) in [
        (0, gid(2), true),
        (0, six(2), false),
        (IPV6, gid(2), false),
        (IPV6, six(2), true),
        (3, six(2), false),
        (1, six(2), false),
        (0, group6, true),
        (IPV6, group6, true),
    ] {
        let made = net.engine.create_ah(one.session, one.pd, &by(index, to));
        assert_eq!(made.is_ok(), good, "{index} {to}");
        if !to.is_multicast() {
            let end = net.end_at(one.vnic, one.gid, QpType::Rc, false);
            assert_eq!(to_rtr(&mut net, &end, by(index, to), two.qpn).is_ok(), good, "{index} {to}");
        }
    }
    // A vNIC without IPv6 has no such entry, and is notified of nothing that is nowhere.
    assert!(net.engine.create_ah(old.session, old.pd, &by(IPV6, six(2))).is_err());
    assert!(net.engine.create_ah(old.session, old.pd, &by(0, six(2))).is_ok());
}

#[test]
fn connected_services_reach_each_other_by_both() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        for (index, a, b) in [(0, gid(1), gid(2)), (IPV6, six(1), six(2))] {
            let mut net = Net::new();
            let (one, two) = (dual(&mut net, qp_type, 1), dual(&mut net, qp_type, 2));
            to_rtr(&mut net, &one, by(index, b), two.qpn).unwrap();
            to_rtr(&mut net, &two, by(index, a), one.qpn).unwrap();
            net.rts(&one);
            net.rts(&two);
            assert_eq!(sent_and_received(&mut net, &one, &two), [CompletionStatus::Success; 2], "{index}");
            let info = net.engine.peer_info(one.qpn).unwrap();
            assert_eq!((info.gid, info.ipv6_gid, info.connected), (a, None, Some((b, two.qpn))));
            // All of it is in a snapshot.
            let snapshot = net.engine.snapshot();
            assert_eq!(Engine::restore(&snapshot).unwrap().snapshot(), snapshot);
        }
    }
}

#[test]
fn a_connection_by_two_families_is_none() {
    let mut net = Net::new();
    let (one, two) = (dual(&mut net, QpType::Rc, 1), dual(&mut net, QpType::Rc, 2));
    to_rtr(&mut net, &one, by(IPV6, six(2)), two.qpn).unwrap();
    to_rtr(&mut net, &two, by(0, gid(1)), one.qpn).unwrap();
    net.rts(&one);
    net.rts(&two);
    assert_eq!(sent_and_received(&mut net, &one, &two), [CompletionStatus::RetryExceeded]);
}

fn live(net: &mut Net, end: &End) {
    net.init(end);
    net.to(end, QpState::ReadyToReceive).unwrap();
    net.rts(end);
    net.post_receive(end, 1, &[end.sge(0, 1000)]);
}

fn send_datagram(net: &mut Net, from: &End, to: AddressHandleAttributes, qpn: Qpn) {
    let handle = net.engine.create_ah(from.session, from.pd, &to).unwrap().index;
    let send = request(2, SendOpcode::Send, &[from.sge(4096, 16)]);
    net.post_send(from, SendRequest { address_handle: handle, remote_qpn: qpn.0, remote_qkey: 0x1234, ..send });
    net.settle();
}

/// Source and destination of the GRH in front of the message that came.
fn grh(net: &mut Net, end: &End) -> Option<(Gid, Gid)> {
    let came = net.polls(end).into_iter().find(|done| !done.flags.contains(CompletionFlags::SEND_QUEUE))?;
    assert_eq!(came.status, CompletionStatus::Success);
    let bytes = net.world.bytes(end.session, MEMORY_BASE, 40).to_vec();
    let gid = |at: usize| Gid(bytes[at..at + 16].try_into().unwrap());
    assert_eq!(came.flags.contains(CompletionFlags::IPV6_HEADER), bytes[0] >> 4 == 6);
    let v4 = |at: usize| Gid::from_ip(<[u8; 4]>::try_from(&bytes[at..at + 4]).unwrap().into());
    Some(if bytes[0] >> 4 == 6 { (gid(8), gid(24)) } else { (v4(32), v4(36)) })
}

#[test]
fn datagrams_within_the_host_say_by_whom() {
    let mut net = Net::new();
    let (one, two) = (dual(&mut net, QpType::Ud, 1), dual(&mut net, QpType::Ud, 2));
    net.connect(&one, &one);
    live(&mut net, &two);
    for (index, from, to) in [(IPV6, six(1), six(2)), (0, gid(1), gid(2))] {
        net.post_receive(&two, 1, &[two.sge(0, 1000)]);
        send_datagram(&mut net, &one, by(index, to), two.qpn);
        assert_eq!(grh(&mut net, &two), Some((from, to)));
    }
    // An IPv6 group, by either of one's own.
    let group = Gid::from_ip("ff15::7".parse().unwrap());
    net.engine.attach_multicast(two.session, two.qp, group).unwrap();
    net.post_receive(&two, 1, &[two.sge(0, 1000)]);
    send_datagram(&mut net, &one, by(IPV6, group), Qpn::MULTICAST);
    assert_eq!(grh(&mut net, &two), Some((six(1), group)));
    // A message for another's address goes nowhere.
    net.post_receive(&two, 1, &[two.sge(0, 1000)]);
    send_datagram(&mut net, &one, by(IPV6, six(3)), two.qpn);
    assert_eq!(grh(&mut net, &two), None);
}

/// A datagram of the QP on the other host.
fn arrives(net: &mut Net, to: Qpn, by_ipv6: bool) {
    let opcode = Opcode::new(Service::Ud, Operation::Send, PacketPosition::Only).unwrap();
    let mut header = Header::new(opcode, to.0, 0);
    header.deth.source_qpn = PEER_QPN;
    header.deth.qkey = 0x1234; // of Net::init
    header.by_ipv6 = by_ipv6;
    let Net { engine, world, now, .. } = net;
    engine.handle_datagram(world, *now, HOST, &IpInfo::default(), &datagram(header, &[5; 8]));
    net.work();
}

fn known(gid: Gid, ipv6_gid: Option<Gid>) -> PeerAnswer {
    PeerAnswer::Known(PeerInfo { network: NetworkId(1), gid, ipv6_gid, service: QpType::Ud, connected: None })
}

#[test]
fn datagrams_between_hosts_say_by_whom() {
    let mut net = Net::new();
    let end = dual(&mut net, QpType::Ud, 1);
    live(&mut net, &end);
    let info = net.engine.peer_info(end.qpn).unwrap();
    assert_eq!((info.gid, info.ipv6_gid), (gid(1), Some(six(1))));
    net.world.paths.extend([(gid(9), destination()), (six(9), destination())]);
    net.world.peers.insert((HOST, Qpn(PEER_QPN)), known(gid(9), Some(six(9))));
    for (index, to) in [(0, gid(9)), (IPV6, six(9))] {
        send_datagram(&mut net, &end, by(index, to), Qpn(PEER_QPN));
        let sent: Vec<Sent> = net.world.sent.drain(..).collect();
        let (header, _) = Header::parse(&sent[0].bytes).unwrap();
        assert_eq!((sent.len(), header.by_ipv6), (1, index == IPV6));
        let (from, own) = if index == IPV6 { (six(9), six(1)) } else { (gid(9), gid(1)) };
        net.polls(&end);
        arrives(&mut net, end.qpn, index == IPV6);
        assert_eq!(grh(&mut net, &end), Some((from, own)));
        net.post_receive(&end, 1, &[end.sge(0, 1000)]);
    }
    // A sender, or a receiver, that has no such address.
    net.world.peers.insert((HOST, Qpn(PEER_QPN)), known(gid(9), None));
    arrives(&mut net, end.qpn, true);
    assert_eq!((grh(&mut net, &end), net.engine.drops().wrong_source), (None, 1));
    send_datagram(&mut net, &end, by(IPV6, six(9)), Qpn(PEER_QPN));
    assert!(net.world.sent.is_empty());
    net.world.peers.insert((HOST, Qpn(PEER_QPN)), known(gid(9), Some(six(9))));
    let old = single(&mut net, QpType::Ud, 3);
    live(&mut net, &old);
    arrives(&mut net, old.qpn, true);
    assert_eq!((grh(&mut net, &old), net.engine.drops().wrong_source), (None, 2));
}

#[test]
fn policy_hears_which_address_speaks() {
    let mut net = Net::new();
    let (one, two) = (dual(&mut net, QpType::Ud, 1), dual(&mut net, QpType::Ud, 2));
    net.connect(&one, &one);
    live(&mut net, &two);
    net.world.denied.insert((six(1), six(2)));
    send_datagram(&mut net, &one, by(IPV6, six(2)), two.qpn);
    assert_eq!(grh(&mut net, &two), None);
    send_datagram(&mut net, &one, by(0, gid(2)), two.qpn);
    assert_eq!(grh(&mut net, &two), Some((gid(1), gid(2))));
    let (a, b) = (dual(&mut net, QpType::Rc, 3), dual(&mut net, QpType::Rc, 4));
    net.world.denied.extend([(six(3), six(4)), (six(4), six(3))]);
    assert_eq!(to_rtr(&mut net, &a, by(IPV6, six(4)), b.qpn), Err(Refusal::Error(VerbsError::NotPermitted)));
    assert!(to_rtr(&mut net, &a, by(0, gid(4)), b.qpn).is_ok());
}
