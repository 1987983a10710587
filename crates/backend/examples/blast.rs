//! How fast packets go between two network namespaces over a veth pair: one thread sends RoCEv2-like packets through a
//! window, another receives, checks the ICRC, copies the payload and acknowledges. Needs root and `ip`.
//!
//! `blast [SECONDS]`: a line for each packet size and setting. `blast SECONDS BYTES MTU plain|icrc
//! gso|single gro|no-gro`: that one only.
#[path = "../tests/lab/mod.rs"]
mod lab;

use freeflow_backend::{Peer, Udp, UdpConfig};
use lab::{Namespace, PEER, config, peer, route, veth};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Unacknowledged bytes at most.
const WINDOW_BYTES: u64 = 1 << 20;
const ACK_EVERY_BYTES: u64 = 120_000;
/// Memory that payload comes from and goes to, round and round.
const MEMORY_BYTES: usize = 8 << 20;
const HEADER_BYTES: usize = 12;

#[derive(Clone, Copy)]
struct Setting {
    bytes: usize,
    mtu: u32,
    icrc: bool,
    gso: bool,
    gro: bool,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let seconds = arguments.first().map_or(1.0, |text| text.parse().expect("seconds"));
    let settings = match &arguments[..] {
        [_, bytes, mtu, icrc, gso, gro] => vec![Setting {
            bytes: bytes.parse().expect("bytes"),
            mtu: mtu.parse().expect("MTU"),
            icrc: icrc == "icrc",
            gso: gso == "gso",
            gro: gro == "gro",
        }],
        _ => {
            let mut all = Vec::new();
            for (bytes, mtu) in [(1040, 1500), (1040, 4200), (4112, 4200)] {
                for (icrc, gso, gro) in
                    [(true, true, true), (false, true, true), (true, true, false), (true, false, false)]
                {
                    all.push(Setting { bytes, mtu, icrc, gso, gro });
                }
            }
            all
        }
    };
    for setting in settings {
        measure(setting, seconds);
    }
}

fn measure(setting: Setting, seconds: f64) {
    let (a, b) = veth(setting.mtu);
    let open = |namespace: &Namespace, local: &str, remote: &str| {
        let mut udp = namespace.open(UdpConfig { gso: setting.gso, gro: setting.gro, ..config(local) });
        udp.set_peer(PEER, Peer { icrc: setting.icrc, ..peer(local, remote) }).expect("peer");
        udp
    };
    let mut from = open(&a, "10.0.0.1", "10.0.0.2");
    let mut to = open(&b, "10.0.0.2", "10.0.0.1");
    let stop = AtomicBool::new(false);
    let (got, took) = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| receive(&mut to, &stop));
        send(&mut from, setting.bytes, Duration::from_secs_f64(seconds));
        stop.store(true, Ordering::Relaxed);
        receiver.join().expect("receiver")
    });
    let counters = *to.counters();
    println!(
        "{} B, MTU {}, ICRC {}, GSO {}, GRO {}: {:.2} Gb/s, {:.2} M packets/s, {:.1} packets a send, {:.1} a receive, lost {}, bad {}",
        setting.bytes,
        setting.mtu,
        u8::from(setting.icrc),
        u8::from(setting.gso),
        u8::from(setting.gro),
        got as f64 * 8.0 / took / 1e9,
        counters.packets_received as f64 / took / 1e6,
        from.counters().packets_sent as f64 / from.counters().batches_sent as f64,
        counters.packets_received as f64 / counters.batches_received as f64,
        counters.receive_overflow,
        counters.bad_icrc + counters.truncated + counters.unknown_source,
    );
}

/// In pieces below the length from which memcpy takes `rep movsb`.
fn copy(to: &mut [u8], from: &[u8]) {
    for (to, from) in to.chunks_mut(1024).zip(from.chunks(1024)) {
        to.copy_from_slice(from);
    }
}

fn pin(core: usize) {
    let mut set = CpuSet::new();
    set.set(core);
    let _ = sched_setaffinity(None, &set);
}

/// Sends within the window. An acknowledgement says in its first eight bytes behind the BTH how much has come.
fn send(udp: &mut Udp, bytes: usize, time: Duration) {
    pin(0);
    let memory = vec![7_u8; MEMORY_BYTES];
    let header = lab::packet(1, HEADER_BYTES);
    let (start, payload, mut at) = (Instant::now(), bytes - HEADER_BYTES, 0);
    let (mut sent, mut acknowledged, mut progress) = (0_u64, 0_u64, start);
    while start.elapsed() < time {
        udp.receive(64, &mut |received| {
            let count = received.packet[HEADER_BYTES..].first_chunk::<8>().expect("count");
            acknowledged = acknowledged.max(u64::from_le_bytes(*count));
            progress = Instant::now();
        });
        // Lost packets are never acknowledged: go on after a while.
        if progress.elapsed() > Duration::from_millis(50) {
            acknowledged = sent;
            progress = Instant::now();
        }
        // As much as fills the window, a super-packet at a time.
        for _ in 0..(65_000 / bytes) {
            if sent - acknowledged + bytes as u64 > WINDOW_BYTES {
                std::hint::spin_loop();
                break;
            }
            let Some(place) = udp.reserve(route(PEER, 7, 0), bytes) else { break };
            place[..HEADER_BYTES].copy_from_slice(&header);
            copy(&mut place[HEADER_BYTES..], &memory[at..at + payload]);
            udp.commit();
            sent += bytes as u64;
            at = if at + 2 * payload > MEMORY_BYTES { 0 } else { at + payload };
        }
        udp.flush();
    }
}

/// Receives; gives the bytes and the seconds from the first to the last.
fn receive(udp: &mut Udp, stop: &AtomicBool) -> (u64, f64) {
    pin(1);
    let mut memory = vec![1_u8; MEMORY_BYTES];
    let (mut total, mut acknowledged, mut at, mut first) = (0_u64, 0_u64, 0, None);
    while !stop.load(Ordering::Relaxed) {
        udp.receive(64, &mut |received| {
            let payload = &received.packet[HEADER_BYTES..];
            if at + payload.len() > MEMORY_BYTES {
                at = 0;
            }
            copy(&mut memory[at..at + payload.len()], payload);
            at += payload.len();
            total += received.packet.len() as u64;
        });
        if total > 0 && first.is_none() {
            first = Some(Instant::now());
        }
        if total - acknowledged >= ACK_EVERY_BYTES
            && let Some(place) = udp.reserve(route(PEER, 7, 0), HEADER_BYTES + 8)
        {
            place[..HEADER_BYTES].fill(0);
            place[HEADER_BYTES..].copy_from_slice(&total.to_le_bytes());
            udp.commit();
            udp.flush();
            acknowledged = total;
        }
    }
    (total, first.map_or(1.0, |first: Instant| first.elapsed().as_secs_f64()))
}
