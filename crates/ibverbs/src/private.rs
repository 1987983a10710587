//! The private symbol nodes of libibverbs (PABI 17 to 65), through which rdma-core's
//! provider libraries (`libmlx5.so.1`, `libefa.so.1`, ...) reach it. Programs that link a provider
//! need these names to start.
//!
//! A provider registers itself when it is loaded: that is ignored, so no device is ever one of a
//! provider's, and the rest is not called; if it is, it refuses with EOPNOTSUPP. One name here is
//! used by programs: `ibv_query_gid_type` (`ibv_devinfo`, pyverbs); one is declared in the public
//! header: `ibv_wr_opcode_str`.
//!
//! The same name stands in several nodes, which Rust can't say: the assembler's `.symver` can. It
//! needs its target in the same object file, hence the jumps. The linker hides the targets
//! themselves (`versions.map`).
//!
//! Facts of rdma-core: `libibverbs/libibverbs.map.in` at the tags v17 to v64 and its newest state
//! (65). Each number is the release that changed the node: 22 holds for v22 to v24, 25 for v25 to v32.
use crate::device::ibv_query_gid_type;
use crate::strings::wr_opcode_str;
use crate::unsupported::{refuse, refuse_minus_one, refuse_pointer};
use core::arch::global_asm;
use core::ffi::{c_int, c_uint, c_void};

#[cfg(not(target_arch = "x86_64"))]
compile_error!("the layouts and these jumps are those of x86-64");

extern "C" fn refuse_command() -> c_int {
    refuse()
}

extern "C" fn refuse_object() -> *mut c_void {
    refuse_pointer()
}

extern "C" fn refuse_descriptor() -> c_int {
    refuse_minus_one()
}

/// Takes any arguments and does nothing: registrations, and what would undo or fill in an object
/// never made.
extern "C" fn ignore() {}

/// How many attributes a command of `count` and its predecessors has: none of ours has
/// predecessors.
extern "C" fn final_attribute_count(count: c_uint, _predecessors: *mut c_void) -> c_uint {
    count
}

/// `.symver` lines that give `target` each name in each of some nodes.
macro_rules! symver {
    ($target:literal, $names:tt, $($number:literal)*) => {
        concat!($(symver!(@node $target, $number, $names),)*)
    };
    (@node $target:literal, $number:literal, [$($name:literal),*]) => {
        concat!($(".symver ", $target, ", ", $name, "@IBVERBS_PRIVATE_", $number, "\n",)*)
    };
}

/// The same in each node from a number on, or up to another one.
macro_rules! in_nodes {
    ($target:literal, 17 to 20: $($name:literal),* $(,)?) => { symver!($target, [$($name),*], 17 18 19 20) };
    ($target:literal, 17 to 25: $($name:literal),* $(,)?) => { symver!($target, [$($name),*], 17 18 19 20 21 22 25) };
    ($target:literal, 17 to 34: $($name:literal),* $(,)?) => {
        symver!($target, [$($name),*], 17 18 19 20 21 22 25 33 34)
    };
    ($target:literal, 25 only: $($name:literal),* $(,)?) => { symver!($target, [$($name),*], 25) };
    ($target:literal, 17: $($name:literal),* $(,)?) => {
        symver!($target, [$($name),*], 17 18 19 20 21 22 25 33 34 57 59 64 65)
    };
    ($target:literal, 18: $($name:literal),* $(,)?) => {
        symver!($target, [$($name),*], 18 19 20 21 22 25 33 34 57 59 64 65)
    };
    ($target:literal, 19: $($name:literal),* $(,)?) => {
        symver!($target, [$($name),*], 19 20 21 22 25 33 34 57 59 64 65)
    };
    ($target:literal, 20: $($name:literal),* $(,)?) => {
        symver!($target, [$($name),*], 20 21 22 25 33 34 57 59 64 65)
    };
    ($target:literal, 21: $($name:literal),* $(,)?) => { symver!($target, [$($name),*], 21 22 25 33 34 57 59 64 65) };
    ($target:literal, 22: $($name:literal),* $(,)?) => { symver!($target, [$($name),*], 22 25 33 34 57 59 64 65) };
    ($target:literal, 25: $($name:literal),* $(,)?) => { symver!($target, [$($name),*], 25 33 34 57 59 64 65) };
    ($target:literal, 33: $($name:literal),* $(,)?) => { symver!($target, [$($name),*], 33 34 57 59 64 65) };
    ($target:literal, 34: $($name:literal),* $(,)?) => { symver!($target, [$($name),*], 34 57 59 64 65) };
    ($target:literal, 59: $($name:literal),* $(,)?) => { symver!($target, [$($name),*], 59 64 65) };
    ($target:literal, 64: $($name:literal),* $(,)?) => { symver!($target, [$($name),*], 64 65) };
    ($target:literal, 65: $($name:literal),* $(,)?) => { symver!($target, [$($name),*], 65) };
}

