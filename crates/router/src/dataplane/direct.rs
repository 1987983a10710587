//! Direct rings: how a QP's messages reach the RECVs of its peer on the same host past the router, and when they may
//! not.
//!
//! The router makes the direct ring's memory, and hands it to both ends: to the sender when that
//! asks, to the receiver when it looks after a notification. It maps nothing of it itself. What it
//! has a word in is shown by the rings' own headers: a number in the header of the sender's queue
//! says whether the ring may still be used; a word for each RECV says who takes it.
//!
//! Invariant: the router believes a sender's word about which RECV comes next (`MSN`) only while
//! the two QPs are the pair that opened the direct ring, and the RECV itself goes to whoever claims
//! it first.
use crate::admission::account::Charge;
use crate::dataplane::datagram_rings::Datagrams;
use crate::dataplane::direct_traffic::Counted;
use crate::dataplane::reasons::Asked;
use freeflow_engine::QpId;
use freeflow_protocol::admin::DataPath;
use freeflow_shm::layout::direct_ring;
use freeflow_verbs::{NetworkId, QUEUE_WORK_REQUESTS_MAX};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

/// Which networks' vNICs may reach each other directly.
#[derive(Debug, Default)]
pub struct Policy {
    /// A network that is not in it is `Auto`.
    networks: BTreeMap<NetworkId, DataPath>,
}

impl Policy {
    pub fn of(&self, network: NetworkId) -> DataPath {
        self.networks.get(&network).copied().unwrap_or_default()
    }

    pub fn set(&mut self, network: NetworkId, path: DataPath) {
        self.networks.insert(network, path);
    }

    /// A network belongs to one tenant.
    pub fn allows(&self, network: NetworkId) -> bool {
        self.of(network) != DataPath::Routed
    }
}

/// State of one QP on the direct path.
#[derive(Default)]
pub struct Direct {
    /// As its send queue's header says: DIRECT_RINGS_CLOSED, GRANTS_REVOKED.
    pub(crate) direct_rings_closed: u32,
    pub(crate) grants_revoked: u32,
    /// `grants_revoked` when it was last granted something.
    pub(crate) granted_at: Option<u32>,
    /// Bytes paid for grants since it was made, out of those carried for it.
    pub(crate) grants_paid: u64,
    /// How many direct rings that led to it were closed, as its receive queue's header says.
    pub(crate) led_here: u32,
    /// How often it was reset.
    pub(crate) incarnation: u32,
    /// Something was given to it since its last reset: its send queue's header is kept up to date.
    pub(crate) is_used: bool,
    /// Its count of direct requests when the router took its last request.
    pub(crate) routed_at: u64,
    pub(crate) asked: Asked,
    /// The receiver of its direct ring.
    pub(crate) to: Option<QpId>,
    /// The last receiver, and its incarnation then; also when the direct ring is closed.
    pub(crate) pair: Option<(QpId, u32)>,
    /// `MSN` as last seen.
    pub(crate) msn: u32,
    /// The channel of which it is the receiver.
    pub(crate) from: Option<Incoming>,
    /// The last sender, also when the direct ring is closed.
    pub(crate) fed_by: Option<QpId>,
    pub(crate) counted: Counted,
    /// Of a UD QP that has, or had, rings.
    pub(crate) datagrams: Option<Box<Datagrams>>,
}

/// A direct ring as its receiver sees it.
pub(crate) struct Incoming {
    pub(crate) sender: QpId,
    /// Until it is accepted.
    pub(crate) descriptor: Option<OwnedFd>,
    pub(crate) _charge: Charge,
}

impl Direct {
    #[inline]
    pub fn is_used(&self) -> bool {
        self.is_used
    }

    /// Its peer's process takes messages by a direct ring.
    pub fn is_accepted(&self) -> bool {
        self.from.as_ref().is_some_and(|from| from.descriptor.is_none())
    }

    /// The memory of the direct ring of which it is the receiver, once.
    pub(crate) fn take_ring(&mut self) -> Option<OwnedFd> {
        self.from.as_mut()?.descriptor.take()
    }

    /// It sends by a direct ring, if its peer's process takes messages from it.
    pub(crate) fn has_direct_ring(&self) -> bool {
        self.to.is_some()
    }

    /// The QP was reset.
    pub fn begin_anew(&mut self) {
        *self = Self {
            direct_rings_closed: self.direct_rings_closed,
            led_here: self.led_here,
            grants_revoked: self.grants_revoked,
            grants_paid: self.grants_paid,
            incarnation: self.incarnation.wrapping_add(1),
            counted: std::mem::take(&mut self.counted),
            datagrams: self.datagrams.take(),
            asked: self.asked.begin_anew(),
            ..Self::default()
        };
    }
}

/// Of a direct ring's memory, whoever receives: the rest of a short queue's is never touched.
pub(crate) fn ring_bytes() -> usize {
    direct_ring::bytes(QUEUE_WORK_REQUESTS_MAX.next_power_of_two())
}
