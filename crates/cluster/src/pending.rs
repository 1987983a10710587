//! All that waits for a controller: requests to be let in, of which the bearer of each token has a part, renewals, and
//! hosts that were removed.
use crate::joining::MESSAGE_BYTES_MAX;
use crate::keys::Keys;
use crate::records::is_host_name;
use crate::token::{Admitted, HOSTS};
use crate::users::is_id;
use freeflow_etcd::News;
use freeflow_orchestrator::store::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time;

/// Requests that wait; more are passed over until some are answered.
const PENDING_COUNT_MAX: usize = 256;
/// The oldest requests by a token, of which controllers that work at the same time begin with different ones.
const NEXT_COUNT: usize = 16;
/// One of so many is the oldest of all, so that none waits for ever.
const OLDEST_EACH: usize = 4;
/// A removal that could not be finished is tried again after this.
const RETRY: time::Duration = time::Duration::from_secs(10);
/// Refusals by one token are counted so long, and not told.
const REFUSALS_TIME: time::Duration = time::Duration::from_secs(60);

/// A request for another certificate, in the part of the host.
pub(crate) const RENEWAL: &str = "renewal";

/// All that waits for a controller.
pub struct Pending {
    joins: String,
    hosts: String,
    own: String,
    /// By token and host.
    pub(crate) requests: Requests,
    /// The token that had its turn last, and how many requests had theirs.
    turn: (String, usize),
    /// Users in etcd of hosts that were admitted.
    pub(crate) users: BTreeMap<String, String>,
    /// Hosts whose certificates are to be renewed.
    pub(crate) renewals: BTreeMap<String, Entry>,
    /// Hosts that were removed, whose users are still there.
    pub(crate) removed: BTreeSet<String>,
    /// When those were last looked at that could not be finished.
    pub(crate) retried_at: Option<time::Instant>,
    pub(crate) refusals: Refusals,
    /// More waits in etcd.
    has_passed_over: bool,
}

/// By token and host.
type Requests = BTreeMap<(String, String), Entry>;

/// Those by one token.
fn by_token<'a>(requests: &'a Requests, token: &str) -> impl Iterator<Item = (&'a (String, String), &'a Entry)> {
    let first = (token.to_owned(), String::new());
    let token = token.to_owned();
    requests.range(first..).take_while(move |((of, _), _)| *of == token)
}

/// The token that has its turn after this one: each has one, however many requests it has.
fn next_token(requests: &Requests, last: &str) -> Option<String> {
    let after = (format!("{last}\0"), String::new());
    let next = requests.range(after..).next().or_else(|| requests.first_key_value());
    next.map(|((token, _), _)| token.clone())
}

/// Another number for each controller and request.
fn rank(controller: &str, (token, host): &(String, String)) -> u64 {
    let mut hasher = DefaultHasher::new();
    (controller, token, host).hash(&mut hasher);
    hasher.finish()
}

/// Refusals by token, since whoever has one can cause them without end: of each the first is told, then how many there
/// were.
#[derive(Default)]
pub(crate) struct Refusals(BTreeMap<String, Refused>);

struct Refused {
    told_at: time::Instant,
    /// Since then.
    count: u64,
    last: String,
}

impl Refusals {
    /// A line for the log, if this one is told.
    pub(crate) fn note(&mut self, token: &str, text: String) -> Option<String> {
        if let Some(there) = self.0.get_mut(token) {
            (there.count, there.last) = (there.count + 1, text);
            return None;
        }
        self.0.insert(token.to_owned(), Refused { told_at: time::Instant::now(), count: 0, last: String::new() });
        Some(text)
    }

    /// Lines about those that were not told, after some time.
    pub(crate) fn due(&mut self) -> Vec<String> {
        self.0.retain(|_, there| there.count > 0 || there.told_at.elapsed() < REFUSALS_TIME);
        let due = self.0.iter_mut().filter(|(_, there)| there.told_at.elapsed() >= REFUSALS_TIME);
        let line = |(token, there): (&String, &mut Refused)| {
            let text =
                format!("{} more requests by token {token} are refused; the last one: {}", there.count, there.last);
            *there = Refused { told_at: time::Instant::now(), count: 0, last: String::new() };
            text
        };
        due.map(line).collect()
    }
}

