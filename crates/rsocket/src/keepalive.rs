//! The thread that sends keepalives: one for the process, from the first socket that asks for them.
//! The other end's transport answers an empty write; if nothing answers, the request fails, and
//! with it the connection.
use crate::table;
use crate::wait::PerProcess;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

struct Due {
    at: Instant,
    every: Duration,
}

#[derive(Default)]
struct Schedule {
    due: Mutex<BTreeMap<i32, Due>>,
    changed: Condvar,
}

impl Schedule {
    fn due(&self) -> MutexGuard<'_, BTreeMap<i32, Due>> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread is the process' own as well: a child begins one with its first.
static SCHEDULE: PerProcess<Schedule> = PerProcess::new();

/// From now on the socket sends one each `seconds`. Again: with the new time.
pub fn schedule(fd: i32, seconds: u32) {
    let every = Duration::from_secs(u64::from(seconds.max(1)));
    let schedule = SCHEDULE.get();
    let mut due = schedule.due();
    let first = due.is_empty();
    due.insert(fd, Due { at: Instant::now() + every, every });
    if first {
        // The thread of an empty table ends by itself. Without a thread there are no keepalives,
        // and no harm.
        let _ = std::thread::Builder::new().name("rs-keepalive".into()).spawn(run);
    } else {
        schedule.changed.notify_one();
    }
}

pub fn cancel(fd: i32) {
    let schedule = SCHEDULE.get();
    if schedule.due().remove(&fd).is_some() {
        schedule.changed.notify_one();
    }
}

/// Cancels it unless there is such a socket: under the lock, since another may have got the number
/// and be scheduled.
fn cancel_unless(fd: i32, is_there: impl FnOnce() -> bool) {
    let mut due = SCHEDULE.get().due();
    if !is_there() {
        due.remove(&fd);
    }
}

fn run() {
    let schedule = SCHEDULE.get();
    let mut due = schedule.due();
    while let Some(next) = due.values().map(|due| due.at).min() {
        let now = Instant::now();
        if next > now {
            due = schedule.changed.wait_timeout(due, next - now).unwrap_or_else(PoisonError::into_inner).0;
            continue;
        }
        let ready: Vec<i32> = due.iter().filter(|(_, due)| due.at <= now).map(|(fd, _)| *fd).collect();
        for fd in &ready {
            if let Some(entry) = due.get_mut(fd) {
                entry.at = now + entry.every;
            }
        }
        drop(due);
        for fd in ready {
            send(fd);
        }
        due = schedule.due();
    }
}

fn send(fd: i32) {
    let Some(socket) = table::stream(fd) else {
        return cancel_unless(fd, || table::stream(fd).is_some());
    };
    if let Some(link) = socket.connected_link() {
        let mut core = link.lock();
        link.turn(&mut core);
        if let Some(write) = core.stream.plan_keepalive() {
            link.post_control(&mut core, &write);
        }
    }
}

/// For tests.
#[cfg(test)]
pub fn is_scheduled(fd: i32) -> bool {
    SCHEDULE.get().due().contains_key(&fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_was_given_anew_keeps_its_own() {
        const FD: i32 = 1 << 20;
        schedule(FD, 3600);
        cancel_unless(FD, || true);
        assert!(is_scheduled(FD));
        cancel_unless(FD, || false);
        assert!(!is_scheduled(FD));
    }
}
