//! Addresses of new vNICs: those that they ask for, or free ones.
use super::{Draft, refuse_if_bad};
use crate::check::Findings;
use crate::command::{Reason, Refusal};
use crate::objects::{ObjectKind, VnicSpec};
use crate::pool::Pool;
use alloc::format;
use alloc::string::ToString;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

impl Draft<'_> {
    /// Finds addresses for a new vNIC, those it asks for or free ones, and takes them.
    pub(super) fn take_addresses(&mut self, id: &str, spec: &VnicSpec) -> Result<Vec<IpAddr>, Refusal> {
        let about = |refusal: Refusal| refusal.about(ObjectKind::Vnic, id);
        let name = spec.network.as_str();
        let network = self.get_network(name).ok_or_else(|| about(Refusal::new(Reason::NotFound, "no such network")))?;
        let (range, range6) = network.part(self.is_for_cluster).ok_or_else(|| {
            about(Refusal::new(Reason::Invalid, "its network has no addresses for vNICs of a cluster: spec.floating"))
        })?;
        let is_another = |address: Ipv4Addr| !self.is_for_cluster && network.is_floating(address);
        let quota = network.object.spec.quota.as_deref().and_then(|quota| self.quota(quota));
        if let Some((quota, max)) = quota.and_then(|quota| Some((quota, quota.spec.vnics?)))
            && self.vnic_count(name) >= max
        {
            let message = format!("Quota {} allows network {name} no more than {max} vNICs", quota.metadata.name);
            return Err(about(Refusal::new(Reason::Exhausted, message)));
        }
        let asked = |v4: bool| spec.addresses.iter().position(|address| address.is_ipv4() == v4);
        let v4 = match asked(true) {
            Some(at) => self.asked_address(id, spec, at, |address| match address {
                IpAddr::V4(address) => range.is_assignable(address) && !is_another(address),
                IpAddr::V6(_) => false,
            })?,
            None => IpAddr::V4(
                self.free_address(name, range)
                    .ok_or_else(|| about(Refusal::new(Reason::Exhausted, "no address is left")))?,
            ),
        };
        let offset = match v4 {
            IpAddr::V4(v4) => range.offset_of(v4).unwrap_or(0),
            IpAddr::V6(_) => 0,
        };
        let v6 = match (range6, asked(false)) {
            (_, Some(at)) => Some(self.asked_address(id, spec, at, |address| match address {
                IpAddr::V6(address) => range6.is_some_and(|range| range.is_assignable(address)),
                IpAddr::V4(_) => false,
            })?),
            (Some(range), None) => {
                // At the place of the IPv4 address, if nobody asked for that one.
                let good = |free: &Ipv6Addr| range.is_assignable(*free) && self.is_free(name, IpAddr::V6(*free));
                let free = |offset| Some(range.address_at(offset)).filter(good);
                let count = self.passed_over_max(name);
                let found = (0..count).find_map(|step| free(offset.wrapping_add(step)));
                Some(IpAddr::V6(found.ok_or_else(|| about(Refusal::new(Reason::Exhausted, "no address is left")))?))
            }
            (None, None) => None,
        };
        // An address that is asked for (by a cluster, or a container that is started again) leaves the
        // order of the others as it is.
        if asked(true).is_none() {
            self.cursors.insert(name.into(), offset.wrapping_add(1));
        }
        *self.new_vnics.entry(name.into()).or_default() += 1;
        let addresses: Vec<IpAddr> = core::iter::once(v4).chain(v6).collect();
        for &address in &addresses {
            self.holders.insert((name.into(), address), id.into());
        }
        Ok(addresses)
    }

    fn asked_address(
        &self,
        id: &str,
        spec: &VnicSpec,
        at: usize,
        is_assignable: impl Fn(IpAddr) -> bool,
    ) -> Result<IpAddr, Refusal> {
        let address = spec.addresses[at];
        let (reason, message) = match self.holder(&spec.network, address) {
            _ if !is_assignable(address) => {
                (Reason::Invalid, "not an address that a vNIC of this network can have".to_string())
            }
            Some(holder) => (Reason::AlreadyExists, format!("another vNIC has this address: {holder}")),
            None => return Ok(address),
        };
        let mut findings = Findings::default();
        findings.add(format!("spec.addresses[{at}]"), message);
        refuse_if_bad(findings, ObjectKind::Vnic, id).map_err(|refusal| Refusal { reason, ..refusal })?;
        Ok(address)
    }

    fn is_free(&self, network: &str, address: IpAddr) -> bool {
        self.holder(network, address).is_none() && !self.asked.contains(&(network.into(), address))
    }

    /// Those that are taken or asked for, and three more (network, gateway, broadcast), and then one that is not.
    fn passed_over_max(&self, network: &str) -> u32 {
        let asked = u32::try_from(self.asked.len()).unwrap_or(u32::MAX);
        self.vnic_count(network).saturating_add(asked).saturating_add(4)
    }

    /// From the cursor on, so that an address is not given out again at once.
    fn free_address(&self, name: &str, range: Pool) -> Option<Ipv4Addr> {
        let size = range.size();
        let others = self.get_network(name).and_then(|network| network.floating).filter(|_| !self.is_for_cluster);
        let others_count = others.map_or(0, Pool::size);
        let cursor = self.cursors.get(name).copied();
        let cursor = cursor.unwrap_or_else(|| self.state.cursors.get(name).map_or(0, |cursor| cursor.value));
        let mut offset = if cursor < size { cursor } else { 0 };
        for _ in 0..size.min(self.passed_over_max(name).saturating_add(others_count)) {
            let address = range.address_at(offset);
            let is_others = others.is_some_and(|others| others.contains(address));
            if range.is_assignable(address) && !is_others && self.is_free(name, IpAddr::V4(address)) {
                return Some(address);
            }
            offset = if offset + 1 < size { offset + 1 } else { 0 };
        }
        None
    }
}
