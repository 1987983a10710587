//! Measurements in one mode of the router, and the figures beside them.
use crate::host::{Agent, Freeflow, REPLY_MAX};
use crate::limits::{Limits, relay, relay_copy};
use crate::verbs::{Job, Memory, Operation, Outcome, Reply, Request, Traffic};
use serde::Serialize;
use std::net::Ipv6Addr;
use std::thread;
use std::time::{Duration, Instant};

/// Sizes that are measured with memory which needs the slow path.
const SLOW_PATH_BYTES: [usize; 3] = [64, 64 << 10, 1 << 20];

/// How much to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    pub latency_bytes: Vec<usize>,
    pub bandwidth_bytes: Vec<usize>,
    /// Each measurement.
    pub duration_ms: u64,
    /// Watching an idle router.
    pub idle_s: f64,
}

impl Plan {
    pub fn full() -> Self {
        Self {
            latency_bytes: vec![2, 8, 64, 256, 1024, 4096],
            bandwidth_bytes: vec![64, 1 << 10, 4 << 10, 64 << 10, 1 << 20],
            duration_ms: 800,
            idle_s: 5.0,
        }
    }

    pub fn quick() -> Self {
        Self {
            latency_bytes: vec![64, 4096],
            bandwidth_bytes: vec![64, 64 << 10, 1 << 20],
            duration_ms: 150,
            idle_s: 2.0,
        }
    }

    /// Every measurement of a kind of traffic, with the memory to use.
    pub fn jobs(&self, traffic: Traffic) -> Vec<(Memory, Job)> {
        let sizes = match traffic {
            Traffic::Latency => &self.latency_bytes,
            Traffic::Bandwidth | Traffic::BandwidthRead => &self.bandwidth_bytes,
        };
        let mut jobs = Vec::new();
        for operation in Operation::ALL {
            for memory in Memory::OF_TRAFFIC {
                let few = memory == Memory::SlowPath;
                for &bytes in sizes.iter().filter(|bytes| !few || SLOW_PATH_BYTES.contains(bytes)) {
                    let slots = match traffic {
                        Traffic::Latency => 1,
                        Traffic::Bandwidth | Traffic::BandwidthRead => relay_copy::slots(bytes),
                    };
                    jobs.push((memory, Job { traffic, operation, bytes, slots, duration_ms: self.duration_ms }));
                }
            }
        }
        jobs
    }
}

/// One measurement beside its limit.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    pub mode: String,
    pub memory: Memory,
    pub job: Job,
    /// Why there are no figures.
    pub failure: Option<String>,
    pub outcome: Option<Outcome>,
    /// Messages that the router moved.
    pub message_count: u64,
    /// The limit's name and figure, in the unit of the outcome's figures.
    pub limit: Option<(String, f64)>,
    /// Latency: times the limit. Bandwidth: share of the limit.
    pub ratio: Option<f64>,
    /// Microseconds of CPU time for each message.
    pub router_us: Option<f64>,
    pub runner_us: Option<f64>,
    pub server_us: Option<f64>,
    /// The router's share of one core meanwhile.
    pub router_share: Option<f64>,
}

/// The limit that bounds a job.
fn limit_of(limits: &Limits, job: &Job) -> Option<(String, f64)> {
    let (name, bytes) = match (job.traffic, job.operation) {
        // A READ is answered by the router alone.
        (Traffic::Latency, Operation::Read) => (relay::TWO_PARTIES, 0),
        (Traffic::Latency, Operation::Send | Operation::Write) => (relay::UNPINNED, 0),
        (Traffic::Bandwidth | Traffic::BandwidthRead, _) => (relay_copy::COPIES_ONCE, job.bytes),
    };
    limits.figure(name, bytes).map(|figure| (name.to_owned(), figure))
}

/// Prepares both ends in the same way and connects them.
pub fn connect(runner: &mut Agent, server: &mut Agent, prepare: &Request) -> Result<(), String> {
    let address = |reply| match reply {
        Reply::Prepared(address) => Ok(address),
        other => Err(format!("unexpected: {other:?}")),
    };
    let there = address(server.ask(prepare)?)?;
    let here = address(runner.ask(prepare)?)?;
    server.ask(&Request::Connect { peer: here })?;
    runner.ask(&Request::Connect { peer: there })?;
    Ok(())
}

pub fn ended(reply: Reply) -> Result<Outcome, String> {
    match reply {
        Reply::Ended(outcome) => Ok(outcome),
        other => Err(format!("unexpected: {other:?}")),
    }
}

/// Two containers on one router.
pub struct Pair<'a> {
    pub host: &'a Freeflow,
    pub runner: Agent,
    pub server: Agent,
    /// Counts the pairs, so that no name is still taken.
    generation: u32,
}

