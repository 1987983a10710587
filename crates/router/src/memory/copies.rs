//! Moving bytes between two processes.
//!
//! If both sides are shared memory the worker copies at once, or has a copy thread do it
//! (`copy_threads`). Else the bytes go through a bounce buffer: *gather* (the worker copies the
//! shared parts of the source, the copier of the source's vNIC reads the others), then *scatter*
//! (the same with the destination). A copier touches only its own vNIC's memory, so a copy between
//! two processes that both need the slow path takes two jobs.
//!
//! Pages of shared memory that are missing are never allocated here, since they would be charged to
//! the router: such a copy goes [`Way::ByOwner`], which is the bounce buffer with all of it left to
//! the copiers. A fault that they cause in the owner's address space is charged to the owner's
//! memory cgroup, and waited for by its own copier alone.
//!
//! Spans of [`SessionId::VOID`] stand for no memory: they read as zeros and forget what is written.
//!
//! Invariant: spans are looked up again when a job comes back, so a session that ended meanwhile is never touched.
use crate::dataplane::bursts::{Burst, Unsent};
use crate::dataplane::ports::{Ports, Session};
use crate::dataplane::table::Table;
use crate::memory::bounce::Bounce;
use crate::memory::page_table::{Piece, Reach};
use crate::memory::share_commands::slow_path_reason;
use crate::memory::slow_path::{Finished, Job, Part, SharedMemory, SlowPathCopier, TenantMemory, Work, atomic_on};
use crate::memory::transfers::{Arrival, Stage, Transfer, Unmade, Way};
use freeflow_engine::{
    AtomicOutcome, CopyOutcome, MemorySide, QpId, SessionId, Source, SourceBody, Span, Token, VnicId,
};
use freeflow_shm::{AccessError, Segment};
use freeflow_verbs::{AtomicOperation, VerbsError};
use std::sync::Arc;

/// Content of void memory; copied piece by piece.
const ZEROS: &[u8] = &[0; 16 * 1024];
/// How often one copy is brought to its destination at most: a process that goes on taking away
/// what is being written has only itself to blame.
const SCATTER_COUNT_MAX: u32 = 8;

/// A walk over spans, piece by piece.
pub(crate) struct Walk<'a> {
    sessions: &'a Table<SessionId, Session>,
    spans: &'a [Span],
    /// Bytes of the first span that are behind.
    offset: usize,
    way: Way,
}

/// The session of a span is not there.
pub(crate) struct Gone;

pub(crate) struct CopyStep<'a> {
    pub piece: Piece<'a>,
    session: SessionId,
    address: u64,
    /// Memory on demand and missing pages of segments are left where they are.
    is_sharable: bool,
}

impl<'a> Walk<'a> {
    pub fn new(sessions: &'a Table<SessionId, Session>, spans: &'a [Span]) -> Self {
        Self { sessions, spans, offset: 0, way: Way::Mapped }
    }

    fn by(self, way: Way) -> Self {
        Self { way, ..self }
    }

    /// The next piece, at most `limit` bytes long; `None` at the end.
    #[inline]
    pub fn next(&mut self, limit: usize) -> Result<Option<CopyStep<'a>>, Gone> {
        while let Some(span) = self.spans.first() {
            let left = span.length as usize - self.offset;
            if left == 0 {
                self.spans = &self.spans[1..];
                self.offset = 0;
                continue;
            }
            let address = span.address.wrapping_add(self.offset as u64);
            let piece = if span.session == SessionId::VOID {
                Piece { reach: Reach::Void, bytes: left.min(limit) }
            } else {
                let session = self.sessions.get(span.session).ok_or(Gone)?;
                match self.way {
                    Way::Mapped => session.memory.piece_of(span, address, left.min(limit)),
                    Way::ByOwner => Piece { reach: session.memory.by_slow_path(), bytes: left.min(limit) },
                }
            };
            self.offset += piece.bytes;
            let is_sharable = self.way == Way::Mapped && !span.region.is_on_demand();
            return Ok(Some(CopyStep { piece, session: span.session, address, is_sharable }));
        }
        Ok(None)
    }
}

/// The session of the first span that has one; all of one side are of one vNIC.
pub(crate) fn session_of(spans: &[Span]) -> Option<SessionId> {
    spans.iter().map(|span| span.session).find(|&session| session != SessionId::VOID)
}

