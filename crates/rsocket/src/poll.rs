//! `rpoll` and `rselect`: rsockets and other descriptors together.
use crate::config::Config;
use crate::ffi::Outcome;
use crate::socket::StreamSocket;
use crate::table::{self, Socket};
use crate::wait::{Deadline, Poke, Sleepers, Spin, readable, sleep};
use libc::{c_int, pollfd};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

impl Socket {
    fn readiness(&self, events: i16) -> i16 {
        match self {
            _ if !self.is_ours() => libc::POLLNVAL,
            Self::Stream(socket) => socket.readiness(events),
            Self::Datagram(socket) => socket.readiness(events),
        }
    }

    fn sleepers(&self) -> &Sleepers {
        match self {
            Self::Stream(socket) => &socket.sleepers,
            Self::Datagram(socket) => &socket.sleepers,
        }
    }

    /// Arms what raises events, and adds what to sleep on.
    fn prepare_sleep(&self, fds: &mut Vec<pollfd>) {
        match self {
            Self::Datagram(socket) => socket.prepare_sleep(fds),
            Self::Stream(socket) => {
                if let Some(link) = socket.connected_link() {
                    socket.drain_queue();
                    socket.arm(link, &mut |_| true);
                    fds.push(readable(link.queue.fd()));
                }
                fds.push(readable(socket.fd));
            }
        }
    }

    /// After a sleep: an event of the connection manager shows in no completion.
    fn look_at_events(&self) {
        if let Self::Stream(socket) = self {
            look_at_events(socket);
        }
    }
}

fn look_at_events(socket: &StreamSocket) {
    if socket.connected_link().is_some() {
        socket.drive(&mut socket.setup());
    }
}

/// Buffers of one call; kept for the next.
#[derive(Default)]
struct Scratch {
    sockets: Vec<(usize, Socket)>,
    /// A parent's, which say POLLNVAL.
    inherited: Vec<usize>,
    others: Vec<pollfd>,
    places: Vec<usize>,
    sleep: Vec<pollfd>,
}

impl Scratch {
    fn sort(&mut self, fds: &[pollfd]) {
        self.sockets.clear();
        self.inherited.clear();
        self.others.clear();
        self.places.clear();
        for (index, entry) in fds.iter().enumerate() {
            match table::get(entry.fd) {
                Some(socket) => self.sockets.push((index, socket)),
                None if table::is_inherited(entry.fd) => self.inherited.push(index),
                None if entry.fd >= 0 => {
                    self.others.push(*entry);
                    self.places.push(index);
                }
                None => {}
            }
        }
    }

    /// Fills in what is ready now. How many.
    fn look(&mut self, fds: &mut [pollfd]) -> Outcome<usize> {
        let mut count = 0;
        for entry in fds.iter_mut() {
            entry.revents = 0;
        }
        for index in &self.inherited {
            fds[*index].revents = libc::POLLNVAL;
            count += 1;
        }
        for (index, socket) in &self.sockets {
            fds[*index].revents = socket.readiness(fds[*index].events);
            count += usize::from(fds[*index].revents != 0);
        }
        if !self.others.is_empty() {
            let now = Deadline::after(Some(Duration::ZERO));
            count += sleep(&mut self.others, now)?;
            for (place, entry) in self.places.iter().zip(&self.others) {
                fds[*place].revents = entry.revents;
            }
        }
        Ok(count)
    }

    fn wait(&mut self, fds: &mut [pollfd], deadline: Deadline) -> Outcome<usize> {
        let poke = Poke::of_thread()?;
        self.sockets.iter().for_each(|(_, socket)| socket.sleepers().enter(&poke));
        let outcome = self.sleep(fds, deadline, &poke);
        for (_, socket) in &self.sockets {
            socket.sleepers().leave(&poke);
            // It may have taken the event that another thread sleeps for.
            socket.sleepers().wake(Some(&poke));
        }
        outcome
    }

