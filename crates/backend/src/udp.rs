//! The sockets: one on port 4791 for each of this host's addresses, which receives; and some on
//! other ports, which send: switches spread flows over their paths by the source port.
//!
//! The sending sockets are not connected and forbid fragmentation. So the kernel writes the IP identification 0, which
//! the ICRC has to cover, and an ICMP error of one peer is no error of the socket.
use crate::batch::{Key, Outbox, Pending};
use crate::capture::CaptureSink;
use crate::config::UdpConfig;
use crate::counters::WireCounters;
use crate::faults::{Faults, Held, Injector};
use crate::lanes::{BULK_PACKET_BYTES_MIN, FLOWCELL_BYTES, PacketRoute, lane_count, lane_of};
use crate::path::{frame_payload_on, link_mtu, packet_payload, path_mtu};
use crate::peers::{Entry, Peer, PeerIndex, Peers};
use crate::receive::Inbox;
use crate::sys;
use freeflow_shm::Segment;
use freeflow_verbs::{Qpn, Shard};
use freeflow_wire::frame::{self, FRAME_HEADER_BYTES, FRAME_PAYLOAD_BYTES_MAX};
use freeflow_wire::{BTH_BYTES, HEADER_BYTES_MAX, PAYLOAD_BYTES_MAX, dest_qpn};
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

/// Longest packet, bytes: headers, payload and padding, without the ICRC. It is a frame.
pub const PACKET_BYTES_MAX: usize = FRAME_HEADER_BYTES + FRAME_PAYLOAD_BYTES_MAX;
const _: () = assert!(PACKET_BYTES_MAX >= HEADER_BYTES_MAX + PAYLOAD_BYTES_MAX);
/// Bytes of a burst that [`Udp::has_room`] is about. The packets of messages make no more batches than
/// four: first, equal ones, last.
pub const BURST_BYTES_MAX: usize = 1 << 16;
const BURST_BATCH_COUNT: usize = 4;
/// Payload of less is copied faster than referred to: the kernel takes each piece by itself.
pub const REFERENCE_BYTES_MIN: usize = 2048;
/// Batches that may wait for one full socket: the others stay for the rest.
const BLOCKED_BATCH_COUNT_MAX: usize = 2 * BURST_BATCH_COUNT;
/// Hop limit of what is sent.
pub(crate) const HOP_LIMIT: u8 = 64;
/// A sending socket.
pub(crate) struct Lane {
    pub socket: UdpSocket,
    pub address: IpAddr,
    pub port: u16,
    /// Its buffer was full at the last attempt.
    pub blocked: bool,
}

/// See the module and the crate.
pub struct Udp {
    pub(crate) config: UdpConfig,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) peers: Peers,
    pub(crate) outbox: Outbox,
    pending: Option<(Pending, PacketRoute)>,
    pub(crate) inbox: Inbox,
    faults: Option<Box<Injector>>,
    pub(crate) capture: Option<Box<dyn CaptureSink>>,
    pub(crate) counters: WireCounters,
    pub(crate) keys_due_ns: u64,
    /// Keep other programs out of the groups that the listeners are in.
    _guards: Vec<Arc<UdpSocket>>,
}

impl Udp {
    pub(crate) fn new(config: UdpConfig, lanes: Vec<Lane>, inbox: Inbox, guards: Vec<Arc<UdpSocket>>) -> Self {
        Self {
            config,
            lanes,
            peers: Peers::default(),
            outbox: Outbox::new(),
            pending: None,
            inbox,
            faults: None,
            capture: None,
            counters: WireCounters::default(),
            keys_due_ns: u64::MAX,
            _guards: guards,
        }
    }

    pub fn config(&self) -> &UdpConfig {
        &self.config
    }

