//! Violations of tenants on others, for the audit log: summed by tenant, by kind and by owner of
//! the target, so that they cost the same however often they occur. The first attempt is reported
//! at once, what follows as a sum with one example, in ten seconds at the earliest. So attempts on
//! nobody, which cost nothing and hurt nobody, hide none on another network in their sums, nor do
//! they take up its room.
use freeflow_engine::{Violation, ViolationKind};
use freeflow_verbs::{Duration, Gid, Instant, NetworkId};
use std::collections::BTreeMap;

/// Between two lines about one vNIC and kind.
pub const INTERVAL: Duration = Duration::from_millis(10_000);
/// The first one waits a moment for others, which might name an owner.
const GATHER: Duration = Duration::from_millis(50);
/// vNICs and kinds at a time; what others try is only counted. And of these, those on what is nobody's.
const COUNT_MAX: usize = 16_384;
const NAMELESS_COUNT_MAX: usize = COUNT_MAX / 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ViolationClass {
    Engine(ViolationKind),
    /// A queue pair is connected to an address that nobody has.
    Connection,
    /// rdma_cm finds no way to an address.
    Request,
    /// More of something than there may be.
    Quota(Share, Resource),
}

/// The level that a limit belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Share {
    Vnic,
    Network,
}

/// Resource that quotas limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    Qps,
    Cqs,
    Mrs,
    RegisteredBytes,
}

/// As a Quota's spec has it.
pub const fn quota_field(share: Share, resource: Resource) -> &'static str {
    match (share, resource) {
        (Share::Vnic, Resource::Qps) => "perVnic.qps",
        (Share::Vnic, Resource::Cqs) => "perVnic.cqs",
        (Share::Vnic, Resource::Mrs) => "perVnic.mrs",
        (Share::Vnic, Resource::RegisteredBytes) => "perVnic.registeredBytes",
        (Share::Network, Resource::Qps) => "perNetwork.qps",
        (Share::Network, Resource::Cqs) => "perNetwork.cqs",
        (Share::Network, Resource::Mrs) => "perNetwork.mrs",
        (Share::Network, Resource::RegisteredBytes) => "perNetwork.registeredBytes",
    }
}

impl ViolationClass {
    /// Every one.
    pub const ALL: [Self; 7] = [
        Self::Engine(ViolationKind::Message),
        Self::Engine(ViolationKind::Datagram),
        Self::Engine(ViolationKind::Multicast),
        Self::Engine(ViolationKind::RemoteKey),
        Self::Engine(ViolationKind::SourceAddress),
        Self::Connection,
        Self::Request,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Connection => "connection to nobody",
            Self::Request => "rdma_cm request to nobody",
            Self::Quota(..) => "quota refused",
            Self::Engine(ViolationKind::Message) => "message to nobody",
            Self::Engine(ViolationKind::Datagram) => "datagram to nobody",
            Self::Engine(ViolationKind::Multicast) => "multicast to nobody",
            Self::Engine(ViolationKind::RemoteKey) => "remote key refused",
            Self::Engine(ViolationKind::SourceAddress) => "source address refused",
        }
    }

    /// An example of it, in words.
    pub fn aim(self, to: Gid, number: u32) -> String {
        match self {
            Self::Engine(ViolationKind::Message | ViolationKind::Datagram) => format!("{to} QPN {number:#x}"),
            Self::Engine(ViolationKind::RemoteKey) => format!("{to} key {number:#x}"),
            Self::Engine(ViolationKind::SourceAddress) => format!("{to} from address {number}"),
            Self::Quota(..) => String::new(),
            Self::Engine(ViolationKind::Multicast) | Self::Connection | Self::Request => to.to_string(),
        }
    }
}

/// Violations of one tenant since the last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sum {
    pub count: u64,
    /// One of them: whom it named, and whose that is if it is known.
    pub to: Gid,
    pub number: u32,
    pub owner: Option<NetworkId>,
}

struct Entry {
    sum: Sum,
    due: Instant,
}

pub type By = (NetworkId, Gid, ViolationClass);

#[derive(Default)]
pub struct Violations {
    entries: BTreeMap<(By, Option<NetworkId>), Entry>,
    /// Of those, the ones without an owner.
    nameless_count: usize,
    /// Of those that have something to report the first, or earlier.
    due: Option<Instant>,
    /// The last time of a report here.
    now: Instant,
}

impl Violations {
    pub fn note(&mut self, violation: &Violation) {
        let Violation { kind, network, from, to, number, owner } = *violation;
        self.add((network, from, ViolationClass::Engine(kind)), Sum { count: 1, to, number, owner });
    }

