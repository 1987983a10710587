//! Random runs against a model: two RC QPs, or two XRC pairs, both directions, every operation,
//! copies at once or late, and then perhaps an end that errs, is destroyed or dies.
//!
//! Checked: messages arrive exactly once and in order; completions come in posting order, first successes, then one
//! failure, then flushes; memory equals the model's; nothing is touched that nobody asked for; bookkeeping ends empty.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use proptest::prelude::*;
use std::collections::VecDeque;

use CompletionStatus as Status;
use SendOpcode as Op;

/// Parts of an end's memory.
const SOURCE: u64 = 0; // written once, random
const RECEIVES: u64 = 512 << 10; // RECV buffers, used once each
const TARGET: u64 = 1024 << 10; // the peer's WRITEs, READs and atomics
const RESULTS: u64 = 1536 << 10; // what own READs and atomics bring
const PART: u64 = 512 << 10;

#[derive(Clone, Debug)]
struct Step {
    kind: u8,
    from_a: bool,
    place: u64,
    length: u64,
    sges: u64,
}

fn step() -> impl Strategy<Value = Step> {
    let length = prop_oneof![4 => 0u64..200, 1 => 0u64..5000, 1 => 200_000u64..400_000];
    (0u8..14, any::<bool>(), any::<u32>(), length, 1u64..5).prop_map(|(kind, from_a, place, length, sges)| Step {
        kind,
        from_a,
        place: u64::from(place),
        length,
        sges,
    })
}

/// The model's record of a posted request.
struct Posted {
    id: u64,
    signaled: bool,
    /// Bytes that a RECV must find.
    payload: Option<Vec<u8>>,
}

struct Side {
    end: End,
    /// Its memory, as it must be if all its peer's and its own requests succeed in order.
    model: Vec<u8>,
    posted: VecDeque<Posted>,
    /// Positions and lengths of the posted RECVs.
    receives: VecDeque<(u64, u64, u64)>,
    next_receive: u64,
    next_result: u64,
    /// Over its part `TARGET`, named from `iova` on: for windows only.
    region: MrKeys,
    iova: u64,
    mw: MwId,
    kind: WindowKind,
    /// The window's key, bound or not.
    mw_key: u32,
    open: Option<Opening>,
}

/// The range that a bound window shows: `length` bytes from `offset` on, named from `start` on.
#[derive(Clone, Copy)]
struct Opening {
    key: u32,
    offset: u64,
    length: u64,
    start: u64,
}

struct Run {
    net: Net,
    sides: [Side; 2],
    rng: SimRng,
    ids: u64,
    /// Numbers of the SRQs of XRC.
    srqns: [u32; 2],
    /// Chooses steps after which the engine is written down and read back.
    cuts: Option<SimRng>,
    /// The second end has gone away, with requests that it had posted.
    ended: bool,
}

/// An initiator at each end, whose messages come to a target and an SRQ of the other.
fn xrc_pairs(net: &mut Net) -> [End; 2] {
    let mut ends = [net.end(QpType::XrcSend), net.end(QpType::XrcSend)];
    let targets = ends.map(|end| {
        let (qp, qpn) = net.qp(&end, QpType::XrcReceive);
        End { qp, qpn, ..end }
    });
    for (from, to) in [(0, 1), (1, 0)] {
        net.connect(&ends[from], &targets[to]);
        net.connect(&targets[to], &ends[from]);
        ends[to].srq = Some(net.xrc_srq(&targets[to]).0);
    }
    ends
}

impl Run {
    fn new(seed: u64, put_off: bool, xrc: bool) -> Self {
        let mut net = Net::new();
        net.world.put_off = put_off.then_some(SimRng(seed ^ 1));
        let ends = if xrc { xrc_pairs(&mut net) } else { net.pair(QpType::Rc).into() };
        let mut rng = SimRng(seed);
        let sides = ends.map(|end| {
            for byte in net.world.bytes(end.session, MEMORY_BASE + SOURCE, PART as usize) {
                *byte = rng.roll(256) as u8;
            }
            let model = net.world.memory[&end.session].clone();
            // A window of type 2 opens nothing to what arrives at another QP: a target.
            let kind = if xrc || rng.roll(2) == 0 { WindowKind::Type1 } else { WindowKind::Type2 };
            let (mw, mw_key) = net.engine.alloc_mw(end.session, end.pd, kind).unwrap();
            let (at, access) = (MEMORY_BASE + TARGET, Access::LOCAL_WRITE.union(Access::MW_BIND));
            let region = net.engine.register_mr(end.session, end.pd, at, PART, at, access).unwrap();
            let (posted, receives) = (VecDeque::new(), VecDeque::new());
            let (next_receive, next_result, iova, open) = (0, 0, at, None);
            Side { end, model, posted, receives, next_receive, next_result, region, iova, mw, kind, mw_key, open }
        });
        let srqns = sides.each_ref().map(|side| net.srqns.get(&side.end.session).copied().unwrap_or(0));
        Self { net, sides, rng, ids: 0, srqns, cuts: None, ended: false }
    }

