//! Device memory: host memory stands in, a shared segment of its own for each allocation.
//!
//! The router reaches it without a copy more, as it does `ibv_malloc`'s. A child of `fork` shares
//! the memory with its parent; a process that imports it maps the same segment.
use crate::context::Context;
use crate::lock;
use crate::passed::Passed;
use crate::session::Session;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::{Segment, Undisturbed};
use freeflow_verbs::VerbsError;
use std::fmt;
use std::sync::Arc;

/// Offsets and lengths of copies are multiples of this, as on NICs that have such memory. Bytes.
const GRAIN_BYTES: usize = 4;

/// A piece of device memory.
pub struct DeviceMemory {
    session: Arc<Session>,
    handle: Handle,
    memory: Segment,
    length: usize,
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory")
            .field("handle", &self.handle)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

impl DeviceMemory {
    /// Allocates `length` bytes, which are zero and begin on a page.
    ///
    /// # Errors
    /// InvalidArgument: no bytes, or more than the device has. NoMemory: no more is left, or
    /// another limit of the vNIC is reached.
    pub fn allocate(context: &Context, length: usize) -> Result<Self, VerbsError> {
        // A child of `fork` allocates in a session of its own.
        let session = if context.session().left_behind() {
            Session::current().map_err(|_| VerbsError::DeviceFatal)?
        } else {
            context.session().clone()
        };
        let limit = session.device().device_memory_bytes_max;
        if length == 0 || length as u64 > limit {
            return Err(VerbsError::InvalidArgument);
        }
        let _undisturbed = Undisturbed::begin();
        lock(&session.owned_objects).reserve_device_memory(length as u64, limit)?;
        let answer = session.call(&Request::CreateSegment { length: length as u64 });
        let made = answer.and_then(|answer| Self::map(&session, answer, Some(length)));
        let owner = Arc::ptr_eq(&session, context.session()).then(|| context.handle());
        let mut owned_objects = lock(&session.owned_objects);
        match &made {
            Ok(made) => owned_objects.note_device_memory(made.handle, owner, length as u64),
            Err(_) => owned_objects.unreserve_device_memory(length as u64),
        }
        drop(owned_objects);
        made
    }

    /// Memory of the process that the context was imported from.
    ///
    /// # Errors
    /// NotFound: that process has no such memory, or `context` is not imported.
    pub fn import(context: &Context, handle: Handle) -> Result<Self, VerbsError> {
        let session = context.session();
        let answer = session.call(&Request::ImportSegment { context: context.handle(), segment: handle })?;
        Self::map(session, answer, None)
    }

    fn map(session: &Arc<Session>, answer: (Reply, Vec<Passed>), length: Option<usize>) -> Result<Self, VerbsError> {
        let (Reply::Segment { segment: handle, length: granted }, descriptors) = answer else {
            return Err(session.nonsense());
        };
        let ([memory], Ok(granted)) = (&descriptors[..], usize::try_from(granted)) else {
            return Err(session.nonsense());
        };
        let length = length.unwrap_or(granted);
        if granted < length {
            return Err(session.nonsense());
        }
        let mapped = memory.map(granted).map_err(|_| VerbsError::NoMemory).and_then(|memory| {
            session.command(&Request::MapSegment { segment: handle, address: memory.address() as u64 })?;
            Ok(memory)
        });
        match mapped {
            Ok(memory) => Ok(Self { session: session.clone(), handle, memory, length }),
            Err(error) => {
                let _ = session.destroy(&Request::DestroySegment { segment: handle });
                Err(error)
            }
        }
    }

    /// Gives it back. What was imported is only given up.
    ///
    /// # Errors
    /// Busy: a memory region lies over it.
    pub fn free(&self) -> Result<(), VerbsError> {
        self.session.destroy(&Request::DestroySegment { segment: self.handle })
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// Bytes that were asked for; of imported memory, its whole pages.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Where `length` bytes from `offset` on lie in this process.
    ///
    /// # Errors
    /// InvalidArgument: they are not all inside.
    pub fn place(&self, offset: u64, length: usize) -> Result<u64, VerbsError> {
        self.check(offset, length).map_err(|_| VerbsError::InvalidArgument)?;
        Ok(self.memory.address() as u64 + offset)
    }

    fn check(&self, offset: u64, length: usize) -> Result<usize, VerbsError> {
        let offset = usize::try_from(offset).map_err(|_| VerbsError::BadAddress)?;
        let end = offset.checked_add(length).ok_or(VerbsError::BadAddress)?;
        if end > self.length { Err(VerbsError::BadAddress) } else { Ok(offset) }
    }

    /// # Errors
    /// BadAddress: not inside. InvalidArgument: offset or length is no multiple of four.
    pub fn check_copy(&self, offset: u64, length: usize) -> Result<usize, VerbsError> {
        let offset = self.check(offset, length)?;
        if offset.is_multiple_of(GRAIN_BYTES) && length.is_multiple_of(GRAIN_BYTES) {
            Ok(offset)
        } else {
            Err(VerbsError::InvalidArgument)
        }
    }

    /// # Errors
    /// As [`Self::check_copy`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), VerbsError> {
        let offset = self.check_copy(offset, from.len())?;
        self.memory.write(offset, from, true).map_err(|_| VerbsError::BadAddress)
    }

    /// # Errors
    /// As [`Self::check_copy`].
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), VerbsError> {
        let offset = self.check_copy(offset, into.len())?;
        self.memory.read(offset, into).map_err(|_| VerbsError::BadAddress)
    }
}
