//! The way in: datagrams that the kernel may have put together, taken apart and checked.
use crate::capture::{Captured, Direction};
use crate::peers::PeerIndex;
use crate::sys::{self, Arrival};
use crate::udp::{Udp, now_ns};
use freeflow_wire::frame::{is_frame, is_intact};
use freeflow_wire::icrc::{Flow, Prefix};
use freeflow_wire::{BTH_BYTES, ICRC_BYTES, UDP_PORT};
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;

/// The kernel puts at most 64 KiB together.
const BUFFER_BYTES: usize = 1 << 16;
/// A FreeFlow peer's packets bear their index in a batch as identification; no kernel cuts one into more than this.
const FREEFLOW_IDENTIFICATION_COUNT: u16 = 128;
/// Explicit congestion notification: "congestion experienced", in the two lowest bits of the traffic class.
const CONGESTION_EXPERIENCED: u8 = 3;
/// Datagrams of one socket before the others are looked at.
const IN_A_ROW_COUNT_MAX: u32 = 32;

/// A packet whose source is a peer and whose ICRC is good.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    pub from: PeerIndex,
    /// BTH to padding; of a frame, to its end.
    pub packet: &'a [u8],
    pub source: IpAddr,
    pub source_port: u16,
    pub destination: IpAddr,
    /// The whole byte.
    pub traffic_class: u8,
    pub hop_limit: u8,
    pub congestion_experienced: bool,
}

/// Packets of one peer that one call took from a socket. See [`Udp::next_datagram`].
pub struct Datagram {
    buffer: Box<[u8]>,
    arrival: Arrival,
    destination: IpAddr,
    from: PeerIndex,
    count: usize,
    /// Length of each packet but the last.
    segment: usize,
    /// Where the next packet begins.
    offset: usize,
    end: usize,
    /// The identification that the next packet probably bears.
    expected: u16,
    /// Of the packets' ICRCs, for those of length `segment`.
    prefix: Option<Prefix>,
}

impl Datagram {
    /// Packets that it came with, good or bad.
    pub fn count(&self) -> usize {
        self.count
    }
}

pub(crate) struct Listener {
    pub socket: UdpSocket,
    pub address: IpAddr,
    /// Drops of the kernel as last reported.
    overflow: u32,
}

impl Listener {
    pub fn new(socket: UdpSocket, address: IpAddr) -> Self {
        Self { socket, address, overflow: 0 }
    }
}

pub(crate) struct Inbox {
    listeners: Vec<Listener>,
    /// Taken out while its packets are handed over.
    buffer: Box<[u8]>,
    /// The listener to begin with next time: none starves another.
    first: usize,
    /// Datagrams that it brought since its turn began.
    in_a_row: u32,
    /// By how much the identification of a packet differed from that of the one before it in a
    /// datagram: 1 where a batch was cut, 0 where single packets were put together.
    step: u16,
}

impl Inbox {
    pub fn new(listeners: Vec<Listener>) -> Self {
        Self { listeners, buffer: vec![0; BUFFER_BYTES].into_boxed_slice(), first: 0, in_a_row: 0, step: 1 }
    }

    pub fn listeners(&self) -> &[Listener] {
        &self.listeners
    }
}

