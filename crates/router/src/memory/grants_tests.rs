//! Grants where the worker itself is asked: what policy says, and commands that have to wait.
use crate::admission::account::{Account, Charge, Commons};
use crate::dataplane::direct::Direct;
use crate::dataplane::lone_worker::{LoneWorker, create_session, new_vnic};
use crate::dataplane::ports::{Attention, Qp};
use crate::dataplane::slow_path_counts::QpSlowPath;
use crate::dataplane::worker::Worker;
use crate::memory::blocking_memory::BlockingMemory;
use crate::memory::grants::{GrantRequest, Verdict};
use crate::memory::insiders::ATOMIC_TIME_MAX;
use crate::memory::lease::SegmentLease;
use crate::memory::page_table::{Origin, PageTable};
use freeflow_engine::{AtomicOutcome, PdId, QpId, QpInit, SessionId, Span, SpanRegion, Token, VnicCounters};
use freeflow_protocol::admin::DataPath;
use freeflow_protocol::library::GrantAccess;
use freeflow_shm::layout::{QueueShape, queue};
use freeflow_shm::{RequestConsumer, RequestProducer, Segment, SendDescriptor, fd, monotonic_ns};
use freeflow_verbs::{
    Access, AddressHandleAttributes, AtomicOperation, Gid, GlobalRoute, Instant, NetworkId, PathMtu, QpAttributeMask,
    QpAttributes, QpCapabilities, QpState, QpType, RateLimit, SendFlags, SendOpcode, Shaping, TenantId, VerbsError,
};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const NETWORK: NetworkId = NetworkId(1);
const SEGMENT_AT: u64 = 0x10000;
const HANDLE: u32 = 5;
const CAPABILITIES: QpCapabilities =
    QpCapabilities { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };

/// Two processes of two vNICs and an RC QP of each; the second has a segment that it takes revoke
/// commands about.
struct Rig {
    worker: Worker,
    qps: [QpId; 2],
    owner: SessionId,
    memory: Arc<BlockingMemory>,
    send: RequestProducer,
    rkey: u32,
    pd: PdId,
    /// Requests that were carried.
    sent: u64,
    command_pipe: OwnedFd,
    /// Nobody listens to what the worker says.
    _silence: Box<dyn std::any::Any>,
}

fn empty_write(rkey: u32) -> SendDescriptor<'static> {
    SendDescriptor {
        wr_id: 0,
        opcode: SendOpcode::RdmaWrite,
        flags: SendFlags(0),
        immediate: 0,
        remote_address: SEGMENT_AT,
        rkey,
        compare_add: 0,
        swap: 0,
        remote_srqn: 0,
        sges: &[],
        inline: None,
    }
}

impl Rig {
    fn new() -> Self {
        let LoneWorker { mut worker, commands, events, .. } = LoneWorker::new();
        let memory = Arc::new(BlockingMemory::default());
        let made = [2, 3].map(|host| make_qp(&mut worker, host, &memory));
        for (at, peer) in [(0, 1), (1, 0)] {
            connect(&mut worker, &made[at], &made[peer]);
        }
        let [End { qp: first, send, .. }, End { qp: second, session: owner, pd, .. }] = made;
        let (segment, descriptor) = Segment::create_sealable("test", 4096).unwrap();
        let account = Arc::new(Account::new(Arc::new(Commons::new(1 << 16, 1 << 16))));
        let charge = || Charge::descriptor(&account).unwrap();
        let origin = Origin { handle: HANDLE, lease: SegmentLease::new(Some((descriptor, charge())), charge()) };
        let (command_pipe, write) = fd::event_sockets(crate::dataplane::event_pipes::PIPE_BYTES).unwrap();
        fd::set_nonblocking(&command_pipe, true).unwrap();
        let pipe = worker.ports.pipes.insert(owner, write);
        let entry = worker.ports.sessions.get_mut(owner).unwrap();
        let segment = Arc::new(segment);
        entry.memory.map(SEGMENT_AT, segment.clone()).unwrap();
        entry.memory.set_origin(&segment, origin);
        entry.commands = Some(pipe);
        let keys = worker.engine.register_mr(owner, pd, SEGMENT_AT, 4096, SEGMENT_AT, Access(0xf)).unwrap();
        let (qps, rkey) = ([first, second], keys.rkey);
        let _silence = Box::new((commands, events));
        Self { worker, qps, owner, memory, send, rkey, pd, sent: 0, command_pipe, _silence }
    }

