//! The responder over packets, against a scripted peer: what each request does to memory and completions, and which
//! packets answer it. PSNs in the expectations count from the first one, which is near the wrap-around.
use crate::common::peer::*;
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::{Header, NakCode, Operation as Op, PacketPosition, Reth, psn_add};

use CompletionStatus as Status;

const MTUS: [PathMtu; 5] = [PathMtu::Mtu256, PathMtu::Mtu512, PathMtu::Mtu1024, PathMtu::Mtu2048, PathMtu::Mtu4096];
const FLUSHED: Status = Status::WorkRequestFlushed;

fn ack(psn: u32, msn: u32) -> Says {
    Says::Ack { psn, msn }
}

fn nak(psn: u32, code: NakCode, msn: u32) -> Says {
    Says::Nak { psn, code, msn }
}

/// The answer to a FLUSH or an ATOMIC WRITE.
fn done(psn: u32) -> Says {
    Says::Read { psn, place: PacketPosition::Only, bytes: 0 }
}

/// The answers to a READ.
fn responses(first: u32, length: usize, mtu: usize) -> Vec<Says> {
    let count = length.div_ceil(mtu).max(1);
    let response = |at: usize| {
        let place = match (at == 0, at + 1 == count) {
            (true, true) => PacketPosition::Only,
            (true, false) => PacketPosition::First,
            (false, false) => PacketPosition::Middle,
            (false, true) => PacketPosition::Last,
        };
        Says::Read { psn: first + at as u32, place, bytes: (length - at * mtu).min(mtu) }
    };
    (0..count).map(response).collect()
}

fn lengths(mtu: usize) -> [usize; 8] {
    [0, 1, mtu - 1, mtu, mtu + 1, 3 * mtu, 3 * mtu + 5, 2 * mtu - 3]
}

// ---- each operation

#[test]
fn sends_of_all_lengths() {
    for mtu in MTUS {
        for put_off in [false, true] {
            let mut link = Link::with(QpType::Rc, mtu, false);
            let (end, mut expected) = (link.end, 0);
            link.net.world.always_put_off = put_off;
            for (at, length) in lengths(link.mtu).into_iter().enumerate() {
                // A RECV of three pieces, the second one empty.
                let sges = [end.sge(5, 100), end.sge(0, 0), end.sge(1000, 40_000)];
                link.net.post_receive(&end, at as u64, &sges);
                let bytes = pattern(length);
                link.send(&bytes);
                link.net.settle();
                expected += length.div_ceil(link.mtu).max(1) as u32;
                assert_eq!(link.says(), [ack(expected - 1, at as u32 + 1)], "{mtu:?} {length}");
                let done = link.net.only(&end);
                assert_eq!((done.work_request_id, done.status), (at as u64, Status::Success));
                assert_eq!((done.opcode, done.byte_count as usize), (CompletionOpcode::Receive, length));
                assert_eq!((done.flags, done.immediate), (CompletionFlags(0), 0));
                let first = length.min(100);
                assert_eq!(link.memory(5, first), bytes[..first]);
                assert_eq!(link.memory(1000, length - first), bytes[first..]);
            }
            assert_eq!(link.state(), QpState::ReadyToSend);
        }
    }
}

#[test]
fn writes_of_all_lengths_and_reads_of_the_same() {
    for mtu in MTUS {
        for put_off in [false, true] {
            let mut link = Link::with(QpType::Rc, mtu, false);
            link.net.world.always_put_off = put_off;
            let (mut psn, mut msn) = (0, 0);
            for length in lengths(link.mtu) {
                let count = length.div_ceil(link.mtu).max(1) as u32;
                let bytes = pattern(length);
                link.write(3, &bytes);
                link.net.settle();
                assert_eq!(link.says(), [ack(psn + count - 1, msn + 1)]);
                assert_eq!(link.memory(3, length), bytes);
                link.read(3, length);
                link.net.settle();
                let replies = link.replies();
                let says: Vec<u8> = replies.iter().flat_map(|(_, payload)| payload.clone()).collect();
                assert_eq!(says, bytes);
                assert!(replies.iter().all(|(header, _)| !header.opcode.has_aeth() || header.aeth.msn == msn + 2));
                link.read(3, length);
                link.net.settle();
                assert_eq!(link.says(), responses(psn + 2 * count, length, link.mtu));
                (psn, msn) = (psn + 3 * count, msn + 3);
            }
            assert!(link.completions().is_empty());
            let counters = link.net.engine.vnic_counters(link.end.vnic).unwrap();
            assert_eq!((counters.writes_received, counters.reads_received), (8, 16));
        }
    }
}

