//! Why etcd did not do it.
use freeflow_orchestrator::store::StoreError;
use std::error::Error;
use std::iter;
use tonic::{Code, Status};

/// Result of a call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EtcdError {
    /// No member took the call: nothing was done.
    #[error("etcd can't be reached: {0}")]
    Unreachable(String),
    /// The call may have been done, or be done later.
    #[error("etcd did not answer: {0}")]
    Unanswered(String),
    /// The identity may not do that.
    #[error("etcd refused: {0}")]
    Denied(String),
    /// The revision is compacted away.
    #[error("the revision is compacted away")]
    Compacted,
    /// The revision is still to come.
    #[error("the revision is still to come")]
    Future,
    /// The lease has ended, or never was.
    #[error("no such lease")]
    NoLease,
    /// etcd's quota is used up: it takes reads and deletions only, until somebody has compacted and defragmented it and
    /// disarmed the alarm.
    #[error("etcd has no space left (NOSPACE)")]
    Full,
    /// More operations, or bytes, than etcd takes at once.
    #[error("etcd takes no more at once: {0}")]
    TooLarge(String),
    /// The arguments make no sense: an address, a certificate.
    #[error("{0}")]
    Invalid(String),
    /// Anything else that it answered; nothing was done.
    #[error("etcd: {0}")]
    Other(String),
}

impl EtcdError {
    /// By the text where there is no code of its own: etcd's texts are constants of its interface
    /// (`rpctypes/error.go`).
    pub(crate) fn of(status: &Status) -> Self {
        let text = status.message();
        let says = |words: &str| text.contains(words);
        match status.code() {
            _ if says("has been compacted") => Self::Compacted,
            _ if says("is a future revision") => Self::Future,
            _ if says("requested lease not found") => Self::NoLease,
            _ if says("database space exceeded") => Self::Full,
            // Rights were changed meanwhile, and nothing was done.
            _ if says("revision of auth store is old") || says("auth: revision in header is old") => {
                Self::Unreachable(text.into())
            }
            _ if ["too many operations", "request is too large", "larger than max"].iter().any(|words| says(words)) => {
                Self::TooLarge(text.into())
            }
            // Made by the transport, whatever its code says: etcd's own answers have no cause.
            _ if Error::source(status).is_some() && !was_never_sent(status) => Self::Unanswered(words(status)),
            Code::PermissionDenied | Code::Unauthenticated => Self::Denied(text.into()),
            // Before etcd has looked at it.
            Code::Unavailable if was_never_sent(status) => Self::Unreachable(words(status)),
            Code::ResourceExhausted if says("too many requests") => Self::Unreachable(text.into()),
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::Internal => {
                Self::Unanswered(words(status))
            }
            _ => Self::Other(text.into()),
        }
    }

    /// Of a call that writes nothing: that no answer came leaves nothing open.
    pub(crate) fn of_read(self) -> StoreError {
        match self {
            Self::Unanswered(_) => StoreError::Broken(self.to_string()),
            other => other.into(),
        }
    }

    /// Whether another member, or a later time, may do better.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::Unanswered(_))
    }
}

/// The causes of a status, the nearest first.
fn causes(status: &Status) -> impl Iterator<Item = &(dyn Error + 'static)> {
    iter::successors(Error::source(status), |&cause| cause.source())
}

/// The connection was never made.
fn was_never_sent(status: &Status) -> bool {
    causes(status).any(|error| error.to_string().contains("connect error") || error.is::<tonic::ConnectError>())
}

/// The status' own words, and those of its causes.
fn words(status: &Status) -> String {
    causes(status).map(ToString::to_string).fold(status.message().to_owned(), |text, words| {
        if text.contains(&words) { text } else { format!("{text}: {words}") }
    })
}

impl From<EtcdError> for StoreError {
    fn from(error: EtcdError) -> Self {
        match error {
            EtcdError::NoLease => Self::NoLease,
            EtcdError::Full => Self::Full,
            EtcdError::Unanswered(_) => Self::Unknown(error.to_string()),
            EtcdError::TooLarge(_) => Self::TooLarge(error.to_string()),
            _ => Self::Broken(error.to_string()),
        }
    }
}
