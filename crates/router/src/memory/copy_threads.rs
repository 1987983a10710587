//! Threads that copy for the worker: *copy threads*. The engine stays with the worker, one state
//! machine in one hand; what a busy host is short of is the time that bytes take.
//!
//! Each vNIC has a home, the copy thread that serves it first; it is chosen when the vNIC is made
//! and stays. Copies stand in line vNIC by vNIC, and a copy thread without work of its own takes
//! what stands in other lines. Copies that are under way together are of different QPs (a QP has
//! one at a time), so their order means nothing.
//!
//! A copy thread gets pieces of segments, found and bounded by the worker, and holds those segments
//! as long as it copies. It never sees a page table or a process' own memory, so a tenant blocks it
//! no more than it blocks the worker: by page faults.
//!
//! Invariant: before a piece of memory ceases to be a session's, nobody copies from or to it:
//! [`Ports::settle`]. Invariant: what a copy thread has in hand is at most
//! [`COPY_THREAD_JOB_COUNT_MAX`] copies; all others wait here, where they can be taken back.
use crate::base::mode::Mode;
use crate::base::privileges::{self, ThreadKind};
use crate::base::slab::{Key, Slab};
use crate::base::wake::Waker;
use crate::memory::blocking::BlockedStopwatch;
use crate::memory::slow_path::{LINGER_NS, next_job};
use freeflow_engine::{MemorySide, SessionId, Span, Token, VnicId};
use freeflow_shm::{AccessError, Segment, cpu_count, prefer_short_slices};
use freeflow_verbs::Shard;
use freeflow_verbs::{Duration, Instant};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};

/// Copy threads of one router, at most.
pub const WORKERS_MAX: u32 = 32;
/// Below this a copy takes hardly longer than handing it over.
pub(crate) const MOVE_BYTES_MIN: usize = 32 * 1024;
/// The same where pollers don't fit the cores: then it costs two wake-ups.
pub(crate) const MOVE_BYTES_MIN_CROWDED: usize = 128 * 1024;
/// One in hand, and one so that it need not wait for the worker in between.
pub(crate) const COPY_THREAD_JOB_COUNT_MAX: u32 = 2;
/// A copy of more pieces is the worker's own.
pub(crate) const PIECE_COUNT_MAX: usize = 64;
/// vNICs that make large copies within this time of each other do so at once.
pub(crate) const TOGETHER: Duration = Duration::from_millis(1);
/// Sessions that are busy without the worker being in demand: those of one connection.
pub(crate) const BUSY_SESSION_COUNT: u32 = 2;
/// Lists of pieces kept for later.
pub(crate) const SPARE_COUNT_MAX: usize = 64;
/// How often the worker looks before it sleeps while it waits for a copy thread, and for how long
/// then.
pub(crate) const SETTLE_PAUSE_COUNT: u32 = 2000;
pub(crate) const SETTLE_WAIT: std::time::Duration = std::time::Duration::from_millis(10);

/// How many threads copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyThreadOptions {
    /// 1: the worker alone. `None`: what suits the machine.
    pub workers: Option<u32>,
    /// Copies from this size on are handed over, always. `None`: from 32 KiB on (128 KiB while
    /// pollers don't fit the cores), where others wait for the worker.
    pub move_bytes_min: Option<u32>,
}

impl CopyThreadOptions {
    /// The part of one of several shards: threads for all of them are as many as for one, or one each.
    pub fn of_shard(self, shard: Shard) -> Self {
        match shard.count() {
            1 => self,
            count => Self { workers: Some(self.worker_count(cpu_count()).div_ceil(count.into())), ..self },
        }
    }

    /// One below eight processors: there worker, copy threads and pollers would take them from each
    /// other.
    pub fn worker_count(self, cpu_count: usize) -> u32 {
        let suits = if cpu_count < 8 { 1 } else { (cpu_count / 8).clamp(2, 4) as u32 };
        self.workers.unwrap_or(suits).clamp(1, WORKERS_MAX)
    }
}

/// Bytes that lie in one piece on both sides.
pub(crate) struct Piece {
    pub(crate) from: (Arc<Segment>, usize),
    pub(crate) to: (Arc<Segment>, usize),
    pub(crate) bytes: usize,
}

pub(crate) struct Job {
    pub(crate) id: Key,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) last: bool,
}

