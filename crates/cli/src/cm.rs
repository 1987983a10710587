//! `freeflow ps --cm`: the identifiers of connection management (rdma_cm): who listens where, and
//! who is connected to whom.

use crate::admin::Admin;
use crate::arguments::Format;
use crate::failure::Result;
use crate::output;
use freeflow_hostnet::run_dir::RunDir;
use freeflow_protocol::admin::{CmCounts, CmId, CmMessages, VnicStatus};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

/// The JSON form of `freeflow ps --cm`.
#[derive(Serialize)]
struct Page {
    counts: CmCounts,
    messages: Vec<CmMessages>,
    ids: Vec<Id>,
}

#[derive(Serialize)]
struct Id {
    /// Of its container, and of its vNIC.
    name: String,
    id: String,
    state: String,
    port_space: String,
    #[serde(rename = "type")]
    qp_type: String,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    /// The container at the other end, if that is of this host and network.
    peer_name: Option<String>,
    qpn: Option<u32>,
    remote_qpn: Option<u32>,
}

fn named(ids: Vec<CmId>, vnics: &[VnicStatus]) -> Vec<Id> {
    let by_id: BTreeMap<&str, &VnicStatus> = vnics.iter().map(|vnic| (vnic.id.as_str(), vnic)).collect();
    let by_address: BTreeMap<(&str, IpAddr), &str> = vnics
        .iter()
        .flat_map(|vnic| vnic.addresses().map(|address| ((vnic.network.as_str(), address), vnic.name.as_str())))
        .collect();
    let with_names = ids.into_iter().map(|id| {
        let vnic = by_id.get(id.vnic.as_str());
        let network = vnic.map_or("", |vnic| vnic.network.as_str());
        let peer = id.remote.and_then(|(address, _)| by_address.get(&(network, address)));
        Id {
            name: vnic.map_or_else(|| id.vnic.clone(), |vnic| vnic.name.clone()),
            peer_name: peer.map(|name| name.to_string()),
            id: id.vnic,
            state: id.state,
            port_space: id.port_space,
            qp_type: id.qp_type,
            local: id.local.map(SocketAddr::from),
            remote: id.remote.map(SocketAddr::from),
            qpn: id.qpn,
            remote_qpn: id.remote_qpn,
        }
    });
    let mut all: Vec<Id> = with_names.collect();
    all.sort_by(|one, other| (&one.name, &one.id, one.local).cmp(&(&other.name, &other.id, other.local)));
    all
}

fn row(id: &Id) -> Vec<String> {
    let shown = |address: Option<SocketAddr>| address.map_or("-".into(), |address| address.to_string());
    let remote = match (&id.peer_name, id.remote) {
        (Some(name), Some(address)) => format!("{name}:{}", address.port()),
        (_, address) => shown(address),
    };
    vec![
        id.name.clone(),
        id.state.clone(),
        id.port_space.clone(),
        id.qp_type.clone(),
        shown(id.local),
        remote,
        id.qpn.map_or("-".into(), |qpn| format!("0x{qpn:06x}")),
    ]
}

/// One line, also of `freeflow status`.
pub fn summary(counts: &CmCounts) -> String {
    let refused = counts.refused_messages + counts.malformed_messages + counts.misdirected_messages;
    format!(
        "Connections: {} identifiers, {} listen, {} established, {} wait for an answer; messages: {} sent ({} again), {} received \
         ({refused} refused), {} lost, {} found no room",
        counts.id_count,
        counts.listener_count,
        counts.established_count,
        counts.half_open_count,
        counts.sent_messages,
        counts.repeated_messages,
        counts.received_messages,
        counts.lost_messages,
        counts.overflows
    )
}

pub fn list(run_dir: &RunDir, format: Format) -> Result<()> {
    let mut admin = Admin::connect(run_dir)?;
    let page = admin.cm()?;
    let ids = named(page.ids, &admin.vnics()?);
    if format == Format::Json {
        output::json(&Page { counts: page.counts, messages: page.messages, ids });
        return Ok(());
    }
    let mut rows = vec![["NAME", "STATE", "SPACE", "TYPE", "LOCAL", "REMOTE", "QPN"].map(String::from).to_vec()];
    rows.extend(ids.iter().map(row));
    output::table(&rows);
    output::line(summary(&page.counts));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_names_both_ends() {
        let at = |text: &str, port| Some((text.parse().unwrap(), port));
        let id = CmId {
            vnic: "v1".into(),
            position: (1, 2),
            state: "ESTABLISHED".into(),
            port_space: "TCP".into(),
            qp_type: "RC".into(),
            local: at("10.111.0.2", 7471),
            remote: at("10.111.0.3", 40000),
            qpn: Some(0x1234),
            remote_qpn: Some(5),
        };
        let listener = CmId { state: "LISTEN".into(), local: at("::", 7471), remote: None, qpn: None, ..id.clone() };
        let rows: Vec<String> = named(vec![id, listener], &[]).iter().map(|id| row(id).join(" ")).collect();
        assert_eq!(
            rows,
            ["v1 ESTABLISHED TCP RC 10.111.0.2:7471 10.111.0.3:40000 0x001234", "v1 LISTEN TCP RC [::]:7471 - -"]
        );
    }
}
