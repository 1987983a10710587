//! Bursts of packets on their way out: payload goes from tenants' memory straight into the packets.
//!
//! If some of it can only be reached by the slow path, the copier of that vNIC reads all of it into
//! a bounce buffer first ([`Stage::Fetch`](crate::memory::copies)); the burst is sent when it comes
//! back, or later if there is no room then.
use crate::dataplane::bursts::{Burst, Unsent};
use crate::dataplane::fabric::Fabric;
use crate::dataplane::ports::{Ports, Session};
use crate::dataplane::siblings::{Origin, Siblings, shard_of};
use crate::dataplane::table::Table;
use crate::memory::copies::{CopyStep, Gone, Walk, session_of};
use crate::memory::page_table::{Piece, Reach};
use crate::memory::transfers::{Arrival, Way};
use freeflow_backend::{PacketRoute, PeerIndex, Udp};
use freeflow_engine::{
    Destination, HostId, IpInfo, PacketHead, SessionId, Source, SourceBody, Span, Token, TransmitOutcome,
};
use freeflow_shm::{AccessError, Segment};
use freeflow_wire::dest_qpn;
use freeflow_wire::frame::{is_frame, is_rc_request};
use std::sync::Arc;

/// Payload that is read in order.
enum Payload<'a> {
    Bytes(&'a [u8]),
    /// One piece of shared memory, from here on.
    Piece(&'a Arc<Segment>, usize),
    Walk(Walk<'a>),
}

impl Payload<'_> {
    #[inline]
    fn read(&mut self, mut into: &mut [u8]) -> Result<(), Gone> {
        match self {
            Self::Bytes(bytes) => {
                let (now, later) = bytes.split_at_checked(into.len()).ok_or(Gone)?;
                into.copy_from_slice(now);
                *bytes = later;
            }
            Self::Piece(segment, offset) => {
                segment.read(*offset, into).map_err(|_| Gone)?;
                *offset += into.len();
                if segment.poisoned() {
                    return Err(Gone);
                }
            }
            Self::Walk(walk) => {
                while !into.is_empty() {
                    let CopyStep { piece: Piece { reach, bytes }, .. } = walk.next(into.len())?.ok_or(Gone)?;
                    let (now, later) = into.split_at_mut(bytes);
                    match reach {
                        Reach::Shared { segment, offset } => segment.read(offset, now).map_err(|_| Gone)?,
                        Reach::Void => now.fill(0),
                        Reach::SlowPath { .. } => return Err(Gone),
                    }
                    if reach.is_poisoned() {
                        return Err(Gone);
                    }
                    into = later;
                }
            }
        }
        Ok(())
    }
}

/// Where packets to a host are written.
enum Outlet<'a> {
    Wire(&'a mut Udp),
    /// Another shard of this router.
    Shard(&'a mut Siblings, u8),
}

impl Outlet<'_> {
    /// Whether there is room for a burst whose first packet has these headers. All its packets are one QP's.
    #[inline]
    fn has_room(&mut self, to: &Destination, head: &[u8]) -> bool {
        match self {
            Self::Wire(udp) => udp.has_room(&route_of(to, head)),
            Self::Shard(siblings, shard) => siblings.has_room(*shard),
        }
    }

    /// The place for a packet with these headers.
    #[inline]
    fn reserve(&mut self, to: &Destination, head: &[u8], bytes: usize) -> Option<&mut [u8]> {
        match self {
            Self::Wire(udp) => match is_frame(head) {
                true => udp.reserve_frame(route_of(to, head), bytes),
                false => udp.reserve(route_of(to, head), bytes),
            },
            Self::Shard(siblings, shard) => siblings.reserve(*shard, bytes),
        }
    }

    #[inline]
    fn commit(&mut self, to: &Destination) {
        match self {
            Self::Wire(udp) => udp.commit(),
            Self::Shard(siblings, _) => {
                let ip = IpInfo { traffic_class: to.traffic_class, hop_limit: to.hop_limit, congestion: false };
                siblings.commit(Origin::Shard, ip);
            }
        }
    }

    fn abandon(&mut self) {
        match self {
            Self::Wire(udp) => udp.abandon(),
            Self::Shard(siblings, _) => siblings.abandon(),
        }
    }

    /// Where there was no room for a packet: to a host that is gone, or sealed and without a key, packets are lost.
    /// There is room, or else those that went out go out again.
    fn refused(&self, to: &Destination) -> TransmitOutcome {
        match self {
            Self::Wire(udp) if !udp.takes(PeerIndex(to.host.0)) => TransmitOutcome::Sent,
            Self::Wire(_) | Self::Shard(..) => TransmitOutcome::Full,
        }
    }
}

impl Fabric {
    /// `None`: nothing leads there, and packets are lost.
    #[inline]
    fn outlet(&mut self, host: HostId) -> Option<Outlet<'_>> {
        match shard_of(host) {
            Some(shard) => self.siblings.as_deref_mut().map(|siblings| Outlet::Shard(siblings, shard)),
            None => self.udp.as_deref_mut().map(Outlet::Wire),
        }
    }
}

