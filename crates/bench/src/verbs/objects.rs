//! Objects that are only held, to see what each costs in memory.
use super::endpoint::{Buffer, Device, PollTimeout, connect, initialise, not_null, zero};
use super::{Address, Memory};
use crate::sys;
use freeflow_abi::*;
use freeflow_verbs::Access;
use serde::{Deserialize, Serialize};
use std::ffi::{c_int, c_void};
use std::ptr;

const PAGE_BYTES: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// 128 sends, 128 receives, one entry each.
    Qp,
    /// 256 entries.
    Cq,
    /// One page of one large mapping each.
    Mr,
    /// Like `Qp`, and they can be connected and used; all share one page of memory.
    Connection,
}

/// Requests of a `Connection` each way, which is its depth.
pub const DEPTH: usize = 128;
/// Sizes of its messages, by turns: one that may lie beside its request, and one that will not.
const MESSAGE_BYTES: [usize; 2] = [64, PAGE_BYTES];

impl Kind {
    /// Those that need no other end.
    pub const ALONE: [Self; 3] = [Self::Qp, Self::Cq, Self::Mr];

    pub fn name(self) -> &'static str {
        match self {
            Self::Qp => "RC QP, 128 + 128 requests",
            Self::Cq => "CQ, 256 entries",
            Self::Mr => "MR, one page",
            Self::Connection => "connected RC QP, 128 + 128 requests",
        }
    }
}

/// Objects of one kind; freed in the order that the API asks for.
pub struct Held<'a> {
    device: &'a Device,
    pd: *mut ibv_pd,
    cqs: Vec<*mut ibv_cq>,
    qps: Vec<*mut ibv_qp>,
    mrs: Vec<*mut ibv_mr>,
    _buffer: Option<Buffer<'a>>,
}

impl<'a> Held<'a> {
    pub fn new(device: &'a Device, kind: Kind, count: usize) -> Result<Self, String> {
        let library = &device.library;
        // SAFETY: an open context.
        let pd = not_null(unsafe { (library.alloc_pd)(device.context()) }, "ibv_alloc_pd")?;
        let mut held = Self { device, pd, cqs: Vec::new(), qps: Vec::new(), mrs: Vec::new(), _buffer: None };
        match kind {
            Kind::Cq => {
                for _ in 0..count {
                    held.add_cq()?;
                }
            }
            Kind::Qp => {
                held.add_cq()?;
                for _ in 0..count {
                    held.add_qp()?;
                }
            }
            Kind::Connection => {
                let buffer = device.allocate(Memory::Ordinary, PAGE_BYTES)?;
                let base = buffer.base();
                held._buffer = Some(buffer);
                held.add_mr(base)?;
                held.add_cq()?;
                for _ in 0..count {
                    held.add_qp()?;
                }
                for &qp in &held.qps {
                    // SAFETY: a QP of this library, made above.
                    unsafe { initialise(library, qp, Access::LOCAL_WRITE) }?;
                }
            }
            Kind::Mr => {
                let buffer = device.allocate(Memory::Ordinary, count * PAGE_BYTES)?;
                let base = buffer.base();
                held._buffer = Some(buffer);
                for index in 0..count {
                    // SAFETY: inside the buffer, which goes after the regions.
                    held.add_mr(unsafe { base.add(index * PAGE_BYTES) })?;
                }
            }
        }
        Ok(held)
    }

    fn add_cq(&mut self) -> Result<(), String> {
        let (context, null) = (self.device.context(), ptr::null_mut());
        // SAFETY: an open context; neither a completion channel nor user data.
        let cq = unsafe { (self.device.library.create_cq)(context, 256, null, ptr::null_mut(), 0) };
        self.cqs.push(not_null(cq, "ibv_create_cq")?);
        Ok(())
    }

