//! Calls of etcd, to whichever member answers.
//!
//! Each member has a connection of its own: one pool of all would go on choosing a member that is dead. A call goes
//! to the member that answered last. Calls that change nothing are made again at the next one; those that change
//! something only where it is certain that the first attempt did nothing.
use crate::endpoint::Endpoints;
use crate::error::EtcdError;
use crate::messages::{
    HeaderOnly, KeyValue, LeaseGrantRequest, LeaseRequest, LeaseResponse, RangeRequest, RangeResponse, TxnRequest,
    TxnResponse, WatchCreateRequest, WatchRequest, WatchResponse, prefix_end, revision_of,
};
use prost::Message;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

/// For one attempt.
const CALL_TIME: Duration = Duration::from_secs(5);
/// Between the members' first round and the next, if none answers; twice as long each time.
const RETRY_FIRST: Duration = Duration::from_millis(50);
/// Rounds through all members before a call fails.
const ROUND_COUNT: u32 = 3;
/// Of an answer: etcd's own messages are 4 MiB at most, but a revision of many keys may be longer.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Keys in a page of a list: each of them as long as etcd takes them (1.5 MiB), they still fit into an answer.
const PAGE_COUNT: i64 = 40;

/// Keys and values of a list: whoever may write in etcd could fill the memory of all who read it otherwise.
pub(crate) const LISTING_BYTES_MAX: usize = 256 << 20;

pub(crate) fn too_much(prefix: &[u8], bytes_max: usize) -> EtcdError {
    let prefix = String::from_utf8_lossy(prefix);
    EtcdError::Other(format!(
        "the keys that begin with {prefix} have more than {} MiB, so they are not read: somebody has filled etcd with \
         them, and an operator has to delete what is nobody's (etcdctl get --keys-only --prefix {prefix})",
        bytes_max >> 20
    ))
}

/// The beginning of all keys of the writer of this one: the prefix, and a name with the slash behind it.
fn writer_of<'a>(prefix: &[u8], key: &'a [u8]) -> &'a [u8] {
    let name = key.get(prefix.len()..).unwrap_or_default();
    let length = name.iter().position(|byte| *byte == b'/').map_or(name.len(), |slash| slash + 1);
    &key[..key.len() - name.len() + length]
}

/// A connection to each member. Clones share them.
#[derive(Clone)]
pub struct Client {
    channels: Arc<[Channel]>,
    /// The member that answered last.
    current: Arc<AtomicUsize>,
    call_time: Duration,
}

/// A list of keys, and when.
#[derive(Debug)]
pub(crate) struct Page {
    pub revision: i64,
    pub kvs: Vec<KeyValue>,
    pub more: bool,
}

/// A watch that etcd has accepted. It ends when this is dropped.
pub(crate) struct Watch {
    pub responses: Streaming<WatchResponse>,
    _requests: mpsc::Sender<WatchRequest>,
}

impl Client {
    /// In a runtime of tokio's. Nothing is connected yet.
    ///
    /// # Errors
    /// `Invalid`: certificates that can't be used.
    pub fn new(endpoints: &Endpoints) -> Result<Self, EtcdError> {
        let channels = endpoints.channels()?.into();
        Ok(Self { channels, current: Arc::default(), call_time: CALL_TIME })
    }

    /// How long one attempt of a call may take; 5 s if not set.
    #[must_use]
    pub fn call_time(mut self, time: Duration) -> Self {
        self.call_time = time;
        self
    }

    pub(crate) fn current(&self) -> usize {
        self.current.load(Ordering::Relaxed) % self.channels.len()
    }