/// Why a copy was not made.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The segment of that side lost its memory.
    Lost(MemorySide),
    Outside,
    /// A page is missing, which is not to be allocated here.
    Missing,
}

/// A copy that is done; the emptied list comes back to be used again.
pub struct Moved {
    pub(crate) id: Key,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) result: Result<(), Fault>,
    /// The side in whose memory it was switched out for long.
    pub(crate) blocked: Option<MemorySide>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyState {
    Queued,
    With(usize),
    Done,
}

/// A copy that the engine waits for.
pub(crate) struct InFlightCopy {
    pub(crate) token: Token,
    pub(crate) state: CopyState,
    pub(crate) from: SessionId,
    pub(crate) to: SessionId,
    /// Other processes of which it touches memory: lists that name regions of several.
    pub(crate) others: Vec<SessionId>,
    pub(crate) bytes: u64,
    /// The spans to copy, for the slow-path copiers if a page is missing.
    pub(crate) spans: (Vec<Span>, Vec<Span>),
    pub(crate) last: bool,
}

impl InFlightCopy {
    pub(crate) fn touches(&self, session: SessionId) -> bool {
        self.from == session || self.to == session || self.others.contains(&session)
    }
}

/// The worker's end of a copy thread. Dropping it lets the thread end.
pub(crate) struct CopyThread {
    pub(crate) jobs: Sender<Job>,
    pub(crate) in_hand: u32,
    /// vNICs that call it home.
    pub(crate) vnic_count: u32,
    /// The epoch in which it last got something.
    pub(crate) epoch: u64,
    /// vNICs at home here that have copies in line, each once.
    pub(crate) ring: VecDeque<usize>,
}

/// The copies of one vNIC.
#[derive(Default)]
pub(crate) struct Line {
    pub(crate) home: usize,
    pub(crate) jobs: VecDeque<Job>,
}

#[derive(Default)]
pub struct CopyThreads {
    pub(crate) threads: Vec<CopyThread>,
    /// By the vNIC's index.
    pub(crate) lines: Vec<Line>,
    pub(crate) copies: Slab<InFlightCopy>,
    pub(crate) finished: Option<Receiver<Moved>>,
    pub(crate) done: VecDeque<Moved>,
    pub(crate) spare: Vec<Vec<Piece>>,
    /// A copy thread panicked.
    pub(crate) broken: Arc<AtomicBool>,
    /// How long a copy thread looks for the next copy before it sleeps.
    pub(crate) linger_ns: Arc<AtomicU64>,
    pub(crate) bytes_min: usize,
    pub(crate) always: bool,
    /// The vNIC of the last large copy, and when two vNICs last took turns.
    pub(crate) recent: Option<(VnicId, Instant)>,
    pub(crate) together_at: Option<Instant>,
    pub(crate) is_crowd: bool,
    pub(crate) moved_bytes: u64,
}

impl CopyThreads {
    /// Starts the threads; none for one worker.
    pub fn start(options: CopyThreadOptions, mode: Mode, waker: &Arc<Waker>) -> io::Result<Self> {
        let count = options.worker_count(cpu_count());
        let (finished_sender, finished) = channel();
        let mut copy_threads = Self {
            finished: Some(finished),
            bytes_min: options.move_bytes_min.map_or(MOVE_BYTES_MIN, |bytes| bytes as usize).max(1),
            always: options.move_bytes_min.is_some(),
            ..Self::default()
        };
        copy_threads.set_mode(mode);
        if count == 1 {
            return Ok(copy_threads);
        }
        for number in 1..=count {
            let (jobs, receiver) = channel();
            let (finished, waker, broken) = (finished_sender.clone(), waker.clone(), copy_threads.broken.clone());
            let linger_ns = copy_threads.linger_ns.clone();
            let body = move || {
                let _alarm = Alarm { broken, waker: waker.clone() };
                privileges::enter(ThreadKind::CopyThread);
                serve(&receiver, &finished, &waker, &linger_ns);
            };
            std::thread::Builder::new().name(format!("ff-copy-{number}")).stack_size(256 * 1024).spawn(body)?;
            copy_threads.threads.push(CopyThread { jobs, in_hand: 0, vnic_count: 0, epoch: 0, ring: VecDeque::new() });
        }
        Ok(copy_threads)
    }

    /// From the next copy on.
    pub fn set_mode(&self, mode: Mode) {
        self.linger_ns.store(if mode == Mode::LowCpu { 0 } else { LINGER_NS }, Relaxed);
    }

