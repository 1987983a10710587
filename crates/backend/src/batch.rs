//! Packets on their way out: batches that the kernel (or the NIC) cuts into datagrams.
//!
//! A batch has one destination, one socket, one traffic class and one segment length; only its last packet may be
//! shorter. At most one batch of each destination and socket is open, and they are sent in the order of their opening:
//! packets of one flow never overtake each other.
//!
//! The payload of frames may be *referred to*: the kernel reads it from a segment when the batch is sent. Nothing that
//! the receiver itself checks covers it, so a program may write to it meanwhile.
//!
//! Invariant: a batch holds each segment that it refers to; and between two turns of the router, or while a segment is
//! taken from whoever named it, no batch refers to any: [`crate::Udp::flush`] sends them, or copies what a full socket
//! does not take.
use crate::peers::Entry;
use crate::seal::SendKey;
use crate::sys;
use freeflow_shm::Segment;
use freeflow_wire::ICRC_BYTES;
use freeflow_wire::frame::{is_frame, protected_bytes};
use freeflow_wire::icrc::{Flow, Prefix};
use freeflow_wire::sealed::{SEAL_BYTES, SEAL_HEADER_BYTES};
use std::ops::Range;
use std::sync::Arc;

/// Batches being filled or waiting for room in a socket.
pub const BATCH_COUNT_MAX: usize = 16;
/// Segments that every kernel with UDP_SEGMENT takes in one call.
pub const BATCH_PACKET_COUNT_MAX: u16 = 64;
/// Most payload of an IPv4 datagram: 65535 less IP and UDP headers. The kernel builds one before it
/// cuts it.
const BATCH_BYTES_MAX: usize = 65_507;

/// Pieces of a batch: a header and a payload each.
const PART_COUNT_MAX: usize = 2 * BATCH_PACKET_COUNT_MAX as usize;

/// Where a batch goes. Equal for all packets of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub peer: u32,
    /// Index of the sending socket.
    pub lane: u16,
    /// The peer's engine.
    pub shard: u8,
}

pub(crate) struct Batch {
    buffer: Box<[u8]>,
    /// Bytes in the buffer: headers, and payload that was copied.
    filled: usize,
    /// Bytes of all packets.
    used: usize,
    /// The packets, piece by piece, if some payload is referred to; else they lie in the buffer.
    parts: Vec<sys::Part>,
    /// The payload that is referred to, in the order of the packets.
    references: Vec<Reference>,
    /// The kernel would not cut it: packets are sent one by one.
    pub singly: bool,
    /// Bytes at the front that are sent already.
    skipped: usize,
    count: u16,
    count_max: u16,
    /// Bytes of each packet with its ICRC, but the last.
    segment: usize,
    pub key: Key,
    pub traffic_class: u8,
    closed: bool,
    /// So is each packet in it.
    pub sealed: bool,
    icrc: bool,
    flow: Flow,
    /// Of the packets' ICRCs, for the length of the last one.
    prefix: Prefix,
    pub to: sys::Address,
}

/// A slot of the table of batches.
pub(crate) type Slot = usize;

/// A packet that is being written.
#[derive(Clone, Copy)]
pub(crate) struct Pending {
    pub slot: Slot,
    /// Without the ICRC.
    pub bytes: usize,
    /// Behind the packet comes an ICRC; not so a frame.
    pub icrc: bool,
    /// Around all of it comes a seal.
    pub sealed: bool,
}

impl Pending {
    /// Bytes that it takes in a batch.
    pub fn length(&self) -> usize {
        self.bytes + if self.icrc { ICRC_BYTES } else { 0 } + if self.sealed { SEAL_BYTES } else { 0 }
    }

    /// Where it lies among these.
    fn range(&self) -> Range<usize> {
        let begin = if self.sealed { SEAL_HEADER_BYTES } else { 0 };
        begin..begin + self.bytes
    }
}

/// Payload that the kernel reads from where it lies.
struct Reference {
    /// Which packet of the batch it belongs to.
    packet: u16,
    segment: Arc<Segment>,
    offset: usize,
    bytes: usize,
}

impl Batch {
    fn fits(&self, traffic_class: u8, length: usize) -> bool {
        !self.closed
            && self.traffic_class == traffic_class
            && length <= self.segment
            && self.count < self.count_max
            && self.used + length <= BATCH_BYTES_MAX
    }

