//! Either end of a control channel: frames over a stream of bytes that nobody waits for, and signs of life.
use freeflow_protocol::guest::{Frames, HEARTBEAT_MS, PREAMBLE, SILENCE_MS, frame};
use rustix::event::{Timespec, epoll};
use rustix::io::{Errno, retry_on_intr};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a stream is over.
pub type Ended = &'static str;

/// Bytes that may wait for a side that does not read: more than honest libraries cause.
const OUTGOING_BYTES_MAX: usize = 64 << 20;
/// Read at once.
const READ_BYTES: usize = 256 * 1024;
/// How often a side looks at the clock.
const TICK: Duration = Duration::from_millis(500);
/// This side stood still, rather than the other, if it wakes so much later than it wanted.
const PAUSE_MIN: Duration = Duration::from_millis(200);

/// One end of a stream. Watched by an epoll of its owner's.
pub struct ControlChannel {
    stream: OwnedFd,
    epoll: Arc<OwnedFd>,
    token: u64,
    frames: Frames,
    buffer: Vec<u8>,
    outgoing: Vec<u8>,
    is_full: bool,
    heartbeat: Vec<u8>,
    heard: Instant,
    said: Instant,
}

impl ControlChannel {
    /// Sends the preamble. `stream` does not block; `heartbeat`: the message that says nothing.
    ///
    /// # Errors
    /// It can't be watched.
    pub fn begin(
        stream: OwnedFd,
        epoll: Arc<OwnedFd>,
        token: u64,
        heartbeat: &impl Serialize,
    ) -> std::io::Result<Self> {
        epoll::add(&*epoll, &stream, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?;
        let (now, buffer) = (Instant::now(), vec![0; READ_BYTES]);
        let (frames, outgoing, heartbeat) = (Frames::default(), PREAMBLE.to_vec(), frame(heartbeat));
        Ok(Self { stream, epoll, token, frames, buffer, outgoing, is_full: false, heartbeat, heard: now, said: now })
    }

    /// The other side has begun.
    pub fn has_begun(&self) -> bool {
        self.frames.has_begun()
    }

    /// The preamble once more: for a side that can't know who has read the first.
    pub fn begin_again(&mut self) {
        self.outgoing.extend_from_slice(&PREAMBLE);
    }

    /// Takes in what has come, about [`READ_BYTES`].
    ///
    /// # Errors
    /// The stream is over.
    pub fn read(&mut self) -> Result<(), Ended> {
        match retry_on_intr(|| rustix::io::read(&self.stream, &mut self.buffer[..])) {
            Ok(0) => Err("the other side has closed the control channel"),
            Ok(bytes) => {
                self.heard = Instant::now();
                self.frames.push(&self.buffer[..bytes]);
                Ok(())
            }
            Err(Errno::AGAIN) => Ok(()),
            Err(_) => Err("the control channel can't be read"),
        }
    }

    /// The next message that has come.
    ///
    /// # Errors
    /// The other side does not keep to the protocol.
    pub fn take<M: DeserializeOwned>(&mut self) -> Result<Option<M>, Ended> {
        self.frames.take().map_err(|_| MALFORMED)
    }

    /// Leaves a message for [`Self::flush`].
    pub fn send(&mut self, message: &impl Serialize) {
        self.outgoing.extend_from_slice(&frame(message));
        self.said = Instant::now();
    }

    /// Writes what is left, as far as the other side reads.
    ///
    /// # Errors
    /// The stream is over.
    pub fn flush(&mut self) -> Result<(), Ended> {
        let mut written = 0;
        while written < self.outgoing.len() {
            match retry_on_intr(|| rustix::io::write(&self.stream, &self.outgoing[written..])) {
                Ok(bytes) => written += bytes,
                Err(Errno::AGAIN) => break,
                Err(_) => return Err("the other side has closed the control channel"),
            }
        }
        self.outgoing.drain(..written);
        if self.outgoing.is_empty() && self.outgoing.capacity() > READ_BYTES {
            self.outgoing = Vec::new();
        }
        if self.outgoing.len() > OUTGOING_BYTES_MAX {
            return Err("the other side does not read");
        }
        let is_full = !self.outgoing.is_empty();
        if std::mem::replace(&mut self.is_full, is_full) != is_full {
            let flags = if is_full { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            let data = epoll::EventData::new_u64(self.token);
            epoll::modify(&*self.epoll, &self.stream, data, flags)
                .map_err(|_| "the control channel can't be watched")?;
        }
        Ok(())
    }

    /// Waits for events, half a second at most, and gives signs of life once the other side has begun: a guest may
    /// still be starting.
    ///
    /// # Errors
    /// Nothing was heard for too long.
    pub fn wait(&mut self, events: &mut Vec<epoll::Event>) -> Result<(), Ended> {
        let timeout = Timespec::try_from(TICK).ok();
        let began = Instant::now();
        let _ = epoll::wait(&*self.epoll, rustix::buffer::spare_capacity(events), timeout.as_ref());
        if !self.frames.has_begun() {
            return Ok(());
        }
        let now = Instant::now();
        let late = (now - began).saturating_sub(TICK);
        if late > PAUSE_MIN {
            self.heard += late;
        }
        if now.saturating_duration_since(self.heard) > Duration::from_millis(SILENCE_MS) {
            return Err("nothing was heard of the other side for too long");
        }
        if now - self.said >= Duration::from_millis(HEARTBEAT_MS) {
            self.outgoing.extend_from_slice(&self.heartbeat);
            self.said = now;
        }
        Ok(())
    }
}

impl AsFd for ControlChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The other side sent something that no honest one sends.
pub const MALFORMED: Ended = "the other side does not keep to the protocol of control channels";
