//! The queue pair of a stream with its buffers and completion queue: posts what the protocol's
//! machine plans, and feeds it what completes. Waiting, and what the program asked for, are
//! `socket`'s.
use crate::cm::CmId;
use crate::config::BUFFER_BYTES;
use crate::ffi::{
    Outcome, checked, ibv_ack_cq_events, ibv_create_comp_channel, ibv_create_cq, ibv_destroy_comp_channel,
    ibv_destroy_cq, ibv_get_cq_event, ibv_query_device, not_null, rdma_create_qp, rdma_destroy_qp, uncancelled,
};
use crate::memory::{LOCAL_WRITE, Lists, Memory, REMOTE_WRITE, Rings};
use crate::stream::{CONTROL_SLOT_COUNT, ControlWrite, Failure, RECEIVE_ID, Sizes, Source, Stream, Write};
use crate::wire::{CONNECTION_DATA_BYTES, TARGET_BYTES, Target};
use freeflow_abi::{
    IBV_QPT_RC, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, ibv_comp_channel,
    ibv_cq, ibv_device_attr, ibv_qp, ibv_qp_cap, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_send_wr_rdma,
    ibv_send_wr_union, ibv_sge, ibv_wc,
};
use libc::{c_int, c_uint};
use std::mem::{MaybeUninit, zeroed};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

const WC_SUCCESS: c_uint = 0;
const WC_WITH_IMM: c_uint = 1 << 1;
const POLL_COUNT: usize = 16;
const SLOT_COUNT_MIN: u16 = 16;
const SLOT_COUNT_MAX: c_int = 0xFFFE;
/// Longer pieces gain nothing by travelling in the request.
pub const INLINE_BYTES_MAX: usize = 1024;
const BUFFER_BYTES_MIN: u32 = 2048;
/// Buffers of the default size grow to these where a stream moves much. What is to be sent waits
/// for acknowledgements; what was received also for the program, and for the other end to learn of
/// new room.
const SEND_BYTES_GROWN: u32 = 2 * BUFFER_BYTES;
const RECEIVE_BYTES_GROWN: u32 = 4 * BUFFER_BYTES;

/// A completion queue with a channel that does not block.
#[derive(Debug)]
pub struct Queue {
    pub cq: *mut ibv_cq,
    pub channel: *mut ibv_comp_channel,
}

// SAFETY: verbs may be called from any thread.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl Queue {
    /// # Errors
    /// Those of the verbs.
    ///
    /// # Safety
    /// `id` is bound to a device.
    pub unsafe fn create(id: &CmId, entries: c_int) -> Outcome<Self> {
        // SAFETY: this function's contract.
        unsafe {
            let context = (*id.raw()).verbs;
            let channel = not_null(ibv_create_comp_channel(context))?;
            let flags = libc::fcntl((*channel).fd, libc::F_GETFL);
            libc::fcntl((*channel).fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
            match not_null(ibv_create_cq(context, entries, ptr::null_mut(), channel, 0)) {
                Ok(cq) => Ok(Self { cq, channel }),
                Err(error) => {
                    ibv_destroy_comp_channel(channel);
                    Err(error)
                }
            }
        }
    }

    #[must_use]
    pub fn fd(&self) -> c_int {
        // SAFETY: the channel exists.
        unsafe { (*self.channel).fd }
    }

    pub fn arm(&self) {
        // SAFETY: the queue exists; every context has this operation.
        unsafe {
            if let Some(arm) = (*(*self.cq).context).ops.req_notify_cq {
                arm(self.cq, 0);
            }
        }
    }

    /// Takes the events that wait. Whether there was one.
    pub fn drain(&self) -> bool {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel exists, is ours alone and does not block.
        let found = uncancelled(|| unsafe { ibv_get_cq_event(self.channel, &raw mut cq, &raw mut context) == 0 });
        if found {
            // SAFETY: the event was given just now.
            unsafe { ibv_ack_cq_events(cq, 1) };
        }
        found
    }

    /// Polls up to `POLL_COUNT` completions.
    pub fn poll<'a>(&self, room: &'a mut [MaybeUninit<ibv_wc>; POLL_COUNT]) -> &'a [ibv_wc] {
        // SAFETY: the queue exists; as many completions are written as are counted.
        unsafe {
            let Some(poll) = (*(*self.cq).context).ops.poll_cq else { return &[] };
            let count = poll(self.cq, POLL_COUNT as c_int, room.as_mut_ptr().cast());
            let count = usize::try_from(count).unwrap_or(0).min(POLL_COUNT);
            std::slice::from_raw_parts(room.as_ptr().cast(), count)
        }
    }
}

