//! Near halves on threads of a process, which stand for those of another one: tests run routers on
//! them.
//!
//! The router makes a stream for each vNIC and sends one end here. A near half that a process of its
//! vNIC blocks is waited for by nobody, but counts: a vNIC has [`HALVES_OF_VNIC_MAX`] of these at
//! most, beyond which its streams end at once.
use crate::admission::account::Commons;
use crate::attachment::near;
use crate::base::log::warning;
use freeflow_shm::fd;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

/// Near halves of one vNIC whose threads have not ended.
pub const HALVES_OF_VNIC_MAX: usize = 4;

/// Longest name of a vNIC.
const NAME_BYTES_MAX: usize = 1024;

/// Where a router gets near halves. They end when the last of these is dropped.
#[derive(Clone, Debug)]
pub struct NearHalves(Arc<OwnedFd>);

impl NearHalves {
    /// Of threads of this process.
    ///
    /// # Errors
    /// No thread or descriptor is to be had.
    pub fn in_this_process() -> io::Result<Self> {
        let (socket, theirs) = fd::seqpacket_pair()?;
        // The router never waits for them.
        fd::set_nonblocking(&socket, true)?;
        let body = move || {
            let (commons, mut halves) = (Arc::new(Commons::of_process()), Halves::default());
            while halves.begin_next(&theirs, &commons) {}
        };
        std::thread::Builder::new().name("ff-near".into()).spawn(body)?;
        Ok(Self(Arc::new(socket)))
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

/// By the vNIC, what the threads of its near halves hold.
#[derive(Default)]
struct Halves(BTreeMap<String, Vec<Weak<()>>>);

impl Halves {
    /// Waits for a stream and begins its near half. False: the router has ended.
    fn begin_next(&mut self, socket: &OwnedFd, commons: &Arc<Commons>) -> bool {
        let mut buffer = [0; NAME_BYTES_MAX];
        match fd::receive_into(socket, &mut buffer, 1) {
            Ok((0, _)) | Err(_) => false,
            Ok((bytes, streams)) => {
                let vnic = String::from_utf8_lossy(&buffer[..bytes]).into_owned();
                if let Some(stream) = streams.into_iter().next()
                    && let Err(error) = self.begin(&vnic, stream, commons.clone())
                {
                    warning!("no near half for a vNIC", vnic = vnic, error = error);
                }
                true
            }
        }
    }

    fn begin(&mut self, vnic: &str, stream: OwnedFd, commons: Arc<Commons>) -> io::Result<()> {
        let is_alive = |half: &Weak<()>| half.strong_count() > 0;
        self.0.retain(|_, halves| halves.iter().any(is_alive));
        let halves = self.0.entry(vnic.to_owned()).or_default();
        halves.retain(is_alive);
        if halves.len() >= HALVES_OF_VNIC_MAX {
            return Err(io::Error::other("its processes block those that it had"));
        }
        let alive = Arc::new(());
        halves.push(Arc::downgrade(&alive));
        let vnic = vnic.to_owned();
        let body = move || {
            if let Err(error) = near::serve(stream, commons, alive) {
                warning!("the near half of a vNIC has ended", vnic = vnic, error = error);
            }
        };
        let thread = std::thread::Builder::new().name("ff-near".into()).stack_size(256 * 1024);
        thread.spawn(body).map(drop)
    }
}
