//! Many QPs to one host: how much of theirs is on the way, who comes next, and that none waits for ever. The peer is a
//! script: a line that brings packets in order, and responders that acknowledge.
use crate::common::peer::{HOST, PEER_QPN, datagram, destination, peer_gid};
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::{
    Aeth, Header, NakCode, Opcode, Operation as O, PacketPosition as P, Service, Syndrome as Aeths, psn_add,
};
use std::collections::VecDeque;

const LIMIT: u64 = 2 << 20;
const MESSAGE: u32 = 64 * 1024;
const FIRST_PEER_QPN: u32 = 0x4000;
const FIRST_PSN: u32 = 0xff_fff0;
const TURN_BYTES: u64 = 64 * 1024;
/// Nanoseconds that a packet of 4 KB takes: 10 Gb/s.
const PACKET_NS: u64 = 3_300;
/// One burst.
const SHORT: u32 = 32 * 1024;

struct Member {
    end: End,
    expected: u32,
    /// A gap was reported.
    reported: bool,
    /// Its peer takes packets.
    answers: bool,
    /// It always has something to do.
    busy: bool,
    taken_bytes: u64,
    posted: u64,
}

struct Crowd {
    net: Net,
    members: Vec<Member>,
    active: VecDeque<QpId>,
    rng: SimRng,
    /// One packet in so many is lost.
    loss: Option<u64>,
    /// Packets that the peer takes in one go.
    batch: usize,
    most_in_flight: u64,
}

fn attributes() -> QpAttributes {
    QpAttributes { timeout: 14, retry_count: 7, rnr_retry: 3, max_rd_atomic: 4, ..Default::default() }
}

impl Crowd {
    /// So many QPs for each vNIC.
    fn new(vnics: &[usize]) -> Self {
        Self::with(vnics, attributes())
    }

    fn with(vnics: &[usize], rts: QpAttributes) -> Self {
        let mut net = Net::new();
        net.world.paths.insert(peer_gid(), destination());
        let mut ends = Vec::new();
        for count in vnics {
            let first = net.end(QpType::Rc);
            ends.push(first);
            for _ in 1..*count {
                let (qp, qpn) = net.qp(&first, QpType::Rc);
                ends.push(End { qp, qpn, ..first });
            }
        }
        let member = |end| Member {
            end,
            expected: FIRST_PSN,
            reported: false,
            answers: true,
            busy: false,
            taken_bytes: 0,
            posted: 0,
        };
        let members: Vec<Member> = ends.into_iter().map(member).collect();
        let (active, rng) = (VecDeque::new(), SimRng(7));
        let mut crowd = Self { net, members, active, rng, loss: None, batch: 32, most_in_flight: 0 };
        (0..crowd.members.len()).for_each(|at| crowd.connect(at, rts));
        crowd
    }

    fn connect(&mut self, at: usize, rts: QpAttributes) {
        use QpAttributeMask as M;
        let (end, dest_qpn) = (self.members[at].end, FIRST_PEER_QPN + at as u32);
        let connected = Some((end.gid, end.qpn));
        let info = PeerInfo { network: NetworkId(1), gid: peer_gid(), ipv6_gid: None, service: QpType::Rc, connected };
        self.net.world.peers.insert((HOST, Qpn(dest_qpn)), PeerAnswer::Known(info));
        self.net.init(&end);
        let rtr = QpAttributes {
            state: QpState::ReadyToReceive,
            address: address(peer_gid()),
            dest_qpn,
            path_mtu: PathMtu::Mtu4096,
            max_dest_rd_atomic: 4,
            ..Default::default()
        };
        let path = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        self.net.modify(&end, &rtr, M::STATE | path).unwrap();
        self.net.rts_with(&end, QpAttributes { sq_psn: FIRST_PSN, ..rts });
        self.members[at].expected = FIRST_PSN;
    }

    fn post(&mut self, at: usize, opcode: SendOpcode, length: u32) {
        let member = &mut self.members[at];
        member.posted += 1;
        let (end, id) = (member.end, member.posted);
        let request = request(id, opcode, &[end.sge(0, length)]);
        self.net.post_send(&end, SendRequest { remote_address: 0x7000, rkey: 0x55aa, ..request });
        self.activate(end.qp);
    }

    fn write(&mut self, at: usize) {
        self.post(at, SendOpcode::RdmaWrite, MESSAGE);
    }

    fn activate(&mut self, qp: QpId) {
        if !self.active.contains(&qp) {
            self.active.push_back(qp);
        }
    }

