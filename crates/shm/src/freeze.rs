//! Stopping all threads of a process but one, by ptrace, for the moments in which that one moves
//! its memory.
//!
//! A thread is seized by its number and only then looked up in the process' own `task` directory,
//! which was opened while the process was known to live: a number that belongs to another process
//! by now is let go without having been stopped.
//!
//! A system call that the stop interrupts is restarted by the kernel. The few that answer EINTR to
//! every interruption (epoll_wait, semop, sigtimedwait, calls with a socket timeout) are made to
//! answer ERESTARTNOHAND here, while the thread stands still: they then begin again, unless a
//! signal's handler runs, and answer EINTR if one does.
//!
//! Invariant: who seized must let go; so [`FrozenThreads`] stays on the thread that made it, and
//! lets go when it is dropped. If the tracing thread dies the kernel lets go.
//!
//! The decisions (`Frozen`) share no memory with anybody, so there is nothing for loom. They are
//! generic over the kernel (`Tracer`), and `model` runs them against every short history of threads
//! that begin, end and stop meanwhile.
use rustix::fs::{Mode, OFlags, RawDir};
use std::ffi::CString;
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Threads that one process may have frozen: beyond, the stop would take too long.
const THREAD_COUNT_MAX: usize = 4096;
/// A thread that sleeps, and can be stopped, is stopped by then.
const SLEEPERS_STOP_WITHIN: Duration = Duration::from_millis(20);
/// One that waits for a processor, after the freeze has failed.
const RUNNABLE_STOP_WITHIN: Duration = Duration::from_secs(1);
/// How long it yields between two looks, before it sleeps.
const YIELD_FOR: Duration = Duration::from_micros(200);
/// Between two looks at threads that have not stopped yet.
const LOOK_AGAIN: Duration = Duration::from_micros(20);
/// Of a status file that is read; NSpid stands well before.
const STATUS_BYTES: usize = 4096;
/// linux/ptrace.h; not a signal of its own: it stands in the bits above.
const EVENT_STOP: i32 = 128;

struct Tracee {
    id: i32,
    stopped: bool,
    /// The signal that it stopped to take; it takes it when it is let go.
    signal: i32,
}

/// Change of a thread that is traced.
enum Change {
    /// Nothing that is to be noticed.
    None,
    Ended,
    Stopped(Stop),
}

enum Stop {
    /// As it was asked to.
    Asked,
    /// To take a signal.
    Signal(i32),
    Other,
}

/// The kernel, as a tracer sees it.
trait Tracer {
    /// The threads of one process.
    type Tasks<'a>: Copy;

