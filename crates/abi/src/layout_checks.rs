//! Sizes and offsets that compiled programs rely on, checked when this crate is built (x86-64).
use crate::*;
use core::mem::{align_of, offset_of, size_of};

macro_rules! size {
    ($($name:ty = $bytes:literal),* $(,)?) => { $(const _: () = assert!(size_of::<$name>() == $bytes);)* };
}

macro_rules! offset {
    ($($name:ident.$($field:ident).+ = $bytes:literal),* $(,)?) => {
        $(const _: () = assert!(offset_of!($name, $($field).+) == $bytes);)*
    };
}

size! {
    ibv_device = 664, verbs_device = 712, ibv_context_ops = 256, ibv_context = 328, verbs_context = 696,
    ibv_qp = 160, ibv_qp_ex = 360, ibv_cq = 128, ibv_cq_ex = 288, ibv_srq = 128, ibv_wq = 152,
    ibv_mr = 48, ibv_pd = 16, ibv_ah = 24, ibv_mw = 32, ibv_comp_channel = 16,
    ibv_td = 8, ibv_xrcd = 8, ibv_td_init_attr = 4, ibv_parent_domain_init_attr = 48, ibv_alloc_dm_attr = 16,
    ibv_wc = 48, ibv_send_wr = 128, ibv_recv_wr = 32, ibv_sge = 16, ibv_data_buf = 16,
    ibv_qp_attr = 144, ibv_qp_init_attr = 64, ibv_qp_init_attr_ex = 136, ibv_cq_init_attr_ex = 56,
    ibv_device_attr = 232, ibv_device_attr_ex = 400, ibv_port_attr = 56, ibv_async_event = 16, ibv_gid_entry = 32,
    ibv_gid = 16, ibv_grh = 40, ibv_global_route = 24, ibv_ah_attr = 32, ibv_srq_attr = 12, ibv_srq_init_attr = 24,
    ibv_srq_init_attr_ex = 64, ibv_qp_cap = 20, ibv_ece = 12, ibv_mw_bind = 48, ibv_mw_bind_info = 32, ibv_dm = 32,
    ib_uverbs_ah_attr = 32, ib_uverbs_qp_attr = 144, ib_user_path_rec = 64, ibv_sa_path_rec = 64,
    rdma_ib_addr = 40, rdma_addr = 296, rdma_route = 312, rdma_event_channel = 4, rdma_cm_id = 416,
    rdma_conn_param = 24, rdma_ud_param = 56, rdma_cm_event = 80, rdma_addrinfo = 96, rdma_cm_join_mc_attr_ex = 16,
    sockaddr_ib = 48, ibv_path_record = 64, ibv_path_data = 72,
}

