//! Multicast between vNICs of one network.
use crate::common::*;
use freeflow_protocol::library::{Reply, Request};
use freeflow_shm::SendDescriptor;
use freeflow_verbs::{
    CompletionStatus, Gid, QpAttributeMask, QpAttributes, QpState, QpType, SendOpcode, VerbsError, VnicLimits,
};
use std::sync::atomic::Ordering::Relaxed;

/// The QPN of every group.
const MULTICAST_QPN: u64 = 0xff_ffff;
const GROUP: Gid = Gid([0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3]);

struct Member {
    client: Client,
    cq: Cq,
    qp: Qp,
    memory: Memory,
}

impl Member {
    fn new(host: &Host, id: &str) -> Self {
        let mut client = host.client(id);
        let cq = client.create_cq(16, None);
        let mut qp = client.create_qp(QpType::Ud, &cq);
        client.to_init(&qp, true);
        for state in [QpState::ReadyToReceive, QpState::ReadyToSend] {
            let sq_psn = if state == QpState::ReadyToSend { QpAttributeMask::SQ_PSN } else { 0 };
            let attributes = QpAttributes { state, ..QpAttributes::default() };
            let reply = client.modify(&qp, attributes, QpAttributeMask::STATE | sq_psn);
            assert_eq!(reply, Reply::QpModified { state });
        }
        let memory = client.memory(16, true);
        client.post_receive(&mut qp, 5, &[memory.sge(0, 40), memory.sge(40, 64)]);
        Self { client, cq, qp, memory }
    }

    fn attach(&self, gid: Gid) -> Reply {
        self.client.ask(&Request::AttachMulticast { qp: self.qp.handle, gid })
    }

    fn detach(&self, gid: Gid) -> Reply {
        self.client.ask(&Request::DetachMulticast { qp: self.qp.handle, gid })
    }
}

#[test]
fn a_message_reaches_every_member() {
    let host = Host::new();
    let mut sender = Member::new(&host, "a");
    let mut members = [Member::new(&host, "b"), Member::new(&host, "c"), Member::new(&host, "c")];
    let left = Member::new(&host, "d");
    for member in members.iter().chain([&left, &left]) {
        assert_eq!(member.attach(GROUP), Reply::Done);
    }
    assert_eq!(left.detach(GROUP), Reply::Done);
    let attributes = address(GROUP);
    let reply = sender.client.ask(&Request::CreateAh { pd: sender.client.pd, attributes });
    let Reply::AddressHandle { ah } = reply else { panic!("{reply:?}") };
    sender.memory.word(0).store(77, Relaxed);
    let sges = [sender.memory.sge(0, 8)];
    let send = SendDescriptor {
        remote_address: u64::from(ah) | MULTICAST_QPN << 32,
        rkey: QKEY,
        ..request(SendOpcode::Send, &sges)
    };
    sender.client.post_send(&mut sender.qp, &send);
    assert_eq!(sender.cq.wait().status, CompletionStatus::Success);
    for member in &mut members {
        let received = member.cq.wait();
        assert_eq!((received.status, received.byte_count), (CompletionStatus::Success, 48));
        assert_eq!((received.source_qpn, member.memory.word(5).load(Relaxed)), (sender.qp.qpn, 77));
    }
    left.client.settle();
    assert!(left.cq.ring.is_empty());
}

#[test]
fn groups_are_refused_where_they_must_be() {
    let limits = VnicLimits { multicast_group_count_max: 2, multicast_attach_count_max: 1, ..VnicLimits::default() };
    let host = Host::with_limits(limits);
    let (member, second) = (Member::new(&host, "a"), Member::new(&host, "a"));
    let group = |last: u8| {
        let mut gid = GROUP;
        gid.0[15] = last;
        gid
    };
    assert_eq!(member.attach(member.client.gid()), Reply::Failed(VerbsError::InvalidArgument));
    assert_eq!(member.detach(GROUP), Reply::Failed(VerbsError::InvalidArgument));
    let foreign = Request::AttachMulticast { qp: 77, gid: GROUP };
    assert_eq!(second.client.refused(&foreign), VerbsError::NotFound);
    assert_eq!((member.attach(group(1)), member.attach(group(2))), (Reply::Done, Reply::Done));
    assert_eq!(member.attach(group(3)), Reply::Failed(VerbsError::NoMemory));
    assert_eq!(second.attach(group(1)), Reply::Failed(VerbsError::NoMemory));
    assert_eq!(Member::new(&host, "b").attach(group(1)), Reply::Done);
    // A process that ends takes its attachments along.
    assert_eq!(member.client.refused(&Request::DestroyQp { qp: member.qp.handle }), VerbsError::Busy);
    drop(member);
    until("one session", || (host.status().session_count == 1).then_some(()));
    assert_eq!(second.attach(group(1)), Reply::Done);
    let mut connected = host.client("a");
    let cq = connected.create_cq(4, None);
    let qp = connected.create_qp(QpType::Rc, &cq).handle;
    assert_eq!(connected.refused(&Request::AttachMulticast { qp, gid: GROUP }), VerbsError::InvalidArgument);
}
