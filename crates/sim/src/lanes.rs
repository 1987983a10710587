//! Messages that the carrier took: each QP's lane brings them to their target one after the other;
//! see [`crate::carrier`].
use crate::sim::{Event, Host, Sim};
use freeflow_engine::*;
use freeflow_verbs::SendOpcode;

/// A target that says `Busy` so often in a row will never say anything else.
const BUSY_MAX: u32 = 20_000;
const BUSY_NS: u64 = 2_000;

impl Sim {
    /// Sends the messages on their way that a host's QPs gave to the carrier.
    pub(crate) fn settle_carrier(&mut self, host: usize) {
        for load in std::mem::take(&mut self.hosts[host].world.loads) {
            self.carrier_counts.taken += 1;
            let (qp, token, now) = (load.qp, load.token, self.now);
            let lane = self.lanes.entry((host, qp)).or_default();
            if now <= lane.broken_until {
                let at = lane.broken_until;
                self.carrier_counts.returned += 1;
                self.at(at, Event::Carried { host, token, carried: Carried::Returned });
                continue;
            }
            lane.loads.push_back(load);
            if lane.loads.len() == 1 {
                self.bring_next(host, qp);
            }
        }
        for qp in std::mem::take(&mut self.hosts[host].world.withdrawn) {
            if let Some(lane) = self.lanes.get_mut(&(host, qp)) {
                lane.is_withdrawn = !lane.loads.is_empty();
            }
        }
        for qp in std::mem::take(&mut self.hosts[host].world.put_off) {
            let at = self.now + self.carrier_delay_ns();
            self.at(at, Event::CarrierReady { host, qp });
        }
    }

    fn carrier_delay_ns(&mut self) -> u64 {
        1 + self.carrier_rng.roll(self.host_model.carrier_model.delay_ns_max)
    }

    fn bring_next(&mut self, host: usize, qp: QpId) {
        let at = self.now + self.carrier_delay_ns();
        self.at(at, Event::Bring { host, qp });
    }

    /// The oldest message of a lane is at its target.
    pub(crate) fn bring(&mut self, host: usize, qp: QpId) {
        let Some(lane) = self.lanes.get(&(host, qp)) else { return };
        let Some(load) = lane.loads.front() else { return };
        let (head, to, is_withdrawn) = (load.head, self.find(host, load.to, load.head.dest_qpn), lane.is_withdrawn);
        if is_withdrawn || self.carrier_rng.happens(self.host_model.carrier_model.breaks) {
            return self.break_lane(host, qp);
        }
        let (now, mut spans) = (self.instant(), Vec::new());
        let from = self.id_of(to, host);
        let Host { engine, world, .. } = self.enter(to);
        let admission = engine.admit_carried(world, now, from, &head, &mut spans);
        self.after(to);
        self.note(|| format!("h{host}>h{to} by carrier {head:?}: {admission:?}"));
        match admission {
            Admission::Admitted(token) => {
                let at = self.now + self.carrier_delay_ns();
                self.at(at, Event::Landed { host, qp, token, spans });
            }
            Admission::NotReady(delay) => self.bring_again(host, qp, delay.0),
            Admission::Busy => {
                let lane = self.lanes.get_mut(&(host, qp)).expect("the lane has a message");
                lane.busy_count += 1;
                match lane.busy_count <= BUSY_MAX {
                    true => self.at(now.0 + BUSY_NS, Event::Bring { host, qp }),
                    false => self.wrongs.push(format!("h{to} is busy for ever: {head:?}")),
                }
            }
            Admission::Answered(carried) => self.answer(host, qp, carried),
        }
    }

    /// No RECV was there.
    fn bring_again(&mut self, host: usize, qp: QpId, delay_ns: u64) {
        let Some(load) = self.lanes.get_mut(&(host, qp)).and_then(|lane| lane.loads.front_mut()) else { return };
        match &mut load.rnr_retries_left {
            Some(0) => return self.answer(host, qp, Carried::Failed(CarryFailure::ReceiverNotReady)),
            Some(left) => *left -= 1,
            None => {}
        }
        let at = self.now + delay_ns;
        self.at(at, Event::Bring { host, qp });
    }

