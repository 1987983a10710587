//! Router ↔ guest agent of a virtual machine: the *control channel* of one vNIC.
//!
//! Transport: a stream of bytes, a virtio-serial port in the guest and a Unix socket on the host. No descriptor passes.
//! Each side begins with the [`PREAMBLE`] and skips what comes before the other's: a port may still hold what was sent
//! to whoever had it before. Then come frames: a length (u32 LE, at most [`FRAME_BYTES_MAX`]) and one encoded message.
//!
//! Order: the agent sends `Begin`; the router ends what an earlier agent left, clears the shared-memory device and says
//! `Cleared`; the agent sends `Ready`, the router `Serve`. Then library connections and the messages of
//! [`attachment`](crate::attachment) pass, in any order. Each side sends something at least every [`HEARTBEAT_MS`]; a
//! side that has heard nothing for [`SILENCE_MS`] ends the stream.
//!
//! Flow control: of a connection no more than one request is under way. Beyond that the rules of
//! [`attachment`](crate::attachment) hold.
use crate::version::Offer;
use crate::{DecodeError, MESSAGE_BYTES_MAX, attachment, decode, encode, library};
use alloc::vec::Vec;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// First bytes of each side. As the length of a frame they are too long: who begins again in the middle of a stream is
/// found out.
pub const PREAMBLE: [u8; 16] = *b"freeflow-guest-1";
/// Longest message, bytes.
pub const FRAME_BYTES_MAX: usize = MESSAGE_BYTES_MAX + 1024;
/// Each side sends something at least so often, milliseconds.
pub const HEARTBEAT_MS: u64 = 1000;
/// Silence that ends the stream, milliseconds.
pub const SILENCE_MS: u64 = 3000;
/// Bytes of something else before a preamble that a side puts up with.
pub const SKIPPED_BYTES_MAX: usize = 4 << 20;
/// Bytes of the staging area: as much as one access to memory reads or writes.
pub const STAGING_BYTES: u64 = 1 << 18;
/// Versions and features of this release on control channels.
pub const CHANNEL: Offer = Offer::only(1);

/// Where shared-memory devices of run directories on a disk are, and how their names begin.
pub const DEVICE_FALLBACK: &str = "/dev/shm/freeflow-";

/// Whether that is the path of such a device: a link to anything else in the vNIC's directory removes nothing.
#[must_use]
pub fn is_fallback(path: &str) -> bool {
    path.strip_prefix(DEVICE_FALLBACK).is_some_and(|rest| !rest.contains('/'))
}

/// Name of a boot of the guest's kernel.
pub type BootId = [u8; 16];

/// A descriptor of a reply to a library: what the agent gives the library in its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PassedDescriptor {
    /// The shared-memory device.
    Memory,
    /// An eventfd whose writes are `Kick`s.
    Kick,
    /// The end to read of an event channel, which has this number from now on.
    Events(u64),
    /// A sealed file with these bytes.
    Pass([u8; library::PASS_BYTES]),
}

/// To the agent. Offsets are in what the agent said of the device's data (`Ready`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
pub enum ToGuest {
    /// Nothing of an earlier boot, or of an earlier agent, is left in the device.
    Cleared,
    /// Refused: of `Begin` and `Ready`. The stream ends.
    Refused { why: alloc::string::String },
    /// Libraries may connect.
    Serve { staging: u64 },
    /// An encoded reply to a library's request, and its descriptors.
    Reply { connection: u64, reply: Vec<u8>, descriptors: Vec<PassedDescriptor> },
    /// The router has closed a connection.
    Close { connection: u64 },
    /// A request to the agent as the vNIC's near half.
    Near(attachment::Request),
    /// Nothing.
    Heartbeat,
}

/// From the agent, which may lie. The agent gives numbers of connections, each once a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
pub enum FromGuest {
    /// The agent has begun, in this boot of the guest's kernel.
    Begin { channel: Offer, boot: BootId },
    /// The device can be used. Its data, as the guest's processes map them, are `bytes` bytes from `offset` of the
    /// host's file on.
    Ready { offset: u64, bytes: u64 },
    /// A library has connected; its process, in the guest's own numbers.
    Connect { connection: u64, pid: i32, uid: u32, gid: u32 },
    /// An encoded request of a library.
    Request { connection: u64, request: Vec<u8> },
    /// A library has closed its connection.
    Close { connection: u64 },
    /// A library has rung while the worker slept.
    Kick { connection: u64 },
    /// A report of the near half.
    Near(attachment::Report),
    /// Nothing.
    Heartbeat,
}

/// One message as a frame.
#[must_use]
pub fn frame<M: Serialize>(message: &M) -> Vec<u8> {
    let body = encode(message);
    let mut bytes = Vec::with_capacity(4 + body.len());
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&body);
    bytes
}

/// Takes messages out of a stream, however its bytes come in.
#[derive(Debug, Default)]
pub struct Frames {
    bytes: Vec<u8>,
    /// Bytes at the beginning that were taken.
    taken: usize,
    has_begun: bool,
    skipped: usize,
}

