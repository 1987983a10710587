//! Other hosts: what their routers say, management datagrams, and the admin interface to the wire.
use crate::dataplane::command::{
    AcceptSealKey, BeginCapture, EndCapture, Execute, Execution, ReadWireStatus, SendManagement, SetWireFaults,
    UpdatePeers,
};
use crate::dataplane::wire_status::faults_of;
use crate::dataplane::worker::Worker;
use freeflow_verbs::Instant;
use std::sync::atomic::Ordering::Relaxed;

impl Execute<UpdatePeers> for Worker {
    fn execute(&mut self, now: Instant, UpdatePeers { updates, backlog }: UpdatePeers) -> Execution<UpdatePeers> {
        let count = updates.len();
        for update in updates {
            self.handle_peers_update(now, update);
        }
        backlog.fetch_sub(count, Relaxed);
        Execution::done(())
    }
}

impl Execute<AcceptSealKey> for Worker {
    fn execute(&mut self, now: Instant, command: AcceptSealKey) -> Execution<AcceptSealKey> {
        let AcceptSealKey { host, id, in_use, secret } = command;
        Execution::done(self.ports.fabric.accept_key(host, now, (id, in_use), &secret))
    }
}

impl Execute<SendManagement> for Worker {
    fn execute(
        &mut self,
        _: Instant,
        SendManagement { to, mad, backlog }: SendManagement,
    ) -> Execution<SendManagement> {
        backlog.fetch_sub(1, Relaxed);
        self.ports.send_management(to, &mad);
        Execution::done(())
    }
}

impl Execute<BeginCapture> for Worker {
    fn execute(&mut self, _: Instant, BeginCapture { sink }: BeginCapture) -> Execution<BeginCapture> {
        // Without sockets it ends at once: the sink is dropped.
        if let Some(udp) = &mut self.ports.fabric.udp {
            udp.set_capture(Some(sink));
        }
        Execution::done(())
    }
}

impl Execute<EndCapture> for Worker {
    fn execute(&mut self, _: Instant, EndCapture {}: EndCapture) -> Execution<EndCapture> {
        if let Some(udp) = &mut self.ports.fabric.udp {
            udp.set_capture(None);
        }
        Execution::done(())
    }
}

impl Execute<SetWireFaults> for Worker {
    fn execute(&mut self, _: Instant, SetWireFaults { faults }: SetWireFaults) -> Execution<SetWireFaults> {
        let Some(udp) = &mut self.ports.fabric.udp else { return Execution::done(false) };
        udp.set_faults(faults.as_ref().map(faults_of));
        self.ports.fabric.faults = faults;
        Execution::done(true)
    }
}

impl Execute<ReadWireStatus> for Worker {
    fn execute(&mut self, _: Instant, ReadWireStatus { after_qpn }: ReadWireStatus) -> Execution<ReadWireStatus> {
        Execution::done(self.wire_status(after_qpn))
    }
}
