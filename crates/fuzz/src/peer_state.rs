//! A router's state of other hosts: connections that come and go, messages of hosts that lie,
//! networks and vNICs of its own, another peers file, and time, in any order.
use crate::bytes::Input;
use freeflow_engine::{HostId, PeerInfo};
use freeflow_protocol::peer::{FEATURE_SEALED, MAD_BYTES, PEER_MESSAGE_BYTES_MAX, PEER_PROTOCOL, PeerMessage, QpInfo};
use freeflow_protocol::version::Offer;
use freeflow_protocol::{decode, encode};
use freeflow_router::peering::{
    ConnectionId, Ending, External, KEY_BYTES, MadEnds, Output, PeerEntry, PeersFile, Prefix, State, Update,
    VnicIdentity,
};
use freeflow_verbs::{Duration, Gid, Instant, NetworkId, QpType, Qpn, Shard};
use freeflow_wire::MASK_24;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;

/// This host is the third of the file: it dials the last alone, and is dialed by the others.
const OWN: u8 = 3;
const PEERS: [u8; 3] = [1, 2, 4];
/// The last one can't be a network's name.
const NETWORKS: [&str; 3] = ["default", "red", "no/name"];
/// Steps of one input.
const STEP_COUNT_MAX: usize = 256;

fn name_of(number: u8) -> String {
    format!("h{number}")
}

/// Addresses of one host lie in its prefix; those of hosts 1 and 2 overlap.
fn prefix_of(number: u8) -> Prefix {
    let text = if number <= 2 { "10.1.0.0/16".into() } else { format!("10.{number}.0.0/16") };
    text.parse().expect("a prefix")
}

/// The file with those of the peers whose bits are set; two others make this host sealed.
fn file(peers: u8, icrc: bool) -> PeersFile {
    let address = |number: u8| Ipv4Addr::new(192, 0, 2, number).into();
    let entry = |number: u8| PeerEntry {
        host: name_of(number),
        address: address(number),
        control_port: 4790,
        public_key: [number; KEY_BYTES],
        prefixes: [prefix_of(number)].into_iter().collect(),
    };
    PeersFile {
        host: name_of(OWN),
        address: address(OWN),
        control_port: 4790,
        key_file: "key".into(),
        icrc,
        frames: !icrc,
        sealed: peers & 0x60 == 0x20,
        peers: PEERS.into_iter().filter(|number| peers >> number & 1 != 0).map(entry).collect(),
        external: vec![External { network: NETWORKS[0].into(), allow: vec![prefix_of(9)] }],
        dscp: 0,
    }
}

/// A connection that is open.
struct Open {
    host: HostId,
    /// Something was sent on it.
    is_greeted: bool,
}

struct World {
    now: Instant,
    state: State,
    connections: BTreeMap<ConnectionId, Open>,
    last_connection: ConnectionId,
    last_network: u32,
    networks: BTreeMap<&'static str, NetworkId>,
    own: BTreeSet<(&'static str, Gid)>,
    /// Result of the updates, as the worker has it.
    routes: BTreeMap<(NetworkId, Gid), HostId>,
    groups: BTreeMap<(HostId, NetworkId, Gid), Qpn>,
    up: BTreeSet<HostId>,
    /// The update before is [`Update::PeersGone`] of this host.
    gone_before: Option<HostId>,
}

impl World {
    fn new() -> Self {
        let now = Instant(1_000_000_000_000);
        let state = State::new(now, file(0xff, true), 7);
        let (connections, networks, own, routes, groups, up) = Default::default();
        let (last_connection, last_network, gone_before) = (0, 0, None);
        let mut world = Self {
            now,
            state,
            connections,
            last_connection,
            last_network,
            networks,
            own,
            routes,
            groups,
            up,
            gone_before,
        };
        world.settle();
        world
    }

    /// `None`: the input has ended.
    fn step(&mut self, input: &mut Input<'_>) -> Option<()> {
        let choice = input.u8()?;
        let which = choice >> 4;
        match choice % 16 {
            0 => self.connect(which),
            1 => self.greet(which, input)?,
            2 => self.disconnect(which),
            3..8 => {
                let message = message_of(input)?;
                self.say(which, message);
            }
            8 => self.say_bytes(which, input.chunk()?),
            9 => self.pass(Duration::from_millis(u64::from(input.u16()?) * 4)),
            10 => self.set_network(which),
            11 => self.set_own(input)?,
            12 => {
                let (file, now) = (file(input.u8()?, which & 1 == 0), self.now);
                self.state.handle_reload(now, file);
            }
            13 => self.connections.keys().copied().for_each(|connection| self.state.handle_room(connection)),
            14 => self.feed(which, input.u32()?),
            _ => self.state.handle_dial_failed(self.now, self.host(which)),
        }
        self.settle();
        Some(())
    }

