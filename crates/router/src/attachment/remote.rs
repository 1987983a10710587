//! The vNIC's processes are reached by another process, its *near half*, over a stream
//! ([`freeflow_protocol::attachment`]).
//!
//! One thread of the vNIC (`ff-attachment`) has the stream; all others leave messages for it and
//! never wait for the near half, but for a slow-path copier, which waits for its answer. Events come
//! out of a pair of sockets of the router's own, so that the worker writes them as it does without
//! a near half; the thread takes the next one of a channel when the near half has passed on the
//! last.
//!
//! Invariant: whatever the near half sends, leaves out or keeps from reading ends this vNIC's
//! stream at most. An answer that is longer than [`ANSWER_TIME_MAX`] in coming ends it, and
//! so does one that nobody asked for.
use crate::admission::account::Charge;
use crate::attachment::borrow::{BorrowAnswer, Borrowing};
use crate::attachment::relay::Relays;
use crate::attachment::{AttachedProcess, Attachment, Found, Peer};
use crate::base::privileges::{self, ThreadKind};
use crate::memory::freezer::{self, FreezeCommand};
use crate::memory::slow_path::TenantMemory;
use freeflow_protocol::attachment::{ACCESS_BYTES_MAX, Answer, Report, Request};
use freeflow_protocol::{MESSAGE_BYTES_MAX, decode, encode};
use freeflow_shm::fd::event_sockets;
use freeflow_shm::{Doorbell, Segment, fd};
use freeflow_verbs::{AtomicOperation, VerbsError};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A request without an answer by then fails the vNIC.
pub const ANSWER_TIME_MAX: Duration = Duration::from_secs(2);
/// Messages that may wait for a near half that does not read: more than an honest vNIC's processes can cause.
const OUTGOING_COUNT_MAX: usize = 16_384;
const EVENT_COUNT: usize = 64;
/// The router stood still, rather than the near half, if the thread wakes so much later than it wanted.
const PAUSE_MIN: Duration = Duration::from_millis(200);
/// Not the numbers of channels.
const STREAM: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

type Outcome = Result<Answer, VerbsError>;
type Then = Box<dyn FnOnce(Outcome) + Send>;
/// Why a stream has ended.
type Reason = &'static str;

const DETACHED: Reason = "the vNIC is detached";
const MALFORMED: Reason = "its near half sends what no near half sends";

struct Waiting {
    deadline: Instant,
    then: Then,
}

#[derive(Default)]
struct State {
    /// The last number that was given.
    last: u64,
    outgoing: VecDeque<(Vec<u8>, Option<OwnedFd>)>,
    waiting: BTreeMap<u64, Waiting>,
    /// Doorbells of processes that are not forgotten; rung when the process ends.
    ends: BTreeMap<u64, Arc<Doorbell>>,
    /// New channels, and the ends that their events come out of.
    opened: Vec<(u64, OwnedFd)>,
    over: Option<Reason>,
}

impl State {
    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn post(&mut self, request: &Request, descriptor: Option<OwnedFd>) {
        if self.outgoing.len() >= OUTGOING_COUNT_MAX {
            self.over.get_or_insert("its near half does not read");
        } else if self.over.is_none() {
            self.outgoing.push_back((encode(request), descriptor));
        }
    }
}

