//! `librdmacm.so.1`, whichever one the dynamic linker finds here, and its functions.
use crate::verbs::library::{open, required};
use freeflow_abi::*;
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};

type Id = *mut rdma_cm_id;

/// A library's error text, as an error of the end.
pub fn failed(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}

pub struct Library {
    pub create_event_channel: unsafe extern "C" fn() -> *mut rdma_event_channel,
    pub create_id: unsafe extern "C" fn(*mut rdma_event_channel, *mut Id, *mut c_void, c_uint) -> c_int,
    pub destroy_id: unsafe extern "C" fn(Id) -> c_int,
    pub bind_addr: unsafe extern "C" fn(Id, *const libc::sockaddr_in) -> c_int,
    pub listen: unsafe extern "C" fn(Id, c_int) -> c_int,
    pub resolve_addr: unsafe extern "C" fn(Id, *const libc::sockaddr_in, *const libc::sockaddr_in, c_int) -> c_int,
    pub resolve_route: unsafe extern "C" fn(Id, c_int) -> c_int,
    pub create_qp: unsafe extern "C" fn(Id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int,
    pub destroy_qp: unsafe extern "C" fn(Id),
    pub connect: unsafe extern "C" fn(Id, *mut rdma_conn_param) -> c_int,
    pub accept: unsafe extern "C" fn(Id, *mut rdma_conn_param) -> c_int,
    pub disconnect: unsafe extern "C" fn(Id) -> c_int,
    pub get_cm_event: unsafe extern "C" fn(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int,
    pub ack_cm_event: unsafe extern "C" fn(*mut rdma_cm_event) -> c_int,
    pub socket: unsafe extern "C" fn(c_int, c_int, c_int) -> c_int,
    pub bind: unsafe extern "C" fn(c_int, *const libc::sockaddr_in, u32) -> c_int,
    pub listen_socket: unsafe extern "C" fn(c_int, c_int) -> c_int,
    pub accept_socket: unsafe extern "C" fn(c_int, *mut c_void, *mut u32) -> c_int,
    pub connect_socket: unsafe extern "C" fn(c_int, *const libc::sockaddr_in, u32) -> c_int,
    pub send: unsafe extern "C" fn(c_int, *const c_void, usize, c_int) -> isize,
    pub receive: unsafe extern "C" fn(c_int, *mut c_void, usize, c_int) -> isize,
    pub close: unsafe extern "C" fn(c_int) -> c_int,
}

impl Library {
    pub fn load() -> Result<Self, String> {
        let handle = open(c"librdmacm.so.1")?;
        // SAFETY: each field's type is the signature that the public headers give the function of that name; `bind` and
        // its like take a `struct sockaddr *`, which a `sockaddr_in` begins like.
        unsafe {
            Ok(Self {
                create_event_channel: required(handle, c"rdma_create_event_channel")?,
                create_id: required(handle, c"rdma_create_id")?,
                destroy_id: required(handle, c"rdma_destroy_id")?,
                bind_addr: required(handle, c"rdma_bind_addr")?,
                listen: required(handle, c"rdma_listen")?,
                resolve_addr: required(handle, c"rdma_resolve_addr")?,
                resolve_route: required(handle, c"rdma_resolve_route")?,
                create_qp: required(handle, c"rdma_create_qp")?,
                destroy_qp: required(handle, c"rdma_destroy_qp")?,
                connect: required(handle, c"rdma_connect")?,
                accept: required(handle, c"rdma_accept")?,
                disconnect: required(handle, c"rdma_disconnect")?,
                get_cm_event: required(handle, c"rdma_get_cm_event")?,
                ack_cm_event: required(handle, c"rdma_ack_cm_event")?,
                socket: required(handle, c"rsocket")?,
                bind: required(handle, c"rbind")?,
                listen_socket: required(handle, c"rlisten")?,
                accept_socket: required(handle, c"raccept")?,
                connect_socket: required(handle, c"rconnect")?,
                send: required(handle, c"rsend")?,
                receive: required(handle, c"rrecv")?,
                close: required(handle, c"rclose")?,
            })
        }
    }
}

pub fn address(at: SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: at.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*at.ip()).to_be() },
        sin_zero: [0; 8],
    }
}

pub fn anywhere(port: u16) -> libc::sockaddr_in {
    address(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port))
}
