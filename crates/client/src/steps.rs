//! Steps of a connection that the router takes together with a change of the QP: connect, accept, disconnect.
use crate::lock;
use crate::queue_pair::QueuePair;
use freeflow_protocol::cm::CmStep;
use freeflow_protocol::library::{Reply, Request};
use freeflow_verbs::{QpState, VerbsError};

impl QueuePair {
    /// Takes a step of the connection that this QP is for.
    ///
    /// # Errors
    /// Those of the change and of the step; the QP may have been modified all the same, and its state is known then.
    pub fn step(&self, step: CmStep) -> Result<(), VerbsError> {
        let _alone = lock(&self.modifying);
        if matches!(step, CmStep::Disconnect { .. }) {
            self.empty_channel();
        }
        match self.session.call(&Request::CmStep { qp: self.handle(), step }) {
            Ok((Reply::CmStepped { state, path_mtu }, _)) => {
                if let Some(mtu) = path_mtu {
                    self.set_path_mtu(mtu);
                }
                if let Some(state) = state {
                    self.set_state(state);
                }
                Ok(())
            }
            Ok(_) => Err(self.session.nonsense()),
            Err(error) => {
                let _ = self.ask_state();
                Err(error)
            }
        }
    }

    /// The router has brought it to RTS, because its peer agreed to the connection.
    pub fn note_connected(&self) {
        let _alone = lock(&self.modifying);
        // Unless it was modified, or failed, meanwhile.
        if matches!(self.state(), QpState::Reset | QpState::Init) {
            self.set_state(QpState::ReadyToSend);
        }
    }
}
