//! How the worker waits: spinning, yielding, sleeping; and the waiting rule of polling libraries.
//!
//! *Fastpath* never sleeps. *LowCPU* sleeps as soon as nothing is to be done, *adaptive* after
//! [`ADAPTIVE_IDLE`]. While it doesn't sleep, the waiting rule holds: spin freely only if everybody
//! who polls fits the cores, as this router reckons from its own view and, by the machine-wide
//! file, over all routers of the machine; else about twenty pauses, then `sched_yield`.
//!
//! Datagrams of other hosts are looked for while the worker is awake (`wire`), and wake it when it
//! sleeps. While they flow, pollers and worker publish where they run, and give way to each
//! other.
//!
//! A *cold* session is one whose doorbells are not looked at: its library writes the kick eventfd,
//! which is in the worker's epoll. A session becomes active by its kick, and parked when it has not
//! rung for [`EPOCH`] or the worker sleeps.
//!
//! Invariant: before it blocks, the worker says so to everyone who could have work for it (its own queues, the send
//! queues it polled, the active sessions), each time followed by a SeqCst fence, and then looks once
//! more.
use crate::dataplane::table::Id;
use crate::dataplane::waiting::{NO_CPU, Next, WAKER_TOKEN, WIRE_TOKEN};
use crate::dataplane::worker::Worker;
use freeflow_engine::SessionId;
use freeflow_shm::cpu_count;
use freeflow_shm::layout::{WAIT_SPIN, WAIT_YIELD};
use freeflow_verbs::{Duration, Instant};

/// While the worker is awake it looks for kicks of cold sessions this often.
const KICK_INTERVAL: Duration = Duration::from_micros(20);
/// A session that was busy in this or the last epoch counts as a poller.
const EPOCH: Duration = Duration::from_millis(2);
const OWED_INTERVAL: Duration = Duration::from_millis(10);
const HOUSE_INTERVAL: Duration = Duration::from_millis(100);
/// Changing back to free spinning takes this long of fitting.
const SPIN_AGAIN: Duration = Duration::from_millis(100);
/// A timer due within this is waited for awake.
const TIMER_NEAR: Duration = Duration::from_micros(60);

/// How long the worker waits at once while sockets are full and nothing else is to be done.
const BLOCKED_WAIT: Duration = Duration::from_micros(50);

/// Pollers that an idle worker looks for on its own processor.
const POLLERS_LOOKED_AT_MAX: usize = 16;

impl Worker {
    /// After a turn.
    pub(crate) fn wait(&mut self, now: Instant, busy: bool) -> Next {
        let has_parked = self.ports.sessions.len() > self.active.len();
        if has_parked && now - self.waiting.kicks_at >= KICK_INTERVAL {
            self.waiting.kicks_at = now;
            self.waiting.poll(Some(Duration(0)));
            self.take_kicks(now);
        }
        if busy {
            self.publishing.note_busy();
            self.waiting.idle_turns = 0;
            self.waiting.busy_at = now;
            return Next::Turn;
        }
        if self.ports.fabric.blocked {
            // QPs with something to send wait for room: a full socket has work for longer than this.
            self.waiting.poll(Some(BLOCKED_WAIT));
            self.take_kicks(now);
            return Next::Turn;
        }
        let packets_flow = self.ports.fabric.is_active(now);
        let idle = self.waiting.idle_limit(now, packets_flow);
        if idle.is_some_and(|idle| now - self.waiting.busy_at >= idle || self.keeps_pollers_waiting()) {
            let timeout = self.next_timeout(now);
            if timeout.is_none_or(|span| span >= TIMER_NEAR || self.waits_for_program(now, span)) {
                return self.park(now, timeout);
            }
        }
        self.waiting.relax(now);
        Next::Turn
    }

