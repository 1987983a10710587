//! Has the command follow when networks have come or gone, or vNICs were deleted, whoever did it: bridges, interfaces and the CDI file
//! are its business. One run follows all that has changed until it begins; nobody waits for it but the router's end.
use crate::log::warning;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
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

/// The thread; its end is waited for when this is dropped, after all [`News`] are.
#[derive(Default)]
pub struct Follower(Option<JoinHandle<()>>);

impl Follower {
    /// Errors: no thread could be made.
    pub fn start(program: Option<&Path>, run_dir: &Path) -> io::Result<(Self, News)> {
        let Some(program) = program else { return Ok(Default::default()) };
        let (sender, receiver) = sync_channel(1);
        let (program, run_dir) = (program.to_owned(), run_dir.to_owned());
        let body = move || follow(&receiver, &program, &run_dir);
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

fn follow(receiver: &Receiver<()>, program: &PathBuf, run_dir: &Path) {
    while receiver.recv().is_ok() {
        let mut command = Command::new(program);
        command.arg("--run-dir").arg(run_dir).args(["hook", "networks"]).stdin(Stdio::null());
        match command.status() {
            Ok(status) if status.success() => {}
            Ok(status) => warning!("networks have changed, and the command did not follow", status = status),
            Err(error) => warning!("can't run the command", program = program.display(), error = error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_command_is_run_after_the_last_change() {
        let directory = std::env::temp_dir().join(format!("ff-follower-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let program = directory.join("follow");
        std::fs::write(&program, "#!/bin/sh\necho \"$@\" >> \"$2/told\"\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let (follower, news) = Follower::start(Some(&program), &directory).unwrap();
        for _ in 0..100 {
            news.tell();
        }
        drop(news);
        drop(follower);
        let told = std::fs::read_to_string(directory.join("told")).unwrap();
        let lines: Vec<&str> = told.lines().collect();
        assert!((1..=100).contains(&lines.len()), "{told}");
        assert_eq!(lines[0], format!("--run-dir {} hook networks", directory.display()));
        std::fs::remove_dir_all(&directory).unwrap();
        // Nobody follows.
        let (_, news) = Follower::start(None, Path::new("/")).unwrap();
        news.tell();
    }
}
