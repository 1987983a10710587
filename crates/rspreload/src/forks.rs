//! Connections that a child of a fork goes on with, if RDMAV_FORK_SAFE asks for it (as rdma-core's
//! preload library does).
//!
//! A connection is its process': its queue pair, its memory, its session with the router. So the
//! child gets one end of a pair of ordinary sockets in the place of each connection, and the parent
//! keeps the other. Whose the connection is, the parent decides by what it does next, as servers
//! do: if it closes its descriptor, a thread of the parent carries the bytes between the pair and
//! the rsocket until both directions are over; if it reads or writes, the connection is its own,
//! and the child's end is closed. All children have the same end, as with sockets. The connection
//! ends with the parent.
//!
//! rdma-core does it otherwise: connections begin as TCP and change at their first use, by
//! whichever process that is, which wants a TCP connection between the containers and the same
//! library at the other end.
use crate::names::Name;
use crate::queries;
use crate::real::{self, errno};
use crate::table::{self, FD_MAX, inside};
use libc::{c_int, c_long, c_void, pollfd, sockaddr, socklen_t};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Bytes that one direction holds on its way.
const PIECE_BYTES: usize = 64 << 10;
/// How long the end of the process waits for connections of children that have ended.
const EXIT_WAIT: Duration = Duration::from_secs(1);
const EXIT_LOOK: Duration = Duration::from_millis(5);

/// Of each rsocket that a child may go on with, plus one: the parent's end of the pair (also while
/// it is carried), the children's.
static PARENT_END: [AtomicI32; FD_MAX] = [const { AtomicI32::new(0) }; FD_MAX];
static CHILD_END: [AtomicI32; FD_MAX] = [const { AtomicI32::new(0) }; FD_MAX];
/// Names of such an rsocket. In the child by the program's descriptor; those are never freed, for
/// another thread may read them.
static NAMES: [AtomicPtr<Names>; FD_MAX] = [const { AtomicPtr::new(ptr::null_mut()) }; FD_MAX];
static INHERITED: [AtomicPtr<Names>; FD_MAX] = [const { AtomicPtr::new(ptr::null_mut()) }; FD_MAX];
/// Whether any of these was ever filled: reads and writes look at nothing else.
static IN_USE: AtomicBool = AtomicBool::new(false);
/// Connections that are carried.
static CARRIED: AtomicU32 = AtomicU32::new(0);
/// Held while ends are made or given away; not a mutex, since a child must find it open.
static BUSY: AtomicBool = AtomicBool::new(false);

/// Names of the connection, since the pair has none.
pub struct Names {
    peer: Name,
    own: Name,
}

/// Whether the environment asks for it.
pub fn is_wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| {
        let value = std::env::var("RDMAV_FORK_SAFE").unwrap_or_default();
        value.trim().parse::<i64>().is_ok_and(|number| number != 0)
    })
}

/// No signal handler runs meanwhile: it might close something, and wait for its own thread.
fn locked<T>(call: impl FnOnce() -> T) -> T {
    without_signals(|| {
        // Acquire: pairs with the Release below.
        while BUSY.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        let answer = call();
        BUSY.store(false, Ordering::Release);
        answer
    })
}

fn get(ends: &[AtomicI32; FD_MAX], rsocket: c_int) -> c_int {
    ends[rsocket as usize].load(Ordering::Acquire) - 1
}

fn set(ends: &[AtomicI32; FD_MAX], rsocket: c_int, end: c_int) {
    ends[rsocket as usize].store(end + 1, Ordering::Release);
}

