//! Guards against RoCEv2 packets that the host's own programs, or containers of other engines, send
//! as the host.
//!
//! A peer's router takes a packet for this host's by its source address. Any program can send UDP
//! from there: an unprivileged user by a plain socket, a container in the host's network, and one
//! behind the address translation of its engine. So UDP datagrams to port 4791 leave this network
//! namespace only with the router's mark ([`ROUTER_MARK`]), which takes CAP_NET_ADMIN or
//! CAP_NET_RAW to set. Whoever has one of these in the host's network (root) is excepted.
//!
//! The rule is where packets of local sockets and forwarded ones meet, behind changes of their
//! destination and before fragmentation: netfilter's POSTROUTING. So every interface is covered,
//! loopback too, and no datagram is in pieces yet. Bridged frames, which the kernel may show there,
//! have addresses of their own and pass. It is made by `iptables` (either of its variants) or,
//! where that is missing or can't, by `nft`.
//!
//! Invariant: a router with peers is started behind the guard of its peers' family.

use crate::error::{Context, Error, Result};
use crate::guard::ROCE_UDP_PORT;
use crate::links::{self, Change};
use crate::programs::{self, word_after};
use crate::run_dir::RunDir;
use freeflow_protocol::ROUTER_MARK;
use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    pub const ALL: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }

    fn loopback(self) -> IpAddr {
        match self {
            Self::Ipv4 => Ipv4Addr::LOCALHOST.into(),
            Self::Ipv6 => Ipv6Addr::LOCALHOST.into(),
        }
    }

    fn iptables(self) -> &'static str {
        match self {
            Self::Ipv4 => "iptables",
            Self::Ipv6 => "ip6tables",
        }
    }

    /// As nft calls the tables of a family.
    fn table(self) -> &'static str {
        match self {
            Self::Ipv4 => "ip",
            Self::Ipv6 => "ip6",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Ipv4 { "IPv4" } else { "IPv6" })
    }
}

/// By what a family is guarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tool {
    Iptables,
    Nft,
}

impl Tool {
    const ALL: [Self; 2] = [Self::Iptables, Self::Nft];

    fn name(self, family: Family) -> &'static str {
        match self {
            Self::Iptables => family.iptables(),
            Self::Nft => "nft",
        }
    }
}

/// The guard of one run directory; several in a network namespace let the same packets pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireGuard {
    /// Of the chain (iptables) or table (nft).
    name: String,
}

/// A guard that is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InForce {
    pub family: Family,
    pub tool: &'static str,
    /// Packets that it has dropped.
    pub dropped: u64,
}

impl WireGuard {
    pub fn of(run_dir: &RunDir) -> Self {
        Self { name: format!("FREEFLOW-{}", run_dir.short_hash()) }
    }

    /// Puts the guard into this network namespace, unless it is there. The family of the peers must
    /// be guarded; the other one is where that is possible, and no peer takes anything from it.
    pub fn put(&self, needed: Family) -> Result<()> {
        for family in Family::ALL {
            let done = self.put_family(family);
            if family == needed {
                done.context(format!(
                    "a host with peers must keep other programs than the router from sending to UDP {ROCE_UDP_PORT}, and this one \
                     can't ({family}); install iptables or nftables, or take a kernel with one of them"
                ))?;
            }
        }
        Ok(())
    }

