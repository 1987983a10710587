//! Single-producer, single-consumer rings: how many small messages a second two cores can exchange, and the time of a
//! round trip through two rings. Every message is published by itself and its payload is read.
use super::*;
use std::ptr;

const SLOT_COUNT: usize = 1024;
const LINE_BYTES: usize = 64;
/// Words after the slots: consumer's count, producer's count, gate, begin, end, checksum.
const WORD_COUNT: usize = 6;
/// Messages of one repetition at full effort.
const MESSAGE_COUNT: u64 = 8_000_000;
const ROUND_TRIP_COUNT: u64 = 300_000;

/// The case that bounds the messages a second of one queue.
pub const HEAD_TAIL: &str = "head and tail, cached";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// One line: 56 bytes and the sequence number.
    OneLine,
    /// Two lines: 64 bytes and, on the next line, the sequence number.
    TwoLines,
    /// One line of 64 bytes; producer's and consumer's counts elsewhere, each side keeps the other's last seen count.
    HeadTail,
}

impl Kind {
    const fn slot_bytes(self) -> usize {
        match self {
            Self::TwoLines => 2 * LINE_BYTES,
            Self::OneLine | Self::HeadTail => LINE_BYTES,
        }
    }

    const fn payload_bytes(self) -> usize {
        match self {
            Self::OneLine => 56,
            Self::TwoLines | Self::HeadTail => 64,
        }
    }
}

struct Ring {
    memory: Shared,
}

impl Ring {
    fn new(kind: Kind) -> io::Result<Self> {
        Ok(Self { memory: Shared::new(SLOT_COUNT * kind.slot_bytes() + WORD_COUNT * WORD_STRIDE)? })
    }

    #[inline]
    fn slot<const SLOT: usize>(&self, position: u64) -> *mut u8 {
        self.memory.at((position as usize % SLOT_COUNT) * SLOT, SLOT)
    }

    fn word<const SLOT: usize>(&self, index: usize) -> &AtomicU64 {
        self.memory.word(SLOT_COUNT * SLOT + index * WORD_STRIDE)
    }
}

/// Sums the payload, so that it is really read.
#[inline]
fn sum_of<const PAYLOAD: usize>(slot: *const u8) -> u64 {
    let mut sum = 0u64;
    for index in 0..PAYLOAD / 8 {
        // SAFETY: inside the slot and aligned; published before we came here, not written again before we free it.
        sum = sum.wrapping_add(unsafe { ptr::read(slot.cast::<u64>().add(index)) });
    }
    sum
}

/// Writes the payload: the position in the first word, then filling.
#[inline]
fn fill<const PAYLOAD: usize>(slot: *mut u8, position: u64, filling: &[u8; 64]) {
    // SAFETY: the slot is PAYLOAD bytes or more, free, and only this party writes it; `filling` is long enough.
    unsafe {
        ptr::copy_nonoverlapping(filling.as_ptr(), slot, PAYLOAD);
        ptr::write(slot.cast::<u64>(), position);
    }
}

/// The sequence word of a slot, which stands behind its payload or, with one line, before the payload's end.
#[inline]
fn sequence<'a, const SLOT: usize, const PAYLOAD: usize>(slot: *mut u8) -> &'a AtomicU64 {
    // SAFETY: PAYLOAD + 8 <= SLOT and the slot is aligned; this word is reached as an atomic only. The ring outlives
    // every use: both parties end before it is dropped.
    unsafe { AtomicU64::from_ptr(slot.add(PAYLOAD).cast()) }
}

/// Messages per microsecond: millions a second.
fn in_slot<const SLOT: usize, const PAYLOAD: usize>(kind: Kind, count: u64) -> io::Result<f64> {
    let ring = Ring::new(kind)?;
    let (producer_cpu, consumer_cpu) = two_cpus();
    let word = |index| ring.word::<SLOT>(index);
    let consumer = Party::new(consumer_cpu, || {
        let (freed, mut sum) = (word(0), 0u64);
        Gate::new(word(2), 2).pass();
        for position in 0..count {
            let slot = ring.slot::<SLOT>(position);
            let sequence = sequence::<SLOT, PAYLOAD>(slot);
            // Acquire: pairs with the producer's Release store of the same word.
            while sequence.load(Acquire) != position + 1 {
                hint::spin_loop();
            }
            sum = sum.wrapping_add(sum_of::<PAYLOAD>(slot));
            // Release: the payload was read before the producer may write it again.
            freed.store(position + 1, Release);
        }
        word(4).store(sys::monotonic_ns(), Relaxed);
        word(5).store(sum, Relaxed);
    });
    let producer = Party::new(producer_cpu, || {
        let (freed, filling, mut seen) = (word(0), [3u8; 64], 0u64);
        Gate::new(word(2), 2).pass();
        word(3).store(sys::monotonic_ns(), Relaxed);
        for position in 0..count {
            while position - seen >= SLOT_COUNT as u64 {
                seen = freed.load(Acquire);
            }
            let slot = ring.slot::<SLOT>(position);
            fill::<PAYLOAD>(slot, position, &filling);
            sequence::<SLOT, PAYLOAD>(slot).store(position + 1, Release);
        }
    });
    sys::run_parties(vec![consumer, producer])?;
    Ok(rate(count, word(3), word(4)))
}

