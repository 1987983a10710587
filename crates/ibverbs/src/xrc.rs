//! Extended reliable connections: their domains.
use crate::boundary::{code, pointer, set_errno};
use crate::context::{Context, session};
use freeflow_abi::{
    IBV_XRCD_INIT_ATTR_FD, IBV_XRCD_INIT_ATTR_OFLAGS, IBV_XRCD_INIT_ATTR_RESERVED, ibv_context, ibv_xrcd,
    ibv_xrcd_init_attr,
};
use freeflow_client::Handle;
use freeflow_verbs::{FileIdentity, VerbsError, XrcdOpenFlags};
use std::ffi::c_int;

/// An XRC domain as C sees it, and what is behind it.
#[repr(C)]
pub(crate) struct Xrcd {
    c: ibv_xrcd,
    pub handle: Handle,
}

impl Xrcd {
    /// # Safety
    /// `xrcd` came from this library and is not closed.
    pub unsafe fn from_c<'a>(xrcd: *mut ibv_xrcd) -> &'a Self {
        // SAFETY: every domain handed out is the beginning of an `Xrcd`.
        unsafe { &*xrcd.cast::<Self>() }
    }
}

/// The descriptor that says that a domain has no file.
const NO_FILE: c_int = -1;

/// Which file it is; `None` if the descriptor is none.
fn identity(file: c_int) -> Option<FileIdentity> {
    // SAFETY: integers only; all zeroes are valid.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the struct is ours to write.
    let known = unsafe { libc::fstat(file, &raw mut status) } == 0;
    known.then_some(FileIdentity { device: status.st_dev, inode: status.st_ino })
}

/// `ibv_open_xrcd(3)`, with the errno that the kernel gives: EBADF if `fd` is no file, EAGAIN if
/// there is no domain and O_CREAT is not set, EINVAL if there is one and O_EXCL is set.
pub(crate) unsafe extern "C" fn open_xrcd(context: *mut ibv_context, init: *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd {
    let mut bad_file = false;
    let opened = pointer(|| {
        // SAFETY: the C contract.
        let (init, owner) = unsafe { (&*init, Context::from_c(context).client()) };
        if init.comp_mask >= IBV_XRCD_INIT_ATTR_RESERVED {
            return Err(VerbsError::NotSupported);
        }
        if init.comp_mask != IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS {
            return Err(VerbsError::InvalidArgument);
        }
        let file = if init.fd == NO_FILE { None } else { identity(init.fd) };
        bad_file = init.fd != NO_FILE && file.is_none();
        if bad_file {
            return Err(VerbsError::InvalidArgument);
        }
        let flags = XrcdOpenFlags {
            create: init.oflags & libc::O_CREAT != 0 || file.is_none(),
            exclusive: init.oflags & libc::O_EXCL != 0,
        };
        let handle = owner.session().open_xrc_domain(owner.handle(), file, flags).map_err(|error| match error {
            VerbsError::NotFound => VerbsError::TryAgain,
            VerbsError::Exists => VerbsError::InvalidArgument,
            other => other,
        })?;
        Ok(Box::into_raw(Box::new(Xrcd { c: ibv_xrcd { context }, handle })).cast())
    });
    if bad_file {
        set_errno(libc::EBADF);
    }
    opened
}

/// `ibv_close_xrcd(3)`: EBUSY while SRQs or QPs of this process are in it.
pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    code(|| {
        // SAFETY: the C contract; made by `Box::into_raw` above.
        unsafe {
            let whole = Xrcd::from_c(xrcd);
            session(whole.c.context).close_xrc_domain(whole.handle)?;
            drop(Box::from_raw(xrcd.cast::<Xrcd>()));
        }
        Ok(())
    })
}
