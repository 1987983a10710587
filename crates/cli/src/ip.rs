//! Bridges, veth pairs and addresses, by iproute2's `ip`.

use crate::bridges::Bridge;
use crate::failure::{Context, Failure, Result};
use crate::fork::in_child;
use crate::guard::Guard;
use crate::inject_sysfs::name_interface;
use crate::names;
use crate::output::complaint;
use crate::run_dir::{RunDir, fnv1a};
use crate::sys;
use freeflow_protocol::admin::VnicStatus;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;
use std::fs::{self, File};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};

/// Where `ip` is looked for besides PATH: a hook's PATH is short.
const DIRECTORIES: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// The host's end of a vNIC's veth pair. Whose it is says its alias; its name says nothing: whoever may declare vNICs chooses
/// ids, and with a name that follows from an id could aim at the interface of another's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    pub interface: String,
    /// [`NetworkStatus::id`](freeflow_protocol::admin::NetworkStatus::id) of the network that it was made for.
    pub network: u32,
    pub vnic: String,
    /// Into which it is plugged.
    pub bridge: Option<String>,
}

/// 15 characters, as many as an interface's name may have.
fn host_interface() -> Result<String> {
    Ok(format!("ffv{}", names::id()?))
}

fn port_alias(run_dir: &RunDir, network: u32, vnic_id: &str) -> String {
    format!("{}{network} {vnic_id}", port_prefix(run_dir))
}

fn port_prefix(run_dir: &RunDir) -> String {
    format!("freeflow {} vnic ", run_dir.short_hash())
}

/// All of this run directory's.
pub fn vnic_ports(run_dir: &RunDir) -> Result<Vec<Port>> {
    let text = run(&["-j", "link", "show", "type", "veth"])?;
    Ok(parse_ports(&text, &port_prefix(run_dir)))
}

fn parse_ports(text: &str, prefix: &str) -> Vec<Port> {
    // An empty list is no text at all in some versions.
    let links: Vec<Value> = serde_json::from_str(text).unwrap_or_default();
    let one = |link: &Value| {
        let (network, vnic) = link["ifalias"].as_str()?.strip_prefix(prefix)?.split_once(' ')?;
        Some(Port {
            interface: link["ifname"].as_str()?.to_string(),
            network: network.parse().ok()?,
            vnic: vnic.to_string(),
            bridge: link["master"].as_str().map(str::to_string),
        })
    };
    links.iter().filter_map(one).collect()
}

/// Removes an interface that may have gone by itself, with its namespace.
pub fn delete(interface: &str) {
    let _ = run(&["link", "delete", "dev", interface]);
}

/// The program `ip`, if it is installed.
pub fn program() -> Option<std::path::PathBuf> {
    crate::tools::find("ip", &DIRECTORIES)
}

/// Whether a program of iproute2 is installed.
pub fn is_there(name: &str) -> bool {
    crate::tools::find(name, &DIRECTORIES).is_some()
}

fn command(name: &str) -> Result<Command> {
    let program = crate::tools::find(name, &DIRECTORIES).ok_or_else(|| {
        let package = match name.trim_end_matches("-restore") {
            "iptables" | "ip6tables" => "iptables",
            "nft" => "nftables",
            _ => "iproute2",
        };
        Failure::new(format!("the program {name} is missing; install it, for example: apt-get install {package}"))
    })?;
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stderr(Stdio::piped()).stdout(Stdio::piped());
    Ok(command)
}

/// Runs `ip` with arguments; its output.
pub fn run(arguments: &[&str]) -> Result<String> {
    run_program("ip", arguments)
}

/// Runs `tc` (of iproute2, too).
pub fn tc(arguments: &[&str]) -> Result<String> {
    run_program("tc", arguments)
}

/// Runs `bridge` (of iproute2, too).
pub fn bridge(arguments: &[&str]) -> Result<String> {
    run_program("bridge", arguments)
}

