//! Limits of vNICs, under virtual time: rates, shares, changes while traffic runs, and quotas.
use crate::common::rig::{MS, Rig};
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::{SendOpcode as Op, *};
use proptest::prelude::*;

const SECOND: u64 = 1_000_000_000;
const GBIT: u64 = 1_000_000_000;

fn rate(bits_per_s: u64) -> RateLimit {
    RateLimit { bits_per_s: Some(bits_per_s), ..Default::default() }
}

fn messages(per_s: u64, burst: u64) -> RateLimit {
    RateLimit { messages_per_s: Some(per_s), burst_messages: Some(burst), ..Default::default() }
}

fn of_vnic(vnic: RateLimit) -> Shaping {
    Shaping { vnic, ..Default::default() }
}

fn of_qp(qp: RateLimit) -> Shaping {
    Shaping { qp, ..Default::default() }
}

/// A pair of which one end always has WRITEs of this size posted.
struct Flow {
    from: End,
    to: End,
    bytes: u32,
    posted: u64,
    done: u64,
}

impl Flow {
    fn new(net: &mut Net, bytes: u32) -> Self {
        let (from, to) = net.pair(QpType::Rc);
        Self { from, to, bytes, posted: 0, done: 0 }
    }

    fn shape(&self, net: &mut Net, shaping: Shaping) {
        net.engine.set_shaping(net.now, self.from.vnic, shaping).unwrap();
    }

    fn top_up(&mut self, net: &mut Net) {
        for (_, status) in net.statuses(&self.from) {
            assert_eq!(status, CompletionStatus::Success);
            self.done += 1;
        }
        while self.posted - self.done < (1 << 20) / u64::from(self.bytes) + 2 {
            net.post_send(&self.from, remote(self.posted, Op::RdmaWrite, &[self.from.sge(0, self.bytes)], &self.to, 0));
            self.posted += 1;
        }
    }

    /// Payload that left, also of messages that are not complete.
    fn bytes(&self, net: &Net) -> u64 {
        net.engine.qp_traffic(self.from.qp).unwrap().bytes_sent
    }
}

/// One step of a worker: the listed QP whose turn it is, as long as there is one; then time passes.
fn drive(net: &mut Net, flows: &mut [Flow], until: Instant) {
    loop {
        loop {
            flows.iter_mut().for_each(|flow| flow.top_up(net));
            let waiting = |net: &Net, flow: &Flow| net.engine.vnic_throttled(net.now, flow.from.vnic).waits;
            let before: Vec<u64> = flows.iter().map(|flow| waiting(net, flow)).collect();
            let mut progress = false;
            for flow in flows.iter() {
                let sent = flow.bytes(net);
                let run = net.engine.run(&mut net.world, net.now, flow.from.qp, 256 << 10);
                progress |= flow.bytes(net) != sent || run == Progress::More;
            }
            while let Some(qp) = net.engine.poll_ready() {
                net.engine.run(&mut net.world, net.now, qp, 64 << 10);
                progress = true;
            }
            let after: Vec<u64> = flows.iter().map(|flow| waiting(net, flow)).collect();
            if !progress && before == after {
                break;
            }
        }
        match net.engine.poll_timeout() {
            Some(at) if at <= until => {
                assert!(at > net.now, "time stands still");
                net.now = at;
                net.engine.handle_timeout(&mut net.world, at);
            }
            _ => break,
        }
    }
    net.now = until;
}

/// Bytes that a flow sent in this time, not counting the first burst.
fn measure(net: &mut Net, flows: &mut [Flow], time: u64) -> Vec<u64> {
    let start = Instant(net.now.0 + 20 * MS);
    drive(net, flows, start);
    let before: Vec<u64> = flows.iter().map(|flow| flow.bytes(net)).collect();
    drive(net, flows, Instant(start.0 + time));
    flows.iter().zip(before).map(|(flow, before)| flow.bytes(net) - before).collect()
}

fn close_to(got: u64, expected: u64, permille: u64) -> bool {
    got.abs_diff(expected) * 1000 <= expected * permille
}

