//! Other hosts: what their routers say, management datagrams, and the admin interface to the wire.
use crate::dataplane::command::{
    BeginCapture, EndCapture, Execute, ReadWireStatus, SendManagement, SetWireFaults, Step, UpdatePeers,
};
use crate::dataplane::wire_status::faults_of;
use crate::dataplane::worker::Worker;
use freeflow_verbs::Instant;
use std::sync::atomic::Ordering::Relaxed;

impl Execute<UpdatePeers> for Worker {
    fn execute(&mut self, now: Instant, UpdatePeers { updates, backlog }: UpdatePeers) -> Step<UpdatePeers> {
        let count = updates.len();
        for update in updates {
            self.handle_peers_update(now, update);
        }
        backlog.fetch_sub(count, Relaxed);
        Step::done(())
    }
}

impl Execute<SendManagement> for Worker {
    fn execute(&mut self, _: Instant, SendManagement { to, mad, backlog }: SendManagement) -> Step<SendManagement> {
        backlog.fetch_sub(1, Relaxed);
        self.rings.send_management(to, &mad);
        Step::done(())
    }
}

impl Execute<BeginCapture> for Worker {
    fn execute(&mut self, _: Instant, BeginCapture { sink }: BeginCapture) -> Step<BeginCapture> {
        // Without sockets it ends at once: the sink is dropped.
        if let Some(udp) = &mut self.rings.fabric.udp {
            udp.set_capture(Some(sink));
        }
        Step::done(())
    }
}

impl Execute<EndCapture> for Worker {
    fn execute(&mut self, _: Instant, EndCapture {}: EndCapture) -> Step<EndCapture> {
        if let Some(udp) = &mut self.rings.fabric.udp {
            udp.set_capture(None);
        }
        Step::done(())
    }
}

impl Execute<SetWireFaults> for Worker {
    fn execute(&mut self, _: Instant, SetWireFaults { faults }: SetWireFaults) -> Step<SetWireFaults> {
        let Some(udp) = &mut self.rings.fabric.udp else { return Step::done(false) };
        udp.set_faults(faults.as_ref().map(faults_of));
        self.rings.fabric.faults = faults;
        Step::done(true)
    }
}

impl Execute<ReadWireStatus> for Worker {
    fn execute(&mut self, _: Instant, ReadWireStatus { after_qpn }: ReadWireStatus) -> Step<ReadWireStatus> {
        Step::done(self.wire_status(after_qpn))
    }
}
