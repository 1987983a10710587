//! Members of networks: the vNICs that a host has in each, as containers elsewhere call them. All hosts know them, so
//! they are written only where they change.
use crate::ClusterError;
use crate::file::ClusterFile;
use crate::keys::{RECORD, members_key};
use crate::records::harmless;
use freeflow_etcd::EtcdStore;
use freeflow_orchestrator::store::{Committed, Compare, Transaction, VALUE_BYTES_MAX, Write};
use freeflow_orchestrator::{Revision, Store, name_is_good};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Values in which a host tells of them, each as long as one may be.
pub(crate) const MEMBERS_PART_COUNT: usize = 4;
/// Of a value, for all but the members.
const PART_BYTES_AROUND: usize = 64;
/// Networks of a host.
const NETWORK_COUNT_MAX: usize = 1024;
/// vNICs of a host that others know by name.
pub(crate) const MEMBER_COUNT_MAX: usize = 1024;
/// An IPv4 and an IPv6 address is what a vNIC has; its own name and its container's are what it is called.
const ADDRESS_COUNT_MAX: usize = 2;
const NAME_COUNT_MAX: usize = 2;
/// Of each name.
const NAME_CHARS_MAX: usize = 64;
/// A host stays in a network for so long after its last vNIC there: the next one finds the other hosts connected.
pub const LINGER: Duration = Duration::from_secs(600);

/// Members by network. A network without any may be there: the host is in it nevertheless.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    /// Those that were made first come first.
    pub networks: BTreeMap<String, Vec<Member>>,
}

/// The parts of a host's members that etcd has, by their number.
pub type MembersThere = BTreeMap<usize, Members>;

/// A vNIC in a network.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Member {
    /// When it was made, seconds of Unix time, by its host's clock.
    #[serde(default)]
    pub since_s: u64,
    /// Its own name and its container's.
    pub names: Vec<String>,
    /// IPv4, and IPv6 if it has one.
    pub addresses: Vec<IpAddr>,
}

/// The networks that a host is in: those of its vNICs, those of vNICs that are to come, and both for some time after.
#[derive(Debug, Default)]
pub struct Membership {
    /// When the host last had a reason to be in each.
    seen: BTreeMap<String, Instant>,
}

impl Membership {
    /// The host is in this network from now on.
    pub fn enter(&mut self, network: &str, now: Instant) {
        let is_new = !self.seen.contains_key(network);
        if is_new && self.seen.len() >= NETWORK_COUNT_MAX {
            // The one that was left first.
            let first = self.seen.iter().min_by_key(|(_, at)| **at).map(|(name, _)| name.clone());
            self.seen.retain(|name, _| Some(name) != first.as_ref());
        }
        self.seen.insert(network.to_owned(), now);
    }

    /// Members of a host that has these vNICs, with the networks that it is in besides.
    pub fn with(&mut self, present: &Members, now: Instant) -> Members {
        present.networks.keys().for_each(|network| self.enter(network, now));
        self.seen.retain(|_, at| now.duration_since(*at) < LINGER);
        let mut all = present.clone();
        for network in self.seen.keys() {
            all.networks.entry(network.clone()).or_default();
        }
        all
    }
}

impl Member {
    fn bounded(mut self) -> Self {
        self.names.truncate(NAME_COUNT_MAX);
        self.addresses.truncate(ADDRESS_COUNT_MAX);
        self.names.iter_mut().for_each(|name| *name = harmless(name, NAME_CHARS_MAX));
        self
    }
}

fn length(value: &impl Serialize) -> usize {
    serde_json::to_vec(value).expect("members are encodable").len()
}

impl Members {
    /// A host says what it likes; this much is kept, and harms no terminal.
    pub(crate) fn bounded(mut self) -> Self {
        self.networks.retain(|network, _| name_is_good(network));
        while self.networks.len() > NETWORK_COUNT_MAX {
            self.networks.pop_last();
        }
        for members in self.networks.values_mut() {
            *members = std::mem::take(members).into_iter().map(Member::bounded).collect();
        }
        self
    }

    /// The parts as they are written: all networks, and as many members as there is room for, the oldest first. So one
    /// that comes changes the last part alone.
    pub fn parts(&self) -> MembersThere {
        let bounded = self.clone().bounded();
        let mut all: Vec<(&Member, &String)> = Vec::new();
        for (network, members) in &bounded.networks {
            all.extend(members.iter().map(|member| (member, network)));
        }
        all.sort();
        all.truncate(MEMBER_COUNT_MAX);
        let networks = bounded.networks.keys().map(|network| (network, None));
        let all = networks.chain(all.into_iter().map(|(member, network)| (network, Some(member))));
        let (mut parts, mut bytes) = (vec![Self::default()], PART_BYTES_AROUND);
        for (network, member) in all {
            // The network's name is in each part that has members of it.
            let around = length(network) + ":[],".len();
            let more = around + member.map_or(0, |member| length(member) + 1);
            if bytes + more > VALUE_BYTES_MAX {
                if parts.len() == MEMBERS_PART_COUNT {
                    break;
                }
                parts.push(Self::default());
                bytes = PART_BYTES_AROUND;
            }
            let part = parts.last_mut().expect("there is one");
            bytes += if part.networks.contains_key(network) { more - around } else { more };
            part.networks.entry(network.clone()).or_default().extend(member.cloned());
        }
        parts.into_iter().enumerate().collect()
    }
}

/// Writes the members of a host.
pub struct MembersWriter {
    store: EtcdStore,
}

