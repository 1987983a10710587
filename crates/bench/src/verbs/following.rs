//! When a change of what is declared shows to a program that is at work.
use super::Operation;
use super::endpoint::{Device, Endpoint, Post};
use super::objects::{Held, Kind};
use crate::sys;
use serde::{Deserialize, Serialize};

/// A change that never comes.
const WAIT_NS: u64 = 10_000_000_000;
/// A message that is not held back takes a hundredth of this, one that is takes more than twice as much.
const SLOW_NS: u64 = 20_000_000;

/// Sign that the program waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sign {
    /// Its messages are held back. One that is late alone is the machine's doing.
    Slow,
    /// Its connection is cut.
    Cut,
    /// It gets no more queue pairs.
    Refused,
}

/// The time when it showed, CLOCK_MONOTONIC.
pub fn follow(device: &Device, end: &Endpoint<'_>, sign: Sign) -> Result<u64, String> {
    let until = sys::monotonic_ns() + WAIT_NS;
    let (mut number, mut slow_since) = (0, None);
    loop {
        let begun = sys::monotonic_ns();
        if begun > until {
            return Err("the change did not show".to_owned());
        }
        match sign {
            Sign::Refused => {
                if Held::new(device, Kind::Qp, 1).is_err() {
                    return Ok(sys::monotonic_ns());
                }
                continue;
            }
            Sign::Cut | Sign::Slow => {}
        }
        let sent = send_one(end, number, until);
        number += 1;
        let now = sys::monotonic_ns();
        match (sent, sign) {
            (Err(_), Sign::Cut) => return Ok(now),
            (Err(why), _) => return Err(why),
            (Ok(()), Sign::Slow) if now - begun >= SLOW_NS => match slow_since {
                Some(since) => return Ok(since),
                None => slow_since = Some(begun),
            },
            (Ok(()), _) => slow_since = None,
        }
    }
}

fn send_one(end: &Endpoint<'_>, number: usize, until: u64) -> Result<(), String> {
    end.post(Post { operation: Operation::Write, immediate: None, signaled: true }, number, 1)?;
    while end.poll_sends(|_| {})? == 0 {
        if sys::monotonic_ns() > until {
            return Err("nothing completed".to_owned());
        }
    }
    Ok(())
}
