//! Routers that find each other: real threads and sockets on addresses of the loopback interface,
//! good peers and bad ones.
use crate::common;
use freeflow_engine::{HostId, PeerInfo};
use freeflow_protocol::admin::{AdminReply, AdminRequest, PeersStatus};
use freeflow_protocol::peer::{FEATURE_SEALED, PEER_PROTOCOL, PeerMessage};
use freeflow_protocol::version::Agreement;
use freeflow_router::Router;
use freeflow_router::peering::{
    Event, Identity, Key, NoiseChannel, PeerEntry, Peers, PeersFile, PeersHandle, PrivateKey, Sink, Update,
    VnicIdentity, key_text,
};
use freeflow_verbs::{Gid, NetworkId, QpType, Qpn};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longer than anything here takes, even on a busy machine.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(60);
pub(crate) const DEFAULT: NetworkId = NetworkId(1);
pub(crate) const PORT: u16 = 4790;
const AGREED: Agreement = Agreement { version: 1, features: PEER_PROTOCOL.features };

fn until<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(began.elapsed() < WAIT_MAX, "waited in vain: {what}");
        std::thread::yield_now();
    }
}

/// Some vNIC without labels.
pub(crate) fn vnic() -> Arc<VnicIdentity> {
    Arc::new(VnicIdentity { vnic: "v".into(), labels: Default::default(), addresses: Vec::new() })
}

pub(crate) fn gid(text: &str) -> Gid {
    Gid::from_ip(text.parse().unwrap())
}

/// Every test has hosts of its own, in a network of its own.
struct Lab {
    network: u8,
    keys: Vec<(PrivateKey, Key)>,
}

impl Lab {
    fn new(host_count: usize) -> Self {
        static NETWORKS: AtomicU8 = AtomicU8::new(1);
        let network = NETWORKS.fetch_add(1, Relaxed);
        Self { network, keys: (0..host_count).map(|_| key()).collect() }
    }

    fn address(&self, host: usize) -> IpAddr {
        // Other processes of this machine may run these tests as well.
        let process = (std::process::id() % 250) as u8;
        Ipv4Addr::new(127, 4 + self.network, process, host as u8 + 1).into()
    }

    fn control(&self, host: usize) -> SocketAddr {
        (self.address(host), PORT).into()
    }

    fn file(&self, own: usize) -> PeersFile {
        let peers = (0..self.keys.len()).filter(|&host| host != own).map(|host| PeerEntry {
            host: name(host),
            address: self.address(host),
            control_port: PORT,
            public_key: self.keys[host].1,
            prefixes: [format!("10.111.{host}.0/24").parse().unwrap()].into_iter().collect(),
        });
        PeersFile {
            host: name(own),
            address: self.address(own),
            control_port: PORT,
            key_file: "none".into(),
            icrc: true,
            frames: true,
            sealed: false,
            peers: peers.collect(),
            external: Vec::new(),
            dscp: 0,
        }
    }

    fn start(&self, own: usize, epoch: u64) -> Host {
        Host::start(self.file(own), self.keys[own].0.clone(), epoch)
    }

    fn identity(&self, host: usize) -> Identity {
        Identity { name: name(host), key: self.keys[host].0.clone() }
    }

    /// A TCP connection to a host, from the address of another.
    fn connect(&self, from: usize, to: usize) -> TcpStream {
        connect(self.address(from), self.control(to))
    }
}

pub(crate) fn connect(from: IpAddr, to: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let socket: OwnedFd = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddr::new(from, 0)).unwrap();
    connect(&socket, &to).unwrap();
    TcpStream::from(socket)
}

pub(crate) fn key() -> (PrivateKey, Key) {
    let pattern = "Noise_KK_25519_ChaChaPoly_BLAKE2s".parse().unwrap();
    let pair = snow::Builder::new(pattern).generate_keypair().unwrap();
    (PrivateKey(pair.private.try_into().unwrap()), pair.public.try_into().unwrap())
}

fn name(host: usize) -> String {
    format!("h{host}")
}

#[derive(Clone, Default)]
pub(crate) struct Updates(pub(crate) Arc<Mutex<Vec<Update>>>);

