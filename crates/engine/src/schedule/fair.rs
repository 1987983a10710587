//! The scheduler that FreeFlow has: token buckets at three *gates* (of a QP, of its vNIC, of its
//! vNIC's tenant), and an [`Order`] for who is next: in the list of those with work, and in the
//! line at each gate.
//!
//! A QP that finds a gate short of tokens stands in its line, and runs no more. When tokens have
//! come, the first in line is let out; when that has run and tokens are left, the next. So a
//! thousand QPs that wait for one limit wake up one after the other. At a tenant's gate its vNICs
//! take turns by priority and weight; at a vNIC's, its QPs.
//!
//! Invariant: a QP stands in one line at most; [`Flow::waiting`] says in which.
use super::gate::{Levels, RateGate};
use super::held::Held;
use super::order::Order;
use super::{Allowance, Scheduler, Throttled, Used};
use crate::{QpId, VnicId};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use freeflow_verbs::{Duration, Instant, PRIORITY_DEFAULT, RateLimit, Shaping, TenantId};
use serde::{Deserialize, Serialize};

/// Cost of a message in its vNIC's turn besides its bytes.
const MESSAGE_COST_BYTES: u64 = 256;
/// A released QP that has not run within this time loses its turn.
const RUN_TIME_MAX: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Key {
    Qp(QpId),
    Vnic(VnicId),
    Tenant(TenantId),
    /// No gate: this QP shall be looked at again.
    Again(QpId),
}

#[derive(Serialize, Deserialize)]
struct ScheduleEntry {
    id: VnicId,
    shaping: Shaping,
    metered: bool,
    gate: Option<Box<RateGate>>,
    /// Of QPs that are gone, the oldest first, as long as they are not full: the next QPs begin
    /// with these. So a new QP brings no new burst, and there are never more than the vNIC had QPs
    /// at a time.
    left: VecDeque<Levels>,
    held: Held,
}

#[derive(Default, Serialize, Deserialize)]
struct Tenant {
    limit: RateLimit,
    gate: Option<Box<RateGate>>,
    /// Its vNICs, and the slot of each in the line; slots that were given back.
    members: BTreeMap<VnicId, u32>,
    free: Vec<u32>,
}

/// A QP of a metered vNIC.
#[derive(Serialize, Deserialize)]
struct Flow {
    vnic: VnicId,
    gate: Option<Box<RateGate>>,
    waiting: Option<Waiting>,
    /// It is to be looked at again then.
    again: Option<Instant>,
    /// As long as it stands in a line, or until `again`.
    held: Held,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct Waiting {
    /// In whose line; none: it was let out, or waits for `again`.
    at: Option<Key>,
}

/// See the file.
#[derive(Default, Serialize, Deserialize)]
pub struct FairScheduler {
    /// By index; of those that somebody has said something about.
    vnics: Vec<Option<ScheduleEntry>>,
    tenants: BTreeMap<TenantId, Tenant>,
    flows: BTreeMap<QpId, Flow>,
    timers: BTreeSet<(Instant, Key)>,
    eligible: VecDeque<QpId>,
    /// The highest priority of all vNICs, if they have different ones; else 0.
    highest: u8,
    listed: Order,
    /// Names of the vNICs whose index is a slot of `listed`.
    names: Vec<VnicId>,
}

impl Scheduler for FairScheduler {
    fn set_shapings(&mut self, now: Instant, shapings: &[(VnicId, Shaping)]) {
        let limits: BTreeMap<VnicId, RateLimit> = shapings.iter().map(|&(vnic, shaping)| (vnic, shaping.qp)).collect();
        self.call_out(now, |vnic| limits.contains_key(&vnic));
        for (vnic, shaping) in shapings {
            self.set_entry(now, *vnic, shaping);
        }
        for flow in self.flows.values_mut() {
            if let Some(limit) = limits.get(&flow.vnic) {
                flow.gate = flow.gate.take().and_then(|gate| renewed(Some(gate), now, limit));
            }
        }
        self.note_highest();
    }

