//! Extended reliable connections: domains, shared receive queues by number, targets that several processes have open.
use crate::common::*;
use freeflow_protocol::library::{Handle, Reply, Request, XrcQueue};
use freeflow_shm::layout::QueueShape;
use freeflow_shm::{RequestProducer, Segment, SendDescriptor};
use freeflow_verbs::{
    Access, CompletionStatus, FileIdentity, QpAttributeMask, QpAttributes, QpCapabilities, QpState, QpType, SendOpcode,
    Sge, SrqAttributes, VerbsError, XrcdOpenFlags,
};
use std::os::fd::AsFd;

const FILE: FileIdentity = FileIdentity { device: 1, inode: 2 };

fn open_xrcd(client: &Client, create: bool) -> Handle {
    let request = Request::OpenXrcd {
        context: client.context,
        file: Some(FILE),
        flags: XrcdOpenFlags { create, exclusive: false },
    };
    let reply = client.ask(&request);
    let Reply::Xrcd { xrcd } = reply else { panic!("{reply:?}") };
    xrcd
}

fn target_request(client: &mut Client, xrcd: Option<Handle>) -> Request {
    Request::CreateQp {
        qp_type: QpType::XrcReceive,
        pd: None,
        send_cq: None,
        recv_cq: None,
        srq: None,
        xrcd,
        capabilities: CAPABILITIES,
        all_signaled: false,
        block_own_multicast: false,
        cookie: client.next_cookie(),
        connection: None,
    }
}

struct Target {
    handle: Handle,
    qpn: u32,
    cookie: u32,
}

fn create_target(client: &mut Client, xrcd: Handle) -> Target {
    let request = target_request(client, Some(xrcd));
    let Request::CreateQp { cookie, .. } = request else { unreachable!() };
    let (reply, fds) = client.ask_fds(&request);
    let Reply::Qp { qp, qpn, capabilities, segment_bytes: 0 } = reply else { panic!("{reply:?}") };
    assert_eq!((capabilities, fds.len()), (QpCapabilities::default(), 0));
    Target { handle: qp, qpn, cookie }
}

fn open_target(client: &mut Client, xrcd: Handle, qpn: u32) -> Target {
    let cookie = client.next_cookie();
    let (reply, fds) = client.ask_fds(&Request::OpenQp { xrcd, qpn, cookie });
    let Reply::Qp { qp, qpn: same, segment_bytes: 0, .. } = reply else { panic!("{reply:?}") };
    assert_eq!((same, fds.len()), (qpn, 0));
    Target { handle: qp, qpn, cookie }
}

struct XrcSrq {
    handle: Handle,
    number: u32,
    cookie: u32,
    ring: RequestProducer,
}

fn create_srq(client: &mut Client, xrcd: Handle, cq: &Cq) -> XrcSrq {
    let cookie = client.next_cookie();
    let attributes = SrqAttributes { max_wr: 8, max_sge: 1, limit: 0 };
    let xrc = Some(XrcQueue { xrcd, cq: cq.handle });
    let (reply, fds) = client.ask_fds(&Request::CreateSrq { pd: client.pd, attributes, cookie, xrc });
    let Reply::Srq { srq, number, attributes, segment_bytes } = reply else { panic!("{reply:?}") };
    let segment = Segment::map(fds[0].as_fd(), segment_bytes as usize).unwrap();
    let shape = QueueShape::receive(attributes.max_wr, attributes.max_sge);
    XrcSrq { handle: srq, number, cookie, ring: RequestProducer::new(segment.into(), 0, shape) }
}

fn post_receive(client: &Client, srq: &mut XrcSrq, wr_id: u64, sges: &[Sge]) {
    srq.ring.publish_receive(wr_id, sges);
    if srq.ring.must_ring_receive() && client.session.ring(srq.cookie) {
        client.kick.kick();
    }
}

