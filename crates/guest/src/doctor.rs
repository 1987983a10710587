//! `freeflow-guest doctor`: which part of the way to the host's router is missing, and the command that mends it.
use crate::channel;
use crate::device;
use crate::sysfs::Tree;

/// Something that has to be there.
#[derive(Debug, PartialEq, Eq)]
pub struct Check {
    pub name: &'static str,
    /// The thing found; else the reason, and how that is mended.
    pub found: Result<String, String>,
}

const ATTACH: &str = "start the machine with the arguments that `freeflow vm attach` prints on the host";
const FULL_KERNEL: &str =
    "if there is no such module, the kernel was built without it: take the distribution's full one";

/// Modules in the order in which they are needed: the name, and a directory that is there once its driver is.
const MODULES: [(&str, &str); 5] = [
    ("nfit", "sys/bus/acpi/drivers/nfit"),
    ("nd_pmem", "sys/bus/nd/drivers/nd_pmem"),
    ("device_dax", "sys/bus/dax/drivers/device_dax"),
    ("dax_pmem", "sys/bus/nd/drivers/dax_pmem"),
    ("virtio_console", "sys/bus/virtio/drivers/virtio_console"),
];

/// Everything, in the order in which it has to be mended.
pub fn examine(tree: &Tree, socket: &str) -> Vec<Check> {
    let mut checks: Vec<Check> = MODULES
        .map(|(name, driver)| {
            let missing = || format!("not loaded: `modprobe {name}`; {FULL_KERNEL}");
            let found = if tree.exists(driver) { Ok("loaded".into()) } else { Err(missing()) };
            Check { name, found }
        })
        .into();
    let has_nfit = checks[0].found.is_ok();
    checks.push(Check { name: "NVDIMM", found: nvdimm(tree, has_nfit) });
    checks.push(Check { name: "device", found: dax_device(tree) });
    let port = channel::find(tree);
    let found = match port {
        Some(node) if node.exists() => Ok(node.display().to_string()),
        Some(node) => Err(format!("{} is missing: `mount -t devtmpfs dev /dev`", node.display())),
        None => Err(format!("no virtio-serial port is called {}: {ATTACH}", channel::PORT)),
    };
    checks.push(Check { name: "port", found });
    let agent = if tree.exists(socket.trim_start_matches('/')) {
        Ok(socket.to_owned())
    } else {
        Err(format!("{socket} is missing, so no agent serves: `freeflow-guest`, as root, says why"))
    };
    checks.push(Check { name: "agent", found: agent });
    checks
}

fn nvdimm(tree: &Tree, has_nfit: bool) -> Result<String, String> {
    let regions = device::regions(tree);
    if !regions.is_empty() {
        return Ok(regions.join(", "));
    }
    let is_there = tree.names("sys/bus/acpi/devices").iter().any(|name| name.starts_with("ACPI0012"));
    Err(match (is_there, has_nfit) {
        (true, false) => "there is one, which the kernel has not looked at: `modprobe nfit`".into(),
        (true, true) => "there is a place for one, and no NVDIMM in it: see `dmesg`".into(),
        (false, _) => format!("the machine has none: {ATTACH}"),
    })
}

fn dax_device(tree: &Tree) -> Result<String, String> {
    match device::find(tree) {
        Ok(Some(device)) if device.node.exists() => {
            Ok(format!("{}, {} bytes from {} on", device.node.display(), device.bytes, device.offset))
        }
        Ok(Some(device)) => Err(format!("{} is missing: `mount -t devtmpfs dev /dev`", device.node.display())),
        Ok(None) => Err("not made yet: `freeflow-guest device`, as root; the agent does it by itself".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// A line for each check.
pub fn report(checks: &[Check]) -> String {
    let line = |check: &Check| match &check.found {
        Ok(found) => format!("ok       {:15} {found}\n", check.name),
        Err(missing) => format!("missing  {:15} {missing}\n", check.name),
    };
    checks.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sysfs::recorded::{DAX, NVDIMM, PORT, Recorded};

    const SOCKET: &str = "/run/freeflow/router.sock";

    fn missing(tree: &Tree) -> Vec<&'static str> {
        examine(tree, SOCKET).iter().filter(|check| check.found.is_err()).map(|check| check.name).collect()
    }

    #[test]
    fn each_part_that_is_missing_is_named_with_what_mends_it() {
        let recorded = Recorded::of("sys/bus/acpi/devices/ACPI0012:00/");
        assert_eq!(
            missing(&recorded.tree),
            ["nfit", "nd_pmem", "device_dax", "dax_pmem", "virtio_console", "NVDIMM", "device", "port", "agent"]
        );
        let text = report(&examine(&recorded.tree, SOCKET));
        assert!(text.contains("missing  NVDIMM          there is one") && text.contains("`modprobe nfit`"), "{text}");
        recorded.add(NVDIMM);
        assert_eq!(missing(&recorded.tree), ["virtio_console", "device", "port", "agent"]);
        recorded.add(PORT);
        recorded.add(DAX);
        assert_eq!(missing(&recorded.tree), ["device", "agent"], "a device with another's name");
    }

    #[test]
    fn a_machine_without_an_nvdimm_is_told_so() {
        let recorded = Recorded::of("sys/bus/acpi/devices/PNP0A03:00/");
        let text = report(&examine(&recorded.tree, SOCKET));
        assert!(text.contains("the machine has none: start the machine with"), "{text}");
    }
}
