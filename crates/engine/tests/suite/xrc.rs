//! Extended reliable connections (IBTA annex A14): domains, SRQs by number, target QPs that several
//! processes have open.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;

use CompletionStatus as Status;
use SendOpcode as Op;
use VerbsError::{Busy, Exists, InvalidArgument, NoMemory, NotFound};

const COOKIE: u32 = 88;

/// An initiator, and a target of another vNIC whose SRQ is the one that `post_receive` fills.
struct Link {
    net: Net,
    from: End,
    to: End,
    srqn: u32,
}

impl Link {
    fn new() -> Self {
        let mut net = Net::new();
        let (from, mut to) = (net.end(QpType::XrcSend), net.end(QpType::XrcReceive));
        net.connect(&from, &to);
        net.connect(&to, &from);
        let (srq, srqn) = net.xrc_srq(&to);
        to.srq = Some(srq);
        Self { net, from, to, srqn }
    }

    /// Another process of the target's vNIC, with an SRQ in the same domain. Its own QP is not used.
    fn sibling(&mut self) -> (End, u32) {
        let mut end = self.net.end_at(self.to.vnic, self.to.gid, QpType::Rc, false);
        let (srq, srqn) = self.net.xrc_srq(&end);
        end.srq = Some(srq);
        (end, srqn)
    }

    fn request(&self, id: u64, opcode: Op, length: u32) -> SendRequest {
        SendRequest { remote_srqn: self.srqn, ..remote(id, opcode, &[self.from.sge(0, length)], &self.to, 0) }
    }

    fn send(&mut self, request: SendRequest) {
        self.net.post_send(&self.from, request);
        self.net.settle();
    }

    fn failed_with(&mut self, id: u64, status: Status) {
        assert_eq!(self.net.statuses(&self.from), [(id, status)]);
        assert_eq!(self.net.state(&self.from), QpState::Error);
    }

    fn event(&self, kind: AsyncEventKind) -> usize {
        self.net.world.saw(kind, EventTarget::Qp(self.to.qp))
    }

    fn destroy(&mut self, session: SessionId) -> Result<(), Refusal> {
        self.net.engine.destroy_qp(&mut self.net.world, self.net.now, session, self.to.qp)
    }
}

#[test]
fn every_operation_reaches_its_target() {
    for put_off in [false, true] {
        let mut link = Link::new();
        link.net.world.always_put_off = put_off;
        let (from, to) = (link.from, link.to);
        link.net.world.bytes(from.session, MEMORY_BASE, 8).copy_from_slice(b"abcdefgh");
        for id in 0..3 {
            link.net.post_receive(&to, id, &[to.sge(1000 + 100 * id, 100)]);
        }
        link.net.post_send(&from, link.request(1, Op::Send, 8));
        let immediate = SendRequest { immediate: 5, ..link.request(2, Op::SendWithImmediate, 8) };
        link.net.post_send(&from, immediate);
        let write = SendRequest { immediate: 6, ..link.request(3, Op::RdmaWriteWithImmediate, 8) };
        link.net.post_send(&from, write);
        for (id, opcode) in [(4, Op::RdmaWrite), (5, Op::RdmaRead), (6, Op::FetchAdd), (7, Op::CompareSwap)] {
            link.net.post_send(&from, link.request(id, opcode, 8));
        }
        link.net.settle();
        let sent: Vec<_> = link.net.statuses(&from);
        assert_eq!(sent, (1..8).map(|id| (id, Status::Success)).collect::<Vec<_>>());
        let received = link.net.polls(&to);
        assert_eq!(received.iter().map(|done| done.work_request_id).collect::<Vec<_>>(), [0, 1, 2]);
        for done in &received {
            assert_eq!((done.status, done.qp_cookie, done.qpn), (Status::Success, COOKIE, to.qpn.0));
        }
        let opcodes: Vec<_> = received.iter().map(|done| (done.opcode, done.immediate, done.byte_count)).collect();
        use CompletionOpcode::{Receive, ReceiveRdmaWithImmediate};
        assert_eq!(opcodes, [(Receive, 0, 8), (Receive, 5, 8), (ReceiveRdmaWithImmediate, 6, 8)]);
        assert_eq!(link.net.world.bytes(to.session, MEMORY_BASE + 1100, 8), b"abcdefgh");
        assert_eq!(link.net.world.bytes(to.session, MEMORY_BASE, 8), b"abcdefgh");
        assert!(link.net.world.events.is_empty());
    }
}

