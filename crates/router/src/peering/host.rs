//! One host of the peers file: how far the connection to it has come, and what is kept of it.
use super::claims::ClaimSubject;
use super::file::PeerEntry;
use super::notes::Why;
use freeflow_protocol::admin::PeerCounters;
use freeflow_verbs::{Duration, Instant};

/// A host from which nothing came for so long is dead.
pub const SILENCE_MAX: Duration = Duration::from_millis(3000);
/// The first pause before a host is dialed again; each further one is twice as long, up to the last.
pub const REDIAL_FIRST: Duration = Duration::from_millis(100);
pub const REDIAL_LAST: Duration = Duration::from_millis(2000);

pub type ConnectionId = u64;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Down,
    Waiting { until: Instant },
    Dialing,
    Greeting { connection: ConnectionId, heard: Instant },
    Up { connection: ConnectionId, heard: Instant, ping_at: Instant },
}

impl Phase {
    pub(super) fn connection(self) -> Option<ConnectionId> {
        match self {
            Self::Greeting { connection, .. } | Self::Up { connection, .. } => Some(connection),
            Self::Down | Self::Waiting { .. } | Self::Dialing => None,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Down | Self::Waiting { .. } => "down",
            Self::Dialing => "dialing",
            Self::Greeting { .. } => "greeting",
            Self::Up { .. } => "up",
        }
    }

    fn deadline(self) -> Option<Instant> {
        match self {
            Self::Down | Self::Dialing => None,
            Self::Waiting { until } => Some(until),
            Self::Greeting { heard, .. } => Some(heard + SILENCE_MAX),
            Self::Up { heard, ping_at, .. } => Some(ping_at.min(heard + SILENCE_MAX)),
        }
    }
}

/// How far this host's own announcements have gone to a peer, in the order of [`ClaimSubject`].
pub(super) enum Announced {
    UpTo(Option<ClaimSubject>),
    All,
}

pub(super) struct Host {
    pub entry: PeerEntry,
    pub phase: Phase,
    pub since: Instant,
    pub redial_after: Duration,
    /// Of the last Hello.
    pub epoch: Option<u64>,
    pub icrc: bool,
    pub frames: bool,
    /// It knows that routers may have several engines.
    pub knows_shards: bool,
    /// Why the last connection ended, until it is up again.
    pub problem: Option<Why>,
    /// While it is not up: when its announcements become void.
    pub kept_until: Option<Instant>,
    pub announced: Announced,
    pub pinged: Option<u64>,
    pub rtt: Option<Duration>,
    pub counters: PeerCounters,
}

/// One host, for `freeflow peers ls`.
#[derive(Clone, Debug)]
pub struct HostStatus {
    pub entry: PeerEntry,
    pub state: &'static str,
    pub since: Instant,
    pub rtt: Option<Duration>,
    pub icrc: bool,
    pub frames: bool,
    pub sealed: bool,
    pub problem: Option<Why>,
    pub route_count: u32,
    pub counters: PeerCounters,
}

impl Host {
    /// One that was read from the file just now; `dials`: this host dials it.
    pub fn new(now: Instant, entry: PeerEntry, dials: bool) -> Self {
        Self {
            entry,
            phase: if dials { Phase::Waiting { until: now } } else { Phase::Down },
            since: now,
            redial_after: REDIAL_FIRST,
            epoch: None,
            icrc: false,
            frames: false,
            knows_shards: false,
            problem: None,
            kept_until: None,
            announced: Announced::UpTo(None),
            pinged: None,
            rtt: None,
            counters: PeerCounters::default(),
        }
    }

    /// As far as the host itself goes.
    pub fn status(&self) -> HostStatus {
        HostStatus {
            entry: self.entry.clone(),
            state: self.phase.name(),
            since: self.since,
            rtt: self.rtt,
            icrc: self.icrc,
            frames: self.frames,
            sealed: false,
            problem: self.problem,
            route_count: 0,
            counters: self.counters,
        }
    }

    pub fn is_up(&self) -> bool {
        matches!(self.phase, Phase::Up { .. })
    }

    /// When time alone changes something.
    pub fn deadline(&self) -> Option<Instant> {
        [self.phase.deadline(), self.kept_until].into_iter().flatten().min()
    }

    pub fn enter(&mut self, now: Instant, phase: Phase) {
        self.phase = phase;
        self.since = now;
    }

    /// Not connected, and not connecting.
    pub fn pause(&mut self, now: Instant, own_name: &str) {
        if own_name < self.entry.host.as_str() {
            self.enter(now, Phase::Waiting { until: now + self.redial_after });
            self.redial_after = Duration(self.redial_after.0 * 2).min(REDIAL_LAST);
        } else {
            self.enter(now, Phase::Down);
        }
    }
}
