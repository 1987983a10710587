//! Control calls about data segments and the commands for them, and the freezing of this process's
//! threads.
//!
//! Moving pages needs unsafe code, which stands in the crate `remap`.
use crate::commands::PendingCommands;
use crate::lock;
use crate::session::{Session, exchange_bytes};
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_protocol::{FEATURE_BORROWED_SEGMENTS, encode};
use freeflow_shm::{OwnMapping, Undisturbed, monotonic_ns};
use freeflow_verbs::VerbsError;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The accesses to a process's memory that [`Session::with_threads_frozen`] keeps out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freeze {
    /// Those of the process's other threads.
    Threads,
    /// The router's accesses by address as well.
    ThreadsAndRouter,
}

impl Session {
    /// A new segment of at least `bytes`, for pages that registered memory is moved to.
    ///
    /// # Errors
    /// NotSupported: in a virtual machine such memory stays where it is.
    pub fn create_segment(&self, bytes: u64) -> Result<(Handle, u64, OwnedFd), VerbsError> {
        if self.is_in_guest {
            return Err(VerbsError::NotSupported);
        }
        self.segment_of(&Request::CreateSegment { length: bytes })
    }

    /// Another descriptor of a segment.
    pub fn reopen_segment(&self, segment: Handle) -> Result<OwnedFd, VerbsError> {
        self.segment_of(&Request::ReopenSegment { segment }).map(|(_, _, descriptor)| descriptor)
    }

    /// A segment that is the file which this process has mapped at these addresses. It has no
    /// descriptor.
    ///
    /// # Errors
    /// NotSupported: this memory is nothing that the router can map.
    pub fn borrow_segment(&self, addresses: &Range<u64>) -> Result<Handle, VerbsError> {
        if !self.speaks(FEATURE_BORROWED_SEGMENTS) {
            return Err(VerbsError::NotSupported);
        }
        let (address, length) = (addresses.start, addresses.end - addresses.start);
        match self.call(&Request::BorrowSegment { address, length })? {
            (Reply::Segment { segment, .. }, _) => Ok(segment),
            _ => Err(self.nonsense()),
        }
    }

    fn segment_of(&self, request: &Request) -> Result<(Handle, u64, OwnedFd), VerbsError> {
        let (reply, mut descriptors) = self.call(request)?;
        match (reply, descriptors.pop().map(OwnedFd::from)) {
            (Reply::Segment { segment, length }, Some(descriptor)) => Ok((segment, length, descriptor)),
            _ => Err(self.nonsense()),
        }
    }

    pub fn destroy_segment(&self, segment: Handle) -> Result<(), VerbsError> {
        self.destroy(&Request::DestroySegment { segment })
    }

    /// Reports to the router that pages of a segment are mapped at `addresses` too.
    pub fn map_part(&self, segment: Handle, offset: u64, addresses: Range<u64>) -> Result<(), VerbsError> {
        self.command(&Request::MapPart {
            segment,
            offset,
            address: addresses.start,
            length: addresses.end - addresses.start,
        })
    }

    /// On return the router uses no parts of segments in this range any more.
    pub fn unmap_part(&self, addresses: Range<u64>) -> Result<(), VerbsError> {
        self.destroy(&Request::UnmapPart { address: addresses.start, length: addresses.end - addresses.start })
    }

    /// Runs `body` while all threads of this process but the calling one, `thread`, are frozen. Its
    /// argument is the time when the router was asked, nanoseconds of CLOCK_MONOTONIC: a second
    /// later the threads run in any case.
    ///
    /// `body` must not allocate, and take no lock that another thread could hold. No control call
    /// of another thread is under way meanwhile.
    ///
    /// # Errors
    /// `body` did not run: the threads can't be frozen (NotPermitted, TimedOut), nor the router's
    /// accesses (Busy), or the router is gone (DeviceFatal).
    pub fn with_threads_frozen(
        &self,
        thread: u32,
        freeze: Freeze,
        body: &mut dyn FnMut(u64),
    ) -> Result<(), VerbsError> {
        let quiesce = freeze == Freeze::ThreadsAndRouter;
        self.live()?;
        let request = encode(&Request::FreezeThreads { thread, quiesce });
        let release = encode(&Request::ThawThreads);
        let undisturbed = Undisturbed::begin();
        let mut replies = lock(&self.control);
        let asked_ns = monotonic_ns();
        let frozen = match exchange_bytes(&self.socket, &mut replies, &request, &undisturbed) {
            Ok((Reply::Done, _)) => Ok(()),
            Ok((Reply::Failed(error), _)) => return Err(error),
            // Without an answer nobody knows whether they are frozen.
            _ => Err(VerbsError::DeviceFatal),
        };
        if frozen.is_ok() {
            body(asked_ns);
        }
        if frozen.is_err() || exchange_bytes(&self.socket, &mut replies, &release, &undisturbed).is_err() {
            self.mark_dead();
        }
        frozen
    }

    /// In memory that is never moved: the thread that carries them out counts them without a lock.
    pub fn pending_commands(&self) -> &Arc<OwnMapping<PendingCommands>> {
        &self.pending_commands
    }

    /// The read end of the pipe of commands, [`crate::COMMAND_BYTES`] each. From now on the router
    /// may grant this process's segments to peers, and counts on an answer to each command within
    /// [`crate::REVOCATION_TIME_MAX_MS`].
    ///
    /// # Errors
    /// NotSupported: nothing is granted here.
    pub fn open_commands(&self) -> Result<OwnedFd, VerbsError> {
        let (reply, mut descriptors) = self.call(&Request::OpenCommands)?;
        match (reply, descriptors.pop().map(OwnedFd::from)) {
            (Reply::Done, Some(pipe)) => Ok(pipe),
            _ => Err(self.nonsense()),
        }
    }

    /// Says that nothing of this segment is mapped in the process any more, but for the library's
    /// own use.
    pub fn confirm_revocation(&self, segment: Handle) -> Result<(), VerbsError> {
        self.command(&Request::ConfirmRevocation { segment })
    }
}