/// Reset to RTS: the initiator's half of RC, or the target's.
fn connect(client: &Client, qp: Handle, peer: freeflow_verbs::Gid, qpn: u32, is_target: bool) {
    use QpAttributeMask as M;
    let (of_targets, of_initiators) =
        (M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER, M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC);
    let steps = [
        (QpState::Init, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
        (
            QpState::ReadyToReceive,
            M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | if is_target { of_targets } else { 0 },
        ),
        (QpState::ReadyToSend, M::SQ_PSN | M::TIMEOUT | if is_target { 0 } else { of_initiators }),
    ];
    for (state, mask) in steps {
        let attributes = QpAttributes {
            state,
            access: Access(0xf),
            port: 1,
            dest_qpn: qpn,
            address: address(peer),
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 14,
            retry_count: 1,
            rnr_retry: 7,
            ..QpAttributes::default()
        };
        let mask = QpAttributeMask(M::STATE | mask);
        assert_eq!(client.ask(&Request::ModifyQp { qp, attributes, mask }), Reply::QpModified { state });
    }
}

fn query(client: &Client, target: &Target) -> QpState {
    let reply = client.ask(&Request::QueryQp { qp: target.handle });
    let Reply::QpAttributes(attributes) = reply else { panic!("{reply:?}") };
    attributes.state
}

/// A sender, and a vNIC of two processes: the first made the target, the second has it open and receives.
struct Net {
    host: Host,
    sender: Client,
    sender_cq: Cq,
    sender_qp: Qp,
    first: Client,
    made: Target,
    second: Client,
    opened: Target,
    cq: Cq,
    srq: XrcSrq,
    xrcd: Handle,
}

impl Net {
    fn new() -> Self {
        let host = Host::new();
        let (mut sender, mut first, mut second) = (host.client("a"), host.client("b"), host.client("b"));
        let first_xrcd = open_xrcd(&first, true);
        let made = create_target(&mut first, first_xrcd);
        let xrcd = open_xrcd(&second, false);
        let opened = open_target(&mut second, xrcd, made.qpn);
        let cq = second.create_cq(16, None);
        let srq = create_srq(&mut second, xrcd, &cq);
        let sender_cq = sender.create_cq(16, None);
        let sender_qp = sender.create_qp(QpType::XrcSend, &sender_cq);
        connect(&sender, sender_qp.handle, first.gid(), made.qpn, false);
        connect(&first, made.handle, sender.gid(), sender_qp.qpn, true);
        // A change of one opener is seen by the other.
        assert_eq!(query(&second, &opened), QpState::ReadyToSend);
        Self { host, sender, sender_cq, sender_qp, first, made, second, opened, cq, srq, xrcd }
    }

    fn send(&mut self, sges: &[Sge]) {
        let request = SendDescriptor { remote_srqn: self.srq.number, ..request(SendOpcode::Send, sges) };
        self.sender.post_send(&mut self.sender_qp, &request);
    }
}

#[test]
fn a_message_reaches_the_queue_it_names_whoever_made_the_target() {
    let mut net = Net::new();
    let (from, to) = (net.sender.memory(8, true), net.second.memory(8, false));
    from.fill(8, 3);
    post_receive(&net.second, &mut net.srq, 11, &[to.sge(0, 64)]);
    net.send(&[from.sge(0, 64)]);
    let received = net.cq.wait();
    assert_eq!((received.status, received.work_request_id), (CompletionStatus::Success, 11));
    assert_eq!((received.qpn, received.qp_cookie), (net.made.qpn, net.srq.cookie));
    assert_eq!(net.sender_cq.wait().status, CompletionStatus::Success);
    assert!(to.is_filled(8, 3));
}

#[test]
fn every_process_that_has_it_open_hears_of_it() {
    let mut net = Net::new();
    let again = open_target(&mut net.second, net.xrcd, net.made.qpn);
    let from = net.sender.memory(8, true);
    let sges = [from.sge(0, 8)];
    let write = SendDescriptor { rkey: 1, remote_srqn: net.srq.number, ..request(SendOpcode::RdmaWrite, &sges) };
    net.sender.post_send(&mut net.sender_qp, &write);
    assert_eq!(net.sender_cq.wait().status, CompletionStatus::RemoteAccessError);
    // IBV_EVENT_QP_ACCESS_ERR, with each one's own cookie, once for each opening.
    assert_eq!(read_event(&net.first.async_events), Some((3, net.made.cookie)));
    assert_eq!(read_event(&net.second.async_events), Some((3, net.opened.cookie)));
    assert_eq!(read_event(&net.second.async_events), Some((3, again.cookie)));
    assert_eq!(query(&net.second, &again), QpState::Error);
    assert_eq!(net.second.ask(&Request::DestroyQp { qp: again.handle }), Reply::Done);
    assert_eq!(net.second.refused(&Request::DestroyQp { qp: again.handle }), VerbsError::NotFound);
    assert_eq!(query(&net.second, &net.opened), QpState::Error);
    assert_eq!(net.host.status().qp_count, 3);
}

#[test]
fn it_goes_with_its_last_opener() {
    let mut net = Net::new();
    let (second, xrcd) = (&net.second, net.xrcd);
    assert_eq!(second.refused(&Request::CloseXrcd { xrcd }), VerbsError::Busy);
    assert_eq!(net.first.ask(&Request::DestroyQp { qp: net.made.handle }), Reply::Done);
    assert_eq!(net.first.refused(&Request::QueryQp { qp: net.made.handle }), VerbsError::NotFound);
    assert_eq!(query(second, &net.opened), QpState::ReadyToSend);
    assert_eq!(second.ask(&Request::DestroyQp { qp: net.opened.handle }), Reply::Done);
    let (qpn, cookie) = (net.made.qpn, net.second.next_cookie());
    assert_eq!(net.second.refused(&Request::OpenQp { xrcd, qpn, cookie }), VerbsError::InvalidArgument);
    assert_eq!(net.second.refused(&Request::CloseXrcd { xrcd }), VerbsError::Busy);
    assert_eq!(net.second.refused(&Request::DestroyCq { cq: net.cq.handle }), VerbsError::Busy);
    assert_eq!(net.second.ask(&Request::DestroySrq { srq: net.srq.handle }), Reply::Done);
    assert_eq!(net.second.ask(&Request::DestroyCq { cq: net.cq.handle }), Reply::Done);
    assert_eq!(net.second.ask(&Request::CloseXrcd { xrcd }), Reply::Done);
    assert_eq!(net.host.status().qp_count, 1);
}

#[test]
fn a_process_that_ends_leaves_the_others_their_target() {
    let mut net = Net::new();
    let (from, to) = (net.sender.memory(8, true), net.second.memory(8, false));
    let maker = std::mem::replace(&mut net.first, net.host.client("b"));
    drop(maker);
    until("three sessions", || (net.host.status().session_count == 3).then_some(()));
    post_receive(&net.second, &mut net.srq, 1, &[to.sge(0, 64)]);
    net.send(&[from.sge(0, 64)]);
    assert_eq!(
        (net.cq.wait().status, net.sender_cq.wait().status),
        (CompletionStatus::Success, CompletionStatus::Success)
    );
    // The receiver ends: its queue is gone, and with its last opener the target.
    let receiver = std::mem::replace(&mut net.second, net.host.client("b"));
    drop(receiver);
    until("one QP", || (net.host.status().qp_count == 1).then_some(()));
    net.send(&[from.sge(0, 64)]);
    assert_eq!(net.sender_cq.wait().status, CompletionStatus::RetryExceeded);
    let request = Request::OpenXrcd { context: net.second.context, file: Some(FILE), flags: XrcdOpenFlags::EXISTING };
    assert_eq!(net.second.refused(&request), VerbsError::NotFound);
}

#[test]
fn domains_and_targets_of_others_are_out_of_reach() {
    let net = Net::new();
    let mut stranger = net.host.client("c");
    let open = |client: &Client, file, flags| Request::OpenXrcd { context: client.context, file, flags };
    // The same file name in another vNIC is another domain.
    assert_eq!(stranger.refused(&open(&stranger, Some(FILE), XrcdOpenFlags::EXISTING)), VerbsError::NotFound);
    assert_eq!(net.first.refused(&open(&net.first, Some(FILE), XrcdOpenFlags::CREATE_NEW)), VerbsError::Exists);
    let foreign = open_xrcd(&stranger, true);
    let (qpn, cookie) = (net.made.qpn, stranger.next_cookie());
    let refused = |client: &Client, xrcd, qpn| client.refused(&Request::OpenQp { xrcd, qpn, cookie: cookie + 50 });
    assert_eq!(refused(&stranger, foreign, qpn), VerbsError::InvalidArgument);
    let Reply::Xrcd { xrcd: nameless } = net.second.ask(&open(&net.second, None, XrcdOpenFlags::CREATE)) else {
        panic!("no domain")
    };
    assert_eq!(refused(&net.second, nameless, qpn), VerbsError::InvalidArgument);
    for number in [0, 1, qpn ^ 1, u32::MAX, net.sender_qp.qpn] {
        assert_eq!(refused(&net.second, net.xrcd, number), VerbsError::InvalidArgument, "{number:#x}");
    }
    // Handles of other sessions, a cookie that is taken, parts that a target must not have or must have.
    assert_eq!(refused(&net.sender, net.xrcd, qpn), VerbsError::NotFound);
    assert_eq!(net.sender.refused(&Request::CloseXrcd { xrcd: net.xrcd }), VerbsError::NotFound);
    let taken = Request::OpenQp { xrcd: net.xrcd, qpn, cookie: net.opened.cookie };
    assert_eq!(net.second.refused(&taken), VerbsError::InvalidArgument);
    assert_eq!(net.second.refused(&target_request(&mut stranger, None)), VerbsError::InvalidArgument);
    let mut with_pd = target_request(&mut stranger, Some(net.xrcd));
    if let Request::CreateQp { pd, .. } = &mut with_pd {
        *pd = Some(net.second.pd);
    }
    assert_eq!(net.second.refused(&with_pd), VerbsError::InvalidArgument);
    let xrc = Some(XrcQueue { xrcd: 77, cq: net.cq.handle });
    let attributes = SrqAttributes { max_wr: 8, max_sge: 1, limit: 0 };
    let srq = Request::CreateSrq { pd: net.second.pd, attributes, cookie: 90, xrc };
    assert_eq!(net.second.refused(&srq), VerbsError::NotFound);
    // A target has no rings: its doorbell rings for nobody.
    if net.second.session.ring(net.opened.cookie) {
        net.second.kick.kick();
    }
    assert_eq!(query(&net.second, &net.opened), QpState::ReadyToSend);
}
