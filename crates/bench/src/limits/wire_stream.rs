//! The bare stream: RDMA WRITEs as RoCEv2 has them on the wire, between two programs that do nothing else.
//!
//! Each message is a FIRST packet with its RETH, MIDDLE ones and a LAST one, of one path MTU each;
//! the sender lets the kernel cut batches (GSO) out of headers, the payload where it lies, and
//! ICRCs. The receiver takes batches whole (GRO), verifies each ICRC, reads the headers and copies
//! the payload to its place. A window, cumulative acknowledgements, no loss: what is not
//! acknowledged in time is an error.
use super::end::{EndFigures, Meter, QUIET_NS, say_ready};
use crate::stats::Summary;
use crate::sys;
use crc32fast::Hasher;
use freeflow_wire::icrc::{Addresses, Flow, Prefix};
use freeflow_wire::{
    Aeth, BTH_BYTES, Header, ICRC_BYTES, Opcode, Operation, PAYLOAD_BYTES_MAX, PacketPosition, Reth, Service, UDP_PORT,
    psn_add, psn_ahead,
};
use std::io::{self, ErrorKind};
use std::mem::{self, size_of_val};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::ptr;

pub const MESSAGE_BYTES: usize = 1 << 20;
/// Places of messages, at the sender and at the receiver.
const PLACES: usize = 4;
/// In flight at most.
pub const WINDOW_BYTES: usize = 1 << 20;
/// One acknowledgement for so much, about.
const ACK_EVERY_BATCHES: usize = 2;
/// Of a smaller window each batch is acknowledged, or the sender would wait for an acknowledgement
/// that nobody asked for.
const WINDOW_BATCHES_MIN: usize = 8;
/// Most that the kernel takes in one batch: bytes and segments.
const BATCH_BYTES_MAX: usize = 65_000;
const BATCH_SEGMENTS_MAX: usize = 63;
/// Largest datagram or batch of them.
const RECEIVE_BYTES: usize = 1 << 16;
const RETH_BYTES: usize = 16;
/// A place for an ICRC and the headers of the packet after it.
const BLOCK_BYTES: usize = ICRC_BYTES + BTH_BYTES + RETH_BYTES;
const QPN: u32 = 0x1234;
const PARTS: u64 = 40;
const WARM_UP_SHARE: u64 = 8;
const CONTROL_BYTES: usize = 64;
/// The sender says so that it is through.
const GOODBYE: [u8; 1] = [0];
/// Stalled for so long, the stream is broken.
const STALL_NS_MAX: u64 = if cfg!(test) { 5_000_000_000 } else { 1_000_000_000 };

pub fn set_option(socket: &UdpSocket, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let size = size_of_val(&value) as libc::socklen_t;
    // SAFETY: an open socket and a valid integer.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), size) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The ICRC of packets whose headers and payload lie apart: [`Flow::icrc`], begun once for packets of one length.
struct Pieces {
    begun: Hasher,
}

impl Pieces {
    fn new(source: Ipv4Addr, to: Ipv4Addr, source_port: u16, packet_bytes: usize) -> Self {
        let udp_bytes = (packet_bytes + ICRC_BYTES + 8) as u16;
        let mut head = [0xff; 36];
        head[8] = 0x45;
        head[10..12].copy_from_slice(&(udp_bytes + 20).to_be_bytes());
        head[12..16].copy_from_slice(&[0, 0, 0x40, 0]);
        head[17] = 17;
        head[20..24].copy_from_slice(&source.octets());
        head[24..28].copy_from_slice(&to.octets());
        head[28..30].copy_from_slice(&source_port.to_be_bytes());
        head[30..32].copy_from_slice(&UDP_PORT.to_be_bytes());
        head[32..34].copy_from_slice(&udp_bytes.to_be_bytes());
        let mut begun = Hasher::new();
        begun.update(&head);
        Self { begun }
    }

    fn icrc(&self, headers: &[u8], payload: &[u8]) -> u32 {
        let mut masked = [0; BTH_BYTES + RETH_BYTES];
        masked[..headers.len()].copy_from_slice(headers);
        masked[4] = 0xff;
        let mut hasher = self.begun.clone();
        hasher.update(&masked[..headers.len()]);
        hasher.update(payload);
        hasher.finalize()
    }
}

fn opcode(operation: Operation, place: PacketPosition) -> Opcode {
    Opcode::new(Service::Rc, operation, place).expect("RC has it")
}

/// One `sendmsg`: `blocks[i]` ends with the headers of packet i and begins with the ICRC of the one before it.
struct Batch {
    blocks: [[u8; BLOCK_BYTES]; BATCH_SEGMENTS_MAX + 1],
    pieces: [libc::iovec; 2 * BATCH_SEGMENTS_MAX + 1],
}

struct Source<'a> {
    socket: &'a UdpSocket,
    memory: Vec<u8>,
    payload_bytes: usize,
    first: Pieces,
    others: Pieces,
    batch: Box<Batch>,
    /// Packets sent and acknowledged so far.
    sent: u64,
    acknowledged: u64,
    batch_count: usize,
    acknowledge_every: usize,
}

