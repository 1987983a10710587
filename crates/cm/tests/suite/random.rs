//! Any calls, any packets, in any order: nothing panics, no counter says what is not so, and
//! nothing is left in the end.
use crate::common::*;
use freeflow_cm::{Limits, Link, Owner, Scope};
use freeflow_protocol::cm::{CmAddress, CmEventBody, CmOption, CmReply, CmRequest, ConnectionParameters, PortSpace};
use freeflow_verbs::{Duration, Gid, QpState, QpType};
use freeflow_wire::cm::{Kind, MAD_BYTES, Mad};
use proptest::collection::vec;
use proptest::prelude::*;

const PORTS: [u16; 4] = [0, 7, 8, 40_000];
const TYPES: [QpType; 5] = [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend, QpType::XrcReceive];
const SPACES: [PortSpace; 4] = [PortSpace::Tcp, PortSpace::Udp, PortSpace::Ib, PortSpace::Ipoib];

struct Chaos {
    world: World,
    /// Handles that were ever given, with whom.
    handles: Vec<Ident>,
    /// Packets that were ever sent, by the host that they were for.
    packets: Vec<(usize, Owned)>,
    removed: Vec<(usize, u64)>,
}

impl Chaos {
    fn pick<T: Copy>(rng: &mut SimRng, of: &[T]) -> T {
        of[rng.roll(of.len() as u64) as usize]
    }

    fn address(rng: &mut SimRng) -> CmAddress {
        let (host, number) = (rng.roll(3) as usize, rng.roll(4));
        let gids = [
            gid(host, number),
            gid(host, number),
            external(host),
            ANY,
            Gid::default(),
            v4(127, 0, 0, 1),
            v4(239, 1, 1, 1),
            v4(9, 9, 9, 9),
        ];
        CmAddress { gid: Self::pick(rng, &gids), port: Self::pick(rng, &PORTS) }
    }

    fn parameters(rng: &mut SimRng) -> ConnectionParameters {
        let length = Self::pick(rng, &[0, 1, 56, 57, 92, 136, 180, 196, 197, 220]);
        ConnectionParameters {
            private_data: vec![rng.draw() as u8; length],
            responder_resources: rng.draw() as u8,
            initiator_depth: rng.draw() as u8,
            retry_count: rng.draw() as u8,
            rnr_retry_count: rng.draw() as u8,
            qp_number: Self::pick(rng, &[0, 2, 3, 4, 0x00ff_ffff, 0x0100_0000]),
            qkey: Self::pick(rng, &[0, 1]),
            ..ConnectionParameters::default()
        }
    }

    fn request(&mut self, rng: &mut SimRng) {
        let known = Ident { host: rng.roll(2) as usize, vnic: vnic(0, 0), id: rng.draw() as u32 };
        // Mostly what is still there.
        let recent = &self.handles[self.handles.len().saturating_sub(30)..];
        let ident = if recent.is_empty() || rng.happens(2) { known } else { Self::pick(rng, recent) };
        let id = ident.id;
        let request = match rng.roll(26) {
            0..2 => CmRequest::CreateId {
                channel: rng.roll(3) as u32,
                port_space: Self::pick(rng, &SPACES),
                qp_type: Self::pick(rng, &TYPES),
                cookie: rng.draw(),
            },
            2..5 => CmRequest::DestroyId { id },
            5 => CmRequest::MigrateId { id, channel: rng.roll(3) as u32 },
            6 => CmRequest::Bind { id, address: Self::address(rng) },
            7 | 8 => {
                let source = rng.happens(30).then(|| Self::address(rng));
                CmRequest::ResolveAddress {
                    id,
                    source,
                    destination: Self::address(rng),
                    timeout_ms: rng.roll(2000) as u32,
                }
            }
            9 => CmRequest::ResolveRoute { id, timeout_ms: rng.roll(2000) as u32 },
            10 => CmRequest::Listen { id, backlog: rng.roll(3) as u32 },
            11 | 12 => CmRequest::Connect { id, parameters: Self::parameters(rng) },
            13 => CmRequest::Accept { id, cookie: rng.draw(), parameters: Self::parameters(rng) },
            14 => {
                let private_data = vec![1; Self::pick(rng, &[0, 148, 149])];
                CmRequest::Reject { id, private_data, ece: rng.happens(50) }
            }
            15 => CmRequest::Establish { id },
            16 if rng.happens(50) => CmRequest::Notify { id },
            16 => CmRequest::Disconnect { id },
            17 => CmRequest::InitQpAttributes { id, state: QpState::ALL[rng.roll(7) as usize] },
            18 => {
                let address = Self::address(rng).gid;
                if rng.happens(50) {
                    CmRequest::JoinMulticast { id, address, send_only: false, cookie: 1 }
                } else {
                    CmRequest::LeaveMulticast { id, address }
                }
            }
            19..22 => CmRequest::Establish { id },
            22..25 => CmRequest::Accept { id, cookie: rng.draw(), parameters: parameters(2 + rng.roll(1000) as u32) },
            _ => {
                let options = [
                    CmOption::ReuseAddress(rng.happens(50)),
                    CmOption::AddressFamilyOnly(rng.happens(50)),
                    CmOption::AckTimeout(rng.roll(40) as u8),
                    CmOption::TypeOfService(rng.draw() as u8),
                ];
                CmRequest::SetOption { id, option: Self::pick(rng, &options) }
            }
        };
        let (host, of) = match request {
            CmRequest::CreateId { .. } => {
                let (host, number) = (rng.roll(2) as usize, rng.roll(3));
                if self.removed.contains(&(host, number)) {
                    return;
                }
                (host, vnic(host, number))
            }
            _ => (ident.host, ident.vnic),
        };
        if let Ok(Some(CmReply::Id { id })) = self.world.ask(host, of.0, of, &request) {
            self.handles.push(Ident { host, vnic: of, id });
        }
    }

