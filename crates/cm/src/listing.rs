//! Listings of identifiers, for an operator.
use crate::connection::State;
use crate::id::IdState;
use crate::{Machine, VnicRef};
use alloc::vec::Vec;
use core::ops::Bound;
use freeflow_protocol::cm::{CmAddress, PortSpace};
use freeflow_protocol::library::Handle;
use freeflow_verbs::QpType;

/// One identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdStatus {
    /// Its vNIC.
    pub vnic: VnicRef,
    /// Its number.
    pub handle: Handle,
    /// Of its connection, if it has one, else its own.
    pub state: &'static str,
    /// Its port space.
    pub port_space: PortSpace,
    /// Type of its QP.
    pub qp_type: QpType,
    /// Its address and port, once it is bound.
    pub local: Option<CmAddress>,
    /// Address and port of the other end, once it has one.
    pub remote: Option<CmAddress>,
    /// Number of its QP, once the program has named it.
    pub local_qpn: Option<u32>,
    /// Number of the other end's QP, once it is known.
    pub remote_qpn: Option<u32>,
}

impl IdState {
    const fn name(self) -> &'static str {
        match self {
            Self::Idle => "IDLE",
            Self::Bound => "BOUND",
            Self::AddressQuery => "ADDR_QUERY",
            Self::AddressResolved => "ADDR_RESOLVED",
            Self::RouteQuery => "ROUTE_QUERY",
            Self::RouteResolved => "ROUTE_RESOLVED",
            Self::Listening => "LISTEN",
            Self::Connect => "CONNECT",
            Self::Disconnected => "DISCONNECTED",
            Self::Removed => "REMOVED",
        }
    }
}

impl State {
    const fn name(self) -> &'static str {
        match self {
            Self::RequestSent => "REQ_SENT",
            Self::RequestReceived => "REQ_RCVD",
            Self::ReplySent => "REP_SENT",
            Self::ReplyReceived => "REP_RCVD",
            Self::Established => "ESTABLISHED",
            Self::DisconnectSent => "DREQ_SENT",
            Self::TimeWait => "TIMEWAIT",
            Self::ServiceAsked => "SIDR_REQ_SENT",
            Self::ServiceRequested => "SIDR_REQ_RCVD",
            Self::ServiceAnswered => "SIDR_ANSWERED",
        }
    }
}

impl Machine {
    /// Identifiers by vNIC and handle, so many after a certain one.
    pub fn list(&self, after: Option<(VnicRef, Handle)>, count_max: usize) -> Vec<IdStatus> {
        let first = after.map_or(VnicRef(0), |(vnic, _)| vnic);
        let handles = self.by_vnic.range(first..).flat_map(|(&vnic, handles)| {
            let from = match after {
                Some((last, handle)) if last == vnic => Bound::Excluded(handle),
                _ => Bound::Unbounded,
            };
            handles.range((from, Bound::Unbounded)).map(move |&handle| (vnic, handle))
        });
        handles.filter_map(|(vnic, handle)| self.id_status(vnic, handle)).take(count_max).collect()
    }

    fn id_status(&self, vnic: VnicRef, handle: Handle) -> Option<IdStatus> {
        let id = self.ids.get(handle)?;
        let connection = id.connection.and_then(|number| self.connections.get(&number));
        let there = |address: CmAddress| (address != CmAddress::default()).then_some(address);
        let number = |qpn: u32| (qpn != 0).then_some(qpn);
        Some(IdStatus {
            vnic,
            handle,
            state: connection.map_or(id.state.name(), |connection| connection.state.name()),
            port_space: id.port_space,
            qp_type: id.qp_type,
            local: there(id.local),
            remote: there(id.remote),
            local_qpn: connection.and_then(|connection| number(connection.local_qpn)),
            remote_qpn: connection.and_then(|connection| number(connection.remote_qpn)),
        })
    }
}
