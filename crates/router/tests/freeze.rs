//! Frozen threads and parts of segments, asked for by a library that is an enemy. The router is a
//! process of its own, which freezes the threads of this one: so there is one test only.
mod common;

use common::process::Process;
use common::*;
use freeflow_protocol::library::{Reply, Request};
use freeflow_shm::SendDescriptor;
use freeflow_verbs::{CompletionStatus, QpType, SendOpcode, VerbsError};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The router lets go after one second; what it takes to notice that, on a machine that is busy.
const BOUND: Duration = Duration::from_millis(2500);
const PAGE: u64 = 4096;

/// A thread that counts on, so that others see whether it runs.
struct Runner(Arc<AtomicU64>, Arc<AtomicBool>);

impl Runner {
    fn start() -> Self {
        let runner = Self(Arc::default(), Arc::default());
        let (count, end) = (runner.0.clone(), runner.1.clone());
        std::thread::spawn(move || {
            while !end.load(Relaxed) {
                count.fetch_add(1, Relaxed);
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        runner
    }

    fn moves_within(&self, time: Duration) -> bool {
        let (before, begin) = (self.0.load(Relaxed), Instant::now());
        while begin.elapsed() < time {
            if self.0.load(Relaxed) != before {
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.1.store(true, Relaxed);
    }
}

fn own_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

fn freeze(client: &Client) -> Reply {
    client.ask(&Request::FreezeThreads { thread: own_id(), quiesce: false })
}

/// The router gives up when the threads don't stop soon, as on a machine that is busy: then it is asked again.
fn frozen(client: &Client) {
    until("the threads to stop", || match freeze(client) {
        Reply::Done => Some(()),
        Reply::Failed(VerbsError::TimedOut) => None,
        other => panic!("{other:?}"),
    });
}

/// Freezes the threads and lets them go, in time unless the machine is busy.
fn freeze_and_thaw(client: &Client) {
    frozen(client);
    let reply = client.ask(&Request::ThawThreads);
    assert!(matches!(reply, Reply::Done | Reply::Failed(VerbsError::TimedOut)), "{reply:?}");
}

const STILL: Duration = Duration::from_millis(100);
/// Less than the time for which the router freezes threads. What took longer on a busy machine says
/// nothing.
const IN_TIME: Duration = Duration::from_millis(900);

/// Tries until it was quick enough.
fn who_never_releases_is_released(client: &Client, runner: &Runner) {
    until("a test in time", || {
        frozen(client);
        let began = Instant::now();
        let moved = runner.moves_within(STILL);
        let again = freeze(client);
        let is_in_time = began.elapsed() < IN_TIME;
        if is_in_time {
            assert!(!moved);
            assert_eq!(again, Reply::Failed(VerbsError::Busy));
        }
        assert!(runner.moves_within(BOUND));
        let released = client.ask(&Request::ThawThreads);
        if is_in_time {
            assert_eq!(released, Reply::Failed(VerbsError::TimedOut));
            assert_eq!(client.refused(&Request::ThawThreads), VerbsError::NotFound);
        }
        is_in_time.then_some(())
    });
    // Others' threads and none at all: nobody stands still afterwards.
    for thread in [0, 1, u32::MAX] {
        assert_eq!(
            client.refused(&Request::FreezeThreads { thread, quiesce: false }),
            VerbsError::NotFound,
            "{thread}"
        );
        assert!(runner.moves_within(BOUND));
    }
}

/// The name of the router's threads that freeze others' threads.
const FREEZER: &str = "ff-freezer";

fn many_holds_are_one_thread_each(router: &Process, path: &Path, client: &Client, runner: &Runner) {
    for _ in 0..100 {
        freeze_and_thaw(client);
    }
    let before = router.threads(FREEZER);
    assert!(before > 0);
    let more: Vec<Client> = (0..8).map(|_| Client::connect(path)).collect();
    for client in &more {
        for _ in 0..10 {
            freeze_and_thaw(client);
        }
    }
    assert!(router.threads(FREEZER) <= before + more.len());
    // A process that is frozen already is not frozen twice, and refused at once.
    until("a test in time", || {
        frozen(client);
        let begin = Instant::now();
        let refusal = freeze(&more[0]);
        let is_in_time = begin.elapsed() < IN_TIME;
        if is_in_time {
            assert_eq!(refusal, Reply::Failed(VerbsError::NotPermitted));
        }
        for client in [client, &more[0]] {
            let _ = client.ask(&Request::ThawThreads);
        }
        is_in_time.then_some(())
    });
    // A holder that hangs up lets go.
    frozen(&more[1]);
    drop(more);
    assert!(runner.moves_within(BOUND));
    until("the freezers' threads to end", || (router.threads(FREEZER) < before + 1).then_some(()));
}

/// The thread that is left out makes threads that end, for ever.
fn who_makes_threads_is_given_up(client: &Client, runner: &Runner) {
    let (end, id) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let maker = std::thread::spawn({
        let (end, id) = (end.clone(), id.clone());
        move || {
            id.store(own_id().into(), Relaxed);
            let begin = Instant::now();
            while !end.load(Relaxed) && begin.elapsed() < 4 * BOUND {
                // Those that stand still can't be waited for.
                let _ = std::thread::Builder::new().stack_size(64 << 10).spawn(|| {});
                std::thread::sleep(Duration::from_micros(300));
            }
        }
    });
    let thread = until("the thread's ID", || Some(id.load(Relaxed) as u32).filter(|id| *id != 0));
    let begin = Instant::now();
    // Frozen itself, while it waits for the answer.
    let _ = client.ask(&Request::FreezeThreads { thread, quiesce: false });
    let took = begin.elapsed();
    end.store(true, Relaxed);
    maker.join().unwrap();
    // Half of what the maker of threads runs for: that the router gave it up, and not it the router.
    assert!(took < 2 * BOUND, "{took:?}");
    let _ = client.ask(&Request::ThawThreads);
    assert!(runner.moves_within(BOUND));
}

/// Quiesced, too, unless the machine is busy.
fn held_quiet(client: &Client) {
    until("the threads and the router to stop", || {
        match client.ask(&Request::FreezeThreads { thread: own_id(), quiesce: true }) {
            Reply::Done => Some(()),
            Reply::Failed(VerbsError::TimedOut | VerbsError::Busy) => None,
            other => panic!("{other:?}"),
        }
    });
}

const WORDS: usize = 64 << 10;

/// Two processes, as the router sees it, of which the second is written to by address.
struct Written {
    a: Client,
    b: Client,
    cq: Cq,
    qp: Qp,
    from: Memory,
    to: Memory,
}

impl Written {
    fn new(paths: [&Path; 2]) -> Self {
        let [mut a, mut b] = paths.map(Client::connect);
        let (cq, b_cq) = (a.create_cq(64, None), b.create_cq(64, None));
        let (qp, b_qp) = (a.create_qp(QpType::Rc, &cq), b.create_qp(QpType::Rc, &b_cq));
        a.connect_rc(&qp, b.gid(), b_qp.qpn, 14);
        b.connect_rc(&b_qp, a.gid(), qp.qpn, 14);
        let (from, to) = (a.memory(WORDS, true), b.memory(WORDS, false));
        Self { a, b, cq, qp, from, to }
    }

    fn post(&mut self) {
        let sges = [self.from.sge(0, WORDS as u32 * 8)];
        let (remote_address, rkey) = (self.to.address, self.to.mr.rkey);
        self.a
            .post_send(&mut self.qp, &SendDescriptor { remote_address, rkey, ..request(SendOpcode::RdmaWrite, &sges) });
    }

    fn is_done(&mut self, seed: u64) {
        assert_eq!(self.cq.wait().status, CompletionStatus::Success);
        assert!(self.to.is_filled(WORDS, seed), "round {seed}");
    }

    fn contents(&self) -> Vec<u64> {
        (0..WORDS).map(|at| self.to.word(at).load(Relaxed)).collect()
    }
}

/// A WRITE that is under way, in whatever piece of it, changes nothing as long as the process may
/// move its pages, and is whole afterwards.
fn memory_stands_still_while_it_is_moved(paths: [&Path; 2]) {
    let mut rig = Written::new(paths);
    let mut in_time = 0;
    for round in 1..60 {
        rig.from.fill(WORDS, round);
        if round % 2 == 0 {
            rig.post();
        }
        held_quiet(&rig.b);
        let before = rig.contents();
        if round % 2 == 1 {
            rig.post();
        }
        std::thread::sleep(Duration::from_millis(2));
        let after = rig.contents();
        if rig.b.ask(&Request::ThawThreads) == Reply::Done {
            in_time += 1;
            assert!(before == after, "round {round}");
        }
        rig.is_done(round);
    }
    assert!(in_time > 0, "never in time");
    // A holder does not release it: the router goes on by itself.
    rig.from.fill(WORDS, 77);
    held_quiet(&rig.b);
    rig.post();
    rig.is_done(77);
    let _ = rig.b.ask(&Request::ThawThreads);
    // A holder that asks again and again keeps nobody for ever.
    for round in 80..84 {
        rig.from.fill(WORDS, round);
        rig.post();
        for _ in 0..3 {
            let _ = rig.b.ask(&Request::FreezeThreads { thread: own_id(), quiesce: true });
        }
        rig.is_done(round);
        let _ = rig.b.ask(&Request::ThawThreads);
    }
    // A holder that hangs up keeps nobody either.
    rig.from.fill(WORDS, 99);
    held_quiet(&rig.b);
    rig.post();
    rustix::net::shutdown(&rig.b.socket, rustix::net::Shutdown::Both).unwrap();
    let _ = rig.cq.wait();
}

fn nonsense_about_parts_is_refused(client: &Client, stranger: &Client) {
    let make = |client: &Client, pages: u64| {
        let (reply, _memory) = client.ask_fds(&Request::CreateSegment { length: pages * PAGE });
        let Reply::Segment { segment, length } = reply else { panic!("{reply:?}") };
        assert_eq!(length, pages * PAGE);
        segment
    };
    let (own, whole, foreign) = (make(client, 8), make(client, 4), make(stranger, 8));
    let at = 0x10_0000_0000_u64;
    let map = |segment, offset, address, length| Request::MapPart { segment, offset, address, length };
    assert_eq!(client.ask(&Request::MapSegment { segment: whole, address: at + 0x10_0000 }), Reply::Done);
    assert_eq!(client.ask(&map(own, 0, at, 2 * PAGE)), Reply::Done);
    let bad = [
        (own, 0, at, PAGE),
        (own, 4 * PAGE, at + PAGE, 2 * PAGE),
        (own, 4 * PAGE, at - PAGE, 2 * PAGE),
        (own, 0, at + 0x10_0000, PAGE),
        (own, 0, at + 0x10_3000, 2 * PAGE),
        (own, 8 * PAGE, at + 0x20_0000, PAGE),
        (own, 7 * PAGE, at + 0x20_0000, 2 * PAGE),
        (own, u64::MAX - PAGE + 1, at + 0x20_0000, PAGE),
        (own, u64::MAX - PAGE + 1, at + 0x20_0000, 2 * PAGE),
        (own, 1, at + 0x20_0000, PAGE),
        (own, 0, at + 0x20_0001, PAGE),
        (own, 0, at + 0x20_0000, PAGE - 1),
        (own, 0, at + 0x20_0000, 0),
        (own, 0, at + 0x20_0000, u64::MAX - PAGE + 1),
        (own, 0, 0, PAGE),
        (own, 0, (1 << 56) - PAGE, 2 * PAGE),
        (own, 0, u64::MAX - PAGE + 1, PAGE),
    ];
    for (segment, offset, address, length) in bad {
        let refusal = client.refused(&map(segment, offset, address, length));
        assert_eq!(refusal, VerbsError::InvalidArgument, "{offset:#x} {address:#x} {length:#x}");
    }
    // Handles are each process' own, so a foreign one names nothing or one's own.
    for segment in [foreign + 1000, u32::MAX] {
        assert_eq!(client.refused(&map(segment, 0, at + 0x30_0000, PAGE)), VerbsError::NotFound);
        assert_eq!(client.refused(&Request::ReopenSegment { segment }), VerbsError::NotFound);
    }
    for (address, length) in [(at, 0), (at + 1, PAGE), (at, PAGE + 1), (u64::MAX - PAGE + 1, 2 * PAGE)] {
        let refusal = client.refused(&Request::UnmapPart { address, length });
        assert_eq!(refusal, VerbsError::InvalidArgument, "{address:#x} {length:#x}");
    }
    assert_eq!(client.refused(&Request::DestroySegment { segment: own }), VerbsError::Busy);
    // All of the address space: takes the parts, and leaves what is mapped as a whole.
    assert_eq!(client.ask(&Request::UnmapPart { address: 0, length: 1 << 56 }), Reply::Done);
    assert_eq!(client.ask(&Request::UnmapPart { address: at, length: PAGE }), Reply::Done);
    assert_eq!(client.refused(&map(own, 0, at + 0x10_0000, PAGE)), VerbsError::InvalidArgument);
    assert_eq!(client.ask(&Request::DestroySegment { segment: own }), Reply::Done);
    assert_eq!(stranger.ask(&Request::DestroySegment { segment: foreign }), Reply::Done);
}

fn threads_survive_the_router(mut router: Process, client: &Client, runner: &Runner) {
    frozen(client);
    let began = Instant::now();
    let moved = runner.moves_within(STILL);
    assert!(!moved || began.elapsed() > IN_TIME);
    router.child.kill().unwrap();
    assert!(runner.moves_within(BOUND));
}

#[test]
fn threads_and_parts_in_an_enemys_hands() {
    let directory = Directory::new();
    let router = Process::start(&directory.0, &[]);
    let path = router.attach("a");
    let (client, stranger) = (Client::connect(&path), Client::connect(&router.attach("b")));
    nonsense_about_parts_is_refused(&client, &stranger);
    let runner = Runner::start();
    assert!(runner.moves_within(BOUND));
    if freeze(&client) == Reply::Failed(VerbsError::NotPermitted) {
        eprintln!("tracing is not permitted here: the rest is left out");
        return;
    }
    let _ = client.ask(&Request::ThawThreads);
    who_never_releases_is_released(&client, &runner);
    many_holds_are_one_thread_each(&router, &path, &client, &runner);
    who_makes_threads_is_given_up(&client, &runner);
    memory_stands_still_while_it_is_moved([&path, &router.attach("c")]);
    assert!(runner.moves_within(BOUND));
    threads_survive_the_router(router, &client, &runner);
}
