//! Library ↔ router, on the container's own socket.
//!
//! Objects are named by handles that the router gives out and checks against the session (one
//! session is one process' connection): a handle of another session is `NotFound`. *Cookies* are
//! numbers that the library chooses; the router only echoes them in completions and events. A QP's
//! or SRQ's cookie is also its doorbell index, unique in its session among QPs and SRQs and below
//! [`COOKIE_COUNT`]; a CQ's cookie is unique among CQs and below it too, and its doorbell is
//! `COOKIE_COUNT` + cookie.
use crate::cm::{CmReply, CmRequest, CmStep};
use crate::version::{Agreement, Offer, VersionRange};
use alloc::string::String;
use alloc::vec::Vec;
use freeflow_verbs::{
    Access, AddressHandleAttributes, DeviceAttributes, FileIdentity, Gid, GlobalRoute, PathMtu, QpAttributeMask,
    QpAttributes, QpCapabilities, QpState, QpType, RegionChange, SendOpcode, SrqAttributes, VerbsError, WindowKind,
    XrcdOpenFlags,
};
use serde::{Deserialize, Serialize};

/// Doorbells of one session.
pub const DOORBELL_COUNT: u32 = 65_536;
/// Cookies of QPs and SRQs together, and of CQs.
pub const COOKIE_COUNT: u32 = DOORBELL_COUNT / 2;

/// A handle: the router's name for an object of this session.
pub type Handle = u32;

/// Requests that a grant is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum GrantAccess {
    /// READ.
    Read,
    /// WRITE.
    Write,
    /// FETCH_ADD and COMPARE_SWAP. Only after [`FEATURE_DIRECT_ATOMICS`](crate::FEATURE_DIRECT_ATOMICS) was agreed on.
    Atomic,
}

impl GrantAccess {
    /// Of a request, if there are grants for such.
    pub const fn of(opcode: SendOpcode) -> Option<Self> {
        match opcode {
            SendOpcode::RdmaRead => Some(Self::Read),
            SendOpcode::RdmaWrite | SendOpcode::RdmaWriteWithImmediate => Some(Self::Write),
            SendOpcode::FetchAdd | SendOpcode::CompareSwap => Some(Self::Atomic),
            _ => None,
        }
    }

    /// One of the requests.
    pub const fn opcode(self) -> SendOpcode {
        match self {
            Self::Read => SendOpcode::RdmaRead,
            Self::Write => SendOpcode::RdmaWrite,
            Self::Atomic => SendOpcode::FetchAdd,
        }
    }

    /// Whether it needs memory that is mapped for writing.
    pub const fn writes(self) -> bool {
        !matches!(self, Self::Read)
    }
}

