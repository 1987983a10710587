//! Blocks: the part of a network's addresses that one host gives out.
use crate::ClusterError;
use crate::file::ClusterFile;
use crate::keys::{Scope, block_key, reclaimed_key};
use crate::peers::own_ranges;
use crate::turns::{Guard, WRITE_COUNT_MAX, busy, commit, delete_in_turns, part, serial_in};
use crate::view::{View, block_in, state_of};
use freeflow_orchestrator::store::Entry;
use freeflow_orchestrator::{DEFAULT_NETWORK, Pool, Reason, Refusal, Revision, State, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

/// The smallest range that a host can give out.
const PREFIX_LONGEST: u8 = 29;
/// Others may give blocks at the same time: so often it is begun again.
const ATTEMPT_COUNT: usize = 8;

/// Prefix length of a network's blocks: as many blocks as addresses in each, or half as many. A /16 has 256 of
/// 256 addresses, a /24 has 16 of 16.
pub fn block_prefix(pool: Pool) -> u8 {
    let bits = 32 - pool.prefix_length();
    (32 - bits.div_ceil(2)).min(PREFIX_LONGEST).max(pool.prefix_length())
}

/// Addresses that are somebody's.
#[derive(Default)]
struct Taken {
    /// The last one of each run by its first one: no two touch.
    runs: BTreeMap<u64, u64>,
}

impl Taken {
    fn bounds(block: Pool) -> (u64, u64) {
        let first = u64::from(u32::from(block.base()));
        (first, first + u64::from(block.size()) - 1)
    }

    /// The end of the run that has some of these.
    fn end_of(&self, first: u64, last: u64) -> Option<u64> {
        self.runs.range(..=last).next_back().map(|(_, end)| *end).filter(|end| *end >= first)
    }

    fn overlaps(&self, block: Pool) -> bool {
        let (first, last) = Self::bounds(block);
        self.end_of(first, last).is_some()
    }

    fn add(&mut self, block: Pool) {
        let (mut first, mut last) = Self::bounds(block);
        while let Some((run, end)) = self.runs.range(..=last + 1).next_back().filter(|(_, end)| **end + 1 >= first) {
            (first, last) = (first.min(*run), last.max(*end));
            self.runs.remove(&{ *run });
        }
        self.runs.insert(first, last);
    }

    /// Of a range, so many are nobody's.
    fn free_count(&self, pool: Pool) -> u64 {
        let (first, last) = Self::bounds(pool);
        let run = self.runs.range(..=first).next_back().map_or(first, |(run, _)| *run);
        let inside = self.runs.range(run..=last).map(|(run, end)| ((*run).max(first), (*end).min(last)));
        let taken: u64 = inside.map(|(run, end)| (end + 1).saturating_sub(run)).sum();
        u64::from(pool.size()) - taken
    }
}

impl FromIterator<Pool> for Taken {
    fn from_iter<I: IntoIterator<Item = Pool>>(blocks: I) -> Self {
        let mut all = Self::default();
        blocks.into_iter().for_each(|block| all.add(block));
        all
    }
}

/// The first block of a network that touches none of these. It is as large as usual, unless fewer of that size are left
/// than the cluster has hosts: then as large as leaves that many, so that as many hosts again find room.
fn free_block(pool: Pool, taken: &Taken, host_count: usize) -> Option<Pool> {
    let (usual, free) = (block_prefix(pool), taken.free_count(pool));
    let leaves_enough = |prefix_length: &u8| free >> (32 - prefix_length) >= host_count as u64;
    let fitting = (usual..=PREFIX_LONGEST.max(usual)).find(leaves_enough).unwrap_or(PREFIX_LONGEST.max(usual));
    // Free addresses may be in pieces.
    (fitting..=PREFIX_LONGEST.max(usual)).find_map(|prefix_length| first_free(pool, taken, prefix_length))
}

fn first_free(pool: Pool, taken: &Taken, prefix_length: u8) -> Option<Pool> {
    let (mut base, end) = Taken::bounds(pool);
    let size = 1u64 << (32 - prefix_length);
    while base + size <= end + 1 {
        match taken.end_of(base, base + size - 1) {
            None => return format!("{}/{prefix_length}", Ipv4Addr::from(u32::try_from(base).ok()?)).parse().ok(),
            Some(taken_end) => base = (taken_end + 1).next_multiple_of(size),
        }
    }
    None
}

/// The part of a network whose addresses go with declared vNICs from host to host, where its writer has chosen none:
/// the last eighth. A network of 16 addresses or fewer has none: it is for two hosts.
pub fn floating_part(pool: Pool) -> Option<Pool> {
    let prefix_length = (pool.prefix_length() + 3).min(PREFIX_LONGEST);
    let size = 1u32 << (32 - prefix_length);
    let base = u32::from(pool.base()) + (pool.size() - size);
    (pool.size() >= 4 * size).then(|| format!("{}/{prefix_length}", Ipv4Addr::from(base)).parse().ok())?
}

/// Of hosts, by network and host.
pub type Blocks = BTreeMap<(String, String), Pool>;

/// Gives out blocks, and takes them back. There may be several.
#[derive(Clone, Copy, Debug, Default)]
pub struct Controller;

/// All that is due.
#[derive(Debug, Default, PartialEq)]
pub struct DueBlocks {
    /// Blocks to give (`Some`), and to take back, by their keys among the blocks.
    pub writes: Vec<(String, Option<Pool>)>,
    /// Networks that have none left for some host.
    pub full: Vec<String>,
}

/// All that is declared, and since which revision it is so.
type Declared<'a> = (&'a State, Option<Revision>);

