//! Lease of the cluster's addresses: when it is over, the vNICs in the cluster's networks are stopped, also those that
//! are declared, and no new one is made until the host has a lease again.
//!
//! Stopped at once means at the worker; that they are gone is stored after that, as often as it takes. So a store
//! that does not answer keeps no address in use.
use crate::api::plane::{ChangeLease, NoteCluster, ReadLease, ReadWholeLease, ReplyTo, Serve};
use crate::audit::Entry;
use crate::base::lease::{Lease, LeaseStatus};
use crate::base::log::{info, warning};
use crate::control::store_slot::QueuedCommand;
use crate::control::thread::{Control, Topic};
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{Change, Command, DEFAULT_NETWORK, Outcome, Reason, Refusal};
use freeflow_shm::boottime_ns;
use rustix::event::epoll;
use std::io;
use std::os::fd::AsFd;

/// vNICs that are stopped and still stored are looked at again after this time.
const AGAIN_NS: u64 = 3_000_000_000;

impl Control {
    /// From now on the end of the lease is heard. Before any vNIC is made: whether they may be.
    pub(crate) fn watch_lease(&mut self) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        self.watch(self.leasing.timer.as_fd(), Topic::Lease, flags)?;
        self.look_at_lease();
        Ok(())
    }

    /// Whether a vNIC of a network may not be, because the host has no lease of the network's addresses.
    pub(crate) fn is_unleased(&self, network: &str) -> bool {
        let is_barred = || self.leasing.lease.as_ref().is_some_and(|lease| lease.barred.contains(network));
        network != DEFAULT_NETWORK && (self.leasing.has_ended() || is_barred())
    }

    /// Refuses a plan that makes vNICs for which there is no lease.
    ///
    /// # Errors
    /// `Forbidden`.
    pub(crate) fn check_lease(&self, results: &[Outcome]) -> Result<(), Refusal> {
        for outcome in results.iter().filter(|outcome| outcome.what == Change::Created) {
            let AnyObject::Vnic(vnic) = &outcome.object else { continue };
            if self.is_unleased(&vnic.spec.network) {
                let why = "this host has no lease of the cluster's addresses: it has not reached etcd for long, or waits \
                           for a controller to give it a block; see freeflow cluster status";
                return Err(Refusal::new(Reason::Forbidden, why).about(ObjectKind::Vnic, &outcome.name));
            }
        }
        Ok(())
    }

    /// All vNICs that the lease is for.
    fn leased_vnics(&self) -> Vec<String> {
        let leased = self.state.vnics().filter(|vnic| vnic.network() != DEFAULT_NETWORK);
        leased.map(|vnic| vnic.id().to_owned()).collect()
    }

    /// Stops what the lease was for, if it is over; else waits for its end.
    pub(crate) fn look_at_lease(&mut self) {
        if !self.leasing.has_ended() {
            if let Some(lease) = &self.leasing.lease {
                self.leasing.ring_at(lease.until_ns);
            }
            return;
        }
        let vnics = self.leased_vnics();
        if !std::mem::replace(&mut self.leasing.is_over, true) {
            warning!("the host's lease of the cluster's addresses is over", vnics_stopped = vnics.len());
            self.audit.note(Entry::Router { what: "lease ended" });
        }
        for id in &vnics {
            self.end_vnic(id);
        }
        if !vnics.is_empty() {
            // Their interfaces go.
            self.network_notifier.notify();
            self.leasing.ring_at(boottime_ns() + AGAIN_NS);
            self.when_stored(QueuedCommand::ForgetLeased);
        }
    }

    /// Stores that the vNICs that were stopped are gone.
    pub(crate) fn forget_leased(&mut self) {
        // A lease that has begun again is for vNICs of its own: it does not while some of before are left.
        let vnics = if self.leasing.is_over { self.leased_vnics() } else { Vec::new() };
        for id in vnics {
            if let Err(refusal) = self.command(Command::Detach { id }, false) {
                warning!("can't store that a vNIC is gone", error = refusal);
                return;
            }
        }
    }

    pub(crate) fn change_lease(&mut self, ChangeLease { change }: ChangeLease) -> Result<Option<Lease>, Refusal> {
        let refused = |reason, why: String| Err(Refusal::new(reason, why));
        if !self.config.follows_cluster {
            return refused(Reason::Invalid, "this host follows no cluster".into());
        }
        self.look_at_lease();
        // A vNIC of before that is being stored would be one of the lease that begins.
        if self.leasing.is_over && (self.has_command() || !self.leased_vnics().is_empty()) {
            return refused(Reason::Conflict, "the lease is over: vNICs are being stopped, or stored".into());
        }
        let now = (self.leasing.boot.as_str(), boottime_ns());
        match Lease::changed(self.leasing.lease.as_ref(), self.leasing.is_over, change, now) {
            Err(why) => refused(Reason::Conflict, why),
            Ok(lease) => {
                // One that is over from the beginning ends nothing.
                let is_first = self.leasing.lease.is_none() && !self.has_command() && self.leased_vnics().is_empty();
                self.leasing.lease = lease.clone();
                let is_over = is_first && self.leasing.has_ended();
                if std::mem::replace(&mut self.leasing.is_over, is_over) {
                    info!("the host has a lease of the cluster's addresses again");
                    self.audit.note(Entry::Router { what: "lease renewed" });
                }
                self.look_at_lease();
                Ok(lease)
            }
        }
    }
}

impl Serve<ReadLease> for Control {
    fn serve(&mut self, ReadLease {}: ReadLease, reply: ReplyTo<LeaseStatus>) {
        reply.give(self.leasing.status());
    }
}

impl Serve<ReadWholeLease> for Control {
    fn serve(&mut self, ReadWholeLease {}: ReadWholeLease, reply: ReplyTo<Option<Lease>>) {
        reply.give(self.leasing.lease.clone());
    }
}

impl Serve<ChangeLease> for Control {
    fn serve(&mut self, call: ChangeLease, reply: ReplyTo<Result<Option<Lease>, Refusal>>) {
        let done = self.change_lease(call);
        reply.give(done);
    }
}

impl Serve<NoteCluster> for Control {
    fn serve(&mut self, NoteCluster { is_away }: NoteCluster, reply: ReplyTo<()>) {
        let what = if is_away { "cluster lost" } else { "cluster regained" };
        self.audit.note(Entry::Router { what });
        reply.give(());
    }
}
