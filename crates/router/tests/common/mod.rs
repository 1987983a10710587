//! A router in a directory of its own, and a raw client made of nothing but rings and messages.
#![allow(dead_code, reason = "each test file uses its own part")]
pub mod cm;
pub mod hosts;
pub mod process;

use freeflow_protocol::admin::{
    AdminReply, AdminRequest, NetworkStatus, PeersStatus, QpStatus, RouterStatus, VnicStatus,
};
use freeflow_protocol::library::{EVENT_BYTES, Handle, PASS_BYTES, REVOCATION_TIME_MAX_MS, Reply, Request, Welcome};
use freeflow_protocol::version::VersionRange;
use freeflow_protocol::{PROTOCOL, encode};
use freeflow_router::{Config, Mode, Router, ShardBy};
use freeflow_shm::layout::{LAYOUT_VERSION, QueueShape};
use freeflow_shm::{
    CompletionConsumer, Doorbell, RequestProducer, Segment, SendDescriptor, SessionSegment, fd, sched_yield,
};
use freeflow_verbs::{
    Access, AddressHandleAttributes, Completion, Gid, GlobalRoute, PathMtu, QpAttributeMask, QpAttributes,
    QpCapabilities, QpState, QpType, SendFlags, SendOpcode, Sge, SrqAttributes, VerbsError, VnicLimits,
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Longer than anything here takes, even on a busy machine.
pub const WAIT_MAX: Duration = Duration::from_secs(30);

/// Waits for something to come true.
pub fn until<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(began.elapsed() < WAIT_MAX, "waited in vain: {what}");
        sched_yield();
    }
}

/// A directory that is removed again.
pub struct Directory(pub PathBuf);

impl Directory {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("ff-router-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        // A killed run with this number may have left one.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn config(directory: &Path, limits: VnicLimits) -> Config {
    Config {
        run_dir: directory.join("run"),
        mode: Mode::LowCpu,
        cpu: None,
        host: "test".into(),
        bridge: "none".into(),
        pool: "10.111.0.0/16".parse().unwrap(),
        range: None,
        limits,
        peers: None,
        wire: freeflow_router::WireOptions::default(),
        copy_threads: copy_threads(),
        shard_count: shards().unwrap_or(1),
        shard_by: shards().map_or(ShardBy::Tenant, |_| ShardBy::Vnic),
        revocation_time: freeflow_verbs::Duration::from_millis(REVOCATION_TIME_MAX_MS),
        metrics_listen: None,
        follows_cluster: false,
        state_dir: None,
        network_reconciler: None,
        near_halves: near_halves(),
        machine_dir: directory.join("machine"),
    }
}

/// FREEFLOW_TEST_WORKERS: so many, who then copy all that they can.
fn copy_threads() -> freeflow_router::CopyThreadOptions {
    let workers = std::env::var("FREEFLOW_TEST_WORKERS").ok().map(|count| count.parse().unwrap());
    freeflow_router::CopyThreadOptions { workers, move_bytes_min: workers.map(|_| 1) }
}

/// FREEFLOW_TEST_SHARDS: so many, over which vNICs are spread.
fn shards() -> Option<u8> {
    std::env::var("FREEFLOW_TEST_SHARDS").ok().map(|count| count.parse().unwrap())
}

/// FREEFLOW_TEST_ATTACHMENT=remote: vNICs have near halves, which are threads of this process.
fn near_halves() -> Option<freeflow_router::NearHalves> {
    let is_remote = std::env::var("FREEFLOW_TEST_ATTACHMENT").is_ok_and(|attachment| attachment == "remote");
    is_remote.then(|| freeflow_router::NearHalves::in_this_process().unwrap())
}

/// (The router ends before its directory goes: it would make again in it what it still writes.)
pub struct Host {
    pub router: Option<Router>,
    pub directory: Directory,
}

impl Host {
    pub fn new() -> Self {
        Self::with_limits(VnicLimits::default())
    }

    pub fn with_limits(limits: VnicLimits) -> Self {
        Self::with(limits, Mode::LowCpu)
    }

