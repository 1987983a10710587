//! The hand-off of one cache line between two cores, one way: the yardstick that says whether two runs compare.
//!
//! A hypervisor moves virtual cores about: on the reference machine the hand-off is 58–70 ns ("near") or 275–300 ns
//! ("far"), and flips, even within a run. It is measured before and after each table.
use super::*;

pub const LINE: &str = "cache line, one way";

const ROUND_TRIPS_A_BATCH: u64 = 2_000;
const BATCH_COUNT: usize = 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distance {
    Near,
    Between,
    Far,
    /// There is no other core to hand anything to.
    OneCpu,
}

impl Distance {
    /// Bounds in nanoseconds one way.
    pub fn of(one_way_ns: f64) -> Self {
        match one_way_ns {
            ns if ns <= 120.0 => Self::Near,
            ns if ns < 220.0 => Self::Between,
            _ => Self::Far,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Near => "near",
            Self::Between => "between",
            Self::Far => "far",
            Self::OneCpu => "one CPU",
        }
    }
}

/// One measurement of the hand-off.
#[derive(Clone, Copy, Debug)]
pub struct Handoff {
    /// Nanoseconds, one way.
    pub summary: Summary,
    pub distance: Distance,
}

impl Handoff {
    pub fn measure() -> io::Result<Self> {
        let mut samples = one_way_ns()?;
        let summary = Summary::of(&mut samples).ok_or_else(|| io::Error::other("hand-off: no samples"))?;
        let distance = if sys::cpus().len() < 2 { Distance::OneCpu } else { Distance::of(summary.p50) };
        Ok(Self { summary, distance })
    }

    pub fn to_json(self) -> Value {
        json!({ "mode": self.distance.name(), "one_way_ns": self.summary })
    }
}

/// Means over batches, nanoseconds.
fn one_way_ns() -> io::Result<Vec<f64>> {
    let words = Shared::new(4 * WORD_STRIDE)?;
    let results = Results::new(BATCH_COUNT)?;
    let (near, far) = two_cpus();
    // Spinning on one core would take a time slice a hand-off.
    let wait = if near == far { Wait::Yield } else { Wait::Spin };
    let (there, back, gate) = (words.word(0), words.word(WORD_STRIDE), words.word(2 * WORD_STRIDE));
    let total = ROUND_TRIPS_A_BATCH * BATCH_COUNT as u64;
    let ping = Party::new(near, || {
        let mut waiter = Waiter::new(wait);
        Gate::new(gate, 2).pass();
        for batch in 0..BATCH_COUNT as u64 {
            let begun = sys::monotonic_ns();
            for trip in batch * ROUND_TRIPS_A_BATCH + 1..=(batch + 1) * ROUND_TRIPS_A_BATCH {
                there.store(trip, Release);
                waiter.until(back, trip);
            }
            let ns = sys::monotonic_ns() - begun;
            results.put(batch as usize, ns as f64 / (2 * ROUND_TRIPS_A_BATCH) as f64);
        }
    });
    let pong = Party::new(far, || {
        let mut waiter = Waiter::new(wait);
        Gate::new(gate, 2).pass();
        for trip in 1..=total {
            waiter.until(there, trip);
            back.store(trip, Release);
        }
    });
    sys::run_parties(vec![ping, pong])?;
    Ok(results.take(BATCH_COUNT))
}

pub fn limits(effort: Effort) -> io::Result<Vec<Limit>> {
    let reference = Reference::new(70.0, 300.0);
    let line = Subject { group: "hand-off", name: LINE, bytes: 0, unit: ("ns", Better::Lower), reference };
    let run = || {
        let batches = (0..effort.repetitions).map(|_| one_way_ns()).collect::<io::Result<Vec<_>>>()?;
        Ok(batches.concat())
    };
    Ok(vec![line.measure(run)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        assert_eq!(Distance::of(62.0), Distance::Near);
        assert_eq!(Distance::of(175.0), Distance::Between);
        assert_eq!(Distance::of(285.0), Distance::Far);
    }

    #[test]
    fn a_handoff_takes_time() {
        let handoff = Handoff::measure().expect("two parties");
        assert!(handoff.summary.p50 > 1.0);
    }
}
