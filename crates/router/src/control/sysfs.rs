//! Files that programs read below `/sys/class`: a tree of small files in each vNIC's directory,
//! which containers get mounted over their own `/sys/class`. Names and formats are those of Linux
//! (`Documentation/ABI/stable/sysfs-class-infiniband`).
//!
//! ```text
//! RUN_DIR/vnics/ID/sysfs/     in the container: /sys/class/
//!   .freeflow/                the device: vendor, numa_node, …
//!     infiniband/freeflow0/   its verbs device: node_guid, ports/1/…
//!     infiniband_verbs/uverbs0/
//!   infiniband/freeflow0      a link to the former, as in the kernel: what lies two up is the device
//!   infiniband_verbs/, infiniband_mad/
//! ```
//!
//! Two things of it are not the router's: `gid_attrs/ndevs/0` (and `2`), the network interface with
//! the vNIC's addresses, and the link `.freeflow/net/INTERFACE` are written by whoever plugs that
//! in. Without one they are absent (in the kernel's the former can't be read then).
//!
//! Invariant: each text equals what the verbs answer. Files change by renaming, so no reader sees half a value.
use crate::control::device::{DEVICE_NAME, GID_TABLE_LENGTH, device_attributes};
use crate::control::sysfs_counters::{HARDWARE_COUNTERS, PORT_COUNTERS, Values};
use crate::control::vnic_entry::Record;
use freeflow_verbs::{Gid, NetworkId, PortAttributes};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

const DIRECTORY: &str = "sysfs";
/// The device's directory. Its name begins with a dot: it is no class.
const DEVICE: &str = ".freeflow";
/// Lives for a moment beside the classes, where no container looks.
const BESIDE: &str = ".new";
const DIRECTORY_MODE: u32 = 0o755;
const FILE_MODE: u32 = 0o444;
/// `node_desc`, without its newline (IBTA 14.2.5.2).
const NODE_DESCRIPTION_BYTES_MAX: usize = 63;

/// As `ibv_query_device` and `ibv_query_port` say.
const VENDOR_ID: u32 = 0x1f5f;
const VENDOR_PART_ID: u32 = 1;
/// CM_SUP and IP_BASED_GIDS.
const PORT_CAPABILITIES: u32 = 1 << 16 | 1 << 26;
/// Interface versions: of the verbs in the kernel (`IB_USER_VERBS_ABI_VERSION`), of a provider without a kernel part of
/// its own, of management datagrams (`IB_USER_MAD_ABI_VERSION`; there is no port for those, but ibstat asks).
const VERBS_ABI_VERSION: u32 = 6;
const PROVIDER_ABI_VERSION: u32 = 1;
const MAD_ABI_VERSION: u32 = 5;
/// `/dev/infiniband/uverbs0` of a container is a null device.
const DEVICE_NUMBER: &str = "1:3";

pub fn directory(vnic_directory: &Path) -> PathBuf {
    vnic_directory.join(DIRECTORY)
}

/// The port's directory within the tree.
fn port_directory() -> String {
    format!("{DEVICE}/infiniband/{DEVICE_NAME}/ports/1")
}