    /// Where the worker runs, for pollers; only while packets flow: within a host a yield is the
    /// cheaper way to hand over.
    #[inline]
    pub(crate) fn note_cpu(&mut self, now: Instant) {
        let flows = self.ports.fabric.is_active_within(now, HOUSE_INTERVAL);
        let cpu = if flows { freeflow_shm::current_cpu() } else { NO_CPU };
        if cpu != self.waiting.cpu {
            self.waiting.cpu = cpu;
            for &id in &self.active {
                if let Some(session) = self.ports.sessions.get(id) {
                    session.segment.set_router_cpu(cpu);
                }
            }
        }
    }

    /// Those who poll do it on this processor, all of them, and can't while the worker is awake. (One alone, who may
    /// lie, does not make the worker sleep where others are.)
    fn keeps_pollers_waiting(&self) -> bool {
        let cpu = self.waiting.cpu;
        let waits = |id: &SessionId| {
            self.ports.sessions.get(*id).is_some_and(|session| session.segment.is_poller_here(cpu, session.completed))
        };
        let few = 1..=POLLERS_LOOKED_AT_MAX;
        let publishes = self.waiting.policy == WAIT_YIELD && cpu != NO_CPU;
        publishes && few.contains(&self.active.len()) && self.active.iter().all(waits)
    }

    /// The first that is due is an acknowledgement that waits for a program's answer: which may need this processor.
    fn waits_for_program(&self, now: Instant, timeout: Duration) -> bool {
        self.engine.acks_due().is_some_and(|at| at - now <= timeout)
    }

    fn park(&mut self, now: Instant, timeout: Option<Duration>) -> Next {
        let waker = self.waiting.waker.clone();
        if waker.parker().prepare_to_sleep(|| self.may_sleep()) {
            self.waiting.asleep = Some(timeout.map_or(Instant(u64::MAX), |span| now + span));
            return Next::Sleep(timeout);
        }
        self.unpark(&mut Vec::new());
        Next::Turn
    }

    /// After it slept, or could not: who woke it.
    pub(crate) fn unpark(&mut self, tokens: &mut Vec<u64>) {
        let now = Instant(freeflow_shm::monotonic_ns());
        self.waiting.asleep = None;
        // Sessions whose jobs were run inline while it slept did not all poll at the same time. The
        // house is kept after the next turn.
        if now - self.waiting.epoch_at >= EPOCH {
            self.waiting.busy_before = 0;
            self.ports.busy_session_count = 0;
        }
        self.waiting.busy_at = now;
        self.waiting.idle_turns = 0;
        self.waiting.tokens.clear();
        self.waiting.tokens.append(tokens);
        self.take_kicks(now);
    }

    /// Announces that the worker sleeps; false if somebody has work for it.
    fn may_sleep(&mut self) -> bool {
        if self.collect() || self.resume_ready() || !self.rest_all() {
            return false;
        }
        while let Some(&id) = self.active.last() {
            if !self.mark_parked(id) {
                return false;
            }
            self.active.pop();
        }
        true
    }

    /// False: it rang just then and stays active.
    fn mark_parked(&mut self, id: SessionId) -> bool {
        let Some(session) = self.ports.sessions.get_mut(id) else { return true };
        session.segment.set_router_sleeps(true);
        if !session.segment.summary_is_empty() {
            session.segment.set_router_sleeps(false);
            return false;
        }
        session.active = false;
        true
    }

    pub(crate) fn mark_active(&mut self, now: Instant, id: SessionId) {
        let Some(session) = self.ports.sessions.get_mut(id) else { return };
        session.doorbell_seen = now;
        if !session.active {
            session.active = true;
            session.segment.set_router_cpu(self.waiting.cpu);
            session.segment.set_router_sleeps(false);
            self.active.push(id);
        }
    }

    fn take_kicks(&mut self, now: Instant) {
        while let Some(token) = self.waiting.tokens.pop() {
            if token == WAKER_TOKEN {
                self.waiting.waker.drain();
            } else if token == WIRE_TOKEN {
                self.ports.fabric.note_arrival();
            } else {
                self.mark_active(now, SessionId::of(token as u32 as usize, (token >> 32) as u32));
            }
        }
    }

