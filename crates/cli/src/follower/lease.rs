//! The lease of the cluster's addresses: extended at the router when etcd has the host's word, and begun again after a
//! look at what the host has still.
//!
//! Invariant: a word goes to etcd that names a time only when the router has a lease that ends before that time is
//! over, if it is not extended. So the router stops the vNICs also when nobody is there to say so.
use super::{Follower, Host, WHOLE, log, log_other, ranges_of};
use crate::control::api::{Answer, BASE, Trouble, encoded};
use crate::failure::{Failure, Result};
use freeflow_cluster::{Acknowledged, Follow, Operator, Problem, Scope, View, lease_time};
use freeflow_orchestrator::{Pool, Revision};
use freeflow_shm::boottime_ns;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// So long a word can be on its way to etcd, also that of a follower that was killed, nanoseconds.
const LATE_NS: u64 = 60_000_000_000;

/// The time of a lease that is over from the beginning, where the cluster names none.
const FIRST_S: u64 = 86_400;

/// News of the last word's revision are awaited so long; then all is listed again, and awaited twice as long: a list
/// that takes long is not given up for another one.
const NEWS_TIME: Duration = Duration::from_secs(3);
const NEWS_TIME_MAX: Duration = Duration::from_secs(60);

/// The lease, as the router says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    after_s: Option<u64>,
    until_ns: u64,
    is_over: bool,
}

impl Status {
    fn has_ended(self) -> bool {
        self.is_over || self.after_s.is_some() && boottime_ns() >= self.until_ns
    }
}

/// Of the lease, what need not outlive the process.
pub struct OwnLease {
    /// `None`: the router has not answered.
    status: Option<Status>,
    /// The last one that it has answered.
    last: Option<Status>,
    /// The revision of the last word by which the router has extended it, with the networks that were barred.
    told: Option<(u64, Option<BTreeSet<String>>)>,
    /// The word after which the host looks at what it has, where the lease is over.
    candidate: Option<Acknowledged>,
    /// The time that words name from now on.
    saying: Option<u64>,
    /// Since when they name none, as far as this process knows.
    silent_since_ns: u64,
    /// Networks whose range here another host says that it has, and when that was looked at.
    doubtful: Option<(Instant, BTreeSet<String>)>,
    /// Networks of which the host has had its block by etcd, and when a backup had been restored by then.
    had: (Revision, BTreeSet<String>),
    /// The last words of the log about it.
    said: Option<String>,
    /// Whether etcd knew this host when this process had its first news.
    was_known: Option<bool>,
    /// It is over from the beginning: the host has come back without what it had, and etcd has no word of it since.
    is_first: bool,
    /// When the news were begun again for the candidate's sake, or the candidate came.
    awaited: Option<Instant>,
    /// How long they are awaited now.
    news_time: Duration,
}

/// Networks whose range on a host another one says that it has. It is believed only where it may be so: the host's
/// block is one of a backup.
fn others_of(view: &View, own: &str, ranges: &BTreeMap<String, String>) -> BTreeSet<String> {
    let others = view.followed().iter().filter(|(host, _)| *host != own && !view.is_reclaimed(host));
    let of_other = others.flat_map(|(_, followed)| &followed.ranges);
    let range_in = |text: &String| text.parse::<Pool>().ok();
    let overlaps = |one: Pool, other: Pool| one.encloses(other) || other.encloses(one);
    let is_its = |network: &String, range: &String| {
        let both = range_in(range).zip(ranges.get(network).and_then(range_in));
        view.is_of_backup(network, own) && both.is_some_and(|(one, other)| overlaps(one, other))
    };
    of_other.filter(|(network, range)| is_its(network, range)).map(|(network, _)| network.clone()).collect()
}

/// The end of a lease by a word that was begun at a time.
fn until_ns(began_ns: u64, after_s: u64) -> u64 {
    let time = lease_time(Duration::from_secs(after_s)).as_nanos();
    began_ns.saturating_add(u64::try_from(time).unwrap_or(u64::MAX))
}

