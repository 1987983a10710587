//! Connection management by way of this session, for a library that knows the messages and has no session of its own.
use crate::queue_pair::QueuePair;
use crate::session::Session;
use freeflow_protocol::cm::CmStep;
use freeflow_protocol::library::Request;
use freeflow_protocol::{decode, encode};
use freeflow_verbs::VerbsError;
use std::os::fd::OwnedFd;

/// Sends an encoded `Request::Cm`; the answer is an encoded `Option<CmReply>` (`None`: done), with its descriptors.
///
/// # Errors
/// InvalidArgument: any other request. What the router refuses.
pub fn connection_call(session: &Session, request: &[u8]) -> Result<(Vec<u8>, Vec<OwnedFd>), VerbsError> {
    let Ok(Request::Cm(request)) = decode(request) else { return Err(VerbsError::InvalidArgument) };
    let (reply, descriptors) = session.connection_call(request)?;
    Ok((encode(&reply), descriptors))
}

/// Takes an encoded `CmStep` of the connection that a QP is for.
///
/// # Errors
/// InvalidArgument: it is none. Those of [`QueuePair::step`].
pub fn connection_step(qp: &QueuePair, step: &[u8]) -> Result<(), VerbsError> {
    qp.step(decode::<CmStep>(step).map_err(|_| VerbsError::InvalidArgument)?)
}
