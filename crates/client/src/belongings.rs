//! What each context owns, so that closing one can destroy what the program left in it, as the kernel does for a NIC.
//!
//! Kept by looking at the control calls that succeeded.
use freeflow_protocol::library::{Handle, Reply, Request};
use std::collections::BTreeMap;

/// Kinds of objects, in the order in which they can be destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Qp,
    Srq,
    Cq,
    Channel,
    Ah,
    Mr,
    Pd,
}

/// Every object that a context owns, with that context.
#[derive(Debug, Default)]
pub(crate) struct Belongings(BTreeMap<(Kind, Handle), Handle>);

impl Belongings {
    /// Takes note of a call that succeeded.
    pub fn note(&mut self, request: &Request, reply: &Reply) {
        let made = match (request, reply) {
            (Request::CreateChannel { context }, Reply::Channel { channel }) => {
                Some((Kind::Channel, channel, *context))
            }
            (Request::AllocPd { context }, Reply::Pd { pd }) => Some((Kind::Pd, pd, *context)),
            (Request::CreateCq { context, .. }, Reply::Cq { cq, .. }) => Some((Kind::Cq, cq, *context)),
            (Request::RegisterMr { pd, .. }, Reply::Mr { mr, .. }) => self.under(*pd, Kind::Mr, mr),
            (Request::CreateSrq { pd, .. }, Reply::Srq { srq, .. }) => self.under(*pd, Kind::Srq, srq),
            (Request::CreateQp { pd, .. }, Reply::Qp { qp, .. }) => self.under(*pd, Kind::Qp, qp),
            (Request::CreateAh { pd, .. }, Reply::AddressHandle { ah }) => self.under(*pd, Kind::Ah, ah),
            _ => None,
        };
        if let Some((kind, handle, context)) = made {
            self.0.insert((kind, *handle), context);
        }
        let gone = match request {
            Request::DestroyQp { qp } => (Kind::Qp, *qp),
            Request::DestroySrq { srq } => (Kind::Srq, *srq),
            Request::DestroyCq { cq } => (Kind::Cq, *cq),
            Request::DestroyChannel { channel } => (Kind::Channel, *channel),
            Request::DestroyAh { ah } => (Kind::Ah, *ah),
            Request::DeregisterMr { mr } => (Kind::Mr, *mr),
            Request::DeallocPd { pd } => (Kind::Pd, *pd),
            _ => return,
        };
        self.0.remove(&gone);
    }

    fn under<'a>(&self, pd: Handle, kind: Kind, handle: &'a Handle) -> Option<(Kind, &'a Handle, Handle)> {
        self.0.get(&(Kind::Pd, pd)).map(|context| (kind, handle, *context))
    }

    /// The requests that destroy what a context still owns, in an order that works.
    pub fn farewell(&self, context: Handle) -> Vec<Request> {
        let owned = self.0.iter().filter(|(_, owner)| **owner == context);
        owned
            .map(|(&(kind, handle), _)| match kind {
                Kind::Qp => Request::DestroyQp { qp: handle },
                Kind::Srq => Request::DestroySrq { srq: handle },
                Kind::Cq => Request::DestroyCq { cq: handle },
                Kind::Channel => Request::DestroyChannel { channel: handle },
                Kind::Ah => Request::DestroyAh { ah: handle },
                Kind::Mr => Request::DeregisterMr { mr: handle },
                Kind::Pd => Request::DeallocPd { pd: handle },
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_goes_in_order_and_only_from_its_own_context() {
        let mut belongings = Belongings::default();
        for context in [1, 2] {
            let pd = 10 + context;
            belongings.note(&Request::AllocPd { context }, &Reply::Pd { pd });
            let attributes = Default::default();
            belongings.note(&Request::CreateAh { pd, attributes }, &Reply::AddressHandle { ah: 20 + context });
            let request = Request::CreateCq { context, cqe: 1, channel: None, cookie: 0 };
            belongings.note(&request, &Reply::Cq { cq: 30 + context, cqe: 1, segment_bytes: 0 });
        }
        belongings.note(&Request::DestroyAh { ah: 22 }, &Reply::Done);
        let destroy_cq = |cq| Request::DestroyCq { cq };
        let dealloc_pd = |pd| Request::DeallocPd { pd };
        assert_eq!(belongings.farewell(1), [destroy_cq(31), Request::DestroyAh { ah: 21 }, dealloc_pd(11)]);
        assert_eq!(belongings.farewell(2), [destroy_cq(32), dealloc_pd(12)]);
    }
}
