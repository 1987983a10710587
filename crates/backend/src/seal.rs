//! The keys of sealed hosts ([`freeflow_wire::sealed`]): one of each direction in use, and how they change.
//!
//! ```text
//! here                                       there
//! offer_key, poll_key: draws a key   ──────► accept_key: opens packets with it, too
//! use_key: seals with it             ◄────── says that it has it
//! ```
//! The caller carries the offers and answers, over a channel that is authenticated and secret. A key is for one
//! direction of one pair of hosts, and drawn at random by the sender, so no two runs of a router share one; the packets
//! that it seals are counted, and the count is the nonce: none comes twice.
//!
//! **Several engines.** Each engine of the sender draws keys of its own, so none waits for another; the upper bits of a
//! key's number say whose it is, and those of each engine replace each other. Each engine of the receiver has all keys.
//! A packet names the engine that it is for, in its counter: another one drops it before its window sees it, so none is
//! taken twice by two of them.
//!
//! **Renewal.** After [`KEY_PACKETS`] packets or [`KEY_TIME_NS`] another key is offered ([`crate::Udp::poll_key`]); the
//! one in use goes on until the other host has the new one, and the receiver has it for [`KEY_HELD_NS`] longer: no
//! packet is lost for it. A key ends for good at twice as many packets: then nothing is sent any more. That is half of
//! the 2^35 blocks of 16 bytes at which RFC 9001, B.1.1, puts the advantage against AES-GCM at 2^-57, with the longest
//! packets; the 2^52 forgeries of its B.1.2 do not come in a key's time.
//!
//! **To a sealed host nothing goes plain:** without a key it is lost, and counted.
use crate::counters::WireCounters;
use crate::sys;
use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use freeflow_verbs::Shard;
use freeflow_wire::frame::{FRAME_HEADER_BYTES, FRAME_PAYLOAD_BYTES_MAX};
use freeflow_wire::sealed::{
    SEAL_BYTES, SEAL_HEADER_BYTES, SEAL_KEY_BYTES, SEAL_NONCE_BYTES, SEAL_TAG_BYTES, SealHeader,
};
use freeflow_wire::{ICRC_BYTES, MASK_24, ReplayWindow};
use std::fmt;
use std::io;

/// Packets after which a key is replaced.
pub const KEY_PACKETS: u64 = 1 << 24;
/// Packets that a key seals, at most.
const KEY_PACKETS_MAX: u64 = 2 * KEY_PACKETS;
const BLOCK_BYTES: u64 = 16;
/// No packet of the standard is as long.
const TEXT_BYTES_MAX: u64 = (FRAME_HEADER_BYTES + FRAME_PAYLOAD_BYTES_MAX) as u64;
const _: () = assert!(KEY_PACKETS_MAX * TEXT_BYTES_MAX.div_ceil(BLOCK_BYTES) <= 1 << 35);
/// Time after which a key is replaced, nanoseconds: ten minutes.
pub const KEY_TIME_NS: u64 = 600_000_000_000;
/// So long a key opens packets after the sender has another one, nanoseconds.
pub const KEY_HELD_NS: u64 = 30_000_000_000;
/// Keys of one engine of the sender: in use, new, and two that are held.
const RECEIVE_KEY_COUNT_MAX: usize = 4;
/// Where the number of the sender's engine stands in the number of a key, which has 24 bits.
const KEY_SHARD_SHIFT: u32 = 21;
const _: () = assert!((Shard::COUNT_MAX as u32) << KEY_SHARD_SHIFT == MASK_24 + 1);
/// Until random bits are asked for again that the kernel did not give, nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;
pub(crate) const NEVER: u64 = u64::MAX;

/// The secret of one key. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct SealSecret {
    pub key: [u8; SEAL_KEY_BYTES],
    /// Of the nonces.
    pub base: [u8; SEAL_NONCE_BYTES],
}

impl fmt::Debug for SealSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealSecret")
    }
}

