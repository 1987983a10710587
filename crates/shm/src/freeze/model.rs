//! The freezing of threads against a simulated kernel: every history with a few events, in each of
//! which a thread begins, ends, gives its number to another process, or stops late or for a signal.
//! Exhaustive up to those numbers, one event before each call of the kernel; not loom, since
//! nothing is shared.
//!
//! Each of these changes makes a test fail: one pass only; a last pass that met a thread which
//! ended before it was seized, or a zombie for the first time; a zombie that is never passed over;
//! no wait between passes; no second look at a number after it was seized; to detach a thread that
//! runs; to forget the signal that it stopped for; a thread that may not be traced taken for one
//! that has ended. Without the deadline for a caller that begins threads for ever, the limit of
//! their number ends that.
use super::*;
use std::cell::RefCell;

/// The thread that asks.
const CALLER: i32 = 1;
/// Time of a call of the kernel, and the shortest sleep, so that histories are short.
const CALL: Duration = Duration::from_micros(100);
const SLEEP: Duration = Duration::from_millis(5);
const LIMIT: Duration = Duration::from_millis(200);
const SIGNAL: i32 = 10;

/// The choices of one history; those after the last that was changed are made again.
#[derive(Default)]
struct Choices {
    path: Vec<(usize, usize)>,
    at: usize,
}

impl Choices {
    fn choose(&mut self, count: usize) -> usize {
        if count <= 1 {
            return 0;
        }
        if self.at == self.path.len() {
            self.path.push((0, count));
        }
        self.at += 1;
        self.path[self.at - 1].0
    }

    /// False: there were all.
    fn next(&mut self) -> bool {
        self.at = 0;
        while let Some((choice, count)) = self.path.pop() {
            if choice + 1 < count {
                self.path.push((choice + 1, count));
                return true;
            }
        }
        false
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Running,
    Stopped,
    /// Traced, and not waited for.
    Zombie,
    Gone,
}

#[derive(Clone, Debug)]
struct Thread {
    id: i32,
    life: Life,
    is_traced: bool,
    is_asked: bool,
    /// The signal that it stopped for, and the one that it was let go with.
    signals: (i32, i32),
    detach_count: u32,
    /// It sleeps where it can't be stopped.
    is_stuck: bool,
    /// A debugger has it.
    is_refused: bool,
    /// Of another process.
    is_foreign: bool,
    /// The process' first: it stays a zombie until the others have ended.
    is_first: bool,
}

impl Thread {
    fn new(id: i32) -> Self {
        Self {
            id,
            life: Life::Running,
            is_traced: false,
            is_asked: false,
            signals: (0, 0),
            detach_count: 0,
            is_stuck: false,
            is_refused: false,
            is_foreign: false,
            is_first: false,
        }
    }

    fn is_alive(&self) -> bool {
        matches!(self.life, Life::Running | Life::Stopped)
    }
}

/// Numbers of events that may still happen.
#[derive(Clone, Copy)]
struct Budget {
    events: u32,
    late_stops: u32,
    signals: u32,
    /// The caller begins one before each list.
    caller_begins: bool,
}

enum Event {
    /// Another thread, by this one.
    Begins,
    Ends,
    /// It ends, and another process gets its number.
    IsReplaced,
}

struct World {
    threads: Vec<Thread>,
    budget: Budget,
    begin: Instant,
    passed: Duration,
    choices: Choices,
}

impl World {
    /// The thread that has a number now.
    fn find(&mut self, id: i32) -> Option<&mut Thread> {
        self.threads.iter_mut().rev().find(|thread| thread.id == id && thread.life != Life::Gone)
    }

    fn begin_thread(&mut self) {
        let id = self.threads.iter().map(|thread| thread.id).max().unwrap() + 1;
        self.threads.push(Thread::new(id));
    }

    fn end_thread(&mut self, at: usize) {
        let thread = &mut self.threads[at];
        thread.life = if thread.is_traced || thread.is_first { Life::Zombie } else { Life::Gone };
    }

