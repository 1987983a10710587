//! The figures, their limits, and what is wanted of each: see docs/performance/METHOD.md.
use super::{Bench, Value, Wanted};
use crate::crowd;
use crate::limits::copy::{self, Copies};
use crate::limits::handoff::{Handoff, LINE};
use crate::limits::{relay, relay_copy, ring};
use crate::table::bytes as size;
use crate::verbs::flows::Flows;
use crate::verbs::mixed::{Mix, Part};
use crate::verbs::{Memory, Operation};

/// Millions of messages that the ring's limit exchanges in a run, at full effort.
const RING_MESSAGES: u64 = 4_000_000;
/// Requests that perftest has in flight.
const PERFTEST_DEPTH: usize = 128;
/// Of the many pairs.
const CROWD: Flows = Flows { count: 1, bytes: 128 << 10, batch: 4 };

type Measure<T> = Box<dyn Fn(&mut Bench<'_>) -> Result<T, String>>;

/// A figure and how it and its limit are measured.
pub struct Figure {
    pub wanted: Wanted,
    pub limit: Measure<f64>,
    pub value: Measure<Value>,
}

/// Title, and its figures.
type Figures = (&'static str, fn() -> Vec<Figure>);

pub const TABLES: [Figures; 8] = [
    ("small messages, one way", latency),
    ("small messages a second", rates),
    ("streams", streams),
    ("buffers that are not whole pages", buffers),
    ("foreign memory by kind", foreign),
    ("round trips when everything is routed", routed),
    ("two kinds of message by turns", mixes),
    ("many pairs at once", pairs),
];

fn failed(error: std::io::Error) -> String {
    error.to_string()
}

fn latency() -> Vec<Figure> {
    type Called = (&'static str, &'static [&'static str]);
    let one = |(program, more): Called, group: &'static str, bytes: usize, floor: f64, aim: f64| {
        let length = format!("{},", size(bytes));
        let what = [&[group, &length, program], more].concat().join(" ");
        Figure {
            wanted: Wanted { group, what, limit: LINE, unit: "ns", floor, aim },
            limit: Box::new(|_| Handoff::measure().map(|handoff| handoff.summary.p50).map_err(failed)),
            value: Box::new(move |bench| {
                let numbers = bench.perftest(program, bytes, more)?;
                let at = |index: usize| numbers.get(index).map(|microseconds| microseconds * 1e3);
                // Half a round trip, which is one way; an atomic's figure is all of it.
                Ok(Value { value: at(4).ok_or("no median")?, p10: None, p99: at(7) })
            }),
        }
    };
    vec![
        one(("ib_write_lat", &[]), "WRITE", 8, 4.0, 2.5),
        one(("ib_write_lat", &[]), "WRITE", 64, 4.0, 2.5),
        one(("ib_send_lat", &[]), "SEND", 64, 2.0, 1.6),
        one(("ib_send_lat", &["-c", "UD"]), "SEND", 64, 2.5, 1.8),
        one(("ib_atomic_lat", &[]), "FETCH_ADD", 8, 2.0, 1.6),
    ]
}

fn rates() -> Vec<Figure> {
    type Called = (&'static str, usize, &'static [&'static str]);
    let one = |(program, bytes, more): Called, group: &'static str, floor: f64, aim: f64| {
        let length = format!("{},", size(bytes));
        let what = [&[group, &length, program], more].concat().join(" ");
        Figure {
            wanted: Wanted { group, what, limit: ring::HEAD_TAIL, unit: "M/s", floor, aim },
            limit: Box::new(|bench| {
                ring::head_tail(RING_MESSAGES / bench.effort.limits.divisor as u64).map_err(failed)
            }),
            value: Box::new(move |bench| {
                let numbers = bench.perftest(program, bytes, more)?;
                numbers.get(4).copied().map(Value::of).ok_or_else(|| "no rate".to_owned())
            }),
        }
    };
    vec![
        // A completion of every message is polled, at both ends; by itself perftest asks for one of a hundred.
        one(("ib_send_bw", 64, &["-Q", "1"]), "SEND", 0.09, 0.15),
        one(("ib_send_bw", 64, &["-c", "UD", "-Q", "1"]), "SEND", 0.07, 0.12),
        one(("ib_write_bw", 64, &[]), "WRITE", 0.2, 0.3),
        one(("ib_atomic_bw", 8, &["-o", "16"]), "FETCH_ADD", 0.1, 0.2),
    ]
}

const ONE_COPY: &str = "one copy, same buffers";
const TWO_COPIES: &str = "two copies, same buffers";

/// A stream of the harness, whose places are as many as may be in flight.
fn harness(operation: Operation, bytes: usize, floor: f64, aim: f64) -> Figure {
    let (group, twice) = (operation.name(), operation == Operation::Send);
    let limit = if twice { TWO_COPIES } else { ONE_COPY };
    let what = format!("{group} {}", size(bytes));
    Figure {
        wanted: Wanted { group, what, limit, unit: "Gb/s", floor, aim },
        limit: Box::new(move |bench| {
            let (places, total) = (relay_copy::slots(bytes), bench.effort.copied_bytes);
            if !twice {
                return copy::gbit_per_s(&Copies::once(bytes, places, places, total)).map_err(failed);
            }
            let (two, read) = (Copies::twice(bytes, places, total), Copies::once_and_read(bytes, places, total));
            let refused = "the limit is refused: one copy that is read is more than four times as fast as two";
            copy::two_copies(&two, &read, copy::gbit_per_s).map_err(failed)?.ok_or_else(|| refused.to_owned())
        }),
        value: Box::new(move |bench| bench.stream(Memory::Ordinary, operation, bytes)),
    }
}

/// The same of SENDs, whose receiver reads all that comes: bytes that a receiver never looks at can stay in the other
/// core's cache.
fn read(bytes: usize, floor: f64, aim: f64) -> Figure {
    let what = format!("SEND {}, received and read", size(bytes));
    Figure {
        wanted: Wanted { group: "SEND", what, limit: "two copies, read", unit: "Gb/s", floor, aim },
        limit: Box::new(move |bench| {
            let (places, total) = (relay_copy::slots(bytes), bench.effort.copied_bytes);
            copy::gbit_per_s(&Copies::twice_and_read(bytes, places, total)).map_err(failed)
        }),
        value: Box::new(move |bench| bench.read_stream(bytes)),
    }
}

/// A stream of perftest, whose messages all come from one place and go to one place.
fn perftest(program: &'static str, group: &'static str, bytes: usize, floor: f64, aim: f64) -> Figure {
    let what = format!("{group} {}, {program}", size(bytes));
    Figure {
        wanted: Wanted { group, what, limit: "one copy, one buffer", unit: "Gb/s", floor, aim },
        limit: Box::new(move |bench| {
            let copies = Copies::once(bytes, 1, PERFTEST_DEPTH, bench.effort.copied_bytes);
            copy::gbit_per_s(&copies).map_err(failed)
        }),
        value: Box::new(move |bench| {
            let numbers = bench.perftest(program, bytes, &[])?;
            numbers.get(3).copied().map(Value::of).ok_or_else(|| "no bandwidth".to_owned())
        }),
    }
}

fn streams() -> Vec<Figure> {
    const KB: usize = 1 << 10;
    let mut list = Vec::new();
    for (bytes, floor, aim) in [(4 * KB, 0.4, 0.65), (64 * KB, 0.7, 0.9), (KB * KB, 0.7, 0.9)] {
        list.push(harness(Operation::Write, bytes, floor, aim));
        list.push(perftest("ib_write_bw", "WRITE", bytes, floor, aim));
    }
    list.push(harness(Operation::Send, 64 * KB, 0.7, 0.95));
    list.push(harness(Operation::Send, 256 * KB, 0.7, 0.95));
    list.push(read(4 * KB, 0.4, 0.65));
    list.push(read(64 * KB, 0.7, 0.95));
    list.push(harness(Operation::Read, 64 * KB, 0.7, 0.9));
    list.push(perftest("ib_read_bw", "READ", 64 * KB, 0.7, 0.9));
    list
}

/// Memory as `malloc` gives it, beside whole pages on the same path.
fn buffers() -> Vec<Figure> {
    const KB: usize = 1 << 10;
    let stream = |operation: Operation, bytes: usize| {
        let what = format!("{} {}, unaligned", operation.name(), size(bytes));
        Figure {
            wanted: Wanted { group: "buffers", what, limit: "whole pages", unit: "Gb/s", floor: 0.9, aim: 0.97 },
            limit: Box::new(move |bench| bench.stream(Memory::Ordinary, operation, bytes).map(|figure| figure.value)),
            value: Box::new(move |bench| bench.stream(Memory::Unaligned, operation, bytes)),
        }
    };
    let trip = |operation: Operation, bytes: usize, is_direct: bool| {
        let what = format!("{} {} within a page", operation.name(), size(bytes));
        let limit = if is_direct { "whole pages" } else { "whole pages, routed" };
        let (floor, aim) = if is_direct { (1.5, 1.2) } else { (1.3, 1.1) };
        Figure {
            wanted: Wanted { group: "small buffers", what, limit, unit: "us", floor, aim },
            limit: Box::new(move |bench| {
                let whole_pages = |bench: &mut Bench<'_>| bench.round_trip(Memory::Ordinary, operation, bytes);
                let figure = if is_direct { whole_pages(bench) } else { bench.routed(whole_pages) };
                figure.map(|figure| figure.value)
            }),
            value: Box::new(move |bench| bench.round_trip(Memory::Unaligned, operation, bytes)),
        }
    };
    let streams =
        [64 * KB, KB * KB].into_iter().flat_map(|bytes| Operation::ALL.map(|operation| stream(operation, bytes)));
    let trips = [64, KB]
        .into_iter()
        .flat_map(|bytes| Operation::ALL.map(|operation| trip(operation, bytes, operation == Operation::Send)));
    streams.chain(trips).collect()
}

/// Memory that the program shares by a file of its own, beside ordinary memory. The router grants none of it, so its
/// WRITEs and READs are routed.
fn foreign() -> Vec<Figure> {
    const MB: usize = 1 << 20;
    let is_direct = |operation: Operation, bytes: usize| operation == Operation::Send && bytes < MB;
    let measured = move |memory: Memory, operation: Operation, bytes: usize| {
        let (is_stream, what) = (bytes == MB, format!("{} {}, {}", operation.name(), size(bytes), memory.name()));
        let is_direct = is_direct(operation, bytes);
        let limit = if is_direct { "ordinary memory" } else { "ordinary memory, routed" };
        let (unit, floor, aim) = if is_stream { ("Gb/s", 0.8, 0.95) } else { ("us", 1.4, 1.15) };
        let measure = move |bench: &mut Bench<'_>, memory: Memory| match is_stream {
            true => bench.stream(memory, operation, bytes),
            false => bench.round_trip(memory, operation, bytes),
        };
        Figure {
            wanted: Wanted { group: "foreign", what, limit, unit, floor, aim },
            limit: Box::new(move |bench| {
                let ordinary = |bench: &mut Bench<'_>| measure(bench, Memory::Ordinary);
                let figure = if is_direct { ordinary(bench) } else { bench.routed(ordinary) };
                figure.map(|figure| figure.value)
            }),
            value: Box::new(move |bench| measure(bench, memory)),
        }
    };
    let kinds = [Memory::Foreign, Memory::SystemV];
    let of_kind = |memory| [64, MB].map(|bytes| Operation::ALL.map(|operation| measured(memory, operation, bytes)));
    kinds.into_iter().flat_map(of_kind).flatten().collect()
}

fn routed() -> Vec<Figure> {
    let what = "routed SEND 64 B, round trip".to_owned();
    vec![Figure {
        wanted: Wanted { group: "SEND", what, limit: relay::UNPINNED, unit: "us", floor: 1.3, aim: 1.15 },
        limit: Box::new(|bench| relay::unpinned_us(bench.effort.limits).map_err(failed)),
        value: Box::new(|bench| bench.routed(|bench| bench.round_trip(Memory::Ordinary, Operation::Send, 64))),
    }]
}

fn mixes() -> Vec<Figure> {
    let part = |operation, bytes| Part { operation, bytes };
    let one = |what: &str, mix: Mix| Figure {
        wanted: Wanted {
            group: "by turns",
            what: what.to_owned(),
            limit: "the slower of the two alone",
            unit: "M/s",
            floor: 0.5,
            aim: 0.8,
        },
        limit: Box::new(move |bench| Ok(bench.mix(mix.alone(0))?.value.min(bench.mix(mix.alone(1))?.value))),
        value: Box::new(move |bench| bench.mix(mix)),
    };
    let small = [part(Operation::Send, 64), part(Operation::Write, 64)];
    let sizes = [part(Operation::Send, 64), part(Operation::Send, 1 << 20)];
    vec![
        one("SEND (SRQ) and WRITE, 64 B", Mix { parts: small, shared_receives: true, slots: 256, duration_ms: 0 }),
        one("SENDs of 64 B and 1 MB", Mix { parts: sizes, shared_receives: false, slots: 8, duration_ms: 0 }),
    ]
}

fn pairs() -> Vec<Figure> {
    let total = |flowed: &[crate::verbs::flows::Flowed]| crowd::gbit_per_s(flowed).iter().sum::<f64>();
    let what = "WRITE 128 KB of all pairs together".to_owned();
    vec![Figure {
        wanted: Wanted { group: "pairs", what, limit: "one pair alone", unit: "Gb/s", floor: 0.9, aim: 1.0 },
        // A pair that polls, or one that sleeps as those of the crowd do: the better one.
        limit: Box::new(move |bench| {
            let polling = bench.stream(Memory::Ordinary, Operation::Write, CROWD.bytes)?.value;
            let flows_ms = bench.effort.flows_ms;
            let sleeping = total(&bench.crowd(CROWD)?.run_some(1, flows_ms)?);
            Ok(polling.max(sleeping))
        }),
        value: Box::new(move |bench| {
            let flows_ms = bench.effort.flows_ms;
            Ok(Value::of(total(&bench.crowd(CROWD)?.run(flows_ms)?)))
        }),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_has_a_name_of_its_own_and_a_floor_that_its_aim_beats() {
        let figures: Vec<Figure> = TABLES.iter().flat_map(|(_, figures)| figures()).collect();
        let mut names: Vec<&str> = figures.iter().map(|figure| figure.wanted.what.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), figures.len());
        for figure in &figures {
            let Wanted { floor, aim, unit, .. } = figure.wanted;
            assert_eq!(aim < floor, ["ns", "us"].contains(&unit), "{}", figure.wanted.what);
        }
    }
}
