//! The network reconciler: deletes interfaces and bridges that no vNIC or network needs any more,
//! and rewrites the CDI files.
//!
//! The command does it after a change that it has asked for ([`reconcile`]). For changes by others
//! the router has a process of its own that does it ([`serve`]): it keeps CAP_NET_ADMIN, which no
//! thread of the router has, it executes `iptables`, which no filter of the router's system calls
//! lets pass, and it parses nothing of tenants'. A thread of the router could have neither without
//! giving the other threads, with which it shares its memory, the way to both.
//!
//! The two speak over a socket pair, in [`Message`] and [`Reply`]: the router says that something
//! has changed, the reconciler asks for the inventory when it holds the lock and has listed the
//! interfaces, and says when it is done.

use crate::bridges::{lock, remove_others, sweep};
use crate::cdi::{self, Devices};
use crate::error::{Context, Error, Result};
use crate::inventory::Inventory;
use crate::ports;
use crate::run_dir::RunDir;
use freeflow_shm::{limit_capabilities, limit_programs};
use rustix::thread::CapabilitySet;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Longest inventory, bytes: a hundred for each of the vNICs that a host may have take a fortieth.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
const REPLY_BYTES_MAX: usize = 16;
/// The kernel keeps 15 characters of a name.
const PROCESS_NAME: &std::ffi::CStr = c"ff-reconciler";

/// Capabilities of the process: change interfaces (NET_RAW is for `iptables`, which opens a raw
/// socket where it is the one of old) and, where an operator has chosen a directory of somebody
/// else's, write the CDI files.
const CAPABILITIES: CapabilitySet =
    CapabilitySet::NET_ADMIN.union(CapabilitySet::NET_RAW).union(CapabilitySet::DAC_OVERRIDE);

/// From the router.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// Networks or declared vNICs have come or gone.
    Changed,
    /// The answer to [`Reply::InventoryWanted`].
    Inventory(Inventory),
}

/// From the reconciler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// It has listed the interfaces and holds the lock.
    InventoryWanted,
    /// It has done, or failed to do, what follows from the last [`Message::Changed`].
    Done,
}

/// # Errors
/// The other end is closed.
pub fn send(socket: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let bytes = postcard::to_allocvec(message).map_err(io::Error::other)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    socket.write_all(&[&length.to_le_bytes()[..], &bytes].concat())
}

