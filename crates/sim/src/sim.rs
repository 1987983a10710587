//! Hosts on a fabric under virtual time: one queue of events, worked off in order. What each host's
//! engine does is as in a router: datagrams in batches, then acknowledgements, timers, and a turn
//! for each QP that has work.
//!
//! Tests stand elsewhere: [`crate::workload`] posts and checks, called by `Event::Do` and by
//! completions.
use crate::carrier::{CarrierCounts, CarrierModel, Lane};
use crate::fabric::{Fabric, LinkModel};
use crate::rng::Rng;
use crate::shards::{Packet, ShardCounts, ShardGroups, ShardModel, Way};
use crate::world::{FORGER, Job, OutcomeRates, World};
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::records::Records;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

/// Datagrams that one turn of a host handles.
const BATCH_DATAGRAMS_MAX: usize = 64;
/// Payload that a QP may move in its turn.
const TURN_BYTES: u64 = 256 << 10;
/// A host that finds no room on the way to another shard is mostly woken before.
const SHORT_NS: u64 = 20_000;
/// An event each time a host is looked at; more is a loop that no time ends.
const EVENTS_MAX: u64 = 2_000_000;

pub enum Event {
    Arrive {
        to: usize,
        packet: Packet,
    },
    /// Another shard took a packet: there is room again on the way from `host`.
    GiveBack {
        host: usize,
        to: usize,
        bytes: u64,
    },
    Land {
        host: usize,
        token: Token,
        job: Job,
    },
    Turn {
        host: usize,
    },
    /// Notifies `host` of a QPN of another one.
    Notify {
        host: usize,
        about: (HostId, Qpn),
        info: Option<PeerInfo>,
    },
    /// `from` wants to know.
    Ask {
        host: usize,
        from: usize,
        qpn: Qpn,
    },
    TellGroup {
        host: usize,
        of: HostId,
        change: GroupChange,
    },
    /// The oldest message that the carrier has of a QP is at its target.
    Bring {
        host: usize,
        qp: QpId,
    },
    /// Its bytes are there: the token is the target's.
    Landed {
        host: usize,
        qp: QpId,
        token: Token,
        spans: Vec<Span>,
    },
    /// The carrier tells what became of a message.
    Carried {
        host: usize,
        token: Token,
        carried: Carried,
    },
    CarrierReady {
        host: usize,
        qp: QpId,
    },
    /// The workload's own.
    Do(u64),
}

struct Due {
    at: u64,
    /// Events of one time keep their order.
    place: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.place) == (other.at, other.place)
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.place).cmp(&(other.at, other.place))
    }
}

/// An engine and its environment: a host, or one of the shards of a host.
pub struct Host {
    /// Number of the host that it is, or is a shard of.
    pub router: usize,
    pub engine: Engine,
    pub world: World,
    pub(crate) groups: ShardGroups,
    inbox: VecDeque<Packet>,
    active: VecDeque<QpId>,
    /// When its next turn is.
    turn_at: u64,
    /// Hosts that were notified of a QPN.
    notified: BTreeMap<Qpn, BTreeSet<HostId>>,
}

/// Model of the hosts.
#[derive(Clone, Copy, Debug)]
pub struct HostModel {
    pub link_model: LinkModel,
    pub outcome_rates: OutcomeRates,
    pub carrier_model: CarrierModel,
    /// How long what was put off takes at most.
    pub landing_ns_max: u64,
    /// From one turn of a host to the next.
    pub turn_ns: u64,
    /// A message between control planes.
    pub control_ns: u64,
    pub control_jitter_ns: u64,
    /// Parts of a million of packets of which a changed copy comes from another host than its
    /// sender.
    pub forgeries: u64,
    /// Parts of a million of turns after which the engine is written down and read back.
    pub restores: u64,
}

