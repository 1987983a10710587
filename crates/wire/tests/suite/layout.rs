//! Where each field stands, byte for byte, written out from the standard: what the captures don't
//! have (IBTA 9.2 to 9.3.5, A14, A19). A field in the wrong place would survive a round trip.
use freeflow_wire::{Aeth, AtomicEth, Deth, Header, NakCode, Opcode, Reth, Syndrome};

const ADDRESS: u64 = 0x0102_0304_0506_0708;
const RKEY: u32 = 0x1112_1314;
const RETH: Reth = Reth { address: ADDRESS, rkey: RKEY, length: 0x2122_2324 };
const ATOMIC: AtomicEth =
    AtomicEth { address: ADDRESS, rkey: RKEY, swap_add: 0x3132_3334_3536_3738, compare: 0x4142_4344_4546_4748 };

fn header(opcode: u8) -> Header {
    Header::new(Opcode::from_byte(opcode).unwrap(), 0x51_5253, 0x61_6263)
}

fn immediate() -> u32 {
    u32::from_ne_bytes([0x71, 0x72, 0x73, 0x74])
}

/// The packet's bytes in hexadecimal; blanks mean nothing.
fn check(header: &Header, words: &str) {
    let digits: String = words.split_whitespace().collect();
    let expected: Vec<u8> =
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect();
    assert_eq!(header.encode().as_slice(), expected, "{header:?}");
    let mut packet = expected;
    packet.resize(packet.len() + usize::from(header.pad), 0);
    assert_eq!(Header::parse(&packet), Ok((*header, &[][..])));
}

#[test]
fn base_transport_header() {
    check(&header(0x04), "04 00 ffff 00 515253 00 616263");
    check(&Header { solicited: true, ..header(0x04) }, "04 80 ffff 00 515253 00 616263");
    check(&Header { migrated: true, ..header(0x04) }, "04 40 ffff 00 515253 00 616263");
    check(&Header { pad: 3, ..header(0x04) }, "04 30 ffff 00 515253 00 616263");
    check(&Header { pkey: 0x7ffe, ..header(0x04) }, "04 00 7ffe 00 515253 00 616263");
    check(&Header { fecn: true, ..header(0x04) }, "04 00 ffff 80 515253 00 616263");
    check(&Header { by_ipv6: true, ..header(0x04) }, "04 00 ffff 20 515253 00 616263");
    check(&Header { ack_waits: true, ..header(0x04) }, "04 00 ffff 10 515253 00 616263");
    check(&Header { becn: true, ..header(0x04) }, "04 00 ffff 40 515253 00 616263");
    check(&Header { ack_request: true, ..header(0x04) }, "04 00 ffff 00 515253 80 616263");
}

#[test]
fn requests() {
    check(&Header { reth: RETH, ..header(0x0c) }, "0c 00 ffff 00 515253 00 616263 0102030405060708 11121314 21222324");
    check(
        &Header { reth: RETH, immediate: immediate(), ..header(0x0b) },
        "0b 00 ffff 00 515253 00 616263 0102030405060708 11121314 21222324 71727374",
    );
    check(&Header { invalidate: RKEY, ..header(0x17) }, "17 00 ffff 00 515253 00 616263 11121314");
    check(
        &Header { atomic: ATOMIC, ..header(0x13) },
        "13 00 ffff 00 515253 00 616263 0102030405060708 11121314 3132333435363738 4142434445464748",
    );
    check(
        &Header { flush: 0x21, reth: RETH, ..header(0x1c) },
        "1c 00 ffff 00 515253 00 616263 00000021 0102030405060708 11121314 21222324",
    );
    check(&Header { reth: RETH, ..header(0x1d) }, "1d 00 ffff 00 515253 00 616263 0102030405060708 11121314 21222324");
    check(
        &Header { deth: Deth { qkey: 0x8182_8384, source_qpn: 0x91_9293 }, immediate: immediate(), ..header(0x65) },
        "65 00 ffff 00 515253 00 616263 81828384 00919293 71727374",
    );
}

#[test]
fn responses() {
    let aeth = |syndrome| Aeth { syndrome, msn: 0xa1_a2a3 };
    let answer = |syndrome| Header { aeth: aeth(syndrome), ..header(0x11) };
    check(&answer(Syndrome::ACK), "11 00 ffff 00 515253 00 616263 1f a1a2a3");
    check(&answer(Syndrome::ReceiverNotReady { timer: 12 }), "11 00 ffff 00 515253 00 616263 2c a1a2a3");
    check(&answer(Syndrome::Nak(NakCode::PsnSequence)), "11 00 ffff 00 515253 00 616263 60 a1a2a3");
    check(&answer(Syndrome::Nak(NakCode::InvalidRequest)), "11 00 ffff 00 515253 00 616263 61 a1a2a3");
    check(&answer(Syndrome::Nak(NakCode::RemoteAccess)), "11 00 ffff 00 515253 00 616263 62 a1a2a3");
    check(&answer(Syndrome::Nak(NakCode::RemoteOperational)), "11 00 ffff 00 515253 00 616263 63 a1a2a3");
    check(&Header { aeth: aeth(Syndrome::ACK), ..header(0x10) }, "10 00 ffff 00 515253 00 616263 1f a1a2a3");
    check(
        &Header { aeth: aeth(Syndrome::ACK), original: ADDRESS, ..header(0x12) },
        "12 00 ffff 00 515253 00 616263 1f a1a2a3 0102030405060708",
    );
}

#[test]
fn extended_reliable_connections() {
    let header = |opcode| Header { srqn: 0xb1_b2b3, ..header(opcode) };
    check(&header(0xa1), "a1 00 ffff 00 515253 00 616263 00b1b2b3");
    check(&Header { immediate: immediate(), ..header(0xa5) }, "a5 00 ffff 00 515253 00 616263 00b1b2b3 71727374");
    check(&Header { invalidate: RKEY, ..header(0xb7) }, "b7 00 ffff 00 515253 00 616263 00b1b2b3 11121314");
    check(
        &Header { reth: RETH, ..header(0xa6) },
        "a6 00 ffff 00 515253 00 616263 00b1b2b3 0102030405060708 11121314 21222324",
    );
    check(
        &Header { atomic: ATOMIC, ..header(0xb4) },
        "b4 00 ffff 00 515253 00 616263 00b1b2b3 0102030405060708 11121314 3132333435363738 4142434445464748",
    );
    check(
        &Header { flush: 0x12, reth: RETH, ..header(0xbc) },
        "bc 00 ffff 00 515253 00 616263 00b1b2b3 00000012 0102030405060708 11121314 21222324",
    );
}