    /// Cuts a range of an end's memory into entries.
    fn cut(&mut self, end: &End, offset: u64, length: u64, pieces: u64) -> Vec<Sge> {
        let mut sges = Vec::new();
        let mut done = 0;
        for left in (0..pieces).rev() {
            let now = if left == 0 { length - done } else { self.rng.roll(length - done + 1) };
            sges.push(end.sge(offset + done, now as u32));
            done += now;
        }
        sges
    }

    fn apply(&mut self, step: &Step) {
        let (me, peer) = if step.from_a { (0, 1) } else { (1, 0) };
        match step.kind {
            0 | 1 => self.post_receive(peer, step.length.max(64), step.sges),
            2..=4 => self.post_send(me, peer, step, None),
            5 | 6 => self.post_write(me, peer, step),
            7 => self.post_read(me, peer, step),
            8 => self.post_atomic(me, peer, step),
            9 | 10 => self.open_window(me, step),
            11 => self.close_window(me, peer, step),
            12 => self.move_region(me, step),
            _ => self.progress(),
        }
        if self.cuts.as_mut().is_some_and(|rng| rng.roll(2) == 0) {
            let snapshot = self.net.engine.snapshot();
            self.net.engine = Engine::restore(&snapshot).unwrap();
            assert!(self.net.engine.snapshot() == snapshot, "what was read is what was written");
        }
    }

    fn post_receive(&mut self, side: usize, length: u64, pieces: u64) {
        let Side { end, next_receive, .. } = self.sides[side];
        if next_receive + length > PART {
            return;
        }
        self.ids += 1;
        let sges = self.cut(&end, RECEIVES + next_receive, length, pieces);
        self.sides[side].receives.push_back((self.ids, RECEIVES + next_receive, length));
        self.sides[side].next_receive += length;
        self.net.post_receive(&end, self.ids, &sges);
    }

    fn post(&mut self, me: usize, mut request: SendRequest, payload: Option<Vec<u8>>) {
        self.ids += 1;
        let signaled = self.rng.roll(3) > 0;
        request.work_request_id = self.ids;
        request.remote_srqn = self.srqns[1 - me];
        request.flags.0 = (request.flags.0 & !SendFlags::SIGNALED) | if signaled { SendFlags::SIGNALED } else { 0 };
        let end = self.sides[me].end;
        self.sides[me].posted.push_back(Posted { id: self.ids, signaled, payload });
        self.net.post_send(&end, request);
    }

    /// A request with the bytes at `offset` as its source, sometimes inline.
    fn with_source(&mut self, me: usize, opcode: Op, step: &Step, length: u64) -> (SendRequest, Vec<u8>) {
        let end = self.sides[me].end;
        let offset = SOURCE + step.place % (PART - length + 1);
        let bytes = self.sides[me].model[offset as usize..(offset + length) as usize].to_vec();
        if length <= 1024 && self.rng.roll(3) == 0 {
            let mut request = request(0, opcode, &[]);
            request.flags.0 |= SendFlags::INLINE;
            request.inline_length = length as u16;
            request.inline_data[..bytes.len()].copy_from_slice(&bytes);
            return (request, bytes);
        }
        let sges = self.cut(&end, offset, length, step.sges);
        (request(0, opcode, &sges), bytes)
    }