impl MembersWriter {
    /// Of the host with this name.
    ///
    /// # Errors
    /// Certificates that can't be used.
    pub fn new(file: &ClusterFile, host: &str) -> Result<Self, ClusterError> {
        // They are compared with the news, so a write that comes late is written over.
        Ok(Self { store: file.store(&file.keys().host(host))?.without_receipts() })
    }

    /// Writes the parts that are others than etcd has, where the host's record is the one that was written at this
    /// revision; the number of bytes. `None`: it is another one, or none, and nothing was written.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn write(
        &mut self,
        record: Revision,
        wanted: &MembersThere,
        there: &MembersThere,
    ) -> Result<Option<usize>, ClusterError> {
        let is_other = |number: &usize| wanted.get(number) != there.get(number);
        let value = |part: &Members| serde_json::to_vec(part).expect("members are encodable");
        let writes: Vec<Write> = (0..MEMBERS_PART_COUNT)
            .filter(is_other)
            .map(|number| Write { key: members_key(number), value: wanted.get(&number).map(value), lease: None })
            .collect();
        if writes.is_empty() {
            return Ok(Some(0));
        }
        let length = writes.iter().filter_map(|write| Some(write.value.as_ref()?.len())).sum();
        let compares = vec![Compare { key: RECORD.into(), modified: Some(record) }];
        let committed = self.store.commit(&Transaction { compares, writes })?;
        Ok(matches!(committed, Committed::Done(_)).then_some(length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(number: usize) -> Member {
        Member {
            since_s: number as u64,
            names: vec![format!("container-{number}")],
            addresses: vec![[10, 50, (number >> 8) as u8, number as u8].into()],
        }
    }

    fn all(count: usize) -> Members {
        let mut all = Members::default();
        for number in 0..count {
            all.networks.entry(format!("net-{}", number % 3)).or_default().push(member(number));
        }
        all
    }

    fn joined(parts: &MembersThere) -> Members {
        let mut all = Members::default();
        for (network, members) in parts.values().flat_map(|part| &part.networks) {
            all.networks.entry(network.clone()).or_default().extend(members.iter().cloned());
        }
        all
    }

    #[test]
    fn values_have_their_bounds_and_are_read_as_they_were_written() {
        for count in [0, 1, 3, 600] {
            let parts = all(count).parts();
            assert_eq!(joined(&parts), all(count));
            for (number, part) in &parts {
                let bytes = serde_json::to_vec(part).expect("encodable");
                assert!(*number < MEMBERS_PART_COUNT && bytes.len() <= VALUE_BYTES_MAX);
                let read: Members = serde_json::from_slice(&bytes).expect("what was written");
                assert_eq!(read.bounded(), *part);
            }
        }
        let long = Member { names: vec!["x".repeat(64), "y".repeat(64)], ..member(1) };
        let mut many = Members { networks: (0..3000).map(|number| (format!("n{number}"), Vec::new())).collect() };
        many.networks.insert("n0".into(), vec![long; 5000]);
        let parts = many.parts();
        assert!(parts.values().all(|part| length(part) <= VALUE_BYTES_MAX));
        let read = joined(&parts);
        assert_eq!((read.networks.len(), read.networks["n0"].len()), (NETWORK_COUNT_MAX, MEMBER_COUNT_MAX));
    }

    #[test]
    fn a_host_stays_in_a_network_for_some_time() {
        let (mut membership, begin) = (Membership::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut names = |present: &Members, at| membership.with(present, at).networks.into_keys().collect::<Vec<_>>();
        let (none, one) = (Members::default(), all(1));
        assert_eq!(names(&one, at(0)), ["net-0"]);
        assert_eq!(names(&one, at(1000)), ["net-0"]);
        assert_eq!(names(&none, at(1599)), ["net-0"]);
        assert_eq!(names(&none, at(1600)), [""; 0]);
        membership.enter("ahead", at(1600));
        let with = membership.with(&one, at(2100));
        assert_eq!(with.networks.keys().collect::<Vec<_>>(), ["ahead", "net-0"]);
        assert_eq!((with.networks["ahead"].len(), with.networks["net-0"].len()), (0, 1));
        for number in 0..2 * NETWORK_COUNT_MAX {
            membership.enter(&format!("n{number:04}"), at(2100));
        }
        assert_eq!(membership.with(&none, at(2101)).networks.len(), NETWORK_COUNT_MAX);
    }

    #[test]
    fn one_that_comes_changes_the_last_part_alone() {
        let (before, after) = (all(1000).parts(), all(1001).parts());
        assert!(before.len() > 1 && before.len() == after.len());
        let same = before.iter().filter(|(number, part)| after.get(number) == Some(part)).count();
        assert_eq!(same, before.len() - 1);
    }

    #[test]
    fn words_of_others_are_bounded_and_harm_no_terminal() {
        let hostile = Member {
            names: vec!["a\u{1b}[2J".repeat(100); 50],
            addresses: vec![[10, 0, 0, 1].into(); 500],
            since_s: u64::MAX,
        };
        let mut said = Members { networks: (0..2000).map(|number| (format!("n{number}"), Vec::new())).collect() };
        for name in ["", "a b", "../x", "n0\n"] {
            said.networks.insert(name.into(), vec![hostile.clone()]);
        }
        said.networks.insert("n0".into(), vec![hostile]);
        let bounded = said.bounded();
        assert_eq!(bounded.networks.len(), NETWORK_COUNT_MAX);
        assert!(bounded.networks.keys().all(|name| name_is_good(name)));
        let one = &bounded.networks["n0"][0];
        assert!(one.names.iter().all(|name| name.chars().count() <= NAME_CHARS_MAX && !name.contains('\u{1b}')));
        assert_eq!((one.names.len(), one.addresses.len()), (NAME_COUNT_MAX, ADDRESS_COUNT_MAX));
    }
}
