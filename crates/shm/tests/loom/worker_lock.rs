//! The worker lock and its parker, model-checked with a worker that has a queue of jobs, a queue of
//! results and one doorbell. The queues are bare atomics, weaker than the channels of the router.
//!
//! Each of these changes makes a model fail:
//!
//! | change | model that fails |
//! |---|---|
//! | `Parker::set_sleeping` or `wake` without its fence | all: deadlock, the worker sleeps for ever |
//! | `prepare_to_sleep` looks before it announces, or not at all | all: deadlock |
//! | `dispatch` wakes before it submits, or does not wake | all: deadlock |
//! | `dispatch` ignores that an inline job left work | `a_job_that_is_put_off…`: deadlock |
//! | `try_inline` does not collect first | `jobs_are_run_once…`: out of order |
//! | `try_inline` ignores `is_idle_for` | `a_doorbell…`, `a_job_that_is_put_off…`: out of order |
//! | `try_inline` drops a job when the lock is busy | all: deadlock |
//!
//! To leave out `set_sleeping(false)` or the look at `is_sleeping` only costs time, and no model fails.
use crate::{check, check_bounded};
use freeflow_shm::handshake::{Doorbells, announce};
use freeflow_shm::parker::{Parker, Waker};
use freeflow_shm::worker_lock::{InlineWorker, WorkerLock};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use loom::sync::{Arc, Notify};
use loom::thread;
use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;

/// Jobs are numbers that say what they are.
type Job = u32;
/// Is asked again in the worker's next turn.
const PUT_OFF: Job = 0x100;
/// Of a copy thread, not of the control thread.
const RESULT: Job = 0x200;
const STOP: Job = 0x400;
/// Was run after the doorbell was taken.
const AFTER_DOORBELL: Job = 0x800;

/// Stays rung until the worker has waited for it, as an eventfd that is drained then.
struct Ring(Notify);

impl Waker for Ring {
    fn ring(&self) {
        self.0.notify();
    }
}

/// State that other threads reach without the worker lock.
struct Queues {
    jobs: [AtomicU32; 3],
    result: AtomicU32,
    summary: AtomicU64,
    doorbells: [AtomicU64; 1],
    router_sleeps: AtomicU32,
    /// In place of the engine: only the lock keeps two threads from it. The jobs that were run, in order.
    engine: UnsafeCell<Vec<Job>>,
    run_count: AtomicU32,
    has_run: Notify,
}

impl Queues {
    fn new() -> Self {
        Self {
            jobs: [(); 3].map(|()| AtomicU32::new(0)),
            result: AtomicU32::new(0),
            summary: AtomicU64::new(0),
            doorbells: [AtomicU64::new(0)],
            router_sleeps: AtomicU32::new(0),
            engine: UnsafeCell::new(Vec::new()),
            run_count: AtomicU32::new(0),
            has_run: Notify::new(),
        }
    }

    fn doorbells(&self) -> Doorbells<'_> {
        Doorbells { summary: &self.summary, words: &self.doorbells, router_sleeps: &self.router_sleeps }
    }
}

struct Worker {
    queues: Arc<Queues>,
    next_job: usize,
    has_result: bool,
    queued: VecDeque<Job>,
    put_off: Vec<Job>,
    asleep: bool,
    rang: bool,
    stopping: bool,
}

impl Worker {
    fn new(queues: &Arc<Queues>) -> Self {
        let queues = Arc::clone(queues);
        let (queued, put_off) = (VecDeque::new(), Vec::new());
        Self { queues, next_job: 0, has_result: false, queued, put_off, asleep: false, rang: false, stopping: false }
    }

    fn run_job(&mut self, job: Job) {
        if job == STOP {
            self.stopping = true;
            return;
        }
        let job = job | if self.rang { AFTER_DOORBELL } else { 0 };
        // SAFETY: under the worker lock, which loom checks.
        self.queues.engine.with_mut(|engine| unsafe { (*engine).push(job) });
        self.queues.run_count.fetch_add(1, Release);
        self.queues.has_run.notify();
    }

    fn begin(&mut self, job: Job) {
        if job & PUT_OFF == 0 { self.run_job(job) } else { self.put_off.push(job) }
    }

    /// As the router's: jobs are collected first, and run after the doorbells are taken.
    fn turn(&mut self) -> bool {
        let mut busy = self.collect();
        let queues = Arc::clone(&self.queues);
        busy |= queues.doorbells().take(|_| self.rang = true);
        for job in std::mem::take(&mut self.put_off) {
            self.run_job(job);
        }
        while let Some(job) = self.queued.pop_front() {
            self.begin(job);
        }
        busy || !self.put_off.is_empty()
    }

    /// The last look.
    fn may_sleep(&mut self) -> bool {
        if self.collect() {
            return false;
        }
        announce(&self.queues.router_sleeps, true);
        let is_silent = self.queues.doorbells().is_empty();
        if !is_silent {
            announce(&self.queues.router_sleeps, false);
        }
        is_silent
    }
}

impl InlineWorker for Worker {
    type Source = ();
    type Job = Job;

    fn is_idle_for(&self, (): &()) -> bool {
        self.asleep && self.put_off.is_empty() && self.queues.doorbells().is_empty()
    }

