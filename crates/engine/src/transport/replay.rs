//! Requests that a responder answered with data, kept for duplicates; see `responder::duplicates`.
//!
//! Invariant: remembered are the last `max_dest_rd_atomic` READs and atomics. A requester has no
//! more of them under way, so that what was forgotten is no request of a requester that keeps the
//! rules; it is dropped (class D).
use crate::PdId;
use crate::transport::answers::Reading;
use crate::transport::packets::packets_of;
use alloc::collections::VecDeque;
use freeflow_wire::{Reth, psn_ahead};
use serde::{Deserialize, Serialize};

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Replays {
    /// In the order of their PSNs.
    pub done: VecDeque<Replay>,
}

/// A request that was executed.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Replay {
    /// Of its first packet; with as many more as its answer has.
    pub psn: u32,
    pub packets: u32,
    pub result: Outcome,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Outcome {
    Read {
        address: u64,
        length: u32,
        rkey: u32,
        /// Where the key was good.
        pd: PdId,
    },
    Atomic {
        original: u64,
    },
}

impl Replays {
    /// `depth`: how many to keep.
    pub fn remember(&mut self, replay: Replay, depth: u8) {
        while self.done.len() >= usize::from(depth.max(1)) {
            self.done.pop_front();
        }
        self.done.push_back(replay);
    }

    /// The request that this PSN is one of.
    pub fn find(&self, psn: u32) -> Option<&Replay> {
        self.done.iter().rev().find(|replay| {
            let ahead = psn_ahead(psn, replay.psn);
            ahead >= 0 && (ahead as u32) < replay.packets
        })
    }
}

impl Replay {
    /// The answer to a second READ request: the whole, or a part of it that fits into the PSNs of
    /// the first one. `None`: it is not that request.
    pub fn read_again(&self, psn: u32, reth: &Reth, mtu: u32, frames: bool) -> Option<Reading> {
        let Outcome::Read { address, length, rkey, pd } = self.result else { return None };
        let offset = reth.address.wrapping_sub(address);
        let within = offset <= u64::from(length) && u64::from(reth.length) <= u64::from(length) - offset;
        let skipped = psn_ahead(psn, self.psn) as u32;
        let fits = packets_of(reth.length, mtu) <= self.packets - skipped;
        let same = within && fits && reth.rkey == rkey;
        let (address, left) = (reth.address, reth.length);
        same.then_some(Reading { address, left, rkey, pd, begun: false, fetching: None, mtu, frames })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PD: PdId = PdId { index: 0, generation: 0 };

    fn read(psn: u32, length: u32) -> Replay {
        let result = Outcome::Read { address: u64::MAX - 9, length, rkey: 7, pd: PD };
        Replay { psn, packets: packets_of(length, 256), result }
    }

    fn ask(replay: &Replay, psn: u32, address: u64, length: u32) -> bool {
        replay.read_again(psn, &Reth { address, rkey: 7, length }, 256, false).is_some()
    }

    #[test]
    fn the_last_are_remembered() {
        let mut replays = Replays::default();
        for psn in [0xff_fffd, 0xff_fffe, 0xff_ffff, 0, 1] {
            let result = Outcome::Atomic { original: u64::from(psn) };
            replays.remember(Replay { psn, packets: 1, result }, 3);
        }
        let found = |psn| replays.find(psn).map(|replay| replay.psn);
        assert_eq!([0xff_fffe, 0xff_ffff, 0, 1, 2].map(found), [None, Some(0xff_ffff), Some(0), Some(1), None]);
    }

    #[test]
    fn parts_of_a_read_are_within_it() {
        let (whole, start) = (read(0xff_ffff, 1000), u64::MAX - 9);
        assert_eq!(whole.packets, 4);
        assert!(ask(&whole, 0xff_ffff, start, 1000), "across the end of all addresses, as admitted");
        assert!(ask(&whole, 1, start.wrapping_add(512), 488));
        assert!(ask(&whole, 2, start.wrapping_add(768), 232));
        assert!(ask(&whole, 0, start, 0));
        assert!(!ask(&whole, 0xff_ffff, start, 1001));
        assert!(!ask(&whole, 0xff_ffff, start - 1, 10));
        assert!(!ask(&whole, 1, start.wrapping_add(512), 489));
        assert!(!ask(&whole, 2, start, 257), "more packets than are left");
        assert!(whole.read_again(0, &Reth { address: start, rkey: 8, length: 1 }, 256, false).is_none());
        let atomic = Replay { psn: 0, packets: 1, result: Outcome::Atomic { original: 0 } };
        assert!(!ask(&atomic, 0, start, 0));
    }
}
