//! Datagrams that the posting thread puts into direct rings: a ring for each destination that gets many.
//!
//! A destination is what a request names: address handle, remote QPN and Q_Key. Whatever is not as when its ring was
//! opened goes through the router.
//!
//! Invariant: a datagram goes into a ring only if the router is done with all that it got before, so datagrams from
//! one QP to another are in order when the router comes first. When the ring does, its receiver sees to that: each
//! datagram in it says how many the router had got for this destination before.
use super::{FULL_NS_MAX, FULL_NS_MIN, Outgoing, REQUESTS_BETWEEN_MAX, WAIT_NS_MAX, staged, wait_until};
use crate::direct_ring::map_ring;
use crate::payload::{NO_RANGES, Payload, QpContext};
use crate::session::Session;
use freeflow_protocol::FEATURE_DIRECT_DATAGRAMS;
use freeflow_protocol::library::{DATAGRAM_RINGS_MAX, Reply, Request};
use freeflow_shm::{CreditList, DirectRingSender, RequestProducer, SendDescriptor};
use freeflow_verbs::datagram::UD_MESSAGE_BYTES_MAX;
use freeflow_verbs::{CompletionFlags, Gid, VerbsError};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Datagrams to a destination before a ring is asked for.
const DATAGRAMS_BEFORE_RING: u32 = 64;
/// Destinations that are remembered besides those with rings.
const KNOWN_MAX: usize = 1024;
/// Posts for which a ring must not have been used before another destination's takes its place.
const UNUSED_FOR: u64 = 1 << 13;
/// Datagrams to a destination whose receiver does not take its ring, before the ring's place is for others.
const UNOPENED_FOR: u32 = 1 << 13;

/// Destination of a datagram, as its request has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Key {
    /// Address handle (low half) and remote QPN.
    to: u64,
    qkey: u32,
}

impl Key {
    fn of(request: &SendDescriptor<'_>) -> Self {
        Self { to: request.remote_address, qkey: request.rkey }
    }

    fn remote_qpn(self) -> u32 {
        (self.to >> 32) as u32
    }

    fn address_handle(self) -> u32 {
        self.to as u32
    }
}

/// Enough for keys that the program itself chooses.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        // Odd, from the golden ratio; the high half of a product depends on all bits, and is mixed into the low one.
        let product = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ product >> 32;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[derive(Default)]
struct Destination {
    /// Datagrams that could have gone by a ring since it was last asked for, and how many it takes.
    missed: u32,
    backoff: u32,
    ring: Option<Ring>,
}

struct Ring {
    sender: DirectRingSender,
    place: u32,
    /// Where its address handle leads.
    destination: Option<Gid>,
    /// How long a post waits for room.
    full_ns: u64,
    /// Posts when it was last used.
    used_at: u64,
    /// Datagrams to its receiver that the router got since the ring was opened.
    routed: u32,
}

/// The destinations of a UD queue pair.
#[derive(Default)]
pub(super) struct Datagrams {
    known: HashMap<Key, usize, BuildHasherDefault<KeyHasher>>,
    destinations: Vec<Destination>,
    /// The last one.
    last: Option<(Key, usize)>,
    places: Places,
    posts: u64,
}

/// The destinations of rings, by place.
struct Places {
    keys: [Option<Key>; DATAGRAM_RINGS_MAX as usize],
    /// Those with one.
    count: u32,
}

impl Default for Places {
    fn default() -> Self {
        Self { keys: [None; DATAGRAM_RINGS_MAX as usize], count: 0 }
    }
}

impl Places {
    fn set(&mut self, place: u32, key: Option<Key>) {
        self.keys[place as usize] = key;
        self.count = self.keys.iter().flatten().count() as u32;
    }
}

impl Datagrams {
    #[inline]
    fn find(&mut self, key: Key) -> usize {
        match self.last {
            Some((last, at)) if last == key => at,
            _ => self.look_up(key),
        }
    }

