//! This router's knowledge of the others, and its announcements to them: a state machine without
//! sockets, clock or randomness.
//!
//! For each host of the peers file: connect (or be connected), greet, announce everything, announce
//! changes, answer, keep alive; and from what comes back, a stream of [`Update`]s for the worker.
//!
//! ```text
//! Down     | waits to be dialed             | connected → Greeting
//! Waiting  | for the time to dial           | time → Dialing
//! Dialing  |                                | connected → Greeting, failed → Waiting
//! Greeting | Hello sent                     | Hello → Up, anything else → Down or Waiting
//! Up       | announces, asks, answers       | silence, nonsense, end → Down or Waiting
//! ```
//! The host with the smaller name dials, so no two connections cross. A newer connection of a host
//! replaces the older one: its other side may have been restarted before this side noticed.
//!
//! **What is believed.** A host's addresses must lie in its prefixes. The first to announce an
//! address has it; a vNIC of this host always comes first. Answers about QPNs are given once and
//! pushed when they change; after a connection was lost some may have been missed, so
//! [`Update::PeersGone`] comes before each [`Update::HostUp`], and the worker asks again for what
//! it still needs. Routes survive a lost connection for [`ROUTES_KEPT`], unless the host comes back
//! with another epoch.
//!
//! An `ask` while the host is not up is forgotten, and so is a `notify`: the other side will ask.
use super::claims::{ClaimSubject, Claims};
use super::deadlines::Deadlines;
use super::file::{PeerEntry, PeersFile};
#[cfg(test)]
pub use super::host::REDIAL_LAST;
use super::host::{Announced, Host, Phase};
pub use super::host::{ConnectionId, HostStatus, REDIAL_FIRST, SILENCE_MAX};
use super::identities::Identities;
pub use super::notes::{Note, Why};
use super::numbers::Numbers;
use super::update::{ExternalPeers, Mad, MadEnds, Settings, Update};
use crate::admission::access::VnicIdentity;
use crate::admission::address_map::AddressMap;
use freeflow_engine::{HostId, PeerInfo};
use freeflow_protocol::admin::PeerCounters;
use freeflow_protocol::peer::{
    FEATURE_FRAMES, FEATURE_RECORDS, FEATURE_SEALED, FEATURE_SELECTIVE, FEATURE_SHARDS, PEER_PROTOCOL, PeerMessage,
    QpInfo,
};
use freeflow_protocol::version::Offer;
use freeflow_verbs::{Duration, Gid, Instant, NetworkId, Qpn};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;

/// Between two pings.
pub const PING_INTERVAL: Duration = Duration::from_millis(1000);
/// How long a dead host's addresses are still its own.
pub const ROUTES_KEPT: Duration = Duration::from_millis(30_000);
/// A connection that lasted so long was a good one: the pauses begin again.
const STABLE: Duration = Duration::from_millis(10_000);
/// Announcements made before the connection has to have room again.
const ANNOUNCE_COUNT: usize = 256;
/// Largest number of a host of the peers file.
pub const HOST_NUMBER_MAX: u32 = 0x7fff;

/// Actions to take, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Connect to this host; then [`State::handle_connected`], or [`State::handle_dial_failed`].
    Dial(HostId),
    /// End this connection; nothing needs to be reported.
    Close(ConnectionId),
    Send(ConnectionId, PeerMessage),
    Update(Update),
    /// To be logged, now and then.
    Note(String, Note),
}

/// How a connection ended that this state machine did not close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By the other side or the network.
    Closed,
    /// By this side, because the other one reads nothing.
    Stuck,
}

pub struct State {
    file: PeersFile,
    epoch: u64,
    /// Engines of this router.
    pub(super) shard_count: u8,
    hosts: BTreeMap<HostId, Host>,
    /// When time alone changes something of a host.
    deadlines: Deadlines<HostId>,
    numbers: Numbers,
    /// Hosts of the file that there was no number for.
    left_out: Vec<(PeerEntry, Instant)>,
    /// Of all hosts of the file.
    addresses: BTreeSet<IpAddr>,
    by_connection: BTreeMap<ConnectionId, HostId>,
    /// Connections of hosts that have not been announced everything.
    announcing: BTreeSet<ConnectionId>,
    pub(super) networks: BTreeMap<String, NetworkId>,
    network_names: BTreeMap<NetworkId, String>,
    pub(super) address_map: Arc<AddressMap>,
    /// Announcements of this host.
    local: BTreeMap<ClaimSubject, Option<Qpn>>,
    pub(super) claims: Claims,
    pub(super) identities: Identities,
    pub(super) outputs: VecDeque<Output>,
}

