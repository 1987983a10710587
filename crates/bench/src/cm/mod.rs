//! Connections by `librdmacm`, and rsockets beside the kernel's TCP between the same containers, over the lab's VXLAN.
//!
//! Everything runs in one lab of two hosts: a container on the second one and two on the first.
//! Compared runs alternate, one by one, and each figure is the median of its runs.
mod connections;
mod end;
pub(crate) mod library;
mod series;
mod streams;

pub use end::End;
pub use series::{Bound, Run, Series, Wanted, plots, table};
pub use streams::Kind;

use crate::host::{Agent, REPLY_MAX};
use crate::journal::Journal;
use crate::lab::{Lab, Location};
use crate::limits::relay_copy;
use crate::limits::wire::End as Any;
use crate::suite::{connect, ended};
use crate::verbs::{Job, Memory, Operation, Reply, Request, Traffic};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4};
use std::path::Path;
use std::time::Duration;

/// Room for path MTU 4096 and all headers.
const MTU: u32 = 4200;
/// The first port; each run takes the next one, so that none waits for the last one's to be free.
const PORT_FIRST: u16 = 20_000;
const SMALL_BYTES: usize = 64;
const STREAM_BYTES: usize = 64 << 10;
/// Connections that are on their way at once.
const BATCH: usize = 100;

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Runs of each figure; the median counts.
    pub runs: usize,
    pub duration_ms: u64,
    /// Of a run, in batches of [`BATCH`].
    pub connections: usize,
    /// Of a run, one after the other.
    pub first_bytes: usize,
}

impl Effort {
    pub const FULL: Self = Self { runs: 5, duration_ms: 600, connections: 1000, first_bytes: 100 };
    pub const QUICK: Self = Self { runs: 3, duration_ms: 200, connections: 300, first_bytes: 30 };
}

/// Where the second end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    SameHost,
    OtherHost,
}

impl Where {
    fn name(self) -> &'static str {
        match self {
            Self::SameHost => "one host",
            Self::OtherHost => "two hosts",
        }
    }
}

/// A container and its address.
struct Container {
    /// Keeps it there, and speaks verbs.
    agent: Agent,
    place: Location,
    address: Ipv4Addr,
}

impl Container {
    fn new(lab: &Lab, host: u32, name: &str) -> Result<Self, String> {
        let mut agent = lab.agent(host, name)?;
        let job = Job { traffic: Traffic::Latency, operation: Operation::Send, bytes: 64, slots: 1, duration_ms: 0 };
        let prepared = agent.ask(&Request::Prepare { memory: Memory::Ordinary, job })?;
        agent.ask(&Request::Release)?;
        let Reply::Prepared(address) = prepared else { return Err(format!("unexpected: {prepared:?}")) };
        let address = Ipv6Addr::from(address.gid).to_ipv4_mapped().ok_or("the GID is no IPv4 address")?;
        Ok(Self { agent, place: Location::Container(name.to_owned()), address })
    }
}

struct Bench<'a> {
    lab: &'a Lab,
    client: Container,
    same: Container,
    other: Container,
    effort: Effort,
    port: u16,
}

/// Source of a figure and its comparison: the pair of ends, and the part of their figures that counts.
#[derive(Clone, Copy, Debug)]
enum What {
    Connections,
    FirstByte,
    RoundTrip(Kind),
    Stream(Kind),
    /// WRITEs of verbs as long as the stream's calls: nobody copies but the routers, and nobody receives.
    Writes,
}

/// A figure, what is wanted of it, and how both are measured.
struct Figure {
    wanted: Wanted,
    place: Where,
    what: What,
    beside: Option<What>,
}

