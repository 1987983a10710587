//! Blocks: the part of a network's addresses that one host gives out.
use crate::ClusterError;
use crate::file::ClusterFile;
use crate::keys::{Scope, block_key, reclaimed_key};
use crate::peers::own_ranges;
use crate::turns::{Guard, WRITE_COUNT_MAX, busy, commit, delete_in_turns, part, serial_in};
use crate::view::{View, block_in, state_of};
use freeflow_orchestrator::store::Entry;
use freeflow_orchestrator::{DEFAULT_NETWORK, NetworkEntry, Pool, Reason, Refusal, Revision, State, Store};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// The smallest range that a host can give out.
const PREFIX_LONGEST: u8 = 29;
/// Others may give blocks at the same time: so often it is begun anew.
const ATTEMPT_COUNT: usize = 8;

/// Prefix length of a network's blocks: as many blocks as addresses in each, or half as many. A /16 has 256 of
/// 256 addresses, a /24 has 16 of 16.
pub fn block_prefix(pool: Pool) -> u8 {
    let bits = 32 - pool.prefix_length();
    (32 - bits.div_ceil(2)).min(PREFIX_LONGEST).max(pool.prefix_length())
}

/// The first block of a network that touches none of these.
fn free_block(pool: Pool, taken: &[Pool]) -> Option<Pool> {
    let prefix_length = block_prefix(pool);
    let count = 1u32 << (prefix_length - pool.prefix_length());
    (0..count).find_map(|index| {
        let base = u32::from(pool.base()) + (index << (32 - prefix_length));
        let block: Pool = format!("{}/{prefix_length}", Ipv4Addr::from(base)).parse().ok()?;
        (!overlaps_any(block, taken)).then_some(block)
    })
}

fn overlaps_any(block: Pool, taken: &[Pool]) -> bool {
    taken.iter().any(|other| other.encloses(block) || block.encloses(*other))
}

/// The part of a network whose addresses go with declared vNICs from host to host, where its writer has chosen none:
/// the last eighth. A network of 16 addresses or fewer has none: it is for two hosts.
pub fn floating_part(pool: Pool) -> Option<Pool> {
    let prefix_length = (pool.prefix_length() + 3).min(PREFIX_LONGEST);
    let size = 1u32 << (32 - prefix_length);
    let base = u32::from(pool.base()) + (pool.size() - size);
    (pool.size() >= 4 * size).then(|| format!("{}/{prefix_length}", Ipv4Addr::from(base)).parse().ok())?
}

pub(crate) type Blocks = BTreeMap<(String, String), Pool>;

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

/// The block for a host: the one that it has already (its record of blocks was lost), else a free one.
fn block_for(view: &View, host: &str, network: &NetworkEntry, taken: &[Pool]) -> Option<Pool> {
    let said = view.followed().get(host).and_then(|followed| followed.ranges.get(network.name())?.parse().ok());
    let said = said.filter(|block: &Pool| network.pool.encloses(*block) && !overlaps_any(*block, taken));
    said.or_else(|| free_block(network.pool, taken))
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
        let mut taken: Vec<Pool> = of_network.map(|(_, block)| *block).chain(network.floating).collect();
        // Others' that are in use, though nobody has given them as far as etcd knows: it was restored from a backup.
        let said = view
            .followed()
            .iter()
            .filter(|(host, _)| !view.is_reclaimed(host))
            .filter_map(|(host, followed)| Some((host, followed.ranges.get(name)?.parse::<Pool>().ok()?)));
        let is_block =
            |block: &Pool| network.pool.encloses(*block) && block.prefix_length() >= block_prefix(network.pool);
        let said: Vec<(&String, Pool)> = said.filter(|(_, block)| is_block(block)).collect();
        for host in view.hosts().keys().filter(|host| !view.is_reclaimed(host)) {
            if blocks.contains_key(&(name.to_owned(), host.clone())) {
                continue;
            }
            let others = said.iter().filter(|(of, _)| *of != host).map(|(_, block)| *block);
            let not_free: Vec<Pool> = taken.iter().copied().chain(others).collect();
            match block_for(view, host, network, &not_free) {
                Some(block) => {
                    taken.push(block);
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
    let given = given.map(|(_, block)| *block);
    let taken: Vec<Pool> = given.chain(by_hand).chain(declared.networks().map(|network| network.pool)).collect();
    let full = || {
        let text = format!("no block of {pool} is left for {host}, each is a host's: remove one that is gone");
        Refusal::new(Reason::Exhausted, text).into()
    };
    free_block(pool, &taken).ok_or_else(full)
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
        let mut taken = vec![pool("10.50.0.16/28"), pool("10.50.0.64/26")];
        while let Some(block) = free_block(network, &taken) {
            assert!(network.encloses(block) && !taken.contains(&block));
            taken.push(block);
        }
        assert_eq!(taken.len(), 2 + 16 - 1 - 4);
        let own = ["10.50.0.0/28", "10.50.0.32/28"].map(pool);
        assert!(own.iter().all(|block| taken.contains(block)));
        assert_eq!(free_block(pool("10.1.0.0/29"), &[pool("10.1.0.0/29")]), None);
    }
}
