//! Attempts of a tenant on others that got nowhere: reported to the environment, for whoever keeps
//! watch.
use freeflow_verbs::{Gid, NetworkId};

/// Kind of attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ViolationKind {
    /// A message of a connected service that nobody takes.
    Message,
    /// A UD message that nobody takes.
    Datagram,
    /// A datagram to a group without members in the sender's network.
    Multicast,
    /// A remote key of another network's memory.
    RemoteKey,
    /// A source address that is not the vNIC's.
    SourceAddress,
}

/// One attempt, for [`crate::Policy::report_violation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Kind of attempt.
    pub kind: ViolationKind,
    /// Of who tried.
    pub network: NetworkId,
    /// Source address.
    pub from: Gid,
    /// Address that was tried.
    pub to: Gid,
    /// The QPN, the key or the address' index that was named.
    pub number: u32,
    /// The other network, if it is known whose the named is. None: nobody's.
    pub owner: Option<NetworkId>,
}
