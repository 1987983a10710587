//! A device of a process, opened once and shared by all its identifiers.
use crate::born::{Born, lock};
use crate::boundary::{Outcome, checked};
use crate::verbs;
use freeflow_abi::{
    IBV_XRCD_INIT_ATTR_FD, IBV_XRCD_INIT_ATTR_OFLAGS, ibv_context, ibv_device_attr, ibv_gid, ibv_pd, ibv_xrcd,
    ibv_xrcd_init_attr,
};
use freeflow_verbs::Gid;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Mutex};

/// An open device, with the protection domain and XRC domain that identifiers have by default.
pub(crate) struct Device {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    /// Null until it is asked for.
    xrcd: Mutex<Xrcd>,
    born: Born,
    /// Of READs and atomics, as initiator and as responder.
    pub depth_max: u8,
}

struct Xrcd(*mut ibv_xrcd);

// SAFETY: verbs may be called from any thread; the pointers don't change but for the domain's,
// which is behind a lock.
unsafe impl Send for Device {}
// SAFETY: the same.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device of libibverbs' list.
    pub fn open(device: *mut freeflow_abi::ibv_device) -> Outcome<Arc<Self>> {
        // SAFETY: a device of the list that is open in `Process::devices`.
        let context = unsafe { verbs::ibv_open_device(device) };
        if context.is_null() {
            return Err(libc::ENODEV);
        }
        let mut attributes = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: open; the attributes are integers, for which zeroes are valid.
        let outcome = unsafe {
            checked(verbs::ibv_query_device(context, attributes.as_mut_ptr())).and_then(|()| {
                let pd = verbs::given(verbs::ibv_alloc_pd(context))?;
                Ok((pd.as_ptr(), attributes.assume_init_ref().max_qp_init_rd_atom.clamp(0, 255) as u8))
            })
        };
        match outcome {
            Ok((pd, depth_max)) => {
                let xrcd = Mutex::new(Xrcd(ptr::null_mut()));
                Ok(Arc::new(Self { context, pd, xrcd, born: Born::here(), depth_max }))
            }
            Err(error) => {
                // SAFETY: nobody else has it.
                unsafe { verbs::ibv_close_device(context) };
                Err(error)
            }
        }
    }

    pub fn context(&self) -> *mut ibv_context {
        self.context
    }

    pub fn pd(&self) -> *mut ibv_pd {
        self.pd
    }

    /// Whether the vNIC has this address.
    pub fn has(&self, address: Gid) -> bool {
        let gid = |index| {
            let mut gid = ibv_gid { raw: [0; 16] };
            // SAFETY: open; a local.
            let outcome = unsafe { verbs::ibv_query_gid(self.context, 1, index, &raw mut gid) };
            (outcome == 0).then_some(Gid(gid.raw))
        };
        (0..).map_while(gid).any(|own| own == address && !own.is_zero())
    }

    /// The process' nameless XRC domain, shared by all its identifiers.
    pub fn xrcd(&self) -> Outcome<*mut ibv_xrcd> {
        let mut xrcd = lock(&self.xrcd);
        if xrcd.0.is_null() {
            let mut attributes = ibv_xrcd_init_attr {
                comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
                fd: -1,
                oflags: libc::O_CREAT,
            };
            // SAFETY: open; a local.
            xrcd.0 = unsafe { verbs::open_xrcd(self.context, &raw mut attributes)? }.as_ptr();
        }
        Ok(xrcd.0)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.born.is_here() {
            return;
        }
        let xrcd = lock(&self.xrcd).0;
        // SAFETY: no identifier has it any more. What the program still has in the domain keeps it,
        // and the context with it.
        unsafe {
            if !xrcd.is_null() {
                verbs::close_xrcd(xrcd);
            }
            if verbs::ibv_dealloc_pd(self.pd) == 0 {
                verbs::ibv_close_device(self.context);
            }
        }
    }
}
