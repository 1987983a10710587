//! Whether a QP may be connected, and stay so: asked of the environment when it is connected, and
//! again about all that is connected when policy has changed.
//!
//! Invariant: what is delivered goes to the network that policy was asked about: for connected QPs
//! that is `QueuePair::reached`.
//!
//! Invariant: after [`Engine::handle_policy_changed`] no verdict from before is used for anything
//! that begins, and once [`Engine::poll_policy`] has said that it is done, nothing is connected
//! that the policy does not allow.
use crate::policy::{EXTERNAL_GID_INDEX, network_behind};
use crate::qp::QueuePair;
use crate::{AuthorizationRequest, Engine, Environment, EventTarget, HostId, QpId, Subject, TrafficKind};
use freeflow_verbs::{AsyncEventKind, NetworkId, QpAttributes, Qpn};

impl Engine {
    /// The network whose memory a remote key opens; `None`: no region or window of this engine has it.
    pub fn network_of_key(&self, key: u32) -> Option<NetworkId> {
        self.requester.responder.network_of_key(key)
    }

    /// Applies a change of [`crate::Policy::authorize`]. Datagrams are checked again at once;
    /// connected QPs by and by, in [`Self::poll_policy`].
    pub fn handle_policy_changed(&mut self) {
        self.requester.responder.policy.generation += 1;
        self.requester.responder.policy.end = self.completer().qps.end();
        self.requester.responder.policy.left = self.requester.responder.policy.end;
    }

    /// Looks at so many QPs at most, and disconnects those that are not allowed any more;
    /// whether there are more to look at.
    pub fn poll_policy<E: Environment>(&mut self, env: &mut E, count_max: u32) -> bool {
        for _ in 0..count_max.min(self.requester.responder.policy.left) {
            if self.requester.responder.policy.next >= self.requester.responder.policy.end {
                self.requester.responder.policy.next = 0;
            }
            let index = self.requester.responder.policy.next;
            self.requester.responder.policy.next += 1;
            self.requester.responder.policy.left -= 1;
            if let Some((id, _)) = self.completer().qps.at(index)
                && !self.may_stand(env, id)
            {
                self.disconnect(env, id);
            }
        }
        self.requester.responder.policy.left > 0
    }

    /// Ends a connection that policy does not allow any more: ERROR, everything flushed, and an
    /// event that says so. The other end, if it is on this host, is looked at by itself; another
    /// host is notified.
    fn disconnect<E: Environment>(&mut self, env: &mut E, id: QpId) {
        let qp = self.qp(id);
        let (qpn, peer) = (qp.qpn, Qpn(qp.attributes.dest_qpn));
        let host = qp.wire.as_ref().map(|wire| wire.destination.host);
        env.raise(AsyncEventKind::QpFatal, EventTarget::Qp(id));
        self.requester.responder.silence(id);
        self.completer_mut().enter_error(env, id);
        if let Some(host) = host {
            env.identity_changed(qpn, Some(host));
            env.notify_disconnected(qpn, host, peer);
        }
    }

    /// The router of another host has disconnected its QP `peer` with `qpn` of this host.
    pub fn handle_disconnected<E: Environment>(&mut self, env: &mut E, qpn: Qpn, host: HostId, peer: Qpn) {
        let Some((id, qp)) = self.requester.responder.qpns.get(qpn.0).and_then(|index| self.completer().qps.at(index))
        else {
            return;
        };
        // A host has a say in its own connections only.
        let is_its_own = qp.wire.as_ref().is_some_and(|wire| wire.destination.host == host);
        if is_its_own && qp.attributes.dest_qpn == peer.0 && qp.receives() {
            // Where the rules here say the same, this end counts as theirs, too.
            self.may_stand(env, id);
            env.raise(AsyncEventKind::QpFatal, EventTarget::Qp(id));
            self.requester.responder.silence(id);
            self.completer_mut().enter_error(env, id);
            env.identity_changed(qpn, Some(host));
        }
    }

    /// The network that the peer's address is in (the own one if it has none), if the two may be
    /// connected.
    pub(crate) fn may_connect<E: Environment>(
        &self,
        env: &mut E,
        id: QpId,
        attributes: &QpAttributes,
    ) -> Option<NetworkId> {
        let (reached, allowed) = may_be_connected(env, self.qp(id), attributes, TrafficKind::Connection);
        allowed.then_some(reached)
    }

    /// Nor does a connection stand whose peer's address is another network's by now.
    fn may_stand<E: Environment>(&self, env: &mut E, id: QpId) -> bool {
        let qp = self.qp(id);
        if !qp.receives() {
            return true;
        }
        let (reached, allowed) = may_be_connected(env, qp, &qp.attributes, TrafficKind::Standing);
        allowed && reached == qp.reached
    }
}

/// The network that the peer's address is in, and whether the QP may be connected to it there.
fn may_be_connected<E: Environment>(
    env: &mut E,
    qp: &QueuePair,
    attributes: &QpAttributes,
    traffic: TrafficKind,
) -> (NetworkId, bool) {
    let network = qp.network;
    let Some(route) = attributes.address.grh.filter(|_| qp.is_connected_service()) else { return (network, true) };
    let other = network_behind(env, network, &route);
    let (from, is_external) = (qp.addresses.by(route.sgid_index), route.sgid_index == EXTERNAL_GID_INDEX);
    let allowed = env.authorize(&AuthorizationRequest {
        network,
        other,
        from,
        to: route.dgid,
        traffic,
        is_external,
        subject: Subject::From,
    });
    (other, allowed)
}