    pub fn add(&mut self, by: By, one: Sum) {
        let is_nameless = one.owner.is_none();
        let is_full = self.entries.len() >= COUNT_MAX || is_nameless && self.nameless_count >= NAMELESS_COUNT_MAX;
        let now = self.now;
        let by = (by, one.owner);
        let entry = match self.entries.get_mut(&by) {
            Some(entry) => entry,
            None if is_full => {
                // A tenant that has given up makes room.
                self.due.get_or_insert(now + GATHER);
                return;
            }
            None => {
                self.nameless_count += usize::from(is_nameless);
                self.entries.entry(by).or_insert(Entry { sum: Sum { count: 0, ..one }, due: now + GATHER })
            }
        };
        let count = entry.sum.count;
        if count == 0 {
            entry.sum = one;
        }
        entry.sum.count = count + one.count;
        self.due = Some(self.due.map_or(entry.due, |due| due.min(entry.due)));
    }

    /// When there is something to report.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Sums to report now.
    pub fn take(&mut self, now: Instant) -> Vec<(By, Sum)> {
        self.now = now;
        if self.due.is_none_or(|due| due > now) {
            return Vec::new();
        }
        let mut reported = Vec::new();
        self.due = None;
        self.entries.retain(|&(by, owner), entry| {
            if entry.due > now {
                let due = Some(entry.due).filter(|_| entry.sum.count > 0);
                self.due = self.due.into_iter().chain(due).min();
                return true;
            }
            if entry.sum.count == 0 {
                self.nameless_count -= usize::from(owner.is_none());
                return false;
            }
            reported.push((by, entry.sum));
            entry.sum.count = 0;
            entry.due = now + INTERVAL;
            true
        });
        reported
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NETWORK: NetworkId = NetworkId(1);
    const OTHER: NetworkId = NetworkId(2);

    fn gid(number: u16) -> Gid {
        let [high, low] = number.to_be_bytes();
        Gid::from_ip(std::net::IpAddr::from([10, 0, high, low]))
    }

    fn violation(from: u16, to: u16, owner: Option<NetworkId>) -> Violation {
        let (kind, network) = (ViolationKind::Message, NETWORK);
        Violation { kind, network, from: gid(from), to: gid(to), number: u32::from(to), owner }
    }

    #[test]
    fn the_first_is_reported_at_once_and_the_rest_as_a_sum() {
        let (mut violations, start) = (Violations::default(), Instant(1 << 40));
        assert!(violations.take(start).is_empty() && violations.due().is_none());
        violations.note(&violation(1, 7, None));
        violations.note(&violation(1, 8, Some(OTHER)));
        violations.note(&violation(1, 9, None));
        assert_eq!(violations.due(), Some(start + GATHER));
        assert!(violations.take(start).is_empty());
        let first = start + GATHER;
        let reported = violations.take(first);
        // A sum about another's object stands by itself.
        let by = (NETWORK, gid(1), ViolationClass::Engine(ViolationKind::Message));
        let nobodys = Sum { count: 2, to: gid(7), number: 7, owner: None };
        assert_eq!(reported, [(by, nobodys), (by, Sum { count: 1, to: gid(8), number: 8, owner: Some(OTHER) })]);
        assert_eq!(violations.due(), None);
        for _ in 0..1000 {
            violations.note(&violation(1, 7, None));
            assert!(violations.take(first + GATHER).is_empty());
        }
        // Another one waits for nobody.
        violations.note(&violation(2, 7, None));
        assert_eq!(violations.take(first + GATHER + GATHER).len(), 1);
        assert_eq!(violations.due(), Some(first + INTERVAL));
        let reported = violations.take(first + INTERVAL);
        assert_eq!((reported.len(), reported[0].1.count, reported[0].1.to), (1, 1000, gid(7)));
        // A tenant that has given up is forgotten.
        violations.note(&violation(3, 7, None));
        violations.take(first + INTERVAL + INTERVAL + GATHER);
        assert_eq!((violations.entries.len(), violations.nameless_count), (1, 1));
    }

    #[test]
    fn many_who_try_are_bounded() {
        let mut violations = Violations::default();
        for from in 0..=u16::MAX {
            violations.note(&violation(from, 7, None));
        }
        assert_eq!(violations.entries.len(), NAMELESS_COUNT_MAX);
        // Violations on others' have room still.
        for from in 0..=u16::MAX {
            violations.note(&violation(from, 7, Some(OTHER)));
        }
        assert_eq!(violations.entries.len(), COUNT_MAX);
        assert_eq!(violations.take(Instant(0) + GATHER).len(), COUNT_MAX);
        violations.note(&violation(u16::MAX, 7, None));
        assert!(violations.take(Instant(0) + GATHER + INTERVAL).is_empty());
        assert!(violations.entries.is_empty());
        violations.note(&violation(u16::MAX, 7, None));
        assert_eq!(violations.entries.len(), 1);
    }
}
