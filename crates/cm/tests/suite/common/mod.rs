//! Machines on hosts, a network between them that loses, doubles and delays, and what their programs hear.
//!
//! Host h has the vNICs `vnic(h, 0)`, `vnic(h, 1)` …, at 10.0.h.1, 10.0.h.2 …, and fd00::h:1 …; all
//! hosts are routers of one network. Hosts also have an external address, 192.0.2.h+1, which their
//! first two vNICs share: by it they are external machines to each other.
use freeflow_cm::{
    Asked, Environment, GID_COUNT, Limits, Link, Machine, Owner, Packet, Route, Scope, ScopedGid, VnicRef,
};
use freeflow_protocol::cm::{
    CmAddress, CmEvent, CmEventBody, CmEventKind, CmReply, CmRequest, ConnectionParameters, PortSpace,
};
use freeflow_verbs::{Duration, Gid, Instant, NetworkId, PathMtu, QpType, VerbsError};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

pub const NETWORK: Scope = Scope::Network(NetworkId(1));
pub const VNICS_PER_HOST: u64 = 4;

pub fn v4(a: u8, b: u8, c: u8, d: u8) -> Gid {
    Gid::from_ip(Ipv4Addr::new(a, b, c, d).into())
}

pub fn gid(host: usize, number: u64) -> Gid {
    v4(10, 0, host as u8, number as u8 + 1)
}

/// Its IPv6 address, fd00::h:1 and so on.
pub fn gid6(host: usize, number: u64) -> Gid {
    Gid::from_ip(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, host as u16, number as u16 + 1).into())
}

pub fn external(host: usize) -> Gid {
    v4(192, 0, 2, host as u8 + 1)
}

pub fn vnic(host: usize, number: u64) -> VnicRef {
    VnicRef(host as u64 * 100 + number)
}

pub const ANY: Gid = Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0]);

/// SplitMix64.
pub struct SimRng(pub u64);

impl SimRng {
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn roll(&mut self, sides: u64) -> u64 {
        self.draw() % sides.max(1)
    }

    pub fn happens(&mut self, percent: u64) -> bool {
        self.roll(100) < percent
    }
}

#[derive(Clone, Debug)]
pub struct Owned {
    pub link: Link,
    pub scope: Scope,
    pub from: Gid,
    pub to: Gid,
    pub mad: Vec<u8>,
}

impl Owned {
    pub fn packet(&self) -> Packet<'_> {
        Packet { link: self.link, scope: self.scope, from: self.from, to: self.to, mad: &self.mad }
    }
}

#[derive(Clone, Debug)]
pub struct Heard {
    pub owner: Owner,
    pub event: CmEvent,
}

/// Surroundings of one machine.
pub struct Surroundings {
    pub host: usize,
    pub rng: SimRng,
    pub sent: Vec<Owned>,
    pub heard: Vec<Heard>,
    pub cut: bool,
    /// Pairs of addresses of which the first may not connect to the second.
    pub denied: Vec<(Gid, Gid)>,
    /// Addresses that were looked for in vain.
    pub unreachable: Vec<(VnicRef, Gid)>,
}

impl Environment for Surroundings {
    fn random(&mut self) -> u32 {
        self.rng.draw() as u32
    }

    fn addresses(&self, of: VnicRef) -> [Option<ScopedGid>; GID_COUNT] {
        let number = of.0 % 100;
        if of.0 / 100 != self.host as u64 || number >= VNICS_PER_HOST {
            return [None; GID_COUNT];
        }
        let own = ScopedGid { scope: NETWORK, gid: gid(self.host, number) };
        let six = ScopedGid { scope: NETWORK, gid: gid6(self.host, number) };
        let shared = ScopedGid { scope: Scope::External, gid: external(self.host) };
        [Some(own), (number < 2).then_some(shared), Some(six)]
    }

    fn vnic_at(&self, place: ScopedGid) -> Option<VnicRef> {
        let is_at = |number: &u64| [gid(self.host, *number), gid6(self.host, *number)].contains(&place.gid);
        let found = (0..VNICS_PER_HOST).find(is_at);
        found.filter(|_| place.scope == NETWORK).map(|number| vnic(self.host, number))
    }

    fn route(&self, of: VnicRef, from: Option<Gid>, to: Gid) -> Result<Route, VerbsError> {
        let [a, b, c, d] = match to.to_ipv4() {
            Some(v4) => v4.octets(),
            None if to.0[..12] == gid6(0, 0).0[..12] => [0xfd, 0, to.0[13], to.0[15]],
            None => return Err(VerbsError::Unreachable),
        };
        let (index, link) = match (a, b) {
            (0xfd, 0) if usize::from(c) == self.host && u64::from(d) <= VNICS_PER_HOST => (2, Link::Local),
            (0xfd, 0) if c < 8 => (2, Link::Router(c.into())),
            (10, 0) if usize::from(c) == self.host && u64::from(d) <= VNICS_PER_HOST => (0, Link::Local),
            (10, 0) if c < 8 => (0, Link::Router(c.into())),
            (192, 0) if external(self.host) == to => (1, Link::Local),
            (192, 0) => (1, Link::External(u32::from(d) - 1)),
            _ => return Err(VerbsError::Unreachable),
        };
        let local = self.addresses(of)[index].ok_or(VerbsError::Unreachable)?;
        if self.cut || from.is_some_and(|gid| gid != local.gid) {
            return Err(VerbsError::Unreachable);
        }
        Ok(Route { link, local, remote: to, gid_index: index as u8, mtu: PathMtu::Mtu4096 })
    }

