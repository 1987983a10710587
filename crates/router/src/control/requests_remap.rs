//! The requests by which a library puts pages of its ordinary memory into segments and back, and has its threads held
//! while it does so.
//!
//! The library places the pages first and tells afterwards: until then the fallback reaches the same bytes through the
//! process' own page table. To take them back it tells first. Between two turns the worker copies nothing, and what movers have in
//! hand is waited for, so a job that takes something out of the page table never meets a copy half done; what a helper has in
//! hand goes by address, or is looked up again. Pages that regions touch are moved while the fallback stands still (`quiesce`).
use crate::base::slab::Key;
use crate::control::requests::Handled;
use crate::control::session::Answer;
use crate::control::thread::Control;
use crate::dataplane::worker::Worker;
use crate::memory::freezer::{Order, Process};
use crate::memory::page_table::Origin;
use freeflow_engine::SessionId;
use freeflow_protocol::library::{Handle, Reply};
use freeflow_verbs::{Instant, VerbsError};
use std::ops::Range;
use std::task::Poll;

type Outcome = Result<Handled, VerbsError>;

const PAGE_BYTES: u64 = 4096;

impl Control {
    pub(crate) fn map_part(
        &mut self,
        at: (Key, SessionId),
        segment: Handle,
        [offset, address, length]: [u64; 3],
    ) -> Outcome {
        let session = at.1;
        let entry = self.objects(at.0)?.segments.get(segment)?;
        let (memory, origin) = (entry.segment.clone(), Origin { handle: segment, lease: entry.lease.clone() });
        let work = move |worker: &mut Worker, _: Instant| {
            worker.rings.admit_mapping(session, &origin, &(address..address.saturating_add(length)))?;
            let Some(entry) = worker.rings.sessions.get_mut(session) else {
                return Poll::Ready(Err(VerbsError::DeviceFatal));
            };
            let mapped = entry.memory.map_part(address, memory.clone(), offset, length);
            entry.memory.set_origin(&memory, origin.clone());
            if mapped.is_ok() {
                entry.lost.drop_range(&(address..address.saturating_add(length)));
            }
            Poll::Ready(mapped.map_err(|_| VerbsError::InvalidArgument))
        };
        self.submit(at, work, |_, ()| Answer::done())
    }

    pub(crate) fn unmap_part(&mut self, at: (Key, SessionId), address: u64, length: u64) -> Outcome {
        let session = at.1;
        let end = address.checked_add(length).ok_or(VerbsError::InvalidArgument)?;
        if length == 0 || !address.is_multiple_of(PAGE_BYTES) || !length.is_multiple_of(PAGE_BYTES) {
            return Err(VerbsError::InvalidArgument);
        }
        let mut left = address..end;
        let work = move |worker: &mut Worker, _: Instant| worker.take_back(session, &mut left);
        self.submit(at, work, |_, ()| Answer::done())
    }

    pub(crate) fn reopen_segment(&mut self, key: Key, segment: Handle) -> Outcome {
        let entry = self.objects(key)?.segments.get(segment)?;
        let descriptor = entry.lease.descriptor().and_then(|descriptor| descriptor.try_clone().ok());
        let descriptor = descriptor.ok_or(VerbsError::NoMemory)?;
        let length = entry.segment.bytes() as u64;
        Ok(Handled::Answered(Answer::with(Reply::Segment { segment, length }, vec![descriptor])))
    }

    /// A thread of the connection's own does it, which then answers.
    pub(crate) fn order_hold(&mut self, key: Key, order: Order) -> Outcome {
        let (reactions, waker) = (self.own_reactions.clone(), self.waker.clone());
        let account = self.vnic_of(key).ok_or(VerbsError::DeviceFatal)?.account.clone();
        let connection = self.connections.get_mut(key).ok_or(VerbsError::NotFound)?;
        let answer = move |result: Result<(), VerbsError>| {
            let reaction = move |control: &mut Self| {
                control.handle_job_done(key, |_| result.map_or_else(Answer::from, |()| Answer::done()));
            };
            // Fails only when the control thread has ended.
            let _ = reactions.send(Box::new(reaction));
            waker.wake();
        };
        connection.busy = true;
        let (tasks, gate) = (connection.tasks.clone(), connection.memory.gate.clone());
        let process = Process { tasks, uid: connection.uid, gate };
        connection.holder.order(order, process, &account, Box::new(answer));
        Ok(Handled::Submitted)
    }
}

impl Worker {
    /// One step of taking parts back, each as if the library had asked for it alone: the bytes are reached by the fallback where it is
    /// done, and still in the segment beyond, and are the same.
    pub(crate) fn take_back(&mut self, session: SessionId, left: &mut Range<u64>) -> Poll<Result<(), VerbsError>> {
        let rings = &mut self.rings;
        if rings.is_segment_at_helper(session) {
            return Poll::Pending;
        }
        rings.settle(session);
        let Some(entry) = rings.sessions.get(session) else { return Poll::Ready(Err(VerbsError::DeviceFatal)) };
        let step = left.start..entry.memory.step_end(left.start, left.end);
        let recalled = rings.recall_grants(session, step.clone());
        if let Some(entry) = rings.sessions.get_mut(session) {
            entry.memory.unmap_parts(step.start, step.end);
        }
        rings.forget_unmapped(session, recalled);
        left.start = step.end;
        if left.is_empty() {
            return Poll::Ready(Ok(()));
        }
        self.goes_on = true;
        Poll::Pending
    }
}
