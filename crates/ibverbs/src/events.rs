//! Asynchronous events.
use crate::boundary::event;
use crate::context::Context;
use crate::cq::Cq;
use crate::qp::Qp;
use crate::srq::Srq;
use freeflow_abi::{async_event_kind_to_c, ibv_async_event, ibv_async_event_element, ibv_context};
use freeflow_client::Element;
use freeflow_verbs::AsyncEventKind;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::Ordering;

/// `ibv_get_async_event(3)`. The end of the router is IBV_EVENT_DEVICE_FATAL, once; then it is EIO.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_async_event(context: *mut ibv_context, to: *mut ibv_async_event) -> c_int {
    let begin = || {
        // SAFETY: the C contract.
        unsafe { Context::from_c(context) }.client().events().begin_wait()
    };
    event(begin, |event| {
        // SAFETY: the C contract.
        let client = unsafe { Context::from_c(context) }.client();
        client.handle_event(event, &mut |kind, element| {
            // SAFETY: the objects are not destroyed while this runs.
            let element = unsafe { count(element) };
            // SAFETY: the C contract.
            unsafe { *to = ibv_async_event { element, event_type: async_event_kind_to_c(kind) } };
        })
    })
}

/// Counts the event against its object, which can't be destroyed before it is acknowledged.
///
/// # Safety
/// A tag is the address of such an object, which exists.
unsafe fn count(element: Element) -> ibv_async_event_element {
    // Release, each: pairs with the Acquire in `Acknowledged::wait`.
    match element {
        Element::Cq(tag) => {
            let cq = ptr::with_exposed_provenance_mut(tag);
            // SAFETY: this function's contract.
            unsafe { Cq::from_c(cq) }.asyncs_delivered.fetch_add(1, Ordering::Release);
            ibv_async_event_element { cq }
        }
        Element::Qp(tag) => {
            let qp = ptr::with_exposed_provenance_mut(tag);
            // SAFETY: this function's contract.
            unsafe { Qp::from_c(qp) }.asyncs_delivered.fetch_add(1, Ordering::Release);
            ibv_async_event_element { qp }
        }
        Element::Srq(tag) => {
            let srq = ptr::with_exposed_provenance_mut(tag);
            // SAFETY: this function's contract.
            unsafe { Srq::from_c(srq) }.asyncs_delivered.fetch_add(1, Ordering::Release);
            ibv_async_event_element { srq }
        }
        Element::Port(port) => ibv_async_event_element { port_num: port as c_int },
        Element::Device => ibv_async_event_element { cq: ptr::null_mut() },
    }
}

/// `ibv_ack_async_event(3)`.
///
/// # Safety
/// `event` came from [`ibv_get_async_event`], once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    use AsyncEventKind::{
        CommunicationEstablished, CqError, PathMigrated, PathMigrationError, QpAccessError, QpFatal, QpLastWqeReached,
        QpRequestError, SqDrained, SrqError, SrqLimitReached,
    };
    // SAFETY: the C contract; the kind says which member of the union holds.
    unsafe {
        let event = &*event;
        match AsyncEventKind::from_number(event.event_type) {
            Some(CqError) => Cq::from_c(event.element.cq).async_acks().add(1),
            Some(
                QpFatal
                | QpRequestError
                | QpAccessError
                | CommunicationEstablished
                | SqDrained
                | PathMigrated
                | PathMigrationError
                | QpLastWqeReached,
            ) => Qp::from_c(event.element.qp).acks().add(1),
            Some(SrqError | SrqLimitReached) => Srq::from_c(event.element.srq).acks().add(1),
            _ => {}
        }
    }
}