pub type PollRoom = [MaybeUninit<ibv_wc>; POLL_COUNT];

#[must_use]
pub fn poll_room() -> PollRoom {
    [MaybeUninit::uninit(); POLL_COUNT]
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: the queue pair is gone, every event is acknowledged.
        unsafe {
            ibv_destroy_cq(self.cq);
            ibv_destroy_comp_channel(self.channel);
        }
    }
}

/// State under the lock.
#[derive(Debug)]
pub struct Core {
    pub stream: Stream,
    /// The queue will raise an event.
    pub armed: bool,
}

/// Fields are dropped in this order; the queue pair before all of them.
#[derive(Debug)]
pub struct Link {
    qp: *mut ibv_qp,
    core: Mutex<Core>,
    pub queue: Queue,
    pub send_rings: Rings,
    pub receive_rings: Rings,
    pub lists: Lists,
    pub id: std::sync::Arc<CmId>,
}

// SAFETY: verbs may be called from any thread; what is changed is under locks.
unsafe impl Send for Link {}
// SAFETY: as above.
unsafe impl Sync for Link {}

impl Link {
    /// Makes the queue pair and posts its receives. `sizes` are what the program asked for, within
    /// the device's limits.
    ///
    /// # Errors
    /// Those of the verbs.
    pub fn create(id: std::sync::Arc<CmId>, mut sizes: Sizes) -> Outcome<Self> {
        let raw = id.raw();
        // SAFETY: the identifier exists; it is bound to a device, or `verbs` is null.
        unsafe {
            if (*raw).verbs.is_null() {
                return Err(libc::ENODEV);
            }
            let mut limits: ibv_device_attr = zeroed();
            let known = ibv_query_device((*raw).verbs, &raw mut limits) == 0;
            let most = if known { limits.max_qp_wr.clamp(1, SLOT_COUNT_MAX) } else { SLOT_COUNT_MAX } as u16;
            sizes.send_slots = sizes.send_slots.max(SLOT_COUNT_MIN).min(most);
            sizes.receive_slots = sizes.receive_slots.max(SLOT_COUNT_MIN).min(most);
            sizes.send_bytes = sizes.send_bytes.clamp(BUFFER_BYTES_MIN, i32::MAX as u32);
            sizes.receive_bytes = sizes.receive_bytes.clamp(BUFFER_BYTES_MIN, i32::MAX as u32) & !1;

            let queue = Queue::create(&id, c_int::from(sizes.send_slots) + c_int::from(sizes.receive_slots))?;
            let mut attributes = ibv_qp_init_attr {
                qp_context: ptr::null_mut(),
                send_cq: queue.cq,
                recv_cq: queue.cq,
                srq: ptr::null_mut(),
                cap: ibv_qp_cap {
                    max_send_wr: u32::from(sizes.send_slots),
                    max_recv_wr: u32::from(sizes.receive_slots),
                    max_send_sge: 2,
                    max_recv_sge: 1,
                    max_inline_data: sizes.inline_bytes,
                },
                qp_type: IBV_QPT_RC,
                sq_sig_all: 0,
            };
            checked(rdma_create_qp(raw, ptr::null_mut(), &raw mut attributes))?;
            sizes.inline_bytes = attributes.cap.max_inline_data.min(INLINE_BYTES_MAX as u32);
            let link = Self::with_qp(id, queue, sizes).inspect_err(|_| rdma_destroy_qp(raw))?;
            link.post_receives(usize::from(sizes.receive_slots))?;
            Ok(link)
        }
    }

