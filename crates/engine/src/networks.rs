//! Quotas: what a vNIC may hold, and what all vNICs of a network may hold together.
//!
//! A quota is looked at when something is made; NoMemory, as a NIC says that has no more. One that
//! becomes smaller than what is held takes nothing away.
//!
//! Invariant: a network's usage is the sum of its vNICs'.
use crate::Usage;
use alloc::collections::BTreeMap;
use freeflow_verbs::{NetworkId, NetworkLimits, VnicLimits};
use serde::{Deserialize, Serialize};

/// How often something was not made for want of room, by what would have been counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Queue pairs.
    pub qps: u64,
    /// Completion queues.
    pub cqs: u64,
    /// Memory regions.
    pub mrs: u64,
    /// Bytes of memory regions.
    pub registered_bytes: u64,
    /// By limits of all other things, such as SRQs.
    pub others: u64,
}

/// Refusals of a vNIC's requests, by the limit that refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusalCounts {
    /// By the vNIC's own limits.
    pub by_vnic: Refused,
    /// By its network's limits.
    pub by_network: Refused,
}

impl Refused {
    pub(crate) fn of(counts: &Usage) -> Self {
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
    pub networks: BTreeMap<NetworkId, Network>,
}

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Network {
    pub vnic_count: u32,
    pub limits: NetworkLimits,
    pub usage: Usage,
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

    pub fn forget_if_plain(&mut self, network: NetworkId) {
        let is_plain = |entry: &Network| entry.vnic_count == 0 && entry.limits == NetworkLimits::default();
        if self.networks.get(&network).is_some_and(is_plain) {
            self.networks.remove(&network);
        }
    }
}

/// In the words of a vNIC's limits; what has no limit of a network is unlimited.
pub(crate) fn in_words_of_vnic(limits: &NetworkLimits) -> VnicLimits {
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
