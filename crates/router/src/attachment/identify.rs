//! Threads of one vNIC that look at its processes: that takes calls which its own kernel objects can hold
//! up without end. `open` of `/proc/PID/mem` waits for an `execve` of that process, which waits for
//! whoever holds its mmap lock: a sibling that shares the memory may hold it for ever, in an `mmap`
//! of a FUSE file. So a few threads of the vNIC do that; the control thread accepts, asks the
//! socket for credentials and pidfd, which never waits, and gets the rest as a message. Threads of another kind open
//! what processes have mapped ([`borrow`](crate::attachment::borrow)).
//!
//! Invariant: a vNIC has [`THREAD_COUNT_MAX`] of these threads at most, however many are stuck, and
//! [`WAITING_COUNT_MAX`] connections with them. Beyond that connections wait where they take no
//! descriptor of the router: in the queue of its listening socket.
use crate::base::privileges::{self, ThreadKind};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// More than one, so that a process that is slow to look at does not keep all others of its container from connecting.
pub const THREAD_COUNT_MAX: u32 = 4;
/// Connections of one vNIC that wait to be identified.
pub const WAITING_COUNT_MAX: u32 = 64;
/// A thread ends when it has had nothing to do for so long.
const IDLE: Duration = Duration::from_secs(1);
const STACK_BYTES: usize = 64 * 1024;

pub type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    queue: VecDeque<Task>,
    threads: u32,
    idle: u32,
}

/// Nobody waits with the lock held.
struct Shared {
    kind: ThreadKind,
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<Task> {
        let mut state = self.lock();
        if state.queue.is_empty() {
            state.idle += 1;
            let waited = self.changed.wait_timeout_while(state, IDLE, |state| state.queue.is_empty());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.idle -= 1;
        }
        let task = state.queue.pop_front();
        if task.is_none() {
            state.threads -= 1;
        }
        task
    }
}

/// The threads of one vNIC, of one kind. They end by themselves.
pub struct Identifiers(Arc<Shared>);

impl Identifiers {
    pub fn new(kind: ThreadKind) -> Self {
        Self(Arc::new(Shared { kind, state: Mutex::default(), changed: Condvar::new() }))
    }

    /// Has one of the threads do it. Gives it back if there is none and none can be made.
    pub fn submit(&self, task: Task) -> Result<(), Task> {
        let mut state = self.0.lock();
        state.queue.push_back(task);
        if state.idle as usize >= state.queue.len() {
            self.0.changed.notify_one();
        } else if state.threads < THREAD_COUNT_MAX {
            let shared = self.0.clone();
            let body = move || {
                privileges::enter(shared.kind);
                while let Some(task) = shared.next() {
                    task();
                }
            };
            let thread = std::thread::Builder::new().name(self.0.kind.name().into()).stack_size(STACK_BYTES);
            if thread.spawn(body).is_ok() {
                state.threads += 1;
            } else if state.threads == 0 {
                return state.queue.pop_back().map_or(Ok(()), Err);
            }
        }
        Ok(())
    }

    /// Takes back what no thread has begun.
    pub fn take_waiting(&self) -> VecDeque<Task> {
        std::mem::take(&mut self.0.lock().queue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn stuck_threads_are_few_and_what_waits_is_given_back() {
        let identifiers = Identifiers::new(ThreadKind::Identify);
        let (began, begun) = channel();
        let (release, released) = channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let submit = |stuck: bool| {
            let (began, released) = (began.clone(), released.clone());
            let task = move || {
                began.send(stuck).unwrap();
                if stuck {
                    let _ = released.lock().unwrap().recv();
                }
            };
            assert!(identifiers.submit(Box::new(task)).is_ok());
        };
        // While all but one are stuck, the others are served.
        for _ in 1..THREAD_COUNT_MAX {
            submit(true);
            assert_eq!(begun.recv_timeout(LONG), Ok(true));
        }
        for _ in 0..20 {
            submit(false);
            assert_eq!(begun.recv_timeout(LONG), Ok(false));
        }
        submit(true);
        assert_eq!(begun.recv_timeout(LONG), Ok(true));
        for _ in 0..10 {
            submit(false);
        }
        assert_eq!(identifiers.0.lock().threads, THREAD_COUNT_MAX);
        assert_eq!(identifiers.take_waiting().len(), 10);
        submit(false);
        assert!(begun.try_recv().is_err(), "all threads are stuck");
        drop(release);
        assert_eq!(begun.recv_timeout(LONG), Ok(false));
    }
}
