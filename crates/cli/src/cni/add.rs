//! `ADD` and `CHECK`: a vNIC for a network namespace, and whether it is as it was added.

use crate::admin::Admin;
use crate::cluster::{check_drained, meet};
use crate::cni::answer::{self, Added, Address, CniResult, Code, Coded, Interface, refuse};
use crate::cni::attachments::{Attachment, Attachments, ENGINE, Key};
use crate::cni::call::Call;
use crate::cni::configuration::{AddressSource, Configuration};
use crate::cni::sandbox::{self, Sandbox};
use crate::container_names;
use crate::inject_sysfs::name_interface;
use crate::names;
use crate::networks;
use crate::record::NAME_BYTES_MAX;
use freeflow_hostnet::addresses::{self, InterfaceAddress, overlap, parse_cidr};
use freeflow_hostnet::namespace::in_network;
use freeflow_hostnet::ports::{self, Bridge, Plugged};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_hostnet::{bridges, links};
use freeflow_protocol::admin::{NetworkStatus, VnicStatus};
use serde_json::Value;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;

/// Bytes of random hex digits in a vNIC's id.
const ID_BYTES: usize = 10;
/// As engines shorten a container's id.
const SHORT_ID_LENGTH: usize = 12;

/// The attachment, its namespace, and the host's router.
struct Attaching<'a> {
    run_dir: &'a RunDir,
    admin: Admin,
    sandbox: Sandbox,
    call: &'a Call,
    configuration: &'a Configuration,
}

pub fn add(run_dir: &RunDir, call: &Call, configuration: &Configuration) -> CniResult<Value> {
    let network = configuration.network_of(&call.pod)?;
    let asked = configuration.address(call)?;
    let sandbox = open_sandbox(call)?;
    let admin = Admin::connect(run_dir).coded(Code::TryAgainLater)?;
    let mut attaching = Attaching { run_dir, admin, sandbox, call, configuration };
    let network = attaching.admin.network(network).coded(Code::Configuration)?;
    check_drained(run_dir, &network.name).coded(Code::TryAgainLater)?;
    attaching.check_address(&network, asked)?;
    let attachments = Attachments::of(run_dir);
    // Others that can't be ended are no reason to refuse this one.
    let _ = attachments.settle(Some(&mut attaching.admin), |other| other.namespace.seen_at(&other.path));
    let mut attachment = attaching.attachment(&network)?;
    attachments.begin(&attachment, &mut attaching.admin)?;
    let made = attaching.make(&network, asked, &mut attachment).and_then(|added| {
        attachments.finish(&attachment)?;
        answer::result(configuration.version, configuration.previous.as_ref(), &added, configuration.dns.as_ref())
    });
    if made.is_err() {
        // The next ADD or DEL of this one ends what can't be ended now.
        let _ = attachments.lock().and_then(|_lock| attachments.end(&attachment, Some(&mut attaching.admin)));
    }
    made
}

fn open_sandbox(call: &Call) -> CniResult<Sandbox> {
    let Some(path) = &call.namespace else {
        refuse!(Code::Environment, "CNI_NETNS is missing");
    };
    let sandbox = Sandbox::open(path)
        .map_err(|failure| answer::CniError::new(Code::Environment, format!("CNI_NETNS: {failure}")))?;
    if sandbox.is_hosts() {
        refuse!(Code::Environment, "CNI_NETNS={} is the host's network namespace", path.display());
    }
    Ok(sandbox)
}

/// Name of a pod, for people; for others the start of the container's id.
fn name_of(call: &Call) -> String {
    let pod = call.pod.name.as_ref().zip(call.pod.namespace.as_ref());
    let pod = pod.map(|(name, namespace)| format!("{name}.{namespace}")).filter(|name| name.len() <= NAME_BYTES_MAX);
    pod.unwrap_or_else(|| call.container.chars().take(SHORT_ID_LENGTH).collect())
}

