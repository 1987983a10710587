//! XRC target QPs: no rings, and several processes that see their events.
use freeflow_engine::{ContextId, QpId, SessionId};
use std::collections::BTreeMap;

/// A process that has the QP open, once for each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Viewer {
    pub session: SessionId,
    pub context: ContextId,
    pub cookie: u32,
}

#[derive(Default)]
struct Target {
    viewers: Vec<Viewer>,
    /// It has something to say to a peer on another host, and waits for its turn.
    listed: bool,
}

#[derive(Default)]
pub struct Targets(BTreeMap<QpId, Target>);

impl Targets {
    pub fn insert(&mut self, id: QpId, viewer: Viewer) {
        self.0.entry(id).or_default().viewers.push(viewer);
    }

    pub fn viewers(&self, id: QpId) -> &[Viewer] {
        self.0.get(&id).map_or(&[], |target| target.viewers.as_slice())
    }

    /// Whether it waits for its turn; and from now on it does, or not. `None`: there is no such target.
    pub fn set_listed(&mut self, id: QpId, listed: bool) -> Option<bool> {
        self.0.get_mut(&id).map(|target| std::mem::replace(&mut target.listed, listed))
    }

    pub fn contains(&self, id: QpId) -> bool {
        self.0.contains_key(&id)
    }

    pub(crate) fn retain(&mut self, id: QpId, keep: impl Fn(&Viewer) -> bool) {
        if let Some(target) = self.0.get_mut(&id) {
            target.viewers.retain(keep);
            if target.viewers.is_empty() {
                self.0.remove(&id);
            }
        }
    }

    /// Of a session that ends; `ids` are its QPs, of any type.
    pub fn remove_session(&mut self, session: SessionId, ids: &[QpId]) {
        for &id in ids {
            self.retain(id, |viewer| viewer.session != session);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_there_as_long_as_somebody_sees_it() {
        let viewer = |session, cookie| Viewer {
            session: SessionId { index: session, generation: 0 },
            context: ContextId { index: 0, generation: 0 },
            cookie,
        };
        let (id, other) = (QpId { index: 1, generation: 0 }, QpId { index: 2, generation: 0 });
        let mut targets = Targets::default();
        for viewer in [viewer(1, 1), viewer(1, 2), viewer(2, 1)] {
            targets.insert(id, viewer);
        }
        targets.retain(id, |one| one != &viewer(1, 1));
        assert_eq!(targets.viewers(id), [viewer(1, 2), viewer(2, 1)]);
        targets.remove_session(viewer(1, 2).session, &[other, id]);
        assert_eq!(targets.viewers(id), [viewer(2, 1)]);
        targets.remove_session(viewer(2, 1).session, &[id]);
        assert!(!targets.contains(id) && targets.viewers(other).is_empty());
    }
}