/// A function that jumps to `{function}`.
macro_rules! jump {
    ($target:literal) => {
        concat!(
            ".globl ",
            $target,
            "\n.type ",
            $target,
            ",@function\n",
            $target,
            ":\njmp {function}\n",
            ".size ",
            $target,
            ", . - ",
            $target,
            "\n"
        )
    };
}

macro_rules! export {
    ($target:literal = $function:path; $($lines:expr),* $(,)?) => {
        global_asm!(
            ".pushsection .text.freeflow_private,\"ax\",@progbits",
            jump!($target),
            ".popsection",
            $($lines,)*
            function = sym $function,
        );
    };
}

// Commands to the kernel. Result: an errno.
export! {
    "freeflow_private_refuse" = refuse_command;
    in_nodes!("freeflow_private_refuse", 17:
        "ibv_cmd_alloc_mw", "ibv_cmd_alloc_pd", "ibv_cmd_attach_mcast", "ibv_cmd_close_xrcd", "ibv_cmd_create_ah",
        "ibv_cmd_create_cq", "ibv_cmd_create_cq_ex", "ibv_cmd_create_flow", "ibv_cmd_create_qp",
        "ibv_cmd_create_qp_ex", "ibv_cmd_create_qp_ex2", "ibv_cmd_create_rwq_ind_table", "ibv_cmd_create_srq",
        "ibv_cmd_create_srq_ex", "ibv_cmd_create_wq", "ibv_cmd_dealloc_mw", "ibv_cmd_dealloc_pd", "ibv_cmd_dereg_mr",
        "ibv_cmd_destroy_ah", "ibv_cmd_destroy_cq", "ibv_cmd_destroy_flow", "ibv_cmd_destroy_qp",
        "ibv_cmd_destroy_rwq_ind_table", "ibv_cmd_destroy_srq", "ibv_cmd_destroy_wq", "ibv_cmd_detach_mcast",
        "ibv_cmd_get_context", "ibv_cmd_modify_cq", "ibv_cmd_modify_qp", "ibv_cmd_modify_qp_ex", "ibv_cmd_modify_srq",
        "ibv_cmd_modify_wq", "ibv_cmd_open_qp", "ibv_cmd_open_xrcd", "ibv_cmd_poll_cq", "ibv_cmd_post_recv",
        "ibv_cmd_post_send", "ibv_cmd_post_srq_recv", "ibv_cmd_query_port", "ibv_cmd_query_qp", "ibv_cmd_query_srq",
        "ibv_cmd_reg_mr", "ibv_cmd_req_notify_cq", "ibv_cmd_rereg_mr", "ibv_cmd_resize_cq",
    ),
    in_nodes!("freeflow_private_refuse", 18:
        "ibv_cmd_alloc_dm", "ibv_cmd_create_flow_action_esp", "ibv_cmd_destroy_flow_action", "ibv_cmd_free_dm",
        "ibv_cmd_modify_flow_action_esp", "ibv_cmd_reg_dm_mr",
    ),
    in_nodes!("freeflow_private_refuse", 19:
        "ibv_cmd_create_counters", "ibv_cmd_destroy_counters", "ibv_cmd_read_counters",
    ),
    in_nodes!("freeflow_private_refuse", 20: "execute_ioctl"),
    in_nodes!("freeflow_private_refuse", 22: "ibv_cmd_advise_mr"),
    in_nodes!("freeflow_private_refuse", 25: "ibv_cmd_query_context", "ibv_cmd_query_mr"),
    in_nodes!("freeflow_private_refuse", 33: "ibv_cmd_query_device_any"),
    in_nodes!("freeflow_private_refuse", 34: "ibv_cmd_create_cq_ex2", "ibv_cmd_reg_dmabuf_mr"),
    in_nodes!("freeflow_private_refuse", 17 to 25: "ibv_cmd_query_device_ex"),
    in_nodes!("freeflow_private_refuse", 17 to 34: "ibv_cmd_query_device"),
    in_nodes!("freeflow_private_refuse", 25 only: "ibv_get_fw_ver"),
    in_nodes!("freeflow_private_refuse", 59:
        "ibv_cmd_alloc_dmah", "ibv_cmd_free_dmah", "ibv_cmd_query_port_speed", "ibv_cmd_reg_mr_ex",
    ),
    in_nodes!("freeflow_private_refuse", 65:
        "ibv_cmd_create_comp_cntr", "ibv_cmd_destroy_comp_cntr", "ibv_cmd_inc_comp_cntr", "ibv_cmd_inc_err_comp_cntr",
        "ibv_cmd_qp_attach_comp_cntr", "ibv_cmd_query_comp_cntr_caps", "ibv_cmd_read_comp_cntr",
        "ibv_cmd_read_err_comp_cntr", "ibv_cmd_set_comp_cntr", "ibv_cmd_set_err_comp_cntr",
    ),
}

