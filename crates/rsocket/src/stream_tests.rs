//! Two streams over a simulated reliable connection: whatever the order of sends, deliveries, reads
//! and shutdowns, the bytes arrive in order, nobody writes where it must not, and whoever keeps
//! polling makes progress.
use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

const RING: u64 = 0x1000_0000;
const GROWN: u64 = 0x1800_0000;
const LIST: u64 = 0x2000_0000;
const GROWN_BYTES: u32 = 20_000;
const KEY: u32 = 77;

/// A request on its way.
#[derive(Debug)]
struct Flight {
    payload: Vec<u8>,
    address: u64,
    immediate: Option<u32>,
    id: u64,
    signaled: bool,
}

/// An end, with the memory that the other writes into.
struct End {
    stream: Stream,
    send_ring: Vec<u8>,
    receive_ring: Vec<u8>,
    grown_send_ring: Vec<u8>,
    grown_receive_ring: Vec<u8>,
    list: Vec<u8>,
    flights: VecDeque<Flight>,
    /// Arrived, not polled yet.
    arrived: VecDeque<u32>,
    done: VecDeque<u64>,
    receives: u32,
    sent: u64,
    read: u64,
}

struct Slots<'a>(&'a mut [u8]);

impl TargetSlots for Slots<'_> {
    fn take(&mut self, slot: usize) -> Option<Target> {
        let entry = &mut self.0[slot * TARGET_BYTES..][..TARGET_BYTES];
        let word = |at: usize| u64::from_ne_bytes(entry[at..at + 8].try_into().unwrap());
        let target = Target::from_words(word(0), word(8))?;
        entry.fill(0);
        Some(target)
    }
}

fn byte_at(position: u64) -> u8 {
    (position ^ position >> 8 ^ position >> 16).wrapping_mul(167) as u8
}

impl End {
    fn new(sizes: Sizes) -> Self {
        let ring = Target { address: RING, key: KEY, bytes: sizes.receive_bytes };
        Self {
            stream: Stream::new(sizes, ring),
            send_ring: vec![0; sizes.send_bytes as usize],
            receive_ring: vec![0; sizes.receive_bytes as usize],
            grown_send_ring: vec![0; GROWN_BYTES as usize],
            grown_receive_ring: vec![0; GROWN_BYTES as usize],
            list: vec![0; TARGET_BYTES * TARGET_COUNT as usize],
            flights: VecDeque::new(),
            arrived: VecDeque::new(),
            done: VecDeque::new(),
            receives: u32::from(sizes.receive_slots),
            sent: 0,
            read: 0,
        }
    }

    fn post(&mut self, write: &ControlWrite) {
        let payload = write.payload.map_or(Vec::new(), |payload| payload.to_vec());
        let Some(_) = write.immediate else { return };
        self.flights.push_back(Flight {
            payload,
            address: write.address,
            immediate: write.immediate,
            id: write.id,
            signaled: true,
        });
    }

    fn send(&mut self, wanted: u32) -> u32 {
        let Some(write) = self.stream.plan_send(wanted, &mut Slots(&mut self.list)) else { return 0 };
        let payload: Vec<u8> = (0..u64::from(write.bytes)).map(|i| byte_at(self.sent + i)).collect();
        let payload = match write.source {
            Source::Inline => payload,
            Source::Ring(spans) => {
                let mut from = 0;
                for span in spans {
                    let bytes = span.bytes as usize;
                    let ring = match span.ring {
                        Ring::First => &mut self.send_ring,
                        Ring::Grown => &mut self.grown_send_ring,
                    };
                    ring[span.offset as usize..][..bytes].copy_from_slice(&payload[from..from + bytes]);
                    from += bytes;
                }
                assert_eq!(from, payload.len());
                payload
            }
        };
        self.sent += u64::from(write.bytes);
        let Write { address, immediate, id, signaled, .. } = write;
        self.flights.push_back(Flight { payload, address, immediate, id, signaled });
        write.bytes
    }

    fn poll(&mut self) {
        while let Some(id) = self.done.pop_front() {
            self.stream.handle_sent(id, true);
        }
        while let Some(bits) = self.arrived.pop_front() {
            self.receives += 1;
            self.stream.handle_message(bits);
        }
        if let Some(write) = self.stream.poll_credits() {
            self.post(&write);
        }
    }

    fn read(&mut self, wanted: usize) -> usize {
        let spans = self.stream.readable(wanted);
        let mut total = 0;
        for span in spans {
            let ring = match span.ring {
                Ring::First => &self.receive_ring,
                Ring::Grown => &self.grown_receive_ring,
            };
            for byte in &ring[span.offset as usize..][..span.bytes as usize] {
                assert_eq!(*byte, byte_at(self.read), "byte {}", self.read);
                self.read += 1;
            }
            total += span.bytes;
        }
        self.stream.consume(total);
        if let Some(write) = self.stream.poll_credits() {
            self.post(&write);
        }
        total as usize
    }
}

