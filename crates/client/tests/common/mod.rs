//! A router that only makes objects: the test plays the engine on its side of the rings.
#![allow(dead_code, reason = "each test binary uses a part")]
use freeflow_protocol::library::{Handle, Reply, Request, Welcome};
use freeflow_protocol::version::{Agreement, Offer};
use freeflow_protocol::{PROTOCOL, decode, encode};
use freeflow_shm::layout::{LAYOUT_VERSION, QueueShape, cq_bytes};
use freeflow_shm::{CompletionProducer, Doorbell, RequestConsumer, Segment, SessionSegment, fd};
use freeflow_verbs::{
    DeviceAttributes, Gid, PathMtu, PortAttributes, QpAttributes, QpCapabilities, QpState, SrqAttributes, VerbsError,
};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

/// The router's side of one session.
#[derive(Default)]
pub struct Objects {
    pub session: Option<SessionSegment>,
    pub kick: Option<Doorbell>,
    /// By cookie.
    pub cqs: HashMap<u32, CompletionProducer>,
    pub qps: HashMap<u32, FakeQp>,
    pub srqs: HashMap<u32, RequestConsumer>,
    /// Write ends, by handle.
    pub pipes: HashMap<Handle, OwnedFd>,
    cq_cookies: HashMap<Handle, u32>,
    qp_cookies: HashMap<Handle, u32>,
    pub requests: Vec<Request>,
    /// Refused with Busy, once.
    pub busy_once: Option<Request>,
    next: Handle,
}

pub struct FakeQp {
    pub qpn: u32,
    pub send: RequestConsumer,
    pub receive: RequestConsumer,
}

pub struct FakeRouter {
    pub path: PathBuf,
    directory: PathBuf,
    objects: Arc<Mutex<Objects>>,
    connection: Arc<Mutex<Option<OwnedFd>>>,
}

impl FakeRouter {
    /// Listens, and serves one connection on a thread of its own.
    pub fn start(name: &str, offer: Offer) -> Self {
        let directory = std::env::temp_dir().join(format!("freeflow-client-{name}-{}", std::process::id()));
        // A killed run with this number may have left one.
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("router.sock");
        let listener = fd::listen_seqpacket(&path, 0o600).unwrap();
        fd::set_nonblocking(&listener, false).unwrap();
        let router = Self { path, directory, objects: Arc::default(), connection: Arc::default() };
        let (objects, connection) = (router.objects.clone(), router.connection.clone());
        std::thread::spawn(move || {
            let socket = fd::accept(&listener).unwrap();
            fd::set_nonblocking(&socket, false).unwrap();
            *connection.lock().unwrap() = Some(socket.try_clone().unwrap());
            serve(&socket, &objects, offer);
        });
        router
    }

    pub fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap()
    }

    /// Dies: every descriptor is closed.
    pub fn die(&self) {
        let mut objects = self.objects();
        objects.pipes.clear();
        objects.session = None;
        if let Some(socket) = self.connection.lock().unwrap().take() {
            rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).unwrap();
        }
    }
}

