//! The connection managers of two hosts: requests of programs, packets of anybody, time and ends,
//! in any order. The link between them loses, doubles, reorders and changes packets.
use crate::bytes::Input;
use freeflow_cm::{
    Asked, Environment, EventChannel, GID_COUNT, Limits, Link, Machine, Owner, Packet, Route, Scope, ScopedGid, Timing,
    VnicRef,
};
use freeflow_protocol::cm::{
    CM_EVENT_BYTES_MAX, CmAddress, CmEvent, CmEventBody, CmOption, CmReply, CmRequest, ConnectionParameters, Ece,
    PortSpace,
};
use freeflow_protocol::encode;
use freeflow_verbs::{Duration, Gid, Instant, NetworkId, PathMtu, QpState, QpType, VerbsError};
use freeflow_wire::cm::Mad;
use std::collections::{BTreeSet, VecDeque};
use std::net::Ipv4Addr;

const HOST_COUNT: usize = 2;
/// vNICs of one host. Each has one owner, whose number is the vNIC's.
const VNICS_PER_HOST: u64 = 2;
const IDS_PER_VNIC_MAX: u32 = 8;
const ORPHANS_PER_VNIC_MAX: u32 = 3;
/// Packets between the machines; the oldest is lost beyond.
const PACKET_COUNT_MAX: usize = 32;
/// Steps of one input.
const STEP_COUNT_MAX: usize = 256;
/// Timers and packets until nothing is left after the last identifier: far more than there can be.
const FINAL_STEP_COUNT_MAX: usize = 4096;
const CHANNELS: [u32; 2] = [1, 2];
const PORTS: [u16; 3] = [0, 7, 40_000];
const SPACES: [(PortSpace, QpType); 4] = [
    (PortSpace::Tcp, QpType::Rc),
    (PortSpace::Udp, QpType::Ud),
    (PortSpace::Ib, QpType::XrcSend),
    (PortSpace::Ipoib, QpType::Ud),
];
const NETWORK: Scope = Scope::Network(NetworkId(1));
const ANY: Gid = Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0]);

fn v4(a: u8, b: u8, c: u8, d: u8) -> Gid {
    Gid::from_ip(Ipv4Addr::new(a, b, c, d).into())
}

fn own_gid(host: usize, number: u64) -> Gid {
    v4(10, 0, host as u8, number as u8 + 1)
}

fn external_gid(host: usize) -> Gid {
    v4(192, 0, 2, host as u8 + 1)
}

fn vnic(host: usize, number: u64) -> VnicRef {
    VnicRef(host as u64 * 100 + number)
}

fn limits() -> Limits {
    let timing = Timing {
        retry_interval: Duration::from_millis(100),
        retry_count_max: 2,
        time_wait: Duration::from_millis(100),
    };
    Limits {
        ids_per_vnic_max: IDS_PER_VNIC_MAX,
        orphans_per_vnic_max: ORPHANS_PER_VNIC_MAX,
        half_open_per_remote_max: 4,
        backlog_min: 2,
        backlog_max: 4,
        memberships_per_id_max: 2,
        memberships_per_vnic_max: 4,
        local: timing,
        router: timing,
        external: timing,
        ..Limits::default()
    }
}

#[derive(Clone)]
struct Owned {
    link: Link,
    scope: Scope,
    from: Gid,
    to: Gid,
    mad: Vec<u8>,
}

/// Surroundings of one machine.
struct Surroundings {
    host: usize,
    random: u32,
    sent: Vec<Owned>,
    heard: Vec<(Owner, CmEvent)>,
    is_cut_off: bool,
    is_denied: bool,
    /// The environment brings QPs to RTS by itself.
    prepares: bool,
}

impl Environment for Surroundings {
    fn random(&mut self) -> u32 {
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.random
    }

    fn addresses(&self, of: VnicRef) -> [Option<ScopedGid>; GID_COUNT] {
        let number = of.0 % 100;
        if of.0 / 100 != self.host as u64 || number >= VNICS_PER_HOST {
            return [None; GID_COUNT];
        }
        let own = ScopedGid { scope: NETWORK, gid: own_gid(self.host, number) };
        let shared = ScopedGid { scope: Scope::External, gid: external_gid(self.host) };
        [Some(own), Some(shared), None]
    }

