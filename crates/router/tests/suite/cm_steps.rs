//! Steps of a connection that go with a change of a queue pair, by raw requests: what the router
//! does of both, and whose it touches.
use crate::common::cm::*;
use crate::common::hosts::{Hosts, alone};
use crate::common::*;
use freeflow_protocol::cm::{CmEventBody, CmEventKind, CmReply, CmRequest, CmStep, ConnectionParameters, Ece};
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_verbs::{PathMtu, QpAttributes, QpCapabilities, QpState, QpType, VerbsError};

const ECE: Ece = Ece { vendor_id: 0x1234, options: 0 };
const CAPABILITIES: QpCapabilities =
    QpCapabilities { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };

fn with_qp(qpn: u32, ece: Ece) -> ConnectionParameters {
    ConnectionParameters { qp_number: qpn, ece, responder_resources: 1, initiator_depth: 1, ..parameters(b"hello") }
}

fn create(client: &mut Client, cq: &Cq, id: Handle) -> Request {
    Request::CreateQp {
        qp_type: QpType::Rc,
        pd: Some(client.pd),
        send_cq: Some(cq.handle),
        recv_cq: Some(cq.handle),
        srq: None,
        xrcd: None,
        capabilities: CAPABILITIES,
        all_signaled: false,
        block_own_multicast: false,
        cookie: client.next_cookie(),
        connection: Some(id),
    }
}

/// A QP for an identifier: its handle and number.
fn qp_for(client: &mut Client, cq: &Cq, id: Handle) -> (Handle, u32) {
    let request = create(client, cq, id);
    let Reply::Qp { qp, qpn, .. } = client.ask(&request) else { panic!("no QP") };
    assert_eq!(query(client, qp).state, QpState::Init);
    (qp, qpn)
}

fn query(client: &Client, qp: Handle) -> QpAttributes {
    match client.ask(&Request::QueryQp { qp }) {
        Reply::QpAttributes(attributes) => attributes,
        other => panic!("{other:?}"),
    }
}

/// The step's attributes of the QP.
fn step(client: &Client, qp: Handle, step: CmStep) -> (Option<QpState>, Option<PathMtu>) {
    match client.ask(&Request::CmStep { qp, step }) {
        Reply::CmStepped { state, path_mtu } => (state, path_mtu),
        other => panic!("{other:?}"),
    }
}

fn steps_between(a: &mut Client, b: &mut Client) {
    let (a_cq, b_cq) = (a.create_cq(8, None), b.create_cq(8, None));
    let (a_channel, b_channel) = (a.cm_channel(), b.cm_channel());
    let (_, address) = b.cm_listen(&b_channel, 1);
    let active = a.cm_resolved(&a_channel, address, 2);
    let (a_qp, a_qpn) = qp_for(a, &a_cq, active);
    let asked = step(a, a_qp, CmStep::Connect { id: active, parameters: with_qp(a_qpn, ECE) });
    assert!(asked.0.is_none() && asked.1.is_some());
    let (passive, said) = b.cm_request(&b_channel);
    assert_eq!(said.qp_number, a_qpn);
    let (b_qp, b_qpn) = qp_for(b, &b_cq, passive);
    let parameters = ConnectionParameters { responder_resources: 1, ..with_qp(b_qpn, ECE) };
    let accepted = step(b, b_qp, CmStep::Accept { id: passive, cookie: 3, parameters });
    assert_eq!(accepted, (Some(QpState::ReadyToSend), asked.1));

    // The router brought the active one's QP to RTS, and answered.
    let CmEventBody::Connection(said) = a_channel.expect(CmEventKind::Established).body else { panic!() };
    assert_eq!((said.qp_number, &said.private_data[..5]), (b_qpn, &b"hello"[..]));
    assert_eq!(b_channel.expect(CmEventKind::Established).cookie, 3);
    let (ours, theirs) = (query(a, a_qp), query(b, b_qp));
    for (own, dest_qpn, dgid) in [(ours, b_qpn, b.gid()), (theirs, a_qpn, a.gid())] {
        assert_eq!((own.state, own.dest_qpn, own.max_rd_atomic), (QpState::ReadyToSend, dest_qpn, 1));
        assert_eq!(own.address.grh.map(|grh| grh.dgid), Some(dgid));
    }
    assert_eq!((ours.sq_psn, theirs.sq_psn), (theirs.rq_psn, ours.rq_psn));

    assert_eq!(step(a, a_qp, CmStep::Disconnect { id: active }).0, Some(QpState::Error));
    a_channel.expect(CmEventKind::Disconnected);
    b_channel.expect(CmEventKind::Disconnected);
    assert_eq!(step(b, b_qp, CmStep::Disconnect { id: passive }).0, Some(QpState::Error));
    assert_eq!(query(b, b_qp).state, QpState::Error);
}

#[test]
fn steps_between_two_vnics_of_a_host() {
    let host = Host::new();
    let (mut a, mut b) = (host.client("a"), host.client("b"));
    steps_between(&mut a, &mut b);
}

#[test]
fn steps_between_two_hosts() {
    let _alone = alone();
    let hosts = Hosts::new();
    let (mut a, mut b) = (hosts.hosts[0].client("a"), hosts.hosts[1].client("b"));
    until_reachable(&a, &b);
    steps_between(&mut a, &mut b);
}

