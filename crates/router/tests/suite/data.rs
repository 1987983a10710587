//! Bytes between two processes (here: two sessions of this process), over shared memory and over the slow
//! path.
use crate::common::*;
use freeflow_protocol::library::{Reply, Request};
use freeflow_shm::SendDescriptor;
use freeflow_verbs::{
    Completion, CompletionFlags, CompletionOpcode, CompletionStatus, QpAttributeMask, QpAttributes, QpState, QpType,
    SendFlags, SendOpcode, SrqAttributes, VerbsError,
};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const WORDS: usize = 100_000;
const BYTES: u32 = WORDS as u32 * 8;

/// Each sleep ends by a completion: nothing else changes the count.
#[test]
fn completions_wake_a_poller_that_sleeps() {
    let mut pair = Pair::new();
    let (from, to) = (pair.a.memory(8, true), pair.b.memory(8, true));
    for round in 0..200 {
        let seen = pair.b.session.completed();
        pair.b.post_receive(&mut pair.b_qp, round, &[to.sge(0, 64)]);
        pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
        // A wake-up that comes late ends the next sleep early.
        let began = Instant::now();
        while pair.b.session.completed() == seen {
            pair.b.session.sleep_while(seen, 60_000_000_000);
        }
        assert!(began.elapsed() < Duration::from_secs(50), "slept to the end");
        assert!(pair.b_cq.ring.poll(&mut Default::default()), "notified of before it was there");
        pair.b_cq.ring.commit();
        pair.a_cq.wait();
    }
}

/// All four operations, from memory of one kind to memory of the other.
fn operations(from_shared: bool, to_shared: bool) {
    let pair = Pair::new();
    let from = pair.a.memory(WORDS, from_shared);
    let to = pair.b.memory(WORDS, to_shared);
    operations_between(pair, &from, &to, from_shared && to_shared);
}

fn operations_between(mut pair: Pair, from: &Memory, to: &Memory, all_shared: bool) {
    from.fill(WORDS, 3);
    pair.b.post_receive(&mut pair.b_qp, 11, &[to.sge(0, BYTES)]);
    pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[from.sge(0, BYTES)]));
    let received = pair.b_cq.wait();
    assert_eq!((received.status, received.opcode), (CompletionStatus::Success, CompletionOpcode::Receive));
    assert_eq!((received.work_request_id, received.byte_count, received.qp_cookie), (11, BYTES, pair.b_qp.cookie));
    assert!(to.is_filled(WORDS, 3));
    let sent = pair.a_cq.wait();
    assert_eq!(
        (sent.status, sent.opcode, sent.work_request_id),
        (CompletionStatus::Success, CompletionOpcode::Send, 7)
    );

    from.fill(WORDS, 5);
    let sges = [from.sge(0, 8), from.sge(8, BYTES - 16), from.sge(u64::from(BYTES) - 8, 8)];
    let write =
        SendDescriptor { remote_address: to.address, rkey: to.mr.rkey, ..request(SendOpcode::RdmaWrite, &sges) };
    pair.a.post_send(&mut pair.a_qp, &write);
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    assert!(to.is_filled(WORDS, 5));

    to.fill(WORDS, 9);
    let sges = [from.sge(0, BYTES)];
    let read = SendDescriptor { remote_address: to.address, rkey: to.mr.rkey, ..request(SendOpcode::RdmaRead, &sges) };
    pair.a.post_send(&mut pair.a_qp, &read);
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    assert!(from.is_filled(WORDS, 9));

    to.word(2).store(40, Relaxed);
    let sges = [from.sge(0, 8)];
    let at =
        SendDescriptor { remote_address: to.address + 16, rkey: to.mr.rkey, ..request(SendOpcode::FetchAdd, &sges) };
    pair.a.post_send(&mut pair.a_qp, &SendDescriptor { compare_add: 2, ..at });
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    assert_eq!((from.word(0).load(Relaxed), to.word(2).load(Relaxed)), (40, 42));
    let swap = SendDescriptor { opcode: SendOpcode::CompareSwap, compare_add: 42, swap: 1, ..at };
    pair.a.post_send(&mut pair.a_qp, &swap);
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    assert_eq!((from.word(0).load(Relaxed), to.word(2).load(Relaxed)), (42, 1));

    let counters = pair.host.status().counters;
    assert_eq!(counters.slow_path_bytes == 0, all_shared);
}

