//! Contexts, protection domains, regions and segments that processes of one vNIC import from each other.
use crate::common::*;
use freeflow_protocol::library::{Handle, PASS_BYTES, Reply, Request};
use freeflow_shm::Segment;
use freeflow_verbs::{CompletionStatus, QpType, SendOpcode, Sge, VerbsError, VnicLimits};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

fn import_context(client: &Client, pass: [u8; PASS_BYTES]) -> (Handle, Vec<OwnedFd>) {
    let (reply, fds) = client.ask_fds(&Request::ImportContext { pass });
    let Reply::Context { context } = reply else { panic!("{reply:?}") };
    (context, fds)
}

fn import_pd(client: &Client, context: Handle, pd: Handle) -> Handle {
    let reply = client.ask(&Request::ImportPd { context, pd });
    let Reply::Pd { pd } = reply else { panic!("{reply:?}") };
    pd
}

/// Two processes of one vNIC, the second with the first one's context and PD.
fn family(host: &Host) -> (Client, Client) {
    let (first, mut second) = (host.client("a"), host.client("a"));
    let (context, _) = import_context(&second, first.pass_bytes());
    second.pd = import_pd(&second, context, first.pd);
    second.context = context;
    (first, second)
}

#[test]
fn a_process_uses_the_memory_that_another_one_registered() {
    let host = Host::new();
    let (first, mut second) = family(&host);
    let mut peer = host.client("b");
    let (from, to) = (first.memory(8, false), peer.memory(8, true));
    from.fill(8, 5);
    let reply = second.ask(&Request::ImportMr { pd: second.pd, mr: from.mr.handle });
    let Reply::ImportedMr { mr, lkey, rkey, length } = reply else { panic!("{reply:?}") };
    assert_eq!((lkey, rkey, length), (from.mr.lkey, from.mr.rkey, 64));
    let (mut cq, mut peer_cq) = (second.create_cq(8, None), peer.create_cq(8, None));
    let (mut qp, mut peer_qp) = (second.create_qp(QpType::Rc, &cq), peer.create_qp(QpType::Rc, &peer_cq));
    second.connect_rc(&qp, peer.gid(), peer_qp.qpn, 14);
    peer.connect_rc(&peer_qp, second.gid(), qp.qpn, 14);
    let sge = Sge { address: from.address, length: 64, lkey };
    peer.post_receive(&mut peer_qp, 1, &[to.sge(0, 64)]);
    second.post_send(&mut qp, &request(SendOpcode::Send, &[sge]));
    assert_eq!((cq.wait().status, peer_cq.wait().status), (CompletionStatus::Success, CompletionStatus::Success));
    assert!(to.is_filled(8, 5));

    // The region is its registrar's; the importer only gives its own handle up.
    let change = freeflow_verbs::RegionChange::default();
    assert_eq!(second.refused(&Request::ReregisterMr { mr, pd: None, change }), VerbsError::NotSupported);
    assert_eq!(second.ask(&Request::DeregisterMr { mr }), Reply::Done);
    assert_eq!(second.refused(&Request::DeregisterMr { mr }), VerbsError::NotFound);
    let context = second.context;
    assert_eq!(second.refused(&Request::DeallocPd { pd: second.pd }), VerbsError::Busy);
    assert_eq!(second.refused(&Request::CloseContext { context }), VerbsError::Busy);

    // Its process ends: the memory is gone, the PD is not.
    let (pd, handle) = (first.pd, from.mr.handle);
    drop(first);
    until("one session less", || (host.status().session_count == 2).then_some(()));
    assert_eq!(host.status().mr_count, 1);
    assert_eq!(second.refused(&Request::ImportPd { context, pd }), VerbsError::NotFound);
    assert_eq!(second.refused(&Request::ImportMr { pd: second.pd, mr: handle }), VerbsError::NotFound);
    second.register(from.address, 64);
    peer.post_receive(&mut peer_qp, 2, &[to.sge(0, 64)]);
    second.post_send(&mut qp, &request(SendOpcode::Send, &[sge]));
    assert_eq!(cq.wait().status, CompletionStatus::LocalProtectionError);
}

