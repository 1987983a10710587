//! QPs that are brought to RTS when the peer agrees.
use freeflow_cm::Owner;
use freeflow_engine::{QpId, SessionId};
use freeflow_protocol::cm::Ece;
use freeflow_protocol::library::Handle;

/// A QP that is to be brought to RTS when the peer agrees.
#[derive(Clone, Copy)]
pub struct Preparation {
    pub session: SessionId,
    pub qp: QpId,
    pub ece: Ece,
}

impl Preparation {
    /// A peer's extended connection establishment asks nothing of the QP: the device has no
    /// options.
    pub fn suits(&self, remote: Ece) -> bool {
        remote.vendor_id == 0 || (remote.vendor_id == self.ece.vendor_id && remote.options == 0)
    }
}

/// An identifier whose peer agreed, and its QP.
pub struct Prepared {
    pub owner: Owner,
    pub id: Handle,
    pub with: Preparation,
}
