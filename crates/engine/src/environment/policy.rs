//! Access rules between vNICs and networks, and the record of those who run into them.
use crate::Violation;
use freeflow_verbs::{Gid, NetworkId};

/// The two ends of a message, for [`Policy::authorize`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthorizationRequest {
    /// Of the QP that asks.
    pub network: NetworkId,
    /// Of the other end: what [`Policy::network_at`] says of its address.
    pub other: NetworkId,
    /// Address of the end that begins.
    pub from: Gid,
    /// Address of the other end.
    pub to: Gid,
    /// Kind of traffic.
    pub traffic: TrafficKind,
    /// The other one is to be a machine without FreeFlow: the path leads out by the vNIC's second
    /// address.
    pub is_external: bool,
    /// Which of the two is the QP's that asks.
    pub subject: Subject,
}

/// Which end of a [`AuthorizationRequest`] asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The end that begins.
    From,
    /// The other end.
    To,
}

/// By what two communicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrafficKind {
    /// A QP is about to be connected.
    Connection,
    /// It is connected, and policy has changed: if the answer is no, the connection is
    /// disconnected.
    Standing,
    /// A datagram to one receiver.
    Datagram,
    /// A datagram to a group: the receiver is one of its members.
    Multicast,
    /// Datagrams to one receiver that are to go past the router. Nothing is sent by that question, so nobody is to
    /// blame for a no.
    DirectDatagrams,
}

/// The tenant's access rules. Answers may change only before
/// [`crate::Engine::handle_policy_changed`]: until then the engine may keep them.
pub trait Policy {
    /// Whether the rules let these two talk. Connected services are asked about for both directions
    /// at once.
    fn authorize(&mut self, request: &AuthorizationRequest) -> bool;

    /// The network that has the address `gid` for those of `network`: itself, or another of its
    /// tenant. Whether the two may talk is [`Self::authorize`]'s business.
    fn network_at(&mut self, network: NetworkId, gid: Gid) -> NetworkId;

    /// A vNIC tried something on others and got nowhere. Called each time, so it has to cost
    /// little.
    fn report_violation(&mut self, violation: &Violation);

    /// A remote key that this engine does not know was used on a QP of `own`: a violation if another engine of the host
    /// ([`crate::Engine::network_of_key`]) has it for a network that is neither `own` nor the attempt's.
    fn report_unknown_key(&mut self, own: NetworkId, attempt: &Violation);
}
