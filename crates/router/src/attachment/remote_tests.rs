//! A vNIC with a near half: what it reaches, and what becomes of it when the near half is late, gone or an enemy.
use crate::admission::account::{Account, Charge, Commons};
use crate::attachment::near_halves::NearHalves;
use crate::attachment::remote::Remote;
use crate::attachment::{AttachedProcess, Attachment, Peer};
use crate::memory::freezer::FreezeCommand;
use freeflow_protocol::attachment::{ACCESS_BYTES_MAX, Answer, Report, Request};
use freeflow_protocol::{decode, encode};
use freeflow_shm::fd::{self, PeerCredentials, peer_closed, pidfd_alive, send_record};
use freeflow_verbs::{AtomicOperation, VerbsError};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(30);

type Found = io::Result<Box<dyn AttachedProcess>>;

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn peer_of(id: u32) -> Peer {
    let account = Arc::new(Account::new(Arc::new(Commons::new(1 << 16, 1 << 16))));
    let charge = Arc::new(Charge::connection(&account, 100).unwrap());
    let pid = rustix::process::Pid::from_raw(id as i32).unwrap();
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Peer { credentials: PeerCredentials { pid: id as i32, uid, gid }, pidfd, charge }
}

fn identify(remote: &Remote, id: u32) -> Receiver<Found> {
    let (sender, found) = channel();
    assert!(remote.identify(peer_of(id), Box::new(move |process| sender.send(process).unwrap())).is_ok());
    found
}

/// A vNIC whose near half is threads of this process.
struct Whole {
    remote: Remote,
    ended: Receiver<()>,
    _near_halves: NearHalves,
}

impl Whole {
    fn new() -> Self {
        let near_halves = NearHalves::in_this_process().unwrap();
        let (sender, ended) = channel();
        let stream = near_halves.open("v1").unwrap();
        let remote = Remote::start(stream, LONG, move || sender.send(()).unwrap()).unwrap();
        Self { remote, ended, _near_halves: near_halves }
    }

    fn process(&self, id: u32) -> Box<dyn AttachedProcess> {
        identify(&self.remote, id).recv_timeout(LONG).unwrap().unwrap()
    }
}

/// A vNIC whose near half is the test.
struct Half {
    remote: Remote,
    stream: OwnedFd,
    ended: Receiver<()>,
}

impl Half {
    fn new(answer_time_max: Duration) -> Self {
        let (own, stream) = fd::seqpacket_pair().unwrap();
        let (sender, ended) = channel();
        let remote = Remote::start(own, answer_time_max, move || sender.send(()).unwrap()).unwrap();
        Self { remote, stream, ended }
    }

    fn next(&self) -> Request {
        let mut buffer = vec![0; 1 << 16];
        let (bytes, _) = fd::receive_into(&self.stream, &mut buffer, 1).unwrap();
        decode(&buffer[..bytes]).unwrap()
    }

    fn say(&self, report: &Report) {
        fd::send_message(&self.stream, &encode(report), &[]).unwrap();
    }

    /// With its number.
    fn process(&self) -> (Box<dyn AttachedProcess>, u64) {
        let found = identify(&self.remote, std::process::id());
        let Request::Identify { request, .. } = self.next() else { panic!() };
        self.say(&Report::Done { request, outcome: Ok(Answer::Done) });
        (found.recv_timeout(LONG).unwrap().unwrap(), request)
    }

    fn why(&self) -> &'static str {
        self.ended.recv_timeout(LONG).unwrap();
        self.remote.ended().unwrap()
    }
}

struct Sleeper(Child);

impl Sleeper {
    fn new() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().unwrap())
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn has_ended(end: BorrowedFd<'_>) -> bool {
    !pidfd_alive(end)
}

