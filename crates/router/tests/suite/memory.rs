//! Regions that change, that are null or hold all addresses; memory windows.
use crate::common::*;
use freeflow_protocol::library::{Reply, Request};
use freeflow_shm::SendDescriptor;
use freeflow_verbs::{
    Access, CompletionStatus, RegionChange, SendOpcode, Sge, Translation, VerbsError, VnicLimits, WindowKind,
};
use std::sync::atomic::Ordering::Relaxed;

fn write_to<'a>(address: u64, rkey: u32, sges: &'a [Sge]) -> SendDescriptor<'a> {
    SendDescriptor { remote_address: address, rkey, ..request(SendOpcode::RdmaWrite, sges) }
}

#[test]
fn a_region_moves_and_keeps_its_keys() {
    let mut pair = Pair::new();
    let from = pair.a.memory(8, true);
    let (before, after) = (pair.b.memory(512, true), pair.b.memory(512, true));
    assert_eq!(pair.b.ask(&Request::DeregisterMr { mr: after.mr.handle }), Reply::Done);
    let (mr, segment) = (before.mr.handle, |memory: &Memory| memory.segment().unwrap());
    let translation = Some(Translation { address: after.address, length: 64, iova: 0x5000 });
    let change = RegionChange { translation, access: None };
    let reply = pair.b.ask(&Request::ReregisterMr { mr, pd: None, change });
    assert_eq!(reply, Reply::Mr { mr, lkey: before.mr.lkey, rkey: before.mr.rkey });
    from.fill(8, 9);
    pair.a.post_send(&mut pair.a_qp, &write_to(0x5000, before.mr.rkey, &[from.sge(0, 64)]));
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    assert!(after.is_filled(8, 9) && before.word(1).load(Relaxed) == 0);
    // The memory that it lay over is free again, that which it lies over now is not.
    assert_eq!(pair.b.refused(&Request::DestroySegment { segment: segment(&after) }), VerbsError::Busy);
    assert_eq!(pair.b.ask(&Request::DestroySegment { segment: segment(&before) }), Reply::Done);
    // Other rights, another PD.
    let Reply::Pd { pd } = pair.b.ask(&Request::AllocPd { context: pair.b.context }) else { panic!("no PD") };
    let change = RegionChange { translation: None, access: Some(Access(1)) };
    let rereg = |pd| Request::ReregisterMr { mr, pd, change };
    assert_eq!(pair.b.refused(&rereg(Some(77))), VerbsError::NotFound);
    let stranger = pair.host.client("c");
    assert_eq!(stranger.refused(&rereg(None)), VerbsError::NotFound);
    assert!(matches!(pair.b.ask(&rereg(Some(pd))), Reply::Mr { .. }));
    assert_eq!(pair.b.refused(&Request::DeallocPd { pd }), VerbsError::Busy);
    pair.a.post_send(&mut pair.a_qp, &write_to(0x5000, before.mr.rkey, &[from.sge(0, 64)]));
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::RemoteAccessError);
    assert_eq!(pair.b.ask(&Request::DeregisterMr { mr }), Reply::Done);
    assert_eq!(pair.b.ask(&Request::DestroySegment { segment: segment(&after) }), Reply::Done);
    assert_eq!(pair.b.ask(&Request::DeallocPd { pd }), Reply::Done);
}

#[test]
fn a_null_region_gives_zeros_and_takes_anything() {
    for shared in [true, false] {
        let mut pair = Pair::new();
        let (from, to) = (pair.a.memory(8, shared), pair.b.memory(8, shared));
        let null = |client: &Client| {
            let Reply::Mr { mr, lkey, .. } = client.ask(&Request::AllocNullMr { pd: client.pd }) else {
                panic!("no MR")
            };
            (mr, lkey)
        };
        let ((a_mr, a_key), (_, b_key)) = (null(&pair.a), null(&pair.b));
        from.fill(8, 7);
        to.fill(8, 7);
        // The first word, two of zeros out of nowhere, the fourth.
        let sges = [from.sge(0, 8), Sge { address: 0xdead_beef, length: 16, lkey: a_key }, from.sge(24, 8)];
        pair.a.post_send(&mut pair.a_qp, &write_to(to.address, to.mr.rkey, &sges));
        assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
        let words: Vec<u64> = (0..5).map(|at| to.word(at).load(Relaxed)).collect();
        assert_eq!(words, [7, 0, 0, 28, 35]);
        // Only the third word is wanted.
        let sges =
            [Sge { address: 0, length: 16, lkey: b_key }, to.sge(0, 8), Sge { address: 1, length: 40, lkey: b_key }];
        pair.b.post_receive(&mut pair.b_qp, 1, &sges);
        pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
        assert_eq!(
            (pair.b_cq.wait().status, pair.a_cq.wait().status),
            (CompletionStatus::Success, CompletionStatus::Success)
        );
        assert_eq!((to.word(0).load(Relaxed), to.word(1).load(Relaxed)), (21, 0));
        // The result of an atomic operation that nobody wants.
        let sges = [Sge { address: 8, length: 8, lkey: a_key }];
        let add =
            SendDescriptor { opcode: SendOpcode::FetchAdd, compare_add: 1, ..write_to(to.address, to.mr.rkey, &sges) };
        pair.a.post_send(&mut pair.a_qp, &add);
        assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
        assert_eq!(to.word(0).load(Relaxed), 22);
        assert_eq!(pair.a.ask(&Request::DeregisterMr { mr: a_mr }), Reply::Done);
    }
}

