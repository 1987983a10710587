//! Memory that is granted to a QP's process, what is refused, and how it is taken back.
use crate::common::*;
use freeflow_protocol::admin::QpPath;
use freeflow_protocol::library::{COMMAND_SHARE, GrantAccess, Handle, Reply, Request, SHARE_BYTES, decode_command};
use freeflow_router::{Config, Router};
use freeflow_shm::{Segment, SendDescriptor};
use freeflow_verbs::{
    Access, CompletionStatus, Duration, QpAttributeMask, QpAttributes, QpState, QpType, RegionChange, SendOpcode,
    VerbsError, VnicLimits, WindowKind,
};
use rustix::fs::{FallocateFlags, SealFlags};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

const PAGE_BYTES: u64 = 4096;
/// Words of a page.
const PAGE: usize = 512;
const READ_ONLY: Access = Access(Access::LOCAL_WRITE.0 | Access::REMOTE_READ.0);

fn open_commands(client: &Client) -> OwnedFd {
    let (reply, mut fds) = client.ask_fds(&Request::OpenCommands);
    assert_eq!(reply, Reply::Done);
    fds.pop().expect("the command pipe")
}

fn ask_grant(
    client: &Client,
    qp: &Qp,
    rkey: u32,
    (address, length): (u64, u32),
    writes: bool,
) -> Result<(Reply, OwnedFd), VerbsError> {
    ask_access(client, qp, rkey, (address, length), if writes { GrantAccess::Write } else { GrantAccess::Read })
}

fn ask_access(
    client: &Client,
    qp: &Qp,
    rkey: u32,
    (address, length): (u64, u32),
    access: GrantAccess,
) -> Result<(Reply, OwnedFd), VerbsError> {
    match client.ask_fds(&Request::AskGrant { qp: qp.handle, rkey, address, length, access }) {
        (Reply::Failed(error), fds) if fds.is_empty() => Err(error),
        (reply @ Reply::Grant { .. }, mut fds) => Ok((reply, fds.pop().expect("the segment"))),
        other => panic!("{other:?}"),
    }
}

fn register(client: &Client, address: u64, length: u64, iova: u64, access: Access) -> Mr {
    let reply = client.ask(&Request::RegisterMr { pd: client.pd, address, length, iova, access });
    let Reply::Mr { mr, lkey, rkey } = reply else { panic!("{reply:?}") };
    Mr { handle: mr, lkey, rkey }
}

fn pages(descriptor: &OwnedFd, count: u64) -> Segment {
    Segment::map(descriptor.as_fd(), (count * PAGE_BYTES) as usize).unwrap()
}

/// A segment of `count` pages and where it is mapped; the router has not been notified.
fn create_segment(client: &Client, count: u64) -> (Handle, Segment) {
    let (reply, fds) = client.ask_fds(&Request::CreateSegment { length: count * PAGE_BYTES });
    let Reply::Segment { segment, .. } = reply else { panic!("{reply:?}") };
    let mapped = pages(&fds[0], count);
    // As the library does: the pages are the program's from the start.
    mapped.populate(0, mapped.bytes()).unwrap();
    (segment, mapped)
}

fn map_part(segment: Handle, mapped: &Segment, page: u64) -> Request {
    let offset = page * PAGE_BYTES;
    Request::MapPart { segment, offset, address: mapped.address() as u64 + offset, length: PAGE_BYTES }
}

/// A pair whose second end has memory of two pages that it takes back when it is asked to.
struct Rig {
    pair: Pair,
    commands: OwnedFd,
    to: Memory,
}

impl Rig {
    fn new() -> Self {
        Self::on(Host::new())
    }

    fn on(host: Host) -> Self {
        let pair = Pair::on(host, 14);
        let commands = open_commands(&pair.b);
        let to = pair.b.memory(2 * PAGE, true);
        Self { pair, commands, to }
    }

    fn ask_by(&self, rkey: u32, writes: bool) -> Result<(Reply, OwnedFd), VerbsError> {
        ask_grant(&self.pair.a, &self.pair.a_qp, rkey, (self.to.address + 8, 16), writes)
    }

    fn ask(&self, writes: bool) -> Result<(Reply, OwnedFd), VerbsError> {
        self.ask_by(self.to.mr.rkey, writes)
    }

    fn segment(&self) -> Handle {
        self.to.segment().unwrap()
    }

    fn revoked(&self) -> u32 {
        self.pair.a_qp.send.grants_revoked()
    }
}

#[test]
fn what_is_written_through_a_grant_is_there() {
    let mut rig = Rig::new();
    let (address, segment_bytes) = (rig.to.address, 2 * PAGE_BYTES);
    let (reply, descriptor) = rig.ask(true).unwrap();
    let expected =
        Reply::Grant { address, length: segment_bytes, offset: 0, segment_bytes, grants_revoked: 0, writable: true };
    assert_eq!(reply, expected);
    let granted = pages(&descriptor, 2);
    granted.u64(8 * 1000).store(77, Relaxed);
    assert_eq!(rig.to.word(1000).load(Relaxed), 77);
    // The router reaches the same bytes.
    let from = rig.pair.a.memory(8, true);
    let sges = [from.sge(0, 8)];
    let read =
        SendDescriptor { remote_address: address + 8000, rkey: rig.to.mr.rkey, ..request(SendOpcode::RdmaRead, &sges) };
    rig.pair.a.post_send(&mut rig.pair.a_qp, &read);
    assert_eq!(rig.pair.a_cq.wait().status, CompletionStatus::Success);
    assert_eq!(from.word(0).load(Relaxed), 77);
    // Reading by the same key, and by another that names the memory otherwise.
    let (Reply::Grant { writable: false, .. }, _) = rig.ask(false).unwrap() else { panic!("no grant for READ") };
    let other = register(&rig.pair.b, address, segment_bytes, 0x7000_0000, Access(0xf));
    let (reply, _) = ask_grant(&rig.pair.a, &rig.pair.a_qp, other.rkey, (0x7000_1000, 8), true).unwrap();
    let Reply::Grant { address: 0x7000_0000, length, offset: 0, .. } = reply else { panic!("{reply:?}") };
    assert_eq!(length, segment_bytes);
    // A holder can't set seals.
    assert!(rustix::fs::fcntl_add_seals(&descriptor, SealFlags::FUTURE_WRITE).is_err());
}

