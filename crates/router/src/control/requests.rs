//! The requests of a library: checked against its session's own handles, then executed by the worker as a command.
//!
//! A command that has to wait for copies in flight is executed again each turn, for at most
//! [`COMMAND_TIME_MAX`](crate::dataplane::command::COMMAND_TIME_MAX).
use crate::admission::account::{Charge, OverLimit};
use crate::attachment::borrow::Borrowing;
use crate::base::deferred_drop::AndThen;
use crate::base::slab::Key;
use crate::control::message::Message;
use crate::control::passes::Opening;
use crate::control::requests_remap::SegmentPart;
use crate::control::session::{
    Answer, ChannelEntry, Connection, CqEntry, MrEntry, NamedMemory, Objects, PdEntry, SegmentEntry, SrqEntry,
};
use crate::control::session::{Freed, Handled, Outcome};
use crate::control::thread::Control;
use crate::dataplane::command::{
    AllocPd, Ask, CloseContext, CreateAh, CreateCompletionChannel, CreateCq, CreateSrq, DeregisterMr, DestroyAh,
    DestroyCompletionChannel, DestroyCq, DestroySegment, DestroySrq, MapSegment, ModerateCq, ModifySrq, OpenContext,
    QuerySrq, RegisterMr, ResizeCq,
};
use crate::dataplane::event_pipes::PIPE_BYTES;
use crate::memory::freezer::FreezeCommand;
use crate::memory::lease::SegmentLease;
use crate::memory::page_table::Origin;
use freeflow_engine::{SessionId, grant_srq_attributes};
use freeflow_protocol::library::{COOKIE_COUNT, Handle, Reply, Request, XrcQueue};
use freeflow_shm::layout::{QueueShape, cq_bytes};
use freeflow_shm::{CompletionProducer, RequestConsumer, Segment, refuses_missing_pages};
use freeflow_verbs::{Access, AddressHandleAttributes, CQE_COUNT_MAX, Duration, SrqAttributes, VerbsError};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Memory that the control thread frees itself, about; more is freed elsewhere.
const FREED_AT_ONCE_BYTES_MAX: u64 = 1 << 20;

/// UD QPs of a process whose requests the end of an address handle waits for.
const DATAGRAM_QPS_MAX: usize = 256;

/// The memory of a new region. All in bytes.
struct RegionRange {
    /// In the process.
    address: u64,
    length: u64,
    /// The address by which work requests name its first byte.
    iova: u64,
}

impl From<OverLimit> for VerbsError {
    fn from(OverLimit: OverLimit) -> Self {
        Self::NoMemory
    }
}

fn bytes_of(charges: &[Charge]) -> u64 {
    charges.iter().map(Charge::segment_bytes).sum()
}

