//! The router's end of a virtual machine's control channel: one thread of the vNIC.
//!
//! It accepts one stream at a time: the machine's port. What an earlier agent left is gone before the next is served:
//! its connections are closed, and when the last part of the device has been given back, the whole file is cleared.
//!
//! Invariant: whatever the agent sends, leaves out or keeps from reading ends this vNIC's stream at most. Its numbers
//! name what it was given on this stream, and nothing else.
use crate::admission::account::Charge;
use crate::attachment::guest::channel::{ControlChannel, Ended, MALFORMED};
use crate::attachment::guest::shared_memory::SharedMemory;
use crate::attachment::guest::{GuestConnection, GuestParameters, Stop};
use crate::attachment::relay::Relays;
use crate::attachment::remote::{ANSWER_TIME_MAX, Remote};
use crate::base::log::{Lines, info, warning};
use crate::base::privileges::{self, ThreadKind};
use freeflow_protocol::attachment::{Report, Request};
use freeflow_protocol::guest::{
    CHANNEL, DescriptorKind, FromGuest, PassedDescriptor, STAGING_BYTES, ToGuest, check_request, descriptors_of,
};
use freeflow_protocol::library::{PASS_BYTES, Reply};
use freeflow_protocol::{MESSAGE_BYTES_MAX, decode, encode};
use freeflow_shm::fd::{self, PeerCredentials};
use freeflow_shm::{Doorbell, monotonic_ns};
use rustix::event::epoll;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

const EVENT_COUNT: usize = 64;
/// Descriptors that come with a reply at most.
const DESCRIPTORS_MAX: usize = 2;
/// Tokens of what is watched; those of event channels are their numbers, below all of these.
const CONNECTION: u64 = 1 << 62;
const STREAM: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;
const LISTENER: u64 = u64::MAX - 2;
const NEAR: u64 = u64::MAX - 3;
const UNUSED: u64 = u64::MAX - 4;
/// Largest number of a connection.
const CONNECTION_MAX: u64 = CONNECTION - 1;

/// A library's connection.
struct Connection {
    /// The other end is the control thread's.
    socket: OwnedFd,
    kick: Option<Doorbell>,
    /// A request is under way.
    is_asking: bool,
}

/// How far a stream is.
enum Phase {
    /// Nothing of the agent yet.
    Greeting,
    /// Something of an earlier agent is left.
    Clearing,
    /// The agent makes its device ready.
    Cleared,
    Serving(Box<Serving>),
}

struct Serving {
    remote: Remote,
    /// The other end is the remote's.
    near: OwnedFd,
    relays: Relays,
    connections: BTreeMap<u64, Connection>,
    last_connection: u64,
    last_channel: u64,
}

struct Link {
    channel: ControlChannel,
    phase: Phase,
}

pub struct Gateway {
    name: String,
    listener: OwnedFd,
    memory: Arc<SharedMemory>,
    stop: Arc<Stop>,
    parameters: GuestParameters,
    epoll: Arc<OwnedFd>,
    link: Option<Link>,
    buffer: Vec<u8>,
    lines: Lines,
}

impl Gateway {
    /// Begins the thread.
    ///
    /// # Errors
    /// No thread or descriptor is to be had.
    pub(super) fn start(
        name: &str,
        listener: OwnedFd,
        memory: Arc<SharedMemory>,
        stop: Arc<Stop>,
        parameters: GuestParameters,
    ) -> io::Result<()> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let watch = |fd, token| epoll::add(&*epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN);
        watch(&listener, LISTENER)?;
        epoll::add(&*epoll, &stop.wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        epoll::add(&*epoll, memory.unused(), epoll::EventData::new_u64(UNUSED), epoll::EventFlags::IN)?;
        let (buffer, lines) = (vec![0; MESSAGE_BYTES_MAX], Lines::default());
        let mut gateway =
            Self { name: name.into(), listener, memory, stop, parameters, epoll, link: None, buffer, lines };
        let body = move || {
            privileges::enter(ThreadKind::Guest);
            freeflow_shm::prefer_short_slices();
            gateway.run();
        };
        std::thread::Builder::new().name(ThreadKind::Guest.name().into()).stack_size(256 * 1024).spawn(body).map(drop)
    }

