//! A connection of the command line.
use freeflow_protocol::admin::AdminReply;
use std::os::fd::OwnedFd;

pub struct AdminConnection {
    pub socket: OwnedFd,
    pub pid: i32,
    pub queued: bool,
}

/// Result of a request.
#[allow(clippy::large_enum_variant, reason = "it lives for a moment")]
pub(crate) enum AdminDone {
    Reply(AdminReply),
    /// The worker has a part in it.
    Later,
}
