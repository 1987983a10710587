//! Access rules: what they name has to be there, and their tenant's.
use super::{Draft, check_tenant, refuse_if_bad};
use crate::check::Findings;
use crate::command::Refusal;
use crate::objects::{AccessRule, EndSelector, ObjectKind, Typed};
use crate::share::entries_of_rule;
use alloc::format;

impl Draft<'_> {
    pub(super) fn rule(&mut self, at: usize, given: &Typed<AccessRule>) -> Result<(), Refusal> {
        let (kind, name) = (ObjectKind::AccessRule, given.metadata.name.as_str());
        let mut findings = Findings::default();
        findings.metadata(&given.metadata);
        findings.labels("metadata.labels", &given.metadata.labels);
        findings.rule(&given.spec);
        self.check_end(&mut findings, "spec.from", &given.spec.from, &given.spec.tenant);
        self.check_end(&mut findings, "spec.to", &given.spec.to, &given.spec.tenant);
        let old = self.state.rules.get(name);
        check_tenant(&mut findings, &given.spec.tenant, old.map(|old| old.spec.tenant.as_str()));
        refuse_if_bad(findings, kind, name)?;
        let (object, what) = self.settle::<AccessRule>(kind, given, old)?;
        let before = old.map_or(0, |old| entries_of_rule(&old.spec));
        let selected = self.shares.select(self.state, &given.spec.tenant, before, entries_of_rule(&given.spec));
        selected.map_err(|refusal| refusal.about(kind, name))?;
        let joined = self.shares.join(self.state, old.map(|old| &old.spec), &given.spec);
        joined.map_err(|refusal| refusal.about(kind, name))?;
        self.note::<AccessRule>(at, kind, (&object, what), |stored| stored)?;
        Ok(())
    }

    fn check_end(&self, findings: &mut Findings, at: &str, end: &EndSelector, tenant: &str) {
        if let Some(network) = &end.network {
            self.check_network(findings, format!("{at}.network"), network, tenant);
        }
        let Some(name) = &end.group else { return };
        if self.group(name).is_none_or(|group| group.spec.tenant != tenant) {
            findings.add(format!("{at}.group"), format!("tenant {tenant} has no Group {name}"));
        }
    }
}