/// Without the C library's functions of descriptors: they are looked up when they are first called,
/// and a child may not do that.
fn close_quietly(fd: c_int) {
    // SAFETY: no pointers.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

/// Before a fork, in the parent: each connection gets a pair, if it has none yet.
pub extern "C" fn before() {
    if !is_wanted() {
        return;
    }
    let saved = errno();
    inside(|| {
        locked(|| {
            for rsocket in table::all() {
                make_pair(rsocket);
            }
        });
    });
    real::set_errno(saved);
}

fn make_pair(rsocket: c_int) {
    if !queries::is_stream(rsocket) {
        return;
    }
    if get(&CHILD_END, rsocket) < 0 {
        let Some(peer) = queries::name(real::rgetpeername, rsocket) else { return };
        let Some(own) = queries::name(real::rgetsockname, rsocket) else { return };
        let mut ends = [0; 2];
        // SAFETY: room for two.
        if unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0, ends.as_mut_ptr()) } != 0
        {
            return;
        }
        let before = NAMES[rsocket as usize].swap(Box::into_raw(Box::new(Names { peer, own })), Ordering::AcqRel);
        if !before.is_null() {
            // SAFETY: of an earlier rsocket of this number, made below; only a fork reads it, and
            // who makes pairs is before one.
            drop(unsafe { Box::from_raw(before) });
        }
        set(&PARENT_END, rsocket, ends[0]);
        set(&CHILD_END, rsocket, ends[1]);
        IN_USE.store(true, Ordering::Release);
    }
    // SAFETY: no pointers.
    unsafe {
        let status = real::rfcntl(rsocket, libc::F_GETFL, 0 as c_long);
        real::fcntl(get(&CHILD_END, rsocket), libc::F_SETFL, (status & libc::O_NONBLOCK) as libc::c_ulong);
    }
}

/// In the child: its descriptors stand for the children's ends, and it has nothing else of all
/// this. System calls only.
pub fn in_child() {
    BUSY.store(false, Ordering::Relaxed);
    CARRIED.store(0, Ordering::Relaxed);
    if !IN_USE.load(Ordering::Relaxed) {
        return;
    }
    for fd in table::known(0, u32::MAX) {
        let Some(rsocket) = table::rsocket_of(fd) else { continue };
        let end = get(&CHILD_END, rsocket);
        if end < 0 {
            continue;
        }
        // SAFETY: no pointers.
        unsafe {
            let flags = libc::syscall(libc::SYS_fcntl, fd, libc::F_GETFD);
            let flags = if flags & libc::c_long::from(libc::FD_CLOEXEC) != 0 { libc::O_CLOEXEC } else { 0 };
            if libc::syscall(libc::SYS_dup3, end, fd, flags) < 0 {
                continue;
            }
        }
        let _ = table::remove(fd);
        INHERITED[fd as usize].store(NAMES[rsocket as usize].load(Ordering::Relaxed), Ordering::Relaxed);
    }
    for rsocket in 0..FD_MAX as c_int {
        NAMES[rsocket as usize].store(ptr::null_mut(), Ordering::Relaxed);
        for ends in [&PARENT_END, &CHILD_END] {
            let end = get(ends, rsocket);
            if end >= 0 {
                set(ends, rsocket, -1);
                close_quietly(end);
            }
        }
    }
}

/// After a read or a write of the parent: the connection is its own.
#[inline]
pub fn note_use(fd: c_int) {
    if IN_USE.load(Ordering::Relaxed)
        && let Some(rsocket) = table::rsocket_of(fd)
        && get(&CHILD_END, rsocket) >= 0
    {
        locked(|| drop_pair(rsocket));
    }
}

/// The parent's end goes last: a process that may use it finds it closed.
fn drop_pair(rsocket: c_int) -> Option<c_int> {
    let (parent, child) = (get(&PARENT_END, rsocket), get(&CHILD_END, rsocket));
    if child < 0 {
        return None;
    }
    for (ends, end) in [(&CHILD_END, child), (&PARENT_END, parent)] {
        set(ends, rsocket, -1);
        close_quietly(end);
    }
    Some(rsocket)
}