    /// A host of the file, or one that never was in it.
    fn host(&self, which: u8) -> HostId {
        let known = PEERS.get(usize::from(which)).and_then(|number| self.state.host_named(&name_of(*number)));
        known.map_or(HostId(which.into()), |(host, _)| host)
    }

    fn connect(&mut self, which: u8) {
        let host = self.host(which);
        self.last_connection += 1;
        self.connections.insert(self.last_connection, Open { host, is_greeted: false });
        self.state.handle_connected(self.now, host, self.last_connection);
    }

    /// One that is open, or one that never was.
    fn connection(&self, which: u8) -> ConnectionId {
        let place = usize::from(which).checked_rem(self.connections.len());
        let found = place.and_then(|place| self.connections.keys().nth(place));
        found.copied().unwrap_or(self.last_connection + 1)
    }

    /// As the host would, or nearly.
    fn greet(&mut self, which: u8, input: &mut Input<'_>) -> Option<()> {
        let (connection, epoch) = (self.connection(which), input.u8()?);
        let open = self.connections.get(&connection);
        let name = open.and_then(|open| self.state.host(open.host)).map(|entry| entry.host.clone());
        let host = if epoch == 0xff { String::new() } else { name.unwrap_or_default() };
        let sealed = if epoch & 0x40 != 0 { FEATURE_SEALED } else { 0 };
        let offer = Offer { features: PEER_PROTOCOL.features | sealed, required_features: sealed, ..PEER_PROTOCOL };
        let hello = PeerMessage::Hello { offer, host, epoch: epoch.into(), icrc_wanted: epoch & 1 != 0 };
        self.state.handle_message(self.now, connection, hello, true);
        Some(())
    }

    fn disconnect(&mut self, which: u8) {
        let (connection, ending) = (self.connection(which), [Ending::Closed, Ending::Stuck][usize::from(which & 1)]);
        self.state.handle_disconnected(self.now, connection, ending);
    }

    fn say(&mut self, which: u8, message: PeerMessage) {
        let connection = self.connection(which);
        self.state.handle_message(self.now, connection, message, which != 15);
    }

    fn say_bytes(&mut self, which: u8, bytes: &[u8]) {
        match decode(bytes) {
            Ok(message) => self.say(which, message),
            Err(_) => self.state.handle_nonsense(self.now, self.connection(which)),
        }
    }

    fn pass(&mut self, span: Duration) {
        self.now = self.now + span;
        self.state.handle_timer(self.now);
        let next = self.state.poll_timeout();
        assert!(next.is_none_or(|next| next > self.now), "what was due is done");
    }

    /// A network is made, made again, or goes.
    fn set_network(&mut self, which: u8) {
        let name = NETWORKS[usize::from(which) % 2];
        self.last_network += 1;
        let network = (which & 8 == 0).then_some(NetworkId(self.last_network));
        match network {
            Some(network) => self.networks.insert(name, network),
            None => self.networks.remove(name),
        };
        self.state.handle_network(name, network);
    }

    /// A vNIC or a member of a group comes to this host, or leaves it.
    fn set_own(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (choice, gid) = (input.u8()?, gid_of(input)?);
        let name = NETWORKS[usize::from(choice) % 2];
        let is_there = choice & 2 == 0;
        if gid.is_multicast() {
            if let Some(network) = self.networks.get(name) {
                self.state.handle_group(*network, gid, is_there.then_some(Qpn(choice.into())));
            }
            return Some(());
        }
        if is_there {
            self.own.insert((name, gid))
        } else {
            self.own.remove(&(name, gid))
        };
        let identity = VnicIdentity {
            vnic: format!("v{choice}"),
            labels: [("k".into(), choice.to_string())].into(),
            addresses: Vec::new(),
        };
        self.state.handle_address(name, gid, is_there.then(|| Arc::new(identity)));
        Some(())
    }

