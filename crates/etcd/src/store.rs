//! The store: keys under one prefix of etcd's, transactions that are done exactly once.
//!
//! An answer that is lost leaves open whether its transaction was done, or will be. So each one that writes also
//! makes a key of its own, its *receipt*, on condition that it is absent. Who got no answer makes the receipt in its
//! place: either that succeeds, and the transaction can't be done any more, or the receipt is there and its revision
//! is the answer. A receipt goes with the next transaction of the same store, or with its lease.
use crate::client::{Client, Page};
use crate::endpoint::Endpoints;
use crate::error::EtcdError;
use crate::messages::{
    Compare, DeleteRangeRequest, KeyValue, Operation, PutRequest, RangeRequest, RequestOp, Target, TxnRequest,
    TxnResponse, WatchCreateRequest, WatchEvent, prefix_end, revision, revision_of,
};
use crate::random;
use freeflow_orchestrator::Store;
use freeflow_orchestrator::store::{Committed, Entry, Event, LeaseId, Listing, Revision, StoreError, Transaction};
use freeflow_verbs::{Duration, Instant};
use std::time;
use tokio::runtime::Runtime;
use tokio::time::{sleep, timeout};

/// Keys of the data, and receipts, under the store's prefix.
const DATA: &str = "data/";
const RECEIPTS: &str = "receipts/";
/// Receipts that nobody takes away go after this.
const RECEIPT_SECONDS: i64 = 3600;
/// A lease that is older is not used for new receipts.
const LEASE_USED_FOR: time::Duration = time::Duration::from_secs(1800);
/// How long it is tried to learn what became of a transaction.
const SETTLE_TIME: time::Duration = time::Duration::from_secs(30);
const SETTLE_PAUSE: time::Duration = time::Duration::from_millis(200);
/// Of the key that shows where a watch has come to.
const MARK_SECONDS: i64 = 60;
/// For all changes up to the present to come by a watch.
const EVENTS_TIME: time::Duration = time::Duration::from_secs(30);

/// A value of a receipt.
const DONE: &[u8] = b"done";
const FENCED: &[u8] = b"fenced";

/// Keys under a prefix of etcd's.
///
/// Its revisions are etcd's, which others' writes count up as well. Its leases end by themselves, by etcd's clock:
/// `expire` has nothing to do, and times to live are whole seconds.
pub struct EtcdStore {
    runtime: Runtime,
    keys: Keys,
}

/// The same without a thread that waits.
struct Keys {
    client: Client,
    /// Ends with a slash.
    root: String,
    /// Of this store, among receipts.
    writer: String,
    receipt_count: u64,
    /// The last receipt, which the next transaction takes away.
    last_receipt: Option<Vec<u8>>,
    /// Of receipts, and since when.
    lease: Option<(i64, time::Instant)>,
    /// Conditions of each transaction.
    guards: Vec<Compare>,
    /// Transactions whose answers are lost are not asked after.
    may_be_unsure: bool,
}

/// The key that shows that a transaction was done, and its lease.
struct Receipt {
    key: Vec<u8>,
    lease: i64,
}

/// The end of a transaction whose answer was lost.
enum Settled {
    Done(i64),
    Never,
}

fn signed(revision: Revision) -> i64 {
    i64::try_from(revision.0).unwrap_or(i64::MAX)
}

/// As etcd is asked: 0 means now there. Before everything there is nothing, as long as the first revision is there.
fn asked(at: Option<Revision>) -> i64 {
    at.map_or(0, |at| signed(at).max(1))
}

fn lease_of(lease: Option<LeaseId>) -> i64 {
    lease.map_or(0, |lease| i64::try_from(lease.0).unwrap_or(i64::MAX))
}

