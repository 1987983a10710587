//! RoCEv2 packets (IBTA 1.4 chapter 9, annexes A14, A16, A17, A19): the typed opcode table, headers
//! as validated values, the ICRC, the messages of connection management. No I/O, no unsafe; every
//! parser is total: any bytes give a value or an error.
//!
//! A datagram (the payload of UDP port 4791) is: BTH, extension headers, payload, 0 to 3 bytes of padding, ICRC.
//!
//! ```
//! use freeflow_wire::icrc::{Addresses, Flow, NO_IDENTIFICATION};
//! use freeflow_wire::{Header, Opcode, Operation, PacketPosition, Reth, Service};
//!
//! // A WRITE of four bytes in one packet.
//! let opcode = Opcode::new(Service::Rc, Operation::Write, PacketPosition::Only).expect("the standard has it");
//! let mut header = Header::new(opcode, 0x11, 7);
//! header.reth = Reth { address: 0x7000, rkey: 0x1234, length: 4 };
//! let mut packet = header.encode().as_slice().to_vec();
//! packet.extend(b"data");
//! assert_eq!(Header::parse(&packet), Ok((header, &b"data"[..])));
//!
//! // Its ICRC covers payload, headers and addresses.
//! let addresses = Addresses::V4 { source: [192, 0, 2, 1], destination: [192, 0, 2, 2] };
//! let flow = Flow { addresses, source_port: 49_152 };
//! let icrc = flow.icrc(NO_IDENTIFICATION, &packet);
//! assert_eq!(flow.explain(NO_IDENTIFICATION, &packet, icrc), Some(NO_IDENTIFICATION));
//! *packet.last_mut().expect("it has bytes") ^= 1;
//! assert_eq!(flow.explain(NO_IDENTIFICATION, &packet, icrc), None);
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod cm;
pub mod frame;
mod header;
pub mod icrc;
mod kept;
mod opcode;
pub mod records;
mod replay;
pub mod sealed;
mod syndrome;

pub use header::{Aeth, AtomicEth, Deth, Header, HeaderBytes, Malformed, Reth};
pub use kept::Kept;
pub use opcode::{Opcode, Operation, PacketPosition, ReservedOpcode, Service};
pub use replay::{REPLAY_WINDOW, ReplayWindow};
pub use syndrome::{NakCode, Syndrome};

/// UDP destination port of RoCEv2 (IANA).
pub const UDP_PORT: u16 = 4791;
/// Length of the base transport header.
pub const BTH_BYTES: usize = 12;
/// Length of the invariant CRC at the end of a packet.
pub const ICRC_BYTES: usize = 4;
/// BTH and the longest extensions: XRCETH and AtomicETH (12 + 4 + 28).
pub const HEADER_BYTES_MAX: usize = 44;
/// Largest payload of a packet, bytes: path MTU 4096.
pub const PAYLOAD_BYTES_MAX: usize = 4096;
/// 24-bit numbers: QPNs, PSNs, MSNs.
pub const MASK_24: u32 = 0x00ff_ffff;
/// The default partition, full member.
pub const PKEY_DEFAULT: u16 = 0xffff;

/// Destination QPN of a packet, or of a [frame](frame); 0 of one that is too short.
#[inline]
pub fn dest_qpn(packet: &[u8]) -> u32 {
    match packet.first_chunk::<8>() {
        Some(&[.., a, b, c]) => u32::from_be_bytes([0, a, b, c]),
        None => 0,
    }
}

/// Adds to a PSN, modulo 2^24.
pub const fn psn_add(psn: u32, count: u32) -> u32 {
    psn.wrapping_add(count) & MASK_24
}

/// How far `psn` is ahead of `base` (negative: behind), modulo 2^24, in -2^23 .. 2^23 (IBTA 9.7.2).
pub const fn psn_ahead(psn: u32, base: u32) -> i32 {
    ((psn.wrapping_sub(base) << 8) as i32) >> 8
}