/// To be brought to the other host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyOffer {
    /// Number of the key, 24 bits.
    pub id: u32,
    /// The key that packets are sealed with until the other host has this one.
    pub in_use: Option<u32>,
    pub secret: SealSecret,
}

/// No sealed packet is longer.
const SEALED_BYTES_MAX: usize = FRAME_HEADER_BYTES + FRAME_PAYLOAD_BYTES_MAX + ICRC_BYTES + SEAL_BYTES;

/// When keys are replaced.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    pub packets: u64,
    pub time_ns: u64,
}

fn aead_key(secret: &SealSecret) -> LessSafeKey {
    let key = UnboundKey::new(&AES_128_GCM, &secret.key).expect("the key has this algorithm's length");
    LessSafeKey::new(key)
}

/// A key of this host's.
pub(crate) struct SendKey {
    id: u32,
    key: LessSafeKey,
    base: [u8; SEAL_NONCE_BYTES],
    /// Packets sealed: the counter of the next one.
    count: u64,
    since_ns: u64,
}

impl SendKey {
    fn new(id: u32, secret: &SealSecret, now_ns: u64) -> Self {
        Self { id, key: aead_key(secret), base: secret.base, count: 0, since_ns: now_ns }
    }

    /// Seals the text between the places of header and tag, for an engine of the receiver's.
    #[inline]
    pub fn seal(&mut self, packet: &mut [u8], shard: u8) {
        let header = SealHeader::new(self.id, shard, self.count);
        assert!(self.count < KEY_PACKETS_MAX && packet.len() >= SEAL_BYTES);
        // Before anything else: a counter is never used again, whatever becomes of the packet.
        self.count += 1;
        let head = header.encode();
        let (place, rest) = packet.split_at_mut(SEAL_HEADER_BYTES);
        place.copy_from_slice(&head);
        let (text, tag) = rest.split_at_mut(rest.len() - SEAL_TAG_BYTES);
        let nonce = Nonce::assume_unique_for_key(header.nonce(&self.base));
        match self.key.seal_in_place_separate_tag(nonce, Aad::from(head), text) {
            Ok(value) => tag.copy_from_slice(value.as_ref()),
            // Only of texts longer than GCM takes. It does not leave in the clear.
            Err(_) => packet.fill(0),
        }
    }
}

/// A key of the other host's.
struct ReceiveKey {
    id: u32,
    key: LessSafeKey,
    base: [u8; SEAL_NONCE_BYTES],
    window: ReplayWindow,
    /// It has opened a packet: its sender has gone over to it.
    used: bool,
    expires_ns: u64,
}

/// Why a packet was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Plain,
    UnknownKey,
    WrongShard,
    Replayed,
    BadTag,
}

/// Which engine of the sender a key is of. One that has no others, and gives its keys any numbers: 0.
fn owner_of(id: u32, theirs: Shard) -> usize {
    if theirs.count() == 1 { 0 } else { (id >> KEY_SHARD_SHIFT) as usize % usize::from(Shard::COUNT_MAX) }
}

/// The keys between this host and another.
pub(crate) struct Seal {
    sending: Option<SendKey>,
    /// The other host may not have it yet.
    offered: Option<SendKey>,
    /// The newest first.
    receiving: Vec<ReceiveKey>,
    /// Of the last key that was offered.
    last_id: Option<u32>,
    /// The other host's router is gone: by then it is back, or all keys are forgotten.
    pub forget_at_ns: u64,
    /// The kernel gave no random bits for a key.
    retry_at_ns: u64,
}

impl Default for Seal {
    fn default() -> Self {
        Self {
            sending: None,
            offered: None,
            receiving: Vec::new(),
            last_id: None,
            forget_at_ns: NEVER,
            retry_at_ns: NEVER,
        }
    }
}

impl Seal {
    #[inline]
    pub fn may_send(&self) -> bool {
        self.sending.as_ref().is_some_and(|key| key.count < KEY_PACKETS_MAX)
    }