    /// The next calls begin at another member, if somebody else has not changed it.
    pub(crate) fn leave(&self, member: usize) {
        let next = (member + 1) % self.channels.len();
        let _ = self.current.compare_exchange(member, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Of a member that takes calls.
    async fn grpc(&self, member: usize) -> Result<Grpc<Channel>, EtcdError> {
        let mut grpc = Grpc::new(self.channels[member].clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        grpc.ready().await.map_err(|error| EtcdError::Unreachable(error.to_string()))?;
        Ok(grpc)
    }

    /// A member without a leader answers so, instead of not at all.
    fn request<T>(message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
        request
    }

    /// One attempt.
    async fn call<Q, A>(&self, member: usize, path: &'static str, message: Q) -> Result<A, EtcdError>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let attempt = async {
            let mut grpc = self.grpc(member).await?;
            let codec = ProstCodec::<Q, A>::default();
            let answer = grpc.unary(Self::request(message), PathAndQuery::from_static(path), codec).await;
            answer.map(tonic::Response::into_inner).map_err(|status| EtcdError::of(&status))
        };
        self.in_time(attempt).await
    }

    /// An attempt that takes longer than it may is not answered.
    async fn in_time<T>(&self, attempt: impl Future<Output = Result<T, EtcdError>>) -> Result<T, EtcdError> {
        let late = |_| Err(EtcdError::Unanswered(format!("in {} ms", self.call_time.as_millis())));
        timeout(self.call_time, attempt).await.unwrap_or_else(late)
    }

    /// A call that may be made again where `may_repeat` says so, at each member in turn.
    async fn call_any<Q, A>(
        &self,
        path: &'static str,
        message: Q,
        may_repeat: impl Fn(&EtcdError) -> bool,
    ) -> Result<A, EtcdError>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let (mut pause, mut last) = (RETRY_FIRST, None);
        for round in 0..ROUND_COUNT {
            if round > 0 {
                sleep(pause).await;
                pause *= 2;
            }
            for _ in 0..self.channels.len() {
                let member = self.current();
                match self.call(member, path, message.clone()).await {
                    Err(error) if error.is_transient() => {
                        self.leave(member);
                        if !may_repeat(&error) {
                            return Err(error);
                        }
                        last = Some(error);
                    }
                    answer => return answer,
                }
            }
        }
        Err(last.expect("there is a member"))
    }

    /// For what changes nothing, or may be done twice.
    pub(crate) async fn repeat<Q, A>(&self, path: &'static str, message: Q) -> Result<A, EtcdError>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        self.call_any(path, message, |_| true).await
    }

    /// For what must not be done twice.
    async fn once<Q, A>(&self, path: &'static str, message: Q) -> Result<A, EtcdError>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        self.call_any(path, message, |error| matches!(error, EtcdError::Unreachable(_))).await
    }

    pub(crate) async fn range(&self, request: RangeRequest) -> Result<Page, EtcdError> {
        let response: RangeResponse = self.repeat("/etcdserverpb.KV/Range", request).await?;
        Ok(Page { revision: revision_of(response.header.as_ref()), kvs: response.kvs, more: response.more })
    }

    /// All keys that begin so, at a revision (0: now).
    pub(crate) async fn list(&self, prefix: &[u8], revision: i64) -> Result<Page, EtcdError> {
        let all = self.list_some(prefix, revision, LISTING_BYTES_MAX, None).await?;
        if all.more {
            return Err(too_much(prefix, LISTING_BYTES_MAX));
        }
        Ok(all)
    }

    /// The same, page by page, and no more pages where they have more bytes. `writer_bytes_max`: keys of each writer,
    /// whose name follows the prefix, beyond which more of its keys are left out, as if they were not there.
    pub(crate) async fn list_some(
        &self,
        prefix: &[u8],
        revision: i64,
        bytes_max: usize,
        writer_bytes_max: Option<usize>,
    ) -> Result<Page, EtcdError> {
        let (mut key, range_end) = (prefix.to_vec(), prefix_end(prefix));
        let mut all = Page { revision, kvs: Vec::new(), more: false };
        let (mut bytes, mut writer, mut writer_bytes) = (0, Vec::new(), 0);
        if key.is_empty() {
            key.push(0);
        }
        loop {
            let request = RangeRequest { key, range_end: range_end.clone(), limit: PAGE_COUNT, revision: all.revision };
            let page = self.range(request).await?;
            if all.revision == 0 {
                all.revision = page.revision;
            }
            let last = page.kvs.last().map(|kv| kv.key.clone());
            for kv in page.kvs {
                let of = writer_of(prefix, &kv.key);
                if of != writer {
                    (writer, writer_bytes) = (of.to_vec(), 0);
                }
                writer_bytes += kv.key.len() + kv.value.len();
                if writer_bytes_max.is_none_or(|max| writer_bytes <= max) {
                    bytes += kv.key.len() + kv.value.len();
                    all.kvs.push(kv);
                }
            }
            match last {
                Some(_) if page.more && bytes > bytes_max => {
                    all.more = true;
                    return Ok(all);
                }
                Some(_) if page.more && writer_bytes_max.is_some_and(|max| writer_bytes > max) => {
                    key = prefix_end(&writer);
                }
                Some(last) if page.more => key = [&last[..], b"\0"].concat(),
                _ => return Ok(all),
            }
        }
    }

    /// Exactly once, unless the answer is `Unanswered`.
    pub(crate) async fn transact(&self, request: TxnRequest) -> Result<TxnResponse, EtcdError> {
        self.once("/etcdserverpb.KV/Txn", request).await
    }

    pub(crate) async fn compact(&self, revision: i64) -> Result<(), EtcdError> {
        let request = crate::messages::CompactionRequest { revision };
        let _: HeaderOnly = self.repeat("/etcdserverpb.KV/Compact", request).await?;
        Ok(())
    }

    /// One that nobody hears of ends by itself, so it may be asked for again.
    pub(crate) async fn grant(&self, seconds: i64) -> Result<i64, EtcdError> {
        let request = LeaseGrantRequest { ttl: seconds };
        let response: LeaseResponse = self.repeat("/etcdserverpb.Lease/LeaseGrant", request).await?;
        Ok(response.id)
    }

    pub(crate) async fn revoke(&self, id: i64) -> Result<i64, EtcdError> {
        let response: HeaderOnly = self.once("/etcdserverpb.Lease/LeaseRevoke", LeaseRequest { id }).await?;
        Ok(revision_of(response.header.as_ref()))
    }

    /// Whether the lease is there.
    pub(crate) async fn lease_lives(&self, id: i64) -> Result<bool, EtcdError> {
        let request = LeaseRequest { id };
        let response: LeaseResponse = self.repeat("/etcdserverpb.Lease/LeaseTimeToLive", request).await?;
        Ok(response.ttl > 0)
    }

    /// The same, and its time begins again.
    pub(crate) async fn keep_alive(&self, id: i64) -> Result<bool, EtcdError> {
        let member = self.current();
        let attempt = async {
            let path = "/etcdserverpb.Lease/LeaseKeepAlive";
            let (mut responses, _requests) = self.stream::<_, LeaseResponse>(member, path, LeaseRequest { id }).await?;
            Ok(next_of(&mut responses).await?.ttl > 0)
        };
        let answer = self.in_time(attempt).await;
        if answer.as_ref().is_err_and(EtcdError::is_transient) {
            self.leave(member);
        }
        answer
    }

    /// Responses to this request. They end when the sender of requests is dropped.
    async fn stream<Q, A>(
        &self,
        member: usize,
        path: &'static str,
        first: Q,
    ) -> Result<(Streaming<A>, mpsc::Sender<Q>), EtcdError>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let (requests, receiver) = mpsc::channel(1);
        requests.send(first).await.map_err(|error| EtcdError::Other(error.to_string()))?;
        let mut grpc = self.grpc(member).await?;
        let (request, codec) = (Self::request(ReceiverStream::new(receiver)), ProstCodec::<Q, A>::default());
        let answer = grpc.streaming(request, PathAndQuery::from_static(path), codec).await;
        Ok((answer.map_err(|status| EtcdError::of(&status))?.into_inner(), requests))
    }

