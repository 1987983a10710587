//! RoCEv2 packets, as they come behind UDP: flow, headers, payload, ICRC; headers of sealed packets, and their numbers.
use crate::bytes::Input;
use freeflow_wire::frame::{FRAME_PAYLOAD_BYTES_MAX, is_frame, is_intact, protected_bytes};
use freeflow_wire::icrc::{Addresses, Flow, NO_IDENTIFICATION, PACKET_BYTES_MAX};
use freeflow_wire::records::{RECORD_PAYLOAD_BYTES_MAX, RECORDS_MAX, Records, RecordsWriter, is_record, is_records};
use freeflow_wire::sealed::{SEAL_HEADER_BYTES, SealHeader, is_sealed};
use freeflow_wire::{Header, Opcode, PAYLOAD_BYTES_MAX, REPLAY_WINDOW, ReplayWindow, Syndrome};
use std::collections::BTreeSet;

/// Flags, identification, ICRC, then the packet.
pub fn run(bytes: &[u8]) {
    let mut input = Input(bytes);
    let (Some(flags), Some(identification), Some(received)) = (input.u8(), input.u16(), input.u32()) else { return };
    let packet = input.0;
    look_at_header(packet);
    look_at_seal(packet);
    if packet.len() <= PACKET_BYTES_MAX {
        look_at_icrc(flags, identification, received, packet);
    }
}

fn look_at_header(packet: &[u8]) {
    if let Ok(records) = Records::parse(packet) {
        return look_at_records(records, packet);
    }
    let Ok((header, payload)) = Header::parse(packet) else { return };
    let length_max = if header.frame.is_some() { FRAME_PAYLOAD_BYTES_MAX } else { PAYLOAD_BYTES_MAX };
    assert!(payload.len() <= length_max);
    assert_eq!(header.frame.is_some(), is_frame(packet));
    assert!(payload.is_empty() || header.opcode.has_payload());
    assert_eq!(Opcode::from_byte(header.opcode.byte()), Some(header.opcode));
    let mut again = header.encode().as_slice().to_vec();
    again.extend_from_slice(payload);
    again.extend_from_slice(&[0; 3][..header.pad.into()]);
    assert_eq!(again.len(), packet.len(), "each byte is header, payload or padding");
    assert_eq!(Header::parse(&again), Ok((header, payload)), "what is read is what is written");
    assert!(header.frame.is_none() || is_intact(&again), "a frame is written with its CRC");
}

/// Each message of a frame of records is what a frame of its own would say; together they are the frame again.
fn look_at_records(records: Records<'_>, packet: &[u8]) {
    assert!(is_frame(packet) && is_records(packet) && Header::parse(packet).is_err());
    let mut writer = RecordsWriter::new(records.dest_qpn, records.psn, (records.ack_request, records.ack_waits));
    let (mut left, mut payloads, mut count) = (records, Vec::new(), 0);
    while let (psn, Some((record, payload))) = (left.psn, left.next()) {
        assert!(is_record(record.opcode) && payload.len() == usize::from(record.length));
        assert!(payload.len() <= RECORD_PAYLOAD_BYTES_MAX);
        let header = records.header(psn, &record);
        let alone = header.encode();
        assert_eq!(Header::parse(alone.as_slice()), Ok((header, &[][..])), "it is a frame of its own");
        writer.push(&record);
        payloads.extend_from_slice(payload);
        count += 1;
    }
    assert!((1..=RECORDS_MAX).contains(&count) && left.is_empty());
    let again = [writer.finish(), &payloads].concat();
    assert!(is_intact(&again), "it is written with its CRC");
    assert_eq!((again.len(), protected_bytes(&again)), (packet.len(), packet.len() - payloads.len()));
    let written = Records::parse(&again).expect("what is written can be read");
    assert!(written.eq(records), "what is read is what is written");
}

/// Its header, and the numbers that each eight bytes behind it are, as far apart as two bytes say.
fn look_at_seal(packet: &[u8]) {
    let Some((header, rest)) = SealHeader::parse(packet) else { return };
    assert!(is_sealed(packet) && !is_frame(packet) && Header::parse(packet).is_err());
    assert_eq!(header.encode(), packet[..SEAL_HEADER_BYTES], "what is read is what is written");
    assert_eq!(rest.len(), packet.len() - SEAL_HEADER_BYTES);
    let (mut window, mut taken, mut highest) = (ReplayWindow::default(), BTreeSet::new(), header.counter);
    let behind = rest.chunks_exact(2).map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]])));
    for (at, behind) in behind.enumerate() {
        let number = if at % 3 == 0 { highest.wrapping_add(behind) } else { highest.wrapping_sub(behind) };
        let is_new = window.is_new(number);
        assert!(!is_new || !taken.contains(&number), "{number} is taken twice");
        if number.saturating_add(REPLAY_WINDOW) >= highest {
            assert_eq!(is_new, !taken.contains(&number), "{number} is within reach of {highest}");
        }
        if is_new {
            window.note(number);
            highest = if taken.is_empty() { number } else { highest.max(number) };
            taken.insert(number);
        }
    }
}

fn look_at_icrc(flags: u8, identification: u16, received: u32, packet: &[u8]) {
    let addresses = if flags & 1 == 0 {
        Addresses::V4 { source: [10, 0, 0, flags], destination: [10, 0, 1, 2] }
    } else {
        Addresses::V6 { source: [flags; 16], destination: [0xfd; 16] }
    };
    let flow = Flow { addresses, source_port: 49_152 };
    let icrc = flow.icrc(identification, packet);
    let prefix = flow.prefix(packet.len());
    assert_eq!(prefix.icrc(identification, packet), icrc, "computed from the prefix, it is the same");
    let known = if flags & 1 == 0 { identification } else { NO_IDENTIFICATION };
    assert_eq!(flow.explain(identification, packet, icrc), Some(known));
    assert_eq!(prefix.explain(identification, packet, received), flow.explain(identification, packet, received));
    let _ = Syndrome::from_byte(flags).map(|syndrome| assert_eq!(syndrome.byte(), flags));
}