fn receive<M: DeserializeOwned>(socket: &mut impl Read, bytes_max: usize) -> io::Result<M> {
    let mut length = [0; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > bytes_max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is longer than its limit"));
    }
    let mut bytes = vec![0; length];
    socket.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// # Errors
/// The router has ended, or sends what is no message.
pub fn receive_message(socket: &mut impl Read) -> io::Result<Message> {
    receive(socket, MESSAGE_BYTES_MAX)
}

/// # Errors
/// The reconciler has ended, or sends what is no reply.
pub fn receive_reply(socket: &mut impl Read) -> io::Result<Reply> {
    receive(socket, REPLY_BYTES_MAX)
}

/// Deletes interfaces and bridges that nobody needs, and writes the CDI files if this host has some.
/// Those are the calling thread's network namespace and the run directory's own. `program` is the `freeflow` command.
///
/// # Errors
/// The inventory can't be had, or the kernel refuses.
pub fn reconcile(run_dir: &RunDir, program: &Path, inventory: impl FnOnce() -> Result<Inventory>) -> Result<()> {
    let _lock = lock(run_dir)?;
    let ports = ports::list(run_dir)?;
    let inventory = inventory()?;
    sweep(ports, &inventory.vnics, &inventory.networks);
    remove_others(run_dir, &inventory.networks)?;
    if let Some(file) = run_dir.settings().and_then(|settings| settings.cdi_file) {
        cdi::write(run_dir, program, file.parent(), &Devices::from(&inventory))?;
    }
    Ok(())
}

/// A failure of [`reconcile`], as people read it.
pub fn explain(error: &impl std::fmt::Display) -> String {
    format!("done, but what follows from it on this host is left to freeflow up: {error}")
}

/// Begins as the router's reconciler, before anything else of the process: it keeps the rights that
/// it needs and no more.
///
/// # Errors
/// The rights can't be given up.
pub fn confine() -> Result<()> {
    // The kernel spares the router, not what it has begun.
    let _ = std::fs::write("/proc/self/oom_score_adj", "0");
    // Nothing depends on what `ps` calls it.
    let _ = rustix::thread::set_name(PROCESS_NAME);
    if let Err(error) = limit_programs(CAPABILITIES) {
        eprintln!("freeflow-router: can't limit what programs may do that reconcile networks: {error}");
    }
    limit_capabilities(CAPABILITIES, CAPABILITIES).context("capabilities")
}

/// Reconciles at each [`Message::Changed`]; returns when the router has ended.
pub fn serve(mut socket: UnixStream, run_dir: &RunDir, program: &Path) {
    while let Ok(message) = receive_message(&mut socket) {
        let Message::Changed = message else { break };
        let mut has_router_ended = false;
        let mut ask = || -> Result<Inventory> {
            let answer = send(&mut socket, &Reply::InventoryWanted).and_then(|()| receive_message(&mut socket));
            match answer {
                Ok(Message::Inventory(inventory)) => Ok(inventory),
                _ => {
                    has_router_ended = true;
                    Err(Error::new("the router has ended"))
                }
            }
        };
        // No panic ends the process: the router could not begin another one.
        let done = catch_unwind(AssertUnwindSafe(|| reconcile(run_dir, program, &mut ask)));
        if has_router_ended {
            break;
        }
        match done {
            Ok(Ok(())) => {}
            Ok(Err(error)) => eprintln!("freeflow: {}", explain(&error)),
            Err(_) => eprintln!("freeflow: {}", explain(&"a panic, above")),
        }
        if send(&mut socket, &Reply::Done).is_err() {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Vnic;

    #[test]
    fn messages_come_through_whole_and_their_length_is_bounded() {
        let vnic = Vnic { id: "web".into(), network: "red".into(), is_declared: true };
        let mut bytes = Vec::new();
        send(&mut bytes, &Message::Inventory(Inventory { networks: Vec::new(), vnics: vec![vnic.clone()] })).unwrap();
        send(&mut bytes, &Message::Changed).unwrap();
        let mut reader = &bytes[..];
        let Message::Inventory(inventory) = receive_message(&mut reader).unwrap() else { panic!("no inventory") };
        assert_eq!(inventory.vnics, [vnic]);
        assert!(matches!(receive_message(&mut reader), Ok(Message::Changed)));
        assert!(receive_message(&mut reader).is_err(), "an end");

        let mut long: &[u8] = &[17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(receive_reply(&mut long).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let mut unknown: &[u8] = &[1, 0, 0, 0, 9];
        assert_eq!(receive_reply(&mut unknown).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_reconciler_ends_with_its_router() {
        let (mut router, own) = UnixStream::pair().unwrap();
        let directory = std::env::temp_dir().join(format!("ff-reconciler-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let run_dir = RunDir::new(&directory).unwrap();
        let thread = std::thread::spawn(move || serve(own, &run_dir, Path::new("/bin/true")));
        send(&mut router, &Message::Changed).unwrap();
        assert_eq!(receive_reply(&mut router).unwrap(), Reply::InventoryWanted);
        drop(router);
        thread.join().unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn it_asks_once_for_each_change_and_says_when_it_is_done() {
        let (mut router, own) = UnixStream::pair().unwrap();
        let directory = std::env::temp_dir().join(format!("ff-reconciler-twice-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let run_dir = RunDir::new(&directory).unwrap();
        let thread = std::thread::spawn(move || serve(own, &run_dir, Path::new("/bin/true")));
        for _ in 0..2 {
            send(&mut router, &Message::Changed).unwrap();
            assert_eq!(receive_reply(&mut router).unwrap(), Reply::InventoryWanted);
            send(&mut router, &Message::Inventory(Inventory::default())).unwrap();
            assert_eq!(receive_reply(&mut router).unwrap(), Reply::Done);
        }
        drop(router);
        thread.join().unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