    fn set_tenant_limit(&mut self, now: Instant, tenant: TenantId, limit: &RateLimit) {
        let members: Vec<VnicId> = self.tenants.entry(tenant).or_default().members.keys().copied().collect();
        let concerned: BTreeSet<VnicId> = members.iter().copied().collect();
        self.call_out(now, |vnic| concerned.contains(&vnic));
        let shapings: Vec<_> = members.iter().filter_map(|&vnic| Some((vnic, self.entry(vnic)?.shaping))).collect();
        if let Some(entry) = self.tenants.get_mut(&tenant) {
            entry.limit = *limit;
            entry.gate = renewed(entry.gate.take(), now, limit);
            if let Some(gate) = &mut entry.gate {
                for (vnic, shaping) in shapings {
                    gate.line.set(entry.members[&vnic], shaping.priority, shaping.weight);
                }
            }
        }
        for vnic in members {
            self.note_metered(vnic);
        }
        self.forget_if_plain(tenant);
    }

    fn shaping(&self, vnic: VnicId) -> Option<Shaping> {
        self.entry(vnic).map(|entry| entry.shaping)
    }

    fn forget_vnic(&mut self, vnic: VnicId) {
        self.leave_tenant(vnic);
        if let Some(entry) = self.vnics.get_mut(vnic.index as usize) {
            *entry = None;
        }
        let plain = Shaping::default();
        self.listed.set(vnic.index, plain.priority, plain.weight);
        self.note_highest();
    }

    fn forget_qp(&mut self, now: Instant, qp: QpId) {
        let Some(vnic) = self.flows.get(&qp).map(|flow| flow.vnic) else { return };
        self.give_up(now, qp);
        let gate = self.flows.remove(&qp).and_then(|flow| flow.gate);
        if let Some(entry) = self.entry_mut(vnic) {
            while entry.left.pop_front_if(|left| left.are_full(now)).is_some() {}
            entry.left.extend(gate.map(|gate| gate.levels()).filter(|levels| !levels.are_full(now)));
        }
    }

    #[inline]
    fn is_metered(&self, vnic: VnicId) -> bool {
        matches!(self.vnics.get(vnic.index as usize), Some(Some(entry)) if entry.metered && entry.id == vnic)
    }

    #[inline]
    fn push(&mut self, vnic: VnicId, qp: QpId) {
        let at = vnic.index as usize;
        if self.names.len() <= at {
            self.names.resize(at + 1, vnic);
        }
        self.names[at] = vnic;
        self.listed.push(vnic.index, qp);
    }

    fn remove(&mut self, vnic: VnicId, qp: QpId) {
        self.listed.remove(vnic.index, qp);
    }

    #[inline]
    fn pop(&mut self) -> Option<(VnicId, QpId)> {
        let (slot, qp) = self.listed.pop()?;
        Some((*self.names.get(slot as usize)?, qp))
    }

    fn listed_count(&self) -> usize {
        self.listed.len()
    }

    #[inline]
    fn gives_way(&self, vnic: VnicId) -> bool {
        self.highest != 0 && self.entry(vnic).map_or(PRIORITY_DEFAULT, |entry| entry.shaping.priority) < self.highest
    }

    fn allowance(&mut self, now: Instant, vnic: VnicId, qp: QpId) -> Option<Allowance> {
        let keys = self.keys_of(now, vnic, qp);
        if self.blocked_at(now, &keys, qp).is_some() {
            return None;
        }
        let mut allowance = Allowance { bytes: u64::MAX, messages: u32::MAX };
        for key in keys.into_iter().flatten() {
            let Some(gate) = self.gate(key) else { continue };
            let here = gate.allowance();
            allowance.bytes = allowance.bytes.min(here.bytes);
            allowance.messages = allowance.messages.min(here.messages);
        }
        self.end_wait(now, qp);
        Some(allowance)
    }

