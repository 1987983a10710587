//! Traffic between two ends: ping-pong and streams.
//!
//! The end that runs decides when it is over, by its clock, and says so in the last message: a SEND with an immediate
//! value, or a WRITE whose first byte is [`LAST`]. So no measurement lasts long, however slow the path is.
use super::endpoint::{BATCH_MAX, Endpoint, PollTimeout, Post};
use super::{Job, Operation, Outcome, Traffic};
use crate::limits::{Wait, Waiter, copy};
use crate::stats::Summary;
use crate::sys;
use freeflow_verbs::CompletionFlags;
use std::ptr;
use std::sync::atomic::{Ordering, fence};

/// Every so many messages of a ping-pong, one completes with an entry in the send queue's CQ.
const SIGNAL_EVERY: usize = 16;
/// Round trips kept at most.
const SAMPLES_MAX: usize = 400_000;
/// Share of the time that warms up and is not counted.
pub(super) const WARM_UP_SHARE: u64 = 8;
/// Parts into which a stream's time is cut, each with its own bandwidth.
pub(super) const PARTS: u64 = 40;
/// First byte of the last WRITE.
const LAST: u8 = 0xff;

/// Counts sends without completion and keeps the send queue from filling.
struct SendQueue {
    since_signal: usize,
    signals: usize,
}

impl SendQueue {
    fn new() -> Self {
        Self { since_signal: 0, signals: 0 }
    }

    fn post(&mut self, end: &Endpoint<'_>, operation: Operation, immediate: Option<u32>) -> Result<(), String> {
        self.since_signal += 1;
        let signaled = self.since_signal == SIGNAL_EVERY;
        end.post(Post { operation, immediate, signaled }, 0, 1)?;
        if signaled {
            self.since_signal = 0;
            self.signals += 1;
        }
        // The one before the last is long done; with at most two in the queue it never fills.
        let mut poll_timeout = PollTimeout::new();
        while self.signals > 1 {
            match end.poll_sends(|_| {})? {
                0 => poll_timeout.spend()?,
                count => self.signals -= count,
            }
        }
        Ok(())
    }
}

/// Content of a message.
struct Arrived {
    last: bool,
}

fn await_receive(end: &Endpoint<'_>, posted: &mut usize) -> Result<Arrived, String> {
    let mut poll_timeout = PollTimeout::new();
    let mut last = false;
    loop {
        let each = |completion: &freeflow_abi::ibv_wc| {
            last |= completion.wc_flags & u32::from(CompletionFlags::WITH_IMMEDIATE) != 0
        };
        match end.poll_receives(each)? {
            0 => poll_timeout.spend()?,
            count => {
                end.post_receives(*posted, count)?;
                *posted += count;
                return Ok(Arrived { last });
            }
        }
    }
}

/// Waits until the last byte of what arrives is `mark`. It polls memory, so it must itself give way to others.
fn await_write(end: &Endpoint<'_>, bytes: usize, mark: u8) -> Result<Arrived, String> {
    let place = end.receive_place(0);
    let mut waiter = Waiter::new(Wait::SpinThenYield(20));
    let mut poll_timeout = PollTimeout::new();
    // SAFETY: inside our buffer, written by the other side meanwhile: hence volatile, a byte at a time.
    while unsafe { ptr::read_volatile(place.add(bytes - 1)) } != mark {
        waiter.idle();
        poll_timeout.spend()?;
    }
    fence(Ordering::Acquire);
    // SAFETY: the same; the last byte of a WRITE arrives last.
    Ok(Arrived { last: unsafe { ptr::read_volatile(place) } == LAST })
}

fn mark_write(end: &Endpoint<'_>, bytes: usize, mark: u8, last: bool) {
    let place = end.send_place(0);
    // SAFETY: inside our buffer; the WRITE before this one was answered, so nobody reads it now.
    unsafe {
        ptr::write_volatile(place, if last { LAST } else { 0 });
        ptr::write_volatile(place.add(bytes - 1), mark);
    }
}

