//! Sealed packets over real sockets: what leaves, what is taken, and how keys change. Needs root.
mod lab;

use freeflow_backend::{
    CaptureSink, Captured, Direction, Faults, KEY_HELD_NS, KEY_TIME_NS, KeyOffer, Peer, Udp, UdpConfig,
};
use freeflow_shm::Segment;
use freeflow_wire::frame::Frame;
use freeflow_wire::sealed::{SEAL_BYTES, SealHeader, is_sealed};
use freeflow_wire::{
    BTH_BYTES, Header, ICRC_BYTES, Opcode, Operation, PacketPosition, REPLAY_WINDOW, Service, UDP_PORT,
};
use lab::{Namespace, PEER, once_free, packet, peer, receive, receive_numbers, route, send};
use std::net::UdpSocket;
use std::sync::{Arc, Mutex};

const FLOW: u32 = 7;
const MARKED: &[u8] = b"nobody else's business, and long enough to be found";

/// Two backends on one loopback that seal what they send each other; they have no keys.
fn sealed(change: impl Fn(&mut UdpConfig, &mut Peer), v6: bool) -> (Namespace, Udp, Udp) {
    let seal = |config: &mut UdpConfig, peer: &mut Peer| {
        (config.frames, peer.sealed) = (true, true);
        change(config, peer);
    };
    lab::loopback(seal, v6)
}

/// The other one takes a key, and says so.
fn bring(offer: &KeyOffer, from: &mut Udp, to: &mut Udp, now_ns: u64) {
    assert!(to.accept_key(PEER, now_ns, offer));
    assert!(from.use_key(PEER, now_ns, offer.id));
}

fn introduce(from: &mut Udp, to: &mut Udp) {
    let offer = from.offer_key(PEER, 0).expect("random bits").expect("it is sealed");
    bring(&offer, from, to, 0);
}

/// With a key for what the first sends the second.
fn keyed(change: impl Fn(&mut UdpConfig, &mut Peer), v6: bool) -> (Namespace, Udp, Udp) {
    let (namespace, mut from, mut to) = sealed(change, v6);
    introduce(&mut from, &mut to);
    (namespace, from, to)
}

fn frame(psn: u32, payload: &[u8]) -> Vec<u8> {
    let opcode = Opcode::new(Service::Rc, Operation::Write, PacketPosition::Only).expect("the standard has it");
    let header = Header { frame: Some(Frame::default()), ..Header::new(opcode, 0x11, psn) };
    [header.encode().as_slice(), payload].concat()
}

fn send_frame(udp: &mut Udp, bytes: &[u8]) {
    let place = udp.reserve_frame(route(PEER, FLOW, 0), bytes.len()).expect("room");
    place.copy_from_slice(bytes);
    udp.commit();
}

/// A bare socket that hears what is sent to the second host, in its place.
fn spy(namespace: &Namespace, address: &str) -> UdpSocket {
    let socket = namespace.run(|| once_free(|| UdpSocket::bind((address, UDP_PORT))));
    socket.set_read_timeout(Some(std::time::Duration::from_secs(20))).expect("timeout");
    socket
}

fn heard(spy: &UdpSocket, count: usize) -> Vec<Vec<u8>> {
    let mut buffer = vec![0; 1 << 16];
    let mut next = || {
        let (bytes, _) = spy.recv_from(&mut buffer).expect("a datagram");
        buffer[..bytes].to_vec()
    };
    (0..count).map(|_| next()).collect()
}

#[test]
fn packets_and_frames_arrive_as_they_were_written() {
    for variant in 0..8 {
        let (gso, gro, v6) = (variant & 1 != 0, variant & 2 != 0, variant & 4 != 0);
        let (_namespace, mut from, mut to) =
            keyed(|config: &mut UdpConfig, _: &mut Peer| (config.gso, config.gro) = (gso, gro), v6);
        let mut expected = Vec::new();
        for psn in 0..200_u32 {
            let bytes = if psn % 13 == 12 { 100 } else { 4096 };
            if psn % 3 == 0 {
                let packet = packet(psn, bytes);
                send(&mut from, PEER, FLOW, &packet);
                expected.push(packet);
            } else {
                let frame = frame(psn, &vec![psn as u8; bytes]);
                send_frame(&mut from, &frame);
                expected.push(frame);
            }
        }
        from.flush();
        let mut found = Vec::new();
        receive(&mut to, 200, |received| found.push(received.packet.to_vec()));
        assert!(found == expected, "{variant}: {:?}", to.counters());
        assert_eq!((from.counters().packets_sent, from.counters().no_key), (200, 0));
        assert_eq!(from.counters().bytes_sent, to.counters().bytes_received);
    }
}