/// An access to one side.
fn of(side: MemorySide) -> impl Fn(AccessError) -> Unmade {
    move |error| match error {
        AccessError::Missing => Unmade::Missing,
        AccessError::OutOfBounds => Unmade::Fault(side),
    }
}

/// Writes `bytes` to the destination, unless there is no memory.
fn put(reach: &Reach<'_>, bytes: &[u8], last: bool) -> Result<(), Unmade> {
    match reach {
        Reach::Shared { segment, offset } => segment.write(*offset, bytes, last).map_err(of(MemorySide::Destination)),
        Reach::SlowPath { .. } => Err(Unmade::Fault(MemorySide::Destination)),
        Reach::Void => Ok(()),
    }
}

/// Copies from `done` bytes into one piece to the beginning of another. Neither needs the slow
/// path.
fn copy_piece(from: &Reach<'_>, done: usize, to: &Reach<'_>, bytes: usize, last: bool) -> Result<(), Unmade> {
    match (from, to) {
        (Reach::Shared { segment: from, offset: at }, Reach::Shared { segment: to, offset }) => {
            Segment::copy(from, at + done, to, *offset, bytes, last).map_err(of(MemorySide::Destination))
        }
        (Reach::Void, to) => put(to, &ZEROS[..bytes], last),
        (Reach::Shared { .. }, Reach::Void) => Ok(()),
        (Reach::SlowPath { .. }, _) => Err(Unmade::Fault(MemorySide::Source)),
        _ => Err(Unmade::Fault(MemorySide::Destination)),
    }
}

fn bytes_of(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.length as usize).sum()
}

impl Ports {
    pub(crate) fn start_copy(&mut self, token: Token, from: Source<'_>, to: &[Span], last: bool) -> CopyOutcome {
        if self.blocks.is_alert(self.now) && self.avoids_copy(&from, to) {
            return self.copy_by_bounce(token, from, to, last, Way::ByOwner);
        }
        if let Some(outcome) = self.hand_over(token, &from, to, last) {
            return outcome;
        }
        let made = match self.copy_at_once(&from, to, last) {
            Ok(true) => return CopyOutcome::Done,
            Ok(false) => match self.is_shared(&from, to) {
                Ok(true) => self.copy_shared(from, to, last),
                Ok(false) => return self.copy_by_bounce(token, from, to, last, Way::Mapped),
                Err(side) => return CopyOutcome::Fault(side),
            },
            Err(unmade) => Err(unmade),
        };
        match made {
            Ok(()) => CopyOutcome::Done,
            Err(Unmade::Missing) => self.copy_by_bounce(token, from, to, last, Way::ByOwner),
            Err(Unmade::Fault(side)) => CopyOutcome::Fault(side),
        }
    }

    /// Copies bytes, or one piece of shared memory, to one other piece, as most messages are: each is looked up once.
    /// False if it is not that simple, or memory was lost.
    #[inline]
    fn copy_at_once(&self, from: &Source<'_>, to: &[Span], last: bool) -> Result<bool, Unmade> {
        let ([to], true) = (to, from.prefix.is_empty()) else { return Ok(false) };
        let whole = |span: &Span| {
            let bytes = span.length as usize;
            let piece = self.sessions.get(span.session)?.memory.piece_of(span, span.address, bytes);
            match piece.reach {
                Reach::Shared { segment, offset } if piece.bytes == bytes => Some((segment, offset)),
                _ => None,
            }
        };
        let Some((into, offset)) = whole(to) else { return Ok(false) };
        let source = match from.body {
            SourceBody::Spans([source]) => source,
            SourceBody::Spans(_) => return Ok(false),
            SourceBody::Bytes(bytes) if bytes.len() != to.length as usize => return Ok(false),
            SourceBody::Bytes(bytes) => {
                into.write(offset, bytes, last).map_err(of(MemorySide::Destination))?;
                return Ok(!into.poisoned());
            }
        };
        let Some((from, from_offset)) = whole(source) else { return Ok(false) };
        if source.length != to.length {
            return Ok(false);
        }
        Segment::copy(from, from_offset, into, offset, to.length as usize, last)
            .map_err(of(MemorySide::Destination))?;
        Ok(!from.poisoned() && !into.poisoned())
    }

