//! A router and a library in one process, over one segment mapped twice.
use super::*;
use crate::layout::{ARMED_NEXT, ARMED_NONE, ARMED_SOLICITED};
use std::os::fd::AsFd;

fn pair(cqe: u32, carried_over: u32) -> (CompletionProducer, CompletionConsumer) {
    let (router, fd) = Segment::create("test", cq_bytes(cqe)).unwrap();
    let library = Segment::map(fd.as_fd(), cq_bytes(cqe)).unwrap();
    let producer = CompletionProducer::new(Arc::new(router), cqe, carried_over);
    (producer, CompletionConsumer::new(Arc::new(library), cqe))
}

fn completion(i: u32) -> Completion {
    Completion {
        work_request_id: u64::from(i) << 20 | 7,
        status: CompletionStatus::RnrRetryExceeded,
        opcode: CompletionOpcode::ReceiveRdmaWithImmediate,
        flags: CompletionFlags(0xc3),
        byte_count: i,
        immediate: !i,
        qpn: i ^ 1,
        source_qpn: i ^ 2,
        qp_cookie: i ^ 3,
        ring_position: i ^ 4,
        timestamp_ns: u64::MAX - u64::from(i),
        vendor_error: 200,
    }
}

#[test]
fn every_field_arrives() {
    let (mut producer, mut consumer) = pair(1, 0);
    let mut got = Completion::default();
    assert!(consumer.is_empty() && !consumer.poll(&mut got));
    for i in 0..20 {
        producer.publish(&completion(i)).unwrap();
        assert!(!consumer.is_empty());
        assert!(consumer.poll(&mut got));
        assert_eq!(got, completion(i));
        consumer.commit();
    }
}

#[test]
fn capacity_is_what_was_asked_for_not_the_ring() {
    let (mut producer, mut consumer) = pair(5, 0);
    let mut got = Completion::default();
    for lap in 0..100 {
        for i in 0..5 {
            assert_eq!(producer.publish(&completion(lap * 5 + i)), Ok(()));
        }
        assert_eq!(producer.publish(&completion(0)), Err(Full));
        assert_eq!(producer.unconsumed(), 5);
        for i in 0..5 {
            assert!(consumer.poll(&mut got));
            assert_eq!(got, completion(lap * 5 + i));
        }
        assert_eq!(producer.publish(&completion(0)), Err(Full), "not committed yet");
        consumer.commit();
        assert_eq!(producer.unconsumed(), 0);
    }
}

/// A million completions from 0, and a million over the end of the u32 count.
#[test]
fn positions_wrap() {
    for start in [0, u32::MAX - 500_000] {
        let (mut producer, mut consumer) = pair(16, 0);
        producer.view.consumer().store(start, Ordering::Relaxed);
        producer.cursor = BoundedPublishCursor::at(start, start, 16);
        consumer.cursor = TakeCursor::at(start);
        let mut got = Completion::default();
        for i in 0..1_000_000 {
            producer.publish(&completion(i)).unwrap();
            if i % 16 == 15 {
                assert_eq!(producer.unconsumed(), 16);
                for back in (0..16).rev() {
                    assert!(consumer.poll(&mut got));
                    assert_eq!(got.byte_count, i - back);
                }
                assert!(!consumer.poll(&mut got));
                consumer.commit();
            }
        }
    }
}

#[test]
fn a_resized_ring_counts_what_is_left_in_the_old_one() {
    let (mut producer, mut consumer) = pair(8, 6);
    let mut got = Completion::default();
    assert_eq!(producer.unconsumed(), 6);
    producer.publish(&completion(0)).unwrap();
    producer.publish(&completion(1)).unwrap();
    assert_eq!(producer.publish(&completion(2)), Err(Full));
    // Two of the old ring's are polled.
    consumer.commit_carried_over(4);
    assert_eq!(producer.unconsumed(), 6);
    producer.publish(&completion(2)).unwrap();
    producer.publish(&completion(3)).unwrap();
    assert_eq!(producer.publish(&completion(4)), Err(Full));
    consumer.commit_carried_over(0);
    for i in 0..4 {
        assert!(consumer.poll(&mut got));
        assert_eq!(got.byte_count, i);
    }
    consumer.commit();
    assert_eq!(producer.unconsumed(), 0);
    for i in 4..12 {
        producer.publish(&completion(i)).unwrap();
    }
    assert_eq!(producer.publish(&completion(12)), Err(Full));
    // Too late to speak of the old ring.
    consumer.commit_carried_over(3);
    assert_eq!(producer.unconsumed(), 8);
}