/// State of a stream, for all threads. Nobody waits with the lock held.
struct Shared {
    state: Mutex<State>,
    wake: Doorbell,
    answer_time_max: Duration,
    /// Where bytes of an access lie, if they don't travel in messages. Held for one access.
    staging: Option<Mutex<Segment>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, request: &Request, descriptor: Option<OwnedFd>) {
        self.lock().post(request, descriptor);
        self.wake.kick();
    }

    fn number(&self) -> u64 {
        self.lock().number()
    }

    /// `then` is called once, by the stream's thread unless the stream is over already.
    fn ask(&self, number: u64, request: &Request, descriptor: Option<OwnedFd>, then: Then) {
        let mut state = self.lock();
        if state.over.is_some() {
            drop(state);
            return then(Err(VerbsError::DeviceFatal));
        }
        state.post(request, descriptor);
        state.waiting.insert(number, Waiting { deadline: Instant::now() + self.answer_time_max, then });
        drop(state);
        self.wake.kick();
    }

    /// Waits for the answer: for a slow-path copier.
    fn wait(&self, request: impl FnOnce(u64) -> Request) -> io::Result<Answer> {
        let (sender, answer) = channel();
        let number = self.number();
        self.ask(number, &request(number), None, Box::new(move |outcome| drop(sender.send(outcome))));
        match answer.recv() {
            Ok(outcome) => outcome.map_err(io::Error::other),
            Err(_) => Err(io::Error::other("the thread of the stream has ended")),
        }
    }

    /// The same where the answer says no more than that it is done.
    fn wait_done(&self, request: impl FnOnce(u64) -> Request) -> io::Result<()> {
        match self.wait(request)? {
            Answer::Done => Ok(()),
            _ => Err(self.malformed()),
        }
    }

    fn end(&self, reason: Reason) {
        self.lock().over.get_or_insert(reason);
        self.wake.kick();
    }

    fn malformed(&self) -> io::Error {
        self.end(MALFORMED);
        io::Error::other(MALFORMED)
    }
}

/// A vNIC with a near half. Dropping it ends the stream.
pub struct Remote(Arc<Shared>);

impl Remote {
    /// `ended` is called once if the stream ends by itself.
    ///
    /// # Errors
    /// No thread or descriptor is to be had.
    pub fn start(
        stream: OwnedFd,
        answer_time_max: Duration,
        ended: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_with(stream, answer_time_max, None, ended)
    }

    /// The same where both sides have mapped `staging`: bytes of accesses to memory lie there.
    ///
    /// # Errors
    /// No thread or descriptor is to be had.
    pub fn start_staged(
        stream: OwnedFd,
        answer_time_max: Duration,
        staging: Segment,
        ended: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_with(stream, answer_time_max, Some(Mutex::new(staging)), ended)
    }

    fn start_with(
        stream: OwnedFd,
        answer_time_max: Duration,
        staging: Option<Mutex<Segment>>,
        ended: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        fd::set_nonblocking(&stream, true)?;
        let shared = Arc::new(Shared { state: Mutex::default(), wake: Doorbell::new()?, answer_time_max, staging });
        let mut thread = Thread::new(shared.clone(), stream)?;
        let body = move || {
            privileges::enter(ThreadKind::Attachment);
            freeflow_shm::prefer_short_slices();
            let reason = thread.serve();
            thread.finish(reason);
            if reason != DETACHED {
                ended();
            }
        };
        std::thread::Builder::new().name(ThreadKind::Attachment.name().into()).stack_size(256 * 1024).spawn(body)?;
        Ok(Self(shared))
    }

    /// Has the process looked at that has connected to a guest agent, by the connection's number there. False: there
    /// is no descriptor to be had.
    pub fn identify_connection(&self, connection: u64, charge: Arc<Charge>, found: Found) -> bool {
        self.identify_by(charge, found, None, |request| Request::IdentifyConnection { request, connection }).is_ok()
    }

    fn identify_by(
        &self,
        charge: Arc<Charge>,
        found: Found,
        pidfd: Option<OwnedFd>,
        request_of: impl FnOnce(u64) -> Request,
    ) -> Result<(), (Arc<Charge>, Found, Option<OwnedFd>)> {
        let Ok(end) = Doorbell::new() else { return Err((charge, found, pidfd)) };
        let end = Arc::new(end);
        let request = self.0.number();
        self.0.lock().ends.insert(request, end.clone());
        // Dropped, it is forgotten, whatever comes of it.
        let name = Name { id: request, shared: self.0.clone() };
        let then = move |outcome| {
            found(match outcome {
                Ok(Answer::Done) => Ok(Box::new(RemoteProcess { name: Arc::new(name), end, _charge: charge })),
                Ok(_) => Err(name.shared.malformed()),
                Err(error) => Err(io::Error::other(error)),
            });
        };
        self.0.ask(request, &request_of(request), pidfd, Box::new(then));
        Ok(())
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.0.end(DETACHED);
    }
}

