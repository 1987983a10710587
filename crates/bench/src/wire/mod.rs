//! FreeFlow between two hosts, beside what the network between them can do and what the kernel's
//! TCP makes of it: all over the same links, in turns, in one run.
//!
//! Each figure is the median of several runs. The runs of those that are compared alternate, so that what
//! disturbs one disturbs the other.
mod flows;
mod link;
mod ratios;
mod series;
mod shards;

pub use ratios::{Ratio, ratios};
pub use series::{Cost, Figure, Key, MTU_LARGE, MTU_SMALL, Sample, Series, table};

use crate::journal::Journal;
use crate::lab::{Lab, Location};
use crate::limits::wire::End;
use crate::verbs::Operation;
use link::Link;
use serde::Serialize;
use series::{SMALL_BYTES, STREAM_BYTES};
use std::path::Path;

const SIZES: [usize; 6] = [2 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Those that are SENT, too.
const SEND_SIZES: [usize; 3] = [4 << 10, 64 << 10, STREAM_BYTES];
/// Faults of packets that both routers send, in the table about them.
const UNRELIABLE: [(Key, &[&str]); 3] =
    [(Key::Lossy, &["--loss", "0.1%"]), (Key::VeryLossy, &["--loss", "1%"]), (Key::Reordered, &["--reorder", "1%"])];
const HALF_OF_LONG_ROUND_TRIP: &[&str] = &["--delay", "5ms"];
const LONG_ROUND_TRIP_S: f64 = 0.01;
/// Messages in flight there, at most.
const LONG_SLOTS_MAX: usize = 128;
/// Of the ends in the hosts' own networks; the routers have 4791.
const PORT: u16 = 14_791;

/// How much to measure.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Effort {
    /// Runs of each figure; the median counts.
    pub runs: usize,
    pub duration_ms: u64,
    /// Of one run with all flows, milliseconds.
    pub flows_ms: u64,
    /// Containers on each host, with [`flows::FLOWS_A_PAIR`] connections each.
    pub pairs: usize,
}

impl Effort {
    pub const FULL: Self = Self { runs: 5, duration_ms: 600, flows_ms: 2000, pairs: 64 };
    pub const QUICK: Self = Self { runs: 3, duration_ms: 200, flows_ms: 1000, pairs: 16 };
}

/// One lab and what is measured in it.
struct Bench<'a> {
    lab: &'a Lab,
    link: Link<'a>,
    effort: Effort,
    offloads: bool,
    series: Vec<Series>,
}