/// Title, and its figures.
type Figures = (&'static str, fn() -> Vec<Figure>);

const TABLES: [Figures; 3] =
    [("connections", connection_figures), ("round trips", round_trip_figures), ("streams", stream_figures)];

const PLACES: [Where; 2] = [Where::SameHost, Where::OtherHost];

fn wanted(what: &str, place: Where, unit: &'static str, limit: Option<&'static str>) -> Wanted {
    Wanted { part: "cm", what: format!("{what}, {}", place.name()), unit, limit, bound: None }
}

fn bounded(place: Where, at: Where, floor: f64, aim: f64) -> Option<Bound> {
    (place == at).then_some(Bound { floor, aim })
}

fn connection_figures() -> Vec<Figure> {
    let one = |place| {
        let mut wanted = wanted("connections, opened and closed", place, "1/s", None);
        wanted.bound = bounded(place, Where::SameHost, 5000.0, 25_000.0);
        Figure { wanted, place, what: What::Connections, beside: None }
    };
    let first = |place| Figure {
        wanted: wanted("time to first byte", place, "ms", None),
        place,
        what: What::FirstByte,
        beside: None,
    };
    PLACES.into_iter().map(one).chain(PLACES.into_iter().map(first)).collect()
}

const TCP: &str = "TCP over VXLAN";
const TCP_WITHIN: &str = "TCP within the host";

fn beside(place: Where) -> Option<&'static str> {
    Some(if place == Where::OtherHost { TCP } else { TCP_WITHIN })
}

fn round_trip_figures() -> Vec<Figure> {
    let one = |place| {
        let mut wanted = wanted("rsocket round trip, 64 B", place, "us", beside(place));
        wanted.bound = bounded(place, Where::OtherHost, 0.8, 0.55);
        Figure { wanted, place, what: What::RoundTrip(Kind::Rsocket), beside: Some(What::RoundTrip(Kind::Tcp)) }
    };
    PLACES.into_iter().map(one).collect()
}

fn stream_figures() -> Vec<Figure> {
    let one = |place| {
        let mut wanted = wanted("rsocket stream, 64 KB a call", place, "Gb/s", beside(place));
        wanted.bound = bounded(place, Where::OtherHost, 1.5, 2.5);
        Figure { wanted, place, what: What::Stream(Kind::Rsocket), beside: Some(What::Stream(Kind::Tcp)) }
    };
    let writes = |place| Figure {
        wanted: wanted("WRITEs of verbs, 64 KB", place, "Gb/s", beside(place)),
        place,
        what: What::Writes,
        beside: Some(What::Stream(Kind::Tcp)),
    };
    PLACES.into_iter().flat_map(|place| [one(place), writes(place)]).collect()
}

/// Measures everything into `all`, or the tables with `only` in their titles; the journal has what fails.
///
/// # Errors
/// There is no lab.
pub fn measure(
    freeflow: &Path,
    effort: Effort,
    only: &str,
    journal: &mut Journal,
    all: &mut Vec<Series>,
) -> Result<(), String> {
    let tables: Vec<_> = TABLES.iter().filter(|(title, _)| title.contains(only)).collect();
    if tables.is_empty() {
        return Ok(());
    }
    let lab = Lab::up(freeflow, MTU)?;
    let mut bench = Bench {
        lab: &lab,
        client: Container::new(&lab, 1, "cm-client")?,
        same: Container::new(&lab, 1, "cm-same")?,
        other: Container::new(&lab, 2, "cm-other")?,
        effort,
        port: PORT_FIRST,
    };
    lab.favour()?;
    for (title, figures) in tables {
        bench.table((journal, all), title, &figures())?;
    }
    Ok(())
}

