//! Access rules between the threads: the control thread gives them out, both sides enforce them,
//! what they refuse is reported.
use crate::admission::access::{Incident, RuleCounts, Rules, ViolationRecord};
use crate::admission::address_map::AddressMap;
use crate::admission::violations::{self, Resource, Share, ViolationClass, quota_field};
use crate::audit::{Class, Refusal};
use crate::base::log::info;
use crate::base::slab::Key;
use crate::control::shards::parties;
use crate::control::thread::Control;
use crate::control::vnic_entry::identity_of;
use crate::dataplane::command::{SetAccessRules, SetVnicIdentity};
use crate::dataplane::worker::Worker;
use freeflow_orchestrator::access::AccessTable;
use freeflow_shm::monotonic_ns;
use freeflow_verbs::{Gid, Instant};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Connections of rdma_cm that are looked at in a round of the control thread when policy has changed.
const ROUND_CONNECTIONS_MAX: usize = 32;
/// How old the line before a sum may be, nanoseconds: sums come late where the router has much to do.
const BLAMED_TIME_NS: u64 = 2 * violations::INTERVAL.0;

impl Control {
    /// These rules are in force from now on: for what is asked for as soon as the worker has taken
    /// them, for what stands within milliseconds.
    pub(crate) fn set_access(&mut self, table: AccessTable, address_map: AddressMap) {
        let before = self.cm.access().rules().cloned();
        let gone = before.as_ref().map_or_else(Vec::new, |before| before.address_map.gone(&address_map));
        let rules = Arc::new(Rules::new(table, address_map, before.as_deref()));
        self.set_cm_rules(rules.clone());
        self.workers.send_all(|_| SetAccessRules { rules: rules.clone(), gone: gone.clone() });
    }

    /// How often a rule has refused something on this host, and how many connections it has
    /// disconnected; no rule: the networks' own `access`.
    pub(crate) fn access_counts(&mut self, rule: Option<&str>) -> RuleCounts {
        let rules = self.cm.access().rules();
        rules.and_then(|rules| rules.counts_of(rule)).map(|counts| counts.get()).unwrap_or_default()
    }

    /// The same before the worker has its thread.
    pub(crate) fn restore_access(&mut self, workers: &mut [Worker]) {
        let view = self.state.access();
        let rules = Arc::new(Rules::new(AccessTable::of(view), AddressMap::of(view), None));
        self.set_cm_rules(rules.clone());
        for worker in workers {
            worker.ports.access.set_rules(rules.clone());
        }
    }

    /// A vNIC has other labels now.
    pub(crate) fn announce_identity(&mut self, key: Key) {
        let Some(entry) = self.vnics.get(key) else { return };
        let gids: Vec<Gid> = entry.record.gids().collect();
        let shard = entry.engine_id.shard();
        let (identity, name) = (identity_of(&entry.record), entry.record.network.clone());
        let Some(network) = self.state.network(&name).map(|network| network.id) else { return };
        for &gid in &gids {
            self.cm.access().set_vnic(network, gid, identity.clone());
            self.peers.attached(&name, gid, identity.clone());
        }
        self.tell_siblings(shard, &parties(network, &gids, &identity));
        self.workers.of(shard).send(SetVnicIdentity { network, gids, identity });
    }

    /// Each is a line of the audit log, and of the router's; a vNIC that has too many of them loses
    /// lines of its own alone. Disconnections have their own quota of lines.
    pub(crate) fn report_incidents(&mut self, incidents: Vec<Incident>) {
        for incident in incidents {
            let Incident { deed, network, vnic, from, to, target, rule, count } = incident;
            let vnic = vnic.unwrap_or_else(|| from.to_string());
            let rule = rule.unwrap_or_else(|| format!("Network {network}"));
            let refusal = || Refusal {
                what: deed.name(),
                tenant: self.state.network(&network).map_or(String::new(), |network| network.tenant().to_owned()),
                vnic: vnic.clone(),
                peer: to.to_string(),
                rule: rule.clone(),
                target_network: target.clone().unwrap_or_default(),
                count,
                ..Refusal::default()
            };
            let class = if deed.is_disconnection() { Class::Disconnection } else { Class::Rule };
            self.audit.refusal(class, number_of(&(&vnic, deed.name())), refusal);
            if self.may_log(&vnic) {
                let what = deed.name();
                info!(
                    "access",
                    what = what,
                    network = network,
                    vnic = vnic,
                    from = from,
                    to = to,
                    rule = rule,
                    count = count
                );
            }
        }
    }