/// A request of a library. Fields: handles have the name of their kind of object; lengths, offsets
/// and addresses are bytes; all others are the verb's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
pub enum Request {
    /// → `Welcome` + 2 descriptors: session segment (memfd), kick (eventfd: write 8 bytes to wake the router).
    /// `Incompatible`: no version or layout is common to both. `layouts` are versions of the shared
    /// segments; a layout grows in its reserved places, behind a feature bit of the protocol.
    Hello { protocol: Offer, layouts: VersionRange, program: String },
    /// → `Context` + 2 descriptors: socket of asynchronous events ([`EVENT_BYTES`] each); the context's
    /// *pass*, a sealed memfd of [`PASS_BYTES`] random bytes. Who has the pass may import the context.
    OpenContext,
    /// A context with the objects of another one, which a process of the same vNIC opened: `ImportPd`, `ImportMr` and
    /// `ImportSegment` then find them by their handles there. → like `OpenContext`; the pass is the other context's.
    /// NotFound: no such pass in this vNIC, or that context is closed.
    ImportContext { pass: [u8; PASS_BYTES] },
    /// Closes a context. Busy while it has objects.
    CloseContext { context: Handle },
    /// → `Channel` + 1 descriptor: socket of completion events ([`EVENT_BYTES`] each).
    CreateChannel { context: Handle },
    /// Closes a completion channel. Busy while CQs use it.
    DestroyChannel { channel: Handle },
    /// → `Pd`.
    AllocPd { context: Handle },
    /// Busy while something is in it. An imported PD: only this process gives it up.
    DeallocPd { pd: Handle },
    /// `pd` is the other process' handle. → `Pd`, this process' own handle. The PD lasts as long as either uses it.
    ImportPd { context: Handle, pd: Handle },
    /// `mr` is the handle of the process that registered the region, `pd` this process' own. → `ImportedMr`.
    /// InvalidArgument: the region is in another PD.
    ImportMr { pd: Handle, mr: Handle },
    /// `segment` is the handle of the process that made it (device memory). → `Segment` + 1 descriptor. NoMemory: the
    /// router had no descriptor to keep for it. NotSupported: it is, or was, granted to another process (`AskGrant`).
    ImportSegment { context: Handle, segment: Handle },
    /// Memory for `ibv_malloc`. → `Segment` + 1 descriptor (memfd, sealed against shrinking and growing).
    CreateSegment { length: u64 },
    /// Says where the process mapped the segment: the router's page table then reaches these bytes without copying.
    /// NotSupported: others may still reach the segment, which was revoked from them (`OpenCommands`).
    MapSegment { segment: Handle, address: u64 },
    /// Says that the process mapped `length` bytes of the segment, from `offset` on, at `address`
    /// too: pages of ordinary memory that it registers. All three are multiples of the page.
    /// InvalidArgument: they overlap something mapped. NotSupported: as for `MapSegment`; a segment
    /// that is granted is revoked first if these pages lie outside the region by which it is.
    MapPart { segment: Handle, offset: u64, address: u64, length: u64 },
    /// The process is about to put ordinary memory in the place of the parts between these addresses, or has done so
    /// with its copies of revoked ones. On return the router does not use them any more.
    UnmapPart { address: u64, length: u64 },
    /// Stops all threads of the process but the one that asks, which names itself by its ID in its own PID namespace,
    /// until `ThawThreads`, and for one second at most. System calls that are interrupted go on afterwards.
    /// NotPermitted: a thread is traced, or can't be stopped. TimedOut: they did not all stop soon.
    FreezeThreads {
        thread: u32,
        /// The router itself reaches nothing of the process' memory by address as long. Busy:
        /// something of that is under way, and takes its time.
        quiesce: bool,
    },
    /// TimedOut: the threads run again since the second was over. NotFound: they were not frozen.
    ThawThreads,
    /// Once more the descriptor of a segment that this process made. → `Segment` + 1 descriptor.
    ReopenSegment { segment: Handle },
    /// The process unmapped the segment. Refused with Busy while an MR lies over it, or a part of
    /// it is mapped. A revoke command about it is carried out by that.
    DestroySegment { segment: Handle },
    /// → `Mr`.
    RegisterMr { pd: Handle, address: u64, length: u64, iova: u64, access: Access },
    /// The keys are invalid at once. Busy while windows are bound to it. An imported MR: only this process gives it up.
    DeregisterMr { mr: Handle },
    /// Changes a region in place, when no copy uses it; its keys stay. Busy while windows are bound to it.
    ReregisterMr { mr: Handle, pd: Option<Handle>, change: RegionChange },
    /// A region of all addresses: local reads give zeros, local writes are dropped. It has no remote rights. → `Mr`.
    AllocNullMr { pd: Handle },
    /// → `Mw`.
    AllocMw { pd: Handle, kind: WindowKind },
    /// Takes a binding away too.
    DeallocMw { mw: Handle },
    /// An XRC domain: that of `file` within this vNIC, or a nameless one. Without `create` it must
    /// exist (NotFound); with `exclusive` too it must not (Exists). → `Xrcd`.
    OpenXrcd { context: Handle, file: Option<FileIdentity>, flags: XrcdOpenFlags },
    /// Busy while this process' SRQs or QPs are in it.
    CloseXrcd { xrcd: Handle },
    /// → `Cq` + 1 descriptor: the ring's segment.
    CreateCq {
        context: Handle,
        cqe: u32,
        channel: Option<Handle>,
        cookie: u32,
        /// Each completion has the time at which it was written. Else the time may be that of the
        /// worker's turn.
        timestamps: bool,
    },
    /// The library holds the CQ's consumer lock. → `Cq` + 1 descriptor: the new ring's segment. The old ring holds
    /// what was completed before and gets nothing more; the new one begins empty, and its capacity counts what is
    /// still in the old one.
    ResizeCq { cq: Handle, cqe: u32 },
    /// Notifications wait for so many completions, or for so long after the first, microseconds, whichever is first. A
    /// count of 0 waits for the time only, a time of 0 for the count only. 0 and 0: at once.
    ModerateCq { cq: Handle, count: u16, period_us: u16 },
    /// Busy while QPs complete on it.
    DestroyCq { cq: Handle },
    /// → `Srq` + 1 descriptor.
    CreateSrq {
        pd: Handle,
        attributes: SrqAttributes,
        cookie: u32,
        /// An SRQ for XRC: its domain, and the CQ of its RECVs.
        xrc: Option<XrcQueue>,
    },
    /// Only the limit can change (`IBV_SRQ_LIMIT`); a new size is NotSupported.
    ModifySrq { srq: Handle, limit: u32 },
    /// → `SrqAttributes`.
    QuerySrq { srq: Handle },
    /// Busy while QPs use it.
    DestroySrq { srq: Handle },
    /// → `Qp` + 1 descriptor (none for `XrcReceive`, which has no rings).
    CreateQp {
        qp_type: QpType,
        /// All but `XrcReceive`.
        pd: Option<Handle>,
        send_cq: Option<Handle>,
        /// RC, UC, UD.
        recv_cq: Option<Handle>,
        srq: Option<Handle>,
        /// `XrcReceive`.
        xrcd: Option<Handle>,
        capabilities: QpCapabilities,
        all_signaled: bool,
        /// UD: its own multicast messages don't come back to it (`IBV_QP_CREATE_BLOCK_SELF_MCAST_LB`).
        block_own_multicast: bool,
        cookie: u32,
        /// The identifier that it is for: the QP is brought to INIT as
        /// `CmRequest::InitQpAttributes` has it, and a UD one to RTS.
        connection: Option<Handle>,
    },
    /// Another process' `XrcReceive` QP of an XRC domain that this process has open. → `Qp` without a descriptor. Its
    /// events come to every process that has it open; it goes when the last has destroyed it.
    OpenQp { xrcd: Handle, qpn: u32, cookie: u32 },
    /// → `QpModified`. Returns once no copy into or out of this QP's buffers is under way (RESET, ERROR).
    ModifyQp { qp: Handle, attributes: QpAttributes, mask: QpAttributeMask },
    /// → `QpAttributes`.
    QueryQp { qp: Handle },
    /// Returns once nothing of the QP's buffers is touched any more.
    DestroyQp { qp: Handle },
    /// A direct ring to the peer of an RC QP, both on this host. → `Direct` + 1 descriptor: the
    /// ring's segment. It takes messages once the peer's process has accepted it. Busy: not now
    /// (a QP is not in a state for it). NotSupported: not on this connection, or not by this
    /// network's policy.
    OpenDirectRing { qp: Handle },
    /// The direct ring that the peer of this QP has opened. → `Direct` + 1 descriptor. NotFound: there is
    /// none.
    AcceptDirectRing { qp: Handle },
    /// Memory of the peer of an RC or UC QP, on the same host, that requests of this QP may reach by that
    /// key: so much around `address` (as requests name it) as can be reached in one piece, which
    /// may be less than `length`. It comes from a segment of which all that the owner has mapped
    /// lies in the region that the key names. → `Grant` + 1 descriptor, which can be mapped for
    /// writing only if the key lets this QP write. Busy: not now; it was revoked or is not shared,
    /// and may be after some traffic. NotSupported: not this memory, not on this connection, or
    /// not by this network's policy. RemoteAccess faults are NotSupported too: the request itself
    /// shall find them. `NotEnoughCredit`: not yet.
    AskGrant { qp: Handle, rkey: u32, address: u64, length: u32, access: GrantAccess },
    /// → `Done` + 1 descriptor: socket of commands, [`COMMAND_BYTES`] each: the handle of a segment
    /// of this process (u32 LE) that others could reach directly, and what to do (u32 LE).
    /// [`COMMAND_REVOKE`]: the process puts its own copies in the place of all that is mapped of
    /// it, and says so by `ConfirmRevocation`. Until it has, nothing is granted any more; a process
    /// that does not within [`REVOCATION_TIME_MAX_MS`] loses its session. [`COMMAND_RESHARE`]:
    /// where those copies are, it may put a new segment, and report it by `MapPart`; nobody waits
    /// for that. [`COMMAND_SHARE`]: the same of memory that the slow path reaches again and again,
    /// named by its address ([`share_command`]). Exists: they are open.
    OpenCommands,
    /// Nothing of this segment is mapped in the process any more. What the router knew of parts of
    /// it is gone before the command was sent. The segment can be destroyed then, but not mapped
    /// again. NotFound: there was no such command.
    ConfirmRevocation { segment: Handle },
    /// → `AddressHandle`.
    CreateAh { pd: Handle, attributes: AddressHandleAttributes },
    /// Requests that name it already are refused from now on.
    DestroyAh { ah: Handle },
    /// UD only. Attaching twice is one attachment.
    AttachMulticast { qp: Handle, gid: Gid },
    /// InvalidArgument if it is not attached.
    DetachMulticast { qp: Handle, gid: Gid },
    /// → `Cm`, or `Done` where its documentation names no reply.
    Cm(CmRequest),
    /// A step of a connection, and what it means to its QP. → `CmStepped`. After an error the QP
    /// may have been modified.
    CmStep { qp: Handle, step: CmStep },
    /// The router maps the file that the process itself has mapped, shared, at these addresses, and makes a segment of
    /// it: shared memory of System V and POSIX, memfds, anonymous shared mappings, files of tmpfs. Both
    /// are multiples of the page; one area of the process' map covers all of it. → `Segment`, without a descriptor: it
    /// is reported by `MapPart`, given up by `UnmapPart` and `DestroySegment`, and never granted to peers.
    /// NotSupported: the memory is none of these, or the router can't reach it so. NoMemory: beyond a limit. Only after
    /// [`FEATURE_BORROWED_SEGMENTS`](crate::FEATURE_BORROWED_SEGMENTS) was agreed on.
    BorrowSegment { address: u64, length: u64 },
    /// Like `OpenDirectRing`, for a UC QP: messages of it may be lost, so the router says which RECV
    /// the next one takes, and closes the ring when one is lost that would have taken a RECV. →
    /// `NumberedDirect` + 1 descriptor. Only after
    /// [`FEATURE_NUMBERED_DIRECT_RINGS`](crate::FEATURE_NUMBERED_DIRECT_RINGS) was agreed on.
    OpenNumberedDirectRing { qp: Handle },
    /// A direct ring from a UD QP to the QP on this host that datagrams with this address handle, remote QPN and
    /// Q_Key come to. `place`: which of the sender's rings it is, below [`DATAGRAM_RINGS_MAX`]; one that is there is
    /// closed. It is open while the send queue's header has the bit of this place, and takes datagrams once the
    /// receiver's process has accepted it. → `DatagramRing` + 1 descriptor: the ring's segment. Busy: not now (a QP
    /// is not in a state for it, or the receiver has as many rings). NotSupported: not to this destination, not
    /// with this Q_Key, or not by this network's policy. Only after
    /// [`FEATURE_DIRECT_DATAGRAMS`](crate::FEATURE_DIRECT_DATAGRAMS) was agreed on.
    OpenDatagramRing { qp: Handle, ah: Handle, remote_qpn: u32, qkey: u32, place: u32 },
    /// The oldest ring of datagrams to this QP that was not accepted yet. → `IncomingDatagramRing` + 1
    /// descriptor. NotFound: there is none. Only after the same.
    AcceptDatagramRing { qp: Handle },
}