#[test]
fn immediate_data_and_solicited_events() {
    for (operation, opcode) in [
        (Op::SendImmediate, CompletionOpcode::Receive),
        (Op::WriteImmediate, CompletionOpcode::ReceiveRdmaWithImmediate),
    ] {
        for (length, solicited) in [(0, true), (100, false), (600, true)] {
            let mut link = Link::new();
            link.receive(9, 0, 1000);
            let reth = link.reth(5000, length);
            for (mut header, piece) in link.packets(operation, reth, &pattern(length)) {
                header.solicited = solicited && header.opcode.ends();
                link.push(header, &piece);
            }
            let done = link.completions()[0];
            assert_eq!((done.opcode, done.byte_count as usize, done.immediate), (opcode, length, 0x0101_0101));
            let flags = CompletionFlags::WITH_IMMEDIATE | if solicited { CompletionFlags::SOLICITED } else { 0 };
            assert_eq!(done.flags, CompletionFlags(flags));
            let place = if operation == Op::WriteImmediate { 5000 } else { 0 };
            assert_eq!(link.memory(place, length), pattern(length));
        }
    }
}

#[test]
fn atomics_flush_and_atomic_write() {
    for put_off in [false, true] {
        let mut link = Link::new();
        link.net.world.always_put_off = put_off;
        link.fill(64, &40u64.to_ne_bytes());
        link.push(link.fetch_add_header(64, 2), &[]);
        let mut swap = link.fetch_add_header(64, 7);
        swap.opcode = link.header(Op::CompareSwap, PacketPosition::Only).opcode;
        (swap.psn, swap.atomic.compare) = (link.psn, 42);
        link.push(swap, &[]);
        let reth = link.reth(64, 8);
        let flush = Header { flush: 1, reth, ..link.header(Op::Flush, PacketPosition::Only) };
        link.push(flush, &[]);
        let whole = Header { flush: 1 | 1 << 4, reth: Reth { address: 0, ..reth }, ..flush };
        link.push(Header { psn: link.psn, ..whole }, &[]);
        let reth = link.reth(72, 8);
        link.push(Header { reth, ..link.header(Op::AtomicWrite, PacketPosition::Only) }, b"abcdefgh");
        link.net.settle();
        let first = [Says::Atomic { psn: 0, msn: 1, original: 40 }, Says::Atomic { psn: 1, msn: 2, original: 42 }];
        let says = link.says();
        assert_eq!(says[..2], first);
        assert_eq!(says[2..], [done(2), done(3), done(4)]);
        assert_eq!(link.memory(64, 16), [&7u64.to_ne_bytes()[..], b"abcdefgh"].concat());
        let counters = link.net.engine.vnic_counters(link.end.vnic).unwrap();
        assert_eq!((counters.atomics_received, counters.writes_received), (2, 1));
    }
}

#[test]
fn shared_receives_and_their_limit() {
    let mut link = Link::with(QpType::Rc, PathMtu::Mtu256, true);
    let end = link.end;
    for id in 0..3 {
        link.receive(id, id * 1000, 1000);
    }
    let srq = end.srq.unwrap();
    link.net.engine.modify_srq(&mut link.net.world, end.session, srq, 2).unwrap();
    link.send(&pattern(600));
    assert_eq!(link.net.world.saw(AsyncEventKind::SrqLimitReached, EventTarget::Srq(srq)), 0);
    link.send(&pattern(10));
    assert_eq!(link.net.world.saw(AsyncEventKind::SrqLimitReached, EventTarget::Srq(srq)), 1);
    assert_eq!(link.statuses(), [(0, Status::Success), (1, Status::Success)]);
    assert_eq!(link.memory(0, 600), pattern(600));
    // ERROR: what is left in the SRQ stays there.
    link.push(link.header(Op::Send, PacketPosition::Middle), &pattern(256));
    assert_eq!(link.says(), [nak(4, NakCode::InvalidRequest, 2)]);
    assert!(link.completions().is_empty());
    assert_eq!(link.net.world.saw(AsyncEventKind::QpLastWqeReached, EventTarget::Qp(end.qp)), 1);
}

