//! Packets that two Linux rxe hosts sent each other (kernel 6.1, rdma-core 44): they decode, re-encode byte for byte,
//! and their ICRCs verify, with the IP identification that they have and without knowing it.
use crate::{list, reference};
use freeflow_wire::icrc::{Addresses, Flow, NO_IDENTIFICATION};
use freeflow_wire::{Header, ICRC_BYTES, Opcode, UDP_PORT};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

/// File, RoCEv2 packets in it, other frames in it.
const CAPTURES: [(&str, usize, usize); 16] = [
    ("cm_reject.pcap", 2, 0),
    ("cm_rping.pcap", 41, 0),
    ("cm_rstream.pcap", 40, 0),
    ("cm_udaddy.pcap", 8, 0),
    ("rc_2qp.pcap", 40, 0),
    ("rc_atomic_cs.pcap", 10, 0),
    ("rc_atomic_fa.pcap", 10, 0),
    ("rc_ipv6.pcap", 16, 0),
    ("rc_mtu4096.pcap", 16, 0),
    ("rc_read.pcap", 20, 0),
    ("rc_rnr.pcap", 148, 0),
    ("rc_send.pcap", 24, 0),
    ("rc_write.pcap", 20, 0),
    ("uc_send.pcap", 18, 0),
    ("ud_mckey.pcap", 3, 0),
    ("ud_send.pcap", 6, 0),
];

/// Bits behind the identification whose lone damage a clear "don't fragment" explains (see `icrc`'s documentation).
const EXPLAINED_BY_FRAGMENT: [usize; 2] = [1564, 14_855];
/// Bytes from the identification to the packet.
const BYTES_BETWEEN: usize = 22;

struct Packet {
    flow: Flow,
    /// `None`: IPv6.
    identification: Option<u16>,
    /// BTH … padding.
    bytes: Vec<u8>,
    icrc: u32,
    headers: Vec<u8>,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/pcaps")
}

/// The RoCEv2 packets of a capture, and the number of other frames.
fn read(name: &str) -> (Vec<Packet>, usize) {
    let file = std::fs::read(folder().join(name)).unwrap();
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
    assert_eq!((word(0), word(20)), (0xa1b2_c3d4, 1), "{name}: a little-endian capture of Ethernet");
    let (mut packets, mut others, mut at) = (Vec::new(), 0, 24);
    while at < file.len() {
        let (captured, length) = (word(at + 8), word(at + 12));
        assert_eq!(captured, length, "{name}: captured whole");
        match packet(&file[at + 16..at + 16 + captured]) {
            Some(packet) => packets.push(packet),
            None => others += 1,
        }
        at += 16 + captured;
    }
    (packets, others)
}

fn packet(frame: &[u8]) -> Option<Packet> {
    let ip = &frame[14..];
    let short = |at: usize| u16::from_be_bytes([ip[at], ip[at + 1]]);
    let (addresses, identification, protocol, head) = match (u16::from_be_bytes([frame[12], frame[13]]), ip[0]) {
        (0x0800, 0x45) => {
            assert_eq!(short(6), 0x4000, "rxe sets don't fragment");
            let (source, destination) = (ip[12..16].try_into().unwrap(), ip[16..20].try_into().unwrap());
            (Addresses::V4 { source, destination }, Some(short(4)), ip[9], 20)
        }
        (0x86dd, _) => {
            let (source, destination) = (ip[8..24].try_into().unwrap(), ip[24..40].try_into().unwrap());
            (Addresses::V6 { source, destination }, None, ip[6], 40)
        }
        _ => return None,
    };
    if protocol != 17 || short(head + 2) != UDP_PORT {
        return None;
    }
    let end = head + usize::from(short(head + 4));
    let (bytes, icrc) = ip[head + 8..end].split_last_chunk::<ICRC_BYTES>()?;
    Some(Packet {
        flow: Flow { addresses, source_port: short(head) },
        identification,
        bytes: bytes.to_vec(),
        icrc: u32::from_le_bytes(*icrc),
        headers: ip[..head + 8].to_vec(),
    })
}

#[test]
fn every_capture_is_here_and_whole() {
    let mut names: Vec<_> =
        std::fs::read_dir(folder()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, CAPTURES.map(|(name, ..)| name));
    for (name, packets, others) in CAPTURES {
        let (read, skipped) = read(name);
        assert_eq!((read.len(), skipped), (packets, others), "{name}");
    }
}

#[test]
fn packets_decode_and_re_encode_byte_for_byte() {
    for (name, ..) in CAPTURES {
        for (number, packet) in read(name).0.iter().enumerate() {
            let (header, payload) = Header::parse(&packet.bytes).unwrap_or_else(|e| panic!("{name} {number}: {e:?}"));
            let mut again = header.encode().as_slice().to_vec();
            again.extend(payload);
            again.extend([0; 3].iter().take(header.pad.into()));
            assert_eq!(again, packet.bytes, "{name} {number}: {header:?}");
        }
    }
}

/// Contents of the captures, as a reviewed list: an error that encoding and decoding share would
/// show here.
#[test]
fn contents_are_as_listed() {
    let mut text = String::new();
    for (name, ..) in CAPTURES {
        let mut seen: BTreeMap<u8, (Header, usize, usize)> = BTreeMap::new();
        for packet in &read(name).0 {
            let (header, payload) = Header::parse(&packet.bytes).unwrap();
            seen.entry(header.opcode.byte()).or_insert((header, payload.len(), 0)).2 += 1;
        }
        for (opcode, (header, payload, count)) in seen {
            writeln!(
                text,
                "{name} {count} x {opcode:#04x}, first: {payload} bytes + {}, {}",
                header.pad,
                printed(&header)
            )
            .unwrap();
        }
    }
    list::compare("captures.txt", &text);
}

