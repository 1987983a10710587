//! The data plane: one thread that has the engine and all rings, but while it sleeps (see
//! `worker_lock`). Read [`Worker::turn`] first.
//!
//! Nothing here allocates, locks, logs or enters the kernel while requests flow, but for events of
//! armed completion queues, the hand-over to slow-path copiers, and datagrams, in batches. Which
//! QPs run is in `run_queue`, other hosts are in `fabric` and `wire`. How the worker waits when
//! nothing flows is in `idle`.
use crate::base::deferred_drop::DeferredDrop;
use crate::base::wake::Waker;
use crate::dataplane::command::Submission;
use crate::dataplane::event::{Event, SessionFailed, VnicFailed};
use crate::dataplane::ports::{DoorbellTarget, Ports};
use crate::dataplane::publishing::Publishing;
use crate::dataplane::waiting::{Next, Waiting};
use crate::memory::slow_path::Finished;
use crate::memory::transfers::Arrival;
use freeflow_engine::{CqId, Engine, QpId, ReceiveQueueId, SessionId, VnicId};
use freeflow_shm::handshake::fence_for_all;
use freeflow_shm::layout::CQ_DOORBELL_BASE;
use freeflow_shm::worker_lock::WorkerLock;
use freeflow_verbs::{Duration, Instant};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

pub(crate) type Lock = WorkerLock<Worker>;

/// Commands of one turn, and copiers' results of one turn.
const TURN_COMMANDS_MAX: usize = 64;
const TURN_RESULTS_MAX: usize = 256;
const TURN_READY_MAX: usize = 4096;
/// Doorbells of one turn, about; other sessions then come first in the next.
const TURN_DOORBELLS_MAX: usize = 4096;
/// A worker that runs so much later than it meant to was stopped (SIGSTOP, a paused VM), and all the router with it.
const PAUSE: Duration = Duration::from_millis(1000);

pub(crate) struct Worker {
    pub engine: Engine,
    pub ports: Ports,
    /// QPs that were looked at in this turn and found without work: they are listed again at its end.
    pub(crate) looked: Vec<(VnicId, QpId)>,
    /// Sessions whose doorbells are looked at each turn.
    pub(crate) active: Vec<SessionId>,
    /// Index of the session with the doorbells that are looked at first.
    next_active: usize,
    rung: Vec<(SessionId, u32)>,
    commands: Receiver<Submission>,
    pub(crate) queued_commands: VecDeque<Submission>,
    /// Commands that wait for copies to finish, or have more to do.
    pub(crate) waiting_commands: Vec<Submission>,
    /// A command has more to do in the next turn.
    pub(crate) goes_on: bool,
    finished: Receiver<Finished>,
    pub(crate) queued_finished: VecDeque<Finished>,
    pub(crate) events: Sender<Event>,
    pub(crate) control_waker: Arc<Waker>,
    pub(crate) waiting: Waiting,
    pub(crate) publishing: Publishing,
    /// By when it meant to run again.
    pub(crate) due_at: Instant,
    pub stopping: bool,
}

/// The ends of the worker's queues.
pub(crate) struct WorkerQueues {
    pub commands: Receiver<Submission>,
    pub finished: Receiver<Finished>,
    pub events: Sender<Event>,
    pub control_waker: Arc<Waker>,
}

impl Worker {
    pub(crate) fn new(engine: Engine, ports: Ports, queues: WorkerQueues, waiting: Waiting) -> Self {
        Self {
            engine,
            ports,
            looked: Vec::new(),
            active: Vec::new(),
            next_active: 0,
            rung: Vec::new(),
            commands: queues.commands,
            queued_commands: VecDeque::new(),
            waiting_commands: Vec::new(),
            goes_on: false,
            finished: queues.finished,
            queued_finished: VecDeque::new(),
            events: queues.events,
            control_waker: queues.control_waker,
            waiting,
            publishing: Publishing::new(),
            due_at: Instant(u64::MAX),
            stopping: false,
        }
    }

