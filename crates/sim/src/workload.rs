//! The workload of a run: posts, checks each completion, injects faults, and has the checker look
//! at the end.
use crate::fabric::LinkModel;
use crate::model::{Brings, Expected, Posted};
use crate::plan::{Plan, PlannedConnection};
use crate::rng::Rng;
use crate::run::{Action, Run};
use crate::sim::{Event, Host, Sim};
use crate::topology::*;
use crate::world::MEMORY_BASE;
use freeflow_engine::VnicId;
use freeflow_verbs::*;
use std::collections::BTreeSet;

use CompletionStatus as Status;
use SendOpcode as Op;

/// Long after the drain began everything must have come to its end: retries of 4 * 67 ms, 8 times,
/// and some more.
const DRAIN_NS_MAX: u64 = 12_000_000_000;
/// Time for the rest after the last completion: acknowledgements, timers.
const REST_NS: u64 = 3_000_000_000;

/// Of so many messages of a dialogue one has no answer; the others have theirs within this time.
const DIALOGUE_PAUSE: u64 = 20;
const THINKING_NS: u64 = 60_000;

impl Run {
    pub fn new(plan: Plan, traces: bool) -> Self {
        let mut sim = Sim::with_shards(plan.seed, &plan.shards, plan.host_model, plan.shard_model);
        sim.trace = traces.then(Vec::new);
        for host in &mut sim.hosts {
            host.world.frame_bytes = plan.frames[host.router];
        }
        sim.agree_on_selective(&plan.selective);
        sim.agree_on_records(&plan.records);
        if let Some(bytes) = plan.host_bytes_max {
            sim.hosts.iter_mut().for_each(|host| host.engine.set_host_bytes_max(bytes));
        }
        let rng = Rng::for_part(plan.seed, 20);
        let (mut topology, actions, wrongs) = (Topology::default(), Vec::new(), Vec::new());
        topology.shaping = plan.shaped.then(|| Rng::for_part(plan.seed, 12));
        let drain_at = plan.drain_at;
        let mut run = Self { plan, sim, topology, rng, actions, wrongs, completions: 0, drain_at };
        run.set_up();
        run
    }

    fn set_up(&mut self) {
        for index in 0..self.plan.processes {
            let network = NetworkId(1 + self.rng.roll(u64::from(self.plan.networks)) as u32);
            // The first two are never alone in their network.
            let network = if index < 2 { NetworkId(1) } else { network };
            let router = if index < 2 { index } else { self.rng.roll(self.plan.hosts as u64) as usize };
            let engines = self.sim.engines(router % self.plan.hosts);
            let shard = if engines.len() > 1 { self.rng.roll(engines.len() as u64) as usize } else { 0 };
            let host = engines.start + shard;
            let (number, noise) = (self.rng.roll(2) as u8, self.rng.draw());
            self.topology.process(&mut self.sim, host, network, number, noise);
        }
        for planned in self.plan.connections.clone() {
            let Some((a, b)) = self.two_processes() else { continue };
            let connection = self.topology.connections.len();
            let mut sides = Vec::new();
            for process in [a, b] {
                let xrc = planned.service == QpType::XrcSend;
                let shares = planned.shared_queue && planned.service == QpType::Rc;
                let pool = (shares || xrc).then(|| self.topology.shared_pool(&mut self.sim, process, xrc));
                let mut side = self.topology.side(&mut self.sim, process, planned.service, pool);
                side.quota = planned.requests;
                sides.push(side);
            }
            let Ok(sides) = sides.try_into() else { unreachable!("two sides") };
            let PlannedConnection { service, mtu, attributes, .. } = planned;
            // Often so near to the end of all PSNs that they wrap.
            let psn = if self.rng.one_in(3) { Psn::MASK - self.rng.roll(1200) as u32 } else { self.rng.draw() as u32 };
            self.topology.connections.push(Connection::new(service, mtu, attributes, sides, psn));
            self.topology.connect(&mut self.sim, connection);
            let has_windows = planned.service == QpType::Rc && self.rng.one_in(2);
            for side in 0..2 {
                if has_windows {
                    crate::windows::renew(self, connection, side);
                }
                let at = self.rng.roll(self.plan.spread_ns);
                self.remind(at, Action::Post { connection, side });
            }
        }
        for _ in 0..self.plan.parties {
            let process = self.rng.roll(self.topology.processes.len() as u64) as usize;
            if self.topology.room(process) < 256 << 10 {
                continue;
            }
            let member = self.rng.one_in(2);
            let party = self.topology.party(&mut self.sim, process, member);
            self.topology.parties[party].quota = self.plan.datagrams;
            let at = self.rng.roll(self.plan.spread_ns);
            self.remind(at, Action::Datagram { party });
        }
        for pool in 0..self.topology.pools.len() {
            let at = self.rng.roll(self.plan.repost_ns_max + 1);
            self.topology.pools[pool].scheduled = true;
            self.remind(at, Action::Repost { pool });
        }
        for (at, host, length) in self.plan.cuts.clone() {
            self.remind(at, Action::Line { host, down: true });
            self.remind(at + length, Action::Line { host, down: false });
        }
        for (at, faults) in self.plan.faults.clone() {
            self.remind(at, Action::Fault(faults));
        }
        self.remind(self.plan.drain_at, Action::Drain);
    }