impl Pending {
    /// Nothing yet.
    pub fn new(root: &str) -> Self {
        let keys = Keys::new(root);
        let (joins, hosts) = (format!("{}/", keys.requests()), format!("{}/data/{HOSTS}", keys.admission()));
        let own = format!("{}hosts/", keys.prefix());
        let (requests, renewals) = (BTreeMap::new(), BTreeMap::new());
        Self {
            joins,
            hosts,
            own,
            requests,
            turn: Default::default(),
            users: BTreeMap::new(),
            renewals,
            removed: BTreeSet::new(),
            retried_at: None,
            refusals: Refusals::default(),
            has_passed_over: false,
        }
    }

    /// Takes news in.
    pub fn take(&mut self, news: &News) {
        match news {
            News::Listed(_, entries) => {
                self.requests.clear();
                self.renewals.clear();
                self.removed.clear();
                self.users.clear();
                self.has_passed_over = false;
                entries.iter().for_each(|entry| self.change(&entry.key, Some(entry)));
            }
            News::Changed(_, changes) => changes.iter().for_each(|(key, entry)| self.change(key, entry.as_ref())),
            News::Unchanged(_) | News::Behind(_) => {}
        }
    }

    fn change(&mut self, key: &str, entry: Option<&Entry>) {
        if let Some(host) = key.strip_prefix(&self.hosts) {
            let read = |entry: &Entry| serde_json::from_slice::<Admitted>(&entry.value).ok();
            if !is_host_name(host) {
                return;
            }
            let admitted = entry.and_then(read);
            match &admitted {
                Some(admitted) => self.users.insert(host.to_owned(), admitted.user.clone()),
                None => self.users.remove(host),
            };
            match admitted.is_some_and(|admitted| admitted.is_removed) {
                true => {
                    self.retried_at = None;
                    self.removed.insert(host.to_owned());
                }
                false => {
                    self.removed.remove(host);
                }
            }
            return;
        }
        if let Some((host, rest)) = key.strip_prefix(&self.own).and_then(|rest| rest.split_once('/')) {
            let is_request = |entry: &&Entry| is_host_name(host) && entry.value.len() <= MESSAGE_BYTES_MAX;
            match entry.filter(is_request) {
                _ if rest.strip_prefix("data/") != Some(RENEWAL) => {}
                Some(entry) if self.renewals.len() < PENDING_COUNT_MAX || self.renewals.contains_key(host) => {
                    self.renewals.insert(host.to_owned(), entry.clone());
                }
                Some(_) => self.has_passed_over = true,
                None => {
                    self.renewals.remove(host);
                }
            }
            return;
        }
        let place = key.strip_prefix(&self.joins).and_then(|rest| rest.strip_suffix("/request"));
        let Some((token, host)) = place.and_then(|rest| rest.split_once("/data/")) else { return };
        let place = (token.to_owned(), host.to_owned());
        // Other things that somebody with a token writes are nobody's.
        let is_request = |entry: &&Entry| is_id(token) && is_host_name(host) && entry.value.len() <= MESSAGE_BYTES_MAX;
        match entry.filter(is_request) {
            Some(entry) => {
                self.requests.insert(place, entry.clone());
                self.pass_over();
            }
            None => {
                self.requests.remove(&place);
            }
        }
    }

    /// One request too many goes: the latest by the token that has most. So a token's bearer can push out no other's.
    fn pass_over(&mut self) {
        if self.requests.len() <= PENDING_COUNT_MAX {
            return;
        }
        let mut counts = BTreeMap::<&str, usize>::new();
        self.requests.keys().for_each(|(token, _)| *counts.entry(token).or_default() += 1);
        let most = counts.into_iter().max_by_key(|(_, count)| *count).map(|(token, _)| token);
        let latest = most.and_then(|token| by_token(&self.requests, token).max_by_key(|(_, entry)| entry.created));
        if let Some(place) = latest.map(|(place, _)| place.clone()) {
            self.requests.remove(&place);
            self.has_passed_over = true;
        }
    }