impl Attachment for Remote {
    fn identify(&self, peer: Peer, found: Found) -> Result<(), Box<dyn Any + Send>> {
        let Peer { credentials, pidfd, charge } = peer;
        let fd::PeerCredentials { pid, uid, gid } = credentials;
        let request_of = |request| Request::Identify { request, pid, uid, gid };
        self.identify_by(charge, found, Some(pidfd), request_of).map_err(|held| Box::new(held) as Box<dyn Any + Send>)
    }

    fn event_channel(&self, bytes: usize) -> io::Result<(OwnedFd, OwnedFd)> {
        // Half waits on either side of the stream.
        let (read, theirs) = event_sockets(bytes / 2)?;
        let (relayed, write) = event_sockets(bytes / 2)?;
        let mut state = self.0.lock();
        if let Some(reason) = state.over {
            return Err(io::Error::other(reason));
        }
        let channel = state.number();
        state.post(&Request::OpenEventChannel { channel }, Some(theirs));
        state.opened.push((channel, relayed));
        drop(state);
        self.0.wake.kick();
        Ok((read, write))
    }

    fn take_waiting(&self) -> Box<dyn Any + Send> {
        self.0.end(DETACHED);
        Box::new(())
    }

    fn ended(&self) -> Option<Reason> {
        self.0.lock().over
    }
}

/// The number of a process. Dropping it tells the near half that nothing of the process is wanted any more.
struct Name {
    id: u64,
    shared: Arc<Shared>,
}

impl Drop for Name {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ends.remove(&self.id);
        state.post(&Request::Forget { process: self.id }, None);
        drop(state);
        self.shared.wake.kick();
    }
}

struct RemoteProcess {
    name: Arc<Name>,
    end: Arc<Doorbell>,
    _charge: Arc<Charge>,
}

impl AttachedProcess for RemoteProcess {
    fn end(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    fn memory(&self) -> Arc<dyn TenantMemory> {
        Arc::new(RemoteMemory(self.name.clone()))
    }

    fn freeze(&self, command: FreezeCommand, answer: freezer::Answer) {
        let Name { id: process, shared } = &*self.name;
        let (process, request, own) = (*process, shared.number(), shared.clone());
        let message = match command {
            FreezeCommand::Freeze { thread, quiesce } => Request::Freeze { request, process, thread, quiesce },
            FreezeCommand::Thaw => Request::Thaw { request, process },
        };
        let then = move |outcome| {
            answer(match outcome {
                Ok(Answer::Done) => Ok(()),
                Ok(_) => {
                    own.end(MALFORMED);
                    Err(VerbsError::DeviceFatal)
                }
                Err(error) => Err(error),
            });
        };
        shared.ask(request, &message, None, Box::new(then));
    }

    fn borrow(&self, _: Borrowing, answer: BorrowAnswer) {
        // Its near half would have to hand over the descriptor: such memory stays on the slow path.
        answer(Err(VerbsError::NotSupported));
    }

    fn let_go(&self) {
        self.name.shared.post(&Request::LetGo { process: self.name.id }, None);
    }
}

/// A process' memory, a message for each [`ACCESS_BYTES_MAX`], or for as much as is staged at a time.
struct RemoteMemory(Arc<Name>);

impl TenantMemory for RemoteMemory {
    fn read(&self, into: &mut [u8], address: u64) -> io::Result<()> {
        let Name { id: process, shared } = &*self.0;
        let process = *process;
        if let Some(staging) = &shared.staging {
            let staging = staging.lock().unwrap_or_else(PoisonError::into_inner);
            let size = staging.bytes();
            for (at, piece) in into.chunks_mut(size).enumerate() {
                let (address, length) = (offset(address, at, size)?, piece.len() as u32);
                shared.wait_done(|request| Request::ReadStaged { request, process, address, length })?;
                staging.read(0, piece).map_err(io::Error::other)?;
                if staging.poisoned() {
                    return Err(io::Error::other("the shared-memory device was truncated"));
                }
            }
            return Ok(());
        }
        for (at, piece) in into.chunks_mut(ACCESS_BYTES_MAX).enumerate() {
            let (address, length) = (offset(address, at, ACCESS_BYTES_MAX)?, piece.len() as u32);
            match shared.wait(|request| Request::Read { request, process, address, length })? {
                Answer::Bytes(bytes) if bytes.len() == piece.len() => piece.copy_from_slice(&bytes),
                _ => return Err(shared.malformed()),
            }
        }
        Ok(())
    }

