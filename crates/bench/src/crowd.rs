//! Many pairs of containers that all stream at once, each pair over connections of its own.
use crate::host::{Agent, REPLY_MAX};
use crate::sys;
use crate::verbs::flows::{Flowed, Flows, Run};
use crate::verbs::{Address, Reply, Request};
use std::time::Duration;

/// Containers that start at the same time.
const STARTING_MAX: usize = 16;
/// Time for all programs to hear when they begin.
const HEAD_START_NS: u64 = 500_000_000;

pub struct PairOfAgents {
    pub runner: Agent,
    pub server: Agent,
}

pub struct Crowd {
    pairs: Vec<PairOfAgents>,
}

impl Crowd {
    /// So many pairs; `start` begins to run the one of a number, and need not wait for it.
    pub fn new(
        count: usize,
        flows: Flows,
        mut start: impl FnMut(usize) -> Result<PairOfAgents, String>,
    ) -> Result<Self, String> {
        let mut crowd = Self { pairs: Vec::with_capacity(count) };
        while crowd.pairs.len() < count {
            let from = crowd.pairs.len();
            for number in from..count.min(from + STARTING_MAX / 2) {
                crowd.pairs.push(start(number)?);
            }
            crowd.pairs[from..].iter_mut().try_for_each(|pair| connect(pair, flows))?;
        }
        Ok(crowd)
    }

    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// One run of all of them.
    pub fn run(&mut self, duration_ms: u64) -> Result<Vec<Flowed>, String> {
        self.run_some(usize::MAX, duration_ms)
    }

    /// The same of the first ones only.
    pub fn run_some(&mut self, count: usize, duration_ms: u64) -> Result<Vec<Flowed>, String> {
        let run = Run { begin_ns: sys::monotonic_ns() + HEAD_START_NS, duration_ms };
        for pair in self.pairs.iter_mut().take(count) {
            pair.runner.send(&Request::RunFlows { run })?;
        }
        let within = 2 * REPLY_MAX + Duration::from_millis(duration_ms);
        let receive = |pair: &mut PairOfAgents| match pair.runner.receive(within)? {
            Reply::Flowed(flowed) => Ok(flowed),
            other => Err(format!("unexpected: {other:?}")),
        };
        self.pairs.iter_mut().take(count).map(receive).collect()
    }
}

impl Drop for Crowd {
    /// All end at the same time; each would be waited for otherwise.
    fn drop(&mut self) {
        for pair in &mut self.pairs {
            pair.runner.dismiss();
            pair.server.dismiss();
        }
    }
}

fn connect(pair: &mut PairOfAgents, flows: Flows) -> Result<(), String> {
    let prepare = |agent: &mut Agent| -> Result<Vec<Address>, String> {
        agent.ask(&Request::Hello)?;
        match agent.ask(&Request::PrepareFlows { flows })? {
            Reply::FlowsPrepared(addresses) => Ok(addresses),
            other => Err(format!("unexpected: {other:?}")),
        }
    };
    let runners = prepare(&mut pair.runner)?;
    let servers = prepare(&mut pair.server)?;
    pair.server.ask(&Request::ConnectFlows { peers: runners })?;
    pair.runner.ask(&Request::ConnectFlows { peers: servers })?;
    Ok(())
}

/// Rate of each connection, Gb/s.
pub fn gbit_per_s(flowed: &[Flowed]) -> Vec<f64> {
    let each = |flowed: &Flowed| {
        let ns = flowed.counted_ns as f64;
        flowed.bytes.iter().map(|&bytes| bytes as f64 * 8.0 / ns).collect::<Vec<_>>()
    };
    flowed.iter().flat_map(each).collect()
}