#[test]
fn a_grant_for_reading_can_not_be_written_by() {
    let rig = Rig::new();
    let mr = register(&rig.pair.b, rig.to.address, 2 * PAGE_BYTES, rig.to.address, READ_ONLY);
    rig.to.word(3).store(5, Relaxed);
    let (reply, descriptor) = rig.ask_by(mr.rkey, false).unwrap();
    let Reply::Grant { writable: false, .. } = reply else { panic!("{reply:?}") };
    let reopened =
        std::fs::File::options().read(true).write(true).open(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
    for file in [Some(descriptor), reopened.ok().map(OwnedFd::from)].into_iter().flatten() {
        let mut bytes = [0; 8];
        assert_eq!(rustix::io::pread(&file, &mut bytes, 24), Ok(8));
        assert_eq!(u64::from_ne_bytes(bytes), 5);
        assert!(Segment::map(file.as_fd(), PAGE_BYTES as usize).is_err(), "mapped for writing");
        assert!(rustix::io::pwrite(&file, &bytes, 0).is_err());
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert!(rustix::fs::fallocate(&file, punch, 0, PAGE_BYTES).is_err());
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
    }
    // Its owner's mapping stays as it is. Nobody gets it for writing any more, but again for reading.
    rig.to.word(3).store(6, Relaxed);
    assert_eq!(rig.ask(true).unwrap_err(), VerbsError::NotSupported);
    assert!(rig.ask(false).is_ok() && rig.ask_by(mr.rkey, false).is_ok());
}

#[test]
fn who_may_only_read_gets_nothing_of_what_others_may_write() {
    let rig = Rig::new();
    let mr = register(&rig.pair.b, rig.to.address, 2 * PAGE_BYTES, rig.to.address, READ_ONLY);
    rig.ask(false).unwrap();
    assert_eq!(rig.ask_by(mr.rkey, false).unwrap_err(), VerbsError::NotSupported);
    assert!(rig.ask(true).is_ok());
}

#[test]
fn keys_that_do_not_admit_a_request_grant_nothing() {
    let rig = Rig::new();
    let Rig { pair: Pair { a, b, a_qp, .. }, to, .. } = &rig;
    let (address, length) = (to.address, 2 * PAGE_BYTES);
    let refused = |rkey: u32, range: (u64, u32), writes: bool| ask_grant(a, a_qp, rkey, range, writes).unwrap_err();
    let range = (address, 8);
    let none = VerbsError::NotSupported;
    assert_eq!(refused(to.mr.rkey ^ 1, range, true), none, "another key");
    assert_eq!(refused(to.mr.rkey, (address + length - 4, 8), true), none, "beyond the region");
    assert_eq!(refused(to.mr.rkey, (address, 0), true), none, "no byte");
    let reads = register(b, address, length, address, READ_ONLY);
    assert_eq!(refused(reads.rkey, range, true), none, "no right to write");
    let writes = register(b, address, length, address, Access(Access::LOCAL_WRITE.0 | Access::REMOTE_WRITE.0));
    assert_eq!(refused(writes.rkey, range, false), none, "no right to read");
    let Reply::Pd { pd } = b.ask(&Request::AllocPd { context: b.context }) else { panic!("no PD") };
    let reply = b.ask(&Request::RegisterMr { pd, address, length, iova: address, access: Access(0xf) });
    let Reply::Mr { rkey, .. } = reply else { panic!("{reply:?}") };
    assert_eq!(refused(rkey, range, true), none, "another PD");
    let everything = Access(0xf | Access::ON_DEMAND.0);
    let all = register(b, 0, u64::MAX, 0, everything);
    assert_eq!(refused(all.rkey, range, true), none, "all addresses");
    let page = register(b, address, PAGE_BYTES, address, Access(0xf));
    assert_eq!(refused(page.rkey, range, true), none, "the segment has another page");
    let ordinary = b.memory(8, false);
    let later = VerbsError::Busy;
    assert_eq!(refused(ordinary.mr.rkey, (ordinary.address, 8), true), later, "in no segment yet");
    assert!(ask_grant(a, a_qp, to.mr.rkey, range, true).is_ok());
    assert_eq!(a_qp.send.grants_revoked(), 0, "the questions took nothing from anybody");
}

/// The path of the first end's QP, and why it is not a better one.
fn way(rig: &Rig) -> (QpPath, Option<String>) {
    let (mut qps, _) = qps(&rig.pair.host.run_dir(), Some("a"), None);
    qps.pop().map(|qp| (qp.path, qp.reason)).expect("its QP")
}

#[test]
fn each_refusal_is_reported_until_there_is_a_grant() {
    let mut rig = Rig::new();
    let from = rig.pair.a.memory(8, true);
    let by_router = |rig: &mut Rig, opcode: SendOpcode| {
        let (remote_address, rkey) = (rig.to.address, rig.to.mr.rkey);
        let sges = [from.sge(0, 8)];
        rig.pair.a.post_send(&mut rig.pair.a_qp, &SendDescriptor { remote_address, rkey, ..request(opcode, &sges) });
        assert_eq!(rig.pair.a_cq.wait().status, CompletionStatus::Success);
    };
    let routed = |why: &str| (QpPath::Routed, Some(why.to_owned()));
    let refused = |rig: &Rig, rkey: u32, address: u64, writes: bool| {
        ask_grant(&rig.pair.a, &rig.pair.a_qp, rkey, (address, 8), writes).unwrap_err();
        way(rig)
    };
    let ask_atomics = |rig: &Rig, rkey: u32, address: u64| {
        ask_access(&rig.pair.a, &rig.pair.a_qp, rkey, (address, 8), GrantAccess::Atomic).map(|_| ())
    };
    by_router(&mut rig, SendOpcode::RdmaWrite);
    assert_eq!(way(&rig), routed("not asked yet"));
    let (address, rkey) = (rig.to.address, rig.to.mr.rkey);
    assert_eq!(refused(&rig, rkey ^ 1, address, true), routed("key refused"));
    let everything = register(&rig.pair.b, 0, u64::MAX, 0, Access(0xf | Access::ON_DEMAND.0));
    assert_eq!(refused(&rig, everything.rkey, address, true), routed("no process' own memory"));
    let page = register(&rig.pair.b, address, PAGE_BYTES, address, Access(0xf));
    assert_eq!(refused(&rig, page.rkey, address, true), routed("memory beyond the region"));
    let ordinary = rig.pair.b.memory(8, false);
    assert_eq!(refused(&rig, ordinary.mr.rkey, ordinary.address, true), routed("memory not shared with the router"));
    let imported = rig.pair.b.memory(PAGE, true);
    let import = Request::ImportSegment { context: rig.pair.b.context, segment: imported.segment().unwrap() };
    assert!(matches!(rig.pair.b.ask_fds(&import).0, Reply::Segment { .. }));
    assert_eq!(refused(&rig, imported.mr.rkey, imported.address, true), routed("memory of several processes"));
    if let Some(borrowed) = rig.pair.b.borrowed_memory(PAGE) {
        assert_eq!(refused(&rig, borrowed.mr.rkey, borrowed.address, true), routed("memory of several processes"));
    }
    rig.ask(true).unwrap();
    assert_eq!(way(&rig), (QpPath::Direct, None));
    // Of READs the router has refused one, of WRITEs nothing since.
    let reads = register(&rig.pair.b, address, 2 * PAGE_BYTES, address, READ_ONLY);
    assert_eq!(refused(&rig, reads.rkey, address, false), (QpPath::Direct, None));
    by_router(&mut rig, SendOpcode::RdmaRead);
    assert_eq!(way(&rig), routed("too many grants"));
    rig.pair.a_qp.send.count_write(8);
    assert_eq!(way(&rig), (QpPath::Direct, None), "its last request was a WRITE past the router");
    by_router(&mut rig, SendOpcode::AtomicWrite);
    assert_eq!(way(&rig), routed("neither SEND, WRITE, READ nor atomic"));
    let no_atomics = register(&rig.pair.b, address, 2 * PAGE_BYTES, address, Access(0x7));
    assert_eq!(ask_atomics(&rig, no_atomics.rkey, address), Err(VerbsError::NotSupported));
    by_router(&mut rig, SendOpcode::FetchAdd);
    assert_eq!(way(&rig), routed("key refused"));
    assert_eq!(ask_atomics(&rig, rig.to.mr.rkey, address), Ok(()));
    assert_eq!(way(&rig), (QpPath::Direct, None));
    by_router(&mut rig, SendOpcode::RdmaWrite);
    assert_eq!(way(&rig), (QpPath::Direct, None));
    assert_eq!(rig.pair.b.ask(&Request::DeregisterMr { mr: page.handle }), Reply::Done);
    assert_eq!(rig.pair.b.ask(&Request::DeregisterMr { mr: rig.to.mr.handle }), Reply::Done);
    assert_eq!(way(&rig), routed("memory was taken back"));
    assert_eq!(refused(&rig, reads.rkey, address, true), routed("key refused"));
    assert_eq!(refused(&rig, everything.rkey, address, true), routed("no process' own memory"));
    let again = register(&rig.pair.b, address, 2 * PAGE_BYTES, address, Access(0xf));
    assert_eq!(refused(&rig, again.rkey, address, true), routed("memory was taken back"));
}

#[test]
fn an_owner_without_a_command_pipe_is_the_reason() {
    let mut pair = Pair::new();
    let (from, to) = (pair.a.memory(8, true), pair.b.memory(PAGE, true));
    let sges = [from.sge(0, 8)];
    let write =
        SendDescriptor { remote_address: to.address, rkey: to.mr.rkey, ..request(SendOpcode::RdmaWrite, &sges) };
    pair.a.post_send(&mut pair.a_qp, &write);
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    ask_grant(&pair.a, &pair.a_qp, to.mr.rkey, (to.address, 8), true).unwrap_err();
    let (qps, _) = qps(&pair.host.run_dir(), Some("a"), None);
    assert_eq!(qps[0].reason.as_deref(), Some("peer's process takes no revoke commands"));
}

#[test]
fn keys_of_windows_grant_nothing() {
    let mut rig = Rig::new();
    let (b, address) = (&rig.pair.b, rig.to.address);
    let mr = register(b, address, 2 * PAGE_BYTES, address, Access(0xf | Access::MW_BIND.0));
    let reply = b.ask(&Request::AllocMw { pd: b.pd, kind: WindowKind::Type1 });
    let Reply::Mw { rkey, .. } = reply else { panic!("{reply:?}") };
    let rkey = rkey & !0xff | (rkey + 1) & 0xff;
    let bind = SendDescriptor {
        immediate: mr.lkey,
        remote_address: address,
        rkey,
        compare_add: 2 * PAGE_BYTES,
        swap: u64::from(Access::REMOTE_WRITE.0),
        ..request(SendOpcode::BindWindow, &[])
    };
    rig.pair.b.post_send(&mut rig.pair.b_qp, &bind);
    assert_eq!(rig.pair.b_cq.wait().status, CompletionStatus::Success);
    assert_eq!(rig.ask_by(rkey, true).unwrap_err(), VerbsError::NotSupported);
    assert!(rig.ask_by(mr.rkey, true).is_ok());
}

#[test]
fn queue_pairs_that_do_not_admit_a_request_get_nothing() {
    let mut rig = Rig::new();
    let qp = rig.pair.a.create_qp(QpType::Rc, &rig.pair.a_cq);
    let range = (rig.to.address, 8);
    assert_eq!(ask_grant(&rig.pair.a, &qp, rig.to.mr.rkey, range, true).unwrap_err(), VerbsError::Busy);
    let unconnected = rig.pair.a.create_qp(QpType::Ud, &rig.pair.a_cq);
    let refused = ask_grant(&rig.pair.a, &unconnected, rig.to.mr.rkey, range, true).unwrap_err();
    assert_eq!(refused, VerbsError::NotSupported);
    let attributes = QpAttributes { access: Access(Access::REMOTE_READ.0), ..QpAttributes::default() };
    let reply = rig.pair.b.modify(&rig.pair.b_qp, attributes, QpAttributeMask::ACCESS_FLAGS);
    assert_eq!(reply, Reply::QpModified { state: QpState::ReadyToSend });
    assert_eq!(rig.ask(true).unwrap_err(), VerbsError::NotSupported);
    // A segment that the QP may not write it gets for reading only.
    let (_, descriptor) = rig.ask(false).unwrap();
    assert!(Segment::map(descriptor.as_fd(), PAGE_BYTES as usize).is_err());
}

#[test]
fn an_owner_without_a_command_pipe_grants_nothing() {
    let pair = Pair::new();
    let to = pair.b.memory(PAGE, true);
    let ask = || ask_grant(&pair.a, &pair.a_qp, to.mr.rkey, (to.address, 8), true);
    assert_eq!(ask().unwrap_err(), VerbsError::NotSupported);
    let _commands = open_commands(&pair.b);
    assert_eq!(pair.b.refused(&Request::OpenCommands), VerbsError::Exists);
    assert!(ask().is_ok());
    assert_eq!(pair.b.refused(&Request::ConfirmRevocation { segment: to.segment().unwrap() }), VerbsError::NotFound);
    assert_eq!(pair.b.refused(&Request::ConfirmRevocation { segment: 777 }), VerbsError::NotFound);
}

#[test]
fn a_segment_is_imported_or_granted_but_not_both() {
    let rig = Rig::new();
    let b = &rig.pair.b;
    let import = |memory: &Memory| Request::ImportSegment { context: b.context, segment: memory.segment().unwrap() };
    let imported = b.memory(PAGE, true);
    assert!(matches!(b.ask_fds(&import(&imported)).0, Reply::Segment { .. }));
    let range = (imported.address, 8);
    let refused = ask_grant(&rig.pair.a, &rig.pair.a_qp, imported.mr.rkey, range, true).unwrap_err();
    assert_eq!(refused, VerbsError::NotSupported);
    rig.ask(true).unwrap();
    assert_eq!(b.refused(&import(&rig.to)), VerbsError::NotSupported);
}

/// Checks an end of a right while the owner's process goes on: the number has grown when it is
/// answered, and a command comes.
fn is_revoked_by(end: impl FnOnce(&mut Rig)) {
    let mut rig = Rig::new();
    rig.to.fill(2 * PAGE, 3);
    rig.ask(true).unwrap();
    let before = rig.revoked();
    assert!(!has_event(&rig.commands));
    end(&mut rig);
    assert_ne!(rig.revoked(), before);
    let segment = rig.segment();
    assert_eq!(read_event(&rig.commands), Some((segment, 0)));
    // Not even by a key that is good.
    let mut peer = rig.pair.host.client("c");
    let peer_cq = peer.create_cq(8, None);
    let mut b_cq = rig.pair.b.create_cq(8, None);
    let (mut qp, b_qp) = (peer.create_qp(QpType::Rc, &peer_cq), rig.pair.b.create_qp(QpType::Rc, &b_cq));
    peer.connect_rc(&qp, rig.pair.b.gid(), b_qp.qpn, 14);
    rig.pair.b.connect_rc(&b_qp, peer.gid(), qp.qpn, 14);
    let mr = rig.pair.b.register(rig.to.address, 2 * PAGE_BYTES);
    let ask = |qp: &Qp| ask_grant(&peer, qp, mr.rkey, (rig.to.address, 8), true);
    assert_eq!(ask(&qp).unwrap_err(), VerbsError::Busy);
    let confirm = Request::ConfirmRevocation { segment };
    assert_eq!(rig.pair.b.ask(&confirm), Reply::Done);
    assert_eq!(rig.pair.b.refused(&confirm), VerbsError::NotFound);
    assert_eq!(ask(&qp).unwrap_err(), VerbsError::Busy);
    // The router still reaches the memory, by its address.
    let from = peer.memory(8, true);
    from.fill(8, 9);
    let sges = [from.sge(0, 64)];
    let write =
        SendDescriptor { remote_address: rig.to.address, rkey: mr.rkey, ..request(SendOpcode::RdmaWrite, &sges) };
    peer.post_send(&mut qp, &write);
    let mut peer_cq = peer_cq;
    assert_eq!(peer_cq.wait().status, CompletionStatus::Success);
    assert!(rig.to.is_filled(8, 9) && rig.to.word(9).load(Relaxed) == 30);
    assert!(!b_cq.ring.poll(&mut Default::default()));
    // Nothing may lie there any more.
    let address = rig.to.address;
    assert_eq!(rig.pair.b.ask(&Request::DeregisterMr { mr: mr.handle }), Reply::Done);
    let offset_0 = Request::MapPart { segment, offset: 0, address, length: PAGE_BYTES };
    assert_eq!(rig.pair.b.refused(&offset_0), VerbsError::NotSupported);
}

#[test]
fn regions_that_end_or_change_are_revoked() {
    let dereg = |rig: &mut Rig| {
        assert_eq!(rig.pair.b.ask(&Request::DeregisterMr { mr: rig.to.mr.handle }), Reply::Done);
    };
    let rereg = |rig: &mut Rig| {
        let change = RegionChange { translation: None, access: Some(READ_ONLY) };
        let request = Request::ReregisterMr { mr: rig.to.mr.handle, pd: None, change };
        assert!(matches!(rig.pair.b.ask(&request), Reply::Mr { .. }));
    };
    is_revoked_by(dereg);
    is_revoked_by(rereg);
}

#[test]
fn queue_pairs_that_end_or_change_lose_their_grants_on_both_sides() {
    let to_error = QpAttributes { state: QpState::Error, ..QpAttributes::default() };
    let failed = Reply::QpModified { state: QpState::Error };
    is_revoked_by(|rig| {
        assert_eq!(rig.pair.a.modify(&rig.pair.a_qp, to_error, QpAttributeMask::STATE), failed);
    });
    is_revoked_by(|rig| {
        assert_eq!(rig.pair.b.modify(&rig.pair.b_qp, to_error, QpAttributeMask::STATE), failed);
    });
    is_revoked_by(|rig| {
        assert_eq!(rig.pair.a.ask(&Request::DestroyQp { qp: rig.pair.a_qp.handle }), Reply::Done);
    });
    is_revoked_by(|rig| {
        assert_eq!(rig.pair.b.ask(&Request::DestroyQp { qp: rig.pair.b_qp.handle }), Reply::Done);
    });
    // A request that fails.
    is_revoked_by(|rig| {
        let from = rig.pair.a.memory(8, true);
        let sges = [from.sge(0, 8)];
        let write = SendDescriptor { remote_address: 8, rkey: 1, ..request(SendOpcode::RdmaWrite, &sges) };
        rig.pair.a.post_send(&mut rig.pair.a_qp, &write);
        assert_eq!(rig.pair.a_cq.wait().status, CompletionStatus::RemoteAccessError);
    });
}

#[test]
fn the_end_of_a_holder_is_the_end_of_its_grants() {
    let mut rig = Rig::new();
    let peer = rig.pair.host.client("c");
    rig.ask(true).unwrap();
    let segment = rig.segment();
    drop(std::mem::replace(&mut rig.pair.a, peer));
    assert_eq!(read_event(&rig.commands), Some((segment, 0)));
    assert_eq!(rig.pair.b.ask(&Request::ConfirmRevocation { segment }), Reply::Done);
}

#[test]
fn grantees_are_notified_of_the_end_of_an_owner() {
    let mut rig = Rig::new();
    rig.ask(true).unwrap();
    let before = rig.revoked();
    let peer = rig.pair.host.client("c");
    drop(std::mem::replace(&mut rig.pair.b, peer));
    until("the grant is revoked", || (rig.revoked() != before).then_some(()));
    assert_eq!(rig.ask(true).unwrap_err(), VerbsError::Busy);
    assert_eq!(read_event(&rig.commands), None);
}

#[test]
fn an_owner_that_takes_its_pages_back_needs_no_command() {
    let rig = Rig::new();
    let Pair { a, b, a_qp, .. } = &rig.pair;
    let (segment, mapped) = create_segment(b, 3);
    let address = mapped.address() as u64;
    for page in [0, 1] {
        assert_eq!(b.ask(&map_part(segment, &mapped, page)), Reply::Done);
    }
    let mr = b.register(address, 2 * PAGE_BYTES);
    let ask = || ask_grant(a, a_qp, mr.rkey, (address + PAGE_BYTES, 8), true);
    let (reply, _) = ask().unwrap();
    let Reply::Grant { length, offset: 0, grants_revoked: 0, .. } = reply else { panic!("{reply:?}") };
    assert_eq!(length, 2 * PAGE_BYTES);
    // A page is taken back: the rest is not granted any more, whose place others still reach.
    assert_eq!(b.ask(&Request::UnmapPart { address, length: PAGE_BYTES }), Reply::Done);
    assert_eq!(a_qp.send.grants_revoked(), 1);
    assert_eq!(ask().unwrap_err(), VerbsError::NotSupported);
    b.settle();
    assert!(!has_event(&rig.commands));
    // So the end of the region still takes a command.
    assert_eq!(b.ask(&Request::DeregisterMr { mr: mr.handle }), Reply::Done);
    assert_eq!(a_qp.send.grants_revoked(), 2);
    assert_eq!(read_event(&rig.commands), Some((segment, 0)));
    // An answer that the process has no such segment any more is as good.
    assert_eq!(b.ask(&Request::DestroySegment { segment }), Reply::Done);
    assert_eq!(b.refused(&Request::ConfirmRevocation { segment }), VerbsError::NotFound);

    let (segment, mapped) = create_segment(b, 1);
    let address = mapped.address() as u64;
    assert_eq!(b.ask(&map_part(segment, &mapped, 0)), Reply::Done);
    let mr = b.register(address, PAGE_BYTES);
    ask_grant(a, a_qp, mr.rkey, (address, 8), true).unwrap();
    assert_eq!(b.ask(&Request::UnmapPart { address, length: PAGE_BYTES }), Reply::Done);
    assert_eq!(a_qp.send.grants_revoked(), 3);
    assert_eq!(b.ask(&Request::DeregisterMr { mr: mr.handle }), Reply::Done);
    b.settle();
    assert!(!has_event(&rig.commands));
    assert_eq!(b.refused(&map_part(segment, &mapped, 0)), VerbsError::NotSupported);
}

#[test]
fn what_is_mapped_later_is_not_reached_by_what_was_granted_before() {
    let rig = Rig::new();
    let Pair { a, b, a_qp, .. } = &rig.pair;
    let (segment, mapped) = create_segment(b, 3);
    let address = mapped.address() as u64;
    assert_eq!(b.ask(&map_part(segment, &mapped, 0)), Reply::Done);
    let mr = b.register(address, 2 * PAGE_BYTES);
    let ask = || ask_grant(a, a_qp, mr.rkey, (address, 8), true);
    let (Reply::Grant { length: PAGE_BYTES, .. }, _) = ask().unwrap() else { panic!("a page") };
    // In the region: the grant covers it anyway.
    assert_eq!(b.ask(&map_part(segment, &mapped, 1)), Reply::Done);
    let (Reply::Grant { length, .. }, _) = ask().unwrap() else { panic!("no grant") };
    assert_eq!((length, a_qp.send.grants_revoked()), (2 * PAGE_BYTES, 0));
    // Beyond it.
    assert_eq!(b.refused(&map_part(segment, &mapped, 2)), VerbsError::NotSupported);
    assert_eq!(a_qp.send.grants_revoked(), 1);
    assert_eq!(read_event(&rig.commands), Some((segment, 0)));
    assert_eq!(ask().unwrap_err(), VerbsError::Busy);
    assert_eq!(b.ask(&Request::ConfirmRevocation { segment }), Reply::Done);
}

#[test]
fn a_region_that_ends_takes_every_holder_s_grant() {
    let mut rig = Rig::new();
    let (qp, _peer) = second_pair(&mut rig.pair);
    let other = rig.pair.b.register(rig.to.address, 2 * PAGE_BYTES);
    rig.ask(true).unwrap();
    ask_grant(&rig.pair.a, &qp, other.rkey, (rig.to.address, 8), true).unwrap();
    assert_eq!(rig.pair.b.ask(&Request::DeregisterMr { mr: rig.to.mr.handle }), Reply::Done);
    assert_eq!((rig.revoked(), qp.send.grants_revoked()), (1, 1));
    assert_eq!(read_event(&rig.commands), Some((rig.segment(), 0)));
    rig.pair.b.settle();
    assert!(!has_event(&rig.commands), "one command for both");
}

#[test]
fn who_does_not_take_its_memory_back_in_time_loses_its_session() {
    let directory = Directory::new();
    let revocation_time = Duration::from_millis(50);
    let router = Router::start(Config { revocation_time, ..config(&directory.0, VnicLimits::default()) }).unwrap();
    let rig = Rig::on(Host { directory, router: Some(router) });
    rig.ask(true).unwrap();
    assert_eq!(rig.pair.b.ask(&Request::DeregisterMr { mr: rig.to.mr.handle }), Reply::Done);
    assert_eq!(read_event(&rig.commands), Some((rig.segment(), 0)));
    // The pipe ends with the session.
    assert_eq!(read_event(&rig.commands), None);
    until("one session less", || (rig.pair.host.status().session_count == 1).then_some(()));
    assert!(matches!(rig.pair.a.ask(&Request::AllocPd { context: rig.pair.a.context }), Reply::Pd { .. }));
}

#[test]
fn revoked_memory_is_shared_again_for_credit() {
    let mut rig = Rig::new();
    let (segment, mapped) = create_segment(&rig.pair.b, 3);
    let address = mapped.address() as u64;
    for page in [0, 1] {
        assert_eq!(rig.pair.b.ask(&map_part(segment, &mapped, page)), Reply::Done);
    }
    let mr = rig.pair.b.register(address, 2 * PAGE_BYTES);
    let from = rig.pair.a.memory(2 * PAGE, true);
    let write = |rig: &mut Rig, word: u64| {
        from.word(0).store(word, Relaxed);
        let sges = [from.sge(0, 2 * PAGE_BYTES as u32)];
        let write = SendDescriptor { remote_address: address, rkey: mr.rkey, ..request(SendOpcode::RdmaWrite, &sges) };
        rig.pair.a.post_send(&mut rig.pair.a_qp, &write);
        assert_eq!(rig.pair.a_cq.wait().status, CompletionStatus::Success);
        rig.pair.b.settle();
    };
    let ask = |rig: &Rig| ask_grant(&rig.pair.a, &rig.pair.a_qp, mr.rkey, (address, 8), true);
    ask(&rig).unwrap();
    assert_eq!(rig.pair.b.refused(&map_part(segment, &mapped, 2)), VerbsError::NotSupported);
    assert_eq!(read_event(&rig.commands), Some((segment, 0)));
    for word in 1..1500 {
        write(&mut rig, word);
        assert_eq!(mapped.u64(0).load(Relaxed), word);
    }
    assert!(!has_event(&rig.commands), "the first command is not carried out");
    assert_eq!(rig.pair.b.ask(&Request::ConfirmRevocation { segment }), Reply::Done);
    assert!(!has_event(&rig.commands));
    write(&mut rig, 1500);
    assert_eq!(read_event(&rig.commands), Some((segment, 1)));
    assert_eq!(ask(&rig).unwrap_err(), VerbsError::Busy, "it may come back");
    // A process that does nothing about it gets the command less and less often.
    let mut commands = 0;
    for word in 0..3000 {
        write(&mut rig, word);
        while has_event(&rig.commands) {
            assert_eq!(read_event(&rig.commands), Some((segment, 1)));
            commands += 1;
        }
    }
    assert_eq!(commands, 1);
    // One that does: the router reaches the new segment, and grants it.
    let (again, shared) = create_segment(&rig.pair.b, 2);
    let map = Request::MapPart { segment: again, offset: 0, address, length: 2 * PAGE_BYTES };
    assert_eq!(rig.pair.b.ask(&map), Reply::Done);
    for word in 3000..3200 {
        write(&mut rig, word);
        assert_eq!((mapped.u64(0).load(Relaxed), shared.u64(0).load(Relaxed)), (2999, word));
    }
    assert!(!has_event(&rig.commands));
    let (Reply::Grant { length, .. }, _) = ask(&rig).unwrap() else { panic!("no grant") };
    assert_eq!(length, 2 * PAGE_BYTES);
}

/// Accesses for the requests of the first QP, their bytes, and why, the last time.
fn slow_path_of(pair: &Pair) -> (u64, u64, Option<String>) {
    let (qps, _) = qps(&pair.host.run_dir(), Some("a"), None);
    let qp = qps.into_iter().find(|qp| qp.qpn == pair.a_qp.qpn).expect("its QP");
    (qp.slow_path_accesses, qp.slow_path_bytes, qp.slow_path_reason)
}

#[test]
fn memory_that_the_slow_path_reaches_again_and_again_is_to_be_shared() {
    let mut rig = Rig::new();
    let (to, from) = (rig.pair.b.memory(64, false), rig.pair.a.memory(PAGE, true));
    let on_demand = register(
        &rig.pair.b,
        to.address,
        64,
        0,
        Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::ON_DEMAND),
    );
    let write = |rig: &mut Rig, rkey: u32, remote_address: u64| {
        let sges = [from.sge(0, 8)];
        let write = SendDescriptor { remote_address, rkey, ..request(SendOpcode::RdmaWrite, &sges) };
        rig.pair.a.post_send(&mut rig.pair.a_qp, &write);
        assert_eq!(rig.pair.a_cq.wait().status, CompletionStatus::Success);
        rig.pair.b.settle();
    };
    for _ in 0..99 {
        write(&mut rig, on_demand.rkey, 0);
    }
    assert!(!has_event(&rig.commands), "memory on demand stays where it is");
    assert_eq!(slow_path_of(&rig.pair), (99, 99 * 8, Some("registered on demand".into())));
    for _ in 0..7 {
        write(&mut rig, to.mr.rkey, to.address);
        assert!(!has_event(&rig.commands));
    }
    write(&mut rig, to.mr.rkey, to.address);
    let (first, second) = read_event(&rig.commands).unwrap();
    let (kind, block) = decode_command(first, second);
    assert_eq!((kind, block), (COMMAND_SHARE, to.address / SHARE_BYTES * SHARE_BYTES));
    write(&mut rig, to.mr.rkey, to.address);
    assert!(!has_event(&rig.commands), "the next one takes more");
    assert_eq!(slow_path_of(&rig.pair), (108, 108 * 8, Some("not shared when asked".into())));
    // A process that does it: the router uses the segment, and grants it to nobody that a region does not cover.
    let (segment, mapped) = create_segment(&rig.pair.b, 1);
    let address = to.address & !(PAGE_BYTES - 1);
    let map = Request::MapPart { segment, offset: 0, address, length: PAGE_BYTES };
    assert_eq!(rig.pair.b.ask(&map), Reply::Done);
    from.word(0).store(1234, Relaxed);
    for _ in 0..99 {
        write(&mut rig, to.mr.rkey, to.address);
    }
    assert_eq!(mapped.u64((to.address - address) as usize).load(Relaxed), 1234);
    assert!(!has_event(&rig.commands));
    assert_eq!(slow_path_of(&rig.pair).0, 108, "it is shared");
    let refused = ask_grant(&rig.pair.a, &rig.pair.a_qp, to.mr.rkey, (to.address, 8), true);
    assert_eq!(refused.unwrap_err(), VerbsError::NotSupported);
}

