//! Conditions that must hold when everything has come to its end.
use crate::rng::Rng;
use crate::run::Run;
use crate::sim::Host;
use crate::topology::{GUARD_BYTES, Process, SOURCE_BYTES, Side, TARGET_BYTES};
use crate::world::MEMORY_BASE;
use freeflow_engine::*;
use freeflow_verbs::*;

pub fn check(run: &mut Run) {
    messages(run);
    areas(run);
    guards(run);
    quiet(run);
    counters(run);
    if run.wrongs.is_empty() {
        teardown(run);
    }
}

fn messages(run: &mut Run) {
    for (index, side) in sides(run) {
        let this = &run.topology.connections[index];
        let left = this.sides[side].expected.len();
        if both_live(run, index) && !this.closed && this.service != QpType::Uc && left > 0 {
            run.wrong(format!("c{index}.{side}: {left} messages never arrived"));
        }
    }
}

fn both_live(run: &Run, connection: usize) -> bool {
    run.topology.connections[connection].sides.iter().all(|side| run.topology.processes[side.process].alive)
}

fn sides(run: &Run) -> Vec<(usize, usize)> {
    (0..run.topology.connections.len()).flat_map(|index| [(index, 0), (index, 1)]).collect()
}

fn areas(run: &mut Run) {
    for (index, side) in sides(run) {
        let Side { process, area_at, .. } = run.topology.connections[index].sides[side];
        let Process { host, session, alive, .. } = run.topology.processes[process];
        if !alive {
            continue;
        }
        let found = run.sim.hosts[host].world.bytes(session, MEMORY_BASE + area_at, TARGET_BYTES as usize).to_vec();
        let this = &run.topology.connections[index];
        let area = &this.sides[side].area;
        if let Some(at) = area.unexplained(&found) {
            run.wrong(format!("c{index}.{side}: byte {at} of its area is what nobody wrote last"));
        } else if this.service != QpType::Uc && !this.closed && area.has_unsure() && both_live(run, index) {
            run.wrong(format!("c{index}.{side}: requests are not known to be done"));
        }
    }
}

/// Memory that nobody may write to.
fn guards(run: &mut Run) {
    for index in 0..run.topology.processes.len() {
        let Process { host, session, alive, noise, .. } = run.topology.processes[index];
        if !alive {
            continue;
        }
        let found = run.sim.hosts[host].world.bytes(session, MEMORY_BASE, (SOURCE_BYTES + GUARD_BYTES) as usize);
        let mut rng = Rng::new(noise);
        let same = found.chunks_exact(8).all(|word| word == rng.draw().to_ne_bytes());
        if !same {
            run.wrong(format!("process {index}: memory that nobody may write to was written"));
        }
    }
}

fn quiet(run: &mut Run) {
    let pending = run.sim.operations_pending();
    if pending > 0 {
        run.wrong(format!("{pending} copies are still pending"));
    }
    let carried = run.sim.messages_carried();
    if carried > 0 {
        run.wrong(format!("the carrier still has {carried} messages"));
    }
    for index in 0..run.sim.hosts.len() {
        let host = &run.sim.hosts[index];
        let mut wrong = Vec::new();
        if let Some(at) = host.engine.poll_timeout() {
            wrong.push(format!("a timer stands at {}", at.0));
        }
        let busy = host.engine.wire_qps().filter(|status| status.in_flight_bytes > 0);
        wrong.extend(busy.map(|status| format!("bytes are on the way: {status:?}")));
        let kept = host.engine.host_flows().filter(|flow| flow.in_flight_bytes > 0 || flow.waiting > 0);
        wrong.extend(kept.map(|flow| format!("a host's share is kept: {flow:?}")));
        let on_way = host.world.on_way.iter().filter(|(_, bytes)| **bytes > 0);
        wrong.extend(on_way.map(|(shard, bytes)| format!("{bytes} bytes are on the way to {shard:?}")));
        for what in wrong {
            run.wrong(format!("h{index} is not quiet: {what}"));
        }
    }
}

fn counters(run: &mut Run) {
    let sum = |host: &Host| {
        host.engine.wire_qps().fold((0, 0), |(sent, received), status| {
            let counters = status.counters;
            (sent + counters.packets_sent + counters.acks_sent, received + counters.packets_received)
        })
    };
    let received: u64 = run.sim.hosts.iter().map(|host| sum(host).1).sum();
    let (counts, shards) = (run.sim.fabric.counts, run.sim.shard_counts);
    let by_line = counts.carried + counts.doubled + run.sim.company_carried;
    let carried = by_line + shards.packets + shards.company + shards.relayed;
    if received > carried {
        run.wrong(format!("{received} packets were received, {carried} carried"));
    }
    let malformed: u64 = run.sim.hosts.iter().map(|host| host.engine.drops().malformed).sum();
    if malformed > run.sim.forged {
        run.wrong(format!("{malformed} malformed packets among engines"));
    }
}

/// Every process ends: nothing may be left.
fn teardown(run: &mut Run) {
    let now = run.sim.instant();
    for index in 0..run.topology.processes.len() {
        let Process { host, session, vnic, alive, .. } = run.topology.processes[index];
        if !alive {
            continue;
        }
        let Host { engine, world, .. } = run.sim.enter(host);
        if engine.copies_in_flight(session) > 0 {
            world.wrongs.push(format!("process {index}: copies in flight at the end"));
        }
        engine.destroy_session(world, now, session);
        world.memory.remove(&session);
        if engine.vnic_usage(vnic).is_none() {
            world.wrongs.push("a vNIC is gone".into());
        }
        run.sim.after(host);
    }
    for index in 0..run.sim.hosts.len() {
        let engine = &run.sim.hosts[index].engine;
        let flows = engine.wire_qps().next().is_some() || engine.host_flows().next().is_some();
        if engine.usage() != Usage::default() || flows || engine.poll_timeout().is_some() {
            let usage = engine.usage();
            run.wrong(format!("h{index}: something is left: {usage:?}"));
        }
    }
    run.wrongs.append(&mut run.sim.wrongs);
}
