//! One identifier of the connection manager with an event channel of its own, whose descriptor is
//! the rsocket's number. Never blocks: `next_event` says what has happened, and whoever waits polls
//! the descriptor.
use crate::address::Address;
use crate::ffi::{
    Errno, Outcome, checked, errno, not_null, rdma_accept, rdma_ack_cm_event, rdma_bind_addr, rdma_connect,
    rdma_create_event_channel, rdma_create_id, rdma_destroy_event_channel, rdma_destroy_id, rdma_disconnect,
    rdma_get_cm_event, rdma_listen, rdma_migrate_id, rdma_reject, rdma_resolve_addr, rdma_resolve_route,
    rdma_set_option, uncancelled,
};
use crate::wire::CONNECTION_DATA_BYTES;
use freeflow_abi::{
    RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_REJECTED, rdma_cm_event, rdma_cm_id, rdma_conn_param,
    rdma_event_channel,
};
use libc::{c_int, c_uint, c_void};
use std::{ptr, slice};

/// Both retry counts: as often as there is, and for ever while the other end only lacks receive
/// requests.
const RETRY_COUNT: u8 = 7;

#[derive(Debug)]
pub struct CmId {
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
}

// SAFETY: the functions of the connection manager may be called from any thread; who uses an
// identifier while another thread destroys it is kept out by ownership.
unsafe impl Send for CmId {}
// SAFETY: as above.
unsafe impl Sync for CmId {}

/// A connection request that nobody has answered.
#[derive(Debug)]
pub struct Request {
    pub id: CmId,
    pub parameters: rdma_conn_param,
}

// SAFETY: the parameters' pointer to private data is cleared; the rest is as for `CmId`.
unsafe impl Send for Request {}

#[derive(Debug)]
pub struct CmEvent {
    pub kind: c_uint,
    pub status: c_int,
    pub private_data: Vec<u8>,
    /// Of a connection request.
    pub request: Option<Request>,
}

impl CmEvent {
    /// The errno of an event that is a failure.
    #[must_use]
    pub fn error(&self) -> Errno {
        match (self.kind, self.status) {
            (RDMA_CM_EVENT_REJECTED, _) => libc::ECONNREFUSED,
            (_, 0) => libc::ECONNABORTED,
            (_, status) if status < 0 => -status,
            _ => libc::ECONNREFUSED,
        }
    }
}

