//! Status of this host as a whole, for the REST server: numbers of the router, and the other hosts.
use crate::audit::Who;
use crate::config::Mode;
use crate::control::external::ExternalPolicy;
use crate::control::shards::of_shard;
use crate::control::thread::Control;
use crate::control::vnics::add;
use crate::dataplane::command::ReadStatus;
use crate::dataplane::meters::WorkerStatus;
use crate::peering::PeersFile;
use freeflow_engine::VnicId;
use freeflow_orchestrator::{Reason, Refusal};
use freeflow_protocol::admin::{Counters, PeersStatus, RouterStatus};
use freeflow_shm::cpu_count;
use std::sync::atomic::Ordering::Relaxed;

impl Control {
    pub(crate) fn router_status(&mut self, finish: impl FnOnce(RouterStatus) + Send + 'static) {
        let sleeping = self.workers.all().all(|(_, worker)| worker.waker.is_sleeping());
        let all: Vec<VnicId> = self.vnics.iter().map(|(_, vnic)| vnic.engine_id).collect();
        self.ask_all(
            |shard| ReadStatus { vnics: of_shard(&all, shard) },
            move |control, counted| {
                finish(control.describe_router(sleeping, &WorkerStatus::sum(counted)));
            },
        );
    }

    fn describe_router(&self, sleeping: bool, counted: &WorkerStatus) -> RouterStatus {
        let WorkerStatus { usage, direct, .. } = counted;
        let mut counters: Counters = self.retired;
        for number in &counted.numbers {
            add(&mut counters, &number.counters(0));
        }
        let (mut segment_count, mut segment_bytes) = (0, 0);
        for (_, vnic) in self.vnics.iter() {
            segment_count += vnic.account.segments.load(Relaxed);
            segment_bytes += vnic.account.segment_bytes.load(Relaxed);
            counters.malformed_messages += vnic.malformed_messages;
        }
        let peers = self.peers.status().peers;
        let now_ns = freeflow_shm::monotonic_ns();
        RouterStatus {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            run_dir: self.config.run_dir.display().to_string(),
            host: self.config.host.clone(),
            mode: self.config.mode.name().into(),
            mode_in_force: Mode::from(self.mode.mode).name().into(),
            mode_reason: self.mode.reason.clone(),
            sleeping,
            uptime_s: now_ns.saturating_sub(self.started.0) / 1_000_000_000,
            vnic_count: self.vnics.len() as u32,
            session_count: usage.sessions,
            qp_count: usage.qps,
            cq_count: usage.cqs,
            srq_count: usage.srqs,
            pd_count: usage.pds,
            mr_count: usage.mrs,
            mw_count: usage.mws,
            xrcd_count: usage.xrcds,
            registered_bytes: usage.registered_bytes,
            segment_count: segment_count as u32,
            segment_bytes,
            worker_count: self.config.copy_threads.worker_count(cpu_count()),
            shard_count: self.workers.count().into(),
            moved_bytes: counted.moved_bytes,
            worker_cpu_us: counted.cpu_us,
            peer_count: peers.len() as u32,
            connected_peer_count: peers.iter().filter(|peer| peer.state == "up").count() as u32,
            direct_ring_qp_count: direct.direct_ring_qps,
            grant_qp_count: direct.grant_qps,
            cm: self.cm.counts(),
            counters,
        }
    }

    pub(crate) fn peers_status(&self) -> PeersStatus {
        let file = self.config.peers.as_deref().map_or(String::new(), |path| path.display().to_string());
        PeersStatus { file, ..self.peers.status() }
    }

    /// Reads the peers file on this thread: a small file of the host's own root, now and then.
    pub(crate) fn reload_peers(&mut self, who: Who) -> Result<(), Refusal> {
        let loaded = self.load_peers();
        let detail = loaded.as_ref().map_or(String::new(), |count| format!("hosts={count}"));
        let result = loaded.map(drop);
        self.note_result(who, "reload-peers", ("done", detail), &result);
        result
    }

    /// How many hosts are in it.
    fn load_peers(&mut self) -> Result<usize, Refusal> {
        let Some(path) = &self.config.peers else {
            return Err(Refusal::new(Reason::NotFound, "the router was started without a peers file"));
        };
        let (file, key) = PeersFile::load(path).map_err(|error| Refusal::new(Reason::Invalid, error.to_string()))?;
        let count = file.peers.len();
        self.set_external_policy(ExternalPolicy::of(&file));
        self.peers.reload(file, key);
        Ok(count)
    }
}
