//! Pipes: the sockets by which the router sends a channel's events, one for each device that the channel's
//! identifiers are on.
use crate::boundary::Outcome;
use crate::call::{call, command};
use crate::device::Device;
use freeflow_protocol::cm::{CmReply, CmRequest};
use freeflow_protocol::library::Handle;
use std::os::fd::{IntoRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

pub(crate) struct Pipe {
    pub device: Arc<Device>,
    /// The router's name of the channel.
    pub handle: Handle,
    /// -1 once it is closed.
    descriptor: AtomicI32,
    has_ended: AtomicBool,
}

impl Pipe {
    pub fn create(device: Arc<Device>) -> Outcome<Arc<Self>> {
        // SAFETY: a device's context is open as long as it is there.
        let answer = unsafe { call(device.context(), CmRequest::CreateChannel)? };
        let (Some(CmReply::Channel { channel: handle }), Some(descriptor)) = answer else {
            return Err(libc::EIO);
        };
        Ok(Arc::new(Self {
            device,
            handle,
            descriptor: AtomicI32::new(descriptor.into_raw_fd()),
            has_ended: AtomicBool::new(false),
        }))
    }

    /// -1 once it is closed.
    pub fn descriptor(&self) -> RawFd {
        // Acquire: pairs with the swap in `close`.
        self.descriptor.load(Ordering::Acquire)
    }

    /// Neither closed nor ended.
    pub fn is_open(&self) -> bool {
        self.descriptor() >= 0 && !self.has_ended.load(Ordering::Acquire)
    }

    /// The router's part is gone. The descriptor stays until the channel is closed, since other threads may be about to
    /// read it; `epoll` reports it no more, also where a child of `fork` has a copy of it.
    pub fn end(&self, epoll: RawFd) {
        self.has_ended.store(true, Ordering::Release);
        // SAFETY: numbers; a removal takes no event.
        unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, self.descriptor(), std::ptr::null_mut()) };
    }

    /// `is_ours`: the router's part is this process', and not its parent's.
    pub fn close(&self, is_ours: bool) {
        let descriptor = self.descriptor.swap(-1, Ordering::AcqRel);
        if descriptor < 0 {
            return;
        }
        if is_ours {
            // SAFETY: the device is there.
            let _ = unsafe { command(self.device.context(), CmRequest::DestroyChannel { channel: self.handle }) };
        }
        // SAFETY: it is this pipe's alone.
        unsafe { libc::close(descriptor) };
    }

    /// Reads a record if there is one, whether the descriptor is a blocking one or not: what `read`
    /// would return. `None`: it would wait.
    pub fn receive(&self, record: &mut [u8]) -> Option<isize> {
        let (flags, nobody) = (libc::MSG_DONTWAIT, std::ptr::null_mut::<std::ffi::c_void>());
        // SAFETY: the buffer is that long.
        let count = unsafe {
            libc::syscall(
                libc::SYS_recvfrom,
                self.descriptor(),
                record.as_mut_ptr(),
                record.len(),
                flags,
                nobody,
                nobody,
            )
        };
        if count < 0 && crate::boundary::last_errno() == libc::EAGAIN { None } else { Some(count as isize) }
    }
}
