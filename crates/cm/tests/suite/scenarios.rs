//! One thing after another, as a program would do it.
use crate::common::*;
use freeflow_cm::{Limits, Link, Owner, Scope};
use freeflow_protocol::cm::{
    CmAddress, CmEventBody, CmEventKind as Kind, CmOption, CmReply, CmRequest, ConnectionParameters, Ece, PortSpace,
};
use freeflow_verbs::{Access, Duration, Gid, QpAttributeMask as Mask, QpState, QpType, VerbsError};
use freeflow_wire::cm::{Kind as Message, Mad, Rej, reason};

const PORT: u16 = 7174;
/// Where the passive side is, seen from vNIC 0 of host 0.
const WAYS: [(usize, fn() -> Gid); 3] = [(0, || gid(0, 1)), (1, || gid(1, 1)), (1, || external(1))];

/// A connection that stands, with its ends; all events so far are taken.
fn connected(world: &mut World, passive_host: usize, to: Gid) -> (Ident, Ident, Ident) {
    let listener = world.listener(vnic(passive_host, 1), PORT, 1);
    let active = world.tcp(vnic(0, 0), 2);
    world.resolve(active, to, PORT);
    world.heard(0);
    world.connect(active, parameters(0x11)).unwrap();
    let passive = world.requests(vnic(passive_host, 1))[0];
    world.accept(passive, 3, 0x22).unwrap();
    assert!(world.kinds(0).contains(&(2, Kind::ConnectResponse, 0)));
    world.call(active, |id| CmRequest::Establish { id }).unwrap();
    assert!(world.kinds(passive_host).contains(&(3, Kind::Established, 0)));
    (listener, active, passive)
}

#[test]
fn a_connection_and_its_end() {
    for (host, to) in WAYS {
        for passive_first in [false, true] {
            let mut world = World::new(2, 1);
            let (listener, active, passive) = connected(&mut world, host, to());
            assert_eq!(world.machines[host].counts().half_open, 0);
            let (first, second) = if passive_first { (passive, active) } else { (active, passive) };
            world.call(first, |id| CmRequest::Disconnect { id }).unwrap();
            let mut events = [world.kinds(0), if host == 0 { vec![] } else { world.kinds(1) }].concat();
            events.sort_by_key(|event| event.0);
            assert_eq!(events, [(2, Kind::Disconnected, 0), (3, Kind::Disconnected, 0)]);
            assert_eq!(world.call(second, |id| CmRequest::Disconnect { id }), Ok(None), "the peer was first");
            world.run_for(Duration::from_millis(5000));
            let mut events = [world.kinds(0), if host == 0 { vec![] } else { world.kinds(1) }].concat();
            events.sort_by_key(|event| event.0);
            assert_eq!(events, [(2, Kind::TimewaitExit, 0), (3, Kind::TimewaitExit, 0)]);
            // Address, route, response, end, exit.
            assert_eq!(world.destroy(active), 5);
            assert_eq!(world.destroy(passive), 3);
            assert_eq!(world.destroy(listener), 1);
            world.finish();
        }
    }
}

#[test]
fn what_the_ends_learn_of_each_other() {
    for (host, to) in WAYS {
        let mut world = World::new(2, 2);
        let listener = world.listener(vnic(host, 1), PORT, 1);
        let active = world.tcp(vnic(0, 0), 2);
        world.resolve(active, to(), PORT);
        let port = match world.heard(0).last().unwrap().body {
            CmEventBody::Route(route) => {
                assert_eq!((route.remote, route.packet_life_time), (CmAddress { gid: to(), port: PORT }, 18));
                route.local.port
            }
            ref other => panic!("{other:?}"),
        };
        let ece = Ece { vendor_id: 0x0012_3456, options: 0x89ab_cdef };
        let asked = ConnectionParameters { flow_control: true, srq: true, ece, ..parameters(0x11) };
        world.connect(active, asked.clone()).unwrap();
        let event = world.heard(host).pop().unwrap();
        let CmEventBody::Request { id, route, parameters: heard, qp_type } = event.body else { panic!() };
        let local = world.around[0].host;
        let from = if to() == external(1) { external(local) } else { gid(0, 0) };
        assert_eq!((event.cookie, qp_type), (1, QpType::Rc));
        assert_eq!((route.local, route.remote), (CmAddress { gid: to(), port: PORT }, CmAddress { gid: from, port }));
        assert_eq!(heard.private_data, [vec![7; 5], vec![0; 51]].concat());
        assert_eq!((heard.responder_resources, heard.initiator_depth), (2, 4), "theirs are the other way round");
        assert_eq!((heard.qp_number, heard.ece, heard.flow_control, heard.srq), (0x11, ece, true, true));
        let passive = Ident { host, vnic: vnic(host, 1), id };
        let said = ConnectionParameters { responder_resources: 1, initiator_depth: 3, ece, ..parameters(0x22) };
        let accept = |id| CmRequest::Accept { id, cookie: 3, parameters: said };
        world.call(passive, accept).unwrap();
        let CmEventBody::Connection(heard) = world.heard(0).pop().unwrap().body else { panic!() };
        assert_eq!(heard.private_data, [vec![7; 5], vec![0; 191]].concat());
        assert_eq!((heard.responder_resources, heard.initiator_depth), (3, 1));
        assert_eq!((heard.qp_number, heard.ece, heard.rnr_retry_count), (0x22, ece, 6));
        attributes_fit(&mut world, active, passive, from, to());
        for ident in [active, passive, listener] {
            world.destroy(ident);
        }
        world.finish();
    }
}

