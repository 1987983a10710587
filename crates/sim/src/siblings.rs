//! Packets, questions and groups between the shards of one host, and from other hosts to the shard that they are for;
//! see [`crate::shards`].
use crate::shards::{DEST_QPN, Group, Packet, Way, dest_qpn, host_of, shard_of};
use crate::sim::{Event, Host, Sim};
use crate::world::Outgoing;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::records::Records;
use std::ops::Range;

impl Sim {
    /// The engines of a host.
    pub fn engines(&self, router: usize) -> Range<usize> {
        let first = self.hosts.partition_point(|host| host.router < router);
        first..first + usize::from(self.hosts[first].engine.shard().count())
    }

    /// The engine that has a QPN of a host.
    pub fn engine_of(&self, router: usize, qpn: Qpn) -> usize {
        let engines = self.engines(router);
        engines.start + usize::from(self.hosts[engines.start].engine.shard().of_qpn(qpn))
    }

    /// The number by which the engine `viewer` knows the host of another one.
    pub fn id_of(&self, viewer: usize, other: usize) -> HostId {
        match viewer != other && self.are_shards(viewer, other) {
            true => host_of(self.hosts[other].engine.shard().index()),
            false => HostId(self.hosts[other].router as u32),
        }
    }

    /// The engine behind a QPN of a host, as the engine `viewer` knows it.
    pub fn find(&self, viewer: usize, host: HostId, qpn: Qpn) -> usize {
        match shard_of(host) {
            Some(shard) => self.engines(self.hosts[viewer].router).start + usize::from(shard),
            None => self.engine_of(host.0 as usize, qpn),
        }
    }

    /// Whether two engines are of one host.
    pub fn are_shards(&self, one: usize, other: usize) -> bool {
        self.hosts[one].router == self.hosts[other].router
    }

    /// Engines that hear what is said to a host of a QPN: all its shards, even if the QP is connected to one of them,
    /// since another one may know it as the peer of its own QP.
    pub(crate) fn listeners(&self, host: usize, to: HostId) -> Range<usize> {
        match shard_of(to) {
            Some(_) => {
                let shard = self.find(host, to, Qpn(0));
                shard..shard + 1
            }
            None => self.engines(to.0 as usize),
        }
    }

    /// The engine whose socket receives a packet for another one of its host.
    pub(crate) fn socket(&mut self, owner: usize) -> usize {
        let engines = self.engines(self.hosts[owner].router);
        if engines.len() == 1 || !self.shard_rng.happens(self.shard_model.strays) {
            return owner;
        }
        let other = engines.start + self.shard_rng.roll(engines.len() as u64 - 1) as usize;
        if other < owner { other } else { other + 1 }
    }

    pub(crate) fn shard_delay_ns(&mut self) -> u64 {
        1 + self.shard_rng.roll(self.shard_model.delay_ns_max)
    }

    /// Puts a packet on the link between two shards; when it is there.
    fn put_on_link(&mut self, (from, to): (usize, usize), packet: Packet) -> u64 {
        let at = self.now + self.shard_delay_ns();
        let last = self.link_last.entry((from, to)).or_default();
        *last = at.max(*last);
        let at = *last;
        self.at(at, Event::Arrive { to, packet });
        at
    }

    /// Takes a packet from one shard to another one that it is for.
    pub(crate) fn dispatch_inside(&mut self, host: usize, to: usize, outgoing: Outgoing) {
        let Outgoing { bytes, traffic_class, hop_limit, .. } = outgoing;
        let ip = IpInfo { traffic_class, hop_limit, congestion: false };
        self.shard_counts.packets += 1;
        self.shard_counts.company += Records::parse(&bytes).map_or(0, |records| records.count() as u64 - 1);
        let packet = Packet { from: self.id_of(to, host), way: Way::Link(host), ip, bytes: bytes.clone() };
        let at = self.put_on_link((host, to), packet);
        self.note(|| {
            crate::trace::packet(host, to, &bytes, &[Some(crate::fabric::Arrival { at, marked: false }), None])
        });
        self.forge_perhaps(to, &bytes);
    }

    /// Hands a packet of another host on. Without room it is lost, as in a full socket: false.
    fn hand_on(&mut self, host: usize, to: usize, packet: Packet) -> bool {
        let (number, bytes) = (self.id_of(host, to), packet.bytes.len() as u64);
        let has_room = self.hosts[host].world.take_room(number, bytes);
        if has_room {
            let at = self.put_on_link((host, to), packet);
            self.note(|| format!("h{host} hands a packet on to h{to}, at {at}"));
        }
        has_room
    }