impl Control {
    pub(crate) fn handle_request(&mut self, key: Key, session: SessionId, request: Request) -> Outcome {
        let at = (key, session);
        match request {
            Request::Hello { .. } => Err(VerbsError::InvalidArgument),
            Request::OpenContext => {
                let vnic = self.vnic_of(key).ok_or(VerbsError::DeviceFatal)?.engine_id;
                let opening = Opening::fresh(&self.passes, key, vnic).map_err(|_| VerbsError::NoMemory)?;
                self.open_context(at, opening)
            }
            Request::ImportContext { pass } => self.import_context(at, pass),
            Request::CloseContext { context } => self.close_context(at, context),
            Request::CreateChannel { context } => self.create_channel(at, context),
            Request::DestroyChannel { channel } => self.destroy_channel(at, channel),
            Request::AllocPd { context } => self.alloc_pd(at, context),
            Request::DeallocPd { pd } => self.dealloc_pd(at, pd),
            Request::ImportPd { context, pd } => self.import_pd(at, context, pd),
            Request::ImportMr { pd, mr } => self.import_mr(at, pd, mr),
            Request::ImportSegment { context, segment } => self.import_segment(key, context, segment),
            Request::CreateSegment { length } => self.create_segment(key, length),
            Request::MapSegment { segment, address } => self.map_segment(at, segment, address),
            Request::DestroySegment { segment } => self.destroy_segment(at, segment),
            Request::MapPart { segment, offset, address, length } => {
                self.map_part(at, segment, SegmentPart { offset, address, length })
            }
            Request::UnmapPart { address, length } => self.unmap_part(at, address, length),
            Request::FreezeThreads { thread, quiesce } => {
                self.freeze_or_thaw(key, FreezeCommand::Freeze { thread, quiesce })
            }
            Request::ThawThreads => self.freeze_or_thaw(key, FreezeCommand::Thaw),
            Request::ReopenSegment { segment } => self.reopen_segment(key, segment),
            Request::RegisterMr { pd, address, length, iova, access } => {
                self.register_mr(at, pd, RegionRange { address, length, iova }, access)
            }
            Request::DeregisterMr { mr } => self.deregister_mr(at, mr),
            Request::ReregisterMr { mr, pd, change } => self.reregister_mr(at, mr, pd, change),
            Request::AllocNullMr { pd } => self.alloc_null_mr(at, pd),
            Request::AllocMw { pd, kind } => self.alloc_mw(at, pd, kind),
            Request::DeallocMw { mw } => self.dealloc_mw(at, mw),
            request @ Request::CreateCq { .. } => self.create_cq(at, &request),
            Request::ResizeCq { cq, cqe } => self.resize_cq(at, cq, cqe),
            Request::ModerateCq { cq, count, period_us } => self.moderate_cq(at, cq, count, period_us),
            Request::DestroyCq { cq } => self.destroy_cq(at, cq),
            Request::CreateSrq { pd, attributes, cookie, xrc } => self.create_srq(at, pd, attributes, cookie, xrc),
            Request::ModifySrq { srq, limit } => self.modify_srq(at, srq, limit),
            Request::QuerySrq { srq } => self.query_srq(at, srq),
            Request::DestroySrq { srq } => self.destroy_srq(at, srq),
            Request::CreateAh { pd, attributes } => self.create_ah(at, pd, attributes),
            Request::DestroyAh { ah } => self.destroy_ah(at, ah),
            Request::Cm(request) => self.handle_cm(key, request),
            Request::CmStep { qp, step } => self.handle_step(at, qp, step),
            Request::BorrowSegment { address, length } => self.borrow_segment(key, Borrowing { address, length }),
            request => self.handle_qp_request(at, request),
        }
    }

    /// [`Self::submit`] for a request that takes memory out.
    fn submit_freeing<T, C: Ask<Answer = Result<T, VerbsError>>>(
        &mut self,
        at: (Key, SessionId),
        command: C,
        finish: impl FnOnce(&mut Connection, T) -> (Answer, Freed) + Send + 'static,
    ) -> Outcome {
        let key = at.0;
        self.submit_with(at, command, move |control, result| {
            let taken = result.and_then(|value| {
                let connection = control.connections.get_mut(key).ok_or(VerbsError::DeviceFatal)?;
                Ok(finish(connection, value))
            });
            match taken {
                Ok((answer, freed)) => control.answer_freed(key, answer, freed),
                Err(error) => control.handle_request_done(key, |_| error.into()),
            }
        })
    }

    fn answer_freed(&mut self, key: Key, answer: Answer, freed: Freed) {
        let Freed { bytes, thing } = freed;
        if bytes <= FREED_AT_ONCE_BYTES_MAX {
            drop(thing);
            return self.handle_request_done(key, |_| answer);
        }
        let Some(vnic) = self.connections.get(key).map(|connection| connection.vnic.clone()) else { return };
        let own = self.own.clone();
        let then = move || own.send(Message::MemoryFreed { connection: key, answer });
        self.free(&vnic, AndThen::new(thing, then));
    }

    pub(crate) fn objects(&mut self, key: Key) -> Result<&mut Objects, VerbsError> {
        self.connections.get_mut(key).map(|connection| &mut connection.objects).ok_or(VerbsError::NotFound)
    }