#[test]
fn equal_frames_make_batches_as_they_do_plain() {
    let (_namespace, mut from, mut to) = keyed(|_, _| {}, false);
    for psn in 0..60 {
        send_frame(&mut from, &frame(psn, &[psn as u8; 4096]));
    }
    from.flush();
    assert_eq!(from.counters().batches_sent, 4, "15 of them in each");
    assert_eq!(receive_numbers(&mut to, 60), (0..60).collect::<Vec<_>>());
}

#[test]
fn nothing_of_a_packet_is_in_the_clear_and_no_number_comes_twice() {
    let (namespace, mut from, to) = keyed(|_, _| {}, false);
    drop(to);
    let spy = spy(&namespace, "10.0.0.2");
    for psn in 0..20 {
        send_frame(&mut from, &frame(psn, MARKED));
        send(&mut from, PEER, FLOW, &[packet(psn, 64).as_slice(), MARKED].concat());
        from.flush();
    }
    let mut numbers = Vec::new();
    for datagram in heard(&spy, 40) {
        assert!(is_sealed(&datagram));
        assert!(!datagram.windows(8).any(|part| part == &MARKED[..8]));
        numbers.push(SealHeader::parse(&datagram).expect("sealed").0.counter);
    }
    numbers.sort_unstable();
    assert_eq!(numbers, (0..40).collect::<Vec<_>>());
}

#[test]
fn without_a_key_nothing_leaves() {
    let (namespace, mut from, to) = sealed(|_, _| {}, false);
    drop(to);
    let spy = spy(&namespace, "10.0.0.2");
    assert!(!from.takes(PEER));
    assert!(from.reserve(route(PEER, FLOW, 0), 64).is_none());
    let offer = from.offer_key(PEER, 0).expect("random bits").expect("it is sealed");
    assert!(
        !from.takes(PEER) && from.reserve_frame(route(PEER, FLOW, 0), 64).is_none(),
        "the other one may not have it"
    );
    assert!(!from.use_key(PEER, 0, offer.id ^ 1));
    assert!(from.use_key(PEER, 0, offer.id));
    send(&mut from, PEER, FLOW, &packet(1, 64));
    from.flush();
    assert_eq!(heard(&spy, 1)[0].len(), 64 + ICRC_BYTES + SEAL_BYTES);
    assert_eq!((from.counters().no_key, from.counters().keys_used), (2, 1));
}

#[test]
fn payload_is_never_referred_to() {
    let (segment, _fd) = Segment::create_sealable("sealed", 8192).expect("memory");
    let (segment, (_namespace, mut from, _to)) = (Arc::new(segment), keyed(|_, _| {}, false));
    assert!(!from.refers(PEER, 4096));
    assert!(!from.refer(route(PEER, FLOW, 0), &frame(1, b""), &segment, (0, 4096)), "not even if it is asked for");
    assert!(!from.has_unsent());
}