impl Udp {
    /// Receives until nothing is there or `limit` packets have come (a datagram put together from several may go over
    /// it), and calls `each` with every good one. Gives the number of packets, good or bad.
    pub fn receive(&mut self, limit: usize, each: &mut dyn FnMut(Received<'_>)) -> usize {
        self.receive_with(limit, &mut |_, received| each(received))
    }

    /// As [`receive`](Self::receive); `each` may send through this very backend. (Inside `each`,
    /// nothing can be received.)
    pub fn receive_with(&mut self, limit: usize, each: &mut dyn FnMut(&mut Self, Received<'_>)) -> usize {
        let mut packets = 0;
        while packets < limit
            && let Some(mut datagram) = self.next_datagram()
        {
            packets += datagram.count;
            while let Some(received) = self.next_packet(&mut datagram) {
                each(self, received);
            }
            self.give_back(datagram);
        }
        packets
    }

    /// Takes the next datagram from a socket. `None`: nothing is there. Sockets take turns.
    ///
    /// Its packets are handed out by [`next_packet`](Self::next_packet), between whose calls this
    /// backend can be used to send; then it is to be [given back](Self::give_back), and until then
    /// there is no other.
    pub fn next_datagram(&mut self) -> Option<Datagram> {
        let mut buffer = std::mem::take(&mut self.inbox.buffer);
        let count = self.inbox.listeners.len();
        for turn in 0..count {
            let at = (self.inbox.first + turn) % count;
            if let Some(arrival) = self.take(at, &mut buffer) {
                self.inbox.in_a_row += 1;
                let goes_on = turn == 0 && self.inbox.in_a_row < IN_A_ROW_COUNT_MAX;
                self.inbox.first = if goes_on { at } else { (at + 1) % count };
                self.inbox.in_a_row *= u32::from(goes_on);
                return Some(self.unpack(at, arrival, buffer));
            }
        }
        if !buffer.is_empty() {
            self.inbox.buffer = buffer;
        }
        None
    }

    /// The next good packet of the datagram.
    #[inline]
    pub fn next_packet<'a>(&mut self, datagram: &'a mut Datagram) -> Option<Received<'a>> {
        while datagram.offset < datagram.end {
            let (begin, arrival) = (datagram.offset, datagram.arrival);
            let end = datagram.end.min(begin + datagram.segment);
            datagram.offset = end;
            let expected = datagram.expected;
            let Some(inside) = self.unseal(datagram.from, &mut datagram.buffer[begin..end]) else {
                if self.capture.is_some() {
                    let whole = &datagram.buffer[begin..end];
                    self.capture_received(&arrival, datagram.destination, expected, whole);
                }
                continue;
            };
            let (begin, end, is_first) = (begin + inside.start, begin + inside.end, begin == 0);
            let whole = &datagram.buffer[begin..end];
            let found = self.verify(datagram.from, &arrival, &mut datagram.prefix, expected, whole);
            if !is_first && found.is_some_and(|identification| identification != expected) {
                self.inbox.step = u16::from(self.inbox.step == 0);
            }
            if self.capture.is_some() {
                let whole = &datagram.buffer[begin..end];
                self.capture_received(&arrival, datagram.destination, found.unwrap_or(expected), whole);
            }
            datagram.expected = found.unwrap_or(expected).wrapping_add(self.inbox.step);
            if found.is_some() {
                let whole = &datagram.buffer[begin..end];
                return Some(Received {
                    from: datagram.from,
                    packet: if is_frame(whole) { whole } else { &whole[..whole.len() - ICRC_BYTES] },
                    source: arrival.source.ip(),
                    source_port: arrival.source.port(),
                    destination: datagram.destination,
                    traffic_class: arrival.traffic_class,
                    hop_limit: arrival.hop_limit,
                    congestion_experienced: arrival.traffic_class & 3 == CONGESTION_EXPERIENCED,
                });
            }
        }
        None
    }

    /// The datagram is done with.
    pub fn give_back(&mut self, datagram: Datagram) {
        self.inbox.buffer = datagram.buffer;
    }

    fn take(&mut self, at: usize, buffer: &mut [u8]) -> Option<Arrival> {
        if buffer.is_empty() {
            return None;
        }
        let listener = &mut self.inbox.listeners[at];
        match sys::receive(listener.socket.as_fd(), buffer) {
            Ok(arrival) => {
                if let Some(overflow) = arrival.overflow {
                    self.counters.receive_overflow += u64::from(overflow.wrapping_sub(listener.overflow));
                    listener.overflow = overflow;
                }
                self.counters.batches_received += 1;
                Some(arrival)
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::WouldBlock {
                    self.counters.receive_errors += 1;
                }
                None
            }
        }
    }