    fn all_busy(&mut self) {
        self.members.iter_mut().for_each(|member| member.busy = true);
    }

    /// The peer takes a batch; timers expire; each QP that has work has a turn, as a router gives it.
    fn step(&mut self) {
        for _ in 0..self.batch {
            let Some(sent) = self.net.world.sent.pop_front() else { break };
            self.net.now = Instant(self.net.now.0 + PACKET_NS);
            if self.loss.is_none_or(|loss| self.rng.roll(loss) != 0) {
                self.take(&sent);
            }
        }
        self.net.now = Instant(self.net.now.0 + PACKET_NS);
        if self.net.engine.poll_timeout().is_some_and(|at| at <= self.net.now) {
            self.net.engine.handle_timeout(&mut self.net.world, self.net.now);
        }
        for at in 0..self.members.len() {
            let member = &self.members[at];
            let posted = self.net.world.sends.get(&member.end.qp).map_or(0, |ring| ring.posted.len());
            if member.busy && posted < 8 {
                self.write(at);
            }
        }
        self.turns();
    }

    fn turns(&mut self) {
        self.take_ready();
        for _ in 0..self.active.len() {
            let qp = self.active.pop_front().unwrap();
            if self.net.engine.run(&mut self.net.world, self.net.now, qp, TURN_BYTES) == Progress::More {
                self.activate(qp);
            }
        }
        self.take_ready();
        self.most_in_flight = self.most_in_flight.max(self.in_flight());
        self.check();
    }

    fn steps(&mut self, count: usize) {
        (0..count).for_each(|_| self.step());
    }

    fn take_ready(&mut self) {
        while let Some(qp) = self.net.engine.poll_ready() {
            self.activate(qp);
        }
    }

    /// Bytes that the members have on the way.
    fn in_flight(&self) -> u64 {
        self.net.engine.wire_qps().map(|status| status.in_flight_bytes).sum()
    }

    fn flow(&self) -> HostStatus {
        let nothing = HostStatus { host: HOST, in_flight_bytes: 0, waiting: 0 };
        self.net.engine.host_flows().next().unwrap_or(nothing)
    }

    /// A snapshot is refused if sums and lists are not those of the QPs.
    fn check(&mut self) {
        assert!(self.flow().in_flight_bytes >= self.in_flight());
        if self.rng.roll(64) == 0 {
            let snapshot = self.net.engine.snapshot();
            let restored = Engine::restore(&snapshot).unwrap();
            assert!(restored.snapshot() == snapshot);
            self.net.engine = restored;
        }
    }

    fn take(&mut self, sent: &Sent) {
        let (header, payload) = Header::parse(&sent.bytes).unwrap();
        let member = &mut self.members[(header.dest_qpn - FIRST_PEER_QPN) as usize];
        if !member.answers {
            return;
        }
        let (qpn, behind) = (member.end.qpn, header.psn.wrapping_sub(member.expected) & 0xff_ffff);
        let mut answer = None;
        if behind == 0 {
            member.expected = psn_add(header.psn, 1);
            member.taken_bytes += payload.len() as u64;
            member.reported = false;
            answer = header.ack_request.then_some((header.psn, Aeths::ACK));
        } else if behind < 1 << 23 {
            answer = (!member.reported).then_some((member.expected, Aeths::Nak(NakCode::PsnSequence)));
            member.reported = true;
        } else if header.ack_request {
            answer = Some((psn_add(member.expected, 0xff_ffff), Aeths::ACK));
        }
        if let Some((psn, syndrome)) = answer {
            self.answer(qpn, psn, syndrome);
        }
    }

    fn answer(&mut self, qpn: Qpn, psn: u32, syndrome: Aeths) {
        let opcode = Opcode::new(Service::Rc, O::Acknowledge, P::Only).unwrap();
        let mut header = Header::new(opcode, qpn.0, psn);
        header.aeth = Aeth { syndrome, msn: 0 };
        let Net { engine, world, now, .. } = &mut self.net;
        engine.handle_datagram(world, *now, HOST, &IpInfo::default(), &datagram(header, &[]));
    }