/// Whether a host says that it does not have a block, though it has followed all that is declared.
fn is_over(view: &View, host: &str, network: &str, block: Pool, since: Option<Revision>) -> bool {
    let Some(since) = since else { return false };
    view.followed().get(host).is_some_and(|followed| {
        let has_it = followed.ranges.get(network).is_some_and(|range| *range == block.to_string());
        followed.revision >= since.0 && !has_it
    })
}

/// The block that a host has already, though nobody has given it as far as etcd knows, unless it is another's.
fn said_block(said: &[(&String, Pool)], host: &str, taken: &Taken) -> Option<Pool> {
    let (_, own) = said.iter().find(|(of, _)| *of == host)?;
    let is_others = || said.iter().any(|(of, other)| *of != host && (other.encloses(*own) || own.encloses(*other)));
    (!taken.overlaps(*own) && !is_others()).then_some(*own)
}

/// All that is due by what has come, as a controller finds it before it asks etcd.
///
/// # Errors
/// What is declared makes no sense. `File`: the view has not what hosts say that they have.
pub fn due_blocks(view: &View) -> Result<DueBlocks, ClusterError> {
    if view.scope() < Scope::Said {
        // A block that is in use would be free.
        return Err(ClusterError::File("how far hosts have followed is not followed here".into()));
    }
    let since = Some(view.declared_revision()).filter(|since| since.0 > 0);
    Ok(due(view, (&view.declared()?, since), view.blocks()))
}