/// The way of a packet with these headers.
#[inline]
fn route_of(to: &Destination, head: &[u8]) -> PacketRoute {
    let (flow, traffic_class) = (to.flow, to.traffic_class);
    // Responses keep their order: the requester takes one that is ahead for a loss.
    let spreads = to.selective && to.frame_bytes > 0 && is_rc_request(head);
    PacketRoute { to: PeerIndex(to.host.0), qpn: dest_qpn(head), flow, spreads, traffic_class }
}

/// The headers of a burst's first packet.
#[inline]
fn first_head(packets: &[PacketHead]) -> &[u8] {
    packets.first().map_or(&[], |first| first.header.as_slice())
}

/// Whether the packets of a burst are frames whose payload the kernel had better read from where it lies.
#[inline]
fn refers(outlet: &Outlet<'_>, to: &Destination, packets: &[PacketHead]) -> bool {
    let Outlet::Wire(udp) = outlet else { return false };
    let Some(first) = packets.first().filter(|first| first.is_frame()) else { return false };
    udp.refers(PeerIndex(to.host.0), usize::from(first.payload_bytes))
}

/// Hands the packets of a burst to the backend, with the places of their payload in a segment.
fn refer(
    outlet: &mut Outlet<'_>,
    to: &Destination,
    packets: &[PacketHead],
    (segment, mut offset): (&Arc<Segment>, usize),
) -> TransmitOutcome {
    let Outlet::Wire(udp) = outlet else { return TransmitOutcome::Full };
    let peer = PeerIndex(to.host.0);
    let length: usize = packets.iter().map(|packet| usize::from(packet.payload_bytes)).sum();
    if segment.poisoned() || offset.checked_add(length).is_none_or(|end| end > segment.bytes()) {
        return TransmitOutcome::Fault;
    }
    for packet in packets {
        let bytes = usize::from(packet.payload_bytes);
        let head = packet.header.as_slice();
        if !udp.refer(route_of(to, head), head, segment, (offset, bytes)) {
            // To a host that is gone, packets are lost. There is room, or else those that went out go out again.
            return if udp.peer(peer).is_none() { TransmitOutcome::Sent } else { TransmitOutcome::Full };
        }
        offset += bytes;
    }
    TransmitOutcome::Sent
}

/// Writes the packets of a burst into the buffers of the outlet.
#[inline]
fn send(
    outlet: &mut Outlet<'_>,
    to: &Destination,
    packets: &[PacketHead],
    payload: &mut Payload<'_>,
) -> TransmitOutcome {
    for packet in packets {
        let head = packet.header.as_slice();
        let Some(place) = outlet.reserve(to, head, packet.bytes()) else { return outlet.refused(to) };
        let (head, rest) = place.split_at_mut(usize::from(packet.header.length));
        head.copy_from_slice(&packet.header.bytes[..head.len()]);
        let (body, padding) = rest.split_at_mut(usize::from(packet.payload_bytes));
        if payload.read(body).is_err() {
            outlet.abandon();
            return TransmitOutcome::Fault;
        }
        padding.fill(0);
        outlet.commit(to);
    }
    TransmitOutcome::Sent
}

