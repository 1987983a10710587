//! ATOMIC_WRITE and FLUSH (IBTA annex A19): what they do, need, and fail with.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

use CompletionStatus as Status;
use SendOpcode as Op;

const GLOBAL: u64 = 1;
const PERSISTENT: u64 = 2;
const REGION: u64 = 1 << 8;
const ALL: Access = Access(ALL_ACCESS.0 | Access::FLUSH_GLOBAL.0);

/// A pair; `b` has a region of 4096 bytes, and both QPs' rights are given.
struct Bench {
    net: Net,
    a: End,
    b: End,
    rkey: u32,
}

impl Bench {
    fn new(of_region: Access, of_qp: Access) -> Self {
        Self::on(QpType::Rc, of_region, of_qp)
    }

    fn on(service: QpType, of_region: Access, of_qp: Access) -> Self {
        let mut net = Net::new();
        let (a, b) = net.pair(service);
        let rkey = net.engine.register_mr(b.session, b.pd, MEMORY_BASE, 4096, MEMORY_BASE, of_region).unwrap().rkey;
        let attributes = QpAttributes { access: of_qp, ..Default::default() };
        net.modify(&b, &attributes, QpAttributeMask::ACCESS_FLAGS).unwrap();
        Self { net, a, b, rkey }
    }

    fn flush(&self, address: u64, length: u64, kind: u64) -> SendRequest {
        let named = SendRequest { remote_address: address, rkey: self.rkey, ..request(1, Op::Flush, &[]) };
        SendRequest { compare_add: length, swap: kind, ..named }
    }

    fn write(&self, offset: u64) -> SendRequest {
        let sges = [self.a.sge(0, 8)];
        SendRequest { rkey: self.rkey, ..remote(2, Op::AtomicWrite, &sges, &self.b, offset) }
    }

    fn run(&mut self, request: SendRequest) -> Completion {
        self.net.post_send(&self.a, request);
        self.net.settle();
        self.net.only(&self.a)
    }

    fn status(&mut self, request: SendRequest) -> Status {
        self.run(request).status
    }
}

#[test]
fn an_atomic_write_is_one_copy_of_eight_bytes() {
    let mut bench = Bench::new(ALL, ALL);
    bench.net.world.bytes(bench.a.session, MEMORY_BASE, 8).copy_from_slice(b"at once!");
    let before = bench.net.world.copies;
    let done = bench.run(bench.write(16));
    assert_eq!((done.status, done.opcode, done.byte_count), (Status::Success, CompletionOpcode::AtomicWrite, 0));
    assert_eq!(bench.net.world.bytes(bench.b.session, MEMORY_BASE + 16, 8), b"at once!");
    assert_eq!(bench.net.world.copies, before + 1);
    let mut inlined = SendRequest { sge_count: 0, inline_length: 8, ..bench.write(24) };
    inlined.flags.0 |= SendFlags::INLINE;
    inlined.inline_data[..8].copy_from_slice(b"inlined!");
    assert_eq!(bench.status(inlined), Status::Success);
    assert_eq!(bench.net.world.bytes(bench.b.session, MEMORY_BASE + 24, 8), b"inlined!");
}

#[test]
fn an_atomic_write_needs_the_right_to_write() {
    let no_write = Access(ALL.0 & !Access::REMOTE_WRITE.0);
    let mut bench = Bench::new(ALL, no_write);
    assert_eq!(bench.status(bench.write(0)), Status::RemoteInvalidRequest);
    let mut bench = Bench::new(no_write, ALL);
    assert_eq!(bench.status(bench.write(0)), Status::RemoteAccessError);
    let mut bench = Bench::new(ALL, ALL);
    assert_eq!(bench.status(bench.write(4096)), Status::RemoteAccessError);
}

#[test]
fn an_atomic_write_is_aligned_and_eight_bytes_long() {
    let mut bench = Bench::new(ALL, ALL);
    let done = bench.run(bench.write(4));
    assert_eq!((done.status, done.vendor_error), (Status::RemoteInvalidRequest, Syndrome::RemoteMisaligned as u8));
    // Aligned as the request names it, not as the process sees it.
    let mut bench = Bench::new(ALL, ALL);
    let b = bench.b;
    bench.rkey = bench.net.engine.register_mr(b.session, b.pd, MEMORY_BASE + 4, 64, MEMORY_BASE, ALL).unwrap().rkey;
    assert_eq!(bench.run(bench.write(0)).vendor_error, Syndrome::RemoteMisaligned as u8);
    for length in [0, 7, 9] {
        let mut bench = Bench::new(ALL, ALL);
        let mut short = bench.write(0);
        short.sges[0].length = length;
        assert_eq!(bench.status(short), Status::LocalLengthError);
    }
}

#[test]
fn an_atomic_write_takes_a_place_among_reads_and_atomics() {
    use QpAttributeMask as M;
    let mut bench = Bench::new(ALL, ALL);
    let a = bench.a;
    bench.net.to(&a, QpState::SqDrain).unwrap();
    bench.net.modify(&a, &QpAttributes::default(), M::MAX_QP_RD_ATOMIC).unwrap();
    bench.net.to(&a, QpState::ReadyToSend).unwrap();
    let done = bench.run(bench.write(0));
    assert_eq!((done.status, done.vendor_error), (Status::LocalQpOperationError, Syndrome::NoReadDepth as u8));
    for flush in [false, true] {
        let mut bench = Bench::new(ALL, ALL);
        let b = bench.b;
        bench.net.to(&b, QpState::SqDrain).unwrap();
        bench.net.modify(&b, &QpAttributes::default(), M::MAX_DEST_RD_ATOMIC).unwrap();
        let request = if flush { bench.flush(MEMORY_BASE, 8, GLOBAL) } else { bench.write(0) };
        let done = bench.run(request);
        assert_eq!((done.status, done.vendor_error), (Status::RemoteInvalidRequest, Syndrome::RemoteNoReadDepth as u8));
    }
}

