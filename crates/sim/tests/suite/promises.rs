//! Promises of QP attributes when the other end is gone, and memory that a tenant can't reach
//! whatever it names.
use freeflow_sim::carrier::CarrierModel;
use freeflow_sim::fabric::LinkModel;
use freeflow_sim::shards::ShardModel;
use freeflow_sim::sim::{Host, HostModel, Sim};
use freeflow_sim::topology::{Connection, REMOTE, Topology};
use freeflow_sim::world::{MEMORY_BASE, OutcomeRates};
use freeflow_verbs::*;

const DELAY_NS: u64 = 10_000;

fn sim(seed: u64) -> Sim {
    sim_of(seed, &[1, 1])
}

/// Of hosts with so many engines.
fn sim_of(seed: u64, shards: &[u8]) -> Sim {
    let host_model = HostModel {
        link_model: LinkModel { delay_ns: DELAY_NS, ..LinkModel::default() },
        outcome_rates: OutcomeRates::default(),
        carrier_model: CarrierModel::default(),
        landing_ns_max: 1,
        turn_ns: 1_000,
        control_ns: 20_000,
        control_jitter_ns: 0,
        forgeries: 0,
        restores: 0,
    };
    let shard_model = ShardModel { strays: 100_000, delay_ns_max: 2_000, room_bytes: 1 << 20 };
    Sim::with_shards(seed, shards, host_model, shard_model)
}

fn attributes(timeout: u8, retry_count: u8) -> QpAttributes {
    QpAttributes {
        timeout,
        retry_count,
        rnr_retry: 7,
        max_rd_atomic: 1,
        max_dest_rd_atomic: 1,
        min_rnr_timer: 1,
        ..QpAttributes::default()
    }
}

/// A connection between two processes, which are made with it.
fn connection(sim: &mut Sim, topology: &mut Topology, networks: [u32; 2], attributes: QpAttributes) -> usize {
    between(sim, topology, [(0, networks[0]), (1, networks[1])], attributes)
}

/// The same between engines.
fn between(sim: &mut Sim, topology: &mut Topology, ends: [(usize, u32); 2], attributes: QpAttributes) -> usize {
    let sides = ends.map(|(host, network)| {
        let process = topology.process(sim, host, NetworkId(network), 0, 1);
        topology.side(sim, process, QpType::Rc, None)
    });
    topology.connections.push(Connection::new(QpType::Rc, PathMtu::Mtu1024, attributes, sides, 0xff_ff00));
    topology.connections.len() - 1
}

/// A WRITE of the first side of a connection, signaled.
fn post(sim: &mut Sim, topology: &Topology, connection: usize, id: u64, (key, address): (u32, u64)) {
    let side = &topology.connections[connection].sides[0];
    let process = &topology.processes[side.process];
    let mut request = SendRequest {
        work_request_id: id,
        opcode: SendOpcode::RdmaWrite,
        flags: SendFlags(SendFlags::SIGNALED),
        sge_count: 1,
        remote_address: address,
        rkey: key,
        ..Default::default()
    };
    request.sges[0] = Sge { address: MEMORY_BASE, length: 3000, lkey: process.lkey };
    sim.hosts[process.host].world.sends.entry(side.qp).or_default().posted.push_back(request);
    sim.ring(process.host, side.qp);
}

/// The next completion of the first host.
fn completion(sim: &mut Sim) -> Completion {
    completion_of(sim, 0)
}

fn completion_of(sim: &mut Sim, host: usize) -> Completion {
    loop {
        if let Some((_, done)) = sim.harvest(host).first() {
            return *done;
        }
        assert_eq!(sim.step(), None, "nothing happens any more");
        assert!(sim.now < 1_000_000_000_000);
    }
}

fn area(topology: &Topology, connection: usize, side: usize) -> (u32, u64) {
    let side = &topology.connections[connection].sides[side];
    (side.area_key, MEMORY_BASE + side.area_at)
}