#[test]
fn shared_to_shared() {
    operations(true, true);
}

#[test]
fn shared_to_slow_path() {
    operations(true, false);
}

#[test]
fn slow_path_to_shared() {
    operations(false, true);
}

#[test]
fn slow_path_to_slow_path() {
    operations(false, false);
}

/// Whether the router of these tests can map files that processes share.
fn can_borrow() -> bool {
    let is_remote = std::env::var("FREEFLOW_TEST_ATTACHMENT").is_ok_and(|attachment| attachment == "remote");
    let may = rustix::process::geteuid().is_root() && freeflow_shm::refuses_missing_pages().is_ok();
    may && !is_remote
}

#[test]
fn memory_that_processes_share_themselves_is_copied_like_segments() {
    let pair = Pair::new();
    let (from, to) = (pair.a.borrowed_memory(WORDS), pair.b.borrowed_memory(WORDS));
    assert_eq!((from.is_some(), to.is_some()), (can_borrow(), can_borrow()));
    let (Some(from), Some(to)) = (from, to) else { return };
    let segment = from.segment().unwrap();
    for refused in [Request::ReopenSegment { segment }, Request::ImportSegment { context: pair.a.context, segment }] {
        assert_eq!(pair.a.ask(&refused), Reply::Failed(VerbsError::NoMemory), "it has no descriptor");
    }
    operations_between(pair, &from, &to, true);
}

#[test]
fn what_is_no_shared_memory_is_not_borrowed() {
    let pair = Pair::new();
    let own = pair.a.memory(WORDS, false);
    let private = own.address.next_multiple_of(4096);
    let ask = |address, length| pair.a.ask(&Request::BorrowSegment { address, length });
    for (address, length) in [(private, 4096), (4096, 4096), ((1 << 55) - 4096, 4096)] {
        assert_eq!(ask(address, length), Reply::Failed(VerbsError::NotSupported), "{address:#x}");
    }
    for (address, length) in [(private + 1, 4096), (private, 0), (private, 100), (0, 4096), (u64::MAX - 4095, 4096)] {
        assert_eq!(ask(address, length), Reply::Failed(VerbsError::InvalidArgument), "{address:#x}");
    }
    assert_eq!(ask(private, 1 << 55), Reply::Failed(VerbsError::NoMemory), "beyond the limit");
}

#[test]
fn inline_and_immediate() {
    let mut pair = Pair::new();
    let to = pair.b.memory(8, false);
    pair.b.post_receive(&mut pair.b_qp, 1, &[]);
    let write = SendDescriptor {
        immediate: 0x0102_0304,
        remote_address: to.address + 8,
        rkey: to.mr.rkey,
        inline: Some(&77_u64.to_ne_bytes()),
        ..request(SendOpcode::RdmaWriteWithImmediate, &[])
    };
    pair.a.post_send(&mut pair.a_qp, &write);
    let received = pair.b_cq.wait();
    assert_eq!(received.opcode, CompletionOpcode::ReceiveRdmaWithImmediate);
    assert_eq!((received.immediate, received.byte_count), (0x0102_0304, 8));
    assert_eq!(to.word(1).load(Relaxed), 77);
}

#[test]
fn a_sender_waits_for_a_receive() {
    let mut pair = Pair::new();
    let (from, to) = (pair.a.memory(8, true), pair.b.memory(8, true));
    from.fill(8, 1);
    pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
    until("an RNR", || (pair.host.status().counters.rnr_naks > 0).then_some(()));
    pair.b.post_receive(&mut pair.b_qp, 2, &[to.sge(0, 64)]);
    assert_eq!(pair.b_cq.wait().status, CompletionStatus::Success);
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    assert!(to.is_filled(8, 1));
}

