//! Handles of the other threads on the peers thread: commands to it, and its last word about the
//! hosts.
use super::file::{PeersFile, PrivateKey};
use super::update::{Mad, MadEnds, Update};
use crate::admission::access::VnicIdentity;
use crate::admission::address_map::AddressMap;
use crate::admission::shares::Ticket;
use crate::base::wake::Waker;
use freeflow_engine::{HostId, PeerInfo};
use freeflow_protocol::admin::{PeerStatus, PeersStatus};
use freeflow_protocol::peer::SealSecret;
use freeflow_shm::monotonic_ns;
use freeflow_verbs::{Gid, Instant, NetworkId, Qpn};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

/// Commands on their way to the thread from which on questions are not taken any more: tenants cause them.
const COMMAND_COUNT_MAX: usize = 65_536;

/// Where the peers thread brings what it learns.
pub trait Sink: Send {
    /// In the order in which it became true. Must not block.
    fn deliver(&self, updates: Vec<Update>);

    /// Whether more messages of connection management can be delivered; else they are lost, and sent again.
    fn has_cm_room(&self) -> bool {
        true
    }

    /// Updates that were delivered and are not dealt with yet. While there are many the thread reads nothing from its
    /// peers.
    fn backlog(&self) -> usize {
        0
    }
}

/// The places that a message of connection management takes until it is sent.
pub type CmTickets = [Ticket; 2];

pub(super) enum Command {
    Ask {
        host: HostId,
        qpn: Qpn,
    },
    Notify {
        host: HostId,
        qpn: Qpn,
        info: Option<PeerInfo>,
    },
    Frames {
        host: HostId,
        payload_bytes: u16,
    },
    /// Of sealed packets.
    Seal {
        host: HostId,
        message: SealMessage,
    },
    Network {
        name: String,
        network: Option<NetworkId>,
    },
    AddressMap(Arc<AddressMap>),
    Address {
        network: String,
        gid: Gid,
        identity: Option<Arc<VnicIdentity>>,
    },
    Disconnected {
        host: HostId,
        qpn: Qpn,
        peer: Qpn,
    },
    Group {
        network: NetworkId,
        gid: Gid,
        qpn: Option<Qpn>,
    },
    Cm {
        host: HostId,
        network: NetworkId,
        ends: MadEnds,
        mad: Box<Mad>,
        tickets: CmTickets,
    },
    Reload(Box<(PeersFile, PrivateKey)>),
}

/// A key of this host's that the other one is to have, or one of the other's that is here.
#[derive(Clone, Debug, PartialEq)]
pub enum SealMessage {
    Key { id: u32, in_use: Option<u32>, secret: SealSecret },
    Held { id: u32 },
}

/// State that the thread shares with the handles.
pub(super) struct Shared {
    pub waker: Waker,
    pub stop: AtomicBool,
    /// LowCPU: the thread does not look for more before it sleeps.
    pub sleeps_at_once: AtomicBool,
    /// In the queue of commands.
    pub queued: AtomicUsize,
    pub published: Mutex<Published>,
    pub unknown_connections: AtomicU64,
    pub refused_handshakes: AtomicU64,
}

#[derive(Default)]
pub(super) struct Published {
    pub host: String,
    /// With the times since when their states last.
    pub peers: Vec<(PeerStatus, Instant)>,
}

/// The way to the peers thread. Nothing here waits for it, nor for another host. Without a peers file all of it does
/// nothing.
#[derive(Clone, Default)]
pub struct PeersHandle {
    inner: Option<Inner>,
}

#[derive(Clone)]
struct Inner {
    commands: Sender<Command>,
    shared: Arc<Shared>,
}

impl PeersHandle {
    pub(super) fn new(commands: Sender<Command>, shared: Arc<Shared>) -> Self {
        Self { inner: Some(Inner { commands, shared }) }
    }

    fn put(&self, command: Command) {
        if let Some(inner) = &self.inner {
            inner.shared.queued.fetch_add(1, Relaxed);
            // Fails only when the thread has ended, and then the router ends.
            let _ = inner.commands.send(command);
            inner.shared.waker.wake();
        }
    }

