//! The queue pairs of this host and their paths, for the REST server.
//!
//! What is listed is what the router has given to QPs at that moment. It asks no library, which could say what it likes.
use crate::control::thread::Control;
use crate::dataplane::reasons::Reason;
use crate::dataplane::worker::Worker;
use freeflow_engine::{QpId, QpStatus as Look, QpTraffic, VnicId};
use freeflow_protocol::admin::{QpPath, QpStatus};
use freeflow_verbs::{Gid, QpState, QpType};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

/// QPs of one page: each takes a few hundred bytes.
const PAGE_QPS_MAX: usize = 64;
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
    path: QpPath,
    reason: Option<Reason>,
    traffic: QpTraffic,
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
    fn status(self, vnic: String) -> QpStatus {
        QpStatus {
            vnic,
            qpn: self.look.qpn.0,
            qp_type: type_name(self.look.service).into(),
            state: state_name(self.look.state).into(),
            peer_address: self.look.peer.map(|(gid, _)| address(gid)),
            peer_qpn: self.look.peer.map(|(_, qpn)| qpn.0),
            path: self.path,
            channel: self.channel,
            grants: self.grants,
            reason: self.reason.map(|reason| reason.text().into()),
            sent_messages: self.traffic.messages_sent,
            direct_messages: self.traffic.direct_messages_sent,
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
    fn list_qps(&mut self, vnic: Option<VnicId>, after_qpn: Option<u32>) -> (Vec<Row>, bool) {
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

    fn row(&mut self, id: QpId) -> Option<Row> {
        self.count_direct(id);
        let look = self.engine.qp_status(id)?;
        let (channel, grants) = (self.uses_channel(id), self.granted(id));
        let (path, reason) = self.path_of(id, &look);
        Some(Row { look, channel, grants, path, reason, traffic: self.engine.qp_traffic(id).unwrap_or_default() })
    }
}

impl Control {
    /// One page of the QPs of a vNIC, or of all, after a number, and whether there are more. `None`: there is no such vNIC.
    pub(crate) fn list_qps(
        &mut self,
        vnic: Option<&str>,
        after_qpn: Option<u32>,
        finish: impl FnOnce(Option<(Vec<QpStatus>, bool)>) + Send + 'static,
    ) {
        let engine_id = |id| Some(self.vnics.get(*self.vnics_by_id.get(id)?)?.engine_id);
        let of = match vnic.map(engine_id) {
            Some(None) => return finish(None),
            found => found.flatten(),
        };
        let ask = move |worker: &mut Worker| worker.list_qps(of, after_qpn);
        self.ask_worker(ask, |control, (rows, more)| {
            let names: BTreeMap<VnicId, &str> =
                control.vnics.iter().map(|(_, vnic)| (vnic.engine_id, vnic.record.id.as_str())).collect();
            // A QP whose vNIC is gone by now is gone too.
            let named = rows.into_iter().filter_map(|row| {
                let vnic = names.get(&row.look.vnic)?.to_string();
                Some(row.status(vnic))
            });
            finish(Some((named.collect(), more)));
        });
    }
}
