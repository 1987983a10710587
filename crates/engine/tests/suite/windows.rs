//! Memory windows: what a binding opens, to whom, and for how long.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

use CompletionStatus as Status;
use SendOpcode as Op;
use VerbsError::{Busy, NoMemory, NotFound};

const REMOTE: Access = Access(0xe);
/// Where windows lie in the process, and where their region begins.
const PLACE: u64 = 4096;

/// A pair; `b` has a region with MW_BIND over its memory from `PLACE` on, and windows.
struct Bench {
    net: Net,
    a: End,
    b: End,
    mr: MrId,
    lkey: u32,
}

impl Bench {
    fn new(service: QpType) -> Self {
        Self::with_rights(service, Access::LOCAL_WRITE.union(Access::MW_BIND))
    }

    fn with_rights(service: QpType, access: Access) -> Self {
        let mut net = Net::new();
        let (a, b) = net.pair(service);
        let at = MEMORY_BASE + PLACE;
        let keys = net.engine.register_mr(b.session, b.pd, at, 4096, at, access).unwrap();
        Self { net, a, b, mr: keys.mr, lkey: keys.lkey }
    }

    fn window(&mut self, kind: WindowKind) -> (MwId, u32) {
        self.net.engine.alloc_mw(self.b.session, self.b.pd, kind).unwrap()
    }

    fn bind(&self, key: u32, offset: u64, length: u64, access: Access) -> SendRequest {
        let remote_address = MEMORY_BASE + PLACE + offset;
        SendRequest {
            rkey: key,
            immediate: self.lkey,
            remote_address,
            compare_add: length,
            swap: u64::from(access.0),
            ..request(50, Op::BindWindow, &[])
        }
    }

    /// `b` executes a request of its own; its status and syndrome.
    fn local(&mut self, request: SendRequest) -> (Status, u8) {
        self.net.post_send(&self.b, request);
        self.net.settle();
        let done = self.net.only(&self.b);
        (done.status, done.vendor_error)
    }

    /// Binds the first 64 bytes of the region.
    fn bound(&mut self, kind: WindowKind) -> (MwId, u32) {
        let (mw, key) = self.window(kind);
        assert_eq!(self.local(self.bind(key, 0, 64, REMOTE)), (Status::Success, 0));
        (mw, key)
    }

    fn invalidate(key: u32) -> SendRequest {
        SendRequest { immediate: key, ..request(51, Op::LocalInvalidate, &[]) }
    }

    /// `a` writes eight bytes through a key.
    fn write(&mut self, key: u32, address: u64) -> Status {
        let write =
            SendRequest { remote_address: address, rkey: key, ..request(1, Op::RdmaWrite, &[self.a.sge(0, 8)]) };
        self.net.post_send(&self.a, write);
        self.net.settle();
        self.net.only(&self.a).status
    }

    fn write_at(&mut self, key: u32, offset: u64) -> Status {
        self.write(key, MEMORY_BASE + PLACE + offset)
    }

    /// Both QPs afresh after an error.
    fn recover(&mut self) {
        let (a, b) = (self.a, self.b);
        for end in [&a, &b] {
            self.net.to(end, QpState::Reset).unwrap();
            self.net.world.sends.remove(&end.qp);
            self.net.polls(end);
        }
        self.net.connect(&a, &b);
        self.net.connect(&b, &a);
    }

    /// A second pair of QPs of the same ends.
    fn other_pair(&mut self) -> (End, End) {
        let (mut a, mut b) = (self.a, self.b);
        (a.qp, a.qpn) = self.net.qp(&a, QpType::Rc);
        (b.qp, b.qpn) = self.net.qp(&b, QpType::Rc);
        self.net.connect(&a, &b);
        self.net.connect(&b, &a);
        (a, b)
    }
}

/// The key with another low byte.
fn next(key: u32) -> u32 {
    (key & !0xff) | (key.wrapping_add(1) & 0xff)
}