#[test]
fn one_connection_serves_several_processes() {
    let mut link = Link::new();
    let (from, to) = (link.from, link.to);
    let (second, number) = link.sibling();
    assert_ne!(number, link.srqn);
    for id in 0..2 {
        link.net.post_receive(&to, id, &[to.sge(1000, 100)]);
        link.net.post_receive(&second, 10 + id, &[second.sge(2000, 100)]);
    }
    link.net.world.bytes(from.session, MEMORY_BASE, 5).copy_from_slice(b"hello");
    for (id, srqn) in [(1, link.srqn), (2, number), (3, link.srqn), (4, number)] {
        let request = SendRequest { remote_srqn: srqn, ..link.request(id, Op::Send, 5) };
        link.net.post_send(&from, request);
    }
    // Keys are checked in the PD of the SRQ named.
    let write = SendRequest { remote_srqn: number, rkey: second.key, ..link.request(5, Op::RdmaWrite, 5) };
    link.net.post_send(&from, write);
    link.net.settle();
    assert_eq!(link.net.polls(&from).len(), 5);
    assert_eq!(link.net.statuses(&to), [(0, Status::Success), (1, Status::Success)]);
    assert_eq!(link.net.statuses(&second), [(10, Status::Success), (11, Status::Success)]);
    assert_eq!(link.net.world.bytes(second.session, MEMORY_BASE + 2000, 5), b"hello");
    assert_eq!(link.net.world.bytes(second.session, MEMORY_BASE, 5), b"hello");
    // The same key with the other SRQ's number: another PD.
    link.send(SendRequest { remote_srqn: link.srqn, rkey: second.key, ..link.request(6, Op::RdmaWrite, 5) });
    link.failed_with(6, Status::RemoteAccessError);
    assert_eq!(link.event(AsyncEventKind::QpAccessError), 1);
}

#[test]
fn numbers_that_name_no_srq_of_the_domain() {
    for opcode in [Op::Send, Op::RdmaWrite, Op::RdmaRead, Op::FetchAdd, Op::RdmaWriteWithImmediate] {
        for which in 0..4 {
            let mut link = Link::new();
            let (to, from) = (link.to, link.from);
            let srqn = match which {
                0 => link.srqn ^ 1,
                1 => 0,
                2 => {
                    // Of the same vNIC, but another domain.
                    let engine = &mut link.net.engine;
                    let xrcd = engine.open_xrcd(to.session, to.context, None, XrcdOpenFlags::EXISTING).unwrap();
                    let asked = SrqAttributes { max_wr: 4, max_sge: 1, limit: 0 };
                    engine.create_srq(to.session, to.pd, asked, Some((xrcd, to.cq)), 1).unwrap().1
                }
                // Of another vNIC, with the same file.
                _ => link.net.xrc_srq(&from).1,
            };
            link.send(SendRequest { remote_srqn: srqn, ..link.request(1, opcode, 8) });
            link.failed_with(1, Status::RemoteInvalidRequest);
            assert_eq!(link.net.state(&to), QpState::Error);
            assert_eq!(link.event(AsyncEventKind::QpRequestError), 1);
            assert_eq!(link.event(AsyncEventKind::QpLastWqeReached), 1);
            assert!(link.net.polls(&to).is_empty());
        }
    }
}

#[test]
fn the_syndrome_says_why() {
    let mut link = Link::new();
    link.send(SendRequest { remote_srqn: 1, ..link.request(1, Op::Send, 8) });
    assert_eq!(link.net.only(&link.from).vendor_error, Syndrome::SharedQueue as u8);
}

#[test]
fn errors_of_the_receive_come_to_the_srqs_cq() {
    // Too short, a bad key, memory gone: status of the RECV, status of the request.
    let cases = [
        (Status::LocalLengthError, Status::RemoteInvalidRequest),
        (Status::LocalProtectionError, Status::RemoteOperationError),
        (Status::LocalProtectionError, Status::RemoteOperationError),
    ];
    for (which, (receive, request)) in cases.into_iter().enumerate() {
        let mut link = Link::new();
        let (from, to) = (link.from, link.to);
        let sge = match which {
            0 => to.sge(0, 7),
            1 => Sge { lkey: from.key, ..to.sge(0, 8) },
            _ => to.sge(0, 8),
        };
        if which == 2 {
            link.net.world.gone.insert(to.session);
        }
        link.net.post_receive(&to, 9, &[sge]);
        link.send(link.request(1, Op::Send, 8));
        let done = link.net.only(&to);
        assert_eq!((done.work_request_id, done.status), (9, receive));
        assert_eq!((done.qp_cookie, done.qpn), (COOKIE, to.qpn.0));
        link.failed_with(1, request);
        assert_eq!(link.net.state(&to), QpState::Error);
    }
}

#[test]
fn a_malformed_receive() {
    let mut link = Link::new();
    let to = link.to;
    link.net.post_receive(&to, 9, &[to.sge(0, 8)]);
    link.net.world.receives.get_mut(&to.receive_queue()).unwrap().malformed = true;
    link.send(link.request(1, Op::Send, 8));
    assert_eq!(link.net.statuses(&to), [(9, Status::LocalQpOperationError)]);
    link.failed_with(1, Status::RemoteOperationError);
}