/// Carries out the oldest request of `from`, if the other end has a receive request for it.
fn deliver(from: &mut End, to: &mut End) -> bool {
    let Some(flight) = from.flights.front() else { return false };
    if flight.immediate.is_some() && to.receives == 0 {
        return false;
    }
    let flight = from.flights.pop_front().unwrap();
    if !flight.payload.is_empty() {
        let (memory, base) = match flight.address {
            LIST.. => (&mut to.list, LIST),
            GROWN.. => (&mut to.grown_receive_ring, GROWN),
            _ => (&mut to.receive_ring, RING),
        };
        let at = (flight.address - base) as usize;
        memory[at..at + flight.payload.len()].copy_from_slice(&flight.payload);
    }
    if let Some(bits) = flight.immediate {
        to.receives -= 1;
        to.arrived.push_back(bits);
    }
    if flight.signaled {
        from.done.push_back(flight.id);
    }
    true
}

fn pair(a: Sizes, b: Sizes) -> [End; 2] {
    let mut ends = [End::new(a), End::new(b)];
    let list = Target { address: LIST, key: KEY, bytes: 0 };
    let data = [0, 1].map(|end: usize| ends[end].stream.connection_data(list).to_bytes());
    for (end, data) in ends.iter_mut().zip([data[1], data[0]]) {
        end.stream.handle_connection_data(&ConnectionData::from_bytes(&data).unwrap());
        end.stream.open();
        end.poll();
    }
    ends
}

fn two(ends: &mut [End; 2], first: usize) -> (&mut End, &mut End) {
    let [a, b] = ends;
    if first == 0 { (a, b) } else { (b, a) }
}

