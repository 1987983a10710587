//! The thread that carries out the router's commands: one for each session that registered memory.
//! It also takes pages out of arenas for other threads, which can't move pages of their own stacks:
//! partial pages before the process forks, and what a thread deregisters on its stack.
//!
//! A program that looks at its threads sees one more, `freeflow-revoke`, from its first
//! registration on (none where the router gives no commands, or with both `FREEFLOW_REMAP=off` and
//! `FREEFLOW_HINTS=off`). It takes no signals. The C library then takes its locks as for any program
//! of several threads, and what the kernel allows only a process of one thread (a new user
//! namespace) is to be done before.
//!
//! Invariant: the thread waits in `poll`, or for the table's lock; all else that it does, from its
//! beginning to its end, it does while it, or the thread that started it, has that lock or lends it,
//! but for reading commands, counting them and writing the hint (`hints`). For those it reaches its
//! own stack, which no move comes near (`threads::stack_in_use`), and memory that is never moved
//! ([`OwnMapping`]). So pages can be moved as if it were not there, and `fork` finds it holding no
//! lock of the child's.
//!
//! Invariant: a thread that waits for an answer of the router with the table's lock, or the
//! session's, waits for no command: the router answers everything else without waiting for its
//! commands.
use crate::lock::{Borrower, locked};
use crate::syscalls::process_id;
use crate::table::{ShareRequest, Table};
use crate::threads::{self, now_ns};
use freeflow_client::{
    Awaited, COMMAND_BYTES, Doorbell, MemoryCommand, OwnMapping, PendingCommands, REVOCATION_TIME_MAX_MS,
    RevokeCommands, Session, Uncancelled,
};
use freeflow_verbs::VerbsError;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// The stack that the C library, a program's thread-local data and this thread's work need.
const STACK_BYTES: usize = 256 << 10;
/// A thread that has not begun by then is taken for one of the program's.
const BEGIN_WITHIN_NS: u64 = 1_000_000_000;

/// The newest one's pipe, or -1.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);
/// The newest one's eventfd, or -1.
static WAKE: AtomicI32 = AtomicI32::new(-1);

/// Longest wait for the next command to be carried out: by then the router has ended a session that
/// does not do it.
const REVOCATION_WAIT_NS: u64 = (REVOCATION_TIME_MAX_MS + 5_000) * 1_000_000;
/// A wait looks often at first; most commands are done in a few milliseconds.
const FREQUENT_LOOKS_NS: u64 = 20_000_000;
const FREQUENT_LOOK: Duration = Duration::from_micros(20);
const RARE_LOOK: Duration = Duration::from_millis(2);

/// Waits until the revoke commands that the router has given this session so far are carried out:
/// no peer reaches what a verb ended once the verb returns. Not under the table's lock.
///
/// # Errors
/// DeviceFatal: they were not carried out, and the session has ended.
pub fn wait_for_revocations(session: &Session) -> Result<(), VerbsError> {
    let _uncancelled = Uncancelled::begin();
    let pending = session.pending_commands();
    // In a session that was dead before, every right has ended, and nothing is waited for.
    if session.is_dead() {
        return Ok(());
    }
    wait_for(pending, REVOCATION_WAIT_NS, &|| session.check())
}

/// `is_alive`: whether the session is. `limit_ns`: how long it may take until one more command is
/// finished.
fn wait_for(pending: &PendingCommands, limit_ns: u64, is_alive: &dyn Fn() -> bool) -> Result<(), VerbsError> {
    let mut awaited = Awaited::default();
    let (begin, mut last) = (now_ns(), None);
    let mut advanced = begin;
    while awaited.are_pending(&pending.commands, || has_unread(pending)) {
        let now = now_ns();
        let finished = pending.commands.finished();
        if last.replace(finished) != Some(finished) {
            advanced = now;
        }
        if now.saturating_sub(advanced) > limit_ns || !is_alive() {
            return Err(VerbsError::DeviceFatal);
        }
        let is_soon = now.saturating_sub(begin) < FREQUENT_LOOKS_NS;
        std::thread::sleep(if is_soon { FREQUENT_LOOK } else { RARE_LOOK });
    }
    Ok(())
}

