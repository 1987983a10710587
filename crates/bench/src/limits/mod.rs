//! The physical limits of this machine: bare programs of a few lines each, no library, no router.
//!
//! Every figure of the verbs harness is printed as a ratio to one of these, taken in the same run. Each limit carries
//! what a reference machine showed (two virtual Zen 5 cores, Linux 6.18): on such a machine a limit over
//! [`SUSPECT_FACTOR`] worse than that is a bug of the program here, or the machine was not quiet.
pub mod copy;
pub mod end;
pub mod handoff;
pub mod relay;
pub mod relay_copy;
pub mod ring;
pub mod wake;
pub mod wire;
mod wire_stream;

use crate::stats::Summary;
use crate::sys::{self, Party, Shared};
use handoff::{Distance, Handoff};
use serde_json::{Value, json};
use std::hint;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::*};

/// A limit this many times worse than the reference machine's is looked at twice.
pub const SUSPECT_FACTOR: f64 = 1.5;

/// Times that a measurement is begun again because the cores moved or something disturbed it.
const ATTEMPTS_MAX: usize = 3;

/// Distance between words that different parties write, bytes: beyond what a prefetcher pairs.
const WORD_STRIDE: usize = 512;

/// How much work the limits may do.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Times that each measurement is repeated; the median counts.
    pub repetitions: usize,
    /// Divides the work of each repetition.
    pub divisor: usize,
}

impl Effort {
    pub const FULL: Self = Self { repetitions: 7, divisor: 2 };
    pub const QUICK: Self = Self { repetitions: 3, divisor: 8 };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    Lower,
    Higher,
}

/// Result of the reference machine, in the limit's unit; the worse end of a range.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reference {
    pub near: Option<f64>,
    pub far: Option<f64>,
}

impl Reference {
    pub const NONE: Self = Self { near: None, far: None };

    /// A figure that does not depend on where the cores are.
    pub const fn both(value: f64) -> Self {
        Self { near: Some(value), far: Some(value) }
    }

    pub const fn new(near: f64, far: f64) -> Self {
        Self { near: Some(near), far: Some(far) }
    }

    pub const fn near(value: f64) -> Self {
        Self { near: Some(value), far: None }
    }

    /// Cores in between give no expectation.
    pub fn at(self, distance: Distance) -> Option<f64> {
        match distance {
            Distance::Near => self.near,
            Distance::Far => self.far,
            Distance::Between | Distance::OneCpu => None,
        }
    }
}

/// One measured limit.
#[derive(Clone, Debug)]
pub struct Limit {
    pub group: &'static str,
    pub name: String,
    /// Payload of one message or copy, bytes; 0 where there is none.
    pub bytes: usize,
    pub unit: &'static str,
    pub better: Better,
    pub summary: Summary,
    pub reference: Reference,
    /// Hand-off measured just before, which says what `reference` to look at.
    pub distance: Distance,
}

impl Limit {
    /// How many times worse than on the reference machine; below 1 is better.
    pub fn times_worse(&self) -> Option<f64> {
        let reference = self.reference.at(self.distance)?;
        Some(match self.better {
            Better::Lower => self.summary.p50 / reference,
            Better::Higher => reference / self.summary.p50,
        })
    }

    pub fn suspect(&self) -> bool {
        self.times_worse().is_some_and(|times| times > SUSPECT_FACTOR)
    }

    fn beats(&self, other: &Self) -> bool {
        match self.better {
            Better::Lower => self.summary.p50 < other.summary.p50,
            Better::Higher => self.summary.p50 > other.summary.p50,
        }
    }

    pub fn to_json(&self) -> Value {
        json!({
            "group": self.group, "name": self.name, "bytes": self.bytes, "unit": self.unit,
            "figures": self.summary, "handoff": self.distance.name(),
            "reference": self.reference.at(self.distance), "times_worse": self.times_worse(),
            "suspect": self.suspect(),
        })
    }
}

/// The limits measured so far.
#[derive(Default)]
pub struct Limits {
    pub list: Vec<Limit>,
}

