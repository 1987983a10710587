//! Lines of the audit log for what is done to this host and is no change of an object: `freeflow
//! peers reload`, `wire faults`, `capture`, `down`; and what more is known of a change to a vNIC.
use crate::api::caller::Caller;
use crate::api::failure;
use crate::audit::{About, Entry, Who};
use crate::base::slab::Key;
use crate::control::thread::Control;
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{Command, Outcome, Refusal};
use freeflow_protocol::admin::{AdminErrorCode, AdminReply, WireFaults};

/// As the REST server calls it.
fn word(code: AdminErrorCode) -> &'static str {
    match code {
        AdminErrorCode::Invalid => "Invalid",
        AdminErrorCode::NotFound => "NotFound",
        AdminErrorCode::AlreadyExists => "AlreadyExists",
        AdminErrorCode::Exhausted => "Exhausted",
        AdminErrorCode::NotPermitted => "Forbidden",
        AdminErrorCode::Io => "Internal",
    }
}

/// The faults that are in force.
pub fn faults_text(faults: &WireFaults) -> String {
    let WireFaults { seed, loss_ppm, duplicate_ppm, reorder_ppm, delay_ppm, delay_ns, corrupt_ppm } = *faults;
    let all = [
        ("seed", seed),
        ("loss_ppm", loss_ppm.into()),
        ("duplicate_ppm", duplicate_ppm.into()),
        ("reorder_ppm", reorder_ppm.into()),
        ("delay_ppm", delay_ppm.into()),
        ("delay_ns", delay_ns),
        ("corrupt_ppm", corrupt_ppm.into()),
    ];
    let set = all.iter().filter(|(_, value)| *value != 0).map(|(name, value)| format!("{name}={value}"));
    set.collect::<Vec<_>>().join(" ")
}

impl Control {
    /// The process at the other end of an admin connection.
    pub(crate) fn admin_who(&self, key: Key) -> Who {
        Caller::root(self.admin_pid(key)).who
    }

    /// Something was done to this host.
    pub(crate) fn note_done(&self, who: Who, verb: &'static str, outcome: &'static str, detail: String) {
        let about = Box::new(About { detail, ..About::default() });
        let (kind, name) = (ObjectKind::Host.name().to_owned(), self.config.host_name());
        self.audit.note(Entry::Change { who, verb, kind, name, outcome, revision: None, about });
    }

    /// Notes it if this is a refusal.
    pub(crate) fn note_failed(&self, who: Who, verb: &'static str, (kind, name): (&str, &str), reply: &AdminReply) {
        let AdminReply::Failed { code, message } = reply else { return };
        self.audit.note_some(who.originator(), |left_out| {
            Entry::refused(who, verb, (kind, name), (word(*code), message), left_out)
        });
    }

    /// Records a request about this host, as done or as refused.
    pub(crate) fn note_result(
        &self,
        who: Who,
        verb: &'static str,
        (outcome, detail): (&'static str, String),
        result: &Result<(), Refusal>,
    ) {
        let Err(refusal) = result else { return self.note_done(who, verb, outcome, detail) };
        self.audit.note_some(who.originator(), |left_out| {
            let (kind, name) = (ObjectKind::Host.name(), self.config.host_name());
            let why = (failure::word(refusal.reason), refusal.message.as_str());
            Entry::refused(who, verb, (kind, &name), why, left_out)
        });
    }

    /// The same of what is about this host; it is noted as done otherwise.
    pub(crate) fn note_reply(
        &self,
        who: Who,
        verb: &'static str,
        (outcome, detail): (&'static str, String),
        reply: &AdminReply,
    ) {
        match reply {
            AdminReply::Failed { .. } => {
                self.note_failed(who, verb, (ObjectKind::Host.name(), &self.config.host_name()), reply);
            }
            _ => self.note_done(who, verb, outcome, detail),
        }
    }

    /// A container that has a declared vNIC, or has it no more.
    pub(crate) fn note_occupied(&self, who: Who, id: &str, container: &str, occupied: bool) {
        let Some(vnic) = self.state.vnic(id) else { return };
        let (verb, outcome) = if occupied { ("attach", "attached") } else { ("detach", "detached") };
        let (network, addresses) = (vnic.network().to_owned(), vnic.object.spec.addresses.clone());
        let about = Box::new(About { network, addresses, container: container.into(), ..About::default() });
        let (kind, name) = (ObjectKind::Vnic.name().to_owned(), id.to_owned());
        self.audit.note(Entry::Change { who, verb, kind, name, outcome, revision: None, about });
    }

    /// The container that a command is about; to be asked before it is done.
    pub(crate) fn container_of(&self, command: &Command) -> String {
        match command {
            Command::Attach { title, .. } => title.clone(),
            Command::Detach { id } => {
                let vnic = self.state.vnic(id).filter(|vnic| vnic.is_of_container());
                vnic.map(|vnic| vnic.title.clone()).unwrap_or_default()
            }
            _ => String::new(),
        }
    }
}

/// Facts about an object besides its name.
pub fn about(outcome: &Outcome, container: &str) -> About {
    match &outcome.object {
        AnyObject::Vnic(vnic) => {
            let (network, addresses) = (vnic.spec.network.clone(), vnic.spec.addresses.clone());
            About { network, addresses, container: container.into(), ..About::default() }
        }
        _ => About::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_plain_words() {
        let faults = WireFaults { seed: 7, loss_ppm: 1000, ..WireFaults::default() };
        assert_eq!(faults_text(&faults), "seed=7 loss_ppm=1000");
        assert_eq!(faults_text(&WireFaults::default()), "");
    }
}
