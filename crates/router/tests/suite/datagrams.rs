//! UD QPs past the router: who gets a direct ring of datagrams, what its receiver is told, and when it ends.
use crate::access::{denial, table};
use crate::common::*;
use freeflow_orchestrator::objects::EndSelector;
use freeflow_protocol::FEATURE_DIRECT_DATAGRAMS;
use freeflow_protocol::admin::DataPath;
use freeflow_protocol::library::{DATAGRAM_RINGS_MAX, Handle, Reply, Request};
use freeflow_protocol::version::Offer;
use freeflow_router::RuleCounts;
use freeflow_shm::SendDescriptor;
use freeflow_verbs::{
    CompletionStatus, Gid, QpAttributeMask as M, QpAttributes, QpState, QpType, SendOpcode, VerbsError,
};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

const QKEY: u32 = 0x1111_1111;

fn begin(client: &Client, qp: &Qp) {
    let init = QpAttributes { state: QpState::Init, port: 1, qkey: QKEY, ..QpAttributes::default() };
    client.modify(qp, init, M::STATE | M::PKEY_INDEX | M::PORT | M::QKEY);
    client.modify(qp, QpAttributes { state: QpState::ReadyToReceive, ..QpAttributes::default() }, M::STATE);
    let rts = QpAttributes { state: QpState::ReadyToSend, ..QpAttributes::default() };
    assert_eq!(client.modify(qp, rts, M::STATE | M::SQ_PSN), Reply::QpModified { state: QpState::ReadyToSend });
}

struct Rig {
    pair: Pair,
    ah: Handle,
    from: Memory,
    to: Memory,
}

impl Rig {
    fn new() -> Self {
        Self::with_srq(false)
    }

    fn with_srq(has_srq: bool) -> Self {
        Self::with(has_srq, false).0
    }

    /// With events of the receiver's completions.
    fn with_events() -> (Self, OwnedFd) {
        let (rig, pipe) = Self::with(false, true);
        (rig, pipe.unwrap())
    }

    fn with(has_srq: bool, has_events: bool) -> (Self, Option<OwnedFd>) {
        let host = Host::new();
        let (mut a, mut b) = (host.client("a"), host.client("b"));
        let (channel, pipe) = has_events.then(|| b.create_channel()).unzip();
        let (a_cq, b_cq) = (a.create_cq(64, None), b.create_cq(64, channel));
        let srq = has_srq.then(|| b.create_srq(8));
        let a_qp = a.create_qp(QpType::Ud, &a_cq);
        let b_qp = b.create_qp_with(QpType::Ud, &b_cq, srq, CAPABILITIES);
        begin(&a, &a_qp);
        begin(&b, &b_qp);
        let ah = handle_to(&a, b.gid());
        let (from, to) = (a.memory(1024, true), b.memory(1024, true));
        (Self { pair: Pair { host, a, b, a_cq, b_cq, a_qp, b_qp }, ah, from, to }, pipe)
    }

    /// Its library has put something into a ring.
    fn notify(&mut self, place: u32) {
        self.pair.a_qp.send.notify_ring(place, false);
        if self.pair.a.session.ring(self.pair.a_qp.cookie) {
            self.pair.a.kick.kick();
        }
        self.pair.a.settle();
    }

    fn take_event(&self, pipe: &OwnedFd) -> bool {
        self.pair.b.settle();
        has_event(pipe) && read_event(pipe) == Some((self.pair.b_cq.cookie, 0))
    }

    fn ask(&self, ah: Handle, remote_qpn: u32, qkey: u32, place: u32) -> Result<(), VerbsError> {
        let qp = self.pair.a_qp.handle;
        match self.pair.a.ask_fds(&Request::OpenDatagramRing { qp, ah, remote_qpn, qkey, place }) {
            (Reply::DatagramRing { .. }, fds) if fds.len() == 1 => Ok(()),
            (Reply::Failed(error), _) => Err(error),
            other => panic!("{other:?}"),
        }
    }

