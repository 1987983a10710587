//! Participants: processes with their memory, pools of RECVs, connections and datagram parties; how
//! they are set up.
use crate::model::{Area, Expected, Posted, Window};
use crate::rng::Rng;
use crate::sim::{Host, Sim};
use crate::world::MEMORY_BASE;
use freeflow_engine::*;
use freeflow_verbs::*;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};

pub const MEMORY_BYTES: usize = 4 << 20;
/// Bytes that messages are cut from: random, never changed.
pub const SOURCE_BYTES: u64 = 128 << 10;
/// Behind it: registered for nobody's requests.
pub const GUARD_BYTES: u64 = 4096;
pub const TARGET_BYTES: u64 = 128 << 10;
pub const RESULT_BYTES: u64 = 160 << 10;
/// A WRITE or READ is not longer: some bursts, and more than one piece of the largest READ.
pub const RANGE_BYTES_MAX: u64 = 100 << 10;
pub const SLOT_BYTES: u64 = 12 << 10;
/// Requests of one side that are posted and not known to be done.
pub const OUTSTANDING_MAX: usize = 40;
const STAMP_BYTES: u64 = 8 * 64;
pub const REMOTE: Access = Access(0x1f | 1 << 8);
pub const QKEY: u32 = 0x1234;

pub struct Process {
    pub host: usize,
    pub network: NetworkId,
    pub gid: Gid,
    pub vnic: VnicId,
    pub session: SessionId,
    pub context: ContextId,
    pub pd: PdId,
    pub cq: CqId,
    /// All of its memory, for its own requests only.
    pub lkey: u32,
    /// Seed of its memory's first content.
    pub noise: u64,
    next_free: u64,
    pub alive: bool,
    xrcd: Option<XrcdId>,
}

/// RECV buffers of one queue.
pub struct Pool {
    pub process: usize,
    pub queue: ReceiveQueueId,
    pub base: u64,
    /// Whether each slot's RECV is posted.
    pub slots: Vec<bool>,
    pub srqn: u32,
    /// A repost is on its way.
    pub scheduled: bool,
}

pub struct Side {
    pub process: usize,
    pub qp: QpId,
    pub qpn: Qpn,
    /// The QP that receives: another one for XRC.
    pub target: QpId,
    pub target_qpn: Qpn,
    pub pool: usize,
    /// Where the peer may write and read.
    pub area_at: u64,
    pub area_mr: MrId,
    pub area_key: u32,
    pub area: Area,
    pub results_at: u64,
    pub results_used: u64,
    pub stamps_at: u64,
    pub window: Option<Window>,
    /// Requests that it will still post.
    pub quota: u32,
    pub posts: u64,
    pub posted: VecDeque<Posted>,
    /// Messages that the peer sent and this side has not got.
    pub expected: VecDeque<Expected>,
    /// Messages that took a RECV here, since the connection came up.
    pub arrived: u64,
    /// One of its requests failed.
    pub failed: bool,
    /// Its QP is in ERROR, as a completion said.
    pub down: bool,
}

pub struct Connection {
    pub service: QpType,
    pub mtu: PathMtu,
    pub attributes: QpAttributes,
    pub sides: [Side; 2],
    /// Which failures may be seen.
    pub disturbed: bool,
    pub forbidden: bool,
    /// It has few RNR retries: that they are used up is no failure of the engine.
    pub impatient: bool,
    pub reconnects_left: u32,
    pub reconnecting: bool,
    pub closed: bool,
    pub psn: u32,
}

/// A UD QP.
pub struct Party {
    pub process: usize,
    pub qp: QpId,
    pub qpn: Qpn,
    pub pool: usize,
    pub stamps_at: u64,
    pub quota: u32,
    pub posts: u64,
    pub outstanding: VecDeque<u64>,
    /// All it ever sent, by number; the group, if it was to one, or the party.
    pub sent: Vec<(Vec<u8>, Option<usize>)>,
    pub handles: BTreeMap<Gid, u32>,
    pub member: bool,
    /// How often each message (sender, number) came.
    pub got: BTreeMap<(usize, u64), u32>,
}

/// Owner of a QPN of a host.
#[derive(Clone, Copy, Debug)]
pub enum Role {
    /// Send completions of a connection's side.
    Side(usize, usize),
    Party(usize),
}

#[derive(Default)]
pub struct Topology {
    pub processes: Vec<Process>,
    pub pools: Vec<Pool>,
    pub connections: Vec<Connection>,
    pub parties: Vec<Party>,
    pub roles: BTreeMap<(usize, u32), Role>,
    vnics: BTreeMap<(usize, NetworkId, u8), (VnicId, Gid)>,
    /// Limits of each new vNIC.
    pub shaping: Option<Rng>,
}

