//! Engines of one router, each of another shard: names of one find nothing in another, and each has QPNs of its own.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use std::collections::HashSet;

use VerbsError::NotFound;

/// One object of each kind, and an operation in flight.
struct Objects {
    end: End,
    srq: SrqId,
    ah: AhId,
    mw: MwId,
    xrcd: XrcdId,
    target: (QpId, Qpn),
    token: Token,
}

fn crowded(shard: Shard) -> (Net, Objects) {
    let mut net = Net::of_shard(shard);
    net.world.always_put_off = true;
    let (end, peer) = (net.end_with(QpType::Rc, true), net.end(QpType::Rc));
    net.connect(&end, &peer);
    net.connect(&peer, &end);
    let ah = net.engine.create_ah(end.session, end.pd, &address(gid(9))).unwrap();
    let (mw, _) = net.engine.alloc_mw(end.session, end.pd, WindowKind::Type2).unwrap();
    let target = net.qp(&end, QpType::XrcReceive);
    let xrcd = net.xrcd(&end);
    net.post_send(&end, remote(1, SendOpcode::RdmaWrite, &[end.sge(0, 64)], &peer, 0));
    net.work();
    let token = net.world.pending[0].0;
    (net, Objects { srq: end.srq.unwrap(), end, ah, mw, xrcd, target, token })
}

/// Index and generation of each object.
fn names(of: &Objects) -> [(u32, u32); 12] {
    macro_rules! name {
        ($id:expr) => {
            ($id.index, $id.generation)
        };
    }
    let End { vnic, session, context, pd, cq, mr, qp, .. } = of.end;
    [
        name!(vnic),
        name!(session),
        name!(context),
        name!(pd),
        name!(cq),
        name!(mr),
        name!(qp),
        name!(of.srq),
        name!(of.ah),
        name!(of.mw),
        name!(of.xrcd),
        (of.token.0 as u32, (of.token.0 >> 32) as u32),
    ]
}

/// Every call with a name of another shard is refused, and changes nothing.
fn finds_nothing(net: &mut Net, own: &Objects, foreign: &Objects) {
    let (end, other) = (&own.end, &foreign.end);
    let before = net.engine.snapshot();
    let no_vnic = net.engine.create_session(other.vnic);
    assert_eq!(no_vnic, Err(NotFound));
    let engine = &mut net.engine;
    assert_eq!(engine.destroy_vnic(other.vnic), Err(NotFound));
    assert_eq!(engine.set_external_gid(other.vnic, Some(gid(99))), Err(NotFound));
    assert_eq!(engine.set_limits(other.vnic, VnicLimits::default()), Err(NotFound));
    assert_eq!(engine.set_shaping(net.now, other.vnic, Shaping::default()), Err(NotFound));
    assert!(engine.vnic_addresses(other.vnic).is_none() && engine.vnic_usage(other.vnic).is_none());
    assert!(engine.limits(other.vnic).is_none() && engine.shaping(other.vnic).is_none());
    assert_eq!(engine.qps_of(Some(other.vnic)).count(), 0);

    assert_eq!(engine.open_context(other.session), Err(NotFound));
    assert_eq!(engine.create_cq(other.session, end.context, 1), Err(NotFound));
    assert_eq!(engine.query_qp(other.session, end.qp), Err(NotFound));
    assert_eq!(engine.share_pd(end.session, other.session, end.pd), Err(NotFound));
    assert!(engine.objects_of(other.session).qps.is_empty());
    assert_eq!(engine.copies_in_flight(other.session), 0);
    engine.destroy_session(&mut net.world, net.now, other.session);

    assert_eq!(engine.create_cq(end.session, other.context, 1), Err(NotFound));
    assert_eq!(engine.alloc_pd(end.session, other.context), Err(NotFound));
    assert_eq!(engine.close_context(end.session, other.context), Err(NotFound));
    assert_eq!(engine.open_xrcd(end.session, other.context, None, XrcdOpenFlags::CREATE), Err(NotFound));

    let asked = SrqAttributes { max_wr: 1, max_sge: 1, limit: 0 };
    assert_eq!(engine.register_mr(end.session, other.pd, 0, 8, 0, ALL_ACCESS).err(), Some(NotFound));
    assert_eq!(engine.alloc_null_mr(end.session, other.pd).err(), Some(NotFound));
    assert_eq!(engine.alloc_mw(end.session, other.pd, WindowKind::Type1), Err(NotFound));
    assert_eq!(engine.create_ah(end.session, other.pd, &address(gid(9))), Err(NotFound));
    assert_eq!(engine.create_srq(end.session, other.pd, asked, None, 0), Err(NotFound));
    assert_eq!(engine.dealloc_pd(end.session, other.pd), Err(NotFound));
    assert_eq!(engine.unshare_pd(end.session, other.pd), Err(NotFound));

    let gone = Some(Refusal::Error(NotFound));
    let change = RegionChange { translation: None, access: Some(ALL_ACCESS) };
    assert_eq!(engine.reregister_mr(end.session, other.mr, None, &change).err(), gone);
    assert_eq!(engine.deregister_mr(end.session, other.mr).err(), gone);
    assert_eq!(engine.dealloc_mw(end.session, foreign.mw).err(), gone);
    assert_eq!(engine.destroy_ah(end.session, foreign.ah), Err(NotFound));
    assert_eq!(engine.destroy_cq(end.session, other.cq), Err(NotFound));
    assert_eq!(engine.query_srq(end.session, foreign.srq), Err(NotFound));
    assert_eq!(engine.modify_srq(&mut net.world, end.session, foreign.srq, 1), Err(NotFound));
    assert_eq!(engine.destroy_srq(end.session, foreign.srq).err(), gone);
    assert_eq!(engine.close_xrcd(end.session, foreign.xrcd), Err(NotFound));
    assert_eq!(engine.create_srq(end.session, end.pd, asked, Some((foreign.xrcd, end.cq)), 0), Err(NotFound));
    assert_eq!(engine.create_srq(end.session, end.pd, asked, Some((own.xrcd, other.cq)), 0), Err(NotFound));
    assert_eq!(engine.open_qp(end.session, foreign.xrcd, own.target.1), Err(NotFound));
    let target =
        QpInit { pd: None, send_cq: None, recv_cq: None, qp_type: QpType::XrcReceive, ..rc_init(end.pd, end.cq) };
    for init in [
        QpInit { pd: Some(other.pd), ..rc_init(end.pd, end.cq) },
        QpInit { send_cq: Some(other.cq), ..rc_init(end.pd, end.cq) },
        QpInit { recv_cq: Some(other.cq), ..rc_init(end.pd, end.cq) },
        QpInit { srq: Some(foreign.srq), ..rc_init(end.pd, end.cq) },
        QpInit { xrcd: Some(foreign.xrcd), ..target },
    ] {
        assert_eq!(engine.create_qp(end.session, init), Err(NotFound));
    }
    no_queue_pair(net, end, other.qp);
    no_operation(net, foreign.token);
    assert!(net.engine.snapshot() == before, "nothing has changed");
}

