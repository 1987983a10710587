//! One end of a connection: memory, completion queues and an RC queue pair, by the C API.
//!
//! Invariant: every pointer here came from the library, is not null, and is freed in `Drop` in the order that the API
//! asks for, by the thread that made it. No work is in flight then that would touch the memory: the QP goes first.
use super::callgrind;
use super::library::Library;
use super::{Address, Job, Memory, Operation, Traffic};
use crate::sys::{self, Shared};
use freeflow_abi::*;
use freeflow_verbs::{Access, QpAttributeMask};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

/// Work requests of one `ibv_post_send` or `ibv_post_recv` at most.
pub const BATCH_MAX: usize = 16;
/// Completions of one `ibv_poll_cq` at most.
const POLL_MAX: usize = 16;
/// A completion that does not come in this time never will.
const COMPLETION_NS_MAX: u64 = 5_000_000_000;
/// Empty polls between looks at the clock.
const POLLS_A_LOOK: u32 = 4096;
const PORT: u8 = 1;
/// Bytes of the C library's before a large block of `malloc`, which begins a page.
const MALLOC_HEADER_BYTES: usize = 16;
/// `enum ibv_qp_state`.
const INIT: c_uint = 1;
const RTR: c_uint = 2;
const RTS: c_uint = 3;

/// A device, opened once.
pub struct Device {
    pub library: Library,
    context: *mut ibv_context,
    gid: [u8; 16],
}

pub fn not_null<T>(pointer: *mut T, what: &str) -> Result<*mut T, String> {
    if pointer.is_null() { Err(format!("{what}: {}", std::io::Error::last_os_error())) } else { Ok(pointer) }
}

pub fn zero(status: c_int, what: &str) -> Result<(), String> {
    match status {
        0 => Ok(()),
        // Most of these return errno; the oldest return -1 and set it.
        -1 => Err(format!("{what}: {}", std::io::Error::last_os_error())),
        status => Err(format!("{what}: {}", std::io::Error::from_raw_os_error(status))),
    }
}

impl Device {
    /// The first device there is.
    pub fn open() -> Result<Self, String> {
        let library = Library::load()?;
        let mut count = 0;
        // SAFETY: `count` is a valid place; the list is freed below.
        let list = not_null(unsafe { (library.get_device_list)(&mut count) }, "ibv_get_device_list")?;
        if count < 1 {
            return Err("no RDMA device".to_owned());
        }
        // SAFETY: the list has `count` entries; the context may outlive the list.
        let context = unsafe { (library.open_device)(*list) };
        // SAFETY: the list came from ibv_get_device_list.
        unsafe { (library.free_device_list)(list) };
        let context = not_null(context, "ibv_open_device")?;
        let mut gid = ibv_gid::default();
        // SAFETY: an open context and a place for one GID.
        zero(unsafe { (library.query_gid)(context, PORT, 0, &mut gid) }, "ibv_query_gid")?;
        Ok(Self { library, context, gid: gid.raw })
    }

    pub fn context(&self) -> *mut ibv_context {
        self.context
    }

    /// The first one of its port, which is its address.
    pub fn gid(&self) -> [u8; 16] {
        self.gid
    }

    /// Memory whose pages are all there.
    pub fn allocate(&self, memory: Memory, bytes: usize) -> Result<Buffer<'_>, String> {
        let from = |offset: usize, mapping: std::io::Result<Shared>| {
            mapping.map(|memory| Buffer::Mapped { memory, offset }).map_err(|error| error.to_string())
        };
        let mapped = |mapping| from(0, mapping);
        match memory {
            Memory::Ordinary => mapped(Shared::private(bytes)),
            Memory::Unaligned => from(MALLOC_HEADER_BYTES, Shared::private(bytes + MALLOC_HEADER_BYTES)),
            Memory::Huge => mapped(Shared::huge(bytes)),
            Memory::Foreign => mapped(Shared::new(bytes)),
            Memory::SystemV => mapped(Shared::system_v(bytes)),
            Memory::SlowPath => mapped(Shared::sealed(bytes)),
            Memory::Shared => {
                let allocate = self.library.malloc.ok_or("this libibverbs has no ibv_malloc")?;
                // SAFETY: a plain number.
                let base = not_null(unsafe { allocate(bytes) }, "ibv_malloc")?;
                Ok(Buffer::Shared { device: self, base: base.cast() })
            }
        }
    }
}

