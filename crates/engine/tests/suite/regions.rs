//! Memory regions beyond registering them: changes in place, all addresses, none at all; domains that processes share.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

use CompletionStatus as Status;
use SendOpcode as Op;
use VerbsError::{Busy, InvalidArgument, NoMemory, NotFound, NotPermitted, NotSupported};

fn refused(error: VerbsError) -> Result<MrKeys, Refusal> {
    Err(Refusal::Error(error))
}

fn rights(access: Access) -> RegionChange {
    RegionChange { access: Some(access), ..Default::default() }
}

fn moved(address: u64, length: u64, iova: u64) -> RegionChange {
    RegionChange { translation: Some(Translation { address, length, iova }), ..Default::default() }
}

/// `a` writes eight bytes to `b`'s region as `b` registered it.
fn write(net: &mut Net, a: &End, b: &End, address: u64) -> Status {
    let write = SendRequest { remote_address: address, rkey: b.key, ..request(1, Op::RdmaWrite, &[a.sge(0, 8)]) };
    net.post_send(a, write);
    net.settle();
    net.only(a).status
}

// ---- changes in place

#[test]
fn a_region_moves_and_keeps_its_keys() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.world.bytes(a.session, MEMORY_BASE, 8).copy_from_slice(b"new home");
    let keys = net.engine.reregister_mr(b.session, b.mr, None, &moved(MEMORY_BASE + 4096, 64, 0)).unwrap();
    assert_eq!((keys.mr, keys.lkey, keys.rkey), (b.mr, b.key, b.key));
    assert_eq!(net.engine.vnic_usage(b.vnic).unwrap().registered_bytes, 64);
    assert_eq!(write(&mut net, &a, &b, 56), Status::Success);
    assert_eq!(net.world.bytes(b.session, MEMORY_BASE + 4096 + 56, 8), b"new home");
    assert_eq!(write(&mut net, &a, &b, 57), Status::RemoteAccessError);
}

#[test]
fn a_region_changes_its_rights() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.engine.reregister_mr(b.session, b.mr, None, &rights(Access::REMOTE_READ)).unwrap();
    assert_eq!(write(&mut net, &a, &b, MEMORY_BASE), Status::RemoteAccessError);
    net.engine.reregister_mr(b.session, b.mr, None, &rights(ALL_ACCESS)).unwrap();
    for end in [&a, &b] {
        net.to(end, QpState::Reset).unwrap();
    }
    net.connect(&a, &b);
    net.connect(&b, &a);
    assert_eq!(write(&mut net, &a, &b, MEMORY_BASE), Status::Success);
}

#[test]
fn a_region_changes_its_domain() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let pd = net.engine.alloc_pd(b.session, b.context).unwrap();
    net.engine.reregister_mr(b.session, b.mr, Some(pd), &RegionChange::default()).unwrap();
    assert_eq!(net.engine.dealloc_pd(b.session, pd), Err(Busy));
    assert_eq!(write(&mut net, &a, &b, MEMORY_BASE), Status::RemoteAccessError);
    net.engine.destroy_qp(&mut net.world, net.now, b.session, b.qp).unwrap();
    assert_eq!(net.engine.dealloc_pd(b.session, b.pd), Ok(()), "nothing is left in the old one");
    net.engine.deregister_mr(b.session, b.mr).unwrap();
    assert_eq!(net.engine.dealloc_pd(b.session, pd), Ok(()));
}