    /// Adds the packet that was written behind the last one. The kernel gives segment i of a batch the
    /// identification i (it counts from the 0 of an unconnected socket with "don't fragment"). `flip`: a bit to spoil.
    /// `key`: of a sealed packet.
    pub fn seal(&mut self, pending: Pending, flip: Option<u32>, key: Option<&mut SendKey>) {
        let (bytes, length) = (pending.bytes, pending.length());
        let packet = &mut self.buffer[self.filled..self.filled + length];
        if pending.icrc {
            let (body, icrc) = packet[pending.range().start..].split_at_mut(bytes);
            let icrc = &mut icrc[..ICRC_BYTES];
            let mut value = 0;
            if self.icrc {
                if self.prefix.packet_bytes() != bytes {
                    self.prefix = self.flow.prefix(bytes);
                }
                value = self.prefix.icrc(self.count, body);
            }
            icrc.copy_from_slice(&value.to_le_bytes());
        }
        if let Some(key) = key {
            key.seal(packet, self.key.shard);
        }
        if let Some(flip) = flip {
            // Behind a frame's headers a wrong bit is for the UDP checksum, which the kernel has yet to compute.
            let within = if pending.icrc || pending.sealed { packet.len() } else { protected_bytes(packet) };
            let bit = flip as usize % (within * 8);
            // The ICRC does not cover byte 4 of the BTH (FECN, BECN): that would go unnoticed.
            let byte = if bit / 8 == 4 { 5 } else { bit / 8 };
            packet[byte] ^= 1 << (bit % 8);
        }
        if self.refers() {
            let part = sys::Part::of(&self.buffer[self.filled..self.filled + length]);
            self.add_part(part);
        }
        self.filled += length;
        self.note_packet(length);
    }

    /// Of a sealed packet that was written: its ICRC is 0.
    pub fn clear_icrc(&mut self, pending: Pending) {
        if pending.icrc {
            self.buffer[self.filled + pending.range().end..][..ICRC_BYTES].fill(0);
        }
    }

    /// All that a packet seals, between header and tag.
    pub fn text(&self, pending: Pending) -> &[u8] {
        let icrc_bytes = if pending.icrc { ICRC_BYTES } else { 0 };
        &self.buffer[self.filled + pending.range().start..][..pending.bytes + icrc_bytes]
    }

    fn note_packet(&mut self, length: usize) {
        self.used += length;
        self.count += 1;
        self.closed |=
            length < self.segment || self.count >= self.count_max || self.used + self.segment > BATCH_BYTES_MAX;
    }

    fn add_part(&mut self, part: sys::Part) {
        if !self.parts.last_mut().is_some_and(|last| last.join(part)) {
            self.parts.push(part);
        }
    }

    /// Some payload is not in the buffer.
    #[inline]
    pub fn refers(&self) -> bool {
        !self.parts.is_empty()
    }

    /// A segment that it refers to lost its memory: other bytes are in their place.
    pub fn refers_to_poison(&self) -> bool {
        self.references.iter().any(|reference| reference.segment.poisoned())
    }

    /// Adds a frame: its headers, and the payload that `bytes` bytes at `offset` of a segment are when the batch is
    /// sent. False: they are not inside.
    pub fn refer(&mut self, head: &[u8], segment: &Arc<Segment>, offset: usize, bytes: usize) -> bool {
        if self.sealed {
            return false;
        }
        let Some(payload) = sys::Part::of_segment(segment, offset, bytes) else { return false };
        if !self.refers() && self.filled > 0 {
            self.parts.push(sys::Part::of(&self.buffer[..self.filled]));
        }
        let place = &mut self.buffer[self.filled..self.filled + head.len()];
        place.copy_from_slice(head);
        let part = sys::Part::of(place);
        self.add_part(part);
        self.parts.push(payload);
        self.references.push(Reference { packet: self.count, segment: segment.clone(), offset, bytes });
        self.filled += head.len();
        self.note_packet(head.len() + bytes);
        true
    }

    pub fn parts(&self) -> &[sys::Part] {
        &self.parts
    }

