//! One peers thread among hundreds of hosts, which a single thread of the test plays: real sockets, real handshakes.
use crate::peers::{DEFAULT, Host, PORT, WAIT_MAX, connect, gid, key, vnic};
use freeflow_protocol::peer::{PEER_PROTOCOL, PeerMessage};
use freeflow_router::peering::{Event, Identity, Key, NoiseChannel, PeerEntry, PeersFile, PrivateKey, Update};
use freeflow_verbs::Gid;
use rustix::event::{Timespec, epoll};
use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Instant;

/// The router's own: half of the others have smaller names, and dial.
const OWN: &str = "m";
const HOSTS_OF_NETWORK: usize = 250;
/// Beside a player's number, in what epoll says of its listener.
const LISTENS: u64 = 1 << 32;
/// Players that dial in one turn: the others have theirs.
const DIAL_COUNT: usize = 4;

fn address(host: usize) -> IpAddr {
    // Other processes of this machine may run these tests as well. The router itself is the first host.
    let process = (std::process::id() % 250) as u8;
    Ipv4Addr::new(127, 100 + (host / HOSTS_OF_NETWORK) as u8, process, (host % HOSTS_OF_NETWORK) as u8 + 1).into()
}

/// An address of a vNIC of such a host.
pub fn vnic_of(host: usize) -> Gid {
    gid(&format!("10.{}.{}.1", 1 + host / 250, host % 250))
}

/// One of the other hosts.
struct Player {
    identity: Identity,
    public_key: Key,
    dials: bool,
    listener: Option<TcpListener>,
    link: Option<(TcpStream, NoiseChannel)>,
    is_open: bool,
    /// Messages that came over this connection.
    heard: Vec<PeerMessage>,
}

pub struct Crowd {
    players: Vec<Player>,
    own: (PrivateKey, Key),
    epoll: OwnedFd,
    /// Players that dial the router whenever they are not connected.
    dialing: BTreeSet<usize>,
}

impl Crowd {
    /// Numbers of players are from 1.
    pub fn new(count: usize) -> Self {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let player = |number: usize| {
            let (private, public_key) = key();
            let dials = number.is_multiple_of(2);
            let listener = (!dials).then(|| TcpListener::bind(SocketAddr::new(address(number), PORT)).unwrap());
            if let Some(listener) = &listener {
                listener.set_nonblocking(true).unwrap();
                let data = epoll::EventData::new_u64(number as u64 | LISTENS);
                epoll::add(&epoll, listener, data, epoll::EventFlags::IN).unwrap();
            }
            let name = format!("{}{number:04}", if dials { 'a' } else { 'z' });
            let identity = Identity { name, key: private };
            Player { identity, public_key, dials, listener, link: None, is_open: false, heard: Vec::new() }
        };
        let players = (1..=count).map(player).collect();
        Self { players, own: key(), epoll, dialing: BTreeSet::new() }
    }

