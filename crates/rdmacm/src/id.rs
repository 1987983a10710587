//! Identifiers: the structure behind an `rdma_cm_id`. `lifecycle` creates and destroys them.
use crate::addrinfo_list::rdma_freeaddrinfo;
use crate::born::{Born, lock};
use crate::boundary::Outcome;
use crate::call::destroy_id;
use crate::channel::{EventChannel, QueuedEvent, is_on};
use crate::device::Device;
use crate::membership::Membership;
use crate::process::Process;
use freeflow_abi::{IBV_QPT_UD, ibv_qp_init_attr, rdma_addrinfo, rdma_cm_id};
use freeflow_protocol::cm::{CmAddress, CmOption, Ece};
use freeflow_protocol::library::Handle;
use std::cell::UnsafeCell;
use std::ffi::{c_uint, c_void};
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// An identifier as C sees it, and what is behind it. The C part is the program's as much as ours:
/// it is reached by pointers only, and as with rdma-core two threads that change one identifier at
/// a time keep out of each other's way themselves.
#[repr(C)]
pub(crate) struct Id {
    c: UnsafeCell<rdma_cm_id>,
    pub key: u64,
    home: Mutex<Home>,
    pub born: Born,
    state: Mutex<State>,
    acknowledged: Condvar,
}

// SAFETY: see the type: the C part is reached by whoever holds the identifier, as C's rules have
// it; the rest is locked or does not change.
unsafe impl Send for Id {}
// SAFETY: the same.
unsafe impl Sync for Id {}

/// Where the router has an identifier.
#[derive(Clone)]
pub(crate) struct Home {
    pub device: Arc<Device>,
    pub handle: Handle,
}

/// The fields that change.
pub(crate) struct State {
    pub channel: Arc<EventChannel>,
    /// Of a listener at a wildcard address: those at the other vNICs of the container.
    pub others: Vec<Home>,
    /// Of one that is bound to any port at a wildcard address: those at the other vNICs, where the port is its own too.
    pub reserved: Vec<Home>,
    /// Options that were set.
    pub options: Vec<CmOption>,
    /// The address that it was bound to by name.
    pub bound: Option<CmAddress>,
    /// It has its channel for itself, and calls wait for their events.
    pub is_synchronous: bool,
    /// Events that the program got, and gave back.
    pub delivered: u32,
    pub completed: u32,
    /// Threads that wait until events are given back.
    waiting_count: u32,
    /// All records of it that were read.
    pub read: u32,
    /// The router knows it no more.
    pub is_gone: bool,
    pub removal_reported: bool,
    /// The QP could not be connected; what the connection says afterwards is nobody's business.
    pub connect_failed: bool,
    pub initiator_depth: u8,
    pub responder_resources: u8,
    pub local_ece: Ece,
    pub remote_ece: Ece,
    /// From `rdma_addrinfo`: comes before the private data of the next connect.
    pub connect_data: Vec<u8>,
    /// Of a passive end point: for the QPs of its requests.
    pub qp_template: Option<Template>,
    pub device: Option<Arc<Device>>,
    pub memberships: Vec<Arc<Membership>>,
    pub names: AddrInfoState,
}

/// Attributes for making queue pairs, from `rdma_create_ep`.
pub(crate) struct Template(pub ibv_qp_init_attr);

// SAFETY: the pointers in it are only handed back to verbs, as the program gave them.
unsafe impl Send for Template {}

/// Where `rdma_resolve_addrinfo` is.
pub(crate) enum AddrInfoState {
    Idle,
    Resolving,
    Resolved(Resolved),
}

/// A list that nobody has taken yet.
pub(crate) struct Resolved(pub *mut rdma_addrinfo);

// SAFETY: memory from malloc that nobody else knows.
unsafe impl Send for Resolved {}

impl Drop for Resolved {
    fn drop(&mut self) {
        // SAFETY: from `rdma_getaddrinfo`, and not given away.
        unsafe { rdma_freeaddrinfo(self.0) };
    }
}

impl Id {
    /// Puts a new one into the table. C's pointer to it is good until it is destroyed.
    pub fn insert(
        channel: &Arc<EventChannel>,
        key: u64,
        home: Home,
        kind: (c_uint, c_uint),
        context: *mut c_void,
    ) -> Arc<Self> {
        // SAFETY: integers and pointers only; all zeroes are valid.
        let mut c: rdma_cm_id = unsafe { mem::zeroed() };
        c.channel = channel.as_c();
        (c.ps, c.qp_type) = kind;
        c.context = context;
        let state = State {
            channel: channel.clone(),
            others: Vec::new(),
            reserved: Vec::new(),
            options: Vec::new(),
            bound: None,
            is_synchronous: false,
            delivered: 0,
            completed: 0,
            waiting_count: 0,
            read: 0,
            is_gone: false,
            removal_reported: false,
            connect_failed: false,
            initiator_depth: 0,
            responder_resources: 0,
            local_ece: Ece::default(),
            remote_ece: Ece::default(),
            connect_data: Vec::new(),
            qp_template: None,
            device: None,
            memberships: Vec::new(),
            names: AddrInfoState::Idle,
        };
        let id = Arc::new(Self {
            c: UnsafeCell::new(c),
            key,
            home: Mutex::new(home),
            born: Born::here(),
            state: Mutex::new(state),
            acknowledged: Condvar::new(),
        });
        Process::current().table().ids.insert(key, id.clone());
        id
    }