/// Runs a program of the network's tools; its output.
pub fn run_program(name: &str, arguments: &[&str]) -> Result<String> {
    let output = command(name)?.args(arguments).output().context(format!("can't run {name}"))?;
    if !output.status.success() {
        crate::fail!("{name} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs several `ip` commands in one process; the first that fails ends the rest.
pub fn batch(lines: &[String]) -> Result<()> {
    input_to("ip", &["-batch", "-"], &lines.join("\n"))
}

/// The same with `tc`, a command a line.
pub fn tc_batch(lines: &str) -> Result<()> {
    input_to("tc", &["-batch", "-"], lines)
}

/// Runs a program of the network's tools that reads what to do from its standard input.
pub fn input_to(name: &str, arguments: &[&str], lines: &str) -> Result<()> {
    let what = format!("can't run {name}");
    let mut child = command(name)?.args(arguments).stdin(Stdio::piped()).spawn().context(&what)?;
    let mut input = child.stdin.take().expect("stdin is a pipe");
    let written = input.write_all(format!("{lines}\n").as_bytes());
    drop(input);
    let output = child.wait_with_output().context(&what)?;
    if !output.status.success() {
        crate::fail!("{name} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    written.context(what)
}

/// Runs a function in another process' network namespace.
pub fn in_network_of(pid: u32, act: impl FnOnce() -> Result<()>) -> Result<()> {
    let namespace = File::open(format!("/proc/{pid}/ns/net")).context("the container's network namespace")?;
    in_child(|| {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .context("can't enter the container's network namespace")?;
        act()
    })
}

/// Whether two processes share a network namespace.
pub fn same_network(one: u32, other: u32) -> Result<bool> {
    let link = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/net")).context("network namespace");
    Ok(link(one)? == link(other)?)
}

/// Gives a process' network namespace its end of the vNIC, its address and, where the network has a gateway and no default route
/// is there yet, that.
/// Returns the interface's name inside.
pub fn plug(run_dir: &RunDir, vnic: &VnicStatus, bridge: &Bridge, pid: u32) -> Result<String> {
    let Bridge { name: bridge, network, has_gateway } = bridge;
    if !exists(bridge) {
        crate::fail!("the bridge {bridge} is gone; make it again with freeflow up");
    }
    // A container of this id that is no more may have left its own.
    unplug(run_dir, &vnic.id);
    let host = host_interface()?;
    let inside = free_name(pid)?;
    let mtu = mtu(bridge)?;
    batch(&[format!("link add name {host} mtu {mtu} type veth peer name {inside} mtu {mtu} netns {pid}")])?;
    // Guarded before it carries anything.
    let result = run(&["link", "set", "dev", &host, "alias", &port_alias(run_dir, *network, &vnic.id)])
        .and_then(|_| Guard::of(run_dir).put(&host))
        .and_then(|()| run(&["link", "set", "dev", &host, "master", bridge, "up"]))
        .and_then(|_| in_network_of(pid, || configure(vnic, *has_gateway, &inside)));
    if result.is_err() {
        delete(&host);
    }
    result?;
    name_interface(Path::new(&vnic.directory), &inside);
    Ok(inside)
}

/// The first of `ff0`, `ff1`, … that the namespace does not have (containers of a pod share one).
fn free_name(pid: u32) -> Result<String> {
    // /proc/PID/net is that process' view, so no need to enter.
    let table = fs::read_to_string(format!("/proc/{pid}/net/dev")).context("the container's interfaces")?;
    let names: Vec<&str> = table.lines().filter_map(|line| Some(line.split_once(':')?.0.trim())).collect();
    (0..100)
        .map(|number| format!("ff{number}"))
        .find(|name| !names.contains(&name.as_str()))
        .ok_or_else(|| Failure::new("a hundred vNICs share this network namespace already"))
}

fn configure(vnic: &VnicStatus, has_gateway: bool, interface: &str) -> Result<()> {
    batch(&[
        "link set dev lo up".to_string(),
        format!("address add {}/{} dev {interface}", vnic.address, vnic.prefix_length),
        format!("link set dev {interface} up"),
    ])?;
    if let Some(address) = vnic.address6
        && let Err(failure) = configure_ipv6(interface, address, vnic.prefix_length6)
    {
        // The kernel may be without IPv6, or the interface's MTU below what that takes.
        complaint(format!(
            "warning: {interface} does not get the address {address}, which then is for RDMA only: {failure}"
        ));
    }
    if has_gateway && run(&["route", "show", "default"])?.trim().is_empty() {
        run(&["route", "add", "default", "via", &vnic.gateway.to_string(), "dev", interface])?;
    }
    Ok(())
}

/// Nobody else can have the address, so nobody is asked (nodad). The rest of the namespace may be without IPv6, as engines often
/// make it.
fn configure_ipv6(interface: &str, address: Ipv6Addr, prefix_length: u8) -> Result<()> {
    let settings = format!("/proc/sys/net/ipv6/conf/{interface}");
    fs::write(format!("{settings}/disable_ipv6"), "0").context("no IPv6 in this kernel")?;
    // No router is there, and other containers are none.
    fs::write(format!("{settings}/accept_ra"), "0").context("router advertisements")?;
    run(&["address", "add", &format!("{address}/{prefix_length}"), "dev", interface, "nodad"]).map(|_| ())
}

/// The largest packet that an interface takes, bytes.
pub fn mtu(interface: &str) -> Result<u32> {
    let text = run(&["-o", "link", "show", "dev", interface])?;
    word_after(&text, "mtu")
        .and_then(|word| word.parse().ok())
        .ok_or_else(|| Failure::new(format!("ip does not tell the MTU of {interface}")))
}

/// The interface that has this address.
pub fn interface_with(address: IpAddr) -> Result<Option<String>> {
    let text = run(&["-o", "address", "show", "to", &address.to_string()])?;
    Ok(text.split_whitespace().nth(1).map(str::to_string))
}

/// Removes a vNIC's veth pair, if it is there.
pub fn unplug(run_dir: &RunDir, vnic_id: &str) {
    for port in vnic_ports(run_dir).unwrap_or_default().iter().filter(|port| port.vnic == vnic_id) {
        delete(&port.interface);
    }
}

pub fn exists(interface: &str) -> bool {
    fs::read_to_string("/proc/self/net/dev").is_ok_and(|table| {
        table.lines().any(|line| line.split_once(':').is_some_and(|(name, _)| name.trim() == interface))
    })
}

/// Makes the bridge with the gateway's address in this network namespace, or corrects the one there is.
/// `host` tells apart the MAC addresses of bridges that an overlay joins.
pub fn make_bridge(bridge: &str, host: &str, gateway: IpAddr, prefix_length: u8) -> Result<()> {
    make_bare_bridge(bridge, host)?;
    let wanted = format!("{gateway}/{prefix_length}");
    let mut present = false;
    for address in addresses(bridge)? {
        if address == wanted {
            present = true;
        } else {
            run(&["address", "delete", &address, "dev", bridge])?;
        }
    }
    if !present {
        run(&["address", "add", &wanted, "dev", bridge])?;
    }
    run(&["link", "set", "dev", bridge, "up"]).map(|_| ())
}

/// Makes a bridge on which the host has no address, unless it is there.
pub fn make_bare_bridge(bridge: &str, host: &str) -> Result<()> {
    if !exists(bridge) {
        // A fixed MAC address: else it changes with the ports, and with it everyone's neighbour tables go stale.
        let hash = fnv1a(format!("{bridge}@{host}").as_bytes()).to_be_bytes();
        let mac = format!("02:ff:{:02x}:{:02x}:{:02x}:{:02x}", hash[0], hash[1], hash[2], hash[3]);
        run(&[
            "link",
            "add",
            "name",
            bridge,
            "address",
            &mac,
            "type",
            "bridge",
            "stp_state",
            "0",
            "forward_delay",
            "0",
        ])
        .context(format!("can't make the bridge {bridge}"))?;
    }
    // The host has no IPv6 address on it, whatever its ports carry. Where the kernel has no IPv6 there is nothing to turn off.
    let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{bridge}/disable_ipv6"), "1");
    Ok(())
}

/// IPv4 addresses of an interface, CIDR notation.
fn addresses(interface: &str) -> Result<Vec<String>> {
    let text = run(&["-4", "-o", "address", "show", "dev", interface])?;
    Ok(text.lines().filter_map(|line| word_after(line, "inet")).collect())
}

pub fn word_after(line: &str, keyword: &str) -> Option<String> {
    let mut words = line.split_whitespace();
    words.find(|&word| word == keyword)?;
    words.next().map(str::to_string)
}

pub fn delete_bridge(bridge: &str) -> Result<()> {
    if exists(bridge) {
        run(&["link", "delete", "dev", bridge])?;
    }
    Ok(())
}

/// Names of all interfaces that can be deleted; the loopback and the kernel's own templates can't.
pub fn virtual_interfaces() -> Result<Vec<String>> {
    Ok(names(&run(&["-o", "link", "show"])?).filter(|name| name != "lo").collect())
}

/// The interfaces in the output of `ip -o link show`.
fn names(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter_map(|line| {
        let name = line.split_whitespace().nth(1)?;
        Some(name.trim_end_matches(':').split('@').next()?.to_string())
    })
}

/// Names of the ports of a bridge.
pub fn ports(bridge: &str) -> Vec<String> {
    let Ok(text) = run(&["-o", "link", "show", "master", bridge]) else { return Vec::new() };
    names(&text).collect()
}

/// Destinations of this namespace's IPv4 routes other than those over `except`, as (address, prefix length).
pub fn routes(except: &str) -> Result<Vec<(Ipv4Addr, u8)>> {
    let text = run(&["-4", "route", "show", "table", "all"])?;
    Ok(text
        .lines()
        .filter(|line| word_after(line, "dev").as_deref() != Some(except))
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let first = words.next()?;
            let destination = if first.bytes().all(|byte| byte.is_ascii_alphabetic()) { words.next()? } else { first };
            parse_cidr(destination)
        })
        .filter(|&(_, prefix_length)| prefix_length > 0)
        .collect())
}

/// `10.0.0.0/8`, or an address alone.
pub fn parse_cidr(text: &str) -> Option<(Ipv4Addr, u8)> {
    let (address, prefix_length) = text.split_once('/').unwrap_or((text, "32"));
    let prefix_length: u8 = prefix_length.parse().ok()?;
    (prefix_length <= 32).then_some((address.parse().ok()?, prefix_length))
}

/// Whether two ranges have an address in common.
pub fn overlap(one: (Ipv4Addr, u8), other: (Ipv4Addr, u8)) -> bool {
    let shorter = one.1.min(other.1);
    let mask = u32::MAX.checked_shl(32 - u32::from(shorter)).unwrap_or(0);
    u32::from(one.0) & mask == u32::from(other.0) & mask
}

/// Whether the kernel sends bridged packets through iptables, where a firewall (Docker's, for one) drops them.
pub fn bridged_packets_are_filtered() -> bool {
    is_on("bridge-nf-call-iptables")
}

fn is_on(setting: &str) -> bool {
    fs::read_to_string(Path::new("/proc/sys/net/bridge").join(setting)).is_ok_and(|text| text.trim() == "1")
}

/// Lets packets pass between ports of the bridge, where iptables would see them. Without iptables nothing is needed.
pub fn accept_bridged(bridge: &str, accept: bool) {
    set_rule("filter", "FORWARD", &["-i", bridge, "-o", bridge, "-j", "ACCEPT"], accept);
}

/// The same, and the kernel follows no connections of these packets: other bridges may have the same addresses.
pub fn isolate_bridged(bridge: &str, isolate: bool) {
    accept_bridged(bridge, isolate);
    set_rule("raw", "PREROUTING", &["-i", bridge, "-j", "CT", "--notrack"], isolate);
}

/// For both families, each where the kernel shows that one's bridged packets.
fn set_rule(table: &str, chain: &str, rule: &[&str], wanted: bool) {
    for program in ["iptables", "ip6tables"] {
        set_rule_of(program, table, chain, rule, wanted);
    }
}

fn set_rule_of(program: &str, table: &str, chain: &str, rule: &[&str], wanted: bool) {
    let Some(iptables) = crate::tools::find(program, &DIRECTORIES) else { return };
    let iptables = |action: &str| {
        Command::new(&iptables)
            .args(["-w", "5", "-t", table, action, chain])
            .args(rule)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    if wanted && is_on(&format!("bridge-nf-call-{program}")) && !iptables("-C") {
        iptables("-I");
    }
    if !wanted {
        // Rules of earlier runs too; bounded, should a delete ever succeed without an effect.
        let _ = (0..8).take_while(|_| iptables("-D")).count();
    }
}

/// Whether this machine can make what containers need, tried in a namespace that goes away at once.
pub fn check_abilities() -> Result<()> {
    in_child(|| {
        sys::unshare(rustix::thread::UnshareFlags::NEWNET).context("can't make a network namespace")?;
        run(&["link", "add", "name", "ffprobe0", "type", "bridge"]).context("can't make a bridge")?;
        run(&["link", "add", "name", "ffprobe1", "type", "veth", "peer", "name", "ffprobe2"])
            .context("can't make a veth pair")?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_an_interface_is_shows_in_its_alias_alone() {
        assert_eq!(host_interface().unwrap().len(), 15);
        assert_ne!(host_interface().unwrap(), host_interface().unwrap());
        let run_dir = |path| RunDir::new(Path::new(path)).unwrap();
        let (ours, other) = (run_dir("/run/freeflow"), run_dir("/tmp/elsewhere/b"));
        let prefix = port_prefix(&ours);
        let link = |name, alias| format!(r#"{{"ifname": "{name}", "ifalias": "{alias}", "master": "ffn1"}}"#);
        let text = [
            link("ffv000000000001", port_alias(&ours, 7, "web")),
            link("ffv000000000002", port_alias(&other, 7, "web")),
            link("ffv000000000003", String::new()),
            link("ffv000000000004", format!("freeflow {} red 3", ours.short_hash())),
            r#"{"ifname": "ffv000000000005"}, {}"#.to_string(),
        ];
        let port = Port {
            interface: "ffv000000000001".into(),
            network: 7,
            vnic: "web".into(),
            bridge: Some("ffn1".to_string()),
        };
        assert_eq!(parse_ports(&format!("[{}]", text.join(", ")), &prefix), [port]);
        assert!(parse_ports("", &prefix).is_empty());
    }

    #[test]
    fn ranges_overlap_or_not() {
        let range = |text| parse_cidr(text).unwrap();
        assert!(overlap(range("10.111.0.0/16"), range("10.0.0.0/8")));
        assert!(overlap(range("10.111.3.4"), range("10.111.0.0/16")));
        assert!(!overlap(range("10.112.0.0/16"), range("10.111.0.0/16")));
        assert!(overlap(range("0.0.0.0/0"), range("192.0.2.0/24")));
        assert_eq!(parse_cidr("10.0.0.0/33"), None);
        assert_eq!(parse_cidr("fe80::/64"), None);
    }
}
