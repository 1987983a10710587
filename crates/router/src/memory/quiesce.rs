//! Where the slow path stands still: a library that moves pages which regions touch must not have
//! them read or written by address meanwhile. What came before the copy is in it, what comes after
//! the new mapping goes to that.
//!
//! Each access passes the gate of its process by itself, so a copy of several pieces may be half
//! done when it closes: the rest goes, by address, to what is mapped then.
use crate::memory::slow_path::TenantMemory;
use freeflow_verbs::AtomicOperation;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Default)]
struct State {
    /// Accesses under way.
    inside: u32,
    /// Accesses that wait until it is open.
    waiting: u32,
    is_closed: bool,
}

/// Of one process, as one connection reaches it.
#[derive(Default)]
pub struct QuiescenceGate {
    state: Mutex<State>,
    changed: Condvar,
}

impl QuiescenceGate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self) -> Inside<'_> {
        let mut state = self.lock();
        if state.is_closed {
            state.waiting += 1;
            state = self.changed.wait_while(state, |state| state.is_closed).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        state.inside += 1;
        Inside(self)
    }

    /// Until `done`, in time or not at all.
    fn wait_until<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        deadline: Instant,
        done: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(state, left, |state| !done(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Lets nobody in any more, once those are out who are inside. `None`: they did not come out in time. Who waited
    /// when it was closed before passes first, so that nobody waits for two in a row.
    pub fn close(self: &Arc<Self>, within: Duration) -> Option<Closed> {
        let deadline = Instant::now() + within;
        let is_free = |state: &State| !state.is_closed && state.waiting == 0;
        let mut state = self.wait_until(self.lock(), deadline, is_free);
        if !is_free(&state) {
            return None;
        }
        state.is_closed = true;
        state = self.wait_until(state, deadline, |state| state.inside == 0);
        let is_quiet = state.inside == 0;
        drop(state);
        let closed = Closed(self.clone());
        is_quiet.then_some(closed)
    }
}

/// Opens it again.
pub struct Closed(Arc<QuiescenceGate>);

impl Drop for Closed {
    fn drop(&mut self) {
        self.0.lock().is_closed = false;
        self.0.changed.notify_all();
    }
}

struct Inside<'a>(&'a QuiescenceGate);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.lock().inside -= 1;
        self.0.changed.notify_all();
    }
}

/// Memory behind a gate.
pub struct Gated<M> {
    memory: M,
    pub gate: Arc<QuiescenceGate>,
}

impl<M> Gated<M> {
    pub fn new(memory: M) -> Self {
        Self { memory, gate: Arc::default() }
    }
}

impl<M: TenantMemory> TenantMemory for Gated<M> {
    fn read(&self, into: &mut [u8], address: u64) -> io::Result<()> {
        let _inside = self.gate.enter();
        self.memory.read(into, address)
    }

    fn write(&self, from: &[u8], address: u64) -> io::Result<()> {
        let _inside = self.gate.enter();
        self.memory.write(from, address)
    }

    fn atomic(&self, address: u64, operation: AtomicOperation) -> io::Result<u64> {
        let _inside = self.gate.enter();
        self.memory.atomic(address, operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::blocking_memory::BlockingMemory;
    use std::sync::mpsc::channel;

    const SOON: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(30);

    /// The gate wakes nobody when an access begins to wait.
    fn until(gate: &QuiescenceGate, what: impl Fn(&State) -> bool) {
        let deadline = Instant::now() + LONG;
        while !what(&gate.lock()) {
            assert!(Instant::now() < deadline, "waited in vain");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn nothing_passes_while_it_is_closed_and_everything_afterwards() {
        let memory = Arc::new(Gated::new(BlockingMemory::default()));
        let closed = memory.gate.close(LONG).unwrap();
        let (sender, passed) = channel();
        let accesses: Vec<_> = (0..3)
            .map(|kind| {
                let (memory, sender) = (memory.clone(), sender.clone());
                std::thread::spawn(move || {
                    let add = AtomicOperation::FetchAdd { add: 1 };
                    let result = match kind {
                        0 => memory.read(&mut [0], 1),
                        1 => memory.write(&[0], 1),
                        _ => memory.atomic(8, add).map(drop),
                    };
                    sender.send(result.is_ok()).unwrap();
                })
            })
            .collect();
        until(&memory.gate, |state| state.waiting == 3);
        assert!(passed.try_recv().is_err());
        assert!(memory.gate.close(SOON).is_none(), "it is closed");
        drop(closed);
        for _ in 0..3 {
            assert_eq!(passed.recv_timeout(LONG), Ok(true));
        }
        accesses.into_iter().for_each(|access| access.join().unwrap());
    }

    #[test]
    fn an_access_under_way_is_waited_for_and_not_for_ever() {
        let memory = Arc::new(Gated::new(BlockingMemory::default()));
        memory.memory.set_blocking(true);
        let access = std::thread::spawn({
            let memory = memory.clone();
            move || memory.write(&[0], 1)
        });
        until(&memory.gate, |state| state.inside == 1);
        assert!(memory.gate.close(SOON).is_none());
        assert!(!memory.gate.lock().is_closed, "who gives up lets others pass");
        memory.memory.set_blocking(false);
        assert!(memory.gate.close(LONG).is_some());
        access.join().unwrap().unwrap();
    }
}
