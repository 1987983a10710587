//! Bounce buffers: what the slow-path copiers' copies go through, within a budget of each vNIC.
//!
//! The vNIC pays whose copier has the buffer in hand: the source's while it is read, then the destination's. So memory that does not answer
//! uses up its own vNIC's budget and nobody else's. A copy begins when both have room. The destination's room is not reserved, so as
//! many copies as are being read for it then may take it beyond its budget.
//!
//! A copy that finds a budget used up is *postponed*: it is Pending to the engine, as one that a copier has in hand, and begins when there is
//! room. Nothing fails for it, and what waits costs its spans. So what a vNIC holds of the router's heap follows
//! from [`BOUNCE_BYTES_MAX`], not from how many queue pairs it has.
//!
//! Payload that is no tenant's memory (a packet, inline data) is as long as a packet at most, can't wait, and is not counted.
use crate::dataplane::ports::Rings;
use crate::dataplane::transmit::Burst;
use crate::memory::copies::{Arrival, Way};
use freeflow_engine::{CopyOutcome, MemorySide, Source, SourceBody, Span, Token, VnicId};
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What one vNIC has of bounce buffers at a time; one longer copy has it alone.
pub const BOUNCE_BYTES_MAX: u64 = 4 << 20;
/// Buffers kept for later, of all vNICs, and the longest that is.
const SPARE_COUNT_MAX: usize = 16;
const SPARE_BYTES_MAX: usize = 256 * 1024;

/// A buffer; what it takes of its vNIC's budget is given back when it is dropped.
#[derive(Default)]
pub struct Bounce {
    bytes: Vec<u8>,
    budget: Option<(Arc<AtomicU64>, u64)>,
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
    fn move_charge(&mut self, account: &Arc<AtomicU64>) {
        if let Some((used, bytes)) = &mut self.budget {
            account.fetch_add(*bytes, Relaxed);
            used.fetch_sub(*bytes, Relaxed);
            *used = account.clone();
        }
    }
}

/// Whether a copy fits: a longer one than all of the budget has it alone.
fn has_room(used: &AtomicU64, bytes: u64) -> bool {
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
    token: Token,
    from: Vec<Span>,
    bytes: usize,
    way: Way,
    what: What,
}

enum What {
    Copy { to: Vec<Span>, last: bool },
    Fetch(Box<Burst>),
}

#[derive(Default)]
pub struct Bounces {
    spare: Vec<Vec<u8>>,
    /// vNICs for whose room copies wait, each once, in turn.
    waiting: VecDeque<VnicId>,
    postponed_count: usize,
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

    fn make(&mut self, bytes: usize, budget: Option<(Arc<AtomicU64>, u64)>) -> Bounce {
        let mut buffer = if bytes <= SPARE_BYTES_MAX { self.spare.pop().unwrap_or_default() } else { Vec::new() };
        if buffer.len() < bytes {
            buffer.resize(bytes, 0);
        }
        Bounce { bytes: buffer, budget }
    }
}

impl Rings {
    /// A buffer for a copy from one vNIC's memory to another's. An error: it is to be postponed until this vNIC has room.
    pub(crate) fn take_bounce(
        &mut self,
        (source, destination): (Option<VnicId>, Option<VnicId>),
        from: &Source<'_>,
        bytes: usize,
    ) -> Result<Bounce, VnicId> {
        let is_memory = matches!(from.body, SourceBody::Spans(_)) && from.prefix.is_empty();
        let Some(payer) = source.or(destination).filter(|&vnic| is_memory && self.vnics.get(vnic).is_some()) else {
            return Ok(self.transfers.bounces.make(bytes, None));
        };
        for vnic in [Some(payer), destination].into_iter().flatten() {
            if self.vnics.get(vnic).is_some_and(|entry| !has_room(&entry.bounce_bytes, bytes as u64)) {
                return Err(vnic);
            }
        }
        let budget = self.vnics.get(payer).map(|entry| (entry.bounce_bytes.clone(), bytes as u64));
        if let Some((used, bytes)) = &budget {
            // Relaxed: a count; only the worker adds.
            used.fetch_add(*bytes, Relaxed);
        }
        Ok(self.transfers.bounces.make(bytes, budget))
    }