#[test]
fn a_wrong_key_is_a_remote_access_error_and_raises_an_event() {
    let mut pair = Pair::new();
    let from = pair.a.memory(8, true);
    let sges = [from.sge(0, 64)];
    let write = SendDescriptor { remote_address: 4096, rkey: 1, ..request(SendOpcode::RdmaWrite, &sges) };
    pair.a.post_send(&mut pair.a_qp, &write);
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::RemoteAccessError);
    // IBV_EVENT_QP_ACCESS_ERR at the responder.
    assert_eq!(read_event(&pair.b.async_events), Some((3, pair.b_qp.cookie)));
}

#[test]
fn memory_that_is_not_mapped_is_an_error_completion() {
    let mut pair = Pair::new();
    let hole = pair.a.register(0x1000, 4096);
    let sge = freeflow_verbs::Sge { address: 0x1000, length: 64, lkey: hole.lkey };
    pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[sge]));
    let to = pair.b.memory(8, true);
    pair.b.post_receive(&mut pair.b_qp, 2, &[to.sge(0, 64)]);
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::LocalProtectionError);
}

#[test]
fn a_channel_is_notified_once_for_each_arming() {
    let host = Host::new();
    let mut client = host.client("a");
    let (channel, pipe) = client.create_channel();
    let mut cq = client.create_cq(16, Some(channel));
    let mut qp = client.create_qp(QpType::Rc, &cq);
    client.connect_rc(&qp, client.gid(), qp.qpn, 14);
    let memory = client.memory(16, true);
    cq.ring.arm(false);
    for _ in 0..2 {
        client.post_receive(&mut qp, 1, &[memory.sge(64, 64)]);
        client.post_send(&mut qp, &request(SendOpcode::Send, &[memory.sge(0, 64)]));
        for _ in 0..2 {
            assert_eq!(cq.wait().status, CompletionStatus::Success);
        }
    }
    assert_eq!(read_event(&pipe), Some((cq.cookie, 0)));
    cq.ring.arm(true);
    client.post_receive(&mut qp, 1, &[memory.sge(64, 64)]);
    let flags = SendFlags(SendFlags::SIGNALED | SendFlags::SOLICITED);
    client.post_send(&mut qp, &SendDescriptor { flags, ..request(SendOpcode::Send, &[memory.sge(0, 64)]) });
    assert_eq!(read_event(&pipe), Some((cq.cookie, 0)));
    assert_eq!(client.refused(&Request::DestroyChannel { channel }), VerbsError::Busy);
}

#[test]
fn a_resized_queue_goes_on() {
    let mut pair = Pair::new();
    let memory = pair.a.memory(16, true);
    let remote = pair.b.memory(16, true);
    let write = |pair: &mut Pair| {
        let sges = [memory.sge(0, 64)];
        let request = SendDescriptor {
            remote_address: remote.address,
            rkey: remote.mr.rkey,
            ..request(SendOpcode::RdmaWrite, &sges)
        };
        pair.a.post_send(&mut pair.a_qp, &request);
    };
    write(&mut pair);
    write(&mut pair);
    until("two completions", || (pair.host.status().counters.messages >= 2).then_some(()));
    let cq = pair.a_cq.handle;
    assert_eq!(pair.a.refused(&Request::ResizeCq { cq, cqe: 1 }), VerbsError::InvalidArgument);
    let (reply, fds) = pair.a.ask_fds(&Request::ResizeCq { cq, cqe: 4 });
    let Reply::Cq { cqe, segment_bytes, .. } = reply else { panic!("{reply:?}") };
    assert_eq!(cqe, 4);
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    let segment = freeflow_shm::Segment::map(std::os::fd::AsFd::as_fd(&fds[0]), segment_bytes as usize).unwrap();
    pair.a_cq.ring = freeflow_shm::CompletionConsumer::new(segment.into(), cqe);
    for _ in 0..6 {
        write(&mut pair);
        assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    }
}

