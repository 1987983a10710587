//! The end that Kubernetes asks for: SIGTERM, which the first process of a container hears only if it asks for it.
use freeflow_shm::termination_signals;
use rustix::event::{PollFd, PollFlags, poll};
use tokio::sync::oneshot;

/// Has a value when SIGTERM or SIGINT has come, for which a thread waits. Before any other thread begins.
///
/// # Errors
/// The signals can't be waited for.
pub fn termination() -> std::io::Result<oneshot::Receiver<()>> {
    let signals = termination_signals()?;
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut waited = [PollFd::new(&signals, PollFlags::IN)];
        while poll(&mut waited, None).is_err_and(|errno| errno == rustix::io::Errno::INTR) {}
        let _ = sender.send(());
    })?;
    Ok(receiver)
}