    #[inline]
    fn charge(&mut self, vnic: VnicId, qp: QpId, used: &Used) {
        let cost = used.bytes + u64::from(used.messages) * MESSAGE_COST_BYTES;
        self.listed.charge(vnic.index, cost);
        if self.is_metered(vnic) {
            self.charge_gates(vnic, qp, used);
        }
    }

    fn wait(&mut self, now: Instant, vnic: VnicId, qp: QpId) {
        let keys = self.keys_of(now, vnic, qp);
        let waiting = self.flow(vnic, qp).waiting;
        if waiting.is_some_and(|waiting| waiting.at.is_some()) {
            return;
        }
        let Some(key) = self.blocked_at(now, &keys, qp) else { return self.eligible.push_back(qp) };
        let slot = self.slot(key, vnic);
        if let Some(gate) = self.gate(key) {
            gate.line.push(slot, qp);
            if gate.released == Some(qp) {
                gate.released = None;
            }
        }
        self.begin_wait(now, vnic, qp, Some(key));
        self.advance(now, key);
        self.finish(now, vnic, qp);
    }

    fn wait_for(&mut self, now: Instant, (vnic, qp): (VnicId, QpId), others: (VnicId, QpId)) -> bool {
        let keys = self.keys_of(now, others.0, others.1);
        let mut until = None;
        for key in keys.into_iter().flatten() {
            if let Some(gate) = self.gate(key) {
                gate.settle(now);
                until = until.max(gate.is_short().then(|| gate.resumes_at()));
            }
        }
        let Some(until) = until else {
            self.end_wait(now, qp);
            return false;
        };
        self.begin_wait(now, vnic, qp, None);
        let flow = self.flow(vnic, qp);
        if let Some(before) = flow.again.replace(until) {
            self.timers.remove(&(before, Key::Again(qp)));
        }
        self.timers.insert((until, Key::Again(qp)));
        true
    }

    fn finish(&mut self, now: Instant, vnic: VnicId, qp: QpId) {
        for key in self.known_keys(vnic, qp).into_iter().flatten() {
            if let Some(gate) = self.gate(key)
                && gate.released == Some(qp)
            {
                gate.released = None;
                self.advance(now, key);
            }
        }
    }

    fn give_up(&mut self, now: Instant, qp: QpId) {
        let Some(flow) = self.flows.get_mut(&qp) else { return };
        let (vnic, waiting) = (flow.vnic, flow.waiting.take());
        if let Some(at) = flow.again.take() {
            self.timers.remove(&(at, Key::Again(qp)));
        }
        self.end_hold(now, qp);
        if let Some(key) = waiting.and_then(|waiting| waiting.at) {
            self.leave_line(now, key, vnic, qp);
        }
        self.finish(now, vnic, qp);
    }

    fn handle_timeout(&mut self, now: Instant) {
        while let Some(&(at, key)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            if let Key::Again(qp) = key {
                if let Some(flow) = self.flows.get_mut(&qp) {
                    flow.again = None;
                }
                self.end_hold(now, qp);
                self.eligible.push_back(qp);
                continue;
            }
            if let Some(gate) = self.gate(key) {
                (gate.due, gate.released) = (None, None);
                self.advance(now, key);
            }
        }
    }

    fn poll_eligible(&mut self) -> Option<QpId> {
        self.eligible.pop_front()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|&(at, _)| at)
    }

    fn is_waiting(&self, qp: QpId) -> bool {
        self.flows.get(&qp).is_some_and(|flow| flow.waiting.is_some() || flow.again.is_some())
    }

    fn throttled_vnic(&self, now: Instant, vnic: VnicId) -> Throttled {
        self.entry(vnic).map(|entry| entry.held.until(now)).unwrap_or_default()
    }

    fn throttled_qp(&self, now: Instant, qp: QpId) -> Throttled {
        self.flows.get(&qp).map(|flow| flow.held.until(now)).unwrap_or_default()
    }

