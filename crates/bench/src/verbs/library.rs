//! `libibverbs.so.1`, whichever one the dynamic linker finds here, and its functions.
use freeflow_abi::*;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem;

/// Functions of the library. Data-path functions stand in `ibv_context.ops`.
pub struct Library {
    pub get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device,
    pub free_device_list: unsafe extern "C" fn(*mut *mut ibv_device),
    pub open_device: unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context,
    pub query_gid: unsafe extern "C" fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int,
    pub alloc_pd: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd,
    pub dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int,
    pub reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr,
    pub dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
    pub create_comp_channel: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_comp_channel,
    pub destroy_comp_channel: unsafe extern "C" fn(*mut ibv_comp_channel) -> c_int,
    pub get_cq_event: unsafe extern "C" fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int,
    pub ack_cq_events: unsafe extern "C" fn(*mut ibv_cq, c_uint),
    pub create_cq:
        unsafe extern "C" fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq,
    pub destroy_cq: unsafe extern "C" fn(*mut ibv_cq) -> c_int,
    pub create_qp: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp,
    pub create_srq: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq,
    pub destroy_srq: unsafe extern "C" fn(*mut ibv_srq) -> c_int,
    pub modify_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
    pub destroy_qp: unsafe extern "C" fn(*mut ibv_qp) -> c_int,
    pub wc_status_str: unsafe extern "C" fn(c_uint) -> *const c_char,
    /// FreeFlow's own; absent in other libraries.
    pub malloc: Option<unsafe extern "C" fn(usize) -> *mut c_void>,
    pub free: Option<unsafe extern "C" fn(*mut c_void)>,
}

/// A function by its name, if the library has it.
///
/// # Safety
/// `F` is a function pointer type with the signature of the function of that name.
unsafe fn function<F: Copy>(handle: *mut c_void, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: an open library and a C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    // SAFETY: the same size; not null, so a valid function pointer; its signature is this function's
    // contract.
    (!address.is_null()).then(|| unsafe { mem::transmute_copy(&address) })
}

/// The same; an error when the library has it not.
///
/// # Safety
/// As for [`function`].
pub unsafe fn required<F: Copy>(handle: *mut c_void, name: &CStr) -> Result<F, String> {
    // SAFETY: this function's contract is that of `function`.
    unsafe { function(handle, name) }.ok_or_else(|| format!("the library has no {}", name.to_string_lossy()))
}

/// A library by its name, for as long as this process lives.
pub fn open(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: a C string; the library's initialisers may run here as in any program.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        // SAFETY: after a failed dlopen this is a C string.
        let reason = unsafe { CStr::from_ptr(libc::dlerror()) };
        return Err(reason.to_string_lossy().into_owned());
    }
    Ok(handle)
}

impl Library {
    pub fn load() -> Result<Self, String> {
        let handle = open(c"libibverbs.so.1")?;
        // SAFETY: each field's type is the signature that the public header gives the function of that name.
        unsafe {
            Ok(Self {
                get_device_list: required(handle, c"ibv_get_device_list")?,
                free_device_list: required(handle, c"ibv_free_device_list")?,
                open_device: required(handle, c"ibv_open_device")?,
                query_gid: required(handle, c"ibv_query_gid")?,
                alloc_pd: required(handle, c"ibv_alloc_pd")?,
                dealloc_pd: required(handle, c"ibv_dealloc_pd")?,
                reg_mr: required(handle, c"ibv_reg_mr")?,
                dereg_mr: required(handle, c"ibv_dereg_mr")?,
                create_comp_channel: required(handle, c"ibv_create_comp_channel")?,
                destroy_comp_channel: required(handle, c"ibv_destroy_comp_channel")?,
                get_cq_event: required(handle, c"ibv_get_cq_event")?,
                ack_cq_events: required(handle, c"ibv_ack_cq_events")?,
                create_cq: required(handle, c"ibv_create_cq")?,
                destroy_cq: required(handle, c"ibv_destroy_cq")?,
                create_qp: required(handle, c"ibv_create_qp")?,
                create_srq: required(handle, c"ibv_create_srq")?,
                destroy_srq: required(handle, c"ibv_destroy_srq")?,
                modify_qp: required(handle, c"ibv_modify_qp")?,
                destroy_qp: required(handle, c"ibv_destroy_qp")?,
                wc_status_str: required(handle, c"ibv_wc_status_str")?,
                malloc: function(handle, c"ibv_malloc"),
                free: function(handle, c"ibv_free"),
            })
        }
    }

    /// Name of a completion status.
    pub fn status_name(&self, status: c_uint) -> String {
        // SAFETY: returns a constant C string for every number.
        let name = unsafe { (self.wc_status_str)(status) };
        if name.is_null() {
            return status.to_string();
        }
        // SAFETY: not null, so that string.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}
