//! The requests of a library: checked against its session's own handles, then run by the worker as a job.
//!
//! A request that has to wait for copies in flight is asked again each turn, for at most [`JOB_TIME_MAX`].
use crate::account::{Charge, OverLimit};
use crate::control::Control;
use crate::events::PipeId;
use crate::jobs::Step;
use crate::rings::{Attention, Bell, Context, Cq, Garbage, Notify, Qp, Srq};
use crate::session::{
    Answer, ChannelEntry, Connection, ContextEntry, CqEntry, MrEntry, Objects, PdEntry, QpEntry, SegmentEntry, SrqEntry,
};
use crate::slab::Key;
use crate::worker::Worker;
use freeflow_engine::{
    ContextId, MrKeys, QpId, QpInit, Refusal, SessionId, grant_qp_capabilities, grant_srq_attributes,
};
use freeflow_protocol::library::{DOORBELL_COUNT, Handle, Reply, Request};
use freeflow_shm::layout::{QueueShape, cq_bytes};
use freeflow_shm::{CompletionProducer, RequestConsumer, Segment, fd, monotonic_ns};
use freeflow_verbs::{
    Access, AddressHandleAttributes, CQE_COUNT_MAX, Duration, Instant, QpAttributeMask, QpAttributes, QpCapabilities,
    QpKind, QpState, QpType, SrqAttributes, VerbsError,
};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

/// A job that is not done by then is refused with ETIMEDOUT. Copies end, or fail their vNIC, well before.
const JOB_TIME_MAX: Duration = Duration::from_millis(5_000);

/// What became of a request.
#[allow(clippy::large_enum_variant, reason = "it lives for a moment")]
pub(crate) enum Handled {
    Answered(Answer),
    /// The worker has it.
    Submitted,
}

type Outcome = Result<Handled, VerbsError>;

impl From<OverLimit> for VerbsError {
    fn from(OverLimit: OverLimit) -> Self {
        Self::NoMemory
    }
}

fn once<T>(result: Result<T, VerbsError>) -> Poll<Result<T, VerbsError>> {
    Poll::Ready(result)
}

fn unless_in_flight<T>(result: Result<T, Refusal>) -> Poll<Result<T, VerbsError>> {
    match result {
        Ok(value) => Poll::Ready(Ok(value)),
        Err(Refusal::Error(error)) => Poll::Ready(Err(error)),
        Err(Refusal::InFlight) => Poll::Pending,
    }
}

/// The parameters of `CreateQp`.
struct QpRequest {
    pd: Handle,
    send_cq: Handle,
    recv_cq: Handle,
    srq: Option<Handle>,
    kind: QpKind,
    capabilities: QpCapabilities,
    cookie: u32,
}