/// A peer's extended connection establishment, and a QP that is gone, are left to the library.
#[test]
fn what_the_router_can_not_do_is_the_library_s() {
    let host = Host::new();
    let (mut a, b) = (host.client("a"), host.client("b"));
    let cq = a.create_cq(8, None);
    let (a_channel, b_channel) = (a.cm_channel(), b.cm_channel());
    let (_, address) = b.cm_listen(&b_channel, 1);
    let options = Ece { options: 1, ..ECE };
    for (cookie, theirs, is_destroyed) in
        [(10, options, false), (11, Ece { vendor_id: 9, options: 0 }, false), (12, ECE, true)]
    {
        let id = a.cm_resolved(&a_channel, address, cookie);
        let (qp, qpn) = qp_for(&mut a, &cq, id);
        step(&a, qp, CmStep::Connect { id, parameters: with_qp(qpn, ECE) });
        let (passive, _) = b.cm_request(&b_channel);
        if is_destroyed {
            assert_eq!(a.ask(&Request::DestroyQp { qp }), Reply::Done);
        }
        b.cm_done(CmRequest::Accept {
            id: passive,
            cookie: cookie + 10,
            parameters: with_qp(90 + cookie as u32, theirs),
        });
        assert_eq!(a_channel.expect(CmEventKind::ConnectResponse).cookie, cookie);
        if !is_destroyed {
            assert_eq!(query(&a, qp).state, QpState::Init);
        }
        let answer = a.cm(CmRequest::InitQpAttributes { id, state: QpState::ReadyToReceive });
        assert!(matches!(answer, Reply::Cm(CmReply::QpAttributes { .. })), "{answer:?}");
        a.cm_done(CmRequest::Establish { id });
        b_channel.expect(CmEventKind::Established);
    }
}

#[test]
fn a_step_is_for_one_s_own_and_does_nothing_by_halves() {
    let host = Host::new();
    let (mut a, mut b) = (host.client("a"), host.client("b"));
    let mut other = host.client("a");
    let (a_cq, b_cq) = (a.create_cq(8, None), b.create_cq(8, None));
    let (a_channel, b_channel) = (a.cm_channel(), b.cm_channel());
    let (_, address) = b.cm_listen(&b_channel, 1);
    let active = a.cm_resolved(&a_channel, address, 2);
    let (a_qp, a_qpn) = qp_for(&mut a, &a_cq, active);
    let connect = |id| CmStep::Connect { id, parameters: with_qp(a_qpn, ECE) };

    // Another session's QP, another's identifier, and whoever has no identifiers at all.
    let refused = |client: &Client, qp, step: CmStep| client.refused(&Request::CmStep { qp, step });
    assert_eq!(refused(&other, a_qp, connect(active)), VerbsError::NotFound);
    let channel = other.cm_channel();
    let (mine, cq) = (other.cm_id(&channel, 1), other.create_cq(8, None));
    assert_eq!(refused(&other, a_qp, connect(mine)), VerbsError::NotFound);
    let own = other.create_qp(QpType::Rc, &cq);
    for id in [active, 0, u32::MAX] {
        assert_eq!(refused(&other, own.handle, connect(id)), VerbsError::NotFound);
        let accept = CmStep::Accept { id, cookie: 1, parameters: with_qp(2, ECE) };
        assert_eq!(refused(&other, own.handle, accept), VerbsError::NotFound);
        assert_eq!(refused(&other, own.handle, CmStep::Disconnect { id }), VerbsError::NotFound);
        let request = create(&mut other, &cq, id);
        assert_eq!(other.refused(&request), VerbsError::NotFound);
    }
    // An identifier that is nowhere has no QP; nothing is left of what was tried.
    let request = create(&mut other, &cq, mine);
    assert_eq!(other.refused(&request), VerbsError::InvalidArgument);
    assert_eq!(query(&a, a_qp).state, QpState::Init);

    // A QP that can't be brought to RTS: the request stays, and can be accepted with another one.
    step(&a, a_qp, connect(active));
    let (passive, _) = b.cm_request(&b_channel);
    let (b_qp, b_qpn) = qp_for(&mut b, &b_cq, passive);
    let broken = b.create_qp(QpType::Ud, &b_cq);
    let accept = |qpn| CmStep::Accept { id: passive, cookie: 3, parameters: with_qp(qpn, ECE) };
    assert_eq!(refused(&b, broken.handle, accept(broken.qpn)), VerbsError::InvalidArgument);
    assert_eq!(step(&b, b_qp, accept(b_qpn)).0, Some(QpState::ReadyToSend));
    a_channel.expect(CmEventKind::Established);
    b_channel.expect(CmEventKind::Established);
    assert_eq!(refused(&b, b_qp, accept(b_qpn)), VerbsError::InvalidArgument);
}

/// Requests while one is being dealt with wait for their turn, however many there are.
#[test]
fn requests_that_come_too_early_are_answered_in_order() {
    let host = Host::new();
    let mut client = host.client("a");
    let cq = client.create_cq(8, None);
    let qp = client.create_qp(QpType::Rc, &cq);
    let requests = [Request::QueryQp { qp: qp.handle }, Request::Cm(CmRequest::DestroyId { id: 1 })];
    for round in 0..200 {
        let request = freeflow_protocol::encode(&requests[round % 2]);
        freeflow_shm::fd::send_message(&client.socket, &request, &[]).unwrap();
    }
    let mut buffer = Vec::new();
    for round in 0..200 {
        let (bytes, _) = freeflow_shm::fd::receive_message(&client.socket, &mut buffer, 1).unwrap();
        let reply: Reply = freeflow_protocol::decode(&buffer[..bytes]).unwrap();
        let is_right = match reply {
            Reply::QpAttributes(_) => round % 2 == 0,
            Reply::Failed(VerbsError::NotFound) => round % 2 == 1,
            _ => false,
        };
        assert!(is_right, "{round}: {reply:?}");
    }
}
