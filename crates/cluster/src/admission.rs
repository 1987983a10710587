//! Controllers admit hosts: each use of a token is taken in the transaction that notes the host, so that two
//! controllers at once let in nobody whom one would not. All that follows, the user in etcd, its rights, the block of
//! addresses and the certificate, may be done twice.
use crate::ClusterError;
use crate::authority::{Authority, HOST_S, of_file};
use crate::blocks::Controller;
use crate::file::ClusterFile;
use crate::joining::{
    Case, Decision, Request, Welcome, answer, decide, is_answer_to, name_is_taken, no_token, refused,
};
use crate::pending::{Pending, RENEWAL};
use crate::places;
use crate::records::now_s;
use crate::rights::Rights;
use crate::token::{Admitted, HOSTS, MESSAGE_S, TOKENS, TokenRecord, compare, public_key, read, write};
use crate::turns::{busy, part};
use crate::users::{check_user, host_of_user, is_user_of, new_user, token_of_user};
use crate::view::View;
use freeflow_etcd::EtcdStore;
use freeflow_orchestrator::store::{Committed, Entry, Transaction, Write};
use freeflow_orchestrator::{DEFAULT_NETWORK, Pool, Revision, Store};
use freeflow_verbs::{Duration, Instant};
use std::collections::btree_map::Entry as MapEntry;
use std::collections::{BTreeMap, BTreeSet};
use std::thread::sleep;
use std::time;

/// Requests that are answered in one go: a host's own business goes on meanwhile.
const ANSWER_COUNT: usize = 32;
/// Others may change the same keys at the same time: so often it is begun again.
const ATTEMPT_COUNT: usize = 8;
/// Between two looks whether a host is gone.
const PAUSE: time::Duration = time::Duration::from_millis(200);
/// An answer that nobody fetches goes after this.
pub(crate) const MESSAGE_TIME: Duration = Duration(MESSAGE_S * 1_000_000_000);
/// Addresses of the network `default`, unless the cluster was made with others.
pub const DEFAULT_POOL: &str = "10.111.0.0/16";

/// Of a request, and of its answer, in the part of a token.
pub(crate) fn request_key(host: &str) -> String {
    format!("{host}/request")
}

/// The answer to it, in the part of admission.
pub(crate) fn renewed_key(host: &str) -> String {
    format!("answers/{host}")
}

pub(crate) fn answer_key(host: &str) -> String {
    format!("{host}/answer")
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

    /// Takes away the users of tokens by which nobody joins any more, and users and blocks of hosts that are none, now
    /// and then: a line for the log about each.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn sweep(&self, pending: &Pending) -> Result<Vec<String>, ClusterError> {
        let (mut said, mut failed) = (Vec::new(), None);
        match self.sweep_blocks() {
            Ok(texts) => said.extend(texts),
            Err(error) => failed = Some(error),
        }
        let Some(rights) = &self.rights else { return failed.map_or(Ok(said), Err) };
        // Users first: each was made after its token, or after its host was noted.
        let users = rights.users()?;
        for (user, host) in users.iter().filter_map(|user| Some((user, host_of_user(user)?))) {
            if pending.users.get(host) == Some(user) {
                continue;
            }
            // A controller has died between two steps, or news of the host are still to come.
            let take = || -> Result<bool, ClusterError> {
                let (admitted, _) = read::<Admitted>(&self.store, &format!("{HOSTS}{host}"))?;
                let is_over = admitted.is_none_or(|admitted| admitted.user != *user) && rights.is_own_host(user)?;
                if is_over {
                    rights.take_host(user, host)?;
                }
                Ok(is_over)
            };
            match take() {
                Ok(true) => said.push(format!("the user {user} in etcd is no host's: it is gone")),
                Ok(false) => {}
                Err(error) => failed = Some(error),
            }
        }
        for id in users.iter().filter_map(|user| token_of_user(user)).map(str::to_owned) {
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

    /// Blocks of `default` of hosts that are none are free again: a controller that admits a host while another one
    /// finishes its removal gives it a block after that.
    fn sweep_blocks(&self) -> Result<Vec<String>, ClusterError> {
        let of_default = self.view.blocks().keys().filter(|(network, _)| network == DEFAULT_NETWORK);
        let mut said = Vec::new();
        for (_, host) in of_default.filter(|(_, host)| !self.view.hosts().contains_key(host)) {
            let key = format!("{HOSTS}{host}");
            if read::<Admitted>(&self.store, &key)?.1.is_some() {
                continue;
            }
            // As long as nobody admits a host of this name.
            let whole = format!("{}/data/{key}", self.file.keys().admission());
            let guard = Some((whole.as_str(), Revision(0)));
            if Controller::release(&self.file, host, guard)? > 0 {
                said.push(format!("the addresses of {host}, which is no host, are free again"));
            }
        }
        Ok(said)
    }

    /// Does what waits, a bounded part of it: a line for the log about each, and why it ended early, if it did. Then
    /// the rest waits on.
    /// `controller`: this host's name, by which several share what waits.
    pub fn run(&mut self, pending: &mut Pending, controller: &str) -> (Vec<String>, Option<ClusterError>) {
        let mut said = Vec::new();
        let done = self.run_all(pending, controller, &mut said);
        (said, done.err())
    }

    fn run_all(&mut self, pending: &mut Pending, controller: &str, said: &mut Vec<String>) -> Result<(), ClusterError> {
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
            let Some(((token, host), entry)) = pending.next(controller) else { break };
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
    /// the host has asked again; or nobody has asked, and there is nobody to answer.
    fn answer(
        &mut self,
        joins: &mut EtcdStore,
        (token, host): (&str, &str),
        entry: &Entry,
    ) -> Result<Option<Result<String, String>>, ClusterError> {
        let asked = request_key(host);
        if joins.get(&asked, None)?.is_none_or(|there| there.modified != entry.modified) {
            return Ok(None);
        }
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