    /// Input of the worker and the control thread.
    fn feed(&mut self, which: u8, number: u32) {
        let (host, qpn) = (self.host(which & 3), Qpn(number & Qpn::MASK));
        let network = NetworkId(number & 7);
        let gid = Gid::from_ip(Ipv4Addr::new(10, OWN, 0, number as u8).into());
        match which >> 2 {
            0 => self.state.ask(host, qpn),
            1 => {
                let info = PeerInfo { network, gid, ipv6_gid: None, service: QpType::Ud, connected: None };
                self.state.notify(host, qpn, (number & 1 == 0).then_some(info));
            }
            2 => self.state.notify_disconnected(host, qpn, qpn),
            _ => self.state.send_cm(host, network, MadEnds { from: gid, to: gid }, &[0; MAD_BYTES], number & 1 == 0),
        }
    }

    fn settle(&mut self) {
        while let Some(output) = self.state.poll_output() {
            match output {
                Output::Dial(host) => {
                    let entry = self.state.host(host).expect("a host of the file is dialed");
                    assert!(name_of(OWN) < entry.host, "the smaller name dials");
                }
                Output::Close(connection) => {
                    // One that has ended by itself is closed as well.
                    self.connections.remove(&connection);
                }
                Output::Send(connection, message) => self.look_at_sent(connection, &message),
                Output::Update(update) => {
                    let gone = if let Update::PeersGone { host } = update { Some(host) } else { None };
                    self.adopt(update);
                    self.gone_before = gone;
                }
                Output::Note(_, note) => assert!(!note.to_string().is_empty()),
            }
        }
        self.look();
    }

    fn look_at_sent(&mut self, connection: ConnectionId, message: &PeerMessage) {
        assert!(encode(message).len() <= PEER_MESSAGE_BYTES_MAX, "a message fits into its frame");
        let open = self.connections.get_mut(&connection).expect("a message goes to a connection that is open");
        let is_first = !std::mem::replace(&mut open.is_greeted, true);
        let is_hello = matches!(message, PeerMessage::Hello { .. });
        assert_eq!(is_hello, is_first, "Hello is the first message, and no other");
    }

    /// A host announces addresses of its prefixes alone. It may have left the file since.
    fn check_address(&self, host: HostId, gid: Gid) {
        let Some(entry) = self.state.host(host) else { return };
        assert!(entry.prefixes.contains(gid), "{gid} is not of {}", entry.host);
    }

    fn adopt(&mut self, update: Update) {
        match update {
            Update::Settings(settings) => assert!(settings.routers.len() <= PEERS.len()),
            Update::HostUp { host, agreed, .. } => {
                let is_sealed = agreed.features & FEATURE_SEALED != 0;
                assert_eq!(is_sealed, self.state.file().sealed, "a host is as this one, or it is not up");
                assert_eq!(self.gone_before, Some(host), "what was said before is forgotten first");
                assert!(self.up.insert(host), "it was not up");
            }
            Update::SealKey { host, id, .. } | Update::SealKeyHeld { host, id } => {
                assert!(self.up.contains(&host) && self.state.file().sealed && id <= MASK_24);
            }
            Update::Shards { host, count } => assert!(self.up.contains(&host) && Shard::new(0, count).is_some()),
            Update::Frames { host, .. } => assert!(self.up.contains(&host), "it is up"),
            Update::HostDown { host } => assert!(self.up.remove(&host), "it was up"),
            Update::Route { network, gid, host: Some(host) } => {
                self.check_address(host, gid);
                self.routes.insert((network, gid), host);
            }
            Update::Route { network, gid, host: None } => drop(self.routes.remove(&(network, gid))),
            Update::Party { network, gid, .. } => {
                let host = self.routes.get(&(network, gid)).expect("after the address' route");
                self.check_address(*host, gid);
            }
            Update::Group { host, network, gid, qpn: Some(qpn) } => {
                assert!(gid.is_multicast() && qpn.0 <= Qpn::MASK);
                self.groups.insert((host, network, gid), qpn);
            }
            Update::Group { host, network, gid, qpn: None } => drop(self.groups.remove(&(host, network, gid))),
            Update::Asked { host, qpn } => assert!(self.up.contains(&host) && qpn.0 <= Qpn::MASK),
            Update::Disconnected { host, .. } => assert!(self.up.contains(&host)),
            Update::Peer { host, qpn, info } => {
                assert!(self.up.contains(&host) && qpn.0 <= Qpn::MASK);
                if let Some(info) = info {
                    assert!(self.networks.values().any(|network| *network == info.network), "a network of this host");
                    std::iter::once(info.gid).chain(info.ipv6_gid).for_each(|gid| self.check_address(host, gid));
                }
            }
            Update::AskAgain { .. } => {}
            Update::Removed { host } => assert!(!self.up.contains(&host), "it went down first"),
            Update::PeersGone { host } => assert!(!self.up.contains(&host), "a host that is up keeps its peers"),
            Update::Cm { host, from, to, .. } => {
                self.check_address(host, from.1);
                let name = self.networks.iter().find(|(_, network)| **network == to.0).map(|(name, _)| *name);
                assert!(name.is_some_and(|name| self.own.contains(&(name, to.1))), "it is for a vNIC of this host");
            }
        }
    }