#[test]
fn memory_is_reached_through_a_near_half() {
    let whole = Whole::new();
    let memory = whole.process(std::process::id()).memory();
    let mut bytes: Vec<u8> = (0..3 * ACCESS_BYTES_MAX + 5).map(|i| i as u8).collect();
    let address = bytes.as_mut_ptr().addr() as u64;
    let mut read = vec![0; bytes.len()];
    memory.read(&mut read, address).unwrap();
    assert_eq!(read, bytes);
    read.reverse();
    memory.write(&read, address).unwrap();
    // The compiler can't foresee another process' writes.
    assert_eq!(std::hint::black_box(&mut bytes), &read);
    let counter = std::sync::atomic::AtomicU64::new(40);
    let at = std::ptr::from_ref(&counter).addr() as u64;
    assert_eq!(memory.atomic(at, AtomicOperation::FetchAdd { add: 2 }).unwrap(), 40);
    assert_eq!(memory.atomic(at, AtomicOperation::CompareSwap { compare: 42, swap: 7 }).unwrap(), 42);
    assert_eq!(counter.load(std::sync::atomic::Ordering::Relaxed), 7);
    // Memory that is not there is an error of that access.
    assert!(memory.read(&mut [0; 8], 8).is_err() && memory.write(&[0; 8], 8).is_err());
    assert!(memory.read(&mut read, u64::MAX - 8).is_err());
    memory.read(&mut read, address).unwrap();
    assert!(whole.ended.try_recv().is_err());
}

#[test]
fn a_process_that_ends_is_told_of() {
    let whole = Whole::new();
    let (first, second) = (Sleeper::new(), Sleeper::new());
    let processes = [&first, &second].map(|sleeper| whole.process(sleeper.0.id()));
    assert!(processes.iter().all(|process| !has_ended(process.end())));
    drop(first);
    until("the end", || has_ended(processes[0].end()).then_some(()));
    assert!(!has_ended(processes[1].end()));
    // Its memory goes on answering: there is none.
    assert!(processes[0].memory().read(&mut [0; 8], 0x1000).is_err());
    let (sender, answered) = channel();
    processes[0].freeze(
        FreezeCommand::Freeze { thread: 1, quiesce: false },
        Box::new(move |result| sender.send(result).unwrap()),
    );
    assert!(answered.recv_timeout(LONG).unwrap().is_err());
}

#[test]
fn a_stranger_is_refused_and_others_are_not() {
    let whole = Whole::new();
    let (sender, found) = channel();
    let mut peer = peer_of(std::process::id());
    peer.credentials.uid = peer.credentials.uid.wrapping_add(1);
    assert!(whole.remote.identify(peer, Box::new(move |process: Found| sender.send(process.is_ok()).unwrap())).is_ok());
    assert!(!found.recv_timeout(LONG).unwrap());
    whole.process(std::process::id());
}

