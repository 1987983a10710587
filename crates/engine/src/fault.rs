//! Why a request or a RECV fails.
use crate::Syndrome;
use freeflow_verbs::CompletionStatus;

/// What the completion of a request that failed says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub status: CompletionStatus,
    pub syndrome: Syndrome,
}

impl Fault {
    #[inline]
    pub const fn new(status: CompletionStatus, syndrome: Syndrome) -> Self {
        Self { status, syndrome }
    }
}
