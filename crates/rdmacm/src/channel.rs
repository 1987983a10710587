//! Event channels: a socket by which the router sends (a *pipe*), one record a `read`.
//!
//! In a container with several vNICs a channel is *joint*: it has a pipe for each device that its
//! identifiers are on, and the program's descriptor is an epoll instance of them, which is readable
//! when one of them is.
//!
//! Records are sometimes taken out to look for those of one identifier (it is destroyed, or moves
//! to another channel). The others then stand in the channel's *backlog*, in their order, and for
//! each of them a *marker* is put into the pipe: a record of nothing. So whoever waits for the
//! descriptor still sees exactly as many records as there are events, and who reads one takes the
//! oldest of the backlog in its place. Events that this library makes itself
//! (`rdma_write_cm_event`) come the same way.
//!
//! Invariant: every record that stands for an entry of the backlog is in the pipe, or in the hand
//! of a thread that has read it and not looked at the backlog yet; together they are as many as the
//! backlog is long and `spare` says. So the descriptor is never readable for nothing, and nothing
//! waits for which the descriptor isn't readable. (A pipe of a joint channel that ends takes its
//! markers along; then all are put again.)
use crate::born::{Born, KEY_NONE, lock};
use crate::boundary::{Outcome, last_errno, pointer, quiet, set_errno};
use crate::call::{command, destroy_id};
use crate::device::Device;
use crate::id::{Id, gone_with_channel};
use crate::pipe::Pipe;
use crate::process::Process;
use freeflow_abi::rdma_event_channel;
use freeflow_protocol::cm::{CM_EVENT_BYTES_MAX, CmEvent, CmEventBody, CmEventKind, CmRequest};
use freeflow_protocol::{decode, encode};
use freeflow_shm::ShortWait;
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Records that go into one request: it stays below the longest message.
const REPOST_COUNT_MAX: usize = 1024;
/// Time for which a thread looks for an event before it sleeps.
const LOOK_MAX: Duration = Duration::from_micros(20);
/// Records that are taken out of a pipe at a time: more than a pipe holds.
const DRAIN_COUNT_MAX: usize = 4096;

/// An event that waits in a backlog.
#[derive(Clone)]
pub(crate) enum QueuedEvent {
    /// With the device from which it came.
    Record(CmEvent, Arc<Device>),
    /// One that this library made: `RDMA_CM_EVENT_USER` or the resolution of names.
    Own { key: u64, kind: c_uint, status: c_int, argument: u64 },
}

impl QueuedEvent {
    fn key(&self) -> u64 {
        match self {
            Self::Record(event, _) => event.cookie,
            Self::Own { key, .. } => *key,
        }
    }
}

/// Result of a `read` of a pipe, of whichever channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    pub count: isize,
    /// Number of the pipe.
    pub source: usize,
}

/// Result of a read.
pub(crate) enum Taken {
    Event(QueuedEvent),
    /// A marker without an entry, or what is no record: read on.
    Nothing,
    /// The router of this pipe is gone.
    End(Arc<Pipe>),
}

/// The events that were taken out of the pipe and not given to anybody.
#[derive(Default)]
struct Backlog {
    entries: VecDeque<QueuedEvent>,
    /// Markers that other threads have in hand, and whose entries were withdrawn meanwhile: these
    /// find nothing.
    spare: usize,
}

impl Backlog {
    /// The event that a record stands for: the oldest, behind which it stands in line. `None`: the
    /// record is a marker.
    fn take(&mut self, event: Option<QueuedEvent>) -> Taken {
        if event.is_none() && self.spare != 0 {
            self.spare -= 1;
            return Taken::Nothing;
        }
        self.entries.extend(event);
        self.entries.pop_front().map_or(Taken::Nothing, Taken::Event)
    }

