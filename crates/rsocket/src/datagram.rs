//! A datagram socket: a UDP socket, whose descriptor is the rsocket's number, and a UD queue pair
//! for each local address in use. The first datagrams to an address go by UDP, with the sender's
//! queue pair number before them; when the other end has answered with its own, they go between the
//! queue pairs. UDP is looked at in the calls of the program: without a thread an end that never
//! receives is never answered, and is sent to by UDP.
use crate::address::Address;
use crate::config::Config;
use crate::ffi::{Outcome, checked};
use crate::headers::{DATAGRAM_BYTES, HEADER_BYTES_MAX, UdpHeader, source_from_bytes, source_to_bytes};
use crate::settings::Settings;
use crate::ud::{Arrived, Handle, UdPair};
use crate::wait::{Deadline, Poke, Sleepers, Spin, fork_count, readable, sleep};
use libc::{c_int, pollfd, socklen_t};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Addresses that a socket remembers; beyond, the map is begun again.
const DESTINATION_COUNT_MAX: usize = 4096;
/// Datagrams that wait for the program; more are dropped, as UDP does.
const WAITING_COUNT_MAX: usize = 1024;
/// UDP datagrams that one call handles.
const UDP_BATCH: usize = 32;
const CLOSE_WAIT_MS: u64 = 500;

#[derive(Debug)]
struct Destination {
    pair: usize,
    handle: Option<Handle>,
    qpn: u32,
}

#[derive(Debug)]
enum Waiting {
    Slot { pair: usize, arrived: Arrived, source: SocketAddr, header: usize },
    Copy { source: SocketAddr, bytes: Vec<u8> },
}

#[derive(Debug)]
struct Inner {
    /// Before the queue pairs, so that its handles go first.
    destinations: BTreeMap<SocketAddr, Destination>,
    pairs: Vec<UdPair>,
    connected: Option<SocketAddr>,
    waiting: VecDeque<Waiting>,
    settings: Settings,
}

#[derive(Debug)]
pub struct DatagramSocket {
    udp: c_int,
    pub forks: u32,
    inner: Mutex<Inner>,
    pub sleepers: Sleepers,
    pub status_flags: AtomicI32,
    pub descriptor_flags: AtomicI32,
}

impl Drop for DatagramSocket {
    fn drop(&mut self) {
        // SAFETY: ours.
        unsafe { libc::close(self.udp) };
    }
}

