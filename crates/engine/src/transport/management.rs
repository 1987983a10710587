//! Management datagrams (MADs) of machines without FreeFlow: they come to QP 1 and go out as if from there (IBTA 13.5.1).
//!
//! No tenant has QP 1, and none can send to another host's: whose connections are managed is the environment's to say. Other
//! routers have a channel for this, so what comes from them by packets is nobody's.
use crate::PacketHead;
use freeflow_wire::cm::{MAD_BYTES, MAD_QKEY, MAD_QPN};
use freeflow_wire::{Header, Opcode, Operation, Place, Service};

pub(crate) fn opcode() -> Opcode {
    Opcode::new(Service::Ud, Operation::Send, Place::Only).expect("UD has SEND ONLY")
}

/// The headers of a management datagram to another host.
pub fn management_head(psn: u32) -> PacketHead {
    let mut header = Header::new(opcode(), MAD_QPN, psn);
    header.deth.qkey = MAD_QKEY;
    header.deth.source_qpn = MAD_QPN;
    PacketHead::new(header, MAD_BYTES)
}
