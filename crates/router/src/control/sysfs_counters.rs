//! Port counters in the synthetic sysfs, `publishing::INTERVAL` old at most while few vNICs are
//! busy. (After a pause, what goes past the router is first seen within
//! `direct_traffic::INTERVAL_IDLE`, which is what `lifespan` says.)
//!
//! The worker compares its counts now and then while it works (`dataplane::publishing`) and hands
//! those that changed to the control thread, which leaves them here; a thread writes them into
//! files. So a slow disk delays only the files, and a machine without connections does nothing at
//! all.
//!
//! `counters` has the names of the kernel's port counters, `hw_counters` those of mlx5 and rxe that
//! have a meaning here. What can't happen (symbol errors) is truly 0, as is what belongs to packets
//! while all peers are on this host. All begin again with the router.
use crate::base::log::warning;
use crate::base::privileges::{self, ThreadKind};
use crate::control::sysfs;
use crate::control::vnic_entry::Record;
use freeflow_engine::{VnicCounters, VnicId};
use freeflow_verbs::{Gid, NetworkId};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Bound::{Excluded, Unbounded};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The thread rests so many times the processor time that it has used for writing: with many busy
/// vNICs, counters get older instead of the router slower. What it waited, for a disk or for a
/// processor, costs nobody anything and does not count.
const REST: u32 = 20;
const REST_MAX: std::time::Duration = std::time::Duration::from_millis(250);

pub const PORT_COUNTERS: [&str; 21] = [
    "port_xmit_data",
    "port_rcv_data",
    "port_xmit_packets",
    "port_rcv_packets",
    "unicast_xmit_packets",
    "unicast_rcv_packets",
    "multicast_xmit_packets",
    "multicast_rcv_packets",
    "port_xmit_wait",
    "port_xmit_discards",
    "port_xmit_constraint_errors",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_rcv_constraint_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "VL15_dropped",
];

pub const HARDWARE_COUNTERS: [&str; 31] = [
    "rx_write_requests",
    "rx_read_requests",
    "rx_atomic_requests",
    "out_of_buffer",
    "rnr_nak_retry_err",
    "req_rnr_retries_exceeded",
    "local_ack_timeout_err",
    "req_transport_retries_exceeded",
    "req_cqe_error",
    "req_cqe_flush_error",
    "req_remote_invalid_request",
    "req_remote_access_errors",
    "resp_cqe_error",
    "resp_cqe_flush_error",
    "resp_local_length_error",
    "resp_remote_access_errors",
    "out_of_sequence",
    "packet_seq_err",
    "implied_nak_seq_err",
    "duplicate_request",
    "rx_icrc_encapsulated",
    // rxe's.
    "sent_pkts",
    "rcvd_pkts",
    "out_of_seq_request",
    "rcvd_rnr_err",
    "send_rnr_err",
    "rcvd_seq_err",
    "ack_deferred",
    "completer_retry_err",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
];

/// In the order of the names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Values {
    pub port: [u64; PORT_COUNTERS.len()],
    pub hardware: [u64; HARDWARE_COUNTERS.len()],
}

impl Values {
    pub fn of(counters: &VnicCounters) -> Self {
        let (sent, received, failures, wire) = (&counters.sent, &counters.received, &counters.failures, &counters.wire);
        let mut values = Self::default();
        let port = [
            // In words of four bytes (IBTA 16.1.3.5).
            sent.bytes / 4,
            received.bytes / 4,
            sent.packets,
            received.packets,
            sent.packets - sent.multicast_packets,
            received.packets - received.multicast_packets,
            sent.multicast_packets,
            received.multicast_packets,
        ];
        values.port[..port.len()].copy_from_slice(&port);
        let hardware = [
            counters.writes_received,
            counters.reads_received,
            counters.atomics_received,
            counters.receives_missing,
            counters.rnr_naks.saturating_sub(counters.rnr_retries_exceeded),
            counters.rnr_retries_exceeded,
            counters.ack_timeouts,
            counters.retries_exceeded,
            failures.requester,
            failures.requester_flushed,
            failures.remote_invalid_requests,
            failures.remote_access_errors,
            failures.responder,
            failures.responder_flushed,
            failures.local_length_errors,
            counters.remote_access_errors,
            wire.out_of_sequence,
            wire.sequence_naks_received,
            wire.implied_naks,
            wire.duplicate_requests,
            // Damaged packets name nobody: the host's counters have them.
            0,
            wire.packets_sent,
            wire.packets_received,
            wire.out_of_sequence,
            wire.rnr_naks_received,
            wire.rnr_naks_sent,
            wire.sequence_naks_received,
            wire.acks_deferred,
            wire.packets_retransmitted,
            wire.retries_exceeded,
            wire.rnr_retries_exceeded,
        ];
        values.hardware[..hardware.len()].copy_from_slice(&hardware);
        values
    }
}

