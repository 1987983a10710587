//! The slow path: memory that the router can't map, reached through held `/proc/PID/mem`
//! descriptors.
//!
//! Each vNIC has one slow-path copier, begun when it is first needed. A copier reads and writes only the memory of its
//! own vNIC's processes and the bounce buffer that came with the job, so whatever a tenant does to block it (a page
//! under its own userfaultfd, a slow file system behind a mapping), no other vNIC waits, and a thread that comes back
//! late can't touch anything that is not its owner's.
//!
//! A copier that has been busy with one job for longer than [`STALL_NS_MAX`] is given up: its vNIC
//! fails, the thread ends by itself once the kernel lets it go.
use crate::base::privileges::{self, ThreadKind};
use crate::base::slab::Key;
use crate::base::wake::Waker;
use crate::memory::bounce::Bounce;
use crate::memory::entrusted::Entrusted;
use freeflow_engine::SessionId;
use freeflow_shm::{AccessError, Segment, monotonic_ns, pause, prefer_short_slices};
use freeflow_verbs::AtomicOperation;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::Release};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

/// A job that takes longer fails its vNIC.
pub const STALL_NS_MAX: u64 = 2_000_000_000;
/// How long a copier looks for the next job before it sleeps: where the pollers fit the cores, and where they don't.
pub(crate) const LINGER_NS: u64 = 100_000;
const LINGER_CROWDED_NS: u64 = 2_000;
/// The bytes that are written last, after all others.
const LAST_BYTES: usize = 8;

/// The memory of one process, by its addresses: a `/proc/PID/mem` descriptor, or a test's stand-in.
pub trait TenantMemory: Send + Sync {
    fn read(&self, into: &mut [u8], address: u64) -> io::Result<()>;
    fn write(&self, from: &[u8], address: u64) -> io::Result<()>;

    /// On eight bytes; gives what was there before. Atomic against this copier's own work only, unless said otherwise.
    fn atomic(&self, address: u64, operation: AtomicOperation) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.read(&mut bytes, address)?;
        let before = u64::from_ne_bytes(bytes);
        let after = match operation {
            AtomicOperation::CompareSwap { compare, swap } if before == compare => swap,
            AtomicOperation::CompareSwap { .. } => return Ok(before),
            AtomicOperation::FetchAdd { add } => before.wrapping_add(add),
        };
        self.write(&after.to_ne_bytes(), address)?;
        Ok(before)
    }
}

impl TenantMemory for File {
    fn read(&self, into: &mut [u8], address: u64) -> io::Result<()> {
        self.read_exact_at(into, address)
    }

    fn write(&self, from: &[u8], address: u64) -> io::Result<()> {
        self.write_all_at(from, address)
    }
}

impl<M: TenantMemory + 'static> TenantMemory for Entrusted<M> {
    fn read(&self, into: &mut [u8], address: u64) -> io::Result<()> {
        (**self).read(into, address)
    }

    fn write(&self, from: &[u8], address: u64) -> io::Result<()> {
        (**self).write(from, address)
    }

    fn atomic(&self, address: u64, operation: AtomicOperation) -> io::Result<u64> {
        (**self).atomic(address, operation)
    }
}

/// Eight bytes of a segment. The copier gets them only to do an atomic operation: after others that
/// it has begun on the same bytes by the slow path, or on a page that is missing.
pub struct SharedMemory {
    pub segment: Arc<Segment>,
    pub offset: usize,
    /// Its owner's memory, at whose cost a missing page comes.
    pub owner: Arc<dyn TenantMemory>,
}

/// How often a missing page is brought before it counts as unreachable: a process that goes on
/// taking it away has only itself to blame.
const BRING_COUNT_MAX: u32 = 8;

/// Atomic against everybody.
pub fn atomic_on(segment: &Segment, offset: usize, operation: AtomicOperation) -> Result<u64, AccessError> {
    match operation {
        AtomicOperation::CompareSwap { compare, swap } => segment.compare_swap(offset, compare, swap),
        AtomicOperation::FetchAdd { add } => segment.fetch_add(offset, add),
    }
}

impl TenantMemory for SharedMemory {
    fn read(&self, into: &mut [u8], address: u64) -> io::Result<()> {
        self.owner.read(into, address)
    }

    fn write(&self, from: &[u8], address: u64) -> io::Result<()> {
        self.owner.write(from, address)
    }

    fn atomic(&self, address: u64, operation: AtomicOperation) -> io::Result<u64> {
        for _ in 0..BRING_COUNT_MAX {
            match atomic_on(&self.segment, self.offset, operation) {
                Err(AccessError::Missing) => self.owner.read(&mut [0; 8], address)?,
                other => return other.map_err(io::Error::other),
            }
        }
        Err(io::Error::other("the page is missing again and again"))
    }
}

/// Bytes of one process' memory and their place in the bounce buffer.
pub struct Part {
    /// Session whose memory is reached by the slow path; [`SessionId::VOID`] for a segment's.
    pub session: SessionId,
    pub memory: Arc<dyn TenantMemory>,
    pub address: u64,
    pub at: usize,
    pub bytes: usize,
    /// The process could put it into a segment.
    pub is_sharable: bool,
}

