//! Two routers in this process, on two addresses of the loopback interface: bytes go between them as RoCEv2.
mod common;

use common::*;
use freeflow_protocol::admin::{AdminReply, AdminRequest, Named, WireFaults, WireStatus};
use freeflow_router::peers::key_text;
use freeflow_router::{Config, Mode, Router, WireOptions};
use freeflow_shm::{SendDescriptor, fd};
use freeflow_verbs::{CompletionOpcode, CompletionStatus, QpType, SendOpcode, VnicLimits};
use std::fs::{File, Permissions};
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;

const WORDS: usize = 100_000;
const BYTES: u32 = WORDS as u32 * 8;
/// `ibv_qp_attr::timeout`: 4.096 us · 2^14, 67 ms.
const TIMEOUT: u8 = 14;
/// UDP port 4791 is there once on each address: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Two hosts that know each other.
struct Hosts {
    hosts: [Host; 2],
}

fn address_of(host: usize) -> String {
    format!("127.0.0.{}", 2 + host)
}

fn start(host: usize, keys: &[snow::Keypair; 2], wire: WireOptions) -> Host {
    let directory = Directory::new();
    let other = 1 - host;
    let key_file = directory.0.join("host.key");
    let own: [u8; 32] = keys[host].private.as_slice().try_into().unwrap();
    std::fs::write(&key_file, key_text(&own)).unwrap();
    std::fs::set_permissions(&key_file, Permissions::from_mode(0o600)).unwrap();
    let public: [u8; 32] = keys[other].public.as_slice().try_into().unwrap();
    let peers = directory.0.join("peers.json");
    let text = format!(
        r#"{{"host": "h{host}", "address": "{}", "key_file": "host.key", "peers": [
            {{"host": "h{other}", "address": "{}", "public_key": "{}", "prefixes": ["10.111.{other}.0/24"]}}]}}"#,
        address_of(host),
        address_of(other),
        key_text(&public)
    );
    std::fs::write(&peers, text).unwrap();
    std::fs::set_permissions(&peers, Permissions::from_mode(0o600)).unwrap();
    let config = Config {
        mode: Mode::Adaptive,
        range: Some(format!("10.111.{host}.0/24").parse().unwrap()),
        peers: Some(peers),
        wire,
        ..config(&directory.0, VnicLimits::default())
    };
    let router = Router::start(config).unwrap();
    Host { directory, router: Some(router) }
}

impl Hosts {
    fn new() -> Self {
        Self::with(&WireOptions::default())
    }

    fn with(wire: &WireOptions) -> Self {
        let keypair = || {
            let pattern = "Noise_KK_25519_ChaChaPoly_BLAKE2s".parse().unwrap();
            snow::Builder::new(pattern).generate_keypair().unwrap()
        };
        let keys = [keypair(), keypair()];
        let hosts = Self { hosts: [start(0, &keys, wire.clone()), start(1, &keys, wire.clone())] };
        for host in 0..2 {
            until("the hosts to find each other", || (hosts.wire(host).hosts.len() == 1).then_some(()));
        }
        hosts
    }

    fn wire(&self, host: usize) -> WireStatus {
        match self.hosts[host].admin(&AdminRequest::WireStatus { after_qpn: None }) {
            AdminReply::Wire(status) => status,
            other => panic!("{other:?}"),
        }
    }
}

fn count(named: &[Named], name: &str) -> u64 {
    named.iter().find(|(known, _)| known == name).map_or(0, |(_, count)| *count)
}

/// A client on each, and connected QPs.
struct Apart {
    hosts: Hosts,
    a: Client,
    a_cq: Cq,
    a_qp: Qp,
    b: Client,
    b_cq: Cq,
    b_qp: Qp,
}

impl Apart {
    fn new(hosts: Hosts, service: QpType) -> Self {
        let (mut a, mut b) = (hosts.hosts[0].client("a"), hosts.hosts[1].client("b"));
        let (a_cq, b_cq) = (a.create_cq(64, None), b.create_cq(64, None));
        let (a_qp, b_qp) = (a.create_qp(service, &a_cq), b.create_qp(service, &b_cq));
        a.connect_rc(&a_qp, b.gid(), b_qp.qpn, TIMEOUT);
        b.connect_rc(&b_qp, a.gid(), a_qp.qpn, TIMEOUT);
        Self { hosts, a, a_cq, a_qp, b, b_cq, b_qp }
    }
}