#[test]
fn a_bound_window_opens_its_range_and_no_more() {
    for kind in [WindowKind::Type1, WindowKind::Type2] {
        let mut bench = Bench::new(QpType::Rc);
        let (a, b) = (bench.a, bench.b);
        bench.net.world.bytes(a.session, MEMORY_BASE, 8).copy_from_slice(b"through ");
        let (_, key) = bench.window(kind);
        assert_eq!(bench.write_at(key, 0), Status::RemoteAccessError, "unbound");
        bench.recover();
        let request = bench.bind(next(key), 8, 64, REMOTE);
        bench.net.post_send(&b, request);
        bench.net.settle();
        let bound = bench.net.only(&b);
        assert_eq!((bound.status, bound.opcode), (Status::Success, CompletionOpcode::BindMemoryWindow));
        assert_eq!(bench.write_at(next(key), 64), Status::Success, "its last bytes");
        assert_eq!(bench.net.world.bytes(b.session, MEMORY_BASE + PLACE + 64, 8), b"through ");
        for (offset, what) in [(0, "before"), (7, "partly before"), (65, "partly beyond"), (72, "beyond")] {
            assert_eq!(bench.write_at(next(key), offset), Status::RemoteAccessError, "{what}");
            bench.recover();
        }
        assert_eq!(bench.write_at(key, 8), Status::RemoteAccessError, "the key before the binding");
        bench.recover();
        assert_eq!(bench.write_at(next(key), 8), Status::Success, "recovery keeps bindings");
    }
}

#[test]
fn a_window_has_rights_of_its_own() {
    let operations = [
        (Op::RdmaWrite, Access::REMOTE_WRITE),
        (Op::RdmaRead, Access::REMOTE_READ),
        (Op::FetchAdd, Access::REMOTE_ATOMIC),
        (Op::AtomicWrite, Access::REMOTE_WRITE),
    ];
    for granted in [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC] {
        for (opcode, needed) in operations {
            let mut bench = Bench::new(QpType::Rc);
            let (_, key) = bench.window(WindowKind::Type2);
            assert_eq!(bench.local(bench.bind(key, 0, 64, granted)).0, Status::Success);
            let a = bench.a;
            let address = MEMORY_BASE + PLACE;
            let used = SendRequest { remote_address: address, rkey: key, ..request(1, opcode, &[a.sge(0, 8)]) };
            bench.net.post_send(&a, used);
            bench.net.settle();
            let expected = if granted == needed { Status::Success } else { Status::RemoteAccessError };
            assert_eq!(bench.net.only(&a).status, expected, "{opcode:?} with {granted:?}");
        }
    }
}

#[test]
fn a_window_is_no_local_key() {
    let mut bench = Bench::new(QpType::Rc);
    let (_, key) = bench.bound(WindowKind::Type2);
    let (a, b) = (bench.a, bench.b);
    let sge = Sge { address: MEMORY_BASE + PLACE, length: 8, lkey: key };
    assert_eq!(bench.local(remote(1, Op::RdmaWrite, &[sge], &a, 0)).0, Status::LocalProtectionError);
    bench.recover();
    bench.net.post_receive(&b, 2, &[sge]);
    bench.net.post_send(&a, request(1, Op::Send, &[a.sge(0, 8)]));
    bench.net.settle();
    assert_eq!(bench.net.statuses(&b), [(2, Status::LocalProtectionError)]);
}

#[test]
fn a_zero_based_window_begins_at_zero() {
    let mut bench = Bench::new(QpType::Rc);
    let b = bench.b;
    let (_, key) = bench.window(WindowKind::Type2);
    let access = REMOTE.union(Access::ZERO_BASED);
    assert_eq!(bench.local(bench.bind(key, 100, 16, access)).0, Status::Success);
    bench.net.world.bytes(bench.a.session, MEMORY_BASE, 8).copy_from_slice(b"from nil");
    assert_eq!(bench.write(key, 8), Status::Success);
    assert_eq!(bench.net.world.bytes(b.session, MEMORY_BASE + PLACE + 108, 8), b"from nil");
    assert_eq!(bench.write(key, 9), Status::RemoteAccessError);
    bench.recover();
    assert_eq!(bench.write_at(key, 100), Status::RemoteAccessError);
}