#[test]
fn the_owner_gives_a_domain_up_while_others_use_it() {
    let host = Host::new();
    let (first, second) = family(&host);
    assert_eq!(first.ask(&Request::DeallocPd { pd: first.pd }), Reply::Done);
    assert_eq!(first.refused(&register(first.pd)), VerbsError::NotFound);
    let reply = second.ask(&register(second.pd));
    let Reply::Mr { mr, .. } = reply else { panic!("{reply:?}") };
    assert_eq!(first.ask(&Request::CloseContext { context: first.context }), Reply::Done);
    // The pass went with the context.
    assert_eq!(second.refused(&Request::ImportContext { pass: first.pass_bytes() }), VerbsError::NotFound);
    let pd = second.pd;
    assert_eq!(second.refused(&Request::ImportPd { context: second.context, pd: first.pd }), VerbsError::NotFound);
    assert_eq!(second.ask(&Request::DeregisterMr { mr }), Reply::Done);
    assert_eq!(second.ask(&Request::DeallocPd { pd }), Reply::Done);
    assert_eq!(second.ask(&Request::CloseContext { context: second.context }), Reply::Done);
}

fn register(pd: Handle) -> Request {
    Request::RegisterMr { pd, address: 0x1000, length: 64, iova: 0x1000, access: freeflow_verbs::Access(1) }
}

#[test]
fn a_process_imports_from_itself() {
    let host = Host::new();
    let mut client = host.client("a");
    let memory = client.memory(8, true);
    let own = client.pd;
    let (context, fds) = import_context(&client, client.pass_bytes());
    let mut bytes = [0; PASS_BYTES];
    assert_eq!(rustix::io::pread(&fds[1], &mut bytes, 0), Ok(PASS_BYTES));
    assert_eq!(bytes, client.pass_bytes());
    client.context = context;
    client.pd = import_pd(&client, context, own);
    let again = import_pd(&client, context, own);
    let reply = client.ask(&Request::ImportMr { pd: again, mr: memory.mr.handle });
    assert!(matches!(reply, Reply::ImportedMr { length: 64, .. }), "{reply:?}");
    let mut cq = client.create_cq(8, None);
    let mut qp = client.create_qp(QpType::Rc, &cq);
    client.connect_rc(&qp, client.gid(), qp.qpn, 14);
    client.post_receive(&mut qp, 1, &[memory.sge(32, 32)]);
    memory.fill(4, 3);
    client.post_send(&mut qp, &request(SendOpcode::Send, &[memory.sge(0, 32)]));
    assert_eq!((cq.wait().status, cq.wait().status), (CompletionStatus::Success, CompletionStatus::Success));
    assert_eq!(memory.word(5).load(Relaxed), 6);
    // Any order: it lasts as long as it has a name.
    assert_eq!(client.ask(&Request::DeallocPd { pd: own }), Reply::Done);
    assert_eq!(client.ask(&Request::DeallocPd { pd: again }), Reply::Done);
    assert_eq!(client.refused(&Request::DeallocPd { pd: client.pd }), VerbsError::Busy);
    assert_eq!(client.ask(&Request::DestroyQp { qp: qp.handle }), Reply::Done);
    assert_eq!(client.ask(&Request::DeregisterMr { mr: memory.mr.handle }), Reply::Done);
    assert_eq!(client.ask(&Request::DeallocPd { pd: client.pd }), Reply::Done);
}