impl Sink for Updates {
    fn deliver(&self, updates: Vec<Update>) {
        self.0.lock().unwrap().extend(updates);
    }
}

/// One peers thread.
pub(crate) struct Host {
    peers: Option<Peers>,
    pub(crate) handle: PeersHandle,
    pub(crate) updates: Updates,
}

impl Host {
    pub(crate) fn start(file: PeersFile, key: PrivateKey, epoch: u64) -> Self {
        let updates = Updates::default();
        let (peers, handle) = Peers::start((file, key), (epoch, 1), updates.clone(), ()).unwrap();
        handle.network("default", Some(DEFAULT));
        Self { peers: Some(peers), handle, updates }
    }

    /// Waits for an update, and forgets it and all before.
    fn expect(&self, what: &Update) {
        until(&format!("{what:?}"), || {
            let mut updates = self.updates.0.lock().unwrap();
            let at = updates.iter().position(|update| update == what)?;
            updates.drain(..=at);
            Some(())
        });
    }

    /// Waits until it is connected to so many hosts.
    fn until_up(&self, count: usize) {
        until("hosts up", || {
            let peers = self.handle.status().peers;
            (peers.iter().filter(|peer| peer.state == "up").count() == count).then_some(())
        });
    }

    pub(crate) fn status_when(&self, what: &str, check: impl Fn(&PeersStatus) -> bool) -> PeersStatus {
        until(what, || Some(self.handle.status()).filter(&check))
    }

    fn stop(&mut self) {
        self.peers = None;
    }
}

fn route(text: &str, host: Option<u32>) -> Update {
    Update::Route { network: DEFAULT, gid: gid(text), host: host.map(HostId) }
}

#[test]
fn two_hosts_tell_each_other_what_they_have_and_answer() {
    let lab = Lab::new(2);
    let (one, other) = (lab.start(0, 10), lab.start(1, 20));
    one.handle.attached("default", gid("10.111.0.1"), vnic());
    let up = |host: usize, epoch| Update::HostUp {
        host: HostId(1),
        address: lab.address(host),
        icrc: true,
        epoch,
        agreed: AGREED,
    };
    one.expect(&up(1, 20));
    other.expect(&up(0, 10));
    other.expect(&route("10.111.0.1", Some(1)));
    other.handle.attached("default", gid("10.111.1.1"), vnic());
    one.expect(&route("10.111.1.1", Some(1)));
    one.handle.detached("default", gid("10.111.0.1"));
    other.expect(&route("10.111.0.1", None));
    // Not its own to announce.
    one.handle.attached("default", gid("10.111.1.7"), vnic());
    other.status_when("the refusal", |status| status.peers[0].counters.refused_announcements == 1);

    assert!(one.handle.ask(HostId(1), Qpn(5)));
    other.expect(&Update::Asked { host: HostId(1), qpn: Qpn(5) });
    let info = PeerInfo {
        network: DEFAULT,
        gid: gid("10.111.1.1"),
        ipv6_gid: None,
        service: QpType::Rc,
        connected: Some((gid("10.111.0.1"), Qpn(6))),
    };
    other.handle.notify(HostId(1), Qpn(5), Some(info));
    one.expect(&Update::Peer { host: HostId(1), qpn: Qpn(5), info: Some(info) });
    other.handle.notify(HostId(1), Qpn(5), None);
    one.expect(&Update::Peer { host: HostId(1), qpn: Qpn(5), info: None });
    let group = |qpn| Update::Group { host: HostId(1), network: DEFAULT, gid: gid("239.1.1.1"), qpn };
    other.handle.group(DEFAULT, gid("239.1.1.1"), Some(Qpn(8)));
    one.expect(&group(Some(Qpn(8))));
    other.handle.group(DEFAULT, gid("239.1.1.1"), None);
    one.expect(&group(None));
    let status = one.status_when("a measured round trip", |status| status.peers[0].rtt_us.is_some());
    assert_eq!((status.host.as_str(), status.peers[0].host.as_str(), status.peers[0].icrc), ("h0", "h1", true));
    assert_eq!(status.peers[0].counters.protocol_errors + status.refused_handshakes + status.unknown_connections, 0);
}

