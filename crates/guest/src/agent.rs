//! The agent on one control channel: one thread between the channel, the libraries and the near half.
//!
//! Invariant: this thread waits for no process of the guest. What looks at processes, reaches their memory or freezes
//! their threads is the near half's.
use crate::libraries::{KICK, LIBRARY, Libraries, NearMessage};
use freeflow_protocol::attachment::{Report, Request};
use freeflow_protocol::guest::{BootId, CHANNEL, FromGuest, STAGING_BYTES, ToGuest};
use freeflow_protocol::{MESSAGE_BYTES_MAX, decode, encode};
use freeflow_router::{ControlChannel, begin_near_half};
use freeflow_shm::Segment;
use freeflow_shm::fd::{self, PeerCredentials};
use rustix::event::epoll;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

const EVENT_COUNT: usize = 64;
/// Connections accepted before others are looked at.
const ACCEPT_COUNT: usize = 16;
/// Everybody in the guest may use its vNIC.
const SOCKET_MODE: u32 = 0o666;
const SOCKET: &str = "router.sock";
const STREAM: u64 = u64::MAX;
const NEAR: u64 = u64::MAX - 1;
const LISTENER: u64 = u64::MAX - 2;

/// The shared-memory device.
pub struct Device {
    pub memory: OwnedFd,
    /// Where its data begin in the host's file.
    pub offset: u64,
    pub bytes: u64,
}

/// The near half's stream, and what it has not read yet.
struct NearHalf {
    stream: OwnedFd,
    outgoing: VecDeque<NearMessage>,
    is_full: bool,
}

pub struct Agent<'a> {
    device: &'a Device,
    boot: BootId,
    run_dir: &'a Path,
    epoll: Arc<OwnedFd>,
    channel: ControlChannel,
    has_begun: bool,
    listener: Option<OwnedFd>,
    libraries: Libraries,
    near: Option<NearHalf>,
    buffer: Vec<u8>,
}

