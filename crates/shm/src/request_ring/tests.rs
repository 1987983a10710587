//! A library and a router in one process, over one segment mapped twice; and a library that writes
//! nonsense.
use super::*;
use crate::slot::SLOT_WORDS;
use std::os::fd::AsFd;

struct Pair {
    producer: RequestProducer,
    consumer: RequestConsumer,
    /// The library's own mapping, to scribble in.
    library: Arc<Segment>,
}

const OFFSET: usize = 128;

fn pair(shape: QueueShape, max_wr: u32, max_sge: u32, max_inline: u32) -> Pair {
    let bytes = OFFSET + shape.bytes();
    let (router, fd) = Segment::create("test", bytes).unwrap();
    let library = Arc::new(Segment::map(fd.as_fd(), bytes).unwrap());
    Pair {
        producer: RequestProducer::new(Arc::clone(&library), OFFSET, shape),
        consumer: RequestConsumer::new(Arc::new(router), OFFSET, shape, max_wr, max_sge, max_inline),
        library,
    }
}

fn send_pair(max_wr: u32, max_sge: u32, max_inline: u32) -> Pair {
    pair(QueueShape::send(max_wr, max_sge, max_inline), max_wr, max_sge, max_inline)
}

impl Pair {
    /// Both sides continue at `position`, as if they had come there.
    fn jump(&mut self, position: u32) {
        self.producer.cursor = PublishCursor::at(position);
        self.consumer.cursor = TakeCursor::at(position);
    }

    fn word(&self, position: u32, word: usize) -> &AtomicU64 {
        let index = self.producer.view.slots.index(position) as usize;
        self.library.u64(OFFSET + queue::BYTES + index * 64 + word * 8)
    }

    /// Publishes a slot with these bytes in its head.
    fn publish_raw(&mut self, head: [u8; 4], fill: u64) {
        let mut line = [fill; SLOT_WORDS];
        line[HEAD] = u64::from(u32::from_le_bytes(head));
        self.producer.cursor.publish(&self.producer.view.slots, &line);
    }
}

fn sges(count: usize, seed: u32) -> Vec<Sge> {
    (0..count as u32)
        .map(|i| Sge { address: u64::from(seed) << 32 | u64::from(i) << 12, length: seed ^ i, lkey: !seed ^ i })
        .collect()
}

fn descriptor(wr_id: u64) -> SendDescriptor<'static> {
    SendDescriptor {
        wr_id,
        opcode: SendOpcode::Send,
        flags: SendFlags(SendFlags::SIGNALED),
        immediate: 0,
        remote_address: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        remote_srqn: 0,
        sges: &[],
        inline: None,
    }
}

#[test]
fn every_field_of_a_send_arrives() {
    let mut pair = send_pair(4, 2, 0);
    let list = sges(2, 77);
    for opcode in SendOpcode::ALL {
        let request = SendDescriptor {
            opcode,
            flags: SendFlags(0xf7),
            immediate: 0x0102_0304,
            remote_address: 0x1122_3344_5566_7788,
            rkey: 0x99aa_bbcc,
            compare_add: u64::MAX - 1,
            swap: 5,
            sges: &list,
            ..descriptor(u64::MAX)
        };
        let position = pair.producer.publish_send(&request);
        assert_eq!(pair.producer.wr_id_at(position), u64::MAX);
        let mut got = SendRequest { inline_length: 9, address_handle: 9, ..SendRequest::default() };
        assert!(pair.consumer.has_next());
        assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Ready);
        assert_eq!((got.work_request_id, got.opcode, got.ring_position), (u64::MAX, opcode, position));
        assert_eq!(got.flags, SendFlags(7));
        assert_eq!((got.immediate, got.rkey), (0x0102_0304, 0x99aa_bbcc));
        assert_eq!(got.remote_address, 0x1122_3344_5566_7788);
        let operands = if opcode.has_operands() { (u64::MAX - 1, 5) } else { (0, 0) };
        assert_eq!((got.compare_add, got.swap), operands);
        assert_eq!(got.sges(), list);
        assert_eq!((got.inline_length, got.address_handle, got.remote_qpn, got.remote_qkey), (0, 0, 0, 0));
        assert_eq!(pair.producer.taken(), position + 1);
        assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Empty);
    }
}

