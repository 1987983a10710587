//! Both ends of many connections by `librdmacm`.
//!
//! Invariant: every pointer here came from the library and is not null; identifiers are destroyed
//! once, before the process ends.
use super::library::{Library, address, anywhere, failed};
use crate::limits::end::{EndFigures, Meter, say_ready};
use crate::stats::Summary;
use crate::sys;
use crate::verbs::endpoint::{not_null, zero};
use crate::verbs::library::Library as Verbs;
use freeflow_abi::*;
use std::ffi::{c_int, c_uint};
use std::io;
use std::net::SocketAddrV4;
use std::ptr;

const RESOLVE_TIMEOUT_MS: c_int = 5000;
const BACKLOG: c_int = 1024;
/// Requests of a queue; nothing but a byte is sent.
const DEPTH: u32 = 2;
/// A completion that does not come in this time never will.
const COMPLETION_NS_MAX: u64 = 5_000_000_000;
/// The byte that a connection brings, if it is wanted.
const BYTE_BYTES: u32 = 1;

type Outcome<T> = Result<T, String>;

/// A process's libraries, event channel and what all its QPs share.
struct End {
    cm: Library,
    verbs: Verbs,
    channel: *mut rdma_event_channel,
    shared: Option<Shared>,
    /// The byte that is sent, and one for each that comes.
    memory: Box<[u8; 8]>,
}

#[derive(Clone, Copy)]
struct Shared {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    mr: *mut ibv_mr,
}

/// An event, acknowledged.
#[derive(Clone, Copy)]
struct Event {
    kind: c_uint,
    id: *mut rdma_cm_id,
}

impl End {
    fn new() -> Outcome<Self> {
        let cm = Library::load()?;
        // SAFETY: no arguments.
        let channel = not_null(unsafe { (cm.create_event_channel)() }, "rdma_create_event_channel")?;
        Ok(Self { cm, verbs: Verbs::load()?, channel, shared: None, memory: Box::new([0; 8]) })
    }

    fn create_id(&self) -> Outcome<*mut rdma_cm_id> {
        let mut id = ptr::null_mut();
        // SAFETY: a channel, and a place for the identifier.
        let status = unsafe { (self.cm.create_id)(self.channel, &raw mut id, ptr::null_mut(), RDMA_PS_TCP) };
        zero(status, "rdma_create_id")?;
        Ok(id)
    }

    fn event(&self) -> Outcome<Event> {
        let mut event = ptr::null_mut();
        // SAFETY: a channel, and a place for the event.
        zero(unsafe { (self.cm.get_cm_event)(self.channel, &raw mut event) }, "rdma_get_cm_event")?;
        // SAFETY: an event that was not acknowledged.
        let (found, status) = unsafe { (Event { kind: (*event).event, id: (*event).id }, (*event).status) };
        // SAFETY: the same, once.
        unsafe { (self.cm.ack_cm_event)(event) };
        if status != 0 {
            return Err(format!("event {} with status {status}", found.kind));
        }
        Ok(found)
    }

    fn expect(&self, kind: c_uint) -> Outcome<Event> {
        let event = self.event()?;
        if event.kind == kind { Ok(event) } else { Err(format!("event {} instead of {kind}", event.kind)) }
    }

    /// Objects that the QPs of the identifier's device share, made once.
    fn shared(&mut self, id: *mut rdma_cm_id, entries: usize) -> Outcome<Shared> {
        if let Some(shared) = self.shared {
            return Ok(shared);
        }
        // SAFETY: a bound identifier has a device.
        let context = not_null(unsafe { (*id).verbs }, "no device")?;
        // SAFETY: an open context; the memory lives as long as this process, nearly, and stays where it is.
        let shared = unsafe {
            let pd = not_null((self.verbs.alloc_pd)(context), "ibv_alloc_pd")?;
            let null = ptr::null_mut();
            let cq =
                not_null((self.verbs.create_cq)(context, entries as c_int, null, ptr::null_mut(), 0), "ibv_create_cq")?;
            let access = freeflow_verbs::Access::LOCAL_WRITE;
            let memory = self.memory.as_mut_ptr().cast();
            let mr = not_null((self.verbs.reg_mr)(pd, memory, self.memory.len(), access.0 as c_int), "ibv_reg_mr")?;
            Shared { context, pd, cq, mr }
        };
        self.shared = Some(shared);
        Ok(shared)
    }