    fn is_consistent(&self) -> bool {
        let of_vnics = self.vnics.iter().flatten().filter_map(|entry| entry.gate.as_deref());
        let of_tenants = self.tenants.values().filter_map(|tenant| tenant.gate.as_deref());
        let of_flows = self.flows.values().filter_map(|flow| flow.gate.as_deref());
        let is_named = |flow: &Flow| flow.waiting.and_then(|waiting| waiting.at).is_none_or(|key| self.has_gate(key));
        self.listed.is_consistent()
            && of_vnics.chain(of_tenants).chain(of_flows).all(RateGate::is_consistent)
            && self.vnics.iter().flatten().flat_map(|entry| &entry.left).all(Levels::are_consistent)
            && self.flows.values().all(is_named)
            && self.holds_are_consistent()
            && self.timers.iter().all(|&(_, key)| matches!(key, Key::Again(_)) || self.has_gate(key))
    }
}

/// A gate for another limit; what is in its buckets stays. Nobody stands in its line.
fn renewed(gate: Option<Box<RateGate>>, now: Instant, limit: &RateLimit) -> Option<Box<RateGate>> {
    match gate {
        _ if limit.is_none() => None,
        None => Some(Box::new(RateGate::new(now, limit, None))),
        Some(mut gate) => {
            gate.change(now, limit);
            Some(gate)
        }
    }
}

impl FairScheduler {
    /// As many QPs of each vNIC are held as it says.
    fn holds_are_consistent(&self) -> bool {
        let mut counts = BTreeMap::new();
        for flow in self.flows.values() {
            *counts.entry(flow.vnic).or_insert(0) += flow.held.count().min(2);
        }
        self.flows.values().all(|flow| flow.held.count() <= 1)
            && self
                .vnics
                .iter()
                .flatten()
                .all(|entry| counts.get(&entry.id).copied().unwrap_or(0) == entry.held.count())
    }

    fn entry(&self, vnic: VnicId) -> Option<&ScheduleEntry> {
        self.vnics.get(vnic.index as usize)?.as_ref().filter(|entry| entry.id == vnic)
    }

    fn entry_mut(&mut self, vnic: VnicId) -> Option<&mut ScheduleEntry> {
        self.vnics.get_mut(vnic.index as usize)?.as_mut().filter(|entry| entry.id == vnic)
    }

    fn flow(&mut self, vnic: VnicId, qp: QpId) -> &mut Flow {
        let plain = || Flow { vnic, gate: None, waiting: None, again: None, held: Held::default() };
        self.flows.entry(qp).or_insert_with(plain)
    }

    fn gate(&mut self, key: Key) -> Option<&mut RateGate> {
        match key {
            Key::Qp(qp) => self.flows.get_mut(&qp)?.gate.as_deref_mut(),
            Key::Vnic(vnic) => self.entry_mut(vnic)?.gate.as_deref_mut(),
            Key::Tenant(tenant) => self.tenants.get_mut(&tenant)?.gate.as_deref_mut(),
            Key::Again(_) => None,
        }
    }

    fn has_gate(&self, key: Key) -> bool {
        match key {
            Key::Qp(qp) => self.flows.get(&qp).is_some_and(|flow| flow.gate.is_some()),
            Key::Vnic(vnic) => self.entry(vnic).is_some_and(|entry| entry.gate.is_some()),
            Key::Tenant(tenant) => self.tenants.get(&tenant).is_some_and(|tenant| tenant.gate.is_some()),
            Key::Again(_) => false,
        }
    }

    /// The gates of a QP, the narrowest first.
    fn known_keys(&self, vnic: VnicId, qp: QpId) -> [Option<Key>; 3] {
        let Some(entry) = self.entry(vnic) else { return [None; 3] };
        let tenant = entry.shaping.tenant.map(Key::Tenant).filter(|&key| self.has_gate(key));
        let own = Some(Key::Qp(qp)).filter(|&key| self.has_gate(key));
        [own, entry.gate.as_ref().map(|_| Key::Vnic(vnic)), tenant]
    }