#[test]
fn a_peer_that_becomes_sealed_gets_nothing_plain_any_more() {
    let (namespace, mut from, to) = lab::loopback(|_, _| {}, false);
    drop(to);
    let spy = spy(&namespace, "10.0.0.2");
    for again in [false, true] {
        send(&mut from, PEER, FLOW, &packet(1, 64));
        if again {
            from.set_peer(PEER, Peer { sealed: true, ..peer("10.0.0.1", "10.0.0.2") }).expect("peer");
        } else {
            from.set_sealed(PEER);
        }
        assert!(!from.has_unsent(), "it was batched, and is gone");
        from.flush();
        from.set_peer(PEER, peer("10.0.0.1", "10.0.0.2")).expect("peer");
    }
    from.set_sealed(PEER);
    let offer = from.offer_key(PEER, 0).expect("random bits").expect("it is sealed");
    assert!(from.use_key(PEER, 0, offer.id));
    send(&mut from, PEER, FLOW, &packet(2, 64));
    // Other settings change neither its key nor its count.
    from.set_peer(PEER, Peer { sealed: true, ..peer("10.0.0.1", "10.0.0.2") }).expect("peer");
    send(&mut from, PEER, FLOW, &packet(3, 64));
    from.flush();
    let numbers =
        heard(&spy, 2).iter().map(|datagram| SealHeader::parse(datagram).map(|it| it.0.counter)).collect::<Vec<_>>();
    assert_eq!(numbers, [Some(0), Some(1)]);
    assert_eq!(from.counters().no_key, 2);
}

#[test]
fn forgeries_are_dropped_by_their_reason() {
    let (namespace, mut from, to) = keyed(|_, _| {}, false);
    drop(to);
    let spy = spy(&namespace, "10.0.0.2");
    for psn in 0..2 {
        send(&mut from, PEER, FLOW, &packet(psn, 64));
        from.flush();
    }
    let good = heard(&spy, 2);
    drop(spy);
    // The same host again, with a key that it never had, and one that it gets now.
    let mut to = namespace.open(UdpConfig { frames: true, ..lab::config("10.0.0.2") });
    to.set_peer(PEER, Peer { sealed: true, ..peer("10.0.0.2", "10.0.0.1") }).expect("peer");
    drop(from);
    let mut from = namespace.open(UdpConfig { frames: true, ..lab::config("10.0.0.1") });
    from.set_peer(PEER, Peer { sealed: true, ..peer("10.0.0.1", "10.0.0.2") }).expect("peer");
    introduce(&mut from, &mut to);
    // An attacker that has the host's address.
    let forger = namespace.run(|| UdpSocket::bind(("10.0.0.1", 0)).expect("bind"));
    let say = |bytes: &[u8]| assert_eq!(forger.send_to(bytes, ("10.0.0.2", UDP_PORT)).expect("sent"), bytes.len());
    good.iter().for_each(|datagram| say(datagram));
    let plain = packet(9, 64);
    say(&[plain.as_slice(), &[0; ICRC_BYTES]].concat());
    say(&frame(9, &[1; 64]));
    say(&[]);
    say(&good[0][..SEAL_BYTES - 1]);
    send(&mut from, PEER, FLOW, &packet(5, 64));
    from.flush();
    let mut numbers = Vec::new();
    receive(&mut to, 7, |received| numbers.push(Header::parse(received.packet).expect("header").0.psn));
    assert_eq!(numbers, [5]);
    let counters = to.counters();
    assert_eq!((counters.unknown_key, counters.unsealed, counters.truncated), (2, 3, 1), "{counters:?}");
}

#[test]
fn a_copy_is_taken_once_and_a_changed_one_not_at_all() {
    let (namespace, mut from, to) = keyed(|_, _| {}, false);
    drop(to);
    let spy = spy(&namespace, "10.0.0.2");
    send(&mut from, PEER, FLOW, &packet(1, 64));
    let offer = from.offer_key(PEER, 0).expect("random bits").expect("it is sealed");
    assert!(from.use_key(PEER, 0, offer.id));
    send(&mut from, PEER, FLOW, &packet(2, 64));
    from.flush();
    let [_, good] = <[Vec<u8>; 2]>::try_from(heard(&spy, 2)).expect("two");
    drop(spy);
    let mut to = namespace.open(UdpConfig { frames: true, gro: false, ..lab::config("10.0.0.2") });
    to.set_peer(PEER, Peer { sealed: true, ..peer("10.0.0.2", "10.0.0.1") }).expect("peer");
    assert!(to.accept_key(PEER, 0, &offer));
    let forger = namespace.run(|| UdpSocket::bind(("10.0.0.1", 0)).expect("bind"));
    let mut changed = 0;
    // Byte 4 names the engine that the packet is for.
    for byte in [4, 5, 11, 12, 40, good.len() - 1] {
        let mut other = good.clone();
        other[byte] ^= 0x10;
        forger.send_to(&other, ("10.0.0.2", UDP_PORT)).expect("sent");
        changed += 1;
    }
    for _ in 0..10 {
        forger.send_to(&good, ("10.0.0.2", UDP_PORT)).expect("sent");
    }
    assert_eq!(receive_numbers(&mut to, changed + 10), [2]);
    let counters = to.counters();
    assert_eq!((counters.wrong_shard, counters.bad_tag, counters.replayed), (1, changed as u64 - 1, 9));
}

