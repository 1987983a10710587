//! Faults besides packets': resets, keys that vanish, requests that no key allows, processes that
//! die, hosts that are cut off; and how a connection is made again afterwards.
use crate::model::{Area, Posted};
use crate::plan::Fault;
use crate::run::{Action, Run};
use crate::sim::Host;
use crate::topology::*;
use crate::world::MEMORY_BASE;
use freeflow_engine::*;
use freeflow_verbs::*;

use SendOpcode as Op;

/// Between two looks whether copies have completed.
const RETRY_NS: u64 = 200_000;
/// Longer than any requester is patient.
const CUT_OFF_NS: u64 = 4_000_000_000;

impl Run {
    pub(crate) fn faults(&mut self, faults: Fault) {
        let count = self.topology.connections.len() as u64;
        if count == 0 {
            return;
        }
        let connection = self.rng.roll(count) as usize;
        let side = self.rng.roll(2) as usize;
        let this = &self.topology.connections[connection];
        if this.closed || this.reconnecting {
            return;
        }
        match faults {
            Fault::Reset => {
                self.topology.connections[connection].disturbed = true;
                self.topology.connections[connection].reconnecting = true;
                self.remind_in(0, Action::Reconnect { connection });
            }
            Fault::Deregister => {
                self.topology.connections[connection].forbidden = true;
                let side = &self.topology.connections[connection].sides[side];
                let Process { host, session, .. } = self.topology.processes[side.process];
                let mr = side.area_mr;
                // A key refused as in flight is invalid at once all the same.
                let _ = self.sim.enter(host).engine.deregister_mr(session, mr);
                self.sim.after(host);
            }
            Fault::Drain => self.drain(connection, side),
            Fault::Forbidden => self.post_forbidden(connection, side),
            Fault::Death => self.die(connection, side),
            Fault::CutOff => {
                let router_of = |process: usize| self.sim.hosts[self.topology.processes[process].host].router;
                let host = router_of(this.sides[side].process);
                for connection in &mut self.topology.connections {
                    let hosts = [0, 1].map(|side| router_of(connection.sides[side].process));
                    // Shards of one host need no line.
                    connection.disturbed |= hosts.contains(&host) && hosts[0] != hosts[1];
                }
                self.sim.fabric.down.insert(host);
                self.drain_at = self.drain_at.max(self.sim.now + CUT_OFF_NS);
                self.remind(self.drain_at, Action::Drain);
                self.remind(self.drain_at, Action::Line { host, down: false });
            }
        }
    }

    fn drain(&mut self, connection: usize, side: usize) {
        let Side { process, qp, down, .. } = self.topology.connections[connection].sides[side];
        if down || !self.topology.processes[process].alive {
            return;
        }
        let result = self.topology.modify(&mut self.sim, process, qp, QpState::SqDrain, &QpAttributes::default(), 0);
        self.sim.note(|| format!("c{connection}.{side} to SQD: {result:?}"));
        if result.is_ok() {
            let wait = self.rng.roll(2_000_000);
            self.remind_in(wait, Action::GoOn { connection, side });
        }
    }

    pub(crate) fn go_on(&mut self, connection: usize, side: usize) {
        let Side { process, qp, .. } = self.topology.connections[connection].sides[side];
        let Process { host, session, alive, .. } = self.topology.processes[process];
        let state = self.sim.hosts[host].engine.query_qp(session, qp).map(|attributes| attributes.state);
        if !alive || state != Ok(QpState::SqDrain) {
            return;
        }
        let result =
            self.topology.modify(&mut self.sim, process, qp, QpState::ReadyToSend, &QpAttributes::default(), 0);
        match result {
            // Requests posted meanwhile go out: the library rings.
            Ok(_) => self.sim.ring(host, qp),
            Err(_) => self.remind_in(RETRY_NS, Action::GoOn { connection, side }),
        }
    }

