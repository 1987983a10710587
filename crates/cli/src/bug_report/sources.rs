//! Where a report's parts come from: files and programs, each with a limit of size and time.
//!
//! A file is opened without following a link in its last part, and has to be a plain one of root's: nobody else can
//! have another file read, or have the command wait at a pipe.

use crate::failure::{Context as _, Failure, Result, fail};
use crate::interruption::Interruption;
use crate::sys;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The most of one part, bytes.
pub const PART_BYTES_MAX: u64 = 4 << 20;
const READ_BYTES: usize = 64 << 10;
/// How often a running program is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Of our own command's environment: where its parts are.
const OWN_VARIABLES: [&str; 3] = ["FREEFLOW_ROUTER", "FREEFLOW_LIBDIR", "FREEFLOW_CGROUP_KEEP"];

/// The end of a file, in whole lines.
pub fn tail(path: &Path) -> Result<Vec<u8>> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut file = File::options().read(true).custom_flags(flags).open(path).context(path.display())?;
    let metadata = file.metadata().context(path.display())?;
    if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
        fail!("{}: not a plain file of root's", path.display());
    }
    let begin = metadata.len().saturating_sub(PART_BYTES_MAX);
    file.seek(SeekFrom::Start(begin)).context(path.display())?;
    let mut content = Vec::new();
    file.take(PART_BYTES_MAX).read_to_end(&mut content).context(path.display())?;
    if begin > 0 {
        let first_line = content.iter().position(|&byte| byte == b'\n').map_or(content.len(), |at| at + 1);
        content.drain(..first_line);
    }
    Ok(content)
}

/// A file of the kernel's (`/proc`, `/sys`), which has no length beforehand.
pub fn kernel_file(path: &str) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path).and_then(|file| file.take(PART_BYTES_MAX).read_to_end(&mut content)).context(path)?;
    Ok(content)
}

/// The output of a program. One that prints too much, or takes too long, is ended, and what there is until then counts.
pub fn output(
    program: &Path,
    words: &[&str],
    time: Duration,
    interruption: &Interruption,
) -> Result<(Vec<u8>, Option<String>)> {
    let what = || program.display().to_string();
    let memory = memfd_create("freeflow-bugreport", MemfdFlags::CLOEXEC).context("memfd_create")?;
    let mut printed = File::from(memory);
    let out = || -> Result<Stdio> { Ok(Stdio::from(printed.try_clone().context("memfd")?)) };
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(out()?).stderr(out()?);
    command.env_clear().env("PATH", PATH).env("LC_ALL", "C.UTF-8").process_group(0);
    for name in OWN_VARIABLES {
        command.envs(std::env::var_os(name).map(|value| (name, value)));
    }
    // This process blocks signals; the programs hear them.
    let mut child = sys::with_default_signals(&mut command).spawn().context(what())?;
    let deadline = Instant::now() + time;
    let mut note = None;
    let status = loop {
        if let Some(status) = child.try_wait().context(what())? {
            break Some(status);
        }
        let length = printed.metadata().map_or(0, |metadata| metadata.len());
        let reason = match () {
            () if length > PART_BYTES_MAX => Some("too long"),
            () if Instant::now() > deadline => Some("took too long"),
            () if interruption.has_come() => Some("interrupted"),
            () => None,
        };
        if let Some(reason) = reason {
            note = Some(reason.to_owned());
            // With what it has started: it has a group of its own.
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
            break child.wait().ok();
        }
        std::thread::sleep(LOOK_INTERVAL);
    };
    if let Some(status) = status.filter(|status| !status.success()) {
        note = note.or(Some(status.to_string()));
    }
    printed.rewind().context("memfd")?;
    let mut content = Vec::new();
    (&printed).take(PART_BYTES_MAX).read_to_end(&mut content).context("memfd")?;
    Ok((content, note))
}