    /// The copier of this vNIC has the buffer next.
    pub(crate) fn charge_bounce(&self, bounce: &mut Bounce, vnic: VnicId) {
        if let Some(entry) = self.vnics.get(vnic) {
            bounce.move_charge(&entry.bounce_bytes);
        }
    }

    pub(crate) fn postpone_copy(
        &mut self,
        vnic: VnicId,
        token: Token,
        from: &[Span],
        to: &[Span],
        last: bool,
        way: Way,
    ) {
        let (from, to) = (self.transfers.spans_of(from), self.transfers.spans_of(to));
        let bytes = to.iter().map(|span| span.length as usize).sum();
        self.postpone(vnic, Postponed { token, from, bytes, way, what: What::Copy { to, last } });
    }

    pub(crate) fn postpone_fetch(
        &mut self,
        vnic: VnicId,
        token: Token,
        from: &[Span],
        (bytes, way): (usize, Way),
        burst: Box<Burst>,
    ) {
        let from = self.transfers.spans_of(from);
        self.postpone(vnic, Postponed { token, from, bytes, way, what: What::Fetch(burst) });
    }

    fn postpone(&mut self, vnic: VnicId, postponed: Postponed) {
        let Some(entry) = self.vnics.get_mut(vnic) else { return };
        if entry.postponed.is_empty() {
            self.transfers.bounces.waiting.push_back(vnic);
        }
        entry.postponed.push_back(postponed);
        self.transfers.bounces.postponed_count += 1;
    }

    /// Begins the next copy that was postponed and finds a buffer; what came of one that is done with that.
    pub(crate) fn poll_postponed(&mut self) -> Option<Arrival> {
        for _ in 0..self.transfers.bounces.waiting.len() {
            let vnic = self.transfers.bounces.waiting.pop_front()?;
            while let Some(postponed) = self.next_postponed(vnic) {
                if let Some(arrival) = self.resume(postponed) {
                    if self.vnics.get(vnic).is_some_and(|entry| !entry.postponed.is_empty()) {
                        self.transfers.bounces.waiting.push_back(vnic);
                    }
                    return Some(arrival);
                }
            }
            if self.vnics.get(vnic).is_some_and(|entry| !entry.postponed.is_empty()) {
                self.transfers.bounces.waiting.push_back(vnic);
            }
        }
        None
    }

    fn next_postponed(&mut self, vnic: VnicId) -> Option<Postponed> {
        let entry = self.vnics.get_mut(vnic)?;
        let bytes = entry.postponed.front()?.bytes as u64;
        if !has_room(&entry.bounce_bytes, bytes) {
            return None;
        }
        self.transfers.bounces.postponed_count -= 1;
        entry.postponed.pop_front()
    }

    /// There is room now where it waited. `None`: a copier has it, or it waits for another vNIC's room.
    fn resume(&mut self, postponed: Postponed) -> Option<Arrival> {
        let Postponed { token, from, bytes, way, what } = postponed;
        let source = Source { prefix: &[], body: SourceBody::Spans(&from) };
        let arrived = match what {
            What::Copy { to, last } => {
                let outcome = self.copy_by_bounce(token, source, &to, last, way);
                self.transfers.keep_spans(to);
                match outcome {
                    CopyOutcome::Done => Some(Ok(())),
                    CopyOutcome::Fault(side) => Some(Err(side)),
                    CopyOutcome::Pending => None,
                }
            }
            What::Fetch(burst) => {
                let begun = self.start_fetch(token, burst, source, (bytes, way));
                begun.is_err().then_some(Err(MemorySide::Source))
            }
        };
        self.transfers.keep_spans(from);
        arrived.map(|result| Arrival::Copied(token, result))
    }

    /// Gives up what waits for this vNIC's room, as if each copy had failed.
    pub(crate) fn forget_postponed(&mut self, vnic: VnicId) -> Vec<Arrival> {
        let Some(entry) = self.vnics.get_mut(vnic) else { return Vec::new() };
        let gone = std::mem::take(&mut entry.postponed);
        self.transfers.bounces.postponed_count -= gone.len();
        self.transfers.bounces.waiting.retain(|&waiting| waiting != vnic);
        gone.into_iter().map(|postponed| Arrival::Copied(postponed.token, Err(MemorySide::Source))).collect()
    }
}
