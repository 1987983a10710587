//! Verbs of the control path: who owns what, what stands on what, limits.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

use VerbsError::{Busy, InvalidArgument, NoMemory, NotFound};

#[test]
fn objects_go_from_the_top_down() {
    let mut net = Net::new();
    let e = net.end_with(QpType::Rc, true);
    let engine = &mut net.engine;
    let ah = engine.create_ah(e.session, e.pd, &address(gid(9))).unwrap();
    assert_eq!(engine.usage().ahs, 1);
    assert_eq!(engine.close_context(e.session, e.context), Err(Busy));
    assert_eq!(engine.dealloc_pd(e.session, e.pd), Err(Busy));
    assert_eq!(engine.destroy_cq(e.session, e.cq), Err(Busy));
    assert_eq!(engine.destroy_srq(e.session, e.srq.unwrap()), Err(Refusal::Error(Busy)));
    assert_eq!(engine.destroy_vnic(e.vnic), Err(Busy));
    engine.destroy_qp(&mut net.world, net.now, e.session, e.qp).unwrap();
    engine.destroy_cq(e.session, e.cq).unwrap();
    assert_eq!(engine.dealloc_pd(e.session, e.pd), Err(Busy));
    engine.destroy_srq(e.session, e.srq.unwrap()).unwrap();
    engine.destroy_ah(e.session, ah).unwrap();
    engine.deregister_mr(e.session, e.mr).unwrap();
    engine.dealloc_pd(e.session, e.pd).unwrap();
    engine.close_context(e.session, e.context).unwrap();
    assert_eq!(engine.close_context(e.session, e.context), Err(NotFound));
    assert_eq!(engine.vnic_usage(e.vnic), Some(Usage { sessions: 1, ..Default::default() }));
    engine.destroy_session(&mut net.world, net.now, e.session);
    engine.destroy_vnic(e.vnic).unwrap();
    assert_eq!(engine.usage(), Usage::default());
}

#[test]
fn a_dead_session_leaves_nothing() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let before = net.engine.vnic_usage(b.vnic).unwrap();
    assert_eq!((before.qps, before.mrs, before.registered_bytes), (1, 1, MEMORY_BYTES as u64));
    net.engine.destroy_session(&mut net.world, net.now, b.session);
    assert_eq!(net.engine.vnic_usage(b.vnic), Some(Usage::default()));
    assert_eq!(net.engine.query_qp(b.session, b.qp), Err(NotFound));
    assert!(net.engine.query_qp(a.session, a.qp).is_ok());
    net.engine.destroy_vnic(b.vnic).unwrap();
}

#[test]
fn objects_of_another_session_are_not_found() {
    let mut net = Net::new();
    let (a, b) = (net.end_with(QpType::Rc, true), net.end_with(QpType::Rc, true));
    let engine = &mut net.engine;
    let (world, now, srq) = (&mut net.world, net.now, b.srq.unwrap());
    let ah = engine.create_ah(b.session, b.pd, &address(gid(9))).unwrap();
    assert_eq!(engine.close_context(a.session, b.context), Err(NotFound));
    assert_eq!(engine.alloc_pd(a.session, b.context), Err(NotFound));
    assert_eq!(engine.dealloc_pd(a.session, b.pd), Err(NotFound));
    assert_eq!(engine.register_mr(a.session, b.pd, 0, 1, 0, Access(0)), Err(NotFound));
    assert_eq!(engine.deregister_mr(a.session, b.mr), Err(Refusal::Error(NotFound)));
    assert_eq!(engine.create_cq(a.session, b.context, 1), Err(NotFound));
    assert_eq!(engine.destroy_cq(a.session, b.cq), Err(NotFound));
    assert_eq!(engine.modify_srq(world, a.session, srq, 1), Err(NotFound));
    assert_eq!(engine.query_srq(a.session, srq), Err(NotFound));
    assert_eq!(engine.destroy_srq(a.session, srq), Err(Refusal::Error(NotFound)));
    assert_eq!(engine.query_qp(a.session, b.qp), Err(NotFound));
    assert_eq!(engine.destroy_qp(world, now, a.session, b.qp), Err(Refusal::Error(NotFound)));
    assert_eq!(engine.destroy_ah(a.session, ah), Err(NotFound));
    assert_eq!(engine.create_ah(a.session, b.pd, &address(gid(9))), Err(NotFound));
    let init = rc_init(a.pd, a.cq);
    for foreign in [
        QpInit { pd: Some(b.pd), ..init },
        QpInit { send_cq: Some(b.cq), ..init },
        QpInit { recv_cq: Some(b.cq), ..init },
        QpInit { srq: Some(srq), ..init },
    ] {
        assert_eq!(engine.create_qp(a.session, foreign), Err(NotFound));
    }
    let state = QpAttributes { state: QpState::Error, ..Default::default() };
    let refused = engine.modify_qp(world, now, a.session, b.qp, &state, QpAttributeMask(1));
    assert_eq!(refused, Err(Refusal::Error(NotFound)));
}