    /// Only into a RECV that is there and fits: a message that does not is another test's business.
    fn post_send(&mut self, me: usize, peer: usize, step: &Step, invalidates: Option<u32>) {
        let claimed = self.sides[me].posted.iter().filter(|posted| posted.payload.is_some()).count();
        let Some(&(_, offset, room)) = self.sides[peer].receives.get(claimed) else {
            return self.post_receive(peer, step.length.max(64), step.sges);
        };
        let length = step.length.min(room);
        let opcode = if invalidates.is_some() { Op::SendWithInvalidate } else { Op::SendWithImmediate };
        let (request, bytes) = self.with_source(me, opcode, step, length);
        let request = SendRequest { immediate: invalidates.unwrap_or(0), ..request };
        self.sides[peer].model[offset as usize..(offset + length) as usize].copy_from_slice(&bytes);
        if invalidates.is_some() {
            self.sides[peer].open = None;
        }
        self.post(me, request, Some(bytes));
    }

    /// How a request may name a range of an end's `TARGET`: by its window too, if that shows it.
    fn name(&mut self, peer: usize, at: u64, length: u64, request: SendRequest) -> SendRequest {
        let side = &self.sides[peer];
        let shown = side.open.filter(|open| at >= open.offset && at + length <= open.offset + open.length);
        match shown {
            Some(open) if self.rng.roll(3) > 0 => {
                SendRequest { rkey: open.key, remote_address: open.start + (at - open.offset), ..request }
            }
            _ => SendRequest { rkey: side.end.key, remote_address: MEMORY_BASE + at, ..request },
        }
    }

    /// Binds an end's window. The peer may use it from then on: so all that was posted before is
    /// done, and the binding too.
    fn open_window(&mut self, me: usize, step: &Step) {
        self.net.settle();
        let Side { kind, mw_key, region, iova, open, .. } = self.sides[me];
        if open.is_some() && kind == WindowKind::Type2 {
            return;
        }
        let offset = (step.place % (PART / 2)) & !7;
        let length = 1 + (step.place >> 4) % (PART - offset);
        let key = (mw_key & !0xff) | self.rng.roll(256) as u32;
        let zero_based = kind == WindowKind::Type2 && step.sges > 2;
        let access = Access(0xe | if zero_based { Access::ZERO_BASED.0 } else { 0 });
        let bind = SendRequest {
            rkey: key,
            immediate: region.lkey,
            remote_address: iova + offset,
            compare_add: length,
            swap: u64::from(access.0),
            ..request(0, Op::BindWindow, &[])
        };
        self.post(me, bind, None);
        self.net.settle();
        let start = if zero_based { 0 } else { iova + offset };
        self.sides[me].mw_key = key;
        // Behind a request that waits for a dead end it is not executed.
        self.sides[me].open = self.is_idle(me).then_some(Opening { key, offset: TARGET + offset, length, start });
    }

    /// All that the end posted is done, with success.
    fn is_idle(&self, side: usize) -> bool {
        let end = self.sides[side].end;
        let waits = self.net.world.sends.get(&end.qp).is_some_and(|ring| !ring.posted.is_empty());
        !waits && self.net.state(&end) == QpState::ReadyToSend
    }

    /// Takes the peer's binding away: by a message behind all that use it, or by the peer itself after them.
    fn close_window(&mut self, me: usize, peer: usize, step: &Step) {
        let Side { kind, open, .. } = self.sides[peer];
        let Some(Opening { key, .. }) = open else { return };
        if kind == WindowKind::Type2 && step.sges > 1 {
            return self.post_send(me, peer, step, Some(key));
        }
        self.net.settle();
        let close = match kind {
            WindowKind::Type1 => SendRequest { rkey: key, ..request(0, Op::BindWindow, &[]) },
            WindowKind::Type2 => SendRequest { immediate: key, ..request(0, Op::LocalInvalidate, &[]) },
        };
        self.post(peer, close, None);
        self.sides[peer].open = None;
    }

    /// Names an end's region for windows again, which a bound window forbids.
    fn move_region(&mut self, me: usize, step: &Step) {
        self.net.settle();
        let Side { end, region, open, .. } = self.sides[me];
        let iova = (1 << 40) + (step.place << 12);
        let moved = Translation { address: MEMORY_BASE + TARGET, length: PART, iova };
        let change = RegionChange { translation: Some(moved), access: None };
        match self.net.engine.reregister_mr(end.session, region.mr, None, &change) {
            Ok(keys) => {
                assert_eq!(keys, region);
                assert!(open.is_none() || !self.is_idle(me));
                self.sides[me].iova = iova;
            }
            Err(refused) => {
                assert_eq!(refused, Refusal::Error(VerbsError::Busy));
                // An invalidation that the other end posted before it went was perhaps never executed.
                assert!(open.is_some() || !self.is_idle(me) || self.ended);
            }
        }
    }