pub enum Buffer<'a> {
    Mapped { memory: Shared, offset: usize },
    Shared { device: &'a Device, base: *mut u8 },
}

impl Buffer<'_> {
    pub fn base(&self) -> *mut u8 {
        match self {
            Self::Mapped { memory, offset } => memory.at(*offset, 0),
            Self::Shared { base, .. } => *base,
        }
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        if let Self::Shared { device, base } = self
            && let Some(free) = device.library.free
        {
            // SAFETY: from ibv_malloc, freed once; the region over it was deregistered first.
            unsafe { free(base.cast()) };
        }
    }
}

/// Brings an RC QP from INIT to RTS.
///
/// # Safety
/// A QP that this library made and nobody destroyed.
pub unsafe fn connect(library: &Library, qp: *mut ibv_qp, peer: Address) -> Result<(), String> {
    use QpAttributeMask as Mask;
    let modify = |attributes: &mut ibv_qp_attr, mask: u32| {
        // SAFETY: this function's contract, and filled in attributes.
        zero(unsafe { (library.modify_qp)(qp, attributes, mask as c_int) }, "ibv_modify_qp")
    };
    let grh = ibv_global_route { dgid: ibv_gid { raw: peer.gid }, hop_limit: 64, ..Default::default() };
    let mut attributes = ibv_qp_attr {
        qp_state: RTR,
        path_mtu: 5, // IBV_MTU_4096
        dest_qp_num: peer.qpn,
        rq_psn: 0,
        max_dest_rd_atomic: 16,
        min_rnr_timer: 1, // 10 us
        ah_attr: ibv_ah_attr { grh, is_global: 1, port_num: PORT, ..Default::default() },
        ..Default::default()
    };
    let to_rtr = Mask::STATE | Mask::AV | Mask::PATH_MTU | Mask::DEST_QPN | Mask::RQ_PSN;
    modify(&mut attributes, to_rtr | Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER)?;
    let mut attributes =
        ibv_qp_attr { qp_state: RTS, timeout: 18, retry_cnt: 7, rnr_retry: 7, max_rd_atomic: 16, ..Default::default() };
    let to_rts = Mask::STATE | Mask::TIMEOUT | Mask::RETRY_CNT | Mask::RNR_RETRY | Mask::SQ_PSN;
    modify(&mut attributes, to_rts | Mask::MAX_QP_RD_ATOMIC)
}

/// The first state of a QP, with an end's rights.
///
/// # Safety
/// As for [`connect`].
pub unsafe fn initialise(library: &Library, qp: *mut ibv_qp, access: Access) -> Result<(), String> {
    use QpAttributeMask as Mask;
    let mut attributes =
        ibv_qp_attr { qp_state: INIT, port_num: PORT, qp_access_flags: access.0, ..Default::default() };
    let mask = Mask::STATE | Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS;
    // SAFETY: this function's contract, and filled in attributes.
    zero(unsafe { (library.modify_qp)(qp, &mut attributes, mask as c_int) }, "ibv_modify_qp")
}

/// Properties that a batch of requests has in common.
#[derive(Clone, Copy)]
pub struct Post {
    pub operation: Operation,
    /// Sends carry this immediate value.
    pub immediate: Option<u32>,
    /// The last request of the batch completes with an entry.
    pub signaled: bool,
}

/// One request of several that are posted together.
#[derive(Clone, Copy)]
pub struct One {
    pub operation: Operation,
    pub immediate: Option<u32>,
    pub bytes: usize,
}

/// Parts that not every endpoint has.
#[derive(Clone, Copy)]
pub struct Extras {
    /// Announces completions of sends, and outlives the endpoint; null: none does.
    pub channel: *mut ibv_comp_channel,
    /// Receives go to a shared receive queue of its own.
    pub shared_receives: bool,
}

impl Extras {
    pub const NONE: Self = Self { channel: ptr::null_mut(), shared_receives: false };
}

pub struct Endpoint<'a> {
    device: &'a Device,
    qp: *mut ibv_qp,
    /// Null: the QP has a receive queue of its own.
    srq: *mut ibv_srq,
    send_cq: *mut ibv_cq,
    receive_cq: *mut ibv_cq,
    pd: *mut ibv_pd,
    mr: *mut ibv_mr,
    /// First the places to send from, then those to receive into. Last, so that it is freed last.
    buffer: Buffer<'a>,
    /// Bytes of each half of the buffer.
    area: usize,
    bytes: usize,
    slots: usize,
    receive_depth: usize,
    peer: Option<Address>,
}