#[test]
fn an_empty_srq_makes_senders_wait() {
    let mut link = Link::new();
    let (from, to) = (link.from, link.to);
    link.send(link.request(1, Op::Send, 8));
    assert!(link.net.polls(&from).is_empty());
    assert!(link.net.world.wanted.contains(&to.receive_queue()));
    assert_eq!(link.net.engine.vnic_counters(from.vnic).unwrap().rnr_naks, 1);
    link.net.post_receive(&to, 9, &[to.sge(0, 8)]);
    link.net.settle();
    assert_eq!(link.net.statuses(&from), [(1, Status::Success)]);
    assert_eq!(link.net.statuses(&to), [(9, Status::Success)]);
    assert!(!link.net.world.wanted.contains(&to.receive_queue()));
    // Until the retries are used up.
    link.send(link.request(2, Op::Send, 8));
    while link.net.expire() {}
    link.failed_with(2, Status::RnrRetryExceeded);
    assert_eq!(link.net.state(&to), QpState::ReadyToSend);
    assert!(!link.net.world.wanted.contains(&to.receive_queue()));
}

#[test]
fn the_limit_event_of_the_srq_named() {
    let mut link = Link::new();
    let (second, number) = link.sibling();
    let (srq, to) = (second.srq.unwrap(), link.to);
    for id in 0..3 {
        link.net.post_receive(&second, id, &[second.sge(0, 8)]);
        link.net.post_receive(&to, id, &[to.sge(0, 8)]);
    }
    link.net.engine.modify_srq(&mut link.net.world, second.session, srq, 2).unwrap();
    link.send(link.request(1, Op::Send, 8));
    link.send(link.request(2, Op::Send, 8));
    assert!(link.net.world.events.is_empty());
    for id in 3..5 {
        link.send(SendRequest { remote_srqn: number, ..link.request(id, Op::Send, 8) });
    }
    assert_eq!(link.net.world.saw(AsyncEventKind::SrqLimitReached, EventTarget::Srq(srq)), 1);
    assert_eq!(link.net.world.events.len(), 1);
}

#[test]
fn wrong_ends_do_not_answer() {
    // An RC QP that names a target, a target that is connected to somebody else, an initiator at both ends.
    let mut net = Net::new();
    let (rc, target, other) = (net.end(QpType::Rc), net.end(QpType::XrcReceive), net.end(QpType::XrcSend));
    let wrong = net.end(QpType::XrcSend);
    net.connect(&rc, &target);
    net.connect(&target, &other);
    net.connect(&other, &wrong);
    net.connect(&wrong, &target);
    for end in [&rc, &other, &wrong] {
        net.post_send(end, request(1, Op::Send, &[end.sge(0, 8)]));
    }
    net.settle();
    while net.expire() {}
    for end in [&rc, &other, &wrong] {
        assert_eq!(net.statuses(end), [(1, Status::RetryExceeded)]);
    }
    assert_eq!(net.state(&target), QpState::ReadyToSend);
}

#[test]
fn a_target_that_comes_late_wakes_its_initiator() {
    let mut net = Net::new();
    let (from, mut to) = (net.end(QpType::XrcSend), net.end(QpType::XrcReceive));
    let (srq, number) = net.xrc_srq(&to);
    to.srq = Some(srq);
    net.connect(&from, &to);
    net.post_receive(&to, 9, &[to.sge(0, 8)]);
    net.post_send(&from, SendRequest { remote_srqn: number, ..request(1, Op::Send, &[from.sge(0, 8)]) });
    net.settle();
    assert!(net.polls(&from).is_empty());
    net.init(&to);
    net.rtr(&to, &from);
    net.settle();
    assert_eq!(net.statuses(&from), [(1, Status::Success)], "a target in RTR receives");
    assert_eq!(net.world.saw(AsyncEventKind::CommunicationEstablished, EventTarget::Qp(to.qp)), 1);
}

#[test]
fn rights_and_depths_of_the_target() {
    let attributes = |access| QpAttributes { access: Access(access), ..Default::default() };
    for opcode in [Op::RdmaWrite, Op::RdmaRead, Op::FetchAdd, Op::RdmaWriteWithImmediate] {
        let mut link = Link::new();
        link.net.modify(&link.to, &attributes(1), QpAttributeMask::ACCESS_FLAGS).unwrap();
        link.send(link.request(1, opcode, 8));
        link.failed_with(1, Status::RemoteInvalidRequest);
    }
    let mut link = Link::new();
    link.send(SendRequest { rkey: link.to.key ^ 1, ..link.request(1, Op::RdmaRead, 8) });
    link.failed_with(1, Status::RemoteAccessError);
    let mut link = Link::new();
    link.send(SendRequest { remote_address: MEMORY_BASE + 4, ..link.request(1, Op::FetchAdd, 8) });
    link.failed_with(1, Status::RemoteInvalidRequest);
}

#[test]
fn the_targets_states() {
    let mut link = Link::new();
    let (from, to) = (link.from, link.to);
    link.net.to(&to, QpState::SqDrain).unwrap();
    link.net.post_receive(&to, 1, &[to.sge(0, 8)]);
    link.send(link.request(1, Op::Send, 8));
    assert_eq!((link.net.polls(&to).len(), link.net.polls(&from).len()), (1, 1));
    link.net.to(&to, QpState::Error).unwrap();
    assert_eq!(link.event(AsyncEventKind::QpLastWqeReached), 1);
    link.net.post_receive(&to, 2, &[to.sge(0, 8)]);
    link.net.settle();
    assert!(link.net.polls(&to).is_empty(), "the RECVs of the SRQ are not the target's to flush");
    link.net.to(&to, QpState::Reset).unwrap();
    link.net.connect(&to, &from);
    link.send(link.request(2, Op::Send, 8));
    assert_eq!(link.net.statuses(&to), [(2, Status::Success)]);
}

