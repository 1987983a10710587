//! Has the command follow when networks or declared vNICs have come or gone, whoever did it: bridges, interfaces and the CDI
//! files are its business. One run follows all that has changed until it begins; nobody waits for it but the router's end.
//!
//! The command is a process of its own, begun before the router gives up its rights ([`crate::base::privileges::confine`]) and ended with it:
//! it has the right to change interfaces, which the router has not, and takes nothing from the router but "look again".
use crate::base::log::warning;
use crate::base::privileges::{self, Kind};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Says that there is something to follow; the default tells nobody.
#[derive(Clone, Default)]
pub struct News(Option<SyncSender<()>>);

impl News {
    pub fn tell(&self) {
        if let Some(sender) = &self.0 {
            // What waits already stands for this one, too.
            let _ = sender.try_send(());
        }
    }
}

/// The command's process, `freeflow hook networks`: it follows for each byte that it gets, answers with one, and ends when nobody is
/// left to send any.
#[derive(Clone, Debug)]
pub struct HostHelper(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    socket: UnixStream,
    child: std::sync::Mutex<Child>,
}

impl HostHelper {
    /// Errors: it can't be run.
    pub fn start(program: &Path, run_dir: &Path) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let mut command = Command::new(program);
        command.arg("--run-dir").arg(run_dir).args(["hook", "networks"]).stdin(Stdio::from(OwnedFd::from(theirs)));
        let child = command.spawn()?;
        Ok(Self(Arc::new(Parts { socket, child: std::sync::Mutex::new(child) })))
    }

    /// Errors: the process has ended.
    fn follow(&self) -> io::Result<()> {
        (&self.0.socket).write_all(&[0])?;
        (&self.0.socket).read_exact(&mut [0])
    }

    /// Returns when the process has ended.
    fn end(&self) {
        let _ = self.0.socket.shutdown(std::net::Shutdown::Both);
        if let Ok(mut child) = self.0.child.lock() {
            let _ = child.wait();
        }
    }
}

/// The thread; its end is waited for when this is dropped, after all [`News`] are.
#[derive(Default)]
pub struct Follower(Option<JoinHandle<()>>);

impl Follower {
    /// Errors: no thread could be made.
    pub fn start(helper: Option<HostHelper>) -> io::Result<(Self, News)> {
        let Some(helper) = helper else { return Ok(Default::default()) };
        let (sender, receiver) = sync_channel(1);
        let body = move || {
            privileges::enter(Kind::Follower);
            serve(&receiver, &helper);
            helper.end();
        };
        let thread = std::thread::Builder::new().name("ff-follower".into()).spawn(body)?;
        Ok((Self(Some(thread)), News(Some(sender))))
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take()
            && thread.join().is_err()
        {
            warning!("the thread that follows networks panicked");
        }
    }
}

fn serve(receiver: &Receiver<()>, helper: &HostHelper) {
    let mut is_gone = false;
    while receiver.recv().is_ok() {
        if is_gone {
            continue;
        }
        if let Err(error) = helper.follow() {
            // The router has no right to begin another one.
            warning!("the process that changes interfaces has ended; freeflow up does its work", error = error);
            is_gone = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn helper(name: &str, text: &str) -> (std::path::PathBuf, HostHelper) {
        let directory = std::env::temp_dir().join(format!("ff-follower-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let program = directory.join("follow");
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let helper = HostHelper::start(&program, &directory).unwrap();
        (directory, helper)
    }

    #[test]
    fn the_command_follows_after_the_last_change() {
        let text = "#!/bin/sh\necho \"$@\" > \"$2/told\"\n\
            while [ \"$(head -c 1 | wc -c)\" = 1 ]; do echo x >> \"$2/told\"; printf . >&0; done\n";
        let (directory, helper) = helper("lives", text);
        let (follower, news) = Follower::start(Some(helper)).unwrap();
        for _ in 0..100 {
            news.tell();
        }
        drop(news);
        drop(follower);
        let told = std::fs::read_to_string(directory.join("told")).unwrap();
        let lines: Vec<&str> = told.lines().collect();
        assert!((2..=101).contains(&lines.len()), "{told}");
        assert_eq!(lines[0], format!("--run-dir {} hook networks", directory.display()));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn nobody_waits_for_one_that_has_ended_or_was_never_there() {
        let (directory, helper) = helper("dead", "#!/bin/sh\n");
        let (follower, news) = Follower::start(Some(helper)).unwrap();
        news.tell();
        drop(news);
        drop(follower);
        std::fs::remove_dir_all(&directory).unwrap();
        let (_, news) = Follower::start(None).unwrap();
        news.tell();
    }
}
