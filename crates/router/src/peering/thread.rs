//! The thread `ff-peers`: the sockets and the clock of [`State`] and [`NoiseChannel`]. Each turn
//! takes commands, lets time pass, does what the state machine wants, and waits.
//!
//! A connection from an address that is no peer's is closed at once. One from a peer's has
//! [`super::link`]'s time to prove that it is that peer; there are at most [`PENDING_COUNT_MAX`] of
//! those an address, and then the oldest goes.
//!
//! When hundreds of hosts start at once, a turn does [`HANDSHAKE_COUNT`] handshakes at most: connections that are up,
//! and what this host's own vNICs have to say, come between.
use super::channel::{ChannelError, Event, Identity, NoiseChannel};
use super::file::{PeersFile, PrivateKey};
use super::handle::{Command, PeersHandle, Published, Shared, Sink};
use super::link::{Flow, Link, Stage};
use super::links::{Links, Topic};
use super::notes::Note;
use super::state::{ConnectionId, Ending, HostStatus, Output, State};
use super::update::Update;
use crate::base::log::{Lines, info, warning};
use crate::base::privileges::{self, ThreadKind};
use crate::base::wake::Waker;
use freeflow_engine::HostId;
use freeflow_protocol::admin::PeerStatus;
use freeflow_shm::{ShortWait, monotonic_ns};
use freeflow_verbs::{Duration, Instant};
use rustix::event::epoll::EventFlags;
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Connections from one address that have not proved who they are.
const PENDING_COUNT_MAX: usize = 4;
/// Connections accepted, and commands taken, before others have their turn.
const ACCEPT_COUNT: usize = 16;
const COMMAND_COUNT: usize = 4096;
/// Hosts dialed, and openings of handshakes answered, in one turn: each takes some hundred microseconds.
const HANDSHAKE_COUNT: usize = 8;
/// Connections that the kernel keeps until they are accepted: all hosts may dial a router that starts again.
const LISTEN_COUNT: i32 = 4096;
/// Updates of one delivery.
const UPDATE_COUNT: usize = 256;
/// Updates that the worker has not dealt with yet, from which on nothing is read; and the pause then.
const BACKLOG_COUNT_MAX: usize = 4096;
const BACKLOG_PAUSE: Duration = Duration::from_millis(1);
/// Between two attempts to listen, or to accept when that failed.
const LISTEN_PAUSE: Duration = Duration::from_millis(500);
/// Between two publications of the status; and at least so much for each host, of which each takes its time.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(50);
const PUBLISH_INTERVAL_OF_HOST: Duration = Duration::from_micros(500);
/// Time for which the thread looks for something to do before it sleeps.
const LOOK_MAX: std::time::Duration = std::time::Duration::from_micros(20);
/// Longest wait, with nothing to do at all.
const IDLE_MAX: Duration = Duration::from_millis(1000);

/// The thread; it ends when this is dropped.
pub struct Peers {
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

impl Peers {
    /// Starts the thread. `epoch` is random. `at_end` is dropped when the thread ends, however it does.
    ///
    /// Errors: no descriptor or no thread could be made. An address that can't be listened on is
    /// logged and tried again.
    pub fn start(
        (file, key): (PeersFile, PrivateKey),
        (epoch, shard_count): (u64, u8),
        sink: impl Sink + 'static,
        at_end: impl Send + 'static,
    ) -> io::Result<(Self, PeersHandle)> {
        let (commands, commands_end) = channel();
        let shared = Arc::new(Shared {
            waker: Waker::new()?,
            stop: AtomicBool::new(false),
            sleeps_at_once: AtomicBool::new(false),
            queued: AtomicUsize::new(0),
            published: Mutex::new(Published::default()),
            unknown_connections: AtomicU64::new(0),
            refused_handshakes: AtomicU64::new(0),
        });
        let now = Instant(monotonic_ns());
        let links = Links::new(shared.waker.fd())?;
        let mut body = Thread {
            identity: Identity { name: file.host.clone(), key },
            state: State::new(now, file, epoch),
            listener: None,
            listen_at: now,
            links,
            dials: VecDeque::new(),
            commands: commands_end,
            shared: shared.clone(),
            sink: Box::new(sink),
            updates: Vec::new(),
            lines: Lines::default(),
            stranger_lines: Lines::default(),
            published: None,
            is_changed: true,
            short_wait: ShortWait::default(),
        };
        body.state.set_shards(shard_count);
        // Before the router says that it is ready.
        body.listen(now);
        body.publish(now);
        let run = move || {
            let _at_end = at_end;
            privileges::enter(ThreadKind::Peers);
            body.run();
        };
        let thread = std::thread::Builder::new().name("ff-peers".into()).spawn(run)?;
        let handle = PeersHandle::new(commands, shared.clone());
        Ok((Self { thread: Some(thread), shared }, handle))
    }
}

impl Peers {
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        self.shared.waker.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            warning!("the peers thread panicked");
        }
    }
}

