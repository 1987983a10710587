//! The cluster as its news have it.
use crate::ClusterError;
use crate::keys::{Keys, Meaning, Scope};
use crate::members::{MEMBERS_PART_COUNT, Member, Members, MembersThere};
use crate::records::{Drained, Followed, Holdings, HostRecord, Identity, Place, RECLAIM_AFTER_S, is_host_name};
use crate::vnics::{HostVnics, VNICS_PART_COUNT};
use freeflow_etcd::News;
use freeflow_orchestrator::store::{Entry, Listing, VALUE_BYTES_MAX};
use freeflow_orchestrator::{KEY_PREFIX, Pool, Revision, State};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// By name of the vNIC, with the revision at which each was written.
pub type Places = BTreeMap<String, (Revision, Place)>;

/// The keys of a cluster that are followed at one revision, and what they say.
pub struct View {
    keys: Keys,
    scope: Scope,
    revision: Revision,
    identity: Option<Identity>,
    /// When that was last written.
    identity_at: Revision,
    reclaim_after_s: Option<u64>,
    drained: BTreeMap<String, Drained>,
    /// When what is declared was last changed.
    declared_at: Revision,
    /// By their keys in the store of declared objects.
    declared: BTreeMap<String, Entry>,
    /// With the revision at which each record was last written.
    hosts: BTreeMap<String, (Revision, HostRecord)>,
    /// With the revision at which each was last written.
    holdings: BTreeMap<String, (Revision, Holdings)>,
    /// Members of networks by host and number.
    members: BTreeMap<(String, usize), Members>,
    /// Counts the changes of those, and of the networks in them.
    members_version: u64,
    /// Counts those of all that a controller decides by.
    control_version: u64,
    mesh_version: u64,
    followed: BTreeMap<String, Followed>,
    /// The revision of each host's last word.
    words: BTreeMap<String, Revision>,
    /// The word of each host for which all that it had was taken back.
    reclaimed: BTreeMap<String, Revision>,
    vnics: BTreeMap<String, HostVnics>,
    /// Of which those are put together, by host and number.
    vnics_parts: BTreeMap<(String, usize), HostVnics>,
    /// By network and host.
    blocks: BTreeMap<(String, String), Pool>,
    /// When each was written.
    blocks_at: BTreeMap<(String, String), Revision>,
    places: Places,
    /// When news of each host's holdings came last, by our own clock.
    spoke: BTreeMap<String, Instant>,
    /// The same of its words.
    heard: BTreeMap<String, Instant>,
    /// Since when news come without a gap; `None`: etcd is away, or nothing has come.
    current_since: Option<Instant>,
}

/// A value that is none is as one that is not there: whose it is can be blamed for it, others can't.
fn value<T: DeserializeOwned>(entry: Option<&Entry>) -> Option<T> {
    serde_json::from_slice(&entry?.value).ok()
}

fn put<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) -> bool
where
    V: PartialEq,
{
    match value {
        Some(value) if map.get(&key) == Some(&value) => false,
        Some(value) => {
            map.insert(key, value);
            true
        }
        None => map.remove(&key).is_some(),
    }
}

/// The number of a part of what a host says.
fn part_in(host: &str, part: &str, count: usize) -> Option<usize> {
    part.parse().ok().filter(|part| *part < count && is_host_name(host))
}

/// A host may write longer values than it should.
fn sized(entry: Option<&Entry>) -> Option<&Entry> {
    entry.filter(|entry| entry.value.len() <= VALUE_BYTES_MAX)
}

/// The range in an entry of a block.
pub(crate) fn block_in(entry: &Entry) -> Option<Pool> {
    std::str::from_utf8(&entry.value).ok()?.parse().ok()
}

/// Seconds; `None`: never.
pub(crate) fn reclaim_after_in(entry: &Entry) -> Option<u64> {
    std::str::from_utf8(&entry.value).ok()?.parse().ok().filter(|seconds| RECLAIM_AFTER_S.contains(seconds))
}

/// Of a store's entries.
pub(crate) fn places_in(entries: &[Entry]) -> Places {
    let read = |entry: &Entry| Some((entry.key.clone(), (entry.modified, place_in(entry)?)));
    entries.iter().filter_map(read).collect()
}

pub(crate) fn place_in(entry: &Entry) -> Option<Place> {
    serde_json::from_slice(&entry.value).ok()
}

/// All that is declared, from the store of it.
pub(crate) fn state_of(mut listing: Listing) -> Result<State, ClusterError> {
    listing.entries.retain(|entry| entry.key.starts_with(KEY_PREFIX));
    State::of(&listing).map_err(ClusterError::Damaged)
}

