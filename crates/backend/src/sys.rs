//! The system calls that the standard library lacks: socket options, sendmsg and recvmsg with control messages.
//! The only unsafe code of this crate; nothing here keeps a pointer beyond its call.
#![allow(unsafe_code)]
use freeflow_shm::Segment;
use std::io;
use std::mem::{self, MaybeUninit};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Send and accept IPv6 datagrams without a checksum (linux/udp.h).
pub const UDP_NO_CHECK6_TX: i32 = 101;
pub const UDP_NO_CHECK6_RX: i32 = 102;
/// Room for all control messages that a call sends or takes, bytes.
const CONTROL_BYTES: usize = 256;

#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// A destination as the kernel takes it.
#[derive(Clone, Copy)]
pub enum Address {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl Address {
    pub fn new(address: IpAddr, port: u16) -> Self {
        match address {
            IpAddr::V4(v4) => Self::V4(libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: port.to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.octets()) },
                sin_zero: [0; 8],
            }),
            IpAddr::V6(v6) => Self::V6(libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: port.to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.octets() },
                sin6_scope_id: 0,
            }),
        }
    }

    pub fn to_socket(self) -> SocketAddr {
        match self {
            Self::V4(v4) => {
                let address = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                SocketAddr::new(address.into(), u16::from_be(v4.sin_port))
            }
            Self::V6(v6) => SocketAddr::new(Ipv6Addr::from(v6.sin6_addr.s6_addr).into(), u16::from_be(v6.sin6_port)),
        }
    }

    fn is_v4(&self) -> bool {
        matches!(self, Self::V4(_))
    }

    fn as_raw(&self) -> (*const libc::c_void, libc::socklen_t) {
        match self {
            Self::V4(v4) => (std::ptr::from_ref(v4).cast(), size_of::<libc::sockaddr_in>() as libc::socklen_t),
            Self::V6(v6) => (std::ptr::from_ref(v6).cast(), size_of::<libc::sockaddr_in6>() as libc::socklen_t),
        }
    }
}

/// Sets an option whose value is an `int`.
pub fn set_option(socket: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> io::Result<()> {
    // SAFETY: the kernel reads `size_of::<i32>()` bytes of `value`, which lives through the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(&value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads an option whose value is an `int`.
pub fn option(socket: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
    let mut value = 0_i32;
    let mut length = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `value`; both live through the call.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, std::ptr::from_mut(&mut value).cast(), &mut length)
    };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// An instruction of a classic BPF program.
pub const fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// Return the constant, or the accumulator.
pub const BPF_RETURN_CONSTANT: u16 = 0x06;
pub const BPF_RETURN_ACCUMULATOR: u16 = 0x16;
/// Load a byte, or a word, of the packet.
pub const BPF_LOAD_BYTE: u16 = 0x30;
pub const BPF_LOAD_WORD: u16 = 0x20;
/// The accumulator and the constant.
pub const BPF_AND: u16 = 0x54;
pub const BPF_JUMP_EQUAL: u16 = 0x15;
pub const BPF_JUMP_GREATER: u16 = 0x25;

/// Makes the kernel drop everything that arrives at this socket.
pub fn refuse_input(socket: BorrowedFd<'_>) -> io::Result<()> {
    attach(socket, libc::SO_ATTACH_FILTER, &mut [instruction(BPF_RETURN_CONSTANT, 0, 0, 0)])
}

/// Undoes [`refuse_input`].
pub fn accept_input(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, 0)
}

/// Has a program choose the socket of a group (SO_REUSEPORT) that a packet goes to: it sees the payload of UDP, and
/// gives the socket's place in the order of binding.
pub fn choose_by(member: BorrowedFd<'_>, program: &mut [libc::sock_filter]) -> io::Result<()> {
    attach(member, libc::SO_ATTACH_REUSEPORT_CBPF, program)
}

