//! Packets in and out: the worker's dealings with the sockets, and with the other shards of its router.
//!
//! Looking at a socket is a system call, so it is not done in every turn: every [`LOOK_ACTIVE`]
//! while packets flow, and every [`LOOK_QUIET`] when none has for [`ACTIVE`]. A worker that sleeps
//! is woken by them at once.
use crate::dataplane::event::ManagementReceived;
use crate::dataplane::fabric::Fabric;
use crate::dataplane::siblings::{Attempt, Origin};
use crate::dataplane::worker::Worker;
use crate::peering::PeersHandle;
use freeflow_backend::{Received, Udp};
use freeflow_engine::{HostId, IpInfo, Violation, ViolationKind};
use freeflow_verbs::{Duration, Instant, Qpn, Shard};
use freeflow_wire::dest_qpn;
use freeflow_wire::records::message_count;
use std::io;
use std::sync::atomic::Ordering::Relaxed;

/// Packets taken in one turn, about: then others have theirs, and what is acknowledged goes out. A quarter of a window
/// of 4 KiB packets, so that a sender with a whole window on the way never stands still.
const TURN_PACKETS_MAX: usize = 64;
/// The same of messages, of which a frame may have several ([`freeflow_wire::records`]).
const TURN_MESSAGES_MAX: usize = 256;
/// Fetched bursts that are sent in one turn.
const TURN_BURSTS_MAX: usize = 256;
/// Packets went either way not longer ago than this.
const ACTIVE: Duration = Duration::from_micros(200);
const LOOK_ACTIVE: Duration = Duration(500);
const LOOK_QUIET: Duration = Duration::from_micros(10);

impl Fabric {
    /// Whether packets have gone either way just now.
    #[inline]
    pub fn is_active(&self, now: Instant) -> bool {
        self.is_active_within(now, ACTIVE)
    }

    /// The same of a longer time.
    #[inline]
    pub fn is_active_within(&self, now: Instant, time: Duration) -> bool {
        self.has_hosts() && now - self.active_at < time
    }

    /// Whether it is time to look for datagrams.
    #[inline]
    fn is_due(&self, now: Instant) -> bool {
        let interval = if self.is_active(now) { LOOK_ACTIVE } else { LOOK_QUIET };
        self.is_open() && now - self.looked_at >= interval
    }

    /// Whether a packet from a socket is for this shard; one for another is handed on.
    #[inline]
    fn keeps(&mut self, shard: Shard, received: &Received<'_>, ip: IpInfo) -> bool {
        let qpn = Qpn(dest_qpn(received.packet));
        let (owner, from) = (shard.of_qpn(qpn), received.source);
        if owner == shard.index() {
            self.relay_to_group(qpn, from, ip, received.packet);
        } else if let Some(siblings) = &mut self.siblings {
            siblings.hand_on(owner, Origin::Address(from), ip, received.packet, None);
        }
        owner == shard.index()
    }

    /// From now on no packet that waits refers to memory of a program.
    pub(crate) fn end_references(&mut self) {
        if let Some(udp) = &mut self.udp
            && udp.has_references()
        {
            udp.flush();
        }
    }

    /// A datagram is there, as the kernel says: the next turn looks.
    pub fn note_arrival(&mut self) {
        self.looked_at = Instant(0);
    }

    /// When the worker has something to do for it.
    pub fn next_due(&self) -> Option<Instant> {
        let held = self.udp.as_ref().and_then(|udp| udp.next_due()).map(|due| {
            let left = due.saturating_duration_since(std::time::Instant::now());
            Instant(freeflow_shm::monotonic_ns()) + Duration(left.as_nanos() as u64)
        });
        [held, self.next_question(), self.keys_due()].into_iter().flatten().min()
    }
}

impl Worker {
    /// From now on there are other hosts.
    ///
    /// # Errors
    /// The kernel can't watch the sockets.
    pub fn open_wire(&mut self, udp: Udp, peers: PeersHandle) -> io::Result<()> {
        for socket in udp.fds() {
            self.waiting.watch_socket(socket)?;
        }
        self.ports.fabric.open(udp, peers);
        Ok(())
    }

    /// Passes packets of other hosts and shards to the QPs that they are for.
    pub(crate) fn take_datagrams(&mut self, now: Instant) -> bool {
        let mut is_any = self.take_parcels(now);
        is_any |= self.take_from_sockets(now);
        if is_any {
            self.ports.fabric.active_at = now;
            self.engine.flush_acks(&mut self.ports, now);
            self.pass_on_management();
        }
        is_any
    }

    /// Takes packets and news of other shards.
    fn take_parcels(&mut self, now: Instant) -> bool {
        let Some(siblings) = self.ports.fabric.siblings.as_ref().filter(|siblings| siblings.has_arrivals()) else {
            return false;
        };
        let own = siblings.shard;
        let mut is_any = false;
        let (mut packets, mut messages) = (0, 0);
        while packets < TURN_PACKETS_MAX && messages < TURN_MESSAGES_MAX {
            let taken = self.ports.fabric.siblings.as_mut().and_then(|siblings| siblings.take());
            is_any |= self.hear_news(now);
            let Some(mut parcel) = taken else { break };
            is_any = true;
            let (from, now) = (parcel.from(), Instant(freeflow_shm::monotonic_ns()));
            while packets < TURN_PACKETS_MAX
                && messages < TURN_MESSAGES_MAX
                && let Some((origin, ip, packet)) = parcel.next_packet()
            {
                packets += 1;
                messages += message_count(packet);
                let fabric = &mut self.ports.fabric;
                let qpn = Qpn(dest_qpn(packet));
                if !own.has_qpn(qpn) {
                    continue;
                }
                let host = match origin {
                    Origin::Shard => Some(from),
                    Origin::Address(address) | Origin::Relayed(address) => {
                        let index = fabric.udp.as_ref().and_then(|udp| udp.peer_of(address));
                        index.map(|index| HostId(index.0))
                    }
                };
                if let Origin::Address(address) = origin {
                    fabric.relay_to_group(qpn, address, ip, packet);
                }
                if let Some(host) = host {
                    self.engine.handle_datagram(&mut self.ports, now, host, &ip, packet);
                }
            }
            if let Some(siblings) = &mut self.ports.fabric.siblings {
                siblings.give_back(parcel);
            }
        }
        is_any
    }

