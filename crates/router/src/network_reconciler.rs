//! Has the host's network follow when networks or declared vNICs have come or gone, whoever did it:
//! bridges, interfaces and the CDI files. One run follows all that has changed until it begins;
//! nobody waits for it but the router's end.
//!
//! A process of its own changes the host ([`freeflow_hostnet::reconciler`] says why), begun before
//! the router gives up its rights ([`crate::base::privileges::confine`]) and ended with it. The
//! thread here passes it notifications and answers its one question, what there is. It takes no
//! other word from it, and opens nothing.
//!
//! Thread: `ff-networks`, but for [`Notifier`], which the control thread has.
use crate::base::log::warning;
use crate::base::privileges::{self, ThreadKind};
use freeflow_hostnet::inventory::Inventory;
use freeflow_hostnet::reconciler::{Message, Reply, receive_reply, send};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Says that there is something to reconcile; the default notifies nobody.
#[derive(Clone, Default)]
pub struct Notifier(Option<SyncSender<()>>);

impl Notifier {
    pub fn notify(&self) {
        if let Some(sender) = &self.0 {
            // A notification that waits already stands for this one, too.
            let _ = sender.try_send(());
        }
    }
}

/// The process that changes the host's network: `freeflow-router --reconcile-networks`. It ends when its socket closes.
#[derive(Clone, Debug)]
pub struct ReconcilerProcess(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    socket: UnixStream,
    child: Mutex<Child>,
}

impl ReconcilerProcess {
    /// Runs this program once more. `command` is the `freeflow` command, which CDI files name as the hook.
    ///
    /// # Errors
    /// It can't be run.
    pub fn start(command: &Path, run_dir: &Path) -> io::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?);
        process.arg("--reconcile-networks").arg("--run-dir").arg(run_dir).arg("--command").arg(command);
        Self::spawn(process)
    }

    fn spawn(mut process: Command) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let child = process.stdin(Stdio::from(OwnedFd::from(theirs))).spawn()?;
        Ok(Self(Arc::new(Parts { socket, child: Mutex::new(child) })))
    }

    /// Returns when the process has ended.
    fn end(&self) {
        let _ = self.0.socket.shutdown(std::net::Shutdown::Both);
        if let Ok(mut child) = self.0.child.lock() {
            let _ = child.wait();
        }
    }
}

/// The thread; its end is waited for when this is dropped, after all [`Notifier`]s are.
#[derive(Default)]
pub struct NetworkReconciler(Option<JoinHandle<()>>);

impl NetworkReconciler {
    /// `ask` gives the inventory of this moment, or none once the router ends.
    ///
    /// # Errors
    /// No thread could be made.
    pub fn start(
        process: Option<ReconcilerProcess>,
        mut ask: impl FnMut() -> Option<Inventory> + Send + 'static,
    ) -> io::Result<(Self, Notifier)> {
        let Some(process) = process else { return Ok(Default::default()) };
        let (sender, receiver) = sync_channel(1);
        let body = move || {
            privileges::enter(ThreadKind::NetworkReconciler);
            serve(&receiver, &process.0.socket, &mut ask);
            process.end();
        };
        let thread = std::thread::Builder::new().name(ThreadKind::NetworkReconciler.name().into()).spawn(body)?;
        Ok((Self(Some(thread)), Notifier(Some(sender))))
    }
}

impl Drop for NetworkReconciler {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take()
            && thread.join().is_err()
        {
            warning!("the thread that has networks reconciled panicked");
        }
    }
}

/// Returns when there are no notifiers any more, or the router ends.
fn serve(receiver: &Receiver<()>, socket: &UnixStream, ask: &mut impl FnMut() -> Option<Inventory>) {
    let mut has_process_ended = false;
    while receiver.recv().is_ok() {
        if has_process_ended {
            continue;
        }
        match run(socket, ask) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                // The router has no right to begin another one.
                warning!("the network reconciler has ended; freeflow up does its work", error = error);
                has_process_ended = true;
            }
        }
    }
}

/// One run of the process. False: the router ends. Errors: the process has ended.
fn run(mut socket: &UnixStream, ask: &mut impl FnMut() -> Option<Inventory>) -> io::Result<bool> {
    send(&mut socket, &Message::Changed)?;
    while receive_reply(&mut socket)? == Reply::InventoryWanted {
        let Some(inventory) = ask() else { return Ok(false) };
        send(&mut socket, &Message::Inventory(inventory))?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_hostnet::reconciler::receive_message;
    use std::sync::mpsc::channel;

    /// A process' part until its socket closes: it asks, and is done. The number of its runs.
    fn follow(mut socket: UnixStream) -> usize {
        let mut runs = 0;
        while let Ok(Message::Changed) = receive_message(&mut socket) {
            send(&mut socket, &Reply::InventoryWanted).unwrap();
            match receive_message(&mut socket) {
                Ok(Message::Inventory(_)) => runs += 1,
                _ => break,
            }
            send(&mut socket, &Reply::Done).unwrap();
        }
        runs
    }

    #[test]
    fn one_run_follows_the_last_change() {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let process = std::thread::spawn(|| follow(theirs));
        let (sender, receiver) = sync_channel(1);
        let notifier = Notifier(Some(sender));
        let thread = std::thread::spawn(move || {
            let mut asked = 0;
            serve(&receiver, &socket, &mut || {
                asked += 1;
                Some(Inventory::default())
            });
            asked
        });
        for _ in 0..100 {
            notifier.notify();
        }
        drop(notifier);
        let asked = thread.join().unwrap();
        assert!((1..=100).contains(&asked));
        assert_eq!(process.join().unwrap(), asked);
    }

    #[test]
    fn a_router_that_ends_has_no_inventory_and_its_process_ends_with_it() {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let process = std::thread::spawn(|| follow(theirs));
        let (sender, receiver) = sync_channel(1);
        sender.send(()).unwrap();
        let (asked, was_asked) = channel();
        serve(&receiver, &socket, &mut || {
            asked.send(()).unwrap();
            None
        });
        assert_eq!(was_asked.try_iter().count(), 1);
        drop(socket);
        assert_eq!(process.join().unwrap(), 0);
    }

    #[test]
    fn nobody_waits_for_a_process_that_has_ended_or_was_never_there() {
        let process = ReconcilerProcess::spawn(Command::new("/bin/true")).unwrap();
        let (thread, notifier) = NetworkReconciler::start(Some(process), || None).unwrap();
        notifier.notify();
        drop(notifier);
        drop(thread);
        let (_, notifier) = NetworkReconciler::start(None, || None).unwrap();
        notifier.notify();
    }
}
