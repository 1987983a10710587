//! The REST server's requests about this host, and what is counted on it.
use crate::api::meters::{HostMeter, MeterPage};
use crate::api::plane::{
    AddStatuses, AwaitWorker, CheckPeersThread, CountQpPaths, InjectFaults, PageConnections, PageMeters, PageQps,
    PageWire, ReadHostMeter, ReadPeers, ReadRouter, ReloadPeers, ReplyTo, ReportHealth, Serve,
};
use crate::control::store_slot::QueuedCommand;
use crate::control::thread::Control;
use crate::dataplane::command::Fence;
use crate::dataplane::meters::PathCounts;
use freeflow_orchestrator::Refusal;
use freeflow_orchestrator::objects::AnyObject;
use freeflow_protocol::admin::{CmStatus, PeersStatus, QpStatus, RouterStatus, WireStatus};
use std::collections::BTreeMap;

impl Serve<AddStatuses> for Control {
    fn serve(&mut self, AddStatuses { objects }: AddStatuses, reply: ReplyTo<Vec<AnyObject>>) {
        self.with_status(objects, None, move |_, objects| reply.give(objects));
    }
}

impl Serve<PageMeters> for Control {
    fn serve(&mut self, PageMeters { after, with_qps, tenants }: PageMeters, reply: ReplyTo<MeterPage>) {
        self.meter_page(after, with_qps, tenants.as_ref(), move |page| reply.give(page));
    }
}

impl Serve<CountQpPaths> for Control {
    fn serve(&mut self, CountQpPaths {}: CountQpPaths, reply: ReplyTo<BTreeMap<String, PathCounts>>) {
        self.meter_paths(move |paths| reply.give(paths));
    }
}

impl Serve<ReadHostMeter> for Control {
    fn serve(&mut self, ReadHostMeter {}: ReadHostMeter, reply: ReplyTo<HostMeter>) {
        self.meter_host(move |host| reply.give(host));
    }
}

impl Serve<ReadRouter> for Control {
    fn serve(&mut self, ReadRouter {}: ReadRouter, reply: ReplyTo<RouterStatus>) {
        self.router_status(move |status| reply.give(status));
    }
}

impl Serve<PageQps> for Control {
    fn serve(&mut self, PageQps { vnic, after_qpn }: PageQps, reply: ReplyTo<Option<(Vec<QpStatus>, bool)>>) {
        self.list_qps(vnic.as_deref(), after_qpn, move |page| reply.give(page));
    }
}

impl Serve<PageWire> for Control {
    fn serve(&mut self, PageWire { after_qpn }: PageWire, reply: ReplyTo<(WireStatus, bool)>) {
        self.wire_status(after_qpn, move |page| reply.give(page));
    }
}

impl Serve<PageConnections> for Control {
    fn serve(&mut self, PageConnections { after }: PageConnections, reply: ReplyTo<(CmStatus, bool)>) {
        reply.give(self.list_cm(after));
    }
}

impl Serve<ReadPeers> for Control {
    fn serve(&mut self, ReadPeers {}: ReadPeers, reply: ReplyTo<PeersStatus>) {
        reply.give(self.peers_status());
    }
}

impl Serve<ReloadPeers> for Control {
    fn serve(&mut self, ReloadPeers { who }: ReloadPeers, reply: ReplyTo<Result<(), Refusal>>) {
        // Declared objects do not change meanwhile.
        self.when_stored(QueuedCommand::ReloadPeers { who, reply });
    }
}

impl Serve<InjectFaults> for Control {
    fn serve(&mut self, InjectFaults { who, faults }: InjectFaults, reply: ReplyTo<Result<(), Refusal>>) {
        self.set_wire_faults(who, faults, move |result| reply.give(result));
    }
}

impl Serve<AwaitWorker> for Control {
    fn serve(&mut self, AwaitWorker {}: AwaitWorker, reply: ReplyTo<()>) {
        self.ask_all(|_| Fence {}, move |_, _| reply.give(()));
    }
}

impl Serve<CheckPeersThread> for Control {
    fn serve(&mut self, CheckPeersThread {}: CheckPeersThread, reply: ReplyTo<bool>) {
        reply.give(self.has_its_peers_thread());
    }
}

impl Serve<ReportHealth> for Control {
    fn serve(&mut self, ReportHealth { wrong }: ReportHealth, reply: ReplyTo<()>) {
        self.faults_found = wrong;
        reply.give(());
    }
}
