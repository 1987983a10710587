//! The messages of etcd's gRPC interface that are used here, and no others (`etcdserverpb`, `mvccpb`; since etcd 3.4).
//!
//! A field that is missing here is one that etcd may send and that is passed over. Numbers: etcd's `rpc.proto` and
//! `kv.proto`.
use freeflow_orchestrator::store::{Entry, LeaseId, Revision};
use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ResponseHeader {
    #[prost(int64, tag = "3")]
    pub revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub create_revision: i64,
    #[prost(int64, tag = "3")]
    pub mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub lease: i64,
}

/// etcd has no negative ones.
pub(crate) fn revision(number: i64) -> Revision {
    Revision(u64::try_from(number).unwrap_or(0))
}

/// Of a response's header.
pub(crate) fn revision_of(header: Option<&ResponseHeader>) -> i64 {
    header.map_or(0, |header| header.revision)
}

impl KeyValue {
    /// `None`: the key is no text, so it is nobody's of FreeFlow.
    pub fn into_entry(self) -> Option<Entry> {
        Some(Entry {
            key: String::from_utf8(self.key).ok()?,
            value: self.value,
            created: revision(self.create_revision),
            modified: revision(self.mod_revision),
            lease: (self.lease != 0).then(|| LeaseId(self.lease.unsigned_abs())),
        })
    }
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// The first key beyond it; empty: the one key.
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub limit: i64,
    /// 0: as it is now.
    #[prost(int64, tag = "4")]
    pub revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub kvs: Vec<KeyValue>,
    #[prost(bool, tag = "3")]
    pub more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// Empty: the key alone.
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RequestOp {
    #[prost(oneof = "Operation", tags = "1, 2, 3")]
    pub operation: Option<Operation>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Operation {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeRequest),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ResponseOp {
    #[prost(message, optional, tag = "1")]
    pub range: Option<RangeResponse>,
}

/// `CompareResult::EQUAL` of a revision; 0: the key is absent.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Compare {
    #[prost(int32, tag = "2")]
    pub target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub key: Vec<u8>,
    #[prost(oneof = "Target", tags = "5, 6")]
    pub union: Option<Target>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Target {
    #[prost(int64, tag = "5")]
    CreateRevision(i64),
    #[prost(int64, tag = "6")]
    ModRevision(i64),
}

impl Compare {
    pub fn new(key: Vec<u8>, target: Target) -> Self {
        let number = match target {
            Target::CreateRevision(_) => 1,
            Target::ModRevision(_) => 2,
        };
        Self { target: number, key, union: Some(target) }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(bool, tag = "2")]
    pub succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub responses: Vec<ResponseOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CompactionRequest {
    #[prost(int64, tag = "1")]
    pub revision: i64,
}

/// An answer of which only that it came matters, or the revision.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct HeaderOnly {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    pub ttl: i64,
}

/// Of a grant, and of a keep-alive.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(int64, tag = "2")]
    pub id: i64,
    /// Seconds; none: the lease has ended.
    #[prost(int64, tag = "3")]
    pub ttl: i64,
}

/// Of a revocation, and of a keep-alive.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseRequest {
    #[prost(int64, tag = "1")]
    pub id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    pub create: Option<WatchCreateRequest>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchCreateRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
    /// 0 means from now on.
    #[prost(int64, tag = "3")]
    pub start_revision: i64,
    #[prost(bool, tag = "4")]
    pub progress_notify: bool,
    #[prost(bool, tag = "6")]
    pub prev_kv: bool,
    /// A large revision may come in several responses.
    #[prost(bool, tag = "8")]
    pub fragment: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(bool, tag = "3")]
    pub created: bool,
    #[prost(bool, tag = "4")]
    pub canceled: bool,
    /// Not 0: the first revision that is still there, of a watch that began before it.
    #[prost(int64, tag = "5")]
    pub compact_revision: i64,
    #[prost(string, tag = "6")]
    pub cancel_reason: String,
    /// More of the same revision follows.
    #[prost(bool, tag = "7")]
    pub fragment: bool,
    #[prost(message, repeated, tag = "11")]
    pub events: Vec<WatchEvent>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchEvent {
    /// 0: put, 1: deleted.
    #[prost(int32, tag = "1")]
    pub kind: i32,
    #[prost(message, optional, tag = "2")]
    pub kv: Option<KeyValue>,
    #[prost(message, optional, tag = "3")]
    pub prev_kv: Option<KeyValue>,
}

impl WatchEvent {
    /// The revision that made it.
    pub fn modified(&self) -> i64 {
        self.kv.as_ref().map_or(0, |kv| kv.mod_revision)
    }
}

/// The end of the range of all keys that begin so: the next string of the same length; `\0` means all there are.
pub(crate) fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_before_the_next_string() {
        assert_eq!(prefix_end(b"/a/"), b"/a0");
        assert_eq!(prefix_end(b"a\xff\xff"), b"b");
        assert_eq!(prefix_end(b"\xff"), b"\0");
        assert_eq!(prefix_end(b""), b"\0");
    }
}
