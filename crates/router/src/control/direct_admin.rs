//! The queue pairs of this host and their paths, for the REST server.
//!
//! The list shows what the router has given to QPs at that moment. It asks no library, which could
//! say what it likes.
use crate::control::thread::Control;
use crate::dataplane::command::ListQps;
use crate::dataplane::meters::{QpPage, QpRow, address, state_name, type_name};
use freeflow_engine::VnicId;
use freeflow_protocol::admin::QpStatus;
use std::collections::BTreeMap;

impl QpRow {
    fn status(self, vnic: String) -> QpStatus {
        QpStatus {
            vnic,
            qpn: self.look.qpn.0,
            qp_type: type_name(self.look.service).into(),
            state: state_name(self.look.state).into(),
            peer_address: self.look.peer.map(|(gid, _)| address(gid)),
            peer_qpn: self.look.peer.map(|(_, qpn)| qpn.0),
            path: self.path,
            direct_ring: self.direct_ring,
            grants: self.grants,
            reason: self.reason.map(|reason| reason.text().into()),
            sent_messages: self.traffic.messages_sent,
            direct_messages: self.traffic.direct_messages_sent,
            slow_path_accesses: self.slow_path.amount.accesses,
            slow_path_bytes: self.slow_path.amount.bytes,
            slow_path_reason: self.slow_path.reason.map(|reason| reason.text().into()),
        }
    }
}

impl Control {
    /// One page of the QPs of a vNIC, or of all, after a number, and whether there are more.
    /// `None`: there is no such vNIC.
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
        self.ask_all(
            move |_| ListQps { vnic: of, after_qpn },
            |control, pages| {
                let QpPage { rows, more } = QpPage::merge(pages);
                let names: BTreeMap<VnicId, &str> =
                    control.vnics.iter().map(|(_, vnic)| (vnic.engine_id, vnic.record.id.as_str())).collect();
                // A QP whose vNIC is gone by now is gone too.
                let named = rows.into_iter().filter_map(|row| {
                    let vnic = names.get(&row.look.vnic)?.to_string();
                    Some(row.status(vnic))
                });
                finish(Some((named.collect(), more)));
            },
        );
    }
}