    /// A request at memory that its key does not open.
    fn post_forbidden(&mut self, connection: usize, side: usize) {
        let this = &mut self.topology.connections[connection];
        let is_dead = this.sides.iter().any(|side| !self.topology.processes[side.process].alive);
        if this.service == QpType::Uc || this.sides[side].down || is_dead {
            return;
        }
        this.forbidden = true;
        this.sides[side].posts += 1;
        let number = this.sides[side].posts;
        let (process, peer) = (this.sides[side].process, &this.sides[1 - side]);
        let (area_at, area_key) = (peer.area_at, peer.area_key);
        let guard = MEMORY_BASE + SOURCE_BYTES;
        let lkey_of_peer = self.topology.processes[peer.process].lkey;
        let opcode = self.rng.pick(&[Op::RdmaWrite, Op::RdmaWriteWithImmediate, Op::RdmaRead, Op::FetchAdd]);
        let (rkey, address) = match self.rng.roll(5) {
            4 => (area_key ^ 1, MEMORY_BASE + area_at),
            0 => (area_key ^ 0x100, guard),
            1 => (lkey_of_peer, guard),
            2 => (area_key, guard),
            _ => (area_key, MEMORY_BASE + area_at + TARGET_BYTES - 4),
        };
        let length = if opcode.is_atomic() { 8 } else { self.rng.between(8, 4096) };
        let mut request = SendRequest { opcode, rkey, remote_address: address & !7, ..Default::default() };
        if address == MEMORY_BASE + area_at + TARGET_BYTES - 4 {
            request.remote_address = MEMORY_BASE + area_at + TARGET_BYTES - if opcode.is_atomic() { 0 } else { 4 };
        }
        let at = if opcode == Op::RdmaRead || opcode.is_atomic() {
            self.topology.connections[connection].sides[side].results_at
        } else {
            0
        };
        self.entries(process, &mut request, at, length);
        let posted = Posted { id: 0, number, opcode, signaled: true, forbidden: true, brings: None, message: None };
        // Its payload might overwrite that of others, which are not checked any more then.
        self.push(connection, side, request, posted);
    }

    fn die(&mut self, connection: usize, side: usize) {
        let process = self.topology.connections[connection].sides[side].process;
        let Process { host, session, .. } = self.topology.processes[process];
        if !std::mem::replace(&mut self.topology.processes[process].alive, false) {
            return;
        }
        self.sim.note(|| format!("process {process} dies"));
        let now = self.sim.instant();
        let Host { engine, world, .. } = self.sim.enter(host);
        engine.destroy_session(world, now, session);
        world.memory.remove(&session);
        self.sim.after(host);
        for (_, done) in self.sim.harvest(host) {
            let of_dead = matches!(self.topology.roles.get(&(host, done.qpn)), Some(Role::Side(c, s))
                if self.topology.connections[*c].sides[*s].process == process);
            let party_of_dead = matches!(self.topology.roles.get(&(host, done.qpn)), Some(Role::Party(p))
                if self.topology.parties[*p].process == process);
            if !of_dead && !party_of_dead {
                self.completed(host, &done);
            }
        }
        for index in 0..self.topology.connections.len() {
            let this = &mut self.topology.connections[index];
            let dead = [0, 1].map(|side| this.sides[side].process == process);
            if dead == [false; 2] {
                continue;
            }
            this.disturbed = true;
            this.reconnects_left = 0;
            for (side, _) in dead.into_iter().enumerate().filter(|(_, dead)| *dead) {
                this.sides[side].quota = 0;
                this.sides[side].posted.clear();
            }
        }
        for party in self.topology.parties.iter_mut().filter(|party| party.process == process) {
            party.quota = 0;
            party.outstanding.clear();
        }
    }

    /// An end failed: when all that it posted is flushed, the connection is made again.
    pub(crate) fn start_over(&mut self, connection: usize) {
        if !self.topology.connections[connection].reconnecting {
            self.topology.connections[connection].reconnecting = true;
            let wait = self.rng.roll(1_000_000);
            self.remind_in(wait, Action::Reconnect { connection });
        }
    }

