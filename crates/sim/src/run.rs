//! One run of a plan: its hosts, who takes part, what was found wrong. What it does stands in
//! `workload`, `datagrams`, `windows` and `faults`; what must be true in the end in `checker`.
use crate::plan::{Fault, Plan};
use crate::rng::Rng;
use crate::sim::Sim;
use crate::topology::Topology;

/// Reminder that the workload asked for.
#[derive(Clone, Copy, Debug)]
pub enum Action {
    Post {
        connection: usize,
        side: usize,
    },
    /// In a dialogue.
    Answer {
        connection: usize,
        side: usize,
    },
    Datagram {
        party: usize,
    },
    Repost {
        pool: usize,
    },
    Line {
        host: usize,
        down: bool,
    },
    Fault(Fault),
    Reconnect {
        connection: usize,
    },
    /// Out of SQD again.
    GoOn {
        connection: usize,
        side: usize,
    },
    Drain,
}

pub struct Run {
    pub plan: Plan,
    pub sim: Sim,
    pub topology: Topology,
    pub rng: Rng,
    pub(crate) actions: Vec<Action>,
    pub wrongs: Vec<String>,
    pub completions: u64,
    pub(crate) drain_at: u64,
}