    fn post_write(&mut self, me: usize, peer: usize, step: &Step) {
        let (request, bytes) = self.with_source(me, Op::RdmaWrite, step, step.length);
        let to = TARGET + (step.place >> 8) % (PART - step.length + 1);
        self.sides[peer].model[to as usize..to as usize + bytes.len()].copy_from_slice(&bytes);
        let request = self.name(peer, to, step.length, request);
        self.post(me, request, None);
    }

    fn results(&mut self, me: usize, length: u64, pieces: u64) -> Option<(u64, Vec<Sge>)> {
        let Side { end, next_result, .. } = self.sides[me];
        if next_result + length > PART {
            return None;
        }
        self.sides[me].next_result += length;
        Some((RESULTS + next_result, self.cut(&end, RESULTS + next_result, length, pieces)))
    }

    fn post_read(&mut self, me: usize, peer: usize, step: &Step) {
        let Some((to, sges)) = self.results(me, step.length, step.sges) else { return };
        let from = TARGET + step.place % (PART - step.length + 1);
        let bytes = self.sides[peer].model[from as usize..(from + step.length) as usize].to_vec();
        self.sides[me].model[to as usize..to as usize + bytes.len()].copy_from_slice(&bytes);
        let request = self.name(peer, from, step.length, request(0, Op::RdmaRead, &sges));
        self.post(me, request, None);
    }

    fn post_atomic(&mut self, me: usize, peer: usize, step: &Step) {
        let Some((to, sges)) = self.results(me, 8, 1) else { return };
        let at = (TARGET + step.place % (PART - 8)) & !7;
        let word = &mut self.sides[peer].model[at as usize..at as usize + 8];
        let before = u64::from_ne_bytes((&*word).try_into().unwrap());
        let (opcode, compare_add, after) = match step.length % 3 {
            0 => (Op::FetchAdd, step.place, before.wrapping_add(step.place)),
            1 => (Op::CompareSwap, before, step.place),
            _ => (Op::CompareSwap, before ^ 1, before),
        };
        word.copy_from_slice(&after.to_ne_bytes());
        self.sides[me].model[to as usize..to as usize + 8].copy_from_slice(&before.to_ne_bytes());
        let request = SendRequest { compare_add, swap: step.place, ..request(0, opcode, &sges) };
        let request = self.name(peer, at, 8, request);
        self.post(me, request, None);
    }

    /// Some of: a turn of either QP, a landing, a ready QP, time.
    fn progress(&mut self) {
        for _ in 0..self.rng.roll(8) {
            let net = &mut self.net;
            match self.rng.roll(5) {
                0 | 1 => {
                    let qp = self.sides[self.rng.roll(2) as usize].end.qp;
                    net.engine.run(&mut net.world, net.now, qp, 1 + self.rng.roll(300_000));
                }
                2 if !net.world.pending.is_empty() => {
                    let which = self.rng.roll(net.world.pending.len() as u64) as usize;
                    net.land(which);
                }
                3 => {
                    if let Some(qp) = net.engine.poll_ready() {
                        net.engine.run(&mut net.world, net.now, qp, 1 + self.rng.roll(300_000));
                    }
                }
                _ => {
                    net.now.0 += self.rng.roll(1_000_000);
                    let now = net.now;
                    if net.engine.poll_timeout().is_some_and(|at| at <= now) {
                        net.engine.handle_timeout(&mut net.world, now);
                    }
                }
            }
        }
    }

    fn finish(&mut self) {
        self.net.settle();
        while self.net.expire() {}
        self.net.settle();
        assert!(self.net.world.pending.is_empty());
    }

    /// Splits an end's completions by queue.
    fn completions(&mut self, side: usize) -> [Vec<Completion>; 2] {
        let end = self.sides[side].end;
        let (sent, received) =
            self.net.polls(&end).into_iter().partition(|done| done.flags.contains(CompletionFlags::SEND_QUEUE));
        [sent, received]
    }
}