#[test]
fn changes_that_are_refused_change_nothing() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let other = net.end(QpType::Rc);
    let null = net.engine.alloc_null_mr(b.session, b.pd).unwrap();
    let engine = &mut net.engine;
    let mut change = |mr, pd, change: RegionChange| engine.reregister_mr(b.session, mr, pd, &change);
    assert_eq!(change(b.mr, None, rights(Access::REMOTE_WRITE)), refused(InvalidArgument));
    assert_eq!(change(b.mr, None, rights(Access::FLUSH_PERSISTENT)), refused(NotSupported));
    assert_eq!(change(b.mr, None, moved(MEMORY_BASE, 0, 0)), refused(InvalidArgument));
    assert_eq!(change(b.mr, None, moved(u64::MAX, 2, 0)), refused(InvalidArgument));
    assert_eq!(change(b.mr, None, moved(0, 2, u64::MAX)), refused(InvalidArgument));
    assert_eq!(change(b.mr, None, moved(0, 1 << 60, 0)), refused(NoMemory));
    assert_eq!(change(b.mr, Some(other.pd), RegionChange::default()), refused(NotFound));
    assert_eq!(change(other.mr, None, RegionChange::default()), refused(NotFound));
    assert_eq!(change(null.mr, None, rights(ALL_ACCESS)), refused(InvalidArgument));
    assert_eq!(net.engine.vnic_usage(b.vnic).unwrap().registered_bytes, MEMORY_BYTES as u64);
    assert_eq!(write(&mut net, &a, &b, MEMORY_BASE), Status::Success);
}

/// All that uses a region, in several chunks: as target, as source, as what a RECV names.
fn uses(net: &mut Net, a: &End, b: &End, length: u32) {
    net.post_send(a, remote(1, Op::RdmaWrite, &[a.sge(0, length)], b, 0));
    net.post_send(a, remote(2, Op::RdmaRead, &[a.sge(0, length)], b, 0));
    net.post_send(a, remote(3, Op::FetchAdd, &[a.sge(0, 8)], b, 64));
    net.post_receive(b, 4, &[b.sge(0, length)]);
    net.post_send(a, request(5, Op::Send, &[a.sge(0, length)]));
    net.post_send(b, remote(6, Op::RdmaWrite, &[b.sge(0, length)], a, 0));
}

#[test]
fn who_uses_a_region_does_not_notice_that_it_gets_the_same_rights_or_more() {
    let all = MEMORY_BYTES as u64;
    let more = ALL_ACCESS.union(Access::MW_BIND);
    let same = [RegionChange::default(), rights(ALL_ACCESS), moved(MEMORY_BASE, all, MEMORY_BASE), rights(more)];
    for (change, names_pd) in same.into_iter().flat_map(|change| [(change, false), (change, true)]) {
        let mut net = Net::new();
        let (a, b) = net.pair(QpType::Rc);
        net.world.always_put_off = true;
        uses(&mut net, &a, &b, 600 << 10);
        net.work();
        let mut steps = 0;
        while !net.world.pending.is_empty() {
            let keys = net.engine.reregister_mr(b.session, b.mr, names_pd.then_some(b.pd), &change).unwrap();
            assert_eq!((keys.mr, keys.rkey), (b.mr, b.key));
            net.work();
            net.land(0);
            net.work();
            steps += 1;
        }
        assert!(steps > 10, "each chunk is one by itself");
        let ended = [net.statuses(&a), net.statuses(&b)].concat();
        assert!(ended.len() == 6 && ended.iter().all(|(_, status)| *status == Status::Success), "{ended:?}");
    }
}

#[test]
fn what_a_change_takes_away_is_waited_for() {
    let on_demand = ALL_ACCESS.union(Access::ON_DEMAND);
    let length = MEMORY_BYTES as u64;
    let takes = [
        rights(Access(0xf & !Access::REMOTE_ATOMIC.0)),
        // Other bytes from then on.
        rights(on_demand),
        moved(MEMORY_BASE, length - 1, MEMORY_BASE),
        moved(MEMORY_BASE + 1, length - 1, MEMORY_BASE),
        moved(MEMORY_BASE, length, MEMORY_BASE + 1),
    ];
    for (change, changes_pd) in takes.into_iter().map(|change| (change, false)).chain([(rights(ALL_ACCESS), true)]) {
        let mut net = Net::new();
        let (a, b) = net.pair(QpType::Rc);
        let pd = changes_pd.then(|| net.engine.alloc_pd(b.session, b.context).unwrap());
        net.world.always_put_off = true;
        net.post_send(&a, remote(1, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0));
        net.work();
        assert_eq!(net.engine.reregister_mr(b.session, b.mr, pd, &change), Err(Refusal::InFlight));
        net.settle();
        assert!(net.engine.reregister_mr(b.session, b.mr, pd, &change).is_ok());
    }
}