    pub(crate) fn charge_segment(&self, key: Key, bytes: u64) -> Result<Charge, VerbsError> {
        let vnic = self.vnic_of(key).ok_or(VerbsError::DeviceFatal)?;
        Ok(Charge::segment(&vnic.account, bytes, &vnic.record.limits)?)
    }

    /// A new segment for the rings of one object, within the vNIC's limits.
    pub(crate) fn new_ring(
        &self,
        key: Key,
        name: &str,
        bytes: usize,
    ) -> Result<(Arc<Segment>, NamedMemory, Charge), VerbsError> {
        let vnic = self.vnic_of(key).ok_or(VerbsError::DeviceFatal)?;
        let charge = Charge::ring(&vnic.account, bytes as u64, &vnic.record.limits)?;
        let (segment, memory) = vnic.new_memory(bytes, |bytes| Segment::create(name, bytes))?;
        Ok((Arc::new(segment), memory, charge))
    }

    /// A new segment for data, within the vNIC's limits.
    fn new_data_segment(
        &self,
        key: Key,
        bytes: u64,
        create: impl FnOnce(usize) -> io::Result<(Segment, OwnedFd)>,
    ) -> Result<(Arc<Segment>, NamedMemory, Charge), VerbsError> {
        let charge = self.charge_segment(key, bytes)?;
        let bytes = usize::try_from(bytes).map_err(|_| VerbsError::NoMemory)?;
        let (segment, memory) = self.vnic_of(key).ok_or(VerbsError::DeviceFatal)?.new_memory(bytes, create)?;
        Ok((Arc::new(segment), memory, charge))
    }

    /// A new context, or an imported one.
    pub(crate) fn open_context(&mut self, at: (Key, SessionId), opening: Opening) -> Outcome {
        let session = at.1;
        let vnic = self.vnic_of(at.0).ok_or(VerbsError::DeviceFatal)?;
        let charge = Charge::descriptor(&vnic.account)?;
        let (read, write) = vnic.attachment.event_channel(PIPE_BYTES).map_err(|_| VerbsError::NoMemory)?;
        let pass = opening.file().map_err(|_| VerbsError::NoMemory)?;
        self.submit(at, OpenContext { session, write }, move |connection, id| {
            let context = opening.finish(&mut connection.objects, id, charge);
            Answer::with(Reply::Context { context }, vec![read, pass])
        })
    }

    fn close_context(&mut self, at: (Key, SessionId), context: Handle) -> Outcome {
        let session = at.1;
        let objects = self.objects(at.0)?;
        let entry = objects.contexts.get(context)?;
        let id = entry.id;
        if entry.imported_pd_count > 0 || objects.channels.values().any(|channel| channel.context == context) {
            return Err(VerbsError::Busy);
        }
        self.submit(at, CloseContext { session, context: id }, move |connection, _held| {
            connection.objects.contexts.remove(context);
            Answer::done()
        })
    }

    fn create_channel(&mut self, at: (Key, SessionId), context: Handle) -> Outcome {
        let session = at.1;
        self.objects(at.0)?.contexts.get(context)?;
        let vnic = self.vnic_of(at.0).ok_or(VerbsError::DeviceFatal)?;
        let charge = Charge::channel(&vnic.account, u64::from(vnic.record.limits.channel_count_max))?;
        let (read, write) = vnic.attachment.event_channel(PIPE_BYTES).map_err(|_| VerbsError::NoMemory)?;
        self.submit(at, CreateCompletionChannel { session, write }, move |connection, pipe| {
            let channel = connection.objects.channels.insert(ChannelEntry { context, pipe, _charge: charge });
            Answer::with(Reply::Channel { channel }, vec![read])
        })
    }

    fn destroy_channel(&mut self, at: (Key, SessionId), channel: Handle) -> Outcome {
        let objects = self.objects(at.0)?;
        let pipe = objects.channels.get(channel)?.pipe;
        if objects.cqs.values().any(|cq| cq.channel == Some(channel)) {
            return Err(VerbsError::Busy);
        }
        self.submit(at, DestroyCompletionChannel { pipe }, move |connection, _held| {
            connection.objects.channels.remove(channel);
            Answer::done()
        })
    }