    pub(crate) fn reconnect(&mut self, connection: usize) {
        let this = &self.topology.connections[connection];
        // One whose RESET has begun flushes no more.
        let flushing = this.sides.iter().any(|side| {
            let Process { host, session, .. } = self.topology.processes[side.process];
            let state = self.sim.hosts[host].engine.query_qp(session, side.qp).map(|attributes| attributes.state);
            side.down && state == Ok(QpState::Error) && side.posted.iter().any(|posted| posted.signaled)
        });
        if flushing || !self.reset(connection) {
            return self.remind_in(RETRY_NS, Action::Reconnect { connection });
        }
        for side in 0..2 {
            self.forget(connection, side);
        }
        let this = &mut self.topology.connections[connection];
        this.reconnecting = false;
        this.psn = (this.psn + (1 << 21)) & Psn::MASK;
        let alive = this.sides.iter().all(|side| self.topology.processes[side.process].alive);
        if this.reconnects_left == 0 || !alive {
            this.closed = true;
            return;
        }
        this.reconnects_left -= 1;
        self.topology.connect(&mut self.sim, connection);
        for side in 0..2 {
            let pool = self.topology.connections[connection].sides[side].pool;
            self.repost_later(pool);
            self.remind_in(1, Action::Post { connection, side });
        }
    }

    /// All QPs of a connection to RESET; false if copies are still in flight.
    fn reset(&mut self, connection: usize) -> bool {
        for side in 0..2 {
            let Side { process, qp, target, area_mr, .. } = self.topology.connections[connection].sides[side];
            if !self.topology.processes[process].alive {
                continue;
            }
            for qp in [qp, target] {
                let result =
                    self.topology.modify(&mut self.sim, process, qp, QpState::Reset, &QpAttributes::default(), 0);
                match result {
                    Ok(_) => {}
                    Err(Refusal::InFlight) => return false,
                    Err(error) => self.wrong(format!("RESET is refused: {error:?}")),
                }
            }
            if self.topology.connections[connection].forbidden {
                let Process { host, session, .. } = self.topology.processes[process];
                if self.sim.enter(host).engine.deregister_mr(session, area_mr) == Err(Refusal::InFlight) {
                    return false;
                }
            }
        }
        true
    }

    /// Requests posted before RESET are nobody's any more.
    fn forget(&mut self, connection: usize, side: usize) {
        let mut area = std::mem::replace(&mut self.topology.connections[connection].sides[side].area, Area::new(0));
        let Side { process, area_at, qp, pool, .. } = self.topology.connections[connection].sides[side];
        let Process { host, session, alive, .. } = self.topology.processes[process];
        let reliable = self.topology.connections[connection].service != QpType::Uc;
        if alive {
            let world = &mut self.sim.hosts[host].world;
            world.sends.remove(&qp);
            if let ReceiveQueueId::Qp(_) = self.topology.pools[pool].queue {
                world.receives.remove(&self.topology.pools[pool].queue);
                self.topology.pools[pool].slots.fill(false);
            }
            let found = world.bytes(session, MEMORY_BASE + area_at, TARGET_BYTES as usize).to_vec();
            if let Some(at) = area.unexplained(&found) {
                self.wrong(format!("c{connection}.{side}: byte {at} of its area is what nobody wrote"));
            }
            // Packets that a UC QP sent before may still arrive: nobody tells them from those of
            // the new connection.
            if reliable {
                area.settle(&found);
            }
        }
        let reopens = alive && self.topology.connections[connection].forbidden;
        let mine = &mut self.topology.connections[connection].sides[side];
        mine.area = area;
        mine.posted.clear();
        if reliable {
            mine.expected.clear();
        }
        mine.arrived = 0;
        mine.failed = false;
        mine.down = false;
        mine.results_used = 0;
        if reopens {
            self.open_area(connection, side);
        }
        if alive && self.topology.connections[connection].sides[side].window.is_some() {
            crate::windows::renew(self, connection, side);
        }
    }

    fn open_area(&mut self, connection: usize, side: usize) {
        let Side { process, area_at, .. } = self.topology.connections[connection].sides[side];
        let Process { host, session, pd, .. } = self.topology.processes[process];
        let at = MEMORY_BASE + area_at;
        let keys = self.sim.hosts[host].engine.register_mr(session, pd, at, TARGET_BYTES, at, REMOTE).expect("room");
        let mine = &mut self.topology.connections[connection].sides[side];
        (mine.area_mr, mine.area_key) = (keys.mr, keys.rkey);
    }
}
