//! Objects that each context owns, so that closing one can destroy those that the program left in
//! it, as the kernel does for a NIC.
//!
//! Kept by looking at the control calls that succeeded.
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_verbs::{Gid, VerbsError};
use std::collections::{BTreeMap, BTreeSet};

/// Kinds of objects, in the order in which they can be destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Qp,
    Srq,
    Cq,
    Channel,
    Ah,
    Mw,
    Mr,
    /// Device memory.
    Segment,
    Pd,
    Xrcd,
}

/// Objects that the contexts of a session own.
#[derive(Debug, Default)]
pub(crate) struct OwnedObjects {
    /// With the context that owns it.
    objects: BTreeMap<(Kind, Handle), Handle>,
    /// QPs, and the multicast groups that keep them from being destroyed.
    groups: BTreeSet<(Handle, Gid)>,
    /// Device memory that this process allocated, bytes of each.
    device_memory: BTreeMap<Handle, u64>,
    /// All of it together, with what is being allocated.
    device_memory_bytes: u64,
}

impl OwnedObjects {
    /// Takes note of a call that succeeded.
    pub fn note(&mut self, request: &Request, reply: &Reply) {
        let made = match (request, reply) {
            (Request::CreateChannel { context }, Reply::Channel { channel }) => {
                Some((Kind::Channel, channel, *context))
            }
            (Request::AllocPd { context } | Request::ImportPd { context, .. }, Reply::Pd { pd }) => {
                Some((Kind::Pd, pd, *context))
            }
            (Request::ImportSegment { context, .. }, Reply::Segment { segment, .. }) => {
                Some((Kind::Segment, segment, *context))
            }
            (Request::OpenXrcd { context, .. }, Reply::Xrcd { xrcd }) => Some((Kind::Xrcd, xrcd, *context)),
            (Request::CreateCq { context, .. }, Reply::Cq { cq, .. }) => Some((Kind::Cq, cq, *context)),
            (Request::RegisterMr { pd, .. } | Request::AllocNullMr { pd }, Reply::Mr { mr, .. })
            | (Request::ImportMr { pd, .. }, Reply::ImportedMr { mr, .. }) => self.under((Kind::Pd, *pd), Kind::Mr, mr),
            (Request::AllocMw { pd, .. }, Reply::Mw { mw, .. }) => self.under((Kind::Pd, *pd), Kind::Mw, mw),
            (Request::CreateSrq { pd, .. }, Reply::Srq { srq, .. }) => self.under((Kind::Pd, *pd), Kind::Srq, srq),
            (Request::CreateQp { pd: Some(pd), .. }, Reply::Qp { qp, .. }) => self.under((Kind::Pd, *pd), Kind::Qp, qp),
            (
                Request::CreateQp { pd: None, xrcd: Some(xrcd), .. } | Request::OpenQp { xrcd, .. },
                Reply::Qp { qp, .. },
            ) => self.under((Kind::Xrcd, *xrcd), Kind::Qp, qp),
            (Request::CreateAh { pd, .. }, Reply::AddressHandle { ah }) => self.under((Kind::Pd, *pd), Kind::Ah, ah),
            _ => None,
        };
        if let Some((kind, handle, context)) = made {
            self.objects.insert((kind, *handle), context);
        }
        match request {
            Request::AttachMulticast { qp, gid } => _ = self.groups.insert((*qp, *gid)),
            Request::DetachMulticast { qp, gid } => _ = self.groups.remove(&(*qp, *gid)),
            _ => {}
        }
        let gone = match request {
            Request::DestroyQp { qp } => (Kind::Qp, *qp),
            Request::DestroySrq { srq } => (Kind::Srq, *srq),
            Request::DestroyCq { cq } => (Kind::Cq, *cq),
            Request::DestroyChannel { channel } => (Kind::Channel, *channel),
            Request::DestroyAh { ah } => (Kind::Ah, *ah),
            Request::DeallocMw { mw } => (Kind::Mw, *mw),
            Request::DeregisterMr { mr } => (Kind::Mr, *mr),
            Request::DestroySegment { segment } => {
                self.device_memory_bytes -= self.device_memory.remove(segment).unwrap_or(0);
                (Kind::Segment, *segment)
            }
            Request::DeallocPd { pd } => (Kind::Pd, *pd),
            Request::CloseXrcd { xrcd } => (Kind::Xrcd, *xrcd),
            _ => return,
        };
        self.objects.remove(&gone);
    }

    /// Sets a part of the device memory that this process may have aside. NoMemory: so much is not
    /// left.
    pub fn reserve_device_memory(&mut self, bytes: u64, limit: u64) -> Result<(), VerbsError> {
        let after = self.device_memory_bytes.checked_add(bytes).filter(|after| *after <= limit);
        self.device_memory_bytes = after.ok_or(VerbsError::NoMemory)?;
        Ok(())
    }

