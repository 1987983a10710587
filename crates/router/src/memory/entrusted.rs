//! A tenant's descriptors, which the vNIC's own thread closes.
use crate::admission::account::Charge;
use crate::base::deferred_drop::Closer;
use std::ops::Deref;
use std::sync::Arc;

/// A descriptor of a tenant's object, and what is charged for it. Whoever drops it, a thread of the vNIC closes it.
pub struct Entrusted<T: Send + 'static> {
    held: Option<(T, Arc<Charge>)>,
    closer: Arc<Closer>,
}

impl<T: Send + 'static> Entrusted<T> {
    pub fn new(thing: T, charge: Arc<Charge>, closer: Arc<Closer>) -> Self {
        Self { held: Some((thing, charge)), closer }
    }
}

impl<T: Send + 'static> Deref for Entrusted<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.held.as_ref().expect("it is there until it is dropped").0
    }
}

impl<T: Send + 'static> Drop for Entrusted<T> {
    fn drop(&mut self) {
        // Charged, so that it needs no count of its own.
        let _ = self.held.take().map(|held| self.closer.close(held, 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::account::{Account, Commons};
    use std::sync::mpsc::channel;

    /// Longer than anything here takes.
    const LONG: std::time::Duration = std::time::Duration::from_secs(30);

    #[test]
    fn what_is_entrusted_counts_until_it_is_closed_elsewhere() {
        struct Slow(std::sync::mpsc::Receiver<()>);
        impl Drop for Slow {
            fn drop(&mut self) {
                let _ = self.0.recv();
            }
        }
        let account = Arc::new(Account::new(Arc::new(Commons::new(1 << 16, 1 << 16))));
        let charge = Arc::new(Charge::connection(&account, 1).unwrap());
        let (release, released) = channel();
        drop(Entrusted::new(Slow(released), charge, Arc::new(Closer::default())));
        assert!(Charge::connection(&account, 1).is_err());
        drop(release);
        let end = std::time::Instant::now() + LONG;
        while Charge::connection(&account, 1).is_err() {
            assert!(std::time::Instant::now() < end);
            freeflow_shm::sched_yield();
        }
    }
}
