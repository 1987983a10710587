//! Completion queues. Every CQ is made as an extended one; `ibv_create_cq` just gives less to see
//! of it.
use crate::boundary::{Outcome, code, guarded, pointer};
use crate::channel::{self, CompChannel};
use crate::context::Context;
use crate::pd::ParentUse;
use crate::sync::Acknowledged;
use freeflow_abi::{
    IBV_CQ_ATTR_MODERATE, completion_to_c, ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_modify_cq_attr, ibv_wc,
};
use freeflow_client::{CallLock, CompletionQueue};
use freeflow_verbs::{CQE_COUNT_MAX, Completion, VerbsError};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// A CQ as C sees it, and what is behind it.
#[repr(C)]
pub(crate) struct Cq {
    pub c: UnsafeCell<ibv_cq_ex>,
    pub client: Arc<CompletionQueue>,
    /// Completion events that `ibv_get_cq_event` returned.
    pub completions_delivered: AtomicU32,
    /// Asynchronous events that `ibv_get_async_event` returned.
    pub asyncs_delivered: AtomicU32,
    /// Held from `start_poll` to `end_poll`, unless the program promised to use the CQ from one
    /// thread at a time.
    pub poll_lock: CallLock,
    pub single_threaded: bool,
    _parent_use: ParentUse,
    /// The completion that `read_*` read. Guarded by `poll_lock` or by that promise.
    pub current: UnsafeCell<Completion>,
}

impl Cq {
    /// # Safety
    /// `cq` came from this library and is not destroyed.
    pub unsafe fn from_c<'a>(cq: *mut ibv_cq) -> &'a Self {
        // SAFETY: every CQ handed out is the beginning of a `Cq`.
        unsafe { &*cq.cast::<Self>() }
    }

    fn base(&self) -> *mut ibv_cq {
        self.c.get().cast()
    }

    pub fn completion_acks(&self) -> Acknowledged {
        let base = self.base();
        // SAFETY: within the struct.
        unsafe {
            Acknowledged {
                mutex: &raw mut (*base).mutex,
                cond: &raw mut (*base).cond,
                count: &raw mut (*base).comp_events_completed,
            }
        }
    }

    pub fn async_acks(&self) -> Acknowledged {
        // SAFETY: within the struct.
        let count = unsafe { &raw mut (*self.base()).async_events_completed };
        Acknowledged { count, ..self.completion_acks() }
    }
}

/// Parameters that both ways of creation share.
pub(crate) struct CqParameters {
    pub cqe: u32,
    pub cq_context: *mut c_void,
    pub channel: *mut ibv_comp_channel,
    pub comp_vector: u32,
    pub single_threaded: bool,
    /// Exact ones: what the extended CQ's timestamps are.
    pub timestamps: bool,
    pub parent_use: ParentUse,
}

/// # Safety
/// `context` is open, the channel null or of it.
pub(crate) unsafe fn create(context: *mut ibv_context, wanted: CqParameters) -> Outcome<*mut ibv_cq_ex> {
    // SAFETY: this function's contract.
    let owner = unsafe { Context::from_c(context) }.client();
    let vectors = owner.session().device().completion_vector_count;
    if wanted.cqe == 0 || wanted.cqe > CQE_COUNT_MAX || wanted.comp_vector >= vectors {
        return Err(VerbsError::InvalidArgument);
    }
    let channel = if wanted.channel.is_null() {
        None
    } else {
        // SAFETY: this function's contract.
        Some(unsafe { CompChannel::from_c(wanted.channel) })
    };
    let channel = channel.map(|channel| &channel.client);
    let client = CompletionQueue::create(owner.session(), owner.handle(), wanted.cqe, channel, wanted.timestamps)?;
    // SAFETY: integers, pointers and optional functions only; all zeroes are valid.
    let mut c: ibv_cq_ex = unsafe { std::mem::zeroed() };
    c.base.context = context;
    c.base.channel = wanted.channel;
    c.base.cq_context = wanted.cq_context;
    c.base.handle = client.handle();
    c.base.cqe = client.capacity() as c_int;
    crate::cq_ex::fill(&mut c);
    let cq = Box::into_raw(Box::new(Cq {
        c: UnsafeCell::new(c),
        client: Arc::new(client),
        completions_delivered: AtomicU32::new(0),
        asyncs_delivered: AtomicU32::new(0),
        poll_lock: CallLock::new(),
        single_threaded: wanted.single_threaded,
        _parent_use: wanted.parent_use,
        current: UnsafeCell::default(),
    }));
    // SAFETY: in its final place and not shared yet; the channel is there by this function's
    // contract.
    unsafe {
        (*cq).completion_acks().init();
        if !wanted.channel.is_null() {
            channel::refer(context, wanted.channel, 1);
        }
        (*cq).client.set_tag(cq.expose_provenance());
    }
    Ok(cq.cast())
}