/// The one piece of shared memory that a span is, as most are.
#[inline]
fn whole<'a>(sessions: &'a Table<SessionId, Session>, span: &Span) -> Option<Payload<'a>> {
    let piece = sessions.get(span.session)?.memory.piece_of(span, span.address, span.length as usize);
    match piece.reach {
        Reach::Shared { segment, offset } if piece.bytes == span.length as usize => {
            Some(Payload::Piece(segment, offset))
        }
        _ => None,
    }
}

/// Whether a page of the piece is missing. Looked at before a packet is made: none goes out twice.
#[inline]
fn is_missing(piece: &Payload<'_>, bytes: usize) -> bool {
    matches!(piece, Payload::Piece(segment, offset) if segment.probe(*offset, bytes) == Err(AccessError::Missing))
}

impl Ports {
    pub(crate) fn start_transmit(
        &mut self,
        token: Token,
        to: &Destination,
        packets: &[PacketHead],
        payload: Source<'_>,
    ) -> TransmitOutcome {
        if let (Some(shard), Some(siblings)) = (shard_of(to.host), &mut self.fabric.siblings) {
            siblings.introduce(shard, first_head(packets));
        }
        let Some(mut outlet) = self.fabric.outlet(to.host) else { return TransmitOutcome::Sent };
        debug_assert!(payload.prefix.is_empty(), "a GRH is the receiver's");
        if !outlet.has_room(to, first_head(packets)) {
            self.fabric.blocked = true;
            return TransmitOutcome::Full;
        }
        let spans = match payload.body {
            SourceBody::Bytes(bytes) => return send(&mut outlet, to, packets, &mut Payload::Bytes(bytes)),
            SourceBody::Spans(spans) => spans,
        };
        if self.blocks.is_alert(self.now) && self.avoids_spans(spans) {
            return self.fetch(token, to, packets, payload, Way::ByOwner);
        }
        let mut source = match spans {
            [] => Payload::Bytes(&[]),
            [span] if let Some(piece) = whole(&self.sessions, span) => {
                if is_missing(&piece, span.length as usize) {
                    return self.fetch(token, to, packets, payload, Way::ByOwner);
                }
                piece
            }
            _ => match self.sessions_reach(spans) {
                Ok(None) => Payload::Walk(Walk::new(&self.sessions, spans)),
                Ok(Some(way)) => return self.fetch(token, to, packets, payload, way),
                Err(Gone) => return TransmitOutcome::Fault,
            },
        };
        let is_alert = self.blocks.is_alert(self.now);
        let Some(mut outlet) = self.fabric.outlet(to.host) else { return TransmitOutcome::Sent };
        let outcome = match source {
            // Memory that holds up whoever reads it does so here, where it is known whose it is.
            Payload::Piece(segment, offset) if !is_alert && refers(&outlet, to, packets) => {
                refer(&mut outlet, to, packets, (segment, offset))
            }
            _ => send(&mut outlet, to, packets, &mut source),
        };
        if outcome == TransmitOutcome::Fault {
            self.fail_if_poisoned(spans);
        }
        outcome
    }

