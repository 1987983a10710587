//! Addresses, service identifiers, and the numbers that Linux gives them.
use freeflow_protocol::cm::PortSpace;
use freeflow_verbs::{Gid, QpType, VerbsError};

/// `RDMA_UDP_QKEY`: of datagram services and multicast groups that name none.
pub(crate) const QKEY_DEFAULT: u32 = 0x0123_4567;
/// `enum rdma_port_space`, as it stands in a service id.
const PORT_SPACES: [(PortSpace, u16); 4] =
    [(PortSpace::Ipoib, 0x0002), (PortSpace::Tcp, 0x0106), (PortSpace::Udp, 0x0111), (PortSpace::Ib, 0x013f)];

pub(crate) fn service_id(port_space: PortSpace, port: u16) -> u64 {
    let number = PORT_SPACES.into_iter().find(|(other, _)| *other == port_space).map(|(_, number)| number);
    u64::from(number.expect("every port space has a number")) << 16 | u64::from(port)
}

/// `None`: not a service of rdma_cm.
pub(crate) fn service_of(service_id: u64) -> Option<(PortSpace, u16)> {
    let number = u16::try_from(service_id >> 16).ok()?;
    let (port_space, _) = PORT_SPACES.into_iter().find(|(_, other)| *other == number)?;
    Some((port_space, service_id as u16))
}

pub(crate) fn is_ipv4(gid: Gid) -> bool {
    gid.to_ipv4().is_some()
}

pub(crate) fn is_wildcard(gid: Gid) -> bool {
    gid.is_zero() || gid.to_ipv4().is_some_and(|v4| v4.is_unspecified())
}

pub(crate) fn is_loopback(gid: Gid) -> bool {
    gid.0 == Gid::from_ip(core::net::Ipv6Addr::LOCALHOST.into()).0 || gid.to_ipv4().is_some_and(|v4| v4.is_loopback())
}

/// The wildcard of the family that an address is of.
pub(crate) fn wildcard_like(gid: Gid) -> Gid {
    if is_ipv4(gid) { Gid::from_ip(core::net::Ipv4Addr::UNSPECIFIED.into()) } else { Gid::default() }
}

/// GUID of the adapter with this address, as far as anybody compares it: two connections are of the
/// same peer if this and the number are equal.
pub(crate) fn guid_of(gid: Gid) -> u64 {
    let [.., a, b, c, d, e, f, g, h] = gid.0;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

pub(crate) fn is_datagram(qp_type: QpType) -> bool {
    qp_type == QpType::Ud
}

/// Linux's number of an error, as events carry it.
pub(crate) fn status_of(error: VerbsError) -> i32 {
    match error {
        VerbsError::TimedOut => TIMED_OUT,
        VerbsError::NotPermitted => -1,
        VerbsError::NoMemory => -12,
        VerbsError::InvalidArgument => INVALID,
        VerbsError::AddressNotAvailable => -99,
        _ => HOST_UNREACHABLE,
    }
}

pub(crate) const INVALID: i32 = -22;
pub(crate) const TIMED_OUT: i32 = -110;
const HOST_UNREACHABLE: i32 = -113;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_ids_are_linuxs() {
        assert_eq!(service_id(PortSpace::Tcp, 7174), 0x0000_0000_0106_1c06);
        assert_eq!(service_id(PortSpace::Udp, 7174), 0x0000_0000_0111_1c06);
        for (port_space, _) in PORT_SPACES {
            assert_eq!(service_of(service_id(port_space, 0xfffe)), Some((port_space, 0xfffe)));
        }
        for other in [0, 7174, 1 << 32 | 0x0106_0001, 0x1000_0000_0106_0001, u64::MAX] {
            assert_eq!(service_of(other), None);
        }
    }
}