    /// One round of everything; whether there was anything to do.
    pub fn turn(&mut self, now: Instant) -> bool {
        self.ports.blocks.note_turn(self.ports.now, now);
        self.ports.now = now;
        // Requests posted before one of the control path are seen before it: commands are collected
        // first, and done after the rings.
        self.collect();
        let mut busy = self.take_datagrams(now);
        busy |= self.take_doorbells(now);
        busy |= self.run_queue_pairs(now);
        busy |= self.run_commands(now);
        busy |= self.hear_disconnections(now);
        busy |= self.follow_policy(now);
        busy |= self.take_copier_results(now);
        busy |= self.expire_timers(now);
        busy |= self.resume_ready();
        busy |= self.send_datagrams(now);
        self.ports.open_rings.let_go(now);
        self.ports.expire_moderation();
        self.notify_channels();
        self.end_failed_sessions(now);
        busy
    }

    /// Until it is asked to stop. It gives the lock up to sleep, and at its end for good.
    pub fn run(self, lock: &Lock) {
        let (sleeper, mut tokens) = (self.waiting.sleeper(), Vec::new());
        let mut guard = lock.acquire();
        *guard = Some(self);
        while let Some(worker) = guard.as_mut().filter(|worker| !worker.stopping) {
            let now = Instant(freeflow_shm::monotonic_ns());
            worker.note_cpu(now);
            worker.note_pause(now);
            worker.due_at = now;
            let busy = worker.turn(now);
            worker.keep_house(now);
            worker.wake_pollers();
            if let Next::Sleep(timeout) = worker.wait(now, busy) {
                worker.due_at = timeout.map_or(Instant(u64::MAX), |span| now + span);
                guard = sleeper.sleep((lock, guard), timeout, &mut tokens);
                if let Some(worker) = guard.as_mut() {
                    worker.ports.blocks.note_slept();
                    worker.unpark(&mut tokens);
                }
            }
        }
        *guard = None;
    }

    /// Time in which the router itself did not run counts against nobody: who had until a moment in
    /// it to do something, or to answer the router, has its whole time again.
    pub(crate) fn note_pause(&mut self, now: Instant) {
        if now - self.due_at < PAUSE {
            return;
        }
        self.ports.resumed_at = now;
        let until = now + self.ports.grants.time_max;
        self.ports.grants.leaving.postpone(until);
        self.ports.grants.leaving.insiders.postpone(now);
    }

    /// Takes what other threads left; whether there is something.
    pub(crate) fn collect(&mut self) -> bool {
        while self.queued_commands.len() < TURN_COMMANDS_MAX
            && let Ok(submission) = self.commands.try_recv()
        {
            self.queued_commands.push_back(submission);
        }
        while self.queued_finished.len() < TURN_RESULTS_MAX
            && let Ok(finished) = self.finished.try_recv()
        {
            self.queued_finished.push_back(finished);
        }
        let moved = self.ports.copy_threads.collect(self.ports.epoch, TURN_RESULTS_MAX);
        let has_arrivals = self.ports.fabric.siblings.as_ref().is_some_and(|siblings| siblings.has_arrivals());
        moved || has_arrivals || !self.queued_commands.is_empty() || !self.queued_finished.is_empty()
    }

    /// Doorbells that rang: a send queue is active from now on, a receive queue has what somebody waits for.
    fn take_doorbells(&mut self, now: Instant) -> bool {
        let mut rung = std::mem::take(&mut self.rung);
        let (first, count) = (self.next_active, self.active.len());
        for step in 0..count {
            if rung.len() >= TURN_DOORBELLS_MAX {
                break;
            }
            let at = (first + step) % count;
            let id = self.active[at];
            self.next_active = at + 1;
            if let Some(session) = self.ports.sessions.get_mut(id)
                && session.segment.take_doorbells(|bell| rung.push((id, bell)))
            {
                session.doorbell_seen = now;
            }
        }
        let busy = !rung.is_empty();
        for (session, bell) in rung.drain(..) {
            self.answer_doorbell(now, session, bell);
        }
        self.rung = rung;
        busy
    }