// ---- what is destroyed while in use

#[test]
fn an_srq_that_is_destroyed_under_a_message() {
    for opcode in [Op::Send, Op::RdmaWriteWithImmediate, Op::RdmaWrite, Op::RdmaRead, Op::FetchAdd] {
        let mut link = Link::new();
        let (from, to) = (link.from, link.to);
        link.net.world.always_put_off = true;
        link.net.post_receive(&to, 1, &[to.sge(0, 64)]);
        link.net.post_send(&from, link.request(1, opcode, 8));
        link.net.work();
        assert_eq!(link.net.world.pending.len(), 1);
        // It waits for a copy into its own RECVs, nothing else.
        let destroy = |link: &mut Link| link.net.engine.destroy_srq(to.session, to.srq.unwrap());
        let refused = if opcode == Op::Send { Err(Refusal::InFlight) } else { Ok(()) };
        assert_eq!(destroy(&mut link), refused);
        link.net.settle();
        link.failed_with(1, Status::RemoteInvalidRequest);
        if opcode == Op::Send {
            assert_eq!(destroy(&mut link), Ok(()));
        }
        assert!(link.net.polls(&to).is_empty(), "nobody asks for its RECVs any more");
        assert_eq!(link.net.state(&to), QpState::Error);
        assert_eq!(link.net.engine.destroy_cq(to.session, to.cq), Ok(()));
    }
}

#[test]
fn an_srq_that_is_destroyed_between_chunks() {
    let mut link = Link::new();
    let (from, to) = (link.from, link.to);
    let length = 2 * CHUNK_BYTES_MAX as u32;
    link.net.post_receive(&to, 1, &[to.sge(0, length)]);
    link.net.post_send(&from, link.request(1, Op::Send, length));
    link.net.engine.run(&mut link.net.world, link.net.now, from.qp, 1);
    assert_eq!(link.net.world.copies, 1);
    link.net.engine.destroy_srq(to.session, to.srq.unwrap()).unwrap();
    link.net.settle();
    link.failed_with(1, Status::RemoteInvalidRequest);
    assert_eq!(link.net.world.copies, 1);
}

#[test]
fn an_srq_that_is_destroyed_while_a_sender_waits() {
    let mut link = Link::new();
    link.send(link.request(1, Op::Send, 8));
    assert_eq!(link.net.engine.destroy_srq(link.to.session, link.to.srq.unwrap()), Ok(()));
    assert!(link.net.polls(&link.from).is_empty());
    assert!(link.net.expire());
    link.failed_with(1, Status::RemoteInvalidRequest);
    assert_eq!(link.net.engine.poll_timeout(), None);
}

#[test]
fn the_srqs_process_dies() {
    let mut link = Link::new();
    let from = link.from;
    let (second, number) = link.sibling();
    link.net.post_receive(&second, 1, &[second.sge(0, 8)]);
    link.net.world.always_put_off = true;
    link.net.post_send(&from, SendRequest { remote_srqn: number, ..link.request(1, Op::Send, 8) });
    link.net.work();
    assert_eq!(link.net.engine.copies_in_flight(second.session), 1, "its memory, another's QP");
    link.net.die(second.session);
    assert_eq!(link.net.engine.copies_in_flight(from.session), 0);
    link.net.settle();
    link.failed_with(1, Status::RemoteInvalidRequest);
    // The target goes on for the others.
    let (to, from) = (link.to, link.from);
    assert_eq!(link.net.state(&to), QpState::Error);
    for end in [&to, &from] {
        link.net.to(end, QpState::Reset).unwrap();
    }
    link.net.connect(&to, &from);
    link.net.connect(&from, &to);
    link.net.post_receive(&to, 2, &[to.sge(0, 8)]);
    link.send(link.request(2, Op::Send, 8));
    assert_eq!(link.net.statuses(&to), [(2, Status::Success)]);
}

#[test]
fn a_left_over_receive_is_used_or_flushed() {
    for same in [true, false] {
        let mut link = Link::new();
        let (from, to) = (link.from, link.to);
        let (second, number) = link.sibling();
        link.net.post_receive(&second, 1, &[second.sge(0, 8)]);
        link.net.post_receive(&to, 2, &[to.sge(0, 8)]);
        link.net.world.always_put_off = true;
        link.net.post_send(&from, SendRequest { remote_srqn: number, ..link.request(1, Op::Send, 8) });
        link.net.work();
        // The initiator forgets the message half way.
        assert_eq!(link.net.to(&from, QpState::Reset), Err(Refusal::InFlight));
        link.net.settle();
        link.net.to(&from, QpState::Reset).unwrap();
        link.net.connect(&from, &to);
        let srqn = if same { number } else { link.srqn };
        link.send(SendRequest { remote_srqn: srqn, ..link.request(2, Op::Send, 8) });
        assert_eq!(link.net.statuses(&from), [(2, Status::Success)]);
        if same {
            assert_eq!(link.net.statuses(&second), [(1, Status::Success)]);
        } else {
            assert_eq!(link.net.statuses(&second), [(1, Status::WorkRequestFlushed)]);
            assert_eq!(link.net.statuses(&to), [(2, Status::Success)]);
        }
    }
}

