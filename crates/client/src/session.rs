//! The process's connection to its router: handshake, control calls, liveness, doorbells.
use crate::commands::PendingCommands;
use crate::owned_objects::OwnedObjects;
use crate::passed::Passed;
use crate::regions::Regions;
use crate::registry::{Objects, Tag};
use crate::{fork, lock};
use freeflow_protocol::cm::{CmReply, CmRequest};
use freeflow_protocol::library::{Handle, Reply, Request, Welcome};
use freeflow_protocol::version::{Offer, VersionRange};
use freeflow_protocol::{FEATURE_PLACED_REPLIES, MESSAGE_BYTES_MAX, PROTOCOL, decode, encode};
use freeflow_shm::layout::{LAYOUT_VERSION, WAIT_YIELD};
use freeflow_shm::{
    Doorbell, OwnMapping, OwnMemory, SessionSegment, ShortWait, Undisturbed, coarse_ns, fd, membarrier, monotonic_ns,
};
use freeflow_verbs::{AddressHandleAttributes, DeviceAttributes, FileIdentity, Gid, VerbsError, XrcdOpenFlags};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;
use thiserror::Error;

/// Most vNICs of a container.
pub const VNIC_COUNT_MAX: usize = 8;
/// A vNIC's socket, in its directory.
const SOCKET: &str = "router.sock";
/// Environment variable that names the socket of the only vNIC.
const SOCKET_VARIABLE: &str = "FREEFLOW_SOCKET";
/// Descriptors that come with one reply at most.
const DESCRIPTORS_MAX: usize = 2;
/// A router that has not answered by then is stopped, or waits for something.
const PROMPT_ANSWER: Duration = Duration::from_secs(1);
/// A reply is looked for as long before the thread sleeps: a router that is awake answers sooner,
/// and then need not wake it.
const QUICK_ANSWER: Duration = Duration::from_micros(30);
/// How often empty polls look whether the router still lives.
const LIVENESS_INTERVAL_NS: u64 = 10_000_000;
/// A request that was carried out here counts only if the router was seen alive so shortly before
/// its end; the clock's own coarseness comes on top.
const SURELY_ALIVE_NS: u64 = 10_000_000;
/// So long after the end of the router was noticed no peer reaches memory of this process any more.
const PEERS_NOTICE_NS: u64 = 50_000_000;

/// How long a poller in a virtual machine sleeps before it looks again.
const GUEST_SLEEP: Duration = Duration::from_micros(20);

/// Layouts of the shared segments that this library maps.
const LAYOUTS: VersionRange = VersionRange::only(LAYOUT_VERSION);

/// Why a router that speaks this refused this library.
fn disagreement(protocol: &Offer, layouts: VersionRange) -> String {
    match PROTOCOL.agree(protocol) {
        Err(why) => why.to_string(),
        Ok(_) => format!("it makes layouts of {layouts}, this library maps {LAYOUTS}"),
    }
}

/// Counts the sessions of this process.
static SERIAL: AtomicU64 = AtomicU64::new(1);

/// Why there is no session.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// Nobody answers at the socket.
    #[error(
        "no router at {} ({error}): start one with `freeflow up` and run this program by `freeflow run` or in a \
         container with a freeflow device",
        path.display()
    )]
    NoRouter { path: PathBuf, error: io::Error },
    /// The router and this library have no version in common of the protocol or of the shared layouts.
    /// `why` names what each speaks.
    #[error(
        "the router at {} is of another version than this library ({why}): restart it with `freeflow up`, and start \
         this container again",
        path.display()
    )]
    Version { path: PathBuf, why: String },
    /// The router refused the session.
    #[error("the router at {} refused this process ({error}): see `freeflow status`", path.display())]
    Refused { path: PathBuf, error: VerbsError },
    /// The handshake broke off.
    #[error(
        "the router at {} broke off the handshake ({error}): see `freeflow status` and restart it with `freeflow up`",
        path.display()
    )]
    Broken { path: PathBuf, error: io::Error },
}

/// A queue pair whose direct ring may have messages.
pub(crate) trait NotificationListener: Send + Sync {
    /// There may be messages, or a new ring: the CQ that the messages complete to looks at its next
    /// poll.
    fn notify(&self);
}

/// Room for a reply, and how the waits for the last ones went.
pub(crate) struct Replies {
    buffer: Vec<u8>,
    wait: ShortWait,
}