#[test]
fn caps_of_one_flow() {
    for (bits_per_s, bytes, time) in [
        (100_000_000, 1 << 20, 4 * SECOND),
        (100_000_000, 64, SECOND / 10),
        (GBIT, 65_536, SECOND / 4),
        (5 * GBIT, 4096, SECOND / 20),
        (20 * GBIT, 1 << 20, SECOND / 20),
    ] {
        for shaping in [of_vnic(rate(bits_per_s)), of_qp(rate(bits_per_s))] {
            let mut net = Net::new();
            let mut flows = [Flow::new(&mut net, bytes)];
            flows[0].shape(&mut net, shaping);
            let got = measure(&mut net, &mut flows, time)[0];
            let expected = (u128::from(bits_per_s) * u128::from(time) / (8 * u128::from(SECOND))) as u64;
            let grain = u64::from(bytes) + 65_536 + expected / 100;
            assert!(got.abs_diff(expected) <= grain, "{bits_per_s} bit/s, {bytes} bytes: {got}, not {expected}");
            let held = net.engine.vnic_throttled(net.now, flows[0].from.vnic);
            assert!(held.waits > 0 && held.time.0 > time / 2, "{held:?}");
            assert_eq!(net.engine.qp_throttled(net.now, flows[0].from.qp), held);
        }
    }
}

#[test]
fn a_long_message_does_not_go_at_once() {
    let mut net = Net::new();
    let flow = Flow::new(&mut net, 1 << 20);
    flow.shape(&mut net, of_vnic(rate(100_000_000)));
    net.post_send(&flow.from, remote(1, Op::RdmaWrite, &[flow.from.sge(0, 1 << 20)], &flow.to, 0));
    net.settle();
    let mut steps = 0;
    while net.polls(&flow.from).is_empty() {
        assert!(net.expire(), "somebody waits for ever");
        steps += 1;
    }
    assert!(steps > 10 && net.world.largest_copy <= 65_536, "{steps} steps, {}", net.world.largest_copy);
    let nanoseconds = ((1 << 20) - 65_536) * 80;
    assert!(close_to(net.now.0, nanoseconds, 150), "{} instead of {nanoseconds}", net.now.0);
}

#[test]
fn ten_flows_each_with_a_cap_of_its_own() {
    let mut net = Net::new();
    let mut flows: Vec<Flow> = (0..10).map(|_| Flow::new(&mut net, 16_384)).collect();
    for (at, flow) in flows.iter().enumerate() {
        flow.shape(&mut net, of_vnic(rate((at as u64 + 1) * 100_000_000)));
    }
    let got = measure(&mut net, &mut flows, SECOND / 2);
    for (at, got) in got.into_iter().enumerate() {
        assert!(close_to(got, (at as u64 + 1) * 6_250_000, 15), "flow {at}: {got}");
    }
}

#[test]
fn a_tenant_shares_by_weight_and_a_vnic_by_queue_pair() {
    let mut net = Net::new();
    let mut flows: Vec<Flow> = [1024, 65_536, 300_000].map(|bytes| Flow::new(&mut net, bytes)).into();
    let tenant = TenantId(9);
    net.engine.set_tenant_limit(net.now, tenant, rate(GBIT)).unwrap();
    for (flow, weight) in flows.iter().zip([100, 200, 400]) {
        flow.shape(&mut net, Shaping { tenant: Some(tenant), weight, ..Default::default() });
        assert!(net.engine.is_metered(flow.from.vnic));
    }
    let got = measure(&mut net, &mut flows, SECOND);
    assert!(close_to(got.iter().sum(), 125_000_000, 10), "{got:?}");
    for (got, parts) in got.iter().zip([1, 2, 4]) {
        assert!(close_to(*got, parts * 125_000_000 / 7, 30), "{got} is not {parts} of 7");
    }
    // Four QPs of one vNIC.
    let mut net = Net::new();
    let mut flows = vec![Flow::new(&mut net, 32_768)];
    for _ in 0..3 {
        let (mut from, mut to) = (flows[0].from, flows[0].to);
        (from.qp, from.qpn) = net.qp(&from, QpType::Rc);
        (to.qp, to.qpn) = net.qp(&to, QpType::Rc);
        (from.cq, to.cq) = (flows[0].from.cq, flows[0].to.cq);
        net.connect(&from, &to);
        net.connect(&to, &from);
        flows.push(Flow { from, to, bytes: 32_768, posted: 0, done: 0 });
    }
    flows[0].shape(&mut net, of_vnic(rate(GBIT)));
    // They complete on one CQ: enough is posted at once.
    for flow in &mut flows {
        for id in 0..4000 {
            net.post_send(&flow.from, remote(id, Op::RdmaWrite, &[flow.from.sge(0, flow.bytes)], &flow.to, 0));
        }
        (flow.posted, flow.done) = (0, u64::MAX / 2);
    }
    net.world.cq_room.clear();
    let until = Instant(net.now.0 + SECOND);
    net.work();
    while net.engine.poll_timeout().is_some_and(|at| at <= until) {
        net.expire();
        net.polls(&flows[0].from);
    }
    for flow in &flows {
        assert!(close_to(flow.bytes(&net), 125_000_000 / 4, 20), "{}", flow.bytes(&net));
    }
}