fn no_queue_pair(net: &mut Net, end: &End, qp: QpId) {
    let (engine, world, now) = (&mut net.engine, &mut net.world, net.now);
    let error = QpAttributes { state: QpState::Error, ..Default::default() };
    let group = Gid::from_ip("239.0.0.1".parse().unwrap());
    let gone = Refusal::Error(NotFound);
    assert_eq!(engine.query_qp(end.session, qp), Err(NotFound));
    assert_eq!(
        engine.modify_qp(world, now, end.session, qp, &error, QpAttributeMask(QpAttributeMask::STATE)),
        Err(gone)
    );
    assert_eq!(engine.destroy_qp(world, now, end.session, qp), Err(gone));
    assert_eq!(engine.attach_multicast(end.session, qp, group), Err(NotFound));
    assert_eq!(engine.detach_multicast(end.session, qp, group), Err(NotFound));
    assert_eq!(engine.direct_peer(qp), Err(NotDirect::NoPeer));
    assert_eq!(engine.run(world, now, qp, 1 << 20), Progress::Idle);
    engine.handle_receive_posted(world, now, ReceiveQueueId::Qp(qp));
    engine.fail_direct(world, qp);
    engine.use_wire(qp);
    engine.handle_carrier_ready(qp);
    assert!(!engine.use_carrier(qp) && !engine.has_work(qp, true) && !engine.is_sending(qp, true));
    assert!(engine.qp_status(qp).is_none() && engine.qp_traffic(qp).is_none() && engine.qp_openers(qp).is_empty());
    assert!(engine.receive_cq(qp).is_none() && engine.srq_of(qp).is_none() && engine.poll_ready().is_none());
}

fn no_operation(net: &mut Net, token: Token) {
    assert_eq!(net.engine.qp_of(token), None);
    net.engine.handle_copied(&mut net.world, net.now, token, Ok(()));
    net.engine.handle_atomic_done(&mut net.world, net.now, token, Ok(0));
    net.engine.handle_carried(&mut net.world, net.now, token, Carried::Executed);
}