#[test]
fn events_pass_in_order_and_wait_where_nobody_reads() {
    const BYTES: usize = 16 * 1024;
    let whole = Whole::new();
    let (read, write) = whole.remote.event_channel(BYTES).unwrap();
    let (other_read, other_write) = whole.remote.event_channel(BYTES).unwrap();
    // Two pairs of sockets full, and what is on the way.
    let mut sent = 0_u32;
    let mut refused = 0;
    while refused < 100 {
        if send_record(&write, &sent.to_le_bytes()) {
            (sent, refused) = (sent + 1, 0);
        } else {
            refused += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(sent < 10_000, "nothing holds the writer back");
    }
    let next = |read: &OwnedFd| {
        let mut bytes = [0; 16];
        let count = rustix::io::read(read, &mut bytes).unwrap();
        bytes[..count].to_vec()
    };
    // No other channel waits for it.
    assert!(send_record(&other_write, &[7]));
    assert_eq!(next(&other_read), [7]);
    (0..sent).for_each(|number| assert_eq!(next(&read), number.to_le_bytes()));
    // Records that were sent come before the end of file.
    assert!(send_record(&write, &[1]) && send_record(&write, &[2]) && send_record(&write, &[3]));
    drop(write);
    assert_eq!([next(&read), next(&read), next(&read), next(&read)], [vec![1], vec![2], vec![3], vec![]]);
    drop(other_read);
    until("its writer to notice", || peer_closed(&other_write).then_some(()));
}

#[test]
fn readers_meet_the_end_when_the_stream_ends() {
    let whole = Whole::new();
    let (read, _write) = whole.remote.event_channel(4096).unwrap();
    drop(whole.remote);
    assert_eq!(rustix::io::read(&read, &mut [0; 8]), Ok(0));
    assert!(whole.ended.recv_timeout(LONG).is_err(), "who ends it knows");
}

#[test]
fn who_does_not_answer_in_time_fails_and_no_other() {
    let (late, other) = (Half::new(Duration::from_millis(50)), Whole::new());
    assert!(identify(&late.remote, std::process::id()).recv_timeout(LONG).unwrap().is_err());
    assert_eq!(late.why(), "its near half does not answer");
    assert!(late.remote.ended().is_some() && late.remote.event_channel(4096).is_err());
    assert!(identify(&late.remote, std::process::id()).recv_timeout(LONG).unwrap().is_err());
    let (mut bytes, source) = ([0; 4], [1, 2, 3, 4]);
    other.process(std::process::id()).memory().read(&mut bytes, source.as_ptr().addr() as u64).unwrap();
    assert_eq!(bytes, source);
    assert_eq!(other.remote.ended(), None);
}

#[test]
fn a_stream_that_ends_answers_all_that_waits() {
    let half = Half::new(LONG);
    let (process, _) = half.process();
    let (sender, answered) = channel();
    process.freeze(
        FreezeCommand::Freeze { thread: 1, quiesce: true },
        Box::new(move |result| sender.send(result).unwrap()),
    );
    let found = identify(&half.remote, std::process::id());
    rustix::net::shutdown(&half.stream, rustix::net::Shutdown::Both).unwrap();
    assert_eq!(answered.recv_timeout(LONG).unwrap(), Err(VerbsError::DeviceFatal));
    assert!(found.recv_timeout(LONG).unwrap().is_err());
    assert_eq!(half.why(), "its near half has ended");
}

#[test]
fn who_does_not_read_fails() {
    let half = Half::new(LONG);
    let (process, _) = half.process();
    // Nothing of this is answered.
    until("the end", || {
        (0..10_000).for_each(|_| process.let_go());
        half.remote.ended()
    });
    assert_eq!(half.why(), "its near half does not read");
}

/// A message that no honest near half sends, when it is asked to read 8 bytes and has an event
/// channel.
fn lie(half: &Half, number: u64, channel: u64, which: usize) {
    let done = |outcome| half.say(&Report::Done { request: number, outcome });
    let stray = |request| half.say(&Report::Done { request, outcome: Ok(Answer::Done) });
    match which {
        0 => done(Ok(Answer::Bytes(vec![0; 7]))),
        1 => done(Ok(Answer::Bytes(vec![0; 9]))),
        2 => done(Ok(Answer::Done)),
        3 => done(Ok(Answer::Value(1))),
        4 => stray(number + 1),
        5 => stray(u64::MAX),
        6 => stray(0),
        7 => half.say(&Report::EventTaken { channel }),
        8 => fd::send_message(&half.stream, &[0xff; 40], &[]).unwrap(),
        9 => fd::send_message(&half.stream, &encode(&Report::ProcessEnded { process: 1 })[..1], &[]).unwrap(),
        _ => {
            let bytes = encode(&Report::Done { request: number, outcome: Ok(Answer::Bytes(vec![0; 8])) });
            fd::send_message(&half.stream, &bytes, &[half.stream.as_fd()]).unwrap();
        }
    }
}

#[test]
fn an_enemy_s_answers_end_its_stream_and_nothing_else() {
    for which in 0..11 {
        let half = Half::new(LONG);
        let (process, _) = half.process();
        let (_read, _write) = half.remote.event_channel(4096).unwrap();
        let Request::OpenEventChannel { channel } = half.next() else { panic!() };
        let memory = process.memory();
        let reader = std::thread::spawn(move || memory.read(&mut [0; 8], 0x1000).is_err());
        let Request::Read { request, length: 8, address: 0x1000, .. } = half.next() else { panic!() };
        lie(&half, request, channel, which);
        assert!(reader.join().unwrap(), "{which}");
        assert_eq!(half.why(), "its near half sends what no near half sends", "{which}");
    }
}

#[test]
fn what_names_nothing_is_passed_over() {
    let half = Half::new(LONG);
    let (process, number) = half.process();
    for named in [0, number + 1, u64::MAX, u64::MAX - 1] {
        half.say(&Report::ProcessEnded { process: named });
        half.say(&Report::EventTaken { channel: named });
        half.say(&Report::ChannelClosed { channel: named });
    }
    half.say(&Report::ProcessEnded { process: number });
    until("its own end", || has_ended(process.end()).then_some(()));
    assert_eq!(half.remote.ended(), None);
    // A process that has gone is forgotten there, once.
    let memory = process.memory();
    drop(process);
    drop(memory);
    assert_eq!(half.next(), Request::Forget { process: number });
}
