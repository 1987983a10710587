//! Controllers admit hosts: each use of a token is taken in the transaction that notes the host, so that two
//! controllers at once let in nobody whom one would not. All that follows, the user in etcd, its rights, the block of
//! addresses and the certificate, may be done twice.
use crate::ClusterError;
use crate::authority::{Authority, HOST_S, of_file};
use crate::blocks::Controller;
use crate::file::ClusterFile;
use crate::joining::{
    Case, Decision, MESSAGE_BYTES_MAX, Request, Welcome, answer, decide, is_answer_to, name_is_taken, no_token, refused,
};
use crate::keys::Keys;
use crate::places;
use crate::records::{is_host_name, now_s};
use crate::rights::Rights;
use crate::token::{Admitted, HOSTS, MESSAGE_S, TOKENS, TokenRecord, compare, public_key, read, write};
use crate::turns::{busy, part};
use crate::users::{check_user, is_id, is_user_of, new_user};
use crate::view::View;
use freeflow_etcd::{EtcdStore, News};
use freeflow_orchestrator::store::{Committed, Entry, Transaction, Write};
use freeflow_orchestrator::{Pool, Revision, Store};
use freeflow_verbs::{Duration, Instant};
use std::collections::btree_map::Entry as MapEntry;
use std::collections::{BTreeMap, BTreeSet};
use std::thread::sleep;
use std::time;

/// Requests that wait; more are passed over until some are answered.
const PENDING_COUNT_MAX: usize = 256;
/// Requests that are answered in one go: a host's own business goes on meanwhile.
const ANSWER_COUNT: usize = 32;
/// Others may change the same keys at the same time: so often it is begun anew.
const ATTEMPT_COUNT: usize = 8;
/// Between two looks whether a host is gone.
const PAUSE: time::Duration = time::Duration::from_millis(200);
/// A removal that could not be finished is tried again after this.
const RETRY: time::Duration = time::Duration::from_secs(10);
/// Refusals by one token are counted so long, and not told.
const REFUSALS_TIME: time::Duration = time::Duration::from_secs(60);
/// An answer that nobody fetches goes after this.
pub(crate) const MESSAGE_TIME: Duration = Duration(MESSAGE_S * 1_000_000_000);
/// Addresses of the network `default`, unless the cluster was made with others.
pub const DEFAULT_POOL: &str = "10.111.0.0/16";

/// Of a request, and of its answer, in the part of a token.
pub(crate) fn request_key(host: &str) -> String {
    format!("{host}/request")
}

/// A request for another certificate, in the part of the host.
pub(crate) const RENEWAL: &str = "renewal";

/// The answer to it, in the part of admission.
pub(crate) fn renewed_key(host: &str) -> String {
    format!("answers/{host}")
}

pub(crate) fn answer_key(host: &str) -> String {
    format!("{host}/answer")
}

/// All that waits for a controller.
pub struct Pending {
    joins: String,
    hosts: String,
    own: String,
    /// By token and host.
    requests: BTreeMap<(String, String), Entry>,
    /// Hosts whose certificates are to be renewed.
    renewals: BTreeMap<String, Entry>,
    /// Hosts that were removed, whose users are still there.
    removed: BTreeSet<String>,
    /// When those were last looked at that could not be finished.
    retried_at: Option<time::Instant>,
    refusals: Refusals,
    /// More waits in etcd.
    has_passed_over: bool,
}

/// Refusals by token, since whoever has one can cause them without end: of each the first is told, then how many there
/// were.
#[derive(Default)]
struct Refusals(BTreeMap<String, Refused>);

struct Refused {
    told_at: time::Instant,
    /// Since then.
    count: u64,
    last: String,
}

impl Refusals {
    /// A line for the log, if this one is told.
    fn note(&mut self, token: &str, text: String) -> Option<String> {
        if let Some(there) = self.0.get_mut(token) {
            (there.count, there.last) = (there.count + 1, text);
            return None;
        }
        self.0.insert(token.to_owned(), Refused { told_at: time::Instant::now(), count: 0, last: String::new() });
        Some(text)
    }

    /// Lines about those that were not told, after some time.
    fn due(&mut self) -> Vec<String> {
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
            match entry.and_then(read).is_some_and(|admitted| admitted.is_removed) {
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
            Some(entry) if self.requests.len() < PENDING_COUNT_MAX || self.requests.contains_key(&place) => {
                self.requests.insert(place, entry.clone());
            }
            Some(_) => self.has_passed_over = true,
            None => {
                self.requests.remove(&place);
            }
        }
    }