#[test]
fn type_1_is_bound_again_and_unbound_by_length_zero() {
    let mut bench = Bench::new(QpType::Rc);
    let b = bench.b;
    let (mw, first) = bench.bound(WindowKind::Type1);
    let second = next(first);
    assert_eq!(bench.local(bench.bind(second, 64, 64, REMOTE)).0, Status::Success);
    assert_eq!(bench.write_at(second, 64), Status::Success);
    assert_eq!(bench.write_at(second, 0), Status::RemoteAccessError, "moved");
    bench.recover();
    assert_eq!(bench.write_at(first, 64), Status::RemoteAccessError, "the old key");
    bench.recover();
    // A binding that fails leaves the earlier one.
    assert_eq!(bench.local(bench.bind(next(second), 4090, 64, REMOTE)).0, Status::MemoryWindowBindError);
    bench.recover();
    assert_eq!(bench.write_at(second, 64), Status::Success);
    let unbind = SendRequest { immediate: 0, ..bench.bind(next(second), 0, 0, Access(0)) };
    assert_eq!(bench.net.engine.deregister_mr(b.session, bench.mr), Err(Refusal::Error(Busy)));
    assert_eq!(bench.local(unbind).0, Status::Success);
    for key in [second, next(second)] {
        assert_eq!(bench.write_at(key, 64), Status::RemoteAccessError, "unbound");
        bench.recover();
    }
    assert_eq!(bench.net.engine.deregister_mr(b.session, bench.mr), Ok(()));
    assert_eq!(bench.net.engine.dealloc_mw(b.session, mw), Ok(()));
}

#[test]
fn type_1_is_open_to_every_qp_of_the_domain_and_type_2_to_one() {
    for (kind, expected) in [(WindowKind::Type1, Status::Success), (WindowKind::Type2, Status::RemoteAccessError)] {
        let mut bench = Bench::new(QpType::Rc);
        let (_, key) = bench.bound(kind);
        let (a, _) = bench.other_pair();
        let address = MEMORY_BASE + PLACE;
        let write = SendRequest { remote_address: address, rkey: key, ..request(1, Op::RdmaWrite, &[a.sge(0, 8)]) };
        bench.net.post_send(&a, write);
        bench.net.settle();
        assert_eq!(bench.net.only(&a).status, expected, "{kind:?}");
        bench.net.polls(&bench.b);
        assert_eq!(bench.write_at(key, 0), Status::Success, "the QP that bound it");
    }
}

#[test]
fn a_window_of_another_domain_is_not_opened() {
    let mut bench = Bench::new(QpType::Rc);
    let (mut a, mut b) = (bench.a, bench.b);
    let (_, key) = bench.bound(WindowKind::Type1);
    b.pd = bench.net.engine.alloc_pd(b.session, b.context).unwrap();
    (a.qp, a.qpn) = bench.net.qp(&a, QpType::Rc);
    (b.qp, b.qpn) = bench.net.qp(&b, QpType::Rc);
    bench.net.connect(&a, &b);
    bench.net.connect(&b, &a);
    let address = MEMORY_BASE + PLACE;
    let write = SendRequest { remote_address: address, rkey: key, ..request(1, Op::RdmaWrite, &[a.sge(0, 8)]) };
    bench.net.post_send(&a, write);
    bench.net.settle();
    assert_eq!(bench.net.only(&a).status, Status::RemoteAccessError);
}