fn due(view: &View, (declared, since): Declared<'_>, blocks: &Blocks) -> DueBlocks {
    let mut due = DueBlocks::default();
    for network in declared.networks() {
        let name = network.name();
        let of_network = blocks.iter().filter(|((of, _), _)| of == name);
        let mut taken: Taken = of_network.map(|(_, block)| *block).chain(network.floating).collect();
        // Others' that are in use, though nobody has given them as far as etcd knows: it was restored from a backup.
        let said = view
            .followed()
            .iter()
            .filter(|(host, _)| !view.is_reclaimed(host))
            .filter_map(|(host, followed)| Some((host, followed.ranges.get(name)?.parse::<Pool>().ok()?)));
        let is_block =
            |block: &Pool| network.pool.encloses(*block) && block.prefix_length() >= block_prefix(network.pool);
        let said: Vec<(&String, Pool)> = said.filter(|(_, block)| is_block(block)).collect();
        let is_without = |host: &&String| !blocks.contains_key(&(name.to_owned(), (*host).clone()));
        let hosts = view.hosts().keys().filter(|host| !view.is_reclaimed(host));
        let without: Vec<&String> = hosts.filter(is_without).collect();
        // A host's own first, and then of what nobody says that he has.
        for host in &without {
            if let Some(block) = said_block(&said, host, &taken) {
                taken.add(block);
                due.writes.push((block_key(name, host), Some(block)));
            }
        }
        let has_own: BTreeSet<String> = due.writes.iter().map(|(at, _)| at.clone()).collect();
        said.iter().for_each(|(_, block)| taken.add(*block));
        // A drained host keeps what it has, and makes no new vNICs.
        let is_new = |host: &&String| !has_own.contains(&block_key(name, host)) && !view.drained().contains_key(*host);
        for host in without.into_iter().filter(is_new) {
            match free_block(network.pool, &taken, view.hosts().len()) {
                Some(block) => {
                    taken.add(block);
                    due.writes.push((block_key(name, host), Some(block)));
                }
                None => {
                    if due.full.last().is_none_or(|last| last != name) {
                        due.full.push(name.to_owned());
                    }
                }
            }
        }
    }
    for ((name, host), block) in blocks {
        if name == DEFAULT_NETWORK {
            continue;
        }
        let is_of_network = declared.network(name).is_some_and(|network| network.pool.encloses(*block));
        if !is_of_network && is_over(view, host, name, *block, since) {
            due.writes.push((block_key(name, host), None));
        }
    }
    let spoke_since = view.reclaimed().keys().filter(|host| !view.is_reclaimed(host));
    due.writes.extend(spoke_since.map(|host| (reclaimed_key(host), None)));
    due
}

/// A host's block of `default`, where these blocks are given, as a controller finds it.
///
/// # Errors
/// `Refused`: there is none left.
pub fn due_default(view: &View, pool: Pool, host: &str, blocks: &Blocks) -> Result<Pool, ClusterError> {
    default_block(view, pool, host, blocks)
}

/// A host's block of `default`: the one that it has, else a free one. A host that has a block has that, whatever it
/// says of itself; others were given their ranges by hand, as far as they are believed.
fn default_block(view: &View, pool: Pool, host: &str, blocks: &Blocks) -> Result<Pool, ClusterError> {
    let block_of = |host: &str| blocks.get(&(DEFAULT_NETWORK.to_owned(), host.to_owned())).copied();
    if let Some(block) = block_of(host).filter(|block| pool.encloses(*block)) {
        return Ok(block);
    }
    let declared = view.declared()?;
    let by_hand = own_ranges(view, &declared).into_iter().filter(|(of, _)| *of != host && block_of(of).is_none());
    let by_hand = by_hand.filter_map(|(_, range)| range.to_string().parse().ok());
    let given = blocks.iter().filter(|((network, of), _)| network == DEFAULT_NETWORK && of != host);
    let given: Vec<Pool> = given.map(|(_, block)| *block).collect();
    let host_count = given.len().max(view.hosts().len()) + 1;
    let taken: Taken =
        given.into_iter().chain(by_hand).chain(declared.networks().map(|network| network.pool)).collect();
    let full = || {
        let text = format!("no block of {pool} is left for {host}, each is a host's: remove one that is gone");
        Refusal::new(Reason::Exhausted, text).into()
    };
    free_block(pool, &taken, host_count).ok_or_else(full)
}