    fn write(&self, from: &[u8], address: u64) -> io::Result<()> {
        let Name { id: process, shared } = &*self.0;
        let process = *process;
        if let Some(staging) = &shared.staging {
            let staging = staging.lock().unwrap_or_else(PoisonError::into_inner);
            let size = staging.bytes();
            for (at, piece) in from.chunks(size).enumerate() {
                let (address, length) = (offset(address, at, size)?, piece.len() as u32);
                staging.write(0, piece, false).map_err(io::Error::other)?;
                shared.wait_done(|request| Request::WriteStaged { request, process, address, length })?;
            }
            return Ok(());
        }
        for (at, piece) in from.chunks(ACCESS_BYTES_MAX).enumerate() {
            let (address, bytes) = (offset(address, at, ACCESS_BYTES_MAX)?, piece.to_vec());
            shared.wait_done(|request| Request::Write { request, process, address, bytes })?;
        }
        Ok(())
    }

    fn atomic(&self, address: u64, operation: AtomicOperation) -> io::Result<u64> {
        let Name { id: process, shared } = &*self.0;
        let process = *process;
        match shared.wait(|request| Request::Atomic { request, process, address, operation })? {
            Answer::Value(before) => Ok(before),
            _ => Err(shared.malformed()),
        }
    }
}

/// The address of the piece with this number.
fn offset(address: u64, piece: usize, piece_bytes: usize) -> io::Result<u64> {
    let beyond = || io::Error::other("beyond the address space");
    address.checked_add((piece * piece_bytes) as u64).ok_or_else(beyond)
}

/// State of a stream's thread.
struct Thread {
    shared: Arc<Shared>,
    stream: OwnedFd,
    epoll: Arc<OwnedFd>,
    relays: Relays,
    buffer: Vec<u8>,
    /// epoll also tells when the near half reads again.
    is_full: bool,
}

impl Thread {
    fn new(shared: Arc<Shared>, stream: OwnedFd) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        epoll::add(&*epoll, &stream, epoll::EventData::new_u64(STREAM), epoll::EventFlags::IN)?;
        epoll::add(&*epoll, &shared.wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let (relays, buffer) = (Relays::new(epoll.clone()), vec![0; MESSAGE_BYTES_MAX]);
        Ok(Self { shared, stream, epoll, relays, buffer, is_full: false })
    }

    /// Until the stream is over.
    fn serve(&mut self) -> Reason {
        let mut events = Vec::with_capacity(EVENT_COUNT);
        loop {
            if let Err(reason) = self.send() {
                return reason;
            }
            if let Some(reason) = self.shared.lock().over {
                return reason;
            }
            self.wait(&mut events);
            for event in events.drain(..) {
                let served = match event.data.u64() {
                    STREAM => self.receive(),
                    WAKE => {
                        self.shared.wake.drain();
                        Ok(())
                    }
                    channel => {
                        self.relay(channel);
                        Ok(())
                    }
                };
                if let Err(reason) = served {
                    return reason;
                }
            }
            if self.is_late() {
                return "its near half does not answer";
            }
        }
    }