#[test]
fn bindings_that_fail() {
    type Edit = fn(&mut Bench, &mut SendRequest);
    let cases: [(Syndrome, Edit); 15] = [
        (Syndrome::WindowUnknown, |_, request| request.rkey = request.rkey.wrapping_add(0x100)),
        (Syndrome::WindowUnknown, |_, request| request.rkey = 0),
        (Syndrome::WindowUnknown, |bench, request| request.rkey = bench.lkey),
        (Syndrome::WindowUnknown, |bench, request| {
            let pd = bench.net.engine.alloc_pd(bench.b.session, bench.b.context).unwrap();
            request.rkey = bench.net.engine.alloc_mw(bench.b.session, pd, WindowKind::Type2).unwrap().1;
        }),
        (Syndrome::WindowState, |bench, request| request.rkey = bench.bound(WindowKind::Type2).1),
        (Syndrome::WindowState, |_, request| request.compare_add = 0),
        (Syndrome::WindowRegion, |_, request| request.immediate ^= 1),
        (Syndrome::WindowRegion, |_, request| request.immediate = request.rkey),
        (Syndrome::WindowRegion, |bench, request| {
            let pd = bench.net.engine.alloc_pd(bench.b.session, bench.b.context).unwrap();
            let access = Access::LOCAL_WRITE.union(Access::MW_BIND);
            let at = MEMORY_BASE + PLACE;
            let keys = bench.net.engine.register_mr(bench.b.session, pd, at, 4096, at, access).unwrap();
            request.immediate = keys.lkey;
        }),
        (Syndrome::WindowRegion, |bench, request| request.immediate = bench.b.key),
        (Syndrome::WindowRights, |_, request| request.swap = u64::from(REMOTE.0 | Access::LOCAL_WRITE.0)),
        (Syndrome::WindowRights, |_, request| request.swap = 1 << 32),
        (Syndrome::WindowRange, |_, request| request.remote_address -= 1),
        (Syndrome::WindowRange, |_, request| request.compare_add = 4097),
        (Syndrome::WindowRange, |_, request| {
            (request.remote_address, request.compare_add) = (u64::MAX, u64::MAX);
        }),
    ];
    for (place, (syndrome, edit)) in cases.into_iter().enumerate() {
        let mut bench = Bench::new(QpType::Rc);
        let (_, key) = bench.window(WindowKind::Type2);
        let mut request = bench.bind(key, 0, 64, REMOTE);
        edit(&mut bench, &mut request);
        let found = bench.local(request);
        assert_eq!(found, (Status::MemoryWindowBindError, syndrome as u8), "{place}");
        assert_eq!(bench.net.state(&bench.b), QpState::Error);
        bench.recover();
        assert_eq!(bench.write_at(key, 0), Status::RemoteAccessError, "{place}: still unbound");
    }
}

#[test]
fn bindings_that_fail_for_the_regions_rights() {
    let lacking = [
        (Access::MW_BIND, Access::REMOTE_WRITE, Some(Syndrome::WindowRights)),
        (Access::MW_BIND, Access::REMOTE_ATOMIC, Some(Syndrome::WindowRights)),
        (Access::MW_BIND, Access::REMOTE_READ, None),
        (Access::LOCAL_WRITE, Access::REMOTE_READ, Some(Syndrome::WindowRegion)),
        (Access::MW_BIND.union(Access::ZERO_BASED), Access::REMOTE_READ, Some(Syndrome::WindowRegion)),
    ];
    for (region, window, fails) in lacking {
        let mut bench = Bench::with_rights(QpType::Rc, region);
        let (_, key) = bench.window(WindowKind::Type2);
        let expected = fails.map_or((Status::Success, 0), |why| (Status::MemoryWindowBindError, why as u8));
        assert_eq!(bench.local(bench.bind(key, 0, 64, window)), expected, "{region:?} {window:?}");
    }
    let mut bench = Bench::new(QpType::Rc);
    let (_, key) = bench.window(WindowKind::Type1);
    let found = bench.local(bench.bind(key, 0, 64, REMOTE.union(Access::ZERO_BASED)));
    assert_eq!(found, (Status::MemoryWindowBindError, Syndrome::WindowRights as u8), "type 1 is not zero-based");
}