fn attributes_fit(world: &mut World, active: Ident, passive: Ident, from: Gid, to: Gid) {
    let mut ask = |ident, state| match world.call(ident, |id| CmRequest::InitQpAttributes { id, state }) {
        Ok(Some(CmReply::QpAttributes { attributes, mask })) => (attributes, mask.0),
        other => panic!("{other:?}"),
    };
    let ends = [(active, to, 0x22, 3u8, 1u8), (passive, from, 0x11, 1, 3)];
    let (mut psn_a, mut psn_b) = (0, 0);
    for (ident, peer, qpn, responder, initiator) in ends {
        let (init, mask) = ask(ident, QpState::Init);
        assert_eq!(mask, Mask::STATE | Mask::ACCESS_FLAGS | Mask::PKEY_INDEX | Mask::PORT);
        assert!(init.access.contains(Access::REMOTE_READ.union(Access::REMOTE_ATOMIC).union(Access::REMOTE_WRITE)));
        let (rtr, mask) = ask(ident, QpState::ReadyToReceive);
        assert!(mask & (Mask::MAX_DEST_RD_ATOMIC | Mask::AV | Mask::RQ_PSN | Mask::PATH_MTU) != 0);
        assert_eq!((rtr.dest_qpn, rtr.max_dest_rd_atomic, rtr.state), (qpn, responder, QpState::ReadyToReceive));
        assert_eq!(rtr.address.grh.unwrap().dgid, peer);
        let (rts, _) = ask(ident, QpState::ReadyToSend);
        assert_eq!((rts.max_rd_atomic, rts.timeout, rts.retry_count, rts.rnr_retry), (initiator, 19, 7, 6));
        if psn_a == 0 {
            (psn_a, psn_b) = (rtr.rq_psn, rts.sq_psn);
        } else {
            assert_eq!((rts.sq_psn, rtr.rq_psn), (psn_a, psn_b), "one begins with what the other expects");
        }
    }
}

#[test]
fn a_rejection_says_why() {
    for (host, to) in WAYS {
        for ece in [false, true] {
            let mut world = World::new(2, 3);
            let listener = world.listener(vnic(host, 1), PORT, 1);
            let active = world.tcp(vnic(0, 0), 2);
            world.resolve(active, to(), PORT);
            world.heard(0);
            world.connect(active, parameters(0x11)).unwrap();
            let passive = world.requests(vnic(host, 1))[0];
            let reject = |bytes| move |id| CmRequest::Reject { id, private_data: vec![9; bytes], ece };
            assert_eq!(world.call(passive, reject(149)), Err(VerbsError::InvalidArgument));
            assert_eq!(world.call(passive, reject(148)), Ok(None));
            let event = world.heard(0).pop().unwrap();
            assert_eq!((event.cookie, event.kind, event.status), (2, Kind::Rejected, if ece { 35 } else { 28 }));
            let CmEventBody::Connection(heard) = event.body else { panic!() };
            assert_eq!(heard.private_data, vec![9; 148]);
            assert_eq!(world.accept(passive, 3, 1), Err(VerbsError::InvalidArgument));
            let again = world.connect(active, parameters(0x11));
            assert_eq!(again, Err(VerbsError::InvalidArgument), "a second try wants another identifier");
            for ident in [active, passive, listener] {
                world.destroy(ident);
            }
            world.finish();
        }
    }
}

#[test]
fn nobody_listens() {
    for (_, to) in WAYS {
        let mut world = World::new(2, 4);
        let active = world.tcp(vnic(0, 0), 2);
        world.resolve(active, to(), PORT);
        world.heard(0);
        world.connect(active, parameters(0x11)).unwrap();
        assert_eq!(world.kinds(0), [(2, Kind::Rejected, 8)]);
        world.destroy(active);
        world.finish();
    }
}