    fn alloc_pd(&mut self, at: (Key, SessionId), context: Handle) -> Outcome {
        let session = at.1;
        let context = self.objects(at.0)?.contexts.get(context)?.id;
        self.submit(at, AllocPd { session, context }, move |connection, id| {
            let pd = connection.objects.pds.insert(PdEntry { id, context, import: None });
            Answer::of(Reply::Pd { pd })
        })
    }

    fn create_segment(&mut self, key: Key, length: u64) -> Outcome {
        if length == 0 {
            return Err(VerbsError::InvalidArgument);
        }
        let length = length.checked_next_multiple_of(4096).ok_or(VerbsError::NoMemory)?;
        // Not closed to further seals: it may be granted for reading only. Its pages are the container's to allocate.
        let create = |bytes| {
            let (mut segment, descriptor) = Segment::create_sealable("freeflow-memory", bytes)?;
            if refuses_missing_pages().is_ok() {
                segment.refuse_missing()?;
            }
            Ok((segment, descriptor))
        };
        let (segment, memory, charge) = self.new_data_segment(key, length, create)?;
        // Kept for processes that import it or that it is granted to, if there is one to spare.
        let vnic = self.vnic_of(key).ok_or(VerbsError::DeviceFatal)?;
        let kept = match &memory {
            NamedMemory::File(file) => {
                Charge::descriptor(&vnic.account).ok().and_then(|held| Some((file.try_clone().ok()?, held)))
            }
            NamedMemory::Offset(_) => None,
        };
        let lease = SegmentLease::new(kept, charge);
        let entry = SegmentEntry { segment, mapped_at: None, lease, _import: None };
        let segment = self.objects(key)?.segments.insert(entry);
        Ok(Handled::Answered(Answer::with_memory(Reply::Segment { segment, length }, memory, Vec::new())))
    }

    fn map_segment(&mut self, at: (Key, SessionId), segment: Handle, address: u64) -> Outcome {
        let session = at.1;
        let objects = self.objects(at.0)?;
        let entry = objects.segments.get(segment)?;
        let (memory, before) = (entry.segment.clone(), entry.mapped_at);
        let origin = Origin { handle: segment, lease: entry.lease.clone() };
        if before.is_some_and(|start| objects.has_mr_over(start, memory.bytes() as u64)) {
            return Err(VerbsError::Busy);
        }
        let command = MapSegment { session, segment: memory, origin, address, before };
        self.submit(at, command, move |connection, mapped_at| {
            if let Ok(entry) = connection.objects.segments.get_mut(segment) {
                entry.mapped_at = mapped_at;
            }
            if mapped_at.is_some() { Answer::done() } else { VerbsError::InvalidArgument.into() }
        })
    }

    fn destroy_segment(&mut self, at: (Key, SessionId), segment: Handle) -> Outcome {
        let session = at.1;
        let objects = self.objects(at.0)?;
        let entry = objects.segments.get(segment)?;
        let (mapped_at, memory) = (entry.mapped_at, entry.segment.clone());
        if mapped_at.is_some_and(|start| objects.has_mr_over(start, memory.bytes() as u64)) {
            return Err(VerbsError::Busy);
        }
        let command = DestroySegment { session, handle: segment, segment: memory, mapped_at };
        self.submit_freeing(at, command, move |connection, unmapped| {
            let entry = connection.objects.segments.remove(segment);
            // Its file may go with it, which takes as long as that is large.
            let bytes_of = |entry: &SegmentEntry| {
                if entry.lease.is_borrowed() { u64::MAX } else { entry.segment.bytes() as u64 }
            };
            let bytes = entry.as_ref().map_or(0, bytes_of);
            (Answer::done(), Freed { bytes, thing: Box::new((unmapped, entry)) })
        })
    }

