//! The words of a host that joins and of the controller that answers, and the decision whether it may.
//!
//! A request is signed by the token's key, an answer by the authority's. So nobody who merely writes the same keys in
//! etcd can change either, and an answer is good for its request alone.
use crate::ClusterError;
use crate::authority::Authority;
use crate::records::is_host_name;
use crate::token::{Admitted, Token, TokenRecord, public_key, public_text};
use crate::users::digits;
use crate::x509::{is_signed, random};
use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use freeflow_orchestrator::{Reason, Refusal};
use serde::{Deserialize, Serialize};

/// Longest request, and answer, as they are in etcd.
pub(crate) const MESSAGE_BYTES_MAX: usize = 8 << 10;
/// Clocks of host and controller are apart at most so far; nor is an older request answered.
const CLOCKS_S: u64 = 600;

const REQUEST: &str = "freeflow join request 1";
const ANSWER: &str = "freeflow join answer 1";

/// Text, and who has signed it.
#[derive(Serialize, Deserialize)]
struct Signed {
    body: String,
    /// None: of a cluster without an authority.
    signature: Option<String>,
}

/// A host that wants to join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    pub host: String,
    /// Of the key that its certificate is to be for.
    pub public_key: String,
    /// Drawn each time.
    pub nonce: String,
    pub at_s: u64,
}

/// A host is admitted, and gets this.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Its certificate (PEM); none: of an etcd without TLS.
    pub certificate: Option<String>,
    /// When that ends.
    pub expires_s: u64,
    /// Addresses of the network `default`, and the part of it that this host gives out.
    pub pool: String,
    /// The part that this host gives out.
    pub range: String,
}

#[derive(Serialize, Deserialize)]
struct Answer {
    /// Digest of the request that it is for.
    request: String,
    welcome: Option<Welcome>,
    why_not: Option<String>,
}

/// All that a signature is over, so that no two meanings have the same bytes.
fn signed_bytes(purpose: &str, token: &str, body: &str) -> Vec<u8> {
    format!("{purpose}\n{token}\n{body}").into_bytes()
}

fn digest_of(bytes: &[u8]) -> String {
    digits(digest(&SHA256, bytes).as_ref())
}

fn encoded(signed: &Signed) -> Vec<u8> {
    serde_json::to_vec(signed).expect("texts are encodable")
}

impl Request {
    pub fn new(host: &str, public: &[u8], now_s: u64) -> Result<Self, ClusterError> {
        let nonce = digits(&random::<16>()?);
        Ok(Self { host: host.into(), public_key: public_text(public), nonce, at_s: now_s })
    }

    /// As it is in etcd.
    pub fn sign(&self, token: &Token) -> Result<Vec<u8>, ClusterError> {
        let body = serde_json::to_string(self).expect("a request is encodable");
        let signature = token.signing()?.sign(&signed_bytes(REQUEST, &token.id, &body))?;
        Ok(encoded(&Signed { body, signature: Some(STANDARD.encode(signature)) }))
    }

    /// From etcd, where strangers write: by the key of the token, whose name and host are those of the place.
    pub fn read(bytes: &[u8], token: (&str, &TokenRecord), host: &str) -> Result<Self, String> {
        let bad = || "the request makes no sense: is the host's release another one?".to_owned();
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(bad());
        }
        let signed: Signed = serde_json::from_slice(bytes).map_err(|_| bad())?;
        let (id, record) = token;
        let signature = signed.signature.as_deref().and_then(|text| STANDARD.decode(text).ok());
        let key = public_key(&record.public_key).zip(signature);
        let is_genuine =
            key.is_some_and(|(key, signature)| is_signed(&key, &signed_bytes(REQUEST, id, &signed.body), &signature));
        if !is_genuine {
            return Err("the request is not signed by the token's key".into());
        }
        let request: Self = serde_json::from_str(&signed.body).map_err(|_| bad())?;
        if request.host != host || !is_host_name(host) || public_key(&request.public_key).is_none() {
            return Err(bad());
        }
        Ok(request)
    }

    /// From the part of etcd that only the host itself can write.
    pub fn read_own(bytes: &[u8], host: &str) -> Result<Self, String> {
        let request: Option<Self> = serde_json::from_slice(bytes).ok();
        request.filter(|request| request.host == host).ok_or_else(|| "the request makes no sense".into())
    }
}

/// Whether it says that it is the answer to this request, whoever wrote it.
pub(crate) fn is_answer_to(bytes: &[u8], request: &[u8]) -> bool {
    let signed: Option<Signed> = serde_json::from_slice(bytes).ok();
    let answer: Option<Answer> = signed.and_then(|signed| serde_json::from_str(&signed.body).ok());
    answer.is_some_and(|answer| answer.request == digest_of(request))
}