    /// A packet that was once sent, spoilt a little, or one of chance alone, from anywhere.
    fn forge(&mut self, rng: &mut SimRng) {
        let (host, mut packet) = if self.packets.is_empty() || rng.happens(10) {
            let mut mad = vec![rng.draw() as u8; MAD_BYTES];
            mad[..4].copy_from_slice(&[1, 7, 2, 3]);
            mad[16..18].copy_from_slice(&[0, 0x10 + rng.roll(Kind::COUNT as u64) as u8]);
            let from = Self::address(rng).gid;
            let to = Self::address(rng).gid;
            (rng.roll(2) as usize, Owned { link: Link::External(1), scope: Scope::External, from, to, mad })
        } else {
            self.packets[rng.roll(self.packets.len() as u64) as usize].clone()
        };
        for _ in 0..rng.roll(4) {
            let at = rng.roll(packet.mad.len() as u64) as usize;
            packet.mad[at] ^= 1 << rng.roll(8);
        }
        if rng.happens(20) {
            packet.from = Self::address(rng).gid;
        }
        if rng.happens(20) {
            packet.link = Self::pick(rng, &[Link::Local, Link::Router(0), Link::Router(1), Link::External(0)]);
        }
        if rng.happens(3) {
            packet.mad.truncate(rng.roll(300) as usize);
        }
        let now = self.world.now;
        let World { machines, around, .. } = &mut self.world;
        machines[host].handle_packet(&mut around[host], now, packet.packet());
    }

