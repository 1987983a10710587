//! Counts of vNICs and QPs, for whoever asks the control thread.
//!
//! A page costs the worker a bounded time: the vNICs that it names, [`PAGE_QPS_MAX`] QPs, and a
//! look at each session there is.
use crate::base::machine::cpu_time_us;
use crate::dataplane::command::{
    CountPaths, Execute, Execution, ListQps, MeterHost, MeterVnics, ReadStatus, ReadVnics,
};
use crate::dataplane::meters::{
    AccessCounts, DirectCounts, LIST_QPS_MAX, MeteredVnic, MeteredVnics, PathCounts, QpMeter, QpPage, QpRow,
    VnicNumbers, WorkerMeter, WorkerStatus, address, state_name, type_name,
};
use crate::dataplane::slow_path_counts::QpSlowPath;
use crate::dataplane::wire_status::{drop_names, seal_drop_names};
use crate::dataplane::worker::Worker;
use freeflow_engine::{QpId, SessionId, VnicId};
use freeflow_verbs::Instant;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

/// QPs of one page of meters.
const PAGE_QPS_MAX: usize = 512;
/// QPs of which the worker says the path in one turn.
const TURN_QPS_MAX: usize = 2048;

impl Execute<ReadVnics> for Worker {
    fn execute(&mut self, _: Instant, ReadVnics { vnics, counts_direct }: ReadVnics) -> Execution<ReadVnics> {
        if counts_direct {
            self.count_all_direct();
        }
        Execution::done(vnics.into_iter().map(|id| self.vnic_numbers(id)).collect())
    }
}

impl Execute<ReadStatus> for Worker {
    fn execute(&mut self, _: Instant, ReadStatus { vnics }: ReadStatus) -> Execution<ReadStatus> {
        self.count_all_direct();
        Execution::done(WorkerStatus {
            usage: self.engine.usage(),
            numbers: vnics.into_iter().map(|id| self.vnic_numbers(id)).collect(),
            direct: self.direct_counts(),
            moved_bytes: self.ports.copy_threads.moved_bytes(),
            cpu_us: cpu_time_us(),
        })
    }
}

impl Execute<ListQps> for Worker {
    fn execute(&mut self, _: Instant, ListQps { vnic, after_qpn }: ListQps) -> Execution<ListQps> {
        Execution::done(self.list_qps(vnic, after_qpn))
    }
}

impl Execute<MeterVnics> for Worker {
    fn execute(&mut self, _: Instant, command: MeterVnics) -> Execution<MeterVnics> {
        let MeterVnics { vnics, with_qps, after_qpn, counts_direct } = command;
        if counts_direct {
            self.count_few_direct();
        }
        Execution::done(self.meter(&vnics, with_qps, after_qpn))
    }
}

impl Execute<CountPaths> for Worker {
    fn execute(&mut self, _: Instant, CountPaths { rest, mut counts }: CountPaths) -> Execution<CountPaths> {
        let mut rest = rest.unwrap_or_else(|| self.engine.qps_of(None).map(|(id, _)| id).collect());
        for id in rest.drain(rest.len().saturating_sub(TURN_QPS_MAX)..) {
            self.count_path(id, &mut counts);
        }
        if rest.is_empty() {
            Execution::done(counts)
        } else {
            Execution::Again(CountPaths { rest: Some(rest), counts })
        }
    }
}

impl Execute<MeterHost> for Worker {
    fn execute(&mut self, _: Instant, MeterHost {}: MeterHost) -> Execution<MeterHost> {
        Execution::done(self.host_meter())
    }
}

impl Worker {
    pub fn vnic_numbers(&self, id: VnicId) -> VnicNumbers {
        let vnic = self.ports.vnics.get(id);
        VnicNumbers {
            usage: self.engine.vnic_usage(id).unwrap_or_default(),
            counters: self.engine.vnic_counters(id).unwrap_or_default(),
            slow_path: vnic.map_or_else(Default::default, |vnic| vnic.slow_path),
            blocked_copies: vnic.map_or(0, |vnic| vnic.blocked_count),
            // Relaxed: a count, which orders nothing.
            bounce_bytes: vnic.map_or(0, |vnic| vnic.bounce_bytes.load(Relaxed)),
            worker: self.ports.copy_threads.home(id),
            refusals: self.engine.refusals(id).unwrap_or_default(),
            throttled: self.engine.vnic_throttled(self.ports.now, id),
            is_failed: vnic.is_some_and(|vnic| vnic.abandoned.iter().any(|thread| !thread.has_ended())),
        }
    }

    pub(crate) fn direct_counts(&self) -> DirectCounts {
        let mut counts = DirectCounts::default();
        for (id, _) in self.ports.qps.iter() {
            counts.direct_ring_qps += u32::from(self.uses_direct_ring(id));
            counts.grant_qps += u32::from(self.granted(id));
        }
        counts
    }