    fn create_qp(&self, id: *mut rdma_cm_id, shared: Shared) -> Outcome<()> {
        let cap =
            ibv_qp_cap { max_send_wr: DEPTH, max_recv_wr: DEPTH, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let mut attributes = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: shared.cq,
            recv_cq: shared.cq,
            srq: ptr::null_mut(),
            cap,
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: an identifier with a device, and objects of it.
        zero(unsafe { (self.cm.create_qp)(id, shared.pd, &raw mut attributes) }, "rdma_create_qp")
    }

    /// An identifier that only `rdma_connect` is missing to.
    fn resolve(&self, ids: &[*mut rdma_cm_id], to: &libc::sockaddr_in) -> Outcome<()> {
        for &id in ids {
            // SAFETY: a new identifier and a valid address.
            let status = unsafe { (self.cm.resolve_addr)(id, ptr::null(), to, RESOLVE_TIMEOUT_MS) };
            zero(status, "rdma_resolve_addr")?;
        }
        ids.iter().try_for_each(|_| self.expect(RDMA_CM_EVENT_ADDR_RESOLVED).map(drop))?;
        for &id in ids {
            // SAFETY: an identifier of ours.
            zero(unsafe { (self.cm.resolve_route)(id, RESOLVE_TIMEOUT_MS) }, "rdma_resolve_route")?;
        }
        ids.iter().try_for_each(|_| self.expect(RDMA_CM_EVENT_ROUTE_RESOLVED).map(drop))
    }

    fn connect(&self, id: *mut rdma_cm_id) -> Outcome<()> {
        let mut parameters = parameters();
        // SAFETY: an identifier with a QP.
        zero(unsafe { (self.cm.connect)(id, &raw mut parameters) }, "rdma_connect")
    }

    fn disconnect(&self, id: *mut rdma_cm_id) -> Outcome<()> {
        // SAFETY: an identifier.
        zero(unsafe { (self.cm.disconnect)(id) }, "rdma_disconnect")
    }

    fn destroy(&self, id: *mut rdma_cm_id) {
        // SAFETY: an identifier whose events were acknowledged, with or without a QP.
        unsafe {
            if !(*id).qp.is_null() {
                (self.cm.destroy_qp)(id);
            }
            (self.cm.destroy_id)(id);
        }
    }

    fn piece(&self, shared: Shared, place: usize) -> ibv_sge {
        // SAFETY: a registered region.
        let lkey = unsafe { (*shared.mr).lkey };
        ibv_sge { addr: &raw const self.memory[place] as u64, length: BYTE_BYTES, lkey }
    }

    fn post_receive(&self, id: *mut rdma_cm_id, shared: Shared) -> Outcome<()> {
        let mut piece = self.piece(shared, 1);
        let mut request = ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: &raw mut piece, num_sge: 1 };
        let mut bad = ptr::null_mut();
        // SAFETY: a QP that takes requests, and one that names registered memory.
        unsafe {
            let post = (*shared.context).ops.post_recv.ok_or("no post_recv")?;
            zero(post((*id).qp, &raw mut request, &raw mut bad), "ibv_post_recv")
        }
    }

    fn post_send(&self, id: *mut rdma_cm_id, shared: Shared) -> Outcome<()> {
        let mut piece = self.piece(shared, 0);
        // SAFETY: all zeros is a request.
        let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
        (request.sg_list, request.num_sge) = (&raw mut piece, 1);
        (request.opcode, request.send_flags) = (IBV_WR_SEND, IBV_SEND_SIGNALED);
        let mut bad = ptr::null_mut();
        // SAFETY: as above.
        unsafe {
            let post = (*shared.context).ops.post_send.ok_or("no post_send")?;
            zero(post((*id).qp, &raw mut request, &raw mut bad), "ibv_post_send")
        }
    }

    /// Polls for a completion.
    fn complete(&self, shared: Shared) -> Outcome<()> {
        let until_ns = sys::monotonic_ns() + COMPLETION_NS_MAX;
        let mut completion = ibv_wc::default();
        loop {
            // SAFETY: a queue, and room for one.
            let count = unsafe {
                let poll = (*shared.context).ops.poll_cq.ok_or("no poll_cq")?;
                poll(shared.cq, 1, &raw mut completion)
            };
            match count {
                0 if sys::monotonic_ns() < until_ns => {}
                1 if completion.status == 0 => return Ok(()),
                1 => return Err(self.verbs.status_name(completion.status)),
                _ => return Err("no completion".to_owned()),
            }
        }
    }
}

fn parameters() -> rdma_conn_param {
    rdma_conn_param {
        private_data: ptr::null(),
        private_data_len: 0,
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: 0,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: 0,
        qp_num: 0,
    }
}

/// Accepts so many connections, a `batch` at a time, and sends a byte on each as soon as it is
/// established, if `greets`. What a batch leaves is destroyed once all of it was disconnected.
pub fn listen(port: u16, count: usize, batch: usize, greets: bool) -> io::Result<EndFigures> {
    listening(port, count, batch, greets).map_err(failed)
}