    /// The key to seal the next packet with, and whether it has to be replaced from there on.
    #[inline]
    pub fn sender(&mut self, key_packets: u64) -> Option<(&mut SendKey, bool)> {
        let key = self.sending.as_mut().filter(|key| key.count < KEY_PACKETS_MAX)?;
        let is_worn = key.count + 1 == key_packets;
        Some((key, is_worn))
    }

    /// Draws the next key of this engine. After a failure it is due again, later.
    pub fn offer(&mut self, now_ns: u64, own: Shard) -> io::Result<KeyOffer> {
        let mut random = [0; SEAL_KEY_BYTES + SEAL_NONCE_BYTES + 4];
        self.retry_at_ns = now_ns + RETRY_NS;
        sys::fill_random(&mut random)?;
        self.retry_at_ns = NEVER;
        let (key, rest) = random.split_at(SEAL_KEY_BYTES);
        let (base, id) = rest.split_at(SEAL_NONCE_BYTES);
        let mut secret = SealSecret { key: [0; SEAL_KEY_BYTES], base: [0; SEAL_NONCE_BYTES] };
        secret.key.copy_from_slice(key);
        secret.base.copy_from_slice(base);
        // Any number at first, so that those of two runs of a router are hardly ever equal.
        let first = id.iter().fold(0, |number, &byte| number << 8 | u32::from(byte));
        let number = self.last_id.map_or(first, |last| last + 1) & ((1 << KEY_SHARD_SHIFT) - 1);
        let id = u32::from(own.index()) << KEY_SHARD_SHIFT | number;
        self.last_id = Some(id);
        self.offered = Some(SendKey::new(id, &secret, now_ns));
        Ok(KeyOffer { id, in_use: self.sending.as_ref().map(|key| key.id), secret })
    }

    /// False: it is not the one that was offered last.
    pub fn begin_use(&mut self, id: u32, now_ns: u64) -> bool {
        let Some(mut key) = self.offered.take_if(|key| key.id == id) else { return false };
        key.since_ns = now_ns;
        self.sending = Some(key);
        true
    }

    /// `theirs`: any engine of the sender, as it said how many there are.
    pub fn accept(&mut self, (id, secret): (u32, &SealSecret), in_use: Option<u32>, now_ns: u64, theirs: Shard) {
        self.receiving.retain(|key| key.id != id);
        let owner = owner_of(id, theirs);
        for key in self.receiving.iter_mut().filter(|key| owner_of(key.id, theirs) == owner) {
            key.expires_ns = if in_use == Some(key.id) { NEVER } else { key.expires_ns.min(now_ns + KEY_HELD_NS) };
        }
        let own = (0..self.receiving.len()).rev().filter(|&at| owner_of(self.receiving[at].id, theirs) == owner);
        if own.clone().count() >= RECEIVE_KEY_COUNT_MAX {
            // Of those that end at the same time the oldest.
            let first = own.min_by_key(|&at| self.receiving[at].expires_ns);
            first.map(|at| self.receiving.remove(at));
        }
        let window = ReplayWindow::default();
        let key = ReceiveKey { id, key: aead_key(secret), base: secret.base, window, used: false, expires_ns: NEVER };
        self.receiving.insert(0, key);
    }

