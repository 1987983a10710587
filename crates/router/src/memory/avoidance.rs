//! The part of a copy left to slow-path copiers because memory blocked the worker; for how long is
//! in [`blocking`](crate::memory::blocking).
use crate::dataplane::ports::{Ports, Session};
use crate::dataplane::table::Table;
use crate::memory::blocking::BlockedStopwatch;
use crate::memory::copies::{Walk, session_of};
use crate::memory::page_table::Reach;
use freeflow_engine::{SessionId, Source, SourceBody, Span, VnicId};
use freeflow_shm::monotonic_ns;
use freeflow_verbs::Instant;

/// Reads a byte of each page that the spans share with this process.
fn touch(sessions: &Table<SessionId, Session>, spans: &[Span]) {
    let mut walk = Walk::new(sessions, spans);
    while let Ok(Some(step)) = walk.next(usize::MAX) {
        if let Reach::Shared { segment, offset } = step.piece.reach {
            // A missing page blocks nobody, and is met again by the copy.
            let _ = segment.probe(offset, step.piece.bytes);
        }
    }
}

impl Ports {
    pub(crate) fn vnic_of(&self, spans: &[Span]) -> Option<VnicId> {
        session_of(spans).and_then(|session| self.sessions.get(session)).map(|session| session.vnic)
    }

    /// When alert: whether the slow-path copiers have to make this copy. Blocks at most once for each vNIC.
    #[cold]
    pub(crate) fn avoids_copy(&mut self, from: &Source<'_>, to: &[Span]) -> bool {
        let from: &[Span] = match from.body {
            SourceBody::Bytes(_) => &[],
            SourceBody::Spans(spans) => spans,
        };
        self.avoids_spans(from) || self.avoids_spans(to)
    }

    /// The same for one side.
    #[cold]
    pub(crate) fn avoids_spans(&mut self, spans: &[Span]) -> bool {
        let Some(vnic) = self.vnic_of(spans) else { return false };
        if self.blocks.avoids(vnic, self.now) {
            return true;
        }
        let stopwatch = BlockedStopwatch::start();
        touch(&self.sessions, spans);
        if !stopwatch.is_blocked() {
            return false;
        }
        self.note_blocked(vnic);
        true
    }

    /// A copy was switched out in this vNIC's memory.
    pub(crate) fn note_blocked(&mut self, vnic: VnicId) {
        let now = Instant(monotonic_ns());
        self.blocks.avoid(vnic, now);
        if let Some(entry) = self.vnics.get_mut(vnic) {
            entry.blocked_count += 1;
        }
    }
}
