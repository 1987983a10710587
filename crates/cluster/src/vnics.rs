//! The vNICs of a host and what they do, as it says itself: for people. Nobody follows that all the time.
use crate::ClusterError;
use crate::file::ClusterFile;
use crate::keys::vnics_key;
use crate::members::{MEMBER_COUNT_MAX, Member, Members};
use crate::records::{harmless, now_s};
use freeflow_etcd::EtcdStore;
use freeflow_orchestrator::store::{Committed, Transaction, VALUE_BYTES_MAX, Write};
use freeflow_orchestrator::{Revision, Store};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// Values in which a host tells of them, each as long as one may be.
pub(crate) const VNICS_PART_COUNT: usize = 4;
/// Of a value, for all but the vNICs.
const PART_BYTES_AROUND: usize = 128;
/// Of a host's vNICs that are kept.
const VNIC_COUNT_MAX: usize = 4096;
/// An IPv4 and an IPv6 address is what a vNIC has.
const ADDRESS_COUNT_MAX: usize = 2;
/// Of each text.
const TEXT_CHARS_MAX: usize = 64;

/// All vNICs of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostVnics {
    /// Seconds of Unix time, by the host's clock.
    pub at_s: u64,
    /// More of them than are in the list.
    #[serde(default)]
    pub left_out: u64,
    /// Those of containers first.
    pub vnics: Vec<HostVnic>,
}

/// One of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostVnic {
    /// Its own name; those that were made for a container have a number for one.
    pub name: String,
    /// Name of the container that it was made for, or its own.
    pub title: String,
    /// Its network.
    pub network: String,
    /// Tenant of the network.
    #[serde(default)]
    pub tenant: String,
    /// IPv4, and IPv6 if it has one.
    pub addresses: Vec<IpAddr>,
    /// As the router has it.
    #[serde(default)]
    pub phase: String,
    /// When it was made, seconds of Unix time.
    #[serde(default)]
    pub since_s: u64,
    /// The container that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<HostContainer>,
    /// Since the host has last said something of it.
    #[serde(default, skip_serializing_if = "HostTraffic::is_none")]
    pub traffic: HostTraffic,
}

/// A container, without the arguments of its program, which may be secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostContainer {
    /// Its name.
    pub name: String,
    /// `freeflow`, or `oci`.
    pub engine: String,
    /// Of the host's.
    pub pid: Option<u32>,
    /// The program, without arguments.
    #[serde(default)]
    pub program: String,
    /// When it was made, seconds of Unix time.
    #[serde(default)]
    pub since_s: Option<u64>,
}

/// Averages over the time since the host spoke before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostTraffic {
    /// Messages sent, each second.
    pub messages_per_s: u64,
    /// Payload sent.
    pub bits_out_per_s: u64,
    /// Payload received.
    pub bits_in_per_s: u64,
    /// Which way most messages went.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Time for which limits held it back.
    pub held_percent: u32,
    /// Completions with an error, in all that time.
    pub errors: u64,
    /// Messages that nobody got.
    pub drops: u64,
}

impl HostTraffic {
    /// Nothing went.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl HostVnic {
    /// A name by which people, and other containers, call it.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let of_container = self.container.as_ref().map(|container| container.name.as_str());
        std::iter::once(self.title.as_str()).chain(of_container.filter(|name| *name != self.title))
    }

    /// All but what changes without anybody's doing.
    pub fn is_same(&self, other: &Self) -> bool {
        let still = |vnic: &Self| Self { traffic: HostTraffic::default(), ..vnic.clone() };
        still(self) == still(other)
    }

    fn bounded(mut self) -> Self {
        let bound = |text: &mut String| *text = harmless(text, TEXT_CHARS_MAX);
        for text in [&mut self.name, &mut self.title, &mut self.network, &mut self.tenant, &mut self.phase] {
            bound(text);
        }
        if let Some(container) = &mut self.container {
            [&mut container.name, &mut container.engine, &mut container.program].into_iter().for_each(bound);
        }
        self.traffic.path.iter_mut().for_each(bound);
        self.addresses.truncate(ADDRESS_COUNT_MAX);
        self
    }
}