struct Thread {
    identity: Identity,
    state: State,
    listener: Option<TcpListener>,
    /// When to listen, or to accept, again.
    listen_at: Instant,
    links: Links,
    /// Hosts that are to be dialed.
    dials: VecDeque<HostId>,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    sink: Box<dyn Sink>,
    updates: Vec<Update>,
    /// Of the log: what peers do, and what strangers cause, who must not take the others' place.
    lines: Lines,
    stranger_lines: Lines,
    published: Option<Instant>,
    /// Something has changed since.
    is_changed: bool,
    short_wait: ShortWait,
}

impl Thread {
    fn run(&mut self) {
        while !self.shared.stop.load(Relaxed) {
            let now = Instant(monotonic_ns());
            let mut busy = self.take_commands(now);
            self.listen(now);
            self.expire(now);
            self.state.handle_timer(now);
            self.pump(now);
            busy |= self.dial_some(now);
            self.flush_all(now);
            busy |= self.give_room();
            self.publish(now);
            self.deliver();
            let ready = match self.look_before_sleep(now, busy) {
                Some(ready) => ready,
                None => {
                    // From here on commands ring; those that came before are looked for once more.
                    self.shared.waker.set_sleeping(true);
                    busy |= self.is_wanted();
                    let ready = self.wait(now, busy);
                    self.shared.waker.set_sleeping(false);
                    self.short_wait.note_woken(LOOK_MAX);
                    ready
                }
            };
            self.handle_events(Instant(monotonic_ns()), ready);
            self.deliver();
        }
        // The last commands: connections that end with this router.
        let now = Instant(monotonic_ns());
        self.take_commands(now);
        self.flush_all(now);
    }

    /// Writes what this turn has to say: to each host at once, as far as it takes it.
    fn flush_all(&mut self, now: Instant) {
        for connection in self.links.unwritten() {
            self.flush(now, connection);
        }
    }

    fn is_wanted(&self) -> bool {
        self.shared.queued.load(Relaxed) > 0 || self.shared.stop.load(Relaxed)
    }

    /// Looks for the next message a little longer: while connections come and go it is there sooner than a thread
    /// sleeps and is woken.
    fn look_before_sleep(&mut self, now: Instant, busy: bool) -> Option<Vec<(Topic, EventFlags)>> {
        if busy || self.shared.sleeps_at_once.load(Relaxed) {
            return None;
        }
        let mut short_wait = std::mem::take(&mut self.short_wait);
        let found = short_wait.look(LOOK_MAX, || {
            let ready = self.wait(now, true);
            (!ready.is_empty() || self.is_wanted()).then_some(ready)
        });
        self.short_wait = short_wait;
        found
    }

    fn take_commands(&mut self, now: Instant) -> bool {
        for _ in 0..COMMAND_COUNT {
            let Ok(command) = self.commands.try_recv() else { return false };
            self.shared.queued.fetch_sub(1, Relaxed);
            match command {
                Command::Ask { host, qpn } => self.state.ask(host, qpn),
                Command::Notify { host, qpn, info } => self.state.notify(host, qpn, info),
                Command::Frames { host, payload_bytes } => self.state.announce_frames(host, payload_bytes),
                Command::Seal { host, message } => self.state.send_seal(host, message),
                Command::Network { name, network } => self.state.handle_network(&name, network),
                Command::AddressMap(address_map) => self.state.handle_address_map(address_map),
                Command::Address { network, gid, identity } => self.state.handle_address(&network, gid, identity),
                Command::Disconnected { host, qpn, peer } => self.state.notify_disconnected(host, qpn, peer),
                Command::Group { network, gid, qpn } => self.state.handle_group(network, gid, qpn),
                Command::Cm { host, network, ends, mad, tickets } => {
                    let connection = self.state.connection_of(host);
                    let has_room = connection.and_then(|id| self.links.get(id)).is_some_and(Link::has_cm_room);
                    self.state.send_cm(host, network, ends, &mad, has_room);
                    self.pump(now);
                    if let Some(link) = connection.and_then(|id| self.links.get_mut(id)) {
                        link.hold(tickets);
                    }
                }
                Command::Reload(both) => self.reload(now, *both),
            }
            self.pump(now);
        }
        true
    }

