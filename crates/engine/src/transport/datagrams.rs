//! UD packets of other hosts that wait: for a RECV, or for the owner of their sender to say who
//! that is.
use crate::limits::{RNR_GRACE_STEP, RNR_GRACE_STEPS};
use crate::ud::grh;
use crate::{GRH_BYTES, HostId};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use freeflow_verbs::{Duration, Gid, GlobalRoute, Instant, SendOpcode};
use serde::{Deserialize, Serialize};

/// Packets that wait for word of their senders, of all hosts together and of one.
pub(crate) const UNRESOLVED_MAX: usize = 1024;

pub(crate) const UNRESOLVED_OF_HOST_MAX: usize = 256;

/// Packets that wait at one QP, and for how long.
pub(crate) const DATAGRAMS_MAX: usize = 1024;

pub(crate) const DATAGRAM_RNR_GRACE: Duration = Duration(RNR_GRACE_STEP.0 * RNR_GRACE_STEPS as u64);

/// A UD packet whose sender is known.
#[derive(Serialize, Deserialize)]
pub(crate) struct Datagram {
    pub header: DatagramHeader,
    pub payload: Vec<u8>,
    pub at: Instant,
}

/// Fields of a UD packet that matter to its receiver.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct DatagramHeader {
    pub grh: DatagramRoute,
    pub source_qpn: u32,
    pub qkey: u32,
    pub immediate: Option<u32>,
    pub solicited: bool,
    /// The sender's IPv6 address sent it, to the receiver's (or to a group).
    pub by_ipv6: bool,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct DatagramRoute {
    pub source: Gid,
    pub destination: Gid,
    pub traffic_class: u8,
    pub hop_limit: u8,
}

/// UD packets of unresolved senders, in the order of arrival.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct UnresolvedSenders {
    pub waiting: VecDeque<UnresolvedDatagram>,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct UnresolvedDatagram {
    pub host: HostId,
    pub source_qpn: u32,
    pub dest_qpn: u32,
    pub header: DatagramHeader,
    pub payload: Vec<u8>,
}

impl DatagramHeader {
    /// The bytes in front of a payload of this length.
    pub fn prefix(&self, length: u32) -> [u8; GRH_BYTES] {
        let DatagramRoute { source, destination, traffic_class, hop_limit } = self.grh;
        let to = GlobalRoute { dgid: destination, traffic_class, hop_limit, ..GlobalRoute::default() };
        grh(source, &to, length, self.immediate.is_some())
    }

    pub fn opcode(&self) -> SendOpcode {
        if self.immediate.is_some() { SendOpcode::SendWithImmediate } else { SendOpcode::Send }
    }
}