#[test]
fn an_extended_connection_names_the_remote_queue() {
    let mut pair = send_pair(4, 1, 0);
    for opcode in SendOpcode::ALL {
        let (compare_add, swap) = if opcode.has_operands() { (7, 0xffff_ffff) } else { (0, 0) };
        let immediate = if opcode.is_atomic() { 0 } else { 3 };
        let request =
            SendDescriptor { opcode, compare_add, swap, immediate, remote_srqn: 0x00ab_cdef, ..descriptor(1) };
        pair.producer.publish_send(&request);
        let mut got = SendRequest::default();
        assert_eq!(pair.consumer.take_send(QpType::XrcSend, &mut got), Take::Ready);
        assert_eq!((got.remote_srqn, got.compare_add, got.swap), (0x00ab_cdef, compare_add, swap), "{opcode:?}");
        assert!(opcode.is_atomic() || got.immediate == 3);
    }
}

#[test]
fn an_atomic_write_carries_its_bytes_in_the_slot() {
    let mut pair = send_pair(4, 1, 0);
    let request =
        SendDescriptor { opcode: SendOpcode::AtomicWrite, inline: Some(&[1, 2, 3, 4, 5, 6, 7, 8]), ..descriptor(1) };
    pair.producer.publish_send(&request);
    let mut got = SendRequest::default();
    assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Ready);
    assert_eq!((got.inline_length, &got.inline_data[..8]), (8, &[1, 2, 3, 4, 5, 6, 7, 8][..]));
}

#[test]
fn a_datagram_names_its_address_handle() {
    let mut pair = send_pair(4, 1, 0);
    let remote_address = u64::from(7_u32) | u64::from(0x00ab_cdef_u32) << 32;
    pair.producer.publish_send(&SendDescriptor { remote_address, rkey: 0x1111_1111, ..descriptor(1) });
    let mut got = SendRequest::default();
    assert_eq!(pair.consumer.take_send(QpType::Ud, &mut got), Take::Ready);
    assert_eq!((got.address_handle, got.remote_qpn, got.remote_qkey), (7, 0x00ab_cdef, 0x1111_1111));
}

/// Rings of every small size, many laps, with SGE lists and inline payloads of all lengths, in
/// batches.
#[test]
fn requests_survive_many_laps() {
    for max_wr in [1, 2, 3, 8, 13] {
        let mut pair = send_pair(max_wr, 30, 1024);
        let payload: Vec<u8> = (0..1024).map(|i| (i * 7) as u8).collect();
        let mut got = SendRequest::default();
        let mut next = 0_u32;
        for lap in 0..200_u32 {
            let batch = lap % max_wr + 1;
            for i in next..next + batch {
                let (list, bytes) = (sges(i as usize % 31, i), &payload[..(i * 37) as usize % 1025]);
                let inline = (i % 2 == 1).then_some(bytes);
                let request = SendDescriptor { sges: &list, inline, ..descriptor(u64::from(i)) };
                assert_eq!(pair.producer.publish_send(&request), i);
            }
            assert_eq!(pair.consumer.pending(), batch);
            for i in next..next + batch {
                assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Ready);
                assert_eq!((got.work_request_id, got.ring_position), (u64::from(i), i));
                if i % 2 == 1 {
                    let length = (i * 37) as usize % 1025;
                    assert!(got.is_inline() && got.sges().is_empty());
                    assert_eq!(got.payload_bytes(), length as u64);
                    assert_eq!(got.inline_data[..length], payload[..length]);
                } else {
                    assert!(!got.is_inline() && got.inline_length == 0);
                    assert_eq!(got.sges(), sges(i as usize % 31, i));
                }
            }
            next += batch;
            assert_eq!((pair.consumer.pending(), pair.consumer.taken()), (0, next));
            assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Empty);
        }
    }
}