    /// Threads that copy, the worker if there are no others.
    #[cfg(test)]
    pub fn worker_count(&self) -> u32 {
        self.threads.len().max(1) as u32
    }

    pub fn moved_bytes(&self) -> u64 {
        self.moved_bytes
    }

    pub fn in_flight(&self) -> usize {
        self.copies.len()
    }

    /// Copy threads that copied in this epoch or the last: so long they may look for more.
    pub fn awake_count(&self, epoch: u64) -> u32 {
        self.threads.iter().filter(|thread| thread.in_hand > 0 || thread.epoch + 1 >= epoch).count() as u32
    }

    /// Sessions that were busy of late.
    pub fn note_busy_sessions(&mut self, count: u32) {
        self.is_crowd = count > BUSY_SESSION_COUNT;
    }

    /// A new vNIC goes where the fewest are.
    pub fn assign(&mut self, vnic: VnicId) {
        let fewest = self.threads.iter().enumerate().min_by_key(|(_, thread)| thread.vnic_count).map(|(at, _)| at);
        let Some(home) = fewest else { return };
        let at = vnic.index as usize;
        if self.lines.len() <= at {
            self.lines.resize_with(at + 1, Line::default);
        }
        self.lines[at].home = home;
        self.threads[home].vnic_count += 1;
    }

    /// A vNIC goes; its sessions went before.
    pub fn release(&mut self, vnic: VnicId) {
        if let Some(line) = self.lines.get(vnic.index as usize)
            && let Some(thread) = self.threads.get_mut(line.home)
        {
            thread.vnic_count -= 1;
        }
    }

    /// Which worker a vNIC is served by, from 1.
    pub fn home(&self, vnic: VnicId) -> u32 {
        self.lines.get(vnic.index as usize).map_or(1, |line| line.home as u32 + 1)
    }

    /// Whether a copy of [`Self::bytes_min`] or more is to be handed over. Alone, a connection is
    /// served sooner by the worker itself.
    pub(crate) fn wants(&mut self, vnic: VnicId, bytes: usize, now: Instant, crowded: bool) -> bool {
        if let Some((other, at)) = self.recent.replace((vnic, now))
            && other != vnic
            && now - at < TOGETHER
        {
            self.together_at = Some(now);
        }
        let is_long = !crowded || bytes >= MOVE_BYTES_MIN_CROWDED;
        self.always || is_long && (self.is_crowd || self.together_at.is_some_and(|at| now - at < TOGETHER))
    }

    pub(crate) fn enter(&mut self, vnic: VnicId, copy: InFlightCopy, pieces: Vec<Piece>, last: bool, epoch: u64) {
        let id = self.copies.insert(copy);
        let at = vnic.index as usize;
        let line = &mut self.lines[at];
        if line.jobs.is_empty() {
            self.threads[line.home].ring.push_back(at);
        }
        line.jobs.push_back(Job { id, pieces, last });
        self.hand_out(epoch);
    }

    /// Gives every copy thread that has room what stands next in its own lines, or else in those of
    /// others.
    pub(crate) fn hand_out(&mut self, epoch: u64) {
        for at in 0..self.threads.len() {
            while self.threads[at].in_hand < COPY_THREAD_JOB_COUNT_MAX
                && let Some(job) = self.next_for(at)
            {
                if let Some(copy) = self.copies.get_mut(job.id) {
                    copy.state = CopyState::With(at);
                }
                let thread = &mut self.threads[at];
                (thread.in_hand, thread.epoch) = (thread.in_hand + 1, epoch);
                // Fails only if the thread panicked, which is seen with the next look at the results.
                let _ = thread.jobs.send(job);
            }
        }
    }

    /// From other copy threads' lines one that has nothing at all takes, no second one.
    pub(crate) fn next_for(&mut self, thread: usize) -> Option<Job> {
        let count = self.threads.len();
        let others = if self.threads[thread].in_hand == 0 { count } else { 1 };
        let from = (0..others).map(|step| (thread + step) % count).find(|&at| !self.threads[at].ring.is_empty())?;
        let at = self.threads[from].ring.pop_front()?;
        let job = self.lines[at].jobs.pop_front();
        if !self.lines[at].jobs.is_empty() {
            self.threads[from].ring.push_back(at);
        }
        job
    }

