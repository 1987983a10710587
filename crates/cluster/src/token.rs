//! Tokens: by one, a machine that nobody knows yet joins a cluster.
//!
//! A token holds where etcd is, by whom its members are certified, and a private key. That key proves who joins; its
//! public half alone is in etcd, so whoever reads all keys there can still join nothing.
use crate::ClusterError;
use crate::file::{ClusterFile, Wire};
use crate::keys::Keys;
use crate::records::now_s;
use crate::rights::Rights;
use crate::users::{ID_BYTES, digits, is_id, join_user};
use crate::x509::{Key, PUBLIC_KEY_BYTES, random};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use freeflow_etcd::{Endpoints, EtcdStore, Identity};
use freeflow_orchestrator::store::{Compare, Transaction, Write};
use freeflow_orchestrator::{Reason, Refusal, Revision, Store};
use serde::{Deserialize, Serialize};
use std::fs;
use std::time::Duration;

/// Before the rest of a token: which form it has.
const FORM: &str = "ff1.";
/// Longest text of a token.
pub const TOKEN_BYTES_MAX: u64 = 64 << 10;
/// Uses of one token.
pub const USE_COUNT_MAX: u32 = 256;
/// Longest time for which one is good.
pub const TOKEN_TIME_MAX: Duration = Duration::from_secs(30 * 86_400);
/// A request, or an answer, that nobody fetches goes after this.
pub(crate) const MESSAGE_S: u64 = 600;
/// A token is shown for so long after its end.
const SHOWN_S: u64 = 7 * 86_400;
pub(crate) const TOKENS: &str = "tokens/";
pub(crate) const HOSTS: &str = "hosts/";

/// A token, as its bearer has it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// Which one it is.
    pub id: String,
    /// `https://ADDRESS:PORT` of each member.
    pub etcd: Vec<String>,
    /// The authority's certificate (PEM), which signs etcd's members and the answers; none: an etcd without TLS.
    pub cacert: Option<String>,
    /// Before all keys of the cluster.
    pub root: String,
    /// Of packets between the hosts.
    pub wire: Wire,
    /// Seconds of Unix time.
    pub expires_s: u64,
    key: String,
    cert: Option<String>,
}

/// A token, as etcd has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    pub(crate) public_key: String,
    /// Hosts that can still join by it.
    pub uses_left: u32,
    /// Seconds of Unix time.
    pub expires_s: u64,
    /// Names of the hosts that have joined by it.
    pub used_by: Vec<String>,
    /// Since when no host can join by it, because all uses are taken; 0: there are some.
    #[serde(default)]
    pub(crate) used_up_s: u64,
}

impl TokenRecord {
    /// Whether its bearer has nothing to do in etcd any more. The last host that has joined by it may still ask for an
    /// answer that it has lost.
    pub(crate) fn is_over(&self, now_s: u64) -> bool {
        let is_used_up = self.uses_left == 0 && self.used_up_s + MESSAGE_S <= now_s;
        is_used_up || self.expires_s <= now_s
    }
}

/// A host that was admitted: its name is that of this key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Admitted {
    pub public_key: String,
    /// Its user, and role, in etcd. Another one each time: certificates of a host that was removed are nobody's.
    pub user: String,
    /// By which token; none: a controller by its own keys.
    pub token: Option<String>,
    pub at_s: u64,
    /// An operator has removed it: its user is to be deleted, then this.
    #[serde(default)]
    pub is_removed: bool,
}

/// For what may be done by it.
#[derive(Clone, Copy, Debug)]
pub struct TokenTerms {
    /// Hosts that can join by it.
    pub uses: u32,
    /// From now on.
    pub lasts: Duration,
}

fn refused(reason: Reason, text: impl Into<String>) -> ClusterError {
    Refusal::new(reason, text).into()
}

/// Bytes of a public key, from its text.
pub(crate) fn public_key(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok().filter(|bytes| bytes.len() == PUBLIC_KEY_BYTES)
}

pub(crate) fn public_text(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "token {}", self.id)
    }
}

