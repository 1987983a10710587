//! Orders of the router to this process: to take its memory back from peers that reach it directly, and to share it again.
//!
//! Carrying one out needs unsafe code, which stands with the drop-in.
use crate::session::Session;
use freeflow_protocol::library::{Handle, ORDER_SHARE_AGAIN, ORDER_TAKE_BACK, Reply, Request};
use freeflow_shm::revocation::RevokeCommands;
use freeflow_verbs::VerbsError;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

pub use freeflow_protocol::library::{ORDER_BYTES, WITHDRAWAL_TIME_MAX_MS};

/// The orders of one session, which are carried out in their order.
#[derive(Debug)]
pub struct OrdersInHand {
    /// The read end of their pipe, or -1.
    pipe: AtomicI32,
    pub commands: RevokeCommands,
}

impl Default for OrdersInHand {
    fn default() -> Self {
        Self { pipe: AtomicI32::new(-1), commands: RevokeCommands::default() }
    }
}

impl OrdersInHand {
    /// Where those are that nobody has read; -1: there are none.
    pub fn pipe(&self) -> i32 {
        // Relaxed: a pipe of a moment ago that is closed by now has no orders.
        self.pipe.load(Ordering::Relaxed)
    }

    pub fn set_pipe(&self, descriptor: i32) {
        self.pipe.store(descriptor, Ordering::Relaxed);
    }
}

impl Session {
    /// Of this session.
    pub fn orders_in_hand(&self) -> &Arc<OrdersInHand> {
        &self.orders_in_hand
    }

    /// The read end of the pipe of orders, [`ORDER_BYTES`] each. From now on the router may grant this process' segments to
    /// peers, and counts on an answer to each order within
    /// [`WITHDRAWAL_TIME_MAX_MS`].
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

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// All that is mapped of a segment; to be confirmed.
    TakeBack(Handle),
    /// The copies that took a segment's place. Advice.
    ShareAgain(Handle),
    /// Nothing that is known here.
    Unknown,
}

impl Order {
    pub fn decode(order: [u8; ORDER_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h] = order;
        let segment = Handle::from_le_bytes([a, b, c, d]);
        match u32::from_le_bytes([e, f, g, h]) {
            ORDER_TAKE_BACK => Self::TakeBack(segment),
            ORDER_SHARE_AGAIN => Self::ShareAgain(segment),
            _ => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_names_a_segment() {
        let order = |kind| Order::decode([0x78, 0x56, 0x34, 0x12, kind, 0, 0, 0]);
        assert_eq!(order(0), Order::TakeBack(0x1234_5678));
        assert_eq!(order(1), Order::ShareAgain(0x1234_5678));
        assert_eq!(order(2), Order::Unknown);
    }
}
