//! Frames over real sockets: payload that is copied, or read by the kernel from where it lies. Needs root.
mod lab;

use freeflow_backend::{CaptureSink, Captured, Faults, Peer, REFERENCE_BYTES_MIN, Udp, UdpConfig};
use freeflow_shm::Segment;
use freeflow_wire::frame::{FRAME_HEADER_BYTES, Frame};
use freeflow_wire::records::{Record, Records, RecordsWriter};
use freeflow_wire::{Header, Opcode, Operation, PacketPosition, Reth, Service};
use lab::{Namespace, PEER, config, let_neighbour_answer, packet, peer, receive, route, send, veth};
use rustix::fs::{FallocateFlags, fallocate};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

const PAGE_BYTES: usize = 4096;
const FLOW: u32 = 7;

/// Two backends on one loopback that agreed on frames.
fn loopback(change: impl Fn(&mut UdpConfig, &mut Peer), v6: bool) -> (Namespace, Udp, Udp) {
    let with_frames = |config: &mut UdpConfig, peer: &mut Peer| {
        config.frames = true;
        change(config, peer);
    };
    lab::loopback(with_frames, v6)
}

/// A segment whose pages each begin with their number and are full of it.
fn memory(pages: usize) -> (Arc<Segment>, OwnedFd) {
    let (segment, fd) = Segment::create_sealable("frames", pages * PAGE_BYTES).expect("memory");
    for page in 0..pages {
        segment.write(page * PAGE_BYTES, &[page as u8; PAGE_BYTES], false).expect("inside");
    }
    (Arc::new(segment), fd)
}

fn head(psn: u32) -> Vec<u8> {
    let opcode = Opcode::new(Service::Rc, Operation::Write, PacketPosition::Only).expect("the standard has it");
    let reth = Reth { address: 0x7000, rkey: 5, length: 9 };
    let header = Header { reth, frame: Some(Frame::default()), ..Header::new(opcode, 0x11, psn) };
    header.encode().as_slice().to_vec()
}

/// Sends a frame with `bytes` bytes of a page as its payload, referred to or copied.
fn send_frame(udp: &mut Udp, psn: u32, segment: &Arc<Segment>, (page, bytes): (usize, usize), referred: bool) {
    let (head, at) = (head(psn), page * PAGE_BYTES);
    if referred {
        assert!(udp.refer(route(PEER, FLOW, 0), &head, segment, (at, bytes)));
        return;
    }
    let place = udp.reserve_frame(route(PEER, FLOW, 0), head.len() + bytes).expect("room");
    place[..head.len()].copy_from_slice(&head);
    segment.read(at, &mut place[head.len()..]).expect("inside");
    udp.commit();
}

/// The PSN, the first byte and the length of the payload of the next frames, each of which is checked.
fn frames(udp: &mut Udp, count: usize) -> Vec<(u32, u8, usize)> {
    let mut found = Vec::new();
    receive(udp, count, |received| {
        let (header, payload) = Header::parse(received.packet).expect("a frame");
        assert!(header.frame.is_some() && header.reth.rkey == 5);
        assert!(payload.iter().all(|byte| *byte == payload[0]));
        found.push((header.psn, payload[0], payload.len()));
    });
    found
}

#[test]
fn payload_arrives_whether_copied_or_referred_to() {
    let (segment, _fd) = memory(8);
    for variant in 0..8 {
        let (gso, gro, v6) = (variant & 1 != 0, variant & 2 != 0, variant & 4 != 0);
        let change = |config: &mut UdpConfig, _: &mut Peer| (config.gso, config.gro) = (gso, gro);
        let (_namespace, mut from, mut to) = loopback(change, v6);
        assert_eq!(from.refers(PEER, REFERENCE_BYTES_MIN), gso, "a batch of one is copied");
        assert!(!from.refers(PEER, REFERENCE_BYTES_MIN - 1));
        let mut expected = Vec::new();
        for psn in 0..200_u32 {
            let page = psn as usize % 8;
            let bytes = if psn % 13 == 12 { 100 + page } else { PAGE_BYTES };
            send_frame(&mut from, psn, &segment, (page, bytes), gso && psn % 3 != 0);
            expected.push((psn, page as u8, bytes));
        }
        from.flush();
        assert!(!from.has_references() && !from.has_unsent());
        assert_eq!(frames(&mut to, 200), expected, "{variant}: {:?}", to.counters());
        assert_eq!((from.counters().packets_sent, to.counters().bad_icrc), (200, 0));
        assert_eq!(from.counters().bytes_sent, to.counters().bytes_received);
        if gso {
            assert!(from.counters().batches_sent <= 31, "equal frames share batches: {:?}", from.counters());
        }
    }
    assert_eq!(Arc::strong_count(&segment), 1, "nothing holds the memory");
}