impl Source<'_> {
    fn packets_a_message(&self) -> usize {
        MESSAGE_BYTES / self.payload_bytes
    }

    /// Sends `count` packets of the current message, from packet `from` of it on. They have headers of one length.
    fn send(&mut self, message: usize, from: usize, count: usize) -> io::Result<()> {
        let last = self.packets_a_message() - 1;
        let batch = &mut *self.batch;
        let base = message % PLACES * MESSAGE_BYTES;
        let headers_bytes = if from == 0 { BTH_BYTES + RETH_BYTES } else { BTH_BYTES };
        let icrc = if from == 0 { &self.first } else { &self.others };
        let begin = BLOCK_BYTES - headers_bytes;
        self.batch_count += 1;
        for at in 0..count {
            let index = from + at;
            let place = match index {
                0 => PacketPosition::First,
                index if index == last => PacketPosition::Last,
                _ => PacketPosition::Middle,
            };
            let mut header =
                Header::new(opcode(Operation::Write, place), QPN, psn_add(0, self.sent as u32 + at as u32));
            header.reth = Reth { address: base as u64, rkey: 1, length: MESSAGE_BYTES as u32 };
            header.ack_request = at == count - 1 && self.batch_count.is_multiple_of(self.acknowledge_every);
            batch.blocks[at][begin..].copy_from_slice(header.encode().as_slice());
            let offset = base + index * self.payload_bytes;
            let payload = &self.memory[offset..offset + self.payload_bytes];
            let crc = icrc.icrc(&batch.blocks[at][begin..], payload);
            batch.blocks[at + 1][begin - ICRC_BYTES..begin].copy_from_slice(&crc.to_le_bytes());
            batch.pieces[2 * at + 1] =
                libc::iovec { iov_base: payload.as_ptr().cast_mut().cast(), iov_len: self.payload_bytes };
        }
        for at in 0..=count {
            let (from, bytes) = match at {
                0 => (begin, headers_bytes),
                at if at == count => (begin - ICRC_BYTES, ICRC_BYTES),
                _ => (begin - ICRC_BYTES, ICRC_BYTES + headers_bytes),
            };
            let block = &mut batch.blocks[at][from..from + bytes];
            batch.pieces[2 * at] = libc::iovec { iov_base: block.as_mut_ptr().cast(), iov_len: bytes };
        }
        let segment_bytes = headers_bytes + self.payload_bytes + ICRC_BYTES;
        send_segments(self.socket, &mut batch.pieces[..2 * count + 1], segment_bytes)?;
        self.sent += count as u64;
        Ok(())
    }

    /// Takes the acknowledgements that are there.
    fn take_acknowledgements(&mut self) -> io::Result<()> {
        let mut bytes = [0; 64];
        loop {
            match self.socket.recv(&mut bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
                Ok(length) => {
                    let packet = &bytes[..length.saturating_sub(ICRC_BYTES)];
                    let (header, _) = Header::parse(packet).map_err(|error| io::Error::other(format!("{error:?}")))?;
                    let next = psn_add(header.psn, 1);
                    let ahead = psn_ahead(next, psn_add(0, self.acknowledged as u32));
                    self.acknowledged += u64::try_from(ahead).unwrap_or(0);
                }
            }
        }
    }
}