    pub fn with(limits: VnicLimits, mode: Mode) -> Self {
        let directory = Directory::new();
        let router = Router::start(Config { mode, ..config(&directory.0, limits) }).unwrap();
        Self { router: Some(router), directory }
    }

    pub fn run_dir(&self) -> PathBuf {
        self.directory.0.join("run")
    }

    pub fn admin(&self, request: &AdminRequest) -> AdminReply {
        admin(&self.run_dir(), request)
    }

    pub fn attach(&self, id: &str) -> VnicStatus {
        match self.admin(&attach(id)) {
            AdminReply::Vnic(status) => status,
            other => panic!("{other:?}"),
        }
    }

    pub fn rest(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        rest(&self.run_dir(), method, path, body)
    }

    pub fn status(&self) -> RouterStatus {
        router_status(&self.run_dir())
    }

    /// A client on a vNIC of its own.
    pub fn client(&self, id: &str) -> Client {
        Client::connect(&Path::new(&self.attach(id).directory).join("router.sock"))
    }
}

pub fn attach(id: &str) -> AdminRequest {
    let (id, name, network) = (id.into(), format!("name-{id}"), "default".into());
    AdminRequest::Attach { id, name, network, address: None, labels: Vec::new() }
}

/// Below this is what the REST server shows of the test's host.
pub const BASE: &str = "/apis/freeflow.io/v1";

/// One exchange with the REST server: the status code and the document.
pub fn rest(run_dir: &Path, method: &str, path: &str, body: &str) -> (u16, Value) {
    let mut stream = UnixStream::connect(run_dir.join("api.sock")).unwrap();
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a code");
    (code, serde_json::from_str(body).unwrap_or_else(|error| panic!("{path}: {error} in {answer:?}")))
}

/// The path of a part of this run directory's host.
pub fn host_path(run_dir: &Path, part: &str) -> String {
    let (code, version) = rest(run_dir, "GET", "/version", "");
    assert_eq!(code, 200, "{version}");
    format!("{BASE}/hosts/{}/{part}", version["host"].as_str().unwrap())
}

/// A part of the host, with its names as in the protocol, and where the next page begins.
pub fn part<T: DeserializeOwned>(run_dir: &Path, part: &str, field: &str) -> (T, String) {
    let (code, mut document) = rest(run_dir, "GET", &host_path(run_dir, part), "");
    assert_eq!(code, 200, "{document}");
    let next = document["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
    (serde_json::from_value(snake_case(document[field].take())).unwrap(), next)
}

fn snake_case(value: Value) -> Value {
    let snake = |name: String| {
        let is_capital = |letter: char| letter.is_ascii_uppercase();
        name.split_inclusive(is_capital)
            .map(|part| match part.strip_suffix(is_capital) {
                Some(head) => format!("{head}_{}", part[head.len()..].to_ascii_lowercase()),
                None => part.to_owned(),
            })
            .collect::<String>()
    };
    match value {
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (snake(name), snake_case(value))).collect(),
        Value::Array(items) => items.into_iter().map(snake_case).collect(),
        other => other,
    }
}

pub fn router_status(run_dir: &Path) -> RouterStatus {
    part(run_dir, "router", "status").0
}

pub fn peers_status(run_dir: &Path) -> PeersStatus {
    part(run_dir, "peers", "status").0
}

/// A page of vNICs behind an id, and where the next one begins.
pub fn vnic_page(run_dir: &Path, after: &str) -> (Vec<VnicStatus>, String) {
    part(run_dir, &format!("vnics?continue={after}"), "items")
}

pub fn networks(run_dir: &Path) -> Vec<NetworkStatus> {
    part(run_dir, "networks", "items").0
}

/// A page of QPs, and whether there are more.
pub fn qps(run_dir: &Path, vnic: Option<&str>, after_qpn: Option<u32>) -> (Vec<QpStatus>, bool) {
    let after = after_qpn.map_or(String::new(), |qpn| qpn.to_string());
    let of = vnic.map_or(String::new(), |vnic| format!("&vnic={vnic}"));
    let (qps, next) = part(run_dir, &format!("qps?continue={after}{of}"), "items");
    (qps, !next.is_empty())
}

pub fn admin(run_dir: &Path, request: &AdminRequest) -> AdminReply {
    let socket = fd::connect_seqpacket(run_dir.join("admin.sock")).unwrap();
    fd::send_message(&socket, &encode(request), &[]).unwrap();
    let mut bytes = Vec::new();
    fd::receive_message(&socket, &mut bytes, 0).unwrap();
    freeflow_protocol::decode(&bytes).unwrap()
}

/// Sends raw bytes and reads a reply; `None`: the router closed the connection.
pub fn exchange(socket: &OwnedFd, bytes: &[u8], fds: usize) -> Option<(Reply, Vec<OwnedFd>)> {
    let _ = fd::send_message(socket, bytes, &[]);
    let mut reply = Vec::new();
    match fd::receive_message(socket, &mut reply, fds) {
        Ok((0, _)) | Err(_) => None,
        Ok((_, descriptors)) => Some((freeflow_protocol::decode(&reply).unwrap(), descriptors)),
    }
}

pub fn hello() -> Request {
    let program = "test".into();
    Request::Hello { protocol: PROTOCOL, layouts: VersionRange::only(LAYOUT_VERSION), program }
}

pub struct Client {
    pub socket: OwnedFd,
    pub session: SessionSegment,
    pub kick: Doorbell,
    pub welcome: Welcome,
    pub context: Handle,
    pub async_events: OwnedFd,
    /// Of `context`.
    pub pass: OwnedFd,
    pub pd: Handle,
    cookie: u32,
}

impl Client {
    pub fn connect(path: &Path) -> Self {
        Self::connect_saying(path, &hello())
    }

