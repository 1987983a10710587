//! Freezing a process' threads while its library moves pages: one thread of the router for each connection that
//! asks, which lets go after [`FREEZE_MAX`], when it is asked to, and when the connection ends.
//!
//! The control thread and the worker never wait for it. It touches threads of the connection's own process only.
use crate::admission::account::{Account, Charge};
use crate::base::privileges::{self, ThreadKind};
use crate::memory::entrusted::Entrusted;
use crate::memory::quiesce::{Closed, QuiescenceGate};
use freeflow_shm::FrozenThreads;
use freeflow_verbs::VerbsError;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Threads are let go by then, whatever their library does.
const FREEZE_MAX: Duration = Duration::from_millis(1000);
/// Threads that don't all stop by then are let go at once. Where processors are scarce it takes
/// that long for each to get one; threads that sleep where they can't be stopped are given up much
/// earlier.
const STOP_MAX: Duration = Duration::from_millis(200);
/// Time that the router waits for its own operations in the process' memory.
const QUIESCE_MAX: Duration = Duration::from_millis(50);
/// The thread ends when it has had nothing to do for so long.
const IDLE: Duration = Duration::from_secs(1);
const STACK_BYTES: usize = 128 * 1024;

#[derive(Clone, Copy, Debug)]
pub enum FreezeCommand {
    /// All threads but this one, by its ID in its own PID namespace.
    Freeze {
        thread: u32,
        /// The slow path stands still as long.
        quiesce: bool,
    },
    Thaw,
}

/// Takes the result of a command.
pub type Answer = Box<dyn FnOnce(Result<(), VerbsError>) + Send>;

/// One that nobody served is answered all the same.
struct Item {
    command: FreezeCommand,
    process: Process,
    answer: Option<Answer>,
}

impl Item {
    fn answer(mut self, result: Result<(), VerbsError>) {
        if let Some(answer) = self.answer.take() {
            answer(result);
        }
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            answer(Err(VerbsError::NotFound));
        }
    }
}

/// The process whose threads are frozen and whose memory it is.
#[derive(Clone)]
pub struct Process {
    /// Its `/proc/PID/task`, opened while the process was known to live. What is charged for it
    /// stays charged while a thread is stuck.
    pub tasks: Arc<Entrusted<OwnedFd>>,
    /// Of who connected.
    pub uid: u32,
    pub gate: Arc<QuiescenceGate>,
}

/// The frozen process, and since when.
struct FrozenProcess {
    _threads: FrozenThreads,
    _gate: Option<Closed>,
    since: Instant,
}

impl FrozenProcess {
    fn take(process: &Process, thread: u32, quiesce: bool) -> Result<Self, VerbsError> {
        // It may be a set-user-ID program by now, whose starter keeps the socket: that one may not stop it.
        if !rustix::fs::fstat(&**process.tasks).is_ok_and(|about| about.st_uid == process.uid) {
            return Err(VerbsError::NotPermitted);
        }
        // Before the threads: an access under way may wait for one of the threads (userfaultfd).
        let gate = quiesce.then(|| process.gate.close(QUIESCE_MAX).ok_or(VerbsError::Busy)).transpose()?;
        let threads = FrozenThreads::take(&**process.tasks, thread, STOP_MAX).map_err(|error| refusal(&error))?;
        Ok(Self { _threads: threads, _gate: gate, since: Instant::now() })
    }
}

/// One connection's. Dropping it lets the threads go.
#[derive(Default)]
pub struct Freezer(Option<Sender<Item>>);

impl Freezer {
    /// A thread is begun on the account of the connection's vNIC; NoMemory if it may have no more,
    /// or the machine has none.
    pub fn submit(&mut self, command: FreezeCommand, process: Process, account: &Arc<Account>, answer: Answer) {
        let mut item = Item { command, process, answer: Some(answer) };
        if let Some(sender) = &self.0 {
            match sender.send(item) {
                Ok(()) => return,
                // The thread has ended.
                Err(refused) => item = refused.0,
            }
        }
        self.0 = None;
        let Ok(charge) = Charge::thread(account) else { return item.answer(Err(VerbsError::NoMemory)) };
        let (sender, receiver) = channel();
        let body = move || {
            serve(receiver);
            drop(charge);
        };
        let thread = std::thread::Builder::new().name("ff-freezer".into()).stack_size(STACK_BYTES);
        if thread.spawn(body).is_err() {
            return item.answer(Err(VerbsError::NoMemory));
        }
        let _ = sender.send(item);
        self.0 = Some(sender);
    }
}

fn serve(items: Receiver<Item>) {
    privileges::enter(ThreadKind::Freezer);
    freeflow_shm::prefer_short_slices();
    let mut frozen: Option<FrozenProcess> = None;
    let mut expired = false;
    loop {
        let wait = frozen.as_ref().map_or(IDLE, |frozen| FREEZE_MAX.saturating_sub(frozen.since.elapsed()));
        let item = match items.recv_timeout(wait) {
            Ok(item) => item,
            Err(RecvTimeoutError::Timeout) if frozen.is_some() => {
                frozen = None;
                expired = true;
                continue;
            }
            Err(_) => return,
        };
        let result = match item.command {
            FreezeCommand::Freeze { .. } if frozen.is_some() => Err(VerbsError::Busy),
            FreezeCommand::Freeze { thread, quiesce } => {
                expired = false;
                FrozenProcess::take(&item.process, thread, quiesce).map(|taken| frozen = Some(taken))
            }
            FreezeCommand::Thaw => match frozen.take() {
                Some(_) => Ok(()),
                None if std::mem::take(&mut expired) => Err(VerbsError::TimedOut),
                None => Err(VerbsError::NotFound),
            },
        };
        let is_refused = matches!(result, Err(error) if error != VerbsError::Busy);
        if is_refused && frozen.is_none() && matches!(item.command, FreezeCommand::Freeze { .. }) {
            // A thread that did not stop in time is let go by the kernel when this one ends. No
            // command comes to it after the answer.
            drop(items);
            item.answer(result);
            return;
        }
        item.answer(result);
    }
}

fn refusal(error: &io::Error) -> VerbsError {
    match error.kind() {
        io::ErrorKind::TimedOut => VerbsError::TimedOut,
        io::ErrorKind::NotFound => VerbsError::NotFound,
        _ => VerbsError::NotPermitted,
    }
}