#[test]
fn receives_survive_many_laps() {
    let mut pair = pair(QueueShape::receive(5, 30), 5, 30, 0);
    let mut got = ReceiveRequest::default();
    for i in 0..500_u32 {
        let list = sges(i as usize % 31, i);
        assert_eq!(pair.producer.publish_receive(u64::from(i), &list), i);
        assert_eq!(pair.consumer.take_receive(&mut got), Take::Ready);
        assert_eq!((got.work_request_id, got.ring_position), (u64::from(i), i));
        assert_eq!(got.sges(), list);
    }
    assert_eq!(pair.consumer.take_receive(&mut got), Take::Empty);
}

/// A million positions from 0, and a million over the end of the u32 count.
#[test]
fn positions_wrap() {
    for start in [0, u32::MAX - 500_000] {
        let mut pair = send_pair(16, 1, 0);
        pair.jump(start);
        let mut got = SendRequest::default();
        for i in 0..1_000_000_u32 {
            let position = start.wrapping_add(i);
            assert_eq!(pair.producer.publish_send(&descriptor(u64::from(i))), position);
            if i % 16 == 15 {
                for back in (0..16).rev() {
                    assert_eq!(pair.consumer.pending(), back + 1);
                    assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Ready);
                    assert_eq!(got.ring_position, position.wrapping_sub(back));
                }
                assert!(!pair.consumer.has_next());
            }
        }
    }
}

#[test]
fn pending_counts_a_full_shared_queue() {
    let mut pair = pair(QueueShape::receive(32_768, 1), 32_768, 1, 0);
    let mut got = ReceiveRequest::default();
    for posted in 0..32_768 {
        if posted % 4099 == 0 {
            assert_eq!(pair.consumer.pending(), posted);
        }
        pair.producer.publish_receive(1, &[]);
    }
    for left in (0..32_768).rev() {
        assert_eq!(pair.consumer.take_receive(&mut got), Take::Ready);
        if left % 4099 == 0 {
            assert_eq!(pair.consumer.pending(), left);
        }
    }
}

#[test]
fn reset_begins_again() {
    let mut pair = send_pair(4, 1, 0);
    let mut got = SendRequest::default();
    for i in 0..3 {
        pair.producer.publish_send(&descriptor(i));
    }
    assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Ready);
    pair.consumer.reset();
    pair.producer.reset();
    assert!(!pair.consumer.has_next() && pair.consumer.pending() == 0);
    assert_eq!((pair.producer.position(), pair.producer.taken()), (0, 0));
    assert_eq!(pair.producer.publish_send(&descriptor(40)), 0);
    assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Ready);
    assert_eq!((got.work_request_id, got.ring_position), (40, 0));
}

#[test]
fn flags_of_the_router_reach_the_library() {
    let mut pair = send_pair(4, 1, 0);
    pair.producer.publish_send(&descriptor(0));
    assert!(pair.producer.must_ring_send() && !pair.producer.must_ring_receive());
    pair.consumer.set_polled(true);
    pair.consumer.set_receives_wanted(true);
    assert!(!pair.producer.must_ring_send() && pair.producer.must_ring_receive());
    pair.consumer.set_polled(false);
    pair.consumer.set_receives_wanted(false);
    assert!(pair.producer.must_ring_send() && !pair.producer.must_ring_receive());
}

/// Each malformed slot is reported with its id and position, and consumed; the next one is fine
/// again.
#[test]
fn malformed_sends_are_consumed() {
    let mut pair = send_pair(8, 4, 100);
    let mut got = SendRequest::default();
    let inline = SendFlags::INLINE;
    let long = u64::from(u32::MAX);
    for (position, (head, fill)) in [
        ([10, 0, 0, 0], 0),
        ([13, 0, 0, 0], 0),
        ([16, 0, 0, 0], 0),
        ([15, inline, 0, 0], 9),
        ([255, 255, 255, 255], u64::MAX),
        ([2, 0, 5, 0], 1),
        ([2, 0, 255, 0], 2),
        ([2, inline, 0, 0], long),
        ([2, inline, 0, 0], 101),
        ([2, inline, 255, 0], u64::MAX),
    ]
    .into_iter()
    .enumerate()
    {
        pair.publish_raw(head, fill);
        pair.producer.publish_send(&descriptor(50));
        assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Malformed, "{head:?}");
        assert_eq!((got.work_request_id, got.ring_position), (fill, 2 * position as u32));
        assert!(got.sges().is_empty() && got.inline_length == 0);
        assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Ready);
        assert_eq!(got.work_request_id, 50);
    }
    // The largest that are allowed.
    pair.publish_raw([2, inline, 255, 0], 100);
    assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Ready);
    assert_eq!((got.inline_length, got.sge_count), (100, 0));
    pair.publish_raw([2, 0xf0, 4, 99], 100);
    assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Ready);
    assert_eq!((got.flags, got.sge_count), (SendFlags(0), 4));
}