impl Frames {
    /// Bytes that were read.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.taken > 0 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The other side's preamble was there.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// The next message, if all of it is there.
    ///
    /// # Errors
    /// The other side does not keep to the protocol: the stream is of no use any more.
    pub fn take<M: DeserializeOwned>(&mut self) -> Result<Option<M>, DecodeError> {
        if !self.has_begun && !self.begin()? {
            return Ok(None);
        }
        let rest = &self.bytes[self.taken..];
        let Some((length, rest)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > FRAME_BYTES_MAX {
            return Err(DecodeError::TooLong);
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let message = decode_frame(body)?;
        self.taken += 4 + length;
        Ok(Some(message))
    }

    /// Skips to behind the preamble, and behind each that follows at once: a side that was begun twice. False: it is
    /// not there yet.
    fn begin(&mut self) -> Result<bool, DecodeError> {
        let rest = &self.bytes[self.taken..];
        let found = rest.windows(PREAMBLE.len()).position(|window| window == PREAMBLE);
        let skipped = found.unwrap_or_else(|| rest.len().saturating_sub(PREAMBLE.len() - 1));
        self.skipped += skipped;
        if self.skipped > SKIPPED_BYTES_MAX {
            return Err(DecodeError::TooLong);
        }
        self.taken += skipped;
        if found.is_none() {
            return Ok(false);
        }
        // The next four bytes say whether this is the last one.
        while let Some(rest) = self.bytes.get(self.taken + PREAMBLE.len()..) {
            let count = rest.len().min(PREAMBLE.len());
            if count < 4 {
                return Ok(false);
            }
            if rest[..count] != PREAMBLE[..count] {
                self.taken += PREAMBLE.len();
                self.has_begun = true;
                return Ok(true);
            }
            if count < PREAMBLE.len() {
                return Ok(false);
            }
            self.taken += PREAMBLE.len();
        }
        Ok(false)
    }
}

fn decode_frame<M: DeserializeOwned>(body: &[u8]) -> Result<M, DecodeError> {
    match postcard::take_from_bytes::<M>(body) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(DecodeError::TrailingBytes),
        Err(_) => Err(DecodeError::Malformed),
    }
}

/// The request that a library connection carried, which has to be one message of that protocol.
///
/// # Errors
/// It is longer than such a message.
pub fn check_request(request: &[u8]) -> Result<(), DecodeError> {
    if request.is_empty() || request.len() > MESSAGE_BYTES_MAX { Err(DecodeError::TooLong) } else { Ok(()) }
}

/// Kinds of the descriptors that an encoded reply may bring besides memory, by the kind of the reply alone.
#[must_use]
pub fn descriptors_of(reply: &[u8]) -> Option<&'static [DescriptorKind]> {
    use DescriptorKind::{Events, Kick, Pass};
    let inner = match decode::<library::Reply>(reply).ok()? {
        library::Reply::Placed { reply, .. } => decode::<library::Reply>(&reply).ok()?,
        reply => reply,
    };
    Some(match inner {
        library::Reply::Welcome(_) => &[Kick],
        library::Reply::Context { .. } => &[Events, Pass],
        library::Reply::Channel { .. } | library::Reply::Cm(_) | library::Reply::Done => &[Events],
        _ => &[],
    })
}

/// Kind of a descriptor that is no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorKind {
    /// See [`PassedDescriptor::Kick`].
    Kick,
    /// See [`PassedDescriptor::Events`].
    Events,
    /// See [`PassedDescriptor::Pass`].
    Pass,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn messages() -> [FromGuest; 4] {
        [
            FromGuest::Begin { channel: CHANNEL, boot: [7; 16] },
            FromGuest::Request { connection: 3, request: alloc::vec![9; MESSAGE_BYTES_MAX] },
            FromGuest::Near(attachment::Report::EventTaken { channel: 1 }),
            FromGuest::Heartbeat,
        ]
    }

    fn stream(before: &[u8], preambles: usize) -> Vec<u8> {
        let mut bytes = before.to_vec();
        (0..preambles).for_each(|_| bytes.extend_from_slice(&PREAMBLE));
        messages().iter().for_each(|message| bytes.extend_from_slice(&frame(message)));
        bytes
    }

    fn read(bytes: &[u8], piece: usize) -> Vec<FromGuest> {
        let (mut frames, mut all) = (Frames::default(), Vec::new());
        for piece in bytes.chunks(piece) {
            frames.push(piece);
            while let Some(message) = frames.take().unwrap() {
                all.push(message);
            }
        }
        all
    }

    #[test]
    fn messages_come_whole_however_their_bytes_come() {
        for (before, preambles) in
            [(&b""[..], 1), (b"rest of another stream", 1), (b"freeflow-", 3), (&PREAMBLE[1..], 2)]
        {
            for piece in [1, 3, 16, 17, 4096, 1 << 20] {
                assert_eq!(read(&stream(before, preambles), piece), messages(), "{piece}");
            }
        }
    }

    #[test]
    fn a_side_that_begins_again_is_found_out() {
        let mut frames = Frames::default();
        frames.push(&stream(b"", 1));
        while frames.take::<FromGuest>().unwrap().is_some() {}
        frames.push(&PREAMBLE);
        assert_eq!(frames.take::<FromGuest>(), Err(DecodeError::TooLong));
    }

    #[test]
    fn what_is_no_stream_ends_at_its_limit() {
        let mut frames = Frames::default();
        let mut ended = false;
        for _ in 0..=SKIPPED_BYTES_MAX / 4096 + 1 {
            frames.push(&[0x66; 4096]);
            ended |= frames.take::<FromGuest>().is_err();
        }
        assert!(ended && !frames.has_begun());
    }

    proptest! {
        #[test]
        fn any_bytes_give_messages_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..2000), begun: bool) {
            let mut frames = Frames { has_begun: begun, ..Frames::default() };
            frames.push(&bytes);
            let mut count = 0;
            while let Ok(Some(_)) = frames.take::<FromGuest>() {
                count += 1;
            }
            prop_assert!(count <= bytes.len());
        }
    }
}
