//! Declared objects: from a command to the state that is stored and in force.
//!
//! Invariant: what is answered is stored, and what is not stored has no effect. The worker is
//! notified in the order of the commands.
use crate::admission::address_map::AddressMap;
use crate::base::log::{info, warning};
use crate::control::thread::Control;
use crate::control::vnic_room;
use freeflow_orchestrator::access::AccessTable;
use freeflow_orchestrator::objects::ObjectKind;
use freeflow_orchestrator::store::{Committed, StoreError};
use freeflow_orchestrator::{Change, Command, Outcome, Reason, Refusal, Writer};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

impl Control {
    /// Plans, stores and adopts a command, and sets all in motion that follows from it: what the
    /// worker has to know is on its way to it when this returns. Until it is stored the control
    /// thread goes round, see `storing`. `dry_run`: what it would come to; nothing is changed.
    pub(crate) fn command(&mut self, command: Command, dry_run: bool) -> Result<Vec<Outcome>, Refusal> {
        self.command_by(&Writer::Hand, command, dry_run)
    }

    /// The same, by this writer.
    pub(crate) fn command_by(
        &mut self,
        writer: &Writer,
        command: Command,
        dry_run: bool,
    ) -> Result<Vec<Outcome>, Refusal> {
        self.with_command(|control| control.carry_out(writer, command, dry_run))
    }

    fn carry_out(&mut self, writer: &Writer, command: Command, dry_run: bool) -> Result<Vec<Outcome>, Refusal> {
        let plan = self.state.plan_by(writer, &command)?;
        self.check_lease(&plan.results)?;
        if dry_run || plan.writes.is_empty() {
            return Ok(plan.results);
        }
        let mut listeners = self.prepare_vnics(&plan.results)?;
        let transaction = self.state.transaction(&plan);
        let stored = match self.commit(transaction) {
            Ok(Committed::Done(revision)) => Ok(revision),
            Ok(Committed::Conflict(_)) => Err("somebody else has written to the store".to_owned()),
            Err(StoreError::Full) => Err("no space is left for what is to be stored".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let revision = stored.map_err(|why| {
            warning!("can't store a command", error = why);
            listeners.keys().for_each(|id| self.remove_directory(id));
            Refusal::new(Reason::Internal, why)
        })?;
        // A command that attaches or detaches one for a container sets up its interface, and it is no device for
        // others.
        let is_declaring = match &command {
            Command::Apply { objects } | Command::ApplyForCluster { objects } => {
                objects.iter().any(|object| object.kind() == ObjectKind::Vnic)
            }
            Command::Delete { kind, .. } => *kind == ObjectKind::Vnic,
            _ => false,
        };
        let touched = self.touched(&plan);
        self.state.adopt(&plan, revision);
        self.publish_changes(touched);
        let results = plan.into_results(revision);
        self.take_effect(&results, &mut listeners);
        if is_declaring {
            self.network_notifier.notify();
        }
        Ok(results)
    }

    /// Directories and sockets of all vNICs that a plan makes.
    fn prepare_vnics(&mut self, results: &[Outcome]) -> Result<BTreeMap<String, OwnedFd>, Refusal> {
        let mut listeners = BTreeMap::new();
        let is_new = |outcome: &&Outcome| outcome.kind == ObjectKind::Vnic && outcome.what == Change::Created;
        let new = results.iter().filter(is_new);
        if let Some(first) = new.clone().next() {
            let present = self.vnics_by_id.len() + self.making.len();
            vnic_room::check(&self.config.run_dir, present, new.clone().count())
                .map_err(|why| Refusal::new(Reason::Exhausted, why).about(ObjectKind::Vnic, &first.name))?;
        }
        for Outcome { name, .. } in new {
            match self.prepare_vnic(name) {
                Ok(listener) => {
                    listeners.insert(name.clone(), listener);
                }
                Err(error) => {
                    listeners.keys().for_each(|id| self.remove_directory(id));
                    let why = format!("can't make its directory and socket: {error}");
                    return Err(Refusal::new(Reason::Internal, why).about(ObjectKind::Vnic, name));
                }
            }
        }
        Ok(listeners)
    }

    fn take_effect(&mut self, results: &[Outcome], listeners: &mut BTreeMap<String, OwnedFd>) {
        self.choose_mode();
        let (mut policy, mut access, mut vnics) = (false, false, Vec::new());
        for Outcome { kind, name, what, .. } in results {
            if *what == Change::Unchanged {
                continue;
            }
            if *kind != ObjectKind::Vnic {
                info!("declared", kind = kind, name = name, what = format!("{what:?}").to_lowercase());
            }
            match (kind, what) {
                (ObjectKind::Vnic, Change::Deleted) => self.end_vnic(name),
                (ObjectKind::Vnic, _) => vnics.push(name.as_str()),
                (ObjectKind::Network, what) => {
                    (policy, access) = (true, true);
                    if matches!(what, Change::Created | Change::Deleted) {
                        self.network_notifier.notify();
                    }
                    if *what != Change::Configured {
                        self.peers.network(name, self.state.network(name).map(|network| network.id));
                    }
                }
                (ObjectKind::QosClass | ObjectKind::Quota, _) => policy = true,
                (ObjectKind::Group | ObjectKind::AccessRule, _) => access = true,
                (ObjectKind::Host, _) => {}
            }
        }
        // Before anybody can talk in a new network.
        if access {
            let view = self.state.access();
            self.set_access(AccessTable::of(view), AddressMap::of(view));
        }
        if policy {
            self.publish_policy();
        }
        let changed: Vec<_> = vnics.iter().filter_map(|id| self.vnics_by_id.get(*id).copied()).collect();
        // A new vNIC may be the first of its class: the limit that it shares is there before it.
        if !vnics.is_empty() {
            self.publish_vnics(&changed);
        }
        for id in vnics {
            if let Some(listener) = listeners.remove(id) {
                self.make_vnic(id, listener);
            }
        }
        // It may have ended while the command was stored.
        self.look_at_lease();
    }
}