/// Makes the tree, or brings one that a former router left up to date, in place: containers have it mounted.
pub fn make(tree: &Path, vnic: &Record, network: NetworkId, gids: &[Gid], values: &Values) -> io::Result<()> {
    let is_new = !tree.exists();
    let port = port_directory();
    for directory in ["gid_attrs/ndevs", "gid_attrs/types", "gids", "pkeys", "counters", "hw_counters"] {
        make_directory(&tree.join(&port).join(directory))?;
    }
    let own = files(vnic, network);
    if is_new {
        let counters = counter_files(values, None);
        create(tree, own.into_iter().chain(gid_files(gids)).chain(counters).collect())?;
    } else {
        own.iter().try_for_each(|(path, text)| write_changed(tree, path, text))?;
        write_gids(tree, gids)?;
        write_counters(tree, values, None)?;
    }
    for (path, target) in links() {
        make_directory(tree.join(&path).parent().unwrap_or(tree))?;
        match symlink(target, tree.join(path)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Creates files that nobody reads yet. Those of one text are one file, until one of them changes and another takes its
/// place: a tree has a hundred, most of them zeros, and containers wait for it.
fn create(tree: &Path, files: Vec<(String, String)>) -> io::Result<()> {
    let mut made: BTreeMap<String, PathBuf> = BTreeMap::new();
    for (path, text) in files {
        let path = tree.join(path);
        if made.get(&text).is_some_and(|same| fs::hard_link(same, &path).is_ok()) {
            continue;
        }
        make_directory(path.parent().unwrap_or(tree))?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&path)?;
        if file.metadata()?.permissions().mode() & 0o777 != FILE_MODE {
            file.set_permissions(fs::Permissions::from_mode(FILE_MODE))?;
        }
        file.write_all(format!("{text}\n").as_bytes())?;
        made.insert(text, path);
    }
    Ok(())
}

/// Of an entry of the GID table that is filled.
fn gid_at(gids: &[Gid], index: u32) -> Option<&Gid> {
    gids.get(index as usize).filter(|gid| !gid.is_zero())
}

fn gid_type_file(index: u32) -> String {
    format!("{}/gid_attrs/types/{index}", port_directory())
}

/// The whole GID table, and the types of the entries that are filled.
fn gid_files(gids: &[Gid]) -> Vec<(String, String)> {
    let port = port_directory();
    let entry = |index| {
        let gid = gid_at(gids, index);
        let text = hexadecimal(&gid.copied().unwrap_or_default().0);
        let kind = gid.map(|_| (gid_type_file(index), "RoCE v2".to_owned()));
        std::iter::once((format!("{port}/gids/{index}"), text)).chain(kind)
    };
    (0..GID_TABLE_LENGTH).flat_map(entry).collect()
}

/// Those of them that have changed; an entry that is no more filled has no type.
pub fn write_gids(tree: &Path, gids: &[Gid]) -> io::Result<()> {
    gid_files(gids).iter().try_for_each(|(path, text)| write_changed(tree, path, text))?;
    for index in (0..GID_TABLE_LENGTH).filter(|index| gid_at(gids, *index).is_none()) {
        match fs::remove_file(tree.join(gid_type_file(index))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// The router ends in order: the port is down until the next one.
pub fn mark_down(tree: &Path) -> io::Result<()> {
    let port = port_directory();
    write(tree, &format!("{port}/state"), &state(false))?;
    write(tree, &format!("{port}/phys_state"), &physical_state(false))
}

/// Writes the counters that differ from those written before.
pub fn write_counters(tree: &Path, values: &Values, before: Option<&Values>) -> io::Result<()> {
    counter_files(values, before).iter().try_for_each(|(path, text)| write(tree, path, text))
}

fn counter_files(values: &Values, before: Option<&Values>) -> Vec<(String, String)> {
    let mut files = Vec::new();
    let port = port_directory();
    let both = [("counters", &PORT_COUNTERS[..], &values.port[..], before.map(|values| &values.port[..]))];
    let hardware = before.map(|values| &values.hardware[..]);
    for (directory, names, values, before) in
        both.into_iter().chain([("hw_counters", &HARDWARE_COUNTERS[..], &values.hardware[..], hardware)])
    {
        for (index, (name, value)) in names.iter().zip(values).enumerate() {
            if before.is_none_or(|before| before[index] != *value) {
                files.push((format!("{port}/{directory}/{name}"), value.to_string()));
            }
        }
    }
    files
}

fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path)
}

/// The same, unless the file has that line: a container may have something mounted over it, which renaming takes away.
fn write_changed(tree: &Path, path: &str, text: &str) -> io::Result<()> {
    let has_it = fs::read(tree.join(path)).is_ok_and(|there| there.strip_suffix(b"\n") == Some(text.as_bytes()));
    if has_it { Ok(()) } else { write(tree, path, text) }
}

/// Puts a line into a file, whole at once.
fn write(tree: &Path, path: &str, text: &str) -> io::Result<()> {
    let path = tree.join(path);
    make_directory(path.parent().unwrap_or(tree))?;
    // Each thread its own: the counters have one.
    let thread = std::thread::current();
    let beside = tree.join(format!("{BESIDE}-{}", thread.name().unwrap_or_default()));
    let create = || OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&beside);
    let mut file = create().or_else(|_| {
        // Left by a router that died.
        fs::remove_file(&beside)?;
        create()
    })?;
    let written = file
        .set_permissions(fs::Permissions::from_mode(FILE_MODE))
        .and_then(|()| file.write_all(format!("{text}\n").as_bytes()))
        .and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

fn links() -> [(String, String); 6] {
    let verbs_device = format!("{DEVICE}/infiniband/{DEVICE_NAME}");
    let character_device = format!("{DEVICE}/infiniband_verbs/uverbs0");
    [
        (format!("infiniband/{DEVICE_NAME}"), format!("../{verbs_device}")),
        ("infiniband_verbs/uverbs0".into(), format!("../{character_device}")),
        (format!("{verbs_device}/device"), "../..".into()),
        (format!("{character_device}/device"), "../..".into()),
        (format!("{verbs_device}/subsystem"), "../../../infiniband".into()),
        (format!("{character_device}/subsystem"), "../../../infiniband_verbs".into()),
    ]
}

fn files(vnic: &Record, network: NetworkId) -> Vec<(String, String)> {
    let device = device_attributes(vnic, network);
    let processors = Processors::of_machine();
    let guid = guid(device.node_guid);
    let mut description = format!("{} {DEVICE_NAME}", vnic.name);
    description.truncate(description.floor_char_boundary(NODE_DESCRIPTION_BYTES_MAX));
    let mut files = Vec::new();
    let mut put = |directory: &str, entries: &[(&str, String)]| {
        files.extend(entries.iter().map(|(name, text)| (format!("{directory}/{name}"), text.clone())));
    };
    put("infiniband_verbs", &[("abi_version", VERBS_ABI_VERSION.to_string())]);
    put("infiniband_mad", &[("abi_version", MAD_ABI_VERSION.to_string())]);
    let own = [
        ("vendor", format!("0x{VENDOR_ID:04x}")),
        ("device", format!("0x{VENDOR_PART_ID:04x}")),
        ("numa_node", "-1".into()),
        ("local_cpus", processors.mask()),
        ("local_cpulist", processors.list.clone()),
        ("uevent", "DRIVER=freeflow".into()),
    ];
    put(DEVICE, &own);
    let character_device = [
        ("ibdev", DEVICE_NAME.to_string()),
        ("abi_version", PROVIDER_ABI_VERSION.to_string()),
        ("dev", DEVICE_NUMBER.into()),
        ("uevent", format!("MAJOR={}\nDEVNAME=infiniband/uverbs0", DEVICE_NUMBER.replace(':', "\nMINOR="))),
    ];
    put(&format!("{DEVICE}/infiniband_verbs/uverbs0"), &character_device);
    let verbs_device = [
        ("fw_ver", device.firmware_version.clone()),
        ("hw_rev", "0x0".into()),
        ("hca_type", "FreeFlow".into()),
        ("board_id", "FREEFLOW_VNIC".into()),
        ("node_desc", description),
        ("node_type", "1: CA".into()),
        ("node_guid", guid.clone()),
        ("sys_image_guid", guid),
        ("uevent", format!("NAME={DEVICE_NAME}")),
    ];
    put(&format!("{DEVICE}/infiniband/{DEVICE_NAME}"), &verbs_device);
    put_port(&mut put, &device.port);
    files
}

fn put_port(put: &mut impl FnMut(&str, &[(&str, String)]), port: &PortAttributes) {
    let directory = port_directory();
    let own = [
        ("state", state(port.active)),
        ("phys_state", physical_state(port.active)),
        ("rate", rate(port)),
        ("link_layer", "Ethernet".into()),
        ("lid", "0x0".into()),
        ("lid_mask_count", "0".into()),
        ("sm_lid", "0x0".into()),
        ("sm_sl", "0".into()),
        ("cap_mask", format!("0x{PORT_CAPABILITIES:08x}")),
        ("pkeys/0", "0xffff".into()),
        // How old a counter may be, milliseconds.
        ("hw_counters/lifespan", (crate::dataplane::direct_traffic::INTERVAL_IDLE.0 / 1_000_000).to_string()),
    ];
    put(&directory, &own);
}

fn state(active: bool) -> String {
    if active { "4: ACTIVE" } else { "1: DOWN" }.into()
}

fn physical_state(active: bool) -> String {
    if active { "5: LinkUp" } else { "3: Disabled" }.into()
}

/// In groups of four digits.
fn hexadecimal(bytes: &[u8]) -> String {
    let groups: Vec<String> = bytes.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect();
    groups.join(":")
}

fn guid(guid: u64) -> String {
    hexadecimal(&guid.to_be_bytes())
}

/// `100 Gb/sec (4X EDR)`, as the kernel writes active speed and width (IBTA 14.2.5.6).
fn rate(port: &PortAttributes) -> String {
    let (tenths, name) = match port.active_speed {
        2 => (50, "DDR"),
        4 => (100, "QDR"),
        8 => (100, "FDR10"),
        16 => (140, "FDR"),
        32 => (250, "EDR"),
        64 => (500, "HDR"),
        128 => (1000, "NDR"),
        _ => (25, "SDR"),
    };
    let lanes = match port.active_width {
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 1,
    };
    let (whole, rest) = (tenths * lanes / 10, tenths * lanes % 10);
    let fraction = if rest > 0 { format!(".{rest}") } else { String::new() };
    format!("{whole}{fraction} Gb/sec ({lanes}X {name})")
}

/// The processors near the device: all that are online, since it is none of the machine's.
struct Processors {
    /// As the kernel writes it: `0-3,8`.
    list: String,
    possible: String,
}

impl Processors {
    fn of_machine() -> Self {
        let read = |name: &str| {
            let text = fs::read_to_string(Path::new("/sys/devices/system/cpu").join(name)).unwrap_or_default();
            if text.trim().is_empty() { "0".to_string() } else { text.trim().to_string() }
        };
        Self { list: read("online"), possible: read("possible") }
    }

    fn numbers(list: &str) -> Vec<usize> {
        let ranges = list.split(',').filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
        });
        ranges.flatten().collect()
    }

    /// A bit for each possible processor, in words of 32 with the highest first.
    fn mask(&self) -> String {
        let online = Self::numbers(&self.list);
        let bits = 1 + Self::numbers(&self.possible).into_iter().chain(online.iter().copied()).max().unwrap_or(0);
        let mut words = vec![0u32; bits.div_ceil(32)];
        for number in online {
            words[number / 32] |= 1 << (number % 32);
        }
        let mut text = String::new();
        for (at, word) in words.iter().enumerate().rev() {
            let first = text.is_empty();
            let digits = if first { (bits - 32 * at).div_ceil(4) } else { 8 };
            let _ = write!(text, "{}{word:0digits$x}", if first { "" } else { "," });
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn vnic() -> Record {
        Record {
            id: "id".into(),
            name: "web".into(),
            network: "default".into(),
            address: Ipv4Addr::new(10, 77, 0, 2),
            address6: None,
            labels: Vec::new(),
            limits: freeflow_verbs::VnicLimits::default(),
        }
    }

    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("ff-sysfs-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_tree_says_what_the_device_says() {
        let tree = Temporary::new("tree");
        make(&tree.0, &vnic(), NetworkId(1), &[vnic().gid()], &Values::default()).unwrap();
        let read = |path: &str| fs::read_to_string(tree.0.join(path)).unwrap();
        let device = "infiniband/freeflow0";
        assert_eq!(read(&format!("{device}/node_guid")), "0246:0001:0a4d:0002\n");
        assert_eq!(read(&format!("{device}/node_desc")), "web freeflow0\n");
        assert_eq!(read(&format!("{device}/ports/1/state")), "4: ACTIVE\n");
        assert_eq!(read(&format!("{device}/ports/1/rate")), "100 Gb/sec (4X EDR)\n");
        assert_eq!(read(&format!("{device}/ports/1/gids/0")), "0000:0000:0000:0000:0000:ffff:0a4d:0002\n");
        assert_eq!(read(&format!("{device}/ports/1/gid_attrs/types/0")), "RoCE v2\n");
        assert_eq!(read(&format!("{device}/ports/1/counters/port_xmit_data")), "0\n");
        assert_eq!(read(&format!("{device}/device/vendor")), "0x1f5f\n");
        assert_eq!(read(&format!("{device}/subsystem/freeflow0/node_type")), "1: CA\n");
        assert_eq!(read("infiniband_verbs/uverbs0/ibdev"), "freeflow0\n");
        assert_eq!(read("infiniband_verbs/uverbs0/uevent"), "MAJOR=1\nMINOR=3\nDEVNAME=infiniband/uverbs0\n");
        assert_eq!(
            read("infiniband_verbs/uverbs0/device/infiniband/freeflow0/fw_ver").trim(),
            env!("CARGO_PKG_VERSION")
        );
        assert!(!tree.0.join(format!("{device}/ports/1/gid_attrs/ndevs/0")).exists());
    }

    #[test]
    fn a_tree_that_is_there_is_used_on() {
        let tree = Temporary::new("again");
        make(&tree.0, &vnic(), NetworkId(1), &[vnic().gid()], &Values::default()).unwrap();
        let ports = fs::File::open(tree.0.join("infiniband/freeflow0/ports")).unwrap();
        fs::write(tree.0.join("infiniband/freeflow0/ports/1/gid_attrs/ndevs/0"), "ff0\n").unwrap();
        mark_down(&tree.0).unwrap();
        let state = tree.0.join("infiniband/freeflow0/ports/1/state");
        assert_eq!(fs::read_to_string(&state).unwrap(), "1: DOWN\n");
        fs::write(tree.0.join(format!("{BESIDE}-")), "torn").unwrap();
        let uevent = || fs::metadata(tree.0.join("infiniband/freeflow0/uevent")).unwrap().ino();
        let before = uevent();
        make(&tree.0, &vnic(), NetworkId(1), &[vnic().gid()], &Values::default()).unwrap();
        assert_eq!(fs::read_to_string(&state).unwrap(), "4: ACTIVE\n");
        assert_eq!(fs::read_to_string(state.with_file_name("gid_attrs/ndevs/0")).unwrap(), "ff0\n");
        assert_eq!(uevent(), before, "a mount over the file would be gone");
        // A directory that a container had mounted is the one that it sees now.
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::MetadataExt;
        let through = format!("/proc/self/fd/{}/1/state", ports.as_raw_fd());
        assert_eq!(fs::read_to_string(through).unwrap(), "4: ACTIVE\n");
    }

    #[test]
    fn a_second_gid_comes_and_goes() {
        let tree = Temporary::new("gids");
        let host = Gid::from_ip([192, 0, 2, 1].into());
        make(&tree.0, &vnic(), NetworkId(1), &[vnic().gid(), host], &Values::default()).unwrap();
        let port = tree.0.join("infiniband/freeflow0/ports/1");
        let read = |name: &str| fs::read_to_string(port.join(name));
        assert_eq!(read("gids/1").unwrap(), "0000:0000:0000:0000:0000:ffff:c000:0201\n");
        assert_eq!(read("gid_attrs/types/1").unwrap(), "RoCE v2\n");
        write_gids(&tree.0, &[vnic().gid()]).unwrap();
        assert_eq!(read("gids/1").unwrap(), "0000:0000:0000:0000:0000:0000:0000:0000\n");
        assert!(read("gid_attrs/types/1").is_err() && read("gid_attrs/types/0").is_ok());
        write_gids(&tree.0, &[vnic().gid(), Gid::default(), Gid::from_ip("fd00::2".parse().unwrap())]).unwrap();
        assert_eq!(read("gids/2").unwrap(), "fd00:0000:0000:0000:0000:0000:0000:0002\n");
        assert!(read("gid_attrs/types/1").is_err() && read("gid_attrs/types/2").is_ok());
    }

    #[test]
    fn only_counters_that_changed_are_written() {
        let tree = Temporary::new("counters");
        let zero = Values::default();
        make(&tree.0, &vnic(), NetworkId(1), &[vnic().gid()], &zero).unwrap();
        let mut next = Values::default();
        next.port[0] = u64::MAX;
        let counters = tree.0.join("infiniband/freeflow0/ports/1/counters");
        let other = counters.join(PORT_COUNTERS[1]);
        fs::remove_file(&other).unwrap();
        write_counters(&tree.0, &next, Some(&zero)).unwrap();
        assert_eq!(fs::read_to_string(counters.join(PORT_COUNTERS[0])).unwrap(), format!("{}\n", u64::MAX));
        assert!(!other.exists());
        // Files of one text were one file, of which nothing else has changed.
        let third = fs::read_to_string(counters.join(PORT_COUNTERS[2])).unwrap();
        assert_eq!(third, "0\n");
    }

    #[test]
    fn processors_are_written_as_the_kernel_does() {
        let mask = |list: &str, possible: &str| Processors { list: list.into(), possible: possible.into() }.mask();
        assert_eq!(mask("0-1", "0-1"), "3");
        assert_eq!(mask("0-3", "0-127"), "00000000,00000000,00000000,0000000f");
        assert_eq!(mask("0,33-34", "0-39"), "06,00000001");
        assert_eq!(mask("", "nonsense"), "0");
    }

    #[test]
    fn rates_are_written_as_the_kernel_does() {
        let base = device_attributes(&vnic(), NetworkId(1)).port;
        assert_eq!(rate(&PortAttributes { active_speed: 1, active_width: 1, ..base }), "2.5 Gb/sec (1X SDR)");
        assert_eq!(rate(&PortAttributes { active_speed: 64, active_width: 2, ..base }), "200 Gb/sec (4X HDR)");
    }
}
