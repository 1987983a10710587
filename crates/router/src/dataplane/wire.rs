//! Datagrams in and out: the worker's dealings with the sockets.
//!
//! Looking at a socket is a system call, so it is not done in every turn: every [`LOOK_ACTIVE`]
//! while packets flow, and every [`LOOK_QUIET`] when none has for [`ACTIVE`]. A worker that sleeps
//! is woken by them at once.
use crate::dataplane::event::ManagementReceived;
use crate::dataplane::fabric::Fabric;
use crate::dataplane::worker::Worker;
use crate::peering::PeersHandle;
use freeflow_backend::Udp;
use freeflow_engine::{HostId, IpInfo};
use freeflow_verbs::{Duration, Instant};
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
        self.is_open() && now - self.active_at < time
    }

    /// Whether it is time to look for datagrams.
    #[inline]
    fn is_due(&self, now: Instant) -> bool {
        let interval = if self.is_active(now) { LOOK_ACTIVE } else { LOOK_QUIET };
        self.is_open() && now - self.looked_at >= interval
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

    /// Passes datagrams of other hosts to the QPs that they are for.
    pub(crate) fn take_datagrams(&mut self, now: Instant) -> bool {
        if !self.ports.fabric.is_due(now) {
            return false;
        }
        self.ports.fabric.looked_at = now;
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
                self.engine.handle_datagram(&mut self.ports, now, HostId(received.from.0), &ip, received.packet);
            }
            if let Some(udp) = &mut self.ports.fabric.udp {
                udp.give_back(datagram);
            }
        }
        if packets > 0 {
            self.ports.fabric.active_at = now;
            self.engine.flush_acks(&mut self.ports, now);
            self.pass_on_management();
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
        if !self.ports.fabric.is_open() {
            return false;
        }
        let mut busy = false;
        for _ in 0..TURN_BURSTS_MAX {
            let Some(arrival) = self.ports.send_fetched() else { break };
            self.handle_arrival(now, arrival);
            busy = true;
        }
        let fabric = &mut self.ports.fabric;
        let Some(udp) = &mut fabric.udp else { return busy };
        let held_back = udp.next_due().is_some_and(|due| due <= std::time::Instant::now());
        if held_back || udp.has_unsent() {
            let before = udp.counters().batches_sent;
            udp.flush();
            fabric.active_at = now;
            busy |= udp.counters().batches_sent != before;
        }
        fabric.blocked = udp.has_unsent() || !fabric.unsent.is_empty();
        busy
    }
}
