//! Events: from the router's records to what programs get, and what the library does on the way.
use crate::boundary::{Outcome, guarded, last_errno, set_errno, status};
use crate::channel::{EventChannel, Look, QueuedEvent, Taken};
use crate::device::Device;
use crate::ece::answered;
use crate::event_kinds::to_c;
use crate::id::{AddrInfoState, Home, Id, found, next_without_removal_event};
use crate::lifecycle::destroy;
use crate::membership::Membership;
use crate::migrate::{become_synchronous, bring_along};
use crate::process::Process;
use crate::qp_states::{establish, fail, qp_of};
use crate::route::{note_path, note_route};
use crate::verbs::freeflow_note_connected;
use freeflow_abi::*;
use freeflow_protocol::cm::{CM_EVENT_BYTES_MAX, CmEvent, CmEventBody, CmEventKind, CmRoute, ConnectionParameters};
use freeflow_verbs::AddressHandleAttributes;
use std::ffi::{c_int, c_void};
use std::mem;
use std::ptr;
use std::sync::Arc;

/// An event as C sees it, and what is behind it.
#[repr(C)]
struct Event {
    c: rdma_cm_event,
    private_data: [u8; RDMA_MAX_PRIVATE_DATA],
    /// The identifier that the event counts for: of a request, the listener.
    id: Arc<Id>,
    membership: Option<Arc<Membership>>,
}

/// Result of processing a record.
enum Processed {
    Event(Box<Event>),
    /// Nothing that the program hears of.
    Dropped,
}

impl Event {
    fn new(id: &Arc<Id>, membership: Option<Arc<Membership>>, kind: u32, status: c_int) -> Box<Self> {
        // SAFETY: integers and pointers only; all zeroes are valid.
        let mut c: rdma_cm_event = unsafe { mem::zeroed() };
        c.id = id.as_c();
        (c.event, c.status) = (kind, status);
        Box::new(Self { c, private_data: [0; RDMA_MAX_PRIVATE_DATA], id: id.clone(), membership })
    }

    /// Where it can be pointed to, and how many bytes.
    fn keep(&mut self, data: &[u8]) -> (*const c_void, u8) {
        let bytes = data.len().min(usize::from(u8::MAX));
        if bytes == 0 {
            return (ptr::null(), 0);
        }
        self.private_data[..bytes].copy_from_slice(&data[..bytes]);
        (self.private_data.as_ptr().cast(), bytes as u8)
    }

    fn set_connection(&mut self, said: &ConnectionParameters) {
        let (private_data, private_data_len) = self.keep(&said.private_data);
        self.c.param.conn = rdma_conn_param {
            private_data,
            private_data_len,
            responder_resources: said.responder_resources,
            initiator_depth: said.initiator_depth,
            flow_control: u8::from(said.flow_control),
            retry_count: said.retry_count,
            rnr_retry_count: said.rnr_retry_count,
            srq: u8::from(said.srq),
            qp_num: said.qp_number,
        };
    }

    fn set_datagram(&mut self, address: &AddressHandleAttributes, qp_num: u32, qkey: u32, data: &[u8]) {
        let (private_data, private_data_len) = self.keep(data);
        let ah_attr = ah_attributes_to_c(address);
        self.c.param.ud = rdma_ud_param { private_data, private_data_len, ah_attr, qp_num, qkey };
    }

    /// Fills in the record's fields about the other side.
    fn set_body(&mut self, body: &CmEventBody) {
        match body {
            CmEventBody::Nothing | CmEventBody::Route(_) => {}
            CmEventBody::Connection(said) | CmEventBody::Request { parameters: said, .. } => {
                if self.id.is_datagram() {
                    let nowhere = AddressHandleAttributes::default();
                    self.set_datagram(&nowhere, said.qp_number, said.qkey, &said.private_data);
                } else {
                    self.set_connection(said);
                }
            }
            CmEventBody::Datagram { address, qp_number, qkey, private_data } => {
                self.set_datagram(address, *qp_number, *qkey, private_data);
            }
        }
    }
}

/// Gives an event back that the program never saw.
fn uncount(id: &Id, membership: Option<&Membership>) {
    if let Some(membership) = membership {
        membership.count_completed();
    }
    id.acknowledge();
}

