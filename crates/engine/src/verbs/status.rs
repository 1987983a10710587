//! Status of a QP: for lists that people read.
use crate::{Engine, QpId, VnicId};
use freeflow_verbs::{Gid, QpState, QpType, Qpn, SendOpcode};

/// A look at a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpStatus {
    /// Its vNIC.
    pub vnic: VnicId,
    /// Its number.
    pub qpn: Qpn,
    /// Its type.
    pub service: QpType,
    /// Its state.
    pub state: QpState,
    /// The peer that it is connected to, or was set to connect to. Never for UD.
    pub peer: Option<(Gid, Qpn)>,
    /// Its peer is on another host: it runs the packet transport.
    pub is_wire: bool,
    /// The last request that the engine was given since the QP was made, and its bytes; before the
    /// first, a SEND of none.
    pub last: (SendOpcode, u64),
}

impl Engine {
    /// Number of copies in flight that touch this session's memory or QPs.
    pub fn copies_in_flight(&self, session: crate::SessionId) -> u32 {
        self.completer()
            .in_flight
            .iter()
            .filter(|(_, operation)| self.completer().operation_touches(operation, session))
            .count() as u32
    }

    /// All QPs, of all vNICs or of one.
    pub fn qps_of(&self, vnic: Option<VnicId>) -> impl Iterator<Item = (QpId, Qpn)> + '_ {
        let wanted = move |of| vnic.is_none_or(|vnic| vnic == of);
        self.completer().qps.iter().filter(move |(_, qp)| wanted(qp.vnic)).map(|(id, qp)| (id, qp.qpn))
    }

    /// A look at the QP. `None`: no such QP.
    pub fn qp_status(&self, id: QpId) -> Option<QpStatus> {
        let qp = self.completer().qps.get(id)?;
        let peer = qp.remote_gid().filter(|_| qp.is_connected_service() && qp.state() != QpState::Reset);
        Some(QpStatus {
            vnic: qp.vnic,
            qpn: qp.qpn,
            service: qp.service,
            state: qp.state(),
            peer: peer.map(|gid| (gid, Qpn(qp.attributes.dest_qpn))),
            is_wire: qp.wire.is_some(),
            last: (qp.send.request.opcode, qp.send.length),
        })
    }
}
