//! Results of a connectivity test.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Ok,
    /// It works, and is less than it could be.
    Note,
    Failed,
    /// Not tried, because another check failed.
    Skipped,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Failed => "FAILED",
            Self::Skipped => "skipped",
        }
    }
}

/// One property of a pair of ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub verdict: Verdict,
    pub detail: String,
    pub remedy: Option<String>,
}

impl Check {
    pub fn new(name: &str, verdict: Verdict, detail: impl Into<String>) -> Self {
        Self { name: name.into(), verdict, detail: detail.into(), remedy: None }
    }

    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}