    /// # Safety
    /// The identifier has a queue pair.
    unsafe fn with_qp(id: std::sync::Arc<CmId>, queue: Queue, sizes: Sizes) -> Outcome<Self> {
        // SAFETY: this function's contract.
        unsafe {
            let (qp, pd) = ((*id.raw()).qp, (*(*id.raw()).qp).pd);
            let control_bytes = TARGET_BYTES * CONTROL_SLOT_COUNT as usize;
            let send_ring = Memory::register(pd, sizes.send_bytes as usize + control_bytes, LOCAL_WRITE)?;
            let receive_ring = Memory::register(pd, sizes.receive_bytes as usize, LOCAL_WRITE | REMOTE_WRITE)?;
            let lists = Memory::register(pd, Lists::bytes(sizes.iomap_count), LOCAL_WRITE | REMOTE_WRITE)?;
            let stream = Stream::new(sizes, receive_ring.target(sizes.receive_bytes));
            let core = Mutex::new(Core { stream, armed: false });
            let (send_rings, receive_rings) = (Rings::new(send_ring), Rings::new(receive_ring));
            Ok(Self { qp, core, queue, send_rings, receive_rings, lists: Lists(lists), id })
        }
    }

    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connection data for the other end.
    pub fn connection_data(&self) -> [u8; CONNECTION_DATA_BYTES] {
        let list: Target = self.lists.0.target(0);
        self.lock().stream.connection_data(list).to_bytes()
    }

    /// Takes all that has completed, and grants new room to the other end.
    #[inline]
    pub fn turn(&self, core: &mut Core) {
        let mut room = poll_room();
        loop {
            let completions = self.queue.poll(&mut room);
            let mut receives = 0;
            for completion in completions {
                let success = completion.status == WC_SUCCESS;
                if completion.wr_id & RECEIVE_ID == 0 {
                    core.stream.handle_sent(completion.wr_id, success);
                } else if success {
                    receives += 1;
                    if completion.wc_flags & WC_WITH_IMM != 0 {
                        core.stream.handle_message(u32::from_be(completion.imm_data));
                    }
                } else {
                    core.stream.fail(Failure::Transport);
                }
            }
            let last = completions.len() < POLL_COUNT;
            if receives != 0 && core.stream.state().is_open() && self.post_receives(receives).is_err() {
                core.stream.fail(Failure::Transport);
            }
            if last {
                break;
            }
        }
        self.give_credits(core);
    }

    /// Gives a stream that sent much a longer buffer. Only the one sender calls this.
    pub fn grow_send_ring(&self) {
        if !self.lock().stream.outgrows_send_ring() {
            return;
        }
        // SAFETY: the queue pair exists as long as this.
        let make = || unsafe { Memory::register((*self.qp).pd, SEND_BYTES_GROWN as usize, LOCAL_WRITE) };
        if self.send_rings.grow(make).is_some() {
            self.lock().stream.grow_send_ring(SEND_BYTES_GROWN);
        }
    }

    /// The same for what is received. Only the one receiver calls this.
    #[cold]
    pub fn grow_receive_ring(&self) {
        let access = LOCAL_WRITE | REMOTE_WRITE;
        // SAFETY: as above.
        let make = || unsafe { Memory::register((*self.qp).pd, RECEIVE_BYTES_GROWN as usize, access) };
        if let Some(memory) = self.receive_rings.grow(make) {
            self.lock().stream.grow_receive_ring(memory.target(RECEIVE_BYTES_GROWN));
        }
    }

    #[inline]
    pub fn give_credits(&self, core: &mut Core) {
        while let Some(write) = core.stream.poll_credits() {
            self.post_control(core, &write);
        }
    }

    /// Posts `count` receive requests: they have no buffers, since messages are immediate data.
    fn post_receives(&self, count: usize) -> Outcome<()> {
        const BATCH: usize = 32;
        let mut left = count;
        while left != 0 {
            let batch = left.min(BATCH);
            let blank = ibv_recv_wr { wr_id: RECEIVE_ID, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };
            let mut requests = [blank; BATCH];
            for index in (1..batch).rev() {
                requests[index - 1].next = &raw mut requests[index];
            }
            let mut bad = ptr::null_mut();
            // SAFETY: the queue pair exists; every context has this operation; the list is valid
            // during the call.
            let code = unsafe {
                let post = (*(*self.qp).context).ops.post_recv.ok_or(libc::ENOSYS)?;
                post(self.qp, requests.as_mut_ptr(), &raw mut bad)
            };
            if code != 0 {
                return Err(code);
            }
            left -= batch;
        }
        Ok(())
    }