    /// Acknowledgements that went out behind what a program answered.
    pub(crate) fn acks_with_answers(&self) -> u64 {
        let vnics: BTreeSet<(usize, VnicId)> =
            self.topology.processes.iter().map(|process| (process.host, process.vnic)).collect();
        let of = |(host, vnic): (usize, VnicId)| self.sim.hosts[host].engine.vnic_counters(vnic);
        vnics.into_iter().filter_map(of).map(|counters| counters.wire.acks_with_answers).sum()
    }

    /// Two processes of one network that have room for one more connection.
    fn two_processes(&mut self) -> Option<(usize, usize)> {
        let count = self.topology.processes.len() as u64;
        for _ in 0..20 {
            let (a, b) = (self.rng.roll(count) as usize, self.rng.roll(count) as usize);
            let same = self.topology.processes[a].network == self.topology.processes[b].network;
            let local = self.topology.processes[a].host == self.topology.processes[b].host;
            let room = 1 << 20;
            // Between hosts is what matters most.
            if same && (!local || self.rng.one_in(8)) && self.topology.room(a) >= room && self.topology.room(b) >= room
            {
                return Some((a, b));
            }
        }
        None
    }

    pub(crate) fn remind(&mut self, at: u64, action: Action) {
        self.actions.push(action);
        self.sim.at(at, Event::Do(self.actions.len() as u64 - 1));
    }

    pub(crate) fn remind_in(&mut self, span: u64, action: Action) {
        self.remind(self.sim.now + span, action);
    }

    pub fn wrong(&mut self, what: String) {
        let line = format!("{} ns: {what}", self.sim.now);
        self.sim.note(|| format!("WRONG {what}"));
        self.wrongs.push(line);
    }

    /// To the end, or to the first thing that is wrong.
    pub fn go(&mut self) {
        let mut ends_at = u64::MAX;
        loop {
            match self.sim.step() {
                Some(Some(what)) => self.act(self.actions[what as usize]),
                Some(None) => break,
                None => {}
            }
            for host in 0..self.sim.hosts.len() {
                if !self.sim.hosts[host].world.completions.is_empty() {
                    // Completions that one host gives at once have no order between CQs: a message
                    // arrived before its sender was notified.
                    let mut all = self.sim.harvest(host);
                    all.sort_by_key(|(_, done)| done.flags.contains(CompletionFlags::SEND_QUEUE));
                    for (_, done) in all {
                        self.completed(host, &done);
                    }
                }
            }
            let wrongs = std::mem::take(&mut self.sim.wrongs);
            self.wrongs.extend(wrongs);
            if !self.wrongs.is_empty() {
                return;
            }
            if ends_at == u64::MAX && self.is_done() {
                ends_at = self.sim.now + REST_NS;
            }
            if self.sim.now > ends_at {
                break;
            }
            if ends_at == u64::MAX && self.sim.now > self.drain_at + DRAIN_NS_MAX {
                self.stuck();
                return;
            }
        }
        if !self.is_done() {
            self.stuck();
            return;
        }
        crate::checker::check(self);
    }