impl EtcdStore {
    /// The keys under `root`, a prefix without which nothing of this store's is. Nothing is connected yet.
    ///
    /// # Errors
    /// `Broken`: certificates that can't be used, or no resources for a runtime.
    pub fn new(endpoints: &Endpoints, root: &str) -> Result<Self, StoreError> {
        let broken = |error: std::io::Error| StoreError::Broken(format!("etcd: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(broken)?;
        let client = {
            let _inside = runtime.enter();
            Client::new(endpoints)?
        };
        let root = format!("{}/", root.trim_end_matches('/'));
        let writer = format!("{:016x}{:016x}", random(), random());
        let (last_receipt, lease, guards) = Default::default();
        let keys = Keys { client, root, writer, receipt_count: 0, last_receipt, lease, guards, may_be_unsure: false };
        Ok(Self { runtime, keys })
    }

    /// Each transaction is done only as long as a key outside is as it was written then. The key is whole, as etcd has
    /// it.
    #[must_use]
    pub fn guarded(mut self, key: &str, modified: Revision) -> Self {
        self.guard(&[(key, modified)]);
        self
    }

    /// From now on each transaction is done only as long as these keys outside are as they were written then; revision
    /// 0: as long as there is no such key.
    pub fn guard(&mut self, guards: &[(&str, Revision)]) {
        let guard = |(key, modified): &(&str, Revision)| {
            Compare::new(key.as_bytes().to_vec(), Target::ModRevision(signed(*modified)))
        };
        self.keys.guards = guards.iter().map(guard).collect();
    }

    /// Deletes all keys of the store, others' and receipts included, at once. False: a guard forbids it.
    ///
    /// # Errors
    /// etcd did not do it, or may have done it: it can be done again.
    pub fn delete_all(&mut self) -> Result<bool, StoreError> {
        let key = self.keys.root.clone().into_bytes();
        let range_end = prefix_end(&key);
        let all = RequestOp { operation: Some(Operation::Delete(DeleteRangeRequest { key, range_end })) };
        let compare = self.keys.guards.clone();
        let request = TxnRequest { compare, success: vec![all], failure: Vec::new() };
        let done: Result<TxnResponse, EtcdError> =
            self.runtime.block_on(self.keys.client.repeat("/etcdserverpb.KV/Txn", request));
        Ok(done?.succeeded)
    }

    /// Makes no receipts: a third of what each write is to etcd. A transaction whose answer is lost fails then, and may
    /// be done nevertheless, or later. For writers who do no harm by writing the same twice, or whose conditions keep a
    /// late one away.
    #[must_use]
    pub fn without_receipts(mut self) -> Self {
        self.keys.may_be_unsure = true;
        self
    }

    /// How long one attempt of a call may take.
    #[must_use]
    pub fn call_time(mut self, time: time::Duration) -> Self {
        self.keys.client = self.keys.client.call_time(time);
        self
    }
}

impl Keys {
    fn data_prefix(&self) -> String {
        format!("{}{DATA}", self.root)
    }

    /// No key of its own, but one that may be read.
    fn receipts(&self) -> Vec<u8> {
        format!("{}{RECEIPTS}", self.root).into_bytes()
    }

    fn full_key(&self, key: &str) -> Vec<u8> {
        format!("{}{DATA}{key}", self.root).into_bytes()
    }

    /// `None`: another's key.
    fn entry(&self, kv: KeyValue) -> Option<Entry> {
        let entry = kv.into_entry()?;
        let key = entry.key.strip_prefix(&self.data_prefix())?.to_owned();
        Some(Entry { key, ..entry })
    }

    async fn page(&self, prefix: &str, at: Option<Revision>) -> Result<Page, StoreError> {
        match self.client.list(&self.full_key(prefix), asked(at)).await {
            Ok(_) if at == Some(Revision(0)) => Ok(Page { revision: 0, kvs: Vec::new(), more: false }),
            Ok(page) => Ok(page),
            Err(error) => Err(self.revision_error(error).await),
        }
    }

    async fn get(&self, key: &str, at: Option<Revision>) -> Result<Option<Entry>, StoreError> {
        let request = RangeRequest { key: self.full_key(key), revision: asked(at), ..RangeRequest::default() };
        match self.client.range(request).await {
            Ok(_) if at == Some(Revision(0)) => Ok(None),
            Ok(mut page) => Ok(page.kvs.pop().and_then(|kv| self.entry(kv))),
            Err(error) => Err(self.revision_error(error).await),
        }
    }

    async fn compact(&self, at: Revision) -> Result<(), StoreError> {
        match self.client.compact(signed(at)).await {
            // So does one that has been compacted to just there.
            Err(EtcdError::Compacted) if self.client.compacted(self.receipts()).await.map(revision) == Ok(at) => Ok(()),
            Err(error) => Err(self.revision_error(error).await),
            Ok(()) => Ok(()),
        }
    }

    /// With the revisions that there are.
    async fn revision_error(&self, error: EtcdError) -> StoreError {
        let known = match error {
            EtcdError::Compacted => {
                self.client.compacted(self.receipts()).await.map(|at| StoreError::Expired { compacted: revision(at) })
            }
            EtcdError::Future => self.present().await.map(|at| StoreError::Future { revision: revision(at) }),
            other => Err(other),
        };
        known.unwrap_or_else(EtcdError::of_read)
    }

    async fn present(&self) -> Result<i64, EtcdError> {
        let key = self.receipts();
        let page = self.client.range(RangeRequest { key, limit: 1, ..RangeRequest::default() }).await?;
        Ok(page.revision)
    }

    async fn receipt_lease(&mut self) -> Result<i64, EtcdError> {
        match self.lease {
            Some((id, since)) if since.elapsed() < LEASE_USED_FOR => Ok(id),
            _ => {
                let id = self.client.grant(RECEIPT_SECONDS).await?;
                self.lease = Some((id, time::Instant::now()));
                Ok(id)
            }
        }
    }

    fn request_of(&self, transaction: &Transaction) -> TxnRequest {
        let compare = transaction.compares.iter().map(|compare| {
            // etcd has 0 for a key that is absent; none was written before everything.
            let modified = compare.modified.map_or(0, |at| if at.0 == 0 { i64::MAX } else { signed(at) });
            Compare::new(self.full_key(&compare.key), Target::ModRevision(modified))
        });
        let success = transaction.writes.iter().map(|write| match &write.value {
            Some(value) => put(self.full_key(&write.key), value, lease_of(write.lease)),
            None => delete(self.full_key(&write.key)),
        });
        let compare = compare.chain(self.guards.iter().cloned()).collect();
        TxnRequest { compare, success: success.collect(), failure: Vec::new() }
    }

    /// The request makes a receipt, too: this one.
    async fn add_receipt(&mut self, request: &mut TxnRequest) -> Result<Receipt, EtcdError> {
        let lease = self.receipt_lease().await?;
        self.receipt_count += 1;
        let key = format!("{}{RECEIPTS}{}/{}", self.root, self.writer, self.receipt_count).into_bytes();
        request.compare.push(Compare::new(key.clone(), Target::CreateRevision(0)));
        request.success.push(put(key.clone(), DONE, lease));
        request.success.extend(self.last_receipt.clone().map(delete));
        Ok(Receipt { key, lease })
    }

    /// No answer came: whether the transaction of this receipt was done. If not, it will not be.
    async fn settle(&self, Receipt { key, lease }: &Receipt) -> Result<Settled, EtcdError> {
        let found = RangeRequest { key: key.clone(), ..RangeRequest::default() };
        let fence = TxnRequest {
            compare: vec![Compare::new(key.clone(), Target::CreateRevision(0))],
            success: vec![put(key.clone(), FENCED, *lease)],
            failure: vec![RequestOp { operation: Some(Operation::Range(found)) }],
        };
        loop {
            match self.client.transact(fence.clone()).await {
                Ok(TxnResponse { succeeded: true, .. }) => return Ok(Settled::Never),
                Ok(response) => {
                    let found = response.responses.into_iter().find_map(|response| response.range?.kvs.pop());
                    return match found {
                        Some(kv) if kv.value == DONE => Ok(Settled::Done(kv.mod_revision)),
                        Some(_) => Ok(Settled::Never),
                        None => Err(EtcdError::Other("a receipt is and is not there".into())),
                    };
                }
                // The receipt may have gone with it.
                Err(EtcdError::NoLease) => return Err(EtcdError::Unanswered("the receipt's lease has ended".into())),
                Err(error) if error.is_transient() => sleep(SETTLE_PAUSE).await,
                Err(error) => return Err(error),
            }
        }
    }

    async fn transact(&mut self, transaction: &Transaction) -> Result<Committed, StoreError> {
        let lost_lease = match self.attempt(transaction).await {
            Err(EtcdError::NoLease) => self.lease.take(),
            answer => return answer.map_err(Into::into),
        };
        // The receipt's or the transaction's own.
        let is_receipts = match lost_lease {
            Some((id, _)) => !self.client.lease_lives(id).await?,
            None => false,
        };
        if !is_receipts {
            self.lease = lost_lease;
            return Err(StoreError::NoLease);
        }
        self.last_receipt = None;
        self.attempt(transaction).await.map_err(Into::into)
    }

    async fn attempt(&mut self, transaction: &Transaction) -> Result<Committed, EtcdError> {
        let mut request = self.request_of(transaction);
        let is_receipt_due = !self.may_be_unsure && !transaction.writes.is_empty();
        let receipt = if is_receipt_due { Some(self.add_receipt(&mut request).await?) } else { None };
        let done = match (self.client.transact(request).await, &receipt) {
            (Ok(response), _) => {
                let at = revision(revision_of(response.header.as_ref()));
                if !response.succeeded {
                    return Ok(Committed::Conflict(at));
                }
                at
            }
            (Err(error @ EtcdError::Unanswered(_)), Some(receipt)) => {
                let settled = timeout(SETTLE_TIME, self.settle(receipt)).await;
                // If the fence was refused, too, for whatever reason: the transaction may be done.
                match settled.ok().and_then(Result::ok).ok_or(error)? {
                    Settled::Done(at) => revision(at),
                    // This receipt stays as long as its lease: it is in the way of a request that is still on its way.
                    Settled::Never => {
                        return Err(EtcdError::Unreachable("it did not take the transaction in time".into()));
                    }
                }
            }
            // With this answer etcd may have done it: the quota is looked at twice.
            (Err(EtcdError::Full), Some(receipt)) => {
                let request = RangeRequest { key: receipt.key.clone(), ..RangeRequest::default() };
                let unsure = |error: EtcdError| EtcdError::Unanswered(format!("it is full, and then: {error}"));
                let found = self.client.range(request).await.map_err(unsure)?.kvs.pop();
                revision(found.ok_or(EtcdError::Full)?.mod_revision)
            }
            (Err(error), _) => return Err(error),
        };
        self.last_receipt = receipt.map(|receipt| receipt.key).or(self.last_receipt.take());
        Ok(Committed::Done(done))
    }

    /// All changes after that revision, up to one that is made for the purpose: a watch says nothing when it has come
    /// to the present. (It can be asked since etcd 3.4, but before 3.5.13 it may answer too early.)
    async fn changes(&self, after: Revision) -> Result<Vec<(i64, WatchEvent)>, EtcdError> {
        if signed(after) > self.present().await? {
            return Err(EtcdError::Future);
        }
        let lease = self.client.grant(MARK_SECONDS).await?;
        let mark = format!("{}{RECEIPTS}{}/mark", self.root, self.writer).into_bytes();
        let request = TxnRequest { success: vec![put(mark.clone(), DONE, lease)], ..TxnRequest::default() };
        let until = revision_of(self.client.transact(request).await?.header.as_ref());
        let create = WatchCreateRequest {
            key: self.root.clone().into_bytes(),
            range_end: prefix_end(self.root.as_bytes()),
            // One earlier than is wanted: etcd takes a watch from the very revision up to which it is compacted, and
            // may have forgotten what was deleted in that.
            start_revision: signed(after).max(1),
            prev_kv: true,
            fragment: true,
            ..WatchCreateRequest::default()
        };
        let mut watch = self.client.watch(self.client.current(), create).await?;
        let mut all = Vec::new();
        loop {
            let response = watch.next().await?;
            if response.canceled {
                return Err(match response.compact_revision {
                    0 => EtcdError::Denied(response.cancel_reason),
                    _ => EtcdError::Compacted,
                });
            }
            for event in response.events {
                let at = event.modified();
                if at == until {
                    return Ok(all);
                }
                if at > signed(after) {
                    all.push((at, event));
                }
            }
        }
    }

    fn event(&self, (at, event): (i64, WatchEvent), prefix: &str) -> Option<Event> {
        let entry = self.entry(event.kv?).filter(|entry| entry.key.starts_with(prefix))?;
        let before = event.prev_kv.and_then(|kv| self.entry(kv));
        let key = entry.key.clone();
        Some(Event { revision: revision(at), key, entry: (event.kind == 0).then_some(entry), before })
    }
}

fn delete(key: Vec<u8>) -> RequestOp {
    RequestOp { operation: Some(Operation::Delete(DeleteRangeRequest { key, range_end: Vec::new() })) }
}

fn put(key: Vec<u8>, value: &[u8], lease: i64) -> RequestOp {
    RequestOp { operation: Some(Operation::Put(PutRequest { key, value: value.to_vec(), lease })) }
}

impl Store for EtcdStore {
    fn revision(&self) -> Result<Revision, StoreError> {
        Ok(revision(self.runtime.block_on(self.keys.present()).map_err(EtcdError::of_read)?))
    }

    fn get(&self, key: &str, at: Option<Revision>) -> Result<Option<Entry>, StoreError> {
        self.runtime.block_on(self.keys.get(key, at))
    }

    fn list(&self, prefix: &str, at: Option<Revision>) -> Result<Listing, StoreError> {
        let page = self.runtime.block_on(self.keys.page(prefix, at))?;
        let entries = page.kvs.into_iter().filter_map(|kv| self.keys.entry(kv)).collect();
        Ok(Listing { revision: revision(page.revision), entries })
    }

    fn commit(&mut self, transaction: &Transaction) -> Result<Committed, StoreError> {
        transaction.check()?;
        self.runtime.block_on(self.keys.transact(transaction))
    }

    fn events(&self, prefix: &str, after: Revision) -> Result<Vec<Event>, StoreError> {
        let keys = &self.keys;
        let changes = self.runtime.block_on(async {
            let changes = timeout(EVENTS_TIME, keys.changes(after)).await;
            let late = |_| Err(EtcdError::Unanswered("changes do not come".into()));
            match changes.unwrap_or_else(late) {
                Ok(changes) => Ok(changes),
                Err(error) => Err(keys.revision_error(error).await),
            }
        })?;
        let mut events: Vec<Event> = changes.into_iter().filter_map(|change| keys.event(change, prefix)).collect();
        // etcd has those of one revision in the order in which they were written.
        events.sort_by(|a, b| (a.revision, &a.key).cmp(&(b.revision, &b.key)));
        Ok(events)
    }

    fn compact(&mut self, at: Revision) -> Result<(), StoreError> {
        self.runtime.block_on(self.keys.compact(at))
    }

    fn grant(&mut self, _now: Instant, ttl: Duration) -> Result<LeaseId, StoreError> {
        let seconds = i64::try_from(ttl.0.div_ceil(1_000_000_000)).unwrap_or(i64::MAX).max(1);
        Ok(LeaseId(self.runtime.block_on(self.keys.client.grant(seconds))?.unsigned_abs()))
    }

    fn keep_alive(&mut self, _now: Instant, lease: LeaseId) -> Result<(), StoreError> {
        let lives = self.runtime.block_on(self.keys.client.keep_alive(lease_of(Some(lease))))?;
        if lives { Ok(()) } else { Err(StoreError::NoLease) }
    }

    fn revoke(&mut self, lease: LeaseId) -> Result<Revision, StoreError> {
        Ok(revision(self.runtime.block_on(self.keys.client.revoke(lease_of(Some(lease))))?))
    }

    fn expire(&mut self, _now: Instant) -> Result<Vec<LeaseId>, StoreError> {
        Ok(Vec::new())
    }

    fn next_expiry(&self) -> Option<Instant> {
        None
    }
}