    /// Takes what copy threads have done; whether there is anything.
    pub fn collect(&mut self, epoch: u64, count_max: usize) -> bool {
        if self.threads.is_empty() {
            return false;
        }
        while self.done.len() < count_max
            && let Some(moved) = self.finished.as_ref().and_then(|finished| finished.try_recv().ok())
        {
            self.note_done(moved, epoch);
        }
        assert!(!self.broken.load(Relaxed), "a copy thread panicked");
        !self.done.is_empty()
    }

    pub(crate) fn note_done(&mut self, moved: Moved, epoch: u64) {
        if let Some(copy) = self.copies.get_mut(moved.id) {
            if let CopyState::With(at) = std::mem::replace(&mut copy.state, CopyState::Done) {
                self.threads[at].in_hand -= 1;
            }
            self.moved_bytes += copy.bytes;
        }
        self.done.push_back(moved);
        self.hand_out(epoch);
    }

    /// The worker does at once what stands in line for this session.
    pub(crate) fn do_queued(&mut self, session: SessionId) {
        let Self { lines, copies, threads, done, .. } = self;
        for (at, line) in lines.iter_mut().enumerate().filter(|(_, line)| !line.jobs.is_empty()) {
            let is_its = |job: &Job| copies.get(job.id).is_some_and(|copy| copy.touches(session));
            let (its, rest) = std::mem::take(&mut line.jobs).into_iter().partition(is_its);
            line.jobs = rest;
            let its: VecDeque<Job> = its;
            for job in its {
                if let Some(copy) = copies.get_mut(job.id) {
                    copy.state = CopyState::Done;
                }
                done.push_back(perform(job));
            }
            if line.jobs.is_empty() {
                threads[line.home].ring.retain(|&listed| listed != at);
            }
        }
    }

    pub(crate) fn is_touched(&self, session: SessionId) -> bool {
        let with_copy_thread = |copy: &InFlightCopy| matches!(copy.state, CopyState::With(_)) && copy.touches(session);
        self.copies.iter().any(|(_, copy)| with_copy_thread(copy))
    }
}

/// Says that a thread did not end as it should.
struct Alarm {
    broken: Arc<AtomicBool>,
    waker: Arc<Waker>,
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.broken.store(true, Relaxed);
            self.waker.wake();
        }
    }
}

pub(crate) fn serve(jobs: &Receiver<Job>, finished: &Sender<Moved>, waker: &Waker, linger_ns: &AtomicU64) {
    prefer_short_slices();
    while let Some(job) = next_job(jobs, waker, linger_ns.load(Relaxed)) {
        if finished.send(perform(job)).is_err() {
            return;
        }
        waker.wake();
    }
}

/// Copies, and lets go of the segments.
pub(crate) fn perform(job: Job) -> Moved {
    let Job { id, mut pieces, last } = job;
    let stopwatch = BlockedStopwatch::start();
    // The source by itself: so it is known which of the two blocks.
    for Piece { from, bytes, .. } in &pieces {
        // A missing page blocks nobody, and is met again by the copy.
        let _ = from.0.probe(from.1, *bytes);
    }
    let source = stopwatch.is_blocked().then_some(MemorySide::Source);
    let stopwatch = BlockedStopwatch::start();
    let result = copy(&pieces, last);
    let blocked = source.or_else(|| stopwatch.is_blocked().then_some(MemorySide::Destination));
    pieces.clear();
    Moved { id, pieces, result, blocked }
}

pub(crate) fn copy(pieces: &[Piece], last: bool) -> Result<(), Fault> {
    for (at, Piece { from, to, bytes }) in pieces.iter().enumerate() {
        let is_end = at + 1 == pieces.len();
        Segment::copy(&from.0, from.1, &to.0, to.1, *bytes, last && is_end)
            .map_err(|error| if error == AccessError::Missing { Fault::Missing } else { Fault::Outside })?;
        for (segment, side) in [(&from.0, MemorySide::Source), (&to.0, MemorySide::Destination)] {
            if segment.poisoned() {
                return Err(Fault::Lost(side));
            }
        }
    }
    Ok(())
}

impl CopyThreads {
    pub(crate) fn keep(&mut self, mut pieces: Vec<Piece>) {
        pieces.clear();
        if self.spare.len() < SPARE_COUNT_MAX {
            self.spare.push(pieces);
        }
    }
}