    fn is_done(&self) -> bool {
        let side_done = |side: &Side| side.quota == 0 && side.posted.is_empty();
        self.sim.now >= self.drain_at
            && self.topology.connections.iter().all(|c| c.closed || !c.reconnecting && c.sides.iter().all(side_done))
            && self.topology.parties.iter().all(|party| party.quota == 0 && party.outstanding.is_empty())
    }

    fn stuck(&mut self) {
        let mut lines = Vec::new();
        for (index, connection) in self.topology.connections.iter().enumerate().filter(|(_, c)| !c.closed) {
            for (place, side) in connection.sides.iter().enumerate() {
                let process = &self.topology.processes[side.process];
                let state = self.sim.hosts[process.host].engine.query_qp(process.session, side.qp).map(|q| q.state);
                lines.push(format!(
                    "  c{index}.{place} {:?} h{} {state:?} quota {} posted {:?} expects {} reconnecting {}",
                    connection.service,
                    process.host,
                    side.quota,
                    side.posted.front().map(|p| (p.number, p.opcode)),
                    side.expected.len(),
                    connection.reconnecting,
                ));
            }
        }
        for (index, party) in self.topology.parties.iter().enumerate() {
            lines.push(format!("  party {index}: quota {} outstanding {:?}", party.quota, party.outstanding));
        }
        for (index, host) in self.sim.hosts.iter().enumerate() {
            let timeout = host.engine.poll_timeout();
            lines.push(format!("  h{index} next timeout {timeout:?} drops {:?}", host.engine.drops()));
            lines.extend(host.engine.wire_qps().map(|status| format!("    {status:?}")));
        }
        self.wrong(format!("stuck\n{}", lines.join("\n")));
    }

    fn act(&mut self, action: Action) {
        self.sim.note(|| format!("{action:?}"));
        match action {
            Action::Post { connection, side } => self.post_some(connection, side),
            Action::Answer { connection, side } => {
                self.say(connection, side);
            }
            Action::Datagram { party } => crate::datagrams::post(self, party),
            Action::Repost { pool } => self.repost(pool),
            Action::Line { host, down: true } => {
                if self.sim.now < self.drain_at {
                    self.sim.fabric.down.insert(host);
                }
            }
            Action::Line { host, down: false } => {
                self.sim.fabric.down.remove(&host);
            }
            Action::Fault(faults) => self.faults(faults),
            Action::Reconnect { connection } => self.reconnect(connection),
            Action::GoOn { connection, side } => self.go_on(connection, side),
            Action::Drain => {
                if self.sim.now >= self.drain_at {
                    self.sim.begin_drain();
                }
            }
        }
    }

    // ---- receives

    fn repost(&mut self, pool: usize) {
        self.topology.pools[pool].scheduled = false;
        let Pool { process, queue, base, .. } = self.topology.pools[pool];
        if !self.topology.processes[process].alive || !self.queue_takes(pool) {
            return;
        }
        let Process { host, lkey, .. } = self.topology.processes[process];
        for slot in 0..self.topology.pools[pool].slots.len() {
            if self.topology.pools[pool].slots[slot] {
                continue;
            }
            self.topology.pools[pool].slots[slot] = true;
            let at = MEMORY_BASE + base + slot as u64 * SLOT_BYTES;
            let cut = self.rng.roll(SLOT_BYTES) as u32;
            let pieces = [(0, cut), (u64::from(cut), SLOT_BYTES as u32 - cut)];
            let work_request_id = (pool as u64) << 32 | slot as u64;
            let mut request = ReceiveRequest { work_request_id, sge_count: 2, ..Default::default() };
            for (sge, (offset, length)) in request.sges.iter_mut().zip(pieces) {
                *sge = Sge { address: at + offset, length, lkey };
            }
            let now = self.sim.instant();
            let Host { engine, world, .. } = self.sim.enter(host);
            let ring = world.receives.entry(queue).or_default();
            request.ring_position = ring.position;
            ring.position += 1;
            ring.posted.push_back(request);
            if world.wanted.contains(&queue) {
                engine.handle_receive_posted(world, now, queue);
            }
            self.sim.after(host);
        }
    }

    /// Whether a post makes sense: not to a QP in RESET.
    fn queue_takes(&self, pool: usize) -> bool {
        let reconnecting = |c: &Connection| c.reconnecting || c.closed;
        !self.topology.connections.iter().any(|c| reconnecting(c) && c.sides.iter().any(|side| side.pool == pool))
    }