    /// Whether more waits in etcd than was taken in, and there is room for it: who follows lists all anew then.
    pub fn is_list_due(&self) -> bool {
        self.has_passed_over && self.requests.is_empty() && self.renewals.is_empty()
    }

    /// Whether there is nothing to do just now.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.renewals.is_empty() && !self.is_removal_due()
    }

    fn is_removal_due(&self) -> bool {
        !self.removed.is_empty() && self.retried_at.is_none_or(|at| at.elapsed() > RETRY)
    }
}

/// A controller at work on what waits.
pub struct Admission<'a> {
    file: ClusterFile,
    view: &'a View,
    authority: Option<Authority>,
    rights: Option<Rights>,
    store: EtcdStore,
}

/// A host that is let in: who it is, and by which token.
struct Bearer<'a> {
    host: &'a str,
    public_key: &'a str,
    token: Option<&'a str>,
}

impl<'a> Admission<'a> {
    /// With the keys that the file names.
    ///
    /// # Errors
    /// Keys that can't be read.
    pub fn open(file: &ClusterFile, view: &'a View) -> Result<Self, ClusterError> {
        let rights = file.authority.is_some().then(|| Rights::open(file)).transpose()?;
        let (authority, file) = (of_file(file)?, file.as_own());
        Ok(Self { store: file.store(&file.keys().admission())?, file, view, authority, rights })
    }

    /// Takes away the users of tokens by which nobody joins any more, now and then: a line for the log about each.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn sweep(&self) -> Result<Vec<String>, ClusterError> {
        let Some(rights) = &self.rights else { return Ok(Vec::new()) };
        let (mut said, mut failed) = (Vec::new(), None);
        // Users first: each was made after its token.
        for id in rights.tokens()? {
            let take = || -> Result<bool, ClusterError> {
                let (record, _) = read::<TokenRecord>(&self.store, &format!("{TOKENS}{id}"))?;
                let is_over = record.is_none_or(|record| record.is_over(now_s())) && rights.is_own_token(&id)?;
                if is_over {
                    rights.take_token(&id)?;
                }
                Ok(is_over)
            };
            // One that fails holds up no other.
            match take() {
                Ok(true) => said.push(format!("nobody joins by the token {id} any more: its user in etcd is gone")),
                Ok(false) => {}
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(said), Err)
    }

    /// Does what waits, a bounded part of it: a line for the log about each, and why it ended early, if it did. Then
    /// the rest waits on.
    pub fn run(&mut self, pending: &mut Pending) -> (Vec<String>, Option<ClusterError>) {
        let mut said = Vec::new();
        let done = self.run_all(pending, &mut said);
        (said, done.err())
    }

    fn run_all(&mut self, pending: &mut Pending, said: &mut Vec<String>) -> Result<(), ClusterError> {
        said.extend(pending.refusals.due());
        let removed = if pending.is_removal_due() { pending.removed.clone() } else { BTreeSet::new() };
        for host in removed {
            match lasting(self.finish_removal(&host), &host, said)? {
                Some(is_done) => {
                    if is_done {
                        said.push(format!("the certificates of host {host}, which was removed, are nobody's now"));
                    }
                    pending.removed.remove(&host);
                }
                None => pending.retried_at = Some(time::Instant::now()),
            }
        }
        for _ in 0..ANSWER_COUNT {
            let Some((host, entry)) = pending.renewals.first_key_value() else { break };
            let (host, entry) = (host.clone(), entry.clone());
            let renewed = self.renew(&host, &entry.value);
            let text = lasting(renewed, &host, said)?.flatten();
            said.extend(text);
            pending.renewals.remove(&host);
        }
        if pending.requests.is_empty() {
            return Ok(());
        }
        // A part for each token.
        let mut joins = BTreeMap::new();
        for _ in 0..ANSWER_COUNT {
            // The oldest first: nobody can push in.
            let Some((place, entry)) = pending.requests.iter().min_by_key(|(_, entry)| entry.modified) else { break };
            let ((token, host), entry) = (place.clone(), entry.clone());
            let store = match joins.entry(token.clone()) {
                MapEntry::Occupied(there) => there.into_mut(),
                MapEntry::Vacant(place) => place.insert(self.file.store(&self.file.keys().requests_by(&token))?),
            };
            let answered = self.answer(store, (&token, &host), &entry);
            match lasting(answered, &host, said)?.flatten() {
                Some(Ok(text)) => said.push(text),
                Some(Err(text)) => said.extend(pending.refusals.note(&token, text)),
                None => {}
            }
            pending.requests.remove(&(token, host));
        }
        Ok(())
    }