    /// Payload of [`Fabric::transmit_records`](freeflow_engine::Fabric::transmit_records) is copied at once, or not at
    /// all.
    pub(crate) fn start_records(&mut self, to: &Destination, head: &[u8], payload: Source<'_>) -> TransmitOutcome {
        let Some(mut outlet) = self.fabric.outlet(to.host) else { return TransmitOutcome::Sent };
        if !outlet.has_room(to, head) {
            self.fabric.blocked = true;
            return TransmitOutcome::Full;
        }
        let (spans, inline) = match payload.body {
            SourceBody::Bytes(bytes) => (&[][..], bytes),
            SourceBody::Spans(spans) => (spans, &[][..]),
        };
        if self.blocks.is_alert(self.now) && !spans.is_empty() && self.avoids_spans(spans) {
            return TransmitOutcome::Fault;
        }
        let bytes = inline.len() + spans.iter().map(|span| span.length as usize).sum::<usize>();
        let Some(mut outlet) = self.fabric.outlet(to.host) else { return TransmitOutcome::Sent };
        let Some(place) = outlet.reserve(to, head, head.len() + bytes) else { return outlet.refused(to) };
        let (before, mut rest) = place.split_at_mut(head.len());
        before.copy_from_slice(head);
        rest[..inline.len()].copy_from_slice(inline);
        for span in spans {
            let (part, later) = rest.split_at_mut(span.length as usize);
            rest = later;
            let Some(Payload::Piece(segment, offset)) = whole(&self.sessions, span) else {
                outlet.abandon();
                return TransmitOutcome::Fault;
            };
            if segment.read(offset, part).is_err() || segment.poisoned() {
                outlet.abandon();
                return TransmitOutcome::Fault;
            }
        }
        outlet.commit(to);
        TransmitOutcome::Sent
    }

    /// How the copier has to read it; none if all of it is shared memory that is there, or void.
    fn sessions_reach(&self, spans: &[Span]) -> Result<Option<Way>, Gone> {
        let (mut walk, mut way) = (Walk::new(&self.sessions, spans), None);
        while let Some(step) = walk.next(usize::MAX)? {
            match step.piece.reach {
                Reach::SlowPath { .. } => way = way.or(Some(Way::Mapped)),
                Reach::Shared { segment, offset } if is_missing(&Payload::Piece(segment, offset), step.piece.bytes) => {
                    way = Some(Way::ByOwner);
                }
                Reach::Shared { .. } | Reach::Void => {}
            }
        }
        Ok(way)
    }

    #[cold]
    fn fail_if_poisoned(&mut self, spans: &[Span]) {
        let mut walk = Walk::new(&self.sessions, spans);
        let mut poisoned = false;
        while let Ok(Some(step)) = walk.next(usize::MAX) {
            poisoned |= step.piece.reach.is_poisoned();
        }
        if poisoned && let Some(session) = session_of(spans) {
            self.fail(session, "a shared segment lost its memory");
        }
    }

    fn fetch(
        &mut self,
        token: Token,
        to: &Destination,
        packets: &[PacketHead],
        payload: Source<'_>,
        way: Way,
    ) -> TransmitOutcome {
        let bytes: usize = packets.iter().map(|packet| usize::from(packet.payload_bytes)).sum();
        let burst = Box::new(Burst { to: *to, packets: packets.to_vec() });
        match self.start_fetch(token, burst, payload, (bytes, way)) {
            Ok(()) => TransmitOutcome::Pending,
            Err(_) => TransmitOutcome::Fault,
        }
    }

    /// Sends what was fetched, in the order in which it came; reports the copies that are done with
    /// that.
    pub(crate) fn send_fetched(&mut self) -> Option<Arrival> {
        let fabric = &mut self.fabric;
        let unsent = fabric.unsent.pop_front()?;
        let Unsent { token, burst, bounce } = &unsent;
        let (token, to) = (*token, &burst.to);
        let is_sent = match fabric.outlet(to.host) {
            Some(mut outlet) => {
                let mut payload = Payload::Bytes(bounce);
                outlet.has_room(to, first_head(&burst.packets))
                    && send(&mut outlet, to, &burst.packets, &mut payload) != TransmitOutcome::Full
            }
            None => true,
        };
        if !is_sent {
            fabric.unsent.push_front(unsent);
            fabric.blocked = true;
            return None;
        }
        self.transfers.bounces.keep(unsent.bounce);
        Some(Arrival::Copied(token, Ok(())))
    }
}
