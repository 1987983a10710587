//! Shared memory in the hands of the other side: it writes any words anywhere, before and between
//! the reads and writes of this side, which takes requests, completions, doorbells, notifications
//! and messages.
use crate::bytes::Input;
use freeflow_shm::layout::{QueueShape, cq_bytes, direct_ring};
use freeflow_shm::{
    CompletionConsumer, CompletionProducer, Credit, CreditList, DIRECT_RING_MESSAGE_BYTES_MAX, DirectRingReceiver,
    DirectRingSender, RequestConsumer, RequestProducer, Segment, SendDescriptor, SessionSegment, Take,
};
use freeflow_verbs::{Completion, QpType, ReceiveRequest, SendFlags, SendOpcode, SendRequest, Sge};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

const WR_COUNT: u32 = 8;
const SGE_COUNT: u32 = 6;
const INLINE_BYTES: u32 = 96;
const CQE_COUNT: u32 = 8;
const CREDIT_COUNT: u32 = 8;
const SERVICES: [QpType; 5] = [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend, QpType::XrcReceive];
/// Steps of one input.
const STEP_COUNT_MAX: usize = 512;

thread_local! {
    /// Made once: making them costs more than an input.
    static SEGMENTS: Segments = Segments::new();
}

struct Segments {
    queues: Arc<Segment>,
    completions: Arc<Segment>,
    direct_ring: Arc<Segment>,
    session: SessionSegment,
}

impl Segments {
    fn new() -> Self {
        let make = |bytes| Arc::new(Segment::create("fuzz", bytes).expect("shared memory").0);
        let (send, receive) = shapes();
        Self {
            queues: make(send.bytes() + receive.bytes()),
            completions: make(cq_bytes(CQE_COUNT)),
            direct_ring: make(direct_ring::bytes(CREDIT_COUNT)),
            session: SessionSegment::create().expect("shared memory").0,
        }
    }

    fn all(&self) -> [&Segment; 4] {
        [&self.queues, &self.completions, &self.direct_ring, self.session.segment()]
    }

    /// As they are made. Nothing here reads a direct ring's payloads.
    fn clear(&self) {
        let zeros = [0; direct_ring::DATA];
        for segment in self.all() {
            segment.write(0, &zeros[..zeros.len().min(segment.bytes())], false).expect("it is inside");
        }
        self.direct_ring
            .write(direct_ring::credits(CREDIT_COUNT), &[0; CREDIT_COUNT as usize * 8], false)
            .expect("it is inside");
    }
}

fn shapes() -> (QueueShape, QueueShape) {
    (QueueShape::send(WR_COUNT, SGE_COUNT, INLINE_BYTES), QueueShape::receive(WR_COUNT, SGE_COUNT))
}

/// This side, of everything.
struct Rings<'a> {
    segments: &'a Segments,
    service: QpType,
    send: RequestConsumer,
    receive: RequestConsumer,
    library_send: RequestProducer,
    library_receive: RequestProducer,
    completions: CompletionProducer,
    library_completions: CompletionConsumer,
    receiver: DirectRingReceiver,
    sender: DirectRingSender,
}

impl<'a> Rings<'a> {
    fn new(segments: &'a Segments, service: QpType) -> Self {
        let (send, receive) = shapes();
        let consumer = |offset, shape, inline| {
            RequestConsumer::new(segments.queues.clone(), offset, shape, WR_COUNT, SGE_COUNT, inline)
        };
        Self {
            segments,
            service,
            send: consumer(0, send, INLINE_BYTES),
            receive: consumer(send.bytes(), receive, 0),
            library_send: RequestProducer::new(segments.queues.clone(), 0, send),
            library_receive: RequestProducer::new(segments.queues.clone(), send.bytes(), receive),
            completions: CompletionProducer::new(segments.completions.clone(), CQE_COUNT, 0),
            library_completions: CompletionConsumer::new(segments.completions.clone(), CQE_COUNT),
            receiver: DirectRingReceiver::new(segments.direct_ring.clone(), CreditList::Each(CREDIT_COUNT)).0,
            sender: DirectRingSender::new(segments.direct_ring.clone(), CreditList::Each(CREDIT_COUNT)),
        }
    }

    /// `None`: the input has ended.
    fn step(&mut self, input: &mut Input<'_>) -> Option<()> {
        let step = input.u8()?;
        match step % 16 {
            0..4 => self.overwrite(usize::from(step % 4), input)?,
            4 => self.post(input)?,
            5 | 6 => self.take_send(),
            7 => self.take_receive(),
            8 => self.receive.share(),
            9 => self.skip(input.u32()?),
            10 => self.publish(input.u64()?),
            11 => self.poll(),
            12 => self.look_at_session(),
            13 => self.look_at_library(input.u32()?),
            14 => self.receive_message(),
            _ => self.look_at_credits(input.u32()?),
        }
        Some(())
    }

