//! `/metrics`: what is counted, in the text form of Prometheus (version 0.0.4). `docs/metrics.txt` lists all of it.
//!
//! Of each vNIC there are some fifty lines, so only the first [`VNIC_COUNT_MAX`] of a host have
//! some; a gauge says how many have not. They are asked for a page at a time: the worker is never
//! held up for long.
use super::failure::Failure;
use super::follower::FollowerState;
use super::link::Link;
use super::meters::{HostMeter, NetworkMeter, Position, VnicMeter};
use super::plane::{CountQpPaths, PageMeters, ReadHostMeter};
use crate::admission::violations::ViolationClass;
use crate::dataplane::meters::PathCounts;
use crate::dataplane::reasons::Reason;
use crate::dataplane::totals::{PATHS, by_path};
use axum::http::HeaderName;
use axum::http::header::CONTENT_TYPE;
use freeflow_protocol::admin::QpPath;
use std::fmt::{Display, Write as _};

/// vNICs, networks, and pairs of a rule and a network, that have lines of their own.
const VNIC_COUNT_MAX: usize = 4096;
const NETWORK_COUNT_MAX: usize = 4096;
const REFUSED_COUNT_MAX: usize = 8192;

pub const HEADER: [(HeaderName, &str); 1] = [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];

/// Name, type, labels, help.
type Family = (&'static str, &'static str, &'static [&'static str], &'static str);

const OF_VNIC: &[&str] = &["tenant", "network", "vnic"];
const WITH_PATH: &[&str] = &["tenant", "network", "vnic", "path"];
const WITH_REASON: &[&str] = &["tenant", "network", "vnic", "path", "reason"];
const WITH_SLOW_REASON: &[&str] = &["tenant", "network", "vnic", "reason"];
const WITH_LIMIT: &[&str] = &["tenant", "network", "vnic", "limit", "resource"];
const OF_NETWORK: &[&str] = &["tenant", "network"];
const BY_PATH: &[&str] = &["tenant", "network", "path"];
const OF_RULE: &[&str] = &["rule", "tenant", "network"];

