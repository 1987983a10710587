//! One UD queue pair of a datagram socket: it has one for each local address that it sent from or
//! was heard at.
use crate::address::Address;
use crate::cm::CmId;
use crate::ffi::{
    Outcome, checked, errno, ibv_create_ah, ibv_destroy_ah, ibv_query_gid, not_null, rdma_create_qp, rdma_destroy_qp,
};
use crate::headers::DATAGRAM_BYTES;
use crate::link::{Queue, poll_room};
use crate::memory::{LOCAL_WRITE, Memory};
use crate::stream::{RECEIVE_ID, Sizes};
use crate::wait::{Deadline, readable, sleep};
use freeflow_abi::{
    IBV_QPT_UD, IBV_SEND_SIGNALED, IBV_WR_SEND, RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_PS_UDP,
    RDMA_UDP_QKEY, ibv_ah, ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp_cap, ibv_qp_init_attr, ibv_recv_wr,
    ibv_send_wr, ibv_send_wr_ud, ibv_send_wr_union, ibv_sge,
};
use libc::c_int;
use std::mem::zeroed;
use std::net::SocketAddr;
use std::ptr;
use std::time::Duration;

const GRH_BYTES: usize = 40;
const STRIDE: usize = DATAGRAM_BYTES + GRH_BYTES;
/// A sender that has just spoken is known; an address that somebody made up is not waited for.
const RESOLVE_MS: c_int = 0;
/// … and the answer of the connection manager comes soon.
const EVENT_WAIT_MS: u64 = 2500;
const GID_COUNT: c_int = 16;

/// A datagram in a receive slot.
#[derive(Clone, Copy, Debug)]
pub struct Arrived {
    pub slot: u32,
    pub bytes: usize,
}

#[derive(Debug)]
pub struct UdPair {
    pub local: SocketAddr,
    pub qpn: u32,
    pub queue: Queue,
    send: Memory,
    receive: Memory,
    send_free: Vec<u32>,
    send_count: usize,
    pub armed: bool,
    id: CmId,
}

/// Where datagrams for one address go.
#[derive(Debug)]
pub struct Handle(*mut ibv_ah);

// SAFETY: a handle; verbs may be called from any thread.
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: ours.
        unsafe { ibv_destroy_ah(self.0) };
    }
}

impl UdPair {
    /// # Errors
    /// Those of the connection manager and the verbs: `local` may be no address of an RDMA device.
    pub fn create(local: SocketAddr, sizes: &Sizes) -> Outcome<Self> {
        let id = CmId::create(RDMA_PS_UDP)?;
        id.bind(Address::from_std(local))?;
        let count = |bytes: u32, slots: u16| (bytes as usize / DATAGRAM_BYTES).clamp(4, usize::from(slots).max(4));
        let sends = count(sizes.send_bytes, sizes.send_slots);
        let receives = count(sizes.receive_bytes, sizes.receive_slots);
        // SAFETY: the identifier is bound to a device, or `verbs` is null.
        unsafe {
            if (*id.raw()).verbs.is_null() {
                return Err(libc::ENODEV);
            }
            let queue = Queue::create(&id, (sends + receives) as c_int)?;
            let mut attributes = ibv_qp_init_attr {
                qp_context: ptr::null_mut(),
                send_cq: queue.cq,
                recv_cq: queue.cq,
                srq: ptr::null_mut(),
                cap: ibv_qp_cap {
                    max_send_wr: sends as u32,
                    max_recv_wr: receives as u32,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: 0,
                },
                qp_type: IBV_QPT_UD,
                sq_sig_all: 0,
            };
            checked(rdma_create_qp(id.raw(), ptr::null_mut(), &raw mut attributes))?;
            let qp = (*id.raw()).qp;
            let memory = |slots: usize| Memory::register((*qp).pd, slots * STRIDE, LOCAL_WRITE);
            let memories = memory(sends).and_then(|send| Ok((send, memory(receives)?)));
            let (send, receive) = memories.inspect_err(|_| rdma_destroy_qp(id.raw()))?;
            let send_free = (0..sends as u32).collect();
            let qpn = (*qp).qp_num;
            let mut pair = Self { local, qpn, queue, send, receive, send_free, send_count: sends, armed: false, id };
            (0..receives as u32).try_for_each(|slot| pair.post_receive(slot))?;
            Ok(pair)
        }
    }

    /// # Errors
    /// Result of `ibv_post_recv`.
    pub fn post_receive(&mut self, slot: u32) -> Outcome<()> {
        let addr = self.receive.address() + u64::from(slot) * STRIDE as u64;
        let mut sge = ibv_sge { addr, length: STRIDE as u32, lkey: self.receive.lkey() };
        let wr_id = RECEIVE_ID | u64::from(slot);
        let mut request = ibv_recv_wr { wr_id, next: ptr::null_mut(), sg_list: &raw mut sge, num_sge: 1 };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair exists; every context has this operation.
        let code = unsafe {
            let qp = (*self.id.raw()).qp;
            let post = (*(*qp).context).ops.post_recv.ok_or(libc::ENOSYS)?;
            post(qp, &raw mut request, &raw mut bad)
        };
        if code == 0 { Ok(()) } else { Err(code) }
    }

    /// Takes what completed; datagrams go to `each`, which says whether it keeps the slot.
    pub fn turn(&mut self, mut each: impl FnMut(Arrived) -> bool) {
        let mut room = poll_room();
        loop {
            let completions = self.queue.poll(&mut room);
            let mut again = [0u32; 16];
            let mut count = 0;
            for completion in completions {
                let slot = completion.wr_id as u32;
                if completion.wr_id & RECEIVE_ID == 0 {
                    self.send_free.push(slot);
                    continue;
                }
                if completion.status != 0 {
                    continue;
                }
                let bytes = (completion.byte_len as usize).min(STRIDE).saturating_sub(GRH_BYTES);
                if !each(Arrived { slot, bytes }) {
                    again[count] = slot;
                    count += 1;
                }
            }
            let last = completions.is_empty();
            for slot in &again[..count] {
                let _ = self.post_receive(*slot);
            }
            if last {
                return;
            }
        }
    }