impl Attaching<'_> {
    fn takes_pods_address(&self) -> bool {
        self.configuration.source == AddressSource::Pod
    }

    /// The interface's name, where the runtime chooses it.
    fn interface_name(&self) -> Option<&str> {
        self.configuration.previous.is_none().then_some(self.call.interface.as_str())
    }

    /// Refuses an address that the router would refuse, and says what to change.
    fn check_address(&self, network: &NetworkStatus, asked: Option<IpAddr>) -> CniResult<()> {
        if !self.takes_pods_address() {
            return Ok(());
        }
        if let Some(pool6) = &network.pool6 {
            refuse!(
                Code::Configuration,
                "the network {} has IPv6 addresses ({pool6}), and a vNIC takes only the IPv4 address of another \
                 plugin: name a network without, or \"address\": \"own\"",
                network.name
            );
        }
        let is_in_pool = |pool: &str| match (asked, parse_cidr(pool)) {
            (Some(IpAddr::V4(address)), Some(pool)) => overlap((address, 32), pool),
            _ => false,
        };
        if !is_in_pool(&network.pool) {
            let address = asked.map_or_else(String::new, |address| address.to_string());
            refuse!(
                Code::Configuration,
                "the pod's address {address} is not in {}, the addresses of the network {}: declare a Network with \
                 cidrs and range of the plugin before, or \"address\": \"own\"",
                network.pool,
                network.name
            );
        }
        Ok(())
    }

    fn check_interface(&self) -> CniResult<()> {
        let Some(name) = self.interface_name() else { return Ok(()) };
        let there = in_network(self.sandbox.namespace.as_fd(), || links::find(name)).coded(Code::Refused)?;
        if there.is_some() {
            refuse!(Code::Environment, "CNI_IFNAME={name}: the network namespace has this interface already");
        }
        Ok(())
    }

    fn attachment(&self, network: &NetworkStatus) -> CniResult<Attachment> {
        let path = self.call.namespace.as_deref().unwrap_or(Path::new(""));
        Ok(Attachment {
            key: key_of(self.call, &self.configuration.name),
            network: network.name.clone(),
            vnic: format!("cni-{}", names::digits::<ID_BYTES>()?),
            name: name_of(self.call),
            path: sandbox::absolute(path)?,
            namespace: self.sandbox.identity.clone(),
            interface: None,
            is_complete: false,
        })
    }

    fn make(
        &mut self,
        network: &NetworkStatus,
        asked: Option<IpAddr>,
        attachment: &mut Attachment,
    ) -> CniResult<Added> {
        self.check_interface()?;
        let mut labels = vec![("engine".to_string(), ENGINE.to_string())];
        labels.extend(self.configuration.labels.iter().map(|(key, value)| (key.clone(), value.clone())));
        let (id, name) = (&attachment.vnic, &attachment.name);
        let vnic = self.admin.attach(id, name, &network.name, asked, labels).coded(Code::Refused)?;
        let meeting = meet(self.run_dir, &vnic.network);
        let added = if self.takes_pods_address() {
            name_interface(Path::new(&vnic.directory), &self.call.interface);
            Added::default()
        } else {
            // A network that has a vNIC stays, so this is the one that the vNIC is in.
            let network = self.admin.network(&vnic.network)?;
            let bridge = bridges::ensure(self.run_dir, &network).coded(Code::Refused)?;
            let namespace = self.sandbox.namespace.as_fd();
            let plugged = networks::plug_into(self.run_dir, &vnic, &bridge, namespace, self.interface_name())?;
            attachment.interface = Some(plugged.interface.clone());
            self.added(&vnic, &bridge, &plugged)?
        };
        attachment.is_complete = true;
        container_names::add(self.run_dir, &mut self.admin, &vnic, &attachment.name);
        meeting.wait();
        Ok(added)
    }

    fn added(&self, vnic: &VnicStatus, bridge: &Bridge, plugged: &Plugged) -> CniResult<Added> {
        let namespace = self.sandbox.namespace.as_fd();
        let inside = in_network(namespace, || links::get(&plugged.interface)).coded(Code::Refused)?;
        let host = links::get(&plugged.port).coded(Code::Refused)?;
        let sandbox = self.call.namespace.as_ref().map(|path| path.display().to_string());
        let interface = |link: links::Link, sandbox| Interface {
            name: link.name,
            mac: link.mac,
            mtu_bytes: link.mtu_bytes,
            sandbox,
        };
        let gateway = bridge.has_gateway.then_some(vnic.gateway);
        let v4 = Address { address: vnic.address, prefix_length: vnic.prefix_length, gateway };
        // The kernel may be without IPv6.
        let v6 = vnic.address6.filter(|_| plugged.warning.is_none()).map(|address| Address {
            address: address.into(),
            prefix_length: vnic.prefix_length6,
            gateway: None,
        });
        Ok(Added {
            interfaces: vec![interface(host, None), interface(inside, sandbox)],
            addresses: std::iter::once(v4).chain(v6).collect(),
            default_route: gateway.filter(|_| plugged.has_default_route),
        })
    }
}