#[rustfmt::skip]
const FAMILIES: &[Family] = &[
    ("freeflow_vnic_sent_messages_total", "counter", WITH_PATH, "Requests completed with success, by path: direct (as libraries report), routed, wire"),
    ("freeflow_vnic_sent_bytes_total", "counter", WITH_PATH, "Their payload, READs too"),
    ("freeflow_vnic_out_bytes_total", "counter", OF_VNIC, "Payload that left the vNIC"),
    ("freeflow_vnic_in_bytes_total", "counter", OF_VNIC, "Payload that came to the vNIC"),
    ("freeflow_vnic_slow_path_accesses_total", "counter", WITH_SLOW_REASON, "Accesses to memory of its processes through /proc/PID/mem, by reason"),
    ("freeflow_vnic_slow_path_bytes_total", "counter", WITH_SLOW_REASON, "Bytes copied through /proc/PID/mem"),
    ("freeflow_vnic_blocked_copies_total", "counter", OF_VNIC, "Copies that blocked the worker in its shared memory"),
    ("freeflow_vnic_completions_with_error_total", "counter", OF_VNIC, "Completions with an error, flushes too"),
    ("freeflow_vnic_rnr_naks_total", "counter", OF_VNIC, "RNR NAKs that its requesters got"),
    ("freeflow_vnic_retries_exceeded_total", "counter", OF_VNIC, "Requests given up after all retries"),
    ("freeflow_vnic_remote_access_errors_total", "counter", OF_VNIC, "Requests of peers refused for their key"),
    ("freeflow_vnic_undeliverable_messages_total", "counter", OF_VNIC, "Messages with no reachable destination QP"),
    ("freeflow_vnic_malformed_descriptors_total", "counter", OF_VNIC, "Invalid descriptors in shared memory"),
    ("freeflow_vnic_malformed_messages_total", "counter", OF_VNIC, "Control messages refused as malformed"),
    ("freeflow_vnic_wire_sent_packets_total", "counter", OF_VNIC, "Packets sent to other hosts"),
    ("freeflow_vnic_wire_received_packets_total", "counter", OF_VNIC, "Packets received from other hosts"),
    ("freeflow_vnic_wire_retransmitted_packets_total", "counter", OF_VNIC, "Retransmitted packets"),
    ("freeflow_vnic_throttled_waits_total", "counter", OF_VNIC, "Rate-limit waits"),
    ("freeflow_vnic_throttled_seconds_total", "counter", OF_VNIC, "Seconds of rate-limit waits"),
    ("freeflow_vnic_quota_refusals_total", "counter", WITH_LIMIT, "Objects refused, by whose limit (vnic, network) and of what"),
    ("freeflow_vnic_sessions", "gauge", OF_VNIC, "Processes that use the vNIC"),
    ("freeflow_vnic_qps", "gauge", OF_VNIC, "Queue pairs"),
    ("freeflow_vnic_qps_by_path", "gauge", WITH_REASON, "Queue pairs by the path of their last request, and why that is not direct: as in freeflow ps --qps"),
    ("freeflow_vnic_cqs", "gauge", OF_VNIC, "Completion queues"),
    ("freeflow_vnic_mrs", "gauge", OF_VNIC, "Memory regions"),
    ("freeflow_vnic_registered_bytes", "gauge", OF_VNIC, "Registered memory"),
    ("freeflow_vnic_segment_bytes", "gauge", OF_VNIC, "Lengths of all shared memory that the router maps"),
    ("freeflow_vnic_ring_bytes", "gauge", OF_VNIC, "Of these, rings of QPs, CQs and SRQs, whose pages the router may have to pay for"),
    ("freeflow_vnic_heap_bytes", "gauge", OF_VNIC, "The router's heap for the vNIC, estimated by the number of objects"),
    ("freeflow_vnic_metered", "gauge", OF_VNIC, "1: a rate limit applies, and the direct path is off"),
    ("freeflow_vnic_info", "gauge", &["tenant", "network", "vnic", "container"], "The container that has the vNIC, if it has a name; always 1"),
    ("freeflow_network_sent_messages_total", "counter", BY_PATH, "Of all vNICs that the network had since the router began, those that are gone too: requests that completed with success"),
    ("freeflow_network_sent_bytes_total", "counter", BY_PATH, "Their payload, READs too"),
    ("freeflow_network_out_bytes_total", "counter", OF_NETWORK, "Payload that left those vNICs"),
    ("freeflow_network_in_bytes_total", "counter", OF_NETWORK, "Payload that came to them"),
    ("freeflow_network_wire_sent_packets_total", "counter", OF_NETWORK, "Packets that they sent to other hosts"),
    ("freeflow_network_wire_received_packets_total", "counter", OF_NETWORK, "Packets that they received from other hosts"),
    ("freeflow_policy_refusals_total", "counter", OF_RULE, "What an access rule refused (no rule: the networks' own access), by the network of who asked (none: it is not known)"),
    ("freeflow_policy_disconnections_total", "counter", OF_RULE, "Ends of connections that a rule disconnected, in the same way"),
    ("freeflow_policy_violations_total", "counter", &["tenant", "network", "what"], "Policy violations, by the network of the violator (none: it is not known); what: as in the audit log"),
    ("freeflow_wire_drops_total", "counter", &["reason"], "Packets received that no queue pair acted upon, those of sealed hosts that were not sealed by them among them"),
    ("freeflow_worker_cpu_seconds_total", "counter", &[], "CPU time of the worker"),
    ("freeflow_copy_threads_bytes_total", "counter", &[], "Bytes copied by copy threads"),
    ("freeflow_cm_established_connections", "gauge", &[], "Established rdma_cm connections"),
    ("freeflow_peers_known", "gauge", &[], "Hosts of the peers file"),
    ("freeflow_peers_up", "gauge", &[], "Connected hosts of the peers file"),
    ("freeflow_cluster_behind_seconds", "gauge", &[], "Of a host that follows a cluster: seconds since it last heard of etcd; grows also when its follower has ended"),
    ("freeflow_cluster_problems", "gauge", &[], "Of such a host: how much it can't follow, as in freeflow status"),
    ("freeflow_store_revision", "gauge", &[], "Revision of the store"),
    ("freeflow_audit_lost_lines_total", "counter", &[], "Audit log lines that could not be written"),
    ("freeflow_router_vnics", "gauge", &[], "vNICs"),
    ("freeflow_router_vnics_left_out", "gauge", &[], "vNICs left out of this page, because there are too many"),
    ("freeflow_router_qps", "gauge", &[], "Queue pairs of all vNICs"),
    ("freeflow_router_registered_bytes", "gauge", &[], "Registered memory of all vNICs"),
    ("freeflow_router_uptime_seconds", "gauge", &[], "Seconds since the router started"),
    ("freeflow_router_mode_info", "gauge", &["mode"], "How the worker waits for work; always 1"),
    ("freeflow_router_build_info", "gauge", &["host", "version"], "Always 1"),
];