    fn sleep(&mut self, fds: &mut [pollfd], deadline: Deadline, poke: &Arc<Poke>) -> Outcome<usize> {
        let interval = Config::of_machine().wake_up_interval_ms;
        loop {
            let mut sleep_on = std::mem::take(&mut self.sleep);
            sleep_on.clear();
            sleep_on.push(poke.pollfd());
            self.sockets.iter().for_each(|(_, socket)| socket.prepare_sleep(&mut sleep_on));
            sleep_on.extend_from_slice(&self.others);
            // All is armed: what comes from now on ends the sleep, what came before is seen here.
            let ready = self.look(fds)?;
            if ready != 0 || deadline.is_over() {
                self.sleep = sleep_on;
                return Ok(ready);
            }
            let slept = if interval == 0 {
                sleep(&mut sleep_on, deadline)
            } else {
                sleep(&mut sleep_on, deadline.sooner(Duration::from_millis(u64::from(interval))))
            };
            if sleep_on[0].revents != 0 {
                poke.drain();
            }
            self.sleep = sleep_on;
            slept?;
            self.sockets.iter().for_each(|(_, socket)| socket.look_at_events());
        }
    }
}

thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());

/// `rpoll`: how many are ready.
///
/// # Errors
/// EINTR; what `poll(2)` says.
pub fn poll(fds: &mut [pollfd], deadline: Deadline) -> Outcome<usize> {
    let mut scratch = SCRATCH.with_borrow_mut(std::mem::take);
    scratch.sort(fds);
    let outcome = poll_sorted(&mut scratch, fds, deadline);
    // Sockets that were closed meanwhile end here.
    scratch.sockets.clear();
    SCRATCH.with_borrow_mut(|kept| *kept = scratch);
    outcome
}

fn poll_sorted(scratch: &mut Scratch, fds: &mut [pollfd], deadline: Deadline) -> Outcome<usize> {
    let mut spin = Spin::new(Config::of_machine().polling_us);
    let connected = scratch.sockets.iter().any(|(_, socket)| match socket {
        Socket::Stream(socket) => socket.connected_link().is_some(),
        Socket::Datagram(_) => true,
    });
    loop {
        let ready = scratch.look(fds)?;
        if ready != 0 || deadline.is_over() {
            return Ok(ready);
        }
        if !connected || !spin.again() {
            break;
        }
    }
    scratch.wait(fds, deadline)
}

/// Descriptor sets of `rselect`, as entries of `rpoll`.
///
/// # Safety
/// The sets are null or valid, and reach to `count`.
#[must_use]
pub unsafe fn entries_of_sets(count: c_int, sets: [*const libc::fd_set; 3]) -> Vec<pollfd> {
    // SAFETY: this function's contract.
    let has = |set: *const libc::fd_set, fd: c_int| !set.is_null() && unsafe { libc::FD_ISSET(fd, set) };
    let events = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI];
    (0..count.clamp(0, libc::FD_SETSIZE as c_int))
        .filter_map(|fd| {
            let wanted = sets.iter().zip(events).filter(|(set, _)| has(**set, fd)).map(|(_, event)| event);
            let events = wanted.fold(0, |all, event| all | event);
            (events != 0).then_some(pollfd { fd, events, revents: 0 })
        })
        .collect()
}

/// The answer of `rpoll` as that of `rselect`: the sets, and how many bits are in them.
///
/// # Errors
/// EBADF: one of the descriptors is not open.
///
/// # Safety
/// The sets are null or valid.
pub unsafe fn entries_to_sets(entries: &[pollfd], sets: [*mut libc::fd_set; 3]) -> Outcome<c_int> {
    if entries.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        return Err(libc::EBADF);
    }
    let read = libc::POLLIN | libc::POLLHUP | libc::POLLERR;
    let means = [read, libc::POLLOUT | libc::POLLERR, libc::POLLPRI];
    let asked = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI];
    let mut count = 0;
    for (index, set) in sets.into_iter().enumerate().filter(|(_, set)| !set.is_null()) {
        // SAFETY: this function's contract.
        unsafe { libc::FD_ZERO(set) };
        for entry in entries.iter().filter(|entry| entry.events & asked[index] != 0) {
            if entry.revents & means[index] != 0 {
                // SAFETY: the descriptor came from such a set.
                unsafe { libc::FD_SET(entry.fd, set) };
                count += 1;
            }
        }
    }
    Ok(count)
}