// Objects. Result: null and errno.
export! {
    "freeflow_private_refuse_object" = refuse_object;
    in_nodes!("freeflow_private_refuse_object", 17: "_verbs_init_and_alloc_context"),
    in_nodes!("freeflow_private_refuse_object", 21: "verbs_open_device"),
    in_nodes!("freeflow_private_refuse_object", 64:
        "ibv_dmabuf_heap_alloc", "ibv_dmabuf_heap_cc_shared_init",
    ),
}

// Descriptors and lengths. Result: -1 and errno.
export! {
    "freeflow_private_refuse_descriptor" = refuse_descriptor;
    in_nodes!("freeflow_private_refuse_descriptor", 25: "ibv_read_ibdev_sysfs_file"),
    in_nodes!("freeflow_private_refuse_descriptor", 59: "ibv_cmd_export_dmabuf_fd"),
}

// No result. The registration's name carries the number of its node.
export! {
    "freeflow_private_ignore" = ignore;
    in_nodes!("freeflow_private_ignore", 17: "verbs_init_cq", "verbs_set_ops", "verbs_uninit_context"),
    in_nodes!("freeflow_private_ignore", 34: "__verbs_log"),
    in_nodes!("freeflow_private_ignore", 64:
        "ibv_dmabuf_heap_destroy", "ibv_dmabuf_heap_free",
    ),
    in_nodes!("freeflow_private_ignore", 17 to 20: "ibv_register_driver"),
    ".symver freeflow_private_ignore, verbs_register_driver_17@IBVERBS_PRIVATE_17",
    ".symver freeflow_private_ignore, verbs_register_driver_18@IBVERBS_PRIVATE_18",
    ".symver freeflow_private_ignore, verbs_register_driver_19@IBVERBS_PRIVATE_19",
    ".symver freeflow_private_ignore, verbs_register_driver_20@IBVERBS_PRIVATE_20",
    ".symver freeflow_private_ignore, verbs_register_driver_21@IBVERBS_PRIVATE_21",
    ".symver freeflow_private_ignore, verbs_register_driver_22@IBVERBS_PRIVATE_22",
    ".symver freeflow_private_ignore, verbs_register_driver_25@IBVERBS_PRIVATE_25",
    ".symver freeflow_private_ignore, verbs_register_driver_33@IBVERBS_PRIVATE_33",
    ".symver freeflow_private_ignore, verbs_register_driver_34@IBVERBS_PRIVATE_34",
    ".symver freeflow_private_ignore, verbs_register_driver_57@IBVERBS_PRIVATE_57",
    ".symver freeflow_private_ignore, verbs_register_driver_59@IBVERBS_PRIVATE_59",
    ".symver freeflow_private_ignore, verbs_register_driver_64@IBVERBS_PRIVATE_64",
    ".symver freeflow_private_ignore, verbs_register_driver_65@IBVERBS_PRIVATE_65",
}

export! {
    "freeflow_private_final_attribute_count" = final_attribute_count;
    in_nodes!("freeflow_private_final_attribute_count", 18: "__ioctl_final_num_attrs"),
}

// The two that are real.
export! {
    "freeflow_private_query_gid_type" = ibv_query_gid_type;
    in_nodes!("freeflow_private_query_gid_type", 17: "ibv_query_gid_type"),
}

export! {
    "freeflow_private_wr_opcode_str" = wr_opcode_str;
    in_nodes!("freeflow_private_wr_opcode_str", 34: "ibv_wr_opcode_str"),
}

// A flag that providers read: false.
global_asm!(
    ".pushsection .data.freeflow_private,\"aw\",@progbits",
    ".globl freeflow_private_false",
    ".type freeflow_private_false,@object",
    "freeflow_private_false:",
    ".byte 0",
    ".size freeflow_private_false, 1",
    ".popsection",
    in_nodes!("freeflow_private_false", 20: "verbs_allow_disassociate_destroy"),
);
