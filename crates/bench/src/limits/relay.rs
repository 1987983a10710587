//! Three parties: A → R → B → R → A, one cache line a hop. R is what a router is at the least, A and B what programs
//! are at the least; a mediated round trip can't be shorter.
//!
//! With more pollers than cores, how they wait decides everything: pure spinning costs a time slice a hop.
use super::*;
use crate::stats::median;

/// Round trips of one repetition at full effort.
const ROUND_TRIP_COUNT: usize = 30_000;
/// Round trips before the measured ones.
const WARM_UP_COUNT: usize = 500;

/// The bare relay that mediated latency is compared with.
pub const UNPINNED: &str = "relay, unpinned, spin 20 then yield";
/// The same with each party in a session, and so a scheduling group, of its own.
pub const OWN_SESSIONS: &str = "relay, unpinned, spin 20 then yield, own sessions";
/// The least round trip of an operation that the router alone answers.
pub const TWO_PARTIES: &str = "two parties, a core each";

#[derive(Clone, Copy)]
struct Placement {
    cpu: Option<usize>,
    wait: Wait,
}

struct Shape {
    a: Placement,
    b: Placement,
    router: Placement,
    own_sessions: bool,
    round_trips: usize,
}

/// Nanoseconds of each round trip.
fn round_trips_ns(shape: &Shape) -> io::Result<Vec<f64>> {
    let words = Shared::new(8 * WORD_STRIDE)?;
    let word = |index: usize| words.word(index * WORD_STRIDE);
    let (to_router, to_b, from_b, to_a) = (word(0), word(1), word(2), word(3));
    let results = Results::new(shape.round_trips)?;
    let total = (WARM_UP_COUNT.min(shape.round_trips) + shape.round_trips) as u64;
    let warm_up = total - shape.round_trips as u64;
    let gate = || Gate::new(word(4), 3);
    let a = Party::new(shape.a.cpu, || {
        let mut waiter = Waiter::new(shape.a.wait);
        gate().pass();
        let mut begun = sys::monotonic_ns();
        for trip in 1..=total {
            to_router.store(trip, Release);
            waiter.until(to_a, trip);
            let ended = sys::monotonic_ns();
            if trip > warm_up {
                results.put((trip - warm_up - 1) as usize, (ended - begun) as f64);
            }
            begun = ended;
        }
    });
    let b = Party::new(shape.b.cpu, || {
        let mut waiter = Waiter::new(shape.b.wait);
        gate().pass();
        for trip in 1..=total {
            waiter.until(to_b, trip);
            from_b.store(trip, Release);
        }
    });
    let router = Party::new(shape.router.cpu, || {
        let mut waiter = Waiter::new(shape.router.wait);
        let (mut forwarded, mut returned) = (0, 0);
        gate().pass();
        while returned < total {
            // Acquire here, Release there, as in `Waiter::until`.
            let (asked, answered) = (to_router.load(Acquire), from_b.load(Acquire));
            if asked == forwarded && answered == returned {
                waiter.idle();
                continue;
            }
            waiter.busy();
            if asked != forwarded {
                forwarded = asked;
                to_b.store(asked, Release);
            }
            if answered != returned {
                returned = answered;
                to_a.store(answered, Release);
            }
        }
    });
    let mut parties = vec![a, b, router];
    for party in &mut parties {
        party.own_session = shape.own_sessions;
    }
    sys::run_parties(parties)?;
    Ok(results.take(shape.round_trips))
}