    /// Passes a packet to the engine, or to the shard that it is for.
    pub(crate) fn receive(&mut self, host: usize, packet: Packet) {
        if let Way::Link(from) | Way::Relayed(from) = packet.way {
            let (at, bytes) = (self.now + self.shard_delay_ns(), packet.bytes.len() as u64);
            self.at(at, Event::GiveBack { host: from, to: host, bytes });
        }
        let shard = self.hosts[host].engine.shard();
        if let Some(qpn) = dest_qpn(&packet.bytes).filter(|_| shard.count() > 1) {
            if !shard.has_qpn(qpn) {
                return self.receive_stray(host, qpn, packet);
            }
            if shard_of(packet.from).is_none() && !matches!(packet.way, Way::Relayed(_)) {
                self.relay_to_group(host, qpn, &packet);
            }
        }
        let now = self.instant();
        let Host { engine, world, .. } = self.enter(host);
        engine.handle_datagram(world, now, packet.from, &packet.ip, &packet.bytes);
    }

    fn receive_stray(&mut self, host: usize, qpn: Qpn, packet: Packet) {
        if packet.way != Way::Line {
            return self.wrongs.push(format!("h{host} gets a packet for {qpn:?} from another shard"));
        }
        let owner = self.engine_of(self.hosts[host].router, qpn);
        match self.hand_on(host, owner, Packet { way: Way::Link(host), ..packet }) {
            true => self.shard_counts.strays += 1,
            false => self.shard_counts.strays_lost += 1,
        }
    }

    /// A packet of another host to a group: the other shards with members get it, too.
    fn relay_to_group(&mut self, host: usize, qpn: Qpn, packet: &Packet) {
        let own = self.hosts[host].groups.own.iter();
        let Some(key) = own.filter(|(_, own)| **own == qpn).map(|(key, _)| *key).next() else { return };
        let members = self.hosts[host].world.groups.get(&key).cloned().unwrap_or_default();
        for (number, member) in members.into_iter().filter(|(number, _)| shard_of(*number).is_some()) {
            let (to, mut bytes) = (self.find(host, number, member), packet.bytes.clone());
            bytes[DEST_QPN].copy_from_slice(&member.0.to_be_bytes()[1..]);
            let copy = Packet { from: packet.from, way: Way::Relayed(host), ip: packet.ip, bytes };
            self.shard_counts.relayed += u64::from(self.hand_on(host, to, copy));
        }
    }

    /// By which QPN an engine's members of a group are reached: other hosts know one QPN of a host, that of the first
    /// shard with members.
    pub(crate) fn announce_group(&mut self, host: usize, change: GroupChange) {
        if self.hosts[host].engine.shard().count() == 1 {
            return self.announce_outside(host, change);
        }
        let own = &mut self.hosts[host].groups.own;
        match change.qpn {
            Some(qpn) => own.insert((change.network, change.group), qpn),
            None => own.remove(&(change.network, change.group)),
        };
        for to in self.engines(self.hosts[host].router).filter(|to| *to != host) {
            let (at, of) = (self.channel(host, to), self.id_of(to, host));
            self.at(at, Event::TellGroup { host: to, of, change });
        }
        self.announce_first(host, (change.network, change.group));
    }

    /// The first shard announces a group, if other hosts were told something else.
    pub(crate) fn announce_first(&mut self, host: usize, key: Group) {
        let shard = self.hosts[host].engine.shard();
        if shard.count() == 1 || shard.index() > 0 {
            return;
        }
        let Host { groups, world, .. } = &mut self.hosts[host];
        let elsewhere = world.groups.get(&key).into_iter().flatten();
        let elsewhere = elsewhere.filter(|(number, _)| shard_of(**number).is_some()).map(|(_, qpn)| *qpn).next();
        let qpn = groups.own.get(&key).copied().or(elsewhere);
        let announced = match qpn {
            Some(qpn) => groups.announced.insert(key, qpn),
            None => groups.announced.remove(&key),
        };
        if announced != qpn {
            self.announce_outside(host, GroupChange { network: key.0, group: key.1, qpn });
        }
    }

    fn announce_outside(&mut self, host: usize, change: GroupChange) {
        for to in 0..self.hosts.len() {
            if !self.are_shards(host, to) {
                let (at, of) = (self.channel(host, to), self.id_of(to, host));
                self.at(at, Event::TellGroup { host: to, of, change });
            }
        }
    }
}
