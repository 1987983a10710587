//! Near halves of a router's vNICs, in another process: `freeflow-router --near-halves`. (In tests
//! of this crate they are threads of the router's own process.)
//!
//! The router makes a stream for each vNIC and sends one end there, with the vNIC's name. A near half
//! that a process of its vNIC blocks is waited for by nobody, but counts: a vNIC has
//! [`HALVES_OF_VNIC_MAX`] of these at most, beyond which its streams end at once.
//!
//! The process ends when the router does, also by SIGKILL: its socket closes. If it ends before, all
//! streams end, and connections are refused until the router is started again.
use crate::admission::account::{Account, Commons};
use crate::attachment::near;
use crate::base::log::{Lines, info, warning};
use crate::base::privileges::{self, ThreadKind};
use freeflow_shm::{Segment, fd, monotonic_ns};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::{Arc, Weak};

/// Near halves of one vNIC whose threads have not ended.
pub const HALVES_OF_VNIC_MAX: usize = 4;

/// Longest name of a vNIC.
const NAME_BYTES_MAX: usize = 1024;

/// Where a router gets near halves. They end when the last of these is dropped.
#[derive(Clone, Debug)]
pub struct NearHalves(Arc<OwnedFd>);

impl NearHalves {
    /// Of another process: runs this program once more. (It is nobody's to wait for; its end closes the socket.)
    ///
    /// # Errors
    /// It can't be run.
    pub fn start_process() -> io::Result<Self> {
        let (socket, theirs) = Self::sockets()?;
        Command::new(std::env::current_exe()?).arg("--near-halves").stdin(Stdio::from(theirs)).spawn()?;
        Ok(socket)
    }

    /// Of threads of this process.
    ///
    /// # Errors
    /// No thread or descriptor is to be had.
    pub fn in_this_process() -> io::Result<Self> {
        let (socket, theirs) = Self::sockets()?;
        let body = move || {
            let mut service = NearHalfService::new(theirs);
            while service.begin_next() {}
        };
        std::thread::Builder::new().name(ThreadKind::NearHalves.name().into()).spawn(body)?;
        Ok(socket)
    }

    fn sockets() -> io::Result<(Self, OwnedFd)> {
        let (socket, theirs) = fd::seqpacket_pair()?;
        // The router never waits for them.
        fd::set_nonblocking(&socket, true)?;
        Ok((Self(Arc::new(socket)), theirs))
    }

    /// The router's end of a new stream.
    ///
    /// # Errors
    /// No descriptor is to be had, or the process has ended.
    pub(crate) fn open(&self, vnic: &str) -> io::Result<OwnedFd> {
        let (stream, theirs) = fd::seqpacket_pair()?;
        fd::send_message(&*self.0, vnic.as_bytes(), &[theirs.as_fd()])?;
        Ok(stream)
    }
}

/// A near half of this process, for the agent of a virtual machine: the router's end of its stream. It ends with that.
///
/// # Errors
/// No thread or descriptor is to be had.
pub fn begin_near_half(staging: Segment) -> io::Result<OwnedFd> {
    let (stream, theirs) = fd::seqpacket_pair()?;
    let account = Arc::new(Account::new(Arc::new(Commons::of_process())));
    let body = move || {
        if let Err(error) = near::serve(theirs, account, Arc::new(()), Some(staging)) {
            warning!("the near half has ended", error = error);
        }
    };
    let thread = std::thread::Builder::new().name(ThreadKind::Near.name().into()).stack_size(256 * 1024);
    thread.spawn(body)?;
    Ok(stream)
}

/// The other end: begins a near half for each stream that comes.
pub struct NearHalfService {
    socket: OwnedFd,
    commons: Arc<Commons>,
    halves: Halves,
    lines: Lines,
}

impl AsFd for NearHalfService {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl NearHalfService {
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, commons: Arc::new(Commons::of_process()), halves: Halves::default(), lines: Lines::default() }
    }

    /// Waits for a stream and begins its near half. False: the router has ended.
    pub fn begin_next(&mut self) -> bool {
        let mut buffer = [0; NAME_BYTES_MAX];
        match fd::receive_into(&self.socket, &mut buffer, 1) {
            Ok((0, _)) => false,
            // The stream was lost for want of a descriptor: it has closed, which the router sees.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                if self.may_log() {
                    warning!("the stream of a vNIC is lost", error = error);
                }
                true
            }
            Err(error) => {
                warning!("the router's socket fails", error = error);
                false
            }
            Ok((bytes, streams)) => {
                let vnic = String::from_utf8_lossy(&buffer[..bytes]).into_owned();
                if let Some(stream) = streams.into_iter().next()
                    && let Err(error) = self.halves.begin(&vnic, stream, &self.commons)
                    && self.may_log()
                {
                    warning!("no near half for a vNIC", vnic = vnic, error = error);
                }
                true
            }
        }
    }

    /// Whether one more line may be logged of what vNICs' processes do as often as they like.
    fn may_log(&mut self) -> bool {
        let Some(left_out) = self.lines.take(monotonic_ns()) else { return false };
        if left_out > 0 {
            info!("lines left out", count = left_out);
        }
        true
    }
}

/// Near halves of one vNIC.
struct VnicHalves {
    /// Of all of them: one that is blocked goes on counting.
    account: Arc<Account>,
    /// A weak reference to the count that the threads of each hold.
    alive: Vec<Weak<()>>,
}

/// Near halves by their vNIC.
#[derive(Default)]
struct Halves(BTreeMap<String, VnicHalves>);

impl Halves {
    fn begin(&mut self, vnic: &str, stream: OwnedFd, commons: &Arc<Commons>) -> io::Result<()> {
        for halves in self.0.values_mut() {
            halves.alive.retain(|half| half.strong_count() > 0);
        }
        self.0.retain(|_, halves| !halves.alive.is_empty());
        let new = || VnicHalves { account: Arc::new(Account::new(commons.clone())), alive: Vec::new() };
        let halves = self.0.entry(vnic.to_owned()).or_insert_with(new);
        if halves.alive.len() >= HALVES_OF_VNIC_MAX {
            return Err(io::Error::other("its processes block those that it had"));
        }
        let alive = Arc::new(());
        halves.alive.push(Arc::downgrade(&alive));
        let (vnic, account) = (vnic.to_owned(), halves.account.clone());
        let body = move || {
            privileges::enter(ThreadKind::Near);
            if let Err(error) = near::serve(stream, account, alive, None) {
                warning!("the near half of a vNIC has ended", vnic = vnic, error = error);
            }
        };
        let thread = std::thread::Builder::new().name(ThreadKind::Near.name().into()).stack_size(256 * 1024);
        thread.spawn(body).map(drop)
    }
}