#[test]
fn messages_of_one_turn_arrive_in_order_those_before_the_end_too() {
    let lab = Lab::new(2);
    let (one, mut other) = (lab.start(0, 10), lab.start(1, 20));
    one.until_up(1);
    other.until_up(1);
    let update = |number| Update::Disconnected { host: HostId(1), qpn: Qpn(number), peer: Qpn(7) };
    // More than is written at a time.
    (0..2000).for_each(|number| other.handle.disconnected(HostId(1), Qpn(number), Qpn(7)));
    other.stop();
    (0..2000).for_each(|number| one.expect(&update(number)));
}

#[test]
fn three_hosts_one_of_which_is_restarted() {
    let lab = Lab::new(3);
    let mut hosts: Vec<Host> = (0..3).map(|host| lab.start(host, host as u64)).collect();
    for (number, host) in hosts.iter().enumerate() {
        host.handle.attached("default", gid(&format!("10.111.{number}.1")), vnic());
    }
    for host in &hosts {
        host.until_up(2);
    }
    // Hosts count the others in the order of their files.
    hosts[0].expect(&route("10.111.1.1", Some(1)));
    hosts[2].expect(&route("10.111.1.1", Some(2)));
    hosts[1].stop();
    hosts[0].expect(&Update::HostDown { host: HostId(1) });
    hosts[2].expect(&Update::HostDown { host: HostId(2) });
    hosts[1] = lab.start(1, 99);
    hosts[1].handle.attached("default", gid("10.111.1.2"), vnic());
    for (host, number) in [(0, 1), (2, 2)] {
        hosts[host].expect(&route("10.111.1.1", None));
        hosts[host].expect(&Update::PeersGone { host: HostId(number) });
        let (address, icrc) = (lab.address(1), true);
        hosts[host].expect(&Update::HostUp { host: HostId(number), address, icrc, epoch: 99, agreed: AGREED });
        hosts[host].expect(&route("10.111.1.2", Some(number)));
        hosts[host].until_up(2);
    }
    hosts[1].expect(&route("10.111.0.1", Some(1)));
}

#[test]
fn a_wrong_key_is_refused_and_disturbs_nobody() {
    let lab = Lab::new(3);
    let (one, other) = (lab.start(1, 1), lab.start(2, 2));
    one.until_up(1);
    // Host 0 has a key of its own making.
    let liar = Host::start(lab.file(0), key().0, 3);
    one.status_when("refusals", |status| status.refused_handshakes >= 3);
    liar.status_when("failed dials", |status| status.peers.iter().all(|peer| peer.counters.failed_dials >= 2));
    assert!(liar.updates.0.lock().unwrap().iter().all(|update| matches!(update, Update::Settings(_))));
    one.handle.attached("default", gid("10.111.1.1"), vnic());
    other.expect(&route("10.111.1.1", Some(2)));
    drop(liar);
    // The real one is welcome at once.
    let real = lab.start(0, 4);
    real.until_up(2);
}

#[test]
fn a_listener_with_a_wrong_key_gets_nothing() {
    let lab = Lab::new(2);
    let liar = Host::start(lab.file(1), key().0, 3);
    let one = lab.start(0, 1);
    one.handle.attached("default", gid("10.111.0.1"), vnic());
    one.status_when("failed dials", |status| status.peers[0].counters.failed_dials >= 3);
    assert_eq!(one.handle.status().peers[0].counters.sent_messages, 0);
    assert!(liar.updates.0.lock().unwrap().iter().all(|update| matches!(update, Update::Settings(_))));
}