#[test]
fn xrc_requests_name_their_queue() {
    for put_off in [false, true] {
        let mut link = Link::with(QpType::XrcReceive, PathMtu::Mtu256, false);
        link.net.world.always_put_off = put_off;
        link.receive(1, 0, 1000);
        link.send(&pattern(700));
        link.write(2000, &pattern(300));
        link.read(2000, 300);
        link.push(link.fetch_add_header(4000, 5), &[]);
        link.net.settle();
        let mut expected = vec![];
        expected.extend(responses(5, 300, 256));
        expected.push(Says::Atomic { psn: 7, msn: 4, original: 0 });
        let says = link.says();
        assert!(says.ends_with(&expected), "{says:?}");
        assert_eq!(link.statuses(), [(1, Status::Success)]);
        assert_eq!((link.memory(0, 700), link.memory(2000, 300)), (pattern(700), pattern(300)));
        // Another number within a message, and one that does not exist.
        link.receive(2, 0, 1000);
        link.push(link.header(Op::Send, PacketPosition::First), &pattern(256));
        link.srqn ^= 1;
        link.push(link.header(Op::Send, PacketPosition::Last), &pattern(2));
        link.net.settle();
        assert_eq!(link.says().last(), Some(&nak(9, NakCode::InvalidRequest, 4)));
        assert_eq!(link.statuses(), [(2, FLUSHED)]);
    }
}

#[test]
fn an_xrc_queue_that_goes_under_a_message_and_under_a_read() {
    let mut link = Link::with(QpType::XrcReceive, PathMtu::Mtu256, false);
    let end = link.end;
    link.receive(1, 0, 1000);
    link.net.world.transmit_room = Some(0);
    link.read(0, 300);
    link.push(link.header(Op::Send, PacketPosition::First), &pattern(256));
    link.net.engine.destroy_srq(end.session, end.srq.unwrap()).unwrap();
    link.push(link.header(Op::Send, PacketPosition::Middle), &pattern(256));
    link.net.world.transmit_room = None;
    let mut expected = responses(0, 300, 256);
    expected.push(nak(3, NakCode::InvalidRequest, 1));
    assert_eq!(link.says(), expected);
    assert_eq!(link.state(), QpState::Error);
    assert!(link.completions().is_empty(), "nobody asks for its RECVs any more");
}

#[test]
fn communication_is_established_by_the_first_packet() {
    let mut link = Link::new();
    let (end, reported) = (link.end, |link: &Link, end: &End| {
        link.net.world.saw(AsyncEventKind::CommunicationEstablished, EventTarget::Qp(end.qp))
    });
    link.write(0, b"x");
    assert_eq!(reported(&link, &end), 0, "not in RTS");
    let mut link = Link::new();
    link.net.to(&end, QpState::Reset).unwrap();
    let rts = std::mem::replace(&mut link.psn, 0);
    link.net.init(&end);
    let attributes = QpAttributes {
        state: QpState::ReadyToReceive,
        address: address(peer_gid()),
        dest_qpn: PEER_QPN,
        rq_psn: FIRST_PSN,
        ..Default::default()
    };
    use QpAttributeMask as M;
    let path = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
    link.net.modify(&end, &attributes, M::STATE | path).unwrap();
    link.psn = rts;
    link.write(0, b"x");
    link.write(0, b"y");
    assert_eq!(reported(&link, &end), 1);
    assert_eq!(link.says(), [ack(1, 2)], "a QP in RTR answers");
}

// ---- refusals

