//! Where a report's parts come from: files and programs, each with a limit of size and time.
//!
//! A file is opened without following a link in its last part, and has to be a plain one of root's: nobody else can
//! have another file read, or have the command wait at a pipe.

use crate::failure::{Context as _, Failure, Result, fail};
use crate::process::Process;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::Signal;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The most of one part, bytes.
pub const PART_BYTES_MAX: u64 = 4 << 20;
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
pub fn output(program: &Path, words: &[&str], time: Duration) -> Result<(Vec<u8>, Option<String>)> {
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
    let mut child = command.spawn().context(what())?;
    let deadline = Instant::now() + time;
    let mut note = None;
    let status = loop {
        if let Some(status) = child.try_wait().context(what())? {
            break Some(status);
        }
        let length = printed.metadata().map_or(0, |metadata| metadata.len());
        if length > PART_BYTES_MAX || Instant::now() > deadline {
            note = Some(if length > PART_BYTES_MAX { "too long" } else { "took too long" }.to_owned());
            let _ = Process::of(child.id()).map(|process| process.signal(Signal::KILL));
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

/// The router's metrics, by its REST socket.
pub fn metrics(socket: &Path, time: Duration) -> Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket).context(socket.display())?;
    stream.set_read_timeout(Some(time)).and_then(|()| stream.set_write_timeout(Some(time))).context("a socket")?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").context("the router")?;
    let mut answer = Vec::new();
    stream.take(PART_BYTES_MAX).read_to_end(&mut answer).context("the router")?;
    let body = answer.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4);
    match body {
        Some(at) if answer.starts_with(b"HTTP/1.") => Ok(answer.split_off(at)),
        _ => Err(Failure::new("the router's answer is none of HTTP")),
    }
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
        let (content, note) =
            output(shell, &["-c", "echo out; echo err >&2; exit 3"], Duration::from_secs(10)).unwrap();
        assert_eq!(content, b"out\nerr\n");
        assert!(note.unwrap().contains('3'));
        let begin = Instant::now();
        let (_, note) = output(shell, &["-c", "echo begun; exec sleep 60"], Duration::from_millis(200)).unwrap();
        assert_eq!(note.as_deref(), Some("took too long"));
        let (content, note) = output(shell, &["-c", "exec yes"], Duration::from_secs(30)).unwrap();
        assert_eq!((content.len() as u64, note.as_deref()), (PART_BYTES_MAX, Some("too long")));
        assert!(begin.elapsed() < Duration::from_secs(30));
    }
}
