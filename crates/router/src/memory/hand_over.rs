//! Which copies are handed to copy threads, and what comes back.
use crate::dataplane::ports::Ports;
use crate::memory::copies::{CopyStep, Walk, session_of};
use crate::memory::copy_threads::{
    CopyState, Fault, InFlightCopy, Moved, PIECE_COUNT_MAX, Piece, SETTLE_PAUSE_COUNT, SETTLE_WAIT,
};
use crate::memory::page_table::Reach;
use crate::memory::transfers::{Arrival, Way};
use freeflow_engine::{CopyOutcome, MemorySide, SessionId, Source, SourceBody, Span, Token};
use freeflow_shm::pause;
use std::sync::atomic::Ordering::Relaxed;

impl Ports {
    /// Hands a copy to a copy thread, if it is one for them: large enough, and all of it between
    /// segments.
    pub(crate) fn hand_over(
        &mut self,
        token: Token,
        from: &Source<'_>,
        to: &[Span],
        last: bool,
    ) -> Option<CopyOutcome> {
        if self.copy_threads.threads.is_empty() {
            return None;
        }
        let (SourceBody::Spans(from), true) = (from.body, from.prefix.is_empty()) else { return None };
        let bytes = to.iter().map(|span| span.length as usize).sum::<usize>();
        if bytes < self.copy_threads.bytes_min {
            return None;
        }
        let (first, into) = (session_of(from)?, session_of(to)?);
        let vnic = self.sessions.get(first)?.vnic;
        if !self.copy_threads.wants(vnic, bytes, self.now, self.waker.is_crowded()) {
            return None;
        }
        let mut pieces = self.copy_threads.spare.pop().unwrap_or_default();
        if !self.lay_out(from, to, &mut pieces) {
            self.copy_threads.keep(pieces);
            return None;
        }
        let mut others = Vec::new();
        for span in from.iter().chain(to) {
            if span.session != first && span.session != into && !others.contains(&span.session) {
                others.push(span.session);
            }
        }
        let spans = (self.transfers.spans_of(from), self.transfers.spans_of(to));
        let (state, bytes) = (CopyState::Queued, bytes as u64);
        let copy = InFlightCopy { token, state, from: first, to: into, others, bytes, spans, last };
        self.copy_threads.enter(vnic, copy, pieces, last, self.epoch);
        Some(CopyOutcome::Pending)
    }

    /// The pieces of a copy, in ascending order. False: some of it is no segment, or they are too many.
    fn lay_out(&self, from: &[Span], to: &[Span], pieces: &mut Vec<Piece>) -> bool {
        let (mut source, mut target) = (Walk::new(&self.sessions, from), Walk::new(&self.sessions, to));
        loop {
            let Ok(step) = source.next(usize::MAX) else { return false };
            let Some(CopyStep { piece, .. }) = step else { return !pieces.is_empty() };
            let Reach::Shared { segment, offset } = piece.reach else { return false };
            let mut done = 0;
            while done < piece.bytes {
                let Ok(Some(CopyStep { piece: part, .. })) = target.next(piece.bytes - done) else { return false };
                let Reach::Shared { segment: into, offset: at } = part.reach else { return false };
                if pieces.len() == PIECE_COUNT_MAX {
                    return false;
                }
                let from = (segment.clone(), offset + done);
                pieces.push(Piece { from, to: (into.clone(), at), bytes: part.bytes });
                done += part.bytes;
            }
        }
    }

    /// Returns when no copy thread has anything of this session's memory in hand or before it, and no packet
    /// refers to any memory. What that brought is taken up in the worker's own time.
    pub(crate) fn settle(&mut self, session: SessionId) {
        self.fabric.end_references();
        if self.copy_threads.in_flight() == 0 {
            return;
        }
        self.copy_threads.do_queued(session);
        let mut looks = 0;
        while self.copy_threads.is_touched(session) {
            let finished = self.copy_threads.finished.as_ref().expect("a copy thread has its queue of results");
            looks += 1;
            // No longer than a copy of a chunk or two takes, and the copy thread's page faults.
            let moved = if looks < SETTLE_PAUSE_COUNT {
                finished.try_recv().ok()
            } else {
                finished.recv_timeout(SETTLE_WAIT).ok()
            };
            match moved {
                Some(moved) => self.copy_threads.note_done(moved, self.epoch),
                None => pause(),
            }
            assert!(!self.copy_threads.broken.load(Relaxed), "a copy thread panicked");
        }
    }

    /// Result of the next copy that is done.
    pub(crate) fn poll_moved(&mut self) -> Option<Arrival> {
        loop {
            let Moved { id, pieces, result, blocked } = self.copy_threads.done.pop_front()?;
            self.copy_threads.keep(pieces);
            let Some(InFlightCopy { token, from, to, spans, last, .. }) = self.copy_threads.copies.remove(id) else {
                continue;
            };
            if let Some(side) = blocked {
                let session = if side == MemorySide::Source { from } else { to };
                if let Some(vnic) = self.sessions.get(session).map(|session| session.vnic) {
                    self.note_blocked(vnic);
                }
            }
            let arrived = match result {
                Ok(()) => Some(Ok(())),
                Err(Fault::Outside) => Some(Err(MemorySide::Destination)),
                Err(Fault::Lost(side)) => {
                    let session = if side == MemorySide::Source { from } else { to };
                    self.fail(session, "a shared segment lost its memory");
                    Some(Err(side))
                }
                Err(Fault::Missing) => {
                    let source = Source { prefix: &[], body: SourceBody::Spans(&spans.0) };
                    match self.copy_by_bounce(token, source, &spans.1, last, Way::ByOwner) {
                        CopyOutcome::Done => Some(Ok(())),
                        CopyOutcome::Fault(side) => Some(Err(side)),
                        CopyOutcome::Pending => None,
                    }
                }
            };
            self.transfers.keep_spans(spans.0);
            self.transfers.keep_spans(spans.1);
            if let Some(result) = arrived {
                return Some(Arrival::Copied(token, result));
            }
        }
    }
}
