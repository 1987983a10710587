//! Processes that outlive their numbers: a PID with its start time, so that a reused number is nobody.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    /// Clock ticks after boot at which it began, from `/proc/PID/stat`.
    pub start_ticks: u64,
}

impl Process {
    pub fn current() -> Self {
        Self::of(std::process::id()).expect("/proc shows this very process")
    }

    /// The process that has this number now.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        let (state, start_ticks) = parse_stat(&stat)?;
        (state != b'Z' && state != b'X').then_some(Self { pid, start_ticks })
    }

    pub fn is_alive(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }

    /// A handle on the process, if it still lives.
    pub fn open(&self) -> Option<OwnedFd> {
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The number may have changed hands before the handle was made; not after.
        self.is_alive().then_some(handle)
    }

    /// Sends a signal, if it still lives.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match self.open() {
            Some(handle) => pidfd_send_signal(&handle, signal).or_else(|errno| match errno {
                rustix::io::Errno::SRCH => Ok(()),
                errno => Err(errno.into()),
            }),
            None => Ok(()),
        }
    }

    /// Waits for its end; false if the time ran out first.
    pub fn wait_end(&self, timeout: Duration) -> bool {
        let Some(handle) = self.open() else { return true };
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match poll_readable(&handle, Some(left)) {
                Ok(true) => return true,
                Ok(false) if left.is_zero() => return false,
                _ => {}
            }
        }
    }
}

/// Waits until a descriptor is readable or hung up; false if the time ran out or a signal came.
pub fn poll_readable(fd: &OwnedFd, timeout: Option<Duration>) -> io::Result<bool> {
    let timeout = timeout
        .map(|timeout| Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) });
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    match poll(&mut fds, timeout.as_ref()) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// State and start time of one `/proc/PID/stat` line. The command's name may hold spaces and parentheses.
fn parse_stat(stat: &[u8]) -> Option<(u8, u64)> {
    let after_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
    let mut fields = std::str::from_utf8(stat.get(after_name..)?).ok()?.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    // The state is field 3, the start time field 22.
    let start_ticks = fields.nth(22 - 4)?.parse().ok()?;
    Some((state, start_ticks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_number_and_start() {
        let this = Process::current();
        assert!(this.is_alive() && this.open().is_some());
        assert!(!Process { start_ticks: this.start_ticks + 1, ..this }.is_alive());
        assert!(this.start_ticks > 0);
    }

    #[test]
    fn a_hostile_process_name_does_not_confuse() {
        let mut line = b"7 (a) S 1 (b) R".to_vec();
        line.extend_from_slice(" 0".repeat(18).as_bytes());
        line.extend_from_slice(b" 4242 0 0");
        assert_eq!(parse_stat(&line), Some((b'R', 4242)));
        assert_eq!(parse_stat(b"7 (x"), None);
        assert_eq!(parse_stat(b""), None);
    }
}