#[test]
fn a_region_of_all_addresses_holds_no_segment_back() {
    let host = Host::new();
    let client = host.client("a");
    let request = Request::RegisterMr {
        pd: client.pd,
        address: 0,
        length: u64::MAX,
        iova: 0,
        access: Access(Access::LOCAL_WRITE.0 | Access::ON_DEMAND.0),
    };
    let Reply::Mr { mr, .. } = client.ask(&request) else { panic!("no MR") };
    let memory = client.memory(8, true);
    assert_eq!(client.ask(&Request::DeregisterMr { mr: memory.mr.handle }), Reply::Done);
    assert_eq!(client.ask(&Request::DestroySegment { segment: memory.segment().unwrap() }), Reply::Done);
    assert_eq!(client.ask(&Request::DeregisterMr { mr }), Reply::Done);
}

#[test]
fn windows_are_bound_by_requests_and_hold_their_region() {
    let mut pair = Pair::new();
    let (from, to) = (pair.a.memory(8, true), pair.b.memory(8, true));
    from.fill(8, 3);
    let access = Access(0xf | Access::MW_BIND.0);
    let request_mr = Request::RegisterMr { pd: pair.b.pd, address: to.address, length: 64, iova: to.address, access };
    let Reply::Mr { mr, lkey, .. } = pair.b.ask(&request_mr) else { panic!("no MR") };
    let reply = pair.b.ask(&Request::AllocMw { pd: pair.b.pd, kind: WindowKind::Type1 });
    let Reply::Mw { mw, rkey } = reply else { panic!("{reply:?}") };
    assert_eq!(pair.a.refused(&Request::DeallocMw { mw }), VerbsError::NotFound);
    let rkey = rkey & !0xff | (rkey + 1) & 0xff;
    let bind = SendDescriptor {
        immediate: lkey,
        remote_address: to.address + 8,
        rkey,
        compare_add: 16,
        swap: u64::from(Access::REMOTE_WRITE.0),
        ..request(SendOpcode::BindWindow, &[])
    };
    pair.b.post_send(&mut pair.b_qp, &bind);
    assert_eq!(pair.b_cq.wait().status, CompletionStatus::Success);
    assert_eq!(pair.b.refused(&Request::DeregisterMr { mr }), VerbsError::Busy);
    pair.a.post_send(&mut pair.a_qp, &write_to(to.address + 8, rkey, &[from.sge(0, 16)]));
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    assert_eq!((to.word(1).load(Relaxed), to.word(2).load(Relaxed), to.word(3).load(Relaxed)), (3, 6, 0));
    assert_eq!(pair.b.ask(&Request::DeallocMw { mw }), Reply::Done);
    assert_eq!(pair.b.refused(&Request::DeallocMw { mw }), VerbsError::NotFound);
    pair.a.post_send(&mut pair.a_qp, &write_to(to.address + 8, rkey, &[from.sge(0, 16)]));
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::RemoteAccessError);
    assert_eq!(pair.b.ask(&Request::DeregisterMr { mr }), Reply::Done);
}

#[test]
fn limits_of_windows_domains_and_groups_hold() {
    let limits = VnicLimits { mw_count_max: 2, xrcd_count_max: 1, ..VnicLimits::default() };
    let host = Host::with_limits(limits);
    let client = host.client("a");
    let alloc = Request::AllocMw { pd: client.pd, kind: WindowKind::Type2 };
    for _ in 0..2 {
        assert!(matches!(client.ask(&alloc), Reply::Mw { .. }));
    }
    assert_eq!(client.refused(&alloc), VerbsError::NoMemory);
    let open = Request::OpenXrcd { context: client.context, file: None, flags: freeflow_verbs::XrcdOpenFlags::CREATE };
    assert!(matches!(client.ask(&open), Reply::Xrcd { .. }));
    assert_eq!(client.refused(&open), VerbsError::NoMemory);
    let device = &client.welcome.device;
    assert_eq!((device.mw_count_max, device.multicast_group_count_max), (2, limits.multicast_group_count_max));
    assert_eq!(device.device_memory_bytes_max, limits.device_memory_bytes_max);
    let status = host.status();
    assert_eq!((status.pd_count, status.mw_count, status.xrcd_count), (1, 2, 1));
    drop(client);
    let status = until("no session", || Some(host.status()).filter(|status| status.session_count == 0));
    assert_eq!((status.pd_count, status.mw_count, status.xrcd_count), (0, 0, 0));
}
