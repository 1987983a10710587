//! Objects, rings, events and the end of the router, against a router that the test plays.
use crate::common::FakeRouter;
use freeflow_client::{
    CompletionChannel, CompletionQueue, ConnectError, Context, Element, QpParameters, QueuePair, SendDescriptor,
    Session, SharedReceiveQueue, check_send,
};
use freeflow_protocol::PROTOCOL;
use freeflow_protocol::version::{Offer, VersionRange};
use freeflow_shm::Take;
use freeflow_verbs::{
    AsyncEventKind, Completion, CompletionFlags, CompletionOpcode, CompletionStatus, QpAttributeMask, QpAttributes,
    QpCapabilities, QpState, QpType, ReceiveRequest, SendFlags, SendOpcode, SendRequest, Sge, SrqAttributes,
    VerbsError,
};
use std::sync::Arc;

struct Bench {
    router: FakeRouter,
    session: Arc<Session>,
    context: Context,
    pd: u32,
}

const CAPABILITIES: QpCapabilities =
    QpCapabilities { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 2, max_recv_sge: 2, max_inline_data: 64 };

impl Bench {
    fn new(name: &str) -> Self {
        let router = FakeRouter::start(name, PROTOCOL);
        let session = Arc::new(Session::connect(&router.path).unwrap());
        let context = Context::open(&session).unwrap();
        let pd = session.alloc_pd(context.handle()).unwrap();
        Self { router, session, context, pd }
    }

    /// The first CQ has cookie 0, the second 1, and so on.
    fn cq(&self, channel: Option<&Arc<CompletionChannel>>) -> Arc<CompletionQueue> {
        Arc::new(CompletionQueue::create(&self.session, self.context.handle(), 16, channel, false).unwrap())
    }

    /// QPs and SRQs share their cookies.
    fn qp(&self, cq: &Arc<CompletionQueue>, srq: Option<&Arc<SharedReceiveQueue>>) -> QueuePair {
        let wanted = QpParameters {
            qp_type: QpType::Rc,
            pd: Some(self.pd),
            send_cq: Some(cq),
            recv_cq: Some(cq),
            srq,
            xrcd: None,
            capabilities: CAPABILITIES,
            all_signaled: true,
            block_own_multicast: false,
            connection: None,
        };
        let qp = QueuePair::create(&self.session, &wanted).unwrap();
        to_state(&qp, QpState::ReadyToSend);
        qp
    }

    /// Completes what the QP of that cookie has posted to its send queue, up to `count`.
    fn complete_sends(&self, cq: u32, qp: u32, count: usize) {
        let mut objects = self.router.objects();
        let objects = &mut *objects;
        let fake = objects.qps.get_mut(&qp).unwrap();
        let mut request = SendRequest::default();
        for _ in 0..count {
            assert!(matches!(fake.send.take_send(QpType::Rc, &mut request), Take::Ready));
            let completion = Completion {
                work_request_id: request.work_request_id,
                flags: CompletionFlags(CompletionFlags::SEND_QUEUE),
                qpn: fake.qpn,
                qp_cookie: qp,
                ring_position: request.ring_position,
                ..Completion::default()
            };
            objects.cqs.get_mut(&cq).unwrap().publish(&completion).unwrap();
        }
    }

    /// Lets the QP consume one request of an SRQ.
    fn complete_shared_receive(&self, cq: u32, qp: u32, srq: u32) {
        let mut objects = self.router.objects();
        let mut request = ReceiveRequest::default();
        assert!(matches!(objects.srqs.get_mut(&srq).unwrap().take_receive(&mut request), Take::Ready));
        let completion = Completion {
            work_request_id: request.work_request_id,
            opcode: CompletionOpcode::Receive,
            qpn: objects.qps[&qp].qpn,
            qp_cookie: qp,
            ring_position: request.ring_position,
            ..Completion::default()
        };
        objects.cqs.get_mut(&cq).unwrap().publish(&completion).unwrap();
    }
}