impl Token {
    /// One line of text: the form, then JSON in base64.
    pub fn to_text(&self) -> String {
        format!("{FORM}{}", URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).expect("a token is encodable")))
    }

    /// # Errors
    /// `Refused`: it is no token, or a newer release's.
    pub fn parse(text: &str) -> Result<Self, ClusterError> {
        let text = text.trim_ascii();
        let bad = |why: &str| refused(Reason::Invalid, format!("it is no token that can be read: {why}"));
        let rest = text.strip_prefix(FORM).ok_or_else(|| match text.starts_with("ff") {
            true => bad("it is of another release, or cut off"),
            false => bad(&format!("a token begins with {FORM}")),
        })?;
        let bytes = URL_SAFE_NO_PAD.decode(rest).map_err(|_| bad("a part of it is missing or changed"))?;
        let token: Self = serde_json::from_slice(&bytes).map_err(|_| bad("a part of it is missing or changed"))?;
        token.signing()?;
        match is_id(&token.id) && token.root.starts_with('/') && token.cacert.is_some() == token.cert.is_some() {
            true => Ok(token),
            false => Err(bad("what it says makes no sense")),
        }
    }

    pub(crate) fn signing(&self) -> Result<Key, ClusterError> {
        Key::from_pem(&self.key)
    }

    /// The part of etcd that its bearer may write.
    pub(crate) fn store(&self) -> Result<EtcdStore, ClusterError> {
        let file = |error: freeflow_etcd::EtcdError| ClusterError::File(format!("the token: {error}"));
        let mut endpoints = Endpoints::parse(&self.etcd.join(",")).map_err(file)?;
        if let (Some(authority), Some(cert)) = (&self.cacert, &self.cert) {
            let identity = Identity { certificate: cert.clone().into_bytes(), key: self.key.clone().into_bytes() };
            endpoints = endpoints.authority(authority.clone().into_bytes()).identity(identity);
        }
        Ok(EtcdStore::new(&endpoints, &Keys::new(&self.root).requests_by(&self.id))?)
    }
}

/// Makes and ends tokens.
pub struct Tokens {
    file: ClusterFile,
    store: EtcdStore,
}

impl Tokens {
    /// Of a cluster that there is.
    ///
    /// # Errors
    /// The file names keys that can't be read.
    pub fn open(file: &ClusterFile) -> Result<Self, ClusterError> {
        let file = file.as_own();
        Ok(Self { store: file.store(&file.keys().admission())?, file })
    }

    /// A new one.
    ///
    /// # Errors
    /// `File`: it has no authority, though etcd has TLS. etcd did not do it.
    pub fn create(&mut self, terms: TokenTerms) -> Result<Token, ClusterError> {
        let authority = crate::authority::of_file(&self.file)?;
        if authority.is_none() && self.file.cacert.is_some() {
            return Err(ClusterError::File(
                "the cluster file names no authority, whose key a token needs: use --cluster controller.json, or a \
                 controller"
                    .into(),
            ));
        }
        let (key, now) = (Key::generate()?, now_s());
        let expires_s = now + terms.lasts.min(TOKEN_TIME_MAX).as_secs();
        let cacert = match (&authority, &self.file.cacert) {
            (Some(_), Some(path)) => Some(
                fs::read_to_string(path).map_err(|error| ClusterError::File(format!("{}: {error}", path.display())))?,
            ),
            _ => None,
        };
        let id = digits(&random::<ID_BYTES>()?);
        let cert = authority.map(|authority| authority.client(&join_user(&id), key.public(), expires_s)).transpose()?;
        let token = Token {
            id,
            etcd: self.file.etcd.clone(),
            cacert,
            root: self.file.root.clone(),
            wire: self.file.wire,
            expires_s,
            key: key.pem(),
            cert,
        };
        let uses_left = terms.uses.clamp(1, USE_COUNT_MAX);
        let public_key = public_text(key.public());
        let record = TokenRecord { public_key, uses_left, expires_s, used_by: Vec::new(), used_up_s: 0 };
        let mut writes = vec![write(format!("{TOKENS}{}", token.id), &record)];
        let old = self.list()?.into_iter().filter(|(_, record)| record.expires_s + SHOWN_S < now).take(64);
        writes.extend(old.map(|(id, _)| Write { key: format!("{TOKENS}{id}"), value: None, lease: None }));
        self.store.commit(&Transaction { compares: Vec::new(), writes })?;
        // Not earlier: a user of a token that is not there is taken away.
        self.rights()?.map(|rights| rights.give_token(&token.id)).transpose()?;
        Ok(token)
    }