#[test]
fn nobody_is_there() {
    let mut world = World::new(1, 5);
    for to in [gid(1, 0), external(5)] {
        let active = world.tcp(vnic(0, 0), 2);
        world.resolve(active, to, PORT);
        world.heard(0);
        world.connect(active, parameters(0x11)).unwrap();
        world.run_for(Duration::from_millis(20_000));
        assert_eq!(world.kinds(0), [(2, Kind::Unreachable, -110)]);
        world.destroy(active);
    }
    let active = world.tcp(vnic(0, 0), 3);
    let destination = CmAddress { gid: v4(8, 8, 8, 8), port: 1 };
    let resolve = |id| CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 1 };
    assert!(matches!(world.call(active, resolve), Ok(Some(CmReply::Bound { .. }))));
    world.run_for(Duration::from_millis(1));
    assert_eq!(world.kinds(0), [(3, Kind::AddressError, -110)]);
    world.around[0].cut = false;
    world.resolve(active, gid(0, 1), PORT);
    assert_eq!(world.kinds(0), [(3, Kind::AddressResolved, 0), (3, Kind::RouteResolved, 0)]);
    world.destroy(active);
    world.finish();
}

#[test]
fn a_program_that_takes_its_time() {
    for (host, to) in WAYS {
        let mut world = World::new(2, 6);
        let listener = world.listener(vnic(host, 1), PORT, 1);
        let active = world.tcp(vnic(0, 0), 2);
        world.resolve(active, to(), PORT);
        world.heard(0);
        world.connect(active, parameters(0x11)).unwrap();
        let passive = world.requests(vnic(host, 1))[0];
        world.run_for(Duration::from_millis(100_000));
        assert_eq!(world.kinds(0), []);
        let repeated = world.machines[0].counts().messages[Message::Req.index()].repeated;
        assert!((1..8).contains(&repeated), "{repeated} copies: MRA makes them rare");
        world.accept(passive, 3, 0x22).unwrap();
        assert_eq!(world.kinds(0), [(2, Kind::ConnectResponse, 0)]);
        world.run_for(Duration::from_millis(50_000));
        world.call(active, |id| CmRequest::Establish { id }).unwrap();
        assert_eq!(world.kinds(host), [(3, Kind::Established, 0)]);
        for ident in [active, passive, listener] {
            world.destroy(ident);
        }
        world.finish();
    }
}

#[test]
fn programs_that_never_answer() {
    for (host, to) in WAYS {
        let mut world = World::new(2, 7);
        let listener = world.listener(vnic(host, 1), PORT, 1);
        let active = world.tcp(vnic(0, 0), 2);
        world.resolve(active, to(), PORT);
        world.heard(0);
        world.connect(active, parameters(0x11)).unwrap();
        let passive = world.requests(vnic(host, 1))[0];
        world.run_for(Duration::from_millis(400_000));
        let events = world.kinds(0);
        assert_eq!(events, [(2, Kind::Rejected, reason::NO_RESOURCES.into())]);
        assert_eq!(world.accept(passive, 3, 1), Err(VerbsError::InvalidArgument));
        let second = world.tcp(vnic(0, 0), 4);
        world.resolve(second, to(), PORT);
        world.heard(0);
        world.connect(second, parameters(0x12)).unwrap();
        let other = world.requests(vnic(host, 1))[0];
        world.accept(other, 5, 0x23).unwrap();
        world.heard(0);
        world.run_for(Duration::from_millis(400_000));
        let mut events = [world.kinds(0), if host == 0 { vec![] } else { world.kinds(1) }].concat();
        events.sort_by_key(|event| event.0);
        let ends = [(4, Kind::Unreachable, -110), (5, Kind::Rejected, reason::TIMEOUT.into())];
        assert_eq!(events, ends, "it never established");
        for ident in [active, passive, listener, second, other] {
            world.destroy(ident);
        }
        world.finish();
    }
}