#[test]
fn a_local_invalidation_frees_the_window() {
    let mut bench = Bench::new(QpType::Rc);
    let (_, key) = bench.bound(WindowKind::Type2);
    let b = bench.b;
    bench.net.post_send(&b, Bench::invalidate(key));
    bench.net.settle();
    let done = bench.net.only(&b);
    assert_eq!((done.status, done.opcode), (Status::Success, CompletionOpcode::LocalInvalidate));
    assert_eq!(bench.write_at(key, 0), Status::RemoteAccessError);
    bench.recover();
    assert_eq!(bench.local(bench.bind(next(key), 0, 64, REMOTE)).0, Status::Success);
    assert_eq!(bench.write_at(next(key), 0), Status::Success);
}

#[test]
fn local_invalidations_that_fail() {
    type Case = fn(&mut Bench) -> u32;
    let cases: [(&str, Case); 6] = [
        ("nobody's", |bench| bench.bound(WindowKind::Type2).1.wrapping_add(0x100)),
        ("another low byte", |bench| next(bench.bound(WindowKind::Type2).1)),
        ("a region's", |bench| bench.b.key),
        ("of type 1", |bench| bench.bound(WindowKind::Type1).1),
        ("unbound", |bench| bench.window(WindowKind::Type2).1),
        ("bound to another QP", |bench| {
            let key = bench.window(WindowKind::Type2).1;
            let (_, b) = bench.other_pair();
            let bind = bench.bind(key, 0, 64, REMOTE);
            bench.net.post_send(&b, bind);
            bench.net.settle();
            assert_eq!(bench.net.only(&b).status, Status::Success);
            key
        }),
    ];
    for (name, case) in cases {
        let mut bench = Bench::new(QpType::Rc);
        let key = case(&mut bench);
        let expected = (Status::LocalQpOperationError, Syndrome::InvalidateKey as u8);
        assert_eq!(bench.local(Bench::invalidate(key)), expected, "{name}");
        assert_eq!(bench.net.state(&bench.b), QpState::Error);
    }
}

#[test]
fn a_send_takes_the_binding_away() {
    let mut bench = Bench::new(QpType::Rc);
    let (_, key) = bench.bound(WindowKind::Type2);
    let (a, b) = (bench.a, bench.b);
    bench.net.post_receive(&b, 7, &[b.sge(0, 8)]);
    bench.net.post_send(&a, SendRequest { immediate: key, ..request(1, Op::SendWithInvalidate, &[a.sge(0, 8)]) });
    bench.net.settle();
    let (sent, received) = (bench.net.only(&a), bench.net.only(&b));
    assert_eq!((sent.status, sent.opcode), (Status::Success, CompletionOpcode::Send));
    assert_eq!(
        (received.status, received.opcode, received.byte_count),
        (Status::Success, CompletionOpcode::Receive, 8)
    );
    assert_eq!((received.flags.0, received.immediate), (CompletionFlags::WITH_INVALIDATE, key));
    assert_eq!(bench.write_at(key, 0), Status::RemoteAccessError);
    assert_eq!(bench.net.engine.deregister_mr(b.session, bench.mr), Ok(()));
}

#[test]
fn a_send_that_can_not_invalidate() {
    type Case = fn(&mut Bench) -> u32;
    let cases: [(&str, Case); 5] = [
        ("nobody's", |bench| bench.bound(WindowKind::Type2).1.wrapping_add(0x100)),
        ("another low byte", |bench| next(bench.bound(WindowKind::Type2).1)),
        ("a region's", |bench| bench.b.key),
        ("of type 1", |bench| bench.bound(WindowKind::Type1).1),
        ("unbound", |bench| bench.window(WindowKind::Type2).1),
    ];
    for (name, case) in cases {
        let mut bench = Bench::new(QpType::Rc);
        let key = case(&mut bench);
        let (a, b) = (bench.a, bench.b);
        bench.net.post_receive(&b, 7, &[b.sge(0, 8)]);
        bench.net.post_receive(&b, 8, &[b.sge(0, 8)]);
        bench.net.post_send(&a, SendRequest { immediate: key, ..request(1, Op::SendWithInvalidate, &[a.sge(0, 8)]) });
        bench.net.settle();
        assert_eq!(bench.net.only(&a).status, Status::Success, "{name}: the bytes arrived");
        let received = bench.net.polls(&b);
        let found = received.iter().map(|done| (done.work_request_id, done.status, done.vendor_error));
        let expected = [
            (7, Status::RemoteInvalidRequest, Syndrome::RemoteInvalidate as u8),
            (8, Status::WorkRequestFlushed, Syndrome::Flushed as u8),
        ];
        assert!(found.eq(expected), "{name}: {received:?}");
        assert_eq!(bench.net.state(&b), QpState::Error);
        assert_eq!(bench.net.world.saw(AsyncEventKind::QpAccessError, EventTarget::Qp(b.qp)), 1);
    }
}