impl Controller {
    /// Gives and takes back what is due. The networks that have no block left for some host.
    ///
    /// # Errors
    /// etcd did not do it, or what is there makes no sense.
    pub fn run(file: &ClusterFile, view: &View) -> Result<Vec<String>, ClusterError> {
        // First by what has come, which as a rule is all there is: etcd is asked nothing then.
        let first = due_blocks(view)?;
        if first.writes.is_empty() {
            return Ok(first.full);
        }
        let mut store = file.store(&file.keys().blocks())?;
        let listing = store.list("", None)?;
        let serial = serial_in(&listing.entries);
        if serial > Some(view.revision()) {
            // A host may have been removed: news of that come first.
            return Ok(first.full);
        }
        // After the blocks: while there are some of a network, nobody declares another one of its name. So a network
        // that is not declared then is not until these blocks are gone, or others have been written.
        let declared = file.store(&file.keys().declared())?.list("", None)?;
        let since = serial_in(&declared.entries);
        let declared = state_of(declared)?;
        let DueBlocks { writes, full } = due(view, (&declared, since), &blocks_in(&listing.entries));
        commit(&mut store, writes.into_iter().take(WRITE_COUNT_MAX).map(encoded), serial)?;
        Ok(full)
    }

    /// The host's block of the network `default`: the one that it has, else one that touches nobody's.
    ///
    /// # Errors
    /// `Refused`: there is none left. etcd did not do it.
    pub(crate) fn give_default(file: &ClusterFile, view: &View, pool: Pool, host: &str) -> Result<Pool, ClusterError> {
        let mut store = file.store(&file.keys().blocks())?;
        for _ in 0..ATTEMPT_COUNT {
            let listing = store.list("", None)?;
            let blocks = blocks_in(&listing.entries);
            let there = blocks.get(&(DEFAULT_NETWORK.to_owned(), host.to_owned())).copied();
            let block = default_block(view, pool, host, &blocks)?;
            if there == Some(block) {
                return Ok(block);
            }
            let writes = vec![(block_key(DEFAULT_NETWORK, host), Some(block))];
            if commit(&mut store, writes.into_iter().map(encoded), serial_in(&listing.entries))? {
                return Ok(block);
            }
        }
        Err(busy())
    }

    /// Whether there is a block of `default` for the host, so that it is not let in without one.
    ///
    /// # Errors
    /// `Refused`: there is none left. etcd does not answer.
    pub(crate) fn check_default(file: &ClusterFile, view: &View, pool: Pool, host: &str) -> Result<(), ClusterError> {
        let entries = file.store(&file.keys().blocks())?.list("", None)?.entries;
        default_block(view, pool, host, &blocks_in(&entries)).map(drop)
    }

    /// How many blocks a host has.
    ///
    /// # Errors
    /// etcd does not answer.
    pub(crate) fn count_of(file: &ClusterFile, host: &str) -> Result<usize, ClusterError> {
        let entries = file.store(&file.keys().blocks())?.list("", None)?.entries;
        Ok(blocks_in(&entries).keys().filter(|(_, of)| of == host).count())
    }

    /// All blocks of a host are free again: it is gone for good. How many there were.
    ///
    /// # Errors
    /// etcd did not do it, or the guard forbids it.
    pub(crate) fn release(file: &ClusterFile, host: &str, guard: Option<Guard<'_>>) -> Result<usize, ClusterError> {
        let mut store = part(file, &file.keys().blocks(), guard)?;
        delete_in_turns(&mut store, |entries| {
            let blocks = blocks_in(entries);
            let of_host = blocks.keys().filter(|(_, of)| of == host);
            of_host.map(|(network, host)| block_key(network, host)).collect()
        })
    }
}

pub(crate) fn blocks_in(entries: &[Entry]) -> Blocks {
    let read = |entry: &Entry| {
        let (network, host) = entry.key.split_once('/')?;
        Some(((network.to_owned(), host.to_owned()), block_in(entry)?))
    };
    entries.iter().filter_map(read).collect()
}