#[test]
fn messages_are_counted_one_by_one() {
    for (op, bytes) in [(Op::RdmaWrite, 8), (Op::RdmaRead, 8), (Op::RdmaWrite, 0)] {
        let mut net = Net::new();
        let (a, b) = net.pair(QpType::Rc);
        net.engine.set_shaping(net.now, a.vnic, of_vnic(messages(1, 5))).unwrap();
        for id in 0..8 {
            let sges = [a.sge(0, bytes)];
            net.post_send(&a, remote(id, op, if bytes == 0 { &[] } else { &sges }, &b, 0));
        }
        net.settle();
        let start = net.now;
        assert_eq!(net.polls(&a).len(), 5);
        for passed in 1..=3 {
            assert!(net.expire());
            assert_eq!((net.polls(&a).len(), net.now.0 - start.0), (1, passed * SECOND));
        }
        assert_eq!(net.engine.poll_timeout(), None, "nobody waits without anything to send");
        assert_eq!(net.engine.vnic_throttled(net.now, a.vnic), Throttled { waits: 3, time: Duration(3 * SECOND) });
    }
}

#[test]
fn time_that_is_held_back_shows_while_it_passes() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let held = |net: &Net, at: Instant| {
        let of_vnic = net.engine.vnic_throttled(at, a.vnic);
        assert_eq!(net.engine.qp_throttled(at, a.qp), of_vnic);
        (of_vnic.waits, of_vnic.time.0)
    };
    net.engine.set_shaping(net.now, a.vnic, of_vnic(messages(1, 1))).unwrap();
    for id in 0..3 {
        net.post_send(&a, remote(id, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0));
    }
    net.settle();
    let start = net.now;
    assert_eq!(held(&net, start), (1, 0));
    // Nothing happens meanwhile.
    assert_eq!(held(&net, Instant(start.0 + SECOND / 4)), (1, SECOND / 4));
    assert_eq!(held(&net, Instant(start.0 + SECOND / 2)), (1, SECOND / 2));
    // The end of a wait, and another limit, take nothing back and add nothing.
    assert!(net.expire());
    assert_eq!(held(&net, net.now), (2, SECOND));
    net.now = Instant(net.now.0 + SECOND / 4);
    net.engine.set_shaping(net.now, a.vnic, of_vnic(messages(2, 1))).unwrap();
    net.settle();
    assert_eq!(held(&net, net.now).1, SECOND + SECOND / 4);
    // Nor do a snapshot and the end of a queue pair that is held.
    net.engine = Engine::restore(&net.engine.snapshot()).unwrap();
    net.now = Instant(net.now.0 + MS);
    let before = held(&net, net.now);
    assert_eq!(before.1, SECOND + SECOND / 4 + MS);
    net.engine.destroy_session(&mut net.world, net.now, a.session);
    let after = net.engine.vnic_throttled(Instant(net.now.0 + SECOND), a.vnic);
    assert_eq!((after.waits, after.time.0), before);
}