/// Whether the other side ends the connection; what it sends before is thrown away.
fn is_ended(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(WAIT_MAX)).unwrap();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn unknown_addresses_and_malformed_bytes_cost_little() {
    let lab = Lab::new(3);
    let (one, other) = (lab.start(1, 1), lab.start(2, 2));
    one.until_up(1);
    let before = one.handle.status().peers[1].counters;
    // From an address that is nobody's.
    for _ in 0..20 {
        is_ended(&mut connect(lab.address(9), lab.control(1)));
    }
    assert_eq!(one.handle.status().unknown_connections, 20);
    // From a peer's address: garbage ends at once, and so does a name that may not dial here.
    for bytes in [&[0xff_u8; 100_000][..], b"GET / HTTP/1.0\r\n\r\n", b"\0\x08FFP1\x02h2"] {
        let mut stream = lab.connect(0, 1);
        let _ = stream.write_all(bytes);
        is_ended(&mut stream);
    }
    one.status_when("refusals", |status| status.refused_handshakes == 3);
    // More that say nothing than are waited for: the oldest goes each time, in the end all do.
    let mut silent: Vec<TcpStream> = (0..10).map(|_| lab.connect(0, 1)).collect();
    one.status_when("refusals", |status| status.refused_handshakes >= 9);
    silent.iter_mut().for_each(is_ended);
    // Somebody sends the copy of a whole opening, and then nothing that fits.
    let opening = NoiseChannel::dial(&lab.identity(0), "h1", &lab.keys[1].1);
    let mut stream = lab.connect(0, 1);
    stream.write_all(opening.output()).unwrap();
    stream.write_all(&[0, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]).unwrap();
    is_ended(&mut stream);
    // Good peers have noticed nothing.
    one.handle.attached("default", gid("10.111.1.1"), vnic());
    other.expect(&route("10.111.1.1", Some(2)));
    let after = one.handle.status().peers[1].counters;
    assert_eq!((after.connections, after.protocol_errors), (before.connections, 0));
    // The host whose address that was can still connect.
    let third = lab.start(0, 3);
    third.until_up(2);
}

/// The test itself as host 0: it has the right key and behaves as it likes.
struct Player {
    identity: Identity,
    channel: NoiseChannel,
    stream: TcpStream,
}

impl Player {
    fn connect(lab: &Lab, to: usize) -> Self {
        let identity = lab.identity(0);
        let (channel, stream) = (NoiseChannel::dial(&identity, &name(to), &lab.keys[to].1), lab.connect(0, to));
        let mut player = Self { identity, channel, stream };
        player.flush();
        assert_eq!(player.next(), Event::Opened);
        let hello = PeerMessage::Hello { offer: PEER_PROTOCOL, host: name(0), epoch: 5, icrc_wanted: false };
        player.send(&hello);
        player
    }

    fn flush(&mut self) -> bool {
        let bytes = self.channel.output().to_vec();
        let written = self.stream.write_all(&bytes).is_ok();
        self.channel.handle_sent(bytes.len());
        written
    }

    /// False: the other side has ended the connection.
    fn send(&mut self, message: &PeerMessage) -> bool {
        self.channel.send(message);
        self.flush()
    }

    fn next(&mut self) -> Event {
        self.stream.set_read_timeout(Some(WAIT_MAX)).unwrap();
        loop {
            if let Some(event) = self.channel.poll_event(&self.identity, |_| None).unwrap() {
                return event;
            }
            let mut buffer = [0; 4096];
            let count = self.stream.read(&mut buffer).unwrap();
            assert!(count > 0, "the other side has ended the connection");
            self.channel.handle_bytes(&buffer[..count]);
        }
    }
}

#[test]
fn a_peer_that_floods_and_does_not_read_is_cut_off() {
    let lab = Lab::new(3);
    let (one, other) = (lab.start(1, 1), lab.start(2, 2));
    one.until_up(1);
    let mut player = Player::connect(&lab, 1);
    one.until_up(2);
    player.stream.set_write_timeout(Some(WAIT_MAX)).unwrap();
    // Each ping has an answer, which is not taken.
    while player.send(&PeerMessage::Ping { stamp: 1 }) {}
    one.status_when("the cut", |status| status.peers[0].counters.timeouts >= 1);
    one.handle.attached("default", gid("10.111.1.1"), vnic());
    other.expect(&route("10.111.1.1", Some(2)));
    assert_eq!(one.handle.status().peers[1].counters.connections, 1);
}

