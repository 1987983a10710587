//! The control socket: versions, nonsense, other sessions' handles, limits, processes that end, the router's own end.
use crate::common::*;
use freeflow_orchestrator::Command;
use freeflow_protocol::admin::{AdminErrorCode, AdminReply, AdminRequest};
use freeflow_protocol::library::{Reply, Request};
use freeflow_protocol::version::{Offer, VersionRange};
use freeflow_protocol::{FEATURE_PLACED_REPLIES, PROTOCOL, encode};
use freeflow_router::{Mode, Router};
use freeflow_shm::fd;
use freeflow_shm::layout::LAYOUT_VERSION;
use freeflow_verbs::{
    CompletionStatus, QpAttributeMask, QpAttributes, QpCapabilities, QpType, RegionChange, SendOpcode, VerbsError,
    VnicLimits, WindowKind,
};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// As to libraries of this host: memory that lies in another file than the reply's is for virtual machines.
const OF_ROUTER: Offer = Offer { features: PROTOCOL.features & !FEATURE_PLACED_REPLIES, ..PROTOCOL };

fn connect(host: &Host, id: &str) -> OwnedFd {
    fd::connect_seqpacket(Path::new(&host.attach(id).directory).join("router.sock")).unwrap()
}

fn reply(socket: &OwnedFd, bytes: &[u8]) -> Option<Reply> {
    exchange(socket, bytes, 2).map(|(reply, _)| reply)
}

#[test]
fn a_library_with_nothing_in_common_learns_what_the_router_speaks() {
    let host = Host::new();
    let layouts = VersionRange::only(LAYOUT_VERSION);
    let later = Offer { versions: VersionRange { lowest: 2, highest: 3 }, ..PROTOCOL };
    let demanding = Offer { features: 1 << 63, required_features: 1 << 63, ..PROTOCOL };
    for (protocol, mapped) in [(later, layouts), (demanding, layouts), (PROTOCOL, VersionRange::only(99))] {
        let socket = connect(&host, "a");
        let hello = encode(&Request::Hello { protocol, layouts: mapped, program: "later".into() });
        assert_eq!(reply(&socket, &hello), Some(Reply::Incompatible { protocol: OF_ROUTER, layouts }));
        assert_eq!(reply(&socket, &hello), None);
    }
    // No library of any release begins like this.
    let socket = connect(&host, "a");
    assert_eq!(reply(&socket, &[0, 1]), Some(Reply::Failed(VerbsError::VersionMismatch)));
}

#[test]
fn a_later_library_that_speaks_this_version_too_is_welcome() {
    let host = Host::new();
    let versions = VersionRange { lowest: 1, highest: 9 };
    let protocol = Offer { versions, features: u64::MAX, required_features: 0 };
    let layouts = VersionRange { lowest: LAYOUT_VERSION, highest: LAYOUT_VERSION + 1 };
    let hello = encode(&Request::Hello { protocol, layouts, program: "later".into() });
    let Some(Reply::Welcome(welcome)) = reply(&connect(&host, "a"), &hello) else { panic!("it is refused") };
    assert_eq!((welcome.protocol.version, welcome.protocol.features), (1, OF_ROUTER.features));
    assert_eq!(welcome.layout_version, LAYOUT_VERSION);
}

#[test]
fn hello_comes_first_and_once() {
    let host = Host::new();
    let socket = connect(&host, "a");
    let early = reply(&socket, &encode(&Request::OpenContext));
    assert_eq!(early, Some(Reply::Failed(VerbsError::InvalidArgument)));
    assert_eq!(reply(&socket, &encode(&hello())), None);
    let client = host.client("a");
    assert_eq!(client.refused(&hello()), VerbsError::InvalidArgument);
}