    fn register_mr(
        &mut self,
        at: (Key, SessionId),
        pd: Handle,
        RegionRange { address, length, iova }: RegionRange,
        access: Access,
    ) -> Outcome {
        let session = at.1;
        let pd = self.objects(at.0)?.pds.get(pd)?.id;
        let command = RegisterMr { session, pd, address, length, iova, access };
        self.submit(at, command, move |connection, keys| {
            let mr = connection.objects.insert_mr(MrEntry::new(&keys, pd, address, length));
            Answer::of(Reply::Mr { mr, lkey: keys.lkey, rkey: keys.rkey })
        })
    }

    fn deregister_mr(&mut self, at: (Key, SessionId), mr: Handle) -> Outcome {
        let session = at.1;
        let objects = self.objects(at.0)?;
        let entry = objects.mrs.get(mr)?;
        if entry.import.is_some() {
            objects.remove_mr(mr);
            return Ok(Handled::Answered(Answer::done()));
        }
        let id = entry.id;
        self.submit(at, DeregisterMr { session, mr: id }, move |connection, ()| {
            connection.objects.remove_mr(mr);
            Answer::done()
        })
    }

    fn create_cq(&mut self, at: (Key, SessionId), request: &Request) -> Outcome {
        let &Request::CreateCq { context, cqe, channel, cookie, timestamps } = request else {
            return Err(VerbsError::InvalidArgument);
        };
        let (key, session) = at;
        let objects = self.objects(key)?;
        let context = objects.contexts.get(context)?.id;
        let channel_pipe = channel.map(|channel| objects.channels.get(channel).map(|entry| entry.pipe)).transpose()?;
        if cqe == 0 || cqe > CQE_COUNT_MAX || cookie >= COOKIE_COUNT || objects.cq_cookies.contains(&cookie) {
            return Err(VerbsError::InvalidArgument);
        }
        let (segment, memory, charge) = self.new_ring(key, "freeflow-cq", cq_bytes(cqe))?;
        let segment_bytes = segment.bytes() as u64;
        let ring = CompletionProducer::new(segment, cqe, 0);
        let command = CreateCq { session, context, cookie, cqe, ring, channel: channel_pipe, timestamps };
        self.submit(at, command, move |connection, id| {
            connection.objects.cq_cookies.insert(cookie);
            let cq = connection.objects.cqs.insert(CqEntry { id, channel, cookie, charges: vec![charge] });
            Answer::with_memory(Reply::Cq { cq, cqe, segment_bytes }, memory, Vec::new())
        })
    }

    fn resize_cq(&mut self, at: (Key, SessionId), cq: Handle, cqe: u32) -> Outcome {
        let id = self.objects(at.0)?.cqs.get(cq)?.id;
        if cqe == 0 || cqe > CQE_COUNT_MAX {
            return Err(VerbsError::InvalidArgument);
        }
        let (segment, memory, charge) = self.new_ring(at.0, "freeflow-cq", cq_bytes(cqe))?;
        let segment_bytes = segment.bytes() as u64;
        self.submit_freeing(at, ResizeCq { cq: id, cqe, segment }, move |connection, before_previous| {
            let mut surplus = Vec::new();
            if let Ok(entry) = connection.objects.cqs.get_mut(cq) {
                entry.charges.push(charge);
                let count = entry.charges.len().saturating_sub(2);
                surplus.extend(entry.charges.drain(..count));
            }
            let answer = Answer::with_memory(Reply::Cq { cq, cqe, segment_bytes }, memory, Vec::new());
            (answer, Freed { bytes: bytes_of(&surplus), thing: Box::new((before_previous, surplus)) })
        })
    }

    fn moderate_cq(&mut self, at: (Key, SessionId), cq: Handle, count: u16, period_us: u16) -> Outcome {
        let id = self.objects(at.0)?.cqs.get(cq)?.id;
        let period = Duration::from_micros(u64::from(period_us));
        self.submit(at, ModerateCq { cq: id, count, period }, |_, ()| Answer::done())
    }