#[test]
fn notify_stands_for_a_lost_rtu() {
    let mut world = World::new(2, 8);
    let listener = world.listener(vnic(1, 1), PORT, 1);
    let active = world.tcp(vnic(0, 0), 2);
    world.resolve(active, gid(1, 1), PORT);
    world.connect(active, parameters(0x11)).unwrap();
    let passive = world.requests(vnic(1, 1))[0];
    assert_eq!(world.call(passive, |id| CmRequest::Notify { id }), Err(VerbsError::InvalidArgument));
    world.accept(passive, 3, 0x22).unwrap();
    world.settle();
    world.link_model.lost = 100;
    world.call(active, |id| CmRequest::Establish { id }).unwrap();
    assert_eq!(world.kinds(1), []);
    assert_eq!(world.call(passive, |id| CmRequest::Notify { id }), Ok(None));
    assert_eq!(world.kinds(1), [(3, Kind::Established, 0)]);
    assert_eq!(world.call(passive, |id| CmRequest::Notify { id }), Ok(None), "twice is once");
    assert_eq!(world.kinds(1), []);
    world.link_model.lost = 0;
    for ident in [active, passive, listener] {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn datagram_services() {
    for (host, to) in WAYS {
        let mut world = World::new(2, 9);
        let listener = world.create(vnic(host, 1), PortSpace::Udp, QpType::Ud, 1);
        world.bind(listener, ANY, PORT).unwrap();
        world.listen(listener, 3).unwrap();
        let mut idents = vec![listener];
        for (cookie, accepts) in [(2, true), (3, false)] {
            let active = world.create(vnic(0, 0), PortSpace::Udp, QpType::Ud, cookie);
            world.resolve(active, to(), PORT);
            world.heard(0);
            let long = ConnectionParameters { private_data: vec![1; 181], ..parameters(0x11) };
            assert_eq!(world.connect(active, long), Err(VerbsError::InvalidArgument));
            world.connect(active, parameters(0x11)).unwrap();
            let event = world.heard(host).pop().unwrap();
            let CmEventBody::Request { id, parameters: heard, qp_type, .. } = event.body else { panic!() };
            assert_eq!((heard.private_data.len(), qp_type), (180, QpType::Ud));
            let passive = Ident { host, vnic: vnic(host, 1), id };
            if accepts {
                world.accept(passive, 9, 0x33).unwrap();
                let event = world.heard(0).pop().unwrap();
                assert_eq!((event.cookie, event.kind), (2, Kind::Established));
                let CmEventBody::Datagram { address, qp_number, qkey, private_data } = event.body else { panic!() };
                assert_eq!((qp_number, qkey, private_data.len()), (0x33, 0x0123_4567, 136));
                assert_eq!(address.grh.unwrap().dgid, to());
            } else {
                world.call(passive, |id| CmRequest::Reject { id, private_data: vec![5], ece: false }).unwrap();
                assert_eq!(world.kinds(0), [(3, Kind::Unreachable, 2)]);
            }
            idents.extend([active, passive]);
        }
        let active = world.create(vnic(0, 0), PortSpace::Udp, QpType::Ud, 4);
        world.resolve(active, to(), PORT + 1);
        world.heard(0);
        world.connect(active, parameters(0x11)).unwrap();
        assert_eq!(world.kinds(0), [(4, Kind::Unreachable, 1)], "not supported");
        idents.push(active);
        for ident in idents {
            world.destroy(ident);
        }
        world.finish();
    }
}

#[test]
fn xrc_sends_its_number_elsewhere() {
    let mut world = World::new(2, 10);
    let listener = world.create(vnic(1, 1), PortSpace::Ib, QpType::XrcReceive, 1);
    world.bind(listener, gid(1, 1), PORT).unwrap();
    world.listen(listener, 0).unwrap();
    let active = world.create(vnic(0, 0), PortSpace::Ib, QpType::XrcSend, 2);
    world.resolve(active, gid(1, 1), PORT);
    world.heard(0);
    world.connect(active, ConnectionParameters { private_data: vec![4; 92], ..parameters(0x11) }).unwrap();
    let event = world.heard(1).pop().unwrap();
    let CmEventBody::Request { id, parameters: heard, qp_type, .. } = event.body else { panic!() };
    assert_eq!((qp_type, heard.private_data), (QpType::XrcReceive, vec![4; 92]), "no header in the IB port space");
    let passive = Ident { host: 1, vnic: vnic(1, 1), id };
    world.accept(passive, 3, 0x22).unwrap();
    let CmEventBody::Connection(heard) = world.heard(0).pop().unwrap().body else { panic!() };
    assert_eq!((heard.qp_number, heard.srq), (0x22, true));
    // A listener for another type.
    let other = world.create(vnic(0, 0), PortSpace::Ib, QpType::Rc, 4);
    world.resolve(other, gid(1, 1), PORT);
    world.heard(0);
    world.connect(other, parameters(0x12)).unwrap();
    assert_eq!(world.kinds(0), [(4, Kind::Rejected, 28)]);
    for ident in [active, passive, listener, other] {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn multicast_groups() {
    let mut world = World::new(1, 11);
    let member = world.create(vnic(0, 0), PortSpace::Udp, QpType::Ud, 1);
    let group = v4(239, 1, 2, 3);
    let join = |address, cookie| move |id| CmRequest::JoinMulticast { id, address, send_only: false, cookie };
    assert_eq!(world.call(member, join(group, 7)), Err(VerbsError::InvalidArgument), "it is nowhere yet");
    let destination = CmAddress { gid: group, port: 0 };
    let resolve = |id| CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 1 };
    assert_eq!(world.call(member, resolve).map(|reply| reply.is_some()), Ok(true));
    assert_eq!(world.kinds(0), [(1, Kind::AddressResolved, 0)]);
    assert_eq!(world.call(member, join(gid(0, 1), 7)), Err(VerbsError::InvalidArgument));
    world.call(member, join(group, 7)).unwrap();
    let event = world.heard(0).pop().unwrap();
    assert_eq!((event.cookie, event.kind), (7, Kind::MulticastJoin));
    let CmEventBody::Datagram { address, qp_number, qkey, .. } = event.body else { panic!() };
    assert_eq!((address.grh.unwrap().dgid, qp_number, qkey), (group, 0x00ff_ffff, 0x0123_4567));
    let leave = |id| CmRequest::LeaveMulticast { id, address: group };
    assert_eq!(world.call(member, leave), Ok(None));
    assert_eq!(world.call(member, leave), Err(VerbsError::NotFound));
    assert_eq!(world.destroy(member), 2);
    let tcp = world.tcp(vnic(0, 0), 2);
    world.bind(tcp, gid(0, 0), 0).unwrap();
    assert_eq!(world.call(tcp, join(group, 7)), Err(VerbsError::InvalidArgument), "for datagrams only");
    world.destroy(tcp);
    world.finish();
}

#[test]
fn calls_in_the_wrong_state() {
    let mut world = World::new(1, 12);
    let id = world.tcp(vnic(0, 0), 1);
    let wrong: [fn(u32) -> CmRequest; 8] = [
        |id| CmRequest::ResolveRoute { id, timeout_ms: 1 },
        |id| CmRequest::Connect { id, parameters: parameters(1) },
        |id| CmRequest::Accept { id, cookie: 1, parameters: parameters(1) },
        |id| CmRequest::Reject { id, private_data: vec![], ece: false },
        |id| CmRequest::Establish { id },
        |id| CmRequest::Notify { id },
        |id| CmRequest::Disconnect { id },
        |id| CmRequest::InitQpAttributes { id, state: QpState::Init },
    ];
    for request in wrong {
        assert_eq!(world.call(id, request), Err(VerbsError::InvalidArgument));
    }
    world.bind(id, gid(0, 0), 0).unwrap();
    assert_eq!(world.bind(id, gid(0, 0), 0), Err(VerbsError::InvalidArgument));
    assert!(world.call(id, |id| CmRequest::InitQpAttributes { id, state: QpState::Init }).is_ok());
    world.listen(id, 0).unwrap();
    for request in &wrong[..7] {
        assert_eq!(world.call(id, request), Err(VerbsError::InvalidArgument));
    }
    assert_eq!(world.ask(0, 99, vnic(0, 1), &CmRequest::DestroyId { id: id.id }), Err(VerbsError::NotFound));
    assert!(world.machines[0].channel_in_use(Owner(vnic(0, 0).0), 1));
    assert!(!world.machines[0].channel_in_use(Owner(vnic(0, 0).0), 2));
    world.call(id, |id| CmRequest::MigrateId { id, channel: 2 }).unwrap();
    assert!(!world.machines[0].channel_in_use(Owner(vnic(0, 0).0), 1));
    assert!(world.machines[0].channel_in_use(Owner(vnic(0, 0).0), 2));
    world.destroy(id);
    assert_eq!(world.call(id, |id| CmRequest::DestroyId { id }), Err(VerbsError::NotFound));
    assert_eq!(world.ask(0, 1, vnic(0, 0), &CmRequest::CreateChannel), Err(VerbsError::NotSupported));
    world.finish();
}

#[test]
fn a_listener_that_dies_with_a_hundred_requests() {
    for (host, to) in WAYS {
        let mut world = World::new(2, 13);
        let listener = world.listener(vnic(host, 1), PORT, 1);
        let actives: Vec<_> = (0..100)
            .map(|number| {
                let active = world.tcp(vnic(0, 0), number);
                world.resolve(active, to(), PORT);
                world.connect(active, parameters(0x100 + number as u32)).unwrap();
                active
            })
            .collect();
        let requests = world.requests(vnic(host, 1));
        assert_eq!((requests.len(), world.machines[host].counts().half_open), (100, 100));
        // One was looked at: it is its program's, whatever becomes of the listener.
        world.call(requests[0], |id| CmRequest::InitQpAttributes { id, state: QpState::Init }).unwrap();
        world.heard(0);
        world.destroy(listener);
        let rejected = world.kinds(0);
        assert_eq!(rejected.len(), 99);
        assert!(rejected.iter().all(|event| (event.1, event.2) == (Kind::Rejected, 28)));
        assert_eq!(world.machines[host].counts().half_open, 1);
        world.accept(requests[0], 1000, 0x22).unwrap();
        assert_eq!(world.kinds(0), [(0, Kind::ConnectResponse, 0)]);
        world.destroy(requests[0]);
        for active in actives {
            world.destroy(active);
        }
        world.finish();
    }
}

#[test]
fn a_full_backlog_makes_one_ask_again() {
    let limits = Limits { backlog_min: 0, ..Limits::default() };
    let mut world = World::with(2, 14, limits);
    let listener = world.tcp(vnic(1, 1), 1);
    world.bind(listener, ANY, PORT).unwrap();
    world.listen(listener, 2).unwrap();
    let actives: Vec<_> = (10..14)
        .map(|number| {
            let active = world.tcp(vnic(0, 0), number);
            world.resolve(active, gid(1, 1), PORT);
            world.connect(active, parameters(0x100 + number as u32)).unwrap();
            active
        })
        .collect();
    let requests = world.requests(vnic(1, 1));
    assert_eq!((requests.len(), world.machines[1].counts().overflows), (2, 2));
    for (number, request) in requests.iter().enumerate() {
        world.accept(*request, number as u64, 0x22 + number as u32).unwrap();
    }
    world.run_for(Duration::from_millis(500));
    let more = world.requests(vnic(1, 1));
    assert_eq!(more.len(), 2, "they came again");
    for ident in actives.into_iter().chain(requests).chain(more).chain([listener]) {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn ten_thousand_connections_leave_nothing() {
    for host in [0, 1] {
        let mut world = World::new(2, 15);
        let listener = world.listener(vnic(host, 1), PORT, 1);
        for number in 0..10_000 {
            let active = world.tcp(vnic(0, 0), 2);
            world.resolve(active, gid(host, 1), PORT);
            world.connect(active, parameters(2 + number * 2)).unwrap();
            let passive = world.requests(vnic(host, 1))[0];
            world.accept(passive, 3, 3 + number * 2).unwrap();
            world.settle();
            world.call(active, |id| CmRequest::Establish { id }).unwrap();
            world.settle();
            if number % 3 == 0 {
                world.call(active, |id| CmRequest::Disconnect { id }).unwrap();
                world.settle();
            }
            world.destroy(active);
            world.settle();
            world.destroy(passive);
            world.around[0].heard.clear();
            world.settle();
            if host == 0 {
                assert_eq!(world.machines[0].counts().connections, 0, "nothing waits on the host itself");
            }
        }
        world.destroy(listener);
        world.finish();
    }
}

#[test]
fn a_vnic_that_is_taken_away() {
    for (host, to) in WAYS {
        let mut world = World::new(2, 16);
        let (_, active, passive) = connected(&mut world, host, to());
        let now = world.now;
        let World { machines, around, .. } = &mut world;
        machines[host].destroy_vnic(&mut around[host], now, vnic(host, 1));
        let mut events = [world.kinds(0), if host == 0 { vec![] } else { world.kinds(1) }].concat();
        events.sort_by_key(|event| event.0);
        assert_eq!(events, [(1, Kind::DeviceRemoval, 0), (2, Kind::Disconnected, 0), (3, Kind::DeviceRemoval, 0)]);
        assert_eq!(world.call(passive, |id| CmRequest::Listen { id, backlog: 1 }), Err(VerbsError::InvalidArgument));
        world.destroy(active);
        let now = world.now;
        let World { machines, around, .. } = &mut world;
        machines[host].destroy_owner(&mut around[host], now, Owner(vnic(host, 1).0));
        world.finish();
    }
}

#[test]
fn a_link_that_goes_down() {
    let mut world = World::new(2, 17);
    let (listener, active, passive) = connected(&mut world, 1, gid(1, 1));
    let pending = world.tcp(vnic(0, 0), 5);
    world.resolve(pending, gid(1, 1), PORT + 1);
    world.heard(0);
    world.connect(pending, parameters(0x44)).unwrap();
    let now = world.now;
    let World { machines, around, .. } = &mut world;
    around[0].sent.clear();
    machines[0].handle_link_down(&mut around[0], now, Link::Router(1));
    assert_eq!(world.kinds(0), [(5, Kind::Unreachable, -110)]);
    assert_eq!(world.machines[0].counts().established, 1);
    for ident in [listener, active, passive, pending] {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn a_qp_that_connects_again_ends_its_stale_connection() {
    let mut world = World::new(2, 18);
    let (listener, active, passive) = connected(&mut world, 1, gid(1, 1));
    // The active host forgets everything, as if its router had begun again.
    world.machines[0] = freeflow_cm::Machine::new(Limits::default());
    let again = world.tcp(vnic(0, 0), 4);
    world.resolve(again, gid(1, 1), PORT);
    world.heard(0);
    world.connect(again, parameters(0x11)).unwrap();
    assert_eq!(world.kinds(0), [(4, Kind::Rejected, 10)]);
    assert_eq!(world.kinds(1), [(3, Kind::Disconnected, 0)]);
    let _ = active;
    for ident in [listener, passive, again] {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn only_the_other_end_has_a_say() {
    for (host, to) in WAYS {
        let mut world = World::new(3, 19);
        let (listener, active, passive) = connected(&mut world, host, to());
        // The active end's own message, word for word, sent by others: from elsewhere, or with
        // another address.
        world.call(active, |id| CmRequest::Disconnect { id }).unwrap();
        let dreq = world.around[0].sent.remove(0);
        let real = match dreq.link {
            Link::Local => Link::Local,
            Link::Router(_) => Link::Router(0),
            Link::External(_) => Link::External(0),
        };
        let mad = Mad::decode(&dreq.mad).unwrap();
        let freeflow_wire::cm::Message::Dreq(said) = mad.message else { panic!() };
        let rej = Rej {
            local_comm_id: said.local_comm_id,
            remote_comm_id: said.remote_comm_id,
            about: 1,
            reason: 28,
            ..Rej::default()
        };
        let rej = Mad::new(0, freeflow_wire::cm::Message::Rej(rej)).encode().to_vec();
        for bytes in [dreq.mad.clone(), rej] {
            for (link, scope, from) in [
                (Link::Router(2), dreq.scope, dreq.from),
                (Link::External(2), Scope::External, dreq.from),
                (real, dreq.scope, gid(2, 0)),
                (Link::External(2), Scope::External, external(2)),
            ] {
                let forged = Owned { link, scope, from, to: dreq.to, mad: bytes.clone() };
                let now = world.now;
                let World { machines, around, .. } = &mut world;
                machines[host].handle_packet(&mut around[host], now, forged.packet());
                let answers = std::mem::take(&mut around[host].sent);
                let kinds: Vec<_> = answers.iter().map(|sent| Mad::decode(&sent.mad).unwrap().message.kind()).collect();
                assert!(kinds.is_empty() || kinds == [Message::Drep], "as for a connection that never was: {kinds:?}");
                assert!(around[host].heard.is_empty());
            }
        }
        assert_eq!(world.machines[host].counts().messages[Message::Dreq.index()].refused, 4);
        world.around[0].sent.push(dreq);
        assert!(world.kinds(host).contains(&(3, Kind::Disconnected, 0)));
        for ident in [listener, active, passive] {
            world.destroy(ident);
        }
        world.finish();
    }
}

#[test]
fn a_flood_of_requests_is_bounded() {
    let limits = Limits { half_open_per_remote_max: 50, backlog_max: 1024, ..Limits::default() };
    let mut world = World::with(2, 20, limits);
    let listener = world.listener(vnic(1, 1), PORT, 1);
    let active = world.tcp(vnic(0, 0), 2);
    world.resolve(active, external(1), PORT);
    world.connect(active, parameters(0x11)).unwrap();
    let first = world.around[0].sent.remove(0);
    let mad = Mad::decode(&first.mad).unwrap();
    let freeflow_wire::cm::Message::Req(req) = mad.message else { panic!() };
    for number in 1..=10_000 {
        let req = freeflow_wire::cm::Req { local_comm_id: number, local_qpn: number + 1, ..req };
        let bytes = Mad::new(1, freeflow_wire::cm::Message::Req(req)).encode();
        let now = world.now;
        let World { machines, around, .. } = &mut world;
        let packet = Owned { link: Link::External(0), mad: bytes.to_vec(), ..first.clone() };
        machines[1].handle_packet(&mut around[1], now, packet.packet());
    }
    let counts = world.machines[1].counts();
    assert_eq!((counts.half_open, counts.overflows), (50, 9950));
    // Others are not shut out by it.
    let other = world.tcp(vnic(0, 0), 3);
    world.resolve(other, gid(1, 1), PORT);
    world.connect(other, parameters(0x9000)).unwrap();
    world.around[1].heard.clear();
    assert_eq!(world.requests(vnic(1, 1)).len(), 1);
    for ident in [listener, active, other] {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn options() {
    let mut world = World::new(1, 21);
    let id = world.tcp(vnic(0, 0), 1);
    let set = |option| move |id| CmRequest::SetOption { id, option };
    assert_eq!(world.call(id, set(CmOption::AckTimeout(32))), Err(VerbsError::InvalidArgument));
    for option in [CmOption::AckTimeout(14), CmOption::TypeOfService(0x20), CmOption::ReuseAddress(true)] {
        assert_eq!(world.call(id, set(option)), Ok(None));
    }
    world.resolve(id, gid(0, 1), PORT);
    let event = world.heard(0).pop().unwrap();
    let CmEventBody::Route(route) = event.body else { panic!() };
    assert_eq!((route.traffic_class, route.packet_life_time), (0x20, 13));
    assert_eq!(world.call(id, set(CmOption::AddressFamilyOnly(true))), Err(VerbsError::InvalidArgument));
    assert_eq!(world.call(id, set(CmOption::ReuseAddress(false))), Err(VerbsError::InvalidArgument));
    world.destroy(id);
    world.finish();
}

#[test]
fn memberships_of_a_vnic_are_limited() {
    let limits = Limits { memberships_per_id_max: 3, memberships_per_vnic_max: 5, ..Limits::default() };
    let mut world = World::with(1, 31, limits);
    let [first, second] = [1, 2].map(|cookie| {
        let ident = world.create(vnic(0, 0), PortSpace::Udp, QpType::Ud, cookie);
        world.bind(ident, gid(0, 0), 0).unwrap();
        ident
    });
    let join = |world: &mut World, ident, group| {
        let address = v4(239, 0, 0, group);
        world.call(ident, |id| CmRequest::JoinMulticast { id, address, cookie: 9, send_only: false })
    };
    let leave = |world: &mut World, ident, group| {
        let address = v4(239, 0, 0, group);
        world.call(ident, |id| CmRequest::LeaveMulticast { id, address })
    };
    for group in 1..=3 {
        join(&mut world, first, group).unwrap();
    }
    assert_eq!(join(&mut world, first, 4), Err(VerbsError::NoMemory), "of the identifier");
    join(&mut world, second, 1).unwrap();
    join(&mut world, second, 2).unwrap();
    assert_eq!(join(&mut world, second, 3), Err(VerbsError::NoMemory), "of the vNIC");
    leave(&mut world, second, 1).unwrap();
    join(&mut world, second, 3).unwrap();
    world.destroy(first);
    join(&mut world, second, 4).unwrap();
    let now = world.now;
    let World { machines, around, .. } = &mut world;
    machines[0].destroy_vnic(&mut around[0], now, vnic(0, 0));
    world.destroy(second);
    world.finish();
}

#[test]
fn requests_follow_their_listener() {
    let mut world = World::new(1, 32);
    let listener = world.listener(vnic(0, 0), PORT, 1);
    for number in 0..3 {
        let active = world.tcp(vnic(0, 1), 10 + number);
        world.resolve(active, gid(0, 0), PORT);
        world.connect(active, parameters(0x100 + number as u32)).unwrap();
    }
    let [unread, read, elsewhere] = world.requests(vnic(0, 0))[..] else { panic!() };
    let program = Owner(vnic(0, 0).0);
    world.call(listener, |id| CmRequest::MigrateId { id, channel: 2 }).unwrap();
    world.call(unread, |id| CmRequest::MigrateId { id, channel: 2 }).unwrap();
    world.call(elsewhere, |id| CmRequest::MigrateId { id, channel: 3 }).unwrap();
    assert!(world.machines[0].channel_in_use(program, 1), "what was read stays where it was read");
    world.destroy(read);
    assert!(!world.machines[0].channel_in_use(program, 1));
    world.destroy(listener);
    assert_eq!(world.call(unread, |id| CmRequest::DestroyId { id }), Err(VerbsError::NotFound), "it went with it");
    world.heard(0);
    world.accept(elsewhere, 5, 6).unwrap();
    assert_eq!(world.kinds(0), [(12, Kind::ConnectResponse, 0)], "that one was touched");
    let now = world.now;
    let World { machines, around, .. } = &mut world;
    for owner in [vnic(0, 0).0, vnic(0, 1).0] {
        machines[0].destroy_owner(&mut around[0], now, Owner(owner));
    }
    world.finish();
}
