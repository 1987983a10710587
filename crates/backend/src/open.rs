//! How the sockets are opened and set up.
use crate::config::{UdpConfig, check};
use crate::group::{Group, bind_alone};
use crate::lanes::lane_count;
use crate::path::forbid_fragments;
use crate::receive::{Inbox, Listener};
use crate::sys;
use crate::udp::{HOP_LIMIT, Lane, Udp};
use freeflow_verbs::Shard;
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;

/// RoCEv2 source ports: 0xc000 to 0xffff (IBTA A17.9.2, flow label to port).
const SOURCE_PORT_BASE: u16 = 0xc000;
const SOURCE_PORT_RANGE: u16 = 0x4000;
impl Udp {
    /// Opens the sockets.
    ///
    /// # Errors
    /// A configuration out of range ([`io::ErrorKind::InvalidInput`]), also one of several shards, which
    /// [`open_all`](Self::open_all) opens; whatever binding says, in particular `AddrInUse` for port 4791 and
    /// `AddrNotAvailable` for an address that this host does not have; `PermissionDenied` for a mark.
    pub fn open(config: UdpConfig) -> io::Result<Self> {
        check(&config)?;
        if config.shard.count() > 1 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the shards of a host are opened together"));
        }
        let listen = |&address: &IpAddr| prepare_listener(bind_alone(address)?, address, &config);
        let listeners = config.addresses.iter().map(listen).collect::<io::Result<_>>()?;
        Self::with_listeners(config, listeners, Vec::new())
    }

    /// Opens the sockets of each of `count` engines; those that receive share each address by a [`Group`].
    ///
    /// The engines are to close them together: what is left of a group no longer gets its own packets alone.
    ///
    /// # Errors
    /// As of [`open`](Self::open), whose `shard` is set here; also a `count` that is no number of shards
    /// (`InvalidInput`), and a kernel that refuses the program of a group.
    pub fn open_all(config: UdpConfig, count: u8) -> io::Result<Vec<Self>> {
        check(&config)?;
        let Some(first) = Shard::new(0, count) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there can't be {count} shards")));
        };
        if first == Shard::ONLY {
            return Ok(vec![Self::open(UdpConfig { shard: first, ..config })?]);
        }
        let groups = config.addresses.iter().map(|&address| Group::bind(address, count));
        let groups = groups.collect::<io::Result<Vec<_>>>()?;
        let guards: Vec<_> = groups.iter().map(|group| group.guard.clone()).collect();
        let open = |shard: Shard| {
            let config = UdpConfig { shard, ..config.clone() };
            let listen = |group: &Group| {
                let socket = group.members[usize::from(shard.index())].try_clone()?;
                prepare_listener(socket, group.address, &config)
            };
            let listeners = groups.iter().map(listen).collect::<io::Result<_>>()?;
            Self::with_listeners(config, listeners, guards.clone())
        };
        let opened = Shard::all(count).map(open).collect::<io::Result<_>>()?;
        groups.iter().try_for_each(Group::let_in)?;
        Ok(opened)
    }

    fn with_listeners(config: UdpConfig, listeners: Vec<Listener>, guards: Vec<Arc<UdpSocket>>) -> io::Result<Self> {
        let (random, mut lanes) = (sys::random()?, Vec::new());
        for &address in &config.addresses {
            let mut offset = (random % u64::from(SOURCE_PORT_RANGE)) as u16;
            for _ in 0..lane_count(config.source_port_count) {
                lanes.push(open_lane(address, &mut offset, &config)?);
            }
        }
        Ok(Self::new(config, lanes, Inbox::new(listeners), guards))
    }
}

/// Sets a buffer's size, past the system's limit where we may.
fn set_buffer(socket: &UdpSocket, forced: i32, plain: i32, bytes: u32) -> io::Result<()> {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    sys::set_option(socket.as_fd(), libc::SOL_SOCKET, forced, bytes)
        .or_else(|_| sys::set_option(socket.as_fd(), libc::SOL_SOCKET, plain, bytes))
}