    pub fn file(&self, numbers: impl Iterator<Item = usize>) -> PeersFile {
        let peers = numbers.map(|number| PeerEntry {
            host: self.players[number - 1].identity.name.clone(),
            address: address(number),
            control_port: PORT,
            public_key: self.players[number - 1].public_key,
            prefixes: [format!("10.{}.{}.0/24", 1 + number / 250, number % 250).parse().unwrap()].into_iter().collect(),
        });
        PeersFile {
            host: OWN.into(),
            address: address(0),
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

    pub fn router(&self, numbers: impl Iterator<Item = usize>) -> Host {
        Host::start(self.file(numbers), self.own.0.clone(), 1)
    }

    pub fn own_key(&self) -> PrivateKey {
        self.own.0.clone()
    }

    fn adopt(&mut self, number: usize, stream: TcpStream, channel: NoiseChannel) {
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        let data = epoll::EventData::new_u64(number as u64);
        epoll::add(&self.epoll, &stream, data, epoll::EventFlags::IN).unwrap();
        let player = &mut self.players[number - 1];
        (player.link, player.is_open) = (Some((stream, channel)), false);
        player.heard.clear();
        self.write(number);
    }

    /// From now on those of these that dial do so, a few in each turn, and again when they are cut off.
    pub fn keep(&mut self, numbers: impl Iterator<Item = usize>) {
        self.dialing = numbers.filter(|number| self.players[number - 1].dials).collect();
    }

    /// Whether there is more to dial.
    fn dial_some(&mut self) -> bool {
        let idle = self.dialing.iter().filter(|number| self.players[**number - 1].link.is_none());
        let some: Vec<usize> = idle.take(DIAL_COUNT).copied().collect();
        some.iter().for_each(|&number| self.dial(number));
        some.len() == DIAL_COUNT
    }

    /// Begins a connection to the router.
    pub fn dial(&mut self, number: usize) {
        let channel = NoiseChannel::dial(&self.players[number - 1].identity, OWN, &self.own.1);
        let stream = connect(address(number), SocketAddr::new(address(0), PORT));
        self.adopt(number, stream, channel);
    }

    pub fn hang_up(&mut self, number: usize) {
        let player = &mut self.players[number - 1];
        (player.link, player.is_open) = (None, false);
    }

    pub fn is_open(&self, number: usize) -> bool {
        self.players[number - 1].is_open
    }

    pub fn heard(&self, number: usize) -> &[PeerMessage] {
        &self.players[number - 1].heard
    }

    pub fn say(&mut self, number: usize, message: &PeerMessage) {
        let player = &mut self.players[number - 1];
        assert!(player.is_open, "{} is connected", player.identity.name);
        if let Some((_, channel)) = &mut player.link {
            channel.send(message);
        }
        self.write(number);
    }

    /// All of it: the kernel has room for so little.
    fn write(&mut self, number: usize) {
        let Some((stream, channel)) = &mut self.players[number - 1].link else { return };
        while !channel.output().is_empty() {
            match stream.write(channel.output()) {
                Ok(count) => channel.handle_sent(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(_) => return self.hang_up(number),
            }
        }
    }

    /// Plays until `check` holds.
    pub fn until(&mut self, what: &str, mut check: impl FnMut(&mut Self) -> bool) {
        let began = Instant::now();
        while !check(self) {
            assert!(began.elapsed() < WAIT_MAX, "waited in vain: {what}");
            self.turn();
        }
    }

    pub fn turn(&mut self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(256);
        let timeout = Timespec { tv_sec: 0, tv_nsec: if self.dial_some() { 0 } else { 1_000_000 } };
        epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)).unwrap();
        for event in events {
            let topic = event.data.u64();
            let number = (topic & !LISTENS) as usize;
            if topic & LISTENS == 0 {
                self.read(number);
                continue;
            }
            let accepted = self.players[number - 1].listener.as_ref().map(TcpListener::accept);
            if let Some(Ok((stream, _))) = accepted {
                self.adopt(number, stream, NoiseChannel::listen());
            }
        }
    }

    fn read(&mut self, number: usize) {
        let own_key = self.own.1;
        let player = &mut self.players[number - 1];
        let Some((stream, channel)) = &mut player.link else { return };
        let mut buffer = [0; 16_384];
        match stream.read(&mut buffer) {
            Ok(count) if count > 0 => channel.handle_bytes(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            _ => return self.hang_up(number),
        }
        loop {
            match channel.poll_event(&player.identity, |_| Some(own_key)) {
                Ok(None) => break,
                Ok(Some(Event::Opened)) => {
                    let host = player.identity.name.clone();
                    channel.send(&PeerMessage::Hello { offer: PEER_PROTOCOL, host, epoch: 7, icrc_wanted: true });
                }
                Ok(Some(Event::Message(PeerMessage::Hello { .. }))) => player.is_open = true,
                Ok(Some(Event::Message(PeerMessage::Ping { stamp }))) => channel.send(&PeerMessage::Pong { stamp }),
                Ok(Some(Event::Message(message))) => player.heard.push(message),
                Err(_) => return self.hang_up(number),
            }
        }
        self.write(number);
    }
}

/// Addresses of other hosts, as the worker would know them.
fn routes(host: &Host) -> BTreeSet<Gid> {
    let mut routes = BTreeSet::new();
    for update in host.updates.0.lock().unwrap().iter() {
        match update {
            Update::Route { network: DEFAULT, gid, host: Some(_) } => drop(routes.insert(*gid)),
            Update::Route { network: DEFAULT, gid, host: None } => drop(routes.remove(gid)),
            _ => {}
        }
    }
    routes
}

fn up(host: &Host) -> usize {
    host.handle.status().peers.iter().filter(|peer| peer.state == "up").count()
}

const COUNT: usize = 320;

/// They come at once, tell what they have, hear what is here, leave the file and come back; the others notice nothing.
#[test]
fn hundreds_of_hosts_come_and_go() {
    let mut crowd = Crowd::new(COUNT);
    let host = crowd.router(1..=COUNT);
    crowd.keep(1..=COUNT);
    crowd.until("all are up", |crowd| up(&host) == COUNT && (1..=COUNT).all(|number| crowd.is_open(number)));
    for number in 1..=COUNT {
        crowd.say(number, &PeerMessage::Attach { network: "default".into(), gid: vnic_of(number) });
        crowd.say(number, &PeerMessage::Synced);
    }
    crowd.until("routes to all", |_| routes(&host).len() == COUNT);
    host.handle.attached("default", gid("10.200.0.1"), vnic());
    let attached = PeerMessage::Attach { network: "default".into(), gid: gid("10.200.0.1") };
    crowd.until("all hear of a vNIC", |crowd| (1..=COUNT).all(|number| crowd.heard(number).contains(&attached)));

    // A quarter leaves the file.
    let leaves = |number: &usize| number % 8 < 2;
    let (gone, stay): (Vec<usize>, Vec<usize>) = (1..=COUNT).partition(leaves);
    crowd.keep(stay.iter().copied());
    host.handle.reload(crowd.file(stay.iter().copied()), crowd.own_key());
    crowd.until("they are cut off", |crowd| gone.iter().all(|&number| !crowd.is_open(number)));
    crowd.until("the others' routes stay", |_| routes(&host).len() == stay.len());
    crowd.dial(gone[1]);
    crowd.until("a stranger is refused", |crowd| crowd.players[gone[1] - 1].link.is_none());
    assert!(host.handle.status().unknown_connections > 0);
    // And is back: its hosts are those that they were, and the others heard nothing of it.
    host.handle.reload(crowd.file(1..=COUNT), crowd.own_key());
    crowd.keep(1..=COUNT);
    crowd.until("all are up again", |_| up(&host) == COUNT);
    let updates = host.updates.0.lock().unwrap();
    let removed: BTreeSet<u32> = updates.iter().filter_map(removed).collect();
    assert_eq!(removed, gone.iter().map(|&number| number as u32).collect());
    let mut up = updates.iter().filter_map(|update| match update {
        Update::HostUp { host, .. } => Some(host.0),
        _ => None,
    });
    assert!(up.all(|number| number as usize <= COUNT), "nobody has another number");
}

fn removed(update: &Update) -> Option<u32> {
    if let Update::Removed { host } = update { Some(host.0) } else { None }
}