impl OwnLease {
    /// Of a follower that begins.
    pub fn new() -> Self {
        let silent_since_ns = boottime_ns();
        let (status, last, told, candidate, saying, doubtful, had, said) = Default::default();
        let (was_known, is_first, awaited) = Default::default();
        let news_time = NEWS_TIME;
        Self {
            status,
            last,
            told,
            candidate,
            saying,
            silent_since_ns,
            doubtful,
            had,
            said,
            was_known,
            is_first,
            awaited,
            news_time,
        }
    }

    /// Whether the vNICs in the cluster's networks are stopped.
    pub fn is_over(&self) -> bool {
        self.status.is_some_and(Status::has_ended)
    }

    /// The time of it, as far as this process knows; `None`: the router needs none.
    pub fn after_s(&self) -> Option<u64> {
        self.status.or(self.last)?.after_s
    }

    /// For people.
    pub fn problem(&self) -> Option<Problem> {
        let why = match self.is_first {
            true => {
                "this host has come back without what it knew of the cluster: it makes no vNICs in the cluster's networks \
                 until etcd has its word, and it has looked at what it has still"
            }
            false => {
                "this host had not reached etcd for so long that its blocks of addresses may be others': its vNICs in \
                 the cluster's networks are stopped, until it has reached etcd and looked at what it has"
            }
        };
        self.is_over().then(|| Problem::new(why))
    }
}

impl Follower {
    fn ask_lease(&mut self, change: Option<&Value>) -> Answer<Status> {
        let path = format!("{BASE}/hosts/{}/lease", encoded(&self.host));
        let answer = match change {
            Some(change) => self.api.put(&path, change),
            None => self.api.get(&path),
        };
        let status = answer.and_then(|answer| {
            let text = |error| Trouble::from(Failure::new(format!("the router's lease: {error}")));
            serde_json::from_value(answer["status"].clone()).map_err(text)
        });
        // After a refusal it is another one than was thought.
        self.lease.status = status.as_ref().ok().copied();
        self.lease.last = self.lease.status.or(self.lease.last);
        status
    }

    fn lease_status(&mut self) -> Result<Status> {
        match self.lease.status {
            Some(status) => Ok(status),
            None => self.read_lease(),
        }
    }

    /// Before the host gets anything of the cluster's: the router may be another one by now.
    pub(super) fn look_at_lease(&mut self) -> Result<()> {
        self.read_lease().map(drop)
    }

    /// A router that was started without the files of the one before has no lease, and would need none: it gets that of
    /// the one before, which may be over.
    fn read_lease(&mut self) -> Result<Status> {
        let last = self.lease.last;
        let status = self.ask_lease(None)?;
        let Some(Status { after_s: Some(after_s), until_ns, .. }) = last.filter(|_| status.after_s.is_none()) else {
            return Ok(status);
        };
        log("the router has lost its lease of the cluster's addresses: it gets the same one");
        // If this fails, it is tried again before anything else is asked.
        (self.lease.status, self.lease.last) = (None, last);
        let until_ns = if last.is_some_and(Status::has_ended) { 0 } else { until_ns };
        let barred = self.lease.told.as_ref().and_then(|(_, barred)| barred.clone());
        Ok(self.ask_lease(Some(&json!({"afterS": after_s, "untilNs": until_ns, "barred": barred})))?)
    }

    /// Before the host gets anything of the cluster's. One that etcd knows already, and that has nothing here, has come
    /// back without its state: by the last word that etcd has of it, all may be taken back at any moment. So it has a
    /// lease that is over until a word of this process is there.
    pub(super) fn await_first_word(&mut self) -> Result<()> {
        let is_known = self.standing.as_ref().is_some_and(|standing| standing.before.is_some());
        let was_known = *self.lease.was_known.get_or_insert(is_known);
        if !was_known || self.report.acknowledged().is_some() || self.lease_status()?.after_s.is_some() {
            return Ok(());
        }
        if ranges_of(&mut Host::of(&self.api, &self.lease))?.is_empty() {
            let after_s = self.view.reclaim_after_s().unwrap_or(FIRST_S);
            self.ask_lease(Some(&json!({"afterS": after_s, "untilNs": 0})))?;
            self.lease.is_first = true;
        }
        Ok(())
    }

