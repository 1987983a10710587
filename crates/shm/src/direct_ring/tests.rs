use super::*;
use crate::segment::foreign_memory;
use std::os::fd::AsFd;

fn ends(credit_count: u32) -> (DirectRingSender, DirectRingReceiver, CreditWriter, Arc<Segment>) {
    ends_with(CreditList::Each(credit_count))
}

fn ends_with(list: CreditList) -> (DirectRingSender, DirectRingReceiver, CreditWriter, Arc<Segment>) {
    let bytes = direct_ring::bytes(list.count());
    let memory = foreign_memory("test", bytes).unwrap();
    let map = || Arc::new(Segment::map(memory.as_fd(), bytes).unwrap());
    let raw = map();
    let (receiver, credits) = DirectRingReceiver::new(map(), list);
    (DirectRingSender::new(map(), list), receiver, credits, raw)
}

fn own() -> OwnMemory {
    // SAFETY: the tests name only their own vectors.
    unsafe { OwnMemory::promised() }
}

fn range(bytes: &[u8]) -> OwnRange {
    OwnRange { address: bytes.as_ptr().expose_provenance() as u64, bytes: bytes.len() as u32 }
}

fn range_mut(bytes: &mut [u8]) -> OwnRange {
    OwnRange { address: bytes.as_mut_ptr().expose_provenance() as u64, bytes: bytes.len() as u32 }
}

fn message(msn: u32, length: u32) -> Staged {
    Staged { length, msn, immediate: msn.wrapping_mul(7), flags: CompletionFlags(0), written: None }
}

#[test]
fn messages_of_all_lengths_come_as_they_were_sent() {
    let (mut sender, mut receiver, _, _) = ends(64);
    let mut sent = 0_u32;
    let lengths = [0, 1, 63, 64, 104, 105, 4096, 32_767, DIRECT_RING_MESSAGE_BYTES_MAX, 17, 30_000];
    for round in 0..40 {
        for length in lengths {
            let bytes: Vec<u8> = (0..length).map(|i| (i as u8).wrapping_add(round)).collect();
            let (first, second) = bytes.split_at(bytes.len() / 3);
            assert!(sender.has_room(length));
            sender.publish(own(), &message(sent, length), &[], &[range(first), range(second)]);
            let staged = receiver.peek().unwrap();
            assert_eq!(staged, message(sent, length));
            let mut got = vec![0_u8; length as usize];
            let (head, tail) = got.split_at_mut(length as usize / 2);
            receiver.copy_out(own(), &staged, [range_mut(head), range_mut(tail)].into_iter());
            assert_eq!(got, bytes);
            receiver.take();
            receiver.commit();
            assert_eq!(receiver.peek(), None);
            sent += 1;
        }
    }
}

#[test]
fn it_fills_and_empties() {
    let (mut sender, mut receiver, _, _) = ends(64);
    let mut count = 0;
    while sender.has_room(8) {
        sender.publish(own(), &message(count, 8), &[1; 8], &[]);
        count += 1;
    }
    assert_eq!(count, DESCRIPTOR_COUNT);
    for expected in 0..count {
        let staged = receiver.peek().unwrap();
        assert_eq!(staged.msn, expected);
        receiver.take();
    }
    assert!(!sender.has_room(8), "nothing was given back yet");
    receiver.commit();
    let mut large = 0;
    while sender.has_room(DIRECT_RING_MESSAGE_BYTES_MAX) {
        let bytes = vec![large as u8; DIRECT_RING_MESSAGE_BYTES_MAX as usize];
        sender.publish(own(), &message(large, DIRECT_RING_MESSAGE_BYTES_MAX), &bytes, &[]);
        large += 1;
    }
    assert_eq!(large, 4);
}

/// Messages at most so many at once, in turns of them: the slots that were used.
fn slots_used(at_once: &[u32]) -> usize {
    let (mut sender, mut receiver, _, _) = ends(64);
    let (mut used, mut sent) = (std::collections::HashSet::new(), 0);
    for &count in at_once {
        for _ in 0..count {
            used.insert(sender.slots.next());
            assert!(sender.has_room(8));
            sender.publish(own(), &message(sent, 8), &[sent as u8; 8], &[]);
            sent += 1;
        }
        assert_eq!(receiver.published(), sent);
        while let Some(staged) = receiver.peek() {
            let mut got = [0; 8];
            receiver.copy_out(own(), &staged, [range_mut(&mut got)].into_iter());
            assert_eq!(got, [staged.msn as u8; 8]);
            receiver.take();
        }
        assert_eq!(receiver.taken(), sent);
        receiver.commit();
    }
    used.len()
}

#[test]
fn no_more_slots_are_used_than_messages_at_once_need() {
    assert_eq!(slots_used(&[1; 1000]), 32);
    assert_eq!(slots_used(&[31; 1000]), 32);
    assert_eq!(slots_used(&[7, 32, 1, 33, 20, 64, 31, 65, 5, 5, 5, 90, 90, 1]), 96);
    assert_eq!(slots_used(&[3, 200, 256, 1, 255, 256, 17, 256, 256]), 256);
}

/// Ends between which so many messages have passed.
fn ends_at(number: u32) -> (DirectRingSender, DirectRingReceiver) {
    let (mut sender, mut receiver, _, raw) = ends(64);
    (sender.next, sender.freed, receiver.taken) = (number, number, number);
    raw.u32(direct_ring::FREED).store(number, Ordering::Relaxed);
    (sender, receiver)
}