#[test]
fn a_name_of_another_shard_finds_nothing() {
    let mut all: Vec<(Net, Objects)> = Shard::all(4).map(crowded).collect();
    let first = names(&all[0].1);
    for (shard, (_, objects)) in all.iter().enumerate() {
        // The same indexes and uses: the names differ by their shard alone.
        assert_eq!(names(objects).map(|(_, generation)| generation >> 29), [shard as u32; 12]);
        assert_eq!(names(objects).map(|(index, uses)| (index, uses & !(7 << 29))), first);
        let Objects { end, srq, ah, mw, xrcd, .. } = objects;
        let (of_vnic, of_context) = (end.vnic.shard(), end.context.shard());
        let shards = [of_vnic, end.session.shard(), of_context, end.pd.shard(), end.cq.shard(), end.mr.shard()];
        assert_eq!(shards, [shard as u8; 6]);
        assert_eq!([end.qp.shard(), srq.shard(), ah.shard(), mw.shard(), xrcd.shard()], [shard as u8; 5]);
    }
    let objects: Vec<Objects> = Shard::all(4).map(|shard| crowded(shard).1).collect();
    for (own, (net, mine)) in all.iter_mut().enumerate() {
        for (_, foreign) in objects.iter().enumerate().filter(|(of, _)| *of != own) {
            finds_nothing(net, mine, foreign);
        }
        // The engine's own names still find all of it.
        net.world.always_put_off = false;
        net.settle();
        assert_eq!(net.statuses(&mine.end), [(1, CompletionStatus::Success)]);
        net.die(mine.end.session);
        assert_eq!(net.engine.destroy_vnic(mine.end.vnic), Ok(()));
    }
}

#[test]
fn limits_of_rate_are_those_of_the_shard_s_own_vnic() {
    let [(mut one, mine), (_, foreign)] = [0, 1].map(|index| crowded(Shard::new(index, 2).unwrap()));
    let limit = RateLimit { messages_per_s: Some(1), ..Default::default() };
    one.engine.set_shaping(one.now, mine.end.vnic, Shaping { vnic: limit, ..Default::default() }).unwrap();
    assert!(one.engine.is_metered(mine.end.vnic) && !one.engine.is_metered(foreign.end.vnic));
    assert_eq!(one.engine.vnic_throttled(one.now, foreign.end.vnic), Throttled::default());
}

/// Numbers that an engine draws: of QPs of three types, of groups, of SRQs for XRC.
fn draw(shard: Shard, count: u8) -> (Vec<u32>, Vec<u32>) {
    let mut net = Net::of_shard(shard);
    let end = net.end(QpType::Ud);
    let (mut qpns, mut srqns) = (vec![end.qpn.0], Vec::new());
    for number in 0..count {
        qpns.extend([QpType::Ud, QpType::Rc, QpType::XrcReceive].map(|qp_type| net.qp(&end, qp_type).1.0));
        let group = Gid::from_ip(std::net::Ipv4Addr::new(239, 0, 0, number).into());
        net.engine.attach_multicast(end.session, end.qp, group).unwrap();
        qpns.extend(net.engine.poll_group_change().and_then(|change| change.qpn).map(|qpn| qpn.0));
        srqns.push(net.xrc_srq(&end).1);
    }
    assert_eq!((qpns.len(), srqns.len()), (1 + 4 * usize::from(count), usize::from(count)));
    (qpns, srqns)
}

#[test]
fn numbers_are_of_their_shard() {
    for count in [1, 2, 4, 8] {
        let (mut qpns, mut srqns) = (HashSet::new(), HashSet::new());
        for shard in Shard::all(count) {
            let (of_qps, of_srqs) = draw(shard, 100);
            let all: HashSet<u32> = of_qps.iter().chain(&of_srqs).copied().collect();
            assert!(all.iter().all(|number| shard.has_qpn(Qpn(*number)) && *number > 1), "{shard:?}");
            // All 24 bits but the shard's are random.
            let (some, every) =
                all.iter().fold((0, Qpn::MASK), |(some, every), number| (some | number, every & number));
            assert_eq!(some & !every, Qpn::MASK & !(u32::from(count) - 1), "{shard:?}");
            // The seeds are the same here; no number is.
            assert!(of_qps.into_iter().all(|number| qpns.insert(number)));
            assert!(of_srqs.into_iter().all(|number| srqns.insert(number)));
        }
    }
}

#[test]
fn an_only_engine_draws_as_ever() {
    let mut net = Net::new();
    let end = net.end(QpType::Ud);
    let mut drawn = vec![end.qpn.0];
    drawn.extend((0..3).map(|_| net.qp(&end, QpType::Ud).1.0));
    net.engine.attach_multicast(end.session, end.qp, Gid::from_ip("239.0.0.1".parse().unwrap())).unwrap();
    drawn.extend(net.engine.poll_group_change().and_then(|change| change.qpn).map(|qpn| qpn.0));
    drawn.push(net.xrc_srq(&end).1);
    // As drawn before there were shards: recorded runs and simulated seeds go by them.
    assert_eq!(drawn, [1973790, 3947580, 4934475, 3946947, 13200353, 940634]);
}