    fn run(&mut self) {
        // Relaxed: the doorbell woke it.
        while !self.stop.is_over.load(Relaxed) {
            if let Err(why) = self.go_round() {
                self.end_link(why);
            }
        }
        self.end_link("the vNIC is detached");
    }

    fn may_log(&mut self) -> bool {
        self.lines.take(monotonic_ns()).is_some()
    }

    fn go_round(&mut self) -> Result<(), Ended> {
        let mut events = Vec::with_capacity(EVENT_COUNT);
        match &mut self.link {
            Some(link) => {
                link.channel.flush()?;
                link.channel.wait(&mut events)?;
            }
            None => {
                let _ = epoll::wait(&*self.epoll, rustix::buffer::spare_capacity(&mut events), None);
            }
        }
        for event in &events {
            match event.data.u64() {
                WAKE => return Ok(()),
                LISTENER => self.accept()?,
                UNUSED => {
                    self.memory.unused().drain();
                    self.clear()?;
                }
                STREAM => self.receive()?,
                NEAR => self.pass_to_near_half()?,
                token if token & CONNECTION != 0 => self.receive_reply(token & !CONNECTION)?,
                channel => self.relay(channel),
            }
        }
        Ok(())
    }

    /// A machine has its port again.
    fn accept(&mut self) -> Result<(), Ended> {
        if self.link.is_some() {
            return Ok(());
        }
        let Ok(stream) = fd::accept(&self.listener) else { return Ok(()) };
        let begun = ControlChannel::begin(stream, self.epoll.clone(), STREAM, &ToGuest::Heartbeat);
        let mut channel = begun.map_err(|_| "the control channel can't be watched")?;
        // Others wait in the queue.
        let _ = epoll::delete(&*self.epoll, &self.listener);
        channel.send(&ToGuest::Heartbeat);
        self.link = Some(Link { channel, phase: Phase::Greeting });
        Ok(())
    }

    /// All that was the agent's ends; the next one may come.
    fn end_link(&mut self, why: Ended) {
        let Some(link) = self.link.take() else { return };
        let has_served = matches!(link.phase, Phase::Serving(_));
        drop(link);
        self.memory.close();
        if has_served && self.may_log() {
            warning!("a guest has ended", vnic = self.name, reason = why);
        }
        let data = epoll::EventData::new_u64(LISTENER);
        let _ = epoll::add(&*self.epoll, &self.listener, data, epoll::EventFlags::IN);
    }

    fn receive(&mut self) -> Result<(), Ended> {
        let Some(link) = &mut self.link else { return Ok(()) };
        // Messages before the end of the stream count.
        let read = link.channel.read();
        while let Some(message) = self.link.as_mut().map_or(Ok(None), |link| link.channel.take::<FromGuest>())? {
            self.handle(message)?;
        }
        read
    }

    fn handle(&mut self, message: FromGuest) -> Result<(), Ended> {
        let Some(Link { channel, phase }) = &mut self.link else { return Ok(()) };
        match (phase, message) {
            (_, FromGuest::Heartbeat) => {}
            (phase @ Phase::Greeting, FromGuest::Begin { channel: offer, boot }) => {
                if let Err(why) = CHANNEL.agree(&offer) {
                    channel.send(&ToGuest::Refused { why: why.to_string() });
                    channel.flush()?;
                    return Err("its agent is of another release");
                }
                *phase = Phase::Clearing;
                if self.may_log() {
                    let boot = boot.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
                    info!("a guest begins", vnic = self.name, boot = boot);
                }
                self.clear()?;
            }
            (Phase::Cleared, FromGuest::Ready { offset, bytes }) => self.serve(offset, bytes)?,
            (Phase::Serving(serving), message) => match message {
                FromGuest::Connect { connection, pid, uid, gid } => {
                    let credentials = PeerCredentials { pid, uid, gid };
                    if !serving.connect(connection, credentials, &self.epoll, &self.parameters, &self.memory)? {
                        channel.send(&ToGuest::Close { connection });
                    }
                }
                FromGuest::Request { connection, request } => serving.pass_request(connection, &request)?,
                FromGuest::Close { connection } => drop(serving.connections.remove(&connection)),
                FromGuest::Kick { connection } => {
                    if let Some(kick) = serving.connections.get(&connection).and_then(|at| at.kick.as_ref()) {
                        kick.kick();
                    }
                }
                FromGuest::Near(report) => self.handle_report(&report)?,
                _ => return Err(MALFORMED),
            },
            _ => return Err(MALFORMED),
        }
        Ok(())
    }