    fn vnic_at(&self, address: ScopedGid) -> Option<VnicRef> {
        let is_at = |number: &u64| own_gid(self.host, *number) == address.gid;
        let found = (0..VNICS_PER_HOST).find(is_at).filter(|_| address.scope == NETWORK);
        found.map(|number| vnic(self.host, number))
    }

    fn route(&self, of: VnicRef, from: Option<Gid>, to: Gid) -> Result<Route, VerbsError> {
        let [a, b, c, d] = to.to_ipv4().ok_or(VerbsError::Unreachable)?.octets();
        let (index, link) = match (a, b) {
            (10, 0) if usize::from(c) == self.host && u64::from(d) <= VNICS_PER_HOST => (0, Link::Local),
            (10, 0) if usize::from(c) < HOST_COUNT => (0, Link::Router(c.into())),
            (192, 0) if external_gid(self.host) == to => (1, Link::Local),
            (192, 0) => (1, Link::External(u32::from(d).wrapping_sub(1))),
            _ => return Err(VerbsError::Unreachable),
        };
        let local = self.addresses(of)[index].ok_or(VerbsError::Unreachable)?;
        if self.is_cut_off || from.is_some_and(|gid| gid != local.gid) {
            return Err(VerbsError::Unreachable);
        }
        Ok(Route { link, local, remote: to, gid_index: index as u8, mtu: PathMtu::Mtu4096 })
    }

    fn send(&mut self, packet: Packet<'_>) {
        assert!(Mad::decode(packet.mad).is_ok(), "a machine sends MADs");
        let Packet { link, scope, from, to, mad } = packet;
        self.sent.push(Owned { link, scope, from, to, mad: mad.to_vec() });
    }

    fn prepares(&mut self, _: Owner, _: u32, _: Ece) -> bool {
        self.prepares
    }

    fn notify(&mut self, owner: Owner, channel: EventChannel, event: CmEvent) {
        assert!(CHANNELS.contains(&channel), "an event goes to a channel that its owner named");
        assert!(encode(&event).len() <= CM_EVENT_BYTES_MAX, "an event fits into its record");
        self.heard.push((owner, event));
    }

    fn allows(&self, _: VnicRef, _: ScopedGid, _: CmAddress, _: Asked) -> bool {
        !self.is_denied
    }
}

/// An identifier that its program knows.
#[derive(Clone, Copy)]
struct Known {
    host: usize,
    vnic: VnicRef,
    id: u32,
    /// Its own, and that of its memberships.
    cookie: u64,
    /// Events with this cookie.
    event_count: u32,
}

struct World {
    now: Instant,
    machines: Vec<Machine>,
    around: Vec<Surroundings>,
    /// On their way, with the host that they are for.
    packets: VecDeque<(usize, Owned)>,
    known: Vec<Known>,
    last_cookie: u64,
}

impl World {
    fn new() -> Self {
        let around = |host: usize| Surroundings {
            host,
            random: host as u32,
            sent: Vec::new(),
            heard: Vec::new(),
            is_cut_off: false,
            is_denied: false,
            prepares: false,
        };
        Self {
            now: Instant(1_000_000),
            machines: (0..HOST_COUNT).map(|_| Machine::new(limits())).collect(),
            around: (0..HOST_COUNT).map(around).collect(),
            packets: VecDeque::new(),
            known: Vec::new(),
            last_cookie: 0,
        }
    }

    /// `None`: the input has ended.
    fn step(&mut self, input: &mut Input<'_>) -> Option<()> {
        match input.u8()? % 16 {
            0 => drop(self.create(input.u8()?)),
            1..6 => self.ask_anything(input)?,
            6 => self.listen(input.u8()?),
            7 | 8 => self.connect(input.u8()?, input.u8()?),
            9 => self.deliver(input.u8()?, false),
            10 => self.deliver(input.u8()?, true),
            11 => self.change(input)?,
            12 => self.forge(input)?,
            13 => self.pass(Duration::from_millis(input.u16()?.into())),
            14 => self.disturb(input.u8()?),
            _ => (0..PACKET_COUNT_MAX).for_each(|_| self.deliver(0, false)),
        }
        Some(())
    }

    fn ask(&mut self, host: usize, of: VnicRef, request: &CmRequest) -> Result<Option<CmReply>, VerbsError> {
        let (machine, around) = (&mut self.machines[host], &mut self.around[host]);
        let answer = machine.handle_request(around, self.now, Owner(of.0), of, request);
        self.hear(host);
        answer
    }