    /// The packets of one call as a datagram: without packets if it is no good.
    fn unpack(&mut self, at: usize, arrival: Arrival, buffer: Box<[u8]>) -> Datagram {
        let end = arrival.bytes.min(buffer.len());
        let segment = arrival.segment_bytes.filter(|&segment| segment > 0).unwrap_or(end).max(1);
        let count = end.div_ceil(segment).max(1);
        let destination = self.inbox.listeners[at].address;
        self.counters.packets_received += count as u64;
        self.counters.bytes_received += end as u64;
        let from = PeerIndex(0);
        let mut datagram = Datagram {
            buffer,
            arrival,
            destination,
            from,
            count,
            segment,
            offset: end,
            end,
            expected: 0,
            prefix: None,
        };
        if arrival.truncated || end == 0 {
            self.counters.truncated += count as u64;
            return datagram;
        }
        match self.peers.find_again(arrival.source.ip()) {
            Some(from) => (datagram.from, datagram.offset) = (from, 0),
            None => {
                self.counters.unknown_source += count as u64;
                if self.capture.is_some() {
                    let packets = datagram.buffer[..end].chunks(segment);
                    packets.for_each(|packet| self.capture_received(&arrival, destination, 0, packet));
                }
            }
        }
        datagram
    }

    /// Checks the ICRC of a packet and gives the identification that it was computed with. `None`: counted. `prefix` is
    /// that of the packet before it in the datagram.
    #[inline]
    fn verify(
        &mut self,
        from: PeerIndex,
        arrival: &Arrival,
        prefix: &mut Option<Prefix>,
        expected: u16,
        whole: &[u8],
    ) -> Option<u16> {
        let Some((packet, icrc)) =
            whole.split_last_chunk::<ICRC_BYTES>().filter(|(packet, _)| packet.len() >= BTH_BYTES)
        else {
            self.counters.truncated += 1;
            return None;
        };
        // A handler may have removed or replaced the peer since the packet before this one.
        let Some(entry) = self.peers.get(from).filter(|entry| entry.peer.address == arrival.source.ip()) else {
            self.counters.unknown_source += 1;
            return None;
        };
        if is_frame(whole) {
            let agreed = entry.peer.frames;
            return self.verify_frame(agreed, expected, whole);
        }
        let received = u32::from_le_bytes(*icrc);
        if !entry.peer.icrc && received == 0 {
            return Some(expected);
        }
        let prefix = match prefix {
            Some(prefix) if prefix.packet_bytes() == packet.len() => prefix,
            other => {
                let flow = Flow { addresses: entry.inward, source_port: arrival.source.port() };
                other.insert(flow.prefix(packet.len()))
            }
        };
        let found = prefix
            .explain(expected, packet, received)
            .filter(|&identification| entry.peer.external || identification < FREEFLOW_IDENTIFICATION_COUNT);
        self.counters.bad_icrc += u64::from(found.is_none());
        found
    }

    /// As [`verify`](Self::verify). Nothing in it depends on the identification.
    #[inline]
    fn verify_frame(&mut self, agreed: bool, expected: u16, whole: &[u8]) -> Option<u16> {
        if !agreed {
            self.counters.unwanted_frames += 1;
            return None;
        }
        let intact = is_intact(whole);
        self.counters.bad_icrc += u64::from(!intact);
        intact.then_some(expected)
    }

    #[cold]
    fn capture_received(&mut self, arrival: &Arrival, destination: IpAddr, identification: u16, bytes: &[u8]) {
        let Some(sink) = &mut self.capture else { return };
        sink.packet(&Captured {
            time_ns: now_ns(),
            direction: Direction::Received,
            source: arrival.source,
            destination: SocketAddr::new(destination, UDP_PORT),
            traffic_class: arrival.traffic_class,
            hop_limit: arrival.hop_limit,
            identification,
            bytes,
        });
    }
}