#[test]
fn a_change_waits_for_copies_and_the_key_is_invalid_meanwhile() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.world.always_put_off = true;
    for id in [1, 2] {
        net.post_send(&a, remote(id, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0));
    }
    net.work();
    let change = rights(Access::LOCAL_WRITE.union(Access::REMOTE_WRITE));
    for _ in 0..2 {
        assert_eq!(net.engine.reregister_mr(b.session, b.mr, None, &change), Err(Refusal::InFlight));
    }
    net.settle();
    assert_eq!(net.statuses(&a), [(1, Status::Success), (2, Status::RemoteAccessError)]);
    assert!(net.engine.reregister_mr(b.session, b.mr, None, &change).is_ok());
    for end in [&a, &b] {
        net.to(end, QpState::Reset).unwrap();
    }
    net.connect(&a, &b);
    net.connect(&b, &a);
    assert_eq!(write(&mut net, &a, &b, MEMORY_BASE), Status::Success);
}

#[test]
fn a_change_that_is_refused_while_it_waits_leaves_the_keys_valid() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let pd = net.engine.alloc_pd(b.session, b.context).unwrap();
    net.world.always_put_off = true;
    net.post_send(&a, remote(1, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0));
    net.work();
    let change = |net: &mut Net| net.engine.reregister_mr(b.session, b.mr, Some(pd), &RegionChange::default());
    assert_eq!(change(&mut net), Err(Refusal::InFlight));
    net.engine.dealloc_pd(b.session, pd).unwrap();
    // A request of another session gives up nothing.
    let other = net.engine.reregister_mr(a.session, b.mr, None, &RegionChange::default());
    assert_eq!(other, refused(NotFound));
    assert_eq!(change(&mut net), refused(NotFound));
    net.post_send(&a, remote(2, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0));
    net.settle();
    assert_eq!(net.statuses(&a), [(1, Status::Success), (2, Status::Success)]);
}

#[test]
fn a_region_may_go_while_it_waits_to_change() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.world.always_put_off = true;
    net.post_send(&a, remote(1, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0));
    net.work();
    assert_eq!(net.engine.reregister_mr(b.session, b.mr, None, &rights(Access(0))), Err(Refusal::InFlight));
    assert_eq!(net.engine.deregister_mr(b.session, b.mr), Err(Refusal::InFlight));
    assert_eq!(net.engine.reregister_mr(b.session, b.mr, None, &rights(ALL_ACCESS)), refused(InvalidArgument));
    net.settle();
    assert_eq!(net.engine.deregister_mr(b.session, b.mr), Ok(()));
    assert_eq!(net.engine.vnic_usage(b.vnic).unwrap().registered_bytes, 0);
}

// ---- all addresses, and none

#[test]
fn the_null_region_reads_zeros_and_forgets() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let null = net.engine.alloc_null_mr(a.session, a.pd).unwrap();
    let used = net.engine.vnic_usage(a.vnic).unwrap();
    assert_eq!((used.mrs, used.registered_bytes), (2, MEMORY_BYTES as u64));
    let nowhere = |length| Sge { address: 0xffff_ffff_0000_0000, length, lkey: null.lkey };
    net.world.bytes(b.session, MEMORY_BASE, 24).copy_from_slice(&[7; 24]);
    net.world.bytes(a.session, MEMORY_BASE, 8).copy_from_slice(b"not null");
    net.post_send(&a, remote(1, Op::RdmaWrite, &[nowhere(8), a.sge(0, 8)], &b, 0));
    net.post_send(&a, remote(2, Op::RdmaRead, &[nowhere(20), a.sge(64, 4)], &b, 0));
    net.post_receive(&a, 3, &[nowhere(8), a.sge(128, 8)]);
    net.post_send(&b, request(4, Op::Send, &[b.sge(0, 16)]));
    net.settle();
    assert!(net.statuses(&a).iter().all(|(_, status)| *status == Status::Success));
    assert_eq!(
        net.world.bytes(b.session, MEMORY_BASE, 24),
        b"\0\0\0\0\0\0\0\0not null\x07\x07\x07\x07\x07\x07\x07\x07"
    );
    assert_eq!(net.world.bytes(a.session, MEMORY_BASE + 64, 4), [7; 4], "what the null region does not cover");
    assert_eq!(net.world.bytes(a.session, MEMORY_BASE + 128, 8), b"not null");
    net.engine.deregister_mr(a.session, null.mr).unwrap();
    net.post_send(&a, remote(5, Op::RdmaWrite, &[nowhere(8)], &b, 0));
    net.settle();
    assert_eq!(net.statuses(&b), [(4, Status::Success)]);
    assert_eq!(net.only(&a).status, Status::LocalProtectionError);
}