    fn answer_doorbell(&mut self, now: Instant, session: SessionId, bell: u32) {
        self.ports.note_busy(session);
        let Some(entry) = self.ports.sessions.get(session) else { return };
        if let Some(cookie) = bell.checked_sub(CQ_DOORBELL_BASE) {
            if let Some(&id) = entry.cq_bells.get(&cookie) {
                self.ports.handle_armed_late(id);
            }
            return;
        }
        match entry.doorbells.get(bell) {
            Some(DoorbellTarget::Qp(id)) => {
                let Some(qp) = self.ports.qps.get(id) else { return };
                let (receives_wanted, has_next) = (qp.receives_wanted, qp.send.has_next());
                if qp.direct.is_used() {
                    self.carry_notification(id);
                }
                if receives_wanted {
                    self.engine.handle_receive_posted(&mut self.ports, now, ReceiveQueueId::Qp(id));
                }
                if has_next {
                    self.activate(id);
                }
            }
            Some(DoorbellTarget::Srq(id)) => {
                if self.ports.srqs.get(id).is_some_and(|srq| srq.receives_wanted) {
                    self.engine.handle_receive_posted(&mut self.ports, now, ReceiveQueueId::Srq(id));
                }
                self.engine.handle_receives_taken(&mut self.ports, id);
            }
            None => {}
        }
    }

    fn take_copier_results(&mut self, now: Instant) -> bool {
        let mut busy = !self.queued_finished.is_empty();
        while let Some(finished) = self.queued_finished.pop_front() {
            if let Some(qp) = self.ports.token_of(&finished).and_then(|token| self.engine.qp_of(token)) {
                self.ports.count_slow_path(qp, &finished);
            }
            if let Some(arrival) = self.ports.handle_finished(finished) {
                self.handle_arrival(now, arrival);
            }
        }
        busy |= self.take_moved(now);
        while let Some(arrival) = self.ports.poll_postponed() {
            self.handle_arrival(now, arrival);
            busy = true;
        }
        busy
    }

    fn take_moved(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Some(arrival) = self.ports.poll_moved() {
            self.handle_arrival(now, arrival);
            busy = true;
        }
        busy
    }

    /// Brings in all copies of this session's memory that copy threads have: as if the worker had done
    /// them.
    pub(crate) fn land_copies_of(&mut self, now: Instant, session: SessionId) {
        self.ports.settle(session);
        self.take_moved(now);
        // Answers to it may have gone out.
        self.ports.fabric.end_references();
    }

    pub(crate) fn handle_arrival(&mut self, now: Instant, arrival: Arrival) {
        match arrival {
            Arrival::Copied(token, result) => self.engine.handle_copied(&mut self.ports, now, token, result),
            Arrival::Atomic(token, result) => self.engine.handle_atomic_done(&mut self.ports, now, token, result),
        }
    }

    fn expire_timers(&mut self, now: Instant) -> bool {
        let due = self.engine.poll_timeout().is_some_and(|at| at <= now);
        if due {
            self.engine.handle_timeout(&mut self.ports, now);
        }
        due
    }

    pub(crate) fn resume_ready(&mut self) -> bool {
        let mut busy = false;
        for _ in 0..TURN_READY_MAX {
            let Some(id) = self.engine.poll_ready() else { break };
            self.activate(id);
            busy = true;
        }
        busy
    }

    /// Completions are in their rings: pollers that sleep are woken.
    #[inline]
    pub(crate) fn wake_pollers(&mut self) {
        if self.ports.completed.is_empty() {
            return;
        }
        let mut completed = std::mem::take(&mut self.ports.completed);
        completed.retain(|&id| {
            let Some(session) = self.ports.sessions.get_mut(id) else { return false };
            session.is_completed = false;
            session.completed += 1;
            session.segment.advance(session.completed);
            true
        });
        fence_for_all();
        for id in completed.drain(..) {
            if let Some(session) = self.ports.sessions.get(id) {
                session.segment.wake_sleepers(session.completed);
            }
        }
        self.ports.completed = completed;
    }

