//! The worker lock: its holder may touch the worker's state. The worker gives it up only to sleep.
//! Meanwhile the control thread runs jobs inline under it, because to wake the worker and to be
//! woken by it costs more than most jobs.
//!
//! Generic over worker and bell, so that loom checks this very code (`tests/loom/`).
//!
//! Invariant: the worker, awake, waits for one job at most: the control thread tries the lock only
//! if the worker sleeps. Invariant: a job is run once, inline or by the worker, after all that was
//! put in the worker's queues before it.
use crate::parker::{Parker, Waker};
use crate::sync::{Mutex, MutexGuard};

/// A worker whose jobs may be run inline, while it sleeps.
pub trait InlineWorker {
    type Source;
    type Job;

    /// It sleeps, and nothing is left in its own hands that comes before a job of this source.
    fn is_idle_for(&self, source: &Self::Source) -> bool;

    /// Takes what other threads put in its queues; whether there is something.
    fn collect(&mut self) -> bool;

    /// Runs a job as the worker would have. False: something is left for the worker.
    fn run_inline(&mut self, job: Self::Job) -> bool;
}

pub type WorkerGuard<'a, W> = MutexGuard<'a, Option<W>>;

/// Empty before the worker begins and after it has ended.
pub struct WorkerLock<W>(Mutex<Option<W>>);

impl<W> Default for WorkerLock<W> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<W> WorkerLock<W> {
    /// For the worker's own thread. Panics if a holder panicked: nobody can go on with what is half
    /// done.
    pub fn acquire(&self) -> WorkerGuard<'_, W> {
        self.0.lock().expect("no holder of the worker lock panicked")
    }

    /// The worker, after [`Parker::prepare_to_sleep`]: gives up the lock while it blocks on its
    /// bell.
    pub fn sleep<'a, B>(
        &'a self,
        guard: WorkerGuard<'a, W>,
        parker: &Parker<B>,
        block: impl FnOnce(),
    ) -> WorkerGuard<'a, W> {
        drop(guard);
        block();
        // Before it takes the lock: no more jobs are run inline.
        parker.set_sleeping(false);
        self.acquire()
    }
}

impl<W: InlineWorker> WorkerLock<W> {
    /// Runs a job now, if the worker sleeps; otherwise hands it to `submit`, which puts it in a
    /// queue of the worker's, and wakes the worker. For the control thread.
    pub fn dispatch<B: Waker>(&self, parker: &Parker<B>, source: &W::Source, job: W::Job, submit: impl FnOnce(W::Job)) {
        let result = if parker.is_sleeping() { self.try_inline(source, job) } else { Err(job) };
        match result {
            Ok(true) => {}
            Ok(false) => parker.wake(),
            Err(job) => {
                submit(job);
                parker.wake();
            }
        }
    }

    /// As [`InlineWorker::run_inline`]. The job comes back if it is the worker's.
    fn try_inline(&self, source: &W::Source, job: W::Job) -> Result<bool, W::Job> {
        let Ok(mut guard) = self.0.try_lock() else { return Err(job) };
        let Some(worker) = guard.as_mut() else { return Err(job) };
        // Work put in its queues before comes first.
        if !worker.is_idle_for(source) || worker.collect() {
            return Err(job);
        }
        Ok(worker.run_inline(job))
    }
}
