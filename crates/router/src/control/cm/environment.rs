//! The machine's questions to the router: where addresses are, paths for messages, pipes for
//! events.
use super::addresses::Places;
use super::loopback_queue::{Letter, Letters};
use super::pipe::EventPipe;
use super::preparation::{Preparation, Prepared};
use crate::admission::access::{AccessPolicy, Deed, Pair};
use crate::admission::shares::Shares;
use crate::admission::violations::ViolationClass;
use crate::base::slab::Key;
use crate::control::session::Handles;
use crate::dataplane::command::SendManagement;
use crate::dataplane::handle::WorkerHandle;
use crate::peering::{Mad, MadEnds, PeersHandle};
use freeflow_cm::{Asked, Environment, EventChannel, GID_COUNT, Link, Owner, Packet, Route, Scope, ScopedGid, VnicRef};
use freeflow_engine::HostId;
use freeflow_protocol::cm::{CM_EVENT_BYTES_MAX, CmAddress, CmEvent, Ece};
use freeflow_protocol::library::Handle;
use freeflow_verbs::{Gid, NetworkId, VerbsError};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Events that are kept for a session that does not read them, with what keeping them takes; beyond that it is cut off.
const OWED_BYTES_MAX: usize = 4 << 20;
/// Messages on their way to the worker, for external machines; any more are lost, and sent again.
const OUTWARD_COUNT_MAX: usize = 1024;
/// Messages on their way to other hosts, and to one of them; any more are lost, and sent again.
/// Each vNIC has its share.
const HOSTS_COUNT_MAX: usize = 16_384;
const HOST_COUNT_MAX: usize = 2048;
const ENTROPY_BYTES: usize = 4096;

/// One process' session of one vNIC, as far as it manages connections.
pub struct OwnerEntry {
    pub connection: Key,
    pub channels: Handles<EventPipe>,
    /// Channels that were destroyed, by the numbers of their watches. A thread that waits in a
    /// `read` goes on to wait, as it does with the kernel's, and does not learn that the router had
    /// died; so they stay until nobody has the other end.
    pub leaving: BTreeMap<u64, EventPipe>,
    /// QPs that are brought to RTS when the peer agrees, by identifier.
    preparations: BTreeMap<Handle, Preparation>,
    /// Of all its channels.
    owed_bytes: usize,
    is_failed: bool,
}

/// Messages that did not go out, by why.
#[derive(Clone, Copy, Default)]
pub struct Lost {
    /// Too many were on their way.
    pub crowded: u64,
    /// Of external machines: to an address that is not this host's, or more machines than are known
    /// at a time. Of vNICs: the receiver would look for the sender in another network.
    pub refused: u64,
}

pub struct World {
    pub places: Places,
    /// The answer about an address is computed when it is asked for.
    pub access: RefCell<AccessPolicy>,
    /// vNICs, and addresses that they were connected to and that are another network's now, until
    /// all connections were looked at.
    pub moved: BTreeSet<(VnicRef, Gid)>,
    pub owners: BTreeMap<Owner, OwnerEntry>,
    last_owner: u64,
    pub letters: Letters,
    /// Channels that owe events, by the numbers of their watches; and watches that the kernel does not know of yet.
    pub watches: BTreeMap<u64, (Owner, EventChannel)>,
    last_watch: u64,
    pub behind: Vec<u64>,
    /// Sessions that do not read their events.
    pub failed: Vec<Key>,
    pub lost: Lost,
    /// Connections whose peers have agreed.
    pub prepared: Vec<Prepared>,
    peers: PeersHandle,
    /// To all hosts, and to each.
    to_hosts: Shares<(NetworkId, Gid)>,
    to_host: BTreeMap<HostId, Shares<(NetworkId, Gid)>>,
    worker: WorkerHandle,
    outward: Arc<AtomicUsize>,
    entropy: Entropy,
}

/// Random numbers, from the kernel in large pieces.
struct Entropy {
    source: File,
    bytes: Vec<u8>,
}

impl Entropy {
    fn next(&mut self) -> u32 {
        let Some((rest, number)) = self.bytes.split_last_chunk() else {
            self.bytes.resize(ENTROPY_BYTES, 0);
            self.source.read_exact(&mut self.bytes).expect("the kernel's random numbers don't end");
            return self.next();
        };
        let (left, number) = (rest.len(), u32::from_ne_bytes(*number));
        self.bytes.truncate(left);
        number
    }
}