fn process(channel: &Arc<EventChannel>, event: QueuedEvent) -> Processed {
    let Some((id, membership)) = found(&event) else {
        channel.dismiss(event);
        return Processed::Dropped;
    };
    // Its listener left while the router still had this to write.
    let now_at = id.state().channel.clone();
    if !Arc::ptr_eq(&now_at, channel) {
        bring_along(&id, &event, &now_at);
    }
    let processed = match event {
        QueuedEvent::Own { kind, status, argument, .. } => {
            let mut own = Event::new(&id, None, kind, status);
            own.c.param.arg = argument;
            Processed::Event(own)
        }
        QueuedEvent::Record(record, device) => match process_record(&id, membership.clone(), &record, &device) {
            Ok(processed) => processed,
            Err(()) => Processed::Dropped,
        },
    };
    if matches!(processed, Processed::Dropped) {
        uncount(&id, membership.as_deref());
    }
    processed
}

fn process_record(
    id: &Arc<Id>,
    membership: Option<Arc<Membership>>,
    record: &CmEvent,
    device: &Arc<Device>,
) -> Result<Processed, ()> {
    let connect_failed = id.state().connect_failed;
    if connect_failed && matches!(record.kind, CmEventKind::Rejected | CmEventKind::Disconnected) {
        return Err(());
    }
    let mut event = Event::new(id, membership.clone(), to_c(record.kind), record.status);
    event.set_body(&record.body);
    match (record.kind, &record.body) {
        (CmEventKind::AddressResolved, CmEventBody::Route(route)) => note_route(id, route),
        (CmEventKind::AddressResolved, _) => id.bind_device(),
        (CmEventKind::RouteResolved, CmEventBody::Route(route)) => {
            if let Err(error) = note_path(id, route) {
                (event.c.event, event.c.status) = (RDMA_CM_EVENT_ROUTE_ERROR, -error);
            }
        }
        (CmEventKind::ConnectRequest, CmEventBody::Request { id: handle, route, parameters, .. }) => {
            let home = Home { device: device.clone(), handle: *handle };
            let request = requested(id, home, route, parameters).map_err(|_| ())?;
            (event.c.id, event.c.listen_id) = (request.as_c(), id.as_c());
        }
        (CmEventKind::ConnectRequest, _) => return Err(()),
        (CmEventKind::ConnectResponse, body) => respond(id, &mut event, body),
        (CmEventKind::Established, CmEventBody::Connection(said)) => connected(id, said),
        (CmEventKind::Rejected, _) => {
            let _ = fail(id);
        }
        (CmEventKind::MulticastJoin | CmEventKind::MulticastError, body) => {
            let membership = membership.ok_or(())?;
            if record.kind == CmEventKind::MulticastJoin
                && let CmEventBody::Datagram { address, .. } = body
                && let Err(error) = membership.joined(qp_of(id), address)
            {
                (event.c.event, event.c.status) = (RDMA_CM_EVENT_MULTICAST_ERROR, -error);
            }
            event.c.param.ud.private_data = membership.context.as_ptr();
        }
        _ => {}
    }
    Ok(Processed::Event(event))
}

/// The other side agrees: an identifier with a QP is brought to RTS here, and is established.
fn respond(id: &Arc<Id>, event: &mut Event, body: &CmEventBody) {
    let remote = match body {
        CmEventBody::Connection(said) => said.ece,
        _ => Default::default(),
    };
    if qp_of(id).is_none() {
        id.state().remote_ece = remote;
        return;
    }
    match answered(id, remote).and_then(|()| establish(id)) {
        Ok(()) => event.c.event = RDMA_CM_EVENT_ESTABLISHED,
        Err(error) => {
            let _ = fail(id);
            id.state().connect_failed = true;
            (event.c.event, event.c.status) = (RDMA_CM_EVENT_CONNECT_ERROR, -error);
        }
    }
}

/// The other side agreed, and the router brought the QP to RTS.
fn connected(id: &Id, said: &ConnectionParameters) {
    id.state().remote_ece.vendor_id = said.ece.vendor_id;
    if let Some(qp) = qp_of(id).filter(|_| !id.is_datagram()) {
        // SAFETY: a QP of an identifier exists as long as it stands there.
        unsafe { freeflow_note_connected(qp) };
    }
}