impl DatagramSocket {
    /// # Errors
    /// Those of `socket`.
    pub fn create(family: c_int, status_flags: c_int, descriptor_flags: c_int) -> Outcome<Arc<Self>> {
        // SAFETY: no pointers.
        let udp = checked(unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
        Ok(Arc::new(Self {
            udp,
            forks: fork_count(),
            inner: Mutex::new(Inner {
                pairs: Vec::new(),
                destinations: BTreeMap::new(),
                connected: None,
                waiting: VecDeque::new(),
                settings: Settings::new(Config::of_machine()),
            }),
            sleepers: Sleepers::default(),
            status_flags: AtomicI32::new(status_flags),
            descriptor_flags: AtomicI32::new(descriptor_flags),
        }))
    }

    #[must_use]
    pub fn fd(&self) -> c_int {
        self.udp
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program's settings; sizes count only until the first datagram.
    pub fn with_settings<T>(&self, use_them: impl FnOnce(&mut Settings) -> T) -> T {
        use_them(&mut self.inner().settings)
    }

    /// # Errors
    /// Those of `bind`.
    pub fn bind(&self, mut address: Address) -> Outcome<()> {
        // SAFETY: an address of that length.
        checked(unsafe { libc::bind(self.udp, address.pointer(), address.length()) }).map(drop)
    }

    /// # Errors
    /// Those of `connect`; none of the local addresses is an RDMA device's.
    pub fn connect(&self, mut address: Address) -> Outcome<()> {
        // SAFETY: an address of that length.
        checked(unsafe { libc::connect(self.udp, address.pointer(), address.length()) })?;
        let mut inner = self.inner();
        inner.connected = address.to_std();
        match inner.connected {
            Some(to) => self.destination(&mut inner, to).map(drop),
            None => Ok(()),
        }
    }

    fn nonblocking(&self, flags: c_int) -> bool {
        (flags & libc::MSG_DONTWAIT | self.status_flags.load(Ordering::Relaxed) & libc::O_NONBLOCK) != 0
    }

    fn udp_address(&self) -> Outcome<SocketAddr> {
        socket_name(self.udp)?.to_std().ok_or(libc::EAFNOSUPPORT)
    }

    /// The local address that datagrams to `to` come from.
    fn source_for(&self, to: SocketAddr) -> Outcome<SocketAddr> {
        let mut own = self.udp_address()?;
        if own.port() == 0 {
            // Its port must be known before it is announced to anybody.
            self.bind(Address::from_std(own))?;
            own = self.udp_address()?;
        }
        if !own.ip().is_unspecified() && !own.ip().is_loopback() {
            return Ok(own);
        }
        let mut address = Address::from_std(to);
        // SAFETY: an address of that length; the probe is closed.
        let name = unsafe {
            let probe = checked(libc::socket(address.family(), libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0))?;
            let connected = checked(libc::connect(probe, address.pointer(), address.length()));
            let name = connected.and_then(|_| socket_name(probe));
            libc::close(probe);
            name?
        };
        let ip = name.to_std().ok_or(libc::EAFNOSUPPORT)?.ip();
        Ok(SocketAddr::new(ip, own.port()))
    }

    /// Finds or makes what is known of an address.
    fn destination<'a>(&self, inner: &'a mut Inner, to: SocketAddr) -> Outcome<&'a mut Destination> {
        if !inner.destinations.contains_key(&to) {
            let local = self.source_for(to)?;
            let pair = match inner.pairs.iter().position(|pair| pair.local == local) {
                Some(pair) => pair,
                None => {
                    inner.pairs.push(UdPair::create(local, &inner.settings.sizes)?);
                    inner.pairs.len() - 1
                }
            };
            if inner.destinations.len() >= DESTINATION_COUNT_MAX {
                inner.destinations.clear();
            }
            inner.destinations.insert(to, Destination { pair, handle: None, qpn: 0 });
        }
        inner.destinations.get_mut(&to).ok_or(libc::EHOSTUNREACH)
    }

    /// # Errors
    /// EAGAIN, EINTR; EDESTADDRREQ, EMSGSIZE, EHOSTUNREACH; what the verbs say.
    pub fn send(&self, bytes: &[u8], flags: c_int, to: Option<SocketAddr>) -> Outcome<usize> {
        if bytes.len() + HEADER_BYTES_MAX > DATAGRAM_BYTES {
            return Err(libc::EMSGSIZE);
        }
        let mut inner = self.inner();
        let to = to.or(inner.connected).ok_or(libc::EDESTADDRREQ)?;
        if self.destination(&mut inner, to)?.handle.is_none() {
            // The answer to an earlier one may be there.
            self.take_udp(&mut inner);
        }
        let destination = self.destination(&mut inner, to)?;
        if destination.handle.is_none() {
            let pair = destination.pair;
            return self.send_udp(&inner.pairs[pair], to, true, bytes);
        }
        let pair = destination.pair;
        let nonblocking = self.nonblocking(flags);
        let timeout = inner.settings.send_timeout;
        drop(inner);
        let mut sent = Err(libc::EAGAIN);
        self.wait_until(nonblocking, Deadline::after(timeout), |inner| {
            let Inner { pairs, destinations, .. } = inner;
            if !pairs[pair].can_send() {
                return false;
            }
            let (header, length) = source_to_bytes(pairs[pair].local);
            if let Some(Destination { handle: Some(handle), qpn, .. }) = destinations.get(&to) {
                sent = pairs[pair].send(handle, *qpn, [&header[..length], bytes]);
            }
            true
        })?;
        sent.map(|()| bytes.len())
    }

