//! Plain IP between the two ends of a connectivity test: echoes of ICMP, and packets of the interface's full size.

use crate::failure::{Context as _, Result, fail};
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, Timeout, set_ip_mtu_discover, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto, recv, sendto, socket_with};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long an echo may take.
const ECHO_TIME: Duration = Duration::from_millis(500);
/// Headers of IPv4 and of ICMP, bytes.
const HEADER_BYTES: usize = 20;
const ICMP_BYTES: usize = 8;
const ECHO: u8 = 8;
const ECHO_REPLY: u8 = 0;
const INTERFACES: &str = "/sys/class/net";

/// Round trips that came back.
pub struct Echoes {
    pub sent: usize,
    pub times: Vec<Duration>,
}

/// MTU of the container's own interface, bytes.
pub fn mtu() -> Result<usize> {
    for entry in std::fs::read_dir(INTERFACES).context(INTERFACES)?.flatten() {
        if entry.file_name() != "lo" {
            let text = std::fs::read_to_string(entry.path().join("mtu")).context(INTERFACES)?;
            return text.trim().parse().context(INTERFACES);
        }
    }
    fail!("the container has no network interface")
}

/// The checksum of RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn request(identity: u16, sequence: u16, packet_bytes: usize) -> Vec<u8> {
    let mut message = vec![0; packet_bytes - HEADER_BYTES];
    message[0] = ECHO;
    message[4..6].copy_from_slice(&identity.to_be_bytes());
    message[6..8].copy_from_slice(&sequence.to_be_bytes());
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    message
}

/// Whether a packet is the answer to that request.
fn is_answer(packet: &[u8], identity: u16, sequence: u16) -> bool {
    let header = usize::from(packet.first().copied().unwrap_or(0) & 15) * 4;
    let Some(message) = packet.get(header..).filter(|message| message.len() >= ICMP_BYTES) else { return false };
    message[0] == ECHO_REPLY && message[4..6] == identity.to_be_bytes() && message[6..8] == sequence.to_be_bytes()
}

/// Sends so many packets of that size, which routers on the way may not split, one after the other.
pub fn echoes(to: Ipv4Addr, count: u16, packet_bytes: usize) -> Result<Echoes> {
    let socket = socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, Some(ipproto::ICMP));
    let socket = socket.context("can't open a raw socket")?;
    set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO).context("can't forbid fragments")?;
    let identity = std::process::id() as u16 ^ packet_bytes as u16;
    let mut times = Vec::new();
    for sequence in 0..count {
        let begin = Instant::now();
        let message = request(identity, sequence, packet_bytes.max(HEADER_BYTES + ICMP_BYTES));
        sendto(&socket, &message, SendFlags::empty(), &SocketAddrV4::new(to, 0)).context("can't send")?;
        if came(&socket, identity, sequence, begin + ECHO_TIME)? {
            times.push(begin.elapsed());
        }
    }
    times.sort();
    Ok(Echoes { sent: usize::from(count), times })
}

fn came(socket: &OwnedFd, identity: u16, sequence: u16, deadline: Instant) -> Result<bool> {
    let mut packet = [0u8; 128];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        set_socket_timeout(socket, Timeout::Recv, Some(left.max(Duration::from_millis(1)))).context("a raw socket")?;
        match recv(socket, &mut packet, RecvFlags::empty()) {
            Ok((length, _)) if is_answer(&packet[..length.min(128)], identity, sequence) => return Ok(true),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(false),
            Err(error) => return Err(error).context("a raw socket"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_known_by_identity_and_number() {
        let mut message = request(0x1234, 5, 28 + 3);
        assert_eq!(checksum(&message), 0, "with its checksum in place the sum is zero");
        message[0] = ECHO_REPLY;
        let packet = [&[0x45; 20][..], &message].concat();
        assert!(is_answer(&packet, 0x1234, 5));
        assert!(!is_answer(&packet, 0x1234, 6) && !is_answer(&packet, 0x1235, 5));
        assert!(!is_answer(&packet[..22], 0x1234, 5) && !is_answer(&[], 0x1234, 5));
    }
}