    fn reload(&mut self, now: Instant, (file, key): (PeersFile, PrivateKey)) {
        let listens = |file: &PeersFile| (file.address, file.control_port);
        if listens(&file) != listens(self.state.file()) {
            self.listener = None;
            let _ = self.links.set_listener(None, false);
            self.listen_at = now;
        }
        // A connection that has not proved anything yet did so, if at all, by keys that may be others now.
        let is_other = |host: HostId| {
            let before = self.state.host(host);
            !before.is_some_and(|before| file.peers.iter().any(|entry| entry.is_same_host(before)))
        };
        let before = self.state.file();
        let is_another = self.identity.key.0 != key.0 || (&before.host, before.address) != (&file.host, file.address);
        let going = self.links.matching(|link| match link.stage {
            // Our own key is another: all connections begin again.
            Stage::Established => self.identity.key.0 != key.0,
            _ => is_another || link.host.is_some_and(is_other),
        });
        for connection in going {
            self.end(now, connection, Ending::Closed);
        }
        self.identity = Identity { name: file.host.clone(), key };
        self.state.handle_reload(now, file);
        info!("peers file read", hosts = self.state.file().peers.len());
    }

    fn listen(&mut self, now: Instant) {
        if now < self.listen_at {
            return;
        }
        let file = self.state.file();
        let address = SocketAddr::new(file.address, file.control_port);
        let listened = match &self.listener {
            Some(_) => Ok(None),
            None => listen_at(address).map(Some),
        };
        let waited_for = listened.and_then(|listener| {
            if let Some(listener) = listener {
                info!("control channel listens", address = address);
                self.listener = Some(listener);
            }
            self.links.set_listener(self.listener.as_ref(), true)
        });
        if let Err(error) = waited_for {
            self.listen_at = now + LISTEN_PAUSE;
            if let Some(left_out) = self.lines.take(now.0) {
                warning!("can't listen for other hosts", address = address, error = error, left_out = left_out);
            }
        }
    }

    /// Nobody is accepted for a while.
    fn pause_listening(&mut self, now: Instant) {
        self.listen_at = now + LISTEN_PAUSE;
        // If it fails, what waits is looked at more often than it should.
        let _ = self.links.set_listener(self.listener.as_ref(), false);
    }

    /// Connections that took too long.
    fn expire(&mut self, now: Instant) {
        for connection in self.links.take_due(now) {
            let is_stuck = self.links.get(connection).is_some_and(|link| link.stage == Stage::Established);
            if !is_stuck {
                self.refuse(now, connection, None);
            } else {
                self.end(now, connection, Ending::Stuck);
            }
        }
    }

    /// Does what the state machine wants.
    fn pump(&mut self, now: Instant) {
        while let Some(output) = self.state.poll_output() {
            self.is_changed = true;
            match output {
                Output::Dial(host) if self.dials.contains(&host) => {}
                Output::Dial(host) => self.dials.push_back(host),
                Output::Close(connection) => {
                    self.remove_link(now, connection);
                }
                Output::Send(connection, message) => {
                    if self.links.send(now, connection, &message) {
                        self.flush(now, connection);
                    }
                }
                Output::Update(update) => {
                    self.updates.push(update);
                    if self.updates.len() >= UPDATE_COUNT {
                        self.deliver();
                    }
                }
                Output::Note(host, note) => self.note(now, &host, &note),
            }
        }
    }

    fn note(&mut self, now: Instant, host: &str, note: &Note) {
        let Some(left_out) = self.lines.take(now.0) else { return };
        match note {
            Note::Up { .. } => info!("peer", host = host, what = note),
            _ => warning!("peer", host = host, what = note, left_out = left_out),
        }
    }

    fn deliver(&mut self) {
        if !self.updates.is_empty() {
            self.sink.deliver(std::mem::take(&mut self.updates));
        }
    }

    /// Peers that took what there was can be sent more. Whether there is something to do now.
    fn give_room(&mut self) -> bool {
        let has_room = |connection: &ConnectionId| self.links.get(*connection).is_some_and(Link::has_room);
        let with_room: Vec<ConnectionId> = self.state.announcing().filter(has_room).collect();
        for connection in with_room {
            self.state.handle_room(connection);
        }
        self.state.has_output()
    }

    fn publish(&mut self, now: Instant) {
        if !self.is_changed || self.published.is_some_and(|last| now - last < self.publish_interval()) {
            return;
        }
        self.is_changed = false;
        self.published = Some(now);
        let peers = self.state.statuses().into_iter().map(|host| (status(&host), host.since)).collect();
        let published = Published { host: self.state.file().host.clone(), peers };
        *self.shared.published.lock().unwrap_or_else(PoisonError::into_inner) = published;
    }

