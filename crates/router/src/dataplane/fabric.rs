//! The worker's knowledge of other hosts: where addresses are, the QPs behind QPNs, paths of
//! packets.
//!
//! The peers thread sends it all that ([`Update`]); the engine asks for it. A router without a peers file has no
//! [sockets](Fabric::is_open): every path is local, and nothing here costs anything.
//!
//! *External* hosts are RDMA machines without FreeFlow. They are known by their address alone, and
//! exist while the peers file allows some network to talk to them.
//!
//! Invariant: what a host says of its QPNs is believed until [`Update::PeersGone`], and kept for at
//! most [`QPNS_OF_HOST_MAX`] of them; that a QPN is nobody's is believed for [`ABSENT_FOR`]. A host
//! is notified of what becomes of the QPs that it asked for, and of those alone that exist: nobody
//! can make this grow by asking.
use crate::base::log::warning;
use crate::dataplane::bursts::Unsent;
use crate::dataplane::shard_groups::ShardGroups;
use crate::dataplane::siblings::{Siblings, shard_of};
use crate::peering::{ExternalPeers, Mad, PeersHandle, Settings};
use freeflow_backend::{Peer, PeerIndex, Udp, frame_payload, path_mtu};
use freeflow_engine::{Destination, HostId, PeerAnswer, PeerInfo};
use freeflow_protocol::admin::WireFaults;
use freeflow_verbs::{Duration, Gid, Instant, NetworkId, QpType, Qpn};
use freeflow_wire::frame::is_response_length;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Place of the host's own address in the GID table of a vNIC that may use it.
pub const EXTERNAL_GID_INDEX: u8 = 1;
/// QPNs of one host that answers are kept for; the oldest goes first.
pub(crate) const QPNS_OF_HOST_MAX: usize = 65_536;
/// After that a QPN that was nobody's is asked for again: its host does not announce one that is made
/// later.
pub(crate) const ABSENT_FOR: Duration = Duration::from_millis(1000);
/// For so long a UD QP that is gone is known still: its datagrams may come later than that news.
pub(crate) const LEFT_FOR: Duration = Duration::from_millis(1000);
/// A question that was not answered is asked again after this time, so many times.
pub(crate) const ASK_AGAIN: Duration = Duration::from_millis(1000);
pub(crate) const ASK_COUNT_MAX: u32 = 8;
/// Questions to one host that it has not answered; beyond that it is not asked.
pub(crate) const QUESTION_COUNT_MAX: usize = 16_384;
/// Numbers of external hosts begin here; the peers file's hosts have smaller ones.
pub(crate) const EXTERNAL_HOST_BASE: u32 = 1 << 15;
pub(crate) const EXTERNAL_HOST_COUNT_MAX: u32 = 4096;
/// Payload of a packet where the route to a host can't be looked at, bytes.
pub(crate) const MTU_GUESS_BYTES: u16 = 1024;
pub(crate) const HOP_LIMIT: u8 = 64;
/// Management datagrams that came and were not looked at yet; any more are lost.
pub(crate) const MAD_COUNT_MAX: usize = 4096;
/// All of them are one flow.
pub(crate) const MAD_FLOW: u32 = 0;

/// State of one QPN of another host.
pub(crate) enum Known {
    Asked {
        count: u32,
    },
    Is(PeerInfo),
    /// A UD QP that is gone.
    Left {
        info: PeerInfo,
        until: Instant,
    },
    Absent {
        until: Instant,
    },
}

pub(crate) struct Host {
    pub(crate) address: IpAddr,
    /// No router that could be asked: what it sends is of this GID.
    pub(crate) external: Option<Gid>,
    /// It is out of the peers file, or is another one there and was not up yet.
    is_removed: bool,
    /// The run of its router that was up last.
    epoch: Option<u64>,
    /// Both routers know selective repeat.
    pub(crate) selective: bool,
    /// Both routers know frames of records.
    pub(crate) records: bool,
    pub(crate) known: BTreeMap<Qpn, Known>,
    /// QPNs of `known`, the oldest first; some are not there any more, or were there before.
    pub(crate) order: VecDeque<Qpn>,
    /// How many of `known` it was asked for.
    pub(crate) asked_count: usize,
    /// QPs of ours that it asked for, or is connected to: it is notified when they change.
    pub(crate) notified: BTreeSet<Qpn>,
}

impl Host {
    pub(crate) fn new(address: IpAddr, external: Option<Gid>) -> Self {
        let (known, order, notified) = Default::default();
        let (is_removed, epoch, selective, records, asked_count) = (false, None, false, false, 0);
        Self { address, external, is_removed, epoch, selective, records, known, order, asked_count, notified }
    }