/// An answer to a request, as it is in etcd.
pub(crate) fn answer(
    authority: Option<&Authority>,
    token: &str,
    request: &[u8],
    outcome: Result<Welcome, String>,
) -> Result<Vec<u8>, ClusterError> {
    let (welcome, why_not) = match outcome {
        Ok(welcome) => (Some(welcome), None),
        Err(why) => (None, Some(why)),
    };
    let body = Answer { request: digest_of(request), welcome, why_not };
    let body = serde_json::to_string(&body).expect("an answer is encodable");
    let signature = match authority {
        Some(authority) => Some(STANDARD.encode(authority.sign(&signed_bytes(ANSWER, token, &body))?)),
        None => None,
    };
    Ok(encoded(&Signed { body, signature }))
}

/// The answer to a request, by the key of the authority, if there is one. `None`: it is none to this request, or
/// somebody else's: who waits goes on waiting.
pub(crate) fn read_answer(
    bytes: &[u8],
    authority: Option<&[u8]>,
    token: &str,
    request: &[u8],
) -> Option<Result<Welcome, String>> {
    let signed: Signed = serde_json::from_slice(bytes).ok()?;
    if let Some(key) = authority {
        let signature = STANDARD.decode(signed.signature.as_deref()?).ok()?;
        if !is_signed(key, &signed_bytes(ANSWER, token, &signed.body), &signature) {
            return None;
        }
    }
    let answer: Answer = serde_json::from_str(&signed.body).ok()?;
    if answer.request != digest_of(request) {
        return None;
    }
    match (answer.welcome, answer.why_not) {
        (Some(welcome), None) => Some(Ok(welcome)),
        (None, Some(why)) => Some(Err(why)),
        _ => None,
    }
}

/// A host may join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// For the first time: the token is then so.
    New(TokenRecord),
    /// It is in already, with this key.
    Known,
}

/// All of which a decision is made.
pub(crate) struct Case<'a> {
    pub request: &'a Request,
    pub token: &'a TokenRecord,
    /// The one that has the name, if it was admitted.
    pub there: Option<&'a Admitted>,
    /// A host speaks under the name, whoever let it in.
    pub is_recorded: bool,
    pub now_s: u64,
}

pub(crate) fn name_is_taken(host: &str) -> String {
    format!(
        "the cluster has a host {host} with another key: choose another --host; or, if this is that machine and its \
         key is lost, an operator says: freeflow cluster remove {host}"
    )
}

/// Whether the host may join, and at what price; else why not.
pub(crate) fn decide(case: &Case<'_>) -> Result<Decision, String> {
    let Case { request, token, there, is_recorded, now_s } = *case;
    if token.expires_s <= now_s {
        return Err("the token has expired: make another one with freeflow cluster token create".into());
    }
    if request.at_s.abs_diff(now_s) > CLOCKS_S {
        return Err(format!(
            "the clock of the host is {} s {} that of the controller, {CLOCKS_S} s are allowed: set it",
            request.at_s.abs_diff(now_s),
            if request.at_s > now_s { "ahead of" } else { "behind" }
        ));
    }
    match there {
        Some(there) if there.public_key == request.public_key && !there.is_removed => return Ok(Decision::Known),
        Some(_) => return Err(name_is_taken(&request.host)),
        None if is_recorded => return Err(name_is_taken(&request.host)),
        None => {}
    }
    let uses_left = token.uses_left.checked_sub(1).ok_or_else(|| {
        format!(
            "the token is used up, by {}: make another one with freeflow cluster token create",
            token.used_by.join(", ")
        )
    })?;
    let used_by = token.used_by.iter().cloned().chain([request.host.clone()]).collect();
    let used_up_s = if uses_left == 0 { now_s } else { 0 };
    Ok(Decision::New(TokenRecord { uses_left, used_by, used_up_s, ..token.clone() }))
}

/// The refusal of a token that is not in etcd.
pub(crate) fn no_token(id: &str) -> String {
    format!("the cluster has no token {id}: it was revoked, or its cluster is no more")
}