    fn is_shared(&self, from: &Source<'_>, to: &[Span]) -> Result<bool, MemorySide> {
        let all_shared = |spans, side| {
            let mut walk = Walk::new(&self.sessions, spans);
            while let Some(step) = walk.next(usize::MAX).map_err(|Gone| side)? {
                if matches!(step.piece.reach, Reach::SlowPath { .. }) {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        let source = match from.body {
            SourceBody::Bytes(_) => true,
            SourceBody::Spans(spans) => all_shared(spans, MemorySide::Source)?,
        };
        Ok(all_shared(to, MemorySide::Destination)? && source)
    }

    /// Both sides are shared memory, or void.
    fn copy_shared(&mut self, from: Source<'_>, to: &[Span], last: bool) -> Result<(), Unmade> {
        let gone = |side| move |Gone| Unmade::Fault(side);
        let mut left = bytes_of(to);
        let mut target = Walk::new(&self.sessions, to);
        let mut bytes: [&[u8]; 2] = [from.prefix, &[]];
        let mut spans: &[Span] = &[];
        match from.body {
            SourceBody::Bytes(body) => bytes[1] = body,
            SourceBody::Spans(body) => spans = body,
        }
        let mut poisoned = None;
        for mut part in bytes {
            while !part.is_empty() {
                let step = target.next(part.len()).map_err(gone(MemorySide::Destination))?;
                let Some(CopyStep { piece: Piece { reach, bytes }, .. }) = step else { return Ok(()) };
                left -= bytes;
                put(&reach, &part[..bytes], last && left == 0)?;
                poisoned = poisoned.or(reach.is_poisoned().then_some(MemorySide::Destination));
                part = &part[bytes..];
            }
        }
        let mut source = Walk::new(&self.sessions, spans);
        while let Some(step) = source.next(usize::MAX).map_err(gone(MemorySide::Source))? {
            let from = step.piece.reach;
            let mut done = 0;
            while done < step.piece.bytes {
                let most = if matches!(from, Reach::Void) { ZEROS.len() } else { usize::MAX };
                let step = target.next((step.piece.bytes - done).min(most)).map_err(gone(MemorySide::Destination))?;
                let Some(CopyStep { piece: Piece { reach, bytes }, .. }) = step else {
                    return Err(Unmade::Fault(MemorySide::Destination));
                };
                left -= bytes;
                copy_piece(&from, done, &reach, bytes, last && left == 0)?;
                poisoned = poisoned.or(from.is_poisoned().then_some(MemorySide::Source));
                poisoned = poisoned.or(reach.is_poisoned().then_some(MemorySide::Destination));
                done += bytes;
            }
        }
        match poisoned {
            None => Ok(()),
            Some(side) => {
                let session = session_of(if side == MemorySide::Source { spans } else { to });
                if let Some(session) = session {
                    self.fail(session, "a shared segment lost its memory");
                }
                Err(Unmade::Fault(side))
            }
        }
    }

    /// The vNICs of a copy's two sides.
    fn vnics_of(&self, from: &Source<'_>, to: &[Span]) -> (Option<VnicId>, Option<VnicId>) {
        let source = match from.body {
            SourceBody::Spans(spans) => self.vnic_of(spans),
            SourceBody::Bytes(_) => None,
        };
        (source, self.vnic_of(to))
    }

    pub(crate) fn copy_by_bounce(
        &mut self,
        token: Token,
        from: Source<'_>,
        to: &[Span],
        last: bool,
        way: Way,
    ) -> CopyOutcome {
        let bytes = bytes_of(to);
        let (source, destination) = self.vnics_of(&from, to);
        let mut bounce = match self.take_bounce((source, destination), &from, bytes) {
            Ok(bounce) => bounce,
            Err(vnic) => {
                if let SourceBody::Spans(from) = from.body {
                    self.postpone_copy(vnic, token, from, to, last, way);
                }
                return CopyOutcome::Pending;
            }
        };
        let mut parts = self.transfers.spare_parts.pop().unwrap_or_default();
        if self.gather(from, &mut bounce[..bytes], &mut parts, way).is_err() {
            self.transfers.bounces.keep(bounce);
            return CopyOutcome::Fault(MemorySide::Source);
        }
        let to_kept = self.transfers.spans_of(to);
        if parts.is_empty() {
            self.transfers.keep_parts(parts);
            return match self.scatter((token, 0), to_kept, bytes, last, (bounce, way)) {
                Some(Ok(())) => CopyOutcome::Done,
                Some(Err(side)) => CopyOutcome::Fault(side),
                None => CopyOutcome::Pending,
            };
        }
        let Some(copier) = source else { return CopyOutcome::Fault(MemorySide::Source) };
        let stage = Stage::Gather;
        let transfer = Transfer { token, stage, copier, to: to_kept, bytes, last, scattered: 0, way };
        if self.submit(transfer, Work::Read, bounce, parts) {
            CopyOutcome::Pending
        } else {
            CopyOutcome::Fault(MemorySide::Source)
        }
    }

    /// Begins to bring the payload of a burst together; [`Ports::send_fetched`] sends it.
    pub(crate) fn start_fetch(
        &mut self,
        token: Token,
        burst: Box<Burst>,
        from: Source<'_>,
        (bytes, way): (usize, Way),
    ) -> Result<(), Gone> {
        let vnics = self.vnics_of(&from, &[]);
        let mut bounce = match self.take_bounce(vnics, &from, bytes) {
            Ok(bounce) => bounce,
            Err(vnic) => {
                if let SourceBody::Spans(from) = from.body {
                    self.postpone_fetch(vnic, token, from, (bytes, way), burst);
                }
                return Ok(());
            }
        };
        let mut parts = self.transfers.spare_parts.pop().unwrap_or_default();
        let copier = vnics.0.ok_or(Gone)?;
        self.gather(from, &mut bounce[..bytes], &mut parts, way)?;
        let (stage, to) = (Stage::Fetch(burst), Vec::new());
        let transfer = Transfer { token, stage, copier, to, bytes, last: false, scattered: 0, way };
        if self.submit(transfer, Work::Read, bounce, parts) { Ok(()) } else { Err(Gone) }
    }

    /// Fills the bounce buffer with what is shared, and notes the rest in `parts`; all of it, if a page is missing.
    fn gather(&self, from: Source<'_>, bounce: &mut [u8], parts: &mut Vec<Part>, way: Way) -> Result<(), Gone> {
        let mut at = from.prefix.len().min(bounce.len());
        bounce[..at].copy_from_slice(&from.prefix[..at]);
        let spans = match from.body {
            SourceBody::Bytes(body) => {
                let count = body.len().min(bounce.len() - at);
                bounce[at..at + count].copy_from_slice(&body[..count]);
                return Ok(());
            }
            SourceBody::Spans(spans) => spans,
        };
        let mut walk = Walk::new(&self.sessions, spans).by(way);
        while at < bounce.len()
            && let Some(CopyStep { piece, session, address, is_sharable }) = walk.next(bounce.len() - at)?
        {
            match piece.reach {
                Reach::Shared { segment, offset } => match segment.read(offset, &mut bounce[at..at + piece.bytes]) {
                    Ok(()) => {}
                    Err(AccessError::Missing) => {
                        parts.clear();
                        return self.gather(from, bounce, parts, Way::ByOwner);
                    }
                    Err(AccessError::OutOfBounds) => return Err(Gone),
                },
                Reach::SlowPath { memory } => {
                    let (memory, bytes) = (memory.clone(), piece.bytes);
                    parts.push(Part { session, memory, address, at, bytes, is_sharable });
                }
                // The buffer still has what it was last used for.
                Reach::Void => bounce[at..at + piece.bytes].fill(0),
            }
            at += piece.bytes;
        }
        Ok(())
    }

    /// Brings the bounce buffer to its destination, after it did so `scattered` times. `None`: a
    /// copier has the rest of it.
    fn scatter(
        &mut self,
        (token, scattered): (Token, u32),
        to: Vec<Span>,
        bytes: usize,
        last: bool,
        (mut bounce, way): (Bounce, Way),
    ) -> Option<Result<(), MemorySide>> {
        let mut parts = self.transfers.spare_parts.pop().unwrap_or_default();
        let ends_shared = match self.slow_path_parts(&to, &mut parts, way) {
            Ok(ends_shared) => ends_shared,
            Err(Gone) => return Some(Err(MemorySide::Destination)),
        };
        let copier = session_of(&to).and_then(|session| self.sessions.get(session)).map(|session| session.vnic);
        let is_whole = parts.is_empty() || copier.is_none();
        if is_whole || !ends_shared {
            match self.scatter_shared(&to, &bounce[..bytes], last && is_whole, way) {
                Err(Unmade::Missing) => {
                    self.transfers.keep_parts(parts);
                    return self.scatter((token, scattered), to, bytes, last, (bounce, Way::ByOwner));
                }
                Err(Unmade::Fault(side)) => return Some(Err(side)),
                Ok(()) => {}
            }
        }
        let copier = match copier {
            Some(copier) if !is_whole => copier,
            _ => {
                self.transfers.keep_parts(parts);
                self.transfers.bounces.keep(bounce);
                self.transfers.keep_spans(to);
                return Some(Ok(()));
            }
        };
        self.charge_bounce(&mut bounce, copier);
        let stage = Stage::Scatter { shared_last: ends_shared, revoked: self.revoked_of(&to) };
        let transfer = Transfer { token, stage, copier, to, bytes, last, scattered, way };
        let work = Work::Write { last: last && !ends_shared };
        if self.submit(transfer, work, bounce, parts) { None } else { Some(Err(MemorySide::Destination)) }
    }

    /// Notes what of the destination needs the slow path; whether the last piece does not.
    fn slow_path_parts(&self, to: &[Span], parts: &mut Vec<Part>, way: Way) -> Result<bool, Gone> {
        let mut walk = Walk::new(&self.sessions, to).by(way);
        let (mut at, mut ends_shared) = (0, true);
        while let Some(CopyStep { piece, session, address, is_sharable }) = walk.next(usize::MAX)? {
            ends_shared = true;
            if let Reach::SlowPath { memory } = piece.reach {
                ends_shared = false;
                let (memory, bytes) = (memory.clone(), piece.bytes);
                parts.push(Part { session, memory, address, at, bytes, is_sharable });
            }
            at += piece.bytes;
        }
        Ok(ends_shared)
    }

    /// Whether a copier, which wrote `parts`, left something out that is no shared memory any more.
    fn is_left_out(&self, transfer: &Transfer, parts: &[Part]) -> bool {
        let Transfer { stage: Stage::Scatter { shared_last: true, revoked }, to, .. } = transfer else {
            return false;
        };
        *revoked != self.revoked_of(to) && !self.covers(parts, to)
    }

    /// Whether all that the destination now needs the slow path for is among `parts`, which are in their
    /// order.
    fn covers(&self, parts: &[Part], to: &[Span]) -> bool {
        let (mut walk, mut at) = (Walk::new(&self.sessions, to), 0);
        while let Ok(step) = walk.next(usize::MAX) {
            let Some(CopyStep { piece, .. }) = step else { return true };
            let end = at + piece.bytes;
            let holder = parts[..parts.partition_point(|part| part.at <= at)].last();
            if matches!(piece.reach, Reach::SlowPath { .. }) && holder.is_none_or(|part| part.at + part.bytes < end) {
                return false;
            }
            at = end;
        }
        false
    }

    /// Writes what of the destination is shared.
    fn scatter_shared(&self, to: &[Span], bounce: &[u8], last: bool, way: Way) -> Result<(), Unmade> {
        let mut walk = Walk::new(&self.sessions, to).by(way);
        let mut at = 0;
        while let Some(CopyStep { piece, .. }) =
            walk.next(usize::MAX).map_err(|Gone| Unmade::Fault(MemorySide::Destination))?
        {
            let end = at + piece.bytes;
            if !matches!(piece.reach, Reach::SlowPath { .. }) {
                put(&piece.reach, &bounce[at..end], last && end == bounce.len())?;
            }
            at = end;
        }
        Ok(())
    }

    /// Of all sessions that the spans are in: a list may name regions that another process registered.
    fn revoked_of(&self, to: &[Span]) -> u64 {
        let sessions = to.iter().filter_map(|span| self.sessions.get(span.session));
        sessions.fold(0, |sum, session| sum.wrapping_add(session.memory.revoked()))
    }

    pub(crate) fn start_atomic(&mut self, token: Token, at: Span, operation: AtomicOperation) -> AtomicOutcome {
        if at.session == SessionId::VOID {
            return AtomicOutcome::Done(0);
        }
        let avoided = self.blocks.is_alert(self.now) && self.avoids_spans(&[at]);
        let Some(session) = self.sessions.get(at.session) else { return AtomicOutcome::Fault };
        let piece = session.memory.piece_of(&at, at.address, 8);
        let (memory, address, by_slow_path): (Arc<dyn TenantMemory>, u64, bool) = match piece.reach {
            // By the copier: the page is missing, or its vNIC avoided; or it reads and writes these
            // bytes for an earlier atomic, after that one.
            Reach::Shared { segment, offset } => {
                let place = session.memory.place(at.address);
                let is_borrowed = place.is_some_and(|place| place.origin.lease.is_borrowed());
                let at_copier = avoided || self.is_atomic_at_copier(at, is_borrowed.then_some(session.vnic));
                match if at_copier { Err(AccessError::Missing) } else { atomic_on(segment, offset, operation) } {
                    Ok(before) if !segment.poisoned() => return AtomicOutcome::Done(before),
                    Err(AccessError::Missing) => {}
                    _ => return AtomicOutcome::Fault,
                }
                let owner = session.memory.slow_path().clone();
                (Arc::new(SharedMemory { segment: segment.clone(), offset, owner }), at.address, false)
            }
            Reach::Void => return AtomicOutcome::Done(0),
            Reach::SlowPath { memory } => (memory.clone(), at.address, true),
        };
        let mut to = self.transfers.spare_spans.pop().unwrap_or_default();
        to.push(at);
        let (copier, stage) = (session.vnic, Stage::Atomic { by_slow_path });
        let transfer = Transfer { token, stage, copier, to, bytes: 8, last: false, scattered: 0, way: Way::Mapped };
        let mut parts = self.transfers.spare_parts.pop().unwrap_or_default();
        let session = if by_slow_path { at.session } else { SessionId::VOID };
        let is_sharable = by_slow_path && !at.region.is_on_demand();
        parts.push(Part { session, memory, address, at: 0, bytes: 8, is_sharable });
        let bounce = Bounce::default();
        if !self.submit(transfer, Work::Atomic(operation), bounce, parts) {
            return AtomicOutcome::Fault;
        }
        let transfers = &mut self.transfers;
        *(if by_slow_path { &mut transfers.slow_path_atomic_count } else { &mut transfers.shared_atomic_count }) += 1;
        AtomicOutcome::Pending
    }

    /// Whether a copier does an atomic operation by the slow path on some of these bytes. Of a process' own
    /// memory only while it becomes shared. A file of the process' own may lie at other addresses and in other
    /// processes, too: any such operation of its vNIC may be on it (`borrowed_of`).
    fn is_atomic_at_copier(&self, at: Span, borrowed_of: Option<VnicId>) -> bool {
        self.transfers.slow_path_atomic_count > 0
            && self.transfers.transfers.iter().any(|(_, transfer)| {
                let same = |span: &Span| span.session == at.session && span.address.abs_diff(at.address) < 8;
                matches!(transfer.stage, Stage::Atomic { by_slow_path: true })
                    && (borrowed_of == Some(transfer.copier) || transfer.to.iter().any(same))
            })
    }

    /// Whether a copier does an atomic operation by the slow path in memory of this session.
    pub(crate) fn is_atomic_by_slow_path(&self, session: SessionId) -> bool {
        self.transfers.slow_path_atomic_count > 0
            && self.transfers.transfers.iter().any(|(_, transfer)| {
                let same = |span: &Span| span.session == session;
                matches!(transfer.stage, Stage::Atomic { by_slow_path: true }) && transfer.to.iter().any(same)
            })
    }

    /// Whether a copier has an atomic operation to do on a segment for this session.
    pub(crate) fn is_segment_at_copier(&self, session: SessionId) -> bool {
        self.transfers.shared_atomic_count > 0
            && self.transfers.transfers.iter().any(|(_, transfer)| {
                let same = |span: &Span| span.session == session;
                matches!(transfer.stage, Stage::Atomic { by_slow_path: false }) && transfer.to.iter().any(same)
            })
    }

    /// A vNIC has its copier before its first session: where no thread is to be had that is
    /// refused, and no copy fails later for it.
    pub(crate) fn ensure_copier(&mut self, vnic: VnicId) -> Result<(), VerbsError> {
        let entry = self.vnics.get_mut(vnic).ok_or(VerbsError::DeviceFatal)?;
        if entry.copier.is_none() {
            let copier = SlowPathCopier::start(self.finished.clone(), self.waker.clone());
            entry.copier = Some(copier.map_err(|_| VerbsError::NoMemory)?);
        }
        Ok(())
    }

    fn submit(&mut self, transfer: Transfer, work: Work, bounce: Bounce, parts: Vec<Part>) -> bool {
        let vnic_id = transfer.copier;
        if self.ensure_copier(vnic_id).is_err() {
            return false;
        }
        let Some(vnic) = self.vnics.get_mut(vnic_id) else { return false };
        let parts_and_way = (parts.as_slice(), transfer.way);
        self.grants.note_slow_path(&mut self.sessions, self.now, parts_and_way, &mut vnic.slow_path);
        let Some(copier) = vnic.copier.as_mut() else { return false };
        let id = self.transfers.transfers.insert(transfer);
        if copier.submit(Job { id, work, bounce, parts }).is_err() {
            self.transfers.transfers.remove(id);
            return false;
        }
        true
    }

    /// The operation that a copier did a job for.
    pub(crate) fn token_of(&self, finished: &Finished) -> Option<Token> {
        self.transfers.transfers.get(finished.id).map(|transfer| transfer.token)
    }

    /// A copier reached memory for a request of this QP, whosever memory.
    pub(crate) fn count_slow_path(&mut self, id: QpId, finished: &Finished) {
        let Some(transfer) = self.transfers.transfers.get(finished.id) else { return };
        let Some(qp) = self.qps.get_mut(id) else { return };
        for part in &finished.parts {
            let reason = slow_path_reason(self.sessions.get(part.session), part, transfer.way);
            qp.slow_path.add(reason, part.bytes as u64);
        }
    }

    /// A copier finished a job. `None`: nobody waits for it any more, or it goes on with another copier.
    pub(crate) fn handle_finished(&mut self, finished: Finished) -> Option<Arrival> {
        let Finished { id, bounce, parts, result } = finished;
        let Some(transfer) = self.transfers.transfers.remove(id) else {
            self.transfers.keep_parts(parts);
            self.transfers.bounces.keep(bounce);
            return None;
        };
        let is_left_out = self.is_left_out(&transfer, &parts);
        self.transfers.keep_parts(parts);
        if let Some(copier) = self.vnics.get_mut(transfer.copier).and_then(|vnic| vnic.copier.as_mut()) {
            copier.in_flight = copier.in_flight.saturating_sub(1);
        }
        let Transfer { token, stage, to, bytes, last, scattered, way, .. } = transfer;
        match (stage, result) {
            (Stage::Gather, Ok(_)) => {
                let result = self.scatter((token, 0), to, bytes, last, (bounce, way))?;
                Some(Arrival::Copied(token, result))
            }
            (Stage::Fetch(burst), Ok(_)) => {
                self.fabric.unsent.push_back(Unsent { token, burst, bounce });
                None
            }
            (Stage::Gather | Stage::Fetch(_), Err(_)) => {
                self.transfers.bounces.keep(bounce);
                Some(Arrival::Copied(token, Err(MemorySide::Source)))
            }
            (Stage::Scatter { .. }, Ok(_)) if is_left_out && scattered + 1 < SCATTER_COUNT_MAX => {
                // All of it once more.
                let result = self.scatter((token, scattered + 1), to, bytes, last, (bounce, way))?;
                Some(Arrival::Copied(token, result))
            }
            (Stage::Scatter { shared_last, .. }, Ok(_)) if !is_left_out => {
                let rest = if shared_last { self.scatter_shared(&to, &bounce[..bytes], last, way) } else { Ok(()) };
                let result = match rest {
                    Err(Unmade::Missing) => {
                        let result = self.scatter((token, scattered), to, bytes, last, (bounce, Way::ByOwner))?;
                        return Some(Arrival::Copied(token, result));
                    }
                    Err(Unmade::Fault(side)) => Err(side),
                    Ok(()) => Ok(()),
                };
                self.transfers.bounces.keep(bounce);
                self.transfers.keep_spans(to);
                Some(Arrival::Copied(token, result))
            }
            (Stage::Scatter { .. }, _) => {
                self.transfers.bounces.keep(bounce);
                Some(Arrival::Copied(token, Err(MemorySide::Destination)))
            }
            (Stage::Atomic { by_slow_path }, result) => {
                self.transfers.count_atomic_done(by_slow_path);
                self.transfers.bounces.keep(bounce);
                self.transfers.keep_spans(to);
                Some(Arrival::Atomic(token, result.map_err(|_| ())))
            }
        }
    }
}
