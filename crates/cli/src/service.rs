//! `freeflow up` as a service: readiness for systemd, and a process that stays as long as the router.
//!
//! Not here: the unit that runs it (`packaging/systemd/freeflow.service`).

use crate::failure::{Context, Result, fail};
use crate::process::Process;
use crate::{cluster, output, router};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_shm::termination_signals;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The socket of systemd, or of another supervisor that speaks sd_notify.
const SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";

/// Reports to the supervisor, if there is one, that the host is up. The main process of the service is the router,
/// unless this process stays.
pub fn report_ready(router: u32, stays: bool) {
    let Some(name) = std::env::var_os(SOCKET_VARIABLE) else { return };
    // The variable may be left over from another service, and the host is up.
    if let Err(error) = send(&name, message(router, stays).as_bytes()) {
        output::complaint(format!("readiness is not reported to {SOCKET_VARIABLE} {}: {error}", name.display()));
    }
}

fn message(router: u32, stays: bool) -> String {
    let main = if stays { String::new() } else { format!("MAINPID={router}\n") };
    format!("{main}READY=1\nSTATUS=router: process {router}\n")
}

/// A name that begins with `@` is one of the abstract namespace.
fn send(name: &OsStr, message: &[u8]) -> io::Result<()> {
    let address = match name.as_bytes() {
        [b'@', abstract_name @ ..] => SocketAddr::from_abstract_name(abstract_name)?,
        [b'/', ..] => SocketAddr::from_pathname(name)?,
        _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "names neither a path nor an abstract socket")),
    };
    let sent = UnixDatagram::unbound()?.send_to_addr(message, &address)?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// From now on SIGTERM and SIGINT are left to [`stay`].
pub fn hold_signals() -> Result<OwnedFd> {
    termination_signals().context("signals")
}

/// Returns when the router has ended: in order, if this process was asked to end or the host was taken down.
pub fn stay(run_dir: &RunDir, router: u32, signals: &OwnedFd) -> Result<()> {
    let Some(process) = Process::of(router) else { return ended(run_dir) };
    let Some(handle) = process.open() else { return ended(run_dir) };
    loop {
        let mut polled = [signals.as_fd(), handle.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut polled, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(io::Error::from(errno)).context("poll"),
        }
        if !polled[1].revents().is_empty() {
            return ended(run_dir);
        }
        if !polled[0].revents().is_empty() {
            // It would go on with what the router does no more.
            cluster::end(run_dir)?;
            process.signal(Signal::TERM).context("can't end the router")?;
            return router::wait_end(process, false);
        }
    }
}

fn ended(run_dir: &RunDir) -> Result<()> {
    // `freeflow down` removes the settings, after the router has ended.
    let _lock = run_dir.lock()?;
    if run_dir.settings().is_some() {
        fail!("the router has ended; its log: {}", run_dir.router_log().display());
    }
    output::line("The host was taken down.");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn the_router_is_the_main_process_unless_this_one_stays() {
        assert_eq!(message(7, false), "MAINPID=7\nREADY=1\nSTATUS=router: process 7\n");
        assert_eq!(message(7, true), "READY=1\nSTATUS=router: process 7\n");
    }

    /// The bytes that a supervisor at an address hears.
    fn heard(address: &SocketAddr, name: &OsStr) -> Vec<u8> {
        let socket = UnixDatagram::bind_addr(address).expect("a socket");
        send(name, b"READY=1\n").expect("sent");
        let mut bytes = [0; 64];
        let length = socket.recv(&mut bytes).expect("received");
        bytes[..length].to_vec()
    }

    #[test]
    fn a_supervisor_is_a_path_or_an_abstract_name() {
        let path = PathBuf::from(format!("{}/freeflow-notify.{}", std::env::temp_dir().display(), std::process::id()));
        let address = SocketAddr::from_pathname(&path).expect("a path");
        assert_eq!(heard(&address, path.as_os_str()), b"READY=1\n");
        std::fs::remove_file(&path).expect("removed");
        assert!(send(path.as_os_str(), b"READY=1\n").is_err());
        let name = format!("freeflow-notify.{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        assert_eq!(heard(&address, OsStr::new(&format!("@{name}"))), b"READY=1\n");
        for bad in ["", "relative", "vsock:2:1"] {
            assert_eq!(send(OsStr::new(bad), b"").unwrap_err().kind(), io::ErrorKind::InvalidInput, "{bad}");
        }
    }
}
