//! Counters of the wire under their names.
use crate::dataplane::meters::{add_named, merge_pages};
use crate::dataplane::worker::Worker;
use freeflow_backend::{Faults, PeerIndex};
use freeflow_engine::{Drops, QpWireStatus, WireCounters};
use freeflow_protocol::admin::{Named, WireFaults, WireHost, WireQp, WireStatus};
use std::collections::BTreeMap;

/// QPs of one page: each takes some hundred bytes.
const PAGE_QPS_MAX: usize = 64;
/// Hosts that are listed.
const PAGE_HOSTS_MAX: usize = 1100;

fn named<const COUNT: usize>(counts: [(&str, u64); COUNT]) -> Vec<Named> {
    counts.into_iter().filter(|&(_, count)| count != 0).map(|(name, count)| (name.to_owned(), count)).collect()
}

/// By the names of rdma-core's hw_counters where there is one.
pub fn names(counters: &WireCounters) -> Vec<Named> {
    named([
        ("sent_pkts", counters.packets_sent),
        ("sent_bytes", counters.bytes_sent),
        ("rcvd_pkts", counters.packets_received),
        ("rcvd_bytes", counters.bytes_received),
        ("retransmitted_pkts", counters.packets_retransmitted),
        ("duplicate_request", counters.duplicate_requests),
        ("out_of_seq_request", counters.out_of_sequence),
        ("send_rnr_err", counters.rnr_naks_sent),
        ("send_seq_err", counters.sequence_naks_sent),
        ("rcvd_rnr_err", counters.rnr_naks_received),
        ("rcvd_seq_err", counters.sequence_naks_received),
        ("implied_nak_seq_err", counters.implied_naks),
        ("local_ack_timeout_err", counters.ack_timeouts),
        ("probes_sent", counters.probes_sent),
        ("acks_sent", counters.acks_sent),
        ("acks_rcvd", counters.acks_received),
        ("ack_deferred", counters.acks_deferred),
        ("acks_with_answers", counters.acks_with_answers),
        ("retry_exceeded_err", counters.retries_exceeded),
        ("retry_rnr_exceeded_err", counters.rnr_retries_exceeded),
        ("lost_messages", counters.lost),
        ("rcvd_ecn_marked", counters.congestion_marks),
    ])
}

/// `mads_lost`: management datagrams, in either direction.
pub(crate) fn drop_names(drops: &Drops, mads_lost: u64) -> Vec<Named> {
    named([
        ("malformed", drops.malformed),
        ("wrong_pkey", drops.wrong_pkey),
        ("wrong_qkey", drops.wrong_qkey),
        ("denied", drops.denied),
        ("unknown_qpn", drops.unknown_qpn),
        ("wrong_source", drops.wrong_source),
        ("wrong_network", drops.wrong_network),
        ("wrong_service", drops.wrong_service),
        ("wrong_state", drops.wrong_state),
        ("parked_overflow", drops.parked_overflow),
        ("no_receive", drops.no_receive),
        ("lost_management", mads_lost),
    ])
}

/// Packets that the sockets dropped because of what sealed hosts agreed on.
pub(crate) fn seal_drop_names(counters: &freeflow_backend::WireCounters) -> Vec<Named> {
    named([
        ("unsealed", counters.unsealed),
        ("unknown_key", counters.unknown_key),
        ("wrong_shard", counters.wrong_shard),
        ("replayed", counters.replayed),
        ("bad_tag", counters.bad_tag),
    ])
}

fn socket_names(counters: &freeflow_backend::WireCounters) -> Vec<Named> {
    let own = named([
        ("packets_sent", counters.packets_sent),
        ("bytes_sent", counters.bytes_sent),
        ("batches_sent", counters.batches_sent),
        ("packets_received", counters.packets_received),
        ("bytes_received", counters.bytes_received),
        ("batches_received", counters.batches_received),
        ("bad_icrc", counters.bad_icrc),
        ("unwanted_frames", counters.unwanted_frames),
        ("truncated", counters.truncated),
        ("unknown_source", counters.unknown_source),
        ("receive_overflow", counters.receive_overflow),
        ("receive_errors", counters.receive_errors),
        ("unknown_peer", counters.unknown_peer),
        ("no_key", counters.no_key),
        ("keys_used", counters.keys_used),
        ("send_blocked", counters.send_blocked),
        ("send_dropped", counters.send_dropped),
        ("send_too_long", counters.send_too_long),
        ("send_unreachable", counters.send_unreachable),
        ("send_no_buffers", counters.send_no_buffers),
        ("send_denied", counters.send_denied),
        ("send_other", counters.send_other),
        ("send_memory_gone", counters.send_memory_gone),
        ("segmentation_refused", counters.segmentation_refused),
        ("injected_loss", counters.injected_loss),
        ("injected_duplicates", counters.injected_duplicates),
        ("injected_reorders", counters.injected_reorders),
        ("injected_delays", counters.injected_delays),
        ("injected_corruption", counters.injected_corruption),
        ("injected_overflow", counters.injected_overflow),
    ]);
    [own, seal_drop_names(counters)].concat()
}