/// All operations of RC, from memory of one kind to memory of the other.
fn operations(pair: &mut Apart, from_shared: bool, to_shared: bool) {
    let from = pair.a.memory(WORDS, from_shared);
    let to = pair.b.memory(WORDS, to_shared);

    from.fill(WORDS, 3);
    pair.b.post_receive(&mut pair.b_qp, 11, &[to.sge(0, BYTES)]);
    pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[from.sge(0, BYTES)]));
    let received = pair.b_cq.wait();
    assert_eq!((received.status, received.opcode), (CompletionStatus::Success, CompletionOpcode::Receive));
    assert_eq!((received.work_request_id, received.byte_count), (11, BYTES));
    assert!(to.is_filled(WORDS, 3));
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);

    from.fill(WORDS, 5);
    let sges = [from.sge(0, 8), from.sge(8, BYTES - 16), from.sge(u64::from(BYTES) - 8, 8)];
    let remote = SendDescriptor { remote_address: to.address, rkey: to.mr.rkey, ..request(SendOpcode::RdmaWrite, &[]) };
    pair.a.post_send(&mut pair.a_qp, &SendDescriptor { sges: &sges, ..remote });
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    assert!(to.is_filled(WORDS, 5));

    to.fill(WORDS, 9);
    let sges = [from.sge(0, BYTES)];
    pair.a.post_send(&mut pair.a_qp, &SendDescriptor { opcode: SendOpcode::RdmaRead, sges: &sges, ..remote });
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    assert!(from.is_filled(WORDS, 9));

    to.word(2).store(40, Relaxed);
    let sges = [from.sge(0, 8)];
    let at = SendDescriptor { opcode: SendOpcode::FetchAdd, remote_address: to.address + 16, sges: &sges, ..remote };
    pair.a.post_send(&mut pair.a_qp, &SendDescriptor { compare_add: 2, ..at });
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    assert_eq!((from.word(0).load(Relaxed), to.word(2).load(Relaxed)), (40, 42));
}

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[test]
fn every_operation_over_every_kind_of_memory() {
    let _alone = alone();
    let mut pair = Apart::new(Hosts::new(), QpType::Rc);
    for (from_shared, to_shared) in [(true, true), (true, false), (false, true), (false, false)] {
        operations(&mut pair, from_shared, to_shared);
    }
    let wire = pair.hosts.wire(0);
    assert!(count(&wire.hosts[0].counters, "sent_bytes") >= 8 * u64::from(BYTES), "{wire:?}");
    // More can be on the way than waits for memory that only a helper reaches.
    let drops = [pair.hosts.wire(0).drops, pair.hosts.wire(1).drops].concat();
    assert!(drops.iter().all(|(name, _)| name == "parked_overflow"), "{drops:?}");
    assert_eq!((wire.qps.len(), wire.qps[0].dest_qpn), (1, pair.b_qp.qpn));
}

#[test]
fn the_same_without_segmentation_offload_and_under_faults() {
    let _alone = alone();
    let faults = WireFaults {
        seed: 7,
        loss_ppm: 2_000,
        duplicate_ppm: 5_000,
        reorder_ppm: 5_000,
        corrupt_ppm: 1_000,
        ..WireFaults::default()
    };
    let wire = WireOptions { gso: false, gro: false, faults: Some(faults), ..WireOptions::default() };
    let mut pair = Apart::new(Hosts::with(&wire), QpType::Rc);
    for (from_shared, to_shared) in [(true, true), (false, false)] {
        operations(&mut pair, from_shared, to_shared);
    }
    assert!(count(&pair.hosts.wire(0).counters, "injected_loss") > 0);
    assert_eq!(pair.hosts.hosts[0].admin(&AdminRequest::SetWireFaults { faults: None }), AdminReply::Done);
    assert_eq!(pair.hosts.wire(0).faults, None);
}

#[test]
fn a_qp_that_is_not_connected_back_is_not_reached() {
    let _alone = alone();
    let hosts = Hosts::new();
    let (mut a, mut b) = (hosts.hosts[0].client("a"), hosts.hosts[1].client("b"));
    let (mut a_cq, b_cq) = (a.create_cq(64, None), b.create_cq(64, None));
    let (mut a_qp, mut b_qp) = (a.create_qp(QpType::Rc, &a_cq), b.create_qp(QpType::Rc, &b_cq));
    a.connect_rc(&a_qp, b.gid(), b_qp.qpn, TIMEOUT);
    // Ready to receive, but from another QP.
    b.connect_rc(&b_qp, a.gid(), a_qp.qpn ^ 1, TIMEOUT);
    let (from, to) = (a.memory(8, true), b.memory(8, true));
    b.post_receive(&mut b_qp, 1, &[to.sge(0, 64)]);
    a.post_send(&mut a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
    assert_eq!(a_cq.wait().status, CompletionStatus::RetryExceeded);
    assert_eq!(count(&hosts.wire(0).counters, "packets_sent"), 0);
}

#[test]
fn a_capture_has_the_packets() {
    let _alone = alone();
    let mut pair = Apart::new(Hosts::new(), QpType::Rc);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let socket = fd::connect_seqpacket(pair.hosts.hosts[0].run_dir().join("admin.sock")).unwrap();
    let request_bytes =
        freeflow_protocol::encode(&AdminRequest::Capture { packet_count_max: Some(2), seconds_max: Some(30) });
    fd::send_message(&socket, &request_bytes, &[writer.as_fd()]).unwrap();
    drop(writer);
    // The header says that it has begun; the worker shows its packets two requests later.
    let mut reader = File::from(reader);
    let mut head = [0; 4];
    reader.read_exact(&mut head).unwrap();
    assert_eq!(head, [0x0a, 0x0d, 0x0d, 0x0a]);
    pair.a.settle();
    let (from, to) = (pair.a.memory(8, true), pair.b.memory(8, true));
    from.fill(8, 0x0123_4567_89ab_cdef);
    pair.b.post_receive(&mut pair.b_qp, 1, &[to.sge(0, 64)]);
    pair.a.post_send(&mut pair.a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
    assert_eq!(pair.a_cq.wait().status, CompletionStatus::Success);
    let mut rest = Vec::new();
    reader.read_to_end(&mut rest).unwrap();
    let payload = 0x0123_4567_89ab_cdef_u64.to_ne_bytes();
    assert!(rest.windows(8).any(|window| window == payload), "{} bytes", rest.len());
    let mut reply = Vec::new();
    fd::receive_message(&socket, &mut reply, 0).unwrap();
    let reply: AdminReply = freeflow_protocol::decode(&reply).unwrap();
    assert_eq!(reply, AdminReply::Captured { packets: 2, lost: 0, error: None });
}