/// Another pair of QPs between the same processes.
fn second_pair(pair: &mut Pair) -> (Qp, Qp) {
    let (cq, b_cq) = (pair.a.create_cq(8, None), pair.b.create_cq(8, None));
    let (qp, b_qp) = (pair.a.create_qp(QpType::Rc, &cq), pair.b.create_qp(QpType::Rc, &b_cq));
    pair.a.connect_rc(&qp, pair.b.gid(), b_qp.qpn, 14);
    pair.b.connect_rc(&b_qp, pair.a.gid(), qp.qpn, 14);
    (qp, b_qp)
}

#[test]
fn what_a_process_has_by_another_qp_too_is_not_taken_back() {
    for by_owner in [false, true] {
        let mut rig = Rig::new();
        let (qp, its_peer) = second_pair(&mut rig.pair);
        let Pair { a, b, a_qp, b_qp, .. } = &rig.pair;
        rig.ask(true).unwrap();
        ask_grant(a, &qp, rig.to.mr.rkey, (rig.to.address, 8), true).unwrap();
        let destroy = |client: &Client, qp: &Qp| client.ask(&Request::DestroyQp { qp: qp.handle });
        assert_eq!(if by_owner { destroy(b, b_qp) } else { destroy(a, a_qp) }, Reply::Done);
        assert_eq!((rig.revoked(), qp.send.grants_revoked()), (1, 0), "it is notified, the other has its right");
        b.settle();
        assert!(!has_event(&rig.commands));
        assert_eq!(if by_owner { destroy(b, &its_peer) } else { destroy(a, &qp) }, Reply::Done);
        assert_eq!(qp.send.grants_revoked(), 1);
        assert_eq!(read_event(&rig.commands), Some((rig.segment(), 0)));
    }
}

