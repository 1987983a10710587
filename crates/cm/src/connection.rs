//! Connections: what two ends have between them, from the first message to the end of TimeWait.
use crate::{Link, Packet, Scope, ScopedGid, VnicRef};
use alloc::boxed::Box;
use freeflow_protocol::cm::ConnectionParameters;
use freeflow_protocol::library::Handle;
use freeflow_verbs::{Gid, Instant, PathMtu, QpType};
use freeflow_wire::cm::MAD_BYTES;

/// IBTA 12.9.7, as far as two ends over RoCE need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// REQ sent.
    RequestSent,
    /// REQ came, its program is asked.
    RequestReceived,
    /// REP sent.
    ReplySent,
    /// REP came, its program is asked.
    ReplyReceived,
    Established,
    /// DREQ sent.
    DisconnectSent,
    TimeWait,
    /// SIDR REQ sent.
    ServiceAsked,
    /// SIDR REQ came, its program is asked.
    ServiceRequested,
    /// SIDR REP sent: kept for a while, since the request may come again.
    ServiceAnswered,
}

impl State {
    #[cfg(test)]
    pub const ALL: [Self; 10] = [
        Self::RequestSent,
        Self::RequestReceived,
        Self::ReplySent,
        Self::ReplyReceived,
        Self::Established,
        Self::DisconnectSent,
        Self::TimeWait,
        Self::ServiceAsked,
        Self::ServiceRequested,
        Self::ServiceAnswered,
    ];

    /// The whole table of transitions. From each state a connection may also just end.
    pub const fn may_become(self, next: Self) -> bool {
        use State as S;
        matches!(
            (self, next),
            (S::RequestSent, S::ReplyReceived)
                | (S::RequestReceived, S::ReplySent)
                | (S::ReplySent, S::Established | S::DisconnectSent | S::TimeWait)
                | (S::ReplyReceived, S::Established)
                | (S::Established, S::DisconnectSent | S::TimeWait)
                | (S::DisconnectSent, S::TimeWait)
                | (S::ServiceRequested, S::ServiceAnswered)
        )
    }

    /// A program here has not answered yet.
    pub const fn is_half_open(self) -> bool {
        matches!(self, Self::RequestReceived | Self::ServiceRequested)
    }
}

/// Between whom, and how messages get there. Only the other end of it has a say in a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Path {
    pub link: Link,
    pub scope: Scope,
    pub local: Gid,
    pub remote: Gid,
}

impl Path {
    /// The way back to a packet's sender.
    pub fn of(packet: &Packet<'_>) -> Self {
        Self { link: packet.link, scope: packet.scope, local: packet.to, remote: packet.from }
    }

    pub fn peer(&self) -> Peer {
        (self.link, self.scope, self.remote)
    }

    pub fn place(&self) -> ScopedGid {
        ScopedGid { scope: self.scope, gid: self.local }
    }

    pub fn number(&self, number: u32) -> PeerNumber {
        (self.peer(), number)
    }
}

pub(crate) type Peer = (Link, Scope, Gid);
/// A number that a peer gave: a communication id, a request id, a QPN.
pub(crate) type PeerNumber = (Peer, u32);

pub(crate) struct Connection {
    /// `None`: an orphan.
    pub id: Option<Handle>,
    pub vnic: VnicRef,
    pub state: State,
    pub path: Path,
    /// The peer's communication id, or of a SIDR request its request id; 0 until it is known.
    pub remote_id: u32,
    /// Of the message that is answered, or the own.
    pub transaction_id: u64,
    pub service_id: u64,
    pub qp_type: QpType,
    pub local_qpn: u32,
    pub remote_qpn: u32,
    /// First PSN that the own QP expects, and the one it begins with.
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub mtu: PathMtu,
    pub gid_index: u8,
    pub traffic_class: u8,
    pub flow_label: u32,
    /// Of the own QP.
    pub ack_timeout: u8,
    /// The message that wants an answer, or that is the answer to what may come again.
    pub message: Option<Box<[u8; MAD_BYTES]>>,
    /// The peer's parameters, while the environment prepares the QP: the program has yet to hear of
    /// them.
    pub withheld: Option<Box<ConnectionParameters>>,
    pub retries_left: u8,
    /// The end of all patience with this state.
    pub give_up: Instant,
    pub timer: Option<Instant>,
    /// It stands in the tables of the peers' numbers.
    pub has_remote_id: bool,
    pub has_remote_qpn: bool,
}

impl Connection {
    pub fn new(id: Handle, vnic: VnicRef, state: State, path: Path, qp_type: QpType) -> Self {
        Self {
            id: Some(id),
            vnic,
            state,
            path,
            remote_id: 0,
            transaction_id: 0,
            service_id: 0,
            qp_type,
            local_qpn: 0,
            remote_qpn: 0,
            rq_psn: 0,
            sq_psn: 0,
            responder_resources: 0,
            initiator_depth: 0,
            retry_count: 0,
            rnr_retry_count: 0,
            mtu: PathMtu::default(),
            gid_index: 0,
            traffic_class: 0,
            flow_label: 0,
            ack_timeout: 0,
            message: None,
            withheld: None,
            retries_left: 0,
            give_up: Instant::default(),
            timer: None,
            has_remote_id: false,
            has_remote_qpn: false,
        }
    }

    pub fn become_state(&mut self, next: State) {
        assert!(self.state.may_become(next), "a connection went from {:?} to {next:?}", self.state);
        self.state = next;
    }
}

#[cfg(test)]
mod tests {
    use super::State;

    #[test]
    fn the_table_of_transitions() {
        let mut text = alloc::string::String::new();
        for from in State::ALL {
            let to: alloc::vec::Vec<_> = State::ALL.into_iter().filter(|to| from.may_become(*to)).collect();
            text += &alloc::format!("{from:?} -> {to:?}\n");
        }
        assert_eq!(
            text,
            "RequestSent -> [ReplyReceived]\n\
             RequestReceived -> [ReplySent]\n\
             ReplySent -> [Established, DisconnectSent, TimeWait]\n\
             ReplyReceived -> [Established]\n\
             Established -> [DisconnectSent, TimeWait]\n\
             DisconnectSent -> [TimeWait]\n\
             TimeWait -> []\n\
             ServiceAsked -> []\n\
             ServiceRequested -> [ServiceAnswered]\n\
             ServiceAnswered -> []\n"
        );
    }
}