fn has_unread(pending: &PendingCommands) -> bool {
    let pipe = pending.pipe();
    pipe >= 0 && is_readable(pipe, 0)
}

fn is_readable(descriptor: RawFd, timeout_ms: i32) -> bool {
    let mut polled = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd of ours.
    let count = unsafe { libc::poll(&raw mut polled, 1, timeout_ms) };
    count > 0 && polled.revents & libc::POLLIN != 0
}

/// A thread's argument, in memory that is never moved.
pub(crate) struct Task {
    /// Weak: the session ends with the program's last use of it, and the pipe with the session.
    session: Weak<Session>,
    serial: u64,
    /// The process that it runs in. A child by a bare `clone` has a copy of the table, without it.
    process: i32,
    pending: Arc<OwnMapping<PendingCommands>>,
    /// Without one it ends.
    pipe: OnceLock<OwnedFd>,
    /// Nothing where the C library does not say it.
    stack: OnceLock<Range<u64>>,
    /// The table's lock is lent to it.
    wake: Doorbell,
    /// It waits for commands.
    has_begun: AtomicBool,
    /// It was counted by [`threads::add_quiescent`].
    is_quiescent: AtomicBool,
}

impl Task {
    /// Whether it runs in the calling process.
    pub fn is_here(&self) -> bool {
        self.process == process_id()
    }
}

impl Borrower for Task {
    fn serial(&self) -> u64 {
        self.serial
    }

    fn wake(&self) {
        self.wake.kick();
    }

    fn take_out(&self, table: &mut Table, partial: bool) {
        let body = || {
            if let Some(session) = self.session.upgrade() {
                table.retry_pending(&session);
                if partial {
                    table.take_out_partial_pages(&session);
                }
            }
        };
        let _ = catch_unwind(AssertUnwindSafe(body));
    }
}

/// Asks the router for commands, and starts their thread. `None`: there will be none. Under the
/// table's lock.
pub(crate) fn start(session: &Arc<Session>) -> Option<Arc<OwnMapping<Task>>> {
    let task = OwnMapping::new(Task {
        session: Arc::downgrade(session),
        serial: session.serial(),
        process: process_id(),
        pending: session.pending_commands().clone(),
        pipe: OnceLock::new(),
        stack: OnceLock::new(),
        wake: Doorbell::new().ok()?,
        has_begun: AtomicBool::new(false),
        is_quiescent: AtomicBool::new(false),
    });
    let task = Arc::new(task.ok()?);
    // Before the pipe: once the router has said yes, it counts on a reader. The thread waits for
    // the lock.
    if !spawn(&task) {
        return None;
    }
    note_begun(&task);
    let pipe = session.open_commands().ok()?;
    let descriptor = pipe.as_raw_fd();
    task.pending.set_pipe(descriptor);
    // Relaxed: read by a child of `fork`, which this thread or a later holder of the lock makes.
    DESCRIPTOR.store(descriptor, Ordering::Relaxed);
    WAKE.store(task.wake.as_fd().as_raw_fd(), Ordering::Relaxed);
    task.pipe.set(pipe).is_ok().then_some(task)
}

/// Waits until the thread has begun, and counts it then.
fn note_begun(task: &Task) {
    let deadline = now_ns() + BEGIN_WITHIN_NS;
    // Acquire: pairs with the Release in `run`: what the thread did to begin is over.
    while !task.has_begun.load(Ordering::Acquire) {
        if now_ns() > deadline {
            return;
        }
        // SAFETY: takes nothing.
        unsafe { libc::sched_yield() };
    }
    // Relaxed: read under the lock only, as the count is changed.
    task.is_quiescent.store(true, Ordering::Relaxed);
    threads::add_quiescent();
}