/// Never 0xff or 1, which is what the memory holds at first, and never twice running.
fn mark_of(trip: u64) -> u8 {
    2 + (trip % 128) as u8
}

/// One round trip, or one READ.
fn round_trip(
    end: &Endpoint<'_>,
    job: &Job,
    queue: &mut SendQueue,
    state: (u64, bool, &mut usize),
) -> Result<(), String> {
    let (trip, last, posted) = state;
    match job.operation {
        Operation::Send => {
            queue.post(end, Operation::Send, last.then_some(1))?;
            await_receive(end, posted)?;
        }
        Operation::Write => {
            mark_write(end, job.bytes, mark_of(trip), last);
            queue.post(end, Operation::Write, None)?;
            await_write(end, job.bytes, mark_of(trip))?;
        }
        Operation::Read => {
            end.post(Post { operation: Operation::Read, immediate: None, signaled: true }, 0, 1)?;
            let mut poll_timeout = PollTimeout::new();
            while end.poll_sends(|_| {})? == 0 {
                poll_timeout.spend()?;
            }
        }
    }
    Ok(())
}

fn ping(end: &Endpoint<'_>, job: &Job) -> Result<Outcome, String> {
    let mut samples = Vec::with_capacity(SAMPLES_MAX);
    let (mut queue, mut posted, mut trip) = (SendQueue::new(), 0, 0);
    let (cpu, begun) = (sys::own_cpu_ns(), sys::monotonic_ns());
    let counts_from = begun + job.duration_ms * 1_000_000 / WARM_UP_SHARE;
    let until = begun + job.duration_ms * 1_000_000;
    let mut before = begun;
    while before < until && samples.len() < SAMPLES_MAX {
        trip += 1;
        round_trip(end, job, &mut queue, (trip, false, &mut posted))?;
        let now = sys::monotonic_ns();
        if before >= counts_from {
            samples.push((now - before) as f64 / 1e3);
        }
        before = now;
    }
    trip += 1;
    round_trip(end, job, &mut queue, (trip, true, &mut posted))?;
    let elapsed_ns = sys::monotonic_ns() - begun;
    let cpu_ns = sys::own_cpu_ns() - cpu;
    Ok(Outcome { figures: Summary::of(&mut samples), message_count: trip, cpu_ns, elapsed_ns })
}

fn pong(end: &Endpoint<'_>, job: &Job) -> Result<Outcome, String> {
    let (mut queue, mut posted, mut trip) = (SendQueue::new(), 0, 0);
    let (cpu, begun) = (sys::own_cpu_ns(), sys::monotonic_ns());
    loop {
        trip += 1;
        let arrived = match job.operation {
            Operation::Send => await_receive(end, &mut posted)?,
            Operation::Write => await_write(end, job.bytes, mark_of(trip))?,
            Operation::Read => break,
        };
        if job.operation == Operation::Write {
            mark_write(end, job.bytes, mark_of(trip), arrived.last);
        }
        queue.post(end, job.operation, None)?;
        if arrived.last {
            break;
        }
    }
    let (elapsed_ns, cpu_ns) = (sys::monotonic_ns() - begun, sys::own_cpu_ns() - cpu);
    Ok(Outcome { figures: None, message_count: trip, cpu_ns, elapsed_ns })
}