#[test]
fn the_null_region_has_no_remote_rights() {
    for opcode in [Op::RdmaWrite, Op::RdmaRead, Op::FetchAdd] {
        let mut net = Net::new();
        let (a, b) = net.pair(QpType::Rc);
        let rkey = net.engine.alloc_null_mr(b.session, b.pd).unwrap().rkey;
        net.post_send(&a, SendRequest { rkey, ..remote(1, opcode, &[a.sge(0, 8)], &b, 0) });
        net.settle();
        assert_eq!(net.only(&a).status, Status::RemoteAccessError);
    }
}

#[test]
fn an_implicit_region_is_the_whole_process() {
    let mut net = Net::new();
    let (a, mut b) = net.pair(QpType::Rc);
    let on_demand = ALL_ACCESS.union(Access::ON_DEMAND);
    let mut register =
        |address, length, iova, access| net.engine.register_mr(b.session, b.pd, address, length, iova, access);
    assert_eq!(register(0, u64::MAX, 8, on_demand), Err(InvalidArgument), "it lies where the process lies");
    assert_eq!(register(0, u64::MAX, 0, ALL_ACCESS), Err(NoMemory), "only on demand");
    let implicit = register(0, u64::MAX, 0, on_demand).unwrap();
    assert_eq!(net.engine.vnic_usage(b.vnic).unwrap().registered_bytes, MEMORY_BYTES as u64);
    b.key = implicit.rkey;
    assert_eq!(write(&mut net, &a, &b, MEMORY_BASE + 100), Status::Success);
    let without = rights(ALL_ACCESS);
    assert_eq!(net.engine.reregister_mr(b.session, implicit.mr, None, &without), refused(InvalidArgument));
    let smaller = moved(MEMORY_BASE, 64, MEMORY_BASE);
    assert!(net.engine.reregister_mr(b.session, implicit.mr, None, &smaller).is_ok());
    assert_eq!(net.engine.vnic_usage(b.vnic).unwrap().registered_bytes, MEMORY_BYTES as u64 + 64);
    assert_eq!(write(&mut net, &a, &b, MEMORY_BASE + 100), Status::RemoteAccessError);
    net.engine.deregister_mr(b.session, implicit.mr).unwrap();
    assert_eq!(net.engine.vnic_usage(b.vnic).unwrap().registered_bytes, MEMORY_BYTES as u64);
}

#[test]
fn no_implicit_region_where_registered_bytes_are_limited() {
    let mut net = Net::new();
    let e = net.end(QpType::Rc);
    let on_demand = ALL_ACCESS.union(Access::ON_DEMAND);
    let register = |net: &mut Net| net.engine.register_mr(e.session, e.pd, 0, u64::MAX, 0, on_demand);
    let earlier = register(&mut net).unwrap();
    let plain = net.engine.limits(e.vnic).unwrap();
    net.engine.set_limits(e.vnic, VnicLimits { registered_bytes_max: 64 << 20, ..plain }).unwrap();
    assert_eq!(register(&mut net), Err(NoMemory));
    let whole = RegionChange { access: Some(on_demand), ..moved(0, u64::MAX, 0) };
    assert_eq!(net.engine.reregister_mr(e.session, e.mr, None, &whole), refused(NoMemory), "by a change");
    assert!(net.engine.reregister_mr(e.session, earlier.mr, None, &whole).is_ok(), "what is held stays");
    net.engine.set_limits(e.vnic, plain).unwrap();
    let network = NetworkId(1);
    let limits = NetworkLimits { registered_bytes_max: Some(64 << 20), ..Default::default() };
    net.engine.set_network_limits(network, limits);
    assert_eq!(register(&mut net), Err(NoMemory));
    let counts = net.engine.refusals(e.vnic).unwrap();
    assert_eq!((counts.by_vnic.registered_bytes, counts.by_network.registered_bytes), (2, 1));
    net.engine.set_network_limits(network, NetworkLimits::default());
    register(&mut net).unwrap();
}