/// All lines, by family.
struct Text {
    lines: Vec<String>,
}

impl Text {
    fn new() -> Self {
        Self { lines: vec![String::new(); FAMILIES.len()] }
    }

    /// A line; its labels in the order of the family's.
    fn add(&mut self, name: &str, labels: &[&str], value: impl Display) {
        let index = FAMILIES.iter().position(|family| family.0 == name);
        let Some((family, lines)) = index.map(|index| (&FAMILIES[index], &mut self.lines[index])) else {
            debug_assert!(false, "{name} is not listed");
            return;
        };
        debug_assert_eq!(labels.len(), family.2.len(), "{name}");
        lines.push_str(name);
        for (index, (label, text)) in family.2.iter().zip(labels).enumerate() {
            lines.push_str(if index == 0 { "{" } else { "," });
            lines.push_str(label);
            lines.push_str("=\"");
            escape(text, lines);
            lines.push('"');
        }
        if !labels.is_empty() {
            lines.push('}');
        }
        // Writing to a String does not fail.
        let _ = writeln!(lines, " {value}");
    }

    fn finish(self) -> String {
        let mut all = String::with_capacity(self.lines.iter().map(|lines| lines.len() + 256).sum());
        for ((name, kind, _, help), lines) in FAMILIES.iter().zip(self.lines) {
            if !lines.is_empty() {
                let _ = write!(all, "# HELP {name} {help}\n# TYPE {name} {kind}\n{lines}");
            }
        }
        all
    }

    fn add_vnic(&mut self, vnic: &VnicMeter) {
        let of = [vnic.tenant.as_str(), &vnic.network, &vnic.id];
        let [tenant, network, id] = of;
        let (numbers, counters) = (&vnic.numbers, &vnic.numbers.counters);
        for (path, done) in PATHS.iter().zip(by_path(counters)) {
            self.add("freeflow_vnic_sent_messages_total", &[tenant, network, id, path], done.messages);
            self.add("freeflow_vnic_sent_bytes_total", &[tenant, network, id, path], done.bytes);
        }
        for (reason, amount) in numbers.slow_path.by_reason() {
            let of = [tenant, network, id, reason.text()];
            self.add("freeflow_vnic_slow_path_accesses_total", &of, amount.accesses);
            self.add("freeflow_vnic_slow_path_bytes_total", &of, amount.bytes);
        }
        self.add("freeflow_vnic_info", &[tenant, network, id, &vnic.title], 1);
        for (name, count) in [
            ("freeflow_vnic_out_bytes_total", counters.sent.bytes),
            ("freeflow_vnic_in_bytes_total", counters.received.bytes),
            ("freeflow_vnic_blocked_copies_total", numbers.blocked_copies),
            ("freeflow_vnic_completions_with_error_total", counters.completions_with_error),
            ("freeflow_vnic_rnr_naks_total", counters.rnr_naks),
            ("freeflow_vnic_retries_exceeded_total", counters.retries_exceeded),
            ("freeflow_vnic_remote_access_errors_total", counters.remote_access_errors),
            ("freeflow_vnic_undeliverable_messages_total", counters.undeliverable),
            ("freeflow_vnic_malformed_descriptors_total", counters.malformed_descriptors),
            ("freeflow_vnic_malformed_messages_total", vnic.malformed_messages),
            ("freeflow_vnic_wire_sent_packets_total", counters.wire.packets_sent),
            ("freeflow_vnic_wire_received_packets_total", counters.wire.packets_received),
            ("freeflow_vnic_wire_retransmitted_packets_total", counters.wire.packets_retransmitted),
            ("freeflow_vnic_throttled_waits_total", numbers.throttled.waits),
            ("freeflow_vnic_sessions", numbers.usage.sessions.into()),
            ("freeflow_vnic_qps", numbers.usage.qps.into()),
            ("freeflow_vnic_cqs", numbers.usage.cqs.into()),
            ("freeflow_vnic_mrs", numbers.usage.mrs.into()),
            ("freeflow_vnic_registered_bytes", numbers.usage.registered_bytes),
            ("freeflow_vnic_segment_bytes", vnic.used.segment_bytes),
            ("freeflow_vnic_ring_bytes", vnic.used.ring_bytes),
            ("freeflow_vnic_heap_bytes", vnic.used.heap_bytes),
            ("freeflow_vnic_metered", vnic.is_metered.into()),
        ] {
            self.add(name, &of, count);
        }
        self.add("freeflow_vnic_throttled_seconds_total", &of, numbers.throttled.time.0 as f64 / 1e9);
        for (limit, refused) in [("vnic", numbers.refusals.by_vnic), ("network", numbers.refusals.by_network)] {
            for (resource, count) in [
                ("qps", refused.qps),
                ("cqs", refused.cqs),
                ("mrs", refused.mrs),
                ("registered_bytes", refused.registered_bytes),
                ("others", refused.others),
            ] {
                self.add("freeflow_vnic_quota_refusals_total", &[tenant, network, id, limit, resource], count);
            }
        }
    }

