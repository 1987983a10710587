//! A container on each host, and verbs traffic between the two.
use super::{Cost, Sample};
use crate::host::{Agent, REPLY_MAX};
use crate::lab::{Lab, Location};
use crate::limits::relay_copy;
use crate::verbs::{Address, Job, Memory, Operation, Outcome, Reply, Request, Traffic};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

pub struct Link<'a> {
    lab: &'a Lab,
    runner: Agent,
    server: Agent,
    /// Counts the pairs, so that no name is still taken.
    generation: u32,
    address: Option<Ipv4Addr>,
}

/// Counts of both ends and both routers.
struct Watched {
    outcome: Outcome,
    sender_ns: u64,
    receiver_ns: u64,
}

fn name(role: &str, generation: u32) -> String {
    format!("wire-{role}-{generation}")
}

fn ended(reply: Reply) -> Result<Outcome, String> {
    match reply {
        Reply::Ended(outcome) => Ok(outcome),
        other => Err(format!("unexpected: {other:?}")),
    }
}

impl<'a> Link<'a> {
    pub fn new(lab: &'a Lab) -> Result<Self, String> {
        Self::with_generation(lab, 1)
    }

    fn with_generation(lab: &'a Lab, generation: u32) -> Result<Self, String> {
        let mut server = lab.agent(2, &name("server", generation))?;
        let mut runner = lab.agent(1, &name("runner", generation))?;
        server.ask(&Request::Hello)?;
        runner.ask(&Request::Hello)?;
        lab.favour()?;
        Ok(Self { lab, runner, server, generation, address: None })
    }

    /// Begins again with other containers: an end that failed leaves the other waiting.
    pub fn renew(&mut self) -> Result<(), String> {
        *self = Self::with_generation(self.lab, self.generation + 1)?;
        Ok(())
    }

    /// Where the runner and the server are.
    pub fn places(&self) -> (Location, Location) {
        let place = |role| Location::Container(name(role, self.generation));
        (place("runner"), place("server"))
    }

    /// The server's address in the overlay: its GID is that address.
    pub fn server_address(&mut self) -> Result<Ipv4Addr, String> {
        if let Some(address) = self.address {
            return Ok(address);
        }
        let job = Job { traffic: Traffic::Latency, operation: Operation::Send, bytes: 64, slots: 1, duration_ms: 0 };
        let address = prepared(self.server.ask(&Request::Prepare { memory: Memory::Ordinary, job })?)?;
        self.server.ask(&Request::Release)?;
        let address = Ipv6Addr::from(address.gid).to_ipv4_mapped().ok_or("the GID is no IPv4 address")?;
        self.address = Some(address);
        Ok(address)
    }

    fn watch(&mut self, job: Job) -> Result<Watched, String> {
        let prepare = Request::Prepare { memory: Memory::Ordinary, job };
        let server = prepared(self.server.ask(&prepare)?)?;
        let runner = prepared(self.runner.ask(&prepare)?)?;
        self.server.ask(&Request::Connect { peer: runner })?;
        self.runner.ask(&Request::Connect { peer: server })?;
        let passive = job.operation == Operation::Read
            || (job.traffic == Traffic::Bandwidth && job.operation == Operation::Write);
        if !passive {
            self.server.ask(&Request::Serve { job })?;
        }
        let within = REPLY_MAX + Duration::from_millis(job.duration_ms);
        let before = [1, 2].map(|number| self.lab.router_cpu_ns(number));
        self.runner.send(&Request::Run { job })?;
        let outcome = ended(self.runner.receive(within)?)?;
        let after = [1, 2].map(|number| self.lab.router_cpu_ns(number));
        let served = if passive { 0 } else { ended(self.server.receive(within)?)?.cpu_ns };
        self.runner.ask(&Request::Release)?;
        self.server.ask(&Request::Release)?;
        let (sender_ns, receiver_ns) = (after[0] - before[0] + outcome.cpu_ns, after[1] - before[1] + served);
        Ok(Watched { outcome, sender_ns, receiver_ns })
    }

    /// Gb/s of a stream, and what it costs; of a READ, the sender of its data is the server's side.
    pub fn stream(&mut self, operation: Operation, bytes: usize, duration_ms: u64) -> Result<Sample, String> {
        self.stream_of(operation, bytes, relay_copy::slots(bytes), duration_ms)
    }

    /// The same with so many messages in flight.
    pub fn stream_of(
        &mut self,
        operation: Operation,
        bytes: usize,
        slots: usize,
        duration_ms: u64,
    ) -> Result<Sample, String> {
        let job = Job { traffic: Traffic::Bandwidth, operation, bytes, slots, duration_ms };
        let watched = self.watch(job)?;
        let gbit = watched.outcome.message_count as f64 * bytes as f64 * 8.0 / 1e9;
        let (sender, receiver) = (watched.sender_ns as f64 / 1e3 / gbit, watched.receiver_ns as f64 / 1e3 / gbit);
        let cost = match operation {
            Operation::Read => Cost { sender: receiver, receiver: sender },
            Operation::Send | Operation::Write => Cost { sender, receiver },
        };
        Ok(Sample { figures: watched.outcome.figures.ok_or("too few messages")?, cost: Some(cost) })
    }

    /// Million messages a second.
    pub fn rate(&mut self, operation: Operation, bytes: usize, duration_ms: u64) -> Result<Sample, String> {
        let sample = self.stream(operation, bytes, duration_ms)?;
        Ok(Sample { figures: sample.figures.scaled(1e3 / 8.0 / bytes as f64), ..sample })
    }

    /// Microseconds of a round trip.
    pub fn round_trips(&mut self, operation: Operation, bytes: usize, duration_ms: u64) -> Result<Sample, String> {
        let job = Job { traffic: Traffic::Latency, operation, bytes, slots: 1, duration_ms };
        let watched = self.watch(job)?;
        Ok(Sample { figures: watched.outcome.figures.ok_or("too few messages")?, cost: None })
    }
}

fn prepared(reply: Reply) -> Result<Address, String> {
    match reply {
        Reply::Prepared(address) => Ok(address),
        other => Err(format!("unexpected: {other:?}")),
    }
}
