//! When the channels of completion queues are notified; how much they wait for is in
//! [`moderation`](crate::dataplane::moderation).
use crate::base::deferred_drop::DeferredDrop;
use crate::dataplane::ports::{Notify, Ports};
use freeflow_engine::CqId;
use freeflow_verbs::Duration;

impl Ports {
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

    /// There are completions past the router, and nobody says how many: as many as the CQ waits for.
    pub fn note_some(&mut self, id: CqId, solicited: bool) {
        let Some(cq) = self.cqs.get_mut(id) else { return };
        let moderation = &mut cq.moderation;
        let enough = moderation.enough();
        if enough != u32::MAX {
            moderation.pending = moderation.pending.max(enough - 1);
        }
        self.note_completion(id, solicited);
    }

    /// The library armed the CQ while completions stood in it that came when it was not armed: they
    /// count as one new one.
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

    /// The channel of this CQ is notified at the end of the turn, if the CQ is armed.
    fn call(&mut self, id: CqId) {
        let Some(cq) = self.cqs.get_mut(id) else { return };
        if let Some(due) = cq.moderation.due.take() {
            self.schedule.remove(&(due, id));
        }
        if !std::mem::replace(&mut cq.moderation.called, true) {
            self.notify.push(id);
        }
    }

    /// The channel is notified of everything so far; whether that includes something solicited.
    pub fn begin_notifying(&mut self, id: CqId) -> bool {
        let Some(cq) = self.cqs.get_mut(id) else { return false };
        (cq.moderation.pending, cq.moderation.called) = (0, false);
        std::mem::replace(&mut cq.notify, Notify::Nothing) == Notify::Solicited
    }

    /// Events that were held back until now are held back no longer.
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