    /// Answers a request: that the host is admitted, or that it is refused. `None`: another controller was faster, or
    /// the host has asked anew; or nobody has asked, and there is nobody to answer.
    fn answer(
        &mut self,
        joins: &mut EtcdStore,
        (token, host): (&str, &str),
        entry: &Entry,
    ) -> Result<Option<Result<String, String>>, ClusterError> {
        let asked = request_key(host);
        let compares = vec![compare(&asked, Some(entry.modified))];
        let remove = Write { key: asked, value: None, lease: None };
        let (record, _) = read::<TokenRecord>(&self.store, &format!("{TOKENS}{token}"))?;
        if record.is_some_and(|record| Request::read(&entry.value, (token, &record), host).is_err()) {
            joins.commit(&Transaction { compares, writes: vec![remove] })?;
            return Ok(None);
        }
        let outcome = outcome_of(self.admit_bearer(token, host, &entry.value))?;
        let text = match &outcome {
            Ok(welcome) => Ok(format!("host {host} is admitted by token {token}, with addresses {}", welcome.range)),
            Err(why) => Err(format!("host {host} is refused, by token {token}: {why}")),
        };
        let value = Some(answer(self.authority.as_ref(), token, &entry.value, outcome)?);
        let lease = Some(joins.grant(Instant(0), MESSAGE_TIME)?);
        let answered = Write { key: answer_key(host), value, lease };
        let writes = vec![remove, answered];
        let done = joins.commit(&Transaction { compares, writes })?;
        Ok(matches!(done, Committed::Done(_)).then_some(text))
    }

    /// Another certificate for a host that is in, unless it has one by this request. By the host's own user in etcd,
    /// who alone can write the request.
    fn renew(&mut self, host: &str, bytes: &[u8]) -> Result<Option<String>, ClusterError> {
        let key = renewed_key(host);
        let there = self.store.get(&key, None)?;
        if there.is_some_and(|there| is_answer_to(&there.value, bytes)) {
            return Ok(None);
        }
        let (admitted, _) = read::<Admitted>(&self.store, &format!("{HOSTS}{host}"))?;
        let request = Request::read_own(bytes, host);
        let outcome = match (request, admitted.filter(|admitted| !admitted.is_removed)) {
            (Ok(request), Some(admitted)) if admitted.public_key == request.public_key => {
                let bearer = Bearer { host, public_key: &request.public_key, token: None };
                self.certified(&bearer, &admitted)
            }
            (Ok(_), _) => Err(refused("the cluster has admitted no host of this name and key".into())),
            (Err(why), _) => Err(refused(why)),
        };
        let outcome = outcome_of(outcome)?;
        let text = match &outcome {
            Ok(_) => format!("host {host} has another certificate"),
            Err(why) => format!("host {host} gets no other certificate: {why}"),
        };
        let value = Some(answer(self.authority.as_ref(), RENEWAL, bytes, outcome)?);
        let lease = Some(self.store.grant(Instant(0), MESSAGE_TIME)?);
        self.store.commit(&Transaction { compares: Vec::new(), writes: vec![Write { key, value, lease }] })?;
        Ok(Some(text))
    }

    fn admit_bearer(&mut self, token: &str, host: &str, bytes: &[u8]) -> Result<Welcome, ClusterError> {
        let key = format!("{TOKENS}{token}");
        for _ in 0..ATTEMPT_COUNT {
            let (record, modified) = read::<TokenRecord>(&self.store, &key)?;
            let record = record.ok_or_else(|| refused(no_token(token)))?;
            let request = Request::read(bytes, (token, &record), host).map_err(refused)?;
            let (there, before, is_recorded) = self.there(host)?;
            let case = Case { request: &request, token: &record, there: there.as_ref(), is_recorded, now_s: now_s() };
            let bearer = Bearer { host, public_key: &request.public_key, token: Some(token) };
            let admitted = match (decide(&case).map_err(refused)?, there) {
                (Decision::Known, Some(admitted)) => admitted,
                (Decision::Known, None) => continue,
                (Decision::New(record), _) => {
                    // Before the use is taken.
                    Controller::check_default(&self.file, self.view, self.pool()?.0, host)?;
                    let admitted = new_host(&bearer)?;
                    let name = format!("{HOSTS}{host}");
                    let compares = vec![compare(&key, modified), compare(&name, before)];
                    let writes = vec![write(key.clone(), &record), write(name, &admitted)];
                    match self.store.commit(&Transaction { compares, writes })? {
                        Committed::Done(_) => admitted,
                        Committed::Conflict(_) => continue,
                    }
                }
            };
            return self.welcome(&bearer, &admitted, false);
        }
        Err(busy())
    }

