//! A connection manager and verbs for the tests of this crate: one device in one process, every
//! request carried out as it is posted. It checks each request: keys, ranges, receives, who was
//! destroyed first.
#![allow(clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks)]
use freeflow_abi::*;
use libc::{c_int, c_uint, c_void, sockaddr, sockaddr_in};
use std::collections::{BTreeMap, VecDeque};
use std::mem::zeroed;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

const STATUS_FLUSHED: c_uint = 5;
const STATUS_ACCESS: c_uint = 10;
const STATUS_RETRY: c_uint = 12;
const OPCODE_RECV_IMM: c_uint = 129;

#[repr(C)]
struct Channel {
    base: rdma_event_channel,
    events: VecDeque<Box<Event>>,
}
#[repr(C)]
struct Event {
    base: rdma_cm_event,
    data: Vec<u8>,
}
#[repr(C)]
struct Id {
    base: rdma_cm_id,
    initiator: *mut Id,
    peer: *mut Id,
    path: Box<ibv_sa_path_rec>,
}
#[repr(C)]
struct CompletionChannel {
    base: ibv_comp_channel,
    events: VecDeque<*mut ibv_cq>,
}
#[repr(C)]
struct Cq {
    base: ibv_cq,
    completions: VecDeque<ibv_wc>,
    armed: bool,
}
struct Receive {
    id: u64,
    sges: Vec<ibv_sge>,
}
struct Inbound {
    immediate: u32,
    bytes: u32,
    sender: u32,
    id: u64,
    signaled: bool,
}
#[repr(C)]
struct Qp {
    base: ibv_qp,
    peer: u32,
    receives: VecDeque<Receive>,
    stalled: VecDeque<Inbound>,
}

#[derive(Default)]
struct World {
    next: u32,
    listeners: BTreeMap<u16, usize>,
    ids: Vec<usize>,
    qps: BTreeMap<u32, usize>,
    /// rkey: address, length.
    regions: BTreeMap<u32, (u64, u64)>,
    context: usize,
}

static WORLD: Mutex<World> = Mutex::new(World {
    next: 100,
    listeners: BTreeMap::new(),
    ids: Vec::new(),
    qps: BTreeMap::new(),
    regions: BTreeMap::new(),
    context: 0,
});

fn world() -> MutexGuard<'static, World> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Numbers of the queue pairs and regions that are left.
pub fn objects() -> (usize, usize) {
    let world = world();
    (world.qps.len(), world.regions.len())
}

impl World {
    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn context(&mut self) -> *mut ibv_context {
        if self.context == 0 {
            let device: Box<ibv_device> = Box::new(unsafe { zeroed() });
            let mut context: Box<ibv_context> = Box::new(unsafe { zeroed() });
            context.device = Box::into_raw(device);
            context.ops.poll_cq = Some(poll_cq);
            context.ops.req_notify_cq = Some(req_notify);
            context.ops.post_send = Some(post_send);
            context.ops.post_recv = Some(post_recv);
            self.context = Box::into_raw(context) as usize;
        }
        self.context as *mut ibv_context
    }

    unsafe fn complete(&mut self, cq: *mut ibv_cq, completion: ibv_wc) {
        unsafe {
            let cq = cq.cast::<Cq>();
            (*cq).completions.push_back(completion);
            if std::mem::take(&mut (*cq).armed) {
                let channel = (*cq).base.channel.cast::<CompletionChannel>();
                (*channel).events.push_back(cq.cast());
                signal((*channel).base.fd);
            }
        }
    }

    unsafe fn arrive(&mut self, to: *mut Qp, inbound: Inbound) {
        unsafe {
            let Some(receive) = (*to).receives.pop_front() else {
                (*to).stalled.push_back(inbound);
                return;
            };
            let completion = ibv_wc {
                wr_id: receive.id,
                opcode: OPCODE_RECV_IMM,
                byte_len: inbound.bytes,
                imm_data: inbound.immediate,
                wc_flags: 2,
                ..ibv_wc::default()
            };
            self.complete((*to).base.recv_cq, completion);
            if let Some(sender) = self.qps.get(&inbound.sender).copied().filter(|_| inbound.signaled) {
                let completion = ibv_wc { wr_id: inbound.id, ..ibv_wc::default() };
                self.complete((*(sender as *mut Qp)).base.send_cq, completion);
            }
        }
    }

