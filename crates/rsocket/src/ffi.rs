//! The functions of `librdmacm.so.1` and `libibverbs.so.1` that rsockets use, as C declares them.
//! Nothing else of either library is used: rsockets are a program like any other to them.
use freeflow_abi::{
    ibv_ah, ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_device_attr, ibv_gid, ibv_mr, ibv_pd,
    ibv_qp_init_attr, rdma_cm_event, rdma_cm_id, rdma_conn_param, rdma_event_channel,
};
use libc::{c_int, c_uint, c_void, sockaddr};

unsafe extern "C" {
    pub fn rdma_create_event_channel() -> *mut rdma_event_channel;
    pub fn rdma_destroy_event_channel(channel: *mut rdma_event_channel);
    pub fn rdma_create_id(
        channel: *mut rdma_event_channel,
        id: *mut *mut rdma_cm_id,
        context: *mut c_void,
        port_space: c_uint,
    ) -> c_int;
    pub fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int;
    pub fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int;
    pub fn rdma_bind_addr(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int;
    pub fn rdma_resolve_addr(
        id: *mut rdma_cm_id,
        source: *mut sockaddr,
        destination: *mut sockaddr,
        timeout_ms: c_int,
    ) -> c_int;
    pub fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int;
    pub fn rdma_create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, attributes: *mut ibv_qp_init_attr) -> c_int;
    pub fn rdma_destroy_qp(id: *mut rdma_cm_id);
    pub fn rdma_connect(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int;
    pub fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int;
    pub fn rdma_accept(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int;
    pub fn rdma_reject(id: *mut rdma_cm_id, private_data: *const c_void, bytes: u8) -> c_int;
    pub fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int;
    pub fn rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int;
    pub fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int;
    pub fn rdma_set_option(id: *mut rdma_cm_id, level: c_int, name: c_int, value: *mut c_void, bytes: usize) -> c_int;

    pub fn ibv_query_device(context: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int;
    pub fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
    pub fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    pub fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    pub fn ibv_create_cq(
        context: *mut ibv_context,
        entries: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> *mut ibv_cq;
    pub fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    pub fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        cq_context: *mut *mut c_void,
    ) -> c_int;
    pub fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
    pub fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint);
    pub fn ibv_reg_mr(pd: *mut ibv_pd, address: *mut c_void, bytes: usize, access: c_int) -> *mut ibv_mr;
    pub fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
    pub fn ibv_create_ah(pd: *mut ibv_pd, attributes: *mut ibv_ah_attr) -> *mut ibv_ah;
    pub fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int;
}

/// PTHREAD_CANCEL_DISABLE.
const CANCEL_DISABLE: c_int = 1;

/// Runs `body`, in which there are cancellation points, where none may be: locks are held, and
/// frames must not unwind.
pub fn uncancelled<T>(body: impl FnOnce() -> T) -> T {
    let mut before = 0;
    // SAFETY: the state of this thread, and room for the one before.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &raw mut before) };
    let value = body();
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(before, std::ptr::null_mut()) };
    value
}

/// An errno.
pub type Errno = c_int;
pub type Outcome<T> = Result<T, Errno>;

pub fn errno() -> Errno {
    // SAFETY: glibc gives the address of this thread's errno.
    unsafe { *libc::__errno_location() }
}

pub fn set_errno(number: Errno) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = number };
}

/// Result of a C function that gives 0, or -1 and errno.
pub fn checked(answer: c_int) -> Outcome<c_int> {
    if answer < 0 { Err(errno()) } else { Ok(answer) }
}

/// Result of a C function that gives a pointer, or null and errno.
pub fn not_null<T>(pointer: *mut T) -> Outcome<*mut T> {
    if pointer.is_null() { Err(errno()) } else { Ok(pointer) }
}