/// Rates at which what a run sends takes milliseconds.
fn some_limit(rng: &mut Rng) -> RateLimit {
    if rng.one_in(2) {
        return RateLimit::default();
    }
    RateLimit {
        bits_per_s: rng.one_in(2).then(|| rng.between(200_000_000, 5_000_000_000)),
        burst_bytes: rng.one_in(2).then(|| rng.between(1, 100_000)),
        messages_per_s: rng.one_in(2).then(|| rng.between(20_000, 1_000_000)),
        burst_messages: rng.one_in(2).then(|| rng.between(1, 20)),
    }
}

pub fn group() -> Gid {
    Gid::from_ip(IpAddr::V4(Ipv4Addr::new(239, 1, 1, 1)))
}

pub fn address(dgid: Gid) -> AddressHandleAttributes {
    let grh = Some(GlobalRoute { dgid, hop_limit: 64, ..Default::default() });
    AddressHandleAttributes { grh, port: 1, ..Default::default() }
}

impl Connection {
    pub fn new(service: QpType, mtu: PathMtu, attributes: QpAttributes, sides: [Side; 2], psn: u32) -> Self {
        Self {
            service,
            mtu,
            attributes,
            sides,
            disturbed: false,
            forbidden: false,
            impatient: attributes.rnr_retry != 7,
            reconnects_left: 3,
            reconnecting: false,
            closed: false,
            psn: psn & Psn::MASK,
        }
    }
}

impl Topology {
    /// A vNIC of a host; tenants of different networks may have the same addresses.
    fn vnic(&mut self, sim: &mut Sim, host: usize, network: NetworkId, number: u8) -> (VnicId, Gid) {
        if let Some(known) = self.vnics.get(&(host, network, number)) {
            return *known;
        }
        let gid = Gid::from_ip(IpAddr::V4(Ipv4Addr::new(10, 0, host as u8, number + 1)));
        let vnic = sim.hosts[host].engine.create_vnic(network, gid, VnicLimits::default()).expect("a fresh address");
        for viewer in 0..sim.hosts.len() {
            let id = sim.id_of(viewer, host);
            sim.hosts[viewer].world.addresses.insert((network, gid), id);
        }
        if let Some(rng) = &mut self.shaping {
            let tenant = TenantId(network.0);
            let (qp, own, of_tenant) = (some_limit(rng), some_limit(rng), some_limit(rng));
            let (priority, weight) = (rng.roll(8) as u8, rng.between(1, 1000) as u16);
            let shaping = Shaping { qp, vnic: own, tenant: Some(tenant), priority, weight };
            let (now, engine) = (sim.instant(), &mut sim.hosts[host].engine);
            engine.set_tenant_limit(now, tenant, of_tenant).expect("limits that can be");
            engine.set_shaping(now, vnic, shaping).expect("limits that can be");
        }
        self.vnics.insert((host, network, number), (vnic, gid));
        (vnic, gid)
    }

    pub fn process(&mut self, sim: &mut Sim, host: usize, network: NetworkId, number: u8, noise: u64) -> usize {
        let (vnic, gid) = self.vnic(sim, host, network, number);
        let Host { engine, world, .. } = sim.enter(host);
        let session = engine.create_session(vnic).expect("room");
        let context = engine.open_context(session).expect("room");
        let pd = engine.alloc_pd(session, context).expect("room");
        let cq = engine.create_cq(session, context, 4096).expect("room");
        let mut memory = vec![0; MEMORY_BYTES];
        let mut rng = Rng::new(noise);
        for word in memory[..(SOURCE_BYTES + GUARD_BYTES) as usize].chunks_exact_mut(8) {
            word.copy_from_slice(&rng.draw().to_ne_bytes());
        }
        world.memory.insert(session, memory);
        let length = MEMORY_BYTES as u64;
        let keys =
            engine.register_mr(session, pd, MEMORY_BASE, length, MEMORY_BASE, Access::LOCAL_WRITE).expect("room");
        let (lkey, next_free) = (keys.lkey, SOURCE_BYTES + GUARD_BYTES);
        let process = Process {
            host,
            network,
            gid,
            vnic,
            session,
            context,
            pd,
            cq,
            lkey,
            noise,
            next_free,
            alive: true,
            xrcd: None,
        };
        self.processes.push(process);
        self.processes.len() - 1
    }

    pub fn room(&self, process: usize) -> u64 {
        MEMORY_BYTES as u64 - self.processes[process].next_free
    }

    fn reserve(&mut self, process: usize, bytes: u64) -> u64 {
        let process = &mut self.processes[process];
        let at = process.next_free;
        process.next_free += bytes;
        assert!(process.next_free <= MEMORY_BYTES as u64, "the plan fits into memory");
        at
    }