    /// Those that are direct always have a line, others where there are some.
    fn add_paths(&mut self, vnic: &VnicMeter, counts: &PathCounts) {
        let name = "freeflow_vnic_qps_by_path";
        let of = |path: QpPath, reason: &'static str| [&vnic.tenant, &vnic.network, &vnic.id, path.name(), reason];
        let direct = (QpPath::Direct, None);
        self.add(name, &of(direct.0, ""), counts.get(&direct).copied().unwrap_or_default());
        for (&(path, reason), count) in counts.iter().filter(|(of, _)| **of != direct) {
            self.add(name, &of(path, reason.map_or("", Reason::text)), count);
        }
    }

    fn add_network(&mut self, meter: &NetworkMeter) {
        let of = [meter.tenant.as_str(), &meter.network];
        let [tenant, network] = of;
        for (path, done) in PATHS.iter().zip(meter.totals.paths) {
            self.add("freeflow_network_sent_messages_total", &[tenant, network, path], done.messages);
            self.add("freeflow_network_sent_bytes_total", &[tenant, network, path], done.bytes);
        }
        for (name, count) in [
            ("freeflow_network_out_bytes_total", meter.totals.out_bytes),
            ("freeflow_network_in_bytes_total", meter.totals.in_bytes),
            ("freeflow_network_wire_sent_packets_total", meter.totals.wire_packets_sent),
            ("freeflow_network_wire_received_packets_total", meter.totals.wire_packets_received),
        ] {
            self.add(name, &of, count);
        }
        self.add_violations(of, meter.violations);
    }

    fn add_violations(&mut self, [tenant, network]: [&str; 2], counts: [u64; ViolationClass::ALL.len()]) {
        for (class, count) in ViolationClass::ALL.iter().zip(counts) {
            self.add("freeflow_policy_violations_total", &[tenant, network, class.name()], count);
        }
    }

    fn add_host(&mut self, host: &HostMeter, listed_vnics: usize) {
        for network in host.networks.iter().take(NETWORK_COUNT_MAX) {
            self.add_network(network);
        }
        self.add_violations([""; 2], host.violations);
        for ([rule, tenant, network], tally) in host.access.iter().take(REFUSED_COUNT_MAX) {
            self.add("freeflow_policy_refusals_total", &[rule, tenant, network], tally.refusals);
            self.add("freeflow_policy_disconnections_total", &[rule, tenant, network], tally.disconnections);
        }
        for (reason, count) in &host.worker.drops {
            self.add("freeflow_wire_drops_total", &[reason], count);
        }
        self.add("freeflow_worker_cpu_seconds_total", &[], host.worker.cpu_us as f64 / 1e6);
        for (name, count) in [
            ("freeflow_copy_threads_bytes_total", host.worker.moved_bytes),
            ("freeflow_cm_established_connections", host.cm_connections),
            ("freeflow_peers_known", host.peer_count),
            ("freeflow_peers_up", host.connected_peer_count),
            ("freeflow_store_revision", host.revision),
            ("freeflow_audit_lost_lines_total", host.lost_audit_lines),
            ("freeflow_router_vnics", host.vnic_count),
            ("freeflow_router_vnics_left_out", host.vnic_count.saturating_sub(listed_vnics as u64)),
            ("freeflow_router_qps", host.worker.usage.qps.into()),
            ("freeflow_router_registered_bytes", host.worker.usage.registered_bytes),
            ("freeflow_router_uptime_seconds", host.uptime_s),
        ] {
            self.add(name, &[], count);
        }
        self.add("freeflow_router_mode_info", &[host.mode], 1);
        self.add("freeflow_router_build_info", &[&host.host, env!("CARGO_PKG_VERSION")], 1);
    }
}

