//! Values of the cluster's own keys: JSON. Unknown fields are a newer version's, and ignored.
use crate::ClusterError;
use freeflow_orchestrator::{Pool, name_is_good};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::{SystemTime, UNIX_EPOCH};

/// Of a host's problems that are kept.
const PROBLEM_COUNT_MAX: usize = 64;
const PROBLEM_CHARS_MAX: usize = 400;
/// Networks of a host.
const RANGE_COUNT_MAX: usize = 1024;
/// vNICs of the cluster's that a host speaks of: more than have their place there.
const VNIC_COUNT_MAX: usize = 2 * PLACE_COUNT_MAX;
/// vNICs of the cluster's on one host.
pub(crate) const PLACE_COUNT_MAX: usize = 1000;
const REFUSED_COUNT_MAX: usize = 64;
/// Longest name of a host in a peers file.
const HOST_NAME_BYTES_MAX: usize = 64;

/// Up to so many hosts all are peers of each other, unless the cluster was made with another number.
pub const FULL_MESH_COUNT: u32 = 64;
/// Shortest and longest time of silence after which blocks are taken back, seconds. A host speaks several times in it.
pub const RECLAIM_AFTER_S: RangeInclusive<u64> = 20..=365 * 86_400;
/// The usual one: a day.
pub const RECLAIM_AFTER_DEFAULT_S: u64 = 86_400;

/// Of the layout of keys.
pub(crate) const VERSION: u32 = 1;

/// Seconds of Unix time.
pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Which cluster it is. A host that has followed one follows no other, and none where this is missing: an etcd that
/// is empty, or another's, takes nothing away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Drawn when it was made.
    pub id: String,
    /// Of the layout of keys.
    pub version: u32,
    /// When an operator has last said that etcd was restored from a backup, seconds of Unix time (0: never): only then
    /// may revisions go back.
    #[serde(default)]
    pub restored: u64,
    /// Addresses of the network `default`, of which hosts that join get a block; the usual ones if there are none.
    #[serde(default)]
    pub pool: Option<String>,
    /// Up to so many hosts all are peers of each other, beyond that those that have networks of a tenant together.
    #[serde(default = "full_mesh")]
    pub full_mesh: u32,
}

fn full_mesh() -> u32 {
    FULL_MESH_COUNT
}

/// A host, as it says itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRecord {
    /// Of packets between hosts, and of the control channel.
    pub address: IpAddr,
    /// Of the control channel.
    pub control_port: u16,
    /// 64 hexadecimal digits.
    pub public_key: String,
    /// Of the network `default`, which each host has for itself.
    pub default_range: String,
}

/// How far a host has followed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Followed {
    /// All up to this revision of etcd's is in force there, but for the problems.
    pub revision: u64,
    /// The range that it gives out of each network that it has.
    #[serde(default)]
    pub ranges: BTreeMap<String, String>,
    /// The host's router stops its vNICs when the host has not reached etcd for so long, less a margin, seconds: then
    /// its blocks can be taken back. Without it they stay its.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaim_after_s: Option<u64>,
    /// Release of FreeFlow.
    #[serde(default)]
    pub release: String,
    /// Seconds of Unix time, by the host's clock.
    pub at_s: u64,
    /// The rest.
    pub problems: Vec<Problem>,
}

/// The cluster's vNICs that a host has and asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holdings {
    /// vNICs that it has, or had.
    #[serde(default)]
    pub vnics: BTreeMap<String, Held>,
    /// vNICs that it asks for, each with a number that no other claim of the host has.
    #[serde(default)]
    pub claims: BTreeMap<String, u64>,
}

/// A host that an operator has drained: no container with the cluster's vNICs starts there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drained {
    /// The operator: a user and a machine, as they call themselves.
    pub by: String,
    /// Seconds of Unix time.
    pub at_s: u64,
    /// Those that run there are stopped.
    #[serde(default)]
    pub stop: bool,
}

impl Drained {
    /// By this operator, from now on.
    pub fn new(by: &str, stop: bool) -> Self {
        Self { by: harmless(by, PROBLEM_CHARS_MAX), at_s: now_s(), stop }
    }
}

/// The host that has a vNIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Its name.
    pub host: String,
    /// Where an operator moves the vNIC, once the host has let it go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// An operator has moved it there: it waits for its container, and is not for others before.
    #[serde(default)]
    pub moved: bool,
    /// Its addresses: nobody else's as long as the host may have it.
    pub addresses: Vec<IpAddr>,
}