impl Limits {
    pub fn find(&self, name: &str, bytes: usize) -> Option<&Limit> {
        self.list.iter().find(|limit| limit.name == name && limit.bytes == bytes)
    }

    /// The middle figure of a limit, in its own unit.
    ///
    /// `None`, too, if another limit says that it is none.
    pub fn figure(&self, name: &str, bytes: usize) -> Option<f64> {
        self.find(name, bytes).filter(|limit| !self.is_contradicted(limit)).map(|limit| limit.summary.p50)
    }

    /// Whether another limit says that this is none.
    pub fn is_contradicted(&self, limit: &Limit) -> bool {
        let read_copy = || self.find(copy::READ_COPY, limit.bytes);
        limit.name == copy::TWO_COPIES
            && read_copy().is_some_and(|read| copy::contradicts(read.summary.p50, limit.summary.p50))
    }
}

/// How a party waits when it finds nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Looks again at once.
    Spin,
    /// Always gives the CPU away.
    Yield,
    /// So many pauses, one `sched_yield`, and so on.
    SpinThenYield(u32),
}

/// A party's waiting, with its count of idle turns.
pub struct Waiter {
    wait: Wait,
    idle_count: u32,
}

impl Waiter {
    pub fn new(wait: Wait) -> Self {
        Self { wait, idle_count: 0 }
    }

    #[inline]
    pub fn busy(&mut self) {
        self.idle_count = 0;
    }

    #[inline]
    pub fn idle(&mut self) {
        match self.wait {
            Wait::Spin => {}
            Wait::Yield => sys::sched_yield(),
            Wait::SpinThenYield(spins) => {
                self.idle_count += 1;
                if self.idle_count > spins {
                    self.idle_count = 0;
                    sys::sched_yield();
                } else {
                    hint::spin_loop();
                }
            }
        }
    }

    /// Waits until the word holds `value`. Acquire: sees what was written before the other side's Release store of it.
    #[inline]
    pub fn until(&mut self, word: &AtomicU64, value: u64) {
        while word.load(Acquire) != value {
            self.idle();
        }
        self.busy();
    }
}

/// Two CPUs, the same one twice where there is only one.
pub fn two_cpus() -> (Option<usize>, Option<usize>) {
    let cpus = sys::cpus();
    (cpus.first().copied(), cpus.get(1).or(cpus.first()).copied())
}

/// Makes all parties of a measurement begin together: each counts itself in, and waits for the others.
pub struct Gate<'a> {
    word: &'a AtomicU64,
    party_count: u64,
}

impl<'a> Gate<'a> {
    pub fn new(word: &'a AtomicU64, party_count: u64) -> Self {
        Self { word, party_count }
    }

    pub fn pass(&self) {
        // AcqRel: what each party set up before the gate is seen by every party after it.
        self.word.fetch_add(1, AcqRel);
        while self.word.load(Acquire) < self.party_count {
            sys::sched_yield();
        }
    }
}

/// Samples that a forked party leaves for the parent.
struct Results {
    shared: Shared,
}

impl Results {
    fn new(capacity: usize) -> io::Result<Self> {
        Ok(Self { shared: Shared::new((capacity + 1) * 8)? })
    }

    /// Child's side.
    fn put(&self, index: usize, value: f64) {
        self.shared.word(8 * index).store(value.to_bits(), Relaxed);
    }

    /// Parent's side, after the child ended.
    fn take(&self, count: usize) -> Vec<f64> {
        (0..count).map(|index| f64::from_bits(self.shared.word(8 * index).load(Relaxed))).collect()
    }
}

/// Subject of a measurement: group, name, payload in bytes, unit, and the reference machine's
/// figure.
struct Subject<'a> {
    group: &'static str,
    name: &'a str,
    bytes: usize,
    unit: (&'static str, Better),
    reference: Reference,
}