#[test]
fn limits_of_a_vnic() {
    let mut engine = Engine::new(Seed([1; 32]));
    let limits = VnicLimits {
        session_count_max: 1,
        context_count_max: 1,
        pd_count_max: 1,
        qp_count_max: 1,
        cq_count_max: 1,
        srq_count_max: 1,
        mr_count_max: 2,
        ah_count_max: 1,
        registered_bytes_max: 100,
        ..Default::default()
    };
    let vnic = engine.create_vnic(NetworkId(0), gid(1), limits).unwrap();
    assert_eq!(engine.create_vnic(NetworkId(0), gid(1), limits), Err(InvalidArgument));
    assert!(engine.create_vnic(NetworkId(1), gid(1), limits).is_ok(), "another network, the same address");
    let session = engine.create_session(vnic).unwrap();
    assert_eq!(engine.create_session(vnic), Err(NoMemory));
    let context = engine.open_context(session).unwrap();
    assert_eq!(engine.open_context(session), Err(NoMemory));
    let pd = engine.alloc_pd(session, context).unwrap();
    assert_eq!(engine.alloc_pd(session, context), Err(NoMemory));
    let cq = engine.create_cq(session, context, 1).unwrap();
    assert_eq!(engine.create_cq(session, context, 1), Err(NoMemory));
    let asked = SrqAttributes { max_wr: 1, max_sge: 1, limit: 0 };
    engine.create_srq(session, pd, asked, None, 0).unwrap();
    assert_eq!(engine.create_srq(session, pd, asked, None, 0), Err(NoMemory));
    engine.create_ah(session, pd, &address(gid(2))).unwrap();
    assert_eq!(engine.create_ah(session, pd, &address(gid(2))), Err(NoMemory));
    let init = rc_init(pd, cq);
    engine.create_qp(session, init).unwrap();
    assert_eq!(engine.create_qp(session, init), Err(NoMemory));
    let mut register = |length| engine.register_mr(session, pd, 0, length, 0, Access(0));
    let first = register(60).unwrap();
    assert_eq!(register(41), Err(NoMemory), "bytes");
    register(40).unwrap();
    assert_eq!(register(1), Err(NoMemory), "count");
    engine.deregister_mr(session, first.mr).unwrap();
    assert!(engine.register_mr(session, pd, 0, 60, 0, Access(0)).is_ok());
}