    /// Opens a packet in place, in the engine that is `own`; gives the length of its text, and whether it is the first
    /// one of a key.
    #[inline]
    pub fn open(&mut self, packet: &mut [u8], own: Shard) -> Result<(usize, bool), Refusal> {
        let Some((header, _)) = SealHeader::parse(packet) else { return Err(Refusal::Plain) };
        if packet.len() > SEALED_BYTES_MAX {
            // Nobody sealed it, and to find that out by the tag costs time.
            return Err(Refusal::BadTag);
        }
        let key = self.receiving.iter_mut().find(|key| key.id == header.key).ok_or(Refusal::UnknownKey)?;
        if header.shard() != own.index() {
            return Err(Refusal::WrongShard);
        }
        if !key.window.is_new(header.counter) {
            return Err(Refusal::Replayed);
        }
        let nonce = Nonce::assume_unique_for_key(header.nonce(&key.base));
        let (head, rest) = packet.split_at_mut(SEAL_HEADER_BYTES);
        let text = key.key.open_in_place(nonce, Aad::from(&*head), rest).map_err(|_| Refusal::BadTag)?;
        key.window.note(header.counter);
        let is_first = !std::mem::replace(&mut key.used, true);
        Ok((text.len(), is_first))
    }

    /// Forgets all keys.
    pub fn forget(&mut self) {
        *self = Self { last_id: self.last_id, ..Self::default() };
    }

    /// Forgets what has had its time. `theirs`: as for [`accept`](Self::accept).
    pub fn expire(&mut self, now_ns: u64, theirs: Shard) {
        if self.forget_at_ns <= now_ns {
            self.forget();
        }
        let mut newest_used = [None; Shard::COUNT_MAX as usize];
        for key in &mut self.receiving {
            match &mut newest_used[owner_of(key.id, theirs)] {
                Some(true) => key.expires_ns = key.expires_ns.min(now_ns + KEY_HELD_NS),
                Some(false) => {}
                none => *none = Some(key.used),
            }
        }
        self.receiving.retain(|key| now_ns < key.expires_ns);
    }

    /// Another key is to be offered.
    pub fn is_worn(&self, now_ns: u64, limits: Limits) -> bool {
        let worn = |key: &SendKey| key.count >= limits.packets || now_ns >= key.since_ns.saturating_add(limits.time_ns);
        match self.retry_at_ns {
            NEVER => self.offered.is_none() && self.sending.as_ref().is_some_and(worn),
            retry_at_ns => retry_at_ns <= now_ns,
        }
    }

    /// When there is something to do that is not due now.
    pub fn due_ns(&self, limits: Limits) -> u64 {
        let ends = self.receiving.iter().map(|key| key.expires_ns).min().unwrap_or(NEVER);
        let renewal = match &self.sending {
            _ if self.retry_at_ns != NEVER => self.retry_at_ns,
            Some(key) if self.offered.is_none() => key.since_ns.saturating_add(limits.time_ns),
            _ => NEVER,
        };
        ends.min(renewal).min(self.forget_at_ns)
    }
}

