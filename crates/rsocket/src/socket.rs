//! A stream socket: from its making to its end. Connecting and accepting are driven by the events
//! of the connection manager, whenever a call looks at them; there is no thread behind it. Moving
//! data is `transfer`.
use crate::address::Address;
use crate::cm::{CmEvent, CmId, Request};
use crate::config::Config;
use crate::ffi::{Errno, Outcome};
use crate::link::{Core, Link};
use crate::mapping::Mappings;
use crate::settings::Settings;
use crate::stream::{Direction, Failure, State};
use crate::wait::{Deadline, Poke, Sleepers, Spin, Watch, coarse_ms, fork_count, readable, sleep};
use crate::wire::{ConnectionData, Control};
use freeflow_abi::{
    RDMA_CM_EVENT_ADDR_ERROR, RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_DEVICE_REMOVAL, RDMA_CM_EVENT_DISCONNECTED,
    RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_ROUTE_ERROR, RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_OPTION_IB,
    RDMA_OPTION_IB_PATH, RDMA_PS_TCP,
};
use libc::c_int;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

const RESOLVE_COUNT_MAX: u32 = 4;
/// Longest that closing waits for what was sent, unless SO_LINGER says otherwise.
const CLOSE_WAIT_S: u32 = 10;
/// Longest that closing with SO_LINGER of 0 s waits until the other end has its reset.
const RESET_WAIT_MS: u64 = 100;
/// Calls that need not sleep look at the connection manager's events when this has passed since the
/// last look.
const LOOK_INTERVAL_MS: u64 = 10;
/// Connections that wait for the program, whatever it asked for: each has buffers. Linux's
/// somaxconn.
const BACKLOG_COUNT_MAX: usize = 4096;
/// Polling grows up to so many times the configured time where answers come quickly.
const SPIN_GROWTH_MAX: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Initial,
    Bound,
    Listening,
    ResolvingAddress,
    ResolvingRoute,
    Connecting,
    Accepting,
    Connected,
    Failed(Errno),
    Closed,
}

impl Phase {
    #[must_use]
    pub fn is_opening(self) -> bool {
        matches!(self, Self::ResolvingAddress | Self::ResolvingRoute | Self::Connecting | Self::Accepting)
    }
}

#[derive(Debug)]
pub struct Setup {
    pub phase: Phase,
    attempts: u32,
    destination: Option<Address>,
    /// Accepted, and not fetched by the program.
    pub pending: VecDeque<Arc<StreamSocket>>,
    /// As many are accepted ahead of the program; further requests wait with the connection
    /// manager, which has a limit too.
    backlog: usize,
    pub settings: Settings,
}

impl std::fmt::Debug for Address {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.to_std().fmt(out)
    }
}

#[derive(Debug)]
pub struct StreamSocket {
    pub fd: c_int,
    pub family: c_int,
    pub forks: u32,
    pub id: Arc<CmId>,
    setup: Mutex<Setup>,
    link: OnceLock<Link>,
    connected: AtomicBool,
    pub send_lock: Mutex<()>,
    pub receive_lock: Mutex<()>,
    pub mappings: Mutex<Mappings>,
    /// Whether mappings wait to be announced.
    pub mappings_wait: AtomicBool,
    pub sleepers: Sleepers,
    /// As of `F_GETFL` and `F_GETFD`.
    pub status_flags: AtomicI32,
    pub descriptor_flags: AtomicI32,
    pub error: AtomicI32,
    /// Whether SO_ERROR has reported that the stream failed.
    failure_reported: AtomicBool,
    /// Whether calls end after a time: SO_RCVTIMEO, SO_SNDTIMEO.
    pub timeouts: AtomicBool,
    spin_us: AtomicU32,
    /// When the connection manager's events were looked at last, by [`coarse_ms`].
    looked_at_ms: AtomicU64,
}