impl State {
    /// `epoch` is random, and another one for each run of the router.
    pub fn new(now: Instant, file: PeersFile, epoch: u64) -> Self {
        let mut state = Self {
            file: PeersFile { peers: Vec::new(), ..file.clone() },
            epoch,
            shard_count: 1,
            hosts: BTreeMap::new(),
            deadlines: Deadlines::default(),
            numbers: Numbers::new(HOST_NUMBER_MAX),
            left_out: Vec::new(),
            addresses: BTreeSet::new(),
            by_connection: BTreeMap::new(),
            announcing: BTreeSet::new(),
            networks: BTreeMap::new(),
            network_names: BTreeMap::new(),
            address_map: Arc::default(),
            local: BTreeMap::new(),
            claims: Claims::default(),
            identities: Identities::default(),
            outputs: VecDeque::new(),
        };
        state.handle_reload(now, file);
        state
    }

    pub fn file(&self) -> &PeersFile {
        &self.file
    }

    pub fn host(&self, host: HostId) -> Option<&PeerEntry> {
        self.hosts.get(&host).map(|host| &host.entry)
    }

    pub fn host_named(&self, name: &str) -> Option<(HostId, &PeerEntry)> {
        let id = self.numbers.of(name)?;
        Some((id, &self.hosts.get(&id)?.entry))
    }

    /// Whether a host of the file has this address.
    pub fn knows_address(&self, address: IpAddr) -> bool {
        self.addresses.contains(&address)
    }

    /// Whether [`Output::Dial`] is still to be done.
    pub fn is_dialing(&self, id: HostId) -> bool {
        self.hosts.get(&id).is_some_and(|host| host.phase == Phase::Dialing)
    }

    pub fn statuses(&self) -> Vec<HostStatus> {
        let status = |(id, host): (&HostId, &Host)| HostStatus {
            icrc: host.icrc && !self.file.sealed,
            sealed: self.file.sealed,
            route_count: self.claims.route_count(*id),
            ..host.status()
        };
        let left_out = self.left_out.iter().map(|(entry, since)| HostStatus {
            problem: Some(Why::NoNumber),
            sealed: self.file.sealed,
            ..Host::new(*since, entry.clone(), false).status()
        });
        self.hosts.iter().map(status).chain(left_out).collect()
    }

    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    pub fn has_output(&self) -> bool {
        !self.outputs.is_empty()
    }

