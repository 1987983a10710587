//! `freeflow ps --qps` and `freeflow network set`: which way the messages of containers go, and why not a better one.

use crate::admin::Admin;
use crate::arguments::{DataPathChoice, Format};
use crate::failure::Result;
use crate::output;
use freeflow_hostnet::run_dir::RunDir;
use freeflow_protocol::admin::{DataPath, QpPath, QpStatus, VnicStatus};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// One QP in the JSON form of `freeflow ps --qps`.
#[derive(Serialize)]
pub struct Qp {
    /// Of its container.
    name: String,
    /// Of its vNIC.
    id: String,
    network: String,
    pub qpn: u32,
    #[serde(rename = "type")]
    qp_type: String,
    state: String,
    /// The container that it is connected to, if that is of this host and network.
    peer_name: Option<String>,
    peer_ip: Option<IpAddr>,
    peer_qpn: Option<u32>,
    pub path: QpPath,
    pub direct_ring: bool,
    pub grants: bool,
    pub reason: Option<String>,
    /// Requests that completed with success, and those of them that went past the router.
    sent_messages: u64,
    pub direct_messages: u64,
    /// How often its requests reached memory by the slow path, at either end, the bytes, and why, the last time.
    slow_path_accesses: u64,
    slow_path_bytes: u64,
    slow_path_reason: Option<String>,
}

/// Adds what is known of the vNICs.
pub fn named(qps: Vec<QpStatus>, vnics: &[VnicStatus]) -> Vec<Qp> {
    let by_id: BTreeMap<&str, &VnicStatus> = vnics.iter().map(|vnic| (vnic.id.as_str(), vnic)).collect();
    let by_address: BTreeMap<(&str, IpAddr), &str> = vnics
        .iter()
        .flat_map(|vnic| vnic.addresses().map(|address| ((vnic.network.as_str(), address), vnic.name.as_str())))
        .collect();
    let with_names = qps.into_iter().map(|qp| {
        let vnic = by_id.get(qp.vnic.as_str());
        let network = vnic.map_or("", |vnic| vnic.network.as_str());
        let peer_name = qp.peer_address.and_then(|address| by_address.get(&(network, address)));
        Qp {
            name: vnic.map_or_else(|| qp.vnic.clone(), |vnic| vnic.name.clone()),
            network: network.into(),
            peer_name: peer_name.map(|name| name.to_string()),
            id: qp.vnic,
            qpn: qp.qpn,
            qp_type: qp.qp_type,
            state: qp.state,
            peer_ip: qp.peer_address,
            peer_qpn: qp.peer_qpn,
            path: qp.path,
            direct_ring: qp.direct_ring,
            grants: qp.grants,
            reason: qp.reason,
            sent_messages: qp.sent_messages,
            direct_messages: qp.direct_messages,
            slow_path_accesses: qp.slow_path_accesses,
            slow_path_bytes: qp.slow_path_bytes,
            slow_path_reason: qp.slow_path_reason,
        }
    });
    let mut all: Vec<Qp> = with_names.collect();
    all.sort_by(|one, other| (&one.name, &one.id, one.qpn).cmp(&(&other.name, &other.id, other.qpn)));
    all
}

pub fn list(run_dir: &RunDir, format: Format) -> Result<()> {
    let mut admin = Admin::connect(run_dir)?;
    // The vNICs last: those of all QPs are among them, but of such that ended in between.
    let qps = admin.qps(None)?;
    let qps = named(qps, &admin.vnics()?);
    if format == Format::Json {
        output::json(&qps);
        return Ok(());
    }
    let mut rows = vec![
        ["NAME", "QPN", "TYPE", "STATE", "PEER", "PATH", "MESSAGES", "MEMORY", "SLOW PATH", "WHY NOT DIRECT"]
            .map(String::from)
            .to_vec(),
    ];
    rows.extend(qps.iter().map(row));
    output::table(&rows);
    Ok(())
}

/// `1.5 MB: registered on demand`.
fn slow_path(qp: &Qp) -> String {
    let bytes = || output::bytes(qp.slow_path_bytes);
    qp.slow_path_reason.as_ref().map_or("-".into(), |reason| format!("{}: {reason}", bytes()))
}