/// The parent has closed its last descriptor of the rsocket. Whether a child goes on with it; else
/// it is to be closed.
pub fn hand_over(rsocket: c_int) -> bool {
    if !IN_USE.load(Ordering::Acquire) || get(&CHILD_END, rsocket) < 0 {
        return false;
    }
    let end = locked(|| {
        let (parent, child) = (get(&PARENT_END, rsocket), get(&CHILD_END, rsocket));
        if child >= 0 {
            set(&CHILD_END, rsocket, -1);
            close_quietly(child);
        }
        parent
    });
    if has_ended(end) {
        give_back(rsocket, end);
        return false;
    }
    CARRIED.fetch_add(1, Ordering::AcqRel);
    let carrier = move || {
        inside(|| {
            carry(rsocket, end);
            give_back(rsocket, end);
            // SAFETY: nobody else has it.
            unsafe { real::rclose(rsocket) };
        });
        CARRIED.fetch_sub(1, Ordering::AcqRel);
    };
    // The program's signals are not for this thread.
    let begun = without_signals(|| inside(|| Builder::new().name("rsocket fork".into()).spawn(carrier).is_ok()));
    if !begun {
        CARRIED.fetch_sub(1, Ordering::AcqRel);
        give_back(rsocket, end);
    }
    begun
}

/// Before the rsocket is closed, since its number is another's then.
fn give_back(rsocket: c_int, end: c_int) {
    locked(|| {
        set(&PARENT_END, rsocket, -1);
        close_quietly(end);
    });
}

fn without_signals<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: sets of this function's own.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let answer = call();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        answer
    }
}

/// Whether no child has the other end any more, and none has left anything in it.
fn has_ended(end: c_int) -> bool {
    let mut entry = pollfd { fd: end, events: 0, revents: 0 };
    let mut bytes: c_int = 0;
    // SAFETY: one entry; room for a number.
    unsafe {
        real::poll(&raw mut entry, 1, 0);
        real::ioctl(end, libc::FIONREAD, (&raw mut bytes).cast());
    }
    entry.revents & libc::POLLHUP != 0 && bytes == 0
}

/// One direction: what was read and not written yet.
struct Piece {
    room: Vec<u8>,
    begin: usize,
    end: usize,
    is_over: bool,
}

impl Piece {
    fn new() -> Self {
        Self { room: vec![0; PIECE_BYTES], begin: 0, end: 0, is_over: false }
    }

    fn is_empty(&self) -> bool {
        self.begin == self.end
    }

    fn wants(&self) -> bool {
        self.is_empty() && !self.is_over
    }

    /// Whether something new came, or its end.
    fn fill(&mut self, read: impl FnOnce(*mut c_void, usize) -> isize) -> bool {
        match read(self.room.as_mut_ptr().cast(), self.room.len()) {
            count @ 1.. => (self.begin, self.end) = (0, count as usize),
            -1 if matches!(errno(), libc::EAGAIN | libc::EINTR) => return false,
            _ => self.is_over = true,
        }
        true
    }

    /// False: nobody takes it any more.
    fn drain(&mut self, write: impl FnOnce(*const c_void, usize) -> isize) -> bool {
        let rest = &self.room[self.begin..self.end];
        match write(rest.as_ptr().cast(), rest.len()) {
            count @ 0.. => self.begin += count as usize,
            _ => return matches!(errno(), libc::EAGAIN | libc::EINTR),
        }
        true
    }
}

