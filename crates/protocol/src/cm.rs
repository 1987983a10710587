//! Connection management, library ↔ router: what `rdma_cm` asks of the router, which is the
//! connection manager (CM) of all its vNICs. So a container can't forge another's address, port or
//! private data.
//!
//! An *identifier* is the router's half of a `struct rdma_cm_id`. Its events come through the
//! socket of its *event channel*, one record ([`CmEvent`], encoded) a `read`: the socket is a
//! `SOCK_SEQPACKET` one, by which the library can send nothing, and no record is longer than
//! [`CM_EVENT_BYTES_MAX`]. So who waits for the socket's descriptor waits for events, as with the
//! kernel's.
//!
//! An address is a GID: IPv4 addresses are mapped (`::ffff:a.b.c.d`), so `::ffff:0.0.0.0` and `::`
//! are the wildcards of both families. Loopback addresses mean the vNIC itself.
use crate::library::Handle;
use alloc::vec::Vec;
use freeflow_verbs::{AddressHandleAttributes, Gid, PathMtu, QpAttributeMask, QpAttributes, QpState, QpType};
use serde::{Deserialize, Serialize};

/// Longest event record, encoded, bytes.
pub const CM_EVENT_BYTES_MAX: usize = 1024;
/// Longest private data of any message (DREP, RTU), bytes.
pub const PRIVATE_DATA_BYTES_MAX: usize = 224;

/// `enum rdma_port_space`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum PortSpace {
    /// `RDMA_PS_IPOIB`.
    Ipoib,
    /// `RDMA_PS_TCP`: connections.
    Tcp,
    /// `RDMA_PS_UDP`: datagrams.
    Udp,
    /// `RDMA_PS_IB`: either.
    Ib,
}

/// An address and port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CmAddress {
    /// The address.
    pub gid: Gid,
    /// The port, host byte order; 0: none, or any.
    pub port: u16,
}

/// A request of the drop-in `librdmacm`. Fields: handles have the name of their kind of object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
pub enum CmRequest {
    /// → `Channel` + 1 descriptor: the socket of events.
    CreateChannel,
    /// Busy while identifiers are on it.
    DestroyChannel { channel: Handle },
    /// `cookie` names the identifier in its events. → `Id`.
    CreateId { channel: Handle, port_space: PortSpace, qp_type: QpType, cookie: u64 },
    /// Ends whatever it is in the midst of, as `rdma_destroy_id` does: a connection is
    /// disconnected, a request that was not answered rejected, a listener's requests with it. →
    /// `Destroyed`.
    DestroyId { id: Handle },
    /// Further events of the identifier go to another channel. Those in the socket of the old one
    /// stay there; the library brings them along by `Repost`.
    MigrateId { id: Handle, channel: Handle },
    /// Puts records, which the library took out of a socket of its own, into one of its own, before
    /// all that is owed to it.
    Repost { channel: Handle, records: Vec<Vec<u8>> },
    /// → `Bound`. Port 0: any that is free. AddressInUse, AddressNotAvailable.
    Bind { id: Handle, address: CmAddress },
    /// Binds it too, if it is not bound, to `source` or to what fits. Then event AddressResolved or
    /// AddressError: a destination that nobody has is waited for so long. → `Bound`.
    ResolveAddress { id: Handle, source: Option<CmAddress>, destination: CmAddress, timeout_ms: u32 },
    /// Then event RouteResolved or RouteError.
    ResolveRoute { id: Handle, timeout_ms: u32 },
    /// → `Bound`: an identifier that was not bound gets a port.
    Listen { id: Handle, backlog: u32 },
    /// Sends the request (REQ, or SIDR REQ). The QP is `parameters.qp_number`; the library has brought it to INIT.
    Connect { id: Handle, parameters: ConnectionParameters },
    /// Accepts a request. `cookie` is the identifier's from now on (the one of `ConnectRequest`
    /// events is the listener's).
    Accept { id: Handle, cookie: u64, parameters: ConnectionParameters },
    /// Rejects a request, with private data for the peer.
    Reject {
        id: Handle,
        private_data: Vec<u8>,
        /// For want of a common extended connection establishment (`rdma_reject_ece`).
        ece: bool,
    },
    /// The active side's RTU, if the router does not change the QP: `rdma_establish`, or on event ConnectResponse.
    Establish { id: Handle },
    /// The passive side's QP got a message before the RTU came (`rdma_notify`, COMM_EST).
    Notify { id: Handle },
    /// → `Done` also if the peer was first.
    Disconnect { id: Handle },
    /// Asks for the attributes with which the QP is modified on its way to this state. →
    /// `QpAttributes`.
    InitQpAttributes { id: Handle, state: QpState },
    /// Then event MulticastJoin or MulticastError. The library attaches the QP itself. `cookie`
    /// names the membership in its events.
    JoinMulticast { id: Handle, address: Gid, send_only: bool, cookie: u64 },
    /// Ends a membership. The library detaches the QP itself.
    LeaveMulticast { id: Handle, address: Gid },
    /// Sets an option of the identifier (`rdma_set_option`).
    SetOption { id: Handle, option: CmOption },
}

/// A step of a connection that goes with a change of its queue pair: both in one request, since
/// each costs a library two wake-ups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
pub enum CmStep {
    /// As [`CmRequest::Connect`]. When the peer agrees, the router brings the QP to RTS, answers
    /// the peer, and the event is Established, with what the peer said. Where the router can't, or
    /// shall not (the peer asks for options of extended connection establishment), the event is
    /// ConnectResponse and all that is left to the library.
    Connect { id: Handle, parameters: ConnectionParameters },
    /// The QP goes to RTS, with the depths of `parameters`; then as [`CmRequest::Accept`].
    Accept { id: Handle, cookie: u64, parameters: ConnectionParameters },
    /// The QP goes to ERROR; then as [`CmRequest::Disconnect`].
    Disconnect { id: Handle },
}