    pub(crate) fn note(&mut self, qpn: Qpn, known: Known) {
        self.asked_count += usize::from(matches!(known, Known::Asked { .. }));
        let before = self.known.insert(qpn, known);
        match before {
            None => self.order.push_back(qpn),
            Some(before) => self.asked_count -= usize::from(matches!(before, Known::Asked { .. })),
        }
        while self.order.len() > QPNS_OF_HOST_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.forget(oldest);
        }
    }

    /// The host says what is behind its QPN.
    pub(crate) fn note_answer(&mut self, now: Instant, qpn: Qpn, info: Option<PeerInfo>) {
        let known = match (info, self.known.get(&qpn)) {
            (Some(info), _) => Known::Is(info),
            (None, Some(&Known::Is(info))) if info.service == QpType::Ud => Known::Left { info, until: now + LEFT_FOR },
            (None, _) => Known::Absent { until: now + ABSENT_FOR },
        };
        self.note(qpn, known);
    }

    pub(crate) fn forget(&mut self, qpn: Qpn) {
        if let Some(Known::Asked { .. }) = self.known.remove(&qpn) {
            self.asked_count -= 1;
        }
    }

    pub(crate) fn forget_networks(&mut self, is_gone: impl Fn(NetworkId) -> bool) {
        self.known
            .retain(|_, known| !matches!(known, Known::Is(info) | Known::Left { info, .. } if is_gone(info.network)));
    }

    /// Of a connection that has ended: the host has forgotten, too, who is to be notified.
    pub(crate) fn forget_all(&mut self) {
        self.forget_answers();
        self.notified.clear();
    }

    pub(crate) fn forget_answers(&mut self) {
        self.known.clear();
        self.order.clear();
        self.asked_count = 0;
    }

    /// Whether it still owes an answer.
    pub(crate) fn owes(&self, qpn: Qpn) -> bool {
        matches!(self.known.get(&qpn), Some(Known::Asked { .. }))
    }
}

#[derive(Default)]
pub struct Fabric {
    pub(crate) udp: Option<Box<Udp>>,
    /// The other shards of this router, if there are any.
    pub(crate) siblings: Option<Box<Siblings>>,
    pub(crate) shard_groups: ShardGroups,
    pub(crate) peers: PeersHandle,
    /// This host's address, for packets.
    pub(crate) address: Option<IpAddr>,
    pub(crate) hosts: BTreeMap<HostId, Host>,
    /// QPs of ours, and the hosts that are notified of them; some are not any more.
    listening: BTreeMap<Qpn, BTreeSet<HostId>>,
    pub(crate) routes: BTreeMap<(NetworkId, Gid), HostId>,
    pub(crate) groups: BTreeMap<(NetworkId, Gid), BTreeMap<HostId, Qpn>>,
    pub(crate) external: Vec<ExternalPeers>,
    pub(crate) external_count: u32,
    /// By the networks that they were first spoken to from.
    pub(crate) external_counts: BTreeMap<NetworkId, u32>,
    /// All other routers of the peers file, connected or not.
    pub(crate) routers: Vec<IpAddr>,
    /// QPNs of ours that are somebody else now, and the host that this surely concerns.
    pub(crate) changed: Vec<(Qpn, Option<HostId>)>,
    /// Questions by when they are asked again, answered ones among them.
    pub(crate) asked: VecDeque<(Instant, HostId, Qpn)>,
    /// With so many the answered ones are dropped.
    pub(crate) sift_at: usize,
    /// Questions of this turn. They go behind the notifications about our QPs, so that who answers knows by whom it
    /// was asked.
    pub(crate) questions: Vec<(HostId, Qpn)>,
    /// Bursts that were fetched and found no room.
    pub(crate) unsent: VecDeque<Unsent>,
    /// When something was last sent or received.
    pub(crate) active_at: Instant,
    /// When the sockets were last looked at.
    pub(crate) looked_at: Instant,
    /// Those that the sockets inject.
    pub(crate) faults: Option<WireFaults>,
    /// A QP was refused for want of room, or batches are kept that the sockets don't take.
    pub(crate) blocked: bool,
    /// Management datagrams that came in this turn, for the control thread; and how many it has not looked at.
    pub(crate) mads: Vec<(Gid, Box<Mad>)>,
    pub(crate) mad_backlog: Arc<AtomicUsize>,
    pub(crate) mad_psn: u32,
    /// Too many came, or there was no room to send them.
    pub(crate) mads_lost: u64,
}

