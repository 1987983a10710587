//! The ICRC once more: bit by bit, over a datagram as it travels.
use freeflow_wire::UDP_PORT;
use freeflow_wire::icrc::{Addresses, Flow};

/// The IP and UDP headers that `flow` sends `packet` with; the fields that the ICRC leaves out have some value.
pub fn headers(flow: &Flow, identification: u16, dont_fragment: bool, packet: &[u8]) -> Vec<u8> {
    let udp_length = (8 + packet.len() + 4) as u16;
    let mut bytes = Vec::new();
    match flow.addresses {
        Addresses::V4 { source, destination } => {
            bytes.extend([0x45, 0x12]);
            bytes.extend((20 + udp_length).to_be_bytes());
            bytes.extend(identification.to_be_bytes());
            bytes.extend([u8::from(dont_fragment) << 6, 0, 63, 17, 0xca, 0xfe]);
            bytes.extend(source);
            bytes.extend(destination);
        }
        Addresses::V6 { source, destination } => {
            bytes.extend([0x61, 0x23, 0x45, 0x67]);
            bytes.extend(udp_length.to_be_bytes());
            bytes.extend([17, 63]);
            bytes.extend(source);
            bytes.extend(destination);
        }
    }
    bytes.extend(flow.source_port.to_be_bytes());
    bytes.extend(UDP_PORT.to_be_bytes());
    bytes.extend(udp_length.to_be_bytes());
    bytes.extend([0xbe, 0xef]);
    bytes
}

/// The ICRC of `packet` behind these headers.
pub fn icrc(headers: &[u8], packet: &[u8]) -> u32 {
    let mut bytes = vec![0xff; 8];
    bytes.extend(headers);
    let ip = 8;
    let changed: &[usize] = if headers[0] >> 4 == 4 { &[1, 8, 10, 11, 26, 27] } else { &[1, 2, 3, 7, 46, 47] };
    for at in changed {
        bytes[ip + at] = 0xff;
    }
    if headers[0] >> 4 == 6 {
        bytes[ip] |= 0x0f;
    }
    let bth = bytes.len();
    bytes.extend(packet);
    if packet.len() > 4 {
        bytes[bth + 4] = 0xff;
    }
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    })
}