    /// When [`Self::handle_timer`] has something to do.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadlines.next()
    }

    /// After each change of a host's phase.
    fn arm(&mut self, id: HostId) {
        self.deadlines.set(id, self.hosts.get(&id).and_then(Host::deadline));
    }

    // The file.

    /// A peers file was read, at the start or again. Hosts that are as they were keep their
    /// connections, unless this host itself has changed; also those that have other prefixes.
    pub fn handle_reload(&mut self, now: Instant, file: PeersFile) {
        let wire = |file: &PeersFile| (file.icrc, file.frames, file.sealed);
        let own = |file: &PeersFile| (file.host.clone(), file.address, file.control_port, wire(file));
        let same_own = own(&self.file) == own(&file);
        let entries: BTreeMap<&str, &PeerEntry> = file.peers.iter().map(|entry| (entry.host.as_str(), entry)).collect();
        let going: Vec<HostId> = (self.hosts.iter())
            .filter(|(_, host)| {
                let is_there =
                    entries.get(host.entry.host.as_str()).is_some_and(|entry| entry.is_same_host(&host.entry));
                !same_own || !is_there
            })
            .map(|(&id, _)| id)
            .collect();
        for id in going {
            self.remove_host(now, id);
        }
        self.file = file;
        self.addresses = self.file.peers.iter().map(|entry| entry.address).collect();
        let left_out = std::mem::take(&mut self.left_out);
        for entry in self.file.peers.clone() {
            let Some(id) = self.numbers.take(now, &entry.host) else {
                let since = left_out.iter().find(|(other, _)| other.host == entry.host).map(|(_, since)| *since);
                if since.is_none() {
                    self.outputs.push_back(Output::Note(entry.host.clone(), Note::LeftOut(Why::NoNumber)));
                }
                self.left_out.push((entry, since.unwrap_or(now)));
                continue;
            };
            self.change_prefixes(id, &entry);
            let dials = self.file.host < entry.host;
            self.hosts.entry(id).or_insert_with(|| Host::new(now, entry, dials));
            self.arm(id);
        }
        self.give_settings();
    }

    /// A host that is known already may have addresses that it could not have before, or not others any more: what it
    /// said of QPs with those is forgotten with all that it said of QPs.
    fn change_prefixes(&mut self, id: HostId, entry: &PeerEntry) {
        let Some(host) = self.hosts.get_mut(&id).filter(|host| host.entry.prefixes != entry.prefixes) else { return };
        let has_lost = !entry.prefixes.has_all(&host.entry.prefixes);
        host.entry = entry.clone();
        let updates = self.claims.allow(id, &entry.prefixes, &self.networks);
        self.update(updates);
        if has_lost {
            let owned = self.claims.owned(id, &self.networks);
            let parties: Vec<Update> =
                owned.into_iter().filter_map(|(network, gid)| self.party(id, network, gid)).collect();
            self.outputs.extend(parties.into_iter().chain([Update::AskAgain { host: id }]).map(Output::Update));
        }
    }

    fn remove_host(&mut self, now: Instant, id: HostId) {
        self.end_connection(now, id, Why::Removed);
        if let Some(host) = self.hosts.remove(&id) {
            self.numbers.leave(now, &host.entry.host);
            self.arm(id);
            self.forget_claims(id);
            for update in [Update::Removed { host: id }, Update::PeersGone { host: id }] {
                self.outputs.push_back(Output::Update(update));
            }
        }
    }

    fn give_settings(&mut self) {
        let external = self.file.external.iter().filter_map(|external| {
            Some(ExternalPeers { network: *self.networks.get(&external.network)?, allow: external.allow.clone() })
        });
        let settings = Settings {
            address: self.file.address,
            dscp: self.file.dscp,
            sealed: self.file.sealed,
            routers: self.file.peers.iter().map(|peer| peer.address).collect(),
            external: external.collect(),
        };
        self.outputs.push_back(Output::Update(Update::Settings(settings)));
    }

    // Connections.

    /// A connection whose other side has proved to be this host.
    pub fn handle_connected(&mut self, now: Instant, id: HostId, connection: ConnectionId) {
        if !self.hosts.contains_key(&id) {
            self.outputs.push_back(Output::Close(connection));
            return;
        }
        self.end_connection(now, id, Why::Replaced);
        let Some(host) = self.hosts.get_mut(&id) else { return };
        host.phase = Phase::Greeting { connection, heard: now };
        host.since = now;
        host.counters.connections += 1;
        self.arm(id);
        self.by_connection.insert(connection, id);
        let hello = PeerMessage::Hello {
            offer: self.offer(),
            host: self.file.host.clone(),
            epoch: self.epoch,
            icrc_wanted: self.file.icrc,
        };
        self.send(id, hello);
    }

    /// Versions and features that this host speaks, as its peers file has it.
    fn offer(&self) -> Offer {
        let without = if self.file.frames { 0 } else { FEATURE_FRAMES | FEATURE_SELECTIVE | FEATURE_RECORDS };
        let sealed = if self.file.sealed { FEATURE_SEALED } else { 0 };
        let features = PEER_PROTOCOL.features & !without | sealed;
        // To a host that takes all keys for one engine's, one would replace another.
        let shards = if self.file.sealed && self.shard_count > 1 { FEATURE_SHARDS } else { 0 };
        Offer { features, required_features: sealed | shards, ..PEER_PROTOCOL }
    }

    /// How much payload the link to a host takes in frames, if it is up and takes any.
    pub fn announce_frames(&mut self, id: HostId, payload_bytes: u16) {
        if self.hosts.get(&id).is_some_and(|host| host.frames && matches!(host.phase, Phase::Up { .. })) {
            self.send(id, PeerMessage::Frames { payload_bytes });
        }
    }

    pub fn handle_dial_failed(&mut self, now: Instant, id: HostId) {
        if let Some(host) = self.hosts.get_mut(&id)
            && host.phase == Phase::Dialing
        {
            host.counters.failed_dials += 1;
            host.problem = host.problem.filter(|why| !matches!(why, Why::NotDialed { .. }));
            host.pause(now, &self.file.host);
            self.arm(id);
        }
    }

    /// A connection could not even be begun here.
    pub fn handle_no_dial(&mut self, now: Instant, id: HostId, errno: i32) {
        self.handle_dial_failed(now, id);
        if let Some(host) = self.hosts.get_mut(&id) {
            host.problem = Some(Why::NotDialed { errno });
        }
    }

    /// The connection is gone.
    pub fn handle_disconnected(&mut self, now: Instant, connection: ConnectionId, ending: Ending) {
        let Some(&id) = self.by_connection.get(&connection) else { return };
        if let Some(host) = self.hosts.get_mut(&id).filter(|_| ending == Ending::Stuck) {
            host.counters.timeouts += 1;
        }
        let why = match ending {
            Ending::Closed => Why::Ended,
            Ending::Stuck => Why::Stuck,
        };
        self.end_connection(now, id, why);
    }

    /// Handles bytes that could not be understood.
    pub fn handle_nonsense(&mut self, now: Instant, connection: ConnectionId) {
        if let Some(&id) = self.by_connection.get(&connection) {
            self.offend(now, id, Why::Nonsense);
        }
    }

    pub(super) fn offend(&mut self, now: Instant, id: HostId, why: Why) {
        if let Some(host) = self.hosts.get_mut(&id) {
            host.counters.protocol_errors += 1;
        }
        self.end_connection(now, id, why);
    }

    /// Ends the connection of a host, if it has one.
    fn end_connection(&mut self, now: Instant, id: HostId, why: Why) {
        let Some(host) = self.hosts.get_mut(&id) else { return };
        let Some(connection) = host.phase.connection() else { return };
        self.by_connection.remove(&connection);
        self.announcing.remove(&connection);
        self.outputs.push_back(Output::Close(connection));
        if matches!(host.phase, Phase::Up { .. }) {
            if now - host.since >= STABLE {
                host.redial_after = REDIAL_FIRST;
            }
            host.kept_until = Some(now + ROUTES_KEPT);
            self.outputs.push_back(Output::Update(Update::HostDown { host: id }));
        }
        host.rtt = None;
        // Why it never came up says more than that it ended.
        match why {
            Why::Replaced => {}
            Why::Ended => drop(host.problem.get_or_insert(why)),
            _ => host.problem = Some(why),
        }
        host.pause(now, &self.file.host);
        self.outputs.push_back(Output::Note(host.entry.host.clone(), Note::Down(why)));
        self.arm(id);
    }

    // Time.

    pub fn handle_timer(&mut self, now: Instant) {
        for id in self.deadlines.take_due(now) {
            self.handle_host_timer(now, id);
        }
    }

    fn handle_host_timer(&mut self, now: Instant, id: HostId) {
        let Some(host) = self.hosts.get_mut(&id) else { return };
        match host.phase {
            Phase::Waiting { until } if until <= now => {
                host.enter(now, Phase::Dialing);
                self.outputs.push_back(Output::Dial(id));
            }
            Phase::Greeting { heard, .. } | Phase::Up { heard, .. } if heard + SILENCE_MAX <= now => {
                host.counters.timeouts += 1;
                self.end_connection(now, id, Why::Silent);
            }
            Phase::Up { connection, heard, ping_at } if ping_at <= now => {
                host.phase = Phase::Up { connection, heard, ping_at: now + PING_INTERVAL };
                host.pinged = Some(now.0);
                self.send(id, PeerMessage::Ping { stamp: now.0 });
            }
            _ => {}
        }
        let Some(host) = self.hosts.get_mut(&id) else { return };
        if host.kept_until.is_some_and(|until| until <= now) {
            host.kept_until = None;
            self.forget_claims(id);
            self.outputs.push_back(Output::Update(Update::PeersGone { host: id }));
        }
        self.arm(id);
    }

    // Messages.

    /// `has_cm_room`: messages of connection management can be dealt with.
    pub fn handle_message(&mut self, now: Instant, connection: ConnectionId, message: PeerMessage, has_cm_room: bool) {
        let Some(&id) = self.by_connection.get(&connection) else { return };
        let Some(host) = self.hosts.get_mut(&id) else { return };
        host.counters.received_messages += 1;
        match &mut host.phase {
            Phase::Greeting { .. } => return self.handle_greeting(now, id, connection, message),
            Phase::Up { heard, .. } => *heard = now,
            Phase::Down | Phase::Waiting { .. } | Phase::Dialing => return,
        }
        let (has_frames, knows_shards) = (host.frames, host.knows_shards);
        self.arm(id);
        match message {
            PeerMessage::Hello { .. } => self.offend(now, id, Why::Nonsense),
            PeerMessage::Attach { network, gid } => self.claim(id, ClaimSubject::Address { network, gid }, None),
            PeerMessage::Detach { network, gid } => {
                let subject = ClaimSubject::Address { network, gid };
                self.identities.forget(id, &subject);
                self.release(id, &subject);
            }
            PeerMessage::Group { network, gid, qpn: None } => self.release(id, &ClaimSubject::Group { network, gid }),
            PeerMessage::Group { network, gid, qpn } => self.claim(id, ClaimSubject::Group { network, gid }, qpn),
            PeerMessage::Synced => {
                let updates = self.claims.end_sync(id, &self.networks);
                self.identities.retain(id, |subject| self.claims.is_announced(id, subject));
                self.update(updates);
            }
            PeerMessage::Ask { qpn } | PeerMessage::Info { qpn, .. } if qpn.0 > Qpn::MASK => {
                self.offend(now, id, Why::Nonsense);
            }
            PeerMessage::Identity { network, gid, other, vnic, labels } => {
                self.identify(id, (network, gid), other, (vnic, labels));
            }
            PeerMessage::Disconnected { qpn, peer } => {
                self.outputs.push_back(Output::Update(Update::Disconnected { host: id, qpn, peer }));
            }
            PeerMessage::Frames { .. } if !has_frames => self.offend(now, id, Why::Nonsense),
            PeerMessage::Frames { payload_bytes } => {
                self.outputs.push_back(Output::Update(Update::Frames { host: id, payload_bytes }));
            }
            PeerMessage::Shards { .. } if !knows_shards => self.offend(now, id, Why::Nonsense),
            PeerMessage::Shards { count } => self.handle_shards(now, id, count),
            PeerMessage::SealKey { .. } | PeerMessage::SealKeyHeld { .. } => self.handle_seal(now, id, message),
            PeerMessage::Ask { qpn } => self.outputs.push_back(Output::Update(Update::Asked { host: id, qpn })),
            PeerMessage::Info { qpn, info } => {
                let info = info.and_then(|info| self.checked(id, info));
                self.outputs.push_back(Output::Update(Update::Peer { host: id, qpn, info }));
            }
            PeerMessage::Ping { stamp } => self.send(id, PeerMessage::Pong { stamp }),
            PeerMessage::Pong { stamp } => {
                if let Some(host) = self.hosts.get_mut(&id).filter(|host| host.pinged == Some(stamp)) {
                    host.pinged = None;
                    host.rtt = Some(now - Instant(stamp));
                }
            }
            PeerMessage::Cm { network, from, to, mad } => match Box::<Mad>::try_from(mad.into_boxed_slice()) {
                Ok(mad) if has_cm_room => self.handle_cm(id, network, MadEnds { from, to }, mad),
                Ok(_) => drop(self.named_counters(id).map(|(_, counters)| counters.dropped_cm += 1)),
                Err(_) => self.offend(now, id, Why::Nonsense),
            },
        }
    }

    fn handle_greeting(&mut self, now: Instant, id: HostId, connection: ConnectionId, message: PeerMessage) {
        let own_offer = self.offer();
        let Some(host) = self.hosts.get_mut(&id) else { return };
        let PeerMessage::Hello { offer, host: name, epoch, icrc_wanted } = message else {
            return self.offend(now, id, Why::NotGreeted);
        };
        let theirs = if self.file.sealed { offer.features } else { offer.required_features };
        if self.file.sealed != (theirs & FEATURE_SEALED != 0) {
            return self.offend(now, id, Why::Seal { here: self.file.sealed });
        }
        let agreed = match own_offer.agree(&offer) {
            Ok(agreed) => agreed,
            Err(why) => return self.offend(now, id, Why::Disagreed(why)),
        };
        if name != host.entry.host {
            return self.offend(now, id, Why::OtherName);
        }
        host.enter(now, Phase::Up { connection, heard: now, ping_at: now });
        host.problem = None;
        host.icrc = icrc_wanted && self.file.icrc;
        host.frames = agreed.features & FEATURE_FRAMES != 0;
        host.knows_shards = agreed.features & FEATURE_SHARDS != 0;
        host.announced = Announced::UpTo(None);
        host.kept_until = None;
        let (icrc, address, knows_shards) = (host.icrc, host.entry.address, host.knows_shards);
        let restarted = host.epoch.replace(epoch).is_some_and(|last| last != epoch);
        self.outputs.push_back(Output::Note(name, Note::Up { restarted }));
        if restarted {
            self.forget_claims(id);
        }
        self.claims.begin_sync(id);
        self.outputs.push_back(Output::Update(Update::PeersGone { host: id }));
        self.outputs.push_back(Output::Update(Update::HostUp { host: id, address, icrc, epoch, agreed }));
        if knows_shards {
            self.announce_shards(id);
        }
        self.announce_more(id);
        self.handle_host_timer(now, id);
    }

    /// A host's description of one of its QPs, if it may give it.
    fn checked(&mut self, id: HostId, info: QpInfo) -> Option<PeerInfo> {
        let QpInfo { network, gid, ipv6_gid, service, connected } = info;
        let is_its_own = std::iter::once(gid).chain(ipv6_gid).all(|gid| self.may_have(id, gid));
        let host = self.hosts.get_mut(&id)?;
        if !is_its_own {
            host.counters.refused_infos += 1;
            return None;
        }
        // In a network that is not here it can be nobody's peer here.
        Some(PeerInfo { network: *self.networks.get(&network)?, gid, ipv6_gid, service, connected })
    }

    /// Whether an address lies in a host's prefixes.
    pub(super) fn may_have(&self, id: HostId, gid: Gid) -> bool {
        self.hosts.get(&id).is_some_and(|host| host.entry.prefixes.contains(gid))
    }

    fn claim(&mut self, id: HostId, subject: ClaimSubject, qpn: Option<Qpn>) {
        let Some(host) = self.hosts.get_mut(&id) else { return };
        let (claims, prefixes) = (&mut self.claims, &host.entry.prefixes);
        let claimed =
            subject.check(qpn).and_then(|()| claims.claim(id, (subject.clone(), qpn), prefixes, &self.networks));
        match claimed {
            Ok(update) => self.update(update),
            Err(refusal) => {
                host.counters.refused_announcements += 1;
                self.outputs.push_back(Output::Note(host.entry.host.clone(), Note::Claimed { subject, refusal }));
            }
        }
    }

    fn release(&mut self, id: HostId, subject: &ClaimSubject) {
        let update = self.claims.release(id, subject, &self.networks);
        self.update(update);
    }

    fn forget_claims(&mut self, id: HostId) {
        self.identities.retain(id, |_| false);
        let updates = self.claims.forget(id, &self.networks);
        self.update(updates);
    }

    /// The name of a host, and what is counted of it.
    pub(super) fn named_counters(&mut self, id: HostId) -> Option<(&str, &mut PeerCounters)> {
        self.hosts.get_mut(&id).map(|host| (host.entry.host.as_str(), &mut host.counters))
    }

    pub(super) fn send(&mut self, id: HostId, message: PeerMessage) {
        if let Some(host) = self.hosts.get_mut(&id)
            && let Some(connection) = host.phase.connection()
        {
            host.counters.sent_messages += 1;
            self.outputs.push_back(Output::Send(connection, message));
        }
    }

    /// Connections on which [`Self::handle_room`] has something to announce.
    pub fn announcing(&self) -> impl Iterator<Item = ConnectionId> {
        self.announcing.iter().copied()
    }

    /// The connection has room again.
    pub fn handle_room(&mut self, connection: ConnectionId) {
        if let Some(&id) = self.by_connection.get(&connection) {
            self.announce_more(id);
        }
    }

    fn announce_more(&mut self, id: HostId) {
        let Some(host) = self.hosts.get_mut(&id) else { return };
        let (Phase::Up { connection, .. }, Announced::UpTo(last)) = (host.phase, &host.announced) else { return };
        let from = last.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.local.range((from, Bound::Unbounded)).take(ANNOUNCE_COUNT);
        let next: Vec<(ClaimSubject, Option<Qpn>)> = next.map(|(subject, &qpn)| (subject.clone(), qpn)).collect();
        let is_end = next.len() < ANNOUNCE_COUNT;
        host.announced = match next.last() {
            Some((subject, _)) if !is_end => Announced::UpTo(Some(subject.clone())),
            _ => Announced::All,
        };
        if is_end {
            self.announcing.remove(&connection);
        } else {
            self.announcing.insert(connection);
        }
        for (subject, qpn) in next {
            self.send(id, subject.announcement(qpn));
            self.send_identity(id, &subject);
        }
        if is_end {
            self.send(id, PeerMessage::Synced);
        }
    }

    // This host's own.

    /// A network of this host; `None`: it is gone. One that is made again under its name is another one.
    pub fn handle_network(&mut self, name: &str, network: Option<NetworkId>) {
        let before = match network {
            Some(network) => self.networks.insert(name.into(), network),
            None => self.networks.remove(name),
        };
        if before == network {
            return;
        }
        if let Some(gone) = before {
            self.network_names.remove(&gone);
            let updates = self.claims.of_network(name, gone, false);
            self.update(updates);
            let is_its =
                |subject: &&ClaimSubject| subject.network() == name && matches!(subject, ClaimSubject::Group { .. });
            let groups: Vec<ClaimSubject> = self.local.keys().filter(is_its).cloned().collect();
            for group in groups {
                self.set_local(group, None);
            }
        }
        if let Some(network) = network {
            self.network_names.insert(network, name.into());
            let updates = self.claims.of_network(name, network, true);
            self.update(updates);
        }
        self.give_settings();
    }

    /// A vNIC came to this host, is another now, or left it.
    pub fn handle_address(&mut self, network: &str, gid: Gid, identity: Option<Arc<VnicIdentity>>) {
        let subject = ClaimSubject::Address { network: network.into(), gid };
        let present = identity.is_some();
        let update = self.claims.set_local(&subject, present, &self.networks);
        self.update(update);
        let is_another = self.identities.set_own(&subject, identity);
        self.set_local(subject.clone(), present.then_some(None));
        if is_another {
            for id in self.notified(&subject) {
                self.send_identity(id, &subject);
            }
        }
    }

    /// The QPN by which this host's members of a group are reached; `None`: there are none any more.
    pub fn handle_group(&mut self, network: NetworkId, gid: Gid, qpn: Option<Qpn>) {
        if let Some(network) = self.network_name(network) {
            self.set_local(ClaimSubject::Group { network, gid }, qpn.map(Some));
        }
    }

    fn set_local(&mut self, subject: ClaimSubject, value: Option<Option<Qpn>>) {
        let before = match value {
            Some(qpn) => self.local.insert(subject.clone(), qpn),
            None => self.local.remove(&subject),
        };
        if before == value {
            return;
        }
        let message = match value {
            Some(qpn) => subject.announcement(qpn),
            None => subject.withdrawal(),
        };
        for id in self.notified(&subject) {
            self.send(id, message.clone());
        }
    }

    /// Hosts that something was announced to.
    fn notified(&self, subject: &ClaimSubject) -> Vec<HostId> {
        let notified = |host: &Host| match (&host.phase, &host.announced) {
            (Phase::Up { .. }, Announced::All) => true,
            // A later subject will be announced as it is then.
            (Phase::Up { .. }, Announced::UpTo(Some(last))) => subject <= last,
            _ => false,
        };
        self.hosts.iter().filter(|(_, host)| notified(host)).map(|(&id, _)| id).collect()
    }

    pub(super) fn network_name(&self, network: NetworkId) -> Option<String> {
        self.network_names.get(&network).cloned()
    }

    pub(super) fn is_up(&self, id: HostId) -> bool {
        self.hosts.get(&id).is_some_and(Host::is_up)
    }

    /// Asks for the QP behind that QPN there.
    pub fn ask(&mut self, id: HostId, qpn: Qpn) {
        if self.is_up(id) {
            self.send(id, PeerMessage::Ask { qpn });
        }
    }

    /// The connection of a host that is up.
    pub fn connection_of(&self, id: HostId) -> Option<ConnectionId> {
        self.hosts.get(&id)?.phase.connection()
    }

    /// Announces the QP behind this QPN here.
    pub fn notify(&mut self, id: HostId, qpn: Qpn, info: Option<PeerInfo>) {
        if self.is_up(id) {
            let info = info.and_then(|PeerInfo { network, gid, ipv6_gid, service, connected }| {
                Some(QpInfo { network: self.network_name(network)?, gid, ipv6_gid, service, connected })
            });
            self.send(id, PeerMessage::Info { qpn, info });
        }
    }
}