/// A request makes a new identifier, on the listener's channel, or on one of its own if the
/// listener is synchronous.
fn requested(listener: &Arc<Id>, home: Home, route: &CmRoute, parameters: &ConnectionParameters) -> Outcome<Arc<Id>> {
    let (channel, is_synchronous) = {
        let state = listener.state();
        (state.channel.clone(), state.is_synchronous)
    };
    // SAFETY: reads of what the listener's user may set, as rdma-core does.
    let (kind, context) = unsafe {
        let c = listener.as_c();
        (((*c).ps, (*c).qp_type), (*c).context)
    };
    let id = Id::insert(&channel, Process::current().new_key(), home, kind, context);
    {
        let mut state = id.state();
        state.initiator_depth = parameters.initiator_depth;
        state.responder_resources = parameters.responder_resources;
        state.remote_ece = parameters.ece;
    }
    let made = note_path(&id, route).and_then(|()| if is_synchronous { become_synchronous(&id) } else { Ok(()) });
    match made {
        Ok(()) => Ok(id),
        Err(error) => {
            let _ = destroy(&id);
            Err(error)
        }
    }
}

/// The event that comes of what was read; null if that is nothing for the program.
fn event_of(channel: &Arc<EventChannel>, taken: Taken) -> Outcome<*mut rdma_cm_event> {
    match taken {
        Taken::Nothing => Ok(ptr::null_mut()),
        Taken::Event(waiting) => match process(channel, waiting) {
            Processed::Event(event) => Ok(into_c(event)),
            Processed::Dropped => Ok(ptr::null_mut()),
        },
        Taken::End(pipe) => match next_without_removal_event(channel, &pipe.device) {
            Some(id) => Ok(into_c(Event::new(&id, None, RDMA_CM_EVENT_DEVICE_REMOVAL, 0))),
            None if channel.drop_pipe(&pipe) => Ok(ptr::null_mut()),
            None => Err(libc::EIO),
        },
    }
}

/// The next event of a channel, for calls that wait for theirs.
///
/// # Errors
/// Of `read`: EAGAIN, EINTR. EIO once the router is gone and every identifier of the channel was
/// notified.
pub(crate) fn next(channel: &Arc<EventChannel>) -> Outcome<*mut rdma_cm_event> {
    channel.born.check()?;
    loop {
        let event = event_of(channel, channel.take()?)?;
        if !event.is_null() {
            return Ok(event);
        }
    }
}

fn into_c(event: Box<Event>) -> *mut rdma_cm_event {
    Box::into_raw(event).cast()
}

// Cancellation points, which unwind the thread: declared so that this is allowed.
unsafe extern "C-unwind" {
    fn read(descriptor: c_int, buffer: *mut c_void, bytes: usize) -> isize;
    fn poll(descriptors: *mut libc::pollfd, count: libc::nfds_t, timeout_ms: c_int) -> c_int;
    fn pthread_testcancel();
    fn pause() -> c_int;
}

/// A reader's next step.
enum ReadStep {
    /// Of the descriptor of a channel, which is a joint one or not.
    Read(c_int, bool),
    /// Another thread closed the channel under this one: nothing will ever come.
    Never,
    Done(c_int),
}

/// `rdma_get_cm_event(3)`. Once the router is gone, every identifier of the channel gets
/// DEVICE_REMOVAL, then it is EIO.
///
/// The wait for the event is a cancellation point: programs end their event threads by
/// `pthread_cancel`. So nothing that would have to be dropped is alive in this function while it
/// waits; a thread that is cancelled leaves a reference to the channel behind. Of a channel that
/// another thread closes meanwhile it hears nothing more, as with the kernel's.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    let mut record = [0_u8; CM_EVENT_BYTES_MAX];
    // SAFETY: the C contract.
    let mut step = unsafe { begin(channel, event) };
    loop {
        match step {
            ReadStep::Done(code) => return code,
            ReadStep::Never => {
                // SAFETY: no arguments.
                unsafe { pause() };
                set_errno(libc::EINTR);
                return -1;
            }
            ReadStep::Read(descriptor, is_joint) => {
                // SAFETY: the buffer is that long; `begin` holds a reference to the channel.
                step = unsafe {
                    pthread_testcancel();
                    let (found, has_waited) = match look(channel, &mut record) {
                        Some(found) => (found, false),
                        None if is_joint => {
                            let mut one = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
                            if poll(&raw mut one, 1, -1) >= 0 {
                                continue;
                            }
                            (Look { count: -1, source: 0 }, true)
                        }
                        None => {
                            let count = read(descriptor, record.as_mut_ptr().cast(), record.len());
                            (Look { count, source: 0 }, true)
                        }
                    };
                    proceed(channel, event, (found, has_waited), &record)
                };
            }
        }
    }
}