    /// The time that the host's words may name: the router keeps to it.
    pub(super) fn reclaim_after_s(&mut self) -> Option<u64> {
        let wanted = self.check_identity().is_ok().then(|| self.view.reclaim_after_s());
        let named = self.named_time(wanted).unwrap_or_else(|failure| {
            self.note_lease(Some(format!("the router can't be given a lease: {failure}")));
            // As before: a router that does not answer has the lease that it had.
            self.lease.saying
        });
        if named.is_none() && self.lease.saying.is_some() {
            self.lease.silent_since_ns = boottime_ns();
        }
        self.lease.saying = named;
        // Until the router is told that it needs none.
        self.report.keep_lease(self.lease.status.and_then(|status| status.after_s));
        named
    }

    /// `wanted`: `None` where what etcd says does not count.
    fn named_time(&mut self, wanted: Option<Option<u64>>) -> Result<Option<u64>> {
        let status = self.lease_status()?;
        match wanted.unwrap_or(status.after_s) {
            None => Ok(None),
            after_s if after_s == status.after_s || status.has_ended() => Ok(status.after_s),
            // The last word that etcd has may name a shorter time, which is over: first it has one that names none.
            Some(_) if status.after_s.is_none() && self.is_last_word_unknown() => Ok(None),
            Some(after_s) => {
                let latest_ns = until_ns(boottime_ns(), after_s);
                let until_ns = status.after_s.map_or(latest_ns, |_| latest_ns.min(status.until_ns));
                self.ask_lease(Some(&json!({"afterS": after_s, "untilNs": until_ns})))?;
                Ok(Some(after_s))
            }
        }
    }

    /// Whether etcd may have a word of a process before this one.
    fn is_last_word_unknown(&mut self) -> bool {
        self.lease.was_known != Some(false) && self.report.acknowledged().is_none()
    }

    /// Networks whose range here is not, or not surely, the block that this host has by etcd. `None`: this process has
    /// not looked yet, and frees none that one before it has barred.
    fn barred(&self) -> Option<BTreeSet<String>> {
        if self.carried.0 == 0 {
            return None;
        }
        let is_doubtful = |network: &String| self.lease.doubtful.as_ref().is_some_and(|(_, all)| all.contains(network));
        let ranges = self.carried.1.iter().filter(|(network, range)| {
            let block = self.view.block(network, &self.host).map(|block| block.to_string());
            block.as_ref() != Some(*range) || is_doubtful(network)
        });
        Some(ranges.map(|(network, _)| network.clone()).collect())
    }

    /// Whether etcd says that this host's blocks are others' by now, though its lease is not over: as if its time had
    /// stood still, when the whole machine was halted.
    fn has_lost_blocks(&mut self) -> bool {
        if self.standing.is_none() || self.check_identity().is_err() {
            return false;
        }
        let restored_at = self.view.restored_at();
        let block = |network: &str| self.view.block(network, &self.host).map(|block| block.to_string());
        let had = |network: &String| self.lease.had.0 == restored_at && self.lease.had.1.contains(network);
        let ranges = &self.carried.1;
        let is_lost =
            |(network, range): (&String, &String)| block(network).map_or(had(network), |block| block != *range);
        let is_any_lost = ranges.iter().any(is_lost);
        let has = ranges.iter().filter(|(network, range)| block(network).as_ref() == Some(*range));
        self.lease.had = (restored_at, has.map(|(network, _)| network.clone()).collect());
        is_any_lost
    }

    /// Looks whether others say that they have a range of this host's, before a lease begins again, and then until
    /// nobody does. Hosts don't follow that: they ask etcd for it.
    fn look_at_others(&mut self, is_over: bool) -> Result<()> {
        let is_doubt_old = |(at, doubtful): &(Instant, BTreeSet<String>)| !doubtful.is_empty() && at.elapsed() > WHOLE;
        if !is_over && !self.lease.doubtful.as_ref().is_some_and(is_doubt_old) {
            return Ok(());
        }
        let all = match self.view.scope() {
            Scope::Host => Some(Operator::open(&self.file)?.view()?),
            Scope::Said | Scope::Vnics => None,
        };
        let doubtful = others_of(all.as_ref().unwrap_or(&self.view), &self.host, &self.carried.1);
        self.lease.doubtful = Some((Instant::now(), doubtful));
        Ok(())
    }