    /// Gives the entries of these keys, after `found` was read at the end, with `markers`. And how
    /// many markers take the place of what was read.
    fn extract(
        &mut self,
        found: Vec<QueuedEvent>,
        markers: usize,
        is_wanted: impl Fn(u64) -> bool,
    ) -> (Vec<QueuedEvent>, usize) {
        let read = found.len() + markers;
        self.entries.extend(found);
        let (wanted, others): (Vec<_>, Vec<_>) = self.entries.drain(..).partition(|event| is_wanted(event.key()));
        self.entries.extend(others);
        // Wanted ones that no record here stood for: their markers were read by others.
        self.spare += wanted.len().saturating_sub(read);
        let marks = read.saturating_sub(wanted.len());
        (wanted, marks)
    }
}

/// A channel as C sees it, and what is behind it.
#[repr(C)]
pub(crate) struct EventChannel {
    c: UnsafeCell<rdma_event_channel>,
    /// The program's: of the only pipe, or the epoll instance of a joint channel. -1 once it is
    /// closed.
    descriptor: AtomicI32,
    is_joint: bool,
    first: Arc<Pipe>,
    /// All, also those that were closed; it grows only.
    pipes: Mutex<Vec<Arc<Pipe>>>,
    /// The pipe that is looked at first, so that none waits for another for long.
    turn: AtomicUsize,
    pub born: Born,
    backlog: Mutex<Backlog>,
    /// Of the thread that looks for events before it sleeps; the others sleep at once.
    wait: Mutex<ShortWait>,
}