    /// A controller, which is a host itself, by its own keys: no token is needed.
    ///
    /// # Errors
    /// `Refused`: the name is another's. etcd did not do it.
    pub fn admit_controller(&mut self, host: &str, public_key: &[u8]) -> Result<Welcome, ClusterError> {
        let public_key = crate::token::public_text(public_key);
        let bearer = Bearer { host, public_key: &public_key, token: None };
        for _ in 0..ATTEMPT_COUNT {
            let (there, before, is_recorded) = self.there(host)?;
            let admitted = match there {
                Some(there) if there.public_key == public_key && !there.is_removed => there,
                None if !is_recorded => {
                    let (admitted, name) = (new_host(&bearer)?, format!("{HOSTS}{host}"));
                    let (compares, writes) = (vec![compare(&name, before)], vec![write(name, &admitted)]);
                    match self.store.commit(&Transaction { compares, writes })? {
                        Committed::Done(_) => admitted,
                        Committed::Conflict(_) => continue,
                    }
                }
                _ => return Err(refused(name_is_taken(host))),
            };
            return self.welcome(&bearer, &admitted, true);
        }
        Err(busy())
    }

    /// The host of a name, if it was admitted and is not removed; when that was written; and whether a host speaks
    /// under the name, whoever let it in.
    fn there(&mut self, host: &str) -> Result<(Option<Admitted>, Option<Revision>, bool), ClusterError> {
        let key = format!("{HOSTS}{host}");
        let (admitted, modified) = read::<Admitted>(&self.store, &key)?;
        let is_recorded = self.view.hosts().contains_key(host);
        if !admitted.as_ref().is_some_and(|admitted| admitted.is_removed) {
            return Ok((admitted, modified, is_recorded));
        }
        // News of that are still to come.
        let is_recorded = !self.finish_removal(host)? && is_recorded;
        let (admitted, modified) = read(&self.store, &key)?;
        Ok((admitted, modified, is_recorded))
    }

    /// Whether this controller has finished it. First the host's user, so that it writes no more; then all that it has
    /// written, and all that it was given; its name is free last. Each of these only as long as that is so: another
    /// controller may have finished, and the next host of the name may be in.
    fn finish_removal(&mut self, host: &str) -> Result<bool, ClusterError> {
        let (key, keys) = (format!("{HOSTS}{host}"), self.file.keys());
        let (admitted, modified) = read::<Admitted>(&self.store, &key)?;
        let removed = admitted.filter(|admitted| admitted.is_removed).zip(modified);
        let Some((admitted, modified)) = removed else { return Ok(false) };
        // A name that is no user of its was never one: nothing is deleted by it, and the rest goes as well.
        if let Some(rights) = self.rights.as_ref().filter(|_| is_user_of(&admitted.user, host)) {
            rights.take_host(&admitted.user, host)?;
        }
        let whole = format!("{}/data/{key}", keys.admission());
        let guard = Some((whole.as_str(), modified));
        // A controller has no right to what another host writes; etcd's root has.
        for of_host in keys.of_host(host) {
            if !part(&self.file.as_root(), &of_host, guard)?.delete_all()? {
                return Ok(false);
            }
        }
        Controller::release(&self.file, host, guard)?;
        places::release(&self.file, host, guard)?;
        let writes = vec![Write { key: key.clone(), value: None, lease: None }];
        let done = self.store.commit(&Transaction { compares: vec![compare(&key, Some(modified))], writes })?;
        Ok(matches!(done, Committed::Done(_)))
    }

    fn welcome(&self, bearer: &Bearer<'_>, admitted: &Admitted, is_controller: bool) -> Result<Welcome, ClusterError> {
        if let Some(rights) = &self.rights {
            rights.give_host(&admitted.user, bearer.host, is_controller)?;
            // Another controller may have taken the user away meanwhile, and now it is there again, for whoever has a
            // certificate of that name.
            let (there, _) = read::<Admitted>(&self.store, &format!("{HOSTS}{}", bearer.host))?;
            if there.is_none_or(|there| there.is_removed || there.user != admitted.user) {
                rights.take_host(&admitted.user, bearer.host)?;
                return Err(refused(format!("an operator has removed the host {} just now", bearer.host)));
            }
        }
        self.certified(bearer, admitted)
    }