impl StreamSocket {
    /// # Errors
    /// Those of the connection manager.
    pub fn create(family: c_int, status_flags: c_int, descriptor_flags: c_int) -> Outcome<Arc<Self>> {
        let id = CmId::create(RDMA_PS_TCP)?;
        let settings = Settings::new(Config::of_machine());
        Ok(Arc::new(Self::with(id, family, settings, Phase::Initial, (status_flags, descriptor_flags))))
    }

    fn with(id: CmId, family: c_int, settings: Settings, phase: Phase, flags: (c_int, c_int)) -> Self {
        let timeouts = settings.receive_timeout.is_some() || settings.send_timeout.is_some();
        Self {
            fd: id.fd(),
            family,
            forks: fork_count(),
            id: Arc::new(id),
            setup: Mutex::new(Setup {
                phase,
                attempts: 0,
                destination: None,
                pending: VecDeque::new(),
                backlog: 0,
                settings,
            }),
            link: OnceLock::new(),
            connected: AtomicBool::new(false),
            send_lock: Mutex::new(()),
            receive_lock: Mutex::new(()),
            mappings: Mutex::default(),
            mappings_wait: AtomicBool::new(false),
            sleepers: Sleepers::default(),
            status_flags: AtomicI32::new(flags.0),
            descriptor_flags: AtomicI32::new(flags.1),
            error: AtomicI32::new(0),
            failure_reported: AtomicBool::new(false),
            timeouts: AtomicBool::new(timeouts),
            spin_us: AtomicU32::new(Config::of_machine().polling_us),
            looked_at_ms: AtomicU64::new(0),
        }
    }

    pub fn setup(&self) -> MutexGuard<'_, Setup> {
        self.setup.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_nonblocking(&self) -> bool {
        self.status_flags.load(Ordering::Relaxed) & libc::O_NONBLOCK != 0
    }

    /// # Errors
    /// EINVAL: it is bound or connected; those of `rdma_bind_addr`.
    pub fn bind(&self, address: Address) -> Outcome<()> {
        let mut setup = self.setup();
        if setup.phase != Phase::Initial {
            return Err(libc::EINVAL);
        }
        self.id.bind(address)?;
        setup.phase = Phase::Bound;
        Ok(())
    }

    /// # Errors
    /// EINVAL: it is connected; those of `rdma_listen`.
    pub fn listen(&self, backlog: c_int) -> Outcome<()> {
        let mut setup = self.setup();
        // Linux's way: one more than what is said, none means one, and what is negative as many as
        // there may be.
        setup.backlog = usize::try_from(backlog).unwrap_or(BACKLOG_COUNT_MAX).min(BACKLOG_COUNT_MAX - 1) + 1;
        match setup.phase {
            Phase::Listening => return Ok(()),
            Phase::Initial => self.id.bind(Address::unspecified(self.family))?,
            Phase::Bound => {}
            _ => return Err(libc::EINVAL),
        }
        self.id.listen(backlog)?;
        setup.phase = Phase::Listening;
        Ok(())
    }

    /// # Errors
    /// EAGAIN; EINVAL: it does not listen; EINTR.
    pub fn accept(&self) -> Outcome<Arc<Self>> {
        let deadline = Deadline::after(self.setup().settings.receive_timeout);
        let mut watch = None;
        loop {
            let mut setup = self.setup();
            if setup.phase != Phase::Listening {
                return Err(libc::EINVAL);
            }
            self.drive(&mut setup);
            if let Some(accepted) = setup.pending.pop_front() {
                if !setup.pending.is_empty() {
                    // Their events are taken already.
                    self.sleepers.wake(None);
                }
                return Ok(accepted);
            }
            drop(setup);
            if self.is_nonblocking() || deadline.is_over() {
                return Err(libc::EAGAIN);
            }
            self.sleep_on_events(&mut watch, None, deadline)?;
        }
    }

