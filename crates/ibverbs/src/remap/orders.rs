//! The thread that carries out the router's orders: one for each session that places anything in own zones.
//!
//! A program that looks at its threads sees one more, `freeflow-orders`, from its first registration with remote rights on
//! (none where the router grants nothing, or with `FREEFLOW_REMAP=off`). It takes no signals. The C library then takes
//! its locks as for any program of several threads, and what the kernel allows only a process of one thread (a new user
//! namespace) is to be done before.
//!
//! Invariant: the thread waits in `poll`, or for the table's lock; all else that it does, from its beginning to its end, it
//! does while it or who started it has that lock. So pages can be moved as if it were not there, and `fork` finds it
//! holding no lock of the child's.
//!
//! Invariant: who waits for an answer of the router with the table's lock, or the session's, waits for no order: the
//! router answers everything else without waiting for what it has ordered.
use super::{Table, locked};
use freeflow_client::{Awaited, ORDER_BYTES, Order, OrdersInHand, RevokeCommands, Session, WITHDRAWAL_TIME_MAX_MS};
use freeflow_verbs::VerbsError;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// What the C library and a program's own thread-local data need, and what is done here.
const STACK_BYTES: usize = 256 << 10;
/// A thread that has not begun by then is one of the program's as far as anybody here knows.
const BEGIN_WITHIN_NS: u64 = 1_000_000_000;

/// Threads of this kind that nobody needs to hold. Changes under the table's lock.
static QUIET_COUNT: AtomicU64 = AtomicU64::new(0);
/// The newest one's pipe, or -1.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);

/// The longest wait for the next order to be carried out: by then the router has ended a session that does not do it.
const SETTLE_NS: u64 = (WITHDRAWAL_TIME_MAX_MS + 5_000) * 1_000_000;
/// A wait looks often at first; most orders are done in a few milliseconds.
const SETTLE_OFTEN_NS: u64 = 20_000_000;
const SETTLE_OFTEN: Duration = Duration::from_micros(20);
const SETTLE_SELDOM: Duration = Duration::from_millis(2);

/// Waits until the orders to take memory back are carried out that the router has given this session so far: what a verb ended, no
/// peer reaches when it returns. Not under the table's lock.
///
/// # Errors
/// DeviceFatal: they were not, and the session is over.
pub(crate) fn settle(session: &Session) -> Result<(), VerbsError> {
    let orders = session.orders_in_hand();
    // Of a session that was dead before, everything has ended; nobody waits for what that leaves.
    if session.is_dead() {
        return Ok(());
    }
    wait_for(orders, SETTLE_NS, &|| session.check())
}

/// `is_alive`: whether the session is. `limit_ns`: how long it may take until one more order is finished.
fn wait_for(orders: &OrdersInHand, limit_ns: u64, is_alive: &dyn Fn() -> bool) -> Result<(), VerbsError> {
    let mut awaited = Awaited::default();
    let (begin, mut last) = (super::moving::now_ns(), None);
    let mut advanced = begin;
    while awaited.are_pending(&orders.commands, || has_unread(orders)) {
        let now = super::moving::now_ns();
        let finished = orders.commands.finished();
        if last.replace(finished) != Some(finished) {
            advanced = now;
        }
        if now.saturating_sub(advanced) > limit_ns || !is_alive() {
            return Err(VerbsError::DeviceFatal);
        }
        let is_soon = now.saturating_sub(begin) < SETTLE_OFTEN_NS;
        std::thread::sleep(if is_soon { SETTLE_OFTEN } else { SETTLE_SELDOM });
    }
    Ok(())
}

fn has_unread(orders: &OrdersInHand) -> bool {
    let pipe = orders.pipe();
    pipe >= 0 && is_readable(pipe, 0)
}

fn is_readable(descriptor: RawFd, timeout_ms: i32) -> bool {
    let mut polled = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd of ours.
    let count = unsafe { libc::poll(&raw mut polled, 1, timeout_ms) };
    count > 0 && polled.revents & libc::POLLIN != 0
}

/// What a thread gets.
struct Task {
    /// Weak: the session ends with the program's last use of it, and the pipe with the session.
    session: Weak<Session>,
    serial: u64,
    in_hand: Arc<OrdersInHand>,
    /// Without one it ends.
    pipe: OnceLock<OwnedFd>,
    /// It waits for orders.
    has_begun: AtomicBool,
    /// It is among [`QUIET_COUNT`].
    is_quiet: AtomicBool,
}

/// How many threads there are besides the program's own. For who has the table's lock.
pub(crate) fn quiet_count() -> u64 {
    // Acquire: pairs with the Release in `end`; a thread that the kernel does not show any more is not counted.
    QUIET_COUNT.load(Ordering::Acquire)
}