    /// The bytes of an arrived datagram, from `skip` on; how many.
    pub fn extract(&self, arrived: Arrived, skip: usize, to: &mut [u8]) -> usize {
        let bytes = arrived.bytes.saturating_sub(skip).min(to.len());
        let offset = arrived.slot as usize * STRIDE + GRH_BYTES + skip;
        // SAFETY: a slice of at least so many bytes.
        unsafe { self.receive.extract(offset, to.as_mut_ptr(), bytes) };
        bytes
    }

    #[must_use]
    pub fn can_send(&self) -> bool {
        !self.send_free.is_empty()
    }

    #[must_use]
    pub fn all_sent(&self) -> bool {
        self.send_free.len() == self.send_count
    }

    /// Sends `parts` as one datagram. The caller looked whether it can.
    ///
    /// # Errors
    /// Result of `ibv_post_send`; EAGAIN: no slot.
    pub fn send(&mut self, to: &Handle, qpn: u32, parts: [&[u8]; 2]) -> Outcome<()> {
        let slot = self.send_free.pop().ok_or(libc::EAGAIN)?;
        let mut offset = slot as usize * STRIDE;
        for part in parts {
            // SAFETY: a slice.
            unsafe { self.send.fill(offset, part.as_ptr(), part.len()) };
            offset += part.len();
        }
        let addr = self.send.address() + u64::from(slot) * STRIDE as u64;
        let length = (parts[0].len() + parts[1].len()) as u32;
        let mut sge = ibv_sge { addr, length, lkey: self.send.lkey() };
        // SAFETY: all zeros is a request; the queue pair exists; every context has this operation.
        let code = unsafe {
            let mut request: ibv_send_wr = zeroed();
            request.wr_id = u64::from(slot);
            request.sg_list = &raw mut sge;
            request.num_sge = 1;
            request.opcode = IBV_WR_SEND;
            request.send_flags = IBV_SEND_SIGNALED;
            request.wr =
                ibv_send_wr_union { ud: ibv_send_wr_ud { ah: to.0, remote_qpn: qpn, remote_qkey: RDMA_UDP_QKEY } };
            let mut bad = ptr::null_mut();
            let qp = (*self.id.raw()).qp;
            let post = (*(*qp).context).ops.post_send.ok_or(libc::ENOSYS)?;
            post(qp, &raw mut request, &raw mut bad)
        };
        if code != 0 {
            self.send_free.push(slot);
            return Err(code);
        }
        Ok(())
    }

    /// Asks the connection manager for the way to an address.
    ///
    /// # Errors
    /// ETIMEDOUT, or what the connection manager says.
    pub fn resolve(&self, to: SocketAddr) -> Outcome<Handle> {
        let id = CmId::create(RDMA_PS_UDP)?;
        let from = SocketAddr::new(self.local.ip(), 0);
        id.resolve_address(Some(Address::from_std(from)), Address::from_std(to), RESOLVE_MS)?;
        expect(&id, RDMA_CM_EVENT_ADDR_RESOLVED)?;
        id.resolve_route(RESOLVE_MS)?;
        expect(&id, RDMA_CM_EVENT_ROUTE_RESOLVED)?;
        // SAFETY: both identifiers exist; a resolved route has a record, or none is pointed to.
        unsafe {
            let record = (*id.raw()).route.path_rec;
            if record.is_null() {
                return Err(libc::EHOSTUNREACH);
            }
            let record = &*record;
            let mut attributes = ibv_ah_attr {
                grh: ibv_global_route {
                    dgid: record.dgid,
                    flow_label: u32::from_be(record.flow_label),
                    sgid_index: self.gid_index(&record.sgid),
                    hop_limit: record.hop_limit.max(1),
                    traffic_class: record.traffic_class,
                },
                dlid: u16::from_be(record.dlid),
                sl: record.sl,
                src_path_bits: 0,
                static_rate: record.rate,
                is_global: 1,
                port_num: (*id.raw()).port_num,
            };
            let pd = (*(*self.id.raw()).qp).pd;
            not_null(ibv_create_ah(pd, &raw mut attributes)).map(Handle).map_err(|_| errno())
        }
    }

    fn gid_index(&self, wanted: &ibv_gid) -> u8 {
        let mut gid = ibv_gid::default();
        let found = (0..GID_COUNT).find(|index| {
            // SAFETY: the identifier is bound to a device.
            let code =
                unsafe { ibv_query_gid((*self.id.raw()).verbs, (*self.id.raw()).port_num, *index, &raw mut gid) };
            code == 0 && gid == *wanted
        });
        found.unwrap_or(0) as u8
    }
}

/// Waits for one event.
fn expect(id: &CmId, kind: u32) -> Outcome<()> {
    let deadline = Deadline::after(Some(Duration::from_millis(EVENT_WAIT_MS)));
    loop {
        if let Some(event) = id.next_event()? {
            return if event.kind == kind { Ok(()) } else { Err(event.error()) };
        }
        if deadline.is_over() {
            return Err(libc::ETIMEDOUT);
        }
        match sleep(&mut [readable(id.fd())], deadline) {
            Ok(_) | Err(libc::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
}

impl Drop for UdPair {
    fn drop(&mut self) {
        // SAFETY: the identifier's queue pair, which nobody uses any more.
        unsafe { rdma_destroy_qp(self.id.raw()) };
    }
}