    fn open(&self, place: u32) -> Result<(), VerbsError> {
        self.ask(self.ah, self.pair.b_qp.qpn, QKEY, place)
    }

    /// Once there may be another one to that receiver.
    fn open_again(&self, place: u32) -> Result<(), VerbsError> {
        std::thread::sleep(Duration::from_millis(110));
        self.open(place)
    }

    /// Its first RECV.
    fn accept_at(&self, position: u32) -> bool {
        let asked = Request::AcceptDatagramRing { qp: self.pair.b_qp.handle };
        matches!(self.pair.b.ask(&asked), Reply::IncomingDatagramRing { first, .. } if first == position)
    }

    /// Its number, its place, and its sender as the router says it.
    fn accept(&self) -> Option<(u32, u32, u32, Gid)> {
        match self.pair.b.ask_fds(&Request::AcceptDatagramRing { qp: self.pair.b_qp.handle }) {
            (Reply::IncomingDatagramRing { offer, place, source_qpn, source, route, first: 0, .. }, fds)
                if fds.len() == 1 =>
            {
                assert_eq!(route.dgid, self.pair.b.gid());
                Some((offer, place, source_qpn, source))
            }
            (Reply::Failed(VerbsError::NotFound), _) => None,
            other => panic!("{other:?}"),
        }
    }

    /// The open rings, as both headers say.
    fn are_open(&self) -> (u64, u64) {
        (self.pair.a_qp.send.rings_open(), self.pair.b_qp.receive.rings_open())
    }

    fn receive(&mut self, bytes: u32) {
        let sges = [self.to.sge(0, bytes)];
        self.pair.b.post_receive(&mut self.pair.b_qp, 1, &sges);
    }

    fn send(&mut self, bytes: u32) -> CompletionStatus {
        let sges = [self.from.sge(0, bytes)];
        let to = u64::from(self.ah) | u64::from(self.pair.b_qp.qpn) << 32;
        let request = SendDescriptor { remote_address: to, rkey: QKEY, ..request(SendOpcode::Send, &sges) };
        self.pair.a.post_send(&mut self.pair.a_qp, &request);
        self.pair.a_cq.wait().status
    }
}

fn set_path(host: &Host, path: DataPath) {
    let body = serde_json::json!({"dataPath": path}).to_string();
    assert_eq!(host.rest("PUT", &format!("{BASE}/networks/default/dataPath"), &body).0, 200);
}