/// `ibv_create_cq(3)`.
///
/// # Safety
/// `context` is open, the channel null or of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    pointer(|| {
        let cqe = u32::try_from(cqe).map_err(|_| VerbsError::InvalidArgument)?;
        let comp_vector = u32::try_from(comp_vector).map_err(|_| VerbsError::InvalidArgument)?;
        let parent_use = ParentUse::none();
        let wanted = CqParameters {
            cqe,
            cq_context,
            channel,
            comp_vector,
            single_threaded: false,
            timestamps: false,
            parent_use,
        };
        // SAFETY: the C contract.
        unsafe { create(context, wanted) }.map(<*mut ibv_cq_ex>::cast)
    })
}

/// `ibv_resize_cq(3)`.
///
/// # Safety
/// `cq` exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    code(|| {
        let cqe = u32::try_from(cqe).map_err(|_| VerbsError::InvalidArgument)?;
        if cqe == 0 || cqe > CQE_COUNT_MAX {
            return Err(VerbsError::InvalidArgument);
        }
        // SAFETY: the C contract.
        let capacity = unsafe { Cq::from_c(cq) }.client.resize(cqe)?;
        // SAFETY: the C contract.
        unsafe { (*cq).cqe = capacity as c_int };
        Ok(())
    })
}

/// `ibv_modify_cq(3)`: moderation, the only thing that can change.
pub(crate) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let attr = unsafe { &*attr };
        if attr.attr_mask & !IBV_CQ_ATTR_MODERATE != 0 {
            return Err(VerbsError::InvalidArgument);
        }
        if attr.attr_mask == 0 {
            return Ok(());
        }
        // SAFETY: the C contract.
        unsafe { Cq::from_c(cq) }.client.moderate(attr.moderate.cq_count, attr.moderate.cq_period)
    })
}

/// `ibv_destroy_cq(3)`: EBUSY while a QP uses it; waits until its events were acknowledged.
///
/// # Safety
/// `cq` exists, and is not used any more but for acknowledgements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let whole = unsafe { Cq::from_c(cq) };
        whole.client.destroy()?;
        // SAFETY: no more events are delivered; made by `Box::into_raw` in `create`.
        unsafe {
            whole.completion_acks().wait(&whole.completions_delivered);
            whole.async_acks().wait(&whole.asyncs_delivered);
            if !(*cq).channel.is_null() {
                channel::refer((*cq).context, (*cq).channel, -1);
            }
            whole.completion_acks().destroy();
            drop(Box::from_raw(cq.cast::<Cq>()));
        }
        Ok(())
    })
}

/// `ibv_poll_cq(3)`.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, limit: c_int, wc: *mut ibv_wc) -> c_int {
    let polled = guarded(|| {
        let mut at = 0;
        // SAFETY: the C contract.
        unsafe { Cq::from_c(cq) }.client.poll(usize::try_from(limit).unwrap_or(0), |completion| {
            // SAFETY: `wc` has `limit` places, and `poll` calls no oftener.
            unsafe { *wc.add(at) = completion_to_c(completion) };
            at += 1;
        })
    });
    polled.map_or(-1, |count| count as c_int)
}

/// `ibv_req_notify_cq(3)`.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the C contract.
    code(|| unsafe { Cq::from_c(cq) }.client.arm(solicited_only != 0))
}