impl View {
    /// Of nothing yet.
    pub fn new(root: &str, scope: Scope) -> Self {
        Self {
            keys: Keys::new(root),
            scope,
            revision: Revision(0),
            identity: None,
            identity_at: Revision(0),
            reclaim_after_s: None,
            drained: BTreeMap::new(),
            spoke: BTreeMap::new(),
            heard: BTreeMap::new(),
            current_since: None,
            words: BTreeMap::new(),
            reclaimed: BTreeMap::new(),
            declared_at: Revision(0),
            declared: BTreeMap::new(),
            hosts: BTreeMap::new(),
            holdings: BTreeMap::new(),
            members: BTreeMap::new(),
            members_version: 0,
            control_version: 0,
            mesh_version: 0,
            followed: BTreeMap::new(),
            vnics: BTreeMap::new(),
            vnics_parts: BTreeMap::new(),
            blocks: BTreeMap::new(),
            blocks_at: BTreeMap::new(),
            places: Places::new(),
        }
    }

    /// Takes news in. Whether all is to be compared for them: how far others have followed, and their vNICs, change
    /// nothing that this host has to have.
    pub fn take(&mut self, news: News) -> bool {
        self.take_at(news, Instant::now())
    }

    /// The same, of news that came at this time.
    pub fn take_at(&mut self, news: News, now: Instant) -> bool {
        self.current_since = match news {
            News::Behind(_) => None,
            _ => self.current_since.or(Some(now)),
        };
        match news {
            News::Listed(revision, entries) => {
                // Words of an etcd that is as it once was are news.
                let current_since = self.current_since.filter(|_| revision >= self.revision).or(Some(now));
                let (members_version, mesh_version) = (self.members_version + 1, self.mesh_version + 1);
                let control_version = self.control_version + 1;
                let new = Self::new(self.keys.root(), self.scope);
                let new = Self { revision, members_version, mesh_version, control_version, current_since, ..new };
                let before = std::mem::replace(self, new);
                for entry in entries {
                    self.change(&entry.key.clone(), Some(entry), now);
                }
                // A word that was known is no news.
                for (host, since) in before.heard {
                    if let Some(heard) = self.heard.get_mut(&host)
                        && self.words.get(&host) == before.words.get(&host)
                    {
                        *heard = since;
                    }
                }
                true
            }
            News::Changed(revision, changes) => {
                self.revision = revision;
                changes.into_iter().fold(false, |any, (key, entry)| self.change(&key, entry, now) || any)
            }
            News::Unchanged(revision) => {
                self.revision = revision;
                false
            }
            News::Behind(_) => false,
        }
    }

    fn change(&mut self, key: &str, entry: Option<Entry>, now: Instant) -> bool {
        let meaning = self.keys.meaning(key);
        let is_for_control = match meaning {
            // The serial numbers of these parts, without which a controller writes nothing there.
            None => [self.keys.blocks(), self.keys.places()].iter().any(|part| key.starts_with(part)),
            Some(Meaning::Members { .. } | Meaning::Followed(_) | Meaning::Vnics { .. }) => false,
            Some(_) => true,
        };
        self.control_version += u64::from(is_for_control);
        match meaning {
            None => false,
            Some(Meaning::Identity) => {
                self.identity_at = entry.as_ref().map(|entry| entry.modified).unwrap_or_default();
                let identity = value(entry.as_ref());
                std::mem::replace(&mut self.identity, identity.clone()) != identity
            }
            Some(Meaning::ReclaimAfter) => {
                self.reclaim_after_s = entry.as_ref().and_then(reclaim_after_in);
                true
            }
            Some(Meaning::Drained(host)) => put(&mut self.drained, host.to_owned(), value(entry.as_ref())),
            Some(Meaning::Declared(at)) => {
                let entry = entry.map(|entry| Entry { key: at.to_owned(), ..entry });
                put(&mut self.declared, at.to_owned(), entry)
            }
            Some(Meaning::DeclaredSerial) => {
                self.declared_at = entry.map(|entry| entry.modified).unwrap_or_default();
                true
            }
            Some(Meaning::Record(host)) => {
                let record =
                    value(entry.as_ref()).filter(|record: &HostRecord| is_host_name(host) && record.is_sound());
                let since = entry.map(|entry| entry.modified).unwrap_or_default();
                put(&mut self.hosts, host.to_owned(), record.map(|record| (since, record)))
            }
            Some(Meaning::Holdings(host)) => {
                self.spoke.insert(host.to_owned(), now);
                self.take_holdings(host, entry.as_ref());
                false
            }
            Some(Meaning::Members { host, part }) => {
                if let Some(part) = part_in(host, part, MEMBERS_PART_COUNT) {
                    self.take_members((host.to_owned(), part), entry.as_ref());
                }
                false
            }
            Some(Meaning::Followed(host)) => {
                self.heard.insert(host.to_owned(), now);
                self.take_followed(host, entry.as_ref());
                false
            }
            Some(Meaning::Vnics { host, part }) => {
                self.take_vnics(host, part, entry.as_ref());
                false
            }
            Some(Meaning::OfVnic(vnic)) => {
                let place = entry.as_ref().and_then(|entry| Some((entry.modified, place_in(entry)?)));
                put(&mut self.places, vnic.to_owned(), place)
            }
            Some(Meaning::Reclaimed(host)) => {
                let word = entry.as_ref().and_then(|entry| std::str::from_utf8(&entry.value).ok()?.parse().ok());
                put(&mut self.reclaimed, host.to_owned(), word.map(Revision));
                false
            }
            Some(Meaning::Block { network, host }) => {
                self.take_block((network.to_owned(), host.to_owned()), entry.as_ref())
            }
        }
    }

