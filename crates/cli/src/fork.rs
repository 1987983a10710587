//! Work in a forked child, which may change its namespaces without changing ours.

use crate::failure::{Context, Failure, Result};
use crate::sys::{self, Fork};
use rustix::process::WaitOptions;
use std::fs::File;
use std::io::{Read, Write};

/// Runs a function in a forked child, whose namespaces it may change.
pub fn in_child(act: impl FnOnce() -> Result<()>) -> Result<()> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).context("pipe")?;
    match sys::fork().context("fork")? {
        Fork::Child => {
            drop(reader);
            let code = match act() {
                Ok(()) => 0,
                Err(failure) => {
                    let _ = File::from(writer).write_all(failure.to_string().as_bytes());
                    1
                }
            };
            sys::exit_now(code)
        }
        Fork::Parent(child) => {
            drop(writer);
            let mut message = String::new();
            File::from(reader).read_to_string(&mut message).context("a forked helper")?;
            let status = rustix::process::waitpid(Some(child), WaitOptions::empty()).context("waitpid")?;
            match status {
                Some((_, status)) if status.exit_status() == Some(0) => Ok(()),
                _ if message.is_empty() => Err(Failure::new("a forked helper died")),
                _ => Err(Failure::new(message)),
            }
        }
    }
}