/// Runs until nothing moves any more.
fn settle(ends: &mut [End; 2]) {
    let mut moved = true;
    while moved {
        moved = false;
        for end in [0, 1] {
            let (one, other) = two(ends, end);
            moved |= deliver(one, other);
            one.poll();
            moved |= one.read(usize::MAX) != 0;
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Send(usize, u32),
    Deliver(usize),
    Poll(usize),
    Read(usize, usize),
    GrowSend(usize),
    GrowReceive(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let end = 0..2usize;
    proptest::collection::vec(
        prop_oneof![
            3 => (end.clone(), prop_oneof![1u32..100, 1u32..9000]).prop_map(|(end, bytes)| Step::Send(end, bytes)),
            4 => end.clone().prop_map(Step::Deliver),
            2 => end.clone().prop_map(Step::Poll),
            2 => (end.clone(), 1usize..6000).prop_map(|(end, bytes)| Step::Read(end, bytes)),
            1 => end.clone().prop_map(Step::GrowSend),
            1 => end.prop_map(Step::GrowReceive),
        ],
        0..400,
    )
}

fn sizes() -> impl Strategy<Value = Sizes> {
    (1u32..9000, 2u32..9000, 16u16..40, 16u16..40, prop_oneof![Just(0u32), Just(64), Just(200)]).prop_map(
        |(send_bytes, receive_bytes, send_slots, receive_slots, inline_bytes)| Sizes {
            send_bytes,
            receive_bytes,
            send_slots,
            receive_slots,
            inline_bytes,
            iomap_count: 0,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_stream_keeps_its_bytes(a in sizes(), b in sizes(), steps in steps(), close in 0..2usize) {
        let mut ends = pair(a, b);
        for step in steps {
            match step {
                Step::Send(end, bytes) => { ends[end].send(bytes); }
                Step::Deliver(end) => { let (one, other) = two(&mut ends, end); deliver(one, other); }
                Step::Poll(end) => ends[end].poll(),
                Step::Read(end, bytes) => { ends[end].read(bytes); }
                Step::GrowSend(end) => ends[end].stream.grow_send_ring(GROWN_BYTES),
                Step::GrowReceive(end) => {
                    ends[end].stream.grow_receive_ring(Target { address: GROWN, key: KEY, bytes: GROWN_BYTES });
                }
            }
            prop_assert!(ends.iter().all(|end| end.stream.state().is_open()));
        }
        settle(&mut ends);
        prop_assert_eq!(ends[0].sent, ends[1].read);
        prop_assert_eq!(ends[1].sent, ends[0].read);
        // Nothing is stuck: both can send again, and the last bytes arrive before the end does.
        for end in [0, 1] {
            prop_assert!(ends[end].send(3000) > 0, "end {} is stuck: {:?}", end, ends[end].stream);
        }
        let control = ends[close].stream.shut(Direction::Write).unwrap();
        prop_assert_eq!(control, Control::Shutdown);
        let write = ends[close].stream.plan_control(control).unwrap();
        ends[close].post(&write);
        prop_assert_eq!(ends[close].send(1), 0);
        settle(&mut ends);
        prop_assert_eq!(ends[close].sent, ends[1 - close].read);
        prop_assert_eq!(ends[1 - close].stream.state(), State::Open(Ways::SendOnly));
        prop_assert_eq!(ends[1 - close].stream.shut(Direction::Write), Some(Control::Disconnect));
        let write = ends[1 - close].stream.plan_control(Control::Disconnect).unwrap();
        ends[1 - close].post(&write);
        settle(&mut ends);
        prop_assert!(ends.iter().all(|end| end.stream.state() == State::Disconnected));
    }

    /// An enemy's messages end the connection at worst.
    #[test]
    fn any_messages(a in sizes(), messages in proptest::collection::vec(any::<u32>(), 0..200)) {
        let mut ends = pair(a, a);
        for bits in messages {
            ends[0].stream.handle_message(bits);
            let _ = ends[0].stream.poll_credits();
            let spans = ends[0].stream.readable(usize::MAX);
            let bytes: u32 = spans.iter().map(|span| span.bytes).sum();
            prop_assert!(spans.iter().all(|span| span.offset + span.bytes <= a.receive_bytes));
            ends[0].stream.consume(bytes);
        }
    }

    /// Neither do its private data.
    #[test]
    fn any_connection_data(a in sizes(), data in proptest::array::uniform32(any::<u8>()), tail: [u8; 8], wanted in 1u32..) {
        let mut bytes = [&data[..], &tail[..]].concat();
        bytes[0] = 1;
        let mut end = End::new(a);
        end.stream.handle_connection_data(&ConnectionData::from_bytes(&bytes).unwrap());
        end.stream.open();
        let _ = end.stream.poll_credits();
        let _ = end.stream.plan_send(wanted, &mut Slots(&mut end.list));
        let _ = end.stream.plan_iomap(3);
    }
}

const SIZES: Sizes = Sizes {
    send_bytes: 1 << 17,
    receive_bytes: 1 << 17,
    send_slots: 384,
    receive_slots: 384,
    inline_bytes: 64,
    iomap_count: 4,
};

/// First messages of rdma-core, and how often it grants room: compare with the recorded connection.
#[test]
fn first_messages() {
    let mut ends = pair(SIZES, SIZES);
    let flight = ends[0].flights.pop_front().unwrap();
    assert_eq!(flight.immediate, Some(0x8000_0180));
    assert_eq!(flight.address, LIST + 16);
    assert_eq!(
        flight.payload,
        Target { address: RING + (1 << 16), key: KEY, bytes: 1 << 16 }.to_memory(ByteOrder::Ours)
    );
    assert!(ends[0].flights.is_empty());
    let write = ends[0].stream.plan_send(1000, &mut Slots(&mut ends[0].list)).unwrap();
    assert_eq!((write.address, write.immediate, write.signaled), (RING, Some(1000), false));
    let write = ends[0].stream.plan_send(64, &mut Slots(&mut ends[0].list)).unwrap();
    assert_eq!((write.source, write.address, write.signaled), (Source::Inline, RING + 1000, false));
}

#[test]
fn credits_run_out_and_come_back() {
    let mut ends = pair(SIZES, SIZES);
    settle(&mut ends);
    let mut sent = 0;
    while ends[0].send(1) == 1 {
        sent += 1;
        let (one, other) = two(&mut ends, 0);
        deliver(one, other);
        while let Some(id) = one.done.pop_front() {
            one.stream.handle_sent(id, true);
        }
        other.poll();
    }
    assert_eq!(sent, 384, "as many messages as the other end has places for");
    settle(&mut ends);
    assert_eq!(ends[0].send(1), 1);
}

#[test]
fn a_mapping_is_announced_and_written() {
    let mut ends = pair(SIZES, SIZES);
    settle(&mut ends);
    let write = ends[0].stream.plan_iomap(3).unwrap();
    assert_eq!((write.address, write.immediate, write.bytes), (LIST + 64 + 3 * 24, Some(0xC000_0003), 24));
    assert!(ends[0].stream.plan_iomap(4).is_none());
    let entry = IomapEntry { offset: 1000, target: Target { address: 0x5000, key: 9, bytes: 100 } };
    let write = ends[1].stream.plan_direct(500, &entry, 1010).unwrap();
    assert_eq!((write.address, write.key, write.bytes, write.immediate), (0x500A, 9, 90, None));
    assert!(ends[1].stream.plan_direct(1, &entry, 1100).is_none());
    assert!(ends[1].stream.plan_direct(1, &entry, 999).is_none());
}

#[test]
fn more_than_was_granted_is_a_breach() {
    let mut ends = pair(SIZES, SIZES);
    ends[0].stream.handle_message(Message::Data(1 << 17).to_bits());
    ends[0].stream.handle_message(Message::Data(1).to_bits());
    assert_eq!(ends[0].stream.state(), State::Failed(Failure::Protocol));
    assert_eq!(ends[0].stream.readable(usize::MAX).map(|span| span.bytes), [1 << 17, 0]);
}

#[test]
fn a_failed_request_fails_the_connection() {
    let mut ends = pair(SIZES, SIZES);
    ends[0].send(1000);
    let flight = ends[0].flights.pop_back().unwrap();
    ends[0].stream.handle_sent(flight.id, false);
    assert_eq!(ends[0].stream.state(), State::Failed(Failure::Transport));
    assert!(ends[0].stream.plan_control(Control::Disconnect).is_none());
}

/// The rooms that `from` is granted, in order.
fn granted(from: &mut End) -> Vec<(u64, u32)> {
    let grants = from.flights.iter().filter(|flight| flight.payload.len() == TARGET_BYTES && flight.address >= LIST);
    let word = |payload: &[u8], at: usize| u64::from_ne_bytes(payload[at..at + 8].try_into().unwrap());
    let target = |payload: &[u8]| Target::from_words(word(payload, 0), word(payload, 8)).unwrap();
    grants.map(|grant| target(&grant.payload)).map(|target| (target.address, target.bytes)).collect()
}

/// Room is granted by quarters to who has entries for four, and by halves to rdma-core, which has
/// two.
#[test]
fn room_is_granted_in_as_many_parts_as_can_be_sent() {
    for (entries, part) in [(4, 1 << 15), (2, 1 << 16), (9, 1 << 15)] {
        let mut ends = pair(SIZES, SIZES);
        settle(&mut ends);
        ends[1].stream.receiving.list.bytes = entries;
        while ends[0].send(1000) != 0 {
            let (one, other) = two(&mut ends, 0);
            deliver(one, other);
            one.poll();
        }
        ends[1].poll();
        assert_eq!(ends[1].read(part as usize - 1), part as usize - 1);
        assert_eq!(granted(&mut ends[1]), []);
        ends[1].read(1);
        assert_eq!(granted(&mut ends[1]), [(RING, part)]);
    }
}

#[test]
fn who_waits_for_room_gets_much_at_once() {
    let mut ends = pair(Sizes { receive_bytes: 1 << 20, ..SIZES }, Sizes { receive_bytes: 1 << 20, ..SIZES });
    settle(&mut ends);
    while ends[0].send(4096) != 0 {}
    let signaled = ends[0].flights.iter().filter(|flight| flight.signaled).count();
    assert_eq!((ends[0].flights.len(), signaled), (32, 6), "a completion for each eighth of the ring");
    for (_, room) in [(1, 0), (2, 0), (3, 0), (4, 0), (5, 5 * 4096)] {
        let (one, other) = two(&mut ends, 0);
        deliver(one, other);
        one.poll();
        assert_eq!(one.send(1 << 16), room);
    }
    settle(&mut ends);
    assert!(!ends[0].stream.has_under_way(1 << 15), "all but what no completion was asked for");
}

#[test]
fn buffers_of_the_default_size_are_outgrown() {
    let sizes = Sizes { send_bytes: BUFFER_BYTES, receive_bytes: BUFFER_BYTES, ..SIZES };
    let mut ends = pair(sizes, sizes);
    let limit = u64::from(BUFFER_BYTES) * GROWTH_RINGS;
    while ends[0].sent < limit {
        assert!(!ends[0].stream.outgrows_send_ring() && !ends[1].stream.outgrows_receive_ring());
        assert!(ends[0].send(1 << 16) > 0);
        settle(&mut ends);
    }
    assert!(ends[0].stream.outgrows_send_ring() && ends[1].stream.outgrows_receive_ring());
    ends[0].stream.grow_send_ring(GROWN_BYTES);
    ends[1].stream.grow_receive_ring(Target { address: GROWN, key: KEY, bytes: GROWN_BYTES });
    assert!(!ends[0].stream.outgrows_send_ring() && !ends[1].stream.outgrows_receive_ring());
    // The granted room is still good; when it is used up, the longer ring is granted as a whole.
    let granted = ends[1].stream.receiving.granted;
    assert!(granted > 0);
    while ends[0].sent < limit + u64::from(granted) + 100_000 {
        assert!(ends[0].send(1 << 14) > 0);
        settle(&mut ends);
    }
    assert_eq!((ends[0].stream.sending.ring, ends[1].stream.receiving.ring), (Ring::Grown, Ring::Grown));
    assert_eq!(ends[0].sent, ends[1].read);
}
