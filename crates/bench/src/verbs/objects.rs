//! Objects that are only held, to see what each costs in memory.
use super::Memory;
use super::endpoint::{Buffer, Device, not_null};
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
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::Qp, Self::Cq, Self::Mr];

    pub fn name(self) -> &'static str {
        match self {
            Self::Qp => "RC QP, 128 + 128 requests",
            Self::Cq => "CQ, 256 entries",
            Self::Mr => "MR, one page",
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
