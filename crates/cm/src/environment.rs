//! The machine's surroundings, as it calls them.
use crate::address::is_ipv4;
use freeflow_protocol::cm::{CmAddress, CmEvent, Ece};
use freeflow_protocol::library::Handle;
use freeflow_verbs::{Gid, NetworkId, PathMtu, VerbsError};

/// Owner of identifiers. Numbers are the environment's, and not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub u64);

/// A vNIC. Numbers are the environment's, and not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VnicRef(pub u64);

/// Where an identifier's events go: a number of its owner's.
pub type EventChannel = Handle;

/// Of a vNIC's GID table.
pub const GID_COUNT: usize = 3;

/// Where an address means something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Among the vNICs of a network, on whatever hosts.
    Network(NetworkId),
    /// The network between the hosts, where vNICs that may speak to external machines bear their
    /// host's address.
    External,
}

/// An address, and where it means something: a port space of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScopedGid {
    /// Scope of the address.
    pub scope: Scope,
    /// The address.
    pub gid: Gid,
}

/// How messages get to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Link {
    /// It is on this host: the machine hears itself.
    Local,
    /// The authenticated channel to another router, by the environment's number.
    Router(u32),
    /// Packets to QP 1 of a listed external machine.
    External(u32),
}

/// The way from an address of a vNIC to another address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Link by which messages travel.
    pub link: Link,
    /// Address of the vNIC.
    pub local: ScopedGid,
    /// The other address.
    pub remote: Gid,
    /// Of the local address, in the vNIC's GID table.
    pub gid_index: u8,
    /// Path MTU.
    pub mtu: PathMtu,
}

/// One message on its way: a MAD, and between whom. Over [`Link::Router`] and [`Link::External`] it
/// may get lost, come twice, late, or out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Link by which it came or goes.
    pub link: Link,
    /// Scope of both addresses.
    pub scope: Scope,
    /// Addresses of the sender and the receiver. The environment vouches for the sender's: of
    /// [`Link::Router`], that the vNIC is on that host; of [`Link::External`], that the machine is
    /// listed.
    pub from: Gid,
    /// Address of the receiver.
    pub to: Gid,
    /// The MAD, 256 bytes.
    pub mad: &'a [u8],
}

/// Question to the policy: may one address connect to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The vNIC's program wants to connect.
    ToBegin,
    /// The other one does.
    ToAnswer,
    /// They are connected, or about to be, and policy has changed.
    ToStand,
}

/// Services that the machine needs of the program that runs it.
pub trait Environment {
    /// A random number, for connection IDs, PSNs and ports.
    fn random(&mut self) -> u32;

    /// Addresses of the vNIC, in the order of its GID table: its own, the host's, its own IPv6
    /// address.
    fn addresses(&self, vnic: VnicRef) -> [Option<ScopedGid>; GID_COUNT];

    /// The vNIC with this address here. Several share an external one: then the machine finds the
    /// right one by port and connection.
    fn vnic_at(&self, place: ScopedGid) -> Option<VnicRef>;

    /// The way from a vNIC (from one certain address of it) to another address.
    ///
    /// # Errors
    /// Unreachable: there is none.
    fn route(&self, vnic: VnicRef, from: Option<Gid>, to: Gid) -> Result<Route, VerbsError>;

    /// A program has looked for an address until its time was over, and nobody has it.
    fn unreachable(&mut self, _vnic: VnicRef, _address: Gid) {}

    /// Sends a message, or loses it. What is sent by [`Link::Local`] comes to
    /// [`crate::Machine::handle_packet`] afterwards.
    fn send(&mut self, packet: Packet<'_>);

    /// Whether the environment brings the QP of an identifier to RTS by itself, now that its peer
    /// agrees. Then it says by [`crate::Machine::handle_prepared`] how that went.
    fn prepares(&mut self, _owner: Owner, _id: Handle, _remote: Ece) -> bool {
        false
    }

    /// An event for an owner.
    fn notify(&mut self, owner: Owner, channel: EventChannel, event: CmEvent);

    /// Whether policy lets these two connect.
    fn allows(&self, _vnic: VnicRef, _local: ScopedGid, _remote: CmAddress, _asked: Asked) -> bool {
        true
    }
}

/// The vNIC's own address of the family of `like`; its first if it has none of that.
pub(crate) fn own_address<E: Environment + ?Sized>(env: &E, vnic: VnicRef, like: Gid) -> Option<ScopedGid> {
    let places = || env.addresses(vnic).into_iter().flatten();
    let of_family = |place: &ScopedGid| matches!(place.scope, Scope::Network(_)) && is_ipv4(place.gid) == is_ipv4(like);
    places().find(of_family).or_else(|| places().next())
}
