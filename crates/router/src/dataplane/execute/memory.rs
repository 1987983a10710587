//! Segments in a process' address space, memory regions and memory windows.
//!
//! Between two turns the worker copies nothing, and what copy threads have in hand is waited for,
//! so a command that takes something out of the page table never meets a copy half done.
use crate::dataplane::command::{
    AllocMw, AllocNullMr, DeallocMw, DeregisterMr, DestroySegment, Execute, MapPart, MapSegment, RegisterMr,
    ReregisterMr, Step, UnmapParts,
};
use crate::dataplane::worker::Worker;
use freeflow_engine::SessionId;
use freeflow_verbs::{Instant, VerbsError};
use std::ops::Range;
use std::task::Poll;

impl Execute<MapSegment> for Worker {
    fn execute(&mut self, _: Instant, command: MapSegment) -> Step<MapSegment> {
        let mapped = self.map_segment(&command);
        Step::returned(command, mapped)
    }
}

impl Execute<DestroySegment> for Worker {
    fn execute(&mut self, _: Instant, command: DestroySegment) -> Step<DestroySegment> {
        let DestroySegment { session, handle, segment, mapped_at } = &command;
        let Some(entry) = self.rings.sessions.get_mut(*session) else {
            return Step::refused(command, VerbsError::DeviceFatal);
        };
        if mapped_at.is_none() && entry.memory.has(segment) {
            return Step::refused(command, VerbsError::Busy);
        }
        self.rings.forget_grants_of((*session, *handle));
        self.rings.settle(*session);
        let Some(entry) = self.rings.sessions.get_mut(*session) else {
            return Step::refused(command, VerbsError::DeviceFatal);
        };
        let unmapped = mapped_at.and_then(|start| entry.memory.unmap(start, segment));
        Step::returned(command, Ok(vec![Box::new(unmapped)]))
    }
}

impl Execute<MapPart> for Worker {
    fn execute(&mut self, _: Instant, command: MapPart) -> Step<MapPart> {
        let mapped = self.map_part(&command);
        Step::returned(command, mapped)
    }
}

impl Execute<UnmapParts> for Worker {
    fn execute(&mut self, _: Instant, mut command: UnmapParts) -> Step<UnmapParts> {
        match self.take_back(command.session, &mut command.left) {
            Poll::Ready(result) => Step::done(result),
            Poll::Pending => Step::Again(command),
        }
    }
}

impl Worker {
    fn map_segment(&mut self, command: &MapSegment) -> Result<Option<u64>, VerbsError> {
        let MapSegment { session, segment, origin, address, before } = command;
        let range = *address..address.saturating_add(segment.bytes() as u64);
        self.rings.admit_mapping(*session, origin, &range)?;
        if before.is_some() {
            self.rings.settle(*session);
        }
        let entry = self.rings.sessions.get_mut(*session).ok_or(VerbsError::DeviceFatal)?;
        if let Some(start) = *before {
            entry.memory.unmap(start, segment);
        }
        if entry.memory.map(*address, segment.clone()).is_err() {
            return Ok(None);
        }
        entry.memory.set_origin(segment, origin.clone());
        Ok(Some(*address))
    }

    fn map_part(&mut self, command: &MapPart) -> Result<(), VerbsError> {
        let MapPart { session, segment, origin, offset, address, length } = command;
        let range = *address..address.saturating_add(*length);
        self.rings.admit_mapping(*session, origin, &range)?;
        let entry = self.rings.sessions.get_mut(*session).ok_or(VerbsError::DeviceFatal)?;
        let mapped = entry.memory.map_part(*address, segment.clone(), *offset, *length);
        entry.memory.set_origin(segment, origin.clone());
        if mapped.is_ok() {
            entry.lost.drop_range(&range);
        }
        mapped.map_err(|_| VerbsError::InvalidArgument)
    }

    /// One step of taking parts back, each as if the library had asked for it alone: the bytes are
    /// reached by the fallback where it is done, and still in the segment beyond, and are the same.
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

impl Execute<RegisterMr> for Worker {
    fn execute(&mut self, _: Instant, command: RegisterMr) -> Step<RegisterMr> {
        let RegisterMr { session, pd, address, length, iova, access } = command;
        Step::done(self.engine.register_mr(session, pd, address, length, iova, access))
    }
}

impl Execute<ReregisterMr> for Worker {
    fn execute(&mut self, now: Instant, command: ReregisterMr) -> Step<ReregisterMr> {
        let ReregisterMr { session, mr, pd, change } = &command;
        self.rings.withdraw_grants_by(*mr);
        self.rings.give_orders(now);
        // A change that takes something away makes the keys invalid while a copy is in flight, so
        // the copies of the movers are brought in first.
        self.land_copies_of(now, *session);
        let result = self.engine.reregister_mr(*session, *mr, *pd, change);
        Step::unless_in_flight(command, result)
    }
}

impl Execute<DeregisterMr> for Worker {
    fn execute(&mut self, now: Instant, command: DeregisterMr) -> Step<DeregisterMr> {
        self.rings.withdraw_grants_by(command.mr);
        self.rings.give_orders(now);
        let result = self.engine.deregister_mr(command.session, command.mr);
        Step::unless_in_flight(command, result)
    }
}

impl Execute<AllocNullMr> for Worker {
    fn execute(&mut self, _: Instant, AllocNullMr { session, pd }: AllocNullMr) -> Step<AllocNullMr> {
        Step::done(self.engine.alloc_null_mr(session, pd))
    }
}

impl Execute<AllocMw> for Worker {
    fn execute(&mut self, _: Instant, AllocMw { session, pd, kind }: AllocMw) -> Step<AllocMw> {
        Step::done(self.engine.alloc_mw(session, pd, kind))
    }
}

impl Execute<DeallocMw> for Worker {
    fn execute(&mut self, _: Instant, command: DeallocMw) -> Step<DeallocMw> {
        let result = self.engine.dealloc_mw(command.session, command.mw);
        Step::unless_in_flight(command, result)
    }
}
