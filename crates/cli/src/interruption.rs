//! SIGINT and SIGTERM for commands that tidy up before they end.

use crate::failure::{Context, Failure, Result};
use crate::process::poll_readable;
use freeflow_shm::termination_signals;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The exit status of a shell's command that SIGINT has ended.
const EXIT_INTERRUPTED: u8 = 130;

/// From its making on these signals only show here.
pub struct Interruption(OwnedFd);

impl Interruption {
    pub fn new() -> Result<Self> {
        Ok(Self(termination_signals().context("signals")?))
    }

    pub fn has_come(&self) -> bool {
        self.comes_within(Duration::ZERO)
    }

    pub fn comes_within(&self, time: Duration) -> bool {
        poll_readable(&self.0, Some(time)).unwrap_or(false)
    }

    /// # Errors
    /// One has come.
    pub fn check(&self, consequence: &str) -> Result<()> {
        match self.has_come() {
            true => Err(Failure::new(format!("interrupted; {consequence}")).with_code(EXIT_INTERRUPTED)),
            false => Ok(()),
        }
    }
}
