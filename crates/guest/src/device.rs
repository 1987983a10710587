//! The shared-memory device in a machine: an NVDIMM, of which the kernel's own drivers make a device of DAX.
//!
//! It is made as `ndctl create-namespace --mode devdax --align 4096 --map mem` does, by sysfs alone. The kernel's
//! records of pages lie in the guest's own memory (`map=mem`), never in the device: the router clears all of that,
//! while they are in use. The kernel's label at the device's head is cleared, too; it is read only when a driver takes
//! the device.
//!
//! Invariant: an NVDIMM that holds anything but zeros, or a device of DAX with another's name, is not touched.
use crate::sysfs::Tree;
use std::io::{self, Read};
use std::path::PathBuf;
use std::time::Duration;

const ND: &str = "sys/bus/nd/devices";
const PMEM_DRIVER: &str = "sys/bus/nd/drivers/nd_pmem";
const DAX_DRIVER: &str = "sys/bus/nd/drivers/dax_pmem";
/// Our devices' name to the kernel: "freeflow", and what has no meaning.
const UUID: &str = "66726565-666c-6f77-8000-6775657374fe";
/// Mappings of any page, not of 2 MiB.
const ALIGN_BYTES: &str = "4096";
/// Where labels, partition tables and file systems have their marks.
const HEAD_BYTES: usize = 64 * 1024;
/// A node that is to come.
const WAIT_COUNT: u32 = 200;
const WAIT: Duration = Duration::from_millis(50);

/// A device that is ready.
#[derive(Debug, PartialEq, Eq)]
pub struct DaxDevice {
    pub node: PathBuf,
    /// Where its data begin in the host's file.
    pub offset: u64,
    pub bytes: u64,
}

/// NVDIMMs, as the kernel names them.
pub fn regions(tree: &Tree) -> Vec<String> {
    let is_pmem = |name: &String| tree.read(&format!("{ND}/{name}/devtype")).is_ok_and(|kind| kind == "nd_pmem");
    tree.names(ND).into_iter().filter(|name| name.starts_with("region")).filter(is_pmem).collect()
}

/// Devices of one kind in a region or another device, such as dax0.0; `dax_seed` and its like are no devices.
fn devices(tree: &Tree, parent: &str, kind: &str) -> Vec<String> {
    let is_device = |name: &String| {
        name.strip_prefix(kind).is_some_and(|number| number.starts_with(|first: char| first.is_ascii_digit()))
    };
    tree.names(&format!("{ND}/{parent}")).into_iter().filter(is_device).collect()
}

/// The device that is there already.
///
/// # Errors
/// sysfs can't be read.
pub fn find(tree: &Tree) -> io::Result<Option<DaxDevice>> {
    for region in regions(tree) {
        for name in devices(tree, &region, "dax") {
            let device = format!("{ND}/{region}/{name}");
            let is_ours = tree.read(&format!("{device}/uuid")).is_ok_and(|uuid| uuid == UUID);
            if is_ours && tree.driver(&device).is_some() {
                return describe(tree, &region, &name);
            }
        }
    }
    Ok(None)
}

/// None: no driver of DAX has made its part yet. Its number and the node's are not `name`'s.
fn describe(tree: &Tree, region: &str, name: &str) -> io::Result<Option<DaxDevice>> {
    let device = format!("{region}/{name}");
    let Some(node) = devices(tree, &device, "dax").into_iter().next() else { return Ok(None) };
    let start = tree.number(&format!("{ND}/{region}/resource"))?;
    let data = tree.number(&format!("{ND}/{device}/{node}/resource"))?;
    let offset = data.checked_sub(start).ok_or_else(|| io::Error::other("the device's data begin before it"))?;
    let bytes = tree.number(&format!("{ND}/{device}/{node}/size"))?;
    Ok(Some(DaxDevice { node: tree.path("dev").join(node), offset, bytes }))
}