    fn slot_free(&mut self, pool: usize, slot: usize) {
        if !std::mem::replace(&mut self.topology.pools[pool].slots[slot], false) {
            self.wrong(format!("RECV {slot} of pool {pool} completed twice"));
        }
        self.repost_later(pool);
    }

    pub fn repost_later(&mut self, pool: usize) {
        if !std::mem::replace(&mut self.topology.pools[pool].scheduled, true) {
            let wait = self.rng.roll(self.plan.repost_ns_max + 1);
            self.remind_in(wait, Action::Repost { pool });
        }
    }

    /// The buffer of a RECV that completed.
    pub fn received_bytes(&mut self, done: &Completion) -> Option<Vec<u8>> {
        let (pool, slot) = ((done.work_request_id >> 32) as usize, done.work_request_id as u32 as usize);
        let Pool { process, base, .. } = self.topology.pools[pool];
        let Process { host, session, .. } = self.topology.processes[process];
        let bytes = (done.status == Status::Success).then(|| {
            let at = MEMORY_BASE + base + slot as u64 * SLOT_BYTES;
            self.sim.hosts[host].world.bytes(session, at, (done.byte_count as usize).min(SLOT_BYTES as usize)).to_vec()
        });
        self.slot_free(pool, slot);
        bytes
    }

    // ---- sends

    /// Posts a short message. False: the side takes no more.
    fn say(&mut self, connection: usize, side: usize) -> bool {
        let this = &mut self.topology.connections[connection];
        let (closed, mine) = (this.closed || this.reconnecting, &mut this.sides[side]);
        if closed || mine.down || mine.quota == 0 {
            return false;
        }
        if mine.posted.len() < OUTSTANDING_MAX {
            mine.quota -= 1;
            mine.posts += 1;
            let (number, last, opcode) = (mine.posts, mine.quota == 0, Op::Send);
            let signaled = last || self.rng.one_in(2);
            let mut posted = Posted { id: 0, number, opcode, signaled, forbidden: false, brings: None, message: None };
            let mut request = SendRequest { opcode, ..Default::default() };
            let length = self.rng.roll(200);
            self.fill(connection, side, &mut request, &mut posted, length);
            self.push(connection, side, request, posted);
        }
        true
    }

    fn post_some(&mut self, connection: usize, side: usize) {
        if self.plan.dialogues && self.rng.roll(8) > 0 {
            // It begins again where an answer was forgotten.
            if self.say(connection, side) {
                let wait = self.rng.roll(self.plan.spread_ns / 8 + 1);
                self.remind_in(wait, Action::Post { connection, side });
            }
            return;
        }
        let most = if self.plan.crowds { OUTSTANDING_MAX as u64 } else { 5 };
        for _ in 0..self.rng.between(1, most) {
            let this = &self.topology.connections[connection];
            if this.closed || this.reconnecting || this.sides[side].down || this.sides[side].quota == 0 {
                return;
            }
            if this.sides[side].posted.len() >= OUTSTANDING_MAX {
                break;
            }
            self.topology.connections[connection].sides[side].quota -= 1;
            self.post_one(connection, side);
        }
        let wait = self.rng.roll(self.plan.spread_ns / 8 + 1);
        self.remind_in(wait, Action::Post { connection, side });
    }