#[test]
fn malformed_receives_are_consumed() {
    let mut pair = pair(QueueShape::receive(8, 5), 8, 5, 0);
    let mut got = ReceiveRequest::default();
    for head in [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 6, 0], [0, 0, 255, 0], [0, 0, 1, 1]] {
        pair.publish_raw(head, 3);
        assert_eq!(pair.consumer.take_receive(&mut got), Take::Malformed, "{head:?}");
        assert!(got.work_request_id == 3 && got.sges().is_empty());
    }
    pair.producer.publish_receive(9, &sges(5, 1));
    assert_eq!(pair.consumer.take_receive(&mut got), Take::Ready);
    assert_eq!(got.sges(), sges(5, 1));
}

/// A router that grants more than the shape holds can't be led outside the extension either.
#[test]
fn the_shape_bounds_what_is_read() {
    let shape = QueueShape::send(4, 1, 0);
    let mut pair = pair(shape, 4, 30, 1024);
    let mut got = SendRequest::default();
    pair.publish_raw([2, 0, 2, 0], 1);
    assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Malformed);
    pair.publish_raw([2, SendFlags::INLINE, 0, 0], 1);
    assert_eq!(pair.consumer.take_send(QpType::Rc, &mut got), Take::Malformed);
}

/// Random words everywhere: no panic, limits hold, `pending` stays within `max_wr`, every published
/// slot is consumed.
#[test]
fn a_scribbling_library_harms_nothing() {
    let mut pair = send_pair(6, 9, 200);
    let (mut sends, mut receives) = (SendRequest::default(), ReceiveRequest::default());
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..100_000_u32 {
        let position = random() as u32;
        pair.word(position, (random() % 8) as usize).store(random(), Ordering::Relaxed);
        let taken = pair.consumer.taken();
        if round % 2 == 0 {
            // A published head with random contents.
            let head = u64::from(taken.wrapping_add(1)) << 32 | random() >> 32;
            pair.word(taken, HEAD).store(head, Ordering::Relaxed);
        }
        assert!(pair.consumer.pending() <= 6);
        let expects_one = pair.consumer.has_next();
        let take = if round % 4 < 2 {
            let take = pair.consumer.take_send(if round % 8 < 4 { QpType::Ud } else { QpType::Rc }, &mut sends);
            assert!(sends.sge_count <= 9 && sends.inline_length <= 200 && sends.flags.0 <= 15);
            take
        } else {
            let take = pair.consumer.take_receive(&mut receives);
            assert!(receives.sge_count <= 9);
            take
        };
        assert_eq!(take != Take::Empty, expects_one);
        assert_eq!(pair.consumer.taken(), taken.wrapping_add(u32::from(expects_one)));
    }
}

/// Two threads, real hardware, a ring that wraps all the time: every request arrives once, whole,
/// in order.
#[test]
fn two_threads_hand_over_every_request() {
    const COUNT: u32 = 50_000;
    let Pair { mut producer, mut consumer, .. } = send_pair(8, 4, 0);
    let library = std::thread::spawn(move || {
        for i in 0..COUNT {
            while i.wrapping_sub(producer.taken()) >= 8 {
                std::thread::yield_now();
            }
            let list = sges(i as usize % 5, i);
            producer.publish_send(&SendDescriptor { sges: &list, ..descriptor(u64::from(i)) });
        }
    });
    let mut got = SendRequest::default();
    for i in 0..COUNT {
        while consumer.take_send(QpType::Rc, &mut got) == Take::Empty {
            std::thread::yield_now();
        }
        assert_eq!(got.work_request_id, u64::from(i));
        assert_eq!(got.sges(), sges(i as usize % 5, i));
    }
    library.join().unwrap();
}