    fn look(&self) {
        for ((network, gid), host) in &self.routes {
            assert!(self.state.host(*host).is_some(), "a route leads to a host of the file");
            let name = self.networks.iter().find(|(_, id)| *id == network).map(|(name, _)| *name);
            let name = name.expect("routes are of networks of this host");
            assert!(!self.own.contains(&(name, *gid)), "an address of this host is nobody else's");
        }
        let hosts: BTreeSet<HostId> = self.connections.values().map(|open| open.host).collect();
        assert_eq!(hosts.len(), self.connections.len(), "a host has one connection");
        for status in self.state.statuses() {
            let (host, _) = self.state.host_named(&status.entry.host).expect("it is in the file");
            let routes = self.routes.values().filter(|owner| **owner == host).count();
            assert!(routes <= status.route_count as usize);
            assert_eq!(status.state == "up", self.up.contains(&host));
        }
    }

    /// Without hosts nothing of theirs is believed.
    fn finish(&mut self) {
        self.state.handle_reload(self.now, file(0, true));
        self.settle();
        assert!(self.routes.is_empty() && self.groups.is_empty() && self.up.is_empty(), "nothing is left");
        assert!(self.connections.is_empty() && self.state.poll_timeout().is_none());
    }
}

/// Mostly of hosts 1 and 2; also a group, an address of this host, one of nobody.
fn gid_of(input: &mut Input<'_>) -> Option<Gid> {
    let choice = input.u8()?;
    let (kind, number) = (choice >> 4, choice & 15);
    let ip = match kind {
        0..8 => Ipv4Addr::new(10, 1, 0, number),
        8..11 => Ipv4Addr::new(10, 4, 0, number),
        11 => Ipv4Addr::new(10, OWN, 0, number),
        12 | 13 => Ipv4Addr::new(239, 0, 0, number),
        14 => Ipv4Addr::new(9, 9, 9, number),
        _ => return Some(Gid::default()),
    };
    Some(Gid::from_ip(ip.into()))
}

/// A message of a host that is up, with values that mean something.
fn message_of(input: &mut Input<'_>) -> Option<PeerMessage> {
    let choice = input.u8()?;
    let network: String = NETWORKS[usize::from(choice >> 4) % NETWORKS.len()].into();
    Some(match choice % 16 {
        0..4 => PeerMessage::Attach { network, gid: gid_of(input)? },
        4 => PeerMessage::Detach { network, gid: gid_of(input)? },
        5 | 6 => {
            let (gid, qpn) = (gid_of(input)?, input.u8()?);
            PeerMessage::Group { network, gid, qpn: (qpn != 0).then_some(Qpn(u32::from(qpn) << 17)) }
        }
        7 => PeerMessage::Synced,
        8 => PeerMessage::Ask { qpn: Qpn(input.u32()?) },
        9 => {
            let (qpn, service) = (Qpn(input.u32()?), QpType::Rc);
            let info = QpInfo { network, gid: gid_of(input)?, ipv6_gid: None, service, connected: None };
            PeerMessage::Info { qpn, info: (choice & 0x40 == 0).then_some(info) }
        }
        10 => PeerMessage::Ping { stamp: input.u8()?.into() },
        11 => PeerMessage::Pong { stamp: input.u64()? },
        12 | 13 => {
            let (from, to) = (gid_of(input)?, gid_of(input)?);
            PeerMessage::Cm { network, from, to, mad: vec![0; MAD_BYTES - usize::from(choice == 0xff)] }
        }
        14 => {
            let (gid, other) = (gid_of(input)?, gid_of(input)?);
            let labels = vec![("k".into(), choice.to_string())];
            PeerMessage::Identity { network, gid, other: Some(other), vnic: "v".into(), labels }
        }
        _ => PeerMessage::Disconnected { qpn: Qpn(input.u32()?), peer: Qpn(1) },
    })
}

pub fn run(bytes: &[u8]) {
    let (mut world, mut input) = (World::new(), Input(bytes));
    for _ in 0..STEP_COUNT_MAX {
        if world.step(&mut input).is_none() {
            break;
        }
    }
    world.finish();
}