    fn publish_interval(&self) -> Duration {
        let host_count = self.state.file().peers.len() as u64;
        PUBLISH_INTERVAL.max(Duration(PUBLISH_INTERVAL_OF_HOST.0 * host_count))
    }

    /// Dials some of the hosts that are to be dialed. Whether there are more.
    fn dial_some(&mut self, now: Instant) -> bool {
        for _ in 0..HANDSHAKE_COUNT {
            let Some(host) = self.dials.pop_front() else { break };
            // It may have left the file since, or have connected by itself.
            if self.state.is_dialing(host) {
                self.dial(now, host);
            }
        }
        !self.dials.is_empty()
    }

    fn dial(&mut self, now: Instant, host: HostId) {
        let Some(entry) = self.state.host(host) else { return };
        let channel = NoiseChannel::dial(&self.identity, &entry.host, &entry.public_key);
        let link = Link::dial(now, self.state.file().address, entry.control(), host, channel);
        // Back-off says when again; `peers ls` shows the count, and why.
        if let Err(error) = link.and_then(|link| self.links.insert(link)) {
            self.state.handle_no_dial(now, host, error.raw_os_error().unwrap_or_default());
            self.is_changed = true;
        }
    }

    /// The ready ones of the descriptors that something is awaited from.
    fn wait(&self, now: Instant, busy: bool) -> Vec<(Topic, EventFlags)> {
        let reads = self.sink.backlog() < BACKLOG_COUNT_MAX;
        let timeout = if busy { Duration(0) } else { self.next_deadline(now, reads) - now };
        let ready =
            if reads { self.links.wait(timeout) } else { self.links.wait_for_room(self.shared.waker.fd(), timeout) };
        ready.unwrap_or_else(|error| {
            warning!("the peers thread can't wait for events", error = error);
            self.shared.stop.store(true, Relaxed);
            Vec::new()
        })
    }

    fn next_deadline(&self, now: Instant, reads: bool) -> Instant {
        let all = [
            self.links.next_deadline(),
            self.state.poll_timeout(),
            (self.listener.is_none() || self.listen_at > now).then_some(self.listen_at),
            (!reads).then_some(now + BACKLOG_PAUSE),
            self.published.filter(|_| self.is_changed).map(|last| last + self.publish_interval()),
            Some(now + IDLE_MAX),
        ];
        all.into_iter().flatten().min().unwrap_or(now)
    }

    fn handle_events(&mut self, now: Instant, ready: Vec<(Topic, EventFlags)>) {
        let mut handshake_count = 0;
        for (topic, flags) in ready {
            match topic {
                Topic::Waker => self.shared.waker.drain(),
                Topic::Listener => self.accept(now),
                Topic::Link(connection) => {
                    // Epoll names it again, behind the others.
                    let opens = self.links.get(connection).is_some_and(|link| link.stage == Stage::Handshaking);
                    handshake_count += usize::from(opens);
                    if !opens || handshake_count <= HANDSHAKE_COUNT {
                        self.handle_link(now, connection, flags);
                    }
                }
            }
            self.pump(now);
        }
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPT_COUNT {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok((stream, from)) => {
                    let from = from.ip().to_canonical();
                    if !self.state.knows_address(from) {
                        self.shared.unknown_connections.fetch_add(1, Relaxed);
                        if let Some(left_out) = self.stranger_lines.take(now.0) {
                            warning!("connection from an unknown address", from = from, left_out = left_out);
                        }
                        continue;
                    }
                    let mut pending = self.links.pending(from);
                    let oldest = pending.next().filter(|_| pending.len() + 1 >= PENDING_COUNT_MAX);
                    drop(pending);
                    if let Some(oldest) = oldest {
                        self.refuse(now, oldest, None);
                    }
                    // One that there is no room for is dropped, and dials again.
                    let _ = Link::accepted(now, stream, from).and_then(|link| self.links.insert(link));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {
                }
                Err(error) => {
                    // Out of descriptors, as a rule: not to be tried again at once.
                    if let Some(left_out) = self.lines.take(now.0) {
                        warning!("can't accept connections of other hosts", error = error, left_out = left_out);
                    }
                    return self.pause_listening(now);
                }
            }
        }
    }