#[test]
fn a_full_cq_of_an_srq_stops_the_target() {
    let mut link = Link::new();
    let (from, to) = (link.from, link.to);
    link.net.world.cq_room.insert(to.cq, 0);
    link.net.post_receive(&to, 1, &[to.sge(0, 8)]);
    link.send(link.request(1, Op::Send, 8));
    assert_eq!(link.net.world.saw(AsyncEventKind::CqError, EventTarget::Cq(to.cq)), 1);
    assert_eq!(link.event(AsyncEventKind::QpFatal), 1);
    assert_eq!(link.net.state(&to), QpState::Error);
    assert_eq!(link.net.statuses(&from), [(1, Status::Success)], "the bytes had arrived");
}

// ---- domains

#[test]
fn domains_by_file() {
    let mut net = Net::new();
    let a = net.end(QpType::Rc);
    let b = net.end_at(a.vnic, a.gid, QpType::Rc, false);
    let stranger = net.end(QpType::Rc);
    let engine = &mut net.engine;
    let (one, two) = (FileIdentity { device: 1, inode: 1 }, FileIdentity { device: 1, inode: 2 });
    let mut open = |end: &End, file, flags| engine.open_xrcd(end.session, end.context, file, flags);
    assert_eq!(open(&a, Some(one), XrcdOpenFlags::EXISTING), Err(NotFound));
    let first = open(&a, Some(one), XrcdOpenFlags::CREATE_NEW).unwrap();
    assert_eq!(open(&b, Some(one), XrcdOpenFlags::CREATE_NEW), Err(Exists));
    let second = open(&b, Some(one), XrcdOpenFlags::EXISTING).unwrap();
    let third = open(&b, Some(one), XrcdOpenFlags::CREATE).unwrap();
    assert_eq!(open(&b, Some(two), XrcdOpenFlags::EXISTING), Err(NotFound));
    assert_eq!(open(&stranger, Some(one), XrcdOpenFlags::EXISTING), Err(NotFound), "files are those of a vNIC");
    let nameless = open(&a, None, XrcdOpenFlags::CREATE).unwrap();
    assert_eq!(net.engine.vnic_usage(a.vnic).unwrap().xrcds, 4);
    assert_eq!(net.engine.objects_of(b.session).xrcds, [second, third]);
    assert_eq!(net.engine.close_context(a.session, a.context), Err(Busy));
    assert_eq!(net.engine.close_xrcd(b.session, first), Err(NotFound));
    assert_eq!(net.engine.close_xrcd(a.session, first), Ok(()));
    assert_eq!(net.engine.close_xrcd(a.session, first), Err(NotFound));
    assert_eq!(net.engine.close_xrcd(a.session, nameless), Ok(()));
    // It lives on with the others, and goes with the last.
    let open = |engine: &mut Engine, flags| engine.open_xrcd(a.session, a.context, Some(one), flags);
    let again = open(&mut net.engine, XrcdOpenFlags::EXISTING).unwrap();
    for (end, xrcd) in [(&a, again), (&b, second), (&b, third)] {
        net.engine.close_xrcd(end.session, xrcd).unwrap();
    }
    assert_eq!(open(&mut net.engine, XrcdOpenFlags::EXISTING), Err(NotFound));
    assert_eq!(net.engine.vnic_usage(a.vnic).unwrap().xrcds, 0);
    let wrong = net.engine.open_xrcd(b.session, a.context, Some(one), XrcdOpenFlags::CREATE);
    assert_eq!(wrong, Err(NotFound));
}