    pub fn connect_saying(path: &Path, hello: &Request) -> Self {
        let socket = fd::connect_seqpacket(path).unwrap();
        let (reply, mut descriptors) = exchange(&socket, &encode(hello), 2).expect("an answer to Hello");
        let Reply::Welcome(welcome) = reply else { panic!("{reply:?}") };
        let (kick, segment) = (descriptors.pop().unwrap(), descriptors.pop().unwrap());
        let session = SessionSegment::map(segment.as_fd(), 0).unwrap();
        let context_reply = exchange(&socket, &encode(&Request::OpenContext), 2);
        let Some((Reply::Context { context }, mut events)) = context_reply else { panic!("no context") };
        let (pass, async_events) = (events.pop().unwrap(), events.pop().unwrap());
        let (kick, pd, cookie) = (kick.into(), 0, 0);
        let mut client = Self { socket, session, kick, welcome, context, async_events, pass, pd, cookie };
        let Reply::Pd { pd } = client.ask(&Request::AllocPd { context }) else { panic!("no PD") };
        client.pd = pd;
        client
    }

    pub fn gid(&self) -> Gid {
        self.welcome.gids[0]
    }

    pub fn ask(&self, request: &Request) -> Reply {
        self.ask_fds(request).0
    }

    pub fn ask_fds(&self, request: &Request) -> (Reply, Vec<OwnedFd>) {
        exchange(&self.socket, &encode(request), 2).expect("a reply")
    }

    pub fn pass_bytes(&self) -> [u8; PASS_BYTES] {
        let mut bytes = [0; PASS_BYTES];
        assert_eq!(rustix::io::pread(&self.pass, &mut bytes, 0), Ok(PASS_BYTES));
        bytes
    }

    /// Two requests later the worker has ended the turn in which it did what was asked before.
    pub fn settle(&self) {
        for _ in 0..2 {
            let Reply::Pd { pd } = self.ask(&Request::AllocPd { context: self.context }) else { panic!("no PD") };
            assert_eq!(self.ask(&Request::DeallocPd { pd }), Reply::Done);
        }
    }

    pub fn refused(&self, request: &Request) -> VerbsError {
        match self.ask(request) {
            Reply::Failed(error) => error,
            other => panic!("{request:?} gave {other:?}"),
        }
    }

    pub fn next_cookie(&mut self) -> u32 {
        self.cookie += 1;
        self.cookie
    }

    pub fn create_channel(&self) -> (Handle, OwnedFd) {
        let (reply, mut fds) = self.ask_fds(&Request::CreateChannel { context: self.context });
        let Reply::Channel { channel } = reply else { panic!("{reply:?}") };
        (channel, fds.pop().unwrap())
    }

