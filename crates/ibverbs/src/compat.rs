//! Names of node IBVERBS_1.0 that IBVERBS_1.1 redefined in 2007: they take structs of another
//! layout.
//!
//! No program surveyed imports them, and nothing builds against them any more; they are here
//! because a dynamic linker looks for them by name and node, and they refuse with EOPNOTSUPP. (The
//! other names of IBVERBS_1.0 are real.) The technique is that of `private.rs`.
use crate::unsupported::{refuse, refuse_minus_one, refuse_pointer};
use core::arch::global_asm;
use core::ffi::{c_int, c_void};

extern "C" fn refuse_call() -> c_int {
    refuse()
}

extern "C" fn refuse_object() -> *mut c_void {
    refuse_pointer()
}

extern "C" fn refuse_wait() -> c_int {
    refuse_minus_one()
}

extern "C" fn ignore() {}

/// No devices of the old layout.
///
/// # Safety
/// The C contract: `count` is null or valid for a write.
unsafe extern "C" fn no_devices(count: *mut c_int) -> *mut c_void {
    if !count.is_null() {
        // SAFETY: the C contract.
        unsafe { count.write(0) };
    }
    refuse_pointer()
}

macro_rules! export {
    ($target:literal = $function:path; $($name:literal),* $(,)?) => {
        global_asm!(
            ".pushsection .text.freeflow_compat,\"ax\",@progbits",
            concat!(
                ".globl ", $target, "\n.type ", $target, ",@function\n", $target, ":\njmp {function}\n",
                ".size ", $target, ", . - ", $target, "\n"
            ),
            ".popsection",
            $(concat!(".symver ", $target, ", ", $name),)*
            function = sym $function,
        );
    };
}

// Result: an errno.
export! {
    "freeflow_compat_refuse" = refuse_call;
    "ibv_close_device@IBVERBS_1.0", "ibv_query_device@IBVERBS_1.0", "ibv_query_port@IBVERBS_1.0",
    "ibv_dealloc_pd@IBVERBS_1.0", "ibv_dereg_mr@IBVERBS_1.0", "ibv_resize_cq@IBVERBS_1.0",
    "ibv_destroy_cq@IBVERBS_1.0", "ibv_modify_srq@IBVERBS_1.0", "ibv_query_srq@IBVERBS_1.0",
    "ibv_destroy_srq@IBVERBS_1.0", "ibv_query_qp@IBVERBS_1.0", "ibv_modify_qp@IBVERBS_1.0",
    "ibv_destroy_qp@IBVERBS_1.0", "ibv_destroy_ah@IBVERBS_1.0", "ibv_attach_mcast@IBVERBS_1.0",
    "ibv_detach_mcast@IBVERBS_1.0",
}

// Result: null and errno (for the GUID, 0).
export! {
    "freeflow_compat_refuse_object" = refuse_object;
    "ibv_get_device_name@IBVERBS_1.0", "ibv_get_device_guid@IBVERBS_1.0", "ibv_open_device@IBVERBS_1.0",
    "ibv_alloc_pd@IBVERBS_1.0", "ibv_reg_mr@IBVERBS_1.0", "ibv_create_cq@IBVERBS_1.0", "ibv_create_srq@IBVERBS_1.0",
    "ibv_create_qp@IBVERBS_1.0", "ibv_create_ah@IBVERBS_1.0",
}

export! {
    "freeflow_compat_no_devices" = no_devices;
    "ibv_get_device_list@IBVERBS_1.0",
}

// Result: -1 and errno.
export! {
    "freeflow_compat_refuse_wait" = refuse_wait;
    "ibv_get_async_event@IBVERBS_1.0", "ibv_query_gid@IBVERBS_1.0", "ibv_query_pkey@IBVERBS_1.0",
    "ibv_get_cq_event@IBVERBS_1.0",
}

// No result. The last is how drivers announced themselves before the private nodes.
export! {
    "freeflow_compat_ignore" = ignore;
    "ibv_free_device_list@IBVERBS_1.0", "ibv_ack_async_event@IBVERBS_1.0", "ibv_ack_cq_events@IBVERBS_1.0",
    "ibv_register_driver@IBVERBS_1.1",
}