impl HostVnics {
    /// Of these.
    pub fn of(mut vnics: Vec<HostVnic>) -> Self {
        vnics.sort_by(|one, other| {
            let key = |vnic: &HostVnic| (vnic.container.is_none(), vnic.title.clone(), vnic.name.clone());
            key(one).cmp(&key(other))
        });
        Self { at_s: 0, left_out: 0, vnics }
    }

    /// The members of networks that they are: those of containers, if there are too many, and all networks.
    pub fn members(&self) -> Members {
        let mut all = Members::default();
        for vnic in self.vnics.iter().skip(MEMBER_COUNT_MAX) {
            all.networks.entry(vnic.network.clone()).or_default();
        }
        for vnic in self.vnics.iter().take(MEMBER_COUNT_MAX) {
            let names = vnic.names().map(str::to_owned).collect();
            let member = Member { since_s: vnic.since_s, names, addresses: vnic.addresses.clone() };
            all.networks.entry(vnic.network.clone()).or_default().push(member);
        }
        all.networks.values_mut().for_each(|members| members.sort());
        all
    }

    /// Seconds since it was said, by the clocks here and there.
    pub fn age_s(&self) -> u64 {
        now_s().saturating_sub(self.at_s)
    }

    /// Whether the same vNICs are in it, whatever they do.
    pub fn is_same(&self, other: &Self) -> bool {
        let pairs = || self.vnics.iter().zip(&other.vnics);
        self.vnics.len() == other.vnics.len() && pairs().all(|(one, other)| one.is_same(other))
    }

    /// A host says what it likes; this much is kept, and harms no terminal.
    pub(crate) fn bounded(mut self) -> Self {
        let over = self.vnics.len().saturating_sub(VNIC_COUNT_MAX);
        self.left_out = self.left_out.saturating_add(over as u64);
        self.vnics.truncate(VNIC_COUNT_MAX);
        self.vnics = self.vnics.into_iter().map(HostVnic::bounded).collect();
        self
    }

    /// All parts of what a host says.
    pub(crate) fn joined<'a>(parts: impl Iterator<Item = &'a Self>) -> Option<Self> {
        let join = |mut all: Self, part: &Self| {
            all.vnics.extend_from_slice(&part.vnics);
            Self { at_s: all.at_s.max(part.at_s), left_out: all.left_out.saturating_add(part.left_out), ..all }
        };
        parts.fold(None, |all, part| Some(join(all.unwrap_or_default(), part))).map(Self::bounded)
    }

    /// The parts as they are written: with as many of them as there is room for.
    pub fn encoded(&self) -> Vec<Vec<u8>> {
        let (mut parts, mut bytes, mut count) = (vec![Vec::new()], PART_BYTES_AROUND, 0);
        for vnic in self.vnics.iter().take(VNIC_COUNT_MAX) {
            let vnic = vnic.clone().bounded();
            let length = serde_json::to_vec(&vnic).expect("a vNIC is encodable").len() + 1;
            bytes += length;
            if bytes > VALUE_BYTES_MAX {
                if parts.len() == VNICS_PART_COUNT {
                    break;
                }
                parts.push(Vec::new());
                bytes = PART_BYTES_AROUND + length;
            }
            parts.last_mut().expect("there is one").push(vnic);
            count += 1;
        }
        let mut left_out = self.left_out + (self.vnics.len() - count) as u64;
        let part = |vnics| Self { at_s: self.at_s, left_out: std::mem::take(&mut left_out), vnics };
        parts.into_iter().map(part).map(|part| serde_json::to_vec(&part).expect("vNICs are encodable")).collect()
    }
}

/// Writes the vNICs of a host.
pub struct VnicsWriter {
    store: EtcdStore,
    /// The key of the host's record, whole.
    record: String,
}