/// A detached thread without signals. Not by the standard library, whose threads allocate before
/// their code runs.
fn spawn(task: &Arc<OwnMapping<Task>>) -> bool {
    let argument = Arc::into_raw(task.clone());
    // SAFETY: the attributes and masks are initialised before they are used; the thread gets a
    // reference of its own, which is taken back if there is none. The C library leaves out of the
    // mask the signals that it uses itself.
    unsafe {
        let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
        let (mut all, mut before) = (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::<libc::sigset_t>::uninit());
        let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
        libc::sigfillset(all.as_mut_ptr());
        let mut failure = libc::pthread_attr_init(attributes.as_mut_ptr());
        if failure == 0 {
            libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES);
            libc::pthread_attr_setdetachstate(attributes.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            failure = libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), run, argument.cast_mut().cast());
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
        }
        if failure != 0 {
            drop(Arc::from_raw(argument));
        } else if let Some(stack) = threads::stack_of(thread.assume_init()) {
            // The thread waits for the lock.
            let _ = task.stack.set(stack);
        }
        failure == 0
    }
}

extern "C" fn run(argument: *mut c_void) -> *mut c_void {
    let argument = argument.cast_const().cast::<OwnMapping<Task>>();
    // SAFETY: `spawn` gave it a reference, which `end` takes; the task is not used after that. The
    // thread that started this one has the lock: what lies on the way to the task is a block of the
    // allocator's.
    let (counted, task) = unsafe { (Arc::from_raw(argument), &**argument) };
    // SAFETY: a C string of 15 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"freeflow-revoke".as_ptr()) };
    threads::note_own_quiescence();
    // Release: pairs with the Acquire in `note_begun`.
    task.has_begun.store(true, Ordering::Release);
    // The thread that started this one has the lock until the pipe is set.
    let begin = || {
        locked().with_as(task, |_| {
            task.stack.get().inspect(|stack| threads::note_own_stack(stack));
            (&**task.pending, task.pipe.get().map(AsRawFd::as_raw_fd))
        })
    };
    if let Ok((pending, Some(descriptor))) = catch_unwind(AssertUnwindSafe(begin)) {
        serve(task, pending, descriptor);
    }
    let _ = catch_unwind(AssertUnwindSafe(|| locked().with_as(task, |table| end(table, counted))));
    ptr::null_mut()
}

/// Carries out commands until there will be no more. What is to be shared waits until there is no
/// other command.
fn serve(task: &Task, pending: &PendingCommands, descriptor: RawFd) {
    let mut on_wake = || {
        if task.wake.drain() {
            // A thread that lent the lock is served on the way.
            let _ = catch_unwind(AssertUnwindSafe(|| locked().with_as(task, |_| ())));
        }
    };
    let wake = task.wake.as_fd().as_raw_fd();
    while let Some(command) = next_command(descriptor, &pending.commands, wake, &mut on_wake) {
        let carry_out = || locked().with_as(task, |table| carry_out(table, task, command));
        let Ok(outcome) = catch_unwind(AssertUnwindSafe(carry_out)) else {
            pending.commands.give_up();
            return;
        };
        match outcome {
            Outcome::Undone => pending.commands.give_up(),
            Outcome::Done | Outcome::Over => pending.commands.finish(),
        }
        let mut goes_on = outcome != Outcome::Over;
        while goes_on && !is_readable(descriptor, 0) {
            let follow = || locked().with_as(task, |table| (share_next(table, task), table.take_hint()));
            let Ok((Some(is_alive), hint)) = catch_unwind(AssertUnwindSafe(follow)) else { break };
            if let Some(line) = hint {
                line.write();
            }
            goes_on = is_alive;
        }
        if !goes_on {
            return;
        }
    }
}

