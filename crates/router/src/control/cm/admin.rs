//! Connection management for operators: numbers, identifiers, messages.
use super::Cm;
use crate::control::thread::Control;
use freeflow_cm::{Counts, IdStatus, VnicRef};
use freeflow_protocol::admin::{CmCounts, CmId, CmMessages, CmStatus};
use freeflow_protocol::cm::{CmAddress, PortSpace};
use freeflow_verbs::{Gid, QpType};
use freeflow_wire::cm::Kind;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

/// Identifiers of one page: each takes some hundred bytes.
const PAGE_IDS_MAX: usize = 128;

fn address(gid: Gid) -> IpAddr {
    gid.to_ipv4().map_or_else(|| IpAddr::V6(Ipv6Addr::from(gid.0)), IpAddr::V4)
}

fn port_space(space: PortSpace) -> &'static str {
    match space {
        PortSpace::Ipoib => "IPOIB",
        PortSpace::Tcp => "TCP",
        PortSpace::Udp => "UDP",
        PortSpace::Ib => "IB",
    }
}

fn type_name(qp_type: QpType) -> &'static str {
    match qp_type {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
        QpType::XrcSend => "XRC_SEND",
        QpType::XrcReceive => "XRC_RECV",
    }
}

fn describe(id: &IdStatus, vnic: &str) -> CmId {
    let of = |at: CmAddress| (address(at.gid), at.port);
    CmId {
        vnic: vnic.into(),
        position: (id.vnic.0, id.handle),
        state: id.state.into(),
        port_space: port_space(id.port_space).into(),
        qp_type: type_name(id.qp_type).into(),
        local: id.local.map(of),
        remote: id.remote.map(of),
        qpn: id.local_qpn,
        remote_qpn: id.remote_qpn,
    }
}

impl Cm {
    pub fn counts(&self) -> CmCounts {
        self.numbers(&self.machine.counts())
    }

    fn numbers(&self, counts: &Counts) -> CmCounts {
        let sum = |of: fn(&freeflow_cm::MessageCounts) -> u64| counts.messages.iter().map(of).sum();
        CmCounts {
            id_count: counts.ids as u32,
            listener_count: counts.listeners as u32,
            connection_count: counts.connections as u32,
            established_count: counts.established as u32,
            half_open_count: counts.half_open as u32,
            orphan_count: counts.orphans as u32,
            sent_messages: sum(|kind| kind.sent),
            repeated_messages: sum(|kind| kind.repeated),
            received_messages: sum(|kind| kind.received),
            refused_messages: sum(|kind| kind.refused),
            malformed_messages: counts.malformed,
            overflows: counts.overflows,
            lost_messages: self.world.lost.crowded,
            misdirected_messages: self.world.lost.refused,
        }
    }

    fn messages(counts: &Counts) -> Vec<CmMessages> {
        let of_kind = |kind: Kind| {
            let count = counts.messages[kind.index()];
            CmMessages {
                kind: format!("{kind:?}"),
                sent: count.sent,
                repeated: count.repeated,
                received: count.received,
                refused: count.refused,
            }
        };
        Kind::ALL.into_iter().map(of_kind).collect()
    }
}

impl Control {
    /// One page of the identifiers after a position, and whether there are more.
    ///
    /// Counting walks all there is, so it is done for the first page; the others show the same.
    pub(crate) fn list_cm(&mut self, after: Option<(u64, u32)>) -> (CmStatus, bool) {
        if after.is_none() {
            let counts = self.cm.machine.counts();
            self.cm.counted = (self.cm.numbers(&counts), Cm::messages(&counts));
        }
        let after = after.map(|(vnic, handle)| (VnicRef(vnic), handle));
        let mut found = self.cm.machine.list(after, PAGE_IDS_MAX + 1);
        let more = found.len() > PAGE_IDS_MAX;
        found.truncate(PAGE_IDS_MAX);
        let names: BTreeMap<VnicRef, &str> =
            self.vnics.iter().map(|(_, vnic)| (vnic.cm, vnic.record.id.as_str())).collect();
        let ids = found.iter().map(|id| describe(id, names.get(&id.vnic).copied().unwrap_or_default())).collect();
        let (counts, messages) = self.cm.counted.clone();
        (CmStatus { counts, messages, ids }, more)
    }
}
