//! The admin interface to the direct paths: `SetDataPath`, `ListQps`, and what `Status` says of them.
//!
//! What is listed is what the router has given to QPs at that moment. It asks no library, which could say what it likes.
use crate::admin::AdminDone;
use crate::control::Control;
use crate::slab::Key;
use crate::vnics::refused;
use crate::worker::Worker;
use freeflow_engine::{QpId, QpStatus as Look, VnicId};
use freeflow_orchestrator::Command;
use freeflow_protocol::admin::{AdminErrorCode, AdminReply, DataPath, QpPath, QpStatus};
use freeflow_verbs::{Gid, QpState, QpType};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

/// QPs of one page: each takes a few hundred bytes.
const PAGE_QPS_MAX: usize = 64;
/// Why a QP is routed that could do better: its network's policy says so.
const BY_POLICY: &str = "policy";
/// The same: a limit of rate applies to its vNIC, or to its peer's.
const METERED: &str = "limited by a QoS class";
/// The same: its library has not asked, which it does once the QP has sent enough to be worth it.
const NOT_ASKED: &str = "not asked yet";

/// QPs that do something past the router now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DirectCounts {
    pub channel_qps: u32,
    pub grant_qps: u32,
}

/// A QP, its vNIC by the engine's name.
struct Row {
    look: Look,
    channel: bool,
    grants: bool,
    reason: Option<String>,
}

pub(crate) const fn type_name(qp_type: QpType) -> &'static str {
    match qp_type {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
        QpType::XrcSend => "XRC_SEND",
        QpType::XrcReceive => "XRC_RECV",
    }
}

pub(crate) const fn state_name(state: QpState) -> &'static str {
    match state {
        QpState::Reset => "RESET",
        QpState::Init => "INIT",
        QpState::ReadyToReceive => "RTR",
        QpState::ReadyToSend => "RTS",
        QpState::SqDrain => "SQD",
        QpState::SqError => "SQE",
        QpState::Error => "ERR",
    }
}

pub(crate) fn address(gid: Gid) -> IpAddr {
    gid.to_ipv4().map_or_else(|| IpAddr::V6(Ipv6Addr::from(gid.0)), IpAddr::V4)
}

impl Row {
    fn path(&self) -> QpPath {
        match (self.look.is_wire, self.channel || self.grants) {
            (true, _) => QpPath::Wire,
            (false, true) => QpPath::Direct,
            (false, false) => QpPath::Routed,
        }
    }

    fn status(self, vnic: String) -> QpStatus {
        QpStatus {
            vnic,
            qpn: self.look.qpn.0,
            qp_type: type_name(self.look.service).into(),
            state: state_name(self.look.state).into(),
            peer_address: self.look.peer.map(|(gid, _)| address(gid)),
            peer_qpn: self.look.peer.map(|(_, qpn)| qpn.0),
            path: self.path(),
            channel: self.channel,
            grants: self.grants,
            reason: self.reason,
        }
    }
}

impl Worker {
    pub(crate) fn direct_counts(&self) -> DirectCounts {
        let mut counts = DirectCounts::default();
        for (id, _) in self.rings.qps.iter() {
            counts.channel_qps += u32::from(self.uses_channel(id));
            counts.grant_qps += u32::from(self.granted(id));
        }
        counts
    }

    /// One page in order of number, and whether there are more.
    fn list_qps(&self, vnic: Option<VnicId>, after_qpn: Option<u32>) -> (Vec<Row>, bool) {
        let after = |qpn: u32| after_qpn.is_none_or(|after| qpn > after);
        let mut all: Vec<(u32, QpId)> =
            self.engine.qps_of(vnic).map(|(id, qpn)| (qpn.0, id)).filter(|&(qpn, _)| after(qpn)).collect();
        let more = all.len() > PAGE_QPS_MAX;
        if more {
            all.select_nth_unstable_by_key(PAGE_QPS_MAX, |&(qpn, _)| qpn);
            all.truncate(PAGE_QPS_MAX);
        }
        all.sort_unstable_by_key(|&(qpn, _)| qpn);
        (all.into_iter().filter_map(|(_, id)| self.row(id)).collect(), more)
    }

    fn row(&self, id: QpId) -> Option<Row> {
        let look = self.engine.qp_status(id)?;
        let (channel, grants) = (self.uses_channel(id), self.granted(id));
        let is_routed = !(look.is_wire || channel || grants);
        let reason = is_routed.then(|| self.why_routed(id, &look));
        Some(Row { look, channel, grants, reason })
    }

    fn why_routed(&self, id: QpId, look: &Look) -> String {
        let peer = match self.engine.direct_peer(id) {
            Ok(peer) => peer,
            Err(reason) => return reason.to_string(),
        };
        let peer = self.engine.qp_status(peer).map(|peer| peer.vnic);
        let is_routed = |vnic| self.rings.vnics.get(vnic).is_none_or(|entry| !self.rings.policy.allows(entry.network));
        // The peer may be of another network.
        if is_routed(look.vnic) || peer.is_some_and(is_routed) {
            return BY_POLICY.into();
        }
        if self.engine.is_metered(look.vnic) || peer.is_some_and(|peer| self.engine.is_metered(peer)) {
            return METERED.into();
        }
        self.engine.direct_receiver(id).map_or_else(|reason| reason.to_string(), |_| NOT_ASKED.into())
    }
}

impl Control {
    /// Stored before it holds: a router that dies in between comes back with what was asked for.
    pub(crate) fn set_data_path(&mut self, key: Key, network: &str, path: DataPath) -> AdminDone {
        match self.admin_change(key, "set-data-path", Command::SetDataPath { network: network.into(), path }) {
            Err(refusal) => AdminDone::Reply(refused(&refusal)),
            Ok(_) => self.ask_worker(key, |_| (), |_, ()| AdminReply::Done),
        }
    }

    pub(crate) fn list_qps(&mut self, key: Key, vnic: Option<&str>, after_qpn: Option<u32>) -> AdminDone {
        let engine_id = |id| Some(self.vnics.get(*self.vnics_by_id.get(id)?)?.engine_id);
        let of = match vnic.map(engine_id) {
            Some(None) => {
                let (code, message) = (AdminErrorCode::NotFound, "no such vNIC".into());
                return AdminDone::Reply(AdminReply::Failed { code, message });
            }
            found => found.flatten(),
        };
        let ask = move |worker: &mut Worker| worker.list_qps(of, after_qpn);
        self.ask_worker(key, ask, |control, (rows, more)| {
            let names: BTreeMap<VnicId, &str> =
                control.vnics.iter().map(|(_, vnic)| (vnic.engine_id, vnic.record.id.as_str())).collect();
            // A QP whose vNIC is gone by now is gone too.
            let named = rows.into_iter().filter_map(|row| {
                let vnic = names.get(&row.look.vnic)?.to_string();
                Some(row.status(vnic))
            });
            AdminReply::Qps { qps: named.collect(), more }
        })
    }
}