/// Asks for orders, and starts the thread for them. False: there will be none. Under the table's lock.
pub(crate) fn start(session: &Arc<Session>) -> bool {
    let (has_begun, is_quiet) = (AtomicBool::new(false), AtomicBool::new(false));
    let serial = session.serial();
    let in_hand = session.orders_in_hand().clone();
    let pipe = OnceLock::new();
    let task = Arc::new(Task { session: Arc::downgrade(session), serial, in_hand, pipe, has_begun, is_quiet });
    // First: once the router has said yes, it counts on somebody who reads. The thread waits for the lock.
    if !spawn(&task) {
        return false;
    }
    note_begun(&task);
    let Ok(pipe) = session.open_orders() else { return false };
    let descriptor = pipe.as_raw_fd();
    task.in_hand.set_pipe(descriptor);
    // Relaxed: read by a child of `fork`, which this thread or a later holder of the lock makes.
    DESCRIPTOR.store(descriptor, Ordering::Relaxed);
    task.pipe.set(pipe).is_ok()
}

/// Waits until the thread has begun, and counts it then.
fn note_begun(task: &Task) {
    let deadline = super::moving::now_ns() + BEGIN_WITHIN_NS;
    // Acquire: pairs with the Release in `run`: what the thread did to begin is over.
    while !task.has_begun.load(Ordering::Acquire) {
        if super::moving::now_ns() > deadline {
            return;
        }
        // SAFETY: takes nothing.
        unsafe { libc::sched_yield() };
    }
    // Relaxed: read under the lock only, as the count is changed.
    task.is_quiet.store(true, Ordering::Relaxed);
    QUIET_COUNT.fetch_add(1, Ordering::Relaxed);
}

/// A detached thread without signals. Not by the standard library, whose threads allocate before their code runs.
fn spawn(task: &Arc<Task>) -> bool {
    let argument = Arc::into_raw(task.clone());
    // SAFETY: the attributes and masks are initialised before they are used; the thread gets a reference of its own,
    // which is taken back if there is none. The C library leaves out of the mask the signals that it uses itself.
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
        }
        failure == 0
    }
}

