//! One line for each packet, for people.
use crate::fabric::Arrival;
use freeflow_wire::Header;
use freeflow_wire::records::Records;

pub fn packet(from: usize, to: usize, bytes: &[u8], arrivals: &[Option<Arrival>; 2]) -> String {
    let fate = match arrivals {
        [None, _] => "lost".to_string(),
        [Some(first), None] => format!("at {}", first.at),
        [Some(first), Some(second)] => format!("at {} and {}", first.at, second.at),
    };
    if let Ok(records) = Records::parse(bytes) {
        let (qpn, psn, length) = (records.dest_qpn, records.psn, bytes.len());
        let operations: Vec<_> = records.map(|(record, _)| record.opcode.operation()).collect();
        return format!("h{from}>h{to} qpn {qpn:06x} psn {psn:06x} {operations:?} in {length} bytes, {fate}");
    }
    let Ok((header, payload)) = Header::parse(bytes) else { return format!("h{from}>h{to} malformed") };
    let mut line = format!(
        "h{from}>h{to} {:?} qpn {:06x} psn {:06x} {} bytes",
        header.opcode,
        header.dest_qpn,
        header.psn,
        payload.len()
    );
    if header.ack_request {
        line += " AckReq";
    }
    if header.opcode.has_aeth() {
        line += &format!(" {:?} msn {}", header.aeth.syndrome, header.aeth.msn);
    }
    if header.opcode.has_reth() {
        line += &format!(" {:x}+{}", header.reth.address, header.reth.length);
    }
    line + ", " + &fate
}