    pub fn create_cq(&mut self, cqe: u32, channel: Option<Handle>) -> Cq {
        let cookie = self.next_cookie();
        let request = Request::CreateCq { context: self.context, cqe, channel, cookie, timestamps: false };
        let (reply, fds) = self.ask_fds(&request);
        let Reply::Cq { cq, cqe, segment_bytes } = reply else { panic!("{reply:?}") };
        let segment = Arc::new(Segment::map(fds[0].as_fd(), segment_bytes as usize).unwrap());
        Cq { handle: cq, cookie, ring: CompletionConsumer::new(segment, cqe) }
    }

    pub fn create_qp(&mut self, qp_type: QpType, cq: &Cq) -> Qp {
        self.create_qp_with(qp_type, cq, None, CAPABILITIES)
    }

    /// With room for so many RECVs; nobody posts any.
    pub fn create_srq(&mut self, max_wr: u32) -> Handle {
        let (attributes, cookie) = (SrqAttributes { max_wr, max_sge: 1, limit: 0 }, self.next_cookie());
        let reply = self.ask(&Request::CreateSrq { pd: self.pd, attributes, cookie, xrc: None });
        let Reply::Srq { srq, .. } = reply else { panic!("{reply:?}") };
        srq
    }

    pub fn create_qp_with(&mut self, qp_type: QpType, cq: &Cq, srq: Option<Handle>, asked: QpCapabilities) -> Qp {
        let cookie = self.next_cookie();
        let (pd, send_cq) = (Some(self.pd), Some(cq.handle));
        let recv_cq = send_cq.filter(|_| qp_type != QpType::XrcSend);
        let (reply, fds) = self.ask_fds(&Request::CreateQp {
            qp_type,
            pd,
            send_cq,
            recv_cq,
            srq,
            xrcd: None,
            capabilities: asked,
            all_signaled: true,
            block_own_multicast: false,
            cookie,
            connection: None,
        });
        let Reply::Qp { qp, qpn, capabilities: granted, segment_bytes } = reply else { panic!("{reply:?}") };
        let segment = Arc::new(Segment::map(fds[0].as_fd(), segment_bytes as usize).unwrap());
        let send_shape = QueueShape::send(granted.max_send_wr, granted.max_send_sge, granted.max_inline_data);
        let receive_shape = QueueShape::receive(granted.max_recv_wr, granted.max_recv_sge);
        let send = RequestProducer::new(segment.clone(), 0, send_shape);
        let receive = RequestProducer::new(segment, send_shape.bytes(), receive_shape);
        Qp { handle: qp, qpn, cookie, send, receive }
    }

    pub fn modify(&self, qp: &Qp, attributes: QpAttributes, mask: u32) -> Reply {
        self.ask(&Request::ModifyQp { qp: qp.handle, attributes, mask: QpAttributeMask(mask) })
    }

    pub fn to_init(&self, qp: &Qp, is_ud: bool) {
        use QpAttributeMask as M;
        let all = Access(0xf);
        let (state, access, qkey, port) = (QpState::Init, all, QKEY, 1);
        let attributes = QpAttributes { state, access, qkey, port, ..QpAttributes::default() };
        let last = if is_ud { M::QKEY } else { M::ACCESS_FLAGS };
        let reply = self.modify(qp, attributes, M::STATE | M::PKEY_INDEX | M::PORT | last);
        assert_eq!(reply, Reply::QpModified { state });
    }

    /// INIT to RTR, towards somebody.
    pub fn to_rtr(&self, qp: &Qp, peer: Gid, qpn: u32) -> Reply {
        use QpAttributeMask as M;
        let attributes = QpAttributes {
            state: QpState::ReadyToReceive,
            path_mtu: PathMtu::Mtu1024,
            dest_qpn: qpn,
            address: address(peer),
            max_dest_rd_atomic: 16,
            min_rnr_timer: 1,
            ..QpAttributes::default()
        };
        let mask = M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        self.modify(qp, attributes, mask)
    }