    /// Copies all payload that is referred to into the packets, in `room`, which becomes the buffer. A packet whose
    /// payload is not there any more is left out; gives the number of these.
    pub fn copy_references(&mut self, room: &mut Box<[u8]>) -> u64 {
        let (mut from, mut to, mut left_out) = (0, 0, 0);
        let mut references = self.references.drain(..).peekable();
        let (count, mut rest) = (self.count, self.used);
        for packet in 0..count {
            let length = rest.min(self.segment);
            rest -= length;
            let place = &mut room[to..to + length];
            let reference = references.next_if(|reference| reference.packet == packet);
            let own = length - reference.as_ref().map_or(0, |reference| reference.bytes);
            let (head, payload) = place.split_at_mut(own);
            head.copy_from_slice(&self.buffer[from..from + own]);
            from += own;
            let is_there = reference.is_none_or(|Reference { segment, offset, .. }| {
                segment.read(offset, payload).is_ok() && !segment.poisoned()
            });
            to += if is_there { length } else { 0 };
            left_out += u64::from(!is_there);
        }
        drop(references);
        std::mem::swap(&mut self.buffer, room);
        (self.filled, self.used) = (to, to);
        self.count -= left_out as u16;
        self.parts.clear();
        left_out
    }

    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// The bytes to be sent, if none is [referred](Self::refers) to.
    pub fn unsent(&self) -> &[u8] {
        &self.buffer[self.skipped..self.filled]
    }

    pub fn unsent_bytes(&self) -> usize {
        self.used - self.skipped
    }

    /// The segment length, if what is to be sent is more than one packet.
    pub fn segment(&self) -> Option<u16> {
        (self.unsent_bytes() > self.segment).then_some(self.segment as u16)
    }

    /// Whether its packets, but the last, have so many bytes.
    pub fn is_bulk(&self, packet_bytes_min: usize) -> bool {
        self.segment >= packet_bytes_min
    }

    /// Packets that are to be sent, in order, with the identification that each gets.
    pub fn packets(&self) -> impl Iterator<Item = (u16, &[u8])> {
        (0..).zip(self.unsent().chunks(self.segment.max(1)))
    }

    pub fn unsent_count(&self) -> u64 {
        self.unsent_bytes().div_ceil(self.segment.max(1)) as u64
    }

    /// The first packet to be sent as a datagram of its own: with the ICRC for the identification 0.
    pub fn single(&mut self) -> Option<&[u8]> {
        let end = self.used.min(self.skipped + self.segment);
        let packet = &mut self.buffer[self.skipped..end];
        let body = packet.len().checked_sub(ICRC_BYTES).filter(|&bytes| bytes > 0)?;
        if self.icrc && !is_frame(packet) {
            let value = self.flow.icrc(0, &packet[..body]);
            packet[body..].copy_from_slice(&value.to_le_bytes());
        }
        Some(packet)
    }

    /// The packet that [`single`](Self::single) gave is out.
    pub fn skip_single(&mut self) {
        self.skipped = self.used.min(self.skipped + self.segment);
    }
}

/// All batches of a [`crate::Udp`].
pub(crate) struct Outbox {
    batches: Vec<Batch>,
    /// The last one freed is on top: its buffer is in the cache.
    free: Vec<Slot>,
    /// Open and closed ones that are not sent, in the order of their opening.
    queue: Vec<Slot>,
    /// The batch of the last packet: most packets go where the last one went.
    current: Option<Slot>,
    /// A buffer beside those of the batches.
    room: Box<[u8]>,
}

impl Outbox {
    pub fn new() -> Self {
        let key = Key { peer: 0, lane: 0, shard: 0 };
        let nowhere = std::net::IpAddr::from([0, 0, 0, 0]);
        let addresses = freeflow_wire::icrc::Addresses::V4 { source: [0; 4], destination: [0; 4] };
        let flow = Flow { addresses, source_port: 0 };
        let batch = || Batch {
            buffer: vec![0; BATCH_BYTES_MAX].into_boxed_slice(),
            filled: 0,
            used: 0,
            parts: Vec::with_capacity(PART_COUNT_MAX),
            references: Vec::with_capacity(BATCH_PACKET_COUNT_MAX.into()),
            singly: false,
            skipped: 0,
            count: 0,
            count_max: 0,
            segment: 0,
            key,
            traffic_class: 0,
            closed: true,
            sealed: false,
            icrc: true,
            flow,
            prefix: flow.prefix(0),
            to: sys::Address::new(nowhere, 0),
        };
        Self {
            batches: (0..BATCH_COUNT_MAX).map(|_| batch()).collect(),
            free: (0..BATCH_COUNT_MAX).rev().collect(),
            queue: Vec::with_capacity(BATCH_COUNT_MAX),
            current: None,
            room: vec![0; BATCH_BYTES_MAX].into_boxed_slice(),
        }
    }

