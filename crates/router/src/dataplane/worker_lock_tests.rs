//! Commands while the worker sleeps: who does them, in which order, and what wakes the worker.
use crate::dataplane::command::{Ask, Call, Submission, Ticket, UpdatePeers};
use crate::dataplane::event::Event;
use crate::dataplane::handle::WorkerHandle;
use crate::dataplane::lone_worker::LoneWorker;
use crate::dataplane::ports::Attention;
use crate::dataplane::waiting::{Next, Sleeper};
use crate::dataplane::worker::Lock;
use crate::dataplane::worker::Worker;
use crate::memory::blocking_memory::BlockingMemory;
use crate::memory::grants_tests::{End, connect, make_qp};
use crate::peering::Update;
use freeflow_engine::{CqId, HostId};
use freeflow_shm::{SendDescriptor, monotonic_ns};
use freeflow_verbs::{Duration, Gid, Instant, NetworkId, SendFlags, SendOpcode};
use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};

/// A worker that sleeps, and two connected QPs.
struct Rig {
    handle: WorkerHandle,
    sleeper: Sleeper,
    ends: [End; 2],
    events: Receiver<Event>,
    /// Commands that were done.
    done: Arc<Mutex<Vec<u32>>>,
}

impl Rig {
    fn new() -> Self {
        let LoneWorker { mut worker, commands, waker, events, .. } = LoneWorker::new();
        let memory = Arc::new(BlockingMemory::default());
        let ends = [2, 3].map(|host| make_qp(&mut worker, host, &memory));
        connect(&mut worker, &ends[0], &ends[1]);
        connect(&mut worker, &ends[1], &ends[0]);
        let (sleeper, lock) = (worker.waiting.sleeper(), Arc::new(Lock::default()));
        *lock.acquire() = Some(worker);
        let handle = WorkerHandle { commands, waker, lock };
        let rig = Self { handle, sleeper, ends, events, done: Arc::default() };
        rig.put_to_sleep();
        rig
    }

    fn with<T>(&self, what: impl FnOnce(&mut Worker) -> T) -> T {
        what(self.handle.lock.acquire().as_mut().unwrap())
    }

    fn turn(&self) -> Next {
        self.with(|worker| {
            let now = Instant(monotonic_ns());
            let busy = worker.turn(now);
            worker.keep_house(now);
            worker.wait(now, busy)
        })
    }

    fn put_to_sleep(&self) {
        while self.turn() == Next::Turn {}
    }

    /// Whether somebody rang; it is awake for a moment then.
    fn is_woken(&self) -> bool {
        let mut tokens = Vec::new();
        let lock = &self.handle.lock;
        drop(self.sleeper.sleep((lock, lock.acquire()), Some(Duration(0)), &mut tokens));
        let is_woken = !tokens.is_empty();
        match is_woken {
            true => self.with(|worker| worker.unpark(&mut tokens)),
            false => self.handle.waker.set_sleeping(true),
        }
        is_woken
    }

    /// A command that leaves its number, after it was put off so many times, and what `leave` does.
    fn command(
        &self,
        number: u32,
        mut put_off: u32,
        leave: impl Fn(&mut Worker, Instant) + Send + 'static,
    ) -> Submission {
        let done = self.done.clone();
        let run = Box::new(move |worker: &mut dyn Any, now: Instant| {
            if put_off > 0 {
                put_off -= 1;
                return true;
            }
            done.lock().unwrap().push(number);
            leave(worker.downcast_mut().unwrap(), now);
            false
        });
        Submission { ticket: Some(Ticket(number.into())), command: Call { run }.into_command(), bound: None }
    }

    fn plain(&self, number: u32) -> Submission {
        self.command(number, 0, |_, _| {})
    }

    /// The first end's.
    fn hand_over(&self, submission: Submission) {
        self.handle.hand_over(Some(self.ends[0].session), submission);
    }

    fn done(&self) -> Vec<u32> {
        self.done.lock().unwrap().clone()
    }
}

#[test]
fn a_command_is_done_while_the_worker_sleeps_and_does_not_wake_it() {
    let rig = Rig::new();
    for number in 0..100 {
        rig.hand_over(rig.plain(number));
    }
    assert_eq!((rig.done().len(), rig.events.try_iter().count()), (100, 100));
    assert!(!rig.is_woken());
}

#[test]
fn what_other_hosts_say_does_not_wake_the_worker_and_comes_in_order() {
    let rig = Rig::new();
    let backlog = Arc::new(AtomicUsize::new(2));
    let (host, network, gid) = (Some(HostId(3)), NetworkId(1), Gid([9; 16]));
    let update = |host| {
        let updates = vec![Update::Route { network, gid, host }];
        let command = UpdatePeers { updates, backlog: backlog.clone() }.into_command();
        rig.handle.hand_over(None, Submission { ticket: None, command, bound: None });
    };
    let route = || rig.with(|worker| worker.ports.fabric.routes.get(&(network, gid)).copied());
    update(host);
    assert_eq!((route(), backlog.load(Relaxed), rig.is_woken()), (host, 1, false));
    // Behind a command that waits in the worker's queue it waits, too.
    rig.handle.submit(rig.plain(1));
    update(None);
    assert_eq!((route(), rig.done().len(), rig.is_woken()), (host, 0, true));
    rig.turn();
    assert_eq!((route(), rig.done().len(), backlog.load(Relaxed)), (None, 1, 0));
}

#[test]
fn a_pause_of_the_router_is_noted_by_who_runs_first() {
    let rig = Rig::new();
    let now = Instant(monotonic_ns());
    rig.with(|worker| worker.due_at = Instant(now.0 - 3_000_000_000));
    rig.hand_over(rig.plain(1));
    assert_eq!(rig.done(), [1]);
    assert!(rig.with(|worker| worker.ports.resumed_at) >= now, "nobody's time is up by it");
}

