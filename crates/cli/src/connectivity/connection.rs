//! A connection by rdma_cm for the connectivity test: what `librdmacm` asks of the router, in its messages.

use super::endpoint::{Endpoint, Queue};
use crate::failure::{Context as _, Failure, Result, fail};
use crate::process::poll_readable;
use freeflow_client::{Handle, connection_call};
use freeflow_protocol::cm::{
    CM_EVENT_BYTES_MAX, CmAddress, CmEvent, CmEventBody, CmEventKind, CmReply, CmRequest, CmStep, ConnectionParameters,
    PortSpace,
};
use freeflow_protocol::library::Request;
use freeflow_protocol::{decode, encode};
use freeflow_verbs::{Gid, QpType};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long one step of a connection may take.
const STEP_TIME: Duration = Duration::from_secs(4);
const RESOLVE_TIME_MS: u32 = 2000;
const PRIVATE_DATA: &[u8] = b"freeflow test connectivity";
/// Names the one identifier of a channel in its events.
const COOKIE: u64 = 1;

/// An identifier and the channel of its events.
pub struct Identifier<'a> {
    endpoint: &'a Endpoint,
    events: OwnedFd,
    id: Handle,
}

/// Whether a connection was made, and why not.
pub enum Outcome {
    Connected(Queue),
    Refused(String),
}

fn call(endpoint: &Endpoint, request: CmRequest) -> Result<(Option<CmReply>, Vec<OwnedFd>)> {
    let answer = connection_call(&endpoint.session, &encode(&Request::Cm(request)));
    let (reply, descriptors) = answer.map_err(|error| Failure::new(format!("rdma_cm: {error}")))?;
    Ok((decode(&reply).context("rdma_cm: the router's answer")?, descriptors))
}

fn parameters(queue: &Queue) -> ConnectionParameters {
    ConnectionParameters {
        private_data: PRIVATE_DATA.to_vec(),
        responder_resources: 1,
        initiator_depth: 1,
        retry_count: 7,
        rnr_retry_count: 7,
        qp_number: queue.qp.qpn(),
        ..ConnectionParameters::default()
    }
}

impl<'a> Identifier<'a> {
    pub fn create(endpoint: &'a Endpoint) -> Result<Self> {
        let (channel, events) = match call(endpoint, CmRequest::CreateChannel)? {
            (Some(CmReply::Channel { channel }), mut descriptors) if descriptors.len() == 1 => {
                (channel, descriptors.remove(0))
            }
            _ => fail!("rdma_cm: no channel of events"),
        };
        let create = CmRequest::CreateId { channel, port_space: PortSpace::Tcp, qp_type: QpType::Rc, cookie: COOKIE };
        match call(endpoint, create)? {
            (Some(CmReply::Id { id }), _) => Ok(Self { endpoint, events, id }),
            _ => fail!("rdma_cm: no identifier"),
        }
    }

    /// The next event within the time.
    fn event(&self, time: Duration) -> Result<Option<CmEvent>> {
        let deadline = Instant::now() + time;
        while !poll_readable(&self.events, Some(deadline.saturating_duration_since(Instant::now())))
            .context("rdma_cm events")?
        {
            if Instant::now() >= deadline {
                return Ok(None);
            }
        }
        let mut record = vec![0; CM_EVENT_BYTES_MAX];
        let length = rustix::io::read(&self.events, &mut record).context("rdma_cm events")?;
        record.truncate(length);
        Ok(Some(decode(&record).context("rdma_cm events")?))
    }

    /// Waits for one kind of event; another one is the reason why the connection is refused.
    fn expect(&self, kind: CmEventKind) -> Result<std::result::Result<CmEvent, String>> {
        Ok(match self.event(STEP_TIME)? {
            Some(event) if event.kind == kind => Ok(event),
            Some(event) => Err(format!("{:?} (status {})", event.kind, event.status)),
            None => Err(format!("no {kind:?} within {} s", STEP_TIME.as_secs())),
        })
    }

    /// Listens at any free port, which is the result.
    pub fn listen(&self) -> Result<u16> {
        let address = CmAddress { gid: self.endpoint.gid()?, port: 0 };
        call(self.endpoint, CmRequest::Bind { id: self.id, address })?;
        match call(self.endpoint, CmRequest::Listen { id: self.id, backlog: 1 })? {
            (Some(CmReply::Bound { local }), _) => Ok(local.port),
            _ => fail!("rdma_cm: the identifier is not bound"),
        }
    }

    /// Waits for a peer's request and accepts it. The QP has its RECVs before.
    pub fn accept(&self) -> Result<Outcome> {
        let event = match self.expect(CmEventKind::ConnectRequest)? {
            Ok(event) => event,
            Err(reason) => return Ok(Outcome::Refused(reason)),
        };
        let CmEventBody::Request { id, .. } = event.body else { fail!("rdma_cm: a request without an identifier") };
        let queue = self.endpoint.connection_queue(id)?;
        self.endpoint.post_receives(&queue)?;
        let accept = CmStep::Accept { id, cookie: COOKIE + 1, parameters: parameters(&queue) };
        queue.qp.step(accept).context("rdma_cm: can't accept")?;
        Ok(match self.expect(CmEventKind::Established)? {
            Ok(_) => Outcome::Connected(queue),
            Err(reason) => Outcome::Refused(reason),
        })
    }

    /// Connects to a listener.
    pub fn connect(&self, gid: Gid, port: u16) -> Result<Outcome> {
        let destination = CmAddress { gid, port };
        let resolve = CmRequest::ResolveAddress { id: self.id, source: None, destination, timeout_ms: RESOLVE_TIME_MS };
        if let Err(failure) = call(self.endpoint, resolve) {
            return Ok(Outcome::Refused(failure.to_string()));
        }
        if let Err(reason) = self.expect(CmEventKind::AddressResolved)? {
            return Ok(Outcome::Refused(reason));
        }
        call(self.endpoint, CmRequest::ResolveRoute { id: self.id, timeout_ms: RESOLVE_TIME_MS })?;
        if let Err(reason) = self.expect(CmEventKind::RouteResolved)? {
            return Ok(Outcome::Refused(reason));
        }
        let queue = self.endpoint.connection_queue(self.id)?;
        self.endpoint.post_receives(&queue)?;
        if let Err(error) = queue.qp.step(CmStep::Connect { id: self.id, parameters: parameters(&queue) }) {
            return Ok(Outcome::Refused(error.to_string()));
        }
        Ok(match self.expect(CmEventKind::Established)? {
            Ok(_) => {
                queue.qp.note_connected();
                Outcome::Connected(queue)
            }
            Err(reason) => Outcome::Refused(reason),
        })
    }
}