impl Subject<'_> {
    /// Fails when there are no samples or they are no numbers: the program is wrong then.
    fn limit(&self, mut samples: Vec<f64>, distance: Distance) -> io::Result<Limit> {
        let summary =
            Summary::of(&mut samples).ok_or_else(|| io::Error::other(format!("{}: no samples", self.name)))?;
        Ok(Limit {
            group: self.group,
            name: self.name.to_owned(),
            bytes: self.bytes,
            unit: self.unit.0,
            better: self.unit.1,
            summary,
            reference: self.reference,
            distance,
        })
    }

    /// Measures. When the cores moved meanwhile, or the result is suspect, it is measured again, a
    /// few times: a limit is what the machine can do, so the best result counts.
    fn measure(&self, mut run: impl FnMut() -> io::Result<Vec<f64>>) -> io::Result<Limit> {
        let mut best: Option<Limit> = None;
        let mut before = Handoff::measure()?.distance;
        for _ in 0..ATTEMPTS_MAX {
            let samples = run()?;
            let after = Handoff::measure()?.distance;
            let distance = if before == after { after } else { Distance::Between };
            let limit = self.limit(samples, distance)?;
            let fine = distance == before && !limit.suspect();
            if fine || best.as_ref().is_none_or(|best| limit.beats(best)) {
                best = Some(limit);
            }
            if fine {
                break;
            }
            before = after;
        }
        best.ok_or_else(|| io::Error::other("not measured"))
    }

    /// One sample from each repetition.
    fn repeat(&self, effort: Effort, run: impl Fn() -> io::Result<f64>) -> io::Result<Limit> {
        self.measure(|| (0..effort.repetitions).map(|_| run()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(better: Better) -> Subject<'static> {
        Subject { group: "g", name: "n", bytes: 64, unit: ("u", better), reference: Reference::new(10.0, 40.0) }
    }

    fn example(better: Better, p50: f64, distance: Distance) -> Limit {
        subject(better).limit(vec![p50], distance).expect("limit")
    }

    #[test]
    fn a_limit_is_compared_in_its_own_mode() {
        assert_eq!(example(Better::Lower, 20.0, Distance::Near).times_worse(), Some(2.0));
        assert_eq!(example(Better::Lower, 20.0, Distance::Far).times_worse(), Some(0.5));
        assert_eq!(example(Better::Higher, 20.0, Distance::Near).times_worse(), Some(0.5));
        assert_eq!(example(Better::Higher, 20.0, Distance::Far).times_worse(), Some(2.0));
        assert_eq!(example(Better::Lower, 20.0, Distance::Between).times_worse(), None);
        assert!(example(Better::Lower, 20.0, Distance::Near).suspect());
        assert!(!example(Better::Lower, 15.0, Distance::Near).suspect());
        assert!(!example(Better::Lower, 900.0, Distance::Between).suspect());
    }

    #[test]
    fn no_samples_is_an_error() {
        assert!(subject(Better::Lower).limit(vec![], Distance::Near).is_err());
        assert!(subject(Better::Lower).limit(vec![f64::NAN], Distance::Near).is_err());
    }

    #[test]
    fn a_suspect_measurement_is_repeated_and_the_best_counts() {
        let mut results = [5000.0, 3000.0, 4000.0, 1.0].into_iter();
        let limit = subject(Better::Lower).measure(|| Ok(results.next().into_iter().collect())).expect("limit");
        // Cores between near and far have no reference, so nothing is suspect there; and they may
        // get there at any attempt.
        let between = limit.distance == Distance::Between && [5000.0, 4000.0].contains(&limit.summary.p50);
        assert!(limit.summary.p50 == 3000.0 || between || limit.distance == Distance::OneCpu, "{limit:?}");
    }

    #[test]
    fn limits_are_found_by_name_and_size() {
        let limits = Limits { list: vec![example(Better::Lower, 20.0, Distance::Near)] };
        assert_eq!(limits.figure("n", 64), Some(20.0));
        assert_eq!(limits.figure("n", 65), None);
        assert_eq!(limits.find("n", 64).map(|limit| limit.to_json()["suspect"].clone()), Some(json!(true)));
    }
}
