//! Extended reliable connections (IBTA annex A14): domains, shared receive queues by number, and
//! target QPs that several processes have open.
//!
//! A target QP has no queues and no protection domain of its own. Each request names an SRQ of the
//! target's domain; while the request is in hand it stands in `QueuePair::srq`, its RECVs are the
//! ones consumed, its PD is the one that keys must belong to, its CQ the one that hears of it.
//!
//! Invariant: a domain is there as long as somebody has it open; what stands on an opened domain
//! (SRQs, target QPs) keeps it from being closed. A target QP goes with its last opener.
use crate::slab::{Owned, Slab};
use crate::table::NumberTable;
use crate::{ContextId, CqId, SessionId, VnicId, XrcdId};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use freeflow_verbs::{FileIdentity, Shard};
use serde::{Deserialize, Serialize};

/// Never given out twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct DomainId(u64);

#[derive(Serialize, Deserialize)]
pub(crate) struct Domain {
    /// Where other processes find it.
    pub file: Option<(VnicId, FileIdentity)>,
    /// How often it is open.
    pub opens: u32,
}

/// One `ibv_open_xrcd`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Xrcd {
    pub session: SessionId,
    pub context: ContextId,
    pub domain: DomainId,
    /// SRQs, and target QPs opened through it.
    pub children: u32,
}

impl Owned for Xrcd {
    fn session(&self) -> SessionId {
        self.session
    }
}

/// Fields of an SRQ for XRC that others have not.
#[derive(Serialize, Deserialize)]
pub(crate) struct XrcQueue {
    pub xrcd: XrcdId,
    pub domain: DomainId,
    pub cq: CqId,
    /// 24 bits, unique on a host. 0: it is being destroyed.
    pub number: u32,
    /// Pending copies into its RECVs.
    pub in_flight: u32,
    /// Echoed in completions.
    pub cookie: u32,
}

/// Fields of a target QP that others have not.
#[derive(Serialize, Deserialize)]
pub(crate) struct Target {
    pub domain: DomainId,
    /// Sessions that have it open, once for each time; never empty.
    pub openers: Vec<SessionId>,
    /// Through which opened domain: parallel to `openers`.
    pub xrcds: Vec<XrcdId>,
}

impl Target {
    pub fn new(session: SessionId, xrcd: XrcdId, domain: DomainId) -> Self {
        Self { domain, openers: alloc::vec![session], xrcds: alloc::vec![xrcd] }
    }
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Xrc {
    pub domains: BTreeMap<DomainId, Domain>,
    pub files: BTreeMap<(VnicId, FileIdentity), DomainId>,
    pub xrcds: Slab<XrcdId, Xrcd>,
    /// Number of an SRQ to its slab index.
    pub numbers: NumberTable,
    pub domains_made: u64,
}

impl Xrc {
    pub fn new(shard: Shard) -> Self {
        Self {
            domains: BTreeMap::new(),
            files: BTreeMap::new(),
            xrcds: Slab::new(shard),
            numbers: NumberTable::new(),
            domains_made: 0,
        }
    }

    pub fn make_domain(&mut self, file: Option<(VnicId, FileIdentity)>) -> DomainId {
        self.domains_made += 1;
        let id = DomainId(self.domains_made);
        self.domains.insert(id, Domain { file, opens: 0 });
        if let Some(file) = file {
            self.files.insert(file, id);
        }
        id
    }

    pub fn close(&mut self, id: DomainId) {
        let domain = self.domains.get_mut(&id).expect("an opened domain is there");
        domain.opens -= 1;
        if domain.opens > 0 {
            return;
        }
        if let Some(file) = domain.file {
            self.files.remove(&file);
        }
        self.domains.remove(&id);
    }
}
