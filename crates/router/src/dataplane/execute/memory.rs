//! Segments in a process' address space, memory regions and memory windows.
//!
//! Between two turns the worker copies nothing, and what copy threads have in hand is waited for,
//! so a command that takes something out of the page table never meets a copy half done.
use crate::dataplane::command::{
    AllocMw, AllocNullMr, DeallocMw, DeregisterMr, DestroySegment, Execute, Execution, MapPart, MapSegment, RegisterMr,
    ReregisterMr, UnmapParts,
};
use crate::dataplane::worker::Worker;
use freeflow_engine::SessionId;
use freeflow_verbs::{Instant, VerbsError};
use std::ops::Range;
use std::task::Poll;

impl Execute<MapSegment> for Worker {
    fn execute(&mut self, _: Instant, command: MapSegment) -> Execution<MapSegment> {
        let mapped = self.map_segment(&command);
        Execution::returned(command, mapped)
    }
}

impl Execute<DestroySegment> for Worker {
    fn execute(&mut self, _: Instant, command: DestroySegment) -> Execution<DestroySegment> {
        let DestroySegment { session, handle, segment, mapped_at } = &command;
        let Some(entry) = self.ports.sessions.get_mut(*session) else {
            return Execution::refused(command, VerbsError::DeviceFatal);
        };
        if mapped_at.is_none() && entry.memory.has(segment) {
            return Execution::refused(command, VerbsError::Busy);
        }
        self.ports.recall((*session, *handle));
        if self.ports.has_insiders(*session) {
            return Execution::Again(command);
        }
        self.ports.forget_grants_of((*session, *handle));
        self.ports.settle(*session);
        let Some(entry) = self.ports.sessions.get_mut(*session) else {
            return Execution::refused(command, VerbsError::DeviceFatal);
        };
        let unmapped = mapped_at.and_then(|start| entry.memory.unmap(start, segment));
        Execution::returned(command, Ok(vec![Box::new(unmapped)]))
    }
}

impl Execute<MapPart> for Worker {
    fn execute(&mut self, _: Instant, command: MapPart) -> Execution<MapPart> {
        let mapped = self.map_part(&command);
        Execution::returned(command, mapped)
    }
}

impl Execute<UnmapParts> for Worker {
    fn execute(&mut self, _: Instant, mut command: UnmapParts) -> Execution<UnmapParts> {
        match self.take_back(command.session, &mut command.left) {
            Poll::Ready(result) => Execution::done(result),
            Poll::Pending => Execution::Again(command),
        }
    }
}

impl Worker {
    fn map_segment(&mut self, command: &MapSegment) -> Result<Option<u64>, VerbsError> {
        let MapSegment { session, segment, origin, address, before } = command;
        let range = *address..address.saturating_add(segment.bytes() as u64);
        self.ports.admit_mapping(*session, origin, &range)?;
        if before.is_some() {
            self.ports.settle(*session);
        }
        let entry = self.ports.sessions.get_mut(*session).ok_or(VerbsError::DeviceFatal)?;
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
        self.ports.admit_mapping(*session, origin, &range)?;
        let entry = self.ports.sessions.get_mut(*session).ok_or(VerbsError::DeviceFatal)?;
        let mapped = entry.memory.map_part(*address, segment.clone(), *offset, *length);
        entry.memory.set_origin(segment, origin.clone());
        if mapped.is_ok() {
            entry.lost.drop_range(&range);
        }
        mapped.map_err(|_| VerbsError::InvalidArgument)
    }

    /// One step of taking parts back, each as if the library had asked for it alone: the bytes are
    /// reached by the slow path where it is done, and still in the segment beyond, and are the
    /// same.
    pub(crate) fn take_back(&mut self, session: SessionId, left: &mut Range<u64>) -> Poll<Result<(), VerbsError>> {
        let ports = &mut self.ports;
        if ports.is_segment_at_copier(session) || ports.has_insiders(session) {
            return Poll::Pending;
        }
        ports.settle(session);
        let Some(entry) = ports.sessions.get(session) else { return Poll::Ready(Err(VerbsError::DeviceFatal)) };
        let step = left.start..entry.memory.step_end(left.start, left.end);
        let recalled = ports.recall_grants(session, step.clone());
        if ports.has_insiders(session) {
            return Poll::Pending;
        }
        if let Some(entry) = ports.sessions.get_mut(session) {
            entry.memory.unmap_parts(step.start, step.end);
            entry.lost.drop_range(&step);
        }
        ports.forget_unmapped(session, recalled);
        left.start = step.end;
        if left.is_empty() {
            return Poll::Ready(Ok(()));
        }
        self.goes_on = true;
        Poll::Pending
    }
}

impl Execute<RegisterMr> for Worker {
    fn execute(&mut self, _: Instant, command: RegisterMr) -> Execution<RegisterMr> {
        let RegisterMr { session, pd, address, length, iova, access } = command;
        Execution::done(self.engine.register_mr(session, pd, address, length, iova, access))
    }
}

impl Execute<ReregisterMr> for Worker {
    fn execute(&mut self, now: Instant, command: ReregisterMr) -> Execution<ReregisterMr> {
        let ReregisterMr { session, mr, pd, change } = &command;
        self.ports.revoke_grants_by(*mr);
        self.ports.send_commands(now);
        if self.ports.has_insiders(*session) {
            return Execution::Again(command);
        }
        // A change that takes something away makes the keys invalid while a copy is in flight, so
        // the copies of the copy threads are brought in first.
        self.land_copies_of(now, *session);
        let result = self.engine.reregister_mr(*session, *mr, *pd, change);
        Execution::unless_in_flight(command, result)
    }
}

impl Execute<DeregisterMr> for Worker {
    fn execute(&mut self, now: Instant, command: DeregisterMr) -> Execution<DeregisterMr> {
        self.ports.revoke_grants_by(command.mr);
        self.ports.send_commands(now);
        if self.ports.has_insiders(command.session) {
            return Execution::Again(command);
        }
        let result = self.engine.deregister_mr(command.session, command.mr);
        Execution::unless_in_flight(command, result)
    }
}

impl Execute<AllocNullMr> for Worker {
    fn execute(&mut self, _: Instant, AllocNullMr { session, pd }: AllocNullMr) -> Execution<AllocNullMr> {
        Execution::done(self.engine.alloc_null_mr(session, pd))
    }
}

impl Execute<AllocMw> for Worker {
    fn execute(&mut self, _: Instant, AllocMw { session, pd, kind }: AllocMw) -> Execution<AllocMw> {
        Execution::done(self.engine.alloc_mw(session, pd, kind))
    }
}

impl Execute<DeallocMw> for Worker {
    fn execute(&mut self, _: Instant, command: DeallocMw) -> Execution<DeallocMw> {
        let result = self.engine.dealloc_mw(command.session, command.mw);
        Execution::unless_in_flight(command, result)
    }
}
