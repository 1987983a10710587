//! Headers, identifications and PSNs over random input.
use crate::reference;
use freeflow_wire::icrc::{Addresses, Flow, NO_IDENTIFICATION};
use freeflow_wire::{
    Aeth, AtomicEth, Deth, Header, MASK_24, Malformed, Opcode, PAYLOAD_BYTES_MAX, Reth, Syndrome, psn_add, psn_ahead,
};
use proptest::collection::vec;
use proptest::prelude::*;

fn opcodes() -> Vec<Opcode> {
    (0..=255).filter_map(Opcode::from_byte).collect()
}

/// A header of this opcode with the fields that count out of these numbers.
fn header(opcode: Opcode, n: &[u64; 12], flags: u8, syndrome: Syndrome) -> Header {
    let mut header = Header::new(opcode, n[0] as u32, n[1] as u32);
    let flag = |bit: u8| flags & 1 << bit != 0;
    (header.solicited, header.migrated, header.ack_request) = (flag(0), flag(1), flag(2));
    (header.fecn, header.becn, header.pad, header.pkey) = (flag(3), flag(4), flags >> 5 & 3, n[2] as u16);
    (header.by_ipv6, header.ack_waits) = (flag(7), n[2] & 1 << 16 != 0);
    if opcode.has_xrceth() {
        header.srqn = n[3] as u32 & MASK_24;
    }
    if opcode.has_deth() {
        header.deth = Deth { qkey: n[4] as u32, source_qpn: n[5] as u32 & MASK_24 };
    }
    if opcode.has_reth() {
        header.reth = Reth { address: n[6], rkey: n[7] as u32, length: n[8] as u32 };
    }
    if opcode.has_atomic_eth() {
        header.atomic = AtomicEth { address: n[6], rkey: n[7] as u32, swap_add: n[8], compare: n[9] };
    }
    if opcode.has_aeth() {
        header.aeth = Aeth { syndrome, msn: n[3] as u32 & MASK_24 };
    }
    if opcode.has_atomic_ack_eth() {
        header.original = n[9];
    }
    if opcode.has_immediate() {
        header.immediate = n[10] as u32;
    }
    if opcode.has_ieth() {
        header.invalidate = n[10] as u32;
    }
    if opcode.has_feth() {
        header.flush = n[11] as u32;
    }
    header
}

fn any_header() -> impl Strategy<Value = Header> {
    let syndrome = any::<u8>().prop_filter_map("a reserved syndrome", Syndrome::from_byte);
    (proptest::sample::select(opcodes()), any::<[u64; 12]>(), any::<u8>(), syndrome)
        .prop_map(|(opcode, numbers, flags, syndrome)| header(opcode, &numbers, flags, syndrome))
}

fn any_flow() -> impl Strategy<Value = Flow> {
    let v4 = any::<([u8; 4], [u8; 4])>().prop_map(|(source, destination)| Addresses::V4 { source, destination });
    let v6 = any::<([u8; 16], [u8; 16])>().prop_map(|(source, destination)| Addresses::V6 { source, destination });
    (prop_oneof![v4, v6], any::<u16>()).prop_map(|(addresses, source_port)| Flow { addresses, source_port })
}

fn packet_of(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut packet = header.encode().as_slice().to_vec();
    packet.extend(payload);
    packet.extend([0; 3].iter().take(header.pad.into()));
    packet
}

/// Syndromes are 8 bits: all of them.
#[test]
fn syndromes_are_total() {
    let known: Vec<_> = (0..=255).filter(|byte| Syndrome::from_byte(*byte).is_some()).collect();
    assert_eq!(known, (0..0x40).chain(0x60..0x65).collect::<Vec<u8>>());
    assert!(known.iter().all(|byte| Syndrome::from_byte(*byte).unwrap().byte() == *byte));
    assert_eq!(Syndrome::ACK.byte(), 0x1f);
}

#[test]
fn packets_cut_short_are_truncated() {
    for opcode in opcodes() {
        for pad in 0..4 {
            let header = Header { pad, ..Header::new(opcode, 1, 2) };
            let whole = packet_of(&header, &[]);
            assert_eq!(Header::parse(&whole), Ok((header, &[][..])), "{opcode:?}");
            for length in 0..whole.len() {
                assert_eq!(Header::parse(&whole[..length]), Err(Malformed::Truncated), "{opcode:?} {length} {pad}");
            }
        }
    }
}