#[test]
fn nonsense_is_refused_and_the_session_lives() {
    let host = Host::new();
    let client = host.client("a");
    let mut longer = encode(&Request::OpenContext);
    longer.push(0);
    for bytes in [&[0xff; 40][..], &[1, 2, 3], &longer, &[0xff; 60_000]] {
        assert_eq!(reply(&client.socket, bytes), Some(Reply::Failed(VerbsError::InvalidArgument)));
    }
    assert!(matches!(client.ask(&Request::OpenContext), Reply::Context { .. }));
    assert_eq!(host.status().counters.malformed_messages, 4);
    // Descriptors have no business here: that session ends, the others don't.
    let other = host.client("a");
    let null = std::fs::File::open("/dev/null").unwrap();
    match fd::send_message(&other.socket, &encode(&Request::OpenContext), &[null.as_fd()]) {
        Ok(()) => assert_eq!(read_event(&other.async_events), None),
        // Since Linux 6.16 they are not even sent.
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied),
    }
    assert!(matches!(client.ask(&Request::OpenContext), Reply::Context { .. }));
}

#[test]
fn handles_of_another_session_are_not_found() {
    let host = Host::new();
    let (mut a, b) = (host.client("a"), host.client("b"));
    let cq = a.create_cq(4, None);
    let qp = a.create_qp(QpType::Rc, &cq);
    let memory = a.memory(8, true);
    let attributes = QpAttributes::default();
    let requests = [
        Request::DestroyCq { cq: cq.handle },
        Request::ResizeCq { cq: cq.handle, cqe: 8 },
        Request::DestroyQp { qp: qp.handle },
        Request::QueryQp { qp: qp.handle },
        Request::ModifyQp { qp: qp.handle, attributes, mask: QpAttributeMask(1) },
        Request::DeregisterMr { mr: memory.mr.handle },
        Request::DestroySegment { segment: memory.segment().unwrap() },
        Request::MapSegment { segment: memory.segment().unwrap(), address: 0x10000 },
        Request::DestroyAh { ah: 0 },
        Request::DestroySrq { srq: 1 },
        Request::DestroyChannel { channel: 1 },
        Request::DeallocPd { pd: 77 },
        Request::CloseContext { context: 77 },
        Request::ReregisterMr { mr: memory.mr.handle, pd: None, change: RegionChange::default() },
        Request::AllocNullMr { pd: 77 },
        Request::AllocMw { pd: 77, kind: WindowKind::Type1 },
        Request::DeallocMw { mw: 1 },
        Request::OpenXrcd { context: 77, file: None, flags: freeflow_verbs::XrcdOpenFlags::CREATE },
        Request::CloseXrcd { xrcd: 1 },
        Request::OpenQp { xrcd: 1, qpn: qp.qpn, cookie: 9 },
        Request::ModerateCq { cq: cq.handle, count: 1, period_us: 1 },
        Request::AttachMulticast { qp: qp.handle, gid: a.gid() },
        Request::DetachMulticast { qp: qp.handle, gid: a.gid() },
        Request::ImportPd { context: 77, pd: 1 },
        Request::ImportMr { pd: 77, mr: memory.mr.handle },
        Request::ImportSegment { context: 77, segment: memory.segment().unwrap() },
    ];
    for request in requests {
        assert_eq!(b.refused(&request), VerbsError::NotFound, "{request:?}");
    }
}