    /// The same; the QP's own is made if it has none yet.
    fn keys_of(&mut self, now: Instant, vnic: VnicId, qp: QpId) -> [Option<Key>; 3] {
        if let Some(limit) = self.entry(vnic).map(|entry| entry.shaping.qp).filter(|limit| !limit.is_none())
            && self.flow(vnic, qp).gate.is_none()
        {
            let left = self.entry_mut(vnic).and_then(|entry| entry.left.pop_front());
            self.flow(vnic, qp).gate = Some(Box::new(RateGate::new(now, &limit, left)));
        }
        self.known_keys(vnic, qp)
    }

    /// The first gate that a QP may not pass: it is short, or others stand in line.
    fn blocked_at(&mut self, now: Instant, keys: &[Option<Key>; 3], qp: QpId) -> Option<Key> {
        keys.iter().flatten().copied().find(|&key| {
            self.gate(key).is_some_and(|gate| {
                gate.settle(now);
                gate.is_short() || !gate.line.is_empty() && gate.released != Some(qp)
            })
        })
    }

    #[cold]
    fn charge_gates(&mut self, vnic: VnicId, qp: QpId, used: &Used) {
        for key in self.known_keys(vnic, qp).into_iter().flatten() {
            let slot = self.slot(key, vnic);
            if let Some(gate) = self.gate(key) {
                gate.take(used);
                let cost = gate.cost(used);
                gate.line.charge(slot, cost);
            }
        }
    }

    /// The vNIC's place in a gate's line.
    fn slot(&self, key: Key, vnic: VnicId) -> u32 {
        match key {
            Key::Tenant(tenant) => {
                self.tenants.get(&tenant).and_then(|tenant| tenant.members.get(&vnic)).copied().unwrap_or(0)
            }
            Key::Qp(_) | Key::Vnic(_) | Key::Again(_) => 0,
        }
    }

    /// Lets the next out of a gate's line if tokens are there and nobody is on the way; sees to its
    /// timer.
    fn advance(&mut self, now: Instant, key: Key) {
        let Some(gate) = self.gate(key) else { return };
        gate.settle(now);
        let mut out = None;
        if !gate.is_short() && gate.released.is_none() {
            out = gate.line.pop().map(|(_, qp)| qp);
            gate.released = out;
        }
        let next = if gate.is_short() { gate.resumes_at() } else { now + RUN_TIME_MAX };
        let due = (!gate.line.is_empty()).then_some(next);
        let before = core::mem::replace(&mut gate.due, due);
        if before != due {
            if let Some(before) = before {
                self.timers.remove(&(before, key));
            }
            if let Some(due) = due {
                self.timers.insert((due, key));
            }
        }
        let Some(qp) = out else { return };
        if let Some(waiting) = self.flows.get_mut(&qp).and_then(|flow| flow.waiting.as_mut()) {
            waiting.at = None;
        }
        self.end_hold(now, qp);
        self.eligible.push_back(qp);
    }

    fn begin_wait(&mut self, now: Instant, vnic: VnicId, qp: QpId, at: Option<Key>) {
        let flow = self.flow(vnic, qp);
        let is_new = flow.waiting.replace(Waiting { at }).is_none();
        let is_held = flow.held.count() > 0;
        let begin = |held: &mut Held| {
            if is_new {
                held.note_wait();
            }
            if !is_held {
                held.begin(now);
            }
        };
        begin(&mut flow.held);
        if let Some(entry) = self.entry_mut(vnic) {
            begin(&mut entry.held);
        }
    }

    fn end_wait(&mut self, now: Instant, qp: QpId) {
        self.end_hold(now, qp);
        if let Some(flow) = self.flows.get_mut(&qp) {
            flow.waiting = None;
        }
    }

    /// It may run; when it does, its wait is over, or it is held once more.
    fn end_hold(&mut self, now: Instant, qp: QpId) {
        let Some(flow) = self.flows.get_mut(&qp).filter(|flow| flow.held.count() > 0) else { return };
        let (vnic, since) = (flow.vnic, flow.held.since());
        flow.held.end(since, now);
        if let Some(entry) = self.entry_mut(vnic) {
            entry.held.end(since, now);
        }
    }

