//! Packets to and from sealed hosts: each is sealed when it has been written into its batch, and opened in the buffer
//! that it came in. The keys are [`crate::seal`]'s.
use crate::batch::Pending;
use crate::peers::PeerIndex;
use crate::seal::{KEY_HELD_NS, KeyOffer, Limits, NEVER, Refusal, Seal};
use crate::udp::Udp;
use freeflow_wire::MASK_24;
use freeflow_wire::sealed::{SEAL_HEADER_BYTES, is_sealed};
use std::io;
use std::ops::Range;

impl Udp {
    fn seal_of(&mut self, index: PeerIndex) -> Option<&mut Seal> {
        self.peers.get_mut(index)?.seal.as_deref_mut()
    }

    fn limits(&self) -> Limits {
        Limits { packets: self.config().key_packets, time_ns: self.config().key_time_ns }
    }

    /// Whether packets for a peer can leave: it exists, and, if it is sealed, there is a key.
    #[inline]
    pub fn takes(&self, index: PeerIndex) -> bool {
        self.peers.get(index).is_some_and(|entry| entry.may_send())
    }

    /// From now on nothing goes to this peer, or is taken from it, that is not sealed. What is batched and plain is
    /// dropped.
    pub fn set_sealed(&mut self, index: PeerIndex) {
        self.abandon();
        let Some(entry) = self.peers.get_mut(index).filter(|entry| !entry.peer.sealed) else { return };
        (entry.peer.sealed, entry.peer.icrc) = (true, false);
        entry.seal.get_or_insert_default();
        self.peers.note_sealed(index);
        self.drop_plain(index);
    }

    /// Draws a key for what goes to a sealed peer, at the begin of a connection of the two routers: nothing is known of
    /// what became of earlier offers. `None`: it is not sealed.
    ///
    /// # Errors
    /// The kernel gives no random bits; [`poll_key`](Self::poll_key) tries again.
    pub fn offer_key(&mut self, index: PeerIndex, now_ns: u64) -> io::Result<Option<KeyOffer>> {
        self.keys_due_ns = 0;
        let own = self.config.shard;
        let Some(seal) = self.seal_of(index) else { return Ok(None) };
        seal.forget_at_ns = NEVER;
        seal.offer(now_ns, own).map(Some)
    }

    /// A sealed peer will use this key of its own; until then it uses `in_use`. False: it is not sealed.
    pub fn accept_key(&mut self, index: PeerIndex, now_ns: u64, offer: &KeyOffer) -> bool {
        self.keys_due_ns = 0;
        let Some(entry) = self.peers.get_mut(index) else { return false };
        let Some(seal) = entry.seal.as_deref_mut() else { return false };
        seal.accept((offer.id & MASK_24, &offer.secret), offer.in_use, now_ns, entry.shards);
        true
    }

    /// The peer has this key, and it is used from now on. False: it was not the last one that was offered.
    pub fn use_key(&mut self, index: PeerIndex, now_ns: u64, id: u32) -> bool {
        self.keys_due_ns = 0;
        let begun = self.seal_of(index).is_some_and(|seal| seal.begin_use(id, now_ns));
        self.counters.keys_used += u64::from(begun);
        begun
    }

    /// The peer's router is not connected any more, or is another one: if no new key is [offered](Self::offer_key) in
    /// time, its keys are forgotten.
    pub fn forget_keys(&mut self, index: PeerIndex, now_ns: u64) {
        self.keys_due_ns = 0;
        if let Some(seal) = self.seal_of(index) {
            seal.forget_at_ns = seal.forget_at_ns.min(now_ns.saturating_add(KEY_HELD_NS));
        }
    }

    /// Adds the packet that was written to its batch: sealed, and shown to a capture before.
    pub(crate) fn seal_with_key(&mut self, pending: Pending, flip: Option<u32>) {
        if self.capture.is_some() {
            self.capture_plain(pending);
        }
        let batch = self.outbox.batch_mut(pending.slot);
        let entry = self.peers.get_mut(PeerIndex(batch.key.peer));
        let sender = entry.and_then(|entry| entry.seal.as_deref_mut()?.sender(self.config.key_packets));
        let Some((key, is_worn)) = sender else {
            // There was one when the packet was begun.
            self.counters.no_key += 1;
            return self.drop_if_empty(pending);
        };
        batch.seal(pending, flip, Some(key));
        if is_worn {
            self.keys_due_ns = 0;
        }
        self.send_if_closed(pending.slot);
    }

    /// Drops what is batched for a peer and not sealed.
    pub(crate) fn drop_plain(&mut self, index: PeerIndex) {
        self.abandon();
        while let Some(slot) = self.outbox.plain_of(index.0) {
            self.counters.no_key += self.outbox.batch(slot).unsent_count();
            self.outbox.release(slot);
        }
    }

    /// Counts a packet that can't leave.
    #[cold]
    pub(crate) fn count_unsent(&mut self, to: PeerIndex) {
        let count =
            if self.peers.get(to).is_some() { &mut self.counters.no_key } else { &mut self.counters.unknown_peer };
        *count += 1;
    }

    /// When [`poll_key`](Self::poll_key) has something to do, nanoseconds; `u64::MAX`: never.
    #[inline]
    pub fn keys_due_ns(&self) -> u64 {
        self.keys_due_ns
    }

    /// Forgets keys that have had their time; gives the next one that replaces another and has to be brought to its
    /// peer. To be called until it gives none.
    pub fn poll_key(&mut self, now_ns: u64) -> Option<(PeerIndex, KeyOffer)> {
        if now_ns < self.keys_due_ns {
            return None;
        }
        let (limits, own, mut due_ns) = (self.limits(), self.config.shard, NEVER);
        for at in 0..self.peers.sealed().len() {
            let index = self.peers.sealed()[at];
            let Some(entry) = self.peers.get_mut(index) else { continue };
            let Some(seal) = entry.seal.as_deref_mut() else { continue };
            seal.expire(now_ns, entry.shards);
            if seal.is_worn(now_ns, limits)
                && let Ok(offer) = seal.offer(now_ns, own)
            {
                return Some((index, offer));
            }
            due_ns = due_ns.min(seal.due_ns(limits));
        }
        self.keys_due_ns = due_ns;
        None
    }

    /// The packet in one that a peer sent, opened in place, and where it lies: all of it, if the peer is not sealed.
    /// `None`: it is to be dropped, and was counted.
    #[inline]
    pub(crate) fn unseal(&mut self, from: PeerIndex, packet: &mut [u8]) -> Option<Range<usize>> {
        let Some(entry) = self.peers.get_mut(from) else { return Some(0..packet.len()) };
        if !entry.peer.sealed {
            if !entry.peer.external && is_sealed(packet) {
                Refusal::UnknownKey.count(&mut self.counters);
                return None;
            }
            return Some(0..packet.len());
        }
        let own = self.config.shard;
        let opened = entry.seal.as_deref_mut().ok_or(Refusal::UnknownKey).and_then(|seal| seal.open(packet, own));
        match opened {
            Ok((bytes, is_first)) => {
                if is_first {
                    self.keys_due_ns = 0;
                }
                // Its sender has the key, and put another engine's number on it.
                if self.shard_of(&packet[SEAL_HEADER_BYTES..][..bytes]) != own.index() {
                    Refusal::WrongShard.count(&mut self.counters);
                    return None;
                }
                Some(SEAL_HEADER_BYTES..SEAL_HEADER_BYTES + bytes)
            }
            Err(refusal) => {
                refusal.count(&mut self.counters);
                None
            }
        }
    }
}
