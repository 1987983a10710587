//! Copying: `memcpy` alone, and the bandwidth of two processes when each byte is copied once or twice.
//!
//! *Two-copy* is a socket: into a shared ring, and out of it. *One-copy* is a WRITE: straight into memory that the
//! receiver can see; the receiver only learns that it is there, or reads it.
//!
//! Two copies take what one copy takes that is read, and a copy into memory of the receiver's own, most of it at the
//! same time. A figure for two copies that is far below that of the other ([`contradicts`]) is no limit of the machine.
use super::*;
use std::ptr;

/// Bytes copied by one repetition at full effort.
const SMALL_TOTAL: usize = 256 << 20;
const MIDDLE_TOTAL: usize = 3 << 30;
const LARGE_TOTAL: usize = 6 << 30;

/// Names of limits.
pub const READ_COPY: &str = "one copy, read";
pub const TWO_COPIES: &str = "two copies";

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

/// So many times faster than two copies one copy that is read can't be.
const CONTRADICTION_FACTOR: f64 = 4.0;

/// Whether a figure for one copy that is read says that one for two copies is no limit.
pub fn contradicts(read_copy: f64, two_copies: f64) -> bool {
    read_copy > CONTRADICTION_FACTOR * two_copies
}

/// The part of the receiver in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receiver {
    /// Learns that it is there.
    Learns,
    /// Reads it.
    Reads,
    /// Copies it into memory of its own.
    Copies,
    /// And reads it there.
    CopiesAndReads,
}

/// Two processes, a core each, and what goes from one to the other.
#[derive(Clone, Copy, Debug)]
pub struct Copies {
    pub bytes: usize,
    /// Places in the memory between them.
    pub shared_places: usize,
    /// Places that each side goes round in its own memory.
    pub own_places: usize,
    /// Messages that the sender may be ahead; not more than there are places, if the receiver looks at them.
    pub in_flight: usize,
    pub receiver: Receiver,
    pub count: u64,
}

impl Copies {
    /// As WRITEs do into so many places of the receiver's memory from as many of the sender's.
    pub fn once(bytes: usize, places: usize, in_flight: usize, total_bytes: usize) -> Self {
        let count = (total_bytes / bytes) as u64;
        Self { bytes, shared_places: places, own_places: places, in_flight, receiver: Receiver::Learns, count }
    }

    /// As a socket does: the ring that suits this size, and so many places at either end.
    pub fn twice(bytes: usize, places: usize, total_bytes: usize) -> Self {
        let ring_bytes = SHAPES.iter().find(|shape| shape.bytes >= bytes).map_or(2 << 20, |shape| shape.ring_bytes);
        let slots = (ring_bytes / bytes).max(2);
        let count = (total_bytes / bytes) as u64;
        Self { bytes, shared_places: slots, own_places: places, in_flight: slots, receiver: Receiver::Copies, count }
    }

    /// The same, and the receiver reads the messages where they are.
    pub fn once_and_read(bytes: usize, places: usize, total_bytes: usize) -> Self {
        Self { receiver: Receiver::Reads, ..Self::twice(bytes, places, total_bytes) }
    }

    /// The same, and the receiver reads its copies.
    pub fn twice_and_read(bytes: usize, places: usize, total_bytes: usize) -> Self {
        Self { receiver: Receiver::CopiesAndReads, ..Self::twice(bytes, places, total_bytes) }
    }

    fn of(shape: &Shape, receiver: Receiver, divisor: usize) -> Self {
        let bytes = shape.bytes;
        let total = match bytes {
            0..=64 => SMALL_TOTAL,
            65..=4096 => MIDDLE_TOTAL,
            _ => LARGE_TOTAL,
        };
        let area = if receiver == Receiver::Learns { shape.buffer_bytes } else { shape.ring_bytes };
        let slots = (area / bytes).max(2);
        let count = (total / divisor / bytes) as u64;
        Self { bytes, shared_places: slots, own_places: shape.buffer_bytes / bytes, in_flight: slots, receiver, count }
    }
}

/// One repetition.
///
/// # Errors
/// A party failed.
pub fn gbit_per_s(copies: &Copies) -> io::Result<f64> {
    let Copies { bytes, shared_places, own_places, in_flight, receiver: does, count } = *copies;
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
            let here = shared.at(place * bytes, bytes);
            match does {
                Receiver::Learns => {}
                // SAFETY: a range from `Shared::at`, which nobody writes until the count below says that it is free.
                Receiver::Reads => drop(hint::black_box(unsafe { sum(here, bytes) })),
                // SAFETY: ranges from `Shared::at`, of different mappings.
                Receiver::Copies => unsafe { copy(here, own.at(own_place * bytes, bytes), bytes) },
                // SAFETY: the same.
                Receiver::CopiesAndReads => unsafe {
                    copy(here, own.at(own_place * bytes, bytes), bytes);
                    hint::black_box(sum(own.at(own_place * bytes, bytes), bytes));
                },
            }
            place = next(place, shared_places);
            own_place = next(own_place, own_places);
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

/// Reads all of it.
///
/// # Safety
/// `from` is readable for `bytes` bytes.
pub unsafe fn sum(from: *const u8, bytes: usize) -> u64 {
    // SAFETY: this function's contract.
    let read = unsafe { std::slice::from_raw_parts(from, hint::black_box(bytes)) };
    let (words, rest) = read.as_chunks::<8>();
    words.iter().fold(rest.len() as u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)))
}

/// Two copies, and the other again, until they do not contradict each other: the cores may have moved between the two.
/// `None`: they always do.
pub fn two_copies(
    two: &Copies,
    read: &Copies,
    mut run: impl FnMut(&Copies) -> io::Result<f64>,
) -> io::Result<Option<f64>> {
    for _ in 0..ATTEMPTS_MAX {
        let (two_copies, read_copy) = (run(two)?, run(read)?);
        if !contradicts(read_copy, two_copies) {
            return Ok(Some(two_copies));
        }
    }
    Ok(None)
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
        for (name, receiver, reference) in [
            ("one copy", Receiver::Learns, shape.one_copy),
            (READ_COPY, Receiver::Reads, Reference::default()),
            (TWO_COPIES, Receiver::Copies, shape.two_copy),
        ] {
            let subject = copy(name, shape.bytes, reference);
            list.push(subject.repeat(effort, || gbit_per_s(&Copies::of(shape, receiver, effort.divisor)))?);
        }
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures that a machine showed: far cores, where all that is read is slow, and those of the issue, where the ring
    /// of two copies alone was.
    #[test]
    fn a_limit_that_its_neighbour_contradicts_is_refused() {
        assert!(!contradicts(18.0, 17.6));
        assert!(!contradicts(458.0, 372.0));
        assert!(contradicts(345.0, 19.0));
        let (two, read) = (Copies::twice(4096, 4, 1 << 20), Copies::once_and_read(4096, 4, 1 << 20));
        let forged = |figures: &'static [f64]| {
            let mut figures = figures.iter();
            two_copies(&two, &read, move |_| Ok(*figures.next().expect("no more runs than figures")))
        };
        assert_eq!(forged(&[300.0, 340.0]).unwrap(), Some(300.0));
        assert_eq!(forged(&[19.0, 345.0, 290.0, 345.0]).unwrap(), Some(290.0), "the cores had moved");
        assert_eq!(forged(&[19.0, 345.0, 18.0, 345.0, 19.0, 350.0]).unwrap(), None);
    }
}