    /// Once nothing of an earlier agent is in use, the device is as new.
    fn clear(&mut self) -> Result<(), Ended> {
        let Some(Link { channel, phase: phase @ Phase::Clearing }) = &mut self.link else { return Ok(()) };
        if !self.memory.is_unused() {
            return Ok(());
        }
        match self.memory.clear() {
            Ok(()) => {
                channel.send(&ToGuest::Cleared);
                *phase = Phase::Cleared;
                Ok(())
            }
            Err(error) => {
                channel.send(&ToGuest::Refused { why: error.to_string() });
                channel.flush()?;
                Err("its shared-memory device can't be cleared")
            }
        }
    }

    fn serve(&mut self, offset: u64, bytes: u64) -> Result<(), Ended> {
        let Some(Link { channel, phase }) = &mut self.link else { return Ok(()) };
        let begun = self.memory.begin(offset, bytes).and_then(|()| self.memory.part(STAGING_BYTES as usize));
        let (staging, at) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                channel.send(&ToGuest::Refused { why: error.to_string() });
                channel.flush()?;
                return Err("its agent names data that its device has not");
            }
        };
        let started = fd::seqpacket_pair().and_then(|(near, stream)| {
            let data = epoll::EventData::new_u64(NEAR);
            epoll::add(&*self.epoll, &near, data, epoll::EventFlags::IN)?;
            // Its end closes the stream, which is noticed here.
            Ok((Remote::start_staged(stream, ANSWER_TIME_MAX, staging, || {})?, near))
        });
        let (remote, near) = started.map_err(|_| "no thread or descriptor is to be had")?;
        let relays = Relays::new(self.epoll.clone());
        let connections = BTreeMap::new();
        let serving = Serving { remote, near, relays, connections, last_connection: 0, last_channel: 0 };
        *phase = Phase::Serving(Box::new(serving));
        channel.send(&ToGuest::Serve { staging: at });
        Ok(())
    }

    fn handle_report(&mut self, report: &Report) -> Result<(), Ended> {
        let Some(Link { channel, phase: Phase::Serving(serving) }) = &mut self.link else { return Ok(()) };
        match *report {
            Report::EventTaken { channel: number } => {
                if !serving.relays.note_taken(number) {
                    return Err(MALFORMED);
                }
                if let Some(request) = serving.relays.next(number) {
                    channel.send(&ToGuest::Near(request));
                }
            }
            Report::ChannelClosed { channel: number } => serving.relays.remove(number),
            Report::Done { .. } | Report::ProcessEnded { .. } => {
                // Its thread always reads; one that has ended does not.
                fd::send_message(&serving.near, &encode(report), &[]).map_err(|_| "its near half has ended")?;
            }
        }
        Ok(())
    }

    /// Requests of the vNIC's remote.
    fn pass_to_near_half(&mut self) -> Result<(), Ended> {
        let Some(Link { channel, phase: Phase::Serving(serving) }) = &mut self.link else { return Ok(()) };
        while let Some(received) = fd::receive_now(&serving.near, &mut self.buffer, 0) {
            match received {
                Ok((0, _)) | Err(_) => return Err(serving.remote_reason()),
                Ok((bytes, _)) => {
                    let request = decode::<Request>(&self.buffer[..bytes]).map_err(|_| "its near half is broken")?;
                    channel.send(&ToGuest::Near(request));
                }
            }
        }
        Ok(())
    }

    fn relay(&mut self, number: u64) {
        let Some(Link { channel, phase: Phase::Serving(serving) }) = &mut self.link else { return };
        if let Some(request) = serving.relays.next(number) {
            channel.send(&ToGuest::Near(request));
        }
    }

    /// An answer of the control thread to a library, or the end of the connection.
    fn receive_reply(&mut self, number: u64) -> Result<(), Ended> {
        let Some(Link { channel, phase: Phase::Serving(serving) }) = &mut self.link else { return Ok(()) };
        let Some(connection) = serving.connections.get(&number) else { return Ok(()) };
        let Some(received) = fd::receive_now(&connection.socket, &mut self.buffer, DESCRIPTORS_MAX) else {
            return Ok(());
        };
        match received {
            Ok((0, _)) | Err(_) => {
                serving.connections.remove(&number);
                channel.send(&ToGuest::Close { connection: number });
            }
            Ok((bytes, descriptors)) => {
                let reply = self.buffer[..bytes].to_vec();
                let descriptors = serving.describe(number, &reply, descriptors)?;
                channel.send(&ToGuest::Reply { connection: number, reply, descriptors });
            }
        }
        Ok(())
    }
}