    /// The oldest message of a lane was admitted, and its bytes move now, unless the lane breaks.
    pub(crate) fn land_carried(&mut self, host: usize, qp: QpId, token: Token, spans: &[Span]) {
        let model = self.host_model.carrier_model;
        let breaks = self.carrier_rng.happens(model.breaks);
        let Some(load) = self.lanes.get(&(host, qp)).and_then(|lane| lane.loads.front()) else { return };
        let reads = load.head.opcode == SendOpcode::RdmaRead;
        let to = self.find(host, load.to, load.head.dest_qpn);
        let requesters_side = if reads { MemorySide::Destination } else { MemorySide::Source };
        let result = match breaks && !model.lies {
            true => Err(requesters_side),
            false => self.move_bytes(host, qp, to, spans),
        };
        let now = self.instant();
        let Host { engine, world, .. } = self.enter(to);
        let carried = engine.handle_landed(world, now, token, result);
        self.after(to);
        self.note(|| format!("h{host}>h{to} by carrier, landed {result:?}: {carried:?}, breaks: {breaks}"));
        if breaks { self.break_lane(host, qp) } else { self.answer(host, qp, carried) }
    }

    fn move_bytes(&mut self, host: usize, qp: QpId, to: usize, spans: &[Span]) -> Result<(), MemorySide> {
        let load = self.lanes[&(host, qp)].loads.front().expect("the lane has a message");
        let (own, mut bytes) = (load.spans.clone(), load.bytes.clone());
        let reads = load.head.opcode == SendOpcode::RdmaRead;
        let (source, destination) =
            if reads { ((to, spans), (host, &own[..])) } else { ((host, &own[..]), (to, spans)) };
        for ((host, spans), side) in [(source, MemorySide::Source), (destination, MemorySide::Destination)] {
            if !self.hosts[host].world.is_there(spans) {
                return Err(side);
            }
        }
        self.hosts[source.0].world.read_into(source.1, &mut bytes);
        self.hosts[destination.0].world.write_spans(&bytes, destination.1);
        Ok(())
    }

    /// The oldest message of a lane has its result, which goes back to the requester.
    fn answer(&mut self, host: usize, qp: QpId, carried: Carried) {
        if carried != Carried::Executed {
            // A message behind one that was not executed is not executed either.
            self.take_off(host, qp, carried);
            return self.break_lane(host, qp);
        }
        self.take_off(host, qp, carried);
        if !self.lanes[&(host, qp)].loads.is_empty() {
            self.bring_next(host, qp);
        }
    }

    fn take_off(&mut self, host: usize, qp: QpId, carried: Carried) {
        let delay = self.carrier_delay_ns();
        let lane = self.lanes.get_mut(&(host, qp)).expect("the lane has a message");
        let Some(load) = lane.loads.pop_front() else { return };
        lane.busy_count = 0;
        lane.is_withdrawn &= !lane.loads.is_empty();
        lane.last_result_at = lane.last_result_at.max(self.now + delay);
        let (at, token) = (lane.last_result_at, load.token);
        match carried {
            Carried::Executed => self.carrier_counts.executed += 1,
            Carried::Returned => self.carrier_counts.returned += 1,
            Carried::Failed(_) => {}
        }
        self.at(at, Event::Carried { host, token, carried });
    }

    /// All that a lane has is given back.
    fn break_lane(&mut self, host: usize, qp: QpId) {
        self.note(|| format!("h{host} the lane of {qp:?} breaks"));
        while !self.lanes[&(host, qp)].loads.is_empty() {
            self.take_off(host, qp, Carried::Returned);
        }
        let lane = self.lanes.get_mut(&(host, qp)).expect("the lane is there");
        lane.broken_until = lane.last_result_at;
    }

    /// Messages that the carrier has.
    pub fn messages_carried(&self) -> usize {
        self.lanes.values().map(|lane| lane.loads.len()).sum()
    }
}