    /// Nobody posts any more; all that was begun ends.
    fn finish(&mut self) {
        self.members.iter_mut().for_each(|member| member.busy = false);
        for _ in 0..200_000 {
            self.step();
            let idle = self.active.is_empty() && self.net.world.sent.is_empty();
            match self.net.engine.poll_timeout() {
                None if idle => break,
                Some(at) if idle => self.net.now = at.max(self.net.now),
                _ => {}
            }
        }
        assert_eq!(self.flow(), HostStatus { in_flight_bytes: 0, waiting: 0, ..self.flow() });
        assert_eq!((self.in_flight(), self.net.engine.poll_timeout()), (0, None));
    }

    fn taken(&self, members: std::ops::Range<usize>) -> u64 {
        members.map(|at| self.members[at].taken_bytes).sum()
    }

    fn state(&self, at: usize) -> QpState {
        self.net.state(&self.members[at].end)
    }

    fn successes(&mut self, at: usize) -> usize {
        let end = self.members[at].end;
        self.net.statuses(&end).iter().filter(|(_, status)| *status == CompletionStatus::Success).count()
    }
}

#[test]
fn no_more_than_the_limit_is_on_the_way_however_many_send() {
    // Where there are many vNICs, each may have a small share beside it, up to as much again.
    let cases = [
        (&[1usize][..], u64::from(MESSAGE), LIMIT),
        (&[256], LIMIT - 128 * 1024, LIMIT),
        (&[8; 32], LIMIT - 128 * 1024, 2 * LIMIT),
        (&[1; 128], LIMIT, 2 * LIMIT),
    ];
    for (vnics, least, limit) in cases {
        let mut crowd = Crowd::new(vnics);
        crowd.all_busy();
        crowd.steps(1_000);
        let most = crowd.most_in_flight;
        assert!(most <= limit + u64::from(MESSAGE) + 16 * 64, "{vnics:?}: {most}");
        assert!(most >= least, "{vnics:?}: {most}");
        assert!(crowd.taken(0..crowd.members.len()) > 20 << 20, "the line was not idle");
        crowd.finish();
    }
}

#[test]
fn a_hundred_queue_pairs_get_no_more_than_one() {
    let mut crowd = Crowd::new(&[1, 100]);
    // Less than a turn, so that one QP can keep the line busy.
    crowd.batch = 8;
    crowd.all_busy();
    crowd.steps(2_000);
    let (one, many) = (crowd.taken(0..1), crowd.taken(1..101));
    crowd.steps(6_000);
    let (one, many) = ((crowd.taken(0..1) - one) as f64, (crowd.taken(1..101) - many) as f64);
    assert!((0.8..1.25).contains(&(one / many)), "{one} {many}");
    let each: Vec<u64> = (1..101).map(|at| crowd.taken(at..at + 1)).collect();
    let (least, most) = (*each.iter().min().unwrap(), *each.iter().max().unwrap());
    assert!(most - least <= 4 * u64::from(MESSAGE), "{least} {most}");
    crowd.finish();
}

/// One tenant fills the limit with what never arrives; another's messages don't wait for it.
#[test]
fn a_small_share_is_always_there() {
    let mut crowd = Crowd::new(&[40, 1]);
    let small = crowd.members.len() - 1;
    for at in 0..small {
        crowd.members[at].answers = false;
        (0..4).for_each(|_| crowd.post(at, SendOpcode::RdmaWrite, MESSAGE));
    }
    crowd.turns();
    assert!(crowd.flow().waiting > 0 && crowd.flow().in_flight_bytes >= LIMIT);
    crowd.post(small, SendOpcode::RdmaWrite, SHORT);
    crowd.turns();
    while let Some(sent) = crowd.net.world.sent.pop_front() {
        crowd.take(&sent);
    }
    assert_eq!(crowd.members[small].taken_bytes, u64::from(SHORT));
}

#[test]
fn vnics_share_alike() {
    let mut crowd = Crowd::new(&[8; 64]);
    crowd.all_busy();
    crowd.steps(3_000);
    let each: Vec<u64> = (0..64).map(|at| crowd.taken(8 * at..8 * at + 8)).collect();
    let (least, most) = (*each.iter().min().unwrap(), *each.iter().max().unwrap());
    assert!(least * 10 > most * 9, "{each:?}");
    crowd.finish();
}

#[test]
fn losses_leave_the_sums_right() {
    for loss in [1_000, 100, 20] {
        let mut crowd = Crowd::new(&[1, 5, 60]);
        crowd.loss = Some(loss);
        crowd.all_busy();
        crowd.steps(2_000);
        crowd.finish();
        for at in 0..crowd.members.len() {
            let Member { end, posted, taken_bytes, .. } = crowd.members[at];
            assert_eq!((crowd.net.state(&end), taken_bytes), (QpState::ReadyToSend, posted * u64::from(MESSAGE)));
        }
    }
}

