//! Machines without FreeFlow: who may talk to them, and to whom they may talk.
use crate::common::peer::{self, HOST, PEER_QPN, destination, peer_gid};
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::cm::MAD_BYTES;
use freeflow_wire::{Header, Opcode, Operation, PacketPosition, Service};

/// This host's own address, as such machines know it.
fn own() -> Gid {
    gid(254)
}

fn outside() -> AddressHandleAttributes {
    let grh = GlobalRoute { dgid: peer_gid(), sgid_index: 1, hop_limit: 64, ..Default::default() };
    AddressHandleAttributes { grh: Some(grh), port: 1, ..Default::default() }
}

/// One such machine is there.
fn net() -> Net {
    let mut net = Net::new();
    net.world.paths.insert(peer_gid(), destination());
    net.world.peers.insert((HOST, Qpn(PEER_QPN)), PeerAnswer::External(peer_gid()));
    net
}

fn to_rtr(net: &mut Net, end: &End) -> Result<QpState, Refusal> {
    use QpAttributeMask as M;
    let rtr = QpAttributes {
        state: QpState::ReadyToReceive,
        address: outside(),
        dest_qpn: PEER_QPN,
        path_mtu: PathMtu::Mtu1024,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 12,
        ..Default::default()
    };
    let path = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
    net.modify(end, &rtr, M::STATE | path)
}

/// An RC QP in RTS that is connected to the machine's QP.
fn connected(net: &mut Net) -> End {
    let end = net.end(QpType::Rc);
    net.engine.set_external_gid(end.vnic, Some(own())).unwrap();
    net.init(&end);
    to_rtr(net, &end).unwrap();
    net.rts(&end);
    end
}

/// Posts a SEND; how many packets went out.
fn sent_by(net: &mut Net, end: &End) -> usize {
    let send = request(1, SendOpcode::Send, &[end.sge(0, 100)]);
    net.post_send(end, send);
    net.work();
    net.world.sent.drain(..).count()
}

fn change_of_peer(net: &mut Net) {
    let Net { engine, world, now, .. } = net;
    engine.handle_peer_changed(world, *now, HOST, None);
    net.work();
}

/// A datagram of the machine to this QPN.
fn datagram(net: &mut Net, to: Qpn) {
    let opcode = Opcode::new(Service::Ud, Operation::Send, PacketPosition::Only).unwrap();
    let mut header = Header::new(opcode, to.0, 0);
    header.deth.source_qpn = PEER_QPN;
    header.deth.qkey = 0x1234; // of Net::init
    let Net { engine, world, now, .. } = net;
    engine.handle_datagram(world, *now, HOST, &IpInfo::default(), &peer::datagram(header, &[5; 8]));
    net.work();
}

#[test]
fn without_permission_there_is_no_second_gid() {
    let mut net = net();
    let end = net.end(QpType::Rc);
    net.init(&end);
    assert!(matches!(to_rtr(&mut net, &end), Err(Refusal::Error(VerbsError::InvalidArgument))));
    assert!(net.engine.create_ah(end.session, end.pd, &outside()).is_err());
    net.engine.set_external_gid(end.vnic, Some(own())).unwrap();
    assert!(net.engine.create_ah(end.session, end.pd, &outside()).is_ok());
    let third =
        AddressHandleAttributes { grh: outside().grh.map(|grh| GlobalRoute { sgid_index: 2, ..grh }), ..outside() };
    assert!(net.engine.create_ah(end.session, end.pd, &third).is_err());
    assert!(to_rtr(&mut net, &end).is_ok());
}

#[test]
fn a_qp_with_permission_sends() {
    let mut net = net();
    let end = connected(&mut net);
    assert_eq!(sent_by(&mut net, &end), 1);
}

#[test]
fn a_qp_of_the_machine_is_of_one_vnic_here() {
    let mut net = net();
    let (first, second) = (connected(&mut net), connected(&mut net));
    assert_eq!(sent_by(&mut net, &first), 1);
    // Its packets would be taken for the first's.
    assert_eq!(sent_by(&mut net, &second), 0);
    change_of_peer(&mut net);
    assert_eq!(net.world.sent.drain(..).count(), 0);
    // Once the first is gone, the second may.
    net.to(&first, QpState::Reset).unwrap();
    change_of_peer(&mut net);
    assert!(!net.world.sent.is_empty());
}

#[test]
fn two_qps_of_one_vnic_may_try_the_same_one() {
    let mut net = net();
    let first = connected(&mut net);
    let second = net.end_at(first.vnic, first.gid, QpType::Rc, false);
    net.init(&second);
    to_rtr(&mut net, &second).unwrap();
    net.rts(&second);
    assert_eq!((sent_by(&mut net, &first), sent_by(&mut net, &second)), (1, 1));
}

#[test]
fn what_was_permitted_can_be_taken_away() {
    let mut net = net();
    let end = connected(&mut net);
    assert_eq!(sent_by(&mut net, &end), 1);
    net.engine.set_external_gid(end.vnic, None).unwrap();
    change_of_peer(&mut net);
    net.world.sent.clear();
    assert_eq!(sent_by(&mut net, &end), 0);
}