    fn collect(&mut self) -> bool {
        while let Some(job) = self.queues.jobs.get(self.next_job).map(|job| job.load(Acquire))
            && job != 0
        {
            self.next_job += 1;
            self.queued.push_back(job);
        }
        if !self.has_result && self.queues.result.load(Acquire) != 0 {
            self.has_result = true;
            self.queued.push_back(RESULT);
        }
        !self.queued.is_empty()
    }

    fn run_inline(&mut self, job: Job) -> bool {
        INLINE_COUNT.fetch_add(1, Relaxed);
        self.begin(job);
        self.put_off.is_empty()
    }
}

/// Over all interleavings of all models.
static INLINE_COUNT: AtomicUsize = AtomicUsize::new(0);
static SUBMITTED_COUNT: AtomicUsize = AtomicUsize::new(0);

/// One router: its worker's thread, and what the control thread does.
struct Router {
    queues: Arc<Queues>,
    lock: WorkerLock<Worker>,
    parker: Parker<Ring>,
}

impl Router {
    fn new() -> Self {
        Self { queues: Arc::new(Queues::new()), lock: WorkerLock::default(), parker: Parker::new(Ring(Notify::new())) }
    }

    /// The worker's loop; gives what was run.
    fn run_worker(&self) -> Vec<Job> {
        let mut guard = self.lock.acquire();
        *guard = Some(Worker::new(&self.queues));
        while let Some(worker) = guard.as_mut().filter(|worker| !worker.stopping) {
            if !worker.turn() && self.parker.prepare_to_sleep(|| worker.may_sleep()) {
                worker.asleep = true;
                guard = self.lock.sleep(guard, &self.parker, || self.parker.bell().0.wait());
                let worker = guard.as_mut().unwrap();
                worker.asleep = false;
                announce(&self.queues.router_sleeps, false);
            }
        }
        *guard = None;
        // SAFETY: as above.
        self.queues.engine.with(|engine| unsafe { (*engine).clone() })
    }

    /// The control thread's; `at`: its place in the queue, if it goes there.
    fn dispatch(&self, job: Job, at: &mut usize) {
        self.lock.dispatch(&self.parker, &(), job, |job| {
            SUBMITTED_COUNT.fetch_add(1, Relaxed);
            self.submit(job, at);
        });
    }

    fn submit(&self, job: Job, at: &mut usize) {
        self.queues.jobs[*at].store(job, Release);
        *at += 1;
    }

    /// Nobody wakes the worker meanwhile: were a wake-up lost, this would never end, which loom reports.
    fn wait_for(&self, count: u32) {
        while self.queues.run_count.load(Acquire) < count {
            self.queues.has_run.wait();
        }
    }

    fn stop(&self, at: &mut usize) {
        self.submit(STOP, at);
        self.parker.wake();
    }
}

fn start(router: &Arc<Router>) -> thread::JoinHandle<Vec<Job>> {
    let router = Arc::clone(router);
    thread::spawn(move || router.run_worker())
}

#[test]
fn jobs_are_run_once_in_order_and_never_lost() {
    check(|| {
        let (router, mut at) = (Arc::new(Router::new()), 0);
        let worker = start(&router);
        router.dispatch(1, &mut at);
        router.dispatch(2, &mut at);
        router.wait_for(2);
        router.stop(&mut at);
        assert_eq!(worker.join().unwrap(), [1, 2]);
    });
    assert!(INLINE_COUNT.load(Relaxed) > 0 && SUBMITTED_COUNT.load(Relaxed) > 0, "one of the two ways was never taken");
}

/// A job that needs another turn, begun inline, is the worker's to finish.
#[test]
fn a_job_that_is_put_off_wakes_the_worker() {
    check(|| {
        let (router, mut at) = (Arc::new(Router::new()), 0);
        let worker = start(&router);
        router.dispatch(PUT_OFF | 1, &mut at);
        router.wait_for(1);
        router.dispatch(2, &mut at);
        router.wait_for(2);
        router.stop(&mut at);
        assert_eq!(worker.join().unwrap(), [PUT_OFF | 1, 2]);
    });
}

/// A copy thread brings a result while the control thread has a job and the worker goes to sleep.
#[test]
fn a_result_and_a_job_at_once_are_both_run() {
    check_bounded(2, || {
        let (router, mut at) = (Arc::new(Router::new()), 0);
        let worker = start(&router);
        let copier = {
            let router = Arc::clone(&router);
            thread::spawn(move || {
                router.queues.result.store(1, Release);
                router.parker.wake();
            })
        };
        router.dispatch(1, &mut at);
        router.wait_for(2);
        router.stop(&mut at);
        copier.join().unwrap();
        let mut run = worker.join().unwrap();
        run.sort_unstable();
        assert_eq!(run, [1, RESULT]);
    });
}

/// A request that a process posted before one of the control path is seen before it.
#[test]
fn a_doorbell_that_rang_before_a_job_is_taken_before_it() {
    check(|| {
        let (router, mut at) = (Arc::new(Router::new()), 0);
        let worker = start(&router);
        if router.queues.doorbells().ring(0) {
            router.parker.bell().ring();
        }
        router.dispatch(1, &mut at);
        router.wait_for(1);
        router.stop(&mut at);
        assert_eq!(worker.join().unwrap(), [AFTER_DOORBELL | 1]);
    });
}