/// Sends a frame with this many messages of eight bytes each.
fn send_records(udp: &mut Udp, psn: u32, count: u32) {
    let opcode = Opcode::new(Service::Rc, Operation::Write, PacketPosition::Only).expect("the standard has it");
    let mut writer = RecordsWriter::new(0x11, psn, (true, false));
    for at in 0..u64::from(count) {
        let (length, rkey, address, argument) = (8, 5, 0x7000 + at, 0);
        writer.push(&Record { opcode, solicited: false, length, rkey, address, argument });
    }
    let head = writer.finish();
    let place = udp.reserve_frame(route(PEER, FLOW, 0), head.len() + 8 * count as usize).expect("room");
    let (before, payload) = place.split_at_mut(head.len());
    before.copy_from_slice(head);
    payload.chunks_mut(8).zip(0..).for_each(|(one, at)| one.fill(at));
    udp.commit();
}

#[test]
fn frames_of_records_arrive_whole_and_share_batches() {
    for variant in 0..8 {
        let (gso, gro, v6) = (variant & 1 != 0, variant & 2 != 0, variant & 4 != 0);
        let change = |config: &mut UdpConfig, _: &mut Peer| (config.gso, config.gro) = (gso, gro);
        let (_namespace, mut from, mut to) = loopback(change, v6);
        (0..40).for_each(|frame| send_records(&mut from, 32 * frame, 32));
        send_records(&mut from, 32 * 40, 3);
        from.flush();
        let mut psn = 0;
        receive(&mut to, 41, |received| {
            let records = Records::parse(received.packet).expect("a frame of records");
            assert_eq!((records.psn, records.dest_qpn), (psn, 0x11));
            for (at, (record, payload)) in records.enumerate() {
                assert_eq!((record.address, payload), (0x7000 + at as u64, &[at as u8; 8][..]));
                psn += 1;
            }
        });
        assert_eq!((psn, to.counters().bad_icrc), (32 * 40 + 3, 0), "{variant}");
        if gso {
            assert_eq!(from.counters().batches_sent, 1, "they are segments of one length");
        }
    }
}

#[test]
fn a_packet_with_an_icrc_closes_a_batch_of_frames() {
    let (segment, _fd) = memory(2);
    let (_namespace, mut from, mut to) = loopback(|_, _| {}, false);
    send_frame(&mut from, 1, &segment, (0, PAGE_BYTES), true);
    send_frame(&mut from, 2, &segment, (1, PAGE_BYTES), true);
    send(&mut from, PEER, FLOW, &packet(3, 16));
    from.flush();
    assert_eq!(from.counters().batches_sent, 1);
    let mut lengths = Vec::new();
    receive(&mut to, 3, |received| lengths.push(received.packet.len()));
    assert_eq!(lengths, [FRAME_HEADER_BYTES + PAGE_BYTES, FRAME_HEADER_BYTES + PAGE_BYTES, 16]);
}

