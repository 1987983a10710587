//! Ids and labels of vNICs between two hosts: what is announced to whom, and what is believed.
use super::file::{KEY_BYTES, PeerEntry, PeersFile};
use super::state::{Output, State};
use super::update::Update;
use crate::admission::access::VnicIdentity;
use freeflow_engine::{HostId, PeerInfo};
use freeflow_protocol::peer::{PEER_PROTOCOL, PeerMessage, QpInfo};
use freeflow_verbs::{Gid, Instant, NetworkId, QpType, Qpn};
use std::sync::Arc;

const DEFAULT: NetworkId = NetworkId(7);
const H: HostId = HostId(1);
const NOW: Instant = Instant(1_000_000_000_000);

fn gid(text: &str) -> Gid {
    Gid::from_ip(text.parse().unwrap())
}

fn file() -> PeersFile {
    let peer = PeerEntry {
        host: "h1".into(),
        address: "192.0.2.1".parse().unwrap(),
        control_port: 4790,
        public_key: [1; KEY_BYTES],
        prefixes: ["10.111.1.0/24", "10.111.16.0/20", "fd00::100/120"]
            .map(|text| text.parse().unwrap())
            .into_iter()
            .collect(),
    };
    PeersFile {
        host: "h2".into(),
        address: "192.0.2.2".parse().unwrap(),
        control_port: 4790,
        key_file: "key".into(),
        icrc: true,
        frames: true,
        sealed: false,
        peers: vec![peer],
        external: Vec::new(),
        dscp: 0,
    }
}

fn who(vnic: &str, label: &str) -> Arc<VnicIdentity> {
    let labels = [("app".to_owned(), label.to_owned())].into_iter().collect();
    Arc::new(VnicIdentity { vnic: vnic.into(), labels, addresses: Vec::new() })
}

/// The other host's announcement of an address of its own.
fn says(text: &str, who: &VnicIdentity) -> PeerMessage {
    let labels = who.labels.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    PeerMessage::Identity { network: "default".into(), gid: gid(text), other: None, vnic: who.vnic.clone(), labels }
}

fn attach(text: &str) -> PeerMessage {
    PeerMessage::Attach { network: "default".into(), gid: gid(text) }
}

fn party(text: &str, who: &Arc<VnicIdentity>) -> Update {
    Update::Party { network: DEFAULT, gid: gid(text), identity: Some(who.clone()) }
}

fn route(text: &str, host: Option<HostId>) -> Update {
    Update::Route { network: DEFAULT, gid: gid(text), host }
}

struct Solo {
    state: State,
    sent: Vec<PeerMessage>,
    updates: Vec<Update>,
}

impl Solo {
    /// The other host is up.
    fn new() -> Self {
        let mut solo = Self { state: State::new(NOW, file(), 5), sent: Vec::new(), updates: Vec::new() };
        solo.state.handle_network("default", Some(DEFAULT));
        solo.connect(50);
        solo
    }

    fn connect(&mut self, connection: u64) {
        self.state.handle_connected(NOW, H, connection);
        let (offer, host) = (PEER_PROTOCOL, "h1".into());
        self.hear(connection, PeerMessage::Hello { offer, host, epoch: 9, icrc_wanted: true });
        (self.sent, self.updates) = Default::default();
    }

    fn hear(&mut self, connection: u64, message: PeerMessage) {
        self.state.handle_message(NOW, connection, message, true);
        self.settle();
    }

    fn settle(&mut self) {
        while let Some(output) = self.state.poll_output() {
            match output {
                Output::Send(_, message) => self.sent.push(message),
                Output::Update(update) => self.updates.push(update),
                Output::Dial(_) | Output::Close(_) | Output::Note(..) => {}
            }
        }
    }

    fn updates(&mut self) -> Vec<Update> {
        self.settle();
        std::mem::take(&mut self.updates)
    }

    fn sent(&mut self) -> Vec<PeerMessage> {
        self.settle();
        std::mem::take(&mut self.sent)
    }
}

#[test]
fn labels_are_announced_with_an_address_and_when_they_change() {
    let mut solo = Solo::new();
    solo.state.handle_address("default", gid("10.111.2.5"), Some(who("v", "x")));
    assert_eq!(solo.sent(), [attach("10.111.2.5"), says("10.111.2.5", &who("v", "x"))]);
    solo.state.handle_address("default", gid("10.111.2.5"), Some(who("v", "x")));
    assert_eq!(solo.sent(), []);
    solo.state.handle_address("default", gid("10.111.2.5"), Some(who("v", "y")));
    assert_eq!(solo.sent(), [says("10.111.2.5", &who("v", "y"))]);
    solo.state.notify_disconnected(H, Qpn(5), Qpn(6));
    assert_eq!(solo.sent(), [PeerMessage::Disconnected { qpn: Qpn(5), peer: Qpn(6) }]);
}

