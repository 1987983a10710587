//! Attributes with which a QP is modified on its way (Linux: `rdma_init_qp_attr`).
use crate::address::is_wildcard;
use crate::connection::{Connection, State};
use crate::id::{HOP_LIMIT, Id};
use crate::requests::qkey_of;
use crate::{Machine, Owner};
use freeflow_protocol::cm::CmReply;
use freeflow_protocol::library::Handle;
use freeflow_verbs::{
    Access, AddressHandleAttributes, GlobalRoute, PathMtu, QpAttributeMask as Mask, QpAttributes, QpState, QpType,
    VerbsError,
};

/// Most READs and atomics that a QP has outstanding here.
const DEPTH_MAX: u8 = freeflow_verbs::READ_ATOMIC_DEPTH_MAX;

impl Machine {
    /// Attributes with which the QP of an owner's identifier is modified on its way to that state.
    ///
    /// # Errors
    /// InvalidArgument: the identifier has no address yet, or its connection is in no state for it.
    /// NotFound: not the owner's identifier.
    pub fn qp_attributes(
        &mut self,
        owner: Owner,
        handle: Handle,
        state: QpState,
    ) -> Result<(QpAttributes, Mask), VerbsError> {
        self.id_of(owner, handle)?;
        self.touch(handle);
        self.attributes(handle, state)
    }

    /// The path MTU of an owner's identifier, once it has one.
    ///
    /// # Errors
    /// NotFound: not the owner's identifier.
    pub fn path_mtu(&self, owner: Owner, handle: Handle) -> Result<Option<PathMtu>, VerbsError> {
        Ok(self.id_of(owner, handle)?.route.map(|route| route.mtu))
    }

    pub(crate) fn init_qp_attributes(&mut self, handle: Handle, state: QpState) -> Result<CmReply, VerbsError> {
        self.attributes(handle, state).map(|(attributes, mask)| CmReply::QpAttributes { attributes, mask })
    }

    fn attributes(&mut self, handle: Handle, state: QpState) -> Result<(QpAttributes, Mask), VerbsError> {
        let id = self.ids.get_mut(handle).ok_or(VerbsError::NotFound)?;
        let has_device = id.route.is_some() || (id.port_claim.is_some() && !is_wildcard(id.local.gid));
        if !has_device {
            return Err(VerbsError::InvalidArgument);
        }
        let mut attributes = QpAttributes { state, port: 1, ..QpAttributes::default() };
        let mask = if id.qp_type == QpType::Ud || !id.had_connection {
            unconnected(id, &mut attributes)?
        } else {
            let connection = id.connection.and_then(|number| self.connections.get(&number));
            connected(connection.ok_or(VerbsError::InvalidArgument)?, &mut attributes)?
        };
        if state == QpState::ReadyToReceive {
            attributes.rq_psn = id.psn;
        }
        if mask & Mask::TIMEOUT != 0 {
            attributes.timeout = id.ack_timeout.unwrap_or(attributes.timeout);
        }
        Ok((attributes, Mask(mask)))
    }
}

fn unconnected(id: &mut Id, attributes: &mut QpAttributes) -> Result<u32, VerbsError> {
    let mask = Mask::STATE | Mask::PKEY_INDEX | Mask::PORT;
    if id.qp_type != QpType::Ud {
        return Ok(mask | Mask::ACCESS_FLAGS);
    }
    attributes.qkey = qkey_of(id, 0)?;
    Ok(mask | Mask::QKEY)
}

fn connected(connection: &Connection, attributes: &mut QpAttributes) -> Result<u32, VerbsError> {
    let heard = matches!(
        connection.state,
        State::RequestReceived | State::ReplySent | State::ReplyReceived | State::Established
    );
    match attributes.state {
        QpState::Init if heard || connection.state == State::RequestSent => Ok(to_init(connection, attributes)),
        QpState::ReadyToReceive if heard => Ok(to_receive(connection, attributes)),
        QpState::ReadyToSend if heard => Ok(to_send(connection, attributes)),
        _ => Err(VerbsError::InvalidArgument),
    }
}

fn to_init(connection: &Connection, attributes: &mut QpAttributes) -> u32 {
    attributes.access = Access::REMOTE_WRITE;
    if connection.responder_resources > 0 {
        attributes.access = attributes.access.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);
    }
    Mask::STATE | Mask::ACCESS_FLAGS | Mask::PKEY_INDEX | Mask::PORT
}

fn to_receive(connection: &Connection, attributes: &mut QpAttributes) -> u32 {
    attributes.address = address_of(connection);
    attributes.path_mtu = connection.mtu;
    attributes.dest_qpn = connection.remote_qpn;
    attributes.rq_psn = connection.rq_psn;
    let mask = Mask::STATE | Mask::AV | Mask::PATH_MTU | Mask::DEST_QPN | Mask::RQ_PSN;
    if !matches!(connection.qp_type, QpType::Rc | QpType::XrcReceive) {
        return mask;
    }
    attributes.max_dest_rd_atomic = connection.responder_resources.min(DEPTH_MAX);
    attributes.min_rnr_timer = 0;
    mask | Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER
}

fn to_send(connection: &Connection, attributes: &mut QpAttributes) -> u32 {
    attributes.sq_psn = connection.sq_psn;
    attributes.timeout = connection.ack_timeout;
    let mask = Mask::STATE | Mask::SQ_PSN;
    match connection.qp_type {
        QpType::Rc | QpType::XrcSend => {
            attributes.retry_count = connection.retry_count;
            attributes.rnr_retry = connection.rnr_retry_count;
            attributes.max_rd_atomic = connection.initiator_depth.min(DEPTH_MAX);
            mask | Mask::TIMEOUT | Mask::RETRY_CNT | Mask::RNR_RETRY | Mask::MAX_QP_RD_ATOMIC
        }
        QpType::XrcReceive => mask | Mask::TIMEOUT,
        QpType::Uc | QpType::Ud => mask,
    }
}

/// Where the other end's QP is.
pub(crate) fn address_of(connection: &Connection) -> AddressHandleAttributes {
    let grh = GlobalRoute {
        dgid: connection.path.remote,
        flow_label: connection.flow_label,
        sgid_index: connection.gid_index,
        hop_limit: HOP_LIMIT,
        traffic_class: connection.traffic_class,
    };
    AddressHandleAttributes { grh: Some(grh), port: 1, ..AddressHandleAttributes::default() }
}
