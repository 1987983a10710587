//! The near half of a vNIC: does for a router, over a stream, what [`Local`] does in one.
//!
//! A thread of the vNIC (`ff-near`) has the stream and what it watches; accesses to memory are one
//! thread's, one after the other; what looks at processes and stops threads are [`Local`]'s own. So
//! a process that blocks an access blocks nothing but the router's wait for it.
//!
//! The router is trusted; one that sends nonsense is not understood, and the stream ends.
use crate::admission::account::{Account, Charge};
use crate::attachment::local::Local;
use crate::attachment::{AttachedProcess, Attachment, Peer};
use crate::base::deferred_drop::Closer;
use crate::base::privileges::{self, ThreadKind};
use crate::memory::freezer::FreezeCommand;
use crate::memory::slow_path::TenantMemory;
use freeflow_protocol::attachment::{ACCESS_BYTES_MAX, Answer, Report, Request};
use freeflow_protocol::{MESSAGE_BYTES_MAX, decode, encode};
use freeflow_shm::fd::{self, PeerCredentials, send_record};
use freeflow_shm::{Doorbell, Segment};
use freeflow_verbs::{AtomicOperation, VerbsError};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const EVENT_COUNT: usize = 64;
const STREAM: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;
/// Beside its number, in what epoll says of a process.
const PROCESS: u64 = 1 << 62;
/// The router counts connections.
const CONNECTION_COUNT_MAX: u64 = u64::MAX;

type Outcome = Result<Answer, VerbsError>;

/// The way back to the router, from any thread.
#[derive(Clone)]
struct Router(Arc<OwnedFd>);

impl Router {
    /// Waits for room, which the router always makes. A router that is gone hears nothing. By `write`,
    /// which all kinds of threads may call.
    fn report(&self, report: &Report) {
        let _ = rustix::io::retry_on_intr(|| rustix::io::write(&*self.0, &encode(report)));
    }

    fn answer(&self, request: u64, outcome: Outcome) {
        self.report(&Report::Done { request, outcome });
    }
}

type Process = Arc<dyn AttachedProcess>;

/// Result of identifying a process, by the number that the router gave it.
type Looked = (u64, io::Result<Box<dyn AttachedProcess>>);

/// From the threads that look at processes to the stream's, which watches them.
struct Found {
    found: Mutex<Vec<Looked>>,
    wake: Doorbell,
}