    fn post_one(&mut self, connection: usize, side: usize) {
        let reliable = self.topology.connections[connection].service != QpType::Uc;
        let ops: &[Op] = if reliable {
            &[
                Op::Send,
                Op::SendWithImmediate,
                Op::RdmaWrite,
                Op::RdmaWrite,
                Op::RdmaWriteWithImmediate,
                Op::RdmaRead,
                Op::RdmaRead,
                Op::FetchAdd,
                Op::CompareSwap,
                Op::AtomicWrite,
                Op::Flush,
            ]
        } else {
            &[Op::Send, Op::SendWithImmediate, Op::RdmaWrite, Op::RdmaWriteWithImmediate]
        };
        let is_short = self.plan.crowds && self.rng.roll(8) > 0;
        let mut opcode = self.rng.pick(if is_short { &ops[..4] } else { ops });
        if let Some(chosen) = crate::windows::choice(self, connection, side) {
            opcode = chosen;
        }
        let this = &mut self.topology.connections[connection].sides[side];
        this.posts += 1;
        let number = this.posts;
        let last = this.quota == 0;
        let brings = opcode == Op::RdmaRead || opcode.is_atomic();
        if brings && !this.posted.iter().any(|posted| posted.brings.is_some()) {
            this.results_used = 0;
        }
        if brings && this.results_used + RANGE_BYTES_MAX > RESULT_BYTES {
            opcode = Op::RdmaWrite;
        }
        let max = if opcode.is_send() { SLOT_BYTES } else { 16_384 };
        let length = match self.rng.roll(20) {
            _ if is_short => self.rng.roll(600),
            0..=2 => 0,
            3..=8 => self.rng.roll(200),
            9..=14 => self.rng.roll(4096),
            15..=18 => self.rng.roll(max + 1),
            _ if opcode.is_send() => SLOT_BYTES,
            _ => self.rng.roll(RANGE_BYTES_MAX + 1),
        };
        let mut request = SendRequest { opcode, ..Default::default() };
        let mut posted =
            Posted { id: 0, number, opcode, signaled: false, forbidden: false, brings: None, message: None };
        self.fill(connection, side, &mut request, &mut posted, length);
        posted.signaled = last || self.rng.roll(3) > 0;
        for (flag, one_in) in [(SendFlags::FENCE, 4), (SendFlags::SOLICITED, 4)] {
            request.flags.0 |= if self.rng.one_in(one_in) { flag } else { 0 };
        }
        self.push(connection, side, request, posted);
    }

    pub fn push(&mut self, connection: usize, side: usize, mut request: SendRequest, mut posted: Posted) {
        let this = &mut self.topology.connections[connection];
        let peer_srqn = self.topology.pools[this.sides[1 - side].pool].srqn;
        let mine = &mut this.sides[side];
        posted.id = (connection as u64) << 40 | (side as u64) << 32 | posted.number;
        request.work_request_id = posted.id;
        request.remote_srqn = peer_srqn;
        request.flags.0 |= if posted.signaled { SendFlags::SIGNALED } else { 0 };
        mine.posted.push_back(posted);
        let (process, qp) = (mine.process, mine.qp);
        let host = self.topology.processes[process].host;
        self.sim.note(|| {
            format!(
                "c{connection}.{side} posts {:x} {:?} {} bytes at {:x}",
                request.work_request_id,
                request.opcode,
                request.payload_bytes(),
                request.remote_address
            )
        });
        let ring = self.sim.hosts[host].world.sends.entry(qp).or_default();
        request.ring_position = ring.position;
        ring.position += 1;
        ring.posted.push_back(request);
        self.sim.ring(host, qp);
    }

    /// Fills in the request, and its expected result.
    fn fill(&mut self, connection: usize, side: usize, request: &mut SendRequest, posted: &mut Posted, length: u64) {
        match posted.opcode {
            Op::RdmaRead => self.fill_read(connection, side, request, posted, length),
            Op::BindWindow => crate::windows::fill_bind(self, connection, side, request, posted.number),
            Op::FetchAdd | Op::CompareSwap => self.fill_atomic(connection, side, request, posted),
            Op::Flush => {
                let at = self.rng.roll(TARGET_BYTES / 2);
                self.name(connection, side, request, at);
                request.compare_add = self.rng.roll(TARGET_BYTES / 2);
                request.swap = 1;
            }
            _ => self.fill_payload(connection, side, request, posted, length),
        }
    }

    fn name(&mut self, connection: usize, side: usize, request: &mut SendRequest, at: u64) {
        let peer = &self.topology.connections[connection].sides[1 - side];
        request.remote_address = MEMORY_BASE + peer.area_at + at;
        request.rkey = peer.area_key;
    }

    /// Entries for a range of the process' memory, cut anywhere.
    pub(crate) fn entries(&mut self, process: usize, request: &mut SendRequest, at: u64, length: u64) {
        let lkey = self.topology.processes[process].lkey;
        let pieces = self.rng.between(1, 3);
        let mut done = 0;
        for left in (0..pieces).rev() {
            let now = if left == 0 { length - done } else { self.rng.roll(length - done + 1) };
            let sge = Sge { address: MEMORY_BASE + at + done, length: now as u32, lkey };
            request.sges[usize::from(request.sge_count)] = sge;
            request.sge_count += 1;
            done += now;
        }
    }