    fn look_up(&mut self, key: Key) -> usize {
        if self.destinations.len() >= KNOWN_MAX + self.places.keys.len() {
            self.forget();
        }
        let next = self.destinations.len();
        let at = *self.known.entry(key).or_insert(next);
        if at == next {
            self.destinations.push(Destination::default());
        }
        self.last = Some((key, at));
        at
    }

    /// Forgets destinations without rings.
    #[cold]
    fn forget(&mut self) {
        let mut kept = Vec::new();
        let destinations = &mut self.destinations;
        self.known.retain(|_, at| {
            let destination = std::mem::take(&mut destinations[*at]);
            let is_kept = destination.ring.is_some();
            if is_kept {
                *at = kept.len();
                kept.push(destination);
            }
            is_kept
        });
        self.destinations = kept;
        self.last = None;
    }

    /// The destination's ring, if it takes datagrams; else one may be asked for.
    #[inline]
    fn ring_to(&mut self, key: Key, context: &QpContext<'_>, queue: &RequestProducer) -> Option<usize> {
        self.posts += 1;
        let at = self.find(key);
        let destination = &mut self.destinations[at];
        if let Some(ring) = &mut destination.ring {
            let is_given = is_open(ring, queue);
            if is_given && ring.sender.is_open() {
                ring.used_at = self.posts;
                return Some(at);
            }
            if is_given && destination.missed < UNOPENED_FOR {
                destination.missed += 1;
                return None;
            }
            self.places.set(ring.place, None);
            (destination.ring, destination.missed) = (None, 0);
        }
        destination.missed += 1;
        if destination.missed > destination.backoff.max(DATAGRAMS_BEFORE_RING) {
            self.ask(key, at, context, queue);
        }
        None
    }

    #[cold]
    fn ask(&mut self, key: Key, at: usize, context: &QpContext<'_>, queue: &RequestProducer) {
        let destination = &mut self.destinations[at];
        destination.missed = 0;
        destination.backoff = (destination.backoff.max(DATAGRAMS_BEFORE_RING) * 2).min(REQUESTS_BETWEEN_MAX);
        if !context.session.speaks(FEATURE_DIRECT_DATAGRAMS) {
            return;
        }
        let Some(place) = self.place_for_ring() else { return };
        if !wait_until(WAIT_NS_MAX, || queue.taken() == queue.position()) {
            // It has not been asked, so the next time is sooner.
            let destination = &mut self.destinations[at];
            destination.missed = destination.backoff / 2;
            return;
        }
        let (ah, remote_qpn) = (key.address_handle(), key.remote_qpn());
        let request = Request::OpenDatagramRing { qp: context.handle, ah, remote_qpn, qkey: key.qkey, place };
        match context.session.call(&request) {
            Ok((Reply::DatagramRing { segment_bytes }, descriptors)) => {
                self.vacate(place);
                let Some(segment) = map_ring(segment_bytes, CreditList::Promised, &descriptors) else { return };
                let sender = DirectRingSender::new(segment, CreditList::Promised);
                let destination = context.session.destination(ah);
                let ring = Ring { sender, place, destination, full_ns: FULL_NS_MAX, used_at: self.posts, routed: 0 };
                self.destinations[at].backoff = 0;
                self.destinations[at].ring = Some(ring);
                self.places.set(place, Some(key));
            }
            Err(VerbsError::NotSupported) => self.destinations[at].backoff = REQUESTS_BETWEEN_MAX,
            Ok(_) | Err(_) => {}
        }
    }

    /// A place for a ring; that of the ring which was not used for longest, if it is long.
    fn place_for_ring(&self) -> Option<u32> {
        if let Some(place) = self.places.keys.iter().position(Option::is_none) {
            return Some(place as u32);
        }
        let rings =
            self.places.keys.iter().flatten().filter_map(|key| self.destinations[*self.known.get(key)?].ring.as_ref());
        let oldest = rings.min_by_key(|ring| ring.used_at)?;
        (self.posts - oldest.used_at > UNUSED_FOR).then_some(oldest.place)
    }