    /// INIT to RTS, connected to a peer; `timeout` as in `ibv_qp_attr`.
    pub fn connect_rc(&self, qp: &Qp, peer: Gid, qpn: u32, timeout: u8) {
        use QpAttributeMask as M;
        self.to_init(qp, false);
        let reply = self.to_rtr(qp, peer, qpn);
        assert_eq!(reply, Reply::QpModified { state: QpState::ReadyToReceive });
        let attributes = QpAttributes {
            state: QpState::ReadyToSend,
            timeout,
            retry_count: 7,
            rnr_retry: 7,
            max_rd_atomic: 16,
            ..QpAttributes::default()
        };
        let mask = M::STATE | M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
        assert_eq!(self.modify(qp, attributes, mask), Reply::QpModified { state: QpState::ReadyToSend });
    }

    pub fn register(&self, address: u64, length: u64) -> Mr {
        let access = Access(0xf);
        let reply = self.ask(&Request::RegisterMr { pd: self.pd, address, length, iova: address, access });
        let Reply::Mr { mr, lkey, rkey } = reply else { panic!("{reply:?}") };
        Mr { handle: mr, lkey, rkey }
    }

    /// Memory of `words` eight-byte words, shared or ordinary, and a region over it.
    pub fn memory(&self, words: usize, shared: bool) -> Memory {
        if !shared {
            let words: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(0)).collect();
            let address = words.as_ptr() as u64;
            let mr = self.register(address, words.len() as u64 * 8);
            return Memory { address, mr, bytes: Bytes::Own(words) };
        }
        let (reply, fds) = self.ask_fds(&Request::CreateSegment { length: words as u64 * 8 });
        let Reply::Segment { segment, length } = reply else { panic!("{reply:?}") };
        let mapped = Segment::map(fds[0].as_fd(), length as usize).unwrap();
        // As `ibv_malloc` does: the pages are the program's from the start.
        mapped.populate(0, length as usize).unwrap();
        let address = mapped.address() as u64;
        assert_eq!(self.ask(&Request::MapSegment { segment, address }), Reply::Done);
        let mr = self.register(address, words as u64 * 8);
        Memory { address, mr, bytes: Bytes::Shared(mapped, segment) }
    }

    /// Memory that the process shares by a file of its own, and a region over it. `None`: the router can't map such.
    pub fn borrowed_memory(&self, words: usize) -> Option<Memory> {
        let bytes = (words * 8).next_multiple_of(4096);
        let file = rustix::fs::memfd_create("own", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes as u64).unwrap();
        let mapped = Segment::map(file.as_fd(), bytes).unwrap();
        mapped.populate(0, bytes).unwrap();
        let (address, length) = (mapped.address() as u64, bytes as u64);
        let segment = match self.ask_fds(&Request::BorrowSegment { address, length }) {
            (Reply::Segment { segment, length: found }, fds) => {
                assert!(found == length && fds.is_empty());
                segment
            }
            (Reply::Failed(VerbsError::NotSupported), _) => return None,
            other => panic!("{:?}", other.0),
        };
        assert_eq!(self.ask(&Request::MapPart { segment, offset: 0, address, length }), Reply::Done);
        let mr = self.register(address, words as u64 * 8);
        Some(Memory { address, mr, bytes: Bytes::Shared(mapped, segment) })
    }

    /// As a library does before the addresses are anything else's: what is mapped there next is not this segment.
    pub fn release(&self, memory: Memory) {
        assert_eq!(self.ask(&Request::DeregisterMr { mr: memory.mr.handle }), Reply::Done);
        if let Some(segment) = memory.segment() {
            assert_eq!(self.ask(&Request::DestroySegment { segment }), Reply::Done);
        }
    }

    pub fn post_send(&self, qp: &mut Qp, request: &SendDescriptor<'_>) {
        qp.send.publish_send(request);
        if qp.send.must_ring_send() && self.session.ring(qp.cookie) {
            self.kick.kick();
        }
    }

    pub fn post_receive(&self, qp: &mut Qp, wr_id: u64, sges: &[Sge]) {
        qp.receive.publish_receive(wr_id, sges);
        if qp.receive.must_ring_receive() && self.session.ring(qp.cookie) {
            self.kick.kick();
        }
    }
}

