//! Commands of other threads to the worker: a closed list, each with its parameters and the answer
//! that it gets.
//!
//! A sender's commands are executed in their order, but for those that wait ([`Execution::Again`]).
//! The answer goes to the control thread as [`Event::Done`](crate::dataplane::event::Event::Done),
//! under the ticket that the command came with.
//!
//! Invariant: the worker drops nothing that takes a system call. A command that was refused comes
//! back with its answer, and so does what was taken out of a table ([`DeferredDrop`]).
use crate::admission::access::{Rules, VnicIdentity};
use crate::admission::account::Charge;
use crate::base::deferred_drop::DeferredDrop;
use crate::base::mode::Mode;
use crate::dataplane::datagram_rings::{DatagramRing, IncomingTerms, OfferedMemory};
use crate::dataplane::event_pipes::PipeId;
use crate::dataplane::meters::{MeteredVnics, PathCounts, QpPage, VnicNumbers, WorkerMeter, WorkerStatus};
use crate::dataplane::ports::Qp;
use crate::dataplane::qp_changes::{Change, QpChanges};
use crate::memory::grants::{GrantRequest, Verdict};
use crate::memory::page_table::{Origin, PageTable};
use crate::peering::{Mad, Update};
use freeflow_backend::CaptureSink;
use freeflow_engine::{
    AhId, ContextId, CqId, HostId, MrId, MrKeys, MwId, PdId, QpId, QpInit, Refusal, SessionId, SrqId, VnicId, XrcdId,
};
use freeflow_protocol::admin::{DataPath, WireFaults, WireStatus};
use freeflow_protocol::library::Handle;
use freeflow_protocol::peer::SealSecret;
use freeflow_shm::{CompletionProducer, Doorbell, RequestConsumer, Segment, SessionSegment};
use freeflow_verbs::{
    Access, AddressHandleAttributes, Duration, FileIdentity, Gid, Instant, NetworkId, NetworkLimits, QpAttributeMask,
    QpAttributes, QpState, Qpn, RateLimit, RegionChange, Shaping, SrqAttributes, TenantId, VerbsError, VnicLimits,
    WindowKind, XrcdOpenFlags,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A command of a session that is not done by then is refused with ETIMEDOUT. Copies end, or fail
/// their vNIC, well before.
pub(crate) const COMMAND_TIME_MAX: Duration = Duration::from_millis(5_000);

/// By which the control thread knows whose an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(pub u64);

/// A command on its way to the worker.
pub(crate) struct Submission {
    /// Absent: nobody waits for the answer.
    pub ticket: Option<Ticket>,
    pub command: Command,
    pub bound: Option<Bound>,
}

/// Bounds of a command of a session.
pub(crate) struct Bound {
    pub session: SessionId,
    /// Its connection is closing.
    pub cancelled: Arc<AtomicBool>,
    pub deadline: Instant,
}

impl Bound {
    pub fn is_cancelled(&self) -> bool {
        // Relaxed: advice, which orders nothing.
        self.cancelled.load(Relaxed)
    }
}

/// Parameters of a command, by which the answer's type is known.
pub(crate) trait Ask: Sized + Send + 'static {
    type Answer: Send + 'static;

    fn into_command(self) -> Command;

    /// The answer to such a command.
    fn answer_of(reply: Reply) -> Self::Answer;
}

/// Implementation of a command.
pub(crate) trait Execute<C: Ask> {
    fn execute(&mut self, now: Instant, command: C) -> Execution<C>;
}

/// How far a command has come.
pub(crate) enum Execution<C: Ask> {
    /// It waits for copies in flight, or has more to do than is done at once: it is executed again in the next turn.
    Again(C),
    /// `rest`: the command with what it still holds, for the control thread to drop.
    Done { answer: C::Answer, rest: Option<C> },
}

impl<C: Ask> Execution<C> {
    pub fn done(answer: C::Answer) -> Self {
        Self::Done { answer, rest: None }
    }
}

impl<T, C: Ask<Answer = Result<T, VerbsError>>> Execution<C> {
    pub fn refused(command: C, error: VerbsError) -> Self {
        Self::Done { answer: Err(error), rest: Some(command) }
    }

    /// Done with what the engine says; what the command holds goes back in any case.
    pub fn returned(command: C, answer: Result<T, VerbsError>) -> Self {
        Self::Done { answer, rest: Some(command) }
    }

