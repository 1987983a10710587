//! Two hosts' state machines, joined by a wire without sockets, under virtual time.
use super::file::{KEY_BYTES, PeerEntry, PeersFile};
use super::state::*;
use super::update::{ExternalPeers, MadEnds, Settings, Update};
use crate::admission::access::VnicIdentity;
use freeflow_engine::{HostId, PeerInfo};
use freeflow_protocol::peer::{FEATURE_SHARDS, MAD_BYTES, PEER_PROTOCOL, PeerMessage, QpInfo};
use freeflow_protocol::version::{Agreement, Disagreement, Offer, VersionRange};
use freeflow_verbs::{Duration, Gid, Instant, NetworkId, QpType, Qpn};
use std::{collections::VecDeque, sync::Arc};

const DEFAULT: NetworkId = NetworkId(7);

/// Some vNIC without labels.
fn vnic() -> Option<Arc<VnicIdentity>> {
    identity("v", &[])
}

fn identity(vnic: &str, labels: &[(&str, &str)]) -> Option<Arc<VnicIdentity>> {
    let labels = labels.iter().map(|&(name, value)| (name.into(), value.into())).collect();
    Some(Arc::new(VnicIdentity { vnic: vnic.into(), labels, addresses: Vec::new() }))
}

fn gid(text: &str) -> Gid {
    Gid::from_ip(text.parse().unwrap())
}

/// Host number `own` of three.
pub(super) fn file(own: u8) -> PeersFile {
    let peers = (1..=3).filter(|&number| number != own).map(|number| PeerEntry {
        host: format!("h{number}"),
        address: format!("192.0.2.{number}").parse().unwrap(),
        control_port: 4790,
        public_key: [number; KEY_BYTES],
        prefixes: [format!("10.111.{number}.0/24").parse().unwrap()].into_iter().collect(),
    });
    PeersFile {
        host: format!("h{own}"),
        address: format!("192.0.2.{own}").parse().unwrap(),
        control_port: 4790,
        key_file: "key".into(),
        icrc: true,
        frames: true,
        sealed: false,
        peers: peers.collect(),
        external: Vec::new(),
        dscp: 0,
    }
}

/// As far as this peer's file goes: h1 has no h3, so that nobody dials it.
fn only(own: u8, other: u8) -> PeersFile {
    let mut file = file(own);
    file.peers.retain(|peer| peer.host == format!("h{other}"));
    file
}

pub(super) fn address(network: &str, text: &str) -> PeerMessage {
    PeerMessage::Attach { network: network.into(), gid: gid(text) }
}

pub(super) fn hello(host: &str, epoch: u64) -> PeerMessage {
    greeting(host, epoch, PEER_PROTOCOL)
}

fn greeting(host: &str, epoch: u64, offer: Offer) -> PeerMessage {
    PeerMessage::Hello { offer, host: host.into(), epoch, icrc_wanted: true }
}

/// The identity announced for an address of [`vnic`].
fn identity_of(text: &str) -> PeerMessage {
    let (network, vnic) = ("default".into(), "v".into());
    PeerMessage::Identity { network, gid: gid(text), other: None, vnic, labels: Vec::new() }
}

fn info(text: &str) -> QpInfo {
    let connected = Some((gid("10.111.1.9"), Qpn(9)));
    QpInfo { network: "default".into(), gid: gid(text), ipv6_gid: None, service: QpType::Rc, connected }
}

/// One state machine; the test plays the other hosts.
pub(super) struct Solo {
    pub(super) state: State,
    pub(super) now: Instant,
    sent: Vec<PeerMessage>,
    updates: Vec<Update>,
    pub(super) dials: Vec<HostId>,
    pub(super) closed: Vec<ConnectionId>,
    notes: Vec<Note>,
}

const H: HostId = HostId(1);
const C: ConnectionId = 50;

impl Solo {
    pub(super) fn new(file: PeersFile) -> Self {
        let now = Instant(1_000_000_000_000);
        let (sent, updates, dials, closed, notes) = Default::default();
        let mut solo = Self { state: State::new(now, file, 0xe0), now, sent, updates, dials, closed, notes };
        solo.state.handle_network("default", Some(DEFAULT));
        solo.settle();
        solo.updates.clear();
        solo
    }

    /// h2, which h1 has dialed, with h1 up.
    fn up() -> Self {
        let mut solo = Self::new(only(2, 1));
        solo.connect(C, 0xe1);
        solo.updates.clear();
        solo.sent.clear();
        solo
    }

    fn connect(&mut self, connection: ConnectionId, epoch: u64) {
        self.state.handle_connected(self.now, H, connection);
        self.says(connection, hello("h1", epoch));
    }