#[test]
fn who_fails_is_not_held_any_more() {
    // By its own limit: no more at all. By that of whom it reads from: until it would have gone on.
    let of_messages = (Op::RdmaWrite, 8, messages(1, 1));
    for (op, bytes, limit) in [of_messages, (Op::RdmaRead, 1 << 20, rate(8_000_000))] {
        let mut net = Net::new();
        let (a, b) = net.pair(QpType::Rc);
        net.engine.set_shaping(net.now, b.vnic, of_vnic(limit)).unwrap();
        let own = if op == Op::RdmaWrite { of_vnic(limit) } else { Shaping { weight: 7, ..Default::default() } };
        net.engine.set_shaping(net.now, a.vnic, own).unwrap();
        for id in 0..4 {
            net.post_send(&a, remote(id, op, &[a.sge(0, bytes)], &b, 0));
        }
        net.settle();
        let until = |net: &Net| net.engine.poll_timeout().map_or(0, |at| at.0 - net.now.0);
        let (start, most) = (net.now, until(&net));
        net.now = Instant(start.0 + MS / 2);
        let now = Throttled { waits: 1, time: Duration(MS / 2) };
        assert_eq!(net.engine.vnic_throttled(net.now, a.vnic), now, "{op:?}");
        net.to(&a, QpState::Error).unwrap();
        net.settle();
        while net.expire() {}
        let held = net.engine.vnic_throttled(Instant(start.0 + 60 * SECOND), a.vnic);
        let is_less = if op == Op::RdmaWrite { held == now } else { held.time.0 <= most };
        assert!(is_less && held.waits == 1, "{op:?}: {held:?}, {most} ns at most");
    }
}

#[test]
fn datagrams_and_unreliable_connections_are_held_too() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut net = Net::new();
        let (a, b) = if qp_type == QpType::Uc { net.pair(qp_type) } else { (net.end(qp_type), net.end(qp_type)) };
        if qp_type == QpType::Ud {
            net.connect(&a, &b);
            net.connect(&b, &a);
        }
        let handle = net.engine.create_ah(a.session, a.pd, &address(b.gid)).unwrap();
        net.engine.set_shaping(net.now, a.vnic, of_vnic(messages(10, 2))).unwrap();
        for id in 0..4 {
            net.post_receive(&b, id, &[b.sge(0, 4096)]);
            let wish = request(id, Op::Send, &[a.sge(0, 100)]);
            let wish = SendRequest { address_handle: handle.index, remote_qpn: b.qpn.0, remote_qkey: 0x1234, ..wish };
            net.post_send(&a, wish);
        }
        net.settle();
        assert_eq!(net.polls(&b).len(), 2, "{qp_type:?}");
        net.expire();
        assert_eq!(net.polls(&b).len(), 1);
        net.expire();
        assert_eq!((net.polls(&b).len(), net.polls(&a).len(), net.engine.poll_timeout()), (1, 4, None));
    }
}

#[test]
fn reads_are_charged_to_both_ends() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.engine.set_shaping(net.now, b.vnic, of_vnic(rate(8_000_000))).unwrap();
    net.post_send(&a, remote(1, Op::RdmaRead, &[a.sge(0, 1 << 20)], &b, 0));
    net.settle();
    assert!(net.polls(&a).is_empty(), "it is more than the other end may send");
    let start = net.now;
    while net.polls(&a).is_empty() {
        assert!(net.expire());
    }
    let passed = net.now.0 - start.0;
    assert!(passed > SECOND / 2 && passed < 2 * SECOND, "{passed}");
    assert!(net.engine.vnic_throttled(net.now, a.vnic).waits == 0 && net.engine.qp_throttled(net.now, a.qp).waits > 0);
    // A limit that goes lets go at once.
    net.post_send(&a, remote(2, Op::RdmaRead, &[a.sge(0, 1 << 20)], &b, 0));
    net.settle();
    net.engine.set_shaping(net.now, b.vnic, Shaping::default()).unwrap();
    net.settle();
    assert_eq!((net.polls(&a).len(), net.engine.poll_timeout()), (1, None));
}