/// The device, made if it is not there.
///
/// # Errors
/// There is no NVDIMM that may be taken, more than one, or the kernel refuses.
pub fn prepare(tree: &Tree) -> io::Result<DaxDevice> {
    if let Some(device) = find(tree)? {
        return Ok(device);
    }
    let mut reasons = Vec::new();
    let mut free = Vec::new();
    for region in regions(tree) {
        match free_namespace(tree, &region) {
            Ok(namespace) => free.push((region, namespace)),
            Err(why) => reasons.push(format!("{region}: {why}")),
        }
    }
    match &free[..] {
        [(region, namespace)] => make(tree, region, namespace),
        [] if reasons.is_empty() => Err(io::Error::other("no NVDIMM; see freeflow-guest doctor")),
        [] => Err(io::Error::other(format!("no NVDIMM may be taken: {}", reasons.join("; ")))),
        _ => Err(io::Error::other("several empty NVDIMMs; make one a device of DAX, and name it by --device")),
    }
}

/// The whole of an NVDIMM, if nothing is in it.
fn free_namespace(tree: &Tree, region: &str) -> io::Result<String> {
    let namespaces = devices(tree, region, "namespace");
    let [namespace] = &namespaces[..] else { return Err(io::Error::other("it is divided")) };
    let path = format!("{ND}/{region}/{namespace}");
    if tree.driver(&path).is_none() {
        // Fails for one that is something else by its label, such as a device of DAX.
        tree.write(&format!("{PMEM_DRIVER}/bind"), namespace)?;
    }
    let blocks = tree.names(&format!("{path}/block"));
    let [block] = &blocks[..] else { return Err(io::Error::other("it is in use")) };
    let mut head = vec![0; HEAD_BYTES];
    std::fs::File::open(tree.path("dev").join(block))?.read_exact(&mut head)?;
    if head.iter().any(|&byte| byte != 0) {
        return Err(io::Error::other("it holds data, which would be lost"));
    }
    if !tree.names(&format!("sys/block/{block}/holders")).is_empty() {
        return Err(io::Error::other("it is in use"));
    }
    Ok(namespace.clone())
}

