//! Copying: `memcpy` alone, and the bandwidth of two processes when each byte is copied once or twice.
//!
//! *Two-copy* is a socket: into a shared ring, and out of it. *One-copy* is a WRITE: straight into memory that the
//! receiver can see; the receiver only learns that it is there.
use super::*;
use std::ptr;

/// Bytes copied by one repetition at full effort.
const SMALL_TOTAL: usize = 256 << 20;
const MIDDLE_TOTAL: usize = 3 << 30;
const LARGE_TOTAL: usize = 6 << 30;

/// One shape of a bandwidth measurement, and the reference machine's figures for two copies and for one.
struct Shape {
    bytes: usize,
    /// Shared ring of the two-copy variant.
    ring_bytes: usize,
    /// Private buffers at either end; shared memory of the one-copy variant.
    buffer_bytes: usize,
    two_copy: Reference,
    one_copy: Reference,
}

const SHAPES: [Shape; 4] = [
    Shape {
        bytes: 64,
        ring_bytes: 64 << 10,
        buffer_bytes: 1 << 20,
        two_copy: Reference::near(32.0),
        one_copy: Reference::near(160.0),
    },
    Shape {
        bytes: 4 << 10,
        ring_bytes: 128 << 10,
        buffer_bytes: 1 << 20,
        two_copy: Reference::near(244.0),
        one_copy: Reference::near(358.0),
    },
    Shape {
        bytes: 64 << 10,
        ring_bytes: 256 << 10,
        buffer_bytes: 1 << 20,
        two_copy: Reference::new(372.0, 218.0),
        one_copy: Reference::new(458.0, 458.0),
    },
    Shape {
        bytes: 1 << 20,
        ring_bytes: 2 << 20,
        buffer_bytes: 8 << 20,
        two_copy: Reference::new(347.0, 61.0),
        one_copy: Reference::new(343.0, 330.0),
    },
];

const MEMCPY: [(usize, f64); 5] =
    [(64, 379.0), (4 << 10, 1009.0), (64 << 10, 913.0), (1 << 20, 448.0), (64 << 20, 139.0)];

/// A copy whose length the compiler does not know, as in a router.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes` bytes, and the two do not overlap.
#[inline]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: this function's contract.
    unsafe { ptr::copy_nonoverlapping(from, to, hint::black_box(bytes)) };
}

/// Source and destination at the same place of a page would make small loads wait for the stores before them.
const PAGE_OFFSET: usize = 2048;

fn gbits(bytes: usize, ns: u64) -> f64 {
    bytes as f64 * 8.0 / ns.max(1) as f64
}

fn memcpy_gbit_per_s(bytes: usize, divisor: usize) -> io::Result<f64> {
    let total = (if bytes < 1024 { 64 << 20 } else { 2 << 30 }) / divisor;
    let (from, to, results) = (Shared::private(bytes)?, Shared::private(bytes + PAGE_OFFSET)?, Results::new(1)?);
    let (cpu, _) = two_cpus();
    let party = Party::new(cpu, || {
        // The child's first writes copy pages; that is not what we measure.
        for side in [from.at(0, bytes), to.at(PAGE_OFFSET, bytes)] {
            // SAFETY: our own mappings, so long from there.
            unsafe { ptr::write_bytes(side, 2, bytes) };
        }
        let count = (total / bytes).max(2);
        for _ in 0..count / 4 {
            // SAFETY: ranges from `Shared::at`, of different mappings.
            unsafe { copy(from.at(0, bytes), to.at(PAGE_OFFSET, bytes), bytes) };
        }
        let begun = sys::monotonic_ns();
        for _ in 0..count {
            // SAFETY: ranges from `Shared::at`, of different mappings.
            unsafe { copy(from.at(0, bytes), to.at(PAGE_OFFSET, bytes), bytes) };
        }
        results.put(0, gbits(count * bytes, sys::monotonic_ns() - begun));
    });
    sys::run_parties(vec![party])?;
    Ok(results.take(1)[0])
}

/// Two processes, a core each, and what goes from one to the other.
#[derive(Clone, Copy, Debug)]
pub struct Copies {
    pub bytes: usize,
    /// Places in the memory between them.
    pub shared_places: usize,
    /// Places that each side goes round in its own memory.
    pub own_places: usize,
    /// Messages that the sender may be ahead; with `twice`, not more than there are places.
    pub in_flight: usize,
    /// Into the memory between and out of it, not only into it.
    pub twice: bool,
    pub count: u64,
}

impl Copies {
    /// As WRITEs do into so many places of the receiver's memory from as many of the sender's.
    pub fn once(bytes: usize, places: usize, in_flight: usize, total_bytes: usize) -> Self {
        let count = (total_bytes / bytes) as u64;
        Self { bytes, shared_places: places, own_places: places, in_flight, twice: false, count }
    }