#[test]
fn what_goes_past_the_router_is_counted_over_resets() {
    let Pair { mut producer, consumer, library } = send_pair(4, 1, 0);
    producer.set_path_mtu(PathMtu::Mtu256);
    producer.count_send(0);
    producer.count_send(256);
    producer.count_write(257);
    producer.count_read(1);
    producer.count_read(u32::MAX);
    producer.reset();
    producer.count_send(4);
    let tally = consumer.tally();
    assert_eq!((tally.sends, tally.writes, tally.sent_bytes, tally.sent_packets), (3, 1, 517, 5));
    assert_eq!((tally.reads, tally.read_bytes, tally.read_packets), (2, 1 << 32, 1 + (1 << 24)));
    // They may wrap.
    library.u64(OFFSET + queue::DIRECT_SENT_BYTES).store(u64::MAX, Ordering::Relaxed);
    producer.count_send(4);
    assert_eq!(consumer.tally().sent_bytes, 3);
}

#[test]
fn a_receive_that_was_put_back_is_the_next_one() {
    for is_shared in [false, true] {
        let Pair { mut producer, mut consumer, .. } = pair(QueueShape::receive(4, 1), 4, 1, 0);
        if is_shared {
            consumer.share();
        }
        let mut request = ReceiveRequest::default();
        for lap in 0..6_u32 {
            producer.publish_receive(u64::from(2 * lap), &[]);
            producer.publish_receive(u64::from(2 * lap + 1), &[]);
            for _ in 0..3 {
                assert_eq!(consumer.take_receive(&mut request), Take::Ready);
                assert_eq!((request.ring_position, producer.taken()), (2 * lap, 2 * lap + 1));
                assert!(!consumer.put_back(2 * lap + 1), "not the last that was taken");
                assert!(consumer.put_back(2 * lap) && producer.taken() == 2 * lap);
            }
            // The library, if it may, or the router.
            let by_library = is_shared && producer.claim_receive(2 * lap);
            assert_eq!(by_library, is_shared);
            for next in 2 * lap + u32::from(by_library)..2 * lap + 2 {
                assert_eq!(consumer.take_receive(&mut request), Take::Ready);
                assert_eq!(request.ring_position, next);
            }
        }
    }
}

#[test]
fn a_solicited_datagram_waits_for_its_notification() {
    let Pair { mut producer, consumer, .. } = send_pair(4, 1, 0);
    // Of the ring at place 5 only the first of the two words has come.
    let solicited = producer.view.wide_header::<{ queue::RINGS_SOLICITED }>();
    solicited.fetch_or(1 << 5, Ordering::Relaxed);
    producer.notify_ring(3, false);
    assert_eq!(consumer.take_notified_rings(), (1 << 3, 0));
    producer.notify_ring(5, false);
    assert_eq!(consumer.take_notified_rings(), (1 << 5, 1 << 5));
    producer.notify_ring(5, false);
    assert_eq!(consumer.take_notified_rings(), (1 << 5, 0));
}

#[test]
fn rings_of_datagrams_are_named_by_their_places() {
    let Pair { mut producer, consumer, .. } = send_pair(4, 1, 0);
    assert_eq!(consumer.take_notified_rings(), (0, 0));
    producer.notify_ring(63, false);
    producer.notify_ring(2, true);
    assert_eq!(consumer.take_notified_rings(), (1 << 63 | 1 << 2, 1 << 2));
    assert_eq!(consumer.take_notified_rings(), (0, 0));
    consumer.set_rings_open(1 << 7);
    consumer.set_rings_offered(9);
    assert_eq!((producer.rings_open(), producer.rings_offered()), (1 << 7, 9));
}
