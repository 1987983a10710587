//! Rules of the host's firewall (`iptables`) for packets that cross a bridge, where the kernel shows it such packets.

use crate::programs;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Whether the kernel sends bridged packets through iptables, where a firewall (Docker's, for one) drops them.
pub fn bridged_packets_are_filtered() -> bool {
    is_on("bridge-nf-call-iptables")
}

fn is_on(setting: &str) -> bool {
    fs::read_to_string(Path::new("/proc/sys/net/bridge").join(setting)).is_ok_and(|text| text.trim() == "1")
}

/// The change to make to a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    Present,
    Absent,
}

/// Lets packets pass between ports of the bridge, where iptables would see them. Without iptables nothing is needed.
pub fn accept_bridged(bridge: &str, rule: Rule) {
    set("filter", "FORWARD", &["-i", bridge, "-o", bridge, "-j", "ACCEPT"], rule);
}

/// The same, and the kernel follows no connections of these packets: other bridges may have the same addresses.
pub fn isolate_bridged(bridge: &str, rule: Rule) {
    accept_bridged(bridge, rule);
    set("raw", "PREROUTING", &["-i", bridge, "-j", "CT", "--notrack"], rule);
}

/// For both families, each where the kernel shows that one's bridged packets.
fn set(table: &str, chain: &str, words: &[&str], rule: Rule) {
    for program in ["iptables", "ip6tables"] {
        set_by(program, table, chain, words, rule);
    }
}

fn set_by(program: &str, table: &str, chain: &str, words: &[&str], rule: Rule) {
    let Some(iptables) = programs::find(program) else { return };
    let iptables = |action: &str| {
        Command::new(&iptables)
            .args(["-w", "5", "-t", table, action, chain])
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    match rule {
        Rule::Present => {
            if is_on(&format!("bridge-nf-call-{program}")) && !iptables("-C") {
                iptables("-I");
            }
        }
        // Rules of earlier runs too; bounded, should a delete ever succeed without an effect.
        Rule::Absent => {
            let _ = (0..8).take_while(|_| iptables("-D")).count();
        }
    }
}