    pub(super) fn says(&mut self, connection: ConnectionId, message: PeerMessage) {
        self.state.handle_message(self.now, connection, message, true);
        self.settle();
    }

    pub(super) fn pass(&mut self, span: Duration) {
        self.now = self.now + span;
        self.state.handle_timer(self.now);
        self.settle();
    }

    fn settle(&mut self) {
        while let Some(output) = self.state.poll_output() {
            match output {
                Output::Dial(host) => self.dials.push(host),
                Output::Close(connection) => self.closed.push(connection),
                Output::Send(_, message) => self.sent.push(message),
                Output::Update(update) => self.updates.push(update),
                Output::Note(_, note) => self.notes.push(note),
            }
        }
    }

    pub(super) fn take_updates(&mut self) -> Vec<Update> {
        self.settle();
        std::mem::take(&mut self.updates)
    }

    fn counters(&self) -> freeflow_protocol::admin::PeerCounters {
        self.state.statuses()[0].counters
    }

    fn phase(&self) -> &'static str {
        self.state.statuses()[0].state
    }
}

pub(super) fn route(text: &str, host: Option<HostId>) -> Update {
    Update::Route { network: DEFAULT, gid: gid(text), host }
}

fn host_up(host: HostId, epoch: u64) -> Update {
    Update::HostUp {
        host,
        address: "192.0.2.1".parse().unwrap(),
        icrc: true,
        epoch,
        agreed: Agreement { version: 1, features: PEER_PROTOCOL.features },
    }
}

#[test]
fn a_greeted_host_is_up_and_hears_everything() {
    let mut solo = Solo::new(only(2, 1));
    solo.state.handle_address("default", gid("10.111.2.5"), vnic());
    solo.state.handle_group(DEFAULT, gid("239.0.0.1"), Some(Qpn(77)));
    solo.connect(C, 0xe1);
    assert_eq!(solo.take_updates(), [Update::PeersGone { host: H }, host_up(H, 0xe1)]);
    let group = PeerMessage::Group { network: "default".into(), gid: gid("239.0.0.1"), qpn: Some(Qpn(77)) };
    let ping = PeerMessage::Ping { stamp: solo.now.0 };
    let (address_of, who) = (address("default", "10.111.2.5"), identity_of("10.111.2.5"));
    assert_eq!(solo.sent, [hello("h2", 0xe0), address_of, who, group, PeerMessage::Synced, ping]);
    solo.sent.clear();
    // And then changes, once each.
    solo.state.handle_address("default", gid("10.111.2.6"), vnic());
    solo.state.handle_address("default", gid("10.111.2.6"), vnic());
    solo.state.handle_address("default", gid("10.111.2.5"), None);
    solo.state.handle_group(DEFAULT, gid("239.0.0.1"), None);
    solo.settle();
    let gone = PeerMessage::Group { network: "default".into(), gid: gid("239.0.0.1"), qpn: None };
    let detached = PeerMessage::Detach { network: "default".into(), gid: gid("10.111.2.5") };
    assert_eq!(solo.sent, [address("default", "10.111.2.6"), identity_of("10.111.2.6"), detached, gone]);
}

#[test]
fn the_icrc_and_frames_are_used_if_both_want_them() {
    for (ours, theirs) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut solo = Solo::new(PeersFile { icrc: ours, frames: ours, ..only(2, 1) });
        solo.state.handle_connected(solo.now, H, C);
        let features = if theirs { PEER_PROTOCOL.features } else { 0 };
        let (offer, host) = (Offer { features, ..PEER_PROTOCOL }, "h1".into());
        solo.says(C, PeerMessage::Hello { offer, host, epoch: 1, icrc_wanted: theirs });
        let both = (ours && theirs, if ours { features } else { features & FEATURE_SHARDS });
        let is_up = |it: &Update| matches!(it, Update::HostUp { icrc, agreed, .. } if (*icrc, agreed.features) == both);
        assert!(solo.updates.iter().any(is_up), "{ours} {theirs}");
    }
}

#[test]
fn who_does_not_greet_well_is_cut_off() {
    let (ours, later, unknown) = (PEER_PROTOCOL.versions, VersionRange { lowest: 2, highest: 3 }, 1 << 63);
    let versions = Offer { versions: later, ..PEER_PROTOCOL };
    let features = Offer { features: PEER_PROTOCOL.features | unknown, required_features: unknown, ..PEER_PROTOCOL };
    for (message, why) in [
        (PeerMessage::Synced, Why::NotGreeted),
        (address("default", "10.111.1.1"), Why::NotGreeted),
        (greeting("h1", 1, versions), Why::Disagreed(Disagreement::Versions { ours, theirs: later })),
        (
            greeting("h1", 1, features),
            Why::Disagreed(Disagreement::Features { missing_here: unknown, missing_there: 0 }),
        ),
        (hello("h3", 1), Why::OtherName),
    ] {
        let mut solo = Solo::new(only(2, 1));
        solo.state.handle_connected(solo.now, H, C);
        solo.says(C, message);
        assert_eq!((solo.closed.as_slice(), solo.notes.as_slice()), (&[C][..], &[Note::Down(why)][..]));
        assert_eq!((solo.take_updates(), solo.counters().protocol_errors, solo.phase()), (vec![], 1, "down"));
        // A message that was still on its way counts for nothing.
        solo.says(C, hello("h1", 1));
        assert_eq!(solo.take_updates(), []);
    }
}