    unsafe fn id_of(&self, fd: c_int) -> *mut Id {
        let mut ids = self.ids.iter().map(|id| *id as *mut Id);
        unsafe { ids.find(|id| (*(**id).base.channel).fd == fd).expect("an rsocket") }
    }

    unsafe fn notify(&mut self, id: *mut Id, kind: c_uint, status: c_int, data: &[u8]) {
        unsafe {
            if !self.ids.contains(&(id as usize)) {
                return;
            }
            let channel = (*id).base.channel;
            push(channel, id, ptr::null_mut(), kind, status, data);
        }
    }
}

unsafe fn push(
    channel: *mut rdma_event_channel,
    id: *mut Id,
    listener: *mut Id,
    kind: c_uint,
    status: c_int,
    data: &[u8],
) {
    unsafe {
        let mut event = Box::new(Event { base: zeroed(), data: data.to_vec() });
        event.base.id = id.cast();
        event.base.listen_id = listener.cast();
        event.base.event = kind;
        event.base.status = status;
        event.base.param.conn = rdma_conn_param {
            private_data: event.data.as_ptr().cast(),
            private_data_len: data.len() as u8,
            responder_resources: 1,
            initiator_depth: 1,
            flow_control: 1,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: 0,
            qp_num: 0,
        };
        let channel = channel.cast::<Channel>();
        (*channel).events.push_back(event);
        signal((*channel).base.fd);
    }
}

fn event_fd() -> c_int {
    unsafe { libc::eventfd(0, libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC) }
}