    fn fill_payload(
        &mut self,
        connection: usize,
        side: usize,
        request: &mut SendRequest,
        posted: &mut Posted,
        length: u64,
    ) {
        let (service, number, opcode) = (self.topology.connections[connection].service, posted.number, posted.opcode);
        let process = self.topology.connections[connection].sides[side].process;
        let Process { host, session, .. } = self.topology.processes[process];
        let length = if opcode == Op::AtomicWrite { 8 } else { length };
        let from = self.rng.roll(SOURCE_BYTES - length);
        let mut bytes = self.sim.hosts[host].world.bytes(session, MEMORY_BASE + from, length as usize).to_vec();
        if service == QpType::Uc && opcode.is_send() {
            // Nobody says which messages were lost: each says itself which it is.
            let stamps_at = self.topology.connections[connection].sides[side].stamps_at;
            let at = stamps_at + number % 64 * 8;
            let stamp = number.to_ne_bytes();
            self.sim.hosts[host].world.bytes(session, MEMORY_BASE + at, 8).copy_from_slice(&stamp);
            let lkey = self.topology.processes[process].lkey;
            request.sges[0] = Sge { address: MEMORY_BASE + at, length: 8, lkey };
            request.sge_count = 1;
            let rest = length.min(SLOT_BYTES - 8);
            bytes.truncate(rest as usize);
            self.entries(process, request, from, rest);
            bytes.splice(0..0, stamp);
        } else if bytes.len() <= INLINE_BYTES_MAX && self.rng.one_in(3) {
            request.flags.0 |= SendFlags::INLINE;
            request.inline_length = bytes.len() as u16;
            request.inline_data[..bytes.len()].copy_from_slice(&bytes);
        } else {
            self.entries(process, request, from, length);
        }
        request.immediate = if opcode.has_immediate() { number as u32 } else { 0 };
        let mut at = None;
        if !opcode.is_send() {
            let place = self.rng.roll(TARGET_BYTES - length) & if opcode == Op::AtomicWrite { !7 } else { !0 };
            self.name(connection, side, request, place);
            request.rkey = crate::windows::key(self, connection, side);
            self.topology.connections[connection].sides[1 - side].area.write(number, place, &bytes);
            at = Some(place);
        }
        if opcode.consumes_receive() {
            let immediate = opcode.has_immediate().then_some(number as u32);
            let invalidates = (opcode == Op::SendWithInvalidate).then(|| crate::windows::close(self, connection, side));
            request.immediate = invalidates.unwrap_or(request.immediate);
            let peer = &mut self.topology.connections[connection].sides[1 - side];
            posted.message = Some(peer.arrived + peer.expected.len() as u64 + 1);
            peer.expected.push_back(Expected { number, is_send: opcode.is_send(), bytes, immediate, invalidates, at });
        }
    }

    fn results(&mut self, connection: usize, side: usize, length: u64) -> u64 {
        let mine = &mut self.topology.connections[connection].sides[side];
        let to = mine.results_at + mine.results_used;
        mine.results_used += length;
        to
    }

    fn fill_read(
        &mut self,
        connection: usize,
        side: usize,
        request: &mut SendRequest,
        posted: &mut Posted,
        length: u64,
    ) {
        let from = self.rng.roll(TARGET_BYTES - length);
        self.name(connection, side, request, from);
        let to = self.results(connection, side, length);
        let process = self.topology.connections[connection].sides[side].process;
        self.entries(process, request, to, length);
        let last = self.topology.connections[connection].sides[1 - side].area.last();
        let bytes = last[from as usize..(from + length) as usize].to_vec();
        posted.brings = Some(Brings { to, bytes, from: Some(from) });
    }