/// Carries bytes both ways until no child has its end any more, or nothing can come for it.
fn carry(rsocket: c_int, end: c_int) {
    // SAFETY: no pointers.
    unsafe {
        real::rfcntl(rsocket, libc::F_SETFL, c_long::from(libc::O_NONBLOCK));
        real::fcntl(end, libc::F_SETFL, libc::O_NONBLOCK as libc::c_ulong);
    }
    let (mut to_child, mut to_peer) = (Piece::new(), Piece::new());
    loop {
        let wanted = |read: bool, write: bool| {
            let bits = |on: bool, bit: i16| if on { bit } else { 0 };
            bits(read, libc::POLLIN) | bits(write, libc::POLLOUT)
        };
        // An end that hung up would be ready for ever: each is asked only if something can be done
        // about it.
        let looks_at_peer = to_child.wants() || !to_peer.is_empty();
        let looks_at_child = to_peer.is_empty() || !to_child.is_empty();
        let mut entries = [
            pollfd {
                fd: if looks_at_peer { rsocket } else { -1 },
                events: wanted(to_child.wants(), !to_peer.is_empty()),
                revents: 0,
            },
            pollfd {
                fd: if looks_at_child { end } else { -1 },
                events: wanted(to_peer.wants(), !to_child.is_empty()),
                revents: 0,
            },
        ];
        // SAFETY: two entries.
        if unsafe { real::rpoll(entries.as_mut_ptr(), 2, -1) } < 0 && errno() != libc::EINTR {
            return;
        }
        let [peer, child] = entries.map(|entry| entry.revents);
        // SAFETY: pieces are as long as they say.
        unsafe {
            if peer != 0 && to_child.wants() {
                to_child.fill(|room, bytes| real::rrecv(rsocket, room, bytes, 0));
                if to_child.is_over {
                    real::shutdown(end, libc::SHUT_WR);
                }
            }
            if child != 0 && to_peer.wants() && to_peer.fill(|room, bytes| real::recv(end, room, bytes, 0)) {
                if to_peer.is_over {
                    real::rshutdown(rsocket, libc::SHUT_WR);
                }
            } else if child & libc::POLLHUP != 0 && to_peer.is_empty() && to_peer.is_over {
                return;
            }
            let flags = libc::MSG_NOSIGNAL;
            if !to_peer.is_empty() && !to_peer.drain(|room, bytes| real::rsend(rsocket, room, bytes, flags)) {
                return;
            }
            if !to_child.is_empty() && !to_child.drain(|room, bytes| real::send(end, room, bytes, flags)) {
                // The child reads no more; what it wrote is still carried.
                (to_child.begin, to_child.end, to_child.is_over) = (0, 0, true);
            }
        }
        if to_peer.is_over && to_child.is_over && to_child.is_empty() {
            return;
        }
    }
}

/// At the end of the parent: children that have ended leave bytes behind.
pub fn wait_for_carriers() {
    let until = Instant::now() + EXIT_WAIT;
    while CARRIED.load(Ordering::Acquire) > 0 && Instant::now() < until {
        std::thread::sleep(EXIT_LOOK);
    }
}

/// In the child: what the connection behind a descriptor is called, and whether it is one.
pub fn is_inherited(fd: c_int) -> bool {
    names(fd).is_some()
}

fn names(fd: c_int) -> Option<&'static Names> {
    if !IN_USE.load(Ordering::Relaxed) {
        return None;
    }
    let slot = usize::try_from(fd).ok().and_then(|index| INHERITED.get(index))?;
    // SAFETY: null or never freed.
    unsafe { slot.load(Ordering::Acquire).as_ref() }
}

/// The answer of `getpeername` and `getsockname` for a descriptor that a child has from its parent.
///
/// # Safety
/// As of `getpeername(2)`.
pub unsafe fn write_name(fd: c_int, is_peer: bool, address: *mut sockaddr, length: *mut socklen_t) -> Option<c_int> {
    let names = names(fd)?;
    let (name, bytes) = if is_peer { &names.peer } else { &names.own };
    if address.is_null() || length.is_null() {
        return Some(real::set_errno(libc::EFAULT));
    }
    // SAFETY: this function's contract: as much room as is said.
    unsafe {
        let count = (*length).min(*bytes) as usize;
        ptr::copy_nonoverlapping(ptr::from_ref(name).cast::<u8>(), address.cast(), count);
        *length = *bytes;
    }
    Some(0)
}

/// The descriptor is closed, or becomes a copy of another.
pub fn forget_names(fd: c_int) {
    if is_inherited(fd) {
        INHERITED[fd as usize].store(ptr::null_mut(), Ordering::Release);
    }
}

pub fn copy_names(from: c_int, copy: c_int) {
    if is_inherited(from)
        && let Some(slot) = usize::try_from(copy).ok().and_then(|index| INHERITED.get(index))
    {
        slot.store(INHERITED[from as usize].load(Ordering::Acquire), Ordering::Release);
    }
}