#[test]
fn changes_are_in_force_at_once() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.engine.set_shaping(net.now, a.vnic, of_vnic(messages(1, 1))).unwrap();
    for id in 0..4 {
        net.post_send(&a, remote(id, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0));
    }
    net.settle();
    assert_eq!(net.polls(&a).len(), 1);
    net.now = Instant(net.now.0 + SECOND / 2);
    // Half a message has come; at a thousand a second the other half takes half a millisecond.
    net.engine.set_shaping(net.now, a.vnic, of_vnic(messages(1000, 1))).unwrap();
    net.settle();
    assert_eq!(net.polls(&a).len(), 0);
    let start = net.now;
    net.expire();
    assert_eq!((net.polls(&a).len(), net.now.0 - start.0), (1, MS / 2));
    // From the vNIC to its tenant, and to nothing.
    net.engine.set_tenant_limit(net.now, TenantId(1), messages(1, 1)).unwrap();
    net.engine.set_shaping(net.now, a.vnic, Shaping { tenant: Some(TenantId(1)), ..Default::default() }).unwrap();
    net.settle();
    assert_eq!(net.polls(&a).len(), 1);
    net.engine.set_tenant_limit(net.now, TenantId(1), RateLimit::default()).unwrap();
    net.settle();
    assert_eq!((net.polls(&a).len(), net.engine.poll_timeout(), net.engine.is_metered(a.vnic)), (1, None, false));
}

#[test]
fn who_waits_can_still_fail_and_go() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.engine.set_shaping(net.now, a.vnic, of_vnic(messages(1, 1))).unwrap();
    for id in 0..3 {
        net.post_send(&a, remote(id, Op::RdmaWrite, &[a.sge(0, 8)], &b, 0));
    }
    net.settle();
    net.polls(&a);
    net.to(&a, QpState::Error).unwrap();
    net.settle();
    let flushed = CompletionStatus::WorkRequestFlushed;
    assert_eq!(net.statuses(&a), [(1, flushed), (2, flushed)]);
    net.engine.destroy_session(&mut net.world, net.now, a.session);
    assert_eq!(net.engine.poll_timeout(), None);
    net.engine.destroy_vnic(a.vnic).unwrap();
    assert_eq!(net.engine.shaping(a.vnic), None);
}

#[test]
fn what_can_not_be_is_refused() {
    let mut net = Net::new();
    let a = net.end(QpType::Rc);
    let zero = RateLimit { bits_per_s: Some(0), ..Default::default() };
    let none = RateLimit { burst_messages: Some(0), ..Default::default() };
    for shaping in [
        Shaping { priority: PRIORITY_MAX + 1, ..Default::default() },
        Shaping { weight: 0, ..Default::default() },
        Shaping { weight: WEIGHT_MAX + 1, ..Default::default() },
        of_qp(zero),
        of_vnic(none),
    ] {
        assert_eq!(net.engine.set_shaping(net.now, a.vnic, shaping), Err(VerbsError::InvalidArgument));
    }
    assert_eq!(net.engine.set_tenant_limit(net.now, TenantId(0), zero), Err(VerbsError::InvalidArgument));
    assert_eq!(net.engine.shaping(a.vnic), Some(Shaping::default()));
    let most = RateLimit {
        bits_per_s: Some(u64::MAX),
        burst_bytes: Some(u64::MAX),
        messages_per_s: Some(u64::MAX),
        burst_messages: Some(u64::MAX),
    };
    net.engine.set_shaping(Instant(u64::MAX), a.vnic, of_vnic(most)).unwrap();
    net.settle();
}

// ---- to other hosts