/// Checks one end's send completions: successes of signaled requests in order, then errors for all the rest in order.
/// Gives the number of requests that surely succeeded.
fn check_sends(side: &Side, sent: &[Completion], all_must_succeed: bool) -> usize {
    let mut posted = side.posted.iter().enumerate().peekable();
    let mut succeeded = 0;
    let mut failed = false;
    for done in sent {
        if done.status == Status::Success {
            assert!(!failed, "no success after a failure");
            let (place, request) = posted.find(|(_, request)| request.signaled).expect("posted");
            assert_eq!(request.id, done.work_request_id);
            succeeded = place + 1;
            continue;
        }
        assert!(!all_must_succeed, "{done:?}");
        let (_, request) = posted
            .find(|(_, request)| failed || request.signaled || request.id == done.work_request_id)
            .expect("posted");
        assert_eq!(request.id, done.work_request_id);
        assert!(!failed || done.status == Status::WorkRequestFlushed);
        failed = true;
    }
    if failed {
        assert!(posted.next().is_none(), "all the rest is flushed");
    }
    succeeded
}

/// Checks one end's receive completions: each message once, in order, then flushes.
fn check_receives(run: &Run, side: usize, received: &[Completion]) -> usize {
    let messages: Vec<&Vec<u8>> = run.sides[1 - side].posted.iter().filter_map(|p| p.payload.as_ref()).collect();
    let memory = &run.net.world.memory[&run.sides[side].end.session];
    let mut succeeded = 0;
    for (place, done) in received.iter().enumerate() {
        let (id, offset, _) = run.sides[side].receives[place];
        assert_eq!((done.work_request_id, done.ring_position), (id, place as u32));
        if done.status == Status::Success {
            assert_eq!(succeeded, place, "no success after a flush");
            let bytes = messages[place];
            assert_eq!(done.byte_count as usize, bytes.len());
            assert!(memory[offset as usize..offset as usize + bytes.len()] == bytes[..], "the message's own bytes");
            succeeded += 1;
        } else {
            assert_eq!(done.status, Status::WorkRequestFlushed);
        }
    }
    succeeded
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn all_arrives_once_and_in_order(
        seed in any::<u64>(),
        put_off in any::<bool>(),
        xrc in any::<bool>(),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut run = Run::new(seed, put_off, xrc);
        for step in &steps {
            run.apply(step);
        }
        run.finish();
        for side in 0..2 {
            let [sent, received] = run.completions(side);
            check_sends(&run.sides[side], &sent, true);
            assert_eq!(sent.len(), run.sides[side].posted.iter().filter(|posted| posted.signaled).count());
            let succeeded = check_receives(&run, side, &received);
            assert_eq!(succeeded, run.sides[1 - side].posted.iter().filter(|p| p.payload.is_some()).count());
            let end = run.sides[side].end;
            prop_assert!(run.net.world.memory[&end.session] == run.sides[side].model);
            prop_assert_eq!(run.net.state(&end), QpState::ReadyToSend);
        }
        prop_assert!(run.net.world.largest_copy <= CHUNK_BYTES_MAX);
        prop_assert!(run.net.world.events.is_empty());
    }

    #[test]
    fn a_run_repeats_itself(
        seed in any::<u64>(),
        xrc in any::<bool>(),
        steps in prop::collection::vec(step(), 1..30),
    ) {
        let run = || {
            let mut run = Run::new(seed, true, xrc);
            for step in &steps {
                run.apply(step);
            }
            run.finish();
            (run.completions(0), run.completions(1), run.net.now, run.sides[0].end.key, run.net.world.copies)
        };
        prop_assert_eq!(run(), run());
    }

    #[test]
    fn a_run_goes_on_after_a_snapshot(
        seed in any::<u64>(),
        xrc in any::<bool>(),
        steps in prop::collection::vec(step(), 1..30),
        how in prop::option::of(0u8..5),
    ) {
        let run = |cuts: Option<SimRng>| {
            let mut run = Run::new(seed, true, xrc);
            run.cuts = cuts;
            for step in &steps {
                run.apply(step);
            }
            if let Some(how) = how {
                go_away(&mut run, how);
            }
            run.finish();
            let snapshot = run.net.engine.snapshot();
            (run.completions(0), run.completions(1), run.net.now, run.net.world.copies, snapshot)
        };
        prop_assert_eq!(run(None), run(Some(SimRng(seed ^ 2))));
    }

    #[test]
    fn an_end_goes_away(
        seed in any::<u64>(),
        put_off in any::<bool>(),
        xrc in any::<bool>(),
        steps in prop::collection::vec(step(), 1..40),
        later in prop::collection::vec(step(), 0..20),
        how in 0u8..9,
    ) {
        let mut run = Run::new(seed, put_off, xrc);
        let how = if xrc || !matches!(how, 5 | 6) { how } else { how + 2 };
        for step in &steps {
            run.apply(step);
        }
        let victim = run.sides[1].end;
        let done = go_away(&mut run, how);
        run.ended = true;
        for step in &later {
            // A post to the end that is gone does not happen.
            if step.from_a && !matches!(step.kind, 0..=4 | 11) {
                run.apply(step);
            } else {
                run.progress();
            }
        }
        run.finish();
        if !done {
            prop_assert!(go_away(&mut run, how), "after the landings it can be done");
        }
        if how < 3 {
            // Nothing of it is in use: its memory can go.
            prop_assert_eq!(run.net.engine.copies_in_flight(victim.session), 0);
            prop_assert_eq!(run.net.engine.deregister_mr(victim.session, victim.mr), Ok(()));
        }
        run.net.work();
        check_after(&mut run, how);
    }
}

