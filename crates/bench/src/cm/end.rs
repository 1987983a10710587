//! One end of a connection or a stream: a process of its own in a container.
use super::streams::Kind;
use super::{connections, streams};
use crate::limits::end::EndFigures;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::SocketAddrV4;

/// One end's task: a process of its own in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    Listen { port: u16, count: usize, batch: usize, greets: bool },
    Connect { to: SocketAddrV4, count: usize, batch: usize },
    FirstByte { to: SocketAddrV4, count: usize },
    Echo { kind: Kind, port: u16, bytes: usize },
    Ping { kind: Kind, to: SocketAddrV4, bytes: usize, duration_ms: u64 },
    Sink { kind: Kind, port: u16 },
    Source { kind: Kind, to: SocketAddrV4, bytes: usize, duration_ms: u64 },
}

impl End {
    /// # Errors
    /// The libraries' or the kernel's error.
    pub fn run(self) -> io::Result<EndFigures> {
        match self {
            Self::Listen { port, count, batch, greets } => connections::listen(port, count, batch, greets),
            Self::Connect { to, count, batch } => connections::connect(to, count, batch),
            Self::FirstByte { to, count } => connections::first_byte(to, count),
            Self::Echo { kind, port, bytes } => streams::echo(kind, port, bytes),
            Self::Ping { kind, to, bytes, duration_ms } => streams::ping(kind, to, bytes, duration_ms),
            Self::Sink { kind, port } => streams::sink(kind, port),
            Self::Source { kind, to, bytes, duration_ms } => streams::source(kind, to, bytes, duration_ms),
        }
    }
}