fn to_state(qp: &QueuePair, state: QpState) {
    let attributes = QpAttributes { state, ..QpAttributes::default() };
    assert_eq!(qp.modify(&attributes, QpAttributeMask(QpAttributeMask::STATE)), Ok(state));
}

fn send(wr_id: u64) -> SendDescriptor<'static> {
    SendDescriptor {
        wr_id,
        opcode: SendOpcode::Send,
        flags: SendFlags(SendFlags::SIGNALED),
        immediate: 0,
        remote_address: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        remote_srqn: 0,
        sges: &[],
        inline: None,
    }
}

fn post(qp: &QueuePair, wr_ids: std::ops::Range<u64>) -> Result<(), VerbsError> {
    let mut batch = qp.begin_send()?;
    wr_ids.into_iter().try_for_each(|wr_id| batch.push(&send(wr_id)))
}

fn poll(cq: &CompletionQueue, limit: usize) -> Vec<(u64, CompletionStatus)> {
    let mut polled = Vec::new();
    cq.poll(limit, |completion| polled.push((completion.work_request_id, completion.status))).unwrap();
    polled
}

fn successes(wr_ids: std::ops::Range<u64>) -> Vec<(u64, CompletionStatus)> {
    wr_ids.map(|wr_id| (wr_id, CompletionStatus::Success)).collect()
}

fn flushes(wr_ids: impl IntoIterator<Item = u64>) -> Vec<(u64, CompletionStatus)> {
    wr_ids.into_iter().map(|wr_id| (wr_id, CompletionStatus::WorkRequestFlushed)).collect()
}

#[test]
fn a_slot_is_free_again_when_its_completion_was_polled() {
    let bench = Bench::new("slots");
    let cq = bench.cq(None);
    let qp = bench.qp(&cq, None);
    assert_eq!(post(&qp, 0..5), Err(VerbsError::NoMemory), "four fit, the fifth does not");
    assert!(bench.router.objects().session.as_ref().unwrap().take_doorbells(|cookie| assert_eq!(cookie, 0)));
    bench.complete_sends(0, 0, 2);
    assert_eq!(post(&qp, 9..10), Err(VerbsError::NoMemory), "completed, but not polled");
    assert_eq!(poll(&cq, 16), successes(0..2));
    assert_eq!(post(&qp, 4..7), Err(VerbsError::NoMemory));
    bench.complete_sends(0, 0, 4);
    assert_eq!(poll(&cq, 3), successes(2..5));
    assert_eq!(poll(&cq, 3), successes(5..6));
}

#[test]
fn requests_that_make_no_sense_are_refused_at_once() {
    let bench = Bench::new("refusals");
    let cq = bench.cq(None);
    let qp = bench.qp(&cq, None);
    let sges = [Sge::default(); 3];
    let mut batch = qp.begin_send().unwrap();
    let payload = [0; 65];
    let bad = [
        SendDescriptor { sges: &sges, ..send(0) },
        SendDescriptor { inline: Some(&payload), flags: SendFlags(SendFlags::INLINE), ..send(0) },
        SendDescriptor {
            inline: Some(&payload[..8]),
            flags: SendFlags(SendFlags::INLINE),
            opcode: SendOpcode::RdmaRead,
            ..send(0)
        },
    ];
    for request in bad {
        assert_eq!(batch.push(&request), Err(VerbsError::InvalidArgument));
    }
    drop(batch);
    assert_eq!(qp.begin_receive().unwrap().push(0, &sges), Err(VerbsError::InvalidArgument));
    for state in [QpState::Reset, QpState::Init, QpState::ReadyToReceive] {
        to_state(&qp, state);
        assert_eq!(qp.begin_send().err(), Some(VerbsError::InvalidArgument), "{state:?}");
        assert_eq!(qp.begin_receive().is_ok(), state != QpState::Reset, "{state:?}");
    }
}