    fn unreachable(&mut self, vnic: VnicRef, address: Gid) {
        self.unreachable.push((vnic, address));
    }

    fn send(&mut self, packet: Packet<'_>) {
        let Packet { link, scope, from, to, mad } = packet;
        self.sent.push(Owned { link, scope, from, to, mad: mad.to_vec() });
    }

    fn allows(&self, _of: VnicRef, local: ScopedGid, remote: CmAddress, asked: Asked) -> bool {
        let (forth, back) = ((local.gid, remote.gid), (remote.gid, local.gid));
        match asked {
            Asked::ToBegin => !self.denied.contains(&forth),
            Asked::ToAnswer => !self.denied.contains(&back),
            Asked::ToStand => !self.denied.contains(&forth) || !self.denied.contains(&back),
        }
    }

    fn notify(&mut self, owner: Owner, _channel: u32, event: CmEvent) {
        self.heard.push(Heard { owner, event });
    }
}

/// Per cent, and microseconds.
#[derive(Clone, Copy, Default)]
pub struct LinkModel {
    pub lost: u64,
    pub doubled: u64,
    /// At most so long on the way: so they also overtake each other.
    pub delay_us: u64,
}

pub struct World {
    pub now: Instant,
    pub machines: Vec<Machine>,
    pub around: Vec<Surroundings>,
    pub link_model: LinkModel,
    rng: SimRng,
    on_the_way: BTreeMap<(Instant, u64), (usize, Owned)>,
    sequence: u64,
}

impl World {
    pub fn new(hosts: usize, seed: u64) -> Self {
        Self::with(hosts, seed, Limits::default())
    }

    pub fn with(hosts: usize, seed: u64, limits: Limits) -> Self {
        let around = |host| Surroundings {
            host,
            rng: SimRng(seed ^ (host as u64) << 32),
            sent: Vec::new(),
            heard: Vec::new(),
            cut: false,
            denied: Vec::new(),
            unreachable: Vec::new(),
        };
        Self {
            now: Instant(1_000_000),
            machines: (0..hosts).map(|_| Machine::new(limits)).collect(),
            around: (0..hosts).map(around).collect(),
            link_model: LinkModel::default(),
            rng: SimRng(!seed),
            on_the_way: BTreeMap::new(),
            sequence: 0,
        }
    }

    /// Carries the messages that were sent: within a host at once and safely.
    pub fn carry(&mut self) {
        for host in 0..self.machines.len() {
            for mut packet in std::mem::take(&mut self.around[host].sent) {
                let (to, copies, delay) = match packet.link {
                    Link::Local => (host, 1, 0),
                    Link::Router(to) | Link::External(to) => {
                        let link_model = self.link_model;
                        let copies = u32::from(!self.rng.happens(link_model.lost));
                        (
                            to as usize,
                            copies * (1 + u32::from(self.rng.happens(link_model.doubled))),
                            link_model.delay_us,
                        )
                    }
                };
                packet.link = match packet.link {
                    Link::Local => Link::Local,
                    Link::Router(_) => Link::Router(host as u32),
                    Link::External(_) => Link::External(host as u32),
                };
                for _ in 0..copies {
                    let at = self.now + Duration::from_micros(self.rng.roll(delay + 1));
                    self.sequence += 1;
                    self.on_the_way.insert((at, self.sequence), (to, packet.clone()));
                }
            }
        }
    }

    /// The next packet or timer. False: there is none until then.
    pub fn step(&mut self, until: Instant) -> bool {
        self.carry();
        let packet = self.on_the_way.keys().next().copied();
        let timer = (0..self.machines.len()).filter_map(|h| self.machines[h].poll_timeout().map(|at| (at, h))).min();
        if let Some(key) = packet.filter(|key| key.0 <= until && timer.is_none_or(|(at, _)| key.0 <= at)) {
            let (host, owned) = self.on_the_way.remove(&key).unwrap();
            self.now = self.now.max(key.0);
            if let Some(machine) = self.machines.get_mut(host) {
                machine.handle_packet(&mut self.around[host], self.now, owned.packet());
            }
            return true;
        }
        if let Some((at, host)) = timer.filter(|(at, _)| *at <= until) {
            self.now = self.now.max(at);
            self.machines[host].handle_timeout(&mut self.around[host], self.now);
            return true;
        }
        false
    }

    pub fn run_for(&mut self, span: Duration) {
        let until = self.now + span;
        for _ in 0..10_000_000 {
            if !self.step(until) {
                self.now = until;
                return;
            }
        }
        panic!("it does not come to rest");
    }