#[test]
fn memory_that_is_gone_costs_its_own_packets_alone() {
    freeflow_shm::install_sigbus_guard().expect("guard");
    let (mut segment, fd) = Segment::create_sealable("frames", 4 * PAGE_BYTES).expect("memory");
    for page in 0..4 {
        segment.write(page * PAGE_BYTES, &[page as u8; PAGE_BYTES], false).expect("inside");
    }
    if segment.refuse_missing().is_err() {
        eprintln!("\n*** no userfaultfd: memory_that_is_gone_costs_its_own_packets_alone checked nothing ***\n");
        return;
    }
    let segment = Arc::new(segment);
    let (_namespace, mut from, mut to) = loopback(|_, _| {}, false);
    for page in 0..4 {
        send_frame(&mut from, page as u32, &segment, (page, PAGE_BYTES), true);
    }
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&fd, hole, PAGE_BYTES as u64, PAGE_BYTES as u64).expect("hole");
    from.flush();
    assert_eq!(frames(&mut to, 3), [(0, 0, PAGE_BYTES), (2, 2, PAGE_BYTES), (3, 3, PAGE_BYTES)]);
    assert_eq!((from.counters().send_memory_gone, from.counters().packets_sent), (1, 3));
    // All of a batch: nothing is sent, and its buffer is free again.
    for round in 0..40 {
        send_frame(&mut from, round, &segment, (1, PAGE_BYTES), true);
        from.flush();
    }
    assert_eq!((from.counters().send_memory_gone, from.counters().packets_sent), (41, 3));
    assert!(!from.refer(route(PEER, FLOW, 0), &head(0), &segment, (3 * PAGE_BYTES + 1, PAGE_BYTES)), "beyond its end");
    assert!(!from.has_unsent());
    assert_eq!(Arc::strong_count(&segment), 1);
}

#[test]
fn a_full_socket_gets_a_copy() {
    let (a, b) = veth(4200);
    // Nobody answers for this address: the kernel queues what is sent to it until the neighbour is known.
    let small = UdpConfig { send_buffer_bytes: 4096, source_port_count: 1, frames: true, ..config("10.0.0.1") };
    let mut from = a.open(small);
    from.set_peer(PEER, peer("10.0.0.1", "10.0.0.3")).expect("peer");
    let (segment, _fd) = memory(4);
    let mut count = 0;
    while from.has_room(&route(PEER, FLOW, 0)) {
        for _ in 0..3 {
            send_frame(&mut from, count, &segment, (count as usize % 4, PAGE_BYTES), true);
            count += 1;
        }
        from.flush();
        assert!(!from.has_references(), "whatever the socket took");
        assert!(count < 1000, "the buffer never fills: {:?}", from.counters());
    }
    assert!(from.has_unsent() && from.counters().send_blocked > 0);
    assert_eq!(Arc::strong_count(&segment), 1, "nothing holds the memory");
    for page in 0..4 {
        segment.write(page * PAGE_BYTES, &[0xee; PAGE_BYTES], false).expect("inside");
    }
    b.ip("addr add 10.0.0.3/24 dev vb");
    let mut to = b.open(UdpConfig { frames: true, ..config("10.0.0.3") });
    to.set_peer(PEER, peer("10.0.0.3", "10.0.0.1")).expect("peer");
    let_neighbour_answer(&a, &b);
    let mut found = Vec::new();
    while found.len() < count as usize {
        from.flush();
        let more = from.counters().packets_sent as usize - found.len();
        found.extend(frames(&mut to, more));
    }
    // Those that the kernel took earlier are as they were, too: it copied them.
    let expected: Vec<_> = (0..count).map(|psn| (psn, (psn % 4) as u8, PAGE_BYTES)).collect();
    assert_eq!(found, expected);
}

#[test]
fn frames_come_from_those_who_agreed() {
    let (segment, _fd) = memory(1);
    let change = |config: &mut UdpConfig, peer: &mut Peer| {
        peer.frames = config.addresses[0] == lab::address("10.0.0.1");
    };
    let (_namespace, mut from, mut to) = loopback(change, false);
    send_frame(&mut from, 1, &segment, (0, PAGE_BYTES), true);
    send_frame(&mut from, 2, &segment, (0, 64), false);
    send(&mut from, PEER, FLOW, &packet(3, 64));
    from.flush();
    let mut lengths = Vec::new();
    receive(&mut to, 3, |received| lengths.push(received.packet.len()));
    assert_eq!((lengths, to.counters().unwanted_frames), (vec![64], 2));
}