impl Control {
    pub(crate) fn handle_request(&mut self, key: Key, session: SessionId, request: Request) -> Outcome {
        let at = (key, session);
        match request {
            Request::Hello { .. } => Err(VerbsError::InvalidArgument),
            Request::OpenContext => self.open_context(at),
            Request::CloseContext { context } => self.close_context(at, context),
            Request::CreateChannel { context } => self.create_channel(at, context),
            Request::DestroyChannel { channel } => self.destroy_channel(at, channel),
            Request::AllocPd { context } => self.alloc_pd(at, context),
            Request::DeallocPd { pd } => self.dealloc_pd(at, pd),
            Request::CreateSegment { length } => self.create_segment(key, length),
            Request::MapSegment { segment, address } => self.map_segment(at, segment, address),
            Request::DestroySegment { segment } => self.destroy_segment(at, segment),
            Request::RegisterMr { pd, address, length, iova, access } => {
                self.register_mr(at, pd, [address, length, iova], access)
            }
            Request::DeregisterMr { mr } => self.deregister_mr(at, mr),
            Request::CreateCq { context, cqe, channel, cookie } => self.create_cq(at, context, cqe, channel, cookie),
            Request::ResizeCq { cq, cqe } => self.resize_cq(at, cq, cqe),
            Request::DestroyCq { cq } => self.destroy_cq(at, cq),
            Request::CreateSrq { pd, attributes, cookie } => self.create_srq(at, pd, attributes, cookie),
            Request::ModifySrq { srq, limit } => self.modify_srq(at, srq, limit),
            Request::QuerySrq { srq } => self.query_srq(at, srq),
            Request::DestroySrq { srq } => self.destroy_srq(at, srq),
            Request::CreateQp { pd, qp_type, send_cq, recv_cq, srq, capabilities, all_signaled, cookie } => {
                let kind = QpKind { qp_type, all_signaled };
                self.create_qp(at, &QpRequest { pd, send_cq, recv_cq, srq, kind, capabilities, cookie })
            }
            Request::ModifyQp { qp, attributes, mask } => self.modify_qp(at, qp, attributes, mask),
            Request::QueryQp { qp } => self.query_qp(at, qp),
            Request::DestroyQp { qp } => self.destroy_qp(at, qp),
            Request::CreateAh { pd, attributes } => self.create_ah(at, pd, attributes),
            Request::DestroyAh { ah } => self.destroy_ah(at, ah),
        }
    }