fn signal(fd: c_int) {
    let one = 1u64;
    unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

fn take(fd: c_int) -> bool {
    let mut count = 0u64;
    unsafe { libc::read(fd, (&raw mut count).cast(), 8) == 8 }
}

fn refuse(error: c_int) -> c_int {
    crate::ffi::set_errno(error);
    -1
}

unsafe fn port_of(address: *const sockaddr_in) -> u16 {
    unsafe { u16::from_be((*address).sin_port) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    let base = rdma_event_channel { fd: event_fd() };
    Box::into_raw(Box::new(Channel { base, events: VecDeque::new() })).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    let mut world = world();
    unsafe {
        // Requests that nobody took.
        world.ids.retain(|id| (*(*id as *mut Id)).base.channel != channel);
        libc::close((*channel).fd);
        drop(Box::from_raw(channel.cast::<Channel>()));
    }
}

unsafe fn new_id(world: &mut World, channel: *mut rdma_event_channel, space: c_uint) -> *mut Id {
    let mut base: rdma_cm_id = unsafe { zeroed() };
    base.channel = channel;
    base.ps = space;
    base.port_num = 1;
    let mut path: Box<ibv_sa_path_rec> = Box::new(unsafe { zeroed() });
    path.mtu = 5;
    path.hop_limit = 64;
    let id = Box::into_raw(Box::new(Id { base, initiator: ptr::null_mut(), peer: ptr::null_mut(), path }));
    world.ids.push(id as usize);
    id
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    _context: *mut c_void,
    space: c_uint,
) -> c_int {
    unsafe { *id = new_id(&mut world(), channel, space).cast() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    let mut world = world();
    unsafe {
        assert!((*id).qp.is_null(), "the queue pair goes first");
        let id = id.cast::<Id>();
        world.ids.retain(|other| *other != id as usize);
        world.listeners.retain(|_, other| *other != id as usize);
        let peer = (*id).peer;
        if !peer.is_null() && world.ids.contains(&(peer as usize)) {
            (*peer).peer = ptr::null_mut();
            world.notify(peer, RDMA_CM_EVENT_DISCONNECTED, 0, &[]);
        }
        drop(Box::from_raw(id));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    let _world = world();
    unsafe { (*id).channel = channel };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int {
    let mut world = world();
    unsafe {
        (*id).route.addr.src.sin = *address.cast();
        if (*id).route.addr.src.sin.sin_port == 0 {
            (*id).route.addr.src.sin.sin_port = (20000 + world.number() as u16).to_be();
        }
        (*id).verbs = world.context();
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, _backlog: c_int) -> c_int {
    let port = unsafe { port_of(&raw const (*id).route.addr.src.sin) };
    if world().listeners.insert(port, id as usize).is_some() { refuse(libc::EADDRINUSE) } else { 0 }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    _source: *mut sockaddr,
    to: *mut sockaddr,
    _timeout: c_int,
) -> c_int {
    let mut world = world();
    unsafe {
        (*id).route.addr.dst.sin = *to.cast();
        (*id).route.addr.src.sin.sin_family = libc::AF_INET as u16;
        (*id).verbs = world.context();
        world.notify(id.cast(), RDMA_CM_EVENT_ADDR_RESOLVED, 0, &[]);
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_resolve_route(id: *mut rdma_cm_id, _timeout: c_int) -> c_int {
    let mut world = world();
    unsafe {
        let path = &raw mut *(*id.cast::<Id>()).path;
        (*id).route.path_rec = path;
        (*id).route.num_paths = 1;
        world.notify(id.cast(), RDMA_CM_EVENT_ROUTE_RESOLVED, 0, &[]);
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_create_qp(id: *mut rdma_cm_id, _pd: *mut ibv_pd, attributes: *mut ibv_qp_init_attr) -> c_int {
    let mut world = world();
    unsafe {
        let mut base: ibv_qp = zeroed();
        base.context = world.context();
        base.send_cq = (*attributes).send_cq;
        base.recv_cq = (*attributes).recv_cq;
        base.qp_type = (*attributes).qp_type;
        base.qp_num = world.number();
        base.pd = Box::into_raw(Box::new(ibv_pd { context: base.context, handle: 1 }));
        let number = base.qp_num;
        let qp = Box::new(Qp { base, peer: 0, receives: VecDeque::new(), stalled: VecDeque::new() });
        (*id).qp = Box::into_raw(qp).cast();
        world.qps.insert(number, (*id).qp as usize);
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    let mut world = world();
    unsafe {
        let qp = (*id).qp.cast::<Qp>();
        world.qps.remove(&(*qp).base.qp_num);
        drop(Box::from_raw((*qp).base.pd));
        drop(Box::from_raw(qp));
        (*id).qp = ptr::null_mut();
    }
}

unsafe fn data_of<'a>(parameters: *const rdma_conn_param) -> &'a [u8] {
    unsafe {
        std::slice::from_raw_parts((*parameters).private_data.cast(), usize::from((*parameters).private_data_len))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_connect(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int {
    let mut world = world();
    unsafe {
        let port = port_of(&raw const (*id).route.addr.dst.sin);
        let Some(listener) = world.listeners.get(&port).map(|id| *id as *mut Id) else {
            world.notify(id.cast(), RDMA_CM_EVENT_REJECTED, 8, &[]);
            return 0;
        };
        let channel = (*listener).base.channel;
        let new = new_id(&mut world, channel, (*id).ps);
        (*new).initiator = id.cast();
        (*new).base.verbs = world.context();
        (*new).base.route.addr.src = (*id).route.addr.dst;
        (*new).base.route.addr.dst = (*id).route.addr.src;
        push(channel, new, listener, RDMA_CM_EVENT_CONNECT_REQUEST, 0, data_of(parameters));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_accept(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int {
    let mut world = world();
    unsafe {
        let id = id.cast::<Id>();
        let other = (*id).initiator;
        if !world.ids.contains(&(other as usize)) {
            return refuse(libc::EINVAL);
        }
        (*id).peer = other;
        (*other).peer = id;
        let (own, remote) = ((*id).base.qp.cast::<Qp>(), (*other).base.qp.cast::<Qp>());
        (*own).peer = (*remote).base.qp_num;
        (*remote).peer = (*own).base.qp_num;
        world.notify(other, RDMA_CM_EVENT_ESTABLISHED, 0, data_of(parameters));
        world.notify(id, RDMA_CM_EVENT_ESTABLISHED, 0, &[]);
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_reject(id: *mut rdma_cm_id, _data: *const c_void, _bytes: u8) -> c_int {
    let mut world = world();
    unsafe { world.notify((*id.cast::<Id>()).initiator, RDMA_CM_EVENT_REJECTED, 28, &[]) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    let mut world = world();
    unsafe {
        let id = id.cast::<Id>();
        let peer = (*id).peer;
        if !peer.is_null() {
            (*peer).peer = ptr::null_mut();
            (*id).peer = ptr::null_mut();
            world.notify(peer, RDMA_CM_EVENT_DISCONNECTED, 0, &[]);
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int {
    let fd = unsafe { (*channel).fd };
    if !take(fd) {
        return -1;
    }
    let _world = world();
    unsafe {
        let next = (*channel.cast::<Channel>()).events.pop_front().expect("as many as the descriptor counts");
        *event = Box::into_raw(next).cast();
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    drop(unsafe { Box::from_raw(event.cast::<Event>()) });
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_set_option(_: *mut rdma_cm_id, _: c_int, _: c_int, _: *mut c_void, _: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(_: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int {
    unsafe {
        *attributes = zeroed();
        (*attributes).max_qp_wr = 1000;
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid(_: *mut ibv_context, _: u8, _: c_int, gid: *mut ibv_gid) -> c_int {
    unsafe { *gid = ibv_gid::default() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let base = ibv_comp_channel { context, fd: event_fd(), refcnt: 0 };
    Box::into_raw(Box::new(CompletionChannel { base, events: VecDeque::new() })).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    unsafe {
        libc::close((*channel).fd);
        drop(Box::from_raw(channel.cast::<CompletionChannel>()));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    _entries: c_int,
    _cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    let mut base: ibv_cq = unsafe { zeroed() };
    base.context = context;
    base.channel = channel;
    Box::into_raw(Box::new(Cq { base, completions: VecDeque::new(), armed: false })).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    drop(unsafe { Box::from_raw(cq.cast::<Cq>()) });
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    _context: *mut *mut c_void,
) -> c_int {
    if !take(unsafe { (*channel).fd }) {
        return -1;
    }
    let _world = world();
    unsafe { *cq = (*channel.cast::<CompletionChannel>()).events.pop_front().expect("counted") };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_cq_events(_cq: *mut ibv_cq, _count: c_uint) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr(pd: *mut ibv_pd, address: *mut c_void, length: usize, _access: c_int) -> *mut ibv_mr {
    let mut world = world();
    let key = world.number();
    world.regions.insert(key, (address as u64, length as u64));
    let context = unsafe { (*pd).context };
    Box::into_raw(Box::new(ibv_mr { context, pd, addr: address, length, handle: key, lkey: key, rkey: key }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let mr = unsafe { Box::from_raw(mr) };
    world().regions.remove(&mr.rkey);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, _attributes: *mut ibv_ah_attr) -> *mut ibv_ah {
    let context = unsafe { (*pd).context };
    Box::into_raw(Box::new(ibv_ah { context, pd, handle: 0 }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    drop(unsafe { Box::from_raw(ah) });
    0
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, count: c_int, out: *mut ibv_wc) -> c_int {
    let _world = world();
    let mut done = 0;
    unsafe {
        while done < count as usize
            && let Some(completion) = (*cq.cast::<Cq>()).completions.pop_front()
        {
            out.add(done).write(completion);
            done += 1;
        }
    }
    done as c_int
}

unsafe extern "C" fn req_notify(cq: *mut ibv_cq, _solicited: c_int) -> c_int {
    let _world = world();
    unsafe { (*cq.cast::<Cq>()).armed = true };
    0
}

unsafe extern "C" fn post_recv(qp: *mut ibv_qp, mut request: *mut ibv_recv_wr, _bad: *mut *mut ibv_recv_wr) -> c_int {
    let mut world = world();
    unsafe {
        let qp = qp.cast::<Qp>();
        while let Some(next) = request.as_ref() {
            let sges = (0..next.num_sge as usize).map(|index| *next.sg_list.add(index)).collect();
            (*qp).receives.push_back(Receive { id: next.wr_id, sges });
            if let Some(inbound) = (*qp).stalled.pop_front() {
                world.arrive(qp, inbound);
            }
            request = next.next;
        }
    }
    0
}

unsafe extern "C" fn post_send(qp: *mut ibv_qp, request: *mut ibv_send_wr, _bad: *mut *mut ibv_send_wr) -> c_int {
    let mut world = world();
    unsafe {
        let (qp, request) = (qp.cast::<Qp>(), &*request);
        let mut payload = Vec::new();
        for index in 0..request.num_sge as usize {
            let sge = *request.sg_list.add(index);
            if request.send_flags & IBV_SEND_INLINE == 0 {
                assert!(world.regions.contains_key(&sge.lkey), "an unknown lkey");
            }
            payload.extend_from_slice(std::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize));
        }
        let datagram = (*qp).base.qp_type == IBV_QPT_UD;
        let peer = if datagram { request.wr.ud.remote_qpn } else { (*qp).peer };
        let signaled = request.send_flags & IBV_SEND_SIGNALED != 0;
        let complete = |world: &mut World, status: c_uint| {
            if signaled || status != 0 {
                world.complete((*qp).base.send_cq, ibv_wc { wr_id: request.wr_id, status, ..ibv_wc::default() });
            }
        };
        let Some(to) = world.qps.get(&peer).map(|qp| *qp as *mut Qp) else {
            complete(&mut world, if datagram { 0 } else { STATUS_RETRY });
            return 0;
        };
        if datagram {
            deliver_datagram(&mut world, to, &payload);
            complete(&mut world, 0);
            return 0;
        }
        if !payload.is_empty() {
            let rdma = request.wr.rdma;
            let inside = world.regions.get(&rdma.rkey).is_some_and(|(address, length)| {
                rdma.remote_addr >= *address && rdma.remote_addr + payload.len() as u64 <= address + length
            });
            if !inside {
                complete(&mut world, STATUS_ACCESS);
                return 0;
            }
            ptr::copy_nonoverlapping(payload.as_ptr(), rdma.remote_addr as *mut u8, payload.len());
        }
        if request.opcode == IBV_WR_RDMA_WRITE {
            complete(&mut world, 0);
            return 0;
        }
        let (immediate, bytes) = (request.imm_data, payload.len() as u32);
        let inbound = Inbound { immediate, bytes, sender: (*qp).base.qp_num, id: request.wr_id, signaled };
        world.arrive(to, inbound);
    }
    0
}

unsafe fn deliver_datagram(world: &mut World, to: *mut Qp, payload: &[u8]) {
    unsafe {
        let Some(receive) = (*to).receives.pop_front() else { return };
        let sge = receive.sges[0];
        assert!(payload.len() + 40 <= sge.length as usize, "too long for its receive");
        ptr::copy_nonoverlapping(payload.as_ptr(), (sge.addr as *mut u8).add(40), payload.len());
        let byte_len = payload.len() as u32 + 40;
        world.complete((*to).base.recv_cq, ibv_wc { wr_id: receive.id, byte_len, ..ibv_wc::default() });
    }
}

/// As if the process at the other end of the connection behind this descriptor had died.
pub fn kill_peer_of(fd: c_int) {
    let mut world = world();
    unsafe {
        let id = world.id_of(fd);
        let qp = (*id).base.qp.cast::<Qp>();
        (*qp).peer = 0;
        for receive in std::mem::take(&mut (*qp).receives) {
            let completion = ibv_wc { wr_id: receive.id, status: STATUS_FLUSHED, ..ibv_wc::default() };
            world.complete((*qp).base.recv_cq, completion);
        }
        world.notify(id, RDMA_CM_EVENT_DISCONNECTED, 0, &[]);
    }
}

/// Only the connection manager says that the other end of the rsocket went; the queue pair knows of
/// nothing.
pub fn part_from_peer(fd: c_int) {
    let mut world = world();
    unsafe {
        let id = world.id_of(fd);
        world.notify(id, RDMA_CM_EVENT_DISCONNECTED, 0, &[]);
    }
}
