//! Which descriptors are rsockets.
use crate::datagram::DatagramSocket;
use crate::socket::StreamSocket;
use crate::wait::{PerProcess, fork_count};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

#[derive(Clone, Debug)]
pub enum Socket {
    Stream(Arc<StreamSocket>),
    Datagram(Arc<DatagramSocket>),
}

impl Socket {
    #[must_use]
    pub fn fd(&self) -> i32 {
        match self {
            Self::Stream(socket) => socket.fd,
            Self::Datagram(socket) => socket.fd(),
        }
    }

    /// Whether it was made by this process: a thread may still have one at hand that is a parent's.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        let forks = match self {
            Self::Stream(socket) => socket.forks,
            Self::Datagram(socket) => socket.forks,
        };
        forks == fork_count()
    }
}

/// Behind a lock that only this process' threads hold: see `PerProcess`.
static TABLE: PerProcess<RwLock<Vec<Option<Socket>>>> = PerProcess::new();

fn read<T>(look: impl FnOnce(&[Option<Socket>]) -> T) -> T {
    look(&TABLE.get().read().unwrap_or_else(PoisonError::into_inner))
}

/// The owner of each number: the fork count of the process that made the rsocket plus one, 0: none. Without a
/// lock, for children: they ask whether it is a parent's.
static MADE_BY: [AtomicU32; MADE_BY_COUNT] = [const { AtomicU32::new(0) }; MADE_BY_COUNT];
/// A parent's rsockets from here on are unknown to a child: EBADF.
const MADE_BY_COUNT: usize = 65536;

/// Whether the descriptor is an rsocket that a parent of this process made.
pub fn is_inherited(fd: i32) -> bool {
    let made_by = usize::try_from(fd).ok().and_then(|index| MADE_BY.get(index));
    made_by.map(|count| count.load(Ordering::Relaxed)).is_some_and(|count| count != 0 && count != fork_count() + 1)
}

/// The child lets go of what its parent made. Whether it was that.
pub fn forget_inherited(fd: i32) -> bool {
    let inherited = is_inherited(fd);
    if inherited {
        note(fd, 0);
    }
    inherited
}

fn note(fd: i32, count: u32) {
    if let Some(made_by) = usize::try_from(fd).ok().and_then(|index| MADE_BY.get(index)) {
        made_by.store(count, Ordering::Relaxed);
    }
}

pub fn insert(socket: Socket) {
    let fd = socket.fd();
    let Ok(index) = usize::try_from(fd) else { return };
    let mut table = TABLE.get().write().unwrap_or_else(PoisonError::into_inner);
    if table.len() <= index {
        table.resize(index + 1, None);
    }
    table[index] = Some(socket);
    note(fd, fork_count() + 1);
}

#[inline]
pub fn get(fd: i32) -> Option<Socket> {
    let index = usize::try_from(fd).ok()?;
    read(|table| table.get(index)?.clone())
}

pub fn stream(fd: i32) -> Option<Arc<StreamSocket>> {
    match get(fd)? {
        Socket::Stream(socket) => Some(socket),
        Socket::Datagram(_) => None,
    }
}

pub fn remove(fd: i32) -> Option<Socket> {
    let index = usize::try_from(fd).ok()?;
    let socket = TABLE.get().write().unwrap_or_else(PoisonError::into_inner).get_mut(index)?.take();
    if socket.is_some() {
        note(fd, 0);
    }
    socket
}

/// For a test: a fork while another thread is within.
#[cfg(test)]
pub fn hold<T>(call: impl FnOnce() -> T) -> T {
    read(|_| call())
}