    /// Whether a host says that it has other ranges, or has followed all that is declared, and had not.
    fn is_other_for_control(&self, host: &str, followed: Option<&Followed>) -> bool {
        let said = |followed: &Followed| (followed.ranges.clone(), followed.revision >= self.declared_at.0);
        // One that all was taken back from is given blocks again when it speaks.
        self.reclaimed.contains_key(host) || followed.map(said) != self.followed.get(host).map(said)
    }

    fn take_block(&mut self, of: (String, String), entry: Option<&Entry>) -> bool {
        put(&mut self.blocks_at, of.clone(), entry.map(|entry| entry.modified));
        put(&mut self.blocks, of, entry.and_then(block_in))
    }

    fn take_holdings(&mut self, host: &str, entry: Option<&Entry>) {
        // Those that can't be read are none, but they are there: their host writes over them.
        let read = |entry: &Entry| value(sized(Some(entry))).map(Holdings::bounded).unwrap_or_default();
        put(&mut self.holdings, host.to_owned(), entry.map(|entry| (entry.modified, read(entry))));
    }

    fn take_followed(&mut self, host: &str, entry: Option<&Entry>) {
        let followed: Option<Followed> = value(sized(entry)).map(Followed::bounded);
        self.control_version += u64::from(self.is_other_for_control(host, followed.as_ref()));
        put(&mut self.words, host.to_owned(), entry.map(|entry| entry.modified));
        put(&mut self.followed, host.to_owned(), followed);
    }

    fn take_members(&mut self, of: (String, usize), entry: Option<&Entry>) {
        let members = value(sized(entry)).map(Members::bounded);
        let networks = |members: Option<&Members>| members.map(|members| members.networks.keys().cloned().collect());
        let (before, after): (Option<Vec<String>>, _) = (networks(self.members.get(&of)), networks(members.as_ref()));
        self.mesh_version += u64::from(before.unwrap_or_default() != after.unwrap_or_default());
        self.members_version += u64::from(put(&mut self.members, of, members));
    }

    fn take_vnics(&mut self, host: &str, part: &str, entry: Option<&Entry>) {
        let Some(part) = part_in(host, part, VNICS_PART_COUNT) else { return };
        if put(&mut self.vnics_parts, (host.to_owned(), part), value(sized(entry))) {
            let first = (host.to_owned(), 0);
            let parts = self.vnics_parts.range(first..).take_while(|((of, _), _)| of == host).map(|(_, part)| part);
            let joined = HostVnics::joined(parts);
            put(&mut self.vnics, host.to_owned(), joined);
        }
    }

    /// The keys that are in it.
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// Of etcd's, up to which all is here.
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// When what is declared was last changed.
    pub fn declared_revision(&self) -> Revision {
        self.declared_at
    }

    /// Which cluster it is.
    ///
    /// # Errors
    /// `Absent`: none. `Damaged`: one of a newer release.
    pub fn identity(&self) -> Result<&Identity, ClusterError> {
        let absent = || ClusterError::Absent(self.keys.root().into());
        let identity = self.identity.as_ref().ok_or_else(absent)?;
        identity.check()?;
        Ok(identity)
    }

    /// Blocks of a host that is silent for so long are taken back, seconds; `None`: never.
    pub fn reclaim_after_s(&self) -> Option<u64> {
        self.reclaim_after_s
    }

    /// Hosts that an operator has drained.
    pub fn drained(&self) -> &BTreeMap<String, Drained> {
        &self.drained
    }

    /// All that is declared for all hosts.
    ///
    /// # Errors
    /// `Damaged`: an entry makes no sense, or what it names is not there.
    pub fn declared(&self) -> Result<State, ClusterError> {
        let listing = Listing { revision: self.revision, entries: self.declared.values().cloned().collect() };
        state_of(listing)
    }