impl Drop for FakeRouter {
    fn drop(&mut self) {
        self.die();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn serve(socket: &OwnedFd, objects: &Mutex<Objects>, offer: Offer) {
    let mut buffer = Vec::new();
    while let Ok((bytes @ 1.., _)) = fd::receive_message(socket, &mut buffer, 0) {
        let request: Request = decode(&buffer[..bytes]).unwrap();
        let (reply, descriptors) = objects.lock().unwrap().answer(&request, offer);
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        if fd::send_message(socket, &encode(&reply), &descriptors).is_err() {
            return;
        }
    }
}

pub fn device() -> DeviceAttributes {
    DeviceAttributes {
        name: "freeflow0".into(),
        firmware_version: "0".into(),
        node_guid: 1,
        mr_bytes_max: 1 << 40,
        qp_count_max: 10,
        queue_work_requests_max: 100,
        sge_count_max: 30,
        cq_count_max: 10,
        cqe_count_max: 1000,
        mr_count_max: 10,
        pd_count_max: 10,
        qp_rd_atomic_max: 16,
        srq_count_max: 10,
        srq_work_requests_max: 100,
        srq_sge_count_max: 30,
        ah_count_max: 10,
        inline_bytes_max: 1024,
        completion_vector_count: 1,
        mw_count_max: 10,
        multicast_group_count_max: 10,
        multicast_attach_count_max: 10,
        device_memory_bytes_max: 1 << 20,
        port: PortAttributes {
            active: true,
            max_mtu: PathMtu::Mtu4096,
            active_mtu: PathMtu::Mtu4096,
            gid_table_length: 1,
            message_bytes_max: 1 << 31,
            active_speed: 32,
            active_width: 2,
        },
    }
}

impl Objects {
    fn handle(&mut self) -> Handle {
        self.next += 1;
        self.next
    }

    fn pipe(&mut self) -> (Handle, Vec<OwnedFd>) {
        let (read, write) = fd::event_sockets(64 * 1024).unwrap();
        let handle = self.handle();
        self.pipes.insert(handle, write);
        (handle, vec![read])
    }

    fn answer(&mut self, request: &Request, offer: Offer) -> (Reply, Vec<OwnedFd>) {
        self.requests.push(request.clone());
        if self.busy_once.as_ref() == Some(request) {
            self.busy_once = None;
            return (Reply::Failed(VerbsError::Busy), Vec::new());
        }
        match request {
            Request::Hello { layouts, .. } if offer != PROTOCOL => {
                (Reply::Incompatible { protocol: offer, layouts: *layouts }, Vec::new())
            }
            Request::Hello { .. } => self.welcome(),
            Request::OpenContext | Request::ImportContext { .. } => {
                let (context, mut fds) = self.pipe();
                fds.push(Segment::create("test-pass", 4096).unwrap().1);
                (Reply::Context { context }, fds)
            }
            Request::CreateChannel { .. } => {
                let (channel, fds) = self.pipe();
                (Reply::Channel { channel }, fds)
            }
            Request::AllocPd { .. } | Request::ImportPd { .. } => (Reply::Pd { pd: self.handle() }, Vec::new()),
            Request::RegisterMr { .. } | Request::AllocNullMr { .. } => {
                (Reply::Mr { mr: self.handle(), lkey: 5, rkey: 5 }, Vec::new())
            }
            Request::ReregisterMr { mr, .. } => (Reply::Mr { mr: *mr, lkey: 5, rkey: 5 }, Vec::new()),
            Request::ImportMr { .. } => {
                (Reply::ImportedMr { mr: self.handle(), lkey: 5, rkey: 5, length: 4096 }, Vec::new())
            }
            Request::AllocMw { .. } => (Reply::Mw { mw: self.handle(), rkey: 0x100 }, Vec::new()),
            Request::CreateAh { .. } => (Reply::AddressHandle { ah: self.handle() }, Vec::new()),
            Request::CreateSegment { length } => self.segment(*length as usize),
            Request::ImportSegment { .. } => self.segment(8192),
            Request::CreateCq { cqe, cookie, .. } => self.create_cq(*cqe, *cookie, 0),
            Request::ResizeCq { cq, cqe } => {
                let cookie = self.cq_cookies[cq];
                let left = self.cqs.get_mut(&cookie).unwrap().unconsumed();
                self.create_cq(*cqe, cookie, left)
            }
            Request::CreateSrq { attributes, cookie, .. } => self.create_srq(*attributes, *cookie),
            Request::OpenXrcd { .. } => (Reply::Xrcd { xrcd: self.handle() }, Vec::new()),
            Request::CreateQp { xrcd: Some(_), .. } => self.target_qp(0x2000),
            Request::OpenQp { qpn, .. } => self.target_qp(*qpn),
            Request::CreateQp { capabilities, cookie, .. } => self.create_qp(*capabilities, *cookie),
            Request::ModifyQp { qp, attributes, .. } => self.modify_qp(*qp, attributes),
            Request::QueryQp { .. } => {
                (Reply::QpAttributes(QpAttributes { state: QpState::Error, ..Default::default() }), Vec::new())
            }
            _ => (Reply::Done, Vec::new()),
        }
    }

    fn segment(&mut self, bytes: usize) -> (Reply, Vec<OwnedFd>) {
        let (segment, memory) = Segment::create("test-arena", bytes.next_multiple_of(4096)).unwrap();
        let length = segment.bytes() as u64;
        (Reply::Segment { segment: self.handle(), length }, vec![memory])
    }

    fn welcome(&mut self) -> (Reply, Vec<OwnedFd>) {
        let (segment, memory) = SessionSegment::create().unwrap();
        let kick = Doorbell::new().unwrap();
        let fds = vec![memory, kick.0.try_clone().unwrap()];
        let session_segment_bytes = segment.segment().bytes() as u64;
        self.session = Some(segment);
        self.kick = Some(kick);
        let welcome = Welcome {
            protocol: Agreement { version: 1, features: 0 },
            layout_version: LAYOUT_VERSION,
            device: device(),
            gids: vec![Gid::from_ip([10, 0, 0, 1].into())],
            network: "default".into(),
            vnic: "test".into(),
            session_segment_bytes,
        };
        (Reply::Welcome(welcome), fds)
    }

    fn create_cq(&mut self, cqe: u32, cookie: u32, left: u32) -> (Reply, Vec<OwnedFd>) {
        let (segment, memory) = Segment::create("test-cq", cq_bytes(cqe)).unwrap();
        self.cqs.insert(cookie, CompletionProducer::new(Arc::new(segment), cqe, left));
        let cq = self.handle();
        self.cq_cookies.insert(cq, cookie);
        (Reply::Cq { cq, cqe, segment_bytes: cq_bytes(cqe) as u64 }, vec![memory])
    }

    fn create_srq(&mut self, attributes: SrqAttributes, cookie: u32) -> (Reply, Vec<OwnedFd>) {
        let shape = QueueShape::receive(attributes.max_wr, attributes.max_sge);
        let (segment, memory) = Segment::create("test-srq", shape.bytes()).unwrap();
        let consumer = RequestConsumer::new(Arc::new(segment), 0, shape, attributes.max_wr, attributes.max_sge, 0);
        self.srqs.insert(cookie, consumer);
        let srq = self.handle();
        (Reply::Srq { srq, number: srq + 100, attributes, segment_bytes: shape.bytes() as u64 }, vec![memory])
    }

    /// An XRC target has no rings.
    fn target_qp(&mut self, qpn: u32) -> (Reply, Vec<OwnedFd>) {
        let capabilities = QpCapabilities::default();
        (Reply::Qp { qp: self.handle(), qpn, capabilities, segment_bytes: 0 }, Vec::new())
    }

    fn create_qp(&mut self, capabilities: QpCapabilities, cookie: u32) -> (Reply, Vec<OwnedFd>) {
        let c = capabilities;
        let send = QueueShape::send(c.max_send_wr, c.max_send_sge, c.max_inline_data);
        let receive = QueueShape::receive(c.max_recv_wr, c.max_recv_sge);
        let bytes = send.bytes() + receive.bytes();
        let (segment, memory) = Segment::create("test-qp", bytes).unwrap();
        let segment = Arc::new(segment);
        let qp = self.handle();
        let qpn = 0x1000 + qp;
        let fake = FakeQp {
            qpn,
            send: RequestConsumer::new(segment.clone(), 0, send, c.max_send_wr, c.max_send_sge, c.max_inline_data),
            receive: RequestConsumer::new(segment, send.bytes(), receive, c.max_recv_wr, c.max_recv_sge, 0),
        };
        self.qps.insert(cookie, fake);
        self.qp_cookies.insert(qp, cookie);
        (Reply::Qp { qp, qpn, capabilities, segment_bytes: bytes as u64 }, vec![memory])
    }

    fn modify_qp(&mut self, qp: Handle, attributes: &QpAttributes) -> (Reply, Vec<OwnedFd>) {
        if attributes.state == QpState::Reset
            && let Some(cookie) = self.qp_cookies.get(&qp)
        {
            let fake = self.qps.get_mut(cookie).unwrap();
            fake.send.reset();
            fake.receive.reset();
        }
        (Reply::QpModified { state: attributes.state }, Vec::new())
    }
}