fn handle_to(client: &Client, gid: Gid) -> Handle {
    match client.ask(&Request::CreateAh { pd: client.pd, attributes: address(gid) }) {
        Reply::AddressHandle { ah } => ah,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_receiver_is_told_of_its_sender_by_the_router() {
    let rig = Rig::new();
    assert_eq!(rig.accept(), None);
    assert_eq!(rig.open(5), Ok(()));
    assert_eq!((rig.are_open(), rig.pair.b_qp.receive.rings_offered()), ((1 << 5, 1), 1));
    assert_eq!(rig.accept(), Some((1, 0, rig.pair.a_qp.qpn, rig.pair.a.gid())));
    assert_eq!(rig.accept(), None);
}

#[test]
fn a_ring_is_for_datagrams_that_would_arrive() {
    let rig = Rig::new();
    let (qpn, ah) = (rig.pair.b_qp.qpn, rig.ah);
    assert_eq!(rig.ask(ah, qpn, QKEY ^ 1, 0), Err(VerbsError::NotSupported), "another Q_Key");
    assert_eq!(rig.ask(ah, rig.pair.a_qp.qpn, QKEY, 0), Err(VerbsError::NotSupported), "there is no such QP");
    assert_eq!(rig.ask(ah + 1000, qpn, QKEY, 0), Err(VerbsError::NotFound));
    assert_eq!(rig.ask(ah, qpn, QKEY, DATAGRAM_RINGS_MAX), Err(VerbsError::InvalidArgument));
    let mut group = [0; 16];
    (group[0], group[1], group[15]) = (0xff, 0x0e, 1);
    assert_eq!(rig.ask(handle_to(&rig.pair.a, Gid(group)), qpn, QKEY, 0), Err(VerbsError::NotSupported), "a group");
    assert_eq!(rig.ask(ah, qpn, 1 << 31, 0), Ok(()), "its own Q_Key");
    assert_eq!(rig.open(1), Err(VerbsError::Busy), "one at a time from one QP to another");
    assert_eq!(
        (rig.open(0), rig.are_open()),
        (Err(VerbsError::Busy), (0, 0)),
        "not so soon, but the other one is closed"
    );
    assert_eq!(rig.open(1), Err(VerbsError::Busy), "nor elsewhere");
    assert_eq!(rig.open_again(0), Ok(()));
    assert_eq!(Rig::with_srq(true).open(0), Err(VerbsError::NotSupported));
    let reliable = Pair::new();
    let (qp, ah) = (reliable.a_qp.handle, handle_to(&reliable.a, reliable.b.gid()));
    let asked = Request::OpenDatagramRing { qp, ah, remote_qpn: reliable.b_qp.qpn, qkey: 0, place: 0 };
    assert_eq!(reliable.a.refused(&asked), VerbsError::NotSupported);
    assert_eq!(rig.pair.a.refused(&Request::OpenDirectRing { qp: rig.pair.a_qp.handle }), VerbsError::NotSupported);
}

#[test]
fn what_ends_a_right_closes_the_ring() {
    let mut rig = Rig::new();
    let state = |state| QpAttributes { state, ..QpAttributes::default() };
    let qkey = QpAttributes { qkey: QKEY, ..QpAttributes::default() };
    for (is_receiver, attributes, mask) in [
        (true, qkey, M::QKEY),
        (false, qkey, M::QKEY),
        (true, state(QpState::Reset), M::STATE),
        (false, state(QpState::Error), M::STATE),
    ] {
        assert_eq!(rig.open_again(0), Ok(()));
        assert_eq!(rig.are_open().0, 1);
        let Pair { a, b, a_qp, b_qp, .. } = &rig.pair;
        let (client, qp) = if is_receiver { (b, b_qp) } else { (a, a_qp) };
        client.modify(qp, attributes, mask);
        assert_eq!(rig.are_open(), (0, 0), "{attributes:?}");
        if mask == M::STATE {
            assert!(rig.open(0).is_err());
            client.modify(qp, state(QpState::Reset), M::STATE);
            begin(client, qp);
        }
    }
    rig.pair.a_qp.send.reset();
    rig.pair.b_qp.receive.reset();
    assert_eq!(rig.open_again(0), Ok(()));
    assert_eq!(rig.send(5000), CompletionStatus::LocalLengthError);
    rig.pair.a.settle();
    assert_eq!((rig.are_open(), rig.open(0)), ((0, 0), Err(VerbsError::Busy)), "the send queue is in error");
    rig.pair.a.modify(&rig.pair.a_qp, state(QpState::ReadyToSend), M::STATE);
    assert_eq!(rig.open_again(0), Ok(()));
    assert_eq!(rig.pair.a.ask(&Request::DestroyAh { ah: rig.ah }), Reply::Done);
    assert_eq!(rig.are_open(), (0, 0));
    rig.ah = handle_to(&rig.pair.a, rig.pair.b.gid());
    assert_eq!(rig.open_again(0), Ok(()));
    assert_eq!(rig.pair.b.ask(&Request::DestroyQp { qp: rig.pair.b_qp.handle }), Reply::Done);
    assert_eq!(rig.pair.a_qp.send.rings_open(), 0);
}

/// The library can take it.
#[test]
fn a_receive_that_a_lost_datagram_left_is_not_kept() {
    let mut rig = Rig::new();
    assert_eq!(rig.open(0), Ok(()));
    rig.receive(50);
    rig.receive(200);
    assert_eq!(rig.send(64), CompletionStatus::Success);
    assert!(rig.pair.b_qp.receive.claim_receive(0), "the datagram was too long for it");
    rig.pair.b_qp.receive.set_claimed(1);
    assert_eq!(rig.send(64), CompletionStatus::Success);
    assert_eq!(rig.pair.b_cq.wait().ring_position, 1);
    assert!(!rig.pair.b_qp.receive.claim_receive(1));
}

/// The library waits for it as for a completion.
#[test]
fn a_receive_that_is_put_back_wakes_its_receiver() {
    let (mut rig, pipe) = Rig::with_events();
    rig.receive(50);
    assert_eq!(rig.send(64), CompletionStatus::Success);
    rig.pair.b_cq.ring.arm(false);
    assert!(!rig.take_event(&pipe), "nothing can wait for it");
    assert_eq!(rig.open(0), Ok(()));
    for solicited in [false, true] {
        rig.pair.b_cq.ring.arm(solicited);
        assert_eq!(rig.send(64), CompletionStatus::Success);
        assert!(rig.take_event(&pipe), "solicited: {solicited}");
    }
}

/// Nobody says how many datagrams it stands for.
#[test]
fn a_notification_is_as_many_as_a_moderated_queue_waits_for() {
    let (mut rig, pipe) = Rig::with_events();
    assert_eq!(rig.open(3), Ok(()));
    let cq = rig.pair.b_cq.handle;
    assert_eq!(rig.pair.b.ask(&Request::ModerateCq { cq, count: 16, period_us: 0 }), Reply::Done);
    for _ in 0..2 {
        rig.pair.b_cq.ring.arm(false);
        rig.notify(3);
        assert!(rig.take_event(&pipe));
    }
    rig.pair.b_cq.ring.arm(false);
    rig.notify(4);
    assert!(!rig.take_event(&pipe), "there is no such ring");
}

/// A sender that keeps a ring's memory wakes its receiver for a moment longer.
#[test]
fn notifications_of_a_closed_ring_end() {
    let (mut rig, pipe) = Rig::with_events();
    assert_eq!(rig.open(3), Ok(()));
    let qkey = QpAttributes { qkey: QKEY, ..QpAttributes::default() };
    rig.pair.b.modify(&rig.pair.b_qp, qkey, M::QKEY);
    assert_eq!(rig.are_open(), (0, 0));
    rig.pair.b_cq.ring.arm(false);
    rig.notify(3);
    assert!(rig.take_event(&pipe), "its library may not know of the end");
    rig.pair.b_cq.ring.arm(false);
    std::thread::sleep(Duration::from_millis(110));
    rig.notify(3);
    assert!(!rig.take_event(&pipe));
}

#[test]
fn a_receiver_has_so_many_rings_and_then_the_oldest_makes_room() {
    let mut rig = Rig::new();
    let (to, ah, count) = (rig.pair.b_qp.qpn, rig.ah, u64::from(DATAGRAM_RINGS_MAX));
    let qps: Vec<Qp> = (0..=count).map(|_| rig.pair.a.create_qp(QpType::Ud, &rig.pair.a_cq)).collect();
    let open = |qp: &Qp| {
        let asked = Request::OpenDatagramRing { qp: qp.handle, ah, remote_qpn: to, qkey: QKEY, place: 0 };
        rig.pair.a.ask_fds(&asked).0
    };
    for qp in &qps {
        begin(&rig.pair.a, qp);
    }
    let (last, others) = qps.split_last().unwrap();
    for qp in others {
        assert!(matches!(open(qp), Reply::DatagramRing { .. }));
    }
    assert_eq!(open(last), Reply::Failed(VerbsError::Busy), "none is old");
    assert_eq!((others[0].send.rings_open(), rig.are_open().1), (1, u64::MAX));
    std::thread::sleep(Duration::from_millis(1100));
    assert!(matches!(open(last), Reply::DatagramRing { .. }));
    assert_eq!((others[0].send.rings_open(), others[1].send.rings_open(), last.send.rings_open()), (0, 1, 1));
    assert_eq!(rig.are_open().1, u64::MAX);
}

#[test]
fn a_network_that_is_routed_has_no_rings() {
    let rig = Rig::new();
    assert_eq!(rig.open(0), Ok(()));
    set_path(&rig.pair.host, DataPath::Routed);
    assert_eq!((rig.are_open(), rig.open(0)), ((0, 0), Err(VerbsError::NotSupported)));
    set_path(&rig.pair.host, DataPath::Auto);
    assert_eq!(rig.open_again(0), Ok(()));
}

/// Those that are allowed stay. A question is no datagram, so no refusal is counted.
#[test]
fn rules_close_the_rings_that_they_deny() {
    let rig = Rig::new();
    let mut c = rig.pair.host.client("c");
    let cq = c.create_cq(64, None);
    let qp = c.create_qp(QpType::Ud, &cq);
    begin(&c, &qp);
    let to_c = handle_to(&rig.pair.a, c.gid());
    assert_eq!((rig.open(0), rig.ask(to_c, qp.qpn, QKEY, 1)), (Ok(()), Ok(())));
    let router = rig.pair.host.router.as_ref().unwrap();
    let address = |client: &Client| EndSelector {
        cidr: client.gid().to_ipv4().map(|address| format!("{address}/32")),
        ..EndSelector::default()
    };
    for (rules, open) in [(vec![], 3), (vec![("no", denial(address(&rig.pair.a), address(&c)))], 1)] {
        router.set_access(table(&rules));
        until("review", || (rig.pair.a_qp.send.rings_open() == open).then_some(()));
        rig.pair.a.settle();
    }
    assert_eq!((rig.are_open(), qp.receive.rings_open()), ((1, 1), 0));
    assert_eq!(rig.ask(to_c, qp.qpn, QKEY, 1), Err(VerbsError::NotSupported));
    assert_eq!(router.access_counts(Some("no")), RuleCounts::default());
    router.set_access(table(&[]));
    until("another ring", || rig.ask(to_c, qp.qpn, QKEY, 1).is_ok().then_some(()));
    assert_eq!(rig.are_open(), (3, 1));
}

#[test]
fn a_library_that_does_not_know_of_rings_is_offered_none() {
    let rig = Rig::new();
    let Request::Hello { protocol, layouts, program } = hello() else { unreachable!() };
    let protocol = Offer { features: protocol.features & !FEATURE_DIRECT_DATAGRAMS, ..protocol };
    let path = Path::new(&rig.pair.host.attach("old").directory).join("router.sock");
    let mut old = Client::connect_saying(&path, &Request::Hello { protocol, layouts, program });
    let cq = old.create_cq(64, None);
    let qp = old.create_qp(QpType::Ud, &cq);
    begin(&old, &qp);
    let ah = handle_to(&rig.pair.a, old.gid());
    assert_eq!(rig.ask(ah, qp.qpn, QKEY, 0), Err(VerbsError::NotSupported));
    assert_eq!((qp.receive.rings_open(), qp.receive.rings_offered()), (0, 0));
}

#[test]
fn a_ring_that_is_passed_by_is_the_reason() {
    let mut rig = Rig::new();
    let reason = |rig: &Rig| qps(&rig.pair.host.run_dir(), Some("a"), None).0[0].reason.clone();
    let send = |rig: &mut Rig| {
        rig.receive(200);
        assert_eq!(rig.send(64), CompletionStatus::Success);
    };
    send(&mut rig);
    assert_eq!(reason(&rig).as_deref(), Some("not asked yet"));
    assert_eq!(rig.open(0), Ok(()));
    assert_eq!(reason(&rig).as_deref(), Some("peer does not take it"));
    assert!(rig.accept_at(1));
    assert_eq!(reason(&rig).as_deref(), Some("not asked yet"), "nothing was sent since");
    send(&mut rig);
    assert_eq!(reason(&rig).as_deref(), Some("peer does not take it"));
}