#[test]
fn a_later_release_that_also_speaks_this_version_is_welcome() {
    let mut solo = Solo::new(only(2, 1));
    let offer = Offer { versions: VersionRange { lowest: 1, highest: 9 }, features: u64::MAX, required_features: 0 };
    solo.state.handle_connected(solo.now, H, C);
    solo.says(C, greeting("h1", 0xe1, offer));
    assert_eq!(solo.take_updates(), [Update::PeersGone { host: H }, host_up(H, 0xe1)]);
}

#[test]
fn both_ranges_are_named_where_no_version_is_common() {
    let (ours, theirs) = (VersionRange::only(1), VersionRange::only(2));
    let note = Note::Down(Why::Disagreed(Disagreement::Versions { ours, theirs }));
    assert!(note.to_string().ends_with("the other side speaks version 2, this side version 1"), "{note}");
}

#[test]
fn nonsense_from_a_greeted_host_ends_its_connection() {
    let far = Qpn(Qpn::MASK + 1);
    for message in [hello("h1", 1), PeerMessage::Ask { qpn: far }, PeerMessage::Info { qpn: far, info: None }] {
        let mut solo = Solo::up();
        solo.says(C, message);
        assert_eq!((solo.closed.as_slice(), solo.counters().protocol_errors), (&[C][..], 1));
        assert_eq!(solo.take_updates(), [Update::HostDown { host: H }]);
    }
    let mut solo = Solo::up();
    solo.state.handle_nonsense(solo.now, C);
    assert_eq!(solo.take_updates(), [Update::HostDown { host: H }]);
}

#[test]
fn only_addresses_in_the_hosts_prefixes_are_believed() {
    let mut solo = Solo::up();
    solo.says(C, address("default", "10.111.1.9"));
    assert_eq!(solo.take_updates(), [route("10.111.1.9", Some(H))]);
    // A repetition changes nothing.
    solo.says(C, address("default", "10.111.1.9"));
    let refused = [
        address("default", "10.111.2.9"),
        address("default", "10.112.1.9"),
        address("default", "fd00::1"),
        address("default", "239.0.0.1"),
        address("", "10.111.1.10"),
        address("a\nb", "10.111.1.10"),
        PeerMessage::Group { network: "default".into(), gid: gid("10.111.1.9"), qpn: Some(Qpn(5)) },
        PeerMessage::Group { network: "default".into(), gid: gid("239.0.0.1"), qpn: Some(Qpn(1 << 24)) },
    ];
    let count = refused.len() as u64;
    for message in refused {
        solo.says(C, message);
    }
    assert_eq!((solo.take_updates(), solo.counters().refused_announcements), (vec![], count));
    assert_eq!((solo.phase(), solo.state.statuses()[0].route_count), ("up", 1));
}

#[test]
fn infos_are_believed_within_the_prefixes_and_the_networks_that_are_here() {
    let mut solo = Solo::up();
    let says = |solo: &mut Solo, info| {
        solo.says(C, PeerMessage::Info { qpn: Qpn(3), info });
        match solo.take_updates().as_slice() {
            [Update::Peer { host: H, qpn: Qpn(3), info }] => *info,
            other => panic!("{other:?}"),
        }
    };
    let known = PeerInfo {
        network: DEFAULT,
        gid: gid("10.111.1.4"),
        ipv6_gid: None,
        service: QpType::Rc,
        connected: Some((gid("10.111.1.9"), Qpn(9))),
    };
    assert_eq!(says(&mut solo, Some(info("10.111.1.4"))), Some(known));
    assert_eq!(says(&mut solo, None), None);
    assert_eq!(solo.counters().refused_infos, 0);
    assert_eq!(says(&mut solo, Some(info("10.111.2.4"))), None);
    assert_eq!(solo.counters().refused_infos, 1);
    assert_eq!(says(&mut solo, Some(QpInfo { network: "other".into(), ..info("10.111.1.4") })), None);
}

