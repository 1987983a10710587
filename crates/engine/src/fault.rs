//! Why a request or a RECV fails.
use crate::Syndrome;
use freeflow_verbs::CompletionStatus;

/// Content of the completion of a failed request.
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
