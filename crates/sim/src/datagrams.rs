//! UD: parties that send to each other and to a group. A message may be lost; what arrives is what
//! a party of the same network sent, from the address that it says, and once unless the network
//! doubled it.
use crate::run::{Action, Run};
use crate::topology::{OUTSTANDING_MAX, Process, QKEY, group};
use crate::world::MEMORY_BASE;
use freeflow_engine::*;
use freeflow_verbs::*;

const STAMP_BYTES: u64 = 8;

pub fn post(run: &mut Run, party: usize) {
    let this = &run.topology.parties[party];
    if this.quota == 0 {
        return;
    }
    if this.outstanding.len() < OUTSTANDING_MAX {
        run.topology.parties[party].quota -= 1;
        post_one(run, party);
    }
    let wait = run.rng.roll(run.plan.spread_ns / 8 + 1);
    run.remind_in(wait, Action::Datagram { party });
}

fn post_one(run: &mut Run, party: usize) {
    let peer = run.rng.roll(run.topology.parties.len() as u64) as usize;
    let to_group = run.rng.one_in(3);
    // An address may be that of another network's tenant: then its QPN is one that this tenant has
    // no right to reach.
    let (gid, remote_qpn) = if to_group {
        (group(), Qpn::MULTICAST.0)
    } else {
        let peer = &run.topology.parties[peer];
        (run.topology.processes[peer.process].gid, peer.qpn.0)
    };
    let address_handle = run.topology.handle(&mut run.sim, party, gid);
    let length = run.rng.roll(UD_MESSAGE_BYTES_MAX - STAMP_BYTES + 1);
    let this = &mut run.topology.parties[party];
    let number = this.posts;
    this.posts += 1;
    let (process, qp, stamps_at) = (this.process, this.qp, this.stamps_at);
    let Process { host, session, lkey, .. } = run.topology.processes[process];
    let from = run.rng.roll(crate::topology::SOURCE_BYTES - length);
    let stamp = ((party as u64) << 32 | number).to_ne_bytes();
    let at = stamps_at + number % 64 * STAMP_BYTES;
    let world = &mut run.sim.hosts[host].world;
    world.bytes(session, MEMORY_BASE + at, 8).copy_from_slice(&stamp);
    let mut bytes = stamp.to_vec();
    bytes.extend_from_slice(world.bytes(session, MEMORY_BASE + from, length as usize));
    let mut request = SendRequest {
        work_request_id: number,
        opcode: SendOpcode::Send,
        flags: SendFlags(SendFlags::SIGNALED),
        sge_count: 2,
        address_handle,
        remote_qpn,
        remote_qkey: if run.rng.one_in(20) { QKEY + 1 } else { QKEY },
        ..Default::default()
    };
    request.sges[0] = Sge { address: MEMORY_BASE + at, length: STAMP_BYTES as u32, lkey };
    request.sges[1] = Sge { address: MEMORY_BASE + from, length: length as u32, lkey };
    // With a wrong Q_Key nobody may get it.
    let target = if request.remote_qkey == QKEY { (!to_group).then_some(peer) } else { Some(usize::MAX) };
    run.topology.parties[party].sent.push((bytes, target));
    run.topology.parties[party].outstanding.push_back(number);
    run.sim.note(|| format!("party {party} posts {number} to {gid} {remote_qpn:06x}"));
    let ring = run.sim.hosts[host].world.sends.entry(qp).or_default();
    request.ring_position = ring.position;
    ring.position += 1;
    ring.posted.push_back(request);
    run.sim.ring(host, qp);
}

pub fn completed(run: &mut Run, party: usize, done: &Completion) {
    if done.flags.contains(CompletionFlags::SEND_QUEUE) {
        let first = run.topology.parties[party].outstanding.pop_front();
        if first != Some(done.work_request_id) || done.status != CompletionStatus::Success {
            run.wrong(format!("party {party}: {done:?} came instead of {first:?}"));
        }
        return;
    }
    let Some(bytes) = run.received_bytes(done) else {
        return run.wrong(format!("party {party}: a RECV failed: {done:?}"));
    };
    if let Err(wrong) = check(run, party, done, &bytes) {
        run.wrong(format!("party {party}: {wrong}: {done:?}"));
    }
}

fn check(run: &mut Run, party: usize, done: &Completion, bytes: &[u8]) -> Result<(), &'static str> {
    let (grh, message) = bytes.split_at_checked(GRH_BYTES).ok_or("no room for a GRH")?;
    let stamp = u64::from_ne_bytes(*message.first_chunk().ok_or("no stamp")?);
    let (sender, number) = ((stamp >> 32) as usize, stamp & u64::from(u32::MAX));
    let from = run.topology.parties.get(sender).ok_or("a stamp that nobody made")?;
    let (sent, target) = from.sent.get(number as usize).ok_or("a number that nobody sent")?;
    if sent != message {
        return Err("mixed with something else");
    }
    let me = &run.topology.parties[party];
    let (mine, other) = (&run.topology.processes[me.process], &run.topology.processes[from.process]);
    if mine.network != other.network {
        return Err("from another network");
    }
    let is_for_me = match target {
        Some(target) => *target == party,
        None => me.member,
    };
    if !is_for_me {
        return Err("for somebody else");
    }
    if done.source_qpn != from.qpn.0 || !done.flags.contains(CompletionFlags::GRH) {
        return Err("from another QPN");
    }
    if !says_source(grh, other.gid) {
        return Err("the GRH names another sender");
    }
    let by_line = !run.sim.are_shards(mine.host, other.host);
    let doubles = by_line && run.plan.host_model.link_model.duplication > 0;
    let count = run.topology.parties[party].got.entry((sender, number)).or_default();
    *count += 1;
    if *count > 1 && !doubles { Err("came twice") } else { Ok(()) }
}

/// A GRH holds an IPv6 header, or (the last 20 bytes) an IPv4 header.
fn says_source(grh: &[u8], gid: Gid) -> bool {
    match gid.to_ipv4() {
        Some(v4) => grh[32..36] == v4.octets(),
        None => grh[8..24] == gid.0,
    }
}