    /// The router has another ring at this place.
    fn vacate(&mut self, place: u32) {
        let at = self.places.keys[place as usize].and_then(|key| self.known.get(&key).copied());
        if let Some(destination) = at.and_then(|at| self.destinations.get_mut(at)) {
            destination.ring = None;
        }
        self.places.set(place, None);
    }

    /// The router gets this datagram. True: there is a ring to the receiver, perhaps for another address handle or
    /// Q_Key.
    fn note_routed(&mut self, session: &Session, request: &SendDescriptor<'_>) -> bool {
        self.places.count > 0 && self.count_routed(Key::of(request), |ah| session.destination(ah))
    }

    /// `destination`: of an address handle. The same QPN may be another host's, or a group's.
    fn count_routed(&mut self, to: Key, destination: impl Fn(u32) -> Option<Gid>) -> bool {
        let mut has_ring = false;
        for key in self.places.keys.iter().flatten().filter(|key| key.remote_qpn() == to.remote_qpn()) {
            let at = self.known.get(key).copied();
            if let Some(ring) = at.and_then(|at| self.destinations[at].ring.as_mut())
                && (key.address_handle() == to.address_handle() || destination(to.address_handle()) == ring.destination)
            {
                ring.routed = ring.routed.wrapping_add(1);
                has_ring = true;
            }
        }
        has_ring
    }
}

#[inline]
fn is_open(ring: &Ring, queue: &RequestProducer) -> bool {
    queue.rings_open() & 1 << (ring.place & 63) != 0
}

impl Ring {
    /// Whether there is room for so many bytes. Waits a little for it; one that does not poll is not waited for again
    /// and again.
    #[inline]
    fn finds_room(&mut self, bytes: u32) -> bool {
        self.sender.has_room(bytes) || self.awaits_room(bytes)
    }

    #[cold]
    fn awaits_room(&mut self, bytes: u32) -> bool {
        let has_room = wait_until(self.full_ns, || self.sender.has_room(bytes));
        let longer = if has_room { self.full_ns * 2 } else { self.full_ns / 2 };
        self.full_ns = longer.clamp(FULL_NS_MIN, FULL_NS_MAX);
        has_room
    }
}

impl Outgoing {
    /// Puts a datagram into the ring of its destination. False: the router shall have it.
    pub fn carry_out_datagram(
        &mut self,
        context: &QpContext<'_>,
        queue: &mut RequestProducer,
        returned: u32,
        request: &SendDescriptor<'_>,
    ) -> bool {
        let Some(datagrams) = &mut self.datagrams else { return false };
        let Some(at) = datagrams.ring_to(Key::of(request), context, queue) else { return false };
        let mut room = NO_RANGES;
        let Some(payload) = Payload::of(request, context, &mut self.keys, &mut room) else { return false };
        let bytes = payload.bytes;
        if u64::from(bytes) > UD_MESSAGE_BYTES_MAX
            || !context.session.is_surely_alive()
            || !(self.is_ours || self.is_drained(queue, returned, 0))
        {
            return false;
        }
        let Some(ring) = self.datagrams.as_mut().and_then(|datagrams| datagrams.destinations[at].ring.as_mut()) else {
            return false;
        };
        // A request that the router had before may have failed.
        if !is_open(ring, queue) || !ring.finds_room(bytes) {
            return false;
        }
        let message = staged(request, bytes, ring.routed, None);
        ring.sender.publish(context.own, &message, payload.inline, payload.ranges);
        if ring.sender.must_notify() {
            queue.notify_ring(ring.place, message.flags.contains(CompletionFlags::SOLICITED));
            context.session.ring(context.cookie);
        }
        queue.count_send(bytes);
        true
    }

