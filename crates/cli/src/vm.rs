//! `freeflow vm`: vNICs of virtual machines.
//!
//! A vNIC is a virtual machine's by one label, which says how large its shared-memory device is. The router makes the
//! device's file and the socket of the control channel in the vNIC's directory.

use crate::admin::Admin;
use crate::arguments::Format;
use crate::arguments_control::VmAction;
use crate::failure::{Result, fail};
use crate::output;
use crate::record::check_name;
use freeflow_hostnet::run_dir::RunDir;
use freeflow_protocol::admin::VnicStatus;
use freeflow_protocol::guest::is_fallback;
use serde_json::{Value, json};

/// The label: the device's size, bytes.
const LABEL: &str = "guest_memory";

/// Id of a virtual machine's vNIC, which no container has.
fn id_of(name: &str) -> String {
    format!("vm-{name}")
}

pub fn vm(run_dir: &RunDir, action: VmAction) -> Result<()> {
    match action {
        VmAction::Attach { name, network, address, size, output } => {
            check_name(&name)?;
            let mut admin = Admin::connect(run_dir)?;
            // Names those there are, if there is no such network.
            admin.network(&network)?;
            let id = id_of(&name);
            let there = admin.vnics()?.into_iter().find(|vnic| vnic.id == id);
            if let Some(there) = there.filter(|there| device_bytes(there) != Some(size)) {
                fail!(
                    "{name} has a shared-memory device of {} bytes; detach it first",
                    device_bytes(&there).unwrap_or_default()
                );
            }
            let labels = vec![(LABEL.to_string(), size.to_string())];
            let vnic = admin.attach(&id, &name, &network, address, labels)?;
            show(&vnic, size, output.format);
        }
        VmAction::Ls { output } => list(run_dir, output.format)?,
        VmAction::Detach { names } => detach(run_dir, &names)?,
    }
    Ok(())
}

/// The host is down: files of shared-memory devices that are not in the run directory, because that is on a disk, go
/// with it.
pub fn remove_devices(run_dir: &RunDir) {
    let Ok(vnics) = std::fs::read_dir(run_dir.vnics()) else { return };
    for vnic in vnics.flatten() {
        if let Ok(file) = std::fs::read_link(vnic.path().join("memory"))
            && file.to_str().is_some_and(is_fallback)
        {
            let _ = std::fs::remove_file(file);
        }
    }
}

fn device_bytes(vnic: &VnicStatus) -> Option<u64> {
    vnic.labels.iter().find(|(name, _)| name == LABEL)?.1.parse().ok()
}

/// Arguments for QEMU, besides `-machine …,nvdimm=on` and `-m …,slots=,maxmem=`.
fn qemu_arguments(vnic: &VnicStatus, size: u64) -> Vec<String> {
    let (id, directory) = (&vnic.id, &vnic.directory);
    [
        "-object",
        &format!("memory-backend-file,id={id}-memory,share=on,size={size},mem-path={directory}/memory"),
        "-device",
        &format!("nvdimm,memdev={id}-memory"),
        "-device",
        "virtio-serial",
        "-chardev",
        &format!("socket,id={id}-control,path={directory}/control.sock,reconnect=1"),
        "-device",
        &format!("virtserialport,chardev={id}-control,name=io.freeflow.0"),
    ]
    .map(String::from)
    .to_vec()
}

fn describe(vnic: &VnicStatus, size: u64) -> Value {
    json!({
        "name": vnic.name,
        "id": vnic.id,
        "network": vnic.network,
        "address": vnic.address,
        "size": size,
        "sessions": vnic.session_count,
        "memory": format!("{}/memory", vnic.directory),
        "control": format!("{}/control.sock", vnic.directory),
        "qemu": qemu_arguments(vnic, size),
    })
}

fn show(vnic: &VnicStatus, size: u64, format: Format) {
    if format == Format::Json {
        return output::json(&describe(vnic, size));
    }
    output::line(format!("{} has the address {} in the network {}.", vnic.name, vnic.address, vnic.network));
    output::line("QEMU's arguments, besides -machine q35,nvdimm=on -m SIZE,slots=4,maxmem=64G:");
    for pair in qemu_arguments(vnic, size).chunks(2) {
        output::line(format!("  {}", pair.join(" ")));
    }
}

fn machines(run_dir: &RunDir) -> Result<Vec<(VnicStatus, u64)>> {
    let vnics = Admin::connect(run_dir)?.vnics()?;
    Ok(vnics.into_iter().filter_map(|vnic| device_bytes(&vnic).map(|size| (vnic, size))).collect())
}

fn list(run_dir: &RunDir, format: Format) -> Result<()> {
    let machines = machines(run_dir)?;
    if format == Format::Json {
        output::json(&machines.iter().map(|(vnic, size)| describe(vnic, *size)).collect::<Vec<_>>());
        return Ok(());
    }
    let mut rows = vec![["NAME", "NETWORK", "ADDRESS", "DEVICE", "PROCESSES"].map(String::from).to_vec()];
    rows.extend(machines.iter().map(|(vnic, size)| {
        let (name, network) = (vnic.name.clone(), vnic.network.clone());
        vec![name, network, vnic.address.to_string(), output::bytes(*size), vnic.session_count.to_string()]
    }));
    output::table(&rows);
    Ok(())
}

fn detach(run_dir: &RunDir, names: &[String]) -> Result<()> {
    let there = machines(run_dir)?;
    if let Some(missing) = names.iter().find(|name| !there.iter().any(|(vnic, _)| vnic.name == **name)) {
        fail!("no virtual machine {missing} has a vNIC; see freeflow vm ls");
    }
    let mut admin = Admin::connect(run_dir)?;
    names.iter().try_for_each(|name| admin.detach(&id_of(name)))
}