    /// The same of what leads nowhere, most of all to other tenants. Each kind has lines of its
    /// own, so that one does not hide another.
    pub(crate) fn report_violations(&mut self, violations: Vec<ViolationRecord>) {
        for violation in violations {
            let ViolationRecord { class, network, vnic, from, peer, owner, count } = violation;
            let (what, vnic) = (class.name(), vnic.unwrap_or_else(|| from.to_string()));
            if let ViolationClass::Quota(share, resource) = class {
                self.report_shortage(&vnic, (share, resource), count);
                continue;
            }
            let class = if owner.is_some() { Class::Others } else { Class::Nobody };
            self.audit.refusal(class, number_of(&(&vnic, what)), || Refusal {
                what,
                tenant: self.state.network(&network).map_or(String::new(), |network| network.tenant().to_owned()),
                vnic: vnic.clone(),
                peer: peer.clone(),
                rule: format!("Network {network}"),
                target_network: owner.clone().unwrap_or_default(),
                count,
                ..Refusal::default()
            });
            if self.may_log(&vnic) {
                let target = owner.unwrap_or_default();
                info!(
                    "policy violation",
                    what = what,
                    network = network,
                    vnic = vnic,
                    peer = peer,
                    target_network = target,
                    count = count
                );
            }
        }
    }

    /// A program of a vNIC got ENOMEM so often. That a limit of the router's own was in the way is no quota's doing.
    fn report_shortage(&mut self, id: &str, (share, resource): (Share, Resource), count: u64) {
        let Some(quota) = self.quota_to_blame(id, share, resource) else { return };
        let what = ViolationClass::Quota(share, resource).name();
        let network = self.state.vnic(id).map_or(String::new(), |vnic| vnic.network().to_owned());
        let ran_out = quota_field(share, resource);
        self.audit.refusal(Class::Quota, number_of(&(id, what)), || Refusal {
            what,
            tenant: self.state.network(&network).map_or(String::new(), |network| network.tenant().to_owned()),
            vnic: id.to_owned(),
            rule: format!("Quota {quota}"),
            ran_out,
            count,
            ..Refusal::default()
        });
        if self.may_log(id) {
            info!("quota refused", network = network, vnic = id, quota = quota, ran_out = ran_out, count = count);
        }
    }

    /// A sum may count for a Quota that has gone, or has got wider, since the line before: then
    /// that has it.
    fn quota_to_blame(&mut self, id: &str, share: Share, resource: Resource) -> Option<String> {
        let found = self.quota_behind(id, share, resource);
        let Some(entry) = self.vnics_by_id.get(id).and_then(|&key| self.vnics.get_mut(key)) else { return found };
        let now_ns = monotonic_ns();
        if let Some(quota) = &found {
            entry.blamed.insert((share, resource), (quota.clone(), now_ns));
            return found;
        }
        let (quota, reported_ns) = entry.blamed.remove(&(share, resource))?;
        (now_ns.saturating_sub(reported_ns) <= BLAMED_TIME_NS).then_some(quota)
    }

    /// The Quota that sets a vNIC's limit, or its network's.
    fn quota_behind(&self, id: &str, share: Share, resource: Resource) -> Option<String> {
        let vnic = self.state.vnic(id)?;
        let name = match share {
            Share::Vnic => self.state.quota_name_of(vnic)?,
            Share::Network => self.state.network(vnic.network())?.object.spec.quota.as_deref()?,
        };
        let spec = &self.state.quota(name)?.spec;
        let amounts = if share == Share::Vnic { &spec.per_vnic } else { &spec.per_network };
        let own = &self.config.limits;
        let (most, own) = match resource {
            Resource::Qps => (amounts.qps.map(u64::from), own.qp_count_max.into()),
            Resource::Cqs => (amounts.cqs.map(u64::from), own.cq_count_max.into()),
            Resource::Mrs => (amounts.mrs.map(u64::from), own.mr_count_max.into()),
            Resource::RegisteredBytes => (amounts.registered_bytes.map(|bytes| bytes.0), own.registered_bytes_max),
        };
        // The router's own limits are those of a vNIC.
        most.is_some_and(|most| share == Share::Network || most <= own).then(|| name.to_owned())
    }

    /// Connections of rdma_cm that are not allowed any more are disconnected, some of them in each
    /// round; and what was refused is reported.
    pub(crate) fn follow_cm_policy(&mut self, now: Instant) {
        let incidents = self.cm.follow_policy(now, ROUND_CONNECTIONS_MAX);
        self.report_incidents(incidents);
        let violations = self.cm.access().take_violations(now);
        self.report_violations(violations);
    }
}

/// Distinguishes vNICs, where lines of each are counted.
fn number_of(vnic: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    vnic.hash(&mut hasher);
    hasher.finish()
}