#[test]
fn what_stands_on_a_domain_and_limits() {
    let mut net = Net::new();
    let limits = VnicLimits { xrcd_count_max: 1, qp_count_max: 2, ..VnicLimits::default() };
    let vnic = net.engine.create_vnic(NetworkId(1), gid(200), limits).unwrap();
    let e = net.end_at(vnic, gid(200), QpType::XrcReceive, false);
    let xrcd = net.xrcd(&e);
    assert_eq!(net.engine.open_xrcd(e.session, e.context, None, XrcdOpenFlags::CREATE), Err(NoMemory));
    let (srq, number) = net.xrc_srq(&e);
    assert!(number > 0 && number <= Qpn::MASK);
    let engine = &mut net.engine;
    assert_eq!(engine.destroy_cq(e.session, e.cq), Err(Busy));
    assert_eq!(engine.open_qp(e.session, xrcd, e.qpn), Ok(e.qp), "the same process, once more");
    assert_eq!(engine.open_qp(e.session, xrcd, e.qpn), Err(NoMemory), "each counts");
    assert_eq!(engine.qp_openers(e.qp), [e.session, e.session]);
    assert_eq!(engine.vnic_usage(vnic).unwrap().qps, 2);
    for left in [2, 1] {
        assert_eq!(engine.close_xrcd(e.session, xrcd), Err(Busy));
        assert_eq!(engine.qp_openers(e.qp).len(), left);
        engine.destroy_qp(&mut net.world, net.now, e.session, e.qp).unwrap();
    }
    assert_eq!(engine.query_qp(e.session, e.qp), Err(NotFound));
    assert_eq!(engine.close_xrcd(e.session, xrcd), Err(Busy));
    engine.destroy_srq(e.session, srq).unwrap();
    engine.close_xrcd(e.session, xrcd).unwrap();
    engine.destroy_cq(e.session, e.cq).unwrap();
    engine.destroy_session(&mut net.world, net.now, e.session);
    assert_eq!(engine.vnic_usage(vnic), Some(Usage::default()));
}

#[test]
fn parts_of_srqs_and_qps() {
    let mut net = Net::new();
    let e = net.end(QpType::XrcReceive);
    let xrcd = net.xrcd(&e);
    let stranger = net.end(QpType::XrcSend);
    let (srq, _) = net.xrc_srq(&e);
    let engine = &mut net.engine;
    let other_context = engine.open_context(e.session).unwrap();
    let other_cq = engine.create_cq(e.session, other_context, 4).unwrap();
    let asked = SrqAttributes { max_wr: 4, max_sge: 1, limit: 0 };
    let mut create = |xrcd, cq| engine.create_srq(e.session, e.pd, asked, Some((xrcd, cq)), 0).map(|_| ());
    assert_eq!(create(xrcd, stranger.cq), Err(NotFound));
    assert_eq!(create(xrcd, other_cq), Err(InvalidArgument));
    assert_eq!(create(XrcdId { index: 99, generation: 0 }, e.cq), Err(NotFound));
    assert_eq!(engine.create_srq(e.session, e.pd, asked, None, 0).unwrap().1, 0, "a basic one has no number");

    let none = QpInit {
        pd: None,
        qp_type: QpType::XrcReceive,
        send_cq: None,
        recv_cq: None,
        srq: None,
        xrcd: Some(xrcd),
        capabilities: capabilities(),
        all_signaled: false,
        block_own_multicast: false,
        cookie: 0,
    };
    let (pd, cq) = (Some(e.pd), Some(e.cq));
    let rc = QpInit { pd, qp_type: QpType::Rc, send_cq: cq, recv_cq: cq, xrcd: None, ..none };
    let initiator = QpInit { qp_type: QpType::XrcSend, recv_cq: None, ..rc };
    let wrong = [
        QpInit { xrcd: None, ..none },
        QpInit { pd, ..none },
        QpInit { send_cq: cq, ..none },
        QpInit { recv_cq: cq, ..none },
        QpInit { srq: Some(srq), ..none },
        QpInit { xrcd: Some(xrcd), ..rc },
        QpInit { pd: None, ..rc },
        QpInit { recv_cq: None, ..rc },
        // An SRQ for XRC serves target QPs only.
        QpInit { srq: Some(srq), ..rc },
        QpInit { recv_cq: cq, ..initiator },
        QpInit { srq: Some(srq), ..initiator },
        QpInit { xrcd: Some(xrcd), ..initiator },
        QpInit { send_cq: None, ..initiator },
        QpInit { pd: None, ..initiator },
    ];
    let before = engine.usage();
    for init in wrong {
        assert_eq!(engine.create_qp(e.session, init), Err(InvalidArgument), "{init:?}");
    }
    let foreign = QpInit { xrcd: Some(XrcdId { index: 99, generation: 0 }), ..none };
    assert_eq!(engine.create_qp(e.session, foreign), Err(NotFound));
    assert_eq!(engine.create_qp(stranger.session, none), Err(NotFound));
    assert_eq!(engine.usage(), before);
    assert_eq!(engine.create_qp(e.session, none).unwrap().2, QpCapabilities::default(), "it has no queues");
    let granted = engine.create_qp(e.session, initiator).unwrap().2;
    assert_eq!((granted.max_send_wr, granted.max_recv_wr, granted.max_recv_sge), (64, 0, 0));
}

#[test]
fn numbers_are_unpredictable_and_unique() {
    let mut net = Net::new();
    let e = net.end(QpType::XrcReceive);
    let mut numbers: Vec<u32> = (0..1000).map(|_| net.xrc_srq(&e).1).collect();
    assert!(numbers.iter().all(|number| *number > 0 && *number <= Qpn::MASK));
    assert!(numbers.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count() < 3);
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 1000);
}

// ---- a target QP and its openers