    /// All that is on the way comes; no timer is waited for.
    pub fn settle(&mut self) {
        self.run_for(Duration::from_micros(self.link_model.delay_us * 10 + 1));
    }

    pub fn ask(
        &mut self,
        host: usize,
        owner: u64,
        of: VnicRef,
        request: &CmRequest,
    ) -> Result<Option<CmReply>, VerbsError> {
        self.machines[host].handle_request(&mut self.around[host], self.now, Owner(owner), of, request)
    }

    pub fn heard(&mut self, host: usize) -> Vec<CmEvent> {
        self.settle();
        std::mem::take(&mut self.around[host].heard).into_iter().map(|heard| heard.event).collect()
    }

    pub fn kinds(&mut self, host: usize) -> Vec<(u64, CmEventKind, i32)> {
        self.heard(host).into_iter().map(|event| (event.cookie, event.kind, event.status)).collect()
    }

    // One program on each vNIC: its owner has the vNIC's number.

    pub fn create(&mut self, of: VnicRef, port_space: PortSpace, qp_type: QpType, cookie: u64) -> Ident {
        let host = (of.0 / 100) as usize;
        let request = CmRequest::CreateId { channel: 1, port_space, qp_type, cookie };
        match self.ask(host, of.0, of, &request) {
            Ok(Some(CmReply::Id { id })) => Ident { host, vnic: of, id },
            other => panic!("{other:?}"),
        }
    }

    pub fn tcp(&mut self, of: VnicRef, cookie: u64) -> Ident {
        self.create(of, PortSpace::Tcp, QpType::Rc, cookie)
    }

    pub fn call(
        &mut self,
        ident: Ident,
        request: impl FnOnce(u32) -> CmRequest,
    ) -> Result<Option<CmReply>, VerbsError> {
        self.ask(ident.host, ident.vnic.0, ident.vnic, &request(ident.id))
    }

    pub fn bind(&mut self, ident: Ident, gid: Gid, port: u16) -> Result<CmAddress, VerbsError> {
        match self.call(ident, |id| CmRequest::Bind { id, address: CmAddress { gid, port } })? {
            Some(CmReply::Bound { local }) => Ok(local),
            other => panic!("{other:?}"),
        }
    }

    pub fn listen(&mut self, ident: Ident, backlog: u32) -> Result<CmAddress, VerbsError> {
        match self.call(ident, |id| CmRequest::Listen { id, backlog })? {
            Some(CmReply::Bound { local }) => Ok(local),
            other => panic!("{other:?}"),
        }
    }

    pub fn listener(&mut self, of: VnicRef, port: u16, cookie: u64) -> Ident {
        let ident = self.tcp(of, cookie);
        self.bind(ident, ANY, port).unwrap();
        self.listen(ident, 0).unwrap();
        ident
    }

    pub fn resolve(&mut self, ident: Ident, gid: Gid, port: u16) {
        let destination = CmAddress { gid, port };
        let request = |id| CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 1000 };
        self.call(ident, request).unwrap();
        self.call(ident, |id| CmRequest::ResolveRoute { id, timeout_ms: 1000 }).unwrap();
    }

    pub fn connect(&mut self, ident: Ident, parameters: ConnectionParameters) -> Result<Option<CmReply>, VerbsError> {
        self.call(ident, |id| CmRequest::Connect { id, parameters })
    }

    pub fn accept(&mut self, ident: Ident, cookie: u64, qp_number: u32) -> Result<Option<CmReply>, VerbsError> {
        let parameters = ConnectionParameters { qp_number, ..parameters(qp_number) };
        self.call(ident, |id| CmRequest::Accept { id, cookie, parameters })
    }

    pub fn destroy(&mut self, ident: Ident) -> u32 {
        match self.call(ident, |id| CmRequest::DestroyId { id }) {
            Ok(Some(CmReply::Destroyed { event_count })) => event_count,
            other => panic!("{other:?}"),
        }
    }

    /// The requests that a host's listeners heard of, and nothing else.
    pub fn requests(&mut self, of: VnicRef) -> Vec<Ident> {
        let host = (of.0 / 100) as usize;
        let events = self.heard(host);
        events
            .into_iter()
            .filter_map(|event| match event.body {
                CmEventBody::Request { id, .. } => Some(Ident { host, vnic: of, id }),
                _ => None,
            })
            .collect()
    }

    /// Nothing is left, after all have been given time.
    pub fn finish(&mut self) {
        self.run_for(Duration::from_millis(1_000_000));
        for machine in &self.machines {
            assert!(machine.is_empty(), "{:?}", machine.counts());
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ident {
    pub host: usize,
    pub vnic: VnicRef,
    pub id: u32,
}

pub fn parameters(qp_number: u32) -> ConnectionParameters {
    ConnectionParameters {
        private_data: vec![7; 5],
        responder_resources: 4,
        initiator_depth: 2,
        retry_count: 7,
        rnr_retry_count: 6,
        qp_number,
        ..ConnectionParameters::default()
    }
}
