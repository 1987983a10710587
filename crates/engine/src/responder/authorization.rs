//! Whether a datagram may go to its receiver: asked of the environment, and remembered in a permit.
//!
//! An address may be another network's of the same tenant: [`crate::Policy::network_at`] says
//! whose, and [`crate::Policy::authorize`] is asked about the two.
//!
//! Invariant: a datagram goes to the network that policy was asked about, which is the permit's.
use crate::policy::{EXTERNAL_GID_INDEX, Permit, network_behind};
use crate::qp::QueuePair;
use crate::responder::Responder;
use crate::{AuthorizationRequest, Environment, QpId, Subject, TrafficKind};
use freeflow_verbs::{Gid, GlobalRoute, NetworkId, QpType};

impl Responder {
    /// Whether the datagram in hand may go to its receiver. Of a group each member is asked about
    /// by itself.
    pub(crate) fn may_send<E: Environment>(&mut self, env: &mut E, id: QpId) -> bool {
        let qp = self.qp(id);
        let Some((_, handle)) = self.completer.ahs.at(qp.send.request.address_handle) else { return true };
        let route = handle.route;
        let is_external = route.sgid_index == EXTERNAL_GID_INDEX;
        // The handle may be older than the end of the permission.
        if is_external && self.completer.external_gid(qp.vnic).is_none() {
            return false;
        }
        // Which address sends follows from whom it sends to.
        let (generation, to) = (self.policy.generation, route.dgid);
        // By its second address it may get another answer: that yes is not kept, and this one
        // says nothing of it.
        if to.is_multicast() || !is_external && qp.send.permit.network_of(generation, to).is_some() {
            return true;
        }
        let (network, from, traffic) = (qp.network, qp.addresses.by(route.sgid_index), TrafficKind::Datagram);
        let other = network_behind(env, network, &route);
        // Where the sender's address is not the sender's nobody could answer.
        let is_mutual = other == network || env.network_at(other, from) == network;
        let allowed = is_mutual
            && env.authorize(&AuthorizationRequest {
                network,
                other,
                from,
                to,
                traffic,
                is_external,
                subject: Subject::From,
            });
        if allowed && !is_external {
            self.qp_mut(id).send.permit = Permit { who: Some((generation, to, other)) };
        }
        allowed
    }

    /// The network that a datagram of this QP by this route goes to, once [`Self::may_send`] has
    /// said yes.
    pub(crate) fn datagram_network(&self, qp: &QueuePair, route: &GlobalRoute) -> NetworkId {
        let permit = Some(qp.send.permit).filter(|_| route.sgid_index != EXTERNAL_GID_INDEX);
        permit.and_then(|permit| permit.network_of(self.policy.generation, route.dgid)).unwrap_or(qp.network)
    }

    pub(crate) fn may_reach_member<E: Environment>(&mut self, env: &mut E, id: QpId, member: QpId) -> bool {
        let (qp, to) = (self.qp(id), self.qp(member).addresses.first);
        let (network, from, traffic) = (qp.network, qp.addresses.first, TrafficKind::Multicast);
        env.authorize(&AuthorizationRequest {
            network,
            other: network,
            from,
            to,
            traffic,
            is_external: false,
            subject: Subject::From,
        })
    }

    /// Whether an address is in that network for those of a QP's.
    pub(crate) fn finds<E: Environment>(&self, env: &mut E, id: QpId, (other, from): (NetworkId, Gid)) -> bool {
        let qp = self.qp(id);
        let is_known = qp.receive.permit.network_of(self.policy.generation, from) == Some(other);
        is_known || env.network_at(qp.network, from) == other
    }

    /// Whether a datagram of another host may come to a QP: from this network, from this address in
    /// it.
    pub(crate) fn may_receive<E: Environment>(
        &mut self,
        env: &mut E,
        id: QpId,
        (other, from): (NetworkId, Gid),
        traffic: TrafficKind,
    ) -> bool {
        let (qp, generation) = (self.qp(id), self.policy.generation);
        debug_assert!(qp.service == QpType::Ud);
        if qp.receive.permit.network_of(generation, from) == Some(other) {
            return true;
        }
        let (network, to) = (qp.network, qp.addresses.like(from));
        let allowed = env.authorize(&AuthorizationRequest {
            network,
            other,
            from,
            to,
            traffic,
            is_external: false,
            subject: Subject::To,
        });
        if allowed {
            self.qp_mut(id).receive.permit = Permit { who: Some((generation, from, other)) };
        }
        allowed
    }

    pub(crate) fn may_receive_from_outside<E: Environment>(&self, env: &mut E, id: QpId, from: Gid) -> bool {
        let qp = self.qp(id);
        let (network, to, traffic) = (qp.network, qp.addresses.first, TrafficKind::Datagram);
        env.authorize(&AuthorizationRequest {
            network,
            other: network,
            from,
            to,
            traffic,
            is_external: true,
            subject: Subject::To,
        })
    }
}
