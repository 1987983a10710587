//! A stream in which two kinds of message take turns: a path that is fast for each alone may be
//! slow where both must stay in order.
use super::endpoint::{BATCH_MAX, Device, Endpoint, Extras, One, PollTimeout};
use super::traffic::{self, PARTS, WARM_UP_SHARE};
use super::{Job, Memory, Operation, Outcome, Traffic};
use crate::stats::Summary;
use crate::sys;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    pub operation: Operation,
    pub bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mix {
    /// They take turns; both the same: that kind alone.
    pub parts: [Part; 2],
    /// The receiver's RECVs are in a shared receive queue.
    pub shared_receives: bool,
    /// Messages in flight at most.
    pub slots: usize,
    pub duration_ms: u64,
}

impl Mix {
    /// The same with one part only.
    pub fn alone(self, part: usize) -> Self {
        Self { parts: [self.parts[part]; 2], ..self }
    }

    fn job(&self) -> Job {
        let bytes = self.parts[0].bytes.max(self.parts[1].bytes);
        let (traffic, operation) = (Traffic::Bandwidth, Operation::Send);
        Job { traffic, operation, bytes, slots: self.slots, duration_ms: self.duration_ms }
    }
}

pub fn prepare<'a>(device: &'a Device, mix: &Mix) -> Result<Endpoint<'a>, String> {
    let extras = Extras { shared_receives: mix.shared_receives, ..Extras::NONE };
    Endpoint::with(device, Memory::Ordinary, &mix.job(), extras)
}

/// Takes what is sent, until a last message with an immediate value.
pub fn serve(end: &Endpoint<'_>) -> Result<Outcome, String> {
    traffic::sink(end, end.receive_depth(), size_of::<u64>())
}

/// Sends for so long. The figures are millions of messages a second, over parts of the time.
pub fn run(end: &Endpoint<'_>, mix: &Mix) -> Result<Outcome, String> {
    let batch = BATCH_MAX.min(mix.slots / 2).max(1);
    let describe = |index: usize| {
        let part = mix.parts[index % 2];
        One { operation: part.operation, immediate: None, bytes: part.bytes }
    };
    let mut samples = Vec::with_capacity(2 * PARTS as usize);
    let (mut sent, mut done) = (0, 0);
    let (cpu, begun) = (sys::own_cpu_ns(), sys::monotonic_ns());
    let duration_ns = mix.duration_ms * 1_000_000;
    let (counts_from, until) = (begun + duration_ns / WARM_UP_SHARE, begun + duration_ns);
    let part_ns = (until - counts_from) / PARTS;
    let (mut part_begun, mut part_done) = (begun, 0);
    let mut poll_timeout = PollTimeout::new();
    let mut now = begun;
    while now < until || done < sent {
        while now < until && sent - done + batch <= mix.slots {
            end.post_each::<false>(true, sent, batch, describe)?;
            sent += batch;
        }
        match end.poll_sends(|_| {})? {
            0 => {
                poll_timeout.spend()?;
                continue;
            }
            count => done += count * batch,
        }
        poll_timeout = PollTimeout::new();
        now = sys::monotonic_ns();
        if now - part_begun >= part_ns {
            if part_begun >= counts_from && now <= until + part_ns {
                samples.push((done - part_done) as f64 * 1e3 / (now - part_begun) as f64);
            }
            (part_begun, part_done) = (now, done);
        }
    }
    let (elapsed_ns, cpu_ns) = (sys::monotonic_ns() - begun, sys::own_cpu_ns() - cpu);
    let last = One { operation: Operation::Send, immediate: Some(1), bytes: mix.parts[0].bytes };
    end.post_each::<false>(true, sent, 1, |_| last)?;
    while end.poll_sends(|_| {})? == 0 {
        poll_timeout.spend()?;
    }
    Ok(Outcome { figures: Summary::of(&mut samples), message_count: done as u64, cpu_ns, elapsed_ns })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_larger_part_decides_about_memory() {
        let part = |bytes| Part { operation: Operation::Send, bytes };
        let mix = Mix { parts: [part(64), part(4096)], shared_receives: true, slots: 8, duration_ms: 1 };
        assert_eq!(mix.job().bytes, 4096);
        assert_eq!(mix.alone(0).job().bytes, 64);
        assert_eq!(mix.alone(1).parts, [part(4096); 2]);
    }
}