    /// Sockets to wait for input on (level-triggered).
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.inbox.listeners().iter().map(|listener| listener.socket.as_fd())
    }

    /// Sockets whose buffer was full: when one can be written to, [`flush`](Self::flush) has something to do.
    pub fn blocked_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.lanes.iter().filter(|lane| lane.blocked).map(|lane| lane.socket.as_fd())
    }

    /// Source ports of what is sent from `local`.
    pub fn source_ports(&self, local: IpAddr) -> impl Iterator<Item = u16> {
        self.lanes.iter().filter(move |lane| lane.address == local).map(|lane| lane.port)
    }

    /// Adds a peer, or replaces what was at this index.
    ///
    /// # Errors
    /// `InvalidInput`: `local` is none of this host's addresses, the families differ, the address is the one of another
    /// index, or the index is too large. Nothing is changed then.
    pub fn set_peer(&mut self, index: PeerIndex, peer: Peer) -> io::Result<()> {
        let invalid =
            |text: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {text}", peer.address)));
        let Some(local) = self.config.addresses.iter().position(|&address| address == peer.local) else {
            return invalid("its local address is none of this host's");
        };
        self.outbox.close_peer(index.0);
        let lane_base = local as u16 * lane_count(self.config.source_port_count);
        if !self.peers.set(index, peer, lane_base, self.config.gso) {
            return invalid(
                "its address is another peer's or of another family than the local one, or its engines too many",
            );
        }
        if peer.sealed {
            self.drop_plain(index);
        }
        Ok(())
    }

    /// From now on nothing is accepted from it. What is batched for it is sent.
    pub fn remove_peer(&mut self, index: PeerIndex) {
        self.outbox.close_peer(index.0);
        self.peers.remove(index);
    }

    pub fn peer(&self, index: PeerIndex) -> Option<&Peer> {
        self.peers.get(index).map(|entry| &entry.peer)
    }

    pub fn peer_of(&self, address: IpAddr) -> Option<PeerIndex> {
        self.peers.find(address)
    }

    /// Begins a packet: gives the place for its headers, payload and padding. A packet that was begun and not
    /// committed is abandoned.
    ///
    /// `None`: no room (all buffers wait for full sockets, or as many as may wait for this one), try again after
    /// [`flush`](Self::flush); or there is no such peer, which is counted.
    ///
    /// # Panics
    /// If `bytes` is less than a BTH or more than [`PACKET_BYTES_MAX`].
    #[inline]
    pub fn reserve(&mut self, route: PacketRoute, bytes: usize) -> Option<&mut [u8]> {
        self.reserve_with(route, (bytes, true))
    }

    /// The same for a frame, which has no ICRC.
    #[inline]
    pub fn reserve_frame(&mut self, route: PacketRoute, bytes: usize) -> Option<&mut [u8]> {
        self.reserve_with(route, (bytes, false))
    }

    #[inline]
    fn reserve_with(&mut self, route: PacketRoute, (bytes, icrc): (usize, bool)) -> Option<&mut [u8]> {
        assert!((BTH_BYTES..=PACKET_BYTES_MAX).contains(&bytes), "a packet of {bytes} bytes");
        self.abandon();
        let route = self.settled(route);
        let mut pending = Pending { slot: 0, bytes, icrc, sealed: false };
        pending.slot = self.slot_for(&route, pending.length())?;
        pending.sealed = self.outbox.batch(pending.slot).sealed;
        self.pending = Some((pending, route));
        Some(self.outbox.place(pending))
    }

    /// Whether frames to a peer, with so much payload each, are better [referred](Self::refer) to.
    #[inline]
    pub fn refers(&self, to: PeerIndex, payload_bytes: usize) -> bool {
        payload_bytes >= REFERENCE_BYTES_MIN
            && self.faults.is_none()
            && self.capture.is_none()
            && self.peers.get(to).is_some_and(|entry| entry.gso && !entry.peer.sealed)
    }

    /// Adds a frame whose payload is `bytes` bytes at `offset` of a segment, as they are when it is sent: by the next
    /// [`flush`](Self::flush) at the latest. Where `refers` says no, it is an error of the caller's. False: no
    /// room, or no such peer, as for [`reserve`](Self::reserve); or the bytes are not inside the segment.
    #[inline]
    pub fn refer(
        &mut self,
        route: PacketRoute,
        head: &[u8],
        segment: &Arc<Segment>,
        (offset, bytes): (usize, usize),
    ) -> bool {
        debug_assert!(self.faults.is_none() && self.capture.is_none() && frame::is_frame(head));
        self.abandon();
        let route = self.settled(route);
        let Some(slot) = self.slot_for(&route, head.len() + bytes) else { return false };
        let batch = self.outbox.batch_mut(slot);
        let is_inside = batch.refer(head, segment, offset, bytes);
        if batch.is_closed() && !self.is_blocked(slot) {
            self.send(slot);
        } else if !is_inside && self.outbox.is_empty(slot) {
            self.outbox.release(slot);
        }
        is_inside
    }

    /// The other host said how long frames may be, or that there are none any more (0).
    pub fn set_frame_bytes(&mut self, index: PeerIndex, bytes: u16) {
        if let Some(entry) = self.peers.get_mut(index) {
            entry.peer.frame_bytes = bytes;
        }
    }

    /// The other host said how many engines it has. Nothing is changed if there can't be so many.
    pub fn set_shards(&mut self, index: PeerIndex, count: u8) {
        let Some(shards) = Shard::new(0, count) else { return };
        if let Some(entry) = self.peers.get_mut(index).filter(|entry| entry.shards != shards) {
            (entry.peer.shards, entry.shards) = (count, shards);
            self.outbox.close_peer(index.0);
        }
    }

    /// The number of this host's engine that a packet, or a frame, is for.
    #[inline]
    pub fn shard_of(&self, packet: &[u8]) -> u8 {
        self.config.shard.of_qpn(Qpn(dest_qpn(packet)))
    }

    /// Whether something that is batched is in segments still.
    #[inline]
    pub fn has_references(&self) -> bool {
        self.outbox.referring().is_some()
    }

    /// Whether there is room for a burst of packets with up to [`BURST_BYTES_MAX`] bytes in all:
    /// the socket was not full when it was last written to, and there are buffers. (Should it get
    /// full half-way, and each packet be longer than the one before, [`reserve`](Self::reserve) may
    /// refuse the rest still.) True for a peer that does not exist.
    ///
    /// Flows that [spread](PacketRoute::spreads) change their source ports here, between bursts.
    #[inline]
    pub fn has_room(&mut self, route: &PacketRoute) -> bool {
        let Some(mut entry) = self.peers.get(route.to) else { return true };
        if entry.flowcell_bytes >= FLOWCELL_BYTES && route.spreads && self.config.spread {
            self.begin_flowcell(route.to);
            let Some(same) = self.peers.get(route.to) else { return true };
            entry = same;
        }
        let lane = self.key_of(entry, &self.settled(*route)).lane;
        !self.lanes[usize::from(lane)].blocked && self.outbox.has_free(BURST_BATCH_COUNT, |slot| !self.is_blocked(slot))
    }

    /// Adds the packet begun by [`reserve`](Self::reserve), now written, to its batch.
    #[inline]
    pub fn commit(&mut self) {
        let Some((pending, route)) = self.pending.take() else { return };
        if self.faults.is_some() {
            self.commit_with_faults(pending, Held::new(route, (pending.bytes, pending.icrc), None));
        } else {
            self.seal(pending, None);
        }
    }

    /// The packet begun is not sent.
    #[inline]
    pub fn abandon(&mut self) {
        if let Some((pending, ..)) = self.pending.take() {
            self.drop_if_empty(pending);
        }
    }

    /// Sends all that is batched, and, with faults, what was held back and is due. What a full socket does not take is
    /// kept.
    pub fn flush(&mut self) {
        self.abandon();
        for lane in &mut self.lanes {
            lane.blocked = false;
        }
        if self.faults.is_some() {
            self.release_due(Instant::now());
        }
        let mut at = 0;
        while let Some(&slot) = self.outbox.queue().get(at) {
            if self.is_blocked(slot) || !self.send(slot) {
                at += 1;
            }
        }
        while let Some(slot) = self.outbox.referring() {
            self.copy_references(slot);
        }
    }

    /// Something is batched that [`flush`](Self::flush) would send.
    pub fn has_unsent(&self) -> bool {
        !self.outbox.queue().is_empty()
    }

    pub fn counters(&self) -> &WireCounters {
        &self.counters
    }

    /// Injects faults from now on, or no more; what the ones before held back is sent now.
    pub fn set_faults(&mut self, faults: Option<Faults>) {
        self.flush();
        while let Some((_, slot)) = self.faults.as_mut().and_then(|injector| injector.next()) {
            if !self.release(slot) {
                break;
            }
        }
        if let Some(injector) = &self.faults {
            self.counters.injected_loss += injector.held_count() as u64;
        }
        self.faults = faults.map(|faults| Box::new(Injector::new(faults)));
    }

    /// When [`release_due`](Self::release_due) is to be called: packets are held back by a fault.
    pub fn next_due(&self) -> Option<Instant> {
        self.faults.as_ref()?.next_due()
    }

    /// Puts the packets whose delay is over into their batches.
    pub fn release_due(&mut self, now: Instant) {
        self.abandon();
        while let Some((due, slot)) = self.faults.as_mut().and_then(|injector| injector.next()) {
            if due > now || !self.release(slot) {
                return;
            }
        }
    }

    /// Shows every packet sent and received to `sink` from now on.
    pub fn set_capture(&mut self, sink: Option<Box<dyn CaptureSink>>) {
        self.flush();
        self.capture = sink;
    }

    /// Payload of the longest packets, as an IB MTU, that fit the present route to a peer (256 where not even those
    /// fit). Makes system calls.
    ///
    /// # Errors
    /// No such peer, or no route.
    pub fn path_mtu(&self, index: PeerIndex) -> io::Result<u16> {
        let peer = self.peer(index).ok_or(io::ErrorKind::NotFound)?;
        path_mtu(peer.local, peer.address, peer.sealed)
    }

    // ---- the way out

    /// The route with the flow that it has now.
    #[inline]
    fn settled(&self, route: PacketRoute) -> PacketRoute {
        let flowcell = if route.spreads { self.peers.get(route.to).map_or(0, |entry| entry.flowcell) } else { 0 };
        PacketRoute { flow: route.flow.wrapping_add(flowcell), ..route }
    }

    /// Other ports for flows to this peer that spread, unless a full socket keeps packets of the ports before.
    #[cold]
    fn begin_flowcell(&mut self, to: PeerIndex) {
        self.abandon();
        let is_its = |udp: &Self, slot: usize| udp.outbox.batch(slot).key.peer == to.0;
        if self.outbox.queue().iter().any(|&slot| is_its(self, slot) && self.is_blocked(slot)) {
            return;
        }
        let mut at = 0;
        while let Some(&slot) = self.outbox.queue().get(at) {
            if !is_its(self, slot) {
                at += 1;
                continue;
            }
            self.outbox.close(slot);
            if !self.send(slot) {
                return;
            }
        }
        if let Some(entry) = self.peers.get_mut(to) {
            (entry.flowcell, entry.flowcell_bytes) = (entry.flowcell.wrapping_add(1), 0);
        }
    }

    #[inline]
    fn key_of(&self, entry: &Entry, route: &PacketRoute) -> Key {
        let shard = entry.shards.of_qpn(Qpn(route.qpn));
        let lane = lane_of(route.flow, shard, entry.shards.count(), self.config.source_port_count);
        Key { peer: route.to.0, lane: entry.lane_base + lane, shard }
    }

    #[inline]
    fn slot_for(&mut self, route: &PacketRoute, length: usize) -> Option<usize> {
        let &PacketRoute { to, traffic_class, .. } = route;
        let Some(entry) = self.peers.get(to).filter(|entry| entry.may_send()) else {
            self.count_unsent(to);
            return None;
        };
        let length = length + entry.seal_bytes();
        let key = self.key_of(entry, route);
        let traffic_class = if traffic_class >> 2 == 0 { self.config.dscp << 2 | traffic_class } else { traffic_class };
        if let Some((slot, fits)) = self.outbox.find(key, traffic_class, length) {
            if fits {
                return Some(slot);
            }
            self.outbox.close(slot);
            if !self.is_blocked(slot) {
                self.send(slot);
            }
        }
        self.open_batch(to, key, traffic_class, length)
    }

    fn open_batch(&mut self, to: PeerIndex, key: Key, traffic_class: u8, length: usize) -> Option<usize> {
        let lane = &self.lanes[usize::from(key.lane)];
        let port = lane.port;
        let of_lane = |&&slot: &&usize| self.outbox.batch(slot).key.lane == key.lane;
        if lane.blocked && self.outbox.queue().iter().filter(of_lane).count() >= BLOCKED_BATCH_COUNT_MAX {
            return None;
        }
        loop {
            let entry = self.peers.get(to)?;
            if let Some(slot) = self.outbox.open(key, traffic_class, length, entry, port) {
                return Some(slot);
            }
            let oldest = self.outbox.queue().iter().copied().find(|&slot| !self.is_blocked(slot))?;
            self.outbox.close(oldest);
            self.send(oldest);
        }
    }

    #[inline]
    fn seal(&mut self, pending: Pending, flip: Option<u32>) {
        if pending.sealed {
            return self.seal_with_key(pending, flip);
        }
        self.outbox.batch_mut(pending.slot).seal(pending, flip, None);
        self.send_if_closed(pending.slot);
    }

    #[inline]
    pub(crate) fn send_if_closed(&mut self, slot: usize) {
        if self.outbox.batch(slot).is_closed() && !self.is_blocked(slot) {
            self.send(slot);
        }
    }

    pub(crate) fn drop_if_empty(&mut self, pending: Pending) {
        if self.outbox.is_empty(pending.slot) {
            self.outbox.release(pending.slot);
        }
    }

    fn is_blocked(&self, slot: usize) -> bool {
        self.lanes[usize::from(self.outbox.batch(slot).key.lane)].blocked
    }

    /// Sends a batch and frees its buffer. False: the socket is full, the batch is kept.
    fn send(&mut self, slot: usize) -> bool {
        let batch = self.outbox.batch(slot);
        if batch.singly {
            return self.send_singly(slot);
        }
        if batch.refers_to_poison() {
            return self.send_copied(slot);
        }
        let lane = &mut self.lanes[usize::from(batch.key.lane)];
        let segment = batch.segment();
        let class = (batch.traffic_class != self.config.dscp << 2).then_some(batch.traffic_class);
        let result = match batch.refers() {
            false => sys::send(lane.socket.as_fd(), batch.unsent(), &batch.to, segment, class),
            true => sys::send_parts(lane.socket.as_fd(), batch.parts(), &batch.to, segment, class),
        };
        match result {
            Ok(()) => {
                self.counters.packets_sent += batch.unsent_count();
                self.counters.bytes_sent += batch.unsent_bytes() as u64;
                self.counters.batches_sent += 1;
                if batch.is_bulk(BULK_PACKET_BYTES_MIN)
                    && let Some(entry) = self.peers.get_mut(PeerIndex(batch.key.peer))
                {
                    entry.flowcell_bytes = entry.flowcell_bytes.saturating_add(batch.unsent_bytes() as u32);
                }
                if self.capture.is_some() {
                    self.capture_sent(slot, usize::MAX);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                lane.blocked = true;
                self.counters.send_blocked += 1;
                return false;
            }
            // Payload that it refers to is not there any more: the packets of which it is are still to go.
            Err(error) if batch.refers() && error.raw_os_error() == Some(libc::EFAULT) => {
                return self.send_copied(slot);
            }
            // The route's interface can't have it cut: no checksum offload, a transformation on the way.
            Err(error) if segment.is_some() && is_refusal(&error) => {
                self.segment_no_more(slot);
                return self.send_copied(slot);
            }
            Err(error) => self.give_up(slot, &error),
        }
        self.outbox.release(slot);
        true
    }

    /// As [`send`](Self::send), of a batch that needs no memory but its own.
    #[cold]
    fn send_copied(&mut self, slot: usize) -> bool {
        self.copy_references(slot);
        self.outbox.is_empty(slot) || self.send(slot)
    }

    /// From now on the batch needs no memory but its own. A packet whose payload is not there is lost; one of which
    /// nothing is left frees its buffer.
    #[cold]
    fn copy_references(&mut self, slot: usize) {
        if !self.outbox.batch(slot).refers() {
            return;
        }
        self.counters.send_memory_gone += self.outbox.copy_references(slot);
        if self.outbox.is_empty(slot) {
            self.outbox.release(slot);
        }
    }

    /// This batch is to be sent packet by packet, and later ones to its peer have one packet each.
    #[cold]
    fn segment_no_more(&mut self, slot: usize) {
        self.counters.segmentation_refused += 1;
        self.outbox.close(slot);
        self.outbox.batch_mut(slot).singly = true;
        if let Some(entry) = self.peers.get_mut(PeerIndex(self.outbox.batch(slot).key.peer)) {
            entry.gso = false;
        }
    }

    /// As [`send`](Self::send), one datagram a packet.
    fn send_singly(&mut self, slot: usize) -> bool {
        loop {
            let batch = self.outbox.batch_mut(slot);
            let (to, lane) = (batch.to, &mut self.lanes[usize::from(batch.key.lane)]);
            let class = (batch.traffic_class != self.config.dscp << 2).then_some(batch.traffic_class);
            let Some(packet) = batch.single() else { break };
            match sys::send(lane.socket.as_fd(), packet, &to, None, class) {
                Ok(()) => {
                    self.counters.packets_sent += 1;
                    self.counters.bytes_sent += packet.len() as u64;
                    self.counters.batches_sent += 1;
                    if self.capture.is_some() {
                        self.capture_sent(slot, 1);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    lane.blocked = true;
                    self.counters.send_blocked += 1;
                    return false;
                }
                Err(error) => {
                    self.give_up(slot, &error);
                    break;
                }
            }
            self.outbox.batch_mut(slot).skip_single();
        }
        self.outbox.release(slot);
        true
    }

    /// Counts a batch as dropped, and learns from a packet that was too long.
    #[cold]
    fn give_up(&mut self, slot: usize, error: &io::Error) {
        let batch = self.outbox.batch(slot);
        self.counters.count_send_error(error, batch.unsent_count());
        if error.raw_os_error() == Some(libc::EMSGSIZE)
            && let Some(entry) = self.peers.get_mut(PeerIndex(batch.key.peer))
            && let Ok(bytes) = link_mtu(entry.peer.local, entry.peer.address)
        {
            let (is_v4, sealed) = (entry.peer.local.is_ipv4(), entry.peer.sealed);
            entry.peer.path_mtu_bytes = entry.peer.path_mtu_bytes.min(packet_payload(bytes, is_v4, sealed));
            let frame_bytes = frame_payload_on(bytes, is_v4, sealed).unwrap_or(0);
            entry.peer.frame_bytes = entry.peer.frame_bytes.min(frame_bytes);
        }
    }

    // ---- faults

    #[cold]
    fn commit_with_faults(&mut self, pending: Pending, mut held: Held) {
        let Some(injector) = &mut self.faults else { return };
        let fate = injector.decide();
        let (now, counters) = (Instant::now(), &mut self.counters);
        held.flip = fate.flip;
        counters.injected_corruption += u64::from(fate.flip.is_some() && !fate.lose);
        injector.overtake();
        let packet = &*self.outbox.place(pending);
        let hold_back = !fate.lose && (fate.delay || fate.overtaken.is_some());
        if hold_back {
            counters.injected_delays += u64::from(fate.delay);
            counters.injected_reorders += u64::from(fate.overtaken.is_some());
            let due = if fate.delay { injector.due(now) } else { now };
            counters.injected_overflow += u64::from(!injector.hold(held, packet, due, fate.overtaken));
        }
        if fate.duplicate && !fate.lose {
            counters.injected_duplicates += 1;
            counters.injected_overflow += u64::from(!injector.hold(held, packet, now, None));
        }
        counters.injected_loss += u64::from(fate.lose);
        if fate.lose || hold_back {
            self.drop_if_empty(pending);
        } else {
            self.seal(pending, fate.flip);
        }
        while let Some(slot) = self.faults.as_ref().and_then(|injector| injector.overtaken()) {
            if !self.release(slot) {
                return;
            }
        }
    }

    /// Puts a packet that was held back into its batch. False: there is no room.
    fn release(&mut self, number: u16) -> bool {
        let Some(injector) = &self.faults else { return false };
        let (held, _) = injector.packet(number);
        if self.takes(held.route.to) {
            let mut pending = Pending { slot: 0, bytes: held.bytes, icrc: held.icrc, sealed: false };
            let Some(slot) = self.slot_for(&held.route, pending.length()) else { return false };
            (pending.slot, pending.sealed) = (slot, self.outbox.batch(slot).sealed);
            if let Some(injector) = &self.faults {
                self.outbox.place(pending).copy_from_slice(injector.packet(number).1);
            }
            self.seal(pending, held.flip);
        } else {
            self.count_unsent(held.route.to);
        }
        if let Some(injector) = &mut self.faults {
            injector.gone(number);
        }
        true
    }
}

fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL | libc::EOPNOTSUPP))
}

/// Nanoseconds since the epoch.
pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