#[test]
fn who_is_awake_does_its_commands_itself() {
    let rig = Rig::new();
    rig.handle.waker.set_sleeping(false);
    rig.hand_over(rig.plain(1));
    // It may have been about to sleep, and has been stopped from it.
    rig.with(|worker| worker.unpark(&mut Vec::new()));
    rig.handle.waker.set_sleeping(true);
    rig.hand_over(rig.plain(2));
    assert!(rig.done().is_empty());
    rig.turn();
    assert_eq!(rig.done(), [1, 2]);
    // Nor does anybody wait for the holder of the lock.
    rig.put_to_sleep();
    rig.with(|_| rig.hand_over(rig.plain(3)));
    assert_eq!(rig.done(), [1, 2]);
    assert!(rig.is_woken());
}

#[test]
fn commands_are_done_in_their_order() {
    let rig = Rig::new();
    rig.handle.submit(rig.plain(1));
    rig.hand_over(rig.plain(2));
    assert!(rig.done().is_empty() && rig.is_woken());
    rig.put_to_sleep();
    assert_eq!(rig.done(), [1, 2]);
    // One that has to be asked again is the worker's, and so is what comes after it.
    rig.hand_over(rig.command(3, 2, |_, _| {}));
    rig.hand_over(rig.plain(4));
    assert_eq!(rig.done(), [1, 2]);
    assert!(rig.is_woken());
    rig.put_to_sleep();
    rig.hand_over(rig.plain(5));
    assert_eq!(rig.done(), [1, 2, 4, 3, 5]);
    assert!(!rig.is_woken());
}

#[test]
fn what_was_posted_before_comes_before_a_command() {
    let rig = Rig::new();
    let ring = |session| {
        rig.with(|worker| {
            let session = worker.ports.sessions.get(session).unwrap();
            assert!(session.segment.ring(1), "a sleeping router is kicked");
            session.kick.kick();
        });
    };
    ring(rig.ends[0].session);
    rig.hand_over(rig.plain(1));
    assert!(rig.done().is_empty() && rig.is_woken());
    rig.put_to_sleep();
    assert_eq!(rig.done(), [1]);
    // Other processes' commands don't wait for what one posted.
    ring(rig.ends[1].session);
    rig.hand_over(rig.plain(2));
    assert_eq!(rig.done(), [1, 2]);
}

#[test]
fn what_is_due_before_the_worker_wakes_wakes_it() {
    let rig = Rig::new();
    let cq = CqId { index: 9, generation: 9 };
    let appoint = |span: Duration| {
        rig.command(0, 0, move |worker, now| {
            worker.ports.schedule.insert((now + span, cq));
        })
    };
    rig.with(|worker| worker.ports.schedule.insert((Instant(monotonic_ns()) + Duration::from_millis(100_000), cq)));
    // After a command there is something to publish in a moment.
    rig.hand_over(rig.plain(0));
    rig.is_woken();
    rig.put_to_sleep();
    rig.hand_over(appoint(Duration::from_millis(200_000)));
    assert!(!rig.is_woken(), "it wakes before that anyway");
    rig.hand_over(appoint(Duration(1)));
    assert!(rig.is_woken());
}

#[test]
fn queue_pairs_with_nothing_to_do_rest_and_work_requests_are_the_workers() {
    let mut rig = Rig::new();
    let id = rig.ends[0].qp;
    let activate = |rig: &Rig| rig.hand_over(rig.command(0, 0, move |worker, _| worker.activate(id)));
    let attention = |rig: &Rig| rig.with(|worker| worker.ports.qps.get(id).unwrap().attention);
    let taken = |rig: &Rig| rig.with(|worker| worker.ports.qps.get(id).unwrap().send.taken());
    activate(&rig);
    assert!(!rig.is_woken());
    assert_eq!(attention(&rig), Attention::Doorbell);
    let request = SendDescriptor {
        wr_id: 0,
        opcode: SendOpcode::RdmaWrite,
        flags: SendFlags(0),
        immediate: 0,
        remote_address: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        remote_srqn: 0,
        sges: &[],
        inline: None,
    };
    rig.ends[0].send.publish_send(&request);
    activate(&rig);
    assert_eq!((attention(&rig), taken(&rig)), (Attention::Running, 0));
    assert!(rig.is_woken());
    rig.turn();
    assert_eq!(taken(&rig), 1);
}

#[test]
fn a_command_that_panics_ends_the_router_by_the_worker() {
    let rig = Rig::new();
    rig.hand_over(rig.command(0, 0, |_, _| panic!("a command's own fault")));
    let mut tokens = Vec::new();
    rig.sleeper.block(Some(Duration(0)), &mut tokens);
    assert!(!tokens.is_empty(), "the worker is not woken");
    let takes = std::panic::AssertUnwindSafe(|| drop(rig.handle.lock.acquire()));
    assert!(std::panic::catch_unwind(takes).is_err(), "it goes on with what is half done");
}

#[test]
fn sessions_with_inline_commands_in_turn_are_no_crowd() {
    let rig = Rig::new();
    for session in [rig.ends[0].session, rig.ends[1].session] {
        rig.hand_over(rig.command(0, 0, move |worker, _| worker.ports.note_busy(session)));
    }
    std::thread::sleep(std::time::Duration::from_millis(5));
    rig.with(|worker| {
        assert_eq!(worker.ports.busy_session_count, 2);
        worker.unpark(&mut Vec::new());
        assert_eq!(worker.ports.busy_session_count, 0);
    });
}