#[test]
fn a_destroyed_qp_leaves_no_completions_and_gives_shared_receives_back() {
    let bench = Bench::new("destroyed");
    let cq = bench.cq(None);
    let wanted = SrqAttributes { max_wr: 2, max_sge: 1, limit: 0 };
    let srq = Arc::new(SharedReceiveQueue::create(&bench.session, bench.pd, wanted, None).unwrap());
    let (doomed, other) = (bench.qp(&cq, Some(&srq)), bench.qp(&cq, Some(&srq)));
    assert_eq!(doomed.begin_receive().err(), Some(VerbsError::InvalidArgument));
    let mut batch = srq.begin().unwrap();
    assert_eq!((batch.push(20, &[]), batch.push(21, &[])), (Ok(()), Ok(())));
    assert_eq!(batch.push(22, &[]), Err(VerbsError::NoMemory));
    drop(batch);
    post(&doomed, 0..2).unwrap();
    post(&other, 10..12).unwrap();
    bench.complete_sends(0, 1, 1);
    bench.complete_sends(0, 2, 1);
    bench.complete_shared_receive(0, 1, 0);
    bench.complete_sends(0, 2, 1);
    doomed.destroy().unwrap();
    assert_eq!(srq.begin().unwrap().push(22, &[]), Ok(()), "the dropped completion gave its slot back");
    assert_eq!(poll(&cq, 16), successes(10..12));
    bench.complete_shared_receive(0, 2, 0);
    assert_eq!(poll(&cq, 16), successes(21..22));
}

#[test]
fn reset_empties_the_queues() {
    let bench = Bench::new("reset");
    let cq = bench.cq(None);
    let qp = bench.qp(&cq, None);
    post(&qp, 0..4).unwrap();
    bench.complete_sends(0, 0, 2);
    to_state(&qp, QpState::Reset);
    assert_eq!(poll(&cq, 16), []);
    to_state(&qp, QpState::ReadyToSend);
    post(&qp, 10..14).unwrap();
    bench.complete_sends(0, 0, 4);
    assert_eq!(poll(&cq, 16), successes(10..14));
}

#[test]
fn a_resize_keeps_what_is_in_the_queue() {
    let bench = Bench::new("resize");
    let cq = bench.cq(None);
    let qp = bench.qp(&cq, None);
    post(&qp, 0..4).unwrap();
    bench.complete_sends(0, 0, 3);
    assert_eq!(cq.resize(64), Ok(64));
    assert_eq!(cq.capacity(), 64);
    bench.complete_sends(0, 0, 1);
    assert_eq!(bench.router.objects().cqs.get_mut(&0).unwrap().unconsumed(), 4);
    assert_eq!(poll(&cq, 2), successes(0..2));
    assert_eq!(poll(&cq, 16), successes(2..4));
    assert_eq!(bench.router.objects().cqs.get_mut(&0).unwrap().unconsumed(), 0);
}

#[test]
fn completion_events_name_their_cq_and_skip_destroyed_ones() {
    let bench = Bench::new("events");
    let channel = Arc::new(CompletionChannel::create(&bench.session, bench.context.handle()).unwrap());
    let (gone, cq) = (bench.cq(Some(&channel)), bench.cq(Some(&channel)));
    gone.set_tag(100);
    cq.set_tag(101);
    cq.arm(false).unwrap();
    assert!(bench.router.objects().cqs[&1].take_armed(false));
    gone.destroy().unwrap();
    for cookie in [0_u32, 1] {
        let mut event = [0; 8];
        event[..4].copy_from_slice(&cookie.to_le_bytes());
        assert!(freeflow_shm::fd::send_record(&bench.router.objects().pipes[&channel.handle()], &event));
    }
    let mut reported = 0;
    channel.wait(&mut |tag| reported = tag).unwrap();
    assert_eq!(reported, 101);
}

