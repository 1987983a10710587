//! Whether this machine can make what hosts and containers need, tried in network namespaces that go away at once.

use crate::failure::{Context, Result};
use crate::fork::in_child;
use crate::sys;
use freeflow_hostnet::links::{self, BridgeOptions, PeerNamespace};
use freeflow_hostnet::wire_guard::{self, Family};
use freeflow_hostnet::{guard, overlay};
use rustix::thread::UnshareFlags;

fn in_new_network(act: impl FnOnce() -> Result<()>) -> Result<()> {
    in_child(|| {
        sys::unshare(UnshareFlags::NEWNET).context("can't make a network namespace")?;
        act()
    })
}

/// Checks the abilities that containers need.
pub fn check_interfaces() -> Result<()> {
    in_new_network(|| {
        links::add_bridge("ffprobe0", BridgeOptions::default()).context("can't make a bridge")?;
        links::add_veth("ffprobe1", ("ffprobe2", PeerNamespace::Own), None).context("can't make a veth pair")
    })
}

/// Checks the abilities that hosts with peers need besides.
pub fn check_wire() -> Result<()> {
    in_new_network(|| {
        guard::check_abilities()?;
        Ok(overlay::check_abilities()?)
    })
}

/// By which program each family's guard of the wire can be put, or why it can't.
pub fn check_wire_guards() -> Vec<(Family, Result<&'static str>)> {
    let check = |family| in_new_network(|| Ok(wire_guard::check_abilities(family)?));
    Family::ALL.into_iter().map(|family| (family, check(family).map(|()| wire_guard::tool(family)))).collect()
}