fn attach(socket: BorrowedFd<'_>, option: i32, program: &mut [libc::sock_filter]) -> io::Result<()> {
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the kernel copies `filter` and the `len` instructions it points to; both live through the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_ref(&filter).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A UDP socket for addresses of this family that is not bound yet.
pub fn open_udp(family: &Address) -> io::Result<OwnedFd> {
    let family = if family.is_v4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just opened it, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub fn bind(socket: BorrowedFd<'_>, address: &Address) -> io::Result<()> {
    let (name, length) = address.as_raw();
    // SAFETY: the kernel reads `length` bytes of the address, which lives through the call.
    let result = unsafe { libc::bind(socket.as_raw_fd(), name.cast(), length) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Random bits from the kernel.
pub fn random() -> io::Result<u64> {
    let mut bytes = [0_u8; 8];
    fill_random(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Fills up to 256 bytes with random bits from the kernel, which gives so many at once.
pub fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
    // SAFETY: the kernel writes at most the bytes of the slice.
    let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    match usize::try_from(count) {
        Ok(count) if count == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Bytes to send: of a buffer, or of memory that other processes write meanwhile. As the kernel's `iovec`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Part {
    address: usize,
    pub bytes: usize,
}

const _: () = assert!(
    size_of::<Part>() == size_of::<libc::iovec>()
        && mem::offset_of!(Part, address) == mem::offset_of!(libc::iovec, iov_base)
        && mem::offset_of!(Part, bytes) == mem::offset_of!(libc::iovec, iov_len)
);

impl Part {
    pub fn of(bytes: &[u8]) -> Self {
        Self { address: bytes.as_ptr().expose_provenance(), bytes: bytes.len() }
    }

    /// Of a segment, which is mapped at that address as long as somebody holds it. `None`: not inside.
    pub fn of_segment(segment: &Segment, offset: usize, bytes: usize) -> Option<Self> {
        let end = offset.checked_add(bytes)?;
        (end <= segment.bytes()).then(|| Self { address: segment.address() + offset, bytes })
    }

    /// Takes in what follows this part in the same buffer; false if it does not.
    pub fn join(&mut self, next: Self) -> bool {
        let follows = self.address + self.bytes == next.address;
        self.bytes += if follows { next.bytes } else { 0 };
        follows
    }
}

/// Sends `bytes` without waiting: one datagram, or, with `segment_bytes`, as many as that makes. `traffic_class`: the
/// whole ToS or traffic-class byte, where it is not the socket's.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    to: &Address,
    segment_bytes: Option<u16>,
    traffic_class: Option<u8>,
) -> io::Result<()> {
    send_parts(socket, &[Part::of(bytes)], to, segment_bytes, traffic_class)
}

/// The same of bytes that lie in several places. EFAULT: some of them are not there; nothing was sent.
///
/// The kernel reads them by their addresses, and answers EFAULT where nothing is mapped: nothing here depends on what
/// the parts name.
pub fn send_parts(
    socket: BorrowedFd<'_>,
    parts: &[Part],
    to: &Address,
    segment_bytes: Option<u16>,
    traffic_class: Option<u8>,
) -> io::Result<()> {
    let (name, name_length) = to.as_raw();
    let mut control = MaybeUninit::<Control>::uninit();
    // SAFETY: all zeros is a valid msghdr: null pointers with lengths of zero.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_name = name.cast_mut();
    message.msg_namelen = name_length;
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len() as _;
    message.msg_control = control.as_mut_ptr().cast();
    let mut used = 0;
    if let Some(segment) = segment_bytes {
        // SAFETY: `control` is aligned for cmsghdr, and two messages of at most 4 bytes fit in CONTROL_BYTES.
        used += unsafe { put(message.msg_control, used, libc::SOL_UDP, libc::UDP_SEGMENT, segment) };
    }
    if let Some(class) = traffic_class {
        let (level, kind) =
            if to.is_v4() { (libc::IPPROTO_IP, libc::IP_TOS) } else { (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) };
        // SAFETY: as above.
        used += unsafe { put(message.msg_control, used, level, kind, i32::from(class)) };
    }
    message.msg_controllen = used as _;
    if used == 0 {
        message.msg_control = std::ptr::null_mut();
    }
    loop {
        // SAFETY: `message` points to a name, iovecs and control bytes that are initialised up to their lengths and
        // live through the call; the kernel only reads them, and what the iovecs name.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        if sent >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Writes one control message at `at` of `control` and gives the bytes it takes.
///
/// # Safety
/// `control` is aligned for `cmsghdr`, `at` is a sum of earlier results, and `CMSG_SPACE` of the value fits behind it.
unsafe fn put<T>(control: *mut libc::c_void, at: usize, level: i32, kind: i32, value: T) -> usize {
    // SAFETY: this function's contract: there is room for a header and the value. Results are
    // multiples of the alignment.
    unsafe {
        let header: *mut libc::cmsghdr = control.cast::<u8>().add(at).cast();
        header.write(libc::cmsghdr {
            cmsg_len: libc::CMSG_LEN(size_of::<T>() as u32) as _,
            cmsg_level: level,
            cmsg_type: kind,
        });
        libc::CMSG_DATA(header).cast::<T>().write_unaligned(value);
        libc::CMSG_SPACE(size_of::<T>() as u32) as usize
    }
}

/// Result of one call that read a socket.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    pub bytes: usize,
    pub source: SocketAddr,
    /// Length of each datagram but the last, where the kernel put several together.
    pub segment_bytes: Option<usize>,
    pub traffic_class: u8,
    pub hop_limit: u8,
    pub truncated: bool,
    /// Datagrams that this socket has dropped so far for lack of buffer (modulo 2^32), where there are any.
    pub overflow: Option<u32>,
}

/// Receives without waiting.
pub fn receive(socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<Arrival> {
    let mut name = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let mut control = MaybeUninit::<Control>::uninit();
    // SAFETY: all zeros is a valid msghdr.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_name = name.as_mut_ptr().cast();
    message.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES as _;
    // SAFETY: name, buffer and control bytes are writable in the lengths given and live through the call.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
    if count < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `name` was zeroed before the kernel wrote an address into it: all of it is initialised.
    let source = unsafe { source_of(&name.assume_init()) };
    let mut arrival = Arrival {
        bytes: count as usize,
        source,
        segment_bytes: None,
        traffic_class: 0,
        hop_limit: 0,
        truncated: message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0,
        overflow: None,
    };
    // SAFETY: the kernel has set msg_controllen to what it wrote; the macros walk within that.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            take(&mut arrival, header);
            header = libc::CMSG_NXTHDR(&message, header);
        }
    }
    Ok(arrival)
}

/// # Safety
/// `header` is a control message that the kernel wrote.
unsafe fn take(arrival: &mut Arrival, header: *const libc::cmsghdr) {
    // SAFETY: the kernel writes an int for each of these kinds, and one byte for IP_TOS.
    unsafe {
        let data = libc::CMSG_DATA(header);
        let int = || data.cast::<i32>().read_unaligned();
        match ((*header).cmsg_level, (*header).cmsg_type) {
            (libc::SOL_UDP, libc::UDP_GRO) => arrival.segment_bytes = usize::try_from(int()).ok(),
            (libc::IPPROTO_IP, libc::IP_TOS) => arrival.traffic_class = data.read(),
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => arrival.traffic_class = int() as u8,
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                arrival.hop_limit = int() as u8;
            }
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => arrival.overflow = Some(int().cast_unsigned()),
            _ => {}
        }
    }
}

/// # Safety
/// `name` holds an address as the kernel writes it.
unsafe fn source_of(name: &libc::sockaddr_storage) -> SocketAddr {
    let raw = std::ptr::from_ref(name);
    match i32::from(name.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that a sockaddr_in is here; sockaddr_storage is large and aligned enough.
            Address::V4(unsafe { raw.cast::<libc::sockaddr_in>().read() }).to_socket()
        }
        libc::AF_INET6 => {
            // SAFETY: the same for a sockaddr_in6.
            Address::V6(unsafe { raw.cast::<libc::sockaddr_in6>().read() }).to_socket()
        }
        _ => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
    }
}