    /// Posts a planned write; a ring's pieces are filled already. `data`: what travels inline, or
    /// null.
    ///
    /// # Safety
    /// Of an inline write `data` is valid for its bytes.
    #[inline]
    pub unsafe fn post(&self, write: &Write, data: *const u8) -> Outcome<()> {
        let mut sges = [ibv_sge::default(); 2];
        let (count, inline) = match write.source {
            Source::Inline => {
                sges[0] = ibv_sge { addr: data as u64, length: write.bytes, lkey: 0 };
                (1, IBV_SEND_INLINE)
            }
            Source::Ring(spans) => {
                for (sge, span) in sges.iter_mut().zip(spans) {
                    let ring = self.send_rings.of(span.ring);
                    let addr = ring.address() + u64::from(span.offset);
                    *sge = ibv_sge { addr, length: span.bytes, lkey: ring.lkey() };
                }
                (if spans[1].bytes == 0 { 1 } else { 2 }, 0)
            }
        };
        let flags = inline | if write.signaled { IBV_SEND_SIGNALED } else { 0 };
        // SAFETY: this function's contract.
        unsafe { self.request(write.id, &mut sges[..count], flags, write.immediate, (write.address, write.key)) }
    }

    pub fn post_control(&self, core: &mut Core, write: &ControlWrite) {
        let mut sges = [ibv_sge::default(); 1];
        let (mut count, mut flags) = (0, IBV_SEND_SIGNALED);
        if let Some(payload) = &write.payload {
            count = 1;
            if core.stream.sizes().inline_bytes as usize >= TARGET_BYTES {
                flags |= IBV_SEND_INLINE;
                sges[0] = ibv_sge { addr: payload.as_ptr() as u64, length: TARGET_BYTES as u32, lkey: 0 };
            } else {
                let slot = core.stream.control_buffer();
                let offset = core.stream.sizes().send_bytes as usize + slot * TARGET_BYTES;
                let ring = &self.send_rings.first;
                // SAFETY: the payload is an array of so many bytes.
                unsafe { ring.fill(offset, payload.as_ptr(), TARGET_BYTES) };
                let addr = ring.address() + offset as u64;
                sges[0] = ibv_sge { addr, length: TARGET_BYTES as u32, lkey: ring.lkey() };
            }
        }
        let to = (write.address, write.key);
        // SAFETY: the payload is valid during the call.
        let posted = unsafe { self.request(write.id, &mut sges[..count], flags, write.immediate, to) };
        if posted.is_err() {
            core.stream.fail(Failure::Transport);
        }
    }

    /// # Safety
    /// Memory of inline pieces is valid; others are registered.
    #[inline]
    unsafe fn request(
        &self,
        id: u64,
        sges: &mut [ibv_sge],
        flags: c_uint,
        immediate: Option<u32>,
        to: (u64, u32),
    ) -> Outcome<()> {
        // SAFETY: all zeros is a request; the queue pair exists; every context has this operation.
        unsafe {
            let mut request: ibv_send_wr = zeroed();
            request.wr_id = id;
            request.sg_list = sges.as_mut_ptr();
            request.num_sge = sges.len() as c_int;
            request.opcode = if immediate.is_some() { IBV_WR_RDMA_WRITE_WITH_IMM } else { IBV_WR_RDMA_WRITE };
            request.send_flags = flags;
            request.imm_data = immediate.unwrap_or(0).to_be();
            request.wr = ibv_send_wr_union { rdma: ibv_send_wr_rdma { remote_addr: to.0, rkey: to.1 } };
            let mut bad = ptr::null_mut();
            let post = (*(*self.qp).context).ops.post_send.ok_or(libc::ENOSYS)?;
            match post(self.qp, &raw mut request, &raw mut bad) {
                0 => Ok(()),
                code => Err(code),
            }
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // SAFETY: the queue pair is the identifier's, and nobody uses it any more.
        unsafe { rdma_destroy_qp(self.id.raw()) };
    }
}
