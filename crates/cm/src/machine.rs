//! The machine as its users see it, and what all of its parts do with identifiers and connections.
use crate::connection::{Connection, Peer, PeerNumber, State};
use crate::id::{Id, IdState, Ids};
use crate::limits::{decrement, keeps_to_its_share};
use crate::ports::Ports;
use crate::resolving::Resolving;
use crate::{Counts, Environment, EventChannel, Limits, Link, MessageCounts, Owner, VnicRef};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use freeflow_protocol::cm::{CmEvent, CmEventBody, CmEventKind};
use freeflow_protocol::library::Handle;
use freeflow_verbs::{Instant, VerbsError};
use freeflow_wire::cm::{About, Kind, reason};

/// The connection manager of a host.
///
/// Calls of libraries come in by [`Machine::handle_request`], packets by
/// [`Machine::handle_packet`], time by [`Machine::handle_timeout`], not later than
/// [`Machine::poll_timeout`] says. All answers go out by the [`Environment`].
pub struct Machine {
    pub(crate) limits: Limits,
    pub(crate) ids: Ids,
    pub(crate) by_owner: BTreeMap<Owner, BTreeSet<Handle>>,
    pub(crate) by_vnic: BTreeMap<VnicRef, BTreeSet<Handle>>,
    /// How many identifiers are on a channel.
    channels: BTreeMap<(Owner, EventChannel), u32>,
    /// How many multicast memberships a vNIC has.
    pub(crate) memberships: BTreeMap<VnicRef, u32>,
    pub(crate) ports: Ports,
    pub(crate) resolving: Resolving,
    /// By the own communication id.
    pub(crate) connections: BTreeMap<u32, Connection>,
    /// Connections by the peer's communication id, and by its QPN.
    pub(crate) by_remote_id: BTreeMap<PeerNumber, u32>,
    pub(crate) by_remote_qpn: BTreeMap<PeerNumber, u32>,
    /// SIDR requests by the peer's request id.
    pub(crate) by_request_id: BTreeMap<PeerNumber, u32>,
    pub(crate) half_open: BTreeMap<Peer, u32>,
    orphans: BTreeMap<VnicRef, u32>,
    timers: BTreeSet<(Instant, u32)>,
    pub(crate) messages: [MessageCounts; Kind::COUNT],
    pub(crate) malformed: u64,
    pub(crate) overflows: u64,
    /// The connection that is looked at next when policy has changed.
    pub(crate) policy_next: u32,
    /// So many numbers are to be looked at still; all of them after a change.
    pub(crate) policy_left: u64,
}