    fn destroy_cq(&mut self, at: (Key, SessionId), cq: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.cqs.get(cq)?.id;
        self.submit_freeing(at, DestroyCq { session, cq: id }, move |connection, held| {
            let entry = connection.objects.cqs.remove(cq);
            if let Some(entry) = &entry {
                connection.objects.cq_cookies.remove(&entry.cookie);
            }
            let bytes = entry.as_ref().map_or(0, |entry| bytes_of(&entry.charges));
            (Answer::done(), Freed { bytes, thing: Box::new((held, entry)) })
        })
    }

    fn create_srq(
        &mut self,
        at: (Key, SessionId),
        pd: Handle,
        attributes: SrqAttributes,
        cookie: u32,
        xrc: Option<XrcQueue>,
    ) -> Outcome {
        let (key, session) = at;
        let objects = self.objects(key)?;
        let PdEntry { id: pd, context, .. } = *objects.pds.get(pd)?;
        let xrc = match xrc {
            Some(xrc) => Some((objects.xrcds.get(xrc.xrcd)?.id, objects.cqs.get(xrc.cq)?.id)),
            None => None,
        };
        objects.check_doorbell(cookie)?;
        let granted = grant_srq_attributes(&attributes)?;
        let shape = QueueShape::receive(granted.max_wr, granted.max_sge);
        let (segment, memory, charge) = self.new_ring(key, "freeflow-srq", shape.bytes())?;
        let segment_bytes = segment.bytes() as u64;
        let receive = RequestConsumer::new(segment, 0, shape, granted.max_wr, granted.max_sge, 0);
        let command = CreateSrq { session, context, pd, cookie, attributes, xrc, receive };
        self.submit(at, command, move |connection, (id, number, attributes)| {
            connection.objects.doorbells.insert(cookie);
            let srq = connection.objects.srqs.insert(SrqEntry { id, cookie, _charge: charge });
            Answer::with_memory(Reply::Srq { srq, number, attributes, segment_bytes }, memory, Vec::new())
        })
    }

    fn modify_srq(&mut self, at: (Key, SessionId), srq: Handle, limit: u32) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.srqs.get(srq)?.id;
        self.submit(at, ModifySrq { session, srq: id, limit }, |_, ()| Answer::done())
    }

    fn query_srq(&mut self, at: (Key, SessionId), srq: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.srqs.get(srq)?.id;
        self.submit(at, QuerySrq { session, srq: id }, |_, attributes| Answer::of(Reply::SrqAttributes(attributes)))
    }

    fn destroy_srq(&mut self, at: (Key, SessionId), srq: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.srqs.get(srq)?.id;
        self.submit(at, DestroySrq { session, srq: id }, move |connection, _held| {
            if let Some(entry) = connection.objects.srqs.remove(srq) {
                connection.objects.doorbells.remove(&entry.cookie);
            }
            Answer::done()
        })
    }

    fn create_ah(&mut self, at: (Key, SessionId), pd: Handle, attributes: AddressHandleAttributes) -> Outcome {
        let session = at.1;
        let pd = self.objects(at.0)?.pds.get(pd)?.id;
        self.submit(at, CreateAh { session, pd, attributes }, |connection, id| {
            connection.objects.ahs.insert(id.index, id);
            Answer::of(Reply::AddressHandle { ah: id.index })
        })
    }

    fn destroy_ah(&mut self, at: (Key, SessionId), ah: Handle) -> Outcome {
        let session = at.1;
        let objects = self.objects(at.0)?;
        let id = *objects.ahs.get(&ah).ok_or(VerbsError::NotFound)?;
        let datagrams = objects.qps.values().filter(|qp| qp.is_datagram).take(DATAGRAM_QPS_MAX);
        let datagram_qps = datagrams.map(|qp| qp.id).collect();
        let command = DestroyAh { session, ah: id, datagram_qps, posted: None };
        self.submit(at, command, move |connection, ()| {
            connection.objects.ahs.remove(&ah);
            Answer::done()
        })
    }
}

impl Objects {
    pub(crate) fn check_doorbell(&self, cookie: u32) -> Result<(), VerbsError> {
        let free = cookie < COOKIE_COUNT && !self.doorbells.contains(&cookie);
        if free { Ok(()) } else { Err(VerbsError::InvalidArgument) }
    }
}