#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// Memory to bounce buffer.
    Read,
    /// Bounce buffer to memory, in ascending order; if `last`, the last eight bytes by a separate write after the rest.
    Write { last: bool },
    /// On the eight bytes of the one part.
    Atomic(AtomicOperation),
}

pub struct Job {
    pub id: Key,
    pub work: Work,
    pub bounce: Bounce,
    pub parts: Vec<Part>,
}

/// A job that is done; the buffers come back to be used again.
pub struct Finished {
    pub id: Key,
    pub bounce: Bounce,
    pub parts: Vec<Part>,
    /// Of an atomic operation, the value before. An error: the memory is not there.
    pub result: io::Result<u64>,
}

#[derive(Default)]
struct Pulse {
    /// When the job in hand was begun; 0: none.
    busy_since_ns: AtomicU64,
    ended: AtomicBool,
}

/// The worker's end of one vNIC's slow-path copier. Dropping it lets the thread end after the jobs it
/// has.
pub struct SlowPathCopier {
    jobs: Sender<Job>,
    pulse: Arc<Pulse>,
    pub in_flight: u32,
}

/// A slow-path copier that was given up.
pub struct Abandoned(Arc<Pulse>);

impl Abandoned {
    pub fn has_ended(&self) -> bool {
        self.0.ended.load(Relaxed)
    }
}

impl SlowPathCopier {
    pub fn start(finished: Sender<Finished>, waker: Arc<Waker>) -> io::Result<Self> {
        let (jobs, receiver) = channel();
        let pulse = Arc::new(Pulse::default());
        let pulse_of_thread = pulse.clone();
        let body = move || {
            privileges::enter(ThreadKind::SlowPath);
            serve(&receiver, &finished, &waker, &pulse_of_thread);
            pulse_of_thread.ended.store(true, Release);
        };
        std::thread::Builder::new().name("ff-slow-path".into()).stack_size(256 * 1024).spawn(body)?;
        Ok(Self { jobs, pulse, in_flight: 0 })
    }

    /// Gives the job back if the thread is gone.
    pub fn submit(&mut self, job: Job) -> Result<(), Box<Job>> {
        self.jobs.send(job).map_err(|refused| Box::new(refused.0))?;
        self.in_flight += 1;
        Ok(())
    }

    /// `resumed_ns`: since when the router runs without a pause.
    pub fn is_stalled(&self, now_ns: u64, resumed_ns: u64) -> bool {
        let since = self.pulse.busy_since_ns.load(Relaxed);
        since != 0 && now_ns.saturating_sub(since.max(resumed_ns)) > STALL_NS_MAX
    }

    pub fn abandon(self) -> Abandoned {
        Abandoned(self.pulse)
    }
}

fn serve(jobs: &Receiver<Job>, finished: &Sender<Finished>, waker: &Waker, pulse: &Pulse) {
    prefer_short_slices();
    while let Some(mut job) = next_job(jobs, waker, LINGER_NS) {
        pulse.busy_since_ns.store(monotonic_ns().max(1), Relaxed);
        let result = perform(&mut job);
        pulse.busy_since_ns.store(0, Relaxed);
        if finished.send(Finished { id: job.id, bounce: job.bounce, parts: job.parts, result }).is_err() {
            return;
        }
        waker.wake();
    }
}

/// The next job: looks for it a little while, since jobs come in bursts, then sleeps. It never
/// yields: among threads that spin without end, who yields waits for a whole slice, while who
/// sleeps is woken at once.
pub(crate) fn next_job<T>(jobs: &Receiver<T>, waker: &Waker, linger_ns: u64) -> Option<T> {
    let linger_ns = if waker.is_crowded() { linger_ns.min(LINGER_CROWDED_NS) } else { linger_ns };
    let began_ns = monotonic_ns();
    loop {
        match jobs.try_recv() {
            Ok(job) => return Some(job),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) if monotonic_ns() - began_ns > linger_ns => return jobs.recv().ok(),
            Err(TryRecvError::Empty) => pause(),
        }
    }
}

fn perform(job: &mut Job) -> io::Result<u64> {
    match job.work {
        Work::Read => {
            for part in &job.parts {
                part.memory.read(&mut job.bounce[part.at..part.at + part.bytes], part.address)?;
            }
            Ok(0)
        }
        Work::Write { last } => {
            let end = job.parts.iter().map(|part| part.at + part.bytes).max().unwrap_or(0);
            let tail = if last { end.saturating_sub(LAST_BYTES) } else { end };
            write_range(job, 0, tail)?;
            write_range(job, tail, end)?;
            Ok(0)
        }
        Work::Atomic(operation) => {
            let Some(part) = job.parts.first() else { return Ok(0) };
            part.memory.atomic(part.address, operation)
        }
    }
}

/// Writes what of `from..to` of the bounce buffer the parts cover.
fn write_range(job: &Job, from: usize, to: usize) -> io::Result<()> {
    for part in &job.parts {
        let start = part.at.max(from);
        let end = (part.at + part.bytes).min(to);
        if start < end {
            part.memory.write(&job.bounce[start..end], part.address + (start - part.at) as u64)?;
        }
    }
    Ok(())
}