/// Each gets a NAK with its PSN; the QP is in ERROR, its RECVs are flushed, and nothing is said any more.
#[test]
fn refused_requests() {
    type Script = fn(&mut Link);
    use NakCode::{InvalidRequest, RemoteAccess};
    macro_rules! part {
        ($operation:ident, $place:ident, $announced:expr, $bytes:expr) => {
            |link: &mut Link| {
                let reth = link.reth(0, $announced);
                link.push(Header { reth, ..link.header(Op::$operation, PacketPosition::$place) }, &pattern($bytes));
            }
        };
    }
    let cases: &[(&str, NakCode, Script)] = &[
        ("a MIDDLE without FIRST", InvalidRequest, part!(Send, Middle, 0, 256)),
        ("a LAST without FIRST", InvalidRequest, part!(WriteImmediate, Last, 0, 2)),
        ("a short FIRST", InvalidRequest, part!(Send, First, 0, 255)),
        ("a long ONLY", InvalidRequest, part!(Send, Only, 0, 257)),
        ("a WRITE that announces more", InvalidRequest, part!(Write, Only, 9, 8)),
        ("a WRITE that announces less", InvalidRequest, part!(Write, Only, 7, 8)),
        ("a WRITE that could end here", InvalidRequest, part!(Write, First, 256, 256)),
        ("a WRITE beyond 2^31", InvalidRequest, part!(Write, First, (1 << 31) + 1, 256)),
        ("a WRITE beyond its region", RemoteAccess, part!(Write, First, MEMORY_BYTES + 1, 256)),
        ("a READ beyond 2^31", InvalidRequest, |link| link.read(0, (1 << 31) + 1)),
        ("a READ beyond its region", RemoteAccess, |link| link.read(1, MEMORY_BYTES)),
        ("a wrong key", RemoteAccess, |link| {
            let mut header = link.read_header(0, 1);
            header.reth.rkey ^= 1;
            link.push(header, &[]);
        }),
        ("a misaligned atomic", InvalidRequest, |link| link.push(link.fetch_add_header(4, 1), &[])),
        ("an ATOMIC WRITE of four bytes", InvalidRequest, part!(AtomicWrite, Only, 4, 4)),
        ("an ATOMIC WRITE that announces more", InvalidRequest, part!(AtomicWrite, Only, 9, 8)),
        ("a FLUSH of no kind", InvalidRequest, part!(Flush, Only, 8, 0)),
        ("a FLUSH to persistence", InvalidRequest, |link| {
            let reth = link.reth(0, 8);
            link.push(Header { flush: 2, reth, ..link.header(Op::Flush, PacketPosition::Only) }, &[]);
        }),
        ("a SEND that is too long", InvalidRequest, |link| link.send(&pattern(200))),
    ];
    for (name, code, script) in cases {
        let mut link = Link::new();
        link.write(1000, b"before");
        // Of 300 bytes: for the last case only is it too short.
        link.receive(1, 0, 100);
        link.receive(2, 0, 100);
        script(&mut link);
        assert_eq!(link.says(), [nak(1, *code, 1)], "{name}");
        assert_eq!(link.state(), QpState::Error, "{name}");
        let first = if name.starts_with("a SEND") { Status::LocalLengthError } else { FLUSHED };
        assert_eq!(link.statuses(), [(1, first), (2, FLUSHED)], "{name}");
        link.write(1000, b"after");
        assert!(link.says().is_empty(), "{name}");
        assert_eq!(link.memory(1000, 6), b"before", "{name}");
        assert_eq!(link.net.engine.drops().wrong_state, 1);
    }
}

#[test]
fn what_interrupts_a_message() {
    let within = |first: Op, next: Op, place: PacketPosition| {
        let mut link = Link::new();
        link.receive(1, 0, 4000);
        let reth = link.reth(0, 600);
        link.push(Header { reth, ..link.header(first, PacketPosition::First) }, &pattern(256));
        let header = Header { reth, flush: 1, ..link.header(next, place) };
        let bytes = if header.opcode.has_payload() { 8 } else { 0 };
        link.push(header, &pattern(bytes));
        assert_eq!(link.says(), [nak(1, NakCode::InvalidRequest, 0)], "{first:?} {next:?}");
        assert_eq!(link.statuses(), [(1, FLUSHED)]);
    };
    for (first, other) in [(Op::Send, Op::Write), (Op::Write, Op::Send)] {
        for next in [first, other, Op::ReadRequest, Op::FetchAdd, Op::CompareSwap, Op::Flush, Op::AtomicWrite] {
            within(first, next, PacketPosition::Only);
        }
        within(first, other, PacketPosition::Last);
    }
}

#[test]
fn a_qp_without_the_right() {
    use QpAttributeMask as M;
    let scripts: [fn(&mut Link); 4] = [
        |link| link.write(0, b"x"),
        |link| link.read(0, 1),
        |link| link.push(link.fetch_add_header(0, 1), &[]),
        |link| {
            let reth = link.reth(0, 8);
            link.push(Header { flush: 1, reth, ..link.header(Op::Flush, PacketPosition::Only) }, &[]);
        },
    ];
    for script in scripts {
        let mut link = Link::new();
        let end = link.end;
        let none = QpAttributes { state: QpState::ReadyToSend, ..Default::default() };
        link.net.modify(&end, &none, M::STATE | M::ACCESS_FLAGS).unwrap();
        script(&mut link);
        assert_eq!(link.says(), [nak(0, NakCode::InvalidRequest, 0)]);
        assert_eq!(link.net.world.saw(AsyncEventKind::QpRequestError, EventTarget::Qp(end.qp)), 1);
    }
}