    /// How long the worker may sleep; `None`: until it is woken.
    pub(crate) fn next_timeout(&self, now: Instant) -> Option<Duration> {
        let timer = self.engine.poll_timeout().map(|at| at - now);
        let owed = (self.ports.pipes.owes() || !self.ports.notify.is_empty()).then_some(OWED_INTERVAL);
        let moderated = self.ports.schedule.first().map(|&(due, _)| due - now);
        let copies = self.ports.transfers.in_flight() + self.ports.copy_threads.in_flight();
        let waits = copies > 0 || !self.waiting_commands.is_empty();
        let house = (waits || self.waiting.pollers.is_counted()).then_some(HOUSE_INTERVAL);
        let counters = self.publishing.due_in(now);
        let direct = self.ports.watch.due_in(now);
        let wire = self.ports.fabric.next_due().map(|at| at - now);
        let commands = self.ports.grants.due_in(now);
        let reports = self.ports.access.due_in(now);
        [timer, owed, moderated, house, counters, direct, wire, commands, reports].into_iter().flatten().min()
    }

    /// Periodic work.
    pub(crate) fn keep_house(&mut self, now: Instant) {
        self.publish_counters(now);
        if now - self.waiting.epoch_at < EPOCH {
            return;
        }
        self.waiting.epoch_at = now;
        let busy = self.ports.busy_session_count;
        let pollers = busy.max(self.waiting.busy_before);
        self.waiting.busy_before = busy;
        self.ports.busy_session_count = 0;
        self.ports.epoch += 1;
        self.ports.copy_threads.note_busy_sessions(pollers);
        let copy_threads = self.ports.copy_threads.awake_count(self.ports.epoch);
        if !self.waiting.is_fastpath() {
            self.cool_quiet_sessions(now);
        }
        if self.ports.pipes.owes() {
            self.ports.pipes.pay(&mut self.ports.notify);
        }
        if now - self.waiting.house_at >= HOUSE_INTERVAL {
            self.waiting.house_at = now;
            let spins =
                pollers > 0 || self.waiting.is_fastpath() || self.ports.fabric.is_active_within(now, HOUSE_INTERVAL);
            self.waiting.pollers.publish(if spins { pollers + copy_threads + 1 } else { 0 }, now);
            self.fail_stalled_vnics(now);
            self.fail_poisoned_sessions();
        }
        self.apply_waiting_rule(now, pollers + copy_threads);
    }

    fn cool_quiet_sessions(&mut self, now: Instant) {
        let mut active = std::mem::take(&mut self.active);
        active.retain(|&id| {
            let quiet = self.ports.sessions.get(id).is_none_or(|session| now - session.doorbell_seen >= EPOCH);
            !quiet || !self.mark_parked(id)
        });
        self.active = active;
    }

    fn fail_poisoned_sessions(&mut self) {
        let is_poisoned = |session: &crate::dataplane::ports::Session| {
            session.segment.segment().poisoned() || session.memory.is_poisoned()
        };
        let poisoned: Vec<SessionId> =
            self.ports.sessions.iter().filter(|(_, session)| is_poisoned(session)).map(|(id, _)| id).collect();
        for session in poisoned {
            self.ports.fail(session, "a shared segment lost its memory");
        }
    }

    fn apply_waiting_rule(&mut self, now: Instant, pollers: u32) {
        let copiers = self.ports.vnics.iter().filter(|(_, vnic)| vnic.copier.as_ref().is_some_and(|h| h.in_flight > 0));
        let all = 1 + pollers as usize + copiers.count() + self.waiting.pollers.elsewhere() as usize;
        if all > cpu_count() {
            self.waiting.crowded_at = now;
        }
        let crowded = now - self.waiting.crowded_at < SPIN_AGAIN && self.waiting.crowded_at != Instant(0);
        let policy = if crowded { WAIT_YIELD } else { WAIT_SPIN };
        if policy != self.waiting.policy {
            self.waiting.policy = policy;
            self.waiting.waker.set_crowded(crowded);
            for (_, session) in self.ports.sessions.iter() {
                session.segment.set_wait_policy(policy);
            }
        }
    }
}
