//! A host that joins, by a token or, as a controller, by its own keys.
use crate::ClusterError;
use crate::admission::{Admission, MESSAGE_TIME, answer_key, renewed_key, request_key};
use crate::authority::check_secret;
use crate::file::ClusterFile;
use crate::joining::{Request, Welcome, read_answer, refused};
use crate::operator::Operator;
use crate::pending::RENEWAL;
use crate::records::now_s;
use crate::token::Token;
use crate::users::digits;
use crate::x509::{Issuer, Key, random};
use freeflow_orchestrator::Store;
use freeflow_orchestrator::store::{StoreError, Transaction, Write};
use freeflow_verbs::Instant;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{self, Duration};

/// Between two looks for the answer.
const PAUSE: Duration = Duration::from_millis(200);
/// A request without an answer is made again after this.
const ASK_AGAIN: Duration = Duration::from_secs(3);

/// The private key of a host, by which etcd knows it; made where there is none.
pub struct HostKey(Key);

impl HostKey {
    /// From its file. Of several processes that find none, one makes it, and all have that.
    ///
    /// # Errors
    /// `File`: it can't be read or written, is something else, or others may read it.
    pub fn of(path: &Path) -> Result<Self, ClusterError> {
        let bad = |why: String| ClusterError::File(format!("{}: {why}", path.display()));
        if let Some(key) = Self::read(path)? {
            return Ok(key);
        }
        let key = Key::generate()?;
        match write_whole(path, key.pem().as_bytes()) {
            Ok(()) => Ok(Self(key)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Self::read(path)?.ok_or_else(|| bad("it was there a moment ago".into()))
            }
            Err(error) => Err(bad(error.to_string())),
        }
    }

    fn read(path: &Path) -> Result<Option<Self>, ClusterError> {
        let bad = |why: String| ClusterError::File(format!("{}: {why}", path.display()));
        match fs::read_to_string(path) {
            Ok(text) => {
                check_secret(path)?;
                Key::from_pem(&text).map(|key| Some(Self(key))).map_err(|error| bad(error.to_string()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(bad(error.to_string())),
        }
    }
}

/// A file that is not there yet, and nobody sees half of.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let digits = digits(&random::<8>().map_err(|error| io::Error::other(error.to_string()))?);
    let own = path.with_extension(format!("{digits}.new"));
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&own)?;
    let done = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::hard_link(&own, path));
    // It was made here a moment ago.
    let _ = fs::remove_file(&own);
    done
}

/// Asks to be let in, by a token, and waits for a controller's answer.
///
/// # Errors
/// `Refused`: the token is bad, a controller says no, or none has answered in this time.
pub fn join(token: &Token, host: &str, key: &HostKey, wait: Duration) -> Result<Welcome, ClusterError> {
    let now = now_s();
    if token.expires_s <= now {
        return Err(refused(format!(
            "the token has expired {} s ago, by this host's clock: an operator makes another one with freeflow cluster \
             token create",
            now - token.expires_s
        )));
    }
    let authority = match &token.cacert {
        Some(pem) => Some(Issuer::of_pem(pem).ok_or_else(|| refused("the token's authority is none".into()))?),
        None => None,
    };
    let public = authority.as_ref().map(|issuer| issuer.public_key.as_slice());
    let request = Request::new(host, key.0.public(), now)?.sign(token)?;
    let mut store = token.store()?;
    let (asked, answered) = (request_key(host), answer_key(host));
    let denied = |error: StoreError| match error {
        StoreError::Broken(why) if why.contains("permission denied") || why.contains("user name not found") => {
            refused(format!(
                "etcd lets nobody in by the token {} ({why}): it was revoked, has expired, is used up, or its cluster is no \
                 more",
                token.id
            ))
        }
        other => other.into(),
    };
    let lease = Some(store.grant(Instant(0), MESSAGE_TIME).map_err(denied)?);
    let value = Some(request.clone());
    let ask = Transaction { compares: Vec::new(), writes: vec![Write { key: asked.clone(), value, lease }] };
    store.commit(&ask).map_err(denied)?;
    let begin = time::Instant::now();
    let mut asked_at = begin;
    let outcome = loop {
        let entry = store.get(&answered, None).map_err(denied)?;
        if let Some(outcome) = entry.and_then(|entry| read_answer(&entry.value, public, &token.id, &request)) {
            break Some(outcome);
        }
        if begin.elapsed() > wait {
            break None;
        }
        if asked_at.elapsed() > ASK_AGAIN {
            // A controller that had no room for it, or has begun since and lists a bounded part, hears of it so.
            asked_at = time::Instant::now();
            // Where that fails, the next look for the answer says why.
            let _ = store.commit(&ask);
        }
        sleep(PAUSE);
    };
    // They go by themselves after some time as well.
    let delete = |key: String| Write { key, value: None, lease: None };
    let _ = store.commit(&Transaction { compares: Vec::new(), writes: vec![delete(asked), delete(answered)] });
    match outcome {
        Some(Ok(welcome)) => Ok(welcome),
        Some(Err(why)) => Err(refused(why)),
        None => Err(refused(format!(
            "no controller has answered in {} s: is one up, and follows the cluster? (freeflow cluster status; --join-time \
             waits longer)",
            wait.as_secs()
        ))),
    }
}