impl Machine {
    /// A machine without identifiers.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            ids: Ids::default(),
            by_owner: BTreeMap::new(),
            by_vnic: BTreeMap::new(),
            channels: BTreeMap::new(),
            memberships: BTreeMap::new(),
            ports: Ports::default(),
            resolving: Resolving::default(),
            connections: BTreeMap::new(),
            by_remote_id: BTreeMap::new(),
            by_remote_qpn: BTreeMap::new(),
            by_request_id: BTreeMap::new(),
            half_open: BTreeMap::new(),
            orphans: BTreeMap::new(),
            timers: BTreeSet::new(),
            messages: [MessageCounts::default(); Kind::COUNT],
            malformed: 0,
            overflows: 0,
            policy_next: 0,
            policy_left: 0,
        }
    }

    /// Whether identifiers are on this channel.
    pub fn channel_in_use(&self, owner: Owner, channel: EventChannel) -> bool {
        self.channels.contains_key(&(owner, channel))
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let timer = self.timers.first().map(|(at, _)| *at);
        [timer, self.resolving.poll_timeout()].into_iter().flatten().min()
    }

    /// Looks at everything: for `status`, not for each packet.
    pub fn counts(&self) -> Counts {
        let connections = self.connections.values();
        Counts {
            ids: self.ids.len(),
            listeners: self.ids.iter().filter(|id| id.state == IdState::Listening).count(),
            connections: self.connections.len(),
            established: connections.clone().filter(|connection| connection.state == State::Established).count(),
            half_open: connections.filter(|connection| connection.state.is_half_open()).count(),
            orphans: self.orphans.values().map(|count| *count as usize).sum(),
            messages: self.messages,
            malformed: self.malformed,
            overflows: self.overflows,
        }
    }

    /// Whether nothing is left of anything: no identifier, connection, port, timer or entry of a
    /// table.
    pub fn is_empty(&self) -> bool {
        self.ids.len() == 0
            && self.by_owner.is_empty()
            && self.by_vnic.is_empty()
            && self.channels.is_empty()
            && self.memberships.is_empty()
            && self.ports.is_empty()
            && self.resolving.is_empty()
            && self.connections.is_empty()
            && self.by_remote_id.is_empty()
            && self.by_remote_qpn.is_empty()
            && self.by_request_id.is_empty()
            && self.half_open.is_empty()
            && self.orphans.is_empty()
            && self.timers.is_empty()
    }

    /// An owner is gone: so are its identifiers.
    pub fn destroy_owner<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, owner: Owner) {
        let handles: Vec<_> = self.by_owner.get(&owner).into_iter().flatten().copied().collect();
        for handle in handles {
            self.destroy(env, now, handle);
        }
    }

    /// A vNIC is gone: its identifiers get DeviceRemoval, and wait to be destroyed. Peers are
    /// notified once.
    pub fn destroy_vnic<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, vnic: VnicRef) {
        let handles: Vec<_> = self.by_vnic.get(&vnic).into_iter().flatten().copied().collect();
        for handle in handles {
            let Some(id) = self.ids.get_mut(handle) else { continue };
            if id.state == IdState::Removed {
                continue;
            }
            id.state = IdState::Removed;
            id.requests.clear();
            id.listener = None;
            self.stop_resolving(handle);
            self.leave_groups(handle);
            self.release_port(handle);
            self.end_connection_of(env, now, handle);
            self.notify_owner(env, handle, CmEventKind::DeviceRemoval, 0, CmEventBody::Nothing);
        }
        let rest: Vec<_> = self.connections.iter().filter(|(_, c)| c.vnic == vnic).map(|(number, _)| *number).collect();
        for number in rest {
            self.forget(number);
        }
    }

    /// Nobody answers on this link any more: what waits for an answer gets none. Connections that
    /// stand go on to stand.
    pub fn handle_link_down<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, link: Link) {
        let touched: Vec<_> =
            self.connections.iter().filter(|(_, c)| c.path.link == link).map(|(number, _)| *number).collect();
        for number in touched {
            self.give_up(env, now, number);
        }
    }

    // Identifiers.

    pub(crate) fn id_of(&self, owner: Owner, handle: Handle) -> Result<&Id, VerbsError> {
        self.ids.get(handle).filter(|id| id.owner == owner).ok_or(VerbsError::NotFound)
    }

    pub(crate) fn add_id(&mut self, id: Id) -> Result<Handle, VerbsError> {
        let held = self.by_vnic.get(&id.vnic).map_or(0, BTreeSet::len) as u32;
        let left = self.limits.ids_max.saturating_sub(self.ids.len() as u32);
        if held >= self.limits.ids_per_vnic_max || !keeps_to_its_share(held, left) {
            return Err(VerbsError::NoMemory);
        }
        let (owner, vnic, channel) = (id.owner, id.vnic, id.channel);
        let handle = self.ids.insert(id).ok_or(VerbsError::NoMemory)?;
        self.by_owner.entry(owner).or_default().insert(handle);
        self.by_vnic.entry(vnic).or_default().insert(handle);
        *self.channels.entry((owner, channel)).or_default() += 1;
        Ok(handle)
    }

    /// Ends an identifier, and all that it is in the midst of. Gives the number of its events.
    pub(crate) fn destroy<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, handle: Handle) -> u32 {
        let Some(id) = self.ids.get_mut(handle) else { return 0 };
        for request in core::mem::take(&mut id.requests) {
            self.destroy(env, now, request);
        }
        self.touch(handle);
        self.stop_resolving(handle);
        self.end_connection_of(env, now, handle);
        self.release_port(handle);
        self.leave_groups(handle);
        let id = self.ids.remove(handle).expect("it was there");
        decrement(&mut self.channels, (id.owner, id.channel));
        remove_from(&mut self.by_owner, id.owner, handle);
        remove_from(&mut self.by_vnic, id.vnic, handle);
        id.event_count
    }

    pub(crate) fn change_channel(&mut self, handle: Handle, channel: EventChannel) {
        if let Some(id) = self.ids.get_mut(handle) {
            decrement(&mut self.channels, (id.owner, id.channel));
            id.channel = channel;
            *self.channels.entry((id.owner, channel)).or_default() += 1;
        }
    }

    /// Its program has done something with a request: it does not count for the backlog any more,
    /// nor end with the listener.
    pub(crate) fn touch(&mut self, handle: Handle) {
        let Some(listener) = self.ids.get_mut(handle).and_then(|id| id.listener.take()) else { return };
        if let Some(listener) = self.ids.get_mut(listener) {
            listener.requests.remove(&handle);
        }
    }

    fn release_port(&mut self, handle: Handle) {
        let Some(id) = self.ids.get_mut(handle) else { return };
        if let Some(port_claim) = id.port_claim.take() {
            self.ports.leave(id.port_key(), handle, port_claim);
        }
        if let Some(place) = id.external_port.take() {
            self.ports.release_external(place, id.port_space, id.local.port);
        }
    }

    fn leave_groups(&mut self, handle: Handle) {
        let Some(id) = self.ids.get_mut(handle) else { return };
        for _ in core::mem::take(&mut id.memberships) {
            decrement(&mut self.memberships, id.vnic);
        }
    }

    /// After a change of what the table of ports knows of an identifier.
    pub(crate) fn refresh_port_claim(&mut self, handle: Handle) {
        let Some(id) = self.ids.get_mut(handle) else { return };
        let Some(before) = id.port_claim else { return };
        let port_claim = id.port_claim();
        if port_claim != before {
            id.port_claim = Some(port_claim);
            self.ports.enter(id.port_key(), handle, port_claim);
            self.ports.leave(id.port_key(), handle, before);
        }
    }

    /// An event, if there is somebody who could say whose it is.
    pub(crate) fn notify_owner<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        handle: Handle,
        kind: CmEventKind,
        status: i32,
        body: CmEventBody,
    ) {
        let Some(id) = self.ids.get_mut(handle) else { return };
        if let Some(cookie) = id.cookie {
            id.event_count = id.event_count.saturating_add(1);
            env.notify(id.owner, id.channel, CmEvent { cookie, kind, status, body });
        }
    }

    /// An event of something that is the identifier's.
    pub(crate) fn notify_as<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        handle: Handle,
        cookie: u64,
        kind: CmEventKind,
        body: CmEventBody,
    ) {
        let Some(id) = self.ids.get_mut(handle) else { return };
        id.event_count = id.event_count.saturating_add(1);
        env.notify(id.owner, id.channel, CmEvent { cookie, kind, status: 0, body });
    }

    // Connections.

    /// A new communication id: random, so that strangers can't guess it, and not in use.
    pub(crate) fn new_number<E: Environment + ?Sized>(&self, env: &mut E) -> u32 {
        let mut number = env.random();
        while number == 0 || self.connections.contains_key(&number) {
            number = number.wrapping_add(1);
        }
        number
    }

    pub(crate) fn add_connection(&mut self, number: u32, connection: Connection) {
        if let Some(id) = connection.id.and_then(|handle| self.ids.get_mut(handle)) {
            (id.connection, id.had_connection) = (Some(number), true);
        }
        if connection.state.is_half_open() {
            *self.half_open.entry(connection.path.peer()).or_default() += 1;
        }
        let timer = connection.timer;
        self.connections.insert(number, connection);
        self.timers.extend(timer.map(|at| (at, number)));
    }

    pub(crate) fn set_timer(&mut self, number: u32, at: Option<Instant>) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if let Some(old) = core::mem::replace(&mut connection.timer, at) {
            self.timers.remove(&(old, number));
        }
        self.timers.extend(at.map(|at| (at, number)));
    }

    /// The next connection whose timer is due; its timer is off then.
    pub(crate) fn take_due(&mut self, now: Instant) -> Option<u32> {
        let (at, number) = *self.timers.first()?;
        if at > now {
            return None;
        }
        self.set_timer(number, None);
        Some(number)
    }

    pub(crate) fn become_state(&mut self, number: u32, next: State) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if connection.state.is_half_open() && !next.is_half_open() {
            decrement(&mut self.half_open, connection.path.peer());
        }
        connection.become_state(next);
    }

    /// The identifier that a connection belongs to, if any.
    pub(crate) fn holder(&self, number: u32) -> Option<Handle> {
        self.connections.get(&number)?.id
    }

    /// Nothing is left of a connection.
    pub(crate) fn forget(&mut self, number: u32) {
        self.set_timer(number, None);
        let Some(connection) = self.connections.remove(&number) else { return };
        let path = &connection.path;
        if connection.has_remote_id {
            let table = match connection.state {
                State::ServiceRequested | State::ServiceAnswered => &mut self.by_request_id,
                _ => &mut self.by_remote_id,
            };
            table.remove(&path.number(connection.remote_id));
        }
        if connection.has_remote_qpn {
            self.by_remote_qpn.remove(&path.number(connection.remote_qpn));
        }
        if connection.state.is_half_open() {
            decrement(&mut self.half_open, path.peer());
        }
        match connection.id {
            // A request that its sender took back goes on to count for the backlog: its program has
            // yet to look at it.
            Some(handle) => {
                if let Some(id) = self.ids.get_mut(handle) {
                    id.connection = None;
                }
            }
            None => decrement(&mut self.orphans, connection.vnic),
        }
    }

    /// A connection loses its identifier; it stays as long as it has something to wait for, and
    /// there is room.
    fn orphan(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let Some(handle) = connection.id.take() else { return };
        if let Some(id) = self.ids.get_mut(handle) {
            id.connection = None;
        }
        let count = self.orphans.entry(connection.vnic).or_default();
        *count += 1;
        let needless = connection.path.link == Link::Local && connection.state != State::DisconnectSent;
        if needless || *count > self.limits.orphans_per_vnic_max {
            self.forget(number);
        }
    }

    /// The identifier leaves its connection, in whatever state it is: the other end is notified of
    /// what ends it.
    pub(crate) fn end_connection_of<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, handle: Handle) {
        let Some(number) = self.ids.get(handle).and_then(|id| id.connection) else { return };
        let Some(connection) = self.connections.get(&number) else { return };
        match connection.state {
            State::RequestSent => {
                self.send_withdrawal(env, number);
                self.forget(number);
            }
            State::RequestReceived | State::ReplySent | State::ReplyReceived => {
                let about = self.about(number);
                self.send_reject(env, number, about, reason::CONSUMER_DEFINED, &[]);
                self.leave(env, now, number);
            }
            State::ServiceRequested => {
                self.send_service_refusal(env, number, &[]);
                self.forget(number);
            }
            State::ServiceAsked => self.forget(number),
            State::Established => {
                self.begin_disconnect(env, now, number);
                self.orphan(number);
            }
            State::DisconnectSent | State::TimeWait | State::ServiceAnswered => self.orphan(number),
        }
    }

    /// After a REJ: nothing is left, unless the other end may think that the connection stands.
    /// Nobody answers a REJ, so if it gets lost a DREQ, which is answered, must say the same.
    pub(crate) fn leave<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, number: u32) {
        let Some(connection) = self.connections.get(&number) else { return };
        if connection.state != State::ReplySent || connection.path.link == Link::Local {
            return self.forget(number);
        }
        self.begin_disconnect(env, now, number);
        self.orphan(number);
    }

    /// Message that a REJ from here answers.
    pub(crate) fn about(&self, number: u32) -> About {
        match self.connections.get(&number).map(|connection| connection.state) {
            Some(State::RequestReceived) => About::Req,
            Some(State::ReplyReceived) => About::Rep,
            _ => About::Other,
        }
    }

    pub(crate) fn begin_disconnect<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, number: u32) {
        self.become_state(number, State::DisconnectSent);
        self.send_disconnect(env, now, number);
    }

    /// The connection is over. Its program hears of it, once.
    pub(crate) fn disconnected<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        number: u32,
        status: i32,
    ) {
        let Some(handle) = self.holder(number) else { return self.enter_time_wait(now, number) };
        self.enter_time_wait(now, number);
        let Some(id) = self.ids.get_mut(handle) else { return };
        if id.state == IdState::Connect {
            id.state = IdState::Disconnected;
            self.notify_owner(env, handle, CmEventKind::Disconnected, status, CmEventBody::Nothing);
        }
    }

    fn enter_time_wait(&mut self, now: Instant, number: u32) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if connection.id.is_none() && connection.path.link == Link::Local {
            return self.forget(number);
        }
        connection.become_state(State::TimeWait);
        connection.message = None;
        let wait = self.limits.timing(connection.path.link).time_wait;
        self.set_timer(number, Some(now + wait));
    }

    /// A connection that is being made comes to nothing.
    pub(crate) fn fail<E: Environment + ?Sized>(
        &mut self,
        env: &mut E,
        now: Instant,
        number: u32,
        kind: CmEventKind,
        status: i32,
        body: CmEventBody,
    ) {
        let handle = self.holder(number);
        if kind == CmEventKind::Unreachable {
            self.leave(env, now, number)
        } else {
            self.forget(number)
        }
        if let Some(handle) = handle {
            self.notify_owner(env, handle, kind, status, body);
        }
    }
}

fn remove_from<K: Ord>(sets: &mut BTreeMap<K, BTreeSet<Handle>>, key: K, handle: Handle) {
    if let Some(set) = sets.get_mut(&key) {
        set.remove(&handle);
        if set.is_empty() {
            sets.remove(&key);
        }
    }
}