    /// Counts the events of a host's identifiers, and takes what was sent onto its way.
    fn hear(&mut self, host: usize) {
        for (owner, event) in std::mem::take(&mut self.around[host].heard) {
            let found = self.known.iter_mut().find(|known| known.cookie == event.cookie);
            let known = found.expect("an event is of an identifier that is there");
            assert_eq!((known.host, known.vnic.0), (host, owner.0), "an event is its owner's");
            known.event_count += 1;
            if let CmEventBody::Request { id, .. } = event.body {
                let (of, cookie) = (known.vnic, self.new_cookie());
                let is_new = self.known.iter().all(|known| (known.host, known.id) != (host, id));
                assert!(is_new, "a request is an identifier of its own");
                self.known.push(Known { host, vnic: of, id, cookie, event_count: 0 });
            }
        }
        for packet in std::mem::take(&mut self.around[host].sent) {
            let to = match packet.link {
                Link::Local => host,
                Link::Router(to) | Link::External(to) => to as usize,
            };
            let link = match packet.link {
                Link::Local => Link::Local,
                Link::Router(_) => Link::Router(host as u32),
                Link::External(_) => Link::External(host as u32),
            };
            if to < HOST_COUNT {
                self.packets.push_back((to, Owned { link, ..packet }));
            }
        }
        while self.packets.len() > PACKET_COUNT_MAX {
            self.packets.pop_front();
        }
    }

    /// Forgets what is not there any more, such as requests of a listener that is gone.
    fn look(&mut self) {
        let mut there = BTreeSet::new();
        for (host, machine) in self.machines.iter().enumerate() {
            let counts = machine.counts();
            assert!(counts.ids <= (IDS_PER_VNIC_MAX as u64 * VNICS_PER_HOST) as usize, "{counts:?}");
            assert!(counts.orphans <= (ORPHANS_PER_VNIC_MAX as u64 * VNICS_PER_HOST) as usize, "{counts:?}");
            assert!(counts.established + counts.half_open <= counts.connections, "{counts:?}");
            let listed = machine.list(None, usize::MAX);
            assert_eq!(listed.len(), counts.ids, "each is listed once");
            there.extend(listed.into_iter().map(|id| (host, id.vnic, id.handle)));
        }
        self.known.retain(|known| there.contains(&(known.host, known.vnic, known.id)));
        assert_eq!(self.known.len(), there.len(), "programs know of all");
    }

    fn new_cookie(&mut self) -> u64 {
        self.last_cookie += 1;
        self.last_cookie
    }

    fn create(&mut self, choice: u8) -> Option<Known> {
        let choice = usize::from(choice);
        let host = choice % HOST_COUNT;
        let of = vnic(host, choice as u64 / 2 % VNICS_PER_HOST);
        let (port_space, qp_type) = SPACES[choice / 4 % SPACES.len()];
        let cookie = self.new_cookie();
        let create = CmRequest::CreateId { channel: CHANNELS[0], port_space, qp_type, cookie };
        let id = match self.ask(host, of, &create) {
            Ok(Some(CmReply::Id { id })) => id,
            answer => {
                assert_eq!(answer, Err(VerbsError::NoMemory), "for want of room alone");
                return None;
            }
        };
        let known = Known { host, vnic: of, id, cookie, event_count: 0 };
        self.known.push(known);
        Some(known)
    }

    /// Any request about any identifier, by its program or another's.
    fn ask_anything(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (which, who) = (usize::from(input.u8()?), input.u8()?);
        let Some(at) = which.checked_rem(self.known.len()) else { return Some(()) };
        let known = self.known[at];
        let request = request_of(known, input)?;
        let of = if who == 0xff { vnic(known.host, VNICS_PER_HOST) } else { known.vnic };
        let answer = self.ask(known.host, of, &request);
        if of != known.vnic {
            assert_eq!(answer, Err(VerbsError::NotFound), "an identifier is its owner's alone");
        } else if let CmRequest::DestroyId { .. } = request {
            let event_count = self.known[at].event_count;
            assert_eq!(answer, Ok(Some(CmReply::Destroyed { event_count })), "all its events are counted");
        }
        Some(())
    }

    /// A listener, as a sensible program makes it: hardly any input finds that way.
    fn listen(&mut self, choice: u8) {
        let Some(Known { host, vnic, id, .. }) = self.create(choice) else { return };
        let address = CmAddress { gid: ANY, port: PORTS[1] };
        let _ = self.ask(host, vnic, &CmRequest::Bind { id, address });
        let _ = self.ask(host, vnic, &CmRequest::Listen { id, backlog: (choice >> 4).into() });
    }

