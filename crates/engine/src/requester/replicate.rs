//! A multicast message on its way to all members of its group (IBTA 10.5, 11.3).
//!
//! A message goes to one member after the other, each time as a message of its own: with the
//! member's Q_Key, its RECV or its drop. The request completes once, after the last, with success.
//! Members that join meanwhile do not get it, members that leave meanwhile do not either.
//!
//! A member whose RECV is just being filled by another sender is put off until the others are
//! served, then waited for, as for unicast: nothing is lost because two senders met, nobody is held
//! up by somebody else's copy but the sender, and that for one copy at most.
use crate::arrival::Rejection;
use crate::multicast::Fanout;
use crate::qp::SendPhase;
use crate::requester::Requester;
use crate::turn::{Budget, Turn};
use crate::{Environment, Progress, QpId, ud};
use alloc::boxed::Box;
use alloc::vec::Vec;
use freeflow_verbs::{Gid, Instant, QpType, Qpn};

impl Requester {
    // ---- sending

    /// No QP has the address of the request in hand: it is for a group, or for nobody.
    pub(crate) fn send_to_group_or_nobody<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        let qp = self.qp(id);
        if qp.service != QpType::Ud || qp.send.request.remote_qpn & Qpn::MASK != Qpn::MULTICAST.0 {
            return self.unanswered(env, now, id);
        }
        let route = self.responder.completer.ahs.at(qp.send.request.address_handle).map(|(_, handle)| handle.route);
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
        let send = &mut self.responder.completer.qps.get_mut(id).expect("the requester exists").send;
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
        let listens = self.groups.has(member, group)
            && self.responder.completer.qps.get(member).is_some_and(|peer| peer.receives());
        if !listens || !self.responder.may_reach_member(env, id, member) {
            self.responder.completer.member_done(env, now, id);
            return Turn::Continue;
        }
        let arrival = self.arrival(id, member);
        match self.responder.admit(env, now, &arrival) {
            Ok(()) => self.admitted(env, id, member),
            Err(Rejection::Busy) => return self.put_off(id, member),
            Err(refused) => {
                if refused == Rejection::Late {
                    self.vnic_of(member).counters.receives_missing += 1;
                }
                self.responder.completer.count_received(id, member);
                self.responder.completer.member_done(env, now, id);
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
}
