//! Which QPs may reach each other past the router: what the engine knows of it. Whether they may,
//! policy says.
use crate::arrival::{effective_qkey, needs_depth, remote_right};
use crate::environment::{AuthorizationRequest, Environment, Subject, TrafficKind};
use crate::keys::{Backing, KeyHolder};
use crate::policy::{EXTERNAL_GID_INDEX, network_behind};
use crate::qp::{Claim, SendPhase};
use crate::{CqId, Engine, EventTarget, MrId, QpId, SessionId, SrqId};
use core::fmt;
use freeflow_verbs::{Access, AsyncEventKind, Gid, GlobalRoute, QpState, QpType, Qpn, SendOpcode};

/// Why the messages of a QP go through the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotDirect {
    /// XRC.
    Type,
    /// To a group.
    Multicast,
    /// It is not ready to send, or its peer not to receive.
    State,
    /// Its peer is on another host.
    OtherHost,
    /// There is no such peer, or it is not connected to this QP.
    NoPeer,
}

impl fmt::Display for NotDirect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Type => "XRC",
            Self::Multicast => "multicast",
            Self::State => "not connected",
            Self::OtherHost => "peer on another host",
            Self::NoPeer => "no peer",
        })
    }
}

/// The receiver of datagrams, and what it is told of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramPeer {
    /// The receiver.
    pub to: QpId,
    /// QPN of the sender.
    pub source_qpn: u32,
    /// Its GID.
    pub source: Gid,
    /// As the address handle says.
    pub route: GlobalRoute,
}

/// Why requests for some memory go through the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotGrantable {
    /// All requests do.
    Path(NotDirect),
    /// A request would be refused: by the QPs, or by the key.
    Refused,
    /// The key is a window's, or of a region that is not a stretch of some process' memory.
    Memory,
}

impl From<NotDirect> for NotGrantable {
    fn from(reason: NotDirect) -> Self {
        Self::Path(reason)
    }
}

/// A memory region that requests of a QP may reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grantable {
    /// The QP's peer.
    pub responder: QpId,
    /// The session that owns the memory.
    pub owner: SessionId,
    /// The region that holds it.
    pub mr: MrId,
    /// Where that process sees the region.
    pub address: u64,
    /// Its length less one.
    pub last: u64,
    /// Address of its first byte in requests.
    pub iova: u64,
    /// Where the process sees the first byte asked for.
    pub asked: u64,
    /// Whether WRITEs or atomics of the QP may reach it by this key: who may compare and swap can set any eight
    /// bytes, as a writer can.
    pub writable: bool,
}

impl Engine {
    /// The memory that a WRITE, READ or atomic of this QP would reach: every check that the requester
    /// and the responder do before they touch it, none of their effects. But for the alignment of an atomic.
    ///
    /// # Errors
    /// [`NotGrantable`]: the first check that failed.
    pub fn grantable(
        &self,
        id: QpId,
        rkey: u32,
        address: u64,
        length: u32,
        opcode: SendOpcode,
    ) -> Result<Grantable, NotGrantable> {
        let peer = self.direct_peer(id)?;
        let (right, qp, responder) = (remote_right(opcode), self.qp(id), self.qp(peer));
        let lacks_depth =
            needs_depth(opcode) && (qp.attributes.max_rd_atomic == 0 || responder.attributes.max_dest_rd_atomic == 0);
        // UC has no READ, and no atomics.
        let exists = !needs_depth(opcode) || qp.service.is_reliable();
        if !exists || !responder.attributes.access.contains(right) || lacks_depth || length == 0 {
            return Err(NotGrantable::Refused);
        }
        let span =
            self.completer().keys.resolve_remote(rkey, self.requester.responder.reach(peer), address, length, right);
        let span = span.map_err(|_| NotGrantable::Refused)?;
        let Some(KeyHolder::Region(index)) = self.completer().keys.holder(rkey) else {
            return Err(NotGrantable::Memory);
        };
        let (mr, region) = self.completer().keys.regions.at(index).ok_or(NotGrantable::Refused)?;
        // A region on demand may lie in other memory by the next request.
        if region.backing != Backing::Process || region.is_on_demand() {
            return Err(NotGrantable::Memory);
        }
        let (owner, asked) = (region.session, span.address);
        let may = |right| region.access().contains(right) && responder.attributes.access.contains(right);
        let writable = may(Access::REMOTE_WRITE) || may(Access::REMOTE_ATOMIC);
        let (address, last, iova) = (region.address, region.last, region.iova);
        Ok(Grantable { responder: peer, owner, mr, address, last, iova, asked, writable })
    }

    /// The QP that this one's messages go to, if both are of RC or of UC, on this host, and ready.
    ///
    /// # Errors
    /// [`NotDirect`]: why its messages go another way.
    pub fn direct_peer(&self, id: QpId) -> Result<QpId, NotDirect> {
        let qp = self.completer().qps.get(id).ok_or(NotDirect::NoPeer)?;
        if !matches!(qp.service, QpType::Rc | QpType::Uc) {
            return Err(NotDirect::Type);
        }
        if qp.state() != QpState::ReadyToSend {
            return Err(NotDirect::State);
        }
        if qp.wire.is_some() {
            return Err(NotDirect::OtherHost);
        }
        self.requester.responder.find_responder(id).ok_or(NotDirect::NoPeer)
    }

