//! Changes of a QP that go with a step of connection management, one after the other.
use freeflow_engine::{QpId, SessionId};
use freeflow_verbs::{QpAttributeMask, QpAttributes, QpState};

/// Modification of a QP.
pub(crate) type Change = (QpAttributes, QpAttributeMask);

pub(crate) struct QpChanges {
    pub session: SessionId,
    pub qp: QpId,
    left: std::vec::IntoIter<Change>,
    next: Option<Change>,
    /// The state after the last one.
    pub state: QpState,
}

impl QpChanges {
    pub fn new(session: SessionId, qp: QpId, changes: Vec<Change>) -> Self {
        let mut left = changes.into_iter();
        let next = left.next();
        Self { session, qp, left, next, state: QpState::Reset }
    }

    pub fn next(&self) -> Option<&Change> {
        self.next.as_ref()
    }

    /// The next one is done, with this state.
    pub fn advance(&mut self, state: QpState) {
        self.state = state;
        self.next = self.left.next();
    }
}