    fn grant(&mut self) -> Result<(), VerbsError> {
        self.ask(self.qps[0]).map(|missing| assert_eq!(missing, 0))
    }

    /// → what is missing until it is granted.
    fn ask(&mut self, qp: QpId) -> Result<u64, VerbsError> {
        let request = GrantRequest { rkey: self.rkey, address: SEGMENT_AT, length: 8, access: GrantAccess::Write };
        self.worker.grant(qp, &request).map(|verdict| match verdict {
            Verdict::Given(_) => 0,
            Verdict::NotEnoughCredit { missing } => missing,
        })
    }

    /// The owner's memory is one page of a segment of so many.
    fn map_more(&mut self, pages: u64) {
        let entry = self.worker.ports.sessions.get_mut(self.owner).unwrap();
        let lease = entry.memory.place(SEGMENT_AT).unwrap().origin.lease.clone();
        let segment = entry.memory.place(SEGMENT_AT).unwrap().segment.clone();
        entry.memory.unmap(SEGMENT_AT, &segment).unwrap();
        let bytes = pages * 4096;
        let segment = Arc::new(Segment::create("test", bytes as usize).unwrap().0);
        entry.memory.map(SEGMENT_AT, segment.clone()).unwrap();
        entry.memory.set_origin(&segment, Origin { handle: HANDLE, lease });
        let pd = self.pd;
        let access = Access(0xf);
        self.rkey = self.worker.engine.register_mr(self.owner, pd, SEGMENT_AT, bytes, SEGMENT_AT, access).unwrap().rkey;
    }

    /// The router carries so many empty WRITEs of the first QP.
    fn carry(&mut self, requests: u64) {
        for _ in 0..requests {
            self.send.publish_send(&empty_write(self.rkey));
            self.worker.activate(self.qps[0]);
            turns(self, monotonic_ns());
            self.sent += 1;
            assert_eq!(turns(self, monotonic_ns()), self.sent);
        }
    }

    /// The vNICs' counters.
    fn counters(&self) -> [VnicCounters; 2] {
        self.qps.map(|id| {
            let vnic = self.worker.ports.sessions.get(self.worker.ports.qps.get(id).unwrap().session).unwrap().vnic;
            self.worker.engine.vnic_counters(vnic).unwrap()
        })
    }

    fn turn(&mut self) {
        self.worker.turn(Instant(monotonic_ns()));
    }

    fn has_command(&self) -> bool {
        let mut bytes = [0; 8];
        let is_whole = rustix::io::read(&self.command_pipe, &mut bytes) == Ok(8);
        is_whole && bytes == u64::from(HANDLE).to_le_bytes()
    }
}

pub(crate) struct End {
    pub qp: QpId,
    number: u32,
    gid: Gid,
    pub session: SessionId,
    pd: PdId,
    pub send: RequestProducer,
}

pub(crate) fn make_qp(worker: &mut Worker, host: u8, memory: &Arc<BlockingMemory>) -> End {
    let new = new_vnic(NETWORK, host);
    let vnic = worker.create_vnic(&new).unwrap();
    let session = create_session(worker, vnic, PageTable::new(memory.clone(), Arc::default())).unwrap();
    let context = worker.engine.open_context(session).unwrap();
    let pd = worker.engine.alloc_pd(session, context).unwrap();
    let cq = worker.engine.create_cq(session, context, 16).unwrap();
    let init = QpInit {
        pd: Some(pd),
        qp_type: QpType::Rc,
        send_cq: Some(cq),
        recv_cq: Some(cq),
        srq: None,
        xrcd: None,
        capabilities: CAPABILITIES,
        all_signaled: true,
        block_own_multicast: false,
        cookie: 1,
    };
    let (qp, number, granted) = worker.engine.create_qp(session, init).unwrap();
    let shape = QueueShape::send(granted.max_send_wr, granted.max_send_sge, granted.max_inline_data);
    let ring = Arc::new(Segment::create("test", shape.bytes()).unwrap().0);
    let (wr, sge) = (granted.max_send_wr, granted.max_send_sge);
    let entry = Qp {
        session,
        context,
        cookie: 1,
        service: QpType::Rc,
        send: RequestConsumer::new(ring.clone(), 0, shape, wr, sge, granted.max_inline_data),
        receive: None,
        receives_wanted: false,
        attention: Attention::Doorbell,
        direct: Direct::default(),
        slow_path: QpSlowPath::default(),
    };
    worker.ports.qps.insert(qp, entry);
    End { qp, number: number.0, gid: new.gid, session, pd, send: RequestProducer::new(ring, 0, shape) }
}

