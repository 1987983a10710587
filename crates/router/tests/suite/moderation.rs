//! Completion events that wait for a count or for a time.
use crate::common::*;
use freeflow_protocol::library::{Reply, Request};
use freeflow_verbs::{CompletionStatus, QpType, SendOpcode};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

struct Loop {
    host: Host,
    client: Client,
    cq: Cq,
    pipe: OwnedFd,
    qp: Qp,
    remote: Memory,
}

impl Loop {
    fn new() -> Self {
        let host = Host::new();
        let mut client = host.client("a");
        let (channel, pipe) = client.create_channel();
        let cq = client.create_cq(64, Some(channel));
        let qp = client.create_qp(QpType::Rc, &cq);
        client.connect_rc(&qp, client.gid(), qp.qpn, 14);
        let remote = client.memory(8, true);
        Self { host, client, cq, pipe, qp, remote }
    }

    fn moderate(&self, count: u16, period_us: u16) {
        let request = Request::ModerateCq { cq: self.cq.handle, count, period_us };
        assert_eq!(self.client.ask(&request), Reply::Done);
    }

    /// One completion, seen.
    fn complete(&mut self) {
        let sges = [self.remote.sge(0, 8)];
        let write = freeflow_shm::SendDescriptor {
            remote_address: self.remote.address + 8,
            rkey: self.remote.mr.rkey,
            ..request(SendOpcode::RdmaWrite, &sges)
        };
        self.client.post_send(&mut self.qp, &write);
        assert_eq!(self.cq.wait().status, CompletionStatus::Success);
        self.client.settle();
    }
}

#[test]
fn an_event_waits_for_the_count() {
    let mut test = Loop::new();
    test.moderate(3, 0);
    for _ in 0..2 {
        test.cq.ring.arm(false);
        for _ in 0..2 {
            test.complete();
            assert!(!has_event(&test.pipe));
        }
        test.complete();
        assert_eq!(read_event(&test.pipe), Some((test.cq.cookie, 0)));
        assert!(!has_event(&test.pipe));
    }
    // Nothing is armed: the count passes in silence.
    for _ in 0..5 {
        test.complete();
        assert!(!has_event(&test.pipe));
    }
}

#[test]
fn an_event_waits_for_the_time() {
    const PERIOD_US: u16 = 30_000;
    let mut test = Loop::new();
    test.moderate(100, PERIOD_US);
    for _ in 0..2 {
        test.cq.ring.arm(false);
        let began = Instant::now();
        test.complete();
        // The router sleeps meanwhile, and wakes by its own clock.
        until("sleep", || test.host.status().sleeping.then_some(()));
        assert_eq!(read_event(&test.pipe), Some((test.cq.cookie, 0)));
        // The period begins with the worker's turn, which may have begun before.
        assert!(began.elapsed() >= Duration::from_micros(PERIOD_US.into()) / 2, "{:?}", began.elapsed());
    }
    // The count comes first.
    test.moderate(2, u16::MAX);
    test.cq.ring.arm(false);
    test.complete();
    test.complete();
    assert_eq!(read_event(&test.pipe), Some((test.cq.cookie, 0)));
}

#[test]
fn what_was_held_back_is_notified_when_moderation_ends() {
    let mut test = Loop::new();
    test.moderate(100, 0);
    test.cq.ring.arm(false);
    test.complete();
    assert!(!has_event(&test.pipe));
    test.moderate(0, 0);
    assert_eq!(read_event(&test.pipe), Some((test.cq.cookie, 0)));
    test.cq.ring.arm(false);
    test.complete();
    assert_eq!(read_event(&test.pipe), Some((test.cq.cookie, 0)));
}

#[test]
fn a_queue_that_goes_leaves_no_appointment() {
    let mut test = Loop::new();
    test.moderate(100, u16::MAX);
    test.cq.ring.arm(false);
    let began = Instant::now();
    test.complete();
    assert_eq!(test.client.ask(&Request::DestroyQp { qp: test.qp.handle }), Reply::Done);
    assert_eq!(test.client.ask(&Request::DestroyCq { cq: test.cq.handle }), Reply::Done);
    let was_in_time = began.elapsed() < Duration::from_millis(60);
    let request = Request::ModerateCq { cq: test.cq.handle, count: 1, period_us: 1 };
    assert_eq!(test.client.refused(&request), freeflow_verbs::VerbsError::NotFound);
    // It is not woken by what is not there.
    until("sleep", || test.host.status().sleeping.then_some(()));
    test.client.settle();
    assert!(!was_in_time || !has_event(&test.pipe));
}