#[test]
fn what_no_packet_may_be_is_refused() {
    for opcode in opcodes() {
        let mut packet = packet_of(&Header::new(opcode, 1, 2), &[]);
        let headers = packet.len();
        packet.resize(headers + PAYLOAD_BYTES_MAX, 7);
        let most = Header::parse(&packet).map(|(_, payload)| payload.len());
        assert_eq!(
            most,
            if opcode.has_payload() { Ok(PAYLOAD_BYTES_MAX) } else { Err(Malformed::Length) },
            "{opcode:?}"
        );
        packet.push(7);
        assert_eq!(Header::parse(&packet), Err(Malformed::Length), "{opcode:?}");
        packet[1] = 1;
        assert_eq!(Header::parse(&packet), Err(Malformed::Version), "{opcode:?}");
    }
    let mut packet = packet_of(&Header::new(Opcode::from_byte(0x11).unwrap(), 1, 2), &[]);
    packet[12] = 0x65;
    assert_eq!(Header::parse(&packet), Err(Malformed::Syndrome));
    packet[0] = 0x15;
    assert_eq!(Header::parse(&packet), Err(Malformed::Opcode));
}

/// Bits that are reserved may be anything (IBTA 9.2: ignored by the receiver).
#[test]
fn reserved_bits_are_ignored() {
    for (opcode, at, mask) in [(0x04, 4, 0x0f), (0x04, 8, 0x7f), (0xa4, 12, 0xff), (0x64, 16, 0xff)] {
        let header = Header::new(Opcode::from_byte(opcode).unwrap(), 1, 2);
        let mut packet = packet_of(&header, b"four");
        packet[at] |= mask;
        assert_eq!(Header::parse(&packet), Ok((header, &b"four"[..])), "{opcode:#x}, byte {at}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn headers_survive_the_wire(header in any_header(), payload in vec(any::<u8>(), 0..64)) {
        let payload = if header.opcode.has_payload() { &payload[..] } else { &[] };
        let packet = packet_of(&header, payload);
        prop_assert_eq!(Header::parse(&packet), Ok((header, payload)));
    }

    #[test]
    fn any_bytes_give_a_header_or_an_error(
        opcode in any::<u8>(), version in 0..2u8, mut bytes in vec(any::<u8>(), 0..80)
    ) {
        // Reserved opcodes and versions would end most tries at the first check.
        if let [first, second, ..] = &mut bytes[..] {
            (*first, *second) = (opcode, *second & 0xf0 | version);
        }
        if let Ok((header, payload)) = Header::parse(&bytes) {
            prop_assert!(payload.len() <= bytes.len());
            let again = packet_of(&header, payload);
            prop_assert_eq!(again.len(), bytes.len());
            prop_assert_eq!(Header::parse(&again), Ok((header, payload)));
        }
    }

    #[test]
    fn icrc_is_that_of_the_whole_datagram(
        flow in any_flow(), id in any::<u16>(), packet in vec(any::<u8>(), 0..200)
    ) {
        let datagram = reference::headers(&flow, id, true, &packet);
        prop_assert_eq!(flow.icrc(id, &packet), reference::icrc(&datagram, &packet));
    }

    #[test]
    fn identifications_are_found(
        flow in any_flow(), id in any::<u16>(), expected in any::<u16>(), packet in vec(any::<u8>(), 12..200),
        length in 12..=4143usize, dont_fragment in any::<bool>(),
    ) {
        let packet = packet.repeat(length / packet.len() + 1);
        let packet = &packet[..length];
        let icrc = reference::icrc(&reference::headers(&flow, id, dont_fragment, packet), packet);
        let real = if matches!(flow.addresses, Addresses::V4 { .. }) { id } else { NO_IDENTIFICATION };
        prop_assert_eq!(flow.explain(expected, packet, icrc), Some(real));
    }

    #[test]
    fn anything_can_be_asked_to_be_explained(
        flow in any_flow(), expected in any::<u16>(), received in any::<u32>(), packet in vec(any::<u8>(), 0..32),
        times in 0..4000usize,
    ) {
        let packet = packet.repeat(times);
        if let (Some(id), true) = (flow.explain(expected, &packet, received), packet.len() < 60_000) {
            let right = |dont_fragment| {
                reference::icrc(&reference::headers(&flow, id, dont_fragment, &packet), &packet) == received
            };
            prop_assert!(right(true) || right(false));
        }
    }

    #[test]
    fn psns_wrap(base in 0..=MASK_24, step in -(1i32 << 23)..1 << 23) {
        let psn = psn_add(base, step as u32);
        prop_assert!(psn <= MASK_24);
        prop_assert_eq!(psn_ahead(psn, base), step);
        prop_assert_eq!(psn_add(psn, (-step) as u32), base);
        // Each of two is as far ahead as the other is behind, but for the opposite point of the circle.
        prop_assert_eq!(psn_ahead(base, psn), if step == -(1 << 23) { step } else { -step });
    }

    #[test]
    fn any_bytes_restore_an_opcode_or_fail(byte in any::<u8>()) {
        prop_assert_eq!(Opcode::try_from(byte).ok(), Opcode::from_byte(byte));
    }
}
