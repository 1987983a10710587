//! Common to all ends of a measurement between two hosts: its first lines, its meter, its figures.
use crate::stats::Summary;
use crate::sys;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};

/// First line of an end that answers, once the other one may begin.
pub const READY: &str = "ready";
/// The line before that, of an end in a container.
pub const THERE: &str = "there";
/// An end that answers is through when nothing comes for so long, once something has. Tests run beside others.
pub const QUIET_NS: u64 = if cfg!(test) { 5_000_000_000 } else { 500_000_000 };
/// Samples that are kept of one run.
const SAMPLES_MAX: usize = 400_000;

/// Figures of one end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndFigures {
    /// Round trips in microseconds, or Gb/s of payload over parts of the time, or messages a second. Not of every end.
    pub figures: Option<Summary>,
    /// Messages or packets.
    pub count: u64,
    pub payload_bytes: u64,
    pub cpu_ns: u64,
    pub elapsed_ns: u64,
    /// Packets with a wrong ICRC.
    pub bad: u64,
}

/// CPU time and clock since the measurement began.
pub struct Meter {
    cpu_ns: u64,
    pub begun_ns: u64,
}

impl Meter {
    pub fn start() -> Self {
        Self { cpu_ns: sys::own_cpu_ns(), begun_ns: sys::monotonic_ns() }
    }

    pub fn figures(&self, figures: Option<Summary>, count: u64, payload_bytes: u64) -> EndFigures {
        EndFigures {
            figures,
            count,
            payload_bytes,
            cpu_ns: sys::own_cpu_ns() - self.cpu_ns,
            elapsed_ns: sys::monotonic_ns() - self.begun_ns,
            bad: 0,
        }
    }
}

pub fn say_ready() -> io::Result<()> {
    println!("{READY}");
    io::stdout().flush()
}

/// The same round trip again and again.
pub fn trips(duration_ms: u64, mut trip: impl FnMut() -> io::Result<()>) -> io::Result<EndFigures> {
    let mut samples = Vec::with_capacity(SAMPLES_MAX);
    let meter = Meter::start();
    let until = meter.begun_ns + duration_ms * 1_000_000;
    let mut before = meter.begun_ns;
    while before < until && samples.len() < SAMPLES_MAX {
        trip()?;
        let now = sys::monotonic_ns();
        samples.push((now - before) as f64 / 1e3);
        before = now;
    }
    // The first ones warm up.
    let warm = samples.split_off(samples.len() / 8);
    let count = warm.len() as u64;
    Ok(meter.figures(Summary::of(&mut { warm }), count, 0))
}