    fn send_udp(&self, pair: &UdPair, to: SocketAddr, data: bool, bytes: &[u8]) -> Outcome<usize> {
        let (header, length) = UdpHeader { data, qpn: pair.qpn, address: pair.local.ip() }.to_bytes();
        let packet = [&header[..length], bytes].concat();
        let mut address = Address::from_std(to);
        // SAFETY: a packet and an address of these lengths.
        let sent = unsafe {
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            libc::sendto(self.udp, packet.as_ptr().cast(), packet.len(), flags, address.pointer(), address.length())
        };
        if sent < 0 { Err(crate::ffi::errno()) } else { Ok(bytes.len()) }
    }

    /// Handles what came by UDP.
    fn take_udp(&self, inner: &mut Inner) {
        for _ in 0..UDP_BATCH {
            let mut packet = [0u8; DATAGRAM_BYTES];
            let mut from = Address::unspecified(0);
            let mut length = size_of::<libc::sockaddr_storage>() as socklen_t;
            // SAFETY: a buffer and an address of these lengths.
            let bytes = unsafe {
                let (room, flags) = (packet.as_mut_ptr().cast(), libc::MSG_DONTWAIT);
                libc::recvfrom(self.udp, room, packet.len(), flags, from.pointer(), &raw mut length)
            };
            let Ok(bytes) = usize::try_from(bytes) else { return };
            if let Some(from) = from.to_std() {
                self.handle_udp(inner, from, &packet[..bytes]);
            }
        }
    }

    fn handle_udp(&self, inner: &mut Inner, from: SocketAddr, packet: &[u8]) {
        let Some((header, data)) = UdpHeader::from_bytes(packet, from.is_ipv6()) else { return };
        let Ok(destination) = self.destination(inner, from) else { return };
        let (pair, known) = (destination.pair, destination.handle.is_some() && destination.qpn == header.qpn);
        if header.data {
            // Lost, it is said again at the next datagram.
            let _ = self.send_udp(&inner.pairs[pair], from, false, &[]);
        }
        if !known
            && let Ok(handle) = inner.pairs[pair].resolve(from)
            && let Some(destination) = inner.destinations.get_mut(&from)
        {
            destination.handle = Some(handle);
            destination.qpn = header.qpn;
        }
        if header.data && inner.waiting.len() < WAITING_COUNT_MAX {
            inner.waiting.push_back(Waiting::Copy { source: from, bytes: data.to_vec() });
        }
    }

    fn take_completions(inner: &mut Inner) {
        let Inner { pairs, waiting, .. } = inner;
        for (index, pair) in pairs.iter_mut().enumerate() {
            let mut arrived = Vec::new();
            let room = WAITING_COUNT_MAX.saturating_sub(waiting.len());
            pair.turn(|datagram| {
                let keep = arrived.len() < room;
                if keep {
                    arrived.push(datagram);
                }
                keep
            });
            for datagram in arrived {
                let mut header = [0; HEADER_BYTES_MAX];
                let bytes = pair.extract(datagram, 0, &mut header);
                match source_from_bytes(&header[..bytes]) {
                    Some((source, length)) => {
                        waiting.push_back(Waiting::Slot { pair: index, arrived: datagram, source, header: length });
                    }
                    None => drop(pair.post_receive(datagram.slot)),
                }
            }
        }
    }

    /// How many bytes there are room for of the next datagram, how long it is, and who sent it.
    ///
    /// # Errors
    /// EAGAIN, EINTR.
    pub fn receive(&self, room: &mut [u8], flags: c_int) -> Outcome<(usize, usize, SocketAddr)> {
        let timeout = self.inner().settings.receive_timeout;
        let mut answer = None;
        self.wait_until(self.nonblocking(flags), Deadline::after(timeout), |inner| {
            answer = take_datagram(inner, room, flags & libc::MSG_PEEK != 0);
            answer.is_some()
        })?;
        answer.ok_or(libc::EAGAIN)
    }

