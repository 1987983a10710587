//! The verbs harness: an ordinary program of the C verbs API, one end in each of two containers.
//!
//! The end in a container is an *agent*: it reads one [`Request`] a line from its standard input and answers each with
//! one [`Reply`] a line on its standard output. The host side commands both, carries their addresses from one
//! to the other, and looks at the router's CPU time in between; the agents exchange nothing but what they measure.
pub mod agent;
mod callgrind;
pub mod counting;
pub(crate) mod endpoint;
pub mod flows;
pub mod following;
mod job;
pub(crate) mod library;
pub mod mixed;
pub mod objects;
pub mod registration;
mod traffic;
mod watching;

pub use job::{Address, Job, Memory, Operation, Outcome, Traffic};

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Is somebody there? → `Done`.
    Hello,
    /// Makes memory, queues and a QP, in INIT with its receives posted. → `Prepared`.
    Prepare { memory: Memory, job: Job },
    /// Brings the QP to RTS. → `Done`.
    Connect { peer: Address },
    /// Answers the other end. → `Started`, then `Ended`.
    Serve { job: Job },
    /// Begins, and measures. → `Ended`.
    Run { job: Job },
    /// Registers and deregisters. → `Registered`.
    Register { memory: Memory, bytes: usize, count: usize, threads: usize },
    /// Makes objects and keeps them. → `Held`, with the memory that this process has then.
    Hold { kind: objects::Kind, count: usize },
    /// Makes several connections' ends. → `FlowsPrepared`.
    PrepareFlows { flows: flows::Flows },
    /// Brings their QPs to RTS. → `Done`.
    ConnectFlows { peers: Vec<Address> },
    /// Streams on all of them. → `Flowed`.
    RunFlows { run: flows::Run },
    /// The same for a stream of two kinds of message. → `Prepared`.
    PrepareMix { mix: mixed::Mix },
    /// Takes that stream. → `Started`, then `Ended`.
    ServeMix,
    /// Sends it. → `Ended`, its figures in millions of messages a second.
    RunMix { mix: mixed::Mix },
    /// Counts instructions, under callgrind, which writes to this file. → `Counted`.
    Count { job: Job, dumps: std::path::PathBuf },
    /// Of the held QPs. → `FlowsPrepared`.
    HeldAddresses,
    /// Brings the held QPs to RTS. → `Done`.
    ConnectHeld { peers: Vec<Address> },
    /// Sends on one of them, or receives, until its queues went round. → `Done`.
    UseHeld { index: usize, sends: bool },
    /// Works until a change shows. → `Started`, then `Followed`.
    Follow { sign: following::Sign },
    /// Sends and uses control verbs for so long. → `Watched`.
    Watch { duration_ms: u64 },
    /// This process' resources. → `Used`.
    Usage,
    /// Frees what `Prepare`, `PrepareFlows`, `PrepareMix` or `Hold` made. → `Done`.
    Release,
    /// Starts another program. → `Started`.
    Start { argv: Vec<String> },
    /// Waits for it, or ends it after the time. → `Output`.
    Finish { timeout_ms: u64 },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    Prepared(Address),
    Done,
    Started,
    Ended(Outcome),
    Registered(registration::Registration),
    FlowsPrepared(Vec<Address>),
    Flowed(flows::Flowed),
    Counted(Vec<counting::Counted>),
    Used(Usage),
    Watched(Watched),
    /// CLOCK_MONOTONIC, nanoseconds.
    Followed {
        at_ns: u64,
    },
    /// Before and after.
    Held(objects::Resident, objects::Resident),
    /// Exit status, or `None` when it was ended; both outputs together.
    Output {
        status: Option<i32>,
        text: String,
    },
    Failed(String),
}

/// The longest control verb and the longest message of each window of the time, milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Watched {
    pub control_ms: Vec<f64>,
    pub message_ms: Vec<f64>,
}

/// Resources that a process has used so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub cpu_ns: u64,
    /// Its part of all resident memory: a page that several processes have mapped is shared out
    /// between them, so that sums are right.
    pub share_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Summary;

    #[test]
    fn requests_and_replies_are_single_lines() {
        let job = Job { traffic: Traffic::Latency, operation: Operation::Send, bytes: 64, slots: 1, duration_ms: 10 };
        let requests = [
            Request::Prepare { memory: Memory::Shared, job },
            Request::Connect { peer: Address { gid: [7; 16], qpn: 1, rkey: 2, address: u64::MAX } },
            Request::Start { argv: vec!["a".into(), "b\nc".into()] },
            Request::Release,
        ];
        for request in requests {
            let line = serde_json::to_string(&request).expect("JSON");
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<Request>(&line).expect("request"), request);
        }
        let summary = Summary::of(&mut [1.0, 2.0]);
        let outcome = Outcome { figures: summary, message_count: 3, cpu_ns: 4, elapsed_ns: 5 };
        for reply in [Reply::Ended(outcome), Reply::Output { status: None, text: "x\ny".into() }] {
            let line = serde_json::to_string(&reply).expect("JSON");
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<Reply>(&line).expect("reply"), reply);
        }
    }
}
