//! Holding a process' threads while its library moves pages: one thread of the router for each connection that asks,
//! which lets go after [`HOLD_MAX`], when it is told to, and when the connection ends.
//!
//! The control thread and the worker never wait for it. It touches threads of the connection's own process only.
use crate::admission::account::{Account, Charge};
use crate::base::privileges::{self, Kind};
use crate::memory::entrusted::Entrusted;
use crate::memory::quiesce::{Closed, Gate};
use freeflow_shm::HeldThreads;
use freeflow_verbs::VerbsError;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Threads are let go by then, whatever their library does.
const HOLD_MAX: Duration = Duration::from_millis(1000);
/// Threads that don't all stop by then are let go at once. Where processors are scarce it takes
/// that long for each to get one; threads that sleep where they can't be stopped are given up much
/// earlier.
const STOP_MAX: Duration = Duration::from_millis(200);
/// Time that the router waits for its own operations in the process' memory.
const QUIET_MAX: Duration = Duration::from_millis(50);
/// The thread ends when it has had nothing to do for so long.
const IDLE: Duration = Duration::from_secs(1);
const STACK_BYTES: usize = 128 * 1024;

#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// All threads but this one, by its ID in its own PID namespace.
    Hold {
        thread: u32,
        /// The fallback stands still as long.
        quiet: bool,
    },
    Release,
}

/// Tells what came of an order.
pub type Answer = Box<dyn FnOnce(Result<(), VerbsError>) + Send>;

/// One that nobody served is answered all the same.
struct Item {
    order: Order,
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

/// Whose threads and whose memory.
#[derive(Clone)]
pub struct Process {
    /// Its `/proc/PID/task`, opened while the process was known to live. What is charged for it
    /// stays charged while a thread is stuck.
    pub tasks: Arc<Entrusted<OwnedFd>>,
    /// Of who connected.
    pub uid: u32,
    pub gate: Arc<Gate>,
}

/// The frozen process, and since when.
struct Held {
    _threads: HeldThreads,
    _gate: Option<Closed>,
    since: Instant,
}

impl Held {
    fn take(process: &Process, thread: u32, quiet: bool) -> Result<Self, VerbsError> {
        // It may be a set-user-ID program by now, whose starter keeps the socket: that one may not stop it.
        if !rustix::fs::fstat(&**process.tasks).is_ok_and(|about| about.st_uid == process.uid) {
            return Err(VerbsError::NotPermitted);
        }
        // Before the threads: an access under way may wait for one of the threads (userfaultfd).
        let gate = quiet.then(|| process.gate.close(QUIET_MAX).ok_or(VerbsError::Busy)).transpose()?;
        let threads = HeldThreads::take(&**process.tasks, thread, STOP_MAX).map_err(|error| refusal(&error))?;
        Ok(Self { _threads: threads, _gate: gate, since: Instant::now() })
    }
}

/// One connection's. Dropping it lets the threads go.
#[derive(Default)]
pub struct Holder(Option<Sender<Item>>);

impl Holder {
    /// A thread is begun on the account of the connection's vNIC; NoMemory if it may have no more,
    /// or the machine has none.
    pub fn order(&mut self, order: Order, process: Process, account: &Arc<Account>, answer: Answer) {
        let mut item = Item { order, process, answer: Some(answer) };
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
        let thread = std::thread::Builder::new().name("ff-holder".into()).stack_size(STACK_BYTES);
        if thread.spawn(body).is_err() {
            return item.answer(Err(VerbsError::NoMemory));
        }
        let _ = sender.send(item);
        self.0 = Some(sender);
    }
}

fn serve(items: Receiver<Item>) {
    privileges::enter(Kind::Holder);
    freeflow_shm::prefer_short_slices();
    let mut held: Option<Held> = None;
    let mut expired = false;
    loop {
        let wait = held.as_ref().map_or(IDLE, |held| HOLD_MAX.saturating_sub(held.since.elapsed()));
        let item = match items.recv_timeout(wait) {
            Ok(item) => item,
            Err(RecvTimeoutError::Timeout) if held.is_some() => {
                held = None;
                expired = true;
                continue;
            }
            Err(_) => return,
        };
        let result = match item.order {
            Order::Hold { .. } if held.is_some() => Err(VerbsError::Busy),
            Order::Hold { thread, quiet } => {
                expired = false;
                Held::take(&item.process, thread, quiet).map(|taken| held = Some(taken))
            }
            Order::Release => match held.take() {
                Some(_) => Ok(()),
                None if std::mem::take(&mut expired) => Err(VerbsError::TimedOut),
                None => Err(VerbsError::NotFound),
            },
        };
        let is_refused = matches!(result, Err(error) if error != VerbsError::Busy);
        if is_refused && held.is_none() && matches!(item.order, Order::Hold { .. }) {
            // A thread that did not stop in time is let go by the kernel when this one ends. No
            // order comes to it after the answer.
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