    /// Addresses of the network `default`.
    fn pool(&self) -> Result<(Pool, String), ClusterError> {
        let pool = self.view.identity()?.pool.clone().unwrap_or_else(|| DEFAULT_POOL.into());
        let damaged = |_| ClusterError::Damaged(format!("the cluster's addresses of default, {pool:?}, are no range"));
        Ok((pool.parse().map_err(damaged)?, pool))
    }

    fn certified(&self, bearer: &Bearer<'_>, admitted: &Admitted) -> Result<Welcome, ClusterError> {
        check_user(&admitted.user, bearer.host)?;
        let (parsed, pool) = self.pool()?;
        let range = Controller::give_default(&self.file, self.view, parsed, bearer.host)?;
        let expires_s = now_s() + HOST_S;
        let key = public_key(bearer.public_key).ok_or_else(|| refused("its public key is none".into()))?;
        let certificate =
            self.authority.as_ref().map(|authority| authority.client(&admitted.user, &key, expires_s)).transpose()?;
        Ok(Welcome { certificate, expires_s, pool, range: range.to_string() })
    }
}

/// A refusal is an answer; all else is none.
fn outcome_of(done: Result<Welcome, ClusterError>) -> Result<Result<Welcome, String>, ClusterError> {
    match done {
        Ok(welcome) => Ok(Ok(welcome)),
        Err(ClusterError::Refused(refusal)) => Ok(Err(refusal.message)),
        Err(error) => Err(error),
    }
}

/// An error that will not pass is said, and holds up nobody else; of others the work ends, and goes on later.
fn lasting<T>(done: Result<T, ClusterError>, host: &str, said: &mut Vec<String>) -> Result<Option<T>, ClusterError> {
    match done {
        Ok(done) => Ok(Some(done)),
        Err(error @ (ClusterError::Store(_) | ClusterError::Full)) => Err(error),
        Err(error) => {
            said.push(format!("host {host} gets no answer: {error}"));
            Ok(None)
        }
    }
}

fn new_host(bearer: &Bearer<'_>) -> Result<Admitted, ClusterError> {
    Ok(Admitted {
        public_key: bearer.public_key.into(),
        user: new_user(bearer.host)?,
        token: bearer.token.map(str::to_owned),
        at_s: now_s(),
        is_removed: false,
    })
}

/// Notes that a host was removed: a controller takes its user away, and then all that it has written. `None`: it had
/// not been admitted.
pub(crate) fn remove_host(file: &ClusterFile, host: &str) -> Result<Option<Admitted>, ClusterError> {
    let mut store = file.store(&file.keys().admission())?;
    let key = format!("{HOSTS}{host}");
    for _ in 0..ATTEMPT_COUNT {
        let (admitted, modified) = read::<Admitted>(&store, &key)?;
        let Some(admitted) = admitted else { return Ok(None) };
        let admitted = Admitted { is_removed: true, ..admitted };
        let writes = vec![write(key.clone(), &admitted)];
        let done = store.commit(&Transaction { compares: vec![compare(&key, modified)], writes })?;
        if matches!(done, Committed::Done(_)) {
            return Ok(Some(admitted));
        }
    }
    Err(busy())
}

/// Waits until a controller has taken the user of a host that was removed; whether it has.
pub(crate) fn is_taken(file: &ClusterFile, host: &str, user: &str, wait: time::Duration) -> Result<bool, ClusterError> {
    let store = file.store(&file.keys().admission())?;
    let begin = time::Instant::now();
    loop {
        let (there, _) = read::<Admitted>(&store, &format!("{HOSTS}{host}"))?;
        // Another machine may have the name by now.
        if there.is_none_or(|there| there.user != user) {
            return Ok(true);
        }
        if begin.elapsed() > wait {
            return Ok(false);
        }
        sleep(PAUSE);
    }
}

/// The token of this name, if hosts can still join by it: how many.
pub(crate) fn uses_left(file: &ClusterFile, token: &str) -> Result<Option<u32>, ClusterError> {
    let store = file.store(&file.keys().admission())?;
    let (record, _) = read::<TokenRecord>(&store, &format!("{TOKENS}{token}"))?;
    Ok(record.filter(|record| record.uses_left > 0 && record.expires_s > now_s()).map(|record| record.uses_left))
}

#[cfg(test)]
mod tests {
    use super::*;

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