/// The router's part of a measurement.
struct Watched {
    outcome: Outcome,
    served: Outcome,
    router_cpu_ns: u64,
}

impl<'a> Pair<'a> {
    pub fn new(host: &'a Freeflow) -> Result<Self, String> {
        Self::with_generation(host, 1)
    }

    /// One of several pairs on a router.
    pub fn numbered(host: &'a Freeflow, number: u32) -> Result<Self, String> {
        Self::with_generation(host, number)
    }

    fn with_generation(host: &'a Freeflow, generation: u32) -> Result<Self, String> {
        let server = host.agent(&format!("bench-server-{generation}"))?;
        let runner = host.agent(&format!("bench-runner-{generation}"))?;
        Ok(Self { host, runner, server, generation })
    }

    /// Connects the two ends, runs a job, frees everything.
    pub fn measure(&mut self, mode: &str, memory: Memory, job: Job, limits: &Limits) -> Measured {
        let watched = self.watch(memory, job);
        if watched.is_err() {
            let _ = self.renew();
        }
        measured(mode, memory, job, limits, watched)
    }

    /// The virtual address of the server's container: its GID is that address.
    pub fn server_address(&mut self) -> Result<String, String> {
        address_of(&mut self.server)
    }

    /// A connected pair of QPs that nobody uses.
    pub fn connect(&mut self, memory: Memory, job: Job) -> Result<(), String> {
        connect(&mut self.runner, &mut self.server, &Request::Prepare { memory, job })
    }

    /// Begins again with other containers: an end that failed leaves the other waiting.
    pub fn renew(&mut self) -> Result<(), String> {
        *self = Self::with_generation(self.host, self.generation + 1)?;
        Ok(())
    }

    /// One job of two that the router's CPU time is not of interest to.
    pub fn outcome(&mut self, memory: Memory, job: Job) -> Result<Outcome, String> {
        self.watch(memory, job).map(|watched| watched.outcome)
    }

    pub fn release(&mut self) -> Result<(), String> {
        self.runner.ask(&Request::Release)?;
        self.server.ask(&Request::Release)?;
        Ok(())
    }

    fn watch(&mut self, memory: Memory, job: Job) -> Result<Watched, String> {
        self.connect(memory, job)?;
        let passive =
            job.operation == Operation::Read || (job.traffic != Traffic::Latency && job.operation == Operation::Write);
        if !passive {
            self.server.ask(&Request::Serve { job })?;
        }
        let within = REPLY_MAX + Duration::from_millis(job.duration_ms);
        let cpu = self.host.router_cpu_ns();
        self.runner.send(&Request::Run { job })?;
        let outcome = ended(self.runner.receive(within)?)?;
        let router_cpu_ns = self.host.router_cpu_ns().saturating_sub(cpu);
        let nothing = Outcome { figures: None, message_count: 0, cpu_ns: 0, elapsed_ns: 0 };
        let served = if passive { nothing } else { ended(self.server.receive(within)?)? };
        self.release()?;
        Ok(Watched { outcome, served, router_cpu_ns })
    }
}

fn measured(mode: &str, memory: Memory, job: Job, limits: &Limits, watched: Result<Watched, String>) -> Measured {
    let limit = limit_of(limits, &job);
    let (failure, watched) = match watched {
        Ok(watched) if watched.outcome.figures.is_none() => (Some("too few messages".to_owned()), None),
        Ok(watched) => (None, Some(watched)),
        Err(error) => (Some(error), None),
    };
    // A ping-pong's round trip is two messages; a READ is one.
    let each = match (job.traffic, job.operation) {
        (Traffic::Latency, Operation::Send | Operation::Write) => 2,
        _ => 1,
    };
    let message_count = watched.as_ref().map_or(0, |watched| watched.outcome.message_count * each);
    let a_message = |ns: u64| ns as f64 / 1e3 / message_count.max(1) as f64;
    let figure = watched.as_ref().and_then(|watched| watched.outcome.figures).map(|figures| figures.p50);
    let ratio = figure.zip(limit.as_ref()).map(|(figure, (_, limit))| figure / limit);
    Measured {
        mode: mode.to_owned(),
        memory,
        job,
        failure,
        message_count,
        limit,
        ratio,
        router_us: watched.as_ref().map(|watched| a_message(watched.router_cpu_ns)),
        runner_us: watched.as_ref().map(|watched| a_message(watched.outcome.cpu_ns)),
        server_us: watched.as_ref().map(|watched| a_message(watched.served.cpu_ns)),
        router_share: watched
            .as_ref()
            .map(|watched| watched.router_cpu_ns as f64 / watched.outcome.elapsed_ns.max(1) as f64),
        outcome: watched.map(|watched| watched.outcome),
    }
}

