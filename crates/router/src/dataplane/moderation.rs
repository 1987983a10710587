//! Moderation of a CQ's notifications: a channel is told only after so many completions, or so long after the first.
//!
//! Idle costs nothing: only a CQ that is moderated by time and has completions that its channel was not told of has a
//! place in the schedule, which the worker's sleep respects.
use crate::dataplane::ports::{DeferredDrop, Notify, Rings};
use freeflow_engine::CqId;
use freeflow_verbs::{Duration, Instant};
use std::collections::BTreeSet;

/// Of one CQ.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moderation {
    /// 0: completions alone never suffice, unless `period` is 0 too.
    count: u32,
    /// 0: time alone never suffices.
    period: Duration,
    /// Completions that the channel has not been told of.
    pending: u32,
    /// In the schedule.
    due: Option<Instant>,
    /// The channel is to be told at the end of this turn.
    called: bool,
}

/// When CQs are due.
pub type Schedule = BTreeSet<(Instant, CqId)>;

impl Moderation {
    /// Completions that suffice.
    fn enough(&self) -> u32 {
        match (self.count, self.period) {
            (0, Duration(0)) => 1,
            (0, _) => u32::MAX,
            (count, _) => count,
        }
    }
}

impl Rings {
    /// A completion was written into the ring of a CQ with a channel.
    #[inline]
    pub fn note_completion(&mut self, id: CqId, solicited: bool) {
        let Some(cq) = self.cqs.get_mut(id) else { return };
        if solicited {
            cq.notify = Notify::Solicited;
        } else if cq.notify == Notify::Nothing {
            cq.notify = Notify::Completions;
        }
        let moderation = &mut cq.moderation;
        moderation.pending = moderation.pending.saturating_add(1);
        if moderation.called {
            return;
        }
        if moderation.pending >= moderation.enough() {
            self.call(id);
        } else {
            self.appoint(id);
        }
    }

    /// The library armed the CQ while completions stood in it that came when it was not armed: they count as one new one.
    pub fn handle_armed_late(&mut self, id: CqId) {
        let Some(cq) = self.cqs.get_mut(id) else { return };
        if cq.channel.is_none() || cq.moderation.called {
            return;
        }
        // The library looked at what it armed for.
        cq.notify = Notify::Solicited;
        if cq.moderation.period == Duration(0) || cq.moderation.count == 1 {
            self.call(id);
        } else {
            cq.moderation.pending = cq.moderation.pending.max(1);
            self.appoint(id);
        }
    }

    /// Gives a CQ that is moderated by time its place in the schedule, if it has none.
    fn appoint(&mut self, id: CqId) {
        let now = self.now;
        let Some(moderation) = self.cqs.get_mut(id).map(|cq| &mut cq.moderation) else { return };
        if moderation.due.is_none() && moderation.period > Duration(0) {
            let due = now + moderation.period;
            moderation.due = Some(due);
            self.schedule.insert((due, id));
        }
    }

    /// The channel of this CQ is told at the end of the turn, if the CQ is armed.
    fn call(&mut self, id: CqId) {
        let Some(cq) = self.cqs.get_mut(id) else { return };
        if let Some(due) = cq.moderation.due.take() {
            self.schedule.remove(&(due, id));
        }
        if !std::mem::replace(&mut cq.moderation.called, true) {
            self.notify.push(id);
        }
    }

    /// The channel is told of everything so far; whether that includes something solicited.
    pub fn begin_notifying(&mut self, id: CqId) -> bool {
        let Some(cq) = self.cqs.get_mut(id) else { return false };
        (cq.moderation.pending, cq.moderation.called) = (0, false);
        std::mem::replace(&mut cq.notify, Notify::Nothing) == Notify::Solicited
    }

    /// What was held back until now is held back no longer.
    pub fn moderate(&mut self, id: CqId, count: u16, period: Duration) -> bool {
        let Some(cq) = self.cqs.get_mut(id) else { return false };
        (cq.moderation.count, cq.moderation.period) = (u32::from(count), period);
        if cq.moderation.pending > 0 {
            self.call(id);
        }
        true
    }

    /// Calls the CQs whose time has come.
    pub fn expire_moderation(&mut self) {
        while let Some(&(due, id)) = self.schedule.first()
            && due <= self.now
        {
            self.schedule.pop_first();
            self.call(id);
        }
    }

    pub fn remove_cq(&mut self, id: CqId) -> DeferredDrop {
        let Some(cq) = self.cqs.remove(id) else { return Vec::new() };
        if let Some(due) = cq.moderation.due {
            self.schedule.remove(&(due, id));
        }
        if let Some(channel) = cq.channel {
            self.pipes.stop_waiting(channel, id);
        }
        if let Some(session) = self.sessions.get_mut(cq.session) {
            session.cq_bells.remove(&cq.cookie);
        }
        vec![Box::new(cq)]
    }
}