#[test]
fn what_another_process_has_is_taken_back_all_the_same() {
    let mut rig = Rig::new();
    let mut other = rig.pair.host.client("c");
    let (cq, b_cq) = (other.create_cq(8, None), rig.pair.b.create_cq(8, None));
    let (qp, b_qp) = (other.create_qp(QpType::Rc, &cq), rig.pair.b.create_qp(QpType::Rc, &b_cq));
    other.connect_rc(&qp, rig.pair.b.gid(), b_qp.qpn, 14);
    rig.pair.b.connect_rc(&b_qp, other.gid(), qp.qpn, 14);
    rig.ask(true).unwrap();
    ask_grant(&other, &qp, rig.to.mr.rkey, (rig.to.address, 8), true).unwrap();
    // The right to read is not the one to write.
    let (third, _peer) = second_pair(&mut rig.pair);
    ask_grant(&rig.pair.a, &third, rig.to.mr.rkey, (rig.to.address, 8), false).unwrap();
    assert_eq!(rig.pair.a.ask(&Request::DestroyQp { qp: rig.pair.a_qp.handle }), Reply::Done);
    assert_eq!((rig.revoked(), qp.send.grants_revoked(), third.send.grants_revoked()), (1, 1, 1));
    assert_eq!(read_event(&rig.commands), Some((rig.segment(), 0)));
    rig.pair.a_qp = third;
    other.settle();
}