    /// A connection's first half, the same way.
    fn connect(&mut self, choice: u8, to: u8) {
        let Some(Known { host, vnic, id, .. }) = self.create(choice) else { return };
        let destination = CmAddress { gid: address(to), port: PORTS[1] };
        let resolve = CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 10 };
        let _ = self.ask(host, vnic, &resolve);
        let _ = self.ask(host, vnic, &CmRequest::ResolveRoute { id, timeout_ms: 10 });
        let parameters = ConnectionParameters { qp_number: id & 0xffff, ..ConnectionParameters::default() };
        let _ = self.ask(host, vnic, &CmRequest::Connect { id, parameters });
    }

    /// A packet on its way arrives, out of turn perhaps.
    fn deliver(&mut self, which: u8, stays: bool) {
        let Some(at) = usize::from(which).checked_rem(self.packets.len()) else { return };
        let (host, packet) =
            if stays { self.packets[at].clone() } else { self.packets.remove(at).expect("it is inside") };
        self.arrive(host, &packet);
    }

    fn arrive(&mut self, host: usize, packet: &Owned) {
        let Owned { link, scope, from, to, ref mad } = *packet;
        let packet = Packet { link, scope, from, to, mad };
        self.machines[host].handle_packet(&mut self.around[host], self.now, packet);
        self.hear(host);
    }

    /// Bits of a packet on its way, or its length or sender.
    fn change(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (which, at, value) = (usize::from(input.u8()?), usize::from(input.u16()?), input.u8()?);
        let Some(which) = which.checked_rem(self.packets.len()) else { return Some(()) };
        let packet = &mut self.packets[which].1;
        match at {
            0x200 => packet.mad.truncate(value.into()),
            0x201 => packet.from = address(value),
            0x202 => packet.to = address(value),
            _ if packet.mad.is_empty() => {}
            _ => {
                let at = at % packet.mad.len();
                packet.mad[at] ^= value;
            }
        }
        Some(())
    }

    /// A packet of somebody who is no router.
    fn forge(&mut self, input: &mut Input<'_>) -> Option<()> {
        let (choice, from, to) = (input.u8()?, address(input.u8()?), address(input.u8()?));
        let host = usize::from(choice) % HOST_COUNT;
        let (link, scope) = match choice / 2 % 3 {
            0 => (Link::External((choice >> 4).into()), Scope::External),
            1 => (Link::Router((choice >> 4).into()), NETWORK),
            _ => (Link::Local, NETWORK),
        };
        let mad = input.chunk()?.to_vec();
        self.arrive(host, &Owned { link, scope, from, to, mad });
        Some(())
    }

    fn pass(&mut self, span: Duration) {
        self.now = self.now + span;
        for host in 0..HOST_COUNT {
            self.machines[host].handle_timeout(&mut self.around[host], self.now);
            let next = self.machines[host].poll_timeout();
            assert!(next.is_none_or(|next| next > self.now), "what was due is done");
            self.hear(host);
        }
    }

    /// An environment's events, and ends.
    fn disturb(&mut self, choice: u8) {
        let host = usize::from(choice) % HOST_COUNT;
        let of = vnic(host, u64::from(choice >> 4) % VNICS_PER_HOST);
        let (now, machine, around) = (self.now, &mut self.machines[host], &mut self.around[host]);
        match choice / 2 % 8 {
            0 => machine.destroy_owner(around, now, Owner(of.0)),
            1 => machine.destroy_vnic(around, now, of),
            2 => machine.handle_link_down(around, now, Link::Router(1 - host as u32)),
            3 => {
                around.is_cut_off ^= true;
                machine.handle_new_routes();
            }
            4 => machine.handle_new_address(own_gid(1 - host, 0)),
            5 => {
                around.is_denied ^= true;
                machine.handle_policy_changed();
            }
            6 => machine.poll_policy(around, now, 4),
            _ if choice >> 4 == 0 => around.prepares ^= true,
            _ => {
                for known in self.known.iter().filter(|known| known.host == host) {
                    machine.handle_prepared(around, known.id, choice >> 4 != 1);
                }
            }
        }
        self.hear(host);
    }

    /// Programs end, and with them in the end everything.
    fn finish(&mut self) {
        for host in 0..HOST_COUNT {
            for number in 0..VNICS_PER_HOST {
                let owner = Owner(vnic(host, number).0);
                self.machines[host].destroy_owner(&mut self.around[host], self.now, owner);
            }
            self.hear(host);
        }
        for _ in 0..FINAL_STEP_COUNT_MAX {
            if !self.packets.is_empty() {
                self.deliver(0, false);
                continue;
            }
            let Some(next) = self.machines.iter().filter_map(Machine::poll_timeout).min() else { break };
            self.pass(next - self.now);
        }
        for machine in &self.machines {
            assert!(machine.is_empty(), "something is left: {:?}", machine.counts());
        }
    }
}

