//! Scheduling: how much each QP may send, and which one is next.
//!
//! [`Scheduler`] is the seam for other algorithms, [`FairScheduler`] the one that runs. What the
//! engine asks of it stands in `metering`: every run of a QP whose vNIC is *metered* (some limit of
//! rate applies to it) asks for an allowance first and is charged afterwards; of all others nothing
//! but the vNIC's share of turns is counted.
mod bucket;
mod fair;
mod gate;
mod held;
mod order;

pub use fair::FairScheduler;

use crate::{QpId, VnicId};
use freeflow_verbs::{Duration, Instant, RateLimit, Shaping, TenantId};
use serde::{Deserialize, Serialize};

/// The algorithm that this engine runs.
pub(crate) type Schedule = FairScheduler;

/// The amounts that a QP may use now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// Payload; at least 1. A run may use somewhat more, a burst or a chunk; it is charged all the
    /// same.
    pub bytes: u64,
    /// Messages that may begin.
    pub messages: u32,
}

/// The amounts that a run used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// Payload, bytes.
    pub bytes: u64,
    /// Messages that began.
    pub messages: u32,
}

/// Times that a limit held something back, and for how long in all, until now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Throttled {
    /// Times that a QP waited.
    pub waits: u64,
    /// Time that QPs waited, summed.
    pub time: Duration,
}

/// An algorithm that says which QP runs next, and how much it may use.
///
/// It has two halves that share what vNICs are held to. *Turns*: QPs that have work, or may have,
/// are listed (`push`), and taken out one at a time (`pop`); whoever lists them decides when they
/// run. *Limits*: a run of a metered vNIC's QP begins with `allowance`. `None` means that it may
/// use nothing: if it has something to send, `wait` puts it into a line, and it comes out by
/// `poll_eligible` when its turn has come. Every run ends with `charge`, and one that got an
/// allowance with `finish`.
///
/// Rules for an algorithm: it reads no clock and draws no lots; all it keeps is plain data that
/// goes into snapshots; what it does in one call is bounded by the number of vNICs and QPs, and in
/// `push`, `pop`, `is_metered` and `charge` of an unmetered vNIC it is a few loads and stores. A QP
/// that waits must come out in the end, whatever becomes of others (a QP that was let out may be
/// destroyed, or run much later). Nothing is lost by calling a QP out too early: it asks again.
pub trait Scheduler: Default + Serialize + for<'de> Deserialize<'de> {
    /// In force at once: whoever waits by the old numbers becomes eligible, and asks again. All in
    /// one pass over what there is.
    fn set_shapings(&mut self, now: Instant, shapings: &[(VnicId, Shaping)]);
    /// The same for all vNICs of a tenant together.
    fn set_tenant_limit(&mut self, now: Instant, tenant: TenantId, limit: &RateLimit);
    /// `None`: nobody has said anything about the vNIC.
    fn shaping(&self, vnic: VnicId) -> Option<Shaping>;
    /// Its QPs are gone.
    fn forget_vnic(&mut self, vnic: VnicId);
    /// The QP is gone, whether it waits or not. (It may still be listed: `pop` may give the names
    /// of QPs that are gone.)
    fn forget_qp(&mut self, now: Instant, qp: QpId);
    /// Whether a limit of rate applies.
    fn is_metered(&self, vnic: VnicId) -> bool;

    /// Lists a QP, behind all others of its vNIC. It must not be listed already.
    fn push(&mut self, vnic: VnicId, qp: QpId);
    /// Unlists a QP, if it is listed.
    fn remove(&mut self, vnic: VnicId, qp: QpId);
    /// The QP that runs next; it is not listed any more.
    fn pop(&mut self) -> Option<(VnicId, QpId)>;
    /// Number of listed QPs.
    fn listed_count(&self) -> usize;
    /// Whether there is a vNIC with a higher priority, busy or not: then one run should not take
    /// long.
    fn gives_way(&self, vnic: VnicId) -> bool;

    /// The amounts that a QP of a metered vNIC may use.
    fn allowance(&mut self, now: Instant, vnic: VnicId, qp: QpId) -> Option<Allowance>;
    /// It used so much, allowed or not.
    fn charge(&mut self, vnic: VnicId, qp: QpId, used: &Used);
    /// It has more to send than it was allowed.
    fn wait(&mut self, now: Instant, vnic: VnicId, qp: QpId);
    /// `(vnic, qp)` needs tokens of others, of whose memory it reads. False: they have some. True:
    /// it becomes eligible when they may have.
    fn wait_for(&mut self, now: Instant, who: (VnicId, QpId), others: (VnicId, QpId)) -> bool;
    /// Its run is over, and it does not wait.
    fn finish(&mut self, now: Instant, vnic: VnicId, qp: QpId);
    /// It waits no more, whatever for.
    fn give_up(&mut self, now: Instant, qp: QpId);
    /// Tokens may have come.
    fn handle_timeout(&mut self, now: Instant);
    /// A QP that waited and is to run now, to be asked for after each of the calls above.
    fn poll_eligible(&mut self) -> Option<QpId>;
    /// When `handle_timeout` is next needed.
    fn poll_timeout(&self) -> Option<Instant>;
    /// Whether the QP waits for tokens.
    fn is_waiting(&self, qp: QpId) -> bool;

    /// Waits of the vNIC's QPs until now.
    fn throttled_vnic(&self, now: Instant, vnic: VnicId) -> Throttled;
    /// Waits of the QP until now.
    fn throttled_qp(&self, now: Instant, qp: QpId) -> Throttled;
    /// False for what was read from damaged bytes.
    fn is_consistent(&self) -> bool;
}