// SAFETY: the C part is written once, before the channel is shared.
unsafe impl Send for EventChannel {}
// SAFETY: the same.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    pub fn create() -> Outcome<Arc<Self>> {
        let devices = Process::devices()?;
        let (first, is_joint) = (Pipe::create(devices[0].clone())?, devices.len() > 1);
        let descriptor =
            if is_joint { new_epoll(&first).inspect_err(|_| first.close(true))? } else { first.descriptor() };
        Ok(Arc::new(Self {
            c: UnsafeCell::new(rdma_event_channel { fd: descriptor }),
            descriptor: AtomicI32::new(descriptor),
            is_joint,
            pipes: Mutex::new(vec![first.clone()]),
            first,
            turn: AtomicUsize::new(0),
            born: Born::here(),
            backlog: Mutex::default(),
            wait: Mutex::default(),
        }))
    }

    /// Its identifiers may be on several devices.
    pub fn is_joint(&self) -> bool {
        self.is_joint
    }

    /// Its pipe of a device, which a joint channel makes if need be. EIO for a device that the
    /// channel can't have, and once it is closed.
    pub fn pipe_of(&self, device: &Arc<Device>) -> Outcome<Arc<Pipe>> {
        let mut pipes = lock(&self.pipes);
        if let Some(pipe) = pipes.iter().find(|pipe| Arc::ptr_eq(&pipe.device, device) && pipe.is_open()) {
            return Ok(pipe.clone());
        }
        let descriptor = self.descriptor();
        if !self.is_joint || descriptor < 0 {
            return Err(libc::EIO);
        }
        let pipe = Pipe::create(device.clone())?;
        add_to_epoll(descriptor, &pipe).inspect_err(|_| pipe.close(true))?;
        pipes.push(pipe.clone());
        Ok(pipe)
    }

    /// The pipe of identifiers that have no address yet.
    pub fn pipe_by_default(&self) -> Arc<Pipe> {
        self.open_pipe().unwrap_or_else(|| self.first.clone())
    }

    fn open_pipe(&self) -> Option<Arc<Pipe>> {
        lock(&self.pipes).iter().find(|pipe| pipe.is_open()).cloned()
    }

    fn pipe(&self, source: usize) -> Arc<Pipe> {
        lock(&self.pipes).get(source).unwrap_or(&self.first).clone()
    }

    /// A pipe has ended, and all that were on it know. False if it was the last one: it stays, so
    /// that the program goes on finding its end.
    pub fn drop_pipe(&self, ended: &Arc<Pipe>) -> bool {
        let has_another = {
            // Until it has ended: of the last two, one stays.
            let pipes = lock(&self.pipes);
            let has_another = pipes.iter().any(|pipe| pipe.is_open() && !Arc::ptr_eq(pipe, ended));
            if has_another {
                ended.end(self.descriptor());
            }
            has_another
        };
        if has_another {
            let count = lock(&self.backlog).entries.len();
            self.mark(count);
        }
        has_another
    }

    /// For C: with a reference of its own, which [`Self::from_raw`] takes back.
    pub fn into_c(self: Arc<Self>) -> *mut rdma_event_channel {
        Arc::into_raw(self).cast_mut().cast()
    }

    pub fn as_c(self: &Arc<Self>) -> *mut rdma_event_channel {
        Arc::as_ptr(self).cast_mut().cast()
    }

    /// Another reference to a channel of C's.
    ///
    /// # Safety
    /// `channel` came from [`Self::into_c`] or [`Self::as_c`] and is not destroyed.
    pub unsafe fn share(channel: *mut rdma_event_channel) -> Outcome<Arc<Self>> {
        if channel.is_null() {
            return Err(libc::EINVAL);
        }
        let channel = channel.cast_const().cast::<Self>();
        // SAFETY: this function's contract: the pointer is one of `Arc`'s.
        unsafe {
            Arc::increment_strong_count(channel);
            Ok(Arc::from_raw(channel))
        }
    }

    /// Takes C's reference back.
    ///
    /// # Safety
    /// `channel` came from [`Self::into_c`], and is not used any more.
    unsafe fn from_raw(channel: *mut rdma_event_channel) -> Arc<Self> {
        // SAFETY: this function's contract.
        unsafe { Arc::from_raw(channel.cast_const().cast::<Self>()) }
    }

    /// The program's descriptor; -1 once it is closed.
    pub fn descriptor(&self) -> RawFd {
        // Acquire: pairs with the swap in `close`.
        self.descriptor.load(Ordering::Acquire)
    }

    /// Reads one record, and waits for it unless the descriptor is non-blocking. Not a cancellation
    /// point: what unwinds a thread from within would meet Rust's frames.
    ///
    /// # Errors
    /// EAGAIN, EINTR; EBADF once it is closed.
    pub fn take(&self) -> Outcome<Taken> {
        let mut record = [0_u8; CM_EVENT_BYTES_MAX];
        loop {
            if let Some(found) = self.look(&mut record) {
                return self.taken(found, &record);
            }
            let count = match self.is_joint {
                false => {
                    // SAFETY: the buffer is that long.
                    unsafe { libc::syscall(libc::SYS_read, self.descriptor(), record.as_mut_ptr(), record.len()) }
                }
                true => {
                    let mut one = libc::pollfd { fd: self.descriptor(), events: libc::POLLIN, revents: 0 };
                    // SAFETY: a local; no time limit.
                    unsafe { libc::syscall(libc::SYS_poll, &raw mut one, 1, -1) }
                }
            };
            self.note_read();
            if count < 0 || !self.is_joint {
                return self.taken(Look { count: count as isize, source: 0 }, &record);
            }
        }
    }

    /// Looks for a record a little longer than once, instead of a `read` that waits: while connections come and go it
    /// is there sooner than this thread sleeps and is woken. What a `read` would have returned, or `None`: wait. Of a
    /// non-blocking descriptor it looks once. Not a cancellation point.
    pub fn look(&self, record: &mut [u8]) -> Option<Look> {
        if self.is_joint {
            return self.look_at_all(record);
        }
        let count = look(&mut *self.wait.try_lock().ok()?, LOOK_MAX, self.descriptor(), record)?;
        Some(Look { count, source: 0 })
    }

    fn look_at_all(&self, record: &mut [u8]) -> Option<Look> {
        let pipes = lock(&self.pipes).clone();
        let begin = self.turn.fetch_add(1, Ordering::Relaxed) % pipes.len();
        let mut scan = || {
            (begin..pipes.len()).chain(0..begin).find_map(|source| {
                let pipe = pipes.get(source).filter(|pipe| pipe.is_open())?;
                Some(Look { count: pipe.receive(record).filter(|count| *count >= 0)?, source })
            })
        };
        // Once in any case: a descriptor that is readable is not waited for.
        let found = scan().or_else(|| self.wait.try_lock().ok()?.look(LOOK_MAX, scan));
        // SAFETY: a number. Of a closed descriptor it is -1, all bits.
        let waits = unsafe { libc::fcntl(self.descriptor(), libc::F_GETFL) } & libc::O_NONBLOCK == 0;
        found.or_else(|| {
            (!waits).then(|| {
                set_errno(libc::EAGAIN);
                Look { count: -1, source: 0 }
            })
        })
    }

    /// After a `read` that waited. The error of one that failed stays.
    pub fn note_read(&self) {
        if let Ok(mut wait) = self.wait.try_lock() {
            wait.note_woken(LOOK_MAX);
        }
    }

    /// Result of a `read` of a record.
    pub fn taken(&self, found: Look, record: &[u8]) -> Outcome<Taken> {
        match usize::try_from(found.count) {
            Err(_) => Err(last_errno()),
            Ok(0) => Ok(Taken::End(self.pipe(found.source))),
            Ok(count) => Ok(self.in_order(decode(record.get(..count).unwrap_or_default()).ok(), found.source)),
        }
    }

    fn in_order(&self, record: Option<CmEvent>, source: usize) -> Taken {
        // Bytes that are no record at all stand for nothing.
        let Some(record) = record else { return Taken::Nothing };
        let is_event = record.cookie != KEY_NONE;
        let event = is_event.then(|| QueuedEvent::Record(record, self.pipe(source).device.clone()));
        lock(&self.backlog).take(event)
    }

    /// Takes all events out that wait, without waiting for more; gives those of these keys, and
    /// leaves the others.
    ///
    /// Between the two, another thread that waits for the descriptor may find nothing there; it
    /// then waits for the markers.
    pub fn extract(&self, is_wanted: impl Fn(u64) -> bool) -> Vec<QueuedEvent> {
        let (mut found, mut markers) = (Vec::new(), 0);
        let mut record = [0_u8; CM_EVENT_BYTES_MAX];
        for pipe in lock(&self.pipes).clone() {
            for _ in 0..DRAIN_COUNT_MAX {
                let Some(count) = read_without_waiting(pipe.descriptor(), &mut record) else { break };
                match decode::<CmEvent>(record.get(..count).unwrap_or_default()) {
                    Ok(event) if event.cookie != KEY_NONE => {
                        found.push(QueuedEvent::Record(event, pipe.device.clone()));
                    }
                    Ok(_) => markers += 1,
                    Err(_) => {}
                }
            }
        }
        let (wanted, marks) = lock(&self.backlog).extract(found, markers, is_wanted);
        self.mark(marks);
        wanted
    }

    /// Puts events at the end of the backlog, so that they come before all that the router has not
    /// written yet.
    pub fn deliver(&self, events: Vec<QueuedEvent>) {
        let count = events.len();
        lock(&self.backlog).entries.extend(events);
        self.mark(count);
    }

    /// Drops an event of an object that is gone. A request that nobody will answer is given back to
    /// the router.
    pub fn dismiss(&self, event: QueuedEvent) {
        if let QueuedEvent::Record(CmEvent { body: CmEventBody::Request { id, .. }, .. }, device) = event {
            // SAFETY: the device is there.
            unsafe { destroy_id(device.context(), id) };
        }
    }

    /// Puts this many markers into a pipe.
    fn mark(&self, count: usize) {
        let nothing =
            CmEvent { cookie: KEY_NONE, kind: CmEventKind::AddressChange, status: 0, body: CmEventBody::Nothing };
        let marker = encode(&nothing);
        let pipe = self.pipe_by_default();
        let mut left = count;
        while left > 0 {
            let batch = left.min(REPOST_COUNT_MAX);
            let request = CmRequest::Repost { channel: pipe.handle, records: vec![marker.clone(); batch] };
            // SAFETY: the device is there. If the router is gone, its end is what the program
            // reads.
            let _ = unsafe { command(pipe.device.context(), request) };
            left -= batch;
        }
    }

    /// Closes it. Identifiers that are on it go, as the kernel does it when the last descriptor is
    /// closed.
    pub fn close(&self) {
        if self.descriptor() >= 0 && self.born.is_here() {
            gone_with_channel(self);
        }
        self.close_empty();
    }

    /// Closes one that no identifier is on, without looking at all of the process'.
    pub fn close_empty(&self) {
        let descriptor = self.descriptor.swap(-1, Ordering::AcqRel);
        if descriptor < 0 {
            return;
        }
        if self.is_joint {
            // SAFETY: it is this channel's alone.
            unsafe { libc::close(descriptor) };
        }
        // Of one pipe the descriptor is the program's.
        if self.born.is_here() {
            lock(&self.pipes).iter().for_each(|pipe| pipe.close(true));
        } else if let Ok(pipes) = self.pipes.try_lock() {
            pipes.iter().for_each(|pipe| pipe.close(false));
        } else {
            // Another thread of the parent had the lock when this process was forked.
            self.first.close(false);
        }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        self.close();
    }
}