#[test]
fn datagrams_carry_their_source() {
    let host = Host::new();
    let (mut a, mut b) = (host.client("a"), host.client("b"));
    let (mut a_cq, mut b_cq) = (a.create_cq(16, None), b.create_cq(16, None));
    let (mut a_qp, mut b_qp) = (a.create_qp(QpType::Ud, &a_cq), b.create_qp(QpType::Ud, &b_cq));
    for (client, qp) in [(&a, &a_qp), (&b, &b_qp)] {
        client.to_init(qp, true);
        for state in [QpState::ReadyToReceive, QpState::ReadyToSend] {
            let sq_psn = if state == QpState::ReadyToSend { QpAttributeMask::SQ_PSN } else { 0 };
            let attributes = QpAttributes { state, ..QpAttributes::default() };
            let reply = client.modify(qp, attributes, QpAttributeMask::STATE | sq_psn);
            assert_eq!(reply, Reply::QpModified { state });
        }
    }
    let (from, to) = (a.memory(8, false), b.memory(16, false));
    from.fill(8, 3);
    let reply = a.ask(&Request::CreateAh { pd: a.pd, attributes: address(b.gid()) });
    let Reply::AddressHandle { ah } = reply else { panic!("{reply:?}") };
    b.post_receive(&mut b_qp, 5, &[to.sge(0, 40), to.sge(40, 64)]);
    let sges = [from.sge(0, 64)];
    let send = SendDescriptor {
        remote_address: u64::from(ah) | u64::from(b_qp.qpn) << 32,
        rkey: QKEY,
        ..request(SendOpcode::Send, &sges)
    };
    a.post_send(&mut a_qp, &send);
    let received = b_cq.wait();
    assert_eq!((received.status, received.byte_count), (CompletionStatus::Success, 104));
    assert_eq!(received.source_qpn, a_qp.qpn);
    assert!(received.flags.contains(CompletionFlags::GRH));
    assert!((0..8).all(|at| to.word(5 + at).load(Relaxed) == 3 * (at as u64 + 1)));
    assert_eq!(a_cq.wait().status, CompletionStatus::Success);
}