/// Also around the wrap, where a slot that nobody wrote has the next number.
#[test]
fn nothing_is_found_that_was_not_published() {
    for start in (1..=8).map(|page| u32::MAX - 32 * page).chain([0, u32::MAX / 2]) {
        let (mut sender, receiver) = ends_at(start);
        for count in 0..DESCRIPTOR_COUNT {
            assert_eq!(receiver.published(), start.wrapping_add(count), "{count} after {start}");
            sender.publish(own(), &message(count, 8), &[1; 8], &[]);
        }
    }
}

#[test]
fn credits_lie_in_the_page_of_the_header_or_behind_the_data() {
    for count in [1, 2, 128, 256, 512, 1 << 14] {
        let (first, end) = (direct_ring::credits(count), direct_ring::credits(count) + count as usize * 8);
        assert!(end <= direct_ring::bytes(count));
        let data_end = direct_ring::DATA + UNIT_BYTES * UNIT_COUNT as usize;
        assert!(first >= data_end || first > direct_ring::FREED + 8 && end <= direct_ring::DESCRIPTORS);
        assert_eq!(first >= data_end, count > 256);
    }
}

#[test]
fn credits_are_of_one_position() {
    let (mut sender, receiver, credits, _) = ends(4);
    assert!(!sender.is_open());
    receiver.open();
    assert!(sender.is_open());
    assert_eq!(sender.credit(0), Credit::Missing);
    credits.publish(0, Some(64));
    credits.publish(1, None);
    credits.publish(2, Some(u32::MAX));
    assert_eq!(sender.credit(0), Credit::Bytes(64));
    assert_eq!(sender.credit(1), Credit::Routed);
    assert_eq!(sender.credit(2), Credit::Bytes(u32::MAX - 1));
    assert_eq!(sender.credit(4), Credit::Missing);
    credits.publish(4, Some(0));
    assert_eq!(sender.credit(4), Credit::Bytes(0));
    assert_eq!(sender.credit(0), Credit::Missing);
}

#[test]
fn a_receiver_that_wants_notification_is_notified() {
    let (sender, mut receiver, _, _) = ends(4);
    assert!(sender.must_notify());
    receiver.want_notifications(false);
    assert!(!sender.must_notify());
    receiver.want_notifications(true);
    assert!(sender.must_notify());
}

/// A sender that scribbles over everything can't make the receiver leave the direct ring, nor more
/// than its RECVs be written.
#[test]
fn a_hostile_sender_reaches_nothing() {
    let (_, mut receiver, _, raw) = ends(4);
    let mut seed = 1_u64;
    for _ in 0..20_000 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = descriptor_at(receiver.slot);
        let length = if seed & 1 == 0 { (seed >> 33) as u32 } else { (seed >> 40) as u32 % 200_000 };
        let head = u64::from(length) | u64::from(receiver.taken.wrapping_add(1)) << 32;
        raw.u64(at).store(head, Ordering::Relaxed);
        raw.u64(at + 8).store(seed, Ordering::Relaxed);
        raw.u64(at + 16).store(seed.rotate_left(17), Ordering::Relaxed);
        let staged = receiver.peek().unwrap();
        assert!(staged.length <= DIRECT_RING_MESSAGE_BYTES_MAX);
        assert_eq!(staged.flags.0 & !(CompletionFlags::WITH_IMMEDIATE | CompletionFlags::SOLICITED), 0);
        let mut buffer = [0x55_u8; 80];
        receiver.copy_out(own(), &staged, [range_mut(&mut buffer[..64])].into_iter());
        assert_eq!(buffer[64..], [0x55; 16]);
        receiver.take();
        receiver.commit();
    }
}

/// A receiver that lies about what it has freed can't make the sender leave the ring, nor publish
/// more than it holds.
#[test]
fn a_hostile_receiver_is_not_believed() {
    let (mut sender, _, _, raw) = ends(4);
    while sender.has_room(8) {
        sender.publish(own(), &message(0, 8), &[0; 8], &[]);
    }
    for lie in [u32::MAX, 1 << 31, 257, u32::MAX - 256] {
        raw.u32(direct_ring::FREED).store(lie, Ordering::Relaxed);
        assert!(!sender.has_room(8), "{lie:#x}");
    }
}

#[test]
fn promised_messages_are_let_in_and_no_more() {
    let (mut sender, mut receiver, _, raw) = ends_with(CreditList::Promised);
    let message = Staged { length: 0, msn: 7, immediate: 0, flags: CompletionFlags(0), written: None };
    assert_eq!(sender.credit(7), Credit::Missing);
    receiver.promise(2, 100);
    for _ in 0..2 {
        assert_eq!(sender.credit(7), Credit::Bytes(100));
        sender.publish(own(), &message, &[], &[]);
    }
    assert_eq!(sender.credit(7), Credit::Missing);
    receiver.take();
    assert_eq!(receiver.taken(), 1);
    receiver.promise(3, 60);
    assert_eq!(sender.credit(7), Credit::Bytes(60));
    // A ring takes no more than it holds, when the receiver promises more.
    raw.u64(direct_ring::credits(1)).store(u64::MAX >> 1, Ordering::Relaxed);
    let mut count = 2;
    while sender.has_room(0) {
        sender.publish(own(), &message, &[], &[]);
        count += 1;
    }
    assert!(count <= DESCRIPTOR_COUNT);
}