#[test]
fn bad_arguments_are_refused() {
    let host = Host::new();
    let mut client = host.client("a");
    let context = client.context;
    let invalid = |request: &Request| assert_eq!(client.refused(request), VerbsError::InvalidArgument, "{request:?}");
    invalid(&Request::CreateCq { context, cqe: 0, channel: None, cookie: 1, timestamps: false });
    invalid(&Request::CreateCq { context, cqe: u32::MAX, channel: None, cookie: 1, timestamps: false });
    invalid(&Request::CreateSegment { length: 0 });
    let cq = client.create_cq(4, None);
    let create = |client: &Client, capabilities, cookie| Request::CreateQp {
        qp_type: QpType::Rc,
        pd: Some(client.pd),
        send_cq: Some(cq.handle),
        recv_cq: Some(cq.handle),
        srq: None,
        xrcd: None,
        capabilities,
        all_signaled: false,
        block_own_multicast: false,
        cookie,
        connection: None,
    };
    let too_many = QpCapabilities { max_send_wr: 1 << 20, ..CAPABILITIES };
    assert_eq!(client.refused(&create(&client, too_many, 5)), VerbsError::InvalidArgument);
    assert_eq!(client.refused(&create(&client, CAPABILITIES, 70_000)), VerbsError::InvalidArgument);
    assert!(matches!(client.ask(&create(&client, CAPABILITIES, 5)), Reply::Qp { .. }));
    assert_eq!(client.refused(&create(&client, CAPABILITIES, 5)), VerbsError::InvalidArgument);
    let memory = client.memory(8, true);
    let segment = memory.segment().unwrap();
    assert_eq!(client.refused(&Request::DestroySegment { segment }), VerbsError::Busy);
    assert_eq!(client.refused(&Request::DestroyCq { cq: cq.handle }), VerbsError::Busy);
    assert_eq!(client.refused(&Request::CloseContext { context }), VerbsError::Busy);
    assert_eq!(client.ask(&Request::DeregisterMr { mr: memory.mr.handle }), Reply::Done);
    assert_eq!(client.refused(&Request::MapSegment { segment, address: 12 }), VerbsError::InvalidArgument);
    assert_eq!(client.ask(&Request::DestroySegment { segment }), Reply::Done);
}

#[test]
fn limits_hold_for_each_vnic_alone() {
    let limits = VnicLimits {
        session_count_max: 2,
        qp_count_max: 1,
        channel_count_max: 1,
        segment_bytes_max: 1 << 20,
        mapping_count_max: 4,
        ..VnicLimits::default()
    };
    let host = Host::with_limits(limits);
    let mut client = host.client("a");
    let channel = client.create_channel();
    assert_eq!(client.refused(&Request::CreateChannel { context: client.context }), VerbsError::NoMemory);
    let cq = client.create_cq(4, None);
    client.create_qp(QpType::Rc, &cq);
    assert_eq!(client.refused(&Request::CreateSegment { length: 2 << 20 }), VerbsError::NoMemory);
    assert_eq!(client.refused(&Request::CreateSegment { length: u64::MAX }), VerbsError::NoMemory);
    for _ in 0..2 {
        assert!(matches!(client.ask(&Request::CreateSegment { length: 1 }), Reply::Segment { .. }));
    }
    assert_eq!(client.refused(&Request::CreateSegment { length: 1 }), VerbsError::NoMemory);
    assert_eq!(client.ask(&Request::DestroyChannel { channel: channel.0 }), Reply::Done);
    client.create_channel();
    let _second = host.client("a");
    let third = connect(&host, "a");
    assert_eq!(reply(&third, &encode(&hello())), Some(Reply::Failed(VerbsError::NoMemory)));
    assert_eq!(reply(&third, &encode(&hello())), None);
    let mut other = host.client("b");
    let cq = other.create_cq(4, None);
    other.create_qp(QpType::Rc, &cq);
}

#[test]
fn rings_have_a_limit_of_their_own() {
    const PAGE: u64 = 4096;
    // A CQ of one entry, and one of 64 pages with its header.
    let host = Host::with_limits(VnicLimits { ring_bytes_max: 66 * PAGE, ..VnicLimits::default() });
    let mut client = host.client("a");
    let small = client.create_cq(1, None);
    let create = |cqe, cookie, client: &Client| {
        let (context, channel) = (client.context, None);
        client.ask(&Request::CreateCq { context, cqe, channel, cookie, timestamps: false })
    };
    assert!(matches!(create(4096, 100, &client), Reply::Cq { .. }));
    let refused = Reply::Failed(VerbsError::NoMemory);
    assert_eq!(create(1, 101, &client), refused);
    assert_eq!(client.refused(&Request::ResizeCq { cq: small.handle, cqe: 2 }), VerbsError::NoMemory);
    assert!(matches!(client.ask(&Request::CreateSegment { length: 1 << 20 }), Reply::Segment { .. }));
    assert!(matches!(host.client("b").create_cq(4096, None), Cq { .. }));
    assert_eq!(client.ask(&Request::DestroyCq { cq: small.handle }), Reply::Done);
    until("its ring is freed", || matches!(create(1, 102, &client), Reply::Cq { .. }).then_some(()));
}