pub fn key_of(call: &Call, configuration: &str) -> Key {
    Key { configuration: configuration.into(), container: call.container.clone(), interface: call.interface.clone() }
}

pub fn check(run_dir: &RunDir, call: &Call, configuration: &Configuration) -> CniResult<()> {
    if configuration.previous.is_none() {
        refuse!(Code::Configuration, "prevResult is missing");
    }
    let network = configuration.network_of(&call.pod)?;
    let sandbox = open_sandbox(call)?;
    let attached = Attachments::of(run_dir).of_key(&key_of(call, &configuration.name));
    let Some(attachment) = attached.into_iter().find(|attachment| attachment.network == network) else {
        refuse!(Code::NotAsAdded, "there is no attachment of this interface to the network {network}");
    };
    if !attachment.is_complete || attachment.namespace != sandbox.identity {
        refuse!(Code::NotAsAdded, "the network namespace is another one than the attachment's");
    }
    let mut admin = Admin::connect(run_dir).coded(Code::NotAsAdded)?;
    let Some(vnic) = admin.vnics()?.into_iter().find(|vnic| vnic.id == attachment.vnic) else {
        refuse!(Code::NotAsAdded, "the vNIC {} is gone: the host was taken down", attachment.vnic);
    };
    check_addresses(configuration, &vnic)?;
    match &attachment.interface {
        Some(interface) => check_plugged(run_dir, &sandbox, interface, &vnic),
        None => Ok(()),
    }
}

/// Whether the result that the runtime keeps has the vNIC's address.
fn check_addresses(configuration: &Configuration, vnic: &VnicStatus) -> CniResult<()> {
    let ips = configuration.previous.as_ref().map_or(&Value::Null, |previous| &previous["ips"]);
    let of = |ip: &Value| ip["address"].as_str()?.split('/').next()?.parse::<IpAddr>().ok();
    if !ips.as_array().into_iter().flatten().filter_map(of).any(|address| address == vnic.address) {
        refuse!(Code::NotAsAdded, "prevResult does not have {}, the address of the vNIC {}", vnic.address, vnic.id);
    }
    Ok(())
}

fn check_plugged(run_dir: &RunDir, sandbox: &Sandbox, interface: &str, vnic: &VnicStatus) -> CniResult<()> {
    let wanted = InterfaceAddress { address: vnic.address, prefix_length: vnic.prefix_length };
    let namespace = sandbox.namespace.as_fd();
    let looked = in_network(namespace, || Ok((links::get(interface)?, addresses::ipv4_of(interface)?)));
    let (link, has) = looked.coded(Code::NotAsAdded)?;
    if !link.is_up {
        refuse!(Code::NotAsAdded, "the interface {interface} is down");
    }
    if !has.contains(&wanted) {
        refuse!(Code::NotAsAdded, "the interface {interface} does not have the address {wanted}");
    }
    let ports = ports::list(run_dir).coded(Code::NotAsAdded)?;
    if !ports.iter().any(|port| port.vnic == vnic.id && port.bridge.is_some()) {
        refuse!(Code::NotAsAdded, "the host's end of {interface} is not in the bridge of the network {}", vnic.network);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::call::{Command, Pod};

    #[test]
    fn a_pod_has_its_own_name_and_others_that_of_their_container() {
        let call = |name: Option<&str>| Call {
            command: Command::Add,
            container: "0123456789abcdef".into(),
            interface: "eth0".into(),
            namespace: None,
            pod: Pod { namespace: Some("team-a".into()), name: name.map(String::from) },
        };
        assert_eq!(name_of(&call(Some("web-0"))), "web-0.team-a");
        assert_eq!(name_of(&call(None)), "0123456789ab");
        assert_eq!(name_of(&call(Some(&"x".repeat(60)))), "0123456789ab");
    }
}
