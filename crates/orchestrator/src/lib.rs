//! FFO: which networks there are, which vNIC has which address. A pure state machine: no I/O, no clock, no randomness.
//!
//! [`State`] is all there is to remember; whoever runs it stores it (the router in `RUN_DIR/state.json`, a cluster in
//! its own store) and applies [`Command`]s one after another. Each command gives one [`Answer`] or one [`Refusal`] and
//! changes the state only if it is answered, so two copies that apply the same commands stay equal.
//!
//! Invariant: within a network no two vNICs have the same address, and none has the gateway's, the network's or the
//! broadcast address.
#![no_std]
#![forbid(unsafe_code)]
extern crate alloc;

mod pool;

pub use pool::{Pool, PoolError};

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, Ipv4Addr};
use freeflow_verbs::{Gid, NetworkId, VnicLimits};
use serde::{Deserialize, Serialize};

/// Changes with every incompatible change of [`State`].
pub const STATE_VERSION: u32 = 1;
/// The network that is there from the start.
pub const DEFAULT_NETWORK: &str = "default";
/// Its addresses; the gateway is the first of them.
pub const DEFAULT_POOL: &str = "10.111.0.0/16";
/// Longest name of a network and longest id of a vNIC, bytes.
pub const NAME_BYTES_MAX: usize = 128;
/// vNICs of one host.
pub const VNIC_COUNT_MAX: usize = 65_536;
/// Labels of one vNIC, and bytes of them all together.
pub const LABEL_COUNT_MAX: usize = 64;
pub const LABEL_BYTES_MAX: usize = 8192;

/// Everything the orchestrator remembers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    version: u32,
    networks: BTreeMap<String, Network>,
    vnics: BTreeMap<String, Vnic>,
    next_network: u32,
}

/// A virtual network and its addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    pub id: NetworkId,
    pub name: String,
    pub pool: Pool,
    /// The part of the pool that this host gives out, where several hosts share the network: the whole pool if none.
    #[serde(default)]
    pub range: Option<Pool>,
    /// The first address of [`Network::assigned`]: each host is the gateway of its own vNICs.
    pub gateway: Ipv4Addr,
    /// The host's bridge that gives the network its IP path.
    pub bridge: String,
    /// Where the search for a free address begins: an address is not given out again at once.
    cursor: u32,
}

impl Network {
    /// The addresses that this host gives out.
    pub fn assigned(&self) -> Pool {
        self.range.unwrap_or(self.pool)
    }
}

/// A vNIC as it was attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vnic {
    pub id: String,
    pub name: String,
    pub network: String,
    pub address: Ipv4Addr,
    pub labels: Vec<(String, String)>,
    pub limits: VnicLimits,
}

impl Vnic {
    pub fn gid(&self) -> Gid {
        Gid::from_ip(IpAddr::V4(self.address))
    }
}

/// What can be asked of the orchestrator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// The same again is answered; the same name with another pool or range is refused. The range, where there is one, is
    /// the part of the pool that this host gives out.
    CreateNetwork { name: String, pool: Pool, range: Option<Pool>, bridge: String },
    /// The same `id` again gives the vNIC that is there, if network and address agree.
    Attach {
        id: String,
        name: String,
        network: String,
        address: Option<IpAddr>,
        labels: Vec<(String, String)>,
        limits: VnicLimits,
    },
    /// An unknown id is `Unchanged`.
    Detach { id: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The state is another now and wants to be stored.
    Changed,
    /// It was so already.
    Unchanged,
}

/// Why a command was refused; the state is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A name is empty, too long, or holds other characters than letters, digits, `.`, `_`, `-`; or too many labels.
    BadName,
    UnknownNetwork,
    /// The range is not a part of the pool.
    RangeOutside,
    /// A network of this name has another pool or range; a vNIC of this id is in another network or has another address.
    Different,
    AddressInUse,
    /// Not an address of the network's pool that a vNIC can have.
    AddressOutside,
    /// No address is left, or [`VNIC_COUNT_MAX`] is reached.
    Exhausted,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BadName => "a name may have 1 to 128 letters, digits, '.', '_' and '-', and begins with no '.'",
            Self::UnknownNetwork => "no such network",
            Self::RangeOutside => "the host's range is not a part of the network's pool",
            Self::Different => "it exists already, and is different",
            Self::AddressInUse => "another vNIC has this address",
            Self::AddressOutside => "not an address that a vNIC of this network can have",
            Self::Exhausted => "no address is left",
        })
    }
}