fn create_channel() -> Outcome<*mut rdma_event_channel> {
    // SAFETY: no arguments; a channel that is not null has a descriptor.
    unsafe {
        let channel = not_null(rdma_create_event_channel())?;
        let flags = libc::fcntl((*channel).fd, libc::F_GETFL);
        libc::fcntl((*channel).fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
        Ok(channel)
    }
}

impl CmId {
    /// # Errors
    /// Those of `rdma_create_event_channel` and `rdma_create_id`.
    pub fn create(port_space: c_uint) -> Outcome<Self> {
        let channel = create_channel()?;
        let mut id = ptr::null_mut();
        // SAFETY: the channel exists.
        let outcome = checked(unsafe { rdma_create_id(channel, &raw mut id, ptr::null_mut(), port_space) });
        if let Err(error) = outcome {
            // SAFETY: nothing uses it.
            unsafe { rdma_destroy_event_channel(channel) };
            return Err(error);
        }
        Ok(Self { id, channel })
    }

    /// Gives an identifier that came with a request a channel of its own.
    ///
    /// # Safety
    /// `id` exists and is nobody else's.
    unsafe fn adopt(id: *mut rdma_cm_id) -> Outcome<Self> {
        // SAFETY: this function's contract.
        unsafe {
            let channel = match create_channel() {
                Ok(channel) => channel,
                Err(error) => {
                    rdma_destroy_id(id);
                    return Err(error);
                }
            };
            if let Err(error) = checked(rdma_migrate_id(id, channel)) {
                rdma_destroy_id(id);
                rdma_destroy_event_channel(channel);
                return Err(error);
            }
            Ok(Self { id, channel })
        }
    }

    #[must_use]
    pub fn fd(&self) -> c_int {
        // SAFETY: the channel lives as long as this.
        unsafe { (*self.channel).fd }
    }

    #[must_use]
    pub fn raw(&self) -> *mut rdma_cm_id {
        self.id
    }

    /// # Errors
    /// Those of `rdma_bind_addr`.
    pub fn bind(&self, mut address: Address) -> Outcome<()> {
        // SAFETY: the identifier exists; the address is whole.
        checked(unsafe { rdma_bind_addr(self.id, address.pointer()) }).map(drop)
    }

    /// # Errors
    /// Those of `rdma_listen`.
    pub fn listen(&self, backlog: c_int) -> Outcome<()> {
        // SAFETY: the identifier exists.
        checked(unsafe { rdma_listen(self.id, backlog) }).map(drop)
    }

    /// # Errors
    /// Those of `rdma_resolve_addr`.
    pub fn resolve_address(&self, source: Option<Address>, mut to: Address, timeout_ms: c_int) -> Outcome<()> {
        let mut source = source;
        let from = source.as_mut().map_or(ptr::null_mut(), Address::pointer);
        // SAFETY: the identifier exists; the addresses are whole.
        checked(unsafe { rdma_resolve_addr(self.id, from, to.pointer(), timeout_ms) }).map(drop)
    }

    /// # Errors
    /// Those of `rdma_resolve_route`.
    pub fn resolve_route(&self, timeout_ms: c_int) -> Outcome<()> {
        // SAFETY: the identifier exists.
        checked(unsafe { rdma_resolve_route(self.id, timeout_ms) }).map(drop)
    }

    /// # Errors
    /// Those of `rdma_connect`.
    pub fn connect(&self, data: &[u8; CONNECTION_DATA_BYTES]) -> Outcome<()> {
        let mut parameters = rdma_conn_param {
            private_data: data.as_ptr().cast(),
            private_data_len: CONNECTION_DATA_BYTES as u8,
            responder_resources: 0,
            initiator_depth: 0,
            flow_control: 1,
            retry_count: RETRY_COUNT,
            rnr_retry_count: RETRY_COUNT,
            srq: 0,
            qp_num: 0,
        };
        // SAFETY: the identifier exists; the parameters' pointer is valid during the call.
        checked(unsafe { rdma_connect(self.id, &raw mut parameters) }).map(drop)
    }

    /// Answers the request whose parameters these are.
    ///
    /// # Errors
    /// Those of `rdma_accept`.
    pub fn accept(&self, request: &rdma_conn_param, data: &[u8; CONNECTION_DATA_BYTES]) -> Outcome<()> {
        let mut parameters = rdma_conn_param {
            private_data: data.as_ptr().cast(),
            private_data_len: CONNECTION_DATA_BYTES as u8,
            rnr_retry_count: RETRY_COUNT,
            srq: 0,
            qp_num: 0,
            ..*request
        };
        // SAFETY: as above.
        checked(unsafe { rdma_accept(self.id, &raw mut parameters) }).map(drop)
    }

    pub fn reject(&self) {
        // SAFETY: the identifier exists.
        unsafe { rdma_reject(self.id, ptr::null(), 0) };
    }

    pub fn disconnect(&self) {
        // SAFETY: the identifier exists.
        unsafe { rdma_disconnect(self.id) };
    }

    /// # Errors
    /// Those of `rdma_set_option`.
    pub fn set_option(&self, level: c_int, name: c_int, value: &[u8]) -> Outcome<()> {
        let pointer = value.as_ptr().cast_mut().cast::<c_void>();
        // SAFETY: the identifier exists; the value is read only.
        checked(unsafe { rdma_set_option(self.id, level, name, pointer, value.len()) }).map(drop)
    }

    #[must_use]
    pub fn local_address(&self) -> Address {
        // SAFETY: the identifier exists, and its addresses are storages.
        unsafe { self.address(&raw const (*self.id).route.addr.src) }
    }

    #[must_use]
    pub fn peer_address(&self) -> Address {
        // SAFETY: as above.
        unsafe { self.address(&raw const (*self.id).route.addr.dst) }
    }

    /// # Safety
    /// `address` is one of the identifier's.
    unsafe fn address<T>(&self, address: *const T) -> Address {
        // SAFETY: this function's contract; both are unions with a `sockaddr_storage`.
        let found = unsafe { Address::from_c(address.cast(), size_of::<libc::sockaddr_storage>() as u32) };
        found.unwrap_or_else(|| Address::unspecified(0))
    }

    /// The next event, if there is one; it is acknowledged already.
    ///
    /// # Errors
    /// Those of `rdma_get_cm_event`; the connection manager is gone.
    pub fn next_event(&self) -> Outcome<Option<CmEvent>> {
        let mut event: *mut rdma_cm_event = ptr::null_mut();
        // SAFETY: the channel exists, and does not block.
        if uncancelled(|| unsafe { rdma_get_cm_event(self.channel, &raw mut event) }) != 0 {
            return match errno() {
                libc::EAGAIN | libc::EINTR => Ok(None),
                error => Err(error),
            };
        }
        // SAFETY: an event that was given is valid until it is acknowledged. Our identifiers have
        // connections, whose events have connection parameters; others have none, and their bytes
        // are not used.
        unsafe {
            let (kind, status, new_id) = ((*event).event, (*event).status, (*event).id);
            let mut parameters = (*event).param.conn;
            let private_data = match parameters.private_data_len {
                0 => Vec::new(),
                _ if parameters.private_data.is_null() => Vec::new(),
                bytes => slice::from_raw_parts(parameters.private_data.cast::<u8>(), usize::from(bytes)).to_vec(),
            };
            parameters.private_data = ptr::null();
            parameters.private_data_len = 0;
            rdma_ack_cm_event(event);
            // Without descriptors left the request goes away, and the listener stays.
            let request = (kind == RDMA_CM_EVENT_CONNECT_REQUEST)
                .then(|| Self::adopt(new_id).ok().map(|id| Request { id, parameters }))
                .flatten();
            Ok(Some(CmEvent { kind, status, private_data, request }))
        }
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: both exist, nobody else has them, and all events are acknowledged.
        unsafe {
            rdma_destroy_id(self.id);
            rdma_destroy_event_channel(self.channel);
        }
    }
}
