//! Kinds of events: their names, and the router's in C's numbers.
use freeflow_abi::*;
use freeflow_protocol::cm::CmEventKind;
use std::ffi::{CStr, c_char, c_uint};

/// `enum rdma_cm_event_type`.
pub(crate) fn to_c(kind: CmEventKind) -> c_uint {
    match kind {
        CmEventKind::AddressResolved => RDMA_CM_EVENT_ADDR_RESOLVED,
        CmEventKind::AddressError => RDMA_CM_EVENT_ADDR_ERROR,
        CmEventKind::RouteResolved => RDMA_CM_EVENT_ROUTE_RESOLVED,
        CmEventKind::RouteError => RDMA_CM_EVENT_ROUTE_ERROR,
        CmEventKind::ConnectRequest => RDMA_CM_EVENT_CONNECT_REQUEST,
        CmEventKind::ConnectResponse => RDMA_CM_EVENT_CONNECT_RESPONSE,
        CmEventKind::ConnectError => RDMA_CM_EVENT_CONNECT_ERROR,
        CmEventKind::Unreachable => RDMA_CM_EVENT_UNREACHABLE,
        CmEventKind::Rejected => RDMA_CM_EVENT_REJECTED,
        CmEventKind::Established => RDMA_CM_EVENT_ESTABLISHED,
        CmEventKind::Disconnected => RDMA_CM_EVENT_DISCONNECTED,
        CmEventKind::DeviceRemoval => RDMA_CM_EVENT_DEVICE_REMOVAL,
        CmEventKind::MulticastJoin => RDMA_CM_EVENT_MULTICAST_JOIN,
        CmEventKind::MulticastError => RDMA_CM_EVENT_MULTICAST_ERROR,
        CmEventKind::AddressChange => RDMA_CM_EVENT_ADDR_CHANGE,
        CmEventKind::TimewaitExit => RDMA_CM_EVENT_TIMEWAIT_EXIT,
    }
}

const NAMES: [&CStr; 18] = [
    c"RDMA_CM_EVENT_ADDR_RESOLVED",
    c"RDMA_CM_EVENT_ADDR_ERROR",
    c"RDMA_CM_EVENT_ROUTE_RESOLVED",
    c"RDMA_CM_EVENT_ROUTE_ERROR",
    c"RDMA_CM_EVENT_CONNECT_REQUEST",
    c"RDMA_CM_EVENT_CONNECT_RESPONSE",
    c"RDMA_CM_EVENT_CONNECT_ERROR",
    c"RDMA_CM_EVENT_UNREACHABLE",
    c"RDMA_CM_EVENT_REJECTED",
    c"RDMA_CM_EVENT_ESTABLISHED",
    c"RDMA_CM_EVENT_DISCONNECTED",
    c"RDMA_CM_EVENT_DEVICE_REMOVAL",
    c"RDMA_CM_EVENT_MULTICAST_JOIN",
    c"RDMA_CM_EVENT_MULTICAST_ERROR",
    c"RDMA_CM_EVENT_ADDR_CHANGE",
    c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
    c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
    c"RDMA_CM_EVENT_ADDRINFO_ERROR",
];

/// `rdma_event_str(3)`: rdma-core's own strings, also for what is no event.
#[unsafe(no_mangle)]
pub extern "C" fn rdma_event_str(event: c_uint) -> *const c_char {
    NAMES.get(event as usize).map_or(c"UNKNOWN EVENT", |name| name).as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_at_their_numbers() {
        let name = |event| {
            // SAFETY: a constant string.
            unsafe { CStr::from_ptr(rdma_event_str(event)) }
        };
        assert_eq!(name(to_c(CmEventKind::AddressResolved)), c"RDMA_CM_EVENT_ADDR_RESOLVED");
        assert_eq!(name(to_c(CmEventKind::TimewaitExit)), c"RDMA_CM_EVENT_TIMEWAIT_EXIT");
        assert_eq!(name(RDMA_CM_EVENT_ADDRINFO_ERROR), c"RDMA_CM_EVENT_ADDRINFO_ERROR");
        assert_eq!(name(RDMA_CM_EVENT_USER), c"UNKNOWN EVENT");
    }
}