struct Entry {
    tree: PathBuf,
    wanted: Values,
    written: Values,
}

#[derive(Default)]
struct State {
    vnics: BTreeMap<VnicId, Entry>,
    changed: BTreeSet<VnicId>,
    /// The one that was written last: then those behind it have their turn.
    last: Option<VnicId>,
    /// The one that the thread writes, without the lock.
    writing: Option<VnicId>,
    stopping: bool,
    /// A file could not be written, and that was said.
    complained: bool,
}

impl State {
    fn take_changed(&mut self) -> Option<VnicId> {
        let behind = self.last.and_then(|last| self.changed.range((Excluded(last), Unbounded)).next().copied());
        let id = behind.or_else(|| self.changed.first().copied())?;
        self.changed.remove(&id);
        self.last = Some(id);
        Some(id)
    }
}

/// Processor time of this thread.
fn processor_time() -> std::time::Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

fn rest_after(used: std::time::Duration) -> std::time::Duration {
    (used * REST).min(REST_MAX)
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    signal: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next vNIC whose counters changed, once the thread has rested until `rested`. `None`: it ends.
    fn next(&self, rested: std::time::Instant) -> Option<(MutexGuard<'_, State>, VnicId)> {
        let mut state = self.state();
        loop {
            if state.stopping {
                return None;
            }
            let left = rested.saturating_duration_since(std::time::Instant::now());
            if !left.is_zero() {
                state = self.signal.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            } else if let Some(id) = state.take_changed() {
                return Some((state, id));
            } else {
                state = self.wait(state);
            }
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.signal.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn complain(&self, tree: &std::path::Path, error: &io::Error) {
        if !std::mem::replace(&mut self.state().complained, true) {
            warning!("can't write a vNIC's sysfs", directory = tree.display(), error = error);
        }
    }

    fn write_on(&self) {
        let mut rested = std::time::Instant::now();
        while let Some((mut state, id)) = self.next(rested) {
            let Some(entry) = state.vnics.get(&id) else { continue };
            let (tree, wanted, written) = (entry.tree.clone(), entry.wanted.clone(), entry.written.clone());
            state.writing = Some(id);
            drop(state);
            let began = processor_time();
            let result = sysfs::write_counters(&tree, &wanted, Some(&written));
            rested = std::time::Instant::now() + rest_after(processor_time().saturating_sub(began));
            let mut state = self.state();
            state.writing = None;
            // A failed write is tried again with the next change.
            if result.is_ok()
                && let Some(entry) = state.vnics.get_mut(&id)
            {
                entry.written = wanted;
            }
            drop(state);
            self.signal.notify_all();
            if let Err(error) = result {
                self.complain(&tree, &error);
            }
        }
    }
}

/// The trees of all vNICs, and the thread that writes their counters. Nothing here fails: a vNIC works without files.
pub struct Publisher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Publisher {
    pub fn start() -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let body = {
            let shared = shared.clone();
            move || {
                privileges::enter(ThreadKind::Sysfs);
                shared.write_on();
            }
        };
        let thread = std::thread::Builder::new().name("ff-sysfs".into()).spawn(body)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Makes the tree of a new vNIC, or of one that outlived a router.
    pub fn add(&self, id: VnicId, tree: PathBuf, vnic: &Record, network: NetworkId, gids: &[Gid]) {
        let (wanted, written) = (Values::default(), Values::default());
        let is_mounted = tree.exists();
        if let Err(error) = sysfs::make(&tree, vnic, network, gids, &written) {
            self.shared.complain(&tree, &error);
            // Half a tree says less than none, and what it takes may be the last room there is.
            if !is_mounted {
                return remove_tree(&tree);
            }
        }
        self.shared.state().vnics.insert(id, Entry { tree, wanted, written });
    }

    pub fn set_gids(&self, id: VnicId, gids: &[Gid]) {
        let Some(tree) = self.shared.state().vnics.get(&id).map(|entry| entry.tree.clone()) else { return };
        if let Err(error) = sysfs::write_gids(&tree, gids) {
            self.shared.complain(&tree, &error);
        }
    }

    pub fn update(&self, changed: &[(VnicId, VnicCounters)]) {
        let mut state = self.shared.state();
        for (id, counters) in changed {
            if let Some(entry) = state.vnics.get_mut(id) {
                entry.wanted = Values::of(counters);
                state.changed.insert(*id);
            }
        }
        drop(state);
        self.shared.signal.notify_all();
    }

    /// After this nobody writes into the vNIC's tree any more, and it is removed.
    pub fn remove(&self, id: VnicId) {
        let mut state = self.shared.state();
        let Some(entry) = state.vnics.remove(&id) else { return };
        state.changed.remove(&id);
        while state.writing == Some(id) {
            state = self.shared.wait(state);
        }
        drop(state);
        remove_tree(&entry.tree);
    }

    /// Says in every tree that the port is down.
    pub fn mark_all_down(&self) {
        let trees: Vec<PathBuf> = self.shared.state().vnics.values().map(|entry| entry.tree.clone()).collect();
        for tree in trees {
            if let Err(error) = sysfs::mark_down(&tree) {
                self.shared.complain(&tree, &error);
            }
        }
    }
}

/// Its absence is no error: it may never have been made.
pub fn remove_tree(tree: &std::path::Path) {
    let _ = std::fs::remove_dir_all(tree);
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.shared.state().stopping = true;
        self.shared.signal.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            warning!("the thread of the sysfs counters panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_engine::{Traffic, WireCounters};

    #[test]
    fn values_stand_under_their_names() {
        let counters = VnicCounters {
            sent: Traffic { bytes: 4099, packets: 7, multicast_packets: 2 },
            received: Traffic { bytes: 8, packets: 1, multicast_packets: 0 },
            rnr_naks: 5,
            rnr_retries_exceeded: 1,
            remote_access_errors: 9,
            wire: WireCounters {
                packets_sent: 11,
                rnr_retries_exceeded: 12,
                duplicate_requests: 13,
                ..WireCounters::default()
            },
            ..VnicCounters::default()
        };
        let values = Values::of(&counters);
        let port = |name: &str| values.port[PORT_COUNTERS.iter().position(|known| *known == name).unwrap()];
        let hardware = |name: &str| values.hardware[HARDWARE_COUNTERS.iter().position(|known| *known == name).unwrap()];
        assert_eq!((port("port_xmit_data"), port("port_rcv_data")), (1024, 2));
        assert_eq!((port("unicast_xmit_packets"), port("multicast_xmit_packets")), (5, 2));
        assert_eq!((hardware("rnr_nak_retry_err"), hardware("req_rnr_retries_exceeded")), (4, 1));
        assert_eq!(hardware("resp_remote_access_errors"), 9);
        assert_eq!((hardware("sent_pkts"), hardware("retry_rnr_exceeded_err")), (11, 12));
        assert_eq!((hardware("duplicate_request"), hardware("rcvd_seq_err")), (13, 0));
        assert_eq!((port("symbol_error"), hardware("packet_seq_err")), (0, 0));
    }

    #[test]
    fn rests_are_in_proportion_and_bounded() {
        let [used, much] = [1, 1000].map(std::time::Duration::from_millis);
        assert_eq!((rest_after(used), rest_after(much)), (used * REST, REST_MAX));
    }

    #[test]
    fn all_vnics_have_their_turn() {
        let ids = [3, 5, 9].map(|index| VnicId { index, generation: 0 });
        let mut state = State { changed: ids.into(), ..State::default() };
        let mut turns = Vec::new();
        for _ in 0..6 {
            turns.extend(state.take_changed());
            state.changed.extend(ids);
        }
        assert_eq!(turns, [ids, ids].concat());
        state.changed.clear();
        assert_eq!(state.take_changed(), None);
    }

    #[test]
    fn a_tree_that_can_t_be_written_harms_nothing() {
        let publisher = Publisher::start().unwrap();
        let id = VnicId { index: 0, generation: 0 };
        let entry = Entry { tree: "/proc/no/such/place".into(), wanted: Values::default(), written: Values::default() };
        publisher.shared.state().vnics.insert(id, entry);
        publisher.update(&[(id, VnicCounters { reads_received: 1, ..VnicCounters::default() })]);
        let mut state = publisher.shared.state();
        while !state.complained {
            drop(state);
            std::thread::yield_now();
            state = publisher.shared.state();
        }
        drop(state);
        publisher.remove(id);
        assert!(publisher.shared.state().vnics.is_empty());
    }
}
