//! A terminal for `-t`: a pseudo-terminal of the container's own `/dev/pts`, and the caller's terminal passed through.

use crate::failure::{Context, Result};
use rustix::pty::{ptsname, unlockpt};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};
use std::os::fd::{AsFd, OwnedFd};

pub struct Terminal {
    pub master: OwnedFd,
    pub slave: OwnedFd,
}

/// Opens a pair in the calling process' `/dev/pts`.
pub fn open() -> Result<Terminal> {
    use rustix::fs::{Mode, OFlags};
    let what = "can't make a terminal";
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let master = rustix::fs::open("/dev/ptmx", flags, Mode::empty()).context(what)?;
    unlockpt(&master).context(what)?;
    let name = ptsname(&master, Vec::new()).context(what)?;
    let slave = rustix::fs::open(name, flags, Mode::empty()).context(what)?;
    Ok(Terminal { master, slave })
}

/// Makes it the terminal of the calling process, which leads its session.
pub fn make_controlling(slave: &OwnedFd) -> Result<()> {
    let what = "can't take the terminal";
    rustix::process::ioctl_tiocsctty(slave).context(what)?;
    rustix::stdio::dup2_stdin(slave).context(what)?;
    rustix::stdio::dup2_stdout(slave).context(what)?;
    rustix::stdio::dup2_stderr(slave).context(what)
}

/// Whether `-t` makes sense: the caller has a terminal to pass through.
pub fn is_present() -> bool {
    isatty(std::io::stdin()) && isatty(std::io::stdout())
}

/// The caller's terminal in raw mode for as long as the value lives.
pub struct Raw(Termios);

impl Raw {
    pub fn enter() -> Result<Self> {
        let stdin = std::io::stdin();
        let before = tcgetattr(&stdin).context("terminal")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw).context("terminal")?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Drain, &self.0);
    }
}

/// Gives the container's terminal the size of the caller's.
pub fn copy_size(master: &OwnedFd) {
    if let Ok(size) = tcgetwinsize(std::io::stdin()) {
        let _ = tcsetwinsize(master, size);
    }
}

/// Moves what is there from one descriptor to another; false at the end of the input.
pub fn relay(from: impl AsFd, to: impl AsFd) -> bool {
    let mut bytes = [0u8; 4096];
    match rustix::io::read(from, &mut bytes) {
        Ok(0) => false,
        Ok(length) => {
            let mut rest = &bytes[..length];
            while !rest.is_empty() {
                match rustix::io::write(&to, rest) {
                    Ok(written) => rest = &rest[written..],
                    Err(rustix::io::Errno::INTR) => {}
                    Err(_) => return false,
                }
            }
            true
        }
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => true,
        // EIO: the last process on the other side has gone.
        Err(_) => false,
    }
}