/// A process's connection to its router.
pub struct Session {
    /// Of the router's socket.
    path: PathBuf,
    pub(crate) socket: OwnedFd,
    /// Held from a request to its reply, by a thread that is undisturbed: a signal handler that forks
    /// must not wait for the thread that it interrupted.
    pub(crate) control: Mutex<Replies>,
    /// Always there until drop.
    segment: Option<SessionSegment>,
    kick: Doorbell,
    welcome: Welcome,
    generation: u32,
    serial: u64,
    dead: AtomicBool,
    checked_at_ns: AtomicU64,
    /// When the router was last seen alive, by the coarse clock.
    alive_at_ns: AtomicU64,
    /// When its end was noticed.
    died_at_ns: AtomicU64,
    pub(crate) objects: Mutex<Objects>,
    /// Taken by undisturbed threads, as `control`.
    pub(crate) owned_objects: Mutex<OwnedObjects>,
    pub(crate) regions: Regions,
    /// Where datagrams by each address handle go.
    destinations: RwLock<HashMap<Handle, Gid>>,
    /// Given by who knows that the program keeps to the verbs. Without it all goes through the
    /// router.
    own_memory: OnceLock<OwnMemory>,
    /// The router is another kernel's: no futex reaches it, and all goes through it.
    pub(crate) is_in_guest: bool,
    pub(crate) pending_commands: Arc<OwnMapping<PendingCommands>>,
    /// A thread is delivering notifications.
    is_delivering: AtomicBool,
    /// Queue pairs with notifications of their direct rings, by cookie.
    pub(crate) listeners: Mutex<HashMap<u32, Weak<dyn NotificationListener>>>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("vnic", &self.welcome.vnic).finish_non_exhaustive()
    }
}

/// Where a container has the directory of its vNIC with this number: `/run/freeflow`, `/run/freeflow1`, …
pub fn vnic_directory(number: usize) -> PathBuf {
    match number {
        0 => PathBuf::from("/run/freeflow"),
        _ => PathBuf::from(format!("/run/freeflow{number}")),
    }
}

/// The path of the first vNIC's socket: `FREEFLOW_SOCKET`, else `/run/freeflow/router.sock`.
pub fn socket_path() -> PathBuf {
    asked_path().unwrap_or_else(|| vnic_directory(0).join(SOCKET))
}

