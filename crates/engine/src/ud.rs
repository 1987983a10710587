//! Unreliable datagrams. What precedes their payload says [`freeflow_verbs::datagram`].
pub use freeflow_verbs::datagram::{GRH_BYTES, UD_MESSAGE_BYTES_MAX};
pub(crate) use freeflow_verbs::datagram::{grh, is_ipv6};

/// High bit of a posted Q_Key: the sender's own QP's Q_Key is used instead (IBTA 10.2.5).
pub(crate) const QKEY_USE_OWN: u32 = 0x8000_0000;
