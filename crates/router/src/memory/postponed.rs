//! Copies that wait for a bounce buffer of their vNIC.
use crate::dataplane::bursts::Burst;
use crate::dataplane::ports::Ports;
use crate::memory::bounce::{Bounce, Postponed, What, has_room};
use crate::memory::transfers::{Arrival, Way};
use freeflow_engine::{CopyOutcome, MemorySide, Source, SourceBody, Span, Token, VnicId};
use std::sync::atomic::Ordering::Relaxed;

impl Ports {
    /// A buffer for a copy from one vNIC's memory to another's. An error: it is to be postponed
    /// until this vNIC has room.
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
