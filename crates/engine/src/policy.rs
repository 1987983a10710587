//! Who may talk to whom: asked of the environment when a QP is connected and for datagrams, and asked anew about all that is
//! connected when policy has changed.
//!
//! An address may be another network's of the same tenant: [`crate::Policy::network_at`] says whose, [`crate::Policy::authorize`] is
//! asked about the two.
//!
//! Invariant: what is delivered goes to the network that policy was asked about: for connected QPs that is `QueuePair::reached`,
//! for datagrams the permit's.
//!
//! Invariant: after [`Engine::handle_policy_changed`] no verdict from before is used for anything that begins, and once
//! [`Engine::poll_policy`] has said that it is done, nothing is connected that the policy does not allow.
use crate::qp::QueuePair;
use crate::{Asker, Engine, Environment, EventTarget, HostId, Means, QpId, Talk};
use freeflow_verbs::{AsyncEventKind, Gid, GlobalRoute, NetworkId, QpAttributes, QpType, Qpn};
use serde::{Deserialize, Serialize};

/// The second address of a vNIC, by which it talks to machines without FreeFlow.
pub(crate) const EXTERNAL_GID_INDEX: u8 = 1;
/// Its IPv6 address, in networks that have any.
pub(crate) const IPV6_GID_INDEX: u8 = 2;

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct PolicyReview {
    /// How often it has changed.
    generation: u64,
    /// The QP that is looked at next, and how many are to be looked at still. It goes round, so that one change after the other
    /// does not keep it from the last ones.
    next: u32,
    left: u32,
    /// How many there were at the change: where it goes round. Those beyond were connected by what is said since.
    end: u32,
}

/// The last one that policy said yes to: when, its address, and the network that it is in.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Permit {
    who: Option<(u64, Gid, NetworkId)>,
}

impl Permit {
    /// Where the one with this address is, if the yes is for it and still good.
    #[inline]
    fn network_of(&self, generation: u64, gid: Gid) -> Option<NetworkId> {
        self.who.filter(|(at, who, _)| *at == generation && *who == gid).map(|(_, _, network)| network)
    }
}

impl Engine {
    /// What [`crate::Policy::authorize`] says is another from now on. Datagrams are looked at anew at once; what is connected by
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
            env.notify_disconnected(qpn, host, peer);
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

    /// The network that the peer's address is in (the own one if it has none), if the two may be connected.
    pub(crate) fn may_connect<E: Environment>(
        &self,
        env: &mut E,
        id: QpId,
        attributes: &QpAttributes,
    ) -> Option<NetworkId> {
        let (reached, allowed) = may_be_connected(env, self.qp(id), attributes, Means::Connection);
        allowed.then_some(reached)
    }

    /// Nor does a connection stand whose peer's address is another network's by now.
    fn may_stand<E: Environment>(&self, env: &mut E, id: QpId) -> bool {
        let qp = self.qp(id);
        if !qp.receives() {
            return true;
        }
        let (reached, allowed) = may_be_connected(env, qp, &qp.attributes, Means::Standing);
        allowed && reached == qp.reached
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
        let (generation, to) = (self.policy.generation, route.dgid);
        // By its second address it may be told another thing: that yes is not kept, and this one says nothing of it.
        if to.is_multicast() || !is_external && qp.send.permit.network_of(generation, to).is_some() {
            return true;
        }
        let (network, from, means) = (qp.network, qp.addresses.by(route.sgid_index), Means::Datagram);
        let other = network_behind(env, network, &route);
        // Where the sender's address is not the sender's nobody could answer.
        let is_mutual = other == network || env.network_at(other, from) == network;
        let allowed =
            is_mutual && env.authorize(&Talk { network, other, from, to, means, is_external, asks: Asker::From });
        if allowed && !is_external {
            self.qp_mut(id).send.permit = Permit { who: Some((generation, to, other)) };
        }
        allowed
    }

    /// The network that a datagram of this QP by this route goes to, once [`Self::may_send`] has said yes.
    pub(crate) fn datagram_network(&self, qp: &QueuePair, route: &GlobalRoute) -> NetworkId {
        let permit = Some(qp.send.permit).filter(|_| route.sgid_index != EXTERNAL_GID_INDEX);
        permit.and_then(|permit| permit.network_of(self.policy.generation, route.dgid)).unwrap_or(qp.network)
    }

    pub(crate) fn may_reach_member<E: Environment>(&mut self, env: &mut E, id: QpId, member: QpId) -> bool {
        let (qp, to) = (self.qp(id), self.qp(member).addresses.first);
        let (network, from, means) = (qp.network, qp.addresses.first, Means::Multicast);
        env.authorize(&Talk { network, other: network, from, to, means, is_external: false, asks: Asker::From })
    }

    /// Whether an address is in that network for those of a QP's.
    pub(crate) fn finds<E: Environment>(&self, env: &mut E, id: QpId, (other, from): (NetworkId, Gid)) -> bool {
        let qp = self.qp(id);
        let is_known = qp.receive.permit.network_of(self.policy.generation, from) == Some(other);
        is_known || env.network_at(qp.network, from) == other
    }

    /// Whether a datagram of another host may come to a QP: from this network, from this address in it.
    pub(crate) fn may_receive<E: Environment>(
        &mut self,
        env: &mut E,
        id: QpId,
        (other, from): (NetworkId, Gid),
        means: Means,
    ) -> bool {
        let (qp, generation) = (self.qp(id), self.policy.generation);
        debug_assert!(qp.service == QpType::Ud);
        if qp.receive.permit.network_of(generation, from) == Some(other) {
            return true;
        }
        let (network, to) = (qp.network, qp.addresses.like(from));
        let allowed = env.authorize(&Talk { network, other, from, to, means, is_external: false, asks: Asker::To });
        if allowed {
            self.qp_mut(id).receive.permit = Permit { who: Some((generation, from, other)) };
        }
        allowed
    }

    pub(crate) fn may_receive_from_outside<E: Environment>(&self, env: &mut E, id: QpId, from: Gid) -> bool {
        let qp = self.qp(id);
        let (network, to, means) = (qp.network, qp.addresses.first, Means::Datagram);
        env.authorize(&Talk { network, other: network, from, to, means, is_external: true, asks: Asker::To })
    }
}

/// The network that a route's address is in for those of `network`. What goes out to machines without FreeFlow stays in it.
pub(crate) fn network_behind<E: Environment>(env: &mut E, network: NetworkId, route: &GlobalRoute) -> NetworkId {
    if route.sgid_index == EXTERNAL_GID_INDEX { network } else { env.network_at(network, route.dgid) }
}

/// The network that the peer's address is in, and whether the QP may be connected to it there.
fn may_be_connected<E: Environment>(
    env: &mut E,
    qp: &QueuePair,
    attributes: &QpAttributes,
    means: Means,
) -> (NetworkId, bool) {
    let network = qp.network;
    let Some(route) = attributes.address.grh.filter(|_| qp.is_connected_service()) else { return (network, true) };
    let other = network_behind(env, network, &route);
    let (from, is_external) = (qp.addresses.by(route.sgid_index), route.sgid_index == EXTERNAL_GID_INDEX);
    let allowed = env.authorize(&Talk { network, other, from, to: route.dgid, means, is_external, asks: Asker::From });
    (other, allowed)
}
