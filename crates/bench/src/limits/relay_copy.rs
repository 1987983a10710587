//! Three-party bandwidth: A names its bytes, R copies them once into B's memory, B touches them. The least that a
//! router which copies between two programs can do; mediated bandwidth is compared with it.
use super::copy::copy;
use super::*;

pub const COPIES_ONCE: &str = "relay that copies once";
pub const DESCRIPTORS_ONLY: &str = "relay of descriptors only";

/// Messages that one publication covers at most; and at most a quarter of the slots, so that nobody
/// waits for a whole lap.
const BATCH_MAX: u64 = 16;
/// Idle turns before a party yields.
const SPIN_COUNT: u32 = 40;
const BYTES_TOTAL: usize = 2 << 30;
const SMALL_MESSAGES: u64 = 4_000_000;

/// The reference machine's figures: descriptors only in M/s, copying in Gb/s; the worse ends.
const SHAPES: [(usize, Reference, Reference); 5] = [
    (64, Reference::both(78.0), Reference::NONE),
    (1 << 10, Reference::NONE, Reference::NONE),
    (4 << 10, Reference::NONE, Reference::both(273.0)),
    (64 << 10, Reference::NONE, Reference::both(338.0)),
    (1 << 20, Reference::NONE, Reference::both(361.0)),
];

/// Messages in flight: some megabytes, but enough for batches. The verbs harness uses the same.
pub fn slots(bytes: usize) -> usize {
    ((1 << 20) / bytes).clamp(4, 1024)
}

/// Memory of the three, and the counts by which each reports its progress.
struct Stage {
    words: Shared,
    memory_a: Shared,
    memory_b: Shared,
    bytes: usize,
    slots: u64,
    /// Messages that one publication covers.
    batch: u64,
    count: u64,
    copies: bool,
}

impl Stage {
    fn new(bytes: usize, copies: bool, divisor: usize) -> io::Result<Self> {
        let slots = slots(bytes);
        let count = if bytes <= 64 { SMALL_MESSAGES } else { (BYTES_TOTAL / bytes) as u64 } / divisor as u64;
        Ok(Self {
            words: Shared::new(8 * WORD_STRIDE)?,
            memory_a: Shared::new(slots * bytes)?,
            memory_b: Shared::new(slots * bytes)?,
            bytes,
            slots: slots as u64,
            batch: (slots as u64 / 4).clamp(1, BATCH_MAX),
            count,
            copies,
        })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        self.words.word(index * WORD_STRIDE)
    }

    /// A's count of named messages.
    fn asked(&self) -> &AtomicU64 {
        self.word(0)
    }

    /// R's count, for B; and the same for A, in a word of its own.
    fn given(&self) -> &AtomicU64 {
        self.word(1)
    }

    fn copied(&self) -> &AtomicU64 {
        self.word(3)
    }

    /// B's count.
    fn taken(&self) -> &AtomicU64 {
        self.word(2)
    }

    fn begun(&self) -> &AtomicU64 {
        self.word(5)
    }

    fn ended(&self) -> &AtomicU64 {
        self.word(6)
    }

    fn begin(&self) -> Waiter {
        Gate::new(self.word(4), 3).pass();
        Waiter::new(Wait::SpinThenYield(SPIN_COUNT))
    }

    fn place(&self, position: u64) -> usize {
        (position % self.slots) as usize * self.bytes
    }

    fn run_a(&self) {
        let freed = if self.copies { self.copied() } else { self.taken() };
        let (mut position, mut waiter) = (0, self.begin());
        self.begun().store(sys::monotonic_ns(), Relaxed);
        while position < self.count {
            // Acquire: pairs with the Release of who read the bytes; they may be written again.
            let until = (freed.load(Acquire) + self.slots).min(self.count).min(position + self.batch);
            if until <= position {
                waiter.idle();
                continue;
            }
            waiter.busy();
            while position < until {
                self.memory_a.word(self.place(position)).store(position, Relaxed);
                position += 1;
            }
            self.asked().store(position, Release);
        }
    }

    fn run_router(&self) {
        let (mut position, mut waiter) = (0, self.begin());
        while position < self.count {
            let mut until = self.asked().load(Acquire);
            if self.copies {
                until = until.min(self.taken().load(Acquire) + self.slots).min(position + self.batch);
            }
            if until <= position {
                waiter.idle();
                continue;
            }
            waiter.busy();
            while self.copies && position < until {
                let (place, bytes) = (self.place(position), self.bytes);
                // SAFETY: ranges from `Shared::at`, of different mappings.
                unsafe { copy(self.memory_a.at(place, bytes), self.memory_b.at(place, bytes), bytes) };
                position += 1;
            }
            position = until;
            // Release: pairs with B's Acquire, who reads the copies, and with A's, who may write its memory again.
            self.given().store(position, Release);
            self.copied().store(position, Release);
        }
    }

    fn run_b(&self) {
        let memory = if self.copies { &self.memory_b } else { &self.memory_a };
        let (mut position, mut sum, mut waiter) = (0, 0u64, self.begin());
        while position < self.count {
            // Acquire: pairs with the router's Release; the bytes are there.
            let until = self.given().load(Acquire);
            if until == position {
                waiter.idle();
                continue;
            }
            waiter.busy();
            while position < until {
                sum = sum.wrapping_add(memory.word(self.place(position)).load(Relaxed));
                position += 1;
            }
            self.taken().store(position, Release);
        }
        self.ended().store(sys::monotonic_ns(), Relaxed);
        hint::black_box(sum);
    }
}

/// Millions of messages a second.
fn rate(bytes: usize, copies: bool, divisor: usize, cpus: [Option<usize>; 3]) -> io::Result<f64> {
    let stage = Stage::new(bytes, copies, divisor)?;
    sys::run_parties(vec![
        Party::new(cpus[2], || stage.run_b()),
        Party::new(cpus[1], || stage.run_router()),
        Party::new(cpus[0], || stage.run_a()),
    ])?;
    let ns = stage.ended().load(Relaxed).saturating_sub(stage.begun().load(Relaxed));
    Ok(stage.count as f64 * 1e3 / ns.max(1) as f64)
}

pub fn limits(effort: Effort) -> io::Result<Vec<Limit>> {
    let (first, second) = two_cpus();
    let mut list = Vec::new();
    for (bytes, descriptors_reference, copies_reference) in SHAPES {
        let gigabits = bytes as f64 * 8.0 / 1e3;
        // Which two parties share a core matters more than anything else; the best arrangement is the limit.
        let copies = Subject {
            group: "relay",
            name: COPIES_ONCE,
            bytes,
            unit: ("Gb/s", Better::Higher),
            reference: copies_reference,
        };
        let mut best: Option<Limit> = None;
        for cpus in [[first, second, first], [first, second, second], [None; 3]] {
            let candidate = copies.repeat(effort, || Ok(rate(bytes, true, effort.divisor, cpus)? * gigabits))?;
            if best.as_ref().is_none_or(|best| candidate.beats(best)) {
                best = Some(candidate);
            }
        }
        list.extend(best);
        if bytes == 64 {
            let unit = ("M/s", Better::Higher);
            let only = Subject { name: DESCRIPTORS_ONLY, unit, reference: descriptors_reference, ..copies };
            list.push(only.repeat(effort, || rate(bytes, false, effort.divisor, [first, second, first]))?);
        }
    }
    Ok(list)
}
