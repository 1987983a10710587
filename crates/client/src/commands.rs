//! The router's commands to this process: to revoke peers' direct access to its memory, and to
//! re-share it.
//!
//! Carrying one out needs unsafe code, which stands in the crate `remap`.
use freeflow_protocol::library::{COMMAND_RESHARE, COMMAND_REVOKE, COMMAND_SHARE, Handle, SHARE_BYTES, decode_command};
use freeflow_shm::revocation::RevokeCommands;
use std::ops::Range;
use std::sync::atomic::{AtomicI32, Ordering};

pub use freeflow_protocol::library::{COMMAND_BYTES, REVOCATION_TIME_MAX_MS};

/// The commands of one session, which are carried out in the order that they come in.
#[derive(Debug)]
pub struct PendingCommands {
    /// The read end of their pipe, or -1.
    pipe: AtomicI32,
    pub commands: RevokeCommands,
}

impl Default for PendingCommands {
    fn default() -> Self {
        Self { pipe: AtomicI32::new(-1), commands: RevokeCommands::default() }
    }
}

impl PendingCommands {
    /// The pipe with the unread commands; -1: there are none.
    pub fn pipe(&self) -> i32 {
        // Relaxed: a pipe of a moment ago that is closed by now has no commands.
        self.pipe.load(Ordering::Relaxed)
    }

    pub fn set_pipe(&self, descriptor: i32) {
        self.pipe.store(descriptor, Ordering::Relaxed);
    }
}

/// A command about one segment, or about some addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryCommand {
    /// To replace all that is mapped of a segment by private copies, and to confirm that.
    Revoke(Handle),
    /// To move the copies that took a segment's place into a new segment. A request: nobody waits
    /// for it.
    Reshare(Handle),
    /// To move memory that regions touch at these addresses into segments. A request, as well.
    Share(Range<u64>),
    /// One that this library does not know.
    Unknown,
}

impl MemoryCommand {
    pub fn decode(command: [u8; COMMAND_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h] = command;
        let segment = Handle::from_le_bytes([a, b, c, d]);
        match decode_command(segment, u32::from_le_bytes([e, f, g, h])) {
            (COMMAND_REVOKE, _) => Self::Revoke(segment),
            (COMMAND_RESHARE, _) => Self::Reshare(segment),
            (COMMAND_SHARE, address) => Self::Share(address..address.saturating_add(SHARE_BYTES)),
            _ => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_protocol::library::share_command;

    #[test]
    fn a_command_names_a_segment() {
        let command = |kind| MemoryCommand::decode([0x78, 0x56, 0x34, 0x12, kind, 0, 0, 0]);
        assert_eq!(command(0), MemoryCommand::Revoke(0x1234_5678));
        assert_eq!(command(1), MemoryCommand::Reshare(0x1234_5678));
        assert_eq!(command(3), MemoryCommand::Unknown);
    }

    #[test]
    fn a_command_names_addresses() {
        for address in [0, SHARE_BYTES, 0x7fff_1234_0000, (1 << 56) - SHARE_BYTES] {
            let (first, second) = share_command(address + SHARE_BYTES - 1);
            let command: Vec<u8> = [first.to_le_bytes(), second.to_le_bytes()].concat();
            let range = address..address + SHARE_BYTES;
            assert_eq!(MemoryCommand::decode(command.try_into().unwrap()), MemoryCommand::Share(range));
        }
    }
}