    /// Waits for what there is to do, or until an answer is late.
    fn wait(&mut self, events: &mut Vec<epoll::Event>) {
        let first = self.shared.lock().waiting.values().next().map(|waiting| waiting.deadline);
        let left = first.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // A millisecond more, so that the deadline has passed then.
        let timeout = left.map(|left| left + Duration::from_millis(1));
        let timespec = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let began = Instant::now();
        let _ = epoll::wait(&*self.epoll, rustix::buffer::spare_capacity(events), timespec.as_ref());
        let late = began.elapsed().saturating_sub(timeout.unwrap_or(Duration::MAX));
        if late > PAUSE_MIN {
            for waiting in self.shared.lock().waiting.values_mut() {
                waiting.deadline += late;
            }
        }
    }

    fn is_late(&self) -> bool {
        let now = Instant::now();
        self.shared.lock().waiting.values().next().is_some_and(|waiting| waiting.deadline <= now)
    }

    /// Sends what is left for the near half, and takes new channels. Errors: the stream is over.
    fn send(&mut self) -> Result<(), Reason> {
        loop {
            let mut state = self.shared.lock();
            let opened = std::mem::take(&mut state.opened);
            let next = state.outgoing.pop_front();
            drop(state);
            for (channel, relayed) in opened {
                self.relays.insert(channel, relayed);
            }
            let Some((bytes, descriptor)) = next else { return self.want_room(false) };
            let descriptors: Vec<BorrowedFd<'_>> = descriptor.iter().map(AsFd::as_fd).collect();
            match fd::send_message(&self.stream, &bytes, &descriptors) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.shared.lock().outgoing.push_front((bytes, descriptor));
                    return self.want_room(true);
                }
                Err(_) => return Err("its near half has ended"),
            }
        }
    }

    fn want_room(&mut self, is_full: bool) -> Result<(), Reason> {
        if std::mem::replace(&mut self.is_full, is_full) == is_full {
            return Ok(());
        }
        let flags = if is_full { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
        let data = epoll::EventData::new_u64(STREAM);
        epoll::modify(&*self.epoll, &self.stream, data, flags).map_err(|_| "its stream can't be watched")
    }

    /// Takes what the near half has sent. Errors: the stream is over.
    fn receive(&mut self) -> Result<(), Reason> {
        loop {
            // Bytes only: descriptors are closed unseen.
            let bytes = match fd::receive_into(&self.stream, &mut self.buffer, 0) {
                Ok((0, _)) => return Err("its near half has ended"),
                Ok((bytes, _)) => bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.raw_os_error() == Some(Errno::CONNRESET.raw_os_error()) => {
                    return Err("its near half has ended");
                }
                Err(_) => return Err(MALFORMED),
            };
            match decode(&self.buffer[..bytes]).map_err(|_| MALFORMED)? {
                Report::Done { request, outcome } => {
                    let waiting = self.shared.lock().waiting.remove(&request).ok_or(MALFORMED)?;
                    (waiting.then)(outcome);
                }
                Report::ProcessEnded { process } => {
                    // It may have been forgotten meanwhile.
                    if let Some(end) = self.shared.lock().ends.get(&process) {
                        end.kick();
                    }
                }
                Report::EventTaken { channel } => {
                    if !self.relays.note_taken(channel) {
                        return Err(MALFORMED);
                    }
                    self.relay(channel);
                }
                Report::ChannelClosed { channel } => self.relays.remove(channel),
            }
        }
    }

    /// Passes on the next event of a channel, if there is one and the last one was taken.
    fn relay(&mut self, channel: u64) {
        if let Some(request) = self.relays.next(channel) {
            self.shared.lock().post(&request, None);
        }
    }

    /// Nobody waits any more.
    fn finish(&mut self, reason: Reason) {
        let mut state = self.shared.lock();
        state.over.get_or_insert(reason);
        let waiting = std::mem::take(&mut state.waiting);
        let left = (std::mem::take(&mut state.outgoing), std::mem::take(&mut state.opened));
        drop(state);
        drop(left);
        for waiting in waiting.into_values() {
            (waiting.then)(Err(VerbsError::DeviceFatal));
        }
    }
}
