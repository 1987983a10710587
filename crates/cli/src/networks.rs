//! Changes that the command makes to the host's network by itself: after networks or vNICs have
//! come or gone, and for a container.

use crate::admin::{Admin, Presence};
use crate::container_names;
use crate::failure::{Failure, Result};
use crate::inject_sysfs::name_interface;
use crate::{output, sys, tools};
use freeflow_hostnet::inventory::Inventory;
use freeflow_hostnet::ports::{self, Bridge, Plugged};
use freeflow_hostnet::reconciler::{explain, reconcile};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_protocol::admin::VnicStatus;
use std::os::fd::BorrowedFd;
use std::path::Path;

/// The CDI file, interfaces and bridges that nobody needs, names of vNICs. A caller who may not do this leaves it
/// to the router, whose reconciler does it, too.
pub fn reconcile_host(run_dir: &RunDir) {
    if !sys::is_privileged() || run_dir.enter_network().is_err() {
        return;
    }
    let Presence::Running(mut admin) = Admin::look(run_dir) else { return };
    let done = tools::own_path()
        .and_then(|program| reconcile(run_dir, &program, || Ok(inventory(&mut admin)?)).map_err(Failure::from));
    if let Err(failure) = done {
        output::complaint(explain(&failure));
    }
    container_names::update_if_up(run_dir);
}

/// The vNICs before the networks: a network has begun before its vNICs.
pub fn inventory(admin: &mut Admin) -> Result<Inventory> {
    let vnics = admin.vnics()?.iter().map(Into::into).collect();
    Ok(Inventory { networks: admin.networks()?, vnics })
}

/// Plugs a vNIC into its network and its container; the interface's name inside. What the kernel
/// lacks for IPv6 is a warning.
pub fn plug(run_dir: &RunDir, vnic: &VnicStatus, bridge: &Bridge, pid: u32) -> Result<String> {
    let plugged = ports::plug(run_dir, vnic, bridge, pid)?;
    show(vnic, &plugged);
    Ok(plugged.interface)
}

/// The same for a network namespace, see [`ports::plug_into`].
pub fn plug_into(
    run_dir: &RunDir,
    vnic: &VnicStatus,
    bridge: &Bridge,
    namespace: BorrowedFd<'_>,
    name: Option<&str>,
) -> Result<Plugged> {
    let plugged = ports::plug_into(run_dir, vnic, bridge, namespace, name)?;
    show(vnic, &plugged);
    Ok(plugged)
}

fn show(vnic: &VnicStatus, plugged: &Plugged) {
    if let Some(warning) = &plugged.warning {
        output::complaint(format!("warning: {warning}"));
    }
    name_interface(Path::new(&vnic.directory), &plugged.interface);
}