    fn fill_atomic(&mut self, connection: usize, side: usize, request: &mut SendRequest, posted: &mut Posted) {
        let at = self.rng.roll(TARGET_BYTES - 8) & !7;
        self.name(connection, side, request, at);
        let to = self.results(connection, side, 8);
        let process = self.topology.connections[connection].sides[side].process;
        let lkey = self.topology.processes[process].lkey;
        request.sges[0] = Sge { address: MEMORY_BASE + to, length: 8, lkey };
        request.sge_count = 1;
        let area = &mut self.topology.connections[connection].sides[1 - side].area;
        let bytes: [u8; 8] = area.last()[at as usize..at as usize + 8].try_into().expect("eight bytes");
        let before = u64::from_ne_bytes(bytes);
        let value = self.rng.draw();
        let (compare_add, swap, after) = match (posted.opcode, self.rng.one_in(3)) {
            (Op::FetchAdd, _) => (value, 0, before.wrapping_add(value)),
            (_, true) => (before ^ 1, value, before),
            _ => (before, value, value),
        };
        (request.compare_add, request.swap) = (compare_add, swap);
        area.write(posted.number, at, &after.to_ne_bytes());
        posted.brings = Some(Brings { to, bytes: bytes.to_vec(), from: None });
    }

    // ---- completions

    pub(crate) fn completed(&mut self, host: usize, done: &Completion) {
        self.completions += 1;
        self.sim.note(|| format!("h{host} completes {done:?}"));
        match self.topology.roles.get(&(host, done.qpn)).copied() {
            Some(Role::Party(party)) => crate::datagrams::completed(self, party, done),
            Some(Role::Side(connection, side)) if done.flags.contains(CompletionFlags::SEND_QUEUE) => {
                self.sent(connection, side, done);
            }
            Some(Role::Side(connection, side)) => self.received(connection, side, done),
            None => self.wrong(format!("a completion of an unknown QP: {done:?}")),
        }
    }

    fn sent(&mut self, connection: usize, side: usize, done: &Completion) {
        let name = format!("c{connection}.{side}");
        loop {
            let mine = &mut self.topology.connections[connection].sides[side];
            let failed = mine.failed;
            let Some(posted) = mine.posted.pop_front() else {
                return self.wrong(format!("{name}: nobody posted {done:?}"));
            };
            let is_it = posted.id == done.work_request_id;
            if done.status == Status::Success {
                if failed || posted.signaled != is_it {
                    return self.wrong(format!("{name}: after {posted:?} came {done:?}"));
                }
                self.succeeded(connection, side, &posted);
                if is_it {
                    return;
                }
            } else if is_it {
                return self.failed(connection, side, &posted, done.status);
            } else if failed || posted.signaled {
                return self.wrong(format!("{name}: instead of {posted:?} came {done:?}"));
            } else {
                // Unsignaled requests before a failure succeeded.
                self.succeeded(connection, side, &posted);
            }
        }
    }

    fn succeeded(&mut self, connection: usize, side: usize, posted: &Posted) {
        let service = self.topology.connections[connection].service;
        let name = format!("c{connection}.{side} {service:?} {posted:?}");
        if posted.opcode == Op::BindWindow {
            crate::windows::bound(self, connection, side, posted.number);
        }
        if posted.forbidden {
            return self.wrong(format!("{name}: succeeded and must not"));
        }
        let [first, second] = &mut self.topology.connections[connection].sides;
        let (mine, peer) = if side == 0 { (first, second) } else { (second, first) };
        if let Some(Brings { to, bytes, from }) = &posted.brings {
            let Process { host, session, .. } = self.topology.processes[mine.process];
            let found = self.sim.hosts[host].world.bytes(session, MEMORY_BASE + to, bytes.len());
            let fine = match from {
                Some(from) => peer.area.explains(posted.number, *from, bytes, found),
                None => found == &bytes[..],
            };
            if !fine {
                let found = found.to_vec();
                let first = found.iter().zip(bytes).position(|(a, b)| a != b);
                return self.wrong(format!("{name}: brought something else, from byte {first:?} on"));
            }
        }
        if self.topology.connections[connection].service == QpType::Uc {
            return;
        }
        let peer = &mut self.topology.connections[connection].sides[1 - side];
        peer.area.done(posted.number);
        if posted.message.is_some_and(|message| message > peer.arrived) && self.topology.processes[peer.process].alive {
            let arrived = peer.arrived;
            self.wrong(format!("{name}: succeeded, but only {arrived} messages arrived"));
        }
    }