impl core::error::Error for Refusal {}

impl State {
    /// No vNIC and no network.
    pub fn new() -> Self {
        Self { version: STATE_VERSION, networks: BTreeMap::new(), vnics: BTreeMap::new(), next_network: 1 }
    }

    /// Whether this version of the code can use a state that was stored before, and whether it holds together.
    pub fn is_sound(&self) -> bool {
        let mut taken = BTreeMap::new();
        self.version == STATE_VERSION
            && self.networks.iter().all(|(name, network)| {
                *name == network.name
                    && name_is_good(name)
                    && network.id.0 < self.next_network
                    && network.pool.encloses(network.assigned())
                    && network.gateway == network.assigned().gateway()
            })
            && self.vnics.iter().all(|(id, vnic)| {
                let network = self.networks.get(&vnic.network);
                *id == vnic.id
                    && name_is_good(id)
                    && network.is_some_and(|network| network.assigned().is_assignable(vnic.address))
                    && taken.insert((vnic.network.as_str(), vnic.address), ()).is_none()
            })
    }

    pub fn networks(&self) -> impl Iterator<Item = &Network> {
        self.networks.values()
    }

    pub fn network(&self, name: &str) -> Option<&Network> {
        self.networks.get(name)
    }

    /// In order of id.
    pub fn vnics(&self) -> impl Iterator<Item = &Vnic> {
        self.vnics.values()
    }

    pub fn vnic(&self, id: &str) -> Option<&Vnic> {
        self.vnics.get(id)
    }

    pub fn apply(&mut self, command: &Command) -> Result<Answer, Refusal> {
        match command {
            Command::CreateNetwork { name, pool, range, bridge } => self.create_network(name, *pool, *range, bridge),
            Command::Attach { id, name, network, address, labels, limits } => {
                self.attach(id, name, network, *address, labels, *limits)
            }
            Command::Detach { id } => match self.vnics.remove(id) {
                Some(_) => Ok(Answer::Changed),
                None => Ok(Answer::Unchanged),
            },
        }
    }

    fn create_network(&mut self, name: &str, pool: Pool, range: Option<Pool>, bridge: &str) -> Result<Answer, Refusal> {
        if !name_is_good(name) {
            return Err(Refusal::BadName);
        }
        if range.is_some_and(|range| !pool.encloses(range)) {
            return Err(Refusal::RangeOutside);
        }
        if let Some(network) = self.networks.get_mut(name) {
            if network.pool != pool || network.assigned() != range.unwrap_or(pool) {
                return Err(Refusal::Different);
            }
            if network.bridge == bridge {
                return Ok(Answer::Unchanged);
            }
            network.bridge = bridge.into();
            return Ok(Answer::Changed);
        }
        let id = NetworkId(self.next_network);
        self.next_network += 1;
        let gateway = range.unwrap_or(pool).gateway();
        let network = Network { id, name: name.into(), pool, range, gateway, bridge: bridge.into(), cursor: 0 };
        self.networks.insert(name.into(), network);
        Ok(Answer::Changed)
    }

