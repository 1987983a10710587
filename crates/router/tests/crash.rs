//! Addresses over `kill -9` of the router at any instant while vNICs come and go: none twice, none
//! lost, none left behind.
mod common;

use common::process::Process;
use common::*;
use freeflow_protocol::admin::{AdminReply, AdminRequest, VnicStatus};
use freeflow_protocol::encode;
use freeflow_shm::fd;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

const OPTIONS: &[&str] = &["--pool", "10.111.0.0/26"];
const ROUNDS: u32 = 12;
const WRITERS: u32 = 3;
const IDS_EACH: u64 = 8;

/// A writer's knowledge of an id: the address it was answered; or nothing, since it was answered
/// that it is gone, or was answered nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Known {
    There(IpAddr),
    Gone,
    Unknown(Option<IpAddr>),
}

struct SimRng(u64);

impl SimRng {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// `None`: the router is no more.
fn ask(run_dir: &Path, request: &AdminRequest) -> Option<AdminReply> {
    let socket = fd::connect_seqpacket(run_dir.join("admin.sock")).ok()?;
    fd::send_message(&socket, &encode(request), &[]).ok()?;
    let mut bytes = Vec::new();
    match fd::receive_message(&socket, &mut bytes, 0) {
        Ok((0, _)) | Err(_) => None,
        Ok(_) => freeflow_protocol::decode(&bytes).ok(),
    }
}

fn write(
    run_dir: &Path,
    writer: u32,
    known: &mut BTreeMap<String, Known>,
    seed: u64,
    over: &AtomicBool,
    done: &AtomicU32,
) {
    let mut rng = SimRng(seed);
    while !over.load(SeqCst) {
        let id = format!("w{writer}-{}", rng.roll(IDS_EACH));
        let before = known.get(&id).copied();
        let request = match rng.roll(2) {
            0 => attach(&id),
            _ => AdminRequest::Detach { id: id.clone() },
        };
        let was = match before {
            Some(Known::There(address) | Known::Unknown(Some(address))) => Some(address),
            _ => None,
        };
        known.insert(id.clone(), Known::Unknown(was));
        let Some(reply) = ask(run_dir, &request) else { return };
        let now = match reply {
            AdminReply::Vnic(vnic) => {
                if let Some(Known::There(address)) = before {
                    assert_eq!(vnic.address, address, "{id} has another address");
                }
                Known::There(vnic.address)
            }
            AdminReply::Done => Known::Gone,
            other => panic!("{other:?}"),
        };
        known.insert(id, now);
        done.fetch_add(1, SeqCst);
    }
}

fn listed(run_dir: &Path) -> Vec<VnicStatus> {
    let (vnics, next) = vnic_page(run_dir, "");
    assert_eq!(next, "");
    vnics
}

fn check(run_dir: &Path, known: &mut BTreeMap<String, Known>) {
    let vnics = listed(run_dir);
    let addresses: BTreeSet<IpAddr> = vnics.iter().map(|vnic| vnic.address).collect();
    assert_eq!(addresses.len(), vnics.len(), "an address twice: {vnics:?}");
    let there: BTreeMap<&str, IpAddr> = vnics.iter().map(|vnic| (vnic.id.as_str(), vnic.address)).collect();
    for (id, known) in known.iter_mut() {
        let found = there.get(id.as_str()).copied();
        match *known {
            Known::There(address) => assert_eq!(found, Some(address), "{id} was answered"),
            Known::Gone => assert_eq!(found, None, "{id} was answered"),
            Known::Unknown(_) => {}
        }
        *known = found.map_or(Known::Gone, Known::There);
    }
    let directories: BTreeSet<String> = std::fs::read_dir(run_dir.join("vnics"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(directories, vnics.iter().map(|vnic| vnic.id.clone()).collect());
    for vnic in &vnics {
        let client = Client::connect(&Path::new(&vnic.directory).join("router.sock"));
        assert_eq!(client.gid(), freeflow_verbs::Gid::from_ip(vnic.address));
    }
}

#[test]
fn addresses_survive_the_death_of_the_router_at_any_instant() {
    let directory = Directory::new();
    let mut known: Vec<BTreeMap<String, Known>> = vec![BTreeMap::new(); WRITERS as usize];
    let mut rng = SimRng(20_261_122);
    for _ in 0..ROUNDS {
        let mut router = Process::start(&directory.0, OPTIONS);
        let run_dir = router.run_dir.clone();
        let mut all: BTreeMap<String, Known> = known.iter().flatten().map(|(id, known)| (id.clone(), *known)).collect();
        check(&run_dir, &mut all);
        for of_writer in &mut known {
            of_writer.iter_mut().for_each(|(id, known)| *known = all[id]);
        }
        let (over, done) = (AtomicBool::new(false), AtomicU32::new(0));
        let (seed, enough) = (rng.roll(u64::from(u32::MAX)), rng.roll(60) as u32);
        std::thread::scope(|scope| {
            for (writer, known) in known.iter_mut().enumerate() {
                let (run_dir, over, done) = (&run_dir, &over, &done);
                scope.spawn(move || write(run_dir, writer as u32, known, seed + writer as u64, over, done));
            }
            until("some answers", || (done.load(SeqCst) >= enough).then_some(()));
            router.signal(rustix::process::Signal::KILL);
            router.child.wait().unwrap();
            over.store(true, SeqCst);
        });
    }
}