type Measure = fn(&mut Bench<'_>) -> Result<(), String>;

/// Tables in a lab with the larger MTU; with the smaller one only the first.
const TABLES: [(&str, Measure); 7] = [
    ("streams", |bench| bench.streams()),
    ("round trips and small messages", |bench| bench.small()),
    ("sizes of messages", |bench| bench.sizes()),
    ("loss, reordering and delay of packets", |bench| bench.unreliable()),
    ("plain and sealed packets", |bench| bench.sealed()),
    ("many flows", |bench| flows::measure(bench)),
    ("one shard and four", |bench| shards::measure(bench)),
];
/// After those, with the links' offloads off.
const LAST_TABLE: (&str, Measure) = ("streams, no GSO or GRO on the links", |bench| bench.streams());

/// Measures everything into `all`, or the tables with `only` in their titles; the journal has what fails.
pub fn measure(
    freeflow: &Path,
    effort: Effort,
    only: &str,
    journal: &mut Journal,
    all: &mut Vec<Series>,
) -> Result<(), String> {
    for mtu in [MTU_LARGE, MTU_SMALL] {
        let count = if mtu == MTU_LARGE { TABLES.len() } else { 1 };
        let tables: Vec<_> = TABLES[..count].iter().filter(|(title, _)| title.contains(only)).collect();
        let has_last = LAST_TABLE.0.contains(only);
        if tables.is_empty() && !has_last {
            continue;
        }
        let lab = Lab::up(freeflow, mtu)?;
        let mut bench = Bench { lab: &lab, link: Link::new(&lab)?, effort, offloads: true, series: Vec::new() };
        for (title, measure) in tables {
            bench.table((journal, all), title, measure)?;
        }
        if has_last {
            lab.set_offloads(false)?;
            bench.offloads = false;
            bench.table((journal, all), LAST_TABLE.0, &LAST_TABLE.1)?;
        }
    }
    Ok(())
}

impl Bench<'_> {
    /// One table, between two looks at the hand-off.
    fn table(
        &mut self,
        (journal, all): (&mut Journal, &mut Vec<Series>),
        title: &str,
        measure: &Measure,
    ) -> Result<(), String> {
        println!();
        journal.handoff("before").map_err(|error| error.to_string())?;
        if let Err(error) = measure(self) {
            journal.fail(format!("wire, MTU {}, {title}: {error}", self.lab.mtu));
        }
        let series = std::mem::take(&mut self.series);
        journal.show(table(&format!("Two hosts, MTU {}: {title}", self.lab.mtu), &series));
        journal.handoff("after").map_err(|error| error.to_string())?;
        for one in &series {
            if let Some(failure) = &one.failure {
                journal.fail(format!("wire, {}: {failure}", one.name()));
            }
        }
        all.extend(series);
        Ok(())
    }

    /// Another run of a figure. After a failure the connection is made again, and the figure not measured again.
    fn sample(&mut self, key: Key, bytes: usize, run: impl Fn(&mut Self) -> Result<Sample, String>) {
        let (mtu, offloads) = (self.lab.mtu, self.offloads);
        let is_this = |one: &Series| one.key == key && one.bytes == bytes;
        let index = self.series.iter().position(is_this).unwrap_or_else(|| {
            self.series.push(Series::new(key, bytes, mtu, offloads));
            self.series.len() - 1
        });
        if self.series[index].failure.is_some() {
            return;
        }
        match run(self) {
            Ok(sample) => self.series[index].runs.push(sample),
            Err(why) => {
                eprintln!("freeflow-bench: {key:?}, {bytes} B: {why}");
                self.series[index].failure = Some(why);
                if key.is_freeflow()
                    && let Err(error) = self.link.renew()
                {
                    eprintln!("freeflow-bench: no new containers: {error}");
                }
            }
        }
    }

    fn bare_stream(&mut self) -> Result<Sample, String> {
        let payload_bytes = if self.lab.mtu == MTU_LARGE { 4096 } else { 1024 };
        let duration_ms = self.effort.duration_ms;
        let sink = End::Sink { port: PORT, payload_bytes };
        let source = End::Source { to: Lab::address(2), port: PORT, payload_bytes, duration_ms };
        let (sent, received) = self.lab.ends((&Location::Host(2), &sink), (&Location::Host(1), &source))?;
        if received.bad > 0 {
            return Err(format!("{} wrong ICRCs", received.bad));
        }
        let figures = sent.figures.ok_or("too few samples")?;
        let gbit = |payload_bytes: u64| payload_bytes as f64 * 8.0 / 1e9;
        let cost = Cost {
            sender: sent.cpu_ns as f64 / 1e3 / gbit(sent.payload_bytes),
            receiver: received.cpu_ns as f64 / 1e3 / gbit(received.payload_bytes),
        };
        Ok(Sample { figures, cost: Some(cost) })
    }

    fn iperf(&mut self, overlay: bool) -> Result<Sample, String> {
        let seconds = self.effort.duration_ms as f64 / 1e3;
        let figures = if overlay {
            let (from, to) = self.link.places();
            self.lab.iperf(&from, (&to, self.link.server_address()?), seconds)?
        } else {
            self.lab.iperf(&Location::Host(1), (&Location::Host(2), Lab::address(2)), seconds)?
        };
        let a_gbit = |cores: f64| cores * 1e6 / figures.gbit_per_s;
        let cost = Cost { sender: a_gbit(figures.sender_cores), receiver: a_gbit(figures.receiver_cores) };
        Sample::of(figures.gbit_per_s, Some(cost))
    }

    fn streams(&mut self) -> Result<(), String> {
        for _ in 0..self.effort.runs {
            self.sample(Key::BareStream, STREAM_BYTES, Self::bare_stream);
            self.sample(Key::Write, STREAM_BYTES, |bench| bench.stream(Operation::Write, STREAM_BYTES));
            self.sample(Key::IperfLink, 0, |bench| bench.iperf(false));
            self.sample(Key::IperfOverlay, 0, |bench| bench.iperf(true));
        }
        Ok(())
    }

    fn stream(&mut self, operation: Operation, bytes: usize) -> Result<Sample, String> {
        self.link.stream(operation, bytes, self.effort.duration_ms)
    }

    fn small(&mut self) -> Result<(), String> {
        let (to, bytes, duration_ms) = (Lab::address(2), SMALL_BYTES, self.effort.duration_ms);
        let (one, two) = (Location::Host(1), Location::Host(2));
        for _ in 0..self.effort.runs {
            self.sample(Key::UdpRoundTrip, bytes, |bench| {
                let ping = End::Ping { to, port: PORT, bytes, duration_ms };
                let (pinged, _) = bench.lab.ends((&two, &End::Echo { port: PORT }), (&one, &ping))?;
                Ok(Sample { figures: pinged.figures.ok_or("no round trips")?, cost: None })
            });
            self.sample(Key::SendRoundTrip, bytes, |bench| bench.link.round_trips(Operation::Send, bytes, duration_ms));
            self.sample(Key::TcpRoundTrip, bytes, |bench| {
                let to = bench.link.server_address()?;
                let (runner, server) = bench.link.places();
                let ping = End::TcpPing { to, port: PORT, bytes, duration_ms };
                let (pinged, _) = bench.lab.ends((&server, &End::TcpEcho { port: PORT, bytes }), (&runner, &ping))?;
                Ok(Sample { figures: pinged.figures.ok_or("no round trips")?, cost: None })
            });
            self.sample(Key::DatagramRate, bytes, |bench| {
                let flood = End::Flood { to, port: PORT, bytes, duration_ms };
                let (_, counted) = bench.lab.ends((&two, &End::Count { port: PORT }), (&one, &flood))?;
                let rate = counted.figures.ok_or("nothing counted")?.p50;
                Sample::of(rate / 1e6, None)
            });
            self.sample(Key::WriteRate, bytes, |bench| bench.link.rate(Operation::Write, bytes, duration_ms));
        }
        Ok(())
    }

    fn sizes(&mut self) -> Result<(), String> {
        for _ in 0..self.effort.runs.div_ceil(2) {
            self.sample(Key::BareStreamBeside, STREAM_BYTES, Self::bare_stream);
            for bytes in SIZES {
                self.sample(Key::Write, bytes, |bench| bench.stream(Operation::Write, bytes));
            }
            for bytes in SEND_SIZES {
                self.sample(Key::Send, bytes, |bench| bench.stream(Operation::Send, bytes));
            }
        }
        for _ in 0..self.effort.runs.div_ceil(2) {
            self.sample(Key::Read, STREAM_BYTES, |bench| bench.stream(Operation::Read, STREAM_BYTES));
        }
        Ok(())
    }

    fn unreliable(&mut self) -> Result<(), String> {
        for _ in 0..self.effort.runs {
            self.sample(Key::LossFree, STREAM_BYTES, |bench| bench.stream(Operation::Write, STREAM_BYTES));
            for (key, faults) in UNRELIABLE {
                self.lab.set_faults(Some(faults))?;
                self.sample(key, STREAM_BYTES, |bench| bench.stream(Operation::Write, STREAM_BYTES));
                self.lab.set_faults(None)?;
            }
            let slots = self.long_slots().ok_or("nothing to compare with")?;
            self.lab.set_faults(Some(HALF_OF_LONG_ROUND_TRIP))?;
            let duration_ms = 2 * self.effort.duration_ms;
            self.sample(Key::Long, STREAM_BYTES, |bench| {
                bench.link.stream_of(Operation::Write, STREAM_BYTES, slots, duration_ms)
            });
            self.lab.set_faults(None)?;
        }
        Ok(())
    }

    /// In turns with a lab whose hosts seal what they send each other.
    fn sealed(&mut self) -> Result<(), String> {
        let lab = self.lab.beside("sealed", "sealed", &[])?;
        let (effort, offloads) = (self.effort, self.offloads);
        let mut other = Bench { lab: &lab, link: Link::new(&lab)?, effort, offloads, series: Vec::new() };
        for _ in 0..effort.runs {
            self.sample(Key::Plain, STREAM_BYTES, |bench| bench.stream(Operation::Write, STREAM_BYTES));
            other.sample(Key::Sealed, STREAM_BYTES, |bench| bench.stream(Operation::Write, STREAM_BYTES));
        }
        let counters = &lab.wire_status(1)?["counters"];
        if counters.get("keys_used").is_none() {
            return Err(format!("nothing was sealed: {counters}"));
        }
        self.series.append(&mut other.series);
        Ok(())
    }

    /// Messages that are twice what the network holds at a long round trip.
    fn long_slots(&self) -> Option<usize> {
        let short = self.series.iter().find(|series| series.key == Key::LossFree)?;
        let bytes = short.runs.last()?.figures.p50 * 1e9 / 8.0 * LONG_ROUND_TRIP_S;
        Some(((2.0 * bytes / STREAM_BYTES as f64).ceil() as usize).clamp(4, LONG_SLOTS_MAX))
    }
}
