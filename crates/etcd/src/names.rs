//! Names of servers: those of the hosts file. A static program has no resolver of its own, and the C library's loads
//! others' code.
use std::fs;
use std::net::IpAddr;

/// The file that has the names.
pub const HOSTS_FILE: &str = "/etc/hosts";

/// The text of [`HOSTS_FILE`]; empty if it can't be read.
pub fn host_names() -> String {
    fs::read_to_string(HOSTS_FILE).unwrap_or_default()
}

/// The address that a text is, or that `names`, the text of a hosts file, has for it.
pub fn address_of(host: &str, names: &str) -> Option<IpAddr> {
    if let Ok(address) = host.parse() {
        return Some(address);
    }
    names.lines().find_map(|line| {
        let mut words = line.split('#').next().unwrap_or_default().split_ascii_whitespace();
        let address = words.next()?.parse().ok()?;
        words.any(|name| name.eq_ignore_ascii_case(host)).then_some(address)
    })
}