/// Millions a second of 64-byte messages through a ring whose sides each keep the other's count as last seen.
///
/// # Errors
/// A party failed.
pub fn head_tail(count: u64) -> io::Result<f64> {
    const SLOT: usize = LINE_BYTES;
    let ring = Ring::new(Kind::HeadTail)?;
    let (producer_cpu, consumer_cpu) = two_cpus();
    let word = |index| ring.word::<SLOT>(index);
    let consumer = Party::new(consumer_cpu, || {
        let (tail, head, mut seen, mut sum) = (word(0), word(1), 0u64, 0u64);
        Gate::new(word(2), 2).pass();
        for position in 0..count {
            while seen <= position {
                seen = head.load(Acquire);
                if seen <= position {
                    hint::spin_loop();
                }
            }
            sum = sum.wrapping_add(sum_of::<64>(ring.slot::<SLOT>(position)));
            tail.store(position + 1, Release);
        }
        word(4).store(sys::monotonic_ns(), Relaxed);
        word(5).store(sum, Relaxed);
    });
    let producer = Party::new(producer_cpu, || {
        let (tail, head, filling, mut seen) = (word(0), word(1), [3u8; 64], 0u64);
        Gate::new(word(2), 2).pass();
        word(3).store(sys::monotonic_ns(), Relaxed);
        for position in 0..count {
            while position - seen >= SLOT_COUNT as u64 {
                seen = tail.load(Acquire);
            }
            fill::<64>(ring.slot::<SLOT>(position), position, &filling);
            head.store(position + 1, Release);
        }
    });
    sys::run_parties(vec![consumer, producer])?;
    Ok(rate(count, word(3), word(4)))
}

fn rate(count: u64, begun: &AtomicU64, ended: &AtomicU64) -> f64 {
    count as f64 * 1e3 / ended.load(Relaxed).saturating_sub(begun.load(Relaxed)) as f64
}

/// Nanoseconds of a round trip: one message there, one back.
fn round_trip_ns<const SLOT: usize, const PAYLOAD: usize>(kind: Kind, count: u64) -> io::Result<f64> {
    let (there, back) = (Ring::new(kind)?, Ring::new(kind)?);
    let (cpu_a, cpu_b) = two_cpus();
    let gate = || Gate::new(there.word::<SLOT>(2), 2);
    let send = |ring: &Ring, position: u64, filling: &[u8; 64]| {
        let slot = ring.slot::<SLOT>(position);
        fill::<PAYLOAD>(slot, position, filling);
        sequence::<SLOT, PAYLOAD>(slot).store(position + 1, Release);
    };
    let receive = |ring: &Ring, position: u64| {
        let slot = ring.slot::<SLOT>(position);
        while sequence::<SLOT, PAYLOAD>(slot).load(Acquire) != position + 1 {}
        sum_of::<PAYLOAD>(slot)
    };
    let a = Party::new(cpu_a, || {
        let (filling, mut sum) = ([3u8; 64], 0u64);
        gate().pass();
        let begun = sys::monotonic_ns();
        for position in 0..count {
            send(&there, position, &filling);
            sum = sum.wrapping_add(receive(&back, position));
        }
        there.word::<SLOT>(3).store(begun, Relaxed);
        there.word::<SLOT>(4).store(sys::monotonic_ns(), Relaxed);
        there.word::<SLOT>(5).store(sum, Relaxed);
    });
    let b = Party::new(cpu_b, || {
        let mut filling = [3u8; 64];
        gate().pass();
        for position in 0..count {
            filling[63] = receive(&there, position) as u8;
            send(&back, position, &filling);
        }
    });
    sys::run_parties(vec![a, b])?;
    Ok(1e3 / rate(count, there.word::<SLOT>(3), there.word::<SLOT>(4)))
}

pub fn limits(effort: Effort) -> io::Result<Vec<Limit>> {
    if sys::cpus().len() < 2 {
        return Ok(Vec::new());
    }
    let count = MESSAGE_COUNT / effort.divisor as u64;
    let trips = ROUND_TRIP_COUNT / effort.divisor as u64;
    let ring =
        |name, bytes, reference| Subject { group: "ring", name, bytes, unit: ("M/s", Better::Higher), reference };
    let trip = |name, bytes, reference| Subject { unit: ("ns", Better::Lower), ..ring(name, bytes, reference) };
    const ONE: usize = Kind::OneLine.payload_bytes();
    const TWO: usize = Kind::TwoLines.payload_bytes();
    Ok(vec![
        ring("one-line slots, sequence in the slot", ONE, Reference::new(146.0, 32.0))
            .repeat(effort, || in_slot::<64, ONE>(Kind::OneLine, count))?,
        ring("two-line slots, sequence in the slot", TWO, Reference::new(97.0, 21.0))
            .repeat(effort, || in_slot::<128, TWO>(Kind::TwoLines, count))?,
        ring(HEAD_TAIL, 64, Reference::new(78.0, 14.0)).repeat(effort, || head_tail(count))?,
        trip("round trip, one-line slots", ONE, Reference::near(130.0))
            .repeat(effort, || round_trip_ns::<64, ONE>(Kind::OneLine, trips))?,
        trip("round trip, two-line slots", TWO, Reference::near(150.0))
            .repeat(effort, || round_trip_ns::<128, TWO>(Kind::TwoLines, trips))?,
    ])
}