/// As the backend takes them.
pub fn faults_of(faults: &WireFaults) -> Faults {
    let WireFaults { seed, loss_ppm, duplicate_ppm, reorder_ppm, delay_ppm, delay_ns, corrupt_ppm } = *faults;
    Faults { seed, loss_ppm, duplicate_ppm, reorder_ppm, delay_ppm, delay_ns, corrupt_ppm }
}

fn describe(qp: &QpWireStatus) -> WireQp {
    WireQp {
        qpn: qp.qpn.0,
        dest_qpn: qp.dest_qpn.0,
        host: qp.host.0,
        window_bytes: qp.window_bytes,
        in_flight_bytes: qp.in_flight_bytes,
        smoothed_rtt_ns: qp.smoothed_rtt_ns,
        counters: names(&qp.counters),
    }
}

/// The status of all shards, and whether there are more QPs than are on the page.
pub(crate) fn merge_wire(of_shards: Vec<(WireStatus, bool)>) -> (WireStatus, bool) {
    let mut pages = Vec::new();
    let statuses: Vec<WireStatus> = (of_shards.into_iter())
        .map(|(mut status, more)| {
            pages.push((std::mem::take(&mut status.qps), more));
            status
        })
        .collect();
    let mut statuses = statuses.into_iter();
    let Some(mut sum) = statuses.next() else { return Default::default() };
    let mut places: BTreeMap<_, usize> = sum.hosts.iter().enumerate().map(|(at, host)| (host.address, at)).collect();
    for more in statuses {
        add_named(&mut sum.counters, more.counters);
        add_named(&mut sum.drops, more.drops);
        for host in more.hosts {
            // External hosts have numbers of each shard's own.
            match places.get(&host.address).and_then(|at| sum.hosts.get_mut(*at)) {
                Some(known) => {
                    known.qp_count += host.qp_count;
                    add_named(&mut known.counters, host.counters);
                }
                None => {
                    places.insert(host.address, sum.hosts.len());
                    sum.hosts.push(host);
                }
            }
        }
    }
    let more_qps;
    (sum.qps, more_qps) = merge_pages(pages, |qp| qp.qpn, PAGE_QPS_MAX);
    (sum, more_qps)
}

impl Worker {
    /// And whether there are more QPs than are on its page.
    pub(crate) fn wire_status(&self, after_qpn: Option<u32>) -> (WireStatus, bool) {
        let fabric = &self.ports.fabric;
        let Some(udp) = &fabric.udp else { return Default::default() };
        let mut qps: Vec<QpWireStatus> = self.engine.wire_qps().collect();
        qps.sort_unstable_by_key(|qp| qp.qpn);
        let mut sums: BTreeMap<u32, (u32, Vec<Named>)> = BTreeMap::new();
        for qp in &qps {
            let (count, sum) = sums.entry(qp.host.0).or_default();
            *count += 1;
            add_named(sum, names(&qp.counters));
        }
        let mut page: Vec<WireQp> = qps
            .iter()
            .filter(|qp| after_qpn.is_none_or(|after| qp.qpn.0 > after))
            .take(PAGE_QPS_MAX + 1)
            .map(describe)
            .collect();
        let more_qps = page.len() > PAGE_QPS_MAX;
        page.truncate(PAGE_QPS_MAX);
        let hosts = fabric.hosts().take(if after_qpn.is_none() { PAGE_HOSTS_MAX } else { 0 });
        let hosts = hosts.map(|(id, address, external)| {
            let peer = udp.peer(PeerIndex(id.0));
            let (mtu, frame_bytes) = peer.map_or((0, 0), |peer| (peer.path_mtu_bytes, peer.frame_bytes));
            let sealed = peer.is_some_and(|peer| peer.sealed);
            let (qp_count, counters) = sums.remove(&id.0).unwrap_or_default();
            WireHost { number: id.0, address, external, mtu, frame_bytes, sealed, qp_count, counters }
        });
        let mut counters = socket_names(udp.counters());
        if let Some(siblings) = &fabric.siblings {
            counters.extend(named([("strays", siblings.strays), ("strays_lost", siblings.strays_lost)]));
        }
        let status = WireStatus {
            open: true,
            address: udp.config().addresses.first().copied(),
            hosts: hosts.collect(),
            counters,
            drops: drop_names(&self.engine.drops(), fabric.mads_lost),
            faults: fabric.faults,
            qps: page,
        };
        (status, more_qps)
    }
}