#[test]
fn the_end_of_the_router_flushes_everything_once() {
    let bench = Bench::new("death");
    let channel = Arc::new(CompletionChannel::create(&bench.session, bench.context.handle()).unwrap());
    let cq = bench.cq(Some(&channel));
    cq.set_tag(7);
    let qp = bench.qp(&cq, None);
    post(&qp, 0..4).unwrap();
    let mut batch = qp.begin_receive().unwrap();
    (10..13).try_for_each(|wr_id| batch.push(wr_id, &[])).unwrap();
    drop(batch);
    bench.complete_sends(0, 0, 1);
    bench.router.die();

    let mut reported = Vec::new();
    channel.wait(&mut |tag| reported.push(tag)).unwrap();
    assert_eq!(reported, [7]);
    assert!(matches!(channel.wait(&mut |_| ()), Err(None)), "notified once");
    let mut events = Vec::new();
    bench.context.wait_event(&mut |kind, element| events.push((kind, element))).unwrap();
    assert_eq!(events, [(AsyncEventKind::DeviceFatal, Element::Device)]);
    assert!(matches!(bench.context.wait_event(&mut |_, _| ()), Err(None)), "notified once");

    assert_eq!(poll(&cq, 2), successes(0..1), "what was completed before comes first");
    assert_eq!(poll(&cq, 2), flushes(1..3));
    assert_eq!(poll(&cq, 16), flushes([3, 10, 11, 12]));
    assert_eq!(poll(&cq, 16), []);
    assert_eq!(post(&qp, 20..21), Err(VerbsError::DeviceFatal));
    assert_eq!(qp.begin_receive().err(), Some(VerbsError::DeviceFatal));
    assert_eq!(bench.session.alloc_pd(0), Err(VerbsError::DeviceFatal));
    assert_eq!((qp.destroy(), cq.destroy(), bench.context.close()), (Ok(()), Ok(()), Ok(())), "they are gone already");
}

#[test]
fn a_poller_notices_the_end_of_the_router() {
    let bench = Bench::new("notice");
    let cq = bench.cq(None);
    let qp = bench.qp(&cq, None);
    post(&qp, 0..1).unwrap();
    bench.router.die();
    let start = std::time::Instant::now();
    while poll(&cq, 1) != flushes(0..1) {
        assert!(start.elapsed().as_secs() < 30);
    }
}

#[test]
fn memory_of_the_router_is_given_out_and_taken_back() {
    let bench = Bench::new("arena");
    let first = freeflow_client::allocate(&bench.session, 5000).unwrap();
    let second = freeflow_client::allocate(&bench.session, 1).unwrap();
    assert_eq!((first % 4096, second), (0, first + 8192));
    assert_eq!(freeflow_client::usable_bytes(first), Some(8192));
    let large = freeflow_client::allocate(&bench.session, 40 << 20).unwrap();
    assert!(freeflow_client::release(large) && freeflow_client::release(first) && freeflow_client::release(second));
    assert!(!freeflow_client::release(second));
    assert_eq!(freeflow_client::allocate(&bench.session, usize::MAX), Err(VerbsError::InvalidArgument));
}

#[test]
fn why_there_is_no_session() {
    let nobody = std::env::temp_dir().join("freeflow-client-nobody/router.sock");
    let error = Session::connect(&nobody).unwrap_err();
    assert!(matches!(error, ConnectError::NoRouter { .. }));
    assert!(error.to_string().contains("`freeflow up`"));
    let later = Offer { versions: VersionRange { lowest: 2, highest: 3 }, ..PROTOCOL };
    let router = FakeRouter::start("version", later);
    let error = Session::connect(&router.path).unwrap_err();
    assert!(matches!(error, ConnectError::Version { .. }));
    assert!(error.to_string().contains("the other side speaks versions 2 to 3, this side version 1"), "{error}");
}

