//! Other hosts: paths to them, packets to them, and what their routers say.
use crate::{Destination, HostId, PacketHead, Path, PeerAnswer, Source, Token, TransmitOutcome, VnicId};
use alloc::vec::Vec;
use freeflow_verbs::{Gid, GlobalRoute, NetworkId, Qpn};

/// The network between the hosts, and the channel between their routers.
pub trait Fabric {
    /// The way of messages from this vNIC to an address of that network. It may change at any time;
    /// the engine asks when a QP is connected, and for each datagram.
    fn path(&mut self, vnic: VnicId, to: NetworkId, route: &GlobalRoute) -> Path;

    /// The QP behind a QPN of another host.
    fn peer(&mut self, host: HostId, qpn: Qpn) -> PeerAnswer;

    /// Sends packets in order. `payload` holds the payload of all of them, one after the other.
    fn transmit(
        &mut self,
        token: Token,
        to: &Destination,
        packets: &[PacketHead],
        payload: Source<'_>,
    ) -> TransmitOutcome;

    /// Sends one packet, the messages of a frame of records: `head`, and the payload of all of them behind it. `Fault`:
    /// the payload can't be had at once, and nothing was sent; messages are to go by [`transmit`](Self::transmit),
    /// which says more. Never `Pending`.
    fn transmit_records(&mut self, to: &Destination, head: &[u8], payload: Source<'_>) -> TransmitOutcome;

    /// From now on no packet that was `Sent` takes payload from memory any more, if it waits still: a key that named
    /// the memory goes, or its owner hears that a request is over.
    fn end_references(&mut self) {}

    /// [`crate::Engine::peer_info`] answers differently for this QPN from now on. `peer`: the host
    /// that it concerns, if the QP is connected to one.
    fn identity_changed(&mut self, qpn: Qpn, peer: Option<HostId>);

    /// Policy has disconnected `qpn` from a QPN of another host, whose end has to hear of it.
    fn notify_disconnected(&mut self, qpn: Qpn, host: HostId, peer: Qpn);

    /// A management datagram came from a host to QP 1. False: it may not send any.
    fn take_management(&mut self, from: HostId, mad: &[u8; freeflow_wire::cm::MAD_BYTES]) -> bool;

    /// Appends the hosts that have members of a group, and the QPN under which each takes its
    /// messages.
    fn group_hosts(&mut self, network: NetworkId, group: Gid, into: &mut Vec<(Destination, Qpn)>);
}
