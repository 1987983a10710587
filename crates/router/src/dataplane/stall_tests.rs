//! A tenant whose memory blocks whoever reads it: its vNIC fails, the others go on.
use crate::dataplane::lone_worker::{LoneWorker, create_session, new_vnic};
use crate::dataplane::worker::Worker;
use crate::memory::blocking_memory::BlockingMemory;
use crate::memory::bounce::BOUNCE_BYTES_MAX;
use crate::memory::page_table::PageTable;
use freeflow_engine::{CopyOutcome, SessionId, Source, SourceBody, Span, SpanRegion, Token, VnicId};
use freeflow_shm::monotonic_ns;
use freeflow_verbs::{Duration, Instant, NetworkId, VerbsError};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

struct Rig {
    worker: Worker,
    /// Nobody listens to what the worker says.
    _silence: Box<dyn std::any::Any>,
}

impl Rig {
    fn new() -> Self {
        let LoneWorker { worker, commands, events, .. } = LoneWorker::new();
        Self { worker, _silence: Box::new((commands, events)) }
    }

    fn vnic(&mut self, host: u8) -> VnicId {
        self.worker.create_vnic(&new_vnic(NetworkId(1), host)).unwrap()
    }

    fn session(&mut self, vnic: VnicId, memory: &Arc<BlockingMemory>) -> Result<SessionId, VerbsError> {
        create_session(&mut self.worker, vnic, PageTable::new(memory.clone(), Arc::default()))
    }

    fn copy(&mut self, token: u64, from: SessionId, to: SessionId) -> CopyOutcome {
        let span = |session| Span { session, region: SpanRegion::new(0, false), address: 0x1000, length: 64 };
        let source = Source { prefix: &[], body: SourceBody::Spans(&[span(from)]) };
        self.worker.ports.start_copy(Token(token), source, &[span(to)], true)
    }

    fn in_flight(&self) -> usize {
        self.worker.ports.transfers.in_flight()
    }

    fn turn_until(&mut self, mut check: impl FnMut(&mut Self) -> bool) {
        let began = monotonic_ns();
        while !check(self) {
            assert!(monotonic_ns() - began < 30_000_000_000, "waited in vain");
            self.worker.turn(Instant(monotonic_ns()));
            freeflow_shm::sched_yield();
        }
    }
}

#[test]
fn a_blocked_copier_fails_its_vnic_and_no_other() {
    let mut rig = Rig::new();
    let (stuck, free) = (Arc::new(BlockingMemory::default()), Arc::new(BlockingMemory::default()));
    let (a, b) = (rig.vnic(2), rig.vnic(3));
    let hostile = rig.session(a, &stuck).unwrap();
    let (first, second) = (rig.session(b, &free).unwrap(), rig.session(b, &free).unwrap());
    stuck.set_blocking(true);
    assert_eq!(rig.copy(1, hostile, first), CopyOutcome::Pending);
    assert_eq!(rig.copy(2, hostile, first), CopyOutcome::Pending);
    // Others go on meanwhile.
    assert_eq!(rig.copy(3, first, second), CopyOutcome::Pending);
    rig.turn_until(|rig| rig.in_flight() == 2);
    let stalled = |rig: &Rig| {
        rig.worker.ports.vnics.iter().any(|(_, vnic)| vnic.copier.as_ref().is_some_and(|h| h.is_stalled(u64::MAX, 0)))
    };
    rig.turn_until(|rig| stalled(rig));
    let now = Instant(monotonic_ns());
    rig.worker.fail_stalled_vnics(now);
    assert!(rig.worker.ports.sessions.get(hostile).is_some());
    // Not while the router itself was stopped.
    rig.worker.ports.resumed_at = now + Duration::from_millis(2500);
    rig.worker.fail_stalled_vnics(now + Duration::from_millis(3000));
    assert!(rig.worker.ports.sessions.get(hostile).is_some());
    rig.worker.ports.resumed_at = now;
    rig.worker.fail_stalled_vnics(now + Duration::from_millis(3000));
    assert!(rig.worker.ports.sessions.get(hostile).is_none());
    assert!(rig.worker.ports.sessions.get(first).is_some());
    assert_eq!(rig.in_flight(), 0);
    assert_eq!(rig.session(a, &stuck), Err(VerbsError::DeviceFatal));
    // The other's copier was never in the way.
    assert_eq!(rig.copy(4, first, second), CopyOutcome::Pending);
    rig.turn_until(|rig| rig.in_flight() == 0);
    // Once the thread comes back, so does the vNIC.
    stuck.set_blocking(false);
    let mut again = None;
    rig.turn_until(|rig| {
        again = rig.session(a, &stuck).ok();
        again.is_some()
    });
    assert_eq!(rig.copy(5, again.unwrap(), first), CopyOutcome::Pending);
    rig.turn_until(|rig| rig.in_flight() == 0);
}