    /// Acts upon what other shards said of their QPs, and ask of ours.
    fn hear_news(&mut self, now: Instant) -> bool {
        let Some(siblings) = &mut self.ports.fabric.siblings else { return false };
        if siblings.news.is_empty() && siblings.attempts.is_empty() {
            return false;
        }
        let (news, attempts) = (std::mem::take(&mut siblings.news), std::mem::take(&mut siblings.attempts));
        for update in news {
            self.handle_peers_update(now, update);
        }
        for Attempt { own, attempt } in attempts {
            let is_key = attempt.kind == ViolationKind::RemoteKey;
            let owner = match is_key {
                true => self.engine.network_of_key(attempt.number),
                false => self.engine.peer_info(Qpn(attempt.number)).map(|info| info.network),
            };
            let is_anothers = |owner| owner != own && owner != attempt.network;
            // A key of nobody's is a mistake, a QPN of nobody's an attempt.
            if owner.map_or(!is_key, is_anothers) {
                self.ports.access.note_violation(&Violation { owner, ..attempt });
            }
        }
        true
    }

    /// Connections that other shards have ended.
    pub(crate) fn hear_disconnections(&mut self, now: Instant) -> bool {
        let disconnected = match &mut self.ports.fabric.siblings {
            Some(siblings) if !siblings.disconnected.is_empty() => std::mem::take(&mut siblings.disconnected),
            _ => return false,
        };
        for update in disconnected {
            self.handle_peers_update(now, update);
        }
        true
    }

    fn take_from_sockets(&mut self, now: Instant) -> bool {
        if !self.ports.fabric.is_due(now) {
            return false;
        }
        self.ports.fabric.looked_at = now;
        let shard = self.ports.fabric.siblings.as_ref().map(|siblings| siblings.shard);
        let (mut packets, mut messages) = (0, 0);
        while packets < TURN_PACKETS_MAX
            && messages < TURN_MESSAGES_MAX
            && let Some(udp) = &mut self.ports.fabric.udp
            && let Some(mut datagram) = udp.next_datagram()
        {
            packets += datagram.count();
            let now = Instant(freeflow_shm::monotonic_ns());
            while let Some(udp) = &mut self.ports.fabric.udp
                && let Some(received) = udp.next_packet(&mut datagram)
            {
                let ip = IpInfo {
                    traffic_class: received.traffic_class,
                    hop_limit: received.hop_limit,
                    congestion: received.congestion_experienced,
                };
                messages += message_count(received.packet);
                if let Some(shard) = shard
                    && !self.ports.fabric.keeps(shard, &received, ip)
                {
                    continue;
                }
                self.engine.handle_datagram(&mut self.ports, now, HostId(received.from.0), &ip, received.packet);
            }
            if let Some(udp) = &mut self.ports.fabric.udp {
                udp.give_back(datagram);
            }
        }
        packets > 0
    }

    /// Management datagrams are the control thread's.
    fn pass_on_management(&mut self) {
        let mads = std::mem::take(&mut self.ports.fabric.mads);
        if mads.is_empty() {
            return;
        }
        let backlog = self.ports.fabric.mad_backlog.clone();
        backlog.fetch_add(mads.len(), Relaxed);
        self.notify_control(ManagementReceived { mads, backlog });
    }

    /// Sends the datagrams that this turn left; whether there were any.
    pub(crate) fn send_datagrams(&mut self, now: Instant) -> bool {
        self.ports.fabric.ask_again(now);
        self.ports.fabric.renew_keys(now);
        self.notify_peers();
        if !self.ports.fabric.has_hosts() {
            return false;
        }
        let mut busy = false;
        for _ in 0..TURN_BURSTS_MAX {
            let Some(arrival) = self.ports.send_fetched() else { break };
            self.handle_arrival(now, arrival);
            busy = true;
        }
        let fabric = &mut self.ports.fabric;
        let mut is_short = false;
        if let Some(siblings) = &mut fabric.siblings {
            if siblings.flush() {
                fabric.active_at = now;
                busy = true;
            }
            is_short = siblings.is_short();
        }
        let Some(udp) = &mut fabric.udp else {
            fabric.blocked = is_short || !fabric.unsent.is_empty();
            return busy;
        };
        let held_back = udp.next_due().is_some_and(|due| due <= std::time::Instant::now());
        if held_back || udp.has_unsent() {
            let before = udp.counters().batches_sent;
            udp.flush();
            fabric.active_at = now;
            busy |= udp.counters().batches_sent != before;
        }
        fabric.blocked = udp.has_unsent() || is_short || !fabric.unsent.is_empty();
        busy
    }
}