fn listening(port: u16, count: usize, batch: usize, greets: bool) -> Outcome<EndFigures> {
    let mut end = End::new()?;
    let listener = end.create_id()?;
    let at = anywhere(port);
    // SAFETY: a new identifier and a valid address.
    zero(unsafe { (end.cm.bind_addr)(listener, &raw const at) }, "rdma_bind_addr")?;
    // SAFETY: a bound identifier.
    zero(unsafe { (end.cm.listen)(listener, BACKLOG) }, "rdma_listen")?;
    say_ready().map_err(|error| error.to_string())?;
    let meter = Meter::start();
    let mut gone = Vec::with_capacity(batch);
    let mut done = 0;
    while done < count {
        let Event { kind, id } = end.event()?;
        match kind {
            RDMA_CM_EVENT_CONNECT_REQUEST => {
                let shared = end.shared(id, 4 * batch)?;
                end.create_qp(id, shared)?;
                let mut parameters = parameters();
                // SAFETY: an identifier of a request, with a QP.
                zero(unsafe { (end.cm.accept)(id, &raw mut parameters) }, "rdma_accept")?;
            }
            RDMA_CM_EVENT_ESTABLISHED if greets => {
                let shared = end.shared(id, 4 * batch)?;
                end.post_send(id, shared)?;
                end.complete(shared)?;
            }
            RDMA_CM_EVENT_DISCONNECTED => gone.push(id),
            _ => {}
        }
        if gone.len() == batch || done + gone.len() == count {
            done += gone.len();
            gone.drain(..).for_each(|id| end.destroy(id));
        }
    }
    end.destroy(listener);
    Ok(meter.figures(None, done as u64, 0))
}

/// Connections a second, each figure of a batch: from the first `rdma_connect` until the last one
/// is closed at both ends. The addresses and routes are resolved, and the QPs made, before.
pub fn connect(to: SocketAddrV4, count: usize, batch: usize) -> io::Result<EndFigures> {
    connecting(to, count, batch).map_err(failed)
}

fn connecting(to: SocketAddrV4, count: usize, batch: usize) -> Outcome<EndFigures> {
    let mut end = End::new()?;
    let to = address(to);
    let meter = Meter::start();
    let mut rates = Vec::new();
    for _ in 0..count / batch {
        let ids = (0..batch).map(|_| end.create_id()).collect::<Outcome<Vec<_>>>()?;
        end.resolve(&ids, &to)?;
        for &id in &ids {
            let shared = end.shared(id, 4 * batch)?;
            end.create_qp(id, shared)?;
        }
        let before = sys::monotonic_ns();
        ids.iter().try_for_each(|&id| end.connect(id))?;
        let mut gone = 0;
        while gone < batch {
            let event = end.event()?;
            match event.kind {
                RDMA_CM_EVENT_ESTABLISHED => end.disconnect(event.id)?,
                RDMA_CM_EVENT_DISCONNECTED => gone += 1,
                // Of one that was closed long ago, as batches go.
                RDMA_CM_EVENT_TIMEWAIT_EXIT => {}
                kind => return Err(format!("event {kind}")),
            }
        }
        rates.push(batch as f64 * 1e9 / (sys::monotonic_ns() - before).max(1) as f64);
        ids.into_iter().for_each(|id| end.destroy(id));
    }
    Ok(meter.figures(Summary::of(&mut rates), count as u64, 0))
}

/// Milliseconds from `rdma_resolve_addr` until the other end's first byte is there, one connection after the other.
pub fn first_byte(to: SocketAddrV4, count: usize) -> io::Result<EndFigures> {
    first_bytes(to, count).map_err(failed)
}

fn first_bytes(to: SocketAddrV4, count: usize) -> Outcome<EndFigures> {
    let mut end = End::new()?;
    let to = address(to);
    let meter = Meter::start();
    let mut samples = Vec::new();
    for _ in 0..count {
        let id = end.create_id()?;
        let before = sys::monotonic_ns();
        end.resolve(&[id], &to)?;
        let shared = end.shared(id, 4)?;
        end.create_qp(id, shared)?;
        end.post_receive(id, shared)?;
        end.connect(id)?;
        end.expect(RDMA_CM_EVENT_ESTABLISHED)?;
        end.complete(shared)?;
        samples.push((sys::monotonic_ns() - before) as f64 / 1e6);
        end.disconnect(id)?;
        end.expect(RDMA_CM_EVENT_DISCONNECTED)?;
        end.destroy(id);
    }
    Ok(meter.figures(Summary::of(&mut samples), count as u64, 0))
}