#[test]
fn nobody_waits_for_the_copier_of_a_vnic_that_goes() {
    let mut rig = Rig::new();
    let (stuck, free) = (Arc::new(BlockingMemory::default()), Arc::new(BlockingMemory::default()));
    let (a, b) = (rig.vnic(2), rig.vnic(3));
    let (hostile, peer) = (rig.session(a, &stuck).unwrap(), rig.session(b, &free).unwrap());
    stuck.set_blocking(true);
    assert_eq!(rig.copy(1, hostile, peer), CopyOutcome::Pending);
    drop(rig.worker.destroy_sessions_of(Instant(monotonic_ns()), a));
    assert_eq!(rig.in_flight(), 0);
    assert!(rig.worker.ports.sessions.get(peer).is_some());
    stuck.set_blocking(false);
}

#[test]
fn memory_that_does_not_answer_uses_up_its_own_vnics_budget() {
    const BYTES: u32 = 1 << 20;
    let mut rig = Rig::new();
    let (stuck, free) = (Arc::new(BlockingMemory::default()), Arc::new(BlockingMemory::default()));
    let (a, b) = (rig.vnic(2), rig.vnic(3));
    let hostile = rig.session(a, &stuck).unwrap();
    let (first, second) = (rig.session(b, &free).unwrap(), rig.session(b, &free).unwrap());
    let charged = |rig: &Rig, vnic| rig.worker.ports.vnics.get(vnic).unwrap().bounce_bytes.load(Relaxed);
    stuck.set_blocking(true);
    // As many bytes as a vNIC's budget is, and as many again, from the other's memory into memory that does not answer.
    let count = 2 * BOUNCE_BYTES_MAX / u64::from(BYTES);
    for token in 1..=count {
        let span = |session| Span { session, region: SpanRegion::new(0, false), address: 0x1000, length: BYTES };
        let source = Source { prefix: &[], body: SourceBody::Spans(&[span(first)]) };
        assert_eq!(rig.worker.ports.start_copy(Token(token), source, &[span(hostile)], true), CopyOutcome::Pending);
    }
    rig.turn_until(|rig| charged(rig, b) == 0);
    assert!(charged(&rig, a) >= BOUNCE_BYTES_MAX);
    // The other's work with its own memory goes on.
    let before = rig.in_flight();
    assert_eq!(rig.copy(100, first, second), CopyOutcome::Pending);
    rig.turn_until(|rig| rig.in_flight() == before);
    let is_stalled =
        |rig: &Rig| rig.worker.ports.vnics.get(a).unwrap().copier.as_ref().unwrap().is_stalled(u64::MAX, 0);
    rig.turn_until(|rig| is_stalled(rig));
    rig.worker.fail_stalled_vnics(Instant(monotonic_ns()) + Duration::from_millis(3000));
    assert_eq!((rig.in_flight(), charged(&rig, b)), (0, 0), "nothing waits for the vNIC that failed");
    assert_eq!(rig.copy(101, first, second), CopyOutcome::Pending);
    rig.turn_until(|rig| rig.in_flight() == 0);
    stuck.set_blocking(false);
}
