//! Requests of the REST server to the control thread: a closed list, each with its parameters and
//! its answer.
//!
//! The server sends an [`ApiRequest`] and awaits the other end of its [`ReplyTo`]. The control
//! thread is the [`ControlPlane`] that serves it; tests of the server have one of their own.
//!
//! Invariant: the server knows nothing of the control thread beyond this list and [`super::feed`].
use super::caller::{Caller, Role};
use super::meters::{HostMeter, MeterPage, Position};
use crate::audit::Who;
use crate::base::lease::{Lease, LeaseChange, LeaseStatus};
use crate::dataplane::meters::PathCounts;
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{Command, Outcome, Refusal, Revision, Selector, Writer};
use freeflow_protocol::admin::{
    CmStatus, NetworkStatus, PeersStatus, QpStatus, RouterStatus, VnicStatus, WireFaults, WireStatus,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Takes the answer to one request. Dropped instead, it says that there is none.
pub(crate) struct ReplyTo<T>(oneshot::Sender<T>);

impl<T> ReplyTo<T> {
    /// With the end that the answer comes out of.
    pub fn pair() -> (Self, oneshot::Receiver<T>) {
        let (sender, receiver) = oneshot::channel();
        (Self(sender), receiver)
    }

    pub fn give(self, answer: T) {
        // The client may have gone.
        let _ = self.0.send(answer);
    }

    /// False once the client has gone.
    pub fn is_awaited(&self) -> bool {
        !self.0.is_closed()
    }
}

/// Parameters of a request, by which the answer's type is known.
pub(crate) trait ApiCall: Sized {
    type Answer: Send + 'static;

    fn into_request(self, reply: ReplyTo<Self::Answer>) -> ApiRequest;
}

/// Serves one request: at once, or later by keeping the reply.
pub(crate) trait Serve<C: ApiCall> {
    fn serve(&mut self, call: C, reply: ReplyTo<C::Answer>);
}

/// Some objects of a kind, in order of name, as a role may see them.
pub(crate) struct Page {
    pub revision: Revision,
    pub objects: Vec<AnyObject>,
    /// The next page begins after this name; `None`: this was the last.
    pub next: Option<String>,
}

/// Parameters for beginning a watch.
pub(crate) struct Beginning {
    pub revision: Revision,
    pub names: BTreeSet<String>,
}

/// A command that was done.
pub(crate) struct Done {
    pub revision: Revision,
    pub outcomes: Vec<Outcome>,
}

/// A command that was not done.
pub(crate) enum NotDone {
    /// Too many others wait for the store.
    Busy,
    Refused(Refusal),
}

/// Makes of the list of requests: their structs; [`ApiRequest`] and [`ApiCall`], so that each answer
/// has the type that is declared here; and [`ControlPlane`], which a new request makes incomplete
/// until it is served.
macro_rules! requests {
    ($( $(#[$doc:meta])* $name:ident { $( $field:ident: $type:ty ),* } -> $answer:ty; )*) => {
        $( $(#[$doc])* pub(crate) struct $name { $( pub $field: $type ),* } )*

        /// A request, and where its answer goes.
        #[allow(clippy::large_enum_variant, reason = "it lives for a moment")]
        pub(crate) enum ApiRequest {
            $( $name($name, ReplyTo<$answer>), )*
        }

        $( impl ApiCall for $name {
            type Answer = $answer;

            fn into_request(self, reply: ReplyTo<$answer>) -> ApiRequest {
                ApiRequest::$name(self, reply)
            }
        } )*

        /// Serves every request there is.
        pub(crate) trait ControlPlane: $( Serve<$name> + )* {}
        impl<P: $( Serve<$name> + )*> ControlPlane for P {}

        impl ApiRequest {
            pub fn serve_by(self, plane: &mut impl ControlPlane) {
                match self {
                    $( Self::$name(call, reply) => plane.serve(call, reply), )*
                }
            }
        }

        /// Each with the type of its answer, for the list of them that is checked in.
        #[cfg(test)]
        const REQUESTS: &[(&str, &str)] = &[ $( (stringify!($name), stringify!($answer)), )* ];
    };
}

requests! {
    PageObjects { role: Arc<Role>, kind: ObjectKind, after: Option<String>, selector: Arc<Selector>, floating: bool } -> Page;
    /// `None`: there is none that the role may see.
    GetObject { role: Arc<Role>, kind: ObjectKind, name: String } -> Option<AnyObject>;
    BeginWatch { role: Arc<Role>, kind: ObjectKind } -> Beginning;
    /// Checks a command, does it, and notes it in the audit log. The objects of the outcomes have no statuses.
    /// `only_unused`: a vNIC that is deleted has to be nobody's.
    ChangeObjects {
        caller: Caller, verb: &'static str, writer: Writer, command: Command, dry_run: bool, only_unused: bool
    } -> Result<Done, NotDone>;
    /// The same objects with their statuses; what is gone meanwhile comes without.
    AddStatuses { objects: Vec<AnyObject> } -> Vec<AnyObject>;

    /// vNICs after a position. `tenants`: whose; `None`: all.
    PageMeters { after: Option<Position>, with_qps: bool, tenants: Option<BTreeSet<String>> } -> MeterPage;
    /// Of each vNIC that has QPs, by id.
    CountQpPaths {} -> BTreeMap<String, PathCounts>;
    ReadHostMeter {} -> HostMeter;

    ReadRouter {} -> RouterStatus;
    /// A page of the host's vNICs behind this id, in order of id, and where the next page begins.
    PageVnics { after: Option<String> } -> (Vec<VnicStatus>, Option<String>);
    /// The same of its networks, by name.
    PageNetworks { after: Option<String> } -> (Vec<NetworkStatus>, Option<String>);
    /// A page of QPs, of one vNIC or of all, and whether there are more. `None`: no such vNIC.
    PageQps { vnic: Option<String>, after_qpn: Option<u32> } -> Option<(Vec<QpStatus>, bool)>;
    /// With a page of QPs, and whether there are more.
    PageWire { after_qpn: Option<u32> } -> (WireStatus, bool);
    /// With a page of identifiers, and whether there are more.
    PageConnections { after: Option<(u64, u32)> } -> (CmStatus, bool);
    ReadPeers {} -> PeersStatus;
    /// Reads the peers file again.
    ReloadPeers { who: Who } -> Result<(), Refusal>;
    /// The lease of the cluster's addresses.
    ReadLease {} -> LeaseStatus;
    /// The lease to be kept.
    ReadWholeLease {} -> Option<Lease>;
    /// Extends it, ends it, or begins one; the lease to be kept.
    ChangeLease { change: LeaseChange } -> Result<Option<Lease>, Refusal>;
    /// Notes that the host has lost its cluster, or has it again.
    NoteCluster { is_away: bool } -> ();
    /// Loses, delays or corrupts packets from now on; `None`: no more.
    InjectFaults { who: Who, faults: Option<WireFaults> } -> Result<(), Refusal>;
    /// Its answer comes when the worker has done what it was asked for before.
    AwaitWorker {} -> ();

    /// Whether there is a peers thread, where there should be one.
    CheckPeersThread {} -> bool;
    /// Faults of this router that the server found, for the status of the Host.
    ReportHealth { wrong: Vec<String> } -> ();
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/api/requests.txt");

    #[test]
    fn requests_are_those_that_are_listed() {
        let list: String = REQUESTS.iter().map(|(name, answer)| format!("{name} -> {answer}\n")).collect();
        if std::env::var_os("FREEFLOW_UPDATE").is_some() {
            std::fs::write(LIST, &list).unwrap();
        }
        let copy = std::fs::read_to_string(LIST).unwrap();
        assert_eq!(copy, list, "FREEFLOW_UPDATE=1 writes it again; review the difference");
    }
}