    /// # Errors
    /// EINPROGRESS, EALREADY, EISCONN, EINVAL: it listens; why the connection failed.
    pub fn connect(&self, to: Address) -> Outcome<()> {
        let mut setup = self.setup();
        match setup.phase {
            Phase::Initial | Phase::Bound => {
                setup.destination = Some(to);
                setup.attempts = 0;
                self.resolve(&mut setup)?;
                self.drive(&mut setup);
            }
            Phase::Connected => return Err(libc::EISCONN),
            phase if phase.is_opening() => {
                self.drive(&mut setup);
                if self.is_nonblocking() && setup.phase.is_opening() {
                    return Err(libc::EALREADY);
                }
            }
            Phase::Failed(error) => return Err(error),
            _ => return Err(libc::EINVAL),
        }
        let deadline = Deadline::after(setup.settings.send_timeout);
        let mut watch = None;
        loop {
            match setup.phase {
                Phase::Connected => return Ok(()),
                phase if phase.is_opening() => {}
                Phase::Failed(error) => {
                    self.take_error();
                    return Err(error);
                }
                // Another thread closed it.
                _ => return Err(libc::EBADF),
            }
            drop(setup);
            if self.is_nonblocking() || deadline.is_over() {
                return Err(libc::EINPROGRESS);
            }
            self.sleep_on_events(&mut watch, None, deadline)?;
            setup = self.setup();
            self.drive(&mut setup);
        }
    }

    /// The error of SO_ERROR, which is then forgotten. A stream that failed has one, whoever found
    /// out.
    pub fn take_error(&self) -> Errno {
        let error = self.error.swap(0, Ordering::Relaxed);
        let failed = self.link.get().is_some_and(|link| matches!(link.lock().stream.state(), State::Failed(_)));
        let unreported = failed && !self.failure_reported.swap(true, Ordering::Relaxed);
        if error == 0 && unreported { libc::ECONNRESET } else { error }
    }

    fn resolve(&self, setup: &mut Setup) -> Outcome<()> {
        let to = setup.destination.ok_or(libc::EINVAL)?;
        setup.attempts += 1;
        self.id.resolve_address(None, to, setup.settings.resolve_ms)?;
        setup.phase = Phase::ResolvingAddress;
        Ok(())
    }

    /// Takes all events of the connection manager that wait.
    pub fn drive(&self, setup: &mut Setup) {
        while setup.phase != Phase::Listening || setup.pending.len() < setup.backlog {
            match self.id.next_event() {
                Ok(Some(event)) => self.handle_event(setup, event),
                Ok(None) => return,
                Err(error) => return self.fail(setup, error),
            }
        }
    }

    fn handle_event(&self, setup: &mut Setup, event: CmEvent) {
        let outcome = match (setup.phase, event.kind) {
            (Phase::ResolvingAddress, RDMA_CM_EVENT_ADDR_RESOLVED) => self.resolve_route(setup),
            (Phase::ResolvingAddress, RDMA_CM_EVENT_ADDR_ERROR) => self.retry(setup, event.error()),
            (Phase::ResolvingRoute, RDMA_CM_EVENT_ROUTE_RESOLVED) => self.request(setup),
            (Phase::ResolvingRoute, RDMA_CM_EVENT_ROUTE_ERROR) => self.retry(setup, event.error()),
            (Phase::Connecting, RDMA_CM_EVENT_ESTABLISHED) => self.establish(setup, Some(&event.private_data)),
            (Phase::Accepting, RDMA_CM_EVENT_ESTABLISHED) => self.establish(setup, None),
            (Phase::Listening, _) => {
                if let Some(accepted) =
                    event.request.and_then(|request| self.answer(setup, request, &event.private_data))
                {
                    setup.pending.push_back(accepted);
                    self.sleepers.wake(None);
                }
                Ok(())
            }
            (Phase::Accepting | Phase::Connected, RDMA_CM_EVENT_DISCONNECTED) => {
                self.end(setup, None);
                Ok(())
            }
            (Phase::Accepting | Phase::Connected, RDMA_CM_EVENT_DEVICE_REMOVAL) => {
                self.end(setup, Some(Failure::Transport));
                Ok(())
            }
            (phase, _) if phase.is_opening() && is_failure(event.kind) => Err(event.error()),
            _ => Ok(()),
        };
        if let Err(error) = outcome {
            self.fail(setup, error);
        }
    }