    pub fn unless_in_flight(command: C, result: Result<T, Refusal>) -> Self {
        match result {
            Ok(value) => Self::done(Ok(value)),
            Err(Refusal::Error(error)) => Self::done(Err(error)),
            Err(Refusal::InFlight) => Self::Again(command),
        }
    }
}

/// The same of a command whose kind is not known.
#[allow(clippy::large_enum_variant, reason = "it lives for a moment")]
pub(crate) enum Progress {
    Again(Command),
    Done { reply: Reply, rest: Option<Command> },
}

impl Progress {
    fn of<C: Ask>(step: Execution<C>, reply: impl FnOnce(C::Answer) -> Reply) -> Self {
        match step {
            Execution::Again(command) => Self::Again(command.into_command()),
            Execution::Done { answer, rest } => Self::Done { reply: reply(answer), rest: rest.map(Ask::into_command) },
        }
    }
}

/// Which vNIC, for who may not know yet how the engine calls it.
pub(crate) enum VnicName {
    Known(VnicId),
    /// One whose making was asked for before; empty if it could not be made.
    Making(Arc<OnceLock<VnicId>>),
}

impl VnicName {
    pub fn get(&self) -> Option<VnicId> {
        match self {
            Self::Known(id) => Some(*id),
            Self::Making(place) => place.get().copied(),
        }
    }
}

/// Remains of a vNIC.
pub(crate) struct DestroyedVnic {
    pub numbers: VnicNumbers,
    pub sessions: DeferredDrop,
    pub vnic: DeferredDrop,
    /// The engine kept it.
    pub error: Option<VerbsError>,
}

/// Facts about a direct ring that its receiver, or its sender, has to know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectRingTerms {
    pub credit_count: u32,
    pub direct_rings_closed: u32,
    pub takes_writes: bool,
    /// Of a ring whose messages the router numbers: the first one's.
    pub msn: Option<u32>,
}

/// New limits and rates of a vNIC, as far as they changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VnicPolicy {
    pub vnic: VnicId,
    pub shaping: Option<Shaping>,
    pub limits: Option<VnicLimits>,
}

