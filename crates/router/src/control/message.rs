//! Messages of other threads than the worker to the control thread.
use crate::admission::access::RuleCounts;
use crate::admission::account::Charge;
use crate::api::plane::ApiRequest;
use crate::attachment::AttachedProcess;
use crate::attachment::guest::GuestConnection;
use crate::audit::Who;
use crate::base::slab::Key;
use crate::base::wake::Waker;
use crate::control::peer_updates::UpdateBacklog;
use crate::control::session::Answer;
use crate::control::store_slot::{AnyStore, Stored};
use crate::dataplane::capture;
use crate::peering::Update;
use freeflow_hostnet::inventory::Inventory;
use freeflow_orchestrator::access::AccessTable;
use freeflow_orchestrator::{Command, Refusal};
use freeflow_shm::Segment;
use freeflow_shm::fd::PeerCredentials;
use freeflow_verbs::VerbsError;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// A connection that was accepted, before its process is known to be the one that connected.
pub(crate) struct Newcomer {
    pub socket: OwnedFd,
    pub credentials: PeerCredentials,
    pub charge: Arc<Charge>,
}

#[allow(clippy::large_enum_variant, reason = "it lives for a moment")]
pub(crate) enum Message {
    /// Updates from other hosts' routers; `backlog` is lowered by them.
    PeersUpdated {
        updates: Vec<Update>,
        backlog: UpdateBacklog,
    },
    /// A connection of a vNIC: its process was looked at.
    Identified {
        vnic: Key,
        newcomer: Box<Newcomer>,
        process: io::Result<Box<dyn AttachedProcess>>,
    },
    /// A connection of a virtual machine's vNIC: its process was looked at.
    GuestConnected {
        vnic: String,
        connection: Box<GuestConnection>,
    },
    /// A vNIC's attachment has ended by itself.
    AttachmentEnded {
        vnic: String,
    },
    /// A connection's threads were frozen or thawed, or can't be.
    ThreadsFrozen {
        connection: Key,
        result: Result<(), VerbsError>,
    },
    /// A file that a connection's process shares was mapped, or can't be. The charge is the segment's.
    SegmentBorrowed {
        connection: Key,
        result: Result<(Segment, Charge), VerbsError>,
    },
    /// Objects that a connection's request took out are freed: this is its answer.
    MemoryFreed {
        connection: Key,
        answer: Answer,
    },
    /// A command was stored, or the store has panicked.
    Stored {
        store: AnyStore,
        stored: std::thread::Result<Stored>,
    },
    CaptureEnded {
        admin: Key,
        who: Box<Who>,
        outcome: capture::Outcome,
    },
    /// From the thread that reconciles the host's network.
    ReadInventory {
        answer: Sender<Inventory>,
    },
    /// From who runs a router in its own process.
    SetAccess {
        table: Box<AccessTable>,
    },
    CountAccess {
        rule: Option<String>,
        answer: Sender<RuleCounts>,
    },
    Declare {
        command: Box<Command>,
        answer: Sender<Result<(), Refusal>>,
    },
    /// From the REST server.
    Api(Box<ApiRequest>),
}

/// The way to the control thread.
#[derive(Clone)]
pub(crate) struct ControlHandle {
    pub messages: Sender<Message>,
    pub waker: Arc<Waker>,
}

impl ControlHandle {
    pub fn send(&self, message: Message) {
        // Fails only when the control thread has ended.
        let _ = self.messages.send(message);
        self.waker.wake();
    }
}