    fn fail(&self, setup: &mut Setup, error: Errno) {
        if let Some(link) = self.link.get() {
            link.lock().stream.fail(Failure::Transport);
        }
        if setup.phase != Phase::Connected {
            setup.phase = Phase::Failed(error);
        }
        self.error.store(error, Ordering::Relaxed);
        self.sleepers.wake(None);
    }

    fn retry(&self, setup: &mut Setup, error: Errno) -> Outcome<()> {
        if error != libc::ETIMEDOUT || setup.settings.resolve_ms == 0 || setup.attempts >= RESOLVE_COUNT_MAX {
            return Err(error);
        }
        self.resolve(setup)
    }

    fn resolve_route(&self, setup: &mut Setup) -> Outcome<()> {
        match setup.settings.route.take() {
            // The connection manager answers with the same event as if it had looked for the route.
            Some(route) => self.id.set_option(RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &route)?,
            None => self.id.resolve_route(setup.settings.resolve_ms)?,
        }
        setup.phase = Phase::ResolvingRoute;
        Ok(())
    }

    fn make_link(&self, setup: &mut Setup) -> Outcome<&Link> {
        let link = Link::create(Arc::clone(&self.id), setup.settings.sizes)?;
        setup.settings.sizes = *link.lock().stream.sizes();
        Ok(self.link.get_or_init(|| link))
    }

    fn request(&self, setup: &mut Setup) -> Outcome<()> {
        let link = self.make_link(setup)?;
        self.id.connect(&link.connection_data())?;
        setup.phase = Phase::Connecting;
        Ok(())
    }

    /// Answers a connection request. `None`: it was refused, or failed.
    fn answer(&self, setup: &Setup, request: Request, private_data: &[u8]) -> Option<Arc<Self>> {
        let Request { id, parameters } = request;
        let Some(data) = ConnectionData::from_bytes(private_data) else {
            id.reject();
            return None;
        };
        let flags = (self.status_flags.load(Ordering::Relaxed), self.descriptor_flags.load(Ordering::Relaxed));
        let socket = Self::with(id, self.family, setup.settings.inherited(), Phase::Accepting, flags);
        let mut own = socket.setup();
        let accepted = socket.make_link(&mut own).and_then(|link| {
            link.lock().stream.handle_connection_data(&data);
            socket.id.accept(&parameters, &link.connection_data())
        });
        drop(own);
        if accepted.is_err() {
            socket.id.reject();
            return None;
        }
        Some(Arc::new(socket))
    }

    fn establish(&self, setup: &mut Setup, private_data: Option<&[u8]>) -> Outcome<()> {
        let link = self.link.get().ok_or(libc::EINVAL)?;
        let mut core = link.lock();
        if let Some(private_data) = private_data {
            let Some(data) = ConnectionData::from_bytes(private_data) else {
                drop(core);
                self.id.disconnect();
                return Err(libc::EPROTONOSUPPORT);
            };
            core.stream.handle_connection_data(&data);
        }
        core.stream.open();
        link.turn(&mut core);
        drop(core);
        self.enter_connected(setup);
        Ok(())
    }

    fn enter_connected(&self, setup: &mut Setup) {
        setup.phase = Phase::Connected;
        // Release: pairs with the Acquire in `connected_link`.
        self.connected.store(true, Ordering::Release);
        if setup.settings.keepalive {
            crate::keepalive::schedule(self.fd, setup.settings.keepalive_s);
        }
        self.sleepers.wake(None);
    }

    /// The connection manager says that it is over. What arrived before counts.
    fn end(&self, setup: &mut Setup, failure: Option<Failure>) {
        if let Some(link) = self.link.get() {
            let mut core = link.lock();
            link.turn(&mut core);
            match failure {
                None => core.stream.disconnect(),
                Some(failure) => core.stream.fail(failure),
            }
        }
        self.enter_connected(setup);
    }