    fn thread_ids(&self, tasks: Self::Tasks<'_>) -> io::Result<Vec<i32>>;
    /// A thread's ID in its own PID namespace; `None` if it is none of this process, or has ended.
    fn inner_id(&self, tasks: Self::Tasks<'_>, id: i32) -> Option<u32>;
    /// As in `/proc/PID/stat`; `None` if there is no such thread.
    fn state(&self, tasks: Self::Tasks<'_>, id: i32) -> Option<u8>;
    fn seize(&self, id: i32) -> io::Result<()>;
    fn interrupt(&self, id: i32);
    fn poll(&self, id: i32) -> io::Result<Change>;
    fn make_restartable(&self, id: i32);
    fn detach(&self, id: i32, signal: i32) -> io::Result<()>;
    fn now(&self) -> Instant;
    fn give_way(&self);
    fn sleep(&self, span: Duration);
}

/// The threads of one process, but for one, stopped. They go on when this is dropped.
pub struct FrozenThreads {
    _frozen: Frozen<Ptrace>,
    /// ptrace knows the tracer by its thread.
    on_this_thread: PhantomData<*const ()>,
}

impl FrozenThreads {
    /// Stops the threads listed in `tasks` (a `/proc/PID/task`), but the one whose ID in its own
    /// PID namespace is `except`.
    ///
    /// Errors, with every thread let go: `TimedOut` if they don't all stop within `limit`;
    /// `PermissionDenied` if one is traced already or can't be traced; `NotFound` if no thread is
    /// `except`; `Unsupported` on other processors than x86-64.
    pub fn take(tasks: impl AsFd, except: u32, limit: Duration) -> io::Result<Self> {
        if !cfg!(target_arch = "x86_64") {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Self { _frozen: Frozen::take(Ptrace, tasks.as_fd(), except, limit)?, on_this_thread: PhantomData })
    }
}

struct Frozen<T: Tracer> {
    tracer: T,
    tracees: Vec<Tracee>,
}

impl<T: Tracer> Frozen<T> {
    fn take(tracer: T, tasks: T::Tasks<'_>, except: u32, limit: Duration) -> io::Result<Self> {
        let deadline = tracer.now() + limit;
        let mut frozen = Self { tracer, tracees: Vec::new() };
        frozen.stop_all(tasks, except, deadline).inspect_err(|_| frozen.wait_for_runnable(tasks))?;
        Ok(frozen)
    }

    fn stop_all(&mut self, tasks: T::Tasks<'_>, except: u32, deadline: Instant) -> io::Result<()> {
        let (mut caller, mut zombies) = (None, Vec::new());
        // A thread that is not stopped yet can make another one: the list is final once all that it
        // names stand still, or had ended before.
        loop {
            let mut is_final = true;
            for id in self.tracer.thread_ids(tasks)? {
                if caller == Some(id) || self.tracees.iter().any(|tracee| tracee.id == id) {
                    continue;
                }
                if caller.is_none() && self.tracer.inner_id(tasks, id) == Some(except) {
                    caller = Some(id);
                    continue;
                }
                let is_zombie = self.seize(tasks, id)?;
                // One that has ended since it was listed may have made another one just before.
                is_final &= is_zombie && zombies.contains(&id);
                zombies.extend(is_zombie.then_some(id));
            }
            if caller.is_none() {
                return Err(io::ErrorKind::NotFound.into());
            }
            if is_final {
                return Ok(());
            }
            self.wait_until_stopped(tasks, deadline)?;
            // The one that runs on may make threads, and end them, for ever.
            if self.tracer.now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Begins to stop one thread. One that has ended meanwhile is passed over; true: it stays
    /// listed until the others have ended, too.
    fn seize(&mut self, tasks: T::Tasks<'_>, id: i32) -> io::Result<bool> {
        if self.tracees.len() >= THREAD_COUNT_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if let Err(error) = self.tracer.seize(id) {
            let state = self.tracer.state(tasks, id);
            let is_zombie = matches!(state, Some(b'Z' | b'X'));
            return if is_zombie || state.is_none() { Ok(is_zombie) } else { Err(not_permitted(error)) };
        }
        self.tracees.push(Tracee { id, stopped: false, signal: 0 });
        if self.tracer.inner_id(tasks, id).is_none() {
            // Its number is another process' now.
            self.let_go(self.tracees.len() - 1, self.tracer.now() + SLEEPERS_STOP_WITHIN);
            self.tracees.pop();
            return Ok(false);
        }
        // Fails if it ends just now, which the wait finds out.
        self.tracer.interrupt(id);
        Ok(false)
    }

    /// A thread that waits for a processor is worth waiting for, one that sleeps where it can't be
    /// stopped is not.
    fn wait_until_stopped(&mut self, tasks: T::Tasks<'_>, deadline: Instant) -> io::Result<()> {
        let hopeful = self.tracer.now() + SLEEPERS_STOP_WITHIN;
        let patient = self.tracer.now() + YIELD_FOR;
        loop {
            let mut missing = 0;
            let mut at = 0;
            while at < self.tracees.len() {
                if !self.tracees[at].stopped && !self.look(at)? {
                    self.tracees.swap_remove(at);
                    continue;
                }
                missing += usize::from(!self.tracees[at].stopped);
                at += 1;
            }
            if missing == 0 {
                return Ok(());
            }
            let now = self.tracer.now();
            if now >= deadline || (now >= hopeful && !self.is_missing_runnable(tasks)) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            // They are woken to stop: they may need this processor.
            if self.tracer.now() < patient { self.tracer.give_way() } else { self.tracer.sleep(LOOK_AGAIN) }
        }
    }

    /// A call that was interrupted can be made to begin again only once its thread stands still:
    /// those that are about to, and wait for a processor, are given some more time before all are
    /// let go.
    fn wait_for_runnable(&mut self, tasks: T::Tasks<'_>) {
        let deadline = self.tracer.now() + RUNNABLE_STOP_WITHIN;
        let is_awaited = |tracer: &T, tracee: &Tracee| {
            !tracee.stopped && matches!(tracer.state(tasks, tracee.id), Some(b'R' | b't' | b'T'))
        };
        while let Some(at) = self.tracees.iter().position(|tracee| is_awaited(&self.tracer, tracee))
            && self.tracer.now() < deadline
        {
            match self.look(at) {
                Ok(true) if self.tracees[at].stopped => {}
                Ok(true) => self.tracer.sleep(LOOK_AGAIN),
                _ => drop(self.tracees.swap_remove(at)),
            }
        }
    }

    fn is_missing_runnable(&self, tasks: T::Tasks<'_>) -> bool {
        let mut missing = self.tracees.iter().filter(|tracee| !tracee.stopped);
        missing.all(|tracee| matches!(self.tracer.state(tasks, tracee.id), Some(b'R' | b't' | b'T' | b'Z' | b'X')))
    }

    /// Looks whether a thread has stopped. False: it has ended.
    fn look(&mut self, at: usize) -> io::Result<bool> {
        let id = self.tracees[at].id;
        let stop = match self.tracer.poll(id)? {
            Change::None => return Ok(true),
            Change::Ended => return Ok(false),
            Change::Stopped(stop) => stop,
        };
        self.tracees[at].stopped = true;
        match stop {
            Stop::Asked => self.tracer.make_restartable(id),
            // The interrupted code is that signal's affair.
            Stop::Signal(signal) => self.tracees[at].signal = signal,
            Stop::Other => {}
        }
        Ok(true)
    }

    /// A thread that runs can't be detached at once: it is stopped first, if it stops by the
    /// deadline. One that does not is let go by the kernel when this thread ends, and goes on then
    /// as if nothing had been.
    fn let_go(&mut self, at: usize, deadline: Instant) {
        if !self.tracees[at].stopped {
            self.tracer.interrupt(self.tracees[at].id);
        }
        while !self.tracees[at].stopped {
            match self.look(at) {
                Ok(true) if self.tracees[at].stopped => {}
                Ok(true) if self.tracer.now() < deadline => self.tracer.sleep(LOOK_AGAIN),
                _ => return,
            }
        }
        if self.tracer.detach(self.tracees[at].id, self.tracees[at].signal).is_err() {
            // Killed while it stood still: its process is not gone before this is known.
            let _ = self.look(at);
        }
    }

    /// Lets the threads go, first those that stand still.
    fn release_all(&mut self) {
        let deadline = self.tracer.now() + SLEEPERS_STOP_WITHIN;
        for is_stopped in [true, false] {
            for at in 0..self.tracees.len() {
                if self.tracees[at].stopped == is_stopped {
                    self.let_go(at, deadline);
                }
            }
        }
        self.tracees.clear();
    }
}

impl<T: Tracer> Drop for Frozen<T> {
    fn drop(&mut self) {
        self.release_all();
    }
}

fn ptrace(request: libc::c_uint, id: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the requests made here read and write no memory of ours but what `data` points to,
    // which is valid then.
    if unsafe { libc::ptrace(request, id, address, data) } == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The kernel itself.
struct Ptrace;

impl Tracer for Ptrace {
    type Tasks<'a> = BorrowedFd<'a>;

    fn thread_ids(&self, tasks: BorrowedFd<'_>) -> io::Result<Vec<i32>> {
        thread_ids(tasks)
    }

    fn inner_id(&self, tasks: BorrowedFd<'_>, id: i32) -> Option<u32> {
        inner_id(tasks, id)
    }

    fn state(&self, tasks: BorrowedFd<'_>, id: i32) -> Option<u8> {
        state(tasks, id)
    }

    fn seize(&self, id: i32) -> io::Result<()> {
        ptrace(libc::PTRACE_SEIZE, id, 0, 0)
    }

    fn interrupt(&self, id: i32) {
        let _ = ptrace(libc::PTRACE_INTERRUPT, id, 0, 0);
    }

    fn poll(&self, id: i32) -> io::Result<Change> {
        let mut status = 0;
        // SAFETY: `status` is ours to write.
        let found = unsafe { libc::waitpid(id, &raw mut status, libc::__WALL | libc::WNOHANG) };
        if found < 0 {
            let error = io::Error::last_os_error();
            return if error.raw_os_error() == Some(libc::ECHILD) { Ok(Change::Ended) } else { Err(error) };
        }
        Ok(match status >> 16 {
            _ if found == 0 => Change::None,
            _ if !libc::WIFSTOPPED(status) => Change::Ended,
            EVENT_STOP => Change::Stopped(Stop::Asked),
            0 => Change::Stopped(Stop::Signal(libc::WSTOPSIG(status))),
            _ => Change::Stopped(Stop::Other),
        })
    }

    fn make_restartable(&self, id: i32) {
        make_restartable(id);
    }

    fn detach(&self, id: i32, signal: i32) -> io::Result<()> {
        ptrace(libc::PTRACE_DETACH, id, 0, signal as usize)
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn give_way(&self) {
        crate::sched_yield();
    }

    fn sleep(&self, span: Duration) {
        std::thread::sleep(span);
    }
}

fn not_permitted(error: io::Error) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, error)
}

/// In a system call that failed with EINTR for no other reason than the stop: let it begin again.
/// `close` is left alone, since its descriptor is gone already.
#[cfg(target_arch = "x86_64")]
fn make_restartable(id: i32) {
    const ERESTARTNOHAND: i64 = 514;
    // SAFETY: integers only; all zeroes are valid.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    if ptrace(libc::PTRACE_GETREGS, id, 0, (&raw mut registers).addr()).is_err() {
        return;
    }
    let call = registers.orig_rax as i64;
    if call >= 0 && call != libc::SYS_close && registers.rax as i64 == -i64::from(libc::EINTR) {
        registers.rax = -ERESTARTNOHAND as u64;
        let _ = ptrace(libc::PTRACE_SETREGS, id, 0, (&raw const registers).addr());
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn make_restartable(_id: i32) {}

fn thread_ids(tasks: BorrowedFd<'_>) -> io::Result<Vec<i32>> {
    // Again each time: the position in a directory belongs to its open file.
    let directory =
        rustix::fs::openat(tasks, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut space = [MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(&directory, &mut space);
    let mut ids = Vec::new();
    while let Some(entry) = entries.next() {
        ids.extend(entry?.file_name().to_str().ok().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(ids)
}

fn read_of(tasks: BorrowedFd<'_>, id: i32, name: &str, buffer: &mut [u8]) -> Option<usize> {
    let path = CString::new(format!("{id}/{name}")).ok()?;
    let file = rustix::fs::openat(tasks, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    rustix::io::read(&file, buffer).ok()
}

/// A thread's ID in its own PID namespace; `None` if it is none of this process, or has ended.
fn inner_id(tasks: BorrowedFd<'_>, id: i32) -> Option<u32> {
    let mut buffer = [0; STATUS_BYTES];
    let bytes = read_of(tasks, id, "status", &mut buffer)?;
    let text = String::from_utf8_lossy(&buffer[..bytes]);
    let line = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().next_back()?.parse().ok()
}

/// As in `/proc/PID/stat`; `None` if there is no such thread.
fn state(tasks: BorrowedFd<'_>, id: i32) -> Option<u8> {
    let mut buffer = [0; 512];
    let bytes = read_of(tasks, id, "stat", &mut buffer)?;
    let at = buffer[..bytes].iter().rposition(|byte| *byte == b')')?;
    buffer.get(at + 2).copied()
}

#[cfg(test)]
mod model;

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use std::fs::File;
    use std::process::{Child, Command};

    /// A process with one thread, and its `task` directory. Tests that may not trace see
    /// `PermissionDenied`.
    fn sleeper() -> (Child, File) {
        let child = Command::new("sleep").arg("60").spawn().expect("sleep is everywhere");
        let tasks = File::open(format!("/proc/{}/task", child.id())).unwrap();
        // Not while its program is read from the disk, when it can't be stopped.
        let began = Instant::now();
        while state(tasks.as_fd(), child.id() as i32) != Some(b'S') && began.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(1));
        }
        (child, tasks)
    }

    fn end(mut child: Child) {
        let _ = child.kill();
        let _ = child.wait();
    }

    #[test]
    fn who_asks_runs_on_and_a_stranger_is_refused() {
        let (child, tasks) = sleeper();
        let limit = Duration::from_secs(5);
        let held = FrozenThreads::take(&tasks, child.id(), limit).unwrap();
        assert!(held._frozen.tracees.is_empty());
        drop(held);
        match FrozenThreads::take(&tasks, u32::MAX, limit) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            other => assert_eq!(other.err().map(|error| error.kind()), Some(io::ErrorKind::NotFound)),
        }
        assert!(matches!(state(tasks.as_fd(), child.id() as i32), Some(b'S' | b'R' | b'D')));
        end(child);
    }

    #[test]
    fn a_thread_stands_still_until_it_is_let_go() {
        let (child, tasks) = sleeper();
        let id = child.id() as i32;
        let mut held = Frozen { tracer: Ptrace, tracees: Vec::new() };
        if held.seize(tasks.as_fd(), id).is_ok() {
            held.wait_until_stopped(tasks.as_fd(), Instant::now() + Duration::from_secs(5)).unwrap();
            assert_eq!(state(tasks.as_fd(), id), Some(b't'));
            drop(held);
        }
        assert_ne!(state(tasks.as_fd(), id), Some(b't'));
        end(child);
    }

    #[test]
    fn a_process_that_has_ended_has_no_threads() {
        let (child, tasks) = sleeper();
        end(child);
        assert!(FrozenThreads::take(&tasks, 1, Duration::from_millis(100)).is_err());
    }
}