#[test]
fn a_plain_host_takes_nothing_sealed() {
    let only_one = |config: &mut UdpConfig, peer: &mut Peer| {
        (config.frames, peer.sealed) = (true, config.addresses[0] == lab::address("10.0.0.1"));
    };
    let (_namespace, mut from, mut to) = lab::loopback(only_one, false);
    let offer = from.offer_key(PEER, 0).expect("random bits").expect("it is sealed");
    assert!(from.use_key(PEER, 0, offer.id));
    send(&mut from, PEER, FLOW, &packet(1, 64));
    from.flush();
    assert_eq!(receive_numbers(&mut to, 1), []);
    assert_eq!(to.counters().unknown_key, 1);
    assert!(!to.accept_key(PEER, 0, &offer), "nor a key");
    assert_eq!(to.offer_key(PEER, 0).expect("nothing drawn"), None);
    // And the other way.
    send(&mut to, PEER, FLOW, &packet(2, 64));
    to.flush();
    assert_eq!(receive_numbers(&mut from, 1), []);
    assert_eq!(from.counters().unsealed, 1);
}

#[test]
fn keys_change_under_traffic_and_no_packet_is_lost() {
    const KEY_PACKETS: u64 = 100;
    let change = |config: &mut UdpConfig, _: &mut Peer| config.key_packets = KEY_PACKETS;
    let (_namespace, mut from, mut to) = keyed(change, false);
    let (mut psn, mut now_ns, mut waiting, mut ids) = (0, 1, None, Vec::new());
    for round in 0..200 {
        for _ in 0..17 {
            send_frame(&mut from, &frame(psn, &[psn as u8; 256]));
            psn += 1;
        }
        from.flush();
        // The other host's word comes a round later than the key gets there: some packets are still of the old one.
        if let Some(id) = waiting.take() {
            assert!(from.use_key(PEER, now_ns, id));
        }
        if from.keys_due_ns() <= now_ns
            && let Some((index, offer)) = from.poll_key(now_ns)
        {
            assert_eq!((index, offer.in_use), (PEER, ids.last().copied().or(offer.in_use)));
            ids.push(offer.id);
            assert!(to.accept_key(PEER, now_ns, &offer));
            waiting = Some(offer.id);
        }
        // Only now, so that packets of both keys are in the socket.
        if round % 3 == 2 {
            let taken = receive_numbers(&mut to, 3 * 17);
            assert_eq!(taken, (psn - 3 * 17..psn).collect::<Vec<_>>(), "round {round}");
        }
        assert_eq!(to.poll_key(now_ns), None, "a receiver has nothing to offer");
        now_ns += 1;
    }
    let (sent, received) = (from.counters(), to.counters());
    assert!(sent.keys_used >= u64::from(psn) / (KEY_PACKETS + 4 * 17), "{sent:?}");
    assert_eq!((received.unknown_key, received.bad_tag, received.replayed, sent.no_key), (0, 0, 0, 0));
}

#[test]
fn a_key_is_replaced_when_its_time_is_over() {
    let (_namespace, mut from, mut to) = keyed(|_, _| {}, false);
    assert_eq!(from.poll_key(1), None);
    assert_eq!(from.keys_due_ns(), KEY_TIME_NS);
    assert_eq!(from.poll_key(KEY_TIME_NS - 1), None);
    let (_, offer) = from.poll_key(KEY_TIME_NS).expect("another key");
    send(&mut from, PEER, FLOW, &packet(1, 64));
    bring(&offer, &mut from, &mut to, KEY_TIME_NS);
    send(&mut from, PEER, FLOW, &packet(2, 64));
    from.flush();
    assert_eq!(receive_numbers(&mut to, 2), [1, 2]);
    assert_eq!(from.poll_key(KEY_TIME_NS), None);
    assert_eq!(from.keys_due_ns(), 2 * KEY_TIME_NS);
    // The receiver forgets the old one a while after the first packet of the new one.
    assert_eq!(to.poll_key(KEY_TIME_NS), None);
    assert_eq!(to.keys_due_ns(), KEY_TIME_NS + KEY_HELD_NS);
    assert_eq!(to.poll_key(KEY_TIME_NS + KEY_HELD_NS), None);
    assert_eq!(to.keys_due_ns(), u64::MAX);
}

