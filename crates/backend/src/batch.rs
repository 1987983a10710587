//! Packets on their way out: batches that the kernel (or the NIC) cuts into datagrams.
//!
//! A batch has one destination, one socket, one traffic class and one segment length; only its last packet may be
//! shorter. At most one batch of each destination and socket is open, and they are sent in the order of their opening:
//! packets of one flow never overtake each other.
use crate::peers::Entry;
use crate::sys;
use freeflow_wire::ICRC_BYTES;
use freeflow_wire::icrc::{Flow, Prefix};

/// Batches being filled or waiting for room in a socket.
pub const BATCH_COUNT_MAX: usize = 16;
/// Segments that every kernel with UDP_SEGMENT takes in one call.
pub const BATCH_PACKET_COUNT_MAX: u16 = 64;
/// Most payload of an IPv4 datagram: 65535 less IP and UDP headers. The kernel builds one before it
/// cuts it.
const BATCH_BYTES_MAX: usize = 65_507;

/// Where a batch goes. Equal for all packets of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub peer: u32,
    /// Index of the sending socket.
    pub lane: u16,
}

pub(crate) struct Batch {
    buffer: Box<[u8]>,
    used: usize,
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
    icrc: bool,
    flow: Flow,
    /// Of the packets' ICRCs, for the length of the last one.
    prefix: Prefix,
    pub to: sys::Address,
}

/// A slot of the table of batches.
pub(crate) type Slot = usize;

#[derive(Clone, Copy)]
pub(crate) struct Pending {
    pub slot: Slot,
    /// Without the ICRC.
    pub bytes: usize,
}

impl Batch {
    fn fits(&self, traffic_class: u8, length: usize) -> bool {
        !self.closed
            && self.traffic_class == traffic_class
            && length <= self.segment
            && self.count < self.count_max
            && self.used + length <= BATCH_BYTES_MAX
    }

    /// Adds the packet of `bytes` that was written behind the last one. The kernel gives segment i of a batch the
    /// identification i (it counts from the 0 of an unconnected socket with "don't fragment"). `flip`: a bit to spoil.
    pub fn seal(&mut self, bytes: usize, flip: Option<u32>) {
        let packet = &mut self.buffer[self.used..self.used + bytes + ICRC_BYTES];
        let (body, icrc) = packet.split_at_mut(bytes);
        let mut value = 0;
        if self.icrc {
            if self.prefix.packet_bytes() != bytes {
                self.prefix = self.flow.prefix(bytes);
            }
            value = self.prefix.icrc(self.count, body);
        }
        icrc.copy_from_slice(&value.to_le_bytes());
        if let Some(flip) = flip {
            let bit = flip as usize % (packet.len() * 8);
            // The ICRC does not cover byte 4 of the BTH (FECN, BECN): that would go unnoticed.
            let byte = if bit / 8 == 4 { 5 } else { bit / 8 };
            packet[byte] ^= 1 << (bit % 8);
        }
        let length = bytes + ICRC_BYTES;
        self.used += length;
        self.count += 1;
        self.closed |=
            length < self.segment || self.count >= self.count_max || self.used + self.segment > BATCH_BYTES_MAX;
    }

    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// The bytes to be sent, and the segment length if they are more than one packet.
    pub fn unsent(&self) -> (&[u8], Option<u16>) {
        let bytes = &self.buffer[self.skipped..self.used];
        (bytes, (bytes.len() > self.segment).then_some(self.segment as u16))
    }

    /// Packets that are to be sent, in order, with the identification that each gets.
    pub fn packets(&self) -> impl Iterator<Item = (u16, &[u8])> {
        (0..).zip(self.unsent().0.chunks(self.segment.max(1)))
    }

    pub fn unsent_count(&self) -> u64 {
        self.unsent().0.len().div_ceil(self.segment.max(1)) as u64
    }

    /// The first packet to be sent as a datagram of its own: with the ICRC for the identification 0.
    pub fn single(&mut self) -> Option<&[u8]> {
        let end = self.used.min(self.skipped + self.segment);
        let packet = &mut self.buffer[self.skipped..end];
        let body = packet.len().checked_sub(ICRC_BYTES).filter(|&bytes| bytes > 0)?;
        if self.icrc {
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
}

impl Outbox {
    pub fn new() -> Self {
        let key = Key { peer: 0, lane: 0 };
        let nowhere = std::net::IpAddr::from([0, 0, 0, 0]);
        let addresses = freeflow_wire::icrc::Addresses::V4 { source: [0; 4], destination: [0; 4] };
        let flow = Flow { addresses, source_port: 0 };
        let batch = || Batch {
            buffer: vec![0; BATCH_BYTES_MAX].into_boxed_slice(),
            used: 0,
            singly: false,
            skipped: 0,
            count: 0,
            count_max: 0,
            segment: 0,
            key,
            traffic_class: 0,
            closed: true,
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
        batch.used = 0;
        batch.singly = false;
        batch.skipped = 0;
        batch.count = 0;
        batch.count_max = if entry.gso { BATCH_PACKET_COUNT_MAX } else { 1 };
        batch.segment = length;
        batch.key = key;
        batch.traffic_class = traffic_class;
        batch.closed = false;
        batch.icrc = entry.peer.icrc;
        batch.flow = Flow { addresses: entry.outward, source_port: port };
        batch.prefix = batch.flow.prefix(length - ICRC_BYTES);
        batch.to = entry.to;
        self.queue.push(slot);
        self.current = Some(slot);
        Some(slot)
    }

    /// The place for a packet of `bytes` behind those in the batch.
    pub fn place(&mut self, pending: Pending) -> &mut [u8] {
        let batch = &mut self.batches[pending.slot];
        &mut batch.buffer[batch.used..batch.used + pending.bytes]
    }

    pub fn is_empty(&self, slot: Slot) -> bool {
        self.batches[slot].count == 0
    }

    /// Nothing goes in any more.
    pub fn close(&mut self, slot: Slot) {
        self.batches[slot].closed = true;
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
        self.queue.retain(|&other| other != slot);
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

    const KEY: Key = Key { peer: 0, lane: 0 };

    fn peers() -> Peers {
        let (local, address) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let peer = Peer { address, local, icrc: true, external: false, path_mtu_bytes: 4096 };
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
            outbox.place(Pending { slot, bytes }).fill(number as u8);
            outbox.batch_mut(slot).seal(bytes, None);
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
        assert_eq!((batch.unsent_count(), batch.unsent().1), (4, Some(304)));
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
