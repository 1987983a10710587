//! Taking back the blocks and declared vNICs of hosts that are silent for too long.
use crate::ClusterError;
use crate::blocks::{Controller, blocks_in};
use crate::file::ClusterFile;
use crate::keys::{block_key, reclaimed_key};
use crate::places;
use crate::turns::{Guard, commit, delete_in_turns, part, serial_in};
use crate::view::View;
use freeflow_orchestrator::{DEFAULT_NETWORK, Revision, Store};
use std::time::{Duration, Instant};

/// A host that all is taken back from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reclaim {
    /// Its name.
    pub host: String,
    /// The revision of its last word.
    pub word: Revision,
}

/// Blocks and places that were taken back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reclaimed {
    /// The host that had them.
    pub host: String,
    /// How many blocks.
    pub blocks: usize,
    /// How many declared vNICs.
    pub vnics: usize,
}

fn has_something(view: &View, host: &str) -> bool {
    let has_block = view.blocks().keys().any(|(network, of)| of == host && network != DEFAULT_NETWORK);
    has_block || view.places().values().any(|(_, place)| place.host == host)
}

/// Hosts whose time is over, at this time by the clock of the news. The block of `default` stays its host's.
pub fn due_reclaims(view: &View, now: Instant) -> Vec<Reclaim> {
    let Some(asked_s) = view.reclaim_after_s() else { return Vec::new() };
    // A time that a host named before a backup was made may be shorter than what it has said since.
    let is_of_backup = |host: &String| view.word(host).is_none_or(|word| word < view.restored_at());
    let due = |host: &String| {
        let said_s = view.followed().get(host)?.reclaim_after_s?;
        let after = Duration::from_secs(said_s.max(asked_s));
        let is_over = view.is_reclaimed(host) || now.saturating_duration_since(view.silent_since(host)?) > after;
        (is_over && has_something(view, host)).then_some(Reclaim { host: host.clone(), word: view.word(host)? })
    };
    view.followed().keys().filter(|host| !is_of_backup(host)).filter_map(due).collect()
}

impl Controller {
    /// Takes back what hosts have that are silent for too long. One that speaks meanwhile keeps what it has then.
    ///
    /// # Errors
    /// etcd did not do it, or what is there makes no sense.
    pub fn reclaim(file: &ClusterFile, view: &View, now: Instant) -> Result<Vec<Reclaimed>, ClusterError> {
        let mut all = Vec::new();
        for Reclaim { host, word } in due_reclaims(view, now) {
            let key = file.keys().followed_of(&host);
            let guard: Guard<'_> = (&key, word);
            let mut store = part(file, &file.keys().blocks(), Some(guard))?;
            // Before anything else: from then on no controller gives the host a block, or believes its last word.
            let serial = serial_in(&store.list("", None)?.entries);
            let note = (reclaimed_key(&host), Some(word.0.to_string().into_bytes()));
            if !view.is_reclaimed(&host) && !commit(&mut store, [note], serial)? {
                // The host has spoken, or another controller was faster: news of that come.
                continue;
            }
            let blocks = delete_in_turns(&mut store, |entries| {
                let of_host = blocks_in(entries).into_keys();
                let of_host = of_host.filter(|(network, of)| *of == host && network != DEFAULT_NETWORK);
                of_host.map(|(network, host)| block_key(&network, &host)).collect()
            })?;
            let vnics = places::reclaim(file, view, &host, guard)?;
            all.push(Reclaimed { host, blocks, vnics });
        }
        Ok(all)
    }
}
