//! Names of the vNICs of the other hosts, as far as they are believed: a host names what has its own addresses alone.
use crate::members::{MEMBER_COUNT_MAX, Member};
use crate::mesh::Mesh;
use crate::peers::{Peer, Ranges};
use crate::view::View;
use freeflow_orchestrator::{Cidr, DEFAULT_NETWORK, State};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// A vNIC of another host, as containers of its network call it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// Its network.
    pub network: String,
    /// Its names.
    pub names: Vec<String>,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// When it was made, seconds of Unix time, by its host's clock.
    pub since_s: u64,
}

/// Those of these hosts in networks that containers of this host may reach. An address counts where the peers file
/// gives it to the host that names it, and the network has it: so no host names, or has others take for its own, an
/// address of another.
pub fn named(view: &View, declared: &State, mesh: &Mesh<'_>, peers: &[Peer]) -> Vec<Named> {
    let cidrs = |texts: &[String]| texts.iter().filter_map(|text| text.parse::<Cidr>().ok()).collect::<Vec<_>>();
    let of_networks: BTreeMap<&str, Vec<Cidr>> =
        declared.networks().map(|network| (network.name(), cidrs(&network.object.spec.cidrs))).collect();
    let is_in = |network: &str, address: IpAddr| {
        if network == DEFAULT_NETWORK {
            return !of_networks.values().flatten().any(|cidr| cidr.contains(address));
        }
        of_networks.get(network).is_some_and(|cidrs| cidrs.iter().any(|cidr| cidr.contains(address)))
    };
    let mut all = Vec::new();
    for peer in peers {
        let own: Ranges = peer.prefixes.iter().filter_map(|prefix| prefix.parse().ok()).collect();
        let of_network = |(network, members)| std::iter::repeat(network).zip::<&[Member]>(members);
        let members = view.members(&peer.host).filter(|(network, _)| mesh.reaches(network));
        for (network, member) in members.flat_map(of_network).take(MEMBER_COUNT_MAX) {
            let is_its = |address: &IpAddr| own.overlaps(Cidr::single(*address)) && is_in(network, *address);
            let addresses: Vec<IpAddr> = member.addresses.iter().copied().filter(is_its).collect();
            if !addresses.is_empty() {
                let (network, names) = (network.to_owned(), member.names.clone());
                all.push(Named { network, names, addresses, since_s: member.since_s });
            }
        }
    }
    all
}