#[test]
fn openers() {
    let mut link = Link::new();
    let to = link.to;
    let (second, _) = link.sibling();
    let xrcd = link.net.xrcd(&second);
    let engine = &mut link.net.engine;
    assert_eq!(engine.qp_openers(to.qp), [to.session]);
    assert_eq!(engine.qp_openers(link.from.qp), [link.from.session]);
    assert!(engine.qp_openers(QpId { index: 99, generation: 0 }).is_empty());
    assert_eq!(engine.query_qp(second.session, to.qp), Err(NotFound));
    // QPs that can't be opened: unknown, not a target, of another domain.
    for qpn in [Qpn(0), Qpn(5), link.from.qpn, second.qpn] {
        assert_eq!(engine.open_qp(second.session, xrcd, qpn), Err(InvalidArgument));
    }
    let nameless = engine.open_xrcd(second.session, second.context, None, XrcdOpenFlags::CREATE).unwrap();
    assert_eq!(engine.open_qp(second.session, nameless, to.qpn), Err(InvalidArgument));
    assert_eq!(engine.open_qp(to.session, xrcd, to.qpn), Err(NotFound), "another's opened domain");
    assert_eq!(engine.open_qp(second.session, xrcd, to.qpn), Ok(to.qp));
    assert_eq!(engine.qp_openers(to.qp), [to.session, second.session]);
    assert_eq!(engine.objects_of(second.session).qps, [to.qp.min(second.qp), to.qp.max(second.qp)]);
    // Each can query and modify it.
    let opened = End { qp: to.qp, ..second };
    assert_eq!(link.net.state(&opened), QpState::ReadyToSend);
    link.net.to(&opened, QpState::Error).unwrap();
    assert_eq!(link.net.state(&to), QpState::Error);
    // The first leaves, the second keeps it; the last one ends it.
    assert_eq!(link.destroy(to.session), Ok(()));
    assert_eq!(link.destroy(to.session), Err(Refusal::Error(NotFound)));
    assert_eq!(link.net.engine.query_qp(to.session, to.qp), Err(NotFound));
    assert_eq!(link.net.state(&opened), QpState::Error);
    assert_eq!(link.net.engine.qp_openers(to.qp), [second.session]);
    assert_eq!(link.net.engine.close_xrcd(second.session, xrcd), Err(Busy));
    assert_eq!(link.destroy(second.session), Ok(()));
    assert!(link.net.engine.qp_openers(to.qp).is_empty());
    assert_eq!(link.net.engine.open_qp(second.session, xrcd, to.qpn), Err(InvalidArgument));
}

#[test]
fn the_maker_dies_and_others_keep_the_target() {
    for in_flight in [false, true] {
        let mut link = Link::new();
        let (from, to) = (link.from, link.to);
        let (second, number) = link.sibling();
        let xrcd = link.net.xrcd(&second);
        link.net.engine.open_qp(second.session, xrcd, to.qpn).unwrap();
        link.net.post_receive(&second, 1, &[second.sge(0, 8)]);
        link.net.world.always_put_off = in_flight;
        link.net.post_send(&from, SendRequest { remote_srqn: number, ..link.request(1, Op::Send, 8) });
        if in_flight {
            link.net.work();
            assert_eq!(link.net.engine.copies_in_flight(to.session), 1);
        }
        link.net.engine.destroy_session(&mut link.net.world, link.net.now, to.session);
        assert_eq!(link.net.engine.copies_in_flight(to.session), 0);
        link.net.settle();
        assert_eq!(link.net.statuses(&from), [(1, Status::Success)], "not even the copy in flight was disturbed");
        assert_eq!(link.net.statuses(&second), [(1, Status::Success)]);
        assert_eq!(link.net.engine.qp_openers(to.qp), [second.session]);
        assert_eq!(link.net.engine.vnic_usage(to.vnic).unwrap().qps, 2, "the sibling's own and this one");
        // The session's index is used again by somebody who has nothing to do with it.
        let next = link.net.end_at(to.vnic, to.gid, QpType::Rc, false);
        assert_eq!(next.session.index, to.session.index);
        assert_eq!(link.net.engine.objects_of(next.session).qps, [next.qp]);
        assert_eq!(link.net.engine.query_qp(next.session, to.qp), Err(NotFound));
        // The last one dies: nothing is left.
        link.net.engine.destroy_session(&mut link.net.world, link.net.now, second.session);
        link.net.engine.destroy_session(&mut link.net.world, link.net.now, next.session);
        assert_eq!(link.net.engine.vnic_usage(to.vnic), Some(Usage::default()));
    }
}

#[test]
fn the_last_opener_waits_for_copies_in_flight() {
    let mut link = Link::new();
    let (from, to) = (link.from, link.to);
    let (second, _) = link.sibling();
    let xrcd = link.net.xrcd(&second);
    link.net.engine.open_qp(second.session, xrcd, to.qpn).unwrap();
    link.net.post_receive(&to, 1, &[to.sge(0, 8)]);
    link.net.world.always_put_off = true;
    link.net.post_send(&from, link.request(1, Op::Send, 8));
    link.net.work();
    assert_eq!(link.destroy(second.session), Ok(()), "not the last one");
    assert_eq!(link.destroy(to.session), Err(Refusal::InFlight));
    assert_eq!(link.net.engine.open_qp(second.session, xrcd, to.qpn), Err(InvalidArgument), "it is going");
    link.net.settle();
    assert_eq!(link.destroy(to.session), Ok(()));
    while link.net.expire() {}
    link.failed_with(1, Status::RetryExceeded);
    // The SRQ can serve another target; the RECV in hand went with the QP.
    assert_eq!(link.net.engine.destroy_srq(to.session, to.srq.unwrap()), Ok(()));
}