fn send_segments(socket: &UdpSocket, pieces: &mut [libc::iovec], segment_bytes: usize) -> io::Result<()> {
    // Aligned as a cmsghdr must be.
    let mut control = [0u64; CONTROL_BYTES / 8];
    // SAFETY: integers and pointers; all zero is "none".
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: a plain number; and the header fits into the control bytes, so CMSG_FIRSTHDR is in bounds and not null.
    unsafe {
        message.msg_controllen = libc::CMSG_SPACE(2) as _;
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_UDP;
        (*header).cmsg_type = libc::UDP_SEGMENT;
        (*header).cmsg_len = libc::CMSG_LEN(2) as _;
        ptr::write_unaligned(libc::CMSG_DATA(header).cast::<u16>(), segment_bytes as u16);
    }
    // SAFETY: the pieces point to live memory (of `Source`), the control bytes to `control`.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, 0) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn check_stall(stalled_since: &mut u64, moved: bool) -> io::Result<()> {
    let now = sys::monotonic_ns();
    if moved || *stalled_since == 0 {
        *stalled_since = now;
    } else if now - *stalled_since > STALL_NS_MAX {
        return Err(io::Error::new(ErrorKind::TimedOut, "nothing is acknowledged: a packet was lost"));
    }
    Ok(())
}

/// The sending end.
///
/// # Errors
/// Of the socket; packets that got lost.
pub fn source(
    socket: &UdpSocket,
    to: Ipv4Addr,
    (payload_bytes, window_bytes): (usize, usize),
    duration_ms: u64,
) -> io::Result<EndFigures> {
    let SocketAddr::V4(own) = socket.local_addr()? else { return Err(io::Error::other("not IPv4")) };
    if !(256..=PAYLOAD_BYTES_MAX).contains(&payload_bytes) || !payload_bytes.is_power_of_two() {
        return Err(io::Error::other("no path MTU"));
    }
    socket.set_nonblocking(true)?;
    let pieces = |headers_bytes| Pieces::new(*own.ip(), to, own.port(), headers_bytes + payload_bytes);
    let none = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
    let mut source = Source {
        socket,
        memory: vec![7; PLACES * MESSAGE_BYTES],
        payload_bytes,
        first: pieces(BTH_BYTES + RETH_BYTES),
        others: pieces(BTH_BYTES),
        batch: Box::new(Batch {
            blocks: [[0; BLOCK_BYTES]; BATCH_SEGMENTS_MAX + 1],
            pieces: [none; 2 * BATCH_SEGMENTS_MAX + 1],
        }),
        sent: 0,
        acknowledged: 0,
        batch_count: 0,
        acknowledge_every: if window_bytes < WINDOW_BATCHES_MIN * BATCH_BYTES_MAX { 1 } else { ACK_EVERY_BATCHES },
    };
    let figures = stream(&mut source, window_bytes, duration_ms)?;
    socket.send(&GOODBYE)?;
    Ok(figures)
}

fn stream(source: &mut Source<'_>, window_bytes: usize, duration_ms: u64) -> io::Result<EndFigures> {
    let payload_bytes = source.payload_bytes;
    let batch_max = (BATCH_BYTES_MAX / (BTH_BYTES + payload_bytes + ICRC_BYTES)).min(BATCH_SEGMENTS_MAX);
    let window = (window_bytes / payload_bytes) as u64;
    let last = source.packets_a_message();
    let meter = Meter::start();
    let counts_from = meter.begun_ns + duration_ms * 1_000_000 / WARM_UP_SHARE;
    let until = meter.begun_ns + duration_ms * 1_000_000;
    let part_ns = (until - counts_from) / PARTS;
    let (mut samples, mut part_begun, mut part_done) = (Vec::new(), meter.begun_ns, 0);
    let (mut message, mut index, mut stalled_since) = (0, 0, 0);
    loop {
        let before = source.acknowledged;
        source.take_acknowledgements()?;
        let count = if index == 0 { 1 } else { batch_max.min(last - index) };
        if source.sent - source.acknowledged + count as u64 <= window {
            source.send(message, index, count)?;
            index += count;
            if index == last {
                (message, index) = (message + 1, 0);
            }
        } else {
            std::hint::spin_loop();
        }
        check_stall(&mut stalled_since, source.acknowledged != before)?;
        let now = stalled_since.max(sys::monotonic_ns());
        if now - part_begun >= part_ns {
            if part_begun >= counts_from {
                let bits = (source.acknowledged - part_done) as f64 * payload_bytes as f64 * 8.0;
                samples.push(bits / (now - part_begun) as f64);
            }
            (part_begun, part_done) = (now, source.acknowledged);
        }
        if now >= until {
            break;
        }
    }
    let done = source.acknowledged;
    Ok(meter.figures(Summary::of(&mut samples), done, done * payload_bytes as u64))
}