    fn failed(&mut self, connection: usize, side: usize, posted: &Posted, status: Status) {
        let this = &mut self.topology.connections[connection];
        let first = !std::mem::replace(&mut this.sides[side].failed, true);
        let reason = this.disturbed || this.forbidden || this.sides[1 - side].down;
        this.sides[side].down = true;
        let allowed = match status {
            Status::WorkRequestFlushed => !first || reason,
            Status::RetryExceeded => first && reason,
            Status::RemoteAccessError | Status::MemoryWindowBindError => first && this.forbidden,
            Status::RnrRetryExceeded => first && this.impatient,
            _ => false,
        };
        if !allowed {
            return self.wrong(format!("c{connection}.{side}: {posted:?} failed with {status:?}"));
        }
        if first {
            self.start_over(connection);
        }
    }

    /// A RECV was flushed: the QP is in ERROR, whatever its own requests say.
    fn flushed(&mut self, connection: usize, side: usize) {
        let this = &mut self.topology.connections[connection];
        this.sides[side].down = true;
        if !(this.disturbed || this.forbidden || this.impatient || this.sides[1 - side].down) {
            self.wrong(format!("c{connection}.{side}: a RECV was flushed for no reason"));
        }
        self.start_over(connection);
    }

    fn received(&mut self, connection: usize, side: usize, done: &Completion) {
        let name = format!("c{connection}.{side} {:?}", self.topology.connections[connection].service);
        let Some(bytes) = self.received_bytes(done) else {
            if done.status != Status::WorkRequestFlushed {
                self.wrong(format!("{name}: a RECV failed: {done:?}"));
            }
            return self.flushed(connection, side);
        };
        let reliable = self.topology.connections[connection].service != QpType::Uc;
        let [own, peers] = [side, 1 - side]
            .map(|side| self.topology.processes[self.topology.connections[connection].sides[side].process].host);
        let between_shards = own != peers && self.sim.are_shards(own, peers);
        let LinkModel { duplication, reordering, .. } = self.plan.host_model.link_model;
        let keeps_order = duplication == 0 && reordering == 0 && self.plan.shard_model.strays == 0;
        let orderly = reliable || between_shards || keeps_order;
        let mine = &mut self.topology.connections[connection].sides[side];
        let expected = if reliable {
            mine.expected.pop_front()
        } else {
            let stamp = bytes.first_chunk().map(|stamp| u64::from_ne_bytes(*stamp));
            let number = if done.flags.contains(CompletionFlags::WITH_IMMEDIATE) {
                Some(u64::from(done.immediate))
            } else {
                stamp
            };
            let at = mine.expected.iter().position(|expected| Some(expected.number) == number);
            match (at, orderly) {
                (Some(at), true) => mine.expected.drain(..=at).next_back(),
                (Some(at), false) => Some(mine.expected[at].clone()),
                (None, _) => None,
            }
        };
        mine.arrived += 1;
        let Some(expected) = expected else { return self.wrong(format!("{name}: nobody sent {done:?}")) };
        let immediate = done.flags.contains(CompletionFlags::WITH_IMMEDIATE).then_some(done.immediate);
        let opcode =
            if expected.is_send { CompletionOpcode::Receive } else { CompletionOpcode::ReceiveRdmaWithImmediate };
        let same = done.byte_count as usize == expected.bytes.len()
            && (immediate, done.opcode) == (expected.immediate, opcode)
            && done.flags.contains(CompletionFlags::WITH_INVALIDATE) == expected.invalidates.is_some()
            && expected.invalidates.is_none_or(|key| key == done.immediate)
            && (!expected.is_send || bytes == expected.bytes);
        if !same {
            let (number, length) = (expected.number, expected.bytes.len());
            return self.wrong(format!("{name}: message {number} of {length} bytes arrived as {done:?}"));
        }
        if self.plan.dialogues && !self.rng.one_in(DIALOGUE_PAUSE) {
            let thinking = self.rng.roll(THINKING_NS);
            self.remind_in(thinking, Action::Answer { connection, side });
        }
        let mine = &self.topology.connections[connection].sides[side];
        if expected.invalidates.is_some() {
            return crate::windows::closed(self, connection, side);
        }
        if let (Some(at), true) = (expected.at, reliable) {
            let Process { host, session, .. } = self.topology.processes[mine.process];
            let found =
                self.sim.hosts[host].world.bytes(session, MEMORY_BASE + mine.area_at + at, expected.bytes.len());
            if !mine.area.explains(expected.number, at, &expected.bytes, found) {
                self.wrong(format!("{name}: WRITE {} was announced and is not there", expected.number));
            }
        }
    }
}