pub(crate) fn connect(worker: &mut Worker, own: &End, peer: &End) {
    use QpAttributeMask as M;
    let route = GlobalRoute { dgid: peer.gid, hop_limit: 64, ..GlobalRoute::default() };
    let attributes = |state| QpAttributes {
        state,
        access: Access(0xf),
        port: 1,
        path_mtu: PathMtu::Mtu1024,
        dest_qpn: peer.number,
        address: AddressHandleAttributes { grh: Some(route), port: 1, ..AddressHandleAttributes::default() },
        max_dest_rd_atomic: 16,
        max_rd_atomic: 16,
        min_rnr_timer: 1,
        ..QpAttributes::default()
    };
    let steps = [
        (QpState::Init, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
        (
            QpState::ReadyToReceive,
            M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
        ),
        (QpState::ReadyToSend, M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC),
    ];
    for (state, mask) in steps {
        let (ports, mask) = (&mut worker.ports, QpAttributeMask(M::STATE | mask));
        let result = worker.engine.modify_qp(ports, Instant(0), own.session, own.qp, &attributes(state), mask);
        assert_eq!(result, Ok(state));
    }
}

#[test]
fn policy_grants_and_revokes() {
    let mut rig = Rig::new();
    rig.worker.set_data_path(NETWORK, DataPath::Routed);
    assert_eq!(rig.grant(), Err(VerbsError::NotSupported));
    rig.worker.set_data_path(NETWORK, DataPath::Auto);
    assert_eq!((rig.grant(), rig.worker.granted(rig.qps[0]), rig.worker.granted(rig.qps[1])), (Ok(()), true, false));
    rig.turn();
    assert!(!rig.has_command());
    rig.worker.set_data_path(NETWORK, DataPath::Routed);
    assert_eq!((rig.send.grants_revoked(), rig.worker.granted(rig.qps[0])), (1, false));
    rig.turn();
    assert!(rig.has_command() && !rig.has_command());
    assert_eq!(rig.grant(), Err(VerbsError::NotSupported));
}

#[test]
fn rate_limits_revoke_what_is_direct_at_either_end() {
    let limit = RateLimit { bits_per_s: Some(1_000_000_000), ..RateLimit::default() };
    let plain = Shaping::default();
    for end in 0..2 {
        for by_tenant in [false, true] {
            let mut rig = Rig::new();
            let session = rig.worker.ports.qps.get(rig.qps[end]).unwrap().session;
            let vnic = rig.worker.ports.sessions.get(session).unwrap().vnic;
            let tenant = TenantId(4);
            let set = |worker: &mut Worker, limit: RateLimit| match by_tenant {
                true => {
                    worker.set_shapings(Instant(1), &[(tenant, limit)], &[]);
                    Ok(())
                }
                false => worker.set_shaping(Instant(1), vnic, Shaping { vnic: limit, ..plain }),
            };
            let class = Shaping { tenant: Some(tenant), priority: 7, weight: 9, ..plain };
            if by_tenant {
                rig.worker.set_shaping(Instant(1), vnic, class).unwrap();
            }
            set(&mut rig.worker, limit).unwrap();
            assert_eq!(rig.grant(), Err(VerbsError::NotSupported));
            set(&mut rig.worker, RateLimit::default()).unwrap();
            assert_eq!(rig.grant(), Ok(()));
            rig.worker.set_shaping(Instant(1), vnic, class).unwrap();
            assert!(rig.worker.granted(rig.qps[0]), "a priority takes nothing away");
            set(&mut rig.worker, limit).unwrap();
            assert_eq!((rig.send.grants_revoked(), rig.worker.granted(rig.qps[0])), (1, false));
            rig.turn();
            assert!(rig.has_command() && !rig.has_command());
        }
    }
}

#[test]
fn a_grant_is_paid_by_what_the_router_carried() {
    const FREE: u64 = 64 << 10;
    let mut rig = Rig::new();
    // 16 pages are free for a QP, and each request counts one.
    rig.map_more(20);
    assert_eq!(rig.ask(rig.qps[0]), Ok(4 * 4096));
    assert!(!rig.worker.granted(rig.qps[0]));
    rig.carry(3);
    assert_eq!(rig.ask(rig.qps[0]), Ok(4096));
    rig.carry(1);
    assert_eq!((rig.ask(rig.qps[0]), rig.worker.granted(rig.qps[0])), (Ok(0), true));
    assert_eq!(rig.worker.ports.qps.get(rig.qps[0]).unwrap().direct.grants_paid, FREE + 4 * 4096);
    // Once.
    assert_eq!(rig.ask(rig.qps[0]), Ok(0));
    assert_eq!(rig.worker.ports.qps.get(rig.qps[0]).unwrap().direct.grants_paid, FREE + 4 * 4096);
    // Requests on the direct path pay for nothing.
    rig.send.count_write(u32::MAX);
    assert!(rig.worker.count_direct(rig.qps[0]));
    assert_eq!(rig.worker.funds(rig.qps[0]), 0);
    // It stays paid, also when the QP begins again.
    let direct = &mut rig.worker.ports.qps.get_mut(rig.qps[0]).unwrap().direct;
    direct.begin_anew();
    assert_eq!(direct.grants_paid, FREE + 4 * 4096);
}

/// Turns at this time until nothing is done; what the QP of the rig has sent since it was made.
fn turns(rig: &mut Rig, now: u64) -> u64 {
    for _ in 0..100 {
        if !rig.worker.turn(Instant(now)) {
            break;
        }
    }
    rig.worker.engine.qp_traffic(rig.qps[0]).unwrap().messages_sent
}

#[test]
fn who_waits_for_tokens_is_not_looked_at_and_the_worker_sleeps() {
    const SECOND: u64 = 1_000_000_000;
    let mut rig = Rig::new();
    let session = rig.worker.ports.qps.get(rig.qps[0]).unwrap().session;
    let vnic = rig.worker.ports.sessions.get(session).unwrap().vnic;
    let limit = RateLimit { messages_per_s: Some(1), burst_messages: Some(2), ..RateLimit::default() };
    let start = monotonic_ns();
    rig.worker.set_shaping(Instant(start), vnic, Shaping { vnic: limit, ..Shaping::default() }).unwrap();
    let write = empty_write(rig.rkey);
    for _ in 0..4 {
        rig.send.publish_send(&write);
    }
    rig.worker.activate(rig.qps[0]);
    assert_eq!(turns(&mut rig, start), 2);
    assert_eq!(rig.worker.ports.qps.get(rig.qps[0]).unwrap().attention, Attention::Waiting);
    assert!(rig.worker.rest_all(), "nothing keeps the worker awake");
    assert_eq!(rig.worker.engine.listed_count(), 0);
    assert_eq!(rig.worker.engine.poll_timeout(), Some(Instant(start + SECOND)));
    assert_eq!(turns(&mut rig, start + SECOND - 1), 2);
    assert_eq!(turns(&mut rig, start + SECOND), 3);
    assert_eq!(rig.worker.engine.poll_timeout(), Some(Instant(start + 2 * SECOND)));
    // Without the limit it goes on at once.
    rig.worker.set_shaping(Instant(start + SECOND), vnic, Shaping::default()).unwrap();
    assert_eq!((turns(&mut rig, start + SECOND + 1), rig.worker.engine.poll_timeout()), (4, None));
    assert_eq!(rig.worker.engine.vnic_throttled(Instant(start + SECOND), vnic).waits, 2);
}

#[test]
fn a_command_waits_for_a_copier_that_has_the_segment_in_hand() {
    let mut rig = Rig::new();
    rig.grant().unwrap();
    rig.memory.set_blocking(true);
    // One by the slow path, which begins before the segment, so that the copier has to do the next one
    // too.
    let add = AtomicOperation::FetchAdd { add: 1 };
    let at = |address| Span { session: rig.owner, region: SpanRegion::new(0, false), address, length: 8 };
    assert_eq!(rig.worker.ports.start_atomic(Token(1), at(SEGMENT_AT - 4), add), AtomicOutcome::Pending);
    assert_eq!(rig.worker.ports.start_atomic(Token(2), at(SEGMENT_AT), add), AtomicOutcome::Pending);
    rig.worker.ports.close_direct(rig.qps[0]);
    assert_eq!(rig.send.grants_revoked(), 1);
    rig.turn();
    assert!(!rig.has_command());
    rig.memory.set_blocking(false);
    let began = monotonic_ns();
    while !rig.has_command() {
        assert!(monotonic_ns() - began < 30_000_000_000, "waited in vain");
        // Nobody knows the two tokens, so their results are not handed to the engine.
        rig.worker.collect();
        while let Some(finished) = rig.worker.queued_finished.pop_front() {
            rig.worker.ports.handle_finished(finished);
        }
        rig.worker.ports.send_commands(Instant(monotonic_ns()));
    }
}

#[test]
fn what_is_done_past_the_router_is_counted_to_its_last_request() {
    let mut rig = Rig::new();
    rig.send.count_write(5000);
    assert!(
        !rig.worker.count_direct(rig.qps[0]),
        "nothing was granted: whatever it says, there is nobody to have got it"
    );
    rig.grant().unwrap();
    assert!(rig.worker.count_direct(rig.qps[0]) && !rig.worker.count_direct(rig.qps[0]));
    let [one, other] = rig.counters();
    assert_eq!((one.direct_messages, one.bytes, one.sent.packets), (1, 5000, 5));
    assert_eq!((other.received, other.writes_received), (one.sent, 1));
    // Its owner ends, which takes the grant back; then it ends itself, after a last request from before that.
    let owner = rig.worker.ports.sessions.get(rig.owner).unwrap().vnic;
    rig.worker.destroy_session(Instant(1), rig.owner);
    rig.send.count_read(100);
    let session = rig.worker.ports.qps.get(rig.qps[0]).unwrap().session;
    rig.worker.destroy_session(Instant(2), session);
    let other = rig.worker.engine.vnic_counters(owner).unwrap();
    assert_eq!((other.sent.bytes, other.writes_received, other.reads_received), (100, 1, 1));
    assert_eq!(rig.worker.watch_direct(Instant(3)), Some(false));
    assert_eq!(rig.worker.ports.watch.due_in(Instant(4)), None, "nothing is left to look at");
}

#[test]
fn words_of_an_enemy_are_only_counted() {
    let mut rig = Rig::new();
    rig.grant().unwrap();
    for round in 0..1000_u64 {
        let words = [u64::MAX, 0, 1 << 63, round, u64::MAX / 3, 7, round << 50, 1 << 40];
        let bytes: Vec<u8> = words.iter().map(|word| word.wrapping_mul(round)).flat_map(u64::to_le_bytes).collect();
        rig.send.segment().write(queue::DIRECT_SENDS, &bytes, false).unwrap();
        rig.worker.publish_counters(Instant(round << 30));
        rig.worker.count_all_direct();
    }
    let [one, other] = rig.counters();
    assert!(one.messages >= one.direct_messages && one.direct_messages > 1000);
    assert!(other.completions_with_error == 0 && one.completions_with_error == 0);
    assert!([one, other].iter().all(|counters| counters.sent.bytes <= 1 << 63 && counters.received.packets <= 1 << 63));
    let before = rig.counters();
    rig.send.segment().write(queue::DIRECT_SENDS, &[0; 64], false).unwrap();
    rig.worker.set_data_path(NETWORK, DataPath::Routed);
    rig.turn();
    assert!(rig.counters()[0].sent.packets >= before[0].sent.packets);
}

#[test]
fn parts_are_taken_back_in_steps() {
    const AT: u64 = 0x1000_0000;
    let mut rig = Rig::new();
    let arena = Arc::new(Segment::create("test", 3000 * 0x1000).unwrap().0);
    let memory = &mut rig.worker.ports.sessions.get_mut(rig.owner).unwrap().memory;
    for page in 0..3000 {
        memory.map_part(AT + 0x2000 * page, arena.clone(), 0x1000 * page, 0x1000).unwrap();
    }
    let (mut left, mut steps) = (AT..AT + 0x2000 * 3000, 0);
    while rig.worker.take_back(rig.owner, &mut left).is_pending() {
        assert!(std::mem::take(&mut rig.worker.goes_on));
        steps += 1;
    }
    assert_eq!((steps, rig.worker.goes_on), (2, false));
    assert!(!rig.worker.ports.sessions.get(rig.owner).unwrap().memory.has(&arena));
}

#[test]
fn an_address_handle_waits_for_what_was_posted_before_rung_for_or_not() {
    let mut rig = Rig::new();
    let write = empty_write(rig.rkey);
    rig.send.publish_send(&write);
    let mut posted = rig.worker.datagrams_posted(&[rig.qps[1], rig.qps[0]]);
    assert!(!rig.worker.are_datagrams_sent(&mut posted));
    assert_eq!(posted.len(), 2, "who comes after the one that is waited for is not looked at");
    rig.turn();
    assert!(rig.worker.are_datagrams_sent(&mut posted) && posted.is_empty());
}

const ENTERED: u64 = 1 << 32;

/// A right ends while the first QP's library does an atomic, as its header says.
fn end_while_inside(rig: &mut Rig) {
    rig.turn();
    rig.grant().unwrap();
    rig.send.entered().store(ENTERED, Ordering::SeqCst);
    let region = rig.worker.ports.grants.exposed.values().next().unwrap().regions.keys().copied().next().unwrap();
    rig.worker.ports.revoke_grants_by(region);
    rig.turn();
    let ports = &rig.worker.ports;
    assert!(ports.has_insiders(rig.owner) && !ports.has_insiders(ports.qps.get(rig.qps[0]).unwrap().session));
    assert!(ports.sessions.get(rig.owner).unwrap().memory.place(SEGMENT_AT).is_some(), "routed atomics go there, too");
    assert!(!rig.has_command());
    assert_eq!(rig.grant(), Err(VerbsError::Busy), "it comes back when it is shared again");
}

#[test]
fn an_atomic_is_waited_for() {
    let mut rig = Rig::new();
    end_while_inside(&mut rig);
    rig.turn();
    assert!(!rig.has_command());
    // It leaves, and enters with grants of other memory.
    rig.send.entered().store(ENTERED | 1, Ordering::SeqCst);
    rig.turn();
    assert!(rig.has_command() && !rig.worker.ports.has_insiders(rig.owner));
    assert!(rig.worker.ports.sessions.get(rig.owner).unwrap().memory.place(SEGMENT_AT).is_none());
    assert_eq!(rig.worker.engine.qp_status(rig.qps[0]).unwrap().state, QpState::ReadyToSend);
}

#[test]
fn who_does_an_atomic_for_too_long_loses_the_queue_pair() {
    let mut rig = Rig::new();
    end_while_inside(&mut rig);
    let late = Instant(monotonic_ns()) + ATOMIC_TIME_MAX;
    rig.worker.turn(late);
    assert!(rig.has_command() && !rig.worker.ports.has_insiders(rig.owner));
    assert_eq!(rig.worker.engine.qp_status(rig.qps[0]).unwrap().state, QpState::Error);
    assert_eq!(rig.worker.engine.qp_status(rig.qps[1]).unwrap().state, QpState::ReadyToSend);
    assert_eq!(rig.send.entered().load(Ordering::SeqCst) & ENTERED, 0, "its library finds out");
}

#[test]
fn an_atomic_of_a_queue_pair_that_ends_is_not_waited_for() {
    let mut rig = Rig::new();
    end_while_inside(&mut rig);
    rig.worker.engine.fail_direct(&mut rig.worker.ports, rig.qps[0]);
    rig.turn();
    assert!(rig.has_command() && !rig.worker.ports.has_insiders(rig.owner));
    assert_eq!(rig.send.entered().load(Ordering::SeqCst) & ENTERED, 0);
}

#[test]
fn a_pause_of_the_router_counts_for_no_atomic() {
    let mut rig = Rig::new();
    end_while_inside(&mut rig);
    let late = Instant(monotonic_ns()) + ATOMIC_TIME_MAX;
    rig.worker.ports.grants.leaving.insiders.postpone(late);
    rig.worker.turn(late);
    assert!(rig.worker.ports.has_insiders(rig.owner) && !rig.has_command());
}