#[test]
fn questions_and_answers_travel() {
    let mut solo = Solo::up();
    solo.state.ask(H, Qpn(4));
    let ours =
        PeerInfo { network: DEFAULT, gid: gid("10.111.2.1"), ipv6_gid: None, service: QpType::Ud, connected: None };
    solo.state.notify(H, Qpn(6), Some(ours));
    solo.state.notify(H, Qpn(7), None);
    solo.settle();
    let (network, gid, service) = ("default".into(), gid("10.111.2.1"), QpType::Ud);
    let info_sent = QpInfo { network, gid, ipv6_gid: None, service, connected: None };
    assert_eq!(
        solo.sent,
        [
            PeerMessage::Ask { qpn: Qpn(4) },
            PeerMessage::Info { qpn: Qpn(6), info: Some(info_sent) },
            PeerMessage::Info { qpn: Qpn(7), info: None }
        ]
    );
    solo.says(C, PeerMessage::Ask { qpn: Qpn(8) });
    assert_eq!(solo.take_updates(), [Update::Asked { host: H, qpn: Qpn(8) }]);
    // A host that is not up is not asked; nor one that there is not.
    solo.state.handle_disconnected(solo.now, C, Ending::Closed);
    solo.sent.clear();
    solo.state.ask(H, Qpn(4));
    solo.state.ask(HostId(99), Qpn(4));
    solo.state.notify(H, Qpn(4), None);
    solo.settle();
    assert_eq!(solo.sent, []);
}

#[test]
fn silence_is_death_after_three_seconds_and_routes_are_kept_a_while() {
    let mut solo = Solo::up();
    solo.says(C, address("default", "10.111.1.9"));
    solo.take_updates();
    solo.pass(Duration(SILENCE_MAX.0 - 1));
    assert_eq!(solo.phase(), "up");
    solo.says(C, PeerMessage::Synced);
    solo.pass(Duration(SILENCE_MAX.0 - 1));
    assert_eq!((solo.phase(), solo.take_updates()), ("up", vec![]));
    solo.pass(Duration(1));
    assert_eq!((solo.phase(), solo.take_updates()), ("down", vec![Update::HostDown { host: H }]));
    assert_eq!((solo.closed.as_slice(), solo.counters().timeouts), (&[C][..], 1));
    solo.pass(Duration(ROUTES_KEPT.0 - 1));
    assert_eq!(solo.take_updates(), []);
    solo.pass(Duration(1));
    assert_eq!(solo.take_updates(), [route("10.111.1.9", None), Update::PeersGone { host: H }]);
    assert_eq!(solo.state.poll_timeout(), None);
}

#[test]
fn a_silent_greeting_ends_too() {
    let mut solo = Solo::new(only(2, 1));
    solo.state.handle_connected(solo.now, H, C);
    solo.pass(SILENCE_MAX);
    assert_eq!((solo.take_updates(), solo.phase()), (vec![], "down"));
    assert_eq!(solo.closed, [C]);
}

#[test]
fn pings_go_out_every_second_and_measure() {
    let mut solo = Solo::up();
    for _ in 0..3 {
        solo.sent.clear();
        solo.pass(PING_INTERVAL);
        let stamp = solo.now.0;
        assert_eq!(solo.sent, [PeerMessage::Ping { stamp }]);
        solo.now = solo.now + Duration::from_micros(250);
        solo.says(C, PeerMessage::Pong { stamp: stamp - 1 });
        solo.says(C, PeerMessage::Pong { stamp });
        assert_eq!(solo.state.statuses()[0].rtt, Some(Duration::from_micros(250)));
    }
    solo.sent.clear();
    solo.says(C, PeerMessage::Ping { stamp: 5 });
    assert_eq!(solo.sent, [PeerMessage::Pong { stamp: 5 }]);
}

#[test]
fn a_reconnected_host_keeps_what_it_announces_again() {
    let mut solo = Solo::up();
    let group = |qpn| PeerMessage::Group { network: "default".into(), gid: gid("239.0.0.1"), qpn: Some(Qpn(qpn)) };
    for message in [address("default", "10.111.1.1"), address("default", "10.111.1.2"), group(5)] {
        solo.says(C, message);
    }
    solo.state.handle_disconnected(solo.now, C, Ending::Closed);
    assert_eq!(solo.take_updates().last(), Some(&Update::HostDown { host: H }));
    solo.connect(C + 1, 0xe1);
    assert_eq!(solo.take_updates(), [Update::PeersGone { host: H }, host_up(H, 0xe1)]);
    solo.says(C + 1, address("default", "10.111.1.2"));
    solo.says(C + 1, address("default", "10.111.1.3"));
    assert_eq!(solo.take_updates(), [route("10.111.1.3", Some(H))]);
    solo.says(C + 1, PeerMessage::Synced);
    let no_group = Update::Group { host: H, network: DEFAULT, gid: gid("239.0.0.1"), qpn: None };
    assert_eq!(solo.take_updates(), [route("10.111.1.1", None), no_group]);
    // It stays, beyond the time that it would have been kept.
    solo.says(C + 1, PeerMessage::Synced);
    assert_eq!(solo.take_updates(), []);
}