#[test]
fn the_end_of_a_session_leaves_nothing_and_its_peer_an_error() {
    let Pair { host, mut a, b, mut a_cq, b_cq, mut a_qp, b_qp } = Pair::on(Host::new(), 8);
    let (from, to) = (a.memory(64, false), b.memory(64, true));
    drop((b, b_cq, b_qp));
    until("one session", || (host.status().session_count == 1).then_some(()));
    let sges = [from.sge(0, 64)];
    let write = freeflow_shm::SendDescriptor {
        remote_address: to.address,
        rkey: to.mr.rkey,
        ..request(SendOpcode::RdmaWrite, &sges)
    };
    a.post_send(&mut a_qp, &write);
    assert_eq!(a_cq.wait().status, CompletionStatus::RetryExceeded);
    a.next_cookie();
    drop(a);
    let status = until("no session", || Some(host.status()).filter(|status| status.session_count == 0));
    assert_eq!((status.qp_count, status.cq_count, status.mr_count, status.registered_bytes), (0, 0, 0, 0));
    until("no segment", || Some(host.status()).filter(|status| (status.segment_count, status.segment_bytes) == (0, 0)));
}

#[test]
fn when_the_router_ends_pipes_and_sockets_do() {
    let mut pair = Pair::new();
    let (_, pipe) = pair.a.create_channel();
    pair.host.router.take().unwrap().stop().unwrap();
    assert_eq!(read_event(&pair.a.async_events), None);
    assert_eq!(read_event(&pipe), None);
    assert!(fd::peer_closed(&pair.b.socket));
    let run_dir = pair.host.run_dir();
    assert!(!run_dir.join("admin.sock").exists() && !run_dir.join("vnics/a/router.sock").exists());
    assert!(run_dir.join("vnics/a").is_dir());
}

#[test]
fn a_new_router_finds_the_vnics_again() {
    let mut host = Host::new();
    let (a, b) = (host.attach("a"), host.attach("b"));
    assert_eq!(host.attach("a").address, a.address);
    let inode = std::fs::metadata(&a.directory).unwrap().ino();
    host.admin(&AdminRequest::Detach { id: "b".into() });
    assert!(!Path::new(&b.directory).exists());
    let second = Router::start(config(&host.directory.0, VnicLimits::default()));
    assert_eq!(second.err().map(|error| error.kind()), Some(std::io::ErrorKind::AddrInUse));
    host.router.take().unwrap().stop().unwrap();
    host.router = Some(Router::start(config(&host.directory.0, VnicLimits::default())).unwrap());
    let (listed, next) = vnic_page(&host.run_dir(), "");
    assert_eq!(next, "");
    let found: Vec<_> = listed.iter().map(|vnic| (vnic.id.as_str(), vnic.address)).collect();
    assert_eq!(found, [("a", a.address)]);
    assert_eq!(std::fs::metadata(&a.directory).unwrap().ino(), inode);
    let client = Client::connect(&Path::new(&a.directory).join("router.sock"));
    assert_eq!(client.gid(), freeflow_verbs::Gid::from_ip(a.address));
    assert_eq!(client.welcome.vnic, "a");
}

#[test]
fn a_detached_vnic_ends_its_sessions_only() {
    let pair = Pair::new();
    assert_eq!(pair.host.admin(&AdminRequest::Detach { id: "a".into() }), AdminReply::Done);
    assert_eq!(pair.host.admin(&AdminRequest::Detach { id: "a".into() }), AdminReply::Done);
    assert_eq!(read_event(&pair.a.async_events), None);
    assert!(matches!(pair.b.ask(&Request::OpenContext), Reply::Context { .. }));
    let status = pair.host.status();
    assert_eq!((status.vnic_count, status.session_count), (1, 1));
}