/// A refusal, for the caller.
pub(crate) fn refused(why: String) -> ClusterError {
    Refusal::new(Reason::Forbidden, why).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::tests::{record_of, token};

    const NOW_S: u64 = 1_800_000_000;

    fn request(host: &str) -> Request {
        let key = crate::x509::Key::generate().expect("a key");
        Request::new(host, key.public(), NOW_S).expect("a request")
    }

    fn admitted(request: &Request) -> Admitted {
        let (public_key, user) = (request.public_key.clone(), "host-h1-00".into());
        Admitted { public_key, user, token: None, at_s: NOW_S, is_removed: false }
    }

    #[test]
    fn a_request_is_its_tokens_and_its_places() {
        let (own, other, request) = (token(), token(), request("h1"));
        let bytes = request.sign(&own).expect("signed");
        let read =
            |bytes: &[u8], id: &str, token: &Token, host: &str| Request::read(bytes, (id, &record_of(token, 1)), host);
        assert_eq!(read(&bytes, &own.id, &own, "h1"), Ok(request.clone()));
        // By another token's key, or for another token or host.
        assert!(read(&bytes, &own.id, &other, "h1").is_err_and(|why| why.contains("not signed")));
        assert!(read(&bytes, &other.id, &own, "h1").is_err_and(|why| why.contains("not signed")));
        assert!(read(&bytes, &own.id, &own, "h2").is_err());
        // With one letter changed, cut off, too long, or none at all.
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] = changed[at].wrapping_add(1);
            assert!(read(&changed, &own.id, &own, "h1").is_err(), "byte {at}");
        }
        let long = [&bytes[..], &[b' '; MESSAGE_BYTES_MAX]].concat();
        for bad in [&bytes[1..], &bytes[..bytes.len() - 1], &long, b"", b"{}", b"null"] {
            assert!(read(bad, &own.id, &own, "h1").is_err());
        }
        // Names that are no host's, though the bearer of the token signs them.
        for bad in ["../h1", "", "h 1"] {
            let bytes = Request { host: bad.into(), ..request.clone() }.sign(&own).expect("signed");
            assert!(read(&bytes, &own.id, &own, bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_answer_is_the_authoritys_and_its_requests() {
        let directory = crate::authority::tests::directory();
        let open = |name: &str| {
            let path = directory.0.join(name);
            Authority::open(&path.join("ca.pem"), &path.join("ca.key")).expect("an authority")
        };
        let (authority, other) = (open("one"), open("other"));
        let key = |name: &str| {
            let pem = std::fs::read_to_string(directory.0.join(name).join("ca.pem")).expect("read");
            crate::x509::Issuer::of_pem(&pem).expect("an authority").public_key
        };
        let welcome =
            Welcome { certificate: None, expires_s: 1, pool: "10.0.0.0/8".into(), range: "10.1.0.0/24".into() };
        let bytes = answer(Some(&authority), "t", b"request", Ok(welcome.clone())).expect("an answer");
        let read = |bytes: &[u8], token: &str, request: &[u8]| read_answer(bytes, Some(&key("one")), token, request);
        assert_eq!(read(&bytes, "t", b"request"), Some(Ok(welcome.clone())));
        assert!(is_answer_to(&bytes, b"request") && !is_answer_to(&bytes, b"another"));
        // Of another request, token or authority, changed, or by nobody.
        assert_eq!(read(&bytes, "t", b"another"), None);
        assert_eq!(read(&bytes, "u", b"request"), None);
        let forged = answer(Some(&other), "t", b"request", Ok(welcome.clone())).expect("an answer");
        assert_eq!(read(&forged, "t", b"request"), None);
        let changed = String::from_utf8(bytes).expect("text").replace("10.1.0.0", "10.2.0.0");
        assert_eq!(read(changed.as_bytes(), "t", b"request"), None);
        let nobodys = answer(None, "t", b"request", Ok(welcome.clone())).expect("an answer");
        assert_eq!(read(&nobodys, "t", b"request"), None);
        // Without an authority there is nobody to sign.
        assert_eq!(read_answer(&nobodys, None, "t", b"request"), Some(Ok(welcome)));
        let no = answer(Some(&authority), "t", b"request", Err("no".into())).expect("an answer");
        assert_eq!(read(&no, "t", b"request"), Some(Err("no".into())));
    }

    #[test]
    fn a_host_joins_once_and_by_a_token_that_is_good() {
        let (token, request) = (record_of(&token(), 2), request("h1"));
        let case =
            |token, there, is_recorded, now_s| decide(&Case { request: &request, token, there, is_recorded, now_s });
        let Ok(Decision::New(after)) = case(&token, None, false, NOW_S) else { panic!("it may join") };
        assert_eq!((after.uses_left, after.used_by.as_slice()), (1, &["h1".to_owned()][..]));
        assert_eq!((&after.public_key, after.expires_s), (&token.public_key, token.expires_s));
        // Again, also by a token that is used up since: it was let in, and has lost the answer.
        let (own, used_up) = (admitted(&request), TokenRecord { uses_left: 0, ..token.clone() });
        assert_eq!(case(&used_up, Some(&own), true, NOW_S), Ok(Decision::Known));
        let removed = Admitted { is_removed: true, ..own.clone() };
        let other = Admitted { public_key: "another".into(), ..own.clone() };
        let old = TokenRecord { expires_s: NOW_S, ..token.clone() };
        for (token, there, is_recorded, now_s, word) in [
            (&used_up, None, false, NOW_S, "used up"),
            (&old, None, false, NOW_S, "expired"),
            (&token, Some(&other), true, NOW_S, "another key"),
            (&token, Some(&removed), false, NOW_S, "another key"),
            (&token, None, true, NOW_S, "another key"),
            (&token, None, false, NOW_S + CLOCKS_S + 1, "behind"),
            (&token, None, false, NOW_S - CLOCKS_S - 1, "ahead of"),
        ] {
            let why = case(token, there, is_recorded, now_s).expect_err(word);
            assert!(why.contains(word), "{word}: {why}");
        }
    }
}