    fn attach(
        &mut self,
        id: &str,
        name: &str,
        network_name: &str,
        address: Option<IpAddr>,
        labels: &[(String, String)],
        limits: VnicLimits,
    ) -> Result<Answer, Refusal> {
        let label_bytes: usize = labels.iter().map(|(key, value)| key.len() + value.len()).sum();
        let too_much = labels.len() > LABEL_COUNT_MAX || label_bytes > LABEL_BYTES_MAX || name.len() > NAME_BYTES_MAX;
        if !name_is_good(id) || too_much {
            return Err(Refusal::BadName);
        }
        if let Some(vnic) = self.vnics.get(id) {
            let same_address = address.is_none_or(|address| address == IpAddr::V4(vnic.address));
            let same = vnic.network == network_name && same_address;
            return if same { Ok(Answer::Unchanged) } else { Err(Refusal::Different) };
        }
        if self.vnics.len() >= VNIC_COUNT_MAX {
            return Err(Refusal::Exhausted);
        }
        let network = self.networks.get(network_name).ok_or(Refusal::UnknownNetwork)?;
        let address = match address {
            Some(IpAddr::V4(address)) if network.assigned().is_assignable(address) => {
                if self.in_use(network_name, address) {
                    return Err(Refusal::AddressInUse);
                }
                address
            }
            Some(_) => return Err(Refusal::AddressOutside),
            None => self.free_address(network_name, network).ok_or(Refusal::Exhausted)?,
        };
        if let Some(network) = self.networks.get_mut(network_name) {
            network.cursor = network.assigned().offset_of(address).unwrap_or(0).wrapping_add(1);
        }
        let vnic = Vnic {
            id: id.into(),
            name: name.into(),
            network: network_name.into(),
            address,
            labels: labels.to_vec(),
            limits,
        };
        self.vnics.insert(id.into(), vnic);
        Ok(Answer::Changed)
    }

    fn in_use(&self, network: &str, address: Ipv4Addr) -> bool {
        self.vnics.values().any(|vnic| vnic.network == network && vnic.address == address)
    }

    fn free_address(&self, name: &str, network: &Network) -> Option<Ipv4Addr> {
        let taken: alloc::collections::BTreeSet<Ipv4Addr> =
            self.vnics.values().filter(|vnic| vnic.network == name).map(|vnic| vnic.address).collect();
        // At most taken + 3 addresses (network, gateway, broadcast) are passed over.
        let range = network.assigned();
        let size = range.size();
        let mut offset = if network.cursor < size { network.cursor } else { 0 };
        for _ in 0..size.min(taken.len() as u32 + 4) {
            let address = range.address_at(offset);
            if range.is_assignable(address) && !taken.contains(&address) {
                return Some(address);
            }
            offset = if offset + 1 < size { offset + 1 } else { 0 };
        }
        None
    }
}