    /// Hosts by name, as each says of itself, and since which revision it says so.
    pub fn hosts(&self) -> &BTreeMap<String, (Revision, HostRecord)> {
        &self.hosts
    }

    /// The cluster's vNICs that each has and asks for, and since which revision it says so.
    pub fn holdings(&self) -> &BTreeMap<String, (Revision, Holdings)> {
        &self.holdings
    }

    /// Those of one host.
    pub(crate) fn holdings_of(&self, host: &str) -> Option<&Holdings> {
        self.holdings.get(host).map(|(_, holdings)| holdings)
    }

    fn member_parts(&self, host: &str) -> impl Iterator<Item = (usize, &Members)> {
        let parts = self.members.range((host.to_owned(), 0)..=(host.to_owned(), MEMBERS_PART_COUNT));
        parts.map(|((_, number), part)| (*number, part))
    }

    /// The networks of a host, each with vNICs that it has in it; a network may come again with others.
    pub fn members(&self, host: &str) -> impl Iterator<Item = (&str, &[Member])> {
        let all = self.member_parts(host).flat_map(|(_, part)| &part.networks);
        all.map(|(network, members)| (network.as_str(), members.as_slice()))
    }

    /// The same as etcd has it.
    pub fn members_there(&self, host: &str) -> MembersThere {
        self.member_parts(host).map(|(number, part)| (number, part.clone())).collect()
    }

    /// Another number once any host has other members than before.
    pub fn members_version(&self) -> u64 {
        self.members_version
    }

    /// Another number once anything has come by which controllers decide, but for the time that passes: a claim that
    /// is not said again does not count after a while, which makes nothing due.
    pub fn control_version(&self) -> u64 {
        self.control_version
    }

    /// Another number once any host may be in other networks than before.
    pub fn mesh_version(&self) -> u64 {
        self.mesh_version
    }

    /// How far each has followed, where that is followed.
    pub fn followed(&self) -> &BTreeMap<String, Followed> {
        &self.followed
    }

    /// The vNICs of each, as it says, where that is followed.
    pub fn vnics(&self) -> &BTreeMap<String, HostVnics> {
        &self.vnics
    }

    /// Whether a host's block of a network is one of before a backup that was restored: it may be another's since.
    pub fn is_of_backup(&self, network: &str, host: &str) -> bool {
        let at = self.blocks_at.get(&(network.to_owned(), host.to_owned()));
        at.is_some_and(|at| *at < self.restored_at())
    }

    /// By network and host.
    pub fn blocks(&self) -> &BTreeMap<(String, String), Pool> {
        &self.blocks
    }

    /// All that came from the backup, where etcd was restored from one, was last written before this.
    pub fn restored_at(&self) -> Revision {
        let is_restored = self.identity.as_ref().is_some_and(|identity| identity.restored > 0);
        if is_restored { self.identity_at } else { Revision(0) }
    }

    /// The revision of a host's last word.
    pub fn word(&self, host: &str) -> Option<Revision> {
        self.words.get(host).copied()
    }

    /// Since when a host is silent, as far as this has listened without a gap; `None`: etcd is away.
    pub(crate) fn silent_since(&self, host: &str) -> Option<Instant> {
        self.current_since.and_then(|since| Some(*self.heard.get(host)?.max(&since)))
    }

    /// Hosts that all was taken back from, with the word that each had said last then.
    pub(crate) fn reclaimed(&self) -> &BTreeMap<String, Revision> {
        &self.reclaimed
    }

    /// Whether all blocks and places of a host were taken back since it spoke: no word of it counts, until the next.
    pub fn is_reclaimed(&self, host: &str) -> bool {
        let word = self.reclaimed.get(host);
        word.is_some() && word == self.words.get(host)
    }

    /// How long nothing was heard of a host's holdings.
    pub(crate) fn silence(&self, host: &str) -> Duration {
        self.spoke.get(host).map_or(Duration::MAX, Instant::elapsed)
    }

    /// The hosts of declared vNICs.
    pub fn places(&self) -> &Places {
        &self.places
    }

    /// Those of a network, by host.
    pub(crate) fn blocks_of(&self, network: &str) -> impl Iterator<Item = (&str, Pool)> {
        let first = (network.to_owned(), String::new());
        let of_network = self.blocks.range(first..).take_while(move |((of, _), _)| of == network);
        of_network.map(|((_, host), block)| (host.as_str(), *block))
    }

    /// The part of a network that a host gives out.
    pub fn block(&self, network: &str, host: &str) -> Option<Pool> {
        self.blocks.get(&(network.to_owned(), host.to_owned())).copied()
    }
}
