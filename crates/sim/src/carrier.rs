//! A carrier between the hosts: a reliable transport of whole messages beside the wire, as a NIC is,
//! with a lane for each QP. It moves bytes from memory to memory by itself, late as it likes; it
//! declines, puts off, and breaks in the middle of traffic.
//!
//! Its promise is [`freeflow_engine::Carrier`]'s: messages of a lane are executed in order, and
//! when it breaks, all messages that were not executed are given back, in order.
//! [`CarrierModel::lies`] is for tests of the checkers: a carrier that does not keep its word.
use freeflow_engine::*;
use std::collections::VecDeque;

/// Rates in parts of a million. All zero: there is no carrier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CarrierModel {
    /// Turns of a QP before which it is told to use the carrier (two of three), or the wire.
    pub switches: u64,
    /// Messages that it does not take at all, or not yet.
    pub declined: u64,
    pub put_off: u64,
    /// Messages at which a lane breaks: when they arrive, or with half of their way done.
    pub breaks: u64,
    /// From one end to the other, at most.
    pub delay_ns_max: u64,
    /// Of a message that was executed it says, when it breaks, that it was not.
    pub lies: bool,
}

/// A message that was taken.
pub struct Load {
    pub qp: QpId,
    pub token: Token,
    pub to: HostId,
    pub head: CarriedHead,
    /// Times that it may still find no RECV; `None`: any number.
    pub rnr_retries_left: Option<u8>,
    /// Inline payload; else it lies in `spans`, or (READ) goes there.
    pub bytes: Vec<u8>,
    pub spans: Vec<Span>,
}

/// Messages of one QP, the oldest of which is on its way.
#[derive(Default)]
pub struct Lane {
    pub loads: VecDeque<Load>,
    /// Results keep their order.
    pub last_result_at: u64,
    /// Until its QP has heard that the lane broke, all that comes is given back.
    pub broken_until: u64,
    pub busy_count: u32,
    /// Its QP does no more work: what its target has not admitted is given back.
    pub is_withdrawn: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CarrierCounts {
    pub taken: u64,
    pub executed: u64,
    pub returned: u64,
}
