//! The opcode table as a reviewed list: `opcodes.txt`.
use crate::list;
use freeflow_wire::{BTH_BYTES, Header, Opcode, Operation, PacketPosition, Service};
use std::fmt::Write;

fn headers(opcode: Opcode) -> String {
    let parts = [
        (opcode.has_xrceth(), "XRCETH"),
        (opcode.has_deth(), "DETH"),
        (opcode.has_feth(), "FETH"),
        (opcode.has_reth(), "RETH"),
        (opcode.has_atomic_eth(), "AtomicETH"),
        (opcode.has_aeth(), "AETH"),
        (opcode.has_atomic_ack_eth(), "AtomicAckETH"),
        (opcode.has_immediate(), "ImmDt"),
        (opcode.has_ieth(), "IETH"),
        (opcode.has_payload(), "payload"),
    ];
    parts.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect::<Vec<_>>().join(" ")
}

#[test]
fn table_is_as_listed() {
    let mut text = String::new();
    for byte in 0..=255 {
        match Opcode::from_byte(byte) {
            Some(opcode) => {
                let way = if opcode.is_response() { "response" } else { "request" };
                let length = Header::new(opcode, 0, 0).encode().length;
                writeln!(text, "{byte:#04x} {opcode:?}: {way}, {length} bytes: BTH {}", headers(opcode)).unwrap();
            }
            None => writeln!(text, "{byte:#04x} reserved").unwrap(),
        }
    }
    list::compare("opcodes.txt", &text);
}

#[test]
fn the_parts_of_an_opcode_make_it_again() {
    for opcode in (0..=255).filter_map(Opcode::from_byte) {
        assert_eq!(Opcode::new(opcode.service(), opcode.operation(), opcode.place()), Some(opcode));
        assert_eq!(Opcode::try_from(opcode.byte()), Ok(opcode));
        assert!(usize::from(Header::new(opcode, 0, 0).encode().length) >= BTH_BYTES);
    }
}

#[test]
fn first_and_middle_are_plain() {
    let new = |operation, place| Opcode::new(Service::Rc, operation, place).map(Opcode::byte);
    for operation in [Operation::SendImmediate, Operation::SendInvalidate] {
        assert_eq!(
            (new(operation, PacketPosition::First), new(operation, PacketPosition::Middle)),
            (Some(0x00), Some(0x01))
        );
    }
    assert_eq!(new(Operation::WriteImmediate, PacketPosition::First), Some(0x06));
    assert_eq!(new(Operation::WriteImmediate, PacketPosition::Middle), Some(0x07));
    assert_eq!(new(Operation::ReadRequest, PacketPosition::First), None);
    assert_eq!(Opcode::new(Service::Ud, Operation::Send, PacketPosition::First), None);
    assert_eq!(Opcode::new(Service::Uc, Operation::ReadRequest, PacketPosition::Only), None);
}
