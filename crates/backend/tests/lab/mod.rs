//! Network namespaces for tests, and the waiting for packets.
#![allow(dead_code)]
use freeflow_backend::{PacketRoute, Peer, PeerIndex, Received, Udp, UdpConfig};
use freeflow_wire::{Header, Opcode, dest_qpn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// After this a packet is taken for lost.
const WAIT_MAX: Duration = Duration::from_secs(20);

pub fn sh(command: &str) {
    let output = Command::new("sh").args(["-ec", command]).output().expect("sh");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A network namespace, deleted with this value.
pub struct Namespace {
    pub name: String,
}

impl Namespace {
    /// With its loopback up, and these addresses on it.
    pub fn new(addresses: &[&str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("ffb-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        sh(&format!("ip netns add {name}; ip -n {name} link set lo up"));
        let namespace = Self { name };
        for address in addresses {
            let (length, nodad) = if address.contains(':') { ("128", "nodad") } else { ("32", "") };
            namespace.ip(&format!("addr add {address}/{length} dev lo {nodad}"));
            namespace.await_route(address, "^local ");
        }
        namespace
    }

    pub fn ip(&self, arguments: &str) {
        sh(&format!("ip -n {} {arguments}", self.name));
    }

    /// The kernel adds the routes of an IPv6 address some time after the address.
    pub fn await_route(&self, address: &str, pattern: &str) {
        let name = &self.name;
        sh(&format!(
            "timeout 20 sh -c 'until ip -n {name} route get {address} 2>/dev/null | grep -q \"{pattern}\"; do :; done'"
        ));
    }

    pub fn exec(&self, command: &str) {
        sh(&format!("ip netns exec {} {command}", self.name));
    }

    /// Runs `work` on a thread in this namespace. Sockets opened there stay in it.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let file = File::open(format!("/run/netns/{}", self.name)).expect("namespace");
        std::thread::scope(|scope| {
            let run = || {
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).expect("setns");
                work()
            };
            scope.spawn(run).join().expect("thread in the namespace")
        })
    }

    pub fn open(&self, config: UdpConfig) -> Udp {
        self.run(|| once_free(|| Udp::open(config.clone())))
    }

    /// One for each engine of a host with so many.
    pub fn open_all(&self, config: UdpConfig, count: u8) -> Vec<Udp> {
        self.run(|| once_free(|| Udp::open_all(config.clone(), count)))
    }
}

/// A socket that was closed may live a little longer: in a child of another test that has not come to its exec yet.
pub fn once_free<T>(open: impl Fn() -> std::io::Result<T>) -> T {
    let begun = std::time::Instant::now();
    loop {
        match open() {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && begun.elapsed().as_secs() < 20 => {
                std::thread::yield_now();
            }
            opened => return opened.expect("a port that is free"),
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

/// Two namespaces with a veth pair between them: 10.0.0.1 and 10.0.0.2, fd00::1 and fd00::2.
pub fn veth(mtu: u32) -> (Namespace, Namespace) {
    let (a, b) = (Namespace::new(&[]), Namespace::new(&[]));
    sh(&format!("ip link add va netns {} type veth peer name vb netns {}", a.name, b.name));
    for (namespace, device, number) in [(&a, "va", 1), (&b, "vb", 2)] {
        namespace.ip(&format!("link set {device} mtu {mtu} up"));
        namespace.ip(&format!("addr add 10.0.0.{number}/24 dev {device}"));
        namespace.ip(&format!("addr add fd00::{number}/64 dev {device} nodad"));
    }
    for (namespace, device, here, there) in [(&a, "va", 1, 2), (&b, "vb", 2, 1)] {
        namespace.await_route(&format!("fd00::{here}"), "^local ");
        namespace.await_route(&format!("fd00::{there}"), &format!("dev {device}"));
    }
    (a, b)
}

/// The packets to 10.0.0.3, an address of `b`'s that nobody answers for yet, get there from now on.
pub fn let_neighbour_answer(a: &Namespace, b: &Namespace) {
    sh(&format!(
        "ip -n {} neigh replace 10.0.0.3 dev va nud permanent lladdr $(ip -n {} -o link show vb | grep -o 'ether [0-9a-f:]*' | cut -d' ' -f2)",
        a.name, b.name
    ));
}

/// Two backends on one loopback, each other's peers.
pub fn loopback(change: impl Fn(&mut UdpConfig, &mut Peer), v6: bool) -> (Namespace, Udp, Udp) {
    let (a, b) = if v6 { ("fd00::1", "fd00::2") } else { ("10.0.0.1", "10.0.0.2") };
    let namespace = Namespace::new(&[a, b]);
    let open = |local, remote| {
        let (mut config, mut peer) = (config(local), peer(local, remote));
        change(&mut config, &mut peer);
        let mut udp = namespace.open(config);
        udp.set_peer(PEER, peer).expect("peer");
        udp
    };
    let (from, to) = (open(a, b), open(b, a));
    (namespace, from, to)
}

pub fn address(text: &str) -> IpAddr {
    text.parse().expect("address")
}

pub fn config(local: &str) -> UdpConfig {
    UdpConfig::new(vec![address(local)])
}

pub fn peer(local: &str, remote: &str) -> Peer {
    let (local, address) = (address(local), address(remote));
    let (path_mtu_bytes, frame_bytes) = (4096, 4096);
    let (icrc, external, frames, sealed, shards) = (true, false, true, false, 1);
    Peer { address, local, icrc, external, path_mtu_bytes, frames, frame_bytes, sealed, shards }
}

/// The way of a packet to the QPN of [`packet`].
pub fn route(to: PeerIndex, flow: u32, traffic_class: u8) -> PacketRoute {
    PacketRoute { to, qpn: 0x11, flow, spreads: false, traffic_class }
}

pub const PEER: PeerIndex = PeerIndex(3);

/// One packet of `bytes` that says its number in the PSN and in every byte of its payload.
pub fn packet(number: u32, bytes: usize) -> Vec<u8> {
    packet_to(0x11, number, bytes)
}

/// The same, to another QPN.
pub fn packet_to(qpn: u32, number: u32, bytes: usize) -> Vec<u8> {
    let header = Header::new(Opcode::from_byte(0x04).expect("SEND ONLY"), qpn, number).encode();
    let mut packet = header.as_slice().to_vec();
    packet.resize(bytes, number as u8);
    packet
}

/// Sends one packet, as often as it takes.
pub fn send(udp: &mut Udp, to: PeerIndex, flow: u32, bytes: &[u8]) {
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        let route = PacketRoute { qpn: dest_qpn(bytes), ..route(to, flow, 0) };
        if let Some(place) = udp.reserve(route, bytes.len()) {
            place.copy_from_slice(bytes);
            return udp.commit();
        }
        assert!(Instant::now() < deadline, "no room to send: {:?}", udp.counters());
        udp.flush();
    }
}

/// Receives until `count` packets were handed over or counted as bad.
pub fn receive(udp: &mut Udp, count: usize, mut each: impl FnMut(Received<'_>)) {
    let deadline = Instant::now() + WAIT_MAX;
    let mut left = count;
    loop {
        left = left.saturating_sub(udp.receive(64, &mut each));
        if left == 0 {
            return;
        }
        assert!(Instant::now() < deadline, "{left} of {count} packets did not come: {:?}", udp.counters());
        let mut fds: Vec<_> = udp.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let wait = Timespec { tv_sec: 1, tv_nsec: 0 };
        poll(&mut fds, Some(&wait)).expect("poll");
    }
}

/// PSNs of `count` packets, in order of arrival.
pub fn receive_numbers(udp: &mut Udp, count: usize) -> Vec<u32> {
    let mut numbers = Vec::new();
    receive(udp, count, |received| numbers.push(Header::parse(received.packet).expect("header").0.psn));
    numbers
}