#[test]
fn a_slow_message_to_another_host_does_not_time_out_and_repeats_cost_nothing() {
    let mut rig = Rig::new(PathMtu::Mtu1024);
    let vnic = rig.end.vnic;
    // 1 KB takes 8 ms; the local ACK timeout is 67 ms.
    rig.net
        .engine
        .set_shaping(rig.net.now, vnic, of_vnic(RateLimit { burst_bytes: Some(1024), ..rate(1_000_000) }))
        .unwrap();
    rig.write(1, 100 * 1024);
    let start = rig.net.now;
    let mut sent = 0;
    let mut lost = false;
    while rig.succeeded().is_empty() {
        if let Some(&last) = rig.psns().last() {
            if last == 40 && !std::mem::replace(&mut lost, true) {
                rig.nak(30, freeflow_wire::NakCode::PsnSequence);
            } else {
                sent = last;
                rig.ack(last);
            }
            continue;
        }
        assert!(rig.net.expire(), "waits for ever at PSN {sent}");
        assert!(rig.net.now.0 - start.0 < 3 * SECOND);
    }
    let (counters, passed) = (rig.counters(), rig.net.now.0 - start.0);
    assert_eq!((rig.vnic().ack_timeouts, counters.probes_sent), (0, 0));
    assert!(close_to(passed, 99 * 1024 * 8000, 100), "{passed}");
}

#[test]
fn what_goes_out_again_for_a_receiver_that_is_not_ready_is_charged() {
    let forever = QpAttributes { rnr_retry: 7, ..crate::common::rig::attributes() };
    let mut rig = Rig::with(QpType::Rc, PathMtu::Mtu1024, forever);
    let vnic = rig.end.vnic;
    let limit = RateLimit { burst_bytes: Some(1024), ..rate(1_000_000) };
    rig.net.engine.set_shaping(rig.net.now, vnic, of_vnic(limit)).unwrap();
    let request = rig.request(1, Op::Send, 10 * 1024);
    rig.post(request);
    let (mut bytes, start) = (0, rig.net.now);
    for _ in 0..400 {
        let out = rig.out();
        bytes += out.iter().map(|(_, payload)| payload.len() as u64).sum::<u64>();
        if !out.is_empty() {
            // The shortest delay: 10 us.
            rig.aeth(0, freeflow_wire::Syndrome::ReceiverNotReady { timer: 1 });
        } else if !rig.net.expire() {
            break;
        }
    }
    let allowed = 125_000 * (rig.net.now.0 - start.0) / SECOND + 16 * 1024;
    assert!(rig.vnic().rnr_naks > 9 && bytes <= allowed, "{bytes} of {allowed}");
}

#[test]
fn a_new_queue_pair_brings_no_new_burst() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.engine.set_shaping(net.now, a.vnic, of_qp(messages(1, 4))).unwrap();
    let sent = |net: &mut Net, from: &End, to: &End| {
        for id in 0..6 {
            net.post_send(from, remote(id, Op::RdmaWrite, &[from.sge(0, 8)], to, 0));
        }
        net.settle();
        net.polls(from).iter().filter(|completion| completion.status == CompletionStatus::Success).count()
    };
    assert_eq!(sent(&mut net, &a, &b), 4);
    // Nor does one that begins again.
    net.to(&a, QpState::Error).unwrap();
    net.settle();
    net.polls(&a);
    net.to(&a, QpState::Reset).unwrap();
    net.connect(&a, &b);
    assert_eq!(sent(&mut net, &a, &b), 0);
    let mut last = a;
    for (seconds, messages) in [(0, 0), (2, 2), (60, 4)] {
        let Net { engine, world, now, .. } = &mut net;
        engine.destroy_qp(world, *now, last.session, last.qp).unwrap();
        net.now = Instant(net.now.0 + seconds * SECOND);
        let peer = net.end(QpType::Rc);
        let next = net.end_at(a.vnic, a.gid, QpType::Rc, false);
        net.connect(&next, &peer);
        net.connect(&peer, &next);
        assert_eq!(sent(&mut net, &next, &peer), messages, "after {seconds} s");
        last = next;
    }
    // Beside the others there is one of its own.
    let (next, peer) = (net.end_at(a.vnic, a.gid, QpType::Rc, false), net.end(QpType::Rc));
    net.connect(&next, &peer);
    net.connect(&peer, &next);
    assert_eq!(sent(&mut net, &next, &peer), 4);
}