fn row(qp: &Qp) -> Vec<String> {
    let number = |qpn: u32| format!("0x{qpn:06x}");
    let peer = qp.peer_name.clone().or_else(|| qp.peer_ip.map(|address| address.to_string()));
    let peer = peer.map_or("-".into(), |peer| match qp.peer_qpn {
        Some(qpn) => format!("{peer} {}", number(qpn)),
        None => peer,
    });
    let otherwise = qp.path.name();
    let by_router = if qp.path == QpPath::Direct { QpPath::Routed.name() } else { otherwise };
    vec![
        qp.name.clone(),
        number(qp.qpn),
        qp.qp_type.clone(),
        qp.state.clone(),
        peer,
        qp.path.name().into(),
        if qp.direct_ring { "direct-ring" } else { by_router }.into(),
        if qp.grants { "grant" } else { by_router }.into(),
        slow_path(qp),
        qp.reason.clone().unwrap_or_default(),
    ]
}

impl From<DataPathChoice> for DataPath {
    fn from(choice: DataPathChoice) -> Self {
        match choice {
            DataPathChoice::Auto => Self::Auto,
            DataPathChoice::Direct => Self::Direct,
            DataPathChoice::Routed => Self::Routed,
        }
    }
}

pub fn set_network(run_dir: &RunDir, name: &str, path: DataPathChoice) -> Result<()> {
    let mut admin = Admin::connect(run_dir)?;
    // For its message, which names the networks that there are.
    admin.network(name)?;
    admin.set_data_path(name, path.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_protocol::admin::Counters;

    fn vnic(id: &str, network: &str, address: &str) -> VnicStatus {
        VnicStatus {
            id: id.into(),
            name: format!("name-of-{id}"),
            network: network.into(),
            address: address.parse().unwrap(),
            prefix_length: 16,
            gateway: "10.111.0.1".parse().unwrap(),
            address6: None,
            prefix_length6: 0,
            directory: String::new(),
            labels: Vec::new(),
            session_count: 1,
            qp_count: 1,
            mr_count: 0,
            registered_bytes: 0,
            worker: 1,
            shard: 0,
            failed: None,
            counters: Counters::default(),
        }
    }

    fn status(vnic: &str, qpn: u32, peer: &str, path: QpPath, reason: Option<&str>) -> QpStatus {
        QpStatus {
            vnic: vnic.into(),
            qpn,
            qp_type: "RC".into(),
            state: "RTS".into(),
            peer_address: Some(peer.parse().unwrap()),
            peer_qpn: Some(0xabc),
            path,
            direct_ring: path == QpPath::Direct,
            grants: false,
            reason: reason.map(String::from),
            sent_messages: 5,
            direct_messages: 3,
            slow_path_accesses: 0,
            slow_path_bytes: 0,
            slow_path_reason: None,
        }
    }

    #[test]
    fn qps_are_named_by_their_containers_within_one_network() {
        let vnics =
            [vnic("b", "default", "10.111.0.3"), vnic("c", "other", "10.111.0.2"), vnic("a", "default", "10.111.0.2")];
        let qps = vec![
            status("b", 5, "10.111.0.2", QpPath::Direct, None),
            status("a", 9, "10.111.0.9", QpPath::Wire, None),
            QpStatus {
                slow_path_accesses: 2,
                slow_path_bytes: 40,
                slow_path_reason: Some("not shared yet".into()),
                ..status("a", 7, "10.111.0.3", QpPath::Routed, Some("policy"))
            },
            status("gone", 8, "10.111.0.3", QpPath::Routed, Some("no peer")),
        ];
        let rows: Vec<String> = named(qps, &vnics).iter().map(|qp| row(qp).join(" ")).collect();
        assert_eq!(
            rows,
            [
                "gone 0x000008 RC RTS 10.111.0.3 0x000abc routed routed routed - no peer",
                "name-of-a 0x000007 RC RTS name-of-b 0x000abc routed routed routed 40 B: not shared yet policy",
                "name-of-a 0x000009 RC RTS 10.111.0.9 0x000abc wire wire wire - ",
                "name-of-b 0x000005 RC RTS name-of-a 0x000abc direct direct-ring routed - ",
            ]
        );
    }
}
