//! Which queue pairs run, and for how long: they are listed with the engine while there is work, or
//! might be, and it says whose turn it is ([`freeflow_engine::Scheduler`]). One that a limit of
//! rate holds back is not listed: the engine names it in time.
use crate::dataplane::ports::Attention;
use crate::dataplane::worker::Worker;
use freeflow_engine::{Progress, QpId, VnicId};
use freeflow_verbs::{Duration, Instant};

/// Payload that one QP may move before the next has its turn: within memory, and as packets.
const LOCAL_BYTES: u64 = 256 * 1024;
const WIRE_BYTES: u64 = 64 * 1024;
/// The same within memory where a vNIC of a higher priority may have something at any time.
const YIELDING_BYTES: u64 = 64 * 1024;
/// How long a QP is looked at without being rung for after its last request.
const POLL_IDLE: Duration = Duration::from_micros(50);
/// Most work of one turn of the worker for QPs, so that datagrams, jobs and timers are not waited
/// for too long: a QP that was run to its end counts once, one that had more to do [`MORE_EFFORT`]
/// times.
const TURN_EFFORT_MAX: u32 = 256;
const MORE_EFFORT: u32 = 16;

/// Result of a QP's turn.
enum Turned {
    /// Nothing was to be done, or nothing could be; it stays listed.
    Looked,
    /// It leaves the list; whether it was run.
    Left(bool),
    /// It was run, and stays listed. What that cost.
    Ran(u32),
}

impl Worker {
    /// Runs the QP this turn or the next.
    pub fn activate(&mut self, id: QpId) {
        let Some(qp) = self.ports.qps.get_mut(id) else { return self.activate_target(id) };
        let attention = std::mem::replace(&mut qp.attention, Attention::Running);
        if attention == Attention::Doorbell {
            qp.send.set_polled(true);
        }
        if matches!(attention, Attention::Doorbell | Attention::Waiting) {
            let session = qp.session;
            if let Some(vnic) = self.ports.sessions.get(session).map(|session| session.vnic) {
                self.engine.list(vnic, id);
            }
        }
    }

    /// A QP without rings has nothing to send, and at times something to say.
    fn activate_target(&mut self, id: QpId) {
        let viewer = self.ports.targets.viewers(id).first();
        let vnic = viewer.and_then(|viewer| self.ports.sessions.get(viewer.session)).map(|session| session.vnic);
        if let Some(vnic) = vnic
            && self.ports.targets.set_listed(id, true) == Some(false)
        {
            self.engine.list(vnic, id);
        }
    }

    /// Leaves the QP's send queue alone until its doorbell rings: it was reset.
    pub fn deactivate(&mut self, id: QpId) {
        let Some(qp) = self.ports.qps.get_mut(id) else { return };
        qp.send.set_polled(false);
        qp.attention = Attention::Doorbell;
        if let Some(session) = self.ports.sessions.get(qp.session) {
            self.engine.unlist(session.vnic, id);
        }
    }

    pub(crate) fn run_queue_pairs(&mut self, now: Instant) -> bool {
        let (mut busy, mut effort) = (false, 0);
        for _ in 0..self.engine.listed_count() {
            if effort >= TURN_EFFORT_MAX {
                break;
            }
            let Some((vnic, id)) = self.engine.poll_listed() else { break };
            match self.take_turn(now, vnic, id) {
                // Not at once again: it would come before all of lower priorities.
                Turned::Looked => self.looked.push((vnic, id)),
                Turned::Left(ran) => {
                    busy |= ran;
                    effort += u32::from(ran);
                }
                Turned::Ran(cost) => {
                    busy = true;
                    effort += cost;
                    self.engine.list(vnic, id);
                    if cost >= MORE_EFFORT && self.engine.gives_way(vnic) {
                        // A QP that comes before it may have rung meanwhile.
                        break;
                    }
                }
            }
        }
        self.list_looked();
        busy
    }