#[test]
fn a_shared_receive_queue_serves_and_warns() {
    let host = Host::new();
    let (mut a, mut b) = (host.client("a"), host.client("b"));
    let (mut a_cq, mut b_cq) = (a.create_cq(16, None), b.create_cq(16, None));
    let cookie = b.next_cookie();
    let asked = SrqAttributes { max_wr: 8, max_sge: 1, limit: 0 };
    let (reply, fds) = b.ask_fds(&Request::CreateSrq { pd: b.pd, attributes: asked, cookie, xrc: None });
    let Reply::Srq { srq, number: 0, attributes, segment_bytes } = reply else { panic!("{reply:?}") };
    let segment = freeflow_shm::Segment::map(std::os::fd::AsFd::as_fd(&fds[0]), segment_bytes as usize).unwrap();
    let shape = freeflow_shm::layout::QueueShape::receive(attributes.max_wr, attributes.max_sge);
    let mut ring = freeflow_shm::RequestProducer::new(segment.into(), 0, shape);
    let mut a_qp = a.create_qp(QpType::Rc, &a_cq);
    let b_qp = b.create_qp_with(QpType::Rc, &b_cq, Some(srq), CAPABILITIES);
    a.connect_rc(&a_qp, b.gid(), b_qp.qpn, 14);
    b.connect_rc(&b_qp, a.gid(), a_qp.qpn, 14);
    let (from, to) = (a.memory(8, true), b.memory(8, true));
    for wr_id in 0..2 {
        ring.publish_receive(wr_id, &[to.sge(0, 64)]);
        if ring.must_ring_receive() && b.session.ring(cookie) {
            b.kick.kick();
        }
    }
    assert_eq!(b.ask(&Request::ModifySrq { srq, limit: 2 }), Reply::Done);
    a.post_send(&mut a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
    assert_eq!((b_cq.wait().status, a_cq.wait().status), (CompletionStatus::Success, CompletionStatus::Success));
    // IBV_EVENT_SRQ_LIMIT_REACHED.
    assert_eq!(read_event(&b.async_events), Some((15, cookie)));
    assert_eq!(b.refused(&Request::DestroySrq { srq }), VerbsError::Busy);
}

#[test]
fn what_stands_in_a_channel_to_who_uses_an_srq_goes_before() {
    let host = Host::new();
    let (mut a, mut b) = (host.client("a"), host.client("b"));
    let (mut cq_a, mut cq_b) = (a.create_cq(16, None), b.create_cq(16, None));
    let (asked, cookie) = (SrqAttributes { max_wr: 8, max_sge: 1, limit: 0 }, b.next_cookie());
    let (reply, descriptors) = b.ask_fds(&Request::CreateSrq { pd: b.pd, attributes: asked, cookie, xrc: None });
    let Reply::Srq { srq, attributes, segment_bytes, .. } = reply else { panic!("{reply:?}") };
    let segment =
        freeflow_shm::Segment::map(std::os::fd::AsFd::as_fd(&descriptors[0]), segment_bytes as usize).unwrap();
    let shape = freeflow_shm::layout::QueueShape::receive(attributes.max_wr, attributes.max_sge);
    let mut ring = freeflow_shm::RequestProducer::new(segment.into(), 0, shape);
    let mut one = a.create_qp(QpType::Rc, &cq_a);
    let other = b.create_qp_with(QpType::Rc, &cq_b, Some(srq), CAPABILITIES);
    a.connect_rc(&one, b.gid(), other.qpn, 14);
    b.connect_rc(&other, a.gid(), one.qpn, 14);
    for (client, request) in
        [(&mut a, Request::OpenDirectRing { qp: one.handle }), (&mut b, Request::AcceptDirectRing { qp: other.handle })]
    {
        let (reply, descriptors) = client.ask_fds(&request);
        assert!(matches!(reply, Reply::Direct { credit_count: 0, .. }) && descriptors.len() == 1, "{reply:?}");
    }
    let (from, to) = (a.memory(8, true), b.memory(8, true));
    let is_quiet = |cq: &mut Cq| {
        std::thread::sleep(Duration::from_millis(20));
        !cq.ring.poll(&mut Completion::default())
    };
    let mut post = |b: &Client, count: u64| {
        (0..count).for_each(|wr_id| _ = ring.publish_receive(wr_id, &[to.sge(0, 64)]));
        if ring.must_ring_receive() && b.session.ring(cookie) {
            b.kick.kick();
        }
    };
    // Two messages stand in the ring: first as many RECVs are posted, then more, but few.
    post(&b, 2);
    one.send.set_msn(2);
    one.send.set_ring_messages(2);
    a.post_send(&mut one, &request(SendOpcode::Send, &[from.sge(0, 64)]));
    assert!(is_quiet(&mut cq_b), "the RECVs are of those in the ring");
    post(&b, 2);
    assert!(is_quiet(&mut cq_b), "few are posted");
    other.receive.set_claimed(1);
    post(&b, 1);
    let received = cq_b.wait();
    assert_eq!((received.status, received.ring_position), (CompletionStatus::Success, 2), "enough are");
    assert_eq!(cq_a.wait().status, CompletionStatus::Success);
    other.receive.set_claimed(2);
    a.post_send(&mut one, &request(SendOpcode::Send, &[from.sge(0, 64)]));
    assert_eq!(cq_b.wait().ring_position, 3, "nothing stands there any more");
}

#[test]
fn a_reset_queue_pair_begins_anew() {
    let mut pair = Pair::new();
    let (from, to) = (pair.a.memory(8, true), pair.b.memory(8, true));
    for _ in 0..2 {
        for seed in 1..40 {
            from.fill(8, seed);
            pair.b.post_receive(&mut pair.b_qp, 1, &[to.sge(0, 64)]);
            pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
            assert_eq!(pair.b_cq.wait().status, CompletionStatus::Success);
            assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
            assert!(to.is_filled(8, seed));
        }
        let reset = QpAttributes { state: QpState::Reset, ..QpAttributes::default() };
        for (client, qp) in [(&pair.a, &mut pair.a_qp), (&pair.b, &mut pair.b_qp)] {
            let reply = client.modify(qp, reset, QpAttributeMask::STATE);
            assert_eq!(reply, Reply::QpModified { state: QpState::Reset });
            qp.send.reset();
            qp.receive.reset();
        }
        let (a_qpn, b_qpn) = (pair.a_qp.qpn, pair.b_qp.qpn);
        pair.a.connect_rc(&pair.a_qp, pair.b.gid(), b_qpn, 14);
        pair.b.connect_rc(&pair.b_qp, pair.a.gid(), a_qpn, 14);
    }
}

#[test]
fn an_error_flushes_both_queues_also_what_is_posted_later() {
    let mut pair = Pair::new();
    let to = pair.a.memory(8, true);
    pair.a.post_receive(&mut pair.a_qp, 1, &[to.sge(0, 64)]);
    let error = QpAttributes { state: QpState::Error, ..QpAttributes::default() };
    let reply = pair.a.modify(&pair.a_qp, error, QpAttributeMask::STATE);
    assert_eq!(reply, Reply::QpModified { state: QpState::Error });
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::WorkRequestFlushed);
    for _ in 0..3 {
        pair.a.post_receive(&mut pair.a_qp, 2, &[to.sge(0, 64)]);
        assert_eq!(pair.a_cq.wait().status, CompletionStatus::WorkRequestFlushed);
        pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[to.sge(0, 64)]));
        assert_eq!(pair.a_cq.wait().status, CompletionStatus::WorkRequestFlushed);
        // Long enough for the worker to sleep again: only a status request shows it.
        until("sleep", || pair.host.status().sleeping.then_some(()));
    }
}