    /// Whether the thread sleeps as soon as it has nothing to do.
    pub fn set_sleeps_at_once(&self, sleeps_at_once: bool) {
        if let Some(inner) = &self.inner {
            inner.shared.sleeps_at_once.store(sleeps_at_once, Relaxed);
        }
    }

    /// Whether there are other hosts at all.
    pub fn is_on(&self) -> bool {
        self.inner.is_some()
    }

    /// Asks a host who is behind one of its QPNs; [`Update::Peer`] is the answer. None comes if the host is not up, or
    /// its connection ends before: ask again after the next [`Update::PeersGone`]. False: there are too many commands
    /// already, and nothing was asked.
    #[must_use]
    pub fn ask(&self, host: HostId, qpn: Qpn) -> bool {
        match &self.inner {
            Some(inner) if inner.shared.queued.load(Relaxed) < COMMAND_COUNT_MAX => {
                self.put(Command::Ask { host, qpn });
                true
            }
            _ => false,
        }
    }

    /// Notifies a host of the QP behind a QPN here, asked or not.
    pub fn notify(&self, host: HostId, qpn: Qpn, info: Option<PeerInfo>) {
        self.put(Command::Notify { host, qpn, info });
    }

    /// Frames to a host may have so much payload; 0: the link takes none.
    pub fn frames(&self, host: HostId, payload_bytes: u16) {
        self.put(Command::Frames { host, payload_bytes });
    }

    /// Brings a host a key that it will be sealed to with, or says that one of its own is here. Lost if it is not up.
    pub fn seal(&self, host: HostId, message: SealMessage) {
        self.put(Command::Seal { host, message });
    }

    /// Policy has ended the connection of `peer`, which is of this host, with that host's `qpn`.
    pub fn disconnected(&self, host: HostId, qpn: Qpn, peer: Qpn) {
        self.put(Command::Disconnected { host, qpn, peer });
    }

    /// A message of connection management, from a vNIC here to one of that host. Tenants cause
    /// them: their number is bounded by the tickets.
    pub fn cm(&self, host: HostId, network: NetworkId, ends: MadEnds, mad: Box<Mad>, tickets: CmTickets) {
        self.put(Command::Cm { host, network, ends, mad, tickets });
    }

    /// The number that a network has on this host, to be said before anything else of that network; `None`: it is gone.
    pub fn network(&self, name: &str, network: Option<NetworkId>) {
        self.put(Command::Network { name: name.into(), network });
    }

    /// Where addresses are, as it is declared now. Until it is said they are of the networks of who asks.
    pub(crate) fn address_map(&self, address_map: Arc<AddressMap>) {
        self.put(Command::AddressMap(address_map));
    }

    /// A vNIC with this address is on this host; or it is, and has other labels now.
    pub fn attached(&self, network: &str, gid: Gid, identity: Arc<VnicIdentity>) {
        self.put(Command::Address { network: network.into(), gid, identity: Some(identity) });
    }

    /// No longer.
    pub fn detached(&self, network: &str, gid: Gid) {
        self.put(Command::Address { network: network.into(), gid, identity: None });
    }

    /// By which QPN this host's members of a multicast group are reached; `None`: there are none any more.
    pub fn group(&self, network: NetworkId, gid: Gid, qpn: Option<Qpn>) {
        self.put(Command::Group { network, gid, qpn });
    }

    /// The peers file was read again.
    pub fn reload(&self, file: PeersFile, key: PrivateKey) {
        self.put(Command::Reload(Box::new((file, key))));
    }

    /// All hosts of the file, as they were at most a tenth of a second ago; of a thousand, a half.
    pub fn status(&self) -> PeersStatus {
        let Some(Inner { shared, .. }) = &self.inner else { return PeersStatus::default() };
        let now = Instant(monotonic_ns());
        let published = shared.published.lock().unwrap_or_else(PoisonError::into_inner);
        let peers = published.peers.iter().map(|(status, since)| {
            let state_s = (now - *since).0 / 1_000_000_000;
            PeerStatus { state_s, ..status.clone() }
        });
        PeersStatus {
            file: String::new(),
            host: published.host.clone(),
            peers: peers.collect(),
            unknown_connections: shared.unknown_connections.load(Relaxed),
            refused_handshakes: shared.refused_handshakes.load(Relaxed),
        }
    }
}