    /// EINVAL for NULL, EIO for one that a parent process left behind.
    ///
    /// # Safety
    /// `id` is null, or came from this library and is not destroyed.
    pub unsafe fn from_c<'a>(id: *mut rdma_cm_id) -> Outcome<&'a Self> {
        // SAFETY: every identifier handed out is the beginning of an `Id`, which its table or its
        // user keeps.
        let id = unsafe { id.cast_const().cast::<Self>().as_ref() }.ok_or(libc::EINVAL)?;
        id.born.check()?;
        Ok(id)
    }

    pub fn as_c(&self) -> *mut rdma_cm_id {
        self.c.get()
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Asks the router on its behalf. EIO once it is gone.
    pub fn context(&self) -> Outcome<*mut freeflow_abi::ibv_context> {
        let is_gone = self.state().is_gone;
        if is_gone { Err(libc::EIO) } else { Ok(self.home().device.context()) }
    }

    pub fn home(&self) -> Home {
        lock(&self.home).clone()
    }

    pub fn handle(&self) -> Handle {
        lock(&self.home).handle
    }

    pub fn set_home(&self, home: Home) -> Home {
        mem::replace(&mut *lock(&self.home), home)
    }

    /// All places where the router has it.
    pub fn homes(&self) -> Vec<Home> {
        let others: Vec<Home> = {
            let state = self.state();
            state.others.iter().chain(&state.reserved).cloned().collect()
        };
        std::iter::once(self.home()).chain(others).collect()
    }

    pub fn is_datagram(&self) -> bool {
        // SAFETY: a read of an integer that does not change.
        unsafe { (*self.as_c()).qp_type == IBV_QPT_UD }
    }

    /// Gives it the device, as soon as it is known where it is.
    pub fn bind_device(&self) {
        let mut state = self.state();
        if state.device.is_some() {
            return;
        }
        let device = self.home().device;
        let c = self.as_c();
        // SAFETY: the pointer is the identifier's own.
        unsafe {
            (*c).verbs = device.context();
            if (*c).pd.is_null() {
                (*c).pd = device.pd();
            }
            (*c).port_num = 1;
            (*c).route.addr.ibaddr.pkey = crate::address::PKEY_DEFAULT.to_be();
        }
        state.device = Some(device);
    }

    /// Its device; EINVAL before it has one.
    pub fn device(&self) -> Outcome<Arc<Device>> {
        self.state().device.clone().ok_or(libc::EINVAL)
    }

    /// One event of it was given back.
    pub fn acknowledge(&self) {
        let is_awaited = {
            let mut state = self.state();
            state.completed += 1;
            state.waiting_count > 0
        };
        // A system call, whether somebody waits or not.
        if is_awaited {
            self.acknowledged.notify_all();
        }
    }

    /// Waits until the program has given back all events it got.
    pub fn wait_for_acknowledgements(&self) {
        self.wait_while(|state| state.completed < state.delivered);
    }

    /// The same for one membership's events, which count as the identifier's too.
    pub fn wait_for(&self, mut is_done: impl FnMut() -> bool) {
        self.wait_while(|_| !is_done());
    }

    /// Until an acknowledgement makes `waits` false, which is asked under the lock.
    fn wait_while(&self, mut waits: impl FnMut(&State) -> bool) {
        let mut state = self.state();
        state.waiting_count += 1;
        while waits(&state) {
            state = self.acknowledged.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting_count -= 1;
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: from malloc, by `crate::address`; nobody has the identifier any more.
        unsafe { libc::free((*self.c.get()).route.path_rec.cast()) };
    }
}

/// One's own reference to an identifier.
///
/// # Safety
/// `id` is an identifier.
pub(crate) unsafe fn shared(id: *mut rdma_cm_id) -> Outcome<Arc<Id>> {
    // SAFETY: this function's contract.
    let key = unsafe { Id::from_c(id)? }.key;
    Process::current().table().ids.get(&key).cloned().ok_or(libc::EINVAL)
}

/// Its channel is being closed: the router destroys what is on it, and only the shell is left to
/// the program.
pub(crate) fn gone_with_channel(channel: &EventChannel) {
    let ids: Vec<Arc<Id>> = Process::current().table().ids.values().filter(|id| is_on(id, channel)).cloned().collect();
    for id in ids {
        let was_gone = mem::replace(&mut id.state().is_gone, true);
        for home in id.homes().into_iter().filter(|_| !was_gone) {
            // SAFETY: the device is there.
            unsafe { destroy_id(home.device.context(), home.handle) };
        }
    }
}

/// The next identifier of a channel that was not notified of the end of its device.
pub(crate) fn next_without_removal_event(channel: &EventChannel, device: &Arc<Device>) -> Option<Arc<Id>> {
    let table = Process::current().table();
    let is_there = |id: &Id| !channel.is_joint() || Arc::ptr_eq(&id.home().device, device);
    let id = table.ids.values().find(|id| is_on(id, channel) && is_there(id) && !id.state().removal_reported)?;
    let mut state = id.state();
    state.removal_reported = true;
    state.delivered += 1;
    drop(state);
    Some(id.clone())
}

/// The identifier that an event's key names; it counts as delivered from here on, so it can't be
/// destroyed before it is acknowledged.
pub(crate) fn found(event: &QueuedEvent) -> Option<(Arc<Id>, Option<Arc<Membership>>)> {
    let key = match event {
        QueuedEvent::Record(event, _) => event.cookie,
        QueuedEvent::Own { key, .. } => *key,
    };
    let table = Process::current().table();
    let membership = table.memberships.get(&key).cloned();
    let id = table.ids.get(membership.as_ref().map_or(&key, |membership| &membership.id_key)).cloned()?;
    let mut state = id.state();
    state.delivered += 1;
    state.read += u32::from(matches!(event, QueuedEvent::Record(..)));
    if let Some(membership) = &membership {
        membership.count_delivered();
    }
    drop(state);
    Some((id, membership))
}