/// Sets what a socket that receives needs.
fn prepare_listener(socket: UdpSocket, address: IpAddr, config: &UdpConfig) -> io::Result<Listener> {
    socket.set_nonblocking(true)?;
    set_buffer(&socket, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, config.receive_buffer_bytes)?;
    let fd = socket.as_fd();
    sys::set_option(fd, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1)?;
    if address.is_ipv4() {
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_RECVTTL, 1)?;
    } else {
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 1)?;
        // RoCEv2 leaves the checksum zero; over IPv6 the kernel drops that unless configured otherwise (RFC
        // 6935).
        sys::set_option(fd, libc::SOL_UDP, sys::UDP_NO_CHECK6_RX, 1)?;
    }
    if config.gro {
        sys::set_option(fd, libc::SOL_UDP, libc::UDP_GRO, 1)?;
    }
    Ok(Listener::new(socket, address))
}

/// Opens a sending socket on the first free port from `offset` on, and moves that past it.
fn open_lane(address: IpAddr, offset: &mut u16, config: &UdpConfig) -> io::Result<Lane> {
    for _ in 0..SOURCE_PORT_RANGE {
        let port = SOURCE_PORT_BASE + *offset;
        *offset = (*offset + 1) % SOURCE_PORT_RANGE;
        match UdpSocket::bind((address, port)) {
            Ok(socket) => {
                prepare_lane(&socket, address, config)?;
                return Ok(Lane { socket, address, port, blocked: false });
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(io::Error::new(error.kind(), format!("UDP port {port} of {address}: {error}"))),
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        format!("no UDP port from {SOURCE_PORT_BASE} up is free at {address}"),
    ))
}

fn prepare_lane(socket: &UdpSocket, address: IpAddr, config: &UdpConfig) -> io::Result<()> {
    sys::refuse_input(socket.as_fd())?;
    socket.set_nonblocking(true)?;
    set_buffer(socket, libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, config.send_buffer_bytes)?;
    forbid_fragments(socket, address)?;
    let (fd, class) = (socket.as_fd(), i32::from(config.dscp << 2));
    if config.mark != 0 {
        sys::set_option(fd, libc::SOL_SOCKET, libc::SO_MARK, config.mark.cast_signed())?;
    }
    if address.is_ipv4() {
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_TOS, class)?;
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_TTL, i32::from(HOP_LIMIT))?;
    } else {
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, class)?;
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, i32::from(HOP_LIMIT))?;
    }
    // Without segmentation the checksum is left zero as by other RoCEv2 ends. With it the kernel wants one (interfaces
    // compute it), and GRO puts nothing together that has none. Frames have no other for their payload.
    if !config.gso && !config.frames {
        if address.is_ipv4() {
            sys::set_option(fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)?;
        } else {
            sys::set_option(fd, libc::SOL_UDP, sys::UDP_NO_CHECK6_TX, 1)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_out_of_range_are_refused() {
        let good = UdpConfig::new(vec!["127.0.0.1".parse().expect("address")]);
        for bad in [
            UdpConfig { addresses: vec![], ..good.clone() },
            UdpConfig { addresses: vec!["::".parse().expect("address")], ..good.clone() },
            UdpConfig { source_port_count: 0, ..good.clone() },
            UdpConfig { source_port_count: 257, ..good.clone() },
            UdpConfig { shard: Shard::new(0, 2).expect("two"), ..good.clone() },
            UdpConfig { dscp: 64, ..good.clone() },
        ] {
            assert_eq!(Udp::open(bad).err().map(|error| error.kind()), Some(io::ErrorKind::InvalidInput));
        }
        for count in [0, 3, 16] {
            let opened = Udp::open_all(good.clone(), count);
            assert_eq!(opened.err().map(|error| error.kind()), Some(io::ErrorKind::InvalidInput), "{count}");
        }
    }
}
