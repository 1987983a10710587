//! Moving bytes of a stream: send and receive. One sender and one receiver at a time; each copies
//! at its end once.
use crate::ffi::{Errno, Outcome};
use crate::link::{INLINE_BYTES_MAX, Link};
use crate::pieces::Pieces;
use crate::socket::StreamSocket;
use crate::stream::{Failure, Source, State, Stream, Write};
use crate::wait::Deadline;
use libc::c_int;
use std::mem::MaybeUninit;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// The first transfer of a long message is short, so that the other end begins to copy while we do;
/// each later one is twice as long. While so much is under way the other end has something to do,
/// and few long ones are cheaper.
const FIRST_TRANSFER_BYTES: usize = 16384;
const TRANSFER_BYTES_MAX: usize = 256 << 10;
/// Copies up to this are done under the lock.
const SHORT_COPY_BYTES: usize = 4096;
/// Flags that ask for what there is not.
const SEND_FLAGS_REFUSED: c_int = libc::MSG_OOB;
const RECEIVE_FLAGS_REFUSED: c_int = libc::MSG_OOB | libc::MSG_ERRQUEUE;

impl StreamSocket {
    fn nonblocking(&self, flags: c_int) -> bool {
        flags & libc::MSG_DONTWAIT != 0 || self.is_nonblocking()
    }

    /// # Errors
    /// EAGAIN, EINTR; ENOTCONN; EPIPE: shut down here; ECONNRESET: closed at the other end;
    /// EOPNOTSUPP. Only if nothing was sent.
    pub fn send(&self, mut pieces: Pieces<'_>, flags: c_int) -> Outcome<usize> {
        let total = pieces.bytes().ok_or(libc::EINVAL)?;
        if flags & SEND_FLAGS_REFUSED != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let nonblocking = self.nonblocking(flags);
        let deadline = if nonblocking { Deadline::never() } else { self.send_deadline() };
        let link = self.ready_link(nonblocking, deadline)?;
        let _sender = self.send_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if self.look_at_events_sometimes() {
            // A program that only sends, and has room, hears of the other end's goodbye here.
            link.turn(&mut link.lock());
        }
        self.announce_mappings(link, nonblocking, deadline)?;
        let is_first = total > FIRST_TRANSFER_BYTES && !link.lock().stream.has_under_way(FIRST_TRANSFER_BYTES as u32);
        let (mut sent, mut chunk) = (0, if is_first { FIRST_TRANSFER_BYTES } else { TRANSFER_BYTES_MAX });
        while sent < total {
            let wanted = (total - sent).min(chunk) as u32;
            let write =
                match self.plan(link, nonblocking, deadline, |core, slots| core.plan_send(wanted, &mut { slots })) {
                    Ok(write) => write,
                    Err(error) if sent == 0 => return Err(error),
                    Err(_) => break,
                };
            if let Err(error) = self.carry_out(link, &write, &mut pieces) {
                return if sent == 0 { Err(error) } else { Ok(sent) };
            }
            sent += write.bytes as usize;
            chunk = (chunk * 2).min(TRANSFER_BYTES_MAX);
        }
        Ok(sent)
    }

    #[cold]
    fn slow_deadline(&self, send: bool) -> Deadline {
        let setup = self.setup();
        Deadline::after(if send { setup.settings.send_timeout } else { setup.settings.receive_timeout })
    }

    #[inline]
    pub(crate) fn send_deadline(&self) -> Deadline {
        if self.has_timeouts() { self.slow_deadline(true) } else { Deadline::never() }
    }

    #[inline]
    fn receive_deadline(&self) -> Deadline {
        if self.has_timeouts() { self.slow_deadline(false) } else { Deadline::never() }
    }