/// `None`: there is none; else whether the session is alive.
fn share_next(table: &mut Table, task: &Task) -> Option<bool> {
    let session = task.session.upgrade()?;
    match table.next_share(task.serial)? {
        (ShareRequest::Segment(segment), _) => table.reshare(&session, segment),
        (ShareRequest::Addresses(addresses), count) => table.share(&session, addresses, count),
    }
    table.tidy(&session);
    Some(!session.is_dead())
}

/// `None`: there will be no more. `on_wake` is called when `wake` is readable.
fn next_command(
    descriptor: RawFd,
    commands: &RevokeCommands,
    wake: RawFd,
    on_wake: &mut dyn FnMut(),
) -> Option<[u8; COMMAND_BYTES]> {
    loop {
        let mut polled = [descriptor, wake].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        // SAFETY: two pollfds of ours.
        unsafe { libc::poll(polled.as_mut_ptr(), 2, -1) };
        let [command, woken] = polled;
        if woken.revents != 0 {
            on_wake();
        }
        if command.revents == 0 {
            continue;
        }
        let mut is_over = false;
        let command = commands.take(|| {
            let mut command = [0; COMMAND_BYTES];
            // SAFETY: the buffer is ours to write, for so many bytes.
            let count = unsafe { libc::read(descriptor, command.as_mut_ptr().cast(), COMMAND_BYTES) };
            // SAFETY: glibc gives the address of this thread's errno.
            let reason = unsafe { *libc::__errno_location() };
            is_over = count >= 0 || !matches!(reason, libc::EINTR | libc::EAGAIN);
            (count == COMMAND_BYTES as isize).then_some(command)
        });
        if command.is_some() || is_over {
            return command;
        }
    }
}

/// The result of a command.
#[derive(PartialEq, Eq)]
enum Outcome {
    Done,
    /// Not carried out: it stays pending, and a verb that waits for it waits for the end of the
    /// session.
    Undone,
    /// The session has ended.
    Over,
}

fn carry_out(table: &mut Table, task: &Task, command: [u8; COMMAND_BYTES]) -> Outcome {
    let Some(session) = task.session.upgrade() else { return Outcome::Over };
    let is_done = match MemoryCommand::decode(command) {
        // Memory that could not be taken back is not confirmed: then the router ends the session,
        // and its peers' access. An arena that is not known is gone already.
        MemoryCommand::Revoke(segment) => {
            let is_revoked = table.revoke(&session, segment);
            if is_revoked {
                let _ = session.confirm_revocation(segment);
            }
            is_revoked
        }
        MemoryCommand::Reshare(segment) => {
            table.queue_share(task.serial, ShareRequest::Segment(segment));
            true
        }
        MemoryCommand::Share(addresses) => {
            table.queue_share(task.serial, ShareRequest::Addresses(addresses));
            true
        }
        MemoryCommand::Unknown => true,
    };
    table.tidy(&session);
    match is_done {
        false => Outcome::Undone,
        true if session.is_dead() => Outcome::Over,
        true => Outcome::Done,
    }
}

/// The last thing that the thread does under the lock.
fn end(table: &mut Table, task: Arc<OwnMapping<Task>>) {
    table.note_commands_ended(task.serial);
    task.pending.set_pipe(-1);
    // Relaxed: as it was written; only this thread closes the descriptors.
    let forget = |newest: &AtomicI32, descriptor: BorrowedFd<'_>| {
        let _ = newest.compare_exchange(descriptor.as_raw_fd(), -1, Ordering::Relaxed, Ordering::Relaxed);
    };
    if let Some(pipe) = task.pipe.get() {
        forget(&DESCRIPTOR, pipe.as_fd());
    }
    forget(&WAKE, task.wake.as_fd());
    let is_quiescent = task.is_quiescent.load(Ordering::Relaxed);
    drop(task);
    if is_quiescent {
        threads::remove_quiescent();
    }
}

