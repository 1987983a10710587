//! The worker's seat: who has it may touch the engine and the rings. The worker leaves it only to sleep, and meanwhile the control
//! thread takes it for a job, since to wake the worker and to be woken by it costs more than most jobs.
//!
//! Who stands in leaves everything as the worker did before it slept: no queue pair is polled, nothing waits to be told, nothing is due
//! before the worker wakes. Where a job leaves more than that, the worker is woken for the rest.
//!
//! Invariant: the worker, awake, waits for one job at most: who wants to stand in looks first whether the worker sleeps.
//! Invariant: a stand-in moves no payload and waits for nobody. Work requests, and whatever waits for copies, are the worker's.
//! Invariant: what a process posted before a request of the control path is seen before it: with a doorbell that rang, nobody stands in.
use crate::control::WorkerHandle;
use crate::jobs::Job;
use crate::rings::Rings;
use crate::worker::Worker;
use freeflow_engine::SessionId;
use freeflow_verbs::Instant;
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, MutexGuard};

/// Queue pairs that one job may list; where there are more the worker looks after them.
const LISTED_COUNT_MAX: usize = 4;

/// Empty before the worker begins and after it has ended.
#[derive(Default)]
pub struct Seat(Mutex<Option<Worker>>);

impl Seat {
    /// For the worker's own thread. Panics if somebody did who had it: what is half done is nobody's to go on with.
    pub fn take(&self) -> MutexGuard<'_, Option<Worker>> {
        self.0.lock().expect("nobody panicked in the worker's place")
    }

    /// Does a session's job in the worker's place; whether the worker is to be woken then. The job comes back if it is the worker's.
    fn stand_in(&self, session: SessionId, job: Job) -> Result<bool, Job> {
        let Ok(mut seat) = self.0.try_lock() else { return Err(job) };
        let Some(worker) = seat.as_mut() else { return Err(job) };
        if !worker.may_be_stood_in_for(session) {
            return Err(job);
        }
        // After a panic the seat is as it would be after the worker's: the worker, woken, ends the router in order.
        let result = std::panic::catch_unwind(AssertUnwindSafe(move || {
            let is_left = seat.as_mut().is_some_and(|worker| !worker.do_beside(job));
            drop(seat);
            is_left
        }));
        Ok(result.unwrap_or(true))
    }
}

impl WorkerHandle {
    /// Has the job of a session done now, if the worker sleeps, or by the worker. For the control thread: the reaction comes to it in
    /// any case.
    pub fn hand_over(&self, session: SessionId, job: Job) {
        let job = match self.waker.is_sleeping() {
            true => self.seat.stand_in(session, job),
            false => Err(job),
        };
        match job {
            Ok(false) => {}
            Ok(true) => self.waker.wake(),
            Err(job) => self.submit(job),
        }
    }
}

impl Rings {
    fn copies_in_flight(&self) -> usize {
        self.transfers.in_flight() + self.movers.in_flight()
    }
}

impl Worker {
    /// It sleeps, or is about to, and nothing is left for it that would come before a job of this session.
    fn may_be_stood_in_for(&mut self, session: SessionId) -> bool {
        let has_rung = |id| self.rings.sessions.get(id).is_some_and(|session| !session.segment.summary_is_empty());
        let is_free = self.waiting.is_asleep() && self.rings.copies_in_flight() == 0 && self.waiting_jobs.is_empty();
        // What others left, and rang for, comes first; and while packets flow, those that are in the sockets.
        let packets_flow = self.rings.fabric.is_active(Instant(freeflow_shm::monotonic_ns()));
        is_free && !packets_flow && !has_rung(session) && !self.collect()
    }

    /// A job while the worker sleeps, and what follows of it; false: something is left for the worker.
    fn do_beside(&mut self, job: Job) -> bool {
        let now = Instant(freeflow_shm::monotonic_ns());
        self.rings.now = now;
        self.queued_jobs.push_back(job);
        self.run_control_jobs(now);
        self.end_failed_sessions(now);
        self.resume_ready();
        let rests = self.rest_listed(now);
        self.send_datagrams(now);
        let has_more = self.resume_ready();
        self.tell_channels();
        self.wake_pollers();
        self.publishing.note_busy();
        rests
            && !has_more
            && self.rings.failures.is_empty()
            && self.waiting_jobs.is_empty()
            && self.hot.is_empty()
            && !self.rings.fabric.blocked
            && self.waiting.sleeps_long_enough(self.next_timeout(now).map(|span| now + span))
    }

    /// Queue pairs that have nothing to do go back to their doorbells; false if one has.
    fn rest_listed(&mut self, now: Instant) -> bool {
        if self.engine.listed_count() > LISTED_COUNT_MAX {
            return false;
        }
        let mut is_idle = true;
        for _ in 0..self.engine.listed_count() {
            let Some((vnic, id)) = self.engine.poll_listed() else { break };
            let has_next = self.rings.qps.get(id).map(|qp| qp.send.has_next());
            if has_next.is_none_or(|has_next| self.engine.has_work(id, has_next)) {
                self.engine.list(vnic, id);
                is_idle = false;
            } else {
                self.look_at(now, (vnic, id));
            }
        }
        self.list_looked();
        is_idle && self.rest_all()
    }
}