#[test]
fn memory_is_granted_to_who_has_used_the_router_as_much() {
    const PAGES: u64 = 18;
    let mut rig = Rig::new();
    let to = rig.pair.b.memory(PAGES as usize * PAGE, true);
    let from = rig.pair.a.memory(PAGE, true);
    let ask = |rig: &Rig| {
        let (qp, rkey, address) = (rig.pair.a_qp.handle, to.mr.rkey, to.address);
        rig.pair.a.ask_fds(&Request::AskGrant { qp, rkey, address, length: 8, access: GrantAccess::Write })
    };
    // 16 pages are for nothing; a WRITE of 8 bytes counts a page and its bytes.
    for missing in [2 * PAGE_BYTES, PAGE_BYTES - 8] {
        let (reply, fds) = ask(&rig);
        assert!(reply == Reply::NotEnoughCredit { missing } && fds.is_empty(), "{reply:?}");
        let sges = [from.sge(0, 8)];
        let write =
            SendDescriptor { remote_address: to.address, rkey: to.mr.rkey, ..request(SendOpcode::RdmaWrite, &sges) };
        rig.pair.a.post_send(&mut rig.pair.a_qp, &write);
        assert_eq!(rig.pair.a_cq.wait().status, CompletionStatus::Success);
    }
    assert!(matches!(ask(&rig), (Reply::Grant { .. }, fds) if fds.len() == 1));
    // The QP has 16 bytes left.
    let (reply, _) = rig.pair.a.ask_fds(&Request::AskGrant {
        qp: rig.pair.a_qp.handle,
        rkey: rig.to.mr.rkey,
        address: rig.to.address,
        length: 8,
        access: GrantAccess::Write,
    });
    assert_eq!(reply, Reply::NotEnoughCredit { missing: 2 * PAGE_BYTES - 16 });
    // Another QP of its process pays nothing for what that has.
    let (qp, _peer) = second_pair(&mut rig.pair);
    assert!(ask_grant(&rig.pair.a, &qp, to.mr.rkey, (to.address, 8), true).is_ok());
    assert!(ask_grant(&rig.pair.a, &qp, rig.to.mr.rkey, (rig.to.address, 8), true).is_ok(), "it has all it was given");
}