/// An address of somebody, of nobody, or of no kind that there is.
fn address(choice: u8) -> Gid {
    let (host, number) = (usize::from(choice) % HOST_COUNT, u64::from(choice >> 1) % (VNICS_PER_HOST + 1));
    match choice >> 4 {
        0..8 => own_gid(host, number),
        8..11 => external_gid(host),
        11 => ANY,
        12 => Gid::default(),
        13 => v4(127, 0, 0, 1),
        14 => v4(239, 1, 1, number as u8),
        _ => v4(9, 9, 9, 9),
    }
}

fn parameters_of(input: &mut Input<'_>) -> Option<ConnectionParameters> {
    let (length, flags, number) = (usize::from(input.u8()?), input.u8()?, input.u16()?);
    Some(ConnectionParameters {
        private_data: vec![flags; length],
        responder_resources: flags,
        initiator_depth: flags.rotate_left(4),
        flow_control: flags & 1 != 0,
        srq: flags & 2 != 0,
        qp_number: u32::from(number) << (flags & 15),
        qkey: (flags >> 6).into(),
        ..ConnectionParameters::default()
    })
}

/// `None`: the input has ended.
fn request_of(known: Known, input: &mut Input<'_>) -> Option<CmRequest> {
    let Known { id, cookie, .. } = known;
    let kind = input.u8()?;
    Some(match kind % 16 {
        0 => CmRequest::DestroyId { id },
        1 => CmRequest::MigrateId { id, channel: CHANNELS[usize::from(kind >> 4) % CHANNELS.len()] },
        2 => CmRequest::Bind { id, address: cm_address(input)? },
        3 => {
            let source = if kind & 0x10 == 0 { None } else { Some(cm_address(input)?) };
            CmRequest::ResolveAddress { id, source, destination: cm_address(input)?, timeout_ms: input.u8()?.into() }
        }
        4 => CmRequest::ResolveRoute { id, timeout_ms: input.u8()?.into() },
        5 => CmRequest::Listen { id, backlog: input.u8()?.into() },
        6 => CmRequest::Connect { id, parameters: parameters_of(input)? },
        7 | 8 => CmRequest::Accept { id, cookie, parameters: parameters_of(input)? },
        9 => {
            let private_data = vec![1; usize::from(input.u8()?)];
            CmRequest::Reject { id, private_data, ece: kind & 0x10 != 0 }
        }
        10 => CmRequest::Establish { id },
        11 => CmRequest::Notify { id },
        12 => CmRequest::Disconnect { id },
        13 => CmRequest::InitQpAttributes { id, state: QpState::ALL[usize::from(input.u8()?) % QpState::ALL.len()] },
        14 if kind & 0x10 == 0 => CmRequest::LeaveMulticast { id, address: address(input.u8()?) },
        14 => CmRequest::JoinMulticast { id, address: address(input.u8()?), send_only: false, cookie },
        _ => {
            let value = input.u8()?;
            let option = match kind >> 4 & 3 {
                0 => CmOption::TypeOfService(value),
                1 => CmOption::ReuseAddress(value & 1 != 0),
                2 => CmOption::AddressFamilyOnly(value & 1 != 0),
                _ => CmOption::AckTimeout(value),
            };
            CmRequest::SetOption { id, option }
        }
    })
}

fn cm_address(input: &mut Input<'_>) -> Option<CmAddress> {
    let (gid, port) = (address(input.u8()?), input.u8()?);
    Some(CmAddress { gid, port: PORTS[usize::from(port) % PORTS.len()] })
}

pub fn run(bytes: &[u8]) {
    let (mut world, mut input) = (World::new(), Input(bytes));
    for _ in 0..STEP_COUNT_MAX {
        if world.step(&mut input).is_none() {
            break;
        }
        world.look();
    }
    world.finish();
}