/// A library that never says how many it took of the old ring gets all its room by the first commit
/// of the new one.
#[test]
fn a_resized_ring_forgets_the_old_one_at_the_first_commit() {
    let (mut producer, mut consumer) = pair(4, 3);
    producer.publish(&completion(0)).unwrap();
    assert!(consumer.poll(&mut Completion::default()));
    consumer.commit();
    assert_eq!(producer.unconsumed(), 0);
}

/// The producer believes only a consumer count that can be, not any that the library writes.
#[test]
fn a_lying_consumer_count_is_ignored() {
    let (mut producer, consumer) = pair(4, 0);
    for i in 0..4 {
        producer.publish(&completion(i)).unwrap();
    }
    for lie in [5, 100, u32::MAX, u32::MAX - 3, 1 << 31] {
        consumer.view.consumer().store(lie, Ordering::Relaxed);
        assert_eq!(producer.unconsumed(), 4);
        assert_eq!(producer.publish(&completion(9)), Err(Full));
    }
    consumer.view.consumer().store(3, Ordering::Relaxed);
    assert_eq!(producer.unconsumed(), 1);
    // Back again: no.
    consumer.view.consumer().store(1, Ordering::Relaxed);
    assert_eq!(producer.unconsumed(), 1);
}

#[test]
fn numbers_that_mean_nothing_do_not_panic() {
    let (mut producer, mut consumer) = pair(4, 0);
    let mut line = encode(&completion(1));
    line[HEAD] = 0xffff_ffff;
    assert!(producer.cursor.publish(&producer.view.slots, producer.view.consumer(), &line).is_ok());
    let mut got = Completion::default();
    assert!(consumer.poll(&mut got));
    assert_eq!((got.status, got.opcode), (CompletionStatus::GeneralError, CompletionOpcode::Send));
}

#[test]
fn events_come_as_armed() {
    let (producer, consumer) = pair(4, 0);
    assert!(!producer.take_armed(true));
    consumer.arm(false);
    assert!(producer.take_armed(false));
    assert!(!producer.take_armed(true), "once");
    consumer.arm(true);
    assert!(!producer.take_armed(false));
    assert!(producer.take_armed(true));
    // Armed for any completion stays so.
    consumer.arm(false);
    consumer.arm(true);
    assert_eq!(consumer.view.armed().load(Ordering::Relaxed), ARMED_NEXT);
    assert!(producer.take_armed(false));
    // Armed for a solicited one becomes armed for any.
    consumer.arm(true);
    assert_eq!(consumer.view.armed().load(Ordering::Relaxed), ARMED_SOLICITED);
    consumer.arm(false);
    assert!(producer.take_armed(false));
    // A hostile value arms nothing.
    consumer.view.armed().store(77, Ordering::Relaxed);
    assert!(!producer.take_armed(true));
    consumer.view.armed().store(ARMED_NONE, Ordering::Relaxed);
    assert!(!producer.take_armed(true));
}

/// Two threads, real hardware: every completion arrives once, whole, in order.
#[test]
fn two_threads_hand_over_every_completion() {
    const COUNT: u32 = 100_000;
    let (mut producer, mut consumer) = pair(6, 0);
    let router = std::thread::spawn(move || {
        for i in 0..COUNT {
            while producer.publish(&completion(i)).is_err() {
                std::thread::yield_now();
            }
        }
    });
    let mut got = Completion::default();
    for i in 0..COUNT {
        while !consumer.poll(&mut got) {
            std::thread::yield_now();
        }
        assert_eq!(got, completion(i));
        consumer.commit();
    }
    router.join().unwrap();
}
