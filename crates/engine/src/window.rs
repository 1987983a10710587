//! A memory window: its key, its binding, and the lists that it stands in.
//!
//! Invariant: a bound window stands in two lists, its region's and, if it is of type 2, its QP's.
use crate::keys::{KeyFault, NOWHERE, Reach, offset_within};
use crate::slab::{Owned, Slab};
use crate::{MwId, PdId, QpId, SessionId, Span, SpanRegion};
use alloc::vec::Vec;
use freeflow_verbs::{Access, WindowKind};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub(crate) struct MemoryWindow {
    pub session: SessionId,
    pub pd: PdId,
    pub kind: WindowKind,
    /// The whole number; it opens nothing unless the window is bound.
    pub key: u32,
    /// Pending copies that came through it.
    pub in_flight: u32,
    pub state: WindowState,
    pub links: [Link; 2],
    /// QPs whose request waits until no copy uses it.
    pub waiters: Vec<QpId>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) enum WindowState {
    Free,
    Bound(Binding),
    /// Its key is invalid; it is free once the last copy has completed.
    Leaving(Binding),
}

/// The part of its region that a window shows.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Binding {
    /// Index; a region stays while windows are bound to it.
    pub region: u32,
    pub memory: SessionId,
    /// In the process.
    pub address: u64,
    /// As requests name it.
    pub iova: u64,
    pub last: u64,
    pub access: Access,
    /// Type 2.
    pub queue_pair: Option<QpId>,
}

/// Neighbours in a list.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Link {
    pub before: u32,
    pub after: u32,
}

#[derive(Clone, Copy)]
pub(crate) enum Chain {
    Region = 0,
    QueuePair = 1,
}

impl Owned for MemoryWindow {
    fn session(&self) -> SessionId {
        self.session
    }
}

impl MemoryWindow {
    pub fn new(session: SessionId, pd: PdId, kind: WindowKind) -> Self {
        let links = [Link { before: NOWHERE, after: NOWHERE }; 2];
        let state = WindowState::Free;
        Self { session, pd, kind, key: 0, in_flight: 0, state, links, waiters: Vec::new() }
    }

    pub fn admits(&self, key: u32, reach: Reach, needed: Access) -> bool {
        self.opened(key, reach, needed).is_some()
    }

    /// The binding that a key opens to a message at this QP with these rights.
    pub fn opened(&self, key: u32, reach: Reach, needed: Access) -> Option<&Binding> {
        let WindowState::Bound(binding) = &self.state else { return None };
        let reaches = self.pd == reach.pd && binding.queue_pair.is_none_or(|own| own == reach.responder);
        (self.key == key && reaches && binding.access.contains(needed)).then_some(binding)
    }

    /// As of a region that is not registered on demand.
    #[inline(never)]
    pub fn span(&self, key: u32, reach: Reach, range: (u64, u32), needed: Access) -> Result<Span, KeyFault> {
        let binding = self.opened(key, reach, needed).ok_or(KeyFault)?;
        let offset = offset_within(binding.iova, binding.last, range.0, u64::from(range.1))?;
        let address = binding.address.wrapping_add(offset);
        let region = SpanRegion::new(binding.region, false);
        Ok(Span { session: binding.memory, region, address, length: range.1 })
    }
}

pub(crate) fn push(windows: &mut Slab<MwId, MemoryWindow>, head: &mut u32, chain: Chain, index: u32) {
    let after = core::mem::replace(head, index);
    if let Some(window) = windows.at_mut(after) {
        window.links[chain as usize].before = index;
    }
    if let Some(window) = windows.at_mut(index) {
        window.links[chain as usize] = Link { before: NOWHERE, after };
    }
}

pub(crate) fn pull(windows: &mut Slab<MwId, MemoryWindow>, head: &mut u32, chain: Chain, index: u32) {
    let Some(window) = windows.at_mut(index) else { return };
    let Link { before, after } = window.links[chain as usize];
    match windows.at_mut(before) {
        Some(window) => window.links[chain as usize].after = after,
        None => *head = after,
    }
    if let Some(window) = windows.at_mut(after) {
        window.links[chain as usize].before = before;
    }
}