/// True once it is done.
fn go_away(run: &mut Run, how: u8) -> bool {
    let end = run.sides[1].end;
    let net = &mut run.net;
    let refused = match how {
        0 => net.to(&end, QpState::Error).err(),
        1 => net.to(&end, QpState::Reset).err(),
        2 => net.engine.destroy_qp(&mut net.world, net.now, end.session, end.qp).err(),
        3 => net.engine.deregister_mr(end.session, end.mr).err(),
        7 => net.engine.dealloc_mw(end.session, run.sides[1].mw).err(),
        8 => {
            let fewer = RegionChange { access: Some(Access(0x7)), ..RegionChange::default() };
            net.engine.reregister_mr(end.session, end.mr, None, &fewer).err()
        }
        5 => net.engine.destroy_srq(end.session, end.srq.unwrap()).err(),
        // Its target: the fourth QP of all.
        6 => net.to(&End { qp: net.qps[3], ..end }, QpState::Error).err(),
        _ => {
            net.die(end.session);
            None
        }
    };
    assert!(matches!(refused, None | Some(Refusal::InFlight | Refusal::Error(VerbsError::NotFound))), "{refused:?}");
    refused != Some(Refusal::InFlight)
}

fn check_after(run: &mut Run, how: u8) {
    let [sent, received] = run.completions(0);
    check_sends(&run.sides[0], &sent, false);
    let arrived_at_a = check_receives(run, 0, &received);
    let [sent_b, received_b] = run.completions(1);
    let succeeded_b = check_sends(&run.sides[1], &sent_b, false);
    // Without its keys or its window it fails RECVs, too.
    if !matches!(how, 3 | 7 | 8) {
        check_receives(run, 1, &received_b);
    }
    // Messages reported to the sender as successful have arrived.
    let reported = run.sides[1].posted.iter().take(succeeded_b).filter(|posted| posted.payload.is_some()).count();
    assert!(reported <= arrived_at_a);
    // Nothing but the parts that requests name was written.
    for side in 0..2 {
        let end = run.sides[side].end;
        let memory = &run.net.world.memory[&end.session];
        assert!(memory[SOURCE as usize..PART as usize] == run.sides[side].model[SOURCE as usize..PART as usize]);
        let free = (RECEIVES + run.sides[side].next_receive) as usize..TARGET as usize;
        assert!(memory[free].iter().all(|byte| *byte == 0));
        let free = (RESULTS + run.sides[side].next_result) as usize..MEMORY_BYTES;
        assert!(memory[free].iter().all(|byte| *byte == 0));
    }
    // The survivor can always be taken down.
    let a = run.sides[0].end;
    let net = &mut run.net;
    assert_eq!(net.engine.destroy_qp(&mut net.world, net.now, a.session, a.qp), Ok(()));
    assert_eq!(net.engine.deregister_mr(a.session, a.mr), Ok(()));
    assert_eq!(net.engine.dealloc_mw(a.session, run.sides[0].mw), Ok(()));
    assert_eq!(net.engine.deregister_mr(a.session, run.sides[0].region.mr), Ok(()));
    assert_eq!(net.engine.poll_timeout(), None);
    net.work();
}
