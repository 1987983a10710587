//! What tenants take of things that the engine doesn't count, and how they share what the router's process has of them.
//!
//! The kernel gives one process so many mappings (vm.max_map_count) and descriptors (RLIMIT_NOFILE); each vNIC's own limits
//! would let one or two take all of them, and then no other could even begin a session. So a vNIC may hold at most
//! [`SHARE`] times what is left over: alone three quarters of all, two at most three sevenths each, and however many are
//! greedy, something is left for the next.
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const SHARE: u64 = 3;
/// Kept for the router itself: its threads, its heap, its own descriptors.
const MAPPINGS_RESERVED: u64 = 4096;
const DESCRIPTORS_RESERVED: u64 = 1024;
/// As many as can be watched for SIGBUS, which is also the kernel's own default.
const MAPPINGS_MAX: u64 = 65_530;
/// More descriptors than this nobody needs.
const DESCRIPTORS_MAX: u64 = 1 << 22;
/// Of one connection: socket, pidfd, memory, tasks, kick.
const CONNECTION_DESCRIPTORS: u64 = 5;

struct Pool {
    held: AtomicU64,
    max: u64,
}

impl Pool {
    fn new(max: u64, reserved: u64) -> Self {
        Self { held: AtomicU64::new(0), max: max - reserved.min(max / 4) }
    }

    /// Whether a vNIC that now has `own` keeps to its share.
    fn is_fair(&self, own: u64) -> bool {
        own <= self.max.saturating_sub(self.held.load(Relaxed)).saturating_mul(SHARE)
    }
}

/// The process' own mappings and descriptors.
pub struct Commons {
    mappings: Pool,
    descriptors: Pool,
}

impl Commons {
    pub fn new(mappings: u64, descriptors: u64) -> Self {
        Self {
            mappings: Pool::new(mappings, MAPPINGS_RESERVED),
            descriptors: Pool::new(descriptors, DESCRIPTORS_RESERVED),
        }
    }

    /// Raises the limit of descriptors as far as it goes and takes both limits from the kernel.
    pub fn of_process() -> Self {
        let number = |path| std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
        let wanted = number("/proc/sys/fs/nr_open").map_or(DESCRIPTORS_MAX, |most| most.min(DESCRIPTORS_MAX));
        let before = getrlimit(Resource::Nofile);
        let wanted = before.maximum.map_or(wanted, |maximum| maximum.max(wanted));
        // Above the hard limit only with CAP_SYS_RESOURCE.
        if setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: Some(wanted) }).is_err() {
            let _ = setrlimit(Resource::Nofile, Rlimit { current: before.maximum, maximum: before.maximum });
        }
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(DESCRIPTORS_MAX);
        let mappings = number("/proc/sys/vm/max_map_count").unwrap_or(MAPPINGS_MAX).min(MAPPINGS_MAX);
        Self::new(mappings, descriptors)
    }
}

#[derive(Clone, Copy, Default)]
struct Amounts {
    segments: u64,
    segment_bytes: u64,
    channels: u64,
    connections: u64,
    imports: u64,
    mappings: u64,
    descriptors: u64,
}

/// What one vNIC holds.
pub struct Account {
    commons: Arc<Commons>,
    pub segments: AtomicU64,
    pub segment_bytes: AtomicU64,
    channels: AtomicU64,
    connections: AtomicU64,
    /// Handles of other processes' MRs and segments.
    imports: AtomicU64,
    mappings: AtomicU64,
    descriptors: AtomicU64,
}

impl Account {
    pub fn new(commons: Arc<Commons>) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            commons,
            segments: zero(),
            segment_bytes: zero(),
            channels: zero(),
            connections: zero(),
            imports: zero(),
            mappings: zero(),
            descriptors: zero(),
        }
    }

    fn each(&self, amounts: &Amounts, mut change: impl FnMut(&AtomicU64, u64)) {
        change(&self.segments, amounts.segments);
        change(&self.segment_bytes, amounts.segment_bytes);
        change(&self.channels, amounts.channels);
        change(&self.connections, amounts.connections);
        change(&self.imports, amounts.imports);
        change(&self.mappings, amounts.mappings);
        change(&self.commons.mappings.held, amounts.mappings);
        change(&self.descriptors, amounts.descriptors);
        change(&self.commons.descriptors.held, amounts.descriptors);
    }
}

/// Part of an [`Account`]; given back when dropped.
pub struct Charge {
    account: Arc<Account>,
    amounts: Amounts,
}