/// The virtual address of an agent's container.
pub fn address_of(agent: &mut Agent) -> Result<String, String> {
    let job = Job { traffic: Traffic::Latency, operation: Operation::Send, bytes: 64, slots: 1, duration_ms: 0 };
    let reply = agent.ask(&Request::Prepare { memory: Memory::Ordinary, job })?;
    agent.ask(&Request::Release)?;
    let Reply::Prepared(address) = reply else { return Err(format!("unexpected: {reply:?}")) };
    let address = Ipv6Addr::from(address.gid);
    Ok(address.to_ipv4_mapped().map_or(address.to_string(), |address| address.to_string()))
}

/// Cost of a router without work.
#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    pub mode: String,
    pub what: &'static str,
    pub seconds: f64,
    /// Share of one core, all threads of the router.
    pub share: f64,
    /// The worker's share, as the router itself counts it (`worker_cpu_us`).
    pub worker_share: Option<f64>,
}

/// Time for a router to notice that there is nothing to do.
const SETTLE: Duration = Duration::from_millis(500);

pub fn idle(host: &Freeflow, mode: &str, what: &'static str, seconds: f64) -> Result<Idle, String> {
    let worker_us = || -> Result<Option<u64>, String> {
        Ok(host.status()?.get("worker_cpu_us").and_then(serde_json::Value::as_u64))
    };
    thread::sleep(SETTLE);
    let worker_before = worker_us()?;
    // Asking for the status wakes the router; what follows is its own.
    thread::sleep(SETTLE);
    let (begun, cpu) = (Instant::now(), host.router_cpu_ns());
    thread::sleep(Duration::from_secs_f64(seconds));
    let elapsed = begun.elapsed().as_secs_f64();
    let share = host.router_cpu_ns().saturating_sub(cpu) as f64 / 1e9 / elapsed;
    let worker_after = worker_us()?;
    let worker_elapsed = begun.elapsed().as_secs_f64() + SETTLE.as_secs_f64();
    let worker_share = worker_before
        .zip(worker_after)
        .map(|(before, after)| after.saturating_sub(before) as f64 / 1e6 / worker_elapsed);
    Ok(Idle { mode: mode.to_owned(), what, seconds: elapsed, share, worker_share })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Summary;

    fn watched(p50: f64, message_count: u64) -> Watched {
        let figures = Summary::of(&mut [p50]);
        let outcome = Outcome { figures, message_count, cpu_ns: 4_000_000, elapsed_ns: 8_000_000 };
        Watched { outcome, served: Outcome { figures: None, ..outcome }, router_cpu_ns: 2_000_000 }
    }

    #[test]
    fn a_round_trip_is_two_messages() {
        let job = Job { traffic: Traffic::Latency, operation: Operation::Send, bytes: 64, slots: 1, duration_ms: 1 };
        let result = measured("adaptive", Memory::Shared, job, &Limits::default(), Ok(watched(5.0, 1000)));
        assert_eq!((result.message_count, result.router_us, result.runner_us), (2000, Some(1.0), Some(2.0)));
        assert_eq!((result.router_share, result.ratio), (Some(0.25), None));
        let job = Job { operation: Operation::Read, ..job };
        let result = measured("adaptive", Memory::Shared, job, &Limits::default(), Ok(watched(5.0, 1000)));
        assert_eq!(result.message_count, 1000);
    }

    #[test]
    fn failures_are_kept() {
        let job = Job { traffic: Traffic::Bandwidth, operation: Operation::Send, bytes: 64, slots: 8, duration_ms: 1 };
        let result = measured("lowcpu", Memory::Shared, job, &Limits::default(), Err("why".to_owned()));
        assert_eq!((result.failure.as_deref(), result.outcome), (Some("why"), None));
        let mut without = watched(5.0, 0);
        without.outcome.figures = None;
        let result = measured("lowcpu", Memory::Shared, job, &Limits::default(), Ok(without));
        assert!(result.failure.is_some() && result.outcome.is_none());
    }

    #[test]
    fn plans_cover_every_operation_and_memory() {
        for plan in [Plan::full(), Plan::quick()] {
            assert_eq!(plan.jobs(Traffic::Latency).len(), plan.latency_bytes.len() * 6 + 3);
            let jobs = plan.jobs(Traffic::Bandwidth);
            assert_eq!(jobs.len(), plan.bandwidth_bytes.len() * 6 + 9);
            assert!(jobs.iter().all(|(_, job)| job.slots >= 4 && job.bytes >= 8));
        }
    }
}