/// Sends as fast as the places in memory allow.
fn stream(end: &Endpoint<'_>, job: &Job) -> Result<Outcome, String> {
    let batch = BATCH_MAX.min(job.slots / 2).max(1);
    let post = Post { operation: job.operation, immediate: None, signaled: true };
    let mut samples = Vec::with_capacity(2 * PARTS as usize);
    let (mut sent, mut done) = (0, 0);
    let (cpu, begun) = (sys::own_cpu_ns(), sys::monotonic_ns());
    let counts_from = begun + job.duration_ms * 1_000_000 / WARM_UP_SHARE;
    let until = begun + job.duration_ms * 1_000_000;
    let part_ns = (until - counts_from) / PARTS;
    let (mut part_begun, mut part_done) = (begun, 0);
    let mut poll_timeout = PollTimeout::new();
    loop {
        while sent - done + batch <= job.slots {
            end.post(post, sent, batch)?;
            sent += batch;
        }
        let count = end.poll_sends(|_| {})?;
        if count == 0 {
            poll_timeout.spend()?;
            continue;
        }
        poll_timeout = PollTimeout::new();
        done += count * batch;
        let now = sys::monotonic_ns();
        if now - part_begun >= part_ns {
            if part_begun >= counts_from {
                samples.push(((done - part_done) * job.bytes) as f64 * 8.0 / (now - part_begun) as f64);
            }
            (part_begun, part_done) = (now, done);
        }
        if now >= until {
            break;
        }
    }
    while done < sent {
        match end.poll_sends(|_| {})? {
            0 => poll_timeout.spend()?,
            count => done += count * batch,
        }
    }
    let (elapsed_ns, cpu_ns) = (sys::monotonic_ns() - begun, sys::own_cpu_ns() - cpu);
    if job.operation == Operation::Send {
        end.post(Post { immediate: Some(1), ..post }, sent, 1)?;
        while end.poll_sends(|_| {})? == 0 {
            poll_timeout.spend()?;
        }
    }
    Ok(Outcome { figures: Summary::of(&mut samples), message_count: done as u64, cpu_ns, elapsed_ns })
}

/// Receives until the last message; reads so many bytes of each.
pub(super) fn sink(end: &Endpoint<'_>, posted: usize, read_bytes: usize) -> Result<Outcome, String> {
    let (mut posted, mut taken, mut sum, mut last) = (posted, 0u64, 0u64, false);
    let mut freed = 0;
    let (cpu, begun) = (sys::own_cpu_ns(), sys::monotonic_ns());
    let mut poll_timeout = PollTimeout::new();
    while !last {
        let count = end.poll_receives(|completion| {
            let place = end.receive_place(completion.wr_id as usize);
            // SAFETY: the message's place, eight bytes long or more for streams; it was written before its completion.
            sum = sum.wrapping_add(unsafe { copy::sum(place, read_bytes) });
            last |= completion.wc_flags & u32::from(CompletionFlags::WITH_IMMEDIATE) != 0;
        })?;
        if count == 0 {
            poll_timeout.spend()?;
            continue;
        }
        poll_timeout = PollTimeout::new();
        taken += count as u64;
        freed += count;
        while freed >= BATCH_MAX {
            end.post_receives(posted, BATCH_MAX)?;
            posted += BATCH_MAX;
            freed -= BATCH_MAX;
        }
    }
    let (elapsed_ns, cpu_ns) = (sys::monotonic_ns() - begun, sys::own_cpu_ns() - cpu);
    std::hint::black_box(sum);
    Ok(Outcome { figures: None, message_count: taken, cpu_ns, elapsed_ns })
}

/// The end that begins and measures.
pub fn run(end: &Endpoint<'_>, job: &Job) -> Result<Outcome, String> {
    match job.traffic {
        Traffic::Latency => ping(end, job),
        Traffic::Bandwidth | Traffic::BandwidthRead => stream(end, job),
    }
}

/// The end that answers. READs, and WRITE streams, need nobody here.
pub fn serve(end: &Endpoint<'_>, job: &Job) -> Result<Outcome, String> {
    match (job.traffic, job.operation) {
        (Traffic::Latency, _) => pong(end, job),
        (Traffic::Bandwidth, Operation::Send) => sink(end, end.receive_depth(), size_of::<u64>()),
        (Traffic::BandwidthRead, Operation::Send) => sink(end, end.receive_depth(), job.bytes),
        (Traffic::Bandwidth | Traffic::BandwidthRead, Operation::Write | Operation::Read) => {
            Ok(Outcome { figures: None, message_count: 0, cpu_ns: 0, elapsed_ns: 0 })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_differ_from_what_was_there() {
        assert!((0..300).all(|trip| mark_of(trip) > 1 && mark_of(trip) != LAST && mark_of(trip) != mark_of(trip + 1)));
    }
}