impl World {
    pub fn new(peers: PeersHandle, worker: WorkerHandle) -> std::io::Result<Self> {
        let entropy = Entropy { source: File::open("/dev/urandom")?, bytes: Vec::new() };
        Ok(Self {
            places: Places::default(),
            access: RefCell::default(),
            moved: BTreeSet::new(),
            owners: BTreeMap::new(),
            last_owner: 0,
            letters: Letters::default(),
            watches: BTreeMap::new(),
            last_watch: 0,
            behind: Vec::new(),
            failed: Vec::new(),
            lost: Lost::default(),
            prepared: Vec::new(),
            peers,
            to_hosts: Shares::new(HOSTS_COUNT_MAX),
            to_host: BTreeMap::new(),
            worker,
            outward: Arc::default(),
            entropy,
        })
    }

    pub fn add_owner(&mut self, connection: Key) -> Owner {
        self.last_owner += 1;
        let owner = Owner(self.last_owner);
        let entry = OwnerEntry {
            connection,
            channels: Handles::default(),
            leaving: BTreeMap::new(),
            preparations: BTreeMap::new(),
            owed_bytes: 0,
            is_failed: false,
        };
        self.owners.insert(owner, entry);
        owner
    }

    /// Puts something into a channel, by `put`; notes what is owed then.
    pub fn with_channel(
        &mut self,
        owner: Owner,
        channel: EventChannel,
        put: impl FnOnce(&mut EventPipe),
    ) -> Result<(), VerbsError> {
        let entry = self.owners.get_mut(&owner).ok_or(VerbsError::NotFound)?;
        let pipe = entry.channels.get_mut(channel)?;
        let before = pipe.owed_bytes();
        put(pipe);
        entry.owed_bytes = entry.owed_bytes - before + pipe.owed_bytes();
        if pipe.is_behind() && pipe.watch.is_none() {
            self.last_watch += 1;
            pipe.watch = Some(self.last_watch);
            self.watches.insert(self.last_watch, (owner, channel));
            self.behind.push(self.last_watch);
        }
        if entry.owed_bytes > OWED_BYTES_MAX && !std::mem::replace(&mut entry.is_failed, true) {
            self.failed.push(entry.connection);
        }
        Ok(())
    }

    /// The QP of an identifier that asks for a connection.
    pub fn prepare(&mut self, owner: Owner, id: Handle, with: Preparation) {
        if let Some(entry) = self.owners.get_mut(&owner) {
            entry.preparations.insert(id, with);
        }
    }

    pub fn forget_preparation(&mut self, owner: Owner, id: Handle) {
        if let Some(entry) = self.owners.get_mut(&owner) {
            entry.preparations.remove(&id);
        }
    }

    pub fn remove_channel(&mut self, owner: Owner, channel: EventChannel) -> Option<EventPipe> {
        let entry = self.owners.get_mut(&owner)?;
        let pipe = entry.channels.remove(channel)?;
        entry.owed_bytes -= pipe.owed_bytes();
        Some(pipe)
    }

    /// A channel that was removed, and that nobody watches, stays until its other end is gone. The
    /// number to watch it by. What it owes is nobody's any more.
    pub fn leave(&mut self, owner: Owner, channel: EventChannel, mut pipe: EventPipe) -> Option<u64> {
        pipe.forget();
        self.last_watch += 1;
        self.watches.insert(self.last_watch, (owner, channel));
        self.owners.get_mut(&owner)?.leaving.insert(self.last_watch, pipe);
        Some(self.last_watch)
    }

    /// Where a message arrives that is sent from one address to another: see
    /// [`crate::admission::address_map::AddressMap::receiver`].
    pub fn arrival(&self, sender: Scope, from: Gid, to: Gid) -> Option<Scope> {
        let Scope::Network(network) = sender else { return Some(sender) };
        let access = self.access.borrow();
        let Some(rules) = access.rules() else { return Some(sender) };
        rules.address_map.receiver((network, from), to).map(|(there, _)| Scope::Network(there))
    }

    fn send_to_host(&mut self, host: HostId, network: NetworkId, ends: MadEnds, mad: Mad) {
        let sender = (network, ends.from);
        let to_host = self.to_host.entry(host).or_insert_with(|| Shares::new(HOST_COUNT_MAX));
        let tickets = to_host.take(sender).and_then(|ticket| Some([ticket, self.to_hosts.take(sender)?]));
        match tickets {
            Some(tickets) => self.peers.cm(host, network, ends, Box::new(mad), tickets),
            None => self.lost.crowded += 1,
        }
    }