#[test]
fn an_older_peer_is_refused_by_a_sealed_host_which_says_why() {
    let lab = Lab::new(2);
    let file = PeersFile { sealed: true, ..lab.file(1) };
    let one = Host::start(file, lab.keys[1].0.clone(), 1);
    let mut player = Player::connect(&lab, 1);
    // The other router hears which feature it lacks.
    let greeting = player.next();
    let requires = matches!(&greeting, Event::Message(PeerMessage::Hello { offer, .. })
        if offer.required_features == FEATURE_SEALED && PEER_PROTOCOL.agree(offer).is_err());
    assert!(requires, "{greeting:?}");
    is_ended(&mut player.stream);
    let says = |status: &PeersStatus| {
        let problem = status.peers[0].problem.as_deref().unwrap_or_default();
        status.peers[0].state != "up" && problem.contains("older release")
    };
    assert!(one.status_when("the reason", says).peers[0].sealed);
    let updates = one.updates.0.lock().unwrap();
    assert!(!updates.iter().any(|update| matches!(update, Update::HostUp { .. })));
}

#[test]
fn a_greeted_peer_that_turns_to_nonsense_is_cut_off() {
    let lab = Lab::new(2);
    let one = lab.start(1, 1);
    let mut player = Player::connect(&lab, 1);
    one.until_up(1);
    assert!(matches!(player.next(), Event::Message(PeerMessage::Hello { epoch: 1, .. })));
    player.send(&PeerMessage::Ask { qpn: Qpn(u32::MAX) });
    is_ended(&mut player.stream);
    let mut player = Player::connect(&lab, 1);
    player.stream.write_all(&[0, 30]).unwrap();
    player.stream.write_all(&[3; 30]).unwrap();
    is_ended(&mut player.stream);
    one.status_when("two errors", |status| status.peers[0].counters.protocol_errors == 2);
}

#[test]
fn a_dead_wire_is_noticed() {
    let lab = Lab::new(2);
    let one = lab.start(1, 1);
    // It greets, and is never heard of again.
    let mut player = Player::connect(&lab, 1);
    one.expect(&Update::HostUp { host: HostId(1), address: lab.address(0), icrc: false, epoch: 5, agreed: AGREED });
    one.expect(&Update::HostDown { host: HostId(1) });
    is_ended(&mut player.stream);
    assert_eq!(one.handle.status().peers[0].counters.timeouts, 1);
}

#[test]
fn who_answers_no_dialing_is_dialed_again() {
    let lab = Lab::new(2);
    // It accepts and says nothing.
    let mute = TcpListener::bind(lab.control(1)).unwrap();
    let one = lab.start(0, 1);
    let first = mute.accept().unwrap();
    let second = mute.accept().unwrap();
    drop((first, second, mute));
    let other = lab.start(1, 2);
    one.until_up(1);
    other.until_up(1);
}

#[test]
fn a_file_that_is_read_anew_counts_at_once() {
    let lab = Lab::new(3);
    let mut small = lab.file(0);
    small.peers.truncate(1);
    let one = Host::start(small.clone(), lab.keys[0].0.clone(), 1);
    let (other, third) = (lab.start(1, 2), lab.start(2, 3));
    one.until_up(1);
    one.handle.reload(lab.file(0), lab.keys[0].0.clone());
    one.until_up(2);
    third.until_up(2);
    assert_eq!(one.handle.status().peers[0].counters.connections, 1);
    one.handle.reload(small, lab.keys[0].0.clone());
    one.expect(&Update::HostDown { host: HostId(2) });
    one.expect(&Update::PeersGone { host: HostId(2) });
    third.expect(&Update::HostDown { host: HostId(1) });
    other.until_up(2);
}

#[test]
fn without_a_peers_file_nothing_is_asked() {
    let handle = PeersHandle::default();
    assert!(!handle.is_on() && !handle.ask(HostId(1), Qpn(1)));
    assert_eq!(handle.status(), PeersStatus::default());
}

/// A whole router with a peers file in its directory.
struct WholeHost {
    router: Option<Router>,
    directory: common::Directory,
}

impl WholeHost {
    fn start(lab: &Lab, own: usize) -> Self {
        let directory = common::Directory::new();
        let key: String = lab.keys[own].0.0.iter().map(|byte| format!("{byte:02x}")).collect();
        write(&directory.0.join("host.key"), &key, 0o600);
        let mut host = Self { router: None, directory };
        host.write_file(lab, own, &(0..lab.keys.len()).collect::<Vec<_>>());
        host.restart(own);
        host
    }

