//! Bounce buffers: what the slow-path copiers' copies go through, within a budget of each vNIC.
//!
//! The vNIC pays whose copier has the buffer in hand: the source's while it is read, then the
//! destination's. So memory that does not answer uses up its own vNIC's budget and nobody else's. A
//! copy begins when both have room. The destination's room is not reserved, so as many copies as
//! are being read for it then may take it beyond its budget.
//!
//! A copy that finds a budget used up is *postponed*: it is Pending to the engine, as one that a
//! copier has in hand, and begins when there is room. Nothing fails for it, and what waits costs
//! its spans. So what a vNIC holds of the router's heap follows from [`BOUNCE_BYTES_MAX`], not from
//! how many queue pairs it has.
//!
//! Payload that is no tenant's memory is not counted here, and can't wait: inline data or a packet, which are as long
//! as a packet at most; packets of a QP that waited and are written at once, which the engine counts until they are.
use crate::dataplane::bursts::Burst;
use crate::memory::transfers::Way;
use freeflow_engine::{Span, Token, VnicId};
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bounce buffers of one vNIC at a time, bytes; one longer copy has them alone.
pub const BOUNCE_BYTES_MAX: u64 = 4 << 20;
/// Buffers kept for later, of all vNICs, and the longest that is.
pub(crate) const SPARE_COUNT_MAX: usize = 16;
pub(crate) const SPARE_BYTES_MAX: usize = 256 * 1024;

/// A buffer; what it takes of its vNIC's budget is given back when it is dropped.
#[derive(Default)]
pub struct Bounce {
    pub(crate) bytes: Vec<u8>,
    pub(crate) budget: Option<(Arc<AtomicU64>, u64)>,
}

impl Deref for Bounce {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Bounce {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Bounce {
    /// From now on another vNIC pays, if one does.
    pub(crate) fn move_charge(&mut self, account: &Arc<AtomicU64>) {
        if let Some((used, bytes)) = &mut self.budget {
            account.fetch_add(*bytes, Relaxed);
            used.fetch_sub(*bytes, Relaxed);
            *used = account.clone();
        }
    }
}

/// Whether a copy fits: a longer one than all of the budget has it alone.
pub(crate) fn has_room(used: &AtomicU64, bytes: u64) -> bool {
    let used = used.load(Relaxed);
    used == 0 || used + bytes <= BOUNCE_BYTES_MAX
}

impl Drop for Bounce {
    fn drop(&mut self) {
        if let Some((used, bytes)) = self.budget.take() {
            // Relaxed: a count, which orders nothing.
            used.fetch_sub(bytes, Relaxed);
        }
    }
}

/// A copy that waits for a buffer.
pub struct Postponed {
    pub(crate) token: Token,
    pub(crate) from: Vec<Span>,
    pub(crate) bytes: usize,
    pub(crate) way: Way,
    pub(crate) what: What,
}

pub(crate) enum What {
    Copy { to: Vec<Span>, last: bool },
    Fetch(Box<Burst>),
}

#[derive(Default)]
pub struct Bounces {
    pub(crate) spare: Vec<Vec<u8>>,
    /// vNICs for whose room copies wait, each once, in turn.
    pub(crate) waiting: VecDeque<VnicId>,
    pub(crate) postponed_count: usize,
}

impl Bounces {
    pub fn postponed_count(&self) -> usize {
        self.postponed_count
    }

    /// To use again, if it is not too long.
    pub fn keep(&mut self, mut bounce: Bounce) {
        if self.spare.len() < SPARE_COUNT_MAX && bounce.bytes.capacity() <= SPARE_BYTES_MAX {
            self.spare.push(std::mem::take(&mut bounce.bytes));
        }
    }

    pub(crate) fn make(&mut self, bytes: usize, budget: Option<(Arc<AtomicU64>, u64)>) -> Bounce {
        let mut buffer = if bytes <= SPARE_BYTES_MAX { self.spare.pop().unwrap_or_default() } else { Vec::new() };
        if buffer.len() < bytes {
            buffer.resize(bytes, 0);
        }
        Bounce { bytes: buffer, budget }
    }
}