    /// Has the worker do `work`; `finish` then makes the answer, on this thread.
    pub(crate) fn submit<T: Send + 'static>(
        &mut self,
        (key, _): (Key, SessionId),
        work: impl FnMut(&mut Worker, Instant) -> Poll<Result<T, VerbsError>> + Send + 'static,
        finish: impl FnOnce(&mut Connection, T) -> Answer + Send + 'static,
    ) -> Outcome {
        let connection = self.connections.get_mut(key).ok_or(VerbsError::NotFound)?;
        connection.busy = true;
        let cancelled = connection.cancelled.clone();
        let deadline = Instant(monotonic_ns()) + JOB_TIME_MAX;
        let mut both = Some((work, finish));
        self.worker.submit(Box::new(move |worker, now| {
            let Some((mut work, finish)) = both.take() else { unreachable!("a job that is done is not run again") };
            let result = if cancelled.load(Relaxed) {
                Err(VerbsError::DeviceFatal)
            } else {
                match work(worker, now) {
                    Poll::Ready(result) => result,
                    Poll::Pending if now < deadline => {
                        both = Some((work, finish));
                        return Step::Again;
                    }
                    Poll::Pending => Err(VerbsError::TimedOut),
                }
            };
            Step::Done(Box::new(move |control: &mut Control| {
                // What `work` held is dropped here, not on the worker's thread.
                drop(work);
                control.handle_job_done(key, |connection| match result {
                    Ok(value) => finish(connection, value),
                    Err(error) => error.into(),
                });
            }))
        }));
        Ok(Handled::Submitted)
    }

    pub(crate) fn objects(&mut self, key: Key) -> Result<&mut Objects, VerbsError> {
        self.connections.get_mut(key).map(|connection| &mut connection.objects).ok_or(VerbsError::NotFound)
    }

    fn charge_segment(&self, key: Key, bytes: u64) -> Result<Charge, VerbsError> {
        let vnic = self.vnic_of(key).ok_or(VerbsError::DeviceFatal)?;
        let limits = &vnic.record.limits;
        let mappings_max = u64::from(limits.mapping_count_max);
        Ok(Charge::segment(&vnic.account, bytes, mappings_max, limits.segment_bytes_max)?)
    }

    /// A new segment, within the vNIC's limits.
    fn new_segment(&self, key: Key, name: &str, bytes: u64) -> Result<(Arc<Segment>, OwnedFd, Charge), VerbsError> {
        let charge = self.charge_segment(key, bytes)?;
        let bytes = usize::try_from(bytes).map_err(|_| VerbsError::NoMemory)?;
        let (segment, descriptor) = Segment::create(name, bytes).map_err(|_| VerbsError::NoMemory)?;
        Ok((Arc::new(segment), descriptor, charge))
    }

    fn open_context(&mut self, at: (Key, SessionId)) -> Outcome {
        let session = at.1;
        let charge = Charge::context(&self.vnic_of(at.0).ok_or(VerbsError::DeviceFatal)?.account)?;
        let (read, write) = fd::event_pipe().map_err(|_| VerbsError::NoMemory)?;
        let mut write = Some(write);
        let work = move |worker: &mut Worker, _: Instant| {
            once(worker.engine.open_context(session).inspect(|&id| {
                let write = write.take().expect("a job that is done is not run again");
                let pipe = worker.rings.pipes.insert(session, write);
                worker.rings.contexts.insert(id, Context { pipe });
            }))
        };
        self.submit(at, work, move |connection, id| {
            let context = connection.objects.contexts.insert(ContextEntry { id, _charge: charge });
            Answer::with(Reply::Context { context }, vec![read])
        })
    }

    fn close_context(&mut self, at: (Key, SessionId), context: Handle) -> Outcome {
        let session = at.1;
        let objects = self.objects(at.0)?;
        let id = objects.contexts.get(context)?.id;
        if objects.channels.values().any(|channel| channel.context == context) {
            return Err(VerbsError::Busy);
        }
        let work = move |worker: &mut Worker, _: Instant| {
            once(worker.engine.close_context(session, id).map(|()| {
                let entry = worker.rings.contexts.remove(id);
                entry.and_then(|entry| worker.rings.pipes.remove(entry.pipe))
            }))
        };
        self.submit(at, work, move |connection, _pipe| {
            connection.objects.contexts.remove(context);
            Answer::done()
        })
    }

    fn create_channel(&mut self, at: (Key, SessionId), context: Handle) -> Outcome {
        let session = at.1;
        self.objects(at.0)?.contexts.get(context)?;
        let vnic = self.vnic_of(at.0).ok_or(VerbsError::DeviceFatal)?;
        let charge = Charge::channel(&vnic.account, u64::from(vnic.record.limits.channel_count_max))?;
        let (read, write) = fd::event_pipe().map_err(|_| VerbsError::NoMemory)?;
        let mut write = Some(write);
        let work = move |worker: &mut Worker, _: Instant| {
            let write = write.take().expect("a job that is done is not run again");
            once(Ok(worker.rings.pipes.insert(session, write)))
        };
        self.submit(at, work, move |connection, pipe: PipeId| {
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
        let work = move |worker: &mut Worker, _: Instant| once(Ok(worker.rings.pipes.remove(pipe)));
        self.submit(at, work, move |connection, _pipe| {
            connection.objects.channels.remove(channel);
            Answer::done()
        })
    }

    fn alloc_pd(&mut self, at: (Key, SessionId), context: Handle) -> Outcome {
        let session = at.1;
        let context = self.objects(at.0)?.contexts.get(context)?.id;
        let work = move |worker: &mut Worker, _: Instant| once(worker.engine.alloc_pd(session, context));
        self.submit(at, work, move |connection, id| {
            let pd = connection.objects.pds.insert(PdEntry { id, context });
            Answer::of(Reply::Pd { pd })
        })
    }

    fn dealloc_pd(&mut self, at: (Key, SessionId), pd: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.pds.get(pd)?.id;
        let work = move |worker: &mut Worker, _: Instant| once(worker.engine.dealloc_pd(session, id));
        self.submit(at, work, move |connection, ()| {
            connection.objects.pds.remove(pd);
            Answer::done()
        })
    }

    fn create_segment(&mut self, key: Key, length: u64) -> Outcome {
        if length == 0 {
            return Err(VerbsError::InvalidArgument);
        }
        let length = length.checked_next_multiple_of(4096).ok_or(VerbsError::NoMemory)?;
        let (segment, descriptor, charge) = self.new_segment(key, "freeflow-memory", length)?;
        let entry = SegmentEntry { segment, mapped_at: None, _charge: charge };
        let segment = self.objects(key)?.segments.insert(entry);
        Ok(Handled::Answered(Answer::with(Reply::Segment { segment, length }, vec![descriptor])))
    }

    fn map_segment(&mut self, at: (Key, SessionId), segment: Handle, address: u64) -> Outcome {
        let session = at.1;
        let objects = self.objects(at.0)?;
        let entry = objects.segments.get(segment)?;
        let (memory, before) = (entry.segment.clone(), entry.mapped_at);
        if before.is_some_and(|start| objects.has_mr_over(start, memory.bytes() as u64)) {
            return Err(VerbsError::Busy);
        }
        let work = move |worker: &mut Worker, _: Instant| {
            let Some(entry) = worker.rings.sessions.get_mut(session) else { return once(Err(VerbsError::DeviceFatal)) };
            if let Some(start) = before {
                entry.memory.unmap(start);
            }
            match entry.memory.map(address, memory.clone()) {
                Ok(()) => once(Ok(Some(address))),
                Err(_) => once(Ok(None)),
            }
        };
        self.submit(at, work, move |connection, mapped_at: Option<u64>| {
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
        let Some(start) = entry.mapped_at else {
            objects.segments.remove(segment);
            return Ok(Handled::Answered(Answer::done()));
        };
        if objects.has_mr_over(start, entry.segment.bytes() as u64) {
            return Err(VerbsError::Busy);
        }
        let work = move |worker: &mut Worker, _: Instant| {
            once(Ok(worker.rings.sessions.get_mut(session).and_then(|entry| entry.memory.unmap(start))))
        };
        self.submit(at, work, move |connection, _segment| {
            connection.objects.segments.remove(segment);
            Answer::done()
        })
    }

    fn register_mr(
        &mut self,
        at: (Key, SessionId),
        pd: Handle,
        [address, length, iova]: [u64; 3],
        access: Access,
    ) -> Outcome {
        let session = at.1;
        let pd = self.objects(at.0)?.pds.get(pd)?.id;
        let work = move |worker: &mut Worker, _: Instant| {
            once(worker.engine.register_mr(session, pd, address, length, iova, access))
        };
        self.submit(at, work, move |connection, keys: MrKeys| {
            let mr = connection.objects.mrs.insert(MrEntry { id: keys.mr, address, length });
            Answer::of(Reply::Mr { mr, lkey: keys.lkey, rkey: keys.rkey })
        })
    }

    fn deregister_mr(&mut self, at: (Key, SessionId), mr: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.mrs.get(mr)?.id;
        let work = move |worker: &mut Worker, _: Instant| unless_in_flight(worker.engine.deregister_mr(session, id));
        self.submit(at, work, move |connection, ()| {
            connection.objects.mrs.remove(mr);
            Answer::done()
        })
    }

    fn create_cq(
        &mut self,
        at: (Key, SessionId),
        context: Handle,
        cqe: u32,
        channel: Option<Handle>,
        cookie: u32,
    ) -> Outcome {
        let (key, session) = at;
        let objects = self.objects(key)?;
        let context = objects.contexts.get(context)?.id;
        let channel_pipe = channel.map(|channel| objects.channels.get(channel).map(|entry| entry.pipe)).transpose()?;
        if cqe == 0 || cqe > CQE_COUNT_MAX || objects.cq_cookies.contains(&cookie) {
            return Err(VerbsError::InvalidArgument);
        }
        let (segment, descriptor, charge) = self.new_segment(key, "freeflow-cq", cq_bytes(cqe) as u64)?;
        let segment_bytes = segment.bytes() as u64;
        let mut ring = Some(CompletionProducer::new(segment, cqe, 0));
        let work = move |worker: &mut Worker, _: Instant| {
            once(worker.engine.create_cq(session, context, cqe).inspect(|&id| {
                let ring = ring.take().expect("a job that is done is not run again");
                let (previous, notify) = (None, Notify::Nothing);
                let cq = Cq { session, context, cookie, ring, previous, channel: channel_pipe, notify };
                worker.rings.cqs.insert(id, cq);
            }))
        };
        self.submit(at, work, move |connection, id| {
            connection.objects.cq_cookies.insert(cookie);
            let cq = connection.objects.cqs.insert(CqEntry { id, channel, cookie, charges: vec![charge] });
            Answer::with(Reply::Cq { cq, cqe, segment_bytes }, vec![descriptor])
        })
    }

    fn resize_cq(&mut self, at: (Key, SessionId), cq: Handle, cqe: u32) -> Outcome {
        let id = self.objects(at.0)?.cqs.get(cq)?.id;
        if cqe == 0 || cqe > CQE_COUNT_MAX {
            return Err(VerbsError::InvalidArgument);
        }
        let (segment, descriptor, charge) = self.new_segment(at.0, "freeflow-cq", cq_bytes(cqe) as u64)?;
        let segment_bytes = segment.bytes() as u64;
        let work = move |worker: &mut Worker, _: Instant| {
            let Some(cq) = worker.rings.cqs.get_mut(id) else { return once(Err(VerbsError::NotFound)) };
            let unconsumed = cq.ring.unconsumed();
            if unconsumed > cqe {
                return once(Err(VerbsError::InvalidArgument));
            }
            let ring = CompletionProducer::new(segment.clone(), cqe, unconsumed);
            let before = std::mem::replace(&mut cq.ring, ring);
            once(Ok(cq.previous.replace(before)))
        };
        self.submit(at, work, move |connection, _before_previous| {
            if let Ok(entry) = connection.objects.cqs.get_mut(cq) {
                entry.charges.push(charge);
                let surplus = entry.charges.len().saturating_sub(2);
                entry.charges.drain(..surplus);
            }
            Answer::with(Reply::Cq { cq, cqe, segment_bytes }, vec![descriptor])
        })
    }

    fn destroy_cq(&mut self, at: (Key, SessionId), cq: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.cqs.get(cq)?.id;
        let work = move |worker: &mut Worker, _: Instant| {
            once(worker.engine.destroy_cq(session, id).map(|()| worker.rings.cqs.remove(id)))
        };
        self.submit(at, work, move |connection, _cq| {
            if let Some(entry) = connection.objects.cqs.remove(cq) {
                connection.objects.cq_cookies.remove(&entry.cookie);
            }
            Answer::done()
        })
    }

    fn create_srq(&mut self, at: (Key, SessionId), pd: Handle, attributes: SrqAttributes, cookie: u32) -> Outcome {
        let (key, session) = at;
        let objects = self.objects(key)?;
        let PdEntry { id: pd, context } = *objects.pds.get(pd)?;
        objects.check_doorbell(cookie)?;
        let granted = grant_srq_attributes(&attributes)?;
        let shape = QueueShape::receive(granted.max_wr, granted.max_sge);
        let (segment, descriptor, charge) = self.new_segment(key, "freeflow-srq", shape.bytes() as u64)?;
        let segment_bytes = segment.bytes() as u64;
        let mut ring = Some(RequestConsumer::new(segment, 0, shape, granted.max_wr, granted.max_sge, 0));
        let work = move |worker: &mut Worker, _: Instant| {
            once(worker.engine.create_srq(session, pd, attributes).map(|(id, granted)| {
                let receive = ring.take().expect("a job that is done is not run again");
                worker.rings.srqs.insert(id, Srq { session, context, cookie, receive, receives_wanted: false });
                worker.rings.set_bell(session, cookie, Some(Bell::Srq(id)));
                (id, granted)
            }))
        };
        self.submit(at, work, move |connection, (id, attributes)| {
            connection.objects.doorbells.insert(cookie);
            let srq = connection.objects.srqs.insert(SrqEntry { id, cookie, _charge: charge });
            Answer::with(Reply::Srq { srq, attributes, segment_bytes }, vec![descriptor])
        })
    }

    fn modify_srq(&mut self, at: (Key, SessionId), srq: Handle, limit: u32) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.srqs.get(srq)?.id;
        let work = move |worker: &mut Worker, _: Instant| {
            once(worker.engine.modify_srq(&mut worker.rings, session, id, limit))
        };
        self.submit(at, work, |_, ()| Answer::done())
    }

    fn query_srq(&mut self, at: (Key, SessionId), srq: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.srqs.get(srq)?.id;
        let work = move |worker: &mut Worker, _: Instant| once(worker.engine.query_srq(session, id));
        self.submit(at, work, |_, attributes| Answer::of(Reply::SrqAttributes(attributes)))
    }

    fn destroy_srq(&mut self, at: (Key, SessionId), srq: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.srqs.get(srq)?.id;
        let work = move |worker: &mut Worker, _: Instant| {
            once(worker.engine.destroy_srq(session, id).map(|()| worker.rings.remove_srq(id)))
        };
        self.submit(at, work, move |connection, _garbage: Garbage| {
            if let Some(entry) = connection.objects.srqs.remove(srq) {
                connection.objects.doorbells.remove(&entry.cookie);
            }
            Answer::done()
        })
    }

    fn create_qp(&mut self, at: (Key, SessionId), asked: &QpRequest) -> Outcome {
        let (key, session) = at;
        let objects = self.objects(key)?;
        let pd = objects.pds.get(asked.pd)?;
        let (context, cookie): (ContextId, u32) = (pd.context, asked.cookie);
        let init = QpInit {
            pd: pd.id,
            qp_type: asked.kind.qp_type,
            send_cq: objects.cqs.get(asked.send_cq)?.id,
            recv_cq: objects.cqs.get(asked.recv_cq)?.id,
            srq: asked.srq.map(|srq| objects.srqs.get(srq).map(|entry| entry.id)).transpose()?,
            capabilities: asked.capabilities,
            all_signaled: asked.kind.all_signaled,
            cookie,
        };
        objects.check_doorbell(cookie)?;
        let granted = grant_qp_capabilities(&asked.capabilities, asked.srq.is_some())?;
        let send_shape = QueueShape::send(granted.max_send_wr, granted.max_send_sge, granted.max_inline_data);
        let receive_shape = QueueShape::receive(granted.max_recv_wr, granted.max_recv_sge);
        let bytes = send_shape.bytes() + receive_shape.bytes();
        let (segment, descriptor, charge) = self.new_segment(key, "freeflow-qp", bytes as u64)?;
        let segment_bytes = segment.bytes() as u64;
        let send = {
            let (wr, sge) = (granted.max_send_wr, granted.max_send_sge);
            RequestConsumer::new(segment.clone(), 0, send_shape, wr, sge, granted.max_inline_data)
        };
        let receive = init.srq.is_none().then(|| {
            let (wr, sge) = (granted.max_recv_wr, granted.max_recv_sge);
            RequestConsumer::new(segment, send_shape.bytes(), receive_shape, wr, sge, 0)
        });
        let is_ud = init.qp_type == QpType::Ud;
        let (receives_wanted, attention) = (false, Attention::Doorbell);
        let mut qp = Some(Qp { session, context, cookie, is_ud, send, receive, receives_wanted, attention });
        let work = move |worker: &mut Worker, _: Instant| {
            once(worker.engine.create_qp(session, init).map(|(id, qpn, _)| {
                worker.rings.qps.insert(id, qp.take().expect("a job that is done is not run again"));
                worker.rings.set_bell(session, cookie, Some(Bell::Qp(id)));
                (id, qpn)
            }))
        };
        self.submit(at, work, move |connection, (id, qpn)| {
            connection.objects.doorbells.insert(cookie);
            let qp = connection.objects.qps.insert(QpEntry { id, cookie, _charge: charge });
            Answer::with(Reply::Qp { qp, qpn: qpn.0, capabilities: granted, segment_bytes }, vec![descriptor])
        })
    }

    fn modify_qp(
        &mut self,
        at: (Key, SessionId),
        qp: Handle,
        attributes: QpAttributes,
        mask: QpAttributeMask,
    ) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.qps.get(qp)?.id;
        let work = move |worker: &mut Worker, now: Instant| {
            let result = worker.engine.modify_qp(&mut worker.rings, now, session, id, &attributes, mask);
            if let Ok(state) = result {
                worker.handle_modified(id, state, mask);
            }
            unless_in_flight(result)
        };
        self.submit(at, work, |_, state| Answer::of(Reply::QpModified { state }))
    }

    fn query_qp(&mut self, at: (Key, SessionId), qp: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.qps.get(qp)?.id;
        let work = move |worker: &mut Worker, _: Instant| once(worker.engine.query_qp(session, id));
        self.submit(at, work, |_, attributes| Answer::of(Reply::QpAttributes(attributes)))
    }

    fn destroy_qp(&mut self, at: (Key, SessionId), qp: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.qps.get(qp)?.id;
        let work = move |worker: &mut Worker, now: Instant| {
            let result = worker.engine.destroy_qp(&mut worker.rings, now, session, id);
            unless_in_flight(result.map(|()| worker.rings.remove_qp(id)))
        };
        self.submit(at, work, move |connection, _garbage: Garbage| {
            if let Some(entry) = connection.objects.qps.remove(qp) {
                connection.objects.doorbells.remove(&entry.cookie);
            }
            Answer::done()
        })
    }

    fn create_ah(&mut self, at: (Key, SessionId), pd: Handle, attributes: AddressHandleAttributes) -> Outcome {
        let session = at.1;
        let pd = self.objects(at.0)?.pds.get(pd)?.id;
        let work = move |worker: &mut Worker, _: Instant| once(worker.engine.create_ah(session, pd, &attributes));
        self.submit(at, work, |connection, id| {
            connection.objects.ahs.insert(id.index, id);
            Answer::of(Reply::AddressHandle { ah: id.index })
        })
    }

    fn destroy_ah(&mut self, at: (Key, SessionId), ah: Handle) -> Outcome {
        let session = at.1;
        let id = *self.objects(at.0)?.ahs.get(&ah).ok_or(VerbsError::NotFound)?;
        let work = move |worker: &mut Worker, _: Instant| once(worker.engine.destroy_ah(session, id));
        self.submit(at, work, move |connection, ()| {
            connection.objects.ahs.remove(&ah);
            Answer::done()
        })
    }
}

impl Objects {
    /// Whether a memory region touches the range.
    fn has_mr_over(&self, start: u64, bytes: u64) -> bool {
        let end = start.saturating_add(bytes);
        self.mrs.values().any(|mr| mr.address < end && mr.address.saturating_add(mr.length) > start)
    }

    fn check_doorbell(&self, cookie: u32) -> Result<(), VerbsError> {
        let free = cookie < DOORBELL_COUNT && !self.doorbells.contains(&cookie);
        if free { Ok(()) } else { Err(VerbsError::InvalidArgument) }
    }
}

impl Worker {
    /// A QP was modified: its rings begin anew, or may have requests that are to be run or flushed.
    fn handle_modified(&mut self, id: QpId, state: QpState, mask: QpAttributeMask) {
        if !mask.contains(QpAttributeMask::STATE) {
            return;
        }
        if state != QpState::Reset {
            return self.activate(id);
        }
        self.deactivate(id);
        if let Some(qp) = self.rings.qps.get_mut(id) {
            qp.send.reset();
            if let Some(receive) = &mut qp.receive {
                receive.reset();
            }
        }
    }
}
