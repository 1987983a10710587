//! The vNICs and networks that this host has, for the command and for container hooks: pages of the
//! REST server.
use crate::api::plane::{PageNetworks, PageVnics, ReplyTo, Serve};
use crate::base::slab::Key;
use crate::control::thread::Control;
use freeflow_engine::VnicId;
use freeflow_hostnet::inventory::{Inventory, Vnic};
use freeflow_orchestrator::NetworkEntry;
use freeflow_protocol::admin::{NetworkStatus, VnicStatus};
use std::net::IpAddr;
use std::ops::Bound;

/// vNICs, or networks, of one page.
const PAGE_COUNT_MAX: usize = 64;

/// Cuts a page; the last of its names, if there are more behind it.
fn cut<T>(found: &mut Vec<T>, name: impl Fn(&T) -> &str) -> Option<String> {
    let more = found.len() > PAGE_COUNT_MAX;
    found.truncate(PAGE_COUNT_MAX);
    found.last().filter(|_| more).map(|last| name(last).to_owned())
}

fn describe(network: &NetworkEntry) -> NetworkStatus {
    NetworkStatus {
        name: network.name().into(),
        id: network.id.0,
        pool: network.pool.to_string(),
        gateway: IpAddr::V4(network.gateway()),
        prefix_length: network.pool.prefix_length(),
        pool6: network.pool6.map(|pool| pool.to_string()),
        vnic_count: network.vnic_count(),
        // Other networks' bridges are made by who plugs vNICs into them.
        bridge: network.own_bridge.clone().unwrap_or_default(),
        data_path: network.object.spec.data_path,
    }
}

impl Control {
    /// The inventory that the host's bridges, interfaces and CDI files are compared with.
    pub(crate) fn host_inventory(&self) -> Inventory {
        let records = self.vnics_by_id.values().filter_map(|&key| Some(&self.vnics.get(key)?.record));
        let vnics = records.map(|record| Vnic::new(&record.id, &record.network, &record.labels)).collect();
        Inventory { networks: self.state.networks().map(describe).collect(), vnics }
    }
}

impl Serve<PageVnics> for Control {
    fn serve(&mut self, PageVnics { after }: PageVnics, reply: ReplyTo<(Vec<VnicStatus>, Option<String>)>) {
        let counts_direct = after.is_none();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let range = self.vnics_by_id.range::<String, _>((from, Bound::Unbounded));
        let mut found: Vec<(&String, Key)> = range.take(PAGE_COUNT_MAX + 1).map(|(id, &key)| (id, key)).collect();
        // Those that end meanwhile make no page the last one: whoever took the rest for gone would
        // end what is there.
        let next = cut(&mut found, |(id, _)| id);
        let (keys, vnics): (Vec<Key>, Vec<VnicId>) =
            found.into_iter().filter_map(|(_, key)| Some((key, self.vnics.get(key)?.engine_id))).unzip();
        self.read_vnics(vnics, counts_direct, move |control, numbers| {
            let statuses =
                keys.into_iter().zip(&numbers).filter_map(|(key, numbers)| control.vnic_status(key, numbers));
            reply.give((statuses.collect(), next));
        });
    }
}

impl Serve<PageNetworks> for Control {
    fn serve(&mut self, PageNetworks { after }: PageNetworks, reply: ReplyTo<(Vec<NetworkStatus>, Option<String>)>) {
        let behind = |network: &&NetworkEntry| after.as_deref().is_none_or(|after| network.name() > after);
        let mut found: Vec<&NetworkEntry> = self.state.networks().filter(behind).take(PAGE_COUNT_MAX + 1).collect();
        let next = cut(&mut found, |network| network.name());
        reply.give((found.into_iter().map(describe).collect(), next));
    }
}