    /// A watch at this member. etcd's first response is read by the caller.
    pub(crate) async fn watch(&self, member: usize, create: WatchCreateRequest) -> Result<Watch, EtcdError> {
        let open = async {
            let request = WatchRequest { create: Some(create) };
            let (responses, requests) = self.stream(member, "/etcdserverpb.Watch/Watch", request).await?;
            Ok(Watch { responses, _requests: requests })
        };
        let late = |_| Err(EtcdError::Unreachable(format!("no watch in {} ms", self.call_time.as_millis())));
        timeout(self.call_time, open).await.unwrap_or_else(late)
    }

    /// The first revision that is there, where some are compacted away: a watch from the beginning is refused with it.
    /// By the watch of a key that the caller may read.
    pub(crate) async fn compacted(&self, key: Vec<u8>) -> Result<i64, EtcdError> {
        let create = WatchCreateRequest { key, start_revision: 1, ..WatchCreateRequest::default() };
        let mut watch = self.watch(self.current(), create).await?;
        let read = async {
            loop {
                let response = watch.next().await?;
                match response.compact_revision {
                    0 if response.canceled => return Err(EtcdError::Denied(response.cancel_reason)),
                    0 => {}
                    revision => return Ok(revision),
                }
            }
        };
        self.in_time(read).await
    }
}

impl Watch {
    /// The next response; at an end of the stream, why.
    pub async fn next(&mut self) -> Result<WatchResponse, EtcdError> {
        next_of(&mut self.responses).await
    }
}

async fn next_of<A>(responses: &mut Streaming<A>) -> Result<A, EtcdError> {
    let response = responses.message().await.map_err(|status| EtcdError::of(&status))?;
    response.ok_or_else(|| EtcdError::Unanswered("the stream ended".into()))
}
