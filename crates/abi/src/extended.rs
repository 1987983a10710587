//! `struct verbs_context`: what lies before every `ibv_context`, and grows upward, away from it.
//!
//! Inline functions of the header find an entry by its distance from the context, look whether `sz`
//! reaches that far, and refuse with EOPNOTSUPP where the entry is null. So the newest layout
//! serves programs of every age.
use crate::attributes::{
    ibv_alloc_dm_attr, ibv_cq_init_attr_ex, ibv_device_attr_ex, ibv_modify_cq_attr, ibv_mr_init_attr,
    ibv_parent_domain_init_attr, ibv_port_attr, ibv_qp_init_attr_ex, ibv_qp_open_attr, ibv_qp_rate_limit_attr,
    ibv_query_device_ex_input, ibv_srq_init_attr_ex, ibv_td_init_attr, ibv_values_ex, ibv_xrcd_init_attr,
};
use crate::context::{ibv_context, ibv_xrcd, unused_op};
use crate::objects::{ibv_cq, ibv_cq_ex, ibv_dm, ibv_mr, ibv_pd, ibv_qp, ibv_srq, ibv_td};
use crate::work::ibv_sge;
use core::ffi::{c_int, c_uint, c_void};

/// Entries of type [`unused_op`] stay null here: the header then refuses for us.
#[repr(C)]
pub struct verbs_context {
    pub free_buf: unused_op,
    pub alloc_buf: unused_op,
    pub dm_export_dmabuf_fd: Option<unsafe extern "C" fn(*mut ibv_dm) -> c_int>,
    pub reg_mr_ex: Option<unsafe extern "C" fn(*mut ibv_pd, *mut ibv_mr_init_attr) -> *mut ibv_mr>,
    pub dealloc_dmah: unused_op,
    pub alloc_dmah: unused_op,
    pub query_port: Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int>,
    pub advise_mr: Option<unsafe extern "C" fn(*mut ibv_pd, c_uint, u32, *mut ibv_sge, u32) -> c_int>,
    pub alloc_null_mr: Option<unsafe extern "C" fn(*mut ibv_pd) -> *mut ibv_mr>,
    pub read_counters: unused_op,
    pub attach_counters_point_flow: unused_op,
    pub create_counters: unused_op,
    pub destroy_counters: unused_op,
    pub reg_dm_mr: Option<unsafe extern "C" fn(*mut ibv_pd, *mut ibv_dm, u64, usize, c_uint) -> *mut ibv_mr>,
    pub alloc_dm: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_alloc_dm_attr) -> *mut ibv_dm>,
    pub free_dm: Option<unsafe extern "C" fn(*mut ibv_dm) -> c_int>,
    pub modify_flow_action_esp: unused_op,
    pub destroy_flow_action: unused_op,
    pub create_flow_action_esp: unused_op,
    pub modify_qp_rate_limit: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_rate_limit_attr) -> c_int>,
    pub alloc_parent_domain:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd>,
    pub dealloc_td: Option<unsafe extern "C" fn(*mut ibv_td) -> c_int>,
    pub alloc_td: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td>,
    pub modify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int>,
    pub post_srq_ops: unused_op,
    pub destroy_rwq_ind_table: unused_op,
    pub create_rwq_ind_table: unused_op,
    pub destroy_wq: unused_op,
    pub modify_wq: unused_op,
    pub create_wq: unused_op,
    pub query_rt_values: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_values_ex) -> c_int>,
    pub create_cq_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex>,
    /// rdma-core's own state; ours is null.
    pub private: *mut c_void,
    pub query_device_ex: Option<
        unsafe extern "C" fn(
            *mut ibv_context,
            *const ibv_query_device_ex_input,
            *mut ibv_device_attr_ex,
            usize,
        ) -> c_int,
    >,
    pub ibv_destroy_flow: unused_op,
    pub _abi_placeholder2: unused_op,
    pub ibv_create_flow: unused_op,
    pub _abi_placeholder1: unused_op,
    pub open_qp: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_open_attr) -> *mut ibv_qp>,
    pub create_qp_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp>,
    pub get_srq_num: Option<unsafe extern "C" fn(*mut ibv_srq, *mut u32) -> c_int>,
    pub create_srq_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq>,
    pub open_xrcd: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd>,
    pub close_xrcd: Option<unsafe extern "C" fn(*mut ibv_xrcd) -> c_int>,
    pub _abi_placeholder3: u64,
    /// Bytes of this struct, the context included.
    pub sz: usize,
    pub context: ibv_context,
}