#[test]
fn services_that_have_windows() {
    for (service, binds) in [(QpType::Rc, true), (QpType::Uc, true), (QpType::Ud, false)] {
        let mut bench = if service == QpType::Ud { Bench::new(QpType::Rc) } else { Bench::new(service) };
        let mut b = bench.b;
        if service == QpType::Ud {
            (b.qp, b.qpn) = bench.net.qp(&b, service);
            bench.net.connect(&b, &bench.a.clone());
        }
        bench.b = b;
        let (_, key) = bench.window(WindowKind::Type2);
        let wrong = (Status::LocalQpOperationError, Syndrome::WrongOperation as u8);
        let good = if binds { (Status::Success, 0) } else { wrong };
        assert_eq!(bench.local(bench.bind(key, 0, 64, REMOTE)), good, "{service:?} binds");
        if !binds {
            bench.net.to(&b, QpState::Reset).unwrap();
            bench.net.connect(&b, &bench.a.clone());
        }
        assert_eq!(bench.local(Bench::invalidate(key)), good, "{service:?} invalidates");
        if service != QpType::Rc {
            if !binds {
                bench.net.to(&b, QpState::Reset).unwrap();
                bench.net.connect(&b, &bench.a.clone());
            }
            assert_eq!(bench.local(request(1, Op::SendWithInvalidate, &[])), wrong, "{service:?} by SEND");
            assert_eq!(bench.net.state(&b), QpState::SqError);
        }
    }
}

#[test]
fn uc_drops_what_a_window_does_not_admit() {
    let mut bench = Bench::new(QpType::Uc);
    let (_, key) = bench.bound(WindowKind::Type1);
    bench.net.world.bytes(bench.a.session, MEMORY_BASE, 8).copy_from_slice(b"dropped?");
    assert_eq!(bench.write_at(key, 60), Status::Success);
    assert_eq!(bench.net.world.bytes(bench.b.session, MEMORY_BASE + PLACE + 60, 8), [0; 8]);
    assert_eq!(bench.write_at(key, 0), Status::Success);
    assert_eq!(bench.net.world.bytes(bench.b.session, MEMORY_BASE + PLACE, 8), b"dropped?");
}

#[test]
fn a_region_waits_for_its_windows() {
    let mut bench = Bench::new(QpType::Rc);
    let b = bench.b;
    let mut windows: Vec<_> = (0..3).map(|_| bench.bound(WindowKind::Type2)).collect();
    windows.push(bench.bound(WindowKind::Type1));
    let change = RegionChange { access: Some(Access::LOCAL_WRITE), ..Default::default() };
    while !windows.is_empty() {
        let engine = &mut bench.net.engine;
        assert_eq!(engine.deregister_mr(b.session, bench.mr), Err(Refusal::Error(Busy)));
        assert_eq!(engine.reregister_mr(b.session, bench.mr, None, &change), Err(Refusal::Error(Busy)));
        // From the middle of the list, then its ends.
        let (mw, key) = windows.remove(windows.len() / 2);
        assert_eq!(bench.write_at(key, 0), Status::Success, "a refusal changes nothing");
        assert_eq!(bench.net.engine.dealloc_mw(b.session, mw), Ok(()));
        assert_eq!(bench.write_at(key, 0), Status::RemoteAccessError, "gone");
        bench.recover();
    }
    assert_eq!(bench.net.engine.deregister_mr(b.session, bench.mr), Ok(()));
}

