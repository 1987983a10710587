//! Multicast of UD QPs (IBTA 10.5, 11.3): who is attached to a group, and how one message reaches all of them.
//!
//! A message goes to one member after the other, each time as a message of its own: with the member's Q_Key, its RECV or
//! its drop. The request completes once, after the last, with success. Members that join meanwhile do not get it, members
//! that leave meanwhile do not either.
//!
//! A member whose RECV is just being filled by another sender is put off until the others are served, then waited for,
//! as for unicast: nothing is lost because two senders met, nobody is held up by somebody else's copy but the sender,
//! and that for one copy at most.
//!
//! Invariant: `members`, `groups_of` and `counts` say the same; an attachment ends with its QP at the latest.
use crate::qp::{SendPhase, Teardown};
use crate::requester::{Budget, Turn};
use crate::responder::Refused;
use crate::{Destination, Engine, Environment, Progress, QpId, SessionId, VnicId, ud};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use freeflow_verbs::{Gid, Instant, NetworkId, QpType, Qpn, VerbsError};
use serde::{Deserialize, Serialize};

const FIRST: QpId = QpId { index: 0, generation: 0 };
const LAST: QpId = QpId { index: u32::MAX, generation: u32::MAX };

#[derive(Serialize, Deserialize)]
pub(crate) struct Groups {
    members: BTreeSet<(NetworkId, Gid, QpId)>,
    groups_of: BTreeSet<(QpId, Gid)>,
    /// How many QPs of a vNIC are in a group; never zero.
    counts: BTreeMap<(VnicId, Gid), u32>,
    /// The QPN under which other hosts send to the members that a group has here, and back.
    numbers: BTreeMap<(NetworkId, Gid), Qpn>,
    groups: BTreeMap<Qpn, (NetworkId, Gid)>,
    /// What other hosts have not been told of.
    changes: VecDeque<GroupChange>,
}

/// A group has members on this host from now on, under a QPN (`None`: not any more).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupChange {
    pub network: NetworkId,
    pub group: Gid,
    pub qpn: Option<Qpn>,
}

impl Groups {
    pub fn new() -> Self {
        Self {
            members: BTreeSet::new(),
            groups_of: BTreeSet::new(),
            counts: BTreeMap::new(),
            numbers: BTreeMap::new(),
            groups: BTreeMap::new(),
            changes: VecDeque::new(),
        }
    }

    /// Whose QPN that is.
    pub fn of_number(&self, qpn: u32) -> Option<(NetworkId, Gid)> {
        self.groups.get(&Qpn(qpn)).copied()
    }

    pub fn members(&self, network: NetworkId, group: Gid) -> impl DoubleEndedIterator<Item = QpId> + '_ {
        self.members.range((network, group, FIRST)..=(network, group, LAST)).map(|(_, _, member)| *member)
    }

    fn has(&self, qp: QpId, group: Gid) -> bool {
        self.groups_of.contains(&(qp, group))
    }

    pub fn is_attached(&self, qp: QpId) -> bool {
        self.groups_of.range((qp, Gid([0; 16]))..=(qp, Gid([0xff; 16]))).next().is_some()
    }
}

/// The way of a message through its group.
#[derive(Serialize, Deserialize)]
pub(crate) struct Fanout {
    group: Gid,
    /// Who has still to get it; the last one is next.
    members: Vec<QpId>,
    /// How many of these were found busy, one after the other.
    put_off: usize,
    /// Hosts that have still to get it, before the members here.
    hosts: Vec<(Destination, Qpn)>,
}

impl Fanout {
    pub fn is_under_way(&self) -> bool {
        !self.members.is_empty() || !self.hosts.is_empty()
    }

    pub fn clear(&mut self) {
        self.members.clear();
        self.hosts.clear();
        self.put_off = 0;
    }

    pub fn next_host(&self) -> Option<(Destination, Qpn)> {
        self.hosts.last().copied()
    }

    pub fn host_done(&mut self) {
        self.hosts.pop();
    }
}

impl Engine {
    // ---- verbs

    /// Attaches a UD QP to a group of its network. Attaching twice is one attachment. NoMemory: the vNIC is in too many
    /// groups, or has too many QPs in this one.
    pub fn attach_multicast(&mut self, session: SessionId, qp: QpId, gid: Gid) -> Result<(), VerbsError> {
        let pair = self.qps.owned(session, qp)?;
        let (vnic, network) = (pair.vnic, pair.network);
        if pair.service != QpType::Ud || pair.teardown == Teardown::Destroy || !gid.is_multicast() {
            return Err(VerbsError::InvalidArgument);
        }
        if self.groups.has(qp, gid) {
            return Ok(());
        }
        let count = self.groups.counts.get(&(vnic, gid)).copied().unwrap_or(0);
        let limits = &self.vnics.get(vnic).ok_or(VerbsError::NotFound)?.limits;
        if count >= limits.multicast_attach_count_max {
            return Err(VerbsError::NoMemory);
        }
        if count == 0 {
            let max = |limits: &freeflow_verbs::VnicLimits| limits.multicast_group_count_max;
            self.charge(vnic, |usage| &mut usage.multicast_groups, max)?;
        }
        self.groups.counts.insert((vnic, gid), count + 1);
        self.groups.groups_of.insert((qp, gid));
        self.groups.members.insert((network, gid, qp));
        if !self.groups.numbers.contains_key(&(network, gid)) {
            let qpn = self.fresh_qpn();
            self.groups.numbers.insert((network, gid), qpn);
            self.groups.groups.insert(qpn, (network, gid));
            self.groups.changes.push_back(GroupChange { network, group: gid, qpn: Some(qpn) });
        }
        Ok(())
    }