    /// First steps of a sensible program, since chance alone hardly ever gets so far.
    fn begin(&mut self, rng: &mut SimRng) {
        let (host, number) = (rng.roll(2) as usize, rng.roll(3));
        let (space, qp_type) =
            if rng.happens(70) { (PortSpace::Tcp, QpType::Rc) } else { (PortSpace::Udp, QpType::Ud) };
        let create = CmRequest::CreateId { channel: 1, port_space: space, qp_type, cookie: rng.draw() };
        let of = vnic(host, number);
        if self.removed.contains(&(host, number)) {
            return;
        }
        let Ok(Some(CmReply::Id { id })) = self.world.ask(host, of.0, of, &create) else { return };
        let ident = Ident { host, vnic: of, id };
        self.handles.push(ident);
        if rng.happens(30) {
            let _ = self.world.bind(ident, ANY, 7);
            let _ = self.world.listen(ident, rng.roll(4) as u32);
        } else {
            let destination = CmAddress { gid: gid(rng.roll(2) as usize, rng.roll(3)), port: 7 };
            let resolve = |id| CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 1 };
            let _ = self.world.call(ident, resolve);
            let _ = self.world.call(ident, |id| CmRequest::ResolveRoute { id, timeout_ms: 1 });
            let _ = self.world.connect(ident, parameters(2 + rng.roll(1000) as u32));
        }
    }

    fn step(&mut self, rng: &mut SimRng) {
        match rng.roll(100) {
            0..15 => self.begin(rng),
            15..60 => self.request(rng),
            60..75 => self.forge(rng),
            75..97 => {
                let until = self.world.now + Duration::from_millis(rng.roll(3000));
                for _ in 0..rng.roll(10) {
                    self.world.step(until);
                }
            }
            97 if rng.happens(20) => {
                let (host, number) = (rng.roll(2) as usize, rng.roll(3));
                let now = self.world.now;
                let World { machines, around, .. } = &mut self.world;
                if rng.happens(3) {
                    machines[host].destroy_vnic(&mut around[host], now, vnic(host, number));
                    self.removed.push((host, number));
                } else {
                    machines[host].destroy_owner(&mut around[host], now, Owner(vnic(host, number).0));
                }
            }
            _ if rng.happens(50) => {
                let host = rng.roll(2) as usize;
                let World { machines, around, .. } = &mut self.world;
                around[host].cut = rng.happens(30);
                if rng.happens(50) {
                    machines[host].handle_new_routes();
                } else {
                    machines[host].handle_new_address(Self::address(rng).gid);
                }
            }
            _ => {
                let host = rng.roll(2) as usize;
                let now = self.world.now;
                let World { machines, around, .. } = &mut self.world;
                let link =
                    Self::pick(rng, &[Link::Router(1 - host as u32), Link::External(1 - host as u32), Link::Local]);
                machines[host].handle_link_down(&mut around[host], now, link);
            }
        }
        self.look();
    }

    fn look(&mut self) {
        for host in 0..2 {
            for packet in &self.world.around[host].sent {
                assert!(Mad::decode(&packet.mad).is_ok());
                let to = match packet.link {
                    Link::Local => host,
                    Link::Router(to) | Link::External(to) => to as usize,
                };
                if to < 2 && self.packets.len() < 500 {
                    self.packets.push((to, packet.clone()));
                }
            }
            for heard in std::mem::take(&mut self.world.around[host].heard) {
                if let CmEventBody::Request { id, .. } = heard.event.body {
                    self.handles.push(Ident { host, vnic: freeflow_cm::VnicRef(heard.owner.0), id });
                }
            }
        }
        self.world.carry();
    }
}

/// How many messages of each kind had an effect.
fn run(seed: u64, steps: usize) -> [u64; Kind::COUNT] {
    let mut rng = SimRng(seed);
    let limits =
        Limits { ids_per_vnic_max: 20, orphans_per_vnic_max: 5, half_open_per_remote_max: 5, ..Limits::default() };
    let mut world = World::with(2, seed, limits);
    world.link_model = LinkModel { lost: 10, doubled: 10, delay_us: 1000 };
    let mut chaos = Chaos { world, handles: Vec::new(), packets: Vec::new(), removed: Vec::new() };
    for _ in 0..steps {
        chaos.step(&mut rng);
    }
    for host in 0..2 {
        let counts = chaos.world.machines[host].counts();
        assert!(counts.established + counts.half_open <= counts.connections);
        assert!(counts.orphans <= 15, "no more than there may be");
        assert!(counts.ids <= 60);
        let now = chaos.world.now;
        let World { machines, around, .. } = &mut chaos.world;
        for number in 0..3 {
            machines[host].destroy_owner(&mut around[host], now, Owner(vnic(host, number).0));
        }
    }
    chaos.world.finish();
    let taken = |at: usize| {
        chaos.world.machines.iter().map(|machine| machine.counts().messages[at]).map(|c| c.received - c.refused).sum()
    };
    std::array::from_fn(taken)
}

/// Chance finds its way to everything.
#[test]
fn chaos_is_not_idle() {
    let mut sum = [0; Kind::COUNT];
    for seed in 0..40 {
        let taken = run(seed, 3000);
        sum.iter_mut().zip(taken).for_each(|(sum, taken)| *sum += taken);
    }
    for kind in Kind::ALL {
        let answered = !matches!(kind, Kind::Lap | Kind::Apr);
        assert_eq!(sum[kind.index()] > 0, answered, "{} {sum:?}", kind.name());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn anything(seed in any::<u64>()) {
        run(seed, 3000);
    }

    /// Bytes of chance alone.
    #[test]
    fn any_bytes(packets in vec(vec(any::<u8>(), 0..300), 0..20)) {
        let mut world = World::new(1, 1);
        for mad in packets {
            let owned = Owned { link: Link::External(3), scope: Scope::External, from: external(3), to: external(0), mad };
            let now = world.now;
            let World { machines, around, .. } = &mut world;
            machines[0].handle_packet(&mut around[0], now, owned.packet());
        }
        world.finish();
    }
}