impl VnicsWriter {
    /// Of the host with this name.
    ///
    /// # Errors
    /// Certificates that can't be used.
    pub fn new(file: &ClusterFile, host: &str) -> Result<Self, ClusterError> {
        // All of them are said again soon.
        let store = file.store(&file.keys().vnics(host))?.without_receipts();
        Ok(Self { store, record: file.keys().record(host) })
    }

    /// Writes them with the present time, where the host's record is the one that was written at this revision; the
    /// number of bytes. `None`: it is another one, or none, and nothing was written.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn write(&mut self, record: Revision, vnics: &HostVnics) -> Result<Option<usize>, ClusterError> {
        let mut parts = HostVnics { at_s: now_s(), ..vnics.clone() }.encoded().into_iter();
        let writes: Vec<Write> = (0..VNICS_PART_COUNT)
            .map(|number| Write { key: vnics_key(number), value: parts.next(), lease: None })
            .collect();
        let length = writes.iter().filter_map(|write| Some(write.value.as_ref()?.len())).sum();
        self.store.guard(&[(&self.record, record)]);
        let committed = self.store.commit(&Transaction { compares: Vec::new(), writes })?;
        Ok(matches!(committed, Committed::Done(_)).then_some(length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vnic(number: usize) -> HostVnic {
        HostVnic {
            name: format!("{number:012x}"),
            title: format!("container-{number}"),
            network: "red".into(),
            addresses: vec![[10, 50, (number >> 8) as u8, number as u8].into()],
            ..HostVnic::default()
        }
    }

    #[test]
    fn values_have_their_bounds_and_say_what_is_left_out() {
        let read = |all: &HostVnics| {
            let parts = all.encoded();
            assert!(parts.iter().all(|part| part.len() <= VALUE_BYTES_MAX));
            let parts: Vec<HostVnics> =
                parts.iter().map(|part| serde_json::from_slice(part).expect("what was written")).collect();
            (parts.len(), HostVnics::joined(parts.iter()).expect("something"))
        };
        let (count, said) = read(&HostVnics::of((0..10_000).map(vnic).collect()));
        assert_eq!((count, said.vnics.len() as u64 + said.left_out), (VNICS_PART_COUNT, 10_000));
        assert!(said.vnics.len() > 1000 && said.vnics[0].title == "container-0", "{}", said.vnics.len());
        for few in [0, 1, 3, 600] {
            let few = HostVnics::of((0..few).map(vnic).collect());
            assert_eq!(read(&few).1, few);
        }
        assert_eq!(HostVnics::joined(std::iter::empty()), None);
    }

    #[test]
    fn words_of_others_are_bounded_and_harm_no_terminal() {
        let hostile = HostVnic {
            title: "a\u{1b}[2J".repeat(100),
            addresses: vec![[10, 0, 0, 1].into(); 500],
            container: Some(HostContainer { program: "\n".repeat(9999), ..HostContainer::default() }),
            ..vnic(1)
        };
        let bounded = HostVnics { vnics: vec![hostile; VNIC_COUNT_MAX + 5], ..HostVnics::default() }.bounded();
        assert_eq!((bounded.vnics.len(), bounded.left_out), (VNIC_COUNT_MAX, 5));
        let one = &bounded.vnics[0];
        assert!(one.title.chars().count() <= TEXT_CHARS_MAX && !one.title.contains('\u{1b}'));
        let program = &one.container.as_ref().expect("a container").program;
        assert!(one.addresses.len() == ADDRESS_COUNT_MAX && !program.contains('\n') && program.len() <= TEXT_CHARS_MAX);
    }

    #[test]
    fn traffic_makes_no_other_set() {
        let busy = HostVnic { traffic: HostTraffic { messages_per_s: 5, ..HostTraffic::default() }, ..vnic(1) };
        let (one, two) = (HostVnics::of(vec![vnic(1)]), HostVnics::of(vec![busy]));
        assert!(one.is_same(&two) && one != two);
        assert!(!one.is_same(&HostVnics::of(vec![vnic(2)])) && !one.is_same(&HostVnics::default()));
    }
}