    /// The next request that this controller takes in hand: tokens have their turns one after the other.
    pub(crate) fn next(&mut self, controller: &str) -> Option<((String, String), Entry)> {
        let (last, count) = &self.turn;
        let token = next_token(&self.requests, last)?;
        let is_oldest_due = count.is_multiple_of(OLDEST_EACH);
        let mut all: Vec<_> = by_token(&self.requests, &token).collect();
        // A host that asks again, as it waits, loses no place.
        all.sort_by_key(|(_, entry)| entry.created);
        all.truncate(if is_oldest_due { 1 } else { NEXT_COUNT });
        let (place, entry) = all.into_iter().min_by_key(|(place, _)| rank(controller, place))?;
        let next = (place.clone(), entry.clone());
        self.turn = (token, count.wrapping_add(1));
        Some(next)
    }

    /// Whether more waits in etcd than was taken in, and there is room for it: who follows lists all again then.
    pub fn is_list_due(&self) -> bool {
        self.has_passed_over && self.requests.is_empty() && self.renewals.is_empty()
    }

    /// Whether there is nothing to do just now.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.renewals.is_empty() && !self.is_removal_due()
    }

    pub(crate) fn is_removal_due(&self) -> bool {
        !self.removed.is_empty() && self.retried_at.is_none_or(|at| at.elapsed() > RETRY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_orchestrator::Revision;

    fn entry(key: &str, bytes: usize) -> Entry {
        let value = vec![b'x'; bytes];
        Entry { key: key.into(), value, created: Revision(1), modified: Revision(1), lease: None }
    }

    fn changed(pending: &mut Pending, key: &str, entry: Option<Entry>) {
        pending.take(&News::Changed(Revision(2), vec![(key.to_owned(), entry)]));
    }

    #[test]
    fn a_bounded_number_of_requests_waits_and_nothing_else() {
        let mut pending = Pending::new("/freeflow");
        for key in [
            "/freeflow/requests/0123456789ab/data/h1/answer",
            "/freeflow/requests/0123456789ab/data/h1",
            "/freeflow/requests/0123456789ab/data/../request",
            "/freeflow/requests/0123456789ab/data/a/b/request",
            "/freeflow/requests/not-a-token/data/h1/request",
            "/freeflow/requests/0123456789ab/receipts/h1/request",
            "/freeflower/requests/0123456789ab/data/h1/request",
            "/freeflow/hosts/h1/data/record",
            "/freeflow/hosts/h1/renewal",
            "/freeflow/hosts/../data/renewal",
            "/freeflow/admission/data/hosts/h1",
        ] {
            changed(&mut pending, key, Some(entry(key, 3)));
            assert!(pending.is_empty(), "{key}");
        }
        let key = "/freeflow/requests/0123456789ab/data/h1/request";
        changed(&mut pending, key, Some(entry(key, MESSAGE_BYTES_MAX + 1)));
        assert!(pending.is_empty(), "one that is too long");
        changed(&mut pending, key, Some(entry(key, 3)));
        assert_eq!(pending.requests.len(), 1);
        changed(&mut pending, key, None);
        assert!(pending.is_empty(), "it was answered");
        for number in 0..2 * PENDING_COUNT_MAX {
            for key in
                [format!("requests/0123456789ab/data/h{number}/request"), format!("hosts/h{number}/data/renewal")]
            {
                let key = format!("/freeflow/{key}");
                changed(&mut pending, &key, Some(entry(&key, 3)));
            }
        }
        assert_eq!((pending.requests.len(), pending.renewals.len()), (PENDING_COUNT_MAX, PENDING_COUNT_MAX));
        // One that has changed is the one that waits, and those that were passed over are looked at when there is room.
        let renewal = "/freeflow/hosts/h7/data/renewal";
        changed(&mut pending, renewal, Some(entry(renewal, 4)));
        assert_eq!(pending.renewals.get("h7").map(|entry| entry.value.len()), Some(4));
        assert!(!pending.is_list_due());
        pending.requests.clear();
        pending.renewals.clear();
        assert!(pending.is_list_due());
        pending.take(&News::Listed(Revision(3), vec![entry(key, 3)]));
        assert_eq!((pending.requests.len(), pending.renewals.len(), pending.is_list_due()), (1, 0, false));
    }

    #[test]
    fn who_has_a_token_holds_up_nobody_with_another_one() {
        let mut pending = Pending::new("/freeflow");
        let ask = |pending: &mut Pending, token: &str, host: &str, created: u64| {
            let key = format!("/freeflow/requests/{token}/data/{host}/request");
            changed(pending, &key, Some(Entry { created: Revision(created), ..entry(&key, 3) }));
        };
        let (flood, other) = ("000000000000", "0123456789ab");
        for number in 0..2 * PENDING_COUNT_MAX {
            ask(&mut pending, flood, &format!("f{number}"), number as u64 + 1);
        }
        for number in 0..3 {
            ask(&mut pending, other, &format!("h{number}"), 1000 + number);
        }
        assert_eq!((pending.requests.len(), by_token(&pending.requests, other).count()), (PENDING_COUNT_MAX, 3));
        // Each token has its turn, and what came first is not pushed out by what comes later.
        let mut first = Vec::new();
        for _ in 0..6 {
            let (place, _) = pending.next("h1").expect("something waits");
            pending.requests.remove(&place);
            first.push(place);
        }
        assert_eq!(first.iter().filter(|(token, _)| token == other).count(), 3, "{first:?}");
        assert!(pending.requests.contains_key(&(flood.into(), "f100".into())));
        while let Some((place, _)) = pending.next("h1") {
            pending.requests.remove(&place);
        }
        assert!(pending.is_list_due(), "those that were passed over wait in etcd");
    }

    #[test]
    fn controllers_begin_with_different_requests_and_none_waits_for_ever() {
        let key = |host: usize| format!("/freeflow/requests/0123456789ab/data/h{host}/request");
        let begun = |controller: &str| {
            let mut pending = Pending::new("/freeflow");
            (0..12).for_each(|host| {
                let entry = Entry { created: Revision(host as u64 + 1), ..entry(&key(host), 3) };
                changed(&mut pending, &key(host), Some(entry));
            });
            let next = |_| {
                let ((token, host), _) = pending.next(controller).expect("something waits");
                pending.requests.remove(&(token, host.clone()));
                host
            };
            (0..4).map(next).collect::<Vec<_>>()
        };
        let all: BTreeSet<_> = ["h1", "h2", "h3"].iter().flat_map(|controller| begun(controller)).collect();
        assert!(all.len() > 6, "three controllers do the same: {all:?}");
        assert!(begun("h1")[0] == "h0" && begun("h2")[0] == "h0", "the oldest has its turn");
    }

    #[test]
    fn refusals_by_one_token_are_counted() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.note("t", "no".into()), Some("no".into()));
        assert_eq!((refusals.note("t", "no".into()), refusals.note("t", "never".into())), (None, None));
        assert_eq!((refusals.note("u", "no".into()), refusals.due()), (Some("no".into()), Vec::new()));
        let past = |refusals: &mut Refusals| {
            let then = time::Instant::now().checked_sub(REFUSALS_TIME).expect("the machine has run for longer");
            refusals.0.values_mut().for_each(|there| there.told_at = then);
        };
        past(&mut refusals);
        assert_eq!(refusals.due(), ["2 more requests by token t are refused; the last one: never"]);
        assert_eq!(refusals.due(), Vec::<String>::new());
        past(&mut refusals);
        assert_eq!((refusals.due(), refusals.0.len()), (Vec::new(), 0));
    }

    #[test]
    fn a_host_that_was_removed_waits_until_its_user_is_gone() {
        let mut pending = Pending::new("/freeflow");
        let key = "/freeflow/admission/data/hosts/h1";
        let mut admitted =
            Admitted { public_key: "k".into(), user: "u".into(), token: None, at_s: 1, is_removed: false };
        let of = |admitted: &Admitted| {
            let value = serde_json::to_vec(admitted).expect("encodable");
            Some(Entry { value, ..entry(key, 0) })
        };
        changed(&mut pending, key, of(&admitted));
        assert!(pending.is_empty());
        admitted.is_removed = true;
        changed(&mut pending, key, of(&admitted));
        assert_eq!(pending.removed, BTreeSet::from(["h1".to_owned()]));
        changed(&mut pending, key, None);
        assert!(pending.is_empty());
    }
}
