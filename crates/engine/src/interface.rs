//! Arguments and answers of the engine's verbs.
use crate::{ContextId, CqId, MrId, PdId, QpId, SrqId, XrcdId};
use alloc::vec::Vec;
use freeflow_verbs::{QpCapabilities, QpType, VerbsError};

/// Result of `run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing more is posted on this QP's send queue (or its state does not allow work).
    Idle,
    /// The budget is used up; there is more to do.
    More,
    /// Waits for a timer, a RECV or a pending copy; the engine itself will name the QP in
    /// `poll_ready` when it can go on.
    Waiting,
}

/// A verb that has to wait until copies in flight are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The verb is refused; nothing has changed.
    Error(VerbsError),
    /// Ask again once copies have finished (at the latest after the pending copies'
    /// `handle_copied`).
    InFlight,
}

/// A memory region and its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MrKeys {
    /// The region.
    pub mr: MrId,
    /// Key in local scatter/gather entries.
    pub lkey: u32,
    /// Key in peers' requests.
    pub rkey: u32,
}

/// Parameters of [`crate::Engine::create_qp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInit {
    /// All but `XrcReceive`.
    pub pd: Option<PdId>,
    /// Type of the QP.
    pub qp_type: QpType,
    /// All but `XrcReceive`.
    pub send_cq: Option<CqId>,
    /// RC, UC, UD.
    pub recv_cq: Option<CqId>,
    /// RC, UC, UD; may be absent.
    pub srq: Option<SrqId>,
    /// `XrcReceive`.
    pub xrcd: Option<XrcdId>,
    /// Queue sizes that are asked for.
    pub capabilities: QpCapabilities,
    /// Each send request gives a completion, signaled or not.
    pub all_signaled: bool,
    /// UD: its own multicast messages don't come back to it.
    pub block_own_multicast: bool,
    /// Echoed in completions.
    pub cookie: u32,
}

/// Names of what a session has.
#[derive(Clone, Debug, Default)]
pub struct SessionObjects {
    /// Device contexts.
    pub contexts: Vec<ContextId>,
    /// Completion queues.
    pub cqs: Vec<CqId>,
    /// Shared receive queues.
    pub srqs: Vec<SrqId>,
    /// Queue pairs.
    pub qps: Vec<QpId>,
    /// XRC domains, once for each time that they are open.
    pub xrcds: Vec<XrcdId>,
}