/// With room for one at a time: four QPs, of which one has sent and the others wait.
fn in_line() -> Crowd {
    let mut crowd = Crowd::new(&[2, 2]);
    crowd.net.engine.set_host_bytes_max(1);
    (0..4).for_each(|at| crowd.post(at, SendOpcode::RdmaWrite, SHORT));
    crowd.turns();
    assert_eq!(crowd.flow().waiting, 3);
    crowd
}

/// The others have their turn, whoever is gone.
fn others_go_on(mut crowd: Crowd, gone: &[usize]) {
    crowd.finish();
    for at in (0..4).filter(|at| !gone.contains(at)) {
        assert_eq!(crowd.members[at].taken_bytes, u64::from(SHORT), "{at} of those after {gone:?}");
    }
}

#[test]
fn who_goes_stops_nobody() {
    for gone in [&[0usize][..], &[1], &[2], &[3], &[0, 1], &[0, 2, 3], &[1, 2, 3]] {
        for way in [Some(QpState::Reset), Some(QpState::Error), None] {
            let mut crowd = in_line();
            for &at in gone {
                let end = crowd.members[at].end;
                match way {
                    None => {
                        crowd.net.engine.destroy_qp(&mut crowd.net.world, crowd.net.now, end.session, end.qp).unwrap();
                    }
                    Some(state) => drop(crowd.net.to(&end, state).unwrap()),
                }
                crowd.members[at].answers = false;
                crowd.net.world.sends.clear();
            }
            others_go_on(crowd, gone);
        }
    }
}

#[test]
fn a_session_that_ends_stops_nobody() {
    let mut crowd = in_line();
    let end = crowd.members[0].end;
    crowd.net.engine.destroy_session(&mut crowd.net.world, crowd.net.now, end.session);
    assert_eq!(crowd.flow().waiting, 1, "one was called");
    crowd.members[0].answers = false;
    crowd.members[1].answers = false;
    others_go_on(crowd, &[0, 1]);
}

/// Its process' words about its memory do not matter to others either.
#[test]
fn who_can_not_send_when_called_passes_its_place_on() {
    let mut crowd = in_line();
    let end = crowd.members[1].end;
    crowd.net.engine.deregister_mr(end.session, end.mr).unwrap();
    others_go_on(crowd, &[0, 1]);
}

#[test]
fn a_closed_gate_passes_its_place_on() {
    let mut crowd = in_line();
    for at in [1, 2] {
        let qpn = Qpn(FIRST_PEER_QPN + at);
        crowd.net.world.peers.insert((HOST, qpn), PeerAnswer::Absent);
        crowd.net.engine.handle_peer_changed(&mut crowd.net.world, crowd.net.now, HOST, Some(qpn));
    }
    others_go_on(crowd, &[1, 2]);
}

#[test]
fn a_receiver_that_is_not_ready_is_not_waited_for() {
    let mut crowd = in_line();
    let qpn = crowd.members[0].end.qpn;
    crowd.members[0].answers = false;
    crowd.answer(qpn, FIRST_PSN, Aeths::ReceiverNotReady { timer: 0 });
    assert_eq!(crowd.flow().waiting, 2, "one was called");
    crowd.members[0].answers = true;
    others_go_on(crowd, &[]);
}

/// Forty peers that never answer, without any timeout: what was sent to them lapses.
#[test]
fn dead_peers_stop_nobody() {
    for timeout in [0, 8, 14, 31] {
        let mut crowd = Crowd::with(&[40, 1], QpAttributes { timeout, ..attributes() });
        crowd.all_busy();
        (0..40).for_each(|at| crowd.members[at].answers = false);
        for _ in 0..4_000 {
            crowd.step();
            if crowd.active.is_empty() && crowd.net.world.sent.is_empty() {
                crowd.net.now = crowd.net.engine.poll_timeout().unwrap();
            }
        }
        let (taken, now) = (crowd.taken(40..41), crowd.net.now.0);
        assert!(taken > 10 << 20, "timeout {timeout}: {taken} in {now} ns");
        assert_eq!(crowd.state(40), QpState::ReadyToSend);
    }
}

