//! Orders of the router to this process: to take its memory back from peers that reach it directly.
//!
//! Carrying one out needs unsafe code, which stands with the drop-in.
use crate::session::Session;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_verbs::VerbsError;
use std::os::fd::OwnedFd;

pub use freeflow_protocol::library::ORDER_BYTES;

impl Session {
    /// The read end of the pipe of orders, [`ORDER_BYTES`] each. From now on the router may grant this process' segments to
    /// peers, and counts on an answer to each order within
    /// [`WITHDRAWAL_TIME_MAX_MS`](freeflow_protocol::library::WITHDRAWAL_TIME_MAX_MS).
    ///
    /// # Errors
    /// NotSupported: nothing is granted here.
    pub fn open_orders(&self) -> Result<OwnedFd, VerbsError> {
        let (reply, mut descriptors) = self.call(&Request::OpenOrders)?;
        match (reply, descriptors.pop()) {
            (Reply::Done, Some(pipe)) => Ok(pipe),
            _ => Err(self.nonsense()),
        }
    }

    /// Nothing of this segment is mapped in the process any more, but for the library's own use.
    pub fn confirm_withdrawal(&self, segment: Handle) -> Result<(), VerbsError> {
        self.command(&Request::ConfirmWithdrawal { segment })
    }
}

/// The segment that an order names.
pub fn ordered_segment(order: [u8; ORDER_BYTES]) -> Handle {
    let [a, b, c, d, ..] = order;
    Handle::from_le_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_names_a_segment() {
        assert_eq!(ordered_segment([0x78, 0x56, 0x34, 0x12, 0, 0, 0, 0]), 0x1234_5678);
    }
}