#[test]
fn another_epoch_voids_everything_at_once() {
    let mut solo = Solo::up();
    solo.says(C, address("default", "10.111.1.1"));
    solo.take_updates();
    // The other side began again before this one noticed the end: the newer connection counts.
    solo.connect(C + 1, 0xe2);
    assert_eq!(
        solo.take_updates(),
        [Update::HostDown { host: H }, route("10.111.1.1", None), Update::PeersGone { host: H }, host_up(H, 0xe2)]
    );
    assert_eq!(solo.closed, [C]);
    assert!(solo.notes.contains(&Note::Down(Why::Replaced)) && solo.notes.contains(&Note::Up { restarted: true }));
    // Nothing of the old connection counts, not even its end.
    solo.says(C, address("default", "10.111.1.7"));
    solo.state.handle_disconnected(solo.now, C, Ending::Closed);
    solo.settle();
    assert_eq!((solo.take_updates(), solo.phase()), (vec![], "up"));
}

#[test]
fn the_smaller_name_dials_and_waits_longer_each_time() {
    let mut solo = Solo::new(only(1, 2));
    solo.pass(Duration(0));
    let mut pause = REDIAL_FIRST;
    for count in 1..10 {
        assert_eq!((solo.dials.len(), solo.phase()), (count, "dialing"));
        solo.state.handle_dial_failed(solo.now, H);
        assert_eq!((solo.phase(), solo.state.poll_timeout()), ("down", Some(solo.now + pause)));
        solo.pass(Duration(pause.0 - 1));
        assert_eq!(solo.dials.len(), count);
        solo.pass(Duration(1));
        pause = Duration(pause.0 * 2).min(REDIAL_LAST);
    }
    assert_eq!(solo.counters().failed_dials, 9);
    // A connection that lasts resets the pause; one that does not, does not.
    solo.state.handle_connected(solo.now, H, C);
    solo.says(C, hello("h2", 1));
    for _ in 0..20 {
        solo.pass(PING_INTERVAL);
        solo.says(C, PeerMessage::Synced);
    }
    solo.state.handle_disconnected(solo.now, C, Ending::Closed);
    assert_eq!(solo.state.poll_timeout(), Some(solo.now + REDIAL_FIRST));
    solo.pass(REDIAL_FIRST);
    solo.state.handle_connected(solo.now, H, C + 1);
    solo.says(C + 1, hello("h2", 1));
    solo.state.handle_disconnected(solo.now, C + 1, Ending::Closed);
    assert_eq!(solo.state.poll_timeout(), Some(solo.now + Duration(REDIAL_FIRST.0 * 2)));
    // The larger name never dials.
    let mut solo = Solo::new(only(2, 1));
    solo.pass(Duration(u64::MAX / 2));
    assert!(solo.dials.is_empty());
}

#[test]
fn an_address_belongs_to_the_first_and_then_to_the_next() {
    let mut file = file(3);
    file.peers[1].prefixes = file.peers[0].prefixes.clone();
    let mut solo = Solo::new(file);
    for (host, connection, name) in [(HostId(1), 1, "h1"), (HostId(2), 2, "h2")] {
        solo.state.handle_connected(solo.now, host, connection);
        solo.says(connection, hello(name, 1));
    }
    solo.take_updates();
    for connection in [1, 2, 2] {
        solo.says(connection, address("default", "10.111.1.1"));
    }
    assert_eq!(solo.take_updates(), [route("10.111.1.1", Some(HostId(1)))]);
    let counters: Vec<u64> = solo.state.statuses().iter().map(|host| host.counters.refused_announcements).collect();
    assert_eq!(counters, [0, 2]);
    let detach = || PeerMessage::Detach { network: "default".into(), gid: gid("10.111.1.1") };
    solo.says(1, detach());
    assert_eq!(solo.take_updates(), [route("10.111.1.1", Some(HostId(2)))]);
    // This very host comes before all, and gives back.
    solo.state.handle_address("default", gid("10.111.1.1"), vnic());
    assert_eq!(solo.take_updates(), [route("10.111.1.1", None)]);
    solo.state.handle_address("default", gid("10.111.1.1"), None);
    assert_eq!(solo.take_updates(), [route("10.111.1.1", Some(HostId(2)))]);
    solo.says(2, detach());
    solo.says(2, detach());
    assert_eq!(solo.take_updates(), [route("10.111.1.1", None)]);
}

