//! Promises of QP attributes when the other end is gone, and memory that a tenant can't reach
//! whatever it names.
use freeflow_sim::carrier::CarrierModel;
use freeflow_sim::fabric::LinkModel;
use freeflow_sim::sim::{HostModel, Sim};
use freeflow_sim::topology::{Connection, REMOTE, Topology};
use freeflow_sim::world::{MEMORY_BASE, OutcomeRates};
use freeflow_verbs::*;

const DELAY_NS: u64 = 10_000;

fn sim(seed: u64) -> Sim {
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
    Sim::new(seed, 2, host_model)
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
    let sides = [0, 1].map(|host| {
        let process = topology.process(sim, host, NetworkId(networks[host]), 0, 1);
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
    loop {
        if let Some((_, done)) = sim.harvest(0).first() {
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