fn encoded((key, block): (String, Option<Pool>)) -> (String, Option<Vec<u8>>) {
    (key, block.map(|block| block.to_string().into_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(text: &str) -> Pool {
        text.parse().expect("a range")
    }

    #[test]
    fn blocks_are_about_as_many_as_their_addresses() {
        for (network, prefix_length) in
            [("10.0.0.0/8", 20), ("10.1.0.0/16", 24), ("10.1.0.0/24", 28), ("10.1.0.0/27", 29), ("10.1.0.0/29", 29)]
        {
            assert_eq!(block_prefix(pool(network)), prefix_length, "{network}");
        }
    }

    #[test]
    fn an_eighth_goes_with_vnics_where_enough_is_left() {
        for (network, part) in [
            ("10.0.0.0/8", Some("10.224.0.0/11")),
            ("10.1.0.0/16", Some("10.1.224.0/19")),
            ("10.1.0.0/24", Some("10.1.0.224/27")),
            ("10.1.0.0/26", Some("10.1.0.56/29")),
            ("10.1.0.0/27", Some("10.1.0.24/29")),
            ("10.1.0.0/28", None),
            ("10.1.0.0/29", None),
        ] {
            assert_eq!(floating_part(pool(network)), part.map(pool), "{network}");
        }
    }

    #[test]
    fn no_two_blocks_touch_and_all_are_given() {
        let network = pool("10.50.0.0/24");
        let before = ["10.50.0.16/28", "10.50.0.64/26"].map(pool);
        let mut taken: Taken = before.into_iter().collect();
        let mut all = before.to_vec();
        while let Some(block) = free_block(network, &taken, 2) {
            assert!(network.encloses(block));
            assert!(!all.iter().any(|other| other.encloses(block) || block.encloses(*other)), "{block}");
            taken.add(block);
            all.push(block);
        }
        // Eleven of 16 addresses were free: ten of them, and the last two of 8.
        assert_eq!((all.len(), taken.free_count(network)), (2 + 10 + 2, 0));
        let own = ["10.50.0.0/28", "10.50.0.32/28"].map(pool);
        assert!(own.iter().all(|block| all.contains(block)));
        let small = pool("10.1.0.0/29");
        assert_eq!(free_block(small, &[small].into_iter().collect(), 1), None);
    }

    #[test]
    fn blocks_get_smaller_while_there_are_many_hosts_and_few_addresses() {
        let network = pool("10.50.0.0/16");
        let mut taken: Taken = floating_part(network).into_iter().collect();
        let mut lengths = BTreeMap::<u8, usize>::new();
        for host_count in 1.. {
            let Some(block) = free_block(network, &taken, host_count) else { break };
            assert!(!taken.overlaps(block), "{block}");
            taken.add(block);
            *lengths.entry(block.prefix_length()).or_default() += 1;
        }
        // Of 256 addresses as long as half of those are left; then half of what is left is of the next size.
        assert_eq!(lengths[&24], 112);
        assert!(lengths.values().sum::<usize>() > 1500 && taken.free_count(network) == 0, "{lengths:?}");
    }

    #[test]
    fn addresses_are_counted_wherever_they_are() {
        let mut taken = Taken::default();
        for block in ["10.0.0.8/29", "10.0.0.0/29", "10.0.0.0/28", "10.0.0.24/29", "11.0.0.0/8"] {
            taken.add(pool(block));
        }
        assert_eq!(taken.runs.len(), 3);
        for (range, free) in [("10.0.0.0/27", 8), ("10.0.0.8/29", 0), ("10.0.0.16/29", 8), ("11.9.0.0/16", 0)] {
            assert_eq!(taken.free_count(pool(range)), free, "{range}");
        }
        assert!(taken.overlaps(pool("10.0.0.0/8")) && !taken.overlaps(pool("10.0.0.16/29")));
        assert!(taken.overlaps(pool("10.0.0.16/28")) && !taken.overlaps(pool("12.0.0.0/8")));
    }
}