    /// The link of a connection that is, or was, established.
    #[inline]
    pub fn connected_link(&self) -> Option<&Link> {
        // Acquire: pairs with the Release in `enter_connected`.
        if self.connected.load(Ordering::Acquire) { self.link.get() } else { None }
    }

    /// The link, once it is connected.
    ///
    /// # Errors
    /// ENOTCONN; EAGAIN: not yet; EINTR.
    pub fn ready_link(&self, nonblocking: bool, deadline: Deadline) -> Outcome<&Link> {
        let mut watch = None;
        loop {
            if let Some(link) = self.connected_link() {
                return Ok(link);
            }
            let mut setup = self.setup();
            self.drive(&mut setup);
            let queue = self.look_for_data(&mut setup);
            match setup.phase {
                Phase::Connected => continue,
                phase if phase.is_opening() => {}
                _ => return Err(libc::ENOTCONN),
            }
            drop(setup);
            if nonblocking || deadline.is_over() {
                return Err(libc::EAGAIN);
            }
            self.sleep_on_events(&mut watch, queue, deadline)?;
        }
    }

    /// An accepted socket may hear of the other end by its data before the connection manager says
    /// that it is there.
    fn look_for_data(&self, setup: &mut Setup) -> Option<c_int> {
        let link = self.link.get().filter(|_| setup.phase == Phase::Accepting)?;
        let mut core = link.lock();
        if !core.armed {
            link.queue.arm();
            core.armed = true;
        }
        link.turn(&mut core);
        let opened = core.stream.state() != State::Opening;
        drop(core);
        if opened {
            self.enter_connected(setup);
        }
        Some(link.queue.fd())
    }

