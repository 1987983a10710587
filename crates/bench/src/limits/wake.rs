//! Cost of waking a sleeper, one way: a blocking ping-pong, both ends on one core or on two. And
//! the small costs around it: a pause, a yield, a write to an eventfd that nobody reads.
use super::*;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const ROUND_TRIP_COUNT: usize = 20_000;
const CALL_COUNT: u64 = 200_000;

#[derive(Clone, Copy)]
enum Kind {
    Eventfd,
    EventfdEpoll,
    Pipe,
}

/// One direction: who writes wakes who reads.
struct Channel {
    read: File,
    write: File,
    epoll: Option<OwnedFd>,
}

impl Channel {
    fn new(kind: Kind) -> io::Result<Self> {
        let (read, write) = match kind {
            Kind::Pipe => pipe()?,
            Kind::Eventfd | Kind::EventfdEpoll => {
                let file = eventfd(0)?;
                (file.try_clone()?, file)
            }
        };
        let epoll = match kind {
            Kind::EventfdEpoll => Some(epoll_of(&read)?),
            Kind::Eventfd | Kind::Pipe => None,
        };
        Ok(Self { read, write, epoll })
    }

    fn wake(&self) {
        (&self.write).write_all(&1u64.to_ne_bytes()).expect("write");
    }

    fn sleep(&self) {
        if let Some(epoll) = &self.epoll {
            let mut event = libc::epoll_event { events: 0, u64: 0 };
            // SAFETY: `event` is a place for one event.
            unsafe { libc::epoll_wait(epoll.as_raw_fd(), &mut event, 1, -1) };
        }
        (&self.read).read_exact(&mut [0; 8]).expect("read");
    }
}

fn eventfd(flags: i32) -> io::Result<File> {
    // SAFETY: plain numbers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { File::from_raw_fd(fd) })
}

fn pipe() -> io::Result<(File, File)> {
    let mut fds = [0; 2];
    // SAFETY: a place for two descriptors.
    if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: two new descriptors that nothing else owns.
    Ok(unsafe { (File::from_raw_fd(fds[0]), File::from_raw_fd(fds[1])) })
}

fn epoll_of(file: &File) -> io::Result<OwnedFd> {
    // SAFETY: plain numbers.
    let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nothing else owns.
    let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    // SAFETY: both descriptors are open; `event` is valid.
    let added = unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, file.as_raw_fd(), &mut event) };
    if added < 0 { Err(io::Error::last_os_error()) } else { Ok(epoll) }
}

/// Mean of one repetition, microseconds one way.
fn one_way_us(kind: Kind, cpus: (Option<usize>, Option<usize>), count: usize) -> io::Result<f64> {
    let (there, back) = (Channel::new(kind)?, Channel::new(kind)?);
    let results = Results::new(1)?;
    let a = Party::new(cpus.0, || {
        let begun = sys::monotonic_ns();
        for _ in 0..count {
            there.wake();
            back.sleep();
        }
        results.put(0, (sys::monotonic_ns() - begun) as f64 / 2e3 / count as f64);
    });
    let b = Party::new(cpus.1, || {
        for _ in 0..count {
            there.sleep();
            back.wake();
        }
    });
    sys::run_parties(vec![a, b])?;
    Ok(results.take(1)[0])
}

/// Mean of many calls, nanoseconds.
fn call_ns(call: impl Fn()) -> f64 {
    let begun = sys::monotonic_ns();
    for _ in 0..CALL_COUNT {
        call();
    }
    (sys::monotonic_ns() - begun) as f64 / CALL_COUNT as f64
}

pub fn limits(effort: Effort) -> io::Result<Vec<Limit>> {
    let (first, second) = two_cpus();
    let mut list = Vec::new();
    let kinds = [
        (Kind::Eventfd, "eventfd", 24.0, 2.1),
        (Kind::EventfdEpoll, "eventfd and epoll", 20.0, 2.9),
        (Kind::Pipe, "pipe", 17.0, 2.4),
    ];
    for (kind, name, across, within) in kinds {
        for (where_, cpus, reference) in
            [("to the other core", (first, second), across), ("on the same core", (first, first), within)]
        {
            let count = ROUND_TRIP_COUNT / effort.divisor;
            let name = format!("wake by {name} {where_}");
            let (unit, reference) = (("us", Better::Lower), Reference::both(reference));
            let wake = Subject { group: "wake", name: &name, bytes: 0, unit, reference };
            list.push(wake.repeat(effort, || one_way_us(kind, cpus, count))?);
        }
    }
    let nobody = eventfd(libc::EFD_NONBLOCK)?;
    let write = || (&nobody).write_all(&1u64.to_ne_bytes()).expect("write");
    let calls: [(&str, &dyn Fn(), Reference); 3] = [
        ("pause", &hint::spin_loop, Reference::both(25.0)),
        ("sched_yield alone", &sys::sched_yield, Reference::both(450.0)),
        ("write to an eventfd that nobody reads", &write, Reference::NONE),
    ];
    for (name, call, reference) in calls {
        let subject = Subject { group: "wake", name, bytes: 0, unit: ("ns", Better::Lower), reference };
        list.push(subject.repeat(effort, || Ok(call_ns(call)))?);
    }
    Ok(list)
}
