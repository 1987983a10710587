//! Sockets that share port 4791 of one address, one for each engine of a host: the kernel gives each its own packets.
//!
//! They are a group (SO_REUSEPORT) with a program that reads the engine's number from the packet: the lowest bits of a
//! destination QPN, or the byte of a [sealed](freeflow_wire::sealed) packet that names it. A packet that is too short,
//! and one for the QPNs of management, is the first engine's. Datagrams that the kernel has put together go where the
//! first of them goes; so a sender uses different source ports for different engines.
//!
//! **Nobody else joins.** A group is open to every program of the same user, which for root are also containers in the
//! host's network, and each of its members may change the program. So its address is bound by a socket that shares it
//! with nobody before; and afterwards by a *guard*, which shares it with nobody either and is the first that the kernel
//! meets when it looks for others with that address. It is connected, so that no packet is for it. In between, while
//! the members are bound, another program could slip in: then opening fails. The guard binds by SO_REUSEADDR, which its
//! group lays down with it.
use crate::sys;
use freeflow_wire::UDP_PORT;
use freeflow_wire::sealed::SEAL_TYPE;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::{fs, io};

/// Where nothing is: the port that the guard is connected to.
const DISCARD_PORT: u16 = 9;
/// Sockets of a thread's network namespace, one a line.
const SOCKET_TABLES: [&str; 2] = ["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"];

/// The sockets of one address. Until [`let_in`](Self::let_in) the kernel drops all that comes for them.
pub(crate) struct Group {
    pub address: IpAddr,
    /// In the order of the engines.
    pub members: Vec<UdpSocket>,
    pub guard: Arc<UdpSocket>,
}

/// Binds port 4791 of an address for one socket.
pub(crate) fn bind_alone(address: IpAddr) -> io::Result<UdpSocket> {
    UdpSocket::bind((address, UDP_PORT)).map_err(|error| explain(address, &error))
}

fn explain(address: IpAddr, error: &io::Error) -> io::Error {
    let hint = if error.kind() == io::ErrorKind::AddrInUse {
        " (another router runs here, or the kernel's rdma_rxe is loaded)"
    } else {
        ""
    };
    io::Error::new(error.kind(), format!("UDP port {UDP_PORT} of {address}: {error}{hint}"))
}

/// The program: gives a packet's engine of `count`.
fn program(count: u8) -> [libc::sock_filter; 11] {
    let mask = u32::from(count) - 1;
    let step = sys::instruction;
    [
        step(sys::BPF_LOAD_BYTE, 0, 0, 0),
        step(sys::BPF_JUMP_EQUAL, 6, 0, u32::from(SEAL_TYPE)),
        // Bytes 5 to 7: the destination QPN.
        step(sys::BPF_LOAD_WORD, 0, 0, 4),
        step(sys::BPF_AND, 0, 0, freeflow_wire::MASK_24),
        step(sys::BPF_JUMP_GREATER, 1, 0, 1),
        step(sys::BPF_RETURN_CONSTANT, 0, 0, 0),
        step(sys::BPF_AND, 0, 0, mask),
        step(sys::BPF_RETURN_ACCUMULATOR, 0, 0, 0),
        step(sys::BPF_LOAD_BYTE, 0, 0, 4),
        step(sys::BPF_AND, 0, 0, mask),
        step(sys::BPF_RETURN_ACCUMULATOR, 0, 0, 0),
    ]
}

fn set(socket: &UdpSocket, option: i32, value: i32) -> io::Result<()> {
    sys::set_option(socket.as_fd(), libc::SOL_SOCKET, option, value)
}

/// Binds a socket that may share the address with others which may.
fn bind_shared(address: IpAddr, options: &[i32]) -> io::Result<UdpSocket> {
    let name = sys::Address::new(address, UDP_PORT);
    let socket = UdpSocket::from(sys::open_udp(&name)?);
    options.iter().try_for_each(|&option| set(&socket, option, 1))?;
    sys::refuse_input(socket.as_fd())?;
    sys::bind(socket.as_fd(), &name)?;
    Ok(socket)
}

impl Group {
    /// Binds the sockets of `count` engines.
    pub fn bind(address: IpAddr, count: u8) -> io::Result<Self> {
        let alone = bind_alone(address)?;
        let bind = || {
            set(&alone, libc::SO_REUSEADDR, 1)?;
            let members = (0..count).map(|_| bind_shared(address, &[libc::SO_REUSEADDR, libc::SO_REUSEPORT]));
            let members = members.collect::<io::Result<Vec<_>>>()?;
            let guard = bind_shared(address, &[libc::SO_REUSEADDR])?;
            guard.connect((address, DISCARD_PORT))?;
            for socket in members.iter().chain([&guard]) {
                set(socket, libc::SO_REUSEADDR, 0)?;
            }
            Ok((members, guard))
        };
        let (members, guard) = bind().map_err(|error| explain(address, &error))?;
        drop(alone);
        if let Some(first) = members.first() {
            sys::choose_by(first.as_fd(), &mut program(count)).map_err(|error| {
                let why = "the kernel does not take the program that divides packets among the engines";
                io::Error::new(error.kind(), format!("UDP port {UDP_PORT} of {address}: {why} ({error})"))
            })?;
        }
        if sockets_at(address)? != members.len() + 1 {
            return Err(explain(address, &io::Error::from_raw_os_error(libc::EADDRINUSE)));
        }
        Ok(Self { address, members, guard: Arc::new(guard) })
    }

    /// From now on packets come in.
    pub fn let_in(&self) -> io::Result<()> {
        self.members.iter().try_for_each(|member| sys::accept_input(member.as_fd()))
    }
}

/// How the kernel prints an address and its port 4791: words as they lie in memory.
fn printed(address: &[u8]) -> String {
    let words = address.chunks_exact(4).map(|word| word.try_into().map_or(0, u32::from_ne_bytes));
    let digits: String = words.map(|word| format!("{word:08X}")).collect();
    format!("{digits}:{UDP_PORT:04X}")
}

/// Sockets that are bound to port 4791 of an address, be it as a v4 address or as a v6 one.
fn sockets_at(address: IpAddr) -> io::Result<usize> {
    let names = match address {
        IpAddr::V4(v4) => [printed(&v4.octets()), printed(&v4.to_ipv6_mapped().octets())],
        IpAddr::V6(v6) => [printed(&v6.octets()), String::new()],
    };
    let mut count = 0;
    for path in SOCKET_TABLES {
        let table = match fs::read_to_string(path) {
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound && address.is_ipv4() => continue,
            read => read.map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))?,
        };
        let is_one = |line: &&str| line.split_whitespace().nth(1).is_some_and(|name| names.iter().any(|it| it == name));
        count += table.lines().filter(is_one).count();
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_at_an_address_are_counted_whatever_their_family() {
        let address = IpAddr::from([127, 91, 0, 1]);
        let mapped = IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0x7f5b, 1]);
        let bind = |address| bind_shared(address, &[libc::SO_REUSEPORT]).expect("free");
        let sockets: Vec<_> = [address, address, mapped, IpAddr::from([127, 91, 0, 2])].map(bind).into();
        assert_eq!(sockets_at(address).expect("a table"), 3);
        let error = Group::bind(address, 2).err().expect("it is taken");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(sockets);
        assert_eq!(sockets_at(address).expect("a table"), 0);
    }
}