    fn wait_until(
        &self,
        nonblocking: bool,
        deadline: Deadline,
        mut test: impl FnMut(&mut Inner) -> bool,
    ) -> Outcome<()> {
        let mut spin = Spin::new(Config::of_machine().polling_us);
        loop {
            let mut inner = self.inner();
            Self::take_completions(&mut inner);
            if test(&mut inner) {
                return Ok(());
            }
            drop(inner);
            if nonblocking || !spin.again() {
                break;
            }
        }
        let poke = Poke::of_thread()?;
        self.sleepers.enter(&poke);
        let outcome = loop {
            let mut fds = vec![poke.pollfd()];
            let mut inner = self.inner();
            self.prepare(&mut inner, &mut fds);
            if test(&mut inner) {
                break Ok(());
            }
            drop(inner);
            if nonblocking || deadline.is_over() {
                break Err(libc::EAGAIN);
            }
            if let Err(error) = sleep(&mut fds, deadline) {
                break Err(error);
            }
            poke.drain();
            self.sleepers.wake(Some(&poke));
        };
        self.sleepers.leave(&poke);
        outcome
    }

    /// Takes all that is there, and arms the queues: what to sleep on.
    fn prepare(&self, inner: &mut Inner, fds: &mut Vec<pollfd>) {
        for pair in &mut inner.pairs {
            if pair.armed && pair.queue.drain() {
                pair.armed = false;
            }
            if !pair.armed {
                pair.queue.arm();
                pair.armed = true;
            }
            fds.push(readable(pair.queue.fd()));
        }
        fds.push(readable(self.udp));
        self.take_udp(inner);
        Self::take_completions(inner);
    }

    /// For `rpoll`: as [`DatagramSocket::readiness`], and what to sleep on.
    pub fn prepare_sleep(&self, fds: &mut Vec<pollfd>) {
        self.prepare(&mut self.inner(), fds);
    }

    /// The events of `poll(2)`.
    pub fn readiness(&self, events: i16) -> i16 {
        let mut inner = self.inner();
        Self::take_completions(&mut inner);
        if inner.waiting.is_empty() {
            self.take_udp(&mut inner);
        }
        let mut ready = 0;
        if !inner.waiting.is_empty() {
            ready |= libc::POLLIN | libc::POLLRDNORM;
        }
        if inner.pairs.iter().all(UdPair::can_send) {
            ready |= libc::POLLOUT | libc::POLLWRNORM;
        }
        ready & events
    }

    /// Waits a little for what was sent.
    pub fn close(&self) {
        let deadline = Deadline::after(Some(Duration::from_millis(CLOSE_WAIT_MS)));
        let _ = self.wait_until(false, deadline, |inner| inner.pairs.iter().all(UdPair::all_sent));
        self.sleepers.wake(None);
    }
}

fn take_datagram(inner: &mut Inner, room: &mut [u8], peek: bool) -> Option<(usize, usize, SocketAddr)> {
    let answer = match inner.waiting.front()? {
        Waiting::Copy { source, bytes } => {
            let count = bytes.len().min(room.len());
            room[..count].copy_from_slice(&bytes[..count]);
            (count, bytes.len(), *source)
        }
        Waiting::Slot { pair, arrived, source, header } => {
            let count = inner.pairs[*pair].extract(*arrived, *header, room);
            (count, arrived.bytes.saturating_sub(*header), *source)
        }
    };
    if !peek && let Some(Waiting::Slot { pair, arrived, .. }) = inner.waiting.pop_front() {
        let _ = inner.pairs[pair].post_receive(arrived.slot);
    }
    Some(answer)
}

fn socket_name(fd: c_int) -> Outcome<Address> {
    let mut name = Address::unspecified(0);
    let mut length = size_of::<libc::sockaddr_storage>() as socklen_t;
    // SAFETY: room for any address.
    checked(unsafe { libc::getsockname(fd, name.pointer(), &raw mut length) })?;
    Ok(name)
}