    /// Completions are in their rings: the channels of armed CQs are notified.
    pub(crate) fn notify_channels(&mut self) {
        if self.ports.notify.is_empty() {
            return;
        }
        let mut notify = std::mem::take(&mut self.ports.notify);
        for id in notify.drain(..) {
            self.notify_channel(id);
        }
        self.ports.notify = notify;
    }

    /// A CQ whose channel's pipe is full is looked at again when that has room.
    fn notify_channel(&mut self, id: CqId) {
        let Some(channel) = self.ports.cqs.get(id).and_then(|cq| cq.channel) else { return };
        if self.ports.pipes.is_behind(channel) {
            self.ports.pipes.wait_for_room(channel, id);
            return;
        }
        let solicited = self.ports.begin_notifying(id);
        let Some(cq) = self.ports.cqs.get(id) else { return };
        let before = cq.previous.as_ref().is_some_and(|ring| ring.take_armed(solicited));
        if cq.ring.take_armed(solicited) || before {
            self.ports.pipes.send(channel, cq.cookie, 0);
        }
    }

    pub(crate) fn end_failed_sessions(&mut self, now: Instant) {
        self.ports.send_commands(now);
        self.expel_late(now);
        while let Some((session, reason)) = self.ports.failures.pop() {
            let held = self.destroy_session(now, session);
            self.notify_control(SessionFailed { session, reason, held });
            self.ports.send_commands(now);
        }
    }

    /// QPs whose library takes too long for an atomic end, before anything more of them is taken.
    fn expel_late(&mut self, now: Instant) {
        if self.ports.grants.leaving.insiders.is_empty() {
            return;
        }
        for id in self.ports.grants.leaving.insiders.take_late(now) {
            self.engine.fail_direct(&mut self.ports, id);
            self.ports.expel(id);
        }
        self.ports.send_commands(now);
    }

    /// Everything of one process ends; what it held is for the caller to drop.
    pub fn destroy_session(&mut self, now: Instant, session: SessionId) -> DeferredDrop {
        let Some(entry) = self.ports.sessions.get(session) else { return Vec::new() };
        self.waiting.unwatch(&entry.kick);
        self.ports.settle(session);
        let objects = self.engine.objects_of(session);
        self.ports.forget_grants_of_session(session);
        for &qp in &objects.qps {
            self.end_direct(qp);
            self.ports.expel(qp);
        }
        self.engine.destroy_session(&mut self.ports, now, session);
        self.active.retain(|&active| active != session);
        self.ports.remove_session(session, objects)
    }

    /// The sessions of a vNIC, all of them. Nobody waits for its copier any more, which touches no other's memory.
    pub fn destroy_sessions_of(&mut self, now: Instant, vnic: VnicId) -> DeferredDrop {
        let mut failed = self.ports.transfers.forget_copier(vnic);
        failed.extend(self.ports.forget_postponed(vnic));
        let of_vnic: Vec<SessionId> =
            self.ports.sessions.iter().filter(|(_, session)| session.vnic == vnic).map(|(id, _)| id).collect();
        let held = of_vnic.into_iter().flat_map(|session| self.destroy_session(now, session)).collect();
        for arrival in failed {
            self.handle_arrival(now, arrival);
        }
        held
    }

    /// Gives up the vNICs whose memory blocks their copier for too long.
    pub(crate) fn fail_stalled_vnics(&mut self, now: Instant) {
        let resumed_at = self.ports.resumed_at;
        let is_stalled = |vnic: &crate::dataplane::ports::Vnic| {
            vnic.copier.as_ref().is_some_and(|copier| copier.is_stalled(now.0, resumed_at.0))
        };
        let stalled: Vec<VnicId> =
            self.ports.vnics.iter().filter(|(_, vnic)| is_stalled(vnic)).map(|(id, _)| id).collect();
        for id in stalled {
            if let Some(vnic) = self.ports.vnics.get_mut(id)
                && let Some(copier) = vnic.copier.take()
            {
                vnic.abandoned.push(copier.abandon());
            }
            let held = self.destroy_sessions_of(now, id);
            let reason = "its memory could not be reached for two seconds";
            self.notify_control(VnicFailed { vnic: id, reason, held });
        }
    }
}