    /// InvalidArgument if it is not attached. No message to the group begins to arrive afterwards.
    pub fn detach_multicast(&mut self, session: SessionId, qp: QpId, gid: Gid) -> Result<(), VerbsError> {
        self.qps.owned(session, qp)?;
        if !self.groups.has(qp, gid) {
            return Err(VerbsError::InvalidArgument);
        }
        self.detach(qp, gid);
        Ok(())
    }

    fn detach(&mut self, qp: QpId, gid: Gid) {
        let (vnic, network) = (self.qp(qp).vnic, self.qp(qp).network);
        self.groups.groups_of.remove(&(qp, gid));
        self.groups.members.remove(&(network, gid, qp));
        let count = self.groups.counts.get_mut(&(vnic, gid)).expect("an attachment is counted");
        *count -= 1;
        if *count == 0 {
            self.groups.counts.remove(&(vnic, gid));
            self.refund(vnic, |usage| &mut usage.multicast_groups);
        }
        if self.groups.members(network, gid).next().is_none()
            && let Some(qpn) = self.groups.numbers.remove(&(network, gid))
        {
            self.groups.groups.remove(&qpn);
            self.groups.changes.push_back(GroupChange { network, group: gid, qpn: None });
        }
    }

    /// What other hosts are to be told about groups; to be asked after each verb, and after the end of a session.
    pub fn poll_group_change(&mut self) -> Option<GroupChange> {
        self.groups.changes.pop_front()
    }

    /// The QP goes.
    pub(crate) fn detach_all(&mut self, qp: QpId) {
        let ends = (qp, Gid([0; 16]))..=(qp, Gid([0xff; 16]));
        let gids: Vec<Gid> = self.groups.groups_of.range(ends).map(|(_, gid)| *gid).collect();
        for gid in gids {
            self.detach(qp, gid);
        }
    }

    // ---- sending

    /// No QP has the address of the request in hand: it is for a group, or for nobody.
    pub(crate) fn send_to_group_or_nobody<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        let qp = self.qp(id);
        if qp.service != QpType::Ud || qp.send.request.remote_qpn & Qpn::MASK != Qpn::MULTICAST.0 {
            return self.unanswered(env, now, id);
        }
        let route = self.ahs.at(qp.send.request.address_handle).map(|(_, handle)| handle.route);
        let Some(route) = route.filter(|route| route.dgid.is_multicast()) else {
            return self.unanswered(env, now, id);
        };
        let (network, group) = (qp.network, route.dgid);
        let blocked = qp.block_own_multicast.then_some(id);
        let grh = ud::grh(
            qp.addresses.by(route.sgid_index),
            &route,
            qp.send.length as u32,
            qp.send.request.opcode.has_immediate(),
        );
        let found = self.groups.members(network, group).rev();
        let send = &mut self.qps.get_mut(id).expect("the requester exists").send;
        send.grh = grh;
        let fanout = send
            .fanout
            .get_or_insert_with(|| Box::new(Fanout { group, members: Vec::new(), put_off: 0, hosts: Vec::new() }));
        fanout.clear();
        fanout.group = group;
        fanout.members.extend(found.filter(|member| Some(*member) != blocked));
        env.group_hosts(network, group, &mut fanout.hosts);
        if !fanout.is_under_way() {
            return self.unanswered(env, now, id);
        }
        send.phase = SendPhase::Replicate;
        Turn::Continue
    }

    /// Offers the message to the next member.
    pub(crate) fn replicate<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        budget: &mut Budget,
    ) -> Turn {
        budget.requests -= 1;
        if let Some((destination, qpn)) = self.qp(id).send.fanout.as_ref().and_then(|fanout| fanout.next_host()) {
            return self.send_datagram(env, now, id, &destination, qpn);
        }
        let (group, member) = self.next_member(id).expect("a message that is replicated has members left");
        let listens = self.groups.has(member, group) && self.qps.get(member).is_some_and(|peer| peer.receives());
        if !listens || !self.may_reach_member(env, id, member) {
            self.member_done(env, now, id);
            return Turn::Continue;
        }
        let arrival = self.arrival(id, member);
        match self.admit(env, now, &arrival) {
            Ok(()) => self.admitted(env, id, member),
            Err(Refused::Busy) => return self.put_off(id, member),
            Err(refused) => {
                if refused == Refused::Late {
                    self.vnic_of(member).counters.receives_missing += 1;
                }
                self.count_received(id, member);
                self.member_done(env, now, id);
            }
        }
        Turn::Continue
    }

    fn next_member(&self, id: QpId) -> Option<(Gid, QpId)> {
        let fanout = self.qp(id).send.fanout.as_ref()?;
        Some((fanout.group, *fanout.members.last()?))
    }

    /// The next member is busy: the others first.
    fn put_off(&mut self, id: QpId, member: QpId) -> Turn {
        let send = &mut self.qp_mut(id).send;
        if let Some(fanout) = &mut send.fanout {
            fanout.put_off += 1;
            if fanout.put_off < fanout.members.len() {
                fanout.members.rotate_right(1);
                return Turn::Continue;
            }
            fanout.put_off = 0;
        }
        send.phase = SendPhase::Waiting;
        self.qp_mut(member).receive.waiters.push(id);
        Turn::Stop(Progress::Waiting)
    }

    /// The next member has the message, or will never get it. After the last one the request is done.
    pub(crate) fn member_done<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        self.release_claim(id);
        let send = &mut self.qp_mut(id).send;
        send.responder = None;
        send.moved = 0;
        send.phase = SendPhase::Replicate;
        if let Some(fanout) = &mut send.fanout {
            fanout.members.pop();
            fanout.put_off = 0;
            if fanout.is_under_way() {
                return;
            }
        }
        self.succeed_send(env, now, id);
    }
}
