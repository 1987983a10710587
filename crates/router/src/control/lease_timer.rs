//! The lease of this router's host, and the timer that rings at its end.
use crate::base::lease::{Lease, LeaseStatus, boot_id};
use crate::base::log::warning;
use crate::config::Config;
use freeflow_shm::boottime_ns;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::io;
use std::os::fd::OwnedFd;

/// The lease of this router's host.
pub(crate) struct Leasing {
    /// `None`: it needs none.
    pub lease: Option<Lease>,
    pub boot: String,
    /// It was said that it is over.
    pub is_over: bool,
    pub timer: OwnedFd,
}

impl Leasing {
    /// As it was when the last router ended.
    ///
    /// # Errors
    /// The machine's boot or the lease can't be read, or there is no timer to be had.
    pub fn new(config: &Config) -> io::Result<Self> {
        let lease = if config.follows_cluster { Lease::load(config.state_dir())? } else { None };
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Boottime, flags)?;
        Ok(Self { lease, boot: boot_id()?, is_over: false, timer })
    }

    pub fn has_ended(&self) -> bool {
        self.is_over || self.lease.as_ref().is_some_and(|lease| lease.is_over(&self.boot, boottime_ns()))
    }

    /// The timer rings at this time of CLOCK_BOOTTIME.
    pub fn ring_at(&self, at_ns: u64) {
        let spec = |ns: u64| Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as _ };
        // Zero would stop it.
        let time = Itimerspec { it_interval: spec(0), it_value: spec(at_ns.max(1)) };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &time) {
            warning!("can't set the timer of the lease", error = io::Error::from(error));
        }
    }

    pub fn status(&self) -> LeaseStatus {
        LeaseStatus {
            after_s: self.lease.as_ref().map(|lease| lease.after_s),
            until_ns: self.lease.as_ref().map_or(0, |lease| lease.until_ns),
            is_over: self.has_ended(),
        }
    }
}
