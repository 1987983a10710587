//! Two routers in this process, on two addresses of the loopback interface: bytes go between them as RoCEv2.
use crate::common::hosts::{Hosts, alone};
use crate::common::*;
use freeflow_protocol::admin::{AdminReply, AdminRequest, Named, WireFaults};
use freeflow_router::WireOptions;
use freeflow_shm::{SendDescriptor, fd};
use freeflow_verbs::{CompletionOpcode, CompletionStatus, QpType, SendOpcode};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

const WORDS: usize = 100_000;
const BYTES: u32 = WORDS as u32 * 8;
/// `ibv_qp_attr::timeout`: 4.096 us · 2^14, 67 ms.
const TIMEOUT: u8 = 14;
/// 1 s: a peer may be off its processor for a while.
const PATIENT: u8 = 18;

pub fn count(named: &[Named], name: &str) -> u64 {
    named.iter().find(|(known, _)| known == name).map_or(0, |(_, count)| *count)
}

/// A client on each, and connected QPs.
pub struct Apart {
    pub hosts: Hosts,
    pub a: Client,
    pub a_cq: Cq,
    pub a_qp: Qp,
    pub b: Client,
    pub b_cq: Cq,
    pub b_qp: Qp,
}

impl Apart {
    pub fn new(hosts: Hosts, service: QpType) -> Self {
        Self::named(hosts, service, ["a", "b"])
    }

    pub fn named(hosts: Hosts, service: QpType, names: [&str; 2]) -> Self {
        let (mut a, mut b) = (hosts.hosts[0].client(names[0]), hosts.hosts[1].client(names[1]));
        let (a_cq, b_cq) = (a.create_cq(64, None), b.create_cq(64, None));
        let (a_qp, b_qp) = (a.create_qp(service, &a_cq), b.create_qp(service, &b_cq));
        a.connect_rc(&a_qp, b.gid(), b_qp.qpn, PATIENT);
        b.connect_rc(&b_qp, a.gid(), a_qp.qpn, PATIENT);
        Self { hosts, a, a_cq, a_qp, b, b_cq, b_qp }
    }
}

/// All operations of RC, from memory of one kind to memory of the other.
pub fn operations(pair: &mut Apart, from_shared: bool, to_shared: bool) {
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
    pair.a.release(from);
    pair.b.release(to);
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
    let run_dir = pair.hosts.hosts[0].run_dir();
    assert_eq!(rest(&run_dir, "DELETE", &host_path(&run_dir, "wire/faults"), "").0, 200);
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