/// Formats of packets to and from a host, as it and this one agreed.
#[derive(Clone, Copy)]
pub(crate) struct Agreed {
    pub(crate) icrc: bool,
    pub(crate) frames: bool,
    pub(crate) sealed: bool,
}

impl Agreed {
    const EXTERNAL: Self = Self { icrc: true, frames: false, sealed: false };
}

/// The GID that stands for an address, and the address that a GID stands for.
pub(crate) fn address_of(gid: Gid) -> IpAddr {
    gid.to_ipv4().map_or_else(|| IpAddr::V6(Ipv6Addr::from(gid.0)), IpAddr::V4)
}

impl Fabric {
    /// Whether there are other hosts at all.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.udp.is_some()
    }

    /// The sockets, and the way to the thread that talks to other routers.
    pub fn open(&mut self, udp: Udp, peers: PeersHandle) {
        self.address = udp.config().addresses.first().copied();
        self.udp = Some(Box::new(udp));
        self.peers = peers;
    }

    /// Whether some path leads past this engine.
    #[inline]
    pub fn has_hosts(&self) -> bool {
        self.is_open() || self.siblings.is_some()
    }

    /// The other shards of this router, which are known like hosts.
    pub(crate) fn set_siblings(&mut self, siblings: Siblings) {
        for id in siblings.hosts() {
            self.hosts.insert(id, Host::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), None));
        }
        self.siblings = Some(Box::new(siblings));
    }

    /// Says to a host, or another shard, what is behind a QPN of ours.
    pub(crate) fn notify(&self, host: HostId, qpn: Qpn, info: Option<PeerInfo>) {
        match (shard_of(host), &self.siblings) {
            (Some(shard), Some(siblings)) => siblings.notify(shard, qpn, info),
            _ => self.peers.notify(host, qpn, info),
        }
    }

    /// Other hosts by number, and their addresses.
    pub fn hosts(&self) -> impl Iterator<Item = (HostId, IpAddr, bool)> {
        self.hosts
            .iter()
            .filter(|(id, _)| shard_of(**id).is_none())
            .map(|(&id, host)| (id, host.address, host.external.is_some()))
    }

    pub(crate) fn set_host(
        &mut self,
        id: HostId,
        address: IpAddr,
        Agreed { icrc, frames, sealed }: Agreed,
        external: Option<Gid>,
    ) -> bool {
        let (Some(udp), Some(local)) = (&mut self.udp, self.address) else { return false };
        let index = PeerIndex(id.0);
        // QPs that began with frames go on with them, if only the peers file has changed.
        let had_frames = udp.peer(index).is_some_and(|peer| peer.address == address && peer.frames);
        let peer = Peer {
            address,
            local,
            icrc,
            external: external.is_some(),
            path_mtu_bytes: path_mtu(local, address, sealed).unwrap_or(MTU_GUESS_BYTES),
            frames: external.is_none() && (frames || had_frames),
            // Until it says how long they may be.
            frame_bytes: 0,
            sealed,
            // As it said, until it says otherwise.
            shards: udp.peer(index).filter(|peer| peer.address == address).map_or(1, |peer| peer.shards),
        };
        if let Err(error) = udp.set_peer(index, peer) {
            warning!("a host can't be reached", address = address, error = error);
            return false;
        }
        match self.hosts.get_mut(&id) {
            Some(host) => (host.address, host.is_removed) = (address, false),
            None => drop(self.hosts.insert(id, Host::new(address, external))),
        }
        true
    }

    /// Payload of the frames that this host's link to another takes; 0: none.
    pub(crate) fn own_frame_bytes(&self, id: HostId) -> u16 {
        let (Some(host), Some(local)) = (self.hosts.get(&id), self.address) else { return 0 };
        let sealed = self.udp.as_ref().and_then(|udp| udp.peer(PeerIndex(id.0))).is_some_and(|peer| peer.sealed);
        frame_payload(local, host.address, sealed).ok().flatten().unwrap_or(0)
    }

    /// The other host's link takes frames with so much payload: those between the two are as long as both take. 0: no
    /// frame is sent by QPs that find their way from now on.
    pub(crate) fn set_frame_bytes(&mut self, id: HostId, theirs: u16) {
        let own = if theirs == 0 { 0 } else { self.own_frame_bytes(id) };
        let bytes = own.min(theirs);
        let bytes = if is_response_length(bytes.into()) { bytes } else { 0 };
        if let Some(udp) = &mut self.udp
            && udp.peer(PeerIndex(id.0)).is_some_and(|peer| peer.frames)
        {
            udp.set_frame_bytes(PeerIndex(id.0), bytes);
        }
    }

    /// The other host's router has so many engines.
    pub(crate) fn set_shards(&mut self, id: HostId, count: u8) {
        if let Some(udp) = &mut self.udp {
            udp.set_shards(PeerIndex(id.0), count);
        }
    }

    /// Another run of the other host's router has one engine until it says otherwise; the same one has as many as it
    /// said.
    pub(crate) fn note_epoch(&mut self, id: HostId, epoch: u64) {
        let Some(host) = self.hosts.get_mut(&id) else { return };
        if host.epoch.replace(epoch) != Some(epoch) {
            self.set_shards(id, 1);
        }
    }

    /// Whether QPs that find their way to a host from now on use selective repeat, and frames of records, as both
    /// hosts agreed.
    pub(crate) fn set_features(&mut self, id: HostId, selective: bool, records: bool) {
        if let Some(host) = self.hosts.get_mut(&id) {
            (host.selective, host.records) = (selective, records);
        }
    }

    /// How packets get to a host.
    pub(crate) fn destination(&self, id: HostId, flow: u32) -> Option<Destination> {
        if shard_of(id).is_some() {
            return self.siblings.is_some().then(|| Siblings::destination(id, flow));
        }
        let peer = self.udp.as_ref()?.peer(PeerIndex(id.0))?;
        let (mtu, frame_bytes) = (peer.path_mtu_bytes, peer.frame_bytes);
        let (selective, records) = self.hosts.get(&id).map_or((false, false), |host| (host.selective, host.records));
        let (traffic_class, hop_limit) = (0, HOP_LIMIT);
        Some(Destination { host: id, flow, traffic_class, hop_limit, mtu, frame_bytes, selective, records })
    }

    /// The machine without FreeFlow that has this address, if the network may talk to it.
    pub(crate) fn external_host(&mut self, network: NetworkId, gid: Gid) -> Option<HostId> {
        // One engine keeps the claims of vNICs on such a machine's QPs.
        if self.siblings.as_ref().is_some_and(|siblings| siblings.shard.index() != 0) {
            return None;
        }
        if !self.may_be_external(gid) || !self.allows_external(gid, Some(network)) {
            return None;
        }
        let address = address_of(gid);
        if let Some(index) = self.udp.as_ref()?.peer_of(address) {
            let id = HostId(index.0);
            return self.hosts.get(&id)?.external.is_some().then_some(id);
        }
        // A network that has no more than are left: one that speaks to all of a large range leaves
        // numbers for others. They are not used again, because QPs and address handles may still
        // name them.
        let own_count = self.external_counts.get(&network).copied().unwrap_or_default();
        if own_count >= EXTERNAL_HOST_COUNT_MAX - self.external_count {
            return None;
        }
        let id = HostId(EXTERNAL_HOST_BASE + self.external_count);
        self.set_host(id, address, Agreed::EXTERNAL, Some(gid)).then(|| {
            self.external_count += 1;
            *self.external_counts.entry(network).or_default() += 1;
            id
        })
    }

    /// Whether the peers file allows a network (any, if none is named) to talk to a machine at this address.
    pub(crate) fn allows_external(&self, gid: Gid, network: Option<NetworkId>) -> bool {
        let of_network =
            self.external.iter().filter(|external| network.is_none_or(|network| external.network == network));
        of_network.flat_map(|external| &external.allow).any(|prefix| prefix.contains(gid))
    }

    /// A range that is allowed may hold this host and other routers; but a tenant must not reach QPs there past the
    /// questions that routers ask each other.
    pub(crate) fn may_be_external(&self, gid: Gid) -> bool {
        let address = address_of(gid);
        let of_our_kind = |own: IpAddr| own != address && own.is_ipv4() == address.is_ipv4();
        self.address.is_some_and(of_our_kind) && !self.routers.contains(&address)
    }

    /// A machine that is not allowed any more is gone: packets to it are lost, and its own have an
    /// unknown sender.
    pub(crate) fn remove_external(&mut self) {
        let is_gone = |host: &Host| {
            host.external.is_some_and(|gid| !self.may_be_external(gid) || !self.allows_external(gid, None))
        };
        let gone: Vec<HostId> = self.hosts.iter().filter(|(_, host)| is_gone(host)).map(|(&id, _)| id).collect();
        for id in gone {
            self.hosts.remove(&id);
            if let Some(udp) = &mut self.udp {
                udp.remove_peer(PeerIndex(id.0));
            }
        }
    }

    /// A host is out of the peers file, or is another one there: nothing goes to it or comes from it, its keys are
    /// dropped, and its address is another's maybe.
    pub(crate) fn remove_host(&mut self, id: HostId) {
        if let Some(udp) = &mut self.udp {
            udp.remove_peer(PeerIndex(id.0));
        }
        if let Some(host) = self.hosts.get_mut(&id) {
            host.is_removed = true;
            host.forget_all();
        }
    }

    /// QPs that were connected to such a host ask for it until it is back or their retries end; without any it is
    /// forgotten.
    pub(crate) fn forget_removed(&mut self, is_needed: impl Fn(HostId) -> bool) {
        self.hosts.retain(|&id, host| !host.is_removed || is_needed(id));
    }

    pub(crate) fn handle_settings(&mut self, settings: Settings) {
        if self.is_open() && self.address != Some(settings.address) {
            warning!(
                "another address of this host takes effect when the router is restarted",
                address = settings.address
            );
        }
        self.external = settings.external;
        self.routers = settings.routers;
        self.remove_external();
        if settings.sealed {
            self.seal_hosts();
        }
        let single: Vec<(NetworkId, Gid)> = self
            .external
            .iter()
            .flat_map(|external| external.allow.iter().map(|prefix| (external.network, prefix)))
            .filter_map(|(network, prefix)| Some((network, prefix.single()?)))
            .collect();
        // Those that are named one by one may speak first.
        for (network, gid) in single {
            self.external_host(network, gid);
        }
    }

    pub(crate) fn ask(&mut self, now: Instant, id: HostId, qpn: Qpn, count: u32) {
        let Some(host) = self.hosts.get_mut(&id) else { return };
        if host.asked_count >= QUESTION_COUNT_MAX && !host.owes(qpn) {
            return;
        }
        host.note(qpn, Known::Asked { count });
        if self.asked.len() >= self.sift_at.max(QUESTION_COUNT_MAX) {
            self.asked.retain(|&(_, id, qpn)| self.hosts.get(&id).is_some_and(|host| host.owes(qpn)));
            self.sift_at = 2 * self.asked.len();
        }
        self.asked.push_back((now + ASK_AGAIN, id, qpn));
        self.questions.push((id, qpn));
    }

    /// When [`Self::ask_again`] has something to do, or [`Worker::notify_peers`].
    pub fn next_question(&self) -> Option<Instant> {
        if !self.questions.is_empty() || !self.changed.is_empty() {
            return Some(Instant(0));
        }
        self.asked.front().map(|&(due, ..)| due)
    }

    /// Repeats questions that nobody answered.
    pub fn ask_again(&mut self, now: Instant) {
        while let Some(&(due, id, qpn)) = self.asked.front()
            && due <= now
        {
            self.asked.pop_front();
            let Some(host) = self.hosts.get_mut(&id) else { continue };
            match host.known.get(&qpn) {
                Some(&Known::Asked { count }) if count < ASK_COUNT_MAX => self.ask(now, id, qpn, count + 1),
                Some(Known::Asked { .. }) => host.forget(qpn),
                Some(Known::Is(_) | Known::Left { .. } | Known::Absent { .. }) | None => {}
            }
        }
    }

    pub fn peer(&mut self, now: Instant, id: HostId, qpn: Qpn) -> PeerAnswer {
        let Some(host) = self.hosts.get(&id) else { return PeerAnswer::Absent };
        if let Some(gid) = host.external {
            return PeerAnswer::External(gid);
        }
        match host.known.get(&qpn) {
            Some(Known::Is(info)) => PeerAnswer::Known(*info),
            Some(Known::Left { info, until }) if now < *until => PeerAnswer::Known(*info),
            Some(Known::Absent { until }) if now < *until => PeerAnswer::Absent,
            Some(Known::Asked { .. }) => PeerAnswer::Asked,
            Some(Known::Left { .. } | Known::Absent { .. }) | None => {
                self.ask(now, id, qpn, 1);
                PeerAnswer::Asked
            }
        }
    }

    /// Networks are not there any more: one of the same name that is declared again has another
    /// number, by which hosts speak of their QPs.
    pub fn forget_networks(&mut self, is_gone: impl Fn(NetworkId) -> bool + Copy) {
        self.hosts.values_mut().for_each(|host| host.forget_networks(is_gone));
    }

    pub fn note_changed(&mut self, qpn: Qpn, peer: Option<HostId>) {
        if self.has_hosts() {
            self.changed.push((qpn, peer));
        }
    }

    /// The connection of `qpn` with `peer`, which is that host's, was ended: its end hears of it
    /// too.
    pub fn notify_disconnected(&self, host: HostId, peer: Qpn, qpn: Qpn) {
        match (shard_of(host), &self.siblings) {
            (Some(shard), Some(siblings)) => siblings.disconnected(shard, peer, qpn),
            _ if self.hosts.get(&host).is_some_and(|host| host.external.is_none()) => {
                self.peers.disconnected(host, peer, qpn);
            }
            _ => {}
        }
    }

    /// Notes that the host hears of this QP of ours from now on.
    pub(crate) fn note_notified(&mut self, id: HostId, qpn: Qpn) {
        if let Some(host) = self.hosts.get_mut(&id) {
            host.notified.insert(qpn);
            self.listening.entry(qpn).or_default().insert(id);
        }
    }

    /// A QPN of ours is somebody else now: the hosts to notify. One that is nobody's any more is
    /// notified of for the last time.
    pub(crate) fn listeners(&mut self, qpn: Qpn, peer: Option<HostId>, is_somebody: bool) -> Vec<HostId> {
        if let Some(host) = peer.filter(|_| is_somebody) {
            self.note_notified(host, qpn);
        }
        let mut ids = match is_somebody {
            true => self.listening.get(&qpn).cloned(),
            false => self.listening.remove(&qpn),
        }
        .unwrap_or_default();
        ids.extend(peer);
        let mut hears = |id: &HostId| {
            let Some(host) = self.hosts.get_mut(id) else { return false };
            let notified = if is_somebody { host.notified.contains(&qpn) } else { host.notified.remove(&qpn) };
            (notified || peer == Some(*id)) && host.external.is_none()
        };
        ids.into_iter().filter(|id| hears(id)).collect()
    }

    pub fn group_hosts(&self, network: NetworkId, group: Gid, into: &mut Vec<(Destination, Qpn)>) {
        let Some(hosts) = self.groups.get(&(network, group)) else { return };
        for (&host, &qpn) in hosts {
            into.extend(self.destination(host, qpn.0).map(|destination| (destination, qpn)));
        }
    }

    /// A management datagram of a host, for the control thread, if it is a machine without
    /// FreeFlow: routers have a channel.
    pub fn take_management(&mut self, id: HostId, mad: &Mad) -> bool {
        let Some(gid) = self.hosts.get(&id).and_then(|host| host.external) else { return false };
        if self.mads.len() + self.mad_backlog.load(Relaxed) < MAD_COUNT_MAX {
            self.mads.push((gid, Box::new(*mad)));
        } else {
            self.mads_lost += 1;
        }
        true
    }

    /// Whether what a host says of a QPN of its own is kept here: another shard may have asked.
    pub(crate) fn keeps_answer(&self, host: HostId, qpn: Qpn, info: Option<&PeerInfo>) -> bool {
        let Some(siblings) = self.siblings.as_ref().filter(|_| shard_of(host).is_none()) else { return true };
        // Of one that sends datagrams its host says unasked, before they come, and any shard may have their receivers.
        let may_be_for_us = |info: &PeerInfo| info.connected.is_none_or(|(_, own)| siblings.shard.has_qpn(own));
        info.is_some_and(may_be_for_us) || self.hosts.get(&host).is_some_and(|host| host.known.contains_key(&qpn))
    }

    pub(crate) fn set_group(&mut self, host: HostId, key: (NetworkId, Gid), qpn: Option<Qpn>) {
        match qpn {
            Some(qpn) => drop(self.groups.entry(key).or_default().insert(host, qpn)),
            None => {
                if let Some(hosts) = self.groups.get_mut(&key) {
                    hosts.remove(&host);
                    if hosts.is_empty() {
                        self.groups.remove(&key);
                    }
                }
            }
        }
        if shard_of(host).is_some() {
            self.announce_first(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: HostId = HostId(3);

    fn fabric() -> Fabric {
        let mut fabric = Fabric::default();
        fabric.hosts.insert(HOST, Host::new("192.0.2.3".parse().unwrap(), None));
        fabric
    }

    fn info() -> PeerInfo {
        PeerInfo { network: NetworkId(1), gid: Gid([1; 16]), ipv6_gid: None, service: QpType::Rc, connected: None }
    }

    fn announce(fabric: &mut Fabric, qpn: u32, info: Option<PeerInfo>) {
        fabric.hosts.get_mut(&HOST).unwrap().note_answer(Instant(0), Qpn(qpn), info);
    }

    /// Nobody waits for the worker's next turn.
    fn asked(fabric: &mut Fabric) -> usize {
        fabric.questions.drain(..).count()
    }

    /// A host that has other prefixes keeps what it was told of ours.
    #[test]
    fn answers_are_forgotten_and_those_who_were_told_are_not() {
        let mut fabric = fabric();
        announce(&mut fabric, 7, Some(info()));
        fabric.note_notified(HOST, Qpn(5));
        fabric.hosts.get_mut(&HOST).unwrap().forget_answers();
        assert_eq!(fabric.peer(Instant(0), HOST, Qpn(7)), PeerAnswer::Asked);
        assert_eq!(fabric.listeners(Qpn(5), None, false), [HOST]);
        fabric.note_notified(HOST, Qpn(5));
        fabric.hosts.get_mut(&HOST).unwrap().forget_all();
        assert_eq!(fabric.listeners(Qpn(5), None, false), []);
    }

    #[test]
    fn who_is_not_known_is_asked_for_until_somebody_answers() {
        let (mut fabric, mut now) = (fabric(), Instant(0));
        assert_eq!(fabric.peer(now, HostId(9), Qpn(1)), PeerAnswer::Absent);
        assert_eq!(fabric.peer(now, HOST, Qpn(1)), PeerAnswer::Asked);
        assert_eq!(fabric.peer(now, HOST, Qpn(1)), PeerAnswer::Asked);
        assert_eq!((fabric.asked.len(), fabric.next_question()), (1, Some(Instant(0))));
        assert_eq!(asked(&mut fabric), 1);
        assert_eq!(fabric.next_question(), Some(now + ASK_AGAIN));
        announce(&mut fabric, 1, Some(info()));
        assert_eq!(fabric.peer(now, HOST, Qpn(1)), PeerAnswer::Known(info()));
        announce(&mut fabric, 1, None);
        assert_eq!(fabric.peer(now, HOST, Qpn(1)), PeerAnswer::Absent);
        fabric.ask_again(now + ASK_AGAIN);
        assert_eq!(fabric.next_question(), None);
        // It may be somebody's by now.
        assert_eq!(fabric.peer(now + ABSENT_FOR, HOST, Qpn(1)), PeerAnswer::Asked);
        announce(&mut fabric, 1, Some(info()));
        assert_eq!(asked(&mut fabric), 1);
        fabric.ask_again(now + ASK_AGAIN + ABSENT_FOR);

        // Nobody answers: it is asked again so many times, and then, if somebody wants to know, from the beginning.
        assert_eq!(fabric.peer(now, HOST, Qpn(2)), PeerAnswer::Asked);
        let mut count = 0;
        assert_eq!(asked(&mut fabric), 1);
        while let Some(due) = fabric.next_question() {
            now = due;
            fabric.ask_again(now);
            count += 1;
            asked(&mut fabric);
        }
        assert_eq!((count, fabric.hosts[&HOST].asked_count), (ASK_COUNT_MAX, 0));
        assert_eq!(fabric.peer(now, HOST, Qpn(2)), PeerAnswer::Asked);
        assert!(fabric.next_question().is_some());
    }

    #[test]
    fn a_datagram_may_come_after_the_news_that_its_sender_is_gone() {
        let (mut fabric, sender) = (fabric(), PeerInfo { service: QpType::Ud, ..info() });
        for (qpn, info) in [(1, sender), (2, info())] {
            announce(&mut fabric, qpn, Some(info));
            announce(&mut fabric, qpn, None);
        }
        assert_eq!(fabric.peer(Instant(0), HOST, Qpn(1)), PeerAnswer::Known(sender));
        assert_eq!(fabric.peer(Instant(0), HOST, Qpn(2)), PeerAnswer::Absent);
        // No host can keep it known by saying so again.
        announce(&mut fabric, 1, None);
        assert_eq!(fabric.peer(Instant(0), HOST, Qpn(1)), PeerAnswer::Absent);

        announce(&mut fabric, 3, Some(sender));
        announce(&mut fabric, 3, None);
        assert_eq!(fabric.peer(Instant(0) + LEFT_FOR, HOST, Qpn(3)), PeerAnswer::Asked);
        announce(&mut fabric, 4, Some(sender));
        announce(&mut fabric, 4, None);
        fabric.forget_networks(|network| network == sender.network);
        assert_eq!(fabric.peer(Instant(0), HOST, Qpn(4)), PeerAnswer::Asked);
    }

    #[test]
    fn whose_network_is_gone_is_asked_for_again() {
        let mut fabric = fabric();
        announce(&mut fabric, 1, Some(info()));
        announce(&mut fabric, 2, Some(PeerInfo { network: NetworkId(77), ..info() }));
        fabric.forget_networks(|network| network == NetworkId(77));
        assert_eq!(fabric.peer(Instant(0), HOST, Qpn(1)), PeerAnswer::Known(info()));
        assert_eq!(fabric.peer(Instant(0), HOST, Qpn(2)), PeerAnswer::Asked);
        announce(&mut fabric, 2, Some(info()));
        assert_eq!(fabric.peer(Instant(0), HOST, Qpn(2)), PeerAnswer::Known(info()));
    }

    #[test]
    fn what_is_kept_of_a_host_is_bounded() {
        let mut fabric = fabric();
        for qpn in 0..QPNS_OF_HOST_MAX as u32 + 1 {
            announce(&mut fabric, qpn, Some(info()));
        }
        assert_eq!(fabric.hosts[&HOST].known.len(), QPNS_OF_HOST_MAX);
        assert_eq!(fabric.peer(Instant(0), HOST, Qpn(1)), PeerAnswer::Known(info()));
        assert_eq!(fabric.peer(Instant(0), HOST, Qpn(0)), PeerAnswer::Asked);
    }

    #[test]
    fn unanswered_questions_are_bounded_and_answered_ones_make_room() {
        let mut fabric = fabric();
        let count = QUESTION_COUNT_MAX as u32;
        for qpn in 0..2 * count {
            assert_eq!(fabric.peer(Instant(0), HOST, Qpn(qpn)), PeerAnswer::Asked);
        }
        assert_eq!((asked(&mut fabric), fabric.hosts[&HOST].asked_count), (QUESTION_COUNT_MAX, QUESTION_COUNT_MAX));
        // Those that were not asked, answered at once: never more than a few times as many are kept.
        for qpn in 0..8 * count {
            announce(&mut fabric, qpn, None);
            fabric.peer(Instant(0), HOST, Qpn(qpn + count));
            assert!(fabric.asked.len() <= 2 * QUESTION_COUNT_MAX);
        }
        assert!(asked(&mut fabric) > 6 * QUESTION_COUNT_MAX);
        // Each is asked again once, and then they are forgotten.
        let host = fabric.hosts.get_mut(&HOST).unwrap();
        host.forget_all();
        fabric.ask_again(Instant(0) + ASK_AGAIN);
        assert_eq!((fabric.asked.len(), fabric.hosts[&HOST].asked_count), (0, 0));
    }

    #[test]
    fn a_host_hears_of_queue_pairs_until_they_are_gone() {
        let mut fabric = fabric();
        let other = HostId(4);
        fabric.hosts.insert(other, Host::new("192.0.2.4".parse().unwrap(), None));
        assert_eq!(fabric.listeners(Qpn(7), None, true), []);
        assert_eq!(fabric.listeners(Qpn(7), Some(HOST), true), [HOST]);
        fabric.note_notified(other, Qpn(7));
        assert_eq!(fabric.listeners(Qpn(7), None, true), [HOST, other]);
        assert_eq!(fabric.listeners(Qpn(7), None, false), [HOST, other]);
        assert_eq!(fabric.listeners(Qpn(7), None, false), []);
        // A QP that is connected with it hears of its end, and is not kept.
        assert_eq!(fabric.listeners(Qpn(8), Some(HOST), false), [HOST]);
        assert!(fabric.hosts.values().all(|host| host.notified.is_empty()));
    }

    #[test]
    fn an_external_machine_vouches_for_itself() {
        let mut fabric = fabric();
        let gid = Gid::from_ip("192.0.2.9".parse().unwrap());
        fabric.hosts.insert(HostId(EXTERNAL_HOST_BASE), Host::new(address_of(gid), Some(gid)));
        assert_eq!(fabric.peer(Instant(0), HostId(EXTERNAL_HOST_BASE), Qpn(5)), PeerAnswer::External(gid));
        assert_eq!(fabric.next_question(), None);
    }

    #[test]
    fn a_group_has_one_number_for_each_host() {
        let mut fabric = fabric();
        let key = (NetworkId(1), Gid([0xff; 16]));
        fabric.set_group(HOST, key, Some(Qpn(1)));
        fabric.set_group(HOST, key, Some(Qpn(2)));
        assert_eq!(fabric.groups[&key].len(), 1);
        fabric.set_group(HOST, key, None);
        fabric.set_group(HOST, key, None);
        assert!(fabric.groups.is_empty());
    }
}