impl Refusal {
    pub fn count(self, counters: &mut WireCounters) {
        let count = match self {
            Self::Plain => &mut counters.unsealed,
            Self::UnknownKey => &mut counters.unknown_key,
            Self::WrongShard => &mut counters.wrong_shard,
            Self::Replayed => &mut counters.replayed,
            Self::BadTag => &mut counters.bad_tag,
        };
        *count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const LIMITS: Limits = Limits { packets: 10, time_ns: 1000 };

    /// One direction: the sender's keys, and the receiver's.
    fn pair() -> (Seal, Seal) {
        let (mut from, mut to) = (Seal::default(), Seal::default());
        renew(&mut from, &mut to, 0);
        (from, to)
    }

    /// A new key, all the way.
    fn renew(from: &mut Seal, to: &mut Seal, now_ns: u64) {
        let offer = from.offer(now_ns, Shard::ONLY).expect("random bits");
        to.accept((offer.id, &offer.secret), offer.in_use, now_ns, Shard::ONLY);
        assert!(from.begin_use(offer.id, now_ns));
    }

    fn sealed(from: &mut Seal, text: &[u8]) -> Vec<u8> {
        let mut packet = [&[0; SEAL_HEADER_BYTES], text, &[0; SEAL_TAG_BYTES]].concat();
        let (key, _) = from.sender(LIMITS.packets).expect("a key");
        key.seal(&mut packet, 0);
        packet
    }

    fn open(to: &mut Seal, packet: &[u8]) -> Result<Vec<u8>, Refusal> {
        open_as(Shard::ONLY, to, packet)
    }

    fn open_as(own: Shard, to: &mut Seal, packet: &[u8]) -> Result<Vec<u8>, Refusal> {
        let mut packet = packet.to_vec();
        let (bytes, _) = to.open(&mut packet, own)?;
        Ok(packet[SEAL_HEADER_BYTES..][..bytes].to_vec())
    }

    #[test]
    fn a_packet_is_opened_once_and_only_as_it_was_sealed() {
        let (mut from, mut to) = pair();
        let packet = sealed(&mut from, b"some text that is nobody's business");
        assert!(!packet.windows(9).any(|part| part == b"some text"));
        for bit in 0..packet.len() * 8 {
            let mut other = packet.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            let why = match bit / 8 {
                0 => Refusal::Plain,
                1..4 => Refusal::UnknownKey,
                4 => Refusal::WrongShard,
                _ => Refusal::BadTag,
            };
            assert_eq!(open(&mut to, &other), Err(why), "bit {bit}");
        }
        for bytes in 0..packet.len() {
            let why = if bytes < SEAL_BYTES { Refusal::Plain } else { Refusal::BadTag };
            assert_eq!(open(&mut to, &packet[..bytes]), Err(why), "{bytes} bytes");
        }
        assert_eq!(open(&mut to, &packet), Ok(b"some text that is nobody's business".to_vec()));
        assert_eq!(open(&mut to, &packet), Err(Refusal::Replayed));
        // The other direction has keys of its own, and so has another host.
        assert_eq!(open(&mut from, &packet), Err(Refusal::UnknownKey));
        let (mut stranger, _) = pair();
        let key = stranger.sending.as_mut().expect("a key");
        (key.id, key.count) = (from.sending.as_ref().expect("a key").id, 7);
        assert_eq!(open(&mut to, &sealed(&mut stranger, b"forged")), Err(Refusal::BadTag));
    }

    /// Computed by another implementation (Python's cryptography 48, AESGCM): cipher, nonce, and what the tag covers.
    #[test]
    fn a_packet_is_what_others_compute() {
        let (key, base) = (std::array::from_fn(|at| at as u8), std::array::from_fn(|at| 0xa0 + at as u8));
        let (secret, id, counter) = (SealSecret { key, base }, 0x12_3456, 0x0102_0304_0506_0708);
        let expected = [
            0xe0, 0x12, 0x34, 0x56, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, // the header
            0x09, 0x55, 0xe8, 0xd3, 0x20, 0x51, 0x47, 0xb6, // the text
            0x21, 0x12, 0xce, 0x73, 0x57, 0x3e, 0xa8, 0xbb, 0x93, 0xcf, 0x90, 0x48, 0x51, 0xc4, 0xff,
            0xe4, // the tag
        ];
        assert_eq!(SealHeader { key: id, counter }.encode(), expected[..SEAL_HEADER_BYTES]);
        let mut to = Seal::default();
        to.accept((id, &secret), None, 0, Shard::ONLY);
        let second = Shard::new(1, 2).expect("the second of two");
        assert_eq!(open_as(second, &mut to, &expected), Ok(b"a packet".to_vec()));
        // The same key under another number: the tag covers that, too.
        to.accept((id + 1, &secret), None, 0, Shard::ONLY);
        let mut other = expected;
        other[3] += 1;
        assert_eq!(open_as(second, &mut to, &other), Err(Refusal::BadTag));
        assert_eq!(open(&mut to, &[0xe0; SEALED_BYTES_MAX + 1]), Err(Refusal::BadTag));
    }

    #[test]
    fn no_two_packets_have_the_same_key_and_nonce() {
        let mut used = BTreeSet::new();
        // Runs of a router, with several keys each, some of which never come into use.
        for _ in 0..20 {
            let mut from = Seal::default();
            for round in 0..10 {
                let offer = from.offer(round, Shard::ONLY).expect("random bits");
                if round % 3 == 1 || !from.begin_use(offer.id, round) {
                    continue;
                }
                for number in 0..50 {
                    let packet = sealed(&mut from, b"text");
                    let (header, _) = SealHeader::parse(&packet).expect("sealed");
                    assert_eq!((header.key, header.counter), (offer.id, number));
                    assert!(used.insert((offer.secret.key, header.nonce(&offer.secret.base))));
                }
            }
        }
        assert_eq!(used.len(), 20 * 7 * 50);
    }

    #[test]
    fn each_engine_of_the_sender_has_keys_of_its_own() {
        const COUNT: u8 = 4;
        let engines: Vec<Shard> = Shard::all(COUNT).collect();
        let mut from: Vec<Seal> = engines.iter().map(|_| Seal::default()).collect();
        let (mut to, theirs, mut ids) = (Seal::default(), engines[0], BTreeSet::new());
        let mut now_ns = 0;
        for round in 0..10 {
            for (&own, from) in engines.iter().zip(&mut from) {
                let offer = from.offer(now_ns, own).expect("random bits");
                assert!(ids.insert(offer.id), "no two engines give a key the same number");
                to.accept((offer.id, &offer.secret), offer.in_use, now_ns, theirs);
                // The key of the third one never comes into use again.
                assert!(own.index() == 2 && round > 0 || from.begin_use(offer.id, now_ns));
                to.expire(now_ns, theirs);
            }
            for from in &mut from {
                assert!(open(&mut to, &sealed(from, b"text")).is_ok(), "round {round}");
            }
            assert!(to.receiving.len() <= usize::from(COUNT) * RECEIVE_KEY_COUNT_MAX);
            to.expire(now_ns, theirs);
            now_ns += KEY_HELD_NS;
            to.expire(now_ns, theirs);
            let left = if round == 0 { COUNT } else { COUNT + 1 };
            assert_eq!(to.receiving.len(), usize::from(left), "in use, and one that is not yet");
        }
    }

    #[test]
    fn a_packet_is_taken_by_one_engine_alone() {
        let (mut from, mut to) = pair();
        let engines: Vec<Shard> = Shard::all(2).collect();
        let mut packet = [0; SEAL_BYTES + 4];
        from.sender(LIMITS.packets).expect("a key").0.seal(&mut packet, 1);
        assert_eq!(open_as(engines[0], &mut to, &packet), Err(Refusal::WrongShard));
        let mut changed = packet;
        changed[4] = 0;
        assert_eq!(open_as(engines[0], &mut to, &changed), Err(Refusal::BadTag), "the tag covers its engine");
        assert!(open_as(engines[1], &mut to, &packet).is_ok());
        assert_eq!(open_as(engines[1], &mut to, &packet), Err(Refusal::Replayed));
    }

    #[test]
    fn a_key_ends_for_good() {
        let (mut from, mut to) = pair();
        from.sending.as_mut().expect("a key").count = KEY_PACKETS_MAX - 1;
        assert!(from.may_send());
        assert!(open(&mut to, &sealed(&mut from, b"the last one")).is_ok());
        assert!(!from.may_send() && from.sender(LIMITS.packets).is_none());
        renew(&mut from, &mut to, 5);
        assert!(open(&mut to, &sealed(&mut from, b"the first one")).is_ok());
    }

    #[test]
    fn another_key_is_due_after_its_packets_and_its_time() {
        let (mut from, mut to) = pair();
        for number in 1..=LIMITS.packets {
            assert!(!from.is_worn(999, LIMITS));
            let (key, is_worn) = from.sender(LIMITS.packets).expect("a key");
            key.seal(&mut [0; SEAL_BYTES], 0);
            assert_eq!(is_worn, number == LIMITS.packets, "it is said once");
        }
        assert!(from.is_worn(999, LIMITS));
        renew(&mut from, &mut to, 500);
        assert!(!from.is_worn(1499, LIMITS) && from.is_worn(1500, LIMITS));
        assert_eq!(from.due_ns(LIMITS), 1500);
        from.offer(1500, Shard::ONLY).expect("random bits");
        assert!(!from.is_worn(9999, LIMITS), "one offer at a time");
        assert_eq!(from.due_ns(LIMITS), NEVER);
        assert!(!from.begin_use(from.last_id.expect("an offer") ^ 1, 1600), "not the one that was offered");
    }

    #[test]
    fn keys_change_without_a_packet_being_refused() {
        let (mut from, mut to) = pair();
        let mut late = Vec::new();
        for round in 0..10 {
            let now_ns = round * KEY_HELD_NS;
            late.push(sealed(&mut from, b"late"));
            let offer = from.offer(now_ns, Shard::ONLY).expect("random bits");
            let before = sealed(&mut from, b"before the other host has it");
            to.accept((offer.id, &offer.secret), offer.in_use, now_ns, Shard::ONLY);
            let old = sealed(&mut from, b"before it said so");
            assert!(from.begin_use(offer.id, now_ns));
            let new = sealed(&mut from, b"with the new key");
            for packet in [&new, &old, &before] {
                assert!(open(&mut to, packet).is_ok());
            }
            to.expire(now_ns, Shard::ONLY);
            assert!(open(&mut to, late.last().expect("it was put there")).is_ok());
            assert_eq!(to.receiving.len(), 2);
            to.expire(now_ns + KEY_HELD_NS - 1, Shard::ONLY);
            assert_eq!(open(&mut to, &old), Err(Refusal::Replayed), "it is held");
            to.expire(now_ns + KEY_HELD_NS, Shard::ONLY);
            assert_eq!(open(&mut to, &old), Err(Refusal::UnknownKey));
            assert_eq!(to.receiving.len(), 1);
        }
    }

    #[test]
    fn offers_that_come_to_nothing_leave_the_key_in_use() {
        let (mut from, mut to) = pair();
        assert!(open(&mut to, &sealed(&mut from, b"in use")).is_ok());
        for now_ns in 0..100 {
            let offer = from.offer(now_ns, Shard::ONLY).expect("random bits");
            to.accept((offer.id, &offer.secret), offer.in_use, now_ns, Shard::ONLY);
            to.expire(now_ns, Shard::ONLY);
            assert!(to.receiving.len() <= RECEIVE_KEY_COUNT_MAX);
            assert!(open(&mut to, &sealed(&mut from, b"in use")).is_ok());
        }
        to.expire(KEY_HELD_NS + 100, Shard::ONLY);
        assert_eq!(to.receiving.len(), 2, "the one in use, and the last offer");
        assert!(open(&mut to, &sealed(&mut from, b"in use")).is_ok());
    }

    #[test]
    fn a_host_that_does_not_come_back_is_forgotten() {
        let (mut from, mut to) = pair();
        let packet = sealed(&mut from, b"text");
        (from.forget_at_ns, to.forget_at_ns) = (100, 100);
        assert_eq!(to.due_ns(LIMITS), 100);
        to.expire(99, Shard::ONLY);
        assert_eq!(to.receiving.len(), 1);
        to.expire(100, Shard::ONLY);
        from.expire(100, Shard::ONLY);
        assert_eq!(open(&mut to, &packet), Err(Refusal::UnknownKey));
        assert!(!from.may_send() && from.due_ns(LIMITS) == NEVER);
        let last = from.last_id.expect("an offer");
        assert_ne!(from.offer(101, Shard::ONLY).expect("random bits").id, last);
    }

    #[test]
    fn secrets_are_not_printed() {
        let offer = Seal::default().offer(0, Shard::ONLY).expect("random bits");
        assert!(format!("{offer:?}").ends_with("secret: SealSecret }"));
    }
}