#[test]
fn networks_that_are_not_here_yet_are_remembered() {
    let mut solo = Solo::up();
    solo.says(C, address("late", "10.111.1.1"));
    let group = PeerMessage::Group { network: "late".into(), gid: gid("ff05::1"), qpn: Some(Qpn(4)) };
    solo.says(C, group);
    assert_eq!(solo.take_updates(), []);
    solo.state.handle_network("late", Some(NetworkId(8)));
    let updates = solo.take_updates();
    let expected = [
        Update::Route { network: NetworkId(8), gid: gid("10.111.1.1"), host: Some(H) },
        Update::Group { host: H, network: NetworkId(8), gid: gid("ff05::1"), qpn: Some(Qpn(4)) },
    ];
    assert_eq!(updates[..2], expected);
    assert!(matches!(updates[2..], [Update::Settings(_)]));
}

#[test]
fn a_network_that_is_made_again_is_another_one() {
    let mut solo = Solo::up();
    let member = gid("ff05::1");
    solo.says(C, address("default", "10.111.1.1"));
    solo.says(C, PeerMessage::Group { network: "default".into(), gid: member, qpn: Some(Qpn(4)) });
    solo.state.handle_group(DEFAULT, gid("ff05::2"), Some(Qpn(5)));
    solo.settle();
    (solo.updates, solo.sent) = Default::default();
    let of = |network, is_here: bool| {
        let (host, qpn) = (is_here.then_some(H), is_here.then_some(Qpn(4)));
        [Update::Route { network, gid: gid("10.111.1.1"), host }, Update::Group { host: H, network, gid: member, qpn }]
    };
    solo.state.handle_network("default", None);
    let updates = solo.take_updates();
    assert_eq!(updates[..2], of(DEFAULT, false));
    assert!(matches!(updates[2..], [Update::Settings(_)]));
    // This host's members were of the one that is gone.
    assert_eq!(solo.sent, [PeerMessage::Group { network: "default".into(), gid: gid("ff05::2"), qpn: None }]);
    solo.state.handle_group(DEFAULT, gid("ff05::2"), None);
    solo.state.handle_network("default", Some(NetworkId(8)));
    assert_eq!(solo.take_updates()[..2], of(NetworkId(8), true));
    // A repetition changes nothing, and without the word of its end the one before ends too.
    solo.state.handle_network("default", Some(NetworkId(8)));
    assert_eq!(solo.take_updates(), []);
    solo.state.handle_network("default", Some(NetworkId(9)));
    let updates = solo.take_updates();
    assert_eq!(updates[..4], [of(NetworkId(8), false), of(NetworkId(9), true)].concat());
}

#[test]
fn settings_name_networks_by_number() {
    let external =
        |network: &str| super::file::External { network: network.into(), allow: vec!["192.0.2.9/32".parse().unwrap()] };
    let mut solo = Solo::new(only(2, 1));
    let file = PeersFile { external: vec![external("default"), external("unknown")], dscp: 5, ..only(2, 1) };
    solo.state.handle_reload(solo.now, file);
    let external = vec![ExternalPeers { network: DEFAULT, allow: vec!["192.0.2.9/32".parse().unwrap()] }];
    let (address, routers) = ("192.0.2.2".parse().unwrap(), vec!["192.0.2.1".parse().unwrap()]);
    let settings = Settings { address, dscp: 5, sealed: false, routers, external };
    assert_eq!(solo.take_updates(), [Update::Settings(settings)]);
}

#[test]
fn many_announcements_wait_for_room_and_changes_meanwhile_are_sent_once() {
    let mut solo = Solo::new(only(2, 1));
    let at = |number: u32| gid(&format!("10.111.{}.{}", number / 256, number % 256));
    for number in 0..1000 {
        solo.state.handle_address("default", at(number), vnic());
    }
    solo.connect(C, 0xe1);
    let announced = |solo: &Solo| solo.sent.iter().filter(|m| matches!(m, PeerMessage::Attach { .. })).count();
    let first = announced(&solo);
    assert!(first < 1000);
    // One that was announced goes, one that was not goes, and one comes at the end.
    for (number, present) in [(0, false), (999, false), (1000, true)] {
        solo.state.handle_address("default", at(number), present.then(vnic).flatten());
    }
    for _ in 0..10 {
        solo.state.handle_room(C);
        solo.settle();
    }
    assert_eq!(announced(&solo), 1000);
    let detached: Vec<&PeerMessage> = solo.sent.iter().filter(|m| matches!(m, PeerMessage::Detach { .. })).collect();
    assert_eq!(detached, [&PeerMessage::Detach { network: "default".into(), gid: at(0) }]);
    assert_eq!(solo.sent.iter().filter(|m| **m == PeerMessage::Synced).count(), 1);
    assert_eq!(solo.sent.last(), Some(&PeerMessage::Synced));
}

