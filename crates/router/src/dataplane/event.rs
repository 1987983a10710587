//! Messages of the worker to the control thread: answers to commands, and events of its own accord.
use crate::admission::access::{Incident, ViolationRecord};
use crate::base::deferred_drop::DeferredDrop;
use crate::dataplane::command::{Command, Reply, Ticket};
use crate::peering::Mad;
use freeflow_engine::{SessionId, VnicCounters, VnicId};
use freeflow_verbs::Gid;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Makes of the list of events: their structs, and [`Event`].
macro_rules! events {
    ($( $(#[$doc:meta])* $event:ident { $( $(#[$field_doc:meta])* $field:ident: $type:ty ),* } )*) => {
        $( $(#[$doc])* pub(crate) struct $event { $( $(#[$field_doc])* pub $field: $type ),* } )*

        #[allow(clippy::large_enum_variant, reason = "it lives for a moment")]
        pub(crate) enum Event {
            $( $event($event), )*
        }

        $( impl From<$event> for Event {
            fn from(event: $event) -> Self {
                Self::$event(event)
            }
        } )*

        /// For the list of them that is checked in.
        #[cfg(test)]
        pub(crate) const EVENTS: &[&str] = &[$( stringify!($event) ),*];
    };
}

events! {
    /// A command is done.
    Done {
        ticket: Option<Ticket>, reply: Reply,
        /// The rest of the command, to be dropped.
        rest: Option<Command>
    }
    /// The worker has ended a session by itself.
    SessionFailed { session: SessionId, reason: &'static str, held: DeferredDrop }
    /// The worker has given a vNIC up, and ended its sessions.
    VnicFailed { vnic: VnicId, reason: &'static str, held: DeferredDrop }
    /// Refusals and cuts by rules, and attempts that led nowhere.
    PolicyViolated { incidents: Vec<Incident>, violations: Vec<ViolationRecord> }
    /// vNICs whose counters changed.
    Counted { counters: Vec<(VnicId, VnicCounters)> }
    /// Datagrams of connection management, by who sent them; `backlog` is lowered by as many.
    ManagementReceived { mads: Vec<(Gid, Box<Mad>)>, backlog: Arc<AtomicUsize> }
}