    pub fn batch(&self, slot: Slot) -> &Batch {
        &self.batches[slot]
    }

    pub fn batch_mut(&mut self, slot: Slot) -> &mut Batch {
        &mut self.batches[slot]
    }

    /// Whether so many buffers are free, or will be when what may be sent is.
    #[inline]
    pub fn has_free(&self, count: usize, may_send: impl Fn(Slot) -> bool) -> bool {
        self.free.len() >= count || self.free.len() + self.queue.iter().filter(|&&slot| may_send(slot)).count() >= count
    }

    /// Slots in the order in which they may be sent.
    pub fn queue(&self) -> &[Slot] {
        &self.queue
    }

    /// The open batch of this destination, and whether a packet of `length` (with its ICRC) goes in.
    pub fn find(&mut self, key: Key, traffic_class: u8, length: usize) -> Option<(Slot, bool)> {
        let is_it = |slot: &Slot| self.batches[*slot].key == key && !self.batches[*slot].closed;
        let slot = self.current.filter(is_it).or_else(|| self.queue.iter().copied().find(is_it))?;
        self.current = Some(slot);
        Some((slot, self.batches[slot].fits(traffic_class, length)))
    }

    /// Opens a batch for packets of `length` (with the ICRC). `None`: no buffer is free.
    pub fn open(&mut self, key: Key, traffic_class: u8, length: usize, entry: &Entry, port: u16) -> Option<Slot> {
        let slot = self.free.pop()?;
        let batch = &mut self.batches[slot];
        batch.filled = 0;
        batch.used = 0;
        batch.parts.clear();
        batch.references.clear();
        batch.singly = false;
        batch.skipped = 0;
        batch.count = 0;
        batch.count_max = if entry.gso { BATCH_PACKET_COUNT_MAX } else { 1 };
        batch.segment = length;
        batch.key = key;
        batch.traffic_class = traffic_class;
        batch.closed = false;
        batch.sealed = entry.peer.sealed;
        batch.icrc = entry.peer.icrc;
        batch.flow = Flow { addresses: entry.outward, source_port: port };
        batch.prefix = batch.flow.prefix(length.saturating_sub(ICRC_BYTES));
        batch.to = entry.to;
        self.queue.push(slot);
        self.current = Some(slot);
        Some(slot)
    }

    /// The place for a packet of `bytes` behind those in the batch.
    pub fn place(&mut self, pending: Pending) -> &mut [u8] {
        let batch = &mut self.batches[pending.slot];
        &mut batch.buffer[batch.filled..][pending.range()]
    }

    /// The first batch of the queue that refers to payload.
    pub fn referring(&self) -> Option<Slot> {
        self.queue.iter().copied().find(|&slot| self.batches[slot].refers())
    }

    /// Copies the payload that a batch refers to into it; gives the number of packets whose payload was not there.
    pub fn copy_references(&mut self, slot: Slot) -> u64 {
        self.batches[slot].copy_references(&mut self.room)
    }

    pub fn is_empty(&self, slot: Slot) -> bool {
        self.batches[slot].count == 0
    }

    /// Nothing goes in any more.
    pub fn close(&mut self, slot: Slot) {
        self.batches[slot].closed = true;
    }

    /// The first batch to a peer whose packets are not sealed.
    pub fn plain_of(&self, peer: u32) -> Option<Slot> {
        let is_it = |&slot: &Slot| self.batches[slot].key.peer == peer && !self.batches[slot].sealed;
        self.queue.iter().copied().find(is_it)
    }

    /// Closes all open batches to a peer: what is in them still goes where it was to go.
    pub fn close_peer(&mut self, peer: u32) {
        for &slot in &self.queue {
            if self.batches[slot].key.peer == peer {
                self.batches[slot].closed = true;
            }
        }
    }

