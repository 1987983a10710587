//! Commands that the control thread runs inline while the worker sleeps. Their locking is in
//! [`freeflow_shm::worker_lock`].
//!
//! An inline command leaves everything as the worker did before it slept: no queue pair is polled,
//! no notification waits, nothing is due before the worker wakes. Where a command leaves more than
//! that, the worker is woken for the rest.
//!
//! Invariant: an inline command moves no payload and waits for nobody. Work requests, and commands
//! that wait for copies, are the worker's. Invariant: what a process posted before a request of the
//! control path is seen before it: with a doorbell that rang, no command of its session is run
//! inline.
use crate::dataplane::command::Submission;
use crate::dataplane::handle::WorkerHandle;
use crate::dataplane::ports::Ports;
use crate::dataplane::worker::Worker;
use freeflow_engine::SessionId;
use freeflow_shm::worker_lock::InlineWorker;
use freeflow_verbs::Instant;
use std::panic::AssertUnwindSafe;

/// Queue pairs that one command may list; where there are more the worker looks after them.
const LISTED_COUNT_MAX: usize = 4;

impl WorkerHandle {
    /// Has a command, of a session if one is named, executed now, if the worker sleeps, or by the worker.
    /// For the control thread: the answer comes as an event in any case.
    pub fn hand_over(&self, session: Option<SessionId>, submission: Submission) {
        let parker = self.waker.parker();
        // Fails only when the worker has ended, and then the router ends.
        let submit = |submission| drop(self.commands.send(submission));
        let dispatch = AssertUnwindSafe(move || self.lock.dispatch(parker, &session, submission, submit));
        // A panic poisons the lock, as the worker's own would: the worker, woken, ends the router in order.
        if std::panic::catch_unwind(dispatch).is_err() {
            self.waker.wake();
        }
    }
}

impl Ports {
    fn copies_in_flight(&self) -> usize {
        self.transfers.in_flight() + self.copy_threads.in_flight()
    }
}

impl InlineWorker for Worker {
    type Source = Option<SessionId>;
    type Job = Submission;

    fn is_idle_for(&self, session: &Option<SessionId>) -> bool {
        let session = session.and_then(|id| self.ports.sessions.get(id));
        let has_rung = session.is_some_and(|session| !session.segment.summary_is_empty());
        let is_free =
            self.waiting.is_asleep() && self.ports.copies_in_flight() == 0 && self.waiting_commands.is_empty();
        // While packets flow, those that are in the sockets come first.
        let packets_flow = self.ports.fabric.is_active(Instant(freeflow_shm::monotonic_ns()));
        // The news of another host may end a datagram's wait, and that moves payload.
        is_free && !packets_flow && !has_rung && !self.engine.has_unresolved_datagrams()
    }

    fn collect(&mut self) -> bool {
        Self::collect(self)
    }

    fn run_inline(&mut self, submission: Submission) -> bool {
        let now = Instant(freeflow_shm::monotonic_ns());
        // The worker may not have run for as long, and somebody else's time be up by that.
        self.note_pause(now);
        self.ports.now = now;
        self.queued_commands.push_back(submission);
        self.run_commands(now);
        self.end_failed_sessions(now);
        self.resume_ready();
        let rests = self.rest_listed(now);
        self.send_datagrams(now);
        let has_more = self.resume_ready();
        self.notify_channels();
        self.wake_pollers();
        self.publishing.note_busy();
        rests
            && !has_more
            && self.ports.failures.is_empty()
            && self.waiting_commands.is_empty()
            && self.active.is_empty()
            && !self.ports.fabric.blocked
            && self.waiting.sleeps_long_enough(self.next_timeout(now).map(|span| now + span))
    }
}

impl Worker {
    /// Queue pairs that have nothing to do go back to their doorbells; false if one has.
    fn rest_listed(&mut self, now: Instant) -> bool {
        if self.engine.listed_count() > LISTED_COUNT_MAX {
            return false;
        }
        let mut is_idle = true;
        for _ in 0..self.engine.listed_count() {
            let Some((vnic, id)) = self.engine.poll_listed() else { break };
            let has_next = self.ports.qps.get(id).map(|qp| qp.send.has_next());
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
