//! `riomap`, `riounmap` and `riowrite`: memory of the program that the other end writes into
//! directly, by offsets.
use crate::ffi::{Outcome, errno, ibv_dereg_mr, ibv_reg_mr, not_null};
use crate::link::Link;
use crate::memory::{LOCAL_WRITE, REMOTE_WRITE};
use crate::pieces::Pieces;
use crate::socket::StreamSocket;
use crate::wait::Deadline;
use crate::wire::{IomapEntry, Target};
use freeflow_abi::ibv_mr;
use libc::{c_int, c_void, iovec, off_t};
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

const FIRST_TRANSFER_BYTES: usize = 2048;
const TRANSFER_BYTES_MAX: usize = 65536;

#[derive(Debug)]
struct Mapping {
    mr: *mut ibv_mr,
    address: u64,
    bytes: usize,
    offset: u64,
    /// The entry of the other end's map that lists it; none for a local one.
    index: Option<u16>,
    announced: bool,
}

/// The program's buffers that are registered for one connection.
#[derive(Debug, Default)]
pub struct Mappings(Vec<Mapping>);

// SAFETY: handles; verbs may be called from any thread.
unsafe impl Send for Mappings {}

impl Drop for Mappings {
    fn drop(&mut self) {
        for mapping in &self.0 {
            // SAFETY: ours, and never used again.
            unsafe { ibv_dereg_mr(mapping.mr) };
        }
    }
}

impl StreamSocket {
    fn mappings(&self) -> MutexGuard<'_, Mappings> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `riomap(3)`.
    ///
    /// # Errors
    /// EINVAL: not connected, or rights other than PROT_WRITE; ENOMEM: the other end's map is full;
    /// those of `ibv_reg_mr`.
    pub fn map(&self, buffer: *mut c_void, bytes: usize, protection: c_int, offset: off_t) -> Outcome<off_t> {
        // A link accepted a moment ago may not be connected yet: there is no other call to wait
        // with.
        let link = self.ready_link(false, self.send_deadline()).map_err(|_| libc::EINVAL)?;
        if protection & !libc::PROT_WRITE != 0 || u32::try_from(bytes).is_err() {
            return Err(libc::EINVAL);
        }
        let mut mappings = self.mappings();
        let (mut access, mut index) = (LOCAL_WRITE, None);
        if protection & libc::PROT_WRITE != 0 {
            let count = link.lock().stream.remote_iomap_count();
            let free =
                (0..count).map(|index| index as u16).find(|free| mappings.0.iter().all(|m| m.index != Some(*free)));
            index = Some(free.ok_or(libc::ENOMEM)?);
            access |= REMOTE_WRITE;
        }
        // SAFETY: the queue pair of a connected identifier has a PD; what the buffer is, is the
        // program's promise.
        let mr = unsafe { ibv_reg_mr((*(*self.id.raw()).qp).pd, buffer, bytes, access) };
        let mr = not_null(mr).map_err(|_| errno())?;
        let offset = if offset == -1 { buffer as off_t } else { offset };
        let announced = index.is_none();
        mappings.0.push(Mapping { mr, address: buffer as u64, bytes, offset: offset as u64, index, announced });
        if !announced {
            self.mappings_wait.store(true, Ordering::Relaxed);
        }
        Ok(offset)
    }

    /// `riounmap(3)`.
    ///
    /// # Errors
    /// EINVAL: no such mapping.
    pub fn unmap(&self, buffer: *mut c_void, bytes: usize) -> Outcome<()> {
        let mut mappings = self.mappings();
        let same = |mapping: &Mapping| mapping.address == buffer as u64 && mapping.bytes == bytes;
        let found = mappings.0.iter().position(same).ok_or(libc::EINVAL)?;
        let mapping = mappings.0.remove(found);
        // SAFETY: ours; the other end's writes fail from now on.
        unsafe { ibv_dereg_mr(mapping.mr) };
        Ok(())
    }

    /// Announces new mappings to the other end, before the data that may speak of them. The caller
    /// is the sender.
    pub(crate) fn announce_mappings(&self, link: &Link, nonblocking: bool, deadline: Deadline) -> Outcome<()> {
        if !self.mappings_wait.load(Ordering::Relaxed) {
            return Ok(());
        }
        loop {
            let mappings = self.mappings();
            let Some(next) = mappings.0.iter().find(|mapping| !mapping.announced) else {
                self.mappings_wait.store(false, Ordering::Relaxed);
                return Ok(());
            };
            let Some(index) = next.index else { return Ok(()) };
            // SAFETY: registered.
            let key = unsafe { (*next.mr).rkey };
            let target = Target { address: next.address, key, bytes: next.bytes as u32 };
            let entry = IomapEntry { offset: next.offset, target };
            drop(mappings);
            let write = self.plan(link, nonblocking, deadline, |stream, _| stream.plan_iomap(index))?;
            let mut memory = entry.to_memory(link.lock().stream.order());
            let piece = [iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() }];
            // SAFETY: an array that outlives the call.
            self.carry_out(link, &write, &mut unsafe { Pieces::new(&piece) })?;
            if let Some(mapping) = self.mappings().0.iter_mut().find(|mapping| mapping.index == Some(index)) {
                mapping.announced = true;
            }
        }
    }

    /// `riowrite(3)`: how many bytes were written; fewer if no mapping of the other end reaches
    /// further.
    ///
    /// # Errors
    /// As of `send`. Only if nothing was written.
    pub fn write_mapped(&self, mut pieces: Pieces<'_>, offset: off_t, flags: c_int) -> Outcome<usize> {
        let total = pieces.bytes().ok_or(libc::EINVAL)?;
        let nonblocking = flags & libc::MSG_DONTWAIT != 0 || self.is_nonblocking();
        let deadline = self.send_deadline();
        let link = self.ready_link(nonblocking, deadline)?;
        let _sender = self.send_lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.announce_mappings(link, nonblocking, deadline)?;
        // A message that arrived may have named a mapping: it stands in memory only then.
        link.turn(&mut link.lock());
        let (mut done, mut chunk) = (0, FIRST_TRANSFER_BYTES);
        while done < total {
            let at = (offset as u64).wrapping_add(done as u64);
            let count = link.lock().stream.sizes().iomap_count;
            let entries = (0..count).map(|index| link.lists.iomap_entry(index));
            let Some(entry) = entries.into_iter().find(|entry| entry.bytes_from(at).is_some()) else { break };
            let wanted = (total - done).min(chunk) as u32;
            let planned = self.plan(link, nonblocking, deadline, |stream, _| stream.plan_direct(wanted, &entry, at));
            let outcome = planned.and_then(|write| self.carry_out(link, &write, &mut pieces).map(|()| write.bytes));
            match outcome {
                Ok(bytes) => done += bytes as usize,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
            chunk = (chunk * 2).min(TRANSFER_BYTES_MAX);
        }
        Ok(done)
    }
}