    /// Plans a write, waiting for room if it must.
    #[inline]
    pub(crate) fn plan(
        &self,
        link: &Link,
        nonblocking: bool,
        deadline: Deadline,
        mut plan: impl FnMut(&mut Stream, &crate::memory::Lists) -> Option<Write>,
    ) -> Outcome<Write> {
        if let Some(write) = plan(&mut link.lock().stream, &link.lists) {
            return Ok(write);
        }
        link.grow_send_ring();
        let mut planned = None;
        self.wait_until(link, nonblocking, deadline, |core| {
            planned = plan(&mut core.stream, &link.lists);
            planned.is_some() || !core.stream.state().sends()
        })?;
        planned.ok_or_else(|| send_error(&link.lock().stream))
    }

    /// Fills the ring if the write needs it, and posts.
    #[inline]
    pub(crate) fn carry_out(&self, link: &Link, write: &Write, pieces: &mut Pieces<'_>) -> Outcome<()> {
        let bytes = write.bytes as usize;
        let posted = match write.source {
            Source::Ring(spans) => {
                spans.into_iter().for_each(|span| pieces.fill(link.send_rings.of(span.ring), span));
                // SAFETY: not inline.
                unsafe { link.post(write, std::ptr::null()) }
            }
            Source::Inline => {
                let (pointer, length) = pieces.front(bytes);
                if length == bytes {
                    pieces.take(bytes, |_, _, _| {});
                    // SAFETY: the piece is valid for so many bytes.
                    unsafe { link.post(write, pointer) }
                } else {
                    let mut gathered = [MaybeUninit::<u8>::uninit(); INLINE_BYTES_MAX];
                    let room = gathered.as_mut_ptr().cast::<u8>();
                    pieces.take(bytes, |from, done, length| {
                        // SAFETY: inline writes are not longer than the room; the piece is valid.
                        unsafe { std::ptr::copy_nonoverlapping(from, room.add(done), length) };
                    });
                    // SAFETY: filled so far.
                    unsafe { link.post(write, room) }
                }
            }
        };
        if posted.is_err() {
            link.lock().stream.fail(Failure::Transport);
        }
        posted
    }

