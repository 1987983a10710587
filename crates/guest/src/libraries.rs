//! Connections of libraries in the guest: one request under way each, and descriptors of the guest's own in the place
//! of the router's.
use freeflow_protocol::guest::{FromGuest, PassedDescriptor};
use freeflow_protocol::{MESSAGE_BYTES_MAX, attachment, encode};
use freeflow_shm::fd::{self, PeerCredentials};
use freeflow_shm::{Doorbell, sealed_file};
use rustix::event::epoll;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Tokens of connections and of their kicks, beside their numbers.
pub const LIBRARY: u64 = 1 << 62;
pub const KICK: u64 = 1 << 61;
/// Bytes that wait in one event channel, as the router's.
const EVENT_CHANNEL_BYTES: usize = 16 * 1024;

struct Library {
    socket: OwnedFd,
    credentials: PeerCredentials,
    pidfd: OwnedFd,
    /// Rung by the library.
    kick: Option<Doorbell>,
}

/// Messages for the near half, with the descriptor that goes with each.
pub type NearMessage = (Vec<u8>, Option<OwnedFd>);

pub struct Libraries {
    epoll: Arc<OwnedFd>,
    libraries: BTreeMap<u64, Library>,
    last: u64,
    buffer: Vec<u8>,
}

fn watch(epoll: &OwnedFd, fd: impl AsFd, token: u64, flags: epoll::EventFlags) -> io::Result<()> {
    Ok(epoll::add(epoll, fd, epoll::EventData::new_u64(token), flags)?)
}

impl Libraries {
    pub fn new(epoll: Arc<OwnedFd>) -> Self {
        Self { epoll, libraries: BTreeMap::new(), last: 0, buffer: vec![0; MESSAGE_BYTES_MAX] }
    }

    /// Takes one that has connected.
    ///
    /// # Errors
    /// It can't be served, and is closed.
    pub fn accept(&mut self, socket: OwnedFd) -> io::Result<FromGuest> {
        let (credentials, pidfd) = (fd::peer_credentials(&socket)?, fd::peer_pidfd(&socket)?);
        let connection = self.last + 1;
        watch(&self.epoll, &socket, LIBRARY | connection, epoll::EventFlags::IN | epoll::EventFlags::RDHUP)?;
        self.last = connection;
        let PeerCredentials { pid, uid, gid } = credentials;
        self.libraries.insert(connection, Library { socket, credentials, pidfd, kick: None });
        Ok(FromGuest::Connect { connection, pid, uid, gid })
    }

    /// A request that a library sends, or its end.
    pub fn receive(&mut self, connection: u64, is_over: bool) -> Option<FromGuest> {
        let library = self.libraries.get(&connection)?;
        let received =
            if is_over { Some(Ok((0, Vec::new()))) } else { fd::receive_now(&library.socket, &mut self.buffer, 0) };
        match received? {
            Ok((0, _)) | Err(_) => {
                self.close(connection);
                Some(FromGuest::Close { connection })
            }
            Ok((bytes, _)) => {
                // The next one waits until this one is answered.
                self.listen_to(connection, epoll::EventFlags::RDHUP);
                Some(FromGuest::Request { connection, request: self.buffer[..bytes].to_vec() })
            }
        }
    }

    fn listen_to(&self, connection: u64, flags: epoll::EventFlags) {
        if let Some(library) = self.libraries.get(&connection) {
            let data = epoll::EventData::new_u64(LIBRARY | connection);
            let _ = epoll::modify(&*self.epoll, &library.socket, data, flags);
        }
    }

    /// A library has rung.
    pub fn take_kick(&self, connection: u64) -> Option<FromGuest> {
        self.libraries.get(&connection)?.kick.as_ref()?.drain().then_some(FromGuest::Kick { connection })
    }

    /// Gives a library its reply. What the near half has to know comes before anything that the reply brings about.
    ///
    /// # Errors
    /// It can't be given, and the connection is closed.
    pub fn reply(
        &mut self,
        connection: u64,
        reply: &[u8],
        passed: &[PassedDescriptor],
        device: BorrowedFd<'_>,
        to_near: &mut Vec<NearMessage>,
    ) -> io::Result<()> {
        let Some(library) = self.libraries.get_mut(&connection) else { return Ok(()) };
        let mut made: Vec<Option<OwnedFd>> = Vec::new();
        for descriptor in passed {
            made.push(match descriptor {
                PassedDescriptor::Memory => None,
                PassedDescriptor::Kick => {
                    let kick = Doorbell::new()?;
                    let theirs = kick.as_fd().try_clone_to_owned()?;
                    watch(&self.epoll, &kick, KICK | connection, epoll::EventFlags::IN)?;
                    library.kick = Some(kick);
                    Some(theirs)
                }
                PassedDescriptor::Events(channel) => {
                    let (read, write) = fd::event_sockets(EVENT_CHANNEL_BYTES)?;
                    to_near.push((encode(&attachment::Request::OpenEventChannel { channel: *channel }), Some(write)));
                    Some(read)
                }
                PassedDescriptor::Pass(bytes) => Some(sealed_file("freeflow-pass", bytes)?),
            });
        }
        let descriptors: Vec<BorrowedFd<'_>> =
            made.iter().map(|descriptor| descriptor.as_ref().map_or(device, AsFd::as_fd)).collect();
        fd::send_message(&library.socket, reply, &descriptors)?;
        self.listen_to(connection, epoll::EventFlags::IN | epoll::EventFlags::RDHUP);
        Ok(())
    }

    /// The router has closed it, or nothing can be said to it.
    pub fn close(&mut self, connection: u64) {
        if let Some(Library { kick: Some(kick), .. }) = self.libraries.remove(&connection) {
            // The library has a copy, which would keep it watched.
            let _ = epoll::delete(&*self.epoll, &kick);
        }
    }

    /// The process of a connection.
    pub fn process(&self, connection: u64) -> Option<(PeerCredentials, OwnedFd)> {
        let library = self.libraries.get(&connection)?;
        Some((library.credentials, library.pidfd.try_clone().ok()?))
    }
}
