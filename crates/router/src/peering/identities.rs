//! Owners of the addresses that hosts announce: ids and labels of vNICs, for access rules.
use super::claims::ClaimSubject;
use super::state::{Output, State};
use super::update::Update;
use crate::admission::access::{VnicIdentity, address_of};
use freeflow_engine::HostId;
use freeflow_protocol::peer::{PEER_MESSAGE_BYTES_MAX, PeerMessage};
use freeflow_verbs::{Gid, Qpn};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Ids and labels that are kept of one host, bytes; of further vNICs they are unknown.
const IDENTITY_BYTES_OF_HOST_MAX: usize = 64 << 20;
/// Bytes that keeping one takes besides its text.
const IDENTITY_BYTES: usize = 256;

#[derive(Default)]
pub struct Identities {
    own: BTreeMap<ClaimSubject, Arc<VnicIdentity>>,
    of_hosts: BTreeMap<HostId, OfHost>,
}

#[derive(Default)]
struct OfHost {
    bytes: usize,
    identities: BTreeMap<ClaimSubject, Arc<VnicIdentity>>,
}

fn bytes_of(identity: &VnicIdentity) -> usize {
    let labels = identity.labels.iter().map(|(name, value)| name.len() + value.len() + IDENTITY_BYTES);
    identity.vnic.len() + IDENTITY_BYTES + labels.sum::<usize>()
}

impl Identities {
    /// Whether it is another than before.
    pub fn set_own(&mut self, subject: &ClaimSubject, identity: Option<Arc<VnicIdentity>>) -> bool {
        match identity {
            Some(identity) => self.own.insert(subject.clone(), identity.clone()) != Some(identity),
            None => {
                self.own.remove(subject);
                false
            }
        }
    }

    /// One that there is no room for is not known; the one before does not count any more all the same.
    fn set(&mut self, host: HostId, subject: &ClaimSubject, identity: Arc<VnicIdentity>) {
        self.forget(host, subject);
        let of_host = self.of_hosts.entry(host).or_default();
        let bytes = of_host.bytes + bytes_of(&identity);
        if bytes <= IDENTITY_BYTES_OF_HOST_MAX {
            of_host.bytes = bytes;
            of_host.identities.insert(subject.clone(), identity);
        }
    }

    pub fn forget(&mut self, host: HostId, subject: &ClaimSubject) {
        if let Some(of_host) = self.of_hosts.get_mut(&host)
            && let Some(gone) = of_host.identities.remove(subject)
        {
            of_host.bytes -= bytes_of(&gone);
        }
    }

    pub fn retain(&mut self, host: HostId, mut stays: impl FnMut(&ClaimSubject) -> bool) {
        let Some(of_host) = self.of_hosts.get_mut(&host) else { return };
        of_host.identities.retain(|subject, _| stays(subject));
        of_host.bytes = of_host.identities.values().map(|identity| bytes_of(identity)).sum();
        if of_host.identities.is_empty() {
            self.of_hosts.remove(&host);
        }
    }
}

impl State {
    /// Updates in order, and who is at the end of routes.
    pub(super) fn update(&mut self, updates: impl IntoIterator<Item = Update>) {
        for update in updates {
            let party = match &update {
                Update::Route { network, gid, host: Some(host) } => self.party(*host, *network, *gid),
                _ => None,
            };
            self.outputs.push_back(Output::Update(update));
            self.outputs.extend(party.map(Output::Update));
        }
    }

    /// An address that the host may not have would bring it what rules allow that one.
    pub(super) fn party(&self, host: HostId, network: freeflow_verbs::NetworkId, gid: Gid) -> Option<Update> {
        let subject = ClaimSubject::Address { network: self.network_name(network)?, gid };
        let mut identity = self.identities.of_hosts.get(&host)?.identities.get(&subject)?.clone();
        if !identity.addresses.iter().all(|address| self.may_have(host, Gid::from_ip(*address))) {
            Arc::make_mut(&mut identity).addresses.clear();
        }
        Some(Update::Party { network, gid, identity: Some(identity) })
    }

    /// A host says who has one of its addresses.
    pub(super) fn identify(
        &mut self,
        id: HostId,
        (network, gid): (String, Gid),
        other: Option<Gid>,
        (vnic, labels): (String, Vec<(String, String)>),
    ) {
        let addresses = other.map_or_else(Vec::new, |other| vec![address_of(gid), address_of(other)]);
        let identity = VnicIdentity { vnic, labels: labels.into_iter().collect(), addresses };
        let number = self.networks.get(&network).copied();
        let subject = ClaimSubject::Address { network, gid };
        if !self.claims.is_announced(id, &subject) {
            return;
        }
        self.identities.set(id, &subject, Arc::new(identity));
        if let Some(network) = number.filter(|_| self.claims.is_owner(id, &subject)) {
            let unknown = Update::Party { network, gid, identity: None };
            let party = self.party(id, network, gid).unwrap_or(unknown);
            self.outputs.push_back(Output::Update(party));
        }
    }

    /// Notifies a host of who has an address of this host.
    pub(super) fn send_identity(&mut self, id: HostId, subject: &ClaimSubject) {
        let ClaimSubject::Address { network, gid } = subject else { return };
        let Some(identity) = self.identities.own.get(subject).filter(|_| self.is_up(id)) else { return };
        let labels = identity.labels.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
        let (network, gid, vnic) = (network.clone(), *gid, identity.vnic.clone());
        let other = identity.addresses.iter().map(|address| Gid::from_ip(*address)).find(|other| *other != gid);
        let message = PeerMessage::Identity { network, gid, other, vnic, labels };
        // One with more labels than anybody can have is one without.
        if freeflow_protocol::encode(&message).len() <= PEER_MESSAGE_BYTES_MAX {
            self.send(id, message);
        }
    }

    /// Policy has ended the connection of `peer`, which is of this host, with that host's `qpn`.
    pub fn notify_disconnected(&mut self, id: HostId, qpn: Qpn, peer: Qpn) {
        if self.is_up(id) {
            self.send(id, PeerMessage::Disconnected { qpn, peer });
        }
    }
}
