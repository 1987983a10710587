//! Instructions of each call of the data path, when this program runs under callgrind (see [`super::callgrind`]).
//!
//! Counts do not depend on time: one request is posted, everything is given time to complete, and
//! one poll takes the completion. A poll that came too early spoils the count, which is then taken
//! again with a longer wait. Each call is counted in a pass of its own, in which the others run
//! uncollected.
use super::callgrind;
use super::endpoint::{BATCH_MAX, Endpoint, One, PollTimeout};
use super::{Job, Operation, Traffic};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Times that each call is counted in a pass, and uncounted ones before the first.
const CALLS: usize = 64;
const PASSES: usize = 4;
const WARM_UP_TRIPS: usize = 256;
/// Batches before one-sided requests are counted: a path that costs something to open pays off only after some bytes.
const WARM_UP_BATCHES: usize = 2048;
const ATTEMPTS_MAX: u32 = 5;
/// For a request to complete; twice as long in each further attempt.
const COMPLETION_WAIT: Duration = Duration::from_millis(1);

/// Instructions of one call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counted {
    pub call: String,
    pub instructions: f64,
}

/// Calls that are counted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    PostSend,
    PollSend,
    PollReceive,
    PostReceive,
    PollEmpty,
}

struct Counter<'a> {
    end: &'a Endpoint<'a>,
    job: &'a Job,
    /// Requests posted in one call.
    chain: usize,
    sent: usize,
    received: usize,
}

/// Counts what the job's operation needs. The other end answers SENDs as in a ping-pong.
pub fn count(end: &Endpoint<'_>, job: &Job, dumps: &Path) -> Result<Vec<Counted>, String> {
    if !callgrind::is_there() {
        return Err("not under callgrind".to_owned());
    }
    let mut counter = Counter { end, job, chain: 1, sent: 0, received: end.receive_depth() };
    let two_sided = job.traffic == Traffic::Latency && job.operation == Operation::Send;
    let name = format!("{} {} B", job.operation.name(), job.bytes);
    let mut list = Vec::new();
    let mut add = |counter: &mut Counter<'_>, call, text: String| -> Result<(), String> {
        let instructions = counter.instructions(call, dumps)?;
        list.push(Counted { call: text, instructions });
        Ok(())
    };
    if two_sided {
        for _ in 0..WARM_UP_TRIPS {
            counter.trip(None, None)?;
        }
        add(&mut counter, Call::PostSend, format!("ibv_post_send, {name}"))?;
        add(&mut counter, Call::PollSend, format!("ibv_poll_cq, completion of {name}"))?;
        add(&mut counter, Call::PollReceive, format!("ibv_poll_cq, completion of a RECV, {} B", job.bytes))?;
        add(&mut counter, Call::PostReceive, "ibv_post_recv".to_owned())?;
        add(&mut counter, Call::PollEmpty, "ibv_poll_cq, nothing there".to_owned())?;
        counter.goodbye()?;
    } else {
        counter.warm_up()?;
        add(&mut counter, Call::PostSend, format!("ibv_post_send, {name}"))?;
        add(&mut counter, Call::PollSend, format!("ibv_poll_cq, completion of {name}"))?;
        counter.chain = BATCH_MAX;
        add(&mut counter, Call::PostSend, format!("ibv_post_send, {BATCH_MAX} {name} together"))?;
        add(&mut counter, Call::PollSend, format!("ibv_poll_cq, completion of the last of {BATCH_MAX} {name}"))?;
    }
    Ok(list)
}

impl Counter<'_> {
    fn one(&self) -> One {
        One { operation: self.job.operation, immediate: None, bytes: self.job.bytes }
    }

    fn two_sided(&self) -> bool {
        self.job.operation == Operation::Send
    }

    /// Of one call: the least of the means of several passes. Now and then a call does something by the clock, some
    /// 2,000 instructions, and one such in a pass adds a tenth to its mean.
    fn instructions(&mut self, call: Call, dumps: &Path) -> Result<f64, String> {
        let mut least = f64::INFINITY;
        for _ in 0..PASSES {
            least = least.min(self.mean_of_pass(call, dumps)?);
        }
        Ok(least)
    }

    fn mean_of_pass(&mut self, call: Call, dumps: &Path) -> Result<f64, String> {
        let mut poll_timeout = COMPLETION_WAIT;
        let mut why = String::new();
        for _ in 0..ATTEMPTS_MAX {
            let mut spoilt = false;
            let total = callgrind::instructions(dumps, || {
                for _ in 0..CALLS {
                    spoilt |= !self.trip(Some(call), Some(poll_timeout))?;
                }
                Ok(())
            })?;
            if !spoilt {
                return Ok(total as f64 / CALLS as f64);
            }
            why = format!("not complete within {} ms", poll_timeout.as_millis());
            poll_timeout *= 2;
        }
        Err(why)
    }

    /// One turn of all calls; `counted` is collected. False when a counted poll found nothing: then
    /// it is repeated, uncollected, until it finds something.
    fn trip(&mut self, counted: Option<Call>, poll_timeout: Option<Duration>) -> Result<bool, String> {
        let (end, one) = (self.end, self.one());
        if counted == Some(Call::PollEmpty) {
            end.poll_sends_counted::<true>()?;
        }
        match counted == Some(Call::PostSend) {
            true => end.post_each::<true>(true, self.sent, self.chain, |_| one)?,
            false => end.post_each::<false>(true, self.sent, self.chain, |_| one)?,
        }
        self.sent += self.chain;
        if let Some(poll_timeout) = poll_timeout {
            thread::sleep(poll_timeout);
        }
        let mut good = match counted == Some(Call::PollSend) {
            true => end.poll_sends_counted::<true>()? == 1,
            false => false,
        };
        await_one(good, || end.poll_sends_counted::<false>())?;
        good |= counted != Some(Call::PollSend);
        if self.two_sided() {
            let first = match counted == Some(Call::PollReceive) {
                true => end.poll_receives_counted::<true>()? == 1,
                false => false,
            };
            await_one(first, || end.poll_receives_counted::<false>())?;
            good &= first || counted != Some(Call::PollReceive);
            match counted == Some(Call::PostReceive) {
                true => end.post_receives_counted::<true>(self.received, 1)?,
                false => end.post_receives_counted::<false>(self.received, 1)?,
            }
            self.received += 1;
        }
        Ok(good)
    }

    /// Many in flight, uncounted.
    fn warm_up(&mut self) -> Result<(), String> {
        let one = self.one();
        for _ in 0..WARM_UP_BATCHES {
            self.end.post_each::<false>(true, self.sent, BATCH_MAX, |_| one)?;
            self.sent += BATCH_MAX;
            await_one(false, || self.end.poll_sends_counted::<false>())?;
        }
        Ok(())
    }

    /// Ends the other side's ping-pong.
    fn goodbye(&mut self) -> Result<(), String> {
        let last = One { immediate: Some(1), ..self.one() };
        self.end.post_each::<false>(true, self.sent, 1, |_| last)?;
        await_one(false, || self.end.poll_sends_counted::<false>())?;
        await_one(false, || self.end.poll_receives_counted::<false>())
    }
}

/// Polls until there is a completion, unless there was one already.
fn await_one(mut there: bool, poll: impl Fn() -> Result<usize, String>) -> Result<(), String> {
    let mut poll_timeout = PollTimeout::new();
    while !there {
        there = poll()? > 0;
        if !there {
            poll_timeout.spend()?;
            thread::yield_now();
        }
    }
    Ok(())
}