impl CmStep {
    /// The identifier.
    pub fn id(&self) -> Handle {
        match self {
            Self::Connect { id, .. } | Self::Accept { id, .. } | Self::Disconnect { id } => *id,
        }
    }

    /// The request for the connection manager.
    pub fn into_request(self) -> CmRequest {
        match self {
            Self::Connect { id, parameters } => CmRequest::Connect { id, parameters },
            Self::Accept { id, cookie, parameters } => CmRequest::Accept { id, cookie, parameters },
            Self::Disconnect { id } => CmRequest::Disconnect { id },
        }
    }
}

/// In place of a number of outstanding READs and atomics: what the two ends agreed on.
pub const DEPTH_AGREED: u8 = 0xff;

/// Option of an identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CmOption {
    /// IPv4 type of service or IPv6 traffic class.
    TypeOfService(u8),
    /// `RDMA_OPTION_ID_REUSEADDR`.
    ReuseAddress(bool),
    /// `RDMA_OPTION_ID_AFONLY`: a wildcard address stands for its own family.
    AddressFamilyOnly(bool),
    /// Local ACK timeout: 4.096 us * 2^n.
    AckTimeout(u8),
}

/// `struct rdma_conn_param`, and what `rdma_set_local_ece` said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionParameters {
    /// The user's: without the header that carries the addresses.
    pub private_data: Vec<u8>,
    /// READs and atomics of the peer that the own QP answers at a time.
    pub responder_resources: u8,
    /// READs and atomics that the own QP has outstanding.
    pub initiator_depth: u8,
    /// End-to-end flow control; has no effect.
    pub flow_control: bool,
    /// Retries without an acknowledgement, 3 bits.
    pub retry_count: u8,
    /// Retries after an RNR NAK, 3 bits; 7 means for ever.
    pub rnr_retry_count: u8,
    /// The QP uses an SRQ.
    pub srq: bool,
    /// The QP's number.
    pub qp_number: u32,
    /// UD: 0 is the port space's own.
    pub qkey: u32,
    /// Options of extended connection establishment.
    pub ece: Ece,
}

/// Extended connection establishment (`struct ibv_ece`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ece {
    /// The vendor; 0: no options.
    pub vendor_id: u32,
    /// The vendor's own bits.
    pub options: u32,
}

/// Answer to a [`CmRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
pub enum CmReply {
    /// The new event channel.
    Channel { channel: Handle },
    /// The new identifier.
    Id { id: Handle },
    /// So many events of the identifier were sent: who has not read and acknowledged them all waits for it.
    Destroyed { event_count: u32 },
    /// The identifier's address and port now.
    Bound { local: CmAddress },
    /// Attributes of the QP, and which of them count.
    QpAttributes { attributes: QpAttributes, mask: QpAttributeMask },
}

/// `enum rdma_cm_event_type`, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CmEventKind {
    /// The address is found.
    AddressResolved,
    /// The address is not found.
    AddressError,
    /// The route is found.
    RouteResolved,
    /// The route is not found.
    RouteError,
    /// A peer wants to connect.
    ConnectRequest,
    /// The peer has accepted; the QP is the library's to modify.
    ConnectResponse,
    /// The connection failed for a local reason.
    ConnectError,
    /// The peer does not answer.
    Unreachable,
    /// The peer, or its router, has refused.
    Rejected,
    /// The connection is there.
    Established,
    /// The connection has ended.
    Disconnected,
    /// The device is gone.
    DeviceRemoval,
    /// The group is joined.
    MulticastJoin,
    /// The group can't be joined, or is lost.
    MulticastError,
    /// The local address has changed.
    AddressChange,
    /// The QP's number may be used again.
    TimewaitExit,
}

/// One event of an identifier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CmEvent {
    /// The identifier's. Of ConnectRequest: the listener's. Of MulticastJoin and MulticastError: the membership's.
    pub cookie: u64,
    /// Kind of event.
    pub kind: CmEventKind,
    /// 0; or a negative errno; or, of Rejected, the reason (IBTA 12.6.7.2), of an UD Unreachable the SIDR status.
    pub status: i32,
    /// Facts that belong to the event.
    pub body: CmEventBody,
}

/// Facts of an event, by its kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
pub enum CmEventBody {
    /// None.
    Nothing,
    /// Where the identifier is now.
    Route(CmRoute),
    /// ConnectRequest: a new identifier, on the listener's channel.
    Request { id: Handle, route: CmRoute, parameters: ConnectionParameters, qp_type: QpType },
    /// The peer's parameters of the connection. Private data has the full length that its message
    /// has room for.
    Connection(ConnectionParameters),
    /// SIDR REP: how the peer's QP is reached. MulticastJoin: how the group is.
    Datagram { address: AddressHandleAttributes, qp_number: u32, qkey: u32, private_data: Vec<u8> },
}

/// Where an identifier is, and whom it talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CmRoute {
    /// The identifier's own address.
    pub local: CmAddress,
    /// Address of the other end.
    pub remote: CmAddress,
    /// Of the local address in the vNIC's GID table.
    pub gid_index: u8,
    /// Path MTU.
    pub mtu: PathMtu,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// IPv4 type of service or IPv6 traffic class.
    pub traffic_class: u8,
    /// Time a packet takes, as in a path record: 4.096 us * 2^n.
    pub packet_life_time: u8,
}
