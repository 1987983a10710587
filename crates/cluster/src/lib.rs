//! A cluster: hosts that follow one declaration, on etcd.
//!
//! - [`ClusterFile`]: where etcd is, and who we are to it.
//! - [`Operator`]: reads and changes what is declared for all hosts.
//! - [`Follow`]: the news of a cluster, as they come, for one host.
//! - [`View`]: the cluster as those news have it: what is declared, which hosts there are, whose blocks.
//! - [`mirror`]: from that to what one host has to have.
//! - [`Tokens`], [`join`]: a machine becomes a host; [`Admission`]: a controller lets it in.
//! - [`Controller`]: gives each host a block of each network's addresses, and takes it back; gives vNICs to hosts.
//!
//! | keys under the root | written by | |
//! |---|---|---|
//! | `cluster/` | operators | [`Identity`], after how long a silence blocks are taken back, and [`Drained`] hosts |
//! | `declared/` | operators | objects, as one host's store has them |
//! | `hosts/NAME/` | that host | [`HostRecord`], [`Holdings`], [`Members`]: all hosts follow them |
//! | `said/NAME/` | that host | [`Followed`]: controllers follow it |
//! | `vnics/NAME/` | that host | [`HostVnics`]: who looks at them reads them |
//! | `blocks/` | controllers | a range of addresses by network and host |
//! | `places/` | controllers, operators | the host of each declared vNIC: [`Place`] |
//! | `requests/ID/` | who has this token, and controllers | requests and answers, by host |
//! | `admission/` | controllers; operators | [`TokenRecord`] by its name, and hosts that were admitted |
//!
//! Invariant: a block is one host's until that host says that it has followed all that is declared and has the block
//! no more, or an operator removes the host, or the host is silent for so long that its router has stopped all in it
//! ([`lease_time`]). So no address of a network is ever two hosts', however old the news of
//! one are. A declared vNIC, and its address, is one host's until that host says that it has let it go; or until an
//! operator says so, and then all others believe the new one.
//!
//! Invariant: how far a host has followed is never newer than its record and its holdings. A host writes those first,
//! and its `followed` on condition that both are in etcd as it wrote them ([`Report`]): so who reads that a host has
//! spoken, reads of its vNICs what it said then, also after a backup. And a view has all parts at one revision, since
//! they come by one watch.
#![forbid(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

mod admission;
mod authority;
mod blocks;
mod file;
mod follow;
mod in_parts;
mod joiner;
mod joining;
mod keys;
mod lease;
mod members;
mod mesh;
pub mod mirror;
mod named;
mod operator;
mod pace;
mod peers;
mod pending;
mod places;
mod reclaiming;
mod records;
mod rights;
mod token;
mod turns;
mod users;
mod view;
mod vnics;
mod x509;

pub use admission::{Admission, DEFAULT_POOL};
pub use authority::{AuthorityFiles, CONTROLLER_FILE, member_name};
pub use blocks::{Blocks, Controller, DueBlocks, block_prefix, due_blocks, due_default, floating_part};
pub use file::{AuthorityFile, ClusterFile, DEFAULT_ROOT, Wire};
pub use follow::{Acknowledged, Follow, HEARTBEAT, Report, There, Waker};
pub use in_parts::Partly;
pub use joiner::{HostKey, join, join_as_controller, renew};
pub use joining::Welcome;
pub use keys::Scope;
pub use lease::lease_time;
pub use members::{LINGER, Member, Members, MembersThere, MembersWriter, Membership};
pub use mesh::Mesh;
pub use named::{Named, named};
pub use operator::{Operator, Removed};
pub use pace::Pace;
pub use peers::{Peer, PeersOf};
pub use pending::Pending;
pub use places::{ClaimsOf, Move, due_places, place_vnics};
pub use reclaiming::{Reclaim, Reclaimed, due_reclaims};
pub use records::{
    Drained, FULL_MESH_COUNT, Followed, Held, Holdings, HostRecord, Identity, Place, Problem, RECLAIM_AFTER_DEFAULT_S,
    RECLAIM_AFTER_S, RefusedClaims, is_host_name,
};
pub use rights::begin_rights;
pub use token::{TOKEN_BYTES_MAX, TOKEN_TIME_MAX, Token, TokenRecord, TokenTerms, Tokens, USE_COUNT_MAX};
pub use turns::WRITE_COUNT_MAX;
pub use view::{Places, View};
pub use vnics::{HostContainer, HostTraffic, HostVnic, HostVnics, VnicsWriter};

pub use freeflow_etcd::{HOSTS_FILE, News, address_of, host_names};

use freeflow_orchestrator::store::StoreError;
use freeflow_orchestrator::{Reason, Refusal};

/// Why something of a cluster can't be done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// The file, or what it names, makes no sense.
    #[error("{0}")]
    File(String),
    /// etcd holds no cluster under this root.
    #[error("etcd holds no cluster under {0}: make one with freeflow cluster init")]
    Absent(String),
    /// Something under the root is not what belongs there.
    #[error("{0}")]
    Damaged(String),
    /// The rules of the declaration forbid it.
    #[error("{0}")]
    Refused(Box<Refusal>),
    /// Some of many objects are declared.
    #[error("{0}")]
    Partly(Box<Partly>),
    /// etcd has used up its quota: it takes reads and deletions only.
    #[error("etcd has no space left (alarm NOSPACE): see \"etcd is full\" in docs/CLUSTER.md")]
    Full,
    /// etcd did not do it.
    #[error("{0}")]
    Store(StoreError),
}

impl From<StoreError> for ClusterError {
    fn from(error: StoreError) -> Self {
        if error == StoreError::Full { Self::Full } else { Self::Store(error) }
    }
}

impl From<Refusal> for ClusterError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(Box::new(refusal))
    }
}

impl ClusterError {
    /// The same for who answers requests.
    pub fn into_refusal(self) -> Refusal {
        match self {
            Self::Refused(refusal) => *refusal,
            other => Refusal::new(Reason::Internal, other.to_string()),
        }
    }
}