#[test]
fn a_send_that_outgrows_its_receive_on_the_way() {
    for put_off in [false, true] {
        let mut link = Link::new();
        link.net.world.always_put_off = put_off;
        link.receive(1, 0, 300);
        link.send(&pattern(700));
        link.net.settle();
        assert_eq!(link.says(), [nak(1, NakCode::InvalidRequest, 0)]);
        assert_eq!(link.statuses(), [(1, Status::LocalLengthError)]);
        assert_eq!(link.memory(256, 44), [0; 44], "nothing of the packet that does not fit");
    }
}

#[test]
fn a_receive_with_a_wrong_key() {
    let mut link = Link::new();
    let end = link.end;
    let wrong = Sge { lkey: end.key ^ 1, ..end.sge(256, 1000) };
    link.net.post_receive(&end, 1, &[end.sge(0, 256), wrong]);
    link.send(&pattern(300));
    assert_eq!(link.says(), [nak(1, NakCode::RemoteOperational, 0)]);
    assert_eq!(link.statuses(), [(1, Status::LocalProtectionError)]);
}

#[test]
fn an_invalidation_of_what_is_not_bound() {
    let mut link = Link::new();
    link.receive(1, 0, 100);
    link.receive(2, 0, 100);
    let mut header = link.header(Op::SendInvalidate, PacketPosition::Only);
    header.invalidate = link.end.key;
    header.ack_request = false;
    link.push(header, b"hello");
    assert_eq!(link.says(), [ack(0, 1)], "its bytes have arrived (class J)");
    assert_eq!(link.statuses(), [(1, Status::RemoteInvalidRequest), (2, FLUSHED)]);
    assert_eq!(link.state(), QpState::Error);
}

#[test]
fn an_invalidation_of_what_is_bound() {
    let mut link = Link::new();
    let end = link.end;
    let access = ALL_ACCESS.union(Access::MW_BIND);
    let keys = link.net.engine.register_mr(end.session, end.pd, MEMORY_BASE, 4096, MEMORY_BASE, access).unwrap();
    let (_, key) = link.net.engine.alloc_mw(end.session, end.pd, WindowKind::Type2).unwrap();
    let bind = SendRequest {
        rkey: key,
        immediate: keys.lkey,
        remote_address: MEMORY_BASE,
        compare_add: 100,
        swap: u64::from(Access::REMOTE_WRITE.0),
        ..request(1, SendOpcode::BindWindow, &[])
    };
    link.net.post_send(&end, bind);
    link.net.work();
    assert_eq!(link.statuses(), [(1, Status::Success)]);
    let reth = Reth { rkey: key, ..link.reth(0, 5) };
    link.message(Op::Write, reth, b"shown");
    link.receive(2, 200, 100);
    let invalidate = Header { invalidate: key, ..link.header(Op::SendInvalidate, PacketPosition::Only) };
    link.push(invalidate, b"bye");
    let done = link.completions()[0];
    assert_eq!((done.status, done.immediate), (Status::Success, key));
    assert_eq!(done.flags, CompletionFlags(CompletionFlags::WITH_INVALIDATE));
    link.message(Op::Write, reth, b"shown");
    assert_eq!(link.says().last(), Some(&nak(2, NakCode::RemoteAccess, 2)));
}

#[test]
fn a_full_completion_queue() {
    let mut link = Link::new();
    link.receive(1, 0, 100);
    link.net.world.cq_room.insert(link.end.cq, 0);
    link.send(b"hello");
    assert_eq!(link.says(), [ack(0, 1)], "the message has arrived");
    assert_eq!(link.state(), QpState::Error);
    link.send(b"hello");
    assert!(link.says().is_empty());
}

#[test]
fn more_reads_than_allowed() {
    let mut link = Link::new();
    link.net.world.transmit_room = Some(0);
    for _ in 0..3 {
        link.read(0, 300);
    }
    link.push(link.fetch_add_header(0, 1), &[]);
    // Duplicates are no more requests.
    link.deliver(Header { psn: FIRST_PSN, ..link.read_header(0, 300) }, &[]);
    let reth = link.reth(0, 8);
    link.push(Header { flush: 1, reth, ..link.header(Op::Flush, PacketPosition::Only) }, &[]);
    link.read(0, 1);
    assert_eq!(link.state(), QpState::Error);
    assert!(link.net.world.sent.is_empty(), "the fabric is full");
    link.net.world.transmit_room = None;
    let mut expected: Vec<Says> = (0..3).flat_map(|at| responses(2 * at, 300, 256)).collect();
    expected.push(Says::Atomic { psn: 6, msn: 5, original: 0 });
    expected.push(done(7));
    expected.push(nak(8, NakCode::InvalidRequest, 5));
    assert_eq!(link.says(), expected, "what was owed before comes first");
}