#[test]
fn nothing_is_imported_without_the_right_pass() {
    let host = Host::new();
    let (first, second, stranger) = (host.client("a"), host.client("a"), host.client("b"));
    let memory = first.memory(512, true);
    let mut wrong = first.pass_bytes();
    wrong[3] ^= 1;
    for pass in [wrong, [0; PASS_BYTES], stranger.pass_bytes()] {
        assert_eq!(second.refused(&Request::ImportContext { pass }), VerbsError::NotFound);
    }
    // A pass that leaked into another container is worth nothing there.
    assert_eq!(stranger.refused(&Request::ImportContext { pass: first.pass_bytes() }), VerbsError::NotFound);
    // Handles of others mean nothing in one's own context.
    let segment = memory.segment().unwrap();
    for (client, context) in [(&second, second.context), (&stranger, stranger.context)] {
        assert_eq!(client.refused(&Request::ImportSegment { context, segment }), VerbsError::NotFound);
        assert_eq!(client.refused(&Request::ImportMr { pd: client.pd, mr: memory.mr.handle }), VerbsError::NotFound);
        assert_eq!(client.refused(&Request::ImportPd { context, pd: 77 }), VerbsError::NotFound);
    }
    // With the pass: what is not there, what is in another context, what is in another PD.
    let (context, _) = import_context(&second, first.pass_bytes());
    for pd in [0, 77, u32::MAX] {
        assert_eq!(second.refused(&Request::ImportPd { context, pd }), VerbsError::NotFound);
    }
    let Reply::Context { context: other } = first.ask(&Request::OpenContext) else { panic!("no context") };
    let Reply::Pd { pd: hidden } = first.ask(&Request::AllocPd { context: other }) else { panic!("no PD") };
    assert_eq!(second.refused(&Request::ImportPd { context, pd: hidden }), VerbsError::NotFound);
    let Reply::Pd { pd: empty } = first.ask(&Request::AllocPd { context: first.context }) else { panic!("no PD") };
    let pd = import_pd(&second, context, empty);
    assert_eq!(second.refused(&Request::ImportMr { pd, mr: memory.mr.handle }), VerbsError::InvalidArgument);
    assert_eq!(second.refused(&Request::ImportSegment { context, segment: 77 }), VerbsError::NotFound);
    // An imported context has its exporter's objects, not those of whoever imported it.
    let (third, own) = (host.client("a"), second.memory(512, true));
    let (context, _) = import_context(&third, first.pass_bytes());
    assert_eq!(
        third.refused(&Request::ImportSegment { context, segment: own.segment().unwrap() + 1 }),
        VerbsError::NotFound
    );
}

#[test]
fn an_imported_segment_is_the_same_memory_and_stays_charged() {
    let host = Host::new();
    let (first, second) = family(&host);
    let memory = first.memory(512, true);
    let segment = memory.segment().unwrap();
    let (reply, fds) = second.ask_fds(&Request::ImportSegment { context: second.context, segment });
    let Reply::Segment { segment: imported, length: 4096 } = reply else { panic!("{reply:?}") };
    let mapped = Segment::map(fds[0].as_fd(), 4096).unwrap();
    memory.word(7).store(99, Relaxed);
    assert_eq!(mapped.u64(56).load(Relaxed), 99);
    let address = mapped.address() as u64;
    assert_eq!(second.ask(&Request::MapSegment { segment: imported, address }), Reply::Done);
    assert_eq!(first.ask(&Request::DeregisterMr { mr: memory.mr.handle }), Reply::Done);
    let before = host.status();
    assert_eq!(first.ask(&Request::DestroySegment { segment }), Reply::Done);
    drop(first);
    until("one session", || (host.status().session_count == 1).then_some(()));
    let after = host.status();
    assert_eq!((after.segment_count, after.segment_bytes), (before.segment_count, before.segment_bytes));
    assert_eq!(second.ask(&Request::DestroySegment { segment: imported }), Reply::Done);
    assert_eq!(host.status().segment_count, before.segment_count - 1);
}

#[test]
fn imports_have_a_limit() {
    let limits = VnicLimits { mr_count_max: 3, pd_count_max: 4, ..VnicLimits::default() };
    let host = Host::with_limits(limits);
    let (first, second) = family(&host);
    let memory = first.memory(8, false);
    let import = Request::ImportMr { pd: second.pd, mr: memory.mr.handle };
    for _ in 0..3 {
        assert!(matches!(second.ask(&import), Reply::ImportedMr { .. }));
    }
    assert_eq!(second.refused(&import), VerbsError::NoMemory);
    // The two own PDs and an import are there already.
    import_pd(&second, second.context, first.pd);
    let import = Request::ImportPd { context: second.context, pd: first.pd };
    assert_eq!(second.refused(&import), VerbsError::NoMemory);
    drop(second);
    until("one session", || (host.status().session_count == 1).then_some(()));
    let third = host.client("a");
    let (context, _) = import_context(&third, first.pass_bytes());
    let pd = import_pd(&third, context, first.pd);
    assert!(matches!(third.ask(&Request::ImportMr { pd, mr: memory.mr.handle }), Reply::ImportedMr { .. }));
}

#[test]
fn whoever_has_the_descriptor_can_not_change_the_pass() {
    let host = Host::new();
    let client = host.client("a");
    assert!(rustix::io::pwrite(&client.pass, &[0; PASS_BYTES], 0).is_err());
    assert!(rustix::fs::ftruncate(&client.pass, 0).is_err());
    assert!(matches!(client.ask(&Request::ImportContext { pass: client.pass_bytes() }), Reply::Context { .. }));
}