fn new_epoll(first: &Pipe) -> Outcome<RawFd> {
    // SAFETY: a number.
    let descriptor = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if descriptor < 0 {
        return Err(last_errno());
    }
    add_to_epoll(descriptor, first).map(|()| descriptor).inspect_err(|_| {
        // SAFETY: made above.
        unsafe { libc::close(descriptor) };
    })
}

fn add_to_epoll(descriptor: RawFd, pipe: &Pipe) -> Outcome<()> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    // SAFETY: descriptors and a local.
    match unsafe { libc::epoll_ctl(descriptor, libc::EPOLL_CTL_ADD, pipe.descriptor(), &raw mut event) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

/// See [`EventChannel::look`].
fn look(wait: &mut ShortWait, at_most: Duration, pipe: RawFd, record: &mut [u8]) -> Option<isize> {
    let mut is_first = true;
    wait.look(at_most, || {
        // SAFETY: the buffer is that long.
        let count = unsafe {
            let (flags, nobody) = (libc::MSG_DONTWAIT, ptr::null_mut::<c_void>());
            libc::syscall(libc::SYS_recvfrom, pipe, record.as_mut_ptr(), record.len(), flags, nobody, nobody)
        };
        if count >= 0 || last_errno() != libc::EAGAIN {
            return Some(count as isize);
        }
        // SAFETY: a number.
        if std::mem::take(&mut is_first) && unsafe { libc::fcntl(pipe, libc::F_GETFL) } & libc::O_NONBLOCK != 0 {
            set_errno(libc::EAGAIN);
            return Some(-1);
        }
        None
    })
}

/// Reads a record if there is one, though the descriptor may be a blocking one. `None`: nothing
/// there, or the end.
fn read_without_waiting(pipe: RawFd, record: &mut [u8]) -> Option<usize> {
    // SAFETY: the buffer is that long.
    let count = unsafe { libc::recv(pipe, record.as_mut_ptr().cast(), record.len(), libc::MSG_DONTWAIT) };
    usize::try_from(count).ok().filter(|count| *count > 0)
}

/// `rdma_create_event_channel(3)`. ENODEV without a router.
#[unsafe(no_mangle)]
pub extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    pointer(|| Ok(EventChannel::create()?.into_c()))
}