#[test]
fn hints_and_rights_of_registration() {
    let mut net = Net::new();
    let e = net.end(QpType::Rc);
    let mut register = |access: Access| net.engine.register_mr(e.session, e.pd, MEMORY_BASE, 64, 0, access).map(|_| ());
    for access in [Access::ON_DEMAND, Access::ZERO_BASED, Access::MW_BIND, Access::FLUSH_GLOBAL, Access::HUGETLB] {
        assert_eq!(register(access), Ok(()));
    }
    assert_eq!(register(Access::FLUSH_PERSISTENT), Err(NotSupported));
    assert_eq!(register(Access(1 << 10)), Err(InvalidArgument));
}

// ---- shared domains

/// Two processes of one vNIC; the second uses the first one's PD.
fn sharing() -> (Net, End, End) {
    let mut net = Net::new();
    let owner = net.end(QpType::Rc);
    let importer = net.end_at(owner.vnic, owner.gid, QpType::Rc, false);
    net.engine.share_pd(owner.session, importer.session, owner.pd).unwrap();
    (net, owner, End { pd: owner.pd, ..importer })
}

#[test]
fn a_shared_domain_holds_objects_of_both() {
    let (mut net, owner, mut importer) = sharing();
    let peer = net.end(QpType::Rc);
    // The importer's QP reaches the owner's memory by its key, in its own requests and in those of a peer.
    (importer.qp, importer.qpn) = net.qp(&importer, QpType::Rc);
    net.connect(&importer, &peer);
    net.connect(&peer, &importer);
    net.world.bytes(owner.session, MEMORY_BASE, 8).copy_from_slice(b"owner's ");
    net.post_send(&importer, remote(1, Op::RdmaWrite, &[owner.sge(0, 8)], &peer, 0));
    net.settle();
    net.post_send(&peer, remote(2, Op::RdmaWrite, &[peer.sge(0, 8)], &owner, 64));
    net.settle();
    assert_eq!((net.only(&importer).status, net.only(&peer).status), (Status::Success, Status::Success));
    assert_eq!(net.world.bytes(owner.session, MEMORY_BASE + 64, 8), b"owner's ");
    let engine = &mut net.engine;
    let at = MEMORY_BASE;
    let mr = engine.register_mr(importer.session, importer.pd, at, 64, at, ALL_ACCESS).unwrap().mr;
    let mw = engine.alloc_mw(importer.session, importer.pd, WindowKind::Type1).unwrap().0;
    let ah = engine.create_ah(importer.session, importer.pd, &address(gid(9))).unwrap();
    let asked = SrqAttributes { max_wr: 1, max_sge: 1, limit: 0 };
    let srq = engine.create_srq(importer.session, importer.pd, asked, None, 0).unwrap().0;
    // Each of these keeps the share, none the owner's own.
    let (world, now) = (&mut net.world, net.now);
    assert_eq!(engine.unshare_pd(importer.session, importer.pd), Err(Busy));
    engine.destroy_qp(world, now, importer.session, importer.qp).unwrap();
    assert_eq!(engine.unshare_pd(importer.session, importer.pd), Err(Busy));
    engine.deregister_mr(importer.session, mr).unwrap();
    assert_eq!(engine.unshare_pd(importer.session, importer.pd), Err(Busy));
    engine.dealloc_mw(importer.session, mw).unwrap();
    assert_eq!(engine.unshare_pd(importer.session, importer.pd), Err(Busy));
    engine.destroy_ah(importer.session, ah).unwrap();
    assert_eq!(engine.unshare_pd(importer.session, importer.pd), Err(Busy));
    engine.destroy_srq(importer.session, srq).unwrap();
    assert_eq!(engine.unshare_pd(importer.session, importer.pd), Ok(()));
    assert_eq!(engine.unshare_pd(importer.session, importer.pd), Err(NotFound));
    assert_eq!(engine.register_mr(importer.session, importer.pd, at, 64, at, ALL_ACCESS), Err(NotFound));
}

