//! The control channel in a machine: a virtio-serial port, found by its name.
use crate::sysfs::Tree;
use std::path::PathBuf;

/// Name of the port.
pub const PORT: &str = "io.freeflow.0";
const PORTS: &str = "sys/class/virtio-ports";

/// Node of the port. udev's `/dev/virtio-ports` is not needed.
pub fn find(tree: &Tree) -> Option<PathBuf> {
    let is_ours = |port: &String| tree.read(&format!("{PORTS}/{port}/name")).is_ok_and(|name| name == PORT);
    let port = tree.names(PORTS).into_iter().find(is_ours)?;
    Some(tree.path("dev").join(port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sysfs::recorded::{PORT, Recorded};

    #[test]
    fn the_port_is_found_by_its_name() {
        let recorded = Recorded::of("sys/class/virtio-ports/vport0p1/name=org.qemu.guest_agent.0");
        assert_eq!(find(&recorded.tree), None);
        let recorded = Recorded::of(PORT);
        assert_eq!(find(&recorded.tree), Some(recorded.tree.path("dev/vport0p2")));
    }
}