    /// Nothing came of it.
    pub fn unreserve_device_memory(&mut self, bytes: u64) {
        self.device_memory_bytes -= bytes;
    }

    /// Takes note of device memory that a part was set aside for, and of its context if that is of
    /// this session.
    pub fn note_device_memory(&mut self, segment: Handle, context: Option<Handle>, bytes: u64) {
        self.device_memory.insert(segment, bytes);
        if let Some(context) = context {
            self.objects.insert((Kind::Segment, segment), context);
        }
    }

    /// An object made within a PD or an XRC domain belongs to that one's context.
    fn under<'a>(&self, parent: (Kind, Handle), kind: Kind, handle: &'a Handle) -> Option<(Kind, &'a Handle, Handle)> {
        self.objects.get(&parent).map(|context| (kind, handle, *context))
    }

    /// The requests that destroy what a context still owns, in an order that works.
    pub fn removal_requests(&self, context: Handle) -> Vec<Request> {
        let owned = self.objects.iter().filter(|(_, owner)| **owner == context);
        let attached = self.groups.iter().filter(|(qp, _)| self.objects.get(&(Kind::Qp, *qp)) == Some(&context));
        attached
            .map(|&(qp, gid)| Request::DetachMulticast { qp, gid })
            .chain(owned.map(|(&(kind, handle), _)| match kind {
                Kind::Qp => Request::DestroyQp { qp: handle },
                Kind::Srq => Request::DestroySrq { srq: handle },
                Kind::Cq => Request::DestroyCq { cq: handle },
                Kind::Channel => Request::DestroyChannel { channel: handle },
                Kind::Ah => Request::DestroyAh { ah: handle },
                Kind::Mw => Request::DeallocMw { mw: handle },
                Kind::Mr => Request::DeregisterMr { mr: handle },
                Kind::Segment => Request::DestroySegment { segment: handle },
                Kind::Pd => Request::DeallocPd { pd: handle },
                Kind::Xrcd => Request::CloseXrcd { xrcd: handle },
            }))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_goes_in_order_and_only_from_its_own_context() {
        let mut owned_objects = OwnedObjects::default();
        for context in [1, 2] {
            let pd = 10 + context;
            owned_objects.note(&Request::AllocPd { context }, &Reply::Pd { pd });
            let attributes = Default::default();
            owned_objects.note(&Request::CreateAh { pd, attributes }, &Reply::AddressHandle { ah: 20 + context });
            let request = Request::CreateCq { context, cqe: 1, channel: None, cookie: 0, timestamps: false };
            owned_objects.note(&request, &Reply::Cq { cq: 30 + context, cqe: 1, segment_bytes: 0 });
        }
        owned_objects.note(&Request::DestroyAh { ah: 22 }, &Reply::Done);
        let destroy_cq = |cq| Request::DestroyCq { cq };
        let dealloc_pd = |pd| Request::DeallocPd { pd };
        assert_eq!(owned_objects.removal_requests(1), [destroy_cq(31), Request::DestroyAh { ah: 21 }, dealloc_pd(11)]);
        assert_eq!(owned_objects.removal_requests(2), [destroy_cq(32), dealloc_pd(12)]);
    }

    #[test]
    fn members_leave_their_groups_first() {
        let mut owned_objects = OwnedObjects::default();
        owned_objects.note(
            &Request::OpenXrcd { context: 1, file: None, flags: freeflow_verbs::XrcdOpenFlags::CREATE },
            &Reply::Xrcd { xrcd: 5 },
        );
        let qp = Reply::Qp { qp: 6, qpn: 7, capabilities: Default::default(), segment_bytes: 0 };
        owned_objects.note(&Request::OpenQp { xrcd: 5, qpn: 7, cookie: 0 }, &qp);
        let (gid, other) = (Gid([1; 16]), Gid([2; 16]));
        owned_objects.note(&Request::AttachMulticast { qp: 6, gid }, &Reply::Done);
        owned_objects.note(&Request::AttachMulticast { qp: 6, gid: other }, &Reply::Done);
        owned_objects.note(&Request::DetachMulticast { qp: 6, gid: other }, &Reply::Done);
        let goodbye =
            [Request::DetachMulticast { qp: 6, gid }, Request::DestroyQp { qp: 6 }, Request::CloseXrcd { xrcd: 5 }];
        assert_eq!(owned_objects.removal_requests(1), goodbye);
        assert!(owned_objects.removal_requests(2).is_empty());
    }
}