/// Takes a reference to the channel, which the last step gives back.
///
/// # Safety
/// The pointers are valid.
unsafe fn begin(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> ReadStep {
    let begun = guarded(|| {
        if event.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: this function's contract.
        let channel = unsafe { EventChannel::share(channel)? };
        channel.born.check()?;
        let (descriptor, is_joint) = (channel.descriptor(), channel.is_joint());
        let _ = Arc::into_raw(channel);
        Ok(ReadStep::Read(descriptor, is_joint))
    });
    begun.unwrap_or_else(refuse)
}

/// [`EventChannel::look`] at a channel of C's, to which there is a reference.
///
/// # Safety
/// As for [`begin`], which was called before.
unsafe fn look(channel: *mut rdma_event_channel, record: &mut [u8]) -> Option<Look> {
    let looked = guarded(|| {
        // SAFETY: `begin` left a reference.
        let channel = unsafe { &*channel.cast_const().cast::<EventChannel>() };
        Ok(channel.look(record))
    });
    looked.ok().flatten()
}

fn refuse(number: c_int) -> ReadStep {
    set_errno(number);
    ReadStep::Done(-1)
}

/// After a `read`, or a look that found what one would have returned.
///
/// # Safety
/// As for [`begin`], which was called before.
unsafe fn proceed(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
    (found, has_waited): (Look, bool),
    record: &[u8],
) -> ReadStep {
    let failure = (found.count < 0).then(last_errno);
    let step = guarded(|| {
        // SAFETY: `begin` left a reference, which is taken over here and left again if there is
        // more to read.
        let channel = unsafe { Arc::from_raw(channel.cast_const().cast::<EventChannel>()) };
        if has_waited {
            channel.note_read();
        }
        let is_closed = channel.descriptor() < 0;
        if is_closed && found.count <= 0 {
            return Ok(ReadStep::Never);
        }
        if let Some(number) = failure {
            return Err(number);
        }
        let made = event_of(&channel, channel.taken(found, record)?)?;
        if !made.is_null() {
            // SAFETY: this function's contract.
            unsafe { *event = made };
            return Ok(ReadStep::Done(0));
        }
        let (descriptor, is_joint) = (channel.descriptor(), channel.is_joint());
        let _ = Arc::into_raw(channel);
        Ok(ReadStep::Read(descriptor, is_joint))
    });
    step.unwrap_or_else(refuse)
}

/// `rdma_ack_cm_event(3)`.
///
/// # Safety
/// `event` is null or came from [`rdma_get_cm_event`], once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    status(|| {
        if event.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the C contract: made by `into_c`.
        let event = unsafe { Box::from_raw(event.cast::<Event>()) };
        if event.id.born.is_here() {
            uncount(&event.id, event.membership.as_deref());
        }
        Ok(())
    })
}

impl Id {
    /// The event that a synchronous call keeps, if any: from now on it is not the program's.
    fn take_kept_event(&self) -> *mut rdma_cm_event {
        // SAFETY: the pointer is the identifier's own.
        unsafe { mem::replace(&mut (*self.as_c()).event, ptr::null_mut()) }
    }

    /// Gives back the event that the last synchronous call left.
    pub fn acknowledge_kept_event(&self) {
        let event = self.take_kept_event();
        if !event.is_null() {
            // SAFETY: it came from this library, and was taken out.
            unsafe { rdma_ack_cm_event(event) };
        }
    }
}

/// `rdma_write_cm_event` (RDMACM_1.4): an event of the program's own; EINVAL for any other kind.
///
/// # Safety
/// `id` is an identifier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_write_cm_event(id: *mut rdma_cm_id, kind: u32, said: c_int, argument: u64) -> c_int {
    status(|| {
        if kind != RDMA_CM_EVENT_USER {
            return Err(libc::EINVAL);
        }
        // SAFETY: the C contract.
        write_own(unsafe { Id::from_c(id)? }, kind, said, argument)
    })
}

/// Puts an event of this library's own behind those that wait.
pub(crate) fn write_own(id: &Id, kind: u32, status: c_int, argument: u64) -> Outcome<()> {
    id.context()?;
    let channel = id.state().channel.clone();
    channel.deliver(vec![QueuedEvent::Own { key: id.key, kind, status, argument }]);
    Ok(())
}

/// The answer of `rdma_resolve_addrinfo` that nobody took is freed with the identifier.
pub(crate) fn forget_addrinfo(id: &Id) {
    let names = mem::replace(&mut id.state().names, AddrInfoState::Idle);
    drop(names);
}
