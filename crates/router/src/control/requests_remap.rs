//! The requests by which a library puts pages of its ordinary memory into segments and back, and has its threads
//! frozen while it does so.
//!
//! The library places the pages first and reports it afterwards: until then the slow path reaches
//! the same bytes through the process' own page table. To take them back it reports it first.
//! Between two turns the worker copies nothing, and what copy threads have in hand is waited for,
//! so a job that takes something out of the page table never meets a copy half done; what a copier
//! has in hand goes by address, or is looked up again. Pages that regions touch are moved while the
//! slow path stands still (`quiesce`).
use crate::admission::account::Charge;
use crate::attachment::borrow::Borrowing;
use crate::base::slab::Key;
use crate::control::message::Message;
use crate::control::session::Answer;
use crate::control::session::Handled;
use crate::control::session::{Connection, SegmentEntry};
use crate::control::thread::Control;
use crate::dataplane::command::{MapPart, UnmapParts};
use crate::memory::freezer::FreezeCommand;
use crate::memory::lease::SegmentLease;
use crate::memory::page_table::{Origin, PageTable};
use freeflow_engine::SessionId;
use freeflow_protocol::library::{Handle, Reply};
use freeflow_shm::Segment;
use freeflow_verbs::VerbsError;
use std::sync::Arc;

type Outcome = Result<Handled, VerbsError>;

const PAGE_BYTES: u64 = 4096;

/// A part of a segment that a process has mapped in place of its own pages. All in bytes.
pub(crate) struct SegmentPart {
    /// Within the segment.
    pub offset: u64,
    /// In the process.
    pub address: u64,
    pub length: u64,
}

impl Control {
    pub(crate) fn map_part(
        &mut self,
        at: (Key, SessionId),
        segment: Handle,
        SegmentPart { offset, address, length }: SegmentPart,
    ) -> Outcome {
        let session = at.1;
        let entry = self.objects(at.0)?.segments.get(segment)?;
        let (memory, origin) = (entry.segment.clone(), Origin { handle: segment, lease: entry.lease.clone() });
        let command = MapPart { session, segment: memory, origin, offset, address, length };
        self.submit(at, command, |_, ()| Answer::done())
    }

    pub(crate) fn unmap_part(&mut self, at: (Key, SessionId), address: u64, length: u64) -> Outcome {
        let session = at.1;
        let end = address.checked_add(length).ok_or(VerbsError::InvalidArgument)?;
        if length == 0 || !address.is_multiple_of(PAGE_BYTES) || !length.is_multiple_of(PAGE_BYTES) {
            return Err(VerbsError::InvalidArgument);
        }
        self.submit(at, UnmapParts { session, left: address..end }, |_, ()| Answer::done())
    }

    pub(crate) fn reopen_segment(&mut self, key: Key, segment: Handle) -> Outcome {
        let entry = self.objects(key)?.segments.get(segment)?;
        let descriptor = entry.lease.descriptor().and_then(|descriptor| descriptor.try_clone().ok());
        let descriptor = descriptor.ok_or(VerbsError::NoMemory)?;
        let length = entry.segment.bytes() as u64;
        Ok(Handled::Answered(Answer::with(Reply::Segment { segment, length }, vec![descriptor])))
    }

    /// A thread of the vNIC does it, which then answers.
    pub(crate) fn borrow_segment(&mut self, key: Key, place: Borrowing) -> Outcome {
        let Borrowing { address, length } = place;
        if !PageTable::is_mappable(address, length) || !length.is_multiple_of(PAGE_BYTES) {
            return Err(VerbsError::InvalidArgument);
        }
        let charge = self.charge_segment(key, length)?;
        let own = self.own.clone();
        let connection = self.connections.get_mut(key).ok_or(VerbsError::NotFound)?;
        let answer = move |result: Result<Segment, VerbsError>| {
            let result = result.map(|segment| (segment, charge));
            own.send(Message::SegmentBorrowed { connection: key, result });
        };
        connection.busy = true;
        connection.process.borrow(place, Box::new(answer));
        Ok(Handled::Submitted)
    }

    /// A thread of the connection's own does it, which then answers.
    pub(crate) fn freeze_or_thaw(&mut self, key: Key, command: FreezeCommand) -> Outcome {
        let own = self.own.clone();
        let connection = self.connections.get_mut(key).ok_or(VerbsError::NotFound)?;
        let answer = move |result| own.send(Message::ThreadsFrozen { connection: key, result });
        connection.busy = true;
        connection.process.freeze(command, Box::new(answer));
        Ok(Handled::Submitted)
    }
}

/// A segment whose file is the process' own becomes an object of its connection, also of one that ends: what that
/// leaves is freed on a thread of the vNIC.
pub(crate) fn borrowed(connection: &mut Connection, result: Result<(Segment, Charge), VerbsError>) -> Answer {
    let (segment, charge) = match result {
        Ok(taken) => taken,
        Err(error) => return error.into(),
    };
    let (length, lease) = (segment.bytes() as u64, SegmentLease::borrowed(charge));
    let entry = SegmentEntry { segment: Arc::new(segment), mapped_at: None, lease, _import: None };
    Answer::of(Reply::Segment { segment: connection.objects.segments.insert(entry), length })
}
