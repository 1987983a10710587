//! Several connections of one program at once: it sleeps until a completion is announced, posts what may be posted, and
//! sleeps again. So a machine with few cores can hold hundreds of them.
use super::endpoint::{Device, Endpoint, Extras, Post, not_null};
use super::{Address, Job, Memory, Operation, Traffic};
use crate::sys;
use freeflow_abi::{ibv_comp_channel, ibv_cq};
use serde::{Deserialize, Serialize};
use std::io;
use std::ptr;
use std::thread;
use std::time::Duration;

/// Longest wait for any completion, milliseconds.
const COMPLETION_MS_MAX: i32 = 20_000;
/// Batches in flight of each connection.
const BATCHES_IN_FLIGHT: usize = 2;
/// Share of the time that warms up and is not counted.
const WARM_UP_SHARE: u64 = 4;

/// Connections to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flows {
    pub count: usize,
    /// Of one WRITE, bytes.
    pub bytes: usize,
    /// WRITEs posted together; the last completes with an entry.
    pub batch: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// CLOCK_MONOTONIC, so that all programs of a machine begin at once.
    pub begin_ns: u64,
    pub duration_ms: u64,
}

/// Amount that was delivered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flowed {
    /// Bytes of each connection in the time that counts.
    pub bytes: Vec<u64>,
    pub counted_ns: u64,
    pub cpu_ns: u64,
}

/// A completion channel. Freed after the CQs that use it.
struct Channel<'a> {
    device: &'a Device,
    channel: *mut ibv_comp_channel,
}

impl<'a> Channel<'a> {
    fn new(device: &'a Device) -> Result<Self, String> {
        // SAFETY: an open context.
        let channel = unsafe { (device.library.create_comp_channel)(device.context()) };
        Ok(Self { device, channel: not_null(channel, "ibv_create_comp_channel")? })
    }

    /// Waits for one announcement; the CQ that it is of. It may be empty, and it is no longer armed.
    fn wait(&self) -> Result<*mut ibv_cq, String> {
        // SAFETY: a valid channel (invariant of the type).
        let fd = unsafe { (*self.channel).fd };
        let mut wanted = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        match unsafe { libc::poll(&mut wanted, 1, COMPLETION_MS_MAX) } {
            1 => {}
            0 => return Err(format!("nothing completed for {COMPLETION_MS_MAX} ms")),
            _ => return Err(format!("poll: {}", io::Error::last_os_error())),
        }
        let (mut cq, mut context): (*mut ibv_cq, _) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a valid channel and two valid places.
        if unsafe { (self.device.library.get_cq_event)(self.channel, &mut cq, &mut context) } != 0 {
            return Err(format!("ibv_get_cq_event: {}", io::Error::last_os_error()));
        }
        // SAFETY: the CQ that the event came from, which lives as long as its end.
        unsafe { (self.device.library.ack_cq_events)(cq, 1) };
        Ok(cq)
    }
}

impl Drop for Channel<'_> {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once; the CQs went before (order of the fields of `FlowEnds`).
        unsafe { (self.device.library.destroy_comp_channel)(self.channel) };
    }
}

/// The ends of all connections, in order.
pub struct FlowEnds<'a> {
    ends: Vec<Endpoint<'a>>,
    channel: Channel<'a>,
    flows: Flows,
}

/// How far a connection is.
#[derive(Clone, Copy, Default)]
struct Progress {
    sent: usize,
    in_flight: usize,
    bytes: u64,
}

impl<'a> FlowEnds<'a> {
    pub fn new(device: &'a Device, flows: &Flows) -> Result<Self, String> {
        let channel = Channel::new(device)?;
        let slots = (flows.batch * BATCHES_IN_FLIGHT).max(1);
        // The receives that this makes are never used: WRITEs need none.
        let job =
            Job { traffic: Traffic::Latency, operation: Operation::Write, bytes: flows.bytes, slots, duration_ms: 0 };
        let extras = Extras { channel: channel.channel, ..Extras::NONE };
        let end = |_| Endpoint::with(device, Memory::Ordinary, &job, extras);
        let ends = (0..flows.count).map(end).collect::<Result<_, _>>()?;
        Ok(Self { ends, channel, flows: *flows })
    }

    pub fn addresses(&self) -> Vec<Address> {
        self.ends.iter().map(Endpoint::address).collect()
    }

    pub fn connect(&mut self, peers: &[Address]) -> Result<(), String> {
        if peers.len() != self.ends.len() {
            return Err("as many peers as connections, please".to_owned());
        }
        self.ends.iter_mut().zip(peers).try_for_each(|(end, peer)| end.connect(*peer))
    }

    /// Streams until the time is over and all that was sent is delivered.
    pub fn run(&self, run: &Run) -> Result<Flowed, String> {
        let mut progress = vec![Progress::default(); self.ends.len()];
        let cpu = sys::own_cpu_ns();
        thread::sleep(Duration::from_nanos(run.begin_ns.saturating_sub(sys::monotonic_ns())));
        let duration_ns = run.duration_ms * 1_000_000;
        let counts_from = run.begin_ns + duration_ns / WARM_UP_SHARE;
        let until = run.begin_ns + duration_ns;
        for (end, progress) in self.ends.iter().zip(&mut progress) {
            end.arm()?;
            for _ in 0..BATCHES_IN_FLIGHT {
                self.post(end, progress)?;
            }
        }
        while progress.iter().any(|progress| progress.in_flight > 0) {
            let announced = self.channel.wait()?;
            let of = |end: &Endpoint<'_>| end.send_cq() == announced;
            let Some(at) = self.ends.iter().position(of) else { continue };
            let (end, progress) = (&self.ends[at], &mut progress[at]);
            // Armed before it is emptied, so that nothing comes unseen in between.
            end.arm()?;
            while let batches @ 1.. = end.poll_sends(|_| {})? {
                let now = sys::monotonic_ns();
                if (counts_from..until).contains(&now) {
                    progress.bytes += (batches * self.flows.batch * self.flows.bytes) as u64;
                }
                progress.in_flight -= batches;
                for _ in 0..if now < until { batches } else { 0 } {
                    self.post(end, progress)?;
                }
            }
        }
        let cpu_ns = sys::own_cpu_ns() - cpu;
        let bytes = progress.iter().map(|progress| progress.bytes).collect();
        Ok(Flowed { bytes, counted_ns: until - counts_from, cpu_ns })
    }

    fn post(&self, end: &Endpoint<'_>, progress: &mut Progress) -> Result<(), String> {
        let post = Post { operation: Operation::Write, immediate: None, signaled: true };
        end.post(post, progress.sent, self.flows.batch)?;
        progress.sent += self.flows.batch;
        progress.in_flight += 1;
        Ok(())
    }
}

/// Jain's index of fairness: 1 when all have the same, 1/n when one has everything. `None` when nobody has anything.
pub fn jain(shares: &[f64]) -> Option<f64> {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    (squares > 0.0).then(|| sum * sum / (shares.len() as f64 * squares))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fairness() {
        assert_eq!(jain(&[3.0; 8]), Some(1.0));
        assert_eq!(jain(&[1.0, 0.0, 0.0, 0.0]), Some(0.25));
        assert!(jain(&[1.0, 1.0, 1.0, 2.0]).is_some_and(|index| index > 0.85 && index < 0.95));
        assert_eq!(jain(&[0.0, 0.0]), None);
        assert_eq!(jain(&[]), None);
    }
}