    /// One page in order of number, and whether there are more.
    fn list_qps(&mut self, vnic: Option<VnicId>, after_qpn: Option<u32>) -> QpPage {
        let after = |qpn: u32| after_qpn.is_none_or(|after| qpn > after);
        let mut all: Vec<(u32, QpId)> =
            self.engine.qps_of(vnic).map(|(id, qpn)| (qpn.0, id)).filter(|&(qpn, _)| after(qpn)).collect();
        let more = all.len() > LIST_QPS_MAX;
        if more {
            all.select_nth_unstable_by_key(LIST_QPS_MAX, |&(qpn, _)| qpn);
            all.truncate(LIST_QPS_MAX);
        }
        all.sort_unstable_by_key(|&(qpn, _)| qpn);
        QpPage { rows: all.into_iter().filter_map(|(_, id)| self.row(id)).collect(), more }
    }

    fn row(&mut self, id: QpId) -> Option<QpRow> {
        self.count_direct(id);
        let look = self.engine.qp_status(id)?;
        let (direct_ring, grants) = (self.uses_direct_ring(id), self.granted(id));
        let (path, reason) = self.path_of(id, &look);
        let traffic = self.engine.qp_traffic(id).unwrap_or_default();
        Some(QpRow { look, direct_ring, grants, path, reason, traffic, slow_path: self.slow_path_of(id) })
    }

    fn meter_qp(&self, id: QpId) -> Option<QpMeter> {
        let look = self.engine.qp_status(id)?;
        let path = self.path_of(id, &look).0;
        Some(QpMeter {
            qpn: look.qpn.0,
            qp_type: type_name(look.service),
            state: state_name(look.state),
            peer: look.peer.map(|(gid, qpn)| (address(gid), qpn.0)),
            path,
            traffic: self.engine.qp_traffic(id).unwrap_or_default(),
            slow_path: self.slow_path_of(id),
            throttled: self.engine.qp_throttled(self.ports.now, id),
        })
    }

    fn slow_path_of(&self, id: QpId) -> QpSlowPath {
        self.ports.qps.get(id).map(|qp| qp.slow_path).unwrap_or_default()
    }

    /// Up to `room` QPs of a vNIC after a number, in order of number, and whether there are more.
    fn meter_qps(&self, sessions: &[SessionId], after: Option<u32>, room: usize) -> (Vec<QpMeter>, bool) {
        let ids = sessions.iter().flat_map(|&session| self.engine.objects_of(session).qps);
        let is_next = |&(qpn, _): &(u32, QpId)| after.is_none_or(|after| qpn > after);
        let mut all: Vec<(u32, QpId)> =
            ids.filter_map(|id| Some((self.engine.qp_status(id)?.qpn.0, id))).filter(is_next).collect();
        let more = all.len() > room;
        all.sort_unstable_by_key(|&(qpn, _)| qpn);
        all.truncate(room);
        (all.into_iter().filter_map(|(_, id)| self.meter_qp(id)).collect(), more)
    }

    /// Those vNICs in their order; with QPs, up to where the page is full: the index and the QP.
    fn meter(&mut self, ids: &[VnicId], with_qps: bool, after: Option<u32>) -> MeteredVnics {
        let (mut all, mut room, mut after) = (Vec::with_capacity(ids.len()), PAGE_QPS_MAX, after);
        let mut sessions: BTreeMap<VnicId, Vec<SessionId>> = BTreeMap::new();
        if with_qps {
            sessions.extend(ids.iter().map(|&id| (id, Vec::new())));
            for (session, entry) in self.ports.sessions.iter() {
                if let Some(of_vnic) = sessions.get_mut(&entry.vnic) {
                    of_vnic.push(session);
                }
            }
        }
        for (index, &id) in ids.iter().enumerate() {
            let of_vnic = sessions.get(&id).map_or(&[][..], Vec::as_slice);
            let (qps, more) = self.meter_qps(of_vnic, after.take(), room);
            let last = qps.last().map(|qp| qp.qpn);
            room -= qps.len();
            let is_metered = self.engine.is_metered(id);
            all.push(MeteredVnic { numbers: self.vnic_numbers(id), is_metered, qps });
            if more {
                // Without room for a single one it is the next page's as a whole.
                return match last {
                    Some(qpn) => MeteredVnics { vnics: all, end: Some((index, qpn)) },
                    None => {
                        all.pop();
                        MeteredVnics { vnics: all, end: None }
                    }
                };
            }
        }
        MeteredVnics { vnics: all, end: None }
    }

    fn count_path(&self, id: QpId, counts: &mut BTreeMap<VnicId, PathCounts>) {
        if let Some(look) = self.engine.qp_status(id) {
            *counts.entry(look.vnic).or_default().entry(self.path_of(id, &look)).or_default() += 1;
        }
    }

    fn host_meter(&mut self) -> WorkerMeter {
        let mut drops = drop_names(&self.engine.drops(), self.ports.fabric.mads_lost);
        drops.extend(self.ports.fabric.udp.iter().flat_map(|udp| seal_drop_names(udp.counters())));
        let moved_bytes = self.ports.copy_threads.moved_bytes();
        let (totals, access) = (self.network_totals(), vec![AccessCounts::by(&self.ports.access)]);
        WorkerMeter { usage: self.engine.usage(), cpu_us: cpu_time_us(), moved_bytes, drops, totals, access }
    }
}
