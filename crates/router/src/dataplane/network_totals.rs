//! Sums over the vNICs of each network.
use crate::dataplane::totals::Totals;
use crate::dataplane::worker::Worker;
use freeflow_engine::VnicId;
use freeflow_verbs::NetworkId;
use std::collections::BTreeMap;

impl Worker {
    /// Of all vNICs at once: one that goes is counted among those that are there or those that are
    /// gone, and never twice.
    pub(crate) fn network_totals(&self) -> BTreeMap<NetworkId, Totals> {
        let mut totals = self.ports.retired.0.clone();
        let counters = |id: VnicId| self.engine.vnic_counters(id);
        for (vnic, counters) in self.ports.vnics.iter().filter_map(|(id, vnic)| Some((vnic, counters(id)?))) {
            totals.entry(vnic.network).or_default().add(&counters);
        }
        totals
    }
}