pub struct Sim {
    pub now: u64,
    /// Shards of one host stand together, in their order.
    pub hosts: Vec<Host>,
    pub shard_model: ShardModel,
    pub(crate) shard_rng: Rng,
    pub shard_counts: ShardCounts,
    /// When the last packet from one shard to another arrives.
    pub(crate) link_last: BTreeMap<(usize, usize), u64>,
    pub fabric: Fabric,
    pub host_model: HostModel,
    events: BinaryHeap<Reverse<Due>>,
    places: u64,
    handled: u64,
    rng: Rng,
    restore_rng: Rng,
    forge_rng: Rng,
    pub(crate) carrier_rng: Rng,
    pub(crate) lanes: BTreeMap<(usize, QpId), Lane>,
    pub carrier_counts: CarrierCounts,
    pub forged: u64,
    /// Control channels are streams: what is said first arrives first.
    channel_last: BTreeMap<(usize, usize), u64>,
    pub trace: Option<Vec<String>>,
    /// Of all that happened: two runs are the same if this is.
    pub digest: u64,
    pub restored: u64,
    /// Messages that were carried in a packet with another one.
    pub company_carried: u64,
    pub wrongs: Vec<String>,
}

/// The other hosts that know what this one knows.
fn agreed(knows: &[bool], host: usize) -> BTreeSet<HostId> {
    let others = knows.iter().enumerate().filter(|(other, theirs)| *other != host && **theirs && knows[host]);
    others.map(|(other, _)| HostId(other as u32)).collect()
}

impl Sim {
    /// Hosts of which both know selective repeat have agreed on it.
    pub fn agree_on_selective(&mut self, knows: &[bool]) {
        for own in &mut self.hosts {
            own.world.selective = agreed(knows, own.router);
        }
    }

    /// The same of frames of records.
    pub fn agree_on_records(&mut self, knows: &[bool]) {
        for own in &mut self.hosts {
            own.world.records = agreed(knows, own.router);
        }
    }

    pub fn new(seed: u64, hosts: usize, host_model: HostModel) -> Self {
        Self::with_shards(seed, &vec![1; hosts], host_model, ShardModel::default())
    }

    /// Of hosts that have so many engines each.
    pub fn with_shards(seed: u64, shards: &[u8], host_model: HostModel, shard_model: ShardModel) -> Self {
        let make = |(index, (router, shard)): (usize, (usize, Shard))| {
            let mut rng = Rng::for_part(seed, 100 + index as u64);
            let mut key = [0; 32];
            for bytes in key.chunks_exact_mut(8) {
                bytes.copy_from_slice(&rng.draw().to_le_bytes());
            }
            let mut world = World::new(HostId(router as u32), rng);
            world.shard = crate::shards::host_of(shard.index());
            world.room_bytes = shard_model.room_bytes;
            world.outcome_rates = host_model.outcome_rates;
            world.carrier_model = host_model.carrier_model;
            world.bits_per_second = host_model.link_model.bits_per_second;
            let (inbox, active, notified) = (VecDeque::new(), VecDeque::new(), BTreeMap::new());
            let (engine, groups) = (Engine::of_shard(Seed(key), shard), ShardGroups::default());
            Host { router, engine, world, inbox, active, turn_at: u64::MAX, notified, groups }
        };
        let all =
            shards.iter().enumerate().flat_map(|(router, &count)| Shard::all(count).map(move |shard| (router, shard)));
        Self {
            now: 0,
            hosts: all.enumerate().map(make).collect(),
            fabric: Fabric::new(host_model.link_model, Rng::for_part(seed, 1)),
            host_model,
            events: BinaryHeap::new(),
            places: 0,
            handled: 0,
            rng: Rng::for_part(seed, 2),
            restore_rng: Rng::for_part(seed, 3),
            forge_rng: Rng::for_part(seed, 4),
            carrier_rng: Rng::for_part(seed, 5),
            shard_rng: Rng::for_part(seed, 6),
            shard_model,
            shard_counts: ShardCounts::default(),
            link_last: BTreeMap::new(),
            lanes: BTreeMap::new(),
            carrier_counts: CarrierCounts::default(),
            forged: 0,
            channel_last: BTreeMap::new(),
            trace: None,
            digest: 0xcbf2_9ce4_8422_2325,
            restored: 0,
            company_carried: 0,
            wrongs: Vec::new(),
        }
    }

    pub fn instant(&self) -> Instant {
        Instant(self.now)
    }

