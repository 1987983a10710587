//! Bounds of the machine: numbers and times.
use crate::Link;
use alloc::collections::BTreeMap;
use freeflow_verbs::Duration;

/// How long to wait for the other end's machine, and how often to ask again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Between two copies of a message that wants an answer.
    pub retry_interval: Duration,
    /// Copies after the first.
    pub retry_count_max: u8,
    /// How long a connection that ended keeps its identity, so that late messages of it harm
    /// nobody.
    pub time_wait: Duration,
}

/// Bounds of what programs and peers can make the machine hold, and of its waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Identifiers of all vNICs together, up to 2^20. No vNIC holds more than three times what is
    /// left.
    pub ids_max: u32,
    /// Identifiers of one vNIC; those that requests make at its listeners count, too.
    pub ids_per_vnic_max: u32,
    /// Multicast memberships of one identifier.
    pub memberships_per_id_max: u32,
    /// … and of one vNIC.
    pub memberships_per_vnic_max: u32,
    /// Requests of one remote address that nobody has answered yet.
    pub half_open_per_remote_max: u32,
    /// Undecided requests of one listener, whatever larger backlog it asks for; also what it gets
    /// if it asks for none.
    pub backlog_max: u32,
    /// … and whatever smaller one. Linux counts requests that the program has not read; here they
    /// count until it does anything with them, so a program that reads many before it answers one
    /// needs some more.
    pub backlog_min: u32,
    /// Connections of one vNIC that have no identifier any more, but still wait for the other end
    /// or for the end of TimeWait. Beyond, they are forgotten at once.
    pub orphans_per_vnic_max: u32,
    /// Within this host nothing gets lost; a listener whose backlog is full lets one ask again.
    pub local: Timing,
    /// Between routers, whose channel is seldom slow.
    pub router: Timing,
    /// Linux waits 6 s for each of 16 copies; nobody here waits for that.
    pub external: Timing,
    /// The longest that an MRA makes one wait for the next answer.
    pub mra_wait_max: Duration,
    /// The longest from Connect to an answer, with all the MRAs that come.
    pub connect_wait_max: Duration,
    /// A program that neither accepts nor rejects loses the request after this time.
    pub accept_wait_max: Duration,
    /// A program that got an answer and does not establish loses the connection after this time.
    pub establish_wait_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let timing = |retry_ms, retry_count_max, time_wait_ms| Timing {
            retry_interval: Duration::from_millis(retry_ms),
            retry_count_max,
            time_wait: Duration::from_millis(time_wait_ms),
        };
        Self {
            ids_max: 1 << 20,
            ids_per_vnic_max: 16_384,
            memberships_per_id_max: 256,
            memberships_per_vnic_max: 4096,
            half_open_per_remote_max: 4096,
            backlog_max: 1024,
            backlog_min: 32,
            orphans_per_vnic_max: 16_384,
            local: timing(250, 12, 100),
            router: timing(400, 9, 1000),
            external: timing(1000, 15, 2000),
            mra_wait_max: Duration::from_millis(30_000),
            connect_wait_max: Duration::from_millis(300_000),
            accept_wait_max: Duration::from_millis(240_000),
            establish_wait_max: Duration::from_millis(240_000),
        }
    }
}

impl Limits {
    pub(crate) fn timing(&self, link: Link) -> Timing {
        match link {
            Link::Local => self.local,
            Link::Router(_) => self.router,
            Link::External(_) => self.external,
        }
    }

    /// How many undecided requests a listener may have that asked for `backlog`.
    pub(crate) fn backlog(&self, backlog: u32) -> u32 {
        let wanted = if backlog == 0 { self.backlog_max } else { backlog.min(self.backlog_max) };
        wanted.max(self.backlog_min)
    }
}

/// Whether one that holds so much of what all share may have more, with so much left: alone it gets
/// three quarters of all, and however many are greedy, something is left for the next.
pub(crate) fn keeps_to_its_share(held: u32, left: u32) -> bool {
    held < left.saturating_mul(3)
}

/// Counts one less. A count of zero has no entry.
pub(crate) fn decrement<K: Ord>(counts: &mut BTreeMap<K, u32>, key: K) {
    if let Some(count) = counts.get_mut(&key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&key);
        }
    }
}