#[test]
fn atomics_are_charged_to_the_owner_of_the_memory() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    // 16 bytes at once, then a hundred in a second.
    let limit = RateLimit { burst_bytes: Some(16), ..rate(800) };
    net.engine.set_shaping(net.now, b.vnic, of_vnic(limit)).unwrap();
    for id in 0..10 {
        net.post_send(&a, remote(id, Op::FetchAdd, &[a.sge(0, 8)], &b, 8));
    }
    net.settle();
    assert_eq!(net.polls(&a).len(), 2);
    let (start, mut done) = (net.now, 2);
    while done < 10 {
        assert!(net.expire());
        done += net.polls(&a).len();
    }
    let passed = net.now.0 - start.0;
    assert!(passed > SECOND / 2 && passed < SECOND, "{passed}");
}

#[test]
fn atomics_are_charged_to_who_asks() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let limit = RateLimit { burst_bytes: Some(16), ..rate(800) };
    net.engine.set_shaping(net.now, a.vnic, of_vnic(limit)).unwrap();
    for put_off in [false, true] {
        net.world.always_put_off = put_off;
        for id in 0..10 {
            net.post_send(&a, remote(id, Op::FetchAdd, &[a.sge(0, 8)], &b, 8));
        }
        let (start, mut done) = (net.now, 0);
        while done < 10 {
            net.settle();
            done += net.polls(&a).len();
            if done < 10 {
                assert!(net.expire());
            }
        }
        let passed = net.now.0 - start.0;
        assert!(passed > SECOND / 2 && passed <= SECOND, "{passed}");
    }
}

// ---- quotas

#[test]
fn quotas_refuse_by_vnic_and_by_network() {
    let mut net = Net::new();
    let (a, b) = (net.end(QpType::Rc), net.end(QpType::Rc));
    let network = NetworkId(1);
    assert_eq!(net.engine.network_usage(network).qps, 2);
    let limits = NetworkLimits { qp_count_max: Some(3), registered_bytes_max: Some(5 << 20), ..Default::default() };
    net.engine.set_network_limits(network, limits);
    let init = |end: &End| rc_init(end.pd, end.cq);
    let qp = net.engine.create_qp(a.session, init(&a)).unwrap().0;
    assert_eq!(net.engine.create_qp(b.session, init(&b)).unwrap_err(), VerbsError::NoMemory);
    let mut own = net.engine.limits(b.vnic).unwrap();
    own.qp_count_max = 1;
    net.engine.set_limits(b.vnic, own).unwrap();
    assert_eq!(net.engine.create_qp(b.session, init(&b)).unwrap_err(), VerbsError::NoMemory);
    let register = |net: &mut Net, end: &End| {
        let bytes = 1 << 20;
        net.engine.register_mr(end.session, end.pd, MEMORY_BASE, bytes, MEMORY_BASE, ALL_ACCESS)
    };
    register(&mut net, &b).unwrap();
    assert_eq!(register(&mut net, &a).unwrap_err(), VerbsError::NoMemory);
    let refused = net.engine.refusals(b.vnic).unwrap();
    assert_eq!((refused.by_network.qps, refused.by_vnic.qps, refused.by_vnic.mrs), (1, 1, 0));
    assert_eq!(net.engine.refusals(a.vnic).unwrap().by_network.registered_bytes, 1);
    // Less than is held takes nothing away.
    net.engine.set_network_limits(network, NetworkLimits { qp_count_max: Some(0), ..Default::default() });
    assert_eq!(net.engine.network_usage(network).qps, 3);
    net.engine.destroy_qp(&mut net.world, net.now, a.session, qp).unwrap();
    assert_eq!(net.engine.create_qp(a.session, init(&a)).unwrap_err(), VerbsError::NoMemory);
    net.engine.set_network_limits(network, NetworkLimits::default());
    net.engine.create_qp(a.session, init(&a)).unwrap();
}

// ---- anything at any time