impl Bench<'_> {
    /// One table, between two looks at the hand-off.
    fn table(
        &mut self,
        (journal, all): (&mut Journal, &mut Vec<Series>),
        title: &'static str,
        figures: &[Figure],
    ) -> Result<(), String> {
        println!();
        journal.handoff("before").map_err(|error| error.to_string())?;
        let mut series: Vec<Series> = figures.iter().map(|figure| Series::new(title, figure.wanted.clone())).collect();
        for _ in 0..self.effort.runs {
            for (figure, series) in figures.iter().zip(&mut series).filter(|(_, series)| series.failure.is_none()) {
                match self.run(figure) {
                    Ok(run) => series.runs.push(run),
                    Err(why) => {
                        journal.fail(format!("cm, {}: {why}", series.wanted.what));
                        series.failure = Some(why);
                    }
                }
            }
        }
        journal.show(table(&format!("Connection management and rsockets: {title}"), &series));
        journal.handoff("after").map_err(|error| error.to_string())?;
        all.extend(series);
        Ok(())
    }

    fn run(&mut self, figure: &Figure) -> Result<Run, String> {
        let limit = figure.beside.map(|what| self.measure(what, figure.place)).transpose()?;
        let figures = self.measure(figure.what, figure.place)?;
        Ok(Run { value: figures.0, limit: limit.map(|limit| limit.0), p10: figures.1, p99: figures.2 })
    }

    /// Median, p10 and p99.
    fn measure(&mut self, what: What, place: Where) -> Result<(f64, f64, f64), String> {
        self.port += 1;
        let (lab, port, effort) = (self.lab, self.port, self.effort);
        let server = if place == Where::SameHost { &self.same } else { &self.other };
        let (to, duration_ms) = (SocketAddrV4::new(server.address, port), effort.duration_ms);
        let (first, second) = match what {
            What::Connections => {
                let (count, batch) = (effort.connections, BATCH);
                (End::Listen { port, count, batch, greets: false }, End::Connect { to, count, batch })
            }
            What::FirstByte => {
                let count = effort.first_bytes;
                (End::Listen { port, count, batch: 1, greets: true }, End::FirstByte { to, count })
            }
            What::RoundTrip(kind) => {
                let bytes = SMALL_BYTES;
                (End::Echo { kind, port, bytes }, End::Ping { kind, to, bytes, duration_ms })
            }
            What::Writes => return self.writes(place),
            What::Stream(kind) => {
                (End::Sink { kind, port }, End::Source { kind, to, bytes: STREAM_BYTES, duration_ms })
            }
        };
        let (began, answered) = lab.ends((&server.place, &Any::Cm(first)), (&self.client.place, &Any::Cm(second)))?;
        // Of a stream the receiver counts.
        let figures = if matches!(what, What::Stream(_)) { answered.figures } else { began.figures };
        let figures = figures.ok_or("too few samples")?;
        Ok((figures.p50, figures.p10, figures.p99))
    }

    /// Figures of the transport without sockets, between the containers' agents.
    fn writes(&mut self, place: Where) -> Result<(f64, f64, f64), String> {
        let (bytes, duration_ms) = (STREAM_BYTES, self.effort.duration_ms);
        let (traffic, operation, slots) = (Traffic::Bandwidth, Operation::Write, relay_copy::slots(bytes));
        let job = Job { traffic, operation, bytes, slots, duration_ms };
        let server = if place == Where::SameHost { &mut self.same.agent } else { &mut self.other.agent };
        let runner = &mut self.client.agent;
        connect(runner, server, &Request::Prepare { memory: Memory::Ordinary, job })?;
        runner.send(&Request::Run { job })?;
        let outcome = ended(runner.receive(REPLY_MAX + Duration::from_millis(duration_ms))?)?;
        runner.ask(&Request::Release)?;
        server.ask(&Request::Release)?;
        let figures = outcome.figures.ok_or("too few messages")?;
        Ok((figures.p50, figures.p10, figures.p99))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_names_of_their_own_and_what_is_compared_has_two() {
        let figures: Vec<Figure> = TABLES.iter().flat_map(|(_, figures)| figures()).collect();
        let mut names: Vec<&str> = figures.iter().map(|figure| figure.wanted.what.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), figures.len());
        for figure in &figures {
            assert_eq!(figure.wanted.limit.is_some(), figure.beside.is_some(), "{}", figure.wanted.what);
        }
        assert_eq!(figures.iter().filter(|figure| figure.wanted.bound.is_some()).count(), 3);
    }

    #[test]
    fn streams_over_tcp() {
        // Not of the range from which the kernel gives ports to others.
        let port = 20_000 + (std::process::id() % 10_000) as u16;
        let to = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
        let echo = std::thread::spawn(move || End::Echo { kind: Kind::Tcp, port, bytes: 64 }.run());
        let ping = || End::Ping { kind: Kind::Tcp, to, bytes: 64, duration_ms: 5 }.run();
        let pinged = (0..10_000).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(2));
            ping().ok()
        });
        assert!(pinged.is_some_and(|figures| figures.figures.is_some_and(|summary| summary.p50 > 0.0)));
        assert!(echo.join().expect("no panic").is_ok_and(|figures| figures.count > 0));
    }
}