impl Found {
    fn lock(&self) -> MutexGuard<'_, Vec<Looked>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An access to memory, for the thread that does them.
struct Access {
    request: u64,
    memory: Arc<dyn TenantMemory>,
    address: u64,
    kind: AccessKind,
}

enum AccessKind {
    Read { length: u32 },
    ReadStaged { length: u32 },
    WriteStaged { length: u32 },
    Write { bytes: Vec<u8> },
    Atomic(AtomicOperation),
}

impl Access {
    fn perform(&self, staging: Option<&Segment>) -> io::Result<Answer> {
        match &self.kind {
            AccessKind::Read { length } => {
                let mut bytes = vec![0; (*length as usize).min(ACCESS_BYTES_MAX)];
                self.memory.read(&mut bytes, self.address)?;
                Ok(Answer::Bytes(bytes))
            }
            AccessKind::ReadStaged { length } => {
                let (staging, mut bytes) = staged(staging, *length)?;
                self.memory.read(&mut bytes, self.address)?;
                staging.write(0, &bytes, false).map_err(io::Error::other)?;
                Ok(Answer::Done)
            }
            AccessKind::WriteStaged { length } => {
                let (staging, mut bytes) = staged(staging, *length)?;
                staging.read(0, &mut bytes).map_err(io::Error::other)?;
                self.memory.write(&bytes, self.address).map(|()| Answer::Done)
            }
            AccessKind::Write { bytes } => self.memory.write(bytes, self.address).map(|()| Answer::Done),
            AccessKind::Atomic(operation) => self.memory.atomic(self.address, *operation).map(Answer::Value),
        }
    }
}

/// The staging area, and room for so many of its bytes.
fn staged(staging: Option<&Segment>, length: u32) -> io::Result<(&Segment, Vec<u8>)> {
    let staging = staging.filter(|staging| length as usize <= staging.bytes());
    let staging = staging.ok_or_else(|| io::Error::other("more bytes than can be staged"))?;
    Ok((staging, vec![0; length as usize]))
}

fn access(accesses: &Receiver<Access>, router: &Router, staging: Option<&Segment>) {
    while let Ok(access) = accesses.recv() {
        let outcome = access.perform(staging).map_err(|_| VerbsError::InvalidArgument);
        router.answer(access.request, outcome);
    }
}

/// An event channel of a library.
struct Channel {
    write: OwnedFd,
    /// Bytes for which its reader has made no room.
    owed: Option<Vec<u8>>,
}

struct Near {
    router: Router,
    local: Local,
    /// Memory that the connections hold.
    account: Arc<Account>,
    epoll: Arc<OwnedFd>,
    found: Arc<Found>,
    processes: BTreeMap<u64, Process>,
    channels: BTreeMap<u64, Channel>,
    accesses: Sender<Access>,
    /// Held by all threads that a process may block.
    alive: Arc<()>,
}

/// Serves one vNIC until the stream ends. `alive` is dropped when no thread of the vNIC is left that a process blocks.
/// `staging`: what the router has mapped, too, if it is another kernel's.
///
/// # Errors
/// No thread or descriptor is to be had, or the router sends nonsense.
pub fn serve(stream: OwnedFd, account: Arc<Account>, alive: Arc<()>, staging: Option<Segment>) -> io::Result<()> {
    freeflow_shm::prefer_short_slices();
    let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
    let router = Router(Arc::new(stream));
    epoll::add(&*epoll, &*router.0, epoll::EventData::new_u64(STREAM), epoll::EventFlags::IN)?;
    let found = Arc::new(Found { found: Mutex::default(), wake: Doorbell::new()? });
    epoll::add(&*epoll, &found.wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
    let (accesses, received) = channel();
    let (own, held) = (router.clone(), alive.clone());
    let body = move || {
        privileges::enter(ThreadKind::SlowPath);
        freeflow_shm::prefer_short_slices();
        access(&received, &own, staging.as_ref());
        drop(held);
    };
    std::thread::Builder::new().name(ThreadKind::SlowPath.name().into()).stack_size(256 * 1024).spawn(body)?;
    let local = Local::new(account.clone(), Arc::<Closer>::default());
    let (processes, channels) = (BTreeMap::new(), BTreeMap::new());
    let near = Near { router, local, account, epoll, found, processes, channels, accesses, alive };
    near.run()
}

impl Near {
    fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(EVENT_COUNT);
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        loop {
            match epoll::wait(&*self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in events.drain(..) {
                match event.data.u64() {
                    STREAM => {
                        let (bytes, descriptors) = fd::receive_into(&*self.router.0, &mut buffer, 1)?;
                        if bytes == 0 {
                            return Ok(());
                        }
                        let message = decode(&buffer[..bytes]).map_err(io::Error::other)?;
                        self.handle(message, descriptors.into_iter().next())?;
                    }
                    WAKE => self.take_found(),
                    token if token & PROCESS != 0 => self.note_ended(token & !PROCESS),
                    channel => self.handle_channel(channel, event.flags),
                }
            }
        }
    }

    /// Errors: no router sends that.
    fn handle(&mut self, message: Request, descriptor: Option<OwnedFd>) -> io::Result<()> {
        let missing = || io::Error::other("a message without its descriptor");
        match message {
            Request::Identify { request, pid, uid, gid } => {
                self.identify(request, PeerCredentials { pid, uid, gid }, descriptor.ok_or_else(missing)?);
            }
            // An agent's: it sends `Identify` in its place.
            Request::IdentifyConnection { request, .. } => self.router.answer(request, Err(VerbsError::NotFound)),
            Request::ReadStaged { request, process, address, length } => {
                self.access((request, process), address, AccessKind::ReadStaged { length })?;
            }
            Request::WriteStaged { request, process, address, length } => {
                self.access((request, process), address, AccessKind::WriteStaged { length })?;
            }
            Request::LetGo { process } => {
                if let Some(process) = self.processes.get(&process) {
                    process.let_go();
                }
            }
            Request::Forget { process } => {
                if let Some(process) = self.processes.remove(&process) {
                    // An access may have it still.
                    let _ = epoll::delete(&*self.epoll, process.end());
                }
            }
            Request::Read { request, process, address, length } => {
                self.access((request, process), address, AccessKind::Read { length })?;
            }
            Request::Write { request, process, address, bytes } => {
                self.access((request, process), address, AccessKind::Write { bytes })?;
            }
            Request::Atomic { request, process, address, operation } => {
                self.access((request, process), address, AccessKind::Atomic(operation))?;
            }
            Request::Freeze { request, process, thread, quiesce } => {
                self.freeze((request, process), FreezeCommand::Freeze { thread, quiesce });
            }
            Request::Thaw { request, process } => self.freeze((request, process), FreezeCommand::Thaw),
            Request::OpenEventChannel { channel } => self.open_event_channel(channel, descriptor.ok_or_else(missing)?),
            Request::Event { channel, record } => self.pass_on(channel, record),
            Request::CloseChannel { channel } => drop(self.channels.remove(&channel)),
        }
        Ok(())
    }

    fn identify(&self, number: u64, credentials: PeerCredentials, pidfd: OwnedFd) {
        let Ok(charge) = Charge::connection(&self.account, CONNECTION_COUNT_MAX) else {
            return self.router.answer(number, Err(VerbsError::NoMemory));
        };
        let (own, alive) = (self.found.clone(), self.alive.clone());
        let found = move |process| {
            own.lock().push((number, process));
            own.wake.kick();
            drop(alive);
        };
        let peer = Peer { credentials, pidfd, charge: Arc::new(charge) };
        if self.local.identify(peer, Box::new(found)).is_err() {
            self.router.answer(number, Err(VerbsError::NoMemory));
        }
    }

    fn take_found(&mut self) {
        self.found.wake.drain();
        let found = std::mem::take(&mut *self.found.lock());
        for (number, process) in found {
            let watched = process.and_then(|process| {
                let data = epoll::EventData::new_u64(PROCESS | number);
                let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
                epoll::add(&*self.epoll, process.end(), data, flags)?;
                self.processes.insert(number, process.into());
                Ok(())
            });
            self.router.answer(number, watched.map(|()| Answer::Done).map_err(|_| VerbsError::NotPermitted));
        }
    }

    fn process(&self, number: u64) -> Result<&Process, VerbsError> {
        self.processes.get(&number).ok_or(VerbsError::NotFound)
    }

    /// Errors: the thread of accesses has ended.
    fn access(&self, (request, process): (u64, u64), address: u64, kind: AccessKind) -> io::Result<()> {
        match self.process(process) {
            Ok(process) => {
                let access = Access { request, memory: process.memory(), address, kind };
                self.accesses.send(access).map_err(|_| io::Error::other("the thread of accesses has ended"))?;
            }
            Err(error) => self.router.answer(request, Err(error)),
        }
        Ok(())
    }

    fn note_ended(&self, process: u64) {
        self.router.report(&Report::ProcessEnded { process });
    }

    fn freeze(&self, (request, process): (u64, u64), command: FreezeCommand) {
        match self.process(process) {
            Ok(process) => {
                let (router, alive) = (self.router.clone(), self.alive.clone());
                let answer = move |result: Result<(), VerbsError>| {
                    router.answer(request, result.map(|()| Answer::Done));
                    drop(alive);
                };
                process.freeze(command, Box::new(answer));
            }
            Err(error) => self.router.answer(request, Err(error)),
        }
    }

    fn open_event_channel(&mut self, channel: u64, write: OwnedFd) {
        // Only that it has no reader any more, which is always reported.
        let (data, flags) = (epoll::EventData::new_u64(channel), epoll::EventFlags::empty());
        if epoll::add(&*self.epoll, &write, data, flags).is_ok() {
            self.channels.insert(channel, Channel { write, owed: None });
        } else {
            self.router.report(&Report::ChannelClosed { channel });
        }
    }

    fn pass_on(&mut self, number: u64, record: Vec<u8>) {
        // One that is gone was reported.
        let Some(channel) = self.channels.get_mut(&number) else { return };
        if send_record(&channel.write, &record) {
            self.router.report(&Report::EventTaken { channel: number });
        } else {
            channel.owed = Some(record);
            self.watch(number, epoll::EventFlags::OUT);
        }
    }

    fn handle_channel(&mut self, number: u64, flags: epoll::EventFlags) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        if flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
            self.channels.remove(&number);
            self.router.report(&Report::ChannelClosed { channel: number });
        } else if channel.owed.as_ref().is_none_or(|record| send_record(&channel.write, record)) {
            let was_owed = channel.owed.take().is_some();
            self.watch(number, epoll::EventFlags::empty());
            if was_owed {
                self.router.report(&Report::EventTaken { channel: number });
            }
        }
    }

    fn watch(&self, number: u64, flags: epoll::EventFlags) {
        if let Some(channel) = self.channels.get(&number) {
            let _ = epoll::modify(&*self.epoll, &channel.write, epoll::EventData::new_u64(number), flags);
        }
    }
}