/// A vNIC of the cluster's that a host has, or had.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Revision of its place, by which the host has the vNIC; 0: of none.
    pub at: u64,
    /// It is not there any more, and won't be until its place is another one.
    #[serde(default)]
    pub released: bool,
    /// Claims for which it was not let go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<RefusedClaims>,
}

/// Claims of other hosts that a host has refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedClaims {
    /// Number of the claim of each host.
    pub claims: BTreeMap<String, u64>,
    /// A sentence for people.
    pub why: String,
}

/// Something that a host can't follow.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Problem {
    /// Kind of the object, if it is about one.
    pub kind: Option<String>,
    /// Its name.
    pub name: Option<String>,
    /// A sentence for people.
    pub message: String,
}

impl Identity {
    /// Whether this release knows the cluster's keys.
    pub(crate) fn check(&self) -> Result<(), ClusterError> {
        if self.version == VERSION {
            return Ok(());
        }
        let text = "the cluster's keys are of a release that this one does not know; install that here";
        Err(ClusterError::Damaged(text.into()))
    }
}

impl Problem {
    /// One that is about no object.
    pub fn new(message: impl Into<String>) -> Self {
        Self { kind: None, name: None, message: message.into() }
    }

    /// One of an object's.
    pub fn about(kind: &str, name: &str, message: impl Into<String>) -> Self {
        Self { kind: Some(kind.into()), name: Some(name.into()), message: message.into() }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.kind, &self.name) {
            (Some(kind), Some(name)) => write!(f, "{kind} {name}: {}", self.message),
            _ => f.write_str(&self.message),
        }
    }
}

impl HostRecord {
    /// Whether a router takes it in its peers file, to the letter; for a host writes what it likes.
    pub fn is_sound(&self) -> bool {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_key = self.public_key.len() == 64 && self.public_key.bytes().all(is_digit);
        let is_range = self.default_range.parse::<Pool>().is_ok_and(|range| range.to_string() == self.default_range);
        let address = self.address;
        let is_nobodys = match address {
            IpAddr::V4(address) => address.is_broadcast() || address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        let is_somebodys = !(is_nobodys || address.is_unspecified() || address.is_multicast() || address.is_loopback());
        is_key && is_range && is_somebodys && address.to_canonical() == address && self.control_port > 0
    }
}

/// Whether a host can have this name, as routers take them, too.
pub fn is_host_name(name: &str) -> bool {
    name_is_good(name) && name.len() <= HOST_NAME_BYTES_MAX
}

/// So many letters of a text of somebody else's, none of which does anything to a terminal.
pub(crate) fn harmless(text: &str, count_max: usize) -> String {
    // Also those that turn the direction of writing, or take no place: they hide what is there.
    let is_hidden = |letter: char| matches!(letter, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
    let shown = |letter: char| if letter.is_control() || is_hidden(letter) { '?' } else { letter };
    text.chars().take(count_max).map(shown).collect()
}

impl Followed {
    /// Seconds since it was said, by the clocks here and there.
    pub fn age_s(&self) -> u64 {
        now_s().saturating_sub(self.at_s)
    }

    /// A host says what it likes; this much is kept, and harms no terminal.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        self.problems.truncate(PROBLEM_COUNT_MAX);
        let bounded = |text: &str| harmless(text, PROBLEM_CHARS_MAX);
        for problem in &mut self.problems {
            problem.message = bounded(&problem.message);
            problem.kind = problem.kind.as_deref().map(bounded);
            problem.name = problem.name.as_deref().map(bounded);
        }
        self.release = bounded(&self.release);
        while self.ranges.len() > RANGE_COUNT_MAX {
            self.ranges.pop_last();
        }
        self
    }
}

impl Holdings {
    /// A host says what it likes; this much is kept, and harms no terminal.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        for held in self.vnics.values_mut() {
            if let Some(refused) = &mut held.refused {
                refused.why = harmless(&refused.why, PROBLEM_CHARS_MAX);
                while refused.claims.len() > REFUSED_COUNT_MAX {
                    refused.claims.pop_last();
                }
            }
        }
        while self.vnics.len() > VNIC_COUNT_MAX {
            self.vnics.pop_last();
        }
        while self.claims.len() > VNIC_COUNT_MAX {
            self.claims.pop_last();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_hosts_say_hides_what_is_there() {
        let said = "a\u{1b}[2Jb\u{202e}c\u{2066}d\u{200b}e\u{feff}\n\u{9b}f ü";
        assert_eq!(harmless(said, 100), "a?[2Jb?c?d?e???f ü");
        assert_eq!(harmless(said, 3), "a?[");
    }
}