#[test]
fn a_flush_checks_and_moves_nothing() {
    let mut bench = Bench::new(ALL, ALL);
    let before = bench.net.world.copies;
    let done = bench.run(bench.flush(MEMORY_BASE + 4095, 1, GLOBAL));
    assert_eq!((done.status, done.opcode, done.byte_count), (Status::Success, CompletionOpcode::Flush, 0));
    assert_eq!(bench.net.world.copies, before);
    // Of the region: address and length say nothing.
    assert_eq!(bench.status(bench.flush(0, u64::from(u32::MAX), GLOBAL | REGION)), Status::Success);
    assert_eq!(bench.status(bench.flush(MEMORY_BASE, 0, GLOBAL)), Status::Success);
}

#[test]
fn a_flush_needs_rights_and_a_range() {
    let no_flush = ALL_ACCESS;
    for kind in [GLOBAL, GLOBAL | REGION] {
        let mut bench = Bench::new(ALL, no_flush);
        assert_eq!(bench.status(bench.flush(MEMORY_BASE, 8, kind)), Status::RemoteInvalidRequest);
        assert_eq!(bench.net.state(&bench.b), QpState::Error);
        let mut bench = Bench::new(no_flush, ALL);
        assert_eq!(bench.status(bench.flush(MEMORY_BASE, 8, kind)), Status::RemoteAccessError);
        for wrong in [1, 0x100] {
            let mut bench = Bench::new(ALL, ALL);
            let flush = SendRequest { rkey: bench.rkey ^ wrong, ..bench.flush(MEMORY_BASE, 0, kind) };
            assert_eq!(bench.status(flush), Status::RemoteAccessError, "also without a range");
        }
    }
    for (address, length) in [(MEMORY_BASE + 4095, 2), (MEMORY_BASE - 1, 1), (MEMORY_BASE, 4097)] {
        let mut bench = Bench::new(ALL, ALL);
        assert_eq!(bench.status(bench.flush(address, length, GLOBAL)), Status::RemoteAccessError);
    }
}

#[test]
fn nothing_here_is_persistent() {
    for kind in [PERSISTENT, PERSISTENT | GLOBAL, PERSISTENT | REGION] {
        let mut bench = Bench::new(ALL, ALL);
        assert_eq!(bench.status(bench.flush(MEMORY_BASE, 8, kind)), Status::RemoteInvalidRequest);
        // A QP that would allow it meets no region that does.
        let mut bench = Bench::new(ALL, ALL.union(Access::FLUSH_PERSISTENT));
        assert_eq!(bench.status(bench.flush(MEMORY_BASE, 8, kind)), Status::RemoteAccessError);
    }
}

#[test]
fn a_flush_that_makes_no_sense() {
    for kind in [0, 4, GLOBAL | 2 << 8, REGION] {
        let mut bench = Bench::new(ALL, ALL);
        let done = bench.run(bench.flush(MEMORY_BASE, 8, kind));
        assert_eq!((done.status, done.vendor_error), (Status::LocalQpOperationError, Syndrome::WrongOperation as u8));
    }
    let mut bench = Bench::new(ALL, ALL);
    let mut inlined = bench.flush(MEMORY_BASE, 8, GLOBAL);
    inlined.flags.0 |= SendFlags::INLINE;
    assert_eq!(bench.status(inlined), Status::LocalQpOperationError);
    let mut bench = Bench::new(ALL, ALL);
    assert_eq!(bench.status(bench.flush(MEMORY_BASE, 1 << 32, GLOBAL)), Status::LocalLengthError);
}

#[test]
fn only_reliable_services_have_them() {
    for atomic in [false, true] {
        let mut bench = Bench::on(QpType::Uc, ALL, ALL);
        let request = if atomic { bench.write(0) } else { bench.flush(MEMORY_BASE, 8, GLOBAL) };
        let done = bench.run(request);
        assert_eq!((done.status, done.vendor_error), (Status::LocalQpOperationError, Syndrome::WrongOperation as u8));
        assert_eq!(bench.net.state(&bench.a), QpState::SqError);
    }
}

#[test]
fn a_window_can_allow_a_flush() {
    let rights = Access::LOCAL_WRITE.union(Access::MW_BIND);
    for (window, whole, expected) in [
        (Access::FLUSH_GLOBAL, false, Status::Success),
        (Access::FLUSH_GLOBAL, true, Status::Success),
        (Access::REMOTE_WRITE, false, Status::RemoteAccessError),
        (Access::REMOTE_WRITE, true, Status::RemoteAccessError),
    ] {
        let mut bench = Bench::new(rights, ALL);
        let b = bench.b;
        let (_, key) = bench.net.engine.alloc_mw(b.session, b.pd, WindowKind::Type2).unwrap();
        let bind = SendRequest { rkey: key, immediate: bench.rkey, ..request(3, Op::BindWindow, &[]) };
        let bind = SendRequest { remote_address: MEMORY_BASE, compare_add: 64, swap: u64::from(window.0), ..bind };
        bench.net.post_send(&b, bind);
        bench.net.settle();
        assert_eq!(bench.net.only(&b).status, Status::Success);
        bench.rkey = key;
        let kind = if whole { GLOBAL | REGION } else { GLOBAL };
        assert_eq!(bench.status(bench.flush(MEMORY_BASE, 64, kind)), expected);
    }
}