/// Makes of the list of commands: their structs; [`Command`], [`Reply`] and [`Ask`], so that each
/// answer comes out as the type that is declared here; and [`ExecuteAll`], which names whom a new
/// command needs carried out by.
macro_rules! commands {
    (
        of sessions { $( $(#[$s_doc:meta])* $s:ident { $( $s_field:ident: $s_type:ty ),* } -> $s_answer:ty; )* }
        of the router { $( $(#[$r_doc:meta])* $r:ident { $( $r_field:ident: $r_type:ty ),* } -> $r_answer:ty; )* }
        of tests { $( $(#[$t_doc:meta])* $t:ident { $( $t_field:ident: $t_type:ty ),* } -> $t_answer:ty; )* }
    ) => {
        $( $(#[$s_doc])* pub(crate) struct $s { $( pub $s_field: $s_type ),* } )*
        $( $(#[$r_doc])* pub(crate) struct $r { $( pub $r_field: $r_type ),* } )*
        $( $(#[$t_doc])* #[cfg(test)] pub(crate) struct $t { $( pub $t_field: $t_type ),* } )*

        /// Command to the worker.
        pub(crate) enum Command {
            $( $s(Box<$s>), )*
            $( $r(Box<$r>), )*
            $( #[cfg(test)] $t(Box<$t>), )*
        }

        /// Answer of the worker: to a command of the same name, or to any of a session.
        #[allow(clippy::large_enum_variant, reason = "it lives for a moment")]
        pub(crate) enum Reply {
            /// Its session ends, or its time is over.
            Refused(VerbsError),
            $( $s(Result<$s_answer, VerbsError>), )*
            $( $r($r_answer), )*
            $( #[cfg(test)] $t($t_answer), )*
        }

        $( impl Ask for $s {
            type Answer = Result<$s_answer, VerbsError>;

            fn into_command(self) -> Command {
                Command::$s(Box::new(self))
            }

            fn answer_of(reply: Reply) -> Self::Answer {
                match reply {
                    Reply::$s(answer) => answer,
                    Reply::Refused(error) => Err(error),
                    _ => mismatched(stringify!($s)),
                }
            }
        } )*
        $( impl Ask for $r {
            type Answer = $r_answer;

            fn into_command(self) -> Command {
                Command::$r(Box::new(self))
            }

            fn answer_of(reply: Reply) -> Self::Answer {
                match reply {
                    Reply::$r(answer) => answer,
                    _ => mismatched(stringify!($r)),
                }
            }
        } )*
        $( #[cfg(test)] impl Ask for $t {
            type Answer = $t_answer;

            fn into_command(self) -> Command {
                Command::$t(Box::new(self))
            }

            fn answer_of(reply: Reply) -> Self::Answer {
                match reply {
                    Reply::$t(answer) => answer,
                    _ => mismatched(stringify!($t)),
                }
            }
        } )*

        /// Implementation of every command there is.
        pub(crate) trait ExecuteAll: $( Execute<$s> + )* $( Execute<$r> + )* TestExecute {}
        impl<E: $( Execute<$s> + )* $( Execute<$r> + )* TestExecute> ExecuteAll for E {}

        #[cfg(test)]
        pub(crate) trait TestExecute: $( Execute<$t> + )* {}
        #[cfg(test)]
        impl<E: $( Execute<$t> + )*> TestExecute for E {}
        #[cfg(not(test))]
        pub(crate) trait TestExecute {}
        #[cfg(not(test))]
        impl<E> TestExecute for E {}

        impl Command {
            pub fn execute(self, by: &mut impl ExecuteAll, now: Instant) -> Progress {
                match self {
                    $( Self::$s(command) => Progress::of(by.execute(now, *command), Reply::$s), )*
                    $( Self::$r(command) => Progress::of(by.execute(now, *command), Reply::$r), )*
                    $( #[cfg(test)] Self::$t(command) => Progress::of(by.execute(now, *command), Reply::$t), )*
                }
            }
        }

        impl Reply {
            /// Some limit left no room.
            pub fn is_shortage(&self) -> bool {
                match self {
                    $( Self::$s(answer) => matches!(answer, Err(VerbsError::NoMemory)), )*
                    _ => false,
                }
            }
        }

        /// Each with the type of its answer, for the list of them that is checked in.
        #[cfg(test)]
        pub(crate) const COMMANDS: &[(&str, &str, &str)] = &[
            $( ("session", stringify!($s), stringify!($s_answer)), )*
            $( ("router", stringify!($r), stringify!($r_answer)), )*
        ];
    };
}

/// A ticket is given to one command alone.
#[cold]
fn mismatched(command: &str) -> ! {
    unreachable!("{command} was answered as another command")
}

commands! {
    of sessions {
        /// A process has connected.
        CreateSession {
            vnic: VnicId, features: u64, segment: SessionSegment, kick: Arc<Doorbell>, memory: PageTable
        } -> SessionId;
        OpenContext { session: SessionId, write: OwnedFd } -> ContextId;
        CloseContext { session: SessionId, context: ContextId } -> DeferredDrop;
        CreateCompletionChannel { session: SessionId, write: OwnedFd } -> PipeId;
        DestroyCompletionChannel { pipe: PipeId } -> DeferredDrop;
        AllocPd { session: SessionId, context: ContextId } -> PdId;
        DeallocPd { session: SessionId, pd: PdId } -> ();
        /// A PD of one process is another's, too.
        SharePd { owner: SessionId, session: SessionId, pd: PdId } -> ();
        UnsharePd { session: SessionId, pd: PdId } -> ();
        CreateAh { session: SessionId, pd: PdId, attributes: AddressHandleAttributes } -> AhId;
        /// `posted`: how far `datagram_qps` were posted to, and where it is waited for; none before
        /// the first execution.
        DestroyAh { session: SessionId, ah: AhId, datagram_qps: Vec<QpId>, posted: Option<Vec<(QpId, u32)>> } -> ();
        OpenXrcd {
            session: SessionId, context: ContextId, file: Option<FileIdentity>, flags: XrcdOpenFlags
        } -> XrcdId;
        CloseXrcd { session: SessionId, xrcd: XrcdId } -> ();

        /// A process has mapped a whole segment, and none where it was mapped `before`; `None`: not possible there.
        MapSegment {
            session: SessionId, segment: Arc<Segment>, origin: Origin, address: u64, before: Option<u64>
        } -> Option<u64>;
        DestroySegment {
            session: SessionId, handle: Handle, segment: Arc<Segment>, mapped_at: Option<u64>
        } -> DeferredDrop;
        /// A process has mapped part of a segment in place of its own pages.
        MapPart {
            session: SessionId, segment: Arc<Segment>, origin: Origin, offset: u64, address: u64, length: u64
        } -> ();
        /// A process takes back the parts of segments between these addresses; `left` shrinks.
        UnmapParts { session: SessionId, left: Range<u64> } -> ();
        RegisterMr {
            session: SessionId, pd: PdId, address: u64, length: u64, iova: u64, access: Access
        } -> MrKeys;
        ReregisterMr { session: SessionId, mr: MrId, pd: Option<PdId>, change: RegionChange } -> MrKeys;
        DeregisterMr { session: SessionId, mr: MrId } -> ();
        AllocNullMr { session: SessionId, pd: PdId } -> MrKeys;
        AllocMw { session: SessionId, pd: PdId, kind: WindowKind } -> (MwId, u32);
        DeallocMw { session: SessionId, mw: MwId } -> ();

        CreateCq {
            session: SessionId, context: ContextId, cookie: u32, cqe: u32, ring: CompletionProducer,
            channel: Option<PipeId>, timestamps: bool
        } -> CqId;
        ResizeCq { cq: CqId, cqe: u32, segment: Arc<Segment> } -> Option<CompletionProducer>;
        ModerateCq { cq: CqId, count: u16, period: Duration } -> ();
        DestroyCq { session: SessionId, cq: CqId } -> DeferredDrop;
        CreateSrq {
            session: SessionId, context: ContextId, pd: PdId, cookie: u32, attributes: SrqAttributes,
            xrc: Option<(XrcdId, CqId)>, receive: RequestConsumer
        } -> (SrqId, u32, SrqAttributes);
        ModifySrq { session: SessionId, srq: SrqId, limit: u32 } -> ();
        QuerySrq { session: SessionId, srq: SrqId } -> SrqAttributes;
        DestroySrq { session: SessionId, srq: SrqId } -> DeferredDrop;

        /// With the changes that connection management makes to it at once; if one fails there is no QP.
        CreateQp { init: QpInit, qp: Qp, changes: Vec<Change> } -> (QpId, Qpn);
        /// An XRC target, which has no rings.
        CreateXrcTarget {
            session: SessionId, context: ContextId, init: QpInit, changes: Vec<Change>
        } -> (QpId, Qpn);
        OpenXrcTarget { session: SessionId, context: ContextId, xrcd: XrcdId, qpn: Qpn, cookie: u32 } -> QpId;
        ModifyQp { session: SessionId, qp: QpId, attributes: QpAttributes, mask: QpAttributeMask } -> QpState;
        /// A step of connection management, which goes with changes of a QP.
        StepQp { changes: QpChanges } -> QpState;
        QueryQp { session: SessionId, qp: QpId } -> QpAttributes;
        DestroyQp { session: SessionId, qp: QpId, cookie: u32 } -> DeferredDrop;
        AttachMulticast { session: SessionId, qp: QpId, group: Gid } -> ();
        DetachMulticast { session: SessionId, qp: QpId, group: Gid } -> ();

        /// A QP shall send past the router; `copy`: of the ring's memory, for the receiver.
        OpenDirectRing { qp: QpId, is_numbered: bool, copy: OwnedFd, charge: Charge } -> DirectRingTerms;
        AcceptDirectRing { qp: QpId } -> (DirectRingTerms, OwnedFd);
        OpenDatagramRing { qp: QpId, ring: DatagramRing, offered: OfferedMemory, charge: Charge } -> ();
        AcceptDatagramRing { qp: QpId } -> (IncomingTerms, OwnedFd);
        Grant { qp: QpId, request: GrantRequest } -> Verdict;
        /// From now on its process takes revoke commands.
        OpenRevokeCommands { session: SessionId, write: OwnedFd } -> ();
        ConfirmRevocation { session: SessionId, segment: Handle } -> ();
    }
    of the router {
        /// Nothing: its answer comes when all is done that was asked for before.
        Fence {} -> ();
        /// The same, said to a thread of the REST server.
        Probe { answer: ProbeAnswer } -> ();
        DestroySession { session: SessionId } -> DeferredDrop;
        /// A peer has agreed to a connection: on to RTS. False: the QP is as it was.
        PrepareQp { changes: QpChanges } -> bool;
        /// `place` gets its id.
        CreateVnic {
            vnic: NewVnic, shaping: Shaping, place: Arc<OnceLock<VnicId>>
        } -> Result<VnicId, VerbsError>;
        /// `None`: there was none to destroy.
        DestroyVnic { vnic: VnicName } -> Option<Box<DestroyedVnic>>;
        SetExternalGids { gids: Vec<(VnicId, Option<Gid>)> } -> ();
        SetVnicIdentity { network: NetworkId, gids: Vec<Gid>, identity: Arc<VnicIdentity> } -> ();
        /// A network with vNICs in another shard.
        NameNetwork { network: NetworkId, name: String } -> ();
        SetAccessRules { rules: Arc<Rules>, gone: Vec<NetworkId> } -> ();
        SetPolicy { policy: PolicyChanges } -> ();
        SetMode { mode: Mode } -> ();
        /// Updates from other hosts' routers; `backlog` is lowered by as many.
        UpdatePeers { updates: Vec<Update>, backlog: Arc<AtomicUsize> } -> ();
        /// A sealed host has a key that it will seal with. False: it is none.
        AcceptSealKey { host: HostId, id: u32, in_use: Option<u32>, secret: SealSecret } -> bool;
        /// A datagram of connection management, to a machine without FreeFlow.
        SendManagement { to: Gid, mad: Box<Mad>, backlog: Arc<AtomicUsize> } -> ();
        BeginCapture { sink: Box<dyn CaptureSink> } -> ();
        EndCapture {} -> ();
        /// False: there are no sockets.
        SetWireFaults { faults: Option<WireFaults> } -> bool;
        /// And whether there are more QPs than are on this page.
        ReadWireStatus { after_qpn: Option<u32> } -> (WireStatus, bool);
        ReadStatus { vnics: Vec<VnicId> } -> WorkerStatus;
        /// `counts_direct`: what went past the router is counted up to now first.
        ReadVnics { vnics: Vec<VnicId>, counts_direct: bool } -> Vec<VnicNumbers>;
        ListQps { vnic: Option<VnicId>, after_qpn: Option<u32> } -> QpPage;
        /// With QPs, those of the first vNIC from behind `after_qpn` on.
        MeterVnics {
            vnics: Vec<VnicId>, with_qps: bool, after_qpn: Option<u32>, counts_direct: bool
        } -> MeteredVnics;
        /// `rest`: QPs that were not looked at yet; none before the first execution.
        CountPaths { rest: Option<Vec<QpId>>, counts: BTreeMap<VnicId, PathCounts> } -> BTreeMap<VnicId, PathCounts>;
        MeterHost {} -> WorkerMeter;
        /// The worker ends.
        Stop {} -> ();
    }
    of tests {
        /// Shown the worker; asked again as often as it says so.
        Call { run: Box<dyn FnMut(&mut dyn std::any::Any, Instant) -> bool + Send> } -> ();
    }
}

/// Answered by the last of so many workers that executes a [`Probe`].
#[derive(Clone)]
pub(crate) struct ProbeAnswer(Arc<Mutex<(u8, Option<tokio::sync::oneshot::Sender<()>>)>>);

impl ProbeAnswer {
    pub fn new(answer: tokio::sync::oneshot::Sender<()>, worker_count: u8) -> Self {
        Self(Arc::new(Mutex::new((worker_count, Some(answer)))))
    }

    /// This worker has executed it. (Each comes once; none keeps the lock for longer than this.)
    pub fn give(self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, answer) = &mut *state;
        *left = left.saturating_sub(1);
        if *left == 0
            && let Some(answer) = answer.take()
        {
            // The thread that asked may have gone.
            let _ = answer.send(());
        }
    }
}

/// A vNIC as the worker needs it.
#[derive(Clone)]
pub(crate) struct NewVnic {
    pub network: NetworkId,
    pub network_name: String,
    pub gid: Gid,
    pub ipv6_gid: Option<Gid>,
    /// Its second GID, if it has one.
    pub external_gid: Option<Gid>,
    pub limits: VnicLimits,
    pub identity: Arc<VnicIdentity>,
    /// A virtual machine's: nothing of it goes past the router.
    pub is_guest: bool,
}

impl NewVnic {
    /// Those of its addresses.
    pub fn gids(&self) -> impl Iterator<Item = Gid> + use<> {
        std::iter::once(self.gid).chain(self.ipv6_gid)
    }
}

/// Changes of networks, tenants and vNICs.
#[derive(Clone, Debug, Default)]
pub(crate) struct PolicyChanges {
    pub data_paths: Vec<(NetworkId, DataPath)>,
    pub network_limits: Vec<(NetworkId, NetworkLimits)>,
    pub tenants: Vec<(TenantId, RateLimit)>,
    pub vnics: Vec<VnicPolicy>,
}

impl PolicyChanges {
    pub fn is_empty(&self) -> bool {
        self.data_paths.is_empty() && self.network_limits.is_empty() && self.tenants.is_empty() && self.vnics.is_empty()
    }
}