/// In a child of `fork`, which has no such thread. Only async-signal-safe calls.
pub(crate) fn reset_in_child() {
    threads::reset_quiescent();
    for newest in [&DESCRIPTOR, &WAKE] {
        // Relaxed: the child has one thread.
        let descriptor = newest.swap(-1, Ordering::Relaxed);
        if descriptor >= 0 {
            // SAFETY: its owner is a thread that is not here, and what that has is forgotten.
            unsafe { libc::close(descriptor) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::FromRawFd;

    #[test]
    fn commands_are_read_one_by_one_until_the_end() {
        for flags in [0, libc::O_NONBLOCK] {
            let mut ends = [-1; 2];
            // SAFETY: `ends` is ours to write, and the descriptors are new.
            let (read, write) = unsafe {
                assert_eq!(libc::pipe2(ends.as_mut_ptr(), flags | libc::O_CLOEXEC), 0);
                (OwnedFd::from_raw_fd(ends[0]), std::fs::File::from_raw_fd(ends[1]))
            };
            let writer = std::thread::spawn(move || {
                let mut write = write;
                for segment in [7_u64, 9] {
                    write.write_all(&segment.to_le_bytes()).unwrap();
                }
            });
            let commands = RevokeCommands::default();
            let segments = std::iter::from_fn(|| {
                let command = next_command(read.as_raw_fd(), &commands, -1, &mut || panic!("nobody wakes it"))?;
                assert!(commands.finished() < Some(commands.taken()));
                commands.finish();
                Some(command)
            });
            assert_eq!(
                segments.map(MemoryCommand::decode).collect::<Vec<_>>(),
                [MemoryCommand::Revoke(7), MemoryCommand::Revoke(9)]
            );
            assert_eq!(commands.finished(), Some(commands.taken()));
            writer.join().unwrap();
        }
    }

    #[test]
    fn a_verb_waits_for_the_commands_of_its_session_and_says_when_they_are_not_done() {
        let mut ends = [-1; 2];
        // SAFETY: `ends` is ours to write, and the descriptors are new.
        let (read, mut write) = unsafe {
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
            (OwnedFd::from_raw_fd(ends[0]), std::fs::File::from_raw_fd(ends[1]))
        };
        let (pending, accessors) = (PendingCommands::default(), PendingCommands::default());
        pending.set_pipe(read.as_raw_fd());
        assert_eq!(wait_for(&pending, u64::MAX, &|| panic!("nothing to wait for")), Ok(()));
        write.write_all(&7_u64.to_le_bytes()).unwrap();
        assert_eq!(wait_for(&accessors, u64::MAX, &|| panic!("another session's command")), Ok(()));
        assert_eq!(wait_for(&pending, 0, &|| true), Err(VerbsError::DeviceFatal), "waited for long enough");
        assert_eq!(wait_for(&pending, u64::MAX, &|| false), Err(VerbsError::DeviceFatal), "the session has ended");
        // Until it is carried out, wherever it is; the look at the session is one between two looks
        // at the commands.
        let looks = std::cell::Cell::new(0);
        let one_more = || {
            looks.set(looks.get() + 1);
            match looks.get() {
                2 => assert!(next_command(read.as_raw_fd(), &pending.commands, -1, &mut || {}).is_some()),
                4 => pending.commands.finish(),
                _ => {}
            }
            true
        };
        assert_eq!((wait_for(&pending, u64::MAX, &one_more), looks.get()), (Ok(()), 4));
        // Commands given while it waits are not waited for.
        pending.commands.take(|| Some(()));
        let late = std::cell::RefCell::new(|| {
            write.write_all(&9_u64.to_le_bytes()).unwrap();
            pending.commands.finish();
            true
        });
        assert_eq!(wait_for(&pending, u64::MAX, &|| (late.borrow_mut())()), Ok(()));
        assert!(next_command(read.as_raw_fd(), &pending.commands, -1, &mut || {}).is_some());
        pending.commands.give_up();
        pending.commands.finish();
        assert_eq!(wait_for(&pending, u64::MAX, &|| false), Err(VerbsError::DeviceFatal), "one was not carried out");
    }
}
