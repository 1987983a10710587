//! A library's side of connection management, made of nothing but messages and a pipe.
use super::{Client, WAIT_MAX, until};
use freeflow_protocol::cm::{
    CM_EVENT_BYTES_MAX, CmAddress, CmEvent, CmEventBody, CmEventKind, CmReply, CmRequest, ConnectionParameters,
    PortSpace,
};
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_verbs::{Gid, QpType, VerbsError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

pub struct Channel {
    pub handle: Handle,
    pub events: OwnedFd,
}

/// So many milliseconds.
fn time(ms: i64) -> Timespec {
    Timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 }
}

impl Channel {
    /// The next record, as it came.
    pub fn record(&self) -> Vec<u8> {
        let mut polled = [PollFd::new(&self.events, PollFlags::IN)];
        let ready = poll(&mut polled, Some(&time(WAIT_MAX.as_millis() as i64))).unwrap();
        assert_eq!(ready, 1, "waited in vain for an event");
        let mut bytes = [0; CM_EVENT_BYTES_MAX];
        let count = rustix::io::read(&self.events, &mut bytes).unwrap();
        bytes[..count].to_vec()
    }

    pub fn event(&self) -> CmEvent {
        freeflow_protocol::decode(&self.record()).expect("an event")
    }

    /// The next event, of this kind. That TimeWait of something before ends is passed over.
    pub fn expect(&self, kind: CmEventKind) -> CmEvent {
        let event = loop {
            let event = self.event();
            if event.kind == kind || event.kind != CmEventKind::TimewaitExit {
                break event;
            }
        };
        assert_eq!(event.kind, kind, "{event:?}");
        event
    }

    /// Nothing comes.
    pub fn is_silent(&self) -> bool {
        poll(&mut [PollFd::new(&self.events, PollFlags::IN)], Some(&time(100))) == Ok(0)
    }
}

impl Client {
    pub fn cm(&self, request: CmRequest) -> Reply {
        self.ask(&Request::Cm(request))
    }

    pub fn cm_done(&self, request: CmRequest) {
        let text = format!("{request:?}");
        assert_eq!(self.cm(request), Reply::Done, "{text}");
    }

    pub fn cm_refused(&self, request: CmRequest) -> VerbsError {
        self.refused(&Request::Cm(request))
    }

    pub fn cm_channel(&self) -> Channel {
        let (reply, mut fds) = self.ask_fds(&Request::Cm(CmRequest::CreateChannel));
        let Reply::Cm(CmReply::Channel { channel }) = reply else { panic!("{reply:?}") };
        Channel { handle: channel, events: fds.pop().unwrap() }
    }

    pub fn cm_id(&self, channel: &Channel, cookie: u64) -> Handle {
        self.cm_id_of(channel, PortSpace::Tcp, QpType::Rc, cookie)
    }

    pub fn cm_id_of(&self, channel: &Channel, port_space: PortSpace, qp_type: QpType, cookie: u64) -> Handle {
        match self.cm(CmRequest::CreateId { channel: channel.handle, port_space, qp_type, cookie }) {
            Reply::Cm(CmReply::Id { id }) => id,
            other => panic!("{other:?}"),
        }
    }

    pub fn cm_bound(&self, request: CmRequest) -> CmAddress {
        match self.cm(request) {
            Reply::Cm(CmReply::Bound { local }) => local,
            other => panic!("{other:?}"),
        }
    }

    /// The number of events that its identifier had.
    pub fn cm_destroy(&self, id: Handle) -> u32 {
        match self.cm(CmRequest::DestroyId { id }) {
            Reply::Cm(CmReply::Destroyed { event_count }) => event_count,
            other => panic!("{other:?}"),
        }
    }