pub const QKEY: u32 = 0x1111_1111;
pub const CAPABILITIES: QpCapabilities =
    QpCapabilities { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 4, max_recv_sge: 4, max_inline_data: 64 };

pub fn address(gid: Gid) -> AddressHandleAttributes {
    let route = GlobalRoute { dgid: gid, hop_limit: 64, ..GlobalRoute::default() };
    AddressHandleAttributes { grh: Some(route), port: 1, ..AddressHandleAttributes::default() }
}

pub struct Cq {
    pub handle: Handle,
    pub cookie: u32,
    pub ring: CompletionConsumer,
}

impl Cq {
    pub fn wait(&mut self) -> Completion {
        let mut completion = Completion::default();
        until("a completion", || self.ring.poll(&mut completion).then_some(()));
        self.ring.commit();
        completion
    }
}

pub struct Qp {
    pub handle: Handle,
    pub qpn: u32,
    pub cookie: u32,
    pub send: RequestProducer,
    pub receive: RequestProducer,
}

pub struct Mr {
    pub handle: Handle,
    pub lkey: u32,
    pub rkey: u32,
}

enum Bytes {
    Own(Vec<AtomicU64>),
    Shared(Segment, Handle),
}

pub struct Memory {
    pub address: u64,
    pub mr: Mr,
    bytes: Bytes,
}

impl Memory {
    pub fn word(&self, at: usize) -> &AtomicU64 {
        match &self.bytes {
            Bytes::Own(words) => &words[at],
            Bytes::Shared(segment, _) => segment.u64(at * 8),
        }
    }

    pub fn segment(&self) -> Option<Handle> {
        match &self.bytes {
            Bytes::Own(_) => None,
            Bytes::Shared(_, handle) => Some(*handle),
        }
    }

    pub fn fill(&self, words: usize, seed: u64) {
        for at in 0..words {
            self.word(at).store(seed.wrapping_mul(at as u64 + 1), Relaxed);
        }
    }

    pub fn is_filled(&self, words: usize, seed: u64) -> bool {
        (0..words).all(|at| self.word(at).load(Relaxed) == seed.wrapping_mul(at as u64 + 1))
    }

    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { address: self.address + offset, length, lkey: self.mr.lkey }
    }
}

pub fn request<'a>(opcode: SendOpcode, sges: &'a [Sge]) -> SendDescriptor<'a> {
    SendDescriptor {
        wr_id: 7,
        opcode,
        flags: SendFlags(SendFlags::SIGNALED),
        immediate: 0,
        remote_address: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        remote_srqn: 0,
        sges,
        inline: None,
    }
}

/// The next event of a pipe, or `None` at its end.
pub fn read_event(pipe: &OwnedFd) -> Option<(u32, u32)> {
    let mut bytes = [0; EVENT_BYTES];
    match rustix::io::read(pipe, &mut bytes) {
        Ok(EVENT_BYTES) => {
            let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            Some((word(0), word(4)))
        }
        Ok(0) => None,
        other => panic!("{other:?}"),
    }
}

/// Whether an event can be read at once.
pub fn has_event(pipe: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&at_once)).unwrap() > 0
}

/// Two clients on one host, connected by an RC QP each.
pub struct Pair {
    pub host: Host,
    pub a: Client,
    pub b: Client,
    pub a_cq: Cq,
    pub b_cq: Cq,
    pub a_qp: Qp,
    pub b_qp: Qp,
}

impl Pair {
    pub fn new() -> Self {
        Self::on(Host::new(), 14)
    }

    pub fn on(host: Host, timeout: u8) -> Self {
        let (mut a, mut b) = (host.client("a"), host.client("b"));
        let (a_cq, b_cq) = (a.create_cq(64, None), b.create_cq(64, None));
        let (a_qp, b_qp) = (a.create_qp(QpType::Rc, &a_cq), b.create_qp(QpType::Rc, &b_cq));
        a.connect_rc(&a_qp, b.gid(), b_qp.qpn, timeout);
        b.connect_rc(&b_qp, a.gid(), a_qp.qpn, timeout);
        Self { host, a, b, a_cq, b_cq, a_qp, b_qp }
    }
}
