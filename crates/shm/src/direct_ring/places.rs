//! Where the sender of a direct ring puts messages: in as few slots and as little data as there have been messages at
//! once, so that what a ring costs in memory and cache follows its use.
//!
//! The receiver is told each place and never the plan. Messages are freed in the order in which they were sent.
use crate::layout::direct_ring::{DESCRIPTOR_BYTES, DESCRIPTOR_COUNT, UNIT_BYTES, UNIT_COUNT};
use std::collections::VecDeque;
use std::ops::RangeInclusive;

/// Slots that a ring begins with, and by which it grows: a page of descriptors.
const SLOTS_AT_ONCE: u8 = (PAGE_BYTES / DESCRIPTOR_BYTES) as u8;
/// Units of data that a ring begins with; it grows by doubling.
const UNITS_AT_FIRST: u32 = (PAGE_BYTES / UNIT_BYTES) as u32;
/// Units of data that messages may come to use, however many there are, and messages that a ring holds whose data are
/// longer than a part of these. So a ring of short messages stays in a cache.
const UNITS_OF_SHORT: u32 = UNIT_COUNT / 4;
const LONG_AT_ONCE: u32 = 4;
const PAGE_BYTES: usize = 4096;

/// The order in which slots are used: a circle.
pub(super) struct Slots {
    successors: Box<[u8; DESCRIPTOR_COUNT as usize]>,
    count: u32,
    /// Of the next message.
    next: u8,
}

impl Slots {
    pub fn new() -> Self {
        let mut successors = Box::new([0; DESCRIPTOR_COUNT as usize]);
        for slot in 0..SLOTS_AT_ONCE {
            successors[slot as usize] = (slot + 1) % SLOTS_AT_ONCE;
        }
        Self { successors, count: u32::from(SLOTS_AT_ONCE), next: 0 }
    }

    #[inline]
    pub fn next(&self) -> u8 {
        self.next
    }

    /// Messages that may be in the ring at once.
    #[inline]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Goes on to the slot of the next message.
    #[inline]
    pub fn advance(&mut self) -> u8 {
        self.next = self.successors[self.next as usize];
        self.next
    }

    /// Puts unused slots into the circle behind the one in hand, if there are any, and says which. All others may be in
    /// use.
    #[cold]
    pub fn grow(&mut self) -> RangeInclusive<u8> {
        const NONE: RangeInclusive<u8> = RangeInclusive::new(1, 0);
        let Ok(first) = u8::try_from(self.count) else { return NONE };
        let last = first + (SLOTS_AT_ONCE - 1);
        for slot in first..last {
            self.successors[slot as usize] = slot + 1;
        }
        self.successors[last as usize] = self.successors[self.next as usize];
        self.successors[self.next as usize] = first;
        self.count += u32::from(SLOTS_AT_ONCE);
        first..=last
    }
}

/// Data of messages: a circle in the first units of the ring. If it is full, it is made larger and goes on in what is
/// new; it closes again when all has been freed that was there before.
#[derive(Default)]
pub(super) struct Data {
    /// The first free unit behind what was placed last.
    head: u32,
    /// Units in use.
    window: u32,
    /// The window has grown, and messages before this number, of which some are not freed, are in the order of the old
    /// one.
    grown_at: Option<u32>,
    /// Numbers of messages with data that are not freed, and their first units.
    placed: VecDeque<(u32, u32)>,
}

/// A place for data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub first: u32,
    units: u32,
    window: u32,
}

/// Of free-running numbers that are less than half of their circle apart.
fn is_before(number: u32, other: u32) -> bool {
    number.wrapping_sub(other).cast_signed() < 0
}

impl Data {
    /// Where data of this length, which is not 0, may lie.
    pub fn place(&self, bytes: u32) -> Option<Place> {
        let units = bytes.div_ceil(UNIT_BYTES as u32);
        let (head, window) = (self.head, self.window);
        let at = |first| Some(Place { first, units, window });
        let Some(&(_, tail)) = self.placed.front() else {
            // Nothing is in the ring: short messages need no more than ever.
            let window = if LONG_AT_ONCE * units <= UNITS_OF_SHORT { window.min(UNITS_OF_SHORT) } else { window };
            return if units <= window { Some(Place { first: 0, units, window }) } else { self.grown(0, units) };
        };
        let is_open = self.grown_at.is_some();
        let end = if is_open || head > tail { window } else { tail };
        if head + units <= end {
            at(head)
        } else if !is_open && head > tail && units <= tail {
            at(0)
        } else {
            self.grown(window, units)
        }
    }

    /// The same in a window that is made larger, from this unit on.
    fn grown(&self, first: u32, units: u32) -> Option<Place> {
        let window = (first + units).next_power_of_two().max(2 * self.window).max(UNITS_AT_FIRST);
        let most = (LONG_AT_ONCE * units).next_power_of_two().clamp(UNITS_OF_SHORT, UNIT_COUNT);
        (window <= most).then_some(Place { first, units, window })
    }

    /// The message with this number has its data there.
    pub fn take(&mut self, place: Place, number: u32) {
        if place.window > self.window && !self.placed.is_empty() {
            self.grown_at = Some(number);
        }
        self.window = place.window;
        self.head = place.first + place.units;
        self.placed.push_back((number, place.first));
    }

