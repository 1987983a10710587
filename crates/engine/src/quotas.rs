//! Quotas: what a vNIC may hold, and what all vNICs of a network may hold together.
//!
//! A quota is looked at when something is made; NoMemory, as a NIC says that has no more. One that becomes smaller than
//! what is held takes nothing away.
//!
//! Invariant: a network's usage is the sum of its vNICs'.
use crate::{Engine, SessionId, Usage, VnicId};
use alloc::collections::BTreeMap;
use freeflow_verbs::{NetworkId, NetworkLimits, VerbsError, VnicLimits};
use serde::{Deserialize, Serialize};

/// How often something was not made for want of room, by what would have been counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    pub qps: u64,
    pub cqs: u64,
    pub mrs: u64,
    pub registered_bytes: u64,
    /// By limits of all other things, such as SRQs.
    pub others: u64,
}

/// What a vNIC was refused, and by whose limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusalCounts {
    pub by_vnic: Refused,
    pub by_network: Refused,
}

impl Refused {
    fn of(counts: &Usage) -> Self {
        let Usage { qps, cqs, mrs, registered_bytes, .. } = *counts;
        let Usage { sessions, contexts, pds, srqs, mws, xrcds, multicast_groups, ahs, .. } = *counts;
        let others = [sessions, contexts, pds, srqs, mws, xrcds, multicast_groups, ahs];
        Self {
            qps: qps.into(),
            cqs: cqs.into(),
            mrs: mrs.into(),
            registered_bytes,
            others: others.into_iter().map(u64::from).sum(),
        }
    }
}

/// Networks that have vNICs, or limits.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Networks {
    networks: BTreeMap<NetworkId, Network>,
}

#[derive(Default, Serialize, Deserialize)]
struct Network {
    vnic_count: u32,
    limits: NetworkLimits,
    usage: Usage,
}

impl Networks {
    pub fn enter(&mut self, network: NetworkId) {
        self.networks.entry(network).or_default().vnic_count += 1;
    }

    pub fn leave(&mut self, network: NetworkId) {
        if let Some(entry) = self.networks.get_mut(&network) {
            entry.vnic_count -= 1;
            self.forget_if_plain(network);
        }
    }

    pub fn has(&self, network: NetworkId) -> bool {
        self.networks.contains_key(&network)
    }

    fn forget_if_plain(&mut self, network: NetworkId) {
        let is_plain = |entry: &Network| entry.vnic_count == 0 && entry.limits == NetworkLimits::default();
        if self.networks.get(&network).is_some_and(is_plain) {
            self.networks.remove(&network);
        }
    }
}

/// In the words of a vNIC's limits; what has no limit of a network is unlimited.
fn in_words_of_vnic(limits: &NetworkLimits) -> VnicLimits {
    VnicLimits {
        session_count_max: u32::MAX,
        context_count_max: u32::MAX,
        pd_count_max: u32::MAX,
        qp_count_max: limits.qp_count_max.unwrap_or(u32::MAX),
        cq_count_max: limits.cq_count_max.unwrap_or(u32::MAX),
        srq_count_max: u32::MAX,
        mr_count_max: limits.mr_count_max.unwrap_or(u32::MAX),
        mw_count_max: u32::MAX,
        xrcd_count_max: u32::MAX,
        multicast_group_count_max: u32::MAX,
        multicast_attach_count_max: u32::MAX,
        device_memory_bytes_max: u64::MAX,
        ah_count_max: u32::MAX,
        channel_count_max: u32::MAX,
        mapping_count_max: u32::MAX,
        registered_bytes_max: limits.registered_bytes_max.unwrap_or(u64::MAX),
        segment_bytes_max: u64::MAX,
        ring_bytes_max: u64::MAX,
    }
}

impl Engine {
    /// In force for what is made from now on; nothing is taken away.
    pub fn set_limits(&mut self, vnic: VnicId, limits: VnicLimits) -> Result<(), VerbsError> {
        self.vnics.get_mut(vnic).ok_or(VerbsError::NotFound)?.limits = limits;
        Ok(())
    }

    pub fn limits(&self, vnic: VnicId) -> Option<VnicLimits> {
        self.vnics.get(vnic).map(|vnic| vnic.limits)
    }