    fn put_family(&self, family: Family) -> Result<()> {
        if self.find(family).is_some() {
            return Ok(());
        }
        let mut reasons = Vec::new();
        for tool in Tool::ALL {
            match self.try_put(family, tool) {
                Ok(()) if self.dropped(family, tool).is_some() => return Ok(()),
                Ok(()) => reasons.push(format!("{} says done, and shows no rule", tool.name(family))),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        Err(Error::new(reasons.join("; ")))
    }

    fn try_put(&self, family: Family, tool: Tool) -> Result<()> {
        self.remove_by(family, tool);
        match tool {
            Tool::Nft => programs::run_with_input("nft", &["-f", "-"], &self.nft_rules(family)),
            Tool::Iptables => {
                let restore = format!("{}-restore", family.iptables());
                let put = |rules: String| programs::run_with_input(&restore, &["--noflush", "--wait"], &rules);
                // Not every kernel can match bridged packets; where it can't show them here, nothing is
                // lost.
                put(self.iptables_rules(true)).or_else(|_| put(self.iptables_rules(false)))
            }
        }
    }

    fn iptables_rules(&self, knows_bridges: bool) -> String {
        let name = &self.name;
        let bridged = format!("-A {name} -m physdev --physdev-is-bridged -j RETURN\n");
        format!(
            "*mangle\n:{name} - [0:0]\n-A {name} -m mark --mark {ROUTER_MARK:#x} -j RETURN\n{}-A {name} -j DROP\n\
             -I POSTROUTING 1 {}\nCOMMIT\n",
            if knows_bridges { bridged.as_str() } else { "" },
            self.jump()
        )
    }

    fn jump(&self) -> String {
        format!("-p udp -m udp --dport {ROCE_UDP_PORT} -j {}", self.name)
    }

    fn nft_rules(&self, family: Family) -> String {
        format!(
            "table {} {} {{ chain postrouting {{ type filter hook postrouting priority -150; policy accept; \
             udp dport {ROCE_UDP_PORT} meta mark != {ROUTER_MARK:#x} counter drop; }}; }}\n",
            family.table(),
            self.name
        )
    }

    fn find(&self, family: Family) -> Option<InForce> {
        Tool::ALL.into_iter().find_map(|tool| {
            let dropped = self.dropped(family, tool)?;
            Some(InForce { family, tool: tool.name(family), dropped })
        })
    }

    /// The guards in force in this network namespace.
    pub fn in_force(&self) -> Vec<InForce> {
        Family::ALL.into_iter().filter_map(|family| self.find(family)).collect()
    }

    /// The packets that a tool's rules have dropped; `None`: they are not there, or not whole.
    fn dropped(&self, family: Family, tool: Tool) -> Option<u64> {
        match tool {
            Tool::Iptables => {
                let program = family.iptables();
                let list = |chain: &str| programs::run(program, &["-w", "-t", "mangle", "-S", chain, "-v"]).ok();
                iptables_dropped(&list("POSTROUTING")?, &list(&self.name)?, &self.name)
            }
            Tool::Nft => nft_dropped(&programs::run("nft", &["list", "table", family.table(), &self.name]).ok()?),
        }
    }

    /// Removes the guard of both families, by whatever made it.
    pub fn remove(&self) {
        for family in Family::ALL {
            for tool in Tool::ALL {
                self.remove_by(family, tool);
            }
        }
    }

    fn remove_by(&self, family: Family, tool: Tool) {
        match tool {
            Tool::Nft => {
                let _ = programs::run("nft", &["delete", "table", family.table(), &self.name]);
            }
            Tool::Iptables => {
                let jump = self.jump();
                let mangle = |arguments: &str| {
                    let words: Vec<&str> = ["-w", "-t", "mangle"].into_iter().chain(arguments.split(' ')).collect();
                    programs::run(family.iptables(), &words).is_ok()
                };
                // Somebody may have put it there twice.
                let _ = (0..8).take_while(|_| mangle(&format!("-D POSTROUTING {jump}"))).count();
                if mangle(&format!("-F {}", self.name)) {
                    mangle(&format!("-X {}", self.name));
                }
            }
        }
    }
}

/// By what `iptables -S CHAIN -v` prints of the hook's chain and of ours: the jump stands before
/// all but other guards', and ours is whole.
fn iptables_dropped(hook: &str, own: &str, name: &str) -> Option<u64> {
    let target = |line: &str| word_after(line, "-j");
    let first = hook
        .lines()
        .filter(|line| line.starts_with("-A "))
        .find(|line| target(line).is_none_or(|target| target == name || !target.starts_with("FREEFLOW-")))?;
    if target(first)? != name || word_after(first, "--dport")? != ROCE_UDP_PORT.to_string() {
        return None;
    }
    let returns = |line: &str| target(line).as_deref() == Some("RETURN");
    let is_ours = |line: &str| {
        line.contains("--physdev-is-bridged") || word_after(line, "--mark") == Some(format!("{ROUTER_MARK:#x}"))
    };
    let rules: Vec<&str> = own.lines().filter(|line| line.starts_with("-A ")).collect();
    let (last, exceptions) = rules.split_last()?;
    let is_whole = exceptions.iter().all(|line| returns(line) && is_ours(line)) && target(last)? == "DROP";
    if is_whole { word_after(last, "-c")?.parse().ok() } else { None }
}

fn nft_dropped(text: &str) -> Option<u64> {
    let port = format!("udp dport {ROCE_UDP_PORT} ");
    let rule = text.lines().find(|line| line.contains(&port) && line.trim_end().ends_with("drop"))?;
    word_after(rule, "packets")?.parse().ok()
}

/// Tries the guard of a family on programs that send to the port, in a network namespace that goes away.
///
/// # Errors
/// The guard can't be put, or keeps nobody from sending.
pub fn check_abilities(family: Family) -> Result<()> {
    let guard = WireGuard { name: "FREEFLOW-probe".into() };
    links::change("lo", Change::UP)?;
    check_sending(family, true)?;
    guard.put_family(family)?;
    check_sending(family, false)
}

/// The program that the guard of a family would be made by; none is installed: `""`.
pub fn tool(family: Family) -> &'static str {
    let found = Tool::ALL.into_iter().find(|tool| programs::find(tool.name(family)).is_some());
    found.map_or("", |tool| tool.name(family))
}

/// A datagram to the port arrives, or is dropped.
fn check_sending(family: Family, arrives: bool) -> Result<()> {
    let address = family.loopback();
    let listener = UdpSocket::bind((address, ROCE_UDP_PORT)).context("a socket")?;
    listener.set_read_timeout(Some(Duration::from_millis(200))).context("a socket")?;
    let sender = UdpSocket::bind((address, 0)).context("a socket")?;
    match sender.send_to(b"probe", (address, ROCE_UDP_PORT)) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied && !arrives => return Ok(()),
        sent => sent.context("a datagram")?,
    };
    match listener.recv(&mut [0; 16]).is_ok() == arrives {
        true => Ok(()),
        false if arrives => Err(Error::new("a datagram did not arrive before there was a guard")),
        false => Err(Error::new("a datagram that should have been dropped has arrived")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOOK: &str = "-P POSTROUTING ACCEPT -c 3 90\n\
        -A POSTROUTING -p udp -m udp --dport 4791 -c 9 9 -j FREEFLOW-2\n\
        -A POSTROUTING -p udp -m udp --dport 4791 -c 2 66 -j FREEFLOW-1\n";
    const OWN: &str =
        "-N FREEFLOW-1\n-A FREEFLOW-1 -m mark --mark 0x1062 -c 1 2 -j RETURN\n-A FREEFLOW-1 -c 7 231 -j DROP\n";

    #[test]
    fn a_guard_counts_only_where_it_is_whole_and_first() {
        assert_eq!(iptables_dropped(HOOK, OWN, "FREEFLOW-1"), Some(7));
        assert_eq!(iptables_dropped(HOOK, OWN, "FREEFLOW-3"), None);
        let accepts = HOOK.replacen("-A ", "-A POSTROUTING -p udp -c 0 0 -j ACCEPT\n-A ", 1);
        assert_eq!(iptables_dropped(&accepts, OWN, "FREEFLOW-1"), None);
        for broken in [
            OWN.replace("DROP", "ACCEPT"),
            OWN.replace("0x1062", "0x1063"),
            OWN.replace(" -m mark --mark 0x1062", ""),
            OWN.replace("0x1062 -c 1 2 -j RETURN", "0x1062 -c 1 2 -j ACCEPT"),
            "-N FREEFLOW-1\n".to_string(),
        ] {
            assert_eq!(iptables_dropped(HOOK, &broken, "FREEFLOW-1"), None, "{broken}");
        }
        assert_eq!(iptables_dropped(&HOOK.replace("4791", "4789"), OWN, "FREEFLOW-1"), None);
    }

    #[test]
    fn the_rules_of_nft_are_read_back() {
        let text = "table ip FREEFLOW-1 {\n\tchain postrouting {\n\t\ttype filter hook postrouting priority mangle; policy accept;\n\
            \t\tudp dport 4791 meta mark != 0x00001062 counter packets 5 bytes 165 drop\n\t}\n}\n";
        assert_eq!(nft_dropped(text), Some(5));
        assert_eq!(nft_dropped("table ip FREEFLOW-1 {\n}\n"), None);
    }
}