    /// Messages before this number are freed.
    pub fn note_freed(&mut self, freed: u32) {
        while self.placed.front().is_some_and(|&(number, _)| is_before(number, freed)) {
            self.placed.pop_front();
        }
        // As soon as that is so: a number that stays is on the other side of the circle of numbers one day.
        let is_old = |number: u32| self.placed.front().is_some_and(|&(oldest, _)| is_before(oldest, number));
        self.grown_at = self.grown_at.filter(|&number| is_old(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(seed: &mut u64) -> u32 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) as u32
    }

    /// Messages of any length, freed in order and at any time: no two that are in the ring touch.
    #[test]
    fn places_of_what_is_in_the_ring_never_overlap() {
        for start in [0, u32::MAX - 300] {
            for seed in 0..200 {
                let mut seed = seed;
                let (mut data, mut next, mut freed) = (Data::default(), start, start);
                let mut ring: VecDeque<(u32, u32)> = VecDeque::new();
                let with_data = 1 + random(&mut seed) % 4;
                let (lengths, at_once) = (1 << (random(&mut seed) % 17), 1 + random(&mut seed) % 255);
                for _ in 0..3000 {
                    let has_data = random(&mut seed) % 4 < with_data;
                    let bytes = if has_data { random(&mut seed) % (lengths + 1) } else { 0 };
                    let place = if bytes == 0 { None } else { data.place(bytes) };
                    let is_full = next.wrapping_sub(freed) >= at_once || bytes > 0 && place.is_none();
                    if is_full || random(&mut seed).is_multiple_of(3) {
                        for _ in 0..random(&mut seed) % 8 {
                            if ring.pop_front().is_some() {
                                freed = freed.wrapping_add(1);
                            }
                        }
                        data.note_freed(freed);
                        continue;
                    }
                    let units = bytes.div_ceil(UNIT_BYTES as u32);
                    let (first, end) = place.map_or((0, 0), |place| (place.first, place.first + units));
                    assert!(end <= UNIT_COUNT);
                    assert!(ring.iter().all(|&(other, other_end)| end <= other || other_end <= first));
                    if let Some(place) = place {
                        data.take(place, next);
                    }
                    ring.push_back((first, end));
                    next = next.wrapping_add(1);
                }
            }
        }
    }

    /// As if 2^28 messages without data came between: the numbers go round, and there is always a message.
    #[test]
    fn places_never_overlap_while_numbers_go_round() {
        for window in 1..6 {
            let (mut data, mut next, mut seed) = (Data::default(), 0_u32, 0);
            let mut ring: VecDeque<(u32, Place)> = VecDeque::new();
            for _ in 0..1000 {
                if ring.len() == window {
                    ring.pop_front();
                    data.note_freed(ring.front().map_or(next, |&(number, _)| number));
                }
                let place = data.place(1 + random(&mut seed) % 4000).unwrap();
                let is_apart = |other: &Place| {
                    place.first + place.units <= other.first || other.first + other.units <= place.first
                };
                assert!(ring.iter().all(|(_, other)| is_apart(other)), "{place:?} in {ring:?}");
                data.take(place, next);
                ring.push_back((next, place));
                next = next.wrapping_add(1 << 28);
            }
        }
    }

    /// A message alone in the ring may be the longest; and as many fit as ever.
    #[test]
    fn as_many_fit_as_the_ring_has_units() {
        let mut data = Data::default();
        let longest = UNIT_COUNT / 4 * UNIT_BYTES as u32;
        for number in 0..4 {
            let place = data.place(longest).unwrap();
            data.take(place, number);
        }
        assert_eq!(data.place(1), None);
        for number in 4..40_u32 {
            let freed = number.saturating_sub(3).max(4);
            data.note_freed(freed);
            assert!(number < freed + 3 || data.place(longest + 1).is_none());
            let place = data.place(longest).unwrap();
            data.take(place, number);
        }
    }

    #[test]
    fn few_at_once_use_little() {
        let mut data = Data::default();
        for number in 0..1000 {
            data.note_freed(number);
            let place = data.place(4096).unwrap();
            assert_eq!((place.first, place.window), (0, UNITS_AT_FIRST));
            data.take(place, number);
        }
        for number in 1000..2000_u32 {
            data.note_freed(number.saturating_sub(3).max(1000));
            let place = data.place(4096).unwrap();
            data.take(place, number);
        }
        assert!(data.window <= 8 * UNITS_AT_FIRST, "{}", data.window);
    }

    /// The window after so many messages of one length that nobody frees.
    fn filled(bytes: u32) -> (u32, u32) {
        let (mut data, mut count) = (Data::default(), 0);
        while let Some(place) = data.place(bytes) {
            data.take(place, count);
            count += 1;
        }
        (data.window, count)
    }

    #[test]
    fn only_long_messages_use_all() {
        for (bytes, window, count) in [(4096, 256, 64), (64, 256, 4096), (64 << 10, 256, 4), (128 << 10, 512, 4)] {
            assert_eq!(filled(bytes), (window << 10 >> 6, count), "{bytes}");
        }
        assert_eq!(filled(256 << 10), (UNIT_COUNT, 4));
        assert_eq!(filled((64 << 10) + 1).0, 512 << 10 >> 6);
    }

    #[test]
    fn short_messages_use_little_again() {
        let mut data = Data::default();
        for number in 0..4 {
            let place = data.place(256 << 10).unwrap();
            data.take(place, number);
        }
        data.note_freed(3);
        assert_eq!(data.place(4096).unwrap().window, UNIT_COUNT, "a long one is in the ring");
        data.note_freed(4);
        let place = data.place(4096).unwrap();
        assert_eq!((place.first, place.window), (0, UNITS_OF_SHORT));
        data.take(place, 4);
        assert_eq!(data.window, UNITS_OF_SHORT);
    }
}
