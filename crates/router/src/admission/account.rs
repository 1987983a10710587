//! Accounts of things that tenants take and the engine doesn't count, and each tenant's share of
//! those of the router's process.
//!
//! The kernel gives one process so many mappings (vm.max_map_count) and descriptors
//! (RLIMIT_NOFILE); each vNIC's own limits would let one or two take all of them, and then no other
//! could even begin a session. So a vNIC may hold at most [`SHARE`] times what is left over: alone
//! three quarters of all, two at most three sevenths each, and however many are greedy, something
//! is left for the next.
use freeflow_verbs::VnicLimits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const SHARE: u64 = 3;
/// Kept for the router itself: its threads, its heap, its own descriptors, connections to and from 1,024 other hosts.
const MAPPINGS_RESERVED: u64 = 4096;
const DESCRIPTORS_RESERVED: u64 = 4096;
/// As many as can be watched for SIGBUS, which is also the kernel's own default.
const MAPPINGS_MAX: u64 = 65_530;
/// More descriptors than this nobody needs.
const DESCRIPTORS_MAX: u64 = 1 << 22;
/// Threads that freeze others' threads: of one vNIC, and of all.
const THREADS_OF_VNIC_MAX: u64 = 128;
const THREADS_MAX: u64 = 1024;
/// Smallest page of any processor that this runs on.
const PAGE_BYTES: u64 = 4096;
/// Of a thread: its stack and the page that guards it.
const THREAD_MAPPINGS: u64 = 2;
/// Of one connection: socket, pidfd, memory, maps, tasks, kick.
const CONNECTION_DESCRIPTORS: u64 = 6;
/// Of a vNIC's segments, the part that rings of datagrams may take: they only speed up what works without them.
const DATAGRAM_RINGS_PART: u64 = 4;

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

    /// As many as a vNIC that now has `own` can come to have while the others stay as they are.
    fn fair(&self, own: u64) -> u64 {
        let others = self.held.load(Relaxed).saturating_sub(own);
        self.max.saturating_sub(others).saturating_mul(SHARE) / (SHARE + 1)
    }
}

/// The process' own mappings and descriptors.
pub struct Commons {
    mappings: Pool,
    descriptors: Pool,
    threads: Pool,
    ring_bytes: Pool,
}

impl Commons {
    /// Rings have no limit in common.
    pub fn new(mappings: u64, descriptors: u64) -> Self {
        Self {
            mappings: Pool::new(mappings, MAPPINGS_RESERVED),
            descriptors: Pool::new(descriptors, DESCRIPTORS_RESERVED),
            threads: Pool::new(THREADS_MAX, 0),
            ring_bytes: Pool::new(u64::MAX, 0),
        }
    }

    /// Rings of all vNICs together take at most so many bytes.
    pub fn with_ring_bytes(self, max: u64) -> Self {
        Self { ring_bytes: Pool::new(max, 0), ..self }
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
        Self::new(mappings, descriptors).with_ring_bytes(crate::base::machine::ring_bytes_of_all())
    }
}

/// Of what the process has for all vNICs: what one holds, or may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub mappings: u64,
    pub descriptors: u64,
    pub threads: u64,
}

#[derive(Clone, Copy, Default)]
struct Amounts {
    segments: u64,
    segment_bytes: u64,
    ring_bytes: u64,
    datagram_rings: u64,
    channels: u64,
    connections: u64,
    imports: u64,
    mappings: u64,
    descriptors: u64,
    threads: u64,
}

/// Holdings of one vNIC.
pub struct Account {
    commons: Arc<Commons>,
    pub segments: AtomicU64,
    pub segment_bytes: AtomicU64,
    /// Of these, rings: the router may be the first to touch their pages.
    pub ring_bytes: AtomicU64,
    /// Of the segments, direct rings of datagrams.
    datagram_rings: AtomicU64,
    channels: AtomicU64,
    connections: AtomicU64,
    /// Handles of other processes' MRs and segments.
    imports: AtomicU64,
    mappings: AtomicU64,
    descriptors: AtomicU64,
    threads: AtomicU64,
    /// Ranges in its processes' page tables: the worker counts.
    pub ranges: Arc<AtomicU64>,
}