    /// A listener of all addresses; and the address it is reached by.
    pub fn cm_listen(&self, channel: &Channel, cookie: u64) -> (Handle, CmAddress) {
        let id = self.cm_id(channel, cookie);
        self.cm_bound(CmRequest::Bind { id, address: CmAddress::default() });
        let CmAddress { port, .. } = self.cm_bound(CmRequest::Listen { id, backlog: 1000 });
        (id, CmAddress { gid: self.gid(), port })
    }

    /// An identifier that knows its way to an address.
    pub fn cm_resolved(&self, channel: &Channel, destination: CmAddress, cookie: u64) -> Handle {
        let id = self.cm_id(channel, cookie);
        self.cm_bound(CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 2000 });
        channel.expect(CmEventKind::AddressResolved);
        self.cm_done(CmRequest::ResolveRoute { id, timeout_ms: 2000 });
        channel.expect(CmEventKind::RouteResolved);
        id
    }

    /// The event of a request: its identifier, and what it says.
    pub fn cm_request(&self, channel: &Channel) -> (Handle, ConnectionParameters) {
        match channel.expect(CmEventKind::ConnectRequest).body {
            CmEventBody::Request { id, parameters, .. } => (id, parameters),
            other => panic!("{other:?}"),
        }
    }
}

/// Each with another QP: the same one again would be a stale connection.
pub fn parameters(private_data: &[u8]) -> ConnectionParameters {
    static QP_NUMBER: AtomicU32 = AtomicU32::new(2);
    ConnectionParameters {
        private_data: private_data.into(),
        qp_number: QP_NUMBER.fetch_add(1, Relaxed),
        retry_count: 7,
        rnr_retry_count: 7,
        ..ConnectionParameters::default()
    }
}

pub fn at(gid: Gid, port: u16) -> CmAddress {
    CmAddress { gid, port }
}

/// Two ends of a connection.
pub struct CmPair<'a> {
    pub a: &'a Client,
    pub b: &'a Client,
    pub a_channel: Channel,
    pub b_channel: Channel,
    pub listener: Handle,
    pub address: CmAddress,
}

impl<'a> CmPair<'a> {
    /// `b` listens.
    pub fn new(a: &'a Client, b: &'a Client) -> Self {
        let (a_channel, b_channel) = (a.cm_channel(), b.cm_channel());
        let (listener, address) = b.cm_listen(&b_channel, 1);
        Self { a, b, a_channel, b_channel, listener, address }
    }

    /// `a` has connected to `b`: their identifiers.
    pub fn connect(&self) -> (Handle, Handle) {
        let active = self.a.cm_resolved(&self.a_channel, self.address, 2);
        self.a.cm_done(CmRequest::Connect { id: active, parameters: parameters(b"hello") });
        let (passive, asked) = self.b.cm_request(&self.b_channel);
        assert_eq!(asked.private_data[..5], *b"hello");
        self.b.cm_done(CmRequest::Accept { id: passive, cookie: 3, parameters: parameters(b"welcome") });
        let answer = self.a_channel.event();
        if answer.kind == CmEventKind::ConnectResponse {
            self.a.cm_done(CmRequest::Establish { id: active });
        } else {
            assert_eq!(answer.kind, CmEventKind::Established, "{answer:?}");
        }
        let CmEventBody::Connection(said) = answer.body else { panic!("{answer:?}") };
        assert_eq!(said.private_data[..7], *b"welcome");
        let event = self.b_channel.expect(CmEventKind::Established);
        assert_eq!(event.cookie, 3);
        (active, passive)
    }
}

/// The other host's announcement has come.
pub fn until_reachable(a: &Client, b: &Client) {
    let channel = a.cm_channel();
    until("the address to be known", || {
        let id = a.cm_id(&channel, 1);
        let destination = at(b.gid(), 7);
        let reply = a.cm(CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 100 });
        let found = match reply {
            Reply::Failed(VerbsError::Unreachable) => None,
            Reply::Cm(CmReply::Bound { .. }) => Some(channel.event()).filter(|event| event.status == 0),
            other => panic!("{other:?}"),
        };
        a.cm_destroy(id);
        found
    });
}