    /// From now on no accidents: what was begun must come to an end.
    pub fn begin_drain(&mut self) {
        self.fabric.link_model = self.host_model.link_model.without_faults();
        self.fabric.down.clear();
        self.host_model.carrier_model.breaks = 0;
        self.shard_model.strays = 0;
        for host in &mut self.hosts {
            host.world.outcome_rates.transmit_full = 0;
        }
    }

    pub fn at(&mut self, at: u64, event: Event) {
        self.places += 1;
        self.events.push(Reverse(Due { at: at.max(self.now), place: self.places, event }));
    }

    pub fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>12} {}", self.now, line()));
        }
    }

    fn digest(&mut self, words: &[u64]) {
        for word in words {
            self.digest = (self.digest ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(5);
        }
    }

    /// Handles the next event. `Some`: one for the workload. `None` in it: nothing will ever happen
    /// again.
    pub fn step(&mut self) -> Option<Option<u64>> {
        let Some(Reverse(due)) = self.events.pop() else { return Some(None) };
        self.now = due.at;
        self.handled += 1;
        if self.handled > EVENTS_MAX {
            self.wrongs.push(format!("{} ns: {EVENTS_MAX} events and no end", self.now));
            return Some(None);
        }
        match due.event {
            Event::Arrive { to, packet } => {
                self.digest(&[1, self.now, to as u64, packet.bytes.len() as u64]);
                self.hosts[to].inbox.push_back(packet);
                self.turn_soon(to);
            }
            Event::GiveBack { host, to, bytes } => {
                let number = self.id_of(host, to);
                self.hosts[host].world.give_back_room(number, bytes);
                if self.hosts[host].world.is_short {
                    self.turn_soon(host);
                }
            }
            Event::Land { host, token, job } => self.land(host, token, job),
            Event::Turn { host } => {
                if self.hosts[host].turn_at <= self.now {
                    self.hosts[host].turn_at = u64::MAX;
                    self.turn(host);
                }
            }
            Event::Notify { host, about, info } => {
                self.note(|| format!("h{host} hears of {about:?}: {info:?}"));
                let now = self.instant();
                let Host { engine, world, .. } = self.enter(host);
                world.peers.insert(about, info);
                engine.handle_peer_changed(world, now, about.0, Some(about.1));
                self.after(host);
            }
            Event::Ask { host, from, qpn } => {
                let from = self.id_of(host, from);
                self.hosts[host].notified.entry(qpn).or_default().insert(from);
                self.notify(host, from, qpn);
            }
            Event::TellGroup { host, of, change } => {
                let hosts = self.hosts[host].world.groups.entry((change.network, change.group)).or_default();
                match change.qpn {
                    Some(qpn) => hosts.insert(of, qpn),
                    None => hosts.remove(&of),
                };
                if crate::shards::shard_of(of).is_some() {
                    self.announce_first(host, (change.network, change.group));
                }
            }
            Event::Bring { host, qp } => self.bring(host, qp),
            Event::Landed { host, qp, token, spans } => self.land_carried(host, qp, token, &spans),
            Event::Carried { host, token, carried } => {
                self.digest(&[4, self.now, host as u64]);
                self.note(|| format!("h{host} hears from its carrier: {carried:?}"));
                let now = self.instant();
                let Host { engine, world, .. } = self.enter(host);
                engine.handle_carried(world, now, token, carried);
                self.after(host);
            }
            Event::CarrierReady { host, qp } => {
                self.enter(host).engine.handle_carrier_ready(qp);
                self.after(host);
            }
            Event::Do(what) => return Some(Some(what)),
        }
        None
    }

    /// Before any call of a host's engine.
    pub fn enter(&mut self, host: usize) -> &mut Host {
        let now = self.now;
        let host = &mut self.hosts[host];
        host.world.now = now;
        host
    }

    pub fn turn_soon(&mut self, host: usize) {
        self.turn_by(host, self.now + self.host_model.turn_ns);
    }

    fn turn_by(&mut self, host: usize, at: u64) {
        if at < self.hosts[host].turn_at {
            self.hosts[host].turn_at = at;
            self.at(at, Event::Turn { host });
        }
    }

    /// There is something in the send queue of a QP.
    pub fn ring(&mut self, host: usize, qp: QpId) {
        let active = &mut self.hosts[host].active;
        if !active.contains(&qp) {
            active.push_back(qp);
        }
        self.turn_soon(host);
    }

    fn turn(&mut self, host: usize) {
        let now = self.instant();
        self.restore_perhaps(host);
        let world = &mut self.enter(host).world;
        (world.was_full, world.is_short) = (false, false);
        for _ in 0..BATCH_DATAGRAMS_MAX {
            let Some(packet) = self.hosts[host].inbox.pop_front() else { break };
            self.receive(host, packet);
        }
        let Host { engine, world, inbox, active, .. } = self.enter(host);
        engine.flush_acks(world, now);
        if engine.poll_timeout().is_some_and(|at| at <= now) {
            engine.handle_timeout(world, now);
        }
        for _ in 0..active.len() {
            let Some(qp) = active.pop_front() else { break };
            switch_perhaps(engine, world, qp);
            if engine.run(world, now, qp, TURN_BYTES) == Progress::More {
                active.push_back(qp);
            }
        }
        while let Some(qp) = engine.poll_ready() {
            switch_perhaps(engine, world, qp);
            if engine.run(world, now, qp, TURN_BYTES) == Progress::More && !active.contains(&qp) {
                active.push_back(qp);
            }
        }
        let again = !inbox.is_empty() || !active.is_empty() || world.was_full;
        let waits = inbox.is_empty() && world.is_short;
        self.settle(host);
        if waits {
            self.turn_by(host, self.now + SHORT_NS);
        } else if again {
            self.turn_soon(host);
        }
    }

    fn restore_perhaps(&mut self, host: usize) {
        if !self.restore_rng.happens(self.host_model.restores) {
            return;
        }
        let snapshot = self.hosts[host].engine.snapshot();
        match Engine::restore(&snapshot) {
            Ok(engine) if engine.snapshot() == snapshot => self.hosts[host].engine = engine,
            Ok(_) => self.wrongs.push("a restored engine's snapshot is another".into()),
            Err(error) => self.wrongs.push(format!("a snapshot is {error}")),
        }
        self.restored += 1;
    }

    /// After any calls of a host's engine but in its turn.
    pub fn after(&mut self, host: usize) {
        self.settle(host);
        // A call may have made QPs ready: a turn finds them.
        self.turn_soon(host);
    }

    /// Passes on the actions that the engine asked for.
    fn settle(&mut self, host: usize) {
        for outgoing in std::mem::take(&mut self.hosts[host].world.outbox) {
            self.dispatch(host, outgoing);
        }
        for (token, job) in std::mem::take(&mut self.hosts[host].world.begun) {
            let at = self.now + 1 + self.rng.roll(self.host_model.landing_ns_max);
            self.at(at, Event::Land { host, token, job });
        }
        self.settle_carrier(host);
        for (peer, qpn) in std::mem::take(&mut self.hosts[host].world.asked) {
            let asked = self.find(host, peer, qpn);
            let at = self.channel(host, asked);
            self.at(at, Event::Ask { host: asked, from: host, qpn });
        }
        for (qpn, peer) in std::mem::take(&mut self.hosts[host].world.identities) {
            let mut notified = self.hosts[host].notified.get(&qpn).cloned().unwrap_or_default();
            notified.extend(peer);
            self.hosts[host].notified.insert(qpn, notified.clone());
            for to in notified {
                self.notify(host, to, qpn);
            }
        }
        while let Some(change) = self.hosts[host].engine.poll_group_change() {
            self.announce_group(host, change);
        }
        let wrongs = std::mem::take(&mut self.hosts[host].world.wrongs);
        self.wrongs.extend(wrongs.into_iter().map(|wrong| format!("h{host}: {wrong}")));
        if let Some(at) = self.hosts[host].engine.poll_timeout() {
            self.turn_by(host, at.0.max(self.now + 1));
        }
    }

    fn dispatch(&mut self, host: usize, outgoing: crate::world::Outgoing) {
        let to = self.find(host, outgoing.to, crate::shards::dest_qpn(&outgoing.bytes).unwrap_or_default());
        if self.are_shards(host, to) {
            return self.dispatch_inside(host, to, outgoing);
        }
        let ports = [host, to].map(|end| self.hosts[end].router);
        let is_capable = outgoing.traffic_class & 3 != 0;
        let arrivals = self.fabric.carry(outgoing.at, (ports[0], ports[1]), outgoing.bytes.len(), is_capable);
        let company = Records::parse(&outgoing.bytes).map_or(0, |records| records.count() - 1);
        self.company_carried += (company * arrivals.iter().flatten().count()) as u64;
        self.note(|| crate::trace::packet(host, to, &outgoing.bytes, &arrivals));
        self.forge_perhaps(to, &outgoing.bytes);
        for arrival in arrivals.into_iter().flatten() {
            let ip = IpInfo {
                traffic_class: outgoing.traffic_class,
                hop_limit: outgoing.hop_limit,
                congestion: arrival.marked,
            };
            let packet = Packet { from: self.id_of(to, host), way: Way::Line, ip, bytes: outgoing.bytes.clone() };
            let to = self.socket(to);
            self.at(arrival.at, Event::Arrive { to, packet });
        }
    }

    /// Packets of a host that is nobody's peer must do nothing at all.
    pub(crate) fn forge_perhaps(&mut self, to: usize, bytes: &[u8]) {
        if !self.forge_rng.happens(self.host_model.forgeries) {
            return;
        }
        let mut bytes = bytes.to_vec();
        for _ in 0..self.forge_rng.roll(3) {
            let place = self.forge_rng.roll(bytes.len() as u64) as usize;
            bytes[place] ^= 1 << self.forge_rng.roll(8);
        }
        let packet = Packet { from: FORGER, way: Way::Line, ip: IpInfo::default(), bytes };
        let at = self.now + self.forge_rng.roll(1_000_000);
        self.forged += 1;
        self.at(at, Event::Arrive { to, packet });
    }

    /// When what is said now to another control plane is heard there.
    pub(crate) fn channel(&mut self, from: usize, to: usize) -> u64 {
        let at = match self.are_shards(from, to) {
            true => self.now + self.shard_delay_ns(),
            false => self.now + self.host_model.control_ns + self.rng.roll(self.host_model.control_jitter_ns + 1),
        };
        let last = self.channel_last.entry((from, to)).or_default();
        *last = at.max(*last);
        *last
    }

    fn notify(&mut self, host: usize, to: HostId, qpn: Qpn) {
        let info = self.hosts[host].engine.peer_info(qpn);
        for to in self.listeners(host, to) {
            let (at, about) = (self.channel(host, to), (self.id_of(to, host), qpn));
            self.at(at, Event::Notify { host: to, about, info });
        }
    }

    fn land(&mut self, host: usize, token: Token, job: Job) {
        let now = self.instant();
        self.digest(&[2, self.now, host as u64]);
        let Host { engine, world, .. } = self.enter(host);
        let is_atomic = matches!(job, Job::Atomic { .. });
        let outcome = world.finish(job);
        if is_atomic {
            engine.handle_atomic_done(world, now, token, outcome.map_err(|_| ()).map(Option::unwrap_or_default));
        } else {
            engine.handle_copied(world, now, token, outcome.map(|_| ()));
        }
        self.after(host);
    }

    /// Copies and the like that have not completed yet.
    pub fn operations_pending(&self) -> usize {
        self.events.iter().filter(|Reverse(due)| matches!(due.event, Event::Land { .. })).count()
    }

    /// Completions that came since the last call, of one host.
    pub fn harvest(&mut self, host: usize) -> Vec<(CqId, Completion)> {
        let mut all = Vec::new();
        for (cq, ring) in &mut self.hosts[host].world.completions {
            all.extend(ring.drain(..).map(|completion| (*cq, completion)));
        }
        for (_, done) in &all {
            self.digest(&[3, self.now, done.work_request_id, done.status as u64, u64::from(done.byte_count)]);
        }
        all
    }
}

/// A QP that is about to run goes another way.
fn switch_perhaps(engine: &mut Engine, world: &mut World, qp: QpId) {
    match world.switches() {
        Some(true) => drop(engine.use_carrier(qp)),
        Some(false) => engine.use_wire(qp),
        None => {}
    }
}
