//! The header of management datagrams (MADs), as if from QP 1 (IBTA 13.5.1).
use crate::PacketHead;
use freeflow_wire::cm::{MAD_BYTES, MAD_QKEY, MAD_QPN};
use freeflow_wire::{Header, Opcode, Operation, PacketPosition, Service};

pub(crate) fn opcode() -> Opcode {
    Opcode::new(Service::Ud, Operation::Send, PacketPosition::Only).expect("UD has SEND ONLY")
}

/// The headers of a management datagram to another host.
pub fn management_head(psn: u32) -> PacketHead {
    let mut header = Header::new(opcode(), MAD_QPN, psn);
    header.deth.qkey = MAD_QKEY;
    header.deth.source_qpn = MAD_QPN;
    PacketHead::new(header, MAD_BYTES)
}