/// `rdma_destroy_event_channel(3)`.
///
/// # Safety
/// `channel` came from [`rdma_create_event_channel`], and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    if channel.is_null() {
        return;
    }
    // SAFETY: the C contract.
    quiet(|| unsafe { EventChannel::from_raw(channel) }.close());
}

/// Whether an identifier is on this channel.
pub(crate) fn is_on(id: &Id, channel: &EventChannel) -> bool {
    std::ptr::eq(Arc::as_ptr(&id.state().channel), channel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_finds_records_and_ends_and_waits_for_nobody_who_does_not_wait() {
        // Nobody looks on one processor.
        if freeflow_shm::cpu_count() == 1 {
            return;
        }
        let mut pair = [0; 2];
        // SAFETY: a local.
        assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, pair.as_mut_ptr()) }, 0);
        let ([read, write], mut record) = (pair, [0; 8]);
        // Long enough for the test to fail by its time limit.
        let mut found = |at_most| {
            let mut wait = ShortWait::default();
            assert_eq!(wait.look(Duration::ZERO, || None::<()>), None);
            wait.note_woken(Duration::from_secs(3600));
            look(&mut wait, at_most, read, &mut record)
        };
        // SAFETY: bytes of a local; descriptors of this test.
        unsafe {
            assert_eq!(found(Duration::ZERO), None, "a read would wait");
            let thread = std::thread::spawn(move || libc::write(write, c"abc".as_ptr().cast(), 3));
            assert_eq!(found(Duration::from_secs(3600)), Some(3));
            assert_eq!(thread.join().unwrap(), 3);
            libc::fcntl(read, libc::F_SETFL, libc::O_NONBLOCK);
            let refused = found(Duration::from_secs(3600));
            assert_eq!((refused, last_errno()), (Some(-1), libc::EAGAIN));
            libc::close(write);
            assert_eq!(found(Duration::from_secs(3600)), Some(0));
            libc::close(read);
        }
    }

    fn event(key: u64) -> QueuedEvent {
        QueuedEvent::Own { key, kind: 0, status: 0, argument: 0 }
    }

    fn key_of(taken: &Taken) -> Option<u64> {
        match taken {
            Taken::Event(event) => Some(event.key()),
            _ => None,
        }
    }

    /// A pipe: keys, and 0 for a marker.
    fn drain(backlog: &mut Backlog, pipe: &mut VecDeque<u64>, key: u64) -> Vec<u64> {
        let (events, markers): (Vec<u64>, Vec<u64>) = pipe.drain(..).partition(|key| *key != 0);
        let found = events.into_iter().map(event).collect();
        let (wanted, marks) = backlog.extract(found, markers.len(), |other| other == key);
        pipe.extend(std::iter::repeat_n(0, marks));
        wanted.iter().map(QueuedEvent::key).collect()
    }

    fn read(backlog: &mut Backlog, pipe: &mut VecDeque<u64>) -> Option<u64> {
        let record = pipe.pop_front()?;
        key_of(&backlog.take((record != 0).then(|| event(record))))
    }

    #[test]
    fn identifiers_that_go_unread_leave_no_marker_behind() {
        let (mut backlog, mut pipe) = (Backlog::default(), (1..=40).collect::<VecDeque<u64>>());
        for gone in 1..=30 {
            assert_eq!(drain(&mut backlog, &mut pipe, gone), [gone]);
            assert_eq!(pipe.len(), backlog.entries.len(), "after {gone}");
            // Records written meanwhile come behind.
            pipe.push_back(100 + gone);
        }
        let read: Vec<_> = std::iter::from_fn(|| read(&mut backlog, &mut pipe)).collect();
        assert_eq!(read, (31..=40).chain(101..=130).collect::<Vec<u64>>());
        assert!(pipe.is_empty() && backlog.entries.is_empty() && backlog.spare == 0);
    }

    #[test]
    fn a_marker_in_hand_does_not_take_what_comes_after_its_entry_went() {
        let (mut backlog, mut pipe) = (Backlog::default(), VecDeque::from([1, 2]));
        assert!(drain(&mut backlog, &mut pipe, 9).is_empty());
        // Another thread reads both markers; before it looks, both identifiers go, and a third
        // event comes.
        assert_eq!(std::mem::take(&mut pipe), [0, 0]);
        assert_eq!(drain(&mut backlog, &mut pipe, 1), [1]);
        assert_eq!(drain(&mut backlog, &mut pipe, 2), [2]);
        backlog.entries.push_back(event(3));
        pipe.push_back(0);
        let outcomes = [(); 3].map(|()| key_of(&backlog.take(None)));
        assert_eq!(outcomes, [None, None, Some(3)]);
        assert_eq!(backlog.spare, 0);
    }
}