impl<'a> Agent<'a> {
    /// Serves libraries until the control channel ends; gives the reason.
    ///
    /// # Errors
    /// Something of this machine's own is not to be had.
    pub fn serve(device: &'a Device, stream: OwnedFd, boot: BootId, run_dir: &'a Path) -> io::Result<String> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let channel = ControlChannel::begin(stream, epoll.clone(), STREAM, &FromGuest::Heartbeat)?;
        let (libraries, buffer) = (Libraries::new(epoll.clone()), vec![0; MESSAGE_BYTES_MAX]);
        let mut agent = Self {
            device,
            boot,
            run_dir,
            epoll,
            channel,
            has_begun: false,
            listener: None,
            libraries,
            near: None,
            buffer,
        };
        let mut events = Vec::with_capacity(EVENT_COUNT);
        let why = loop {
            if let Err(why) = agent.go_round(&mut events)? {
                break why;
            }
        };
        if agent.listener.is_some() {
            let _ = std::fs::remove_file(run_dir.join(SOCKET));
        }
        Ok(why)
    }

    /// The inner error: the channel is over.
    fn go_round(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<Result<(), String>> {
        self.send_to_near_half()?;
        let waited = self.channel.flush().and_then(|()| self.channel.wait(events));
        if let Err(why) = waited {
            return Ok(Err(why.into()));
        }
        for event in events.drain(..) {
            let flags = event.flags;
            let is_over = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::RDHUP);
            match event.data.u64() {
                STREAM => {
                    if let Err(why) = self.receive()? {
                        return Ok(Err(why));
                    }
                }
                NEAR => {
                    if let Err(why) = self.take_reports() {
                        return Ok(Err(why));
                    }
                }
                LISTENER => self.accept(),
                token if token & LIBRARY != 0 => {
                    let message = self.libraries.receive(token & !LIBRARY, is_over);
                    message.iter().for_each(|message| self.channel.send(message));
                }
                token => {
                    let message = self.libraries.take_kick(token & !KICK);
                    message.iter().for_each(|message| self.channel.send(message));
                }
            }
        }
        Ok(Ok(()))
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        for _ in 0..ACCEPT_COUNT {
            let Ok(socket) = fd::accept(listener) else { return };
            // One that ended at once, or for which no descriptor is left, is closed.
            if let Ok(message) = self.libraries.accept(socket) {
                self.channel.send(&message);
            }
        }
    }

    fn receive(&mut self) -> io::Result<Result<(), String>> {
        let read = self.channel.read();
        loop {
            let message = match self.channel.take::<ToGuest>() {
                Ok(message) => message,
                Err(why) => return Ok(Err(why.into())),
            };
            if !self.has_begun && self.channel.has_begun() {
                self.has_begun = true;
                // The preamble that it began with may have been another's to read.
                self.channel.begin_again();
                self.channel.send(&FromGuest::Begin { channel: CHANNEL, boot: self.boot });
            }
            let Some(message) = message else { return Ok(read.map_err(Into::into)) };
            if let Err(why) = self.handle(message)? {
                return Ok(Err(why));
            }
        }
    }

    fn handle(&mut self, message: ToGuest) -> io::Result<Result<(), String>> {
        match message {
            ToGuest::Heartbeat => {}
            ToGuest::Refused { why } => return Ok(Err(format!("the router refuses: {why}"))),
            ToGuest::Cleared => {
                let Device { offset, bytes, .. } = *self.device;
                self.channel.send(&FromGuest::Ready { offset, bytes });
            }
            ToGuest::Serve { staging } => self.begin(staging)?,
            ToGuest::Reply { connection, reply, descriptors } => {
                let mut to_near = Vec::new();
                let device = self.device.memory.as_fd();
                let replied = self.libraries.reply(connection, &reply, &descriptors, device, &mut to_near);
                if let Some(near) = &mut self.near {
                    near.outgoing.extend(to_near);
                }
                if replied.is_err() {
                    self.libraries.close(connection);
                    self.channel.send(&FromGuest::Close { connection });
                }
            }
            ToGuest::Close { connection } => self.libraries.close(connection),
            ToGuest::Near(request) => self.pass_to_near_half(&request),
        }
        Ok(Ok(()))
    }

    /// Libraries may connect from now on.
    fn begin(&mut self, staging: u64) -> io::Result<()> {
        let staging = Segment::map_at(self.device.memory.as_fd(), staging, STAGING_BYTES as usize)?;
        let stream = begin_near_half(staging)?;
        fd::set_nonblocking(&stream, true)?;
        epoll::add(&*self.epoll, &stream, epoll::EventData::new_u64(NEAR), epoll::EventFlags::IN)?;
        self.near = Some(NearHalf { stream, outgoing: VecDeque::new(), is_full: false });
        let listener = fd::listen_seqpacket(self.run_dir.join(SOCKET), SOCKET_MODE)?;
        fd::refuse_descriptors(&listener)?;
        epoll::add(&*self.epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        self.listener = Some(listener);
        eprintln!("freeflow-guest: serving {}", self.run_dir.join(SOCKET).display());
        Ok(())
    }

    fn pass_to_near_half(&mut self, request: &Request) {
        let Some(near) = &mut self.near else { return };
        let Request::IdentifyConnection { request, connection } = *request else {
            return near.outgoing.push_back((encode(request), None));
        };
        match self.libraries.process(connection) {
            Some((PeerCredentials { pid, uid, gid }, pidfd)) => {
                near.outgoing.push_back((encode(&Request::Identify { request, pid, uid, gid }), Some(pidfd)));
            }
            None => {
                let outcome = Err(freeflow_verbs::VerbsError::NotFound);
                self.channel.send(&FromGuest::Near(Report::Done { request, outcome }));
            }
        }
    }

    /// As much as the near half reads now: it reports meanwhile, and never waits for this thread for long.
    fn send_to_near_half(&mut self) -> io::Result<()> {
        let Some(near) = &mut self.near else { return Ok(()) };
        while let Some((bytes, descriptor)) = near.outgoing.front() {
            let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
            match fd::send_message(&near.stream, bytes, &descriptors) {
                Ok(()) => drop(near.outgoing.pop_front()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let is_full = !near.outgoing.is_empty();
        if std::mem::replace(&mut near.is_full, is_full) != is_full {
            let flags = if is_full { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            epoll::modify(&*self.epoll, &near.stream, epoll::EventData::new_u64(NEAR), flags)?;
        }
        Ok(())
    }

    /// Passes the near half's reports on. Errors: it has ended.
    fn take_reports(&mut self) -> Result<(), String> {
        let Some(near) = &self.near else { return Ok(()) };
        while let Some(received) = fd::receive_now(&near.stream, &mut self.buffer, 0) {
            let bytes = match received {
                Ok((0, _)) | Err(_) => return Err("the near half has ended".into()),
                Ok((bytes, _)) => bytes,
            };
            let report = decode::<Report>(&self.buffer[..bytes]).map_err(|error| error.to_string())?;
            self.channel.send(&FromGuest::Near(report));
        }
        Ok(())
    }
}
