//! The RECVs of an SRQ, as posts and the direct rings of its queue pairs see them.
//!
//! The router, or a poller with a message of a direct ring, copies a RECV out of its slot when it
//! takes it. So the slots only bound what is *not taken*, and the count of outstanding requests
//! bounds that: requests may complete in any order, through any CQ.
use crate::promises::{Promises, Share};
use crate::regions::Cache;
use crate::registry::CompletedCount;
use crate::session::Session;
use freeflow_protocol::library::Handle;
use freeflow_shm::{BiasedGuard, BiasedMutex, RequestProducer};
use freeflow_verbs::{SGE_COUNT_MAX, Sge, VerbsError};
use std::fmt;
use std::sync::{Arc, Weak};

pub(crate) struct SharedReceives {
    session: Arc<Session>,
    pd: Handle,
    cookie: u32,
    /// RECVs that may be outstanding.
    count_max: u32,
    requests: BiasedMutex<Requests>,
    completed: Arc<CompletedCount>,
}

/// A queue pair whose direct ring is promised RECVs.
pub(crate) trait Promisee: Send + Sync {
    /// RECVs were posted after there had not been enough.
    fn renew_promise(&self);
}

/// A RECV that was taken for a message of a direct ring.
pub(crate) struct TakenReceive {
    pub wr_id: u64,
    pub sges: [Sge; SGE_COUNT_MAX],
    pub sge_count: usize,
}

impl fmt::Debug for SharedReceives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceives").field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

struct Requests {
    /// Its position is the free-running count of requests posted.
    ring: RequestProducer,
    promises: Promises,
    keys: Cache,
    /// Those that there was not enough for.
    short: Vec<Weak<dyn Promisee>>,
    /// Doorbells of armed CQs to which a message that waits for a RECV would come.
    waiting: Vec<u32>,
    limit: Limit,
}

/// The limit event, of which the router decides: it must look when RECVs are taken here.
#[derive(Default)]
struct Limit {
    /// As last armed.
    limit: u32,
    /// The router was told since as many were posted.
    is_told: bool,
}

impl SharedReceives {
    pub fn new(session: &Arc<Session>, pd: Handle, cookie: u32, count_max: u32, ring: RequestProducer) -> Arc<Self> {
        let (promises, keys, limit) = (Promises::default(), Cache::default(), Limit::default());
        let requests = Requests { ring, promises, keys, short: Vec::new(), waiting: Vec::new(), limit };
        let (session, requests) = (session.clone(), BiasedMutex::new(requests));
        Arc::new(Self { session, pd, cookie, count_max, requests, completed: Arc::default() })
    }

    pub fn completed(&self) -> &Arc<CompletedCount> {
        &self.completed
    }

    /// The limit event was armed.
    pub fn note_limit(&self, to: u32) {
        let mut requests = self.requests.lock();
        let Requests { ring, promises, limit, .. } = &mut *requests;
        // RECVs may have been taken since the router looked.
        let is_told = to > 0 && promises.untaken(ring) < to;
        *limit = Limit { limit: to, is_told };
        drop(requests);
        if is_told {
            self.session.ring(self.cookie);
        }
    }

    /// Takes the lock for a list of posts.
    pub fn begin(&self) -> Result<Posts<'_>, VerbsError> {
        let requests = self.requests.lock();
        self.session.live()?;
        Ok(Posts { receives: self, requests, posted: false, renewal: Renewal::default() })
    }

    // ---- what messages of direct rings take

    pub fn pd(&self) -> Handle {
        self.pd
    }

    /// A ring is polled that so many messages were promised RECVs for; or no longer.
    pub fn count_ring(&self, is_polled: bool, left: u32) {
        let promises = &mut self.requests.lock().promises;
        if is_polled { promises.add_ring(left) } else { promises.remove_ring(left) }
    }

    /// Promises more RECVs to a polled ring that so many are left to. If there are not enough,
    /// `promisee` hears of the next post.
    pub fn promise(&self, left: u32, promisee: &Weak<dyn Promisee>) -> Share {
        let Requests { ring, promises, keys, short, .. } = &mut *self.requests.lock();
        let share = promises.promise(ring, left, |sges| self.session.regions.room(keys, sges, self.pd));
        if share.is_all && !short.iter().any(|other| other.ptr_eq(promisee)) {
            short.push(promisee.clone());
        }
        share
    }

    /// Takes the next RECV for a message. `is_promised`: by its ring, which is polled.
    pub fn take(&self, is_promised: bool, into: &mut TakenReceive) -> bool {
        let mut requests = self.requests.lock();
        let Requests { ring, promises, limit, .. } = &mut *requests;
        let Some(position) = promises.take(ring) else { return false };
        promises.forget(u32::from(is_promised));
        into.wr_id = ring.wr_id_at(position);
        into.sge_count = ring.receive_at(position, &mut into.sges);
        let must_tell = limit.limit > 0 && !limit.is_told && promises.untaken(ring) < limit.limit;
        limit.is_told |= must_tell;
        drop(requests);
        if must_tell {
            self.session.ring(self.cookie);
        }
        true
    }

    pub fn has_receive(&self) -> bool {
        let Requests { ring, promises, .. } = &mut *self.requests.lock();
        promises.untaken(ring) > 0
    }

    /// The same. If there is none, this doorbell rings after the next post.
    pub fn has_receive_or_rings(&self, doorbell: u32) -> bool {
        let Requests { ring, promises, waiting, .. } = &mut *self.requests.lock();
        let has_receive = promises.untaken(ring) > 0;
        if !has_receive && !waiting.contains(&doorbell) {
            waiting.push(doorbell);
        }
        has_receive
    }
}

/// Posts to an SRQ; dropping it rings the doorbell once.
pub(crate) struct Posts<'a> {
    receives: &'a SharedReceives,
    requests: BiasedGuard<'a, Requests>,
    posted: bool,
    /// Dropped after the lock.
    renewal: Renewal,
}

/// Dropping it renews promises that were short.
#[derive(Default)]
struct Renewal(Vec<Weak<dyn Promisee>>);

impl Drop for Renewal {
    fn drop(&mut self) {
        self.0.iter().filter_map(Weak::upgrade).for_each(|promisee| promisee.renew_promise());
    }
}

impl Posts<'_> {
    /// # Errors
    /// NoMemory: the queue is full.
    pub fn push(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), VerbsError> {
        // Acquire: pairs with `add_one`.
        let completed = self.receives.completed.get();
        if self.requests.ring.position().wrapping_sub(completed) >= self.receives.count_max {
            return Err(VerbsError::NoMemory);
        }
        self.requests.ring.publish_receive(wr_id, sges);
        self.posted = true;
        Ok(())
    }
}

impl Drop for Posts<'_> {
    fn drop(&mut self) {
        if !self.posted {
            return;
        }
        let Requests { ring, promises, short, waiting, limit, .. } = &mut *self.requests;
        self.renewal.0 = std::mem::take(short);
        if limit.is_told && promises.untaken(ring) >= limit.limit {
            limit.is_told = false;
        }
        if ring.must_ring_receive() {
            self.receives.session.ring(self.receives.cookie);
        }
        for doorbell in waiting.drain(..) {
            self.receives.session.ring(doorbell);
        }
    }
}