    /// Sent, or given up.
    pub fn release(&mut self, slot: Slot) {
        let Some(place) = self.queue.iter().position(|&other| other == slot) else {
            debug_assert!(false, "a batch is released once");
            return;
        };
        self.batches[slot].parts.clear();
        self.batches[slot].references.clear();
        self.queue.remove(place);
        self.free.push(slot);
        if self.current == Some(slot) {
            self.current = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::{Peer, PeerIndex, Peers};

    const KEY: Key = Key { peer: 0, lane: 0, shard: 0 };

    fn peers() -> Peers {
        let (local, address) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let (path_mtu_bytes, frame_bytes) = (4096, 4096);
        let (icrc, frames) = (true, true);
        let (external, sealed, shards) = (false, false, 1);
        let peer = Peer { address, local, icrc, external, path_mtu_bytes, frames, frame_bytes, sealed, shards };
        let mut peers = Peers::default();
        assert!(peers.set(PeerIndex(0), peer, 0, true));
        peers
    }

    /// A batch with packets of these lengths (without the ICRC).
    fn filled(outbox: &mut Outbox, peers: &Peers, lengths: &[usize]) -> Slot {
        let entry = peers.get(PeerIndex(0)).expect("peer");
        let slot = outbox.open(KEY, 0, lengths[0] + ICRC_BYTES, entry, 0xc000).expect("free");
        for (number, &bytes) in lengths.iter().enumerate() {
            assert_eq!(outbox.find(KEY, 0, bytes + ICRC_BYTES), Some((slot, true)));
            let pending = Pending { slot, bytes, icrc: true, sealed: false };
            outbox.place(pending).fill(number as u8);
            outbox.batch_mut(slot).seal(pending, None, None);
        }
        slot
    }

    fn is_good(batch: &Batch, identification: u16, packet: &[u8]) -> bool {
        let (body, icrc) = packet.split_last_chunk::<ICRC_BYTES>().expect("ICRC");
        u32::from_le_bytes(*icrc) == batch.flow.icrc(identification, body)
    }

    #[test]
    fn packets_bear_the_icrc_of_their_segment_or_of_a_datagram_of_their_own() {
        let (mut outbox, peers) = (Outbox::new(), peers());
        let lengths = [300, 300, 300, 20];
        let slot = filled(&mut outbox, &peers, &lengths);
        let batch = outbox.batch_mut(slot);
        assert!(batch.is_closed());
        assert_eq!((batch.unsent_count(), batch.segment()), (4, Some(304)));
        assert!(batch.packets().all(|(identification, packet)| is_good(batch, identification, packet)));
        for (number, bytes) in lengths.into_iter().enumerate() {
            assert_eq!(batch.unsent_count(), 4 - number as u64);
            let packet = batch.single().expect("packet").to_vec();
            assert_eq!((packet.len(), packet[0]), (bytes + ICRC_BYTES, number as u8));
            assert!(is_good(batch, 0, &packet));
            batch.skip_single();
        }
        assert_eq!(batch.single(), None);
        assert_eq!(batch.unsent_count(), 0);
    }

    #[test]
    fn batches_are_bounded() {
        let (mut outbox, peers) = (Outbox::new(), peers());
        let slot = filled(&mut outbox, &peers, &[16; BATCH_PACKET_COUNT_MAX as usize]);
        assert!(outbox.batch(slot).is_closed());
        let slot = filled(&mut outbox, &peers, &[4136; 15]);
        assert!(outbox.batch(slot).is_closed(), "no sixteenth fits");
        assert_eq!(outbox.find(KEY, 0, 20), None, "closed ones take nothing");
        for _ in 2..BATCH_COUNT_MAX {
            filled(&mut outbox, &peers, &[100, 16]);
        }
        assert!(outbox.open(KEY, 0, 20, peers.get(PeerIndex(0)).expect("peer"), 0xc000).is_none());
        outbox.release(slot);
        assert_eq!(filled(&mut outbox, &peers, &[16]), slot, "the last one freed comes first");
        assert_eq!(outbox.find(KEY, 8, 20), Some((slot, false)), "another traffic class");
        assert_eq!(outbox.find(KEY, 0, 21), Some((slot, false)), "a longer packet");
        assert_eq!(outbox.find(Key { lane: 1, ..KEY }, 0, 20), None);
    }
}
