//! The two ends of a connectivity test talk by lines of JSON: over a socket that the command has given both, or over
//! TCP to an end that another host's operator has started.
//!
//! The other end may be anybody of the network: lines are bounded, a line that makes no sense ends the conversation,
//! and nothing in them is used but numbers of the test's own objects.

use crate::failure::{Context as _, Failure, Result, fail};
use freeflow_verbs::PathMtu;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Of the conversation: both ends have the same, or the test says so.
pub const VERSION: u32 = 1;
const LINE_BYTES_MAX: usize = 4096;

/// An end's objects, for the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    pub version: u32,
    /// The GID as an IPv6 address.
    pub gid: std::net::Ipv6Addr,
    pub rc_qpn: u32,
    pub ud_qpn: u32,
    /// Of the part of memory that the peer may reach.
    pub address: u64,
    pub rkey: u32,
    pub path_mtu: PathMtu,
}

/// A request of the asking end; each has one [`Answer`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Step {
    /// Asks for the other end's objects → `Facts`.
    Facts,
    /// Accepts one TCP connection and sends back what comes → `Port`, then `Done` behind its end.
    Tcp,
    /// Connects the RC QP → `Done`.
    Connect { facts: Facts, may_be_denied: bool },
    /// Sends back messages → `Done` when RECVs are posted, and again after the last one.
    Echo { count: u32, bytes: u32 },
    /// Counts messages of the RC QP that came unasked → `Count`.
    Messages,
    /// Puts a pattern into the window → `Done`.
    Fill { seed: u64, bytes: u32 },
    /// Compares the window with a pattern → `Done`, or `Failed`.
    Verify { seed: u64, bytes: u32 },
    /// Sets the first eight bytes of the window → `Done`.
    SetWord { word: u64 },
    /// → `Word`.
    Word,
    /// Counts datagrams, until so many came or none comes any more → `Done`, then `Count`.
    Datagrams { count: u32 },
    /// Accepts one connection and sends back one message → `Port`, then `Done` or `Failed`.
    Connection,
    /// → `Time`.
    Clock,
    /// The end of the conversation.
    End,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    Facts(Facts),
    Port(u16),
    Count(u32),
    Word(u64),
    /// Unix time, nanoseconds.
    Time(u64),
    Done,
    Failed(String),
}

/// One end of the conversation.
pub struct Conversation {
    stream: File,
    line: Vec<u8>,
}

impl Conversation {
    /// Over a connected stream socket.
    pub fn over(socket: OwnedFd, answer_time: Duration) -> Result<Self> {
        for direction in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
            let set = rustix::net::sockopt::set_socket_timeout(&socket, direction, Some(answer_time));
            set.context("the other end's socket")?;
        }
        Ok(Self { stream: File::from(socket), line: Vec::new() })
    }

    pub fn say(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message).context("a message")?;
        line.push(b'\n');
        self.stream.write_all(&line).context("the other end does not listen")
    }

    /// The next line; `None`: the other end has ended.
    pub fn hear<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let mut buffer = [0; 1024];
        loop {
            if let Some(end) = self.line.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.line.drain(..=end).collect();
                // The error names what came.
                let message = serde_json::from_slice(&line[..end]).map_err(|error| {
                    Failure::new(format!("the other end's message: {}", printable(&error.to_string())))
                })?;
                return Ok(Some(message));
            }
            if self.line.len() > LINE_BYTES_MAX {
                fail!("the other end's message is longer than {LINE_BYTES_MAX} bytes");
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return Ok(None),
                Ok(length) => self.line.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => fail!("the other end does not answer"),
                Err(error) => return Err(error).context("the other end"),
            }
        }
    }

    pub fn answer(&mut self) -> Result<Answer> {
        match self.hear()? {
            Some(Answer::Failed(reason)) => fail!("the other end: {}", printable(&reason)),
            Some(answer) => Ok(answer),
            None => fail!("the other end has ended"),
        }
    }

    pub fn ask(&mut self, step: &Step) -> Result<Answer> {
        self.say(step)?;
        self.answer()
    }

    /// Where the answer is no more than that it was done.
    pub fn order(&mut self, step: &Step) -> Result<()> {
        self.ask(step)?;
        Ok(())
    }
}

/// Of a text by somebody else, for a terminal.
pub fn printable(text: &str) -> String {
    text.chars().take(200).map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

/// Bytes that differ by seed and place.
pub fn pattern(seed: u64, bytes: u32) -> Vec<u8> {
    let mut state = seed | 1;
    let words = (0..u64::from(bytes).div_ceil(8)).flat_map(|_| {
        // Xorshift: each message has other bytes than the one before.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(bytes as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn pair() -> (Conversation, UnixStream) {
        let (one, other) = UnixStream::pair().unwrap();
        (Conversation::over(one.into(), Duration::from_millis(200)).unwrap(), other)
    }

    #[test]
    fn lines_are_bounded_and_checked() {
        let (mut conversation, mut other) = pair();
        other.write_all(b"{\"word\":7}\n\"done\"\n").unwrap();
        assert_eq!(conversation.answer().unwrap(), Answer::Word(7));
        assert_eq!(conversation.answer().unwrap(), Answer::Done);
        other.write_all(b"{\"failed\":\"a\\u001b[2Jb\"}\n").unwrap();
        assert_eq!(conversation.answer().unwrap_err().to_string(), "the other end: a?[2Jb");
        other.write_all(b"nonsense\n").unwrap();
        assert!(conversation.answer().is_err());
        other.write_all(&[b'x'; 3 * LINE_BYTES_MAX]).unwrap();
        assert!(conversation.answer().unwrap_err().to_string().contains("longer than"));
    }

    #[test]
    fn silence_and_an_end_are_failures() {
        let (mut conversation, other) = pair();
        assert!(conversation.answer().unwrap_err().to_string().contains("does not answer"));
        drop(other);
        assert!(conversation.answer().unwrap_err().to_string().contains("has ended"));
    }

    #[test]
    fn patterns_differ() {
        assert_eq!(pattern(5, 100), pattern(5, 100));
        assert_ne!(pattern(5, 100), pattern(7, 100));
        assert_eq!(pattern(5, 3).len(), 3);
    }
}