    /// Sleeps until something may have changed since the last call. The first only begins to watch:
    /// look once more after it.
    fn sleep_on_events<'a>(
        &'a self,
        watch: &mut Option<Watch<'a>>,
        queue: Option<c_int>,
        deadline: Deadline,
    ) -> Outcome<()> {
        let Some(watch) = watch else {
            *watch = Some(Watch::begin(&self.sleepers)?);
            return Ok(());
        };
        let mut fds = [readable(self.fd), watch.poke.pollfd(), readable(queue.unwrap_or(-1))];
        let outcome = sleep(&mut fds, deadline);
        if fds[1].revents != 0 {
            watch.poke.drain();
        }
        self.drain_queue();
        outcome.map(drop)
    }

    /// Takes the completion events; the queue is then not armed.
    pub fn drain_queue(&self) {
        if let Some(link) = self.link.get() {
            let mut core = link.lock();
            if core.armed && link.queue.drain() {
                core.armed = false;
            }
        }
    }

    /// Waits until `test` says so; it is asked again after each turn of the link.
    ///
    /// # Errors
    /// EAGAIN, EINTR.
    pub fn wait_until(
        &self,
        link: &Link,
        nonblocking: bool,
        deadline: Deadline,
        mut test: impl FnMut(&mut Core) -> bool,
    ) -> Outcome<()> {
        let limit_us = self.spin_us.load(Ordering::Relaxed);
        let mut spin = Spin::new(limit_us);
        loop {
            let mut core = link.lock();
            link.turn(&mut core);
            if test(&mut core) {
                drop(core);
                self.sleepers.wake(None);
                return Ok(());
            }
            drop(core);
            if nonblocking {
                if self.look_at_events_sometimes() {
                    continue;
                }
                return Err(libc::EAGAIN);
            }
            if !spin.again() {
                break;
            }
        }
        let begun = std::time::Instant::now();
        let outcome = self.sleep_until(link, deadline, test);
        self.learn(limit_us, begun.elapsed());
        outcome
    }

    /// Polls longer where sleeping was in vain, and as long as configured where it was not.
    fn learn(&self, limit_us: u32, slept: Duration) {
        let base = Config::of_machine().polling_us;
        let most = base.saturating_mul(SPIN_GROWTH_MAX);
        let short = slept < Duration::from_micros(u64::from(most));
        let next = if short { limit_us.saturating_mul(2).min(most) } else { base };
        self.spin_us.store(next, Ordering::Relaxed);
    }

    fn sleep_until(&self, link: &Link, deadline: Deadline, mut test: impl FnMut(&mut Core) -> bool) -> Outcome<()> {
        let poke = Poke::of_thread()?;
        self.sleepers.enter(&poke);
        let outcome = loop {
            if self.arm(link, &mut test) {
                break Ok(());
            }
            if deadline.is_over() {
                break Err(libc::EAGAIN);
            }
            let mut fds = [readable(link.queue.fd()), readable(self.fd), poke.pollfd()];
            if let Err(error) = sleep(&mut fds, deadline) {
                break Err(error);
            }
            if fds[2].revents != 0 {
                poke.drain();
            }
            if fds[0].revents != 0 {
                self.drain_queue();
            }
            if fds[1].revents != 0 {
                self.drive(&mut self.setup());
            }
            self.sleepers.wake(Some(&poke));
        };
        self.sleepers.leave(&poke);
        self.sleepers.wake(None);
        outcome
    }

    /// Arms the queue, then looks once more. Whether `test` holds.
    pub fn arm(&self, link: &Link, test: &mut impl FnMut(&mut Core) -> bool) -> bool {
        let mut core = link.lock();
        if !core.armed {
            link.queue.arm();
            core.armed = true;
        }
        link.turn(&mut core);
        test(&mut core)
    }

    /// A program that never sleeps here must learn that the other end died. Whether it was time to
    /// look.
    #[inline]
    pub fn look_at_events_sometimes(&self) -> bool {
        let is_time = self.is_time_to_look();
        if is_time {
            self.look_at_events();
        }
        is_time
    }

    #[inline]
    pub fn is_time_to_look(&self) -> bool {
        coarse_ms().wrapping_sub(self.looked_at_ms.load(Ordering::Relaxed)) >= LOOK_INTERVAL_MS
    }

    #[cold]
    fn look_at_events(&self) {
        self.looked_at_ms.store(coarse_ms(), Ordering::Relaxed);
        self.drive(&mut self.setup());
    }

    /// # Errors
    /// ENOTCONN; EINVAL: no such direction.
    pub fn shutdown(&self, how: c_int, deadline: Deadline) -> Outcome<()> {
        let direction = match how {
            libc::SHUT_RD => Direction::Read,
            libc::SHUT_WR => Direction::Write,
            libc::SHUT_RDWR => Direction::Both,
            _ => return Err(libc::EINVAL),
        };
        let Ok(link) = self.ready_link(self.is_nonblocking(), deadline) else {
            let mut setup = self.setup();
            if setup.phase != Phase::Listening {
                return Err(libc::ENOTCONN);
            }
            setup.phase = Phase::Failed(libc::EINVAL);
            self.sleepers.wake(None);
            return Ok(());
        };
        let control = link.lock().stream.shut(direction);
        self.sleepers.wake(None);
        let Some(control) = control else { return Ok(()) };
        // Behind all that is being sent: whoever sends has seen by now that it must not any more.
        let sender = self.send_lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.post_control(link, control, deadline)?;
        drop(sender);
        self.wait_for_control(link, deadline)
    }

    /// Posts a control message as soon as it may, unless the connection is over.
    fn post_control(&self, link: &Link, control: Control, deadline: Deadline) -> Outcome<()> {
        let mut planned = false;
        self.wait_until(link, false, deadline, |core| {
            if let Some(write) = core.stream.plan_control(control) {
                link.post_control(core, &write);
                planned = true;
            }
            planned || !core.stream.state().is_open()
        })
    }

    fn wait_for_control(&self, link: &Link, deadline: Deadline) -> Outcome<()> {
        self.wait_until(link, false, deadline, |core| core.stream.control_done() || !core.stream.state().is_open())
    }

    /// Notifies the other end that this is no orderly end. What others still send here need not
    /// arrive first.
    fn reset(&self, link: &Link) {
        let deadline = Deadline::after(Some(Duration::from_millis(RESET_WAIT_MS)));
        // An end that does not answer hears of it from the connection manager alone.
        let _ = self.post_control(link, Control::Reset, deadline).and_then(|()| self.wait_for_control(link, deadline));
    }

    /// Ends a connection that the program never had, without waiting for anything.
    fn abandon(&self) {
        if let Some(link) = self.link.get() {
            link.lock().stream.disconnect();
        }
        self.id.disconnect();
        self.setup().phase = Phase::Closed;
    }

    /// Ends it: says goodbye if there is somebody to hear it. The rest goes when the last user
    /// does.
    pub fn close(&self) {
        let (linger, phase) = {
            let mut setup = self.setup();
            if setup.phase == Phase::Listening {
                setup.phase = Phase::Closed;
            }
            let pending = std::mem::take(&mut setup.pending);
            let found = (setup.settings.linger_s, setup.phase);
            drop(setup);
            // Nobody will ever read or write there, so there is nothing to wait for: the other end
            // need not answer.
            pending.iter().for_each(|socket| socket.abandon());
            found
        };
        if phase == Phase::Accepting {
            let _ = self.ready_link(true, Deadline::never());
        }
        if let Some(link) = self.connected_link() {
            let seconds = linger.unwrap_or(CLOSE_WAIT_S);
            if seconds == 0 {
                self.reset(link);
            } else {
                let deadline = Deadline::after(Some(Duration::from_secs(u64::from(seconds))));
                // A signal, or an end that does not answer: it is closed all the same.
                let _ = self.shutdown(libc::SHUT_RDWR, deadline);
            }
            link.lock().stream.disconnect();
            self.id.disconnect();
        }
        self.setup().phase = Phase::Closed;
        self.sleepers.wake(None);
    }
}