impl Serving {
    fn remote_reason(&self) -> Ended {
        use crate::attachment::Attachment;
        self.remote.ended().unwrap_or("its near half has ended")
    }

    /// False: there are too many.
    fn connect(
        &mut self,
        number: u64,
        credentials: PeerCredentials,
        epoll: &OwnedFd,
        parameters: &GuestParameters,
        memory: &Arc<SharedMemory>,
    ) -> Result<bool, Ended> {
        if number <= self.last_connection || number > CONNECTION_MAX || credentials.pid <= 0 {
            return Err(MALFORMED);
        }
        self.last_connection = number;
        let Ok(charge) = Charge::connection(&parameters.account, parameters.connection_count_max) else {
            return Ok(false);
        };
        let made = fd::seqpacket_pair().and_then(|(socket, theirs)| {
            fd::set_nonblocking(&socket, true)?;
            fd::set_nonblocking(&theirs, true)?;
            epoll::add(epoll, &socket, epoll::EventData::new_u64(CONNECTION | number), epoll::EventFlags::IN)?;
            Ok((socket, theirs))
        });
        let Ok((socket, theirs)) = made else { return Ok(false) };
        let (charge, connected) = (Arc::new(charge), parameters.connected.clone());
        let (held, memory) = (charge.clone(), memory.clone());
        let found = move |process| {
            connected(GuestConnection { socket: theirs, credentials, charge: held, process, memory });
        };
        if !self.remote.identify_connection(number, charge, Box::new(found)) {
            return Ok(false);
        }
        self.connections.insert(number, Connection { socket, kick: None, is_asking: false });
        Ok(true)
    }

    /// To the control thread, by the connection's socket.
    fn pass_request(&mut self, number: u64, request: &[u8]) -> Result<(), Ended> {
        // It may have been closed meanwhile.
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        if std::mem::replace(&mut connection.is_asking, true) || check_request(request).is_err() {
            return Err(MALFORMED);
        }
        // Fails where the control thread has closed it, which its end says.
        let _ = fd::send_message(&connection.socket, request, &[]);
        Ok(())
    }

    /// Names of the descriptors that the agent gives the library in the place of a reply's.
    fn describe(
        &mut self,
        number: u64,
        reply: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> Result<Vec<PassedDescriptor>, Ended> {
        const UNKNOWN: Ended = "a reply has descriptors that no guest can take";
        let is_placed = matches!(decode(reply), Ok(Reply::Placed { .. }));
        let kinds = descriptors_of(reply).ok_or(UNKNOWN)?;
        if descriptors.len() > kinds.len() {
            return Err(UNKNOWN);
        }
        let Some(connection) = self.connections.get_mut(&number) else { return Err(UNKNOWN) };
        connection.is_asking = false;
        let mut passed = Vec::from_iter(is_placed.then_some(PassedDescriptor::Memory));
        for (kind, descriptor) in kinds.iter().zip(descriptors) {
            passed.push(match kind {
                DescriptorKind::Kick => {
                    connection.kick = Some(Doorbell(descriptor));
                    PassedDescriptor::Kick
                }
                DescriptorKind::Events => {
                    self.last_channel += 1;
                    self.relays.insert(self.last_channel, descriptor);
                    PassedDescriptor::Events(self.last_channel)
                }
                DescriptorKind::Pass => {
                    let mut bytes = [0; PASS_BYTES];
                    if rustix::io::pread(&descriptor, &mut bytes, 0) != Ok(PASS_BYTES) {
                        return Err(UNKNOWN);
                    }
                    PassedDescriptor::Pass(bytes)
                }
            });
        }
        Ok(passed)
    }
}