/// Its peer has not been silent: it was not asked anything.
#[test]
fn waiting_for_others_is_no_silence_of_the_peer() {
    let mut crowd = Crowd::with(&[1, 1], QpAttributes { timeout: 8, retry_count: 1, ..attributes() });
    crowd.net.engine.set_host_bytes_max(1);
    crowd.members[1].answers = false;
    crowd.post(1, SendOpcode::RdmaWrite, SHORT);
    crowd.turns();
    crowd.net.world.sent.clear();
    crowd.post(0, SendOpcode::RdmaWrite, SHORT);
    crowd.turns();
    assert_eq!(crowd.flow().waiting, 1);
    // One timeout: it goes back, the other is called and sends, and nothing comes of that for long.
    assert!(crowd.net.engine.poll_timeout().is_some());
    while crowd.flow().waiting == 1
        && crowd.net.engine.vnic_counters(crowd.members[1].end.vnic).unwrap().ack_timeouts == 0
    {
        crowd.net.now = crowd.net.engine.poll_timeout().unwrap();
        crowd.net.engine.handle_timeout(&mut crowd.net.world, crowd.net.now);
    }
    crowd.turns();
    assert_eq!((crowd.flow().waiting, crowd.state(1)), (1, QpState::ReadyToSend));
    // The first one keeps the place by progress, a packet at a time, for six times the timeout.
    let qpn = crowd.members[0].end.qpn;
    for packet in 0..7 {
        crowd.net.now = Instant(crowd.net.now.0 + 900_000);
        crowd.answer(qpn, psn_add(FIRST_PSN, packet), Aeths::ACK);
        crowd.net.engine.handle_timeout(&mut crowd.net.world, crowd.net.now);
        crowd.turns();
        assert_eq!((crowd.flow().waiting, crowd.state(1)), (1, QpState::ReadyToSend), "{packet}");
    }
    crowd.members[0].expected = psn_add(FIRST_PSN, 7);
    crowd.members[1].answers = true;
    crowd.finish();
    assert_eq!((crowd.successes(0), crowd.successes(1)), (1, 1));
}

#[test]
fn reads_count_with_what_comes_back() {
    let mut crowd = Crowd::new(&[40]);
    for at in 0..40 {
        crowd.members[at].answers = false;
        (0..4).for_each(|_| crowd.post(at, SendOpcode::RdmaRead, MESSAGE));
    }
    for _ in 0..10 {
        crowd.turns();
    }
    let in_flight = crowd.in_flight();
    assert!((LIMIT..LIMIT + 2 * u64::from(MESSAGE)).contains(&in_flight), "{in_flight}");
    assert!(crowd.flow().waiting > 0);
}

/// The same calls give the same packets, wherever the engine is written down and read back.
#[test]
fn a_restored_engine_goes_on_in_the_same_order() {
    let run = |restores: bool| {
        let mut crowd = Crowd::new(&[1, 3, 40]);
        crowd.loss = Some(200);
        crowd.all_busy();
        let mut sent = Vec::new();
        for _ in 0..300 {
            crowd.step();
            sent.push((crowd.flow(), crowd.net.world.sent.back().cloned()));
            if restores {
                crowd.net.engine = Engine::restore(&crowd.net.engine.snapshot()).unwrap();
            }
        }
        assert!(sent.iter().any(|(flow, _)| flow.waiting > 30));
        (sent, crowd.net.engine.snapshot())
    };
    assert!(run(false) == run(true));
}

#[test]
fn word_is_waited_for_once_and_then_less() {
    let mut net = Net::new();
    let end = net.end(QpType::Ud);
    net.connect(&end, &end);
    net.world.paths.insert(peer_gid(), destination());
    net.world.peers.insert((HOST, Qpn(PEER_QPN)), PeerAnswer::Asked);
    let handle = net.engine.create_ah(end.session, end.pd, &address(peer_gid())).unwrap().index;
    let waits = |net: &mut Net| {
        let message = SendRequest {
            address_handle: handle,
            remote_qpn: PEER_QPN,
            remote_qkey: 0x1234,
            ..request(1, SendOpcode::Send, &[end.sge(0, 16)])
        };
        let start = net.now;
        net.post_send(&end, message);
        net.settle();
        while net.polls(&end).is_empty() {
            assert!(net.expire());
        }
        (net.now.0 - start.0) / 1_000_000
    };
    assert!((900..1100).contains(&waits(&mut net)));
    assert!((150..250).contains(&waits(&mut net)), "others in the queue are not held up by a host that is down");
    net.now = Instant(net.now.0 + 31_000_000_000);
    assert!((900..1100).contains(&waits(&mut net)));
}