#[test]
fn a_changed_file_ends_what_it_changes_and_nothing_else() {
    let mut solo = Solo::new(file(3));
    for (host, connection, name) in [(HostId(1), 1, "h1"), (HostId(2), 2, "h2")] {
        solo.state.handle_connected(solo.now, host, connection);
        solo.says(connection, hello(name, 1));
    }
    solo.says(1, address("default", "10.111.1.1"));
    solo.take_updates();
    let mut changed = file(3);
    changed.peers[0].public_key = [9; KEY_BYTES];
    solo.state.handle_reload(solo.now, changed.clone());
    let updates = solo.take_updates();
    let host = HostId(1);
    let gone = [Update::HostDown { host }, route("10.111.1.1", None), Update::Removed { host }];
    assert_eq!((&updates[..3], &updates[3]), (&gone[..], &Update::PeersGone { host }));
    assert_eq!(solo.closed, [1]);
    let phases: Vec<&str> = solo.state.statuses().iter().map(|host| host.state).collect();
    assert_eq!(phases, ["down", "up"]);
    // The number stays the host's own.
    assert_eq!(solo.state.host_named("h1").unwrap().0, HostId(1));
    // Out of the file.
    changed.peers.remove(0);
    solo.state.handle_reload(solo.now, changed.clone());
    assert!(solo.state.host_named("h1").is_none());
    solo.state.handle_connected(solo.now, HostId(1), 3);
    solo.settle();
    assert_eq!(solo.closed, [1, 3]);
    // This host's own address is another: everybody has to be notified.
    changed.address = "192.0.2.33".parse().unwrap();
    solo.state.handle_reload(solo.now, changed);
    solo.settle();
    assert_eq!(solo.closed, [1, 3, 2]);
}

/// Two state machines and the messages on their way.
struct Pair {
    now: Instant,
    hosts: [State; 2],
    on_the_way: [VecDeque<PeerMessage>; 2],
    updates: [Vec<Update>; 2],
    connection: ConnectionId,
    is_connected: bool,
    is_cut: bool,
}

impl Pair {
    fn new() -> Self {
        let now = Instant(1);
        let hosts = [State::new(now, only(1, 2), 1), State::new(now, only(2, 1), 2)];
        let (on_the_way, updates) = Default::default();
        let mut pair = Self { now, hosts, on_the_way, updates, connection: 0, is_connected: false, is_cut: false };
        for host in &mut pair.hosts {
            host.handle_network("default", Some(DEFAULT));
        }
        pair
    }

    fn disconnect(&mut self) {
        if std::mem::replace(&mut self.is_connected, false) {
            self.on_the_way = Default::default();
            for host in &mut self.hosts {
                host.handle_disconnected(self.now, self.connection, Ending::Closed);
            }
        }
    }

    /// Until nothing more happens at this time.
    fn settle(&mut self) {
        let mut is_busy = true;
        while std::mem::replace(&mut is_busy, false) {
            for side in 0..2 {
                while let Some(output) = self.hosts[side].poll_output() {
                    is_busy = true;
                    match output {
                        Output::Dial(host) if self.is_cut => self.hosts[side].handle_dial_failed(self.now, host),
                        Output::Dial(_) => {
                            self.connection += 1;
                            self.is_connected = true;
                            for host in &mut self.hosts {
                                host.handle_connected(self.now, H, self.connection);
                            }
                        }
                        Output::Close(connection) if connection == self.connection => self.disconnect(),
                        Output::Send(_, message) if !self.is_cut => self.on_the_way[1 - side].push_back(message),
                        Output::Update(update) => self.updates[side].push(update),
                        _ => {}
                    }
                }
                while let Some(message) = self.on_the_way[side].pop_front() {
                    is_busy = true;
                    self.hosts[side].handle_message(self.now, self.connection, message, true);
                }
            }
        }
    }

    fn pass(&mut self, millis: u64) {
        for _ in 0..millis / 50 {
            self.now = self.now + Duration::from_millis(50);
            for host in &mut self.hosts {
                host.handle_timer(self.now);
            }
            self.settle();
        }
    }

    /// Where host `side` sends what is for this address now.
    fn route(&self, side: usize, text: &str) -> Option<HostId> {
        self.updates[side].iter().fold(None, |before, update| match update {
            Update::Route { gid: found, host, .. } if *found == gid(text) => *host,
            _ => before,
        })
    }
}