fn asked_path() -> Option<PathBuf> {
    std::env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Whether a vNIC is mounted there. An empty folder is one that an image has kept of another container; who may not
/// read a folder may still use its vNIC.
fn has_vnic(directory: &Path) -> bool {
    match std::fs::read_dir(directory) {
        Ok(mut entries) => entries.next().is_some(),
        // Else it is there, and can't be looked into: by rights, or for want of descriptors.
        Err(error) => !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
    }
}

/// The sockets of all vNICs. Their numbers have no gaps.
fn socket_paths() -> Vec<PathBuf> {
    if let Some(path) = asked_path() {
        return vec![path];
    }
    let others = (1..VNIC_COUNT_MAX).map(vnic_directory).take_while(|directory| has_vnic(directory));
    std::iter::once(vnic_directory(0)).chain(others).map(|directory| directory.join(SOCKET)).collect()
}

/// The sessions of this process by their vNICs' numbers.
type Sessions = [Weak<Session>; VNIC_COUNT_MAX];

static CURRENT: Mutex<Sessions> = Mutex::new([const { Weak::new() }; VNIC_COUNT_MAX]);

impl Session {
    /// This process's session with its first vNIC; connects if there is none, none that lives, or
    /// [`socket_path`] is another one by now (what hangs on the older session stays as it is).
    pub fn current() -> Result<Arc<Self>, ConnectError> {
        Self::of_number(&mut lock(&CURRENT), 0, &socket_path())
    }

    /// The same with all vNICs of the container, with their numbers; and why one of them has none.
    pub fn all() -> (Vec<(usize, Arc<Self>)>, Option<ConnectError>) {
        let mut current = lock(&CURRENT);
        let (mut sessions, mut refused) = (Vec::new(), None);
        for (number, path) in socket_paths().into_iter().enumerate() {
            match Self::of_number(&mut current, number, &path) {
                Ok(session) => sessions.push((number, session)),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        (sessions, refused)
    }

    fn of_number(current: &mut Sessions, number: usize, path: &Path) -> Result<Arc<Self>, ConnectError> {
        if let Some(session) = current[number].upgrade() {
            if session.path == path && session.check() {
                return Ok(session);
            }
            if session.left_behind() {
                // Dropping it would unmap addresses that are no longer its own.
                std::mem::forget(session);
            }
        }
        let session = Arc::new(Self::connect(path)?);
        fork::set_control_descriptor(number, session.socket.as_raw_fd());
        current[number] = Arc::downgrade(&session);
        Ok(session)
    }

    /// Connects to the router that listens at `path`. Programs use [`Session::current`].
    pub fn connect(path: &Path) -> Result<Self, ConnectError> {
        let socket =
            fd::connect_seqpacket(path).map_err(|error| ConnectError::NoRouter { path: path.into(), error })?;
        let mut replies = Replies { buffer: Vec::with_capacity(MESSAGE_BYTES_MAX), wait: ShortWait::default() };
        let request = Request::Hello { protocol: PROTOCOL, layouts: LAYOUTS, program: program() };
        let version = |why| ConnectError::Version { path: path.into(), why };
        let broken = |error| ConnectError::Broken { path: path.into(), error };
        let undisturbed = Undisturbed::begin();
        let (reply, mut descriptors) = exchange(&socket, &mut replies, &request, &undisturbed).map_err(broken)?;
        drop(undisturbed);
        let welcome = match reply {
            Reply::Welcome(welcome) => welcome,
            Reply::Incompatible { protocol, layouts } => return Err(version(disagreement(&protocol, layouts))),
            Reply::Failed(error @ VerbsError::VersionMismatch) => return Err(version(error.to_string())),
            Reply::Failed(error) => return Err(ConnectError::Refused { path: path.into(), error }),
            _ => return Err(broken(io::ErrorKind::InvalidData.into())),
        };
        if !PROTOCOL.allows(welcome.protocol) || welcome.layout_version != LAYOUT_VERSION {
            return Err(version(format!("it chose {:?}, layout {}", welcome.protocol, welcome.layout_version)));
        }
        if descriptors.len() != 2 {
            return Err(broken(io::ErrorKind::InvalidData.into()));
        }
        let kick = descriptors.pop().map(|kick| Doorbell(kick.into()));
        let segment = descriptors.pop().map(|memory| SessionSegment::map(memory.as_fd(), memory.offset()));
        let (Some(kick), Some(segment)) = (kick, segment) else {
            return Err(broken(io::ErrorKind::InvalidData.into()));
        };
        // Without it locks cost more, and do the same.
        membarrier::register();
        Ok(Self {
            path: path.into(),
            socket,
            control: Mutex::new(replies),
            segment: Some(segment.map_err(broken)?),
            kick,
            is_in_guest: welcome.protocol.features & FEATURE_PLACED_REPLIES != 0,
            welcome,
            generation: fork::generation(),
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            dead: AtomicBool::new(false),
            checked_at_ns: AtomicU64::new(0),
            alive_at_ns: AtomicU64::new(0),
            died_at_ns: AtomicU64::new(0),
            objects: Mutex::new(Objects::new()),
            owned_objects: Mutex::default(),
            regions: Regions::default(),
            destinations: RwLock::default(),
            own_memory: OnceLock::new(),
            pending_commands: Arc::new(OwnMapping::new(PendingCommands::default()).map_err(broken)?),
            is_delivering: AtomicBool::new(false),
            listeners: Mutex::default(),
        })
    }

    /// Requests may be carried out here, without the router, from now on; in a virtual machine they are the router's.
    pub fn allow_direct(&self, own: OwnMemory) {
        if !self.is_in_guest {
            let _ = self.own_memory.set(own);
        }
    }

    #[inline]
    pub(crate) fn own_memory(&self) -> Option<OwnMemory> {
        self.own_memory.get().copied()
    }

    /// Delivers the notifications of direct rings to the CQs of their QPs.
    #[inline]
    pub(crate) fn deliver_notifications(&self) {
        // SeqCst; partner: the store in `deliver_notifications_now`. A thread that finds none may
        // not miss those that another thread just took.
        if let Some(segment) = &self.segment
            && (segment.has_notifications() || self.is_delivering.load(Ordering::SeqCst))
        {
            self.deliver_notifications_now(segment);
        }
    }

    #[cold]
    fn deliver_notifications_now(&self, segment: &SessionSegment) {
        let listeners = lock(&self.listeners);
        self.is_delivering.store(true, Ordering::SeqCst);
        segment.take_notifications(|cookie| {
            if let Some(listener) = listeners.get(&cookie).and_then(Weak::upgrade) {
                listener.notify();
            }
        });
        self.is_delivering.store(false, Ordering::SeqCst);
    }

    pub fn device(&self) -> &DeviceAttributes {
        &self.welcome.device
    }

    /// Whether the router understands a feature of the protocol, too.
    pub(crate) fn speaks(&self, feature: u64) -> bool {
        self.welcome.protocol.features & feature != 0
    }

    /// GID table of port 1.
    pub fn gids(&self) -> &[Gid] {
        &self.welcome.gids
    }

    /// No other session of this process has the same, before or after.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// The process forked, and this is the parent's session.
    #[inline]
    pub fn left_behind(&self) -> bool {
        self.generation != fork::generation()
    }

    /// Known to be of no use any more. Makes no system call.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.left_behind() || self.dead.load(Ordering::Acquire)
    }

    /// The router is known to be gone: its objects are gone with it.
    pub fn is_router_gone(&self) -> bool {
        !self.left_behind() && self.dead.load(Ordering::Acquire)
    }

    /// Looks whether the router still lives.
    pub fn check(&self) -> bool {
        if self.is_dead() {
            return false;
        }
        if fd::peer_closed(&self.socket) {
            self.mark_dead();
        }
        !self.is_dead()
    }

    /// As [`Self::check`], but at most once in ten milliseconds.
    pub(crate) fn check_sometimes(&self) -> bool {
        let now = monotonic_ns();
        // Relaxed: only a rate limit.
        if now.wrapping_sub(self.checked_at_ns.load(Ordering::Relaxed)) < LIVENESS_INTERVAL_NS {
            return !self.is_dead();
        }
        self.checked_at_ns.store(now, Ordering::Relaxed);
        self.check()
    }

    /// Whether the router lives, or has ended no more than some milliseconds ago: until then peers
    /// leave their memory as it is ([`Self::outlast_peers`]).
    #[inline]
    pub(crate) fn is_surely_alive(&self) -> bool {
        // Relaxed: the time is read before the look, so at worst it looks once too often.
        coarse_ns().wrapping_sub(self.alive_at_ns.load(Ordering::Relaxed)) < SURELY_ALIVE_NS && !self.is_dead()
            || self.look_alive()
    }

    #[cold]
    fn look_alive(&self) -> bool {
        let now_ns = coarse_ns();
        // A post does not report that it is dead: a request posted now is flushed, one posted later
        // would be refused.
        let is_alive = !self.is_dead() && !fd::peer_closed(&self.socket);
        if is_alive {
            self.alive_at_ns.store(now_ns, Ordering::Relaxed);
        }
        is_alive
    }

    /// After the end of the router: waits until no peer takes what it did in memory of this process
    /// for done any more. Then the memory may become something else.
    pub fn outlast_peers(&self) {
        if !self.is_router_gone() {
            return;
        }
        let until_ns = self.died_at_ns.load(Ordering::Relaxed).saturating_add(PEERS_NOTICE_NS);
        let left_ns = until_ns.saturating_sub(monotonic_ns());
        if left_ns > 0 {
            std::thread::sleep(std::time::Duration::from_nanos(left_ns));
        }
    }

    /// Says that the router is gone.
    pub(crate) fn mark_dead(&self) {
        let now_ns = monotonic_ns();
        // Relaxed, both: the first one counts; the store below brings it along.
        let _ = self.died_at_ns.compare_exchange(0, now_ns, Ordering::Relaxed, Ordering::Relaxed);
        // Release: pairs with the Acquire loads in `is_dead`.
        self.dead.store(true, Ordering::Release);
    }

    /// Fails if a verb of this session can't succeed.
    #[inline]
    pub(crate) fn live(&self) -> Result<(), VerbsError> {
        if self.is_dead() { Err(VerbsError::DeviceFatal) } else { Ok(()) }
    }

    /// Rings a queue's doorbell.
    #[inline]
    pub(crate) fn ring(&self, cookie: u32) {
        if let Some(segment) = &self.segment
            && segment.ring(cookie)
        {
            self.kick.kick();
        }
    }

    /// Whether pollers should give way to each other.
    #[inline]
    pub(crate) fn must_yield(&self) -> bool {
        self.segment.as_ref().is_some_and(|segment| segment.wait_policy() == WAIT_YIELD)
    }

    /// Counts the times at which the router brought completions, of whatever CQ.
    #[inline]
    pub(crate) fn completed(&self) -> u64 {
        self.segment.as_ref().map_or(0, SessionSegment::completed)
    }

    /// The router's worker has work, and waits for this very processor.
    #[inline]
    pub(crate) fn is_worker_here(&self) -> bool {
        // The guest's processors have other numbers.
        !self.is_in_guest
            && self.segment.as_ref().is_some_and(|segment| segment.is_worker_here(freeflow_shm::current_cpu()))
    }

    /// Sleeps until the router brings completions after those counted by `seen`, at most so long.
    pub(crate) fn sleep_while(&self, seen: u64, at_most_ns: u64) {
        match &self.segment {
            // The router's futex call wakes nobody here.
            Some(segment) if self.is_in_guest && segment.completed() == seen => {
                std::thread::sleep(GUEST_SLEEP.min(Duration::from_nanos(at_most_ns)));
            }
            Some(segment) if !self.is_in_guest => segment.sleep_while(seen, at_most_ns),
            _ => {}
        }
    }

    /// One control call. A failed exchange marks the session dead.
    pub(crate) fn call(&self, request: &Request) -> Result<(Reply, Vec<Passed>), VerbsError> {
        self.live()?;
        let undisturbed = Undisturbed::begin();
        let mut replies = lock(&self.control);
        match exchange(&self.socket, &mut replies, request, &undisturbed) {
            Ok((Reply::Failed(error), _)) => Err(error),
            Ok(answer) => {
                lock(&self.owned_objects).note(request, &answer.0);
                Ok(answer)
            }
            Err(_) => {
                self.mark_dead();
                Err(VerbsError::DeviceFatal)
            }
        }
    }

    /// Passes a request of the drop-in `librdmacm` to the router, which is the connection manager.
    pub(crate) fn connection_call(&self, request: CmRequest) -> Result<(Option<CmReply>, Vec<Passed>), VerbsError> {
        match self.call(&Request::Cm(request))? {
            (Reply::Cm(reply), descriptors) => Ok((Some(reply), descriptors)),
            (Reply::Done, descriptors) => Ok((None, descriptors)),
            _ => Err(self.nonsense()),
        }
    }

    /// A call whose answer is `Done`.
    pub(crate) fn command(&self, request: &Request) -> Result<(), VerbsError> {
        match self.call(request)? {
            (Reply::Done, _) => Ok(()),
            _ => Err(self.nonsense()),
        }
    }

    /// A call that destroys something: what belonged to a router that is gone is destroyed already.
    pub(crate) fn destroy(&self, request: &Request) -> Result<(), VerbsError> {
        match self.command(request) {
            Err(VerbsError::DeviceFatal) if self.is_router_gone() => Ok(()),
            outcome => outcome,
        }
    }

    /// Closes a context and destroys what the program left in it.
    pub(crate) fn close_context(&self, context: Handle) -> Result<(), VerbsError> {
        let close = Request::CloseContext { context };
        let outcome = match self.destroy(&close) {
            Err(VerbsError::Busy) => {
                self.destroy_owned_objects(context);
                self.destroy(&close)
            }
            outcome => outcome,
        };
        if outcome.is_ok() {
            // Device memory keeps no context from closing.
            self.destroy_owned_objects(context);
        }
        outcome
    }

    /// An object that can't go keeps the context from closing; the caller gets its error.
    fn destroy_owned_objects(&self, context: Handle) {
        let removal_requests = {
            let _undisturbed = Undisturbed::begin();
            lock(&self.owned_objects).removal_requests(context)
        };
        for request in &removal_requests {
            if let Request::DeregisterMr { mr } = request {
                self.regions.remove(*mr);
            }
            let _ = self.destroy(request);
        }
    }

    /// The router answered something else than was asked: nothing it says can be relied on.
    pub(crate) fn nonsense(&self) -> VerbsError {
        self.mark_dead();
        VerbsError::DeviceFatal
    }

    pub fn create_address_handle(
        &self,
        pd: Handle,
        attributes: &AddressHandleAttributes,
    ) -> Result<Handle, VerbsError> {
        match self.call(&Request::CreateAh { pd, attributes: *attributes })? {
            (Reply::AddressHandle { ah }, _) => {
                self.note_destination(ah, attributes.grh.map(|route| route.dgid));
                Ok(ah)
            }
            _ => Err(self.nonsense()),
        }
    }

    pub fn destroy_address_handle(&self, ah: Handle) -> Result<(), VerbsError> {
        // Before, because another thread may get the same handle after.
        let before = self.note_destination(ah, None);
        self.destroy(&Request::DestroyAh { ah }).inspect_err(|_| {
            self.note_destination(ah, before);
        })
    }

    fn note_destination(&self, ah: Handle, to: Option<Gid>) -> Option<Gid> {
        let mut destinations = self.destinations.write().unwrap_or_else(PoisonError::into_inner);
        match to {
            Some(to) => destinations.insert(ah, to),
            None => destinations.remove(&ah),
        }
    }

    /// Where datagrams by an address handle go.
    pub(crate) fn destination(&self, ah: Handle) -> Option<Gid> {
        self.destinations.read().unwrap_or_else(PoisonError::into_inner).get(&ah).copied()
    }

    /// Opens an XRC domain: that of `file` within this vNIC, or a nameless one.
    ///
    /// # Errors
    /// NotFound: there is none, and `create` is not set. Exists: there is one, and `exclusive` is
    /// set.
    pub fn open_xrc_domain(
        &self,
        context: Handle,
        file: Option<FileIdentity>,
        flags: XrcdOpenFlags,
    ) -> Result<Handle, VerbsError> {
        match self.call(&Request::OpenXrcd { context, file, flags })? {
            (Reply::Xrcd { xrcd }, _) => Ok(xrcd),
            _ => Err(self.nonsense()),
        }
    }

    /// Refused with Busy while SRQs or QPs of this process are in it.
    pub fn close_xrc_domain(&self, xrcd: Handle) -> Result<(), VerbsError> {
        self.destroy(&Request::CloseXrcd { xrcd })
    }

    /// Runs `deliver` with the tag of the CQ of that cookie, if it still exists; it can't be
    /// destroyed meanwhile.
    pub(crate) fn deliver_cq(&self, cookie: u32, deliver: &mut dyn FnMut(Tag)) -> bool {
        lock(&self.objects).cqs.get(cookie).filter(|entry| entry.tag != 0).map(|entry| deliver(entry.tag)).is_some()
    }

    /// The same for a QP or SRQ.
    pub(crate) fn deliver_queue(&self, cookie: u32, deliver: &mut dyn FnMut(Tag)) -> bool {
        lock(&self.objects).queues.get(cookie).filter(|entry| entry.tag != 0).map(|entry| deliver(entry.tag)).is_some()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        fork::clear_control_descriptor(self.socket.as_raw_fd());
        if self.left_behind() {
            // Not mapped in this process: its addresses may belong to something else by now.
            std::mem::forget(self.segment.take());
        }
    }
}

/// Sends a request and waits for its reply.
fn exchange(
    socket: &OwnedFd,
    replies: &mut Replies,
    request: &Request,
    undisturbed: &Undisturbed,
) -> io::Result<(Reply, Vec<Passed>)> {
    exchange_bytes(socket, replies, &encode(request), undisturbed)
}

/// The same with a request that was encoded before. Allocates nothing if the reply brings nothing
/// but `Done` or an error.
pub(crate) fn exchange_bytes(
    socket: &OwnedFd,
    replies: &mut Replies,
    request: &[u8],
    undisturbed: &Undisturbed,
) -> io::Result<(Reply, Vec<Passed>)> {
    fd::send_message(socket, request, &[])?;
    let Replies { buffer, wait } = replies;
    if buffer.len() < MESSAGE_BYTES_MAX {
        buffer.resize(MESSAGE_BYTES_MAX, 0);
    }
    let received = match wait.look(QUICK_ANSWER, || fd::receive_now(socket, buffer, DESCRIPTORS_MAX)) {
        Some(received) => received,
        None => {
            // As long as the router has its socket open: one that is stopped, or waits for its disk,
            // answers when it goes on.
            if !fd::readable_within(socket, PROMPT_ANSWER) {
                undisturbed.admit_unhandled();
            }
            wait.note_woken(QUICK_ANSWER);
            fd::receive_into(socket, buffer, DESCRIPTORS_MAX)
        }
    };
    let (bytes, descriptors) = received?;
    if bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let reply = buffer.get(..bytes).and_then(|message| decode(message).ok());
    // Memory comes first.
    let (reply, offset) = match reply.ok_or(io::ErrorKind::InvalidData)? {
        Reply::Placed { offset, reply } => (decode(&reply).map_err(|_| io::ErrorKind::InvalidData)?, offset),
        reply => (reply, 0),
    };
    Ok((reply, descriptors.into_iter().map(|descriptor| Passed::new(descriptor, offset)).collect()))
}

/// Name of the process, for the router's records.
fn program() -> String {
    std::fs::read_to_string("/proc/self/comm").map(|name| name.trim_end().to_owned()).unwrap_or_default()
}