#[test]
fn retries_are_exceeded_in_the_time_that_attributes_promise() {
    for (timeout, retry_count) in [(8, 0), (8, 7), (10, 3), (14, 2), (14, 7)] {
        let (mut sim, mut topology) = (sim(1), Topology::default());
        let connection = connection(&mut sim, &mut topology, [1, 1], attributes(timeout, retry_count));
        topology.connect(&mut sim, connection);
        let target = area(&topology, connection, 1);
        post(&mut sim, &topology, connection, 1, target);
        assert_eq!(completion(&mut sim).status, CompletionStatus::Success);
        sim.fabric.down.insert(1);
        let begun = sim.now;
        post(&mut sim, &topology, connection, 2, target);
        let done = completion(&mut sim);
        assert_eq!((done.work_request_id, done.status), (2, CompletionStatus::RetryExceeded));
        let waited = sim.now - begun;
        // A timeout lasts one to four times what is said (IBTA 9.7.6.1.3).
        let once = (4096 << timeout) * (u64::from(retry_count) + 1);
        assert!((once..=4 * once).contains(&waited), "{timeout} {retry_count}: {waited} ns, {once} ns said");
    }
}

/// A tenant of network 2 knows everything of a connection of network 1, whose ends have the very
/// same addresses: QPNs, PSNs, keys. Nothing of it reaches the other network.
#[test]
fn who_knows_all_of_another_network_reaches_nothing_of_it() {
    let (mut sim, mut topology) = (sim(2), Topology::default());
    let victim = connection(&mut sim, &mut topology, [1, 1], attributes(8, 1));
    let attacker = connection(&mut sim, &mut topology, [2, 2], attributes(8, 1));
    topology.connect(&mut sim, victim);
    let (victim_qpn, target) = (topology.connections[victim].sides[1].qpn, area(&topology, victim, 1));
    let gids = [victim, attacker].map(|connection| {
        let sides = &topology.connections[connection].sides;
        [0, 1].map(|side| topology.processes[sides[side].process].gid)
    });
    assert_eq!(gids[0], gids[1]);
    let attackers_qp = topology.connections[attacker].sides[0].qp;
    topology.connect_one(&mut sim, attacker, 0, attackers_qp, victim_qpn);
    let carried = sim.fabric.counts.carried;
    post(&mut sim, &topology, attacker, 7, target);
    let done = completion(&mut sim);
    assert_eq!((done.work_request_id, done.status), (7, CompletionStatus::RetryExceeded));
    assert_eq!(sim.fabric.counts.carried, carried, "not one packet went out");
    let side = &topology.connections[victim].sides[1];
    let session = topology.processes[side.process].session;
    assert!(sim.hosts[1].world.bytes(session, target.1, 3000).iter().all(|byte| *byte == 0));
    // The victim does not notice.
    post(&mut sim, &topology, victim, 8, target);
    let done = completion(&mut sim);
    assert_eq!((done.work_request_id, done.status), (8, CompletionStatus::Success));
}

/// A key of a process that is gone opens nothing to those who still have it.
#[test]
fn a_region_that_is_gone_is_refused() {
    let (mut sim, mut topology) = (sim(3), Topology::default());
    let connection = connection(&mut sim, &mut topology, [1, 1], attributes(10, 3));
    topology.connect(&mut sim, connection);
    let side = &topology.connections[connection].sides[1];
    let (session, pd) = (topology.processes[side.process].session, topology.processes[side.process].pd);
    let at = MEMORY_BASE + side.area_at;
    let engine = &mut sim.hosts[1].engine;
    let keys = engine.register_mr(session, pd, at, 4096, at, REMOTE).unwrap();
    post(&mut sim, &topology, connection, 1, (keys.rkey, at));
    assert_eq!(completion(&mut sim).status, CompletionStatus::Success);
    sim.hosts[1].engine.deregister_mr(session, keys.mr).unwrap();
    post(&mut sim, &topology, connection, 2, (keys.rkey, at));
    assert_eq!(completion(&mut sim).status, CompletionStatus::RemoteAccessError);
}

/// Packets of RC QPs on their way to an engine, by line or from other shards.
fn sent(sim: &Sim) -> u64 {
    sim.fabric.counts.carried + sim.shard_counts.packets
}