offset! {
    ibv_device.node_type = 16, ibv_device.transport_type = 20, ibv_device.name = 24, ibv_device.dev_name = 88,
    ibv_device.dev_path = 152, ibv_device.ibdev_path = 408, verbs_device.ops = 664,
    ibv_context.ops = 8, ibv_context.ops.alloc_mw = 64, ibv_context.ops.bind_mw = 72,
    ibv_context.ops.dealloc_mw = 80, ibv_context.ops.poll_cq = 96, ibv_context.ops.req_notify_cq = 104,
    ibv_context.ops.post_srq_recv = 168, ibv_context.ops.post_send = 208, ibv_context.ops.post_recv = 216,
    ibv_context.cmd_fd = 264, ibv_context.async_fd = 268, ibv_context.num_comp_vectors = 272,
    ibv_context.mutex = 280, ibv_context.abi_compat = 320,
    ibv_qp.qp_num = 52, ibv_qp.state = 56, ibv_qp.qp_type = 60, ibv_qp.mutex = 64, ibv_qp.cond = 104,
    ibv_qp_ex.comp_mask = 160, ibv_qp_ex.wr_id = 168, ibv_qp_ex.wr_flags = 176, ibv_qp_ex.wr_atomic_cmp_swp = 184,
    ibv_qp_ex.wr_start = 320, ibv_qp_ex.wr_flush = 352,
    ibv_cq.cqe = 28, ibv_cq.mutex = 32, ibv_cq.comp_events_completed = 120,
    ibv_cq_ex.status = 132, ibv_cq_ex.wr_id = 136, ibv_cq_ex.start_poll = 144,
    ibv_mr.lkey = 36, ibv_mr.rkey = 40, ibv_mw.rkey = 16, ibv_mw.mw_type = 24,
    ibv_dm.memcpy_to_dm = 8, ibv_dm.memcpy_from_dm = 16, ibv_dm.handle = 28,
    ibv_port_attr.link_layer = 46, ibv_port_attr.port_cap_flags2 = 48, ibv_port_attr.active_speed_ex = 52,
    ibv_send_wr.wr = 40, ibv_send_wr.xrc_remote_srqn = 72, ibv_send_wr.tail = 80,
    rdma_addr.dst = 128, rdma_addr.ibaddr = 256, rdma_route.path_rec = 296, rdma_route.num_paths = 304,
    rdma_cm_id.channel = 8, rdma_cm_id.context = 16, rdma_cm_id.qp = 24, rdma_cm_id.route = 32, rdma_cm_id.ps = 344,
    rdma_cm_id.port_num = 348, rdma_cm_id.event = 352, rdma_cm_id.send_cq_channel = 360, rdma_cm_id.send_cq = 368,
    rdma_cm_id.recv_cq_channel = 376, rdma_cm_id.recv_cq = 384, rdma_cm_id.srq = 392, rdma_cm_id.pd = 400,
    rdma_cm_id.qp_type = 408,
    rdma_conn_param.private_data_len = 8, rdma_conn_param.srq = 14, rdma_conn_param.qp_num = 16,
    rdma_ud_param.ah_attr = 16, rdma_ud_param.qp_num = 48, rdma_ud_param.qkey = 52,
    rdma_cm_event.listen_id = 8, rdma_cm_event.event = 16, rdma_cm_event.status = 20, rdma_cm_event.param = 24,
    rdma_addrinfo.ai_src_len = 16, rdma_addrinfo.ai_src_addr = 24, rdma_addrinfo.ai_src_canonname = 40,
    rdma_addrinfo.ai_route_len = 56, rdma_addrinfo.ai_connect = 80, rdma_addrinfo.ai_next = 88,
    sockaddr_ib.sib_addr = 8, sockaddr_ib.sib_sid = 24, ibv_path_data.path = 8,
    ibv_path_record.dgid = 8, ibv_path_record.flowlabel_hoplimit = 44, ibv_path_record.pkey = 50,
}

/// Distances from the context, by which the header finds the entries of a `verbs_context`.
const CONTEXT: usize = offset_of!(verbs_context, context);
macro_rules! distance {
    ($($field:ident = $bytes:literal),* $(,)?) => {
        $(const _: () = assert!(CONTEXT - offset_of!(verbs_context, $field) == $bytes);)*
    };
}
distance! {
    sz = 8, close_xrcd = 24, open_xrcd = 32, create_srq_ex = 40, get_srq_num = 48, create_qp_ex = 56, open_qp = 64,
    query_device_ex = 104, private = 112, create_cq_ex = 120, query_port = 320,
}

// The vocabulary's SGE is copied to and from C's without a conversion of its fields.
const _: () = assert!(size_of::<freeflow_verbs::Sge>() == size_of::<ibv_sge>());
const _: () = assert!(align_of::<freeflow_verbs::Sge>() == align_of::<ibv_sge>());
const _: () = assert!(offset_of!(freeflow_verbs::Sge, length) == offset_of!(ibv_sge, length));
const _: () = assert!(offset_of!(freeflow_verbs::Sge, lkey) == offset_of!(ibv_sge, lkey));