impl Account {
    pub fn new(commons: Arc<Commons>) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            commons,
            segments: zero(),
            segment_bytes: zero(),
            ring_bytes: zero(),
            datagram_rings: zero(),
            channels: zero(),
            connections: zero(),
            imports: zero(),
            mappings: zero(),
            descriptors: zero(),
            threads: zero(),
            ranges: Arc::default(),
        }
    }

    pub fn held(&self) -> Held {
        Held {
            mappings: self.mappings.load(Relaxed),
            descriptors: self.descriptors.load(Relaxed),
            threads: self.threads.load(Relaxed),
        }
    }

    /// Most that it may come to hold, while the others hold what they do.
    pub fn limits(&self) -> Held {
        let Held { mappings, descriptors, threads } = self.held();
        Held {
            mappings: self.commons.mappings.fair(mappings),
            descriptors: self.commons.descriptors.fair(descriptors),
            threads: self.commons.threads.fair(threads).min(THREADS_OF_VNIC_MAX),
        }
    }

    /// Ring bytes that it may come to hold, by its own limit and while the others hold what they do.
    pub fn ring_bytes_limit(&self, limits: &VnicLimits) -> u64 {
        self.commons.ring_bytes.fair(self.ring_bytes.load(Relaxed)).min(limits.ring_bytes_max)
    }

    fn each(&self, amounts: &Amounts, mut change: impl FnMut(&AtomicU64, u64)) {
        change(&self.segments, amounts.segments);
        change(&self.segment_bytes, amounts.segment_bytes);
        change(&self.ring_bytes, amounts.ring_bytes);
        change(&self.commons.ring_bytes.held, amounts.ring_bytes);
        change(&self.datagram_rings, amounts.datagram_rings);
        change(&self.channels, amounts.channels);
        change(&self.connections, amounts.connections);
        change(&self.imports, amounts.imports);
        change(&self.mappings, amounts.mappings);
        change(&self.commons.mappings.held, amounts.mappings);
        change(&self.descriptors, amounts.descriptors);
        change(&self.commons.descriptors.held, amounts.descriptors);
        change(&self.threads, amounts.threads);
        change(&self.commons.threads.held, amounts.threads);
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
        let is_fair = |amount, pool: &Pool, own: &AtomicU64| amount == 0 || pool.is_fair(own.load(Relaxed));
        let all_are_fair = is_fair(amounts.mappings, &commons.mappings, &account.mappings)
            && is_fair(amounts.descriptors, &commons.descriptors, &account.descriptors)
            && is_fair(amounts.threads, &commons.threads, &account.threads)
            && is_fair(amounts.ring_bytes, &commons.ring_bytes, &account.ring_bytes);
        if all_are_fair { Ok(charge) } else { Err(OverLimit) }
    }

    fn within(self, count: impl Fn(&Account) -> &AtomicU64, max: u64) -> Result<Self, OverLimit> {
        if count(&self.account).load(Relaxed) > max { Err(OverLimit) } else { Ok(self) }
    }

    pub fn segment(account: &Arc<Account>, bytes: u64, limits: &VnicLimits) -> Result<Self, OverLimit> {
        Self::segment_of(account, bytes, 0, limits)
    }

    /// A segment that holds rings.
    pub fn ring(account: &Arc<Account>, bytes: u64, limits: &VnicLimits) -> Result<Self, OverLimit> {
        Self::segment_of(account, bytes, bytes, limits)?.within(|account| &account.ring_bytes, limits.ring_bytes_max)
    }

    /// Memory that the router makes for others and does not map: its pages are theirs.
    pub fn foreign(account: &Arc<Account>, limits: &VnicLimits) -> Result<Self, OverLimit> {
        Self::segment_of(account, 0, 0, limits)
    }

    /// A direct ring of datagrams: [`Self::foreign`], but the router has no mapping of it. Its descriptor is charged
    /// for apart.
    pub fn datagram_ring(account: &Arc<Account>, limits: &VnicLimits) -> Result<Self, OverLimit> {
        let max = u64::from(limits.mapping_count_max);
        Self::new(account, Amounts { segments: 1, datagram_rings: 1, ..Amounts::default() })?
            .within(|account| &account.datagram_rings, max / DATAGRAM_RINGS_PART)?
            .within(|account| &account.segments, max)
    }

    /// In whole pages: a segment of one byte costs a page.
    fn segment_of(account: &Arc<Account>, bytes: u64, ring_bytes: u64, limits: &VnicLimits) -> Result<Self, OverLimit> {
        if bytes > limits.segment_bytes_max {
            return Err(OverLimit);
        }
        let pages = |bytes: u64| bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(OverLimit);
        let (segment_bytes, ring_bytes) = (pages(bytes)?, pages(ring_bytes)?);
        let amounts = Amounts { segments: 1, segment_bytes, ring_bytes, mappings: 1, ..Amounts::default() };
        Self::new(account, amounts)?
            .within(|account| &account.segments, limits.mapping_count_max.into())?
            .within(|account| &account.segment_bytes, limits.segment_bytes_max)
    }

    pub fn descriptor(account: &Arc<Account>) -> Result<Self, OverLimit> {
        Self::new(account, Amounts { descriptors: 1, ..Amounts::default() })
    }

    /// A thread that the vNIC's own requests begin.
    pub fn thread(account: &Arc<Account>) -> Result<Self, OverLimit> {
        let amounts = Amounts { threads: 1, mappings: THREAD_MAPPINGS, ..Amounts::default() };
        Self::new(account, amounts)?.within(|account| &account.threads, THREADS_OF_VNIC_MAX)
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
    const PAGE: u64 = PAGE_BYTES;

    fn limits(segments: u32, segment_bytes: u64, ring_bytes: u64) -> VnicLimits {
        VnicLimits {
            mapping_count_max: segments,
            segment_bytes_max: segment_bytes,
            ring_bytes_max: ring_bytes,
            ..VnicLimits::default()
        }
    }

    /// Takes all that it gets.
    fn greed(account: &Arc<Account>) -> Vec<Charge> {
        std::iter::from_fn(|| Charge::segment(account, 1, &limits(u32::MAX, u64::MAX, 0)).ok()).collect()
    }

    #[test]
    fn the_greedy_leave_something() {
        let commons = Arc::new(Commons::new(ALL, ALL));
        let accounts: Vec<_> = (0..5).map(|_| Arc::new(Account::new(commons.clone()))).collect();
        let fair = accounts[0].limits().mappings;
        let mut held: Vec<Vec<Charge>> = accounts.iter().map(greed).collect();
        let usable = ALL - MAPPINGS_RESERVED;
        assert_eq!((fair, accounts[0].held().mappings), (usable * 3 / 4, fair));
        assert_eq!(accounts[4].limits().mappings, accounts[4].held().mappings, "it has all that it can have");
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
    fn rings_of_datagrams_leave_segments_for_all_else() {
        let account = Arc::new(Account::new(Arc::new(Commons::new(ALL, ALL))));
        let limits = limits(400, u64::MAX, 0);
        let rings: Vec<_> = std::iter::from_fn(|| Charge::datagram_ring(&account, &limits).ok()).collect();
        assert_eq!((rings.len(), account.held().mappings), (100, 0));
        let segments: Vec<_> = std::iter::from_fn(|| Charge::segment(&account, 1, &limits).ok()).collect();
        assert_eq!(segments.len(), 300);
        drop(rings);
        assert!(Charge::segment(&account, 1, &limits).is_ok());
    }

    #[test]
    fn threads_are_bounded_for_each_and_for_all() {
        let commons = Arc::new(Commons::new(ALL, ALL));
        let mut held = Vec::new();
        let counts: Vec<usize> = (0..40)
            .map(|_| {
                let account = Arc::new(Account::new(commons.clone()));
                let its: Vec<Charge> = std::iter::from_fn(|| Charge::thread(&account).ok()).collect();
                held.extend(its);
                account.threads.load(Relaxed) as usize
            })
            .collect();
        assert_eq!(counts[0] as u64, THREADS_OF_VNIC_MAX);
        assert!(held.len() as u64 <= THREADS_MAX, "{} threads", held.len());
        held.clear();
        assert_eq!((commons.threads.held.load(Relaxed), commons.mappings.held.load(Relaxed)), (0, 0));
    }

    #[test]
    fn rings_of_all_keep_to_what_the_machine_gives() {
        const MAX: u64 = 1024 * PAGE;
        let commons = Arc::new(Commons::new(ALL, ALL).with_ring_bytes(MAX));
        let limits = limits(u32::MAX, u64::MAX, 600 * PAGE);
        let accounts: Vec<_> = (0..6).map(|_| Arc::new(Account::new(commons.clone()))).collect();
        assert_eq!(accounts[0].ring_bytes_limit(&limits), 600 * PAGE);
        let mut held: Vec<Vec<Charge>> = accounts
            .iter()
            .map(|account| std::iter::from_fn(|| Charge::ring(account, 1, &limits).ok()).collect())
            .collect();
        assert_eq!(held[0].len(), 600, "its own limit");
        assert_eq!(held[1].len(), 424 * 3 / 4, "its share of the rest");
        assert!(held.iter().all(|charges| !charges.is_empty()));
        assert!(commons.ring_bytes.held.load(Relaxed) < MAX);
        assert!(
            accounts[1].ring_bytes_limit(&limits) <= accounts[1].ring_bytes.load(Relaxed),
            "nothing is left for it"
        );
        held.clear();
        assert_eq!(commons.ring_bytes.held.load(Relaxed), 0);
    }

    #[test]
    fn own_limits_hold_and_refusals_cost_nothing() {
        let account = Arc::new(Account::new(Arc::new(Commons::new(ALL, ALL))));
        let held: Vec<_> = (0..3).map(|_| Charge::channel(&account, 3).unwrap()).collect();
        assert!(Charge::channel(&account, 3).is_err());
        assert!(Charge::segment(&account, u64::MAX, &limits(9, u64::MAX - 1, 0)).is_err());
        assert!(Charge::segment(&account, u64::MAX, &limits(9, u64::MAX, 0)).is_err(), "it is no number of pages");
        assert!(Charge::segment(&account, 10, &limits(9, PAGE, 0)).is_ok());
        assert!(Charge::segment(&account, 10, &limits(9, PAGE - 1, 0)).is_err());
        drop(held);
        assert!(Charge::channel(&account, 1).is_ok());
        assert_eq!(account.descriptors.load(Relaxed), 0);
    }
    #[test]
    fn rings_have_a_limit_of_their_own() {
        let account = Arc::new(Account::new(Arc::new(Commons::new(ALL, ALL))));
        let limits = limits(99, 100 * PAGE, 8 * PAGE);
        let data = Charge::segment(&account, 50 * PAGE, &limits).unwrap();
        // A ring of one byte takes a page.
        let mut rings: Vec<_> = std::iter::from_fn(|| Charge::ring(&account, 1, &limits).ok()).collect();
        assert_eq!((rings.len(), account.ring_bytes.load(Relaxed)), (8, 8 * PAGE));
        assert!(Charge::segment(&account, PAGE, &limits).is_ok(), "data is not rings");
        rings.truncate(5);
        assert!(Charge::ring(&account, 3 * PAGE + 1, &limits).is_err());
        assert!(Charge::ring(&account, 3 * PAGE, &limits).is_ok());
        let foreign = Charge::foreign(&account, &limits).unwrap();
        assert_eq!(foreign.segment_bytes(), 0);
        drop((rings, data));
        assert_eq!((account.ring_bytes.load(Relaxed), account.segment_bytes.load(Relaxed)), (0, 0));
    }
}