    /// To a machine without FreeFlow: the worker has the sockets.
    fn send_outward(&mut self, to: Gid, mad: Mad) {
        if self.outward.load(Relaxed) >= OUTWARD_COUNT_MAX {
            self.lost.crowded += 1;
            return;
        }
        self.outward.fetch_add(1, Relaxed);
        self.worker.send(SendManagement { to, mad: Box::new(mad), backlog: self.outward.clone() });
    }
}

impl Environment for World {
    fn random(&mut self) -> u32 {
        self.entropy.next()
    }

    fn addresses(&self, vnic: VnicRef) -> [Option<ScopedGid>; GID_COUNT] {
        self.places.of_vnic(vnic)
    }

    fn vnic_at(&self, place: ScopedGid) -> Option<VnicRef> {
        self.places.vnic_at(place)
    }

    fn route(&self, vnic: VnicRef, from: Option<Gid>, to: Gid) -> Result<Route, VerbsError> {
        let entry = self.places.vnic(vnic).ok_or(VerbsError::Unreachable)?;
        let at = self.access.borrow().network_at(entry.network, to);
        self.places.route(vnic, from, (at, to))
    }

    fn unreachable(&mut self, vnic: VnicRef, address: Gid) {
        let Some(entry) = self.places.vnic(vnic) else { return };
        self.access.get_mut().note_aim((entry.network, entry.gid), ViolationClass::Request, address);
    }

    fn send(&mut self, packet: Packet<'_>) {
        let Packet { link, scope, from, to, mad } = packet;
        let Ok(mad) = Mad::try_from(mad) else {
            debug_assert!(false, "a MAD has its length");
            return;
        };
        match (link, scope) {
            (Link::Local, _) => {
                if !self.letters.push(Letter { scope, from, to, mad }) {
                    self.lost.crowded += 1;
                }
            }
            (Link::Router(host), Scope::Network(network)) => {
                self.send_to_host(HostId(host), network, MadEnds { from, to }, mad)
            }
            (Link::External(_), _) => self.send_outward(to, mad),
            (Link::Router(_), Scope::External) => self.lost.refused += 1,
        }
    }

    fn prepares(&mut self, owner: Owner, id: Handle, remote: Ece) -> bool {
        let with = self.owners.get_mut(&owner).and_then(|entry| entry.preparations.remove(&id));
        let Some(with) = with.filter(|with| with.suits(remote)) else { return false };
        self.prepared.push(Prepared { owner, id, with });
        true
    }

    fn notify(&mut self, owner: Owner, channel: EventChannel, event: CmEvent) {
        let record = freeflow_protocol::encode(&event);
        debug_assert!(record.len() <= CM_EVENT_BYTES_MAX);
        // A channel that is gone has no reader.
        let _ = self.with_channel(owner, channel, |pipe| pipe.send(record));
    }

    fn allows(&self, vnic: VnicRef, local: ScopedGid, remote: CmAddress, asked: Asked) -> bool {
        let Some(entry) = self.places.vnic(vnic) else { return false };
        let (network, is_external) = match local.scope {
            Scope::Network(network) => (network, false),
            Scope::External => (entry.network, true),
        };
        let is_possible = network == entry.network
            && (!is_external
                || entry.external.is_some() && self.places.allows_external(remote.gid, Some(entry.network)));
        let has_moved = asked == Asked::ToStand && !is_external && self.moved.contains(&(vnic, remote.gid));
        if !is_possible {
            return false;
        }
        let access = &mut self.access.borrow_mut();
        // By the host's address it is still this vNIC that speaks.
        let own = (network, if is_external { entry.gid } else { local.gid });
        let other = (if is_external { network } else { access.network_at(network, remote.gid) }, remote.gid);
        let (from, to) = if asked == Asked::ToAnswer { (other, own) } else { (own, other) };
        let pair = Pair { from, to, is_external };
        match asked {
            Asked::ToBegin | Asked::ToAnswer => access.may_begin(&pair, Deed::Request),
            Asked::ToStand => access.may_be_connected(&pair, Deed::DisconnectRequest) && !has_moved,
        }
    }
}