impl Text {
    fn add_cluster(&mut self, follower: FollowerState, now_ns: u64) {
        self.add("freeflow_cluster_behind_seconds", &[], follower.behind_ns(now_ns) as f64 / 1e9);
        self.add("freeflow_cluster_problems", &[], follower.problem_count);
    }
}

/// As the format wants it: backslash, quote and line feed.
fn escape(text: &str, into: &mut String) {
    for c in text.chars() {
        match c {
            '\\' => into.push_str("\\\\"),
            '"' => into.push_str("\\\""),
            '\n' => into.push_str("\\n"),
            other => into.push(other),
        }
    }
}

/// The whole text.
pub async fn text(link: &Link, follower: Option<FollowerState>) -> Result<String, Failure> {
    let mut text = Text::new();
    let mut paths = link.ask(CountQpPaths {}).await?;
    let (mut count, mut after): (usize, Option<Position>) = (0, None);
    loop {
        let page = link.ask(PageMeters { after: after.take(), with_qps: false, tenants: None }).await?;
        for vnic in page.vnics.iter().take(VNIC_COUNT_MAX - count) {
            text.add_vnic(vnic);
            text.add_paths(vnic, &paths.remove(&vnic.id).unwrap_or_default());
        }
        count = (count + page.vnics.len()).min(VNIC_COUNT_MAX);
        after = page.next;
        if after.is_none() || count == VNIC_COUNT_MAX {
            break;
        }
    }
    let host = link.ask(ReadHostMeter {}).await?;
    text.add_host(&host, count);
    if let Some(follower) = follower {
        text.add_cluster(follower, freeflow_shm::monotonic_ns());
    }
    Ok(text.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::tallies::Tally;
    use crate::dataplane::meters::{VnicNumbers, WorkerMeter};
    use crate::dataplane::slow_path_counts::SlowPathReason;
    use freeflow_orchestrator::objects::ResourceAmounts;
    use freeflow_verbs::{RateLimit, Shaping};
    use std::collections::BTreeSet;

    const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.txt");

    fn vnic(id: &str) -> VnicMeter {
        let mut numbers = VnicNumbers::default();
        numbers.counters.messages = 10;
        numbers.counters.direct_messages = 4;
        numbers.counters.wire_messages = 1;
        numbers.slow_path.add(SlowPathReason::OnDemand, 4096);
        VnicMeter {
            id: id.into(),
            title: String::new(),
            tenant: "a\"b\\c\nd".into(),
            network: "net".into(),
            address: [10, 0, 0, 1].into(),
            address6: None,
            numbers,
            malformed_messages: 0,
            used: ResourceAmounts::default(),
            shaping: Shaping::default(),
            tenant_limit: RateLimit::default(),
            is_metered: true,
            qps: Vec::new(),
        }
    }

    fn host() -> HostMeter {
        HostMeter {
            host: "h".into(),
            uptime_s: 7,
            mode: "adaptive",
            vnic_count: 3,
            peer_count: 0,
            connected_peer_count: 0,
            revision: 5,
            lost_audit_lines: 0,
            networks: vec![NetworkMeter { tenant: "red".into(), network: "net".into(), ..NetworkMeter::default() }],
            violations: ViolationClass::ALL.map(|class| if class == ViolationClass::Request { 9 } else { 0 }),
            access: vec![(["", "red", "net"].map(str::to_owned), Tally { refusals: 1, disconnections: 2 })],
            cm_connections: 0,
            worker: WorkerMeter { drops: vec![("denied".into(), 3)], ..WorkerMeter::default() },
        }
    }

    #[test]
    fn the_list_is_what_is_served() {
        let mut list =
            String::from("# Metrics of /metrics: name, type, labels, meaning. A test of the router compares.\n");
        for (name, kind, labels, help) in FAMILIES {
            let labels = if labels.is_empty() { "-".to_owned() } else { labels.join(",") };
            let _ = writeln!(list, "{name} {kind} {labels} {help}");
        }
        if std::env::var_os("FREEFLOW_UPDATE").is_some() {
            std::fs::write(LIST, &list).unwrap();
        }
        let copy = std::fs::read_to_string(LIST).unwrap_or_default();
        assert!(copy == list, "docs/metrics.txt is not what is served: FREEFLOW_UPDATE=1 writes it again");
    }

    #[test]
    fn names_follow_the_rules() {
        let names: BTreeSet<&str> = FAMILIES.iter().map(|family| family.0).collect();
        assert_eq!(names.len(), FAMILIES.len());
        for (name, kind, _, help) in FAMILIES {
            assert_eq!(name.ends_with("_total"), *kind == "counter", "{name}");
            assert!(name.starts_with("freeflow_") && !help.contains(['\\', '\n']), "{name}");
            assert!(name.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase()), "{name}");
            // In seconds and bytes; what only has labels is a gauge.
            let words: Vec<&str> = name.split('_').collect();
            let units = ["ns", "us", "ms", "nanoseconds", "milliseconds", "bits", "kilobytes", "percent", "time"];
            assert!(!words.iter().any(|word| units.contains(word)), "{name}");
            assert_eq!(words.contains(&"info"), help.ends_with("lways 1"), "{name}");
        }
    }

    #[test]
    fn all_families_have_lines_that_belong_together_and_are_escaped() {
        let mut text = Text::new();
        text.add_vnic(&vnic("one"));
        text.add_vnic(&vnic("two"));
        let counts = PathCounts::from([((QpPath::Routed, Some(Reason::Policy)), 3), ((QpPath::Wire, None), 2)]);
        text.add_paths(&vnic("one"), &counts);
        text.add_host(&host(), 2);
        text.add_cluster(FollowerState::of(1_500_000_000, 2), 4_000_000_000);
        let text = text.finish();
        assert!(
            text.contains("freeflow_cluster_behind_seconds 2.5\n") && text.contains("freeflow_cluster_problems 2\n")
        );
        let (mut seen, mut current) = (BTreeSet::new(), "");
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                current = help.split(' ').next().unwrap();
                assert!(seen.insert(current), "{current} begins twice");
            } else if !line.starts_with('#') {
                assert!(line.starts_with(current), "{line} is not of {current}");
                assert!(line.rsplit(' ').next().unwrap().parse::<f64>().is_ok(), "{line}");
            }
        }
        assert_eq!(seen.len(), FAMILIES.len());
        let labels = r#"{tenant="a\"b\\c\nd",network="net",vnic="one",path="#;
        for (path, count) in [("direct", 4), ("wire", 1), ("routed", 5)] {
            let line = format!("freeflow_vnic_sent_messages_total{labels}\"{path}\"}} {count}\n");
            assert!(text.contains(&line), "{line} is not in {text}");
        }
        let of = &labels[..labels.len() - "path=".len()];
        for line in [
            format!("freeflow_vnic_slow_path_bytes_total{of}reason=\"registered on demand\"}} 4096\n"),
            format!("freeflow_vnic_slow_path_accesses_total{of}reason=\"registered on demand\"}} 1\n"),
            format!("freeflow_vnic_slow_path_accesses_total{of}reason=\"not shared yet\"}} 0\n"),
        ] {
            assert!(text.contains(&line), "{line} is not in {text}");
        }
        // Of networks that are too many to be distinguished.
        let line = "freeflow_policy_violations_total{tenant=\"\",network=\"\",what=\"rdma_cm request to nobody\"} 9\n";
        assert!(text.contains(line), "{line} is not in {text}");
        for (way, count) in [("direct\",reason=\"", 0), ("routed\",reason=\"policy", 3), ("wire\",reason=\"", 2)] {
            let line = format!("freeflow_vnic_qps_by_path{labels}\"{way}\"}} {count}\n");
            assert!(text.contains(&line), "{line} is not in {text}");
        }
        assert!(
            text.contains("freeflow_router_vnics_left_out 1\n") && text.contains("drops_total{reason=\"denied\"} 3\n")
        );
    }
}