fn is_failure(kind: u32) -> bool {
    use freeflow_abi::{RDMA_CM_EVENT_CONNECT_ERROR, RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_UNREACHABLE};
    [
        RDMA_CM_EVENT_ADDR_ERROR,
        RDMA_CM_EVENT_ROUTE_ERROR,
        RDMA_CM_EVENT_CONNECT_ERROR,
        RDMA_CM_EVENT_UNREACHABLE,
        RDMA_CM_EVENT_REJECTED,
        RDMA_CM_EVENT_DISCONNECTED,
        RDMA_CM_EVENT_DEVICE_REMOVAL,
    ]
    .contains(&kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A socket, and an address where somebody listens who accepts nothing.
    fn unanswered(port: u16) -> (Arc<StreamSocket>, Arc<StreamSocket>, Address) {
        let to = Address::from_std(std::net::SocketAddr::from(([127, 0, 0, 1], port)));
        let [listener, socket] = [0, 1].map(|_| StreamSocket::create(libc::AF_INET, 0, 0).unwrap());
        assert_eq!((listener.bind(to), listener.listen(5)), (Ok(()), Ok(())));
        (listener, socket, to)
    }

    #[test]
    fn what_changes_before_a_sleep_ends_it() {
        let (_listener, socket, _) = unanswered(7031);
        let mut watch = None;
        // The state is looked at after this.
        assert_eq!(socket.sleep_on_events(&mut watch, None, Deadline::never()), Ok(()));
        socket.sleepers.wake(None);
        assert_eq!(socket.sleep_on_events(&mut watch, None, Deadline::never()), Ok(()));
        drop(watch);
        socket.sleepers.wake(None);
    }

    #[test]
    fn a_connect_that_others_learn_of_first_fails_all_the_same() {
        let (_listener, socket, to) = unanswered(7032);
        let sleeper = Arc::clone(&socket);
        let other = std::thread::spawn(move || sleeper.connect(to));
        while socket.sleepers.count() == 0 && !other.is_finished() {
            std::thread::yield_now();
        }
        let mut setup = socket.setup();
        socket.fail(&mut setup, libc::ECONNREFUSED);
        socket.take_error();
        drop(setup);
        assert_eq!(other.join().unwrap(), Err(libc::ECONNREFUSED));
    }
}