/// Direct rings from one UD QP, and to one.
pub const DATAGRAM_RINGS_MAX: u32 = 64;

/// Parameters that make an SRQ one for XRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct XrcQueue {
    /// The XRC domain.
    pub xrcd: Handle,
    /// CQ of its RECVs.
    pub cq: Handle,
}

/// Bytes of a context's pass.
pub const PASS_BYTES: usize = 16;

/// Answer to a [`Request`], with the sizes that the library may rely on. Lengths are bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
pub enum Reply {
    /// The request is carried out, and has no other answer.
    Done,
    /// The request is refused.
    Failed(VerbsError),
    /// Answer to `Hello`.
    Welcome(Welcome),
    /// The new context.
    Context { context: Handle },
    /// The new completion channel.
    Channel { channel: Handle },
    /// The new protection domain.
    Pd { pd: Handle },
    /// The segment, and its length.
    Segment { segment: Handle, length: u64 },
    /// The new region and its keys.
    Mr { mr: Handle, lkey: u32, rkey: u32 },
    /// This process' own handle of the region, its keys and its length.
    ImportedMr { mr: Handle, lkey: u32, rkey: u32, length: u64 },
    /// The new window and its first key.
    Mw { mw: Handle, rkey: u32 },
    /// The domain.
    Xrcd { xrcd: Handle },
    /// The CQ, its capacity, and the length of its ring's segment.
    Cq { cq: Handle, cqe: u32, segment_bytes: u64 },
    /// `number`: what XRC senders call it; 0 for a basic SRQ.
    Srq { srq: Handle, number: u32, attributes: SrqAttributes, segment_bytes: u64 },
    /// Size and limit of an SRQ.
    SrqAttributes(SrqAttributes),
    /// The QP, its number, the sizes granted, and the length of its rings' segment.
    Qp { qp: Handle, qpn: u32, capabilities: QpCapabilities, segment_bytes: u64 },
    /// State of the QP now.
    QpModified { state: QpState },
    /// `credit_count`: slots of the receiver's receive queue; 0: it uses an SRQ, and promises RECVs
    /// of that instead. `direct_rings_closed`: as the sender's send queue says; another number there
    /// says that the ring is closed. So does the receiver's receive queue, if
    /// [`FEATURE_NUMBERED_DIRECT_RINGS`](crate::FEATURE_NUMBERED_DIRECT_RINGS) was agreed on.
    /// `takes_writes`: while it is open, WRITEs without bytes are allowed, too.
    Direct { segment_bytes: u64, credit_count: u32, direct_rings_closed: u32, takes_writes: bool },
    /// The peer's memory from `address` on (as requests name it): `length` bytes that begin at
    /// `offset` of the segment. It holds while the send queue says so of `grants_revoked`.
    /// `writable`: it was asked for WRITE.
    Grant { address: u64, length: u64, offset: u64, segment_bytes: u64, grants_revoked: u32, writable: bool },
    /// All attributes of a QP.
    QpAttributes(QpAttributes),
    /// The new address handle.
    AddressHandle { ah: Handle },
    /// Answer of the connection manager.
    Cm(CmReply),
    /// `state`: the QP's, if it was modified. `path_mtu`: that of the connection, if it has one.
    CmStepped { state: Option<QpState>, path_mtu: Option<PathMtu> },
    /// Memory is granted only for what the router has carried of the QP's requests, their bytes and
    /// [`REQUEST_BYTES`] each: at least what it costs to take the memory back, and each byte pays
    /// once. So much is missing.
    NotEnoughCredit { missing: u64 },
    /// The router's own offer, in answer to a `Hello` that has too little in common with it.
    Incompatible { protocol: Offer, layouts: VersionRange },
    /// Like `Direct`. `msn`: the RECV that the next message takes, and what the send queue has to say of
    /// it from now on.
    NumberedDirect { segment_bytes: u64, credit_count: u32, direct_rings_closed: u32, takes_writes: bool, msn: u32 },
    /// The ring, empty.
    DatagramRing { segment_bytes: u64 },
    /// `place`: which of the receiver's rings it is; it is open while the receive queue's header has the bit of this
    /// place. `offer`: its number among all that led to this QP. What a receiver must not take from the sender:
    /// `source_qpn`, `source` (its GID) and `route` (of its address handle). `first`: what the router delivered of this
    /// sender before the ring was opened took RECVs before this one, and nothing that it delivers later does.
    IncomingDatagramRing {
        segment_bytes: u64,
        place: u32,
        offer: u32,
        source_qpn: u32,
        source: Gid,
        route: GlobalRoute,
        first: u32,
    },
    /// An encoded reply, whose memory is a part of one file of all sessions of a vNIC, from `offset` on: its first
    /// descriptor is that file's. Only where [`FEATURE_PLACED_REPLIES`](crate::FEATURE_PLACED_REPLIES) is in force.
    Placed { offset: u64, reply: Vec<u8> },
}