    /// Events before a call.
    fn step(&mut self) {
        self.passed += CALL;
        if self.budget.events == 0 {
            return;
        }
        let mut events = Vec::new();
        for (at, thread) in self.threads.iter().enumerate() {
            if thread.is_alive() && thread.id != CALLER && !thread.is_foreign {
                events.extend((thread.life == Life::Running).then_some((at, Event::Begins)));
                events.push((at, Event::Ends));
                events.extend((!thread.is_traced && !thread.is_first).then_some((at, Event::IsReplaced)));
            }
        }
        let choice = self.choices.choose(1 + events.len());
        let Some(event) = choice.checked_sub(1) else { return };
        match events[event] {
            (_, Event::Begins) => self.begin_thread(),
            (at, Event::Ends) => self.end_thread(at),
            (at, Event::IsReplaced) => {
                self.end_thread(at);
                self.threads.push(Thread { is_foreign: true, ..Thread::new(self.threads[at].id) });
            }
        }
        self.budget.events -= 1;
    }
}

struct Simulated<'a>(&'a RefCell<World>);

impl Tracer for Simulated<'_> {
    type Tasks<'a> = ();

    fn thread_ids(&self, (): ()) -> io::Result<Vec<i32>> {
        let world = &mut *self.0.borrow_mut();
        world.step();
        if world.budget.caller_begins {
            world.begin_thread();
        }
        let own = world.threads.iter().filter(|thread| !thread.is_foreign && thread.life != Life::Gone);
        Ok(own.map(|thread| thread.id).collect())
    }

    fn inner_id(&self, (): (), id: i32) -> Option<u32> {
        let world = &mut *self.0.borrow_mut();
        world.step();
        world.find(id).filter(|thread| !thread.is_foreign).map(|thread| thread.id as u32)
    }

    fn state(&self, (): (), id: i32) -> Option<u8> {
        let world = &mut *self.0.borrow_mut();
        let thread = world.find(id).filter(|thread| !thread.is_foreign)?;
        Some(match thread.life {
            Life::Running if thread.is_stuck => b'D',
            Life::Running => b'R',
            Life::Stopped => b't',
            Life::Zombie | Life::Gone => b'Z',
        })
    }

    fn seize(&self, id: i32) -> io::Result<()> {
        let world = &mut *self.0.borrow_mut();
        world.step();
        let thread = world.find(id).filter(|thread| thread.is_alive());
        let thread = thread.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
        if thread.is_refused || thread.is_traced {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        thread.is_traced = true;
        Ok(())
    }

    fn interrupt(&self, id: i32) {
        let world = &mut *self.0.borrow_mut();
        world.step();
        if let Some(thread) = world.find(id).filter(|thread| thread.is_traced) {
            thread.is_asked = true;
        }
    }

    fn poll(&self, id: i32) -> io::Result<Change> {
        let world = &mut *self.0.borrow_mut();
        world.step();
        let Budget { late_stops, signals, .. } = world.budget;
        let Some(thread) = world.find(id).filter(|thread| thread.is_traced) else { return Ok(Change::Ended) };
        if thread.life == Life::Zombie {
            (thread.life, thread.is_traced) = (if thread.is_first { Life::Zombie } else { Life::Gone }, false);
            return Ok(Change::Ended);
        }
        if thread.life == Life::Stopped || !thread.is_asked || thread.is_stuck {
            return Ok(Change::None);
        }
        let mut outcomes = vec![0];
        outcomes.extend((late_stops > 0).then_some(1));
        outcomes.extend((signals > 0).then_some(2));
        let outcome = outcomes[world.choices.choose(outcomes.len())];
        let thread = world.find(id).unwrap();
        match outcome {
            0 => {
                thread.life = Life::Stopped;
                Ok(Change::Stopped(Stop::Asked))
            }
            1 => {
                world.budget.late_stops -= 1;
                Ok(Change::None)
            }
            _ => {
                (thread.life, thread.signals.0) = (Life::Stopped, SIGNAL);
                world.budget.signals -= 1;
                Ok(Change::Stopped(Stop::Signal(SIGNAL)))
            }
        }
    }

    fn make_restartable(&self, id: i32) {
        let world = &mut *self.0.borrow_mut();
        assert!(world.find(id).is_some_and(|thread| thread.life != Life::Running), "it runs");
    }

    fn detach(&self, id: i32, signal: i32) -> io::Result<()> {
        let world = &mut *self.0.borrow_mut();
        world.step();
        let thread = world.find(id).filter(|thread| thread.is_traced && thread.life == Life::Stopped);
        let thread = thread.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
        (thread.life, thread.is_traced, thread.signals.1) = (Life::Running, false, signal);
        thread.detach_count += 1;
        Ok(())
    }

    fn now(&self) -> Instant {
        let world = self.0.borrow();
        world.begin + world.passed
    }

    fn give_way(&self) {
        self.0.borrow_mut().passed += CALL;
    }

    fn sleep(&self, span: Duration) {
        self.0.borrow_mut().passed += span.max(SLEEP);
    }
}