    /// Of all vNICs of a network together, also of those that come later.
    pub fn set_network_limits(&mut self, network: NetworkId, limits: NetworkLimits) {
        self.networks.networks.entry(network).or_default().limits = limits;
        self.networks.forget_if_plain(network);
    }

    /// What all vNICs of a network hold together.
    pub fn network_usage(&self, network: NetworkId) -> Usage {
        self.networks.networks.get(&network).map_or_else(Usage::default, |network| network.usage)
    }

    /// How often each limit refused the vNIC something.
    pub fn refusals(&self, vnic: VnicId) -> Option<RefusalCounts> {
        let vnic = self.vnics.get(vnic)?;
        Some(RefusalCounts { by_vnic: Refused::of(&vnic.refused), by_network: Refused::of(&vnic.refused_by_network) })
    }

    /// Counts one more object, or says that the vNIC or its network has no room for it.
    pub(crate) fn charge(
        &mut self,
        vnic: VnicId,
        count: fn(&mut Usage) -> &mut u32,
        max: fn(&VnicLimits) -> u32,
    ) -> Result<(), VerbsError> {
        let vnic = self.vnics.get_mut(vnic).ok_or(VerbsError::NotFound)?;
        let network = self.networks.networks.get_mut(&vnic.network).expect("a vNIC's network is known");
        let refused = if *count(&mut vnic.usage) >= max(&vnic.limits) {
            count(&mut vnic.refused)
        } else if *count(&mut network.usage) >= max(&in_words_of_vnic(&network.limits)) {
            count(&mut vnic.refused_by_network)
        } else {
            *count(&mut vnic.usage) += 1;
            *count(&mut network.usage) += 1;
            return Ok(());
        };
        *refused = refused.saturating_add(1);
        Err(VerbsError::NoMemory)
    }

    pub(crate) fn refund(&mut self, vnic: VnicId, count: fn(&mut Usage) -> &mut u32) {
        let Some(vnic) = self.vnics.get_mut(vnic) else { return };
        *count(&mut vnic.usage) -= 1;
        if let Some(network) = self.networks.networks.get_mut(&vnic.network) {
            *count(&mut network.usage) -= 1;
        }
    }

    /// NoMemory if the vNIC may not register so many bytes, `before` of them already counted.
    pub(crate) fn check_registered(&mut self, session: SessionId, before: u64, after: u64) -> Result<(), VerbsError> {
        let vnic = self.session_vnic(session)?;
        let home = self.vnics.get_mut(vnic).ok_or(VerbsError::NotFound)?;
        let network = self.networks.networks.get(&home.network).expect("a vNIC's network is known");
        let fits = |held: u64, most: u64| {
            after <= before || (held - before).checked_add(after).is_some_and(|total| total <= most)
        };
        let refused = if !fits(home.usage.registered_bytes, home.limits.registered_bytes_max) {
            &mut home.refused.registered_bytes
        } else if !fits(network.usage.registered_bytes, network.limits.registered_bytes_max.unwrap_or(u64::MAX)) {
            &mut home.refused_by_network.registered_bytes
        } else {
            return Ok(());
        };
        *refused += 1;
        Err(VerbsError::NoMemory)
    }

    /// An implicit region's bytes can't be counted: where the vNIC or its network is held to a number of them, there is none.
    pub(crate) fn check_implicit(&mut self, session: SessionId) -> Result<(), VerbsError> {
        let vnic = self.session_vnic(session)?;
        let home = self.vnics.get_mut(vnic).ok_or(VerbsError::NotFound)?;
        let network = self.networks.networks.get(&home.network).expect("a vNIC's network is known");
        let refused = if home.limits.registered_bytes_max < VnicLimits::default().registered_bytes_max {
            &mut home.refused.registered_bytes
        } else if network.limits.registered_bytes_max.is_some() {
            &mut home.refused_by_network.registered_bytes
        } else {
            return Ok(());
        };
        *refused += 1;
        Err(VerbsError::NoMemory)
    }

    pub(crate) fn count_registered(&mut self, session: SessionId, before: u64, after: u64) {
        if let Ok(vnic) = self.session_vnic(session)
            && let Some(home) = self.vnics.get_mut(vnic)
        {
            home.usage.registered_bytes = home.usage.registered_bytes - before + after;
            if let Some(network) = self.networks.networks.get_mut(&home.network) {
                network.usage.registered_bytes = network.usage.registered_bytes - before + after;
            }
        }
    }
}
