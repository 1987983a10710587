//! Changes of a command, for the feed of the REST server.
use crate::api::feed::{Change, Touched, side};
use crate::control::thread::Control;
use freeflow_orchestrator::objects::ObjectKind;
use freeflow_orchestrator::{Plan, object_of_key};

impl Control {
    /// To be called before a plan is adopted, and [`Self::publish_changes`] after.
    pub(crate) fn touched(&self, plan: &Plan) -> Touched {
        if !self.feed.is_on() {
            return Touched(Vec::new());
        }
        let objects = plan.writes.iter().filter_map(|(key, _)| object_of_key(key));
        Touched(objects.map(|(kind, name)| (kind, name.to_owned(), side(self.declared(), kind, name))).collect())
    }

    pub(crate) fn publish_changes(&self, touched: Touched) {
        let revision = self.declared().revision();
        let changes = touched.0.into_iter().filter_map(|(kind, name, before)| {
            let after = side(self.declared(), kind, &name);
            (before.is_some() || after.is_some()).then_some(Change { revision, before, after, is_status: false })
        });
        let changes: Vec<Change> = changes.collect();
        if !changes.is_empty() {
            self.feed.put(changes);
        }
    }

    /// A vNIC is in another phase.
    pub(crate) fn publish_phase(&self, id: &str) {
        if !self.feed.is_on() {
            return;
        }
        let Some(side) = side(self.declared(), ObjectKind::Vnic, id) else { return };
        let revision = self.declared().revision();
        self.feed.put(vec![Change { revision, before: Some(side.clone()), after: Some(side), is_status: true }]);
    }
}