#[test]
fn damage_on_purpose_is_found() {
    let (segment, _fd) = memory(1);
    let (_namespace, mut from, mut to) = loopback(|_, _| {}, false);
    from.set_faults(Some(Faults { seed: 3, corrupt_ppm: 500_000, ..Faults::default() }));
    assert!(!from.refers(PEER, PAGE_BYTES), "faults need a copy");
    for psn in 0..100 {
        send_frame(&mut from, psn, &segment, (0, PAGE_BYTES), false);
        from.flush();
    }
    let damaged = from.counters().injected_corruption;
    assert!((30..70).contains(&damaged), "{damaged}");
    let mut arrived = 0;
    receive(&mut to, 100, |_| arrived += 1);
    // A bit of the opcode may make a packet of the standard of it, whose ICRC is wrong then.
    assert_eq!((arrived, to.counters().bad_icrc + to.counters().unwanted_frames), (100 - damaged, damaged));
}

#[test]
fn damage_of_the_heads_of_records_is_found() {
    let (_namespace, mut from, mut to) = loopback(|_, _| {}, false);
    from.set_faults(Some(Faults { seed: 3, corrupt_ppm: 500_000, ..Faults::default() }));
    for frame in 0..100 {
        send_records(&mut from, 20 * frame, 20);
        from.flush();
    }
    let damaged = from.counters().injected_corruption;
    assert!((30..70).contains(&damaged), "{damaged}");
    let mut arrived = 0;
    receive(&mut to, 100, |received| arrived += u64::from(Records::parse(received.packet).is_ok()));
    assert_eq!((arrived, to.counters().bad_icrc + to.counters().truncated), (100 - damaged, damaged));
}

/// A capture in memory.
struct Sink(Arc<Mutex<Vec<u8>>>);

impl CaptureSink for Sink {
    fn packet(&mut self, packet: &Captured<'_>) {
        freeflow_backend::pcapng::packet(packet, &mut self.0.lock().expect("sink"));
    }
}

#[test]
fn the_dissector_reads_what_is_captured() {
    let (segment, _fd) = memory(1);
    let (_namespace, mut from, mut to) = loopback(|_, _| {}, false);
    let kept = Arc::new(Mutex::new(Vec::new()));
    freeflow_backend::pcapng::begin("test", &mut kept.lock().expect("sink"));
    send_frame(&mut from, 1, &segment, (0, PAGE_BYTES), true);
    from.set_capture(Some(Box::new(Sink(kept.clone()))));
    assert!(!from.refers(PEER, PAGE_BYTES), "captures need a copy");
    send_frame(&mut from, 2, &segment, (0, PAGE_BYTES), false);
    send(&mut from, PEER, FLOW, &packet(3, 64));
    send_records(&mut from, 4, 2);
    from.flush();
    receive(&mut to, 4, |_| {});
    let path = std::env::temp_dir().join(format!("ffb-frames-{}.pcapng", std::process::id()));
    std::fs::write(&path, &*kept.lock().expect("sink")).expect("write");
    let dissector = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/wireshark/freeflow.lua");
    let fields = [
        "freeflow.psn",
        "freeflow.destqp",
        "freeflow.address",
        "freeflow.rkey",
        "freeflow.length",
        "freeflow.crc_good",
        "freeflow.records",
        "freeflow.payload",
        "infiniband.bth.psn",
        "_ws.malformed",
    ];
    let output = std::process::Command::new("tshark")
        .args(["-X", &format!("lua_script:{dissector}"), "-T", "fields", "-E", "separator=;", "-r"])
        .arg(&path)
        .args(fields.iter().flat_map(|field| ["-e", field]))
        .output();
    let _ = std::fs::remove_file(&path);
    let output = output.expect("tshark: apt-get install tshark");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = text.lines().collect();
    let payload = "00".repeat(PAGE_BYTES);
    let one = format!("2;0x000011;0x0000000000007000;0x00000005;9;1;;{payload};;");
    let two = "4;0x000011;0x0000000000007000,0x0000000000007001;0x00000005,0x00000005;;1;2;\
               0000000000000000,0101010101010101;;";
    assert_eq!(lines, [&one, ";;;;;;;;3;", two]);
}
