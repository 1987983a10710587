//! Library ↔ router, on the container's own socket.
//!
//! Objects are named by handles that the router gives out and checks against the session (one session is one process'
//! connection): a handle of another session is `NotFound`. *Cookies* are numbers that the library chooses; the router
//! only echoes them in completions and events. A QP's or SRQ's cookie is also its doorbell index, unique in its session
//! among QPs and SRQs and below [`DOORBELL_COUNT`]; a CQ's cookie is unique among CQs.
use alloc::string::String;
use freeflow_verbs::{
    Access, AddressHandleAttributes, DeviceAttributes, Gid, QpAttributeMask, QpAttributes, QpCapabilities, QpState,
    QpType, SrqAttributes, VerbsError,
};
use serde::{Deserialize, Serialize};

/// Doorbells of one session.
pub const DOORBELL_COUNT: u32 = 65_536;

/// A handle: the router's name for an object of this session.
pub type Handle = u32;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// → `Welcome` + 2 descriptors: session segment (memfd), kick (eventfd: write 8 bytes to wake the router).
    Hello {
        protocol_version: u32,
        layout_version: u32,
        program: String,
    },
    /// → `Context` + 1 descriptor: read end of the pipe of asynchronous events ([`EVENT_BYTES`] each).
    OpenContext,
    CloseContext {
        context: Handle,
    },
    /// → `Channel` + 1 descriptor: read end of the pipe of completion events ([`EVENT_BYTES`] each).
    CreateChannel {
        context: Handle,
    },
    DestroyChannel {
        channel: Handle,
    },
    /// → `Pd`.
    AllocPd {
        context: Handle,
    },
    DeallocPd {
        pd: Handle,
    },
    /// Memory for `ibv_malloc`. → `Segment` + 1 descriptor (memfd, sealed against shrinking and growing).
    CreateSegment {
        length: u64,
    },
    /// Says where the process mapped the segment: the router's page table then reaches these bytes without copying.
    MapSegment {
        segment: Handle,
        address: u64,
    },
    /// The process unmapped the segment. Refused with Busy while an MR lies over it.
    DestroySegment {
        segment: Handle,
    },
    /// → `Mr`.
    RegisterMr {
        pd: Handle,
        address: u64,
        length: u64,
        iova: u64,
        access: Access,
    },
    DeregisterMr {
        mr: Handle,
    },
    /// → `Cq` + 1 descriptor: the ring's segment.
    CreateCq {
        context: Handle,
        cqe: u32,
        channel: Option<Handle>,
        cookie: u32,
    },
    /// The library holds the CQ's consumer lock. → `Cq` + 1 descriptor: the new ring's segment. The old ring holds
    /// what was completed before and gets nothing more; the new one begins empty, and its capacity counts what is
    /// still in the old one.
    ResizeCq {
        cq: Handle,
        cqe: u32,
    },
    DestroyCq {
        cq: Handle,
    },
    /// → `Srq` + 1 descriptor.
    CreateSrq {
        pd: Handle,
        attributes: SrqAttributes,
        cookie: u32,
    },
    /// Only the limit can change (`IBV_SRQ_LIMIT`); a new size is NotSupported.
    ModifySrq {
        srq: Handle,
        limit: u32,
    },
    /// → `SrqAttributes`.
    QuerySrq {
        srq: Handle,
    },
    DestroySrq {
        srq: Handle,
    },
    /// → `Qp` + 1 descriptor.
    CreateQp {
        pd: Handle,
        qp_type: QpType,
        send_cq: Handle,
        recv_cq: Handle,
        srq: Option<Handle>,
        capabilities: QpCapabilities,
        all_signaled: bool,
        cookie: u32,
    },
    /// → `QpModified`. Returns once no copy into or out of this QP's buffers is under way (RESET, ERROR).
    ModifyQp {
        qp: Handle,
        attributes: QpAttributes,
        mask: QpAttributeMask,
    },
    /// → `QpAttributes`.
    QueryQp {
        qp: Handle,
    },
    /// Returns once nothing of the QP's buffers is touched any more.
    DestroyQp {
        qp: Handle,
    },
    /// → `AddressHandle`.
    CreateAh {
        pd: Handle,
        attributes: AddressHandleAttributes,
    },
    DestroyAh {
        ah: Handle,
    },
}

/// Limits of what was created: sizes the library may rely on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    Done,
    Failed(VerbsError),
    Welcome(Welcome),
    Context { context: Handle },
    Channel { channel: Handle },
    Pd { pd: Handle },
    Segment { segment: Handle, length: u64 },
    Mr { mr: Handle, lkey: u32, rkey: u32 },
    Cq { cq: Handle, cqe: u32, segment_bytes: u64 },
    Srq { srq: Handle, attributes: SrqAttributes, segment_bytes: u64 },
    SrqAttributes(SrqAttributes),
    Qp { qp: Handle, qpn: u32, capabilities: QpCapabilities, segment_bytes: u64 },
    QpModified { state: QpState },
    QpAttributes(QpAttributes),
    AddressHandle { ah: Handle },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    pub protocol_version: u32,
    pub layout_version: u32,
    pub device: DeviceAttributes,
    /// GID table of port 1, index 0 upward; all RoCE v2.
    pub gids: alloc::vec::Vec<Gid>,
    pub network: String,
    pub vnic: String,
    pub session_segment_bytes: u64,
}

/// Bytes of one event in a pipe. Completion event: cookie of the CQ (u32 LE), then zero (u32). Asynchronous event: kind
/// (u32 LE, `enum ibv_event_type`), then cookie of the object or port number (u32 LE). A pipe at end of file says that
/// the router is gone: the library then raises DEVICE_FATAL and flushes by itself.
pub const EVENT_BYTES: usize = 8;
