//! The wire: what the REST server shows of it, the faults that it sets, and captures.
use crate::audit::Who;
use crate::base::log::info;
use crate::base::slab::Key;
use crate::control::admin::AdminDone;
use crate::control::admin_audit::faults_text;
use crate::control::thread::Control;
use crate::control::vnics::failed_io;
use crate::dataplane::capture::{self, Limits, Outcome};
use crate::dataplane::worker::Worker;
use freeflow_backend::{Faults, PeerIndex};
use freeflow_engine::{Drops, QpWireStatus, WireCounters};
use freeflow_orchestrator::{Reason, Refusal};
use freeflow_protocol::admin::{AdminErrorCode, AdminReply, Named, WireFaults, WireHost, WireQp, WireStatus};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Its verb in the audit log.
const CAPTURE: &str = "capture";
/// QPs of one page: each takes some hundred bytes.
const PAGE_QPS_MAX: usize = 64;
/// Hosts that are listed.
const PAGE_HOSTS_MAX: usize = 300;
/// Longest capture, seconds: a year.
const SECONDS_MAX: u64 = 366 * 86_400;

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

fn socket_names(counters: &freeflow_backend::WireCounters) -> Vec<Named> {
    named([
        ("packets_sent", counters.packets_sent),
        ("bytes_sent", counters.bytes_sent),
        ("batches_sent", counters.batches_sent),
        ("packets_received", counters.packets_received),
        ("bytes_received", counters.bytes_received),
        ("batches_received", counters.batches_received),
        ("bad_icrc", counters.bad_icrc),
        ("truncated", counters.truncated),
        ("unknown_source", counters.unknown_source),
        ("receive_overflow", counters.receive_overflow),
        ("receive_errors", counters.receive_errors),
        ("unknown_peer", counters.unknown_peer),
        ("send_blocked", counters.send_blocked),
        ("send_dropped", counters.send_dropped),
        ("send_too_long", counters.send_too_long),
        ("send_unreachable", counters.send_unreachable),
        ("send_no_buffers", counters.send_no_buffers),
        ("send_denied", counters.send_denied),
        ("send_other", counters.send_other),
        ("segmentation_refused", counters.segmentation_refused),
        ("injected_loss", counters.injected_loss),
        ("injected_duplicates", counters.injected_duplicates),
        ("injected_reorders", counters.injected_reorders),
        ("injected_delays", counters.injected_delays),
        ("injected_corruption", counters.injected_corruption),
        ("injected_overflow", counters.injected_overflow),
    ])
}

fn add(sum: &mut Vec<Named>, more: Vec<Named>) {
    for (name, count) in more {
        match sum.iter_mut().find(|(known, _)| *known == name) {
            Some((_, total)) => *total += count,
            None => sum.push((name, count)),
        }
    }
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

impl Worker {
    /// And whether there are more QPs than are on its page.
    fn wire_status(&self, after_qpn: Option<u32>) -> (WireStatus, bool) {
        let fabric = &self.rings.fabric;
        let Some(udp) = &fabric.udp else { return Default::default() };
        let mut qps: Vec<QpWireStatus> = self.engine.wire_qps().collect();
        qps.sort_unstable_by_key(|qp| qp.qpn);
        let mut sums: BTreeMap<u32, (u32, Vec<Named>)> = BTreeMap::new();
        for qp in &qps {
            let (count, sum) = sums.entry(qp.host.0).or_default();
            *count += 1;
            add(sum, names(&qp.counters));
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
            let mtu = udp.peer(PeerIndex(id.0)).map_or(0, |peer| peer.path_mtu_bytes);
            let (qp_count, counters) = sums.remove(&id.0).unwrap_or_default();
            WireHost { number: id.0, address, external, mtu, qp_count, counters }
        });
        let status = WireStatus {
            open: true,
            address: udp.config().addresses.first().copied(),
            hosts: hosts.collect(),
            counters: socket_names(udp.counters()),
            drops: drop_names(&self.engine.drops(), fabric.mads_lost),
            faults: fabric.faults,
            qps: page,
        };
        (status, more_qps)
    }

    /// False: there are no sockets.
    pub(crate) fn set_wire_faults(&mut self, faults: Option<WireFaults>) -> bool {
        let Some(udp) = &mut self.rings.fabric.udp else { return false };
        udp.set_faults(faults.as_ref().map(faults_of));
        self.rings.fabric.faults = faults;
        true
    }
}

fn log_faults(faults: Option<WireFaults>) {
    let Some(faults) = faults else { return info!("no faults of the wire any more") };
    let WireFaults { seed, loss_ppm, duplicate_ppm, reorder_ppm, delay_ppm, delay_ns, corrupt_ppm } = faults;
    info!(
        "faults of the wire",
        seed = seed,
        loss_ppm = loss_ppm,
        duplicate_ppm = duplicate_ppm,
        reorder_ppm = reorder_ppm,
        delay_ppm = delay_ppm,
        delay_ns = delay_ns,
        corrupt_ppm = corrupt_ppm
    );
}