    fn write_file(&self, lab: &Lab, own: usize, hosts: &[usize]) {
        let file = lab.file(own);
        let peers = file.peers.iter().filter(|peer| hosts.iter().any(|&host| name(host) == peer.host));
        let peers: Vec<_> = peers
            .map(|peer| {
                serde_json::json!({
                    "host": peer.host, "address": peer.address, "public_key": key_text(&peer.public_key),
                    "prefixes": peer.prefixes.iter().map(|prefix| prefix.to_string()).collect::<Vec<_>>(),
                })
            })
            .collect();
        let text = serde_json::json!({
            "host": file.host, "address": file.address, "key_file": "host.key", "peers": peers,
        });
        write(&self.directory.0.join("peers.json"), &text.to_string(), 0o644);
    }

    fn restart(&mut self, own: usize) {
        self.router = None;
        let mut config = common::config(&self.directory.0, Default::default());
        config.pool = "10.111.0.0/16".parse().unwrap();
        config.range = Some(format!("10.111.{own}.0/24").parse().unwrap());
        config.peers = Some(self.directory.0.join("peers.json"));
        self.router = Some(Router::start(config).unwrap());
    }

    fn admin(&self, request: &AdminRequest) -> AdminReply {
        common::admin(&self.directory.0.join("run"), request)
    }

    fn peers(&self) -> PeersStatus {
        common::peers_status(&self.directory.0.join("run"))
    }

    fn reload_peers(&self) -> (u16, serde_json::Value) {
        let run_dir = self.directory.0.join("run");
        common::rest(&run_dir, "POST", &common::host_path(&run_dir, "peers/reload"), "")
    }

    /// Waits until so many addresses are known to be on the first peer.
    fn until_routes(&self, count: u32) -> PeersStatus {
        until("routes", || Some(self.peers()).filter(|status| status.peers[0].route_count == count))
    }
}

fn write(path: &std::path::Path, text: &str, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

#[test]
fn routers_announce_their_vnics_and_read_their_files_again() {
    let lab = Lab::new(2);
    let mut hosts = [WholeHost::start(&lab, 0), WholeHost::start(&lab, 1)];
    for id in ["a", "b"] {
        assert!(matches!(hosts[0].admin(&common::attach(id)), AdminReply::Vnic(_)));
    }
    let status = hosts[1].until_routes(2);
    assert_eq!((status.host.as_str(), status.peers[0].host.as_str()), ("h1", "h0"));
    assert!(status.file.ends_with("peers.json"));
    assert_eq!(hosts[0].admin(&AdminRequest::Detach { id: "a".into() }), AdminReply::Done);
    hosts[1].until_routes(1);
    // A vNIC that was attached before is announced by the next router.
    hosts[0].restart(0);
    until("another connection", || (hosts[1].until_routes(1).peers[0].counters.connections == 2).then_some(()));
    let status = common::router_status(&hosts[1].directory.0.join("run"));
    assert_eq!((status.peer_count, status.connected_peer_count), (1, 1));

    // A bad file changes nothing; a good one counts.
    write(&hosts[1].directory.0.join("peers.json"), "{}", 0o644);
    let (code, refusal) = hosts[1].reload_peers();
    let message = refusal["message"].as_str().unwrap();
    assert_eq!((code, refusal["reason"].as_str()), (422, Some("Invalid")));
    assert!(message.contains("peers.json") && message.contains("host"), "{message}");
    hosts[1].until_routes(1);
    hosts[1].write_file(&lab, 1, &[]);
    assert_eq!(hosts[1].reload_peers().0, 200);
    until("no peers", || hosts[1].peers().peers.is_empty().then_some(()));
}

#[test]
fn a_router_without_a_peers_file_says_so() {
    let host = common::Host::new();
    assert_eq!(common::peers_status(&host.run_dir()), PeersStatus::default());
    let (code, refusal) = host.rest("POST", &common::host_path(&host.run_dir(), "peers/reload"), "");
    assert_eq!((code, refusal["message"].as_str()), (404, Some("the router was started without a peers file")));
    let directory = common::Directory::new();
    let mut config = common::config(&directory.0, Default::default());
    config.peers = Some("/nowhere/peers.json".into());
    let error = Router::start(config).err().unwrap();
    assert!(error.to_string().starts_with("/nowhere/peers.json: "), "{error}");
}