/// The receiving end.
struct Sink {
    memory: Vec<u8>,
    flow: Flow,
    first: Prefix,
    others: Prefix,
    expected: u32,
    write_to: usize,
    /// Packets taken, and packets with a wrong ICRC.
    count: u64,
    bad: u64,
}

impl Sink {
    /// Whether it is to be acknowledged.
    fn take(&mut self, datagram: &[u8]) -> io::Result<bool> {
        let broken = || io::Error::other("a packet that does not belong here");
        let (packet, icrc) = datagram.split_last_chunk::<ICRC_BYTES>().ok_or_else(broken)?;
        let computed = match packet.len() {
            bytes if bytes == self.others.packet_bytes() => self.others.icrc(0, packet),
            bytes if bytes == self.first.packet_bytes() => self.first.icrc(0, packet),
            _ => self.flow.icrc(0, packet),
        };
        self.bad += u64::from(computed.to_le_bytes() != *icrc);
        let (header, payload) = Header::parse(packet).map_err(|_| broken())?;
        if header.psn != self.expected {
            return Err(io::Error::other(format!("PSN {} where {} was expected", header.psn, self.expected)));
        }
        if header.opcode.place() == PacketPosition::First {
            self.write_to = header.reth.address as usize;
        }
        self.memory.get_mut(self.write_to..self.write_to + payload.len()).ok_or_else(broken)?.copy_from_slice(payload);
        self.write_to += payload.len();
        self.expected = psn_add(self.expected, 1);
        self.count += 1;
        Ok(header.ack_request)
    }

    fn acknowledgement(&self) -> [u8; BTH_BYTES + 4 + ICRC_BYTES] {
        let mut header =
            Header::new(opcode(Operation::Acknowledge, PacketPosition::Only), QPN, self.expected.wrapping_sub(1));
        header.aeth = Aeth::default();
        let mut bytes = [0; BTH_BYTES + 4 + ICRC_BYTES];
        bytes[..BTH_BYTES + 4].copy_from_slice(header.encode().as_slice());
        let icrc = self.flow.icrc(0, &bytes[..BTH_BYTES + 4]);
        bytes[BTH_BYTES + 4..].copy_from_slice(&icrc.to_le_bytes());
        bytes
    }
}

/// The next datagram, or several of one length: bytes, length of each, sender.
fn receive(socket: &UdpSocket, into: &mut [u8]) -> io::Result<(usize, usize, libc::sockaddr_in)> {
    let mut piece = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let mut control = [0u64; CONTROL_BYTES / 8];
    // SAFETY: integers and pointers; all zero is "none".
    let (mut from, mut message): (libc::sockaddr_in, libc::msghdr) = unsafe { (mem::zeroed(), mem::zeroed()) };
    message.msg_name = (&raw mut from).cast();
    message.msg_namelen = size_of_val(&from) as _;
    message.msg_iov = &mut piece;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES as _;
    // SAFETY: every pointer is to a live place of the length that stands beside it.
    let bytes = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
    let bytes = usize::try_from(bytes).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel filled in the control bytes; a header that CMSG_FIRSTHDR gives is whole.
    let segment = unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        let known = !header.is_null() && (*header).cmsg_level == libc::SOL_UDP && (*header).cmsg_type == libc::UDP_GRO;
        known.then(|| ptr::read_unaligned(libc::CMSG_DATA(header).cast::<libc::c_int>()))
    };
    let each = segment.and_then(|segment| usize::try_from(segment).ok()).filter(|&segment| segment > 0);
    Ok((bytes, each.unwrap_or(bytes.max(1)), from))
}