/// The limit would be passed.
#[derive(Debug)]
pub struct OverLimit;

impl Charge {
    /// Only the control thread adds, so what it reads here can at most be too much.
    fn new(account: &Arc<Account>, amounts: Amounts) -> Result<Self, OverLimit> {
        let charge = Self { account: account.clone(), amounts };
        account.each(&amounts, |count, amount| {
            count.fetch_add(amount, Relaxed);
        });
        let commons = &account.commons;
        let fair = (amounts.mappings == 0 || commons.mappings.is_fair(account.mappings.load(Relaxed)))
            && (amounts.descriptors == 0 || commons.descriptors.is_fair(account.descriptors.load(Relaxed)));
        if fair { Ok(charge) } else { Err(OverLimit) }
    }

    fn within(self, count: impl Fn(&Account) -> &AtomicU64, max: u64) -> Result<Self, OverLimit> {
        if count(&self.account).load(Relaxed) > max { Err(OverLimit) } else { Ok(self) }
    }

    pub fn segment(account: &Arc<Account>, bytes: u64, segments_max: u64, bytes_max: u64) -> Result<Self, OverLimit> {
        if bytes > bytes_max {
            return Err(OverLimit);
        }
        let amounts = Amounts { segments: 1, segment_bytes: bytes, mappings: 1, ..Amounts::default() };
        Self::new(account, amounts)?
            .within(|account| &account.segments, segments_max)?
            .within(|account| &account.segment_bytes, bytes_max)
    }

    pub fn descriptor(account: &Arc<Account>) -> Result<Self, OverLimit> {
        Self::new(account, Amounts { descriptors: 1, ..Amounts::default() })
    }

    pub fn import(account: &Arc<Account>, imports_max: u64) -> Result<Self, OverLimit> {
        let amounts = Amounts { imports: 1, ..Amounts::default() };
        Self::new(account, amounts)?.within(|account| &account.imports, imports_max)
    }

    pub fn channel(account: &Arc<Account>, channels_max: u64) -> Result<Self, OverLimit> {
        let amounts = Amounts { channels: 1, descriptors: 1, ..Amounts::default() };
        Self::new(account, amounts)?.within(|account| &account.channels, channels_max)
    }

    pub fn connection(account: &Arc<Account>, connections_max: u64) -> Result<Self, OverLimit> {
        let descriptors = CONNECTION_DESCRIPTORS;
        let amounts = Amounts { connections: 1, mappings: 1, descriptors, ..Amounts::default() };
        Self::new(account, amounts)?.within(|account| &account.connections, connections_max)
    }

    /// Of segments.
    pub fn segment_bytes(&self) -> u64 {
        self.amounts.segment_bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.each(&self.amounts, |count, amount| {
            count.fetch_sub(amount, Relaxed);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = 40_000;

    /// Takes all that it gets.
    fn greed(account: &Arc<Account>) -> Vec<Charge> {
        std::iter::from_fn(|| Charge::segment(account, 1, u64::MAX, u64::MAX).ok()).collect()
    }

    #[test]
    fn the_greedy_leave_something() {
        let commons = Arc::new(Commons::new(ALL, ALL));
        let accounts: Vec<_> = (0..5).map(|_| Arc::new(Account::new(commons.clone()))).collect();
        let mut held: Vec<Vec<Charge>> = accounts.iter().map(greed).collect();
        let usable = ALL - MAPPINGS_RESERVED;
        assert_eq!(held[0].len() as u64, usable * 3 / 4);
        for charges in &held {
            assert!(charges.len() > 50, "{}", charges.len());
        }
        assert!(Charge::connection(&accounts[0], 9).is_err());
        let newcomer = Arc::new(Account::new(commons.clone()));
        assert!(Charge::connection(&newcomer, 9).is_ok());
        held.clear();
        assert_eq!(commons.mappings.held.load(Relaxed), 0);
    }

    #[test]
    fn own_limits_hold_and_refusals_cost_nothing() {
        let account = Arc::new(Account::new(Arc::new(Commons::new(ALL, ALL))));
        let held: Vec<_> = (0..3).map(|_| Charge::channel(&account, 3).unwrap()).collect();
        assert!(Charge::channel(&account, 3).is_err());
        assert!(Charge::segment(&account, u64::MAX, 9, u64::MAX - 1).is_err());
        assert!(Charge::segment(&account, 10, 9, 10).is_ok());
        drop(held);
        assert!(Charge::channel(&account, 1).is_ok());
        assert_eq!(account.descriptors.load(Relaxed), 0);
    }
}