    /// The QP on this host that datagrams with this address handle, remote QPN and Q_Key come to: every check that
    /// the router does of one, but of its length and of the RECV.
    ///
    /// # Errors
    /// [`NotDirect`]: why they go another way, or nowhere.
    pub fn datagram_peer<E: Environment>(
        &self,
        env: &mut E,
        id: QpId,
        address_handle: u32,
        (remote_qpn, qkey): (u32, u32),
    ) -> Result<DatagramPeer, NotDirect> {
        let qp = self.completer().qps.get(id).ok_or(NotDirect::NoPeer)?;
        if qp.service != QpType::Ud {
            return Err(NotDirect::Type);
        }
        if qp.state() != QpState::ReadyToSend {
            return Err(NotDirect::State);
        }
        let (_, handle) = self.completer().ahs.at(address_handle).ok_or(NotDirect::NoPeer)?;
        let route = handle.route;
        if Some(handle.pd) != qp.pd {
            return Err(NotDirect::NoPeer);
        }
        if route.dgid.is_multicast() {
            return Err(NotDirect::Multicast);
        }
        if route.sgid_index == EXTERNAL_GID_INDEX {
            return Err(NotDirect::OtherHost);
        }
        let (network, source) = (qp.network, qp.addresses.by(route.sgid_index));
        let other = network_behind(env, network, &route);
        let is_mutual = other == network || env.network_at(other, source) == network;
        let allowed = is_mutual
            && env.authorize(&AuthorizationRequest {
                network,
                other,
                from: source,
                to: route.dgid,
                traffic: TrafficKind::DirectDatagrams,
                is_external: false,
                subject: Subject::From,
            });
        let index = self.requester.responder.qpns.get(remote_qpn & Qpn::MASK).filter(|_| allowed);
        let (to, peer) = index.and_then(|index| self.completer().qps.at(index)).ok_or(NotDirect::NoPeer)?;
        let listens = peer.service == QpType::Ud && peer.network == other && peer.is_at(route.dgid) && peer.receives();
        if !listens || effective_qkey(qkey, qp.attributes.qkey) != peer.attributes.qkey {
            return Err(NotDirect::NoPeer);
        }
        Ok(DatagramPeer { to, source_qpn: qp.qpn.0, source, route })
    }

    /// The QP on this host that the last datagram came to which the router carried.
    ///
    /// # Errors
    /// [`NotDirect`]: none did.
    pub fn last_datagram_peer(&self, id: QpId) -> Result<QpId, NotDirect> {
        let qp = self.completer().qps.get(id).ok_or(NotDirect::NoPeer)?;
        if qp.state() != QpState::ReadyToSend {
            return Err(NotDirect::State);
        }
        let handle = self.completer().ahs.at(qp.send.request.address_handle).map(|(_, handle)| handle);
        match handle {
            Some(handle) if handle.route.dgid.is_multicast() => Err(NotDirect::Multicast),
            Some(handle) if handle.route.sgid_index == EXTERNAL_GID_INDEX => Err(NotDirect::OtherHost),
            _ => self.requester.responder.find_responder(id).ok_or(NotDirect::NoPeer),
        }
    }

    /// Nothing of a QP is under way, and its peer keeps no RECV that a lost message left: the next message takes the
    /// RECV that is fetched next.
    pub fn is_between_messages(&self, id: QpId, peer: QpId) -> bool {
        let qps = &self.completer().qps;
        let (Some(qp), Some(peer)) = (qps.get(id), qps.get(peer)) else { return false };
        qp.send.phase == SendPhase::Idle && peer.receive.claim == Claim::None
    }

    /// The RECV of a QP's own queue that was fetched for a message which is not complete.
    pub fn receive_in_hand(&self, id: QpId) -> Option<u32> {
        let qp = self.completer().qps.get(id)?;
        (qp.receive.claim != Claim::None && qp.srq.is_none()).then_some(qp.receive.request.ring_position)
    }

    /// No send request of a QP is under way.
    pub fn is_send_idle(&self, id: QpId) -> bool {
        self.completer().qps.get(id).is_some_and(|qp| qp.send.phase == SendPhase::Idle)
    }

    /// The library of a QP may have carried out an atomic that nobody may do again: the QP goes to ERROR, and
    /// everything that it has is flushed.
    pub fn fail_direct<E: Environment>(&mut self, env: &mut E, id: QpId) {
        let Some(qp) = self.completer().qps.get(id) else { return };
        if matches!(qp.state(), QpState::ReadyToSend | QpState::SqDrain | QpState::SqError) {
            env.raise(AsyncEventKind::QpFatal, EventTarget::Qp(id));
            self.completer_mut().enter_error(env, id);
        }
    }

    /// WRITEs of its peer are welcome to a QP, as far as the QP has a say.
    pub fn takes_writes(&self, id: QpId) -> bool {
        self.completer().qps.get(id).is_some_and(|qp| qp.attributes.access.contains(Access::REMOTE_WRITE))
    }

    /// Where the completions of a QP's RECVs go.
    pub fn receive_cq(&self, id: QpId) -> Option<CqId> {
        self.completer().qps.get(id)?.recv_cq
    }

    /// The SRQ that a QP takes its RECVs from.
    pub fn srq_of(&self, id: QpId) -> Option<SrqId> {
        self.completer().qps.get(id)?.srq
    }

    /// RECVs of an SRQ were taken without the engine.
    pub fn handle_receives_taken<E: Environment>(&mut self, env: &mut E, srq: SrqId) {
        self.completer_mut().check_srq_limit(env, srq);
    }
}