fn check_frozen(threads: &[Thread]) {
    for thread in threads.iter().filter(|thread| thread.is_alive()) {
        let stands_still = thread.life == Life::Stopped && thread.is_traced;
        let runs_free = thread.life == Life::Running && !thread.is_traced;
        let is_right = if thread.id == CALLER || thread.is_foreign { runs_free } else { stands_still };
        assert!(is_right, "frozen, and {thread:?}");
    }
}

fn check_released(threads: &[Thread]) {
    for thread in threads {
        // The kernel lets go of one that never stopped when the tracer's thread ends.
        let is_free = thread.is_stuck || !thread.is_traced;
        let is_gone = matches!(thread.life, Life::Zombie | Life::Gone);
        assert!(is_gone || thread.life == Life::Running && is_free, "released, and {thread:?}");
        assert!(thread.detach_count <= 1 && (is_gone || thread.signals.0 == thread.signals.1), "{thread:?}");
    }
}

/// Freezes and releases these threads in every history; what came of each freeze, and how many
/// there were.
fn explore(others: &[Thread], budget: Budget, expected: Option<io::ErrorKind>) -> usize {
    let mut choices = Choices::default();
    for count in 1.. {
        let mut threads = vec![Thread::new(CALLER)];
        threads.extend_from_slice(others);
        let world = World { threads, budget, begin: Instant::now(), passed: Duration::ZERO, choices };
        let world = RefCell::new(world);
        match Frozen::take(Simulated(&world), (), CALLER as u32, LIMIT) {
            Ok(frozen) => {
                assert_eq!(expected, None);
                check_frozen(&world.borrow().threads);
                drop(frozen);
            }
            Err(error) => {
                // The obstacle may have gone.
                assert_eq!(Some(error.kind()), expected);
            }
        }
        let world = world.into_inner();
        check_released(&world.threads);
        choices = world.choices;
        if !choices.next() {
            return count;
        }
    }
    unreachable!()
}

const NOTHING: Budget = Budget { events: 0, late_stops: 0, signals: 0, caller_begins: false };

#[test]
fn all_threads_stand_still_and_are_let_go_whatever_begins_and_ends() {
    let budget = Budget { events: 3, late_stops: 1, signals: 1, ..NOTHING };
    let one = explore(&[Thread::new(2)], budget, None);
    let two = [Thread { is_first: true, ..Thread::new(2) }, Thread::new(3)];
    let two = explore(&two, Budget { late_stops: 0, signals: 0, ..budget }, None);
    assert!(one > 1000 && two > 1000, "{one} and {two} histories only");
}

#[test]
fn a_thread_that_cannot_be_stopped_ends_the_attempt_and_all_go_on() {
    let others = [Thread::new(2), Thread { is_stuck: true, ..Thread::new(3) }, Thread::new(4)];
    let budget = Budget { late_stops: 1, signals: 1, ..NOTHING };
    assert!(explore(&others, budget, Some(io::ErrorKind::TimedOut)) > 1);
}

#[test]
fn a_thread_that_may_not_be_traced_ends_the_attempt_and_all_go_on() {
    let others = [Thread::new(2), Thread { is_refused: true, ..Thread::new(3) }, Thread::new(4)];
    let budget = Budget { late_stops: 2, signals: 1, ..NOTHING };
    assert!(explore(&others, budget, Some(io::ErrorKind::PermissionDenied)) > 1);
}

#[test]
fn a_caller_that_begins_threads_for_ever_is_refused() {
    let budget = Budget { caller_begins: true, ..NOTHING };
    assert_eq!(explore(&[], budget, Some(io::ErrorKind::TimedOut)), 1);
}