/// A library that scribbles over everything it shares with the router, seed by seed: an honest pair doesn't notice.
#[test]
fn scribbling_over_ones_own_rings_harms_nobody_else() {
    let mut pair = Pair::new();
    let (from, to) = (pair.a.memory(8, true), pair.b.memory(8, false));
    for seed in 1..30_u64 {
        let mut hostile = pair.host.client("hostile");
        let cq = hostile.create_cq(16, None);
        let qp = hostile.create_qp(QpType::Rc, &cq);
        hostile.connect_rc(&qp, hostile.gid(), qp.qpn, 14);
        let memory = hostile.memory(8, true);
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        for _ in 0..200 {
            for segment in [qp.send.segment(), cq.ring.segment(), hostile.session.segment()] {
                let at = next() as usize % (segment.bytes() / 8) * 8;
                let _ = segment.write(at, &next().to_ne_bytes(), false);
                // Slots that are published, with anything in them.
                let slot = next() % 16;
                let line = 128 + slot as usize * 64;
                let _ = segment.write(line + 8, &((slot + 1) << 32 | next() & 0x0307_ff07).to_ne_bytes(), false);
                let _ = segment.write(line + 48, &memory.address.to_ne_bytes(), false);
                let length = (next() & 0xff) | u64::from(memory.mr.lkey) << 32;
                let _ = segment.write(line + 56, &length.to_ne_bytes(), false);
            }
            if hostile.session.ring(qp.cookie) {
                hostile.kick.kick();
            }
        }
        from.fill(8, seed);
        pair.b.post_receive(&mut pair.b_qp, 1, &[to.sge(0, 64)]);
        pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
        assert_eq!(pair.b_cq.wait().status, CompletionStatus::Success);
        assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
        assert!(to.is_filled(8, seed));
    }
    until("two sessions", || (pair.host.status().session_count == 2).then_some(()));
    until("no hostile segment", || (pair.host.status().segment_count == 5).then_some(()));
}