    fn handle_link(&mut self, now: Instant, connection: ConnectionId, flags: EventFlags) {
        let Some(link) = self.links.get_mut(connection) else { return };
        if link.stage == Stage::Connecting {
            if link.finish_connect() == Flow::Ended {
                return self.end(now, connection, Ending::Closed);
            }
            return self.flush(now, connection);
        }
        if flags.intersects(EventFlags::OUT) {
            self.flush(now, connection);
        }
        let Some(link) = self.links.get_mut(connection) else { return };
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
            let flow = link.read();
            self.take_events(now, connection);
            if flow == Flow::Ended {
                self.end(now, connection, Ending::Closed);
            }
        }
    }

    /// Everything whole that was read.
    fn take_events(&mut self, now: Instant, connection: ConnectionId) {
        while let Some(link) = self.links.get_mut(connection) {
            let (state, identity, from) = (&self.state, &self.identity, link.from);
            let mut found = None;
            let find = |name: &str| {
                let (id, entry) = state.host_named(name)?;
                // Each host dials those with larger names, from its own address.
                let may_dial = entry.address == from && *name < *identity.name;
                found = may_dial.then_some(id);
                may_dial.then_some(entry.public_key)
            };
            match link.channel.poll_event(identity, find) {
                Ok(None) => return,
                Ok(Some(Event::Opened)) => {
                    link.host = link.host.or(found);
                    if link.is_dialed {
                        self.establish(now, connection);
                    } else {
                        link.stage = Stage::Proving;
                        self.flush(now, connection);
                    }
                }
                Ok(Some(Event::Message(message))) => {
                    if link.stage == Stage::Proving {
                        self.establish(now, connection);
                    }
                    self.is_changed = true;
                    let has_cm_room = self.sink.has_cm_room();
                    self.state.handle_message(now, connection, message, has_cm_room);
                }
                Err(error) => return self.refuse(now, connection, Some(error)),
            }
            self.pump(now);
        }
    }

    fn establish(&mut self, now: Instant, connection: ConnectionId) {
        if let Some(link) = self.links.get_mut(connection)
            && let Some(host) = link.host
        {
            link.stage = Stage::Established;
            self.links.settle(connection);
            self.state.handle_connected(now, host, connection);
        }
    }

    /// Ends a connection that can't go on, or has proved nothing in its time (no error).
    fn refuse(&mut self, now: Instant, connection: ConnectionId, error: Option<ChannelError>) {
        let Some(link) = self.links.get(connection) else { return };
        if link.stage == Stage::Established {
            self.remove_link(now, connection);
            return self.state.handle_nonsense(now, connection);
        }
        // A host that does not answer our dialing is down; that is not its fault.
        if !link.is_dialed || error.is_some() {
            self.shared.refused_handshakes.fetch_add(1, Relaxed);
            if let Some(left_out) = self.stranger_lines.take(now.0) {
                let why = error.map_or("no proof in time, or too many at once".to_owned(), |error| error.to_string());
                warning!("refused a control connection", peer = link.from, why = why, left_out = left_out);
            }
        }
        self.end(now, connection, Ending::Closed);
    }

    fn end(&mut self, now: Instant, connection: ConnectionId, ending: Ending) {
        let Some(link) = self.remove_link(now, connection) else { return };
        match (link.stage, link.host.filter(|_| link.is_dialed)) {
            (Stage::Established, _) => self.state.handle_disconnected(now, connection, ending),
            (_, Some(host)) => self.state.handle_dial_failed(now, host),
            (_, None) => {}
        }
    }

    /// Takes a link out. All that was said before counts, as far as it still takes it.
    fn remove_link(&mut self, now: Instant, connection: ConnectionId) -> Option<Link> {
        let mut link = self.links.remove(connection)?;
        if link.stage == Stage::Established {
            link.flush(now);
        }
        Some(link)
    }

    fn flush(&mut self, now: Instant, connection: ConnectionId) {
        match self.links.flush(now, connection) {
            Flow::On => {}
            Flow::Stuck => self.end(now, connection, Ending::Stuck),
            Flow::Ended => self.end(now, connection, Ending::Closed),
        }
    }
}

fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    // The library's own number is small.
    rustix::net::listen(&listener, LISTEN_COUNT)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn status(host: &HostStatus) -> PeerStatus {
    PeerStatus {
        host: host.entry.host.clone(),
        address: host.entry.address,
        state: host.state.into(),
        state_s: 0,
        rtt_us: host.rtt.map(|rtt| rtt.0 / 1000),
        icrc: host.icrc,
        frames: host.frames,
        sealed: host.sealed,
        problem: host.problem.map(|why| why.to_string()),
        route_count: host.route_count,
        counters: host.counters,
    }
}