fn printed(h: &Header) -> String {
    let mut text =
        format!("{:?} qpn {:#x} psn {:#x} ack {} se {}", h.opcode, h.dest_qpn, h.psn, h.ack_request, h.solicited);
    let opcode: Opcode = h.opcode;
    if opcode.has_deth() {
        write!(text, " {:x?}", h.deth).unwrap();
    }
    if opcode.has_reth() {
        write!(text, " {:x?}", h.reth).unwrap();
    }
    if opcode.has_atomic_eth() {
        write!(text, " {:x?}", h.atomic).unwrap();
    }
    if opcode.has_aeth() {
        write!(text, " {:?}", h.aeth).unwrap();
    }
    if opcode.has_atomic_ack_eth() {
        write!(text, " original {:#x}", h.original).unwrap();
    }
    if opcode.has_immediate() {
        write!(text, " immediate {:#010x}", u32::from_be(h.immediate)).unwrap();
    }
    if opcode.has_ieth() {
        write!(text, " invalidate {:#x}", h.invalidate).unwrap();
    }
    text
}

#[test]
fn icrcs_verify_and_identifications_are_found() {
    let (mut v4, mut v6) = (0, 0);
    for (name, ..) in CAPTURES {
        for (number, packet) in read(name).0.iter().enumerate() {
            let place = format!("{name} {number}");
            let real = packet.identification.unwrap_or(NO_IDENTIFICATION);
            let headers = reference::headers(&packet.flow, real, true, &packet.bytes);
            for headers in [&packet.headers, &headers] {
                assert_eq!(reference::icrc(headers, &packet.bytes), packet.icrc, "{place}: the reference");
            }
            assert_eq!(packet.flow.icrc(real, &packet.bytes), packet.icrc, "{place}");
            for expected in [0, real, real.wrapping_sub(1), !real] {
                assert_eq!(
                    packet.flow.explain(expected, &packet.bytes, packet.icrc),
                    Some(real),
                    "{place}: {expected}"
                );
            }
            *if packet.identification.is_some() { &mut v4 } else { &mut v6 } += 1;
        }
    }
    assert_eq!((v4, v6), (406, 16));
}

/// Every bit of every packet and of its ICRC: damage shows, but for the byte that the ICRC leaves out and the distances
/// that the documentation names.
#[test]
fn one_wrong_bit_is_noticed() {
    let mut explained = 0;
    for (name, ..) in CAPTURES {
        for packet in &mut read(name).0 {
            let real = packet.identification.unwrap_or(NO_IDENTIFICATION);
            for bit in 0..8 * packet.bytes.len() {
                packet.bytes[bit / 8] ^= 1 << (bit % 8);
                let found = packet.flow.explain(real, &packet.bytes, packet.icrc);
                packet.bytes[bit / 8] ^= 1 << (bit % 8);
                let distance = 8 * BYTES_BETWEEN + bit + 1;
                if bit / 8 == 4 {
                    assert_eq!(found, Some(real), "{name}: routers may set FECN");
                } else if packet.identification.is_some() && EXPLAINED_BY_FRAGMENT.contains(&distance) {
                    assert_ne!(found, Some(real), "{name}: bit {bit}");
                    assert!(found.is_some(), "{name}: bit {bit}");
                    explained += 1;
                } else {
                    assert_eq!(found, None, "{name}: bit {bit}");
                }
            }
            for bit in 0..32 {
                let found = packet.flow.explain(real, &packet.bytes, packet.icrc ^ 1 << bit);
                let distance = 8 * (BYTES_BETWEEN + packet.bytes.len()) + bit + 1;
                assert_eq!(
                    found.is_some(),
                    packet.identification.is_some() && EXPLAINED_BY_FRAGMENT.contains(&distance)
                );
            }
        }
    }
    assert_ne!(explained, 0, "packets that are long enough for those distances");
}

/// Of random ICRCs, two of 2^16 have an identification, over IPv6 one of 2^32. The numbers are the same in each run.
#[test]
fn random_damage_passes_as_seldom_as_it_should() {
    const TRIES: usize = 1 << 20;
    const EXPECTED: usize = (TRIES * 2) >> 16;
    let passed = |packet: &Packet| {
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        let mut draw = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 32) as u32
        };
        let explained = |received: &u32| match packet.flow.explain(0, &packet.bytes, *received) {
            Some(id) => {
                let right = [true, false].map(|dont_fragment| {
                    let headers = reference::headers(&packet.flow, id, dont_fragment, &packet.bytes);
                    reference::icrc(&headers, &packet.bytes) == *received
                });
                assert!(right[0] || right[1], "{received:#x}: {id} does not explain it");
                true
            }
            None => false,
        };
        (0..TRIES).map(|_| draw()).filter(explained).count()
    };
    let short = |packets: Vec<Packet>| packets.into_iter().min_by_key(|packet| packet.bytes.len()).unwrap();
    let count = passed(&short(read("rc_send.pcap").0));
    assert!(count > EXPECTED / 2 && count < EXPECTED * 2, "{count} of {TRIES}, {EXPECTED} expected");
    assert_eq!(passed(&short(read("rc_ipv6.pcap").0)), 0);
}
