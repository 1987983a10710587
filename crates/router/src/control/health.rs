//! Faults of this router, as the REST server found them last.
use std::sync::{Arc, PoisonError};

/// The last findings, for the control thread: it does not wait for a probe.
#[derive(Clone, Default)]
pub struct Health(Arc<std::sync::Mutex<Vec<String>>>);

impl Health {
    pub fn set(&self, wrong: Vec<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = wrong;
    }

    /// The faults found.
    pub fn wrong(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
