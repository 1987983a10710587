//! How long packets may be on the way from one host to another, as the kernel's routes say.
use crate::sys;
use freeflow_wire::sealed::SEAL_BYTES;
use freeflow_wire::{UDP_PORT, frame};
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsFd;

/// Bytes of a path's MTU beyond the payload: IP, UDP, headers, ICRC, with some to spare, as rxe
/// reckons.
const MTU_HEADROOM_BYTES: u32 = 80;
/// The same of sealed packets, and none to spare: IPv4 and UDP headers, BTH, XRCETH, RETH and ImmDt, ICRC.
const SEALED_HEADROOM_V4_BYTES: u32 = 20 + 8 + 12 + 4 + 16 + 4 + 4 + SEAL_BYTES as u32;
const MTU_BYTES: [u16; 5] = [4096, 2048, 1024, 512, 256];

/// The largest payload of a packet that gets from one address to another whole, as the kernel's routes say now.
///
/// # Errors
/// No such address here, or no route.
pub fn path_mtu(local: IpAddr, remote: IpAddr, sealed: bool) -> io::Result<u16> {
    Ok(packet_payload(link_mtu(local, remote)?, local.is_ipv4(), sealed))
}

/// Payload of a whole packet of the standard on a link that carries IP packets of so many bytes.
pub(crate) fn packet_payload(link_mtu: u32, is_v4: bool, sealed: bool) -> u16 {
    let headroom = match (sealed, is_v4) {
        (false, _) => MTU_HEADROOM_BYTES,
        (true, true) => SEALED_HEADROOM_V4_BYTES,
        (true, false) => SEALED_HEADROOM_V4_BYTES + 20,
    };
    let fits = |mtu: &u16| u32::from(*mtu) + headroom <= link_mtu;
    MTU_BYTES.into_iter().find(fits).unwrap_or(256)
}

/// Payload of a whole frame from one address to another, as the kernel's routes say now; `None`: too little.
///
/// # Errors
/// No such address here, or no route.
pub fn frame_payload(local: IpAddr, remote: IpAddr, sealed: bool) -> io::Result<Option<u16>> {
    Ok(frame_payload_on(link_mtu(local, remote)?, local.is_ipv4(), sealed))
}

/// The same on a link that carries IP packets of so many bytes.
pub(crate) fn frame_payload_on(link_mtu: u32, is_v4: bool, sealed: bool) -> Option<u16> {
    let seal_bytes = if sealed { SEAL_BYTES as u32 } else { 0 };
    frame::payload_bytes(link_mtu.saturating_sub(seal_bytes), is_v4)
}

/// Bytes of the longest IP packet that the route takes.
pub(crate) fn link_mtu(local: IpAddr, remote: IpAddr) -> io::Result<u32> {
    let probe = UdpSocket::bind((local, 0))?;
    forbid_fragments(&probe, local)?;
    probe.connect((remote, UDP_PORT))?;
    let bytes = if local.is_ipv4() {
        sys::option(probe.as_fd(), libc::IPPROTO_IP, libc::IP_MTU)?
    } else {
        sys::option(probe.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_MTU)?
    };
    Ok(u32::try_from(bytes).unwrap_or(0))
}

pub(crate) fn forbid_fragments(socket: &UdpSocket, address: IpAddr) -> io::Result<()> {
    if address.is_ipv4() {
        sys::set_option(socket.as_fd(), libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)
    } else {
        sys::set_option(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seal_takes_its_bytes_of_the_payload() {
        assert_eq!([false, true].map(|sealed| packet_payload(4200, true, sealed)), [4096, 4096]);
        assert_eq!([false, true].map(|sealed| packet_payload(4187, true, sealed)), [4096, 2048]);
        assert_eq!([false, true].map(|sealed| packet_payload(4200, false, sealed)), [4096, 2048]);
        assert_eq!([false, true].map(|sealed| packet_payload(1500, true, sealed)), [1024, 1024]);
        assert_eq!([false, true].map(|sealed| frame_payload_on(4200, true, sealed)), [Some(4096), Some(4096)]);
        assert_eq!([false, true].map(|sealed| frame_payload_on(1500, true, sealed)), [Some(1408), Some(1344)]);
        assert_eq!(frame_payload_on(20, true, true), None);
    }
}