#[test]
fn an_xrc_queue_gets_its_slots_back_whichever_qp_they_came_by() {
    let bench = Bench::new("xrc");
    let (session, context) = (&bench.session, bench.context.handle());
    let cq = bench.cq(None);
    let xrcd = session.open_xrc_domain(context, None, freeflow_verbs::XrcdOpenFlags::CREATE).unwrap();
    let wanted = SrqAttributes { max_wr: 1, max_sge: 1, limit: 0 };
    let create = || SharedReceiveQueue::create(session, bench.pd, wanted, Some((xrcd, &cq))).unwrap();
    let (srq, other) = (create(), create());
    assert!(srq.number().is_some() && srq.number() != other.number());
    let post = |srq: &SharedReceiveQueue, wr_id| srq.begin().unwrap().push(wr_id, &[]);
    let complete = |cookie, qpn, work_request_id| {
        let completion = Completion { work_request_id, qpn, qp_cookie: cookie, ..Completion::default() };
        bench.router.objects().cqs.get_mut(&0).unwrap().publish(&completion).unwrap();
    };
    assert_eq!((post(&srq, 1), post(&srq, 2)), (Ok(()), Err(VerbsError::NoMemory)));
    complete(0, 0x77, 1);
    assert_eq!(poll(&cq, 16), successes(1..2));
    assert_eq!((post(&srq, 2), post(&other, 3)), (Ok(()), Ok(())));
    complete(0, 0x78, 2);
    complete(1, 0x78, 3);
    srq.destroy().unwrap();
    assert_eq!(poll(&cq, 16), successes(3..4), "a destroyed queue takes its completions along");
}

#[test]
fn an_xrc_target_has_no_queues() {
    let bench = Bench::new("xrc-target");
    let xrcd =
        bench.session.open_xrc_domain(bench.context.handle(), None, freeflow_verbs::XrcdOpenFlags::CREATE).unwrap();
    let qp = QueuePair::open(&bench.session, xrcd, 0x2345).unwrap();
    assert_eq!((qp.qpn(), qp.qp_type()), (0x2345, QpType::XrcReceive));
    to_state(&qp, QpState::ReadyToReceive);
    assert_eq!(qp.begin_send().err(), Some(VerbsError::InvalidArgument));
    assert_eq!(qp.begin_receive().err(), Some(VerbsError::InvalidArgument));
    to_state(&qp, QpState::Reset);
    qp.destroy().unwrap();
}

#[test]
fn each_type_has_its_requests() {
    let capabilities = QpCapabilities { max_inline_data: 4, ..CAPABILITIES };
    let check = |qp_type, opcode| check_send(qp_type, &capabilities, &SendDescriptor { opcode, ..send(0) }).is_ok();
    for opcode in SendOpcode::ALL {
        assert!(check(QpType::Rc, opcode) && check(QpType::XrcSend, opcode) && !check(QpType::XrcReceive, opcode));
        let plain = matches!(opcode, SendOpcode::Send | SendOpcode::SendWithImmediate);
        assert_eq!(check(QpType::Ud, opcode), plain, "{opcode:?}");
        assert_eq!(check(QpType::Uc, opcode), plain || opcode.is_write() || opcode.is_local(), "{opcode:?}");
    }
    // Eight bytes ride in the slot itself, whatever was granted for inline data; no more and no fewer.
    let payload = [0; 9];
    for (bytes, opcode, fits) in [
        (8, SendOpcode::AtomicWrite, true),
        (7, SendOpcode::AtomicWrite, false),
        (9, SendOpcode::AtomicWrite, false),
        (4, SendOpcode::SendWithInvalidate, true),
        (8, SendOpcode::SendWithInvalidate, false),
        (0, SendOpcode::Flush, false),
        (0, SendOpcode::BindWindow, false),
    ] {
        let (inline, flags) = (Some(&payload[..bytes]), SendFlags(SendFlags::INLINE));
        let request = SendDescriptor { opcode, inline, flags, ..send(0) };
        assert_eq!(check_send(QpType::Rc, &capabilities, &request).is_ok(), fits, "{opcode:?} {bytes}");
    }
}