    fn pool(&mut self, process: usize, queue: ReceiveQueueId, slots: usize, srqn: u32) -> usize {
        let base = self.reserve(process, slots as u64 * SLOT_BYTES);
        self.pools.push(Pool { process, queue, base, slots: vec![false; slots], srqn, scheduled: false });
        self.pools.len() - 1
    }

    /// An SRQ and its RECVs; for XRC one with a number.
    pub fn shared_pool(&mut self, sim: &mut Sim, process: usize, xrc: bool) -> usize {
        let xrc = xrc.then(|| (self.xrcd(sim, process), self.processes[process].cq));
        let Process { host, session, pd, .. } = self.processes[process];
        let asked = SrqAttributes { max_wr: 64, max_sge: 4, limit: 0 };
        let cookie = self.pools.len() as u32;
        let (srq, srqn, _) = sim.hosts[host].engine.create_srq(session, pd, asked, xrc, cookie).expect("room");
        self.pool(process, ReceiveQueueId::Srq(srq), 16, srqn)
    }

    fn xrcd(&mut self, sim: &mut Sim, process: usize) -> XrcdId {
        let Process { host, session, context, ref mut xrcd, .. } = self.processes[process];
        *xrcd.get_or_insert_with(|| {
            sim.hosts[host].engine.open_xrcd(session, context, None, XrcdOpenFlags::CREATE).expect("room")
        })
    }

    fn qp(&mut self, sim: &mut Sim, process: usize, qp_type: QpType, srq: Option<SrqId>) -> (QpId, Qpn) {
        let (target, initiator) = (qp_type == QpType::XrcReceive, qp_type == QpType::XrcSend);
        let xrcd = target.then(|| self.xrcd(sim, process));
        let Process { host, session, pd, cq, .. } = self.processes[process];
        let capabilities = QpCapabilities {
            max_send_wr: 64,
            max_recv_wr: 64,
            max_send_sge: 8,
            max_recv_sge: 8,
            max_inline_data: INLINE_BYTES_MAX as u32,
        };
        let init = QpInit {
            pd: (!target).then_some(pd),
            qp_type,
            send_cq: (!target).then_some(cq),
            recv_cq: (!target && !initiator).then_some(cq),
            srq: srq.filter(|_| !target && !initiator),
            xrcd,
            block_own_multicast: false,
            capabilities,
            all_signaled: false,
            cookie: 77,
        };
        let (qp, qpn, _) = sim.hosts[host].engine.create_qp(session, init).expect("room");
        (qp, qpn)
    }

    /// One end of a connection. `pool`: an SRQ to receive with.
    pub fn side(&mut self, sim: &mut Sim, process: usize, service: QpType, pool: Option<usize>) -> Side {
        let srq = pool.and_then(|pool| match self.pools[pool].queue {
            ReceiveQueueId::Srq(srq) => Some(srq),
            ReceiveQueueId::Qp(_) => None,
        });
        let (qp, qpn) = self.qp(sim, process, service, srq);
        let (target, target_qpn) =
            if service == QpType::XrcSend { self.qp(sim, process, QpType::XrcReceive, None) } else { (qp, qpn) };
        let pool = pool.unwrap_or_else(|| self.pool(process, ReceiveQueueId::Qp(qp), 8, 0));
        let area_at = self.reserve(process, TARGET_BYTES);
        let results_at = self.reserve(process, RESULT_BYTES);
        let stamps_at = self.reserve(process, STAMP_BYTES);
        let mut side = Side {
            process,
            qp,
            qpn,
            target,
            target_qpn,
            pool,
            area_at,
            area_mr: MrId { index: 0, generation: 0 },
            area_key: 0,
            area: Area::new(TARGET_BYTES as usize),
            results_at,
            results_used: 0,
            stamps_at,
            window: None,
            quota: 0,
            posts: 0,
            posted: VecDeque::new(),
            expected: VecDeque::new(),
            arrived: 0,
            failed: false,
            down: false,
        };
        self.open_area(sim, &mut side);
        side
    }

    /// Lets the peer in.
    pub fn open_area(&mut self, sim: &mut Sim, side: &mut Side) {
        let Process { host, session, pd, .. } = self.processes[side.process];
        let at = MEMORY_BASE + side.area_at;
        let keys = sim.hosts[host].engine.register_mr(session, pd, at, TARGET_BYTES, at, REMOTE).expect("room");
        (side.area_mr, side.area_key) = (keys.mr, keys.rkey);
    }

