//! RDMA machines without FreeFlow: which networks may talk to them, and as whom.
//!
//! The peers file lists for a network the addresses that its vNICs may talk to. Such a vNIC has a
//! second GID, index [`EXTERNAL_GID_INDEX`]: the host's own address, since that is what the packets
//! bear and what the other machine answers to. A program chooses the index (`ibv_rc_pingpong -g 1`,
//! `ib_write_bw -x 1`), and with it which world it speaks to: by index 0 the vNICs of its network,
//! by index 1 the listed machines and nobody else.
//!
//! Nobody vouches for those machines: a packet counts as theirs if it bears their address, as with
//! any NIC. And since all vNICs of this host that have the permission share its address there, what
//! one of them may learn from such a machine can be passed to another; who must not be mixed up
//! gets no permission, or another host.
//!
//! This is the control thread's half: GID tables. Where packets go is the worker's (`crate::dataplane::fabric`).
use crate::control::vnic_entry::Record;
pub use crate::dataplane::fabric::EXTERNAL_GID_INDEX;
use crate::peering::PeersFile;
use freeflow_orchestrator::State;
use freeflow_orchestrator::objects::Access;
use freeflow_verbs::Gid;
use std::collections::BTreeSet;
use std::net::IpAddr;

/// Place of the IPv6 address of a vNIC whose network has such addresses.
pub const IPV6_GID_INDEX: u8 = 2;

/// The peers file's settings for machines without FreeFlow; without a file, none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExternalPolicy {
    pub gid: Option<Gid>,
    /// Names of the networks that may talk to some such machine.
    pub networks: BTreeSet<String>,
    /// Of networks that are declared so that theirs may not, whatever the file says.
    pub denied: BTreeSet<String>,
}

impl ExternalPolicy {
    pub fn of(file: &PeersFile) -> Self {
        let networks = file.external.iter().filter(|external| !external.allow.is_empty());
        Self {
            gid: Some(Gid::from_ip(file.address)),
            networks: networks.map(|external| external.network.clone()).collect(),
            denied: BTreeSet::new(),
        }
    }

    /// By which address machines without FreeFlow know this host, where there are other hosts.
    pub fn host_address(&self) -> Option<IpAddr> {
        self.gid.and_then(Gid::to_ipv4).map(IpAddr::V4)
    }

    /// With what the networks themselves say.
    pub fn within(self, state: &State) -> Self {
        let denied = state.networks().filter(|network| network.object.spec.external == Access::Deny);
        Self { denied: denied.map(|network| network.name().into()).collect(), ..self }
    }

    /// The second GID of the vNICs of a network, if they have one.
    pub fn gid(&self, network: &str) -> Option<Gid> {
        self.gid.filter(|_| self.networks.contains(network) && !self.denied.contains(network))
    }
}

/// A vNIC's GID table: its IPv4 address, then the host's, then its IPv6 address. What it does not
/// have before one that it has is empty: zero.
pub fn gids(vnic: &Record, external: Option<Gid>) -> Vec<Gid> {
    let ipv6 = vnic.ipv6_gid();
    let external = external.or(ipv6.map(|_| Gid::default()));
    std::iter::once(vnic.gid()).chain(external).chain(ipv6).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(external: &str) -> PeersFile {
        let text = format!(
            r#"{{"host": "h1", "address": "192.0.2.1", "key_file": "host.key", "peers": [], "external": {external}}}"#
        );
        PeersFile::parse(&text).expect("a good file")
    }

    #[test]
    fn only_networks_with_a_listed_machine_have_the_hosts_gid() {
        let policy = ExternalPolicy::of(&file(r#"[{"network": "default", "allow": ["192.0.2.9/32"]}]"#));
        assert_eq!(policy.gid("default"), Some(Gid::from_ip("192.0.2.1".parse().unwrap())));
        assert_eq!(policy.gid("other"), None);
        for external in ["[]", r#"[{"network": "default", "allow": []}]"#] {
            assert_eq!(ExternalPolicy::of(&file(external)).gid("default"), None);
        }
        assert_eq!(ExternalPolicy::default().gid("default"), None);
    }

    #[test]
    fn the_hosts_gid_is_the_second() {
        let host = Gid([2; 16]);
        let mut vnic = Record {
            id: "v".into(),
            name: "v".into(),
            network: "n".into(),
            address: [10, 0, 0, 2].into(),
            address6: None,
            labels: Vec::new(),
            limits: freeflow_verbs::VnicLimits::default(),
        };
        assert_eq!(gids(&vnic, Some(host)), [vnic.gid(), host]);
        assert_eq!(gids(&vnic, None), [vnic.gid()]);
        vnic.address6 = Some("fd00::2".parse().unwrap());
        let ipv6 = vnic.ipv6_gid().unwrap();
        assert_eq!(gids(&vnic, Some(host))[usize::from(EXTERNAL_GID_INDEX)], host);
        assert_eq!(gids(&vnic, Some(host))[usize::from(IPV6_GID_INDEX)], ipv6);
        assert_eq!(gids(&vnic, None), [vnic.gid(), Gid::default(), ipv6], "the second entry is empty");
    }
}