#[test]
fn an_opener_that_dies_in_the_middle_of_a_reset() {
    let mut link = Link::new();
    let (from, to) = (link.from, link.to);
    let (second, _) = link.sibling();
    let xrcd = link.net.xrcd(&second);
    link.net.engine.open_qp(second.session, xrcd, to.qpn).unwrap();
    let opened = End { qp: to.qp, ..second };
    link.net.post_receive(&to, 1, &[to.sge(0, 8)]);
    link.net.world.always_put_off = true;
    link.net.post_send(&from, link.request(1, Op::Send, 8));
    link.net.work();
    assert_eq!(link.net.to(&opened, QpState::Reset), Err(Refusal::InFlight));
    link.net.engine.destroy_session(&mut link.net.world, link.net.now, second.session);
    link.net.settle();
    // The side that is left can finish it.
    assert_eq!(link.net.to(&to, QpState::Reset), Ok(QpState::Reset));
    assert_eq!(link.net.statuses(&to), [(1, Status::WorkRequestFlushed)], "the RECV in hand");
    link.net.connect(&to, &from);
    link.net.post_receive(&to, 2, &[to.sge(0, 8)]);
    while link.net.expire() {}
    link.net.settle();
    assert_eq!(link.net.statuses(&from), [(1, Status::Success)]);
    assert_eq!(link.net.statuses(&to), [(2, Status::Success)]);
}

#[test]
fn a_target_that_goes_gives_back_what_is_not_its_own() {
    for dies in [false, true] {
        let mut link = Link::new();
        let (from, to) = (link.from, link.to);
        let (second, number) = link.sibling();
        link.net.post_receive(&second, 1, &[second.sge(0, 8)]);
        link.net.world.always_put_off = true;
        link.net.post_send(&from, SendRequest { remote_srqn: number, ..link.request(1, Op::Send, 8) });
        link.net.work();
        if dies {
            link.net.die(to.session);
        } else {
            assert_eq!(link.destroy(to.session), Err(Refusal::InFlight));
            link.net.settle();
            assert_eq!(link.destroy(to.session), Ok(()));
        }
        link.net.settle();
        assert_eq!(link.net.statuses(&second), [(1, Status::WorkRequestFlushed)]);
        while link.net.expire() {}
        link.failed_with(1, Status::RetryExceeded);
    }
}

#[test]
fn a_target_for_somebody_else_is_not_blamed() {
    let mut link = Link::new();
    let (from, to) = (link.from, link.to);
    let length = 2 * CHUNK_BYTES_MAX as u32;
    link.net.post_receive(&to, 1, &[to.sge(0, length)]);
    link.net.post_send(&from, link.request(1, Op::Send, length));
    link.net.engine.run(&mut link.net.world, link.net.now, from.qp, 1);
    // Half way the target turns to another initiator, and the SRQ goes.
    link.net.to(&to, QpState::Reset).unwrap();
    assert_eq!(link.net.statuses(&to), [(1, Status::WorkRequestFlushed)]);
    let other = link.net.end(QpType::XrcSend);
    link.net.connect(&to, &other);
    link.net.connect(&other, &to);
    link.net.engine.destroy_srq(to.session, to.srq.unwrap()).unwrap();
    link.net.settle();
    while link.net.expire() {}
    link.failed_with(1, Status::RetryExceeded);
    assert_eq!(link.net.state(&to), QpState::ReadyToSend);
}

#[test]
fn a_reset_that_its_opener_did_not_live_to_finish() {
    let mut link = Link::new();
    let (from, to) = (link.from, link.to);
    let (second, number) = link.sibling();
    let xrcd = link.net.xrcd(&second);
    link.net.engine.open_qp(second.session, xrcd, to.qpn).unwrap();
    let opened = End { qp: to.qp, ..second };
    link.net.post_receive(&second, 1, &[second.sge(0, 8)]);
    link.net.world.always_put_off = true;
    link.net.post_send(&from, SendRequest { remote_srqn: number, ..link.request(1, Op::Send, 8) });
    link.net.work();
    assert_eq!(link.net.to(&to, QpState::Reset), Err(Refusal::InFlight));
    link.net.die(to.session);
    assert_eq!(link.net.state(&opened), QpState::Error);
    link.net.settle();
    assert_eq!(link.net.statuses(&second), [(1, Status::WorkRequestFlushed)]);
    assert_eq!(link.net.to(&opened, QpState::Reset), Ok(QpState::Reset));
    while link.net.expire() {}
    link.failed_with(1, Status::RetryExceeded);
}