    /// Runs a QP that has nothing to do, and keeps it in mind if it stays listed.
    pub(crate) fn look_at(&mut self, now: Instant, (vnic, id): (VnicId, QpId)) {
        match self.take_turn(now, vnic, id) {
            Turned::Left(_) => {}
            Turned::Looked | Turned::Ran(_) => self.looked.push((vnic, id)),
        }
    }

    /// QPs that were looked at are listed again.
    pub(crate) fn list_looked(&mut self) {
        for (vnic, id) in self.looked.drain(..) {
            self.engine.list(vnic, id);
        }
    }

    #[inline]
    fn take_turn(&mut self, now: Instant, vnic: VnicId, id: QpId) -> Turned {
        let Some(qp) = self.ports.qps.get_mut(id) else { return self.run_target(now, id) };
        if let Attention::Polled { idle_since } = qp.attention
            && !qp.send.has_next()
        {
            let stays = now - idle_since < POLL_IDLE || !self.rest(id);
            return if stays { Turned::Looked } else { Turned::Left(false) };
        }
        let session = qp.session;
        let (had_next, taken) = (qp.send.has_next(), qp.send.taken());
        self.ports.note_busy(session);
        let budget_bytes = self.budget_bytes(vnic, id);
        let progress = self.engine.run(&mut self.ports, now, id, budget_bytes);
        let Some(qp) = self.ports.qps.get_mut(id) else { return Turned::Left(true) };
        match progress {
            Progress::More => {
                qp.attention = Attention::Running;
                // Where packets find no room, having more of them keeps nobody awake.
                let is_blocked = budget_bytes == WIRE_BYTES && self.ports.fabric.blocked;
                if is_blocked { Turned::Looked } else { Turned::Ran(MORE_EFFORT) }
            }
            Progress::Waiting => {
                qp.attention = Attention::Waiting;
                Turned::Left(true)
            }
            Progress::Idle if had_next && qp.send.taken() == taken => {
                // Its state allows no work: it stays as it is until it is modified, or rung for again.
                qp.send.set_polled(false);
                qp.attention = Attention::Doorbell;
                Turned::Left(true)
            }
            Progress::Idle => {
                qp.attention = Attention::Polled { idle_since: now };
                Turned::Ran(1)
            }
        }
    }

    fn run_target(&mut self, now: Instant, id: QpId) -> Turned {
        if self.ports.targets.set_listed(id, false).is_none() {
            return Turned::Left(false);
        }
        match self.engine.run(&mut self.ports, now, id, WIRE_BYTES) {
            Progress::More => {
                self.ports.targets.set_listed(id, true);
                Turned::Ran(MORE_EFFORT)
            }
            Progress::Waiting | Progress::Idle => Turned::Left(true),
        }
    }

    fn budget_bytes(&self, vnic: VnicId, id: QpId) -> u64 {
        match self.ports.fabric.has_hosts() && self.engine.is_on_wire(id) {
            true => WIRE_BYTES,
            false if self.engine.gives_way(vnic) => YIELDING_BYTES,
            false => LOCAL_BYTES,
        }
    }

    /// From polling back to the doorbell; false if a request came in just then.
    fn rest(&mut self, id: QpId) -> bool {
        let Some(qp) = self.ports.qps.get_mut(id) else { return true };
        qp.send.set_polled(false);
        if qp.send.has_next() {
            qp.send.set_polled(true);
            qp.attention = Attention::Running;
            return false;
        }
        qp.attention = Attention::Doorbell;
        true
    }

    /// Before sleeping: all QPs back to their doorbells; false if there is work.
    pub(crate) fn rest_all(&mut self) -> bool {
        while let Some((vnic, id)) = self.engine.poll_listed() {
            let rests = match self.ports.qps.get(id) {
                Some(qp) => matches!(qp.attention, Attention::Polled { .. }) && self.rest(id),
                None => !self.ports.targets.contains(id),
            };
            if !rests {
                self.engine.list(vnic, id);
                return false;
            }
        }
        true
    }
}