/// The same beside several engines: first of another tenant, then of the same one, whose QP the victim's peer is not
/// connected to. Engines 0 to 2 are shards of one host (and 3), 4 is another host.
#[test]
fn who_knows_all_of_another_shard_reaches_nothing_of_it() {
    for (victims, attackers) in
        [([0, 1], [0, 1]), ([1, 4], [0, 4]), ([0, 4], [0, 4]), ([1, 2], [0, 2]), ([4, 1], [4, 2])]
    {
        for network in [2, 1] {
            let (mut sim, mut topology) = (sim_of(4, &[4, 1]), Topology::default());
            let victim = between(&mut sim, &mut topology, victims.map(|end| (end, 1)), attributes(8, 1));
            let attacker = between(&mut sim, &mut topology, attackers.map(|end| (end, network)), attributes(8, 1));
            topology.connect(&mut sim, victim);
            let target = area(&topology, victim, 1);
            post(&mut sim, &topology, victim, 6, target);
            assert_eq!(completion_of(&mut sim, victims[0]).status, CompletionStatus::Success);
            let (victim_qpn, attackers_qp) =
                (topology.connections[victim].sides[1].qpn, topology.connections[attacker].sides[0].qp);
            topology.connect_one(&mut sim, attacker, 0, attackers_qp, victim_qpn);
            let before = sent(&sim);
            post(&mut sim, &topology, attacker, 7, target);
            let done = completion_of(&mut sim, attackers[0]);
            assert_eq!((done.work_request_id, done.status), (7, CompletionStatus::RetryExceeded), "{attackers:?}");
            assert_eq!(sent(&sim), before, "{attackers:?} of {network}: not one packet went out");
            // The victim does not notice.
            post(&mut sim, &topology, victim, 8, target);
            let done = completion_of(&mut sim, victims[0]);
            assert_eq!((done.work_request_id, done.status), (8, CompletionStatus::Success), "{attackers:?}");
        }
    }
}

/// A QP of another host leaves its peer for one of another shard, and other hosts hear of both at once: its former peer
/// reaches it no more.
#[test]
fn a_former_peer_in_another_shard_reaches_nothing() {
    let (mut sim, mut topology) = (sim_of(5, &[2, 1]), Topology::default());
    let former = between(&mut sim, &mut topology, [(0, 1), (2, 1)], attributes(8, 1));
    let next = between(&mut sim, &mut topology, [(1, 1), (2, 1)], attributes(8, 1));
    topology.connect(&mut sim, former);
    let target = area(&topology, former, 1);
    post(&mut sim, &topology, former, 1, target);
    assert_eq!(completion_of(&mut sim, 0).status, CompletionStatus::Success);
    let side = &topology.connections[former].sides[1];
    let (qp, session) = (side.qp, topology.processes[side.process].session);
    let peer = &topology.connections[next].sides[0];
    let (peer_qpn, gid) = (peer.qpn, topology.processes[peer.process].gid);
    use QpAttributeMask as M;
    let steps = [
        (QpState::Reset, 0),
        (QpState::Init, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
        (
            QpState::ReadyToReceive,
            M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
        ),
    ];
    let now = sim.instant();
    for (state, mask) in steps {
        let attributes = QpAttributes {
            state,
            port: 1,
            access: REMOTE,
            address: freeflow_sim::topology::address(gid),
            dest_qpn: peer_qpn.0,
            path_mtu: PathMtu::Mtu1024,
            // The former peer's next one.
            rq_psn: 0xff_ff03,
            ..attributes(8, 1)
        };
        let Host { engine, world, .. } = sim.enter(2);
        engine.modify_qp(world, now, session, qp, &attributes, M(mask | M::STATE)).unwrap();
    }
    sim.after(2);
    let (peers_qp, qpn) = (topology.connections[next].sides[0].qp, topology.connections[former].sides[1].qpn);
    topology.connect_one(&mut sim, next, 0, peers_qp, qpn);
    let until = sim.now + 1_000_000;
    while sim.now < until && sim.step().is_none() {}
    sim.hosts[2].world.bytes(session, target.1, 3000).fill(0);
    let before = sim.fabric.counts.carried;
    post(&mut sim, &topology, former, 2, target);
    let done = completion_of(&mut sim, 0);
    assert_eq!((done.work_request_id, done.status), (2, CompletionStatus::RetryExceeded));
    assert!(sim.hosts[2].world.bytes(session, target.1, 3000).iter().all(|byte| *byte == 0));
    assert_eq!(sim.fabric.counts.carried, before, "not one packet went out");
}