    /// The router gets the next request: before it is published.
    pub fn note_datagram_routed(
        &mut self,
        session: &Session,
        request: &SendDescriptor<'_>,
        posted: u32,
        signaled: bool,
    ) {
        let before = self.routed;
        self.note_routed(request, posted, signaled);
        let has_ring = self.datagrams.as_mut().is_some_and(|datagrams| datagrams.note_routed(session, request));
        if !has_ring {
            // Those to others are not waited for.
            self.routed = before;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(to: u64) -> Key {
        Key { to, qkey: 7 }
    }

    #[test]
    fn destinations_without_rings_are_forgotten() {
        let mut datagrams = Datagrams::default();
        for to in 0..100_000 {
            let at = datagrams.find(key(to));
            datagrams.destinations[at].missed += 1;
            assert_eq!(datagrams.find(key(to)), at);
            assert!(datagrams.destinations.len() <= KNOWN_MAX + DATAGRAM_RINGS_MAX as usize);
            assert_eq!(datagrams.known.len(), datagrams.destinations.len());
        }
    }

    fn add_ring(datagrams: &mut Datagrams, key: Key, place: u32, used_at: u64) {
        let credits = CreditList::Promised;
        let bytes = freeflow_shm::layout::direct_ring::bytes(credits.count());
        let segment = std::sync::Arc::new(freeflow_shm::Segment::create("test", bytes).unwrap().0);
        let sender = DirectRingSender::new(segment, credits);
        let at = datagrams.find(key);
        let destination = Some(Gid([key.address_handle() as u8; 16]));
        datagrams.destinations[at].ring = Some(Ring { sender, place, destination, full_ns: 0, used_at, routed: 0 });
        datagrams.places.set(place, Some(key));
    }

    fn routed(datagrams: &mut Datagrams, key: Key) -> Option<u32> {
        let at = datagrams.find(key);
        datagrams.destinations[at].ring.as_ref().map(|ring| ring.routed)
    }

    #[test]
    fn what_goes_elsewhere_does_not_count() {
        let mut datagrams = Datagrams::default();
        let (here, qpn) = (key(1 | 7 << 32), 7 << 32);
        assert!(!datagrams.count_routed(here, |_| None), "there is no ring");
        add_ring(&mut datagrams, here, 0, 0);
        // Handles 1 and 2 are of the same address, 3 is another host's.
        let destination = |ah: u32| Some(Gid([if ah == 2 { 1 } else { ah as u8 }; 16]));
        assert!(datagrams.count_routed(key(1 | qpn), destination) && datagrams.count_routed(key(2 | qpn), destination));
        assert!(!datagrams.count_routed(key(3 | qpn), destination), "the same QPN of another host");
        assert!(!datagrams.count_routed(key(2 | 8 << 32), destination), "another QP of this host");
        assert_eq!(routed(&mut datagrams, here), Some(2));
    }

    #[test]
    fn a_ring_keeps_its_place_until_the_router_gives_that_to_another() {
        let mut datagrams = Datagrams::default();
        for place in 0..DATAGRAM_RINGS_MAX {
            add_ring(&mut datagrams, key(u64::from(place)), place, 100 + u64::from(place));
        }
        datagrams.posts = 100 + UNUSED_FOR;
        assert_eq!(datagrams.place_for_ring(), None);
        datagrams.posts += 1;
        assert_eq!(datagrams.place_for_ring(), Some(0));
        assert!(routed(&mut datagrams, key(0)).is_some(), "it has only been asked for");
        datagrams.vacate(0);
        assert!(routed(&mut datagrams, key(0)).is_none() && datagrams.places.count == DATAGRAM_RINGS_MAX - 1);
    }

    #[test]
    fn keys_are_spread() {
        use std::hash::BuildHasher;
        let hasher = BuildHasherDefault::<KeyHasher>::default();
        let keys = (0..1024_u64).map(|number| key((number % 4) | ((number / 4) << 32)));
        let places: std::collections::HashSet<u64> = keys.map(|key| hasher.hash_one(key) % 1024).collect();
        assert!(places.len() > 512, "{}", places.len());
    }

    #[test]
    fn another_handle_or_q_key_is_another_destination() {
        let mut datagrams = Datagrams::default();
        let first = datagrams.find(key(1));
        assert_ne!(datagrams.find(Key { to: 1, qkey: 8 }), first);
        assert_ne!(datagrams.find(key(1 | 5 << 32)), first);
        assert_eq!(datagrams.find(key(1)), first);
    }
}