/// A → R → A.
fn two_party_round_trips_ns(a: Placement, router: Placement, count: usize) -> io::Result<Vec<f64>> {
    let words = Shared::new(4 * WORD_STRIDE)?;
    let word = |index: usize| words.word(index * WORD_STRIDE);
    let results = Results::new(count)?;
    let a = Party::new(a.cpu, || {
        let mut waiter = Waiter::new(a.wait);
        Gate::new(word(2), 2).pass();
        let mut begun = sys::monotonic_ns();
        for trip in 1..=count as u64 {
            word(0).store(trip, Release);
            waiter.until(word(1), trip);
            let ended = sys::monotonic_ns();
            results.put(trip as usize - 1, (ended - begun) as f64);
            begun = ended;
        }
    });
    let router = Party::new(router.cpu, || {
        let mut waiter = Waiter::new(router.wait);
        Gate::new(word(2), 2).pass();
        for trip in 1..=count as u64 {
            waiter.until(word(0), trip);
            word(1).store(trip, Release);
        }
    });
    sys::run_parties(vec![a, router])?;
    Ok(results.take(count))
}

/// The samples of the best repetition: where the scheduler seats three parties on two cores is its luck, and a limit is
/// what the machine can do.
fn microseconds(effort: Effort, run: impl Fn() -> io::Result<Vec<f64>>) -> io::Result<Vec<f64>> {
    let mut best: Option<(f64, Vec<f64>)> = None;
    for _ in 0..effort.repetitions {
        let samples: Vec<f64> = run()?.into_iter().map(|ns| ns / 1e3).collect();
        let middle = median(&samples).ok_or_else(|| io::Error::other("no round trips"))?;
        if best.as_ref().is_none_or(|(best, _)| middle < *best) {
            best = Some((middle, samples));
        }
    }
    Ok(best.map(|(_, samples)| samples).unwrap_or_default())
}

/// Microseconds of a round trip by [`UNPINNED`]: the middle of the best repetition.
///
/// # Errors
/// A party failed.
pub fn unpinned_us(effort: Effort) -> io::Result<f64> {
    let free = Placement { cpu: None, wait: Wait::SpinThenYield(20) };
    let round_trips = ROUND_TRIP_COUNT / effort.divisor;
    let shape = Shape { a: free, b: free, router: free, own_sessions: false, round_trips };
    let samples = microseconds(effort, || round_trips_ns(&shape))?;
    median(&samples).ok_or_else(|| io::Error::other("no round trips"))
}

pub fn limits(effort: Effort) -> io::Result<Vec<Limit>> {
    let (first, second) = two_cpus();
    let count = ROUND_TRIP_COUNT / effort.divisor;
    let subject = |name, reference| Subject { group: "relay", name, bytes: 0, unit: ("us", Better::Lower), reference };
    let free = Placement { cpu: None, wait: Wait::SpinThenYield(20) };
    let yields = Placement { cpu: None, wait: Wait::Yield };
    let relays = [
        (UNPINNED, free, free, free, false, Reference::both(4.0)),
        (OWN_SESSIONS, free, free, free, true, Reference::NONE),
        ("relay, unpinned, always yield", yields, yields, yields, false, Reference::both(5.2)),
        (
            "relay, programs share a core and yield, router spins",
            Placement { cpu: first, wait: Wait::Yield },
            Placement { cpu: first, wait: Wait::Yield },
            Placement { cpu: second, wait: Wait::Spin },
            false,
            Reference::both(2.9),
        ),
        (
            "relay, router shares a core with B and yields",
            Placement { cpu: first, wait: Wait::Spin },
            Placement { cpu: second, wait: Wait::Yield },
            Placement { cpu: second, wait: Wait::Yield },
            false,
            Reference::both(6.2),
        ),
    ];
    let mut list = Vec::new();
    for (name, a, b, router, own_sessions, reference) in relays {
        // Spinners of other groups can take whole time slices: few round trips are enough to see that.
        let round_trips = if own_sessions { count / 20 } else { count };
        let shape = Shape { a, b, router, own_sessions, round_trips };
        list.push(subject(name, reference).measure(|| microseconds(effort, || round_trips_ns(&shape)))?);
    }
    let wait = Wait::SpinThenYield(20);
    let (a, router) = (Placement { cpu: first, wait }, Placement { cpu: second, wait });
    let two = subject(TWO_PARTIES, Reference::NONE);
    list.push(two.measure(|| microseconds(effort, || two_party_round_trips_ns(a, router, count)))?);
    Ok(list)
}