#[test]
fn bindings_end_with_their_qp() {
    let mut bench = Bench::new(QpType::Rc);
    let (_, b) = bench.other_pair();
    let keys = [bench.window(WindowKind::Type2).1, bench.window(WindowKind::Type2).1];
    for key in keys {
        let bind = bench.bind(key, 0, 64, REMOTE);
        bench.net.post_send(&b, bind);
    }
    bench.net.settle();
    assert!(bench.net.polls(&b).iter().all(|done| done.status == Status::Success));
    assert_eq!(bench.net.engine.deregister_mr(b.session, bench.mr), Err(Refusal::Error(Busy)));
    bench.net.engine.destroy_qp(&mut bench.net.world, bench.net.now, b.session, b.qp).unwrap();
    assert_eq!(bench.local(bench.bind(keys[0], 0, 64, REMOTE)).0, Status::Success, "free for another QP");
    assert_eq!(bench.local(Bench::invalidate(keys[0])).0, Status::Success);
    assert_eq!(bench.net.engine.deregister_mr(b.session, bench.mr), Ok(()));
}

/// A copy through the window is under way, and another request behind it.
fn under_way(kind: WindowKind) -> (Bench, MwId, u32) {
    let mut bench = Bench::new(QpType::Rc);
    let (mw, key) = bench.bound(kind);
    let a = bench.a;
    bench.net.world.always_put_off = true;
    let address = MEMORY_BASE + PLACE;
    for id in [1, 2] {
        let write = SendRequest { remote_address: address, rkey: key, ..request(id, Op::RdmaWrite, &[a.sge(0, 8)]) };
        bench.net.post_send(&a, write);
    }
    bench.net.work();
    assert_eq!(bench.net.world.pending.len(), 1);
    (bench, mw, key)
}

#[test]
fn an_invalidation_completes_after_the_last_copy() {
    let (mut bench, _, key) = under_way(WindowKind::Type2);
    let (a, b) = (bench.a, bench.b);
    bench.net.post_send(&b, Bench::invalidate(key));
    bench.net.post_send(&b, SendRequest { work_request_id: 60, ..bench.bind(next(key), 0, 64, REMOTE) });
    bench.net.work();
    assert!(bench.net.polls(&b).is_empty(), "a copy still writes through it");
    assert_eq!(bench.net.engine.deregister_mr(b.session, bench.mr), Err(Refusal::Error(Busy)));
    // The owner's turn comes first.
    bench.net.land(0);
    bench.net.engine.run(&mut bench.net.world, bench.net.now, b.qp, 1 << 20);
    assert_eq!(bench.net.statuses(&b), [(51, Status::Success), (60, Status::Success)]);
    bench.net.settle();
    assert_eq!(bench.net.statuses(&a), [(1, Status::Success), (2, Status::RemoteAccessError)]);
}

#[test]
fn an_invalidation_that_waits_is_forgotten_with_its_qp() {
    let (mut bench, _, key) = under_way(WindowKind::Type2);
    let b = bench.b;
    bench.net.post_send(&b, Bench::invalidate(key));
    bench.net.work();
    assert!(matches!(bench.net.to(&b, QpState::Error), Err(Refusal::InFlight)));
    bench.net.settle();
    assert_eq!(bench.net.statuses(&b), [(51, Status::WorkRequestFlushed)]);
    bench.recover();
    // It is free, and the next LOCAL_INV is judged by itself.
    assert_eq!(bench.local(Bench::invalidate(key)).0, Status::LocalQpOperationError);
    bench.recover();
    assert_eq!(bench.local(bench.bind(key, 0, 64, REMOTE)).0, Status::Success);
}