#[test]
fn hosts_say_how_long_frames_may_be_where_they_agreed_on_frames() {
    let mut solo = Solo::new();
    solo.state.announce_frames(H, 4096);
    assert_eq!(solo.sent(), [PeerMessage::Frames { payload_bytes: 4096 }]);
    solo.hear(50, PeerMessage::Frames { payload_bytes: 1408 });
    assert_eq!(solo.updates(), [Update::Frames { host: H, payload_bytes: 1408 }]);
    let without = PeersFile { frames: false, ..file() };
    let mut solo = Solo { state: State::new(NOW, without, 5), sent: Vec::new(), updates: Vec::new() };
    solo.connect(50);
    solo.state.announce_frames(H, 4096);
    assert_eq!(solo.sent(), []);
    solo.hear(50, PeerMessage::Frames { payload_bytes: 1408 });
    assert!(!solo.updates().iter().any(|update| matches!(update, Update::Frames { .. })), "it offends");
}

#[test]
fn a_host_has_a_say_in_its_own_addresses_only() {
    let mut solo = Solo::new();
    let (x, y) = (who("v", "x"), who("v", "y"));
    solo.hear(50, says("10.111.1.5", &x));
    assert_eq!(solo.updates(), [], "an address that it has not announced");
    solo.hear(50, attach("10.111.1.5"));
    solo.hear(50, says("10.111.1.5", &x));
    solo.hear(50, says("10.111.1.5", &y));
    assert_eq!(solo.updates(), [route("10.111.1.5", Some(H)), party("10.111.1.5", &x), party("10.111.1.5", &y)]);
    // An address outside its prefixes, and one that is here.
    solo.hear(50, attach("10.111.9.9"));
    solo.hear(50, says("10.111.9.9", &x));
    solo.state.handle_address("default", gid("10.111.1.6"), Some(who("mine", "x")));
    solo.hear(50, attach("10.111.1.6"));
    solo.hear(50, says("10.111.1.6", &x));
    assert_eq!(solo.updates(), []);
    // It was announced twice, and is known when the address is free.
    solo.state.handle_address("default", gid("10.111.1.6"), None);
    assert_eq!(solo.updates(), [route("10.111.1.6", Some(H)), party("10.111.1.6", &x)]);
    solo.hear(50, PeerMessage::Disconnected { qpn: Qpn(5), peer: Qpn(6) });
    assert_eq!(solo.updates(), [Update::Disconnected { host: H, qpn: Qpn(5), peer: Qpn(6) }]);
}

#[test]
fn both_addresses_of_a_vnic_are_announced() {
    let both = || {
        let identity = VnicIdentity::clone(&who("v", "x"));
        let addresses = vec!["10.111.2.5".parse().unwrap(), "fd00::205".parse().unwrap()];
        Some(Arc::new(VnicIdentity { addresses, ..identity }))
    };
    let dual = |text: &str, other: &str| {
        let PeerMessage::Identity { network, gid, vnic, labels, .. } = says(text, &who("v", "x")) else {
            unreachable!()
        };
        PeerMessage::Identity { network, gid, other: Some(self::gid(other)), vnic, labels }
    };
    let info = PeerInfo {
        network: DEFAULT,
        gid: gid("10.111.2.5"),
        ipv6_gid: Some(gid("fd00::205")),
        service: QpType::Ud,
        connected: None,
    };
    let said = QpInfo {
        network: "default".into(),
        gid: gid("10.111.2.5"),
        ipv6_gid: Some(gid("fd00::205")),
        service: QpType::Ud,
        connected: None,
    };
    let mut solo = Solo::new();
    for text in ["10.111.2.5", "fd00::205"] {
        solo.state.handle_address("default", gid(text), both());
    }
    let (four, six) = (dual("10.111.2.5", "fd00::205"), dual("fd00::205", "10.111.2.5"));
    assert_eq!(solo.sent(), [attach("10.111.2.5"), four, attach("fd00::205"), six]);
    solo.state.notify(H, Qpn(3), Some(info));
    assert_eq!(solo.sent(), [PeerMessage::Info { qpn: Qpn(3), info: Some(said) }]);
    solo.state.handle_address("default", gid("fd00::205"), None);
    let gone = |text| PeerMessage::Detach { network: "default".into(), gid: gid(text) };
    assert_eq!(solo.sent(), [gone("fd00::205")]);
}

