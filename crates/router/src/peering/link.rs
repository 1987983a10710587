//! One TCP connection of the peers thread: a socket and its [`NoiseChannel`].
use super::channel::NoiseChannel;
use super::handle::CmTickets;
use freeflow_engine::HostId;
use freeflow_protocol::peer::PeerMessage;
use freeflow_verbs::{Duration, Instant};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};

/// Time to connect, and to prove who one is.
const HANDSHAKE_MAX: Duration = Duration::from_millis(3000);
/// A peer that takes nothing for so long, or lets so much pile up, is cut off.
const STUCK_MAX: Duration = Duration::from_millis(3000);
const QUEUE_BYTES_MAX: usize = 4 * 1024 * 1024;
/// With less than this in the queue there is room for more announcements.
const QUEUE_BYTES_LOW: usize = 64 * 1024;
/// From so much on connection management finds no room: tenants cause it, and it is sent again
/// anyway. The messages on their way to one host, of which each vNIC has its share, are fewer.
const QUEUE_BYTES_CM: usize = 1024 * 1024;
/// Messages of a turn are written together, up to so many bytes.
const WRITE_BYTES: usize = 32 * 1024;
/// Read from one connection before the next has its turn.
const READ_BYTES: usize = 16 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// TCP's own handshake.
    Connecting,
    Handshaking,
    /// The other side's first encrypted message is still to come.
    Proving,
    Established,
}

pub struct Link {
    stream: TcpStream,
    pub channel: NoiseChannel,
    pub stage: Stage,
    pub from: IpAddr,
    /// The host that was dialed, or that the other end says it is.
    pub host: Option<HostId>,
    /// Dialed from here.
    pub is_dialed: bool,
    pub began: Instant,
    /// When something was last taken from the queue, or it was empty.
    taken: Instant,
    /// Bytes that were ever taken from the queue.
    written: u64,
    /// Of messages in the queue, by what will have been taken when they are out.
    tickets: VecDeque<(u64, CmTickets)>,
}

/// The state of a connection after reading or writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// More may come.
    On,
    Ended,
    Stuck,
}

impl Link {
    /// Begins to connect, from this host's own address: others know it by that.
    pub fn dial(now: Instant, own: IpAddr, to: SocketAddr, host: HostId, channel: NoiseChannel) -> io::Result<Self> {
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
        rustix::net::bind(&socket, &SocketAddr::new(own, 0))?;
        match rustix::net::connect(&socket, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let stage = Stage::Connecting;
        let stream = TcpStream::from(socket);
        Ok(Self {
            stream,
            channel,
            stage,
            from: to.ip(),
            host: Some(host),
            is_dialed: true,
            began: now,
            taken: now,
            written: 0,
            tickets: VecDeque::new(),
        })
    }

    pub fn accepted(now: Instant, stream: TcpStream, from: IpAddr) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let (channel, stage) = (NoiseChannel::listen(), Stage::Handshaking);
        Ok(Self {
            stream,
            channel,
            stage,
            from,
            host: None,
            is_dialed: false,
            began: now,
            taken: now,
            written: 0,
            tickets: VecDeque::new(),
        })
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Events to wait for.
    pub fn interest(&self) -> EventFlags {
        match self.stage {
            Stage::Connecting => EventFlags::OUT,
            _ if self.has_output() => EventFlags::IN | EventFlags::RDHUP | EventFlags::OUT,
            _ => EventFlags::IN | EventFlags::RDHUP,
        }
    }

    /// Whether it was accepted, and the other side has not proved yet who it is.
    pub fn is_pending(&self) -> bool {
        !self.is_dialed && self.stage != Stage::Established
    }

    /// When it has taken too long, as things stand.
    pub fn deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Established => (!self.channel.output().is_empty()).then(|| self.taken + STUCK_MAX),
            _ => Some(self.began + HANDSHAKE_MAX),
        }
    }

    pub fn has_output(&self) -> bool {
        self.stage != Stage::Connecting && !self.channel.output().is_empty()
    }

    /// So much waits that it is better written before the turn's end.
    pub fn is_long(&self) -> bool {
        self.channel.output().len() >= WRITE_BYTES
    }

    pub fn has_room(&self) -> bool {
        self.stage == Stage::Established && self.channel.output().len() < QUEUE_BYTES_LOW
    }

    /// The same for connection management.
    pub fn has_cm_room(&self) -> bool {
        self.channel.output().len() < QUEUE_BYTES_CM
    }

    /// TCP's handshake is done, or has failed.
    pub fn finish_connect(&mut self) -> Flow {
        match self.stream.take_error() {
            Ok(None) if self.stream.set_nodelay(true).is_ok() => {
                self.stage = Stage::Handshaking;
                Flow::On
            }
            _ => Flow::Ended,
        }
    }

    /// Reads once.
    pub fn read(&mut self) -> Flow {
        let mut buffer = [0; READ_BYTES];
        match self.stream.read(&mut buffer) {
            Ok(0) => Flow::Ended,
            Ok(count) => {
                self.channel.handle_bytes(&buffer[..count]);
                Flow::On
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Flow::On,
            Err(_) => Flow::Ended,
        }
    }

    /// Puts a message behind what is to be written.
    pub fn send(&mut self, now: Instant, message: &PeerMessage) {
        if self.channel.output().is_empty() {
            self.taken = now;
        }
        self.channel.send(message);
    }

    /// The places of what was put there last; they are given back once it is written.
    pub fn hold(&mut self, tickets: CmTickets) {
        let waiting = self.channel.output().len() as u64;
        if waiting > 0 {
            self.tickets.push_back((self.written + waiting, tickets));
        }
    }

    fn note_written(&mut self, bytes: usize) {
        self.written += bytes as u64;
        while self.tickets.front().is_some_and(|(end, _)| *end <= self.written) {
            self.tickets.pop_front();
        }
    }

    /// Writes as much as there is and goes.
    pub fn flush(&mut self, now: Instant) -> Flow {
        if self.stage == Stage::Connecting {
            return Flow::On;
        }
        loop {
            let output = self.channel.output();
            if output.is_empty() {
                self.taken = now;
                return Flow::On;
            }
            match self.stream.write(output) {
                Ok(count) => {
                    self.channel.handle_sent(count);
                    self.note_written(count);
                    self.taken = now;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return if output.len() > QUEUE_BYTES_MAX { Flow::Stuck } else { Flow::On };
                }
                Err(_) => return Flow::Ended,
            }
        }
    }
}