// ---- faults

#[test]
fn memory_that_is_not_there() {
    type Script = fn(&mut Link);
    let cases: [(Script, Status); 5] = [
        (|link| link.send(&pattern(10)), Status::LocalProtectionError),
        (|link| link.write(0, &pattern(10)), FLUSHED),
        (|link| link.read(0, 10), FLUSHED),
        (|link| link.push(link.fetch_add_header(0, 1), &[]), FLUSHED),
        (
            |link| {
                let reth = link.reth(0, 8);
                link.push(Header { reth, ..link.header(Op::AtomicWrite, PacketPosition::Only) }, &pattern(8));
            },
            FLUSHED,
        ),
    ];
    for (script, status) in cases {
        for late in [false, true] {
            let mut link = Link::new();
            link.receive(1, 0, 100);
            link.net.world.always_put_off = late;
            if !late {
                link.net.world.gone.insert(link.end.session);
            }
            script(&mut link);
            if late {
                let (token, job) = link.net.world.pending.pop().unwrap();
                let (world, now) = (&mut link.net.world, link.net.now);
                match job {
                    Job::Atomic { .. } => link.net.engine.handle_atomic_done(world, now, token, Err(())),
                    Job::Transmit { .. } => link.net.engine.handle_copied(world, now, token, Err(MemorySide::Source)),
                    Job::Copy { .. } => link.net.engine.handle_copied(world, now, token, Err(MemorySide::Destination)),
                }
            }
            let says = link.says();
            let code = NakCode::RemoteOperational;
            assert!(matches!(says[..], [Says::Nak { psn: 0, code: found, .. }] if found == code), "{says:?}");
            assert_eq!(link.statuses(), [(1, status)]);
            assert_eq!(link.state(), QpState::Error);
        }
    }
}

#[test]
fn a_key_that_becomes_invalid_under_a_write() {
    let mut link = Link::new();
    let end = link.end;
    let keys = link.net.engine.register_mr(end.session, end.pd, MEMORY_BASE, 4096, MEMORY_BASE, ALL_ACCESS).unwrap();
    let reth = Reth { rkey: keys.rkey, ..link.reth(0, 768) };
    let packets = link.packets(Op::Write, reth, &[1; 768]);
    link.push(packets[0].0, &packets[0].1);
    link.net.engine.deregister_mr(end.session, keys.mr).unwrap();
    link.push(packets[1].0, &packets[1].1);
    assert_eq!(link.says(), [nak(1, NakCode::RemoteAccess, 0)]);
    assert_eq!(link.memory(255, 2), [1, 0]);
}

#[test]
fn a_key_that_becomes_invalid_under_a_read() {
    let mut link = Link::new();
    let end = link.end;
    let length = 200 << 10;
    let keys = link.net.engine.register_mr(end.session, end.pd, MEMORY_BASE, 1 << 20, MEMORY_BASE, ALL_ACCESS).unwrap();
    let reth = Reth { rkey: keys.rkey, ..link.reth(0, length) };
    link.deliver(Header { reth, ..link.read_header(0, 0) }, &[]);
    let sent = link.net.world.sent.len() as u32;
    assert!(sent > 0 && (sent as usize) < length / link.mtu, "a part goes out at once");
    link.psn = psn_add(link.psn, (length / link.mtu) as u32);
    link.write(300 << 10, b"behind");
    link.net.engine.deregister_mr(end.session, keys.mr).unwrap();
    let says = link.says();
    assert_eq!(says.len() as u32, sent + 1);
    assert_eq!(says[sent as usize], nak(sent, NakCode::RemoteAccess, 2), "in the place of the next packet");
    assert_eq!(link.net.world.saw(AsyncEventKind::QpAccessError, EventTarget::Qp(end.qp)), 1);
}

#[test]
fn invalid_while_a_burst_is_being_fetched() {
    let mut link = Link::new();
    link.net.world.always_put_off = true;
    link.read(0, 100_000);
    let end = link.end;
    assert_eq!(link.net.engine.deregister_mr(end.session, end.mr), Err(Refusal::InFlight));
    link.net.settle();
    link.net.engine.deregister_mr(end.session, end.mr).unwrap();
    let says = link.says();
    let (last, before) = says.split_last().unwrap();
    assert_eq!(*last, nak(before.len() as u32, NakCode::RemoteAccess, 1));
    assert!(!before.is_empty(), "the burst that was under way");
}