    /// All of them by name; also those that are used up, or have expired not long ago.
    ///
    /// # Errors
    /// etcd does not answer.
    pub fn list(&self) -> Result<Vec<(String, TokenRecord)>, ClusterError> {
        let entries = self.store.list(TOKENS, None)?.entries.into_iter();
        let read = |entry: freeflow_orchestrator::store::Entry| {
            Some((entry.key.strip_prefix(TOKENS)?.to_owned(), serde_json::from_slice(&entry.value).ok()?))
        };
        Ok(entries.filter_map(read).collect())
    }

    /// Nobody joins by it any more; who has joined stays.
    ///
    /// # Errors
    /// `Refused`: there is none. etcd did not do it.
    pub fn revoke(&mut self, id: &str) -> Result<(), ClusterError> {
        let key = format!("{TOKENS}{id}");
        if self.store.get(&key, None)?.is_none() {
            let text = format!("there is no token {id}: see freeflow cluster token list");
            return Err(refused(Reason::NotFound, text));
        }
        let writes = vec![Write { key, value: None, lease: None }];
        self.store.commit(&Transaction { compares: Vec::new(), writes })?;
        // Where nobody here may do it, a controller does, soon.
        self.rights()?.map(|rights| rights.take_token(id)).transpose()?;
        Ok(())
    }

    fn rights(&self) -> Result<Option<Rights>, ClusterError> {
        self.file.authority.is_some().then(|| Rights::open(&self.file)).transpose()
    }
}

/// Of a value that is JSON.
pub(crate) fn write(key: String, value: &impl Serialize) -> Write {
    Write { key, value: Some(serde_json::to_vec(value).expect("it is encodable")), lease: None }
}

/// A value that is JSON, and when it was written; nothing makes sense where nothing can be read.
pub(crate) fn read<T: serde::de::DeserializeOwned>(
    store: &EtcdStore,
    key: &str,
) -> Result<(Option<T>, Option<Revision>), ClusterError> {
    let Some(entry) = store.get(key, None)? else { return Ok((None, None)) };
    let damaged = |error| ClusterError::Damaged(format!("{key}, in etcd: {error}"));
    Ok((Some(serde_json::from_slice(&entry.value).map_err(damaged)?), Some(entry.modified)))
}

/// As it was read.
pub(crate) fn compare(key: &str, modified: Option<Revision>) -> Compare {
    Compare { key: key.into(), modified }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// One of an etcd without TLS.
    pub fn token() -> Token {
        Token {
            id: digits(&random::<ID_BYTES>().expect("random")),
            etcd: vec!["http://192.0.2.1:2379".into()],
            cacert: None,
            root: "/freeflow".into(),
            wire: Wire::Sealed,
            expires_s: 1_900_000_000,
            key: Key::generate().expect("a key").pem(),
            cert: None,
        }
    }

    pub fn record_of(token: &Token, uses_left: u32) -> TokenRecord {
        let public_key = public_text(token.signing().expect("a key").public());
        TokenRecord { public_key, uses_left, expires_s: token.expires_s, used_by: Vec::new(), used_up_s: 0 }
    }

    fn text_of(value: &serde_json::Value) -> String {
        format!("{FORM}{}", URL_SAFE_NO_PAD.encode(value.to_string()))
    }

    #[test]
    fn a_token_is_a_line_of_text() {
        let token = token();
        let text = token.to_text();
        assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)));
        assert!(Token::parse(&format!(" {text}\n")).expect("the same") == token);
        assert!(!format!("{token:?}").contains("PRIVATE"), "a log would have the key");
        let fields = serde_json::to_value(&token).expect("fields");
        let with = |field: &str, value: serde_json::Value| {
            let mut fields = fields.clone();
            fields[field] = value;
            text_of(&fields)
        };
        assert!(Token::parse(&text_of(&fields)).is_ok());
        for (bad, word) in [
            (String::new(), "begins with ff1."),
            (text[FORM.len()..].to_owned(), "begins with"),
            (format!("ff2.{}", &text[FORM.len()..]), "another release"),
            (text[..text.len() / 2].to_owned(), "missing or changed"),
            (text.replace('e', "%"), "missing or changed"),
            (text_of(&serde_json::json!({})), "missing or changed"),
            (with("key", "none".into()), "private key"),
            (with("id", "../../x".into()), "no sense"),
            (with("root", "freeflow".into()), "no sense"),
            (with("cert", "a certificate without an authority".into()), "no sense"),
        ] {
            let error = Token::parse(&bad).expect_err(word).to_string();
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}
