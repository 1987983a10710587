//! Identifiers, and their names.
use crate::address::is_ipv4;
use crate::ports::{PortClaim, PortKey};
use crate::{EventChannel, Owner, Route, ScopedGid, VnicRef};
use alloc::boxed::Box;
use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;
use freeflow_protocol::cm::{CmAddress, CmRoute, PortSpace};
use freeflow_protocol::library::Handle;
use freeflow_verbs::{Gid, Instant, QpType};

/// Hops that packets of RoCE v2 may take, as Linux has it.
pub(crate) const HOP_LIMIT: u8 = 64;
/// Time a packet takes at most, as Linux has it for RoCE: 4.096 us * 2^18.
pub(crate) const PACKET_LIFE_TIME: u8 = 18;

/// Where an identifier is on its way (`enum rdma_cm_state` of Linux). Which call is right in which
/// state, each call says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdState {
    Idle,
    Bound,
    /// Its destination is not known yet; somebody may announce it.
    AddressQuery,
    AddressResolved,
    RouteQuery,
    RouteResolved,
    Listening,
    /// From the request on, whatever comes of it: a second try wants another identifier.
    Connect,
    Disconnected,
    /// Its vNIC is gone. All it can do is end.
    Removed,
}

pub(crate) struct Id {
    pub owner: Owner,
    pub vnic: VnicRef,
    pub channel: EventChannel,
    /// `None`: a request that its program has not accepted. It gets no events, for nobody
    /// could say whose they are.
    pub cookie: Option<u64>,
    pub port_space: PortSpace,
    pub qp_type: QpType,
    pub state: IdState,
    pub reuse_address: bool,
    pub af_only: Option<bool>,
    pub type_of_service: Option<u8>,
    pub ack_timeout: Option<u8>,
    /// Wildcard or one of the vNIC's addresses.
    pub local: CmAddress,
    pub remote: CmAddress,
    /// Its claim in the table of ports, if it has a port.
    pub port_claim: Option<PortClaim>,
    /// The external address where its port is reserved.
    pub external_port: Option<ScopedGid>,
    pub route: Option<Route>,
    /// Until when it waits for its destination, if it does.
    pub resolves_until: Option<Instant>,
    /// Of a request: what its sender asks for.
    pub traffic_class: u8,
    pub flow_label: u32,
    /// PSN that its QP expects first.
    pub psn: u32,
    pub qkey: u32,
    /// Its connection, by the communication id.
    pub connection: Option<u32>,
    /// It had one, ever.
    pub had_connection: bool,
    pub event_count: u32,
    pub memberships: Vec<(Gid, u64)>,
    pub backlog: u32,
    /// Of a listener: requests that nobody has touched.
    pub requests: BTreeSet<Handle>,
    /// Of such a request: the listener.
    pub listener: Option<Handle>,
}

impl Id {
    pub fn new(owner: Owner, vnic: VnicRef, channel: EventChannel, port_space: PortSpace, qp_type: QpType) -> Self {
        Self {
            owner,
            vnic,
            channel,
            cookie: None,
            port_space,
            qp_type,
            state: IdState::Idle,
            reuse_address: false,
            af_only: None,
            type_of_service: None,
            ack_timeout: None,
            local: CmAddress::default(),
            remote: CmAddress::default(),
            port_claim: None,
            external_port: None,
            route: None,
            resolves_until: None,
            traffic_class: 0,
            flow_label: 0,
            psn: 0,
            qkey: 0,
            connection: None,
            had_connection: false,
            event_count: 0,
            memberships: Vec::new(),
            backlog: 0,
            requests: BTreeSet::new(),
            listener: None,
        }
    }

    /// Its claim on its port, as it is now.
    pub fn port_claim(&self) -> PortClaim {
        PortClaim {
            gid: self.local.gid,
            af_only: self.is_af_only(self.local.gid),
            reuse: self.reuse_address,
            listening: self.state == IdState::Listening,
        }
    }

    /// Whether it is there for its own address family alone: always so at IPv4 addresses, at IPv6
    /// ones if it asked for it.
    pub fn is_af_only(&self, gid: Gid) -> bool {
        self.af_only.unwrap_or(is_ipv4(gid))
    }

    pub fn port_key(&self) -> PortKey {
        (self.vnic, self.port_space, self.local.port)
    }

    /// Time a packet takes, so that the local ACK timeout comes out as asked for.
    pub fn packet_life_time(&self) -> u8 {
        self.ack_timeout.map_or(PACKET_LIFE_TIME, |timeout| timeout.saturating_sub(1))
    }

    pub fn cm_route(&self) -> Option<CmRoute> {
        let route = self.route?;
        Some(CmRoute {
            local: self.local,
            remote: self.remote,
            gid_index: route.gid_index,
            mtu: route.mtu,
            hop_limit: HOP_LIMIT,
            traffic_class: self.type_of_service.unwrap_or(self.traffic_class),
            packet_life_time: self.packet_life_time(),
        })
    }
}

const SLOT_BITS: u32 = 20;
const SLOT_COUNT_MAX: usize = 1 << SLOT_BITS;
const GENERATION_MAX: u32 = (1 << (32 - SLOT_BITS)) - 1;

struct Slot {
    generation: u32,
    id: Option<Box<Id>>,
}

/// All identifiers. A handle is a slot and its generation, so that an old handle names nothing for
/// long.
#[derive(Default)]
pub(crate) struct Ids {
    slots: Vec<Slot>,
    free: VecDeque<u32>,
    count: usize,
}

impl Ids {
    pub fn len(&self) -> usize {
        self.count
    }

    fn split(handle: Handle) -> (usize, u32) {
        ((handle & (SLOT_COUNT_MAX as u32 - 1)) as usize, handle >> SLOT_BITS)
    }

    /// `None`: there are too many.
    pub fn insert(&mut self, id: Id) -> Option<Handle> {
        let slot = match self.free.pop_front() {
            Some(slot) => slot,
            None if self.slots.len() < SLOT_COUNT_MAX => {
                self.slots.push(Slot { generation: 1, id: None });
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        self.count += 1;
        let entry = &mut self.slots[slot as usize];
        entry.id = Some(Box::new(id));
        Some(entry.generation << SLOT_BITS | slot)
    }

    pub fn get(&self, handle: Handle) -> Option<&Id> {
        let (slot, generation) = Self::split(handle);
        self.slots.get(slot).filter(|entry| entry.generation == generation)?.id.as_deref()
    }

    pub fn get_mut(&mut self, handle: Handle) -> Option<&mut Id> {
        let (slot, generation) = Self::split(handle);
        self.slots.get_mut(slot).filter(|entry| entry.generation == generation)?.id.as_deref_mut()
    }

    pub fn remove(&mut self, handle: Handle) -> Option<Id> {
        let (slot, generation) = Self::split(handle);
        let entry = self.slots.get_mut(slot).filter(|entry| entry.generation == generation)?;
        let id = entry.id.take()?;
        entry.generation = if generation == GENERATION_MAX { 1 } else { generation + 1 };
        self.free.push_back(slot as u32);
        self.count -= 1;
        Some(*id)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Id> {
        self.slots.iter().filter_map(|entry| entry.id.as_deref())
    }
}