#[test]
fn datagrams_reach_those_who_may_talk_to_their_sender() {
    let mut net = net();
    let (stranger, friend) = (net.end(QpType::Ud), net.end(QpType::Ud));
    net.engine.set_external_gid(friend.vnic, Some(own())).unwrap();
    for end in [&stranger, &friend] {
        net.init(end);
        net.to(end, QpState::ReadyToReceive).unwrap();
        net.post_receive(end, 1, &[end.sge(0, 1000)]);
        datagram(&mut net, end.qpn);
    }
    assert!(net.polls(&stranger).is_empty());
    assert_eq!(net.engine.drops().wrong_source, 1);
    assert_eq!(net.only(&friend).byte_count, 48);
    // The GRH, here an IPv4 header in its second half (IBTA A17.4.5.1): from the machine to this host.
    let grh = net.world.bytes(friend.session, MEMORY_BASE, 40).to_vec();
    assert_eq!((&grh[32..36], &grh[36..40]), (&peer_gid().0[12..], &own().0[12..]));
}

/// A packet to QP 1: its headers as `change` leaves them, and so much payload.
fn management(net: &mut Net, bytes: usize, change: impl FnOnce(&mut Header)) -> Drops {
    let head = management_head(7);
    let (mut header, _) = Header::parse(head.header.as_slice()).unwrap();
    change(&mut header);
    let head = PacketHead::new(header, bytes);
    let packet = [head.header.as_slice(), &vec![9; bytes]].concat();
    let Net { engine, world, now, .. } = net;
    engine.handle_datagram(world, *now, HOST, &IpInfo::default(), &packet);
    net.engine.drops()
}

#[test]
fn management_datagrams_are_checked() {
    let mut net = net();
    assert_eq!(management(&mut net, MAD_BYTES, |_| {}).wrong_source, 1, "nobody wants it");
    net.world.takes_mads = true;
    assert_eq!(management(&mut net, MAD_BYTES, |header| header.deth.source_qpn = PEER_QPN).wrong_source, 2);
    assert_eq!(management(&mut net, MAD_BYTES, |header| header.deth.qkey = 0x1234).wrong_qkey, 1);
    assert_eq!(management(&mut net, MAD_BYTES - 4, |_| {}).malformed, 1);
    assert_eq!(management(&mut net, MAD_BYTES + 4, |_| {}).malformed, 2);
    let immediate = Opcode::new(Service::Ud, Operation::SendImmediate, PacketPosition::Only).unwrap();
    assert_eq!(management(&mut net, MAD_BYTES, |header| header.opcode = immediate).wrong_service, 1);
    assert!(net.world.mads.is_empty());
    management(&mut net, MAD_BYTES, |_| {});
    assert_eq!(net.world.mads, [(HOST, [9; MAD_BYTES])]);
}

/// A UD QP that may send, of a vNIC with an external GID.
fn external_sender() -> (Net, End) {
    let mut net = net();
    let end = net.end(QpType::Ud);
    net.engine.set_external_gid(end.vnic, Some(own())).unwrap();
    net.init(&end);
    net.to(&end, QpState::ReadyToReceive).unwrap();
    net.rts(&end);
    (net, end)
}

#[test]
fn tenants_cannot_send_management_datagrams() {
    let (mut net, end) = external_sender();
    let ah = net.engine.create_ah(end.session, end.pd, &outside()).unwrap();
    for (qpn, packets) in [(PEER_QPN, 1), (1, 0), (0, 0), (1 << 24 | 1, 0)] {
        net.world.peers.insert((HOST, Qpn(qpn)), PeerAnswer::External(peer_gid()));
        let mut send = request(1, SendOpcode::Send, &[end.sge(0, MAD_BYTES as u32)]);
        (send.address_handle, send.remote_qpn, send.remote_qkey) = (ah.index, qpn, 0x8001_0000);
        net.post_send(&end, send);
        net.work();
        assert_eq!(net.world.sent.drain(..).count(), packets, "to QP {qpn:#x}");
        assert_eq!(net.only(&end).status, CompletionStatus::Success, "as if it were lost");
    }
}

#[test]
fn a_handle_that_is_older_than_the_end_of_the_permission_reaches_nobody() {
    let (mut net, end) = external_sender();
    let send = |net: &mut Net, handle: u32| {
        let mut send = request(1, SendOpcode::Send, &[end.sge(0, 64)]);
        (send.address_handle, send.remote_qpn, send.remote_qkey) = (handle, PEER_QPN, 0x1234);
        net.post_send(&end, send);
        net.work();
        assert_eq!(net.only(&end).status, CompletionStatus::Success);
        net.world.sent.drain(..).count()
    };
    let by_second = net.engine.create_ah(end.session, end.pd, &outside()).unwrap().index;
    let by_first = net.engine.create_ah(end.session, end.pd, &address(peer_gid())).unwrap().index;
    send(&mut net, by_first);
    // A yes by the first address says nothing of the second.
    let asked = net.world.asked.len();
    assert_eq!(send(&mut net, by_second), 1);
    assert!(net.world.asked.len() > asked && net.world.asked.last().unwrap().is_external);
    net.engine.set_external_gid(end.vnic, None).unwrap();
    net.engine.handle_policy_changed();
    send(&mut net, by_first);
    assert_eq!(send(&mut net, by_second), 0);
}