#[test]
fn admin_requests_that_cannot_be_are_refused() {
    let host = Host::new();
    let code = |request: &AdminRequest| match host.admin(request) {
        AdminReply::Failed { code, .. } => code,
        other => panic!("{other:?}"),
    };
    assert_eq!(code(&attach("../up")), AdminErrorCode::Invalid);
    let request = |network: &str, address: Option<&str>| AdminRequest::Attach {
        id: "x".into(),
        name: "x".into(),
        network: network.into(),
        address: address.map(|text| text.parse().unwrap()),
        labels: Vec::new(),
    };
    assert_eq!(code(&request("none", None)), AdminErrorCode::NotFound);
    assert_eq!(code(&request("default", Some("10.112.0.1"))), AdminErrorCode::Invalid);
    let first = host.attach("y").address.to_string();
    assert_eq!(code(&request("default", Some(&first))), AdminErrorCode::AlreadyExists);
    let networks = networks(&host.run_dir());
    assert_eq!((networks[0].pool.as_str(), networks[0].vnic_count), ("10.111.0.0/16", 1));
    assert!(matches!(host.admin(&AdminRequest::Hello { protocol: PROTOCOL }), AdminReply::Version { .. }));
    assert_eq!(host.admin(&AdminRequest::Shutdown), AdminReply::Done);
}

#[test]
fn many_vnics_come_in_pages() {
    let host = Host::new();
    for number in 0..70 {
        host.attach(&format!("vnic-{number:02}"));
    }
    let (mut after, mut ids, mut pages) = (String::new(), Vec::new(), 0);
    loop {
        let (vnics, next) = vnic_page(&host.run_dir(), &after);
        pages += 1;
        ids.extend(vnics.into_iter().map(|vnic| vnic.id));
        after = next;
        if after.is_empty() {
            break;
        }
    }
    assert_eq!((ids.len(), pages), (70, 2));
    assert!(ids.is_sorted());
}

#[test]
fn every_mode_carries_messages() {
    for mode in [Mode::Fastpath, Mode::LowCpu, Mode::Adaptive] {
        let mut pair = Pair::on(Host::with(VnicLimits::default(), mode), 14);
        let (from, to) = (pair.a.memory(8, true), pair.b.memory(8, false));
        for seed in 1..20 {
            from.fill(8, seed);
            pair.b.post_receive(&mut pair.b_qp, 1, &[to.sge(0, 64)]);
            pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
            assert_eq!(pair.b_cq.wait().status, CompletionStatus::Success);
            assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
            assert!(to.is_filled(8, seed));
        }
        assert_eq!(pair.host.status().mode, mode.name());
    }
}

/// Objects of one command are adopted before the next is planned, also where both are in line for
/// the control thread.
#[test]
fn commands_from_several_threads_are_done_one_after_another() {
    const EACH: usize = 60;
    let mut host = Host::new();
    let declare = |thread: usize, number: usize| {
        let id = format!("v{thread}-{number}");
        Command::Attach { title: id.clone(), id, network: "default".into(), address: None, labels: BTreeMap::new() }
    };
    let router = host.router.as_ref().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            scope.spawn(move || (0..EACH).for_each(|number| router.command(declare(thread, number)).unwrap()));
        }
    });
    let before = vnics(&host);
    assert_eq!(before.len(), 3 * EACH);
    host.router.take().unwrap().stop().unwrap();
    host.router = Some(Router::start(config(&host.directory.0, VnicLimits::default())).unwrap());
    assert_eq!(vnics(&host), before);
}

/// Names and addresses, in order.
fn vnics(host: &Host) -> BTreeMap<String, String> {
    let (mut all, mut after) = (BTreeMap::new(), String::new());
    loop {
        let (vnics, next) = vnic_page(&host.run_dir(), &after);
        all.extend(vnics.iter().map(|vnic| (vnic.id.clone(), format!("{:?}", vnic.address))));
        if next.is_empty() {
            return all;
        }
        after = next;
    }
}
