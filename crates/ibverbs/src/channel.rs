//! Completion channels and their events.
use crate::boundary::{code, event, pointer};
use crate::context::Context;
use crate::cq::Cq;
use freeflow_abi::{ibv_comp_channel, ibv_context, ibv_cq};
use freeflow_client::CompletionChannel;
use freeflow_verbs::VerbsError;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A channel as C sees it, and what is behind it.
#[repr(C)]
pub(crate) struct CompChannel {
    c: UnsafeCell<ibv_comp_channel>,
    pub client: Arc<CompletionChannel>,
}

impl CompChannel {
    /// # Safety
    /// `channel` came from [`ibv_create_comp_channel`] and is not destroyed.
    pub unsafe fn from_c<'a>(channel: *mut ibv_comp_channel) -> &'a Self {
        // SAFETY: every channel handed out is the beginning of a `CompChannel`.
        unsafe { &*channel.cast::<Self>() }
    }
}

/// Counts the CQs of a channel.
///
/// # Safety
/// Both exist.
pub(crate) unsafe fn refer(context: *mut ibv_context, channel: *mut ibv_comp_channel, change: c_int) {
    // SAFETY: this function's contract; the context's mutex guards the count.
    unsafe {
        libc::pthread_mutex_lock(&raw mut (*context).mutex);
        (*channel).refcnt += change;
        libc::pthread_mutex_unlock(&raw mut (*context).mutex);
    }
}

/// `ibv_create_comp_channel(3)`.
///
/// # Safety
/// `context` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    pointer(|| {
        // SAFETY: the C contract.
        let owner = unsafe { Context::from_c(context) }.client();
        let client = CompletionChannel::create(owner.session(), owner.handle())?;
        let c = ibv_comp_channel { context, fd: client.events().descriptor(), refcnt: 0 };
        let channel = CompChannel { c: UnsafeCell::new(c), client: Arc::new(client) };
        Ok(Box::into_raw(Box::new(channel)).cast())
    })
}

/// `ibv_destroy_comp_channel(3)`: EBUSY while a CQ reports to it.
///
/// # Safety
/// `channel` exists, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    code(|| {
        // SAFETY: the C contract; the context's mutex guards the count.
        let used = unsafe {
            let context = (*channel).context;
            libc::pthread_mutex_lock(&raw mut (*context).mutex);
            let used = (*channel).refcnt > 0;
            libc::pthread_mutex_unlock(&raw mut (*context).mutex);
            used
        };
        if used {
            return Err(VerbsError::Busy);
        }
        // SAFETY: the C contract; made by `Box::into_raw` above.
        unsafe {
            CompChannel::from_c(channel).client.destroy()?;
            drop(Box::from_raw(channel.cast::<CompChannel>()));
        }
        Ok(())
    })
}

/// `ibv_get_cq_event(3)`. When the router is gone, every CQ of the channel is returned once more,
/// then it is EIO.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let begin = || {
        // SAFETY: the C contract.
        unsafe { CompChannel::from_c(channel) }.client.events().begin_wait()
    };
    event(begin, |event| {
        // SAFETY: the C contract.
        let client = &unsafe { CompChannel::from_c(channel) }.client;
        let delivered = client.handle_event(event, &mut |tag| {
            let ready: *mut ibv_cq = ptr::with_exposed_provenance_mut(tag);
            // SAFETY: the tag is the address of a `Cq`, which is not destroyed while this runs; the
            // rest is the C contract.
            unsafe {
                // Release: pairs with the Acquire in `Acknowledged::wait`.
                Cq::from_c(ready).completions_delivered.fetch_add(1, Ordering::Release);
                *cq = ready;
                *cq_context = (*ready).cq_context;
            }
        })?;
        if delivered {
            // SAFETY: the event is not acknowledged yet, so the CQ can't be destroyed.
            unsafe { Cq::from_c(*cq) }.client.note_event();
        }
        Ok(delivered)
    })
}

/// `ibv_ack_cq_events(3)`.
///
/// # Safety
/// `cq` exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: the C contract.
    unsafe { Cq::from_c(cq).completion_acks().add(count) };
}