/// Until the sender says goodbye.
///
/// # Errors
/// Of the socket; packets that got lost or are none of the stream's.
pub fn sink(socket: &UdpSocket, payload_bytes: usize) -> io::Result<EndFigures> {
    set_option(socket, libc::SOL_UDP, libc::UDP_GRO, 1)?;
    let mut buffer = vec![0; RECEIVE_BYTES];
    let (mut sink, mut own): (Option<Sink>, Option<Ipv4Addr>) = (None, None);
    let mut meter = Meter::start();
    let mut quiet_since = sys::monotonic_ns();
    let memory = vec![1; PLACES * MESSAGE_BYTES];
    let mut memory = Some(memory);
    say_ready()?;
    loop {
        let (bytes, each, from) = match receive(socket, &mut buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if sink.is_some() && sys::monotonic_ns() - quiet_since > QUIET_NS {
                    return Err(io::Error::new(ErrorKind::TimedOut, "the stream broke off"));
                }
                std::hint::spin_loop();
                continue;
            }
            result => result?,
        };
        if bytes == GOODBYE.len() {
            break;
        }
        let source = from.sin_addr.s_addr.to_ne_bytes();
        let begun = match (&mut sink, memory.take()) {
            (Some(begun), _) => begun,
            (None, memory) => {
                let port = u16::from_be(from.sin_port);
                let destination = own.get_or_insert(own_address(source.into())?).octets();
                let flow = Flow { addresses: Addresses::V4 { source, destination }, source_port: port };
                meter = Meter::start();
                sink.insert(Sink {
                    memory: memory.unwrap_or_default(),
                    flow,
                    first: flow.prefix(BTH_BYTES + RETH_BYTES + payload_bytes),
                    others: flow.prefix(BTH_BYTES + payload_bytes),
                    expected: 0,
                    write_to: 0,
                    count: 0,
                    bad: 0,
                })
            }
        };
        let mut asked = false;
        for datagram in buffer[..bytes].chunks(each) {
            asked |= begun.take(datagram)?;
        }
        quiet_since = sys::monotonic_ns();
        if asked {
            let to = (Ipv4Addr::from(source), u16::from_be(from.sin_port));
            socket.send_to(&begun.acknowledgement(), to)?;
        }
    }
    let sink = sink.ok_or_else(|| io::Error::other("nothing came"))?;
    let figures = meter.figures(None, sink.count, sink.count * payload_bytes as u64);
    Ok(EndFigures { bad: sink.bad, ..figures })
}

/// The address from which packets to `to` are sent.
fn own_address(to: Ipv4Addr) -> io::Result<Ipv4Addr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect((to, UDP_PORT))?;
    match socket.local_addr()? {
        SocketAddr::V4(own) => Ok(*own.ip()),
        SocketAddr::V6(_) => Err(io::Error::other("not IPv4")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_icrc_of_pieces_is_that_of_the_whole() {
        let (source, to) = (Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2));
        let flow = Flow {
            addresses: Addresses::V4 { source: source.octets(), destination: to.octets() },
            source_port: 0xc001,
        };
        for headers_bytes in [BTH_BYTES, BTH_BYTES + RETH_BYTES] {
            let packet: Vec<u8> = (0..headers_bytes + 1024).map(|at| at as u8).collect();
            let (headers, payload) = packet.split_at(headers_bytes);
            let pieces = Pieces::new(source, to, 0xc001, packet.len());
            assert_eq!(pieces.icrc(headers, payload), flow.icrc(0, &packet));
            assert_ne!(pieces.icrc(headers, payload), flow.icrc(1, &packet));
        }
    }

    #[test]
    fn a_stream_over_loopback_arrives_whole() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("socket");
        let port = socket.local_addr().expect("address").port();
        let receiver = std::thread::spawn(move || sink(&socket, 1024));
        let sender = UdpSocket::bind("127.0.0.1:0").expect("socket");
        sender.connect(("127.0.0.1", port)).expect("connected");
        // Fits the receive buffer that anybody gets.
        let sent = source(&sender, Ipv4Addr::LOCALHOST, (1024, 64 << 10), 20).expect("sent");
        let received = receiver.join().expect("no panic").expect("received");
        assert!(received.payload_bytes > 0 && received.payload_bytes >= sent.payload_bytes);
        assert_eq!(received.bad, 0);
    }
}