    /// The other side writes one word of 32 or 64 bits.
    fn overwrite(&self, which: usize, input: &mut Input<'_>) -> Option<()> {
        let segment = self.segments.all()[which];
        let (at, value) = (input.u16()?, input.u64()?);
        let words = (segment.bytes() / 8).min(direct_ring::DATA / 8);
        let offset = usize::from(at >> 1) % words * 8;
        if at & 1 == 0 {
            segment.u64(offset).store(value, Relaxed);
        } else {
            segment.u32(offset).store(value as u32, Relaxed);
        }
        Some(())
    }

    /// The library posts, as it should.
    fn post(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (opcode, length) = (input.u8()?, input.u8()?);
        let sge = Sge { address: 0x1000, length: length.into(), lkey: 5 };
        let sges = [sge; SGE_COUNT as usize];
        let sges = &sges[..usize::from(length) % (SGE_COUNT as usize + 1)];
        match SendOpcode::from_number(opcode) {
            Some(opcode) => {
                let (flags, inline) = (SendFlags(length), (length % 2 == 0).then_some(&[7; 8][..]));
                self.library_send.publish_send(&SendDescriptor {
                    wr_id: 1,
                    opcode,
                    flags,
                    immediate: 2,
                    remote_address: 0x2000,
                    rkey: 3,
                    compare_add: 4,
                    swap: 5,
                    remote_srqn: 0,
                    sges,
                    inline,
                });
            }
            None => {
                self.library_receive.publish_receive(2, sges);
            }
        }
        Some(())
    }

    fn take_send(&mut self) {
        let mut request = SendRequest::default();
        if self.send.take_send(self.service, &mut request) == Take::Ready {
            assert!(u32::from(request.sge_count) <= SGE_COUNT && u32::from(request.inline_length) <= INLINE_BYTES);
            assert!(request.sge_count == 0 || request.inline_length == 0);
        }
        assert!(self.send.pending() <= WR_COUNT);
    }

    fn take_receive(&mut self) {
        let mut request = ReceiveRequest::default();
        if self.receive.take_receive(&mut request) == Take::Ready {
            assert!(u32::from(request.sge_count) <= SGE_COUNT);
        }
        assert!(self.receive.pending() <= WR_COUNT);
    }

    fn skip(&mut self, position: u32) {
        let before = self.receive.catch_up();
        self.receive.skip_to(position);
        assert!(self.receive.catch_up().wrapping_sub(before) <= WR_COUNT, "it goes on, a little");
    }

    fn publish(&mut self, id: u64) {
        let published = self.completions.publish(&Completion { work_request_id: id, ..Completion::default() });
        assert!(published.is_ok() || self.completions.unconsumed() == CQE_COUNT, "full only if it is");
        let _ = self.completions.take_armed(id.is_multiple_of(2));
        assert!(self.completions.unconsumed() <= CQE_COUNT);
    }

    fn poll(&mut self) {
        let mut completion = Completion::default();
        if self.library_completions.poll(&mut completion) {
            self.library_completions.commit();
        }
        let position = self.library_completions.position();
        assert!(self.library_completions.published().wrapping_sub(position) <= CQE_COUNT);
        let _ = self.library_completions.flags_at(position);
        self.library_completions.arm(true);
    }

    fn look_at_session(&self) {
        let session = &self.segments.session;
        session.take_doorbells(|doorbell| assert!((doorbell as usize) < freeflow_shm::layout::DOORBELL_COUNT));
        session.take_notifications(|cookie| session.notify(cookie));
        let _ = (session.wait_policy(), session.is_worker_here(0), session.is_poller_here(0, 1));
    }

    fn look_at_library(&mut self, position: u32) {
        let _ = (self.library_send.wr_id_at(position), self.library_send.must_ring_send());
        let _ = (self.library_send.taken(), self.library_send.done());
        let mut sges = [Sge::default(); SGE_COUNT as usize];
        assert!(self.library_receive.receive_at(position, &mut sges) <= sges.len());
        self.library_receive.claim_receive(position);
        let _ = (self.send.take_notified(), self.send.tally());
    }

    fn receive_message(&mut self) {
        if let Some(message) = self.receiver.peek() {
            assert!(message.length <= DIRECT_RING_MESSAGE_BYTES_MAX);
            self.receiver.take();
            self.receiver.commit();
        }
    }

    fn look_at_credits(&mut self, msn: u32) {
        if let Credit::Bytes(bytes) = self.sender.credit(msn) {
            let _ = self.sender.has_room(bytes.min(DIRECT_RING_MESSAGE_BYTES_MAX));
        }
        let _ = (self.sender.is_open(), self.sender.must_notify(), self.sender.may_be_unseen());
    }
}

pub fn run(bytes: &[u8]) {
    let mut input = Input(bytes);
    let Some(service) = input.u8() else { return };
    SEGMENTS.with(|segments| {
        segments.clear();
        let mut rings = Rings::new(segments, SERVICES[usize::from(service) % SERVICES.len()]);
        for _ in 0..STEP_COUNT_MAX {
            if rings.step(&mut input).is_none() {
                break;
            }
        }
        assert!(segments.all().iter().all(|segment| !segment.poisoned()));
    });
}
