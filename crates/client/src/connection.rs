//! Connection management by this session, for a library that knows the messages and has no session
//! of its own.
use crate::lock;
use crate::queue_pair::QueuePair;
use crate::session::Session;
use freeflow_protocol::cm::CmStep;
use freeflow_protocol::library::{Reply, Request};
use freeflow_protocol::{decode, encode};
use freeflow_verbs::{QpState, VerbsError};
use std::os::fd::OwnedFd;

/// Sends an encoded `Request::Cm`; the answer is an encoded `Option<CmReply>` (`None`: done), with
/// its descriptors.
///
/// # Errors
/// InvalidArgument: any other request. What the router refuses.
pub fn connection_call(session: &Session, request: &[u8]) -> Result<(Vec<u8>, Vec<OwnedFd>), VerbsError> {
    let Ok(Request::Cm(request)) = decode(request) else { return Err(VerbsError::InvalidArgument) };
    let (reply, descriptors) = session.connection_call(request)?;
    Ok((encode(&reply), descriptors.into_iter().map(OwnedFd::from).collect()))
}

/// Takes an encoded `CmStep` of the connection that a QP is for.
///
/// # Errors
/// InvalidArgument: it is none. Those of [`QueuePair::step`].
pub fn connection_step(qp: &QueuePair, step: &[u8]) -> Result<(), VerbsError> {
    qp.step(decode::<CmStep>(step).map_err(|_| VerbsError::InvalidArgument)?)
}

impl QueuePair {
    /// Takes a step of the connection that this QP is for.
    ///
    /// # Errors
    /// Those of the change and of the step; the QP may have been modified all the same, and its
    /// state is known then.
    pub fn step(&self, step: CmStep) -> Result<(), VerbsError> {
        let _alone = lock(&self.modifying);
        if matches!(step, CmStep::Disconnect { .. }) {
            self.drain_direct_ring();
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