#[test]
fn a_shared_domain_outlives_its_owners_use() {
    let (mut net, owner, importer) = sharing();
    let engine = &mut net.engine;
    let pds = engine.vnic_usage(owner.vnic).unwrap().pds;
    engine.register_mr(importer.session, importer.pd, MEMORY_BASE, 64, 0, ALL_ACCESS).unwrap();
    assert_eq!(engine.dealloc_pd(owner.session, owner.pd), Err(Busy), "the owner's own objects");
    engine.destroy_qp(&mut net.world, net.now, owner.session, owner.qp).unwrap();
    engine.deregister_mr(owner.session, owner.mr).unwrap();
    assert_eq!(engine.dealloc_pd(owner.session, owner.pd), Ok(()), "another's don't count");
    assert_eq!(engine.dealloc_pd(owner.session, owner.pd), Err(NotFound));
    assert_eq!(engine.vnic_usage(owner.vnic).unwrap().pds, pds - 1);
    engine.destroy_cq(owner.session, owner.cq).unwrap();
    assert_eq!(engine.close_context(owner.session, owner.context), Ok(()));
    assert!(engine.register_mr(importer.session, importer.pd, MEMORY_BASE, 64, 0, ALL_ACCESS).is_ok());
    assert_eq!(engine.dealloc_pd(importer.session, importer.pd), Err(NotFound), "it was not allocated here");
    engine.destroy_session(&mut net.world, net.now, importer.session);
    engine.destroy_session(&mut net.world, net.now, owner.session);
    assert_eq!(engine.vnic_usage(owner.vnic), Some(Usage::default()));
}

#[test]
fn a_process_may_import_its_own_domain() {
    let mut net = Net::new();
    let e = net.end(QpType::Rc);
    let engine = &mut net.engine;
    assert_eq!(engine.unshare_pd(e.session, e.pd), Err(NotFound), "an allocation is no import");
    engine.share_pd(e.session, e.session, e.pd).unwrap();
    // With CQs of its other context.
    let context = engine.open_context(e.session).unwrap();
    let cq = engine.create_cq(e.session, context, 4).unwrap();
    let (qp, _) = net.qp(&End { cq, ..e }, QpType::Rc);
    let engine = &mut net.engine;
    engine.dealloc_pd(e.session, e.pd).unwrap();
    assert_eq!(engine.unshare_pd(e.session, e.pd), Err(Busy), "the last use");
    engine.destroy_qp(&mut net.world, net.now, e.session, qp).unwrap();
    engine.destroy_qp(&mut net.world, net.now, e.session, e.qp).unwrap();
    engine.deregister_mr(e.session, e.mr).unwrap();
    assert_eq!(engine.unshare_pd(e.session, e.pd), Ok(()));
    assert_eq!(engine.vnic_usage(e.vnic).unwrap().pds, 0);
}

#[test]
fn shares_that_are_refused() {
    let (mut net, owner, importer) = sharing();
    let stranger = net.end(QpType::Rc);
    let engine = &mut net.engine;
    assert_eq!(engine.share_pd(owner.session, stranger.session, owner.pd), Err(NotPermitted));
    assert_eq!(engine.share_pd(stranger.session, importer.session, owner.pd), Err(NotFound));
    assert_eq!(engine.unshare_pd(stranger.session, owner.pd), Err(NotFound));
    let limits = VnicLimits { pd_count_max: 1, ..Default::default() };
    let vnic = engine.create_vnic(NetworkId(9), gid(1), limits).unwrap();
    let (one, other) = (engine.create_session(vnic).unwrap(), engine.create_session(vnic).unwrap());
    let context = engine.open_context(one).unwrap();
    let pd = engine.alloc_pd(one, context).unwrap();
    assert_eq!(engine.share_pd(one, other, pd), Err(NoMemory), "each share counts");
}