impl<'a> Endpoint<'a> {
    /// A QP in INIT, with receives posted.
    pub fn new(device: &'a Device, memory: Memory, job: &Job) -> Result<Self, String> {
        Self::with(device, memory, job, Extras::NONE)
    }

    /// The same, with extras.
    pub fn with(device: &'a Device, memory: Memory, job: &Job, extras: Extras) -> Result<Self, String> {
        let library = &device.library;
        let area = (job.bytes * job.slots).next_multiple_of(if memory == Memory::Unaligned { 64 } else { 4096 });
        let buffer = device.allocate(memory, 2 * area)?;
        // SAFETY: freshly allocated, so long, nobody else's.
        unsafe { ptr::write_bytes(buffer.base(), 1, 2 * area) };
        let receive_depth = match job.traffic {
            Traffic::Latency => 32,
            Traffic::Bandwidth | Traffic::BandwidthRead => (4 * job.slots).clamp(64, 4096),
        };
        let send_depth = job.slots.max(64) + BATCH_MAX;
        let access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);
        // SAFETY: an open context.
        let pd = not_null(unsafe { (library.alloc_pd)(device.context) }, "ibv_alloc_pd")?;
        let base = buffer.base().cast::<c_void>();
        let mut end = Self {
            device,
            qp: ptr::null_mut(),
            srq: ptr::null_mut(),
            send_cq: ptr::null_mut(),
            receive_cq: ptr::null_mut(),
            pd,
            mr: ptr::null_mut(),
            buffer,
            area,
            bytes: job.bytes,
            slots: job.slots,
            receive_depth,
            peer: None,
        };
        // SAFETY: the region is ours until `Drop`, which deregisters it before the memory goes.
        end.mr = not_null(unsafe { (library.reg_mr)(pd, base, 2 * area, access.0 as c_int) }, "ibv_reg_mr")?;
        end.send_cq = end.create_cq(send_depth, extras.channel)?;
        end.receive_cq = end.create_cq(receive_depth, ptr::null_mut())?;
        if extras.shared_receives {
            end.srq = end.create_srq()?;
        }
        end.qp = end.create_qp(send_depth)?;
        // SAFETY: a valid QP of this library.
        unsafe { initialise(library, end.qp, access) }?;
        let mut posted = 0;
        while posted < receive_depth {
            let count = BATCH_MAX.min(receive_depth - posted);
            end.post_receives(posted, count)?;
            posted += count;
        }
        Ok(end)
    }

    fn create_cq(&self, entries: usize, channel: *mut ibv_comp_channel) -> Result<*mut ibv_cq, String> {
        let (context, null) = (self.device.context, ptr::null_mut());
        // SAFETY: an open context; a channel of it, or none; no user data.
        let cq = unsafe { (self.device.library.create_cq)(context, entries as c_int, null, channel, 0) };
        not_null(cq, "ibv_create_cq")
    }

    fn create_srq(&self) -> Result<*mut ibv_srq, String> {
        let attr = ibv_srq_attr { max_wr: self.receive_depth as u32, max_sge: 1, srq_limit: 0 };
        let mut attributes = ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        // SAFETY: a valid PD and a filled in structure.
        not_null(unsafe { (self.device.library.create_srq)(self.pd, &mut attributes) }, "ibv_create_srq")
    }

    fn create_qp(&self, send_depth: usize) -> Result<*mut ibv_qp, String> {
        let cap = ibv_qp_cap {
            max_send_wr: send_depth as u32,
            max_recv_wr: self.receive_depth as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let mut attributes = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: self.send_cq,
            recv_cq: self.receive_cq,
            srq: self.srq,
            cap,
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: a valid PD and attributes that name valid queues.
        not_null(unsafe { (self.device.library.create_qp)(self.pd, &mut attributes) }, "ibv_create_qp")
    }

    pub fn address(&self) -> Address {
        // SAFETY: valid objects (invariant of the module); these fields never change.
        let (qpn, rkey) = unsafe { ((*self.qp).qp_num, (*self.mr).rkey) };
        Address { gid: self.device.gid, qpn, rkey, address: self.receive_place(0) as u64 }
    }

    pub fn connect(&mut self, peer: Address) -> Result<(), String> {
        // SAFETY: a valid QP of this library (invariant of the module).
        unsafe { connect(&self.device.library, self.qp, peer) }?;
        self.peer = Some(peer);
        Ok(())
    }

    pub fn receive_depth(&self) -> usize {
        self.receive_depth
    }

    pub fn send_cq(&self) -> *mut ibv_cq {
        self.send_cq
    }

    fn status_name(&self, completion: &ibv_wc) -> String {
        self.device.library.status_name(completion.status)
    }

    /// Where message `index` is sent from.
    pub fn send_place(&self, index: usize) -> *mut u8 {
        // SAFETY: inside the buffer, which has two areas of `slots` places.
        unsafe { self.buffer.base().add(index % self.slots * self.bytes) }
    }

    /// Where message `index` arrives.
    pub fn receive_place(&self, index: usize) -> *mut u8 {
        // SAFETY: the same, in the second area.
        unsafe { self.buffer.base().add(self.area + index % self.slots * self.bytes) }
    }

    /// Posts `count` receives for the messages from `first` on, in one call.
    pub fn post_receives(&self, first: usize, count: usize) -> Result<(), String> {
        self.post_receives_counted::<false>(first, count)
    }

    /// The same; with `COUNTED` callgrind collects the call.
    pub fn post_receives_counted<const COUNTED: bool>(&self, first: usize, count: usize) -> Result<(), String> {
        // SAFETY: plain integers and pointers; null is "none".
        let lkey = unsafe { (*self.mr).lkey };
        let mut sges = [ibv_sge::default(); BATCH_MAX];
        let empty = ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 1 };
        let mut requests = [empty; BATCH_MAX];
        let count = count.min(BATCH_MAX);
        for index in 0..count {
            let addr = self.receive_place(first + index) as u64;
            sges[index] = ibv_sge { addr, length: self.bytes as u32, lkey };
            requests[index].wr_id = (first + index) as u64;
            requests[index].sg_list = &mut sges[index];
        }
        for index in 1..count {
            requests[index - 1].next = &mut requests[index];
        }
        let mut bad = ptr::null_mut();
        // SAFETY: a valid QP; the list and its entries live until the call returns, and the library copies them.
        let status = unsafe {
            let ops = &(*(*self.qp).context).ops;
            if self.srq.is_null() {
                let post = ops.post_recv.ok_or("no post_recv")?;
                callgrind::collected::<COUNTED, _>(|| post(self.qp, requests.as_mut_ptr(), &mut bad))
            } else {
                let post = ops.post_srq_recv.ok_or("no post_srq_recv")?;
                callgrind::collected::<COUNTED, _>(|| post(self.srq, requests.as_mut_ptr(), &mut bad))
            }
        };
        zero(status, "ibv_post_recv")
    }

    /// Posts `count` messages from number `first` on, in one call.
    pub fn post(&self, what: Post, first: usize, count: usize) -> Result<(), String> {
        let one = One { operation: what.operation, immediate: what.immediate, bytes: self.bytes };
        self.post_each::<false>(what.signaled, first, count, |_| one)
    }

    /// The same; each request is what `describe` makes of its number, and with `COUNTED` callgrind collects the call.
    #[inline]
    pub fn post_each<const COUNTED: bool>(
        &self,
        signaled: bool,
        first: usize,
        count: usize,
        describe: impl Fn(usize) -> One,
    ) -> Result<(), String> {
        let peer = self.peer.ok_or("not connected")?;
        // SAFETY: a valid region (invariant of the module).
        let lkey = unsafe { (*self.mr).lkey };
        let mut sges = [ibv_sge::default(); BATCH_MAX];
        // SAFETY: integers, pointers and unions of them: all zero is "none".
        let mut requests: [ibv_send_wr; BATCH_MAX] = unsafe { std::mem::zeroed() };
        let count = count.min(BATCH_MAX);
        for index in 0..count {
            let message = first + index;
            let one = describe(message);
            let addr = self.send_place(message) as u64;
            sges[index] = ibv_sge { addr, length: one.bytes as u32, lkey };
            let request = &mut requests[index];
            request.wr_id = message as u64;
            request.sg_list = &mut sges[index];
            request.num_sge = 1;
            request.opcode = match (one.operation, one.immediate) {
                (Operation::Send, None) => IBV_WR_SEND,
                (Operation::Send, Some(_)) => IBV_WR_SEND_WITH_IMM,
                (Operation::Write, _) => IBV_WR_RDMA_WRITE,
                (Operation::Read, _) => IBV_WR_RDMA_READ,
            };
            request.imm_data = one.immediate.unwrap_or(0).to_be();
            let remote_addr = peer.address + (message % self.slots * self.bytes) as u64;
            request.wr.rdma = ibv_send_wr_rdma { remote_addr, rkey: peer.rkey };
        }
        for index in 1..count {
            requests[index - 1].next = &mut requests[index];
        }
        if signaled {
            requests[count - 1].send_flags = IBV_SEND_SIGNALED;
        }
        let mut bad = ptr::null_mut();
        // SAFETY: a valid QP; the list and its entries live until the call returns, and the library copies them.
        let status = unsafe {
            let post = (*(*self.qp).context).ops.post_send.ok_or("no post_send")?;
            callgrind::collected::<COUNTED, _>(|| post(self.qp, requests.as_mut_ptr(), &mut bad))
        };
        zero(status, "ibv_post_send")
    }

    /// Completions of sends that are there now; any with an error is one here.
    pub fn poll_sends(&self, each: impl FnMut(&ibv_wc)) -> Result<usize, String> {
        self.poll::<false>(self.send_cq, each)
    }

    pub fn poll_receives(&self, each: impl FnMut(&ibv_wc)) -> Result<usize, String> {
        self.poll::<false>(self.receive_cq, each)
    }

    /// How many completions of sends there are now; with `COUNTED` callgrind collects the call.
    pub fn poll_sends_counted<const COUNTED: bool>(&self) -> Result<usize, String> {
        self.poll::<COUNTED>(self.send_cq, |_| {})
    }

    pub fn poll_receives_counted<const COUNTED: bool>(&self) -> Result<usize, String> {
        self.poll::<COUNTED>(self.receive_cq, |_| {})
    }

    /// The next completion of a send is announced by the channel.
    pub fn arm(&self) -> Result<(), String> {
        // SAFETY: a valid CQ (invariant of the module).
        let status = unsafe {
            let arm = (*(*self.send_cq).context).ops.req_notify_cq.ok_or("no req_notify_cq")?;
            arm(self.send_cq, 0)
        };
        zero(status, "ibv_req_notify_cq")
    }

    #[inline]
    fn poll<const COUNTED: bool>(&self, cq: *mut ibv_cq, mut each: impl FnMut(&ibv_wc)) -> Result<usize, String> {
        let mut completions = [ibv_wc::default(); POLL_MAX];
        // SAFETY: a valid CQ and a place for so many completions.
        let count = unsafe {
            let poll = (*(*cq).context).ops.poll_cq.ok_or("no poll_cq")?;
            callgrind::collected::<COUNTED, _>(|| poll(cq, POLL_MAX as c_int, completions.as_mut_ptr()))
        };
        let count = usize::try_from(count).map_err(|_| "ibv_poll_cq failed")?;
        for completion in &completions[..count.min(POLL_MAX)] {
            if completion.status != 0 {
                return Err(format!("completed with \"{}\"", self.status_name(completion)));
            }
            each(completion);
        }
        Ok(count)
    }
}