/// Lets a controller in, by the keys that its file names.
///
/// # Errors
/// `Refused`: the name is another host's. `Absent`: there is no cluster yet. etcd did not do it.
pub fn join_as_controller(file: &ClusterFile, host: &str, key: &HostKey) -> Result<Welcome, ClusterError> {
    let view = Operator::open(&file.as_own())?.view()?;
    Admission::open(file, &view)?.admit_controller(host, key.0.public())
}

/// Takes a step towards another certificate for a host that is in: asks for it, or looks for the answer. `None`: it is
/// still to come.
///
/// # Errors
/// `Refused`: a controller says no. etcd did not do it.
pub fn renew(file: &ClusterFile, host: &str, key: &HostKey) -> Result<Option<Welcome>, ClusterError> {
    let keys = file.keys();
    let mut own = file.store(&keys.host(host))?;
    let there = own.get(RENEWAL, None)?.map(|entry| entry.value);
    let now = now_s();
    let is_good = |bytes: &Vec<u8>| {
        Request::read_own(bytes, host).is_ok_and(|request| request.at_s.abs_diff(now) < MESSAGE_TIME.0 / 1_000_000_000)
    };
    let Some(request) = there.filter(is_good) else {
        let request = serde_json::to_vec(&Request::new(host, key.0.public(), now)?).expect("it is encodable");
        let writes = vec![Write { key: RENEWAL.into(), value: Some(request), lease: None }];
        own.commit(&Transaction { compares: Vec::new(), writes })?;
        return Ok(None);
    };
    let authority = match &file.cacert {
        Some(path) => fs::read_to_string(path).ok().and_then(|pem| Issuer::of_pem(&pem)),
        None => None,
    };
    let Some(authority) = authority else { return Err(refused("the cluster has no authority that signs".into())) };
    let answered = file.store(&keys.admission())?.get(&renewed_key(host), None)?;
    let public = Some(authority.public_key.as_slice());
    let outcome = answered.and_then(|entry| read_answer(&entry.value, public, RENEWAL, &request));
    let Some(outcome) = outcome else { return Ok(None) };
    let writes = vec![Write { key: RENEWAL.into(), value: None, lease: None }];
    own.commit(&Transaction { compares: Vec::new(), writes })?;
    outcome.map(Some).map_err(refused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn processes_that_begin_at_once_have_one_key() {
        let directory = crate::authority::tests::directory();
        let path = directory.0.join("etcd.key");
        let keys: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let make = || HostKey::of(&path).map(|key| key.0.public().to_vec());
            let all: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
            all.into_iter().map(|one| one.join().expect("it ended").expect("a key")).collect()
        });
        assert!(keys.iter().all(|key| *key == keys[0]));
        let names = fs::read_dir(&directory.0).expect("read").map(|entry| entry.expect("read").file_name());
        assert_eq!(names.filter(|name| name.to_string_lossy().contains("etcd")).count(), 1, "others are left");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("changed");
        let error = HostKey::of(&path).err().expect("refused").to_string();
        assert!(error.contains("chmod 600"), "{error}");
    }
}