fn some_limit(rng: &mut SimRng) -> RateLimit {
    let some = |rng: &mut SimRng, most: u64| (rng.roll(2) == 0).then(|| 1 + rng.roll(most));
    RateLimit {
        bits_per_s: some(rng, 10_000_000_000),
        burst_bytes: some(rng, 100_000),
        messages_per_s: some(rng, 1_000_000),
        burst_messages: some(rng, 20),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Limits come, change and go while messages, copies and QPs do: nobody is forgotten, and a run
    /// that is cut into pieces by snapshots is the same run.
    #[test]
    fn no_wake_up_is_lost(seed in any::<u64>()) {
        let (mut rng, mut net) = (SimRng(seed), Net::new());
        let pairs: Vec<(End, End)> = (0..4).map(|_| net.pair(QpType::Rc)).collect();
        let (mut posted, mut done) = ([0u64; 4], [0u64; 4]);
        for _ in 0..300 {
            let at = rng.roll(4) as usize;
            let (a, b) = &pairs[at];
            match rng.roll(8) {
                0..3 => {
                    let op = if rng.roll(4) == 0 { Op::RdmaRead } else { Op::RdmaWrite };
                    let bytes = [8, 4096, 100_000, 1 << 20][rng.roll(4) as usize];
                    net.post_send(a, remote(posted[at], op, &[a.sge(0, bytes)], b, 0));
                    posted[at] += 1;
                    net.engine.run(&mut net.world, net.now, a.qp, 1 + rng.roll(300_000));
                }
                3 => {
                    let tenant = (rng.roll(2) == 0).then(|| TenantId(rng.roll(2) as u32));
                    let (qp, vnic) = (some_limit(&mut rng), some_limit(&mut rng));
                    let (priority, weight) = (rng.roll(8) as u8, 1 + rng.roll(1000) as u16);
                    let vnic_id = if rng.roll(4) == 0 { b.vnic } else { a.vnic };
                    let shaping = Shaping { qp, vnic, tenant, priority, weight };
                    net.engine.set_shaping(net.now, vnic_id, shaping).unwrap();
                }
                4 => {
                    let limit = some_limit(&mut rng);
                    net.engine.set_tenant_limit(net.now, TenantId(rng.roll(2) as u32), limit).unwrap();
                }
                5 => {
                    net.now = Instant(net.now.0 + rng.roll(3 * MS));
                    let now = net.now;
                    net.engine.handle_timeout(&mut net.world, now);
                }
                6 => {
                    if let Some(qp) = net.engine.poll_ready() {
                        net.engine.run(&mut net.world, net.now, qp, 1 + rng.roll(300_000));
                    }
                }
                _ => {
                    let snapshot = net.engine.snapshot();
                    net.engine = Engine::restore(&snapshot).expect("a snapshot");
                    prop_assert!(net.engine.snapshot() == snapshot);
                }
            }
            for (at, (a, _)) in pairs.iter().enumerate() {
                for (_, status) in net.statuses(a) {
                    prop_assert_eq!(status, CompletionStatus::Success);
                    done[at] += 1;
                }
            }
        }
        // Half of the time the limits stay, and time is all it takes.
        if rng.roll(2) == 0 {
            for (a, b) in &pairs {
                net.engine.set_shaping(net.now, a.vnic, Shaping::default()).unwrap();
                net.engine.set_shaping(net.now, b.vnic, Shaping::default()).unwrap();
            }
            net.settle();
            prop_assert_eq!(net.engine.poll_timeout(), None);
        } else {
            net.settle();
            let mut steps = 0u64;
            while net.engine.poll_timeout().is_some() {
                net.expire();
                steps += 1;
                prop_assert!(steps < 2_000_000);
            }
        }
        for (at, (a, _)) in pairs.iter().enumerate() {
            done[at] += net.statuses(a).len() as u64;
        }
        prop_assert_eq!(done, posted);
        for (a, b) in &pairs {
            for end in [a, b] {
                net.engine.destroy_session(&mut net.world, net.now, end.session);
                net.engine.destroy_vnic(end.vnic).unwrap();
            }
        }
        prop_assert_eq!((net.engine.poll_timeout(), net.engine.usage()), (None, Usage::default()));
    }
}