#[test]
fn a_second_address_must_be_the_hosts_too() {
    let mut solo = Solo::new();
    let labels = vec![("app".to_owned(), "x".to_owned())];
    let says = |other: &str| PeerMessage::Identity {
        network: "default".into(),
        gid: gid("10.111.1.5"),
        other: Some(gid(other)),
        vnic: "v".into(),
        labels: labels.clone(),
    };
    solo.hear(50, attach("10.111.1.5"));
    solo.updates();
    for (other, is_believed) in [("fd00::105", true), ("fd00::205", false), ("10.111.2.5", false)] {
        solo.hear(50, says(other));
        let updates = solo.updates();
        let [Update::Party { identity: Some(identity), .. }] = &updates[..] else { panic!("{updates:?}") };
        assert_eq!(identity.addresses.len(), if is_believed { 2 } else { 0 }, "{other}");
    }
    let info = |ipv6_gid| {
        let (network, gid) = ("default".into(), gid("10.111.1.5"));
        let info = QpInfo { network, gid, ipv6_gid: Some(ipv6_gid), service: QpType::Ud, connected: None };
        PeerMessage::Info { qpn: Qpn(3), info: Some(info) }
    };
    for (ipv6, is_believed) in [("fd00::105", true), ("fd00::205", false)] {
        solo.hear(50, info(gid(ipv6)));
        let updates = solo.updates();
        let [Update::Peer { info, .. }] = &updates[..] else { panic!("{updates:?}") };
        assert_eq!(info.and_then(|info| info.ipv6_gid), is_believed.then(|| gid(ipv6)));
    }
}

#[test]
fn labels_go_with_their_addresses() {
    let mut solo = Solo::new();
    let x = who("v", "x");
    for text in ["10.111.1.5", "10.111.1.6"] {
        solo.hear(50, attach(text));
        solo.hear(50, says(text, &x));
    }
    solo.hear(50, PeerMessage::Synced);
    solo.hear(50, PeerMessage::Detach { network: "default".into(), gid: gid("10.111.1.5") });
    solo.updates();
    solo.hear(50, attach("10.111.1.5"));
    assert_eq!(solo.updates(), [route("10.111.1.5", Some(H))], "they were forgotten");
    // A newer connection says less.
    solo.connect(51);
    solo.hear(51, attach("10.111.1.5"));
    solo.hear(51, PeerMessage::Synced);
    solo.hear(51, attach("10.111.1.6"));
    assert_eq!(solo.updates(), [route("10.111.1.6", None), route("10.111.1.6", Some(H))]);
    // A network that is new here.
    let other = |gid| PeerMessage::Attach { network: "other".into(), gid };
    solo.hear(51, other(gid("10.111.1.7")));
    let labels = vec![("app".into(), "x".into())];
    let (network, vnic) = ("other".into(), "v".into());
    solo.hear(51, PeerMessage::Identity { network, gid: gid("10.111.1.7"), other: None, vnic, labels });
    assert_eq!(solo.updates(), []);
    solo.state.handle_network("other", Some(NetworkId(8)));
    let updates = solo.updates();
    assert!(updates.contains(&Update::Party { network: NetworkId(8), gid: gid("10.111.1.7"), identity: Some(x) }));
}

#[test]
fn an_identity_that_there_is_no_room_for_ends_the_one_before() {
    let mut solo = Solo::new();
    // Many others, as large as a message can make them.
    let large = who("v", &"x".repeat(40_000));
    let first = who("v", "first");
    solo.hear(50, attach("10.111.1.5"));
    solo.hear(50, says("10.111.1.5", &first));
    assert_eq!(solo.updates(), [route("10.111.1.5", Some(H)), party("10.111.1.5", &first)]);
    let other = |number: u32| format!("10.111.{}.{}", 16 + number / 256, number % 256);
    let mut is_full = false;
    for number in 0..2000 {
        let text = other(number);
        solo.hear(50, attach(&text));
        solo.updates();
        solo.hear(50, says(&text, &large));
        let none = Update::Party { network: DEFAULT, gid: gid(&text), identity: None };
        is_full = solo.updates().contains(&none);
        if is_full {
            break;
        }
    }
    assert!(is_full);
    solo.hear(50, says("10.111.1.5", &large));
    assert_eq!(solo.updates(), [Update::Party { network: DEFAULT, gid: gid("10.111.1.5"), identity: None }]);
}