#[test]
fn two_hosts_find_each_other_lose_each_other_and_agree_again() {
    let mut pair = Pair::new();
    pair.hosts[0].handle_address("default", gid("10.111.1.1"), vnic());
    pair.pass(1000);
    pair.hosts[1].handle_address("default", gid("10.111.2.1"), vnic());
    pair.settle();
    assert_eq!((pair.route(1, "10.111.1.1"), pair.route(0, "10.111.2.1")), (Some(H), Some(H)));
    pair.pass(60_000);
    assert!(pair.updates.iter().flatten().all(|update| !matches!(update, Update::HostDown { .. })));
    // The wire is cut; things change meanwhile.
    pair.is_cut = true;
    pair.pass(5_000);
    for side in 0..2 {
        assert_eq!(pair.updates[side].last(), Some(&Update::HostDown { host: H }));
    }
    pair.hosts[0].handle_address("default", gid("10.111.1.1"), None);
    pair.hosts[0].handle_address("default", gid("10.111.1.2"), vnic());
    pair.is_cut = false;
    pair.pass(3_000);
    assert_eq!((pair.route(1, "10.111.1.1"), pair.route(1, "10.111.1.2")), (None, Some(H)));
    assert_eq!(pair.route(0, "10.111.2.1"), Some(H));
    // A router is killed and another takes its place.
    pair.hosts[0] = State::new(pair.now, only(1, 2), 3);
    pair.hosts[0].handle_network("default", Some(DEFAULT));
    pair.updates = Default::default();
    pair.pass(3_000);
    assert_eq!((pair.route(1, "10.111.1.2"), pair.route(0, "10.111.2.1")), (None, Some(H)));
    assert!(pair.updates[1].contains(&Update::PeersGone { host: H }));
}

fn cm(network: &str, from: &str, to: &str, bytes: usize) -> PeerMessage {
    PeerMessage::Cm { network: network.into(), from: gid(from), to: gid(to), mad: vec![9; bytes] }
}

#[test]
fn a_host_manages_connections_of_its_own_vnics_with_those_here() {
    let mut solo = Solo::up();
    solo.state.handle_address("default", gid("10.111.2.5"), vnic());
    solo.says(C, address("default", "10.111.1.5"));
    solo.take_updates();
    let mad = Box::new([9; MAD_BYTES]);
    let (from, to) = ((DEFAULT, gid("10.111.1.5")), (DEFAULT, gid("10.111.2.5")));
    let good = Update::Cm { host: H, from, to, mad };
    solo.says(C, cm("default", "10.111.1.5", "10.111.2.5", MAD_BYTES));
    assert_eq!(solo.take_updates(), [good]);
    for (network, from, to) in [
        ("default", "10.111.1.6", "10.111.2.5"), // not announced
        ("default", "10.111.2.5", "10.111.2.5"), // this host's own
        ("default", "10.111.1.5", "10.111.2.6"), // not here
        ("default", "10.111.1.5", "10.111.1.5"), // not here, but there
        ("other", "10.111.1.5", "10.111.2.5"),   // another network
    ] {
        solo.says(C, cm(network, from, to, MAD_BYTES));
    }
    assert_eq!((solo.take_updates(), solo.counters().refused_cm, solo.counters().received_cm), (vec![], 5, 1));
    assert!(matches!(solo.notes.last(), Some(Note::RefusedCm { .. })));
    // There is no time for it.
    solo.state.handle_message(solo.now, C, cm("default", "10.111.1.5", "10.111.2.5", MAD_BYTES), false);
    assert_eq!((solo.take_updates(), solo.counters().dropped_cm), (vec![], 1));
    // No MAD at all.
    solo.says(C, cm("default", "10.111.1.5", "10.111.2.5", MAD_BYTES - 1));
    assert_eq!((solo.phase(), solo.counters().protocol_errors), ("down", 1));
}

#[test]
fn connections_are_managed_with_hosts_that_are_connected() {
    let between = MadEnds { from: gid("10.111.2.5"), to: gid("10.111.1.5") };
    let mut solo = Solo::new(only(2, 1));
    solo.state.send_cm(H, DEFAULT, between, &[9; MAD_BYTES], true);
    solo.settle();
    assert_eq!(solo.sent, []);
    solo.connect(C, 1);
    solo.sent.clear();
    solo.state.send_cm(H, DEFAULT, between, &[9; MAD_BYTES], true);
    solo.state.send_cm(H, NetworkId(99), between, &[9; MAD_BYTES], true);
    solo.settle();
    assert_eq!(solo.sent, [cm("default", "10.111.2.5", "10.111.1.5", MAD_BYTES)]);
    solo.state.send_cm(H, DEFAULT, between, &[9; MAD_BYTES], false);
    solo.settle();
    assert_eq!((solo.sent.len(), solo.counters().dropped_cm), (1, 1));
}