/// Ends a wait that lasts too long, at the price of a look at the clock now and then.
pub struct PollTimeout {
    since_ns: u64,
    polls: u32,
}

impl PollTimeout {
    pub fn new() -> Self {
        Self { since_ns: sys::monotonic_ns(), polls: 0 }
    }

    /// Counts one empty poll.
    #[inline]
    pub fn spend(&mut self) -> Result<(), String> {
        self.polls += 1;
        if self.polls.is_multiple_of(POLLS_A_LOOK) && sys::monotonic_ns() - self.since_ns > COMPLETION_NS_MAX {
            return Err(format!("nothing completed for {} s", COMPLETION_NS_MAX / 1_000_000_000));
        }
        Ok(())
    }
}

impl Drop for Endpoint<'_> {
    fn drop(&mut self) {
        let library = &self.device.library;
        // SAFETY: each made by this library, not null, freed once and in the order that the API asks for. The memory
        // goes after them, as a field.
        unsafe {
            if !self.qp.is_null() {
                (library.destroy_qp)(self.qp);
            }
            if !self.srq.is_null() {
                (library.destroy_srq)(self.srq);
            }
            for cq in [self.send_cq, self.receive_cq] {
                if !cq.is_null() {
                    (library.destroy_cq)(cq);
                }
            }
            if !self.mr.is_null() {
                (library.dereg_mr)(self.mr);
            }
            (library.dealloc_pd)(self.pd);
        }
    }
}