fn make(tree: &Tree, region: &str, namespace: &str) -> io::Result<DaxDevice> {
    let name = tree.read(&format!("{ND}/{region}/dax_seed"))?;
    tree.write(&format!("{PMEM_DRIVER}/unbind"), namespace)?;
    let set = |attribute: &str, text: &str| tree.write(&format!("{ND}/{region}/{name}/{attribute}"), text);
    let made = set("uuid", UUID)
        .and_then(|()| set("align", ALIGN_BYTES))
        .and_then(|()| set("mode", "ram"))
        .and_then(|()| set("namespace", namespace))
        .and_then(|()| tree.write(&format!("{DAX_DRIVER}/bind"), &name));
    if let Err(error) = made {
        // As it was.
        let _ = set("namespace", "");
        let _ = tree.write(&format!("{PMEM_DRIVER}/bind"), namespace);
        return Err(error);
    }
    for _ in 0..WAIT_COUNT {
        if let Some(device) = describe(tree, region, &name)?.filter(|device| device.node.exists()) {
            return Ok(device);
        }
        std::thread::sleep(WAIT);
    }
    Err(io::Error::other(format!("no node of {name} appears; see freeflow-guest doctor")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sysfs::recorded::{DAX, NVDIMM, Recorded};

    fn with_head(head: &[u8]) -> Recorded {
        let recorded = Recorded::of(NVDIMM);
        std::fs::create_dir_all(recorded.tree.path("dev")).unwrap();
        std::fs::write(recorded.tree.path("dev/pmem0"), head).unwrap();
        recorded
    }

    #[test]
    fn a_device_that_is_there_is_found_and_its_data_lie_behind_the_label() {
        let recorded = Recorded::of(NVDIMM);
        assert_eq!(find(&recorded.tree).unwrap(), None);
        recorded.add(DAX);
        assert_eq!(find(&recorded.tree).unwrap(), None, "another's");
        recorded.add(&format!("{ND}/region0/dax0.0/uuid={UUID}"));
        let node = recorded.tree.path("dev/dax0.0");
        let device = DaxDevice { node, offset: 2 << 20, bytes: 266_338_304 };
        assert_eq!(find(&recorded.tree).unwrap().as_ref(), Some(&device));
        assert_eq!(prepare(&recorded.tree).unwrap(), device);
    }

    #[test]
    fn the_node_has_another_number_at_the_next_boot() {
        let recorded = Recorded::of(NVDIMM);
        recorded.add(&DAX.replace("region0/dax0.0/", "region0/dax0.1/"));
        recorded.add(&format!("{ND}/region0/dax0.1/uuid={UUID}"));
        assert_eq!(find(&recorded.tree).unwrap().unwrap().node, recorded.tree.path("dev/dax0.0"));
    }

    #[test]
    fn an_empty_nvdimm_is_made_a_device() {
        let recorded = with_head(&[0; HEAD_BYTES]);
        // The kernel's part of it, which a tree of files does not do.
        recorded.add(DAX);
        let tree = &recorded.tree;
        assert_eq!(prepare(tree).unwrap().offset, 2 << 20);
        for (file, content) in [
            ("sys/bus/nd/drivers/nd_pmem/unbind", "namespace0.0"),
            ("sys/bus/nd/devices/region0/dax0.0/uuid", UUID),
            ("sys/bus/nd/devices/region0/dax0.0/align", "4096"),
            ("sys/bus/nd/devices/region0/dax0.0/mode", "ram"),
            ("sys/bus/nd/devices/region0/dax0.0/namespace", "namespace0.0"),
            ("sys/bus/nd/drivers/dax_pmem/bind", "dax0.0"),
        ] {
            assert_eq!(tree.read(file).unwrap(), content, "{file}");
        }
    }

    #[test]
    fn what_holds_data_is_not_touched() {
        let mut head = vec![0; HEAD_BYTES];
        head[4096] = 1;
        let recorded = with_head(&head);
        let error = prepare(&recorded.tree).unwrap_err().to_string();
        assert!(error.contains("region0: it holds data"), "{error}");
        assert_eq!(recorded.tree.read("sys/bus/nd/drivers/nd_pmem/unbind").unwrap(), "");
        assert_eq!(recorded.tree.read("sys/bus/nd/devices/region0/dax0.0/mode").unwrap(), "none");
    }

    #[test]
    fn without_an_nvdimm_or_with_two_nothing_is_made() {
        let recorded = Recorded::of("sys/bus/nd/devices/region0/devtype=nd_blk");
        assert!(prepare(&recorded.tree).unwrap_err().to_string().contains("no NVDIMM;"));
        let recorded = with_head(&[0; HEAD_BYTES]);
        recorded.add(&NVDIMM.replace(" -> ../../../../bus/nd/drivers/nd_pmem", "0=").replace("region0", "region1"));
        recorded.add("sys/bus/nd/devices/region1/namespace0.0/driver -> ../../../../bus/nd/drivers/nd_pmem");
        assert!(prepare(&recorded.tree).unwrap_err().to_string().contains("several empty"));
    }

    #[test]
    fn a_kernel_that_refuses_leaves_the_nvdimm_as_it_was() {
        let recorded = with_head(&[0; HEAD_BYTES]);
        std::fs::remove_file(recorded.tree.path("sys/bus/nd/drivers/dax_pmem/bind")).unwrap();
        std::fs::create_dir(recorded.tree.path("sys/bus/nd/drivers/dax_pmem/bind")).unwrap();
        assert!(prepare(&recorded.tree).unwrap_err().to_string().contains("dax_pmem/bind"));
        assert_eq!(recorded.tree.read("sys/bus/nd/drivers/nd_pmem/bind").unwrap(), "namespace0.0");
        assert_eq!(recorded.tree.read("sys/bus/nd/devices/region0/dax0.0/namespace").unwrap(), "");
    }
}
