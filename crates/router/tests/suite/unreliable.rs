//! UC QPs past the router: messages may be lost, and the router numbers what goes by direct rings.
use crate::common::*;
use freeflow_protocol::library::{GrantAccess, Reply, Request};
use freeflow_shm::SendDescriptor;
use freeflow_verbs::{
    Access, CompletionStatus, PathMtu, QpAttributeMask as M, QpAttributes, QpState, QpType, SendOpcode, VerbsError,
};

const RIGHTS: Access =
    Access(Access::LOCAL_WRITE.0 | Access::REMOTE_WRITE.0 | Access::REMOTE_READ.0 | Access::REMOTE_ATOMIC.0);

/// RESET to RTS.
fn connect(client: &Client, qp: &Qp, peer: (&Client, u32)) {
    let (access, port) = (RIGHTS, 1);
    let init = QpAttributes { state: QpState::Init, access, port, ..QpAttributes::default() };
    let rtr = QpAttributes {
        state: QpState::ReadyToReceive,
        path_mtu: PathMtu::Mtu1024,
        dest_qpn: peer.1,
        address: address(peer.0.gid()),
        ..QpAttributes::default()
    };
    let rts = QpAttributes { state: QpState::ReadyToSend, ..QpAttributes::default() };
    for (attributes, mask) in [
        (init, M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
        (rtr, M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN),
        (rts, M::STATE | M::SQ_PSN),
    ] {
        assert_eq!(client.modify(qp, attributes, mask), Reply::QpModified { state: attributes.state });
    }
}

struct Rig {
    pair: Pair,
    from: Memory,
    to: Memory,
}

impl Rig {
    fn new() -> Self {
        Self::with_srq(false)
    }

    fn with_srq(has_srq: bool) -> Self {
        let host = Host::new();
        let (mut a, mut b) = (host.client("a"), host.client("b"));
        let (a_cq, b_cq) = (a.create_cq(64, None), b.create_cq(64, None));
        let srq = has_srq.then(|| b.create_srq(8));
        let a_qp = a.create_qp(QpType::Uc, &a_cq);
        let b_qp = b.create_qp_with(QpType::Uc, &b_cq, srq, CAPABILITIES);
        connect(&a, &a_qp, (&b, b_qp.qpn));
        connect(&b, &b_qp, (&a, a_qp.qpn));
        let (from, to) = (a.memory(512, true), b.memory(512, true));
        Self { pair: Pair { host, a, b, a_cq, b_cq, a_qp, b_qp }, from, to }
    }

    /// Closed rings of the sender, and the number of the first message.
    fn open(&mut self) -> Result<(u32, u32), VerbsError> {
        match self.pair.a.ask_fds(&Request::OpenNumberedDirectRing { qp: self.pair.a_qp.handle }) {
            (Reply::NumberedDirect { direct_rings_closed, msn, .. }, fds) if fds.len() == 1 => {
                self.pair.a_qp.send.set_msn(msn);
                Ok((direct_rings_closed, msn))
            }
            (Reply::Failed(error), _) => Err(error),
            other => panic!("{other:?}"),
        }
    }

    fn receive(&mut self, bytes: u32) {
        let sges = [self.to.sge(0, bytes)];
        self.pair.b.post_receive(&mut self.pair.b_qp, 1, &sges);
    }

    fn send(&mut self, opcode: SendOpcode, rkey: u32) -> CompletionStatus {
        let sges = [self.from.sge(0, 64)];
        let request = SendDescriptor { remote_address: self.to.address, rkey, ..request(opcode, &sges) };
        self.pair.a.post_send(&mut self.pair.a_qp, &request);
        self.pair.a_cq.wait().status
    }

    /// The RECV that a message takes.
    fn arrives_at(&mut self) -> u32 {
        assert_eq!(self.send(SendOpcode::Send, 0), CompletionStatus::Success);
        let received = self.pair.b_cq.wait();
        assert_eq!(received.status, CompletionStatus::Success);
        received.ring_position
    }

    fn closed(&self) -> (u32, u32) {
        (self.pair.a_qp.send.direct_rings_closed(), self.pair.b_qp.receive.direct_rings_closed())
    }
}

#[test]
fn a_lost_message_closes_the_direct_ring() {
    let mut rig = Rig::new();
    let (good, bad) = (rig.to.mr.rkey, rig.to.mr.rkey ^ 0x5a5a00);
    assert_eq!(rig.open(), Ok((0, 0)));
    assert_eq!(rig.open(), Err(VerbsError::Busy), "it is open");
    for rkey in [good, bad] {
        assert_eq!(rig.send(SendOpcode::RdmaWrite, rkey), CompletionStatus::Success);
        assert_eq!(rig.closed(), (0, 0), "a WRITE takes no RECV, wherever it goes");
    }
    assert_eq!(rig.send(SendOpcode::Send, 0), CompletionStatus::Success);
    assert_eq!(rig.closed(), (1, 1), "there was no RECV");
    for _ in 0..8 {
        rig.receive(64);
    }
    assert_eq!(rig.arrives_at(), 0);
    assert_eq!(rig.open(), Ok((1, 1)), "the lost one took none");
    assert_eq!(rig.send(SendOpcode::RdmaWriteWithImmediate, bad), CompletionStatus::Success);
    assert_eq!(rig.closed(), (2, 2), "its RECV is the next one's");
    assert_eq!(rig.arrives_at(), 1);
    assert_eq!(rig.open(), Ok((2, 2)));
    assert_eq!(rig.arrives_at(), 2);
    assert_eq!(rig.closed(), (2, 2), "none was lost");
}

#[test]
fn a_receive_that_a_lost_message_left_is_used_before_a_direct_ring_begins() {
    let mut rig = Rig::new();
    rig.receive(8);
    rig.receive(64);
    assert_eq!(rig.open(), Ok((0, 0)));
    assert_eq!(rig.send(SendOpcode::Send, 0), CompletionStatus::Success);
    assert_eq!((rig.closed(), rig.open()), ((1, 1), Err(VerbsError::Busy)));
    let sges = [rig.from.sge(0, 8)];
    rig.pair.a.post_send(&mut rig.pair.a_qp, &request(SendOpcode::Send, &sges));
    assert_eq!(rig.pair.b_cq.wait().ring_position, 0);
    rig.pair.a_cq.wait();
    assert_eq!(rig.open(), Ok((1, 1)));
}

/// Two messages stand in the ring when their sender begins again: they keep their RECVs.
#[test]
fn messages_in_a_ring_stay_before_those_of_a_sender_that_begins_anew() {
    let mut rig = Rig::new();
    for _ in 0..4 {
        rig.receive(64);
    }
    assert_eq!(rig.open(), Ok((0, 0)));
    rig.pair.a_qp.send.set_msn(2);
    let reset = QpAttributes { state: QpState::Reset, ..QpAttributes::default() };
    rig.pair.a.modify(&rig.pair.a_qp, reset, M::STATE);
    rig.pair.a_qp.send.reset();
    connect(&rig.pair.a, &rig.pair.a_qp, (&rig.pair.b, rig.pair.b_qp.qpn));
    assert_eq!(rig.closed(), (1, 1));
    assert_eq!(rig.arrives_at(), 2);
    assert_eq!(rig.open(), Ok((1, 3)));
}

#[test]
fn a_failed_send_ends_what_is_direct() {
    let mut rig = Rig::new();
    let reply = rig.pair.b.ask(&Request::OpenCommands);
    assert_eq!(reply, Reply::Done);
    assert_eq!(rig.open(), Ok((0, 0)));
    let (qp, rkey, address) = (rig.pair.a_qp.handle, rig.to.mr.rkey, rig.to.address);
    let ask = |access| Request::AskGrant { qp, rkey, address, length: 8, access };
    for access in [GrantAccess::Read, GrantAccess::Atomic] {
        assert_eq!(rig.pair.a.refused(&ask(access)), VerbsError::NotSupported, "UC has no {access:?}");
    }
    assert!(
        matches!(rig.pair.a.ask_fds(&ask(GrantAccess::Write)), (Reply::Grant { grants_revoked: 0, .. }, fds) if fds.len() == 1)
    );
    let mut wrong = rig.from.sge(0, 64);
    wrong.lkey ^= 0x5a5a00;
    rig.pair.a.post_send(&mut rig.pair.a_qp, &request(SendOpcode::Send, &[wrong]));
    assert_eq!(rig.pair.a_cq.wait().status, CompletionStatus::LocalProtectionError);
    assert_eq!((rig.closed(), rig.pair.a_qp.send.grants_revoked()), ((1, 1), 1));
    assert_eq!(rig.open(), Err(VerbsError::Busy));
    let again = QpAttributes { state: QpState::ReadyToSend, ..QpAttributes::default() };
    rig.pair.a.modify(&rig.pair.a_qp, again, M::STATE);
    assert_eq!(rig.open(), Ok((1, 0)));
}

#[test]
fn only_uc_has_rings_that_the_router_numbers() {
    let rig = Rig::new();
    let (a, qp) = (&rig.pair.a, rig.pair.a_qp.handle);
    assert_eq!(a.refused(&Request::OpenDirectRing { qp }), VerbsError::NotSupported);
    let reliable = Pair::new();
    let qp = reliable.a_qp.handle;
    assert_eq!(reliable.a.refused(&Request::OpenNumberedDirectRing { qp }), VerbsError::NotSupported);
    let mut shared = Rig::with_srq(true);
    assert_eq!(shared.open(), Err(VerbsError::NotSupported), "an SRQ's RECVs have no numbers of this pair");
}
