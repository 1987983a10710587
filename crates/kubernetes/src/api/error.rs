//! Why a request of the API server failed.
use serde::Deserialize;
use std::fmt;
use std::time::Duration;

/// Why there is no answer as wanted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// The kubeconfig file, the pod's service account or a name in a path can't be used.
    #[error("{0}")]
    Invalid(String),
    /// No connection: nothing was done.
    #[error("the Kubernetes API server can't be reached: {0}")]
    Unreachable(String),
    /// The request may have been done.
    #[error("the Kubernetes API server did not answer: {0}")]
    Unanswered(String),
    /// The server refused.
    #[error("{0}")]
    Refused(Box<Refusal>),
    /// An answer with more bytes than this.
    #[error("the Kubernetes API server's answer has more than {0} bytes")]
    TooLong(usize),
    /// An answer of another form, or beyond the limits.
    #[error("the Kubernetes API server's answer: {0}")]
    Malformed(String),
}

/// The server's own words: its `Status` object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Refusal {
    /// HTTP status.
    pub code: u16,
    /// One word, such as `NotFound`.
    pub reason: String,
    pub message: String,
    pub details: Details,
}

/// The fields that are wrong, and when to ask again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Details {
    pub causes: Vec<Cause>,
    pub retry_after_seconds: u64,
}

/// A field and what is wrong with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Cause {
    pub field: String,
    pub message: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.message.is_empty(), self.reason.is_empty()) {
            (false, _) => write!(out, "{}", self.message)?,
            (true, false) => write!(out, "refused: {}", self.reason)?,
            (true, true) => write!(out, "refused with HTTP status {}", self.code)?,
        }
        // A message that says it all already is not repeated.
        for cause in self.details.causes.iter().filter(|cause| !self.message.contains(&cause.message)) {
            write!(out, "; {}: {}", cause.field, cause.message)?;
        }
        Ok(())
    }
}

impl Refusal {
    /// Of an answer's body; what is no `Status` becomes one.
    pub(crate) fn of(code: u16, body: &[u8]) -> Self {
        let status: Option<Self> = serde_json::from_slice(body).ok();
        match status {
            Some(status) if status.code == code || (status.code == 0 && !status.message.is_empty()) => {
                Self { code, ..status }
            }
            _ => {
                let text = String::from_utf8_lossy(&body[..body.len().min(512)]).trim().to_string();
                let message = if text.is_empty() { String::new() } else { format!("HTTP status {code}: {text}") };
                Self { code, message, ..Self::default() }
            }
        }
    }
}

impl ApiError {
    fn code(&self) -> Option<u16> {
        match self {
            Self::Refused(refusal) => Some(refusal.code),
            _ => None,
        }
    }

    fn reason(&self) -> &str {
        match self {
            Self::Refused(refusal) => &refusal.reason,
            _ => "",
        }
    }

    /// There is nothing at the path: the object, its kind or its version is not there, or a proxy does not know it.
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    /// The server itself says that it has no such object. Without the kind or its version, or from a proxy, the answer
    /// is another 404, from which nothing about objects follows.
    pub fn is_absent(&self) -> bool {
        self.is_not_found() && self.reason() == "NotFound"
    }

    /// Somebody else has changed it since.
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409) && self.reason() != "AlreadyExists"
    }

    /// Another object has the name.
    pub fn is_already_there(&self) -> bool {
        self.code() == Some(409) && self.reason() == "AlreadyExists"
    }

    /// The resource version is too old, or the list's pages have expired.
    pub fn is_gone(&self) -> bool {
        self.code() == Some(410)
    }

    /// The service account, or the user, may not.
    pub fn is_forbidden(&self) -> bool {
        matches!(self.code(), Some(401 | 403))
    }

    /// The object itself is wrong: the same request will be refused again.
    pub fn is_invalid(&self) -> bool {
        matches!(self.code(), Some(400 | 413 | 415 | 422))
    }

    /// The server asks for a pause before the request comes again; the request was not done.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused(refusal) if refusal.code == 429 => {
                Some(Duration::from_secs(refusal.details.retry_after_seconds.max(1)))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_words_are_kept() {
        let body = br#"{"kind":"Status","code":422,"reason":"Invalid","message":"x is invalid",
            "details":{"causes":[{"field":"spec.a","message":"too long"}]}}"#;
        let error = ApiError::Refused(Box::new(Refusal::of(422, body)));
        assert_eq!(error.to_string(), "x is invalid; spec.a: too long");
        assert!(error.is_invalid() && !error.is_conflict());
        let conflict = |reason: &str| {
            let body = format!(r#"{{"code":409,"reason":"{reason}","message":"m"}}"#);
            ApiError::Refused(Box::new(Refusal::of(409, body.as_bytes())))
        };
        assert!(conflict("Conflict").is_conflict() && !conflict("Conflict").is_already_there());
        assert!(conflict("AlreadyExists").is_already_there() && !conflict("AlreadyExists").is_conflict());
    }

    #[test]
    fn a_404_that_is_not_the_servers_word_on_an_object_is_no_absence() {
        let answer = |body: &[u8]| ApiError::Refused(Box::new(Refusal::of(404, body)));
        let object = answer(br#"{"kind":"Status","code":404,"reason":"NotFound","message":"x not found"}"#);
        assert!(object.is_absent() && object.is_not_found());
        for other in [&b"404 page not found\n"[..], b"", b"<html>default backend - 404</html>", b"{}"] {
            assert!(!answer(other).is_absent() && answer(other).is_not_found());
        }
    }

    #[test]
    fn other_answers_become_a_status() {
        assert_eq!(Refusal::of(502, b"<html>bad gateway").to_string(), "HTTP status 502: <html>bad gateway");
        assert_eq!(Refusal::of(503, b"").to_string(), "refused with HTTP status 503");
        // A proxy's JSON that claims to be something else.
        assert_eq!(Refusal::of(500, br#"{"code":200,"message":"fine"}"#).code, 500);
    }
}
