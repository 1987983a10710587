//! `rdma_migrate_id`: an identifier moves to another event channel.
use crate::boundary::{Outcome, status};
use crate::call::command;
use crate::channel::{EventChannel, QueuedEvent};
use crate::id::{Home, Id, shared};
use freeflow_abi::{rdma_cm_id, rdma_event_channel};
use freeflow_protocol::cm::{CmEvent, CmEventBody, CmRequest};
use std::ffi::c_int;
use std::mem;
use std::sync::Arc;

/// The router's part; the identifier's events go to the new channel from here on, those that wait
/// are brought along. So are requests that the program has not read; those that it has read stay
/// where it read them, as with the kernel's.
fn move_to(id: &Id, channel: &Arc<EventChannel>) -> Outcome<Arc<EventChannel>> {
    id.context()?;
    for home in id.homes() {
        migrate(&home, channel)?;
    }
    let (old, memberships) = {
        let mut state = id.state();
        let memberships: Vec<u64> = state.memberships.iter().map(|membership| membership.key).collect();
        (mem::replace(&mut state.channel, channel.clone()), memberships)
    };
    let is_ours = |key| key == id.key || memberships.contains(&key);
    let waiting = old.extract(is_ours);
    for event in &waiting {
        bring_along(id, event, channel);
    }
    channel.deliver(waiting);
    // SAFETY: the pointer is the identifier's own.
    unsafe { (*id.as_c()).channel = channel.as_c() };
    Ok(old)
}

/// The identifier that an event asks to be made goes to another channel. One that is gone by now
/// goes nowhere.
pub(crate) fn bring_along(listener: &Id, event: &QueuedEvent, channel: &EventChannel) {
    if let QueuedEvent::Record(CmEvent { body: CmEventBody::Request { id, .. }, .. }, device) = event
        && listener.context().is_ok()
    {
        let _ = migrate(&Home { device: device.clone(), handle: *id }, channel);
    }
}

/// The router's part.
fn migrate(home: &Home, channel: &EventChannel) -> Outcome<()> {
    let request = CmRequest::MigrateId { id: home.handle, channel: channel.pipe_of(&home.device)?.handle };
    // SAFETY: the device is there.
    unsafe { command(home.device.context(), request) }
}

/// A fresh request of a synchronous listener gets a channel of its own; nothing waits for it yet.
pub(crate) fn become_synchronous(id: &Id) -> Outcome<()> {
    let channel = EventChannel::create()?;
    id.context()?;
    migrate(&id.home(), &channel)?;
    // SAFETY: the pointer is the identifier's own.
    unsafe { (*id.as_c()).channel = channel.as_c() };
    let old = {
        let mut state = id.state();
        state.is_synchronous = true;
        mem::replace(&mut state.channel, channel)
    };
    // Not while the state is locked: who drops the last reference closes the channel.
    drop(old);
    Ok(())
}

/// `rdma_migrate_id(3)`: waits until the events that the program has of the identifier are
/// acknowledged. EINVAL for a synchronous identifier without a channel to go to.
///
/// # Safety
/// `id` is an identifier; `channel` is null or a channel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let id = unsafe { shared(id)? };
        let was_synchronous = id.state().is_synchronous;
        let becomes_synchronous = channel.is_null();
        if was_synchronous && becomes_synchronous {
            return Err(libc::EINVAL);
        }
        let channel = if becomes_synchronous {
            EventChannel::create()?
        } else {
            // SAFETY: the C contract.
            unsafe { EventChannel::share(channel)? }
        };
        let old = move_to(&id, &channel)?;
        id.state().is_synchronous = becomes_synchronous;
        if was_synchronous {
            id.acknowledge_kept_event();
            old.close_empty();
        }
        id.wait_for_acknowledgements();
        Ok(())
    })
}