#[test]
fn arguments() {
    let mut net = Net::new();
    let e = net.end(QpType::Rc);
    let engine = &mut net.engine;
    for cqe in [0, CQE_COUNT_MAX + 1] {
        assert_eq!(engine.create_cq(e.session, e.context, cqe), Err(InvalidArgument));
    }
    let mut register = |address, length, iova| engine.register_mr(e.session, e.pd, address, length, iova, Access(0));
    assert_eq!(register(0, 0, 0), Err(InvalidArgument));
    assert_eq!(register(u64::MAX, 2, 0), Err(InvalidArgument));
    assert_eq!(register(0, 2, u64::MAX), Err(InvalidArgument));
    assert!(register(0, 1, u64::MAX).is_ok());
    for (asked, granted) in [((0, 1), false), ((32_769, 1), false), ((1, 31), false), ((32_768, 30), true)] {
        let asked = SrqAttributes { max_wr: asked.0, max_sge: asked.1, limit: 5 };
        assert_eq!(grant_srq_attributes(&asked).is_ok(), granted);
    }
    let caps = capabilities();
    let too_much = [
        QpCapabilities { max_send_wr: 32_769, ..caps },
        QpCapabilities { max_recv_wr: 32_769, ..caps },
        QpCapabilities { max_send_sge: 31, ..caps },
        QpCapabilities { max_recv_sge: 31, ..caps },
        QpCapabilities { max_inline_data: 1025, ..caps },
    ];
    for asked in too_much {
        assert_eq!(grant_qp_capabilities(&asked, false), Err(InvalidArgument));
    }
    assert_eq!(grant_qp_capabilities(&QpCapabilities::default(), false), Ok(QpCapabilities::default()));
    let shared = grant_qp_capabilities(&QpCapabilities { max_recv_wr: 99_999, ..caps }, true).unwrap();
    assert_eq!((shared.max_recv_wr, shared.max_recv_sge, shared.max_send_wr), (0, 0, 64));
}

#[test]
fn address_handles() {
    let mut net = Net::new();
    let e = net.end(QpType::Ud);
    let mut create = |edit: &dyn Fn(&mut AddressHandleAttributes)| {
        let mut attributes = address(gid(2));
        edit(&mut attributes);
        net.engine.create_ah(e.session, e.pd, &attributes).map(|_| ())
    };
    assert_eq!(create(&|_| {}), Ok(()));
    assert_eq!(create(&|attributes| attributes.grh = None), Err(InvalidArgument));
    assert_eq!(create(&|attributes| attributes.port = 2), Err(InvalidArgument));
    assert_eq!(create(&|attributes| attributes.grh.as_mut().unwrap().sgid_index = 1), Err(InvalidArgument));
    assert_eq!(create(&|attributes| attributes.grh.as_mut().unwrap().dgid = Gid::default()), Err(InvalidArgument));
    let group = Gid::from_ip("224.0.0.5".parse().unwrap());
    assert_eq!(create(&|attributes| attributes.grh.as_mut().unwrap().dgid = group), Ok(()));
}

#[test]
fn numbers_are_unpredictable_and_unique() {
    let mut net = Net::new();
    let e = net.end(QpType::Rc);
    let mut keys = vec![e.key];
    let mut qpns = vec![e.qpn.0];
    for _ in 0..1000 {
        keys.push(net.engine.register_mr(e.session, e.pd, 0, 1, 0, Access(0)).unwrap().rkey);
        qpns.push(net.qp(&e, QpType::Rc).1.0);
    }
    assert!(qpns.iter().all(|qpn| *qpn > 1 && *qpn < 0xff_ffff));
    for numbers in [&mut keys, &mut qpns] {
        let steps = numbers.windows(2).filter(|pair| pair[0].wrapping_add(1) == pair[1]).count();
        assert!(steps < 3);
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 1001);
    }
}

/// The other end of a connection keeps a QPN in mind for seconds after its end (TimeWait).
#[test]
fn qpns_that_were_given_back_rest() {
    const RATE: u64 = 2000;
    const REST_SECONDS: u64 = 10;
    let mut net = Net::new();
    let end = net.end(QpType::Rc);
    let mut given_back = std::collections::HashMap::new();
    for turn in 0..30_000u64 {
        net.now = net.now + Duration(1_000_000_000 / RATE);
        if turn % 5000 == 0 {
            // QPNs in quarantine are part of a snapshot.
            net.engine = Engine::restore(&net.engine.snapshot()).unwrap();
        }
        let (qp, qpn) = net.qp(&end, QpType::Rc);
        if let Some(before) = given_back.insert(qpn, turn) {
            assert!(turn - before > RATE * REST_SECONDS, "{qpn:?} came again after {} others", turn - before);
        }
        net.engine.destroy_qp(&mut net.world, net.now, end.session, qp).unwrap();
    }
}