    /// Whether all is to be compared, so that a lease that is over can begin again.
    pub(super) fn is_lease_due(&mut self) -> bool {
        if !self.lease.is_over() {
            self.lease.candidate = None;
            return false;
        }
        let acknowledged = self.report.acknowledged();
        let is_good = |word: &Acknowledged| {
            word.reclaim_after_s.is_none_or(|after_s| until_ns(word.began_ns, after_s) > boottime_ns())
        };
        self.lease.candidate = self.lease.candidate.filter(is_good).or(acknowledged.filter(is_good));
        let Some(word) = self.lease.candidate else {
            (self.lease.awaited, self.lease.news_time) = (None, NEWS_TIME);
            return false;
        };
        if self.view.revision() < word.revision {
            self.await_news();
            return false;
        }
        self.carried.0 < word.revision.0
    }

    /// Where nothing changes that hosts follow, no news come of the revision of this host's own word.
    fn await_news(&mut self) {
        let since = *self.lease.awaited.get_or_insert_with(Instant::now);
        if since.elapsed() > self.lease.news_time {
            self.lease.awaited = Some(Instant::now());
            self.lease.news_time = (self.lease.news_time * 2).min(NEWS_TIME_MAX);
            if let Ok(follow) = Follow::start(&self.file) {
                self.claims.set_waker(follow.waker());
                self.follow = follow;
            }
        }
    }

    /// Extends the lease, or begins it again, by the last word that etcd has.
    pub(super) fn extend_lease(&mut self) {
        let done = self.try_to_extend_lease();
        let said = done.err().map(|failure| format!("the lease of the cluster's addresses: {failure}"));
        self.note_lease(said);
    }

    fn note_lease(&mut self, said: Option<String>) {
        log_other(&mut self.lease.said, said);
    }

    fn try_to_extend_lease(&mut self) -> Result<()> {
        let status = self.lease_status()?;
        let is_over = status.has_ended();
        let word = if is_over { self.lease.candidate } else { self.report.acknowledged() };
        let Some(word) = word else { return Ok(()) };
        if !is_over && status.after_s.is_some() && self.has_lost_blocks() {
            log("blocks of addresses were taken from this host: its lease ends");
            self.ask_lease(Some(&json!({"afterS": status.after_s, "untilNs": 0})))?;
            return Ok(());
        }
        if is_over && (self.standing.is_none() || self.carried.0 < word.revision.0 || self.check_identity().is_err()) {
            return Ok(());
        }
        self.look_at_others(is_over)?;
        let barred = self.barred();
        let told = Some((word.revision.0, barred.clone()));
        if !is_over && self.lease.told == told {
            return Ok(());
        }
        let silent_ns = self.lease.silent_since_ns.saturating_add(LATE_NS);
        // It is shortened before a word names the shorter time, and only then.
        let extended = |armed_s, after_s| {
            let by_word_ns = until_ns(word.began_ns, after_s);
            let until_ns = if is_over { by_word_ns } else { by_word_ns.max(status.until_ns) };
            json!({"afterS": armed_s, "untilNs": until_ns, "isFresh": is_over, "barred": barred})
        };
        let change = match (word.reclaim_after_s, status.after_s) {
            (None, None) => return Ok(()),
            // Words that name a time may be on their way. Such a one counts from when it arrives, after this one.
            (None, Some(armed_s)) if self.lease.saying.is_some() || word.began_ns < silent_ns => {
                extended(armed_s, armed_s)
            }
            (None, Some(_)) => json!({"afterS": null, "isFresh": is_over}),
            (Some(named_s), armed_s) => {
                // The router may have been asked for a shorter time since that word.
                let armed_s = armed_s.unwrap_or(named_s);
                extended(armed_s, named_s.min(armed_s))
            }
        };
        self.ask_lease(Some(&change))?;
        self.lease.told = told;
        if is_over {
            log("this host has its lease of the cluster's addresses again");
            (self.lease.candidate, self.lease.is_first) = (None, false);
            // Declared vNICs are made again.
            self.is_due = true;
        }
        Ok(())
    }
}