    /// # Errors
    /// EAGAIN, EINTR; ENOTCONN; ECONNRESET: the other end is gone without a goodbye; EOPNOTSUPP.
    /// Only if nothing was received. 0 bytes: the other end sends no more.
    pub fn receive(&self, mut pieces: Pieces<'_>, flags: c_int) -> Outcome<usize> {
        let total = pieces.bytes().ok_or(libc::EINVAL)?;
        if flags & RECEIVE_FLAGS_REFUSED != 0 {
            return Err(if flags & libc::MSG_ERRQUEUE != 0 { libc::EAGAIN } else { libc::EOPNOTSUPP });
        }
        let nonblocking = self.nonblocking(flags);
        let deadline = if nonblocking { Deadline::never() } else { self.receive_deadline() };
        let link = self.ready_link(nonblocking, deadline)?;
        let _receiver = self.receive_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if flags & libc::MSG_PEEK != 0 && total != 0 {
            let least = if flags & libc::MSG_WAITALL != 0 { total } else { 1 };
            let waited = self.wait_for_data(link, least, nonblocking, deadline);
            let bytes = Self::peek(link, &mut pieces, total);
            return if bytes == 0 { waited.map(|_| 0) } else { Ok(bytes) };
        }
        let mut done = 0;
        while done < total {
            let waited = self.wait_for_data(link, 1, nonblocking, deadline);
            match waited {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) if done != 0 => break,
                Err(error) => return Err(error),
            }
            done += self.copy_out(link, &mut pieces, total - done);
            if flags & libc::MSG_WAITALL == 0 {
                break;
            }
        }
        Ok(done)
    }

    /// Copies what is there, and leaves it there.
    fn peek(link: &Link, pieces: &mut Pieces<'_>, wanted: usize) -> usize {
        let spans = link.lock().stream.readable(wanted);
        spans.into_iter().for_each(|span| pieces.extract(link.receive_rings.of(span.ring), span));
        spans.iter().map(|span| span.bytes as usize).sum()
    }

    /// Whether there are `least` bytes, or as many as there is room for; false: there never will
    /// be.
    #[inline]
    fn wait_for_data(&self, link: &Link, least: usize, nonblocking: bool, deadline: Deadline) -> Outcome<bool> {
        if link.lock().stream.unread() as usize >= least {
            return Ok(true);
        }
        let mut state = State::Opening;
        let mut found = false;
        self.wait_until(link, nonblocking, deadline, |core| {
            let unread = core.stream.unread() as usize;
            found = unread >= least || (unread != 0 && core.stream.is_full());
            state = core.stream.state();
            found || !state.receives()
        })?;
        match state {
            State::Failed(_) if !found => Err(libc::ECONNRESET),
            _ => Ok(found),
        }
    }

    #[inline]
    fn copy_out(&self, link: &Link, pieces: &mut Pieces<'_>, wanted: usize) -> usize {
        let mut core = link.lock();
        let spans = core.stream.readable(wanted);
        let bytes = spans[0].bytes + spans[1].bytes;
        if bytes as usize > SHORT_COPY_BYTES {
            // The other end writes nothing here until it is consumed, and there is one receiver.
            drop(core);
            spans.into_iter().for_each(|span| pieces.extract(link.receive_rings.of(span.ring), span));
            core = link.lock();
        } else {
            spans.into_iter().for_each(|span| pieces.extract(link.receive_rings.of(span.ring), span));
        }
        core.stream.consume(bytes);
        link.give_credits(&mut core);
        let outgrown = core.stream.outgrows_receive_ring();
        drop(core);
        if outgrown {
            link.grow_receive_ring();
        }
        bytes as usize
    }

    /// The events of `poll(2)`.
    pub fn readiness(&self, events: i16) -> i16 {
        let Some(link) = self.connected_link() else { return self.readiness_of_setup(events) };
        let mut core = link.lock();
        link.turn(&mut core);
        // Nearly always there is room to send: it may not keep the other end's death from being
        // seen.
        if core.stream.state().is_open() && self.is_time_to_look() {
            drop(core);
            self.look_at_events_sometimes();
            core = link.lock();
        }
        let (state, unread) = (core.stream.state(), core.stream.unread() != 0);
        let mut ready = 0;
        if unread || !state.receives() {
            ready |= libc::POLLIN | libc::POLLRDNORM;
        }
        if core.stream.can_send(&mut &link.lists) || !state.sends() {
            ready |= libc::POLLOUT | libc::POLLWRNORM;
        }
        if !state.receives() {
            ready |= libc::POLLRDHUP;
        }
        ready &= events;
        drop(core);
        match state {
            State::Failed(_) => ready |= libc::POLLERR | libc::POLLHUP,
            // Programs take it for the end of all: not while there is something to read.
            State::Disconnected if !unread => ready |= libc::POLLHUP,
            _ => {}
        }
        ready
    }

    fn readiness_of_setup(&self, events: i16) -> i16 {
        use crate::socket::Phase;
        let mut setup = self.setup();
        self.drive(&mut setup);
        let phase = setup.phase;
        let pending = !setup.pending.is_empty();
        drop(setup);
        match phase {
            Phase::Connected => self.readiness(events),
            Phase::Accepting if self.ready_link(true, Deadline::never()).is_ok() => self.readiness(events),
            Phase::Initial | Phase::Bound => events & (libc::POLLOUT | libc::POLLWRNORM) | libc::POLLHUP,
            Phase::Listening if pending => events & (libc::POLLIN | libc::POLLRDNORM),
            Phase::Failed(_) => events & (libc::POLLIN | libc::POLLOUT) | libc::POLLERR | libc::POLLHUP,
            _ => 0,
        }
    }

    fn has_timeouts(&self) -> bool {
        self.timeouts.load(Ordering::Relaxed)
    }
}

/// Why nothing more can be sent.
fn send_error(stream: &Stream) -> Errno {
    match stream.state() {
        _ if stream.is_shut_for_sending() => libc::EPIPE,
        State::Open(_) | State::Opening => libc::EPIPE,
        State::Disconnected | State::Failed(_) => libc::ECONNRESET,
    }
}