/// The router's metrics, by its REST socket. All of it takes no longer than `time`, whatever the router does.
pub fn metrics(socket: &Path, time: Duration, interruption: &Interruption) -> Result<Vec<u8>> {
    let deadline = Instant::now() + time;
    let mut stream = connect(socket, time)?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").context("the router")?;
    stream.set_read_timeout(Some(LOOK_INTERVAL)).context("a socket")?;
    let (mut answer, mut bytes) = (Vec::new(), [0; READ_BYTES]);
    while answer.len() < PART_BYTES_MAX as usize {
        match stream.read(&mut bytes) {
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("the router"),
        }
        if Instant::now() > deadline || interruption.has_come() {
            fail!("the router does not answer");
        }
    }
    let body = answer.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4);
    match body {
        Some(at) if answer.starts_with(b"HTTP/1.") => Ok(answer.split_off(at)),
        _ => Err(Failure::new("the router's answer is none of HTTP")),
    }
}

/// Bounded also where the router is stopped, and as many as its socket takes wait before it.
fn connect(socket: &Path, time: Duration) -> Result<UnixStream> {
    let address = SocketAddrUnix::new(socket).context(socket.display())?;
    let stream =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).context("a socket")?;
    set_socket_timeout(&stream, Timeout::Send, Some(time)).context("a socket")?;
    rustix::net::connect(&stream, &address).context(socket.display())?;
    Ok(stream.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_pipes_and_what_is_too_long_do_no_harm() {
        let directory = std::env::temp_dir().join(format!("freeflow-sources-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir(&directory).unwrap();
        let file = directory.join("file");
        std::fs::write(&file, "first\nsecond\n").unwrap();
        assert_eq!(tail(&file).unwrap(), b"first\nsecond\n");
        std::os::unix::fs::symlink(&file, directory.join("link")).unwrap();
        assert!(tail(&directory.join("link")).is_err());
        assert!(tail(&directory).is_err());
        let long = directory.join("long");
        let lines = "0123456789\n".repeat(PART_BYTES_MAX as usize / 11 + 10);
        std::fs::write(&long, &lines).unwrap();
        let content = tail(&long).unwrap();
        assert!(content.len() as u64 <= PART_BYTES_MAX && content.starts_with(b"0123456789\n"));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_program_is_bounded_in_time_and_length() {
        let shell = Path::new("/bin/sh");
        let none = Interruption::new().unwrap();
        let (content, note) =
            output(shell, &["-c", "echo out; echo err >&2; exit 3"], Duration::from_secs(10), &none).unwrap();
        assert_eq!(content, b"out\nerr\n");
        assert!(note.unwrap().contains('3'));
        let begin = Instant::now();
        let (_, note) = output(shell, &["-c", "echo begun; exec sleep 60"], Duration::from_millis(200), &none).unwrap();
        assert_eq!(note.as_deref(), Some("took too long"));
        // `none` blocks signals; what is started does not.
        let (_, note) = output(shell, &["-c", "kill $$; sleep 60"], Duration::from_secs(30), &none).unwrap();
        assert!(note.unwrap().contains("signal: 15"));
        let (content, note) = output(shell, &["-c", "exec yes"], Duration::from_secs(30), &none).unwrap();
        assert_eq!((content.len() as u64, note.as_deref()), (PART_BYTES_MAX, Some("too long")));
        assert!(begin.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_router_that_is_stopped_is_waited_for_no_longer_than_said() {
        let none = Interruption::new().unwrap();
        let directory = std::env::temp_dir().join(format!("freeflow-metrics-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir(&directory).unwrap();
        let socket = directory.join("api.sock");
        let time = Duration::from_millis(200);
        let address = SocketAddrUnix::new(&socket).unwrap();
        let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        // It is in the queue, and gets no answer.
        assert!(metrics(&socket, time, &none).unwrap_err().to_string().contains("does not answer"));
        // The queue is full.
        let mut waiting = Vec::new();
        while let Ok(one) = connect(&socket, time) {
            waiting.push(one);
        }
        assert!(metrics(&socket, time, &none).is_err());
        // Bytes come, and no end of them.
        let endless = directory.join("endless.sock");
        let listener = std::os::unix::net::UnixListener::bind(&endless).unwrap();
        let sending = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(b"HTTP/1.0 200").is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert!(metrics(&endless, time, &none).is_err());
        sending.join().unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