/// The beginning of a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// Version and features in force.
    pub protocol: Agreement,
    /// Version of the shared segments' layout in force.
    pub layout_version: u32,
    /// Attributes of the vNIC's device.
    pub device: DeviceAttributes,
    /// GID table of port 1, index 0 upward; all RoCE v2.
    pub gids: alloc::vec::Vec<Gid>,
    /// Name of the vNIC's network.
    pub network: String,
    /// Id of the vNIC.
    pub vnic: String,
    /// Length of the session segment.
    pub session_segment_bytes: u64,
}

/// Bytes of one command, see [`Request::OpenCommands`].
pub const COMMAND_BYTES: usize = 8;
/// See [`Request::OpenCommands`].
pub const COMMAND_REVOKE: u32 = 0;
/// The same.
pub const COMMAND_RESHARE: u32 = 1;
/// The same.
pub const COMMAND_SHARE: u32 = 2;
/// Bits of a command's second word that say what to do.
const COMMAND_MASK: u32 = 0xff;
/// A command to share memory names so many bytes, which begin at a multiple of that.
pub const SHARE_BYTES: u64 = 1 << 16;

/// The two words of a command to share the [`SHARE_BYTES`] at an address.
#[must_use]
pub const fn share_command(address: u64) -> (u32, u32) {
    let number = address / SHARE_BYTES;
    (number as u32, COMMAND_SHARE | ((number >> 32) as u32) << COMMAND_MASK.count_ones())
}

/// The kind of a command, and the first of the addresses that [`share_command`] names.
#[must_use]
pub const fn decode_command(first: u32, second: u32) -> (u32, u64) {
    let number = first as u64 | ((second >> COMMAND_MASK.count_ones()) as u64) << 32;
    (second & COMMAND_MASK, number * SHARE_BYTES)
}
/// Bytes that a request counts besides its payload where grants are earned, see
/// [`Reply::NotEnoughCredit`].
pub const REQUEST_BYTES: u64 = 4096;
/// How long a process has to carry out a revoke command, milliseconds.
pub const REVOCATION_TIME_MAX_MS: u64 = 30_000;

/// Bytes of one event, which is one record of a socket (`SOCK_SEQPACKET`; nothing can be sent by
/// the library's end). Completion event: cookie of the CQ (u32 LE), then zero (u32). Asynchronous
/// event: kind (u32 LE, `enum ibv_event_type`), then cookie of the object or port number (u32 LE).
/// A socket at end of file says that the router is gone: the library then raises DEVICE_FATAL and
/// flushes by itself.
pub const EVENT_BYTES: usize = 8;