fn no_wire() -> Refusal {
    Refusal::new(Reason::Invalid, "this router has no other hosts; bring the host up with freeflow up --peers FILE")
}

impl Control {
    /// What goes between hosts, with a page of the QPs after a number, and whether there are more.
    pub(crate) fn wire_status(
        &mut self,
        after_qpn: Option<u32>,
        finish: impl FnOnce((WireStatus, bool)) + Send + 'static,
    ) {
        self.ask_worker(move |worker| worker.wire_status(after_qpn), |_, status| finish(status));
    }

    /// Loses, delays or spoils packets on purpose from now on; `None`: no more.
    pub(crate) fn set_wire_faults(
        &mut self,
        who: Who,
        faults: Option<WireFaults>,
        finish: impl FnOnce(Result<(), Refusal>) + Send + 'static,
    ) {
        let (outcome, detail) = match &faults {
            Some(faults) => ("begun", faults_text(faults)),
            None => ("ended", String::new()),
        };
        let ask = move |worker: &mut Worker| worker.set_wire_faults(faults);
        self.ask_worker(ask, move |control, set| {
            let result = if set { Ok(()) } else { Err(no_wire()) };
            if set {
                log_faults(faults);
            }
            control.note_result(who, "wire-faults", (outcome, detail), &result);
            finish(result);
        });
    }

    /// Begins a capture into `into`; the reply comes when it is over.
    pub(crate) fn capture(&mut self, key: Key, into: Option<OwnedFd>, most: (Option<u64>, Option<u64>)) -> AdminDone {
        let who = self.admin_who(key);
        let limit = |name: &str, most: Option<u64>| most.map(|most| format!("{name}={most}"));
        let limits = [limit("packets_max", most.0), limit("seconds_max", most.1)];
        match self.begin_capture(key, into, most, who.clone()) {
            None => {
                self.note_done(who, CAPTURE, "begun", limits.into_iter().flatten().collect::<Vec<_>>().join(" "));
                AdminDone::Later
            }
            Some(reply) => {
                self.note_reply(who, CAPTURE, ("begun", String::new()), &reply);
                AdminDone::Reply(reply)
            }
        }
    }

    /// What there is to answer at once: it could not be begun.
    fn begin_capture(
        &mut self,
        key: Key,
        into: Option<OwnedFd>,
        (packet_count_max, seconds_max): (Option<u64>, Option<u64>),
        who: Who,
    ) -> Option<AdminReply> {
        let failed = |code, message: &str| Some(AdminReply::Failed { code, message: message.into() });
        let Some(into) = into else { return failed(AdminErrorCode::Invalid, "no descriptor to write to came along") };
        if self.capturing {
            return failed(AdminErrorCode::AlreadyExists, "another capture is under way");
        }
        let time_max = seconds_max.map(|seconds| Duration::from_secs(seconds.min(SECONDS_MAX)));
        let limits = Limits { packet_count_max, time_max };
        let (reactions, waker) = (self.own_reactions.clone(), self.waker.clone());
        let done = move |outcome: Outcome| {
            // Fails only while the router ends.
            let _ = reactions.send(Box::new(move |control: &mut Control| control.finish_capture(key, who, outcome)));
            waker.wake();
        };
        let sink = match capture::start(File::from(into), "freeflow", limits, done) {
            Ok(sink) => sink,
            Err(error) => return Some(failed_io("can't begin a capture", &error)),
        };
        self.capturing = true;
        let mut sink = Some(sink);
        self.worker.submit(Box::new(move |worker, _| {
            // Without sockets it ends at once: the sink is dropped.
            if let Some(udp) = &mut worker.rings.fabric.udp {
                udp.set_capture(sink.take());
            }
            drop(sink.take());
            crate::dataplane::jobs::Step::Done(Box::new(|_| {}))
        }));
        None
    }

    fn finish_capture(&mut self, key: Key, who: Who, outcome: Outcome) {
        self.capturing = false;
        self.worker.submit(Box::new(|worker, _| {
            if let Some(udp) = &mut worker.rings.fabric.udp {
                udp.set_capture(None);
            }
            crate::dataplane::jobs::Step::Done(Box::new(|_| {}))
        }));
        let Outcome { packets, lost, error } = outcome;
        let error = error.map(|error| error.to_string());
        let why = error.as_ref().map_or(String::new(), |error| format!(" error={error:?}"));
        self.note_done(who, CAPTURE, "ended", format!("packets={packets} lost={lost}{why}"));
        self.finish_admin(key, AdminDone::Reply(AdminReply::Captured { packets, lost, error }));
    }
}