    /// As a socket does: the ring that suits this size, and so many places at either end.
    pub fn twice(bytes: usize, places: usize, total_bytes: usize) -> Self {
        let ring_bytes = SHAPES.iter().find(|shape| shape.bytes >= bytes).map_or(2 << 20, |shape| shape.ring_bytes);
        let slots = (ring_bytes / bytes).max(2);
        let count = (total_bytes / bytes) as u64;
        Self { bytes, shared_places: slots, own_places: places, in_flight: slots, twice: true, count }
    }

    fn of(shape: &Shape, twice: bool, divisor: usize) -> Self {
        let bytes = shape.bytes;
        let total = match bytes {
            0..=64 => SMALL_TOTAL,
            65..=4096 => MIDDLE_TOTAL,
            _ => LARGE_TOTAL,
        };
        let area = if twice { shape.ring_bytes } else { shape.buffer_bytes };
        let slots = (area / bytes).max(2);
        let count = (total / divisor / bytes) as u64;
        Self { bytes, shared_places: slots, own_places: shape.buffer_bytes / bytes, in_flight: slots, twice, count }
    }
}

/// One repetition.
///
/// # Errors
/// A party failed.
pub fn gbit_per_s(copies: &Copies) -> io::Result<f64> {
    let Copies { bytes, shared_places, own_places, in_flight, twice, count } = *copies;
    let in_flight = in_flight as u64;
    let shared = Shared::new(shared_places * bytes)?;
    let words = Shared::new(8 * WORD_STRIDE)?;
    let word = |index: usize| words.word(index * WORD_STRIDE);
    let (near, far) = two_cpus();
    let wait = if near == far { Wait::SpinThenYield(20) } else { Wait::SpinThenYield(1 << 20) };
    let receiver = Party::new(far, || {
        let own = Shared::private(own_places * bytes).expect("memory");
        let (mut seen, mut place, mut own_place, mut waiter) = (0, 0, 0, Waiter::new(wait));
        Gate::new(word(2), 2).pass();
        for position in 0..count {
            while seen <= position {
                // Acquire: pairs with the sender's Release of the same count; the bytes are there.
                seen = word(0).load(Acquire);
                if seen <= position {
                    waiter.idle();
                }
            }
            waiter.busy();
            if twice {
                // SAFETY: ranges from `Shared::at`, of different mappings.
                unsafe { copy(shared.at(place * bytes, bytes), own.at(own_place * bytes, bytes), bytes) };
                place = next(place, shared_places);
                own_place = next(own_place, own_places);
            }
            // Release: the slot was read before the sender sees it free.
            word(1).store(position + 1, Release);
        }
        word(4).store(sys::monotonic_ns(), Relaxed);
    });
    let sender = Party::new(near, || {
        let own = Shared::private(own_places * bytes).expect("memory");
        let (mut freed, mut place, mut own_place, mut waiter) = (0, 0, 0, Waiter::new(wait));
        Gate::new(word(2), 2).pass();
        word(3).store(sys::monotonic_ns(), Relaxed);
        for position in 0..count {
            while position - freed >= in_flight {
                // Acquire: pairs with the receiver's Release of the same count; the slot was read.
                freed = word(1).load(Acquire);
                if position - freed >= in_flight {
                    waiter.idle();
                }
            }
            waiter.busy();
            // SAFETY: ranges from `Shared::at`, of different mappings.
            unsafe { copy(own.at(own_place * bytes, bytes), shared.at(place * bytes, bytes), bytes) };
            place = next(place, shared_places);
            own_place = next(own_place, own_places);
            // Release: the bytes are there before the receiver sees the count.
            word(0).store(position + 1, Release);
        }
    });
    sys::run_parties(vec![receiver, sender])?;
    Ok(gbits(count as usize * bytes, word(4).load(Relaxed).saturating_sub(word(3).load(Relaxed))))
}

#[inline]
fn next(place: usize, count: usize) -> usize {
    if place + 1 == count { 0 } else { place + 1 }
}

pub fn limits(effort: Effort) -> io::Result<Vec<Limit>> {
    let copy =
        |name, bytes, reference| Subject { group: "copy", name, bytes, unit: ("Gb/s", Better::Higher), reference };
    let mut list = Vec::new();
    for (bytes, reference) in MEMCPY {
        let memcpy = copy("memcpy", bytes, Reference::both(reference));
        list.push(memcpy.repeat(effort, || memcpy_gbit_per_s(bytes, effort.divisor))?);
    }
    if sys::cpus().len() < 2 {
        return Ok(list);
    }
    for shape in &SHAPES {
        for (name, twice, reference) in [("one copy", false, shape.one_copy), ("two copies", true, shape.two_copy)] {
            let subject = copy(name, shape.bytes, reference);
            list.push(subject.repeat(effort, || gbit_per_s(&Copies::of(shape, twice, effort.divisor)))?);
        }
    }
    Ok(list)
}