    pub fn party(&mut self, sim: &mut Sim, process: usize, member: bool) -> usize {
        let (qp, qpn) = self.qp(sim, process, QpType::Ud, None);
        let pool = self.pool(process, ReceiveQueueId::Qp(qp), 8, 0);
        let stamps_at = self.reserve(process, STAMP_BYTES);
        let host = self.processes[process].host;
        let party = Party {
            process,
            qp,
            qpn,
            pool,
            stamps_at,
            quota: 0,
            posts: 0,
            outstanding: VecDeque::new(),
            sent: Vec::new(),
            handles: BTreeMap::new(),
            member,
            got: BTreeMap::new(),
        };
        let index = self.parties.len();
        self.parties.push(party);
        self.roles.insert((host, qpn.0), Role::Party(index));
        use QpAttributeMask as M;
        let attributes = QpAttributes { port: 1, qkey: QKEY, ..Default::default() };
        self.modify(sim, process, qp, QpState::Init, &attributes, M::PKEY_INDEX | M::PORT | M::QKEY).expect("allowed");
        self.modify(sim, process, qp, QpState::ReadyToReceive, &attributes, 0).expect("allowed");
        self.modify(sim, process, qp, QpState::ReadyToSend, &attributes, M::SQ_PSN).expect("allowed");
        if member {
            let session = self.processes[process].session;
            sim.enter(host).engine.attach_multicast(session, qp, group()).expect("room");
            sim.after(host);
        }
        index
    }

    /// The address handle of a party for an address.
    pub fn handle(&mut self, sim: &mut Sim, party: usize, gid: Gid) -> u32 {
        let Process { host, session, pd, .. } = self.processes[self.parties[party].process];
        let make = || sim.hosts[host].engine.create_ah(session, pd, &address(gid)).expect("room").index;
        *self.parties[party].handles.entry(gid).or_insert_with(make)
    }

    pub fn modify(
        &self,
        sim: &mut Sim,
        process: usize,
        qp: QpId,
        state: QpState,
        attributes: &QpAttributes,
        mask: u32,
    ) -> Result<QpState, Refusal> {
        let Process { host, session, .. } = self.processes[process];
        let attributes = QpAttributes { state, ..*attributes };
        let now = sim.instant();
        let Host { engine, world, .. } = sim.enter(host);
        let mask = QpAttributeMask(mask | QpAttributeMask::STATE);
        let result = engine.modify_qp(world, now, session, qp, &attributes, mask);
        sim.after(host);
        result
    }

    /// All QPs of a connection from RESET to RTS.
    pub fn connect(&mut self, sim: &mut Sim, connection: usize) {
        for side in 0..2 {
            let this = &self.connections[connection];
            let (mine, peer) = (&this.sides[side], &this.sides[1 - side]);
            let (qp, target) = (mine.qp, mine.target);
            let (peer_qpn, peer_target) = (peer.qpn, peer.target_qpn);
            self.connect_one(sim, connection, side, qp, peer_target);
            if target != qp {
                self.connect_one(sim, connection, side, target, peer_qpn);
            }
        }
    }

    /// One QP of a side, to a QP of the other side's process: whichever.
    pub fn connect_one(&mut self, sim: &mut Sim, connection: usize, side: usize, qp: QpId, peer: Qpn) {
        use QpAttributeMask as M;
        let this = &self.connections[connection];
        let (mine, other) = (&this.sides[side], &this.sides[1 - side]);
        let service = match (this.service, qp == mine.qp) {
            (QpType::XrcSend, false) => QpType::XrcReceive,
            (service, _) => service,
        };
        let (process, gid) = (mine.process, self.processes[other.process].gid);
        let host = self.processes[process].host;
        let attributes = QpAttributes {
            port: 1,
            access: REMOTE,
            address: address(gid),
            dest_qpn: peer.0,
            path_mtu: this.mtu,
            rq_psn: (this.psn + 1000 * (1 - side as u32)) & Psn::MASK,
            sq_psn: (this.psn + 1000 * side as u32) & Psn::MASK,
            ..this.attributes
        };
        let path = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
        let receiver = M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        let (rtr, rts) = match service {
            QpType::Rc => (path | receiver, M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC),
            QpType::XrcSend => (path, M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC),
            QpType::XrcReceive => (path | receiver, M::TIMEOUT),
            QpType::Uc | QpType::Ud => (path, 0),
        };
        let init = M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
        let mtu = this.mtu.bytes() as usize;
        let own_number = if qp == mine.qp { mine.qpn } else { mine.target_qpn };
        self.modify(sim, process, qp, QpState::Init, &attributes, init).expect("allowed");
        self.modify(sim, process, qp, QpState::ReadyToReceive, &attributes, rtr).expect("allowed");
        self.modify(sim, process, qp, QpState::ReadyToSend, &attributes, rts | M::SQ_PSN).expect("allowed");
        for viewer in 0..sim.hosts.len() {
            let id = sim.id_of(viewer, host);
            sim.hosts[viewer].world.mtus.insert((id, own_number.0), mtu);
        }
        self.roles.insert((host, own_number.0), Role::Side(connection, side));
    }
}
