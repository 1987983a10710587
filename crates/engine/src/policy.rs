//! Who may talk to whom: asked of the environment when a QP is connected and for datagrams, and asked anew about all that is
//! connected when policy has changed.
//!
//! Invariant: after [`Engine::handle_policy_changed`] no verdict from before is used for anything that begins, and once
//! [`Engine::poll_policy`] has said that it is done, nothing is connected that the policy does not allow.
use crate::{Asker, Engine, Environment, EventTarget, HostId, Means, QpId, Talk};
use freeflow_verbs::{AsyncEventKind, Gid, QpAttributes, QpType, Qpn};
use serde::{Deserialize, Serialize};

/// The second address of a vNIC, by which it talks to machines without FreeFlow.
pub(crate) const EXTERNAL_GID_INDEX: u8 = 1;
/// Its IPv6 address, in networks that have any.
pub(crate) const IPV6_GID_INDEX: u8 = 2;

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Policy {
    /// How often it has changed.
    generation: u64,
    /// The QP that is looked at next, and how many are to be looked at still. It goes round, so that one change after the other
    /// does not keep it from the last ones.
    next: u32,
    left: u32,
    /// How many there were at the change: where it goes round. Those beyond were connected by what is said since.
    end: u32,
}

/// The last one that policy said yes to, and when.
#[derive(Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Permit {
    who: Option<(u64, Gid)>,
}

impl Engine {
    /// What [`Environment::may_talk`] says is another from now on. Datagrams are looked at anew at once; what is connected by
    /// and by, in [`Self::poll_policy`].
    pub fn handle_policy_changed(&mut self) {
        self.policy.generation += 1;
        self.policy.end = self.qps.end();
        self.policy.left = self.policy.end;
    }

    /// Looks at so many QPs at most, and cuts the connections that are not allowed any more; whether there are more to look at.
    pub fn poll_policy<E: Environment>(&mut self, env: &mut E, count_max: u32) -> bool {
        for _ in 0..count_max.min(self.policy.left) {
            if self.policy.next >= self.policy.end {
                self.policy.next = 0;
            }
            let index = self.policy.next;
            self.policy.next += 1;
            self.policy.left -= 1;
            if let Some((id, _)) = self.qps.at(index)
                && !self.may_stand(env, id)
            {
                self.sever(env, id);
            }
        }
        self.policy.left > 0
    }

    /// Ends a connection that policy does not allow any more: ERROR, everything flushed, and an event that says so. The other end,
    /// if it is on this host, is looked at by itself; another host is told.
    fn sever<E: Environment>(&mut self, env: &mut E, id: QpId) {
        let qp = self.qp(id);
        let (qpn, peer) = (qp.qpn, Qpn(qp.attributes.dest_qpn));
        let host = qp.wire.as_ref().map(|wire| wire.destination.host);
        env.raise(AsyncEventKind::QpFatal, EventTarget::Qp(id));
        self.enter_error(env, id);
        if let Some(host) = host {
            env.identity_changed(qpn, Some(host));
            env.severed(qpn, host, peer);
        }
    }

    /// The router of another host has cut the connection of its QP `peer` with `qpn` of this host.
    pub fn handle_severed<E: Environment>(&mut self, env: &mut E, qpn: Qpn, host: HostId, peer: Qpn) {
        let Some((id, qp)) = self.qpns.get(qpn.0).and_then(|index| self.qps.at(index)) else { return };
        // A host has a say in its own connections only.
        let is_its_own = qp.wire.as_ref().is_some_and(|wire| wire.destination.host == host);
        if is_its_own && qp.attributes.dest_qpn == peer.0 && qp.receives() {
            env.raise(AsyncEventKind::QpFatal, EventTarget::Qp(id));
            self.enter_error(env, id);
            env.identity_changed(qpn, Some(host));
        }
    }

    pub(crate) fn may_connect<E: Environment>(&self, env: &mut E, id: QpId, attributes: &QpAttributes) -> bool {
        self.may_be_connected(env, id, attributes, Means::Connection)
    }

    fn may_stand<E: Environment>(&self, env: &mut E, id: QpId) -> bool {
        let qp = self.qp(id);
        !qp.receives() || self.may_be_connected(env, id, &qp.attributes, Means::Standing)
    }

    fn may_be_connected<E: Environment>(&self, env: &mut E, id: QpId, attributes: &QpAttributes, means: Means) -> bool {
        let qp = self.qp(id);
        let Some(route) = attributes.address.grh.filter(|_| qp.is_connected_service()) else { return true };
        env.may_talk(&Talk {
            network: qp.network,
            other: qp.network,
            from: qp.addresses.by(route.sgid_index),
            to: route.dgid,
            means,
            is_external: route.sgid_index == EXTERNAL_GID_INDEX,
            asks: Asker::From,
        })
    }

    /// Whether the datagram in hand may go to its receiver. Of a group each member is asked about by itself.
    pub(crate) fn may_send<E: Environment>(&mut self, env: &mut E, id: QpId) -> bool {
        let qp = self.qp(id);
        let Some((_, handle)) = self.ahs.at(qp.send.request.address_handle) else { return true };
        let route = handle.route;
        let is_external = route.sgid_index == EXTERNAL_GID_INDEX;
        // The handle may be older than the end of the permission.
        if is_external && self.external_gid(qp.vnic).is_none() {
            return false;
        }
        // Which address sends follows from whom it sends to.
        let permit = Permit { who: Some((self.policy.generation, route.dgid)) };
        // By its second address it may be told another thing: that yes is not kept, and this one says nothing of it.
        if route.dgid.is_multicast() || !is_external && qp.send.permit == permit {
            return true;
        }
        let (network, from, means) = (qp.network, qp.addresses.by(route.sgid_index), Means::Datagram);
        let asks = Asker::From;
        let allowed = env.may_talk(&Talk { network, other: network, from, to: route.dgid, means, is_external, asks });
        if allowed && !is_external {
            self.qp_mut(id).send.permit = permit;
        }
        allowed
    }

    pub(crate) fn may_reach_member<E: Environment>(&mut self, env: &mut E, id: QpId, member: QpId) -> bool {
        let (qp, to) = (self.qp(id), self.qp(member).addresses.first);
        let (network, from, means) = (qp.network, qp.addresses.first, Means::Multicast);
        env.may_talk(&Talk { network, other: network, from, to, means, is_external: false, asks: Asker::From })
    }

    /// Whether a datagram of another host may come to a QP.
    pub(crate) fn may_receive<E: Environment>(&mut self, env: &mut E, id: QpId, from: Gid, means: Means) -> bool {
        let qp = self.qp(id);
        debug_assert!(qp.service == QpType::Ud);
        let permit = Permit { who: Some((self.policy.generation, from)) };
        if qp.receive.permit == permit {
            return true;
        }
        let (network, to) = (qp.network, qp.addresses.like(from));
        let allowed =
            env.may_talk(&Talk { network, other: network, from, to, means, is_external: false, asks: Asker::To });
        if allowed {
            self.qp_mut(id).receive.permit = permit;
        }
        allowed
    }

    pub(crate) fn may_receive_from_outside<E: Environment>(&self, env: &mut E, id: QpId, from: Gid) -> bool {
        let qp = self.qp(id);
        let (network, to, means) = (qp.network, qp.addresses.first, Means::Datagram);
        env.may_talk(&Talk { network, other: network, from, to, means, is_external: true, asks: Asker::To })
    }
}
