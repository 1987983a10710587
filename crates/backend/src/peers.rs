//! The table of hosts that packets go to and come from.
use crate::seal::Seal;
use crate::sys;
use freeflow_verbs::Shard;
use freeflow_wire::UDP_PORT;
use freeflow_wire::icrc::Addresses;
use freeflow_wire::sealed::SEAL_BYTES;
use std::collections::HashMap;
use std::net::IpAddr;

/// Largest number of peers: indexes are below it.
pub const PEER_COUNT_MAX: u32 = 1 << 16;

/// Which peer: the caller's number, below [`PEER_COUNT_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerIndex(pub u32);

/// A host to exchange packets with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub address: IpAddr,
    /// Address of this host that the peer knows: one of [`crate::UdpConfig::addresses`].
    pub local: IpAddr,
    /// False: both routers agreed to leave the ICRC zero.
    pub icrc: bool,
    /// A machine without FreeFlow: its packets may bear any IP identification (IPv4), which weakens the check of their
    /// ICRC from 32 bits to 16.
    pub external: bool,
    /// Largest payload of a packet to it: 256 to 4096. Lowered when a send turns out too long for the route.
    pub path_mtu_bytes: u16,
    /// Both routers agreed on [frames](freeflow_wire::frame).
    pub frames: bool,
    /// Payload of a whole frame to it; 0: none are sent. Lowered as `path_mtu_bytes` is.
    pub frame_bytes: u16,
    /// All packets to and from it are [sealed](freeflow_wire::sealed).
    pub sealed: bool,
    /// Engines that it has, as it says; 1 if it does not say.
    pub shards: u8,
}

pub(crate) struct Entry {
    pub peer: Peer,
    pub to: sys::Address,
    /// From here to there.
    pub outward: Addresses,
    /// From there to here.
    pub inward: Addresses,
    /// First of this local address's sending sockets.
    pub lane_base: u16,
    /// The kernel cuts batches on this route.
    pub gso: bool,
    /// The first of its engines.
    pub shards: Shard,
    /// Number of the flowcell that is being sent; flows that spread are moved by so much.
    pub flowcell: u32,
    /// Bulk data of it that was sent.
    pub flowcell_bytes: u32,
    /// Of a sealed peer.
    pub seal: Option<Box<Seal>>,
}

impl Entry {
    /// By how much packets to it become longer.
    #[inline]
    pub fn seal_bytes(&self) -> usize {
        if self.peer.sealed { SEAL_BYTES } else { 0 }
    }

    #[inline]
    pub fn may_send(&self) -> bool {
        !self.peer.sealed || self.seal.as_ref().is_some_and(|seal| seal.may_send())
    }
}

#[derive(Default)]
pub(crate) struct Peers {
    entries: Vec<Option<Box<Entry>>>,
    by_address: HashMap<IpAddr, PeerIndex>,
    sealed: Vec<PeerIndex>,
    /// The last address asked for: packets come in runs.
    last: Option<(IpAddr, PeerIndex)>,
}

/// The pair as the ICRC takes it; `None` where the families differ.
fn addresses(source: IpAddr, destination: IpAddr) -> Option<Addresses> {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            Some(Addresses::V4 { source: source.octets(), destination: destination.octets() })
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            Some(Addresses::V6 { source: source.octets(), destination: destination.octets() })
        }
        _ => None,
    }
}

impl Peers {
    /// False: the families of the two addresses differ, the index is out of range, the address is another peer's, or
    /// there can't be so many engines.
    pub fn set(&mut self, index: PeerIndex, peer: Peer, lane_base: u16, gso: bool) -> bool {
        let pairs = (addresses(peer.local, peer.address), addresses(peer.address, peer.local));
        let (Some(outward), Some(inward)) = pairs else { return false };
        let Some(shards) = Shard::new(0, peer.shards) else { return false };
        let taken = self.by_address.get(&peer.address).is_some_and(|&other| other != index);
        if taken || index.0 >= PEER_COUNT_MAX {
            return false;
        }
        // Its keys stay with it.
        let before = self.get_mut(index).filter(|entry| peer.sealed && entry.peer.address == peer.address);
        let seal = before.and_then(|entry| entry.seal.take()).or_else(|| peer.sealed.then(Box::default));
        // The tag covers what the ICRC would.
        let peer = Peer { icrc: peer.icrc && !peer.sealed, ..peer };
        self.remove(index);
        if peer.sealed {
            self.note_sealed(index);
        }
        let place = index.0 as usize;
        if self.entries.len() <= place {
            self.entries.resize_with(place + 1, || None);
        }
        let to = sys::Address::new(peer.address, UDP_PORT);
        let (flowcell, flowcell_bytes) = (0, 0);
        let entry = Entry { peer, to, outward, inward, lane_base, gso, shards, flowcell, flowcell_bytes, seal };
        self.entries[place] = Some(Box::new(entry));
        self.by_address.insert(peer.address, index);
        true
    }

    pub fn remove(&mut self, index: PeerIndex) {
        if let Some(entry) = self.entries.get_mut(index.0 as usize).and_then(Option::take) {
            self.by_address.remove(&entry.peer.address);
        }
        self.sealed.retain(|&other| other != index);
        self.last = None;
    }

    pub fn note_sealed(&mut self, index: PeerIndex) {
        self.sealed.push(index);
    }

    /// Peers that are sealed.
    pub fn sealed(&self) -> &[PeerIndex] {
        &self.sealed
    }

    pub fn get(&self, index: PeerIndex) -> Option<&Entry> {
        self.entries.get(index.0 as usize)?.as_deref()
    }

    pub fn get_mut(&mut self, index: PeerIndex) -> Option<&mut Entry> {
        self.entries.get_mut(index.0 as usize)?.as_deref_mut()
    }

    pub fn find(&self, address: IpAddr) -> Option<PeerIndex> {
        self.by_address.get(&address).copied()
    }

    /// As [`find`](Self::find), faster for the address of the call before.
    pub fn find_again(&mut self, address: IpAddr) -> Option<PeerIndex> {
        if let Some((last, index)) = self.last
            && last == address
        {
            return Some(index);
        }
        let index = self.find(address)?;
        self.last = Some((address, index));
        Some(index)
    }
}