impl Default for State {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether a name can be a file name and part of a command line: letters, digits, `.`, `_`, `-`; no leading dot.
pub fn name_is_good(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && !name.starts_with(['.', '-'])
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    fn state(pool: &str) -> State {
        let mut state = State::new();
        let pool = pool.parse().unwrap();
        let command = Command::CreateNetwork { name: "default".into(), pool, range: None, bridge: "ff0".into() };
        assert_eq!(state.apply(&command), Ok(Answer::Changed));
        assert_eq!(state.apply(&command), Ok(Answer::Unchanged));
        state
    }

    fn attach(id: &str, address: Option<&str>) -> Command {
        Command::Attach {
            id: id.into(),
            name: id.into(),
            network: "default".into(),
            address: address.map(|text| text.parse().unwrap()),
            labels: Vec::new(),
            limits: VnicLimits::default(),
        }
    }

    fn address(state: &State, id: &str) -> String {
        state.vnic(id).unwrap().address.to_string()
    }

    #[test]
    fn addresses_follow_the_gateway_and_are_not_reused_at_once() {
        let mut state = state("10.111.0.0/16");
        state.apply(&attach("a", None)).unwrap();
        state.apply(&attach("b", None)).unwrap();
        assert_eq!((address(&state, "a"), address(&state, "b")), ("10.111.0.2".into(), "10.111.0.3".into()));
        state.apply(&Command::Detach { id: "b".into() }).unwrap();
        state.apply(&attach("c", None)).unwrap();
        assert_eq!(address(&state, "c"), "10.111.0.4");
        assert_eq!(state.apply(&attach("c", None)), Ok(Answer::Unchanged));
        assert_eq!(state.apply(&attach("c", Some("10.111.0.4"))), Ok(Answer::Unchanged));
        assert_eq!(state.apply(&attach("c", Some("10.111.0.5"))), Err(Refusal::Different));
        assert!(state.is_sound());
    }

    #[test]
    fn a_small_pool_is_used_up_and_refilled() {
        let mut state = state("192.168.7.0/29");
        for id in ["a", "b", "c", "d", "e"] {
            state.apply(&attach(id, None)).unwrap();
        }
        assert_eq!(state.apply(&attach("f", None)), Err(Refusal::Exhausted));
        state.apply(&Command::Detach { id: "b".into() }).unwrap();
        assert_eq!(state.apply(&Command::Detach { id: "b".into() }), Ok(Answer::Unchanged));
        state.apply(&attach("f", None)).unwrap();
        assert_eq!(address(&state, "f"), "192.168.7.3");
    }

    fn create(pool: &str, range: Option<&str>) -> Command {
        let range = range.map(|text| text.parse().unwrap());
        Command::CreateNetwork { name: "default".into(), pool: pool.parse().unwrap(), range, bridge: "ff0".into() }
    }

    #[test]
    fn a_host_gives_out_its_own_range_of_the_pool() {
        let mut state = State::new();
        assert_eq!(state.apply(&create("10.111.0.0/16", Some("10.112.2.0/24"))), Err(Refusal::RangeOutside));
        assert_eq!(state.apply(&create("10.111.0.0/16", Some("10.0.0.0/8"))), Err(Refusal::RangeOutside));
        state.apply(&create("10.111.0.0/16", Some("10.111.2.0/29"))).unwrap();
        let network = state.network("default").unwrap();
        assert_eq!((network.gateway.to_string().as_str(), network.pool.prefix_length()), ("10.111.2.1", 16));
        for id in ["a", "b", "c", "d", "e"] {
            state.apply(&attach(id, None)).unwrap();
        }
        assert_eq!((address(&state, "a"), address(&state, "e")), ("10.111.2.2".into(), "10.111.2.6".into()));
        assert_eq!(state.apply(&attach("f", None)), Err(Refusal::Exhausted));
        for other_hosts in ["10.111.0.2", "10.111.2.1", "10.111.2.7", "10.111.3.2"] {
            assert_eq!(state.apply(&attach("f", Some(other_hosts))), Err(Refusal::AddressOutside), "{other_hosts}");
        }
        assert!(state.is_sound());
        assert_eq!(state.apply(&create("10.111.0.0/16", Some("10.111.2.0/29"))), Ok(Answer::Unchanged));
        assert_eq!(state.apply(&create("10.111.0.0/16", Some("10.111.3.0/29"))), Err(Refusal::Different));
        assert_eq!(state.apply(&create("10.111.0.0/16", None)), Err(Refusal::Different));
    }

    #[test]
    fn addresses_that_no_vnic_can_have_are_refused() {
        let mut state = state("10.111.0.0/16");
        for bad in ["10.111.0.0", "10.111.0.1", "10.111.255.255", "10.112.0.5", "::1"] {
            assert_eq!(state.apply(&attach("x", Some(bad))), Err(Refusal::AddressOutside), "{bad}");
        }
        state.apply(&attach("x", Some("10.111.9.9"))).unwrap();
        assert_eq!(state.apply(&attach("y", Some("10.111.9.9"))), Err(Refusal::AddressInUse));
        for bad in ["", ".", "..", "a/b", "-x", "ä"] {
            assert_eq!(state.apply(&attach(bad, None)), Err(Refusal::BadName), "{bad}");
        }
    }

    #[test]
    fn a_network_keeps_its_pool() {
        let mut state = state("10.111.0.0/16");
        let other = Command::CreateNetwork {
            name: "default".into(),
            pool: "10.112.0.0/16".parse().unwrap(),
            range: None,
            bridge: "ff0".into(),
        };
        assert_eq!(state.apply(&other), Err(Refusal::Different));
        let mut elsewhere = attach("x", None);
        if let Command::Attach { network, .. } = &mut elsewhere {
            *network = "none".into();
        }
        assert_eq!(state.apply(&elsewhere), Err(Refusal::UnknownNetwork));
    }
}