extern "C" fn run(argument: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` gave it a reference, which `end` takes.
    let task = unsafe { Arc::from_raw(argument.cast_const().cast::<Task>()) };
    // SAFETY: a C string of 15 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"freeflow-orders".as_ptr()) };
    // Release: pairs with the Acquire in `note_begun`.
    task.has_begun.store(true, Ordering::Release);
    // Who started it has the lock until it has the pipe.
    let pipe = catch_unwind(AssertUnwindSafe(|| locked().with(|_| task.pipe.get().map(AsRawFd::as_raw_fd))));
    if let Ok(Some(descriptor)) = pipe {
        serve(&task, descriptor);
    }
    let _ = catch_unwind(AssertUnwindSafe(|| locked().with(|table| end(table, task))));
    ptr::null_mut()
}

/// Until there are no more. Advice waits until there is no other order.
fn serve(task: &Task, descriptor: RawFd) {
    while let Some(order) = next_order(descriptor, &task.in_hand.commands) {
        let carry_out = || locked().with(|table| carry_out(table, task, order));
        let Ok(outcome) = catch_unwind(AssertUnwindSafe(carry_out)) else {
            task.in_hand.commands.give_up();
            return;
        };
        match outcome {
            Outcome::Undone => task.in_hand.commands.give_up(),
            Outcome::Done | Outcome::Over => task.in_hand.commands.finish(),
        }
        let mut goes_on = outcome != Outcome::Over;
        while goes_on && !is_readable(descriptor, 0) {
            let follow = || locked().with(|table| follow_advice(table, task));
            let Ok(Some(is_alive)) = catch_unwind(AssertUnwindSafe(follow)) else { break };
            goes_on = is_alive;
        }
        if !goes_on {
            return;
        }
    }
}

/// `None`: there is none; else whether the session is alive.
fn follow_advice(table: &mut Table, task: &Task) -> Option<bool> {
    let session = task.session.upgrade()?;
    let segment = table.next_advice(task.serial)?;
    table.share_again(&session, segment);
    table.tidy(&session);
    Some(!session.is_dead())
}

/// `None`: there will be no more.
fn next_order(descriptor: RawFd, commands: &RevokeCommands) -> Option<[u8; ORDER_BYTES]> {
    loop {
        is_readable(descriptor, -1);
        let mut is_over = false;
        let order = commands.take(|| {
            let mut order = [0; ORDER_BYTES];
            // SAFETY: the buffer is ours to write, for so many bytes.
            let count = unsafe { libc::read(descriptor, order.as_mut_ptr().cast(), ORDER_BYTES) };
            // SAFETY: glibc gives the address of this thread's errno.
            let reason = unsafe { *libc::__errno_location() };
            is_over = count >= 0 || !matches!(reason, libc::EINTR | libc::EAGAIN);
            (count == ORDER_BYTES as isize).then_some(order)
        });
        if order.is_some() || is_over {
            return order;
        }
    }
}

/// What became of an order.
#[derive(PartialEq, Eq)]
enum Outcome {
    Done,
    /// Not carried out: it stays in hand, and who waits for it waits for the end of the session.
    Undone,
    /// The session is of no use any more.
    Over,
}

fn carry_out(table: &mut Table, task: &Task, order: [u8; ORDER_BYTES]) -> Outcome {
    let Some(session) = task.session.upgrade() else { return Outcome::Over };
    let is_done = match Order::decode(order) {
        // What could not be taken back is not confirmed: then the router ends the session, and with it its peers' ways here.
        // A zone that is not known is gone already.
        Order::TakeBack(segment) => {
            let is_back = table.take_back(&session, segment);
            if is_back {
                let _ = session.confirm_withdrawal(segment);
            }
            is_back
        }
        Order::ShareAgain(segment) => {
            table.note_advice(task.serial, segment);
            true
        }
        Order::Unknown => true,
    };
    table.tidy(&session);
    match is_done {
        false => Outcome::Undone,
        true if session.is_dead() => Outcome::Over,
        true => Outcome::Done,
    }
}

/// What follows in this thread is the C library's: whoever moves pages has to hold it again.
fn end(table: &mut Table, task: Arc<Task>) {
    table.note_end_of_orders(task.serial);
    task.in_hand.set_pipe(-1);
    // Relaxed: as it was written; only this thread closes the descriptor.
    if let Some(pipe) = task.pipe.get() {
        let _ = DESCRIPTOR.compare_exchange(pipe.as_raw_fd(), -1, Ordering::Relaxed, Ordering::Relaxed);
    }
    let is_quiet = task.is_quiet.load(Ordering::Relaxed);
    drop(task);
    if is_quiet {
        // Release: pairs with the Acquire in `quiet_count`.
        QUIET_COUNT.fetch_sub(1, Ordering::Release);
    }
}

/// In a child of `fork`, which has no such thread. Only async-signal-safe calls.
pub(crate) fn forget_in_child() {
    // Relaxed: the child has one thread.
    QUIET_COUNT.store(0, Ordering::Relaxed);
    let descriptor = DESCRIPTOR.swap(-1, Ordering::Relaxed);
    if descriptor >= 0 {
        // SAFETY: its owner is a thread that is not here, and what that has is forgotten.
        unsafe { libc::close(descriptor) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn orders_are_read_one_by_one_until_the_end() {
        for flags in [0, libc::O_NONBLOCK] {
            let mut ends = [-1; 2];
            // SAFETY: `ends` is ours to write, and the descriptors are new.
            let (read, write) = unsafe {
                assert_eq!(libc::pipe2(ends.as_mut_ptr(), flags | libc::O_CLOEXEC), 0);
                use std::os::fd::FromRawFd;
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
                let order = next_order(read.as_raw_fd(), &commands)?;
                assert!(commands.finished() < Some(commands.taken()));
                commands.finish();
                Some(order)
            });
            assert_eq!(segments.map(Order::decode).collect::<Vec<_>>(), [Order::TakeBack(7), Order::TakeBack(9)]);
            assert_eq!(commands.finished(), Some(commands.taken()));
            writer.join().unwrap();
        }
    }

    #[test]
    fn a_verb_waits_for_the_orders_of_its_session_and_says_when_they_are_not_done() {
        let mut ends = [-1; 2];
        // SAFETY: `ends` is ours to write, and the descriptors are new.
        let (read, mut write) = unsafe {
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
            use std::os::fd::FromRawFd;
            (OwnedFd::from_raw_fd(ends[0]), std::fs::File::from_raw_fd(ends[1]))
        };
        let (orders, others) = (OrdersInHand::default(), OrdersInHand::default());
        orders.set_pipe(read.as_raw_fd());
        assert_eq!(wait_for(&orders, u64::MAX, &|| panic!("nothing to wait for")), Ok(()));
        write.write_all(&7_u64.to_le_bytes()).unwrap();
        assert_eq!(wait_for(&others, u64::MAX, &|| panic!("another session's order")), Ok(()));
        assert_eq!(wait_for(&orders, 0, &|| true), Err(VerbsError::DeviceFatal), "waited for long enough");
        assert_eq!(wait_for(&orders, u64::MAX, &|| false), Err(VerbsError::DeviceFatal), "the session has ended");
        // Until it is carried out, wherever it is; the look at the session is one between two looks at the orders.
        let looks = std::cell::Cell::new(0);
        let one_more = || {
            looks.set(looks.get() + 1);
            match looks.get() {
                2 => assert!(next_order(read.as_raw_fd(), &orders.commands).is_some()),
                4 => orders.commands.finish(),
                _ => {}
            }
            true
        };
        assert_eq!((wait_for(&orders, u64::MAX, &one_more), looks.get()), (Ok(()), 4));
        // What is given while it waits is not waited for.
        orders.commands.take(|| Some(()));
        let late = std::cell::RefCell::new(|| {
            write.write_all(&9_u64.to_le_bytes()).unwrap();
            orders.commands.finish();
            true
        });
        assert_eq!(wait_for(&orders, u64::MAX, &|| (late.borrow_mut())()), Ok(()));
        assert!(next_order(read.as_raw_fd(), &orders.commands).is_some());
        orders.commands.give_up();
        orders.commands.finish();
        assert_eq!(wait_for(&orders, u64::MAX, &|| false), Err(VerbsError::DeviceFatal), "one was not carried out");
    }
}