#[test]
fn packets_of_several_sockets_come_in_any_order() {
    let (_namespace, mut from, mut to) = keyed(|_, _| {}, false);
    let flows = 64;
    let mut expected = Vec::new();
    for psn in 0..4000 {
        send(&mut from, PEER, psn % flows, &packet(psn, 64));
        expected.push(psn);
    }
    from.flush();
    let mut taken = receive_numbers(&mut to, 4000);
    assert_ne!(taken, expected, "batches of one socket overtake those of another");
    taken.sort_unstable();
    assert_eq!((taken, to.counters().replayed), (expected, 0));
    const { assert!(REPLAY_WINDOW >= 4096) }
}

#[test]
fn damage_on_purpose_and_copies_are_found() {
    let (_namespace, mut from, mut to) = keyed(|_, _| {}, false);
    from.set_faults(Some(Faults { seed: 3, corrupt_ppm: 500_000, ..Faults::default() }));
    for psn in 0..100 {
        send_frame(&mut from, &frame(psn, &[9; 300]));
        from.flush();
    }
    let damaged = from.counters().injected_corruption;
    assert!((30..70).contains(&damaged), "{damaged}");
    let mut arrived = 0;
    receive(&mut to, 100, |_| arrived += 1);
    let counters = to.counters();
    assert_eq!((arrived, counters.bad_tag + counters.unknown_key + counters.unsealed), (100 - damaged, damaged));
    // A packet that is sent twice is sealed twice: the engine's duplicates are those of a real network's retries.
    from.set_faults(Some(Faults { seed: 3, duplicate_ppm: 1_000_000, ..Faults::default() }));
    for psn in 0..10 {
        send_frame(&mut from, &frame(psn, &[9; 300]));
    }
    from.flush();
    from.set_faults(None);
    from.flush();
    assert_eq!(receive_numbers(&mut to, 20).len(), 20);
    assert_eq!(to.counters().replayed, 0);
}

/// Packets of a capture.
type Kept = Arc<Mutex<Vec<(Direction, Vec<u8>)>>>;

struct Sink(Kept);

impl CaptureSink for Sink {
    fn packet(&mut self, packet: &Captured<'_>) {
        self.0.lock().expect("sink").push((packet.direction, packet.bytes.to_vec()));
    }
}

#[test]
fn a_capture_shows_what_is_inside() {
    let (namespace, mut from, mut to) = keyed(|_, _| {}, false);
    let kept = Kept::default();
    from.set_capture(Some(Box::new(Sink(kept.clone()))));
    to.set_capture(Some(Box::new(Sink(kept.clone()))));
    let (frame, packet) = (frame(1, MARKED), packet(2, BTH_BYTES + 4));
    send_frame(&mut from, &frame);
    send(&mut from, PEER, FLOW, &packet);
    from.flush();
    receive(&mut to, 2, |_| {});
    let packet = [packet.as_slice(), &[0; ICRC_BYTES]].concat();
    let sides = [Direction::Sent, Direction::Received];
    let inside = sides.map(|side| [(side, frame.clone()), (side, packet.clone())]).concat();
    assert_eq!(*kept.lock().expect("sink"), inside);
    // A forgery is shown as it came.
    let forger = namespace.run(|| UdpSocket::bind(("10.0.0.1", 0)).expect("bind"));
    forger.send_to(&frame, ("10.0.0.2", UDP_PORT)).expect("sent");
    receive(&mut to, 1, |_| panic!("it is not taken"));
    assert_eq!(kept.lock().expect("sink").last(), Some(&(Direction::Received, frame)));
}