    fn add_qp(&mut self) -> Result<(), String> {
        let cap =
            ibv_qp_cap { max_send_wr: 128, max_recv_wr: 128, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let mut attributes = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: self.cqs[0],
            recv_cq: self.cqs[0],
            srq: ptr::null_mut(),
            cap,
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: a valid PD and attributes that name valid queues.
        let qp = unsafe { (self.device.library.create_qp)(self.pd, &mut attributes) };
        self.qps.push(not_null(qp, "ibv_create_qp")?);
        Ok(())
    }

    /// Of the QPs; they reach no memory of this end.
    pub fn addresses(&self) -> Vec<Address> {
        let gid = self.device.gid();
        // SAFETY: valid QPs; the field never changes.
        let address = |&qp: &*mut ibv_qp| Address { gid, qpn: unsafe { (*qp).qp_num }, rkey: 0, address: 0 };
        self.qps.iter().map(address).collect()
    }

    pub fn connect(&self, peers: &[Address]) -> Result<(), String> {
        if peers.len() != self.qps.len() {
            return Err("as many peers as QPs, please".to_owned());
        }
        // SAFETY: QPs of this library, made in `new`.
        self.qps.iter().zip(peers).try_for_each(|(&qp, peer)| unsafe { connect(&self.device.library, qp, *peer) })
    }

    /// As many messages as a queue has requests, so that every place in it was used, and their completions.
    pub fn go_round(&self, index: usize, sends: bool) -> Result<(), String> {
        let (Some(&qp), Some(&cq)) = (self.qps.get(index), self.cqs.first()) else {
            return Err(format!("no QP {index}"));
        };
        for message in 0..DEPTH {
            if sends { self.post_send(qp, MESSAGE_BYTES[message % 2]) } else { self.post_receive(qp) }?;
        }
        let (mut done, mut poll_timeout) = (0, PollTimeout::new());
        while done < DEPTH {
            let mut completion = ibv_wc::default();
            // SAFETY: a valid CQ and a place for one completion.
            let count = unsafe {
                let poll = (*(*cq).context).ops.poll_cq.ok_or("no poll_cq")?;
                poll(cq, 1, &mut completion)
            };
            match count {
                0 => poll_timeout.spend()?,
                1 if completion.status == 0 => done += 1,
                _ => return Err(format!("completed with \"{}\"", self.device.library.status_name(completion.status))),
            }
        }
        Ok(())
    }

    fn page(&self) -> Result<(u64, u32), String> {
        let &mr = self.mrs.first().ok_or("no memory")?;
        // SAFETY: a valid region; these fields never change.
        unsafe { Ok(((*mr).addr as u64, (*mr).lkey)) }
    }

    fn post_send(&self, qp: *mut ibv_qp, bytes: usize) -> Result<(), String> {
        let (addr, lkey) = self.page()?;
        let mut sge = ibv_sge { addr, length: bytes as u32, lkey };
        // SAFETY: integers, pointers and unions of them: all zero is "none".
        let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
        request.sg_list = &mut sge;
        request.num_sge = 1;
        request.opcode = IBV_WR_SEND;
        request.send_flags = IBV_SEND_SIGNALED;
        let mut bad = ptr::null_mut();
        // SAFETY: a valid QP; the library copies the request and its entry.
        let status = unsafe {
            let post = (*(*qp).context).ops.post_send.ok_or("no post_send")?;
            post(qp, &mut request, &mut bad)
        };
        zero(status, "ibv_post_send")
    }

    fn post_receive(&self, qp: *mut ibv_qp) -> Result<(), String> {
        let (addr, lkey) = self.page()?;
        let mut sge = ibv_sge { addr, length: PAGE_BYTES as u32, lkey };
        let mut request = ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: &mut sge, num_sge: 1 };
        let mut bad = ptr::null_mut();
        // SAFETY: as in `post_send`.
        let status = unsafe {
            let post = (*(*qp).context).ops.post_recv.ok_or("no post_recv")?;
            post(qp, &mut request, &mut bad)
        };
        zero(status, "ibv_post_recv")
    }

    fn add_mr(&mut self, page: *mut u8) -> Result<(), String> {
        let access = Access::LOCAL_WRITE.0 as c_int;
        // SAFETY: a page of our own, deregistered in `Drop`.
        let mr = unsafe { (self.device.library.reg_mr)(self.pd, page.cast::<c_void>(), PAGE_BYTES, access) };
        self.mrs.push(not_null(mr, "ibv_reg_mr")?);
        Ok(())
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let library = &self.device.library;
        // SAFETY: each made by this library, not null, freed once; the memory goes after, as a field.
        unsafe {
            for &qp in &self.qps {
                (library.destroy_qp)(qp);
            }
            for &cq in &self.cqs {
                (library.destroy_cq)(cq);
            }
            for &mr in &self.mrs {
                (library.dereg_mr)(mr);
            }
            (library.dealloc_pd)(self.pd);
        }
    }
}

/// Resident memory of a process, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resident {
    /// Its own.
    pub private: u64,
    /// Of segments that it shares with others.
    pub shared: u64,
}

impl Resident {
    /// `self` or a number.
    pub fn of(pid: &str) -> Result<Self, String> {
        let field = |name| sys::status_bytes(pid, name).ok_or(format!("/proc/{pid}/status has no {name}"));
        Ok(Self { private: field("RssAnon:")?, shared: field("RssShmem:")? })
    }
}