#[test]
fn a_second_binding_waits_for_copies_through_the_first() {
    let (mut bench, _, key) = under_way(WindowKind::Type1);
    let (a, b) = (bench.a, bench.b);
    let (_, other) = bench.other_pair();
    let bind = |bench: &Bench, key| bench.bind(key, 64, 64, REMOTE);
    bench.net.post_send(&b, bind(&bench, next(key)));
    bench.net.post_send(&other, SendRequest { work_request_id: 61, ..bind(&bench, next(next(key))) });
    bench.net.work();
    assert!(bench.net.polls(&b).is_empty());
    bench.net.land(0);
    bench.net.work();
    assert_eq!(bench.net.polls(&b).len(), 2, "both QPs' bindings, one after the other");
    bench.net.settle();
    assert_eq!(bench.net.statuses(&a), [(1, Status::Success), (2, Status::RemoteAccessError)]);
}

#[test]
fn deallocation_waits_for_copies() {
    for kind in [WindowKind::Type1, WindowKind::Type2] {
        let (mut bench, mw, _) = under_way(kind);
        let b = bench.b;
        assert_eq!(bench.net.engine.dealloc_mw(b.session, mw), Err(Refusal::InFlight));
        assert_eq!(bench.net.engine.dealloc_mw(b.session, mw), Err(Refusal::InFlight));
        bench.net.settle();
        assert_eq!(bench.net.statuses(&bench.a.clone()), [(1, Status::Success), (2, Status::RemoteAccessError)]);
        assert_eq!(bench.net.engine.dealloc_mw(b.session, mw), Ok(()));
        assert_eq!(bench.net.engine.deregister_mr(b.session, bench.mr), Ok(()));
    }
}

#[test]
fn windows_are_counted_and_owned() {
    let mut net = Net::new();
    let limits = VnicLimits { mw_count_max: 2, ..Default::default() };
    let vnic = net.engine.create_vnic(NetworkId(1), gid(100), limits).unwrap();
    let end = net.end_at(vnic, gid(100), QpType::Rc, false);
    let other = net.end(QpType::Rc);
    let engine = &mut net.engine;
    let pd = engine.alloc_pd(end.session, end.context).unwrap();
    let (first, first_key) = engine.alloc_mw(end.session, pd, WindowKind::Type1).unwrap();
    let (_, second_key) = engine.alloc_mw(end.session, pd, WindowKind::Type2).unwrap();
    assert_ne!(first_key >> 8, second_key >> 8);
    assert_eq!(engine.alloc_mw(end.session, pd, WindowKind::Type2), Err(NoMemory));
    assert_eq!(engine.vnic_usage(vnic).unwrap().mws, 2);
    assert_eq!(engine.dealloc_pd(end.session, pd), Err(Busy));
    assert_eq!(engine.alloc_mw(other.session, pd, WindowKind::Type1), Err(NotFound));
    assert_eq!(engine.dealloc_mw(other.session, first), Err(Refusal::Error(NotFound)));
    assert_eq!(engine.dealloc_mw(end.session, first), Ok(()));
    assert_eq!(engine.dealloc_mw(end.session, first), Err(Refusal::Error(NotFound)));
    assert_eq!(engine.vnic_usage(vnic).unwrap().mws, 1);
    engine.destroy_session(&mut net.world, net.now, end.session);
    assert_eq!(engine.vnic_usage(vnic), Some(Usage::default()));
}

#[test]
fn a_dead_process_takes_its_windows_along() {
    // With a copy through the window under way.
    let (mut bench, ..) = under_way(WindowKind::Type1);
    let (a, b) = (bench.a, bench.b);
    bench.net.die(b.session);
    assert_eq!(bench.net.engine.vnic_usage(b.vnic), Some(Usage::default()));
    bench.net.qps.retain(|qp| *qp == a.qp);
    bench.net.settle();
    while bench.net.expire() {}
    assert_eq!(bench.net.statuses(&a), [(1, Status::RetryExceeded), (2, Status::WorkRequestFlushed)]);
}