    fn leave_line(&mut self, now: Instant, key: Key, vnic: VnicId, qp: QpId) {
        let slot = self.slot(key, vnic);
        if let Some(gate) = self.gate(key) {
            gate.line.remove(slot, qp);
            self.advance(now, key);
        }
    }

    /// All of a vNIC but its QPs' gates and [`Self::note_highest`], which are seen to once for many
    /// vNICs.
    fn set_entry(&mut self, now: Instant, vnic: VnicId, shaping: &Shaping) {
        let at = vnic.index as usize;
        if self.vnics.len() <= at {
            self.vnics.resize_with(at + 1, || None);
        }
        self.leave_tenant(vnic);
        let before = self.vnics[at].take();
        let held = before.as_ref().filter(|entry| entry.id == vnic).map(|entry| entry.held).unwrap_or_default();
        let (gate, mut left) = before.map(|entry| (entry.gate, entry.left)).unwrap_or_default();
        let gate = renewed(gate, now, &shaping.vnic);
        if shaping.qp.is_none() {
            left.clear();
        }
        left.iter_mut().for_each(|levels| levels.change(now, &shaping.qp));
        self.vnics[at] = Some(ScheduleEntry { id: vnic, shaping: *shaping, metered: false, gate, left, held });
        if let Some(tenant) = shaping.tenant {
            let tenant = self.tenants.entry(tenant).or_default();
            let slot = tenant.free.pop().unwrap_or(tenant.members.len() as u32);
            tenant.members.insert(vnic, slot);
            if let Some(gate) = &mut tenant.gate {
                gate.line.set(slot, shaping.priority, shaping.weight);
            }
        }
        self.listed.set(vnic.index, shaping.priority, shaping.weight);
        self.note_metered(vnic);
    }

    /// Applies a change of limits to the QPs of some vNICs: all that wait are looked at again.
    fn call_out(&mut self, now: Instant, is_meant: impl Fn(VnicId) -> bool) {
        let is_held = |flow: &Flow| flow.waiting.is_some() && is_meant(flow.vnic) || flow.again.is_some();
        let held: Vec<QpId> = self.flows.iter().filter(|(_, flow)| is_held(flow)).map(|(&qp, _)| qp).collect();
        for qp in held {
            self.give_up(now, qp);
            self.eligible.push_back(qp);
        }
    }

    /// Nobody of the vNIC stands in the tenant's line.
    fn leave_tenant(&mut self, vnic: VnicId) {
        let Some(tenant) = self.entry(vnic).and_then(|entry| entry.shaping.tenant) else { return };
        if let Some(entry) = self.tenants.get_mut(&tenant)
            && let Some(slot) = entry.members.remove(&vnic)
        {
            entry.free.push(slot);
        }
        self.forget_if_plain(tenant);
    }

    fn forget_if_plain(&mut self, tenant: TenantId) {
        if self.tenants.get(&tenant).is_some_and(|entry| entry.members.is_empty() && entry.limit.is_none()) {
            self.tenants.remove(&tenant);
        }
    }

    fn note_highest(&mut self) {
        let priorities = || self.vnics.iter().flatten().map(|entry| entry.shaping.priority);
        // Of whom nothing was said has the one in the middle.
        let highest = priorities().fold(PRIORITY_DEFAULT, u8::max);
        let differ = priorities().any(|priority| priority != PRIORITY_DEFAULT);
        self.highest = if differ { highest } else { 0 };
    }

    fn note_metered(&mut self, vnic: VnicId) {
        let Some(Shaping { qp, vnic: own, tenant, .. }) = self.shaping(vnic) else { return };
        let of_tenant = tenant.is_some_and(|tenant| self.has_gate(Key::Tenant(tenant)));
        if let Some(entry) = self.entry_mut(vnic) {
            entry.metered = !qp.is_none() || !own.is_none() || of_tenant;
        }
    }
}