/// The owner dies while a copy of the importer's QP uses its memory, through a window or by its key.
#[test]
fn the_owner_of_shared_memory_dies() {
    for through_window in [false, true] {
        let (mut net, mut owner, mut importer) = sharing();
        let peer = net.end(QpType::Rc);
        (importer.qp, importer.qpn) = net.qp(&importer, QpType::Rc);
        net.connect(&importer, &peer);
        net.connect(&peer, &importer);
        if through_window {
            let access = Access::LOCAL_WRITE.union(Access::MW_BIND);
            let at = MEMORY_BASE;
            // The owner's window on the importer's memory: only the window dies.
            let mr = net.engine.register_mr(importer.session, importer.pd, at, 4096, at, access).unwrap();
            let (_, key) = net.engine.alloc_mw(owner.session, owner.pd, WindowKind::Type1).unwrap();
            let bind = SendRequest { rkey: key, immediate: mr.lkey, ..request(3, Op::BindWindow, &[]) };
            let bind = SendRequest { remote_address: at, compare_add: 4096, swap: 2, ..bind };
            net.post_send(&importer, bind);
            net.settle();
            assert_eq!(net.only(&importer).status, Status::Success);
            owner.key = key;
        }
        net.world.always_put_off = true;
        net.post_send(&peer, remote(1, Op::RdmaWrite, &[peer.sge(0, 8)], &owner, 0));
        net.work();
        assert_eq!(net.world.pending.len(), 1);
        net.die(owner.session);
        net.qps.retain(|qp| *qp != owner.qp);
        net.settle();
        // A message that had begun ends as its memory is; the next one finds no key.
        let (status, after) = match through_window {
            true => (Status::Success, Status::RemoteAccessError),
            false => (Status::RemoteOperationError, Status::WorkRequestFlushed),
        };
        assert_eq!(net.statuses(&peer), [(1, status)]);
        net.post_send(&peer, remote(2, Op::RdmaWrite, &[peer.sge(0, 8)], &owner, 0));
        net.settle();
        assert_eq!(net.statuses(&peer), [(2, after)]);
        assert_eq!(net.engine.query_qp(importer.session, importer.qp).unwrap().state, QpState::Error);
        net.engine.destroy_session(&mut net.world, net.now, importer.session);
        assert_eq!(net.engine.vnic_usage(importer.vnic), Some(Usage::default()));
    }
}

/// The importer dies, and with it the region that a window of the owner is bound to.
#[test]
fn a_region_dies_under_a_window_of_another_process() {
    let (mut net, owner, importer) = sharing();
    let peer = net.end(QpType::Rc);
    net.connect(&owner, &peer);
    net.connect(&peer, &owner);
    let access = Access::LOCAL_WRITE.union(Access::MW_BIND);
    let at = MEMORY_BASE;
    let mr = net.engine.register_mr(importer.session, importer.pd, at, 4096, at, access).unwrap();
    let (mw, key) = net.engine.alloc_mw(owner.session, owner.pd, WindowKind::Type2).unwrap();
    let bind = SendRequest { rkey: key, immediate: mr.lkey, ..request(3, Op::BindWindow, &[]) };
    net.post_send(&owner, SendRequest { remote_address: at, compare_add: 4096, swap: 2, ..bind });
    net.settle();
    assert_eq!(net.only(&owner).status, Status::Success);
    net.engine.destroy_session(&mut net.world, net.now, importer.session);
    net.qps.retain(|qp| *qp != importer.qp);
    net.post_send(&peer, SendRequest { rkey: key, ..remote(1, Op::RdmaWrite, &[peer.sge(0, 8)], &owner, 0) });
    net.settle();
    assert_eq!(net.statuses(&peer), [(1, Status::RemoteAccessError)]);
    assert_eq!(net.engine.dealloc_mw(owner.session, mw), Ok(()));
}
